//! A follower's counters as a page for Prometheus. Pure: state in, text out.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use driftless_http::metrics::Page;
use driftless_store::wrap::Counts;

use super::status::Status;
use crate::activate::{Activated, Compared, How};
use crate::error::Error;
use crate::replica::Advanced;

/// What is counted beside the status.
#[derive(Clone, Debug, Default)]
pub(super) struct Counters {
    /// What was applied, summed.
    applied: Advanced,
    prepare_failures: u64,
    refused: u64,
    last_error: Option<Instant>,
    scrubbed_bytes: u64,
    scrub_mismatches: u64,
    /// Since when the store has a version that is not on disk.
    behind: Option<Instant>,
    engines: BTreeMap<String, Engine>,
    /// Milliseconds of each phase, summed.
    phases: BTreeMap<&'static str, f64>,
}

#[derive(Clone, Debug, Default)]
struct Engine {
    activations: u64,
    patches: u64,
    failures: u64,
    foreign_writes: u64,
    paused: Duration,
    last_pause: Duration,
}

impl Counters {
    /// Notes what a prepare came to.
    pub(super) fn prepared(&mut self, outcome: Result<&Advanced, &Error>, now: Instant) {
        let error = match outcome {
            Ok(advanced) => return self.applied.add(*advanced),
            // Before the first publication, and during another request, nothing is wrong.
            Err(Error::NoSuchRun { .. } | Error::NoSuchVersion { .. } | Error::Busy { .. }) => return,
            Err(error) => error,
        };
        self.prepare_failures += 1;
        self.refused += u64::from(error.is_refusal());
        self.last_error = Some(now);
    }

