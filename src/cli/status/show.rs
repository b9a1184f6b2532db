//! What `driftless status` shows to people: a table of followers, and one of their engines. Texts are others', and no
//! terminal obeys them.

use super::{Acknowledged, Engine, Follower, Shown, Trainer};
use crate::cli::shared::engines::{came_by, listed};
use crate::cli::shared::output::{columns, cut, folded, short, table};
use crate::cli::shared::run::kind_text;
use driftless::transport::gc::Compared;
use indicatif::HumanBytes;

/// Columns from which on a table is one: off a terminal there are so many.
const WIDE: usize = 100;
/// Characters of a name and of an engine's URL.
const NAME_CHARS: usize = 24;
const URL_CHARS: usize = 44;

impl Shown {
    pub(super) fn text(&self) -> String {
        self.text_in(columns())
    }

    /// In lines of at most so many columns, but for what engines said.
    fn text_in(&self, columns: usize) -> String {
        let model = self.model.as_deref().map_or_else(String::new, |model| format!(", model {model}"));
        let mut parts = vec![format!("run {} ({}){model}", self.run, self.run_id)];
        parts.push(self.trainer.as_ref().map_or_else(|| "no version yet".to_owned(), Trainer::text));
        if self.followers.is_empty() {
            parts.push("no follower has a lease".to_owned());
        } else {
            parts.push(String::new());
            const HEADER: [&str; 7] = ["follower", "version", "lag", "lease", "prepare", "bytes", "in step"];
            parts.extend(lines(&HEADER, self.followers.iter().map(Follower::row).collect(), columns));
            parts.extend(self.followers.iter().filter_map(Follower::note));
        }
        let rows: Vec<_> = self.followers.iter().flat_map(Follower::engines).collect();
        if !rows.is_empty() {
            parts.push(String::new());
            parts.extend(lines(&["engine", "state", "pause", "by", "compared"], rows, columns));
        }
        let fold = |line: &String| if columns < WIDE { folded(line, columns) } else { vec![line.clone()] };
        parts.iter().flat_map(fold).collect::<Vec<_>>().join("\n")
    }
}

/// A line of a table, and what is said below it.
struct Row {
    cells: Vec<String>,
    notes: Vec<String>,
}

/// The lines of a table, none longer than so many columns, with the notes below their rows. A table that has no room in a
/// narrow terminal has a line a cell instead.
fn lines(header: &[&str], rows: Vec<Row>, columns: usize) -> Vec<String> {
    let table = table(header, rows.iter().map(|row| row.cells.clone()));
    if columns < WIDE && table.lines().any(|line| line.chars().count() > columns) {
        return rows.into_iter().flat_map(|row| row.stacked(header)).collect();
    }
    let mut notes = std::iter::once(Vec::new()).chain(rows.into_iter().map(|row| row.notes));
    let with_notes = |line| std::iter::once(cut(line, columns)).chain(notes.next().unwrap_or_default());
    table.lines().flat_map(with_notes).collect()
}

impl Row {
    /// Its first cell, and below it the others by their names, then its notes.
    fn stacked(self, header: &[&str]) -> Vec<String> {
        let mut cells = self.cells.into_iter();
        let first = cells.next().unwrap_or_default();
        let indent = " ".repeat(first.len() - first.trim_start().len() + 2);
        let named = header.iter().skip(1).zip(cells).filter(|(_, cell)| cell != "-");
        let named: Vec<_> = named.map(|(name, cell)| format!("{indent}{name}: {cell}")).collect();
        std::iter::once(first).chain(named).chain(self.notes).collect()
    }
}

impl Trainer {
    fn text(&self) -> String {
        let committed = match self.age_seconds {
            Some(age) => format!("committed {} ago", duration(age)),
            None => "the store does not tell when it was committed".to_owned(),
        };
        let Trainer { version, trainer_step, .. } = self;
        let (kind, bytes) = (kind_text(self.kind, self.anchor), HumanBytes(self.bytes));
        format!("version {version}: {kind}, step {trainer_step}, {bytes}, {committed}")
    }
}

