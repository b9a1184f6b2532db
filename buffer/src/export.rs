//! Records as Arrow record batches, written as an Arrow IPC file or as Parquet. They serve notebooks and data
//! frames; training reads the log in place.

use std::collections::HashMap;
use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use arrow_array::builder::{
    BinaryBuilder, Float32Builder, Int32Builder, ListBuilder, StringBuilder, UInt8Builder, UInt16Builder,
    UInt32Builder, UInt64Builder,
};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use parquet::arrow::ArrowWriter;

use crate::error::{Error, Result};
use crate::position::hex;
use crate::position::{Identity, Position};
use crate::reader::Reader;
use crate::record::Record;
use crate::sample::{ColumnId, Kind};
use crate::sample::{Finish, PromptState};

/// A batch ends with the record that makes it this large.
const BATCH_BYTES: usize = 32 << 20;

/// The columns that have fields of their own; the others are in the `extra` lists.
const OWN: [ColumnId; 6] = [
    ColumnId::TOKENS,
    ColumnId::LOG_PROBS,
    ColumnId::LOSS_MASK,
    ColumnId::SPANS,
    ColumnId::ENGINE,
    ColumnId::METADATA,
];

/// Columns of text beside the log's own, such as what a tokenizer makes of the tokens.
#[derive(Clone, Copy)]
pub struct TextColumns<'a> {
    /// The columns' names.
    pub names: &'a [&'a str],
    /// The texts of a record, in the order of the names; null where one lacks.
    pub of: &'a dyn Fn(&Record) -> Vec<Option<String>>,
}

impl TextColumns<'_> {
    /// No such columns.
    pub const NONE: TextColumns<'static> = TextColumns { names: &[], of: &|_| Vec::new() };
}

/// Writes the records at these positions as an Arrow IPC file. Damaged ones are left out and reported as
/// [`Exported::damaged`].
///
/// # Errors
///
/// [`Error::Export`] when the file cannot be written, and what [`Reader::get`] answers except for damage.
pub fn export_arrow(
    reader: &Reader,
    positions: Range<Position>,
    texts: TextColumns<'_>,
    out: impl Write,
) -> Result<Exported> {
    let failed = failed("Arrow IPC");
    let schema = schema(reader.identity(), texts.names);
    let mut writer = arrow_ipc::writer::FileWriter::try_new_buffered(out, &schema).map_err(&failed)?;
    let exported = batches(reader, positions, texts, &schema, |batch| writer.write(&batch).map_err(&failed))?;
    writer.finish().map_err(&failed)?;
    Ok(exported)
}

