//! Agents talk to an engine through the gateway, which is killed.

use crate::common::{Process, code, driftless, json, run};
use driftless_testkit::http::exchange;
use driftless_testkit::sglang::{Fake, write};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

const CHAT: &str = "POST /s/task-1/v1/chat/completions";
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
                        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// Tokens that no text has.
const MARKS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// The id of a letter in [`model`].
pub(super) fn id(letter: char) -> i32 {
    MARKS.len() as i32 + letter as i32
}

/// A checkpoint of ChatML, with a token for each letter of ASCII.
pub(super) fn model(dir: &Path) -> PathBuf {
    let config = json!({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 4, "intermediate_size": 6,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 131,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "max_position_embeddings": 4096});
    let model = write(dir, 1, 4, &config);
    let mut words: serde_json::Map<String, Value> =
        (0..128_u8).map(|letter| (char::from(letter).to_string(), json!(id(char::from(letter))))).collect();
    let mark = |(id, mark): (usize, &&str)| {
        json!({"id": id, "content": mark, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let marks: Vec<_> = MARKS.iter().enumerate().map(mark).collect();
    words.extend(MARKS.iter().enumerate().map(|(id, mark)| ((*mark).to_owned(), json!(id))));
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": marks, "normalizer": null,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?s)."}, "behavior": "Isolated", "invert": false},
        "post_processor": null, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "?"},
    });
    let config = json!({"eos_token": "<|im_end|>", "chat_template": TEMPLATE});
    for (name, file) in [("tokenizer.json", tokenizer), ("tokenizer_config.json", config)] {
        std::fs::write(model.join(name), file.to_string()).expect("a file");
    }
    model
}

/// A gateway over `fake`, and what its clients are told of its address.
struct Served {
    process: Process,
    url: String,
    /// Where its figures are, if it was told to show them.
    metrics: Option<String>,
}

/// A gateway whose token is `secret`, and what it needs; its engine says `a`.
struct Guarded {
    served: Served,
    token: PathBuf,
    model: PathBuf,
    /// Answers as long as it is kept.
    fake: Fake,
    dir: tempfile::TempDir,
}

fn guarded(flags: &[&str]) -> Guarded {
    let dir = tempfile::tempdir().expect("a directory");
    let model = model(&dir.path().join("model"));
    let fake = Fake::start(&model);
    fake.engine().tokens = vec![id('a')];
    let token = dir.path().join("token");
    std::fs::write(&token, "secret\n").expect("a file");
    let file = token.display().to_string();
    let served = serve_with(dir.path(), &model, &fake, &[flags, &["--token-file", &file]].concat());
    Guarded { served, token, model, fake, dir }
}

fn serve(dir: &Path, model: &Path, fake: &Fake) -> Served {
    serve_with(dir, model, fake, &[])
}

fn serve_with(dir: &Path, model: &Path, fake: &Fake, more: &[&str]) -> Served {
    serve_by(driftless(), dir, model, fake, more)
}

fn serve_by(mut command: Command, dir: &Path, model: &Path, fake: &Fake, more: &[&str]) -> Served {
    command.args(["--json", "--die-with-parent", "gateway"]).args(more);
    if !more.contains(&"--listen") {
        command.args(["--listen", "127.0.0.1:0"]);
    }
    command.arg("--hf-checkpoint").arg(model).arg("--save").arg(dir.join("save"));
    command.args(["--rollout-external-engine-addrs", &fake.address.to_string()]);
    let mut process = Process::start("gateway", dir, &mut command);
    let said = process.says(0).expect("where it serves");
    let url = said["url"].as_str().expect("a URL").to_owned();
    Served { process, url, metrics: said["metrics"].as_str().map(str::to_owned) }
}

/// Status and body of the answer to a conversation.
fn post(served: &Served, request: &str, headers: &str, messages: &Value) -> (u16, String) {
    let address =
        served.url.strip_prefix("http://").and_then(|address| address.parse().ok()).expect("an address");
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], std::net::SocketAddr::port(&address)));
    exchange(address, request, headers, &json!({"model": "any", "messages": messages}).to_string())
}

