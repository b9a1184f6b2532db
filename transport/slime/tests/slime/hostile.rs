//! Directories that lie, are damaged, or ask for too much: typed errors, and the host keeps what it has.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use driftless_transport::{Error, Follower, Replica, Version};
use serde_json::json;

use crate::reference::{Delta, FORMS, Tensors, compress, digest, payload};
use crate::{World, tensors};
use driftless_testkit::publications::Weights;

/// A host at version 1, and what version 2 would make of it.
struct Fixture {
    world: World,
    host: Follower,
    old: Tensors,
    new: Tensors,
}

fn fixture(form: (&str, &str)) -> Fixture {
    let mut weights = Weights::small(1);
    let world = World::new(&weights);
    let base = tensors(&weights);
    weights.step(1, 11);
    let old = tensors(&weights);
    Delta::new(1, form, &base, &old, 1).write(&world.source());
    let host = world.follower();
    prepare(&host);
    weights.step(2, 11);
    Fixture { world, host, old, new: tensors(&weights) }
}

/// Brings the host up to date, and waits until everything lies in its place, where who only looks finds it.
fn prepare(host: &Follower) {
    host.prepare(None).unwrap();
    host.sync().unwrap();
}

impl Fixture {
    fn delta(&self, form: (&str, &str)) -> Delta {
        Delta::new(2, form, &self.old, &self.new, 2)
    }

    /// Version 2 is refused, and the host has what it had. Who only asks what would happen is told the same;
    /// where several tensors are wrong, either names the one that it met first, so they are asked until that
    /// is the same one.
    fn refused(&self, what: &str) -> Error {
        let begun = Instant::now();
        let error = loop {
            let Err(planned) = self.world.plan(None) else { panic!("{what} was planned") };
            let Err(error) = self.host.prepare(None) else { panic!("{what} was accepted") };
            let (planned, found) = (chain(&planned), chain(&error));
            if planned == found {
                break error;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}: {planned}, but {found}");
        };
        assert_eq!(self.host.status().applied.unwrap().version, Version(1), "{what}");
        assert!(self.world.host() == self.old, "{what}");
        fs::remove_dir_all(self.world.source().join("weight_v000002")).unwrap();
        error
    }

    /// After all that, the true version 2 goes in.
    fn accepts(self, form: (&str, &str)) {
        self.delta(form).write(&self.world.source());
        self.host.prepare(None).unwrap();
        assert!(self.world.host() == self.new);
        drop(self.host);
        Replica::open(self.world.path("host")).unwrap().verify().unwrap();
    }
}

/// An error with its sources.
fn chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text += &format!(": {error}");
        source = error.source();
    }
    text
}

