//! `events.jsonl` of a run: a line for each fact.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use super::{Event, Fact, Sink};

/// Its name in the run's directory. What a longer one had before is beside it, as `events.1.jsonl`.
pub const EVENTS: &str = "events.jsonl";
/// Name of the file before it.
pub const EARLIER: &str = "events.1.jsonl";

/// Size from which on the next file begins.
const BYTES_MAX: u64 = 64 << 20;

/// Appends facts to a file. It leaves out how far a rollout is, which the log has, and what is waited for a second time.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    /// Absent before the first fact, and where the last one could not be written.
    file: Option<File>,
    bytes_max: u64,
    waiting: String,
    /// Whether the last line could not be written.
    failed: bool,
}

impl EventFile {
    /// That of the run in `save`. It is opened, or made, for the first fact: a run that is refused has none.
    #[must_use]
    pub fn new(save: &Path) -> Self {
        EventFile {
            path: save.join(EVENTS),
            file: None,
            bytes_max: BYTES_MAX,
            waiting: String::new(),
            failed: false,
        }
    }

    fn is_shown(&mut self, event: &Event) -> bool {
        match event {
            Event::Generating { .. } => false,
            Event::Waiting { what, on } => {
                let waiting = format!("{what}: {on}");
                std::mem::replace(&mut self.waiting, waiting.clone()) != waiting
            }
            _ => {
                self.waiting.clear();
                true
            }
        }
    }

    fn write(&mut self, fact: &Fact) -> io::Result<()> {
        let mut file = self.file.take().map_or_else(|| open(&self.path), Ok)?;
        let is_long = |file: &File| Ok::<_, io::Error>(file.metadata()?.len() > self.bytes_max);
        if is_long(&file)? {
            // The other half of the run may have begun the next one.
            file = open(&self.path)?;
            if is_long(&file)? {
                std::fs::rename(&self.path, self.path.with_file_name(EARLIER))?;
                file = open(&self.path)?;
            }
        }
        let mut line = serde_json::to_vec(fact)?;
        line.push(b'\n');
        file.write_all(&line)?;
        self.file = Some(file);
        Ok(())
    }
}

/// The file, its last line ended.
fn open(path: &Path) -> io::Result<File> {
    let mut file = File::options().read(true).append(true).create(true).open(path)?;
    let bytes = file.seek(SeekFrom::End(0))?;
    let mut last = [b'\n'];
    if bytes > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
    }
    // A crash has cut it off.
    if last != *b"\n" {
        file.write_all(b"\n")?;
    }
    Ok(file)
}

impl Sink for EventFile {
    fn take(&mut self, fact: &Fact) {
        if !self.is_shown(&fact.event) {
            return;
        }
        let written = self.write(fact);
        if let (Err(error), false) = (&written, self.failed) {
            tracing::warn!(path = %self.path.display(), %error, "an event is not written; the run goes on");
        }
        self.failed = written.is_err();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::time::SystemTime;

    use super::*;

    fn fact(event: Event) -> Fact {
        Fact::new(SystemTime::UNIX_EPOCH, event)
    }

    fn waiting(on: &str) -> Fact {
        fact(Event::Waiting { what: "w".to_owned(), on: on.to_owned() })
    }

    #[test]
    fn lines_are_appended_whole_and_repeats_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(EVENTS);
        std::fs::write(&path, "{\"at_ms\":1,\"ev").unwrap();
        let mut file = EventFile::new(dir.path());
        let generating = fact(Event::Generating { rollout: 0, done: 1, total: 2 });
        for fact in [
            waiting(""),
            waiting(""),
            generating,
            waiting(""),
            waiting("a"),
            fact(Event::OtherPrompts),
            waiting("a"),
        ] {
            file.take(&fact);
        }
        drop(file);
        EventFile::new(dir.path()).take(&fact(Event::LogMissing { step: 1 }));
        let text = std::fs::read_to_string(&path).unwrap();
        let line = |on: &str| format!(r#"{{"at_ms":0,"event":"waiting","what":"w","on":"{on}"}}"#);
        let (other, missing) =
            (r#"{"at_ms":0,"event":"other_prompts"}"#, r#"{"at_ms":0,"event":"log_missing","step":1}"#);
        let expected = ["{\"at_ms\":1,\"ev", &line(""), &line("a"), other, &line("a"), missing];
        assert_eq!(text.lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn long_file_becomes_the_earlier_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = || EventFile { bytes_max: 60, ..EventFile::new(dir.path()) };
        let (mut file, mut other_half) = (file(), file());
        file.take(&fact(Event::LogMissing { step: 1 }));
        file.take(&fact(Event::OtherPrompts));
        other_half.take(&fact(Event::OtherPrompts));
        file.take(&fact(Event::OtherPrompts));
        let lines = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap().lines().count();
        assert_eq!((lines(EARLIER), lines(EVENTS)), (2, 2), "both go on in the same one");
    }
}
