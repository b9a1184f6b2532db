//! The end of a run: its figures, as a table for the terminal.

use driftless::trainer::Failure;
use driftless::trainer::goodput::{Goodput, Tokens};
use driftless::trainer::metrics::{EvalMetrics, PublicationMetrics, SetMetrics, StepMetrics};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The figures of a whole run, as the final table and `--json` show them.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Summary {
    /// Held-out prompts before the first step and after the last.
    pub(crate) eval_start: Option<EvalMetrics>,
    pub(crate) eval_end: Option<EvalMetrics>,
    pub(crate) steps: usize,
    /// Mean reward of the rollouts of the first tenth of the steps, and of the last.
    pub(crate) reward_start: f64,
    pub(crate) reward_end: f64,
    /// Versions that steps published, and the number of the newest. Steps that were learned again after a crash had
    /// others.
    pub(crate) versions: usize,
    pub(crate) version_newest: Option<u64>,
    pub(crate) publication_bytes: u64,
    pub(crate) full_bytes: u64,
    pub(crate) density_mean: f64,
    pub(crate) encode_publish_ms_median: f64,
    pub(crate) prepare_ms_median: f64,
    pub(crate) pause_ms_median: f64,
    pub(crate) pause_ms_max: f64,
    pub(crate) convergence_ms_median: f64,
    /// Shares of the steps' time in which groups were under way, the learner computed, and weights cost something;
    /// `None` of a run whose steps did not tell.
    pub(crate) generation_share: Option<f64>,
    pub(crate) learner_share: Option<f64>,
    pub(crate) weights_share: Option<f64>,
    /// Where the time of the engines' places went, of all processes of the run.
    pub(crate) goodput: Option<Goodput>,
    /// Attempts at answers that failed, by why, and those of them after which the answer was made again.
    pub(crate) answers_failed: BTreeMap<Failure, u64>,
    pub(crate) answers_made_again: u64,
    /// Share of the response tokens that were too old to be trained on.
    pub(crate) too_old_share: f64,
    pub(crate) staleness_mean: f64,
    pub(crate) staleness_max: u64,
    pub(crate) log_prob_diff_mean: f64,
    pub(crate) log_prob_diff_max: f64,
}

impl Summary {
    /// `eval_start` is what was measured before the first step.
    pub(crate) fn of(steps: &[StepMetrics], eval_start: Option<EvalMetrics>) -> Self {
        let published: Vec<_> = steps.iter().filter_map(|s| s.publication.as_ref()).collect();
        let median_of = |f: fn(&PublicationMetrics) -> Option<f64>| {
            median(published.iter().filter_map(|p| f(p)).collect())
        };
        let tenth = steps.len().div_ceil(10);
        let reward = |steps: &[StepMetrics]| mean(steps.iter().map(|step| step.reward));
        Summary {
            eval_start,
            eval_end: steps.iter().rev().find_map(|s| s.eval.clone()),
            steps: steps.len(),
            reward_start: reward(&steps[..tenth]),
            reward_end: reward(&steps[steps.len() - tenth..]),
            versions: published.len(),
            version_newest: published.iter().map(|p| p.version).max(),
            publication_bytes: published.iter().map(|p| p.publication_bytes).sum(),
            full_bytes: published.iter().map(|p| p.full_bytes).sum(),
            density_mean: mean(published.iter().map(|p| p.density)),
            encode_publish_ms_median: median_of(|p| Some(p.encode_publish_ms)),
            prepare_ms_median: median_of(|p| p.prepare_ms),
            pause_ms_median: median_of(|p| p.pause_ms),
            pause_ms_max: published.iter().filter_map(|p| p.pause_ms).fold(0.0, f64::max),
            convergence_ms_median: {
                let waited = published.iter().filter_map(|published| published.convergence_ms);
                let beside = steps.iter().flat_map(|step| &step.converged).map(|came| came.convergence_ms);
                median(waited.chain(beside).collect())
            },
            generation_share: share(steps, |step| step.generate_ms),
            learner_share: share(steps, |step| step.train_ms),
            weights_share: share(steps, |step| step.weights_ms),
            goodput: Goodput::total(steps.iter().filter_map(|step| step.goodput.as_ref())),
            answers_failed: {
                let mut failed = BTreeMap::new();
                for (failure, count) in steps.iter().flat_map(|step| &step.answers_failed) {
                    *failed.entry(*failure).or_default() += count;
                }
                failed
            },
            answers_made_again: steps.iter().map(|step| step.answers_made_again).sum(),
            too_old_share: {
                let tokens = |of: fn(&StepMetrics) -> u64| steps.iter().map(of).sum::<u64>();
                tokens(|step| step.tokens_too_old) as f64 / tokens(|step| step.response_tokens).max(1) as f64
            },
            staleness_mean: mean(steps.iter().map(|s| s.staleness_mean)),
            staleness_max: steps.iter().map(|s| s.staleness_max).max().unwrap_or(0),
            log_prob_diff_mean: mean(steps.iter().map(|s| s.stats.log_prob_diff_mean)),
            log_prob_diff_max: steps.iter().map(|s| s.stats.log_prob_diff_max).fold(0.0, f64::max),
        }
    }

