//! Clients that go away, engines that break off, and waits that end.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use driftless_agent::Sessions;
use driftless_agent::message::{Converse as _, Refusal};
use driftless_agent::sessions::{Draw, Settings};
use driftless_bridge::engine::Finish;
use driftless_bridge::{Generation, SamplingParams};
use tokio::sync::Semaphore;

use crate::basic;
use crate::toy::{self, Script, ask, user};

/// Draws once it is let.
struct Gate {
    script: Script,
    begun: Semaphore,
    let_in: Semaphore,
    is_broken: bool,
}

#[async_trait]
impl Draw for Gate {
    async fn draw(
        &self,
        session: &str,
        nth: u64,
        ids: Vec<i32>,
        sampling: SamplingParams,
    ) -> Result<Generation, Refusal> {
        self.begun.add_permits(1);
        self.let_in.acquire().await.unwrap().forget();
        let mut made = self.script.draw(session, nth, ids, sampling).await?;
        if self.is_broken {
            let message = "an update".to_owned();
            made = Generation { output_ids: vec![], log_probs: vec![], spans: vec![], ..made };
            made.finish = Finish::Abort { message };
        }
        Ok(made)
    }
}

fn gated(home: &tempfile::TempDir, is_broken: bool, settings: Settings) -> (Arc<Gate>, Sessions<Arc<Gate>>) {
    let (begun, let_in) = (Semaphore::new(0), Semaphore::new(0));
    let gate = Arc::new(Gate { script: Script::new("qwen3", &[]), begun, let_in, is_broken });
    let settings = Settings { visitors: Some(basic::opening()), ..settings };
    let journal = home.path().join("journal");
    let sessions = Sessions::open_journal(&journal, toy::family("qwen3"), gate.clone(), settings);
    (gate, sessions.unwrap())
}

#[tokio::test]
async fn a_client_that_goes_away_finds_its_answer() {
    let home = tempfile::tempdir().unwrap();
    let (gate, sessions) = gated(&home, false, Settings { asks: 2, ..Settings::default() });
    let asked = || sessions.ask("s", ask(&[user("Hi")]));
    tokio::select! {
        _ = asked() => unreachable!("nothing is drawn yet"),
        begun = gate.begun.acquire() => begun.unwrap().forget(),
    }
    // The one that was left and one more are all that the session takes.
    let (again, refused) = tokio::join!(asked(), async {
        let refused = asked().await;
        gate.let_in.add_permits(1);
        refused
    });
    assert!(matches!(refused, Err(Refusal::Busy(_))), "{refused:?}");
    assert_eq!(again.unwrap().message.content, "Yes.");
    assert_eq!(gate.script.drawn.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn asks_of_a_session_are_drawn_side_by_side() {
    let home = tempfile::tempdir().unwrap();
    let (gate, sessions) = gated(&home, false, Settings::default());
    let asked = |text: &str| sessions.ask("s", ask(&[user(text)]));
    // Nothing is drawn to its end before three have begun, of which two are the same.
    let let_in = async {
        gate.begun.acquire_many(3).await.unwrap().forget();
        gate.let_in.add_permits(4);
    };
    let (a, b, again, c, ()) = tokio::join!(asked("a"), asked("b"), asked("a"), asked("c"), let_in);
    assert_eq!(a, again);
    assert!([a, b, c].iter().all(Result::is_ok));
    assert_eq!((gate.script.drawn.lock().unwrap().len(), gate.begun.available_permits()), (3, 0));
    assert_eq!(sessions.samples("s", false, usize::MAX).await.unwrap().len(), 3);
}

#[tokio::test]
async fn samples_have_what_was_being_drawn() {
    let home = tempfile::tempdir().unwrap();
    let (gate, sessions) = gated(&home, false, Settings::default());
    let read = async {
        gate.begun.acquire().await.unwrap().forget();
        let samples = sessions.samples("s", false, usize::MAX);
        let (samples, ()) = tokio::join!(samples, async { gate.let_in.add_permits(1) });
        samples.unwrap().len()
    };
    let (said, count) = tokio::join!(sessions.ask("s", ask(&[user("Hi")])), read);
    assert_eq!((said.is_ok(), count), (true, 1));
}

#[tokio::test]
async fn a_session_that_is_closed_forgets_what_is_being_drawn() {
    let home = tempfile::tempdir().unwrap();
    let (gate, sessions) = gated(&home, false, Settings::default());
    let close = async {
        gate.begun.acquire().await.unwrap().forget();
        sessions.close("s").await.unwrap();
        gate.let_in.add_permits(1);
    };
    let (said, ()) = tokio::join!(sessions.ask("s", ask(&[user("Hi")])), close);
    assert!(matches!(said, Err(Refusal::Over(_))), "{said:?}");
    drop(sessions);
    // No turn is behind the end, where a journal would not be read.
    let sessions = basic::reopened(&home, "qwen3", &Arc::new(Script::new("qwen3", &[])));
    assert!(matches!(sessions.ask("s", ask(&[user("Hi")])).await, Err(Refusal::Over(_))));
}

#[tokio::test]
async fn engines_that_only_break_off_are_given_up() {
    let home = tempfile::tempdir().unwrap();
    let (gate, sessions) = gated(&home, true, Settings::default());
    gate.let_in.add_permits(1000);
    let asked = || sessions.ask("s", ask(&[user("Hi")]));
    // Who waited for the first one's tokens has its own drawn.
    let (said, again) = tokio::join!(asked(), asked());
    assert_eq!((&said, gate.begun.available_permits()), (&again, 2 * 17));
    assert!(matches!(&said, Err(Refusal::Busy(why)) if why.contains("in a row")), "{said:?}");
    assert!(sessions.samples("s", true, usize::MAX).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_draw_that_never_ends_is_given_up_and_drawn_again() {
    let home = tempfile::tempdir().unwrap();
    let settings = Settings { deadline: Duration::from_millis(50), ..Settings::default() };
    let (_gate, sessions) = gated(&home, false, settings);
    let said = sessions.ask("s", ask(&[user("Hi")])).await;
    assert!(matches!(&said, Err(Refusal::Busy(why)) if why.contains("in time")), "{said:?}");
    drop(sessions);
    let script = Arc::new(Script::new("qwen3", &[]));
    let sessions = basic::reopened(&home, "qwen3", &script);
    assert_eq!(sessions.ask("s", ask(&[user("Hi")])).await.unwrap().message.content, "Yes.");
}
