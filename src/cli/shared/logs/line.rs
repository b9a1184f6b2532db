//! How a line of the log looks: as text, or as an object of JSON.

use super::repeats::Told;
use crate::cli::shared::output::json_escaped;
use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt::{Debug, Result};
use std::time::SystemTime;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// How lines on standard error look: for people, or an object each. Its values have no comments, because clap would show
/// them, and spread out the help of every command for that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

impl LogFormat {
    /// The line with its time, and with how often it came where that is told.
    pub(super) fn line(self, told: &Told, is_coloured: bool) -> String {
        let (line, time) = (told.line.trim_end_matches('\n'), utc(told.at));
        match self {
            LogFormat::Text => {
                let more = match told.more {
                    0 => String::new(),
                    1 => " (1 more time)".to_owned(),
                    more => format!(" ({more} more times)"),
                };
                let (dim, plain) = if is_coloured { ("\u{1b}[2m", "\u{1b}[0m") } else { ("", "") };
                format!("{dim}{time}{plain} {line}{more}\n")
            }
            LogFormat::Json => {
                let line = line.strip_prefix('{').and_then(|line| line.strip_suffix('}')).unwrap_or(line);
                let more =
                    if told.more == 0 { String::new() } else { format!(",\"more_times\":{}", told.more) };
                format!("{{\"time\":\"{time}\",{line}{more}}}\n")
            }
        }
    }
}

/// What an object has, but for its time.
#[derive(Serialize)]
struct Entry<'a> {
    level: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<&'a str>,
    message: &'a str,
    fields: &'a Map<String, Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    spans: Vec<&'a str>,
}

impl Entry<'_> {
    /// A line of JSON that no terminal obeys.
    fn line(&self) -> String {
        json_escaped(&serde_json::to_string(self).unwrap_or_default())
    }
}

/// What is said without a place in the code, as an object.
pub(super) fn said(level: Level, message: &str, fields: &Map<String, Value>) -> String {
    Entry { level: level.as_str(), target: None, message, fields, spans: Vec::new() }.line()
}

/// Writes events as objects, without their time.
pub(super) struct Json;

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> Result {
        let mut seen = Seen::default();
        event.record(&mut seen);
        let metadata = event.metadata();
        let scope = context.event_scope().into_iter().flat_map(|scope| scope.from_root());
        let entry = Entry {
            level: metadata.level().as_str(),
            target: Some(seen.target.as_deref().unwrap_or_else(|| metadata.target())),
            message: &seen.message,
            fields: &seen.fields,
            spans: scope.map(|span| span.name()).collect(),
        };
        writeln!(out, "{}", entry.line())
    }
}

/// The fields of an event.
#[derive(Default)]
struct Seen {
    message: String,
    /// Where it was said, of events that came by the crate `log`.
    target: Option<String>,
    fields: Map<String, Value>,
}

impl Seen {
    fn put(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(message)) => self.message = message,
            ("log.target", Value::String(target)) => self.target = Some(target),
            (name, _) if name.starts_with("log.") => {}
            (name, value) => {
                self.fields.insert(name.trim_start_matches("r#").to_owned(), value);
            }
        }
    }
}

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.put(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        // JSON has no infinities.
        let number = serde_json::Number::from_f64(value);
        self.put(field, number.map_or_else(|| value.to_string().into(), Value::Number));
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        let causes = std::iter::successors(value.source(), |cause| cause.source());
        let causes: Vec<Value> = causes.map(|cause| cause.to_string().into()).collect();
        if !causes.is_empty() {
            self.fields.insert(format!("{}.because", field.name()), causes.into());
        }
        self.put(field, value.to_string().into());
    }
}

/// A time as RFC 3339 has it, in microseconds. Days are counted in eras of 400 years that begin on the 1st of March.
fn utc(at: SystemTime) -> String {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400 + 719_468, since.as_secs() % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let (year, hour, minute) = (400 * era + year + next, second / 3600, second / 60 % 60);
    format!(
        "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{:02}.{:06}Z",
        second % 60,
        since.subsec_micros()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn told(line: &str, more: u64) -> Told {
        let at = SystemTime::UNIX_EPOCH + Duration::from_micros(1_764_437_346_000_120);
        Told { line: line.to_owned(), at, more }
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        let of = |seconds| utc(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(of(0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(of(951_782_399), "2000-02-28T23:59:59.000000Z");
        assert_eq!(of(951_782_400), "2000-02-29T00:00:00.000000Z");
        assert_eq!(of(1_735_689_599), "2024-12-31T23:59:59.000000Z");
        assert_eq!(of(4_107_542_400), "2100-03-01T00:00:00.000000Z");
    }

    #[test]
    fn text_has_its_time_in_front_and_its_count_behind() {
        let line = |more, is_coloured| LogFormat::Text.line(&told(" WARN a: b\n", more), is_coloured);
        assert_eq!(line(0, false), "2025-11-29T17:29:06.000120Z  WARN a: b\n");
        assert_eq!(line(1, false), "2025-11-29T17:29:06.000120Z  WARN a: b (1 more time)\n");
        assert_eq!(
            line(7, true),
            "\u{1b}[2m2025-11-29T17:29:06.000120Z\u{1b}[0m  WARN a: b (7 more times)\n"
        );
    }

    #[test]
    fn object_has_time_level_message_fields_and_its_count() {
        let fields = Map::from_iter([("k".to_owned(), 1.into())]);
        let said = said(Level::WARN, "a \u{1b}[2J\n\"b\"", &fields);
        let line = LogFormat::Json.line(&told(&said, 3), false);
        assert!(line.ends_with("}\n") && !line.trim_end().contains(char::is_control), "{line}");
        let object: Value = serde_json::from_str(&line).expect("JSON");
        let expected = serde_json::json!({
            "time": "2025-11-29T17:29:06.000120Z", "level": "WARN", "message": "a \u{1b}[2J\n\"b\"",
            "fields": {"k": 1}, "more_times": 3,
        });
        assert_eq!(object, expected);
    }
}
