//! All hooks together, as one program in Python, in rollouts without an engine.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod clients;
mod environment;
mod failures;
mod many;
mod openenv;
mod tools;

use async_trait::async_trait;
use driftless_bridge::engine::{Finish, Meter, Tell, VersionSpan};
use driftless_bridge::{GenerateRequest, Generation, Label, Rid, SamplingParams};
use driftless_buffer::sample::Verdict;
use driftless_buffer::{Identity, Log, Options, PromptState, Record, Sample, Scalars};
use driftless_trainer::Error;
use driftless_trainer::data::{DataOptions, RowReader};
use driftless_trainer::hook::{Filter, Filters, Hook, HookOptions, Rm};
use driftless_trainer::options::Mode;
use driftless_trainer::rollout::{Dropped, Policy, Queue, RolloutOptions, Rollouts};
use driftless_trainer::sample::{Engines, Turn, answer_of};
use driftless_trainer::tasks::{Sourced, Task, tiny};
use driftless_verify::verify;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const ANSWERS: u64 = 2;

/// Prompt n is a digit. An answer has two generations with a token of the hook's between them, and two
/// samples: the first turn, and both. Prompt 1 is left out. Odd answers are not trained on.
const HOOKS: &str = r#"
import json, sys

def answer(ask):
    samples = ask.get("samples", [])
    match ask["hook"]:
        case "prompt":
            return {"row": {"question": str(ask["number"] % 10), "answer": ask["number"]}}
        case "generate":
            made = ask["generations"]
            if not made:
                return {"generate": {"sampling_params": {"max_new_tokens": 1}}}
            if len(made) == 1:
                return {"generate": {"append": "+"}}
            first = made[0]["input_ids"] + made[0]["output_ids"]
            return {"samples": [{"tokens": first}, {"metadata": {"turns": len(made)}}]}
        case "rm":
            assert all(sample["metadata"] == {"turns": 2} for sample in samples)
            return {"rewards": [sample["index"] % 2 for sample in samples]}
        case "dynamic_sampling_filter":
            return {"keep": samples[0]["label"] != 1, "reason": "it is one"}
        case "rollout_sample_filter":
            return {"remove": [sample["reward"] == 1 for sample in samples]}
        case "reward_post_process":
            return {"rewards": [10 * sample["reward"] for sample in samples]}

for line in sys.stdin:
    ask = json.loads(line)
    print(json.dumps({"id": ask["id"], **answer(ask)}), flush=True)
"#;

fn hook(dir: &Path, flag: &'static str) -> Hook {
    let file = dir.join("hooks.py");
    std::fs::write(&file, HOOKS).unwrap();
    let at = format!("exec python3 {}", file.display());
    Hook::open(flag, &HookOptions::new(at).with_processes(2)).unwrap()
}

fn task(dir: &Path) -> Task {
    std::fs::write(dir.join("tokenizer.json"), tiny::tokenizer().to_string()).unwrap();
    let options = DataOptions::default().with_input_key("question").with_label_key("answer");
    let reader = RowReader::open(options, dir).unwrap();
    let reward = Arc::new(Rm::new(hook(dir, "--custom-rm-command")));
    let shared = |flag| Arc::new(hook(dir, flag));
    Task {
        source: Arc::new(Sourced::new(hook(dir, "--data-source-command"), reader)),
        generate: Some(shared("--custom-generate-command")),
        reward,
        filters: Filters {
            dynamic_sampling: Some(Filter::Hook(shared("--dynamic-sampling-filter-command"))),
            rollout_sample: Some(shared("--rollout-sample-filter-command")),
            reward_post_process: Some(shared("--custom-reward-post-process-command")),
        },
    }
}

/// Writes the last token it read, twice if it may, with its place as log-probability.
struct Echo;

