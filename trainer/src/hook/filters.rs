//! What becomes of a group once it has rewards.

use std::sync::Arc;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::group::{Group, REWARDS, Rewards, numbers};
use super::{Fault, Hook};
use crate::error::Result;
use crate::sample::Answer;

/// Which samples are learned from, and with which rewards; all, as they are, where nothing is said.
#[derive(Debug, Clone, Default)]
pub struct Filters {
    /// Chooses the groups that are learned from (`--dynamic-sampling-filter-command`).
    pub dynamic_sampling: Option<Filter>,
    /// Chooses the samples of these that are trained on.
    pub rollout_sample: Option<Arc<Hook>>,
    /// Changes rewards before they are logged.
    pub reward_post_process: Option<Arc<Hook>>,
}

/// Which groups are learned from.
#[derive(Debug, Clone)]
pub enum Filter {
    /// Those whose rewards differ: others have no advantages. slime's `check_reward_nonzero_std`.
    NonzeroStd,
    /// Those that a hook keeps.
    Hook(Arc<Hook>),
}

impl Filters {
    /// Why a group with these rewards is not learned from, if it is not.
    pub(crate) async fn leave_out(&self, group: &[Answer], rewards: &[f32]) -> Result<Option<String>> {
        match &self.dynamic_sampling {
            Some(Filter::Hook(hook)) => {
                let expected = "{\"keep\": true or false}";
                let kept: Kept = scored(hook, "dynamic_sampling_filter", group, rewards, expected).await?;
                let reason = || kept.reason.unwrap_or_else(|| "the filter left it out".to_owned());
                Ok((!kept.keep).then(reason))
            }
            Some(Filter::NonzeroStd) => {
                let differ = rewards.windows(2).any(|pair| pair[0] != pair[1]);
                Ok((!differ).then(|| "all its rewards are equal".to_owned()))
            }
            None => Ok(None),
        }
    }

    /// Which samples count for the advantages of their group, but are not trained on: one value for each, or none at
    /// all.
    pub(crate) async fn remove(&self, group: &[Answer], rewards: &[f32]) -> Result<Vec<bool>> {
        let Some(hook) = &self.rollout_sample else { return Ok(Vec::new()) };
        let expected = "{\"remove\": [true or false per sample]}";
        let Removed { remove } = scored(hook, "rollout_sample_filter", group, rewards, expected).await?;
        if remove.len() == group.len() {
            return Ok(remove);
        }
        let found = format!("{} for {} samples", remove.len(), group.len());
        Err(hook.refused(about(group), Fault::of(expected, found)))
    }

    /// The rewards of a group that is kept, as they are logged and learned from.
    pub(crate) async fn post_process(&self, group: &[Answer], rewards: Vec<f32>) -> Result<Vec<f32>> {
        let Some(hook) = &self.reward_post_process else { return Ok(rewards) };
        let Rewards { rewards } = scored(hook, "reward_post_process", group, &rewards, REWARDS).await?;
        numbers(&rewards, group)
    }
}

#[derive(Deserialize)]
struct Kept {
    keep: bool,
    #[serde(default)]
    reason: Option<String>,
}

#[derive(Deserialize)]
struct Removed {
    remove: Vec<bool>,
}

/// Asks a hook about samples that have rewards.
async fn scored<A: DeserializeOwned>(
    hook: &Hook,
    what: &'static str,
    group: &[Answer],
    rewards: &[f32],
    expected: &'static str,
) -> Result<A> {
    let asked = hook.ask(what, &Group::scored(group, rewards), expected).await;
    asked.map_err(|fault| hook.refused(about(group), fault))
}

/// The group, for messages.
fn about(answers: &[Answer]) -> String {
    answers.first().map_or_else(String::new, |first| format!("the group of sample {}", first.sample))
}
