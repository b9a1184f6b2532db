//! kill -9 of a run over a user's prompts at random moments: of the loop, and beside it of its learner, of
//! its reward, or of its engine. The same command is started again until the run ends. It has then taken
//! each prompt once in each epoch, learned from each sample once, and rewarded it as the reward says.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{BufRead as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use driftless_buffer::{Kind, Position, PromptState, Reader, Record, check};
use driftless_store::open;
use driftless_testkit::learner;
use driftless_testkit::random::Random;
use driftless_testkit::sglang::Fake;
use driftless_trainer::ledger;
use driftless_trainer::tasks::tiny;
use driftless_transport::Run;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};
use serde_json::{Value, json};

use super::common::{Process, driftless};
use super::model::contents;
use super::times;

/// Rows of the user's file.
const PROMPTS: u64 = 20;
const EPOCHS: u64 = 6;
/// Does not divide an epoch: rollouts have prompts of two.
const GROUPS: u64 = 3;
const SAMPLES: u64 = 2;
const STEPS: u64 = PROMPTS * EPOCHS / GROUPS;
/// Of the loop, in one run.
const KILLS: u64 = 30;
/// The ignored tests that are other processes, by which they are found.
const LEARNER: &str = "prompts::process_of_the_learner";
const REWARD: &str = "prompts::process_of_the_reward";

/// What runs differ in: steps that are learned again after a kill, rollouts that are generated meanwhile, versions
/// that the store collects before their samples are learned from again, groups that finish in another order.
const KINDS: [&[&str]; 3] = [
    &["--save-interval", "1"],
    &["--save-interval", "3", "--train-async", "--rollout-shuffle", "--anchor-every", "1", "--keep", "1"],
    &["--save-interval", "3", "--max-staleness", "3"],
];

#[test]
fn loop_over_prompts_takes_learns_and_rewards_each_once() {
    play_until_killed_often(0);
}

#[test]
fn loop_ahead_of_its_learner_takes_and_rewards_each_once() {
    play_until_killed_often(1);
}

#[test]
fn loop_of_bounded_staleness_takes_and_rewards_each_once() {
    play_until_killed_often(2);
}

#[test]
fn loop_killed_in_mid_answer_goes_on_behind_its_tokens() {
    const DRAWN: usize = 70;
    let stage = Stage::new(&["--save-interval", "1", "--rollout-max-response-len", "150"]);
    {
        let mut engine = stage.engine.engine();
        (engine.is_long, engine.stuck_after) = (true, Some(DRAWN));
    }
    let mut process = stage.start();
    let drawn = process.until("tokens of each answer", |_| {
        let log = Reader::open(stage.at("run/log")).ok()?;
        let partial = log.partials();
        (partial.len() as u64 == GROUPS * SAMPLES).then_some(partial)
    });
    let _ = kill_process(pid(process.id()), Signal::KILL);
    process.wait();
    {
        let mut engine = stage.engine.engine();
        engine.stuck_after = None;
        engine.asked.clear();
    }
    let mut process = stage.start();
    process.until("the first step", |_| (!stage.steps().is_empty()).then_some(()));
    let _ = kill_process(pid(process.id()), Signal::KILL);
    process.wait();
    let asked = stage.engine.engine().asked.clone();
    assert!(asked[..drawn.len()].iter().all(|read| *read > DRAWN), "{asked:?}");
    let log = Reader::open(stage.at("run/log")).expect("a log");
    for partial in drawn {
        let sample = partial.scalars().sample_id;
        let answer = log.sample(sample).expect("whole").expect("an answer");
        assert_eq!((answer.kind(), answer.response().len()), (Kind::Sample, 150), "sample {sample}");
        assert_eq!(answer.response()[..DRAWN], partial.tokens()[..DRAWN], "sample {sample}");
        assert_eq!(answer.spans().len(), 1, "{:?}", answer.spans());
    }
}

/// A share of all kills, in runs of one kind. Runs mostly wait, so that those of the other kind are played meanwhile.
fn play_until_killed_often(kind: usize) {
    let begun = Instant::now();
    let mut kills = Kills::default();
    let mut seed = kind as u64;
    // A run may end before its kills do.
    while kills.of_loop < (25 * times()).max(50) {
        println!("kind {kind}, seed {seed}");
        let stage = Stage::new(KINDS[kind]);
        stage.play(&mut Random(seed), &mut kills);
        stage.check();
        seed += KINDS.len() as u64;
    }
    println!("{kills:?} in runs of kind {kind} and {:.0} s", begun.elapsed().as_secs_f64());
    assert!(kills.of_learner.min(kills.of_reward).min(kills.of_engine) >= times().div_ceil(2), "{kills:?}");
}

