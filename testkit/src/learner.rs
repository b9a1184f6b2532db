//! A learner as a process of its own, after `docs/wire/learner.md`: a model of eight biases, trained for
//! real, that errs on command.
//!
//! A test program is this process too: it has an ignored test that calls [`main`], and gives [`command`] to
//! the loop.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use driftless_buffer::{Position, Reader, Record};
use driftless_store::open;
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::publish::{Mode, PublisherOptions, Start, Step};
use driftless_transport::{Checkpoint, Dtype, Publisher, Snapshot as _, Tensors};
use serde_json::{Value, json};

/// What the process is told to do wrong: faults, separated by commas, each `call:number:fault` with the
/// call's number from 1 on. Each happens once in a state directory, but for `always_kill`. `kill`: it ends by
/// SIGKILL before the call; `killed_after`: after it, before the reply; `hang`, `endless` (a line without an
/// end), `nonsense`, `error`, `escapes` (a long error that a terminal would obey), `protocol`, `not_finite`: that, in
/// place of a reply; `told_wrong`: a version that is not in the store.
pub const FAULTS: &str = "FAKE_LEARNER_FAULTS";

/// Logits of the model.
const BIASES: usize = 8;

/// A line for the shell that runs the ignored test `name` of this test program, with these faults.
pub fn command(name: &str, faults: &str) -> String {
    let program = std::env::current_exe().unwrap();
    format!("{FAULTS}={faults} exec {} --ignored --exact {name}", program.display())
}

/// Serves the loop until it closes the connection.
pub fn main() {
    // Tests start it hundreds of times, and libtorch alone takes half a second of a processor.
    let loaded = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    assert!(
        !loaded.contains("libtorch"),
        "a program with the fake learner names `driftless`, which links libtorch"
    );
    let socket = std::env::var_os("DRIFTLESS_LEARNER_SOCKET").unwrap();
    let stream = UnixStream::connect(socket).unwrap();
    let mut reply = stream.try_clone().unwrap();
    let mut learner = None;
    let mut counts = std::collections::BTreeMap::<String, u64>::new();
    for line in BufReader::new(stream).lines() {
        // The loop may have been killed.
        let Ok(line) = line else { return };
        let call: Value = serde_json::from_str(&line).unwrap();
        let name = call["call"].as_str().unwrap();
        let count = counts.entry(name.to_owned()).or_default();
        *count += 1;
        let learner = learner.get_or_insert_with(|| Learner::load(&call));
        let fault = learner.fault(name, *count);
        let mut answer = match fault.as_deref() {
            Some("kill") => kill(),
            Some("hang") => loop {
                std::thread::sleep(Duration::from_secs(3600));
            },
            Some("endless") => {
                while reply.write_all(&[b' '; 1 << 16]).is_ok() {}
                return;
            }
            Some("nonsense") => Value::Null,
            Some("error") => json!({"error": "the fake learner errs on command"}),
            Some("escapes") => json!({"error": format!("\u{1b}[2J{}", "long ".repeat(1000))}),
            Some("protocol") => json!({"protocol": 1}),
            Some("not_finite") => json!({"not_finite": "gradient norm is NaN"}),
            Some("told_wrong") => json!({"version": 999}),
            _ => learner.answer(name, &call),
        };
        if fault.as_deref() == Some("killed_after") {
            kill();
        }
        if answer.is_object() {
            answer["id"] = call["id"].clone();
        }
        if writeln!(reply, "{answer}").is_err() {
            return;
        }
    }
}

fn kill() -> ! {
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    unreachable!("SIGKILL cannot be held off");
}

/// The model, what it has learned from, and where all of it lies.
struct Learner {
    biases: [f32; BIASES],
    /// Every sample that the biases have learned from, in order.
    consumed: Vec<u64>,
    progress: Value,
    hello: Value,
    log: Reader,
    publisher: Option<Publisher>,
}

