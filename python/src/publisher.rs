//! `Publisher`: tensors of a trainer in Python, published from where they lie.

use crate::error::{self, named, transport};
use crate::gpu::Gpus;
use crate::tensor::{self, Borrowed, Remote};
use crate::work::{self, Held};
use driftless::command;
use driftless::delta::Element;
use driftless::delta::cuda;
use driftless::http::Followers;
use driftless::store::Store;
use driftless::store::wait::Stop;
use driftless::transport::publish::{
    BaseMemory, Mode, Notify, Profile, PublisherOptions, Rank, Slice, Sliced, Start, Step,
};
use driftless::transport::sign::{SignKey, TrustKey};
use driftless::transport::snapshot::{AUX_FILE_BYTES_MAX, AuxFile, TensorInfo};
use driftless::transport::{Error, Publisher as Inner, Result as TransportResult, Run, Snapshot};
use pyo3::prelude::*;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A committed version, in numbers.
#[pyclass(frozen, get_all, module = "driftless_rl")]
pub(crate) struct Published {
    version: u64,
    label: String,
    manifest_digest: String,
    full_because: Option<String>,
    left_out: BTreeMap<String, String>,
    anchor: bool,
    publication_bytes: u64,
    full_bytes: u64,
    changed: u64,
    elements: u64,
    density: f64,
    encode_seconds: f64,
    upload_seconds: f64,
    device_bytes: u64,
}

#[pymethods]
impl Published {
    fn __repr__(&self) -> String {
        let Self { version, label, publication_bytes, full_bytes, density, .. } = self;
        format!(
            "Published(version={version}, label='{label}', publication_bytes={publication_bytes}, full_bytes={full_bytes}, \
             density={density:.6})"
        )
    }
}

impl Published {
    fn new(published: driftless::transport::publish::Published, device_bytes: u64) -> Self {
        Self {
            device_bytes,
            version: published.version.0,
            manifest_digest: published.manifest_digest.to_string(),
            full_because: published.full_because.as_ref().map(ToString::to_string),
            anchor: published.anchor,
            publication_bytes: published.publication_bytes,
            full_bytes: published.full_bytes,
            changed: published.changed,
            elements: published.elements,
            density: published.density(),
            encode_seconds: published.encode.as_secs_f64(),
            upload_seconds: published.upload.as_secs_f64(),
            left_out: published.left_out.into_iter().map(|head| (head.tensor, head.same_as)).collect(),
            label: published.label,
        }
    }
}

/// What `Publisher` of `driftless_rl` stands on: see there.
#[pyclass(frozen, module = "driftless_rl._native")]
pub(crate) struct Publisher {
    held: Held<Inner>,
    files: Vec<AuxFile>,
    rank: Option<(u32, u32)>,
    join_deadline: Duration,
    model: String,
    gpus: Gpus,
    /// The switch of the call under way.
    stop: Mutex<Stop>,
}

/// Settings, as Python's class passes them on.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Settings {
    store: String,
    run: String,
    model: String,
    resume: Resume,
    baseline_dir: Option<PathBuf>,
    files: Vec<(String, Vec<u8>)>,
    hf_checkpoint: Option<PathBuf>,
    profile: String,
    anchor_every: Option<u64>,
    anchor_share: Option<f64>,
    allow_layout_change: bool,
    allow_non_finite: bool,
    sign_key: Option<PathBuf>,
    trust_keys: Vec<PathBuf>,
    notify: Vec<String>,
    notify_token: Option<String>,
    threads: Option<usize>,
    buffer_bytes: Option<u64>,
    rank: Option<(u32, u32)>,
    join_deadline: f64,
    device_base: String,
    gpu: Option<usize>,
}

/// `resume=`.
#[derive(FromPyObject)]
enum Resume {
    Flag(bool),
    Word(String),
}

impl Resume {
    fn start(&self, store: &Arc<dyn Store>, run: &str) -> PyResult<Start> {
        match self {
            Self::Flag(true) => Ok(Start::Resume),
            Self::Flag(false) => Ok(Start::NewRun),
            Self::Word(word) if word == "auto" => Start::resume_or_new(store, run).map_err(transport),
            Self::Word(word) => Err(error::usage("resume", "True, False or \"auto\"", word)),
        }
    }
}