#[async_trait]
impl Engines for Echo {
    async fn generate(
        &self,
        request: GenerateRequest,
        _minimum: Option<&Label>,
        _told: Tell<'_>,
    ) -> driftless_bridge::Result<Generation> {
        let read = request.input_ids.len();
        let count = (request.sampling.max_new_tokens as usize).min(2);
        let output_ids = vec![request.input_ids[read - 1]; count];
        Ok(drawn(request, read as u64, output_ids, vec![-(read as f32); count]))
    }
}

/// What an engine answers that drew these tokens by a version.
fn drawn(request: GenerateRequest, version: u64, output_ids: Vec<i32>, log_probs: Vec<f32>) -> Generation {
    let label = Label::new("0123456789ab", version).unwrap().to_string();
    Generation {
        rid: request.rid,
        engine: "scripted".into(),
        spans: vec![VersionSpan { label, start: 0, end: output_ids.len() as u32 }],
        output_ids,
        log_probs,
        spans_reported: true,
        finish: Finish::Stop,
        retractions: 0,
        cached_tokens: None,
        replies: Vec::new(),
    }
    .digested(&request.input_ids)
}

/// The same of version 1, with the place of each token as its log-probability.
fn drawn_in_place(request: GenerateRequest, output_ids: Vec<i32>) -> Generation {
    let read = request.input_ids.len();
    let log_probs = (read..read + output_ids.len()).map(|place| -(place as f32)).collect();
    drawn(request, 1, output_ids, log_probs)
}

/// An answer that is not learned from.
fn turn(sample: u64) -> Turn<'static> {
    Turn {
        engines: &Echo,
        minimum: None,
        sample,
        attempt: 0,
        group: sample,
        rid: Rid::new(1, sample),
        sampling: SamplingParams::default(),
        max_context_len: None,
        vocabulary: None,
        evaluation: true,
        meter: Meter::default(),
        underway: None,
    }
}

fn rollouts(dir: &Path, task: Task) -> Arc<Rollouts> {
    of_engines(dir, task, Arc::new(Echo), 16, 2)
}

