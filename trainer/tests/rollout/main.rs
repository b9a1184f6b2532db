//! Rollouts without an engine: which prompts are taken, what becomes of groups that fail, and what a crash
//! leaves.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod answers;
mod pieces;
mod rests;
mod surplus;

use async_trait::async_trait;
use driftless_bridge::engine::{Finish, Piece, Tell};
use driftless_bridge::{GenerateRequest, Generation, Label, Rid, SamplingParams};
use driftless_buffer::{self as buffer, Identity, Log, Options, PromptState, Sample, Scalars};
use driftless_trainer::Error;
use driftless_trainer::data::{DataOptions, Dataset, Source};
use driftless_trainer::hook::{Filter, Filters};
use driftless_trainer::options::Mode;
use driftless_trainer::reward::{Given, Reward};
use driftless_trainer::rollout::{
    Dropped, EvalSet, Policy, PromptNote, Queue, RolloutOptions, Rollouts, Since,
};
use driftless_trainer::sample::{Answer, Engines};
use driftless_trainer::tasks::{Prompts, Task, tiny};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinHandle;

const SAMPLES: u64 = 2;
const GROUPS: u64 = 3;

/// An engine that answers with the prompt's first token and, from the `stuck_from`-th request on, not at all.
#[derive(Default)]
struct Echo {
    asked: AtomicU64,
    stuck_from: Option<u64>,
    /// So many requests find no engine.
    away: u64,
    /// Samples by affinity.
    groups: Arc<Mutex<BTreeMap<u64, HashSet<Rid>>>>,
}

#[async_trait]
impl Engines for Echo {
    async fn generate(
        &self,
        request: GenerateRequest,
        _minimum: Option<&Label>,
        _told: Tell<'_>,
    ) -> driftless_bridge::Result<Generation> {
        let asked = self.asked.fetch_add(1, Ordering::SeqCst);
        if asked < self.away {
            let after = Duration::from_secs(1);
            return Err(driftless_bridge::Error::Exhausted {
                rid: request.rid.to_string(),
                after,
                attempts: vec![],
            });
        }
        let affinity = request.affinity.unwrap();
        self.groups.lock().unwrap().entry(affinity).or_default().insert(request.rid);
        if self.stuck_from.is_some_and(|stuck| asked >= stuck) {
            std::future::pending::<()>().await;
        }
        Ok(Generation {
            rid: request.rid,
            engine: "echo".into(),
            output_ids: vec![request.input_ids[0]],
            log_probs: vec![-0.5],
            spans: Vec::new(),
            spans_reported: true,
            finish: Finish::Stop,
            retractions: 0,
            cached_tokens: None,
            replies: Vec::new(),
        }
        .digested(&request.input_ids))
    }
}

/// Rewards by the label: `fail` gives none, `same` gives both samples 1, anything else tells them apart.
#[derive(Debug)]
struct ByLabel;

#[async_trait]
impl Reward for ByLabel {
    async fn score(&self, answers: &[Answer]) -> Result<Vec<Result<Given, Error>>, Error> {
        let score = |answer: &Answer| match answer.label_text()?.as_str() {
            "fail" => Ok(f32::NAN.into()),
            "same" => Ok(1.0.into()),
            _ => Ok(((answer.sample % SAMPLES) as f32).into()),
        };
        Ok(answers.iter().map(score).collect())
    }
}

/// Prompts 0, 1, … of one digit, with these labels.
fn task(dir: &Path, labels: &[&str], first_digit: usize) -> Task {
    std::fs::write(dir.join("tokenizer.json"), tiny::tokenizer().to_string()).unwrap();
    let line = |(number, label): (usize, &&str)| {
        format!("{{\"input\": \"{}\", \"label\": \"{label}\"}}\n", (number + first_digit) % 10)
    };
    let file = dir.join("prompts.jsonl");
    std::fs::write(&file, labels.iter().enumerate().map(line).collect::<String>()).unwrap();
    let options = DataOptions::default()
        .with_prompt_data(vec![Source { path: file, rows: 0..u64::MAX }])
        .with_label_key("label");
    let prompts = Prompts::new(Dataset::load(&options, dir).unwrap(), false, 0);
    let filters = Filters { dynamic_sampling: Some(Filter::NonzeroStd), ..Filters::default() };
    Task { filters, ..Task::new(Arc::new(prompts), Arc::new(ByLabel)) }
}

