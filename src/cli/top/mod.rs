//! `driftless top`: a run on the terminal, from the files of its directory alone.

mod draw;
mod seen;

use crate::cli::dashboard::read::Files;
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::paths;
use crate::cli::shared::signals::{PATIENCE, stop_on_signals};
use driftless::store::wait::Stop;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyModifiers};
use seen::Seen;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

const HELP: &str = "\
Shows how far a run is, its alerts, its figures over the last steps, where its engines' time went, and its engines.
It reads the files of `train --save` twice a second and writes nothing. `q` ends it. NO_COLOR has it draw without colours.
Off a terminal, and with --once, it prints what it sees once.

Examples:
  driftless top runs/first
  ssh trainer driftless top runs/first --once
  driftless top runs/first --json | jq .figures.reward";

/// Time between two looks at the files, in which keys are waited for.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Columns where there is no terminal.
const COLUMNS: usize = 100;

/// Watch a run on the terminal: how far it is, alerts, figures, goodput, engines.
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Directory of the run, as `train --save` has it.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Print what is seen once, and end.
    #[arg(long)]
    once: bool,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    paths::check_dir("RUN", &args.run)?;
    let mut files = Files::new(&args.run)?;
    if args.once || output.json || !std::io::stdout().is_terminal() {
        let seen = Seen::of(&files, draw::TREND_CHARS);
        let now = SystemTime::now();
        return output.print(&seen, |seen| draw::text(&seen.lines(now, COLUMNS)));
    }
    let stop = Stop::new();
    stop_on_signals(&stop, PATIENCE)?;
    let mut terminal = ratatui::try_init().map_err(Error::Output)?;
    let ended = watch(&mut terminal, &mut files, &stop);
    let restored = ratatui::try_restore().map_err(Error::Output);
    ended.and(restored)
}

/// Draws until a key or a signal ends it.
fn watch(terminal: &mut ratatui::DefaultTerminal, files: &mut Files, stop: &Stop) -> Result<()> {
    let has_colours = std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty());
    while !stop.is_stopped() {
        files.look()?;
        let (seen, now) = (Seen::of(files, draw::TREND_CHARS), SystemTime::now());
        let drawn = terminal.draw(|frame| draw::draw(frame, &seen, now, has_colours));
        drawn.map_err(Error::Output)?;
        if event::poll(LOOK_EVERY).map_err(Error::Output)? && ends(&event::read().map_err(Error::Output)?) {
            break;
        }
    }
    Ok(())
}

/// Whether a key ends it. The terminal makes no signal of control and C.
fn ends(event: &Event) -> bool {
    let Event::Key(KeyEvent { code, modifiers, .. }) = event else { return false };
    let is_interrupt = *code == KeyCode::Char('c') && modifiers.contains(KeyModifiers::CONTROL);
    is_interrupt || matches!(code, KeyCode::Char('q') | KeyCode::Esc)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn q_escape_and_an_interrupt_end_it() {
        let key = |code, modifiers| ends(&Event::Key(KeyEvent::new(code, modifiers)));
        assert!(key(KeyCode::Char('q'), KeyModifiers::NONE) && key(KeyCode::Esc, KeyModifiers::NONE));
        assert!(key(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert!(!key(KeyCode::Char('c'), KeyModifiers::NONE) && !ends(&Event::Resize(40, 20)));
    }
}
