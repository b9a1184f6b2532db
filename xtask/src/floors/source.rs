//! What the source files of a crate say: which room knows which, lines of code, names at the root.

use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The Rust files below `src` that are no tests, by their path from there.
pub(super) fn sources(src: &Path) -> Result<BTreeMap<PathBuf, String>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![src.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).map_err(Error::io(&folder))? {
            let path = entry.map_err(Error::io(&folder))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name == "tests" || name == "tests.rs" {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if name.ends_with(".rs") {
                let text = std::fs::read_to_string(&path).map_err(Error::io(&path))?;
                found.insert(path.strip_prefix(src).unwrap_or(&path).to_owned(), text);
            }
        }
    }
    Ok(found)
}

/// Arrows up out of one file; `path` is below `src`, `exports` says in which room a name at the crate's root is.
pub(super) fn room_arrows(
    path: &Path,
    text: &str,
    floors: &[&[&str]],
    exports: &BTreeMap<String, String>,
) -> Vec<String> {
    let room = path.components().next().map(|part| part.as_os_str().to_string_lossy().into_owned());
    let room = room.unwrap_or_default();
    let room = room.trim_end_matches(".rs");
    if room == "lib" {
        return Vec::new();
    }
    let floor = |room: &str| floors.iter().position(|rooms| rooms.contains(&room));
    let Some(here) = floor(room) else { return vec![format!("`{room}` is a room without a floor")] };
    let mut code: String = product_lines(text)
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| [line, "\n"])
        .collect();
    if path.components().count() == 1 {
        // Directly below `src`, `super` is the crate's root, but for modules within the file.
        code = format!("\n{code}").replace("\nuse super::", "\nuse crate::");
    }
    let mut wrong: Vec<_> = code
        .split("crate::")
        .skip(1)
        .flat_map(named)
        .filter_map(|name| {
            let room_of = || exports.get(name).map_or(name, String::as_str);
            let other = if floor(name).is_some() { name } else { room_of() };
            match floor(other) {
                // What the root itself defines is on the ground.
                None if other == ROOT => None,
                Some(there) if there <= here => None,
                Some(_) => Some(format!("{}: {room} → {other}", path.display())),
                None => Some(format!("{}: `crate::{name}` is in no room", path.display())),
            }
        })
        .collect();
    wrong.dedup();
    wrong
}

/// The names that stand behind `crate::`: one, or the first of each path in braces.
fn named(behind: &str) -> Vec<&str> {
    let Some(tree) = behind.strip_prefix('{') else { return vec![first_word(behind)] };
    let mut depth = 0_u32;
    let top = |letter: char| {
        match letter {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        letter == ',' && depth == 0
    };
    let end = closing(tree);
    tree[..end].split(top).map(|path| first_word(path.trim())).filter(|name| !name.is_empty()).collect()
}

/// Where the brace closes that was opened before `tree`.
fn closing(tree: &str) -> usize {
    let mut depth = 1_u32;
    let closes = |(_, letter): &(usize, char)| {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        depth == 0
    };
    tree.char_indices().find(closes).map_or(tree.len(), |(at, _)| at)
}

/// The room of what a crate's root defines by itself.
const ROOT: &str = "crate";

/// In which room each name is that the crate's root re-exports or defines.
pub(super) fn exports(root: &str) -> BTreeMap<String, String> {
    let lines = product_lines(root).filter(|line| !line.trim_start().starts_with("//"));
    let code: String = lines.map(|line| line.trim().to_owned() + " ").collect();
    let mut found = BTreeMap::new();
    for word in DEFINES {
        let defined = code.split(word).skip(1).map(|rest| (first_word(rest).to_owned(), ROOT.to_owned()));
        found.extend(defined);
    }
    for item in code.split("use ").skip(1).filter_map(|item| item.split(';').next()) {
        let room = first_word(item);
        for leaf in item.split([',', '{', '}']) {
            let name = leaf.rsplit("::").next().unwrap_or_default();
            let name = name.rsplit(" as ").next().unwrap_or_default().trim();
            if !name.is_empty() && name != room {
                found.insert(name.to_owned(), room.to_owned());
            }
        }
    }
    found
}

/// What begins the definition of a name.
const DEFINES: [&str; 8] = ["fn ", "struct ", "enum ", "trait ", "type ", "const ", "static ", "union "];

/// How many names a crate's root has: what it defines, and what it re-exports. Public modules do not count.
pub(super) fn root_names(text: &str) -> usize {
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
pub(super) fn code_lines(text: &str) -> usize {
    let is_code = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
    product_lines(text).filter(is_code).count()
}

/// The lines in front of a file's tests, which are its last module.
fn product_lines(text: &str) -> impl Iterator<Item = &str> {
    let product = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    product.lines()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOORS: &[&[&str]] = &[&["error"], &["run"], &["publish"], &["follow", "serve"]];

    fn arrows(path: &str, text: &str) -> Vec<String> {
        let exports = exports(
            "pub const MAX: u8 = 1;\npub use follow::Follower;\npub use error::{Error, Result as Outcome};\n",
        );
        room_arrows(Path::new(path), text, FLOORS, &exports)
    }

    #[test]
    fn room_arrows_upward_are_named_and_downward_are_not() {
        let text = "use crate::error::Error;\nuse crate::follow::Follower;\nlet x = crate::publish::f();\n";
        assert_eq!(arrows("run.rs", text), ["run.rs: run → follow", "run.rs: run → publish"]);
        assert_eq!(arrows("serve/follower.rs", text), [""; 0]);
        assert_eq!(arrows("lib.rs", text), [""; 0]);
    }

    #[test]
    fn room_arrows_in_comments_and_tests_do_not_count() {
        let text = "/// [`x`](crate::follow::x)\nfn a() {}\n\n#[cfg(test)]\nmod tests {\n    use crate::follow::b;\n}\n";
        assert_eq!(arrows("run.rs", text), [""; 0]);
    }

    #[test]
    fn room_arrows_through_the_root_lead_to_the_room_of_the_name() {
        let text = "use crate::{Error, Follower, MAX};\nuse crate::Run;\n";
        assert_eq!(
            arrows("publish/mod.rs", text),
            ["publish/mod.rs: publish → follow", "publish/mod.rs: `crate::Run` is in no room"]
        );
    }

    #[test]
    fn room_arrows_in_braces_are_found_one_by_one() {
        let text = "use crate::{\n    error::{Error, Outcome},\n    follow::{a, b},\n};\n";
        assert_eq!(arrows("run/mod.rs", text), ["run/mod.rs: run → follow"]);
    }

    #[test]
    fn room_arrows_through_super_count_below_the_root_only() {
        assert_eq!(arrows("run.rs", "//! x\nuse super::follow::a;\n"), ["run.rs: run → follow"]);
        assert_eq!(arrows("run/mod.rs", "use super::follow::a;\n"), [""; 0]);
    }

    #[test]
    fn room_arrows_new_room_needs_a_floor() {
        assert_eq!(arrows("attic/a.rs", ""), ["`attic` is a room without a floor"]);
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
