//! A Python process that is told what to do on its standard input, one answer a line.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

pub(crate) struct Python {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Python {
    /// Runs a script that lies beside this file.
    pub(crate) fn start(python: &str, script: &str, args: &[&str]) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/nccl").join(script);
        // A binary that was carried to another machine has its scripts beside it.
        let beside = std::env::current_exe().unwrap().with_file_name(script.file_name().unwrap());
        let script = if beside.exists() { beside } else { script };
        let mut command = Command::new(python);
        command.arg(script).args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (commands, answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, commands, answers }
    }

    pub(crate) fn tell(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
    }

    pub(crate) fn answer(&mut self) -> String {
        let mut line = String::new();
        assert!(self.answers.read_line(&mut line).unwrap() > 0, "the Python process has ended");
        line.trim().to_owned()
    }

    pub(crate) fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer()
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The NCCL that this Python's torch uses, and its version.
pub(crate) fn nccl(python: &str) -> (PathBuf, [u32; 3]) {
    let code = "import nvidia.nccl, torch; print(list(nvidia.nccl.__path__)[0], *torch.cuda.nccl.version())";
    let output = Command::new(python).args(["-c", code]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let words: Vec<_> = text.split_whitespace().collect();
    let [path, major, minor, patch] = words[..] else { panic!("no NCCL beside {python}'s torch: {text}") };
    let version = [major, minor, patch].map(|part| part.parse().unwrap());
    (Path::new(path).join("lib/libnccl.so.2"), version)
}
