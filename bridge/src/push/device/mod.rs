//! The device that weights are pushed from: a stream to copy in, a stream to broadcast in, two slots for
//! buckets, and pinned memory to pass host weights through.

#![allow(unsafe_code, reason = "the CUDA driver is foreign functions on raw addresses")]

mod gather;

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, PinnedHostSlice, result, sys};
use driftless_store::BoxError;
use driftless_transport::Snapshot;

use self::gather::Gather;
use crate::error::{Error, Result};
use crate::push::Bucket;

/// Host weights pass through pinned memory in pieces of this size: of the two that a thread has, one is
/// filled while the device takes the other.
const STAGE_BYTES: usize = 4 << 20;
/// What the driver takes from the device at a time.
const PAGE_BYTES: usize = 2 << 20;
/// Threads that fill them: a single one copies 7 GB/s, a link to the device takes 55.
const THREADS: usize = 12;

#[derive(Debug)]
pub(crate) struct Device {
    context: Arc<CudaContext>,
    copies: Arc<CudaStream>,
    pub(crate) broadcasts: Arc<CudaStream>,
    gather: Gather,
    slots: [Slot; 2],
    /// What is gathered, kept for its memory.
    pieces: Vec<[u64; 3]>,
    /// Two for each thread that fills them, made when host weights come.
    stages: Vec<[Stage; 2]>,
}

/// Where a bucket lies.
#[derive(Debug)]
pub(crate) struct Slot {
    memory: Memory,
    /// What the kernel that fills it is told.
    table: Memory,
    /// The slot's own memory, or that of the weights, where they lie as a bucket does.
    pub(crate) address: u64,
    /// Recorded when the bytes are there.
    filled: CudaEvent,
}

#[derive(Debug)]
struct Stage {
    memory: PinnedHostSlice<u8>,
    /// Recorded when the device has taken the bytes.
    taken: CudaEvent,
}

impl Device {
    /// Opens the device with this number, if there is a driver and such a device.
    pub(crate) fn open(ordinal: usize) -> Result<Self> {
        // SAFETY: libcuda runs its initialisers; it is the system's driver. Without the question the first
        // call would panic.
        if !unsafe { sys::is_culib_present() } {
            let why = "libcuda.so.1 was not found; weights are pushed from a machine with an NVIDIA GPU";
            return Err(root("no CUDA driver", why));
        }
        let fail = cuda("opening the device");
        let context = CudaContext::new(ordinal).map_err(&fail)?;
        let copies = context.new_stream().map_err(&fail)?;
        let broadcasts = context.new_stream().map_err(&fail)?;
        let slot = || {
            let memory = || Memory { context: context.clone(), address: 0, length: 0 };
            let filled = context.new_event(None).map_err(&fail)?;
            Ok(Slot { memory: memory(), table: memory(), address: 0, filled })
        };
        let slots = [slot()?, slot()?];
        let gather = Gather::load(&context)?;
        Ok(Self { gather, context, copies, broadcasts, slots, pieces: Vec::new(), stages: Vec::new() })
    }

