//! What the two halves of a run tell each other where each is a process of its own: `trainer.jsonl` and `rollouts.jsonl`
//! in the run's directory.
//!
//! Each half keeps one of the files: it alone appends, and reads the other's. What they share beyond that is the log, which
//! the rollouts own, and the ledger, which is the trainer's. A half that dies leaves its file, and goes on with it.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::TrainOptions;
use crate::error::{Error, Result, io};
use crate::failure::Failure;
use crate::goodput::Goodput;
use crate::ledger;
use crate::lines::{self, Lines, Tail};
use crate::metrics::StepMetrics;

/// What the trainer tells.
const TRAINER: &str = "trainer.jsonl";
/// What the rollouts tell.
const ROLLOUTS: &str = "rollouts.jsonl";
/// Time between two looks at the other half's file.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A line of the trainer: how far it is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Trained {
    /// Of the line, from 1 on.
    pub(super) number: u64,
    /// Optimiser steps that are done; fewer than in the line before where the trainer went back to its checkpoint.
    pub(super) steps: u64,
    /// Those of the newest training checkpoint.
    pub(super) saved: u64,
    /// The newest version, and the optimiser steps that it was made at; absent before version 0.
    pub(super) newest: Option<Newest>,
    /// Whether another version may be published from here on.
    pub(super) publishing: bool,
    /// Finished groups that are not learned from: all of their tokens are too old.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) too_old: Vec<u64>,
}

/// A version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Newest {
    pub(super) version: u64,
    pub(super) step: u64,
}

/// A line of the rollouts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Rolled {
    /// What the run is: the first line of a process.
    Begun(BTreeMap<String, String>),
    /// The trainer's lines up to this number count from here on.
    Seen(u64),
    /// What generation was like until a step took its groups.
    Generated(Box<Generated>),
}

/// The part of a step's metrics that the rollouts know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Generated {
    pub(super) step: u64,
    groups_failed: u64,
    groups_filtered: u64,
    answers_failed: BTreeMap<Failure, u64>,
    answers_made_again: u64,
    generate_ms: f64,
    rollout_wait_ms: f64,
    goodput: Option<Goodput>,
}

impl Generated {
    /// That of what is known of a step.
    pub(super) fn of(step: &StepMetrics) -> Self {
        Generated {
            step: step.rollout_id,
            groups_failed: step.groups_failed,
            groups_filtered: step.groups_filtered,
            answers_failed: step.answers_failed.clone(),
            answers_made_again: step.answers_made_again,
            generate_ms: step.generate_ms,
            rollout_wait_ms: step.rollout_wait_ms,
            goodput: step.goodput.clone(),
        }
    }

    fn add_to(self, step: StepMetrics) -> StepMetrics {
        StepMetrics {
            groups_failed: self.groups_failed,
            groups_filtered: self.groups_filtered,
            answers_failed: self.answers_failed,
            answers_made_again: self.answers_made_again,
            generate_ms: self.generate_ms,
            rollout_wait_ms: self.rollout_wait_ms,
            goodput: self.goodput,
            ..step
        }
    }
}

/// File systems over a network, by the magic numbers of `statfs(2)`.
const NETWORKS: [(u64, &str); 8] = [
    (0x6969, "NFS"),
    (0xFE53_4D42, "SMB"),
    (0xFF53_4D42, "CIFS"),
    (0x00C3_6400, "Ceph"),
    (0x0BD0_0BD0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x5346_414F, "AFS"),
];

/// The network file system of this magic number.
fn network(magic: u64) -> Option<&'static str> {
    NETWORKS.iter().find(|(known, _)| *known == magic).map(|(_, name)| *name)
}

/// A half's own file, kept for this process.
fn keep<T: DeserializeOwned>(save: &Path, name: &str) -> Result<lines::Opened<T>> {
    let files = rustix::fs::statfs(save).map_err(|error| io("look at", save)(error.into()))?;
    // 32 bits of it are the number, whatever the width of the field.
    if let Some(found) = network(files.f_type as u64 & 0xFFFF_FFFF) {
        return Err(Error::NetworkFiles { path: save.to_owned(), found });
    }
    let opened = Lines::open(save.join(name))?;
    match opened.lines.keep()? {
        true => Ok(opened),
        false => Err(Error::HalfRuns { path: save.join(name) }),
    }
}

/// The trainer's end.
#[derive(Debug)]
pub(super) struct ToRollouts {
    lines: Lines,
    last: Trained,
    /// Every group that was said to be too old.
    pub(super) too_old: Vec<u64>,
    rollouts: Tail,
    seen: u64,
    /// What both have to be told.
    settings: BTreeMap<String, String>,
    /// Whether rollouts have begun, now or earlier.
    begun: bool,
    /// Of steps that are not complete yet.
    generated: BTreeMap<u64, Generated>,
}

impl ToRollouts {
    /// Keeps the trainer's file.
    pub(super) fn open(options: &TrainOptions) -> Result<Self> {
        let save = &options.save;
        let lines::Opened { lines, said } = keep::<Trained>(save, TRAINER)?;
        let too_old = said.iter().flat_map(|line| &line.too_old).copied().collect();
        let last = said.last().cloned().unwrap_or_default();
        let rollouts = Tail::new(save.join(ROLLOUTS));
        let (settings, generated) = (options.of_both_halves(), BTreeMap::new());
        Ok(ToRollouts { lines, last, too_old, rollouts, seen: 0, settings, begun: false, generated })
    }

