//! Commands that score: what they are given, and that each way of failing is a typed error that names the
//! sample.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use driftless_trainer::Error;
use driftless_trainer::data::{DataOptions, RowReader};
use driftless_trainer::hook::{Hook, HookOptions, Rm};
use driftless_trainer::reward::{Given, Remote, Reward};
use driftless_trainer::sample::Answer;
use driftless_trainer::tasks::{Sourced, Task};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A command of a shell, so that the tests need no Python: it answers every line with what `reply` prints.
/// `$n` is the line's id.
fn command(reply: &str, deadline: Duration) -> Rm {
    let at = format!("while read -r line; do n=${{line#*:}}; n=${{n%%,*}}; {reply}; done");
    Rm::new(Hook::open("--custom-rm-command", &HookOptions::new(at).with_deadline(deadline)).unwrap())
}

fn answers(numbers: &[u64]) -> Vec<Answer> {
    let answer = |sample: &u64| Answer {
        sample: *sample,
        prompt: "1+1=".into(),
        response: "2".into(),
        label: RawValue::from_string("\"2\"".into()).ok(),
        metadata: None,
        truncated: false,
        response_length: 1,
        given: None,
    };
    numbers.iter().map(answer).collect()
}

/// What the answers get, or the first error.
async fn scored(reward: &dyn Reward, answers: &[Answer]) -> Result<Vec<f32>, String> {
    let given = reward.score(answers).await.map_err(|error| error.to_string())?;
    given
        .into_iter()
        .map(|given| given.map(|given| given.reward).map_err(|error| error.to_string()))
        .collect()
}

async fn score(rm: &Rm) -> Result<Vec<f32>, String> {
    scored(rm, &answers(&[40, 41])).await
}

