//! The documentation as a book: the pages of `docs/`, one for each command and one of errors, built by mdBook, with its links
//! checked.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result, expect_none};
use crate::{errors, install, manual, pages, process};

/// The directory in the cache: another one for another release.
const HOME: &str = "mdbook-0.5.4";
const RELEASE: &str = "0.5.4";
const PROGRAM: &str = "bin/mdbook";
/// Where a file of the repository is that the book does not have.
const REPOSITORY: &str = "https://github.com/driftless-rl/driftless/blob/main";
const SUMMARY: &str = "SUMMARY.md";
/// The page of errors.
const ERRORS: &str = "errors.md";
/// Pages that mdBook makes of others: their links are those of the others.
const MADE: [&str; 3] = ["404.html", "print.html", "toc.html"];

/// What is missing and how to get it, or `None`.
pub(crate) fn missing(cache: &Path) -> Option<String> {
    let absent = !cache.join(HOME).join(PROGRAM).is_file();
    absent.then(|| format!("mdBook {RELEASE} (cargo xtask test --ci doc)"))
}

/// Builds mdBook into the cache.
pub(crate) fn install(cache: &Path) -> Result<()> {
    if missing(cache).is_none() {
        return Ok(());
    }
    println!("doc: mdbook {RELEASE}");
    install::into_place(&cache.join(HOME), PROGRAM, |partial| {
        let mut cargo = Command::new("cargo");
        cargo.args(["install", "mdbook", "--version", RELEASE, "--locked", "--quiet", "--debug"]);
        cargo.args(["--no-default-features", "--features", "search", "--config", "profile.dev.debug=false"]);
        process::run(cargo.arg("--root").arg(partial))
    })
}

/// Builds the book with the commands of `program` into `target/book`, and says where its first page is.
pub(crate) fn build(root: &Path, cache: &Path, program: &Path, log: &Path) -> Result<PathBuf> {
    let book = root.join("target/book");
    install::remove(&book)?;
    let mut pages = read(&root.join("docs"), Path::new("docs"), &book)?;
    let summary = pages.get(SUMMARY).cloned().unwrap_or_default();
    let commands = commands(program, &book.join("man"), log)?;
    pages.insert(SUMMARY.to_owned(), format!("{summary}{}- [Errors]({ERRORS})\n", contents(&commands)));
    pages.extend(commands);
    pages.insert(ERRORS.to_owned(), errors::page(root)?);
    let listed = listed(&pages[SUMMARY]);
    let left_out: Vec<_> =
        pages.keys().filter(|path| *path != SUMMARY && !listed.contains_key(*path)).cloned().collect();
    expect_none(&left_out, "docs/SUMMARY.md", "a line for each page")?;
    pages.iter().try_for_each(|(path, text)| write(&book.join(path), text))?;
    process::run_logged(Command::new(cache.join(HOME).join(PROGRAM)).arg("build").arg(&book), log)?;
    let html = book.join("html");
    write(&html.join("llms.txt"), &for_models(&pages))?;
    // What llms.txt names: programs read these more easily.
    listed.keys().try_for_each(|path| write(&html.join(path), &pages[path]))?;
    check_links(&html)?;
    Ok(html.join("index.html"))
}

/// The pages below a directory by their paths there, with links that lead out of it made absolute. Other files are copied
/// into the book.
fn read(dir: &Path, name: &Path, book: &Path) -> Result<BTreeMap<String, String>> {
    let mut pages = BTreeMap::new();
    for path in files(dir)? {
        let within = path.strip_prefix(dir).unwrap_or(&path);
        let place = book.join(within);
        if path.extension().is_some_and(|end| end == "md") {
            let text = fs::read_to_string(&path).map_err(Error::io(&path))?;
            let folder =
                name.join(within).parent().map(|folder| folder.display().to_string()).unwrap_or_default();
            pages.insert(within.display().to_string(), outward(&folder, &text));
        } else {
            make_parent(&place)?;
            fs::copy(&path, &place).map_err(Error::io(&path))?;
        }
    }
    Ok(pages)
}

/// All files below a directory.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(Error::io(dir))? {
        let path = entry.map_err(Error::io(dir))?.path();
        if path.is_dir() { found.extend(files(&path)?) } else { found.push(path) }
    }
    Ok(found)
}

/// The text of a page in `folder`, with links that lead out of `docs/` made absolute.
fn outward(folder: &str, text: &str) -> String {
    let mut parts = text.split("](");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let target = part.split(')').next().unwrap_or_default();
        let path = pages::joined(folder, target);
        let stays = target.starts_with('#') || target.contains("://") || path.starts_with("docs/");
        out += if stays { "](" } else { "](REPOSITORY/" };
        out += &if stays { part.to_owned() } else { path + &part[target.len()..] };
    }
    out.replace("](REPOSITORY/", &format!("]({REPOSITORY}/"))
}

/// A page for each command.
fn commands(program: &Path, man: &Path, log: &Path) -> Result<BTreeMap<String, String>> {
    process::run_logged(Command::new(program).arg("man").arg(man), log)?;
    let mut pages = BTreeMap::new();
    for path in files(man)? {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let roff = fs::read_to_string(&path).map_err(Error::io(&path))?;
        pages.insert(format!("commands/{name}.md"), manual::page(&name.replace('-', " "), &roff));
    }
    install::remove(man)?;
    Ok(pages)
}

