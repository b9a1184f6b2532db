//! Which tensors travel together: a function from a list of tensors and a budget to a few large calls.
//!
//! Every call costs an engine 2 to 3 ms besides its bytes, so buckets are filled as full as they get (first fit, largest first). An engine
//! cuts a flattened bucket apart by views, which need every tensor at a multiple of its element size: tensors of wide elements come first.
//! Experts travel apart from the rest, because engines load them by another path.

use driftless_transport::TensorInfo;

use crate::{Error, Result};

/// Tensors that travel in one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Positions in the list of tensors, in the order of their bytes.
    pub tensors: Vec<usize>,
    /// Bytes of all of them, which lie without gaps.
    pub bytes: u64,
}

/// Puts every tensor that has elements into exactly one bucket of at most `budget` bytes; one larger than that has a bucket to itself.
///
/// # Errors
/// [`Error::TooLarge`] for a tensor whose size does not fit in 64 bits.
pub fn plan(tensors: &[TensorInfo], budget: u64) -> Result<Vec<Bucket>> {
    let mut items = Vec::new();
    for (index, info) in tensors.iter().enumerate() {
        match info.byte_len() {
            Ok(0) => {}
            Ok(bytes) => items.push(Item { index, bytes, expert: is_expert(&info.name) }),
            Err(_) => {
                let (tensor, shape) = (info.name.clone(), info.shape.clone());
                return Err(Error::TooLarge { tensor, shape });
            }
        }
    }
    let mut buckets = Vec::new();
    for expert in [false, true] {
        let mut class: Vec<_> = items.iter().filter(|item| item.expert == expert).collect();
        class.sort_by_key(|item| (std::cmp::Reverse(item.bytes), item.index));
        buckets.extend(first_fit(&class, budget));
    }
    buckets.iter_mut().for_each(|bucket| align(tensors, bucket));
    Ok(buckets)
}

/// Shares of the budget that the first buckets of a growing plan have at most.
const FIRST_SHARES: [u64; 2] = [16, 4];

/// As [`plan`], but one bucket is cut into up to three that come first, each larger than the one before: nothing hides the gathering of the
/// first one, and each broadcast hides the gathering of the next. At most two buckets more than [`plan`] makes.
///
/// This is for receivers that wait for bytes and nothing else. Into an engine it does not pay: the HTTP call takes longer than the
/// first gathering, and two calls more cost 4 to 6 ms where a broadcast of 1 GiB takes 3. [`Group`](crate::Group) and
/// [`Colocation`](crate::Colocation) use [`plan`].
///
/// # Errors
/// As [`plan`].
pub fn plan_growing(tensors: &[TensorInfo], budget: u64) -> Result<Vec<Bucket>> {
    let mut buckets = plan(tensors, budget)?;
    let largest = buckets.iter().map(|bucket| bucket.bytes).max().unwrap_or(0);
    let heavy = (0..buckets.len()).filter(|&n| buckets[n].bytes >= largest - largest / 4);
    // The finer its tensors, the better it can be cut.
    let grain = |&n: &usize| buckets[n].tensors.iter().map(|&index| bytes_of(tensors, index)).max();
    let Some(first) = heavy.min_by_key(grain) else { return Ok(buckets) };
    let mut parts = cut(tensors, &buckets.remove(first), budget);
    parts.append(&mut buckets);
    Ok(parts)
}

/// A bucket in up to three, the smallest first. Parts that would be much smaller than their share, or larger than what they leave, are not
/// worth a call.
fn cut(tensors: &[TensorInfo], bucket: &Bucket, budget: u64) -> Vec<Bucket> {
    let mut rest = bucket.tensors.clone();
    rest.sort_by_key(|&index| (bytes_of(tensors, index), index));
    let (mut parts, mut left) = (Vec::new(), bucket.bytes);
    for most in FIRST_SHARES.map(|share| budget / share) {
        let mut bytes = 0;
        let fits = |index: &&usize| {
            let sum = bytes + bytes_of(tensors, **index);
            let fits = sum <= most;
            bytes = if fits { sum } else { bytes };
            fits
        };
        let count = rest.iter().take_while(fits).count();
        if count > 0 && bytes >= most / 2 && bytes <= left / 2 {
            left -= bytes;
            parts.push(Bucket { tensors: rest.drain(..count).collect(), bytes });
        }
    }
    parts.push(Bucket { tensors: rest, bytes: left });
    parts.iter_mut().for_each(|part| align(tensors, part));
    parts
}

/// Bytes of a tensor that is in a plan, which has refused those of which there are too many.
fn bytes_of(tensors: &[TensorInfo], index: usize) -> u64 {
    tensors[index].byte_len().unwrap_or_default()
}

/// Puts tensors of wide elements first.
fn align(tensors: &[TensorInfo], bucket: &mut Bucket) {
    bucket.tensors.sort_by_key(|&index| (std::cmp::Reverse(tensors[index].dtype.size()), index));
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
        fn a_growing_plan_is_a_plan_of_at_most_two_buckets_more(tensors in lists(), budget in 1u64..30_000) {
            let (even, growing) = (plan(&tensors, budget).unwrap(), plan_growing(&tensors, budget).unwrap());
            check(&tensors, budget, &growing)?;
            prop_assert!((even.len()..=even.len() + 2).contains(&growing.len()), "{} and {}", even.len(), growing.len());
            let parts = growing.iter().take(growing.len() + 1 - even.len());
            prop_assert!(parts.is_sorted_by_key(|part| part.bytes), "{growing:?}");
        }

        /// Where tensors are small against the budget and fill it, the first buckets are what they should be.
        #[test]
        fn fine_tensors_make_small_first_buckets(extents in prop::collection::vec(100u64..200, 150..300)) {
            let tensors: Vec<_> =
                extents.iter().enumerate().map(|(n, &extent)| tensor(&format!("t{n}"), Dtype::U8, &[extent])).collect();
            let budget = 12_800;
            let (even, growing) = (plan(&tensors, budget).unwrap(), plan_growing(&tensors, budget).unwrap());
            prop_assert_eq!(growing.len(), even.len() + 2);
            for (bucket, share) in growing.iter().zip(FIRST_SHARES) {
                let most = budget / share;
                prop_assert!((most / 2..=most).contains(&bucket.bytes), "{} of {most}", bucket.bytes);
            }
        }

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
    fn what_cannot_be_cut_well_stays_whole() {
        let mib = |size: u64| tensor("t", Dtype::U8, &[size << 20]);
        let sizes = |tensors: &[TensorInfo]| -> Vec<u64> {
            plan_growing(tensors, 512 << 20).unwrap().iter().map(|bucket| bucket.bytes >> 20).collect()
        };
        assert_eq!(sizes(&vec![mib(128); 8]), [128, 384, 512]);
        assert_eq!(sizes(&vec![mib(1); 1024]), [32, 128, 352, 512]);
        assert_eq!(sizes(&[mib(300), mib(200), mib(600)]), [500, 600], "nothing small to begin with");
        assert_eq!(sizes(&[mib(1), mib(500), mib(512)]), [501, 512], "nor much");
        assert_eq!(sizes(&vec![mib(1); 30]), [30], "one call where all fits in the first");
        assert!(sizes(&[]).is_empty());
    }

    #[test]
    fn sizes_beyond_64_bits_are_refused() {
        let refused = plan(&[tensor("big", Dtype::F32, &[u64::MAX, 2])], 1).unwrap_err();
        assert!(matches!(&refused, Error::TooLarge { tensor, .. } if tensor == "big"), "{refused}");
    }
}
