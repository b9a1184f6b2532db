//! Compares the ways of a version to the engines, as a function of measured figures.
//!
//! Each way is a sum of phases, and each phase is bytes over a rate. Rates count bytes of the model, so that
//! they can be read off a run without knowing how dense its steps are.

mod route;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use route::{Entry, Published, Way, Ways, route};

use crate::{Error, Result};

/// What bytes travel through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carrier {
    /// Broadcasts into the engines' memory.
    Nccl,
    /// UCX, from host to host.
    Ucx,
    /// A store: a directory that hosts share, or a bucket.
    Store,
}

impl Carrier {
    const ALL: [Self; 3] = [Self::Nccl, Self::Ucx, Self::Store];
}

/// What travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Every weight.
    Full,
    /// What changed.
    Delta,
}

/// A way for bytes between the trainer and the hosts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Bytes a second.
    pub rate: f64,
    /// Seconds before the first of them arrives: round trips, and how long a poll takes to see a version.
    pub latency: f64,
}

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figures {
    /// Bytes of the model.
    pub model_bytes: u64,
    /// Bytes of one version's delta.
    pub delta_bytes: u64,
    /// Bytes of the model that the trainer encodes in a second.
    pub encode: f64,
    /// Bytes of the model to which a host applies a delta in a second.
    pub apply: f64,
    /// Whether hosts apply a delta while it is still being encoded, tensor by tensor. Versions in a store are whole before anybody sees them.
    pub overlap: bool,
    /// Bytes that an engine loads from its host in a second; `None` where deltas are applied to the engine's own memory.
    pub load: Option<f64>,
    /// NCCL between the trainer's GPU and the engines'.
    pub nccl: Option<Link>,
    /// UCX between the hosts.
    pub ucx: Option<Link>,
    /// The store, from the trainer to a host that reads while others do.
    pub store: Option<Link>,
}

impl Figures {
    fn link(&self, carrier: Carrier) -> Option<Link> {
        match carrier {
            Carrier::Nccl => self.nccl,
            Carrier::Ucx => self.ucx,
            Carrier::Store => self.store,
        }
    }
}

/// What somebody decided beforehand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pin {
    /// Only this carrier.
    pub carrier: Option<Carrier>,
    /// Only this form.
    pub form: Option<Form>,
}

/// How long one way takes.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// Through what.
    pub carrier: Carrier,
    /// What.
    pub form: Form,
    /// Phases and their seconds, in order.
    pub phases: Vec<(&'static str, f64)>,
}

/// The way that takes least, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The way.
    pub best: Estimate,
    /// The other ways, the quickest first.
    pub others: Vec<Estimate>,
    /// What was decided beforehand.
    pub pin: Pin,
}

impl Estimate {
    /// Seconds of all phases.
    pub fn seconds(&self) -> f64 {
        self.phases.iter().map(|(_, seconds)| seconds).sum()
    }

    fn new(figures: &Figures, carrier: Carrier, form: Form, link: Link) -> Self {
        let model = figures.model_bytes as f64;
        let moved = if form == Form::Full { model } else { figures.delta_bytes as f64 };
        let moving = ("move", link.latency + moved / link.rate);
        let phases = match (carrier, form) {
            // What arrives is in the engine.
            (Carrier::Nccl, _) => vec![moving],
            (_, Form::Delta) => {
                let (encode, apply) = (model / figures.encode, model / figures.apply);
                let hidden = if figures.overlap { apply.min(encode + moving.1) } else { 0.0 };
                let mut phases =
                    vec![("encode", encode), moving, ("apply", apply), ("of it at once", -hidden)];
                phases.retain(|(_, seconds)| *seconds != 0.0);
                phases.extend(figures.load.map(|rate| ("load", model / rate)));
                phases
            }
            (_, Form::Full) => {
                let load = figures.load.map(|rate| ("load", model / rate));
                [moving].into_iter().chain(load).collect()
            }
        };
        Self { carrier, form, phases }
    }
}

