//! Into an engine on the same GPU, through memory that it opens.

use std::path::Path;
use std::time::Instant;

use cudarc::driver::result;
use driftless_bridge::ClientOptions;
use driftless_bridge::push::colocate::{Colocation, ColocationOptions, CudaShare};
use driftless_bridge::push::{Member, Push};
use driftless_bridge::sglang::{Capabilities, Client, DiskUpdate};
use driftless_transport::{Checkpoint, Snapshot};

use crate::median;
use crate::memory::Arena;

/// Pushes after the first two, which allocate on the engine's side.
const PUSHES: usize = 24;

pub(crate) fn run(url: &str, a: &Path, b: &Path) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let client = Client::new(url, ClientOptions::default()).unwrap();
    let checkpoints = [a, b].map(|directory| Checkpoint::open(directory).unwrap());
    let arenas = checkpoints.each_ref().map(|checkpoint| Arena::upload(checkpoint));
    let bytes: u64 = checkpoints[0].tensors().iter().map(|info| info.byte_len().unwrap()).sum();
    for (name, bucket_bytes) in [("one bucket", u64::MAX), ("1 GiB buckets", 1 << 30)] {
        let options = ColocationOptions::default().with_bucket_bytes(bucket_bytes);
        let mut push = Colocation::new(CudaShare::open(0).unwrap(), options).unwrap();
        println!(
            "{name}, {bytes} bytes in {} tensors, device {}",
            checkpoints[0].tensors().len(),
            push.share().uuid()
        );
        let server = runtime.block_on(client.server_info()).unwrap();
        push.admit(url, &server).unwrap();
        let capabilities = runtime.block_on(Capabilities::probe(&client)).unwrap();
        let member = Member { engine: client.clone(), ranks: 1, sessions: capabilities.sessions };
        push.set_members(vec![member], false);
        push.form().unwrap();
        let sums = [a, b].map(|directory| {
            let begin = Instant::now();
            let (model_path, load_format) = (directory.into(), None);
            let update =
                DiskUpdate { model_path, load_format, weight_version: None, flush_cache: false, only: None };
            runtime.block_on(client.update_weights_from_disk(&update)).unwrap();
            println!("loaded from disk in {:.3} s", begin.elapsed().as_secs_f64());
            runtime.block_on(client.checksums()).unwrap()
        });
        assert_ne!(sums[0], sums[1], "two checkpoints of different weights");
        let (mut device, mut host, mut free) = (Vec::new(), Vec::new(), Vec::new());
        for turn in 0..PUSHES + 2 {
            let which = turn % 2;
            let from_host = turn % 8 >= 6;
            let weights: &dyn Snapshot = if from_host { &checkpoints[which] } else { &arenas[which] };
            let pushed = push.push(weights, Some("bench")).unwrap();
            let found = runtime.block_on(client.checksums()).unwrap();
            assert!(found == sums[which], "push {turn}: other checksums than after a disk load");
            let seconds = pushed.took.as_secs_f64();
            if turn == 0 {
                println!("first push: {seconds:.3} s, {} calls", pushed.buckets);
            } else if from_host {
                host.push(bytes as f64 / seconds / 1e9);
            } else {
                device.push(bytes as f64 / seconds / 1e9);
            }
            free.push(result::mem_get_info().unwrap().0);
        }
        println!("{} pushes: checksums equal those of the disk loads", PUSHES + 2);
        for (from, rates) in [("the device", device), ("host memory", host)] {
            let (middle, least, most) = median(rates);
            println!("from {from}: {middle:.1} GB/s ({least:.1} to {most:.1})");
        }
        let (early, late) = (free[2], free[PUSHES + 1]);
        println!("free memory of the device after push 2 and the last: {early} and {late} bytes");
        assert!(late >= early, "memory grew");
    }
    runtime.block_on(client.health()).unwrap();
    println!("the engine is healthy");
}
