//! Tokens of answers that are not finished: durable as they come, and found again by a run that goes on.
//!
//! A piece is a partial sample of the log with the new tokens alone. Its note says behind what they were drawn: which
//! generation of the answer it is, its input, and how many tokens came before. Tokens that stand twice were drawn again
//! after a crash lost some; the later ones count. Attempts at an answer share nothing: none goes on behind tokens of another.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::time::SystemTime;

use driftless_bridge::engine::{Drawn, Piece, ReplyDigest};
use driftless_bridge::{GenerateRequest, Label};
use driftless_buffer::sample::{ColumnId, Element};
use driftless_buffer::{Kind, Position, Reader, Record, Sample, Scalars, VersionSpan};
use serde::{Deserialize, Serialize};

use super::keep::Keeper;
use crate::error::Result;
use crate::metrics::unix_us;
use crate::sample::Underway;
use crate::seed::first_bits;

/// The metadata of a piece, as JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct PieceNote {
    /// Which generation of its answer it is of.
    nth: u64,
    /// Digest of what the engine read before the first token.
    input: u64,
    /// Tokens of the generation before it.
    behind: u64,
    /// Attempts at the answer that had failed.
    #[serde(default, skip_serializing_if = "is_first")]
    attempt: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_first(attempt: &u64) -> bool {
    *attempt == 0
}

/// New tokens of an answer that goes on.
pub(super) struct Chunk {
    scalars: Scalars,
    note: Vec<u8>,
    drawn: Drawn,
    spans: Vec<VersionSpan>,
    loss_mask: Vec<u8>,
}

impl Chunk {
    pub(super) fn replies(&self) -> &[ReplyDigest] {
        &self.drawn.replies
    }

    /// As a record, with these further columns.
    pub(super) fn sample<'a>(&'a self, extra: &'a [(ColumnId, Element, &'a [u8])]) -> Sample<'a> {
        Sample {
            kind: Kind::Partial,
            scalars: self.scalars,
            tokens: &self.drawn.output_ids,
            log_probs: &self.drawn.log_probs,
            loss_mask: &self.loss_mask,
            spans: &self.spans,
            metadata: &self.note,
            extra,
            ..Sample::default()
        }
    }
}

/// Pieces of answers, by answer, in the order in which they were written.
pub(super) type Pieces = BTreeMap<u64, Vec<Record>>;

/// The pieces that a log has of the answers of these groups, which are in flight.
pub(super) fn read(log: &Reader, groups: &[u64]) -> Result<Pieces> {
    let mut pieces = Pieces::new();
    let mut begun: Option<Position> = None;
    for group in groups {
        if let Some(prompt) = log.prompt(*group)? {
            begun = Some(begun.map_or(prompt.position(), |first| first.min(prompt.position())));
        }
    }
    // Damaged records are not gone on from.
    for record in begun.into_iter().flat_map(|begun| log.iter(begun)).flatten() {
        if record.kind() == Kind::Partial && groups.contains(&record.scalars().group_id) {
            pieces.entry(record.scalars().sample_id).or_default().push(record);
        }
    }
    Ok(pieces)
}

/// The newest attempt at an answer that these pieces are of.
pub(super) fn attempt(pieces: &[Record]) -> u64 {
    let notes =
        pieces.iter().filter_map(|record| serde_json::from_slice::<PieceNote>(record.metadata()).ok());
    notes.map(|note| note.attempt).max().unwrap_or_default()
}

/// An answer that is under way: what the log has of it, and where its tokens go as they come.
pub(super) struct Durable<'a> {
    keeper: &'a Keeper,
    pieces: &'a [Record],
    /// What the records of all its pieces share.
    scalars: Scalars,
    /// When the first token of its first generation was heard of, in µs since 1970; 0 before.
    first_us: AtomicI64,
}

impl<'a> Durable<'a> {
    /// The answer of this number, of a group with this number and seat.
    pub(super) fn new(keeper: &'a Keeper, pieces: &'a [Record], answer: u64, group: u64, seat: u64) -> Self {
        let scalars = Scalars {
            sample_id: answer,
            group_id: group,
            rollout_id: seat,
            status: driftless_buffer::Finish::Abort.code(),
            ..Scalars::default()
        };
        Durable { keeper, pieces, scalars, first_us: AtomicI64::new(0) }
    }

