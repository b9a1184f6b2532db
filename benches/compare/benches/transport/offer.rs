//! A version on its way to engines that patch their weights: from the call until the delta is offered to their
//! plugins, with the journal durable.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use driftless_store::{Disk, Store};
use driftless_transport::publish::Profile;
use driftless_transport::{Replica, Version};

use crate::model::{self, begin, directory, pairs, publish};
use crate::{Options, median};

/// Prints the first time, which makes the files that later deltas are written over, and the median of the rest.
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
    replica.offer_first();
    let (mut journals, mut changed) = (Vec::new(), 0);
    for version in 1..=options.repeat as u64 + 1 {
        publish(&mut publisher, &if version % 2 == 1 { model::new(&pairs) } else { model::base(&pairs) });
        publisher.wait().expect("a baseline");
        let advanced = replica.advance(publisher.run(), "policy", Version(version), None).expect("a version");
        changed = advanced.changed;
        journals.push(advanced.journal.as_secs_f64() * 1e3);
        replica.sync().expect("a disk");
    }
    let first = journals.remove(0);
    let later = median(journals);
    println!("  {:.1} M changes: first {first:.0} ms, then {later:.0} ms", changed as f64 / 1e6);
}

/// A directory in memory in which a plugin seems to be.
fn plugin_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir_in("/dev/shm").expect("shared memory");
    let own = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(dir.path(), own).expect("an own directory");
    std::fs::write(dir.path().join("rank-1-0.json"), "{}").expect("space");
    dir
}
