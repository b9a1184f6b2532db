//! A child process that trains: any program, over one socket.

use std::path::{Path, PathBuf};
use std::time::Duration;

use derive_setters::Setters;

use super::process::{Lost, Process};
use super::wire::{self, Call, Hello, PROTOCOL, Reply, samples};
use super::{Batch, Learner, Progress, Stepped, Weights, Workspace};
use crate::error::{Error, Result, cut};
use crate::options::LearnOptions;

/// Most of a learner's words that a message repeats, in letters.
const WORDS_MAX: usize = 1000;
/// The same of its name.
const NAME_MAX: usize = 64;

/// How a learner is run.
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct ChildOptions {
    /// A line for the shell.
    #[setters(into)]
    pub command: String,
    /// How long one call may take, and the start.
    pub deadline: Duration,
    /// What the optimiser and the loss are told.
    pub learn: LearnOptions,
    /// Temperature of the rollouts.
    pub temperature: f64,
    /// Seed of the run.
    pub seed: u64,
}

impl ChildOptions {
    /// Half an hour for each call; temperature 1 and seed 1.
    #[must_use]
    pub fn new(command: impl Into<String>, learn: LearnOptions) -> Self {
        let (command, deadline) = (command.into(), Duration::from_secs(1800));
        ChildOptions { command, deadline, learn, temperature: 1.0, seed: 1 }
    }
}

/// A process that trains. It is started by [`Learner::load`], and ends with this value.
#[derive(Debug)]
pub struct Child {
    options: ChildOptions,
    name: Option<String>,
    process: Option<Process>,
    /// Of the last step, until they are asked for.
    log_probs: Option<Vec<f32>>,
}

impl Child {
    /// Makes ready to run it.
    #[must_use]
    pub fn new(options: ChildOptions) -> Self {
        Child { options, name: None, process: None, log_probs: None }
    }

    /// One call and its reply. A process that ended, or did not answer in time, is gone afterwards.
    fn call(&mut self, call: Call) -> Result<Reply> {
        let (name, learner) = (call.name(), self.describe());
        let lost = |found: String| Error::LearnerLost { learner: learner.clone(), call: name, found };
        let Some(process) = &mut self.process else {
            return Err(lost("no running process".to_owned()));
        };
        let error = match process.ask(call, self.options.deadline) {
            Ok(Reply { error: Some(reason), .. }) => {
                return Err(Error::LearnerRefused { learner, call: name, reason: cut(&reason, WORDS_MAX) });
            }
            Ok(reply) => return Ok(reply),
            Err(Lost::Nonsense(found)) => self.wrong(name, "a reply of docs/wire/learner.md", found),
            Err(Lost::Gone(found)) => lost(found),
        };
        self.process = None;
        Err(error)
    }

    fn wrong(&self, call: &'static str, expected: &'static str, found: impl ToString) -> Error {
        Error::LearnerReply { learner: self.describe(), call, expected, found: found.to_string() }
    }
}

impl Learner for Child {
    fn describe(&self) -> String {
        let name = self.name.as_deref().unwrap_or(program(&self.options.command));
        match &self.process {
            Some(process) => format!("`{name}` (process {})", process.id()),
            None => format!("`{name}`"),
        }
    }

    fn publishes(&self) -> bool {
        true
    }

    fn load(&mut self, place: &Workspace) -> Result<Option<Progress>> {
        // The one before has ended when this is done.
        self.process = None;
        let command = self.options.command.as_str();
        let workspace = Workspace {
            save: absolute(&place.save.join("learner"))?,
            hf_checkpoint: absolute(&place.hf_checkpoint)?,
            log: absolute(&place.log)?,
            baseline: absolute(&place.baseline)?,
            ..place.clone()
        };
        let (name, deadline) = (program(command), self.options.deadline);
        self.process = Some(Process::start(command, name, &workspace.save, deadline)?);
        let reply = self.call(Call::Hello(Box::new(Hello::new(workspace, &self.options))))?;
        if reply.protocol != Some(PROTOCOL) {
            let found = reply.protocol.map_or("none".to_owned(), |found| found.to_string());
            return Err(self.wrong("hello", "protocol 3", found));
        }
        self.name = reply.name.map(|name| cut(&name, NAME_MAX)).or(self.name.take());
        tracing::info!(learner = self.describe(), step = reply.progress.as_ref().map(|p| p.step), "loaded");
        Ok(reply.progress)
    }

