//! Brings an object here: reads the ranges that are kept, and fetches the others by several requests at a time.

use std::iter::{Enumerate, Peekable};
use std::slice::ChunksMut;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use super::window::Request;
use super::{DownloadCache, PartialObject, wrong_size};
use crate::error::{Error, Result};
use crate::os::crash_point;
use crate::wait::lock;
use crate::{Object, OnBytes, Store};

/// Requests of one object that are under way at the same time at most.
const PARALLEL: usize = 16;

/// A range of an object by its number, and where its bytes go.
type NumberedRange<'b> = (usize, &'b mut [u8]);

/// An object that several threads gather.
struct Gather<'a, 'b> {
    cache: &'a DownloadCache,
    store: &'a dyn Store,
    object: &'a Object,
    kept: &'a PartialObject,
    arriving: &'a (dyn Fn() + Sync),
    /// Ranges that no thread has looked for yet.
    rest: Mutex<Peekable<Enumerate<ChunksMut<'b, u8>>>>,
    reused: AtomicBool,
    error: Mutex<Option<Error>>,
}

/// All bytes of an object, and whether any of them were kept.
pub(super) fn gather(
    cache: &DownloadCache,
    store: &dyn Store,
    object: &Object,
    kept: &PartialObject,
    arriving: &(dyn Fn() + Sync),
) -> Result<(Vec<u8>, bool)> {
    let mut bytes = zeroed(object)?;
    let rest = Mutex::new(bytes.chunks_mut(kept.range_bytes as usize).enumerate().peekable());
    let (reused, error) = (AtomicBool::new(false), Mutex::new(None));
    let gather = Gather { cache, store, object, kept, arriving, rest, reused, error };
    thread::scope(|scope| {
        for _ in 1..PARALLEL.min(kept.ranges() as usize) {
            // Where the system has no more threads, fewer do it.
            let _ = thread::Builder::new().spawn_scoped(scope, || gather.work());
        }
        gather.work();
    });
    let (reused, error) = (gather.reused.into_inner(), lock(&gather.error).take());
    match error {
        Some(error) => Err(error),
        None => Ok((bytes, reused)),
    }
}

impl<'b> Gather<'_, 'b> {
    /// Fetches ranges until there are no more, or one failed.
    fn work(&self) {
        while let Some((mut ranges, request)) = self.next() {
            (self.arriving)();
            let unit = self.kept.range_bytes;
            let fetched = fetch_ranges(self.store, self.object, unit, &mut ranges, &request.arrived());
            if fetched.is_ok() {
                request.done();
            }
            if let Err(error) = fetched.and_then(|()| self.keep(&ranges)) {
                lock(&self.error).get_or_insert(error);
            }
        }
    }

    /// The next ranges that are not kept, one behind the other, and the right to ask for them.
    fn next(&self) -> Option<(Vec<NumberedRange<'b>>, Request)> {
        if self.has_failed() {
            return None;
        }
        let mut rest = lock(&self.rest);
        while let Some((index, range)) = rest.peek_mut()
            && self.is_kept(*index, range)
        {
            rest.next();
        }
        let (first, _) = rest.peek()?;
        let unit = self.kept.range_bytes;
        let (most, left) =
            (self.cache.options.request_bytes_max / unit, self.object.size - *first as u64 * unit);
        // One thread waits for an object, so that none does once all of it is under way.
        let request = self.cache.window.enter(&self.object.key, unit, most, left);
        if self.has_failed() {
            return None;
        }
        let mut ranges: Vec<_> = rest.next().into_iter().collect();
        while (ranges.len() as u64) < request.bytes.div_ceil(unit)
            && let Some((index, range)) = rest.peek_mut()
            && !self.is_kept(*index, range)
        {
            ranges.extend(rest.next());
        }
        Some((ranges, request))
    }

    fn has_failed(&self) -> bool {
        lock(&self.error).is_some()
    }

    /// Reads a range that is kept.
    fn is_kept(&self, index: usize, range: &mut [u8]) -> bool {
        let is_kept = self.kept.read(index as u64, range);
        self.reused.fetch_or(is_kept, Relaxed);
        is_kept
    }

    /// Keeps ranges. A disk that does not take them is no reason to stop.
    fn keep(&self, ranges: &[NumberedRange<'_>]) -> Result<()> {
        for (index, range) in ranges {
            if let Err(error) = self.kept.write(*index as u64, range) {
                tracing::warn!(path = %self.kept.path.display(), %error, "what arrives is not kept");
                self.cache.forget(&self.object.blake3);
            }
            crash_point(self.cache.point)?;
        }
        Ok(())
    }
}

/// Reads ranges that lie one behind the other; the last one of an object with a byte more, so that a longer
/// object is noticed.
fn fetch_ranges(
    store: &dyn Store,
    object: &Object,
    range_bytes: u64,
    ranges: &mut [NumberedRange<'_>],
    arrived: &OnBytes,
) -> Result<()> {
    let start = ranges.first().map_or(0, |(index, _)| *index as u64 * range_bytes);
    let length: usize = ranges.iter().map(|(_, range)| range.len()).sum();
    let end = start + length as u64;
    let asked = if end == object.size { end + 1 } else { end };
    let bytes = match store.get_cached(object, start..asked, arrived) {
        Err(Error::RangeOutside { size, .. }) => return Err(wrong_size(object, size)),
        bytes => bytes?,
    };
    if bytes.len() != length {
        return Err(wrong_size(object, start + bytes.len() as u64));
    }
    let mut rest = bytes.as_slice();
    for (_, range) in ranges {
        let (own, behind) = rest.split_at(range.len());
        range.copy_from_slice(own);
        rest = behind;
    }
    Ok(())
}

/// A buffer for an object; a size that cannot be had is an error, not an abort.
fn zeroed(object: &Object) -> Result<Vec<u8>> {
    let too_large =
        || Error::TooLarge { what: format!("memory for object `{}`", object.key), max: object.size };
    let size = usize::try_from(object.size).map_err(|_| too_large())?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(size).map_err(|_| too_large())?;
    bytes.resize(size, 0);
    Ok(bytes)
}
