//! A run once more, without engines and store: its steps from its log and its ledger, compared with what it recorded.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;

use derive_setters::Setters;
use driftless_buffer::{Group, Position, Reader};
use driftless_store::ContentDigest;
use driftless_transport::manifest::Tables;
use serde::Serialize;

use super::record::{RunRecord, Start};
use super::session::{BASELINE, LOG};
use super::take::{self, Ages};
use super::weights::weights_digest;
use super::{learn, versions};
use crate::error::{Error, Result, input, io};
use crate::learner::{Learner, MODEL, Progress, Weights, Workspace};
pub use crate::ledger::Recipe;
use crate::ledger::{self, Learned};
use crate::metrics::{self, METRICS, StepMetrics, StepStats};

/// How far figures may be apart, by the larger: reading JSON may move their last digit.
const NEAR: f64 = 1e-12;

const OLDER: &str = "releases before wrote none: only runs that this one began can be replayed";
const ELSEWHERE: &str = "replay it with the same release and libtorch, on the same kind of machine; where several threads \
                         or a GPU add up in any order, only a run that was `deterministic` comes out the same";

/// What is replayed.
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct ReplayOptions {
    /// Directory of the run; it is only read.
    pub run: PathBuf,
    /// Where a directory is made for a training checkpoint, if a learner goes on with other options. It is left there.
    pub scratch: PathBuf,
    /// The version to end with; the newest that the run recorded, if `None`.
    pub to: Option<u64>,
    /// Where the checkpoint lies now that the run started from; where it lay then, if `None`.
    pub hf_checkpoint: Option<PathBuf>,
}

impl ReplayOptions {
    /// All steps of a run, from the checkpoint where it lay.
    #[must_use]
    pub fn new(run: impl Into<PathBuf>, scratch: impl Into<PathBuf>) -> Self {
        ReplayOptions { run: run.into(), scratch: scratch.into(), to: None, hf_checkpoint: None }
    }
}

/// A run that came out the same.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Replayed {
    /// Its version.
    pub version: u64,
    /// Digest of that version's weights.
    pub weights_digest: ContentDigest,
    /// Steps that led to it.
    pub steps: u64,
    /// Versions on the way whose digests were compared, this one included.
    pub versions: u64,
}

/// Does the steps of a run again, up to a version, and compares each with what the run recorded of it. `make` makes the
/// learner of a recipe, before anything is computed; `observer` is told of each step, and of how many there are.
///
/// # Errors
/// [`Error::NotReplayable`] where the run did not keep what this needs, [`Error::Differs`] with the first step that
/// comes out otherwise, [`Error::Input`] for a version that the run did not record, and what `make`, the learner and
/// the log answer.
pub fn replay(
    options: &ReplayOptions,
    make: impl Fn(&Recipe) -> Result<Box<dyn Learner>>,
    mut observer: impl FnMut(u64, u64),
) -> Result<Replayed> {
    let plan = Plan::of(options)?;
    let mut learners = plan.check(make)?;
    let of = plan.steps.len() as u64;
    let (mut current, mut versions) = (None, 0);
    for (step, Planned { learned, recipe, recorded }) in (0..).zip(&plan.steps) {
        let mut learner = match (current.take(), learners.pop_front_if(|(at, _)| *at == step)) {
            (Some(learner), None) => learner,
            (before, Some((_, after))) => plan.take_over(before, after, step)?,
            (None, None) => return Err(Error::Bug { what: "a step has no learner" }),
        };
        let groups = plan.groups(step, learned, recipe)?;
        let ages = plan.ages(step, &groups, recipe);
        let (learnt, not_finite) = learn::step(&mut *learner, step, &groups, &ages, &recipe.learn, None)?;
        if let Some((what, expected, found)) = difference(recorded, learnt.stats, not_finite.is_some()) {
            return Err(differs(step, of, what, expected, found, ELSEWHERE));
        }
        let published = recorded.publication.as_ref().and_then(|version| version.weights_digest);
        if let Some(expected) = published {
            let found = digest(&mut *learner, step + 1)?;
            if found != expected {
                return Err(differs(step, of, "digest of the weights", expected, found, ELSEWHERE));
            }
            versions += 1;
        }
        observer(step + 1, of);
        current = Some(learner);
    }
    Ok(Replayed { version: plan.version, weights_digest: plan.weights_digest, steps: of, versions })
}

