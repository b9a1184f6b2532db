//! How a run is doing, as a page for Prometheus.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use driftless_http::Server;
use driftless_http::metrics::{self, Page};

use driftless_trainer::door::Listen;
use driftless_trainer::events::{Alert, Event, Fact, Sink};
use driftless_trainer::metrics::StepMetrics;
use driftless_trainer::{Error, Result};

use crate::scalars;

/// What stands before every name.
const PREFIX: &str = "driftless_trainer";
/// Where an engine of the fleet may be.
const PHASES: [&str; 5] = ["joining", "syncing", "serving", "draining", "lost"];

/// Keeps what was told of a run last. Clones share it.
#[derive(Debug, Clone)]
pub struct Prometheus(Arc<Mutex<State>>);

/// What was told.
#[derive(Debug, Default)]
struct State {
    run: String,
    /// Steps done, and those of the whole run.
    steps: Option<(u64, u64)>,
    last: Option<Box<StepMetrics>>,
    /// The phase of each engine that is in the fleet.
    engines: BTreeMap<String, &'static str>,
    published: Option<u64>,
    /// The version, and the engines that were gone on without.
    served: Option<(u64, u64)>,
    skipped: u64,
    learners_lost: u64,
    missed: u64,
    /// The alerts that have begun.
    alerts: BTreeSet<&'static str>,
}

impl Prometheus {
    /// Of the run of this name.
    #[must_use]
    pub fn new(run: &str) -> Self {
        Prometheus(Arc::new(Mutex::new(State { run: run.to_owned(), ..State::default() })))
    }

    /// Serves `GET /metrics` until the server is dropped.
    ///
    /// # Errors
    /// [`Error::MetricsListen`]: an address beyond loopback without a token, or one that cannot be had.
    pub fn serve(&self, listen: &Listen) -> Result<Server> {
        let told = self.clone();
        metrics::serve("metrics_listen", listen.addr, listen.token.clone(), move || told.page())
            .map_err(|source| Error::MetricsListen { source })
    }

    /// The page as it is now.
    #[must_use]
    pub fn page(&self) -> String {
        self.figures().into_text()
    }

