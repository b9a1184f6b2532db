//! What `driftless follow` shows of its work: a line a version, and on a terminal how far it is.

use crate::cli::shared::engines::{came_by, listed};
use crate::cli::shared::output::{Output, short};
use crate::cli::shared::progress;
use driftless::store::wait::lock;
use driftless::store::wrap::Count;
use driftless::transport::activate::Compared;
use driftless::transport::follow::Status;
use driftless::transport::gc::{EngineStatus, Phases};
use driftless::transport::{Follower, Version};
use indicatif::{HumanBytes, ProgressBar};
use serde::Serialize;
use std::sync::{Arc, Mutex};

/// What is said of a version once engines were asked to serve it.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Line {
    /// The version before.
    from: Option<Version>,
    version: Version,
    label: String,
    bytes: u64,
    prepare_ms: f64,
    /// The phases of `prepare_ms`, and those of the engines behind it.
    phases: Option<Phases>,
    engines: usize,
    serving: usize,
    /// The longest of the engines' pauses; none where no engine was brought to the version.
    pause_ms: Option<f64>,
    /// How engines that serve the version came by it: the ways, each with how many and what is to say of it.
    ways: Vec<Way>,
    /// Why nothing was compared of the weights of one of them.
    not_compared: Option<String>,
    /// Why the first engine that does not serve the version does not.
    error: Option<String>,
}

/// Engines that came by a version in one way.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Way {
    /// `patched`, `loaded`, `pushed`.
    how: &'static str,
    engines: usize,
    /// The longest of their pauses.
    pause_ms: f64,
    /// Why the first that loaded was not patched, where somebody wanted it to be.
    why: Option<String>,
}

impl Way {
    /// The ways of these engines.
    fn all(engines: &[&EngineStatus]) -> Vec<Way> {
        let mut ways = Vec::<Way>::new();
        for engine in engines {
            let Some((how, why)) = engine.how.as_ref().map(came_by) else { continue };
            let why = why.map(short);
            let pause_ms = engine.pause_ms.unwrap_or_default();
            match ways.iter_mut().find(|way| way.how == how) {
                Some(way) => (way.engines, way.pause_ms) = (way.engines + 1, way.pause_ms.max(pause_ms)),
                None => ways.push(Way { how, engines: 1, pause_ms, why }),
            }
        }
        ways
    }

    /// `patched in 12.0 ms`, with how many if there are engines that came by it otherwise.
    fn text(&self, alone: bool) -> String {
        let Way { how, engines, pause_ms, why } = self;
        let count = if alone { String::new() } else { format!("{engines} ") };
        let why = why.as_ref().map_or_else(String::new, |why| format!(" ({why})"));
        format!("{count}{how} in {pause_ms:.1} ms{why}")
    }
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
        let there: Vec<_> =
            ack.engines.iter().filter(|engine| engine.label.as_ref() == Some(&ack.label)).collect();
        let not_compared = there.iter().find_map(|engine| match &engine.compared {
            Some(Compared::Not { why }) => Some(short(why)),
            _ => None,
        });
        let pauses = ack.engines.iter().filter_map(|engine| engine.pause_ms);
        let reason =
            |engine: &EngineStatus| Some(format!("{}: {}", engine.url, short(engine.error.as_ref()?)));
        Some(Line {
            from,
            version: ack.version,
            label: ack.label.clone(),
            bytes: ack.bytes,
            prepare_ms: ack.prepare_ms,
            phases: ack.phases.last().filter(|phases| phases.version == ack.version).cloned(),
            engines: ack.engines.len(),
            serving,
            pause_ms: pauses.reduce(f64::max),
            ways: Way::all(&there),
            not_compared,
            error: ack.engines.iter().find_map(reason),
        })
    }

    fn text(&self) -> String {
        let Line { version, bytes, prepare_ms, engines, serving, .. } = self;
        let mut text = match self.from {
            Some(from) => format!("version {from} -> {version}: {bytes} bytes in {prepare_ms:.0} ms"),
            None if *bytes == 0 => format!("version {version}, on disk already"),
            None => format!("version {version}: {bytes} bytes in {prepare_ms:.0} ms"),
        };
        let phases = self.phases.as_ref();
        phases
            .and_then(|phases| listed(phases.of_host()))
            .iter()
            .for_each(|list| text += &format!(" ({list})"));
        if *engines > 0 {
            text += &format!(", on {serving} of {engines} engines");
        }
        phases
            .and_then(|phases| listed(phases.of_engine()))
            .iter()
            .for_each(|list| text += &format!(" ({list})"));
        let alone = self.ways.len() == 1;
        for way in &self.ways {
            text += &format!(", {}", way.text(alone));
        }
        self.not_compared.iter().for_each(|why| text += &format!(", not compared ({why})"));
        match self.pause_ms {
            Some(_) if !self.ways.is_empty() => {}
            Some(pause_ms) => text += &format!(", paused for {pause_ms:.1} ms"),
            None if *serving > 0 => text += " already",
            None => {}
        }
        self.error.iter().for_each(|error| text += &format!("; {error}"));
        text
    }
}