/// What a run kept of the steps that lead to a version.
struct Plan {
    options: ReplayOptions,
    record: RunRecord,
    start: Start,
    version: u64,
    weights_digest: ContentDigest,
    log: Reader,
    /// The step of each version.
    made: BTreeMap<u64, u64>,
    steps: Vec<Planned>,
}

/// A step as the run did it.
struct Planned {
    learned: Learned,
    recipe: Arc<Recipe>,
    recorded: StepMetrics,
}

impl Plan {
    /// Reads what the run recorded.
    fn of(options: &ReplayOptions) -> Result<Plan> {
        let run = &options.run;
        let lacks = |what: &str, expected: &str| not_replayable(run, what, expected, "none", OLDER);
        let record = RunRecord::read(run)?;
        let record = record.ok_or_else(|| {
            let todo = "give the directory of its state, with its checkpoints and its log";
            not_replayable(run, "run.json", "the record of a run", "none", todo)
        })?;
        let start = record.start.clone();
        let start = start
            .ok_or_else(|| lacks("run.json", "`start`, which the loop writes as it publishes version 0"))?;
        let metrics = metrics::read(&run.join(METRICS))?;
        let (version, count, weights_digest) = target(&metrics, options.to)?.ok_or_else(|| {
            lacks(
                METRICS,
                "a version with the digest of its weights: a step, done and published by this release",
            )
        })?;
        let mut ledger = ledger::learned(run)?;
        let mut recorded: BTreeMap<u64, StepMetrics> =
            metrics.into_iter().map(|step| (step.rollout_id, step)).collect();
        let step = |step| {
            let learned = ledger.remove(&step);
            let recipe = learned.as_ref().and_then(|learned| learned.recipe.clone());
            let (Some(learned), Some(recipe)) = (learned, recipe) else {
                return Err(lacks(
                    &format!("step {step} in ledger.jsonl"),
                    "its samples and how it learned from them",
                ));
            };
            let recorded = recorded.remove(&step);
            let recorded =
                recorded.ok_or_else(|| lacks(&format!("step {step} in {METRICS}"), "its figures"))?;
            Ok(Planned { learned, recipe, recorded })
        };
        let steps = (0..count).map(step).collect::<Result<_>>()?;
        let (log, made, options) = (Reader::open(run.join(LOG))?, versions::read(run)?, options.clone());
        Ok(Plan { options, record, start, version, weights_digest, log, made, steps })
    }

    /// Refuses a log that is not as it was learned from, and makes the learners by the steps that they begin with.
    fn check(
        &self,
        make: impl Fn(&Recipe) -> Result<Box<dyn Learner>>,
    ) -> Result<VecDeque<(u64, Box<dyn Learner>)>> {
        let (mut learners, mut last) = (VecDeque::new(), None);
        for (step, Planned { learned, recipe, .. }) in (0..).zip(&self.steps) {
            if last.replace(recipe) != Some(recipe) {
                if recipe.learner.is_none() {
                    let (what, expected) =
                        (format!("learner of step {step} in ledger.jsonl"), "the one that is built in");
                    let todo = "what another program computes cannot be done again here";
                    return Err(not_replayable(
                        &self.options.run,
                        what,
                        expected,
                        "a process of its own",
                        todo,
                    ));
                }
                let mut recipe = Recipe::clone(recipe);
                // The run's critic stays as it is.
                recipe.learn.critic.critic_save = None;
                learners.push_back((step, make(&recipe)?));
            }
            self.check_samples(step, learned, recipe)?;
        }
        Ok(learners)
    }

