//! Questions about the samples of a group: what they are worth, and whether they are learned from.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::sample::numbers as named;
use super::{Fault, Hook};
use crate::error::{Result, short};
use crate::reward::{Given, Reward};
use crate::sample::Answer;
use crate::service::LOOK;

/// The samples of a group. Their rewards are there once they have some.
#[derive(Serialize)]
pub(super) struct Group<'a> {
    samples: Vec<Scored<'a>>,
}

#[derive(Serialize)]
struct Scored<'a> {
    #[serde(flatten)]
    answer: &'a Answer,
    #[serde(skip_serializing_if = "Option::is_none")]
    reward: Option<f32>,
}

impl<'a> Group<'a> {
    fn unscored(answers: &'a [Answer]) -> Self {
        Group { samples: answers.iter().map(|answer| Scored { answer, reward: None }).collect() }
    }

    pub(super) fn scored(answers: &'a [Answer], rewards: &[f32]) -> Self {
        let scored = answers.iter().zip(rewards);
        Group { samples: scored.map(|(answer, reward)| Scored { answer, reward: Some(*reward) }).collect() }
    }
}

#[derive(Deserialize)]
pub(super) struct Rewards {
    pub(super) rewards: Vec<Value>,
}

pub(super) const REWARDS: &str = "{\"rewards\": [one finite number per sample]}";
/// One of them.
const REWARD: &str = "a finite number, {\"reward\": number, \"rewards\": {name: finite number}}, or {\"error\": \"why it has none\"}";
const REWARD_ADVICE: &str = "correct the reward; docs/hooks.md has what it is asked";

/// Rewards of a hook (`--custom-rm-command`, or `--rm-url` with `--group-rm`), which is asked once for each
/// group.
#[derive(Debug, Clone)]
pub struct Rm(Arc<Hook>);

impl Rm {
    /// Rewards that `hook` gives.
    #[must_use]
    pub fn new(hook: Hook) -> Self {
        Rm(Arc::new(hook))
    }
}

#[async_trait]
impl Reward for Rm {
    async fn score(&self, answers: &[Answer]) -> Result<Vec<Result<Given>>> {
        let Some(first) = answers.first() else { return Ok(Vec::new()) };
        let asked = self.0.ask("rm", &Group::unscored(answers), REWARDS).await;
        let Rewards { rewards } =
            asked.map_err(|Fault { expected, found, todo, is_away, .. }| match is_away {
                true => first.silent(&expected, found, todo),
                false => first.refused(&expected, found, todo),
            })?;
        Ok(each(&rewards, answers)?.map(|(said, answer)| given(said, answer)).collect())
    }

    /// Asks about no samples.
    async fn ready(&self) -> Result<()> {
        let about = "the first question, which has no samples";
        let asked = self.0.ask("rm", &Group::unscored(&[]), REWARDS).await;
        let Rewards { rewards } = asked.map_err(|fault| self.0.refused(about, fault))?;
        match rewards.len() {
            0 => Ok(()),
            found => {
                let found = format!("{found} rewards");
                Err(self.0.refused(about, Fault::of("{\"rewards\": []} for no samples", found)))
            }
        }
    }
}

/// As many numbers as answers, all finite.
pub(super) fn numbers(rewards: &[Value], answers: &[Answer]) -> Result<Vec<f32>> {
    each(rewards, answers)?.map(|(reward, answer)| answer.number(reward, REWARD_ADVICE)).collect()
}

/// What is said of each answer.
fn each<'a>(
    rewards: &'a [Value],
    answers: &'a [Answer],
) -> Result<impl Iterator<Item = (&'a Value, &'a Answer)>> {
    if let Some(first) = answers.first().filter(|_| rewards.len() != answers.len()) {
        let found = format!("{} rewards for {} samples", rewards.len(), answers.len());
        return Err(first.refused(REWARDS, found, REWARD_ADVICE));
    }
    Ok(rewards.iter().zip(answers))
}

/// What a hook says of one answer: a number, an object with what it is made of, or why it has none.
fn given(said: &Value, answer: &Answer) -> Result<Given> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Parts {
        #[serde(default)]
        reward: Value,
        #[serde(default)]
        rewards: BTreeMap<String, Value>,
        error: Option<String>,
    }
    if !said.is_object() {
        return Ok(answer.number(said, REWARD_ADVICE)?.into());
    }
    let refused = |found: &dyn std::fmt::Display, todo| answer.refused(REWARD, found, todo);
    let parts = Parts::deserialize(said);
    let parts = parts
        .map_err(|error| refused(&format_args!("`{}`: {error}", short(&said.to_string())), REWARD_ADVICE))?;
    if let Some(error) = parts.error {
        return Err(refused(&format_args!("its error: {}", short(&error)), LOOK));
    }
    let components = named(&parts.rewards).map_err(|fault| refused(&fault.found, REWARD_ADVICE))?;
    Ok(Given { reward: answer.number(&parts.reward, REWARD_ADVICE)?, components })
}
