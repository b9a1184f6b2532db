//! A model of synthetic weights as something that can be published.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use driftless_compare::data::{Pair, Shape, synthetic};
use driftless_transport::{
    AuxFile, Dtype, Mode, Profile, Published, Publisher, PublisherOptions, Result, Snapshot, Start, Step,
    Store, TensorInfo, write_checkpoint,
};

use crate::Options;

/// Elements of one tensor: 32 MiB, as of a layer of a model of some ten billion parameters.
const ELEMENTS: usize = 16 << 20;
/// Name of the run.
pub(crate) const RUN: &str = "bench";

/// Two states of a model of about `mib` MiB.
pub(crate) fn pairs(mib: usize, density: f64) -> Vec<Pair> {
    let elements = (mib << 20) / 2;
    let tensors = elements.div_ceil(ELEMENTS).max(4);
    synthetic(Shape { tensors, elements: elements / tensors }, density, 1)
}

/// A directory for the bench's files.
pub(crate) fn directory(options: &Options) -> tempfile::TempDir {
    in_dir(options.dir.as_deref())
}

/// A directory for the files of the host at the other end of the link.
pub(crate) fn host_directory(options: &Options) -> tempfile::TempDir {
    in_dir(options.host_dir.as_deref().or(options.dir.as_deref()))
}

fn in_dir(dir: Option<&Path>) -> tempfile::TempDir {
    dir.map_or_else(tempfile::tempdir, tempfile::tempdir_in).expect("a directory")
}

/// One of the two states.
pub(crate) struct State<'a> {
    tensors: Vec<TensorInfo>,
    bytes: Vec<&'a [u8]>,
    files: Vec<AuxFile>,
}

impl<'a> State<'a> {
    pub(crate) fn base(pairs: &'a [Pair]) -> Self {
        Self::of(pairs, |pair| &pair.base)
    }

    pub(crate) fn new(pairs: &'a [Pair]) -> Self {
        Self::of(pairs, |pair| &pair.new)
    }

    fn of(pairs: &'a [Pair], side: impl Fn(&'a Pair) -> &'a [u8]) -> Self {
        let mut sorted: Vec<&Pair> = pairs.iter().collect();
        sorted.sort_by(|a, b| a.name.cmp(&b.name));
        let info = |pair: &&Pair| TensorInfo {
            name: pair.name.clone(),
            dtype: Dtype::Bf16,
            shape: pair.shape.clone(),
        };
        let tensors = sorted.iter().map(info).collect();
        let bytes = sorted.into_iter().map(side).collect();
        let files = vec![AuxFile::new("config.json", b"{}".to_vec()).expect("a name")];
        Self { tensors, bytes, files }
    }
}

impl Snapshot for State<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        Ok(Cow::Borrowed(self.bytes[index]))
    }

    fn files(&self) -> &[AuxFile] {
        &self.files
    }
}

/// A run of deltas of `profile` whose version 0 is the base by reference, in `dir/base`, in weight files of
/// `shard_mib`.
pub(crate) fn begin(
    pairs: &[Pair],
    store: &Arc<dyn Store>,
    dir: &Path,
    profile: Profile,
    shard_mib: Option<u64>,
) -> Publisher {
    let base = dir.join("base");
    let shard = shard_mib.map_or(1 << 40, |mib| mib << 20);
    write_checkpoint(&base, &State::base(pairs), shard).expect("a checkpoint");
    let mut options = PublisherOptions::new(RUN, Start::NewRun, dir.join("baseline"));
    options.profile = profile;
    let mut publisher = Publisher::open(store.clone(), options).expect("a publisher");
    publisher.publish_reference(&base, Step::default()).expect("version 0");
    publisher
}

/// The next version: the new state.
pub(crate) fn publish(publisher: &mut Publisher, state: &State<'_>) -> Published {
    publisher.publish(state, Step::default(), Mode::Delta).expect("a version")
}
