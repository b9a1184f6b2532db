//! What is compared of an engine's live weights, and by what: its plugin's own map of the model, or else its checksums.
//!
//! A load's success and a finite token say only that the engine runs. What it loaded is compared wherever something can,
//! and where nothing can, the activation says so.

use driftless_transport::activate::Compared;

use super::{Plan, plugin};
use crate::engine::{Comparison, Engine, LiveWeights, Sums, check};
use crate::error::{Error, Result};

/// Whether engines are taken whose live weights cannot be compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Compare {
    /// They are, and each activation says that nothing was compared.
    #[default]
    Auto,
    /// They are refused.
    Require,
}

/// Refuses an engine, before anything is done to it, of which nothing can compare what it holds, where that is asked for.
pub(super) fn admit(engine: &dyn Engine, plan: &Plan<'_>) -> Result<()> {
    match why_not(engine, plan) {
        Some(why) if plan.compare == Compare::Require => {
            Err(Error::NotComparable { engine: engine.url().into(), why })
        }
        _ => Ok(()),
    }
}

/// Why nothing can compare what an engine holds, if nothing can.
pub(super) fn why_not(engine: &dyn Engine, plan: &Plan<'_>) -> Option<String> {
    let checksums = plan.identity.no_checksums.as_deref()?;
    match plan.plugin.map(|options| plugin::compares(engine, plan.identity.tp, options)) {
        Some(Ok(())) => None,
        Some(Err(unready)) => Some(both(checksums, unready.why())),
        None => Some(both(checksums, "plugins are not used")),
    }
}

fn both(checksums: &str, plugin: &str) -> String {
    format!("{plugin}; {checksums}")
}

/// Computes what will be compared, so that it need not be in the pause.
pub(super) fn ready(engine: &dyn Engine, plan: &Plan<'_>) -> Result<()> {
    let by_plugin =
        plan.plugin.is_some_and(|options| plugin::compares(engine, plan.identity.tp, options).is_ok());
    if by_plugin { Ok(()) } else { plan.sums(engine).map(drop) }
}

/// Compares all that a paused engine holds with the plan's version.
///
/// # Errors
/// [`Error::Differing`], [`Error::LiveWeights`]; [`Error::NotComparable`] where nothing could, and that is asked for; the
/// calls' own failures.
pub(super) async fn look(engine: &dyn Engine, plan: &Plan<'_>) -> Result<Compared> {
    let mut plugin_why = "plugins are not used".to_owned();
    if let Some(options) = plan.plugin {
        match plugin::compare(engine, plan, options, None).await? {
            Comparison::Compared(found) if found.differing.count > 0 => {
                let (count, tensors) = (found.differing.count, found.differing.to_string());
                return Err(Error::Differing { engine: engine.url().into(), count, tensors });
            }
            Comparison::Compared(found) if found.is_equal() => {
                let without = (found.unreached.count > 0).then(|| found.unreached.to_string());
                return Ok(Compared::Plugin { tensors: found.tensors, without });
            }
            Comparison::Compared(_) => plugin_why = "its plugin has none of the version's tensors".into(),
            Comparison::Cannot { why } => plugin_why = why,
        }
    }
    let sums = plan.sums(engine)?;
    match (check(engine, sums).await?, sums) {
        (LiveWeights::Equal, Sums::Known(sums)) => Ok(Compared::Checksums { tensors: sums.len() as u64 }),
        (LiveWeights::Unchecked { .. }, _) | (_, Sums::Unknown { .. }) => {
            let why = both(plan.identity.no_checksums.as_deref().unwrap_or_default(), &plugin_why);
            match plan.compare {
                Compare::Auto => Ok(Compared::Not { why }),
                Compare::Require => Err(Error::NotComparable { engine: engine.url().into(), why }),
            }
        }
    }
}