/// Chooses the way that takes least of those that there are and that are not ruled out.
///
/// # Errors
/// [`Error::NoWay`] when none is left, or a figure is not a positive number.
pub fn choose(figures: &Figures, pin: Pin) -> Result<Choice> {
    check(figures)?;
    let links = Carrier::ALL.map(|carrier| (carrier, figures.link(carrier)));
    let mut estimates = Vec::new();
    for (carrier, link) in links {
        let Some(link) = link.filter(|_| pin.carrier.is_none_or(|pinned| pinned == carrier)) else {
            continue;
        };
        for form in [Form::Full, Form::Delta] {
            // A broadcast has no base to apply a delta to.
            let possible = (carrier, form) != (Carrier::Nccl, Form::Delta);
            if possible && pin.form.is_none_or(|pinned| pinned == form) {
                estimates.push(Estimate::new(figures, carrier, form, link));
            }
        }
    }
    estimates.sort_by(|a, b| a.seconds().total_cmp(&b.seconds()));
    let mut estimates = estimates.into_iter();
    let Some(best) = estimates.next() else {
        let there: Vec<_> =
            links.iter().filter(|(_, link)| link.is_some()).map(|(carrier, _)| carrier.to_string()).collect();
        let pinned = [pin.carrier.map(|carrier| carrier.to_string()), pin.form.map(|form| form.to_string())];
        let pinned: Vec<_> = pinned.into_iter().flatten().collect();
        let found = format!("links: [{}], pinned: [{}]", there.join(", "), pinned.join(", "));
        let what = "a link that can carry what is pinned (NCCL carries full weights only)".into();
        return Err(Error::NoWay { what, found });
    };
    Ok(Choice { best, others: estimates.collect(), pin })
}

fn check(figures: &Figures) -> Result<()> {
    let links = [("nccl", Carrier::Nccl), ("ucx", Carrier::Ucx), ("store", Carrier::Store)];
    let links = links.map(|(name, carrier)| (name, figures.link(carrier)));
    let rates = links.map(|(name, link)| (name, link.map(|link| link.rate)));
    let own = [("encode", Some(figures.encode)), ("apply", Some(figures.apply)), ("load", figures.load)];
    for (name, rate) in rates.into_iter().chain(own) {
        if rate.is_some_and(|rate| !(rate.is_finite() && rate > 0.0)) {
            let found = rate.map_or_else(String::new, |rate| rate.to_string());
            return Err(Error::NoWay { what: format!("a rate above 0 for {name}"), found });
        }
    }
    let late = links
        .into_iter()
        .find(|(_, link)| link.is_some_and(|link| link.latency.is_nan() || link.latency < 0.0));
    match late {
        Some((name, _)) => {
            Err(Error::NoWay { what: format!("a latency of {name} of 0 or more"), found: "another".into() })
        }
        None => Ok(()),
    }
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nccl => "NCCL",
            Self::Ucx => "UCX",
            Self::Store => "the store",
        })
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "full weights",
            Self::Delta => "a delta",
        })
    }
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phases: Vec<_> =
            self.phases.iter().map(|(name, seconds)| format!("{name} {}", time(*seconds))).collect();
        write!(f, "{} over {}: {} ({})", self.form, self.carrier, time(self.seconds()), phases.join(", "))
    }
}

impl fmt::Display for Choice {
    /// One line: the way, its phases, and the other ways behind it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.best)?;
        if self.pin != Pin::default() {
            f.write_str(", pinned")?;
        }
        self.others.iter().try_for_each(|other| write!(f, "; {other}"))
    }
}

