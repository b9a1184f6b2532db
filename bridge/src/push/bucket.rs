//! Which tensors travel together: a function from a list of tensors and a budget to a few large calls.
//!
//! Every call costs an engine 2 to 3 ms besides its bytes, so buckets are filled as full as they get (first
//! fit, largest first). An engine cuts a flattened bucket apart by views, which need every tensor at a
//! multiple of its element size: tensors of wide elements come first. Experts travel apart from the rest,
//! because engines load them by another path.

use driftless_transport::snapshot::TensorInfo;

use crate::error::{Error, Result};

/// Tensors that travel in one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Positions in the list of tensors, in the order of their bytes.
    pub tensors: Vec<usize>,
    /// Bytes of all of them, which lie without gaps.
    pub bytes: u64,
}

/// Puts every tensor that has elements into exactly one bucket of at most `budget` bytes; one larger than
/// that has a bucket to itself.
///
/// # Errors
/// [`Error::TooLarge`] for a tensor whose size does not fit in 64 bits.
pub fn plan(tensors: &[TensorInfo], budget: u64) -> Result<Vec<Bucket>> {
    let mut items = Vec::new();
    for (index, info) in tensors.iter().enumerate() {
        let (bytes, expert) = (byte_len(info)?, is_expert(&info.name));
        if bytes > 0 {
            items.push(Item { index, bytes, expert });
        }
    }
    let mut buckets = Vec::new();
    for expert in [false, true] {
        let mut class: Vec<_> = items.iter().filter(|item| item.expert == expert).collect();
        class.sort_by_key(|item| (std::cmp::Reverse(item.bytes), item.index));
        buckets.extend(first_fit(&class, budget));
    }
    // Tensors of wide elements come first.
    for bucket in &mut buckets {
        bucket.tensors.sort_by_key(|&index| (std::cmp::Reverse(tensors[index].dtype.size()), index));
    }
    Ok(buckets)
}

/// What a tensor has, if that can be counted.
pub(super) fn byte_len(info: &TensorInfo) -> Result<u64> {
    info.byte_len().map_err(|_| Error::TooLarge { tensor: info.name.clone(), shape: info.shape.clone() })
}

struct Item {
    index: usize,
    bytes: u64,
    expert: bool,
}

fn first_fit(items: &[&Item], budget: u64) -> Vec<Bucket> {
    let mut buckets: Vec<Bucket> = Vec::new();
    // Every bucket before this one is full to the byte.
    let mut open = 0;
    for item in items {
        let fits = |bucket: &Bucket| bucket.bytes.checked_add(item.bytes).is_some_and(|sum| sum <= budget);
        match buckets[open..].iter_mut().find(|bucket| fits(bucket)) {
            Some(bucket) => {
                bucket.tensors.push(item.index);
                bucket.bytes += item.bytes;
            }
            None => buckets.push(Bucket { tensors: vec![item.index], bytes: item.bytes }),
        }
        while buckets.get(open).is_some_and(|bucket| bucket.bytes >= budget) {
            open += 1;
        }
    }
    buckets
}

/// Whether a name is that of a routed expert's weight, as Qwen, DeepSeek and Mixtral name them.
fn is_expert(name: &str) -> bool {
    name.contains(".experts.")
}

#[cfg(test)]
mod tests {
    use driftless_transport::Dtype;
    use proptest::prelude::*;

    use super::*;

    fn tensor(name: &str, dtype: Dtype, shape: &[u64]) -> TensorInfo {
        TensorInfo { name: name.into(), dtype, shape: shape.to_vec() }
    }

    fn lists() -> impl Strategy<Value = Vec<TensorInfo>> {
        let dtype = prop::sample::select(vec![Dtype::F32, Dtype::Bf16, Dtype::F8E4M3, Dtype::I64, Dtype::U8]);
        let one = (dtype, 0u64..50, prop::bool::weighted(0.3));
        prop::collection::vec(one, 0..80).prop_map(|tensors| {
            let named = tensors.into_iter().enumerate().map(|(n, (dtype, extent, expert))| {
                let name = if expert { format!("layers.0.mlp.experts.{n}.up") } else { format!("t{n}") };
                tensor(&name, dtype, &[extent])
            });
            named.collect()
        })
    }

    /// What every plan keeps to.
    fn check(tensors: &[TensorInfo], budget: u64, buckets: &[Bucket]) -> Result<(), TestCaseError> {
        let mut seen: Vec<_> = buckets.iter().flat_map(|bucket| bucket.tensors.clone()).collect();
        seen.sort_unstable();
        let all: Vec<_> = (0..tensors.len()).filter(|&n| tensors[n].byte_len().unwrap() > 0).collect();
        prop_assert_eq!(seen, all, "each tensor with elements once");
        for bucket in buckets {
            let mut offset = 0;
            for &index in &bucket.tensors {
                prop_assert_eq!(offset % tensors[index].dtype.size(), 0, "aligned");
                offset += tensors[index].byte_len().unwrap();
            }
            prop_assert_eq!(offset, bucket.bytes);
            prop_assert!(offset <= budget || bucket.tensors.len() == 1);
            let experts = bucket.tensors.iter().filter(|&&index| is_expert(&tensors[index].name)).count();
            prop_assert!(experts == 0 || experts == bucket.tensors.len(), "experts apart");
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn every_plan_is_whole_aligned_apart_and_full(tensors in lists(), budget in 1u64..600) {
            let buckets = plan(&tensors, budget).unwrap();
            check(&tensors, budget, &buckets)?;
            // First fit: of two buckets of a class, the second could not have gone into the first.
            for expert in [false, true] {
                let class: Vec<_> =
                    buckets.iter().filter(|b| is_expert(&tensors[b.tensors[0]].name) == expert).collect();
                for pair in class.windows(2) {
                    prop_assert!(pair[0].bytes + pair[1].bytes > budget);
                }
            }
        }
    }

    #[test]
    fn one_call_where_all_fits() {
        let tensors = [
            tensor("a", Dtype::Bf16, &[3]),
            tensor("b", Dtype::F32, &[2, 2]),
            tensor("empty", Dtype::F32, &[0, 7]),
            tensor("c", Dtype::F8E4M3, &[5]),
        ];
        let whole = Bucket { tensors: vec![1, 0, 3], bytes: 27 };
        assert_eq!(plan(&tensors, 27).unwrap(), [whole]);
        assert_eq!(plan(&tensors, 26).unwrap().len(), 2);
        assert_eq!(plan(&tensors, 1).unwrap().len(), 3);
        assert_eq!(plan(&[], 1).unwrap(), []);
    }

    #[test]
    fn sizes_beyond_64_bits_are_refused() {
        let refused = plan(&[tensor("big", Dtype::F32, &[u64::MAX, 2])], 1).unwrap_err();
        assert!(matches!(&refused, Error::TooLarge { tensor, .. } if tensor == "big"), "{refused}");
    }
}
