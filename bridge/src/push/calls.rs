//! HTTP calls under way at every engine of a push, while this thread watches something else.

use std::sync::mpsc::{Receiver, TryRecvError, channel};

use tokio::runtime::Handle;
use tokio::task::JoinSet;

use crate::error::Result;
use crate::push::Member;
use crate::sglang::Client;

/// One call to each engine. Dropping it gives up those that are still open.
pub(crate) struct Calls {
    replies: Receiver<Result<()>>,
    open: usize,
    _tasks: JoinSet<()>,
}

impl Calls {
    /// Sends a call to each member. Every call has a deadline of its own, so every reply comes.
    pub(crate) fn send<F, T>(runtime: &Handle, members: &[Member], call: F) -> Self
    where
        F: Fn(usize, Client) -> T,
        T: Future<Output = Result<()>> + Send + 'static,
    {
        let (sender, replies) = channel();
        let mut tasks = JoinSet::new();
        for (index, member) in members.iter().enumerate() {
            let (call, sender) = (call(index, member.engine.clone()), sender.clone());
            // Nobody listens any more once the calls are given up.
            tasks.spawn_on(async move { drop(sender.send(call.await)) }, runtime);
        }
        Self { replies, open: members.len(), _tasks: tasks }
    }

    /// Takes what has been replied so far; fails with the first failure.
    pub(crate) fn check(&mut self) -> Result<()> {
        loop {
            match self.replies.try_recv() {
                Ok(reply) => {
                    self.open -= 1;
                    reply?;
                }
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Waits for every reply; fails with the first failure, when all have come.
    pub(crate) fn wait(mut self) -> Result<()> {
        let mut outcome = Ok(());
        while self.open > 0 {
            let Ok(reply) = self.replies.recv() else { break };
            self.open -= 1;
            outcome = outcome.and(reply);
        }
        outcome
    }
}
