//! The engine's side of a patch: where a model keeps its weights, and how prepared deltas get into them.
//!
//! It runs within an engine's process, whose plugin knows the model. Everything is done without the engine's
//! interpreter: a thread of its own finds deltas and readies them, and the engine's thread writes one.
//!
//! | File | Does |
//! |---|---|
//! | `layout` | says where the elements of a checkpoint's tensors lie |
//! | `tied` | admits output heads that the model takes from its word embeddings |
//! | `part` | brings a delta into the form that threads and kernels carry out |
//! | `memory`, `host`, `device/` | compare and write weights in the memory of the host or of a CUDA device |
//! | `rank` | tells followers what a rank can do, and which deltas it has readied |
//! | `compare` | compares weights with a checkpoint |
//! | `reply` | is what a plugin answers to a call for a patch or a comparison |

mod compare;
#[cfg(feature = "cuda")]
mod device;
mod host;
mod layout;
mod memory;
mod part;
pub(crate) mod rank;
mod reply;
#[cfg(test)]
mod tests;
mod tied;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use driftless_store::{ContentDigest, chain_text};
use driftless_transport::Dtype;
use driftless_transport::prepared::{self, PreparedDelta};

pub use layout::{Layout, LiveCopy, LiveTable, LiveTensor, Strides};
pub use rank::{PLUGIN_DIR, Rank, announce_server, plugin_dir};
pub use reply::{Cache, Compared, Names, PatchDone, PatchRefused, PluginReply};

use self::compare::Wanted;
use self::host::Host;
use self::memory::{Found, Memory};
use self::rank::{RankFile, Told};
use crate::error::{Error, Result};

/// Between two looks for deltas.
const LOOK: Duration = Duration::from_millis(5);
/// How files begin that have prepared deltas.
const DELTA: &str = "delta-";

/// The weights of one rank of an engine: which version they are, and what is prepared for them.
///
/// As long as the value lives, a thread readies what followers offer, and tells them.
pub struct LiveModel {
    shared: Arc<Shared>,
}

struct Shared {
    dir: PathBuf,
    rank: Rank,
    /// Held while a delta is readied or written, so that nothing is readied while the engine loads.
    state: Mutex<State>,
    /// What followers are told.
    told: Mutex<RankFile>,
}

struct State {
    layout: Layout,
    memory: Box<dyn Memory>,
    /// The version that is live: its label, and its manifest's digest where it came by a delta.
    label: Option<String>,
    manifest: Option<ContentDigest>,
    ready: Option<Ready>,
}

struct Ready {
    delta: PreparedDelta,
    changes: u64,
    took: Duration,
}

/// What a rank would do with a patch. The least of all ranks' votes is what each of them does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Vote {
    /// It can neither write the delta nor have the engine load, or it could not write it.
    Refuses,
    /// It has nothing prepared: the engine may load.
    Loads,
    /// It is ready to write the delta, or has written it.
    Patches,
}

/// What a patch did at a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LivePatch {
    /// Label of the version whose weights the rank has now.
    pub label: String,
    /// Elements that it changed, counted once for each copy of a tensor that this rank may hold.
    pub changes: u64,
    /// How long they took to write.
    pub wrote: Duration,
    /// How long the delta took to ready, while the engine generated.
    pub prepared: Duration,
}

impl LivePatch {
    /// The answer to the call for the patch, for which the engine's thread stood still for so long.
    pub fn reply(&self, stood_still: Duration, cache: Option<Cache>) -> PluginReply {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let times = [self.prepared, self.wrote, stood_still];
        let [prepared_us, wrote_us, stood_still_us] = times.map(micros);
        let (label, elements) = (self.label.clone(), self.changes);
        PluginReply::Done(PatchDone { label, elements, prepared_us, wrote_us, stood_still_us, cache })
    }
}

/// Whether weights of this dtype are patched: a float that engines keep, or make others of.
pub fn is_patched(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F32 | Dtype::F8E4M3 | Dtype::F8E5M2)
}

impl LiveModel {
    /// A model in host memory. Nothing is known of its version.
    ///
    /// # Errors
    /// [`Error::Live`] and [`Error::Write`] for a directory of plugins that is not this user's alone;
    /// [`Error::SetUp`] when the thread cannot be made.
    pub fn in_host_memory(dir: &Path, rank: Rank, layout: Layout) -> Result<Self> {
        Self::new(dir, rank, layout, Box::new(Host::default()))
    }

    /// A model in the memory of the CUDA device of this number, of those that this process sees. Takes
    /// `arena` bytes of it for deltas, where there are so many; larger ones are read from the host.
    ///
    /// Nothing is asked of the device before a version is live: the engine may be capturing graphs.
    ///
    /// # Errors
    /// As [`LiveModel::in_host_memory`]; [`Error::Live`] when the device cannot be used.
    #[cfg(feature = "cuda")]
    pub fn on_cuda_device(
        dir: &Path,
        rank: Rank,
        layout: Layout,
        ordinal: usize,
        arena: u64,
    ) -> Result<Self> {
        let memory = device::Device::new(device::Cuda::open(ordinal)?, &layout, arena)?;
        Self::new(dir, rank, layout, Box::new(memory))
    }