    /// When its first token was heard of; 0 where its engine did not stream.
    pub(super) fn first_us(&self) -> i64 {
        self.first_us.load(Relaxed)
    }
}

impl Underway for Durable<'_> {
    fn go_on<'a>(
        &'a self,
        attempt: u64,
        nth: u64,
        request: &mut GenerateRequest,
        minimum: Option<&Label>,
    ) -> Box<dyn FnMut(Piece<'_>) + Send + 'a> {
        let input = digest(&request.input_ids);
        let first = PieceNote { nth, input, behind: 0, attempt };
        request.drawn = drawn(self.pieces, first, minimum, self.keeper.run());
        let note = PieceNote { behind: request.drawn.len() as u64, ..first };
        let mut writer = Writer { answer: self, note, unsent: Drawn::default() };
        Box::new(move |piece| writer.take(piece))
    }
}

/// What the pieces of the generation that begins with `first` come to, but for those with tokens older than `minimum` and what is behind these.
fn drawn(pieces: &[Record], first: PieceNote, minimum: Option<&Label>, run: &str) -> Drawn {
    let mut drawn = Drawn::default();
    for record in pieces {
        let Ok(note) = serde_json::from_slice::<PieceNote>(record.metadata()) else { continue };
        if (PieceNote { behind: 0, ..note }) != first || note.behind > drawn.len() as u64 {
            continue;
        }
        drawn.truncate(note.behind as usize);
        for span in record.spans() {
            let range = span.start as usize..span.end as usize;
            let tokens = record.tokens().get(range.clone()).zip(record.log_probs().get(range));
            let (Ok(label), Some((output_ids, log_probs))) = (Label::new(run, span.version), tokens) else {
                break;
            };
            if minimum.is_some_and(|minimum| !label.at_least(minimum)) {
                drawn = Drawn::default();
                break;
            }
            let label = label.to_string();
            drawn.push(Piece { output_ids, log_probs, label: &label, located: true, digest: None });
        }
        let behind = note.behind as u32;
        let column = record.column(ColumnId::REPLIES).map_or(&[][..], |(_, column)| column);
        let replies = column.chunks(ReplyDigest::BYTES).filter_map(ReplyDigest::from_bytes);
        let end = drawn.len().saturating_sub(note.behind as usize);
        let replies = replies.filter(|reply| reply.end as usize <= end);
        ReplyDigest::append(&mut drawn.replies, replies, behind);
    }
    drawn
}

/// Keeps the tokens of one generation as they come.
struct Writer<'a> {
    answer: &'a Durable<'a>,
    /// Of the next piece.
    note: PieceNote,
    /// Tokens that found no room: they go with the next.
    unsent: Drawn,
}

impl Writer<'_> {
    /// Takes tokens that stay. They are durable soon; nothing waits for it.
    fn take(&mut self, piece: Piece<'_>) {
        let now = unix_us(SystemTime::now());
        let _ = self.answer.first_us.compare_exchange(0, now.cast_signed(), Relaxed, Relaxed);
        self.unsent.push(piece);
        let Some(chunk) = self.chunk(now) else { return };
        if self.answer.keeper.piece(chunk) {
            self.note.behind += self.unsent.len() as u64;
            self.unsent = Drawn::default();
        }
    }

    /// What is unsent; nothing where its weights are no version of a run.
    fn chunk(&self, clock_us: u64) -> Option<Chunk> {
        let span = |span: &driftless_bridge::engine::VersionSpan| {
            let version = span.label.parse::<Label>().ok()?.version();
            Some(VersionSpan { version, start: span.start, end: span.end })
        };
        let spans = self.unsent.spans.iter().map(span).collect::<Option<Vec<_>>>()?;
        let loss_mask = vec![1; self.unsent.len()];
        let scalars = Scalars { clock_us, ..self.answer.scalars };
        // Numbers are always JSON.
        let note = serde_json::to_vec(&self.note).unwrap_or_default();
        Some(Chunk { scalars, note, drawn: self.unsent.clone(), spans, loss_mask })
    }
}

fn digest(ids: &[i32]) -> u64 {
    first_bits(blake3::hash(&ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>()).as_bytes())
}