#[test]
#[ignore = "the process of the fake learner, which another test starts"]
fn process_of_the_learner() {
    learner::main();
}

/// A hook. The test harness has standard output, so answers go to where the shell put that of the hook.
#[test]
#[ignore = "the process of the reward, which another test starts"]
fn process_of_the_reward() {
    let mut answers = File::options().write(true).open("/dev/fd/3").expect("as the command says");
    for line in std::io::stdin().lock().lines() {
        let ask: Value = serde_json::from_str(&line.expect("text")).expect("a question");
        let text = |sample: &Value, name: &str| sample[name].as_str().expect("text").to_owned();
        let samples = ask["samples"].as_array().expect("samples").iter().map(|sample| {
            let number = sample["index"].as_u64().expect("a number");
            worth(number, &text(sample, "prompt"), &text(sample, "response"), &text(sample, "label"))
        });
        let answer = json!({"id": ask["id"], "rewards": samples.collect::<Vec<_>>()});
        writeln!(answers, "{answer}").expect("the loop reads");
    }
}

fn reward_command() -> String {
    let program = std::env::current_exe().expect("this program");
    format!("exec {} --ignored --exact {REWARD} 3>&1 >/dev/null", program.display())
}

/// What the reward says of a sample: another number for nearly every one.
fn worth(sample: u64, prompt: &str, response: &str, label: &str) -> f32 {
    let mut hasher = DefaultHasher::new();
    (sample, prompt, response, label).hash(&mut hasher);
    (hasher.finish() % 4096) as f32 / 64.0
}

/// Prompt and label of a row.
fn row(number: u64) -> (String, String) {
    (format!("1{}+2{}=", number % 10, number / 10), number.to_string())
}

fn text(tokens: &[i32]) -> String {
    tokens.iter().map(|token| tiny::VOCABULARY[*token as usize]).collect()
}

/// What was killed by -9.
#[derive(Debug, Default)]
struct Kills {
    of_loop: u64,
    of_learner: u64,
    of_reward: u64,
    of_engine: u64,
}

/// What the log has of a sample: where, its tokens, and the bits of its reward.
type Known = BTreeMap<u64, (Position, Vec<i32>, Option<u32>)>;

/// A run whose processes die, and the engine and the follower that it has.
struct Stage {
    dir: tempfile::TempDir,
    engine: Fake,
    _follower: Process,
    flags: &'static [&'static str],
}

