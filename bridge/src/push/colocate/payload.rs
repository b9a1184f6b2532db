//! What a rank is told: SGLang's flattened bucket, `{"flattened_tensor": …, "metadata": […]}`, as its
//! `MultiprocessingSerializer` would pickle it. Only globals that its `SafeUnpickler` lets through occur.

use driftless_transport::snapshot::TensorInfo;

use super::pickle::{Global, Pickle};
use super::{CudaPlace, Place};
use crate::engine::torch_name;
use crate::error::Result;
use crate::push::Bucket;
use crate::push::bucket::byte_len;

const METADATA: Global = ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata");
/// What SGLang has torch pickle CUDA tensors with: devices go by UUID, because their numbers differ among
/// processes.
const REBUILD: Global = ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified");

/// The pickle of a bucket that lies at a place.
pub(super) fn payload(tensors: &[TensorInfo], bucket: &Bucket, place: &Place) -> Result<Vec<u8>> {
    let mut at = 0u64;
    let mut items = Vec::with_capacity(bucket.tensors.len());
    for &index in &bucket.tensors {
        let info = &tensors[index];
        let bytes = byte_len(info)?;
        items.push((info, at, bytes));
        at += bytes;
    }
    let mut pickle = Pickle::new();
    pickle.dict(|pickle| {
        pickle.text("flattened_tensor");
        match place {
            Place::Cuda(place) => cuda_tensor(pickle, place),
            Place::Inline(bytes) => pickle.call(("torch", "ByteTensor"), |pickle| {
                pickle.call(("builtins", "bytearray"), |pickle| pickle.blob(bytes));
            }),
        }
        pickle.text("metadata");
        pickle.list(|pickle| {
            for (info, at, bytes) in items {
                metadata(pickle, info, at, bytes);
            }
        });
    });
    Ok(pickle.finish())
}

fn metadata(pickle: &mut Pickle, info: &TensorInfo, at: u64, bytes: u64) {
    pickle.object(METADATA, |pickle| {
        pickle.text("name");
        pickle.text(&info.name);
        pickle.text("shape");
        size(pickle, &info.shape);
        pickle.text("dtype");
        pickle.global(("torch", torch_name(info.dtype)));
        // In bytes, as `FlattenedTensorBucket` counts them.
        for (name, value) in [("start_idx", at), ("end_idx", at + bytes), ("numel", bytes)] {
            pickle.text(name);
            pickle.number(value);
        }
    });
}

/// The arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`.
fn cuda_tensor(pickle: &mut Pickle, place: &CudaPlace) {
    pickle.call(REBUILD, |pickle| {
        pickle.global(("torch", "Tensor"));
        size(pickle, &[place.bytes]);
        pickle.tuple(|pickle| pickle.number(1));
        pickle.number(0);
        pickle.global(("torch.storage", "TypedStorage"));
        pickle.global(("torch", "uint8"));
        pickle.text(&place.device);
        // Version 1 of torch's own header, which every torch that has one reads, and `c`: memory of
        // cudaMalloc.
        pickle.blob(&[b"\x01c".as_slice(), &place.handle].concat());
        pickle.number(place.bytes);
        pickle.number(0);
        pickle.no();
        pickle.blob(place.counters.as_bytes());
        pickle.number(place.counter);
        // No event to wait for: the bytes were there before anybody was told.
        pickle.blob(&[0; 64]);
        pickle.no();
    });
}

