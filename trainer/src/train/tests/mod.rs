//! Runs in simulated time: the real schedule, executor, log and ledger among engines, rewards and a learner that a seed
//! decides about, in processes that are killed in the middle of whatever they do.
//!
//! A runtime of one thread advances its clock where all its tasks wait, so that a run is a function of its seed: the same
//! one twice makes the same trace. There are 125 runs, and 1,250 with `DRIFTLESS_LONG=1`; `DRIFTLESS_SIMULATE=SEED` has one,
//! `DRIFTLESS_SIMULATE=FIRST..LAST` others.

mod world;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use driftless_buffer::{Identity, Kind, Log, Options, PromptState, Reader, SyncPolicy};

use super::take::{self, Ages};
use crate::error::{Error, Result};
use crate::hook::{Filter, Filters};
use crate::ledger::{self, Ledger, Recipe};
use crate::options::{LearnOptions, Mode};
use crate::rollout::{self, Policy, PromptNote, Queue, RolloutOptions, Rollouts};
use crate::tasks::{Task, tiny};
use driftless_verify::verify;
use world::{Data, Fleet, World, Worth, draw, length, token, worth};

const RUN: [u8; 16] = [7; 16];
/// Steps between two checkpoints of the learner.
const SAVE: u64 = 3;
/// Processes of a run, the last of which is not killed.
const LIVES: u64 = 5;

/// A run, and what it has come to.
struct Run<'a> {
    dir: &'a Path,
    policy: Policy,
    answers: u64,
    world: Arc<World>,
    /// The learner's newest checkpoint.
    saved: u64,
    /// What each step learned from when it was done first, by its digests.
    learned: BTreeMap<u64, Vec<String>>,
}

/// What came of a run.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    answers: u64,
    lives: u64,
    trace: u64,
}

/// The run of a seed, with all that it is made from.
fn run(seed: u64) -> Told {
    let dir = Path::new("/dev/shm");
    let dir = if dir.is_dir() { tempfile::tempdir_in(dir) } else { tempfile::tempdir() }.unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), tiny::tokenizer().to_string()).unwrap();
    let pick = |what: &str, among: u64| draw(seed, what, 0) % among;
    let mode = match pick("mode", 5) {
        0 => Mode::Synchronous,
        1 => Mode::OneStepOff,
        _ => Mode::Bounded { max_staleness: 1 << pick("staleness", 3) },
    };
    let (batch, answers) = (4 + pick("batch", 13), 8 + pick("answers", 9));
    let mut policy = Policy::new(mode, batch, 60);
    policy.surplus = if pick("surplus", 2) == 0 { 0 } else { 1 + pick("beyond", batch) };
    policy.partial = pick("partial", 2) == 0;
    let places = (batch * answers) >> pick("places", 4);
    let world = World::new(seed, &RUN, places as usize);
    let mut run = Run { dir: dir.path(), policy, answers, world, saved: 0, learned: BTreeMap::new() };
    let mut lives = 0;
    loop {
        // A process does some things before it dies: most often in the middle, now and then at its begin.
        let most = 60 * batch * answers / LIVES;
        let left = match draw(seed, "dies", lives) % (most + 1) {
            _ if lives + 1 >= LIVES => u64::MAX,
            left if left % 7 == 0 => left % 50,
            left => left,
        };
        lives += 1;
        assert!(lives < 100, "seed {seed}: it does not come to its end");
        if run.live(left) {
            break;
        }
    }
    let answers = run.check();
    Told { answers, lives, trace: run.world.trace() }
}

