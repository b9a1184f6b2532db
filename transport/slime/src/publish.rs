//! Writes a trainer's directory, for slime's receiver.

use std::borrow::Cow;
use std::fmt;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use derive_setters::Setters;
use driftless_store::pool::{Bounds, in_order, threads};
use driftless_store::{Error as StoreError, PutMode, Store, probe_conditional_put};
use driftless_transport::foreign::{STATE_DIR, check_finite, check_table};
use driftless_transport::publish::{Progress, ProgressFn, Published, Start};
use driftless_transport::replica::Applied;
use driftless_transport::snapshot::TensorInfo;
use driftless_transport::{Checkpoint, Error, Replica, Result, Snapshot, Version};
use serde_json::json;

use crate::feed::Feed;
use crate::release::Release;
use crate::{Checksum, Encoding, frame, identity, index_key, version_key};

/// Threads that encode at most.
const WORKERS_MAX: usize = 16;
/// Bytes of tensors and frames that are under way at most; one tensor alone may have more.
const MEMORY_MAX: u64 = 1 << 30;

/// What to publish, and how.
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct PublisherOptions {
    /// Whether to begin a run in an empty directory, or to go on with the one there.
    pub start: Start,
    /// Directory of the baseline, a copy of the newest version that the next delta starts from.
    #[setters(into)]
    pub baseline_dir: PathBuf,
    /// The checkpoint that is version 0, which every receiver has; needed as long as the baseline holds no
    /// version.
    #[setters(into)]
    pub hf_checkpoint: Option<PathBuf>,
    /// How changed tensors are written.
    pub encoding: Encoding,
    /// Checksum of changed tensors.
    pub checksum: Checksum,
    /// Frames in one file, in bytes; a larger frame has a file of its own. A file is in memory while it is
    /// stored.
    pub file_bytes: u64,
    /// Whether elements that turned NaN or infinite are published; [`Error::NotFinite`] if not.
    pub allow_non_finite: bool,
}

impl PublisherOptions {
    /// Options with slime's defaults: xor, xxh3-128; files of up to 512 MiB.
    #[must_use]
    pub fn new(start: Start, baseline_dir: impl Into<PathBuf>) -> Self {
        Self {
            start,
            baseline_dir: baseline_dir.into(),
            hf_checkpoint: None,
            encoding: Encoding::default(),
            checksum: Checksum::default(),
            file_bytes: 512 << 20,
            allow_non_finite: false,
        }
    }
}