    /// Notes the phases of a version: those of the host once it is here, those of its engines once they serve it.
    pub(super) fn phased(&mut self, phases: impl Iterator<Item = (&'static str, f64)>) {
        for (name, ms) in phases {
            *self.phases.entry(name).or_default() += ms;
        }
    }

    /// Notes bytes that were read and are what they should be.
    pub(super) fn scrubbed(&mut self, bytes: u64) {
        self.scrubbed_bytes += bytes;
    }

    /// Notes bytes that are not.
    pub(super) fn scrub_mismatch(&mut self) {
        self.scrub_mismatches += 1;
    }

    /// Notes whether the store has a version that is not on disk.
    pub(super) fn compared(&mut self, status: &Status, now: Instant) {
        self.behind = (lag(status) > 0).then(|| self.behind.unwrap_or(now));
    }

    /// Notes that another program wrote an engine's weights.
    pub(super) fn foreign_write(&mut self, engine: &str) {
        self.engines.entry(engine.to_owned()).or_default().foreign_writes += 1;
    }

    /// Notes what an engine came to, and what was done if it was activated.
    pub(super) fn activated(&mut self, engine: &str, outcome: Result<Option<&Activated>, ()>, now: Instant) {
        let entry = self.engines.entry(engine.to_owned()).or_default();
        match outcome {
            Ok(None) => {}
            Ok(Some(Activated { pause, how, .. })) => {
                entry.activations += 1;
                entry.patches += u64::from(*how == Some(How::Patched));
                entry.paused += *pause;
                entry.last_pause = *pause;
            }
            Err(()) => {
                entry.failures += 1;
                self.last_error = Some(now);
            }
        }
    }
}

/// Versions between the disk and the store's newest.
fn lag(status: &Status) -> u64 {
    match (&status.newest, &status.applied) {
        (Some(newest), Some(applied)) => newest.0.saturating_sub(applied.version.0),
        (Some(newest), None) => newest.0.saturating_add(1),
        (None, _) => 0,
    }
}

/// The page, for the state as it is `now`; `store` is what passed between the follower and its store.
pub(super) fn page(status: &Status, counters: &Counters, store: &Counts, now: Instant) -> String {
    let mut page = Page::new("driftless_follower");
    identity(&mut page, status);
    progress(&mut page, status, counters, now);
    traffic(&mut page, store);
    engines(&mut page, status, counters);
    page.into_text()
}

fn identity(page: &mut Page, status: &Status) {
    page.family("info", "gauge", "The follower's name, run and model; always 1.");
    let run_id = status.run_id.map(|id| id.to_string()).unwrap_or_default();
    let labels =
        [("follower", &*status.id), ("run", &status.run), ("run_id", &run_id), ("model", &status.model)];
    page.sample(&labels, 1);
}

fn progress(page: &mut Page, status: &Status, counters: &Counters, now: Instant) {
    if let Some(applied) = &status.applied {
        page.gauge("version", "Version on disk.", applied.version.0);
        let help = "Fetch, check and apply of that version, until engines could load it.";
        page.gauge("last_prepare_seconds", help, applied.prepare_ms / 1e3);
    }
    if let Some(newest) = status.newest {
        page.gauge("newest_version", "Newest version that the store was seen to have.", newest.0);
    }
    page.gauge("lag_versions", "Versions between the disk and the store.", lag(status));
    let behind = counters.behind.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
    page.gauge("lag_seconds", "For how long the store has had a newer version.", behind.as_secs_f64());
    let applied = &counters.applied;
    page.counter("versions_applied_total", "Versions applied.", applied.versions);
    page.counter("elements_changed_total", "Elements changed by the versions applied.", applied.changed);
    page.counter("fetched_bytes_total", "Bytes of the objects of the versions applied.", applied.bytes);
    page.family(
        "apply_seconds_total",
        "counter",
        "Time of applies: fetch to sealed journal, overwrite, waiting for the sync of the version before.",
    );
    for (phase, time) in
        [("journal", applied.journal), ("overwrite", applied.overwrite), ("sync", applied.sync)]
    {
        page.sample(&[("phase", phase)], time.as_secs_f64());
    }
    page.family(
        "phase_seconds_total",
        "counter",
        "Time of phases of versions; one begins where another ends.",
    );
    for (phase, ms) in &counters.phases {
        page.sample(&[("phase", phase)], ms / 1e3);
    }
    if let Some(last) = status.applied.as_ref().and_then(|ack| ack.phases.last()) {
        page.family("last_phase_seconds", "gauge", "The same of the last version.");
        for (phase, ms) in last.of_host().into_iter().chain(last.of_engine()) {
            page.sample(&[("phase", phase)], ms / 1e3);
        }
    }
    page.counter("prepare_failures_total", "Prepares that failed.", counters.prepare_failures);
    let help = "Prepares that ended at bytes which are not what they must be.";
    page.counter("refused_total", help, counters.refused);
    let help = "Bytes of the checkpoint that were compared with their digests in the background.";
    page.counter("scrubbed_bytes_total", help, counters.scrubbed_bytes);
    let help = "Damage that this found; the directory is then built anew.";
    page.counter("scrub_mismatches_total", help, counters.scrub_mismatches);
    if let Some(error) = counters.last_error {
        let age = now.saturating_duration_since(error).as_secs_f64();
        page.gauge("last_error_age_seconds", "Since the last failure; absent before one.", age);
    }
}

fn traffic(page: &mut Page, store: &Counts) {
    page.family("store_requests_total", "counter", "Calls of the store, failed ones included.");
    let calls = [("put", store.puts), ("get", store.gets), ("head", store.heads)];
    for (operation, count) in calls.into_iter().chain([("list", store.lists), ("delete", store.deletes)]) {
        page.sample(&[("operation", operation)], count);
    }
    page.counter("store_read_bytes_total", "Bytes read from the store.", store.bytes_got);
    page.counter("store_written_bytes_total", "Bytes written to the store.", store.bytes_put);
}

fn engines(page: &mut Page, status: &Status, counters: &Counters) {
    let Some(applied) = &status.applied else { return };
    let engines = &applied.engines;
    if engines.is_empty() {
        return;
    }
    let none = Engine::default();
    let counted = |url: &str| counters.engines.get(url).unwrap_or(&none);
    let mut each = |name, kind, help, value: &dyn Fn(&super::EngineStatus) -> f64| {
        page.family(name, kind, help);
        for engine in engines {
            page.sample(&[("engine", &engine.url)], value(engine));
        }
    };
    each("engine_in_step", "gauge", "Whether the engine serves the version on disk.", &|engine| {
        f64::from(u8::from(engine.label.as_ref() == Some(&applied.label)))
    });
    each("engine_up", "gauge", "Whether the engine answered at the last look.", &|engine| {
        f64::from(u8::from(engine.up))
    });
    each("engine_paused", "gauge", "Whether the engine was paused at the last look.", &|engine| {
        f64::from(u8::from(engine.paused))
    });
    each("activations_total", "counter", "Versions that the engine was brought to.", &|engine| {
        counted(&engine.url).activations as f64
    });
    each("patches_total", "counter", "Those of them that its plugin patched it to.", &|engine| {
        counted(&engine.url).patches as f64
    });
    let help = "Whether weights were compared when the engine was last brought to a version.";
    each("engine_compared", "gauge", help, &|engine| {
        f64::from(u8::from(engine.compared.as_ref().is_some_and(Compared::is_any)))
    });
    let help = "Times that another program was found to have written the engine's weights.";
    each("foreign_writes_total", "counter", help, &|engine| counted(&engine.url).foreign_writes as f64);
    each("activation_failures_total", "counter", "Failures of the engine.", &|engine| {
        counted(&engine.url).failures as f64
    });
    each("pause_seconds_total", "counter", "Time the engine did not generate for activations.", &|engine| {
        counted(&engine.url).paused.as_secs_f64()
    });
    each(
        "last_pause_seconds",
        "gauge",
        "Time the engine did not generate for its last activation.",
        &|engine| counted(&engine.url).last_pause.as_secs_f64(),
    );
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use driftless_store::ContentDigest;

    use super::*;
    use crate::gc::{Ack, EngineStatus, Phases};
    use crate::ids::Version;

    /// The samples of a page by name and labels, read as the format's description says.
    pub(crate) fn parse(page: &str) -> BTreeMap<(String, Vec<(String, String)>), f64> {
        let mut kinds = BTreeMap::new();
        let mut helped = BTreeSet::new();
        let mut samples = BTreeMap::new();
        assert!(page.ends_with('\n'), "the last line must end too");
        for line in page.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, text) = help.split_once(' ').unwrap();
                assert!(helped.insert(name) && !text.is_empty(), "{line}");
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').unwrap();
                assert!(["counter", "gauge"].contains(&kind) && helped.contains(name), "{line}");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
                assert_eq!(kinds.insert(name, kind), None, "{line}");
            } else {
                let end = line.find(['{', ' ']).unwrap();
                let (name, rest) = line.split_at(end);
                assert!(kinds.contains_key(name), "{line}: no type before it");
                assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{line}");
                let (labels, value) = labels(rest);
                assert_eq!(samples.insert((name.to_owned(), labels), value.parse().unwrap()), None, "{line}");
            }
        }
        samples
    }

    /// `{name="value",…} number`, with its escapes, as labels and the number's text.
    fn labels(rest: &str) -> (Vec<(String, String)>, &str) {
        let Some(mut rest) = rest.strip_prefix('{') else { return (Vec::new(), rest.trim_start()) };
        let mut labels = Vec::new();
        loop {
            let (name, tail) = rest.split_once("=\"").unwrap();
            let mut value = String::new();
            let mut bytes = tail.char_indices();
            let end = loop {
                match bytes.next().unwrap() {
                    (at, '"') => break at,
                    (_, '\\') => match bytes.next().unwrap().1 {
                        'n' => value.push('\n'),
                        other => value.push(other),
                    },
                    (_, other) => value.push(other),
                }
            };
            labels.push((name.to_owned(), value));
            match tail[end + 1..].split_at(1) {
                (",", more) => rest = more,
                ("}", more) => return (labels, more.strip_prefix(' ').unwrap()),
                (other, _) => panic!("{other:?} behind a label"),
            }
        }
    }

    fn status(newest: Option<u64>, applied: Option<u64>, urls: &[&str]) -> Status {
        let engine = |url: &&str| EngineStatus {
            url: (*url).to_owned(),
            label: Some("a:4".into()),
            up: *url == "http://a",
            paused: *url == "http://a",
            pause_ms: None,
            how: None,
            compared: (*url == "http://a").then_some(Compared::Changes),
            error: None,
        };
        let ack = |version| Ack {
            version: Version(version),
            label: format!("a:{version}"),
            manifest_digest: ContentDigest::of(b""),
            prepare_ms: 1500.0,
            bytes: 7,
            engines: urls.iter().map(engine).collect(),
            phases: vec![Phases { see_ms: 4.0, patch_ms: Some(20.0), ..Phases::default() }],
        };
        Status {
            id: "host \"0\"".into(),
            run: "r".into(),
            run_id: None,
            model: "policy".into(),
            newest: newest.map(Version),
            applied: applied.map(ack),
            error: None,
        }
    }

    fn value(page: &str, name: &str, of: &[(&str, &str)]) -> Option<f64> {
        let labels = of.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        parse(page).get(&(format!("driftless_follower_{name}"), labels)).copied()
    }

    #[test]
    fn every_count_is_on_the_page() {
        let start = Instant::now();
        let later = |seconds| start + Duration::from_secs(seconds);
        let mut counters = Counters::default();
        let advanced = Advanced {
            versions: 2,
            bytes: 900,
            changed: 40,
            journal: Duration::from_millis(250),
            fetch: Duration::from_millis(30),
            decode: Duration::from_millis(200),
            offer: Duration::from_millis(500),
            overwrite: Duration::from_millis(500),
            sync: Duration::from_secs(1),
        };
        counters.prepared(Ok(&advanced), start);
        counters.prepared(Ok(&advanced), start);
        counters.prepared(Err(&Error::Cancelled { what: "a test" }), later(1));
        let corrupt =
            Error::Corrupt { subject: "x".into(), what: "y", expected: "1".into(), found: "2".into() };
        counters.prepared(Err(&corrupt), later(2));
        counters.prepared(Err(&Error::Busy { what: "x".into(), with: "y".into() }), later(3));
        let patched = |ms| Activated::default().with_pause(Duration::from_millis(ms)).with_how(How::Patched);
        counters.activated("http://a", Ok(Some(&patched(30).with_how(How::Loaded { why: None }))), later(3));
        counters.activated("http://a", Ok(Some(&patched(20))), later(3));
        counters.activated("http://a", Ok(None), later(3));
        counters.activated("b\\\n", Err(()), later(4));
        counters.scrubbed(500);
        counters.scrubbed(30);
        counters.scrub_mismatch();
        counters.foreign_write("http://a");
        let status = status(Some(6), Some(4), &["http://a", "b\\\n"]);
        counters.compared(&status, later(4));
        counters.compared(&status, later(5));
        let mut store = Counts::default();
        (store.gets, store.bytes_got) = (3, 2048);
        let page = page(&status, &counters, &store, later(10));
        for (name, expected) in [
            ("version", 4.0),
            ("newest_version", 6.0),
            ("lag_versions", 2.0),
            ("lag_seconds", 6.0),
            ("last_prepare_seconds", 1.5),
            ("versions_applied_total", 4.0),
            ("fetched_bytes_total", 1800.0),
            ("elements_changed_total", 80.0),
            ("prepare_failures_total", 2.0),
            ("refused_total", 1.0),
            ("scrubbed_bytes_total", 530.0),
            ("scrub_mismatches_total", 1.0),
            ("last_error_age_seconds", 6.0),
            ("store_read_bytes_total", 2048.0),
        ] {
            assert_eq!(value(&page, name, &[]), Some(expected), "{name}\n{page}");
        }
        let a = [("engine", "http://a")];
        assert_eq!(value(&page, "apply_seconds_total", &[("phase", "journal")]), Some(0.5));
        assert_eq!(value(&page, "apply_seconds_total", &[("phase", "sync")]), Some(2.0));
        assert_eq!(value(&page, "store_requests_total", &[("operation", "get")]), Some(3.0));
        assert_eq!(value(&page, "activations_total", &a), Some(2.0));
        assert_eq!(value(&page, "patches_total", &a), Some(1.0));
        assert_eq!(value(&page, "foreign_writes_total", &a), Some(1.0));
        assert_eq!(value(&page, "engine_compared", &a), Some(1.0));
        assert_eq!(value(&page, "engine_compared", &[("engine", "b\\\n")]), Some(0.0));
        assert_eq!(value(&page, "pause_seconds_total", &a), Some(0.05));
        assert_eq!(value(&page, "last_pause_seconds", &a), Some(0.02));
        assert_eq!(value(&page, "engine_in_step", &a), Some(1.0));
        assert_eq!(value(&page, "engine_up", &a), Some(1.0));
        assert_eq!(value(&page, "engine_up", &[("engine", "b\\\n")]), Some(0.0));
        assert_eq!(value(&page, "engine_paused", &a), Some(1.0));
        assert_eq!(value(&page, "engine_paused", &[("engine", "b\\\n")]), Some(0.0));
        assert_eq!(value(&page, "activation_failures_total", &[("engine", "b\\\n")]), Some(1.0));
        let docs = include_str!("../../../docs/wire/follower.md");
        for (name, _) in parse(&page).keys() {
            let name = name.trim_start_matches("driftless_follower_");
            assert!(docs.contains(&format!("`{name}`")), "{name} in docs/wire/follower.md");
        }
        let who = [("follower", "host \"0\""), ("run", "r"), ("run_id", ""), ("model", "policy")];
        assert_eq!(value(&page, "info", &who), Some(1.0));
    }

    #[test]
    fn page_unknown_values_are_absent_and_lag_ends() {
        let now = Instant::now();
        let mut counters = Counters::default();
        let empty = page(&status(None, None, &[]), &counters, &Counts::default(), now);
        for name in ["version", "newest_version", "last_error_age_seconds", "last_prepare_seconds"] {
            assert_eq!(value(&empty, name, &[]), None, "{name}");
        }
        assert_eq!(value(&empty, "lag_versions", &[]), Some(0.0));
        let nothing = status(Some(2), None, &[]);
        counters.compared(&nothing, now);
        let text = page(&nothing, &counters, &Counts::default(), now + Duration::from_secs(3));
        assert_eq!(
            (value(&text, "lag_versions", &[]), value(&text, "lag_seconds", &[])),
            (Some(3.0), Some(3.0))
        );
        let there = status(Some(2), Some(2), &[]);
        counters.compared(&there, now + Duration::from_secs(3));
        let text = page(&there, &counters, &Counts::default(), now + Duration::from_secs(9));
        assert_eq!(value(&text, "lag_seconds", &[]), Some(0.0));
    }
}
