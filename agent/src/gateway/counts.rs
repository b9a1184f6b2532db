//! What clients asked and what became of it, as a page for Prometheus.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use driftless_http::metrics::Page;

use crate::message::{Answer, Refusal};
use crate::wire::Protocol;

/// What stands before every name.
const PREFIX: &str = "driftless_gateway";

/// What may become of an ask, each with its name: all of them are on the page from the start.
macro_rules! outcomes {
    ($($outcome:pat => $name:literal,)*) => {
        const OUTCOMES: &[&str] = &[$($name),*];

        fn name(outcome: &Result<Answer, Refusal>) -> &'static str {
            match outcome { $($outcome => $name,)* }
        }
    };
}

outcomes! {
    Ok(_) => "answered",
    Err(Refusal::Invalid(_)) => "invalid",
    Err(Refusal::Unknown(_)) => "unknown",
    Err(Refusal::ContextFull { .. }) => "context",
    Err(Refusal::Over(_)) => "over",
    Err(Refusal::Busy(_)) => "busy",
    Err(Refusal::Broken(_)) => "broken",
}

/// What a gateway was asked and has answered since it began. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Counts(Arc<Mutex<Sums>>);

#[derive(Debug, Default)]
struct Sums {
    /// Replies by protocol and status.
    replies: BTreeMap<(&'static str, u16), u64>,
    under_way: u64,
    outcomes: BTreeMap<&'static str, u64>,
    time: Duration,
    prompt: u64,
    cached: u64,
    completion: u64,
    reasoning: u64,
}

/// An ask that is under way until this is dropped.
pub(super) struct UnderWay(Counts);

impl Counts {
    /// The page as it is now, in Prometheus's text format 0.0.4.
    #[must_use]
    pub fn page(&self) -> String {
        let (sums, mut page) = (self.lock(), Page::new(PREFIX));
        page.family("replies_total", "counter", "Replies by the client's protocol and their HTTP status.");
        for ((protocol, status), count) in &sums.replies {
            let status = status.to_string();
            page.sample(&[("protocol", protocol), ("status", &status)], count);
        }
        page.gauge(
            "asks_under_way",
            "Answers that are being drawn, those without a client included.",
            sums.under_way,
        );
        page.family("asks_total", "counter", "Asks that sessions have ended, by what became of them.");
        for outcome in OUTCOMES {
            let count = sums.outcomes.get(outcome).copied().unwrap_or_default();
            page.sample(&[("outcome", *outcome)], count);
        }
        page.counter("ask_seconds_total", "Time that these took.", sums.time.as_secs_f64());
        page.counter("prompt_tokens_total", "Tokens that answers were drawn behind.", sums.prompt);
        page.counter("cached_tokens_total", "Those of them that their session had before.", sums.cached);
        page.counter("completion_tokens_total", "Tokens of answers.", sums.completion);
        page.counter("reasoning_tokens_total", "Those of them that are thoughts.", sums.reasoning);
        page.into_text()
    }

    /// Counts a reply.
    pub(super) fn replied(&self, protocol: Protocol, status: u16) {
        let name = match protocol {
            Protocol::Chat => "chat",
            Protocol::Responses => "responses",
            Protocol::Messages => "messages",
        };
        *self.lock().replies.entry((name, status)).or_default() += 1;
    }

    /// Counts an ask as under way.
    pub(super) fn began(&self) -> UnderWay {
        self.lock().under_way += 1;
        UnderWay(self.clone())
    }

    /// Counts an ask that came to its end after `time`.
    pub(super) fn ended(&self, outcome: &Result<Answer, Refusal>, time: Duration) {
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

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.lock().under_way -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Ended, Message, Role};

    #[test]
    fn every_family_is_in_the_docs() {
        let (counts, docs) = (Counts::default(), include_str!("../../../docs/agents.md"));
        let page = counts.page();
        let names: Vec<_> =
            page.lines().filter_map(|line| line.strip_prefix("# TYPE driftless_gateway_")).collect();
        assert_eq!(names.len(), 8, "{page}");
        for name in names.iter().filter_map(|line| line.split(' ').next()) {
            assert!(docs.contains(&format!("`{name}`")), "{name} in docs/agents.md");
        }
    }

    #[test]
    fn dashboard_asks_only_for_names_of_the_page() {
        let page = Counts::default().page();
        let dashboard = include_str!("../../../examples/grafana.json");
        let asked: Vec<_> = dashboard.split("driftless_gateway_").skip(1).collect();
        assert!(asked.len() > 5, "it asks for {}", asked.len());
        for rest in asked {
            let name = rest.split(|c: char| !c.is_ascii_lowercase() && c != '_').next().unwrap_or_default();
            assert!(page.contains(&format!("# TYPE driftless_gateway_{name} ")), "{name}");
        }
    }

    #[test]
    fn tokens_of_each_kind_are_counted_apart() {
        let counts = Counts::default();
        let answer = Answer {
            message: Message {
                role: Role::Assistant,
                content: String::new(),
                reasoning: None,
                calls: Vec::new(),
                call_id: None,
            },
            ended: Ended::Stop,
            prompt_tokens: 50,
            cached_tokens: 30,
            completion_tokens: 20,
            reasoning_tokens: 7,
        };
        counts.ended(&Ok(answer.clone()), Duration::from_millis(1500));
        counts.ended(&Ok(answer), Duration::from_millis(500));
        counts.ended(&Err(Refusal::Busy(String::new())), Duration::from_secs(1));
        let page = counts.page();
        for (name, value) in [("prompt", 100), ("cached", 60), ("completion", 40), ("reasoning", 14)] {
            assert!(page.contains(&format!("\ndriftless_gateway_{name}_tokens_total {value}\n")), "{page}");
        }
        assert!(page.contains("ask_seconds_total 3\n") && page.contains("{outcome=\"busy\"} 1\n"), "{page}");
    }

    #[test]
    fn an_ask_that_is_dropped_is_no_longer_under_way() {
        let counts = Counts::default();
        let dropped = counts.began();
        assert!(counts.page().contains("asks_under_way 1\n"));
        drop(dropped);
        assert!(counts.page().contains("asks_under_way 0\n"));
    }
}
