//! What `driftless follow` shows of its work: a line a version, and on a terminal how far it is.

use crate::cli::shared::output::Output;
use crate::cli::shared::progress;
use driftless::store::wrap::Count;
use driftless::transport::follow::Status;
use driftless::transport::{Follower, Version};
use indicatif::{HumanBytes, ProgressBar};
use serde::Serialize;
use std::sync::{Arc, Mutex, PoisonError};

/// What is said of a version once engines were asked to serve it.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Line {
    /// The version before.
    from: Option<Version>,
    version: Version,
    label: String,
    bytes: u64,
    prepare_ms: f64,
    engines: usize,
    serving: usize,
    /// The longest of the engines' pauses.
    pause_ms: f64,
}

impl Line {
    /// What there is to say after `last` was said: of another version, or that more engines serve it.
    fn next(status: &Status, last: Option<&Line>) -> Option<Line> {
        let ack = status.applied.as_ref()?;
        let serving = ack.engines.iter().filter(|engine| engine.label.as_ref() == Some(&ack.label)).count();
        let from = match last {
            Some(last) if last.version == ack.version && last.serving >= serving => return None,
            Some(last) if last.version == ack.version => last.from,
            last => last.map(|last| last.version),
        };
        let pauses = ack.engines.iter().filter_map(|engine| engine.pause_ms);
        Some(Line {
            from,
            version: ack.version,
            label: ack.label.clone(),
            bytes: ack.bytes,
            prepare_ms: ack.prepare_ms,
            engines: ack.engines.len(),
            serving,
            pause_ms: pauses.fold(0.0, f64::max),
        })
    }

    fn text(&self) -> String {
        let Line { version, bytes, prepare_ms, engines, serving, pause_ms, .. } = self;
        let mut text = match self.from {
            Some(from) => format!("version {from} -> {version}: {bytes} bytes in {prepare_ms:.0} ms"),
            None => format!("version {version}"),
        };
        if *engines > 0 {
            text += &format!(", on {serving} of {engines} engines");
        }
        if *serving > 0 {
            text += &format!(", paused for {pause_ms:.1} ms");
        }
        text
    }
}

/// Prints a line to `lines` for each version that `follower` takes, and on a terminal shows meanwhile what it
/// does. `store` counts what is fetched.
pub(super) fn versions(follower: &Follower, store: Arc<Count>, lines: Option<Output>) -> ProgressBar {
    // Not the follower itself, which keeps what it shows by.
    let status = Arc::new(Mutex::new(None::<String>));
    let bar = progress::work("follow", {
        let status = status.clone();
        move || {
            let at = status.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let at = at.unwrap_or_else(|| "no version yet".to_owned());
            format!("{at}, {} fetched", HumanBytes(store.counts().bytes_got))
        }
    });
    let (shown, last) = (bar.clone(), Mutex::new(None));
    follower.on_round(move |seen| {
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(line) = Line::next(seen, last.as_ref()) else { return };
        *status.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("at version {}", line.version));
        if let Some(output) = lines {
            // Engines have to be kept on their version, whoever still reads the lines.
            shown.suspend(|| drop(output.print(&line, Line::text)));
        }
        *last = Some(line);
    });
    bar
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn status(version: u64, labels: &[&str]) -> Status {
        let engine =
            |(at, label): (usize, &&str)| json!({"url": at.to_string(), "label": label, "pause_ms": 1.5});
        let engines: Vec<_> = labels.iter().enumerate().map(engine).collect();
        serde_json::from_value(json!({
            "id": "host", "run": "r", "run_id": null, "model": "policy", "newest": version,
            "applied": {"version": version, "label": format!("a:{version}"), "manifest_digest": "0".repeat(64),
                "prepare_ms": 7.0, "bytes": 12, "engines": engines},
        }))
        .expect("a status")
    }

    #[test]
    fn line_for_each_version_and_for_more_engines() {
        let first = Line::next(&status(1, &["a:0", "a:0"]), None).expect("a line");
        assert_eq!(first.text(), "version 1, on 0 of 2 engines");
        assert_eq!(Line::next(&status(1, &["a:0", "a:0"]), Some(&first)), None);
        let more = Line::next(&status(1, &["a:1", "a:1"]), Some(&first)).expect("a line");
        assert_eq!(more.text(), "version 1, on 2 of 2 engines, paused for 1.5 ms");
        assert_eq!(Line::next(&status(1, &["a:1", "a:0"]), Some(&more)), None, "one is started again");
        let next = Line::next(&status(3, &["a:3", "a:3"]), Some(&more)).expect("a line");
        assert_eq!(next.text(), "version 1 -> 3: 12 bytes in 7 ms, on 2 of 2 engines, paused for 1.5 ms");
        let alone = Line::next(&status(4, &[]), Some(&next)).expect("a line");
        assert_eq!(alone.text(), "version 3 -> 4: 12 bytes in 7 ms");
    }
}