/// What the assistant says to a conversation.
fn ask(served: &Served, messages: &Value) -> Value {
    let (status, body) = post(served, CHAT, "host: localhost\r\n", messages);
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect("JSON")
}

/// What is exported of all sessions.
fn exported(dir: &Path, model: &Path) -> Vec<Value> {
    let file = dir.join("samples.jsonl");
    let mut export = driftless();
    export.args(["gateway", "--hf-checkpoint"]).arg(model).arg("--save").arg(dir.join("save"));
    run(export.arg("--export").arg(&file));
    let lines = std::fs::read_to_string(&file).expect("a file");
    lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn a_conversation_goes_on_where_the_gateway_was_killed() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = model(&dir.path().join("model"));
    let fake = Fake::start(&model);
    fake.engine().tokens = vec![id('a'), id('b')];
    let served = serve(dir.path(), &model, &fake);
    let mut messages = vec![json!({"role": "user", "content": "hi <|im_end|>"})];
    let first = ask(&served, &json!(messages));
    assert_eq!(first["choices"][0]["message"]["content"], "a");
    assert_eq!(ask(&served, &json!(messages))["choices"], first["choices"]);
    assert_eq!(fake.engine().generated, 1, "who asks again gets the same answer");
    // With SIGKILL.
    drop(served);

    let mut served = serve(dir.path(), &model, &fake);
    assert_eq!(ask(&served, &json!(messages))["choices"], first["choices"]);
    messages.push(first["choices"][0]["message"].clone());
    messages.push(json!({"role": "user", "content": "more"}));
    let second = ask(&served, &json!(messages));
    assert_eq!(second["choices"][0]["message"]["content"], "b");
    let asked = fake.engine().asked.clone();
    assert_eq!(asked.len(), 2, "what was durable is not drawn again");
    let usage = &second["usage"];
    assert_eq!(usage["prompt_tokens"], asked[1]);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], asked[0] + 1);
    let pid = rustix::process::Pid::from_raw(served.process.id() as i32).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it runs");
    assert!(served.process.wait().success(), "{}", served.process.output());

    let samples = exported(dir.path(), &model);
    assert_eq!(samples.len(), 1, "{samples:?}");
    assert_eq!(samples[0]["session"], "task-1");
    let numbers = |field: &str| -> Vec<i64> {
        samples[0][field].as_array().into_iter().flatten().filter_map(Value::as_i64).collect()
    };
    let (tokens, mask) = (numbers("tokens"), numbers("loss_mask"));
    let response = &tokens[asked[0]..];
    let trained: Vec<_> =
        response.iter().zip(&mask).filter(|(_, mask)| **mask == 1).map(|(token, _)| *token).collect();
    assert_eq!(trained, ['a', 'b'].map(|letter| i64::from(id(letter))), "what was sampled, and that alone");
    let ends = tokens.iter().filter(|token| **token == 2).count();
    assert_eq!(ends, 3, "two turns of the user, one answer that was cut; the user's own mark is text");
}

#[test]
fn a_gateway_for_others_wants_a_token() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = model(&dir.path().join("model"));
    let fake = Fake::start(&model);
    for flag in ["--listen", "--metrics-listen"] {
        let mut command = driftless();
        command.args(["gateway", flag, "0.0.0.0:0", "--hf-checkpoint"]).arg(&model);
        command.arg("--save").arg(dir.path().join("save"));
        command.args(["--rollout-external-engine-addrs", &fake.address.to_string()]);
        let (status, words) = code(command.env_remove("DRIFTLESS_TOKEN"));
        assert_eq!(status, Some(2), "{words}");
        assert!(words.contains(flag) && words.contains("--token-file"), "{words}");
    }
}

/// The page of figures, and its status.
fn figures(served: &Served, headers: &str) -> (u16, String) {
    let url = served.metrics.as_ref().expect("a page of figures");
    let address = url.strip_prefix("http://").and_then(|url| url.strip_suffix("/metrics")).expect("a URL");
    exchange(address.parse().expect("an address"), "GET /metrics", headers, "")
}

