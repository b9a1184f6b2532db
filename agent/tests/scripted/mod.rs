//! An answerer without a model.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use driftless_agent::message::{Answer, Ask, Converse, Ended, Message, Refusal, Role, ToolCall};
use serde_json::json;
use tokio::sync::watch;

/// What opens every session.
pub(crate) const KEY: &str = "secret";

/// Says what it hears. With tools it calls the first one, once for each user's message. What it hears may be a command.
pub(crate) struct Scripted {
    state: Mutex<State>,
    changed: Condvar,
    held: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    sessions: Vec<String>,
    answers: usize,
}

impl Default for Scripted {
    fn default() -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), held: watch::Sender::new(false) }
    }
}

impl Scripted {
    /// Holds answers back.
    pub(crate) fn hold(&self) {
        self.held.send_replace(true);
    }

    pub(crate) fn release(&self) {
        self.held.send_replace(false);
    }

    /// Sessions of the asks so far.
    pub(crate) fn sessions(&self) -> Vec<String> {
        self.lock().sessions.clone()
    }

    pub(crate) fn wait_for_asks(&self, count: usize) {
        self.wait(|state| state.sessions.len() >= count);
    }

    pub(crate) fn wait_for_answers(&self, count: usize) {
        self.wait(|state| state.answers >= count);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test panics with it")
    }

    fn wait(&self, is_there: impl Fn(&State) -> bool) {
        let waited =
            self.changed.wait_timeout_while(self.lock(), Duration::from_secs(60), |state| !is_there(state));
        assert!(
            !waited.expect("no test panics with it").1.timed_out(),
            "what the test waits for did not come"
        );
    }
}

#[async_trait]
impl Converse for Scripted {
    async fn ask(&self, session: &str, ask: Ask) -> Result<Answer, Refusal> {
        self.lock().sessions.push(session.to_owned());
        self.changed.notify_all();
        let mut held = self.held.subscribe();
        held.wait_for(|held| !held).await.expect("its sender is here");
        let last = ask.messages.last().expect("a message");
        match last.content.as_str() {
            "full" => return Err(Refusal::ContextFull { tokens: 9, limit: 8 }),
            "panic" => panic!("as the test asked"),
            _ => {}
        }
        let calls = match ask.tools.first().filter(|_| last.role == Role::User) {
            Some(tool) => {
                let name = tool["function"]["name"].as_str().expect("a name").to_owned();
                vec![ToolCall { id: "call_0".into(), name, arguments: json!({"city": "Bern"}).into() }]
            }
            None => Vec::new(),
        };
        let is_call = !calls.is_empty();
        let content = if is_call { String::new() } else { format!("heard {}", last.content) };
        let reasoning = is_call.then(|| "a tool knows".to_owned());
        let message = Message { role: Role::Assistant, content, reasoning, calls, call_id: None };
        let ended = match (is_call, ask.max_tokens) {
            (true, _) => Ended::ToolCalls,
            (false, Some(2)) => Ended::Length,
            (false, _) => Ended::Stop,
        };
        self.lock().answers += 1;
        self.changed.notify_all();
        Ok(Answer {
            message,
            ended,
            prompt_tokens: 11,
            cached_tokens: 4,
            completion_tokens: 3,
            reasoning_tokens: 0,
        })
    }

    async fn count(&self, _: &str, ask: Ask) -> Result<u64, Refusal> {
        Ok(ask.messages.iter().map(|message| message.content.split_whitespace().count() as u64).sum())
    }

    async fn close(&self, session: &str, _: Option<&str>) -> Result<(), Refusal> {
        self.lock().sessions.retain(|asked| asked != session);
        Ok(())
    }

    fn opens(&self, _: &str, key: Option<&str>) -> bool {
        key == Some(KEY)
    }

    fn model(&self) -> &str {
        "scripted"
    }
}