/// Publishes versions in slime's layout, one writer to a directory.
///
/// The layout has no full versions: version 0 is a checkpoint that every receiver has, and nothing is written
/// for it. A version is committed by its index, which is written last.
pub struct Publisher {
    store: Arc<dyn Store>,
    options: PublisherOptions,
    feed: Feed,
    baseline: Replica,
    progress: Option<Box<ProgressFn>>,
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Publisher {
    /// Opens a publisher and brings the baseline to the newest version in the directory.
    ///
    /// # Errors
    /// [`Error::RunExists`] for a new run where there is one, [`Error::BadSetting`] if its baseline holds
    /// something; [`ConditionalPutIgnored`](driftless_store::Error::ConditionalPutIgnored);
    /// [`Error::Unsupported`] without a version 0; [`Error::ForeignRun`] for a baseline of something else;
    /// whatever the store or the file system reports.
    pub fn open(store: Arc<dyn Store>, options: PublisherOptions) -> Result<Self> {
        probe_conditional_put(&*store)?;
        let baseline = Replica::open(&options.baseline_dir)?;
        if options.start == Start::NewRun {
            if let Some(applied) = baseline.applied() {
                return Err(Error::BadSetting {
                    name: "baseline_dir",
                    expected: "a directory without a version, for a new run".to_owned(),
                    found: applied.label(),
                });
            }
            match Release::read(&*store, Version(1)) {
                Err(Error::Store(StoreError::NotFound { .. })) => {}
                release => {
                    let run_id = identity::run_id(identity::content(&release?));
                    return Err(Error::RunExists { name: store.to_string(), run_id });
                }
            }
        }
        let feed = Feed::new(store.clone(), "policy", options.hf_checkpoint.clone());
        let mut publisher = Self { store, options, feed, baseline, progress: None };
        publisher.catch_up()?;
        Ok(publisher)
    }

    /// Has `progress` called after every tensor of a publication.
    pub fn on_progress(&mut self, progress: Box<ProgressFn>) {
        self.progress = Some(progress);
    }

    /// The newest version, which the baseline holds.
    #[must_use]
    pub fn applied(&self) -> Option<&Applied> {
        self.baseline.applied()
    }

    /// Publishes `snapshot` as the next version and returns once it is committed, and read back.
    ///
    /// # Errors
    /// [`Error::TensorMismatch`] if its tensors are not the baseline's by name, type and shape;
    /// [`Error::LostRace`] if another publisher committed the version; [`Error::Unsupported`] for a tensor
    /// that the encoding cannot describe; whatever the store, the file system or the snapshot reports. The
    /// version is not there then, or whole.
    pub fn publish(&mut self, snapshot: &dyn Snapshot) -> Result<Published> {
        let begin = Instant::now();
        let applied = self.catch_up()?;
        let version = applied.version.next();
        check_snapshot(self.baseline.checkpoint()?, snapshot)?;
        let (mut written, frames) = self.encode(snapshot)?;
        let encode = begin.elapsed();
        self.clear(version)?;
        let mut bytes = 0;
        let files = plan(&frames, self.options.file_bytes);
        let mut weight_map = serde_json::Map::new();
        for (number, range) in files.iter().enumerate() {
            let name = format!("model-{number:05}-of-{:05}.safetensors", files.len());
            let frames = &frames[range.clone()];
            weight_map.extend(frames.iter().map(|frame| (frame.name.clone(), name.clone().into())));
            let file = written.file(frames)?;
            bytes += file.len() as u64;
            self.store.put(&version_key(version)?.join(&name)?, &file, PutMode::Overwrite)?;
        }
        let index = json!({
            "metadata": {
                "version": format!("{:06}", version.0),
                "base_version": format!("{:06}", applied.version.0),
                "delta_encoding": self.options.encoding.to_string(),
                "compression_format": "zstd",
                "checksum_format": self.options.checksum.name(),
            },
            "weight_map": weight_map,
        })
        .to_string();
        bytes += index.len() as u64;
        fail::fail_point!("publish.manifest");
        self.commit(version, index.as_bytes())?;
        fail::fail_point!("publish.committed");
        let advanced = self.feed.advance(&mut self.baseline, version)?;
        self.published(bytes, advanced.changed, encode, begin)
    }

    fn published(
        &self,
        bytes: u64,
        changed: u64,
        encode: std::time::Duration,
        begin: Instant,
    ) -> Result<Published> {
        let (applied, manifest) = self.baseline.held()?;
        let upload = begin.elapsed().saturating_sub(encode);
        Ok(Published::of_delta(applied, manifest, bytes, changed, encode, upload))
    }

    fn catch_up(&mut self) -> Result<Applied> {
        // Durable, before anything is encoded against it.
        self.baseline.sync()?;
        let newest = self.feed.survey(&mut self.baseline)?;
        self.feed.advance(&mut self.baseline, newest)?;
        Ok(self.baseline.held()?.0.clone())
    }

    /// Removes what an attempt that was never committed left in the version's place: receivers read every
    /// file there.
    fn clear(&self, version: Version) -> Result<()> {
        let index = index_key(version)?;
        let entries = self.store.list(&version_key(version)?)?;
        if entries.iter().any(|entry| entry.key == index) {
            return Err(self.lost(version)?);
        }
        for entry in entries {
            self.store.delete(&entry.key)?;
        }
        Ok(())
    }

    /// Creates the index, and finds out what became of it if the store does not say.
    fn commit(&self, version: Version, index: &[u8]) -> Result<()> {
        let key = index_key(version)?;
        let Err(error) = self.store.put(&key, index, PutMode::Create) else { return Ok(()) };
        match self.store.get(&key, None) {
            Ok(found) if found == index => Ok(()),
            Ok(_) => Err(self.lost(version)?),
            Err(StoreError::NotFound { .. }) => Err(error.into()),
            Err(_) => Err(Error::CommitUnknown {
                version,
                store: self.store.to_string(),
                source: Box::new(error.into()),
            }),
        }
    }

    fn lost(&self, version: Version) -> Result<Error> {
        let winner = identity::content(&Release::read(&*self.store, version)?);
        let (applied, _) = self.baseline.held()?;
        Ok(Error::LostRace {
            run_id: applied.run_id,
            model: applied.model.clone(),
            version,
            winner: identity::link(applied.manifest_digest, winner),
        })
    }

    /// Encodes what changed, on several threads.
    fn encode(&mut self, snapshot: &dyn Snapshot) -> Result<(Frames, Vec<Encoded>)> {
        let Self { baseline, options, progress: tell, .. } = self;
        let base = baseline.checkpoint()?;
        let mut frames = Frames::create(&options.baseline_dir.join(STATE_DIR))?;
        let mut encoded = Vec::new();
        let tensors = snapshot.tensors();
        let mut progress = Progress::default();
        progress.tensors_total = tensors.len() as u64;
        // The new bytes, and the frame that is made of them.
        let weights = tensors.iter().map(|info| Ok(2 * info.byte_len()?)).collect::<Result<Vec<_>>>()?;
        progress.bytes_total = weights.iter().sum::<u64>() / 2;
        let bounds = Bounds { threads: threads(WORKERS_MAX), weight: MEMORY_MAX };
        let feed = |index: usize| {
            let bytes = snapshot.bytes(index)?;
            tensors[index].check_bytes(&bytes)?;
            Ok::<_, Error>((index, bytes))
        };
        let work = |(index, new): (usize, Cow<'_, [u8]>)| {
            let (info, old) = (&base.tensors()[index], base.bytes(index)?);
            if old == new {
                return Ok(None);
            }
            if !options.allow_non_finite {
                check_finite(info, 0, &new, Some(&old))?;
            }
            let frame = frame::encode(&info.name, options.encoding, &old, &new)?;
            Ok(Some((frame, options.checksum.of(&new))))
        };
        in_order(&weights, bounds, feed, work, |index, made| {
            let info = &tensors[index];
            if let Some((frame, checksum)) = made {
                encoded.push(Encoded { name: info.name.clone(), range: frames.append(&frame)?, checksum });
            }
            progress.tensors += 1;
            progress.bytes_encoded += info.byte_len()?;
            if let Some(tell) = tell {
                tell(progress);
            }
            Ok(())
        })?;
        Ok((frames, encoded))
    }
}

/// A frame among [`Frames`].
struct Encoded {
    name: String,
    range: Range<u64>,
    checksum: String,
}

/// Frames on their way to a file, whose name says how many there are: a file without a name, so that it never
/// stays behind.
struct Frames {
    path: PathBuf,
    file: File,
    length: u64,
}

impl Frames {
    fn create(dir: &std::path::Path) -> Result<Self> {
        let path = dir.join("frames.partial");
        let io = |source| Error::io("create", &path, source);
        let file =
            File::options().read(true).write(true).create(true).truncate(true).open(&path).map_err(io)?;
        fs::remove_file(&path).map_err(io)?;
        Ok(Self { path, file, length: 0 })
    }

