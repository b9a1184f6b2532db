//! What a fake engine is and has seen, and what it generates: a token that the test chose.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use driftless_bridge::engine::VersionSpan;
use driftless_bridge::sglang::{DiskUpdate, Load, checksums};
use driftless_server::{Checksums, Completion, Ended, Facts, Generator, Job, ServerState, Updated, Weights};
use driftless_transport::Checkpoint;
use serde_json::Value;

use super::{Fault, Memory, Receiver};

/// What the engine is and has seen.
#[derive(Debug)]
pub struct Engine {
    /// The directory that it was started with.
    pub started_with: PathBuf,
    /// The checkpoint whose weights it holds; `None` for a mixture.
    pub weights: Option<PathBuf>,
    /// The checkpoint of each label that means one.
    pub truths: BTreeMap<String, PathBuf>,
    /// Every time that it carried the label of other weights than it had.
    pub lies: Vec<String>,
    /// The checkpoint whose weights generate NaN.
    pub broken: Option<PathBuf>,
    /// The token that a generation has: each of these in turn, whatever is asked.
    pub tokens: Vec<i32>,
    /// Whole generations in place of these: each in turn, up to the token that stops it.
    pub turns: Vec<Vec<i32>>,
    /// Whether a generation has as many tokens as it is allowed, each the last digit of its place in prompt and answer.
    pub is_long: bool,
    /// After how many tokens such a generation stands still. A change shows behind the next call.
    pub stuck_after: Option<usize>,
    /// The place in prompt and answer at which such a generation has a token that no model has.
    pub bad_at: Option<usize>,
    /// Prompt lengths of what was asked for.
    pub asked: Vec<usize>,
    /// Generations that were begun.
    pub generated: usize,
    /// Path and body of every call that changes something.
    pub calls: Vec<(String, Value)>,
    /// Authorization headers seen, by path.
    pub keys: Vec<(String, Option<String>)>,
    /// Faults by `METHOD path`: the next calls of it meet them, one each.
    pub faults: BTreeMap<&'static str, VecDeque<Fault>>,
    /// Generations under way.
    pub generating: usize,
    /// Most that were under way at once.
    pub most_generating: usize,
    /// Its place in weight-update groups.
    pub pushes: Receiver,
    /// What it has given back.
    pub memory: Memory,
    pub(super) state: Arc<ServerState>,
}

impl Engine {
    pub(super) fn new(checkpoint: &Path) -> Self {
        let (load_format, weight_version) = ("auto".into(), "default".into());
        let launched = Weights { model_path: checkpoint.display().to_string(), load_format, weight_version };
        Self {
            started_with: checkpoint.into(),
            weights: Some(checkpoint.into()),
            truths: [("default".to_owned(), checkpoint.into())].into(),
            lies: Vec::new(),
            broken: None,
            tokens: vec![7],
            turns: Vec::new(),
            is_long: false,
            stuck_after: None,
            bad_at: None,
            asked: Vec::new(),
            generated: 0,
            calls: Vec::new(),
            keys: Vec::new(),
            faults: BTreeMap::new(),
            generating: 0,
            most_generating: 0,
            pushes: Receiver::default(),
            memory: Memory::default(),
            state: Arc::new(ServerState::new(Facts::new(launched, architecture_of(checkpoint)))),
        }
    }

    /// What a new process of it would be: with its first weights, not paused.
    pub(super) fn restart(&mut self) {
        self.pushes.restart();
        self.memory = Memory::default();
        self.weights = Some(self.started_with.clone());
        let mut facts = self.facts();
        facts.serving = facts.launched.clone();
        drop(facts);
        self.state.set_paused(false);
    }

    /// What it says of itself.
    pub fn facts(&self) -> MutexGuard<'_, Facts> {
        self.state.facts()
    }

    /// Its weight version.
    pub fn label(&self) -> String {
        self.facts().serving.weight_version.clone()
    }

    /// Changes its weight version, and nothing else.
    pub fn set_label(&self, label: impl Into<String>) {
        self.facts().serving.weight_version = label.into();
    }

    /// Whether it is paused.
    pub fn is_paused(&self) -> bool {
        self.state.is_paused()
    }

    /// Pauses it, or lets it go on, without a call.
    pub fn set_paused(&self, paused: bool) {
        self.state.set_paused(paused);
    }

    /// Whether its label tells the truth about its weights; one that means no checkpoint claims nothing.
    pub fn audit(&mut self) {
        let label = self.label();
        if self.truths.get(&label).is_some_and(|claimed| !self.holds(claimed)) {
            self.lies.push(format!("{label} over {:?} and what was pushed", self.weights));
        }
    }

    fn holds(&self, path: &Path) -> bool {
        match self.pushes.snapshot(&self.started_with) {
            None => self.weights.as_deref() == Some(path),
            Some(pushed) => {
                checksums(&pushed, &self.started_with).is_ok_and(|pushed| pushed == sums_of(path))
            }
        }
    }

    fn sums(&self) -> Checksums {
        let mut sums = match self.pushes.snapshot(&self.started_with) {
            Some(pushed) => checksums(&pushed, &self.started_with).unwrap(),
            None => sums_of(self.weights.as_ref().unwrap_or(&self.started_with)),
        };
        if self.weights.is_none() {
            sums.insert(WRONG.0.into(), WRONG.1.into());
        }
        sums
    }
}

