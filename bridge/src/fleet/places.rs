//! The task of a fleet that gives places on its engines to requests.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::lease::Lease;
use super::member::{Member, Standing};
use super::queue::{Queue, Waiter};

/// Time between two looks at the engines that requests lack.
const RECHECK: Duration = Duration::from_millis(100);

/// Requests on their way to the task; the ones behind them wait to get there, in order too.
const ASKED: usize = 64;

struct Places {
    members: Vec<Arc<Member>>,
    queue: Queue,
    asked: mpsc::Receiver<Waiter>,
    stirred: Arc<Notify>,
}

/// Starts the task, which ends once what is returned is dropped. `stirred` tells it that an engine may have a place.
///
/// No wake-up is lost. Whatever frees a place, or makes an engine one that may take more, is done before `stirred` is
/// notified. The task alone waits for `stirred`, which keeps one notification until then. So a look at all engines
/// follows each change. Nobody else takes places: none that is seen to be free is taken meanwhile.
pub(super) fn start(members: Vec<Arc<Member>>, queue: Queue, stirred: Arc<Notify>) -> mpsc::Sender<Waiter> {
    let (ask, asked) = mpsc::channel(ASKED);
    tokio::spawn(Places { members, queue, asked, stirred }.run());
    ask
}

impl Places {
    async fn run(mut self) {
        let mut ticks = interval(RECHECK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                asked = self.asked.recv() => match asked {
                    Some(waiter) => self.queue.push(waiter),
                    None => return,
                },
                () = self.stirred.notified() => {}
                _ = ticks.tick(), if !self.queue.is_empty() => self.look(),
            }
            for (at, waiter) in self.queue.serve(&mut self.standings()) {
                let Waiter { rid, left, answer, .. } = waiter;
                // One that was given up just now drops the lease, which gives the place back.
                let _ = answer.send(Lease::new(self.members[at].clone(), rid, left));
            }
        }
    }

    /// Asks the engines that requests lack what they serve.
    fn look(&mut self) {
        let lacked = self.queue.age(&self.standings(), Instant::now());
        let lacked = self.members.iter().zip(lacked).filter(|(_, is_lacked)| *is_lacked);
        lacked.for_each(|(member, _)| member.clone().look_aside());
    }

    fn standings(&self) -> Vec<Standing> {
        self.members.iter().map(|member| member.state().for_routing()).collect()
    }
}
