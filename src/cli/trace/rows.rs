//! The time line of a run as Chrome's trace events: one JSON object, written as it goes.

use crate::cli::shared::timeline::{Bar, Kind, Micros, Timeline, Track, sample};
use driftless::buffer::Record;
use driftless::trainer::metrics::StepMetrics;
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

/// A trace under way.
pub(super) struct Trace<W> {
    out: W,
    is_begun: bool,
    /// Numbers of the engines and hosts, by name.
    processes: BTreeMap<String, u64>,
    timeline: Timeline,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<&'a Value>,
}

impl<W: Write> Trace<W> {
    pub(super) fn begin(mut out: W) -> io::Result<Self> {
        out.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n")?;
        let mut trace =
            Trace { out, is_begun: false, processes: BTreeMap::new(), timeline: Timeline::default() };
        trace.name("process_name", TRAINER, 0, "trainer")?;
        for (row, name) in [(STEPS, "steps"), (WAITS, "waits"), (EVENTS, "events")] {
            trace.name("thread_name", TRAINER, row, name)?;
        }
        Ok(trace)
    }

    /// Keeps of the events that come only what lies between these moments.
    pub(super) fn keep(&mut self, window: Range<Micros>) {
        self.timeline.keep(window);
    }

    /// Ends what is open, and the file.
    pub(super) fn end(mut self) -> io::Result<()> {
        let open = std::mem::take(&mut self.timeline).end();
        self.bars(&open)?;
        self.out.write_all(b"\n]}\n")?;
        self.out.flush()
    }

    /// A step, with what it published and learned within; when it was under way.
    pub(super) fn step(&mut self, step: &StepMetrics) -> io::Result<Range<Micros>> {
        let (time, bars) = self.timeline.step(step);
        self.bars(&bars).map(|()| time)
    }

    /// An answer; `None` if the log does not say when it was under way.
    pub(super) fn sample(&mut self, record: &Record) -> io::Result<Option<()>> {
        sample(record).map(|bar| self.bar(&bar)).transpose()
    }

    /// A line of `events.jsonl`; `None` if it is none.
    pub(super) fn event(&mut self, fields: Map<String, Value>) -> io::Result<Option<()>> {
        self.timeline.event(fields).map(|bars| self.bars(&bars)).transpose()
    }

    fn bars(&mut self, bars: &[Bar]) -> io::Result<()> {
        bars.iter().try_for_each(|bar| self.bar(bar))
    }

    fn bar(&mut self, bar: &Bar) -> io::Result<()> {
        let pid = match &bar.track {
            Track::Trainer => TRAINER,
            Track::Host(name) => self.process("host", name)?,
            Track::Engine(name) => self.process("engine", name)?,
        };
        match bar.kind {
            Kind::Step | Kind::Within => self.spans(bar, pid, STEPS),
            Kind::Wait => self.spans(bar, pid, WAITS),
            Kind::Phase => self.spans(bar, pid, OWN),
            Kind::Event => {
                let tid = if pid == TRAINER { EVENTS } else { OWN };
                let (name, ts, args) = (&bar.name[..], bar.time.start, told(bar));
                let s = Some("p");
                self.write(&Entry { name, cat: "event", ph: "i", ts, pid, tid, s, args, ..Entry::default() })
            }
            Kind::Version => self.lane(bar, pid, "version", &format!("{pid}/v{}", bar.id)),
            Kind::Evaluation => self.lane(bar, pid, "evaluation", &format!("s{}", bar.id)),
            Kind::Sample => self.lane(bar, pid, "sample", &format!("s{}", bar.id)),
        }
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
        let args = json!({"name": name});
        self.write(&Entry { name: what, ph: "M", pid, tid, args: Some(&args), ..Entry::default() })
    }

    /// On a row that it shares, with its parts within.
    fn spans(&mut self, bar: &Bar, pid: u64, tid: u64) -> io::Result<()> {
        let mut write = |name: &str, time: &Range<Micros>, args| {
            let (ts, dur) = (time.start, Some(time.end.saturating_sub(time.start)));
            self.write(&Entry { name, cat: "run", ph: "X", ts, dur, pid, tid, args, ..Entry::default() })
        };
        write(&bar.name, &bar.time, told(bar))?;
        bar.parts.iter().try_for_each(|part| write(part.phase, &part.time, None))
    }

    /// On a lane of its own.
    fn lane(&mut self, bar: &Bar, pid: u64, cat: &'static str, id: &str) -> io::Result<()> {
        let mut write = |ph, name: &str, ts, args| {
            let id = Some(id.to_owned());
            self.write(&Entry { name, cat, ph, ts, pid, tid: OWN, id, args, ..Entry::default() })
        };
        write("b", &bar.name, bar.time.start, told(bar))?;
        for part in &bar.parts {
            let name = part.version.map(|version| format!("{}, version {version}", part.phase));
            let name = name.as_deref().unwrap_or(part.phase);
            write("b", name, part.time.start, None)?;
            write("e", name, part.time.end, None)?;
        }
        write("e", &bar.name, bar.time.end, None)
    }

    fn write(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        if std::mem::replace(&mut self.is_begun, true) {
            self.out.write_all(b",\n")?;
        }
        serde_json::to_writer(&mut self.out, entry).map_err(io::Error::from)
    }
}

fn told(bar: &Bar) -> Option<&Value> {
    Some(&bar.told).filter(|told| !told.is_null())
}
