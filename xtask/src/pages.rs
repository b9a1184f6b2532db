//! What the pages say that can be compared with the tree: paths, links, and flags.

use crate::error::{Error, Result, expect_none};
use crate::process;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// Ends of names by which a path of this repository is known between backticks.
const OURS: [&str; 6] = [".rs", ".py", ".cu", ".ptx", ".md", ".toml"];

/// Files that pages name and that are not in this repository: a user's, and slime's.
const ELSEWHERE: [&str; 6] = [
    "learner.py",
    "pyproject.toml",
    "run.toml",
    "mis.py",
    "slime/utils/disk_delta.py",
    "slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py",
];

/// Pages that tell of other times: records of measurements.
const RECORDS: &str = "benches/record/";

/// Flags that no source declares: of cargo and pip, of engines, of containers, of slime, and of a bench that takes its
/// arguments apart by hand.
const FOREIGN: [&[&str]; 5] = [
    &["--features", "--help", "--manifest-path", "--no-deps", "--nocapture", "--release", "--test"],
    &[
        "--api-key",
        "--custom-weight-loader",
        "--enable-memory-saver",
        "--enable-sleep-mode",
        "--enable-symm-mem",
        "--logprobs-mode",
        "--skip-tokenizer-init",
        "--tp",
        "--weight-transfer-config",
    ],
    &["--ipc", "--network"],
    &[
        "--custom-generate-function-path",
        "--custom-reward-post-process-path",
        "--custom-rm-path",
        "--custom-update-weight-post-write-path",
        "--data-source-path",
        "--dynamic-sampling-filter-path",
        "--get-mismatch-metrics",
        "--rollout-sample-filter-path",
        "--update-weight-local-checkpoint-dir",
    ],
    &["--lengths", "--shapes"],
];

/// The tracked files, and where each flag comes from.
struct Tree {
    files: BTreeSet<String>,
    flags: BTreeSet<String>,
}

/// Checks every page.
pub(crate) fn check(root: &Path) -> Result<()> {
    let tree = Tree::read(root)?;
    let mut pages = BTreeMap::new();
    for path in tree.files.iter().filter(|path| path.ends_with(".md") && !path.starts_with(RECORDS)) {
        pages.insert(path.as_str(), read(root, path)?);
    }
    let mut wrong = Vec::new();
    for (path, text) in &pages {
        for (number, line) in (1..).zip(text.lines()) {
            let files = tree.lost_paths(path, line).into_iter().map(|lost| format!("file `{lost}`"));
            let flags = tree.lost_flags(line).into_iter().map(|lost| format!("flag `{lost}`"));
            let lost = files.chain(lost_links(path, line, &tree, &pages)).chain(flags);
            wrong.extend(lost.map(|what| format!("{path}:{number}: no {what}")));
        }
    }
    expect_none(&wrong, "pages", "paths, links and flags that are there")
}

fn read(root: &Path, path: &str) -> Result<String> {
    let path = root.join(path);
    std::fs::read_to_string(&path).map_err(Error::io(&path))
}

impl Tree {
    fn read(root: &Path) -> Result<Tree> {
        let mut git = Command::new("git");
        git.current_dir(root).args(["ls-files", "--cached", "--others", "--exclude-standard"]);
        let listed = process::output(&mut git)?;
        let files: BTreeSet<_> =
            listed.lines().filter(|path| root.join(path).exists()).map(str::to_owned).collect();
        let mut flags: BTreeSet<_> = FOREIGN.concat().into_iter().map(str::to_owned).collect();
        for path in files.iter().filter(|path| path.ends_with(".rs") || path.ends_with(".py")) {
            flags.extend(declared_flags(&read(root, path)?));
        }
        Ok(Tree { files, flags })
    }

    /// Paths between backticks that lead nowhere. They begin at the root, beside the page, or in the middle: at a
    /// folder that the words before them name.
    fn lost_paths(&self, page: &str, line: &str) -> Vec<String> {
        let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
        let there = |path: &str| {
            let beside = joined(folder, path);
            let ends = format!("/{path}");
            let is = |file: &String| {
                file == path
                    || file.ends_with(&ends)
                    || *file == beside
                    || (path.ends_with('/') && (file.starts_with(path) || file.contains(&ends)))
            };
            self.files.iter().any(is)
        };
        let paths = in_backticks(line).filter(|quoted| self.is_path(quoted)).flat_map(expanded);
        paths.filter(|path| !there(path) && !ELSEWHERE.contains(&path.as_str())).collect()
    }

    fn is_path(&self, quoted: &str) -> bool {
        let letters = |letter: char| letter.is_alphanumeric() || "._-/{},".contains(letter);
        if quoted.is_empty() || !quoted.chars().all(letters) || quoted.starts_with(['.', '-', '/']) {
            return false;
        }
        let first = quoted.split('/').next().unwrap_or_default();
        let folder =
            quoted.ends_with('/') && self.files.iter().any(|file| file.starts_with(&format!("{first}/")));
        folder || OURS.iter().any(|end| quoted.ends_with(end) && quoted.len() > end.len())
    }

    /// Flags between backticks that no program of ours declares.
    fn lost_flags(&self, line: &str) -> Vec<String> {
        let flags = in_backticks(line).flat_map(str::split_whitespace).filter(|word| word.starts_with("--"));
        let name = |word: &str| {
            let end = word[2..]
                .find(|l: char| !l.is_ascii_alphanumeric() && l != '-')
                .map_or(word.len(), |end| end + 2);
            word[..end].to_owned()
        };
        flags.map(name).filter(|flag| flag.len() > 2 && !self.flags.contains(flag)).collect()
    }
}

