//! The processes of the other ranks: started, asked at once, ended with this one.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use derive_setters::Setters;
use driftless_trainer::learner::{Child, ChildOptions};
use driftless_trainer::options::LearnOptions;
use driftless_trainer::{Error as LoopError, Result as LoopResult};

/// How a rank of its own process is started.
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct RankOptions {
    /// How many there are, this process included.
    pub ranks: usize,
    /// A line for the shell, of a program that calls [`crate::serve_rank`]; the rank's number, the path of a
    /// socket and that of the run's checkpoints are added to it.
    #[setters(into)]
    pub command: String,
    /// How long one call may take, the start, and each wait for another rank.
    pub deadline: Duration,
}

impl RankOptions {
    /// Half an hour for each call.
    #[must_use]
    pub fn new(ranks: usize, command: impl Into<String>) -> Self {
        RankOptions { ranks, command: command.into(), deadline: Duration::from_secs(1800) }
    }
}

/// Ranks 1 and up.
#[derive(Debug, Default)]
pub(crate) struct Others(Vec<Child>);

impl Others {
    /// Says how they are started; the first call to each does it.
    pub(crate) fn new(
        options: &RankOptions,
        socket: &Path,
        checkpoints: &Path,
        learn: &LearnOptions,
        temperature: f64,
    ) -> Others {
        let child = |rank: usize| {
            let paths = [socket, checkpoints].map(quoted);
            let command = format!("{} {rank} {} {}", options.command, paths[0], paths[1]);
            let child = ChildOptions::new(command, learn.clone()).with_temperature(temperature);
            Child::new(child.with_deadline(options.deadline))
        };
        Others((1..options.ranks).map(child).collect())
    }

    /// Asks each, by its rank, while this rank does its part. That is told whether the others are still at it.
    ///
    /// What another rank says of its failure comes before what this one has noticed of it.
    pub(crate) fn together<T>(
        &mut self,
        ask: impl Fn(usize, &mut Child) -> LoopResult<()> + Sync,
        own: impl FnOnce(&dyn Fn() -> bool) -> Result<T, Failed>,
    ) -> LoopResult<T> {
        let failed = Mutex::new(Vec::new());
        let failures = || failed.lock().unwrap_or_else(PoisonError::into_inner);
        std::thread::scope(|scope| {
            let (ask, failures) = (&ask, &failures);
            let asked: Vec<_> = self
                .0
                .iter_mut()
                .zip(1..)
                .map(|(child, rank)| {
                    scope.spawn(move || ask(rank, child).map_err(|error| failures().push(error)).is_ok())
                })
                .collect();
            let own = own(&|| failures().is_empty());
            for thread in asked {
                // All of them, before an error is told.
                let _ = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
            let mut theirs = std::mem::take(&mut *failures());
            // One that is gone took the others with it; else the first that failed did.
            let cause = theirs.iter().position(LoopError::is_learner_lost).unwrap_or(0);
            let theirs = (cause < theirs.len()).then(|| theirs.swap_remove(cause));
            match (own, theirs) {
                (Ok(own), None) => Ok(own),
                (Err(Failed::Here(error)), _) => Err(error),
                (_, Some(error)) | (Err(Failed::Elsewhere(error)), None) => Err(error),
            }
        })
    }
}

/// Why this rank did not do its part.
pub(crate) enum Failed {
    /// For a reason of its own.
    Here(LoopError),
    /// Another rank was not there.
    Elsewhere(LoopError),
}

/// A path as one word of a shell.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_one_word_of_a_shell() {
        for path in ["/a b/c", "/it's", "/$HOME/\"x\"", "/*"] {
            let line = format!("printf %s {}", quoted(path.as_ref()));
            let said = std::process::Command::new("sh").args(["-c", &line]).output().unwrap();
            assert_eq!(String::from_utf8(said.stdout).unwrap(), path);
        }
    }
}
