//! The command as a script uses it: publish, follow, delta, inspect, with `--json` and exit codes. No engine,
//! no libtorch.

#![allow(clippy::expect_used, reason = "a test ends where its set-up fails")]

mod answers;
mod atif;
#[path = "../common/mod.rs"]
mod common;
mod coordinated;
mod dashboard;
mod data;
mod doctor;
mod examples;
mod files;
mod gateway;
mod init;
mod interrupted;
mod log;
mod logs;
mod mcp;
mod mistakes;
mod odd_files;
mod pipes;
mod prompts;
mod repair;
mod serving;
mod shown;
mod signed;
mod status;
mod surface;
mod terminal;
mod top;
mod trace;
mod tried;
mod verify;
mod vllm;

use common::{code, driftless, json, output, run};
use driftless_testkit::tree::tree;
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::snapshot::{AuxFile, TensorInfo};
use driftless_transport::{Checkpoint, Dtype, Result, Snapshot};
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A checkpoint made of numbers: two bf16 matrices and an f32 vector.
struct Made {
    tensors: Vec<TensorInfo>,
    bytes: Vec<Vec<u8>>,
    files: Vec<AuxFile>,
}

impl Made {
    fn new() -> Made {
        let info =
            |name: &str, dtype, shape: &[u64]| TensorInfo { name: name.into(), dtype, shape: shape.into() };
        let tensors = vec![
            info("a.weight", Dtype::Bf16, &[300, 256]),
            info("b.weight", Dtype::Bf16, &[64, 64]),
            info("c.bias", Dtype::F32, &[64]),
        ];
        let bytes =
            tensors.iter().map(|tensor| weights(tensor.byte_len().expect("small") as usize)).collect();
        let files =
            vec![AuxFile::new("config.json", b"{\"model_type\": \"test\"}".to_vec()).expect("a name")];
        Made { tensors, bytes, files }
    }

    /// Every `stride`-th element of the first tensor moves by one unit in the last place.
    fn step(&mut self, stride: usize) {
        for byte in self.bytes[0].iter_mut().step_by(2 * stride) {
            *byte ^= 1;
        }
    }

    fn write(&self, dir: &Path) -> PathBuf {
        write_checkpoint(dir, self, 1 << 30).expect("a checkpoint");
        dir.to_path_buf()
    }
}

impl Snapshot for Made {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        Ok(Cow::Borrowed(&self.bytes[index]))
    }

    fn files(&self) -> &[AuxFile] {
        &self.files
    }
}

/// Bytes that look like small weights: exponents near zero, mantissas that vary.
fn weights(length: usize) -> Vec<u8> {
    (0..length).map(|i| if i % 2 == 1 { 0x3c } else { (i * 37 % 251) as u8 }).collect()
}

/// A store, a run in it, and where its baseline is kept.
struct Run {
    dir: tempfile::TempDir,
    made: Made,
    published: u32,
}

impl Run {
    fn new() -> Run {
        Run { dir: tempfile::tempdir().expect("a directory"), made: Made::new(), published: 0 }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, name: &str) -> Command {
        let mut command = driftless();
        command.arg(name).args(["--run", "test", "--store"]).arg(self.path("store"));
        command
    }

    /// Publishes the checkpoint as it is and returns what the command reported.
    fn publish(&mut self) -> serde_json::Value {
        self.publish_with(|command| command)
    }

    fn publish_with(&mut self, more: impl FnOnce(&mut Command) -> &mut Command) -> serde_json::Value {
        let checkpoint = self.made.write(&self.path("checkpoint"));
        let mut command = self.command("publish");
        command.arg("--checkpoint").arg(checkpoint).arg("--baseline-dir").arg(self.path("baseline"));
        command.arg(if self.published == 0 { "--new-run" } else { "--resume" });
        self.published += 1;
        json(more(&mut command))
    }

    fn follow_once(&self) -> Command {
        let mut command = self.command("follow");
        command.args(["--once", "--id", "host", "--checkpoint-dir"]).arg(self.path("host"));
        command
    }

    /// A follower that shall push over NCCL, with this library.
    fn follow_nccl(&self, library: &str) -> Command {
        let mut command = self.follow_once();
        command.args([
            "--engine",
            "127.0.0.1:1",
            "--update-weight-transport",
            "nccl",
            "--nccl-library",
            library,
        ]);
        command
    }

