//! Answers that fail: which failure each is, which is made again and how, and what a run keeps of them.

use super::clients::asking;
use super::many::Room;
use super::turn;
use async_trait::async_trait;
use driftless_bridge::engine::{Finish, Piece, Tell, VersionSpan};
use driftless_bridge::{GenerateRequest, Generation, Label};
use driftless_buffer::{Identity, Kind, Log, Options, Position, Reader, Record, Sample, Scalars};
use driftless_trainer::options::Mode;
use driftless_trainer::reward::{Given, Reward};
use driftless_trainer::rollout::{Dropped, Policy, PromptNote, Queue, RolloutOptions, Rollouts, Since};
use driftless_trainer::sample::{Answer, Turn};
use driftless_trainer::seed::mix;
use driftless_trainer::tasks::Task;
use driftless_trainer::{Error, Failure};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

const ANSWERS: u64 = 8;
const LENGTH: usize = 6;
const RUN: [u8; 16] = [7; 16];

/// What became of an answer of this fake, and what is said of it.
async fn failure(difference: &str, deadline: u64) -> (Failure, String) {
    let room = Room::fake(difference, deadline).await;
    let error = room.answer_to(turn(7)).await.unwrap_err();
    (error.failure(), error.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn failure_is_what_the_hook_says_or_what_the_run_sees() {
    let says = |outcome: &str| format!("def told(id, ask): say(id=id, error='so', outcome={outcome})");
    for named in Failure::ALL {
        let (found, words) = failure(&says(&format!("'{}'", named.name())), 60).await;
        assert!(found == named && words.contains("its error: so;"), "{words}");
    }
    for unknown in ["'oom'", "7"] {
        let (found, words) = failure(&says(unknown), 60).await;
        assert!(words.contains("which docs/hooks.md does not name") && found == Failure::Hook, "{words}");
    }
    for (difference, expected) in [
        ("def told(id, ask): say(id=id, error='so')", Failure::Hook),
        ("def asked(id, ask):\n for _ in 'ab': say(id=id, generate={})", Failure::Hook),
        ("def told(id, ask): say(id=id, samples=[{'tokens': [3, 4], 'loss_mask': [1]}])", Failure::Hook),
        ("def told(id, ask): sys.exit(3)", Failure::Environment),
    ] {
        let (found, words) = failure(difference, 60).await;
        assert_eq!(found, expected, "{difference}: {words}");
    }
    assert_eq!(failure("def told(id, ask): pass", 1).await.0, Failure::Deadline);
}

#[tokio::test(flavor = "multi_thread")]
async fn error_behind_a_full_context_is_typed_as_that() {
    let gives_up = "def told(id, ask): say(id=id, error='it wrote nothing')";
    let room = Room::fake(gives_up, 60).await;
    for (context, expected) in [(2, Failure::Context), (3, Failure::Hook)] {
        let turn = Turn { max_context_len: Some(context), ..turn(0) };
        assert_eq!(room.answer_to(turn).await.unwrap_err().failure(), expected, "{context} tokens");
    }
    let said = "def told(id, ask): say(id=id, error='so', outcome='parser')";
    let full = Turn { max_context_len: Some(2), ..turn(0) };
    let found = Room::fake(said, 60).await.answer_to(full).await.unwrap_err().failure();
    assert_eq!(found, Failure::Parser, "what the hook says counts more");
}

#[tokio::test(flavor = "multi_thread")]
async fn error_behind_a_refusal_of_the_gateway_is_typed_as_that() {
    let dir = tempfile::tempdir().unwrap();
    let function = r#"
@generate
def answer(turn: Turn) -> None:
    try:
        ask(turn, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "go on from this"}])
    except urllib.error.HTTPError as error:
        why = error.read()
    if turn.label == "1":
        converse(turn, "?", 1)
    raise ValueError(why)
"#;
    let room = asking(dir.path(), function, 60).await;
    let found = room.answer_to(turn(2)).await.unwrap_err();
    assert_eq!(found.failure(), Failure::Refused, "{found}");
    let found = room.answer_to(turn(1)).await.unwrap_err();
    assert_eq!(found.failure(), Failure::Hook, "a later request was answered: {found}");
}