    /// Tells the rollouts what has changed.
    pub(super) fn tell(&mut self, change: impl FnOnce(&mut Trained)) -> Result<()> {
        let mut line = Trained { number: self.last.number + 1, too_old: Vec::new(), ..self.last.clone() };
        change(&mut line);
        self.too_old.extend(&line.too_old);
        self.lines.append(&line)?;
        self.last = line;
        Ok(())
    }

    fn look(&mut self) -> Result<()> {
        let mut begun = None;
        for line in self.rollouts.next()? {
            match line {
                Rolled::Begun(settings) => {
                    self.begun = true;
                    begun = Some(settings);
                }
                Rolled::Seen(number) => self.seen = number,
                Rolled::Generated(line) => {
                    self.generated.insert(line.step, *line);
                }
            }
        }
        // Those before were others' processes, or are told again.
        begun.map_or(Ok(()), |settings| self.check(&settings))
    }

    /// Refuses rollouts that were told something else.
    fn check(&self, begun: &BTreeMap<String, String>) -> Result<()> {
        let other = self.settings.iter().find(|(name, expected)| begun.get(*name) != Some(*expected));
        let Some((what, expected)) = other else { return Ok(()) };
        let (path, what, expected) = (self.rollouts.path().to_owned(), what.clone(), expected.clone());
        let found = begun.get(&what).cloned().unwrap_or_else(|| "unknown".to_owned());
        Err(Error::Resume { path, what, expected, found })
    }

    /// Whether a process generates.
    pub(super) fn is_up(&self) -> Result<bool> {
        self.rollouts.is_kept()
    }

    /// Whether rollouts have begun, and run.
    pub(super) fn have_begun(&mut self) -> Result<bool> {
        self.look()?;
        Ok(self.begun && self.is_up()?)
    }

    /// Waits until the rollouts, if they are up, have seen what they were told: no token counts as one of the newest version
    /// then that may be the next one's.
    ///
    /// # Errors
    /// [`Error::NoHalf`] after `deadline`.
    pub(super) fn wait_seen(&mut self, deadline: Duration) -> Result<()> {
        let begin = Instant::now();
        loop {
            self.look()?;
            if self.seen >= self.last.number || !self.is_up()? {
                return Ok(());
            }
            if begin.elapsed() >= deadline {
                return Err(self.gone(deadline));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Adds to a step what the rollouts know of it, as far as they have told.
    pub(super) fn complete(&mut self, step: StepMetrics) -> Result<StepMetrics> {
        self.look()?;
        let known = self.generated.remove(&step.rollout_id);
        self.generated.retain(|other, _| *other > step.rollout_id);
        Ok(known.map_or(step.clone(), |known| known.add_to(step)))
    }

    /// That the rollouts were waited for so long.
    pub(super) fn gone(&self, after: Duration) -> Error {
        Error::NoHalf { what: "rollouts", path: self.rollouts.path().to_owned(), after }
    }
}

/// The rollouts' end.
#[derive(Debug)]
pub(super) struct ToTrainer {
    lines: Lines,
    trainer: Tail,
    ledger: ledger::Tail,
    /// What it said last.
    pub(super) last: Trained,
}

/// What the trainer did since the last look.
#[derive(Debug, Default)]
pub(super) struct Did {
    /// The groups that each step took.
    pub(super) taken: BTreeMap<u64, Vec<u64>>,
    /// Its lines.
    pub(super) told: VecDeque<Trained>,
}

impl ToTrainer {
    /// Keeps the rollouts' file, and says in it what the run is.
    pub(super) fn open(options: &TrainOptions) -> Result<Self> {
        let save = &options.save;
        let mut lines = keep::<serde::de::IgnoredAny>(save, ROLLOUTS)?.lines;
        lines.append(&Rolled::Begun(options.of_both_halves()))?;
        let (trainer, ledger) = (Tail::new(save.join(TRAINER)), ledger::Tail::new(save));
        Ok(ToTrainer { lines, trainer, ledger, last: Trained::default() })
    }

    /// What the trainer did since the last call. A line of it counts with what its ledger has.
    pub(super) fn look(&mut self) -> Result<Did> {
        // First: the ledger is written before what is told of its step.
        let told: VecDeque<Trained> = self.trainer.next()?.into();
        let taken = self.ledger.next()?;
        if let Some(last) = told.back() {
            self.last.clone_from(last);
        }
        Ok(Did { taken, told })
    }

    /// Whether a process trains.
    pub(super) fn is_up(&self) -> Result<bool> {
        self.trainer.is_kept()
    }

    /// That the trainer was waited for so long.
    pub(super) fn gone(&self, after: Duration) -> Error {
        Error::NoHalf { what: "steps", path: self.trainer.path().to_owned(), after }
    }

    /// Tells the trainer something.
    pub(super) fn tell(&mut self, line: &Rolled) -> Result<()> {
        self.lines.append(line)
    }
}
