//! What becomes of a group once it has rewards.

use std::sync::Arc;

use super::Hook;
use crate::error::Result;
use crate::sample::Answer;

/// Which samples are learned from, and with which rewards; all, as they are, where nothing is said.
#[derive(Debug, Clone, Default)]
pub struct Filters {
    /// Chooses the groups that are learned from.
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
            Some(Filter::Hook(hook)) => hook.leave_out(group, rewards).await,
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
        match &self.rollout_sample {
            Some(hook) => hook.remove(group, rewards).await,
            None => Ok(Vec::new()),
        }
    }

    /// The rewards of a group that is kept, as they are logged and learned from.
    pub(crate) async fn post_process(&self, group: &[Answer], rewards: Vec<f32>) -> Result<Vec<f32>> {
        match &self.reward_post_process {
            Some(hook) => hook.post_process(group, &rewards).await,
            None => Ok(rewards),
        }
    }
}
