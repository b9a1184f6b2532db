//! Where the time of the engines' places went. A place is room for one request, and has one place-second in each second.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use driftless_bridge::engine::Decoded;
use driftless_bridge::fleet::{Cause, Usage};
use serde::{Deserialize, Serialize};

use crate::metrics::unix_us;

/// Place-seconds of all engines since [`Goodput::began_at_ms`], by what the places were doing. They add up to
/// [`Goodput::places_s`]. Pauses of engines lie in what was under way then.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Goodput {
    /// When this process began to count, in milliseconds since 1970. Lines with the same moment count on from each other.
    pub began_at_ms: u64,
    /// In all.
    pub places_s: f64,
    /// Tokens were drawn of groups that a step took, but those that are too old.
    pub trained_s: f64,
    /// Tokens were drawn that are kept, and that a step may still learn from.
    pub waiting_s: f64,
    /// Tokens were drawn for what was measured on held-out prompts.
    pub evaluated_s: f64,
    /// Tokens were drawn that are kept, and that no step learns from, by reason.
    pub left_out_s: BTreeMap<String, f64>,
    /// Tokens were drawn and thrown away, by reason.
    pub lost_s: BTreeMap<String, f64>,
    /// Prompts were read, where the engine streams.
    pub prefill_s: f64,
    /// Prompts were read again, with the tokens behind them, by reason.
    pub prefill_again_s: BTreeMap<String, f64>,
    /// Requests that had not ended yet.
    pub under_way_s: f64,
    /// Nothing, by reason.
    pub idle_s: BTreeMap<String, f64>,
    /// The tokens of requests that have ended.
    pub tokens: Tokens,
}

/// Tokens since [`Goodput::began_at_ms`], by what became of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tokens {
    /// Drawn, of groups that a step took, but those that are too old.
    pub trained: u64,
    /// Drawn and kept; a step may still learn from them.
    pub waiting: u64,
    /// Drawn for what was measured on held-out prompts.
    pub evaluated: u64,
    /// Drawn and kept, and no step learns from them, by reason.
    pub left_out: BTreeMap<String, u64>,
    /// Drawn and thrown away, by reason.
    pub lost: BTreeMap<String, u64>,
    /// Of prompts, the first time that engines were given them.
    pub prefill: u64,
    /// Of prompts that engines were given again, with the tokens behind them, by reason.
    pub prefill_again: BTreeMap<String, u64>,
    /// Of both, those that engines say they had in their prefix caches.
    pub cached: u64,
    /// Of those, the ones that may be from older weights than the first token behind them.
    pub stale_prefix: u64,
}

/// What became of tokens that engines drew and that are kept.
#[derive(Debug, Clone)]
pub(crate) struct Kept {
    /// Since when that is counted.
    pub(crate) began: SystemTime,
    pub(crate) trained: Decoded,
    pub(crate) evaluated: Decoded,
    pub(crate) left_out: BTreeMap<&'static str, Decoded>,
}

impl Goodput {
    /// Of places that did this, given what became of what they drew.
    pub(crate) fn of(usage: &Usage, kept: &Kept) -> Self {
        let Kept { began, trained, evaluated, left_out } = kept;
        let mut known = Decoded::default();
        [trained, evaluated].into_iter().chain(left_out.values()).for_each(|part| known += *part);
        let seconds = |(name, time): (&str, &Duration)| (name.to_owned(), time.as_secs_f64());
        Goodput {
            began_at_ms: unix_us(*began) / 1000,
            places_s: usage.places.as_secs_f64(),
            trained_s: trained.time.as_secs_f64(),
            waiting_s: usage.decoded.saturating_sub(known.time).as_secs_f64(),
            evaluated_s: evaluated.time.as_secs_f64(),
            left_out_s: left_out.iter().map(|(why, part)| seconds((why, &part.time))).collect(),
            lost_s: usage.lost.iter().map(|(cause, time)| seconds((cause.name(), time))).collect(),
            prefill_s: usage.prefill.as_secs_f64(),
            prefill_again_s: usage
                .prefill_again
                .iter()
                .map(|(cause, time)| seconds((cause.name(), time)))
                .collect(),
            under_way_s: usage.under_way.as_secs_f64(),
            idle_s: usage.free.iter().map(|(free, time)| seconds((free.name(), time))).collect(),
            tokens: Tokens::of(&usage.tokens, kept, known.tokens),
        }
    }

