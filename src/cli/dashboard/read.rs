//! What the files of a run say: figures of its steps, what happened, which groups each step took.

use super::lines::{Came, Lines, text};
use super::time::Index;
use crate::cli::shared::alerts::remedy;
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::timeline::Starts;
use driftless::store::redact;
use driftless::trainer::events::{EARLIER, EVENTS};
use driftless::trainer::goodput::Goodput;
use driftless::trainer::learner::program;
use driftless::trainer::ledger;
use driftless::trainer::metrics::METRICS;
use serde::ser::SerializeSeq as _;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};

/// Figures that are held of all steps: 48 MiB.
const CELLS_MAX: usize = 6 << 20;
/// Names of figures.
const COLUMNS_MAX: usize = 1024;
/// How deep figures lie in each other.
const DEPTH_MAX: usize = 8;
/// Facts that are held, and engines, versions, and phases of an engine.
const FACTS_MAX: usize = 400;
const ENGINES_MAX: usize = 1024;
const HOSTS_MAX: usize = 1024;
const VERSIONS_MAX: usize = 400;
const PHASES_MAX: usize = 200;
const ALERTS_MAX: usize = 32;
/// Groups of the steps.
const GROUPS_MAX: usize = 4 << 20;
/// Longest fact, and longest name of a figure.
pub(super) const FACT_BYTES_MAX: usize = 32 << 10;
const NAME_BYTES_MAX: usize = 200;
/// The figure that no file has: tokens of all steps so far, those between rows too.
const TOKENS_DONE: &str = "tokens_done";
const SETTINGS_BYTES_MAX: u64 = 1 << 20;

/// The files of a run.
pub(in crate::cli) struct Files {
    pub(in crate::cli) dir: PathBuf,
    pub(super) metrics: Lines,
    /// First of those before, then of those since.
    pub(super) events: Lines,
    ledger: Lines,
    pub(super) index: Index,
    pub(in crate::cli) table: Table,
    pub(in crate::cli) facts: Facts,
    pub(super) taken: Taken,
}

/// Lines that were not understood, by file.
#[derive(Serialize)]
pub(in crate::cli) struct Damaged {
    metrics: u64,
    events: u64,
    ledger: u64,
}

impl Damaged {
    pub(in crate::cli) fn all(&self) -> u64 {
        self.metrics + self.events + self.ledger
    }
}

impl Files {
    pub(in crate::cli) fn new(dir: &Path) -> Result<Self> {
        let lines = |name: &str| Lines::new(dir.join(name));
        let mut files = Files {
            dir: dir.to_owned(),
            metrics: lines(METRICS),
            events: lines(EARLIER),
            ledger: lines(ledger::FILE),
            index: Index::default(),
            table: Table { stride: 1, ..Table::default() },
            facts: Facts::default(),
            taken: Taken::default(),
        };
        files.look()?;
        files.events.then(dir.join(EVENTS));
        files.look()?;
        Ok(files)
    }

    /// Reads what has been added, or all of it again where a file was written over.
    pub(in crate::cli) fn look(&mut self) -> Result<()> {
        if [&self.metrics, &self.events, &self.ledger].into_iter().any(Lines::is_written_over) {
            let epoch = self.table.epoch + 1;
            *self = Files::new(&self.dir)?;
            self.table.epoch += epoch;
        }
        let (index, table) = (&mut self.index, &mut self.table);
        let (facts, taken) = (&mut self.facts, &mut self.taken);
        self.metrics.look(&mut |came| {
            index.step(came);
            table.take(came)
        })?;
        self.events.look(&mut |came| {
            index.event(came);
            facts.take(came)
        })?;
        self.ledger.look(&mut |came| taken.take(came))
    }

    pub(in crate::cli) fn damaged(&self) -> Damaged {
        let (metrics, events) = (self.metrics.damaged, self.events.damaged);
        Damaged { metrics, events, ledger: self.ledger.damaged }
    }

    /// What the run was told: the comment of its settings' file, and each flag of `train`.
    pub(super) fn settings(&self) -> (String, toml::Table) {
        let text = text(&self.dir.join("run.toml"), SETTINGS_BYTES_MAX).unwrap_or_default();
        let told = text.lines().next().and_then(|line| line.strip_prefix("# ")).unwrap_or_default();
        let table: toml::Table = text.parse().unwrap_or_default();
        let flags = table.get("train").and_then(toml::Value::as_table).cloned().unwrap_or_default();
        (told.to_owned(), flags)
    }
}

