//! What is trained of a session.

use std::sync::Arc;

use driftless_agent::Sessions;
use driftless_agent::message::{Ask, Converse as _, Message, Refusal, Role};
use driftless_agent::session::{Sample, Thoughts};
use driftless_agent::sessions::Settings;
use driftless_bridge::SamplingParams;

use crate::basic;
use crate::toy::{self, Script, ask, message, user};

async fn say(sessions: &Sessions<Arc<Script>>, talk: &mut Vec<Message>, next: &str) {
    talk.push(user(next));
    talk.push(sessions.ask("s", ask(talk)).await.unwrap().message);
}

/// How many turns each sample has, and how many of its tokens are trained.
fn shape(samples: &[Sample]) -> Vec<(usize, usize)> {
    let trained = |sample: &Sample| sample.loss_mask.iter().filter(|mask| **mask == 1).count();
    samples.iter().map(|sample| (sample.turns, trained(sample))).collect()
}

#[tokio::test]
async fn subagent_and_compaction_are_samples_and_titles_none() {
    let home = tempfile::tempdir().unwrap();
    let script = Arc::new(Script::new("qwen3", &[]));
    let sessions = basic::sessions(&home, "qwen3", &script);
    let mut talk = Vec::new();
    for question in ["a", "b", "c"] {
        say(&sessions, &mut talk, question).await;
    }
    let kept = |auxiliary| sessions.samples("s", auxiliary, usize::MAX);
    assert_eq!(kept(false).await.unwrap().len(), 1);
    // A client asks for a title, once behind the conversation and once by itself.
    for talk in [[talk.clone(), vec![user("A title?")]].concat(), vec![user("A title?")]] {
        sessions.ask("s", Ask { is_auxiliary: true, ..ask(&talk) }).await.unwrap();
    }
    assert_eq!((kept(false).await.unwrap().len(), kept(true).await.unwrap().len()), (1, 2));
    let mut helper = vec![message(Role::System, "A helper.")];
    say(&sessions, &mut helper, "Find it").await;
    assert_eq!(kept(false).await.unwrap().len(), 2);
    // The summary is a turn of the conversation; what follows it begins anew.
    say(&sessions, &mut talk, "Sum up").await;
    let mut after = vec![user("So far: a, b, c.")];
    let after_text = "Go on";
    say(&sessions, &mut after, after_text).await;
    let samples = kept(false).await.unwrap();
    assert_eq!(samples.iter().map(|sample| sample.turns).collect::<Vec<_>>(), [1, 4, 1]);
}

#[tokio::test]
async fn housekeeping_that_is_all_or_goes_on_is_trained() {
    let home = tempfile::tempdir().unwrap();
    let script = Arc::new(Script::new("qwen3", &[]));
    let sessions = basic::sessions(&home, "qwen3", &script);
    let mut talk = vec![user("Name a chat session's title.")];
    let first = sessions.ask("s", Ask { is_auxiliary: true, ..ask(&talk) }).await.unwrap();
    let kept = |most| sessions.samples("s", false, most);
    assert_eq!(kept(usize::MAX).await.unwrap().len(), 1, "a session that has nothing else");
    sessions.ask("s", ask(&[user("Other")])).await.unwrap();
    let turns =
        async || kept(usize::MAX).await.unwrap().iter().map(|sample| sample.turns).collect::<Vec<_>>();
    assert_eq!(turns().await, [1], "beside another conversation");
    talk.push(first.message);
    say(&sessions, &mut talk, "And another?").await;
    assert_eq!(turns().await, [1, 2], "a client that goes on asks for more than a title");
    assert!(kept(3).await.unwrap().is_empty());
}

#[tokio::test]
async fn shared_turns_belong_to_the_earliest_leaf_that_is_kept() {
    let home = tempfile::tempdir().unwrap();
    let script = Arc::new(Script::new("qwen3", &[]));
    let sessions = basic::sessions(&home, "qwen3", &script);
    let mut talk = Vec::new();
    say(&sessions, &mut talk, "a").await;
    let mut fork = talk.clone();
    say(&sessions, &mut talk, "b").await;
    say(&sessions, &mut fork, "c").await;
    say(&sessions, &mut talk, "d").await;
    let lengths: Vec<usize> =
        script.drawn.lock().unwrap().iter().map(|drawn| drawn.made.output_ids.len()).collect();
    let samples = sessions.samples("s", false, usize::MAX).await.unwrap();
    // The leaf behind `c` was committed before the one behind `d`.
    let (shared, b, c, d) = (lengths[0], lengths[1], lengths[2], lengths[3]);
    assert_eq!(shape(&samples), [(2, shared + c), (3, b + d)]);
    // Where the sample of `d` is too long, it ends with `b`, which is then the earliest leaf.
    let most = samples[1].tokens.len() - 1;
    let cut = sessions.samples("s", false, most).await.unwrap();
    assert_eq!(shape(&cut), [(2, shared + b), (2, c)]);
    assert!(sessions.samples("s", false, 3).await.unwrap().is_empty());
}

