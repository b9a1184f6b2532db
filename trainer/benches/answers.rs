//! What rollouts cost beside the engines: the real executor, queue and log, with engines that answer at once.
//!
//! `cargo bench -p driftless-trainer --bench answers -- DIRECTORY [PART...]` (on the disk to measure; 3 GB; a minute).
//! `whole`: replies of 256 ids behind prompts of 1,000. `streamed`: answers of 2,000 ids in pieces of 64. `durable`: 20,000
//! streamed tokens a second, and for how long an answer is not durable behind its last token, beside the disk's own
//! fdatasync in the same seconds. `under_way`: 10,000 answers of 2,000 ids that do not end, and the memory that they take.

#![expect(clippy::expect_used, reason = "a benchmark that cannot measure has nothing to say")]

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use driftless_bridge::engine::{Finish, Piece, Tell, VersionSpan};
use driftless_bridge::{GenerateRequest, Generation, Label};
use driftless_buffer::{Identity, Log, Options, SyncPolicy};
use driftless_trainer::Result;
use driftless_trainer::data::{Place, Tokenizer};
use driftless_trainer::options::Mode;
use driftless_trainer::reward::{Given, Reward};
use driftless_trainer::rollout::{Policy, Queue, RolloutOptions, Rollouts};
use driftless_trainer::sample::{Answer, Engines, Prompt};
use driftless_trainer::tasks::{DataSource, Task, tiny};
use tokio::sync::Semaphore;

/// Groups of a step; each has one answer.
const BATCH: u64 = 64;
const PROMPT: usize = 1000;
/// Ids of a piece of a stream.
const PIECE: usize = 64;
/// Answers that are streamed at a time.
const STREAMS: u64 = 5 * BATCH;
/// Ids of a streamed answer.
const STREAMED: usize = 2000;
const LABEL: &str = "3f0c9a12b7de:1";

/// How engines answer.
#[derive(Clone, Copy)]
enum Manner {
    Whole(usize),
    /// A piece, and then this pause.
    Streamed(Duration),
    /// All pieces, and no end.
    Endless,
}

struct NoOp {
    manner: Manner,
    tokens: AtomicU64,
    /// When the last token of each answer was drawn.
    ends: Arc<Mutex<HashMap<u64, Instant>>>,
}

#[async_trait]
impl Engines for NoOp {
    async fn generate(
        &self,
        request: GenerateRequest,
        _minimum: Option<&Label>,
        told: Tell<'_>,
    ) -> driftless_bridge::Result<Generation> {
        let length = if let Manner::Whole(length) = self.manner { length } else { STREAMED };
        let (output_ids, log_probs) = (vec![3; length], vec![-0.5; length]);
        if let Manner::Streamed(pause) = self.manner {
            // Answers of a step begin at once, and would all have their pieces at once.
            let at = request.affinity.unwrap_or_default() % STREAMS;
            tokio::time::sleep(pause.mul_f64(at as f64 / STREAMS as f64)).await;
        }
        if !matches!(self.manner, Manner::Whole(_)) {
            for (ids, log_probs) in output_ids.chunks(PIECE).zip(log_probs.chunks(PIECE)) {
                let piece = Piece { output_ids: ids, log_probs, label: LABEL, located: false, digest: None };
                // Behind what is of no account to what it costs.
                told(piece.digested(request.rid, 0));
                if let Manner::Streamed(pause) = self.manner {
                    tokio::time::sleep(pause).await;
                }
            }
        }
        self.tokens.fetch_add(length as u64, Relaxed);
        if let Manner::Endless = self.manner {
            std::future::pending::<()>().await;
        }
        self.ends.lock().expect("a lock").insert(request.affinity.unwrap_or_default(), Instant::now());
        let spans = vec![VersionSpan { label: LABEL.to_owned(), start: 0, end: length as u32 }];
        Ok(Generation {
            rid: request.rid,
            engine: "http://127.0.0.1:30000".into(),
            output_ids,
            log_probs,
            spans,
            spans_reported: true,
            finish: Finish::Stop,
            retractions: 0,
            cached_tokens: None,
            replies: Vec::new(),
        }
        .digested(&request.input_ids))
    }
}

#[derive(Debug)]
struct Same(Tokenizer);

