//! What the places of an engine were doing, as functions over time. A place is room for one request of ours.
//!
//! Time on a place is told by our clock and by the stream: from the request to its first token the engine reads, behind it
//! the engine draws. An engine that does not stream a request draws from its beginning on.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::member::Standing;
use crate::engine::Label;

/// Why a request was made again, and what it had drawn was thrown away unless it stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Cause {
    /// Another program aborted it.
    Aborted,
    /// Its engine failed, or did not answer in time.
    Failed,
    /// The engine was removed from the fleet.
    Removed,
    /// Weights changed in mid-reply, on an engine that does not say which tokens are whose.
    Crossed,
    /// The engine drew with weights that are older than was asked for.
    TooOld,
    /// It was given up: the sample is no longer wanted, or the process ended.
    GivenUp,
}

impl Cause {
    /// Its name, in words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Aborted => "aborted",
            Self::Failed => "engine failed",
            Self::Removed => "engine removed",
            Self::Crossed => "crossed by an update",
            Self::TooOld => "too old",
            Self::GivenUp => "given up",
        }
    }
}

/// Why a place is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Free {
    /// The engine would take a request, and none is there.
    Unasked,
    /// It does not serve yet what is asked for.
    Behind,
    /// It does not answer, or was refused.
    Down,
    /// It is to leave the fleet.
    Draining,
}

impl Free {
    /// Its name, in words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unasked => "no request",
            Self::Behind => "behind the version",
            Self::Down => "down",
            Self::Draining => "draining",
        }
    }

    /// Of an engine, given the newest version that was asked for.
    pub(super) fn of(standing: &Standing, wanted: Option<&Label>) -> Self {
        match standing {
            Standing { draining: Some(_), .. } => Self::Draining,
            Standing { up: false, .. } => Self::Down,
            _ if !standing.may_take(wanted) => Self::Behind,
            _ => Self::Unasked,
        }
    }
}

/// What places were doing: times of all of them together, so that two places have two seconds in each.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// In all; what follows adds up to it.
    pub places: Duration,
    /// Prompts were read for the first time.
    pub prefill: Duration,
    /// Prompts were read again, with what was drawn behind them.
    pub prefill_again: BTreeMap<Cause, Duration>,
    /// Tokens were drawn that stay.
    pub decoded: Duration,
    /// What came of it was thrown away.
    pub lost: BTreeMap<Cause, Duration>,
    /// Requests that have not ended yet.
    pub under_way: Duration,
    /// Nothing.
    pub free: BTreeMap<Free, Duration>,
    /// The tokens of requests that have ended.
    pub tokens: Tokens,
}

/// Tokens that requests had engines read and draw, as far as engines told of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tokens {
    /// Of prompts, read for the first time. An engine may have had them in its cache.
    pub prefill: u64,
    /// Of prompts that were read again, with what was drawn behind them.
    pub prefill_again: BTreeMap<Cause, u64>,
    /// Of both, those that engines say they had in their prefix caches.
    pub cached: u64,
    /// Of those, the ones whose request then drew its first token with other weights than it was sent for: the cache may
    /// have them from older weights.
    pub stale: u64,
    /// Drawn, and they stay.
    pub decoded: u64,
    /// Drawn, and thrown away.
    pub lost: BTreeMap<Cause, u64>,
}

impl Tokens {
    /// Adds those of other requests.
    fn add(&mut self, other: &Tokens) {
        self.prefill += other.prefill;
        self.cached += other.cached;
        self.stale += other.stale;
        self.decoded += other.decoded;
        for (cause, tokens) in &other.prefill_again {
            *self.prefill_again.entry(*cause).or_default() += tokens;
        }
        for (cause, tokens) in &other.lost {
            *self.lost.entry(*cause).or_default() += tokens;
        }
    }
}

impl Usage {
    /// Adds those of other places.
    pub fn add(&mut self, other: &Usage) {
        self.places += other.places;
        self.prefill += other.prefill;
        self.decoded += other.decoded;
        self.under_way += other.under_way;
        for (cause, time) in &other.prefill_again {
            *self.prefill_again.entry(*cause).or_default() += *time;
        }
        for (cause, time) in &other.lost {
            *self.lost.entry(*cause).or_default() += *time;
        }
        for (free, time) in &other.free {
            *self.free.entry(*free).or_default() += *time;
        }
        self.tokens.add(&other.tokens);
    }
}

/// What one attempt took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Spent {
    pub(super) prefill: Duration,
    pub(super) decoded: Duration,
    pub(super) lost: Duration,
    pub(super) tokens_read: u64,
    pub(super) tokens_cached: u64,
    pub(super) tokens_stale: u64,
    pub(super) tokens_kept: u64,
    pub(super) tokens_lost: u64,
}

