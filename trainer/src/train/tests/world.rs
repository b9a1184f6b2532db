//! What lies outside the loop: engines, rewards, prompts and the moments at which a process dies, all of them functions
//! of a seed and of simulated time.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use driftless_bridge::engine::{Finish, Piece, Tell, context};
use driftless_bridge::{GenerateRequest, Generation, Label, Rid};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, sleep};

use crate::data::Tokenizer;
use crate::error::{Error, Place, Result};
use crate::reward::{Given, Reward};
use crate::sample::{Answer, Engines, Prompt};
use crate::seed::mix;
use crate::tasks::DataSource;

/// Engines of the fleet. Every second one streams.
const ENGINES: u64 = 4;
/// Time for a token.
const TOKEN: Duration = Duration::from_millis(1);
/// Tokens of the longest answer.
const LENGTH_MAX: f64 = 400.0;
/// Of the logarithm of lengths: their 99th percentile is 10 times the median.
const SIGMA: f64 = std::f64::consts::LN_10 / 2.326;

/// A number that nothing else draws: `what` of the thing of this number.
pub(super) fn draw(seed: u64, what: &str, number: u64) -> u64 {
    let what = what.bytes().fold(0, |hash: u64, byte| hash.wrapping_mul(0x0100_0000_01b3) ^ u64::from(byte));
    mix(mix(seed ^ mix(what)) ^ number)
}

/// The same, from 0 up to 1.
pub(super) fn share(seed: u64, what: &str, number: u64) -> f64 {
    (draw(seed, what, number) >> 11) as f64 / (1u64 << 53) as f64
}

/// What is drawn of an answer at a place by weights of a version: the token, and its log-probability.
pub(super) fn token(seed: u64, answer: u64, at: usize, version: u64) -> (i32, f32) {
    let drawn = draw(seed, "token", mix(answer) ^ mix(at as u64) ^ mix(version).rotate_left(9));
    // Ids of the tokenizer that are digits, and a number that `f32` has.
    (3 + (drawn % 10) as i32, -((drawn >> 32) as u16 as f32))
}