    fn assert_host_is_current(&self) {
        let host = Checkpoint::open(self.path("host")).expect("a checkpoint");
        assert_eq!(host.tensors(), self.made.tensors());
        for index in 0..self.made.bytes.len() {
            assert!(host.bytes(index).expect("bytes") == self.made.bytes[index], "tensor {index}");
        }
        assert_eq!(host.files(), self.made.files());
    }
}

#[test]
fn followers_of_one_host_have_leases_of_their_own() {
    let mut run = Run::new();
    run.publish();
    for dir in ["one", "other", "one"] {
        json(run.command("follow").args(["--once", "--checkpoint-dir"]).arg(run.path(dir)));
    }
    let shown = json(&mut run.command("inspect"));
    let followers = shown["followers"].as_array().expect("followers");
    assert_eq!(followers.len(), 2, "{shown}");
    assert!(followers.iter().all(|follower| follower["version"] == 0 && follower["live"] == true), "{shown}");
}

#[test]
fn a_host_follows_what_a_script_publishes() {
    let mut run = Run::new();
    let first = run.publish();
    assert_eq!((&first["version"], &first["anchor"]), (&0.into(), &true.into()));
    let status = json(&mut run.follow_once());
    assert_eq!(status["applied"]["version"], 0);
    run.assert_host_is_current();

    run.made.step(100);
    let second = run.publish();
    assert_eq!(second["version"], 1);
    assert!(second["publication_bytes"].as_u64() < Some(second["full_bytes"].as_u64().expect("bytes") / 10));
    json(&mut run.follow_once());
    run.assert_host_is_current();

    let chain = json(&mut run.command("inspect"));
    let kinds: Vec<_> =
        chain["chain"].as_array().expect("a chain").iter().map(|link| &link["kind"]).collect();
    assert_eq!(kinds, ["full", "delta"]);
    let manifest = json(run.command("inspect").args(["--version", "1"]));
    assert_eq!(manifest["run_id"], chain["run_id"]);
    let runs = json(driftless().args(["inspect", "--store"]).arg(run.path("store")));
    assert_eq!(runs[0]["newest"], 1);
}

#[test]
fn a_dry_run_touches_nothing_and_a_last_version_is_kept_to() {
    let mut run = Run::new();
    run.publish();
    run.made.step(100);
    run.publish();
    let first = Made { bytes: run.made.bytes.clone(), ..Made::new() };
    run.made.step(10);
    run.publish();
    let dry = |run: &Run| json(run.follow_once().arg("--dry-run"));
    let before = tree(run.dir.path());
    let plan = dry(&run);
    assert_eq!((&plan["from"], &plan["to"]), (&serde_json::Value::Null, &2.into()));
    assert_eq!(plan["versions"].as_array().expect("links").len(), 3);
    assert_eq!(tree(run.dir.path()), before, "neither the store nor the host's directory is touched");

    let newest = std::mem::replace(&mut run.made, first);
    let status = json(run.follow_once().args(["--until-version", "1"]));
    assert_eq!((&status["applied"]["version"], &status["newest"]), (&1.into(), &2.into()));
    run.assert_host_is_current();
    let before = tree(run.dir.path());
    let plan = dry(&run);
    assert_eq!((&plan["from"], &plan["to"], &plan["objects"]), (&1.into(), &2.into(), &1.into()));
    assert_eq!(tree(run.dir.path()), before);
    // Without --once it ends by itself when the version is there.
    let mut follow = run.command("follow");
    follow.args(["--id", "host", "--until-version", "2", "--checkpoint-dir"]).arg(run.path("host"));
    let status = json(&mut follow);
    assert_eq!(status["applied"]["bytes"], plan["bytes"]);
    run.made = newest;
    run.assert_host_is_current();
}