impl Learner {
    fn load(hello: &Value) -> Self {
        assert_eq!((&hello["call"], &hello["protocol"]), (&json!("hello"), &json!(3)), "the first call");
        let save = path(&hello["save"]);
        let log = Reader::open(path(&hello["log"])).unwrap();
        let (biases, consumed, progress, hello) = ([0.0; BIASES], Vec::new(), Value::Null, hello.clone());
        let mut learner = Learner { biases, consumed, progress, hello, log, publisher: None };
        if let Some(state) = saved(&save) {
            learner.biases = serde_json::from_value(state["biases"].clone()).unwrap();
            learner.consumed = serde_json::from_value(state["consumed"].clone()).unwrap();
            learner.progress = state["progress"].clone();
        }
        learner
    }

    /// The fault that this call meets.
    fn fault(&self, name: &str, count: u64) -> Option<String> {
        let faults = std::env::var(FAULTS).unwrap_or_default();
        let begin = format!("{name}:{count}:");
        let fault = faults.split(',').find_map(|fault| fault.strip_prefix(&begin))?.to_owned();
        if fault == "always_kill" {
            return Some("kill".to_owned());
        }
        let mark = path(&self.hello["save"]).join(format!("fault-{name}-{count}-{fault}"));
        std::fs::File::create_new(mark).is_ok().then_some(fault)
    }

    fn answer(&mut self, name: &str, call: &Value) -> Value {
        match name {
            "hello" => json!({"protocol": 3, "name": "fake", "progress": self.progress}),
            "log_probs" => json!({"log_probs": self.log_probs(call)}),
            "step" => self.step(call),
            "publish" => json!({"version": self.publish(call["step"].as_u64().unwrap())}),
            "save" => {
                self.save(&call["progress"]);
                json!({})
            }
            "save_hf" => {
                write_checkpoint(path(&call["dir"]), &self.weights(), 1 << 30).unwrap();
                json!({})
            }
            _ => json!({"error": format!("there is no call {name}")}),
        }
    }

    fn records(&self, call: &Value) -> Vec<Record> {
        self.log.refresh().unwrap();
        let read = |sample: &Value| {
            let position = Position(sample["position"].as_u64().unwrap());
            self.log.get(position).unwrap().unwrap()
        };
        call["samples"].as_array().unwrap().iter().map(read).collect()
    }

    /// `log p` of each token.
    fn normalised(&self) -> [f32; BIASES] {
        let sum: f32 = self.biases.iter().map(|bias| bias.exp()).sum();
        self.biases.map(|bias| bias - sum.ln())
    }

    fn log_probs(&self, call: &Value) -> Vec<Vec<f32>> {
        let known = self.normalised();
        let of = |record: &Record| record.response().iter().map(|token| known[class(*token)]).collect();
        self.records(call).iter().map(of).collect()
    }

    /// The policy gradient of a mean over samples of means over trained tokens.
    fn step(&mut self, call: &Value) -> Value {
        let records = self.records(call);
        let (known, told) = (self.normalised(), self.told(call));
        let lr = self.hello["options"]["lr"].as_f64().unwrap() as f32;
        let mut gradient = [0.0_f32; BIASES];
        for (record, sample) in records.iter().zip(call["samples"].as_array().unwrap()) {
            let advantage = sample["advantage"].as_f64().unwrap() as f32;
            assert_eq!(sample["rollout_id"], record.scalars().sample_id);
            let trained = record.loss_mask().iter().filter(|kept| **kept != 0).count().max(1);
            let weight = advantage / (trained * records.len()) as f32;
            for (token, kept) in record.response().iter().zip(record.loss_mask()) {
                for (at, value) in gradient.iter_mut().enumerate().filter(|_| *kept != 0) {
                    *value += weight * (f32::from(u8::from(at == class(*token))) - known[at].exp());
                }
            }
            self.consumed.push(record.scalars().sample_id);
        }
        // A drift beside the gradient, so that equal rewards too make another version.
        for (at, (bias, gradient)) in self.biases.iter_mut().zip(gradient).enumerate() {
            *bias += lr * gradient + 0.001 * (at + 1) as f32;
        }
        let norm = gradient.iter().map(|value| value * value).sum::<f32>().sqrt();
        json!({"stats": {"loss": 0.5, "grad_norm": norm}, "trained_log_probs": told})
    }

