//! The page of errors: the text of each error that a crate or the command can end with, and when it comes, as their sources
//! say it.

use std::path::Path;
use std::process::Command;

use syn::{Attribute, Expr, ExprLit, Fields, Item, Lit, LitStr, Meta, Variant, Visibility};

use crate::error::{Error, Result, expect_none};
use crate::{manual, process};

/// What the page says before the errors.
const BEGIN: &str = "\
# Errors

The text of each error that the command and the crates have, when it comes, and what to do.

What stands between braces differs from case to case. The command prints an error behind `error:`, each of its causes behind
`because:`, and a flag or a command that helps behind `hint:`. Search for words of any of these lines.
[Exit codes](operations.md#stop-a-command) say of which kind an error is.
";

/// An error of a crate.
#[derive(Debug, PartialEq)]
struct Entry {
    /// What it prints, with the names of fields between braces.
    text: String,
    /// When it comes, and what to do.
    cause: String,
    /// What its fields are.
    fields: Vec<(String, String)>,
}

/// The page, made of the sources below `root`.
pub(crate) fn page(root: &Path) -> Result<String> {
    let mut git = Command::new("git");
    git.current_dir(root).args(["ls-files", "*src/*error.rs", "*src/*error/mod.rs"]);
    let tracked = process::output(&mut git)?;
    let mut paths: Vec<&str> = tracked.lines().filter(|path| !path.starts_with("xtask/")).collect();
    // What users meet first.
    paths.sort_by_key(|path| !path.starts_with("src/"));
    let mut page = BEGIN.to_owned();
    let mut undocumented = Vec::new();
    for path in paths {
        let source = std::fs::read_to_string(root.join(path)).map_err(Error::io(path))?;
        let entries = entries(&source).map_err(|error| Error::check(path, "Rust", error.to_string()))?;
        let bare = entries.iter().filter(|entry| entry.cause.is_empty());
        undocumented.extend(bare.map(|entry| format!("{path}: {}", entry.text)));
        if !entries.is_empty() {
            page += &format!("\n## {}\n\n{}", room(path), entries.iter().map(shown).collect::<String>());
        }
    }
    expect_none(&undocumented, "errors", "a comment at each that says when it comes")?;
    Ok(page)
}

/// What a file's errors are of, by its path.
fn room(path: &str) -> String {
    let folder = path.split_once("src/").map_or("", |(folder, _)| folder).trim_end_matches('/');
    match folder.rsplit('/').next().unwrap_or_default() {
        "" => "The command".to_owned(),
        name if path.contains("src/cuda/") => format!("driftless-{name} on CUDA"),
        name => format!("driftless-{name}"),
    }
}

/// The errors of a source, but those that only hand on another crate's.
fn entries(source: &str) -> syn::Result<Vec<Entry>> {
    let items = syn::parse_file(source)?.items;
    let enums = items.into_iter().filter_map(|item| match item {
        Item::Enum(found) if !matches!(found.vis, Visibility::Inherited) => Some(found.variants),
        _ => None,
    });
    Ok(enums.flatten().filter_map(|variant| entry(&variant)).collect())
}

fn entry(variant: &Variant) -> Option<Entry> {
    let said = variant.attrs.iter().find(|attribute| attribute.path().is_ident("error"))?;
    let tokens = said.meta.require_list().ok()?.tokens.clone().into_iter().map(|token| token.to_string());
    let tokens: Vec<String> = tokens.collect();
    let mut arguments = tokens.split(|token| token == ",");
    let format: LitStr = syn::parse_str(arguments.next()?.first()?).ok()?;
    let named = match &variant.fields {
        Fields::Named(fields) => fields.named.iter().collect(),
        _ => Vec::new(),
    };
    let field = |field: &&syn::Field| Some((field.ident.as_ref()?.to_string(), comment(&field.attrs)));
    let fields: Vec<_> = named.iter().filter_map(field).collect();
    let text = text(&format.value(), &fields, arguments);
    let is_told = |(name, what): &(String, String)| text.contains(&format!("{{{name}}}")) && !what.is_empty();
    let fields = fields.into_iter().filter(is_told).collect();
    Some(Entry { text, cause: comment(&variant.attrs), fields })
}

/// The words of a comment of documentation, with links as their words.
fn comment(attributes: &[Attribute]) -> String {
    let line = |attribute: &Attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
            Expr::Lit(ExprLit { lit: Lit::Str(line), .. }) => Some(line.value().trim().to_owned()),
            _ => None,
        },
        _ => None,
    };
    let lines: Vec<_> = attributes.iter().filter_map(line).collect();
    manual::unlinked(&lines.join(" ")).replace("`]", "`")
}

