//! The times of the lanes as they were recorded last.

use std::collections::BTreeMap;

/// A line a lane, behind comments about machine and date.
const RECORD: &str = include_str!("../../../benches/record/lanes.txt");

/// Seconds of each lane.
pub(super) fn last() -> BTreeMap<&'static str, u64> {
    let line = |line: &'static str| {
        let (lane, seconds) = line.split_once(' ')?;
        Some((lane, seconds.trim().parse().ok()?))
    };
    RECORD.lines().filter(|line| !line.starts_with('#')).filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test::LANES;

    #[test]
    fn recorded_lanes_are_lanes() {
        let recorded = last();
        assert!(recorded.len() > 10, "{recorded:?}");
        assert!(recorded.keys().all(|name| LANES.iter().any(|lane| lane.name == *name)), "{recorded:?}");
    }
}