/// The lines of the summary for the commands.
fn contents(commands: &BTreeMap<String, String>) -> String {
    let line = |(path, page): (&String, &String)| {
        let title = page.lines().next().unwrap_or_default().trim_start_matches("# ");
        let depth = title.split(' ').count().saturating_sub(1);
        format!("{}- [{title}]({path})\n", "  ".repeat(depth))
    };
    // A command stands before those below it, as a space goes before letters.
    let mut sorted: Vec<_> = commands.iter().collect();
    sorted.sort_by_key(|(path, _)| path.trim_end_matches(".md").replace('-', " "));
    format!("\n# Commands\n\n{}", sorted.into_iter().map(line).collect::<String>())
}

/// Pages of a summary with their titles.
fn listed(summary: &str) -> BTreeMap<String, String> {
    let entry = |line: &str| {
        let (title, path) = line.trim_start_matches([' ', '-']).strip_prefix('[')?.split_once("](")?;
        Some((path.trim_end_matches(')').to_owned(), title.to_owned()))
    };
    summary.lines().filter_map(entry).collect()
}

/// What a language model reads first: each page with its first words.
fn for_models(pages: &BTreeMap<String, String>) -> String {
    let mut text =
        "# driftless\n\n> Keeps a fleet of LLM inference engines in step with an RL trainer.\n".to_owned();
    for line in pages[SUMMARY].lines().skip(1) {
        let Some((path, title)) = listed(line).pop_first() else {
            text += &if line.starts_with('#') { format!("\n#{line}\n\n") } else { String::new() };
            continue;
        };
        text += &format!("- [{title}]({path}): {}\n", manual::first_sentence(&pages[&path]));
    }
    text
}

/// Checks that links within the book lead to pages and places that it has.
fn check_links(html: &Path) -> Result<()> {
    let mut pages = BTreeMap::new();
    let mut all = BTreeSet::new();
    for path in files(html)? {
        let name = path.strip_prefix(html).unwrap_or(&path).display().to_string();
        if name.ends_with(".html") && !MADE.contains(&name.as_str()) {
            pages.insert(name.clone(), fs::read_to_string(&path).map_err(Error::io(&path))?);
        }
        all.insert(name);
    }
    let wrong: Vec<_> = pages.iter().flat_map(|(name, text)| lost(name, text, &pages, &all)).collect();
    expect_none(&wrong, "links of the book", "places that it has")
}

/// Links of a page that lead nowhere.
fn lost(name: &str, text: &str, pages: &BTreeMap<String, String>, all: &BTreeSet<String>) -> Vec<String> {
    let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder);
    let leads = |target: &&str| {
        let (path, place) = target.split_once('#').unwrap_or((target, ""));
        let path = if path.is_empty() { name.to_owned() } else { pages::joined(folder, path) };
        let has_place = |text: &String| place.is_empty() || text.contains(&format!("id=\"{place}\""));
        all.contains(&path) && pages.get(&path).is_none_or(has_place)
    };
    let targets = ["href=\"", "src=\""].iter().flat_map(|begin| text.split(begin).skip(1));
    let targets = targets.filter_map(|rest| rest.split('"').next());
    let within = targets.filter(|target| !target.contains(':') && !target.is_empty());
    within.filter(|target| !leads(target)).map(|target| format!("{name}: {target}")).collect()
}

fn make_parent(path: &Path) -> Result<()> {
    path.parent().map_or(Ok(()), |dir| fs::create_dir_all(dir).map_err(Error::io(dir)))
}

fn write(path: &Path, text: &str) -> Result<()> {
    make_parent(path)?;
    fs::write(path, text).map_err(Error::io(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_out_of_the_docs_lead_to_the_repository() {
        let text = "[a](../benches/x.txt), [b](loop.md#c) ![d](demo.svg) [e](https://f) [g](#h)";
        let expected =
            format!("[a]({REPOSITORY}/benches/x.txt), [b](loop.md#c) ![d](demo.svg) [e](https://f) [g](#h)");
        assert_eq!(outward("docs", text), expected);
        assert_eq!(
            outward("docs/wire", "[a](../loop.md) [b](../../README.md)"),
            format!("[a](../loop.md) [b]({REPOSITORY}/README.md)")
        );
    }

    #[test]
    fn commands_stand_below_their_own() {
        let page = |name: &str| {
            (format!("commands/{}.md", name.replace(' ', "-")), format!("# {name}\n\nDoes it.\n"))
        };
        let commands = BTreeMap::from(["d log show", "d", "d try", "d log"].map(page));
        let expected = "- [d](commands/d.md)\n  - [d log](commands/d-log.md)\n    - [d log show](commands/d-log-show.md)\n  - [d try](commands/d-try.md)\n";
        assert_eq!(contents(&commands), format!("\n# Commands\n\n{expected}"));
    }

    #[test]
    fn links_that_lead_nowhere_are_named() {
        let page =
            "<a href=\"b.html#x\"></a><a href=\"b.html#y\"></a><a href=\"https://z\"></a><img src=\"c.svg\">";
        let pages = BTreeMap::from(
            [("a.html", page), ("b.html", "<h2 id=\"x\">")]
                .map(|(name, text)| (name.to_owned(), text.to_owned())),
        );
        let all = pages.keys().cloned().collect();
        assert_eq!(lost("a.html", page, &pages, &all), ["a.html: b.html#y", "a.html: c.svg"]);
    }
}
