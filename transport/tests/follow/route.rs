//! Who decides which way versions come.

use std::sync::{Arc, Mutex};

use driftless_transport::{Arrival, Error, Follower, Routed, Router, Run};

use crate::Fixture;
use crate::common::MODEL;

/// Notes what it is asked, and chooses by the form; removes a version's objects if it is given the run.
#[derive(Default)]
struct Noted(Mutex<Vec<Arrival>>, Mutex<Option<Run>>);

impl std::fmt::Debug for Noted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Noted").field(&self.0).finish_non_exhaustive()
    }
}

impl Router for Noted {
    fn route(&self, arrival: &Arrival) -> Routed {
        self.0.lock().unwrap().push(arrival.clone());
        for run in self.1.lock().unwrap().iter() {
            let objects = run.get(MODEL, arrival.version).unwrap().manifest.objects;
            objects.iter().for_each(|object| run.store().delete(&object.key).unwrap());
        }
        let way = if arrival.full { "whole" } else { "changed" };
        let (version, bytes) = (arrival.version, arrival.bytes);
        Routed { version, bytes, way: way.to_owned(), reason: format!("{bytes} bytes") }
    }
}

#[test]
fn a_router_hears_what_will_be_fetched_before_it_is() {
    let mut fixture = Fixture::new();
    let noted = Arc::new(Noted::default());
    let mut options = fixture.options();
    options.router = Some(noted.clone());
    let follower = Follower::open(fixture.fault.clone(), options, vec![]).unwrap();
    assert_eq!(follower.status().route, None);
    // In full, one delta, two at once, nothing, and in full again.
    let mut heard = 0;
    for (deltas, links, full) in [(0, 1, true), (1, 1, false), (2, 2, false), (0, 0, false)] {
        for _ in 0..deltas {
            fixture.publish();
        }
        let prepared = follower.prepare(None).unwrap();
        assert_eq!(prepared.advanced.links, links);
        heard += usize::from(links > 0);
        let arrivals = noted.0.lock().unwrap().clone();
        assert_eq!(arrivals.len(), heard, "it hears of each version that comes, and of no other");
        let Some(arrival) = arrivals.last().filter(|_| links > 0) else { continue };
        assert_eq!((arrival.version, arrival.full), (prepared.version, full));
        let manifest = fixture.publisher.run().newest(MODEL).unwrap().unwrap().manifest;
        assert_eq!((arrival.bytes, arrival.model_bytes), (prepared.advanced.bytes, manifest.tensor_bytes()));
        let route = follower.status().route.unwrap();
        assert_eq!((route.version, route.bytes), (prepared.version, prepared.advanced.bytes));
        assert_eq!(route.way, if full { "whole" } else { "changed" });
    }
    // What goes when the router is asked was not fetched before.
    fixture.publish();
    *noted.1.lock().unwrap() = Some(fixture.publisher.run().clone());
    let error = follower.prepare(None).unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error:?}");
}