#[test]
fn old_versions_are_collected_and_hosts_find_their_way() {
    let mut run = Run::new();
    for _ in 0..3 {
        run.publish();
        run.made.step(50);
    }
    json(&mut run.follow_once());
    // Version 3 is an anchor; the follower stays at version 2.
    let publish = |run: &mut Run, more: &[&str]| {
        let checkpoint = run.made.write(&run.path("checkpoint"));
        let mut command = run.command("publish");
        command.arg("--checkpoint").arg(checkpoint).arg("--baseline-dir").arg(run.path("baseline"));
        json(command.arg("--resume").args(more))
    };
    assert_eq!(publish(&mut run, &["--anchor-every", "3"])["anchor"], true);
    let told = json(run.command("gc").arg("--dry-run"));
    assert_eq!((&told["newest"], &told["anchor"], &told["floor"]), (&3.into(), &3.into(), &2.into()));
    assert_eq!((&told["leases"][0]["follower"], &told["leases"][0]["live"]), (&"host".into(), &true.into()));
    let done = json(&mut run.command("gc"));
    assert_eq!(done["removed"], told["removed"]);
    let removed: Vec<_> = done["removed"].as_array().expect("a list").iter().map(|r| &r["version"]).collect();
    assert_eq!(removed, [0, 1]);
    // The host was lost for good; a lease of no duration has run out.
    let done = json(run.command("gc").args(["--lease-ttl", "0"]));
    assert_eq!((&done["floor"], &done["leases"][0]["live"]), (&3.into(), &false.into()));
    let chain = json(&mut run.command("inspect"));
    let kinds: Vec<_> =
        chain["chain"].as_array().expect("a chain").iter().map(|link| &link["kind"]).collect();
    assert_eq!((&chain["oldest"], kinds), (&3.into(), vec![&"delta".into()]));
    run.made.step(50);
    publish(&mut run, &["--keep", "1"]);
    json(&mut run.follow_once());
    run.assert_host_is_current();
    let output = output(&mut run.command("gc"));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("newest version 4") && text.contains("0 bytes removed"), "{text}");
}

#[test]
fn publish_resume_or_new_begins_a_run_and_goes_on() {
    let mut run = Run::new();
    for version in 0..2 {
        run.made.step(100);
        let checkpoint = run.made.write(&run.path("checkpoint"));
        let mut publish = run.command("publish");
        publish.arg("--resume-or-new").arg("--checkpoint").arg(checkpoint);
        let shown = json(publish.arg("--baseline-dir").arg(run.path("baseline")));
        assert_eq!(shown["version"], version);
    }
    json(&mut run.follow_once());
    run.assert_host_is_current();
}

#[test]
fn ranks_publish_a_version_together() {
    let run = Run::new();
    let whole = Made::new();
    // Rank 0 has the first half of every tensor's rows and rank 1 the rest, except for what cannot be halved.
    let command = |rank: u32, attempt: &str, made: &Made, places: &serde_json::Value| {
        let checkpoint = made.write(&run.path(&format!("rank-{rank}")));
        let slices = run.path(&format!("slices-{rank}.json"));
        std::fs::write(&slices, places.to_string()).expect("writable");
        let mut command = run.command("publish");
        command.args(["--new-run", "--ranks", "2", "--attempt", attempt, "--join-deadline", "60"]);
        command
            .args(["--rank", &rank.to_string(), "--slices"])
            .arg(slices)
            .arg("--checkpoint")
            .arg(checkpoint);
        command.arg("--baseline-dir").arg(run.path(&format!("baseline-{rank}")));
        command
    };
    let halves = [0, 1].map(|rank| half(&whole, rank));
    std::thread::scope(|scope| {
        for rank in [1u32, 0] {
            let (made, places) = &halves[rank as usize];
            let mut command = command(rank, "one", made, places);
            scope.spawn(move || common::run(&mut command));
        }
    });
    json(&mut run.follow_once());
    run.assert_host_is_current();
    // Rank 1 does not come: rank 0 says so.
    let (made, places) = &halves[0];
    let mut alone = run.command("publish");
    let checkpoint = made.write(&run.path("rank-0"));
    std::fs::write(run.path("slices-0.json"), places.to_string()).expect("writable");
    alone.args([
        "--resume",
        "--rank",
        "0",
        "--ranks",
        "2",
        "--attempt",
        "two",
        "--join-deadline",
        "0",
        "--slices",
    ]);
    alone.arg(run.path("slices-0.json")).arg("--checkpoint").arg(checkpoint);
    let (status, error) = code(alone.arg("--baseline-dir").arg(run.path("baseline-0")));
    assert_eq!(status, Some(4), "{error}");
    assert!(error.contains("ranks [1]"), "{error}");
}

