//! Writing a record in place: reserve, fill, commit, wait.

use std::sync::Arc;

use fail::fail_point;

use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::layout::ALIGN;
use crate::layout::body::{self, Fixed, Plan};
use crate::layout::frame::FRAME_HEADER;
use crate::map::Exclusive;
use crate::position::Position;
use crate::sample::{ColumnId, Kind, Scalars, Shape, VersionSpan};
use crate::segment::Segment;
use crate::shared::{Complete, Shared};

/// Space for one record in the log, to be filled in place and committed.
///
/// For a producer that makes its columns piece by piece. The loop has its records whole in memory, and uses
/// [`crate::Log::append`].
///
/// Dropping it gives the space up: the position stays empty. Readers see nothing behind an open reservation,
/// so fill and commit without waiting for anything else; one held for longer than the log's
/// `reservation_deadline` is reclaimed.
#[derive(Debug)]
pub struct Reservation {
    // Declared before the ticket, so that a dropped reservation gives its bytes back before its number.
    body: Exclusive,
    plan: Plan,
    kind: Kind,
    prompt_len: usize,
    scalars: Scalars,
    ticket: Ticket,
}

/// What lies between two columns, at most.
const PADDING: [u8; ALIGN] = [0; ALIGN];

/// Where the bookkeeping of a reservation is.
#[derive(Debug, Clone)]
pub(crate) enum Home {
    /// In this process.
    Here { shared: Arc<Shared>, segment: Arc<Segment> },
    /// In the process at the other end.
    There(Arc<Connection>),
}

/// The number of a reservation; gives it up when dropped.
#[derive(Debug)]
struct Ticket {
    home: Home,
    sequence: u64,
    done: bool,
}

impl Reservation {
    pub(crate) fn new(home: Home, sequence: u64, body: Exclusive, plan: Plan, shape: &Shape) -> Self {
        let (kind, prompt_len) = (shape.kind, shape.prompt);
        let ticket = Ticket { home, sequence, done: false };
        Self { body, plan, kind, prompt_len, scalars: Scalars::default(), ticket }
    }

    /// The position that the record will have.
    #[must_use]
    pub fn position(&self) -> Position {
        Position(self.ticket.sequence)
    }

    /// Sets ids, reward and the other single values.
    pub fn set_scalars(&mut self, scalars: Scalars) {
        self.scalars = scalars;
    }

    /// Prompt and response tokens.
    pub fn tokens_mut(&mut self) -> &mut [i32] {
        self.typed(ColumnId::TOKENS)
    }

    /// One log-probability for each response token.
    pub fn log_probs_mut(&mut self) -> &mut [f32] {
        self.typed(ColumnId::LOG_PROBS)
    }

    /// One mask byte for each response token.
    pub fn loss_mask_mut(&mut self) -> &mut [u8] {
        self.typed(ColumnId::LOSS_MASK)
    }

    /// Version spans, ascending.
    pub fn spans_mut(&mut self) -> &mut [VersionSpan] {
        self.typed(ColumnId::SPANS)
    }

    /// Bytes of the engine's name, UTF-8.
    pub fn engine_mut(&mut self) -> &mut [u8] {
        self.typed(ColumnId::ENGINE)
    }

    /// The user's bytes.
    pub fn metadata_mut(&mut self) -> &mut [u8] {
        self.typed(ColumnId::METADATA)
    }

    /// Bytes of any column; empty when the shape has no such column.
    pub fn column_mut(&mut self, id: ColumnId) -> &mut [u8] {
        let Some(column) = self.plan.column(id) else { return &mut [] };
        self.body
            .get_mut(column.offset - FRAME_HEADER..column.offset - FRAME_HEADER + column.bytes)
            .unwrap_or_default()
    }

    fn typed<T: bytemuck::Pod>(&mut self, id: ColumnId) -> &mut [T] {
        // The plan gives these columns 64-byte alignment and whole elements, so the cast does not fail.
        bytemuck::try_cast_slice_mut(self.column_mut(id)).unwrap_or_default()
    }