    /// Makes the device this thread's. Every entry from outside does it: the thread may be another one each
    /// time.
    pub(crate) fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(cuda("cuCtxSetCurrent"))
    }

    pub(crate) fn event(&self) -> Result<CudaEvent> {
        self.context.new_event(None).map_err(cuda("cuEventCreate"))
    }

    /// Lets the broadcasts wait for a slot's bytes, and says where they are.
    pub(crate) fn filled(&self, slot: usize) -> Result<u64> {
        let slot = &self.slots[slot % 2];
        self.broadcasts.wait(&slot.filled).map_err(cuda("cuStreamWaitEvent"))?;
        Ok(slot.address)
    }

    /// Lays a bucket into a slot.
    pub(crate) fn gather(&mut self, slot: usize, weights: &dyn Snapshot, bucket: &Bucket) -> Result<()> {
        let slot = slot % 2;
        let listed = list(weights, self.context.ordinal(), bucket, &mut self.pieces)?;
        self.slots[slot].address = match listed.in_place {
            Some(address) => address,
            None => self.lay(slot, bucket, &listed.host)?,
        };
        self.slots[slot].filled.record(&self.copies).map_err(cuda("cuEventRecord"))
    }

    /// Lays a bucket into a slot's own memory, and says where that is: the beginning of an allocation.
    pub(crate) fn place(&mut self, slot: usize, weights: &dyn Snapshot, bucket: &Bucket) -> Result<u64> {
        let listed = list(weights, self.context.ordinal(), bucket, &mut self.pieces)?;
        self.lay(slot % 2, bucket, &listed.host)
    }

    /// Lays what was listed, and these host bytes, into a slot's own memory.
    fn lay(&mut self, slot: usize, bucket: &Bucket, host: &[(u64, Cow<'_, [u8]>)]) -> Result<u64> {
        // Smaller allocations of the driver share a page, and a process that opens one would open all of it.
        let size = usize::try_from(bucket.bytes)
            .map_err(|error| root(format!("a bucket of {} bytes", bucket.bytes), error))?;
        self.slots[slot].memory.reserve(size.next_multiple_of(PAGE_BYTES))?;
        let address = self.slots[slot].memory.address;
        for [_, target, _] in &mut self.pieces {
            *target += address;
        }
        let table = &mut self.slots[slot].table;
        // SAFETY: the slot has room for the whole bucket, in which no two tensors overlap; whoever made the
        // weights promised the sources; what was sent from this slot before, and with its table, has been
        // received.
        unsafe { self.gather.launch(&self.pieces, table, &self.copies) }?;
        let host: Vec<(u64, &[u8])> = host.iter().map(|(at, bytes)| (address + at, &**bytes)).collect();
        self.upload(&host)?;
        Ok(address)
    }

    /// Gives the slots' memory back.
    pub(crate) fn vacate(&mut self) {
        for slot in &mut self.slots {
            slot.memory.free();
        }
    }

    /// The device's UUID.
    pub(crate) fn uuid(&self) -> Result<[u8; 16]> {
        let uuid = self.context.uuid().map_err(cuda("cuDeviceGetUuid"))?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// Copies host bytes to where they belong, through the stages: each thread fills its own, and has the
    /// device take them while it fills the next.
    fn upload(&mut self, pieces: &[(u64, &[u8])]) -> Result<()> {
        let batches = batches(pieces, STAGE_BYTES);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = batches.len().min(cores).min(THREADS);
        while self.stages.len() < threads {
            self.stages.push([self.stage()?, self.stage()?]);
        }
        let (context, copies, next) = (&self.context, &self.copies, AtomicUsize::new(0));
        let take = |stages: &mut [Stage; 2]| {
            context.bind_to_thread().map_err(cuda("cuCtxSetCurrent"))?;
            let batches = std::iter::from_fn(|| batches.get(next.fetch_add(1, Ordering::Relaxed)));
            batches.enumerate().try_for_each(|(n, batch)| stages[n % 2].pass(batch, copies))
        };
        std::thread::scope(|scope| {
            let stages = self.stages.iter_mut().take(threads);
            let workers: Vec<_> = stages.map(|stages| scope.spawn(move || take(stages))).collect();
            // All of them end before an error is told.
            let ended: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
            let lost = |_| Err(root("a thread that copies weights", "it ended without a word"));
            ended.into_iter().try_for_each(|ended| ended.unwrap_or_else(lost))
        })
    }

    fn stage(&self) -> Result<Stage> {
        // SAFETY: the bytes are written before they are read, by `pack`.
        let memory = unsafe { self.context.alloc_pinned::<u8>(STAGE_BYTES) };
        Ok(Stage { memory: memory.map_err(cuda("cuMemHostAlloc"))?, taken: self.event()? })
    }

    /// Waits for the copies that are under way; they end by themselves.
    pub(crate) fn settle(&self) -> Result<()> {
        self.copies.synchronize().map_err(cuda("cuStreamSynchronize"))
    }
}

impl Stage {
    /// Fills it with a batch once the device has taken what was in it, and has the device take that.
    fn pass(&mut self, batch: &[(u64, &[u8])], copies: &CudaStream) -> Result<()> {
        self.taken.synchronize().map_err(cuda("cuEventSynchronize"))?;
        let memory = self.memory.as_mut_slice().map_err(cuda("the pinned memory"))?;
        for (address, range) in pack(memory, batch) {
            // SAFETY: the target is within the slot, by the bucket's lengths; the source is pinned and is not
            // written before the event below has passed.
            unsafe { result::memcpy_htod_async(address, &memory[range], copies.cu_stream()) }
                .map_err(cuda("cuMemcpyHtoDAsync"))?;
        }
        self.taken.record(copies).map_err(cuda("cuEventRecord"))
    }
}

/// Device memory that grows.
#[derive(Debug)]
pub(crate) struct Memory {
    context: Arc<CudaContext>,
    pub(crate) address: u64,
    length: usize,
}

impl Memory {
    /// Makes room for so many bytes; what was there is lost.
    pub(crate) fn reserve(&mut self, length: usize) -> Result<()> {
        if length <= self.length {
            return Ok(());
        }
        self.free();
        self.context.bind_to_thread().map_err(cuda("cuCtxSetCurrent"))?;
        // SAFETY: the context is current; the memory is written before it is broadcast.
        self.address = unsafe { result::malloc_sync(length) }.map_err(cuda("cuMemAlloc"))?;
        self.length = length;
        Ok(())
    }

    fn free(&mut self) {
        if self.length > 0 && self.context.bind_to_thread().is_ok() {
            // SAFETY: it came from malloc_sync and is freed once. cuMemFree waits for the device to be done
            // with it.
            let _ = unsafe { result::free_sync(self.address) };
        }
        (self.address, self.length) = (0, 0);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.free();
    }
}

/// An error of the CUDA driver in a call.
pub(crate) fn cuda(call: &'static str) -> impl Fn(DriverError) -> Error {
    move |error| root(format!("{call} failed"), error)
}

pub(crate) fn root(what: impl Into<String>, source: impl Into<BoxError>) -> Error {
    Error::Root { what: what.into(), source: source.into() }
}

/// Where the tensors of a bucket are; those on the device are listed apart.
struct Listed<'a> {
    /// Those in host memory, each with its place in the bucket.
    host: Vec<(u64, Cow<'a, [u8]>)>,
    /// The address of the first tensor, where all lie on the device as they do in the bucket: nothing has to
    /// be gathered.
    in_place: Option<u64>,
}

/// Lists a bucket in one pass, as there may be ten thousand tensors and the device waits meanwhile. What lies on another
/// device than this one comes through the host. Targets in `pieces` count from the bucket's beginning.
fn list<'a>(
    weights: &'a dyn Snapshot,
    device: usize,
    bucket: &Bucket,
    pieces: &mut Vec<[u64; 3]>,
) -> Result<Listed<'a>> {
    pieces.clear();
    let (mut host, mut first, mut in_place, mut at) = (Vec::new(), None, true, 0u64);
    for &index in &bucket.tensors {
        let info = &weights.tensors()[index];
        let fail = |error| root(format!("cannot read tensor {}", info.name), error);
        let expected = info.byte_len().map_err(fail)?;
        let found = match weights.on_device(index).filter(|tensor| tensor.device() == device) {
            Some(tensor) => {
                let source = tensor.address();
                in_place &= source.checked_sub(*first.get_or_insert(source)) == Some(at);
                pieces.extend(gather::pieces(source, at, expected));
                tensor.bytes()
            }
            None => {
                let bytes = weights.bytes(index).map_err(fail)?;
                let found = bytes.len();
                in_place = false;
                host.push((at, bytes));
                found
            }
        };
        if found as u64 != expected {
            return Err(root(format!("tensor {}", info.name), format!("{expected} bytes of it are {found}")));
        }
        at += expected;
    }
    Ok(Listed { host, in_place: first.filter(|_| in_place) })
}

