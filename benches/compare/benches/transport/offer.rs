//! A version on its way to engines that patch their weights: from the call until the delta is offered to their
//! plugins, with the journal durable, and before it is.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use driftless_store::{Disk, Store};
use driftless_transport::prepared::OfferWhen;
use driftless_transport::publish::Profile;
use driftless_transport::{Replica, Version};

use crate::model::{self, begin, directory, pairs, publish};
use crate::{Options, median};

/// Prints the first time, which makes the files that later deltas are written over, and the medians of the rest: offered
/// with the journal durable, and before it is. Each takes two versions in turn, as steps go to and fro.
pub(crate) fn run(options: &Options) {
    let density = options.wire_density;
    println!("offer of {} % to {} MiB", 100.0 * density, options.mib);
    let dir = directory(options);
    let pairs = pairs(options.mib, density);
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.path().join("store")));
    let mut publisher = begin(&pairs, &store, dir.path(), Profile::Fast, options.shard_mib);
    let mut replica = Replica::open(dir.path().join("host")).expect("a replica");
    let reference = dir.path().join("base");
    replica.advance(publisher.run(), "policy", Version(0), Some(&reference)).expect("version 0");
    let plugins = plugin_dir();
    replica.set_plugin_dir(plugins.path().to_owned());
    let (mut offered, mut changed, mut first) = ([Vec::new(), Vec::new()], 0, 0.0);
    for version in 0..=4 * options.repeat as u64 {
        publish(&mut publisher, &if version % 2 == 0 { model::new(&pairs) } else { model::base(&pairs) });
        publisher.wait().expect("a baseline");
        let early = usize::from(version.div_ceil(2) % 2 == 1);
        replica.offer_first([OfferWhen::Durable, OfferWhen::Decoded][early]);
        let advanced =
            replica.advance(publisher.run(), "policy", Version(version + 1), None).expect("a version");
        changed = advanced.changed;
        let took = (advanced.journal + advanced.offer).as_secs_f64() * 1e3;
        if version == 0 {
            first = took
        } else {
            offered[early].push(took)
        }
        replica.sync().expect("a disk");
    }
    let ends = |times: &[f64]| {
        times.iter().fold((f64::MAX, 0.0f64), |(low, high), time| (low.min(*time), high.max(*time)))
    };
    println!("  {:.1} M changes: first {first:.0} ms", changed as f64 / 1e6);
    let [durable, decoded] = offered.map(|times| {
        let (low, high) = ends(&times);
        (median(times), low, high)
    });
    for (name, (median, low, high)) in [("durable", durable), ("decoded", decoded)] {
        println!("  {name}: {median:.1} ms ({low:.1} to {high:.1})");
    }
    println!("  durable / decoded: {:.2}", durable.0 / decoded.0);
}

/// A directory in memory in which a plugin seems to be.
fn plugin_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir_in("/dev/shm").expect("shared memory");
    let own = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(dir.path(), own).expect("an own directory");
    std::fs::write(dir.path().join("rank-1-0.json"), "{}").expect("space");
    dir
}