/// As [`export_arrow`], as a Parquet file.
///
/// # Errors
///
/// As [`export_arrow`].
pub fn export_parquet(
    reader: &Reader,
    positions: Range<Position>,
    texts: TextColumns<'_>,
    out: impl Write + Send,
) -> Result<Exported> {
    let failed =
        |error: parquet::errors::ParquetError| Error::Export { format: "Parquet", cause: error.to_string() };
    let schema = schema(reader.identity(), texts.names);
    let mut writer = ArrowWriter::try_new(out, Arc::clone(&schema), None).map_err(failed)?;
    let exported = batches(reader, positions, texts, &schema, |batch| {
        writer.write(&batch).and_then(|()| writer.flush()).map_err(failed)
    })?;
    writer.close().map_err(failed)?;
    Ok(exported)
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Exported {
    /// Records.
    pub records: u64,
    /// Damaged records, which were left out; [`crate::check::verify`] says where.
    pub damaged: u64,
}

fn failed(format: &'static str) -> impl Fn(ArrowError) -> Error {
    move |error| Error::Export { format, cause: error.to_string() }
}

/// Cuts the records into batches of bounded size.
fn batches(
    reader: &Reader,
    positions: Range<Position>,
    texts: TextColumns<'_>,
    schema: &SchemaRef,
    mut write: impl FnMut(RecordBatch) -> Result<()>,
) -> Result<Exported> {
    let mut exported = Exported::default();
    let (mut columns, mut bytes) = (Columns::new(texts), 0);
    let mut records = reader.iter(positions.start);
    while let Some(record) = records.next() {
        if records.position() > positions.end {
            break;
        }
        let record = match record {
            Ok(record) => record,
            Err(Error::Damaged { .. }) => {
                exported.damaged += 1;
                continue;
            }
            Err(error) => return Err(error),
        };
        columns.push(&record);
        exported.records += 1;
        bytes += record.log_bytes() + columns.push_texts(texts, &record);
        if bytes >= BATCH_BYTES {
            write(std::mem::replace(&mut columns, Columns::new(texts)).finish(schema)?)?;
            bytes = 0;
        }
    }
    if bytes > 0 {
        write(columns.finish(schema)?)?;
    }
    Ok(exported)
}

fn schema(identity: Option<&Identity>, texts: &[&str]) -> SchemaRef {
    let list = |name: &str, element| {
        Field::new(name, DataType::List(Arc::new(Field::new_list_field(element, true))), false)
    };
    let one = |name: &str, element| Field::new(name, element, false);
    let mut fields = vec![
        one("position", DataType::UInt64),
        one("kind", DataType::Utf8),
        one("sample_id", DataType::UInt64),
        one("group_id", DataType::UInt64),
        one("rollout_id", DataType::UInt64),
        one("reward", DataType::Float32),
        one("status", DataType::Utf8),
        one("clock_us", DataType::UInt64),
        one("prompt_len", DataType::UInt32),
        list("tokens", DataType::Int32),
        list("log_probs", DataType::Float32),
        list("loss_mask", DataType::UInt8),
        list("span_version", DataType::UInt64),
        list("span_start", DataType::UInt32),
        list("span_end", DataType::UInt32),
        one("engine", DataType::Utf8),
        one("metadata", DataType::Binary),
        list("extra_id", DataType::UInt16),
        list("extra_element", DataType::Utf8),
        list("extra_bytes", DataType::Binary),
    ];
    fields.extend(texts.iter().map(|name| Field::new(*name, DataType::Utf8, true)));
    let metadata = identity.map(|identity| {
        HashMap::from([
            ("run_id".to_owned(), hex(&identity.run_id)),
            ("model".to_owned(), identity.model.clone()),
            ("tokenizer_digest".to_owned(), hex(&identity.tokenizer_digest)),
        ])
    });
    Arc::new(Schema::new(fields).with_metadata(metadata.unwrap_or_default()))
}

/// The fields of [`schema`], in its order.
#[derive(Default)]
struct Columns {
    position: UInt64Builder,
    kind: StringBuilder,
    sample_id: UInt64Builder,
    group_id: UInt64Builder,
    rollout_id: UInt64Builder,
    reward: Float32Builder,
    status: StringBuilder,
    clock_us: UInt64Builder,
    prompt_len: UInt32Builder,
    tokens: ListBuilder<Int32Builder>,
    log_probs: ListBuilder<Float32Builder>,
    loss_mask: ListBuilder<UInt8Builder>,
    span_version: ListBuilder<UInt64Builder>,
    span_start: ListBuilder<UInt32Builder>,
    span_end: ListBuilder<UInt32Builder>,
    engine: StringBuilder,
    metadata: BinaryBuilder,
    extra_id: ListBuilder<UInt16Builder>,
    extra_element: ListBuilder<StringBuilder>,
    extra_bytes: ListBuilder<BinaryBuilder>,
    texts: Vec<StringBuilder>,
}

impl Columns {
    fn new(texts: TextColumns<'_>) -> Self {
        Columns { texts: texts.names.iter().map(|_| StringBuilder::new()).collect(), ..Columns::default() }
    }

    /// Adds a record's texts, and answers how many bytes they have.
    fn push_texts(&mut self, texts: TextColumns<'_>, record: &Record) -> usize {
        let mut made = (texts.of)(record).into_iter();
        let mut push = |column: &mut StringBuilder| {
            let text = made.next().flatten();
            column.append_option(text.as_deref());
            text.map_or(0, |text| text.len())
        };
        self.texts.iter_mut().map(&mut push).sum()
    }

    fn push(&mut self, record: &Record) {
        let scalars = record.scalars();
        self.position.append_value(record.position().0);
        self.kind.append_value(kind(record.kind()));
        self.sample_id.append_value(scalars.sample_id);
        self.group_id.append_value(scalars.group_id);
        self.rollout_id.append_value(scalars.rollout_id);
        self.reward.append_value(scalars.reward);
        self.status.append_value(status(record));
        self.clock_us.append_value(scalars.clock_us);
        // The format's own field has 32 bits.
        self.prompt_len.append_value(record.prompt_len() as u32);
        self.tokens.values().append_slice(record.tokens());
        self.tokens.append(true);
        self.log_probs.values().append_slice(record.log_probs());
        self.log_probs.append(true);
        self.loss_mask.values().append_slice(record.loss_mask());
        self.loss_mask.append(true);
        for span in record.spans() {
            self.span_version.values().append_value(span.version);
            self.span_start.values().append_value(span.start);
            self.span_end.values().append_value(span.end);
        }
        self.span_version.append(true);
        self.span_start.append(true);
        self.span_end.append(true);
        self.engine.append_value(record.engine());
        self.metadata.append_value(record.metadata());
        for id in record.columns().filter(|id| !OWN.contains(id)) {
            let Some((element, bytes)) = record.column(id) else { continue };
            self.extra_id.values().append_value(id.0);
            self.extra_element.values().append_value(format!("{element:?}").to_lowercase());
            self.extra_bytes.values().append_value(bytes);
        }
        self.extra_id.append(true);
        self.extra_element.append(true);
        self.extra_bytes.append(true);
    }

    fn finish(mut self, schema: &SchemaRef) -> Result<RecordBatch> {
        let mut columns: Vec<ArrayRef> = vec![
            Arc::new(self.position.finish()),
            Arc::new(self.kind.finish()),
            Arc::new(self.sample_id.finish()),
            Arc::new(self.group_id.finish()),
            Arc::new(self.rollout_id.finish()),
            Arc::new(self.reward.finish()),
            Arc::new(self.status.finish()),
            Arc::new(self.clock_us.finish()),
            Arc::new(self.prompt_len.finish()),
            Arc::new(self.tokens.finish()),
            Arc::new(self.log_probs.finish()),
            Arc::new(self.loss_mask.finish()),
            Arc::new(self.span_version.finish()),
            Arc::new(self.span_start.finish()),
            Arc::new(self.span_end.finish()),
            Arc::new(self.engine.finish()),
            Arc::new(self.metadata.finish()),
            Arc::new(self.extra_id.finish()),
            Arc::new(self.extra_element.finish()),
            Arc::new(self.extra_bytes.finish()),
        ];
        columns.extend(self.texts.iter_mut().map(|text| Arc::new(text.finish()) as ArrayRef));
        RecordBatch::try_new(Arc::clone(schema), columns).map_err(failed("Arrow"))
    }
}

fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Sample => "sample",
        Kind::Partial => "partial",
        Kind::Prompt => "prompt",
    }
}

fn status(record: &Record) -> String {
    if record.kind() == Kind::Prompt {
        return match record.prompt_state() {
            PromptState::Waiting => "waiting".into(),
            PromptState::InFlight => "in_flight".into(),
            PromptState::Done => "done".into(),
            PromptState::Other(code) => code.to_string(),
        };
    }
    match record.finish() {
        Finish::Unfinished => "unfinished".into(),
        Finish::Stop => "stop".into(),
        Finish::Length => "length".into(),
        Finish::Abort => "abort".into(),
        Finish::Other(code) => code.to_string(),
    }
}