/// The status at the end of a command that ends.
pub(super) fn status(status: &Status) -> String {
    let Some(ack) = &status.applied else { return format!("{}: nothing applied", status.id) };
    let prepared = match ack.prepare_ms {
        0.0 => "on disk already".to_owned(),
        prepare_ms => format!("{prepare_ms} ms to prepare"),
    };
    let engine = |engine: &EngineStatus| {
        let label = engine.label.as_deref().unwrap_or("none of ours");
        let pause =
            engine.pause_ms.map_or_else(String::new, |pause_ms| format!(", paused for {pause_ms} ms"));
        let paused = if engine.paused { ", still paused" } else { "" };
        let error = engine.error.as_deref().map_or_else(String::new, |error| format!(": {}", short(error)));
        let how = Way::all(&[engine]).first().map(|way| format!(", {}", way.text(true)));
        let not = match &engine.compared {
            Some(Compared::Not { why }) => format!(", not compared ({})", short(why)),
            _ => String::new(),
        };
        format!("{}: {label}{}{not}{paused}{error}", engine.url, how.unwrap_or(pause))
    };
    let first = format!("{} ({}), {prepared}", ack.label, ack.manifest_digest);
    std::iter::once(first).chain(ack.engines.iter().map(engine)).collect::<Vec<_>>().join("\n")
}