/// When an attempt got on, and how far.
#[derive(Debug, Clone, Copy)]
pub(super) struct Marks {
    pub(super) begin: Instant,
    /// Its first token came.
    pub(super) first: Option<Instant>,
    /// Its last token came that stays, so far.
    pub(super) kept: Option<Instant>,
    /// Tokens that the engine has to read first.
    pub(super) tokens: u64,
    /// How many of them it had in its cache, and how many of those perhaps from other weights.
    pub(super) tokens_cached: u64,
    pub(super) tokens_stale: u64,
    /// Tokens that came, and how many of them stay.
    pub(super) tokens_drawn: u64,
    pub(super) tokens_kept: u64,
}

impl Marks {
    pub(super) fn new(begin: Instant) -> Self {
        let (tokens, tokens_cached, tokens_stale, tokens_drawn, tokens_kept) = (0, 0, 0, 0, 0);
        Self {
            begin,
            first: None,
            kept: None,
            tokens,
            tokens_cached,
            tokens_stale,
            tokens_drawn,
            tokens_kept,
        }
    }

    /// What the attempt took that ended at `end`, whole or not. Reading for nothing that stays is lost.
    pub(super) fn spent(self, end: Instant, is_whole: bool) -> Spent {
        let Marks { begin, first, kept, tokens, tokens_cached, tokens_stale, tokens_drawn, tokens_kept } =
            self;
        let first = first.unwrap_or(begin);
        let tokens_kept = if is_whole { tokens_drawn } else { tokens_kept };
        let tokens_lost = tokens_drawn.saturating_sub(tokens_kept);
        let tokens_read = if tokens_drawn > 0 { tokens } else { 0 };
        let (prefill, decoded, lost) = match if is_whole { Some(end) } else { kept } {
            Some(kept) => (first - begin, kept - first, end - kept),
            None => (Duration::ZERO, Duration::ZERO, end - begin),
        };
        Spent { prefill, decoded, lost, tokens_read, tokens_cached, tokens_stale, tokens_kept, tokens_lost }
    }
}

/// Follows the places of one engine.
#[derive(Debug)]
pub(super) struct Clock {
    usage: Usage,
    /// Time on places that attempts held, also those that have not ended.
    busy: Duration,
    places: u32,
    since: Instant,
    in_flight: u32,
    free: Free,
}

impl Clock {
    /// Of an engine that joins with so many places.
    pub(super) fn new(places: usize, since: Instant) -> Self {
        let places = u32::try_from(places).unwrap_or(u32::MAX);
        Self { usage: Usage::default(), busy: Duration::ZERO, places, since, in_flight: 0, free: Free::Down }
    }

    /// From now on so many requests are under way, and the other places are free for this reason.
    pub(super) fn turn(&mut self, now: Instant, in_flight: usize, free: Free) {
        let time = now.saturating_duration_since(self.since);
        let idle = self.places.saturating_sub(self.in_flight);
        self.busy += time * self.in_flight;
        self.usage.places += time * (idle + self.in_flight);
        if idle > 0 {
            *self.usage.free.entry(self.free).or_default() += time * idle;
        }
        (self.since, self.free) = (now, free);
        self.in_flight = u32::try_from(in_flight).unwrap_or(u32::MAX);
    }

    /// An attempt has ended, for `cause` unless it is whole. `again` says why its prompt was read before.
    pub(super) fn end(&mut self, spent: Spent, cause: Option<Cause>, again: Option<Cause>) {
        let Spent { prefill, decoded, lost, tokens_read, tokens_kept, tokens_lost, .. } = spent;
        self.busy = self.busy.saturating_sub(prefill + decoded + lost);
        self.usage.decoded += decoded;
        self.usage.tokens.decoded += tokens_kept;
        self.usage.tokens.cached += spent.tokens_cached;
        self.usage.tokens.stale += spent.tokens_stale;
        match again {
            Some(again) => {
                *self.usage.prefill_again.entry(again).or_default() += prefill;
                *self.usage.tokens.prefill_again.entry(again).or_default() += tokens_read;
            }
            None => {
                self.usage.prefill += prefill;
                self.usage.tokens.prefill += tokens_read;
            }
        }
        let cause = cause.unwrap_or(Cause::GivenUp);
        if lost > Duration::ZERO {
            *self.usage.lost.entry(cause).or_default() += lost;
        }
        if tokens_lost > 0 {
            *self.usage.tokens.lost.entry(cause).or_default() += tokens_lost;
        }
    }

    /// The engine has no places from now on.
    pub(super) fn close(&mut self, now: Instant) {
        self.turn(now, self.in_flight as usize, self.free);
        self.places = 0;
    }

