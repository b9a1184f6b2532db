//! The memory of a fake engine: what it gives back, and buckets that it is shown. As the real one it ends
//! when it is told to release what it has released, to resume what it has, or to go on without.

use std::collections::{BTreeMap, BTreeSet};

use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use driftless_transport::Dtype;
use driftless_transport::snapshot::TensorInfo;
use serde_json::{Value, json};

use super::Engine;
use super::wire::{refusal, success};

/// What of its memory an engine has, and what ended it.
#[derive(Debug, Default)]
pub struct Memory {
    /// `--enable-memory-saver`.
    pub saver: bool,
    /// Tensor-parallel ranks, where not one.
    pub ranks: usize,
    /// Requests in its queue.
    pub waiting: u64,
    /// Tags of what it has given back.
    pub released: BTreeSet<String>,
    /// Why it ended, if it did.
    pub death: Option<String>,
}

impl Memory {
    pub(super) fn restart(&mut self) {
        (self.waiting, self.released, self.death) = (0, BTreeSet::new(), None);
    }

    pub(super) fn pause(&mut self, body: &Value) {
        if body["mode"] == "abort" {
            self.waiting = 0;
        }
    }

    /// Ends the engine if it lacks memory for this.
    pub(super) fn whole(&mut self, what: &str) {
        if !self.released.is_empty() {
            self.death = Some(format!("{what} without {:?}", self.released));
        }
    }

    pub(super) fn control(&mut self, path: &str, body: &Value) -> Response {
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
        axum::Json(Value::Null).into_response()
    }
}

/// Loads a bucket that travels in the call.
pub(super) fn update(engine: &mut Engine, body: &Value) -> Response {
    if !engine.pushes.session_open() {
        return refusal("update_weights_from_tensor must run between begin_weight_update() and end");
    }
    assert_eq!(body["load_format"], "flattened_bucket", "the engine ends of another word");
    if engine.memory.released.contains("weights") {
        engine.memory.death = Some("an update without the weights' memory".into());
    }
    let ranks = body["serialized_named_tensors"].as_array().unwrap();
    assert_eq!(ranks.len(), engine.memory.ranks.max(1), "one entry a rank");
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
    if let Some(label) = body["weight_version"].as_str() {
        engine.label = label.to_owned();
    }
    success()
}

fn bytes(value: &Value) -> Vec<u8> {
    value.as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8).collect()
}

/// A reader of the opcodes of `docs/wire/colocate.md`: calls are `{"function": arguments}`, objects their
/// attributes.
fn unpickle(pickle: &[u8]) -> Value {
    let mut at = 0;
    let mut take = |count: usize| {
        at += count;
        &pickle[at - count..at]
    };
    let (mut stack, mut marks, mut memo) = (Vec::<Value>::new(), Vec::new(), BTreeMap::new());
    assert_eq!(take(2), [0x80, 4]);
    loop {
        let size = |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | usize::from(byte));
        match take(1)[0] {
            b'X' => {
                let length = size(take(4));
                stack.push(String::from_utf8(take(length).to_vec()).unwrap().into());
            }
            0x8e => {
                let length = size(take(8));
                stack.push(json!(take(length)));
            }
            b'J' => stack.push(size(take(4)).into()),
            0x8a => {
                let length = size(take(1));
                stack.push(size(take(length)).into());
            }
            0x89 => stack.push(false.into()),
            0x93 => {
                let (name, module) = (stack.pop().unwrap(), stack.pop().unwrap());
                stack.push(format!("{}.{}", module.as_str().unwrap(), name.as_str().unwrap()).into());
            }
            0x94 => drop(memo.insert(memo.len(), stack.last().unwrap().clone())),
            b'j' => stack.push(memo[&size(take(4))].clone()),
            b'(' => marks.push(stack.len()),
            b't' => {
                let items = stack.split_off(marks.pop().unwrap());
                stack.push(items.into());
            }
            b']' | b')' => stack.push(json!([])),
            b'}' => stack.push(json!({})),
            b'e' => {
                let items = stack.split_off(marks.pop().unwrap());
                stack.last_mut().unwrap().as_array_mut().unwrap().extend(items);
            }
            b'u' => {
                let items = stack.split_off(marks.pop().unwrap());
                let dict = stack.last_mut().unwrap().as_object_mut().unwrap();
                for pair in items.chunks(2) {
                    dict.insert(pair[0].as_str().unwrap().to_owned(), pair[1].clone());
                }
            }
            b'R' => {
                let (arguments, function) = (stack.pop().unwrap(), stack.pop().unwrap());
                stack.push(json!({ function.as_str().unwrap(): arguments }));
            }
            // An object of a class: its attributes are what `BUILD` gives it.
            0x81 => stack.truncate(stack.len() - 1),
            b'b' => {
                let attributes = stack.pop().unwrap();
                *stack.last_mut().unwrap() = attributes;
            }
            b'.' => break,
            code => panic!("opcode {code:#x} at {at}"),
        }
    }
    assert_eq!((stack.len(), at), (1, pickle.len()));
    stack.remove(0)
}
