//! `strftime_now` of templates, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// The time as `format` says.
pub(super) fn now(format: &str) -> Result<String, String> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    at(seconds, format)
}

/// `seconds` since 1970 as `format` says; an error for a letter that no template is known to use.
fn at(seconds: u64, format: &str) -> Result<String, String> {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let weekday = DAYS[(days % 7) as usize];
    let month_name = MONTHS[(month - 1) as usize];
    let mut text = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        let part = match letters.next() {
            Some('d') => format!("{day:02}"),
            Some('m') => format!("{month:02}"),
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('H') => format!("{:02}", rest / 3600),
            Some('M') => format!("{:02}", rest / 60 % 60),
            Some('S') => format!("{:02}", rest % 60),
            Some('%') => "%".to_owned(),
            other => {
                let found = other.map_or_else(|| "%".to_owned(), |letter| format!("%{letter}"));
                return Err(format!(
                    "strftime_now: expected one of %d %m %Y %y %B %b %A %a %H %M %S, found {found}"
                ));
            }
        };
        text.push_str(&part);
    }
    Ok(text)
}

/// Year, month and day of a number of days since 1970 (H. Hinnant, "chrono-compatible low-level date
/// algorithms").
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(at(0, "%A %d %B %Y"), Ok("Thursday 01 January 1970".into()));
        assert_eq!(at(1_709_208_000, "%a %d %b %Y %H:%M:%S"), Ok("Thu 29 Feb 2024 12:00:00".into()));
        assert_eq!(at(4_102_444_799, "%d/%m/%y%%"), Ok("31/12/99%".into()));
        assert!(at(0, "%j").is_err() && at(0, "%").is_err());
    }
}
