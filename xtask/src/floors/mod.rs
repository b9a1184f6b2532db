//! The floors of the house: which crate and which room of a crate may know which, how large a crate may be, and how
//! many names its root may have.

mod source;
mod tables;

use crate::error::{Result, expect_none};
use crate::process;
use serde_json::Value;
use source::{code_lines, exports, room_arrows, root_names, sources};
use std::path::{Path, PathBuf};
use std::process::Command;
use tables::{ABOVE_ALL, HOUSES, House, ROOT_NAMES_MAX};

/// A member of the workspace.
struct Member {
    name: String,
    dir: PathBuf,
    /// What it is built on, of ours.
    needs: Vec<String>,
}

/// Checks all of it; every arrow up is named.
pub(crate) fn check(root: &Path) -> Result<()> {
    let members = members(root)?;
    let mut wrong = crate_arrows(&members);
    for member in &members {
        if let Some(house) = HOUSES.iter().find(|house| house.name == member.name) {
            wrong.extend(check_house(house, &member.dir.join("src"))?);
        }
    }
    let what = "floors (the tables are in xtask/src/floors/tables.rs)";
    expect_none(&wrong, what, "arrows that point down")
}

/// What is wrong inside one crate, whose sources are in `src`.
fn check_house(house: &House, src: &Path) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    let files = sources(src)?;
    let too_many = |found: usize, what: &str, most: usize| {
        (found > most).then(|| format!("{} has {found} {what}, at most {most} are allowed", house.name))
    };
    let lines = files.values().map(|text| code_lines(text)).sum();
    wrong.extend(too_many(lines, "lines of code", house.lines_max));
    let lib = files.get(Path::new("lib.rs")).map_or("", String::as_str);
    wrong.extend(too_many(root_names(lib), "names at its root", ROOT_NAMES_MAX));
    if !house.floors.is_empty() {
        let exports = exports(lib);
        wrong.extend(files.iter().flat_map(|(path, text)| room_arrows(path, text, house.floors, &exports)));
    }
    Ok(wrong)
}

fn members(root: &Path) -> Result<Vec<Member>> {
    let mut command = Command::new("cargo");
    command.current_dir(root).args(["metadata", "--no-deps", "--format-version", "1"]);
    let metadata = process::json(&mut command)?;
    Ok(metadata["packages"].as_array().map_or(&[][..], Vec::as_slice).iter().map(member).collect())
}

fn member(package: &Value) -> Member {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let dependencies = package["dependencies"].as_array().map_or(&[][..], Vec::as_slice);
    // What only tests need is no arrow.
    let ours = |dependency: &&Value| dependency["path"].is_string() && dependency["kind"] != "dev";
    Member {
        name: text(&package["name"]),
        dir: Path::new(&text(&package["manifest_path"])).parent().unwrap_or(Path::new("")).to_owned(),
        needs: dependencies.iter().filter(ours).map(|dependency| text(&dependency["name"])).collect(),
    }
}

/// Arrows between crates that no table allows.
fn crate_arrows(members: &[Member]) -> Vec<String> {
    let mut wrong = Vec::new();
    for member in members.iter().filter(|member| !ABOVE_ALL.contains(&member.name.as_str())) {
        let Some(house) = HOUSES.iter().find(|house| house.name == member.name) else {
            wrong.push(format!("{} is a crate without a floor", member.name));
            continue;
        };
        for needed in member.needs.iter().filter(|needed| !house.below.contains(&needed.as_str())) {
            wrong.push(format!("{} → {needed}", member.name));
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, needs: &[&str]) -> Member {
        let needs = needs.iter().map(|&name| name.to_owned()).collect();
        Member { name: name.to_owned(), dir: PathBuf::new(), needs }
    }

    #[test]
    fn crate_arrows_upward_are_named() {
        let down = member("driftless-bridge", &["driftless-transport"]);
        let up = member("driftless-store", &["driftless-transport"]);
        let aside = member("driftless-delta", &["driftless-buffer"]);
        let tool = member("xtask", &["driftless-torch"]);
        let found = crate_arrows(&[down, up, aside, tool]);
        assert_eq!(found, ["driftless-store → driftless-transport", "driftless-delta → driftless-buffer"]);
    }

    #[test]
    fn crate_arrows_new_crate_needs_a_floor() {
        assert_eq!(crate_arrows(&[member("new", &[])]), ["new is a crate without a floor"]);
    }

    #[test]
    fn member_ignores_what_only_tests_need() {
        let package = serde_json::json!({
            "name": "a", "manifest_path": "/root/a/Cargo.toml", "dependencies": [
                { "name": "b", "path": "/root/b", "kind": null },
                { "name": "c", "path": "/root/c", "kind": "dev" },
                { "name": "d", "path": "/root/d", "kind": "build" },
                { "name": "serde", "kind": null },
            ],
        });
        let found = super::member(&package);
        assert_eq!((found.name.as_str(), found.dir.as_path()), ("a", Path::new("/root/a")));
        assert_eq!(found.needs, ["b", "d"]);
    }
}
