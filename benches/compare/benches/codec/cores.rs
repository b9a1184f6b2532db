//! Two processors that are two cores: what the system counts as processors may be threads of one.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Two processors, the first of which is on its own where one will do.
#[derive(Debug)]
pub(crate) struct Cores {
    pub(crate) cpus: [usize; 2],
    /// What is known of them.
    pub(crate) what: String,
}

impl Cores {
    /// The first two of those that this process may use which the kernel does not name as threads of one
    /// core.
    pub(crate) fn two() -> Result<Cores, String> {
        let allowed = allowed()?;
        let siblings = |cpu: usize| {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            std::fs::read_to_string(path).ok()
        };
        pick(&allowed, siblings)
    }

    /// Keeps the calling thread on one of the two.
    pub(crate) fn pin(cpu: usize) -> Result<(), String> {
        set(&[cpu])
    }

    /// Does `work` on the first of the two.
    pub(crate) fn on_first<T>(&self, work: impl FnOnce() -> T) -> Result<T, String> {
        let before = allowed()?;
        set(&self.cpus[..1])?;
        let done = work();
        set(&before)?;
        Ok(done)
    }
}

fn pick(allowed: &[usize], siblings: impl Fn(usize) -> Option<String>) -> Result<Cores, String> {
    let [first, rest @ ..] = allowed else { return Err("no processor to run on".to_owned()) };
    let Some(list) = siblings(*first) else {
        let Some(second) = rest.first() else { return Err("one processor only".to_owned()) };
        let what = "the kernel does not say which processors share a core; these may".to_owned();
        return Ok(Cores { cpus: [*first, *second], what });
    };
    let own = parse(&list);
    let Some(second) = rest.iter().find(|cpu| !own.contains(cpu)) else {
        return Err(format!("one core only: processors {allowed:?} share it"));
    };
    let others = siblings(*second).unwrap_or_default();
    let what = format!("threads of their cores: {} and {}", list.trim(), others.trim());
    Ok(Cores { cpus: [*first, *second], what })
}

/// The numbers in a list of the kernel's, as `0,8` or `0-1`.
fn parse(list: &str) -> Vec<usize> {
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

fn allowed() -> Result<Vec<usize>, String> {
    let set = sched_getaffinity(None).map_err(|error| format!("sched_getaffinity: {error}"))?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

fn set(cpus: &[usize]) -> Result<(), String> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    sched_setaffinity(None, &set).map_err(|error| format!("sched_setaffinity: {error}"))
}
