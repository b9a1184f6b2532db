//! Chooses the engine for a request, as a function over what is known of the engines.

use std::collections::{HashMap, VecDeque};

/// Affinities of which the engine is remembered.
const REMEMBERED: usize = 4096;

/// How a request finds its engine among those that may take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Route {
    /// The one with the fewest of our requests; in turn among equals. A request with an affinity goes where the last
    /// one with it went, if that engine has a free place and is not far ahead. It may have a quarter of the fleet's
    /// concurrency, and at least one request, more than the least loaded engine. The last 4096 affinities count.
    #[default]
    LeastLoaded,
    /// In turn, whatever the affinity.
    RoundRobin,
}

/// What routing knows of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct View {
    /// Which engine it is.
    pub(super) id: u64,
    /// Up, and new enough for the request.
    pub(super) eligible: bool,
    /// Our requests under way on it.
    pub(super) in_flight: usize,
}

/// Chooses for one request after another.
#[derive(Debug)]
pub(super) struct Router {
    route: Route,
    concurrency: usize,
    /// Counts requests.
    turn: usize,
    recent: Recent,
}

/// Which engine an affinity went to last.
#[derive(Debug, Default)]
struct Recent {
    engines: HashMap<u64, u64>,
    /// From the one that was first heard of longest ago.
    order: VecDeque<u64>,
}

impl Router {
    /// At most `concurrency` requests are under way on an engine, and at least one may be.
    pub(super) fn new(route: Route, concurrency: usize) -> Self {
        Self { route, concurrency: concurrency.max(1), turn: 0, recent: Recent::default() }
    }

    /// Whether one more request may be under way on an engine.
    pub(super) fn has_room(&self, in_flight: usize) -> bool {
        in_flight < self.concurrency
    }

    /// The engine for the next request, or `None` when each is out of the question or full.
    pub(super) fn choose(&mut self, views: &[View], affinity: Option<u64>) -> Option<usize> {
        let last = affinity.and_then(|affinity| self.recent.engines.get(&affinity));
        let last = last.and_then(|last| views.iter().position(|view| view.id == *last));
        let chosen = choose(self.route, views, self.concurrency, self.turn, last)?;
        self.turn = self.turn.wrapping_add(1);
        if let Some(affinity) = affinity {
            self.recent.put(affinity, views[chosen].id);
        }
        Some(chosen)
    }
}

impl Recent {
    fn put(&mut self, affinity: u64, engine: u64) {
        if self.engines.insert(affinity, engine).is_some() {
            return;
        }
        self.order.push_back(affinity);
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.engines.remove(&oldest);
        }
    }
}

/// `last` is the engine that the request's affinity went to before.
fn choose(
    route: Route,
    views: &[View],
    concurrency: usize,
    turn: usize,
    last: Option<usize>,
) -> Option<usize> {
    let is_free = |at: &usize| views[*at].eligible && views[*at].in_flight < concurrency;
    let mut free = (0..views.len()).map(|step| (turn + step) % views.len()).filter(is_free);
    match route {
        Route::RoundRobin => free.next(),
        Route::LeastLoaded => {
            let least = free.min_by_key(|at| views[*at].in_flight)?;
            let most = views[least].in_flight + (concurrency / 4).max(1);
            Some(last.filter(|at| is_free(at) && views[*at].in_flight <= most).unwrap_or(least))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn views(loads: &[usize]) -> Vec<View> {
        let view =
            |(id, in_flight): (usize, &usize)| View { id: id as u64, eligible: true, in_flight: *in_flight };
        loads.iter().enumerate().map(view).collect()
    }

    #[test]
    fn the_least_loaded_goes_first_and_equals_take_turns() {
        for (loads, turn, expected) in [([3, 1, 2], 0, 1), ([1, 1, 1], 2, 2), ([1, 1, 1], 3, 0)] {
            assert_eq!(
                choose(Route::LeastLoaded, &views(&loads), 8, turn, None),
                Some(expected),
                "{loads:?}"
            );
        }
    }

    #[test]
    fn full_and_ineligible_engines_are_passed_over() {
        let mut some = views(&[2, 0, 1]);
        some[1].eligible = false;
        for last in [None, Some(0), Some(1)] {
            assert_eq!(choose(Route::LeastLoaded, &some, 2, 0, last), Some(2));
        }
        assert_eq!(choose(Route::RoundRobin, &some, 2, 0, None), Some(2));
        assert_eq!(choose(Route::RoundRobin, &some, 1, 0, None), None);
        assert_eq!(choose(Route::LeastLoaded, &[], 1, 0, None), None);
    }

    #[test]
    fn choose_keeps_an_affinity_where_it_was_unless_far_ahead() {
        // Loads, concurrency, the engine before, the engine now.
        for (loads, concurrency, last, expected) in [
            ([0, 0], 64, 1, 1),
            ([16, 0], 64, 0, 0),
            ([17, 0], 64, 0, 1),
            ([20, 4], 64, 0, 0),
            // At least one more.
            ([1, 0], 2, 0, 0),
            ([2, 0], 3, 0, 1),
            ([1, 0], 1, 0, 1),
        ] {
            let chosen = choose(Route::LeastLoaded, &views(&loads), concurrency, 0, Some(last));
            assert_eq!(chosen, Some(expected), "{loads:?} of {concurrency}");
        }
        assert_eq!(choose(Route::RoundRobin, &views(&[0, 0]), 64, 0, Some(1)), Some(0));
    }

    #[test]
    fn router_finds_an_affinity_again_where_engines_came_and_went() {
        let mut router = Router::new(Route::LeastLoaded, 64);
        let mut views = views(&[0, 0, 0]);
        let first = router.choose(&views, Some(7)).unwrap();
        let id = views[first].id;
        views.remove(if first == 0 { 1 } else { 0 });
        let again = router.choose(&views, Some(7)).unwrap();
        assert_eq!(views[again].id, id);
        views.remove(again);
        let elsewhere = router.choose(&views, Some(7)).unwrap();
        assert_ne!(views[elsewhere].id, id);
    }

    #[test]
    fn router_remembers_the_last_affinities_and_no_more() {
        let mut router = Router::new(Route::LeastLoaded, 64);
        let views = views(&[0, 0]);
        let first = router.choose(&views, Some(0));
        assert_eq!(router.choose(&views, Some(0)), first, "not in turn");
        for affinity in 1..=REMEMBERED as u64 {
            router.choose(&views, Some(affinity));
        }
        let Recent { engines, order } = &router.recent;
        assert!(engines.len() == REMEMBERED && order.len() == REMEMBERED && !engines.contains_key(&0));
    }
}
