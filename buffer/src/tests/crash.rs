//! The power goes at every call to the medium, and any subset of unsynced pages has reached it.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::image::{Crash, Medium};
use super::work::{Work, check, open};

/// Miri runs a hundredth of it: it looks at the memory of the log, not at its crash states.
const MIRI: bool = cfg!(miri);
/// One crash in so many is looked at.
const APART: usize = if MIRI { 6 } else { 1 };
/// Up to this many open pages every subset is tried.
const EXHAUSTIVE: usize = if MIRI { 0 } else { 8 };
/// Tries in all for the moments with more.
const SEEDED: usize = if MIRI { 1 } else { 1200 };

/// Every state in which a crash at this moment may leave the medium, or `tries` random ones if there are too
/// many.
fn leavings(crash: &Crash, rng: &mut StdRng, tries: usize) -> Vec<Medium> {
    let open = crash.open_pages();
    let mut left = Vec::new();
    if open <= EXHAUSTIVE {
        let subset =
            |bits: usize| crash.leave(|page, states| if bits >> page & 1 == 1 { states - 1 } else { 0 });
        left.extend((0..1 << open).map(subset));
    }
    // Besides the newest state of a page, the kernel may have stored an older one.
    left.extend((0..tries).map(|_| crash.leave(|_, states| rng.random_range(0..states))));
    left
}

fn run(seed: u64, steps: usize) -> (Vec<Crash>, std::collections::BTreeMap<u64, u64>) {
    let medium = Medium::new();
    medium.record_crashes();
    let log = open(&medium).unwrap();
    let mut work = Work::new(&medium, seed);
    for _ in 0..steps {
        work.step(&log).unwrap();
    }
    let crashes = medium.crashes();
    (crashes, work.abandon())
}

#[test]
fn any_power_cut_leaves_what_was_acknowledged_and_whole_records() {
    let (mut checked, mut exhausted, mut sampled) = (0, 0, 0);
    let seeds = 0..if MIRI { 1 } else { 6 };
    let runs: Vec<_> = seeds.map(|seed| (seed, run(seed, if MIRI { 8 } else { 90 }))).collect();
    let large = |(_, (crashes, _)): &(u64, (Vec<Crash>, _))| {
        crashes.iter().filter(|crash| crash.open_pages() > EXHAUSTIVE).count()
    };
    let large: usize = runs.iter().map(large).sum();
    for (seed, (crashes, written)) in runs {
        let mut rng = StdRng::seed_from_u64(seed);
        for (index, crash) in crashes.iter().enumerate().skip(APART - 1).step_by(APART) {
            let many = crash.open_pages() > EXHAUSTIVE;
            let tries = if many { SEEDED.div_ceil(large) } else { 4_usize.div_ceil(APART) };
            let left = leavings(crash, &mut rng, tries);
            if many {
                sampled += left.len();
            } else {
                assert_eq!(
                    left.len(),
                    (1 << crash.open_pages()) + tries,
                    "every subset, and a few mixed states"
                );
                exhausted += 1;
            }
            for (subset, medium) in left.iter().enumerate() {
                let what = format!("seed {seed}, crash {index} at {}, subset {subset}", crash.at);
                check(medium, &written, &crash.promised, &what);
                checked += 1;
            }
        }
    }
    println!(
        "checked {checked} crash images: every subset at {exhausted} moments with at most {EXHAUSTIVE} open pages, {sampled} seeded ones at moments with more"
    );
    assert!(MIRI || checked > 3000 && exhausted > 100 && sampled >= 1000, "{checked} {exhausted} {sampled}");
}

#[test]
#[cfg_attr(miri, ignore = "the other test reaches the same code")]
fn a_power_cut_during_recovery_changes_nothing() {
    let mut checked = 0;
    for seed in 10..14 {
        let (crashes, written) = run(seed, 60);
        let mut rng = StdRng::seed_from_u64(seed);
        for crash in crashes.iter().step_by(7) {
            let left = crash.leave(|_, states| rng.random_range(0..states));
            left.record_crashes();
            drop(open(&left).unwrap());
            for again in left.crashes() {
                for medium in leavings(&again, &mut rng, 2) {
                    check(
                        &medium,
                        &written,
                        &crash.promised,
                        &format!("seed {seed}, recovery cut at {}", again.at),
                    );
                    checked += 1;
                }
            }
        }
    }
    println!("checked {checked} interrupted recoveries");
    assert!(checked > 200, "{checked}");
}