fn size(pickle: &mut Pickle, shape: &[u64]) {
    pickle.call(("torch", "Size"), |pickle| {
        pickle.tuple(|pickle| shape.iter().for_each(|&extent| pickle.number(extent)));
    });
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use driftless_transport::Dtype;
    use serde_json::{Value, json};

    use super::*;

    fn tensors() -> Vec<TensorInfo> {
        let tensor =
            |name: &str, dtype, shape: &[u64]| TensorInfo { name: name.into(), dtype, shape: shape.to_vec() };
        vec![
            tensor("model.layers.0.ü.weight", Dtype::Bf16, &[3, 2]),
            tensor("scale", Dtype::F32, &[]),
            tensor("model.layers.1.weight", Dtype::Bf16, &[4]),
            tensor("fp8", Dtype::F8E4M3, &[5, 1]),
        ]
    }

    fn bucket() -> Bucket {
        Bucket { tensors: vec![1, 0, 2, 3], bytes: 29 }
    }

    fn cuda() -> Place {
        Place::Cuda(CudaPlace {
            device: "8dcd9d15-7d15-4b6c-0d5c-9b9e1d3f7a01".into(),
            handle: std::array::from_fn(|n| n as u8 + 7),
            // More than fits in 32 bits, and with the highest bit of a byte set.
            bytes: 0x9_8000_0000,
            counters: "/driftless_1_2".into(),
            counter: 5,
        })
    }

    /// What Python reads, if there is one: `DRIFTLESS_SGLANG_PYTHON` with SGLang's own unpickler and torch,
    /// or any `python3` with its own.
    fn read(pickle: &[u8]) -> Option<Value> {
        let python = std::env::var("DRIFTLESS_SGLANG_PYTHON").unwrap_or_else(|_| "python3".into());
        let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/unpickle.py");
        let mut command = Command::new(python);
        command.arg(script).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().inspect_err(|error| println!("skipped: no python3: {error}")).ok()?;
        child.stdin.take().unwrap().write_all(pickle).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "Python could not read it");
        Some(serde_json::from_slice(&output.stdout).unwrap())
    }

    fn metadata() -> Value {
        let one = |name, shape: &[u64], dtype, start: u64, end: u64| json!({"name": name, "shape": shape, "dtype": dtype, "start_idx": start, "end_idx": end, "numel": end - start});
        json!([
            one("scale", &[], "torch.float32", 0, 4),
            one("model.layers.0.ü.weight", &[3, 2], "torch.bfloat16", 4, 16),
            one("model.layers.1.weight", &[4], "torch.bfloat16", 16, 24),
            one("fp8", &[5, 1], "torch.float8_e4m3fn", 24, 29),
        ])
    }

    #[test]
    fn python_reads_what_a_cuda_tensor_is_rebuilt_from() {
        let Some(found) = read(&payload(&tensors(), &bucket(), &cuda()).unwrap()) else { return };
        let handle: Vec<u8> = [1, b'c'].into_iter().chain(7..71).collect();
        let arguments = json!(["torch.Tensor", [0x9_8000_0000u64], [1], 0, "torch.storage.TypedStorage", "torch.uint8",
            "8dcd9d15-7d15-4b6c-0d5c-9b9e1d3f7a01", {"bytes": handle}, 0x9_8000_0000u64, 0, false,
            {"bytes": b"/driftless_1_2".to_vec()}, 5, {"bytes": vec![0; 64]}, false]);
        assert_eq!(found["flattened_tensor"], arguments);
        assert_eq!(found["metadata"], metadata());
    }

    #[test]
    fn python_reads_bytes_that_travel_along() {
        let bytes: Vec<u8> = (0..29).map(|n| n * 9).collect();
        let place = Place::Inline(bytes.clone().into());
        let Some(found) = read(&payload(&tensors(), &bucket(), &place).unwrap()) else { return };
        assert_eq!(found["flattened_tensor"], json!({ "tensor": bytes }));
        assert_eq!(found["metadata"], metadata());
    }

    #[test]
    fn the_bytes_are_those_of_docs_wire_colocate() {
        let tensors = [TensorInfo { name: "w".into(), dtype: Dtype::Bf16, shape: vec![1] }];
        let bucket = Bucket { tensors: vec![0], bytes: 2 };
        let found = payload(&tensors, &bucket, &Place::Inline([7u8, 8].as_slice().into())).unwrap();
        let text =
            |text: &str| [b"X".as_slice(), &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
        let number = |n: i32| [b"J".as_slice(), &n.to_le_bytes()].concat();
        let global = |module: &str, name: &str| [text(module), text(name), b"\x93\x94".to_vec()].concat();
        let expected = [
            b"\x80\x04}(".to_vec(),
            text("flattened_tensor"),
            global("torch", "ByteTensor"),
            b"(".to_vec(),
            global("builtins", "bytearray"),
            b"(\x8e\x02\0\0\0\0\0\0\0\x07\x08tRtR".to_vec(),
            text("metadata"),
            b"](".to_vec(),
            global("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"),
            b")\x81}(".to_vec(),
            [text("name"), text("w"), text("shape"), global("torch", "Size"), b"((".to_vec()].concat(),
            [number(1), b"ttR".to_vec(), text("dtype"), global("torch", "bfloat16")].concat(),
            [text("start_idx"), number(0), text("end_idx"), number(2), text("numel"), number(2)].concat(),
            b"ubeu.".to_vec(),
        ];
        assert_eq!(found, expected.concat());
    }
}
