//! `driftless doctor`: what would keep a run from working here, or make it slow.
//!
//! | File | Is |
//! |---|---|
//! | `findings` | what was found and what to do, and how it is shown |
//! | `libraries`, `machine` | the build and what it opens at run time; the host |
//! | `place` | a directory's file system and room; checkpoint directories |
//! | `store`, `engines`, `python` | what others say, each within a deadline |
//!
//! Each file but the first asks first, and then judges what it was told: that part is a function over facts.

mod engines;
mod findings;
mod libraries;
mod machine;
mod place;
mod python;
mod store;

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::keys::CallArgs;
use crate::cli::shared::output::Output;
use crate::cli::shared::transport::with_ucx_settings;
use findings::Report;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

const HELP: &str = "\
Each line is ok, a note (a run works, but something is slow or cannot be used) or a problem, and says what to do. The
exit code is 1 if there is a problem.

A store is written to: a small object under probes/ is made and removed, twice. Engines are asked who they are, as by
`driftless follow --dry-run`; nothing changes there. Nothing else is written.

Examples:
  driftless doctor
  driftless doctor --store s3://weights/team
  driftless doctor --engine http://127.0.0.1:30000 --checkpoint-dir /dev/shm/policy --python /opt/venv/bin/python
  driftless doctor --json | jq '.findings[] | select(.state != \"ok\")'";

/// Look for what would keep a run from working here, or make it slow, and say what to do.
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Store to try: file:///dir, a path, s3://bucket/prefix, gs://…, az://….
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Engine to ask, as `driftless follow` takes it: host:port, http://host:port or vllm+http://host:port; may be given
    /// several times.
    #[arg(long, value_name = "URL")]
    engine: Vec<String>,
    /// Directory where plugins and followers of one user meet [default: DRIFTLESS_PLUGIN_DIR, or
    /// /dev/shm/driftless-<user id>].
    #[arg(long, value_name = "DIR")]
    plugin_dir: Option<PathBuf>,
    /// Directory that a follower shall keep, or keeps. Its config.json says what engines have to run; without one,
    /// each engine's own model does, where it can be read here.
    #[arg(long, value_name = "DIR")]
    checkpoint_dir: Option<PathBuf>,
    /// Interpreter of an engine's environment, to be asked which packages it has.
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    #[command(flatten)]
    call: CallArgs,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    with_ucx_settings()?;
    let store = args.store.as_deref().map(crate::cli::shared::store::open).transpose()?;
    let engines = engines::Asked::new(&args)?;

    let (mut findings, nccl) = match &args.python {
        None => (Vec::new(), None),
        Some(python) => python::look(python),
    };
    let mut all = libraries::look(nccl);
    all.append(&mut machine::look());
    all.extend(args.checkpoint_dir.iter().flat_map(|dir| place::look_at_checkpoint(dir)));
    all.extend(store.into_iter().flat_map(store::look));
    all.append(&mut engines.look());
    all.append(&mut findings);

    let report = Report::new(all);
    output.print(&report, Report::text)?;
    match report.problems {
        0 => Ok(()),
        problems => Err(Error::Unfit { problems }),
    }
}

/// What `ask` finds within `deadline`. A thread that hangs in a library or a file system is left behind, and ends with
/// the process.
fn within<T: Send + 'static>(deadline: Duration, ask: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (tell, told) = mpsc::sync_channel(1);
    // Nobody may listen any more.
    std::thread::spawn(move || _ = tell.send(ask()));
    told.recv_timeout(deadline).ok()
}

/// What is said of a peer where `within` has found nothing.
fn no_answer(deadline: Duration, peer: &str) -> String {
    format!("{peer}: no answer within {} s", deadline.as_secs())
}
