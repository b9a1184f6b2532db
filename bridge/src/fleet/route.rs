//! Chooses the engine for a request, as a function over what is known of the engines.

use std::collections::{HashMap, VecDeque};

/// Conversations and affinities of which the engine is remembered.
const REMEMBERED: usize = 65_536;

/// How a request finds its engine among those that may take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Route {
    /// The one with the fewest of our requests; in turn among equals. A request of a conversation goes where the last one of
    /// that went, and else one with an affinity where the last one with it went, if that engine has a free place and is not
    /// far ahead. It may have a quarter of the fleet's concurrency, and at least one request, more than the least loaded
    /// engine. The 65,536 conversations and affinities that were used last count.
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

/// Where a request would find its beginning in an engine's cache.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Near {
    pub(super) conversation: Option<u64>,
    pub(super) affinity: Option<u64>,
}

impl Near {
    /// What is remembered of it, the nearest first.
    fn keys(self) -> impl Iterator<Item = Key> {
        self.conversation.map(Key::Conversation).into_iter().chain(self.affinity.map(Key::Affinity))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    Conversation(u64),
    Affinity(u64),
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

/// Which engine each went to last.
#[derive(Debug, Default)]
struct Recent {
    /// The engine, and the use that was the last.
    engines: HashMap<Key, (u64, u64)>,
    /// Uses, the oldest first. Of those of one key the last counts.
    uses: VecDeque<(Key, u64)>,
    /// Counts them.
    used: u64,
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
    pub(super) fn choose(&mut self, views: &[View], near: Near) -> Option<usize> {
        let mut known = near.keys().filter_map(|key| self.recent.engines.get(&key));
        let last = known.find_map(|(last, _)| views.iter().position(|view| view.id == *last));
        let chosen = choose(self.route, views, self.concurrency, self.turn, last)?;
        self.turn = self.turn.wrapping_add(1);
        near.keys().for_each(|key| self.recent.put(key, views[chosen].id));
        Some(chosen)
    }
}

impl Recent {
    fn put(&mut self, key: Key, engine: u64) {
        self.used += 1;
        self.engines.insert(key, (engine, self.used));
        self.uses.push_back((key, self.used));
        while self.engines.len() > REMEMBERED
            && let Some((oldest, at)) = self.uses.pop_front()
        {
            if self.engines.get(&oldest).is_some_and(|(_, last)| *last == at) {
                self.engines.remove(&oldest);
            }
        }
        // Of the uses of one that is asked for again and again, only the last is of use.
        if self.uses.len() > 2 * REMEMBERED {
            self.uses.retain(|(key, at)| self.engines.get(key).is_some_and(|(_, last)| last == at));
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
        let near = Near { affinity: Some(7), ..Near::default() };
        let first = router.choose(&views, near).unwrap();
        let id = views[first].id;
        views.remove(if first == 0 { 1 } else { 0 });
        let again = router.choose(&views, near).unwrap();
        assert_eq!(views[again].id, id);
        views.remove(again);
        let elsewhere = router.choose(&views, near).unwrap();
        assert_ne!(views[elsewhere].id, id);
    }

    #[test]
    fn router_remembers_what_was_used_last_and_no_more() {
        let mut router = Router::new(Route::LeastLoaded, 64);
        let views = views(&[0, 0]);
        let near = |affinity| Near { affinity: Some(affinity), ..Near::default() };
        let first = router.choose(&views, near(0));
        assert_eq!(router.choose(&views, near(0)), first, "not in turn");
        for affinity in 1..=3 * REMEMBERED as u64 {
            router.choose(&views, near(affinity));
            // One that goes on is not forgotten for others.
            if affinity.is_multiple_of(100) {
                router.choose(&views, near(0));
            }
        }
        let Recent { engines, uses, .. } = &router.recent;
        assert!(engines.len() == REMEMBERED && uses.len() <= 2 * REMEMBERED);
        let is_known = |affinity| engines.contains_key(&Key::Affinity(affinity));
        assert!(is_known(0) && is_known(3 * REMEMBERED as u64) && !is_known(REMEMBERED as u64));
    }

    #[test]
    fn conversation_stays_where_its_last_turn_was() {
        let mut router = Router::new(Route::LeastLoaded, 64);
        let idle = views(&[0, 0]);
        let of = |conversation| Near { conversation: Some(conversation), affinity: Some(7) };
        let first = router.choose(&idle, of(1)).unwrap();
        assert_eq!(router.choose(&idle, of(2)), Some(first), "its first turn goes where the group is");
        // The group's engine is far ahead for a moment.
        let mut loads = [0, 0];
        loads[first] = 60;
        let other = router.choose(&views(&loads), of(3)).unwrap();
        assert_ne!(other, first);
        let turns = [1, 3, 2, 1].map(|conversation| router.choose(&idle, of(conversation)));
        assert_eq!(turns, [first, other, first, first].map(Some));
    }
}