    /// Label and value, a line each.
    pub(crate) fn rows(&self) -> Vec<(&str, String)> {
        let mut rows = Vec::new();
        // A run of no steps was measured once.
        let (start, end) = match &self.eval_end {
            Some(end) => (self.eval_start.as_ref(), Some(end)),
            None => (None, self.eval_start.as_ref()),
        };
        for (name, set) in end.iter().flat_map(|end| &end.sets) {
            let before = start.and_then(|start| start.sets.get(name));
            let before = before.map_or_else(String::new, |before| format!("reward {:.3} -> ", before.reward));
            rows.push((name.as_str(), format!("{before}{}", describe(set))));
        }
        rows.push(("steps", self.steps.to_string()));
        if self.steps > 0 {
            let (start, end) = (self.reward_start, self.reward_end);
            rows.push(("reward", format!("{start:.3} -> {end:.3}  (first and last tenth of the steps)")));
        }
        rows.extend(self.version_newest.into_iter().flat_map(|newest| self.published(newest)));
        rows.extend(self.goodput.iter().map(|goodput| ("goodput", places(goodput))));
        rows.extend(self.goodput.iter().map(|goodput| ("tokens", tokens(&goodput.tokens))));
        if !self.answers_failed.is_empty() {
            let (failed, again) = (failures(&self.answers_failed), self.answers_made_again);
            rows.push(("answers failed", format!("{failed}; made again {again}")));
        }
        if self.log_prob_diff_max > 0.0 {
            // With older weights it is also that of the weights.
            let of = if self.staleness_max > 0 { "and the weights' age" } else { "of the same weights" };
            let (mean, max) = (self.log_prob_diff_mean, self.log_prob_diff_max);
            rows.push((
                "log-prob difference",
                format!("{mean:.1e} mean, {max:.1e} at most  (trainer against engines, {of})"),
            ));
        }
        rows
    }

    /// What became of the versions, of which this is the newest.
    fn published(&self, newest: u64) -> Vec<(&'static str, String)> {
        let ratio = self.full_bytes as f64 / self.publication_bytes.max(1) as f64;
        let (published, full) = (bytes(self.publication_bytes), bytes(self.full_bytes));
        let (pause, longest) = (self.pause_ms_median, self.pause_ms_max);
        let median = |milliseconds: f64, what: &str| format!("{milliseconds:.1} ms median  ({what})");
        let mut rows = vec![
            ("newest version", newest.to_string()),
            ("bytes published", format!("{published} against {full} in full, {ratio:.1}x fewer")),
            ("density", format!("{:.1} % of the elements changed, mean", 100.0 * self.density_mean)),
            ("publish", median(self.encode_publish_ms_median, "encode and store a version")),
            ("prepare", median(self.prepare_ms_median, "fetch and apply it on the slowest host")),
            ("pause", format!("{pause:.1} ms median, {longest:.1} ms longest  (an engine did not generate)")),
            ("update", median(self.convergence_ms_median, "from its commit until all engines serve it")),
            ("staleness", self.staleness()),
        ];
        let shares = [
            ("generation", self.generation_share, "some group was under way"),
            ("learner", self.learner_share, "it computed"),
            ("weights", self.weights_share, "publishing, waiting for a version, engines that stood still"),
        ];
        for (label, share, what) in shares {
            let row = |share: f64| (label, format!("{:.1} % of the time  ({what})", 100.0 * share));
            rows.extend(share.map(row));
        }
        rows
    }

