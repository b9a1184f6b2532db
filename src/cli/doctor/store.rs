//! A store: whether it can be reached, what may be done there, and what time it is there.

use super::findings::{Finding, Group};
use super::place::{Place, room};
use super::{no_answer, within};
use crate::cli::shared::error::Error;
use crate::cli::shared::output::without_secrets;
use driftless::store::probe::{probe_conditional_put, store_time};
use driftless::store::{Error as StoreError, Store, chain_text};
use driftless::transport::{Error as Transport, Run};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// What a store may take, its own tries included, for each thing that it is asked.
const DEADLINE: Duration = Duration::from_secs(30);

/// A difference of clocks below this is nothing: object stores date in whole seconds.
const SAME: Duration = Duration::from_secs(5);
/// Object stores refuse requests of a clock that is this wrong.
const REFUSED: Duration = Duration::from_secs(15 * 60);

/// What was found of a store.
#[derive(Debug)]
struct Facts {
    url: String,
    /// Of a store in a directory.
    directory: Option<Directory>,
    runs: Result<usize, Failure>,
    /// None where it was not asked.
    creates: Option<Result<(), Failure>>,
    clock: Option<Clock>,
}

/// The directory of a store.
#[derive(Debug)]
struct Directory {
    path: PathBuf,
    /// Whether something is there, which need not be a directory.
    there: bool,
    place: Option<Place>,
}

/// Why something failed, and what helps.
#[derive(Debug)]
struct Failure {
    why: String,
    hint: Option<String>,
    /// Whether the store answered, and said no.
    refused: bool,
}

/// How this host's clock stands to the store's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Clock {
    Ahead(Duration),
    Behind(Duration),
    /// The store dates nothing.
    Undated,
}

pub(super) fn look(store: Arc<dyn Store>) -> Vec<Finding> {
    judge(&read(&store))
}

fn read(store: &Arc<dyn Store>) -> Facts {
    let url = store.to_string();
    let directory = url.strip_prefix("file://").map(PathBuf::from).map(|path| {
        let looked = path.clone();
        let found = within(DEADLINE, move || (looked.exists(), Place::of(&looked).ok()));
        // What does not answer is asked again, and then says so.
        let (there, place) = found.unwrap_or((true, None));
        Directory { path, there, place }
    });
    let mut facts = Facts { url, directory, runs: Ok(0), creates: None, clock: None };
    // A probe would make the directory.
    if matches!(&facts.directory, Some(Directory { there: false, .. })) {
        return facts;
    }
    facts.runs = asked(store, |store| Ok(Run::names(store)?.len()));
    if facts.runs.is_ok() {
        let creates = asked(store, |store| Ok(probe_conditional_put(store)?));
        facts.clock = if creates.is_ok() { asked(store, clock).ok() } else { None };
        facts.creates = Some(creates);
    }
    facts
}

/// What the store says to a call.
fn asked<T: Send + 'static>(
    store: &Arc<dyn Store>,
    ask: fn(&dyn Store) -> Result<T, Transport>,
) -> Result<T, Failure> {
    let (store, url) = (store.clone(), store.to_string());
    let told = within(DEADLINE, move || ask(&*store).map_err(Failure::of));
    told.unwrap_or_else(|| Err(Failure { why: no_answer(DEADLINE, &url), hint: None, refused: false }))
}

impl Failure {
    fn of(error: Transport) -> Failure {
        let refused = matches!(error, Transport::Store(StoreError::Refused { .. }));
        let error = Error::from(error);
        Failure { why: without_secrets(&chain_text(&error)), hint: error.hint(), refused }
    }
}

fn clock(store: &dyn Store) -> Result<Clock, Transport> {
    let before = SystemTime::now();
    let there = store_time(store)?;
    Ok(there.map_or(Clock::Undated, |there| Clock::of(before, there, SystemTime::now())))
}

impl Clock {
    /// By a date that the store gave between two looks at this host's clock.
    fn of(before: SystemTime, there: SystemTime, after: SystemTime) -> Clock {
        match before.duration_since(there) {
            Ok(ahead) => Clock::Ahead(ahead),
            Err(_) => Clock::Behind(there.duration_since(after).unwrap_or_default()),
        }
    }
}

fn judge(facts: &Facts) -> Vec<Finding> {
    let group = Group("store");
    let reach = match (&facts.directory, &facts.runs) {
        (Some(Directory { path, there: false, .. }), _) => {
            return vec![group.note(
                "reach",
                format!("{}: no such directory yet, so nothing was tried", path.display()),
                format!(
                    "if the path is right: mkdir -p {}, and look again; `publish` makes it too",
                    path.display()
                ),
            )];
        }
        (_, Ok(runs)) => group.ok("reach", format!("{}, runs: {runs}", facts.url)),
        (_, Err(failure)) => {
            let usual =
                "look at URL, endpoint, region and credentials: \"Choose a store\" in docs/operations.md";
            group.problem("reach", &failure.why, failure.hint.as_deref().unwrap_or(usual))
        }
    };
    let creates = facts.creates.as_ref().map(|creates| match creates {
        Ok(()) => group.ok("creates", "an object is made and removed, and create-if-absent is honoured"),
        Err(failure) if failure.refused => group.note(
            "creates",
            format!("{}; it may only read there, and create-if-absent was not tried", failure.why),
            "a publisher needs to list, read, write and delete, a follower to write its lease: \"Grant access\" in \
             docs/operations.md",
        ),
        Err(failure) => group.problem(
            "creates",
            &failure.why,
            failure.hint.as_deref().unwrap_or("see \"Choose a store\" in docs/operations.md"),
        ),
    });
    let clock = facts.clock.map(|clock| judge_clock(clock, group));
    let place = facts.directory.as_ref().and_then(|directory| {
        let place = directory.place.as_ref()?;
        Some(judge_place(&directory.path, place, group))
    });
    std::iter::once(reach).chain(creates).chain(clock).chain(place).collect()
}

