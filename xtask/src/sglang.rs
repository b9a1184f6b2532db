//! SGLang 0.5.23 from PyPI on a machine without a GPU: install it once per user, run it, check the bridge
//! against it.
//!
//! SGLang itself is untouched. `xtask/sglang`, first on `PYTHONPATH`, stands in for its GPU kernel package,
//! whose wheel does not import without a driver and of which nothing is called for a dense model on the CPU.

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::process::{self, Background};
use crate::{install, workspace};

const VERSION: &str = "0.5.23";

/// File whose presence says that the installation ran to its end.
const MARKER: &str = "installed";

/// The server compiles its bytecode on its first start; on two busy cores that takes minutes.
const READY: Duration = Duration::from_secs(420);

/// Installs SGLang into the cache, unless it is there, and returns the directory.
///
/// A virtual environment cannot be moved, so it is made in place; the marker at the end is what makes it
/// count. An interrupted installation is completed by the next one.
pub(crate) fn install(cache: &Path) -> Result<PathBuf> {
    let lock = cache.join(format!("sglang-{VERSION}.lock"));
    install::once(&lock, || present(cache), || make(cache))
}

fn make(cache: &Path) -> Result<PathBuf> {
    let home = home(cache);
    println!("sglang: 1/3 virtual environment in {}", home.display());
    process::run(Command::new("python3").args(["-m", "venv"]).arg(&home))?;
    println!("sglang: 2/3 uv");
    process::run(install::pip(python(cache)).arg("uv"))?;
    println!("sglang: 3/3 sglang {VERSION} and some 200 packages (10 GB)");
    let mut uv = Command::new(home.join("bin/uv"));
    uv.args(["pip", "install", "--quiet", "--python"]).arg(python(cache)).arg(format!("sglang=={VERSION}"));
    process::run(&mut uv)?;
    let marker = home.join(MARKER);
    fs::write(&marker, format!("sglang {VERSION}\n")).map_err(Error::io(&marker))?;
    Ok(home)
}

/// The directory of a complete installation.
pub(crate) fn present(cache: &Path) -> Option<PathBuf> {
    Some(home(cache)).filter(|home| home.join(MARKER).is_file())
}

/// What is missing and how to get it, or `None`.
pub(crate) fn missing(cache: &Path) -> Option<String> {
    present(cache).is_none().then(|| "SGLang 0.5.23, 10 GB (cargo xtask setup --sglang)".to_owned())
}

/// Its interpreter.
pub(crate) fn python(cache: &Path) -> PathBuf {
    home(cache).join("bin/python")
}

/// What goes first on `PYTHONPATH`.
pub(crate) fn python_path() -> PathBuf {
    workspace().join("xtask/sglang")
}

/// Its directory.
pub(crate) fn home(cache: &Path) -> PathBuf {
    cache.join(format!("sglang-{VERSION}"))
}

/// The command that serves the checkpoint directory `model` on a port of the loopback address.
fn serve_command(cache: &Path, model: &Path, port: u16) -> Command {
    let mut command = Command::new(python(cache));
    command.env("PYTHONPATH", python_path()).env("SGLANG_USE_CPU_ENGINE", "1").env("HF_HUB_OFFLINE", "1");
    command.envs([process::NO_SPINNING]);
    command.args(["-m", "sglang.launch_server", "--device", "cpu", "--skip-tokenizer-init"]);
    // Without --sleep-on-idle the scheduler spins on a core while it has nothing to do.
    command.args(["--disable-overlap-schedule", "--max-total-tokens", "65536", "--sleep-on-idle"]);
    command.arg("--model-path").arg(model).args(["--port", &port.to_string()]);
    // A group of its own, because its workers outlive a server that is merely terminated.
    command.process_group(0);
    command
}

/// A server with a small random model, and what the tests that run against it must know. Dropping it kills the server
/// and its workers.
pub(crate) struct Conformance {
    server: Background,
    port: u16,
    python: PathBuf,
    first: PathBuf,
    second: PathBuf,
}

impl Conformance {
    /// Starts the server, and waits until it answers. Its files and logs go under `work`.
    pub(crate) fn start(cache: &Path, work: &Path, port: u16) -> Result<Self> {
        let (first, second) = (checkpoint(cache, work, "0")?, checkpoint(cache, work, "1")?);
        let log = work.join("sglang.log");
        // An old log would only confuse; that it may be absent is fine.
        let _ = fs::remove_file(&log);
        let server = Background::start("the SGLang server", &mut serve_command(cache, &first, port), &log)?;
        let mut conformance = Self { server, port, python: python(cache), first, second };
        conformance.server.wait(|| answers(port), READY)?;
        Ok(conformance)
    }

    /// Tells the tests of `command` where the server, its interpreter and its checkpoints are.
    pub(crate) fn tell<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env("PYTHONPATH", python_path())
            .env("SGLANG_USE_CPU_ENGINE", "1")
            .envs([process::NO_SPINNING]);
        command.env("DRIFTLESS_SGLANG_PYTHON", &self.python);
        command.env("DRIFTLESS_SGLANG_PYTHONPATH", python_path());
        command.env("DRIFTLESS_SGLANG", format!("http://127.0.0.1:{}", self.port));
        command.env("DRIFTLESS_SGLANG_FIRST", &self.first).env("DRIFTLESS_SGLANG_SECOND", &self.second)
    }
}

impl Drop for Conformance {
    fn drop(&mut self) {
        // It fails only when the processes are gone, which is what is wanted.
        let group = format!("-{}", self.server.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
    }
}

/// A small random checkpoint under `work`.
pub(crate) fn checkpoint(cache: &Path, work: &Path, seed: &str) -> Result<PathBuf> {
    let directory = work.join(format!("checkpoint-{seed}"));
    fs::create_dir_all(&directory).map_err(Error::io(&directory))?;
    let mut make = Command::new(python(cache));
    process::run(make.arg(python_path().join("make_checkpoint.py")).arg(&directory).arg(seed))?;
    fs::canonicalize(&directory).map_err(Error::io(&directory))
}

/// Whether `/model_info` is answered with 200.
fn answers(port: u16) -> bool {
    let ask = || -> io::Result<bool> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"GET /model_info HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")?;
        let mut head = [0; 12];
        stream.read_exact(&mut head)?;
        Ok(head.ends_with(b" 200"))
    };
    ask().unwrap_or(false)
}