    /// Completes the record. With [`crate::SyncPolicy::EachRecord`] it is durable on return; otherwise
    /// [`Pending::wait`] makes it so.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when the columns contradict each other (the position then stays empty),
    /// [`Error::Expired`] when the reservation was reclaimed, and what [`crate::Log::sync`] answers when the
    /// policy asks for a sync.
    pub fn commit(mut self) -> Result<Pending> {
        let spans: Vec<VersionSpan> = self.spans_mut().to_vec();
        let fixed = self.fixed(&spans)?;
        body::encode(&mut self.body, &fixed, &self.plan);
        let crc = match self.ticket.home {
            Home::Here { .. } => crc32c::crc32c(&self.body),
            // The owner computes its own.
            Home::There(_) => 0,
        };
        self.finish(&fixed, crc)
    }

    /// Copies whole columns in and commits. Columns that the shape does not have, or has empty, are left out.
    pub(crate) fn commit_copy(
        mut self,
        spans: &[VersionSpan],
        columns: &[(ColumnId, &[u8])],
    ) -> Result<Pending> {
        let fixed = self.fixed(spans)?;
        let end = self.plan.frame - FRAME_HEADER;
        let first = self.plan.columns.first().map_or(end, |column| column.offset - FRAME_HEADER);
        let mut head = vec![0; first];
        body::encode(&mut head, &fixed, &self.plan);
        let (mut pieces, mut at) = (vec![&head[..]], first);
        for column in &self.plan.columns {
            let bytes = columns.iter().find(|(id, _)| *id == column.id).map_or(&[][..], |(_, bytes)| bytes);
            let start = column.offset - FRAME_HEADER;
            pieces.extend([&PADDING[..start - at], &bytes[..column.bytes]]);
            at = start + column.bytes;
        }
        pieces.push(&PADDING[..end - at]);
        let crc = match self.ticket.home {
            Home::Here { .. } => pieces.iter().fold(0, |crc, piece| crc32c::crc32c_append(crc, piece)),
            // The owner computes its own.
            Home::There(_) => 0,
        };
        self.body.fill(&pieces);
        self.finish(&fixed, crc)
    }

    /// Checks the columns, and gives the single values as they are stored.
    fn fixed(&self, spans: &[VersionSpan]) -> Result<Fixed> {
        let count = |id| self.plan.column(id).map_or(0, |column| column.bytes / column.element.size());
        let lengths = [ColumnId::TOKENS, ColumnId::LOG_PROBS, ColumnId::LOSS_MASK].map(count);
        body::check(self.kind, self.prompt_len, lengths, spans)
            .map_err(|(what, expected, found)| Error::invalid(what, expected, found))?;
        let prompt_len = u32::try_from(self.prompt_len).unwrap_or(u32::MAX);
        Ok(Fixed { scalars: self.scalars, prompt_len, versions: body::versions(spans) })
    }

    fn finish(self, fixed: &Fixed, crc: u32) -> Result<Pending> {
        let Self { body, plan, kind, mut ticket, .. } = self;
        fail_point!("log.append");
        ticket.done = true;
        let sequence = ticket.sequence;
        match &ticket.home {
            Home::Here { shared, segment } => {
                shared.commit_body(segment, Complete { kind, sequence, body, crc }, fixed, &plan)?;
            }
            Home::There(connection) => {
                // The owner reads it next.
                drop(body);
                connection.commit(sequence)?;
            }
        }
        Ok(Pending { home: ticket.home.clone(), position: Position(sequence) })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        match &self.home {
            _ if self.done => {}
            Home::Here { shared, .. } => shared.give_up(self.sequence),
            Home::There(connection) => connection.give_up(self.sequence),
        }
    }
}

/// A committed record that may not be on stable storage yet.
#[derive(Debug)]
#[must_use = "a record is safe only once `wait` has returned its `Ack`"]
pub struct Pending {
    home: Home,
    position: Position,
}

impl Pending {
    /// The record's position.
    #[must_use]
    pub fn position(&self) -> Position {
        self.position
    }

    /// Waits until the record is on stable storage, syncing if no other thread does.
    ///
    /// # Errors
    ///
    /// As [`crate::Log::sync`].
    pub fn wait(self) -> Result<Ack> {
        match &self.home {
            Home::Here { shared, .. } => shared.sync_through(self.position.0)?,
            Home::There(connection) => connection.wait(self.position.0)?,
        }
        Ok(Ack { position: self.position })
    }
}

/// Proof that a record is on stable storage: it survives the end of the process and of the machine's power.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ack {
    position: Position,
}

impl Ack {
    /// The record's position.
    #[must_use]
    pub fn position(&self) -> Position {
        self.position
    }
}
