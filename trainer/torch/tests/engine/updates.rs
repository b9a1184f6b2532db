//! Updating weights: what is loaded, what is refused, and what stays.

use std::path::Path;

use driftless_torch::engine::{Dialect, EngineOptions, serve};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::model::{
    Fixture, assert_close, bytes, config, expected, greedy, ids, log_probs, write_checkpoint,
};

fn sum(parts: &[Vec<u8>]) -> String {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    hash.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn an_update_changes_the_weights_and_the_names() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let reply = client.ok("/update_weights_from_disk", &fixture.update("b"));
    let message = "Succeeded to update model weights. Weight version updated to b.";
    assert_eq!(reply, json!({"success": true, "message": message, "num_paused_requests": 0}));
    let info = client.get("/model_info").json;
    assert_eq!((&info["weight_version"], &info["model_path"]), (&json!("b"), &json!(fixture.path("b"))));
    assert_eq!(
        (&info["served_model_name"], &info["tokenizer_path"]),
        (&json!(fixture.path("b")), &json!(fixture.path("a")))
    );
    assert_eq!(client.get("/server_info").json["weight_version"], "a", "stale, as in SGLang");
    let reply = client.ok("/generate", &greedy(&[4, 5], 10));
    assert_close(&log_probs(&reply), &expected(&fixture.reference("b"), &[4, 5], &ids(&reply), 1.0));
    let reply = client.ok("/update_weights_from_disk", &json!({"model_path": fixture.path("a")}));
    assert_eq!(reply["message"], "Succeeded to update model weights.");
    assert_eq!(client.get("/model_info").json["weight_version"], "b", "no label, no new label");
}

#[test]
fn samples_of_nan_have_no_log_prob_until_a_sound_update() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    // What follows the header is weights, and all bits of an f32 set are NaN.
    let weights = fixture.dir.path().join("b/model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[header..].fill(0xff);
    std::fs::write(&weights, bytes).unwrap();
    client.ok("/update_weights_from_disk", &fixture.update("b"));
    for request in [greedy(&[1, 2], 2), json!({"input_ids": [1, 2], "return_logprob": true})] {
        let mut request = request;
        request["sampling_params"]["max_new_tokens"] = json!(2);
        let reply = client.ok("/generate", &request);
        let entries = reply["meta_info"]["output_token_logprobs"].as_array().unwrap();
        assert!(!entries.is_empty() && entries.iter().all(|entry| entry[0].is_null()), "{reply}");
    }
    client.ok("/update_weights_from_disk", &fixture.update("a"));
    let reply = client.ok("/generate", &greedy(&[4, 5], 10));
    assert_close(&log_probs(&reply), &expected(&fixture.reference("a"), &[4, 5], &ids(&reply), 1.0));
}

#[test]
fn checksums_are_those_of_the_fused_bytes() {
    let fixture = Fixture::new();
    let model = fixture.reference("a");
    let of = |name: &str| {
        let parameter = model.parameters().iter().find(|parameter| parameter.name == name).unwrap();
        bytes(&parameter.tensor)
    };
    let reply = fixture.client.ok("/weights_checker", &json!({"action": "checksum"}));
    let rank = &reply["ranks"][0];
    let sums = rank["checksums"].as_object().unwrap();
    assert_eq!(sums.len(), 2 + 2 * 8, "embedding, norm, and eight in each layer; the head is tied");
    assert_eq!(sums["model.embed_tokens.weight"], sum(&[of("model.embed_tokens.weight")]));
    let attention = |part: &str| of(&format!("model.layers.1.self_attn.{part}_proj.weight"));
    let qkv = sum(&[attention("q"), attention("k"), attention("v")]);
    assert_eq!(sums["model.layers.1.self_attn.qkv_proj.weight"], qkv);
    let mlp = |part: &str| of(&format!("model.layers.0.mlp.{part}_proj.weight"));
    assert_eq!(sums["model.layers.0.mlp.gate_up_proj.weight"], sum(&[mlp("gate"), mlp("up")]));
    assert_eq!(rank["parallelism_info"][0]["role"], "target");
    assert_eq!(rank["per_gpu_checksum"].as_str().unwrap().len(), 64);
    assert_eq!(reply["per_engine_checksum"].as_str().unwrap().len(), 64);
    fixture.client.ok("/update_weights_from_disk", &fixture.update("b"));
    let changed = fixture.client.get("/weights_checker").json;
    assert_ne!(
        changed["ranks"][0]["checksums"]["model.embed_tokens.weight"],
        sums["model.embed_tokens.weight"]
    );
    let skipped = fixture.client.ok("/weights_checker", &json!({"skip_tensor_list": ["layers", "norm"]}));
    assert_eq!(skipped["ranks"][0]["checksums"].as_object().unwrap().len(), 1);
}

