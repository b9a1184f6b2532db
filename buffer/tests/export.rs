//! What is exported is what is in the log, read back by the formats' own crates.
#![allow(clippy::unwrap_used, reason = "in a test, a failed expectation is the answer")]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Int32Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type};
use arrow_array::{Array, RecordBatch};
use arrow_schema::Schema;
use driftless_buffer::export::{Exported, TextColumns, export_arrow, export_parquet};
use driftless_buffer::learned::Column;
use driftless_buffer::sample::{ColumnId, Element};
use driftless_buffer::{Kind, Log, Position, PromptState, Sample, Scalars};
use driftless_testkit::log::{Owned, options, sample};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

/// What the learner said of samples 3 and 4.
const LEARNED: [f32; 2] = [-0.5, -1.5];

/// 30 samples and a prompt with a wide column.
fn log(dir: &std::path::Path) -> Vec<Owned> {
    let log = Log::open(dir, options()).unwrap();
    let owned: Vec<Owned> = (0..30).map(|id| sample(id, id / 4, 2)).collect();
    for owned in &owned {
        let _ = log.append(&owned.as_sample()).unwrap();
    }
    let scalars = Scalars { sample_id: 7, status: PromptState::InFlight.code(), ..Scalars::default() };
    let extra: &[(ColumnId, Element, &[u8])] = &[(ColumnId::IMAGES, Element::U8, b"png")];
    let prompt =
        Sample { kind: Kind::Prompt, scalars, prompt_len: 2, tokens: &[1, 2], extra, ..Sample::default() };
    log.append(&prompt).unwrap().wait().unwrap();
    for step in 0..2 {
        let learned = [Column { position: Position(3 + step), log_probs: &LEARNED, engine_log_probs: &[] }];
        log.reader().write_learned(step, &learned).unwrap();
    }
    log.close().unwrap();
    owned
}

fn check(schema: &Schema, batches: &[RecordBatch], owned: &[Owned]) {
    assert_eq!(batches.len(), 1);
    let batch = &batches[0];
    assert_eq!(batch.num_rows(), owned.len() + 1);
    let model = schema.metadata().get("model").map(|model| model.to_string());
    assert_eq!(model.as_deref(), Some("policy"));
    let column = |name: &str| batch.column_by_name(name).unwrap();
    let u64s = |name: &str| column(name).as_primitive::<UInt64Type>();
    for (row, owned) in owned.iter().enumerate() {
        assert_eq!(u64s("position").value(row), row as u64);
        assert_eq!(u64s("sample_id").value(row), owned.scalars.sample_id);
        assert_eq!(u64s("group_id").value(row), owned.scalars.group_id);
        assert_eq!(u64s("rollout_id").value(row), owned.scalars.rollout_id);
        assert_eq!(column("kind").as_string::<i32>().value(row), "sample");
        assert_eq!(column("status").as_string::<i32>().value(row), "stop");
        assert_eq!(column("reward").as_primitive::<Float32Type>().value(row), owned.scalars.reward);
        assert_eq!(column("prompt_len").as_primitive::<UInt32Type>().value(row), owned.prompt_len as u32);
        let list = |name: &str| column(name).as_list::<i32>().value(row);
        assert_eq!(list("tokens").as_primitive::<Int32Type>().values(), &owned.tokens[..]);
        assert_eq!(list("log_probs").as_primitive::<Float32Type>().values(), &owned.log_probs[..]);
        assert_eq!(list("loss_mask").as_primitive::<UInt8Type>().values(), &owned.loss_mask[..]);
        assert_eq!(list("span_version").as_primitive::<UInt64Type>().values(), &[2]);
        assert_eq!(list("span_end").as_primitive::<UInt32Type>().value(0), owned.log_probs.len() as u32);
        assert_eq!(column("engine").as_string::<i32>().value(row), "engine");
        assert_eq!(column("metadata").as_binary::<i32>().value(row), owned.metadata);
    }
    let learned = column("learner_log_probs").as_list::<i32>();
    let known: Vec<usize> = (0..learned.len()).filter(|row| learned.is_valid(*row)).collect();
    assert_eq!(known, [3, 4], "the samples that a step learned from");
    assert_eq!(learned.value(4).as_primitive::<Float32Type>().values(), &LEARNED[..]);
    let last = owned.len();
    assert_eq!(column("kind").as_string::<i32>().value(last), "prompt");
    assert_eq!(column("status").as_string::<i32>().value(last), "in_flight");
    let extra = |name: &str| column(name).as_list::<i32>().value(last);
    assert_eq!(extra("extra_id").as_primitive::<UInt16Type>().values(), &[ColumnId::IMAGES.0]);
    assert_eq!(extra("extra_element").as_string::<i32>().value(0), "u8");
    assert_eq!(extra("extra_bytes").as_binary::<i32>().value(0), b"png");
    assert!(column("extra_id").as_list::<i32>().value(0).is_empty());
}