impl Run<'_> {
    fn log(&self) -> Log {
        let identity = Identity { run_id: RUN, model: "policy".into(), tokenizer_digest: [0; 32] };
        Log::open(
            self.dir.join("log"),
            Options::new(identity).with_sync(SyncPolicy::Manual).with_segment_bytes(2 << 20),
        )
        .unwrap()
    }

    /// Whether the run came to its end in this process.
    fn live(&mut self, left: u64) -> bool {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let runtime = runtime.unwrap();
        let ended = runtime.block_on(async {
            let log = self.log();
            let killed = self.world.begin(left, durable(&log.reader()));
            let mut ledger = Ledger::open(self.dir).unwrap();
            let queue = Queue::open(self.policy, &log.reader(), self.answers, self.saved, ledger.groups());
            let data = Arc::new(Data::new(self.world.clone(), self.dir));
            let filters = Filters { dynamic_sampling: Some(Filter::NonzeroStd), ..Filters::default() };
            let rollouts = Arc::new(Rollouts {
                engines: Arc::new(Fleet::new(self.world.clone(), self.answers)),
                task: Task { filters, ..Task::new(data.clone(), data) },
                log,
                progress: Arc::new(|_, _, _| {}),
                queue: Arc::new(queue),
                options: RolloutOptions::new(self.policy.batch, self.answers).with_scope(1),
            });
            let world = self.world.clone();
            let generation = tokio::spawn(rollouts.clone().run());
            let is_over = tokio::select! {
                biased;
                () = killed.notified() => false,
                ended = generation => match ended.unwrap().unwrap_err() {
                    // What ends a process whose engines or rewards stay away.
                    Error::Bridge(error) if error.is_no_engine() => false,
                    error if error.is_away() => false,
                    error => panic!("seed {}: {error}", world.seed),
                },
                () = self.learn(&rollouts, &mut ledger) => true,
            };
            world.end();
            is_over
        });
        // With it go its tasks, and the log is closed.
        drop(runtime);
        ended
    }

    /// The learner, from its checkpoint to the last step.
    async fn learn(&mut self, rollouts: &Rollouts, ledger: &mut Ledger) {
        let (queue, world) = (&rollouts.queue, self.world.clone());
        let publish = |step| {
            let newest = world.publish(step);
            queue.published(newest, Some(world.label(newest)));
        };
        publish(self.saved);
        for step in self.saved..self.policy.steps {
            self.step(step, rollouts, ledger).await.unwrap();
            tokio::time::sleep(Duration::from_millis(40)).await;
            world.happens("learned", step).await;
            if (step + 1).is_multiple_of(SAVE) {
                self.saved = step + 1;
            }
            world.happens("saved", step).await;
            publish(step + 1);
            world.happens("published", step).await;
            queue.trained(step + 1);
        }
        self.saved = self.policy.steps;
    }

    /// Has a step take its groups, as [`super::Session::take`] does.
    async fn step(&mut self, step: u64, rollouts: &Rollouts, ledger: &mut Ledger) -> Result<()> {
        let (queue, log) = (&rollouts.queue, &rollouts.log);
        let (numbers, groups, ages) = loop {
            let Some(numbers) = queue.batch(step) else {
                queue.wait().await;
                continue;
            };
            let groups = take::groups(&log.reader(), step, &numbers, self.answers)?;
            let ages = Ages::of(&groups, self.oldest(), |version| Some(step.saturating_sub(version)));
            let stale = take::stale(queue, step, &groups, &ages);
            if stale.is_empty() {
                break (numbers, groups, ages);
            }
            for group in stale {
                rollout::leave_out(log, group, take::ALL_TOO_OLD)?;
                queue.leave_out(group);
            }
        };
        self.world.happens("chosen", step).await;
        let records = groups.iter().flat_map(|group| &group.records);
        let digests: Vec<String> = records.clone().map(ledger::digest).collect();
        ledger.note(step, &numbers, digests.clone(), recipe(self.answers))?;
        self.world.happens("noted", step).await;
        let shares: Vec<f64> = groups.iter().map(|group| ages.stale_share(group)).collect();
        let _ = queue.take(step, numbers, &shares);
        assert_eq!(*self.learned.entry(step).or_insert_with(|| digests.clone()), digests, "step {step}");
        for record in records {
            self.check_record(step, record, &ages);
        }
        Ok(())
    }

    fn oldest(&self) -> Option<u64> {
        match self.policy.mode {
            Mode::Bounded { max_staleness } => Some(max_staleness),
            Mode::Synchronous | Mode::OneStepOff => None,
        }
    }

    /// An answer is whole, each token is the one that its version draws, and none that is trained on is too old.
    fn check_record(&self, step: u64, record: &driftless_buffer::Record, ages: &Ages) {
        let (answer, seed) = (record.scalars().sample_id, self.world.seed);
        assert_eq!(record.response().len(), length(seed, answer), "answer {answer}");
        let sample = ages.sample(record);
        let mut next = 0;
        for span in record.spans() {
            assert_eq!(span.start, next, "answer {answer}");
            next = span.end;
            for at in span.start as usize..span.end as usize {
                let drawn = (record.response()[at], record.log_probs()[at]);
                assert_eq!(drawn, token(seed, answer, at, span.version), "answer {answer}, token {at}");
                let age = step.saturating_sub(span.version);
                let is_in_time = match self.policy.mode {
                    // Of groups that are asked for beyond a batch, those that finish with it are the next step's.
                    Mode::Synchronous => self.policy.surplus > 0 || age == 0,
                    Mode::OneStepOff => true,
                    Mode::Bounded { max_staleness } => age <= max_staleness,
                };
                assert!(is_in_time || !sample.is_trained(at), "answer {answer}, token {at}: {age} steps old");
            }
        }
        assert_eq!(next as usize, record.response().len(), "answer {answer}");
    }

    /// What was trained on is what engines replied, whatever was killed meanwhile.
    fn verify(&self, taken: &BTreeSet<u64>) {
        let line = |step| format!("{{\"version\":{step},\"step\":{step}}}\n");
        let versions: String = (0..=self.policy.steps).map(line).collect();
        std::fs::write(self.dir.join("versions.jsonl"), versions).unwrap();
        let report = verify(self.dir, &self.dir.join("log")).unwrap();
        let first = report.first.first().map(ToString::to_string);
        assert_eq!(first, None, "seed {}: {} faults", self.world.seed, report.faults);
        let lacking = taken.iter().filter(|group| worth(self.world.seed, **group) == Worth::Partly).count();
        let answers = self.policy.batch * self.policy.steps * self.answers - lacking as u64;
        assert_eq!((report.answers, report.samples_learned), (answers, answers), "seed {}", self.world.seed);
        assert!(report.replies >= answers && report.unchecked.earlier_release == 0);
    }

    /// Every prompt has one fate, and no step's groups are another's. Returns the answers that are finished.
    fn check(&self) -> u64 {
        let log = self.log().reader();
        let taken = ledger::read(self.dir).unwrap();
        assert_eq!(taken.keys().copied().collect::<Vec<_>>(), (0..self.policy.steps).collect::<Vec<_>>());
        let all: Vec<u64> = taken.values().flatten().copied().collect();
        let taken: BTreeSet<u64> = all.iter().copied().collect();
        assert_eq!(all.len() as u64, self.policy.batch * self.policy.steps);
        assert_eq!(all.len(), taken.len(), "a group is taken twice");
        let numbers = |state| log.prompts(state).into_iter().map(|prompt| prompt.scalars().sample_id);
        let (done, in_flight): (BTreeSet<_>, BTreeSet<_>) =
            (numbers(PromptState::Done).collect(), numbers(PromptState::InFlight).collect());
        let known: BTreeSet<u64> = done.union(&in_flight).copied().collect();
        assert_eq!(known, (0..log.next_prompt()).collect(), "no prompt is lost");
        assert!(done.is_disjoint(&in_flight));
        for record in log.prompts(PromptState::Done) {
            let group = record.scalars().sample_id;
            let PromptNote { dropped: why, failed, .. } = PromptNote::of(&record);
            let worth = worth(self.world.seed, group);
            let is_learnable = matches!(worth, Worth::Kept | Worth::Partly);
            assert!(why.is_some() || is_learnable, "group {group} is kept and {worth:?}");
            let failed: Vec<u64> = failed.iter().map(|failed| failed.answer).collect();
            let second = if worth == Worth::Partly { vec![group * self.answers + 1] } else { Vec::new() };
            assert!(worth == Worth::Failed || failed == second, "group {group} lacks {failed:?}");
            assert!(why.is_none() || !taken.contains(&group), "group {group} is taken, and {why:?}");
            let is_stale = why.as_deref().is_some_and(|why| why.contains("too old"));
            assert!(why.is_none() || !is_learnable || is_stale, "group {group} is left out: {why:?}");
        }
        self.verify(&taken);
        done.len() as u64 * self.answers
    }
}

