//! When everything in a run happened, by its files: what `trace` writes and the page draws.

use driftless::buffer::{Kind as Of, Record};
use driftless::trainer::events::LEARNER_STARTS;
use driftless::trainer::metrics::{PublicationMetrics, StepMetrics};
use driftless::transport::gc::Phases;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::ops::Range;

/// A moment, or the time between two, in microseconds since 1970.
pub(crate) type Micros = u64;

/// Engines whose phases are followed at once, and the longest names of one and its phase.
const ENGINES_MAX: usize = 1024;
const NAME_BYTES_MAX: usize = 1024;

/// Whose time it was.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Track {
    Trainer,
    Host(String),
    Engine(String),
}

/// What a bar is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Step,
    /// What the learner did within a step.
    Within,
    Wait,
    Event,
    /// Of an engine, on its way through the fleet.
    Phase,
    /// On its way to a host.
    Version,
    Evaluation,
    Sample,
}

/// Something that took time, or a moment.
#[derive(Debug, Clone)]
pub(crate) struct Bar {
    pub(crate) track: Track,
    pub(crate) kind: Kind,
    /// The version's number, or the position of the answer in the log; 0 of all else.
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) time: Range<Micros>,
    /// One behind the other.
    pub(crate) parts: Vec<Part>,
    pub(crate) told: Value,
}

/// A part of a bar.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) phase: &'static str,
    /// The weights that drew, where an answer has tokens of several.
    pub(crate) version: Option<u64>,
    pub(crate) time: Range<Micros>,
}

/// What has begun and not ended. Steps, events and answers are taken in the order of their files.
#[derive(Debug, Clone, Default)]
pub(crate) struct Timeline {
    /// What is kept of events: all, or what lies within these moments.
    window: Option<Range<Micros>>,
    /// Where the step before ended.
    step_end: Micros,
    /// The phase of each engine, and since when.
    phases: BTreeMap<String, (String, Micros)>,
    /// What is waited for, and since when.
    waiting: Option<(Value, Micros)>,
    /// When the last thing happened.
    last: Micros,
    starts: Starts,
}

/// Which lines of `events.jsonl` are the first ones of another process of the run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Starts {
    /// The learner was lost, and is started again by the same process.
    is_same: bool,
    /// Rollouts are a process of their own, and have the engines.
    are_apart: bool,
}

impl Starts {
    /// Whether the run begins anew, or goes on, with this event: of engines that the process before had, nothing is known.
    pub(crate) fn see(&mut self, event: &str, what: Option<&str>) -> bool {
        match event {
            "learner_lost" => self.is_same = true,
            "rollouts" => {
                self.are_apart = true;
                return true;
            }
            "waiting" if what == Some(LEARNER_STARTS) => {
                return !std::mem::take(&mut self.is_same) && !self.are_apart;
            }
            _ => {}
        }
        false
    }
}

impl Timeline {
    /// Keeps of the events that come only what lies between these moments.
    pub(crate) fn keep(&mut self, window: Range<Micros>) {
        self.window = Some(window);
    }

    /// When the last thing happened.
    pub(crate) fn last(&self) -> Micros {
        self.last
    }

    /// What lasts still, up to the last thing that happened.
    pub(crate) fn end(mut self) -> Vec<Bar> {
        let last = self.last;
        let mut bars: Vec<Bar> = self.waited(last).into_iter().collect();
        for (url, (phase, since)) in std::mem::take(&mut self.phases) {
            bars.extend(self.phase(url, phase, since..last));
        }
        bars
    }

