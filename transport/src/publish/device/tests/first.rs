//! The first delta of a publisher: its base is what was published, loaded or found, and devices make it without
//! a copy to the host.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use super::*;
use crate::checkpoint::{Checkpoint, write_checkpoint};
use crate::manifest::Base;
use crate::publish::Sliced;

/// Tensors of a host.
struct OnHost<'a>(&'a Weights, Vec<TensorInfo>);

impl<'a> OnHost<'a> {
    fn new(weights: &'a Weights) -> Self {
        Self(weights, weights.0.iter().map(|(info, _)| info.clone()).collect())
    }
}

impl Snapshot for OnHost<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.1
    }
    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        Ok(Cow::Borrowed(&self.0.0[index].1))
    }
    fn files(&self) -> &[AuxFile] {
        &[]
    }
}

/// How version 0 came into being before the first delta.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Behind {
    Full,
    Reference,
    Resume,
}

const ALL: [Behind; 3] = [Behind::Full, Behind::Reference, Behind::Resume];

/// A run at version 0, whose publisher encodes on a device of its own.
struct Begun {
    store: Arc<dyn Store>,
    dir: tempfile::TempDir,
    publisher: Publisher,
    codec: Codec,
    weights: Weights,
}

impl Begun {
    fn new(behind: Behind, codec: Codec) -> Self {
        let (dir, weights) = (tempfile::tempdir().unwrap(), Weights::new());
        let store: Arc<dyn Store> = Arc::new(Memory::new());
        let baseline = dir.path().join("baseline");
        let open = |start| Publisher::open(store.clone(), options(start, &baseline, Profile::Wire)).unwrap();
        let mut publisher = open(Start::NewRun);
        if behind == Behind::Full {
            publisher.encode_on(codec.fork().unwrap(), BaseMemory::Device).unwrap();
        }
        if behind == Behind::Reference {
            let checkpoint = dir.path().join("checkpoint");
            write_checkpoint(&checkpoint, &OnHost::new(&weights), 1 << 30).unwrap();
            publisher.publish_reference(&checkpoint, step(0)).unwrap();
        } else {
            let model = OnDevice::new(&weights, codec.fork().unwrap());
            publisher.publish(&model, step(0), Mode::Delta).unwrap();
        }
        if behind == Behind::Resume {
            drop(publisher);
            publisher = open(Start::Resume);
        }
        if behind != Behind::Full {
            publisher.encode_on(codec.fork().unwrap(), BaseMemory::Device).unwrap();
        }
        Self { store, dir, publisher, codec, weights }
    }

    fn model(&self) -> OnDevice {
        OnDevice::new(&self.weights, self.codec.fork().unwrap())
    }

    fn place(&mut self, model: &OnDevice) {
        self.publisher.place_bases(&Sliced::whole(model).unwrap()).unwrap();
        assert_eq!(model.copied.load(SeqCst), 0);
    }

    /// Publishes the next step, of which so many bytes are copied to the host, and compares what a host makes of it.
    fn publish(&mut self, version: u64, on_host: impl Fn(u64) -> bool) {
        self.weights.step();
        let model = self.model();
        let published = self.publisher.publish(&model, step(version), Mode::Delta).unwrap();
        assert_eq!(published.version.0, version);
        let used = self.publisher.device_use();
        assert_eq!(used.device_bytes + used.host_bytes, model.bytes());
        let copied = model.copied.load(SeqCst) as u64;
        // Where memory lacks, digests of tensors that are alike are made on the host, too: of which, the threads decide.
        let lacks = used.host_because.as_ref().is_some_and(|because| because.contains("out of memory"));
        let alike: u64 =
            if lacks { self.weights.0.iter().map(|(_, bytes)| bytes.len() as u64).sum() } else { 0 };
        let allowed = used.host_bytes..=used.host_bytes + alike;
        assert!(allowed.contains(&copied), "version {version}: {copied} bytes copied, {used:?}");
        assert!(on_host(used.host_bytes), "version {version}: {used:?}");
        let host = self.dir.path().join(format!("host-{version}"));
        let run = Run::open(self.store.clone(), RUN).unwrap();
        let mut replica = Replica::open(&host).unwrap();
        let reference = self.dir.path().join("checkpoint");
        replica.advance(&run, MODEL, Version(version), Some(&reference)).unwrap();
        let checkpoint = replica.checkpoint().unwrap();
        for (info, bytes) in &self.weights.0 {
            let at = checkpoint.position(&info.name).unwrap();
            assert!(checkpoint.bytes(at).unwrap() == *bytes, "version {version}: {} differs", info.name);
        }
    }
}

