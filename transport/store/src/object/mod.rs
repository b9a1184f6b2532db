//! Publications in an object store: S3, Google Cloud Storage and Azure Blob Storage, over the crate
//! `object_store`.
//!
//! The crate signs, sends and parses. This directory adds the names of stores (`url`), requests with retries
//! and a deadline (`ask`), and the meaning of refusals (`service`). This file keeps the promises of a
//! [`Store`]: objects that come in parts are read whole, and a create whose answer was lost is recognised as
//! ours.

mod ask;
mod service;
mod url;

use std::fmt;
use std::future::{Future, ready};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use driftless_http::runtime;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutOptions};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::error::{Error, Result, if_found};
use crate::key::Key;
use crate::store::{Entry, Object, OnBytes, PutMode, Store, no_progress};
use ask::{Action, Asked, Silent, cause};

pub(crate) use url::open;

/// How often a read begins again because the object was replaced meanwhile.
const REPLACED_MAX: usize = 8;
/// How long a try of a listing may take whose pages come in time.
const LISTING_MAX: Duration = Duration::from_secs(3600);

/// What this needs of `object_store`.
trait Backend: ObjectStore + MultipartStore {}

impl<T: ObjectStore + MultipartStore> Backend for T {}

/// Sizes, bounds and times of requests.
#[derive(Debug, Clone)]
struct Limits {
    /// Longer reads and writes are split into requests of this many bytes; S3 takes no parts below 5 MiB.
    part_bytes: usize,
    /// Parts of one object under way at once.
    parts: usize,
    /// Requests under way at once.
    requests: usize,
    /// How long one try may take, and how many bytes a second are added to that.
    attempt: Duration,
    bytes_per_second_min: u64,
    /// After this long no further try is made.
    deadline: Duration,
    /// The first pause between two tries; it doubles up to the second.
    pause: [Duration; 2],
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            part_bytes: 8 << 20,
            parts: 4,
            requests: 64,
            attempt: Duration::from_secs(20),
            bytes_per_second_min: 128 << 10,
            deadline: Duration::from_secs(120),
            pause: [Duration::from_millis(100), Duration::from_secs(5)],
        }
    }
}

/// A store in a bucket or container.
///
/// Its calls may be made from any thread but those of the runtime that drives them ([`runtime`]).
pub(crate) struct Bucket {
    remote: Arc<Remote>,
    runtime: Handle,
}

/// What requests need.
struct Remote {
    backend: Box<dyn Backend>,
    prefix: String,
    name: String,
    limits: Limits,
    slots: Semaphore,
}

impl Bucket {
    fn new(backend: Box<dyn Backend>, prefix: &str, name: String, limits: Limits) -> Result<Self> {
        let runtime = runtime::handle().map_err(|source| Error::io("start the threads of", &name, source))?;
        let slots = Semaphore::new(limits.requests);
        let remote = Remote { backend, prefix: prefix.to_owned(), name, limits, slots };
        Ok(Self { remote: Arc::new(remote), runtime })
    }

    /// Runs a call about `key` on the runtime and waits for it. Every request in it has a deadline.
    fn wait<T, F>(&self, key: &Key, call: impl FnOnce(Arc<Remote>, Key) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let answer = runtime::run(&self.runtime, call(self.remote.clone(), key.clone()));
        answer.unwrap_or(Err(Error::Internal { what: "a request to the object store" }))
    }
}

impl fmt::Display for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.remote.name)
    }
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The backend's own form would show its credentials.
        f.debug_struct("Bucket").field("name", &self.remote.name).finish_non_exhaustive()
    }
}

impl Store for Bucket {
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        let bytes = Bytes::copy_from_slice(bytes);
        self.wait(key, |remote, key| async move {
            match mode {
                PutMode::Create => remote.create(&key, bytes).await,
                PutMode::Overwrite if bytes.len() <= remote.limits.part_bytes => {
                    remote.put(&key, bytes, PutMode::Overwrite).await.result
                }
                PutMode::Overwrite => remote.put_parts(&key, bytes).await,
            }
        })
    }

    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>> {
        self.wait(key, |remote, key| async move { remote.get(&key, range, &no_progress()).await })
    }

    fn get_cached(&self, object: &Object, range: Range<u64>, arrived: &OnBytes) -> Result<Vec<u8>> {
        let arrived = arrived.clone();
        self.wait(&object.key, |remote, key| async move { remote.get(&key, Some(range), &arrived).await })
    }

    fn head(&self, key: &Key) -> Result<Entry> {
        self.wait(key, |remote, key| async move { remote.head(&key).await })
    }

    fn list(&self, prefix: &Key) -> Result<Vec<Entry>> {
        self.wait(prefix, |remote, prefix| async move { remote.list(&prefix).await })
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.wait(key, |remote, key| async move { remote.delete(&key).await })
    }
}

