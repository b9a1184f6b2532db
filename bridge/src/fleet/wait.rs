//! Decides how long engines are waited for, as a function over how many are there.

use std::time::Duration;

/// What a wait has to do with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// How many engines are enough.
    pub(super) wanted: usize,
    /// How much longer the others are waited for.
    pub(super) patience: Duration,
    /// When it is over.
    pub(super) deadline: Duration,
}

/// How far a wait has come.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    /// Engines that are there.
    pub(super) there: usize,
    /// Engines that answer, and may come yet.
    pub(super) awaited: usize,
    /// Since enough were there for the first time.
    pub(super) since_enough: Duration,
    /// Since it began.
    pub(super) elapsed: Duration,
}

/// What follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Wait,
    /// With those that are there.
    GoOn,
    /// Too few are there, and it is over.
    Behind,
}

pub(super) fn judge(bounds: Bounds, seen: Seen) -> Verdict {
    let is_over = seen.elapsed >= bounds.deadline;
    if seen.there < bounds.wanted {
        return if is_over { Verdict::Behind } else { Verdict::Wait };
    }
    let is_done = is_over || seen.awaited == 0 || seen.since_enough >= bounds.patience;
    if is_done { Verdict::GoOn } else { Verdict::Wait }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn judge_waits_for_enough_and_a_little_for_the_rest() {
        let seconds = Duration::from_secs;
        let bounds = Bounds { wanted: 2, patience: seconds(10), deadline: seconds(300) };
        // Engines there, engines awaited, seconds since enough were there, seconds in all.
        for ((there, awaited, since_enough, elapsed), expected) in [
            ((0, 3, 0, 0), Verdict::Wait),
            ((1, 2, 0, 299), Verdict::Wait),
            // Those that are down may come back.
            ((1, 0, 0, 100), Verdict::Wait),
            ((1, 2, 0, 300), Verdict::Behind),
            ((0, 0, 0, 300), Verdict::Behind),
            ((3, 0, 0, 0), Verdict::GoOn),
            ((2, 0, 0, 5), Verdict::GoOn),
            ((2, 1, 0, 200), Verdict::Wait),
            ((2, 1, 9, 209), Verdict::Wait),
            ((2, 1, 10, 210), Verdict::GoOn),
            ((2, 1, 5, 300), Verdict::GoOn),
            // One of them went down again.
            ((1, 1, 10, 210), Verdict::Wait),
        ] {
            let (since_enough, elapsed) = (seconds(since_enough), seconds(elapsed));
            let seen = Seen { there, awaited, since_enough, elapsed };
            assert_eq!(judge(bounds, seen), expected, "{seen:?}");
        }
    }
}
