//! Engines: whether each answers, what it runs, and what it is going to get.

use super::findings::{Finding, Group};
use super::{Args, no_answer, within};
use crate::cli::shared::error::Result;
use crate::cli::shared::output::{short, without_secrets};
use driftless::bridge::activate::{DiskOptions, Foreseen, Outlook, PluginOptions, outlook};
use driftless::bridge::engine::{About, Deadlines};
use driftless::bridge::live::{PLUGIN_DIR, plugin_dir};
use driftless::bridge::{Expected, connect};
use driftless::http::runtime;
use driftless::store::{chain_text, redact};
use driftless::transport::activate::How;
use driftless::transport::prepared::check_dir;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What an engine may take for a call; and for all of them, which are a few.
const CALL: Duration = Duration::from_secs(10);
const DEADLINE: Duration = Duration::from_secs(60);

/// What is asked, and how.
pub(super) struct Asked {
    engines: Vec<String>,
    plugin_dir: PathBuf,
    /// Whether the directory of plugins matters.
    plugins: bool,
    /// What says which model engines have to run.
    checkpoint: Option<PathBuf>,
    options: DiskOptions,
}

/// What an engine said; of what it did not, why.
#[derive(Debug)]
struct Facts {
    kind: &'static str,
    url: String,
    about: Result<About, String>,
    label: Result<Option<String>, String>,
    /// None where nothing is at hand that says which model it should run.
    gets: Option<Result<Outlook, String>>,
}

impl Asked {
    /// Refuses what is no engine's address.
    pub(super) fn new(args: &Args) -> Result<Asked> {
        let usual = || plugin_dir(std::env::var_os(PLUGIN_DIR));
        let plugin_dir = args.plugin_dir.clone().unwrap_or_else(usual);
        let deadlines = Deadlines::default().with_info(CALL).with_control(CALL);
        let client = args.call.client("--engine", &args.engine)?.with_deadlines(deadlines);
        for engine in &args.engine {
            connect(engine, client.clone())?;
        }
        let mut options = DiskOptions::default().with_client(client);
        options.plugin = Some(PluginOptions::new(&plugin_dir));
        let plugins = args.plugin_dir.is_some() || !args.engine.is_empty();
        let checkpoint = args.checkpoint_dir.clone();
        Ok(Asked { engines: args.engine.clone(), plugin_dir, plugins, checkpoint, options })
    }

    pub(super) fn look(self) -> Vec<Finding> {
        let mut findings = Vec::new();
        if self.plugins {
            let dir = self.plugin_dir.as_path();
            let checked =
                dir.symlink_metadata().ok().map(|_| check_dir(dir).map_err(|error| error.to_string()));
            findings.push(judge_dir(dir, checked));
        }
        for url in self.engines {
            let (asked, options, checkpoint) = (url.clone(), self.options.clone(), self.checkpoint.clone());
            match within(DEADLINE, move || read(&asked, checkpoint.as_deref(), &options)) {
                Some(Ok(facts)) => findings.append(&mut judge(&facts)),
                Some(Err(why)) => findings.push(silent(&why)),
                None => findings.push(silent(&no_answer(DEADLINE, &redact(&url)))),
            }
        }
        findings
    }
}

fn read(url: &str, checkpoint: Option<&Path>, options: &DiskOptions) -> Result<Facts, String> {
    let engine = connect(url, options.client.clone()).map_err(|error| chain_text(&error))?;
    let runtime = runtime::handle().map_err(|error| chain_text(&error))?;
    let (about, label) = runtime::wait(&runtime, async {
        let about = engine.about().await;
        // One that does not answer need not be asked twice.
        let label = if about.is_ok() { engine.label().await } else { Ok(None) };
        (about, label)
    });
    let own = about.as_ref().ok().map(|about| PathBuf::from(&about.model));
    let places = [checkpoint.map(Path::to_path_buf), own];
    let place = places.into_iter().flatten().find(|dir| dir.join("config.json").is_file());
    let gets = place.filter(|_| about.is_ok()).map(|place| {
        let gets = Expected::from_checkpoint(&place).and_then(|expected| outlook(url, &expected, options));
        gets.map_err(|error| chain_text(&error))
    });
    Ok(Facts {
        kind: engine.kind(),
        url: engine.url().to_owned(),
        about: about.map_err(|error| chain_text(&error)),
        label: label.map_err(|error| chain_text(&error)),
        gets,
    })
}