/// What is done to a version, and whether the error is the one for it.
type Lie = (&'static str, fn(&mut Delta), fn(&Error) -> bool);

fn corrupt(error: &Error) -> bool {
    matches!(error, Error::Corrupt { .. })
}

fn unsupported(error: &Error) -> bool {
    matches!(error, Error::Unsupported { .. })
}

fn frame(delta: &mut Delta) -> &mut Vec<u8> {
    &mut delta.ranks[0][0].1
}

/// Every lie is refused as it says, and the truth is taken after all of them.
fn refuses_all(form: (&'static str, &'static str), lies: &[Lie]) {
    let fixture = fixture(form);
    for (what, lie, expected) in lies {
        let mut delta = fixture.delta(form);
        lie(&mut delta);
        delta.write(&fixture.world.source());
        let error = fixture.refused(what);
        assert!(expected(&error), "{what}: {error:?}");
    }
    fixture.accepts(form);
}

#[test]
fn lies_of_an_index_or_a_header_are_refused() {
    let lies: &[Lie] = &[
        ("another version", |d| d.metadata["version"] = json!("000003"), corrupt),
        ("no version", |d| d.metadata["version"] = json!(null), corrupt),
        ("another base", |d| d.metadata["base_version"] = json!("000000"), corrupt),
        ("a full checkpoint", |d| d.metadata = json!({ "total_size": 5 }), unsupported),
        ("an unknown encoding", |d| d.metadata["delta_encoding"] = json!("add"), unsupported),
        ("another compression", |d| d.metadata["compression_format"] = json!("lz4"), unsupported),
        ("no compression", |d| d.metadata["compression_format"] = json!(null), unsupported),
        ("an unknown checksum", |d| d.metadata["checksum_format"] = json!("md5"), unsupported),
        ("the other encoding", |d| d.metadata["delta_encoding"] = json!("overwrite"), corrupt),
        ("the other checksum", |d| d.metadata["checksum_format"] = json!("blake3"), corrupt),
        ("a frame of another type", |d| d.dtype = "F32", corrupt),
        ("a frame of an unknown type", |d| d.dtype = "Q2_K", corrupt),
        ("a wrong checksum", |d| d.ranks[0][0].2 = "0".repeat(32), corrupt),
        ("a checksum that is none", |d| d.ranks[0][0].2 = "Z".repeat(32), corrupt),
        ("a missing checksum", |d| d.ranks[0][0].2 = String::new(), corrupt),
        ("a listed tensor that is in no file", |d| drop(d.weight_map.insert("x".into(), d.file(0))), corrupt),
        ("a tensor that is not listed", |d| drop(d.weight_map.pop_first()), corrupt),
        ("a missing file", |d| drop(d.weight_map.insert("x".into(), "other.safetensors".into())), corrupt),
        (
            "a file elsewhere",
            |d| drop(d.weight_map.insert("x".into(), "../hf/model.safetensors".into())),
            corrupt,
        ),
        (
            "an unknown tensor",
            |d| {
                d.ranks[0][0].0 = "nobody.knows".into();
                d.map();
            },
            |error| matches!(error, Error::TensorMismatch { tensor, .. } if tensor == "nobody.knows"),
        ),
    ];
    refuses_all(("xor", "xxh3-128"), lies);
}

#[test]
fn frames_that_are_not_what_the_tensor_needs_are_refused() {
    let lies: &[Lie] = &[
        ("no zstd", |d| *frame(d) = b"this is no zstd frame at all".to_vec(), corrupt),
        ("nothing", |d| frame(d).clear(), corrupt),
        ("cut", |d| frame(d).truncate(20), corrupt),
        ("bytes behind", |d| frame(d).push(0), corrupt),
        ("two frames", |d| frame(d).extend(compress(b"")), corrupt),
        ("too little", |d| *frame(d) = compress(&[0; 7]), corrupt),
        // 256 MiB in a few KiB.
        ("too much", |d| *frame(d) = compress(&vec![0; 256 << 20]), corrupt),
        // A window of 2 GiB; single segments whose sizes are 2^62 and 2^31.
        ("a huge window", |d| *frame(d) = [&MAGIC[..], &[0x00, 0xa8, 1, 0, 0]].concat(), corrupt),
        (
            "a huge size",
            |d| *frame(d) = [&MAGIC[..], &[0xe0], &(1u64 << 62).to_le_bytes(), &[1, 0, 0]].concat(),
            corrupt,
        ),
        (
            "a large size",
            |d| *frame(d) = [&MAGIC[..], &[0xa0], &(1u32 << 31).to_le_bytes(), &[1, 0, 0]].concat(),
            corrupt,
        ),
    ];
    for form in [("xor", "xxh3-128"), ("overwrite", "adler32")] {
        refuses_all(form, lies);
    }
}

const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

#[test]
fn positions_that_do_not_ascend_within_the_tensor_are_refused() {
    let form = ("overwrite", "xxh3-128");
    let fixture = fixture(form);
    let name = "g.up";
    let (old, new) = (&fixture.old[name], &fixture.new[name]);
    let honest = payload("overwrite", old, new);
    let count = u32::from_le_bytes(honest[..4].try_into().unwrap());
    let edited = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut payload = honest.clone();
        edit(&mut payload);
        payload
    };
    let lies = [
        ("a count that is too large", edited(&|p| p[..4].copy_from_slice(&u32::MAX.to_le_bytes()))),
        ("one position more", edited(&|p| p[..4].copy_from_slice(&(count + 1).to_le_bytes()))),
        ("one position less", edited(&|p| p[..4].copy_from_slice(&(count - 1).to_le_bytes()))),
        ("a position behind the end", edited(&|p| p[4 * count as usize..][..4].copy_from_slice(&[0xff; 4]))),
        ("a position twice", edited(&|p| p.copy_within(4..8, 8))),
        ("one value less", edited(&|p| p.truncate(p.len() - 1))),
        ("one value more", edited(&|p| p.push(0))),
        ("no count", Vec::new()),
    ];
    for (what, payload) in lies {
        let mut delta = fixture.delta(form);
        for tensor in delta.ranks.iter_mut().flatten().filter(|(tensor, ..)| tensor == name) {
            tensor.1 = compress(&payload);
        }
        delta.write(&fixture.world.source());
        let error = fixture.refused(what);
        assert!(corrupt(&error), "{what}: {error:?}");
    }
    fixture.accepts(form);
}

