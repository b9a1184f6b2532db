//! Progress bars on a terminal, plain lines elsewhere.

use crate::cli::shared::logs;
use driftless::transport::publish::{Progress, ProgressFn};
use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A bar of `total` steps, on standard error so that results can be piped.
pub(crate) fn bar(total: u64, what: &str) -> ProgressBar {
    drawn(Some(total), what, style("{prefix:>9} [{bar:30}] {pos}/{len} {elapsed} {msg}"))
}

/// A bar of `total` bytes.
pub(crate) fn bytes(total: u64, what: &str) -> ProgressBar {
    drawn(Some(total), what, style("{prefix:>9} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {msg}"))
}

/// A bar of a publication's tensors, in bytes, and what moves it.
pub(crate) fn publication() -> (ProgressBar, Box<ProgressFn>) {
    let bar = bytes(0, "publish");
    let shown = bar.clone();
    let moved = move |progress: Progress| {
        shown.set_length(progress.bytes_total);
        shown.set_position(progress.bytes_encoded);
    };
    (bar, Box::new(moved))
}

/// Work without a known end, of which `text` tells whenever it is drawn.
pub(crate) fn work(what: &str, text: impl Fn() -> String + Clone + Send + Sync + 'static) -> ProgressBar {
    let told = move |_: &ProgressState, out: &mut dyn std::fmt::Write| {
        // Nothing is lost with a line that cannot be drawn.
        let _ = out.write_str(&text());
    };
    let bar = drawn(None, what, style("{prefix:>9} {spinner} {told}").with_key("told", told));
    if !bar.is_hidden() {
        bar.enable_steady_tick(std::time::Duration::from_millis(125));
    }
    bar
}

/// What is under way, on a terminal: how long it has taken, and how much of what is done.
pub(crate) struct Work {
    bar: ProgressBar,
    done: Arc<AtomicU64>,
}

impl Work {
    /// Counts so much more that is done.
    pub(crate) fn add(&self, more: u64) {
        self.done.fetch_add(more, Relaxed);
    }

    /// Prints something while nothing is drawn.
    pub(crate) fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }
}

/// Does work that may take a while, and shows meanwhile that it goes on, with the number of `units` that are done as soon as
/// there is one. Nothing of it is left behind, and nothing is drawn off a terminal.
pub(crate) fn during<T>(what: &str, units: &'static str, task: impl FnOnce(&Work) -> T) -> T {
    let done = Arc::new(AtomicU64::new(0));
    let (counted, begun) = (done.clone(), std::time::Instant::now());
    let text = move || {
        let seconds = begun.elapsed().as_secs();
        match counted.load(Relaxed) {
            0 => format!("{seconds} s"),
            done => format!("{seconds} s, {} {units}", HumanCount(done)),
        }
    };
    let work = Work { bar: work(what, text), done };
    let outcome = task(&work);
    work.bar.finish_and_clear();
    outcome
}

/// It is hidden where standard error is no terminal, and where its lines are for programs.
fn drawn(total: Option<u64>, what: &str, style: ProgressStyle) -> ProgressBar {
    let target =
        if logs::is_json() { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr_with_hz(8) };
    let bar = ProgressBar::with_draw_target(total, target);
    bar.set_style(style);
    // This draws, and the next drawing is an eighth of a second away.
    bar.set_prefix(what.to_owned());
    bar
}

fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    style.progress_chars("=> ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_returns_what_came_of_it_and_draws_nothing_here() {
        let told = during("test", "things", |work| {
            work.add(2);
            work.add(1);
            assert!(work.bar.is_hidden(), "the output of tests is no terminal");
            work.aside(|| work.done.load(Relaxed))
        });
        assert_eq!(told, 3);
    }
}
