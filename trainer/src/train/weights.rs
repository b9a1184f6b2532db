//! The digest of a version's weights, which a run remembers and a replay comes to.

use std::collections::BTreeSet;

use driftless_store::ContentDigest;
use driftless_transport::manifest::Tensor;
use driftless_transport::tied::is_head;

/// One digest of all weights: of the tensors' names, types, shapes and digests. An output head that equals another
/// tensor does not count: one version may leave it out, and another have it.
pub(super) fn weights_digest(tensors: &[Tensor]) -> ContentDigest {
    let names = |tensor: &Tensor| std::iter::once(tensor.name.clone()).chain(tensor.aliases.clone());
    let contents = |tensor: &Tensor| format!("{} {:?} {}", tensor.dtype, tensor.shape, tensor.digest);
    let named = tensors.iter().flat_map(|tensor| names(tensor).map(|name| (name, contents(tensor))));
    let mut named: Vec<(String, String)> = named.collect();
    let others: BTreeSet<String> =
        named.iter().filter(|(name, _)| !is_head(name)).map(|(_, contents)| contents.clone()).collect();
    named.retain(|(name, contents)| !is_head(name) || !others.contains(contents));
    named.sort_unstable();
    let lines: String = named.into_iter().map(|(name, contents)| format!("{name} {contents}\n")).collect();
    ContentDigest::of(lines.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftless_transport::manifest::Tables;
    use driftless_transport::{Dtype, Tensors};

    #[test]
    fn weights_digest_is_of_names_and_values_and_of_no_tied_head() {
        let digest = |tensors: &[(&str, u8)]| {
            let add = |all: Tensors<'static>, (name, value): &(&str, u8)| {
                all.tensor(*name, Dtype::Bf16, [2], vec![*value; 4]).unwrap()
            };
            weights_digest(&Tables::of(&tensors.iter().fold(Tensors::new(), add)).unwrap().tensors)
        };
        let plain = digest(&[("a.weight", 1), ("b.weight", 2)]);
        assert_eq!(digest(&[("a.weight", 1), ("b.weight", 2), ("lm_head.weight", 2)]), plain);
        for other in [
            &[("a.weight", 2), ("b.weight", 1)][..],
            &[("a.weight", 1), ("c.weight", 2)],
            &[("a.weight", 1), ("b.weight", 2), ("lm_head.weight", 3)],
        ] {
            assert_ne!(digest(other), plain, "{other:?}");
        }
        let mut tables =
            Tables::of(&Tensors::new().tensor("a.weight", Dtype::Bf16, [2], vec![1; 4]).unwrap());
        tables.as_mut().unwrap().tensors[0].aliases.push("b.weight".into());
        assert_eq!(weights_digest(&tables.unwrap().tensors), digest(&[("a.weight", 1), ("b.weight", 1)]));
    }
}