    /// The log-probs of a step, if the loop has room for them.
    fn told(&self, call: &Value) -> Option<String> {
        let known = self.normalised();
        let samples = call["samples"].as_array().unwrap();
        let records = self.records(call);
        let of = |(record, sample): (&Record, &Value)| -> Vec<u8> {
            let stale = sample["stale"].as_u64().unwrap_or(0) as usize;
            let pairs = record.response().iter().zip(record.loss_mask()).enumerate();
            let value = |(at, (token, kept)): (usize, (&i32, &u8))| {
                if at >= stale && *kept != 0 { known[class(*token)] } else { f32::NAN }
            };
            pairs.flat_map(|pair| value(pair).to_le_bytes()).collect()
        };
        let bytes: Vec<u8> = records.iter().zip(samples).flat_map(of).collect();
        call["trained_log_probs"].as_bool()?.then(|| STANDARD.encode(bytes))
    }

    fn publish(&mut self, step: u64) -> u64 {
        let publisher = self.publisher.take();
        let mut publisher = publisher.unwrap_or_else(|| {
            let text = |name: &str| self.hello[name].as_str().unwrap().to_owned();
            let baseline = path(&self.hello["baseline_dir"]);
            let mut options = PublisherOptions::new(text("run"), Start::Resume, baseline);
            options.model = text("model");
            options.reference_dir = Some(path(&self.hello["hf_checkpoint"]));
            options.anchor_every = self.hello["anchor_every"].as_u64();
            options.anchor_share = self.hello["anchor_share"].as_f64();
            Publisher::open(open(&text("store")).unwrap(), options).unwrap()
        });
        let step = Step { trainer_step: step, checkpoint: None };
        let published = publisher.publish(&self.weights(), step, Mode::Delta).unwrap();
        self.publisher = Some(publisher);
        published.version.0
    }

    /// Replaces the state: all of it or nothing.
    fn save(&mut self, progress: &Value) {
        self.progress = progress.clone();
        let save = path(&self.hello["save"]);
        let state = json!({"biases": self.biases, "consumed": self.consumed, "progress": progress});
        let partial = save.join("state.partial");
        let mut file = std::fs::File::create(&partial).unwrap();
        file.write_all(state.to_string().as_bytes()).unwrap();
        file.sync_all().unwrap();
        std::fs::rename(&partial, save.join(STATE)).unwrap();
    }

    /// The checkpoint that the run starts from, with the biases as the first elements of its first tensor.
    fn weights(&self) -> Tensors<'static> {
        let start = Checkpoint::open(path(&self.hello["hf_checkpoint"])).unwrap();
        let bits = |bias: &f32| match start.tensors()[0].dtype {
            Dtype::Bf16 => bias.to_le_bytes()[2..].to_vec(),
            _ => bias.to_le_bytes().to_vec(),
        };
        let biases: Vec<u8> = self.biases.iter().flat_map(bits).collect();
        let mut tensors = Tensors::new();
        for (at, info) in start.tensors().iter().enumerate() {
            let mut bytes = start.bytes(at).unwrap().into_owned();
            if at == 0 {
                bytes[..biases.len()].copy_from_slice(&biases);
            }
            tensors = tensors.tensor(&info.name, info.dtype, info.shape.as_slice(), bytes).unwrap();
        }
        start.files().iter().fold(tensors, |tensors, file| tensors.file(file.name(), file.bytes()).unwrap())
    }
}

const STATE: &str = "state.json";

/// What the process has saved in its directory, if anything.
pub fn saved(save: &Path) -> Option<Value> {
    let bytes = std::fs::read(save.join(STATE)).ok()?;
    Some(serde_json::from_slice(&bytes).unwrap())
}

fn path(value: &Value) -> PathBuf {
    value.as_str().unwrap().into()
}

fn class(token: i32) -> usize {
    token.unsigned_abs() as usize % BIASES
}
