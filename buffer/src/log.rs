//! The writing side of a log.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::cursor::{self, Cursor};
use crate::damage::Recovery;
use crate::layout::body::Plan;
use crate::lock::LockFile;
use crate::options::{Options, SyncPolicy};
use crate::reader::Reader;
use crate::recover::{self, SEGMENT_BYTES_MAX};
use crate::reservation::{Ack, Pending, Reservation};
use crate::retain::{Retention, Retired};
use crate::sample::{ColumnId, Element, Kind, Sample, Shape};
use crate::shared::Shared;
use crate::storage::{Directory, Storage};
use crate::sync::Flusher;
use crate::{Error, Identity, Position, Result};

/// Pages of a file.
const PAGE: u64 = 4096;

/// A log, open for writing. Clones are handles of the same log and may be used from any thread.
///
/// Dropping the last handle syncs nothing: what was acknowledged is safe, the rest is as after a crash. [`Log::close`]
/// syncs and seals, so that the next open has nothing to scan.
#[derive(Debug, Clone)]
pub struct Log {
    shared: Arc<Shared>,
    /// Ends the background sync with the last handle.
    _flusher: Option<Arc<Flusher>>,
}

impl Log {
    /// Opens the log in `dir`, creating the directory if it is absent, and recovers what an earlier process left:
    /// incomplete records at the end are dropped, damaged ones are quarantined and told by [`Log::recovery`].
    ///
    /// # Errors
    ///
    /// [`Error::Locked`] when another process writes it, [`Error::Identity`] when it belongs to another run, model or
    /// tokenizer, [`Error::Unsupported`] when a newer program wrote it, [`Error::Invalid`] for options that make no sense,
    /// [`Error::Io`].
    pub fn open(dir: impl AsRef<Path>, options: Options) -> Result<Self> {
        let root = dir.as_ref();
        fs::create_dir_all(root).map_err(Error::io("create", root))?;
        let lock = LockFile::take(root)?;
        Self::open_on(Box::new(Directory::new(root)), root.to_owned(), options, Some(lock))
    }

    /// As [`Log::open`], on any storage.
    pub(crate) fn open_on(
        storage: Box<dyn Storage>,
        root: PathBuf,
        mut options: Options,
        lock: Option<LockFile>,
    ) -> Result<Self> {
        options.segment_bytes = options.segment_bytes.next_multiple_of(PAGE);
        check_options(&options)?;
        let opened = recover::repair(&*storage, &options.identity, cursor::newest(&*storage)?)?;
        let shared = Arc::new(Shared::new(storage, root, options, opened, lock));
        let flusher = match shared.options().sync {
            SyncPolicy::Within(bound) => Some(Arc::new(Flusher::start(Arc::clone(&shared), bound)?)),
            _ => None,
        };
        Ok(Self { shared, _flusher: flusher })
    }

    /// What opening found: damage, and how much had to be scanned.
    #[must_use]
    pub fn recovery(&self) -> &Recovery {
        self.shared.recovery()
    }

