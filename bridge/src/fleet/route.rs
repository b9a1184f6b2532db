//! Chooses the engine for a request, as a function over what is known of the engines.

/// How a request finds its engine among those that may take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Route {
    /// The one with the fewest of our requests; in turn among equals.
    #[default]
    LeastLoaded,
    /// In turn.
    RoundRobin,
}

/// What routing knows of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct View {
    /// Up, and new enough for the request.
    pub(super) eligible: bool,
    /// Our requests under way on it.
    pub(super) in_flight: usize,
}

/// The engine for the next request, or `None` when each is out of the question or full. `turn` counts
/// requests.
pub(super) fn choose(route: Route, views: &[View], concurrency: usize, turn: usize) -> Option<usize> {
    let in_turn = (0..views.len()).map(|step| (turn + step) % views.len());
    let mut free = in_turn.filter(|at| views[*at].eligible && views[*at].in_flight < concurrency);
    match route {
        Route::RoundRobin => free.next(),
        Route::LeastLoaded => free.min_by_key(|at| views[*at].in_flight),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn views(loads: &[usize]) -> Vec<View> {
        loads.iter().map(|in_flight| View { eligible: true, in_flight: *in_flight }).collect()
    }

    #[test]
    fn the_least_loaded_goes_first_and_equals_take_turns() {
        assert_eq!(choose(Route::LeastLoaded, &views(&[3, 1, 2]), 8, 0), Some(1));
        assert_eq!(choose(Route::LeastLoaded, &views(&[1, 1, 1]), 8, 2), Some(2));
        assert_eq!(choose(Route::LeastLoaded, &views(&[1, 1, 1]), 8, 3), Some(0));
    }

    #[test]
    fn full_and_ineligible_engines_are_passed_over() {
        let mut some = views(&[2, 0, 1]);
        some[1].eligible = false;
        assert_eq!(choose(Route::LeastLoaded, &some, 2, 0), Some(2));
        assert_eq!(choose(Route::RoundRobin, &some, 2, 0), Some(2));
        assert_eq!(choose(Route::RoundRobin, &some, 1, 0), None);
        assert_eq!(choose(Route::LeastLoaded, &[], 1, 0), None);
    }
}
