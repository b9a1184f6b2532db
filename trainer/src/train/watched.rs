//! `rollout_external_engines_file`: a list of engines that may change while the run runs.
//!
//! A line has an address, and `with-keys` behind it where the engine gets the run's keys. What follows a `#` is a comment.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use driftless_store::os::regular;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::TrainOptions;
use super::changes::{Engine, url_of};
use super::door::Keeper;
use super::resolved::Name;
use crate::error::{Result, input, io as io_error};

/// Time between two looks at the file, and how long it has to stay as it is before it is read: whoever writes it may not
/// be done.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Longest file: tens of thousands of engines.
const BYTES_MAX: u64 = 1 << 20;

/// The engines that a run's options name, in a list, and in the file or by the name's addresses as they are now.
pub(super) fn named(runtime: &Runtime, options: &TrainOptions) -> Result<Vec<Engine>> {
    let listed = options.rollout_external_engine_addrs.iter();
    let mut engines: Vec<_> = listed.map(|address| Engine { address: address.clone(), keys: true }).collect();
    let listed = urls(&engines)?;
    let mut put = |more: Vec<Engine>| -> Result<()> {
        for engine in more {
            if !listed.contains(&url_of(&engine.address)?) {
                engines.push(engine);
            }
        }
        Ok(())
    };
    if let Some(name) = &options.rollout_external_engines_dns {
        put(Name::parse(name)?.engines(runtime)?)?;
    }
    let Some(path) = &options.rollout_external_engines_file else { return Ok(engines) };
    let text = read(path).map_err(io_error("read", path))?;
    let bad = |why| input("rollout_external_engines_file", "a list of engines", describe(path, why));
    let filed = parse(&text).map_err(bad)?;
    let keyed: Vec<_> =
        filed.iter().filter(|engine| engine.keys).map(|engine| engine.address.clone()).collect();
    let bare = options.keys.in_clear(&keyed)?;
    if !bare.is_empty() {
        tracing::warn!(
            "`keys` go in clear text to {}: give https://… in `rollout_external_engines_file`",
            bare.join(", ")
        );
    }
    put(filed)?;
    Ok(engines)
}

fn describe(path: &Path, why: String) -> String {
    format!("{}: {why}", path.display())
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    regular::open(path)?.take(BYTES_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > BYTES_MAX {
        return Err(io::Error::other(format!("a list of engines has at most {BYTES_MAX} bytes")));
    }
    Ok(text)
}

/// The engines of a file's text, or why it is no list of them.
fn parse(text: &str) -> Result<Vec<Engine>, String> {
    if !text.is_empty() && !text.ends_with('\n') {
        return Err("its last line has no end: it may be half-written".to_owned());
    }
    let (mut engines, mut seen) = (Vec::new(), BTreeSet::new());
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default();
        let words: Vec<&str> = line.split_whitespace().collect();
        let (address, keys) = match words[..] {
            [] => continue,
            [address] => (address, false),
            [address, "with-keys"] => (address, true),
            _ => return Err(format!("line {number} is no address, nor one with `with-keys` behind it")),
        };
        let url = url_of(address).map_err(|error| format!("line {number}: {error}"))?;
        if !seen.insert(url) {
            return Err(format!("line {number} names an engine again"));
        }
        engines.push(Engine { address: address.to_owned(), keys });
    }
    if engines.is_empty() { Err("it names no engine".to_owned()) } else { Ok(engines) }
}

fn urls(engines: &[Engine]) -> Result<BTreeSet<String>> {
    engines.iter().map(|engine| url_of(&engine.address)).collect()
}

/// By what a file is known to be another than before; `None` of one that is not there.
type Stamp = Option<(SystemTime, u64, u64)>;

fn stamp(metadata: io::Result<Metadata>) -> Stamp {
    let metadata = metadata.ok()?;
    Some((metadata.modified().ok()?, metadata.len(), metadata.ino()))
}

/// What is known of the file, as a function over looks at it.
#[derive(Debug)]
struct Watch {
    /// URLs of engines that the options' list names: the file does not take these away.
    listed: BTreeSet<String>,
    /// The engines that it named last.
    engines: Vec<Engine>,
    /// As it was read.
    read: Option<Stamp>,
    /// What it became, and when that was first seen.
    became: Option<(Stamp, Instant)>,
}

/// What a file or a name has others do.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) added: Vec<Engine>,
    /// URLs.
    pub(super) removed: Vec<String>,
}

impl Watch {
    /// Whether it is to be read now: it is another than when it was read, and has been so for a while.
    fn is_due(&mut self, stamp: Stamp, now: Instant) -> bool {
        if self.read == Some(stamp) {
            self.became = None;
            return false;
        }
        let since = match self.became {
            Some((became, since)) if became == stamp => since,
            _ => now,
        };
        self.became = Some((stamp, since));
        let is_due = now.saturating_duration_since(since) >= LOOK_EVERY;
        if is_due {
            self.read = Some(stamp);
        }
        is_due
    }

    /// In what a text differs from the one before; one that is no list changes nothing.
    fn change(&mut self, text: &str) -> Result<Change, String> {
        let engines = parse(text)?;
        let of = |engines: &[Engine]| urls(engines).map_err(|error| error.to_string());
        let (before, now) = (of(&self.engines)?, of(&engines)?);
        let is_new = |engine: &&Engine| url_of(&engine.address).is_ok_and(|url| !before.contains(&url));
        let added = engines.iter().filter(is_new).cloned().collect();
        let removed = before.difference(&now).filter(|url| !self.listed.contains(*url)).cloned().collect();
        self.engines = engines;
        Ok(Change { added, removed })
    }
}