    fn staleness(&self) -> String {
        let mut text = format!("{:.2} steps mean, {} at most", self.staleness_mean, self.staleness_max);
        if self.too_old_share > 0.0 {
            // Writing to a string cannot fail.
            let _ = write!(text, ", {:.2} % of the tokens too old to train on", 100.0 * self.too_old_share);
        }
        text
    }

    /// The table for a terminal.
    pub(crate) fn table(&self) -> String {
        let rows = self.rows();
        let width = rows.iter().map(|(label, _)| label.len()).max().unwrap_or(0);
        let mut out = String::new();
        for (label, value) in rows {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "{label:width$}  {value}");
        }
        out
    }
}

/// Failures with their counts.
pub(super) fn failures(failed: &BTreeMap<Failure, u64>) -> String {
    failed.iter().map(|(failure, count)| format!("{} {count}", failure.name())).collect::<Vec<_>>().join(", ")
}

/// What the engines' places were doing, in shares of their time, the largest first.
fn places(goodput: &Goodput) -> String {
    let shown = shares(goodput.parts(), goodput.places_s);
    format!("{shown}  (of {:.0} place-seconds of the engines)", goodput.places_s)
}

/// What became of tokens, likewise.
fn tokens(tokens: &Tokens) -> String {
    let drawn = tokens.drawn();
    let all: u64 = drawn.iter().map(|(_, tokens)| tokens).sum();
    let shown = shares(drawn.into_iter().map(|(name, tokens)| (name, tokens as f64)).collect(), all as f64);
    let Tokens { prefill, cached, stale_prefix, .. } = tokens;
    let again: u64 = tokens.prefill_again.values().sum();
    let stale =
        if *stale_prefix > 0 { format!(", {stale_prefix} perhaps of older weights") } else { String::new() };
    format!(
        "{shown}  (of {all} drawn; {prefill} of prompts, {again} read again; {cached} were cached{stale})"
    )
}

fn shares(mut parts: Vec<(String, f64)>, of: f64) -> String {
    parts.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let share = |part: f64| 100.0 * part / of.max(f64::MIN_POSITIVE);
    let shown = parts.iter().map(|(name, part)| (name, share(*part))).filter(|(_, share)| *share >= 0.05);
    shown.map(|(name, share)| format!("{name} {share:.1} %")).collect::<Vec<_>>().join(", ")
}

/// What was measured on a set, in one line.
pub(crate) fn describe(set: &SetMetrics) -> String {
    let SetMetrics { reward, prompts, samples, response_length, .. } = set;
    let pass =
        |k: u64, share: Option<f64>| share.map(|share| format!(", pass@{k} {share:.3}")).unwrap_or_default();
    let of_one = pass(1, set.pass_1);
    let of_several = if *samples > 1 { pass(*samples, set.pass) } else { String::new() };
    let failed = if set.failed > 0 { format!(", {} failed", set.failed) } else { String::new() };
    let truncated = 100.0 * set.truncated;
    format!(
        "reward {reward:.3}{of_one}{of_several} of {prompts} prompts{failed}, {response_length:.1} tokens, \
         {truncated:.1} % cut off"
    )
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0u64), |(sum, count), value| (sum + value, count + 1));
    if count == 0 { 0.0 } else { sum / count as f64 }
}

/// The share of the time of steps that something took, of the steps that tell both. Generation of a batch may begin
/// before its step does.
fn share(steps: &[StepMetrics], of: fn(&StepMetrics) -> f64) -> Option<f64> {
    let (part, wall) =
        steps.iter().fold((0.0, 0.0), |(part, wall), step| (part + of(step), wall + step.wall_ms));
    (wall > 0.0).then(|| (part / wall).min(1.0))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// A size with a unit a person reads.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}
