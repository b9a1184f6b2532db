//! What a record holds, as its producer gives it.

/// What kind of record this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// A finished sample, ready for training.
    Sample = 1,
    /// A generation that was interrupted: tokens, log-probs and spans so far. The next record of the same
    /// sample id continues and replaces it.
    Partial,
    /// A prompt and where it stands ([`PromptState`]); the newest record of the same sample id counts.
    Prompt,
    /// The reward of an answer whose samples say [`Scalars::score_follows`], with several rewards in
    /// [`ColumnId::REWARDS`]. Its sample id is that of the answer's first sample; the newest record counts.
    Score,
}

impl Kind {
    pub(crate) fn code(self) -> u16 {
        self as u16
    }

    pub(crate) fn from_code(code: u16) -> Option<Self> {
        let known = [Self::Sample, Self::Partial, Self::Prompt, Self::Score];
        known.into_iter().find(|kind| kind.code() == code)
    }
}

/// Why a generation ended, as stored in [`Scalars::status`] of samples and partial samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Finish {
    /// Not finished.
    Unfinished,
    /// A stop token or stop string.
    Stop,
    /// The token limit.
    Length,
    /// Aborted by the client or the engine.
    Abort,
    /// A number that this build does not know.
    Other(u16),
}

impl Finish {
    /// The stored number.
    #[must_use]
    pub fn code(self) -> u16 {
        match self {
            Self::Unfinished => 0,
            Self::Stop => 1,
            Self::Length => 2,
            Self::Abort => 3,
            Self::Other(code) => code,
        }
    }

    /// The reason behind a stored number.
    #[must_use]
    pub fn from_code(code: u16) -> Self {
        let known = [Self::Unfinished, Self::Stop, Self::Length, Self::Abort];
        known.into_iter().find(|finish| finish.code() == code).unwrap_or(Self::Other(code))
    }
}

/// Where a prompt stands, as stored in [`Scalars::status`] of prompt records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PromptState {
    /// Not sent to an engine yet.
    Waiting,
    /// Being generated.
    InFlight,
    /// All its samples are in the log, or it was given up.
    Done,
    /// A number that this build does not know.
    Other(u16),
}

impl PromptState {
    /// The stored number.
    #[must_use]
    pub fn code(self) -> u16 {
        match self {
            Self::Waiting => 0,
            Self::InFlight => 1,
            Self::Done => 2,
            Self::Other(code) => code,
        }
    }

    /// The state behind a stored number.
    #[must_use]
    pub fn from_code(code: u16) -> Self {
        let known = [Self::Waiting, Self::InFlight, Self::Done];
        known.into_iter().find(|state| state.code() == code).unwrap_or(Self::Other(code))
    }
}

/// What a score says of its answer, as stored in [`Scalars::status`] of score records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verdict {
    /// The answer may be learned from.
    Kept,
    /// Its reward counts in its group, and none of its tokens is learned from.
    Masked,
    /// No step learns from its group, and no query finds it.
    LeftOut,
    /// A number that this build does not know.
    Other(u16),
}

impl Verdict {
    /// The stored number.
    #[must_use]
    pub fn code(self) -> u16 {
        match self {
            Self::Kept => 0,
            Self::Masked => 1,
            Self::LeftOut => 2,
            Self::Other(code) => code,
        }
    }

    /// The verdict behind a stored number.
    #[must_use]
    pub fn from_code(code: u16) -> Self {
        let known = [Self::Kept, Self::Masked, Self::LeftOut];
        known.into_iter().find(|verdict| verdict.code() == code).unwrap_or(Self::Other(code))
    }
}

/// The single values of a record.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Scalars {
    /// The sample; a later record of the same id replaces an earlier one in queries.
    pub sample_id: u64,
    /// The samples of one prompt share this.
    pub group_id: u64,
    /// The training step that the sample was generated for.
    pub rollout_id: u64,
    /// Scalar reward; of a sample whose score is another record, what the newest one says, and 0 before it. Several
    /// rewards go into a column, see [`ColumnId::REWARDS`]. The log keeps any bits, NaN and infinities included:
    /// the writer decides what it takes.
    pub reward: f32,
    /// [`Finish::code`], [`PromptState::code`] in a prompt record, or [`Verdict::code`] in a score.
    pub status: u16,
    /// Samples that make up this sample's answer. Where it is not 0, the low 48 bits of the sample id are the answer
    /// and those above number its samples from 0 on; else each sample is an answer of its own.
    pub parts: u16,
    /// The reward is a record of its own, [`Kind::Score`]. Until it is there, the answer is not complete.
    pub score_follows: bool,
    /// Measured and never learned from: in no group, and found by reading the records one after another only.
    pub evaluation: bool,
    /// Unix time in microseconds; information only, never used to order records.
    pub clock_us: u64,
}

/// Bits of a sample's id that number the answer, where [`Scalars::parts`] is not 0.
const ANSWER_BITS: u32 = 48;

impl Scalars {
    /// Answers are numbered below this.
    pub const ANSWERS_MAX: u64 = 1 << ANSWER_BITS;

    /// The id of the `part`th sample of an answer; that of the first is the answer's number.
    #[must_use]
    pub fn sample_id_of(answer: u64, part: u16) -> u64 {
        answer | u64::from(part) << ANSWER_BITS
    }

    /// The answer that the sample is part of, which is the id of the answer's first sample.
    #[must_use]
    pub fn answer(&self) -> u64 {
        answer(self.sample_id, self.parts)
    }
}

