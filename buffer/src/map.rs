#![expect(unsafe_code, reason = "memory maps: the one place where bytes of a file become slices")]
//! A mapped segment, and the rule that makes slices of it sound.
//!
//! The rule: a byte is handed out to the one producer that reserved it ([`Exclusive`], from a bump
//! allocation, so that two never overlap). Readers get it ([`Bytes`]) once its frame header says `Committed`.
//! A header becomes `Committed` only after its producer's `Exclusive` is gone, and nothing ever changes it
//! back. Everything else (frame headers, header page, index table) is touched through atomics alone.
//!
//! The rule cannot cover a process that ignores it. Writing to a log's files from outside, or truncating
//! them, is the same as writing into this process's memory. That is stated in `docs/format/log.md`.

use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, PoisonError, RwLock};

use memmap2::{Advice, MmapRaw};

use crate::layout::ALIGN;
use crate::layout::frame::{FRAME_HEADER, FrameHeader, FrameState, Peek};
use crate::layout::segment::HEADER_PAGE;
use crate::regular::call;
#[cfg(test)]
use crate::tests::image::Image;

/// What the kernel marks as written at once, or less.
const PAGE: usize = 4096;
/// The disk begins to store when so much has been copied in, and not only when a sync waits for it.
const BEGIN: usize = 1 << 20;

/// The memory of one segment.
#[derive(Debug)]
pub(crate) struct Map {
    memory: Memory,
    /// The file behind it, until the segment is sealed: large copies go in through it.
    file: RwLock<Option<File>>,
    bytes: usize,
    /// Everything below is handed out or fixed; only `allot` and `limit` move it.
    tail: AtomicUsize,
    /// The disk was told to begin with what lies below.
    begun: AtomicUsize,
}

#[derive(Debug)]
enum Memory {
    File(MmapRaw),
    #[cfg(test)]
    Image(Arc<Image>),
}

impl Map {
    /// Wraps a mapped file. Allocations start at `tail`.
    pub(crate) fn file(raw: MmapRaw, tail: usize) -> Self {
        let bytes = raw.len();
        let tail = AtomicUsize::new(tail.min(bytes));
        Self { memory: Memory::File(raw), file: RwLock::new(None), bytes, tail, begun: AtomicUsize::new(0) }
    }

    /// As [`Map::file`], for a segment that is to be written.
    pub(crate) fn writable(raw: MmapRaw, file: File, tail: usize) -> Self {
        // Otherwise the first touch of a header makes the kernel read ahead: it fills with zeros what is
        // about to be written. Refused advice costs time, nothing else.
        let _ = raw.advise(Advice::Random);
        Self { file: RwLock::new(Some(file)), ..Self::file(raw, tail) }
    }