#[async_trait]
impl DataSource for Same {
    fn check(&self, _checkpoint: &Path) -> Result<()> {
        Ok(())
    }
    async fn prompt(&self, number: u64) -> Result<Prompt> {
        let place = Place { path: Path::new("same").into(), line: number };
        Ok(Prompt::of_tokens(vec![4; PROMPT], place))
    }
    fn tokenizer(&self) -> &Tokenizer {
        &self.0
    }
}

/// Is asked as soon as an answer is durable, and notes when.
#[derive(Debug)]
struct Noted {
    ends: Arc<Mutex<HashMap<u64, Instant>>>,
    late: Arc<Mutex<Vec<Duration>>>,
}

#[async_trait]
impl Reward for Noted {
    async fn score(&self, answers: &[Answer]) -> Result<Vec<Result<Given>>> {
        for answer in answers {
            if let Some(end) = self.ends.lock().expect("a lock").remove(&answer.sample) {
                self.late.lock().expect("a lock").push(end.elapsed());
            }
        }
        Ok(answers.iter().map(|_| Ok(0.5.into())).collect())
    }
}

struct Scene {
    rollouts: Arc<Rollouts>,
    engines: Arc<NoOp>,
    late: Arc<Mutex<Vec<Duration>>>,
}

fn scene(dir: &Path, manner: Manner, mode: Mode, batch: u64) -> Scene {
    std::fs::create_dir_all(dir).expect("a directory");
    std::fs::write(dir.join("tokenizer.json"), tiny::tokenizer().to_string()).expect("a tokenizer");
    let tokenizer = Tokenizer::open(dir).expect("a tokenizer");
    let mut options =
        Options::new(Identity { run_id: [7; 16], model: "policy".into(), tokenizer_digest: [0; 32] });
    options.sync = SyncPolicy::Manual;
    let log = Log::open(dir.join("log"), options).expect("a log");
    let queue = Queue::open(Policy::new(mode, batch, u64::MAX), &log.reader(), 1, 0, BTreeMap::new());
    queue.published(0, None);
    let (ends, late) = (Arc::default(), Arc::default());
    let engines = Arc::new(NoOp { manner, tokens: AtomicU64::new(0), ends: Arc::clone(&ends) });
    let reward = Noted { ends, late: Arc::clone(&late) };
    let rollouts = Arc::new(Rollouts {
        engines: engines.clone(),
        task: Task::new(Arc::new(Same(tokenizer)), Arc::new(reward)),
        log,
        progress: Arc::new(|_, _, _| {}),
        queue: Arc::new(queue),
        options: RolloutOptions::new(batch, 1).with_scope(1),
    });
    Scene { rollouts, engines, late }
}

impl Scene {
    /// Takes so many steps, as they come.
    async fn steps(&self, steps: u64) {
        let generation = tokio::spawn(self.rollouts.clone().run());
        let queue = &self.rollouts.queue;
        for step in 0..steps {
            let groups = loop {
                match queue.batch(step) {
                    Some(groups) => break groups,
                    None => queue.wait().await,
                }
            };
            let _ = queue.take(step, groups, &[]);
            queue.published(step + 1, None);
            queue.trained(step + 1);
        }
        generation.abort();
    }
}

/// Seconds for which this process computed.
fn computed() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("a process");
    let fields: Vec<&str> = stat.rsplit(')').next().expect("fields").split_whitespace().collect();
    let ticks: f64 = fields[11..13].iter().map(|field| field.parse::<f64>().expect("ticks")).sum();
    // Linux tells them in hundredths, whatever the kernel's own are.
    ticks / 100.0
}

/// MiB that are this process's own.
fn memory() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a process");
    let line = status.lines().find(|line| line.starts_with("RssAnon")).expect("a line");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<f64>().ok()).expect("a number") / 1024.0
}

/// Time and computing of `work`, in seconds.
async fn timed(work: impl Future<Output = ()>) -> (f64, f64) {
    let (begin, before) = (Instant::now(), computed());
    work.await;
    (begin.elapsed().as_secs_f64(), computed() - before)
}

fn percentile(times: &mut [Duration], share: f64) -> f64 {
    times.sort();
    let at = ((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1));
    1e3 * times.get(at).map_or(f64::NAN, Duration::as_secs_f64)
}