    /// Each category in words, with its place-seconds.
    #[must_use]
    pub fn parts(&self) -> Vec<(String, f64)> {
        let named = |what: &str, times: &BTreeMap<String, f64>| {
            times.iter().map(|(why, time)| (format!("{what}: {why}"), *time)).collect::<Vec<_>>()
        };
        let mut parts = vec![
            ("trained".to_owned(), self.trained_s),
            ("waiting for a step".to_owned(), self.waiting_s),
            ("evaluated".to_owned(), self.evaluated_s),
            ("prompts read".to_owned(), self.prefill_s),
            ("under way".to_owned(), self.under_way_s),
        ];
        parts.extend(named("left out", &self.left_out_s));
        parts.extend(named("lost", &self.lost_s));
        parts.extend(named("read again", &self.prefill_again_s));
        parts.extend(named("idle", &self.idle_s));
        parts
    }

    /// What no category has, as a share: times that were told twice or not at all.
    #[must_use]
    pub fn remainder(&self) -> f64 {
        let parts: f64 = self.parts().iter().map(|(_, time)| time).sum();
        (self.places_s - parts) / self.places_s.max(f64::MIN_POSITIVE)
    }

    /// The sum over the processes of a run, of lines in order; `None` without any.
    pub fn total<'a>(lines: impl IntoIterator<Item = &'a Goodput>) -> Option<Goodput> {
        let last: BTreeMap<u64, &Goodput> = lines.into_iter().map(|line| (line.began_at_ms, line)).collect();
        last.into_values().cloned().reduce(|mut all, next| {
            // What became of that is not counted by the process that went on with it.
            let open = std::mem::take(&mut all.waiting_s) + std::mem::take(&mut all.under_way_s);
            if open > 0.0 {
                *all.left_out_s.entry("restart".to_owned()).or_default() += open;
            }
            Goodput {
                began_at_ms: all.began_at_ms,
                places_s: all.places_s + next.places_s,
                trained_s: all.trained_s + next.trained_s,
                waiting_s: all.waiting_s + next.waiting_s,
                evaluated_s: all.evaluated_s + next.evaluated_s,
                left_out_s: add(all.left_out_s, next.left_out_s),
                lost_s: add(all.lost_s, next.lost_s),
                prefill_s: all.prefill_s + next.prefill_s,
                prefill_again_s: add(all.prefill_again_s, next.prefill_again_s),
                under_way_s: all.under_way_s + next.under_way_s,
                idle_s: add(all.idle_s, next.idle_s),
                tokens: all.tokens.and(next.tokens),
            }
        })
    }
}

impl Tokens {
    fn of(told: &driftless_bridge::fleet::Tokens, kept: &Kept, known: u64) -> Self {
        let named = |tokens: &BTreeMap<Cause, u64>| {
            tokens.iter().map(|(cause, tokens)| (cause.name().to_owned(), *tokens)).collect()
        };
        Tokens {
            trained: kept.trained.tokens,
            waiting: told.decoded.saturating_sub(known),
            evaluated: kept.evaluated.tokens,
            left_out: kept.left_out.iter().map(|(why, part)| ((*why).to_owned(), part.tokens)).collect(),
            lost: named(&told.lost),
            prefill: told.prefill,
            prefill_again: named(&told.prefill_again),
            cached: told.cached,
            stale_prefix: told.stale,
        }
    }

    /// Those of the process that went on, too.
    fn and(mut self, next: Tokens) -> Self {
        let open = std::mem::take(&mut self.waiting);
        if open > 0 {
            *self.left_out.entry("restart".to_owned()).or_default() += open;
        }
        Tokens {
            trained: self.trained + next.trained,
            waiting: next.waiting,
            evaluated: self.evaluated + next.evaluated,
            left_out: add(self.left_out, next.left_out),
            lost: add(self.lost, next.lost),
            prefill: self.prefill + next.prefill,
            prefill_again: add(self.prefill_again, next.prefill_again),
            cached: self.cached + next.cached,
            stale_prefix: self.stale_prefix + next.stale_prefix,
        }
    }

