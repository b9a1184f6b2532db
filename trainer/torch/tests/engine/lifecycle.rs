//! Pausing, continuing, aborting, flushing, health.

use std::time::Duration;

use driftless_torch::engine::Dialect;
use serde_json::{Value, json};

use crate::client::{Client, finish};
use crate::model::{Fixture, assert_close, expected, greedy, ids, log_probs};

/// A request that runs until it is aborted, practically.
fn endless(rid: &str) -> Value {
    let mut request = greedy(&[1, 2, 3], 2000);
    request["rid"] = json!(rid);
    request
}

fn pause(client: &Client, mode: &str) {
    let reply = client.ok("/pause_generation", &json!({"mode": mode}));
    assert_eq!(reply, json!({"message": "Generation paused successfully.", "status": "ok"}));
}

fn resume(client: &Client) {
    let reply = client.ok("/continue_generation", &json!({}));
    assert_eq!(reply, json!({"message": "Generation continued successfully.", "status": "ok"}));
}

fn finish_reason(reply: &Value) -> &Value {
    &reply["meta_info"]["finish_reason"]
}

#[test]
fn an_in_place_pause_keeps_the_cache_and_splits_the_spans() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let running = client.later("/generate", greedy(&[1, 2, 3], 1500));
    client.until_load(1, 0);
    pause(client, "in_place");
    let blocked = client.later("/generate", greedy(&[1, 2, 3], 4));
    let flush = client.post("/flush_cache", &json!({}));
    assert_eq!((flush.status, flush.text.as_str()), (400, "Flush cache failed.\n"));
    let mut update = fixture.update("b");
    update["flush_cache"] = json!(false);
    client.ok("/update_weights_from_disk", &update);
    client.until_load(1, 0);
    resume(client);
    let reply = running.join().unwrap().json;
    let split = reply["meta_info"]["weight_versions"][0]["end"].as_u64().unwrap() as usize;
    assert!((1..1500).contains(&split));
    let spans =
        json!([{"version": "a", "start": 0, "end": split}, {"version": "b", "start": split, "end": 1500}]);
    assert_eq!(reply["meta_info"]["weight_versions"], spans);
    assert_eq!(reply["meta_info"]["weight_version"], "b");
    assert_eq!(reply["meta_info"]["num_retractions"], 0);
    let output = ids(&reply);
    let old = expected(&fixture.reference("a"), &[1, 2, 3], &output, 1.0);
    assert_close(&log_probs(&reply)[..split], &old[..split]);
    let new = expected(&fixture.reference("b"), &[1, 2, 3], &output, 1.0);
    let found = log_probs(&reply);
    let difference = found[split..].iter().zip(&new[split..]).map(|(a, b)| (a - b).abs()).sum::<f64>();
    assert!(difference > 1e-2, "the cache of the old weights is still in use");
    let blocked = blocked.join().unwrap().json;
    assert_eq!(blocked["meta_info"]["weight_versions"], json!([{"version": "b", "start": 0, "end": 4}]));
}

#[test]
fn a_retracting_pause_recomputes_with_the_new_weights() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let running = client.later("/generate", greedy(&[1, 2, 3], 1500));
    client.until_load(1, 0);
    pause(client, "retract");
    client.until_load(0, 1);
    assert_eq!(client.post("/flush_cache", &json!({})).status, 200);
    client.ok("/update_weights_from_disk", &fixture.update("b"));
    resume(client);
    let reply = running.join().unwrap().json;
    assert_eq!(reply["meta_info"]["num_retractions"], 1);
    let split = reply["meta_info"]["weight_versions"][0]["end"].as_u64().unwrap() as usize;
    let output = ids(&reply);
    let new = expected(&fixture.reference("b"), &[1, 2, 3], &output, 1.0);
    assert_close(&log_probs(&reply)[split..], &new[split..]);
}

#[test]
fn aborting_pause_answers_running_requests_and_blocks_new_ones() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let running: Vec<_> = (0..3).map(|i| client.later("/generate", endless(&format!("r{i}")))).collect();
    client.until_load(3, 0);
    pause(client, "abort");
    for reply in running {
        let reply = reply.join().unwrap().json;
        let aborted = json!({"type": "abort", "message": "Aborted", "status_code": null, "err_type": null});
        assert_eq!(*finish_reason(&reply), aborted);
        assert_eq!(ids(&reply).len(), log_probs(&reply).len());
    }
    assert_eq!(client.get("/ready").status, 503);
    let blocked = client.later("/generate", greedy(&[1], 2));
    pause(client, "abort");
    client.until_load(0, 0);
    resume(client);
    assert_eq!(blocked.join().unwrap().status, 200);
    assert_eq!(client.get("/ready").status, 200);
}

#[test]
fn an_abort_pause_ends_an_in_place_pause_without_a_deadlock() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let running = client.later("/generate", endless("r"));
    client.until_load(1, 0);
    pause(client, "in_place");
    pause(client, "abort");
    assert_eq!(finish_reason(&running.join().unwrap().json)["type"], "abort");
    resume(client);
    client.ok("/generate", &greedy(&[1], 2));
}

