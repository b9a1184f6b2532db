//! `driftless log export`.

use super::atif;
use super::texts::{Texts, log_of};
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::{numbers, paths, progress};
use driftless::buffer::export::{TextColumns, export_arrow, export_parquet};
use driftless::buffer::{Position, Reader, Record};
use driftless::trainer::sample::label_text;
use std::fs::File;
use std::io::BufWriter;
use std::ops::Range;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("written").required(true))]
pub(super) struct Args {
    /// Directory of a run, as `train --save` has it, or of its log.
    #[arg(value_name = "RUN")]
    dir: PathBuf,
    /// The file to write; replaced if it is there.
    #[arg(group = "written")]
    file: Option<PathBuf>,
    /// A new directory for trajectories in Harbor's format, ATIF 1.7: a JSON file for each sample, with token ids,
    /// log-probabilities and weight versions. `driftless verify --atif DIR` checks them.
    #[arg(long, value_name = "DIR", groups = ["written", "texts"])]
    atif: Option<PathBuf>,
    /// What to write; by default what the file's name ends with.
    #[arg(long, value_enum, conflicts_with = "atif")]
    format: Option<Format>,
    /// First position.
    #[arg(long, default_value_t = 0, value_parser = numbers::ordinal())]
    from: u64,
    /// One past the last position; by default the end of the log.
    #[arg(long, value_parser = numbers::ordinal())]
    to: Option<u64>,
    /// Add what the tokens and prompts say: columns prompt, response and label, each null where there is none.
    #[arg(long, group = "texts")]
    text: bool,
    /// With --text or --atif, checkpoint directory with the tokenizer [default: the run's own].
    #[arg(long, value_name = "DIR", requires = "texts")]
    pub(super) hf_checkpoint: Option<PathBuf>,
}

impl Args {
    /// Those that are wanted of the ones that a log has.
    pub(super) fn positions(&self, reader: &Reader) -> Range<Position> {
        let from = self.from.max(reader.oldest().0);
        Position(from)..Position(self.to.unwrap_or(u64::MAX).min(reader.end().0))
    }
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Format {
    /// Arrow IPC file (Feather V2).
    Arrow,
    /// Parquet.
    Parquet,
}

pub(super) fn run(args: &Args, output: Output) -> Result<()> {
    let log = log_of(&args.dir)?;
    if let Some(to) = args.to.filter(|to| *to < args.from) {
        return Err(Error::usage("--to", format!("at least --from, which is {}", args.from), to));
    }
    match (&args.file, &args.atif) {
        (Some(file), _) => table(file, args, &log, output),
        (None, Some(dir)) => atif::run(dir, args, &log, output),
        // The parser has one of them.
        (None, None) => Ok(()),
    }
}

/// Writes a data frame.
fn table(file: &Path, args: &Args, log: &Path, output: Output) -> Result<()> {
    let format = format(file, args.format)?;
    paths::check_output("FILE", file)?;
    paths::check_outside("FILE", file, "the log", log)?;
    let reader = Reader::open(log)?;
    let texts = args.text.then(|| Texts::open(log, args.hf_checkpoint.as_deref())).transpose()?;
    let names: &[&str] = if args.text { &["prompt", "response", "label"] } else { &[] };
    let positions = args.positions(&reader);
    let from = positions.start.0;
    let io = |source| Error::Io { path: file.to_owned(), source };
    // Beside its final place, so that nobody ever reads half a file there.
    let mut unfinished = file.as_os_str().to_owned();
    unfinished.push(".new");
    let out = BufWriter::new(File::create(&unfinished).map_err(io)?);
    let written = progress::during("export", "records", |work| {
        let of = |record: &Record| {
            work.add(1);
            texts.as_ref().map_or_else(Vec::new, |texts| columns(texts, record))
        };
        let columns = TextColumns { names, of: &of };
        match format {
            Format::Arrow => export_arrow(&reader, positions, columns, out),
            Format::Parquet => export_parquet(&reader, positions, columns, out),
        }
    });
    let exported = written.inspect_err(|_| {
        // The error being returned matters more.
        let _ = std::fs::remove_file(&unfinished);
    })?;
    std::fs::rename(&unfinished, file).map_err(io)?;
    output.print(&exported, |exported| format!("{} records in {}", exported.records, file.display()))?;
    super::whole(log, exported.damaged + super::tell_lost(&reader, from))
}

/// The texts of a record. One that the tokenizer has no text for, or whose prompt is gone, is null.
fn columns(texts: &Texts, record: &Record) -> Vec<Option<String>> {
    let label = texts.note(record).ok().and_then(|note| note.label);
    let response = texts.response(record).ok().flatten();
    vec![texts.prompt(record).ok(), response, label.map(|label| label_text(&label))]
}

fn format(file: &Path, format: Option<Format>) -> Result<Format> {
    let ending = file.extension().map(|ending| ending.to_string_lossy().into_owned()).unwrap_or_default();
    match (format, &ending[..]) {
        (Some(format), _) => Ok(format),
        (None, "arrow" | "feather" | "ipc") => Ok(Format::Arrow),
        (None, "parquet") => Ok(Format::Parquet),
        _ => {
            let expected = "a name that ends in .arrow or .parquet, or --format";
            Err(Error::usage(file.display().to_string(), expected, format!("`.{ending}`")))
        }
    }
}