fn time(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.1} ms", seconds * 1e3) } else { format!("{seconds:.2} s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row of `benches/record/2026-11-21-colocate.txt` or, from the ninth on, `2026-11-22-nccl.txt`: two H200, NCCL over NVLink, deltas through shared memory, HBM to HBM.
    struct Row {
        layers: u32,
        /// What the delta is like.
        kind: &'static str,
        delta_bytes: u64,
        /// Milliseconds of encode, move and apply.
        phases: [f64; 3],
        /// Milliseconds of all of it, one after the other and tensor by tensor at once.
        measured: [f64; 2],
    }

    const MODEL: [(u32, u64, f64); 2] = [(4, 4_032_899_072, 11.1), (36, 16_381_470_720, 44.7)];

    #[rustfmt::skip]
    const ROWS: [Row; 14] = [
        Row { layers: 4, kind: "fast 0.1 %", delta_bytes: 3_469_692, phases: [8.7, 0.3, 4.8], measured: [13.9, 9.1] },
        Row { layers: 4, kind: "wire 0.1 %", delta_bytes: 3_422_044, phases: [11.5, 0.3, 9.0], measured: [21.1, 11.9] },
        Row { layers: 4, kind: "fast 1 %", delta_bytes: 24_927_968, phases: [10.3, 3.0, 18.1], measured: [31.5, 20.4] },
        Row { layers: 4, kind: "wire 1 %", delta_bytes: 24_316_050, phases: [14.7, 3.0, 23.7], measured: [42.1, 27.9] },
        Row { layers: 4, kind: "fast 5 %", delta_bytes: 93_509_153, phases: [16.7, 11.8, 63.4], measured: [93.3, 68.0] },
        Row { layers: 4, kind: "wire 5 %", delta_bytes: 89_512_271, phases: [26.5, 13.6, 71.3], measured: [111.4, 83.3] },
        Row { layers: 36, kind: "fast 0.1 %", delta_bytes: 14_073_980, phases: [54.5, 1.8, 28.5], measured: [85.6, 57.9] },
        Row { layers: 36, kind: "wire 0.1 %", delta_bytes: 13_883_644, phases: [64.8, 1.5, 50.2], measured: [117.7, 67.2] },
        Row { layers: 36, kind: "fast 0.1 %", delta_bytes: 14_073_980, phases: [41.0, 1.7, 26.7], measured: [69.9, 43.6] },
        Row { layers: 36, kind: "wire 0.1 %", delta_bytes: 13_883_644, phases: [63.2, 1.6, 50.0], measured: [114.9, 66.7] },
        Row { layers: 36, kind: "fast 1 %", delta_bytes: 101_229_536, phases: [52.2, 10.4, 48.9], measured: [111.9, 63.5] },
        Row { layers: 36, kind: "wire 1 %", delta_bytes: 98_733_266, phases: [78.2, 10.2, 77.9], measured: [169.6, 92.6] },
        Row { layers: 36, kind: "fast 5 %", delta_bytes: 379_853_953, phases: [90.8, 45.3, 123.7], measured: [260.6, 135.2] },
        Row { layers: 36, kind: "wire 5 %", delta_bytes: 363_624_879, phases: [103.5, 42.2, 186.1], measured: [333.5, 195.9] },
    ];

    /// What is known of a model once it was encoded and applied; NCCL was measured with the small one.
    fn figures(row: &Row, overlap: bool) -> (Figures, f64) {
        let (_, model_bytes, full) = *MODEL.iter().find(|(layers, ..)| *layers == row.layers).unwrap();
        let (_, small, small_full) = MODEL[0];
        let [encode, moved, apply] = row.phases.map(|ms| ms / 1e3);
        let link = |rate| Some(Link { rate, latency: 0.0 });
        let figures = Figures {
            model_bytes,
            delta_bytes: row.delta_bytes,
            encode: model_bytes as f64 / encode,
            apply: model_bytes as f64 / apply,
            overlap,
            load: None,
            nccl: link(small as f64 / (small_full / 1e3)),
            ucx: link(row.delta_bytes as f64 / moved),
            store: None,
        };
        (figures, full)
    }

    #[test]
    fn the_choice_is_within_a_tenth_of_the_best_that_was_measured() {
        let (mut full, mut delta) = (0, 0);
        for row in &ROWS {
            for (n, overlap) in [false, true].into_iter().enumerate() {
                let (figures, whole) = figures(row, overlap);
                // The delta is what is measured over this link; the full weights over it are not.
                let ways = [
                    Pin { carrier: Some(Carrier::Nccl), form: None },
                    Pin { carrier: None, form: Some(Form::Delta) },
                ];
                let chosen = ways
                    .map(|pin| choose(&figures, pin).unwrap().best)
                    .into_iter()
                    .min_by(|a, b| a.seconds().total_cmp(&b.seconds()))
                    .unwrap();
                let measured = |form| if form == Form::Full { whole } else { row.measured[n] };
                let (took, best) = (measured(chosen.form), whole.min(row.measured[n]));
                assert!(
                    took <= 1.1 * best,
                    "{} layers, {}, {overlap}: {chosen} took {took} ms, best {best}",
                    row.layers,
                    row.kind
                );
                if chosen.form == Form::Full { full += 1 } else { delta += 1 }
            }
        }
        assert!(full > 0 && delta > 0, "both occur: {full} and {delta}");
    }

    #[test]
    fn estimates_are_near_what_was_measured() {
        for row in &ROWS {
            for (n, overlap) in [false, true].into_iter().enumerate() {
                let (figures, _) = figures(row, overlap);
                let pin = Pin { carrier: Some(Carrier::Ucx), form: Some(Form::Delta) };
                let estimate = choose(&figures, pin).unwrap().best.seconds() * 1e3;
                let off = estimate / row.measured[n];
                // Handing over, tensor by tensor, is what no phase counts.
                assert!(
                    (0.8..1.1).contains(&off),
                    "{} layers, {}: {estimate} of {}",
                    row.layers,
                    row.kind,
                    row.measured[n]
                );
            }
        }
    }

    pub(super) fn plain() -> Figures {
        let link = |rate| Some(Link { rate, latency: 0.5 });
        Figures {
            model_bytes: 1000,
            delta_bytes: 10,
            encode: 500.0,
            apply: 250.0,
            overlap: false,
            load: Some(100.0),
            nccl: None,
            ucx: link(1000.0),
            store: link(10.0),
        }
    }

    #[test]
    fn the_line_names_every_way_and_its_phases() {
        let choice = choose(&plain(), Pin::default()).unwrap();
        assert_eq!(
            choice.to_string(),
            "full weights over UCX: 11.50 s (move 1.50 s, load 10.00 s); a delta over UCX: 16.51 s (encode 2.00 s, move 510.0 ms, apply 4.00 s, \
             load 10.00 s); a delta over the store: 17.50 s (encode 2.00 s, move 1.50 s, apply 4.00 s, load 10.00 s); full weights over the \
             store: 110.50 s (move 100.50 s, load 10.00 s)"
        );
    }

    #[test]
    fn what_is_pinned_stays() {
        let pin = Pin { carrier: Some(Carrier::Store), form: Some(Form::Full) };
        let choice = choose(&plain(), pin).unwrap();
        assert_eq!(
            (choice.best.carrier, choice.best.form, choice.others.len()),
            (Carrier::Store, Form::Full, 0)
        );
        assert!(choice.to_string().ends_with(", pinned"), "{choice}");
        for pin in [
            Pin { carrier: Some(Carrier::Nccl), form: None },
            Pin { carrier: Some(Carrier::Nccl), form: Some(Form::Delta) },
        ] {
            let refused = choose(&plain(), pin).unwrap_err();
            assert!(matches!(refused, Error::NoWay { .. }), "{refused}");
        }
    }

    #[test]
    fn figures_that_are_none_are_refused() {
        for change in [
            |figures: &mut Figures| figures.encode = 0.0,
            |figures: &mut Figures| figures.apply = f64::NAN,
            |figures: &mut Figures| figures.load = Some(-1.0),
            |figures: &mut Figures| figures.ucx = Some(Link { rate: f64::INFINITY, latency: 0.0 }),
            |figures: &mut Figures| figures.store = Some(Link { rate: 1.0, latency: -1.0 }),
        ] {
            let mut figures = plain();
            change(&mut figures);
            let refused = choose(&figures, Pin::default()).unwrap_err();
            assert!(matches!(refused, Error::NoWay { .. }), "{refused}");
        }
    }
}
