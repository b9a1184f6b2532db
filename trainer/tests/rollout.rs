//! Rollouts without an engine: which prompts are taken, what becomes of groups that fail, and what a crash
//! leaves.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use async_trait::async_trait;
use driftless_bridge::engine::Finish;
use driftless_bridge::{GenerateRequest, Generation, Label, SamplingParams};
use driftless_buffer::{self as buffer, Identity, Log, Options, PromptState, Sample, Scalars};
use driftless_trainer::Error;
use driftless_trainer::data::{DataOptions, Dataset, Source};
use driftless_trainer::hook::{Filter, Filters};
use driftless_trainer::reward::Reward;
use driftless_trainer::rollout::{Dropped, EvalSet, PromptNote, RolloutOptions, Rollouts};
use driftless_trainer::sample::{Answer, Engines};
use driftless_trainer::tasks::{Prompts, Task, tiny};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const SAMPLES: u64 = 2;
const GROUPS: u64 = 3;

/// An engine that answers with the prompt's first token and, from the `stuck_from`-th request on, not at all.
#[derive(Default)]
struct Echo {
    asked: AtomicU64,
    stuck_from: Option<u64>,
}

#[async_trait]
impl Engines for Echo {
    async fn generate(
        &self,
        request: GenerateRequest,
        _minimum: Option<&Label>,
    ) -> driftless_bridge::Result<Generation> {
        let asked = self.asked.fetch_add(1, Ordering::SeqCst);
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
        })
    }
}

/// Rewards by the label: `fail` gives none, `same` gives both samples 1, anything else tells them apart.
#[derive(Debug)]
struct ByLabel;

