//! What is seen of a run at a moment.

use crate::cli::dashboard::name;
use crate::cli::dashboard::read::{Alert, Files};
use driftless::trainer::goodput::Goodput;
use serde::Serialize;
use std::collections::BTreeMap;

/// Steps over which the engines' time is summed.
const WINDOW: usize = 20;
/// Figures that are shown where the run has them, and what they are called.
const FIGURES: [(&str, &str); 12] = [
    ("reward", "reward"),
    ("pass", "right answers"),
    ("response_length", "tokens an answer"),
    ("truncated", "cut off"),
    ("entropy", "entropy"),
    ("staleness_mean", "steps old"),
    ("log_prob_diff_mean", "|Δ log-prob|"),
    ("grad_norm", "gradient norm"),
    ("wall_ms", "step, ms"),
    ("weights_ms", "weights, ms"),
    ("publication.density", "elements changed"),
    ("rollout_tokens_per_s", "tokens/s"),
];

/// A run as its files have it.
#[derive(Debug, Default, Serialize)]
pub(super) struct Seen {
    pub(super) name: String,
    /// Steps that are done, and how many there will be.
    pub(super) steps: u64,
    pub(super) of: Option<u64>,
    /// When the last one was, in milliseconds since 1970.
    pub(super) completed_at_ms: Option<u64>,
    pub(super) alerts: Vec<Alert>,
    /// The last steps' figures, by name in the metrics; nothing where a step had none.
    pub(super) figures: BTreeMap<&'static str, Vec<Option<f64>>>,
    /// Shares of the engines' time over the last steps, the largest first.
    pub(super) goodput: Vec<(String, f64)>,
    pub(super) engines: Vec<Engine>,
    pub(super) version: Option<Version>,
    /// Lines that were not understood.
    pub(super) damaged: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct Engine {
    pub(super) url: String,
    pub(super) phase: String,
    pub(super) since_ms: u64,
    /// Why it is in this phase, or what it gets.
    pub(super) why: String,
}

/// The newest version.
#[derive(Debug, Serialize)]
pub(super) struct Version {
    pub(super) number: u64,
    /// How long it took until engines served it; nothing as long as they do not.
    pub(super) served_after_ms: Option<u64>,
    /// Engines that did not come to it.
    pub(super) behind: u64,
}

impl Seen {
    /// What the files say now, with figures of the last `steps`.
    pub(super) fn of(files: &Files, steps: usize) -> Seen {
        let (table, facts) = (&files.table, &files.facts);
        let figure = |(name, _): &(&'static str, &str)| {
            let column = table.column(name);
            let last = column[column.len().saturating_sub(steps)..].iter();
            let values: Vec<_> = last.map(|value| value.is_finite().then_some(*value)).collect();
            values.iter().any(Option::is_some).then_some((*name, values))
        };
        let engines = facts.engines.iter().filter_map(|(url, engine)| {
            let (since_ms, phase) = engine.phases.back()?.clone();
            let why = if engine.why.is_empty() { &engine.gets } else { &engine.why };
            Some(Engine { url: url.clone(), phase, since_ms, why: why.clone() })
        });
        let version = facts.versions.iter().next_back().map(|(number, version)| Version {
            number: *number,
            served_after_ms: version.served_after_ms(),
            behind: version.behind,
        });
        Seen {
            name: name(&files.dir),
            steps: table.last_step().map_or(0, |step| step + 1),
            of: facts.of(),
            completed_at_ms: table.last("completed_at_ms").filter(|at| *at > 0.0).map(|at| at as u64),
            alerts: facts.alerts(),
            figures: FIGURES.iter().filter_map(figure).collect(),
            goodput: shares(table.goodput(WINDOW)),
            engines: engines.collect(),
            version,
            damaged: files.damaged().all(),
        }
    }

    /// The figures with what they are called, in their order.
    pub(super) fn titled(&self) -> impl Iterator<Item = (&'static str, &[Option<f64>])> {
        FIGURES.iter().filter_map(|(name, title)| Some((*title, self.figures.get(name)?.as_slice())))
    }
}

/// Shares of what places did between two moments, the largest first. What waited and was trained on since then was
/// counted before it, and has none.
fn shares(window: Option<(Option<Goodput>, Goodput)>) -> Vec<(String, f64)> {
    let Some((before, now)) = window else { return Vec::new() };
    let before: BTreeMap<String, f64> =
        before.map(|before| before.parts().into_iter().collect()).unwrap_or_default();
    let spent = |(part, seconds): (String, f64)| {
        let since = seconds - before.get(&part).copied().unwrap_or_default();
        (part, since.max(0.0))
    };
    let mut parts: Vec<_> =
        now.parts().into_iter().map(spent).filter(|(_, seconds)| *seconds > 0.0).collect();
    let whole: f64 = parts.iter().map(|(_, seconds)| seconds).sum();
    parts.iter_mut().for_each(|(_, seconds)| *seconds /= whole);
    parts.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_time_since_and_add_up_to_one() {
        let at = |trained_s, waiting_s, down: f64| {
            let idle_s = [("down".to_owned(), down)].into();
            Goodput { trained_s, waiting_s, idle_s, ..Goodput::default() }
        };
        let found = shares(Some((Some(at(10.0, 5.0, 0.0)), at(16.0, 4.0, 2.0))));
        assert_eq!(found, [("trained".to_owned(), 0.75), ("idle: down".to_owned(), 0.25)]);
        assert_eq!(shares(Some((None, at(1.0, 0.0, 0.0)))), [("trained".to_owned(), 1.0)]);
        assert!(shares(Some((None, Goodput::default()))).is_empty() && shares(None).is_empty());
    }
}
