//! What the store of a run holds. It is asked on a thread of its own, so that one that does not answer holds up nothing.

use super::read::json;
use crate::cli::shared::error::Result;
use crate::cli::shared::output::without_secrets;
use crate::cli::shared::run::{Link, leases_json};
use crate::cli::shared::store;
use driftless::store::redact;
use driftless::transport::gc::{
    Ack, Collection, EngineStatus, GcOptions, Lease, Removed, collect_at, leases_at,
};
use driftless::transport::{Run, RunId, Version};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// After this time without an answer the view says so.
const DEADLINE: Duration = Duration::from_secs(10);
/// Time between two looks, at least; and so many times as long as a look took.
const PAUSE: Duration = Duration::from_secs(15);
const PAUSE_OF_LOOKS: u32 = 10;
/// Versions that are shown, places that would be cleared, followers.
const VERSIONS_MAX: usize = 64;
const REMOVED_MAX: usize = 200;
const LEASES_MAX: usize = 200;
/// Engines of a host.
const ENGINES_MAX: usize = 64;

/// Where a run publishes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Place {
    url: String,
    run: String,
    /// What `gc` keeps in any case.
    keep: u64,
}

impl Place {
    /// As the run was told: by the comment of its settings' file, and its flags. `given` is another store.
    pub(super) fn of(told: &str, flags: &toml::Table, given: Option<&str>) -> Option<Place> {
        let text = |flag: &str| match flags.get(flag)? {
            toml::Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        };
        let named = || Some(absolute(&text("store").or_else(|| text("update-weight-disk-dir"))?, told));
        let url = given.map(str::to_owned).or_else(named).filter(|url| url != "memory:")?;
        let keep = flags.get("keep").and_then(toml::Value::as_integer);
        let keep = keep.and_then(|keep| u64::try_from(keep).ok()).unwrap_or(1).max(1);
        Some(Place { url, run: text("run").unwrap_or_else(|| "default".to_owned()), keep })
    }
}

/// The store of a run that was told so in another directory.
fn absolute(url: &str, told: &str) -> String {
    let dir = told.split_once(", in ").and_then(|(_, rest)| Some(rest.rsplit_once("; ")?.0));
    match dir {
        Some(dir) if !url.contains(":/") && url != "memory:" => {
            Path::new(dir).join(url).display().to_string()
        }
        _ => url.to_owned(),
    }
}

/// The store of a run, as it was looked at last.
#[derive(Default)]
pub(super) struct Shelf {
    look: Arc<Mutex<Look>>,
}

#[derive(Default)]
struct Look {
    place: Option<Place>,
    /// Since when the store is asked.
    asked: Option<Instant>,
    /// When it answered last, and how long that took.
    answered: Option<(Instant, Duration)>,
    found: Option<Found>,
    unreachable: Option<String>,
}

/// What the page gets.
#[derive(Default, Serialize)]
struct Told {
    store: Option<String>,
    run: Option<String>,
    /// Why nothing newer is known.
    unreachable: Option<String>,
    found: Option<Found>,
}

/// What a store holds of a run.
#[derive(Clone, Serialize)]
struct Found {
    at_ms: u64,
    run_id: RunId,
    model: Option<String>,
    /// All there are.
    versions: usize,
    /// The newest of them, first.
    newest: Vec<Held>,
    leases: Vec<Value>,
    /// Followers that have said what they have.
    hosts: Vec<Host>,
    gc: Option<Gc>,
    /// Why it cannot be said what `gc` would do.
    gc_fails: Option<String>,
}

#[derive(Clone, Serialize)]
struct Held {
    #[serde(flatten)]
    link: Link,
    created_ms: u64,
}

/// A host, as its follower last wrote it beside its lease.
#[derive(Clone, Serialize)]
struct Host {
    host: String,
    /// How long ago that was, and whether the lease still counts.
    age_seconds: Option<f64>,
    live: bool,
    version: u64,
    /// The label that engines have of it.
    label: String,
    prepare_ms: f64,
    /// With how each came by its weights, and why.
    engines: Vec<EngineStatus>,
}

impl Host {
    fn of(lease: &Lease) -> Option<Host> {
        let Ok(Some(Ack { version, label, prepare_ms, engines, .. })) = lease.ack.clone() else {
            return None;
        };
        Some(Host {
            host: lease.follower.clone(),
            age_seconds: lease.age.map(|age| age.as_secs_f64()),
            live: lease.live,
            version: version.0,
            label,
            prepare_ms,
            engines: engines.into_iter().take(ENGINES_MAX).collect(),
        })
    }
}