#[async_trait]
impl Reward for ByLabel {
    async fn score(&self, answers: &[Answer]) -> Result<Vec<f32>, Error> {
        let score = |answer: &Answer| match answer.label_text()?.as_str() {
            "fail" => Ok(f32::NAN),
            "same" => Ok(1.0),
            _ => Ok((answer.sample % SAMPLES) as f32),
        };
        answers.iter().map(score).collect()
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
    Arc::new(Rollouts {
        engines: Arc::new(engines),
        task,
        log: Log::open(dir.join("log"), Options::new(identity)).unwrap(),
        progress: Arc::new(|_, _, _| {}),
        options: RolloutOptions::new(GROUPS, SAMPLES).with_scope(1),
    })
}

/// The prompts that a rollout learns from.
fn groups(rollouts: &Rollouts, rollout: u64) -> Vec<u64> {
    rollouts.log.reader().groups(rollout, SAMPLES as usize).iter().map(|group| group.group_id).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_that_fail_or_are_filtered_are_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let labels = ["a", "fail", "b", "same", "c", "d", "e", "f"];
    let rollouts = rollouts(dir.path(), task(dir.path(), &labels, 0), Echo::default());
    let dropped = rollouts.clone().generate(0, None).await.unwrap();
    assert_eq!(dropped, Dropped { failed: 1, filtered: 1 });
    assert_eq!(groups(&rollouts, 0), [0, 2, 4]);
    assert_eq!(rollouts.clone().generate(1, None).await.unwrap(), Dropped::default());
    assert_eq!(groups(&rollouts, 1), [5, 6, 7]);
    let done = rollouts.log.reader().prompts(PromptState::Done);
    let why = |record: &buffer::Record| String::from_utf8_lossy(record.metadata()).into_owned();
    let failed = done.iter().find(|record| record.scalars().sample_id == 1).map(why).unwrap();
    assert!(failed.contains("prompts.jsonl:2") && failed.contains("NaN"), "{failed}");
    let note = done.iter().find(|record| record.scalars().sample_id == 2).map(PromptNote::of).unwrap();
    assert_eq!(note.label.map(|label| label.get().to_owned()).as_deref(), Some("\"b\""));
    assert!(note.source.unwrap().to_string().ends_with("prompts.jsonl:3") && note.dropped.is_none());
    // What is complete already is not done again.
    assert_eq!(rollouts.clone().generate(1, None).await.unwrap(), Dropped::default());
    assert_eq!(rollouts.log.reader().next_prompt(), 8);
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_interrupted_anywhere_takes_each_prompt_once() {
    let labels = ["a", "b", "c", "d", "e", "f"];
    for stuck_from in 0..GROUPS * SAMPLES {
        let dir = tempfile::tempdir().unwrap();
        let echo = Echo { stuck_from: Some(stuck_from), ..Echo::default() };
        let first = rollouts(dir.path(), task(dir.path(), &labels, 0), echo);
        let run = tokio::spawn(first.clone().generate(0, None));
        // Every prompt is in flight, and every request that is answered was.
        while first.log.reader().next_prompt() < GROUPS || !settled(&first, stuck_from) {
            tokio::task::yield_now().await;
        }
        run.abort();
        assert!(run.await.unwrap_err().is_cancelled());
        close(first).await;
        let second = rollouts(dir.path(), task(dir.path(), &labels, 0), Echo::default());
        let before: BTreeSet<_> = groups(&second, 0).into_iter().collect();
        second.clone().generate(0, None).await.unwrap();
        assert_eq!(groups(&second, 0), [0, 1, 2], "stuck from {stuck_from}, {before:?} were complete");
        second.clone().generate(1, None).await.unwrap();
        assert_eq!(groups(&second, 1), [3, 4, 5], "stuck from {stuck_from}");
        assert_eq!(second.log.reader().prompts(PromptState::Done).len(), 6);
        assert!(second.log.reader().prompts(PromptState::InFlight).is_empty());
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
    close(first).await;
    let second = rollouts(dir.path(), task(dir.path(), &["a"; 6], 0), Echo::default());
    second.clone().generate(0, None).await.unwrap();
    assert_eq!(groups(&second, 0), [0, 1, 2]);
    assert_eq!(second.log.reader().prompts(PromptState::Done).len(), 3);
    assert!(second.log.reader().prompts(PromptState::InFlight).is_empty());
}

/// A rollout that ended after its prompts were taken, and before the first answer.
async fn interrupted(dir: &Path) -> Arc<Rollouts> {
    let echo = Echo { stuck_from: Some(0), ..Echo::default() };
    let first = rollouts(dir, task(dir, &["a"; 6], 0), echo);
    let run = tokio::spawn(first.clone().generate(0, None));
    while first.log.reader().next_prompt() < GROUPS {
        tokio::task::yield_now().await;
    }
    run.abort();
    assert!(run.await.unwrap_err().is_cancelled());
    first
}

/// Closes the log, once the tasks that were aborted let go of it.
async fn close(rollouts: Arc<Rollouts>) {
    while Arc::strong_count(&rollouts) > 1 {
        tokio::task::yield_now().await;
    }
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
    let first = interrupted(dir.path()).await;
    close(first).await;
    let second = rollouts(dir.path(), task(dir.path(), &["a"; 6], 5), Echo::default());
    let words = second.generate(0, None).await.unwrap_err().to_string();
    assert!(words.contains("prompt 0") && words.contains("prompts.jsonl:1"), "{words}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reward_that_never_comes_ends_the_rollout_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let rollouts = rollouts(dir.path(), task(dir.path(), &["fail"], 0), Echo::default());
    let words = rollouts.generate(0, None).await.unwrap_err().to_string();
    assert!(words.contains("rollout 0") && words.contains("one finite number"), "{words}");
}

#[tokio::test(flavor = "multi_thread")]
async fn measuring_gives_mean_reward_and_pass_rate_and_logs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let labels = ["a", "same", "fail", "b"];
    let rollouts = rollouts(dir.path(), task(dir.path(), &labels, 0), Echo::default());
    let set = EvalSet {
        name: "test".into(),
        task: rollouts.task.clone(),
        prompts: 4,
        samples: SAMPLES,
        sampling: SamplingParams::default(),
    };
    let measured = rollouts.clone().measure(&set, None).await.unwrap();
    assert_eq!((measured.prompts, measured.failed, measured.pass), (3, 1, Some(1.0)));
    assert!((measured.reward - 4.0 / 6.0).abs() < 1e-9, "{measured:?}");
    assert_eq!(rollouts.log.reader().next_prompt(), 0);
}
