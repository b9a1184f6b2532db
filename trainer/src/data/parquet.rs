//! Rows of Parquet files, as the same JSON that a JSONL file would hold.

use std::fs::File;
use std::sync::Arc;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row as Record};
use parquet::schema::types::Type;
use serde::ser::{Error as _, Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};

use super::rows::{Fields, Row, Wanted, Why};
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
    let is_wanted = |name| wanted.all || wanted.required.contains(&name) || wanted.optional.contains(&name);
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

fn fields(record: &Record) -> Result<Fields, Why> {
    let field = |(name, field): (&String, &Field)| {
        let json = to_raw_value(&Json(field)).map_err(|error| Why::bad("text", error))?;
        Ok((name.clone(), json))
    };
    record.get_column_iter().map(field).collect()
}

/// A field as JSON.
struct Json<'a>(&'a Field);

impl Serialize for Json<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Field::Null => serializer.serialize_unit(),
            Field::Bool(value) => value.serialize(serializer),
            Field::Byte(value) => value.serialize(serializer),
            Field::Short(value) => value.serialize(serializer),
            Field::Int(value) => value.serialize(serializer),
            Field::Long(value) => value.serialize(serializer),
            Field::UByte(value) => value.serialize(serializer),
            Field::UShort(value) => value.serialize(serializer),
            Field::UInt(value) => value.serialize(serializer),
            Field::ULong(value) => value.serialize(serializer),
            Field::Float16(value) => number(f64::from(value.to_f32())).serialize(serializer),
            Field::Float(value) => number(f64::from(*value)).serialize(serializer),
            Field::Double(value) => number(*value).serialize(serializer),
            Field::Str(value) => value.serialize(serializer),
            Field::Bytes(value) => match value.as_utf8() {
                Ok(value) => value.serialize(serializer),
                Err(_) => Err(S::Error::custom("bytes that are not UTF-8")),
            },
            Field::Group(record) => {
                serializer.collect_map(record.get_column_iter().map(|(name, value)| (name, Json(value))))
            }
            Field::ListInternal(list) => serializer.collect_seq(list.elements().iter().map(Json)),
            Field::MapInternal(map) => {
                let key = |field: &Field| match field {
                    Field::Str(key) => key.clone(),
                    other => other.to_string(),
                };
                serializer.collect_map(map.entries().iter().map(|(name, value)| (key(name), Json(value))))
            }
            // Decimals, dates and times: as Parquet's own tools print them.
            other => serializer.collect_str(other),
        }
    }
}

/// With two digits at least, so that it stays a float; none if it is not finite.
fn number(value: f64) -> Option<Box<RawValue>> {
    RawValue::from_string(format!("{value:?}")).ok()
}