    /// What the log belongs to.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.shared.options().identity
    }

    /// Takes space for a record, to be written in place.
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`], [`Error::Invalid`] for an impossible shape, [`Error::Full`] when too much stays unsynced for
    /// longer than `wait_deadline`, [`Error::Poisoned`], [`Error::Io`] when a new segment cannot be made (the log stays
    /// usable: a full disk may have room later).
    pub fn reserve(&self, shape: &Shape) -> Result<Reservation> {
        let plan = plan(shape)?;
        let (segment, sequence, body) = self.shared.reserve(shape.kind, &plan)?;
        Ok(Reservation::new(
            Arc::clone(&self.shared),
            segment,
            sequence,
            body,
            plan,
            shape.kind,
            shape.prompt,
        ))
    }

    /// Copies a record into the log: `reserve`, write, `commit`.
    ///
    /// # Errors
    ///
    /// As [`Log::reserve`] and [`Reservation::commit`].
    pub fn append(&self, sample: &Sample<'_>) -> Result<Pending> {
        let response = sample.tokens.len().checked_sub(sample.prompt_len).ok_or_else(|| Error::Invalid {
            what: "prompt length",
            expected: format!("at most {} tokens", sample.tokens.len()),
            found: sample.prompt_len.to_string(),
        })?;
        let fits = |length: usize| length == response || sample.kind == Kind::Prompt && length == 0;
        for (what, length) in [("log-probs", sample.log_probs.len()), ("loss mask", sample.loss_mask.len())] {
            if !fits(length) {
                let expected = format!("one for each of {response} response tokens");
                return Err(Error::Invalid { what, expected, found: length.to_string() });
            }
        }
        let shape = Shape {
            kind: sample.kind,
            prompt: sample.prompt_len,
            response,
            spans: sample.spans.len(),
            engine: sample.engine.len(),
            metadata: sample.metadata.len(),
            extra: sample
                .extra
                .iter()
                .map(|(id, element, bytes)| (*id, *element, bytes.len() / element.size()))
                .collect(),
        };
        for (_, element, bytes) in sample.extra {
            if !bytes.len().is_multiple_of(element.size()) {
                let expected = format!("whole elements of {} bytes", element.size());
                return Err(Error::Invalid {
                    what: "extra column",
                    expected,
                    found: format!("{} bytes", bytes.len()),
                });
            }
        }
        let mut space = self.reserve(&shape)?;
        space.set_scalars(sample.scalars);
        space.tokens_mut().copy_from_slice(sample.tokens);
        if sample.kind != Kind::Prompt {
            space.log_probs_mut().copy_from_slice(sample.log_probs);
            space.loss_mask_mut().copy_from_slice(sample.loss_mask);
        }
        space.spans_mut().copy_from_slice(sample.spans);
        space.engine_mut().copy_from_slice(sample.engine.as_bytes());
        space.metadata_mut().copy_from_slice(sample.metadata);
        for (id, _, bytes) in sample.extra {
            space.column_mut(*id).copy_from_slice(bytes);
        }
        space.commit()
    }

    /// Appends several records and makes them durable together. The answer has one [`Ack`] per record, in order.
    ///
    /// # Errors
    ///
    /// As [`Log::append`]; the records before the one that failed are in the log, unacknowledged.
    pub fn append_all(&self, samples: &[Sample<'_>]) -> Result<Vec<Ack>> {
        let pending: Vec<Pending> =
            samples.iter().map(|sample| self.append(sample)).collect::<Result<_>>()?;
        // The last one first: its sync covers the others.
        let mut acks: Vec<Ack> = pending.into_iter().rev().map(Pending::wait).collect::<Result<_>>()?;
        acks.reverse();
        Ok(acks)
    }

    /// Brings every record committed so far to stable storage. Returns the end of what readers see.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the medium fails; from then on every call that writes answers [`Error::Poisoned`], because nobody
    /// knows what a failed sync has left behind. [`Error::Full`] when another thread's sync does not finish in time.
    pub fn sync(&self) -> Result<Position> {
        self.shared.sync()
    }

    /// Reads what is on stable storage, including everything appended later.
    #[must_use]
    pub fn reader(&self) -> Reader {
        Reader::live(Arc::clone(&self.shared))
    }

    /// The durable position called `name`; 0 until it is first committed.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a name that is not 1–64 of `A-Z a-z 0-9 . _ -`, [`Error::Damaged`], [`Error::Identity`] when the
    /// file belongs to another run, [`Error::Io`].
    pub fn cursor(&self, name: &str) -> Result<Cursor> {
        Cursor::open(Arc::clone(&self.shared), name)
    }

    /// Removes old segments. Records that readers hold stay valid.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a retention without limit or cursor, [`Error::Poisoned`], [`Error::Io`] (what was not removed
    /// is found again when the log is next opened).
    pub fn retain(&self, retention: &Retention) -> Result<Retired> {
        self.shared.retain(retention)
    }

    /// Syncs, seals the last segment, ends the log for all handles and lets another process write it. Readers keep
    /// working. Without it, the log stays locked until the last handle, reservation and reader are dropped.
    ///
    /// # Errors
    ///
    /// As [`Log::sync`].
    pub fn close(self) -> Result<()> {
        self.shared.close()
    }
}

fn check_options(options: &Options) -> Result<()> {
    let invalid = |what, expected: String, found: String| Err(Error::Invalid { what, expected, found });
    let model = options.identity.model.len();
    if model > Identity::MODEL_BYTES_MAX {
        return invalid(
            "model name",
            format!("at most {} bytes", Identity::MODEL_BYTES_MAX),
            format!("{model} bytes"),
        );
    }
    let sizes = 16 * PAGE..=SEGMENT_BYTES_MAX;
    if !sizes.contains(&options.segment_bytes) {
        let expected = format!("{} to {}", sizes.start(), sizes.end());
        return invalid("segment_bytes", expected, options.segment_bytes.to_string());
    }
    if options.sync == SyncPolicy::EveryRecords(0) {
        return invalid("sync policy", "at least 1 record".into(), "0".into());
    }
    Ok(())
}

fn plan(shape: &Shape) -> Result<Plan> {
    let invalid = |found: String| Error::Invalid {
        what: "record shape",
        expected: "sizes that fit a segment".into(),
        found,
    };
    let tokens = shape.prompt.checked_add(shape.response).ok_or_else(|| invalid(format!("{shape:?}")))?;
    if u32::try_from(tokens).is_err() {
        return Err(invalid(format!("{tokens} tokens")));
    }
    let scored = if shape.kind == Kind::Prompt { 0 } else { shape.response };
    let mut sizes = vec![
        (ColumnId::TOKENS, Element::I32, tokens),
        (ColumnId::LOG_PROBS, Element::F32, scored),
        (ColumnId::LOSS_MASK, Element::U8, scored),
        (ColumnId::SPANS, Element::Span, shape.spans),
        (ColumnId::ENGINE, Element::U8, shape.engine),
        (ColumnId::METADATA, Element::U8, shape.metadata),
    ];
    for &(id, element, count) in &shape.extra {
        if sizes.iter().any(|&(other, ..)| other == id) {
            return Err(invalid(format!("column {} twice", id.0)));
        }
        sizes.push((id, element, count));
    }
    Plan::new(&sizes).ok_or_else(|| invalid(format!("{shape:?}")))
}
