//! What the whole-product tests share: the command as a child process, ports, deadlines, a tiny model.
#![allow(dead_code, unreachable_pub, reason = "every test binary uses its own part of this")]

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Long enough for a loaded machine; only a hang reaches it.
pub const DEADLINE: Duration = Duration::from_secs(180);

/// A Qwen3 that is as small as its parts allow, with an untied head, grouped queries and two layers.
pub const TINY_CONFIG: &str = r#"{
  "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
  "vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu",
  "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "max_position_embeddings": 256,
  "tie_word_embeddings": false, "attention_bias": false, "eos_token_id": 2
}"#;

/// The same with sides that are whole blocks of fp8.
pub fn fp8_config() -> String {
    let config = TINY_CONFIG.replace("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4");
    config.replace("\"hidden_size\": 64", "\"hidden_size\": 128")
}

/// `driftless` as cargo built it for this test, or the one that `DRIFTLESS_TEST_COMMAND` names: without libtorch, it
/// starts in a hundredth of the time.
pub fn driftless() -> Command {
    let built = env!("CARGO_BIN_EXE_driftless");
    let mut command = Command::new(std::env::var_os("DRIFTLESS_TEST_COMMAND").unwrap_or(built.into()));
    // Threads of libtorch that spin for each other take minutes for a step where others want the processors.
    command.env("OMP_WAIT_POLICY", "passive");
    command
}

/// A checkpoint of the tiny model that our trainer saved after a few steps.
pub fn cold_start(dir: &Path, steps: u64, dtype: &str) -> PathBuf {
    cold_start_of(dir, TINY_CONFIG, steps, dtype)
}

/// The same of a model with this config.
pub fn cold_start_of(dir: &Path, model_config: &str, steps: u64, dtype: &str) -> PathBuf {
    let config = dir.join("config.json");
    std::fs::create_dir_all(dir).expect("a directory");
    std::fs::write(&config, model_config).expect("a config");
    let model = dir.join("model");
    run(driftless()
        .args(["train", "--loss-type", "sft_loss", "--task", "arithmetic", "--seed", "3", "--dtype", dtype])
        .args(["--num-rollout", &steps.to_string(), "--num-threads", "1"])
        .arg("--model-config")
        .arg(&config)
        .arg("--save")
        .arg(dir.join("sft"))
        .arg("--save-hf")
        .arg(&model));
    model
}

/// As [`driftless_testkit::ports::free`].
pub fn free_port() -> u16 {
    driftless_testkit::ports::free().expect("a free port on loopback")
}

/// A child process whose output goes to a file; killed when dropped.
pub struct Process {
    pub name: String,
    pub log: PathBuf,
    /// Where in the log its output begins: those of its name that came before have theirs there, too.
    begin: usize,
    deadline: Duration,
    child: Child,
}

impl Process {
    pub fn start(name: &str, dir: &Path, command: &mut Command) -> Process {
        std::fs::create_dir_all(dir).expect("a directory for the log");
        let log = dir.join(format!("{name}.log"));
        let out = File::options().create(true).append(true).open(&log).expect("a log");
        let begin = out.metadata().expect("a log").len() as usize;
        let err = out.try_clone().expect("a log");
        // A group of its own: SGLang's workers outlive a server that is merely killed.
        let child = command.process_group(0).stdin(Stdio::null()).stdout(out).stderr(err).spawn();
        let child = child.expect("the program starts");
        Process { name: name.to_owned(), log, begin, deadline: DEADLINE, child }
    }

    /// With another deadline than [`DEADLINE`], for what has much to do.
    pub fn within(mut self, deadline: Duration) -> Process {
        self.deadline = deadline;
        self
    }

