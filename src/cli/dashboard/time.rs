//! When everything happened in some steps of a run, as lanes: what `trace` would write of them.

use super::lines::{Came, Lines, Which};
use super::read::{FACT_BYTES_MAX, Files, json};
use super::samples::{Ask, Samples};
use crate::cli::shared::error::Result;
use crate::cli::shared::timeline::{Bar, Kind, Micros, Timeline, Track, sample};
use driftless::trainer::metrics::StepMetrics;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, VecDeque};
use std::ops::{Range, RangeInclusive};

/// Steps that are shown together, unless others are asked for, and at most.
const STEPS: u64 = 4;
const STEPS_MAX: u64 = 64;
/// Bars of answers, of versions on their way, and of events.
const SAMPLES_MAX: usize = 2000;
const VERSIONS_MAX: usize = 2000;
const EVENTS_MAX: usize = 1000;
/// Steps whose places in the file are held: 16 MiB.
const PLACES_MAX: usize = 1 << 20;
/// Bytes of events between two marks, at least, and marks that are held: twice as far apart once there are more.
const MARK_BYTES: u64 = 1 << 20;
const MARKS_MAX: usize = 64;
/// Longest text that is told with a bar.
const TEXT_CHARS: usize = 300;

/// Where steps and events lie in their files, so that a window of them is read alone.
#[derive(Default)]
pub(super) struct Index {
    /// Steps, ascending, and where their lines begin.
    steps: VecDeque<(u64, u64)>,
    marks: Vec<Mark>,
    /// How often marks became twice as far apart.
    doubled: u32,
    /// What has begun where the events end.
    timeline: Timeline,
}

/// A place from which events can be read on.
struct Mark {
    of: Which,
    at: u64,
    timeline: Timeline,
}

#[derive(Deserialize)]
struct Numbered {
    rollout_id: u64,
}

impl Index {
    pub(super) fn step(&mut self, came: Came<'_>) {
        let Came::Line(line, at) = came else { return self.steps.clear() };
        let Ok(Numbered { rollout_id }) = serde_json::from_slice(line) else { return };
        while self.steps.back().is_some_and(|(step, _)| *step >= rollout_id) {
            self.steps.pop_back();
        }
        self.steps.push_back((rollout_id, at));
        if self.steps.len() > PLACES_MAX {
            self.steps.pop_front();
        }
    }

    pub(super) fn event(&mut self, came: Came<'_>) {
        let Came::Line(line, at) = came else {
            self.marks.retain(|mark| mark.of == Which::Now);
            self.marks.iter_mut().for_each(|mark| mark.of = Which::Before);
            return self.mark(0);
        };
        let apart = MARK_BYTES.saturating_mul(1 << self.doubled.min(32));
        if self.marks.last().is_none_or(|mark| at.saturating_sub(mark.at) >= apart) {
            self.mark(at);
        }
        if let Some(fields) = fields(line) {
            self.timeline.event(fields);
        }
    }

    fn mark(&mut self, at: u64) {
        self.marks.push(Mark { of: Which::Now, at, timeline: self.timeline.clone() });
        if self.marks.len() > MARKS_MAX {
            // The first of a file stays: from it all of the file can be read.
            let mut number = 0;
            self.marks.retain(|mark| {
                number += 1;
                number % 2 == 1 || mark.at == 0
            });
            self.doubled += 1;
        }
    }

    fn places(&self, steps: &RangeInclusive<u64>) -> impl Iterator<Item = u64> {
        let (from, to) = (
            self.steps.partition_point(|(step, _)| step < steps.start()),
            self.steps.partition_point(|(step, _)| step <= steps.end()),
        );
        self.steps.range(from..to).map(|(_, at)| *at)
    }

    /// What happened within `window`, told once what lasted when it began.
    fn events(&self, lines: &Lines, window: &Range<Micros>) -> Result<(Vec<Bar>, Micros)> {
        let before = self.marks.partition_point(|mark| mark.timeline.last() < window.start);
        let Some(mark) = self.marks.get(before.saturating_sub(1)) else { return Ok((Vec::new(), 0)) };
        let (mut timeline, mut bars) = (mark.timeline.clone(), Vec::new());
        timeline.keep(window.clone());
        let mut take = |line: &[u8]| {
            bars.extend(fields(line).and_then(|fields| timeline.event(fields)).unwrap_or_default());
            timeline.last() <= window.end && bars.len() <= EVENTS_MAX
        };
        if lines.again(mark.of, mark.at, &mut take)? && mark.of == Which::Before {
            lines.again(Which::Now, 0, &mut take)?;
        }
        let last = timeline.last();
        bars.extend(timeline.end());
        Ok((bars, last))
    }
}

