//! What `driftless train` shows while it runs: a bar on a terminal, else a line for each step and for what is waited
//! for.

use crate::cli::shared::alerts::remedy;
use crate::cli::shared::error::flag;
use crate::cli::shared::logs;
use crate::cli::shared::output::{say, wrapped};
use crate::cli::shared::progress;
use crate::cli::train::report;
use driftless::trainer::events::{Event, Fact};
use driftless::trainer::metrics::StepMetrics;
use indicatif::ProgressBar;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// How long something may be waited for before a line says so; twice as long before the next one.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for samples, which take their time.
const PATIENCE_FOR_SAMPLES: Duration = Duration::from_secs(60);

/// What begins each line.
const PREFIX: &str = "rl: ";
/// Columns that the lines of a step have with it.
const COLUMNS: usize = 100;
/// Before what a step's first line had no room for.
const INDENT: usize = 4;

/// Shows a run of so many steps, and counts those that are done.
pub(super) struct Show {
    bar: ProgressBar,
    steps: u64,
    done: AtomicU64,
    /// To the thread that tells of waits; absent on a terminal, where the bar does.
    waits: Option<Sender<Option<Wait>>>,
}

impl Show {
    pub(super) fn new(steps: u64) -> Arc<Self> {
        let bar = progress::bar(steps, "rl");
        let waits = bar.is_hidden().then(|| {
            let (sender, receiver) = channel();
            let thread = std::thread::Builder::new().name("waits".to_owned());
            // Without the thread, waits are not told of.
            let _ = thread.spawn(move || tell_waits(&receiver));
            sender
        });
        Arc::new(Show { bar, steps, done: AtomicU64::new(0), waits })
    }

    /// The run, for a message that ends it.
    pub(super) fn run(&self) -> String {
        format!("the run, with {} of {} steps done,", self.done.load(Relaxed), self.steps)
    }

    /// Shows what has happened.
    pub(super) fn take(&self, Fact { event, .. }: &Fact) {
        match event {
            Event::Waiting { what, on } => return self.wait(what, on, PATIENCE),
            Event::Generating { rollout, done, total } => {
                let samples = format!("{done} of {total} samples");
                return self.wait(&format!("rollout {rollout}"), &samples, PATIENCE_FOR_SAMPLES);
            }
            // The log tells of the former, and a step's line of the latter.
            Event::Phase { .. } | Event::Published { .. } | Event::Served { .. } => return,
            _ => {}
        }
        self.tell(None);
        match event {
            Event::Begin { step: 0, of } => self.begin(0, &format!("begins: {of} steps")),
            Event::Begin { step, of } => self.begin(*step, &format!("going on at step {step} of {of}")),
            Event::Rollouts { step, of } => {
                self.begin(*step, &format!("generates for the trainer, which has done {step} steps of {of}"));
            }
            Event::Engine { url, gets } => self.line(&format!("engine {url}, seen from here: {gets}")),
            Event::Listening { addr } => self.line(&format!("engines can be changed at http://{addr}")),
            Event::LogMissing { step } => self.line(&format!(
                "the rollout log has none of the prompts that {step} steps were trained on; they are taken again"
            )),
            Event::Changed { name, then, now } => {
                let name = flag(name).unwrap_or_else(|| name.clone());
                self.line(&format!("goes on with {name} {now}; it was {then} before"));
            }
            Event::OtherPrompts => {
                self.line(
                    "prompts, labels or their order have changed: prompts may be trained on again, or never",
                );
            }
            Event::Skipped { rollout, what } => self.line(&format!("step {rollout} is left out: {what}")),
            Event::LearnerLost { error } => {
                self.line(error);
                self.line("the learner is started again, from its last checkpoint");
            }
            Event::Evaluated { step, eval } => {
                for (name, set) in &eval.sets {
                    self.line(&format!("step {step}: {name}: {}", report::describe(set)));
                }
            }
            Event::Alert { alert, begins: true, text } => {
                self.line(&format!("alert: {text}: {}", remedy(alert)));
            }
            Event::Alert { text, .. } => self.line(&format!("alert is over: {text}")),
            Event::Step(step) => {
                self.progress(step.rollout_id + 1);
                self.bar.set_message(format!("reward {:.3}", step.reward));
                if self.bar.is_hidden() {
                    self.line(&lines(&describe(step, self.steps), logs::is_json()));
                }
            }
            _ => {}
        }
    }