/// A tensor, or the slice of one: name, value, and for a slice the whole tensor's shape and the slice's first
/// element.
type Given<'py> = (String, Bound<'py, PyAny>, Option<(Vec<u64>, u64)>);

#[pymethods]
impl Publisher {
    #[new]
    fn new(py: Python<'_>, settings: Settings) -> PyResult<Self> {
        let files = files(&settings)?;
        let join_deadline = error::seconds("join_deadline", settings.join_deadline)?;
        let (rank, model, gpu) = (settings.rank, settings.model.clone(), settings.gpu);
        let gpus = Gpus::new(named("device_base", &BASES, &settings.device_base)?);
        if let Some((rank, ranks)) = rank.filter(|(rank, ranks)| rank >= ranks) {
            let expected = format!("one from 0 on and below ranks, which is {ranks}");
            return Err(error::usage("rank", &expected, &rank.to_string()));
        }
        let stop = Stop::new();
        let inner = work::run(py, &stop, || {
            let mut inner = open(settings, join_deadline, &stop)?;
            gpu.into_iter().for_each(|gpu| gpus.warm_up(&mut inner, &model, gpu));
            Ok::<_, PyErr>(inner)
        })??;
        let held = Held::new("Publisher", inner);
        Ok(Self { held, files, rank, join_deadline, model, gpus, stop: Mutex::new(stop) })
    }

    /// Refuses another process than the one that opened it, and one that was closed.
    fn check(&self) -> PyResult<()> {
        self.held.check_open()
    }

    /// The run's id, and the newest version that is known.
    fn state(&self) -> PyResult<(String, Option<u64>)> {
        self.held.with(|inner| Ok((inner.run().id().to_string(), inner.version().map(|version| version.0))))
    }

    fn publish(
        &self,
        py: Python<'_>,
        tensors: Vec<Given<'_>>,
        step: u64,
        mode: &str,
        checkpoint: Option<String>,
        attempt: Option<String>,
    ) -> PyResult<(Option<Published>, Option<String>)> {
        let mode = named("mode", &[("delta", Mode::Delta), ("full", Mode::Full)], mode)?;
        let step = Step { trainer_step: step, checkpoint };
        let tensors = Tensors::new(tensors, &self.files, self.gpus.encode())?;
        let rank = match (self.rank, attempt) {
            (None, None) => None,
            (Some((rank, ranks)), Some(attempt)) => Some(Rank { rank, ranks, attempt }),
            (None, Some(found)) => {
                return Err(error::usage("attempt", "none without rank= and ranks=", &found));
            }
            (Some(_), None) => {
                let expected = "a name that all ranks of this publication share, such as `<job id>-<step>`";
                return Err(error::usage("attempt", expected, "none"));
            }
        };
        if let (None, Some(slice)) = (&rank, tensors.slices.iter().find(|slice| !is_whole(slice))) {
            let expected = "all of it, or rank= and ranks= for a trainer with several ranks";
            return Err(error::tensor(&slice.tensor.name, "what is given of it", expected, "a slice"));
        }
        self.cancellable(py, |inner| {
            let because = self.gpus.open(inner, tensors.on_gpus());
            let published = match rank {
                None => Some(inner.publish(&tensors, step, mode)?),
                Some(rank) => {
                    let shard = Sliced::new(&tensors, tensors.slices.clone())?;
                    inner.publish_with_ranks(&shard, step, mode, &rank, self.join_deadline)?.1
                }
            };
            let used = inner.device_use();
            let published = published.map(|published| Published::new(published, used.device_bytes));
            Ok((published, because.or_else(|| used.host_because.clone())))
        })
    }

    fn publish_reference(
        &self,
        py: Python<'_>,
        checkpoint: PathBuf,
        step: u64,
        gpu: Option<usize>,
    ) -> PyResult<Published> {
        let step = Step { trainer_step: step, checkpoint: Some(checkpoint.display().to_string()) };
        self.cancellable(py, |inner| {
            let done = inner.publish_reference(&checkpoint, step)?;
            gpu.into_iter().for_each(|gpu| self.gpus.warm_up(inner, &self.model, gpu));
            Ok(Published::new(done, 0))
        })
    }

