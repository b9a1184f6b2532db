//! A task with a user's hooks.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;

use super::Hook;
use crate::error::Result;
use crate::reward::Reward;
use crate::sample::{Answer, Prompt, Trajectory};
use crate::tasks::{Task, Turn};

/// What is put in the place of a task's own parts. Those that are absent stay the task's.
#[derive(Debug, Default)]
pub struct Hooks {
    /// Makes answers.
    pub generate: Option<Hook>,
    /// Rewards them.
    pub reward: Option<Arc<dyn Reward>>,
    /// Chooses the groups that are learned from.
    pub dynamic_sampling_filter: Option<Filter>,
    /// Chooses the samples of these that are trained on.
    pub rollout_sample_filter: Option<Hook>,
    /// Changes rewards before they are logged.
    pub reward_post_process: Option<Hook>,
}

/// Which groups are learned from.
#[derive(Debug)]
pub enum Filter {
    /// Those whose rewards differ: others have no advantages. slime's `check_reward_nonzero_std`.
    NonzeroStd,
    /// Those that a hook keeps.
    Hook(Hook),
}

/// A task with hooks.
#[derive(Debug)]
pub struct Hooked {
    task: Arc<dyn Task>,
    hooks: Hooks,
}

impl Hooked {
    /// `task` with `hooks` in the place of its parts.
    #[must_use]
    pub fn new(task: Arc<dyn Task>, hooks: Hooks) -> Self {
        Hooked { task, hooks }
    }
}

#[async_trait]
impl Task for Hooked {
    fn check(&self, checkpoint: &Path) -> Result<()> {
        self.task.check(checkpoint)
    }

    async fn ready(&self) -> Result<()> {
        self.task.ready().await?;
        match &self.hooks.reward {
            Some(reward) => reward.ready().await,
            None => Ok(()),
        }
    }

    async fn prompt(&self, number: u64) -> Result<Prompt> {
        self.task.prompt(number).await
    }

    fn stop_token_ids(&self) -> Vec<i32> {
        self.task.stop_token_ids()
    }

    async fn generate(&self, prompt: &Prompt, turn: &Turn<'_>) -> Result<Vec<Trajectory>> {
        match &self.hooks.generate {
            Some(hook) => hook.converse(&*self.task, prompt, turn).await,
            None => self.task.generate(prompt, turn).await,
        }
    }

    fn decode(&self, response: &[i32]) -> Result<String> {
        self.task.decode(response)
    }

    fn encode(&self, text: &str) -> Result<Vec<i32>> {
        self.task.encode(text)
    }

    async fn reward(&self, group: &[Answer]) -> Result<Vec<f32>> {
        match &self.hooks.reward {
            Some(reward) => reward.score(group).await,
            None => self.task.reward(group).await,
        }
    }

    async fn leave_out(&self, group: &[Answer], rewards: &[f32]) -> Result<Option<String>> {
        match &self.hooks.dynamic_sampling_filter {
            Some(Filter::Hook(hook)) => hook.leave_out(group, rewards).await,
            Some(Filter::NonzeroStd) => {
                let differ = rewards.windows(2).any(|pair| pair[0] != pair[1]);
                Ok((!differ).then(|| "all its rewards are equal".to_owned()))
            }
            None => self.task.leave_out(group, rewards).await,
        }
    }

    async fn remove(&self, group: &[Answer], rewards: &[f32]) -> Result<Vec<bool>> {
        match &self.hooks.rollout_sample_filter {
            Some(hook) => hook.remove(group, rewards).await,
            None => self.task.remove(group, rewards).await,
        }
    }

    async fn post_process(&self, group: &[Answer], rewards: Vec<f32>) -> Result<Vec<f32>> {
        match &self.hooks.reward_post_process {
            Some(hook) => hook.post_process(group, &rewards).await,
            None => self.task.post_process(group, rewards).await,
        }
    }
}
