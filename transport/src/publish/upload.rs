//! Packs payloads into objects, and stores them while the next ones are encoded.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use driftless_store::wait::lock;
use driftless_store::{ContentDigest, Object, PutMode, Store};

use super::Attempt;
use crate::error::{Error, Result};
use crate::manifest::Part;

/// Objects at the beginning of a publication that grow, each to twice the bytes of the one before, up to the
/// size of the others.
const FIRST_OBJECTS: usize = 2;

/// Where the uploads of one attempt at a version stand. Shared by the encoding thread and the uploading ones.
#[derive(Debug, Default)]
pub(super) struct Uploaded {
    objects: Mutex<Vec<Option<Object>>>,
    error: Mutex<Option<Error>>,
    failed: AtomicBool,
    bytes: AtomicU64,
}

impl Uploaded {
    /// Bytes that are durable.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    fn check(&self) -> Result<()> {
        if !self.failed.load(Relaxed) {
            return Ok(());
        }
        match lock(&self.error).take() {
            Some(error) => Err(error),
            None => Err(Error::Internal { what: "the uploads of this publication" }),
        }
    }

    fn fail(&self, error: Error) {
        lock(&self.error).get_or_insert(error);
        self.failed.store(true, Relaxed);
    }

    fn put(&self, store: &dyn Store, attempt: &Attempt<'_>, index: usize, bytes: &[u8]) -> Result<()> {
        fail::fail_point!("publish.upload");
        let key = attempt.root.join(&format!("{}-{index:05}", attempt.name))?;
        store.put(&key, bytes, PutMode::Overwrite)?;
        let object = Object { key, size: bytes.len() as u64, blake3: ContentDigest::of(bytes) };
        let mut objects = lock(&self.objects);
        if objects.len() <= index {
            objects.resize(index + 1, None);
        }
        objects[index] = Some(object);
        self.bytes.fetch_add(bytes.len() as u64, Relaxed);
        Ok(())
    }
}

/// How objects are stored.
#[derive(Debug, Clone, Copy)]
pub(super) struct Uploads {
    /// Threads that store them. Two objects more than that are in memory at most.
    pub(super) threads: usize,
    pub(super) object_bytes_max: usize,
}

/// Runs `encode` with a packer whose full objects are stored meanwhile, and returns all objects, durable.
pub(super) fn with_uploads<T>(
    store: &dyn Store,
    attempt: &Attempt<'_>,
    Uploads { threads, object_bytes_max }: Uploads,
    encode: impl FnOnce(&mut Packer<'_>) -> Result<T>,
) -> Result<(T, Vec<Object>)> {
    let uploaded = Uploaded::default();
    let (sender, receiver) = sync_channel::<(usize, Vec<u8>)>(1);
    let receiver = Arc::new(Mutex::new(receiver));
    let encoded = thread::scope(|scope| {
        let uploaded = &uploaded;
        for _ in 0..threads {
            // Only the threads own the receiver: when all are gone, sending fails instead of waiting.
            let receiver = receiver.clone();
            scope.spawn(move || {
                while let Some((index, bytes)) = next(&receiver) {
                    // After a failure the queue is only emptied, so that the encoder never waits in vain.
                    if !uploaded.failed.load(Relaxed)
                        && let Err(error) = uploaded.put(store, attempt, index, &bytes)
                    {
                        uploaded.fail(error);
                    }
                }
            });
        }
        drop(receiver);
        let mut packer = Packer { current: Vec::new(), index: 0, object_bytes_max, sender, uploaded };
        let encoded = encode(&mut packer)?;
        packer.finish()?;
        Ok(encoded)
        // The packer's sender ends here, and with it the threads.
    });
    let encoded = encoded.and_then(|encoded| uploaded.check().map(|()| encoded))?;
    let objects = uploaded.objects.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok((encoded, objects.into_iter().flatten().collect()))
}

fn next(receiver: &Mutex<Receiver<(usize, Vec<u8>)>>) -> Option<(usize, Vec<u8>)> {
    lock(receiver).recv().ok()
}

/// Puts payloads one behind the other into objects of bounded size.
pub(super) struct Packer<'a> {
    current: Vec<u8>,
    index: usize,
    object_bytes_max: usize,
    sender: SyncSender<(usize, Vec<u8>)>,
    uploaded: &'a Uploaded,
}

impl Packer<'_> {
    /// Appends a payload, which has to fit into an object.
    pub(super) fn append(&mut self, payload: &[u8]) -> Result<Part> {
        self.uploaded.check()?;
        if !self.current.is_empty() && self.current.len() + payload.len() > self.room() {
            self.flush()?;
        }
        let object = u32::try_from(self.index).map_err(|_| Error::TooLarge {
            what: "number of objects of a publication".to_owned(),
            max: u64::from(u32::MAX),
        })?;
        let offset = self.current.len() as u64;
        self.current.extend_from_slice(payload);
        Ok(Part { object, offset, length: payload.len() as u64 })
    }

    /// Appends bytes, over as many objects as they need.
    pub(super) fn append_bytes(&mut self, bytes: &[u8]) -> Result<Vec<Part>> {
        bytes.chunks(self.object_bytes_max).map(|chunk| self.append(chunk)).collect()
    }

    /// Bytes that are durable already.
    pub(super) fn bytes_uploaded(&self) -> u64 {
        self.uploaded.bytes()
    }

    /// Bytes for the current object. The first ones are smaller, so that their readers have something to
    /// decode while the others are on their way.
    fn room(&self) -> usize {
        self.object_bytes_max >> FIRST_OBJECTS.saturating_sub(self.index)
    }

    /// Hands the current object to the uploads and begins the next one.
    fn flush(&mut self) -> Result<()> {
        let full = std::mem::take(&mut self.current);
        let sent = self.sender.send((self.index, full));
        self.index += 1;
        // The threads end only with this packer, or with a panic that the scope passes on.
        sent.map_err(|_| Error::Internal { what: "the uploads of this publication" })
    }

    fn finish(mut self) -> Result<()> {
        if !self.current.is_empty() {
            self.flush()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use driftless_store::{Key, Memory};

    use super::*;
    use crate::ids::Version;

    #[test]
    fn the_first_objects_grow_and_no_payload_is_cut() {
        let (store, root) = (Memory::new(), Key::new("run/v").unwrap());
        let attempt = Attempt { version: Version(0), root: &root, name: "a" };
        let uploads = Uploads { threads: 2, object_bytes_max: 1000 };
        let payloads = [100, 100, 100, 900, 300, 600, 200];
        let (parts, objects) = with_uploads(&store, &attempt, uploads, |packer| {
            payloads.iter().map(|length| packer.append(&vec![1; *length])).collect::<Result<Vec<_>>>()
        })
        .unwrap();
        // Room for 250, 500 and then 1000 bytes; one payload may have an object of its own that is larger.
        let places: Vec<_> = parts.iter().map(|part| (part.object, part.offset, part.length)).collect();
        assert_eq!(
            places,
            [(0, 0, 100), (0, 100, 100), (1, 0, 100), (2, 0, 900), (3, 0, 300), (3, 300, 600), (4, 0, 200)]
        );
        assert_eq!(objects.iter().map(|object| object.size).collect::<Vec<_>>(), [200, 100, 900, 900, 200]);
    }
}