    /// Wraps the simulated medium of the crash tests.
    #[cfg(test)]
    pub(crate) fn image(image: Arc<Image>, tail: usize) -> Self {
        let bytes = image.len();
        let tail = AtomicUsize::new(tail.min(bytes));
        let (file, begun) = (RwLock::new(None), AtomicUsize::new(0));
        Self { memory: Memory::Image(image), file, bytes, tail, begun }
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    fn base(&self) -> *mut u8 {
        match &self.memory {
            Memory::File(raw) => raw.as_mut_ptr(),
            #[cfg(test)]
            Memory::Image(image) => image.base(),
        }
    }

    /// Panics unless `range` lies inside the map: a caller that gets this wrong has a bug, not bad input.
    fn pointer(&self, range: Range<usize>) -> *mut u8 {
        assert!(
            range.start <= range.end && range.end <= self.bytes,
            "{range:?} outside a map of {} bytes",
            self.bytes
        );
        // SAFETY: the start was just checked to lie inside (or one past) the one allocation behind `base`.
        unsafe { self.base().add(range.start) }
    }

    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8));
        let pointer = self.pointer(offset..offset + 8).cast();
        // SAFETY: inside the map, which lives as long as `self`; maps start at a page, so the word is
        // aligned. Read-only maps are only loaded from, relaxed, which std's atomics allow on read-only
        // memory.
        unsafe { AtomicU64::from_ptr(pointer) }
    }

    /// A word of 4 bytes; nothing else may be done with its place.
    pub(crate) fn counter(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4));
        let pointer = self.pointer(offset..offset + 4).cast();
        // SAFETY: as in `word`.
        unsafe { AtomicU32::from_ptr(pointer) }
    }

    /// Copies `range` (multiples of 8) out through atomic loads, while it may be written.
    pub(crate) fn copy(&self, range: Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0; range.len()];
        for (word, at) in bytes.chunks_exact_mut(8).zip(range.step_by(8)) {
            word.copy_from_slice(&self.word(at).load(Ordering::Relaxed).to_ne_bytes());
        }
        fence(Ordering::Acquire);
        bytes
    }

    /// Writes `bytes` (a multiple of 8 of them) at `offset`, beyond everything that was handed out.
    ///
    /// # Panics
    ///
    /// If the place lies below the tail.
    pub(crate) fn put(&self, offset: usize, bytes: &[u8]) {
        assert!(offset >= self.tail.load(Ordering::Relaxed), "writing below the tail of a segment");
        self.store(offset, bytes);
    }

    /// Writes the header page of a segment, before its first record is committed.
    pub(crate) fn put_head(&self, head: &[u8]) {
        assert!(head.len() <= HEADER_PAGE, "a header longer than its page");
        self.store(0, head);
    }

    /// Makes everything from `offset` to the end of the map zero, touching only pages that are not.
    pub(crate) fn clear(&self, offset: usize) {
        assert!(offset >= self.tail.load(Ordering::Relaxed), "clearing below the tail of a segment");
        for at in (offset..self.bytes).step_by(8) {
            let word = self.word(at);
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Relaxed);
                self.written(at..at + 8);
            }
        }
    }

    /// Tells the simulated medium which pages a store has made dirty; the kernel knows by itself.
    fn written(&self, _range: Range<usize>) {
        #[cfg(test)]
        if let Memory::Image(image) = &self.memory {
            image.written(_range);
        }
    }

    fn store(&self, offset: usize, bytes: &[u8]) {
        self.written(offset..offset + bytes.len());
        for (index, word) in bytes.chunks_exact(8).enumerate() {
            let mut value = [0; 8];
            value.copy_from_slice(word);
            self.word(offset + index * 8).store(u64::from_ne_bytes(value), Ordering::Relaxed);
        }
    }

    /// Is every byte of `range` (multiples of 8) zero?
    pub(crate) fn is_zero(&self, range: Range<usize>) -> bool {
        range.step_by(8).all(|at| self.word(at).load(Ordering::Relaxed) == 0)
    }

    /// Forgets the allocations above `end`: recovery found the last frame there.
    pub(crate) fn limit(&mut self, end: usize) {
        *self.tail.get_mut() = end.min(self.bytes);
    }

    /// Marks every page of `range` as written, so that the next flush stores it even if an earlier, failed
    /// one left the page marked clean.
    pub(crate) fn touch(&mut self, range: Range<usize>) {
        for at in range.step_by(PAGE) {
            let word = self.word(at);
            word.store(word.load(Ordering::Relaxed), Ordering::Relaxed);
            self.written(at..at + 8);
        }
    }

    /// Where the next allocation begins.
    pub(crate) fn tail(&self) -> usize {
        self.tail.load(Ordering::Relaxed)
    }

    /// Takes the next `bytes` (a multiple of 64) of the segment if they end at or before `limit`.
    pub(crate) fn allot(self: &Arc<Self>, bytes: usize, limit: usize) -> Option<Exclusive> {
        let fits = |start: usize| start.checked_add(bytes).filter(|&end| end <= limit.min(self.bytes));
        let start = self.tail.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(Exclusive { map: Arc::clone(self), start, bytes, copied: false })
    }

    /// A frame that the process which owns the log has given to this one alone; `None` when it lies outside
    /// the map.
    pub(crate) fn granted(self: &Arc<Self>, start: usize, bytes: usize) -> Option<Exclusive> {
        let end = start.checked_add(bytes)?;
        let sane = bytes >= FRAME_HEADER && start.is_multiple_of(ALIGN) && end <= self.bytes;
        sane.then(|| Exclusive { map: Arc::clone(self), start, bytes, copied: false })
    }

    /// Makes the kernel back the page at `offset` for writing now, whatever else is done to it meanwhile.
    pub(crate) fn prefault(&self, offset: usize) {
        if offset + 8 <= self.bytes {
            self.word(offset).fetch_or(0, Ordering::Relaxed);
            self.written(offset..offset + 8);
        }
    }

    /// As [`Map::set_header`], through the file: where nothing else touches the page in memory, that is
    /// cheaper than a fault.
    pub(crate) fn write_header(&self, offset: usize, block: &[u8; FRAME_HEADER]) {
        if self.write(offset, &[block]) != Some(FRAME_HEADER) {
            self.set_header(offset, block);
        }
    }

    /// Writes a frame header. The last word, which holds the CRC, goes last and releases the body.
    pub(crate) fn set_header(&self, offset: usize, block: &[u8; FRAME_HEADER]) {
        self.store(offset, &block[..56]);
        let mut last = [0; 8];
        last.copy_from_slice(&block[56..]);
        self.word(offset + 56).store(u64::from_ne_bytes(last), Ordering::Release);
        self.written(offset..offset + FRAME_HEADER);
    }

    /// Reads the frame header at `offset`. A header caught in the middle of being written reads as invalid.
    pub(crate) fn header(&self, offset: usize, salt: u64, limit: usize) -> Peek {
        let mut block = [0; FRAME_HEADER];
        for (index, bytes) in block.chunks_exact_mut(8).enumerate().rev() {
            bytes.copy_from_slice(&self.word(offset + index * 8).load(Ordering::Relaxed).to_ne_bytes());
            fence(Ordering::Acquire);
        }
        FrameHeader::peek(&block, salt, offset as u64, limit.min(self.bytes) as u64)
    }

    /// The committed frame at `offset`, with its body; `None` for anything else. The body's CRC is not
    /// checked here.
    pub(crate) fn committed(self: &Arc<Self>, offset: usize, salt: u64) -> Option<(FrameHeader, Bytes)> {
        let header = self.committed_header(offset, salt)?;
        let bytes = header.bytes as usize - FRAME_HEADER;
        Some((header, Bytes { map: Arc::clone(self), start: offset + FRAME_HEADER, bytes }))
    }

    /// As [`Map::committed`], borrowing the body.
    pub(crate) fn committed_body(&self, offset: usize, salt: u64) -> Option<(FrameHeader, &[u8])> {
        let header = self.committed_header(offset, salt)?;
        let range = offset + FRAME_HEADER..offset + header.bytes as usize;
        let bytes = range.len();
        let pointer = self.pointer(range);
        // SAFETY: inside the map; the frame is committed, so by the rule above its body is not written any
        // more.
        Some((header, unsafe { std::slice::from_raw_parts(pointer, bytes) }))
    }

    fn committed_header(&self, offset: usize, salt: u64) -> Option<FrameHeader> {
        match self.header(offset, salt, self.bytes) {
            Peek::Frame(header) if header.state == FrameState::Committed => Some(header),
            _ => None,
        }
    }

    /// Writes pieces through the file; how many bytes that stored, `None` where there is no file or it
    /// refuses.
    fn write(&self, offset: usize, pieces: &[&[u8]]) -> Option<usize> {
        let pieces: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
        let file = self.file.read().unwrap_or_else(PoisonError::into_inner);
        rustix::io::pwritev(file.as_ref()?, &pieces, offset as u64).ok()
    }

    /// Makes the disk begin with what lies before `end`, without waiting for it. The sync that follows finds
    /// less to do.
    fn begin(&self, end: usize) {
        let (from, end) = (self.begun.load(Ordering::Relaxed), end / PAGE * PAGE);
        let mine = from + BEGIN <= end
            && self.begun.compare_exchange(from, end, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        let file = self.file.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = file.as_ref().filter(|_| mine) {
            // Lengths of files are far below what these take. A refusal costs time; an error of the disk is
            // kept for the sync.
            let (offset, bytes) = (from as libc::off64_t, (end - from) as libc::off64_t);
            // SAFETY: the descriptor is open as long as `file` is borrowed, and the call touches no memory of
            // ours.
            let _ = unsafe {
                libc::sync_file_range(file.as_raw_fd(), offset, bytes, libc::SYNC_FILE_RANGE_WRITE)
            };
        }
    }

    /// Nothing more is written: the file is closed, the map stays.
    pub(crate) fn complete(&self) {
        *self.file.write().unwrap_or_else(PoisonError::into_inner) = None;
        match &self.memory {
            // Its readers do profit from reading ahead.
            Memory::File(raw) => drop(raw.advise(Advice::Normal)),
            #[cfg(test)]
            Memory::Image(_) => {}
        }
        self.let_go();
    }

    /// Lets the kernel take the memory of its pages back. They are the file's, and come again when they are
    /// touched.
    pub(crate) fn let_go(&self) {
        match &self.memory {
            // SAFETY: a shared map of a file loses nothing by this: its pages, dirty ones too, stay in the
            // page cache.
            Memory::File(raw) => unsafe {
                // A kernel that will not costs memory, nothing else.
                let _ = raw.unchecked_advise(memmap2::UncheckedAdvice::DontNeed);
            },
            #[cfg(test)]
            Memory::Image(_) => {}
        }
    }

    /// Brings `range` to stable storage, together with the pages it shares.
    pub(crate) fn flush(&self, range: Range<usize>) -> io::Result<()> {
        match &self.memory {
            Memory::File(raw) => call(|| raw.flush_range(range.start, range.len())),
            #[cfg(test)]
            Memory::Image(image) => image.flush(range),
        }
    }
}