/// A format as one reads it: fields by their names, without how they are written. An argument without a name stands for the
/// first field in it.
fn text<'a>(
    format: &str,
    fields: &[(String, String)],
    arguments: impl Iterator<Item = &'a [String]>,
) -> String {
    let mut arguments = arguments.filter(|tokens| tokens.get(1).is_none_or(|token| token != "="));
    let mut parts = format.split('{');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let Some((inside, behind)) = part.split_once('}') else { continue };
        let name = inside.split(':').next().unwrap_or_default();
        let field = match name.parse::<usize>() {
            Err(_) if name.is_empty() => arguments.next().and_then(|argument| named_in(argument, fields)),
            Err(_) => Some(name.to_owned()),
            Ok(_) => None,
        };
        text += &field.map_or_else(|| "…".to_owned(), |name| format!("{{{name}}}"));
        text += behind;
    }
    text
}

/// The first field that an argument takes, unless it only chooses between words.
fn named_in(argument: &[String], fields: &[(String, String)]) -> Option<String> {
    let words = argument.join(" ");
    if words.starts_with("if ") {
        return None;
    }
    let mut words = words.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
    words.find(|word| fields.iter().any(|(name, _)| name == word)).map(str::to_owned)
}

/// An entry in Markdown, as a list of definitions.
fn shown(entry: &Entry) -> String {
    let field = |(name, what): &(String, String)| format!("  - `{name}`: {what}\n");
    let fields = entry.fields.iter().map(field).collect::<String>();
    format!("`` {} ``\n: {}\n{fields}\n", entry.text, entry.cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = r#"
        #[derive(thiserror::Error)]
        pub enum Error {
            /// What lies below.
            #[error(transparent)]
            Io(std::io::Error),
            /// A [`Key`] of two [lines](crate::Lines)
            /// is bad. Give another.
            #[error("`{name}` in {}: {found:04x}, {0}, {}", path.display(), if found { 1 } else { 2 })]
            BadKey {
                /// The key.
                name: String,
                path: PathBuf,
                found: u8,
            },
            #[error("bare")]
            Bare,
        }
        enum Inner { #[error("hidden")] Hidden }
    "#;

    #[test]
    fn errors_are_read_from_the_source() {
        let found = entries(SOURCE).expect("Rust");
        let bad = Entry {
            text: "`{name}` in {path}: {found}, …, …".to_owned(),
            cause: "A `Key` of two lines is bad. Give another.".to_owned(),
            fields: vec![("name".to_owned(), "The key.".to_owned())],
        };
        let bare = Entry { text: "bare".to_owned(), cause: String::new(), fields: Vec::new() };
        assert_eq!(found, [bad, bare]);
        let expected = "`` `{name}` in {path}: {found}, …, … ``\n: A `Key` of two lines is bad. Give another.\n  - `name`: The key.\n\n";
        assert_eq!(shown(&found[0]), expected);
    }

    #[test]
    fn errors_are_grouped_by_what_has_them() {
        let rooms = ["src/cli/shared/error.rs", "transport/store/src/error.rs", "delta/src/cuda/error.rs"];
        assert_eq!(rooms.map(room), ["The command", "driftless-store", "driftless-delta on CUDA"]);
    }
}
