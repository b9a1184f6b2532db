//! The host: processors, shared memory, huge pages.

use super::findings::{Finding, Group};
use super::place::{Place, room};
use std::path::Path;

const SHARED_MEMORY: &str = "/dev/shm";
const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Shared memory below this is what a container gets that asked for none.
const SMALL: u64 = 1 << 30;
/// Free shared memory in which nothing of a model finds room.
const FULL: u64 = 16 << 20;
/// Processors below which versions take long.
const FEW: usize = 4;

#[derive(Debug)]
struct Facts {
    processors: usize,
    shared_memory: Option<Place>,
    huge_pages: Option<String>,
}

pub(super) fn look() -> Vec<Finding> {
    judge(&Facts {
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        shared_memory: Place::of(Path::new(SHARED_MEMORY)).ok(),
        huge_pages: std::fs::read_to_string(HUGE_PAGES).ok(),
    })
}

fn judge(facts: &Facts) -> Vec<Finding> {
    let group = Group("machine");
    let processors = match facts.processors {
        few @ ..FEW => group.note(
            "processors",
            format!("{few}: versions are encoded and applied on all of them, and take longer on so few"),
            "give the container or the job more (--cpus, --cpus-per-task) where versions are large",
        ),
        many => group.ok("processors", many.to_string()),
    };
    vec![processors, shared_memory(facts.shared_memory.as_ref(), group), huge_pages(facts, group)]
}

fn shared_memory(place: Option<&Place>, group: Group) -> Finding {
    const NAME: &str = "/dev/shm";
    let larger = "docker run --ipc=host or --shm-size=…, in Kubernetes an emptyDir of medium Memory on /dev/shm; \
                  or keep --checkpoint-dir on a disk";
    match place {
        None => group.note(
            NAME,
            "none that can be read: engines cannot be patched or share a GPU's memory",
            larger,
        ),
        Some(place) if place.free < FULL => group.problem(
            NAME,
            format!("full: {}", room(place)),
            "remove what ended processes left there, or make it larger (mount -o remount,size=…)",
        ),
        Some(place) if place.total < SMALL => group.note(
            NAME,
            format!("small: {}; prepared deltas, NCCL and checkpoints in memory need more", room(place)),
            larger,
        ),
        Some(place) => group.ok(NAME, room(place)),
    }
}

/// Maps of checkpoints ask for huge pages, which a system may refuse.
fn huge_pages(facts: &Facts, group: Group) -> Finding {
    const NAME: &str = "huge pages";
    let chosen = facts.huge_pages.as_deref().and_then(chosen);
    match chosen {
        Some("never") => group.note(
            NAME,
            "never: maps of checkpoints are read in pages of 4 KiB, with more faults for each version",
            format!("as root: echo madvise > {HUGE_PAGES}"),
        ),
        Some(setting) => group.ok(NAME, format!("{setting}: maps of checkpoints get what they ask for")),
        None => group.ok(NAME, "this kernel does not say"),
    }
}

/// What is set, of a list such as `always [madvise] never`.
fn chosen(list: &str) -> Option<&str> {
    list.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

#[cfg(test)]
mod tests {
    use super::super::findings::State;
    use super::*;

    fn states(processors: usize, memory: Option<[u64; 2]>, huge_pages: Option<&str>) -> [State; 3] {
        let shared_memory = memory.map(|[total, free]| Place { total, free, kind: Some("tmpfs".into()) });
        let facts = Facts { processors, shared_memory, huge_pages: huge_pages.map(str::to_owned) };
        let findings = judge(&facts);
        let advised = |finding: &Finding| finding.advice.is_some() == (finding.state != State::Ok);
        assert!(findings.iter().all(advised), "{findings:?}");
        [0, 1, 2].map(|index| findings[index].state)
    }

    #[test]
    fn host_is_judged_by_its_room_and_settings() {
        use State::{Note, Ok, Problem};
        let large = Some([64 << 30, 60 << 30]);
        assert_eq!(states(16, large, Some("always [madvise] never\n")), [Ok, Ok, Ok]);
        assert_eq!(states(2, Some([64 << 20, 64 << 20]), Some("always madvise [never]")), [Note, Note, Note]);
        assert_eq!(states(4, Some([64 << 30, 1 << 20]), None), [Ok, Problem, Ok]);
        assert_eq!(states(4, None, Some("")), [Ok, Note, Ok]);
    }
}