/// How every step learns.
fn recipe(answers: u64) -> Recipe {
    let learn = LearnOptions::default();
    Recipe { learn, temperature: 1.0, n_samples_per_prompt: answers, max_staleness: None, learner: None }
}

/// By answer that is not finished: the tokens that a log has of it, and the oldest version of them.
fn durable(log: &Reader) -> HashMap<u64, (usize, u64)> {
    let mut durable = HashMap::new();
    let mut finished = BTreeSet::new();
    for record in log.iter(driftless_buffer::Position(0)).map(std::result::Result::unwrap) {
        let (answer, note) = (record.scalars().sample_id, record.metadata());
        if record.kind() == Kind::Sample {
            finished.insert(answer);
        }
        if record.kind() != Kind::Partial {
            continue;
        }
        let note: serde_json::Value = serde_json::from_slice(note).unwrap();
        let behind = note["behind"].as_u64().unwrap() as usize;
        let (known, oldest) = durable.remove(&answer).unwrap_or((0, u64::MAX));
        assert!(behind <= known, "answer {answer}: {behind} tokens before it, and the log has {known}");
        let oldest = if behind == 0 { u64::MAX } else { oldest };
        let oldest = record.spans().iter().map(|span| span.version).fold(oldest, u64::min);
        durable.insert(answer, (behind + record.tokens().len(), oldest));
    }
    durable.retain(|answer, _| !finished.contains(answer));
    durable
}