#[tokio::test]
async fn thoughts_that_are_stripped_begin_a_sample_and_stay_trained() {
    let home = tempfile::tempdir().unwrap();
    let thinks = |n: u32| format!("<think>\nhm {n}\n</think>\n\nAnswer {n}.");
    let script = Arc::new(Script::new("qwen3", &[&thinks(1), &thinks(2), &thinks(3)]));
    let settings =
        Settings { visitors: Some(basic::opening()), thoughts: Thoughts::Stripped, ..Settings::default() };
    let family = toy::family("qwen3");
    let sessions =
        Sessions::open_journal(&home.path().join("journal"), family, script.clone(), settings).unwrap();
    let mut talk = Vec::new();
    for question in ["a", "b", "c"] {
        say(&sessions, &mut talk, question).await;
    }
    // A retry finds the turn that began anew.
    let again = sessions.ask("s", ask(&talk[..5])).await.unwrap();
    assert_eq!(again.message, talk[5]);
    let drawn = script.drawn.lock().unwrap().clone();
    assert_eq!(drawn.len(), 3);
    let read = toy::tokenizer().decode(&drawn[2].input_ids).unwrap();
    let expected = "user\na\nassistant\nAnswer 1.\nuser\nb\nassistant\nAnswer 2.\nuser\nc\nassistant\n";
    assert_eq!(read, expected);
    // What is left of an answer has the ids that were sampled.
    let answer = &drawn[0].made.output_ids;
    let kept = answer.len()
        - answer.iter().rposition(|id| toy::tokenizer().token(*id).as_deref() == Some("</think>")).unwrap()
        - 2;
    let kept = &answer[answer.len() - kept..];
    assert!(drawn[2].input_ids.windows(kept.len()).any(|ids| ids == kept));
    let samples = sessions.samples("s", false, usize::MAX).await.unwrap();
    let lengths: Vec<_> = drawn.iter().map(|drawn| (1, drawn.made.output_ids.len())).collect();
    assert_eq!(shape(&samples), lengths);
}

#[tokio::test]
async fn a_file_cut_anywhere_goes_on_to_the_same_samples() {
    let home = tempfile::tempdir().unwrap();
    let journal = home.path().join("journal");
    let script = Arc::new(Script::new("qwen3", &[]));
    let first = basic::sessions(&home, "qwen3", &script);
    let mut talk = Vec::new();
    for question in ["a", "b", "c"] {
        say(&first, &mut talk, question).await;
    }
    let expected = first.samples("s", false, usize::MAX).await.unwrap();
    drop(first);
    let mut whole = std::fs::read(&journal).unwrap();
    // Behind its groups are zeros.
    whole.truncate(whole.iter().rposition(|byte| *byte != 0).unwrap() + 65);
    // A client that got no answer asks again; one that got it finds it there.
    for cut in (0..whole.len()).step_by(37) {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("journal"), &whole[..cut]).unwrap();
        let script = Arc::new(Script::new("qwen3", &[]));
        let again = basic::sessions(&home, "qwen3", &script);
        for asked in [1, 3, 5] {
            let answer = again.ask("s", ask(&talk[..asked])).await.unwrap();
            assert_eq!(answer.message, talk[asked], "cut at {cut}");
        }
        assert_eq!(again.samples("s", false, usize::MAX).await.unwrap(), expected, "cut at {cut}");
    }
}

#[tokio::test]
async fn closed_sessions_leave_the_journal_and_stay_closed() {
    let home = tempfile::tempdir().unwrap();
    let journal = home.path().join("journal");
    let script = Arc::new(Script::new("qwen3", &[]));
    let sessions = basic::sessions(&home, "qwen3", &script);
    let long = user(&"text ".repeat(2000));
    sessions.ask("s", ask(&[long])).await.unwrap();
    let kept = sessions.ask("t", ask(&[user("Hi")])).await.unwrap();
    sessions.close("s").await.unwrap();
    drop(sessions);
    let before = std::fs::metadata(&journal).unwrap().len();
    let sessions = basic::reopened(&home, "qwen3", &script);
    assert!(std::fs::metadata(&journal).unwrap().len() < before / 4);
    assert_eq!(sessions.ask("t", ask(&[user("Hi")])).await.unwrap(), kept);
    let said = sessions.ask("s", ask(&[user("Hi")])).await;
    assert!(matches!(said, Err(Refusal::Over(_))), "{said:?}");
    let other = SamplingParams { temperature: 0.1, ..basic::opening().sampling };
    let other = driftless_agent::sessions::Opening { sampling: other, ..basic::opening() };
    let said = sessions.open("t", other).await;
    assert!(matches!(said, Err(Refusal::Invalid(_))), "{said:?}");
    sessions.open("t", basic::opening()).await.unwrap();
}

#[tokio::test]
async fn names_of_closed_sessions_are_forgotten_in_turn() {
    let home = tempfile::tempdir().unwrap();
    let journal = home.path().join("journal");
    let script = Arc::new(Script::new("qwen3", &[]));
    let open = || {
        let settings = Settings { sessions: 2, visitors: Some(basic::opening()), ..Settings::default() };
        Sessions::open_journal(&journal, toy::family("qwen3"), script.clone(), settings)
    };
    let mut sessions = open().unwrap();
    for name in ["a", "b", "c"] {
        sessions.ask(name, ask(&[user("Hi")])).await.unwrap();
        sessions.close(name).await.unwrap();
    }
    for _ in 0..2 {
        let over = |name| sessions.open(name, basic::opening());
        assert!(matches!(over("b").await, Err(Refusal::Over(_))) && over("c").await.is_err());
        sessions.open("a", basic::opening()).await.unwrap();
        assert!(sessions.samples("a", false, usize::MAX).await.unwrap().is_empty(), "another one");
        drop(sessions);
        sessions = loop {
            if let Ok(sessions) = open() {
                break sessions;
            }
            std::thread::yield_now();
        };
    }
}
