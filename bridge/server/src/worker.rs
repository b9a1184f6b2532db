//! The thread that owns a generator: it carries out calls in order, and has the generator step in between.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;

use tokio::sync::oneshot;

use crate::Generator;
use crate::reply::Refusal;

/// A call that the thread makes.
type Call = Box<dyn FnOnce(&mut dyn Generator) + Send>;

/// The thread. Dropping this ends it after the calls that are queued, and drops the generator.
#[derive(Debug)]
pub(super) struct Worker {
    /// `None` ends the thread.
    calls: SyncSender<Option<Call>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread, with a queue of so many calls.
    pub(super) fn start(mut generator: Box<dyn Generator>, queue: usize) -> io::Result<Self> {
        let (calls, queue) = sync_channel(queue);
        let work = move || work(&mut *generator, &queue);
        let thread = std::thread::Builder::new().name("generator".to_owned()).spawn(work)?;
        Ok(Self { calls, thread: Some(thread) })
    }

    /// Whether the thread has ended, which it does of a panic only.
    pub(super) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Queues a call.
    pub(super) fn tell(&self, call: impl FnOnce(&mut dyn Generator) + Send + 'static) -> Result<(), Refusal> {
        self.calls.try_send(Some(Box::new(call))).map_err(|_| Refusal::unavailable())
    }

    /// Queues a call and waits for its answer.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut dyn Generator) -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let (done, answer) = oneshot::channel();
        self.tell(move |generator| {
            // A client that gave up waiting for its answer is no error.
            let _gone = done.send(call(generator));
        })?;
        answer.await.map_err(|_| Refusal::unavailable())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Waits while the queue is full; fails only when the thread has ended already.
        let _ended = self.calls.send(None);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the generating thread had panicked");
        }
    }
}

fn work(generator: &mut dyn Generator, calls: &Receiver<Option<Call>>) {
    let mut idle = true;
    loop {
        let call = if idle { calls.recv().map_err(TryRecvError::from) } else { calls.try_recv() };
        match call {
            Ok(Some(call)) => {
                call(generator);
                idle = false;
            }
            Err(TryRecvError::Empty) => idle = !generator.step(),
            Ok(None) | Err(TryRecvError::Disconnected) => return,
        }
    }
}
