//! Records as Arrow record batches, written as an Arrow IPC file or as Parquet. They serve notebooks and data
//! frames; training reads the log in place.

use std::collections::HashMap;
use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use arrow_array::builder::{
    ArrayBuilder, BinaryBuilder, Float32Builder, Int32Builder, ListBuilder, StringBuilder, UInt8Builder,
    UInt16Builder, UInt32Builder, UInt64Builder,
};
use arrow_array::types::{Float32Type, UInt32Type, UInt64Type};
use arrow_array::{ArrayRef, ArrowPrimitiveType, BinaryArray, PrimitiveArray, RecordBatch, StringArray};
use arrow_schema::{ArrowError, DataType, Field, Schema};
use parquet::arrow::ArrowWriter;

use crate::error::{Error, Result};
use crate::learned::Finder;
use crate::position::hex;
use crate::position::{Identity, Position};
use crate::reader::Reader;
use crate::record::Record;
use crate::sample::{ColumnId, Element, Finish, Kind, PromptState, Verdict, VersionSpan};

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
    let schema = Rows::default().batch(reader.identity(), texts.names)?.schema();
    let mut writer = arrow_ipc::writer::FileWriter::try_new_buffered(out, &schema).map_err(&failed)?;
    let exported = batches(reader, positions, texts, |batch| writer.write(&batch).map_err(&failed))?;
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
    let schema = Rows::default().batch(reader.identity(), texts.names)?.schema();
    let mut writer = ArrowWriter::try_new(out, schema, None).map_err(failed)?;
    let exported = batches(reader, positions, texts, |batch| {
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
    /// Damaged records, which were left out ([`crate::check::verify`] says where), and damaged columns of
    /// [`Reader::learned`], which records were written without.
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
    mut write: impl FnMut(RecordBatch) -> Result<()>,
) -> Result<Exported> {
    let (mut learned, damaged) = Finder::of(reader)?;
    let mut exported = Exported { records: 0, damaged };
    let (mut rows, mut bytes) = (Rows::default(), 0);
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
        exported.records += 1;
        let made = (texts.of)(&record);
        rows.learned.push(match learned.log_probs(reader, record.position()) {
            Err(Error::Damaged { .. }) => {
                exported.damaged += 1;
                None
            }
            found => found?,
        });
        bytes += record.log_bytes() + made.iter().flatten().map(String::len).sum::<usize>();
        rows.records.push(record);
        rows.texts.push(made);
        if bytes >= BATCH_BYTES {
            write(std::mem::take(&mut rows).batch(reader.identity(), texts.names)?)?;
            bytes = 0;
        }
    }
    if bytes > 0 {
        write(rows.batch(reader.identity(), texts.names)?)?;
    }
    Ok(exported)
}

/// Records of one batch, with what was learned from each, and its texts.
#[derive(Default)]
struct Rows {
    records: Vec<Record>,
    learned: Vec<Option<Vec<f32>>>,
    texts: Vec<Vec<Option<String>>>,
}

impl Rows {
    fn batch(&self, identity: Option<&Identity>, names: &[&str]) -> Result<RecordBatch> {
        let own = self.columns();
        let text = |at: usize| self.texts.iter().map(move |texts| texts.get(at).and_then(Option::as_deref));
        let texts = (0..names.len()).map(|at| Arc::new(text(at).collect::<StringArray>()) as ArrayRef);
        let mut fields: Vec<Field> =
            own.iter().map(|(name, column)| Field::new(*name, column.data_type().clone(), false)).collect();
        let learned = self.learned();
        fields.push(Field::new("learner_log_probs", learned.data_type().clone(), true));
        fields.extend(names.iter().map(|name| Field::new(*name, DataType::Utf8, true)));
        let metadata = identity.map(|identity| {
            HashMap::from([
                ("run_id".to_owned(), hex(&identity.run_id)),
                ("model".to_owned(), identity.model.clone()),
                ("tokenizer_digest".to_owned(), hex(&identity.tokenizer_digest)),
            ])
        });
        let schema = Schema::new(fields).with_metadata(metadata.unwrap_or_default());
        let own = own.into_iter().map(|(_, column)| column);
        let columns = own.chain([learned]).chain(texts).collect();
        RecordBatch::try_new(Arc::new(schema), columns).map_err(failed("Arrow"))
    }

