//! The hooks of `driftless train` and `driftless eval`: what a user adds to a task, by command or by service.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::numbers;
use async_trait::async_trait;
use driftless::agent::session::Thoughts;
use driftless::trainer::Result as TrainerResult;
use driftless::trainer::data::DataOptions;
use driftless::trainer::hook::{Filter, Filters, Hook, HookOptions, Rm};
use driftless::trainer::reward::{self, BuiltIn, Remote, Reward};
use driftless::trainer::rollout::HOOK_RETRIES;
use driftless::trainer::sample::Answer;
use driftless::trainer::tasks::{DataSource, Task};
use serde::{Serialize as _, Serializer};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How answers are made and rewarded. Flags with slime's names, `-command` for `-path`. Each takes a command, which speaks
/// JSON lines, or the URL of a service.
#[derive(clap::Args, serde::Serialize)]
#[command(
    next_help_heading = "Hooks: each a command that speaks JSON lines, or http://host:port/path; see docs/hooks.md"
)]
pub(crate) struct RewardArgs {
    /// How answers are rewarded: exact, math, dapo, deepscaler, f1, gpqa, regex, or remote_rm with --rm-url.
    #[arg(long, value_name = "NAME", conflicts_with = "custom_rm_command")]
    rm_type: Option<String>,
    /// Service that rewards answers: it is sent {"prompt", "response", "label", "metadata"} and answers with
    /// a number.
    #[arg(long, value_name = "URL", conflicts_with = "custom_rm_command")]
    #[serde(serialize_with = "digest")]
    rm_url: Option<String>,
    /// Ask --rm-url for the samples of a prompt together, as --custom-rm-command always is.
    #[arg(long)]
    group_rm: bool,
    /// Rewards answers.
    #[arg(long, value_name = "HOOK")]
    #[serde(serialize_with = "digest")]
    custom_rm_command: Option<String>,
    /// Makes answers, out of one or several generations.
    #[arg(long, value_name = "HOOK")]
    #[serde(serialize_with = "digest")]
    custom_generate_command: Option<String>,
    /// Processes of each command that work side by side.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = numbers::count::<usize>())]
    #[serde(skip)]
    hook_processes: usize,
    /// Seconds that a command or service may take for an answer.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = numbers::deadline())]
    #[serde(skip)]
    hook_deadline: u64,
    /// Leave thoughts out of later prompts of a hook's clients once they ask something else, as most chat templates do. Each
    /// question with thoughts before it is then a sample.
    #[arg(long)]
    strip_thoughts: bool,
    /// Times that an answer is made again, with other draws, whose environment died or whose hook was late.
    #[arg(long, value_name = "N", default_value_t = HOOK_RETRIES, value_parser = numbers::ordinal())]
    #[serde(skip)]
    pub(crate) hook_retries: u64,
}

/// What is learned from, of the same form.
#[derive(clap::Args, serde::Serialize)]
#[command(next_help_heading = "Hooks that choose what is learned from")]
pub(crate) struct HookArgs {
    /// Makes prompts, in place of --prompt-data.
    #[arg(long, value_name = "HOOK", conflicts_with_all = ["prompt_data", "task"])]
    #[serde(serialize_with = "digest")]
    data_source_command: Option<String>,
    /// Learn only from groups whose rewards differ; the next prompts take the others' place.
    #[arg(long, value_enum, value_name = "NAME", conflicts_with = "dynamic_sampling_filter_command")]
    dynamic_sampling_filter: Option<SamplingFilter>,
    /// Chooses the groups that are learned from; the next prompts take the others' place.
    #[arg(long, value_name = "HOOK")]
    #[serde(serialize_with = "digest")]
    dynamic_sampling_filter_command: Option<String>,
    /// Chooses the samples of a group that are trained on. The others count for advantages only.
    #[arg(long, value_name = "HOOK")]
    #[serde(serialize_with = "digest")]
    rollout_sample_filter_command: Option<String>,
    /// Changes the rewards of a group before they are logged.
    #[arg(long, value_name = "HOOK")]
    #[serde(serialize_with = "digest")]
    custom_reward_post_process_command: Option<String>,
}

/// No reward but those that answers are given by the hook that makes them.
#[derive(Debug)]
struct Given;

#[async_trait]
impl Reward for Given {
    async fn score(&self, answers: &[Answer]) -> TrainerResult<Vec<TrainerResult<reward::Given>>> {
        let none = |answer: &Answer| driftless::trainer::Error::Reward {
            sample: answer.sample,
            expected: "a `reward` of the hook that made the answer".to_owned(),
            found: "none".to_owned(),
            todo: "have it give one (docs/hooks.md), or name --custom-rm-command or another flag of rewards",
            is_away: false,
        };
        Ok(answers.iter().map(|answer| Err(none(answer))).collect())
    }
}

/// The start of a hook's digest: what a command or a URL says may be secret.
#[expect(clippy::ref_option, reason = "serde calls it so")]
pub(super) fn digest<S: Serializer>(
    hook: &Option<String>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    let digest = |hook: &String| format!("digest {}", &blake3::hash(hook.as_bytes()).to_hex()[..8]);
    hook.as_ref().map(digest).serialize(serializer)
}

#[derive(Clone, Copy, clap::ValueEnum, serde::Serialize)]
enum SamplingFilter {
    #[value(name = "check_reward_nonzero_std")]
    #[serde(rename = "check_reward_nonzero_std")]
    NonzeroStd,
}

impl RewardArgs {
    fn deadline(&self) -> Duration {
        Duration::from_secs(self.hook_deadline)
    }

    fn hook(&self, flag: &'static str, at: Option<&String>) -> Result<Option<Hook>> {
        let options = |at: &String| {
            HookOptions::new(at).with_processes(self.hook_processes).with_deadline(self.deadline())
        };
        Ok(at.map(|at| Hook::open(flag, &options(at))).transpose()?)
    }