/// The answer of a sample, as [`Scalars::answer`].
pub(crate) fn answer(sample_id: u64, parts: u16) -> u64 {
    if parts == 0 { sample_id } else { sample_id & (Scalars::ANSWERS_MAX - 1) }
}

/// The response tokens `start..end` were generated by `version`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct VersionSpan {
    /// Version of the weights.
    pub version: u64,
    /// First response token, counted from the end of the prompt.
    pub start: u32,
    /// One past the last response token.
    pub end: u32,
}

/// Type of a column's elements, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Element {
    /// Bytes.
    U8 = 1,
    /// 16-bit unsigned.
    U16,
    /// 32-bit signed.
    I32,
    /// 32-bit float.
    F32,
    /// 64-bit signed.
    I64,
    /// [`VersionSpan`], 16 bytes.
    Span,
}

impl Element {
    /// Bytes of one element.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 => 8,
            Self::Span => 16,
        }
    }

    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [Self::U8, Self::U16, Self::I32, Self::F32, Self::I64, Self::Span]
            .into_iter()
            .find(|element| element.code() == code)
    }
}

/// Names a column of a record. Numbers from [`ColumnId::USER`] up are free for users.
///
/// [`Sample`] and [`Shape`] have fields for the first six. The others go in as further columns. The loop writes
/// [`ColumnId::TIMES`], [`ColumnId::REWARDS`] and [`ColumnId::REPLIES`], and reads [`ColumnId::TEACHER_LOG_PROBS`]. The log keeps the reserved
/// ones and hands them out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ColumnId(pub u16);

impl ColumnId {
    /// Prompt and response token ids, `I32`.
    pub const TOKENS: Self = Self(1);
    /// Log-probability of each response token, `F32`.
    pub const LOG_PROBS: Self = Self(2);
    /// 1 where a response token is trained on, 0 where not, `U8`.
    pub const LOSS_MASK: Self = Self(3);
    /// Which version generated which response tokens, `Span`.
    pub const SPANS: Self = Self(4);
    /// Name of the engine, UTF-8, `U8`; information only.
    pub const ENGINE: Self = Self(5);
    /// Opaque bytes of the user, `U8`.
    pub const METADATA: Self = Self(6);
    /// When the answer was asked for, when its first token came and when its last, `I64`: Unix times in microseconds,
    /// 0 where unknown.
    pub const TIMES: Self = Self(7);
    /// Several rewards of one answer, `F32`. In the loop's scores: before and after it was processed, and what
    /// it is made of, by the order of names.
    pub const REWARDS: Self = Self(16);
    /// Reserved: experts that each token was routed to, for replay in training; shape is the user's.
    pub const ROUTED_EXPERTS: Self = Self(17);
    /// Reserved: log-probs of the k likeliest tokens at each place; shape is the user's.
    pub const TOP_LOG_PROBS: Self = Self(18);
    /// Log-probs of the response under a teacher, `F32`.
    pub const TEACHER_LOG_PROBS: Self = Self(19);
    /// Reserved: images as opaque bytes, `U8`.
    pub const IMAGES: Self = Self(20);
    /// Digests of the engines' replies that the response is made of, `U8`; absent in logs of earlier releases.
    pub const REPLIES: Self = Self(21);
    /// First number that is free for users.
    pub const USER: Self = Self(0x8000);
}

/// Sizes of a record to be written in place. See [`crate::Log::reserve`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Kind of record.
    pub kind: Kind,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of the response; log-probs and loss mask have as many entries. In the record of a prompt
    /// or a score both are absent.
    pub response: usize,
    /// Version spans.
    pub spans: usize,
    /// Bytes of the engine's name.
    pub engine: usize,
    /// Bytes of user metadata.
    pub metadata: usize,
    /// Further columns: id, element, number of elements.
    pub extra: Vec<(ColumnId, Element, usize)>,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            kind: Kind::Sample,
            prompt: 0,
            response: 0,
            spans: 0,
            engine: 0,
            metadata: 0,
            extra: Vec::new(),
        }
    }
}

/// A whole record in the producer's memory, for [`crate::Log::append`], which copies it once, into the log.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample<'a> {
    /// Kind of record.
    pub kind: Kind,
    /// Ids, reward and the other single values.
    pub scalars: Scalars,
    /// How many of `tokens` are the prompt.
    pub prompt_len: usize,
    /// Prompt, then response.
    pub tokens: &'a [i32],
    /// One for each response token (may be empty in a [`Kind::Prompt`] record). The log keeps any bits, as with
    /// [`Scalars::reward`].
    pub log_probs: &'a [f32],
    /// One for each response token (may be empty in a [`Kind::Prompt`] record).
    pub loss_mask: &'a [u8],
    /// Ascending, not overlapping, within the response.
    pub spans: &'a [VersionSpan],
    /// Name of the engine; information only.
    pub engine: &'a str,
    /// Anything.
    pub metadata: &'a [u8],
    /// Further columns, as raw little-endian bytes.
    pub extra: &'a [(ColumnId, Element, &'a [u8])],
}

impl Default for Sample<'_> {
    fn default() -> Self {
        Self {
            kind: Kind::Sample,
            scalars: Scalars::default(),
            prompt_len: 0,
            tokens: &[],
            log_probs: &[],
            loss_mask: &[],
            spans: &[],
            engine: "",
            metadata: &[],
            extra: &[],
        }
    }
}
