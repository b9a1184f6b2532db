//! The test programs of the workspace, built once by one command for all lanes that run them.

use super::Context;
use crate::error::{Error, Result};
use crate::{libtorch, process};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Features of the tests where there is no libtorch, and of the command that starts soon.
const LIGHT: &str = "driftless/cli,driftless/failpoints,driftless-store/conformance,driftless-bridge/conformance,driftless-trainer/conformance,driftless-delta/cuda";

/// The same, and libtorch.
pub(super) const ALL: &str = "driftless/failpoints,driftless-store/conformance,driftless-bridge/conformance,driftless-trainer/conformance,driftless-delta/cuda,driftless/torch";

/// Programs that run the command often, and have one without libtorch: that library takes longer to load than most
/// calls of the command take.
const OF_THE_COMMAND: [&str; 3] = ["driftless::cli", "driftless::kills", "driftless::learner"];

/// A test program.
struct Program {
    /// Its package without `driftless-`, and its target: `bridge::faults`, `driftless::cli`; `lib` and `bin` are
    /// unit tests.
    name: String,
    executable: PathBuf,
    /// Where cargo would run it.
    dir: PathBuf,
}

/// All that were built.
pub(super) struct Programs {
    all: Vec<Program>,
    /// The command without libtorch, where the other one has it.
    light: Option<PathBuf>,
}

/// `cargo test`, with libtorch where it is. All commands select the same packages and features, because cargo builds
/// a crate once more for each other set that a selection amounts to.
pub(crate) fn cargo_test() -> Command {
    let mut command = Command::new("cargo");
    command.arg("test");
    if libtorch::present().is_some() {
        command.args(["--workspace", "--features", ALL]);
    } else {
        command.args(["--features", LIGHT]);
    }
    command
}

impl Programs {
    /// Builds those of these names, or all of them with the examples.
    pub(super) fn build(context: &Context, names: Option<&[&str]>) -> Result<Programs> {
        let wanted = names.is_none_or(|names| names.iter().any(|name| OF_THE_COMMAND.contains(name)));
        // The build of all comes last, because tests run the command at the place where the last one put it.
        let light = (wanted && libtorch::present().is_some()).then(|| light(context)).transpose()?;
        let mut command = cargo_test();
        command.args(["--no-run", "--message-format", "json-render-diagnostics"]);
        for name in names.into_iter().flatten() {
            match name.rsplit("::").next().unwrap_or(name) {
                "lib" => command.arg("--lib"),
                "*" => command.arg("--tests"),
                target => command.args(["--test", target]),
            };
        }
        let messages = context.output(&mut command)?;
        Ok(Programs { all: messages.lines().filter_map(program).collect(), light })
    }

    /// The names of all.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.all.iter().map(|program| program.name.as_str())
    }

    /// A command that runs the program of this name.
    pub(super) fn command(&self, name: &str) -> Result<Command> {
        let missing = || Error::check("test programs", name, self.names().collect::<Vec<_>>().join(", "));
        let program = self.all.iter().find(|program| program.name == name).ok_or_else(missing)?;
        let mut command = Command::new(&program.executable);
        command.current_dir(&program.dir);
        if let Some(light) = self.light.as_ref().filter(|_| OF_THE_COMMAND.contains(&name)) {
            command.env("DRIFTLESS_TEST_COMMAND", light);
        }
        Ok(command)
    }
}

/// The arguments by which cargo builds something without libtorch that takes all other crates as the tests have them.
pub(crate) fn build_without_torch(target: &str) -> [&str; 7] {
    // With an example, cargo takes the features that tests ask for as well, and builds no other crate once more.
    ["build", "--workspace", target, "--example", "codec", "--features", LIGHT]
}

/// Builds the command without libtorch, with the same packages and features otherwise, and keeps it apart.
fn light(context: &Context) -> Result<PathBuf> {
    context.logged(Command::new("cargo").args(build_without_torch("--bin=driftless")))?;
    let light = context.root.join("target/lanes/driftless-without-torch");
    fs::copy(built(), &light).map_err(Error::io(&light))?;
    Ok(light)
}

/// The program that a message of cargo tells of.
fn program(message: &str) -> Option<Program> {
    let message: Value = serde_json::from_str(message).ok()?;
    if message["profile"]["test"] != true {
        return None;
    }
    let dir = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    let package = message["package_id"].as_str()?;
    let target = match message["target"]["kind"][0].as_str()? {
        "test" | "example" => message["target"]["name"].as_str()?,
        "bin" => "bin",
        _ => "lib",
    };
    let package = package_name(package)?;
    let package = package.strip_prefix("driftless-").unwrap_or(package);
    Some(Program {
        name: format!("{package}::{target}"),
        executable: PathBuf::from(message["executable"].as_str()?),
        dir,
    })
}

/// The name in a package's identity: `path+file:///a/b#name@1.0.0`, or `path+file:///a/name#1.0.0`.
fn package_name(id: &str) -> Option<&str> {
    let (path, tail) = id.rsplit_once('#')?;
    match tail.split_once('@') {
        Some((name, _)) => Some(name),
        None => path.rsplit('/').next(),
    }
}

/// Where cargo puts the command.
fn built() -> PathBuf {
    crate::target_dir().join("debug/driftless")
}

/// Builds the command for tests, unless it is there, and says where it is.
pub(crate) fn command_for_tests() -> Result<PathBuf> {
    let mut build = cargo_test();
    process::run(build.args(["--no-run", "--test", "crash"]).current_dir(crate::workspace()))?;
    Ok(built())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_test_programs_are_named_by_package_and_target() {
        let message = |kind: &str, name: &str, test: bool| {
            serde_json::json!({
                "reason": "compiler-artifact", "package_id": "path+file:///a/bridge#driftless-bridge@0.1.0",
                "manifest_path": "/a/bridge/Cargo.toml", "target": { "kind": [kind], "name": name },
                "profile": { "test": test }, "executable": "/a/target/debug/deps/x-1",
            })
            .to_string()
        };
        let found = program(&message("test", "faults", true)).expect("a program");
        assert_eq!((found.name.as_str(), found.dir.as_path()), ("bridge::faults", Path::new("/a/bridge")));
        let unit = program(&message("lib", "driftless_bridge", true)).expect("a program");
        assert_eq!(unit.name, "bridge::lib");
        assert!(program(&message("lib", "driftless_bridge", false)).is_none());
        assert!(program("{\"reason\":\"build-finished\",\"success\":true}").is_none());
    }

    #[test]
    fn packages_at_the_root_are_named_by_their_folder() {
        assert_eq!(package_name("path+file:///a/driftless#0.1.0"), Some("driftless"));
        assert_eq!(package_name("path+file:///a/x#driftless-delta@0.1.0"), Some("driftless-delta"));
    }
}