/// Prints a line to `lines` for each version that `follower` takes, and on a terminal shows meanwhile what it
/// does. `store` counts what is fetched.
pub(super) fn versions(follower: &Follower, store: Arc<Count>, lines: Option<Output>) -> ProgressBar {
    // Not the follower itself, which keeps what it shows by.
    let status = Arc::new(Mutex::new(None::<String>));
    let bar = progress::work("follow", {
        let status = status.clone();
        move || {
            let at = lock(&status).clone();
            let at = at.unwrap_or_else(|| "no version yet".to_owned());
            format!("{at}, {} fetched", HumanBytes(store.counts().bytes_got))
        }
    });
    let (shown, last) = (bar.clone(), Mutex::new(None));
    follower.on_round(move |seen| {
        let mut last = lock(&last);
        let Some(line) = Line::next(seen, last.as_ref()) else { return };
        *lock(&status) = Some(format!("at version {}", line.version));
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
    use driftless::transport::activate::How;
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
        assert_eq!(first.text(), "version 1: 12 bytes in 7 ms, on 0 of 2 engines, paused for 1.5 ms");
        assert_eq!(Line::next(&status(1, &["a:0", "a:0"]), Some(&first)), None);
        let more = Line::next(&status(1, &["a:1", "a:1"]), Some(&first)).expect("a line");
        assert_eq!(more.text(), "version 1: 12 bytes in 7 ms, on 2 of 2 engines, paused for 1.5 ms");
        assert_eq!(Line::next(&status(1, &["a:1", "a:0"]), Some(&more)), None, "one is started again");
        let next = Line::next(&status(3, &["a:3", "a:3"]), Some(&more)).expect("a line");
        assert_eq!(next.text(), "version 1 -> 3: 12 bytes in 7 ms, on 2 of 2 engines, paused for 1.5 ms");
        let alone = Line::next(&status(4, &[]), Some(&next)).expect("a line");
        assert_eq!(alone.text(), "version 3 -> 4: 12 bytes in 7 ms");
    }

    #[test]
    fn line_tells_the_phases_of_its_own_version() {
        let mut status = status(1, &["a:1"]);
        let phases =
            Phases { version: Version(1), see_ms: 0.4, fetch_ms: 2.0, decode_ms: 4.6, ..Phases::default() };
        let ack = status.applied.as_mut().expect("applied");
        ack.phases = vec![Phases { copy_ms: Some(3.0), patch_ms: Some(0.1), ..phases.clone() }];
        let line = Line::next(&status, None).expect("a line").text();
        let expected =
            "version 1: 12 bytes in 7 ms (fetch 2, decode 5), on 1 of 1 engines (copy 3), paused for 1.5 ms";
        assert_eq!(line, expected);
        status.applied.as_mut().expect("applied").phases = vec![Phases { version: Version(0), ..phases }];
        let line = Line::next(&status, None).expect("a line").text();
        assert_eq!(line, "version 1: 12 bytes in 7 ms, on 1 of 1 engines, paused for 1.5 ms");
    }

    #[test]
    fn line_tells_how_engines_came_by_the_version() {
        let mut status = status(1, &["a:1", "a:1", "a:0"]);
        let engines = &mut status.applied.as_mut().expect("applied").engines;
        (engines[0].how, engines[0].compared) = (Some(How::Patched), Some(Compared::Changes));
        let line = Line::next(&status, None).expect("a line").text();
        assert_eq!(line, "version 1: 12 bytes in 7 ms, on 2 of 3 engines, patched in 1.5 ms");

        let engines = &mut status.applied.as_mut().expect("applied").engines;
        engines[1].how = Some(How::Loaded { why: Some("w is no tensor of the model".into()) });
        (engines[1].pause_ms, engines[1].compared) =
            (Some(516.0), Some(Compared::Not { why: "no plugin".into() }));
        let line = Line::next(&status, None).expect("a line").text();
        let ways = "1 patched in 1.5 ms, 1 loaded in 516.0 ms (w is no tensor of the model), not compared (no plugin)";
        assert_eq!(line, format!("version 1: 12 bytes in 7 ms, on 2 of 3 engines, {ways}"));
        assert!(
            super::status(&status)
                .contains("1: a:1, loaded in 516.0 ms (w is no tensor of the model), not compared")
        );
    }

    #[test]
    fn line_tells_why_an_engine_is_not_on_the_version() {
        let mut status = status(1, &["a:0"]);
        let ack = status.applied.as_mut().expect("applied");
        (ack.engines[0].pause_ms, ack.engines[0].error) = (None, Some("no\u{1b}[2J config.json".into()));
        let line = Line::next(&status, None).expect("a line").text();
        assert_eq!(line, "version 1: 12 bytes in 7 ms, on 0 of 1 engines; 0: no [2J config.json");
        assert!(super::status(&status).ends_with("0: a:0: no [2J config.json"));
    }

    #[test]
    fn line_of_a_version_that_was_there_says_so() {
        let mut status = status(1, &["a:1"]);
        let ack = status.applied.as_mut().expect("applied");
        (ack.bytes, ack.prepare_ms, ack.engines[0].pause_ms) = (0, 0.0, None);
        let line = Line::next(&status, None).expect("a line").text();
        assert_eq!(line, "version 1, on disk already, on 1 of 1 engines already");
        assert!(super::status(&status).contains("on disk already\n"));
    }
}