    fn begin(&self, done: u64, line: &str) {
        self.progress(done);
        self.line(line);
    }

    fn progress(&self, done: u64) {
        self.done.store(done, Relaxed);
        self.bar.set_position(done);
    }

    fn wait(&self, what: &str, on: &str, patience: Duration) {
        let wait =
            Wait { what: what.to_owned(), on: on.to_owned(), begun: Instant::now(), tell_after: patience };
        self.bar.set_message(wait.text());
        self.tell(Some(wait));
    }

    fn tell(&self, wait: Option<Wait>) {
        if let Some(waits) = &self.waits {
            // It runs as long as this value is there.
            let _ = waits.send(wait);
        }
    }

    /// A line above the bar; plain where there is no bar to be seen.
    fn line(&self, text: &str) {
        let text = format!("{PREFIX}{text}");
        if self.bar.is_hidden() { say(&text) } else { self.bar.println(text) }
    }
}

/// Something that is waited for.
struct Wait {
    what: String,
    /// More about it, as far as it is known.
    on: String,
    begun: Instant,
    tell_after: Duration,
}

impl Wait {
    fn text(&self) -> String {
        let colon = if self.on.is_empty() { "" } else { ": " };
        format!("waiting for {}{colon}{}", self.what, self.on)
    }

    /// The line that tells of it once it has lasted; the next is due after twice the time.
    fn tell(&mut self) -> String {
        let line = format!("rl: {} ({} s)", self.text(), self.tell_after.as_secs());
        self.tell_after *= 2;
        line
    }
}

