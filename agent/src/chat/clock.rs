//! `strftime_now` of templates, in UTC.

use chrono::format::StrftimeItems;
use chrono::{DateTime, Utc};

use crate::error::short;

/// The time as `format` says.
pub(super) fn now(format: &str) -> Result<String, String> {
    at(Utc::now(), format)
}

fn at(time: DateTime<Utc>, format: &str) -> Result<String, String> {
    let unknown = |_| format!("strftime_now: expected letters of strftime, found `{}`", short(format));
    let items = StrftimeItems::new(format).parse().map_err(unknown)?;
    Ok(time.format_with_items(items.iter()).to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = |seconds, format| at(DateTime::from_timestamp(seconds, 0).unwrap(), format);
        assert_eq!(at(0, "%A %d %B %Y"), Ok("Thursday 01 January 1970".into()));
        assert_eq!(at(1_709_208_000, "%a %-d %b %Y %H:%M:%S"), Ok("Thu 29 Feb 2024 12:00:00".into()));
        assert_eq!(at(4_102_444_799, "%d/%m/%y%%"), Ok("31/12/99%".into()));
        assert!(at(0, "%Q").is_err() && at(0, "%").is_err());
    }
}