#[tokio::test(flavor = "multi_thread")]
async fn python_function_says_which_failure_it_is() {
    let mine = "
import asyncio
from driftless_rl.hook import Failed, Turn, generate

@generate
async def answer(turn: Turn) -> None:
    match turn.label:
        case '0': raise Failed('environment', 'the container died')
        case '1': await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        case '2': raise Failed('oom', 'no such outcome')
        case '3': [][1]
";
    let file = tempfile::Builder::new().suffix(".py").tempfile().unwrap();
    std::fs::write(file.path(), mine).unwrap();
    let room = Room::module(file.path(), 60).await;
    let found = async |sample| room.answer_to(turn(sample)).await.unwrap_err();
    let died = found(0).await;
    let name = file.path().file_name().unwrap().to_string_lossy().into_owned();
    assert!(died.to_string().contains(&format!("its error: the container died ({name}:8)")), "{died}");
    assert_eq!(died.failure(), Failure::Environment);
    assert_eq!(found(1).await.failure(), Failure::Deadline);
    let unknown = found(2).await;
    assert!(unknown.to_string().contains("found 'oom'") && unknown.failure() == Failure::Hook, "{unknown}");
    assert_eq!(found(3).await.failure(), Failure::Hook);
}

/// Seeds, and tokens that were drawn already, by request.
type Asked = BTreeMap<String, Vec<(u64, Vec<i32>)>>;

/// Draws what follows from a request's seed, two tokens at a time.
#[derive(Clone, Default)]
struct Seeded {
    asked: Arc<Mutex<Asked>>,
    /// Stands still behind two tokens of each request's second attempt.
    is_stuck: bool,
}

fn token(seed: u64, at: usize) -> i32 {
    3 + (mix(seed ^ mix(at as u64)) % 10) as i32
}

#[async_trait]
impl driftless_trainer::sample::Engines for Seeded {
    async fn generate(
        &self,
        request: GenerateRequest,
        _minimum: Option<&Label>,
        told: Tell<'_>,
    ) -> driftless_bridge::Result<Generation> {
        let seed = request.sampling.sampling_seed.unwrap();
        let mut all = request.drawn;
        let attempts = {
            let mut asked = self.asked.lock().unwrap();
            let asked = asked.entry(request.rid.to_string()).or_default();
            asked.push((seed, all.output_ids.clone()));
            asked.len()
        };
        let label = Label::new(&"07".repeat(16), 1).unwrap().to_string();
        while all.len() < LENGTH {
            if self.is_stuck && attempts == 2 && all.len() >= 2 {
                std::future::pending::<()>().await;
            }
            let output_ids = [0, 1].map(|next| token(seed, all.len() + next));
            let log_probs = &[-0.5; 2];
            let piece =
                Piece { output_ids: &output_ids, log_probs, label: &label, located: true, digest: None };
            told(piece);
            all.push(piece);
        }
        let spans = vec![VersionSpan { label, start: 0, end: LENGTH as u32 }];
        Ok(Generation {
            rid: request.rid,
            engine: "seeded".into(),
            output_ids: all.output_ids,
            log_probs: all.log_probs,
            spans,
            spans_reported: true,
            finish: Finish::Stop,
            retractions: 0,
            cached_tokens: None,
            replies: Vec::new(),
        })
    }
}

/// The number of each answer, which is made of two parts, but for those that have none.
#[derive(Debug, Default)]
struct ByNumber {
    none: Vec<u64>,
}

#[async_trait]
impl Reward for ByNumber {
    async fn score(&self, answers: &[Answer]) -> Result<Vec<Result<Given, Error>>, Error> {
        let given = |Answer { sample, .. }: &Answer| match self.none.contains(sample) {
            false => {
                let reward = *sample as f32;
                let components = [("whole", reward - 0.5), ("half", 0.5)];
                let components = components.map(|(name, part)| (name.to_owned(), part)).into();
                Ok(Given { reward, components })
            }
            true => {
                let (expected, found) = ("a number".to_owned(), "its error: asleep".to_owned());
                Err(Error::Reward { sample: *sample, expected, found, todo: "look", is_away: false })
            }
        };
        Ok(answers.iter().map(given).collect())
    }
}

