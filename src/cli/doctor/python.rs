//! A Python interpreter: which packages it has, as its metadata says. None of them is imported.

use super::findings::{Finding, Group};
use super::no_answer;
use crate::cli::shared::output::{cut, short};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// What an interpreter may take to start and to look.
const DEADLINE: Duration = Duration::from_secs(30);
/// Most bytes of what it says.
const BYTES_MAX: u64 = 64 << 10;
/// Most characters of a version.
const VERSION_CHARS: usize = 40;

/// The package with the plugin.
const OURS: &str = "driftless-rl";
const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// The directory that it is started in is none of its packages'.
const SCRIPT: &str = r#"
import json, sys
sys.path = [place for place in sys.path if place]
from importlib import metadata
versions = {}
for name in ("driftless-rl", "torch", "sglang", "sglang-kernel", "sgl-kernel", "sgl-kernel-cpu", "vllm"):
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
nccl = None
for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
    try:
        nccl = nccl or str(metadata.distribution(name).locate_file("nvidia/nccl/lib/libnccl.so.2"))
    except metadata.PackageNotFoundError:
        pass
print(json.dumps({"python": sys.version.split()[0], "versions": versions, "nccl": nccl}))
"#;

/// What it said.
#[derive(Debug, Deserialize)]
struct Facts {
    python: String,
    versions: BTreeMap<String, String>,
    /// The file of NCCL that its torch uses.
    nccl: Option<PathBuf>,
}

/// What its environment has, and where NCCL is there.
pub(super) fn look(python: &Path) -> (Vec<Finding>, Option<PathBuf>) {
    match ask(python) {
        Ok(facts) => (judge(python, &facts), facts.nccl.filter(|file| file.is_file())),
        Err(why) => {
            let found = format!("{}: {}", python.display(), short(&why));
            let advice = "give the interpreter of the engine's environment, such as /opt/venv/bin/python";
            (vec![Group("python").problem("python", found, advice)], None)
        }
    }
}

fn ask(python: &Path) -> Result<Facts, String> {
    let mut command = Command::new(python);
    command.args(["-c", SCRIPT]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| format!("cannot be started: {error}"))?;
    let said = said(&mut child);
    // It has said all, or is not waited for.
    let ended = child.kill().and_then(|()| child.wait());
    drop(ended);
    let said = said?;
    // Whatever the environment prints at a start stands before.
    let last = said.rsplit(|byte| *byte == b'\n').find(|line| !line.is_empty()).unwrap_or_default();
    serde_json::from_slice(last).map_err(|_| "does not say which packages it has".to_owned())
}

fn said(child: &mut Child) -> Result<Vec<u8>, String> {
    let out = child.stdout.take().ok_or("has no output")?;
    let read = super::within(DEADLINE, move || {
        let mut bytes = Vec::new();
        out.take(BYTES_MAX).read_to_end(&mut bytes).map(|_| bytes)
    });
    read.ok_or_else(|| no_answer(DEADLINE, "it"))?.map_err(|error| error.to_string())
}

fn judge(python: &Path, facts: &Facts) -> Vec<Finding> {
    let group = Group("python");
    let version = |version: &str| cut(version, VERSION_CHARS);
    let others = facts.versions.iter().filter(|(name, _)| *name != OURS);
    let others: Vec<_> =
        others.map(|(name, found)| format!("{} {}", version(name), version(found))).collect();
    let others = if others.is_empty() { "no torch, sglang or vllm".to_owned() } else { others.join(", ") };
    let found = format!("{}: Python {}, {others}", python.display(), version(&facts.python));
    let ours = match facts.versions.get(OURS).map(String::as_str) {
        Some(RELEASE) => group.ok("plugin", format!("{OURS} {RELEASE}, as this command")),
        Some(other) => group.note(
            "plugin",
            format!(
                "{OURS} {}, and this command is {RELEASE}: engines may load instead of being patched",
                version(other)
            ),
            "install the wheel of this release there, and start the engines again",
        ),
        None => group.note(
            "plugin",
            format!("no {OURS}: engines of this environment load each version from disk"),
            "to have them patched, pip install the wheel there: docs/python.md",
        ),
    };
    vec![group.ok("python", found), ours]
}

#[cfg(test)]
mod tests {
    use super::super::findings::State;
    use super::*;
    use serde_json::json;

    fn found(versions: serde_json::Value) -> Vec<Finding> {
        let facts = json!({"python": "3.12.1", "versions": versions, "nccl": null});
        judge(Path::new("py"), &serde_json::from_value(facts).expect("facts"))
    }

    #[test]
    fn packages_are_named_and_the_plugin_has_to_be_of_this_release() {
        let all = found(json!({"driftless-rl": RELEASE, "torch": "2.11.0", "sglang": "0.5.23"}));
        assert_eq!(all[0].found, "py: Python 3.12.1, sglang 0.5.23, torch 2.11.0");
        assert_eq!(all[1].state, State::Ok);
        for versions in [json!({"driftless-rl": "0.0.1"}), json!({})] {
            let findings = found(versions);
            assert_eq!((findings[0].state, findings[1].state), (State::Ok, State::Note));
            assert!(findings[0].found.ends_with("no torch, sglang or vllm"));
        }
        let hostile = found(json!({"torch": format!("\u{1b}[2J{}", "9".repeat(100))}));
        assert!(hostile[0].found.len() < 90 && !hostile[0].found.contains('\u{1b}'), "{hostile:?}");
    }

    #[test]
    fn what_is_no_interpreter_is_a_problem() {
        for program in ["/nonexistent/python", "/bin/true", "/bin/echo"] {
            let (findings, nccl) = look(Path::new(program));
            assert_eq!((findings.len(), findings[0].state, nccl), (1, State::Problem, None), "{program}");
        }
    }
}
