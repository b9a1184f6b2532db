//! `--environment`: prompts, answers and rewards at once, by a module of Python.

use super::hooks::digest;
use serde_json::{Map, Value};
use std::fmt;
use std::str::FromStr;

/// Kinds of environments, as `python -m driftless_rl.environment` has them.
const KINDS: [&str; 3] = ["openenv", "tools", "verifiers"];

#[derive(clap::Args, serde::Serialize)]
#[command(next_help_heading = "Environment")]
pub(crate) struct EnvironmentArgs {
    /// Learn in an environment, which gives prompts, answers and rewards: verifiers:NAME of that package, openenv:NAME,
    /// where NAME is a server's URL or a package that has one, or tools:FOLDER, a calculator and a search over texts.
    /// `python3` of PATH is asked, which needs driftless-rl and the package, for tools `openai`; see docs/agents.md.
    #[arg(long, value_name = "KIND:NAME", conflicts_with_all = [
        "task", "prompt_data", "data_source_command", "custom_generate_command", "custom_rm_command", "rm_type", "rm_url",
        "group_rm", "eval_prompt_data", "apply_chat_template", "input_key", "label_key", "metadata_key",
    ])]
    #[serde(serialize_with = "named")]
    environment: Option<Environment>,
    /// Its settings, as an object: of verifiers, what [env] is in its files; of openenv, what docs/agents.md lists; of
    /// tools, seed.
    #[arg(long, value_name = "JSON", requires = "environment", value_parser = object)]
    #[serde(serialize_with = "digest")]
    environment_args: Option<String>,
}

/// An environment, and the kind that it is of.
#[derive(Clone)]
struct Environment {
    kind: &'static str,
    name: String,
}

impl FromStr for Environment {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, name) = text.split_once(':').unwrap_or((text, ""));
        match KINDS.iter().find(|known| **known == kind) {
            Some(kind) if !name.is_empty() => Ok(Environment { kind, name: name.to_owned() }),
            _ => Err(format!("expected KIND:NAME, where KIND is one of {}", KINDS.join(", "))),
        }
    }
}

impl fmt::Display for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind, self.name)
    }
}

fn object(text: &str) -> Result<String, String> {
    let object: Result<Map<String, Value>, _> = serde_json::from_str(text);
    object.map(|_| text.to_owned()).map_err(|error| format!("expected an object of JSON: {error}"))
}

#[expect(clippy::ref_option, reason = "serde calls it so")]
fn named<S: serde::Serializer>(environment: &Option<Environment>, serializer: S) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&environment.as_ref().map(Environment::to_string), serializer)
}

impl EnvironmentArgs {
    /// The line for the shell that answers for the environment, if there is one.
    pub(super) fn command(&self) -> Option<String> {
        let name = quoted(&self.environment.as_ref()?.to_string());
        let args = self.environment_args.as_ref().map(|args| format!(" --args {}", quoted(args)));
        Some(format!("exec python3 -m driftless_rl.environment {name}{}", args.unwrap_or_default()))
    }
}

/// One word for the shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn environment_is_one_word_for_the_shell() {
        let of = |name: &str, args: Option<&str>| {
            let environment = Some(name.parse().unwrap());
            let args = args.map(str::to_owned);
            EnvironmentArgs { environment, environment_args: args }.command().unwrap()
        };
        let start = "exec python3 -m driftless_rl.environment";
        assert_eq!(of("verifiers:a/b@1", None), format!("{start} 'verifiers:a/b@1'"));
        assert_eq!(of("openenv:http://a:1", None), format!("{start} 'openenv:http://a:1'"));
        assert_eq!(of("tools:a folder", None), format!("{start} 'tools:a folder'"));
        let written = of("verifiers:$(x)'; y", Some("{\"a\": \"'\"}"));
        assert_eq!(written, format!(r#"{start} 'verifiers:$(x)'\''; y' --args '{{"a": "'\''"}}'"#));
        for wrong in ["verifiers", "verifiers:", ":a", "other:a", ""] {
            assert!(wrong.parse::<Environment>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn kinds_are_those_of_the_package() {
        let package = concat!(env!("CARGO_MANIFEST_DIR"), "/python/python/driftless_rl/environment");
        let main = std::fs::read_to_string(format!("{package}/__main__.py")).unwrap();
        let kinds = format!("\nKINDS = ({})\n", KINDS.map(|kind| format!("\"{kind}\"")).join(", "));
        assert!(main.contains(&kinds), "expected{kinds}");
        for kind in KINDS {
            assert!(std::path::Path::new(&format!("{package}/{kind}.py")).is_file(), "{kind}");
        }
    }
}