fn nothing(bytes: u64) -> bool {
    bytes == 0
}

fn much(bytes: u64) -> bool {
    bytes > 100_000
}

/// Flips a bit of the large tensor in a checkpoint directory, whose sizes and dates stay.
fn rot(dir: &Path) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let place = checkpoint.place(checkpoint.position("x.large").unwrap()).unwrap();
    let date = fs::metadata(place.path).unwrap().modified().unwrap();
    let file = File::options().read(true).write(true).open(place.path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, place.offset + 1000).unwrap();
    file.write_all_at(&[byte[0] ^ 4], place.offset + 1000).unwrap();
    file.set_modified(date).unwrap();
}

#[test]
fn the_first_delta_copies_nothing_to_the_host() {
    let _turn = FailScenario::setup();
    if !compiled() {
        return;
    }
    for (behind, placed) in ALL.into_iter().zip([false, true]).chain(ALL.map(|behind| (behind, false))) {
        let mut begun = Begun::new(behind, codec(0));
        if placed {
            begun.place(&begun.model());
        }
        for version in 1..4 {
            begun.publish(version, nothing);
        }
        println!("behind {behind:?}: {:?}", begun.publisher.device_use());
    }
}

#[test]
fn the_first_deltas_payloads_are_those_of_the_host() {
    let _turn = FailScenario::setup();
    if !compiled() {
        return;
    }
    for behind in ALL {
        let mut begun = Begun::new(behind, codec(0));
        let mut host = Begun::new(behind, Codec::twin(7, ROOMY));
        begun.publish(1, nothing);
        host.weights.step();
        host.publisher.publish(&OnHost::new(&host.weights), step(1), Mode::Delta).unwrap();
        let [found, expected] = [&begun, &host]
            .map(|run| Run::open(run.store.clone(), RUN).unwrap().get(MODEL, Version(1)).unwrap());
        assert_eq!(found.manifest.tensors, expected.manifest.tensors);
        let digests = |manifest: &Manifest| manifest.objects.iter().map(|o| o.blake3).collect::<Vec<_>>();
        assert_eq!(digests(&found.manifest), digests(&expected.manifest), "{behind:?}");
    }
}

#[test]
fn bases_are_placed_of_tensors_that_have_changed_too() {
    let _turn = FailScenario::setup();
    if !compiled() {
        return;
    }
    for behind in [Behind::Reference, Behind::Resume] {
        let mut begun = Begun::new(behind, codec(0));
        // A trainer's checkpoint may be older or newer than the newest version.
        let version = begun.weights.clone();
        (0..2).for_each(|_| begun.weights.step());
        begun.place(&begun.model());
        let bases = &begun.publisher.devices.bases;
        for (info, bytes) in version.0.iter().filter(|(_, bytes)| !bytes.is_empty()) {
            let base = &bases[&(info.name.clone(), 0)];
            let mut found = vec![0; bytes.len()];
            begun.codec.download(&base.tensor, &mut found).unwrap();
            assert!(found == *bytes, "{behind:?}: {}", info.name);
        }
        // What was tied then is kept once, and norms at two places twice.
        let is_one = |a: &str, b: &str| Arc::ptr_eq(&bases[&(a.to_owned(), 0)], &bases[&(b.to_owned(), 0)]);
        assert!(is_one("a.embed", "b.head") && !is_one("d.norm", "e.norm"));
        begun.publish(1, nothing);
    }
}

