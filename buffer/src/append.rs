//! From a record in the producer's memory to one in the log, whichever process owns the log.

use crate::error::{Error, Result};
use crate::layout::body::{self, Plan};
use crate::reservation::{Ack, Pending, Reservation};
use crate::sample::{ColumnId, Element, Kind, Sample, Shape};

/// The shape that a record needs.
pub(crate) fn shape(sample: &Sample<'_>) -> Result<Shape> {
    let lengths = [sample.tokens.len(), sample.log_probs.len(), sample.loss_mask.len()];
    // The spans are checked with the record.
    body::check(sample.kind, sample.prompt_len, lengths, &[])
        .map_err(|(what, expected, found)| Error::invalid(what, expected, found))?;
    for (_, element, bytes) in sample.extra {
        if !bytes.len().is_multiple_of(element.size()) {
            let expected = format!("whole elements of {} bytes", element.size());
            return Err(Error::invalid("extra column", expected, format!("{} bytes", bytes.len())));
        }
    }
    let extra =
        |(id, element, bytes): &(ColumnId, Element, &[u8])| (*id, *element, bytes.len() / element.size());
    Ok(Shape {
        kind: sample.kind,
        prompt: sample.prompt_len,
        response: sample.tokens.len() - sample.prompt_len,
        spans: sample.spans.len(),
        engine: sample.engine.len(),
        metadata: sample.metadata.len(),
        extra: sample.extra.iter().map(extra).collect(),
    })
}

/// Copies a record into space of its shape and commits it.
pub(crate) fn fill(mut space: Reservation, sample: &Sample<'_>) -> Result<Pending> {
    space.set_scalars(sample.scalars);
    let mut columns = vec![
        (ColumnId::TOKENS, bytemuck::cast_slice(sample.tokens)),
        (ColumnId::LOG_PROBS, bytemuck::cast_slice(sample.log_probs)),
        (ColumnId::LOSS_MASK, sample.loss_mask),
        (ColumnId::SPANS, bytemuck::cast_slice(sample.spans)),
        (ColumnId::ENGINE, sample.engine.as_bytes()),
        (ColumnId::METADATA, sample.metadata),
    ];
    columns.extend(sample.extra.iter().map(|&(id, _, bytes)| (id, bytes)));
    space.commit_copy(sample.spans, &columns)
}

/// Appends several records and waits for all of them.
pub(crate) fn all(
    samples: &[Sample<'_>],
    append: impl FnMut(&Sample<'_>) -> Result<Pending>,
) -> Result<Vec<Ack>> {
    let pending: Vec<Pending> = samples.iter().map(append).collect::<Result<_>>()?;
    // The last one first: its sync covers the others.
    let mut acks: Vec<Ack> = pending.into_iter().rev().map(Pending::wait).collect::<Result<_>>()?;
    acks.reverse();
    Ok(acks)
}

/// Where the columns of a record of this shape go.
pub(crate) fn plan(shape: &Shape) -> Result<Plan> {
    let invalid = |found: String| Error::invalid("record shape", "sizes that fit a segment", found);
    let tokens = shape.prompt.checked_add(shape.response).ok_or_else(|| invalid(format!("{shape:?}")))?;
    if u32::try_from(tokens).is_err() {
        return Err(invalid(format!("{tokens} tokens")));
    }
    let scored = if matches!(shape.kind, Kind::Prompt | Kind::Score) { 0 } else { shape.response };
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