/// Bytes that one producer alone may write.
#[derive(Debug)]
pub(crate) struct Exclusive {
    map: Arc<Map>,
    start: usize,
    bytes: usize,
    copied: bool,
}

impl Exclusive {
    /// Is it to be filled by [`Exclusive::fill`], and so large that its pages in memory are not touched?
    pub(crate) fn goes_through_file(&self) -> bool {
        self.copied && self.bytes >= PAGE
    }

    /// Says that it will be filled by [`Exclusive::fill`].
    pub(crate) fn copied(self, copied: bool) -> Self {
        Self { copied, ..self }
    }

    /// Offset of the frame in its segment.
    pub(crate) fn offset(&self) -> usize {
        self.start
    }

    /// Fills the body with these pieces, one after another. Many bytes go through the file: one call of the
    /// kernel instead of a fault for every page. No fault then waits for the file system's journal.
    ///
    /// # Panics
    ///
    /// If they are not as long as the body.
    pub(crate) fn fill(&mut self, pieces: &[&[u8]]) {
        let bytes: usize = pieces.iter().map(|piece| piece.len()).sum();
        assert_eq!(bytes, self.bytes - FRAME_HEADER, "a body of another length than its frame");
        if bytes >= PAGE && self.map.write(self.start + FRAME_HEADER, pieces) == Some(bytes) {
            // This frame's own header is still to come.
            self.map.begin(self.start);
            return;
        }
        let mut rest = &mut self[..];
        for piece in pieces {
            let (place, behind) = rest.split_at_mut(piece.len());
            place.copy_from_slice(piece);
            rest = behind;
        }
    }
}

