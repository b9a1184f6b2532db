//! Clients of an answer: what a hook asks of the policy by OpenAI's and Anthropic's protocols, itself or by an agent that it
//! starts. Tokens are drawn as those of the hook's own generations are, so that the same is kept and proven of them.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use driftless_agent::gateway::{Gateway, GatewayOptions};
use driftless_agent::message::{Answer, Ask, Converse, Refusal};
use driftless_agent::sessions::{Draw, Opening, Sessions, Settings};
use driftless_agent::{Family, session::Sample};
use driftless_bridge::{Generation, SamplingParams};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use super::sample::Claim;
use super::{Fault, GENERATIONS_MAX, HookOptions};
use crate::data;
use crate::error::Result;
use crate::failure::Failure;
use crate::sample::Turn;

/// Requests of one answer that are drawn or wait at once.
const WAITING_MAX: usize = 64;
/// Requests of all answers.
const ASKS_MAX: usize = 8192;

/// The gateway of a run, at which each answer has a session while it is made.
#[derive(Debug)]
pub(super) struct Clients {
    gateway: Gateway,
    sessions: Arc<Sessions<Arc<Seats>>>,
    seats: Arc<Seats>,
    /// Tokens that the model's prompt and answer may have together, where that is known.
    context: Option<usize>,
    opened: AtomicU64,
}

/// Who draws for which session.
#[derive(Debug, Default)]
struct Seats(Mutex<HashMap<String, Answering>>);

#[derive(Debug, Clone)]
struct Answering {
    asks: mpsc::Sender<Asked>,
    busy: Arc<watch::Sender<Busy>>,
    /// Why a client got no answer to what it asked for last.
    refused: Arc<Mutex<Option<Failure>>>,
    /// Tokens of a conversation and its next answer.
    context: usize,
}

/// Tokens that are to be drawn.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) nth: u64,
    pub(super) input_ids: Vec<i32>,
    pub(super) sampling: SamplingParams,
    pub(super) reply: oneshot::Sender<Result<Generation, Refusal>>,
}

/// Requests that wait for tokens, and since when there are so many.
#[derive(Debug, Clone, Copy)]
struct Busy {
    asks: usize,
    since: Instant,
}

impl Clients {
    /// Serves on a free port of loopback, with the template and the tokenizer of a checkpoint.
    pub(super) fn start(checkpoint: &Path, of: &HookOptions) -> Result<Self> {
        let seats = Arc::new(Seats::default());
        let thoughts = of.thoughts;
        let settings = Settings {
            context: usize::MAX,
            asks: WAITING_MAX,
            thoughts,
            // The loop has deadlines of its own for what an engine draws, and the session ends with its answer.
            deadline: Duration::from_secs(86_400),
            ..Settings::default()
        };
        let family = Family::open_with(checkpoint, of.variables.as_deref())?;
        let sessions = Sessions::in_memory(family, seats.clone(), settings);
        let sessions = Arc::new(sessions);
        let mut options = GatewayOptions::new(false);
        options.asks_max = ASKS_MAX;
        let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let heard = Heard { sessions: sessions.clone(), seats: seats.clone() };
        let gateway = Gateway::start(free, options, Arc::new(heard))?;
        let context = data::context(checkpoint)?;
        Ok(Clients { gateway, sessions, seats, context, opened: AtomicU64::new(0) })
    }

    /// What conversations are written with.
    pub(super) fn family(&self) -> &Family {
        self.sessions.family()
    }