/// What a rank of two has of a checkpoint: half of each tensor's elements, and where they lie.
fn half(whole: &Made, rank: usize) -> (Made, serde_json::Value) {
    let mut half = Made { bytes: Vec::new(), tensors: Vec::new(), files: whole.files.clone() };
    let mut places = serde_json::Map::new();
    for (info, bytes) in whole.tensors.iter().zip(&whole.bytes) {
        let elements = info.elements().expect("a size");
        let middle = elements / 2;
        let (start, end) = if rank == 0 { (0, middle) } else { (middle, elements) };
        let size = info.dtype.size();
        half.bytes.push(bytes[(start * size) as usize..(end * size) as usize].to_vec());
        half.tensors.push(TensorInfo { shape: vec![end - start], ..info.clone() });
        places.insert(info.name.clone(), serde_json::json!({"shape": info.shape, "start": start}));
    }
    (half, places.into())
}

#[test]
fn a_lost_baseline_is_rebuilt_from_the_store() {
    let mut run = Run::new();
    run.publish();
    run.made.step(10);
    run.publish();
    std::fs::remove_dir_all(run.path("baseline")).expect("the baseline was there");
    run.made.step(7);
    assert_eq!(run.publish()["anchor"], false, "a delta, against the rebuilt baseline");
    json(&mut run.follow_once());
    run.assert_host_is_current();
}

#[test]
fn damage_in_the_store_ends_with_3_and_leaves_the_host_alone() {
    let mut run = Run::new();
    run.publish();
    json(&mut run.follow_once());
    let before = Made { bytes: run.made.bytes.clone(), ..Made::new() };
    run.made.step(10);
    run.publish();
    let object = newest_object(&run.path("store"));
    let mut bytes = std::fs::read(&object).expect("an object");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    std::fs::write(&object, bytes).expect("writable");
    let (status, error) = code(&mut run.follow_once());
    assert_eq!(status, Some(3), "{error}");
    assert!(error.contains("v0000000001"), "the object is named: {error}");
    run.made = before;
    run.assert_host_is_current();
}

/// The object of version 1; it has one.
fn newest_object(store: &Path) -> PathBuf {
    let mut found = Vec::new();
    let mut directories = vec![store.to_path_buf()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                directories.push(path);
            } else if path.to_string_lossy().contains("v0000000001") && !path.ends_with("manifest") {
                found.push(path);
            }
        }
    }
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

#[test]
fn a_delta_file_carries_one_checkpoint_to_the_next() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path();
    let mut made = Made::new();
    let base = made.write(&dir.join("base"));
    made.step(50);
    let new = made.write(&dir.join("new"));
    let file = dir.join("step.delta");
    let encoded = json(driftless().args(["delta", "encode"]).args([&base, &new]).arg("-o").arg(&file));
    let stat = json(driftless().args(["delta", "stat"]).arg(&file));
    assert_eq!(encoded["changed"], stat["changed"]);
    assert_eq!(stat["changed"], 300 * 256 / 50);
    run(driftless().args(["delta", "apply"]).args([&base, &file]).arg("-o").arg(dir.join("applied")));
    let (applied, new) = (dir.join("applied/model.safetensors"), new.join("model.safetensors"));
    assert!(std::fs::read(&applied).expect("a file") == std::fs::read(new).expect("a file"));
    let verify = |new: &Path| {
        let mut command = driftless();
        command.args(["delta", "verify"]).args([&base, &file]).arg(new);
        command
    };
    assert_eq!(json(&mut verify(&dir.join("applied")))["tensors"], stat["tensors"]);
    // One bit of the data, which begins behind the header, is enough to be found, and named.
    let mut damaged = std::fs::read(&applied).expect("a file");
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    std::fs::write(&applied, &damaged).expect("a file");
    let (status, said) = code(&mut verify(&dir.join("applied")));
    assert_eq!(status, Some(3));
    assert!(said.contains("tensor `") && said.contains("block 0"), "{said}");
    // Applied to another base it has to refuse, with the code for foreign data.
    let mut other = driftless();
    other.args(["delta", "apply"]).args([&dir.join("new"), &file]).arg("-o").arg(dir.join("x"));
    assert_eq!(code(&mut other).0, Some(3));
    assert!(!dir.join("x").exists());
}

