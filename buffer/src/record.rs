//! One record, read in place.

use crate::layout::body::{self, Fixed, Plan};
use crate::layout::frame::{FRAME_HEADER, FrameHeader};
use crate::map::Bytes;
use crate::position::Position;
use crate::sample::{ColumnId, Element, Finish, Kind, PromptState, Scalars, Verdict, VersionSpan};

/// A record of the log. Its slices point into the mapped file and stay valid as long as the record (or a
/// clone of it) is held, also after retention removed the file.
///
/// Every column starts at a multiple of 64 bytes in memory, as libtorch's `from_blob` likes it.
#[derive(Debug, Clone)]
pub struct Record {
    position: Position,
    kind: Kind,
    fixed: Fixed,
    plan: Plan,
    body: Bytes,
    /// Of its answer, if that is a record of its own and there already.
    score: Option<Box<Record>>,
    /// Zeros in place of its loss mask, if the score masks it.
    masked: Option<Vec<u8>>,
}

impl Record {
    /// Checks a body whose CRC is right. The error says what does not fit.
    pub(crate) fn new(header: &FrameHeader, body: Bytes) -> Result<Self, &'static str> {
        let kind = Kind::from_code(header.kind).ok_or("record of an unknown kind")?;
        let (fixed, plan) = body::accept(kind, &body)?;
        Ok(Self { position: Position(header.sequence), kind, fixed, plan, body, score: None, masked: None })
    }

    /// The same with the score of its answer.
    pub(crate) fn with_score(self, score: Option<Record>) -> Self {
        let Some(score) = score.filter(|score| score.kind == Kind::Score) else { return self };
        let scalars = Scalars { reward: score.fixed.scalars.reward, ..self.fixed.scalars };
        let masked = (score.verdict() == Verdict::Masked).then(|| vec![0; self.loss_mask().len()]);
        Self { fixed: Fixed { scalars, ..self.fixed }, score: Some(Box::new(score)), masked, ..self }
    }

    /// The score of its answer, where that is a record of its own, as it was when this record was read.
    #[must_use]
    pub fn score(&self) -> Option<&Record> {
        self.score.as_deref()
    }

    /// Whether its reward is known.
    #[must_use]
    pub fn is_scored(&self) -> bool {
        !self.fixed.scalars.score_follows || self.score.is_some()
    }

    /// What the score says of its answer (scores, and samples that have one).
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let said = if self.kind == Kind::Score { Some(self) } else { self.score() };
        said.map_or(Verdict::Kept, |score| Verdict::from_code(score.fixed.scalars.status))
    }

    /// Several rewards of its answer ([`ColumnId::REWARDS`]); empty where there are none.
    #[must_use]
    pub fn rewards(&self) -> &[f32] {
        self.score().unwrap_or(self).of_type(ColumnId::REWARDS, Element::F32)
    }

    /// When its answer was asked for, when the first token came and the last ([`ColumnId::TIMES`]); empty where unknown.
    #[must_use]
    pub fn times(&self) -> &[i64] {
        self.of_type(ColumnId::TIMES, Element::I64)
    }

    /// Its number in the log.
    #[must_use]
    pub fn position(&self) -> Position {
        self.position
    }

    /// Sample, partial sample, prompt or score.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Ids, reward and the other single values.
    #[must_use]
    pub fn scalars(&self) -> &Scalars {
        &self.fixed.scalars
    }

    /// Why the generation ended (samples and partial samples).
    #[must_use]
    pub fn finish(&self) -> Finish {
        Finish::from_code(self.fixed.scalars.status)
    }

    /// Where the prompt stands (prompt records).
    #[must_use]
    pub fn prompt_state(&self) -> PromptState {
        PromptState::from_code(self.fixed.scalars.status)
    }

    /// How many of [`Record::tokens`] are the prompt.
    #[must_use]
    pub fn prompt_len(&self) -> usize {
        self.fixed.prompt_len as usize
    }

    /// Token ids of prompt and response.
    #[must_use]
    pub fn tokens(&self) -> &[i32] {
        self.typed(ColumnId::TOKENS)
    }

    /// Token ids of the response.
    #[must_use]
    pub fn response(&self) -> &[i32] {
        self.tokens().get(self.prompt_len()..).unwrap_or_default()
    }

    /// Log-probability of each response token when it was sampled.
    #[must_use]
    pub fn log_probs(&self) -> &[f32] {
        self.typed(ColumnId::LOG_PROBS)
    }

    /// 1 where a response token is trained on; nowhere, if the answer's score masks it. [`Record::column`] has the mask
    /// as it was written.
    #[must_use]
    pub fn loss_mask(&self) -> &[u8] {
        self.masked.as_deref().unwrap_or_else(|| self.typed(ColumnId::LOSS_MASK))
    }

    /// Log-probability of each response token under a teacher; empty where there is none.
    #[must_use]
    pub fn teacher_log_probs(&self) -> &[f32] {
        self.of_type(ColumnId::TEACHER_LOG_PROBS, Element::F32)
    }

    /// Which version generated which response tokens.
    #[must_use]
    pub fn spans(&self) -> &[VersionSpan] {
        self.typed(ColumnId::SPANS)
    }

    /// Oldest and newest version among the spans; `None` without spans.
    #[must_use]
    pub fn versions(&self) -> Option<(u64, u64)> {
        self.fixed.versions
    }

    /// Name of the engine that generated it; empty if it is not UTF-8.
    #[must_use]
    pub fn engine(&self) -> &str {
        std::str::from_utf8(self.typed(ColumnId::ENGINE)).unwrap_or_default()
    }

    /// The user's bytes.
    #[must_use]
    pub fn metadata(&self) -> &[u8] {
        self.typed(ColumnId::METADATA)
    }

    /// Any column by its number: its element type and its bytes.
    #[must_use]
    pub fn column(&self, id: ColumnId) -> Option<(Element, &[u8])> {
        let column = self.plan.column(id)?;
        let start = column.offset.checked_sub(FRAME_HEADER)?;
        Some((column.element, self.body.get(start..start + column.bytes)?))
    }

    /// The numbers of all its columns.
    pub fn columns(&self) -> impl Iterator<Item = ColumnId> + '_ {
        self.plan.columns.iter().map(|column| column.id)
    }

    /// Bytes that the record takes in the log.
    #[must_use]
    pub fn log_bytes(&self) -> usize {
        self.plan.frame
    }

    /// A column whose element type is checked by none but its reader.
    fn of_type<T: bytemuck::AnyBitPattern>(&self, id: ColumnId, element: Element) -> &[T] {
        match self.column(id) {
            Some((found, _)) if found == element => self.typed(id),
            _ => &[],
        }
    }

    fn typed<T: bytemuck::AnyBitPattern>(&self, id: ColumnId) -> &[T] {
        // Alignment and divisibility were checked when the record was decoded, so the cast does not fail.
        self.column(id).and_then(|(_, bytes)| bytemuck::try_cast_slice(bytes).ok()).unwrap_or_default()
    }
}