/// Cuts pieces so that each batch fits a stage.
fn batches<'a>(pieces: &[(u64, &'a [u8])], room: usize) -> Vec<Vec<(u64, &'a [u8])>> {
    let mut batches = Vec::new();
    let mut free = 0;
    for &(mut address, mut bytes) in pieces {
        while !bytes.is_empty() {
            if free == 0 {
                batches.push(Vec::new());
                free = room;
            }
            let (now, rest) = bytes.split_at(bytes.len().min(free));
            if let Some(batch) = batches.last_mut() {
                batch.push((address, now));
            }
            address += now.len() as u64;
            free -= now.len();
            bytes = rest;
        }
    }
    batches
}

/// Copies a batch into a stage, and says which part goes where: neighbours go together.
fn pack(stage: &mut [u8], batch: &[(u64, &[u8])]) -> Vec<(u64, std::ops::Range<usize>)> {
    let mut parts: Vec<(u64, std::ops::Range<usize>)> = Vec::new();
    let mut at = 0;
    for &(address, bytes) in batch {
        stage[at..at + bytes.len()].copy_from_slice(bytes);
        match parts.last_mut() {
            Some((start, range)) if *start + range.len() as u64 == address => range.end += bytes.len(),
            _ => parts.push((address, at..at + bytes.len())),
        }
        at += bytes.len();
    }
    parts
}

