//! Chooses the route of a published version to a follower and its engines, from the same figures and the
//! sizes in its manifests.

use std::fmt;

use super::{Carrier, Figures, Form, Link, check, time};
use crate::{Error, Result};

/// How weights get from a follower's host into its engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// Each engine loads the checkpoint.
    Load,
    /// The follower broadcasts all weights over NCCL.
    Nccl,
}

/// A version as its manifests tell of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Published {
    /// Bytes of all weights.
    pub model_bytes: u64,
    /// Bytes that have to be fetched.
    pub bytes: u64,
    /// Whether they are all weights or what changed.
    pub form: Form,
}

/// How long one way takes, from the committed version to engines that have it.
#[derive(Debug, Clone, PartialEq)]
pub struct Way {
    /// What the bytes come through: UCX or the store.
    pub carrier: Carrier,
    /// How they get into the engines.
    pub entry: Entry,
    /// Phases and their seconds, in order.
    pub phases: Vec<(&'static str, f64)>,
}

/// The way that takes least, and the others.
#[derive(Debug, Clone, PartialEq)]
pub struct Ways {
    /// The version.
    pub version: Published,
    /// The way.
    pub best: Way,
    /// The other ways, the quickest first.
    pub others: Vec<Way>,
}

impl Way {
    /// Seconds of all phases.
    pub fn seconds(&self) -> f64 {
        self.phases.iter().map(|(_, seconds)| seconds).sum()
    }

    fn new(figures: &Figures, version: &Published, carrier: Carrier, entry: Entry) -> Result<Self> {
        let model = version.model_bytes as f64;
        let link = link(figures, carrier)?;
        let mut phases = vec![("move", link.latency + version.bytes as f64 / link.rate)];
        if version.form == Form::Delta {
            phases.push(("apply", model / figures.apply));
        }
        match entry {
            Entry::Load => phases.extend(figures.load.map(|rate| ("load", model / rate))),
            Entry::Nccl => {
                let nccl = self::link(figures, Carrier::Nccl)?;
                phases.push(("broadcast", nccl.latency + model / nccl.rate));
            }
        }
        Ok(Self { carrier, entry, phases })
    }
}

/// Chooses the way that takes least of those that a follower has. Of equals the one that is named first is chosen.
///
/// # Errors
/// [`Error::NoWay`] when there is none, when one of them was not measured, or a figure is not a positive number.
pub fn route(figures: &Figures, version: &Published, ways: &[(Carrier, Entry)]) -> Result<Ways> {
    check(figures)?;
    let routes = ways.iter().map(|&(carrier, entry)| Way::new(figures, version, carrier, entry));
    let mut routes = routes.collect::<Result<Vec<_>>>()?;
    routes.sort_by(|a, b| a.seconds().total_cmp(&b.seconds()));
    let mut routes = routes.into_iter();
    let none = || Error::NoWay { what: "a way to the engines".into(), found: "none".into() };
    Ok(Ways { version: *version, best: routes.next().ok_or_else(none)?, others: routes.collect() })
}

fn link(figures: &Figures, carrier: Carrier) -> Result<Link> {
    figures
        .link(carrier)
        .ok_or_else(|| Error::NoWay { what: format!("a figure of {carrier}"), found: "none".into() })
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entry = match self.entry {
            Entry::Load => "",
            Entry::Nccl => ", on over NCCL",
        };
        let phases: Vec<_> =
            self.phases.iter().map(|(name, seconds)| format!("{name} {}", time(*seconds))).collect();
        write!(f, "over {}{entry}: {} ({})", self.carrier, time(self.seconds()), phases.join(", "))
    }
}

impl fmt::Display for Ways {
    /// One line: the version, the way, its phases, and the other ways behind it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Published { model_bytes, bytes, form } = self.version;
        write!(f, "{form}, {bytes} bytes for a model of {model_bytes}; {}", self.best)?;
        self.others.iter().try_for_each(|other| write!(f, "; {other}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELTA: Published = Published { model_bytes: 1000, bytes: 10, form: Form::Delta };

    fn figures() -> Figures {
        let link = |rate, latency| Some(Link { rate, latency });
        let (nccl, ucx, store) = (link(50.0, 0.0), link(1000.0, 1.0), link(10.0, 0.25));
        Figures { nccl, ucx, store, ..super::super::tests::plain() }
    }

    #[test]
    fn what_a_version_weighs_decides_which_way_it_comes() {
        let ways = [(Carrier::Store, Entry::Load), (Carrier::Ucx, Entry::Load)];
        // A byte takes 1 ms over UCX and 100 ms from the store, which begins 0.75 s earlier.
        for (bytes, best) in
            [(0, Carrier::Store), (7, Carrier::Store), (8, Carrier::Ucx), (1000, Carrier::Ucx)]
        {
            for ways in [ways, [ways[1], ways[0]]] {
                let routes = route(&figures(), &Published { bytes, ..DELTA }, &ways).unwrap();
                assert_eq!(routes.best.carrier, best, "{routes}");
                assert!(routes.best.seconds() <= routes.others[0].seconds(), "{routes}");
            }
        }
        assert_eq!(
            route(&figures(), &DELTA, &ways).unwrap().to_string(),
            "a delta, 10 bytes for a model of 1000; over UCX: 15.01 s (move 1.01 s, apply 4.00 s, load 10.00 s); over the store: \
             15.25 s (move 1.25 s, apply 4.00 s, load 10.00 s)"
        );
    }

    #[test]
    fn the_rates_into_engines_decide_how_weights_enter() {
        let ways = [(Carrier::Store, Entry::Load), (Carrier::Store, Entry::Nccl)];
        for (rate, best) in [(50.0, Entry::Load), (200.0, Entry::Nccl)] {
            let figures = Figures { nccl: Some(Link { rate, latency: 0.0 }), ..figures() };
            for form in [Form::Full, Form::Delta] {
                let routes = route(&figures, &Published { form, ..DELTA }, &ways).unwrap();
                assert_eq!(routes.best.entry, best, "{routes}");
            }
        }
        // What is loaded nowhere costs nothing to load.
        let in_place = Figures { load: None, ..figures() };
        assert_eq!(route(&in_place, &DELTA, &ways).unwrap().best.entry, Entry::Load);
    }

    #[test]
    fn the_same_way_takes_as_long_as_from_the_trainer_but_for_the_encoding() {
        let figures = Figures { nccl: None, ucx: None, ..figures() };
        let whole = crate::choose(&figures, crate::Pin { form: Some(Form::Delta), carrier: None }).unwrap();
        let routes = route(&figures, &DELTA, &[(Carrier::Store, Entry::Load)]).unwrap();
        let encode = whole.best.phases[0];
        assert_eq!((encode.0, whole.best.phases[1..].to_vec()), ("encode", routes.best.phases));
    }

    #[test]
    fn ways_that_nobody_measured_are_refused() {
        let without = Figures { ucx: None, nccl: None, ..figures() };
        for ways in [&[][..], &[(Carrier::Ucx, Entry::Load)], &[(Carrier::Store, Entry::Nccl)]] {
            let refused = route(&without, &DELTA, ways).unwrap_err();
            assert!(matches!(refused, Error::NoWay { .. }), "{refused}");
        }
        let broken = Figures { apply: 0.0, ..figures() };
        assert!(route(&broken, &DELTA, &[(Carrier::Store, Entry::Load)]).is_err());
    }
}