/// Settings without what may be secret.
pub(super) fn without_secrets(flags: &toml::Table) -> BTreeMap<String, String> {
    flags.iter().map(|(flag, value)| (flag.clone(), shown(flag, value))).collect()
}

/// A setting without what may be secret: only the program of a command is shown, nothing of what an environment is told, and
/// URLs lack passwords and queries.
fn shown(flag: &str, value: &toml::Value) -> String {
    let text = match value {
        toml::Value::Array(values) => {
            return values.iter().map(|value| shown(flag, value)).collect::<Vec<_>>().join(" ");
        }
        toml::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let is_url = ["http://", "https://"].iter().any(|scheme| text.starts_with(scheme));
    match flag {
        "environment-args" => "…".to_owned(),
        _ if !is_url && (flag.ends_with("-command") || flag == "learner") => match program(&text) {
            program if program == text => text,
            program => format!("{program} …"),
        },
        _ if text.contains("://") => redact(&text),
        _ => text,
    }
}

/// Figures of steps, by name: a row for each step, and nothing that is no number.
#[derive(Default)]
pub(in crate::cli) struct Table {
    /// Grows whenever rows that were there are there no more.
    epoch: u64,
    /// Only steps whose number is a multiple of it are held.
    stride: u64,
    steps: Vec<u64>,
    /// The last step, which may not be held, and the tokens of all up to it.
    last: Option<u64>,
    tokens: f64,
    /// The last version that was told of on its way to each host, as the file has it.
    hosts: BTreeMap<String, Value>,
    columns: BTreeMap<String, Vec<f64>>,
}

/// Some rows of a table.
#[derive(Serialize)]
struct Rows<'a> {
    epoch: u64,
    from: usize,
    rows: usize,
    stride: u64,
    columns: BTreeMap<&'a str, Figures<'a>>,
}

/// Figures as short as seven digits are: whole numbers in full, and nothing where there is none.
struct Figures<'a>(&'a [f64]);

impl Serialize for Figures<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        /// Whole numbers below are exact.
        const EXACT: f64 = 9e15;
        let mut all = serializer.serialize_seq(Some(self.0.len()))?;
        for figure in self.0 {
            match figure.fract() == 0.0 && figure.abs() < EXACT {
                true => all.serialize_element(&(*figure as i64))?,
                false => all.serialize_element(&(*figure as f32))?,
            }
        }
        all.end()
    }
}

impl Table {
    fn take(&mut self, came: Came<'_>) -> bool {
        let Came::Line(line, _) = came else {
            *self = Table { epoch: self.epoch + 1, stride: 1, ..Table::default() };
            return true;
        };
        let Ok(value) = serde_json::from_slice::<Value>(line) else { return false };
        let Some(step) = value.get("rollout_id").and_then(Value::as_u64) else { return false };
        if self.last.replace(step).is_some_and(|last| last >= step) {
            let before = self.steps.partition_point(|before| *before < step);
            self.keep(|row, _| row < before);
            // Those of steps that are not held between there and here are not known.
            self.tokens = self.last(TOKENS_DONE).unwrap_or_default();
        }
        self.tokens += value.get("tokens").and_then(Value::as_f64).unwrap_or_default();
        for (host, phases) in
            value.pointer("/publication/hosts").and_then(Value::as_object).into_iter().flatten()
        {
            let Some(last) = phases.as_array().and_then(|all| all.last()) else { continue };
            if self.hosts.contains_key(host) || self.hosts.len() < HOSTS_MAX {
                self.hosts.insert(host.clone(), last.clone());
            }
        }
        if !step.is_multiple_of(self.stride) {
            return true;
        }
        self.steps.push(step);
        self.flatten(&mut String::new(), &value, DEPTH_MAX);
        self.put(TOKENS_DONE, self.tokens);
        let rows = self.steps.len();
        self.columns.values_mut().for_each(|column| column.resize(rows, f64::NAN));
        if rows * self.columns.len() > CELLS_MAX {
            self.stride *= 2;
            let stride = self.stride;
            self.keep(|_, step| step.is_multiple_of(stride));
        }
        true
    }