    /// A session for an answer.
    pub(super) async fn open(&self, turn: &Turn<'_>) -> Result<Seat, Fault> {
        let (answer, sampling) = (turn.sample, turn.sampling.clone());
        let bounds = [turn.max_context_len, self.context];
        let context = bounds.into_iter().flatten().min().unwrap_or(usize::MAX);
        let nth = self.opened.fetch_add(1, Ordering::Relaxed);
        let session = format!("{answer}-{nth}");
        let api_key = format!("{:032x}", rand::random::<u128>());
        let (sender, asks) = mpsc::channel(WAITING_MAX);
        let busy = Arc::new(watch::Sender::new(Busy { asks: 0, since: Instant::now() }));
        let refused = Arc::new(Mutex::default());
        let answering = Answering { asks: sender, busy: busy.clone(), refused: refused.clone(), context };
        self.seats.lock().insert(session.clone(), answering);
        let seat = Seat {
            base_url: format!("http://{}/s/{session}/v1", self.gateway.addr()),
            api_key: api_key.clone(),
            asks,
            busy: busy.subscribe(),
            refused,
            context,
            session,
            sessions: self.sessions.clone(),
            seats: self.seats.clone(),
            runtime: Handle::current(),
        };
        let opening = Opening { key: Some(api_key), sampling };
        let opened = self.sessions.open(&seat.session, opening).await;
        opened.map_err(|refusal| Fault::of("a session for the answer's clients", refusal))?;
        Ok(seat)
    }
}

/// The session of an answer. It ends with this value.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) base_url: String,
    pub(super) api_key: String,
    asks: mpsc::Receiver<Asked>,
    busy: watch::Receiver<Busy>,
    refused: Arc<Mutex<Option<Failure>>>,
    context: usize,
    session: String,
    sessions: Arc<Sessions<Arc<Seats>>>,
    seats: Arc<Seats>,
    runtime: Handle,
}

impl Seat {
    /// What a client asks next.
    pub(super) async fn next(&mut self) -> Option<Asked> {
        self.asks.recv().await
    }

    /// How long is waited for the hook: `deadline` of the time in which no client waits for tokens.
    pub(super) fn patience(&self, deadline: Duration) -> Patience {
        Patience { deadline, busy: Some(self.busy.clone()) }
    }

    /// Why a client got no answer to what it asked for last.
    pub(super) fn refused(&self) -> Option<Failure> {
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The conversations that clients had, as samples; none if they had none. Nothing is drawn for them from now on.
    pub(super) async fn claims(&mut self) -> Result<Vec<Claim>, Fault> {
        self.asks.close();
        // Whoever waits is refused with what is dropped here.
        while self.asks.try_recv().is_ok() {}
        let samples = self.sessions.samples(&self.session, false, self.context).await;
        let samples = samples.map_err(|refusal| Fault::of("the conversations of the answer", refusal))?;
        Ok(samples.into_iter().map(claim).collect())
    }
}

impl Asked {
    /// Itself, if the answer has room beside `count` generations. Otherwise its client is told.
    pub(super) fn within(self, count: usize) -> Option<Self> {
        if count < GENERATIONS_MAX {
            return Some(self);
        }
        let words = format!("an answer has at most {GENERATIONS_MAX} generations");
        // It may have gone.
        let _ = self.reply.send(Err(Refusal::Over(words)));
        None
    }
}

fn claim(sample: Sample) -> Claim {
    let Sample { tokens, prompt_len, loss_mask, .. } = sample;
    let (tokens, prompt_len, loss_mask) = (Some(tokens), Some(prompt_len), Some(loss_mask));
    Claim { tokens, prompt_len, loss_mask, ..Claim::default() }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.seats.lock().remove(&self.session);
        let (sessions, session) = (self.sessions.clone(), std::mem::take(&mut self.session));
        self.runtime.spawn(async move {
            // It is open, and a turn that is being drawn has just lost who draws it.
            let _ = sessions.close(&session).await;
        });
    }
}

impl Seats {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Answering>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sessions, with note taken of what they refuse.
struct Heard {
    sessions: Arc<Sessions<Arc<Seats>>>,
    seats: Arc<Seats>,
}

#[async_trait]
impl Converse for Heard {
    async fn ask(&self, session: &str, ask: Ask) -> Result<Answer, Refusal> {
        let answer = self.sessions.ask(session, ask).await;
        if let Some(answering) = self.seats.lock().get(session) {
            let refused = match &answer {
                // An engine that is away is no refusal: the client comes back.
                Ok(_) | Err(Refusal::Busy(_)) => None,
                Err(Refusal::ContextFull { .. }) => Some(Failure::Context),
                Err(_) => Some(Failure::Refused),
            };
            *answering.refused.lock().unwrap_or_else(PoisonError::into_inner) = refused;
        }
        answer
    }

