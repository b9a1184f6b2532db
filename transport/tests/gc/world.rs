//! A random history of publishing, following and collecting over manifests about nothing, and what must hold
//! after it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use driftless_store::wrap::Fault;
use driftless_store::{ContentDigest, Entry, Error as StoreError, Key, Memory, PutMode, Result, Store};
use driftless_transport::gc::{Collection, GcOptions, collect};
use driftless_transport::manifest::{
    Algorithms, Base, FORMAT, Features, Kind, Manifest, Object, Piece, Representation, Tensor,
};
use driftless_transport::{Dtype, Error, Run, Version};

use driftless_testkit::publications::{MODEL, RUN};
use driftless_testkit::random::Random;

pub(crate) const TTL: Duration = Duration::from_secs(100);

/// A store in memory whose clock the test sets, and which can be told to do something before a get.
#[derive(Debug, Default)]
pub(crate) struct Clocked {
    inner: Memory,
    dates: Mutex<BTreeMap<Key, u64>>,
    pub(crate) now: Mutex<u64>,
    pub(crate) undated: Mutex<bool>,
}

impl Clocked {
    fn date(&self, entry: Entry) -> Entry {
        let then = self.dates.lock().unwrap().get(&entry.key).copied().unwrap_or_default();
        let undated = *self.undated.lock().unwrap();
        let modified = (!undated).then(|| SystemTime::UNIX_EPOCH + Duration::from_secs(then));
        Entry::new(entry.key, entry.size, modified)
    }

    pub(crate) fn pass(&self, seconds: u64) {
        *self.now.lock().unwrap() += seconds;
    }
}