/// The fields of an event. A line that the page holds no fact of is left out here too.
fn fields(line: &[u8]) -> Option<Map<String, Value>> {
    (line.len() <= FACT_BYTES_MAX).then(|| serde_json::from_slice(line).ok()).flatten()
}

/// Some steps.
#[derive(Default, Serialize)]
struct Window {
    /// The first and the last step that there are, and of these the ones that are shown.
    steps: Option<(u64, u64)>,
    shown: Option<(u64, u64)>,
    /// When the steps and their answers begin, in microseconds since 1970, and for how long they go on. What engines and
    /// the trainer did then may begin before and end later.
    from_us: Micros,
    for_us: Micros,
    tracks: Vec<Shown>,
    /// Whether there is more in these steps than is shown.
    cut: bool,
    /// Answers of which the log does not say when they were under way.
    untimed: usize,
    /// Why there are no answers.
    unread: Option<String>,
}

/// What a process did.
#[derive(Serialize)]
struct Shown {
    kind: &'static str,
    name: String,
    rows: Vec<Row>,
}

/// Bars of one kind, in as few lanes as keep them apart.
#[derive(Serialize)]
struct Row {
    kind: &'static str,
    lanes: Vec<Vec<Drawn>>,
}

/// A bar. Its times are microseconds, and begin where the window does.
#[derive(Serialize)]
struct Drawn {
    name: String,
    at: i64,
    took: Micros,
    /// Phase, begin, length, and the weights that drew.
    parts: Vec<(&'static str, i64, Micros, Option<u64>)>,
    told: Value,
    /// Of an answer, its position in the log.
    position: Option<u64>,
}

/// The steps that are asked for, or the newest, as JSON.
pub(super) fn window(files: &Files, samples: &mut Samples, ask: &Ask) -> Result<String> {
    let logged = samples.steps();
    let done = files.index.steps.front().zip(files.index.steps.back());
    let done = done.map(|((first, _), (last, _))| (*first, *last));
    let both = logged.as_ref().ok().copied().flatten().into_iter().chain(done);
    let there = both.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)));
    let (oldest, newest) = there.unwrap_or_default();
    let last = ask.step.unwrap_or(newest).clamp(oldest, newest);
    let count = ask.steps.unwrap_or(STEPS).clamp(1, STEPS_MAX);
    let first = last.saturating_sub(count - 1).max(oldest);
    let mut window = Window { steps: there, shown: there.map(|_| (first, last)), ..Window::default() };
    let (mut bars, done) = steps(files, &(first..=last))?;
    window.cut = keep(&mut bars, Kind::Version, VERSIONS_MAX);
    match logged.and_then(|_| samples.of_steps(first..=last, SAMPLES_MAX)) {
        Ok((records, cut)) => {
            let answers: Vec<Bar> = records.iter().filter_map(sample).collect();
            window.untimed = records.len() - answers.len();
            window.cut |= cut;
            bars.extend(answers);
        }
        Err(error) => window.unread = Some(super::told(&error)),
    }
    let whole =
        |bars: &[Bar]| bars.iter().map(|bar| bar.time.clone()).reduce(|one, other| union(&one, &other));
    let seen = whole(&bars);
    // As `trace` does: what happened while the steps went on; of the newest, also what has happened since.
    let mut asked = done.or_else(|| seen.clone()).unwrap_or(0..0);
    asked.end = if last == newest { Micros::MAX } else { asked.end };
    let (mut events, end) = files.index.events(&files.events, &asked)?;
    window.cut |= events.len() > EVENTS_MAX;
    events.truncate(EVENTS_MAX);
    let mut seen = seen.or_else(|| whole(&events)).unwrap_or_default();
    if last == newest {
        seen.end = seen.end.max(end);
    }
    bars.extend(events);
    (window.from_us, window.for_us) = (seen.start, seen.end - seen.start);
    window.tracks = tracks(bars, seen.start);
    json(&window)
}

/// The bars of steps, and when these were under way.
fn steps(files: &Files, steps: &RangeInclusive<u64>) -> Result<(Vec<Bar>, Option<Range<Micros>>)> {
    let (mut timeline, mut bars, mut time) = (Timeline::default(), Vec::new(), None);
    for at in files.index.places(steps) {
        files.metrics.again(Which::Now, at, &mut |line| {
            if let Ok(step) = serde_json::from_slice::<StepMetrics>(line) {
                let (taken, of_step) = timeline.step(&step);
                time = Some(time.as_ref().map_or(taken.clone(), |time| union(time, &taken)));
                bars.extend(of_step);
            }
            false
        })?;
    }
    Ok((bars, time))
}

