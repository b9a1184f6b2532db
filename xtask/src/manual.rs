//! A manual page of a command, as clap writes it, in Markdown.

/// Sections that say nothing which the others do not.
const LEFT_OUT: [&str; 3] = ["NAME", "SYNOPSIS", "VERSION"];
/// What a command says behind its flags, with examples.
const BEHIND: &str = "EXTRA";
/// What stands between a flag's words and the list of its values.
const POSSIBLE: &str = "\\fIPossible values:\\fR\n.RS 14\n";
/// Commands of a command.
const COMMANDS: &str = "SUBCOMMANDS";

/// The page of the command `name`, such as `driftless log show`.
pub(crate) fn page(name: &str, roff: &str) -> String {
    let mut page = format!("# {name}\n");
    for section in roff.split("\n.SH ").skip(1) {
        let (title, body) = section.split_once('\n').unwrap_or((section, ""));
        let title = title.trim_matches('"');
        match title {
            title if LEFT_OUT.contains(&title) => {}
            "DESCRIPTION" => page += &format!("\n{}\n", body.split(".PP\n").map(prose).collect::<String>()),
            BEHIND => page += &format!("\n```text\n{}\n```\n", plain(body).trim_end()),
            title => page += &format!("\n## {}\n{}", heading(title), entries(body, title == COMMANDS)),
        }
    }
    page
}

/// The first sentence of a page's own words, for lists of pages.
pub(crate) fn first_sentence(page: &str) -> String {
    let is_prose = |line: &&str| {
        !line.is_empty() && !["#", "|", "    ", "```", "!["].iter().any(|mark| line.starts_with(mark))
    };
    let lines = page.lines().skip_while(|line| !is_prose(line)).take_while(is_prose);
    let words = lines.collect::<Vec<_>>().join(" ");
    unlinked(words.find(". ").map_or(words.as_str(), |end| &words[..=end]))
}

/// A text whose links are their words alone.
pub(crate) fn unlinked(text: &str) -> String {
    let mut parts = text.split("](");
    let mut words = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        words.extend(part.split_once(')').map(|(_, behind)| behind));
    }
    words.replace('[', "")
}

/// What clap has in capitals, as a heading.
fn heading(title: &str) -> String {
    let title = plain(title);
    if title.len() <= 3 {
        return title;
    }
    let mut letters = title.chars();
    letters.next().into_iter().chain(letters.as_str().to_lowercase().chars()).collect()
}

/// Flags, arguments, variables or commands, as a list of definitions.
fn entries(body: &str, are_commands: bool) -> String {
    let mut list = String::new();
    for entry in body.split(".TP\n").skip(1) {
        let (term, rest) = entry.split_once('\n').unwrap_or((entry, ""));
        let term = plain(term);
        list += &match (term.strip_suffix("(1)"), term.split_once(" [default")) {
            (Some(command), _) if are_commands => {
                format!("\n[{}]({command}.md)\n", command.replace('-', " "))
            }
            (_, Some((flag, default))) => format!("\n`{flag}` [default{}\n", escaped(default)),
            _ => format!("\n`{term}`\n"),
        };
        let (words, values) = rest.split_once(POSSIBLE).unwrap_or((rest, ""));
        list += &format!(": {}\n", prose(words).trim_end().replace('\n', "\n  "));
        for value in values.split(".IP \\(bu 2\n").skip(1) {
            list += &format!("  - {}\n", prose(value).trim_end().replace('\n', " "));
        }
    }
    list
}

/// Words in Markdown: lines without requests, with what Markdown would obey made visible.
fn prose(body: &str) -> String {
    let lines = body.lines().filter(|line| !line.starts_with('.') && !line.is_empty());
    lines.map(|line| escaped(&plain(line)) + "\n").collect()
}

/// A text without roff's escapes.
fn plain(text: &str) -> String {
    let fonts = ["\\fB", "\\fI", "\\fR"].iter().fold(text.to_owned(), |text, font| text.replace(font, ""));
    let marks = fonts.replace("\\*(Aq", "'").replace("\\-", "-").replace("\\&", "");
    marks.lines().filter(|line| !line.starts_with(".br")).collect::<Vec<_>>().join("\n").replace("\\\\", "\\")
}

/// Words of a command hold no Markdown but for what they have between backticks.
fn escaped(text: &str) -> String {
    let parts = text.split('`').enumerate().map(|(index, part)| match index % 2 {
        0 => ['<', '*', '_', '[', '|']
            .iter()
            .fold(part.to_owned(), |part, mark| part.replace(*mark, &format!("\\{mark}"))),
        _ => format!("`{part}`"),
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROFF: &str = ".TH x 1\n.SH NAME\nx\n.SH DESCRIPTION\nLook at <it>.\n.PP\nThen go.\n.SH OPTIONS\n.TP\n\
        \\fB\\-\\-layout\\fR \\fI<A:B>\\fR [default: disk]\nThe engines\\*(Aq `a_b` way\n.br\n\n.br\n\\fIPossible values:\\fR\n\
        .RS 14\n.IP \\(bu 2\ndisk: as \\-\\-it\n.RE\n.SH SUBCOMMANDS\n.TP\nx\\-show(1)\nPrint\n.SH EXTRA\nExample:\n  x \\\\\n    \\-\\-y\n";

    #[test]
    fn manual_page_becomes_markdown() {
        let expected = "# x\n\nLook at \\<it>.\nThen go.\n\n\n## Options\n\n`--layout <A:B>` [default: disk]\n\
            : The engines' `a_b` way\n  - disk: as --it\n\n## Subcommands\n\n[x show](x-show.md)\n: Print\n\n\
            ```text\nExample:\n  x \\\n    --y\n```\n";
        assert_eq!(page("x", ROFF), expected);
    }

    #[test]
    fn first_sentence_is_of_the_first_prose() {
        let page = "# A\n\n| a |\n\n    code\n\nWords of\n`it` [there](x.md). More.\n\nNot this.\n";
        assert_eq!(first_sentence(page), "Words of `it` there.");
        assert_eq!(first_sentence("# A\n"), "");
    }
}