/// Runs of these seeds, on all processors.
fn runs(seeds: Range<u64>) -> Vec<(u64, Told)> {
    let next = Mutex::new(seeds);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let work = || {
            let mut told = Vec::new();
            while let Some(seed) = { next.lock().unwrap().next() } {
                let ended = std::panic::catch_unwind(|| run(seed));
                told.push((seed, ended.unwrap_or_else(|_| panic!("DRIFTLESS_SIMULATE={seed} shows it"))));
            }
            told
        };
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn simulated_runs_lose_and_repeat_nothing() {
    let all = if std::env::var_os("DRIFTLESS_LONG").is_some() { "0..1250" } else { "0..125" };
    let seeds = std::env::var("DRIFTLESS_SIMULATE").unwrap_or_else(|_| all.into());
    let seeds = match seeds.split_once("..") {
        Some((first, last)) => first.parse().unwrap()..last.parse().unwrap(),
        None => seeds.parse().unwrap()..seeds.parse::<u64>().unwrap() + 1,
    };
    let begin = std::time::Instant::now();
    let told = runs(seeds);
    let answers: u64 = told.iter().map(|(_, told)| told.answers).sum();
    let lives: u64 = told.iter().map(|(_, told)| told.lives).sum();
    println!("{} runs, {answers} answers, {lives} processes in {:?}", told.len(), begin.elapsed());
}

#[test]
fn simulated_run_makes_the_same_trace_twice() {
    for seed in 100..104 {
        assert_eq!(run(seed), run(seed), "seed {seed}");
    }
}