    fn check_samples(&self, step: u64, learned: &Learned, recipe: &Recipe) -> Result<()> {
        let groups = self.groups(step, learned, recipe)?;
        let of = self.steps.len() as u64;
        let records: Vec<_> = groups.iter().flat_map(|group| &group.records).collect();
        let changed =
            "its log is not what it learned from: look at the sample, and bring the log back as it was";
        if records.len() != learned.samples.len() {
            return Err(differs(
                step,
                of,
                "samples in the log",
                learned.samples.len(),
                records.len(),
                changed,
            ));
        }
        let mut pairs = records.into_iter().zip(&learned.samples);
        match pairs.find(|(record, digest)| ledger::digest(record) != **digest) {
            None => Ok(()),
            Some((record, expected)) => {
                let (scalars, position) = (record.scalars(), record.position().0);
                let (sample, group) = (scalars.sample_id, scalars.group_id);
                let what = format!("sample {sample} of group {group}, at position {position} of the log");
                let found = format!("another one, {}", ledger::digest(record));
                Err(differs(step, of, what, format!("the one of digest {expected}"), found, changed))
            }
        }
    }

    fn groups(&self, step: u64, learned: &Learned, recipe: &Recipe) -> Result<Vec<Group>> {
        let groups = take::groups(&self.log, step, &learned.groups, recipe.n_samples_per_prompt);
        groups.map_err(|error| self.lacking(step, error))
    }

    /// Why the log has not all groups of a step.
    fn lacking(&self, step: u64, error: Error) -> Error {
        let (Error::IncompleteRollout { expected, found, .. }, Position(oldest)) =
            (&error, self.log.oldest())
        else {
            return error;
        };
        let what = format!("groups of step {step} in ledger.jsonl");
        let (found, todo) = match oldest {
            0 => (format!("{found} whole ones"), "verify the log: records of it are damaged or gone"),
            _ => (
                format!("{found}, as what lay before position {oldest} was trimmed"),
                "a run with a larger `rollout_log_bytes_max` keeps more",
            ),
        };
        let expected = format!("{expected} in the log");
        not_replayable(&self.options.run, what, expected, found, todo)
    }

    fn ages(&self, step: u64, groups: &[Group], recipe: &Recipe) -> Ages {
        Ages::of(groups, recipe.max_staleness, |version| {
            self.made.get(&version).map(|made| step.saturating_sub(*made))
        })
    }

    /// Has a learner go on from where the one `before` is at `step`; without one, from the checkpoint that the run
    /// started from, which has to be as it was.
    fn take_over(
        &self,
        before: Option<Box<dyn Learner>>,
        mut learner: Box<dyn Learner>,
        step: u64,
    ) -> Result<Box<dyn Learner>> {
        let is_first = before.is_none();
        if let Some(mut before) = before {
            let scratch = &self.options.scratch;
            std::fs::create_dir_all(scratch).map_err(io("create", scratch))?;
            before.save(&Progress { step, ..Progress::default() })?;
        }
        let loaded = learner.load(&self.place())?.map_or(0, |progress| progress.step);
        if loaded != step {
            return Err(input(
                "scratch",
                "an empty directory",
                format!("a training checkpoint of step {loaded}"),
            ));
        }
        if is_first {
            let (expected, found) = (self.start.weights_digest, digest(&mut *learner, 0)?);
            if expected != found {
                let what = format!("weights of {}", self.place().hf_checkpoint.display());
                let todo = "give the checkpoint that the run started from (`hf_checkpoint`)";
                return Err(not_replayable(&self.options.run, what, expected, found, todo));
            }
        }
        Ok(learner)
    }

    fn place(&self) -> Workspace {
        let ReplayOptions { run, scratch, hf_checkpoint, .. } = &self.options;
        Workspace {
            save: scratch.clone(),
            hf_checkpoint: hf_checkpoint.clone().unwrap_or_else(|| self.start.hf_checkpoint.clone()),
            log: run.join(LOG),
            store: String::new(),
            run: self.record.run.clone(),
            run_id: self.record.run_id.map_or_else(String::new, |id| id.to_string()),
            model: MODEL.to_owned(),
            baseline: scratch.join(BASELINE),
            keep: 1,
            anchor_every: None,
            anchor_share: None,
        }
    }
}

