//! Tokens that are durable before their answer is: what a run that goes on makes of them.

use driftless_bridge::engine::{Drawn, context};

use super::*;

const RUN: [u8; 16] = [7; 16];
const LENGTH: usize = 6;

fn label(version: u64) -> Label {
    Label::new(&"07".repeat(16), version).unwrap()
}

/// An engine that draws the numbers from 1 on. It tells of two at a time, and stands still behind `stuck`.
#[derive(Default)]
struct Counting {
    stuck: Option<usize>,
    version: u64,
    /// Tokens that were drawn already, by request.
    drawn: Arc<Mutex<BTreeMap<String, Vec<i32>>>>,
}

#[async_trait]
impl Engines for Counting {
    async fn generate(
        &self,
        request: GenerateRequest,
        _minimum: Option<&Label>,
        told: Tell<'_>,
    ) -> driftless_bridge::Result<Generation> {
        let drawn = request.drawn.clone();
        self.drawn.lock().unwrap().insert(request.rid.to_string(), drawn.output_ids.clone());
        let (rest, label) = ((drawn.len()..LENGTH).collect::<Vec<_>>(), label(self.version).to_string());
        let mut drawn = drawn;
        for two in rest.chunks(2) {
            if self.stuck.is_some_and(|stuck| drawn.len() >= stuck) {
                std::future::pending::<()>().await;
            }
            let ids: Vec<i32> = two.iter().map(|at| *at as i32 % 9 + 1).collect();
            let log_probs = &vec![-0.5; ids.len()];
            let piece = Piece { output_ids: &ids, log_probs, label: &label, located: false, digest: None };
            let before = [request.input_ids.as_slice(), &drawn.output_ids].concat();
            let piece = piece.digested(request.rid, context(0, &before));
            told(piece);
            drawn.push(piece);
        }
        let Drawn { output_ids, log_probs, spans, replies, .. } = drawn;
        Ok(Generation {
            rid: request.rid,
            engine: "counting".into(),
            output_ids,
            log_probs,
            spans,
            spans_reported: true,
            finish: Finish::Stop,
            retractions: 0,
            cached_tokens: None,
            replies,
        })
    }
}

/// The log, once the run before has let go of it.
fn log(dir: &Path) -> Log {
    loop {
        let identity = Identity { run_id: RUN, model: "policy".into(), tokenizer_digest: [0; 32] };
        match Log::open(dir.join("log"), Options::new(identity)) {
            Err(buffer::Error::Locked { .. }) => std::thread::yield_now(),
            opened => return opened.unwrap(),
        }
    }
}

/// Rollouts of one group, with this engine and the weights of this version or later.
fn counting(dir: &Path, engine: Counting) -> Arc<Rollouts> {
    let log = log(dir);
    let policy = Policy::new(Mode::Synchronous, 1, 1);
    let queue = Queue::open(policy, &log.reader(), SAMPLES, 0, BTreeMap::new());
    queue.published(0, Some(label(engine.version)));
    Arc::new(Rollouts {
        engines: Arc::new(engine),
        task: task(dir, &["a"; 3], 0),
        log,
        progress: Arc::new(|_, _, _| {}),
        queue: Arc::new(queue),
        options: RolloutOptions::new(1, SAMPLES).with_scope(1),
    })
}

/// Ends a run, or one that goes on, whose engine stands still behind `stuck` tokens, once all lives have left so many durable
/// ones of each answer.
async fn interrupted_behind(dir: &Path, stuck: usize, durable_of_all: usize, version: u64) {
    let engine = Counting { stuck: Some(stuck), version, ..Counting::default() };
    let run = counting(dir, engine);
    let running = Running::start(run.clone());
    let log = run.log.reader();
    drop(run);
    let durable = || {
        let partial = |record: &buffer::Record| record.kind() == buffer::Kind::Partial;
        let partials = log.iter(buffer::Position(0)).map(Result::unwrap).filter(partial);
        partials.map(|record| record.tokens().len()).sum::<usize>()
    };
    while durable() < durable_of_all * SAMPLES as usize {
        tokio::task::yield_now().await;
    }
    running.close().await;
}

/// Finishes the group, and returns the tokens that engines did not draw again, and the records.
async fn finished(dir: &Path, version: u64) -> (Vec<Vec<i32>>, buffer::Group) {
    let engine = Counting { version, ..Counting::default() };
    let drawn = engine.drawn.clone();
    let run = counting(dir, engine);
    let running = Running::start(run.clone());
    assert_eq!(take(&run, 0).await.0, [0]);
    let group = run.logged_group(0).unwrap();
    drop(run);
    running.close().await;
    let drawn = drawn.lock().unwrap().values().cloned().collect();
    (drawn, group)
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_goes_on_behind_its_durable_tokens_after_a_crash() {
    let dir = tempfile::tempdir().unwrap();
    // Twice, so that pieces of two lives follow on each other.
    interrupted_behind(dir.path(), 2, 2, 1).await;
    interrupted_behind(dir.path(), 4, 4, 1).await;
    let (drawn, group) = finished(dir.path(), 1).await;
    assert_eq!(drawn, vec![vec![1, 2, 3, 4]; SAMPLES as usize]);
    for record in &group.records {
        assert_eq!(record.tokens()[record.prompt_len()..], [1, 2, 3, 4, 5, 6]);
        assert_eq!(record.log_probs(), [-0.5; LENGTH]);
        let first = record.times()[1];
        assert!(first > 0 && first <= record.times()[2], "{:?}", record.times());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_with_tokens_older_than_asked_begins_anew() {
    let dir = tempfile::tempdir().unwrap();
    interrupted_behind(dir.path(), 4, 4, 1).await;
    // Of this life all tokens are young enough, and the next one goes on behind them: four old ones and two new ones.
    interrupted_behind(dir.path(), 2, 6, 2).await;
    let (drawn, group) = finished(dir.path(), 2).await;
    assert_eq!(drawn, vec![vec![1, 2]; SAMPLES as usize]);
    assert_eq!(group.versions, Some((2, 2)));
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_to_another_input_begins_anew() {
    let dir = tempfile::tempdir().unwrap();
    interrupted_behind(dir.path(), 4, 4, 1).await;
    let log = log(dir.path());
    // What a hook that asks for something else leaves: the same generation of the same answer.
    let note = br#"{"nth":0,"input":1,"behind":4}"#;
    let other = Sample {
        kind: buffer::Kind::Partial,
        scalars: Scalars { status: buffer::Finish::Abort.code(), ..Scalars::default() },
        tokens: &[8],
        log_probs: &[-0.5],
        loss_mask: &[1],
        spans: &[buffer::VersionSpan { version: 1, start: 0, end: 1 }],
        metadata: note,
        ..Sample::default()
    };
    log.append_all(&[other]).unwrap();
    drop(log);
    let (drawn, _) = finished(dir.path(), 1).await;
    assert_eq!(drawn, vec![vec![1, 2, 3, 4]; SAMPLES as usize], "it is not taken for this one's");
}