#[test]
fn aborts_match_by_prefix_and_need_a_known_id() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let long3 = client.later("/generate", endless("long3"));
    client.until_load(1, 0);
    let long31 = client.later("/generate", endless("long31"));
    let other = client.later("/generate", endless("other"));
    client.until_load(3, 0);
    for ignored in [json!({}), json!({"rid": ""}), json!({"rid": "lon"})] {
        let reply = client.post("/abort_request", &ignored);
        assert_eq!((reply.status, reply.text.as_str()), (200, ""));
    }
    client.until_load(3, 0);
    client.post("/abort_request", &json!({"rid": "long3"}));
    assert_eq!(finish_reason(&long3.join().unwrap().json)["type"], "abort");
    assert_eq!(finish_reason(&long31.join().unwrap().json)["type"], "abort");
    client.until_load(1, 0);
    client.post("/abort_request", &json!({"abort_all": true}));
    assert_eq!(finish_reason(&other.join().unwrap().json)["type"], "abort");
}

#[test]
fn an_abort_while_paused_in_place_takes_effect_on_continue() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let running = client.later("/generate", endless("r"));
    client.until_load(1, 0);
    pause(client, "in_place");
    client.post("/abort_request", &json!({"rid": "r"}));
    client.until_load(1, 0);
    assert!(!running.is_finished());
    resume(client);
    assert_eq!(finish_reason(&running.join().unwrap().json)["type"], "abort");
}

#[test]
fn an_abort_while_retracted_returns_nothing() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let running = client.later("/generate", endless("r"));
    client.until_load(1, 0);
    pause(client, "retract");
    client.post("/abort_request", &json!({"rid": "r"}));
    let reply = running.join().unwrap().json;
    assert_eq!(*finish_reason(&reply), json!({"type": "abort", "message": "Abort in waiting queue"}));
    assert!(ids(&reply).is_empty() && log_probs(&reply).is_empty());
}

#[test]
fn a_client_that_hangs_up_aborts_its_request() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let stream = client.start("POST", "/generate", &endless("r").to_string());
    client.until_load(1, 0);
    drop(stream);
    client.until_load(0, 0);
    // Its id is free again, and an update does not wait for it.
    client.ok("/update_weights_from_disk", &fixture.update("b"));
    let mut request = greedy(&[1], 2);
    request["rid"] = json!("r");
    client.ok("/generate", &request);
}

#[test]
fn an_id_is_taken_once_and_the_queue_is_bounded() {
    let fixture = Fixture::with(|options| options.server.max_queued_requests = 2);
    let client = &fixture.client;
    let running = client.later("/generate", endless("r"));
    client.until_load(1, 0);
    let reply = client.post("/generate", &endless("r"));
    assert_eq!(reply.status, 400);
    assert_eq!(reply.json, json!({"error": {"message": "Duplicate request ID detected: r"}}));
    let reply = client.post("/generate", &json!({"input_ids": [[1], [2]]}));
    assert_eq!((reply.status, &reply.json["error"]["message"]), (503, &json!("The request queue is full.")));
    client.post("/abort_request", &json!({"rid": "r"}));
    assert_eq!(running.join().unwrap().status, 200);
}

#[test]
fn health_fails_while_paused_and_recovers() {
    let fixture = Fixture::new();
    assert_eq!(fixture.client.get("/health").status, 200);
    assert_eq!(fixture.client.get("/health_generate").status, 200);
    // A probe of a paused engine takes all the time it has.
    let fixture = Fixture::with(|options| options.server.health_timeout = Duration::from_millis(200));
    let client = &fixture.client;
    pause(client, "in_place");
    assert_eq!(client.get("/health").status, 503);
    resume(client);
    assert_eq!(client.get("/ready").status, 503, "unhealthy until a probe succeeds");
    // On a busy machine the first ones may not.
    client.poll("/health", |reply| reply.status == 200);
    assert_eq!(client.get("/ready").status, 200);
}

#[test]
fn a_flush_with_a_timeout_waits_for_running_requests() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let running = client.later("/generate", endless("r"));
    client.until_load(1, 0);
    let flush = client.start("POST", "/flush_cache?timeout=50", "");
    client.post("/abort_request", &json!({"rid": "r"}));
    let flush = finish(flush);
    assert_eq!(flush.status, 200);
    assert!(flush.text.starts_with("Cache flushed.\n"));
    running.join().unwrap();
    for bad in ["abc", "-1", "nan", "1e300"] {
        assert_eq!(client.post(&format!("/flush_cache?timeout={bad}"), &json!({})).status, 400, "{bad}");
    }
}

#[test]
fn old_dialects_refuse_what_their_sglang_would_not_survive() {
    for dialect in [Dialect::V0_5_12, Dialect::V0_5_17] {
        let fixture = Fixture::of(dialect);
        let client = &fixture.client;
        let running = client.later("/generate", greedy(&[1, 2, 3], 1500));
        client.until_load(1, 0);
        pause(client, "retract");
        assert_eq!(client.post("/flush_cache", &json!({})).status, 400, "queued requests count");
        let refused = client.post("/update_weights_from_disk", &fixture.update("b"));
        assert_eq!((refused.status, &refused.json["success"]), (400, &json!(false)));
        assert_eq!(client.get("/model_info").json["weight_version"], "a");
        let mut update = fixture.update("b");
        update["flush_cache"] = json!(false);
        client.ok("/update_weights_from_disk", &update);
        resume(client);
        let reply = running.join().unwrap().json;
        assert_eq!(reply["meta_info"]["weight_version"], "b");
        assert_eq!(reply["meta_info"].get("weight_versions"), None);
    }
}
