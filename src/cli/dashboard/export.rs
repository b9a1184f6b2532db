//! The page with its data in one file.

use super::samples::{Ask, Order};
use super::{Board, PAGE};
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::paths;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Answers of the step that go along: so many of its worst, and of its best.
const ANSWERS: usize = 12;

/// Writes it, with the answers of `step`, or of the newest one.
pub(crate) fn export(runs: &[PathBuf], file: &Path, step: Option<u64>) -> Result<()> {
    paths::check_output("--export", file)?;
    let board = Board::open(runs, None)?;
    if let Some(step) = step {
        board.check_step(step)?;
    }
    let data = data(&board, step)?;
    let io = |source| Error::Io { path: file.to_owned(), source };
    let mut unfinished = file.as_os_str().to_owned();
    unfinished.push(".new");
    // Beside its final place: whoever opens that meanwhile has the page before.
    let written = std::fs::write(&unfinished, html(&data)).and_then(|()| std::fs::rename(&unfinished, file));
    written.map_err(io).inspect_err(|_| {
        // The error being returned matters more.
        let _ = std::fs::remove_file(&unfinished);
    })
}

/// What the page would ask for, as JSON by what it asks.
fn data(board: &Board, step: Option<u64>) -> Result<String> {
    let mut answers = BTreeMap::from([("runs".to_owned(), board.answer("runs", &Ask::default())?)]);
    for run in 0..board.runs.len() {
        let of_run = || Ask { run, step, ..Ask::default() };
        for what in ["metrics", "fleet", "time"] {
            answers.insert(format!("{what}/{run}"), board.answer(what, &of_run())?);
        }
        // A run without a log has none.
        let Ok(list) = board.answer("samples", &Ask { order: Order::Worst, ..of_run() }) else {
            continue;
        };
        for position in shown(&list) {
            if let Ok(sample) = board.answer("sample", &Ask { position, ..of_run() }) {
                answers.insert(format!("sample/{run}/{position}"), sample);
            }
        }
        answers.insert(format!("samples/{run}"), list);
    }
    let fields = answers.iter().map(|(name, text)| format!("{}:{text}", Value::from(name.as_str())));
    Ok(format!("{{{}}}", fields.collect::<Vec<_>>().join(",")))
}

/// The answers of a list that are shown whole: those at its ends.
fn shown(list: &str) -> Vec<u64> {
    let list: Value = serde_json::from_str(list).unwrap_or_default();
    let rows = list["rows"].as_array().map_or(&[][..], Vec::as_slice);
    let positions: Vec<u64> = rows.iter().filter_map(|row| row["position"].as_u64()).collect();
    let last = positions.len().saturating_sub(ANSWERS).max(ANSWERS.min(positions.len()));
    positions[..ANSWERS.min(positions.len())].iter().chain(&positions[last..]).copied().collect()
}

/// The page with its files, and `data`, in it. Nothing in JSON ends a script but `<`, which stands in strings alone.
fn html(data: &str) -> String {
    let data =
        format!("<script type=\"application/json\" id=\"data\">{}</script>\n", data.replace('<', "\\u003c"));
    let text = |bytes: &'static [u8]| String::from_utf8_lossy(bytes);
    let mut html = text(PAGE[0].2).into_owned();
    for (path, kind, bytes) in &PAGE[1..] {
        let name = path.trim_start_matches('/');
        let (told, whole) = match kind.starts_with("text/css") {
            true => (
                format!("<link rel=\"stylesheet\" href=\"{name}\">"),
                format!("<style>{}</style>", text(bytes)),
            ),
            false => {
                (format!("<script src=\"{name}\"></script>"), format!("<script>{}</script>", text(bytes)))
            }
        };
        let whole = if *path == "/uPlot.js" { data.clone() + &whole } else { whole };
        html = html.replace(&told, &whole);
    }
    html
}