/// Watches the file or the name of a run, if it has one, and has `keeper` do what it says. It ends with what is returned.
/// `engines` are those that [`named`] has found.
pub(super) fn watch(
    runtime: &Runtime,
    options: &TrainOptions,
    engines: Vec<Engine>,
    keeper: Arc<Keeper>,
) -> Result<JoinSet<()>> {
    let mut task = JoinSet::new();
    let drains = options.generate_deadline;
    let (listed, others) = engines.split_at(options.rollout_external_engine_addrs.len());
    let listed = urls(listed)?;
    if let Some(name) = &options.rollout_external_engines_dns {
        let follow = Name::parse(name)?.follow(others.to_vec(), listed.clone(), keeper.clone(), drains);
        task.spawn_on(follow, runtime.handle());
    }
    if let Some(path) = options.rollout_external_engines_file.clone() {
        let watch = Watch { listed, engines, read: None, became: None };
        task.spawn_on(follow(path, watch, keeper, drains), runtime.handle());
    }
    Ok(task)
}

async fn follow(path: PathBuf, mut watch: Watch, keeper: Arc<Keeper>, drains: Duration) {
    let mut ticks = interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let stamp = stamp(tokio::task::block_in_place(|| std::fs::metadata(&path)));
        if !watch.is_due(stamp, Instant::now()) {
            continue;
        }
        let text = tokio::task::block_in_place(|| read(&path)).map_err(|error| error.to_string());
        match text.and_then(|text| watch.change(&text)) {
            Ok(change) => carry_out(change, &keeper, drains),
            Err(why) => tracing::warn!(why = describe(&path, why), "the engines stay as they are"),
        }
    }
}

pub(super) fn carry_out(change: Change, keeper: &Arc<Keeper>, drains: Duration) {
    for engine in change.added {
        let keeper = keeper.clone();
        // One that is still going holds up no other.
        tokio::spawn(async move {
            if let Err(error) = keeper.take_in(&engine).await {
                tracing::warn!(engine = engine.address, %error, "the engine of the file or name is not added");
            }
        });
    }
    for url in change.removed {
        let keeper = keeper.clone();
        // An engine that drains holds up no other.
        tokio::spawn(async move {
            if let Err(error) = keeper.let_go(&url, drains).await {
                tracing::warn!(engine = url, %error, "the engine that left the file or name is not drained");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(address: &str, keys: bool) -> Engine {
        Engine { address: address.to_owned(), keys }
    }

    #[test]
    fn parse_takes_addresses_comments_and_keys() {
        let text = "# the rack\n\n10.0.0.1:30000\n  vllm+https://b/x with-keys # new\n";
        let expected = [engine("10.0.0.1:30000", false), engine("vllm+https://b/x", true)];
        assert_eq!(parse(text).unwrap(), expected);
        for (text, why) in [
            ("", "no engine"),
            ("# none\n\n", "no engine"),
            ("a:1\nb:2", "half-written"),
            ("a:1\nb:2 keys\n", "line 2 is no address"),
            ("a:1\n\nftp://b\n", "line 3"),
            ("a:1\nvllm+http://a:1/\n", "line 2 names an engine again"),
        ] {
            let refused = parse(text).unwrap_err();
            assert!(refused.contains(why), "{text:?}: {refused}");
        }
    }

    #[test]
    fn file_is_read_once_it_stays_as_it_is() {
        let mut watch = Watch { listed: BTreeSet::new(), engines: Vec::new(), read: None, became: None };
        let (begin, of) = (Instant::now(), |bytes: u64| Some((SystemTime::UNIX_EPOCH, bytes, 1)));
        for (second, stamp, expected) in [
            (0, of(1), false),
            (1, of(1), true),
            (2, of(1), false),
            // It grows for a while.
            (3, of(2), false),
            (4, of(3), false),
            (5, of(3), true),
            // It goes, and comes back as it was.
            (6, None, false),
            (7, of(3), false),
            (8, None, false),
            (9, None, true),
            (10, None, false),
            (11, of(3), false),
            (12, of(3), true),
        ] {
            assert_eq!(watch.is_due(stamp, begin + second * LOOK_EVERY), expected, "at {second}");
        }
    }

    #[test]
    fn change_is_what_differs_and_a_bad_text_changes_nothing() {
        let engines = vec![engine("a:1", true), engine("b:1", false)];
        let listed = BTreeSet::from(["http://a:1".to_owned()]);
        let mut watch = Watch { listed, engines, read: None, became: None };
        assert_eq!(watch.change("b:1\n"), Ok(Change::default()), "the list names a");
        let change = watch.change("http://b:1\nc:1 with-keys\n").unwrap();
        assert_eq!(change, Change { added: vec![engine("c:1", true)], removed: Vec::new() });
        for text in ["", "c:1", "c:1\nno address\n"] {
            assert!(watch.change(text).is_err(), "{text:?}");
        }
        let change = watch.change("c:1\n").unwrap();
        assert_eq!(change, Change { added: Vec::new(), removed: vec!["http://b:1".to_owned()] });
    }
}
