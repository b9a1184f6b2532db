//! One session, turn by turn.

use std::sync::Arc;

use driftless_agent::message::{Ask, Converse as _, Ended, Message, Refusal, Role};
use driftless_agent::sessions::{Opening, Settings};
use driftless_agent::{Family, Sessions};
use driftless_bridge::SamplingParams;
use serde_json::json;
use tempfile::TempDir;

use crate::toy::{self, Script, TEMPLATES, ask, message, user};

pub(crate) fn opening() -> Opening {
    let sampling = SamplingParams { max_new_tokens: 500, temperature: 0.7, ..SamplingParams::default() };
    Opening { key: Some("k".to_owned()), sampling }
}

/// Sessions in `home`, whose visitors may open their own.
pub(crate) fn try_sessions(
    home: &TempDir,
    template: &str,
    script: &Arc<Script>,
) -> driftless_agent::Result<Sessions<Arc<Script>>> {
    over(home, toy::family(template), script)
}

fn over(
    home: &TempDir,
    family: Family,
    script: &Arc<Script>,
) -> driftless_agent::Result<Sessions<Arc<Script>>> {
    let settings = Settings { visitors: Some(opening()), ..Settings::default() };
    Sessions::open_journal(&home.path().join("journal"), family, script.clone(), settings)
}

pub(crate) fn sessions(home: &TempDir, template: &str, script: &Arc<Script>) -> Sessions<Arc<Script>> {
    try_sessions(home, template, script).unwrap()
}

/// The same once the process before has let go of the journal: its writer ends a moment after the sessions.
pub(crate) fn reopened(home: &TempDir, template: &str, script: &Arc<Script>) -> Sessions<Arc<Script>> {
    reopened_with(home, toy::family(template), script)
}

/// The same for a family of the test's.
pub(crate) fn reopened_with(home: &TempDir, family: Family, script: &Arc<Script>) -> Sessions<Arc<Script>> {
    // The lock is free once the writer has ended.
    let journal = home.path().join("journal");
    while std::fs::File::open(&journal).is_ok_and(|file| file.try_lock().is_err()) {
        std::thread::yield_now();
    }
    over(home, family, script).unwrap()
}

/// Asks, and adds the answer to the conversation.
async fn say(sessions: &Sessions<Arc<Script>>, talk: &mut Vec<Message>, next: &[Message]) -> Ended {
    talk.extend_from_slice(next);
    let answer = sessions.ask("s", ask(talk)).await.unwrap();
    talk.push(answer.message);
    answer.ended
}

#[tokio::test]
async fn a_linear_session_of_fifty_turns_is_one_sample() {
    for (template, _) in TEMPLATES {
        let home = tempfile::tempdir().unwrap();
        let script =
            Arc::new(Script::new(template, &["<think>\nhm\n</think>\n\nThe answer, then.", "No tten."]));
        let sessions = sessions(&home, template, &script);
        let mut talk = vec![message(Role::System, "You help.")];
        for turn in 0..50 {
            say(&sessions, &mut talk, &[user(&format!("Question {turn}?"))]).await;
        }
        let samples = sessions.samples("s", false, usize::MAX).await.unwrap();
        assert_eq!(samples.len(), 1, "{template}");
        let drawn = script.drawn.lock().unwrap();
        assert_eq!(drawn.len(), 50);
        let last = drawn.last().unwrap();
        assert_eq!(samples[0].tokens, [last.input_ids.as_slice(), &last.made.output_ids].concat());
        let trained: usize = samples[0].loss_mask.iter().map(|mask| usize::from(*mask)).sum();
        assert_eq!(trained, drawn.iter().map(|drawn| drawn.made.output_ids.len()).sum::<usize>());
    }
}

#[tokio::test]
async fn a_retry_gets_the_same_answer_and_nothing_is_drawn() {
    let home = tempfile::tempdir().unwrap();
    let script = Arc::new(Script::new("qwen3", &["One.", "Two."]));
    let sessions = sessions(&home, "qwen3", &script);
    let again = || sessions.ask("s", ask(&[user("Hi")]));
    let (first, second) = tokio::join!(again(), again());
    assert_eq!(first, second);
    assert_eq!(again().await, first);
    assert_eq!(script.drawn.lock().unwrap().len(), 1);
    // Another branch may ask the same, and draws its own.
    let other = Ask { branch: Some("b".to_owned()), ..ask(&[user("Hi")]) };
    assert_eq!(sessions.ask("s", other).await.unwrap().message.content, "Two.");
}

