//! How much memory a publication and a rebuild take: bounded by their settings, never a second copy of the
//! model.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]
#![allow(unsafe_code, reason = "an allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use driftless_store::wait::Stop;
use driftless_store::{Disk, Key, Store};
use driftless_testkit::hook::Hook;
use driftless_testkit::publications::{MODEL, RUN, options, step};
use driftless_transport::publish::{Mode, Start};
use driftless_transport::snapshot::{AuxFile, TensorInfo};
use driftless_transport::{Dtype, Error, Publisher, Replica, Result, Run, Snapshot, Version};

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged; the counters are beside the point.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        MOST.fetch_max(NOW.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller keeps the allocator's contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const MIB: usize = 1 << 20;
const TENSOR_BYTES: usize = MIB / 2;
const TENSORS: usize = 48;

/// A model that is made when it is asked for, as one on a device is.
struct Device {
    infos: Vec<TensorInfo>,
    seed: u64,
    /// Throws the switch when this tensor is read.
    cancel: Option<(usize, Stop)>,
}

impl Device {
    fn new(seed: u64) -> Self {
        let info = |index| TensorInfo {
            name: format!("layer.{index:03}"),
            dtype: Dtype::Bf16,
            shape: vec![256, 1024],
        };
        Self { infos: (0..TENSORS).map(info).collect(), seed, cancel: None }
    }
}

impl Snapshot for Device {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }
    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        if let Some((at, stop)) = &self.cancel
            && *at == index
        {
            stop.stop();
        }
        // Every seed changes other elements of the same weights: nearly all of them, which makes for large
        // deltas.
        let mut state = index as u64 * 77 + 1;
        let byte = |i: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let moved = (i as u64 / 2).wrapping_mul(self.seed * 2 + 1) >> 3 & 1;
            if i.is_multiple_of(2) { (state >> 33) as u8 ^ (self.seed as u8 * moved as u8) } else { 0x3c }
        };
        Ok(Cow::Owned((0..TENSOR_BYTES).map(byte).collect()))
    }
    fn files(&self) -> &[AuxFile] {
        &[]
    }
}

/// How many bytes are being put at once.
#[derive(Default)]
struct Gauge {
    under_way: AtomicUsize,
    most: AtomicUsize,
}

/// The most bytes that were allocated at once during `work`, beyond what was before.
fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = NOW.load(Relaxed);
    MOST.store(before, Relaxed);
    let done = work();
    (done, MOST.load(Relaxed).saturating_sub(before))
}

/// One test, so that nothing else allocates meanwhile.
#[test]
fn memory_is_bounded_by_the_settings() {
    let memory = std::path::Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let disk: Arc<dyn Store> = Arc::new(Disk::new(dir.path().join("store")));
    let gauge = Arc::new(Gauge::default());
    let measured = gauge.clone();
    let store = Hook::puts(&disk, move |bytes, put| {
        let Gauge { under_way, most } = &*measured;
        most.fetch_max(under_way.fetch_add(bytes.len(), Relaxed) + bytes.len(), Relaxed);
        let put = put();
        under_way.fetch_sub(bytes.len(), Relaxed);
        put
    });
    let mut options = options(Start::NewRun, &dir.path().join("baseline"));
    options.object_bytes_max = MIB as u64;
    options.uploads = 2;
    options.threads = 3;
    options.buffer_bytes = 2 * MIB as u64;
    // Tensors under way, the objects, and a little for tables and threads.
    let allowed = 2 * MIB + (2 + 2) * MIB + 4 * MIB;
    assert!(2 * allowed <= TENSORS * TENSOR_BYTES);
    let mut publisher = Publisher::open(store.clone(), options).unwrap();
    for (version, seed) in [(0, 0), (1, 1), (2, 3)] {
        let (published, used) =
            peak(|| publisher.publish(&Device::new(seed), step(version), Mode::Delta).unwrap());
        println!(
            "version {version}: {} MiB published of {} MiB, {} MiB in memory at most, {} allowed",
            published.publication_bytes >> 20,
            published.full_bytes >> 20,
            used / MIB,
            allowed / MIB
        );
        assert!(used <= allowed, "{used}");
        let (moved, used) = peak(|| publisher.wait());
        moved.unwrap();
        println!("its baseline: {} MiB", used / MIB);
    }
    assert!(gauge.most.load(Relaxed) <= 2 * MIB);

    // Cancelled in the middle: what was stored is gone, and the next one is right.
    let stop = Stop::new();
    publisher.stop_on(&stop);
    let cancelled = Device { cancel: Some((TENSORS / 2, stop)), ..Device::new(5) };
    let error = publisher.publish(&cancelled, step(3), Mode::Full).unwrap_err();
    assert!(matches!(error, Error::Cancelled { .. }), "{error:?}");
    let run = Run::open(store.clone(), RUN).unwrap();
    let place = run.manifest_key(MODEL, Version(3)).unwrap();
    let place = Key::new(place.as_str().trim_end_matches("/manifest")).unwrap();
    assert_eq!(store.list(&place).unwrap(), []);
    publisher.stop_on(&Stop::new());
    let next = Device::new(7);
    assert_eq!(publisher.publish(&next, step(3), Mode::Delta).unwrap().version, Version(3));

    let mut replica = Replica::open(dir.path().join("host")).unwrap();
    let (advanced, used) = peak(|| replica.advance(&run, MODEL, Version(3), None).unwrap());
    println!(
        "{} versions in one apply of {TENSORS} MiB: {} MiB in memory at most",
        advanced.versions,
        used / MIB
    );
    let checkpoint = replica.checkpoint().unwrap();
    for index in 0..TENSORS {
        assert!(checkpoint.bytes(index).unwrap() == next.bytes(index).unwrap(), "tensor {index}");
    }
}