/// A run of groups of eight, of which a step takes one.
fn run(dir: &Path, room: &Room, engine: &Seeded) -> Arc<Rollouts> {
    rewarded(dir, room, engine, ByNumber::default())
}

fn rewarded(dir: &Path, room: &Room, engine: &Seeded, reward: ByNumber) -> Arc<Rollouts> {
    let identity = Identity { run_id: RUN, model: "policy".into(), tokenizer_digest: [0; 32] };
    let log = loop {
        match Log::open(dir.join("log"), Options::new(identity.clone())) {
            // The run before has not let go of it.
            Err(driftless_buffer::Error::Locked { .. }) => std::thread::yield_now(),
            opened => break opened.unwrap(),
        }
    };
    let queue = Queue::open(Policy::new(Mode::Synchronous, 1, 1), &log.reader(), ANSWERS, 0, BTreeMap::new());
    let task = Task { reward: Arc::new(reward), filters: Default::default(), ..room.task.clone() };
    Arc::new(Rollouts {
        engines: Arc::new(engine.clone()),
        task,
        log,
        progress: Arc::new(|_, _, _| {}),
        queue: Arc::new(queue),
        options: RolloutOptions::new(1, ANSWERS).with_scope(1),
    })
}

/// The group of step 0, and what its generation was like.
async fn step(run: &Arc<Rollouts>) -> (u64, Since) {
    let mut running = tokio::spawn(run.clone().run());
    let groups = loop {
        if let Some(groups) = run.queue.batch(0) {
            break groups;
        }
        tokio::select! {
            ended = &mut running => panic!("{:?}", ended.unwrap()),
            () = run.queue.wait() => {}
        }
    };
    running.abort();
    let since = run.queue.take(0, groups.clone(), &[]);
    (groups[0], since)
}

fn records(log: &Reader, kind: Kind) -> Vec<Record> {
    log.iter(Position(0)).map(Result::unwrap).filter(|record| record.kind() == kind).collect()
}

/// Answer 3 fails in the first attempt of the first process.
const ONCE: &str = "
tried = set()
def told(id, ask):
    if first and index[id] == 3 and index[id] not in tried:
        tried.add(index[id])
        return say(id=id, error='the container died', outcome='environment')
    say(id=id, samples=[{}])
index = {}
def asked(id, ask):
    index[id] = ask['index']
    say(id=id, generate={})
";

#[tokio::test(flavor = "multi_thread")]
async fn one_of_eight_answers_is_made_again_alone_with_other_draws() {
    let (dir, engine) = (tempfile::tempdir().unwrap(), Seeded::default());
    let room = Room::fake(ONCE, 60).await;
    let run = run(dir.path(), &room, &engine);
    let (group, since) = step(&run).await;
    assert_eq!((group, since.dropped), (0, Dropped::default()), "the group is learned from");
    assert_eq!(since.failures.by_name(), BTreeMap::from([(Failure::Environment, 1)]));
    assert_eq!(since.failures.made_again, 1);
    let group = run.logged_group(0).unwrap();
    let asked = engine.asked.lock().unwrap().clone();
    let twice: Vec<_> = asked.values().filter(|asked| asked.len() > 1).collect();
    assert_eq!((asked.len() as u64, twice.len()), (ANSWERS, 1), "{asked:?}");
    let [(before, _), (after, _)] = twice[0][..] else { panic!("{asked:?}") };
    assert_ne!(before, after);
    let response: Vec<i32> = (0..LENGTH).map(|at| token(after, at)).collect();
    assert_eq!(group.records[3].response(), response, "nothing of the first attempt");
}

