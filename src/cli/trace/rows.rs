//! What happened, as Chrome's trace events: one JSON object, written as it goes.

use driftless::buffer::Record;
use driftless::trainer::metrics::StepMetrics;
use driftless::transport::gc::Phases;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;

/// The process of the trainer, and its rows.
const TRAINER: u64 = 1;
const STEPS: u64 = 1;
const WAITS: u64 = 2;
const EVENTS: u64 = 3;
/// The row of an engine or a host; lanes of samples and versions have none.
const OWN: u64 = 1;

/// A moment, or the time between two, in microseconds since 1970.
type Micros = u64;

/// A trace under way.
pub(super) struct Trace<W> {
    out: W,
    is_begun: bool,
    /// Numbers of the engines and hosts, by name.
    processes: BTreeMap<String, u64>,
    /// What is kept: all, or what lies within these moments.
    window: Option<Range<Micros>>,
    /// Where the step before ended.
    step_end: Micros,
    /// The phase of each engine, and since when.
    phases: BTreeMap<String, (String, Micros)>,
    /// What is waited for, and since when.
    waiting: Option<(Value, Micros)>,
    /// When the last thing happened.
    last: Micros,
}

/// One of Chrome's trace events.
#[derive(Serialize, Default)]
struct Entry<'a> {
    name: &'a str,
    cat: &'static str,
    ph: &'static str,
    ts: Micros,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<Micros>,
    pid: u64,
    tid: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'static str>,
    #[serde(skip_serializing_if = "Value::is_null")]
    args: Value,
}

impl<W: Write> Trace<W> {
    pub(super) fn begin(mut out: W) -> io::Result<Self> {
        out.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n")?;
        let mut trace = Trace {
            out,
            is_begun: false,
            processes: BTreeMap::new(),
            window: None,
            step_end: 0,
            phases: BTreeMap::new(),
            waiting: None,
            last: 0,
        };
        trace.name("process_name", TRAINER, 0, "trainer")?;
        for (row, name) in [(STEPS, "steps"), (WAITS, "waits"), (EVENTS, "events")] {
            trace.name("thread_name", TRAINER, row, name)?;
        }
        Ok(trace)
    }

    /// Keeps of the events that come only what lies between these moments.
    pub(super) fn keep(&mut self, window: Range<Micros>) {
        self.window = Some(window);
    }

    /// Ends what is open, and the file.
    pub(super) fn end(mut self) -> io::Result<()> {
        let last = self.last;
        self.waited(last)?;
        for (url, (phase, since)) in std::mem::take(&mut self.phases) {
            self.phase(&url, &phase, since..last)?;
        }
        self.out.write_all(b"\n]}\n")?;
        self.out.flush()
    }

    /// A step, with what it published and learned within; when it was under way.
    pub(super) fn step(&mut self, step: &StepMetrics) -> io::Result<Range<Micros>> {
        let end = step.completed_at_ms.saturating_mul(1000);
        let start = end.saturating_sub(micros(step.wall_ms)).max(self.step_end).min(end);
        self.step_end = end;
        self.last = self.last.max(end);
        let args =
            json!({"reward": step.reward, "staleness_mean": step.staleness_mean, "tokens": step.tokens});
        self.span(STEPS, &format!("step {}", step.rollout_id), start..end, args)?;
        let mut learned = end;
        if let Some(published) = step.publication.as_ref().filter(|published| published.committed_at_ms > 0) {
            let committed = published.committed_at_ms.saturating_mul(1000).clamp(start, end);
            learned = committed.saturating_sub(micros(published.encode_publish_ms)).max(start);
            let args = json!({"bytes": published.publication_bytes, "density": published.density});
            self.span(STEPS, &format!("publish version {}", published.version), learned..committed, args)?;
        }
        let begun = learned.saturating_sub(micros(step.train_ms)).max(start);
        self.span(STEPS, "learn", begun..learned, Value::Null)?;
        for (host, versions) in step.publication.iter().flat_map(|published| &published.hosts) {
            versions.iter().try_for_each(|phases| self.version(host, phases))?;
        }
        Ok(start..end)
    }

    /// A version on its way to a host.
    fn version(&mut self, host: &str, phases: &Phases) -> io::Result<()> {
        let process = self.process("host", host)?;
        let start = phases.began_at_ms.saturating_mul(1000);
        let mut parts = Vec::new();
        let mut end = start;
        for (name, ms) in phases.of_host().into_iter().chain(phases.of_engine()) {
            let begun = end;
            end = end.saturating_add(micros(ms));
            parts.push((name, begun..end));
        }
        let id = format!("{process}/v{}", phases.version.0);
        self.lane(
            process,
            "version",
            &id,
            &format!("version {}", phases.version.0),
            start..end,
            &parts,
            Value::Null,
        )
    }

    /// An answer; `None` if the log does not say when it was under way.
    pub(super) fn sample(&mut self, record: &Record) -> io::Result<Option<()>> {
        let &[asked, first, last] = record.times() else { return Ok(None) };
        let [asked, first, last] = [asked, first, last].map(|time| u64::try_from(time).unwrap_or_default());
        if asked == 0 || last < asked {
            return Ok(None);
        }
        let first = if (asked..=last).contains(&first) { first } else { asked };
        let scored = record.score().map_or(last, |score| score.scalars().clock_us.max(last));
        let parts = [("prefill", asked..first), ("decode", first..last), ("reward", last..scored)];
        let parts: Vec<_> = parts.into_iter().filter(|(_, time)| !time.is_empty()).collect();
        let process = self.process("engine", record.engine())?;
        let scalars = record.scalars();
        let mut versions: Vec<u64> = record.spans().iter().map(|span| span.version).collect();
        versions.dedup();
        let args = json!({
            "step": scalars.rollout_id, "prompt": scalars.group_id, "reward": record.is_scored().then_some(scalars.reward),
            "tokens": record.response().len(), "versions": versions, "finish": format!("{:?}", record.finish()),
        });
        let (name, kind) = match scalars.evaluation {
            true => ("evaluated".to_owned(), "evaluation"),
            false => (format!("answer {}", scalars.answer()), "sample"),
        };
        let id = format!("s{}", record.position().0);
        self.lane(process, kind, &id, &name, asked..scored, &parts, args).map(Some)
    }