#[cfg(test)]
mod tests {
    use driftless_delta::cuda::Tensor;
    use driftless_transport::Dtype;
    use driftless_transport::snapshot::{AuxFile, TensorInfo};

    use super::*;

    #[test]
    fn batches_and_parts_lose_nothing() {
        let bytes: Vec<u8> = (0..1000u32).map(|n| n as u8).collect();
        // Two neighbours, a gap, and a piece larger than the room.
        let pieces = [(0, &bytes[..10]), (10, &bytes[10..30]), (50, &bytes[50..51]), (100, &bytes[100..900])];
        let mut device = vec![0u8; 1000];
        let mut copies = 0;
        for batch in batches(&pieces, 64) {
            let mut stage = vec![0; 64];
            for (address, range) in pack(&mut stage, &batch) {
                let at = address as usize;
                device[at..at + range.len()].copy_from_slice(&stage[range]);
                copies += 1;
            }
        }
        for (address, piece) in pieces {
            assert_eq!(&device[address as usize..address as usize + piece.len()], piece);
        }
        assert_eq!(device[900..], [0; 100]);
        assert!(copies <= 800 / 64 + 4, "neighbours are copied together, {copies}");
    }

    /// Where a tensor lies: at an address of a device, or in host memory.
    #[derive(Clone, Copy)]
    enum Place {
        On(usize, u64),
        Host,
    }

    struct Places(Vec<TensorInfo>, Vec<Option<Tensor>>);

    impl Snapshot for Places {
        fn tensors(&self) -> &[TensorInfo] {
            &self.0
        }
        fn bytes(&self, index: usize) -> driftless_transport::Result<Cow<'_, [u8]>> {
            Ok(vec![0; self.0[index].byte_len()? as usize].into())
        }
        fn on_device(&self, index: usize) -> Option<&Tensor> {
            self.1[index].as_ref()
        }
        fn files(&self) -> &[AuxFile] {
            &[]
        }
    }

    /// Lists for device 0 a bucket of tensors of so many bytes at these places.
    fn listed(lengths: &[u64], places: &[Place]) -> (Option<u64>, Vec<[u64; 3]>, Vec<u64>) {
        let info = |&length: &u64| TensorInfo { name: "t".into(), dtype: Dtype::U8, shape: vec![length] };
        let tensor = |(&length, &place): (&u64, &Place)| match place {
            // SAFETY: nothing is read there.
            Place::On(device, address) => Some(unsafe { Tensor::borrowed(device, address, length as usize) }),
            Place::Host => None,
        };
        let tensors = lengths.iter().zip(places).map(tensor).collect();
        let weights = Places(lengths.iter().map(info).collect(), tensors);
        let bucket = Bucket { tensors: (0..lengths.len()).collect(), bytes: lengths.iter().sum() };
        let mut pieces = vec![[7; 3]];
        let Listed { host, in_place } = list(&weights, 0, &bucket, &mut pieces).unwrap();
        (in_place, pieces, host.into_iter().map(|(at, _)| at).collect())
    }

    #[test]
    fn tensors_that_lie_as_a_bucket_does_stay_where_they_are() {
        let at = |addresses: &[u64]| addresses.iter().map(|&a| Place::On(0, a)).collect::<Vec<_>>();
        let three = [[100, 0, 8], [108, 8, 2], [110, 10, 4]];
        assert_eq!(listed(&[8, 2, 4], &at(&[100, 108, 110])), (Some(100), three.to_vec(), vec![]));
        assert_eq!(listed(&[8, 2], &at(&[100, 109])).0, None);
        assert_eq!(listed(&[8, 2], &at(&[100, 98])).0, None);
        for elsewhere in [Place::Host, Place::On(1, 1)] {
            let on_device = Place::On(0, 1);
            assert_eq!(listed(&[1, 1], &[on_device, elsewhere]), (None, vec![[1, 0, 1]], vec![1]));
            assert_eq!(listed(&[1, 1], &[elsewhere, on_device]), (None, vec![[1, 1, 1]], vec![0]));
        }
        assert_eq!(listed(&[], &[]), (None, vec![], vec![]));
    }
}
