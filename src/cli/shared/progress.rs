//! Progress bars on a terminal, plain lines elsewhere.

use driftless::transport::publish::{Progress, ProgressFn};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// A bar of `total` steps, on standard error so that results can be piped.
pub(crate) fn bar(total: u64, what: &str) -> ProgressBar {
    drawn(Some(total), what, "{prefix:>9} [{bar:30}] {pos}/{len} {elapsed} {msg}")
}

/// A bar of `total` bytes.
pub(crate) fn bytes(total: u64, what: &str) -> ProgressBar {
    drawn(Some(total), what, "{prefix:>9} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {msg}")
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
    let bar = drawn(None, what, "{prefix:>9} {spinner} {told}");
    bar.set_style(bar.style().with_key("told", move |_: &ProgressState, out: &mut dyn std::fmt::Write| {
        // Nothing is lost with a line that cannot be drawn.
        let _ = out.write_str(&text());
    }));
    if !bar.is_hidden() {
        bar.enable_steady_tick(std::time::Duration::from_millis(125));
    }
    bar
}

/// It is hidden where standard error is no terminal.
fn drawn(total: Option<u64>, what: &str, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr_with_hz(8));
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_prefix(what.to_owned());
    bar
}