/// Keeps so many bars of a kind; whether there were more.
fn keep(bars: &mut Vec<Bar>, kind: Kind, most: usize) -> bool {
    let mut count = 0;
    bars.retain(|bar| {
        count += usize::from(bar.kind == kind);
        bar.kind != kind || count <= most
    });
    count > most
}

fn union(one: &Range<Micros>, other: &Range<Micros>) -> Range<Micros> {
    one.start.min(other.start)..one.end.max(other.end)
}

fn tracks(bars: Vec<Bar>, from: Micros) -> Vec<Shown> {
    let mut by_track = BTreeMap::<Track, BTreeMap<Kind, Vec<Bar>>>::new();
    for bar in bars {
        by_track.entry(bar.track.clone()).or_default().entry(bar.kind).or_default().push(bar);
    }
    let row = |(kind, bars)| {
        let lanes = lanes(bars).into_iter();
        let lanes = lanes.map(|lane| lane.into_iter().map(|bar| drawn(bar, from)).collect()).collect();
        Row { kind: row_name(kind), lanes }
    };
    let track = |(track, rows): (Track, BTreeMap<Kind, Vec<Bar>>)| {
        let (kind, name) = match track {
            Track::Trainer => ("trainer", String::new()),
            Track::Host(name) => ("host", name),
            Track::Engine(name) => ("engine", name),
        };
        Shown { kind, name: cut(&name), rows: rows.into_iter().map(row).collect() }
    };
    by_track.into_iter().map(track).collect()
}

fn row_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Step => "steps",
        Kind::Within => "learner",
        Kind::Wait => "waits",
        Kind::Event => "events",
        Kind::Phase => "engine",
        Kind::Version => "versions",
        Kind::Evaluation => "evaluations",
        Kind::Sample => "answers",
    }
}

/// Bars in lanes in which none crosses another.
fn lanes(mut bars: Vec<Bar>) -> Vec<Vec<Bar>> {
    bars.sort_by_key(|bar| (bar.time.start, bar.time.end));
    let mut lanes: Vec<Vec<Bar>> = Vec::new();
    for bar in bars {
        let is_free = |lane: &&mut Vec<Bar>| lane.last().is_none_or(|last| last.time.end <= bar.time.start);
        match lanes.iter_mut().find(is_free) {
            Some(lane) => lane.push(bar),
            None => lanes.push(vec![bar]),
        }
    }
    lanes
}

fn drawn(bar: Bar, from: Micros) -> Drawn {
    let at = |moment: Micros| moment.cast_signed().saturating_sub(from.cast_signed());
    let took = |time: &Range<Micros>| time.end.saturating_sub(time.start);
    let parts = bar.parts.iter();
    Drawn {
        name: cut(&bar.name),
        at: at(bar.time.start),
        took: took(&bar.time),
        parts: parts.map(|part| (part.phase, at(part.time.start), took(&part.time), part.version)).collect(),
        told: short(bar.told),
        position: (bar.kind == Kind::Sample || bar.kind == Kind::Evaluation).then_some(bar.id),
    }
}

/// What is told with a bar, without the rest of long texts.
fn short(told: Value) -> Value {
    match told {
        Value::Object(fields) => fields.into_iter().map(|(name, field)| (cut(&name), short(field))).collect(),
        Value::String(text) => cut(&text).into(),
        Value::Array(_) if told.to_string().len() > TEXT_CHARS => cut(&told.to_string()).into(),
        other => other,
    }
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(TEXT_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_as_many_as_bars_at_once() {
        for seed in 0..300_u64 {
            let mut state = seed;
            let mut draw = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % below
            };
            let made = |time: Range<Micros>| Bar {
                track: Track::Trainer,
                kind: Kind::Sample,
                id: 0,
                name: String::new(),
                time,
                parts: Vec::new(),
                told: Value::Null,
            };
            let times: Vec<Range<Micros>> = (0..draw(100))
                .map(|_| draw(500))
                .collect::<Vec<_>>()
                .into_iter()
                .map(|start| start..start + 1 + draw(60))
                .collect();
            let lanes = lanes(times.iter().cloned().map(made).collect());
            let under_way = |at: &Range<Micros>| times.iter().filter(|time| time.contains(&at.start)).count();
            assert_eq!(lanes.iter().map(Vec::len).sum::<usize>(), times.len(), "seed {seed}");
            assert_eq!(lanes.len(), times.iter().map(under_way).max().unwrap_or_default(), "seed {seed}");
            for lane in &lanes {
                let is_apart = |pair: &[Bar]| pair[0].time.end <= pair[1].time.start;
                assert!(lane.windows(2).all(is_apart), "seed {seed}: {lane:?}");
            }
        }
    }
}