    /// A line of `events.jsonl`; `None` if it is none.
    pub(super) fn event(&mut self, mut fields: Map<String, Value>) -> io::Result<Option<()>> {
        let (Some(at), Some(Value::String(event))) =
            (fields.remove("at_ms").and_then(|at| at.as_u64()), fields.remove("event"))
        else {
            return Ok(None);
        };
        let at = at.saturating_mul(1000);
        self.last = self.last.max(at);
        self.waited(at)?;
        let url = fields.get("url").and_then(Value::as_str).map(str::to_owned);
        let phase = fields.get("phase").and_then(Value::as_str).map(str::to_owned);
        match (&event[..], url, phase) {
            ("waiting", ..) => self.waiting = Some((Value::Object(fields), at)),
            // `metrics.jsonl` says more of it.
            ("step", ..) => {}
            ("phase", Some(url), Some(phase)) => {
                let before = match &phase[..] {
                    "gone" => self.phases.remove(&url),
                    _ => self.phases.insert(url.clone(), (phase, at)),
                };
                if let Some((before, since)) = before {
                    self.phase(&url, &before, since..at)?;
                }
            }
            (_, url, _) if self.is_kept(&(at..at)) => {
                let (pid, tid) = match url {
                    Some(url) => (self.process("engine", &url)?, OWN),
                    None => (TRAINER, EVENTS),
                };
                let (s, args) = (Some("p"), Value::Object(fields));
                self.write(&Entry {
                    name: &event,
                    cat: "event",
                    ph: "i",
                    ts: at,
                    pid,
                    tid,
                    s,
                    args,
                    ..Entry::default()
                })?;
            }
            _ => {}
        }
        Ok(Some(()))
    }

    /// What was waited for has come, or something else happens.
    fn waited(&mut self, at: Micros) -> io::Result<()> {
        let Some((args, since)) = self.waiting.take() else { return Ok(()) };
        let what = args.get("what").and_then(Value::as_str).unwrap_or("wait").to_owned();
        if !self.is_kept(&(since..at)) {
            return Ok(());
        }
        self.span(WAITS, &what, since..at, args)
    }

    fn phase(&mut self, url: &str, phase: &str, time: Range<Micros>) -> io::Result<()> {
        if !self.is_kept(&time) {
            return Ok(());
        }
        let pid = self.process("engine", url)?;
        self.complete(pid, OWN, phase, time, Value::Null)
    }

    /// Whether a part of it lies within what is kept.
    fn is_kept(&self, time: &Range<Micros>) -> bool {
        self.window.as_ref().is_none_or(|kept| time.start <= kept.end && time.end >= kept.start)
    }

    /// The number of an engine or a host, which is named when it comes first.
    fn process(&mut self, kind: &str, name: &str) -> io::Result<u64> {
        let name = format!("{kind} {name}");
        if let Some(number) = self.processes.get(&name) {
            return Ok(*number);
        }
        let number = TRAINER + 1 + self.processes.len() as u64;
        self.name("process_name", number, 0, &name)?;
        self.processes.insert(name, number);
        Ok(number)
    }

    fn name(&mut self, what: &str, pid: u64, tid: u64, name: &str) -> io::Result<()> {
        self.write(&Entry { name: what, ph: "M", pid, tid, args: json!({"name": name}), ..Entry::default() })
    }

    fn span(&mut self, row: u64, name: &str, time: Range<Micros>, args: Value) -> io::Result<()> {
        self.complete(TRAINER, row, name, time, args)
    }

    fn complete(
        &mut self,
        pid: u64,
        tid: u64,
        name: &str,
        time: Range<Micros>,
        args: Value,
    ) -> io::Result<()> {
        let dur = Some(time.end.saturating_sub(time.start));
        self.write(&Entry {
            name,
            cat: "run",
            ph: "X",
            ts: time.start,
            dur,
            pid,
            tid,
            args,
            ..Entry::default()
        })
    }

    /// A lane of its own: something with parts, one behind the other.
    #[expect(clippy::too_many_arguments, reason = "each is a field of one record")]
    fn lane(
        &mut self,
        pid: u64,
        cat: &'static str,
        id: &str,
        name: &str,
        time: Range<Micros>,
        parts: &[(&str, Range<Micros>)],
        args: Value,
    ) -> io::Result<()> {
        let mut write = |ph, name: &str, ts, args| {
            let id = Some(id.to_owned());
            self.write(&Entry { name, cat, ph, ts, pid, tid: OWN, id, args, ..Entry::default() })
        };
        write("b", name, time.start, args)?;
        for (part, time) in parts {
            write("b", part, time.start, Value::Null)?;
            write("e", part, time.end, Value::Null)?;
        }
        write("e", name, time.end, Value::Null)
    }

    fn write(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        if std::mem::replace(&mut self.is_begun, true) {
            self.out.write_all(b",\n")?;
        }
        serde_json::to_writer(&mut self.out, entry).map_err(io::Error::from)
    }
}

fn micros(ms: f64) -> Micros {
    // A cast saturates, and makes 0 of what is no number.
    (ms * 1e3) as Micros
}