/// A base that differs where the version changes something, and one that differs elsewhere in the same
/// tensor.
#[test]
fn another_base_is_refused_before_anything_is_touched() {
    for form in FORMS {
        let fixture = fixture(form);
        let mut foreign = fixture.old.clone();
        let tensor = foreign.get_mut("g.up").unwrap();
        let same = (0..tensor.len()).find(|at| tensor[*at] == fixture.new["g.up"][*at]).unwrap();
        tensor[same] ^= 0x10;
        let mut target = fixture.new.clone();
        target.get_mut("g.up").unwrap()[same] ^= 0x10;
        Delta::new(2, form, &foreign, &target, 2).write(&fixture.world.source());
        let error = fixture.refused("another base");
        assert!(matches!(&error, Error::Corrupt { what, .. } if what.contains("checksum")), "{error:?}");
        fixture.accepts(form);
    }
}

/// One bit here and there in every file: refused, or (in padding and free text) without effect.
#[test]
fn a_flipped_bit_is_refused_or_harmless() {
    damage(|bytes, at| bytes[at] ^= 1 << (at % 8), 19);
}

#[test]
fn a_file_cut_short_is_refused() {
    damage(|bytes, at| bytes.truncate(at), 23);
}

fn damage(harm: impl Fn(&mut Vec<u8>, usize), stride: usize) {
    for form in [("xor", "xxh3-128"), ("overwrite", "blake3")] {
        let mut fixture = fixture(form);
        let pristine = fixture.delta(form).write(&fixture.world.path("pristine"));
        let source = fixture.world.source().join("weight_v000002");
        let mut refused = 0;
        for file in fs::read_dir(&pristine).unwrap().map(|entry| entry.unwrap().file_name()) {
            let length = fs::metadata(pristine.join(&file)).unwrap().len() as usize;
            for at in (0..length).step_by(stride) {
                copy(&pristine, &source);
                let mut bytes = fs::read(source.join(&file)).unwrap();
                harm(&mut bytes, at);
                fs::write(source.join(&file), bytes).unwrap();
                let planned = fixture.world.plan(None);
                let expected = if fixture.host.prepare(None).is_ok() { &fixture.new } else { &fixture.old };
                assert_eq!(planned.is_ok(), *expected == fixture.new, "{form:?} {file:?} byte {at}");
                assert!(fixture.world.host() == *expected, "{form:?} {file:?} byte {at}");
                if *expected == fixture.new {
                    let (world, old, new) = (fixture.world, fixture.old, fixture.new);
                    drop(fixture.host);
                    fs::remove_dir_all(&source).unwrap();
                    fs::remove_dir_all(world.path("host")).unwrap();
                    let host = world.follower();
                    prepare(&host);
                    fixture = Fixture { world, host, old, new };
                } else {
                    refused += 1;
                }
            }
        }
        assert!(refused > 50, "{refused}");
        let _ = fs::remove_dir_all(&source);
        fixture.accepts(form);
    }
}

pub(crate) fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// The checksum of the description, over what a receiver holds, catches what the frame's own structure does
/// not.
#[test]
fn a_frame_of_other_content_is_refused() {
    let form = ("xor", "blake3");
    let fixture = fixture(form);
    let mut delta = fixture.delta(form);
    let (name, frame, _) = &mut delta.ranks[0][0];
    let mut other = fixture.new[name.as_str()].clone();
    other[0] ^= 1;
    *frame = compress(&payload("xor", &fixture.old[name.as_str()], &other));
    delta.write(&fixture.world.source());
    assert!(corrupt(&fixture.refused("another content")));
    // With the checksum to match, it is a version like any other.
    let mut delta = fixture.delta(form);
    let (name, frame, checksum) = &mut delta.ranks[0][0];
    *frame = compress(&payload("xor", &fixture.old[name.as_str()], &other));
    *checksum = digest("blake3", &other);
    delta.write(&fixture.world.source());
    fixture.host.prepare(None).unwrap();
}
