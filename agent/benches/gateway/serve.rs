//! The server's process.

use std::io::Read as _;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use axum::Router;
use axum::body::Bytes;
use axum::extract::DefaultBodyLimit;
use axum::middleware::from_fn;
use axum::routing::post;
use driftless_agent::gateway::{Gateway, GatewayOptions};
use driftless_agent::message::{Answer, Ask, Converse, Ended, Message, Refusal, Role};
use driftless_agent::sessions::{Draw, Opening, Settings};
use driftless_agent::{Family, Sessions};
use driftless_bridge::{Generation, SamplingParams};
use driftless_http::listen::{Limits, admit, serve_http};
use driftless_http::{Server, Threads};

use crate::load::ANSWER;
use crate::toy;

/// Says the same at once.
struct Nothing(Generation);

#[async_trait]
impl Draw for Nothing {
    async fn draw(&self, _: &str, _: u64, _: Vec<i32>, _: SamplingParams) -> Result<Generation, Refusal> {
        Ok(self.0.clone())
    }
}

/// Sessions that know nothing: what is left is HTTP and the protocol.
struct Forgetful;

#[async_trait]
impl Converse for Forgetful {
    async fn ask(&self, _: &str, _: Ask) -> Result<Answer, Refusal> {
        let content = ANSWER.to_owned();
        let message =
            Message { role: Role::Assistant, content, reasoning: None, calls: vec![], call_id: None };
        let [prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens] = [0; 4];
        let ended = Ended::Stop;
        Ok(Answer { message, ended, prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens })
    }

    async fn count(&self, _: &str, _: Ask) -> Result<u64, Refusal> {
        Ok(0)
    }

    fn opens(&self, _: &str, _: Option<&str>) -> bool {
        true
    }

    fn model(&self) -> &str {
        "none"
    }
}

/// Serves until its input ends.
pub(super) fn serve(home: &Path, checkpoint: Option<&Path>) {
    let (family, tokenizer) = match checkpoint {
        Some(checkpoint) => {
            (Family::open(checkpoint).unwrap(), driftless_agent::Tokenizer::open(checkpoint).unwrap())
        }
        None => (toy::family("qwen3"), toy::tokenizer()),
    };
    let output_ids = [tokenizer.encode(ANSWER).unwrap(), vec![family.stops()[0]]].concat();
    let log_probs = vec![-1.0; output_ids.len()];
    let made = Generation { output_ids, log_probs, ..toy::generation("", "<|im_end|>") };
    let opening = Opening { key: None, sampling: SamplingParams::default() };
    let settings = Settings { context: usize::MAX, visitors: Some(opening), ..Settings::default() };
    let sessions = Sessions::open_journal(&home.join("journal"), family, Nothing(made), settings).unwrap();
    let free = SocketAddr::from(([127, 0, 0, 1], 0));
    let gateway =
        |converse: Arc<dyn Converse>| Gateway::start(free, GatewayOptions::new(true), converse).unwrap();
    let (parsed, gateway) = (gateway(Arc::new(Forgetful)), gateway(Arc::new(sessions)));
    let routes = Router::new().route("/{*rest}", post(async |body: Bytes| format!("{} bytes\n", body.len())));
    let routes = routes.layer(from_fn(admit)).layer(DefaultBodyLimit::disable());
    let threads = Threads { io: 2, blocking: 1 };
    let plain = Server::start("plain", free, threads, |listener, _| {
        Ok::<_, driftless_http::Error>(serve_http(listener, Limits::default(), routes))
    });
    let plain = plain.unwrap();
    println!("{}\n{}\n{}", plain.addr(), parsed.addr(), gateway.addr());
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}
