//! Into an engine, HTTP included.

use std::path::Path;
use std::time::Instant;

use driftless_bridge::ClientOptions;
use driftless_bridge::push::nccl::{Group, GroupOptions, NcclOptions, NcclRoot};
use driftless_bridge::push::{Member, Push as _, Pushed};
use driftless_bridge::sglang::{Capabilities, Client, DiskUpdate, RankChecksums};
use driftless_transport::{Checkpoint, Snapshot};
use tokio::runtime::Runtime;

use crate::memory::Arena;
use crate::python::{Python, nccl};
use crate::{TURNS, check_environment, median};

/// Bucket budgets: all in one, and what an engine has to spare.
const BUDGETS: [(&str, u64); 2] = [("one bucket", u64::MAX), ("1 GiB buckets", 1 << 30)];

struct Engine {
    runtime: Runtime,
    client: Client,
}

impl Engine {
    /// Loads a checkpoint from disk; the cache was not asked to be flushed, so nothing can end the server.
    fn load(&self, directory: &Path) -> f64 {
        let begin = Instant::now();
        let update = DiskUpdate {
            model_path: directory.into(),
            load_format: None,
            weight_version: None,
            flush_cache: false,
            only: None,
        };
        self.runtime.block_on(self.client.update_weights_from_disk(&update)).unwrap();
        begin.elapsed().as_secs_f64()
    }

    fn sums(&self) -> Vec<RankChecksums> {
        self.runtime.block_on(self.client.checksums()).unwrap()
    }
}

pub(crate) fn run(python: &str, url: &str, a: &Path, b: &Path) {
    check_environment();
    let (library, version) = nccl(python);
    let client = Client::new(url, ClientOptions::default()).unwrap();
    let engine = Engine { runtime: Runtime::new().unwrap(), client };
    let capabilities = engine.runtime.block_on(Capabilities::probe(&engine.client)).unwrap();
    let server = engine.runtime.block_on(engine.client.server_info()).unwrap();
    let checkpoints = [a, b].map(|directory| Checkpoint::open(directory).unwrap());
    let bytes: u64 = checkpoints[0].tensors().iter().map(|info| info.byte_len().unwrap()).sum();
    println!(
        "SGLang {}, NCCL {version:?}, {bytes} bytes in {} tensors; medians of {TURNS} turns (least to most)",
        server.version.unwrap_or_default(),
        checkpoints[0].tensors().len()
    );
    let mut disk = Vec::new();
    let loaded = [a, b].map(|directory| {
        disk.push(engine.load(directory));
        engine.sums()
    });
    assert_ne!(loaded[0], loaded[1], "two checkpoints of different weights");
    println!("loaded from disk in {:.3} and {:.3} s", disk[0], disk[1]);

    let arenas = checkpoints.each_ref().map(|checkpoint| Arena::upload(checkpoint));
    let mut options = NcclOptions::new(library);
    options.version = Some(version);
    let member = Member { engine: engine.client.clone(), ranks: 1, sessions: capabilities.sessions };
    let mut groups = BUDGETS.map(|(_, budget)| {
        let mut of_group = GroupOptions::new("127.0.0.1");
        of_group.name = format!("bench-{budget}");
        of_group.bucket_bytes = budget;
        let mut group = Group::new(NcclRoot::open(&options).unwrap(), of_group).unwrap();
        group.set_members(vec![member.clone()], false);
        group
    });
    let mut torch = Python::start(python, "torch_root.py", &[url, &path(a), &path(b)]);
    assert_eq!(torch.answer(), "in the group");

    let check = |what: &str, which: usize| {
        let equal = engine.sums() == loaded[which];
        println!("{what}: checksums {} those of the disk load", if equal { "equal" } else { "DIFFER FROM" });
        assert!(equal);
    };
    // The first pushes join and allocate; each changes every weight, and is compared.
    for (n, group) in groups.iter_mut().enumerate() {
        report("first push", push(group, &arenas[n]));
        check(BUDGETS[n].0, n);
        report("from host memory", push(group, &checkpoints[1 - n]));
        check("from host memory", 1 - n);
    }
    println!("torch's first push: {} s", torch.ask("push 0 0"));
    check("torch", 0);

    for (n, (name, budget)) in BUDGETS.into_iter().enumerate() {
        let (mut ours, mut theirs, mut host) = (Vec::new(), Vec::new(), Vec::new());
        let torch_budget = if budget == u64::MAX { 0 } else { budget };
        for turn in 0..TURNS {
            ours.push(push(&mut groups[n], &arenas[turn % 2]).took.as_secs_f64());
            theirs.push(torch.ask(&format!("push {} {torch_budget}", (turn + 1) % 2)).parse().unwrap());
            host.push(push(&mut groups[n], &checkpoints[turn % 2]).took.as_secs_f64());
        }
        check(name, (TURNS - 1) % 2);
        let rates = [ours, theirs, host].map(|times| median(rate(bytes, times)));
        for (who, (middle, least, most)) in ["ours", "torch", "ours, from host memory"].into_iter().zip(rates)
        {
            println!("{name:<14} {who:<24} {middle:6.1} GB/s ({least:.1} to {most:.1})");
        }
        println!("{name:<14} ours / torch {:.3}", rates[0].0 / rates[1].0);
    }
    for group in &mut groups {
        group.dissolve().unwrap();
    }
    engine.runtime.block_on(engine.client.health()).unwrap();
    println!("the engine is healthy");
}

fn push(group: &mut Group<NcclRoot>, weights: &dyn Snapshot) -> Pushed {
    group.push(weights, Some("bench")).unwrap()
}

fn report(what: &str, pushed: Pushed) {
    println!("{what}: {:.3} s, {} calls", pushed.took.as_secs_f64(), pushed.buckets);
}

fn rate(bytes: u64, times: Vec<f64>) -> Vec<f64> {
    times.into_iter().map(|seconds| bytes as f64 / seconds / 1e9).collect()
}

fn path(directory: &Path) -> String {
    directory.to_string_lossy().into_owned()
}