#[test]
fn bases_of_another_version_are_made_anew() {
    let _turn = FailScenario::setup();
    if !compiled() {
        return;
    }
    let mut begun = Begun::new(Behind::Full, codec(0));
    begun.publish(1, nothing);
    let old = begun.publisher.devices.version.unwrap();
    begun.publisher.devices.version = Some(Base { version: Version(7), ..old });
    let kept = begun.publisher.devices.bases.get_mut(&("x.large".to_owned(), 0)).unwrap();
    flip_bit(&begun.codec, &mut Arc::get_mut(kept).unwrap().tensor, 60, 3);
    begun.publish(2, nothing);
    assert_eq!(begun.publisher.device_use().host_because, None);
}

#[test]
fn a_baseline_that_rotted_makes_no_base() {
    let _turn = FailScenario::setup();
    if !compiled() {
        return;
    }
    // A tensor that has not changed needs no baseline.
    let mut begun = Begun::new(Behind::Resume, codec(0));
    rot(&begun.dir.path().join("baseline"));
    begun.place(&begun.model());
    begun.publish(1, nothing);

    let mut begun = Begun::new(Behind::Resume, codec(0));
    rot(&begun.dir.path().join("baseline"));
    begun.weights.step();
    let model = begun.model();
    begun.place(&model);
    assert!(!begun.publisher.devices.bases.contains_key(&("x.large".to_owned(), 0)));
    // The host finds it, and has it built anew from the store, of which the device makes its base.
    begun.publisher.publish(&model, step(1), Mode::Delta).unwrap();
    assert!(much(model.copied.load(SeqCst) as u64));
    assert_eq!(begun.publisher.device_use().host_bytes, 0);
    begun.publish(2, nothing);
}

#[test]
fn a_device_without_room_for_a_base_leaves_it_to_the_host() {
    let _turn = FailScenario::setup();
    if !compiled() {
        return;
    }
    for behind in ALL {
        let length = |(_, bytes): &(TensorInfo, Vec<u8>)| bytes.len().next_multiple_of(16) + 16;
        let tensors = Weights::new().0.iter().map(length).sum::<usize>();
        let mut begun = Begun::new(behind, Codec::twin(0, tensors + (40 << 10)));
        for version in 1..3 {
            begun.publish(version, much);
            let because = begun.publisher.device_use().host_because.clone().unwrap();
            assert!(because.contains("out of memory"), "{behind:?}: {because}");
        }
    }
}

#[test]
fn ranks_that_resume_publish_from_their_devices() {
    let _turn = FailScenario::setup();
    if !compiled() {
        return;
    }
    // A slice may begin where digests can be made of it on the device, or not.
    for (cut, on_device) in [(66_002, true), (66_001, false)] {
        let (store, dir): (Arc<dyn Store>, _) = (Arc::new(Memory::new()), tempfile::tempdir().unwrap());
        let mut weights = Weights::new();
        for version in 0..3 {
            // Each version is that of another start.
            let mut publishers = [0, 1].map(|rank| {
                let start = if (rank, version) == (0, 0) { Start::NewRun } else { Start::Resume };
                let path = dir.path().join(format!("rank-{rank}"));
                let mut publisher =
                    Publisher::open(store.clone(), options(start, &path, Profile::Wire)).unwrap();
                publisher.encode_on(codec(rank), BaseMemory::Device).unwrap();
                publisher
            });
            std::thread::scope(|scope| {
                for (rank, publisher) in (0..).zip(&mut publishers) {
                    let weights = &weights;
                    scope.spawn(move || {
                        let half = Half::new(weights, codec(rank as usize), rank, cut);
                        let name = Rank { rank, ranks: 2, attempt: format!("job.{version}") };
                        let long = Duration::from_secs(120);
                        publisher.publish_with_ranks(&half, step(version), Mode::Delta, &name, long).unwrap();
                    });
                }
            });
            let [first, second] = publishers.each_ref().map(|publisher| publisher.device_use().clone());
            assert_eq!(first.host_bytes == 0, version > 0, "{first:?}");
            assert_eq!(second.host_bytes == 0, version > 0 && on_device, "{second:?}");
            assert_host_has(&store, &dir.path().join(format!("new-{version}")), version, &weights);
            weights.step();
        }
    }
}