/// `why` names the engine.
fn silent(why: &str) -> Finding {
    Group("engines").problem(
        "engine",
        without_secrets(why),
        "start it, look at address and port (vllm+http://… for vLLM) and, if it has an API key, give --api-key-file",
    )
}

fn judge_dir(dir: &Path, checked: Option<Result<(), String>>) -> Finding {
    let (group, shown) = (Group("engines"), dir.display());
    match checked {
        Some(Ok(())) => group.ok("plugins", format!("they meet followers in {shown}")),
        Some(Err(why)) => group.problem(
            "plugins",
            why,
            "remove it, or give engines and followers another one: DRIFTLESS_PLUGIN_DIR, and --plugin-dir",
        ),
        None => group.note(
            "plugins",
            format!("{shown}: not there, so no engine of this user has started with the plugin"),
            "to have engines patched in place, install driftless-rl into their environment: docs/python.md",
        ),
    }
}

fn judge(facts: &Facts) -> Vec<Finding> {
    let group = Group("engines");
    let Facts { kind, url, .. } = facts;
    let about = match &facts.about {
        Err(why) => return vec![silent(why)],
        Ok(about) => about,
    };
    let release = about.release.as_deref().map_or_else(|| "of an unknown release".to_owned(), short);
    let label = match &facts.label {
        Ok(Some(label)) => format!("weights {}", short(label)),
        Ok(None) => "weights without a label".to_owned(),
        Err(_) => "weights of which it does not tell the label".to_owned(),
    };
    let engine =
        group.ok("engine", format!("{url}: {kind} {release}, model {}, {label}", short(&about.model)));
    vec![engine, judge_gets(facts)]
}

/// What becomes of versions there.
fn judge_gets(facts: &Facts) -> Finding {
    let group = Group("engines");
    let run = "`driftless follow --dry-run` with --hf-checkpoint tells what a run's engines get";
    match &facts.gets {
        None => group.note(
            "versions",
            "not known: neither --checkpoint-dir nor the engine's model has a config.json here",
            run,
        ),
        Some(Err(why)) => group.problem("versions", why, run),
        Some(Ok(gets @ Outlook::Refused { .. })) => group.problem(
            "versions",
            gets.to_string(),
            format!("see \"Engines and their set-ups\" in docs/engines.md; {run}"),
        ),
        Some(Ok(gets @ Outlook::Taken { how, compared })) => {
            let loads = matches!(how, How::Loaded { why: Some(_) });
            match loads || matches!(compared, Foreseen::Not { .. }) {
                false => group.ok("versions", gets.to_string()),
                true => group.note(
                    "versions",
                    gets.to_string(),
                    "the plugin patches in milliseconds and compares: driftless-rl of this release in the engine's \
                     environment, the same user and /dev/shm (docs/python.md)",
                ),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::findings::State;
    use super::*;

    /// What is said of an engine that gets this of versions.
    fn versions(gets: Option<Result<Outlook, String>>) -> Finding {
        let (about, label) = (Err(String::new()), Ok(None));
        judge_gets(&Facts { kind: "sglang", url: "http://e:1".into(), about, label, gets })
    }

    #[test]
    fn engine_is_judged_by_what_it_gets() {
        let taken = |how, compared| Some(Ok(Outlook::Taken { how, compared }));
        let loaded = || How::Loaded { why: Some("no file".into()) };
        let not = || Foreseen::Not { why: "odd".into() };
        for (gets, state) in [
            (taken(How::Patched, Foreseen::By("its plugin")), State::Ok),
            (taken(loaded(), Foreseen::By("its checksums")), State::Note),
            (taken(How::Patched, not()), State::Note),
            (Some(Ok(Outlook::Refused { why: "pp_size".into() })), State::Problem),
            (Some(Err("a config that is none".into())), State::Problem),
            (None, State::Note),
        ] {
            let finding = versions(gets);
            assert_eq!(finding.state, state, "{finding:?}");
            assert_eq!(finding.advice.is_some(), state != State::Ok, "{finding:?}");
        }
    }

    #[test]
    fn directory_of_plugins_is_one_of_this_user_alone() {
        let dir = Path::new("/d");
        let state = |checked| judge_dir(dir, checked).state;
        assert_eq!(state(Some(Ok(()))), State::Ok);
        assert_eq!(state(None), State::Note);
        assert_eq!(state(Some(Err("mode 755".into()))), State::Problem);
    }

    #[test]
    fn what_does_not_answer_shows_no_secret() {
        let found = silent("http://u:hidden@e:1/?k=hidden refused").found;
        assert!(found.contains("e:1") && !found.contains("hidden"), "{found}");
    }
}
