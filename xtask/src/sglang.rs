//! SGLang 0.5.23 from PyPI on a machine without a GPU: install it once per user, run it, check the bridge
//! against it.
//!
//! SGLang itself is untouched. `xtask/sglang`, first on `PYTHONPATH`, stands in for its GPU kernel package,
//! whose wheel does not import without a driver and of which nothing is called for a dense model on the CPU.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const VERSION: &str = "0.5.23";

/// File whose presence says that the installation ran to its end.
const MARKER: &str = "installed";

/// The server compiles its bytecode on its first start; on two busy cores that takes minutes.
const READY: Duration = Duration::from_secs(420);

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot use {}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("cannot start {program}")]
    Start { program: String, source: io::Error },
    #[error("{step} failed: {status}")]
    Step { step: String, status: String },
    #[error("the SGLang server {what} within {after:?}; the end of {}:\n{tail}", log.display())]
    NotReady { what: String, after: Duration, log: PathBuf, tail: String },
}

type Result<T> = std::result::Result<T, Error>;

/// Installs SGLang into the cache, unless it is there, and returns the directory. Clones that install at the
/// same time wait for each other.
///
/// A virtual environment cannot be moved, so it is made in place; the marker at the end is what makes it
/// count. An interrupted installation is completed by the next one.
pub(crate) fn install(cache: &Path) -> Result<PathBuf> {
    if let Some(home) = present(cache) {
        return Ok(home);
    }
    fs::create_dir_all(cache).map_err(|source| io_error(cache, source))?;
    let path = cache.join(format!("sglang-{VERSION}.lock"));
    let lock = File::create(&path).map_err(|source| io_error(&path, source))?;
    if lock.try_lock().is_err() {
        println!("sglang: waiting for another installation ({})", path.display());
        lock.lock().map_err(|source| io_error(&path, source))?;
    }
    match present(cache) {
        Some(home) => Ok(home),
        None => install_locked(cache),
    }
}

fn install_locked(cache: &Path) -> Result<PathBuf> {
    let home = home(cache);
    println!("sglang: 1/3 virtual environment in {}", home.display());
    step("python3 -m venv", Command::new("python3").args(["-m", "venv"]).arg(&home))?;
    println!("sglang: 2/3 uv");
    step(
        "pip install uv",
        Command::new(python(cache)).args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "uv",
        ]),
    )?;
    println!("sglang: 3/3 sglang {VERSION} and some 200 packages (10 GB)");
    let mut uv = Command::new(home.join("bin/uv"));
    uv.args(["pip", "install", "--quiet", "--python"]).arg(python(cache)).arg(format!("sglang=={VERSION}"));
    step("uv pip install sglang", &mut uv)?;
    let marker = home.join(MARKER);
    fs::write(&marker, format!("sglang {VERSION}\n")).map_err(|source| io_error(&marker, source))?;
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
    crate::workspace().join("xtask/sglang")
}

/// Its directory.
pub(crate) fn home(cache: &Path) -> PathBuf {
    cache.join(format!("sglang-{VERSION}"))
}

/// The command that serves the checkpoint directory `model` on a port of the loopback address, with further
/// options.
pub(crate) fn serve_command(cache: &Path, model: &Path, port: u16, extra: &[&str]) -> Command {
    let mut command = Command::new(python(cache));
    command.env("PYTHONPATH", python_path()).env("SGLANG_USE_CPU_ENGINE", "1").env("HF_HUB_OFFLINE", "1");
    command.args([
        "-m",
        "sglang.launch_server",
        "--device",
        "cpu",
        "--skip-tokenizer-init",
        "--disable-overlap-schedule",
    ]);
    // Without --sleep-on-idle the scheduler spins on a core while it has nothing to do.
    command.args(["--max-total-tokens", "65536", "--sleep-on-idle", "--model-path"]).arg(model);
    command.args(["--port", &port.to_string()]).args(extra);
    command
}

