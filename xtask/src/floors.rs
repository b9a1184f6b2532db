//! The floors of the house: which crate and which room of `transport` may know which, how large a crate may
//! be, and how many names its root may have.

use crate::error::{Error, Result};
use crate::process;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The crates that are built for users, and those of ours that each may depend on. Nothing points up.
const CRATES: &[(&str, &[&str])] = &[
    ("driftless-delta", &[]),
    ("driftless-buffer", &[]),
    ("driftless-store", &[]),
    ("driftless-ucx-sys", &[]),
    ("driftless-transport", &["driftless-delta", "driftless-store"]),
    ("driftless-slime", &["driftless-store", "driftless-transport"]),
    ("driftless-relay", &["driftless-store", "driftless-transport", "driftless-ucx-sys"]),
    ("driftless-bridge", &["driftless-delta", "driftless-store", "driftless-transport"]),
    (
        "driftless-trainer",
        &[
            "driftless-delta",
            "driftless-buffer",
            "driftless-bridge",
            "driftless-store",
            "driftless-transport",
        ],
    ),
    (
        "driftless-torch",
        &[
            "driftless-delta",
            "driftless-buffer",
            "driftless-store",
            "driftless-transport",
            "driftless-bridge",
            "driftless-trainer",
        ],
    ),
];

/// Members that may know all of them: the facade with the command, tools, measurements.
const ABOVE_ALL: &[&str] =
    &["driftless", "driftless-python", "driftless-testkit", "driftless-compare", "xtask"];

/// The rooms of `transport`, from the ground up. A room may know those of its own floor and of the floors
/// below.
const ROOMS: &[&[&str]] = &[
    &["error", "ids", "sign"],
    &["dtype", "pool"],
    &["snapshot"],
    &["checkpoint"],
    &["manifest"],
    &["run"],
    &["chain", "download", "prepared"],
    &["gc"],
    &["replica"],
    &["publish"],
    &["activate", "source", "foreign"],
    &["follow"],
    &["serve", "client"],
];

/// Lines of code that a crate may have: without tests, comments and blank lines.
const LINES_MAX: usize = 12_000;

/// Names that a crate's root may have, its public modules not counted.
const ROOT_NAMES_MAX: usize = 25;

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
    for member in members.iter().filter(|member| CRATES.iter().any(|(name, _)| *name == member.name)) {
        let files = sources(&member.dir.join("src"))?;
        let lines = files.values().map(|text| code_lines(text)).sum::<usize>();
        if lines > LINES_MAX {
            wrong.push(format!("{} has {lines} lines of code, at most {LINES_MAX} are allowed", member.name));
        }
        let names = files.get(Path::new("lib.rs")).map_or(0, |text| root_names(text));
        if names > ROOT_NAMES_MAX {
            wrong.push(format!(
                "{} has {names} names at its root, at most {ROOT_NAMES_MAX} are allowed",
                member.name
            ));
        }
        if member.name == "driftless-transport" {
            wrong.extend(files.iter().flat_map(|(path, text)| room_arrows(path, text)));
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    Err(Error::Check {
        what: "floors (the tables are in xtask/src/floors.rs)".to_owned(),
        expected: "arrows that point down".to_owned(),
        found: wrong.join("\n  "),
    })
}

fn members(root: &Path) -> Result<Vec<Member>> {
    let mut command = Command::new("cargo");
    command.current_dir(root).args(["metadata", "--no-deps", "--format-version", "1"]);
    let text = process::output(&mut command)?;
    let metadata: Value = serde_json::from_str(&text).map_err(|error| Error::Check {
        what: "cargo metadata".to_owned(),
        expected: "JSON".to_owned(),
        found: error.to_string(),
    })?;
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
        let Some((_, allowed)) = CRATES.iter().find(|(name, _)| *name == member.name) else {
            wrong.push(format!("{} is a crate without a floor", member.name));
            continue;
        };
        for needed in member.needs.iter().filter(|needed| !allowed.contains(&needed.as_str())) {
            wrong.push(format!("{} → {needed}", member.name));
        }
    }
    wrong
}