    /// A step and when it was under way, with what the learner did within, and versions on their way to hosts.
    pub(crate) fn step(&mut self, step: &StepMetrics) -> (Range<Micros>, Vec<Bar>) {
        let end = step.completed_at_ms.saturating_mul(1000);
        let start = end.saturating_sub(micros(step.wall_ms)).max(self.step_end).min(end);
        self.step_end = end;
        self.last = self.last.max(end);
        let told =
            json!({"reward": step.reward, "staleness_mean": step.staleness_mean, "tokens": step.tokens});
        let mut bars =
            vec![Bar { told, ..Bar::new(Kind::Step, format!("step {}", step.rollout_id), start..end) }];
        let published = step.publication.as_ref().filter(|published| published.committed_at_ms > 0);
        let published = published.map(|published| publication(published, &(start..end)));
        let learned = published.as_ref().map_or(end, |bar| bar.time.start);
        bars.extend(published);
        let begun = learned.saturating_sub(micros(step.train_ms)).max(start);
        let waits = begun.saturating_sub(micros(step.train_wait_ms)).max(start)..begun;
        if !waits.is_empty() {
            bars.push(Bar::new(Kind::Within, "wait".to_owned(), waits));
        }
        bars.push(Bar::new(Kind::Within, "learn".to_owned(), begun..learned));
        let hosts = step.publication.iter().flat_map(|published| &published.hosts);
        bars.extend(
            hosts.flat_map(|(host, versions)| versions.iter().map(move |phases| version(host, phases))),
        );
        (start..end, bars)
    }

    /// A line of `events.jsonl`; `None` if it is none.
    pub(crate) fn event(&mut self, mut fields: Map<String, Value>) -> Option<Vec<Bar>> {
        let (Some(at), Some(Value::String(event))) =
            (fields.remove("at_ms").and_then(|at| at.as_u64()), fields.remove("event"))
        else {
            return None;
        };
        let at = at.saturating_mul(1000);
        let mut bars = Vec::new();
        if self.starts.see(&event, fields.get("what").and_then(Value::as_str)) {
            bars.extend(self.clone().end());
            (self.phases, self.waiting) = (BTreeMap::new(), None);
        }
        self.last = self.last.max(at);
        bars.extend(self.waited(at));
        let url = fields.get("url").and_then(Value::as_str).map(str::to_owned);
        let phase = fields.get("phase").and_then(Value::as_str).map(str::to_owned);
        match (&event[..], url, phase) {
            ("waiting", ..) => self.waiting = Some((Value::Object(fields), at)),
            // `metrics.jsonl` says more of it.
            ("step", ..) => {}
            ("phase", Some(url), Some(phase)) => {
                let before = self.phases.remove(&url);
                let is_short = url.len() + phase.len() <= NAME_BYTES_MAX;
                if phase != "gone" && is_short && self.phases.len() < ENGINES_MAX {
                    self.phases.insert(url.clone(), (phase, at));
                }
                bars.extend(before.and_then(|(before, since)| self.phase(url, before, since..at)));
            }
            (_, url, _) if self.is_kept(&(at..at)) => {
                let track = url.map_or(Track::Trainer, Track::Engine);
                let told = Value::Object(fields);
                bars.push(Bar { track, told, ..Bar::new(Kind::Event, event, at..at) });
            }
            _ => {}
        }
        Some(bars)
    }

    /// What was waited for has come, or something else happens.
    fn waited(&mut self, at: Micros) -> Option<Bar> {
        let (told, since) = self.waiting.take()?;
        let what = told.get("what").and_then(Value::as_str).unwrap_or("wait").to_owned();
        self.is_kept(&(since..at)).then(|| Bar { told, ..Bar::new(Kind::Wait, what, since..at) })
    }

    fn phase(&self, url: String, phase: String, time: Range<Micros>) -> Option<Bar> {
        let is_kept = self.is_kept(&time);
        is_kept.then(|| Bar { track: Track::Engine(url), ..Bar::new(Kind::Phase, phase, time) })
    }

    /// Whether a part of it lies within what is kept.
    fn is_kept(&self, time: &Range<Micros>) -> bool {
        self.window.as_ref().is_none_or(|kept| time.start <= kept.end && time.end >= kept.start)
    }
}

/// Whether it is an answer, or the first part of one: all parts have its times.
pub(crate) fn is_answer(record: &Record) -> bool {
    let scalars = record.scalars();
    record.kind() == Of::Sample && (scalars.evaluation || scalars.sample_id == scalars.answer())
}