fn rollouts(dir: &Path, task: Task, engines: Echo) -> Arc<Rollouts> {
    let identity = Identity { run_id: [7; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
    let log = Log::open(dir.join("log"), Options::new(identity)).unwrap();
    let policy = Policy::new(Mode::Synchronous, GROUPS, u64::MAX);
    let queue = Queue::open(policy, &log.reader(), SAMPLES, 0, BTreeMap::new());
    queue.published(0, None);
    Arc::new(Rollouts {
        engines: Arc::new(engines),
        task,
        log,
        progress: Arc::new(|_, _, _| {}),
        queue: Arc::new(queue),
        options: RolloutOptions::new(GROUPS, SAMPLES).with_scope(1),
    })
}

/// Gives `step` its groups, and lets those of the next begin.
async fn take(rollouts: &Rollouts, step: u64) -> (Vec<u64>, Since) {
    let groups = loop {
        match rollouts.queue.batch(step) {
            Some(groups) => break groups,
            None => rollouts.queue.wait().await,
        }
    };
    assert!(groups.iter().all(|group| rollouts.logged_group(*group).is_some()), "{groups:?} are durable");
    let since = rollouts.queue.take(step, groups.clone(), &[]);
    rollouts.queue.trained(step + 1);
    (groups, since)
}

/// Generates until the log is closed.
struct Running(Arc<Rollouts>, JoinHandle<Result<(), Error>>);

impl Running {
    fn start(rollouts: Arc<Rollouts>) -> Self {
        Running(rollouts.clone(), tokio::spawn(rollouts.run()))
    }

    async fn stop(self) {
        self.1.abort();
        assert!(self.1.await.unwrap_err().is_cancelled());
    }

    /// Ends it, waits until the tasks that were aborted let go of the log, and closes it here.
    async fn close(self) {
        self.1.abort();
        assert!(self.1.await.unwrap_err().is_cancelled());
        // Where the last owner is another thread, it may still be closing the log when no owner is left.
        while Arc::strong_count(&self.0) > 1 {
            tokio::task::yield_now().await;
        }
        drop(self.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_that_fail_or_are_filtered_are_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let labels = ["a", "fail", "b", "same", "c", "d", "e", "f", "g", "h", "i"];
    let echo = Echo::default();
    let asked = echo.groups.clone();
    let rollouts = rollouts(dir.path(), task(dir.path(), &labels, 0), echo);
    let running = Running::start(rollouts.clone());
    let (groups, since) = take(&rollouts, 0).await;
    assert_eq!(groups, [0, 2, 4]);
    let first: HashSet<_> = (0..SAMPLES).map(|sample| Rid::new(1, sample)).collect();
    assert_eq!(asked.lock().unwrap()[&0], first, "the affinity of a group is its number");
    assert_eq!(since.dropped, Dropped { failed: 1, filtered: 1, too_old: 0 });
    let (groups, since) = take(&rollouts, 1).await;
    assert_eq!((groups, since.dropped, since.kept), (vec![5, 6, 7], Dropped::default(), 3));
    assert!(since.active > Duration::ZERO);
    running.stop().await;
    let done = rollouts.log.reader().prompts(PromptState::Done);
    let why = |record: &buffer::Record| String::from_utf8_lossy(record.metadata()).into_owned();
    let failed = done.iter().find(|record| record.scalars().sample_id == 1).map(why).unwrap();
    assert!(failed.contains("prompts.jsonl:2") && failed.contains("NaN"), "{failed}");
    let note = done.iter().find(|record| record.scalars().sample_id == 2).map(PromptNote::of).unwrap();
    assert_eq!(note.label.map(|label| label.get().to_owned()).as_deref(), Some("\"b\""));
    assert!(note.source.unwrap().to_string().ends_with("prompts.jsonl:3") && note.dropped.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_interrupted_anywhere_takes_each_prompt_once() {
    let labels = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];
    for stuck_from in 0..GROUPS * SAMPLES {
        let dir = tempfile::tempdir().unwrap();
        let echo = Echo { stuck_from: Some(stuck_from), ..Echo::default() };
        let first = rollouts(dir.path(), task(dir.path(), &labels, 0), echo);
        let running = Running::start(first.clone());
        // Every prompt is in flight, and every request that is answered was.
        while first.log.reader().next_prompt() < GROUPS || !settled(&first, stuck_from) {
            tokio::task::yield_now().await;
        }
        drop(first);
        running.close().await;
        let second = rollouts(dir.path(), task(dir.path(), &labels, 0), Echo::default());
        let running = Running::start(second.clone());
        assert_eq!(take(&second, 0).await.0, [0, 1, 2], "stuck from {stuck_from}");
        assert_eq!(take(&second, 1).await.0, [3, 4, 5], "stuck from {stuck_from}");
        assert_eq!(take(&second, 2).await.0, [6, 7, 8], "stuck from {stuck_from}");
        let done = second.log.reader().prompts(PromptState::Done);
        let done = done.iter().map(|record| record.scalars().sample_id).filter(|number| *number < 9);
        assert_eq!(done.collect::<BTreeSet<_>>(), (0..9).collect());
        drop(second);
        running.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_complete_but_not_marked_done_is_counted_once() {
    let dir = tempfile::tempdir().unwrap();
    let first = interrupted(dir.path()).await;
    // What a crash leaves between the last sample of group 0 and the record that its prompt is done.
    let tokens = [first.task.source.prompt(0).await.unwrap().tokens, vec![1]].concat();
    let sample = |sample_id: u64| Sample {
        scalars: Scalars { sample_id, status: buffer::Finish::Stop.code(), ..Scalars::default() },
        prompt_len: tokens.len() - 1,
        tokens: &tokens,
        log_probs: &[-0.5],
        loss_mask: &[1],
        ..Sample::default()
    };
    first.log.append_all(&(0..SAMPLES).map(sample).collect::<Vec<_>>()).unwrap();
    drop(first);
    let echo = Echo { stuck_from: Some((GROUPS - 1) * SAMPLES), ..Echo::default() };
    let second = rollouts(dir.path(), task(dir.path(), &["a"; 6], 0), echo);
    let running = Running::start(second.clone());
    assert_eq!(take(&second, 0).await.0, [0, 1, 2]);
    let whole = second.logged_group(0).unwrap();
    assert_eq!(whole.records.len(), SAMPLES as usize);
    assert!(whole.records.iter().all(|record| record.scalars().reward == 0.0), "it is not generated again");
    assert_eq!(second.log.reader().prompt(0).unwrap().unwrap().scalars().status, PromptState::Done.code());
    running.stop().await;
}

/// A run that ended after its prompts were taken, and before the first answer.
async fn interrupted(dir: &Path) -> Arc<Rollouts> {
    let echo = Echo { stuck_from: Some(0), ..Echo::default() };
    let first = rollouts(dir, task(dir, &["a"; 6], 0), echo);
    let running = Running::start(first.clone());
    while first.log.reader().next_prompt() < GROUPS {
        tokio::task::yield_now().await;
    }
    running.stop().await;
    while Arc::strong_count(&first) > 1 {
        tokio::task::yield_now().await;
    }
    first
}

/// The metadata of a record.
fn note(record: &buffer::Record) -> serde_json::Value {
    serde_json::from_slice(record.metadata()).unwrap()
}

/// Whether all requests were made, of which those from `stuck_from` on wait for ever.
fn settled(rollouts: &Rollouts, stuck_from: u64) -> bool {
    let done = rollouts.log.reader().prompts(PromptState::Done).len() as u64;
    // Requests of a group are made one after another, so at most this many groups cannot be complete.
    done + (GROUPS * SAMPLES - stuck_from) >= GROUPS
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_that_changed_while_they_were_in_flight_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    drop(interrupted(dir.path()).await);
    let second = rollouts(dir.path(), task(dir.path(), &["a"; 6], 5), Echo::default());
    let words = second.run().await.unwrap_err().to_string();
    assert!(words.contains("prompt 0") && words.contains("prompts.jsonl:1"), "{words}");
}

#[tokio::test(flavor = "multi_thread")]
async fn group_that_is_too_old_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let rollouts = rollouts(dir.path(), task(dir.path(), &["a"; 9], 0), Echo::default());
    let running = Running::start(rollouts.clone());
    while rollouts.queue.batch(0).is_none() {
        rollouts.queue.wait().await;
    }
    rollouts.queue.leave_out(1);
    assert_eq!(rollouts.queue.batch(0), None);
    let (groups, since) = take(&rollouts, 0).await;
    assert_eq!((groups, since.dropped), (vec![0, 2, 3], Dropped { failed: 0, filtered: 0, too_old: 1 }));
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_are_away_cost_no_prompt() {
    let dir = tempfile::tempdir().unwrap();
    // The first request of each of two groups, whose other one is kept.
    let echo = Echo { away: 2, ..Echo::default() };
    let rollouts = rollouts(dir.path(), task(dir.path(), &["a"; 9], 0), echo);
    let running = Running::start(rollouts.clone());
    let (groups, since) = take(&rollouts, 0).await;
    assert_eq!((groups, since.dropped), (vec![0, 1, 2], Dropped::default()));
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_stay_away_end_the_run_and_leave_its_prompts() {
    let dir = tempfile::tempdir().unwrap();
    let echo = Echo { away: u64::MAX, ..Echo::default() };
    let first = rollouts(dir.path(), task(dir.path(), &["a"; 9], 0), echo);
    let error = first.clone().run().await.unwrap_err();
    assert!(matches!(error, Error::Bridge(driftless_bridge::Error::Exhausted { .. })), "{error}");
    assert_eq!(first.log.reader().prompts(PromptState::InFlight).len() as u64, GROUPS);
    while Arc::strong_count(&first) > 1 {
        tokio::task::yield_now().await;
    }
    drop(first);
    let second = rollouts(dir.path(), task(dir.path(), &["a"; 9], 0), Echo::default());
    let running = Running::start(second.clone());
    assert_eq!(take(&second, 0).await.0, [0, 1, 2]);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_that_are_left_out_end_no_run_that_gets_on() {
    let dir = tempfile::tempdir().unwrap();
    // Of 63 groups 10 fail and 50 are filtered: more than a quarter of three, and than 16 for each of them.
    let mut labels = vec!["a"];
    labels.extend(["same", "same", "fail", "same", "same", "same"].repeat(10));
    labels.extend(["b"; 9]);
    let rollouts = rollouts(dir.path(), task(dir.path(), &labels, 0), Echo::default());
    let running = Running::start(rollouts.clone());
    let (groups, since) = take(&rollouts, 0).await;
    assert_eq!(groups, [0, 61, 62]);
    assert_eq!(since.dropped, Dropped { failed: 10, filtered: 50, too_old: 0 });
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn log_without_a_ledger_says_what_its_steps_learned_from() {
    let dir = tempfile::tempdir().unwrap();
    let rollouts = rollouts(dir.path(), task(dir.path(), &["a"; 9], 0), Echo::default());
    let running = Running::start(rollouts.clone());
    for step in 0..2 {
        take(&rollouts, step).await;
    }
    while rollouts.queue.batch(2).is_none() {
        rollouts.queue.wait().await;
    }
    running.stop().await;
    let policy = Policy::new(Mode::Synchronous, GROUPS, u64::MAX);
    let open = |step, taken: &[(u64, Vec<u64>)]| {
        Queue::open(policy, &rollouts.log.reader(), SAMPLES, step, taken.iter().cloned().collect())
    };
    // Two steps are in the checkpoint, and the third one's groups are whole.
    let queue = open(2, &[]);
    assert_eq!((queue.batch(1), queue.batch(2)), (Some(vec![3, 4, 5]), Some(vec![6, 7, 8])));
    assert_eq!(queue.finished(), 3);
    // The next start finds a line of what this one did.
    let queue = open(3, &[(2, vec![6, 7, 8])]);
    assert_eq!((queue.batch(1), queue.batch(2)), (Some(vec![3, 4, 5]), Some(vec![6, 7, 8])));
    assert_eq!((queue.batch(3), queue.finished()), (None, 0));
    // What the log has lost is replaced.
    let queue = open(2, &[(0, vec![0, 1, 2]), (1, vec![3, 4, 5]), (2, vec![6, 7, 99])]);
    assert_eq!(queue.batch(2), Some(vec![6, 7, 8]));
}

#[tokio::test(flavor = "multi_thread")]
async fn more_answers_than_ids_have_room_for_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut rollouts = rollouts(dir.path(), task(dir.path(), &["a"; 3], 0), Echo::default());
    Arc::get_mut(&mut rollouts).unwrap().options.n_samples_per_prompt = 1 << 47;
    let words = rollouts.clone().run().await.unwrap_err().to_string();
    assert!(words.contains("n_samples_per_prompt") && words.contains("each of 2 prompts"), "{words}");
    assert_eq!(rollouts.log.reader().next_prompt(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reward_that_never_comes_ends_the_rollout_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let rollouts = rollouts(dir.path(), task(dir.path(), &["fail"], 0), Echo::default());
    let words = rollouts.run().await.unwrap_err().to_string();
    assert!(words.contains("rollout 0") && words.contains("one finite number"), "{words}");
}

#[tokio::test(flavor = "multi_thread")]
async fn measuring_gives_mean_reward_and_pass_rate_and_is_in_no_group() {
    let dir = tempfile::tempdir().unwrap();
    let labels = ["a", "same", "fail", "b"];
    let echo = Echo::default();
    let groups = echo.groups.clone();
    let rollouts = rollouts(dir.path(), task(dir.path(), &labels, 0), echo);
    let set = EvalSet {
        name: "test".into(),
        task: rollouts.task.clone(),
        prompts: 4,
        samples: SAMPLES,
        sampling: SamplingParams::default(),
    };
    let measured = rollouts.clone().measure(&set, 3, None).await.unwrap();
    assert_eq!((measured.prompts, measured.failed, measured.pass), (3, 1, Some(0.75)));
    assert!((measured.reward - 4.0 / 6.0).abs() < 1e-9, "{measured:?}");
    let samples: Vec<_> = groups.lock().unwrap().values().map(HashSet::len).collect();
    assert_eq!(samples, [SAMPLES as usize; 4], "samples of a prompt have one affinity");
    let log = rollouts.log.reader();
    assert_eq!((log.next_prompt(), log.rollouts()), (0, vec![]));
    let records: Vec<_> = log.iter(buffer::Position(0)).map(Result::unwrap).collect();
    let mut logged: Vec<_> = records.iter().map(|record| (record.scalars(), note(record))).collect();
    logged.sort_by_key(|(scalars, _)| u64::MAX - scalars.sample_id);
    let rewards: Vec<_> = logged.iter().map(|(scalars, _)| scalars.reward).collect();
    // The ids are odd where the place is even.
    assert_eq!(rewards, [1.0, 0.0, 1.0, 1.0, 1.0, 0.0], "the failed prompt has none");
    assert!(logged.iter().all(|(scalars, _)| scalars.evaluation && scalars.rollout_id == 3));
    let (_, first) = &logged[0];
    assert_eq!((&first["set"], &first["label"]), (&"test".into(), &"a".into()));
    assert!(first["source"].as_str().unwrap().ends_with("prompts.jsonl:1"), "{first}");
}
