//! What in a run's figures wants somebody's attention, as a function over its steps.

use std::collections::{BTreeSet, VecDeque};

use crate::metrics::StepMetrics;

/// Steps whose mean is looked at: one odd step is none of this.
const STEPS: usize = 5;
/// An alert that was raised ends below this share of where it begins, so that it does not come and go.
const ENDS_AT: f64 = 0.8;

/// Something that spoils a run without ending it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Alert {
    /// Engines and learner give the same tokens different log-probabilities.
    Mismatch,
    /// The policy has become sure of nearly every token.
    EntropyCollapse,
    /// Nearly all groups have one reward throughout.
    ZeroVariance,
    /// Many answers are cut off.
    Truncation,
    /// Many tokens are older than the run may train on.
    TooOld,
    /// Tokens are about as old as the run may train on, where that is more than one step.
    AtBound,
    /// Many groups or answers are left out because an answer, or a reward, failed.
    Failures,
}

/// Of a step: how far it is on the way to an alert.
struct Figure {
    of: fn(&StepMetrics) -> f64,
    /// Where the alert begins.
    begins_at: f64,
}

impl Alert {
    /// All of them.
    pub const ALL: [Alert; 7] = [
        Alert::Mismatch,
        Alert::EntropyCollapse,
        Alert::ZeroVariance,
        Alert::Truncation,
        Alert::TooOld,
        Alert::AtBound,
        Alert::Failures,
    ];

    /// Its name in files and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mismatch => "mismatch",
            Self::EntropyCollapse => "entropy_collapse",
            Self::ZeroVariance => "zero_variance",
            Self::Truncation => "truncation",
            Self::TooOld => "too_old",
            Self::AtBound => "at_bound",
            Self::Failures => "failures",
        }
    }

    /// What is looked at. That of [`Alert::EntropyCollapse`] is compared with the run's beginning first, and that of
    /// [`Alert::Mismatch`] with the engine of the largest.
    fn figure(self) -> Figure {
        let share = |of, begins_at| Figure { of, begins_at };
        match self {
            Self::Mismatch => share(|step| step.stats.log_prob_diff_mean, 0.1),
            Self::EntropyCollapse => share(|step| step.stats.entropy, 0.9),
            Self::ZeroVariance => share(|step| ratio(step.groups_zero_std, step.groups), 0.8),
            Self::Truncation => share(|step| step.truncated, 0.3),
            Self::TooOld => share(|step| ratio(step.tokens_too_old, step.response_tokens), 0.2),
            Self::AtBound => share(at_bound, 0.9),
            Self::Failures => share(failures, 0.1),
        }
    }

    /// What the mean of the figure says, in words; `engines` are those that it is of.
    fn text(self, mean: f64, engines: &str) -> String {
        let percent = 100.0 * mean;
        match self {
            Self::Mismatch => {
                format!("log-probs of {engines} and learner differ by {mean:.3} nats in the mean")
            }
            Self::EntropyCollapse => {
                format!("the policy's entropy is {percent:.0} % below that of the first steps")
            }
            Self::ZeroVariance => format!("{percent:.0} % of the groups have one reward throughout"),
            Self::Truncation => format!("{percent:.0} % of the answers are cut off at the token limit"),
            Self::TooOld => format!("{percent:.0} % of the tokens are too old to be trained on"),
            Self::AtBound => format!("tokens are {percent:.0} % as old as they may be"),
            Self::Failures => {
                format!(
                    "{percent:.0} % of the groups or answers are left out, as an answer or its reward failed"
                )
            }
        }
    }
}

fn ratio(part: u64, of: u64) -> f64 {
    part as f64 / of.max(1) as f64
}

/// The share of the groups, or that of the answers, that failed: the larger one.
fn failures(step: &StepMetrics) -> f64 {
    let attempts: u64 = step.answers_failed.values().sum();
    let (groups, answers) = (step.groups_failed, attempts.saturating_sub(step.answers_made_again));
    // Releases before did not count the answers that are left.
    let of_answers = if step.answers == 0 { 0.0 } else { ratio(answers, step.answers + answers) };
    ratio(groups, step.groups + groups).max(of_answers)
}

/// How old the tokens are, as a share of what they may be. Those of a run that is one step behind always are.
fn at_bound(step: &StepMetrics) -> f64 {
    step.max_staleness.filter(|most| *most > 1).map_or(0.0, |most| step.staleness_mean / most as f64)
}

