//! What `follow` and `train` take of engines, and what is told of them.

use driftless::bridge::activate::Compare;
use driftless::transport::activate::How;

/// Whether engines are taken whose live weights cannot be compared.
pub(crate) const COMPARES: [(&str, Compare); 2] = [("auto", Compare::Auto), ("require", Compare::Require)];

/// How an engine came by its version, in a word; and why it loaded and was not patched, where somebody wanted that.
pub(crate) fn came_by(how: &How) -> (&'static str, Option<&str>) {
    match how {
        How::Patched => ("patched", None),
        How::Pushed => ("pushed", None),
        How::Loaded { why } => ("loaded", why.as_deref()),
    }
}

/// `fetch 20, decode 95`: the phases that round to a millisecond or more; `None` where none does.
pub(crate) fn listed(phases: impl IntoIterator<Item = (&'static str, f64)>) -> Option<String> {
    let long = phases.into_iter().filter(|(_, ms)| *ms >= 0.5).map(|(name, ms)| format!("{name} {ms:.0}"));
    let long: Vec<_> = long.collect();
    (!long.is_empty()).then(|| long.join(", "))
}