/// The version that is asked for, or the newest; how many steps led to it, and the digest of its weights. None, if the
/// run recorded no version.
fn target(metrics: &[StepMetrics], to: Option<u64>) -> Result<Option<(u64, u64, ContentDigest)>> {
    let published = metrics.iter().filter_map(|step| {
        let version = step.publication.as_ref()?;
        Some((version.version, step.rollout_id + 1, version.weights_digest?))
    });
    let versions: Vec<_> = published.collect();
    let (Some((first, ..)), Some((last, ..))) = (versions.first(), versions.last()) else { return Ok(None) };
    let to = to.unwrap_or(*last);
    match versions.iter().find(|(version, ..)| *version == to) {
        Some(found) => Ok(Some(*found)),
        None => Err(input("to", format!("a version that the run recorded, from {first} to {last}"), to)),
    }
}

/// The first figure of a step that differs: its name, what the run recorded, and what came now.
fn difference(recorded: &StepMetrics, stats: StepStats, skipped: bool) -> Option<(String, String, String)> {
    if recorded.skipped != skipped {
        let told = |skipped| if skipped { "a step that is not finite" } else { "a finite step" }.to_owned();
        return Some(("result".to_owned(), told(recorded.skipped), told(skipped)));
    }
    // A share of the time that the step took.
    let figures = |stats| serde_json::to_value(StepStats { mfu: 0.0, ..stats }).unwrap_or_default();
    let (then, now) = (figures(recorded.stats), figures(stats));
    let (then, now) = (then.as_object()?, now.as_object()?);
    let number = |value: Option<&serde_json::Value>| value.and_then(serde_json::Value::as_f64);
    let differing = then.iter().find(|(name, then)| match (number(Some(then)), number(now.get(*name))) {
        (Some(then), Some(now)) => (then - now).abs() > NEAR * then.abs().max(now.abs()),
        (then, now) => then != now,
    });
    let (name, then) = differing?;
    Some((name.clone(), then.to_string(), now.get(name).map_or_else(String::new, ToString::to_string)))
}

/// The digest of a learner's weights after `step`.
fn digest(learner: &mut dyn Learner, step: u64) -> Result<ContentDigest> {
    match learner.snapshot(step)? {
        Weights::Tensors(snapshot) => Ok(weights_digest(&Tables::of(&*snapshot)?.tensors)),
        Weights::Published(_) => Err(Error::Bug { what: "a replay publishes" }),
    }
}

fn not_replayable(
    run: &std::path::Path,
    what: impl ToString,
    expected: impl ToString,
    found: impl ToString,
    todo: &'static str,
) -> Error {
    let (what, expected, found) = (what.to_string(), expected.to_string(), found.to_string());
    Error::NotReplayable { path: run.to_owned(), what, expected, found, todo }
}

