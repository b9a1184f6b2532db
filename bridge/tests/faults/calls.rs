//! Single calls: deadlines, statuses, malformed replies, keys, identity.

use std::sync::Arc;

use driftless_bridge::engine::{Attached, PauseMode};
use driftless_bridge::sglang::Client;
use driftless_bridge::{Error, Expected, GenerateRequest, Keys, Rid, SamplingParams};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use driftless_testkit::sglang::{Fake, Fault, SHORT, checkpoint, odd_checkpoint, patient, short, write};

fn fake() -> (Fake, tempfile::TempDir, Client, Runtime) {
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::start(&checkpoint(&dir.path().join("a"), 1, 4));
    let client = Client::new(&fake.address.to_string(), patient()).unwrap();
    (fake, dir, client, Runtime::new().unwrap())
}

#[test]
fn hanging_call_ends_at_its_deadline_and_names_engine_and_call() {
    let (fake, _dir, _, runtime) = fake();
    let client = Client::new(&fake.address.to_string(), short(|calls| &mut calls.info)).unwrap();
    fake.fault("GET /model_info", Fault::Hang);
    let error = runtime.block_on(client.model_info()).unwrap_err();
    assert!(matches!(error, Error::Deadline { .. }) && error.is_transient(), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains(&fake.address.to_string())
            && text.contains("GET /model_info")
            && text.contains(&format!("{SHORT:?}")),
        "{text}"
    );
}