    /// What stands on it.
    pub(crate) fn figures(&self) -> Page {
        let (state, mut page) = (self.lock(), Page::new(PREFIX));
        state.run(&mut page);
        state.fleet(&mut page);
        if let Some(step) = &state.last {
            step_figures(&mut page, step);
        }
        page
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sink for Prometheus {
    fn take(&mut self, fact: &Fact) {
        let mut state = self.lock();
        match &fact.event {
            Event::Begin { step, of } => state.steps = Some((*step, *of)),
            Event::Phase { url, phase: "gone", .. } => drop(state.engines.remove(url)),
            Event::Phase { url, phase, .. } => drop(state.engines.insert(url.clone(), phase)),
            Event::Skipped { .. } => state.skipped += 1,
            Event::LearnerLost { .. } => state.learners_lost += 1,
            Event::Published { version, .. } => state.published = Some(*version),
            Event::Served { version, behind } => state.served = Some((*version, *behind)),
            Event::Missed { events } => state.missed += events,
            Event::Alert { alert, begins: true, .. } => drop(state.alerts.insert(alert)),
            Event::Alert { alert, .. } => drop(state.alerts.remove(alert)),
            Event::Step(step) => {
                let of = state.steps.map_or(0, |(_, of)| of);
                state.steps = Some((step.rollout_id + 1, of));
                state.last = Some(step.clone());
            }
            _ => {}
        }
    }
}

impl State {
    fn run(&self, page: &mut Page) {
        page.family("info", "gauge", "The run's name; always 1.");
        page.sample(&[("run", &self.run)], 1);
        if let Some((done, of)) = self.steps {
            page.gauge("steps_done", "Steps that are complete, those of earlier processes included.", done);
            page.gauge("steps", "Steps of the whole run.", of);
        }
        page.counter("steps_skipped_total", "Steps left out, as they were not finite.", self.skipped);
        page.counter("learners_lost_total", "Times that the learner was lost.", self.learners_lost);
        page.counter("events_missed_total", "Events that this page was too slow for.", self.missed);
        page.family("alert", "gauge", "Whether something spoils the run without ending it, by what.");
        for alert in Alert::ALL.map(Alert::name) {
            page.sample(&[("alert", alert)], u8::from(self.alerts.contains(alert)));
        }
    }

    fn fleet(&self, page: &mut Page) {
        if let Some(version) = self.published {
            page.gauge("version", "Version published last.", version);
        }
        if let Some((version, behind)) = self.served {
            page.gauge("served_version", "Version that engines were brought to last.", version);
            page.gauge("engines_behind", "Engines that the loop went on without then.", behind);
        }
        page.family("engines", "gauge", "Engines of the fleet, by phase.");
        for phase in PHASES {
            let engines = self.engines.values().filter(|found| **found == phase).count();
            page.sample(&[("phase", phase)], engines);
        }
        if self.engines.is_empty() {
            return;
        }
        page.family("engine_phase", "gauge", "The phase that an engine is in; always 1.");
        for (engine, phase) in &self.engines {
            page.sample(&[("engine", engine), ("phase", phase)], 1);
        }
    }
}

/// Labels with their values.
type Labels = Vec<(&'static str, String)>;

/// Samples that have one name.
struct Family {
    kind: &'static str,
    help: String,
    samples: Vec<(Labels, f64)>,
}

/// The scalars of the last step, each by the name that `metrics.jsonl` has, in seconds where that has milliseconds.
fn step_figures(page: &mut Page, step: &StepMetrics) {
    let completed = step.completed_at_ms as f64 / 1e3;
    page.gauge("step_completed_timestamp_seconds", "When the last step was complete.", completed);
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    for (path, value) in scalars::of(step) {
        let Some((name, scale, labels)) = named(&path) else { continue };
        let family = families.entry(name).or_insert_with_key(|name| {
            let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
            let end = if labels.is_empty() { path.len() } else { 1 };
            let help = format!("{} of metrics.jsonl, as the last step has it.", path[..end].join("."));
            Family { kind, help, samples: Vec::new() }
        });
        family.samples.push((labels, value * scale));
    }
    for (name, Family { kind, help, samples }) in families {
        page.family(&name, kind, &help);
        for (labels, value) in samples {
            let labels: Vec<_> = labels.iter().map(|(name, value)| (*name, value.as_str())).collect();
            page.sample(&labels, value);
        }
    }
    page.family(
        "staleness_tokens",
        "gauge",
        "Tokens of the last step, by how many steps older their weights were.",
    );
    for (steps, tokens) in step.staleness.iter().enumerate() {
        page.sample(&[("steps", &steps.to_string())], tokens);
    }
}

/// The name of a figure, what its value is multiplied by, and its labels.
fn named(path: &[String]) -> Option<(String, f64, Labels)> {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    let bare = |name: &str| Some(with_unit(name)).map(|(name, scale)| (name, scale, Vec::new()));
    let by = |what, name: &str, why: &[&str]| vec![(what, name.to_owned()), ("why", why.concat())];
    match path[..] {
        [name] => bare(name),
        ["rewards", file] => Some(("rewards".to_owned(), 1.0, vec![("file", file.to_owned())])),
        ["log_prob_diff_by_engine", url] => {
            Some(("log_prob_diff_by_engine".to_owned(), 1.0, vec![("engine", url.to_owned())]))
        }
        ["answers_failed", outcome] => {
            Some(("answers_failed".to_owned(), 1.0, vec![("outcome", outcome.to_owned())]))
        }
        ["publication", name] => bare(&format!("publication_{name}")),
        ["eval", "sets", set, name] => Some((format!("eval_{name}"), 1.0, vec![("set", set.to_owned())])),
        ["goodput", "began_at_ms"] => None,
        ["goodput", "places_s"] => Some(("places_seconds_total".to_owned(), 1.0, Vec::new())),
        ["goodput", "tokens", name, ref why @ ..] => {
            Some(("tokens_total".to_owned(), 1.0, by("fate", name, why)))
        }
        ["goodput", name, ref why @ ..] => {
            let name = name.strip_suffix("_s").unwrap_or(name);
            Some(("place_seconds_total".to_owned(), 1.0, by("doing", name, why)))
        }
        _ => None,
    }
}

/// A name with its unit in words, as Prometheus wants it, and what the value is multiplied by.
fn with_unit(name: &str) -> (String, f64) {
    let units = [("_per_s", "_per_second", 1.0), ("_ms", "_seconds", 1e-3), ("_s", "_seconds", 1.0)];
    let found = units.iter().find_map(|(end, unit, scale)| Some((name.strip_suffix(end)?, unit, *scale)));
    found.map_or_else(|| (name.to_owned(), 1.0), |(name, unit, scale)| (format!("{name}{unit}"), scale))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::time::SystemTime;

    use super::*;
    use driftless_trainer::Failure;
    use driftless_trainer::goodput::{Goodput, Tokens};
    use driftless_trainer::metrics::{EvalMetrics, PublicationMetrics, SetMetrics};

    fn step() -> StepMetrics {
        let one = |why: &str| (why.to_owned(), 1.5);
        let tokens =
            Tokens { trained: 7, lost: [("engine \"a\"".to_owned(), 2)].into(), ..Tokens::default() };
        let goodput =
            Goodput { trained_s: 2.5, idle_s: [one("no request")].into(), tokens, ..Goodput::default() };
        let (prepare_ms, pause_ms, convergence_ms) = (Some(1.0), Some(2.0), Some(3.0));
        let publication =
            PublicationMetrics { prepare_ms, pause_ms, convergence_ms, ..PublicationMetrics::default() };
        let set = SetMetrics { pass: Some(0.5), pass_1: Some(0.25), ..SetMetrics::default() };
        StepMetrics {
            rollout_id: 4,
            completed_at_ms: 1500,
            reward: 0.5,
            reward_learned: Some(0.25),
            log_prob_diff_by_engine: [("http://a:1".to_owned(), 0.125)].into(),
            max_staleness: Some(2),
            pass: Some(1.0),
            rewards: [("a\\b\n".to_owned(), 2.0)].into(),
            answers_failed: [(Failure::Environment, 3)].into(),
            staleness: vec![3, 4],
            train_ms: 2500.0,
            publication: Some(publication),
            goodput: Some(goodput),
            eval: Some(EvalMetrics { sets: [("held-out".to_owned(), set)].into() }),
            ..StepMetrics::default()
        }
    }

    fn told() -> Prometheus {
        let mut told = Prometheus::new("r");
        let phase = |url: &str, phase| Event::Phase { url: url.to_owned(), phase, why: String::new() };
        let (lost, skipped) = ("l".to_owned(), "s".to_owned());
        for event in [
            Event::Begin { step: 2, of: 9 },
            phase("http://a:1", "serving"),
            phase("http://b:1", "serving"),
            phase("http://a:1", "lost"),
            phase("http://b:1", "gone"),
            Event::Published { version: 5, step: 5 },
            Event::Served { version: 5, behind: 1 },
            Event::Skipped { rollout: 3, what: skipped },
            Event::LearnerLost { error: lost },
            Event::Missed { events: 3 },
            Event::Step(step().into()),
        ] {
            told.take(&Fact::new(SystemTime::UNIX_EPOCH, event));
        }
        told
    }

    #[test]
    fn page_has_the_run_its_fleet_and_the_last_step() {
        let page = told().page();
        for line in [
            "info{run=\"r\"} 1",
            "steps_done 5",
            "steps 9",
            "engines{phase=\"lost\"} 1",
            "engines{phase=\"serving\"} 0",
            "engine_phase{engine=\"http://a:1\",phase=\"lost\"} 1",
            "served_version 5",
            "engines_behind 1",
            "events_missed_total 3",
            "step_completed_timestamp_seconds 1.5",
            "train_seconds 2.5",
            "rewards{file=\"a\\\\b\\n\"} 2",
            "answers_failed{outcome=\"environment\"} 3",
            "log_prob_diff_by_engine{engine=\"http://a:1\"} 0.125",
            "reward_learned 0.25",
            "eval_pass_1{set=\"held-out\"} 0.25",
            "place_seconds_total{doing=\"trained\",why=\"\"} 2.5",
            "place_seconds_total{doing=\"idle\",why=\"no request\"} 1.5",
            "tokens_total{fate=\"lost\",why=\"engine \\\"a\\\"\"} 2",
            "staleness_tokens{steps=\"1\"} 4",
            "publication_pause_seconds 0.002",
        ] {
            assert!(page.lines().any(|found| found == format!("{PREFIX}_{line}")), "{line} in\n{page}");
        }
        assert!(!page.contains("http://b:1"), "an engine that is gone: {page}");
    }

    #[test]
    fn every_family_begins_once_and_is_in_the_docs() {
        let (page, docs) = (told().page(), include_str!("../../../docs/watching.md"));
        let mut begun = BTreeSet::new();
        for line in page.lines() {
            if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').unwrap();
                assert!(begun.insert(name), "{name} begins twice");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
                let name = name.strip_prefix("driftless_trainer_").unwrap();
                assert!(docs.contains(&format!("`{name}`")), "{name} in docs/watching.md");
            } else if !line.starts_with('#') {
                let name = &line[..line.find(['{', ' ']).unwrap()];
                assert!(begun.contains(name), "{line} has no family");
            }
        }
    }

    #[test]
    fn dashboard_asks_only_for_names_of_the_page() {
        let (page, dashboard) = (told().page(), include_str!("../../../examples/grafana.json"));
        let names: BTreeSet<_> = dashboard.split(&format!("{PREFIX}_")).skip(1).collect();
        assert!(names.len() > 10, "it asks for {}", names.len());
        for rest in names {
            let name = &rest[..rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap()];
            assert!(page.contains(&format!("# TYPE {PREFIX}_{name} ")), "{name} of examples/grafana.json");
        }
    }

    #[test]
    fn address_beyond_loopback_wants_a_token() {
        let addr = "0.0.0.0:0".parse().unwrap();
        let refused = Prometheus::new("r").serve(&Listen { addr, token: None });
        assert!(matches!(refused, Err(Error::MetricsListen { .. })), "{refused:?}");
    }

    /// What a server answers to a request with these headers.
    fn get(server: &Server, headers: &str) -> String {
        use std::io::{Read as _, Write as _};
        let mut stream = std::net::TcpStream::connect(server.addr()).unwrap();
        write!(stream, "GET /metrics HTTP/1.1\r\nConnection: close\r\n{headers}\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn page_is_served_to_those_with_the_token() {
        let addr = "127.0.0.1:0".parse().unwrap();
        let server = told().serve(&Listen { addr, token: Some("t".to_owned()) }).unwrap();
        let other = get(&server, "Host: h\r\nAuthorization: Bearer other\r\n");
        assert!(other.starts_with("HTTP/1.1 401"), "{other}");
        let answer = get(&server, "Host: h\r\nAuthorization: Bearer t\r\n");
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(metrics::CONTENT_TYPE), "{answer}");
        assert!(answer.ends_with(&told().page()), "{answer}");
    }

    #[test]
    fn page_without_a_token_is_for_this_host_alone() {
        let server = told().serve(&Listen { addr: "127.0.0.1:0".parse().unwrap(), token: None }).unwrap();
        let own = format!("Host: {}\r\n", server.addr());
        for (headers, status) in [
            ("Host: localhost\r\n", 200),
            (own.as_str(), 200),
            ("", 200),
            ("Host: evil.example\r\n", 403),
            ("Host: localhost\r\nOrigin: http://evil.example\r\n", 403),
        ] {
            let answer = get(&server, headers);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{headers:?}: {answer}");
        }
    }
}
