//! Weights pushed into real SGLang on the CPU: our rendezvous, our calls and our order; the bytes go through
//! torch's gloo.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, TryRecvError, channel};

use driftless_bridge::engine::PauseMode;
use driftless_bridge::push::nccl::{Group, GroupOptions, Meeting, Root, UpdateMode};
use driftless_bridge::push::{Bucket, Member, Push as _, PushActivator, PushOptions};
use driftless_bridge::{Error, Result};
use std::time::Duration;

use driftless_transport::activate::{Activate, Limit, Target};
use driftless_transport::{Checkpoint, Snapshot};

use crate::{ENGINE, manifests, subject};

/// Rank 0 in a Python process with torch: the second peer of the engine's group.
struct TorchRoot {
    python: String,
    files: tempfile::TempDir,
    peer: Option<Peer>,
}

struct Peer {
    child: Child,
    commands: ChildStdin,
    answers: Receiver<String>,
    /// Answers still to come.
    owed: usize,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Peer {
    fn start(python: &str) -> std::io::Result<Self> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gloo_root.py");
        let mut command = Command::new(python);
        let mut child = command.arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (commands, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(std::io::Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child, commands, answers, owed: 0 })
    }
}

impl TorchRoot {
    fn tell(&mut self, command: &str) -> Result<()> {
        let fail = |what: &str| Error::Root { what: what.into(), source: "the Python peer is gone".into() };
        let peer = self.peer.as_mut().ok_or_else(|| fail(command))?;
        peer.owed += 1;
        writeln!(peer.commands, "{command}").map_err(|_| fail(command))
    }

    fn idle(&mut self) -> Result<bool> {
        let Some(peer) = &mut self.peer else { return Ok(true) };
        loop {
            match peer.answers.try_recv() {
                Ok(_) => peer.owed -= 1,
                Err(TryRecvError::Empty) => return Ok(peer.owed == 0),
                Err(TryRecvError::Disconnected) => {
                    return Err(Error::Root { what: "the peer".into(), source: "it has ended".into() });
                }
            }
        }
    }

    fn slot(&self, slot: usize) -> std::path::PathBuf {
        self.files.path().join(slot.to_string())
    }
}

impl Root for TorchRoot {
    fn backend(&self) -> &'static str {
        "gloo"
    }

    fn open(&mut self, meeting: &Meeting<'_>) -> Result<()> {
        let start = |error: std::io::Error| Error::Root { what: "Python".into(), source: error.into() };
        self.peer = Some(Peer::start(&self.python).map_err(start)?);
        let address = meeting.local();
        self.tell(&format!("join {} {} {} {}", address.ip(), address.port(), meeting.group, meeting.world))
    }

    fn joined(&mut self) -> Result<bool> {
        self.idle()
    }

    fn gather(&mut self, slot: usize, weights: &dyn Snapshot, bucket: &Bucket) -> Result<()> {
        let mut bytes = Vec::new();
        for &index in &bucket.tensors {
            bytes.extend_from_slice(&weights.bytes(index).unwrap());
        }
        std::fs::write(self.slot(slot), bytes)
            .map_err(|error| Error::Root { what: "a file".into(), source: error.into() })
    }

    fn broadcast(&mut self, slot: usize, lengths: &[u64]) -> Result<()> {
        let lengths = lengths.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
        self.tell(&format!("broadcast {} {lengths}", self.slot(slot).display()))
    }

    fn sent(&mut self, _slot: usize) -> Result<bool> {
        self.idle()
    }

    fn abort(&mut self) {
        self.peer = None;
    }
}

fn root() -> Option<TorchRoot> {
    let python = std::env::var("DRIFTLESS_SGLANG_PYTHON");
    let python = python.inspect_err(|_| println!("skipped: DRIFTLESS_SGLANG_PYTHON is not set")).ok()?;
    Some(TorchRoot { python, files: tempfile::tempdir().unwrap(), peer: None })
}

fn options(mode: UpdateMode, bucket_bytes: u64) -> GroupOptions {
    let mut options = GroupOptions::new("127.0.0.1");
    options.listen = ([127, 0, 0, 1], 0).into();
    (options.mode, options.bucket_bytes) = (mode, bucket_bytes);
    options
}

#[test]
fn pushes_are_bit_equal_and_the_group_is_formed_again() {
    let Some(subject) = subject() else { return };
    let _turn = ENGINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let checkpoints = [&subject.first, &subject.second].map(|path| Checkpoint::open(path).unwrap());
    let manifests = manifests(&checkpoints, directory.path());
    for (mode, bucket_bytes) in
        [(UpdateMode::Flattened, 1 << 30), (UpdateMode::Flattened, 8 << 10), (UpdateMode::PerTensor, 8 << 10)]
    {
        let Some(root) = root() else { return };
        let group = Group::new(root, options(mode, bucket_bytes)).unwrap();
        let options = PushOptions::default().with_pause(PauseMode::Retract);
        let address = [subject.client.url().to_owned()];
        let mut activator = PushActivator::new(&address, group, options).unwrap();
        for (manifest, checkpoint) in manifests.iter().zip(&checkpoints).rev() {
            let label = manifest.label();
            let limit = Limit::within(Duration::from_secs(600));
            let target = Target { checkpoint, weights: checkpoint, label: &label, manifest, limit: &limit };
            // It ends by comparing the engine's checksums with those of the checkpoint.
            let activated = activator.activate(&target).unwrap();
            println!("{mode:?}, {bucket_bytes} bytes a bucket: {label} paused {:?}", activated.pause);
            assert_eq!(activator.serving().unwrap().as_deref(), Some(label.as_str()));
        }
        // The group is left as a process that is killed leaves it: the next one has to form it anew, under
        // the same name.
    }
}

#[test]
fn what_the_engine_refuses_ends_and_leaves_it_alive() {
    let Some(subject) = subject() else { return };
    let _turn = ENGINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let Some(root) = root() else { return };
    let checkpoint = Checkpoint::open(&subject.second).unwrap();
    let mut group = Group::new(root, options(UpdateMode::Flattened, 1 << 30)).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    // No session where one is needed: the engine answers before it takes part in any broadcast.
    let member = Member { engine: subject.client.clone(), ranks: 1, sessions: false };
    group.set_members(vec![member.clone()], false);
    let refused = group.push(&checkpoint, None).unwrap_err();
    assert!(matches!(&refused, Error::Status { status: 400, .. }), "{refused}");
    runtime.block_on(subject.client.health()).unwrap();
    group.set_members(vec![Member { sessions: true, ..member }], true);
    let pushed = group.push(&checkpoint, Some("pushed")).unwrap();
    println!("{pushed:?}");
    let info = runtime.block_on(subject.client.model_info()).unwrap();
    assert_eq!(info.weight_version.as_deref(), Some("pushed"));
    group.dissolve().unwrap();
}