/// What `gc` would do.
#[derive(Clone, Serialize)]
struct Gc {
    floor: u64,
    /// What keeps which versions, from the oldest on.
    kept: Vec<Kept>,
    /// Places that would be cleared, the oldest first, at most so many as are shown.
    removed: Vec<Removed>,
    places: usize,
    objects: u64,
    bytes: u64,
}

/// All versions from one on are kept, for a reason.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Kept {
    from: u64,
    why: String,
}

impl Shelf {
    /// What is known of the store at `place`, as JSON. It is looked at again if that was long ago; nothing is waited for.
    pub(super) fn answer(&self, place: Option<Place>) -> Result<String> {
        let Some(place) = place else { return json(&Told::default()) };
        let mut look = lock(&self.look);
        if look.asked.is_none() && look.place.as_ref() != Some(&place) {
            *look = Look { place: Some(place.clone()), ..Look::default() };
        }
        if look.is_due() {
            look.asked = Some(Instant::now());
            let shared = self.look.clone();
            let asked =
                std::thread::Builder::new().name("store".to_owned()).spawn(move || ask(&place, &shared));
            if let Err(error) = asked {
                (look.asked, look.unreachable) = (None, Some(error.to_string()));
            }
        }
        json(&look.told())
    }
}

fn lock(look: &Mutex<Look>) -> MutexGuard<'_, Look> {
    look.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ask(place: &Place, shared: &Mutex<Look>) {
    let began = Instant::now();
    let before = lock(shared).found.clone();
    let found = look_into(place, before.as_ref());
    let mut look = lock(shared);
    (look.asked, look.answered) = (None, Some((Instant::now(), began.elapsed())));
    look.unreachable = match found {
        Ok(found) => {
            look.found = Some(found);
            None
        }
        Err(error) => Some(without_secrets(&super::told(&error))),
    };
}

impl Look {
    fn is_due(&self) -> bool {
        let is_long_ago = |(at, took): (Instant, Duration)| at.elapsed() >= PAUSE.max(took * PAUSE_OF_LOOKS);
        self.asked.is_none() && self.answered.is_none_or(is_long_ago)
    }

    fn told(&self) -> Told {
        let store = self.place.as_ref().map(|place| redact(&place.url));
        let waits = self.asked.map(|asked| asked.elapsed()).filter(|waits| *waits > DEADLINE);
        let late = waits.map(|waits| {
            let store = store.as_deref().unwrap_or_default();
            format!("{store} has not answered for {} s", waits.as_secs())
        });
        let unreachable = late.or_else(|| self.unreachable.clone());
        let run = self.place.as_ref().map(|place| place.run.clone());
        Told { store, run, unreachable, found: self.found.clone() }
    }
}

/// Reads it. What was found before is not read again: versions do not change.
fn look_into(place: &Place, before: Option<&Found>) -> Result<Found> {
    let now = SystemTime::now();
    let run = Run::open(store::open(&place.url)?, &place.run)?;
    let models = run.models()?;
    let model = models.iter().find(|model| *model == "policy").or(models.first()).cloned();
    let at_ms = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
    let mut found = Found {
        at_ms: u64::try_from(at_ms).unwrap_or(u64::MAX),
        run_id: run.id(),
        model,
        versions: 0,
        newest: Vec::new(),
        leases: Vec::new(),
        hosts: Vec::new(),
        gc: None,
        gc_fails: None,
    };
    let Some(model) = &found.model else { return Ok(found) };
    let versions = run.versions(model)?;
    found.versions = versions.len();
    let before = before.filter(|before| before.run_id == run.id()).map_or(&[][..], |before| &before.newest);
    let known: BTreeMap<u64, &Held> = before.iter().map(|held| (held.link.version, held)).collect();
    for version in versions.into_iter().rev().take(VERSIONS_MAX) {
        found.newest.push(match known.get(&version.0) {
            Some(held) => (*held).clone(),
            None => held(&run, model, version)?,
        });
    }
    let options = GcOptions::new(model).with_keep(place.keep).with_dry_run(true);
    let leases = match collect_at(&run, &options, Some(now)) {
        Ok(collection) => {
            found.gc = Some(Gc::of(&collection, place.keep));
            collection.leases
        }
        Err(error) => {
            found.gc_fails = Some(without_secrets(&super::told(&error.into())));
            leases_at(&run, &options, Some(now))?
        }
    };
    let leases = &leases[..leases.len().min(LEASES_MAX)];
    (found.leases, found.hosts) = (leases_json(leases), leases.iter().filter_map(Host::of).collect());
    Ok(found)
}

