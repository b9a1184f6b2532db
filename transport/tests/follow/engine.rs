//! An engine that does as a test tells it, and notes what is done to it.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use driftless_store::BoxError;
use driftless_store::wait::Stop;
use driftless_transport::Snapshot as _;
use driftless_transport::activate::{Activate, Activated, Compared, How, Target};

/// How a fake engine reacts to its next activation.
pub(crate) enum Mood {
    Fail,
    Panic,
    /// Says that it is inside, then waits to be let out.
    Hang(Sender<()>, Receiver<()>),
    /// Says that it is inside, then takes all the time that it has, and leaves the engine paused.
    Linger(Sender<()>),
}

/// An engine's side that the test sees.
#[derive(Clone, Default)]
pub(crate) struct Engine(pub(crate) Arc<Mutex<EngineState>>);

#[derive(Default)]
pub(crate) struct EngineState {
    pub(crate) serving: Option<String>,
    /// Content of `g.up` as loaded, to notice torn reads.
    pub(crate) loaded: Vec<u8>,
    pub(crate) activations: Vec<String>,
    pub(crate) moods: VecDeque<Mood>,
    pub(crate) unreachable: bool,
    pub(crate) paused: bool,
    pub(crate) looks: usize,
    pub(crate) tries: usize,
    /// Samples that were asked for, and how the weights differ in one.
    pub(crate) samples: Vec<u64>,
    pub(crate) foreign: Option<String>,
}

struct Fake {
    name: &'static str,
    engine: Engine,
}

impl Activate for Fake {
    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn serving(&mut self) -> Result<Option<String>, BoxError> {
        let mut state = self.engine.0.lock().unwrap();
        state.looks += 1;
        if state.unreachable { Err("connection refused".into()) } else { Ok(state.serving.clone()) }
    }

    fn activate(&mut self, target: &Target<'_>) -> Result<Activated, BoxError> {
        let mood = {
            let mut state = self.engine.0.lock().unwrap();
            state.tries += 1;
            state.moods.pop_front()
        };
        match mood {
            Some(Mood::Linger(inside)) => {
                inside.send(())?;
                // What it waits for is the end of its time.
                let never = Stop::new();
                while !target.limit.left().is_zero() && !never.wait(Duration::from_millis(1)) {}
                self.engine.0.lock().unwrap().paused = true;
                return Err("given up".into());
            }
            Some(Mood::Fail) => return Err("flush refused".into()),
            Some(Mood::Panic) => panic!("a bug in a driver"),
            Some(Mood::Hang(inside, out)) => {
                inside.send(())?;
                out.recv()?;
            }
            None => {}
        }
        let position = target.checkpoint.position("g.up").ok_or("no g.up")?;
        let mut state = self.engine.0.lock().unwrap();
        state.loaded = target.checkpoint.bytes(position)?.into_owned();
        state.serving = Some(target.label.to_owned());
        state.activations.push(target.label.to_owned());
        assert_eq!(target.manifest.label(), target.label);
        let compared = Compared::Not { why: "a fake".into() };
        let done = Activated::default().with_pause(Duration::from_millis(7)).with_compared(compared);
        let done = done.with_copy(Duration::from_millis(40)).with_patch(Duration::from_millis(20));
        Ok(done.with_how(How::Loaded { why: None }))
    }

    fn sample(&mut self, target: &Target<'_>, turn: u64) -> Result<Option<String>, BoxError> {
        let mut state = self.engine.0.lock().unwrap();
        assert_eq!(state.serving.as_deref(), Some(target.label));
        state.samples.push(turn);
        if state.unreachable { Err("connection refused".into()) } else { Ok(state.foreign.take()) }
    }

    fn is_paused(&self) -> bool {
        self.engine.0.lock().unwrap().paused
    }
}

impl Engine {
    pub(crate) fn fake(&self, name: &'static str) -> Box<dyn Activate> {
        Box::new(Fake { name, engine: self.clone() })
    }

    pub(crate) fn activations(&self) -> usize {
        self.0.lock().unwrap().activations.len()
    }

    pub(crate) fn serving(&self) -> Option<String> {
        self.0.lock().unwrap().serving.clone()
    }

    pub(crate) fn next(&self, mood: Mood) {
        self.0.lock().unwrap().moods.push_back(mood);
    }
}
