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
async fn engines_that_only_break_off_are_given_up() {
    let home = tempfile::tempdir().unwrap();
    let (gate, sessions) = gated(&home, true, Settings::default());
    gate.let_in.add_permits(1000);
    let said = sessions.ask("s", ask(&[user("Hi")])).await;
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