    fn new(dir: &Path, rank: Rank, layout: Layout, memory: Box<dyn Memory>) -> Result<Self> {
        let told = RankFile::of(rank);
        told.write(rank, dir)?;
        rank::sweep(dir);
        let state = State { layout, memory, label: None, manifest: None, ready: None };
        let (state, told) = (Mutex::new(state), Mutex::new(told));
        let shared = Arc::new(Shared { dir: dir.into(), rank, state, told });
        let weak = Arc::downgrade(&shared);
        let watching = thread::Builder::new().name("driftless".into()).spawn(move || watch(&weak));
        watching.map_err(Error::set_up("the thread that readies deltas"))?;
        Ok(Self { shared })
    }

    /// The engine loaded weights under this label, or somebody changed them. A fence's label counts as its
    /// version's.
    pub fn loaded(&self, label: Option<&str>) {
        let mut state = self.shared.state();
        state.label = label.and_then(|label| label.split('?').next()).map(str::to_owned);
        (state.manifest, state.ready) = (None, None);
    }

    /// Makes the weights those of `label`; `None` if they are not prepared for it at every rank. The engine stands
    /// still.
    ///
    /// All ranks of an engine call this together. `least` is given this rank's vote, and returns the least of all
    /// ranks': once before anything is written, and, where all are ready, once more when all have tried to.
    /// An engine of one rank returns the vote.
    ///
    /// # Errors
    /// [`Error::Live`] if a weight has not the delta's old value, if another rank refuses, and the
    /// device's errors. The weights of each rank are what they were, as far as its memory could be written to.
    pub fn patch(&self, label: &str, least: impl FnMut(Vote) -> Vote) -> Result<Option<LivePatch>> {
        self.shared.patch(label, least)
    }

    /// Says that the engine takes calls for [`LiveModel::compare`].
    ///
    /// # Errors
    /// [`Error::Write`] when followers cannot be told.
    pub fn announce_compare(&self) -> Result<()> {
        let mut told = self.shared.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.compares = true;
        told.write(self.shared.rank, &self.shared.dir)
    }

    /// Compares the weights with those of a checkpoint, byte for byte: all that this rank has, or the sample of a number.
    /// Nothing changes. The engine stands still.
    ///
    /// All ranks of an engine call this together. `agree` is given bytes of this rank, as many as at every other one, and
    /// returns of each the least of all ranks': up to three times. An engine of one rank returns the bytes.
    ///
    /// # Errors
    /// [`Error::Open`] for a checkpoint that cannot be read; [`Error::Live`] for one of another model or one that changes
    /// meanwhile, if another rank refuses, and the device's errors.
    pub fn compare(
        &self,
        label: &str,
        directory: &Path,
        sample: Option<u64>,
        agree: impl FnMut(Vec<u8>) -> Vec<u8>,
    ) -> Result<Compared> {
        self.shared.compare(&Wanted { label, directory, sample }, agree)
    }
}

