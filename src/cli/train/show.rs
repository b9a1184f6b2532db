//! What `driftless train` shows while it runs.

use crate::cli::shared::output::say;
use crate::cli::shared::progress;
use crate::cli::train::report;
use driftless::trainer::{Event, Observer};
use driftless::transport::Version;
use driftless::transport::publish::Notify;
use indicatif::ProgressBar;
use std::sync::Arc;

/// Shows a run on a progress bar, and its turning points as lines; tells followers of its versions.
pub(super) fn observer(steps: u64, notify: Option<Notify>) -> Observer {
    let bar = progress::bar(steps, "rl");
    Arc::new(move |event| {
        if let (Event::Published { version }, Some(notify)) = (&event, &notify) {
            notify.tell(Version(*version));
        }
        show(&bar, &event);
    })
}

fn show(bar: &ProgressBar, event: &Event<'_>) {
    match event {
        Event::Begin { step, of } => {
            if *step > 0 {
                line(bar, &format!("rl: going on at step {step} of {of}"));
            }
            bar.set_position(*step);
        }
        Event::Waiting { what } => bar.set_message(format!("waiting for {what}")),
        Event::Generating { rollout, done, total } => {
            bar.set_message(format!("rollout {rollout}: {done} of {total} samples"));
        }
        Event::Changed { name, then, now } => {
            line(bar, &format!("rl: goes on with {name} {now}; it was {then} up to the last checkpoint"));
        }
        Event::Skipped { rollout, what } => {
            line(bar, &format!("rl: step {rollout} is left out: {what}"));
        }
        Event::LearnerLost { error } => {
            line(bar, &format!("rl: {error}"));
            line(bar, "rl: the learner is started again, from its last checkpoint");
        }
        Event::Evaluated { step, eval } => {
            for (name, set) in &eval.sets {
                line(bar, &format!("rl: step {step}: {name}: {}", report::describe(set)));
            }
        }
        Event::Step(step) => {
            bar.set_position(step.rollout_id + 1);
            bar.set_message(format!("reward {:.3}", step.reward));
        }
        _ => {}
    }
}

/// A line above the bar; plain where there is no bar to be seen.
fn line(bar: &ProgressBar, text: &str) {
    if bar.is_hidden() { say(text) } else { bar.println(text) }
}
