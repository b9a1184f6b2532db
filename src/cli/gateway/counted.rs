//! What a gateway was asked and has answered, as a page for Prometheus.

use async_trait::async_trait;
use driftless::agent::message::{Answer, Ask, Converse, Refusal};
use driftless::http::metrics::Page;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What becomes of an ask that is answered; the others have their refusal's name.
const ANSWERED: &str = "answered";
/// All that an ask may come to, so that each is on the page from the start.
const OUTCOMES: [&str; 7] = [ANSWERED, "invalid", "unknown", "context", "over", "busy", "broken"];

/// Counts what passes between clients and sessions.
pub(super) struct Counted<S> {
    sessions: S,
    counts: Arc<Counts>,
}

/// What was counted since the process began.
#[derive(Default)]
pub(super) struct Counts(Mutex<Sums>);

#[derive(Default)]
struct Sums {
    under_way: u64,
    outcomes: BTreeMap<&'static str, u64>,
    time: Duration,
    keys_refused: u64,
    prompt: u64,
    cached: u64,
    completion: u64,
    reasoning: u64,
}

/// An ask that is under way, also if it is dropped.
struct UnderWay<'a>(&'a Counts);

impl<S> Counted<S> {
    pub(super) fn new(sessions: S) -> Self {
        Self { sessions, counts: Arc::default() }
    }

    /// What is counted, while it goes on.
    pub(super) fn counts(&self) -> Arc<Counts> {
        self.counts.clone()
    }
}

impl Counts {
    /// The page as it is now.
    pub(super) fn page(&self) -> String {
        let (sums, mut page) = (self.lock(), Page::new("driftless_gateway"));
        page.gauge("asks_under_way", "Asks that wait for their answers.", sums.under_way);
        page.family("asks_total", "counter", "Asks by what became of them; one asked again counts again.");
        for outcome in OUTCOMES {
            let count = sums.outcomes.get(outcome).copied().unwrap_or_default();
            page.sample("asks_total", &[("outcome", outcome)], count);
        }
        page.counter("ask_seconds_total", "Time that ended asks took.", sums.time.as_secs_f64());
        page.counter("keys_refused_total", "Requests whose key opens no such session.", sums.keys_refused);
        page.counter("prompt_tokens_total", "Tokens that answers were drawn behind.", sums.prompt);
        page.counter("cached_tokens_total", "Those of them that their session had before.", sums.cached);
        page.counter("completion_tokens_total", "Tokens of answers.", sums.completion);
        page.counter("reasoning_tokens_total", "Those of them that are thoughts.", sums.reasoning);
        page.into_text()
    }

    /// Counts an ask that came to its end after `time`.
    fn end(&self, outcome: &Result<Answer, Refusal>, time: Duration) {
        let mut sums = self.lock();
        *sums.outcomes.entry(name(outcome)).or_default() += 1;
        sums.time += time;
        if let Ok(answer) = outcome {
            sums.prompt += answer.prompt_tokens;
            sums.cached += answer.cached_tokens;
            sums.completion += answer.completion_tokens;
            sums.reasoning += answer.reasoning_tokens;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Sums> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn name(outcome: &Result<Answer, Refusal>) -> &'static str {
    match outcome {
        Ok(_) => ANSWERED,
        Err(Refusal::Invalid(_)) => "invalid",
        Err(Refusal::Unknown(_)) => "unknown",
        Err(Refusal::ContextFull { .. }) => "context",
        Err(Refusal::Over(_)) => "over",
        Err(Refusal::Busy(_)) => "busy",
        Err(_) => "broken",
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.lock().under_way -= 1;
    }
}

#[async_trait]
impl<S: Converse> Converse for Counted<S> {
    async fn ask(&self, session: &str, ask: Ask) -> Result<Answer, Refusal> {
        let begin = Instant::now();
        self.counts.lock().under_way += 1;
        let _under_way = UnderWay(&self.counts);
        let outcome = self.sessions.ask(session, ask).await;
        self.counts.end(&outcome, begin.elapsed());
        outcome
    }

    async fn count(&self, session: &str, ask: Ask) -> Result<u64, Refusal> {
        self.sessions.count(session, ask).await
    }

    async fn close(&self, session: &str, key: Option<&str>) -> Result<(), Refusal> {
        self.sessions.close(session, key).await
    }

    fn opens(&self, session: &str, key: Option<&str>) -> bool {
        let opens = self.sessions.opens(session, key);
        self.counts.lock().keys_refused += u64::from(!opens);
        opens
    }

    fn model(&self) -> &str {
        self.sessions.model()
    }
}