async fn whole(dir: &Path) {
    let steps = 300;
    let scene = scene(dir, Manner::Whole(256), Mode::Bounded { max_staleness: 7 }, BATCH);
    let (wall, computed) = timed(scene.steps(steps)).await;
    let answers = (steps * BATCH) as f64;
    let (rate, each) = (answers / wall, 1e6 * computed / answers);
    println!(
        "whole      {rate:.0} replies/s of 1,000 ids in and 256 out; {each:.0} µs of computing each: {:.0} % of a core at 2,000/s (target 25 %)",
        100.0 * 2000.0 * computed / answers
    );
}

async fn streamed(dir: &Path) {
    let steps = 40;
    let scene = scene(dir, Manner::Streamed(Duration::ZERO), Mode::Bounded { max_staleness: 7 }, BATCH);
    let (wall, computed) = timed(scene.steps(steps)).await;
    let tokens = scene.engines.tokens.load(Relaxed) as f64;
    println!(
        "streamed   {:.0} tokens/s in pieces of {PIECE}; {:.3} µs of computing a token (target 1)",
        tokens / wall,
        1e6 * computed / tokens
    );
}

/// The disk's own time for a record of this size, again and again until it is stopped.
fn fdatasync(path: PathBuf, stop: &AtomicBool) -> Vec<Duration> {
    let mut file = File::create(path).expect("a file");
    let mut times = Vec::new();
    while !stop.load(Relaxed) {
        file.write_all(&[7; 16 << 10]).expect("a disk");
        let begin = Instant::now();
        file.sync_data().expect("a disk");
        times.push(begin.elapsed());
        std::thread::sleep(Duration::from_millis(5));
    }
    times
}

async fn durable(dir: &Path) {
    // 320 answers at a time with a piece every 1.024 s: 20,000 tokens a second.
    let pause = Duration::from_millis(1024);
    let scene = scene(dir, Manner::Streamed(pause), Mode::Bounded { max_staleness: 4 }, BATCH);
    let stop = Arc::new(AtomicBool::new(false));
    let (path, stopped) = (dir.join("beside"), stop.clone());
    let disk = std::thread::spawn(move || fdatasync(path, &stopped));
    let (wall, computed) = timed(scene.steps(6)).await;
    stop.store(true, Relaxed);
    let (mut disk, mut late) =
        (disk.join().expect("a thread"), std::mem::take(&mut *scene.late.lock().expect("a lock")));
    let (tokens, answers) = (scene.engines.tokens.load(Relaxed) as f64, late.len());
    println!(
        "durable    {answers} answers at {:.0} tokens/s: durable behind the last token after {:.2} ms p50, {:.2} p99; fdatasync of this disk {:.2} p50, {:.2} p99 (target: its p99 + 3); {:.0} % of a core",
        tokens / wall,
        percentile(&mut late, 0.5),
        percentile(&mut late, 0.99),
        percentile(&mut disk, 0.5),
        percentile(&mut disk, 0.99),
        100.0 * computed / wall
    );
}

async fn under_way(dir: &Path) {
    let answers = 10_000;
    let before = memory();
    let scene = scene(dir, Manner::Endless, Mode::Synchronous, answers);
    let generation = tokio::spawn(scene.rollouts.clone().run());
    let all = Semaphore::new(0);
    while scene.engines.tokens.load(Relaxed) < answers * STREAMED as u64 {
        // Nothing says when; a look costs nothing.
        let _ = tokio::time::timeout(Duration::from_millis(50), all.acquire()).await;
    }
    println!("under_way  {answers} answers of {STREAMED} ids: {:.0} MiB (target 500)", memory() - before);
    generation.abort();
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let Some(root) = arguments.next() else {
        eprintln!(
            "usage: answers DIRECTORY [PART...] (on the disk to measure; parts: whole streamed durable under_way)"
        );
        std::process::exit(2);
    };
    let chosen: Vec<String> = arguments.collect();
    let root = PathBuf::from(root).join(format!("answers-{}", std::process::id()));
    let is_chosen = |part: &str| chosen.is_empty() || chosen.iter().any(|one| one == part);
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    println!("load before: {}", std::fs::read_to_string("/proc/loadavg").unwrap_or_default().trim());
    runtime.block_on(async {
        if is_chosen("under_way") {
            under_way(&root.join("under_way")).await;
        }
        if is_chosen("whole") {
            whole(&root.join("whole")).await;
        }
        if is_chosen("streamed") {
            streamed(&root.join("streamed")).await;
        }
        if is_chosen("durable") {
            durable(&root.join("durable")).await;
        }
    });
    runtime.shutdown_background();
    std::fs::remove_dir_all(&root).expect("a directory that can be removed");
}