impl Follower {
    fn row(&self) -> Row {
        let lease = match (self.live, self.age_seconds) {
            (_, None) => "not dated".to_owned(),
            (true, Some(age)) => format!("live, {} old", duration(age)),
            (false, Some(age)) => format!("ran out, {} old", duration(age)),
        };
        let nothing = if self.unreadable.is_some() { "unreadable" } else { "none yet" };
        let of = |tell: &dyn Fn(&Acknowledged) -> String| {
            self.acknowledged.as_ref().map_or_else(|| "-".to_owned(), |ack| cut(&tell(ack), 10))
        };
        let in_step = |ack: &Acknowledged| {
            let in_step = ack.engines.iter().filter(|engine| engine.in_step).count();
            if ack.engines.is_empty() {
                "-".to_owned()
            } else {
                format!("{in_step} of {}", ack.engines.len())
            }
        };
        let version = self.acknowledged.as_ref().map(|ack| cut(&ack.version.to_string(), 10));
        let cells = vec![
            cut(&self.follower, NAME_CHARS),
            version.unwrap_or_else(|| nothing.to_owned()),
            of(&|ack| ack.lag.to_string()),
            lease,
            of(&|ack| milliseconds(ack.prepare_ms)),
            of(&|ack| HumanBytes(ack.bytes).to_string()),
            of(&in_step),
        ];
        let phases = self.acknowledged.as_ref().and_then(|ack| ack.phases.last());
        let list = phases.and_then(|phases| listed(phases.of_host().into_iter().chain(phases.of_engine())));
        Row { cells, notes: list.iter().map(|list| short(&format!("  phases: {list}"))).collect() }
    }

    /// What does not go into a row.
    fn note(&self) -> Option<String> {
        let why = short(self.unreadable.as_ref()?);
        Some(format!("the lease of {} cannot be read: {why}", cut(&self.follower, NAME_CHARS)))
    }

    /// Its name, and below it a row for each of its engines.
    fn engines(&self) -> Vec<Row> {
        let Some(ack) = self.acknowledged.as_ref().filter(|ack| !ack.engines.is_empty()) else {
            return Vec::new();
        };
        let name = Row { cells: vec![cut(&self.follower, URL_CHARS)], notes: Vec::new() };
        std::iter::once(name).chain(ack.engines.iter().map(|engine| engine.row(&ack.label))).collect()
    }
}

impl Engine {
    /// Its row; `expected` is the label of its follower's version.
    fn row(&self, expected: &str) -> Row {
        let status = &self.status;
        let state = match (status.up, self.in_step) {
            (false, _) => "no answer",
            (true, true) => "in step",
            (true, false) => "out of step",
        };
        let (by, why) = status.how.as_ref().map_or(("-", None), came_by);
        let compared = match &status.compared {
            None => "-",
            Some(Compared::Plugin { .. }) => "plugin",
            Some(Compared::Checksums { .. }) => "checksums",
            Some(Compared::Changes) => "changes",
            Some(Compared::Not { .. }) => "nothing",
        };
        let cells = vec![
            format!("  {}", cut(&status.url, URL_CHARS - 2)),
            if status.paused { format!("{state}, paused") } else { state.to_owned() },
            status.pause_ms.map_or_else(|| "-".to_owned(), |pause| cut(&milliseconds(pause), 10)),
            by.to_owned(),
            compared.to_owned(),
        ];
        let note = |what: &str, text: &str| format!("    {what}: {}", short(text));
        let serves = (!self.in_step).then(|| match &status.label {
            Some(label) => {
                format!("    serves {}, not {}", cut(label, NAME_CHARS), cut(expected, NAME_CHARS))
            }
            None => format!("    serves nothing known, not {}", cut(expected, NAME_CHARS)),
        });
        let not_compared = match &status.compared {
            Some(Compared::Not { why }) => Some(note("not compared", why)),
            Some(Compared::Plugin { without: Some(without), .. }) => Some(note("compared without", without)),
            _ => None,
        };
        let error = status.error.as_ref().map(|error| note("error", error));
        let loaded = why.map(|why| note("loaded, not patched", why));
        Row { cells, notes: [serves, loaded, not_compared, error].into_iter().flatten().collect() }
    }
}

/// A time in milliseconds, in tenths only where these can be seen.
fn milliseconds(time: f64) -> String {
    match time {
        ..100.0 => format!("{time:.1} ms"),
        ..10_000.0 => format!("{time:.0} ms"),
        _ => format!("{:.0} s", time / 1e3),
    }
}

