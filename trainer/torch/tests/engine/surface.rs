//! Routes, keys, and input that is no request.

use std::io::Write;
use std::net::TcpStream;

use driftless_bridge::Keys;
use serde_json::json;

use crate::client::finish;
use crate::model::{Fixture, greedy};

#[test]
fn information_routes_have_what_clients_read() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    let info = client.get("/model_info").json;
    assert_eq!(info, client.get("/get_model_info").json);
    assert_eq!(
        (&info["model_type"], &info["architectures"]),
        (&json!("qwen3"), &json!(["Qwen3ForCausalLM"]))
    );
    assert_eq!((&info["weight_version"], &info["load_format"]), (&json!("a"), &json!("auto")));
    let info = client.get("/server_info").json;
    assert_eq!(info, client.get("/get_server_info").json);
    assert_eq!((&info["version"], &info["frontend"]), (&json!("0.5.23"), &json!("python")));
    assert_eq!((&info["tp_size"], &info["dtype"]), (&json!(1), &json!("float32")));
    assert_eq!(info["port"], fixture.server.address().port());
    let load = &client.get("/v1/loads?include=core").json["loads"][0];
    assert_eq!((&load["num_running_reqs"], &load["num_used_tokens"]), (&json!(0), &json!(0)));
    assert_eq!(client.get("/v1/models").json["data"][0]["id"], fixture.path("a"));
    let missing = client.get("/weight_version");
    assert_eq!((missing.status, missing.json), (404, json!({"detail": "Not Found"})));
    let wrong = client.get("/generate");
    assert_eq!((wrong.status, wrong.json), (405, json!({"detail": "Method Not Allowed"})));
}

#[test]
fn keys_guard_the_routes_as_in_sglang() {
    let fixture = Fixture::with(|options| {
        options.server.keys = Keys::new(Some("user"), Some("admin")).unwrap();
    });
    let (open, user, admin) =
        (&fixture.client, fixture.client.with_key("user"), fixture.client.with_key("admin"));
    assert_eq!(open.get("/health").status, 200);
    assert_eq!(open.get("/ready").status, 200);
    let refused = open.post("/generate", &greedy(&[1], 1));
    assert_eq!((refused.status, refused.json), (401, json!({"error": "Unauthorized"})));
    user.ok("/generate", &greedy(&[1], 1));
    assert_eq!(user.get("/model_info").status, 200);
    assert_eq!(admin.get("/model_info").status, 401);
    let update = fixture.update("b");
    assert_eq!(user.post("/update_weights_from_disk", &update).status, 401);
    admin.ok("/update_weights_from_disk", &update);
    for path in ["/pause_generation", "/continue_generation", "/abort_request", "/flush_cache"] {
        assert_eq!(user.post(path, &json!({})).status, 401, "{path}");
        assert_eq!(admin.post(path, &json!({})).status, 200, "{path}");
    }
    let shown = user.get("/server_info").text;
    assert!(!shown.contains("\"user\"") && !shown.contains("\"admin\""), "{shown}");
}

#[test]
fn garbage_is_answered_and_the_engine_lives() {
    let fixture = Fixture::new();
    let client = &fixture.client;
    for body in ["", "{bad json", "[1, 2]", "null", "{\"input_ids\": [-1]}", "{\"input_ids\": [64]}"] {
        assert_eq!(finish(client.start("POST", "/generate", body)).status, 400, "{body}");
    }
    let paths = [
        "/pause_generation",
        "/continue_generation",
        "/abort_request",
        "/update_weights_from_disk",
        "/update_weight_version",
        "/begin_weight_update",
        "/end_weight_update",
    ];
    for path in paths {
        for body in ["", "{bad json", "[]", "{\"mode\": \"bogus\", \"rid\": 5, \"selector\": 1}"] {
            let status = finish(client.start("POST", path, body)).status;
            let ignored =
                body.starts_with("{\"mode") && matches!(path, "/continue_generation" | "/end_weight_update");
            assert!(status == 400 || ignored, "{path} {body}: {status}");
        }
    }
    for body in [json!({"action": "bogus"}), json!({"action": 3}), json!([])] {
        assert_eq!(client.post("/weights_checker", &body).status, 400, "{body}");
    }
    // Not HTTP at all, and half a request.
    for bytes in
        [&b"\x00\xff\x13 nonsense\r\n\r\n"[..], b"POST /generate HTTP/1.1\r\nContent-Length: 99\r\n\r\n{"]
    {
        let mut stream = TcpStream::connect(fixture.server.address()).unwrap();
        stream.write_all(bytes).unwrap();
    }
    client.ok("/generate", &greedy(&[1], 2));
}
