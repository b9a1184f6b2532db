//! `driftless top`: a run on the terminal, from the files of its directory alone.

mod draw;
mod seen;

use crate::cli::dashboard::read::Files;
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::{Output, has_colours};
use crate::cli::shared::paths;
use crate::cli::shared::signals::{PATIENCE, stop_on_signals};
use driftless::store::wait::Stop;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use seen::Seen;
use std::fs::File;
use std::io::IsTerminal as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::time::SystemTime;

const HELP: &str = "\
Shows how far a run is, its alerts, its figures over the last steps, where its engines' time went, and its engines.
It reads the files of `train --save` twice a second and writes nothing. `q` ends it. NO_COLOR has it draw without colours.
Off a terminal, and with --once, it prints what it sees once.

Examples:
  driftless top runs/first
  ssh trainer driftless top runs/first --once
  driftless top runs/first --json | jq .figures.reward";

/// Time between two looks at the files, in which keys are waited for.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
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
    let keys = keys().map_err(Error::Output)?;
    let mut terminal = ratatui::try_init().map_err(Error::Output)?;
    let ended = watch(&mut terminal, &keys, &mut files, &stop);
    if let Ok(End::Gone) = ended {
        // What drops it would print that the terminal is gone, on the terminal, and panic.
        std::mem::forget(terminal);
        return Ok(());
    }
    let restored = ratatui::try_restore().map_err(Error::Output);
    ended.and(restored)
}

/// How it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// By a key or a signal.
    Asked,
    /// With its terminal.
    Gone,
}

/// Where keys come from: that is what `try_init` asks for single keys.
fn keys() -> std::io::Result<OwnedFd> {
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        stdin.as_fd().try_clone_to_owned()
    } else {
        File::open("/dev/tty").map(OwnedFd::from)
    }
}

/// Draws until a key, a signal or the end of the terminal ends it.
fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    keys: &OwnedFd,
    files: &mut Files,
    stop: &Stop,
) -> Result<End> {
    let has_colours = has_colours();
    while !stop.is_stopped() {
        files.look()?;
        let (seen, now) = (Seen::of(files, draw::TREND_CHARS), SystemTime::now());
        let drawn = terminal.draw(|frame| draw::draw(frame, &seen, now, has_colours));
        let end = end(keys).map_err(|errno| Error::Output(errno.into()))?;
        // On a terminal that is gone nothing can be drawn.
        if end != Some(End::Gone) {
            drawn.map_err(Error::Output)?;
        }
        if let Some(end) = end {
            return Ok(end);
        }
    }
    Ok(End::Asked)
}

/// Waits for keys or the next look, and tells whether they end it. The reader of `crossterm` is not used, because it
/// asks a terminal that is gone for keys, and never returns.
fn end(keys: &OwnedFd) -> rustix::io::Result<Option<End>> {
    let mut ready = [PollFd::new(keys, PollFlags::IN)];
    match poll(&mut ready, Some(&LOOK_EVERY)) {
        Ok(0) => return Ok(None),
        Ok(_) => {}
        // A signal, such as that of another size.
        Err(Errno::INTR) => return Ok(None),
        Err(errno) => return Err(errno),
    }
    let mut read = [0; 64];
    match rustix::io::read(keys, &mut read) {
        Ok(0) | Err(Errno::IO) => Ok(Some(End::Gone)),
        Ok(count) => Ok(asked(&read[..count]).then_some(End::Asked)),
        Err(Errno::INTR | Errno::AGAIN) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Whether these keys end it: `q`, escape, or control and C, of which the terminal makes no signal now. What follows an
/// escape makes it another key.
fn asked(keys: &[u8]) -> bool {
    const ESCAPE: u8 = 0x1b;
    const INTERRUPT: u8 = 0x03;
    match keys {
        [ESCAPE, more @ ..] => more.is_empty(),
        keys => keys.iter().any(|key| [b'q', INTERRUPT].contains(key)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn q_escape_and_an_interrupt_end_it() {
        assert!([&b"q"[..], b"\x1b", b"\x03", b"jq"].iter().all(|keys| asked(keys)));
        assert!(![&b"c"[..], b"\x1b[A", b"\x1b[24q", b"Q"].iter().any(|keys| asked(keys)));
    }
}
