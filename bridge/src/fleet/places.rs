//! The task of a fleet that gives places on its engines to requests.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::lease::Lease;
use super::member::{Member, Standing};
use super::queue::{Queue, Waiter};
use super::roster::Roster;

/// Time between two looks at the engines that requests lack.
const RECHECK: Duration = Duration::from_millis(100);

/// Requests on their way to the task; the ones behind them wait to get there, in order too.
const ASKED: usize = 64;

struct Places {
    roster: Arc<Roster>,
    /// Before the queue: a request that is let go of with the task finds this closed, which tells it why.
    asked: mpsc::Receiver<Waiter>,
    queue: Queue,
}

/// Starts the task, which ends once what is returned is dropped. The roster's `stirred` tells it that an engine may have
/// a place.
///
/// No wake-up is lost. Whatever frees a place, makes an engine one that may take more, or changes the roster, is done
/// before `stirred` is notified. The task alone waits for `stirred`, which keeps one notification until then. So a look at all engines
/// follows each change. Nobody else takes places: none that is seen to be free is taken meanwhile.
/// An engine that leaves meanwhile tells the lease.
pub(super) fn start(roster: Arc<Roster>, queue: Queue) -> mpsc::Sender<Waiter> {
    let (ask, asked) = mpsc::channel(ASKED);
    tokio::spawn(Places { roster, queue, asked }.run());
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
                () = self.roster.shared.stirred.notified() => {}
                _ = ticks.tick(), if !self.queue.is_empty() => self.look(),
            }
            let members = self.roster.members();
            for (at, waiter) in self.queue.serve(&mut standings(&members)) {
                let Waiter { rid, left, answer, .. } = waiter;
                // One that was given up just now drops the lease, which gives the place back.
                let _ = answer.send(Lease::new(members[at].clone(), rid, left));
            }
        }
    }

    /// Asks the engines that requests lack what they serve.
    fn look(&mut self) {
        let members = self.roster.members();
        let lacked = self.queue.age(&standings(&members), Instant::now());
        let lacked = members.iter().zip(lacked).filter(|(_, is_lacked)| *is_lacked);
        lacked.for_each(|(member, _)| member.clone().look_aside());
    }
}

fn standings(members: &[Arc<Member>]) -> Vec<Standing> {
    members.iter().map(|member| member.state().for_routing()).collect()
}