    /// Up to now.
    pub(super) fn read(&mut self, now: Instant) -> Usage {
        self.turn(now, self.in_flight as usize, self.free);
        Usage { under_way: self.busy, ..self.usage.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn sum(usage: &Usage) -> Duration {
        let maps = usage.prefill_again.values().chain(usage.lost.values()).sum::<Duration>();
        let free = usage.free.values().sum::<Duration>();
        usage.prefill + usage.decoded + usage.under_way + maps + free
    }

    #[test]
    fn marks_split_an_attempt_by_what_stays() {
        let begin = Instant::now();
        let at = |second: u32| begin + second * SECOND;
        let marks = |first: Option<u32>, kept: Option<u32>| Marks {
            first: first.map(at),
            kept: kept.map(at),
            ..Marks::new(begin)
        };
        for (first, kept, is_whole, expected) in [
            (Some(2), Some(5), true, (2, 5, 0)),
            (None, None, true, (0, 7, 0)),
            (Some(2), Some(5), false, (2, 3, 2)),
            (Some(2), None, false, (0, 0, 7)),
            (None, None, false, (0, 0, 7)),
        ] {
            let Spent { prefill, decoded, lost, .. } = marks(first, kept).spent(at(7), is_whole);
            assert_eq!(
                (prefill, decoded, lost),
                (expected.0 * SECOND, expected.1 * SECOND, expected.2 * SECOND)
            );
        }
    }

    #[test]
    fn tokens_are_told_apart_by_what_stays() {
        let begin = Instant::now();
        let mut clock = Clock::new(4, begin);
        let marks =
            |drawn, kept| Marks { tokens: 10, tokens_drawn: drawn, tokens_kept: kept, ..Marks::new(begin) };
        let cached = Marks { tokens_cached: 8, tokens_stale: 6, ..marks(5, 3) };
        clock.end(cached.spent(begin, true), None, None);
        clock.end(marks(5, 3).spent(begin, false), Some(Cause::Removed), None);
        clock.end(marks(7, 0).spent(begin, false), Some(Cause::Crossed), Some(Cause::Removed));
        // No token came, and the prompt may not have been read.
        clock.end(marks(0, 0).spent(begin, false), Some(Cause::Failed), None);
        let tokens = clock.read(begin).tokens;
        let expected = Tokens {
            prefill: 20,
            prefill_again: BTreeMap::from([(Cause::Removed, 10)]),
            cached: 8,
            stale: 6,
            decoded: 8,
            lost: BTreeMap::from([(Cause::Removed, 2), (Cause::Crossed, 7)]),
        };
        assert_eq!(tokens, expected);
        let mut twice = tokens.clone();
        twice.add(&tokens);
        assert_eq!((twice.decoded, twice.lost[&Cause::Crossed]), (16, 14));
        assert_eq!((twice.cached, twice.stale), (16, 12));
    }

    #[test]
    fn clock_accounts_for_every_place_at_all_times() {
        let begin = Instant::now();
        let at = |second: u32| begin + second * SECOND;
        let mut clock = Clock::new(2, begin);
        clock.turn(at(3), 0, Free::Unasked);
        clock.turn(at(4), 1, Free::Unasked);
        clock.turn(at(5), 2, Free::Behind);
        let usage = clock.read(at(6));
        assert_eq!((usage.places, usage.under_way), (12 * SECOND, 3 * SECOND));
        assert_eq!(usage.free, BTreeMap::from([(Free::Unasked, 3 * SECOND), (Free::Down, 6 * SECOND)]));
        assert_eq!(sum(&usage), usage.places);
        // One that began at 4 ends whole at 8; the other goes with its engine at 9.
        clock.turn(at(8), 1, Free::Behind);
        clock.end(Marks { first: Some(at(5)), ..Marks::new(at(4)) }.spent(at(8), true), None, None);
        clock.close(at(9));
        clock.turn(at(9), 0, Free::Down);
        let again = Some(Cause::Failed);
        clock.end(
            Marks { kept: Some(at(7)), ..Marks::new(at(5)) }.spent(at(9), false),
            Some(Cause::Removed),
            again,
        );
        let usage = clock.read(at(20));
        assert_eq!((usage.prefill, usage.decoded, usage.under_way), (SECOND, 5 * SECOND, Duration::ZERO));
        assert_eq!(usage.lost, BTreeMap::from([(Cause::Removed, 2 * SECOND)]));
        assert_eq!(usage.free[&Free::Behind], SECOND);
        assert_eq!((usage.places, sum(&usage)), (18 * SECOND, 18 * SECOND), "none behind its end");
        let mut twice = usage.clone();
        twice.add(&usage);
        assert_eq!((twice.places, sum(&twice)), (36 * SECOND, 36 * SECOND));
    }
}
