//! The body of a record: fixed scalars, a directory of columns, then the columns, each 64-byte aligned.

use super::field::{self, put};
use super::frame::FRAME_HEADER;
use super::{ALIGN, align};
use crate::sample::{ColumnId, Element, Kind, Scalars, VersionSpan};

/// Bytes of the fixed scalars.
const SCALARS: usize = 64;
/// Bytes of one directory entry.
const DIRECTORY: usize = 24;
/// Most columns of one record.
pub(crate) const COLUMNS_MAX: usize = 256;
/// Flag of a sample whose reward is a record of its own.
pub(super) const SCORE_FOLLOWS: u16 = 1;
/// Flag of a sample that is measured and never learned from.
pub(super) const EVALUATION: u16 = 2;
/// Stands for "no version" in records without spans.
const NO_VERSION: u64 = u64::MAX;

/// One column: where it is, counted from the start of the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Column {
    pub(crate) id: ColumnId,
    pub(crate) element: Element,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// The columns of a record and the size of its frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) columns: Vec<Column>,
    /// Bytes of the frame, header included.
    pub(crate) frame: usize,
}

impl Plan {
    /// Places columns of the given sizes one after another; `None` when the sizes overflow or are too many.
    pub(crate) fn new(sizes: &[(ColumnId, Element, usize)]) -> Option<Self> {
        if sizes.len() > COLUMNS_MAX {
            return None;
        }
        let mut end = align(FRAME_HEADER + SCALARS + sizes.len() * DIRECTORY)?;
        let mut columns = Vec::with_capacity(sizes.len());
        for &(id, element, count) in sizes {
            let bytes = count.checked_mul(element.size())?;
            columns.push(Column { id, element, offset: end, bytes });
            end = align(end.checked_add(bytes)?)?;
        }
        Some(Self { columns, frame: end })
    }

    pub(crate) fn column(&self, id: ColumnId) -> Option<Column> {
        self.columns.iter().copied().find(|column| column.id == id)
    }
}

/// The scalars of a record as they stand in its body.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Fixed {
    pub(crate) scalars: Scalars,
    pub(crate) prompt_len: u32,
    /// Oldest and newest version among the spans.
    pub(crate) versions: Option<(u64, u64)>,
}

/// The flags of a record.
pub(crate) fn flags(scalars: &Scalars) -> u16 {
    let flag = |set, flag| if set { flag } else { 0 };
    flag(scalars.score_follows, SCORE_FOLLOWS) | flag(scalars.evaluation, EVALUATION)
}

/// Writes scalars and directory in front of the columns of `body` (the frame without its header).
pub(crate) fn encode(body: &mut [u8], fixed: &Fixed, plan: &Plan) {
    let scalars = &fixed.scalars;
    let (oldest, newest) = fixed.versions.unwrap_or((NO_VERSION, NO_VERSION));
    let head = &mut body[..SCALARS + plan.columns.len() * DIRECTORY];
    head.fill(0);
    put(head, 0, &scalars.sample_id.to_le_bytes());
    put(head, 8, &scalars.group_id.to_le_bytes());
    put(head, 16, &scalars.rollout_id.to_le_bytes());
    put(head, 24, &scalars.clock_us.to_le_bytes());
    put(head, 32, &oldest.to_le_bytes());
    put(head, 40, &newest.to_le_bytes());
    put(head, 48, &fixed.prompt_len.to_le_bytes());
    put(head, 52, &scalars.reward.to_le_bytes());
    put(head, 56, &scalars.status.to_le_bytes());
    // At most COLUMNS_MAX, so the count fits.
    put(head, 58, &(plan.columns.len() as u16).to_le_bytes());
    put(head, 60, &scalars.parts.to_le_bytes());
    put(head, 62, &flags(scalars).to_le_bytes());
    for (entry, column) in head[SCALARS..].chunks_exact_mut(DIRECTORY).zip(&plan.columns) {
        put(entry, 0, &column.id.0.to_le_bytes());
        put(entry, 2, &[column.element.code()]);
        put(entry, 8, &(column.offset as u64).to_le_bytes());
        put(entry, 16, &(column.bytes as u64).to_le_bytes());
    }
}