#[tokio::test(flavor = "multi_thread")]
async fn attempt_that_a_crash_cut_off_goes_on_behind_its_own_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let room = Room::fake(ONCE, 60).await;
    let engine = Seeded { is_stuck: true, ..Seeded::default() };
    let before = run(dir.path(), &room, &engine);
    let running = tokio::spawn(before.clone().run());
    let log = before.log.reader();
    drop(before);
    // All of the first attempts, and two tokens of the second one.
    let durable = || records(&log, Kind::Partial).iter().map(|piece| piece.tokens().len()).sum::<usize>();
    while durable() < ANSWERS as usize * LENGTH + 2 || records(&log, Kind::Sample).len() < 7 {
        tokio::task::yield_now().await;
    }
    running.abort();
    assert!(running.await.unwrap_err().is_cancelled());
    let asked = engine.asked.lock().unwrap().clone();
    let (rid, asked) = asked.iter().find(|(_, asked)| asked.len() > 1).unwrap();
    let seed = asked[1].0;
    let kept = records(&log, Kind::Sample);
    drop(log);

    let engine = Seeded::default();
    let room = Room::fake(&ONCE.replace("first and", "False and"), 60).await;
    let after = run(dir.path(), &room, &engine);
    let (group, since) = step(&after).await;
    assert_eq!((group, since.dropped), (0, Dropped::default()));
    let drawn: Vec<i32> = (0..2).map(|at| token(seed, at)).collect();
    let asked = engine.asked.lock().unwrap().clone();
    assert_eq!(asked[rid], [(seed, drawn)], "the second attempt goes on, and the first is not made again");
    assert_eq!(asked.len(), 1, "no other answer is made again: {asked:?}");
    let group = after.logged_group(0).unwrap();
    let response: Vec<i32> = (0..LENGTH).map(|at| token(seed, at)).collect();
    assert_eq!(group.records[3].response(), response);
    for record in kept {
        let now = &group.records[record.scalars().sample_id as usize];
        assert_eq!((now.position(), now.tokens()), (record.position(), record.tokens()), "drawn once");
    }
}

/// The answers of these numbers, as Python has a list, fail for good.
async fn failing(numbers: &str, outcome: &str) -> Arc<Room> {
    let fails = format!(
        "index = {{}}
def asked(id, ask):
    index[id] = ask['index']
    say(id=id, generate={{}})
def told(id, ask):
    if index[id] in {numbers}: return say(id=id, error='so', outcome='{outcome}')
    say(id=id, samples=[{{}}])"
    );
    Room::fake(&fails, 60).await
}