/// A range of an object, and which object it was.
struct Part {
    bytes: Bytes,
    size: u64,
    identity: (Option<String>, SystemTime),
}

impl Remote {
    fn path(&self, key: &Key) -> Path {
        // Keys and checked prefixes have nothing that would need an escape.
        match self.prefix.as_str() {
            "" => Path::from(key.as_str()),
            prefix => Path::from(format!("{prefix}/{key}")),
        }
    }

    async fn put(&self, key: &Key, bytes: Bytes, mode: PutMode) -> Asked<()> {
        let path = self.path(key);
        let options = || match mode {
            PutMode::Create => PutOptions::from(object_store::PutMode::Create),
            PutMode::Overwrite => PutOptions::default(),
        };
        self.ask(Action("put", key), bytes.len(), || async {
            self.backend.put_opts(&path, bytes.clone().into(), options()).await.map(drop)
        })
        .await
    }

    /// Creates an object, always in one request: only that has the condition.
    async fn create(&self, key: &Key, bytes: Bytes) -> Result<()> {
        let asked = self.put(key, bytes.clone(), PutMode::Create).await;
        match asked.result {
            Err(Error::AlreadyExists { .. }) if asked.attempts > 1 && self.holds(key, &bytes).await? => {
                Ok(())
            }
            result => result,
        }
    }

    /// Whether these bytes are what is stored: an earlier try took effect and its answer was lost.
    async fn holds(&self, key: &Key, bytes: &Bytes) -> Result<bool> {
        let found = if_found(self.get(key, Some(0..bytes.len() as u64 + 1), &no_progress()).await)?;
        Ok(found.is_some_and(|found| found == *bytes))
    }

    async fn put_parts(&self, key: &Key, bytes: Bytes) -> Result<()> {
        let path = self.path(key);
        let begun =
            self.ask(Action("begin the upload of", key), 0, || self.backend.create_multipart(&path)).await;
        let id = begun.result?;
        let part = |(index, start): (usize, usize)| {
            let part = bytes.slice(start..bytes.len().min(start + self.limits.part_bytes));
            let (path, id) = (&path, &id);
            async move {
                let put = || self.backend.put_part(path, id, index, part.clone().into());
                self.ask(Action("put a part of", key), part.len(), put).await.result
            }
        };
        let starts = (0..bytes.len()).step_by(self.limits.part_bytes).enumerate();
        let parts: Result<Vec<PartId>> =
            stream::iter(starts.map(part)).buffered(self.limits.parts).try_collect().await;
        let completed = match parts {
            Ok(parts) => self.complete(key, &path, &id, &parts, &bytes).await,
            Err(error) => Err(error),
        };
        if completed.is_err() {
            let aborted = self
                .ask(Action("abort the upload of", key), 0, || self.backend.abort_multipart(&path, &id))
                .await;
            if let Err(error) = aborted.result {
                tracing::warn!(%key, %error, "parts of an upload stay behind until the store removes them");
            }
        }
        completed
    }

    async fn complete(
        &self,
        key: &Key,
        path: &Path,
        id: &String,
        parts: &[PartId],
        bytes: &Bytes,
    ) -> Result<()> {
        let complete = || async { self.backend.complete_multipart(path, id, parts.to_vec()).await.map(drop) };
        let asked = self.ask(Action("complete the upload of", key), 0, complete).await;
        match asked.result {
            // An upload that is complete is gone.
            Err(Error::NotFound { .. }) if asked.attempts > 1 && self.holds(key, bytes).await? => Ok(()),
            result => result,
        }
    }

    async fn get(&self, key: &Key, range: Option<Range<u64>>, arrived: &OnBytes) -> Result<Vec<u8>> {
        let wanted = range.clone().unwrap_or(0..u64::MAX);
        let step = self.limits.part_bytes as u64;
        for _ in 0..REPLACED_MAX {
            let first = wanted.start..wanted.end.min(wanted.start.saturating_add(step));
            if first.is_empty() {
                return crate::store::clamp(key, range, self.head(key).await?.size).map(|_| Vec::new());
            }
            let first = match self.part(key, first, arrived).await {
                // Ranges behind the end are answered in as many ways as there are servers.
                Err(refused @ Error::Refused { .. }) => {
                    let Ok(entry) = self.head(key).await else { return Err(refused) };
                    let found = crate::store::clamp(key, range, entry.size)?;
                    return if found.is_empty() { Ok(Vec::new()) } else { Err(refused) };
                }
                first => first?,
            };
            if let Some(bytes) = self.rest(key, wanted.clone(), first, arrived).await? {
                return Ok(bytes);
            }
        }
        let what = format!("`{key}` in {}", self.name);
        Err(Error::Busy { what, with: "a writer that replaces it".to_owned() })
    }