fn held(run: &Run, model: &str, version: Version) -> Result<Held> {
    use driftless::transport::Error;
    match run.get(model, version) {
        Err(Error::Collected { .. }) => Ok(Held { link: Link::collected(version), created_ms: 0 }),
        committed => {
            let committed = committed?;
            let created_ms = committed.manifest.created.saturating_mul(1000);
            Ok(Held { link: Link::of(&committed)?, created_ms })
        }
    }
}

impl Gc {
    fn of(collection: &Collection, keep: u64) -> Gc {
        let removed = &collection.removed;
        Gc {
            floor: collection.floor.0,
            kept: kept(collection.newest, collection.anchor, keep, &collection.leases),
            removed: removed.iter().take(REMOVED_MAX).cloned().collect(),
            places: removed.len(),
            objects: removed.iter().map(|removed| removed.objects).sum(),
            bytes: removed.iter().map(|removed| removed.bytes).sum(),
        }
    }
}

/// What keeps which versions, what keeps most first.
fn kept(newest: Option<Version>, anchor: Option<Version>, keep: u64, leases: &[Lease]) -> Vec<Kept> {
    let Some(newest) = newest else { return Vec::new() };
    let first = Kept { from: (newest.0 + 1).saturating_sub(keep), why: format!("the newest {keep}") };
    let anchor = match anchor {
        Some(anchor) => Kept {
            from: anchor.0,
            why: "the newest anchor: a follower that joins late begins there".to_owned(),
        },
        None => Kept {
            from: 0,
            why: "there is no anchor: a follower that joins late needs every version".to_owned(),
        },
    };
    let live = leases.iter().filter(|lease| lease.live).take(LEASES_MAX);
    let needed = live.map(|lease| Kept { from: lease.needs.0, why: format!("{} needs it", lease.follower) });
    let mut kept: Vec<Kept> = [anchor, first].into_iter().chain(needed).collect();
    kept.sort_by_key(|kept| kept.from);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_of_a_run_is_as_it_was_told() {
        let told = "What `driftless train` was told, in /home/me, in a; b; driftless 0.1.0.";
        let place = |flags: &str, given: Option<&str>| {
            let flags: toml::Table = flags.parse().expect("flags");
            Place::of(told, &flags, given).map(|place| (place.url, place.run, place.keep))
        };
        let of = |url: &str, run: &str, keep| Some((url.to_owned(), run.to_owned(), keep));
        assert_eq!(place("store = 's3://b/p'\nrun = 7\nkeep = 3", None), of("s3://b/p", "7", 3));
        assert_eq!(place("store = 'store'", None), of("/home/me, in a; b/store", "default", 1));
        assert_eq!(place("update-weight-disk-dir = '/d'\nkeep = -1", None), of("/d", "default", 1));
        assert_eq!(place("store = 's3://b/p'\nrun = 'r'", Some("other")), of("other", "r", 1));
        assert_eq!(place("store = 'memory:'", None), None);
        assert_eq!(place("lr = 1", None), None);
    }

    #[test]
    fn store_that_is_late_is_named_beside_what_was_found() {
        let place = Place { url: "s3://u:hidden@b/p".to_owned(), run: "r".to_owned(), keep: 1 };
        let late = Instant::now().checked_sub(DEADLINE * 2);
        let look = Look { place: Some(place.clone()), asked: late, ..Look::default() };
        let told = look.told().unreachable.unwrap_or_default();
        assert!(told.contains("b/p has not answered for 20 s") && !told.contains("hidden"), "{told}");
        assert!(!look.is_due(), "one that does not answer is not asked twice");
        let soon = Look { place: Some(place), asked: Some(Instant::now()), ..Look::default() };
        assert_eq!(soon.told().unreachable, None);
    }

    #[test]
    fn what_keeps_versions_is_told_from_the_oldest_on() {
        let froms = |anchor: Option<u64>, keep| {
            let kept = kept(Some(Version(20)), anchor.map(Version), keep, &[]);
            kept.into_iter().map(|kept| kept.from).collect::<Vec<_>>()
        };
        assert_eq!(froms(Some(15), 1), [15, 20]);
        assert_eq!(froms(Some(15), 10), [11, 15]);
        assert_eq!(froms(None, 99), [0, 0]);
        assert_eq!(kept(None, None, 1, &[]), []);
    }
}
