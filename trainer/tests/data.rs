//! Prompt files: Parquet as others write it holds the same prompts as JSONL.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use driftless_trainer::ChatTemplate;
use driftless_trainer::data::{DataOptions, Dataset, RowReader, Source, Tokenizer, first_row};
use driftless_trainer::tasks::tiny;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::path::Path;
use std::sync::Arc;

const TEMPLATE: &str = "{% for m in messages %}{{ m.content }}{{ tools | tojson if tools }}={% endfor %}";
const SCHEMA: &str = "message rows {
    optional group input (LIST) { repeated group list { optional group element {
        optional binary role (UTF8); optional binary content (UTF8); } } }
    optional int64 label;
    optional binary tools (UTF8);
    optional double unused;
}";

fn tokenizer(dir: &Path) -> Arc<Tokenizer> {
    std::fs::write(dir.join("tokenizer.json"), tiny::tokenizer().to_string()).unwrap();
    Arc::new(Tokenizer::open(dir).unwrap())
}

/// Three rows: two messages, one message, and one message with tools.
fn write_parquet(path: &Path, compression: Compression) {
    let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, properties).unwrap();
    let mut rows = writer.next_row_group().unwrap();
    let bytes = |texts: &[&str]| texts.iter().map(|text| ByteArray::from(*text)).collect::<Vec<_>>();
    for texts in [bytes(&["user", "user", "user", "user"]), bytes(&["1+2", "3", "4+5", "6"])] {
        let mut column = rows.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&texts, Some(&[4; 4]), Some(&[0, 1, 0, 0])).unwrap();
        column.close().unwrap();
    }
    let mut column = rows.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(&[3, 9, 6], Some(&[1; 3]), None).unwrap();
    column.close().unwrap();
    let mut column = rows.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&bytes(&["[7]"]), Some(&[0, 0, 1]), None).unwrap();
    column.close().unwrap();
    let mut column = rows.next_column().unwrap().unwrap();
    column.typed::<parquet::data_type::DoubleType>().write_batch(&[], Some(&[0; 3]), None).unwrap();
    column.close().unwrap();
    rows.close().unwrap();
    writer.close().unwrap();
}

const JSONL: &str = r#"{"input": [{"role": "user", "content": "1+2"}, {"role": "user", "content": "3"}], "label": 3}
{"input": [{"role": "user", "content": "4+5"}], "label": 9, "tools": null}
{"input": [{"role": "user", "content": "6"}], "label": 6, "tools": "[7]"}
"#;

#[test]
fn first_row_has_all_fields_of_either_format() {
    let dir = tempfile::tempdir().unwrap();
    let (parquet, jsonl) = (dir.path().join("a.parquet"), dir.path().join("a.jsonl"));
    write_parquet(&parquet, Compression::UNCOMPRESSED);
    std::fs::write(&jsonl, JSONL).unwrap();
    let first = |path: &Path, rows: &str| {
        let row = first_row(&format!("{}{rows}", path.display()).parse::<Source>().unwrap());
        row.map(|mut row| {
            row.retain(|_, value| !value.is_null());
            serde_json::Value::from(row)
        })
    };
    let three = serde_json::json!({"input": [{"role": "user", "content": "6"}], "label": 6, "tools": "[7]"});
    for path in [&parquet, &jsonl] {
        assert_eq!(first(path, "@[2:]").unwrap(), three, "{}", path.display());
        let nothing = first(path, "@[3:]").unwrap_err().to_string();
        assert!(nothing.contains("no rows"), "{nothing}");
    }
    std::fs::write(&jsonl, "nonsense\n").unwrap();
    let refused = first(&jsonl, "").unwrap_err().to_string();
    assert!(refused.contains("a.jsonl:1") && refused.contains("nonsense"), "{refused}");
}

#[test]
fn parquet_of_every_compression_reads_as_jsonl_does() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let load = |file: &Path| {
        let options = DataOptions::default()
            .with_prompt_data(vec![Source { path: file.to_owned(), rows: 0..u64::MAX }])
            .with_label_key("label")
            .with_apply_chat_template(true);
        let template = ChatTemplate::from_source(TEMPLATE, &[]).unwrap();
        let reader = RowReader::new(options, tokenizer.clone(), Some(template)).unwrap();
        let data = Dataset::read(&reader).unwrap();
        let shown = |example: driftless_trainer::data::Example| {
            (example.text, example.tokens, example.label.unwrap().get().to_owned(), example.place.line)
        };
        data.examples.into_iter().map(shown).collect::<Vec<_>>()
    };
    let jsonl = dir.path().join("rows.jsonl");
    std::fs::write(&jsonl, JSONL).unwrap();
    let expected = load(&jsonl);
    assert_eq!(expected[0].0, "1+2=3=");
    assert_eq!(expected[2].0, "6[7]=");
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::ZSTD(Default::default()),
        Compression::GZIP(Default::default()),
        Compression::LZ4_RAW,
    ];
    for codec in codecs {
        let file = dir.path().join("rows.parquet");
        write_parquet(&file, codec);
        assert_eq!(load(&file), expected, "{codec}");
    }
}

#[test]
fn parquet_damaged_or_without_the_columns_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let file = dir.path().join("rows.parquet");
    write_parquet(&file, Compression::SNAPPY);
    let refused = |input_key: &str| {
        let options = DataOptions::default()
            .with_prompt_data(vec![Source { path: file.clone(), rows: 0..u64::MAX }])
            .with_input_key(input_key)
            .with_tool_key("none");
        let reader = RowReader::new(options, tokenizer.clone(), None).unwrap();
        Dataset::read(&reader).unwrap_err().to_string()
    };
    let words = refused("prompt");
    assert!(words.contains("rows.parquet") && words.contains("prompt") && words.contains("input"), "{words}");
    std::fs::write(&file, b"PAR1 and nothing else").unwrap();
    let words = refused("input");
    assert!(words.contains("rows.parquet"), "{words}");
}