#[test]
fn what_was_asked_and_answered_is_counted() {
    let Guarded { served, .. } = &guarded(&["--metrics-listen", "127.0.0.1:0"]);
    let key = "x-api-key: secret\r\n";
    let one = json!([{"role": "user", "content": "hi"}]);
    let (status, body) = post(served, CHAT, key, &one);
    let usage = serde_json::from_str::<Value>(&body).expect("JSON")["usage"].clone();
    assert_eq!(status, 200, "{body}");
    let long = json!([{"role": "user", "content": "hi ".repeat(4096)}]);
    for (headers, messages, refused) in [("", &one, 401), (key, &long, 400), (key, &json!([]), 400)] {
        assert_eq!(post(served, CHAT, headers, messages).0, refused);
    }
    assert_eq!(figures(served, "").0, 401, "the page wants the token, too");
    let (status, page) = figures(served, "authorization: Bearer secret\r\n");
    assert_eq!(status, 200, "{page}");
    let told = |name: &str| {
        let value = page.lines().find_map(|line| line.strip_prefix(&format!("driftless_gateway_{name} ")));
        value.and_then(|value| value.parse::<f64>().ok()).unwrap_or(f64::NAN)
    };
    for (name, value) in [("answered", 1.0), ("context", 1.0), ("busy", 0.0), ("broken", 0.0)] {
        assert_eq!(told(&format!("asks_total{{outcome=\"{name}\"}}")), value, "{name}: {page}");
    }
    for (status, count) in [(200, 1.0), (400, 2.0), (401, 1.0)] {
        let name = format!("replies_total{{protocol=\"chat\",status=\"{status}\"}}");
        assert_eq!(told(&name), count, "{status}: {page}");
    }
    assert_eq!(told("asks_under_way"), 0.0, "{page}");
    let tokens = ["prompt_tokens", "completion_tokens"];
    for name in tokens {
        assert_eq!(Some(told(&format!("{name}_total"))), usage[name].as_f64(), "{page}");
    }
    assert!(told("ask_seconds_total") > 0.0, "{page}");
}