/// An answer; `None` if the log does not say when it was under way.
pub(crate) fn sample(record: &Record) -> Option<Bar> {
    let &[asked, first, last] = record.times() else { return None };
    let [asked, first, last] = [asked, first, last].map(|time| u64::try_from(time).unwrap_or_default());
    if asked == 0 || last < asked {
        return None;
    }
    let first = if (asked..=last).contains(&first) { first } else { asked };
    let scored = record.score().map_or(last, |score| score.scalars().clock_us.max(last));
    let part = |phase, time| Part { phase, version: None, time };
    let mut parts = vec![part("prefill", asked..first)];
    parts.extend(decoded(record, first..last));
    parts.push(part("reward", last..scored));
    parts.retain(|part| !part.time.is_empty());
    let scalars = record.scalars();
    let mut versions: Vec<u64> = record.spans().iter().map(|span| span.version).collect();
    versions.dedup();
    let told = json!({
        "step": scalars.rollout_id, "prompt": scalars.group_id, "reward": record.is_scored().then_some(scalars.reward),
        "tokens": record.response().len(), "versions": versions, "finish": format!("{:?}", record.finish()),
    });
    let (name, kind) = match scalars.evaluation {
        true => ("evaluated".to_owned(), Kind::Evaluation),
        false => (format!("answer {}", scalars.answer()), Kind::Sample),
    };
    let (track, id) = (Track::Engine(record.engine().to_owned()), record.position().0);
    Some(Bar { track, id, parts, told, ..Bar::new(kind, name, asked..scored) })
}

/// The time in which an answer's tokens came. That of several versions is shared out by their tokens: the log has no
/// time of each.
fn decoded(record: &Record, time: Range<Micros>) -> Vec<Part> {
    let spans = record.spans();
    let whole = Part { phase: "decode", version: None, time: time.clone() };
    let tokens: u64 = spans.iter().map(|span| u64::from(span.end.saturating_sub(span.start))).sum();
    if tokens == 0 || spans.windows(2).all(|pair| pair[0].version == pair[1].version) {
        return vec![whole];
    }
    let mut parts: Vec<Part> = Vec::new();
    let (mut seen, mut begun) = (0, time.start);
    for span in spans {
        seen += u64::from(span.end.saturating_sub(span.start));
        let share = u128::from(time.end - time.start) * u128::from(seen) / u128::from(tokens);
        let end = time.start + u64::try_from(share).unwrap_or_default();
        match parts.last_mut().filter(|part| part.version == Some(span.version)) {
            Some(part) => part.time.end = end,
            None => parts.push(Part { version: Some(span.version), time: begun..end, ..whole.clone() }),
        }
        begun = end;
    }
    parts
}

/// What is published within a step.
fn publication(published: &PublicationMetrics, step: &Range<Micros>) -> Bar {
    let committed = published.committed_at_ms.saturating_mul(1000).clamp(step.start, step.end);
    let learned = committed.saturating_sub(micros(published.encode_publish_ms)).max(step.start);
    let encoded = learned.saturating_add(micros(published.encode_ms)).min(committed);
    let mut parts = Vec::new();
    if encoded > learned {
        for (phase, time) in [("encode", learned..encoded), ("store", encoded..committed)] {
            parts.push(Part { phase, version: None, time });
        }
    }
    let told = json!({"bytes": published.publication_bytes, "density": published.density});
    let name = format!("publish version {}", published.version);
    Bar { id: published.version, parts, told, ..Bar::new(Kind::Within, name, learned..committed) }
}

/// A version on its way to a host.
fn version(host: &str, phases: &Phases) -> Bar {
    let start = phases.began_at_ms.saturating_mul(1000);
    let (mut parts, mut end) = (Vec::new(), start);
    for (phase, ms) in phases.of_host().into_iter().chain(phases.of_engine()) {
        let begun = end;
        end = end.saturating_add(micros(ms));
        parts.push(Part { phase, version: None, time: begun..end });
    }
    let (track, id) = (Track::Host(host.to_owned()), phases.version.0);
    Bar { track, id, parts, ..Bar::new(Kind::Version, format!("version {id}"), start..end) }
}

impl Bar {
    fn new(kind: Kind, name: String, time: Range<Micros>) -> Self {
        Bar { track: Track::Trainer, kind, id: 0, name, time, parts: Vec::new(), told: Value::Null }
    }
}

fn micros(ms: f64) -> Micros {
    // A cast saturates, and makes 0 of what is no number.
    (ms * 1e3) as Micros
}