    /// Why the tensors' GPUs are not ready, if they are not.
    fn prepare(&self, py: Python<'_>, tensors: Vec<Given<'_>>) -> PyResult<Option<String>> {
        let tensors = Tensors::new(tensors, &self.files, self.gpus.encode())?;
        self.cancellable(py, |inner| {
            let because = self.gpus.open(inner, tensors.on_gpus());
            inner.place_bases(&Sliced::new(&tensors, tensors.slices.clone())?)?;
            Ok(because.or_else(|| inner.device_use().host_because.clone()))
        })
    }

    /// Ends the call under way, if there is one, before its next tensor.
    fn cancel(&self) {
        self.stop().stop();
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.held.close(py)
    }
}

impl Publisher {
    fn stop(&self) -> std::sync::MutexGuard<'_, Stop> {
        self.stop.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a publication that Ctrl-C and `cancel` can end.
    fn cancellable<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Inner) -> TransportResult<T> + Send,
    ) -> PyResult<T> {
        self.held.with(|inner| {
            let stop = Stop::new();
            *self.stop() = stop.clone();
            inner.stop_on(&stop);
            work::run(py, &stop, || work(inner))?.map_err(transport)
        })
    }
}

/// A tensor's memory.
enum Memory {
    Here(Borrowed),
    Remote(Remote),
}

impl Memory {
    fn new(name: String, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        match Remote::new(&name, value)? {
            Some(tensor) => Ok(Self::Remote(tensor)),
            None => Borrowed::new(name, value).map(Self::Here),
        }
    }

    fn info(&self) -> &TensorInfo {
        match self {
            Self::Here(tensor) => &tensor.info,
            Self::Remote(tensor) => &tensor.info,
        }
    }

    fn bytes(&self) -> TransportResult<Cow<'_, [u8]>> {
        match self {
            Self::Here(tensor) => Ok(Cow::Borrowed(tensor.bytes())),
            Self::Remote(tensor) => tensor.copy().map(Cow::Owned),
        }
    }

    fn on_device(&self) -> Option<&cuda::Tensor> {
        match self {
            Self::Here(_) => None,
            Self::Remote(tensor) => tensor.on_device.as_ref(),
        }
    }
}

/// What is published: borrowed tensors, in order.
struct Tensors<'a> {
    infos: Vec<TensorInfo>,
    slices: Vec<Slice>,
    memory: Vec<Memory>,
    files: &'a [AuxFile],
}

impl<'a> Tensors<'a> {
    /// `on_devices`: whether tensors on devices are encoded there.
    fn new(given: Vec<Given<'_>>, files: &'a [AuxFile], on_devices: bool) -> PyResult<Self> {
        let mut parts = Vec::with_capacity(given.len());
        for (name, value, place) in given {
            let mut memory = Memory::new(name, &value)?;
            if let (Memory::Remote(tensor), false) = (&mut memory, on_devices) {
                tensor.on_device = None;
            }
            let held = memory.info().clone();
            let slice = match place {
                None => Slice::whole(held),
                Some((shape, start)) => Slice::of(held, shape, start),
            };
            let slice = slice.map_err(transport)?;
            tensor::length(&slice.tensor)?;
            parts.push((slice, memory));
        }
        let key = |slice: &Slice| (slice.tensor.name.clone(), slice.start);
        parts.sort_by_cached_key(|(slice, _)| key(slice));
        let (slices, memory): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        let infos = slices.iter().map(|slice: &Slice| slice.tensor.clone()).collect();
        Ok(Self { infos, slices, memory, files })
    }

    /// The GPU, and the elements, of each tensor that lies on one.
    fn on_gpus(&self) -> impl Iterator<Item = (usize, Element)> {
        let place = |memory: &Memory| Some((memory.on_device()?.device(), memory.info().dtype.element()));
        self.memory.iter().filter_map(place)
    }
}