#[tokio::test]
async fn draws_follow_from_what_is_asked_and_not_from_when() {
    let first = [ask(&[user("a")]), ask(&[user("b")])];
    let first = [&first[..], &[Ask { branch: Some("b".to_owned()), ..first[0].clone() }]].concat();
    let mut seen = Vec::new();
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let home = tempfile::tempdir().unwrap();
        let script = Arc::new(Script::new("qwen3", &[]));
        let sessions = sessions(&home, "qwen3", &script);
        for at in order {
            let answer = sessions.ask("s", first[at].clone()).await.unwrap();
            let talk = [first[at].messages.as_slice(), &[answer.message, user("and?")]].concat();
            sessions.ask("s", Ask { messages: talk, ..first[at].clone() }).await.unwrap();
        }
        let drawn = script.drawn.lock().unwrap();
        let mut drawn: Vec<_> =
            drawn.iter().map(|drawn| (drawn.nth, drawn.made.output_ids.clone())).collect();
        drawn.sort();
        seen.push(drawn);
    }
    assert_eq!((&seen[0], &seen[0]), (&seen[1], &seen[2]));
    assert!(seen[0].windows(2).all(|pair| pair[0].0 != pair[1].0), "two asks with the same draws");
}

#[tokio::test]
async fn calls_are_read_and_their_answers_put_in_order() {
    let home = tempfile::tempdir().unwrap();
    let call = |name: &str| {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{\"a\": 1}}}}\n</tool_call>")
    };
    let script =
        Arc::new(Script::new("qwen3", &[&format!("Both.\n{}\n{}", call("ls"), call("pwd")), "Done."]));
    let sessions = sessions(&home, "qwen3", &script);
    let mut talk = Vec::new();
    assert_eq!(say(&sessions, &mut talk, &[user("Where?")]).await, Ended::ToolCalls);
    let calls = talk[1].calls.clone();
    assert_eq!((calls[1].name.as_str(), &calls[1].arguments), ("pwd", &json!({"a": 1}).into()));
    assert_eq!(talk[1].content, "Both.");
    let told =
        |at: usize, text: &str| Message { call_id: Some(calls[at].id.clone()), ..message(Role::Tool, text) };
    say(&sessions, &mut talk, &[told(1, "/home"), told(0, "file")]).await;
    let drawn = script.drawn.lock().unwrap();
    let text = toy::tokenizer().decode(&drawn[1].input_ids).unwrap();
    assert!(text.find("file").unwrap() < text.find("/home").unwrap(), "{text}");
    assert!(
        drawn[1].input_ids.starts_with(&[drawn[0].input_ids.as_slice(), &drawn[0].made.output_ids].concat())
    );
}

#[tokio::test]
async fn the_session_and_not_the_client_says_how_to_sample() {
    let home = tempfile::tempdir().unwrap();
    let script = Arc::new(Script::new("qwen3", &["A long answer.", "An end. And more."]));
    let sessions = sessions(&home, "qwen3", &script);
    let short = Ask { max_tokens: Some(3), ..ask(&[user("Hi")]) };
    let cut = sessions.ask("s", short).await.unwrap();
    assert_eq!((cut.ended, cut.completion_tokens), (Ended::Length, 3));
    let talk = [user("Hi"), cut.message, user("Go on")];
    let stopped = sessions.ask("s", Ask { stop: vec![" And".to_owned()], ..ask(&talk) }).await.unwrap();
    assert_eq!((stopped.ended, stopped.message.content.as_str()), (Ended::StopText, "An end."));
    let drawn = script.drawn.lock().unwrap();
    assert_eq!((drawn[1].sampling.temperature, drawn[1].sampling.max_new_tokens), (0.7, 500));
    assert_eq!(drawn[1].sampling.stop, [" And"]);
    // The answer that was cut has its end put in, which is not trained.
    let behind = toy::tokenizer()
        .encode("<|im_end|>\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n")
        .unwrap();
    let expected = [drawn[0].input_ids.as_slice(), &drawn[0].made.output_ids, &behind].concat();
    assert_eq!(drawn[1].input_ids, expected);
}

#[tokio::test]
async fn sessions_that_cannot_be_are_refused() {
    let home = tempfile::tempdir().unwrap();
    let script = Arc::new(Script::new("qwen3", &[]));
    let sessions = sessions(&home, "qwen3", &script);
    let said = sessions.ask("s", ask(&[user("Hi"), message(Role::Assistant, "Ho")])).await;
    assert!(matches!(said, Err(Refusal::Invalid(_))), "{said:?}");
    assert!(matches!(sessions.ask("s", ask(&[])).await, Err(Refusal::Invalid(_))));
    let long = "a ".repeat(40_000);
    assert!(matches!(sessions.ask("s", ask(&[user(&long)])).await, Err(Refusal::ContextFull { .. })));
    assert!(sessions.opens("s", Some("k")) && !sessions.opens("s", None) && !sessions.opens("t", Some("l")));
    sessions.close("s").await.unwrap();
    assert!(matches!(sessions.ask("s", ask(&[user("Hi")])).await, Err(Refusal::Over(_))));
    assert!(script.drawn.lock().unwrap().is_empty());
}
