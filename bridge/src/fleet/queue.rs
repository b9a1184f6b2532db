//! Requests that wait for a place on an engine, as functions over what is known of the engines.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::lease::Lease;
use super::member::Standing;
use super::route::{Near, Router, View};
use crate::engine::{Label, Rid};

/// A request that waits for a place.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) rid: Rid,
    pub(super) minimum: Option<Label>,
    pub(super) near: Near,
    pub(super) priority: u8,
    /// How much longer it may be without an engine that may take it.
    pub(super) left: Duration,
    /// Up to when `left` is counted.
    pub(super) counted: Instant,
    /// Closed once nobody waits any more; dropped without an answer once nothing is left, or with the fleet's task.
    pub(super) answer: oneshot::Sender<Lease>,
}

/// Waiters, those of a higher priority first, and else in the order in which they came.
#[derive(Debug)]
pub(super) struct Queue {
    waiting: VecDeque<Waiter>,
    router: Router,
}

impl Queue {
    pub(super) fn new(router: Router) -> Self {
        Self { waiting: VecDeque::new(), router }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn push(&mut self, waiter: Waiter) {
        let behind = self.waiting.partition_point(|before| before.priority >= waiter.priority);
        self.waiting.insert(behind, waiter);
    }

    /// Takes out those that have a place now, each with its engine, where it is counted. The first goes first; one
    /// that no engine may take does not hold up those behind it.
    pub(super) fn serve(&mut self, standings: &mut [Standing]) -> Vec<(usize, Waiter)> {
        let mut served = Vec::new();
        // Engines only fill up in here: where one request found no place, others like it find none.
        let mut unserved: HashSet<Option<Label>> = HashSet::new();
        let mut at = 0;
        while let Some(waiter) = self.waiting.get(at)
            && standings.iter().any(|standing| standing.up && self.router.has_room(standing.in_flight))
        {
            if waiter.answer.is_closed() {
                self.waiting.remove(at);
                continue;
            }
            let minimum = &waiter.minimum;
            if !unserved.contains(minimum) {
                let view = |standing: &Standing| View {
                    id: standing.id,
                    eligible: standing.may_take(minimum.as_ref()),
                    in_flight: standing.in_flight,
                };
                let views: Vec<View> = standings.iter().map(view).collect();
                if let Some(engine) = self.router.choose(&views, waiter.near) {
                    standings[engine].in_flight += 1;
                    served.extend(self.waiting.remove(at).map(|waiter| (engine, waiter)));
                    continue;
                }
                unserved.insert(minimum.clone());
            }
            at += 1;
        }
        served
    }

    /// Counts the time of those that no engine may take, full or not, and lets go of those that have none left and of
    /// those that were given up. Returns which engines some request lacks.
    pub(super) fn age(&mut self, standings: &[Standing], now: Instant) -> Vec<bool> {
        let mut takers: HashMap<Option<Label>, Vec<bool>> = HashMap::new();
        let may_take = |minimum: &Option<Label>| -> Vec<bool> {
            standings.iter().map(|standing| standing.may_take(minimum.as_ref())).collect()
        };
        self.waiting.retain_mut(|waiter| {
            let takers = takers.entry(waiter.minimum.clone()).or_insert_with_key(may_take);
            let since = now.saturating_duration_since(std::mem::replace(&mut waiter.counted, now));
            if !takers.contains(&true) {
                waiter.left = waiter.left.saturating_sub(since);
            }
            !waiter.left.is_zero() && !waiter.answer.is_closed()
        });
        (0..standings.len()).map(|engine| takers.values().any(|may_take| !may_take[engine])).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::route::Route;
    use super::*;

    const SERVED: &str = "3f0c9a12b7de:1";
    const LATER: &str = "3f0c9a12b7de:2";
    const LEFT: Duration = Duration::from_secs(1);

    /// A queue, and those that wait.
    struct Scene {
        queue: Queue,
        standings: Vec<Standing>,
        begin: Instant,
        waiting: Vec<oneshot::Receiver<Lease>>,
    }

    impl Scene {
        fn new(engines: usize, concurrency: usize) -> Self {
            let begin = Instant::now();
            let standing = |id: usize| Standing {
                up: true,
                serving: Some(SERVED.to_owned()),
                ..Standing::new(id as u64, begin)
            };
            Scene {
                queue: Queue::new(Router::new(Route::default(), concurrency)),
                standings: (0..engines).map(standing).collect(),
                begin,
                waiting: Vec::new(),
            }
        }

        fn push(&mut self, minimum: Option<&str>) {
            self.push_with(0, minimum);
        }

        fn push_with(&mut self, priority: u8, minimum: Option<&str>) {
            let (answer, waiting) = oneshot::channel();
            let (rid, minimum) = (self.rid(), minimum.map(|label| label.parse().unwrap()));
            let (near, counted) = (Near::default(), self.begin);
            self.queue.push(Waiter { rid, minimum, near, priority, left: LEFT, counted, answer });
            self.waiting.push(waiting);
        }

        /// The next request's.
        fn rid(&self) -> Rid {
            Rid::new(0, self.waiting.len() as u64)
        }

        fn serve(&mut self) -> Vec<Rid> {
            self.queue.serve(&mut self.standings).into_iter().map(|(_, waiter)| waiter.rid).collect()
        }

        fn waiting(&self) -> Vec<Rid> {
            self.queue.waiting.iter().map(|waiter| waiter.rid).collect()
        }
    }

    fn rids(numbers: impl IntoIterator<Item = u64>) -> Vec<Rid> {
        numbers.into_iter().map(|number| Rid::new(0, number)).collect()
    }

    #[test]
    fn serve_gives_each_a_place_once_in_order() {
        let mut scene = Scene::new(1, 4);
        (0..1000).for_each(|_| scene.push(None));
        let mut served = scene.serve();
        assert_eq!(served, rids(0..4), "as many as there are places");
        for freed in [1, 3, 0, 4].into_iter().cycle() {
            if scene.queue.is_empty() {
                break;
            }
            scene.standings[0].in_flight -= freed;
            let now = scene.serve();
            assert_eq!(now.len(), freed);
            served.extend(now);
        }
        assert_eq!(served, rids(0..1000));
    }

    #[test]
    fn serve_passes_over_those_that_no_engine_may_take() {
        let mut scene = Scene::new(2, 2);
        let minimums = [Some(LATER), None, Some(LATER), Some(SERVED), None];
        minimums.into_iter().for_each(|minimum| scene.push(minimum));
        assert_eq!(scene.serve(), rids([1, 3, 4]));
        scene.standings[1].serving = Some(LATER.to_owned());
        scene.standings.iter_mut().for_each(|standing| standing.in_flight = 1);
        assert_eq!(scene.serve(), rids([0]), "the engine that has it has one place");
        assert_eq!((scene.waiting(), scene.standings[1].in_flight), (rids([2]), 2));
    }

    #[test]
    fn serve_gives_places_to_higher_priorities_first() {
        let mut scene = Scene::new(1, 4);
        for (priority, minimum) in [(0, None), (0, None), (2, Some(LATER)), (1, None), (2, None), (0, None)] {
            scene.push_with(priority, minimum);
        }
        assert_eq!(scene.serve(), rids([4, 3, 0, 1]), "one that no engine may take holds up none");
        assert_eq!(scene.waiting(), rids([2, 5]));
    }

    #[test]
    fn serve_gives_no_place_to_those_given_up() {
        let mut scene = Scene::new(1, 1);
        (0..3).for_each(|_| scene.push(None));
        scene.waiting[0].close();
        assert_eq!(scene.serve(), rids([1]));
        scene.waiting[2].close();
        assert_eq!(scene.queue.age(&scene.standings, scene.begin), [false]);
        assert!(scene.queue.is_empty(), "also while the engine is full");
    }

    #[test]
    fn draining_engine_gets_nothing_and_is_lacked() {
        let mut scene = Scene::new(2, 2);
        scene.standings[0].draining = Some(scene.begin);
        (0..3).for_each(|_| scene.push(None));
        assert_eq!(scene.serve(), rids([0, 1]));
        assert_eq!((scene.standings[0].in_flight, scene.standings[1].in_flight), (0, 2));
        // Without any engine they wait as for one that is down.
        assert!(scene.queue.serve(&mut []).is_empty());
        scene.queue.age(&[], scene.begin + LEFT / 2);
        assert_eq!(scene.waiting(), rids([2]));
        scene.queue.age(&[], scene.begin + LEFT);
        assert!(scene.queue.is_empty());
    }

    #[test]
    fn age_counts_time_without_an_engine_and_not_a_turn() {
        let mut scene = Scene::new(2, 1);
        scene.standings.iter_mut().for_each(|standing| standing.in_flight = 1);
        scene.standings[1].up = false;
        [None, Some(LATER)].into_iter().for_each(|minimum| scene.push(minimum));
        let end = scene.begin + LEFT;
        assert_eq!(
            scene.queue.age(&scene.standings, end - LEFT / 4),
            [true, true],
            "engines that are lacked"
        );
        assert_eq!(scene.waiting(), rids([0, 1]));
        assert_eq!(scene.queue.age(&scene.standings, end), [true, true]);
        assert_eq!(scene.waiting(), rids([0]));
        assert!(
            scene.waiting[1].try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Closed)
        );
        scene.queue.age(&scene.standings, end + LEFT);
        assert_eq!(scene.waiting(), rids([0]), "full is not lacking");
        scene.standings[0].up = false;
        scene.queue.age(&scene.standings, end + LEFT + LEFT);
        assert!(scene.queue.is_empty());
    }
}