    /// Keeps the rows that `is_kept` says yes to, by number and step.
    fn keep(&mut self, is_kept: impl Fn(usize, u64) -> bool) {
        let kept: Vec<bool> = self.steps.iter().enumerate().map(|(row, step)| is_kept(row, *step)).collect();
        for column in self.columns.values_mut() {
            let mut of = kept.iter();
            column.retain(|_| of.next().is_some_and(|kept| *kept));
        }
        let mut of = kept.iter();
        self.steps.retain(|_| of.next().is_some_and(|kept| *kept));
        self.epoch += 1;
    }

    fn flatten(&mut self, name: &mut String, value: &Value, deeper: usize) {
        let figure = match value {
            Value::Number(number) => number.as_f64(),
            Value::Bool(is) => Some(f64::from(u8::from(*is))),
            Value::Object(fields) if deeper > 0 => {
                let length = name.len();
                for (key, value) in fields {
                    if length > 0 {
                        name.push('.');
                    }
                    name.push_str(key);
                    self.flatten(name, value, deeper - 1);
                    name.truncate(length);
                }
                None
            }
            _ => None,
        };
        if let Some(figure) = figure {
            self.put(name, figure);
        }
    }

    /// A figure of the newest row.
    fn put(&mut self, name: &str, figure: f64) {
        let is_new = !self.columns.contains_key(name);
        if is_new && self.columns.len() < COLUMNS_MAX && name.len() <= NAME_BYTES_MAX {
            self.columns.insert(name.to_owned(), Vec::new());
        }
        if let Some(column) = self.columns.get_mut(name) {
            column.resize(self.steps.len() - 1, f64::NAN);
            column.push(figure);
        }
    }

    /// The last figure of this name.
    pub(in crate::cli) fn last(&self, name: &str) -> Option<f64> {
        self.column(name).last().copied()
    }

    /// The figures of this name, of the steps that are held; not a number where a step has none.
    pub(in crate::cli) fn column(&self, name: &str) -> &[f64] {
        self.columns.get(name).map_or(&[], Vec::as_slice)
    }

    /// The last step, also where its figures are not held.
    pub(in crate::cli) fn last_step(&self) -> Option<u64> {
        self.last
    }

    /// What engines' places had done behind the last row, and so many rows before it, where the same process counted.
    pub(in crate::cli) fn goodput(&self, rows: usize) -> Option<(Option<Goodput>, Goodput)> {
        let last = self.steps.len().checked_sub(1)?;
        let now = self.goodput_of(last)?;
        let before = last.checked_sub(rows).and_then(|row| self.goodput_of(row));
        Some((before.filter(|before| before.began_at_ms == now.began_at_ms), now))
    }

    /// A row's, out of its figures.
    fn goodput_of(&self, row: usize) -> Option<Goodput> {
        let mut fields = serde_json::Map::new();
        for (name, column) in &self.columns {
            let Some(field) = name.strip_prefix("goodput.") else { continue };
            let Some(value) = column.get(row).copied().filter(|value| value.is_finite()) else { continue };
            match field.split_once('.') {
                None if field == "began_at_ms" => fields.insert(field.to_owned(), (value as u64).into()),
                None => fields.insert(field.to_owned(), value.into()),
                Some(("tokens", _)) => None,
                Some((part, why)) => {
                    let part = fields.entry(part).or_insert_with(|| Value::Object(serde_json::Map::new()));
                    part.as_object_mut().and_then(|part| part.insert(why.to_owned(), value.into()))
                }
            };
        }
        fields.get("began_at_ms")?;
        serde_json::from_value(Value::Object(fields)).ok()
    }

    /// The rows from `from` on, as JSON, or all where that counts rows of another epoch; of figures whose names begin so.
    pub(super) fn rows(&self, epoch: u64, from: usize, prefix: &str) -> Result<String> {
        let from = if epoch == self.epoch { from.min(self.steps.len()) } else { 0 };
        let wanted = self.columns.iter().filter(|(name, _)| name.starts_with(prefix));
        let columns = wanted.map(|(name, column)| (name.as_str(), Figures(&column[from..]))).collect();
        json(&Rows { epoch: self.epoch, from, rows: self.steps.len(), stride: self.stride, columns })
    }
}

/// What happened, as far as it is held.
#[derive(Default, Serialize)]
pub(in crate::cli) struct Facts {
    /// The newest, as the file has them.
    facts: VecDeque<Box<RawValue>>,
    /// Older ones.
    dropped: u64,
    pub(in crate::cli) engines: BTreeMap<String, Engine>,
    pub(in crate::cli) versions: BTreeMap<u64, Version>,
    /// Of the whole run, as its last start said.
    of: Option<u64>,
    /// Those that have begun since then and last.
    alerts: BTreeMap<String, Alert>,
    #[serde(skip)]
    starts: Starts,
    /// When the last thing happened.
    #[serde(skip)]
    last_ms: u64,
}

