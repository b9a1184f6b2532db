//! Deltas in the memory of models whose layouts are of every kind, against an oracle that copies element by
//! element.

#![allow(unsafe_code, reason = "layouts are made of the addresses of buffers")]

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use driftless_transport::Dtype;
use driftless_transport::prepared::{PreparedTensor, PreparedVersion, checksum};
use driftless_transport::snapshot::TensorInfo;
use serde_json::json;

use super::part::{BLOCK_CHANGES, ONE_IN};
use super::*;

mod layouts;

/// A tensor of the checkpoint: its name, dtype and shape.
pub(super) const TENSORS: [(&str, Dtype, &[u64]); 7] = [
    ("embed", Dtype::Bf16, &[96, 64]),
    ("q", Dtype::Bf16, &[64, 64]),
    ("k", Dtype::Bf16, &[32, 64]),
    ("scale", Dtype::F32, &[40]),
    ("fp8", Dtype::F8E4M3, &[50, 30]),
    ("experts", Dtype::F64, &[4, 6, 10]),
    ("wide", Dtype::Bf16, &[20 * BLOCK_CHANGES]),
];

/// A view of a tensor in a storage: both indices, sizes, and offset and strides of both.
pub(super) type View = (usize, usize, &'static [u64], (u64, &'static [u64]), (u64, &'static [u64]));

/// Storages' elements, and what is where: whole tensors, two in one, a padded one, a shard of rows, one of
/// columns, transposed and permuted ones, and one under two names.
pub(super) const STORAGES: [(Dtype, u64); 12] = [
    (Dtype::Bf16, 128 * 64),
    (Dtype::Bf16, 96 * 64),
    (Dtype::Bf16, 96 * 64),
    (Dtype::F32, 40),
    (Dtype::F8E4M3, 50 * 15),
    (Dtype::F8E4M3, 30 * 50),
    (Dtype::F64, 4 * 6 * 10),
    (Dtype::Bf16, 48 * 64),
    (Dtype::Bf16, 20 * BLOCK_CHANGES),
    (Dtype::F32, 100 * 64),
    (Dtype::Bf16, 64 * 64),
    (Dtype::F32, 20 * BLOCK_CHANGES),
];
pub(super) const VIEWS: [View; 13] = [
    (0, 0, &[96, 64], (0, &[64, 1]), (0, &[64, 1])),
    (0, 1, &[96, 64], (0, &[64, 1]), (0, &[64, 1])),
    (1, 2, &[64, 64], (0, &[64, 1]), (0, &[64, 1])),
    (2, 2, &[32, 64], (0, &[64, 1]), (64 * 64, &[64, 1])),
    (3, 3, &[40], (0, &[1]), (0, &[1])),
    (4, 4, &[50, 15], (15, &[30, 1]), (0, &[15, 1])),
    (4, 5, &[30, 50], (0, &[1, 30]), (0, &[50, 1])),
    (5, 6, &[4, 6, 10], (0, &[60, 10, 1]), (0, &[10, 40, 1])),
    (0, 7, &[48, 64], (48 * 64, &[64, 1]), (0, &[64, 1])),
    (6, 8, &[20 * BLOCK_CHANGES], (0, &[1]), (0, &[1])),
    (0, 9, &[96, 64], (0, &[64, 1]), (4 * 64, &[64, 1])),
    (1, 10, &[64, 64], (0, &[1, 64]), (0, &[64, 1])),
    (6, 11, &[20 * BLOCK_CHANGES], (0, &[1]), (0, &[1])),
];

/// What the storages from 9 on have instead of a bf16 value: itself in f32, one more, and itself in f32 again.
const MADE: [fn(u16) -> Vec<u8>; 3] = [in_f32, one_more, in_f32];

fn in_f32(value: u16) -> Vec<u8> {
    (u32::from(value) << 16).to_ne_bytes().to_vec()
}

/// In bf16, rounded to even: of most small values 1.
fn one_more(value: u16) -> Vec<u8> {
    let sum = (f32::from_bits(u32::from(value) << 16) + 1.0).to_bits();
    ((sum + 0x7fff + (sum >> 16 & 1)) >> 16).to_ne_bytes()[..2].to_vec()
}

/// The table of each of them.
fn tables() -> Vec<Vec<u8>> {
    MADE.iter().map(|made| (0..=u16::MAX).flat_map(made).collect()).collect()
}

pub(super) fn infos() -> Vec<TensorInfo> {
    let info = |(name, dtype, shape): &(&str, Dtype, &[u64])| TensorInfo {
        name: (*name).into(),
        dtype: *dtype,
        shape: shape.to_vec(),
    };
    TENSORS.iter().map(info).collect()
}

fn copies(tables: &[Vec<u8>]) -> Vec<LiveCopy> {
    let table = |table: &Vec<u8>| LiveTable { address: table.as_ptr() as u64, bytes: table.len() as u64 };
    let strides = |(offset, strides): (u64, &[u64])| Strides { offset, strides: strides.to_vec() };
    let copy = |&(tensor, live, size, from, to): &View| LiveCopy {
        tensor,
        live,
        size: size.to_vec(),
        from: strides(from),
        to: strides(to),
        table: live.checked_sub(9).map(|number| table(&tables[number])),
    };
    VIEWS.iter().map(copy).collect()
}

/// What a load makes of a version.
fn load(version: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut out: Vec<_> = STORAGES.iter().map(|(dtype, n)| vec![0; (n * dtype.size()) as usize]).collect();
    for (tensor, live, size, from, to) in VIEWS {
        let width = TENSORS[tensor].1.size();
        for number in 0..size.iter().product() {
            let (mut rest, mut source, mut target) = (number, from.0, to.0);
            for (extent, (from, to)) in size.iter().zip(from.1.iter().zip(to.1)).rev() {
                source += rest % extent * from;
                target += rest % extent * to;
                rest /= extent;
            }
            let element =
                version[tensor][(source * width) as usize..((source + 1) * width) as usize].to_vec();
            let element = match live.checked_sub(9) {
                None => element,
                Some(number) => MADE[number](u16::from_ne_bytes([element[0], element[1]])),
            };
            let start = target as usize * element.len();
            out[live][start..start + element.len()].copy_from_slice(&element);
        }
    }
    out
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// A model, a directory of plugins, and what a follower would put there.
pub(super) struct Scene {
    pub(super) shared: Shared,
    pub(super) live: Vec<Vec<u8>>,
    pub(super) versions: Vec<Vec<Vec<u8>>>,
    random: Random,
    tried: BTreeMap<String, Tried>,
    _dir: tempfile::TempDir,
    _tables: Vec<Vec<u8>>,
    pub(super) patches: usize,
}

impl Scene {
    pub(super) fn new(memory: impl FnOnce(&Layout) -> Box<dyn Memory>) -> Self {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let size = |info: &TensorInfo| info.byte_len().unwrap() as usize;
        let first: Vec<Vec<u8>> =
            infos().iter().map(|info| (0..size(info)).map(|_| random.next() as u8).collect()).collect();
        let mut live = load(&first);
        let storage = |(bytes, (dtype, _)): (&mut Vec<u8>, &(Dtype, u64))| LiveTensor {
            name: "storage".into(),
            dtype: *dtype,
            address: bytes.as_mut_ptr() as u64,
            bytes: bytes.len() as u64,
        };
        let storages = live.iter_mut().zip(&STORAGES).map(storage).collect();
        let tables = tables();
        // SAFETY: the scene holds the storages and tables, and moves none of their bytes; its views overlap nowhere.
        let layout = unsafe { Layout::new(infos(), storages, copies(&tables)) }.unwrap();
        let memory = memory(&layout);
        let dir = tempfile::tempdir().unwrap();
        let rank = Rank { port: 1, number: 0, of: 1 };
        let state = State { layout, memory, label: None, manifest: None, ready: None };
        let (state, told) = (Mutex::new(state), Mutex::new(RankFile::of(rank)));
        let shared = Shared { dir: dir.path().join("plugins"), rank, state, told };
        shared.told.lock().unwrap().write(rank, &shared.dir).unwrap();
        let mut scene = Self {
            shared,
            live,
            versions: vec![first],
            random,
            tried: BTreeMap::new(),
            _dir: dir,
            _tables: tables,
            patches: 0,
        };
        scene.loaded(&label(0));
        scene
    }

    fn path(&self) -> PathBuf {
        self.shared.dir.join("delta-1")
    }

    pub(super) fn bytes(&self) -> Vec<Vec<u8>> {
        self.live.clone()
    }

    fn loaded(&mut self, label: &str) {
        let mut state = self.shared.state();
        (state.label, state.manifest, state.ready) = (Some(label.into()), None, None);
    }

    pub(super) fn forget(&mut self) {
        self.shared.state().label = None;
    }

    /// The next deltas go into another file.
    pub(super) fn new_file(&self) {
        fs::remove_file(self.path()).unwrap();
    }

    /// Makes a version in which about so many elements differ, and offers it.
    pub(super) fn step(&mut self, density: f64) {
        let mut next = self.versions.last().unwrap().clone();
        for (bytes, (_, dtype, _)) in next.iter_mut().zip(TENSORS) {
            for element in bytes.chunks_mut(dtype.size() as usize) {
                if (self.random.next() as f64) < density * u64::MAX as f64 {
                    let bit = self.random.next() as usize % (8 * element.len());
                    element[bit / 8] ^= 1 << (bit % 8);
                }
            }
        }
        self.versions.push(next);
        self.offer(|_| {});
    }

    /// Offers the newest version, in the same file, with something wrong in its arrays.
    fn offer(&self, spoil: impl FnOnce(&mut Vec<u8>)) {
        self.write(false, spoil);
    }

    fn offer_first(&self) {
        self.write(true, |_| {});
    }

    fn write(&self, first: bool, spoil: impl FnOnce(&mut Vec<u8>)) {
        let [.., old, new] = &self.versions[..] else { unreachable!() };
        let number = self.versions.len() as u64 - 1;
        write(&self.path(), (number - 1, old), (number, new), first, spoil);
    }

    /// What the rank tells of the offer, once it has looked.
    pub(super) fn look(&mut self) -> Option<String> {
        look(&self.shared, &mut self.tried);
        let text = fs::read(self.shared.rank.path(&self.shared.dir)).unwrap();
        let file: RankFile = serde_json::from_slice(&text).unwrap();
        file.deltas["delta-1"].why_not.clone()
    }

    pub(super) fn patch(&self) -> Result<Option<LivePatch>> {
        self.patch_with(|vote| vote)
    }

    /// A patch of a rank that is not the only one.
    fn patch_with(&self, least: impl FnMut(Vote) -> Vote) -> Result<Option<LivePatch>> {
        self.shared.patch(&label(self.versions.len() as u64 - 1), least)
    }

    pub(super) fn assert_patched(&mut self) {
        assert_eq!(self.look(), None);
        assert!(self.patch().unwrap().is_some());
        self.patches += 1;
        assert!(self.live == load(self.versions.last().unwrap()));
        assert!(self.patch().unwrap().is_none(), "a delta is written once");
    }

    pub(super) fn assert_patches(&mut self) {
        for density in [0.01, 0.2, 0.0, 0.9, 0.003, 0.05] {
            self.step(density);
            self.assert_patched();
        }
    }

    /// What one rank does is what all ranks do.
    pub(super) fn assert_agrees(&mut self) {
        self.step(0.05);
        let last = self.versions[1][0].len() - 1;
        self.versions[1][0][last] = !self.versions[0][0][last];
        self.offer(|_| {});
        let held = self.bytes();
        // Of two votes each time: what others say, and what becomes of it.
        for (others, expected) in [
            ([Vote::Loads, Vote::Patches], None),
            ([Vote::Refuses, Vote::Patches], Some("ready")),
            ([Vote::Patches, Vote::Refuses], Some("written")),
        ] {
            assert_eq!(self.look(), None);
            let mut votes = Vec::new();
            let patched = self.patch_with(|vote| {
                votes.push(vote);
                vote.min(others[votes.len() - 1])
            });
            match expected {
                None => assert!(patched.unwrap().is_none(), "it is not prepared everywhere"),
                Some(what) => assert!(patched.unwrap_err().to_string().contains(what)),
            }
            let asked = if others[0] == Vote::Patches { 2 } else { 1 };
            assert_eq!(votes, vec![Vote::Patches; asked]);
            assert!(self.live == held, "{others:?}");
            assert!(matches!(self.patch(), Ok(None)), "it is loaded next");
            self.loaded(&label(self.versions.len() as u64 - 2));
            self.tried.clear();
        }
        // One that cannot write tells the others.
        assert_eq!(self.look(), None);
        *self.live[7].last_mut().unwrap() ^= 1;
        let mut votes = Vec::new();
        self.patch_with(|vote| {
            votes.push(vote);
            vote
        })
        .unwrap_err();
        assert_eq!(votes, [Vote::Patches, Vote::Refuses]);
        *self.live[7].last_mut().unwrap() ^= 1;
        assert!(self.live == held);
        self.loaded(&label(self.versions.len() as u64 - 2));
        self.tried.clear();
        self.assert_patched();
    }

    /// Of a copy's blocks, a sample is compared when a delta is readied, and the rest when it is written.
    pub(super) fn assert_all_is_compared(&mut self) {
        self.step(0.05);
        // All of `wide` changes, so that its changes are its elements.
        self.versions[1][6] = self.versions[0][6].iter().map(|byte| !byte).collect();
        self.offer(|_| {});
        let last = 20 * BLOCK_CHANGES - 1;
        for (block, at) in (0..20).map(|block| (block, block * BLOCK_CHANGES)).chain([(19, last)]) {
            let byte = 2 * at as usize;
            self.live[8][byte] ^= 1;
            let before = self.bytes();
            if block % ONE_IN == 0 {
                assert!(self.look().unwrap().contains("those of"), "block {block}");
                assert!(self.patch().unwrap().is_none());
            } else {
                assert_eq!(self.look(), None, "block {block}");
                assert!(self.patch().unwrap_err().to_string().contains("1 others, the first in `wide`"));
            }
            assert!(self.live == before, "block {block}");
            self.live[8][byte] ^= 1;
            self.loaded(&label(0));
            self.tried.clear();
        }
        self.assert_patched();
    }

    pub(super) fn assert_refusals(&mut self) {
        let held = self.bytes();
        self.step(0.05);
        // Weights that are not the base's: only in one place, and the last one.
        *self.live[7].last_mut().unwrap() ^= 1;
        let last = self.versions[1][0].len() - 1;
        self.versions[1][0][last] = !self.versions[0][0][last];
        self.offer(|_| {});
        assert!(self.look().unwrap().contains("those of"));
        assert!(self.patch().unwrap().is_none());
        *self.live[7].last_mut().unwrap() ^= 1;

        // Arrays that are not the header's: torn, of another version, or written meanwhile.
        let flip = |bytes: &mut Vec<u8>| bytes[200] ^= 1;
        let tear = |bytes: &mut Vec<u8>| {
            let half = bytes.len() / 2;
            bytes[half..].fill(0);
        };
        for (number, spoil) in [flip as fn(&mut Vec<u8>), tear].into_iter().enumerate() {
            self.offer(spoil);
            self.loaded(&label(number as u64 + 7));
            self.loaded(&label(0));
            self.tried.clear();
            assert!(self.look().unwrap().contains("checksum"), "{number}");
        }
        assert!(self.live == held);

        // Weights that change after the delta was readied: what is written is taken back.
        self.offer(|_| {});
        self.tried.clear();
        assert_eq!(self.look(), None);
        *self.live[7].last_mut().unwrap() ^= 1;
        let before = self.bytes();
        assert!(self.patch().unwrap_err().to_string().contains("the old values of the delta"));
        assert!(self.live == before);
        assert!(self.patch().unwrap().is_none());
        *self.live[7].last_mut().unwrap() ^= 1;

        // One whose checkpoint may not be there: SGLang would load files that are written.
        self.loaded(&label(0));
        let header = fs::read(self.path()).unwrap();
        self.offer_first();
        assert!(self.patch().unwrap_err().to_string().contains("may not be there yet"));
        self.loaded(&label(self.versions.len() as u64 - 1));
        assert!(self.patch().unwrap().is_none(), "what is live is there");
        fs::write(self.path(), header).unwrap();

        // One that is not offered any more.
        self.loaded(&label(0));
        self.tried.clear();
        assert_eq!(self.look(), None);
        File::options().write(true).open(self.path()).unwrap().write_all_at(&[0; 64], 0).unwrap();
        assert!(self.patch().unwrap().is_none());
        assert!(self.live == held);
    }
}

fn label(version: u64) -> String {
    format!("0123456789ab:{version}")
}

pub(super) fn version(number: u64) -> PreparedVersion {
    PreparedVersion { label: label(number), manifest: ContentDigest::of(&number.to_le_bytes()) }
}

/// Writes a delta as docs/format/prepared.md says.
fn write(
    path: &Path,
    from: (u64, &[Vec<u8>]),
    to: (u64, &[Vec<u8>]),
    first: bool,
    spoil: impl FnOnce(&mut Vec<u8>),
) {
    let ((base, old), (target, new)) = (from, to);
    let mut bytes = vec![0; 64];
    let mut tensors = Vec::new();
    for (index, (name, dtype, shape)) in TENSORS.iter().enumerate() {
        let width = dtype.size() as usize;
        let pairs = old[index].chunks(width).zip(new[index].chunks(width)).enumerate();
        let changes: Vec<_> = pairs.filter(|(_, (old, new))| old != new).collect();
        let positions: Vec<u8> = changes.iter().flat_map(|(at, _)| (*at as u32).to_le_bytes()).collect();
        let fresh: Vec<u8> = changes.iter().flat_map(|(_, (_, new))| new.to_vec()).collect();
        let stale: Vec<u8> = changes.iter().flat_map(|(_, (old, _))| old.to_vec()).collect();
        let places = [positions, fresh, stale].map(|array| {
            let start = bytes.len();
            bytes.extend(array);
            bytes.resize(bytes.len().next_multiple_of(64), 0);
            start
        });
        tensors.push(json!({"name": name, "dtype": dtype, "shape": shape, "changed": changes.len(),
            "positions": places[0], "new": places[1], "old": places[2]}));
    }
    let header = json!({"base": version(base), "target": version(target), "first": first, "checksum": checksum(&bytes[64..], 64),
        "tensors": tensors});
    spoil(&mut bytes);
    put(path, bytes, &header.to_string());
}

/// Offers a delta: room for the head and the arrays, and the header.
pub(super) fn put(path: &Path, mut bytes: Vec<u8>, header: &str) {
    let start = bytes.len();
    bytes.extend(header.as_bytes());
    bytes[..8].copy_from_slice(b"dftlpre2");
    bytes[8..16].copy_from_slice(&(start as u64).to_le_bytes());
    bytes[16..24].copy_from_slice(&(header.len() as u64).to_le_bytes());
    bytes[24..56].copy_from_slice(ContentDigest::of(header.as_bytes()).as_bytes());
    let file = File::options().write(true).create(true).truncate(false).open(path).unwrap();
    // Its first bytes offer it, and a thread may look.
    file.write_all_at(&bytes[64..], 64).unwrap();
    file.write_all_at(&bytes[..64], 0).unwrap();
}

pub(super) fn host() -> Scene {
    Scene::new(|_| Box::new(Host::default()))
}

#[test]
fn each_delta_leads_to_the_weights_that_a_load_gives() {
    host().assert_patches();
}

#[test]
fn delta_of_another_base_or_torn_is_refused_and_changes_nothing() {
    host().assert_refusals();
}

#[test]
fn blocks_not_compared_when_readied_are_compared_at_the_write() {
    host().assert_all_is_compared();
}

#[test]
fn ranks_write_together_or_not_at_all() {
    host().assert_agrees();
}

/// A model of a rank without storage, which serves version 3 and is offered version 4 as `delta-1`.
fn offered_model(plugins: &Path, rank: Rank) -> LiveModel {
    // SAFETY: there is no storage.
    let layout = unsafe { Layout::new(infos(), Vec::new(), Vec::new()) }.unwrap();
    let model = LiveModel::in_host_memory(plugins, rank, layout).unwrap();
    model.loaded(Some(&format!("{}?partial", label(3))));
    let bytes = |n: u8| {
        TENSORS
            .iter()
            .map(|(_, dtype, shape)| vec![n; (shape.iter().product::<u64>() * dtype.size()) as usize])
            .collect::<Vec<_>>()
    };
    write(&plugins.join("delta-1"), (3, &bytes(1)), (4, &bytes(2)), false, |_| {});
    model
}

/// What a rank says once it has said something of a delta.
fn told(rank: Rank, plugins: &Path) -> RankFile {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let text = fs::read(rank.path(plugins)).unwrap_or_default();
        match serde_json::from_slice::<RankFile>(&text) {
            Ok(file) if !file.deltas.is_empty() => return file,
            said => assert!(Instant::now() < end, "{said:?}"),
        }
        thread::yield_now();
    }
}

#[test]
fn the_thread_tells_what_it_readied_and_ends_with_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let (plugins, rank) = (dir.path().join("plugins"), Rank { port: 7, number: 1, of: 2 });
    let model = offered_model(&plugins, rank);
    let file = told(rank, &plugins);
    assert_eq!(file.deltas["delta-1"], Told { target: label(4), why_not: None });
    let process = (std::process::id(), rank::started(std::process::id()).unwrap());
    assert_eq!((file.format, file.ranks, (file.process.pid, file.process.start)), (rank::FORMAT, 2, process));
    assert!(model.patch(&label(4), |vote| vote).unwrap().is_some());
    let weak = Arc::downgrade(&model.shared);
    drop(model);
    while weak.upgrade().is_some() {
        thread::yield_now();
    }
}