    async fn count(&self, session: &str, ask: Ask) -> Result<u64, Refusal> {
        self.sessions.count(session, ask).await
    }

    fn opens(&self, session: &str, key: Option<&str>) -> bool {
        self.sessions.opens(session, key)
    }

    fn model(&self) -> &str {
        self.sessions.model()
    }
}

#[async_trait]
impl Draw for Seats {
    async fn draw(
        &self,
        session: &str,
        nth: u64,
        input_ids: Vec<i32>,
        mut sampling: SamplingParams,
    ) -> Result<Generation, Refusal> {
        let over = || Refusal::Over("the answer that this was a part of has ended".to_owned());
        let Answering { asks, busy, context, .. } = self.lock().get(session).cloned().ok_or_else(over)?;
        let room = context.saturating_sub(input_ids.len());
        if room == 0 {
            // Clients that compact do so now; nothing is drawn, and nothing of it is trained on.
            return Err(Refusal::ContextFull { tokens: input_ids.len() as u64, limit: context as u64 });
        }
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        sampling.max_new_tokens = sampling.max_new_tokens.min(room);
        let _waiting = Waiting::new(busy);
        let (reply, replied) = oneshot::channel();
        asks.send(Asked { nth, input_ids, sampling, reply }).await.map_err(|_| over())?;
        replied.await.map_err(|_| over())?
    }
}

/// A request that waits for tokens.
struct Waiting(Arc<watch::Sender<Busy>>);

impl Waiting {
    fn new(busy: Arc<watch::Sender<Busy>>) -> Self {
        busy.send_modify(|busy| busy.asks += 1);
        Waiting(busy)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.send_modify(|busy| *busy = Busy { asks: busy.asks - 1, since: Instant::now() });
    }
}

/// How long a hook is waited for.
#[derive(Debug, Clone)]
pub(super) struct Patience {
    pub(super) deadline: Duration,
    busy: Option<watch::Receiver<Busy>>,
}

impl From<Duration> for Patience {
    fn from(deadline: Duration) -> Self {
        Patience { deadline, busy: None }
    }
}

impl Patience {
    /// What `work` comes to; none if it takes too long.
    pub(super) async fn wait<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = work => Some(done),
            () = self.end() => None,
        }
    }

    /// Returns at the deadline, which begins anew where a client has its tokens.
    async fn end(&self) {
        let begun = Instant::now();
        let Some(mut busy) = self.busy.clone() else { return sleep_until(begun + self.deadline).await };
        loop {
            let Busy { asks, since } = *busy.borrow_and_update();
            let end = since.max(begun) + self.deadline;
            let changed = busy.changed();
            if asks > 0 {
                // The answer is being given up if nobody counts any more.
                if changed.await.is_err() {
                    return sleep_until(end).await;
                }
            } else if end <= Instant::now() {
                return;
            } else {
                tokio::select! {
                    () = sleep_until(end) => {}
                    changed = changed => if changed.is_err() { return sleep_until(end).await },
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use std::future::pending;
    use tokio::time::sleep;

    #[tokio::test(start_paused = true)]
    async fn hook_is_not_late_while_a_client_waits_for_tokens() {
        let begun = Instant::now();
        let seconds = Duration::from_secs;
        let busy = Arc::new(watch::Sender::new(Busy { asks: 0, since: begun }));
        let patience = Patience { deadline: seconds(10), busy: Some(busy.subscribe()) };
        let client = tokio::spawn(async move {
            sleep(seconds(9)).await;
            let waiting = Waiting::new(busy.clone());
            sleep(seconds(100)).await;
            drop(waiting);
            sleep(seconds(9)).await;
            drop(Waiting::new(busy.clone()));
            pending::<()>().await;
        });
        assert_eq!(patience.wait(pending::<()>()).await, None);
        assert_eq!(begun.elapsed(), seconds(9 + 100 + 9 + 10));
        client.abort();
        assert_eq!(Patience::from(seconds(10)).wait(async { 7 }).await, Some(7));
    }
}