/// Tokens of an answer.
pub(super) fn length(seed: u64, answer: u64) -> usize {
    let (a, b) = (share(seed, "length", answer), share(seed, "length too", answer));
    let normal = (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos();
    (8.0 * (SIGMA * normal).exp()).clamp(1.0, LENGTH_MAX) as usize
}

/// What outlives a process of the run.
pub(super) struct World {
    pub(super) seed: u64,
    run: String,
    /// Requests that engines work on at a time.
    places: usize,
    state: Mutex<State>,
}

struct State {
    /// When this process began.
    began: Instant,
    /// Time before that.
    before: Duration,
    /// When each version was published.
    published: Vec<Duration>,
    /// Things that this process may still do.
    left: u64,
    is_dead: bool,
    /// Told when it dies.
    killed: Arc<Notify>,
    /// Of each answer that may go on: durable tokens when this process began, and the oldest version of them.
    durable: HashMap<u64, (usize, u64)>,
    /// Requests so far.
    asked: u64,
    trace: u64,
}

impl World {
    pub(super) fn new(seed: u64, run: &[u8; 16], places: usize) -> Arc<Self> {
        let state = State {
            began: Instant::now(),
            before: Duration::ZERO,
            published: vec![Duration::ZERO],
            left: 0,
            is_dead: false,
            killed: Arc::default(),
            durable: HashMap::new(),
            asked: 0,
            trace: seed,
        };
        let run = run.iter().map(|byte| format!("{byte:02x}")).collect();
        Arc::new(World { seed, run, places, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(super) fn label(&self, version: u64) -> Label {
        Label::new(&self.run, version).unwrap()
    }

    /// A process begins, which may do so many things. Returns what is told when it is killed.
    pub(super) fn begin(&self, left: u64, durable: HashMap<u64, (usize, u64)>) -> Arc<Notify> {
        let mut state = self.state();
        (state.began, state.left, state.is_dead, state.durable) = (Instant::now(), left, false, durable);
        state.killed = Arc::default();
        state.killed.clone()
    }

    /// A process ends; called on its runtime.
    pub(super) fn end(&self) {
        let mut state = self.state();
        let lived = state.began.elapsed();
        state.before += lived + Duration::from_secs(1);
    }

    /// Time since the run began.
    pub(super) fn now(&self) -> Duration {
        let state = self.state();
        state.before + state.began.elapsed()
    }

    /// What happened so far and when, as one number.
    pub(super) fn trace(&self) -> u64 {
        self.state().trace
    }

    /// Something happens, unless the process is killed right before it.
    pub(super) async fn happens(&self, what: &str, number: u64) {
        let now = self.now();
        let goes_on = {
            let mut state = self.state();
            state.is_dead |= state.left == 0;
            if !state.is_dead {
                state.left -= 1;
                state.trace = draw(state.trace, what, mix(number) ^ now.as_micros() as u64);
            }
            !state.is_dead
        };
        if !goes_on {
            self.state().killed.notify_one();
            std::future::pending::<()>().await;
        }
    }

    /// Publishes the weights of so many steps, unless an earlier process has. Returns the newest version.
    pub(super) fn publish(&self, version: u64) -> u64 {
        let now = self.now();
        let mut state = self.state();
        if state.published.len() as u64 == version {
            state.published.push(now);
        }
        state.published.len() as u64 - 1
    }

    /// The version that an engine has now: each follows at its own distance.
    fn version(&self, engine: u64) -> u64 {
        let (now, behind) = (self.now(), Duration::from_millis(3 * engine));
        let published = &self.state().published;
        (published.partition_point(|at| *at + behind <= now) as u64).saturating_sub(1)
    }

    /// How an answer ends that is lost in this fleet, if it is: no engine has taken it in time.
    fn is_lost(&self) -> bool {
        let mut state = self.state();
        state.asked += 1;
        share(self.seed, "lost", state.asked) < 0.001
    }

    /// Refuses what an engine is given to go on with, if it was drawn otherwise or is not all that was durable.
    fn check_drawn(&self, answer: u64, request: &GenerateRequest, minimum: Option<&Label>) {
        let drawn = &request.drawn;
        for span in &drawn.spans {
            let version = span.label.parse::<Label>().unwrap().version();
            for at in span.start as usize..span.end as usize {
                let found = (drawn.output_ids[at], drawn.log_probs[at]);
                assert_eq!(found, token(self.seed, answer, at, version), "answer {answer}, token {at}");
            }
        }
        let Some((durable, oldest)) = self.state().durable.remove(&answer) else { return };
        if minimum.is_none_or(|minimum| oldest >= minimum.version()) {
            assert_eq!(drawn.len(), durable, "answer {answer}: durable tokens would be drawn twice");
        }
    }
}

/// Engines of the world, as one process sees them.
pub(super) struct Fleet {
    pub(super) world: Arc<World>,
    places: Semaphore,
    answers: u64,
}

impl Fleet {
    /// Of a run with so many answers to each prompt.
    pub(super) fn new(world: Arc<World>, answers: u64) -> Self {
        Fleet { places: Semaphore::new(world.places), world, answers }
    }

    fn answer_of(&self, request: &GenerateRequest) -> u64 {
        let group = request.affinity.unwrap();
        let mut answers = group * self.answers..(group + 1) * self.answers;
        answers.find(|answer| Rid::new(1, *answer) == request.rid).unwrap()
    }
}

#[async_trait]
impl Engines for Fleet {
    async fn generate(
        &self,
        request: GenerateRequest,
        minimum: Option<&Label>,
        told: Tell<'_>,
    ) -> driftless_bridge::Result<Generation> {
        let (world, answer) = (&self.world, self.answer_of(&request));
        world.check_drawn(answer, &request, minimum);
        let _place = self.places.acquire().await.unwrap();
        world.happens("asked", answer).await;
        if world.is_lost() {
            let (rid, after) = (request.rid.to_string(), Duration::from_secs(600));
            sleep(20 * TOKEN).await;
            return Err(driftless_bridge::Error::Exhausted { rid, after, attempts: vec![] });
        }
        let mut engine = draw(world.seed, "engine", answer) % ENGINES;
        let mut all = request.drawn.clone();
        let mut told_of = all.len();
        let (length, mut tries) = (length(world.seed, answer), 0);
        while all.len() < length {
            tries += 1;
            let number = draw(world.seed, "piece", mix(answer) ^ tries);
            let count = (1 + number as usize % 24).min(length - all.len());
            sleep(TOKEN * count as u32).await;
            if number >> 32 & 0xff == 0 {
                // Its engine dies, and what that had not told of is lost.
                engine = (engine + 1) % ENGINES;
                all.truncate(told_of);
                sleep(10 * TOKEN).await;
                continue;
            }
            while minimum.is_some_and(|minimum| world.version(engine) < minimum.version()) {
                sleep(TOKEN).await;
            }
            let (version, places) = (world.version(engine), all.len()..all.len() + count);
            let tokens = places.map(|at| token(world.seed, answer, at, version));
            let (output_ids, log_probs): (Vec<_>, Vec<_>) = tokens.unzip();
            let label = world.label(version).to_string();
            let piece = Piece {
                output_ids: &output_ids,
                log_probs: &log_probs,
                label: &label,
                located: true,
                digest: None,
            };
            let before = [request.input_ids.as_slice(), &all.output_ids].concat();
            let piece = piece.digested(request.rid, context(0, &before));
            all.push(piece);
            if engine.is_multiple_of(2) {
                told(piece);
                told_of = all.len();
                world.happens("told", answer).await;
            }
        }
        world.happens("drawn", answer).await;
        Ok(Generation {
            rid: request.rid,
            engine: format!("http://10.0.0.{engine}:30000"),
            output_ids: all.output_ids,
            log_probs: all.log_probs,
            spans: all.spans,
            replies: all.replies,
            spans_reported: true,
            finish: Finish::Stop,
            retractions: 0,
            cached_tokens: None,
        })
    }
}

/// Prompts and rewards of the world.
pub(super) struct Data {
    world: Arc<World>,
    tokenizer: Tokenizer,
}

impl std::fmt::Debug for Data {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Data")
    }
}

impl Data {
    /// With the tokenizer of this directory.
    pub(super) fn new(world: Arc<World>, dir: &Path) -> Self {
        Data { world, tokenizer: Tokenizer::open(dir).unwrap() }
    }
}

#[async_trait]
impl DataSource for Data {
    fn check(&self, _checkpoint: &Path) -> Result<()> {
        Ok(())
    }

    async fn prompt(&self, number: u64) -> Result<Prompt> {
        self.world.happens("prompt", number).await;
        let place = Place { path: Path::new("simulated").into(), line: number };
        let tokens = vec![3 + (number % 10) as i32];
        Ok(Prompt::of_tokens(tokens, place))
    }

    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }
}

/// What becomes of a group whose answers are all there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Worth {
    Kept,
    /// All its rewards are equal.
    Filtered,
    Failed,
    /// Its second answer has no reward.
    Partly,
}

/// What becomes of this group.
pub(super) fn worth(seed: u64, group: u64) -> Worth {
    match draw(seed, "worth", group) % 32 {
        0 | 1 => Worth::Filtered,
        2 => Worth::Failed,
        3 | 4 => Worth::Partly,
        _ => Worth::Kept,
    }
}

#[async_trait]
impl Reward for Data {
    async fn score(&self, answers: &[Answer]) -> Result<Vec<Result<Given>>> {
        let Some(first) = answers.first() else { return Ok(Vec::new()) };
        let group = first.sample / answers.len() as u64;
        self.world.happens("scored", group).await;
        if share(self.world.seed, "away", self.world.now().as_millis() as u64) < 0.001 {
            let (expected, todo) = ("an answer".to_owned(), "start it again");
            let (sample, found) = (first.sample, "none".to_owned());
            return Err(Error::Reward { sample, expected, found, todo, is_away: true });
        }
        let reward = |at: usize| match worth(self.world.seed, group) {
            Worth::Filtered => 1.0,
            Worth::Partly if at == 1 => f32::NAN,
            Worth::Kept | Worth::Partly => at as f32,
            Worth::Failed => f32::NAN,
        };
        Ok((0..answers.len()).map(|at| Ok(reward(at).into())).collect())
    }
}
