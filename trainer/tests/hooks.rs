//! Commands that score: what they are given, and that each way of failing is a typed error that names the
//! sample.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use driftless_trainer::reward::{Answer, Command, CommandOptions, Remote, Reward};
use serde_json::value::RawValue;
use std::path::Path;
use std::time::Duration;

/// A command of a shell, so that the tests need no Python: it replies to every line with what `reply` prints.
fn command(reply: &str, deadline: Duration) -> CommandOptions {
    let command = format!("while read -r line; do n=$((n+1)); {reply}; done");
    CommandOptions { command, processes: 1, deadline }
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
    };
    numbers.iter().map(answer).collect()
}

async fn score(options: &CommandOptions) -> Result<Vec<f32>, String> {
    Command::new(options).score(&answers(&[40, 41])).await.map_err(|error| error.to_string())
}

const LONG: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_command_scores_groups_in_order_with_one_process() {
    let reply = r#"echo "{\"id\": $n, \"rewards\": [$n, 0.5]}""#;
    let command = Command::new(&command(reply, LONG));
    for number in 1..4_u8 {
        assert_eq!(command.score(&answers(&[40, 41])).await.unwrap(), [f32::from(number), 0.5]);
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
async fn what_is_no_reward_names_the_sample_and_what_was_found() {
    let cases = [
        (r#"echo "{\"id\": $n, \"rewards\": [1, NaN]}""#, "sample 40", "NaN"),
        (r#"echo "{\"id\": $n, \"rewards\": [1, \"high\"]}""#, "sample 41", "high"),
        (r#"echo "{\"id\": $n, \"rewards\": [1, null]}""#, "sample 41", "null"),
        (r#"echo "{\"id\": $n, \"rewards\": [1]}""#, "sample 40", "1 rewards for 2 samples"),
        (r#"echo "{\"id\": $n}""#, "sample 40", "0 rewards"),
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
async fn a_command_that_is_late_is_killed_and_the_next_group_gets_a_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join("late");
    let path = mark.display();
    // A late process says nothing; a new one replies.
    let reply = format!(
        "if test -e {path}; then echo \"{{\\\"id\\\": $n, \\\"rewards\\\": [1, 2]}}\"; else touch {path}; sleep 3600; fi"
    );
    let command = Command::new(&command(&reply, Duration::from_secs(5)));
    let words = command.score(&answers(&[40, 41])).await.unwrap_err().to_string();
    assert!(words.contains("nothing after 5 s") && words.contains("--rm-deadline"), "{words}");
    assert_eq!(command.score(&answers(&[42, 43])).await.unwrap(), [1.0, 2.0]);
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
            stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        }
    });
    format!("http://{address}/score")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_scores_with_a_number_or_an_object() {
    for body in ["0.25", "{\"score\": 0.25}", "{\"reward\": 0.25, \"why\": \"close\"}"] {
        let remote = Remote::new(&service("200 OK", body).await, LONG).unwrap();
        assert_eq!(remote.score(&answers(&[40, 41])).await.unwrap(), [0.25, 0.25], "{body}");
    }
    for (status, body, found) in
        [("500 Oops", "broken", "HTTP 500"), ("200 OK", "\"high\"", "high"), ("200 OK", "", "HTTP 200")]
    {
        let remote = Remote::new(&service(status, body).await, LONG).unwrap();
        let words = remote.score(&answers(&[40])).await.unwrap_err().to_string();
        assert!(words.contains("sample 40") && words.contains(found), "{words}");
    }
    assert!(Remote::new("scorer:80", LONG).is_err());
}