/// Something that spoils the run, and what to do.
#[derive(Clone, Debug, Serialize)]
pub(in crate::cli) struct Alert {
    at_ms: u64,
    pub(in crate::cli) text: String,
    pub(in crate::cli) remedy: &'static str,
}

/// An engine of the fleet.
#[derive(Default, Serialize)]
pub(in crate::cli) struct Engine {
    pub(in crate::cli) gets: String,
    pub(in crate::cli) why: String,
    /// When it came to which phase.
    pub(in crate::cli) phases: VecDeque<(u64, String)>,
    lost: u64,
}

#[derive(Default, Serialize)]
pub(in crate::cli) struct Version {
    step: Option<u64>,
    published_at_ms: Option<u64>,
    served_at_ms: Option<u64>,
    pub(in crate::cli) behind: u64,
}

/// What is looked at of a fact.
#[derive(Deserialize)]
struct Fact {
    at_ms: u64,
    event: String,
    url: Option<String>,
    gets: Option<String>,
    phase: Option<String>,
    why: Option<String>,
    version: Option<u64>,
    step: Option<u64>,
    behind: Option<u64>,
    of: Option<u64>,
    alert: Option<String>,
    begins: Option<bool>,
    text: Option<String>,
    what: Option<String>,
}

impl Facts {
    fn take(&mut self, came: Came<'_>) -> bool {
        // Another file goes on where the one before ended.
        let Came::Line(line, _) = came else { return true };
        let Ok(fact) = serde_json::from_slice::<Fact>(line) else { return false };
        if line.len() > FACT_BYTES_MAX {
            self.dropped += 1;
            return true;
        }
        let Ok(raw) = serde_json::from_slice::<Box<RawValue>>(line) else { return false };
        self.note(&fact);
        // Steps stand in the metrics, and versions are kept apart.
        let is_told = match fact.event.as_str() {
            "step" | "published" => true,
            "served" => fact.behind.unwrap_or(0) == 0,
            _ => false,
        };
        if !is_told {
            self.facts.push_back(raw);
        }
        if self.facts.len() > FACTS_MAX {
            self.facts.pop_front();
            self.dropped += 1;
        }
        true
    }

    fn note(&mut self, fact: &Fact) {
        if self.starts.see(&fact.event, fact.what.as_deref()) {
            // Those that this process has are told of behind.
            let last = self.last_ms;
            self.engines.values_mut().for_each(|engine| engine.leave(last));
        }
        self.last_ms = self.last_ms.max(fact.at_ms);
        if fact.event == "begin" {
            self.of = fact.of;
            self.alerts.clear();
        }
        if let Some(alert) = &fact.alert {
            self.note_alert(alert, fact);
        }
        if let Some(url) = &fact.url
            && (self.engines.contains_key(url) || self.engines.len() < ENGINES_MAX)
        {
            self.engines.entry(url.clone()).or_default().note(fact);
        }
        if let Some(number) = fact.version {
            if fact.event == "published" {
                // Numbers grow. What has higher ones is of a run that was in this directory before.
                self.versions.split_off(&number);
            }
            let version = self.versions.entry(number).or_default();
            match fact.event.as_str() {
                "published" => (version.step, version.published_at_ms) = (fact.step, Some(fact.at_ms)),
                "served" => {
                    (version.served_at_ms, version.behind) = (Some(fact.at_ms), fact.behind.unwrap_or(0));
                }
                _ => {}
            }
            if self.versions.len() > VERSIONS_MAX {
                self.versions.pop_first();
            }
        }
    }

    fn note_alert(&mut self, alert: &str, fact: &Fact) {
        if fact.begins != Some(true) {
            self.alerts.remove(alert);
        } else if self.alerts.len() < ALERTS_MAX {
            let (at_ms, text) = (fact.at_ms, fact.text.clone().unwrap_or_default());
            self.alerts.insert(alert.to_owned(), Alert { at_ms, text, remedy: remedy(alert) });
        }
    }

