//! A model of synthetic weights as something that can be published.

use std::path::Path;
use std::sync::Arc;

use driftless_compare::data::{Pair, Shape, synthetic};
use driftless_store::Store;
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::publish::{Mode, Profile, Published, PublisherOptions, Start, Step};
use driftless_transport::{Dtype, Publisher, Tensors};

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

/// The state before the step.
pub(crate) fn base(pairs: &[Pair]) -> Tensors<'_> {
    state(pairs, |pair| &pair.base)
}

/// The state after it.
pub(crate) fn new(pairs: &[Pair]) -> Tensors<'_> {
    state(pairs, |pair| &pair.new)
}

fn state<'a>(pairs: &'a [Pair], side: impl Fn(&'a Pair) -> &'a [u8]) -> Tensors<'a> {
    let mut sorted: Vec<&Pair> = pairs.iter().collect();
    sorted.sort_by(|a, b| a.name.cmp(&b.name));
    let start = Tensors::new().file("config.json", "{}").expect("a name");
    sorted.into_iter().fold(start, |state, pair| {
        state.tensor(pair.name.as_str(), Dtype::Bf16, pair.shape.as_slice(), side(pair)).expect("a tensor")
    })
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
    let reference = dir.join("base");
    let shard = shard_mib.map_or(1 << 40, |mib| mib << 20);
    write_checkpoint(&reference, &base(pairs), shard).expect("a checkpoint");
    let options = PublisherOptions::new(RUN, Start::NewRun, dir.join("baseline")).with_profile(profile);
    let mut publisher = Publisher::open(store.clone(), options).expect("a publisher");
    publisher.publish_reference(&reference, Step::default()).expect("version 0");
    publisher
}

/// The next version: the new state.
pub(crate) fn publish(publisher: &mut Publisher, state: &Tensors<'_>) -> Published {
    publisher.publish(state, Step::default(), Mode::Delta).expect("a version")
}
