//! Where the time of the engines' places went. A place is room for one request, and has one place-second in each second.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use driftless_bridge::fleet::Usage;
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
}

/// What became of tokens that engines drew and that are kept.
#[derive(Debug, Clone)]
pub(crate) struct Kept {
    /// Since when that is counted.
    pub(crate) began: SystemTime,
    pub(crate) trained: Duration,
    pub(crate) evaluated: Duration,
    pub(crate) left_out: BTreeMap<&'static str, Duration>,
}

impl Goodput {
    /// Of places that did this, given what became of what they drew.
    pub(crate) fn of(usage: &Usage, kept: &Kept) -> Self {
        let Kept { began, trained, evaluated, left_out } = kept;
        let known = *trained + *evaluated + left_out.values().sum::<Duration>();
        let seconds = |(name, time): (&str, &Duration)| (name.to_owned(), time.as_secs_f64());
        Goodput {
            began_at_ms: unix_us(*began) / 1000,
            places_s: usage.places.as_secs_f64(),
            trained_s: trained.as_secs_f64(),
            waiting_s: usage.decoded.saturating_sub(known).as_secs_f64(),
            evaluated_s: evaluated.as_secs_f64(),
            left_out_s: left_out.iter().map(|(why, time)| seconds((why, time))).collect(),
            lost_s: usage.lost.iter().map(|(cause, time)| seconds((cause.name(), time))).collect(),
            prefill_s: usage.prefill.as_secs_f64(),
            prefill_again_s: usage
                .prefill_again
                .iter()
                .map(|(cause, time)| seconds((cause.name(), time)))
                .collect(),
            under_way_s: usage.under_way.as_secs_f64(),
            idle_s: usage.free.iter().map(|(free, time)| seconds((free.name(), time))).collect(),
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
            let add = |mut all: BTreeMap<String, f64>, next: BTreeMap<String, f64>| {
                next.into_iter().for_each(|(name, time)| *all.entry(name).or_default() += time);
                all
            };
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
            }
        })
    }
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
        let lines = [line(1, 10.0, 4.0), line(1, 20.0, 8.0), line(5, 10.0, 9.0)];
        let total = Goodput::total(&lines).unwrap();
        assert_eq!(total, Goodput { began_at_ms: 1, ..line(1, 30.0, 17.0) });
        let open = Goodput { waiting_s: 2.0, under_way_s: 1.0, places_s: 3.0, ..line(0, 0.0, 0.0) };
        let total = Goodput::total([&open, &open, &lines[2]]).unwrap();
        assert_eq!((total.waiting_s, total.left_out_s["restart"]), (0.0, 3.0));
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
        let left_out = BTreeMap::from([("filtered", 7 * second)]);
        let began = SystemTime::UNIX_EPOCH;
        let kept = Kept { began, trained: 40 * second, evaluated: 3 * second, left_out };
        let goodput = Goodput::of(&usage, &kept);
        assert_eq!((goodput.waiting_s, goodput.remainder()), (10.0, 0.0));
        let parts: BTreeMap<_, _> = goodput.parts().into_iter().collect();
        assert_eq!(
            (parts["left out: filtered"], parts["lost: engine failed"], parts["idle: no request"]),
            (7.0, 5.0, 20.0)
        );
        let text = serde_json::to_string(&goodput).unwrap();
        assert_eq!(serde_json::from_str::<Goodput>(&text).unwrap(), goodput);
    }
}