/// Reads scalars and directory and checks that every column lies inside the frame, in order and aligned.
pub(crate) fn decode(body: &[u8]) -> Result<(Fixed, Plan), &'static str> {
    let frame = FRAME_HEADER + body.len();
    let head = body.get(..SCALARS).ok_or("record too short for its scalars")?;
    let count = usize::from(field::u16(head, 58));
    if count > COLUMNS_MAX {
        return Err("too many columns");
    }
    let directory =
        body.get(SCALARS..SCALARS + count * DIRECTORY).ok_or("record too short for its columns")?;
    let mut columns = Vec::with_capacity(count);
    let mut end = FRAME_HEADER + SCALARS + directory.len();
    for entry in directory.chunks_exact(DIRECTORY) {
        let column = decode_column(entry).ok_or("column of an unknown element or size")?;
        let next = column.offset.checked_add(column.bytes).ok_or("column outside its record")?;
        if column.offset < end || next > frame || !column.offset.is_multiple_of(ALIGN) {
            return Err("column outside its record");
        }
        end = next;
        columns.push(column);
    }
    let (oldest, newest) = (field::u64(head, 32), field::u64(head, 40));
    let fixed = Fixed {
        scalars: Scalars {
            sample_id: field::u64(head, 0),
            group_id: field::u64(head, 8),
            rollout_id: field::u64(head, 16),
            clock_us: field::u64(head, 24),
            reward: f32::from_le_bytes(field::array(head, 52)),
            status: field::u16(head, 56),
            parts: field::u16(head, 60),
            score_follows: field::u16(head, 62) & SCORE_FOLLOWS != 0,
            evaluation: field::u16(head, 62) & EVALUATION != 0,
        },
        prompt_len: field::u32(head, 48),
        versions: (newest != NO_VERSION).then_some((oldest, newest)),
    };
    Ok((fixed, Plan { columns, frame }))
}

fn decode_column(entry: &[u8]) -> Option<Column> {
    let element = Element::from_code(entry[2])?;
    let bytes = usize::try_from(field::u64(entry, 16)).ok()?;
    let offset = usize::try_from(field::u64(entry, 8)).ok()?;
    let column = Column { id: ColumnId(field::u16(entry, 0)), element, offset, bytes };
    bytes.is_multiple_of(element.size()).then_some(column)
}

/// Reads a whole body and checks everything that its readers rely on.
pub(crate) fn accept(kind: Kind, body: &[u8]) -> Result<(Fixed, Plan), &'static str> {
    let (fixed, plan) = decode(body)?;
    let types = [
        (ColumnId::TOKENS, Element::I32),
        (ColumnId::LOG_PROBS, Element::F32),
        (ColumnId::LOSS_MASK, Element::U8),
        (ColumnId::SPANS, Element::Span),
        (ColumnId::ENGINE, Element::U8),
        (ColumnId::METADATA, Element::U8),
    ];
    let count = |id| plan.column(id).map_or(0, |column| column.bytes / column.element.size());
    if types.iter().any(|&(id, element)| plan.column(id).is_some_and(|column| column.element != element)) {
        return Err("record with a column of the wrong type");
    }
    let place = |column: Column| body.get(column.offset - FRAME_HEADER..)?.get(..column.bytes);
    let spans = plan.column(ColumnId::SPANS).and_then(place).unwrap_or_default();
    // A copy of a few bytes, because a body in plain memory need not be aligned.
    let spans = spans.chunks_exact(size_of::<VersionSpan>()).map(bytemuck::pod_read_unaligned);
    let spans: Vec<VersionSpan> = spans.collect();
    let lengths = [count(ColumnId::TOKENS), count(ColumnId::LOG_PROBS), count(ColumnId::LOSS_MASK)];
    check(kind, fixed.prompt_len as usize, lengths, &spans).map_err(|(what, ..)| what)?;
    if fixed.versions != versions(&spans) {
        return Err("record with other versions than its spans");
    }
    Ok((fixed, plan))
}

/// Oldest and newest version among the spans.
pub(crate) fn versions(spans: &[VersionSpan]) -> Option<(u64, u64)> {
    let versions = spans.iter().map(|span| span.version);
    versions.clone().min().zip(versions.max())
}