impl Snapshot for Tensors<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }
    fn bytes(&self, index: usize) -> TransportResult<Cow<'_, [u8]>> {
        self.memory[index].bytes()
    }
    fn on_device(&self, index: usize) -> Option<&cuda::Tensor> {
        self.memory[index].on_device()
    }
    fn files(&self) -> &[AuxFile] {
        self.files
    }
}

fn is_whole(slice: &Slice) -> bool {
    slice.start == 0 && slice.tensor.elements().is_ok_and(|elements| elements == slice.elements)
}

fn open(settings: Settings, deadline: Duration, stop: &Stop) -> PyResult<Inner> {
    let store = command::open_store(&settings.store).map_err(transport)?;
    let baseline = settings.baseline_dir.clone();
    let baseline =
        baseline.or_else(|| command::default_baseline(&store.to_string(), &settings.run, &settings.model));
    let Some(baseline) = baseline else {
        return Err(error::usage("baseline_dir", "a directory, or HOME to put it under", "neither"));
    };
    let mut start = settings.resume.start(&store, &settings.run)?;
    if settings.rank.is_some_and(|(rank, _)| rank > 0) && start == Start::NewRun {
        Run::open_within(store.clone(), &settings.run, deadline, stop).map_err(transport)?;
        start = Start::Resume;
    }
    let mut options = PublisherOptions::new(&settings.run, start, baseline);
    options.model = settings.model;
    options.profile = named("profile", &PROFILES, &settings.profile)?;
    options.anchor_every = settings.anchor_every;
    options.anchor_share = settings.anchor_share;
    options.allow_layout_change = settings.allow_layout_change;
    options.allow_non_finite = settings.allow_non_finite;
    options.reference_dir = settings.hf_checkpoint;
    options.threads = settings.threads.unwrap_or(options.threads);
    options.buffer_bytes = settings.buffer_bytes.unwrap_or(options.buffer_bytes);
    options.sign_key = settings.sign_key.map(|path| SignKey::read(&path)).transpose().map_err(transport)?;
    if !settings.notify.is_empty() {
        let followers = Followers::new(&settings.notify, settings.notify_token.as_deref());
        let followers = followers.map_err(|source| error::own("UsageError", format!("notify: {source}")))?;
        options.notify = Some(Notify::new(move |_| followers.tell()));
    }
    for path in &settings.trust_keys {
        options.trust_keys.extend(TrustKey::read_all(path).map_err(transport)?);
    }
    Inner::open(store, options).map_err(transport)
}

/// The auxiliary files: those of the checkpoint, and those given, which win.
fn files(settings: &Settings) -> PyResult<Vec<AuxFile>> {
    let mut files = BTreeMap::new();
    if let Some(dir) = &settings.hf_checkpoint {
        let unreadable = |path: &Path, source: std::io::Error| {
            let found = format!("`{}`: {source}", path.display());
            error::usage("hf_checkpoint", "a checkpoint directory that can be read", &found)
        };
        for entry in std::fs::read_dir(dir).map_err(|source| unreadable(dir, source))? {
            let path = entry.map_err(|source| unreadable(dir, source))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let found = std::fs::metadata(&path).map_err(|source| unreadable(&path, source))?;
            // Weights, directories and hidden files are none.
            if !found.is_file() || AuxFile::new(name, Vec::new()).is_err() {
                continue;
            }
            if found.len() > AUX_FILE_BYTES_MAX {
                let what = format!("auxiliary file `{}`", path.display());
                return Err(transport(Error::TooLarge { what, max: AUX_FILE_BYTES_MAX }));
            }
            let bytes = std::fs::read(&path).map_err(|source| unreadable(&path, source))?;
            files.insert(name.to_owned(), AuxFile::new(name, bytes).map_err(transport)?);
        }
    }
    for (name, bytes) in &settings.files {
        files.insert(name.clone(), AuxFile::new(name, bytes.clone()).map_err(transport)?);
    }
    Ok(files.into_values().collect())
}

/// Where baselines are decoded, by the names of Python's argument.
const BASES: [(&str, Option<BaseMemory>); 3] =
    [("device", Some(BaseMemory::Device)), ("host", Some(BaseMemory::Host)), ("off", None)];

pub(crate) const PROFILES: [(&str, Profile); 2] = [("wire", Profile::Wire), ("fast", Profile::Fast)];