fn of_engines(
    dir: &Path,
    task: Task,
    engines: Arc<dyn Engines>,
    vocabulary: u64,
    groups: u64,
) -> Arc<Rollouts> {
    let identity = Identity { run_id: [7; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
    let log = Log::open(dir.join("log"), Options::new(identity)).unwrap();
    let policy = Policy::new(Mode::Synchronous, groups, 1);
    let queue = Queue::open(policy, &log.reader(), ANSWERS, 0, BTreeMap::new());
    Arc::new(Rollouts {
        engines,
        task,
        log,
        progress: Arc::new(|_, _, _| {}),
        queue: Arc::new(queue),
        options: RolloutOptions::new(groups, ANSWERS).with_scope(1).with_vocabulary(vocabulary),
    })
}

/// Generates the groups of step 0, and returns them and what was left out.
async fn generate(rollouts: &Arc<Rollouts>) -> Result<(Vec<u64>, Dropped), Error> {
    let mut run = tokio::spawn(rollouts.clone().run());
    let groups = loop {
        if let Some(groups) = rollouts.queue.batch(0) {
            break groups;
        }
        tokio::select! {
            ended = &mut run => ended.unwrap()?,
            () = rollouts.queue.wait() => {}
        }
    };
    run.abort();
    let since = rollouts.queue.take(0, groups.clone(), &[]);
    Ok((groups, since.dropped))
}

/// The samples of a group, by id.
fn records(rollouts: &Rollouts, group: u64) -> Vec<Record> {
    let groups = rollouts.log.reader().groups(0, ANSWERS as usize);
    groups.into_iter().find(|found| found.group_id == group).unwrap().records
}

/// Prompt 0 is token 3, `+` is 13.
fn check(rollouts: &Rollouts) {
    let records = records(rollouts, 0);
    let answers: Vec<_> = records.iter().map(|record| answer_of(record.scalars().sample_id)).collect();
    assert_eq!(answers, [0, 1, 0, 1], "the first samples of both answers, then the second ones");
    let (turn, both) = (&records[0], &records[2]);
    assert_eq!((turn.tokens(), turn.log_probs()), (&[3, 3][..], &[-1.0][..]));
    assert_eq!(both.tokens(), [3, 3, 13, 13, 13]);
    assert_eq!(both.log_probs(), [-1.0, 0.0, -3.0, -3.0]);
    assert_eq!(both.loss_mask(), [0, 0, 1, 1], "the first sample trains on what both have");
    let versions: Vec<_> = both.spans().iter().map(|span| (span.version, span.start, span.end)).collect();
    assert_eq!(versions, [(1, 0, 1), (3, 2, 4)]);
    let verdicts = [&records[0], &records[3]].map(Record::verdict);
    assert_eq!(verdicts, [Verdict::Kept, Verdict::Masked], "an odd answer is not trained on");
    assert_eq!(records[1].rewards(), [1.0, 10.0], "before the hook and after it");
    let rewards: Vec<_> = records.iter().map(|record| record.scalars().reward).collect();
    assert_eq!(rewards, [0.0, 10.0, 0.0, 10.0], "an answer has one reward, ten times that of the hook");
}

/// What the hooks made of the generations of groups 0 and 2 is what the engine replied.
fn verified(run: &Path) {
    std::fs::write(run.join("ledger.jsonl"), "{\"step\":0,\"groups\":[0,2]}\n").unwrap();
    let report = verify(run, &run.join("log")).unwrap();
    assert_eq!(report.first, []);
    assert_eq!((report.answers, report.samples, report.replies), (4, 8, 12), "one turn and two of each");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_hook_does_its_part() {
    let dir = tempfile::tempdir().unwrap();
    let rollouts = rollouts(dir.path(), task(dir.path()));
    rollouts.task.ready().await.unwrap();
    let (_, dropped) = generate(&rollouts).await.unwrap();
    assert_eq!(dropped, Dropped { failed: 0, filtered: 1, too_old: 0 });
    check(&rollouts);
    verified(dir.path());
    let done = rollouts.log.reader().prompts(PromptState::Done);
    let left_out = done.iter().find(|record| record.scalars().sample_id == 1).unwrap();
    assert!(String::from_utf8_lossy(left_out.metadata()).contains("it is one"));
    assert_eq!(records(&rollouts, 2).len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hook_that_never_ends_an_answer_is_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"exec python3 -c '
import json, sys
for line in sys.stdin:
    print(json.dumps({"id": json.loads(line)["id"], "generate": {"input_ids": [3]}}), flush=True)'"#;
    let options = HookOptions::new(script);
    let opened = Hook::open("--custom-generate-command", &options).unwrap();
    let task = Task { generate: Some(Arc::new(opened)), ..task(dir.path()) };
    let prompt = task.source.prompt(0).await.unwrap();
    let words = task.generate(&prompt, &turn(7)).await.unwrap_err().to_string();
    assert!(words.contains("sample 7") && words.contains("at most 256 generations"), "{words}");
}

/// Answers wait for a reward that is away, and are read from the log then.
#[tokio::test(flavor = "multi_thread")]
async fn answer_with_a_reward_of_its_own_is_asked_for_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
import json, os, sys
for line in sys.stdin:
    ask = json.loads(line)
    if ask["hook"] == "rm":
        assert all(sample["index"] % 2 == 0 for sample in ask["samples"]), ask
        if ask["samples"]:
            with open("asked", "a") as asked:
                asked.write("x")
                if asked.tell() <= 4:
                    os._exit(1)
        said = {"rewards": [7] * len(ask["samples"])}
    elif not ask["generations"]:
        said = {"generate": {}}
    else:
        said = {"samples": [{"reward": 0.5}, {"reward": 0.25, "rewards": {"b": 3, "a": 2}}, {}] if ask["index"] % 2 else [{}]}
    print(json.dumps({"id": ask["id"], **said}), flush=True)
"#;
    std::fs::write(dir.path().join("gives.py"), script).unwrap();
    let at = format!("cd {} && exec python3 gives.py", dir.path().display());
    let open = |flag| Hook::open(flag, &HookOptions::new(&at)).unwrap();
    let reward = Arc::new(Rm::new(open("--custom-rm-command")));
    let made = Some(Arc::new(open("--custom-generate-command")));
    let task = Task { generate: made, reward, filters: Filters::default(), ..task(dir.path()) };
    let mut rollouts = rollouts(dir.path(), task);
    Arc::get_mut(&mut rollouts).unwrap().options.reward_pause = std::time::Duration::from_millis(1);
    let (groups, _) = generate(&rollouts).await.unwrap();
    let records = groups.iter().flat_map(|group| records(&rollouts, *group));
    let given: Vec<_> = records.map(|one| (one.scalars().sample_id % 2, one.rewards().to_vec())).collect();
    assert_eq!(given.len(), 8, "{given:?}");
    let expected = [(0, vec![7.0, 7.0]), (1, vec![0.25, 0.25, 2.0, 3.0])];
    assert!(given.iter().all(|one| expected.contains(one)), "{given:?}");
}

/// A crash after the second sample of an answer, and before its first, which is written last.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_which_a_crash_left_a_part_is_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let first = rollouts(dir.path(), task(dir.path()));
    let part = |part: u64, tokens: &'static [i32]| Sample {
        scalars: Scalars { sample_id: part << 48, ..Scalars::default() },
        prompt_len: 1,
        tokens,
        log_probs: &[-9.0],
        loss_mask: &[1],
        ..Sample::default()
    };
    // The try before the crash had three samples.
    first.log.append_all(&[part(2, &[3, 9]), part(1, &[3, 8])]).unwrap();
    let (groups, _) = generate(&first).await.unwrap();
    let whole = records(&first, 0).into_iter().filter(|record| record.log_probs() != [-9.0]);
    assert_eq!(whole.count(), 4);
    let groups = groups.iter().map(|group| first.logged_group(*group));
    // Nor does the loop learn from what the crash left.
    assert_eq!(first.log.reader().groups(0, 2)[0].records.len(), 5);
    assert_eq!(groups.map(|group| group.unwrap().records.len()).collect::<Vec<_>>(), [4, 4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn hook_that_asks_too_much_drops_its_group() {
    let dir = tempfile::tempdir().unwrap();
    let task = task(dir.path());
    for (reply, found) in [
        (r#"{"generate": {"sampling_params": {"temperature": 2}}}"#, "temperature"),
        (r#"{"generate": {"input_ids": [3], "append": "+"}}"#, "two of them"),
        (r#"{"generate": {"append": "+", "append_messages": []}}"#, "`append_messages`"),
        (r#"{"samples": [{"tokens": [3], "reward": 1e300}]}"#, "one finite number as `reward`"),
        (r#"{"samples": [{"tokens": [3], "rewards": {"form": "good"}}]}"#, "one finite number as `form`"),
        (r#"{"generate": {}, "samples": [{}]}"#, "neither, or both"),
        (r#"{"samples": []}"#, "found 0"),
        (r#"{"samples": [{}]}"#, "neither"),
        (r#"{"samples": [{"tokens": [3, 16], "prompt_len": 1}]}"#, "found 16"),
        (r#"{"samples": [{"tokens": [3, 4], "prompt_len": 1, "loss_mask": [1]}]}"#, "response token 0"),
    ] {
        let at = format!(
            "while read -r line; do n=${{line#*:}}; n=${{n%%,*}}; echo '{{\"id\": '$n', {}'; done",
            &reply[1..]
        );
        let options = HookOptions::new(at);
        let opened = Hook::open("--custom-generate-command", &options).unwrap();
        let task = Task { generate: Some(Arc::new(opened)), ..task.clone() };
        let place = dir.path().join(found.replace([' ', ','], "-"));
        let rollouts = rollouts(&place, task);
        let words = generate(&rollouts).await.unwrap_err().to_string();
        assert!(words.contains("--custom-generate-command") && words.contains(found), "{reply}: {words}");
    }
}