impl Stage {
    fn new(flags: &'static [&'static str]) -> Stage {
        let dir = tempfile::tempdir().expect("a directory");
        let model = contents(0).write(&dir.path().join("model"));
        std::fs::write(model.join("tokenizer.json"), tiny::tokenizer().to_string()).expect("a file");
        let line = |number| {
            let (prompt, label) = row(number);
            format!("{}\n", json!({"question": prompt, "answer": label}))
        };
        let rows: String = (0..PROMPTS).map(line).collect();
        std::fs::write(dir.path().join("prompts.jsonl"), rows).expect("a file");
        let engine = Fake::start(&model);
        // Digits, so that a sample that is drawn again is another one.
        engine.engine().tokens = (3..13).collect();
        let mut command = driftless();
        command.args(["follow", "--run", "test", "--id", "host", "--poll-ms", "5"]);
        command.args(["--engine", &engine.address.to_string(), "--store"]).arg(dir.path().join("store"));
        command.arg("--checkpoint-dir").arg(dir.path().join("host")).arg("--hf-checkpoint").arg(&model);
        let follower = Process::start("follower", dir.path(), &mut command);
        Stage { dir, engine, _follower: follower, flags }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts the loop. The command is the same each time.
    fn start(&self) -> Process {
        let mut command: Command = driftless();
        command.args(["train", "--run", "test", "--seed", "3", "--lr", "0.1"]).args(self.flags);
        command.args(["--input-key", "question", "--label-key", "answer", "--prompt-data"]);
        command.arg(self.at("prompts.jsonl")).args(["--num-epoch", &EPOCHS.to_string()]);
        command.args(["--rollout-batch-size", &GROUPS.to_string()]);
        command.args(["--n-samples-per-prompt", &SAMPLES.to_string()]);
        command.args(["--custom-rm-command", &reward_command()]);
        command.args(["--learner", &learner::command(LEARNER, "")]);
        command.args(["--rollout-external-engine-addrs", &self.engine.address.to_string()]);
        command.arg("--hf-checkpoint").arg(self.at("model")).arg("--store").arg(self.at("store"));
        command.arg("--save").arg(self.at("run"));
        Process::start("loop", self.dir.path(), &mut command)
    }

    /// Kills and starts again until the run has ended.
    fn play(&self, random: &mut Random, kills: &mut Kills) {
        let mut known = Known::new();
        let begun = Instant::now();
        let mut process = self.start();
        process.until("the first step", |_| (!self.steps().is_empty()).then_some(()));
        let usual = begun.elapsed();
        for _ in 0..KILLS {
            std::thread::sleep(usual.mul_f64(random.unit() * 0.7));
            self.kill_beside(&mut process, usual, random, kills);
            std::thread::sleep(usual.mul_f64(random.unit() * 0.7));
            // It is a child that was not waited for: its number is still its own.
            let _ = kill_process(pid(process.id()), Signal::KILL);
            let status = process.wait();
            if random.unit() < 0.3 {
                known = self.check_known(known);
            }
            if status.success() {
                break;
            }
            assert_eq!(status.signal(), Some(9), "the loop ended with {status}:\n{}", process.output());
            kills.of_loop += 1;
            process = self.start();
        }
        println!("{} of {STEPS} steps when its kills ended, {:?}", self.steps().len(), begun.elapsed());
        process.succeed();
        known = self.check_known(known);
        // Over is over.
        self.start().succeed();
        assert_eq!(self.check_known(known).len() as u64, STEPS * GROUPS * SAMPLES);
    }

    /// Kills, mostly, what the loop works with. It has to go on by itself.
    fn kill_beside(&self, process: &mut Process, usual: Duration, random: &mut Random, kills: &mut Kills) {
        let mut killed = |word| {
            let begun = Instant::now();
            while process.ended().is_none() && begun.elapsed() < usual {
                if let Some(child) = child(process.id(), word) {
                    return u64::from(pidfd_send_signal(child, Signal::KILL).is_ok());
                }
            }
            0
        };
        match random.next() % 6 {
            0 | 1 => kills.of_learner += killed(LEARNER),
            2 => kills.of_reward += killed(REWARD),
            3 => {
                self.engine.kill();
                std::thread::sleep(usual.mul_f64(random.unit() * 0.3));
                self.engine.restart();
                kills.of_engine += 1;
            }
            _ => {}
        }
    }

    /// The recorded steps.
    fn steps(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.at("run/metrics.jsonl")).unwrap_or_default();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().map(|line| serde_json::from_str(line).expect("a step")).collect()
    }

    /// The samples in the log, each once, and those that were known as they were.
    fn check_known(&self, known: Known) -> Known {
        let Ok(log) = Reader::open(self.at("run/log")) else {
            assert!(known.is_empty(), "the log is gone");
            return known;
        };
        let mut now = Known::new();
        for record in samples(&log) {
            let scalars = record.scalars();
            let reward = record.is_scored().then_some(scalars.reward.to_bits());
            let kept = (record.position(), record.tokens().to_vec(), reward);
            let twice = now.insert(scalars.sample_id, kept);
            assert_eq!(twice, None, "sample {} is in the log twice", scalars.sample_id);
        }
        for (sample, was) in known {
            let found = now.get(&sample).unwrap_or_else(|| panic!("sample {sample} is lost"));
            let (_, _, reward) = was;
            let same = (&found.0, &found.1) == (&was.0, &was.1) && reward.is_none_or(|_| found.2 == reward);
            assert!(same, "sample {sample} was acknowledged as {was:?}, and is {found:?}");
        }
        now
    }

    /// What the whole run has left.
    fn check(&self) {
        let report = check::verify(self.at("run/log")).expect("a log");
        assert!(report.is_clean(), "{:?}", report.damage);
        let log = Reader::open(self.at("run/log")).expect("a log");
        self.check_prompts(&log);
        self.check_samples(&log);
        self.check_steps(&log);
        let store = open(&self.at("store").to_string_lossy()).expect("a store");
        let newest = Run::open(store, "test").expect("the run").newest("policy").expect("a chain");
        let newest = newest.expect("a version").manifest;
        assert_eq!(newest.trainer_step, STEPS);
        assert_eq!(self.engine.engine().label(), newest.label());
    }

    /// Each prompt was taken once in each epoch, and learned from.
    fn check_prompts(&self, log: &Reader) {
        assert!(log.prompts(PromptState::InFlight).is_empty());
        let done = log.prompts(PromptState::Done);
        let mut epochs = vec![Vec::new(); EPOCHS as usize];
        let numbers: BTreeSet<u64> = done.iter().map(|record| record.scalars().sample_id).collect();
        assert_eq!(numbers, (0..PROMPTS * EPOCHS).collect());
        for record in &done {
            let source: Value = serde_json::from_slice(record.metadata()).expect("where it is from");
            assert_eq!(source.get("dropped"), None, "{source}");
            epochs[(record.scalars().sample_id / PROMPTS) as usize].push(text(record.tokens()));
        }
        let mut all: Vec<_> = (0..PROMPTS).map(|number| row(number).0).collect();
        all.sort();
        for (epoch, mut taken) in epochs.into_iter().enumerate() {
            taken.sort();
            assert_eq!(taken, all, "epoch {epoch}");
        }
    }

    /// Each sample is of its prompt, and has the reward of what it says.
    fn check_samples(&self, log: &Reader) {
        let prompts: BTreeMap<u64, String> = log
            .prompts(PromptState::Done)
            .iter()
            .map(|record| (record.scalars().sample_id, text(record.tokens())))
            .collect();
        let labels: BTreeMap<String, String> = (0..PROMPTS).map(row).collect();
        for record in samples(log) {
            assert!(record.is_scored(), "{:?}", record.scalars());
            let scalars = record.scalars();
            let (sample, group) = (scalars.sample_id, scalars.group_id);
            assert_eq!(group, sample / SAMPLES, "sample {sample}");
            let prompt = text(&record.tokens()[..record.prompt_len()]);
            assert_eq!(prompts.get(&group), Some(&prompt), "sample {sample}");
            let expected = worth(sample, &prompt, &text(record.response()), &labels[&prompt]);
            assert_eq!(scalars.reward, expected, "sample {sample}");
        }
    }

    /// Each step was recorded once, of its samples, and the weights have learned from each of them once.
    fn check_steps(&self, log: &Reader) {
        let steps = self.steps();
        let ids: Vec<_> = steps.iter().map(|step| step["rollout_id"].as_u64()).collect();
        assert_eq!(ids, (0..STEPS).map(Some).collect::<Vec<_>>(), "every step once, in order");
        let taken = ledger::read(&self.at("run")).expect("a ledger");
        let of_group = taken.iter().flat_map(|(step, groups)| groups.iter().map(|group| (*group, *step)));
        let of_group: BTreeMap<u64, u64> = of_group.collect();
        assert!(of_group.keys().copied().eq(0..STEPS * GROUPS), "each group of one step: {taken:?}");
        if !self.flags.contains(&"--max-staleness") {
            assert!(of_group.iter().all(|(group, step)| *step == group / GROUPS), "in order: {taken:?}");
        }
        let mut rewards = vec![0.0; STEPS as usize];
        for record in samples(log) {
            rewards[of_group[&record.scalars().group_id] as usize] += f64::from(record.scalars().reward);
        }
        for (step, sum) in steps.iter().zip(rewards) {
            let mean = step["reward"].as_f64().expect("a number");
            assert!((mean - sum / (GROUPS * SAMPLES) as f64).abs() < 1e-9, "{step}");
        }
        let state = learner::saved(&self.at("run/learner")).expect("a state of the learner");
        let consumed: Vec<_> =
            state["consumed"].as_array().expect("samples").iter().map(Value::as_u64).collect();
        let samples = taken.values().flatten().flat_map(|group| group * SAMPLES..(group + 1) * SAMPLES);
        assert_eq!(consumed, samples.map(Some).collect::<Vec<_>>(), "as the ledger says");
    }
}

fn samples(log: &Reader) -> impl Iterator<Item = Record> {
    let records = log.iter(log.oldest()).map(|record| record.expect("no damage"));
    records.filter(|record| record.kind() == Kind::Sample && !record.scalars().evaluation)
}

fn pid(number: u32) -> Pid {
    Pid::from_raw(number.cast_signed()).expect("a process")
}

/// The child of a process whose command has this word.
fn child(of: u32, word: &str) -> Option<OwnedFd> {
    let numbers = std::fs::read_dir("/proc")
        .expect("Linux")
        .filter_map(|entry| entry.expect("an entry").file_name().to_str()?.parse::<u32>().ok());
    numbers.into_iter().find_map(|number| {
        // Held before the look, so that it is this one that is killed.
        let held = pidfd_open(pid(number), PidfdFlags::empty()).ok()?;
        let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<u32>().ok()?;
        let command = std::fs::read(format!("/proc/{number}/cmdline")).ok()?;
        (parent == of && String::from_utf8_lossy(&command).contains(word)).then_some(held)
    })
}