    /// The reward that was asked for, if one was. Without `labels`, one that compares with them is refused.
    pub(crate) fn reward(&self, labels: bool) -> Result<Option<Arc<dyn Reward>>> {
        let group = self.group_rm.then_some("--group-rm");
        if let Some(hook) = self.hook("--custom-rm-command", self.custom_rm_command.as_ref())? {
            return Ok(Some(Arc::new(Rm::new(hook))));
        }
        match (self.rm_type.as_deref(), &self.rm_url, group) {
            (Some("remote_rm") | None, Some(_), Some(_)) => {
                let hook = self.hook("--rm-url", self.rm_url.as_ref())?;
                Ok(hook.map(|hook| Arc::new(Rm::new(hook)) as Arc<dyn Reward>))
            }
            (Some("remote_rm") | None, Some(url), None) => {
                Ok(Some(Arc::new(Remote::new(url, self.deadline())?)))
            }
            (Some(name), Some(_), _) => Err(Error::usage("--rm-url", "--rm-type remote_rm, or none", name)),
            (Some("remote_rm"), None, _) => Err(missing("--rm-type remote_rm", "--rm-url URL")),
            (_, _, Some(flag)) => Err(missing(flag, "--rm-url URL, or --custom-rm-command HOOK")),
            (Some(name), _, _) if !labels => {
                Err(missing(&format!("labels of --rm-type {name}"), "--label-key FIELD"))
            }
            (Some(name), _, _) => Ok(Some(Arc::new(name.parse::<BuiltIn>()?))),
            (None, None, None) => Ok(None),
        }
    }

    /// What a hook that makes answers gives them, where no other reward was asked for.
    pub(super) fn given(&self) -> Option<Arc<dyn Reward>> {
        self.custom_generate_command.as_ref().map(|_| Arc::new(Given) as Arc<dyn Reward>)
    }

    /// These prompts with their rewards, for the model of a checkpoint.
    pub(crate) fn task(
        &self,
        source: Arc<dyn DataSource>,
        checkpoint: &Path,
        reward: Arc<dyn Reward>,
        data: &DataOptions,
    ) -> Result<Task> {
        let generate = self.custom_generate_command.as_ref().map(|at| self.generate(at, checkpoint, data));
        let generate = generate.transpose()?.map(Arc::new);
        Ok(Task { source, generate, reward, filters: Filters::default() })
    }

    /// A hook of `--environment`, for the model of a checkpoint where it makes answers.
    pub(super) fn environment(
        &self,
        command: &str,
        clients: Option<&Path>,
        data: &DataOptions,
    ) -> Result<Hook> {
        let mut options = self.making(command, data);
        options.clients = clients.map(Path::to_owned);
        Ok(Hook::open("--environment", &options)?)
    }

    /// What makes answers and has clients.
    fn making(&self, at: &str, data: &DataOptions) -> HookOptions {
        let options = HookOptions::new(at).with_processes(self.hook_processes).with_deadline(self.deadline());
        let thoughts = if self.strip_thoughts { Thoughts::Stripped } else { Thoughts::Kept };
        options.with_thoughts(thoughts).with_variables(data.apply_chat_template_kwargs.clone())
    }

    /// Refuses what is for conversations of clients, where no hook makes answers.
    pub(super) fn check_clients(&self, data: &DataOptions) -> Result<()> {
        if self.custom_generate_command.is_some() {
            return Ok(());
        }
        let hook = "--custom-generate-command HOOK, or --environment KIND:NAME";
        if self.strip_thoughts {
            return Err(missing("--strip-thoughts", hook));
        }
        match data.apply_chat_template_kwargs.is_some() && !data.apply_chat_template {
            true => Err(missing("--apply-chat-template-kwargs", &format!("--apply-chat-template, {hook}"))),
            false => Ok(()),
        }
    }

    /// What makes answers; with an address for clients, if the checkpoint's conversations can be written.
    fn generate(&self, at: &str, checkpoint: &Path, data: &DataOptions) -> Result<Hook> {
        const FLAG: &str = "--custom-generate-command";
        let options = self.making(at, data);
        match Hook::open(FLAG, &options.clone().with_clients(checkpoint.to_owned())) {
            Err(driftless::trainer::Error::Agent(why)) => {
                tracing::info!("{FLAG}: its answers have no `base_url`: {why}");
                Ok(Hook::open(FLAG, &options)?)
            }
            opened => Ok(opened?),
        }
    }
}

impl HookArgs {
    /// What makes prompts, if a hook does.
    pub(crate) fn data_source(&self, of: &RewardArgs) -> Result<Option<Hook>> {
        of.hook("--data-source-command", self.data_source_command.as_ref())
    }

    /// What is learned from.
    pub(crate) fn filters(&self, of: &RewardArgs) -> Result<Filters> {
        let hook = |flag, at: &Option<String>| Ok::<_, Error>(of.hook(flag, at.as_ref())?.map(Arc::new));
        let named = self.dynamic_sampling_filter.map(|SamplingFilter::NonzeroStd| Filter::NonzeroStd);
        let kept = hook("--dynamic-sampling-filter-command", &self.dynamic_sampling_filter_command)?;
        Ok(Filters {
            dynamic_sampling: kept.map(Filter::Hook).or(named),
            rollout_sample: hook("--rollout-sample-filter-command", &self.rollout_sample_filter_command)?,
            reward_post_process: hook(
                "--custom-reward-post-process-command",
                &self.custom_reward_post_process_command,
            )?,
        })
    }
}

/// Something that has to be given and is not.
pub(crate) fn missing(what: &str, expected: &str) -> Error {
    Error::usage(what, expected, "nothing")
}