fn differs(
    step: u64,
    of: u64,
    what: impl ToString,
    expected: impl ToString,
    found: impl ToString,
    todo: &'static str,
) -> Error {
    let (what, expected, found) = (what.to_string(), expected.to_string(), found.to_string());
    Error::Differs { step, of, what, expected, found, todo }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::learner::{Batch, Stepped};
    use crate::ledger::Ledger;
    use crate::metrics::{MetricsFile, PublicationMetrics};
    use crate::options::LearnOptions;
    use driftless_buffer::{Identity, Log, Options, Sample, Scalars};
    use driftless_transport::{Dtype, Tensors};

    /// Its one weight grows by the learning rate for each token that is trained on. Step 1 is not finite.
    #[derive(Default)]
    struct Counter {
        rate: f64,
        weight: f32,
        saved: PathBuf,
    }

    impl Learner for Counter {
        fn describe(&self) -> String {
            "counter".to_owned()
        }

        fn load(&mut self, place: &Workspace) -> Result<Option<Progress>> {
            self.saved = place.save.join("weight");
            let Ok(text) = std::fs::read_to_string(&self.saved) else { return Ok(None) };
            let (step, weight) = serde_json::from_str(&text).unwrap();
            self.weight = weight;
            Ok(Some(Progress { step, ..Progress::default() }))
        }

        fn log_probs(&mut self, _: &Batch<'_>) -> Result<Vec<Vec<f32>>> {
            Ok(Vec::new())
        }

        fn step(&mut self, batch: &Batch<'_>) -> Result<Stepped> {
            if batch.rollout_id == 1 {
                return Ok(Stepped::NotFinite("loss".to_owned()));
            }
            let trained: usize = batch.samples.iter().map(crate::learner::Sample::trained).sum();
            self.weight += self.rate as f32 * trained as f32;
            Ok(Stepped::Done(StepStats { loss: self.weight.into(), mfu: 0.5, ..StepStats::default() }))
        }

        fn snapshot(&mut self, _: u64) -> Result<Weights> {
            Ok(Weights::Tensors(Box::new(weights(self.weight))))
        }

        fn save(&mut self, progress: &Progress) -> Result<()> {
            let text = serde_json::to_string(&(progress.step, self.weight)).unwrap();
            std::fs::write(&self.saved, text).unwrap();
            Ok(())
        }

        fn save_hf(&mut self, _: &std::path::Path) -> Result<()> {
            Ok(())
        }
    }

    fn weights(weight: f32) -> Tensors<'static> {
        Tensors::new().tensor("weight", Dtype::F32, [1], weight.to_le_bytes().to_vec()).unwrap()
    }

    fn digest_of(weight: f32) -> ContentDigest {
        weights_digest(&Tables::of(&weights(weight)).unwrap().tensors)
    }

    /// A run of as many steps as losses, one sample of two tokens each, with other options from step 2 on. A version
    /// follows each step.
    fn run(losses: &[f64], mode: Option<u64>) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let start = Start { hf_checkpoint: "hf".into(), weights_digest: digest_of(0.0) };
        RunRecord { run: "r".into(), start: Some(start), ..RunRecord::default() }.write(dir.path()).unwrap();
        let identity = Identity { run_id: [1; 16], model: MODEL.into(), tokenizer_digest: [0; 32] };
        let log = Log::open(dir.path().join(LOG), Options::new(identity)).unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        let mut metrics = MetricsFile::open(&dir.path().join(METRICS), 0).unwrap();
        for (step, loss) in (0..).zip(losses) {
            let span = |start, version| driftless_buffer::VersionSpan { start, end: start + 1, version };
            let sample = Sample {
                scalars: Scalars { sample_id: step, group_id: step, ..Scalars::default() },
                prompt_len: 1,
                tokens: &[1, 2, 3],
                log_probs: &[-1.0; 2],
                loss_mask: &[1; 2],
                spans: &[span(0, 0), span(1, step)],
                ..Sample::default()
            };
            log.append(&sample).unwrap().wait().unwrap();
            let record = log.reader().get(Position(step)).unwrap().unwrap();
            let recipe = Recipe {
                learn: LearnOptions::default().with_lr(if step < 2 { 1.0 } else { 4.0 }),
                temperature: 1.0,
                n_samples_per_prompt: 1,
                max_staleness: mode,
                learner: Some("counter".into()),
            };
            ledger.note(step, &[step], vec![ledger::digest(&record)], recipe).unwrap();
            let publication = PublicationMetrics {
                version: step + 1,
                weights_digest: Some(digest_of(*loss as f32)),
                ..PublicationMetrics::default()
            };
            let (skipped, publication) = (step == 1, Some(publication));
            let stats = StepStats { loss: if skipped { 0.0 } else { *loss }, ..StepStats::default() };
            let step =
                StepMetrics { rollout_id: step, skipped, stats, publication, ..StepMetrics::default() };
            metrics.append(&step).unwrap();
        }
        let versions = (0..4).map(|version| format!("{{\"version\":{version},\"step\":{version}}}\n"));
        std::fs::write(dir.path().join("versions.jsonl"), versions.collect::<String>()).unwrap();
        dir
    }

    fn replayed(dir: &std::path::Path, to: Option<u64>) -> Result<(Replayed, Vec<(u64, u64)>)> {
        let (scratch, mut told) = (tempfile::tempdir().unwrap(), Vec::new());
        let make = |recipe: &Recipe| -> Result<Box<dyn Learner>> {
            Ok(Box::new(Counter { rate: recipe.learn.lr, ..Counter::default() }))
        };
        let options = ReplayOptions::new(dir, scratch.path().join("scratch")).with_to(to);
        replay(&options, make, |step, of| told.push((step, of))).map(|replayed| (replayed, told))
    }

    #[test]
    fn replay_skips_what_was_skipped_and_takes_other_options_over() {
        let dir = run(&[2.0, 2.0, 10.0, 18.0], None);
        let (replayed_all, told) = replayed(dir.path(), None).unwrap();
        let expected = Replayed { version: 4, weights_digest: digest_of(18.0), steps: 4, versions: 4 };
        assert_eq!((replayed_all, told), (expected, vec![(1, 4), (2, 4), (3, 4), (4, 4)]));
        assert_eq!(replayed(dir.path(), Some(2)).unwrap().0.weights_digest, digest_of(2.0));
        // Of step 3 the first token is of version 0, and too old.
        let dir = run(&[2.0, 2.0, 10.0, 14.0], Some(2));
        assert_eq!(replayed(dir.path(), None).unwrap().0.weights_digest, digest_of(14.0));
    }

    #[test]
    fn step_that_differs_first_is_named() {
        let differing = |losses: &[f64]| match replayed(run(losses, None).path(), None) {
            Err(Error::Differs { step, what, expected, found, .. }) => (step, what, expected, found),
            other => panic!("{other:?}"),
        };
        let figure = differing(&[2.0, 2.0, 10.0, 18.5]);
        assert_eq!(figure, (3, "loss".to_owned(), "18.5".to_owned(), "18.0".to_owned()));
        let (step, what, ..) = differing(&[2.0, 3.0, 10.0, 18.5]);
        assert_eq!((step, what.as_str()), (1, "digest of the weights"));
    }

    #[test]
    fn what_a_run_did_not_keep_is_named() {
        let refused = |file: &str, old: &str, new: &str| {
            let dir = run(&[2.0, 2.0, 10.0], None);
            let path = dir.path().join(file);
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.contains(old), "{text}");
            std::fs::write(&path, text.replace(old, new)).unwrap();
            replayed(dir.path(), None).unwrap_err().to_string()
        };
        for (file, old, new, words) in [
            ("run.json", "start", "then", "run.json: expected `start`"),
            (
                METRICS,
                "weights_digest",
                "then",
                "metrics.jsonl: expected a version with the digest of its weights",
            ),
            (METRICS, "\"rollout_id\":1", "\"rollout_id\":9", "step 1 in metrics.jsonl"),
            ("ledger.jsonl", "\"samples\"", "\"then\"", "step 0 in ledger.jsonl"),
            (
                "ledger.jsonl",
                "\"learner\":\"counter\"",
                "\"learner\":null",
                "learner of step 0 in ledger.jsonl",
            ),
            (
                "ledger.jsonl",
                "\"groups\":[2]",
                "\"groups\":[7]",
                "groups of step 2 in ledger.jsonl: expected 1 in the log, found 0",
            ),
        ] {
            let refused = refused(file, old, new);
            assert!(refused.contains("cannot be replayed") && refused.contains(words), "{refused}");
        }
        let dir = run(&[2.0], None);
        let refused = |to| replayed(dir.path(), Some(to)).unwrap_err().to_string();
        assert_eq!(refused(7), "to: expected a version that the run recorded, from 1 to 1, found 7");
        std::fs::remove_file(dir.path().join("run.json")).unwrap();
        assert!(refused(1).contains("run.json: expected the record of a run"));
    }
}