/// A time in seconds, in the largest unit of which there are two.
pub(crate) fn duration(seconds: f64) -> String {
    let units = [(86_400.0, "d"), (3600.0, "h"), (60.0, "min")];
    let (unit, name) = units.into_iter().find(|(unit, _)| seconds >= 2.0 * unit).unwrap_or((1.0, "s"));
    format!("{:.0} {name}", (seconds / unit).floor())
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftless::store::{Entry, Key};
    use driftless::transport::gc::GcOptions;
    use driftless::transport::{RunId, Version};
    use serde_json::{Value, json};
    use std::time::{Duration, SystemTime};

    /// What is shown where the newest version is 7, of these leases: name, age in seconds, bytes.
    fn text(leases: &[(&str, u64, Vec<u8>)]) -> String {
        shown(leases).text_in(WIDE)
    }

    fn shown(leases: &[(&str, u64, Vec<u8>)]) -> Shown {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let follower = |(name, age, bytes): &(&str, u64, Vec<u8>)| {
            let key = Key::new(format!("r/followers/{name}")).expect("a key");
            let entry = Entry::new(key, 1, Some(now - Duration::from_secs(*age)));
            let options = GcOptions::new("policy");
            let lease = driftless::transport::gc::lease(&entry, bytes, &options, Some(now))?;
            Some(Follower::of(lease, Version(7)))
        };
        let trainer = Trainer {
            version: Version(7),
            trainer_step: 700,
            kind: "delta",
            anchor: true,
            bytes: 1234,
            manifest_digest: driftless::store::ContentDigest::of(b"manifest"),
            age_seconds: Some(150.0),
        };
        let run_id: RunId = serde_json::from_value(json!("ab".repeat(16))).expect("an id");
        let (run, model) = ("my-run".to_owned(), Some("policy".to_owned()));
        let followers = leases.iter().filter_map(follower).collect();
        Shown { run, run_id, model, trainer: Some(trainer), followers }
    }

    fn lease(version: u64, engines: &Value) -> Vec<u8> {
        let lease = json!({
            "model": "policy", "needs": version, "version": version, "label": format!("a:{version}"),
            "manifest_digest": "0".repeat(64), "prepare_ms": 412.3, "bytes": 2048, "engines": engines,
        });
        lease.to_string().into_bytes()
    }

    #[test]
    fn run_without_followers_says_so() {
        let text = text(&[("critics", 1, br#"{"model":"critic","needs":0}"#.to_vec())]);
        let run = format!("run my-run ({}), model policy", "ab".repeat(16));
        let newest = "version 7: delta, anchor, step 700, 1.21 KiB, committed 2 min ago";
        assert_eq!(text, format!("{run}\n{newest}\nno follower has a lease"));
    }

    #[test]
    fn followers_of_all_states_are_told_apart() {
        let text = text(&[
            ("a", 12, lease(7, &json!([]))),
            ("b", 3000, lease(5, &json!([]))),
            ("c", 3, br#"{"model":"policy","needs":0}"#.to_vec()),
            ("d", 0, b"garbage\x1b[2J".to_vec()),
            ("e", 900, br#"{"model":"policy","version":"7\u001b[2J"}"#.to_vec()),
        ]);
        let rows: Vec<_> =
            text.lines().skip(3).map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(rows[0], "follower version lag lease prepare bytes in step");
        assert_eq!(rows[1], "a 7 0 live, 12 s old 412 ms 2.00 KiB -");
        assert_eq!(rows[2], "b 5 2 ran out, 50 min old 412 ms 2.00 KiB -");
        assert_eq!(rows[3], "c none yet - live, 3 s old - - -");
        assert_eq!(rows[4], "d unreadable - live, 0 s old - - -");
        assert_eq!(rows[5], "e unreadable - live, 15 min old - - -");
        assert_eq!(rows[6], "the lease of d cannot be read: expected value at line 1 column 1");
        assert!(rows[7].starts_with("the lease of e cannot be read: invalid type: string"), "{text}");
        assert!(rows.len() == 8 && !text.contains('\u{1b}'), "{text}");
    }

    #[test]
    fn phases_of_the_last_version_stand_below_its_follower() {
        let phases = |version, fetch_ms, copy_ms| {
            json!({"version": version, "began_at_ms": 1, "see_ms": 0.2, "sync_ms": 0.0, "fetch_ms": fetch_ms,
                "decode_ms": 95.2, "journal_ms": 0.0, "offer_ms": 0.0, "copy_ms": copy_ms, "patch_ms": 16.0})
        };
        let mut lease: Value = serde_json::from_slice(&lease(7, &json!([]))).expect("a lease");
        lease["phases"] = json!([phases(6, 900.0, 900.0), phases(7, 20.4, 40.0)]);
        let text = text(&[("host", 1, lease.to_string().into_bytes())]);
        assert_eq!(text.lines().last(), Some("  phases: fetch 20, decode 95, copy 40, patch 16"));
    }

    #[test]
    fn engines_are_shown_with_what_is_wrong_below_them() {
        let patched = json!({
            "url": "http://e:1", "label": "a:7", "pause_ms": 12.04, "how": "patched",
            "compared": {"plugin": {"tensors": 9}},
        });
        let failed = json!({
            "url": "http://e:2", "label": "a:5", "paused": true, "pause_ms": 516.0,
            "how": {"loaded": {"why": "no plugin"}}, "compared": {"not": {"why": "no checksums"}},
            "error": "HTTP 500",
        });
        let away = json!({"url": "http://e:3", "label": null, "up": false, "pause_ms": null});
        let text = text(&[("host", 1, lease(7, &json!([patched, failed, away])))]);
        let shown: Vec<_> = text.lines().skip(6).collect();
        let expected = [
            "engine        state                pause    by       compared",
            "host",
            "  http://e:1  in step              12.0 ms  patched  plugin",
            "  http://e:2  out of step, paused  516 ms   loaded   nothing",
            "    serves a:5, not a:7",
            "    loaded, not patched: no plugin",
            "    not compared: no checksums",
            "    error: HTTP 500",
            "  http://e:3  no answer            -        -        -",
            "    serves nothing known, not a:7",
        ];
        assert_eq!(shown, expected);
        assert!(text.contains("1 of 3"), "{text}");
    }

    #[test]
    fn narrow_terminal_has_a_line_for_each_cell() {
        let engine = json!({
            "url": "http://engine-17.rack-4.example.com:30000", "label": "a:5", "pause_ms": 516.0,
            "how": {"loaded": {"why": "no plugin was seen beside it"}}, "error": "HTTP 500",
        });
        let shown = shown(&[("host-of-a-long-name", 12, lease(7, &json!([engine])))]);
        let text = shown.text_in(40);
        assert!(text.lines().all(|line| line.chars().count() <= 40), "{text}");
        for line in ["host-of-a-long-name", "  version: 7", "  lease: live, 12 s old", "    pause: 516 ms"] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        let squeezed = |text: &str| text.split_whitespace().collect::<String>();
        for words in ["http://engine-17.rack-4.example.com:30000", "no plugin was seen beside it", "HTTP 500"]
        {
            assert!(squeezed(&text).contains(&squeezed(words)), "{words}: {text}");
        }
        assert_eq!(text.lines().next(), Some("run my-run"), "{text}");
    }

    #[test]
    fn hostile_texts_stay_in_their_lines_and_columns() {
        let evil = "\u{1b}[2J\n\u{202e}\u{9b}1A".repeat(99);
        let engine = json!({
            "url": evil, "label": evil, "paused": true, "pause_ms": 1e308, "how": {"loaded": {"why": evil}},
            "compared": {"plugin": {"tensors": u64::MAX, "without": evil}}, "error": evil,
        });
        let lease = json!({
            "version": u64::MAX, "label": "x".repeat(1 << 16), "manifest_digest": "0".repeat(64),
            "prepare_ms": -1e308, "bytes": u64::MAX, "engines": [engine],
        });
        let text = text(&[(&"n".repeat(200), 1 << 40, lease.to_string().into_bytes())]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 13, "{text}");
        let is_order = |letter: char| letter != '\n' && (letter.is_control() || letter == '\u{202e}');
        assert!(!text.contains(is_order), "{text:?}");
        let (tables, notes): (Vec<&str>, Vec<&str>) =
            lines.iter().partition(|line| !line.starts_with("    "));
        assert!(tables.iter().all(|line| line.chars().count() <= WIDE), "{tables:#?}");
        assert_eq!(notes.len(), 4);
        assert!(notes.iter().all(|line| line.chars().count() < 230), "{notes:#?}");
    }

    #[test]
    fn durations_are_in_units_that_one_reads() {
        assert_eq!(
            [0.4, 119.9, 120.0, 7199.0, 7200.0, 172_800.0].map(duration),
            ["0 s", "119 s", "2 min", "119 min", "2 h", "2 d"]
        );
        assert_eq!([7.04, 412.3, 12_345.0].map(milliseconds), ["7.0 ms", "412 ms", "12 s"]);
    }
}