impl fmt::Display for Clocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Store for Clocked {
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        self.inner.put(key, bytes, mode)?;
        let now = *self.now.lock().unwrap();
        self.dates.lock().unwrap().insert(key.clone(), now);
        Ok(())
    }
    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>> {
        self.inner.get(key, range)
    }
    fn head(&self, key: &Key) -> Result<Entry> {
        self.inner.head(key).map(|entry| self.date(entry))
    }
    fn list(&self, prefix: &Key) -> Result<Vec<Entry>> {
        Ok(self.inner.list(prefix)?.into_iter().map(|entry| self.date(entry)).collect())
    }
    fn delete(&self, key: &Key) -> Result<()> {
        self.inner.delete(key)
    }
}
/// A chain of manifests about nothing: one tensor of four bytes, objects of random content.
pub(crate) struct World {
    pub(crate) clock: Arc<Clocked>,
    pub(crate) fault: Arc<Fault>,
    pub(crate) run: Run,
    chain: Vec<Base>,
    pub(crate) anchors: BTreeSet<u64>,
    /// Objects that attempts which lost had left beside committed versions, and those above the newest.
    pub(crate) leftovers: BTreeSet<Key>,
    /// Each follower: its version, and when its lease was written.
    pub(crate) followers: BTreeMap<String, (u64, u64)>,
    random: Random,
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let clock = Arc::new(Clocked::default());
        let fault = Arc::new(Fault::new(clock.clone()));
        let run = Run::create(fault.clone(), RUN).unwrap();
        let (chain, followers) = Default::default();
        let (anchors, leftovers) = Default::default();
        Self { clock, fault, run, chain, anchors, leftovers, followers, random: Random(seed) }
    }

    pub(crate) fn newest(&self) -> Option<u64> {
        (self.chain.len() as u64).checked_sub(1)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.random.next() % bound
    }

    fn place(&self, version: u64) -> Key {
        let manifest = self.run.manifest_key(MODEL, Version(version)).unwrap();
        Key::new(manifest.as_str().trim_end_matches("/manifest")).unwrap()
    }

    pub(crate) fn put_object(&mut self, version: u64) -> Object {
        let bytes: Vec<u8> = (0..8).map(|_| self.random.next() as u8).collect();
        let key = self.place(version).join(&format!("{:016x}-00000", self.random.next())).unwrap();
        self.clock.put(&key, &bytes, PutMode::Create).unwrap();
        Object { key, size: 8, blake3: ContentDigest::of(&bytes) }
    }

    fn manifest(&mut self, anchor: bool) -> Manifest {
        let version = self.chain.len() as u64;
        let full = version == 0 || (anchor && self.below(2) == 0);
        let count = if full || !anchor { 1 } else { 2 };
        let objects: Vec<Object> = (0..count).map(|_| self.put_object(version)).collect();
        let piece = |object| vec![Piece { start: 0, elements: 4, object, offset: 0, length: 8 }];
        let tensor = Tensor {
            name: "w".into(),
            dtype: Dtype::U8,
            shape: vec![4],
            digest: Default::default(),
            aliases: vec![],
            pieces: piece(0),
            anchor: if anchor && !full { piece(1) } else { vec![] },
        };
        Manifest {
            format: FORMAT,
            run_id: self.run.id(),
            model: MODEL.into(),
            version: Version(version),
            kind: if full { Kind::Full } else { Kind::Delta },
            representation: Representation { scheme: "u8".into(), config_digest: None },
            base: self.chain.last().copied(),
            trainer_step: version,
            checkpoint: None,
            created: 0,
            changed: 0,
            algorithms: Algorithms::default(),
            features: Features::default(),
            objects,
            tensors: vec![tensor],
            files: vec![],
        }
    }

    pub(crate) fn publish(&mut self) {
        let anchor = self.anchors.is_empty() || self.below(4) == 0;
        let manifest = self.manifest(anchor);
        let bytes = manifest.to_bytes().unwrap();
        let version = manifest.version;
        let key = self.run.manifest_key(MODEL, version).unwrap();
        self.clock.put(&key, &bytes, PutMode::Create).unwrap();
        self.chain.push(Base { version, manifest_digest: ContentDigest::of(&bytes) });
        if manifest.is_anchor() {
            self.anchors.insert(version.0);
        }
        if self.below(3) > 0 {
            let head = Key::new(format!("{}/{MODEL}/head", self.run.id())).unwrap();
            let hint = serde_json::to_vec(self.chain.last().unwrap()).unwrap();
            self.clock.put(&head, &hint, PutMode::Overwrite).unwrap();
        }
    }

    /// Versions that an earlier release collected, before the first one that is published.
    pub(crate) fn bury(&mut self, versions: u64) {
        let (run_id, digest) = (self.run.id(), ContentDigest::of(b"gone"));
        for version in (0..versions).map(Version) {
            let tombstone = format!(
                r#"{{"format":1,"run_id":"{run_id}","model":"{MODEL}","version":{version},"features":{{"required":["collected"],"optional":[]}},"collected":{{"manifest_digest":"{digest}","anchor":{versions}}}}}"#
            );
            let key = self.run.manifest_key(MODEL, version).unwrap();
            self.clock.put(&key, tombstone.as_bytes(), PutMode::Create).unwrap();
            self.chain.push(Base { version, manifest_digest: digest });
        }
    }

    /// A publisher that died, or is still at it: at a number that is taken, or the next one.
    pub(crate) fn attempt(&mut self) {
        let version = self.below(self.chain.len() as u64 + 1);
        let object = self.put_object(version);
        self.leftovers.insert(object.key);
    }

    pub(crate) fn lease(&mut self, id: &str, version: u64, needs: u64) {
        let key = self.run.follower_key(id).unwrap();
        let text = format!("{{\"model\":\"{MODEL}\",\"needs\":{needs},\"version\":{version}}}");
        self.clock.put(&key, text.as_bytes(), PutMode::Overwrite).unwrap();
        let now = *self.clock.now.lock().unwrap();
        self.followers.insert(id.to_owned(), (version, now));
    }

    fn is_live(&self, written: u64) -> bool {
        *self.clock.now.lock().unwrap() - written <= TTL.as_secs()
    }

    /// Reads a chain as a replica does, with a collection somewhere in between if `disturb` says so, and
    /// returns how often that took another chain.
    pub(crate) fn read(&mut self, from: Option<u64>, disturb: Option<u64>) -> u64 {
        let newest = self.chain.last().unwrap().version;
        let mut again = 0;
        loop {
            let from = from.map(|version| self.chain[version as usize]);
            let chain = match self.run.chain(MODEL, from, newest) {
                // Out of reach now, with what stood in front of it: a reader goes for what is the newest by
                // now.
                Err(Error::Collected { .. }) if again > 0 => return again,
                chain => chain.unwrap(),
            };
            if let Some(link) = chain.versions.first().filter(|_| !chain.restart) {
                assert_eq!(link.manifest.base, from);
            }
            assert!(chain.versions.last().is_none_or(|link| link.manifest.version == newest));
            let mut outcome = Ok(());
            'links: for (number, link) in chain.versions.iter().enumerate() {
                if disturb == Some(number as u64) && again == 0 {
                    // What is published meanwhile makes more of the chain collectable.
                    (0..3).for_each(|_| self.publish());
                    self.gc(1).unwrap();
                }
                for object in &link.manifest.objects {
                    match self.run.object(object) {
                        Ok(_) => {}
                        Err(Error::Store(StoreError::NotFound { .. })) => {
                            outcome = self.run.get(MODEL, link.manifest.version).map(drop);
                            assert!(matches!(outcome, Err(Error::Collected { .. })), "{outcome:?}");
                            break 'links;
                        }
                        Err(error) => panic!("{error:?}"),
                    }
                }
            }
            match outcome {
                Ok(()) => return again,
                Err(Error::Collected { anchor, .. }) => {
                    assert!(self.anchors.contains(&anchor.0));
                    again += 1;
                    assert!(again < 3);
                }
                Err(error) => panic!("{error:?}"),
            }
        }
    }

    pub(crate) fn gc(&self, keep: u64) -> driftless_transport::Result<Collection> {
        let mut options = GcOptions::new(MODEL);
        (options.keep, options.lease_ttl) = (keep, TTL);
        collect(&self.run, &options)
    }

    pub(crate) fn floor(&self, keep: u64) -> u64 {
        let newest = self.newest().unwrap();
        let live = self.followers.values().filter(|follower| self.is_live(follower.1));
        let needs = live.map(|(version, _)| *version).min().unwrap_or(newest);
        let anchor = *self.anchors.last().unwrap();
        needs.min(anchor).min((newest + 1).saturating_sub(keep))
    }

    /// Everything that must hold after any number of collections, whole or not; the followers in `live` had
    /// leases.
    pub(crate) fn check(&mut self, live: &[u64]) {
        let newest = self.newest().unwrap();
        assert_eq!(self.run.newest_version(MODEL).unwrap(), Some(Version(newest)));
        assert_eq!(self.read(None, None), 0, "a late joiner finds a whole chain");
        for &version in live {
            for link in version + 1..=newest {
                let manifest = self.run.get(MODEL, Version(link)).unwrap().manifest;
                manifest.objects.iter().for_each(|object| drop(self.run.object(object).unwrap()));
            }
        }
        for version in 0..=newest {
            let key = self.run.manifest_key(MODEL, Version(version)).unwrap();
            match self.clock.put(&key, b"{}", PutMode::Create) {
                Err(StoreError::AlreadyExists { .. }) => {}
                // Whoever takes the number of a collected version has nothing of it.
                taken => {
                    taken.unwrap();
                    assert!(
                        Version(version) < self.run.oldest(MODEL).unwrap(),
                        "number {version} is free again"
                    );
                    let got = self.run.get(MODEL, Version(version));
                    assert!(matches!(got, Err(Error::Collected { .. })), "{got:?}");
                    assert_eq!(self.run.newest_version(MODEL).unwrap(), Some(Version(newest)));
                    self.clock.delete(&key).unwrap();
                }
            }
        }
    }

    /// The versions of the followers whose leases count. One that ran out and was taken again after a
    /// collection brings nothing back.
    pub(crate) fn live(&self) -> Vec<u64> {
        let intact = |version: u64| {
            (version + 1..self.chain.len() as u64).all(|link| self.run.get(MODEL, Version(link)).is_ok())
        };
        let live = self.followers.values().filter(|follower| self.is_live(follower.1));
        live.map(|(version, _)| *version).filter(|version| intact(*version)).collect()
    }

    /// After a whole collection nothing is left but what must be.
    pub(crate) fn check_exact(&self, floor: u64) {
        let newest = self.newest().unwrap();
        let mut expected: BTreeSet<Key> = BTreeSet::new();
        for version in 0..=newest {
            match self.run.get(MODEL, Version(version)) {
                Ok(committed) => {
                    expected.insert(self.run.manifest_key(MODEL, Version(version)).unwrap());
                    expected.extend(committed.manifest.objects.into_iter().map(|o| o.key));
                }
                Err(Error::Collected { .. }) => {}
                Err(error) => panic!("{error:?}"),
            }
            assert!(version >= floor || self.run.get(MODEL, Version(version)).is_err());
        }
        let above = self.place(newest + 1);
        expected.extend(self.leftovers.iter().filter(|key| key.under(&above).is_some()).cloned());
        let root = Key::new(format!("{}/{MODEL}", self.run.id())).unwrap();
        let listed = self.clock.list(&root).unwrap();
        let mut found: BTreeSet<Key> =
            listed.into_iter().map(|entry| entry.key).filter(|key| key.name() != "head").collect();
        let floors = found.len();
        found.retain(|key| !key.as_str().contains("/floor/"));
        assert!(floors - found.len() <= 2, "a new floor, and the one before");
        assert_eq!(found, expected);
    }
}
