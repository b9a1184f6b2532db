//! Sessions that nobody asks for, by a clock of the test.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use driftless_agent::Sessions;
use driftless_agent::message::{Converse as _, Refusal};
use driftless_agent::sessions::{Clock, Settings};

use crate::basic;
use crate::toy::{self, Script, ask, user};

/// Seconds between two asks, and in the journal.
const IDLE: u64 = 10;
const KEPT: u64 = 100;

/// Sessions over one journal, opened again as the last ones end.
struct Room {
    home: tempfile::TempDir,
    script: Arc<Script>,
    now: Arc<AtomicU64>,
}

impl Room {
    fn new() -> Self {
        let script = Arc::new(Script::new("qwen3", &[]));
        Room { home: tempfile::tempdir().unwrap(), script, now: Arc::new(AtomicU64::new(1000)) }
    }

    fn journal(&self) -> std::path::PathBuf {
        self.home.path().join("journal")
    }

    /// Its writer, and a look that is under way, end a moment after the sessions.
    async fn open(&self, all: bool) -> Sessions<Arc<Script>> {
        let now = self.now.clone();
        let settings = Settings {
            sessions: 2,
            idle: Duration::from_secs(IDLE),
            kept: Duration::from_secs(KEPT),
            all,
            clock: Clock::new(move || now.load(Ordering::Relaxed)),
            visitors: Some(basic::opening()),
            ..Settings::default()
        };
        let open = |journal: &Path| {
            Sessions::open_journal(journal, toy::family("qwen3"), self.script.clone(), settings.clone())
        };
        loop {
            match open(&self.journal()) {
                Ok(sessions) => return sessions,
                Err(error) => assert!(error.to_string().contains("another process"), "{error}"),
            }
            tokio::task::yield_now().await;
        }
    }

    fn pass(&self, seconds: u64) {
        self.now.fetch_add(seconds, Ordering::Relaxed);
    }
}

async fn hi(sessions: &Sessions<Arc<Script>>, name: &str) -> Result<(), Refusal> {
    sessions.ask(name, ask(&[user("Hi")])).await.map(drop)
}

fn is_over(said: &Result<(), Refusal>) -> bool {
    matches!(said, Err(Refusal::Over(_)))
}

#[tokio::test]
async fn idle_sessions_leave_memory_and_later_the_journal() {
    let room = Room::new();
    let sessions = room.open(false).await;
    for name in ["a", "b"] {
        hi(&sessions, name).await.unwrap();
    }
    room.pass(IDLE);
    assert!(matches!(hi(&sessions, "c").await, Err(Refusal::Busy(_))), "both may still be asked for");
    sessions.ask("b", ask(&[user("Again")])).await.unwrap();
    room.pass(1);
    hi(&sessions, "c").await.unwrap();
    assert_eq!(sessions.names(), ["b", "c"]);
    assert!(is_over(&hi(&sessions, "a").await));
    drop(sessions);
    // A start knows of all three, and so does an export, which has what was said.
    let sessions = room.open(false).await;
    assert_eq!(sessions.names(), ["b", "c"]);
    assert!(is_over(&hi(&sessions, "a").await));
    drop(sessions);
    room.pass(KEPT + 1);
    let sessions = room.open(true).await;
    assert_eq!(sessions.names(), ["a", "b", "c"]);
    assert_eq!(sessions.samples("a", false, usize::MAX).await.unwrap().len(), 1);
    drop(sessions);
    let before = records(&room);
    let sessions = room.open(false).await;
    assert!(sessions.names().is_empty());
    assert!(before > 0 && records(&room) == 0, "{before}");
    hi(&sessions, "a").await.unwrap();
    assert_eq!(room.script.drawn.lock().unwrap().len(), 5, "another session of that name");
}

/// Two names of sessions that ended are known; an older one is given again.
#[tokio::test]
async fn an_export_has_the_sessions_whose_name_was_given_again() {
    let room = Room::new();
    let sessions = room.open(false).await;
    for name in ["a", "b", "c", "d", "a"] {
        hi(&sessions, name).await.unwrap();
        room.pass(IDLE + 1);
    }
    drop(sessions);
    let sessions = room.open(true).await;
    assert_eq!(sessions.names(), ["a", "a~1", "b", "c", "d"]);
    for name in sessions.names() {
        assert_eq!(sessions.samples(&name, false, usize::MAX).await.unwrap().len(), 1, "{name}");
    }
}

/// How often the journal names what was drawn.
fn records(room: &Room) -> usize {
    let bytes = std::fs::read(room.journal()).unwrap();
    bytes.windows(10).filter(|window| window == b"\"session\":").count()
}

#[tokio::test]
async fn the_time_between_two_asks_goes_on_over_a_restart() {
    let room = Room::new();
    let sessions = room.open(false).await;
    hi(&sessions, "a").await.unwrap();
    drop(sessions);
    room.pass(IDLE);
    let sessions = room.open(false).await;
    hi(&sessions, "a").await.unwrap();
    drop(sessions);
    room.pass(1);
    // The ask before was a retry, of which the journal knows nothing.
    assert!(is_over(&hi(&room.open(false).await, "a").await));
}

#[tokio::test]
async fn idle_sessions_leave_beside_those_that_are_asked_for() {
    let room = Room::new();
    let sessions = room.open(false).await;
    hi(&sessions, "a").await.unwrap();
    room.pass(IDLE);
    hi(&sessions, "b").await.unwrap();
    room.pass(1);
    hi(&sessions, "b").await.unwrap();
    while sessions.names() != ["b"] {
        tokio::task::yield_now().await;
    }
    sessions.close("b").await.unwrap();
    assert!(is_over(&hi(&sessions, "b").await));
}