/// A running server; dropping it kills the server and its workers.
pub(crate) struct Server {
    child: Child,
    port: u16,
    log: PathBuf,
}

impl Server {
    /// Starts a server whose output goes to `log`.
    pub(crate) fn start(cache: &Path, model: &Path, port: u16, log: &Path) -> Result<Self> {
        let open = || File::create(log).and_then(|out| Ok((out.try_clone()?, out)));
        let (out, err) = open().map_err(|source| io_error(log, source))?;
        let mut command = serve_command(cache, model, port, &[]);
        // A group of its own, because its workers outlive a server that is merely terminated.
        command.process_group(0).stdin(Stdio::null()).stdout(out).stderr(err);
        let child = command.spawn().map_err(|source| start_error(&command, source))?;
        Ok(Self { child, port, log: log.to_owned() })
    }

    /// Waits until the server answers.
    pub(crate) fn wait_ready(&mut self) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < READY {
            if answers(self.port) {
                return Ok(());
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(self.not_ready(format!("ended ({status})"), begin.elapsed()));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Err(self.not_ready("did not answer".into(), READY))
    }

    fn not_ready(&self, what: String, after: Duration) -> Error {
        Error::NotReady { what, after, log: self.log.clone(), tail: crate::process::tail(&self.log, 20) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only when the processes are gone, which is what is wanted.
        let _ = Command::new("kill")
            .args(["-KILL", "--", &format!("-{}", self.child.id())])
            .stderr(Stdio::null())
            .status();
        let _ = self.child.wait();
    }
}

/// A server with a small random model, and what the tests that run against it must know.
pub(crate) struct Conformance {
    server: Server,
    python: PathBuf,
    first: PathBuf,
    second: PathBuf,
}

impl Conformance {
    /// Starts the server. Its files and logs go under `work`.
    pub(crate) fn start(cache: &Path, work: &Path, port: u16) -> Result<Self> {
        let (first, second) = (checkpoint(cache, work, "0")?, checkpoint(cache, work, "1")?);
        let mut server = Server::start(cache, &first, port, &work.join("sglang.log"))?;
        server.wait_ready()?;
        Ok(Self { server, python: python(cache), first, second })
    }

    /// Tells the tests of `command` where the server, its interpreter and its checkpoints are.
    pub(crate) fn tell<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("PYTHONPATH", python_path()).env("SGLANG_USE_CPU_ENGINE", "1");
        command.env("DRIFTLESS_SGLANG_PYTHON", &self.python);
        command.env("DRIFTLESS_SGLANG_PYTHONPATH", python_path());
        command.env("DRIFTLESS_SGLANG", format!("http://127.0.0.1:{}", self.server.port));
        command.env("DRIFTLESS_SGLANG_FIRST", &self.first).env("DRIFTLESS_SGLANG_SECOND", &self.second)
    }
}

/// A small random checkpoint under `work`.
pub(crate) fn checkpoint(cache: &Path, work: &Path, seed: &str) -> Result<PathBuf> {
    let directory = work.join(format!("checkpoint-{seed}"));
    fs::create_dir_all(&directory).map_err(|source| io_error(&directory, source))?;
    let mut make = Command::new(python(cache));
    step("make_checkpoint.py", make.arg(python_path().join("make_checkpoint.py")).arg(&directory).arg(seed))?;
    fs::canonicalize(&directory).map_err(|source| io_error(&directory, source))
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

fn step(name: &str, command: &mut Command) -> Result<()> {
    let status = command.status().map_err(|source| start_error(command, source))?;
    if status.success() { Ok(()) } else { Err(Error::Step { step: name.into(), status: status.to_string() }) }
}

fn start_error(command: &Command, source: io::Error) -> Error {
    Error::Start { program: command.get_program().to_string_lossy().into_owned(), source }
}

fn io_error(path: &Path, source: io::Error) -> Error {
    Error::Io { path: path.to_owned(), source }
}