    /// Its `number`-th result in JSON, from 0; if it ends before that, what it printed.
    pub fn says(&mut self, number: usize) -> Result<serde_json::Value, String> {
        self.until(&format!("its JSON {number}"), |process| {
            // Asked for before the look: the line may be the last thing that it does.
            let ended = process.ended();
            let bytes = std::fs::read(&process.log).expect("a log");
            let text = text(&bytes[process.begin..]);
            let whole = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
            let is_result = |line: &&str| line.starts_with('{') && !line.starts_with(r#"{"error""#);
            match (whole.lines().filter(is_result).nth(number), ended) {
                (Some(line), _) => Some(Ok(serde_json::from_str(line).expect("JSON"))),
                (None, Some(_)) => Some(Err(text)),
                (None, None) => None,
            }
        })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be waited for")
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        let name = self.name.clone();
        self.until(&format!("the end of {name}"), |process| process.ended())
    }

    /// Waits for its end, which has to be a success.
    pub fn succeed(mut self) {
        let status = self.wait();
        assert!(status.success(), "{} ended with {status}:\n{}", self.name, self.output());
    }

    /// Waits until it listens on `port`.
    pub fn listening(&mut self, port: u16) {
        self.until(&format!("port {port}"), |process| {
            let ended = process.ended();
            assert!(ended.is_none(), "{} ended with {ended:?}:\n{}", process.name, process.output());
            TcpStream::connect(("127.0.0.1", port)).ok()
        });
    }

    /// Polls `condition`; panics with the process's output when the deadline passes.
    pub fn until<T>(&mut self, what: &str, mut condition: impl FnMut(&mut Process) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(value) = condition(self) {
                return value;
            }
            assert!(start.elapsed() < self.deadline, "{what} did not come about:\n{}", self.output());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What it printed so far.
    pub fn output(&self) -> String {
        text(&std::fs::read(&self.log).unwrap_or_default())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        kill_group(self.child.id());
        let _ = self.child.wait();
    }
}

fn kill_group(leader: u32) {
    if let Some(group) = rustix::process::Pid::from_raw(leader as i32) {
        // Fails only when the whole group is gone.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
}

/// Runs to the end. What hangs is killed at the deadline; then this panics with everything it printed.
pub fn output(command: &mut Command) -> Output {
    let mut files = [(); 2].map(|()| tempfile::tempfile().expect("a file"));
    let [out, err] = files.each_ref().map(|file| file.try_clone().expect("a file"));
    let child = command.process_group(0).stdin(Stdio::null()).stdout(out).stderr(err).spawn();
    let mut child = child.expect("the program starts");
    let (ended, end) = channel::<()>();
    let leader = child.id();
    let watch = thread::spawn(move || {
        let hangs = end.recv_timeout(DEADLINE) == Err(RecvTimeoutError::Timeout);
        if hangs {
            kill_group(leader);
        }
        hangs
    });
    let status = child.wait().expect("a child can be waited for");
    drop(ended);
    let hung = watch.join().expect("it only waits");
    let [stdout, stderr] = files.each_mut().map(|file| {
        let mut bytes = Vec::new();
        file.rewind().and_then(|()| file.read_to_end(&mut bytes)).expect("its output");
        bytes
    });
    assert!(!hung, "{command:?} did not end:\n{}{}", text(&stdout), text(&stderr));
    Output { status, stdout, stderr }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs to the end, whichever that is; its exit code and what it said on standard error.
pub fn code(command: &mut Command) -> (Option<i32>, String) {
    let output = output(command);
    (output.status.code(), text(&output.stderr))
}

/// Runs to the end and returns its standard output; panics with everything it printed otherwise.
pub fn run(command: &mut Command) -> String {
    let output = output(command);
    assert!(
        output.status.success(),
        "{command:?} ended with {}:\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// The last line of a `--json` result.
pub fn json(command: &mut Command) -> serde_json::Value {
    let text = run(command.arg("--json"));
    serde_json::from_str(text.lines().last().unwrap_or_default()).expect("JSON")
}

/// Holds off the other tests of this binary that want the machine to themselves.
pub fn exclusive() -> std::sync::MutexGuard<'static, ()> {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    // A test that failed while holding it says so itself.
    ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
