//! Which lines of the log are printed, and which are only counted: a warning that is there already is told once more with
//! the number of its repetitions, before another line or after [`WINDOW`]. Times are arguments.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

/// How long repetitions of a line are counted before that is told.
pub(super) const WINDOW: Duration = Duration::from_secs(10);
/// Lines that are known at a time: as many hosts may warn in turns.
const KEPT: usize = 16;
/// Longest line that is kept.
const BYTES_MAX: usize = 8 << 10;

/// When something was logged.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    /// On the clock that ticks evenly, from the process's begin.
    pub(super) since: Duration,
    /// On the clock that people read.
    pub(super) at: SystemTime,
}

/// A line that is to be printed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) line: String,
    pub(super) at: SystemTime,
    /// How often it came since it was told last; 0 for one that is new.
    pub(super) more: u64,
}

/// A line that was printed.
#[derive(Debug)]
struct Known {
    line: String,
    /// When it was told last, with or without a count.
    told: Duration,
    /// Since then, and when the last of them came.
    more: u64,
    at: SystemTime,
}

impl Known {
    /// What is to be said of it now, if it came again.
    fn tell(&mut self, now: Moment) -> Option<Told> {
        let more = std::mem::take(&mut self.more);
        if more > 0 {
            self.told = now.since;
        }
        (more > 0).then(|| Told { line: self.line.clone(), at: self.at, more })
    }
}

/// The lines that are known.
#[derive(Debug, Default)]
pub(super) struct Repeats {
    /// In the order in which they were printed first.
    known: VecDeque<Known>,
}

impl Repeats {
    /// Takes a line, without its time, and returns what is to be printed for it. Only a warning is ever counted.
    pub(super) fn take(&mut self, line: &str, is_warning: bool, now: Moment) -> Vec<Told> {
        let mut told = self.due(now);
        if let Some(known) = self.known.iter_mut().find(|known| is_warning && known.line == line) {
            (known.more, known.at) = (known.more + 1, now.at);
            return told;
        }
        told.append(&mut self.rest(now));
        if is_warning && line.len() <= BYTES_MAX {
            // What goes was told just before.
            if self.known.len() == KEPT {
                self.known.pop_front();
            }
            self.known.push_back(Known { line: line.to_owned(), told: now.since, more: 0, at: now.at });
        }
        told.push(Told { line: line.to_owned(), at: now.at, more: 0 });
        told
    }

    /// What is to be printed because its time is over. A line that did not come again meanwhile is forgotten.
    pub(super) fn due(&mut self, now: Moment) -> Vec<Told> {
        let is_due = |known: &Known| now.since.saturating_sub(known.told) >= WINDOW;
        self.known.retain(|known| known.more > 0 || !is_due(known));
        let due = self.known.iter_mut().filter(|known| is_due(known));
        due.filter_map(|known| known.tell(now)).collect()
    }

    /// Everything that was only counted.
    pub(super) fn rest(&mut self, now: Moment) -> Vec<Told> {
        self.known.iter_mut().filter_map(|known| known.tell(now)).collect()
    }

    /// When a count has to be told, if there is one.
    pub(super) fn next(&self) -> Option<Duration> {
        self.known.iter().filter(|known| known.more > 0).map(|known| known.told + WINDOW).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A clock that says what it is told.
    fn at(milliseconds: u64) -> Moment {
        let since = Duration::from_millis(milliseconds);
        Moment { since, at: SystemTime::UNIX_EPOCH + since }
    }

    /// Lines with their counts.
    fn shown(told: &[Told]) -> Vec<(&str, u64)> {
        told.iter().map(|told| (&*told.line, told.more)).collect()
    }

    #[test]
    fn repeated_warning_is_counted_until_another_line_comes() {
        let mut repeats = Repeats::default();
        assert_eq!(shown(&repeats.take("a", true, at(0))), [("a", 0)]);
        for time in 1..4 {
            assert!(repeats.take("a", true, at(time)).is_empty());
        }
        let told = repeats.take("b", true, at(5));
        assert_eq!(shown(&told), [("a", 3), ("b", 0)]);
        assert_eq!(told[0].at, at(3).at, "when the last of them came");
        assert_eq!(shown(&repeats.take("c", false, at(6))), [("c", 0)]);
        assert!(repeats.rest(at(7)).is_empty(), "nothing is told twice");
    }

    #[test]
    fn count_is_told_after_ten_seconds_and_begins_anew() {
        let mut repeats = Repeats::default();
        repeats.take("a", true, at(0));
        assert_eq!(repeats.next(), None);
        repeats.take("a", true, at(4_000));
        assert_eq!(repeats.next(), Some(WINDOW));
        assert!(repeats.due(at(9_999)).is_empty());
        assert_eq!(shown(&repeats.due(at(10_000))), [("a", 1)]);
        assert_eq!((repeats.next(), shown(&repeats.due(at(10_001)))), (None, vec![]));
        // The next ten seconds begin where the count was told.
        assert!(repeats.take("a", true, at(19_000)).is_empty());
        assert_eq!(shown(&repeats.take("a", true, at(20_000))), [("a", 1)]);
        assert_eq!(shown(&repeats.rest(at(20_001))), [("a", 1)], "the one that came last");
    }

    #[test]
    fn warning_that_comes_seldom_is_printed_each_time() {
        let mut repeats = Repeats::default();
        for time in [0, 10_000, 60_000] {
            assert_eq!(shown(&repeats.take("a", true, at(time))), [("a", 0)], "{time}");
        }
    }

    #[test]
    fn warnings_that_take_turns_are_counted_each() {
        let mut repeats = Repeats::default();
        let printed = (0..20).flat_map(|time| repeats.take(["a", "b"][time % 2], true, at(time as u64)));
        assert_eq!(printed.count(), 2);
        assert_eq!(shown(&repeats.due(at(10_001))), [("a", 9), ("b", 9)]);
    }

    #[test]
    fn what_is_no_warning_is_printed_each_time() {
        let mut repeats = Repeats::default();
        repeats.take("a", true, at(0));
        for time in 1..3 {
            assert_eq!(shown(&repeats.take("a", false, at(time))), [("a", 0)]);
        }
    }

    #[test]
    fn few_and_short_lines_are_kept() {
        let mut repeats = Repeats::default();
        for number in 0..100 {
            repeats.take(&number.to_string(), true, at(number));
        }
        assert_eq!(repeats.known.len(), KEPT);
        assert!(repeats.take("99", true, at(100)).is_empty());
        assert_eq!(shown(&repeats.take("0", true, at(101))), [("99", 1), ("0", 0)]);
        let long = "x".repeat(BYTES_MAX + 1);
        for time in 102..104 {
            assert_eq!(repeats.take(&long, true, at(time)).len(), 1);
        }
        assert_eq!(repeats.known.len(), KEPT);
    }
}