    /// The whole range whose first part is here; `None` if the object was replaced meanwhile.
    async fn rest(
        &self,
        key: &Key,
        wanted: Range<u64>,
        first: Part,
        arrived: &OnBytes,
    ) -> Result<Option<Vec<u8>>> {
        let end = wanted.end.min(first.size);
        let mut bytes = Vec::new();
        let length = usize::try_from(end - wanted.start).unwrap_or(usize::MAX);
        let what = || format!("memory for `{key}` from {}", self.name);
        let too_large = |_| Error::TooLarge { what: what(), max: length as u64 };
        bytes.try_reserve_exact(length).map_err(too_large)?;
        bytes.extend_from_slice(&first.bytes);
        let step = self.limits.part_bytes;
        let starts = (wanted.start + bytes.len() as u64..end).step_by(step);
        let rest = starts.map(|start| self.part(key, start..end.min(start + step as u64), arrived));
        let mut rest = stream::iter(rest).buffered(self.limits.parts);
        while let Some(part) = rest.next().await {
            let part = part?;
            if (part.size, &part.identity) != (first.size, &first.identity) {
                return Ok(None);
            }
            bytes.extend_from_slice(&part.bytes);
        }
        Ok(Some(bytes))
    }

    async fn part(&self, key: &Key, range: Range<u64>, arrived: &OnBytes) -> Result<Part> {
        let path = self.path(key);
        let length = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let get = || async {
            let options = GetOptions { range: Some(range.clone().into()), ..GetOptions::default() };
            let found = self.backend.get_opts(&path, options).await?;
            let (size, identity) =
                (found.meta.size, (found.meta.e_tag.clone(), found.meta.last_modified.into()));
            // As long as it says, and not longer than it was asked for: more is not read.
            let expected = found.range.end.saturating_sub(found.range.start).min(length as u64);
            let body = found.into_stream().inspect_ok(|bytes| arrived(bytes.len() as u64));
            let append = |mut bytes: Vec<u8>, more: Bytes| {
                if (bytes.len() + more.len()) as u64 > expected {
                    return ready(Err(too_long(&path, expected)));
                }
                bytes.extend_from_slice(&more);
                ready(Ok(bytes))
            };
            let bytes = body.try_fold(Vec::with_capacity(expected as usize), append).await?;
            Ok(Part { bytes: bytes.into(), size, identity })
        };
        self.ask(Action("get", key), length, get).await.result
    }

    async fn head(&self, key: &Key) -> Result<Entry> {
        let path = self.path(key);
        let found = self.ask(Action("examine", key), 0, || self.backend.head(&path)).await.result?;
        Ok(Entry::new(key.clone(), found.size, Some(found.last_modified.into())))
    }

    async fn list(&self, prefix: &Key) -> Result<Vec<Entry>> {
        let path = self.path(prefix);
        let found = self.ask_within(Action("list", prefix), LISTING_MAX, || self.pages(&path)).await.result?;
        // Anything that is not a key was not put here by a store.
        let entry = |meta: ObjectMeta| {
            let name = meta.location.as_ref().strip_prefix(&self.prefix)?.trim_start_matches('/');
            Some(Entry::new(Key::new(name).ok()?, meta.size, Some(meta.last_modified.into())))
        };
        let mut entries: Vec<Entry> = found.into_iter().filter_map(entry).collect();
        entries.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        Ok(entries)
    }

    /// All that lies at a path. Each page has the time of one request.
    async fn pages(&self, path: &Path) -> object_store::Result<Vec<ObjectMeta>> {
        let (mut found, mut listing) = (Vec::new(), self.backend.list(Some(path)));
        let patience = self.limits.attempt;
        while let Some(next) =
            timeout(patience, listing.try_next()).await.map_err(|_| Silent::error(patience))??
        {
            found.push(next);
        }
        Ok(found)
    }

    async fn delete(&self, key: &Key) -> Result<()> {
        let path = self.path(key);
        if_found(self.ask(Action("delete", key), 0, || self.backend.delete(&path)).await.result).map(drop)
    }
}

fn too_long(path: &Path, expected: u64) -> object_store::Error {
    let source = format!("expected {expected} bytes of {path}, and there are more in the body").into();
    object_store::Error::Generic { store: "answer", source }
}

#[cfg(test)]
mod tests;