const LONG: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_command_scores_groups_in_order_with_one_process() {
    let reply = r#"echo "{\"id\": $n, \"rewards\": [$n, 0.5]}""#;
    let command = command(reply, LONG);
    for number in 1..4_u8 {
        assert_eq!(score(&command).await.unwrap(), [f32::from(number), 0.5]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_is_given_prompt_response_label_and_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let seen = dir.path().join("seen");
    let reply = format!("echo \"$line\" > {}; echo '{{\"id\": 1, \"rewards\": [1, 1]}}'", seen.display());
    score(&command(&reply, LONG)).await.unwrap();
    let line: serde_json::Value = serde_json::from_slice(&std::fs::read(seen).unwrap()).unwrap();
    let sample = &line["samples"][1];
    assert_eq!((&line["id"], &sample["index"]), (&1.into(), &41.into()));
    assert_eq!((&sample["prompt"], &sample["response"]), (&"1+1=".into(), &"2".into()));
    assert_eq!(sample["label"], "2");
}

#[tokio::test(flavor = "multi_thread")]
async fn reply_that_is_no_reward_names_the_sample() {
    let cases = [
        (r#"echo "{\"id\": $n, \"rewards\": [1, NaN]}""#, "sample 40", "NaN"),
        (r#"echo "{\"id\": $n, \"rewards\": [1, \"high\"]}""#, "sample 41", "high"),
        (r#"echo "{\"id\": $n, \"rewards\": [1, null]}""#, "sample 41", "null"),
        (r#"echo "{\"id\": $n, \"rewards\": [1]}""#, "sample 40", "1 rewards for 2 samples"),
        (r#"echo "{\"id\": $n}""#, "sample 40", "\"id\": 1"),
        (r#"echo "{\"id\": 9, \"rewards\": [1, 1]}""#, "sample 40", "\"id\": 9"),
        (r#"echo "{\"id\": $n, \"error\": \"no luck\"}""#, "sample 40", "no luck"),
        ("echo loading the model", "sample 40", "loading the model"),
        ("exit 7", "sample 40", "exit status: 7"),
    ];
    for (reply, sample, found) in cases {
        let words = score(&command(reply, LONG)).await.unwrap_err();
        assert!(words.contains(sample) && words.contains(found), "{reply}: {words}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_with_nan_says_what_to_answer_instead() {
    let reply = r#"echo "{\"id\": $n, \"rewards\": [1, NaN]}""#;
    let words = score(&command(reply, LONG)).await.unwrap_err();
    assert!(words.contains("NaN and Infinity are no JSON, answer finite numbers"), "{words}");
    assert!(!words.contains("not a line with"), "it has its id: {words}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_died_is_started_again_and_keeps_the_group() {
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join("died");
    let path = mark.display();
    let reply = format!(
        "if test -e {path}; then echo \"{{\\\"id\\\": $n, \\\"rewards\\\": [1, 2]}}\"; else touch {path}; kill -9 $$; fi"
    );
    assert_eq!(score(&command(&reply, LONG)).await.unwrap(), [1.0, 2.0]);
    assert!(Path::new(&mark).exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn late_command_is_killed_and_started_for_the_next_group() {
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join("late");
    let path = mark.display();
    // A late process says nothing; a new one replies.
    let reply = format!(
        "if test -e {path}; then echo \"{{\\\"id\\\": $n, \\\"rewards\\\": [1, 2]}}\"; else touch {path}; sleep 3600; fi"
    );
    let command = command(&reply, Duration::from_secs(5));
    let words = score(&command).await.unwrap_err();
    assert!(words.contains("nothing after 5 s") && words.contains("`HookOptions::deadline`"), "{words}");
    assert_eq!(scored(&command, &answers(&[42, 43])).await.unwrap(), [1.0, 2.0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn process_outlives_a_question_that_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let script = format!(
        "cd {}; echo start >> starts; while read -r line; do n=${{line#*:}}; n=${{n%%,*}}; touch asked; \
         until test -e go; do :; done; echo \"{{\\\"id\\\": $n, \\\"rewards\\\": [$n, 0]}}\"; done",
        dir.path().display()
    );
    let command = Arc::new(Rm::new(Hook::open("--custom-rm-command", &HookOptions::new(script)).unwrap()));
    let asking = command.clone();
    let given_up = tokio::spawn(async move { score(&asking).await });
    while !at("asked").exists() {
        tokio::task::yield_now().await;
    }
    given_up.abort();
    assert!(given_up.await.unwrap_err().is_cancelled());
    std::fs::write(at("go"), "").unwrap();
    assert_eq!(score(&command).await.unwrap(), [2.0, 0.0]);
    assert_eq!(std::fs::read_to_string(at("starts")).unwrap().lines().count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_is_asked_about_no_samples_before_the_run() {
    command(r#"echo "{\"id\": $n, \"rewards\": []}""#, LONG).ready().await.unwrap();
    for (reply, found) in
        [("exit 7", "exit status: 7"), (r#"echo "{\"id\": $n, \"rewards\": [1]}""#, "1 rewards")]
    {
        let words = command(reply, LONG).ready().await.unwrap_err().to_string();
        assert!(words.contains("--custom-rm-command") && words.contains(found), "{words}");
        assert!(words.contains("the first question, which has no samples"), "{words}");
    }
}

/// A service that answers every request with `body`.
async fn service(status: &'static str, body: &'static str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = Vec::new();
            let mut part = [0; 4096];
            while !request.ends_with(b"}") {
                let read = stream.read(&mut part).await.unwrap();
                request.extend_from_slice(&part[..read]);
            }
            assert!(String::from_utf8_lossy(&request).contains("\"label\":\"2\""));
            let head =
                format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
            // A client may hang up on what is too long.
            let _ = stream.write_all(format!("{head}{body}").as_bytes()).await;
        }
    });
    format!("http://{address}/score")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_scores_with_a_number_or_an_object() {
    for body in ["0.25", "{\"score\": 0.25}", "{\"reward\": 0.25, \"why\": \"close\"}"] {
        let remote = Remote::new(&service("200 OK", body).await, LONG).unwrap();
        assert_eq!(scored(&remote, &answers(&[40, 41])).await.unwrap(), [0.25, 0.25], "{body}");
    }
    let long: &str = Box::leak("1".repeat((1 << 20) + 1).into_boxed_str());
    for (status, body, found) in [
        ("500 Oops", "broken", "HTTP 500"),
        ("200 OK", "\"high\"", "high"),
        ("200 OK", "", "found ``"),
        ("200 OK", long, "more than 1048576 bytes"),
    ] {
        let remote = Remote::new(&service(status, body).await, LONG).unwrap();
        let words = scored(&remote, &answers(&[40])).await.unwrap_err();
        assert!(words.contains("sample 40") && words.contains(found), "{words}");
    }
    assert!(Remote::new("scorer:80", LONG).is_err());
}

/// The example, with the real package; lane `rewards` has it.
#[tokio::test(flavor = "multi_thread")]
async fn problems_and_rewards_come_from_reasoning_gym() {
    let Some(python) = std::env::var_os("DRIFTLESS_REWARDS_PYTHON") else {
        eprintln!("skipped: DRIFTLESS_REWARDS_PYTHON is not set; `cargo xtask test rewards` sets it");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let letters: Vec<String> = (32..127).map(|code| char::from(code).to_string()).collect();
    let vocabulary: serde_json::Map<_, _> =
        letters.into_iter().enumerate().map(|(id, letter)| (letter, id.into())).collect();
    let model = serde_json::json!({"type": "BPE", "vocab": vocabulary, "merges": []});
    std::fs::write(dir.path().join("tokenizer.json"), serde_json::json!({"model": model}).to_string())
        .unwrap();
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/reasoning_gym_task.py");
    let at = format!("exec '{}' '{example}' chain_sum", python.display());
    let hook = |flag| Hook::open(flag, &HookOptions::new(&at).with_deadline(LONG)).unwrap();
    let reader = RowReader::open(DataOptions::default(), dir.path()).unwrap();
    let reward = Arc::new(Rm::new(hook("--custom-rm-command")));
    let source = Sourced::new(hook("--data-source-command"), reader);
    let task = Task::new(Arc::new(source), reward);
    task.ready().await.unwrap();
    for number in 0..5 {
        let prompt = task.source.prompt(number).await.unwrap();
        assert_eq!(
            prompt.text,
            task.source.prompt(number).await.unwrap().text,
            "the same whenever it is asked for"
        );
        let words: Vec<_> = prompt.text.split_whitespace().collect();
        let from = words.iter().position(|word| word.parse::<i64>().is_ok()).unwrap();
        let (mut sum, mut sign) = (0, 1);
        for word in &words[from..] {
            match *word {
                "+" => sign = 1,
                "-" => sign = -1,
                word => sum += sign * word.parse().unwrap_or(0),
            }
        }
        let answer = |response: i64| Answer {
            response: response.to_string(),
            metadata: prompt.metadata.clone(),
            ..answers(&[number]).remove(0)
        };
        let rewards = scored(&*task.reward, &[answer(sum), answer(sum + 1)]).await.unwrap();
        assert!(rewards[0] == 1.0 && rewards[1] < 1.0, "{}: {sum}: {rewards:?}", prompt.text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_scores_a_group_as_a_command_does() {
    let rm = async |status, body| {
        let at = service(status, body).await;
        Rm::new(Hook::open("--rm-url", &HookOptions::new(at).with_deadline(LONG)).unwrap())
    };
    let group = answers(&[40, 41]);
    assert_eq!(scored(&rm("200 OK", "{\"rewards\": [0.25, 1]}").await, &group).await.unwrap(), [0.25, 1.0]);
    for (status, body, found) in [
        ("500 Oops", "{\"rewards\": [0.25, 1]}", "HTTP 500"),
        ("200 OK", "{\"error\": \"no luck\"}", "no luck"),
        ("200 OK", "{\"rewards\": [1]}", "1 rewards for 2 samples"),
    ] {
        let words = scored(&rm(status, body).await, &group).await.unwrap_err();
        assert!(words.contains("sample 40") && words.contains(found), "{words}");
    }
    for at in ["http://", "http://user@:0x/", ""] {
        let options = HookOptions::new(at).with_deadline(LONG);
        assert!(Hook::open("--rm-url", &options).is_err(), "{at}");
    }
}

/// Each error is of its own answer; those of a count, or of no answer, are of all.
#[tokio::test(flavor = "multi_thread")]
async fn reward_says_what_it_is_made_of_or_which_answer_has_none() {
    let said = serde_json::json!({"rewards": [
        {"reward": 0.5, "rewards": {"right": 0, "form": 0.5}}, {"error": "the judge is asleep"}, 1,
        {"reward": 1, "rewards": {"form": "high"}}, {"score": 1}, {"rewards": {}}, null, 1e300,
    ]});
    let service = service("200 OK", Box::leak(said.to_string().into_boxed_str())).await;
    let rm = Rm::new(Hook::open("--rm-url", &HookOptions::new(service).with_deadline(LONG)).unwrap());
    let mut given = rm.score(&answers(&[40, 41, 42, 43, 44, 45, 46, 47])).await.unwrap().into_iter();
    let first = given.next().unwrap().unwrap();
    assert_eq!(first.reward, 0.5);
    assert_eq!(first.components, BTreeMap::from([("form".to_owned(), 0.5), ("right".to_owned(), 0.0)]));
    let told = |found: Result<Given, Error>| found.unwrap_err().to_string();
    let asleep = told(given.next().unwrap());
    assert!(asleep.contains("sample 41") && asleep.contains("its error: the judge is asleep"), "{asleep}");
    assert_eq!(given.next().unwrap().unwrap(), 1.0.into());
    for (sample, expected) in
        given.map(told).zip(["\"high\"", "unknown field `score`", "null", "null", "1e+300"])
    {
        assert!(sample.contains(expected), "{sample}");
    }
}
