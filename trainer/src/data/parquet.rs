//! Rows of Parquet files, as the same JSON that a JSONL file would hold.

use std::fs::File;
use std::sync::Arc;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row as Record};
use parquet::schema::types::Type;
use serde_json::value::RawValue;

use super::rows::{Fault, Fields, Row, Wanted};
use super::source::Source;
use crate::error::{Error, Result, input, short};

pub(super) fn each(
    source: &Source,
    file: File,
    wanted: &Wanted<'_>,
    mut take: impl FnMut(Row) -> Result<()>,
) -> Result<()> {
    let damaged = |error| unreadable(source, error);
    let reader = SerializedFileReader::new(file).map_err(damaged)?;
    let schema = reader.metadata().file_metadata().schema();
    let all = schema.get_fields();
    if let Some(missing) =
        wanted.required.iter().find(|name| !all.iter().any(|column| column.name() == **name))
    {
        let found: Vec<_> = all.iter().map(|column| short(column.name())).collect();
        let found = format!("columns `{}`", found.join("`, `"));
        return Err(input(source.path.display(), format!("a column `{missing}`"), found));
    }
    let is_wanted = |name| wanted.required.contains(&name) || wanted.optional.contains(&name);
    let columns: Vec<_> = all.iter().filter(|column| is_wanted(column.name())).cloned().collect();
    let projection = Type::group_type_builder(schema.name()).with_fields(columns).build().map_err(damaged)?;
    let rows = reader.get_row_iter(Some(projection)).map_err(damaged)?;
    for (number, record) in (0..source.rows.end).zip(rows) {
        if number >= source.rows.start {
            take(Row { line: number + 1, fields: fields(&record.map_err(damaged)?) })?;
        }
    }
    Ok(())
}

fn unreadable(source: &Source, error: parquet::errors::ParquetError) -> Error {
    let source_of = std::io::Error::other(Arc::new(error));
    Error::Io { action: "read, as Parquet,", path: source.path.clone(), source: source_of }
}

fn fields(record: &Record) -> Result<Fields, Fault> {
    let mut fields = Fields::new();
    for (name, field) in record.get_column_iter() {
        let mut json = String::new();
        write(field, &mut json)?;
        let raw = RawValue::from_string(json).map_err(|error| Fault::new("text or numbers", error))?;
        fields.insert(name.clone(), raw);
    }
    Ok(fields)
}

fn write(field: &Field, json: &mut String) -> Result<(), Fault> {
    let number = |json: &mut String, value: f64| match value.is_finite() {
        // Two digits at least, so that it stays a float.
        true => json.push_str(&format!("{value:?}")),
        false => json.push_str("null"),
    };
    match field {
        Field::Null => json.push_str("null"),
        Field::Bool(value) => json.push_str(&value.to_string()),
        Field::Byte(value) => json.push_str(&value.to_string()),
        Field::Short(value) => json.push_str(&value.to_string()),
        Field::Int(value) => json.push_str(&value.to_string()),
        Field::Long(value) => json.push_str(&value.to_string()),
        Field::UByte(value) => json.push_str(&value.to_string()),
        Field::UShort(value) => json.push_str(&value.to_string()),
        Field::UInt(value) => json.push_str(&value.to_string()),
        Field::ULong(value) => json.push_str(&value.to_string()),
        Field::Float16(value) => number(json, f64::from(value.to_f32())),
        Field::Float(value) => number(json, f64::from(*value)),
        Field::Double(value) => number(json, *value),
        Field::Str(value) => text(value, json),
        Field::Bytes(value) => match value.as_utf8() {
            Ok(value) => text(value, json),
            Err(_) => return Err(Fault::new("text", "bytes that are not UTF-8")),
        },
        Field::Group(record) => {
            let members = record.get_column_iter().map(|(name, value)| (name.as_str(), value));
            object(members, json)?;
        }
        Field::ListInternal(list) => {
            json.push('[');
            for (index, element) in list.elements().iter().enumerate() {
                if index > 0 {
                    json.push(',');
                }
                write(element, json)?;
            }
            json.push(']');
        }
        Field::MapInternal(map) => {
            let key = |field: &Field| match field {
                Field::Str(key) => key.clone(),
                other => other.to_string(),
            };
            let members: Vec<_> = map.entries().iter().map(|(name, value)| (key(name), value)).collect();
            object(members.iter().map(|(name, value)| (name.as_str(), *value)), json)?;
        }
        // Decimals, dates and times: as Parquet's own tools print them.
        other => text(&other.to_string(), json),
    }
    Ok(())
}

fn object<'a>(members: impl Iterator<Item = (&'a str, &'a Field)>, json: &mut String) -> Result<(), Fault> {
    json.push('{');
    for (index, (name, value)) in members.enumerate() {
        if index > 0 {
            json.push(',');
        }
        text(name, json);
        json.push(':');
        write(value, json)?;
    }
    json.push('}');
    Ok(())
}

fn text(value: &str, json: &mut String) {
    json.push_str(&serde_json::Value::from(value).to_string());
}