#[test]
fn an_update_without_a_pause_waits_for_running_requests() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let running = client.later("/generate", greedy(&[1, 2, 3], 800));
    client.until_load(1, 0);
    client.ok("/update_weights_from_disk", &fixture.update("b"));
    let reply = running.join().unwrap().json;
    assert_eq!(reply["meta_info"]["weight_versions"], json!([{"version": "a", "start": 0, "end": 800}]));
}

#[test]
fn an_update_can_abort_what_runs() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let running = client.later("/generate", greedy(&[1, 2, 3], 2000));
    client.until_load(1, 0);
    let mut update = fixture.update("b");
    update["abort_all_requests"] = json!(true);
    client.ok("/update_weights_from_disk", &update);
    assert_eq!(running.join().unwrap().json["meta_info"]["finish_reason"]["type"], "abort");
}

#[test]
fn a_refused_flush_leaves_the_new_weights_and_the_shown_label() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let running = client.later("/generate", greedy(&[1, 2, 3], 1500));
    client.until_load(1, 0);
    client.ok("/pause_generation", &json!({"mode": "in_place"}));
    let reply = client.post("/update_weights_from_disk", &fixture.update("b"));
    assert_eq!((reply.status, &reply.json["success"]), (400, &json!(false)));
    assert!(
        reply.json["message"].as_str().unwrap().starts_with("Weights were updated, but the cache was not")
    );
    assert_eq!(client.get("/model_info").json["weight_version"], "a");
    client.ok("/update_weight_version", &json!({"new_version": "b", "abort_all_requests": false}));
    assert_eq!(client.get("/model_info").json["weight_version"], "b");
    client.ok("/continue_generation", &json!({}));
    let spans = running.join().unwrap().json["meta_info"]["weight_versions"].clone();
    assert_eq!((spans.as_array().unwrap().len(), &spans[1]["version"]), (2, &json!("b")));
}

#[test]
fn a_label_can_be_set_alone_and_aborts_by_default() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let running = client.later("/generate", greedy(&[1, 2, 3], 2000));
    client.until_load(1, 0);
    let reply = client.ok("/update_weight_version", &json!({"new_version": "c"}));
    assert_eq!(reply, json!({"success": true, "message": "Weight version updated to c", "new_version": "c"}));
    assert_eq!(running.join().unwrap().json["meta_info"]["finish_reason"]["type"], "abort");
}

#[test]
fn update_sessions_open_and_close_once() {
    let fixture = Fixture::new();
    let post = |path: &str| fixture.client.post(path, &json!({}));
    assert_eq!(post("/begin_weight_update").json, json!({"success": true, "message": "Success"}));
    let again = post("/begin_weight_update");
    assert_eq!(again.status, 400);
    assert!(again.json["message"].as_str().unwrap().contains("already open"));
    assert_eq!(post("/end_weight_update").status, 200);
    assert_eq!(post("/end_weight_update").status, 400);
    assert_eq!(fixture.client.post("/begin_weight_update", &json!({"selector": "zzz"})).status, 400);
}

/// Breaks a copy of checkpoint `b` in some way.
fn broken(fixture: &Fixture, name: &str, damage: impl FnOnce(&Path)) -> Value {
    let dir = fixture.dir.path().join(name);
    write_checkpoint(&dir, &config(), 9);
    damage(&dir);
    fixture.update(name)
}