/// What stands between pairs of backticks.
fn in_backticks(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// `a/{b,c}.rs` as `a/b.rs` and `a/c.rs`.
fn expanded(path: &str) -> Vec<String> {
    let Some((front, rest)) = path.split_once('{') else { return vec![path.to_owned()] };
    let Some((choices, back)) = rest.split_once('}') else { return vec![path.to_owned()] };
    choices.split(',').flat_map(|choice| expanded(&format!("{front}{choice}{back}"))).collect()
}

/// A path from the root: `to`, as it is seen from `folder`.
pub(crate) fn joined(folder: &str, to: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in to.split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." => {}
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Links of a line that lead nowhere, and those to a heading that the page does not have.
fn lost_links(page: &str, line: &str, tree: &Tree, pages: &BTreeMap<&str, String>) -> Vec<String> {
    let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
    let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let mut lost = Vec::new();
    for target in targets.filter(|target| !target.contains("://") && !target.contains(' ')) {
        let (path, heading) = target.split_once('#').map_or((target, None), |(path, h)| (path, Some(h)));
        let path = if path.is_empty() { page.to_owned() } else { joined(folder, path) };
        let as_folder = format!("{}/", path.trim_end_matches('/'));
        if !tree.files.contains(&path) && !tree.files.iter().any(|file| file.starts_with(&as_folder)) {
            lost.push(format!("page `{path}`"));
        } else if let (Some(heading), Some(text)) = (heading, pages.get(path.as_str()))
            && !headings(text).any(|there| there == heading)
        {
            lost.push(format!("heading `#{heading}` in `{path}`"));
        }
    }
    lost
}

/// The names by which a page's headings are linked to.
fn headings(text: &str) -> impl Iterator<Item = String> {
    let titles =
        text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    titles.map(|title| {
        let kept = title
            .to_lowercase()
            .chars()
            .filter(|l| l.is_alphanumeric() || " -_".contains(*l))
            .collect::<String>();
        kept.replace(' ', "-")
    })
}

/// The flags that a Rust or Python file declares.
fn declared_flags(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let attributes = text.match_indices("arg(").map(|(at, begin)| &text[at + begin.len()..]);
    for behind in attributes.filter(|behind| has_long(behind)) {
        if let Some(name) = attribute(behind).split("long = \"").nth(1) {
            found.extend(name.split('"').next().map(|name| format!("--{name}")));
        } else if let Some(field) = field_behind(behind) {
            found.push(format!("--{}", field.replace('_', "-")));
        }
    }
    let quoted =
        text.split("add_argument(").skip(1).flat_map(|rest| rest.split('"').skip(1).step_by(2).take(2));
    found.extend(quoted.filter(|name| name.starts_with("--")).map(str::to_owned));
    found
}

/// The text of an attribute.
fn attribute(rest: &str) -> &str {
    &rest[..rest.find(")]").unwrap_or(rest.len())]
}

fn has_long(rest: &str) -> bool {
    attribute(rest).split(',').any(|part| part.trim() == "long" || part.trim().starts_with("long ="))
}

/// The field or variable that stands behind an attribute.
fn field_behind(rest: &str) -> Option<&str> {
    let behind = &rest[rest.find(")]")? + 2..];
    let line = behind
        .lines()
        .map(str::trim)
        .find(|l| !l.is_empty() && !l.starts_with("//") && !l.starts_with('#'))?;
    let line =
        line.trim_start_matches("pub(crate) ").trim_start_matches("pub(super) ").trim_start_matches("pub ");
    line.split(':').next().filter(|name| !name.contains(' '))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Tree {
        let files = ["src/cli/mod.rs", "src/cli/gc.rs", "docs/loop.md", "docs/design/log.md", "README.md"];
        let rust = "    #[arg(long, value_name = \"A\")]\n    /// x\n    pub(crate) keep_it: u8,\n    #[arg(short, long = \"other\")]\n    b: u8,\n";
        let python = "parser.add_argument(\"--fsdp\", action=\"store_true\")\n";
        let flags = declared_flags(rust).into_iter().chain(declared_flags(python)).collect();
        Tree { files: files.map(str::to_owned).into(), flags }
    }

    #[test]
    fn paths_are_found_at_the_root_or_beside_the_page() {
        let lost = |line: &str| tree().lost_paths("docs/loop.md", line);
        assert_eq!(
            lost("`src/cli/gc.rs`, `cli/{gc,mod}.rs`, `src/cli/`, `loop.md`, `design/log.md`"),
            [""; 0]
        );
        assert_eq!(
            lost("`src/gc.rs`, `cli/{gc,put}.rs`, `src/web/`"),
            ["src/gc.rs", "cli/put.rs", "src/web/"]
        );
        assert_eq!(lost("`runs/first/`, `model.safetensors`, `a b.rs`, `.rs`, src/no.rs"), [""; 0]);
    }

    #[test]
    fn flags_are_those_that_programs_declare() {
        let lost = |line: &str| tree().lost_flags(line);
        assert_eq!(lost("`--keep-it 3`, `x --other=1`, `--fsdp`, -- and --none"), [""; 0]);
        assert_eq!(lost("`driftless gc --keep`"), ["--keep"]);
    }

    #[test]
    fn links_lead_to_pages_and_their_headings() {
        let pages = BTreeMap::from([
            ("docs/loop.md", "# The loop\n## Run it: `now`\n".to_owned()),
            ("README.md", String::new()),
        ]);
        let lost = |line: &str| lost_links("docs/loop.md", line, &tree(), &pages);
        assert_eq!(lost("[a](#run-it-now), [b](../README.md), [c](design/), [d](https://e.f)"), [""; 0]);
        assert_eq!(
            lost("[a](#run), [b](README.md)"),
            ["heading `#run` in `docs/loop.md`", "page `docs/README.md`"]
        );
    }
}