impl std::fmt::Debug for LiveModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LiveModel")
            .field("dir", &self.shared.dir)
            .field("rank", &self.shared.rank)
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic leaves weights that are not known, and `patch` has forgotten the label before.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`LiveModel::patch`].
    fn patch(&self, label: &str, mut least: impl FnMut(Vote) -> Vote) -> Result<Option<LivePatch>> {
        let mut state = self.state();
        let ready = self.ready(&mut state, label);
        let vote = match &ready {
            Err(_) => Vote::Refuses,
            Ok(None) => Vote::Loads,
            Ok(Some(_)) => Vote::Patches,
        };
        let ready = match (least(vote), ready?) {
            (Vote::Patches, Some(ready)) => ready,
            (Vote::Refuses, _) => return Err(another_rank("ready")),
            _ => return Ok(None),
        };
        let began = Instant::now();
        // Whatever happens now: what is live is known again when it has ended well.
        (state.label, state.manifest) = (None, None);
        let (mut wrote, mut all) = (Duration::ZERO, false);
        let found = state.memory.write(&mut |written| {
            wrote = began.elapsed();
            let vote =
                if matches!(written, Ok(Found { others: 0, .. })) { Vote::Patches } else { Vote::Refuses };
            all = least(vote) == Vote::Patches;
            all
        })?;
        check(&ready.delta, found, || "the old values of the delta".to_owned())?;
        if !all {
            return Err(another_rank("written"));
        }
        let target = ready.delta.target();
        let label = target.label.clone();
        (state.label, state.manifest) = (Some(label.clone()), Some(target.manifest));
        Ok(Some(LivePatch { label, changes: ready.changes, wrote, prepared: ready.took }))
    }

    /// The delta to a version, taken, if it is ready.
    fn ready(&self, state: &mut State, label: &str) -> Result<Option<Ready>> {
        let is_it = |ready: &Ready| ready.delta.target().label == label && ready.delta.is_offered();
        let ready = state.ready.take().filter(is_it);
        if ready.is_none() && state.label.as_deref() != Some(label) && self.is_first(label) {
            let found = "it is not, and the checkpoint may not be there yet";
            return Err(Error::live("the delta to this version", "ready", found));
        }
        Ok(ready)
    }

    /// Tells what became of deltas, of those whose files are there, if that is news or the rank's file was removed.
    fn tell(&self, names: &BTreeSet<String>, news: BTreeMap<String, Told>) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let known = told.deltas.clone();
        told.deltas.retain(|name, _| names.contains(name));
        told.deltas.extend(news);
        if told.deltas != known || !self.rank.path(&self.dir).exists() {
            // A rank that cannot tell is waited for, up to a deadline.
            let _ = told.write(self.rank, &self.dir);
        }
    }

    /// Whether a version is offered before its checkpoint is there: a load under its label would be torn.
    fn is_first(&self, label: &str) -> bool {
        let is_it = |name: &String| {
            let delta = PreparedDelta::open(&self.dir.join(name)).ok().flatten();
            delta.is_some_and(|delta| delta.is_first() && delta.target().label == label)
        };
        self.deltas().iter().any(is_it)
    }

    /// Names of the files that have prepared deltas.
    fn deltas(&self) -> BTreeSet<String> {
        let Ok(entries) = fs::read_dir(&self.dir) else { return BTreeSet::new() };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter(|name| name.starts_with(DELTA) && !name.contains('.')).collect()
    }

    /// Readies a delta, and returns why not.
    fn prepare(&self, delta: PreparedDelta) -> Result<()> {
        let mut state = self.state();
        let base = delta.base();
        if state.label.as_ref() != Some(&base.label)
            || state.manifest.is_some_and(|live| live != base.manifest)
        {
            let live = state.label.as_deref().unwrap_or("unknown");
            let found = state.manifest.map_or_else(|| live.into(), |found| format!("{live} ({found})"));
            let expected =
                format!("{} (manifest {}), where the delta starts from", base.label, base.manifest);
            return Err(Error::live("the live version", expected, found));
        }
        let began = Instant::now();
        let State { layout, memory, ready, .. } = &mut *state;
        *ready = None;
        tied::check(layout, &delta)?;
        let (changes, found) = memory.prepare(layout, &delta)?;
        check(&delta, found, || format!("those of {}, where they were learned to lie", delta.base().label))?;
        *ready = Some(Ready { delta, changes, took: began.elapsed() });
        Ok(())
    }
}

/// The delta of another rank of the engine is not `expected`.
fn another_rank(expected: &str) -> Error {
    Error::live("the delta of each rank", expected, "one that is not, as its own log says")
}

/// Refuses values that are others than a delta's old ones.
fn check(delta: &PreparedDelta, found: Found, expected: impl FnOnce() -> String) -> Result<()> {
    if found.others == 0 {
        return Ok(());
    }
    let tensor = delta.tensors().get(found.tensor).map_or("", |tensor| &tensor.name);
    let found = format!("{} others, the first in `{tensor}`", found.others);
    Err(Error::live("the live weights", expected(), found))
}

/// What was tried of a file.
struct Tried {
    delta: ContentDigest,
    /// The version that was live, and the one that the delta leads to.
    live: Option<String>,
    target: Option<String>,
}

/// Readies what followers offer, until the model is gone.
fn watch(model: &Weak<Shared>) {
    let mut tried = BTreeMap::new();
    while let Some(shared) = model.upgrade() {
        look(&shared, &mut tried);
        drop(shared);
        thread::sleep(LOOK);
    }
}

/// Tries each delta that is offered, once for each version that is live.
fn look(shared: &Shared, tried: &mut BTreeMap<String, Tried>) {
    let names = shared.deltas();
    tried.retain(|name, _| names.contains(name));
    let mut news = BTreeMap::new();
    for name in &names {
        let path = shared.dir.join(name);
        let delta = match prepared::offered(&path) {
            Ok(Some(delta)) => delta,
            Ok(None) => continue,
            Err(error) => {
                news.insert(name.clone(), Told { target: String::new(), why_not: Some(chain_text(&error)) });
                continue;
            }
        };
        let live = shared.state().label.clone();
        let again = tried
            .get(name)
            .is_none_or(|tried| tried.delta != delta || tried.live != live && tried.target != live);
        if !again {
            continue;
        }
        let told = attempt(shared, &path);
        let target = told.as_ref().map(|told| told.target.clone());
        tried.insert(name.clone(), Tried { delta, live, target });
        news.extend(told.map(|told| (name.clone(), told)));
    }
    shared.tell(&names, news);
}

/// Readies what a file offers, and says what became of it; `None` if it offers nothing any more.
fn attempt(shared: &Shared, path: &Path) -> Option<Told> {
    let delta = match PreparedDelta::open(path) {
        Ok(delta) => delta?,
        Err(error) => return Some(Told { target: String::new(), why_not: Some(chain_text(&error)) }),
    };
    let target = delta.target().label.clone();
    let why_not = shared.prepare(delta).err().map(|error| chain_text(&error));
    Some(Told { target, why_not })
}