#[test]
fn a_bad_checkpoint_is_refused_and_the_old_weights_keep_serving() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let before = client.ok("/generate", &greedy(&[1, 2], 8));
    let sums = client.get("/weights_checker").json;
    let weights = |dir: &Path| dir.join("model.safetensors");
    let other = |change: fn(&mut Value)| {
        let mut config = config();
        change(&mut config);
        config
    };
    let cases = [
        ("missing", json!({"model_path": "/nonexistent"}), "nonexistent"),
        (
            "empty",
            broken(&fixture, "empty", |dir| std::fs::remove_file(weights(dir)).unwrap()),
            "no such file",
        ),
        (
            "truncated",
            broken(&fixture, "truncated", |dir| {
                let bytes = std::fs::read(weights(dir)).unwrap();
                std::fs::write(weights(dir), &bytes[..bytes.len() / 2]).unwrap();
            }),
            "model.safetensors",
        ),
        (
            "flipped header",
            broken(&fixture, "flipped", |dir| {
                let mut bytes = std::fs::read(weights(dir)).unwrap();
                bytes[9] ^= 0x20;
                std::fs::write(weights(dir), bytes).unwrap();
            }),
            "model.safetensors",
        ),
        (
            "wider",
            broken(&fixture, "wider", |dir| {
                write_checkpoint(dir, &other(|config| config["intermediate_size"] = json!(96)), 9);
            }),
            "mlp.down_proj",
        ),
        (
            "deeper",
            broken(&fixture, "deeper", |dir| {
                write_checkpoint(dir, &other(|config| config["num_hidden_layers"] = json!(3)), 9);
            }),
            "model.layers.2",
        ),
        (
            "shallower",
            broken(&fixture, "shallower", |dir| {
                write_checkpoint(dir, &other(|config| config["num_hidden_layers"] = json!(1)), 9);
            }),
            "model.layers.1",
        ),
        ("dummy", json!({"model_path": fixture.path("b"), "load_format": "dummy"}), "model loader"),
    ];
    for (name, body, reason) in cases {
        let reply = client.post("/update_weights_from_disk", &body);
        assert_eq!((reply.status, &reply.json["success"]), (400, &json!(false)), "{name}");
        assert!(reply.json["message"].as_str().unwrap().contains(reason), "{name}: {}", reply.text);
    }
    for body in [json!({}), json!({"model_path": 5}), json!([])] {
        assert_eq!(client.post("/update_weights_from_disk", &body).status, 400, "{body}");
    }
    assert_eq!(client.get("/weights_checker").json, sums);
    assert_eq!(client.get("/model_info").json["model_path"], fixture.path("a"));
    assert_eq!(ids(&client.ok("/generate", &greedy(&[1, 2], 8))), ids(&before));
    client.ok("/update_weights_from_disk", &fixture.update("b"));
}

#[test]
fn an_engine_does_not_start_on_a_bad_checkpoint_or_a_taken_port() {
    let fixture = Fixture::new();
    assert!(serve(EngineOptions::new("/nonexistent")).is_err());
    let mut options = EngineOptions::new(fixture.path("a"));
    options.port = fixture.server.address().port();
    let error = serve(options).unwrap_err();
    assert!(error.to_string().contains(&fixture.server.address().to_string()), "{error}");
    let mut options = EngineOptions::new(fixture.path("a"));
    options.max_running_requests = 0;
    assert!(serve(options).is_err());
}

#[test]
fn older_dialects_have_the_older_checker_and_no_sessions() {
    for dialect in [Dialect::V0_5_12, Dialect::V0_5_17] {
        let fixture = Fixture::of(dialect);
        for path in ["/begin_weight_update", "/end_weight_update"] {
            assert_eq!(fixture.client.post(path, &json!({})).status, 404);
        }
        assert_eq!(fixture.client.get("/ready").status, 404);
        let reply = fixture.client.ok("/weights_checker", &json!({"action": "checksum"}));
        assert_eq!(reply["ranks"][0]["parallelism_info"]["tp_size"], 1);
        assert_eq!(reply.get("per_engine_checksum").is_some(), dialect == Dialect::V0_5_17);
        let without_body = fixture.client.post("/weights_checker", &json!({})).status;
        assert_eq!(without_body, if dialect == Dialect::V0_5_17 { 200 } else { 400 });
        let reply = fixture.client.ok("/generate", &greedy(&[1], 2));
        assert_eq!(reply["meta_info"]["weight_version"], "a");
        assert_eq!(reply["meta_info"].get("weight_versions"), None);
        assert_eq!(fixture.client.get("/server_info").json["version"], dialect.to_string());
    }
}