    /// With the hosts that figures tell of.
    pub(super) fn json(&self, table: &Table) -> Result<String> {
        #[derive(Serialize)]
        struct Fleet<'a> {
            #[serde(flatten)]
            facts: &'a Facts,
            hosts: &'a BTreeMap<String, Value>,
        }
        json(&Fleet { facts: self, hosts: &table.hosts })
    }

    /// What spoils the run now, the engines that are lost with it.
    pub(in crate::cli) fn alerts(&self) -> Vec<Alert> {
        let lost = |(url, engine): (&String, &Engine)| {
            let (at_ms, phase) = engine.phases.back()?;
            (phase == "lost").then(|| Alert {
                at_ms: *at_ms,
                text: format!("engine {url} is lost: {}", engine.why),
                remedy: "start it again, and it joins by itself; `driftless fleet remove` forgets it",
            })
        };
        self.alerts.values().cloned().chain(self.engines.iter().filter_map(lost)).collect()
    }

    pub(in crate::cli) fn of(&self) -> Option<u64> {
        self.of
    }
}

impl Version {
    /// Time from its publication until engines served it, in milliseconds.
    pub(in crate::cli) fn served_after_ms(&self) -> Option<u64> {
        Some(self.served_at_ms?.saturating_sub(self.published_at_ms?))
    }
}

impl Engine {
    fn note(&mut self, fact: &Fact) {
        if let Some(gets) = &fact.gets {
            self.gets.clone_from(gets);
        }
        let Some(phase) = &fact.phase else { return };
        self.why = fact.why.clone().unwrap_or_default();
        self.lost += u64::from(phase == "lost");
        self.come_to(fact.at_ms, phase.clone());
    }

    /// The process that told of it ended.
    fn leave(&mut self, at_ms: u64) {
        if self.phases.back().is_some_and(|(_, phase)| phase != "gone") {
            self.why = String::new();
            self.come_to(at_ms, "gone".to_owned());
        }
    }

    fn come_to(&mut self, at_ms: u64, phase: String) {
        self.phases.push_back((at_ms, phase));
        if self.phases.len() > PHASES_MAX {
            self.phases.pop_front();
        }
    }
}

/// The groups that each step learned from.
#[derive(Default)]
pub(super) struct Taken {
    steps: BTreeMap<u64, Vec<u64>>,
    groups: usize,
}

#[derive(Deserialize)]
struct Learned {
    step: u64,
    groups: Vec<u64>,
}

impl Taken {
    fn take(&mut self, came: Came<'_>) -> bool {
        let Came::Line(line, _) = came else {
            *self = Taken::default();
            return true;
        };
        let Ok(Learned { step, groups }) = serde_json::from_slice(line) else { return false };
        self.groups += groups.len();
        self.groups -= self.steps.insert(step, groups).map_or(0, |before| before.len());
        while self.groups > GROUPS_MAX {
            let Some((_, oldest)) = self.steps.pop_first() else { break };
            self.groups -= oldest.len();
        }
        true
    }

    /// Those of a step.
    pub(super) fn of(&self, step: u64) -> Option<&[u64]> {
        self.steps.get(&step).map(Vec::as_slice)
    }

    /// The first step from `step` on that took this group.
    pub(super) fn step_of(&self, group: u64, step: u64) -> Option<u64> {
        self.steps.range(step..).find(|(_, groups)| groups.contains(&group)).map(|(step, _)| *step)
    }

    /// The first and the last step.
    pub(super) fn range(&self) -> Option<(u64, u64)> {
        Some((*self.steps.keys().next()?, *self.steps.keys().next_back()?))
    }
}

pub(super) fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|source| Error::Json { what: "an answer".to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinned_table_counts_the_steps_that_it_does_not_hold() {
        let mut table = Table { stride: 2, ..Table::default() };
        let mut take = |steps: &[u64]| {
            for step in steps {
                let line = format!("{{\"rollout_id\":{step},\"tokens\":10}}");
                assert!(table.take(Came::Line(line.as_bytes(), 0)));
            }
            (table.last_step(), table.steps.clone(), table.column(TOKENS_DONE).to_vec())
        };
        assert_eq!(take(&[0, 1, 2, 3]), (Some(3), vec![0, 2], vec![10.0, 30.0]));
        // Done again, from a step that is not held.
        assert_eq!(take(&[3, 4, 5]), (Some(5), vec![0, 2, 4], vec![10.0, 30.0, 50.0]));
        assert_eq!(take(&[2]), (Some(2), vec![0, 2], vec![10.0, 20.0]), "all of step 1 but its tokens");
    }
}
