//! Child processes: run one to its end, keep several in the background, never leave one behind.

use crate::error::{Error, Result};
use std::fs::File;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Runs `command` with this terminal and waits for it.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(|source| start(command, source))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::Failed { command: shown(command), status: status.to_string(), log: None })
}

/// How long a command with a log may take: more than any does on two cores that others use, too, and so little
/// that one which hangs leaves a CI run of 90 minutes the time to end and to say so.
const DEADLINE: Duration = Duration::from_secs(40 * 60);
/// Time between two looks at whether it has ended.
const LOOK: Duration = Duration::from_millis(100);

/// Runs `command` with its output appended to `log`. One that hangs is killed with the processes that it has
/// started.
pub(crate) fn run_logged(command: &mut Command, log: &Path) -> Result<()> {
    let failed = |command: &Command, status: String| Error::Failed {
        command: shown(command),
        status,
        log: Some(log.to_path_buf()),
    };
    let mut child = to_log(command, log)?.spawn().map_err(|source| start(command, source))?;
    let begin = Instant::now();
    while begin.elapsed() < DEADLINE {
        match child.try_wait().map_err(|source| start(command, source))? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(failed(command, status.to_string())),
            None => std::thread::sleep(LOOK),
        }
    }
    // What it waits for first, which is what hangs. It stays in this process group, so that an interrupt
    // reaches it.
    let _ = Command::new("pkill").args(["-KILL", "-P", &child.id().to_string()]).status();
    let _ = child.kill();
    let _ = child.wait();
    Err(failed(command, format!("killed after {} minutes", DEADLINE.as_secs() / 60)))
}

/// The standard output of `command`, as [`run_logged`] runs it; only what it says beside that goes to `log`.
pub(crate) fn output_logged(command: &mut Command, log: &Path) -> Result<String> {
    to_log(command, log)?.stdout(Stdio::piped());
    let output = command.output().map_err(|source| start(command, source))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let log = Some(log.to_path_buf());
    Err(Error::Failed { command: shown(command), status: output.status.to_string(), log })
}

/// The standard output of `command`.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.stderr(Stdio::inherit()).output().map_err(|source| start(command, source))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(Error::Failed { command: shown(command), status: output.status.to_string(), log: None })
}

/// Whether there is a program of this name.
pub(crate) fn found(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

/// Installs Debian packages that `lane` needs.
pub(crate) fn apt(lane: &str, packages: &[&str]) -> Result<()> {
    let id = output(Command::new("id").arg("-u"))?;
    if id.trim() != "0" || !found("apt-get") {
        return Err(Error::Check {
            what: format!("lane {lane}"),
            expected: format!("root on a Debian system, or these packages installed: {}", packages.join(" ")),
            found: format!("user {}", id.trim()),
        });
    }
    println!("{lane}: {}", packages.join(" "));
    run(Command::new("apt-get").args(["update", "-qq"]))?;
    let mut install = Command::new("apt-get");
    install.args(["install", "-qq", "-y", "--no-install-recommends"]).args(packages);
    run(install.env("DEBIAN_FRONTEND", "noninteractive").stdout(Stdio::null()))
}

/// A background process that is killed when this is dropped.
pub(crate) struct Background {
    pub(crate) name: String,
    child: Child,
}

impl Background {
    pub(crate) fn start(name: &str, command: &mut Command, log: &Path) -> Result<Self> {
        let child =
            to_log(command, log)?.stdin(Stdio::null()).spawn().map_err(|source| start(command, source))?;
        Ok(Background { name: name.to_owned(), child })
    }

    /// How the process ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<String> {
        match self.child.try_wait() {
            Ok(None) => None,
            Ok(Some(status)) => Some(status.to_string()),
            Err(error) => Some(error.to_string()),
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // Both fail only when the process is gone, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// As [`driftless_testkit::ports::free`].
pub(crate) fn free_port() -> Result<u16> {
    driftless_testkit::ports::free().map_err(|source| Error::io("127.0.0.1", source))
}

/// Waits until something listens on `port`, or `background` ends, or `deadline` passes.
pub(crate) fn wait_listening(
    background: &mut Background,
    port: u16,
    deadline: Duration,
    log: &Path,
) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < deadline {
        if TcpStream::connect(("127.0.0.1", port)).is_ok() {
            return Ok(());
        }
        if let Some(status) = background.ended() {
            return Err(Error::Failed {
                command: background.name.clone(),
                status,
                log: Some(log.to_path_buf()),
            });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Err(Error::NotReady {
        what: background.name.clone(),
        seconds: deadline.as_secs(),
        log: log.to_path_buf(),
    })
}

/// A command line as one would type it.
pub(crate) fn shown(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|a| a.to_string_lossy().into_owned()));
    words.join(" ")
}

/// The last `lines` lines of a log.
pub(crate) fn tail(log: &Path, lines: usize) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

fn to_log<'c>(command: &'c mut Command, log: &Path) -> Result<&'c mut Command> {
    let open = || -> std::io::Result<(File, File)> {
        if let Some(dir) = log.parent() {
            std::fs::create_dir_all(dir)?;
        }
        let file = File::options().create(true).append(true).open(log)?;
        Ok((file.try_clone()?, file))
    };
    let (out, err) = open().map_err(|source| Error::io(log, source))?;
    Ok(command.stdout(out).stderr(err))
}

fn start(command: &Command, source: std::io::Error) -> Error {
    Error::Start { program: PathBuf::from(command.get_program()).display().to_string(), source }
}
