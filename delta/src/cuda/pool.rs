//! Codecs of one device that work at the same time, and what it keeps between two versions.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use super::{Codec, Result, Tensor};
use crate::digest::{Digest, DigestTable};
use crate::element::Element;

/// Codecs that work at the same time: most tensors are too small to occupy a device alone.
const CODECS: usize = 4;
/// Those that fill tensors from the host's memory, and need none of the device's: a core reads several times slower
/// than the bus takes it.
const FILLERS: usize = 8;

/// Where a device keeps the base of the next deltas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BaseMemory {
    /// In its own memory, as much as the model takes; what finds no room there, in the host's.
    #[default]
    Device,
    /// In pinned memory of the host, which kernels read over the bus.
    Host,
}

/// The codecs of one device, for several threads.
#[derive(Debug)]
pub struct Pool {
    codecs: Several,
    fillers: Several,
    memory: BaseMemory,
}

/// Codecs of which each is one thread's at a time.
#[derive(Debug)]
struct Several {
    first: Mutex<Codec>,
    others: Vec<Mutex<Codec>>,
}

impl Several {
    fn new(codec: Codec, count: usize) -> Result<Self> {
        let others = (1..count).map(|_| codec.fork().map(Mutex::new)).collect::<Result<_>>()?;
        Ok(Self { first: Mutex::new(codec), others })
    }

