//! Engines that serve one checkpoint, a version to activate on them, and what every test looks at afterwards.

use std::fs;
use std::ops::Deref;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use driftless_bridge::Error;
use driftless_store::ContentDigest;
use driftless_testkit::sglang::Fake;
use driftless_testkit::vllm::{Vllm, digest};
use driftless_transport::Checkpoint;
use driftless_transport::activate::{Activate, Activated, Limit, Target};
use driftless_transport::manifest::Manifest;
use driftless_transport::prepared::offer_path;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Engines, and what activates a version on them.
pub(crate) struct Scene<E, A> {
    pub(crate) engine: E,
    pub(crate) activator: A,
    /// The version.
    pub(crate) next: Checkpoint,
    pub(crate) manifest: Manifest,
    pub(crate) label: String,
    pub(crate) dir: TempDir,
}

/// What a test looks at in an engine.
pub(crate) struct Look {
    paused: bool,
    label: String,
    /// Whether its weights are those of the checkpoint that was asked for.
    holds: bool,
    lies: Vec<String>,
}

/// One or more engines.
pub(crate) trait Engines {
    fn looks(&self, version: &Checkpoint) -> Vec<Look>;
}

impl Engines for Fake {
    fn looks(&self, version: &Checkpoint) -> Vec<Look> {
        let engine = self.engine();
        // What was pushed is compared by the activator, with checksums.
        let holds = engine.weights.as_deref() == Some(version.dir()) || engine.pushes.wire.is_some();
        vec![Look { paused: engine.is_paused(), label: engine.label(), holds, lies: engine.lies.clone() }]
    }
}

impl Engines for Vllm {
    fn looks(&self, version: &Checkpoint) -> Vec<Look> {
        let server = self.server();
        let holds = server.weights == Some(digest(version.dir()));
        vec![Look { paused: server.paused, label: server.label.clone(), holds, lies: server.lies.clone() }]
    }
}

impl<E: Engines, A: Activate> Scene<E, A> {
    pub(crate) fn of(engine: E, activator: A, version: (Checkpoint, Manifest), dir: TempDir) -> Self {
        let (next, manifest) = version;
        Self { label: manifest.label(), engine, activator, next, manifest, dir }
    }

    pub(crate) fn activate(&mut self) -> Result<(), Error> {
        let pause = self.activate_within(&Limit::within(Duration::from_secs(60)))?;
        assert!(pause.as_nanos() > 0);
        Ok(())
    }

    /// How long the engines were paused for it.
    pub(crate) fn activate_within(&mut self, limit: &Limit) -> Result<Duration, Error> {
        self.done_within(limit).map(|done| done.pause)
    }

    /// What was done for it.
    pub(crate) fn done(&mut self) -> Result<Activated, Error> {
        self.done_within(&Limit::within(Duration::from_secs(60)))
    }

    fn done_within(&mut self, limit: &Limit) -> Result<Activated, Error> {
        let (checkpoint, manifest) = (&self.next, &self.manifest);
        let target = Target { checkpoint, weights: checkpoint, label: &self.label, manifest, limit };
        let done = self.activator.activate(&target);
        done.map_err(|error| *error.downcast::<Error>().unwrap())
    }

    /// How the engine's weights differ from the version's in a sample.
    pub(crate) fn sample(&mut self, turn: u64) -> Option<String> {
        let (checkpoint, manifest, limit) =
            (&self.next, &self.manifest, &Limit::within(Duration::from_secs(60)));
        let target = Target { checkpoint, weights: checkpoint, label: &self.label, manifest, limit };
        self.activator.sample(&target, turn).unwrap()
    }

    pub(crate) fn fails(&mut self) -> Error {
        self.activate().unwrap_err()
    }

    /// Every engine is paused and fenced, and the activator knows.
    pub(crate) fn is_fenced(&mut self) {
        assert_eq!(self.activator.serving().unwrap(), None);
        assert!(self.activator.is_paused(), "it says so");
        for look in self.engine.looks(&self.next) {
            assert!(look.paused && look.label.ends_with("?partial"), "{}", look.label);
            assert_eq!(look.lies, Vec::<String>::new());
        }
    }

    /// Every engine generates with the version's weights, under its label.
    pub(crate) fn serves(&mut self) {
        assert_eq!(self.activator.serving().unwrap(), Some(self.label.clone()));
        for look in self.engine.looks(&self.next) {
            assert_eq!((look.paused, look.holds, look.lies), (false, true, vec![]));
        }
    }
}

/// An engine whose plugin speaks in a directory that followers read.
pub(crate) struct WithPlugin<E> {
    pub(crate) engine: E,
    pub(crate) plugins: PathBuf,
    pub(crate) port: u16,
}

impl<E> Deref for WithPlugin<E> {
    type Target = E;

    fn deref(&self) -> &E {
        &self.engine
    }
}

impl<E: Engines> Engines for WithPlugin<E> {
    fn looks(&self, version: &Checkpoint) -> Vec<Look> {
        self.engine.looks(version)
    }
}

impl<E: Engines, A: Activate> Scene<WithPlugin<E>, A> {
    /// Where the follower of the version offers deltas.
    pub(crate) fn offer(&self) -> PathBuf {
        offer_path(&self.engine.plugins, self.next.dir()).unwrap()
    }

    /// A delta to a label lies there: one without a change.
    pub(crate) fn offers(&self, target: &str) {
        let version = |label: &str| json!({"label": label, "manifest": ContentDigest::of(label.as_bytes())});
        let header = json!({"base": version("a:0"), "target": version(target), "checksum": 0, "tensors": []})
            .to_string();
        let [start, length] = [64, header.len() as u64].map(u64::to_le_bytes);
        let digest = ContentDigest::of(header.as_bytes());
        let head = [b"dftlpre2", &start[..], &length, digest.as_bytes(), &[0; 8], header.as_bytes()].concat();
        fs::write(self.offer(), head).unwrap();
    }

    /// The file of a rank.
    pub(crate) fn rank(&self, number: u32) -> PathBuf {
        self.engine.plugins.join(format!("rank-{}-{number}.json", self.engine.port))
    }

    /// The one rank has prepared the delta to a label, or says why not.
    pub(crate) fn says(&self, target: &str, why_not: Value) {
        fs::write(self.rank(0), self.told(1, target, why_not).to_string()).unwrap();
    }

    /// What each of `ranks` ranks says of the delta.
    pub(crate) fn told(&self, ranks: u32, target: &str, why_not: Value) -> Value {
        told(&self.offer(), ranks, target, why_not)
    }
}

/// The content of the file of a rank in this process, about the delta that is offered in a file.
pub(crate) fn told(offer: &Path, ranks: u32, target: &str, why_not: Value) -> Value {
    let name = offer.file_name().unwrap().to_str().unwrap();
    json!({"format": 2, "pid": std::process::id(), "start": started(), "ranks": ranks, "why_not": null,
        "deltas": {name: {"target": target, "why_not": why_not}}})
}

/// When this process began, as the files of plugins say it.
pub(crate) fn started() -> u64 {
    let text = fs::read_to_string(Path::new("/proc/self/stat")).unwrap();
    text[text.rfind(')').unwrap()..].split(' ').nth(20).unwrap().parse().unwrap()
}

/// A directory for plugins, as they take it: nobody else's.
pub(crate) fn plugins_in(root: &Path) -> PathBuf {
    let plugins = root.join("plugins");
    fs::create_dir(&plugins).unwrap();
    fs::set_permissions(&plugins, fs::Permissions::from_mode(0o700)).unwrap();
    plugins
}
