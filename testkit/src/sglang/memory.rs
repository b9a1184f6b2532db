//! The memory of a fake engine: what it gives back, and buckets that it is shown. As the real one it ends
//! when it is told to release what it has released, to resume what it has, or to go on without.

use std::collections::BTreeSet;

use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use axum::routing::post;
use axum::{Json, Router};
use base64::Engine as _;
use driftless_transport::Dtype;
use driftless_transport::snapshot::TensorInfo;
use serde_json::{Value, json};

use super::Shared;
use super::fault::refusal;
use super::wire::loaded;

/// What of its memory an engine has, and what ended it.
#[derive(Debug, Default)]
pub struct Memory {
    /// Requests in its queue.
    pub waiting: u64,
    /// Tags of what it has given back.
    pub released: BTreeSet<String>,
    /// Why it ended, if it did.
    pub death: Option<String>,
}

impl Memory {
    /// Ends the engine if it lacks memory for this.
    pub(super) fn whole(&mut self, what: &str) {
        if !self.released.is_empty() {
            self.death = Some(format!("{what} without {:?}", self.released));
        }
    }

    fn control(&mut self, path: &str, body: &Value) {
        if self.waiting > 0 {
            self.death = Some(format!("{path} while requests wait"));
        }
        for tag in body["tags"].as_array().unwrap() {
            let tag = tag.as_str().unwrap().to_owned();
            let fits = match path {
                "/release_memory_occupation" => self.released.insert(tag.clone()),
                _ => self.released.remove(&tag),
            };
            if !fits {
                self.death = Some(format!("{path} {tag}, released are {:?}", self.released));
            }
        }
    }
}

/// The calls about memory.
pub(super) fn routes() -> Router<Shared> {
    Router::new()
        .route("/release_memory_occupation", post(control))
        .route("/resume_memory_occupation", post(control))
        .route("/update_weights_from_tensor", post(update))
}

async fn control(State(engine): State<Shared>, uri: Uri, Json(body): Json<Value>) -> Json<Value> {
    engine.lock().unwrap().memory.control(uri.path(), &body);
    Json(Value::Null)
}

/// Loads a bucket that travels in the call.
async fn update(State(engine): State<Shared>, Json(body): Json<Value>) -> Response {
    let mut engine = engine.lock().unwrap();
    if !engine.pushes.session {
        return refusal(400, "update_weights_from_tensor must run between begin_weight_update() and end");
    }
    assert_eq!(body["load_format"], "flattened_bucket", "the engine ends of another word");
    if engine.memory.released.contains("weights") {
        engine.memory.death = Some("an update without the weights' memory".into());
    }
    let ranks = body["serialized_named_tensors"].as_array().unwrap();
    assert_eq!(ranks.len(), engine.facts().tp_size as usize, "one entry a rank");
    for rank in ranks {
        let pickle = base64::engine::general_purpose::STANDARD.decode(rank.as_str().unwrap()).unwrap();
        let bucket = unpickle(&pickle);
        let bytes = bytes(&bucket["flattened_tensor"]["torch.ByteTensor"][0]["builtins.bytearray"][0]);
        for item in bucket["metadata"].as_array().unwrap() {
            assert_eq!(item["dtype"], "torch.bfloat16");
            let number = |key: &str| item[key].as_u64().unwrap() as usize;
            let (start, end) = (number("start_idx"), number("end_idx"));
            assert_eq!(end - start, number("numel"));
            let shape = serde_json::from_value(item["shape"]["torch.Size"][0].clone()).unwrap();
            let name = item["name"].as_str().unwrap().to_owned();
            engine.pushes.take(TensorInfo { name, dtype: Dtype::Bf16, shape }, bytes[start..end].to_vec());
        }
    }
    loaded(&engine, &body)
}

fn bytes(value: &Value) -> Vec<u8> {
    value.as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8).collect()
}

/// What a pickle of the opcodes of `docs/wire/colocate.md` holds: calls are `{"function": arguments}`, objects their
/// attributes.
fn unpickle(pickle: &[u8]) -> Value {
    let mut at = 0;
    let mut take = |count: usize| {
        at += count;
        &pickle[at - count..at]
    };
    let size = |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | usize::from(byte));
    let (mut stack, mut marks, mut memo) = (Vec::new(), Vec::new(), Vec::<Value>::new());
    assert_eq!(take(2), [0x80, 4]);
    loop {
        let value = match take(1)[0] {
            b'X' => {
                let length = size(take(4));
                String::from_utf8(take(length).to_vec()).unwrap().into()
            }
            0x8e => {
                let length = size(take(8));
                json!(take(length))
            }
            b'J' => size(take(4)).into(),
            0x8a => {
                let length = size(take(1));
                size(take(length)).into()
            }
            0x89 => false.into(),
            b'j' => memo[size(take(4))].clone(),
            b']' | b')' => json!([]),
            b'}' => json!({}),
            b'(' => {
                marks.push(stack.len());
                continue;
            }
            0x94 => {
                memo.push(stack.last().cloned().unwrap());
                continue;
            }
            b'.' => break,
            b't' => stack.split_off(marks.pop().unwrap()).into(),
            code @ (b'e' | b'u') => {
                let items = stack.split_off(marks.pop().unwrap());
                with_items(code, stack.pop().unwrap(), items)
            }
            code => {
                let top = stack.pop().unwrap();
                combined(code, stack.pop().unwrap(), top)
            }
        };
        stack.push(value);
    }
    assert_eq!((stack.len(), at), (1, pickle.len()));
    stack.remove(0)
}

/// A list, or a dictionary, with more in it.
fn with_items(code: u8, mut whole: Value, items: Vec<Value>) -> Value {
    match (code, &mut whole) {
        (b'e', Value::Array(list)) => list.extend(items),
        (b'u', Value::Object(dict)) => {
            dict.extend(items.chunks(2).map(|pair| (pair[0].as_str().unwrap().to_owned(), pair[1].clone())));
        }
        (_, whole) => panic!("opcode {code:#x} on {whole}"),
    }
    whole
}

/// What an opcode makes of the two values on top.
fn combined(code: u8, below: Value, top: Value) -> Value {
    match code {
        0x93 => format!("{}.{}", below.as_str().unwrap(), top.as_str().unwrap()).into(),
        b'R' => json!({ below.as_str().unwrap(): top }),
        // An object of a class: its attributes are what `BUILD` gives it.
        0x81 => below,
        b'b' => top,
        code => panic!("opcode {code:#x}"),
    }
}