    /// The learner's log-probs of each record, NaN where a token was not trained on; null where no step learned from it.
    fn learned(&self) -> ArrayRef {
        let mut lists = ListBuilder::new(Float32Builder::default());
        for log_probs in &self.learned {
            lists.values().append_slice(log_probs.as_deref().unwrap_or_default());
            lists.append(log_probs.is_some());
        }
        Arc::new(lists.finish())
    }

    /// The log's own columns, by name.
    fn columns(&self) -> [(&'static str, ArrayRef); 20] {
        let rows = &self.records[..];
        let metadata = BinaryArray::from_iter_values(rows.iter().map(Record::metadata));
        let versions = lists::<UInt64Builder>(rows, |row, list| {
            list.extend(row.spans().iter().map(|span| Some(span.version)));
        });
        let bounds = |of: fn(&VersionSpan) -> u32| {
            lists::<UInt32Builder>(rows, |row, list| list.extend(row.spans().iter().map(of).map(Some)))
        };
        [
            ("position", numbers::<UInt64Type>(rows, |row| row.position().0)),
            ("kind", words(rows, |row| kind(row.kind()))),
            ("sample_id", numbers::<UInt64Type>(rows, |row| row.scalars().sample_id)),
            ("group_id", numbers::<UInt64Type>(rows, |row| row.scalars().group_id)),
            ("rollout_id", numbers::<UInt64Type>(rows, |row| row.scalars().rollout_id)),
            ("reward", numbers::<Float32Type>(rows, |row| row.scalars().reward)),
            ("status", words(rows, status)),
            ("clock_us", numbers::<UInt64Type>(rows, |row| row.scalars().clock_us)),
            // The format's own field has 32 bits.
            ("prompt_len", numbers::<UInt32Type>(rows, |row| row.prompt_len() as u32)),
            ("tokens", lists::<Int32Builder>(rows, |row, list| list.append_slice(row.tokens()))),
            ("log_probs", lists::<Float32Builder>(rows, |row, list| list.append_slice(row.log_probs()))),
            ("loss_mask", lists::<UInt8Builder>(rows, |row, list| list.append_slice(row.loss_mask()))),
            ("span_version", versions),
            ("span_start", bounds(|span| span.start)),
            ("span_end", bounds(|span| span.end)),
            ("engine", words(rows, Record::engine)),
            ("metadata", Arc::new(metadata)),
            (
                "extra_id",
                lists::<UInt16Builder>(rows, |row, list| list.extend(extra(row).map(|(id, ..)| Some(id.0)))),
            ),
            (
                "extra_element",
                lists::<StringBuilder>(rows, |row, list| {
                    list.extend(extra(row).map(|(_, of, _)| Some(format!("{of:?}").to_lowercase())))
                }),
            ),
            (
                "extra_bytes",
                lists::<BinaryBuilder>(rows, |row, list| {
                    list.extend(extra(row).map(|(.., bytes)| Some(bytes)))
                }),
            ),
        ]
    }
}

/// A column of one number a record.
fn numbers<T: ArrowPrimitiveType>(rows: &[Record], of: impl Fn(&Record) -> T::Native) -> ArrayRef {
    Arc::new(PrimitiveArray::<T>::from_iter_values(rows.iter().map(of)))
}

/// A column of one text a record.
fn words<'a, S: AsRef<str>>(rows: &'a [Record], of: impl Fn(&'a Record) -> S) -> ArrayRef {
    Arc::new(StringArray::from_iter_values(rows.iter().map(of)))
}

/// A column of one list a record.
fn lists<B: ArrayBuilder + Default>(rows: &[Record], fill: impl Fn(&Record, &mut B)) -> ArrayRef {
    let mut lists = ListBuilder::new(B::default());
    for row in rows {
        fill(row, lists.values());
        lists.append(true);
    }
    Arc::new(lists.finish())
}

/// The columns that have no field of their own.
fn extra(record: &Record) -> impl Iterator<Item = (ColumnId, Element, &[u8])> {
    let ids = record.columns().filter(|id| !OWN.contains(id));
    ids.filter_map(|id| record.column(id).map(|(element, bytes)| (id, element, bytes)))
}

fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Sample => "sample",
        Kind::Partial => "partial",
        Kind::Prompt => "prompt",
        Kind::Score => "score",
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
    if record.kind() == Kind::Score {
        return match record.verdict() {
            Verdict::Kept => "kept".into(),
            Verdict::Masked => "masked".into(),
            Verdict::LeftOut => "left_out".into(),
            Verdict::Other(code) => code.to_string(),
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