    fn append(&mut self, frame: &[u8]) -> Result<Range<u64>> {
        self.file.write_all(frame).map_err(|source| Error::io("write", &self.path, source))?;
        let start = self.length;
        self.length += frame.len() as u64;
        Ok(start..self.length)
    }

    /// The safetensors file of `frames`.
    fn file(&mut self, frames: &[Encoded]) -> Result<Vec<u8>> {
        let mut header = serde_json::Map::new();
        let checksums: serde_json::Map<_, _> =
            frames.iter().map(|frame| (frame.name.clone(), frame.checksum.clone().into())).collect();
        header.insert("__metadata__".to_owned(), checksums.into());
        let mut offset = 0;
        for frame in frames {
            let length = frame.range.end - frame.range.start;
            let entry =
                json!({ "dtype": "U8", "shape": [length], "data_offsets": [offset, offset + length] });
            header.insert(frame.name.clone(), entry);
            offset += length;
        }
        let mut json = serde_json::Value::Object(header).to_string().into_bytes();
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut file = (json.len() as u64).to_le_bytes().to_vec();
        file.append(&mut json);
        for frame in frames {
            let start = file.len();
            file.resize(start + (frame.range.end - frame.range.start) as usize, 0);
            let io = |source| Error::io("read", &self.path, source);
            self.file.seek(SeekFrom::Start(frame.range.start)).map_err(io)?;
            self.file.read_exact(&mut file[start..]).map_err(io)?;
        }
        Ok(file)
    }
}

/// Consecutive frames of at most `max` bytes, except where one alone is larger.
fn plan(frames: &[Encoded], max: u64) -> Vec<Range<usize>> {
    let mut files: Vec<Range<usize>> = Vec::new();
    let mut bytes = 0u64;
    for (index, frame) in frames.iter().enumerate() {
        let length = frame.range.end - frame.range.start;
        match files.last_mut() {
            Some(file) if bytes + length <= max => file.end = index + 1,
            _ => {
                files.push(index..index + 1);
                bytes = 0;
            }
        }
        bytes += length;
    }
    files
}

/// The layout changes bytes of tensors and nothing else.
fn check_snapshot(base: &Checkpoint, snapshot: &dyn Snapshot) -> Result<()> {
    check_table(
        base.tensors().iter().map(TensorInfo::form),
        snapshot.tensors().iter().map(TensorInfo::form),
    )?;
    if base.files() != snapshot.files() {
        tracing::warn!(
            "auxiliary files changed; the layout has no place for them, and receivers keep the old ones"
        );
    }
    Ok(())
}
