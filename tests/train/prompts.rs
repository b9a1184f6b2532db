//! Prompts and rewards of a user, with the embedded engine.

use crate::common::{Process, code};
use crate::stage::{GROUPS, Role, SAMPLES, STEPS, Stage, cold_start};
use crate::steps;
use driftless::buffer::{PromptState, Reader};
use std::path::Path;

/// Problems as text, with a digit that an answer may have.
fn prompts(path: &Path, problems: u64) -> String {
    let line = |number: u64| {
        format!("{{\"q\": \"1{}+2{}=\", \"a\": \"{}\"}}\n", number % 10, number / 10, number % 10)
    };
    std::fs::write(path, (0..problems).map(line).collect::<String>()).expect("a file");
    path.display().to_string()
}

/// A stage whose trainer learns prompts of its own.
fn stage(dir: &Path, reward: &[&str]) -> Stage {
    let mut stage = Stage::new(dir, &cold_start(dir));
    let data = prompts(&dir.join("train.jsonl"), 100);
    let held_out = prompts(&dir.join("test.jsonl"), 5);
    let flags =
        ["--prompt-data", &data, "--input-key", "q", "--label-key", "a", "--rollout-max-response-len", "4"];
    stage.task = flags.map(str::to_owned).to_vec();
    stage.task.extend(["--eval-prompt-data", "test", &held_out].map(str::to_owned));
    stage.task.extend(["--n-samples-per-eval-prompt", "2", "--save-interval", "1"].map(str::to_owned));
    stage.task.extend(reward.iter().map(|flag| (*flag).to_owned()));
    stage
}

#[test]
fn prompts_of_a_user_are_learned_with_a_command_that_rewards() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut stage = stage(dir.path(), &["--custom-rm-command", "python3 examples/reward.py"]);
    let _engine = stage.start(Role::Engine, None);
    let _follower = stage.start(Role::Follower, None);
    Process::start("trainer", &stage.dir, &mut stage.command(Role::Trainer)).succeed();
    let recorded = steps(&stage);
    assert_eq!(recorded.len() as u64, STEPS);
    let last = &recorded[STEPS as usize - 1]["eval"]["sets"]["test"];
    assert_eq!((&last["prompts"], &last["samples"], &last["failed"]), (&5.into(), &2.into(), &0.into()));
    // A few more steps of another command: the prompts go on where they were.
    stage.steps += 2;
    Process::start("trainer", &stage.dir, &mut stage.command(Role::Trainer)).succeed();
    let log = Reader::open(stage.dir.join("rl/log")).expect("a log");
    let mut taken = Vec::new();
    for rollout in 0..stage.steps {
        for group in log.groups(rollout, SAMPLES as usize) {
            taken.push(group.group_id);
            for record in &group.records {
                let prompt: Vec<_> = record.tokens()[..record.prompt_len()].to_vec();
                let digit = 3 + (group.group_id % 10) as i32;
                // `1d+2d=`, nothing before it.
                assert_eq!((prompt[0], prompt[1], prompt.len()), (4, digit, 6), "{prompt:?}");
                let said = record.response().contains(&digit);
                assert_eq!(record.scalars().reward, f32::from(u8::from(said)), "{:?}", record.response());
            }
        }
    }
    assert_eq!(taken, (0..stage.steps * GROUPS).collect::<Vec<_>>(), "every prompt once, in order");
    assert_eq!(log.prompts(PromptState::Done).len() as u64, stage.steps * GROUPS);
}

#[test]
fn a_reward_that_never_comes_ends_the_run_with_its_reason() {
    let dir = tempfile::tempdir().expect("a directory");
    let stage = stage(dir.path(), &["--custom-rm-command", "exit 3"]);
    let _engine = stage.start(Role::Engine, None);
    let _follower = stage.start(Role::Follower, None);
    let (status, words) = code(&mut stage.command(Role::Trainer));
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("exit status: 3") && words.contains("--custom-rm-command"), "{words}");
}

#[test]
fn checkpoint_with_other_tokens_is_refused_first() {
    let dir = tempfile::tempdir().expect("a directory");
    // No engine runs.
    let stage = Stage::new(dir.path(), &cold_start(dir.path()));
    let file = stage.model.join("tokenizer.json");
    let other = std::fs::read_to_string(&file).expect("a tokenizer").replace("\"7\"", "\"seven\"");
    std::fs::write(&file, other).expect("a file");
    let (status, words) = code(&mut stage.command(Role::Trainer));
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("--prompt-data") && words.contains("<unk>"), "{words}");
    assert!(!stage.dir.join("rl").exists() && !stage.dir.join("store").exists(), "nothing is made");
}

#[test]
fn what_a_task_lacks_is_said_before_the_model_is_read() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("model.safetensors"), "").expect("a file");
    let data = prompts(&dir.path().join("train.jsonl"), 4);
    let cases: [(&[&str], &str); 4] = [
        (&[], "--task NAME"),
        (&["--prompt-data", &data, "--input-key", "q"], "--rm-type"),
        (&["--prompt-data", &data, "--input-key", "q", "--rm-type", "math"], "--label-key"),
        (
            &["--prompt-data", &data, "--input-key", "q", "--label-key", "a", "--rm-type", "maths"],
            "deepscaler",
        ),
    ];
    for (flags, expected) in cases {
        let mut stage = Stage::new(dir.path(), dir.path());
        stage.task = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let (status, words) = code(&mut stage.command(Role::Trainer));
        assert_eq!(status, Some(2), "{words}");
        assert!(words.contains(expected), "{words}");
    }
}