/// What every record must satisfy beyond its layout. Checked before a commit and again when a record is read.
///
/// The error is (what, expected, found).
pub(crate) fn check(
    kind: Kind,
    prompt_len: usize,
    lengths: [usize; 3],
    spans: &[VersionSpan],
) -> Result<(), (&'static str, String, String)> {
    let [tokens, log_probs, loss_mask] = lengths;
    let Some(response) = tokens.checked_sub(prompt_len) else {
        return Err(("prompt length", format!("at most {tokens} tokens"), prompt_len.to_string()));
    };
    let optional = matches!(kind, Kind::Prompt | Kind::Score);
    for (what, length) in [("log-probs", log_probs), ("loss mask", loss_mask)] {
        if length != response && !(optional && length == 0) {
            return Err((what, format!("one for each of {response} response tokens"), length.to_string()));
        }
    }
    let mut end = 0;
    for span in spans {
        let inside = span.start >= end && span.start <= span.end && span.end as usize <= response;
        if !inside || span.version == NO_VERSION {
            let expected = format!("ascending spans within {response} response tokens");
            return Err(("version spans", expected, format!("{span:?}")));
        }
        end = span.end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        let sizes = [
            (ColumnId::TOKENS, Element::I32, 5),
            (ColumnId::LOG_PROBS, Element::F32, 3),
            (ColumnId::ENGINE, Element::U8, 0),
        ];
        Plan::new(&sizes).unwrap()
    }

    fn fixed() -> Fixed {
        let scalars = Scalars {
            sample_id: 1,
            group_id: 2,
            rollout_id: 3,
            reward: 0.5,
            status: 4,
            clock_us: 5,
            parts: 6,
            score_follows: true,
            evaluation: false,
        };
        Fixed { scalars, prompt_len: 2, versions: Some((6, 7)) }
    }

    #[test]
    fn columns_are_aligned_and_round_trip() {
        let plan = plan();
        assert!(plan.columns.iter().all(|column| column.offset.is_multiple_of(ALIGN)));
        assert_eq!(plan.frame, 64 + 192 + 64 + 64);
        let mut body = vec![0xff; plan.frame - FRAME_HEADER];
        encode(&mut body, &fixed(), &plan);
        assert_eq!(decode(&body), Ok((fixed(), plan)));
    }

    #[test]
    fn no_damage_to_the_directory_panics_or_leaves_the_record() {
        let plan = plan();
        let mut body = vec![0; plan.frame - FRAME_HEADER];
        encode(&mut body, &fixed(), &plan);
        for at in (0..SCALARS + 3 * DIRECTORY).step_by(if cfg!(miri) { 7 } else { 1 }) {
            for value in [0, 1, 0x7f, 0xff] {
                let mut bad = body.clone();
                bad[at] = value;
                if let Ok((_, plan)) = decode(&bad) {
                    assert!(plan.columns.iter().all(|c| c.offset + c.bytes <= FRAME_HEADER + bad.len()));
                }
            }
        }
        for length in 0..body.len() {
            // A shortened body may still hold its columns; it must only never claim more than it has.
            let _ = decode(&body[..length]);
        }
    }

    #[test]
    fn a_body_is_accepted_as_a_whole_or_not_at_all() {
        let sizes = [
            (ColumnId::TOKENS, Element::I32, 5),
            (ColumnId::LOG_PROBS, Element::F32, 3),
            (ColumnId::LOSS_MASK, Element::U8, 3),
            (ColumnId::SPANS, Element::Span, 1),
        ];
        let plan = Plan::new(&sizes).unwrap();
        let mut body = vec![0; plan.frame - FRAME_HEADER];
        let span = VersionSpan { version: 6, start: 0, end: 3 };
        let spans = plan.column(ColumnId::SPANS).unwrap().offset - FRAME_HEADER;
        put(&mut body, spans, bytemuck::bytes_of(&span));
        encode(&mut body, &Fixed { versions: Some((6, 6)), ..fixed() }, &plan);
        assert!(accept(Kind::Sample, &body).is_ok());
        encode(&mut body, &Fixed { versions: Some((6, 7)), ..fixed() }, &plan);
        assert_eq!(accept(Kind::Sample, &body), Err("record with other versions than its spans"));
        encode(&mut body, &Fixed { versions: Some((6, 6)), prompt_len: 3, ..fixed() }, &plan);
        assert_eq!(accept(Kind::Sample, &body), Err("log-probs"));
        let typed = Plan::new(&[(ColumnId::TOKENS, Element::F32, 5)]).unwrap();
        let mut body = vec![0; typed.frame - FRAME_HEADER];
        encode(&mut body, &Fixed { versions: None, ..fixed() }, &typed);
        assert_eq!(accept(Kind::Sample, &body), Err("record with a column of the wrong type"));
    }

    #[test]
    fn absurd_sizes_are_refused_before_anything_is_allocated() {
        assert_eq!(Plan::new(&[(ColumnId::TOKENS, Element::I32, usize::MAX / 2)]), None);
        assert_eq!(Plan::new(&[(ColumnId::METADATA, Element::U8, usize::MAX - 100)]), None);
    }

    #[test]
    fn contradictions_are_named() {
        let span = |start, end| VersionSpan { version: 1, start, end };
        assert!(check(Kind::Sample, 2, [5, 3, 3], &[span(0, 2), span(2, 3)]).is_ok());
        assert!(check(Kind::Prompt, 5, [5, 0, 0], &[]).is_ok());
        assert_eq!(check(Kind::Sample, 6, [5, 0, 0], &[]).unwrap_err().0, "prompt length");
        assert_eq!(check(Kind::Sample, 2, [5, 2, 3], &[]).unwrap_err().0, "log-probs");
        assert_eq!(check(Kind::Sample, 2, [5, 3, 0], &[]).unwrap_err().0, "loss mask");
        for bad in [[span(0, 4), span(4, 4)], [span(1, 2), span(0, 1)], [span(2, 1), span(2, 3)]] {
            assert_eq!(check(Kind::Sample, 2, [5, 3, 3], &bad).unwrap_err().0, "version spans");
        }
    }
}