#[test]
fn rank_file_that_is_removed_is_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let (plugins, rank) = (dir.path().join("plugins"), Rank { port: 7, number: 0, of: 1 });
    let model = offered_model(&plugins, rank);
    let file = told(rank, &plugins);
    fs::remove_file(rank.path(&plugins)).unwrap();
    assert_eq!(told(rank, &plugins).deltas, file.deltas);
    drop(model);
}

#[test]
fn files_of_ended_processes_are_removed_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let (plugins, rank) = (dir.path().join("plugins"), Rank { port: 7, number: 0, of: 1 });
    rank.refuse(&plugins, "it ends").unwrap();
    let (pid, start) = (std::process::id(), rank::started(std::process::id()).unwrap());
    let names = ["rank-8-0.json", "server-8.json", "rank-9-0.json", "note.json", "rank-10-0.json"];
    for (name, start) in names.into_iter().zip([start + 1, start + 1, start, start + 1, start + 1]) {
        // Those of format 1 had no more in common.
        let text =
            if name == names[4] { "{".to_owned() } else { json!({"pid": pid, "start": start}).to_string() };
        fs::write(plugins.join(name), text).unwrap();
    }
    let _model = offered_model(&plugins, rank);
    assert_eq!(names.map(|name| plugins.join(name).exists()), [false, false, true, true, true]);
}

#[test]
fn a_directory_that_others_can_enter_is_refused() {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    let dir = tempfile::tempdir().unwrap();
    let (plugins, link) = (dir.path().join("plugins"), dir.path().join("link"));
    fs::create_dir(&plugins).unwrap();
    fs::set_permissions(&plugins, fs::Permissions::from_mode(0o755)).unwrap();
    let rank = Rank { port: 1, number: 0, of: 1 };
    assert!(rank.refuse(&plugins, "x").unwrap_err().to_string().contains("prepared delta"));
    fs::set_permissions(&plugins, fs::Permissions::from_mode(0o700)).unwrap();
    rank.refuse(&plugins, "x").unwrap();
    symlink(&plugins, &link).unwrap();
    rank.refuse(&link, "x").unwrap_err();
}
