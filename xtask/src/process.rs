//! Child processes: run one to its end, keep several in the background, never leave one behind.

use crate::error::{Error, Result};
use std::fs::File;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// For OpenMP's threads, which otherwise spin on cores while they wait. Beside two busy processes six families of models in
/// SGLang take 76 s with it, and 109 s without.
pub(crate) const NO_SPINNING: (&str, &str) = ("OMP_WAIT_POLICY", "passive");

/// Runs `command` with this terminal and waits for it.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(start(command))?;
    succeeded(command, status, None)
}

fn succeeded(command: &Command, status: ExitStatus, log: Option<&Path>) -> Result<()> {
    if status.success() { Ok(()) } else { Err(failed(command, status.to_string(), log)) }
}

fn failed(command: &Command, status: String, log: Option<&Path>) -> Error {
    Error::Failed { command: shown(command), status, log: log.map(Path::to_path_buf) }
}

/// How long a command with a log may take: more than any does on two cores that others use, too, and so little
/// that one which hangs leaves a CI run of 90 minutes the time to end and to say so.
const DEADLINE: Duration = Duration::from_secs(25 * 60);
/// Time between two looks at whether it has ended.
const LOOK: Duration = Duration::from_millis(100);

/// Runs `command` with its output appended to `log`. One that hangs is killed with the processes that it has
/// started.
pub(crate) fn run_logged(command: &mut Command, log: &Path) -> Result<()> {
    let mut child = to_log(command, log)?.spawn().map_err(start(command))?;
    let begin = Instant::now();
    while begin.elapsed() < DEADLINE {
        if let Some(status) = child.try_wait().map_err(start(command))? {
            return succeeded(command, status, Some(log));
        }
        std::thread::sleep(LOOK);
    }
    // What it waits for first, which is what hangs. It stays in this process group, so that an interrupt
    // reaches it.
    let _ = Command::new("pkill").args(["-KILL", "-P", &child.id().to_string()]).status();
    let _ = child.kill();
    let _ = child.wait();
    Err(failed(command, format!("killed after {} minutes", DEADLINE.as_secs() / 60), Some(log)))
}

/// The standard output of `command`, as [`run_logged`] runs it; only what it says beside that goes to `log`.
pub(crate) fn output_logged(command: &mut Command, log: &Path) -> Result<String> {
    captured(to_log(command, log)?.stdout(Stdio::piped()), Some(log))
}

/// The standard output of `command`.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    captured(command.stderr(Stdio::inherit()), None)
}

/// The standard output of `command`, as JSON.
pub(crate) fn json(command: &mut Command) -> Result<serde_json::Value> {
    let output = output(command)?;
    serde_json::from_str(&output).map_err(|error| Error::check(&shown(command), "JSON", error.to_string()))
}

fn captured(command: &mut Command, log: Option<&Path>) -> Result<String> {
    let output = command.output().map_err(start(command))?;
    succeeded(command, output.status, log)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
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
        let expected =
            format!("root on a Debian system, or these packages installed: {}", packages.join(" "));
        return Err(Error::check(&format!("lane {lane}"), expected, format!("user {}", id.trim())));
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
    pub(crate) log: PathBuf,
    child: Child,
}

impl Background {
    pub(crate) fn start(name: &str, command: &mut Command, log: &Path) -> Result<Self> {
        let child = to_log(command, log)?.stdin(Stdio::null()).spawn().map_err(start(command))?;
        Ok(Background { name: name.to_owned(), log: log.to_path_buf(), child })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// How the process ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<String> {
        match self.child.try_wait() {
            Ok(status) => status.map(|status| status.to_string()),
            Err(error) => Some(error.to_string()),
        }
    }

    /// Waits until it is `ready`, or ends, or `deadline` passes.
    pub(crate) fn wait(&mut self, ready: impl Fn() -> bool, deadline: Duration) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < deadline {
            if ready() {
                return Ok(());
            }
            if let Some(status) = self.ended() {
                return Err(not_ready(&self.name, format!("ended ({status})"), begin.elapsed(), &self.log));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Err(not_ready(&self.name, "did not answer".to_owned(), deadline, &self.log))
    }

    /// Kills it, as a machine that fails does.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.child.kill().map_err(Error::io(&self.name))
    }