/// What slime's trainer would write, and its receivers would read.
#[test]
fn a_host_follows_slimes_layout_and_refuses_another_run() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path();
    let mut made = Made::new();
    let start = made.write(&dir.join("start"));
    let slime = |name: &str| {
        let mut command = driftless();
        command.args([name, "--layout", "slime", "--store"]).arg(dir.join("deltas"));
        command
    };
    let publish = |from: &Path, baseline: &str| {
        let mut command = slime("publish");
        command.arg("--checkpoint").arg(from).arg("--baseline-dir").arg(dir.join(baseline));
        command
    };
    let follow = || {
        let mut command = slime("follow");
        command.arg("--hf-checkpoint").arg(dir.join("start")).arg("--checkpoint-dir").arg(dir.join("host"));
        command.arg("--once");
        command
    };
    assert_eq!(json(publish(&start, "baseline").arg("--new-run"))["version"], 0);
    for version in 1..=2 {
        made.step(10 * version);
        let next = made.write(&dir.join("next"));
        let published = json(publish(&next, "baseline").args(["--resume", "--delta-encoding", "overwrite"]));
        assert_eq!(published["version"], version);
        let before = tree(dir);
        let plan = json(follow().arg("--dry-run"));
        assert_eq!((&plan["to"], &plan["objects"]), (&version.into(), &1.into()), "{plan}");
        assert!(tree(dir) == before, "a dry run touches nothing");
        let status = json(&mut follow());
        assert_eq!(status["applied"]["label"], published["label"]);
    }
    let host = Checkpoint::open(dir.join("host")).expect("a checkpoint");
    assert!(host.bytes(0).expect("bytes") == made.bytes[0]);

    // A trainer that starts again empties its directory and counts from 1.
    std::fs::remove_dir_all(dir.join("deltas")).expect("it was there");
    json(publish(&start, "again").arg("--new-run"));
    made.step(3);
    let next = made.write(&dir.join("next"));
    json(publish(&next, "again").arg("--resume"));
    let (status, error) = code(follow().args(["--offer", "decoded"]));
    assert_eq!(status, Some(2), "{error}");
    assert!(error.contains("--offer") && error.contains("durable"), "{error}");
    for also in [&[][..], &["--dry-run"]] {
        let (status, error) = code(follow().args(also));
        assert_eq!(status, Some(3), "{error}");
        assert!(error.contains("belongs to run"), "{error}");
    }

    let (refused, _) = code(publish(&next, "again").args(["--resume", "--mode", "full"]));
    assert_eq!(refused, Some(2));
}

#[test]
fn errors_have_their_documented_codes() {
    let dir = tempfile::tempdir().expect("a directory");
    let code = |command: &mut Command| code(command).0;
    let garbage = dir.path().join("garbage");
    std::fs::write(&garbage, b"not a delta at all").expect("a file");
    assert_eq!(code(driftless().args(["delta", "stat"]).arg(&garbage)), Some(3));
    assert_eq!(code(driftless().args(["inspect", "--manifest"]).arg(&garbage)), Some(3));
    assert_eq!(code(driftless().args(["publish", "--store"]).arg(dir.path())), Some(2));
    let mut missing = driftless();
    missing.args(["follow", "--once", "--run", "none", "--store"]).arg(dir.path());
    missing.arg("--checkpoint-dir").arg(dir.path().join("host"));
    assert_eq!(code(&mut missing), Some(1));
}

#[test]
fn without_nccl_a_follower_says_what_it_looked_for() {
    let run = Run::new();
    let (status, said) = code(&mut run.follow_nccl("/nowhere/libnccl.so.2"));
    assert_eq!(status, Some(1), "{said}");
    assert!(
        said.contains("/nowhere/libnccl.so.2") && said.contains("site-packages/nvidia/nccl/lib"),
        "{said}"
    );
    let (status, _) = code(run.follow_nccl("libc.so.6").arg("--nccl-version").arg("2.28"));
    assert_eq!(status, Some(2), "two numbers are no version");
}