/// Arrows up out of one file of `transport`; `path` is below `src`.
fn room_arrows(path: &Path, text: &str) -> Vec<String> {
    let room = path.components().next().map(|part| part.as_os_str().to_string_lossy().into_owned());
    let room = room.unwrap_or_default();
    let room = room.trim_end_matches(".rs");
    if room == "lib" {
        return Vec::new();
    }
    let floor = |room: &str| ROOMS.iter().position(|rooms| rooms.contains(&room));
    let Some(here) = floor(room) else { return vec![format!("`{room}` is a room without a floor")] };
    let code = product_lines(text).filter(|line| !line.trim_start().starts_with("//"));
    let named = code.flat_map(|line| line.split("crate::").skip(1).map(first_word).collect::<Vec<_>>());
    let mut wrong: Vec<_> = named
        .filter_map(|other| match floor(other) {
            Some(there) if there <= here => None,
            Some(_) => Some(format!("{}: {room} → {other}", path.display())),
            None => Some(format!("{}: `crate::{other}` names no room", path.display())),
        })
        .collect();
    wrong.dedup();
    wrong
}

/// How many names a crate's root has: what it defines, and what it re-exports. Public modules do not count.
fn root_names(text: &str) -> usize {
    const DEFINES: [&str; 8] = ["fn ", "struct ", "enum ", "trait ", "type ", "const ", "static ", "union "];
    let code: String = product_lines(text).map(|line| line.trim().to_owned() + " ").collect();
    let public = || code.split("pub ").skip(1);
    let defined = public().filter(|item| DEFINES.iter().any(|word| item.starts_with(word))).count();
    let exports = public().filter_map(|item| item.strip_prefix("use ")?.split(';').next());
    let leaf = |name: &&str| !name.trim().is_empty() && !name.trim().ends_with("::");
    defined + exports.map(|tree| tree.split([',', '{', '}']).filter(leaf).count()).sum::<usize>()
}

/// The name at the beginning.
fn first_word(text: &str) -> &str {
    let end = text.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(text.len());
    &text[..end]
}

/// Lines that are neither blank, nor comments, nor tests.
fn code_lines(text: &str) -> usize {
    let is_code = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
    product_lines(text).filter(is_code).count()
}

/// The lines in front of a file's tests, which are its last module.
fn product_lines(text: &str) -> impl Iterator<Item = &str> {
    let product = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    product.lines()
}

/// The Rust files below `src` that are no tests, by their path from there.
fn sources(src: &Path) -> Result<BTreeMap<PathBuf, String>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![src.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).map_err(|error| Error::io(&folder, error))? {
            let path = entry.map_err(|error| Error::io(&folder, error))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name == "tests" || name == "tests.rs" {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if name.ends_with(".rs") {
                let text = std::fs::read_to_string(&path).map_err(|error| Error::io(&path, error))?;
                found.insert(path.strip_prefix(src).unwrap_or(&path).to_owned(), text);
            }
        }
    }
    Ok(found)
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

    #[test]
    fn room_arrows_upward_are_named_and_downward_are_not() {
        let text = "use crate::error::Error;\nuse crate::follow::Follower;\nlet x = crate::publish::f();\n";
        assert_eq!(room_arrows(Path::new("run.rs"), text), ["run.rs: run → follow", "run.rs: run → publish"]);
        assert_eq!(room_arrows(Path::new("serve/follower.rs"), text), [""; 0]);
        assert_eq!(room_arrows(Path::new("lib.rs"), text), [""; 0]);
    }

    #[test]
    fn room_arrows_in_comments_and_tests_do_not_count() {
        let text = "/// [`x`](crate::follow::x)\nfn a() {}\n\n#[cfg(test)]\nmod tests {\n    use crate::follow::b;\n}\n";
        assert_eq!(room_arrows(Path::new("run.rs"), text), [""; 0]);
    }

    #[test]
    fn room_arrows_through_the_crate_root_are_refused() {
        let found =
            room_arrows(Path::new("publish/mod.rs"), "use crate::{Error, Follower};\nuse crate::Run;\n");
        assert_eq!(
            found,
            ["publish/mod.rs: `crate::` names no room", "publish/mod.rs: `crate::Run` names no room"]
        );
    }

    #[test]
    fn room_arrows_new_room_needs_a_floor() {
        assert_eq!(room_arrows(Path::new("attic/a.rs"), ""), ["`attic` is a room without a floor"]);
    }

    #[test]
    fn root_names_count_definitions_and_re_exports_and_no_modules() {
        let text = "//! a\npub mod a;\nmod b;\npub use a::A;\npub use b::{\n    B, C as D,\n    c::{E, F},\n};\nuse a::b;\npub const G: u8 = 1;\npub(crate) fn h() {}\n";
        assert_eq!(root_names(text), 6);
    }

    #[test]
    fn code_lines_leave_out_blanks_comments_and_tests() {
        assert_eq!(
            code_lines("//! a\n\nfn a() {\n    // b\n}\n\n#[cfg(test)]\nmod tests {\n    fn c() {}\n}\n"),
            2
        );
    }
}