    /// Waits for its end, which has to be a success.
    pub(crate) fn wait_success(&mut self, deadline: Duration) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < deadline {
            match self.child.try_wait().map_err(Error::io(&self.name))? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => {
                    return Err(not_ready(
                        &self.name,
                        format!("ended ({status})"),
                        begin.elapsed(),
                        &self.log,
                    ));
                }
                None => std::thread::sleep(LOOK),
            }
        }
        Err(not_ready(&self.name, "did not end".to_owned(), deadline, &self.log))
    }

    /// As [`Background::wait`], until something listens on `port`.
    pub(crate) fn wait_listening(&mut self, port: u16, deadline: Duration) -> Result<()> {
        self.wait(|| TcpStream::connect(("127.0.0.1", port)).is_ok(), deadline)
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
    driftless_testkit::ports::free().map_err(Error::io("127.0.0.1"))
}

/// What does not answer, with the end of its log.
pub(crate) fn not_ready(what: &str, how: String, after: Duration, log: &Path) -> Error {
    Error::NotReady { what: what.to_owned(), how, after, log: log.to_path_buf(), tail: tail(log, 20) }
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

/// How many tests passed, as the libtest programs and the pytest that wrote this log say.
pub(crate) fn tests_passed(log: &Path) -> u64 {
    let text = std::fs::read(log).unwrap_or_default();
    String::from_utf8_lossy(&text).lines().filter_map(passed).sum()
}

/// The lines of a log that say which tests failed and why, as libtest and pytest write them; the last `most`.
pub(crate) fn failures(log: &Path, most: usize) -> Vec<String> {
    let text = std::fs::read(log).unwrap_or_default();
    let found = failing(&String::from_utf8_lossy(&text));
    found[found.len().saturating_sub(most)..].to_vec()
}

fn failing(text: &str) -> Vec<String> {
    let mut lines = text.lines();
    let mut found = Vec::new();
    while let Some(line) = lines.next() {
        // One that hangs says nothing else.
        if let Some(slow) = line.strip_suffix(" has been running for over 60 seconds")
            && !text.contains(&format!("{slow} ... "))
        {
            found.push(format!("{slow} did not end"));
        }
        let is_panic = line.contains("' panicked at ") || line.contains(") panicked at ");
        let says =
            line.ends_with("... FAILED") || ["FAILED ", "E   ", "error"].iter().any(|s| line.starts_with(s));
        if is_panic || says {
            found.push(line.to_owned());
        }
        // Its message stands below it.
        if is_panic {
            found.extend(lines.next().map(str::to_owned));
        }
    }
    found
}

/// `test result: ok. 12 passed; …`, `12 passed, 1 skipped in 3.45s`, or the latter between signs of equality.
fn passed(line: &str) -> Option<u64> {
    let (before, _) = line.split_once(" passed")?;
    before.rsplit(' ').next()?.parse().ok()
}

fn to_log<'c>(command: &'c mut Command, log: &Path) -> Result<&'c mut Command> {
    let open = || -> std::io::Result<(File, File)> {
        if let Some(dir) = log.parent() {
            std::fs::create_dir_all(dir)?;
        }
        let file = File::options().create(true).append(true).open(log)?;
        Ok((file.try_clone()?, file))
    };
    let (out, err) = open().map_err(Error::io(log))?;
    Ok(command.stdout(out).stderr(err))
}

pub(crate) fn start(command: &Command) -> impl FnOnce(std::io::Error) -> Error + use<> {
    let program = command.get_program().to_string_lossy().into_owned();
    move |source| Error::Start { program, source }
}

#[cfg(test)]
mod tests {
    use super::{failing, passed};

    #[test]
    fn passed_tests_are_counted_as_libtest_and_pytest_say_them() {
        assert_eq!(passed("test result: ok. 12 passed; 0 failed; 1 ignored"), Some(12));
        assert_eq!(passed("==== 3 failed, 409 passed, 2 skipped in 350.12s ===="), Some(409));
        assert_eq!(passed("7 skipped in 0.10s"), None);
    }

    #[test]
    fn failures_are_named_with_their_reasons() {
        let text = "test a ... ok\ntest d has been running for over 60 seconds\n\
            test e has been running for over 60 seconds\ntest d ... ok\ntest b::c ... FAILED\n\n---- b::c stdout ----\n\n\
            thread 'b::c' (71) panicked at src/b.rs:3:5:\nassertion failed: x\nnote: run with\n\
            E       AssertionError: no server within 120 s\nFAILED tests/test_a.py::test_b - AssertionError\n";
        let found = [
            "test e did not end",
            "test b::c ... FAILED",
            "thread 'b::c' (71) panicked at src/b.rs:3:5:",
            "assertion failed: x",
            "E       AssertionError: no server within 120 s",
            "FAILED tests/test_a.py::test_b - AssertionError",
        ];
        assert_eq!(failing(text), found);
    }
}