fn architecture_of(checkpoint: &Path) -> String {
    let config = std::fs::read(checkpoint.join("config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    config["architectures"][0].as_str().unwrap().to_owned()
}

/// A checksum that no tensor has.
pub(super) const WRONG: (&str, &str) = ("model.norm.weight", "0000000000000000");

fn sums_of(path: &Path) -> Checksums {
    checksums(&Checkpoint::open(path).unwrap(), path).unwrap()
}

/// The log-probability of each token.
const LOG_PROB: f32 = -0.25;

/// Generates what the engine was told, at once, but for requests that are to stand still.
pub(super) struct Scripted {
    engine: Arc<Mutex<Engine>>,
    stuck: Vec<Job>,
}

impl Scripted {
    pub(super) fn new(engine: Arc<Mutex<Engine>>) -> Self {
        Self { engine, stuck: Vec::new() }
    }

    /// All tokens of a request.
    fn answer(&self, job: &Job) -> Vec<i64> {
        let (prompt, most) = (job.request.prompt.len(), job.request.sampling.max_new_tokens);
        let engine = self.engine();
        if !engine.turns.is_empty() {
            let turn = &engine.turns[(engine.generated - 1) % engine.turns.len()];
            return turn.iter().map(|token| (*token).into()).collect();
        }
        match engine.is_long {
            true => {
                let token = |place| if Some(place) == engine.bad_at { 1 << 30 } else { place as i64 % 10 };
                (prompt..prompt + most).map(token).collect()
            }
            false => vec![engine.tokens[(engine.generated - 1) % engine.tokens.len()].into()],
        }
    }

    /// Tells of tokens up to where requests are to stand still, or ends them.
    fn go_on(&mut self) {
        for mut job in std::mem::take(&mut self.stuck) {
            let answer = self.answer(&job);
            let stuck_after = self.engine().stuck_after.filter(|length| *length < answer.len());
            match stuck_after {
                None => {
                    let stop = answer.last().filter(|_| !self.engine().turns.is_empty());
                    self.end(job, &answer, stop.map_or(Ended::Length, |stop| Ended::Stop(*stop)));
                }
                Some(length) => {
                    if let Some(progress) = &mut job.progress {
                        progress.tell(&answer[..length], &vec![LOG_PROB; length]);
                    }
                    self.stuck.push(job);
                }
            }
        }
    }

    fn end(&self, job: Job, output_ids: &[i64], finish: Ended) {
        let engine = self.engine();
        let broken = engine.broken.is_some() && engine.broken == engine.weights;
        let end = output_ids.len() as u32;
        let outcome = Completion {
            rid: job.request.rid,
            finish,
            prompt_tokens: job.request.prompt.len(),
            output_ids: output_ids.to_vec(),
            log_probs: vec![if broken { f32::NAN } else { LOG_PROB }; output_ids.len()],
            prompt_log_probs: Vec::new(),
            spans: vec![VersionSpan { label: engine.label(), start: 0, end }],
            retractions: 0,
            max_new_tokens: job.request.sampling.max_new_tokens,
        };
        // A client that has gone is no error.
        let _ = job.reply.send(outcome);
    }

    fn engine(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().unwrap()
    }
}

impl Generator for Scripted {
    fn submit(&mut self, job: Job) {
        let mut engine = self.engine();
        engine.generated += 1;
        engine.asked.push(job.request.prompt.len());
        drop(engine);
        self.stuck.push(job);
        self.go_on();
    }

    /// Only behind a call.
    fn step(&mut self) -> bool {
        self.go_on();
        false
    }

    fn pause(&mut self, _retract: bool) {}

    fn resume(&mut self) {
        self.engine().memory.whole("it generates");
    }

    fn abort(&mut self, prefix: Option<&str>, _now: bool) {
        if prefix.is_none() {
            self.engine().memory.waiting = 0;
        }
        let is_meant = |job: &mut Job| prefix.is_none_or(|prefix| job.request.rid.starts_with(prefix));
        let aborted: Vec<Job> = self.stuck.extract_if(.., is_meant).collect();
        for job in aborted {
            let answer = self.answer(&job);
            let length = self.engine().stuck_after.unwrap_or_default();
            self.end(job, &answer[..length.min(answer.len())], Ended::Aborted);
        }
    }

    fn flush(&mut self) -> bool {
        true
    }

    fn load(&mut self, update: &DiskUpdate) -> Updated {
        self.engine().weights = Some(update.model_path.clone());
        Updated::Loaded
    }

    fn set_version(&mut self, _label: &str) {}

    fn session(&mut self, open: bool) -> bool {
        std::mem::replace(&mut self.engine().pushes.session, open) != open
    }

    fn checksums(&mut self) -> Result<Checksums, String> {
        Ok(self.engine().sums())
    }

    fn busy(&self) -> Load {
        let engine = self.engine();
        let num_running_reqs = engine.generating as u64;
        Load { num_running_reqs, num_waiting_reqs: engine.memory.waiting, num_used_tokens: 0 }
    }
}