    fn free(&self) -> MutexGuard<'_, Codec> {
        let mut codecs = std::iter::once(&self.first).chain(&self.others);
        let free = codecs.find_map(|codec| match codec.try_lock() {
            Ok(codec) => Some(codec),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        });
        free.unwrap_or_else(|| self.first.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What the next delta of a tensor, or of a slice of one, starts from.
#[derive(Debug)]
pub struct Base {
    /// A copy of it.
    pub tensor: Tensor,
    /// The copy's digests; those of a slice are of the slice by itself, whose first element is element 0.
    pub digests: DigestTable,
}

/// Where the bytes of a base are.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// Where the device reaches them.
    Device(&'a Tensor),
    /// In memory of the host that need not be pinned.
    Host(&'a [u8]),
}

/// What is known of a tensor: its elements, and at which one of the whole tensor a slice of it begins.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// What the codec takes its elements for.
    pub element: Element,
    /// The first one, counted as the codec does.
    pub first: u64,
}

impl Pool {
    /// Several codecs of the device that `codec` is of.
    ///
    /// # Errors
    /// [`Error::Driver`](super::Error::Driver).
    pub fn new(codec: Codec, memory: BaseMemory) -> Result<Self> {
        let fillers = Several::new(codec.fork()?, FILLERS)?;
        Ok(Self { codecs: Several::new(codec, CODECS)?, fillers, memory })
    }

    /// A codec that nobody uses, or else the first.
    pub fn codec(&self) -> MutexGuard<'_, Codec> {
        self.codecs.free()
    }

    /// The share that a tensor has of the digest of the whole one.
    ///
    /// # Errors
    /// As [`Codec::digest`].
    pub fn digest(&self, part: Part, tensor: &Tensor) -> Result<Digest> {
        Ok(self.codec().digest(part.element, part.first, tensor)?.total())
    }

    /// Copies what is to be the base of the next delta, into `room` if that has its size. Also returns the copy's share
    /// of the digest of the whole tensor: what was meant to be copied has the same.
    ///
    /// # Errors
    /// As [`Codec::digest`]; [`Error::Driver`](super::Error::Driver) if there is no memory, neither on the device
    /// nor on the host.
    pub fn keep(&self, part: Part, source: Source<'_>, room: Option<Tensor>) -> Result<(Base, Digest)> {
        let tensor = match source {
            Source::Device(from) => {
                let codec = self.codec();
                let mut tensor = self.room(&codec, from.bytes(), room)?;
                codec.copy(from, &mut tensor)?;
                tensor
            }
            Source::Host(from) => {
                let mut filler = self.fillers.free();
                let mut tensor = self.room(&filler, from.len(), room)?;
                filler.fill(from, &mut tensor)?;
                tensor
            }
        };
        let mut codec = self.codec();
        let digests = codec.digest(part.element, 0, &tensor)?;
        let share = match part.first {
            0 => digests.total(),
            first => codec.digest(part.element, first, &tensor)?.total(),
        };
        Ok((Base { tensor, digests }, share))
    }

    fn room(&self, codec: &Codec, bytes: usize, room: Option<Tensor>) -> Result<Tensor> {
        let on_device = || match self.memory {
            BaseMemory::Device => codec.room(bytes).ok(),
            BaseMemory::Host => None,
        };
        let room = room.filter(|room| room.bytes() == bytes && room.device() == codec.device());
        room.or_else(on_device).map_or_else(|| Ok(codec.adopt(codec.pinned(bytes)?)), Ok)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::STAGE;
    use super::super::machine::{Arguments, Grid, Kernel, Machine, Memory, Pinned};
    use super::super::tests::{compiled, machine};
    use super::super::twin::Twin;
    use super::*;

    const ROOMY: usize = 1 << 30;

    fn bytes(count: usize) -> Vec<u8> {
        (0..count as u32).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect()
    }

    /// A machine that copies at the last moment.
    struct Late {
        twin: Twin,
        queued: Arc<Mutex<Vec<(u64, u64, usize)>>>,
    }

    impl Machine for Late {
        fn ordinal(&self) -> usize {
            self.twin.ordinal()
        }
        fn enter(&self) -> Result<()> {
            self.twin.enter()
        }
        fn prepare(&self, element: Element) -> Result<()> {
            self.twin.prepare(element)
        }
        fn fork(&self) -> Result<Box<dyn Machine>> {
            self.twin.fork()
        }
        fn allocate(&self, bytes: usize) -> Result<Memory> {
            self.twin.allocate(bytes)
        }
        fn pinned(&self, bytes: usize) -> Result<Pinned> {
            self.twin.pinned(bytes)
        }
        fn emitters(&self) -> usize {
            self.twin.emitters()
        }
        unsafe fn clear(&self, address: u64, bytes: usize) -> Result<()> {
            // SAFETY: the caller's promise.
            unsafe { self.twin.clear(address, bytes) }
        }
        unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
            // SAFETY: the caller's promise.
            unsafe { self.twin.upload(to, from) }
        }
        unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
            // SAFETY: the caller's promise.
            unsafe { self.twin.download(from, to) }
        }
        unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
            self.queued.lock().unwrap().push((from, to, bytes));
            Ok(())
        }
        unsafe fn launch(
            &self,
            element: Element,
            kernel: Kernel,
            grid: Grid,
            arguments: &dyn Arguments,
        ) -> Result<()> {
            // SAFETY: the caller's promise.
            unsafe { self.twin.launch(element, kernel, grid, arguments) }
        }
        fn finish(&self) -> Result<()> {
            for (from, to, bytes) in self.queued.lock().unwrap().drain(..) {
                // SAFETY: the promise of who queued it.
                unsafe { self.twin.copy(from, to, bytes) }?;
            }
            self.twin.finish()
        }
    }

    #[test]
    fn what_is_staged_is_not_written_to_before_it_has_left() {
        let queued = Arc::default();
        let mut codec = Codec::on(Box::new(Late { twin: machine(), queued: Arc::clone(&queued) }));
        for count in [0, 1, 5000, STAGE - 1, STAGE, 2 * STAGE + 3, 3, 5 * STAGE + 17] {
            let (expected, mut found) = (bytes(count), vec![0; count]);
            let mut tensor = codec.room(count).unwrap();
            codec.fill(&expected, &mut tensor).unwrap();
            assert!(queued.lock().unwrap().is_empty());
            codec.download(&tensor, &mut found).unwrap();
            assert!(found == expected, "{count} bytes");
        }
        let mut other = codec.room(7).unwrap();
        assert!(codec.fill(&[0; 8], &mut other).is_err());
    }

    #[test]
    fn a_base_has_the_bytes_and_the_digests_of_its_source() {
        if !compiled(Element::Bf16) {
            return;
        }
        let expected = bytes(300_000);
        let part = Part { element: Element::Bf16, first: 70_002 };
        for memory in [BaseMemory::Device, BaseMemory::Host] {
            let codec = Codec::twin(0, ROOMY);
            let tensor = codec.upload(&expected).unwrap();
            let pool = Pool::new(codec, memory).unwrap();
            let mut room = None;
            for source in [Source::Host(&expected), Source::Device(&tensor), Source::Host(&expected)] {
                let reused = room.as_ref().map(Tensor::address);
                let (base, share) = pool.keep(part, source, room.take()).unwrap();
                assert_eq!(share, Digest::of(part.element, part.first, &expected));
                assert_eq!(share, pool.digest(part, &base.tensor).unwrap());
                assert_eq!(base.digests, DigestTable::of(part.element, &expected).unwrap());
                let mut found = vec![0; expected.len()];
                pool.codec().download(&base.tensor, &mut found).unwrap();
                assert!(found == expected, "{memory:?} {source:?}");
                assert!(reused.is_none_or(|reused| reused == base.tensor.address()));
                room = Some(base.tensor);
            }
            let pinned = room.and_then(Tensor::into_pinned).is_some();
            assert_eq!(pinned, memory == BaseMemory::Host);
        }
    }

    #[test]
    fn a_base_without_room_on_the_device_is_in_the_hosts_memory() {
        if !compiled(Element::Bf16) {
            return;
        }
        let expected = bytes(300_000);
        let pool = Pool::new(Codec::twin(0, 200_000), BaseMemory::Device).unwrap();
        let part = Part { element: Element::Bf16, first: 0 };
        let (base, share) = pool.keep(part, Source::Host(&expected), None).unwrap();
        assert_eq!(share, Digest::of(part.element, 0, &expected));
        assert!(*base.tensor.into_pinned().unwrap() == *expected);
        // Not even for the digests of a base.
        let none = Pool::new(Codec::twin(0, 64), BaseMemory::Device).unwrap();
        assert!(none.keep(part, Source::Host(&expected), None).is_err());
    }
}