impl Deref for Exclusive {
    type Target = [u8];

    /// The body: everything behind the frame header.
    fn deref(&self) -> &[u8] {
        let range = self.start + FRAME_HEADER..self.start + self.bytes;
        let bytes = range.len();
        let pointer = self.map.pointer(range);
        // SAFETY: inside the map, which `self.map` keeps; `allot` gave these bytes to this value alone, and
        // readers get them only after it is gone.
        unsafe { std::slice::from_raw_parts(pointer, bytes) }
    }
}

impl DerefMut for Exclusive {
    fn deref_mut(&mut self) -> &mut [u8] {
        let range = self.start + FRAME_HEADER..self.start + self.bytes;
        let bytes = range.len();
        self.map.written(range.clone());
        let pointer = self.map.pointer(range);
        // SAFETY: as above, and `&mut self` makes this the only slice.
        unsafe { std::slice::from_raw_parts_mut(pointer, bytes) }
    }
}

/// The body of a committed frame. Keeps its map alive, so retention never unmaps under a reader.
#[derive(Debug, Clone)]
pub(crate) struct Bytes {
    map: Arc<Map>,
    start: usize,
    bytes: usize,
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let pointer = self.map.pointer(self.start..self.start + self.bytes);
        // SAFETY: inside the map, which `self.map` keeps; only `committed` makes this value, so nothing
        // writes here.
        unsafe { std::slice::from_raw_parts(pointer, self.bytes) }
    }
}