#[test]
fn a_failing_call_keeps_status_and_body() {
    let (fake, _dir, client, runtime) = fake();
    fake.fault("POST /pause_generation", Fault::Answer(500, "out of memory".into()));
    match runtime.block_on(client.pause(PauseMode::Retract)) {
        Err(Error::Status { status: 500, body, call, .. }) => {
            assert_eq!((body.as_str(), call.as_str()), ("out of memory", "POST /pause_generation"))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn malformed_replies_say_what_was_expected() {
    let (fake, _dir, client, runtime) = fake();
    for (reply, word) in [
        ("<html>", "expected value"),
        ("{}", "missing field `model_path`"),
        (r#"{"model_path": 5}"#, "expected a string"),
    ] {
        fake.fault("GET /model_info", Fault::Answer(200, reply.into()));
        match runtime.block_on(client.model_info()) {
            Err(Error::Reply { expected, found, .. }) => {
                assert!(expected.contains(word) && found == reply, "{expected} / {found}")
            }
            other => panic!("{reply}: {other:?}"),
        }
    }
}

#[test]
fn replies_are_bounded() {
    let (fake, _dir, _, runtime) = fake();
    let client = Client::new(&fake.address.to_string(), patient().with_reply_bytes_max(1000)).unwrap();
    fake.fault("GET /v1/loads", Fault::Answer(200, "x".repeat(1001)));
    let error = runtime.block_on(client.loads()).unwrap_err();
    assert!(matches!(error, Error::ReplyTooLarge { limit: 1000, .. }), "{error:?}");
    assert_eq!(runtime.block_on(client.loads()).unwrap().len(), 1);
}

#[test]
fn a_dead_engine_is_unreachable() {
    let (fake, _dir, client, runtime) = fake();
    fake.kill();
    assert!(matches!(runtime.block_on(client.server_info()), Err(Error::Unreachable { .. })));
    fake.restart();
    runtime.block_on(client.server_info()).unwrap();
    fake.fault("GET /server_info", Fault::Die);
    fake.fault("GET /server_info", Fault::Die);
    assert!(matches!(runtime.block_on(client.server_info()), Err(Error::Unreachable { .. })));
}

/// As one that was kept does when its engine has been started again.
#[test]
fn a_question_whose_connection_ends_is_asked_once_more() {
    let (fake, _dir, client, runtime) = fake();
    fake.fault("GET /server_info", Fault::Die);
    runtime.block_on(client.server_info()).unwrap();
    fake.fault("POST /flush_cache", Fault::Die);
    assert!(matches!(runtime.block_on(client.flush_cache()), Err(Error::Unreachable { .. })));
    assert_eq!(fake.changes(), ["/flush_cache"], "what changes something is not");
}

#[test]
fn each_call_carries_the_key_of_its_level() {
    let (fake, _dir, _, runtime) = fake();
    let keys = Keys::new(Some("normal-key"), Some("control-key")).unwrap();
    let client = Client::new(&fake.address.to_string(), patient().with_keys(keys)).unwrap();
    runtime.block_on(async {
        client.model_info().await.unwrap();
        client.flush_cache().await.unwrap();
        let sampling = SamplingParams { max_new_tokens: 1, ..SamplingParams::default() };
        client.generate(&GenerateRequest::new(Rid::new(0, 0), vec![1], sampling)).await.unwrap();
    });
    let seen = fake.engine().keys.clone();
    let key = |path: &str| seen.iter().find(|(at, _)| at == path).unwrap().1.clone().unwrap();
    assert_eq!(key("/model_info"), "Bearer normal-key");
    assert_eq!(key("/flush_cache"), "Bearer control-key");
    assert_eq!(key("/generate"), "Bearer normal-key");
    fake.fault("POST /flush_cache", Fault::Answer(401, "Unauthorized".into()));
    let error = runtime.block_on(client.flush_cache()).unwrap_err();
    assert!(!format!("{error:?} {client:?}").contains("-key"), "{error:?} {client:?}");
}

#[test]
fn an_engine_of_another_model_is_refused() {
    let (fake, dir, client, runtime) = fake();
    let other = Expected::from_checkpoint(&checkpoint(&dir.path().join("b"), 1, 8)).unwrap();
    match runtime.block_on(Attached::attach(Arc::new(client), &other)) {
        Err(Error::Refused { engine, what, expected, found }) => {
            assert!(engine.contains(&fake.address.to_string()));
            assert_eq!((what.as_str(), expected.as_str(), found.as_str()), ("hidden_size", "8", "4"));
        }
        found => panic!("{found:?}"),
    }
}

#[test]
fn an_engine_of_an_unknown_family_is_compared_by_both_configs() {
    let dir = tempfile::tempdir().unwrap();
    let path = odd_checkpoint(&dir.path().join("a"), 1);
    let fake = Fake::start(&path);
    let (client, runtime) =
        (Client::new(&fake.address.to_string(), patient()).unwrap(), Runtime::new().unwrap());
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(path.join("config.json")).unwrap()).unwrap();
    let mut attach = |field: &str, value: Value| {
        config[field] = value;
        let other = write(&dir.path().join(field), 2, 4, &config);
        let expected = Expected::from_checkpoint(&other).unwrap();
        runtime
            .block_on(Attached::attach(Arc::new(client.clone()), &expected))
            .map(|attached| attached.identity().clone())
    };
    let identity = attach("transformers_version", json!("5.19")).unwrap();
    assert!(identity.config_compared);
    match attach("num_experts", json!(8)) {
        Err(Error::Refused { what, expected, found, .. }) => {
            assert_eq!((what.as_str(), expected.as_str(), found.as_str()), ("num_experts", "8", "4"));
        }
        found => panic!("{found:?}"),
    }
    match attach("rope_parameters", json!({"rope_theta": 1e4})) {
        Err(Error::Refused { what, .. }) => assert_eq!(what, "num_experts, rope_parameters.rope_theta"),
        found => panic!("{found:?}"),
    }
}

#[test]
fn an_engine_without_weight_calls_is_refused() {
    let (fake, dir, client, runtime) = fake();
    fake.fault("GET /pause_generation", Fault::Answer(404, "{}".into()));
    let expected = Expected::from_checkpoint(&dir.path().join("a")).unwrap();
    let refused = runtime.block_on(Attached::attach(Arc::new(client), &expected));
    assert!(matches!(refused, Err(Error::Refused { what, .. }) if what == "/pause_generation"));
}