/// A key whose second is over opens nothing.
fn check_expiry(token: &Path, served: &Served) {
    let made = json(driftless().args(["gateway-key", "task-2", "--ttl", "1", "--token-file"]).arg(token));
    let key = format!("authorization: Bearer {}\r\n", made["key"].as_str().expect("a key"));
    let expiry = made["expiry"].as_u64().expect("a time");
    let now = || std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs();
    while now() < expiry {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let (status, body) = post(served, "POST /v1/messages", &key, &json!([{"role": "user", "content": "hi"}]));
    assert!(status == 401 && body.contains("has expired"), "{status}: {body}");
}

/// What is told of the end of a session.
fn close(served: &Served, session: &str, headers: &str) -> (u16, String) {
    post(served, &format!("DELETE /s/{session}"), headers, &json!([]))
}

/// A key of task-2 opens that one, with its name in the path and without, and refuses others in each vendor's shape.
fn check_key(served: &Served, token: &Path) {
    let made = json(driftless().args(["gateway-key", "task-2", "--token-file"]).arg(token));
    let key = format!("authorization: Bearer {}\r\n", made["key"].as_str().expect("a key"));
    let messages = json!([{"role": "user", "content": "hi"}]);
    for request in ["POST /s/task-2/v1/chat/completions", "POST /v1/messages"] {
        let (status, body) = post(served, request, &key, &messages);
        assert_eq!(status, 200, "{body}");
    }
    for protocol in ["chat/completions", "messages"] {
        let (status, body) = post(served, &format!("POST /s/task-1/v1/{protocol}"), &key, &messages);
        let told: Value = serde_json::from_str(&body).expect("JSON");
        let words = told["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 401 && words.contains("another's or has expired"), "{status}: {body}");
        assert_eq!(told["type"] == "error", protocol == "messages", "{body}");
    }
    let token_itself = std::fs::read_to_string(token).expect("a file");
    assert!(post(served, CHAT, &format!("x-api-key: {}\r\n", token_itself.trim()), &messages).0 == 200);
    let closed = close(served, "task-2", &key);
    assert!(closed.0 == 401 && closed.1.contains("alone closes sessions"), "{closed:?}");
    check_expiry(token, served);
    let mut odd = driftless();
    assert_eq!(code(odd.args(["gateway-key", "a b", "--token-file"]).arg(token)).0, Some(2));
    let (status, words) = code(driftless().args(["gateway-key", "a"]).env_remove("DRIFTLESS_TOKEN"));
    assert!(status == Some(2) && words.contains("--token-file"), "{words}");
}

#[test]
fn a_token_opens_sessions_of_any_name() {
    // All of it: what is not named here would end at once.
    let Guarded { served, token, model, fake: _fake, dir } = guarded(&["--listen", "0.0.0.0:0"]);
    let messages = json!([{"role": "user", "content": "hi"}]);
    for key in ["", "authorization: Bearer other\r\n"] {
        assert_eq!(post(&served, CHAT, key, &messages).0, 401, "{key}");
    }
    let key = "x-api-key: secret\r\n";
    for request in [CHAT, "POST /v1/messages"] {
        let (status, body) = post(&served, request, key, &messages);
        assert_eq!(status, 200, "{body}");
    }
    assert_eq!(post(&served, "POST /s/a%20b/v1/messages", key, &messages).0, 401, "no name");
    check_key(&served, &token);
    assert!(served.process.output().contains("go in clear text"), "a warning: it listens for other hosts");
    let other = post(&served, "POST /s/task-3/v1/chat/completions", key, &messages);
    assert_eq!((other.0, close(&served, "task-3", key).0), (200, 200));
    let over = post(&served, "POST /s/task-3/v1/chat/completions", key, &messages);
    assert!(over.0 == 410 && over.1.contains("session_over"), "{over:?}");
    drop(served);
    let mut sessions: Vec<_> =
        exported(dir.path(), &model).iter().map(|sample| sample["session"].clone()).collect();
    sessions.sort_by_key(ToString::to_string);
    assert_eq!(sessions, ["default", "task-1", "task-2"]);
    let journal = std::fs::read(dir.path().join("save/sessions.journal")).expect("a file");
    assert!(!journal.windows(6).any(|bytes| bytes == b"secret"), "the token is in no file");
}

/// Its files may be so short that the journal is soon full.
#[test]
fn a_gateway_that_can_keep_nothing_draws_nothing_and_says_so() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = model(&dir.path().join("model"));
    let fake = Fake::start(&model);
    fake.engine().tokens = vec![id('a')];
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 8; exec \"$0\" \"$@\""]).arg(driftless().get_program());
    let served = serve_by(limited, dir.path(), &model, &fake, &[]);
    let asked = |nth: usize| {
        let request = format!("POST /s/task-{nth}/v1/chat/completions");
        post(&served, &request, "host: localhost\r\n", &json!([{"role": "user", "content": "hi"}]))
    };
    let health = || {
        let (host, empty) = ("host: localhost\r\n", json!([]));
        post(&served, "GET /health", host, &empty)
    };
    assert_eq!(health().0, 200);
    let (status, body) = (0..100).map(asked).find(|(status, _)| *status != 200).expect("a full journal");
    assert!(status == 500 && body.contains("start this again"), "{status}: {body}");
    let drawn = fake.engine().generated;
    let (status, body) = asked(1000);
    assert!(status == 500 && body.contains("start this again"), "{status}: {body}");
    assert_eq!(fake.engine().generated, drawn, "nothing is drawn that cannot be kept");
    let (status, body) = health();
    assert!(status == 503 && body.contains("start this again"), "{status}: {body}");
    drop(served);
    let again = serve(dir.path(), &model, &fake);
    ask(&again, &json!([{"role": "user", "content": "hi"}]));
}