    /// Each category of tokens that engines drew, in words, with their number.
    #[must_use]
    pub fn drawn(&self) -> Vec<(String, u64)> {
        let named = |what: &'static str, tokens: &BTreeMap<String, u64>| {
            tokens.iter().map(move |(why, tokens)| (format!("{what}: {why}"), *tokens)).collect::<Vec<_>>()
        };
        let mut parts = vec![
            ("trained".to_owned(), self.trained),
            ("waiting for a step".to_owned(), self.waiting),
            ("evaluated".to_owned(), self.evaluated),
        ];
        parts.extend(named("left out", &self.left_out));
        parts.extend(named("lost", &self.lost));
        parts
    }
}

fn add<T: std::ops::AddAssign + Default>(
    mut all: BTreeMap<String, T>,
    next: BTreeMap<String, T>,
) -> BTreeMap<String, T> {
    next.into_iter().for_each(|(name, part)| *all.entry(name).or_default() += part);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_takes_the_last_line_of_each_process() {
        let line = |began_at_ms, places_s, trained_s| Goodput {
            began_at_ms,
            places_s,
            trained_s,
            idle_s: BTreeMap::from([("down".to_owned(), places_s - trained_s)]),
            ..Goodput::default()
        };
        let counted = |mut line: Goodput, trained| {
            line.tokens =
                Tokens { trained, lost: BTreeMap::from([("aborted".to_owned(), 1)]), ..Tokens::default() };
            line
        };
        let lines = [counted(line(1, 20.0, 8.0), 5), counted(line(5, 10.0, 9.0), 7)];
        let tokens = Goodput::total(&lines).unwrap().tokens;
        assert_eq!((tokens.trained, tokens.lost["aborted"]), (12, 2));
        let lines = [line(1, 10.0, 4.0), line(1, 20.0, 8.0), line(5, 10.0, 9.0)];
        let total = Goodput::total(&lines).unwrap();
        assert_eq!(total, Goodput { began_at_ms: 1, ..line(1, 30.0, 17.0) });
        let mut open = Goodput { waiting_s: 2.0, under_way_s: 1.0, places_s: 3.0, ..line(0, 0.0, 0.0) };
        open.tokens.waiting = 9;
        let total = Goodput::total([&open, &open, &lines[2]]).unwrap();
        assert_eq!((total.waiting_s, total.left_out_s["restart"]), (0.0, 3.0));
        assert_eq!((total.tokens.waiting, total.tokens.left_out["restart"]), (0, 9));
        assert!(total.remainder().abs() < 1e-12);
        assert_eq!(Goodput::total([]), None);
    }

    #[test]
    fn goodput_of_a_usage_adds_up() {
        let second = Duration::from_secs(1);
        let mut usage = Usage::default();
        (usage.places, usage.decoded, usage.prefill) = (100 * second, 60 * second, 10 * second);
        usage.under_way = 5 * second;
        usage.lost.insert(driftless_bridge::fleet::Cause::Failed, 5 * second);
        usage.free.insert(driftless_bridge::fleet::Free::Unasked, 20 * second);
        (usage.tokens.decoded, usage.tokens.prefill) = (600, 100);
        usage.tokens.lost.insert(Cause::Failed, 50);
        let drawn = |seconds: u32| Decoded { time: seconds * second, tokens: u64::from(seconds) * 10 };
        let left_out = BTreeMap::from([("filtered", drawn(7))]);
        let began = SystemTime::UNIX_EPOCH;
        let kept = Kept { began, trained: drawn(40), evaluated: drawn(3), left_out };
        let goodput = Goodput::of(&usage, &kept);
        assert_eq!((goodput.waiting_s, goodput.remainder()), (10.0, 0.0));
        let tokens: BTreeMap<_, _> = goodput.tokens.drawn().into_iter().collect();
        assert_eq!((tokens["waiting for a step"], tokens["left out: filtered"]), (100, 70));
        assert_eq!(
            (tokens["lost: engine failed"], tokens.values().sum::<u64>()),
            (50, 650),
            "all that was drawn"
        );
        let parts: BTreeMap<_, _> = goodput.parts().into_iter().collect();
        assert_eq!(
            (parts["left out: filtered"], parts["lost: engine failed"], parts["idle: no request"]),
            (7.0, 5.0, 20.0)
        );
        let text = serde_json::to_string(&goodput).unwrap();
        assert_eq!(serde_json::from_str::<Goodput>(&text).unwrap(), goodput);
    }
}
