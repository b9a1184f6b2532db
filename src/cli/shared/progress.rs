//! Progress bars on a terminal, plain lines elsewhere.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use std::io::IsTerminal;

/// A bar of `total` steps, on standard error so that results can be piped.
pub(crate) fn bar(total: u64, what: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), target());
    if let Ok(style) = ProgressStyle::with_template("{prefix:>9} [{bar:30}] {pos}/{len} {elapsed} {msg}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_prefix(what.to_owned());
    bar
}

/// A bar of `total` bytes.
pub(crate) fn bytes(total: u64, what: &str) -> ProgressBar {
    let bar = bar(total, what);
    let template = "{prefix:>9} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {msg}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

/// Work without a known end, of which `text` tells whenever it is drawn.
pub(crate) fn work(what: &str, text: impl Fn() -> String + Clone + Send + Sync + 'static) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, target());
    if let Ok(style) = ProgressStyle::with_template("{prefix:>9} {spinner} {told}") {
        bar.set_style(style.with_key("told", move |_: &ProgressState, out: &mut dyn std::fmt::Write| {
            // Nothing is lost with a line that cannot be drawn.
            let _ = out.write_str(&text());
        }));
    }
    bar.set_prefix(what.to_owned());
    if !bar.is_hidden() {
        bar.enable_steady_tick(std::time::Duration::from_millis(125));
    }
    bar
}

fn target() -> ProgressDrawTarget {
    if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr_with_hz(8)
    } else {
        ProgressDrawTarget::hidden()
    }
}