#[test]
fn arrow_and_parquet_hold_what_the_log_holds() {
    let dir = tempfile::tempdir().unwrap();
    let owned = log(dir.path());
    let reader = driftless_buffer::Reader::open(dir.path()).unwrap();
    let all = Position(0)..reader.end();
    let (arrow, parquet) = (dir.path().join("out.arrow"), dir.path().join("out.parquet"));
    let exported =
        export_arrow(&reader, all.clone(), TextColumns::NONE, File::create(&arrow).unwrap()).unwrap();
    assert_eq!(exported, Exported { records: 31, damaged: 0 });
    let written = export_parquet(&reader, all, TextColumns::NONE, File::create(&parquet).unwrap()).unwrap();
    assert_eq!(written, exported);
    let read = arrow_ipc::reader::FileReader::try_new(File::open(arrow).unwrap(), None).unwrap();
    check(&read.schema(), &read.map(Result::unwrap).collect::<Vec<_>>(), &owned);
    let read = ParquetRecordBatchReaderBuilder::try_new(File::open(parquet).unwrap()).unwrap();
    let schema = Arc::clone(read.schema());
    check(&schema, &read.build().unwrap().map(Result::unwrap).collect::<Vec<_>>(), &owned);
}

#[test]
fn texts_are_columns_of_their_own_and_null_where_there_is_none() {
    let dir = tempfile::tempdir().unwrap();
    log(dir.path());
    let reader = driftless_buffer::Reader::open(dir.path()).unwrap();
    let of = |record: &driftless_buffer::Record| {
        let is_sample = record.kind() == Kind::Sample;
        vec![Some(format!("{} tokens", record.tokens().len())), is_sample.then(|| "b".to_owned())]
    };
    let mut out = Vec::new();
    let texts = TextColumns { names: &["length", "answer"], of: &of };
    export_arrow(&reader, Position(0)..reader.end(), texts, &mut out).unwrap();
    let mut read = arrow_ipc::reader::FileReader::try_new(std::io::Cursor::new(out), None).unwrap();
    let batch = read.next().unwrap().unwrap();
    let column = |name: &str| batch.column_by_name(name).unwrap().as_string::<i32>().clone();
    assert_eq!(column("length").value(30), "2 tokens");
    assert_eq!((column("answer").value(29), column("answer").is_null(30)), ("b", true));
}

#[test]
fn a_damaged_record_is_left_out_and_counted_and_a_range_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    log(dir.path());
    let file = File::options().write(true).open(dir.path().join("segment-00000000000000000000.log")).unwrap();
    file.write_all_at(&[0xee], 4096 + 64 + 250).unwrap();
    let reader = driftless_buffer::Reader::open(dir.path()).unwrap();
    let mut out = Vec::new();
    let exported = export_arrow(&reader, Position(0)..Position(10), TextColumns::NONE, &mut out).unwrap();
    assert_eq!(exported, Exported { records: 9, damaged: 1 });
    let read = arrow_ipc::reader::FileReader::try_new(std::io::Cursor::new(out), None).unwrap();
    let positions: Vec<u64> = read
        .flat_map(|batch| batch.unwrap().column(0).as_primitive::<UInt64Type>().values().to_vec())
        .collect();
    assert_eq!(positions, (1..10).collect::<Vec<u64>>());
}