#[tokio::test(flavor = "multi_thread")]
async fn group_goes_on_without_the_answers_that_fail_for_good() {
    for (numbers, outcome, attempts) in
        [(vec![3], "environment", 3), (vec![3], "parser", 1), (vec![0, 1, 2, 4], "parser", 1)]
    {
        let (dir, engine) = (tempfile::tempdir().unwrap(), Seeded::default());
        let room = failing(&format!("{numbers:?}"), outcome).await;
        let run = run(dir.path(), &room, &engine);
        let (group, since) = step(&run).await;
        assert_eq!((group, since.dropped), (0, Dropped::default()), "the group is learned from");
        let (failure, count) = (Failure::named(outcome).unwrap(), numbers.len() as u64);
        assert_eq!(since.failures.by_name(), BTreeMap::from([(failure, count * attempts)]));
        assert_eq!(since.failures.made_again, count * (attempts - 1));
        let log = run.log.reader();
        let left: Vec<u64> = (0..ANSWERS).filter(|answer| !numbers.contains(answer)).collect();
        let ids = |records: &[Record]| -> Vec<u64> {
            records.iter().map(|record| record.scalars().sample_id).collect()
        };
        assert_eq!(ids(&run.logged_group(0).unwrap().records), left);
        assert_eq!(ids(&records(&log, Kind::Score)), left, "what failed has no reward");
        let note = PromptNote::of(&log.prompt(0).unwrap().unwrap());
        assert_eq!((note.dropped, note.outcome), (None, None));
        let mut told = note.failed;
        told.sort_by_key(|failed| failed.answer);
        assert_eq!(told.iter().map(|failed| failed.answer).collect::<Vec<_>>(), numbers);
        assert!(
            told.iter().all(|one| one.outcome == failure && one.why.contains("its error: so")),
            "{told:?}"
        );
        // The next process has it as it is.
        let queue = Queue::open(Policy::new(Mode::Synchronous, 1, 1), &log, ANSWERS, 0, BTreeMap::new());
        assert_eq!(queue.batch(0), Some(vec![0]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn group_of_which_most_fail_is_left_out_with_the_last_outcome() {
    let (dir, engine) = (tempfile::tempdir().unwrap(), Seeded::default());
    let room = failing("[0, 1, 2, 4, 5]", "parser").await;
    let run = run(dir.path(), &room, &engine);
    let (group, since) = step(&run).await;
    assert_eq!((group, since.dropped.failed), (1, 1), "the next prompt takes its place");
    assert_eq!(since.failures.by_name(), BTreeMap::from([(Failure::Parser, 5)]));
    let note = PromptNote::of(&run.log.reader().prompt(0).unwrap().unwrap());
    assert!(note.outcome == Some(Failure::Parser) && note.dropped.unwrap().contains("its error: so"));
    assert_eq!(note.failed.len(), 4);
    let end = run.log.reader().prompt(0).unwrap().unwrap().position();
    let pieces = records(&run.log.reader(), Kind::Partial).into_iter();
    let late = pieces.filter(|piece| piece.scalars().group_id == 0 && piece.position() > end);
    assert_eq!(late.count(), 0, "what was drawn of a group lies before its end, and is removed with it");
    let scores = records(&run.log.reader(), Kind::Score);
    assert!(scores.iter().all(|score| score.scalars().group_id == 1), "no reward of a failed group");
}

/// The samples of a group's answers, and what their rewards are made of.
fn rewards(records: &[Record]) -> Vec<(u64, Vec<f32>)> {
    records.iter().map(|record| (record.scalars().sample_id, record.rewards().to_vec())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn group_goes_on_without_the_answers_that_get_no_reward() {
    let (dir, engine) = (tempfile::tempdir().unwrap(), Seeded::default());
    // One fails while it is made, and three when they are rewarded: four of eight may.
    let room = failing("[7]", "parser").await;
    let run = rewarded(dir.path(), &room, &engine, ByNumber { none: vec![0, 2, 5] });
    let (group, since) = step(&run).await;
    assert_eq!((group, since.dropped), (0, Dropped::default()), "the group is learned from");
    assert_eq!(since.failures.by_name(), BTreeMap::from([(Failure::Parser, 1), (Failure::Reward, 3)]));
    let log = run.log.reader();
    let left = [1, 3, 4, 6].map(|one: u64| {
        let reward = one as f32;
        (one, vec![reward, reward, 0.5, reward - 0.5])
    });
    assert_eq!(rewards(&run.logged_group(0).unwrap().records), left);
    let scores = records(&log, Kind::Score);
    assert_eq!(scores.len(), 4, "what failed has no score");
    assert_eq!(scores[0].metadata(), br#"{"components":{"half":0.5,"whole":0.5}}"#);
    let drawn: Vec<u64> = (0..7).collect();
    let mut samples: Vec<u64> =
        records(&log, Kind::Sample).iter().map(|record| record.scalars().sample_id).collect();
    samples.sort_unstable();
    assert_eq!(samples, drawn, "answers without a reward are in the log");
    let note = PromptNote::of(&log.prompt(0).unwrap().unwrap());
    let told = |record: &Record| note.failed_of(record).map(|failed| failed.outcome);
    let told: Vec<_> = records(&log, Kind::Sample).iter().filter_map(told).collect();
    assert_eq!(told, [Failure::Reward; 3]);
    // A try that a crash cut off may have left a score of one of them.
    let scalars = Scalars { sample_id: 2, reward: 2.0, ..Scalars::default() };
    let _ = run.log.append(&Sample { kind: Kind::Score, scalars, ..Sample::default() }).unwrap();
    assert_eq!(rewards(&run.logged_group(0).unwrap().records), left);
    // The next process has it as it is.
    let queue = Queue::open(Policy::new(Mode::Synchronous, 1, 1), &log, ANSWERS, 0, BTreeMap::new());
    assert_eq!(queue.batch(0), Some(vec![0]));
}

#[tokio::test(flavor = "multi_thread")]
async fn group_of_which_most_get_no_reward_is_left_out() {
    let (dir, engine) = (tempfile::tempdir().unwrap(), Seeded::default());
    let room = failing("[7]", "parser").await;
    let run = rewarded(dir.path(), &room, &engine, ByNumber { none: vec![0, 2, 3, 5] });
    let (group, since) = step(&run).await;
    assert_eq!((group, since.dropped.failed), (1, 1), "the next prompt takes its place");
    let note = PromptNote::of(&run.log.reader().prompt(0).unwrap().unwrap());
    assert!(note.outcome == Some(Failure::Reward) && note.dropped.unwrap().contains("asleep"));
}