fn judge_clock(clock: Clock, group: Group) -> Finding {
    let (by, way) = match clock {
        Clock::Undated => return group.ok("clock", "the store dates nothing, so leases do not run out"),
        Clock::Ahead(by) => (by, "ahead of"),
        Clock::Behind(by) => (by, "behind"),
    };
    let found = format!("this host's clock is {} s {way} the store's", by.as_secs());
    let advice = "have chrony or systemd-timesyncd set this host's clock, and the store's if it is yours";
    match by {
        by if by < SAME => group.ok("clock", "as the store's"),
        by if by < REFUSED => {
            group.note("clock", format!("{found}; ages in `status` are off by that"), advice)
        }
        _ => {
            group.problem("clock", format!("{found}; object stores refuse requests of such a clock"), advice)
        }
    }
}

/// The file system of a store in a directory.
fn judge_place(path: &Path, place: &Place, group: Group) -> Finding {
    let found = format!("{}: {}", path.display(), room(place));
    match place {
        place if place.free == 0 => group.problem(
            "room",
            format!("{found}: full"),
            "`driftless gc` removes versions that no follower needs",
        ),
        place if place.is_remote() => group.ok("room", format!("{found}, shared by hosts")),
        _ => group.ok("room", format!("{found}; only this host has it, unless it is exported")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::findings::State;
    use super::*;

    fn facts() -> Facts {
        let (url, clock) = ("s3://b".to_owned(), Some(Clock::Undated));
        Facts { url, directory: None, runs: Ok(2), creates: Some(Ok(())), clock }
    }

    fn failure(refused: bool, hint: Option<&str>) -> Failure {
        Failure { why: "no".into(), hint: hint.map(str::to_owned), refused }
    }

    fn states(facts: &Facts) -> Vec<State> {
        let findings = judge(facts);
        let advised = |finding: &Finding| finding.advice.is_some() == (finding.state != State::Ok);
        assert!(findings.iter().all(advised), "{findings:?}");
        findings.iter().map(|finding| finding.state).collect()
    }

    #[test]
    fn store_that_may_only_be_read_is_no_problem() {
        use State::{Note, Ok as Good, Problem};
        assert_eq!(states(&facts()), [Good, Good, Good]);
        let reads = Facts { creates: Some(Err(failure(true, None))), clock: None, ..facts() };
        assert_eq!(states(&reads), [Good, Note]);
        let overwrites = Facts { creates: Some(Err(failure(false, None))), clock: None, ..facts() };
        assert_eq!(states(&overwrites), [Good, Problem]);
        let hint = Some("set the key");
        let away = Facts { runs: Err(failure(false, hint)), creates: None, clock: None, ..facts() };
        let findings = judge(&away);
        assert_eq!((findings.len(), findings[0].advice.as_deref()), (1, hint));
    }

    #[test]
    fn directory_that_is_not_there_is_neither_made_nor_tried() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("absent");
        let store = driftless::store::open(path.to_str().expect("text")).expect("a store");
        let findings = look(store);
        assert!(!path.exists());
        assert_eq!((findings.len(), findings[0].state), (1, State::Note));
        std::fs::create_dir(&path).expect("a directory");
        let store = driftless::store::open(path.to_str().expect("text")).expect("a store");
        let findings = look(store);
        assert_eq!(findings.len(), 4, "{findings:?}");
        assert!(findings.iter().all(|finding| finding.state == State::Ok), "{findings:?}");
    }

    #[test]
    fn clocks_are_compared_around_the_call() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let of = |there| Clock::of(at(100), at(there), at(110));
        assert_eq!(of(90), Clock::Ahead(Duration::from_secs(10)));
        assert_eq!(
            [of(100), of(105), of(110)],
            [Clock::Ahead(Duration::ZERO), Clock::Behind(Duration::ZERO), Clock::Behind(Duration::ZERO)]
        );
        assert_eq!(of(120), Clock::Behind(Duration::from_secs(10)));
        let state = |clock| judge_clock(clock, Group("store")).state;
        assert_eq!(state(Clock::Ahead(Duration::from_secs(4))), State::Ok);
        assert_eq!(state(Clock::Behind(Duration::from_secs(60))), State::Note);
        assert_eq!(state(Clock::Ahead(Duration::from_secs(901))), State::Problem);
    }
}
