//! Which rank trains on which sample.

/// Deals samples of these lengths out to ranks, in turn. With `operations`, of each token and of each pair of
/// tokens of a sample, each rank gets about as many of those (`--balance-data`). Returns each rank's samples.
pub(crate) fn share(lengths: &[usize], ranks: usize, operations: Option<[f64; 2]>) -> Vec<Vec<usize>> {
    let mut shares = vec![Vec::new(); ranks.max(1)];
    let Some([per_token, per_pair]) = operations else {
        for index in 0..lengths.len() {
            shares[index % ranks.max(1)].push(index);
        }
        return shares;
    };
    let cost = |index: usize| {
        let length = lengths[index] as f64;
        per_token * length + per_pair * length * length
    };
    // The longest first, each to the rank that has least (Graham 1969).
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by(|&a, &b| lengths[b].cmp(&lengths[a]).then(a.cmp(&b)));
    let mut costs = vec![0.0; shares.len()];
    for index in order {
        let least = (0..costs.len()).min_by(|&a, &b| f64::total_cmp(&costs[a], &costs[b])).unwrap_or(0);
        costs[least] += cost(index);
        shares[least].push(index);
    }
    shares.iter_mut().for_each(|share| share.sort_unstable());
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_is_dealt_once() {
        let lengths: Vec<usize> = (0..37).map(|i| (i * 7919) % 400 + 1).collect();
        for ranks in [1, 2, 3, 8, 64] {
            for operations in [None, Some([1.0, 0.01])] {
                let mut dealt: Vec<usize> =
                    share(&lengths, ranks, operations).into_iter().flatten().collect();
                dealt.sort_unstable();
                assert_eq!(dealt, (0..37).collect::<Vec<_>>(), "{ranks} ranks, {operations:?}");
            }
        }
    }

    #[test]
    fn balance_evens_out_operations_not_samples() {
        // In turn, rank 0 gets every long one.
        let lengths = [4000, 100, 4000, 100, 100, 100, 100, 100];
        let cost = |share: &Vec<usize>| share.iter().map(|&i| (lengths[i] * lengths[i]) as f64).sum::<f64>();
        let [turns, even] = [None, Some([0.0, 1.0])].map(|operations| {
            let shares = share(&lengths, 2, operations);
            shares.iter().map(cost).fold(0.0, f64::max)
        });
        assert!(even < 0.52 * turns, "{even} against {turns}");
    }

    #[test]
    fn empty_share_is_a_share() {
        assert_eq!(share(&[5], 2, Some([1.0, 1.0])), vec![vec![0], vec![]]);
        assert_eq!(share(&[], 2, None), vec![Vec::<usize>::new(); 2]);
    }
}
