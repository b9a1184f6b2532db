//! A stand-in for an SGLang server, in this process: the bridge's server of SGLang's protocol over an engine that does
//! what a test says, with the calls that push weights, and faults on command.

mod checkpoint;
mod engine;
mod fault;
mod memory;
mod wire;

use std::error::Error;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::middleware::from_fn_with_state;
use driftless_bridge::ClientOptions;
use driftless_bridge::engine::Deadlines;
use driftless_server::{Server, ServerOptions};
use serde_json::Value;
use tokio::net::TcpSocket;

pub use checkpoint::{checkpoint, odd_checkpoint, odd_version, version, write};
pub use engine::Engine;
use engine::Scripted;
pub use fault::Fault;
pub(crate) use fault::end_connection;
pub use memory::Memory;
pub use wire::{FakeRoot, Receiver, Wire};

type Shared = Arc<Mutex<Engine>>;

/// The engine, and the server that its process would be: with it go all connections and all calls under way.
pub struct Fake {
    /// Where it listens.
    pub address: SocketAddr,
    /// Bound to the address and never listening: nothing else gets the port between a kill and a restart.
    _port: TcpSocket,
    engine: Shared,
    process: Mutex<Option<Server>>,
}

impl Fake {
    /// Starts an engine with this checkpoint on a port of the system's choice.
    pub fn start(checkpoint: &Path) -> Self {
        let port = TcpSocket::new_v4().unwrap();
        port.set_reuseaddr(true).unwrap();
        port.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let address = port.local_addr().unwrap();
        let engine = Arc::new(Mutex::new(Engine::new(checkpoint)));
        let fake = Self { address, _port: port, engine, process: Mutex::default() };
        fake.serve();
        fake
    }

    /// What it is and has seen.
    pub fn engine(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().unwrap()
    }

    /// The next call of `METHOD path` meets a fault; several wait for one call each.
    pub fn fault(&self, call: &'static str, fault: Fault) {
        self.engine().faults.entry(call).or_default().push_back(fault);
    }

    /// The next such call hangs, and word of it comes.
    pub fn hang(&self, call: &'static str) -> std::sync::mpsc::Receiver<()> {
        let (told, asked) = std::sync::mpsc::channel();
        self.fault(call, Fault::HangTold(told));
        asked
    }

    /// Paths of the calls that change something, in order.
    pub fn changes(&self) -> Vec<String> {
        self.engine().calls.iter().map(|(path, _)| path.clone()).collect()
    }

    /// No call of `path`, which brought buckets, named the version; that came after the last of them.
    pub fn assert_labelled_after(&self, path: &str, label: &str) {
        let engine = self.engine();
        let last = engine.calls.iter().rposition(|(called, _)| called == path).unwrap();
        let (buckets, after) = engine.calls.split_at(last + 1);
        let named = |body: &Value| body["weight_version"] == label || body["new_version"] == label;
        assert!(!buckets.iter().any(|(_, body)| named(body)), "{buckets:?}");
        assert!(after.iter().any(|(_, body)| named(body)), "{after:?}");
    }

    /// Ends the engine as a kill would: its port and its connections are closed when this returns, and no
    /// call goes on.
    pub fn kill(&self) {
        let process = self.process.lock().unwrap().take();
        drop(process);
    }

    /// Starts it again at the same address as a new process would be: with its first weights, not paused.
    pub fn restart(&self) {
        self.kill();
        self.engine().restart();
        self.serve();
    }

    fn serve(&self) {
        let (engine, state) = (self.engine.clone(), self.engine().state.clone());
        let pushes = wire::routes().merge(memory::routes()).with_state(engine.clone());
        let layer = from_fn_with_state(engine.clone(), fault::layer);
        let server = Server::start::<Box<dyn Error>>(
            self.address,
            ServerOptions::default(),
            || Ok((state, Box::new(Scripted::new(engine)))),
            |routes| routes.merge(pushes).layer(layer),
        );
        *self.process.lock().unwrap() = Some(server.unwrap());
    }
}

/// For calls that end, whatever the machine is doing.
pub fn patient() -> ClientOptions {
    let long = Duration::from_secs(60);
    let deadlines = Deadlines::default()
        .with_connect(long)
        .with_info(long)
        .with_control(long)
        .with_load(long)
        .with_generate(long);
    ClientOptions::default().with_deadlines(deadlines)
}

/// What a call has that is told to hang. Others of its kind have to end within it.
pub const SHORT: Duration = Duration::from_secs(1);

/// The same, but for the kind of call that hangs.
pub fn short(hangs: fn(&mut Deadlines) -> &mut Duration) -> ClientOptions {
    let mut options = patient();
    *hangs(&mut options.deadlines) = SHORT;
    options
}