/// Tells of waits that last. A wait ends with the next one of another name, or with none.
fn tell_waits(waits: &Receiver<Option<Wait>>) {
    let mut current: Option<Wait> = None;
    loop {
        let next = match &current {
            Some(wait) => {
                waits.recv_timeout((wait.begun + wait.tell_after).saturating_duration_since(Instant::now()))
            }
            None => waits.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match (next, &mut current) {
            (Ok(Some(next)), Some(wait)) if next.what == wait.what => wait.on = next.on,
            (Ok(next), current) => *current = next,
            (Err(RecvTimeoutError::Timeout), Some(wait)) => say(&wait.tell()),
            (Err(_), _) => return,
        }
    }
}

/// Parts of a step in one line, or with what has no room there in further ones. An object has one.
fn lines(parts: &[String], is_object: bool) -> String {
    if is_object {
        return parts.join(" ");
    }
    wrapped(parts.iter().map(String::as_str), COLUMNS - PREFIX.len(), INDENT).join("\n    ")
}

/// A step in parts. Times are in seconds; what is usual is left out.
fn describe(step: &StepMetrics, of: u64) -> Vec<String> {
    let seconds = |milliseconds: f64| milliseconds / 1e3;
    let mut parts = vec![
        format!("step {}/{of}", step.rollout_id + 1),
        format!("reward {:.3}", step.reward),
        format!("len {:.1}", step.response_length),
        format!("gen {:.1} s", seconds(step.generate_ms)),
        format!("train {:.1} s", seconds(step.train_ms)),
    ];
    if let Some(published) = &step.publication {
        let update = seconds(published.encode_publish_ms + published.convergence_ms.unwrap_or_default());
        parts.push(format!("update {update:.1} s v{}", published.version));
        if published.engines_behind > 0 {
            parts.push(format!("without {} engines", published.engines_behind));
        }
        if published.not_compared.is_some() {
            parts.push("not compared".to_owned());
        }
    }
    let counts = [("failed", step.groups_failed), ("filtered", step.groups_filtered)];
    parts
        .extend(counts.iter().filter(|(_, count)| *count > 0).map(|(name, count)| format!("{name} {count}")));
    if !step.answers_failed.is_empty() {
        let (failed, again) = (report::failures(&step.answers_failed), step.answers_made_again);
        parts.push(format!("answers failed: {failed}, made again {again}"));
    }
    if step.skipped {
        parts.push("left out".to_owned());
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftless::trainer::Failure;
    use driftless::trainer::metrics::PublicationMetrics;

    fn step() -> StepMetrics {
        let publication = PublicationMetrics {
            version: 13,
            encode_publish_ms: 150.0,
            convergence_ms: Some(260.0),
            ..Default::default()
        };
        StepMetrics {
            rollout_id: 11,
            reward: 0.35,
            response_length: 22.7,
            generate_ms: 3512.0,
            train_ms: 8100.0,
            publication: Some(publication),
            ..StepMetrics::default()
        }
    }

    /// As it is printed off a terminal.
    fn line(step: &StepMetrics) -> String {
        lines(&describe(step, 40), false)
    }

    #[test]
    fn step_is_one_line_and_unusual_things_are_in_it() {
        assert_eq!(line(&step()), "step 12/40 reward 0.350 len 22.7 gen 3.5 s train 8.1 s update 0.4 s v13");
        let mut uncompared = step();
        uncompared.publication.as_mut().expect("a publication").not_compared =
            Some("e: no plugin".to_owned());
        assert!(line(&uncompared).ends_with(" v13 not compared"));
        let odd = StepMetrics { groups_failed: 2, skipped: true, publication: None, ..step() };
        assert_eq!(line(&odd), "step 12/40 reward 0.350 len 22.7 gen 3.5 s train 8.1 s failed 2 left out");
        let died = StepMetrics {
            answers_failed: [(Failure::Environment, 3), (Failure::Parser, 1)].into(),
            answers_made_again: 2,
            ..step()
        };
        let line = line(&died);
        let expected = " v13\n        answers failed: environment 3, parser 1, made again 2";
        assert!(line.ends_with(expected), "{line}");
    }

    #[test]
    fn step_that_has_much_to_tell_keeps_within_its_columns() {
        let publication = PublicationMetrics {
            version: 98_765,
            convergence_ms: Some(12_345_678.0),
            engines_behind: 12,
            not_compared: Some("e: no plugin".to_owned()),
            ..Default::default()
        };
        let outcomes = [Failure::Environment, Failure::Parser];
        let much = StepMetrics {
            rollout_id: 98_764,
            reward: -1234.567,
            response_length: 123_456.7,
            generate_ms: 98_765_432.0,
            train_ms: 98_765_432.0,
            groups_failed: 1234,
            groups_filtered: 5678,
            answers_failed: outcomes.map(|outcome| (outcome, u64::MAX)).into(),
            answers_made_again: u64::MAX,
            skipped: true,
            publication: Some(publication),
            ..StepMetrics::default()
        };
        let parts = describe(&much, 100_000);
        let text = format!("{PREFIX}{}", lines(&parts, false));
        assert!(text.lines().count() > 1, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= COLUMNS), "{text}");
        assert!(text.lines().skip(1).all(|line| line.starts_with("        ")), "{text}");
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(&text)[1..], words(&parts.join(" ")), "nothing is lost");
        assert_eq!(lines(&parts, true), parts.join(" "));
    }

    #[test]
    fn wait_is_told_of_ever_more_rarely() {
        let (what, on) = ("the engines to answer".to_owned(), "http://e:1".to_owned());
        let mut wait = Wait { what, on, begun: Instant::now(), tell_after: PATIENCE };
        assert_eq!(wait.tell(), "rl: waiting for the engines to answer: http://e:1 (10 s)");
        assert_eq!(wait.tell(), "rl: waiting for the engines to answer: http://e:1 (20 s)");
    }
}