/// An alert that begins or ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Which.
    pub alert: Alert,
    /// Whether it begins.
    pub begins: bool,
    /// The figure, in words.
    pub text: String,
}

/// The alerts of a run.
#[derive(Debug, Default)]
pub struct Alerts {
    last: VecDeque<StepMetrics>,
    /// Mean entropy of the first steps that tell one.
    entropies: Vec<f64>,
    raised: BTreeSet<Alert>,
}

impl Alerts {
    /// Of a run with these steps, in order.
    #[must_use]
    pub fn after<'a>(steps: impl IntoIterator<Item = &'a StepMetrics>) -> Self {
        let mut alerts = Self::default();
        steps.into_iter().for_each(|step| drop(alerts.see(step)));
        // A process that goes on is told of them again.
        alerts.raised.clear();
        alerts
    }

    /// Takes the next step, and says what begins and what ends with it.
    pub fn see(&mut self, step: &StepMetrics) -> Vec<Change> {
        // Steps that a crash undid are done again.
        self.last.retain(|before| before.rollout_id < step.rollout_id);
        if self.last.len() == STEPS {
            self.last.pop_front();
        }
        self.last.push_back(step.clone());
        if self.entropies.len() < STEPS && step.stats.entropy > 0.0 {
            self.entropies.push(step.stats.entropy);
        }
        if self.last.len() < STEPS {
            return Vec::new();
        }
        Alert::ALL.into_iter().filter_map(|alert| self.look(alert)).collect()
    }

    fn look(&mut self, alert: Alert) -> Option<Change> {
        let Figure { of, begins_at } = alert.figure();
        let mean = self.last.iter().map(of).sum::<f64>() / self.last.len() as f64;
        let (mean, engines) = match alert {
            Alert::EntropyCollapse => (self.lost_entropy(mean), ""),
            Alert::Mismatch => self.worst_engine(mean),
            _ => (mean, ""),
        };
        let was = self.raised.contains(&alert);
        let is = mean >= if was { ENDS_AT * begins_at } else { begins_at };
        if is == was {
            return None;
        }
        let text = alert.text(mean, engines);
        if is {
            self.raised.insert(alert)
        } else {
            self.raised.remove(&alert)
        };
        Some(Change { alert, begins: is, text })
    }

    /// The largest mean difference of an engine that all steps tell of, or the mean of all engines.
    fn worst_engine(&self, mean: f64) -> (f64, &str) {
        let engines = self.last.iter().take(1).flat_map(|first| first.log_prob_diff_by_engine.keys());
        let means = engines.filter_map(|engine| {
            let all = self.last.iter().map(|step| step.log_prob_diff_by_engine.get(engine).copied());
            Some((all.sum::<Option<f64>>()? / self.last.len() as f64, engine.as_str()))
        });
        means.fold((mean, "engines"), |worst, other| if other.0 > worst.0 { other } else { worst })
    }

    /// How much of the first steps' entropy is gone; 0 where no learner tells it.
    fn lost_entropy(&self, mean: f64) -> f64 {
        let first = self.entropies.iter().sum::<f64>() / self.entropies.len().max(1) as f64;
        if self.entropies.len() < STEPS || mean <= 0.0 { 0.0 } else { 1.0 - mean / first }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Failure;

    type Spoil = fn(&mut StepMetrics);

    /// Begins and ends that a run of these steps has, each with the step.
    fn changes(steps: impl IntoIterator<Item = StepMetrics>) -> Vec<(u64, Alert, bool)> {
        let mut alerts = Alerts::default();
        let numbered =
            steps.into_iter().zip(0..).map(|(step, rollout_id)| StepMetrics { rollout_id, ..step });
        let seen = numbered.flat_map(|step| {
            let changes = alerts.see(&step);
            changes.into_iter().map(move |change| (step.rollout_id, change.alert, change.begins))
        });
        seen.collect()
    }

    fn sound() -> StepMetrics {
        let mut step =
            StepMetrics { groups: 10, answers: 80, response_tokens: 1000, ..StepMetrics::default() };
        // Each of them was made again.
        (step.answers_failed, step.answers_made_again) = ([(Failure::Deadline, 20)].into(), 20);
        step.stats.entropy = 1.0;
        (step.max_staleness, step.staleness_mean) = (Some(4), 1.0);
        step.log_prob_diff_by_engine =
            [("http://a", 0.01), ("http://b", 0.02)].map(|(url, apart)| (url.to_owned(), apart)).into();
        step
    }

    #[test]
    fn alert_begins_and_ends_with_the_mean_of_some_steps() {
        let bad: [(Alert, Spoil); 9] = [
            (Alert::Mismatch, |step| step.stats.log_prob_diff_mean = 0.2),
            (Alert::Mismatch, |step| {
                step.log_prob_diff_by_engine.insert("http://b".to_owned(), 0.2);
            }),
            (Alert::EntropyCollapse, |step| step.stats.entropy = 0.01),
            (Alert::ZeroVariance, |step| step.groups_zero_std = 9),
            (Alert::Truncation, |step| step.truncated = 0.5),
            (Alert::TooOld, |step| step.tokens_too_old = 300),
            (Alert::AtBound, |step| step.staleness_mean = 3.8),
            (Alert::Failures, |step| step.groups_failed = 5),
            (Alert::Failures, |step| step.answers_failed = [(Failure::Environment, 30)].into()),
        ];
        for (alert, spoil) in bad {
            let spoilt = || {
                let mut step = sound();
                spoil(&mut step);
                step
            };
            let once = (0..20).map(|step| if step == 8 { spoilt() } else { sound() });
            let shortly = changes(once).into_iter().filter(|(_, found, _)| *found == alert).count();
            assert_eq!(shortly, 0, "{alert:?} of one step");
            let all = changes((0..40).map(|step| if (10..20).contains(&step) { spoilt() } else { sound() }));
            let [(begin, first, true), (end, last, false)] = all[..] else { panic!("{alert:?}: {all:?}") };
            assert_eq!((first, last), (alert, alert));
            assert!((10..15).contains(&begin) && (20..25).contains(&end), "{alert:?}: {begin} to {end}");
        }
    }

    #[test]
    fn nothing_is_said_of_a_sound_run_or_of_what_is_not_measured() {
        assert_eq!(changes((0..50).map(|_| sound())), []);
        assert_eq!(changes((0..50).map(|_| StepMetrics::default())), []);
    }

    #[test]
    fn engine_that_differs_is_named_and_one_step_of_one_is_none() {
        let off = |rollout_id, url: &str| {
            let mut step = StepMetrics { rollout_id, ..sound() };
            step.stats.log_prob_diff_mean = 0.03;
            step.log_prob_diff_by_engine.insert(url.to_owned(), 0.25);
            step
        };
        let mut alerts = Alerts::default();
        let told: Vec<_> = (0..5).flat_map(|step| alerts.see(&off(step, "http://b"))).collect();
        let [Change { alert: Alert::Mismatch, begins: true, text }] = &told[..] else { panic!("{told:?}") };
        assert_eq!(text, "log-probs of http://b and learner differ by 0.250 nats in the mean");
        // Each step has an engine of its own, and so no engine is in all five.
        let others = |step: u64| off(step, &format!("http://{step}"));
        assert_eq!(changes((0..20).map(others)), []);
        // One step behind is as old as one may be, and as young as one can be.
        let behind = |_| StepMetrics { max_staleness: Some(1), ..sound() };
        assert_eq!(changes((0..20).map(behind)), []);
    }

    #[test]
    fn alert_does_not_come_and_go_around_its_bound() {
        let around = |step: u64| StepMetrics {
            truncated: 0.3 + if step.is_multiple_of(2) { 0.02 } else { -0.02 },
            ..sound()
        };
        assert_eq!(changes((0..50).map(around)), [(4, Alert::Truncation, true)]);
    }

    #[test]
    fn run_that_goes_on_is_told_again_and_forgets_undone_steps() {
        let cut = |rollout_id| StepMetrics { rollout_id, truncated: 1.0, ..sound() };
        let before: Vec<_> = (0..10).map(cut).collect();
        let mut alerts = Alerts::after(&before);
        let [Change { alert: Alert::Truncation, begins: true, text }] = &alerts.see(&cut(10))[..] else {
            panic!("none");
        };
        assert_eq!(text, "100 % of the answers are cut off at the token limit");
        let mut undone = Alerts::after(&before);
        let told: Vec<_> = (7..13).map(|step| undone.see(&cut(step)).len()).collect();
        assert_eq!(told, [0, 0, 1, 0, 0, 0], "of the steps before 7, two are among the last five of ten");
    }
}