    fn log_probs(&mut self, batch: &Batch<'_>) -> Result<Vec<Vec<f32>>> {
        let call = Call::LogProbs { rollout_id: batch.rollout_id, samples: samples(batch) };
        let expected = "log_probs: as many finite numbers for each sample as its response has tokens";
        let found = self.call(call)?.log_probs.ok_or_else(|| self.wrong("log_probs", expected, "none"))?;
        if found.len() != batch.samples.len() {
            return Err(self.wrong("log_probs", expected, format!("{} samples", found.len())));
        }
        let fits = |(values, sample): (&Vec<f32>, &super::Sample<'_>)| {
            values.len() == sample.response_len() && values.iter().all(|value| value.is_finite())
        };
        match found.iter().zip(&batch.samples).position(|pair| !fits(pair)) {
            None => Ok(found),
            Some(index) => Err(self.wrong("log_probs", expected, format!("other ones for sample {index}"))),
        }
    }

    fn step(&mut self, batch: &Batch<'_>) -> Result<Stepped> {
        self.log_probs = None;
        let (rollout_id, samples) = (batch.rollout_id, samples(batch));
        let reply = self.call(Call::Step { rollout_id, samples, trained_log_probs: true })?;
        if let (Some(text), None) = (&reply.trained_log_probs, &reply.not_finite) {
            let expected = "trained_log_probs: base64 of a 32-bit float for each response token, NaN where it is not trained on";
            let found =
                wire::decode(text, batch).ok_or_else(|| self.wrong("step", expected, "other ones"))?;
            self.log_probs = Some(found);
        }
        match (reply.stats, reply.not_finite) {
            (_, Some(what)) => Ok(Stepped::NotFinite(cut(&what, WORDS_MAX))),
            (Some(stats), None) => Ok(Stepped::Done(stats)),
            (None, None) => Err(self.wrong("step", "stats or not_finite", "neither")),
        }
    }

    fn take_log_probs(&mut self) -> Option<Vec<f32>> {
        self.log_probs.take()
    }

    fn snapshot(&mut self, step: u64) -> Result<Weights> {
        let version = self.call(Call::Publish { step })?.version;
        version.map(Weights::Published).ok_or_else(|| self.wrong("publish", "a version", "none"))
    }

    fn save(&mut self, progress: &Progress) -> Result<()> {
        self.call(Call::Save { progress: Box::new(progress.clone()) }).map(drop)
    }

    fn save_hf(&mut self, dir: &Path) -> Result<()> {
        let dir = absolute(dir)?;
        self.call(Call::SaveHf { dir }).map(drop)
    }
}

/// The child may work in another directory.
fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(crate::error::io("name", path))
}

/// The program that a line for the shell starts: its first word that is neither a variable nor `exec`. The rest may
/// hold secrets.
#[must_use]
pub fn program(command: &str) -> &str {
    let mut rest = command.trim_start();
    loop {
        let mut quote = None;
        let ends = |letter: char| {
            match quote {
                Some(open) if open == letter => quote = None,
                None if letter == '"' || letter == '\'' => quote = Some(letter),
                _ => {}
            }
            quote.is_none() && letter.is_whitespace()
        };
        let (word, behind) = rest.split_at(rest.find(ends).unwrap_or(rest.len()));
        let is_plain = word.chars().all(|letter| letter.is_alphanumeric() || "-_./+".contains(letter));
        match (word == "exec" || word.contains('='), is_plain && !word.is_empty()) {
            (true, _) if !behind.is_empty() => rest = behind.trim_start(),
            (false, true) => return word,
            _ => return "the command",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::program;

    #[test]
    fn program_of_a_command_says_no_variable() {
        for (command, expected) in [
            ("torchrun --nproc-per-node 8 learner.py", "torchrun"),
            ("  WANDB_API_KEY=secret TOKEN='a secret' exec /opt/bin/python -m x", "/opt/bin/python"),
            ("KEY=\"a b\" python", "python"),
            ("KEY=secret", "the command"),
            ("KEY='secret and no end", "the command"),
            ("$(cat secret) run", "the command"),
            ("", "the command"),
        ] {
            assert_eq!(program(command), expected, "{command}");
        }
    }
}
