//! The end of a run: a table for the terminal, a page with plots beside the run's data.

use crate::cli::shared::error::{Error, Result};
use driftless::trainer::goodput::{Goodput, Tokens};
use driftless::trainer::metrics::{EvalMetrics, PublicationMetrics, SetMetrics, StepMetrics};
use plotters::prelude::*;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Width and height of the picture of four plots, in pixels.
const SIZE: (u32, u32) = (1100, 760);

const BLUE: RGBColor = RGBColor(0x2b, 0x6c, 0xb0);
const ORANGE: RGBColor = RGBColor(0xdd, 0x6b, 0x20);
const GREEN: RGBColor = RGBColor(0x2f, 0x85, 0x5a);
const PURPLE: RGBColor = RGBColor(0x80, 0x5a, 0xd5);
/// Colours of sets of held-out prompts.
const SETS: [RGBColor; 3] = [ORANGE, GREEN, PURPLE];

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
    let again: u64 = tokens.prefill_again.values().sum();
    format!("{shown}  (of {all} drawn; {} of prompts, {again} read again)", tokens.prefill)
}

fn shares(mut parts: Vec<(String, f64)>, of: f64) -> String {
    parts.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let share = |part: f64| 100.0 * part / of.max(f64::MIN_POSITIVE);
    let shown = parts.iter().map(|(name, part)| (name, share(*part))).filter(|(_, share)| *share >= 0.05);
    shown.map(|(name, share)| format!("{name} {share:.1} %")).collect::<Vec<_>>().join(", ")
}

/// Writes `report.svg` and `report.html` into `dir` and returns the page's path.
pub(crate) fn write(dir: &Path, steps: &[StepMetrics], summary: &Summary) -> Result<PathBuf> {
    let mut svg = String::new();
    draw(&mut svg, steps, summary).map_err(|error| Error::Report { reason: error.to_string() })?;
    let mut rows = String::new();
    for (label, value) in summary.rows() {
        let _ = writeln!(rows, "<tr><th>{label}</th><td>{value}</td></tr>");
    }
    let page = format!(
        "<!doctype html>\n<meta charset=\"utf-8\">\n<title>driftless run</title>\n\
         <style>body{{font-family:sans-serif;max-width:1100px;margin:2em auto}}th{{text-align:left;padding-right:2em;font-weight:normal;color:#555}}</style>\n\
         <h1>Run</h1>\n<table>\n{rows}</table>\n{svg}\n"
    );
    let html = dir.join("report.html");
    for (path, text) in [(&dir.join("report.svg"), &svg), (&html, &page)] {
        std::fs::write(path, text).map_err(|source| Error::Io { path: path.clone(), source })?;
    }
    Ok(html)
}

type DrawResult = std::result::Result<(), Box<dyn std::error::Error>>;
type Points = Vec<(f64, f64)>;
/// A name for the legend, a colour, and the line.
type Series<'a> = (&'a str, RGBColor, Points);

/// One plot: a title, an axis, and one coloured line per series.
struct Plot<'a> {
    title: &'a str,
    unit: &'a str,
    top: Option<f64>,
    series: Vec<Series<'a>>,
}

fn draw(svg: &mut String, steps: &[StepMetrics], summary: &Summary) -> DrawResult {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let areas = root.split_evenly((2, 2));
    for (area, plot) in areas.iter().zip(plots(steps, summary)) {
        draw_plot(area, &plot)?;
    }
    root.present()?;
    Ok(())
}

/// A line for each set of held-out prompts.
fn held_out<'a>(steps: &'a [StepMetrics], summary: &'a Summary) -> Vec<Series<'a>> {
    let start = summary.eval_start.iter().map(|eval| (0.0, eval));
    let after = |step: &'a StepMetrics| Some((step.rollout_id as f64 + 1.0, step.eval.as_ref()?));
    let mut sets: BTreeMap<&str, Points> = BTreeMap::new();
    for (step, eval) in start.chain(steps.iter().filter_map(after)) {
        for (name, set) in &eval.sets {
            sets.entry(name).or_default().push((step, set.reward));
        }
    }
    let colours = SETS.into_iter().cycle();
    sets.into_iter().zip(colours).map(|((name, points), colour)| (name, colour, points)).collect()
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

fn plots<'a>(steps: &'a [StepMetrics], summary: &'a Summary) -> [Plot<'a>; 4] {
    let published = |f: fn(&PublicationMetrics) -> Option<f64>| -> Points {
        let point = |s: &StepMetrics| Some((s.rollout_id as f64 + 1.0, f(s.publication.as_ref()?)?));
        steps.iter().filter_map(point).collect()
    };
    let reward = steps.iter().map(|s| (s.rollout_id as f64, s.reward)).collect();
    let mut rewards = vec![("rollouts", BLUE, reward)];
    rewards.extend(held_out(steps, summary));
    let density = vec![("", BLUE, published(|p| Some(100.0 * p.density)))];
    let bytes = vec![
        ("published", BLUE, published(|p| Some(p.publication_bytes as f64 / 1024.0))),
        ("in full", ORANGE, published(|p| Some(p.full_bytes as f64 / 1024.0))),
    ];
    let times =
        vec![("pause", BLUE, published(|p| p.pause_ms)), ("prepare", GREEN, published(|p| p.prepare_ms))];
    [
        Plot { title: "reward", unit: "mean", top: Some(1.0), series: rewards },
        Plot { title: "density", unit: "% of elements changed", top: None, series: density },
        Plot { title: "bytes per version", unit: "KiB", top: None, series: bytes },
        Plot { title: "pause and prepare", unit: "ms", top: None, series: times },
    ]
}

fn draw_plot(area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>, plot: &Plot<'_>) -> DrawResult {
    let all = || plot.series.iter().flat_map(|(_, _, points)| points.iter());
    let right = all().map(|p| p.0).fold(1.0, f64::max);
    let highest = all().map(|p| p.1).fold(0.0, f64::max);
    let top = plot.top.unwrap_or(if highest > 0.0 { 1.08 * highest } else { 1.0 });
    let mut chart = ChartBuilder::on(area)
        .caption(plot.title, ("sans-serif", 20))
        .margin(14)
        .x_label_area_size(36)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..right, 0.0..top)?;
    chart.configure_mesh().x_desc("step").y_desc(plot.unit).light_line_style(WHITE).draw()?;
    for (name, colour, points) in &plot.series {
        let line = LineSeries::new(points.iter().copied(), colour.stroke_width(2));
        let drawn = chart.draw_series(line)?;
        if !name.is_empty() {
            let colour = *colour;
            drawn
                .label(*name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
        }
    }
    if plot.series.len() > 1 {
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.2))
            .draw()?;
    }
    Ok(())
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
