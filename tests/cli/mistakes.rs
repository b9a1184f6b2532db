//! What is wrong with a command line is said in its own words, with exit code 2 and without secrets.

use crate::Run;
use crate::common::{code, driftless, json};
use driftless_testkit::tree::tree;
use driftless_trainer::tasks::tiny;
use std::fs::File;
use std::path::Path;
use std::process::Command;

/// Runs a command that must be refused as a mistake, and returns its words.
fn refused(command: &mut Command) -> String {
    let (status, words) = code(command);
    assert_eq!(status, Some(2), "{command:?}: {words}");
    assert!(!words.contains("corrupt"), "{words}");
    words
}

/// Publishes what `run` has made and returns the exit code and the words.
fn publish(run: &Run, args: &[&str]) -> (Option<i32>, String) {
    let checkpoint = run.made.write(&run.path("checkpoint"));
    let mut command = run.command("publish");
    command.args(["--resume", "--checkpoint"]).arg(checkpoint).args(args);
    code(command.arg("--baseline-dir").arg(run.path("baseline")))
}

#[test]
fn a_checkpoint_with_nan_or_of_another_layout_needs_its_flag() {
    let mut run = Run::new();
    run.publish();
    let sound = run.made.bytes[0][..2].to_vec();
    run.made.bytes[0][..2].copy_from_slice(&[0xc0, 0x7f]);
    let (status, words) = publish(&run, &[]);
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("a.weight") && words.contains("--allow-non-finite"), "{words}");
    let (status, words) = publish(&run, &["--allow-non-finite"]);
    assert_eq!(status, Some(0), "{words}");
    run.made.bytes[0][..2].copy_from_slice(&sound);
    run.made.tensors[1].shape = vec![32, 128];
    let (status, words) = publish(&run, &[]);
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("b.weight") && words.contains("--allow-layout-change"), "{words}");
    let (status, words) = publish(&run, &["--allow-layout-change"]);
    assert_eq!(status, Some(0), "{words}");
}

#[test]
fn a_mistyped_path_is_named_with_its_flag() {
    let mut run = Run::new();
    let checkpoint = run.made.write(&run.path("checkpoint"));
    run.publish();
    let (empty, file) = (run.path("empty"), checkpoint.join("model.safetensors"));
    std::fs::create_dir(&empty).expect("a directory");
    let nowhere = Path::new("/nowhere");
    let wrong: [(&Path, &str); 3] =
        [(nowhere, "no such directory"), (&file, "found a file"), (&empty, "a directory with neither")];
    for (path, expected) in wrong {
        let before = tree(run.dir.path());
        let of = |name: &str, args: &[&str], flag: &str| {
            let mut command = run.command(name);
            command.args(args).arg(flag).arg(path);
            command
        };
        let base = |args: &[&str]| {
            let mut command = driftless();
            command.args(args);
            command
        };
        let host = run.path("host");
        let commands = [
            ("--checkpoint", of("publish", &["--resume"], "--checkpoint")),
            (
                "--hf-checkpoint",
                of("follow", &["--once", "--checkpoint-dir", &host.to_string_lossy()], "--hf-checkpoint"),
            ),
            ("BASE", {
                let mut command = base(&["delta", "encode"]);
                command.arg(path).arg(&checkpoint).arg("-o").arg(run.path("out"));
                command
            }),
            ("NEW", {
                let mut command = base(&["delta", "encode"]);
                command.arg(&checkpoint).arg(path).arg("-o").arg(run.path("out"));
                command
            }),
        ];
        for (flag, mut command) in commands {
            let words = refused(&mut command);
            assert!(words.contains(&format!("{flag} {}: ", path.display())), "{words}");
            assert!(words.contains(expected), "{words}");
        }
        assert!(tree(run.dir.path()) == before, "nothing is touched");
    }
    let wrong: [(&Path, &str); 3] =
        [(nowhere, "no such file"), (&empty, "found a directory"), (Path::new("/dev/zero"), "a device")];
    for (path, expected) in wrong {
        for args in [
            &["inspect", "--manifest"][..],
            &["delta", "stat"],
            &["delta", "apply", "-o", "x", &checkpoint.to_string_lossy()],
        ] {
            let words = refused(driftless().args(args).arg(path));
            assert!(words.contains(&path.display().to_string()) && words.contains(expected), "{words}");
        }
    }
    for subcommand in ["stat", "verify", "tail"] {
        let words = refused(driftless().args(["log", subcommand]).arg(nowhere));
        assert!(words.contains("log /nowhere: ") && words.contains("no such directory"), "{words}");
    }
}

#[test]
fn a_rank_a_name_or_an_address_that_cannot_be_is_a_mistake() {
    let mut run = Run::new();
    run.publish();
    let checkpoint = run.path("checkpoint");
    let rank = ["--resume", "--rank", "5", "--ranks", "2", "--attempt", "a"];
    let mut publish = run.command("publish");
    publish.args(rank).arg("--checkpoint").arg(&checkpoint).arg("--baseline-dir").arg(run.path("baseline"));
    assert!(refused(&mut publish).contains("--rank"), "{publish:?}");
    let mut follow = run.command("follow");
    follow.args(["--once", "--engine", "http://user:hidden@127.0.0.1:1", "--checkpoint-dir"]);
    let words = refused(follow.arg(run.path("host")));
    assert!(words.contains("engine address") && !words.contains("hidden"), "{words}");
    for run_name in ["..", "a/b", ""] {
        let mut follow = driftless();
        follow.args(["follow", "--once", "--run", run_name, "--store"]).arg(run.path("store"));
        let words = refused(follow.arg("--checkpoint-dir").arg(run.path("host")));
        assert!(words.contains("run"), "{words}");
    }
    let words = refused(driftless().args(["inspect", "s3://key:hidden@bucket/prefix"]));
    assert!(words.contains("store URL") && !words.contains("hidden"), "{words}");
}

#[test]
fn relay_url_with_a_password_is_a_mistake_and_not_shown() {
    let mut run = Run::new();
    run.publish();
    for relay in ["http://user:hidden@127.0.0.1:1", "ucx://user:hidden@127.0.0.1:1", "ftp://user:hidden@host"]
    {
        let mut follow = run.command("follow");
        follow.args(["--once", "--relay", relay, "--checkpoint-dir"]).arg(run.path("host"));
        let words = refused(&mut follow);
        assert!(words.contains("is not a relay, expected http://host:port"), "{words}");
        assert!(!words.contains("hidden") && !words.contains("user:"), "{words}");
    }
}

#[test]
fn a_long_file_that_is_no_delta_is_refused_by_its_first_bytes() {
    let dir = tempfile::tempdir().expect("a directory");
    let long = dir.path().join("model.safetensors");
    File::create(&long).and_then(|file| file.set_len(1 << 40)).expect("a file of holes");
    // In so much memory the file has no place, and the command would say so.
    let mut bounded = Command::new("sh");
    bounded.args(["-c", "ulimit -v 4000000; exec \"$@\"", "-"]).arg(driftless().get_program());
    let (status, words) = code(bounded.args(["delta", "stat"]).arg(&long));
    assert!(status == Some(3) && words.contains("not a bundle"), "{status:?}: {words}");
}

#[test]
fn a_directory_of_somebody_else_stays_as_it_was() {
    let mut run = Run::new();
    run.publish();
    let theirs = run.made.write(&run.path("theirs"));
    let before = tree(run.dir.path());
    let mut follow = run.command("follow");
    follow.args(["--once", "--checkpoint-dir"]).arg(&theirs);
    let mut publish = run.command("publish");
    publish.args(["--resume", "--checkpoint"]).arg(run.path("checkpoint")).arg("--baseline-dir").arg(&theirs);
    for mut command in [follow, publish] {
        let words = refused(&mut command);
        assert!(words.contains("theirs: ") && words.contains("foreign file `"), "{words}");
        assert!(tree(run.dir.path()) == before, "{command:?}");
    }
    // A checkpoint that has yet to get its weights.
    std::fs::remove_file(theirs.join("model.safetensors")).expect("a file");
    let before = tree(run.dir.path());
    let mut follow = run.command("follow");
    let words = refused(follow.args(["--once", "--checkpoint-dir"]).arg(&theirs));
    assert!(words.contains("foreign file `config.json`") && tree(run.dir.path()) == before, "{words}");
    // The baseline is written to, and the checkpoint is the user's.
    let checkpoint = run.path("checkpoint");
    let mut publish = run.command("publish");
    publish.args(["--resume", "--checkpoint"]).arg(&checkpoint).arg("--baseline-dir").arg(&checkpoint);
    let words = refused(&mut publish);
    assert!(words.contains("foreign file") && tree(run.dir.path()) == before, "{words}");
}

#[test]
fn model_that_the_run_lacks_is_refused_with_those_it_has() {
    let mut run = Run::new();
    run.publish();
    for name in ["inspect", "gc", "status"] {
        let words = refused(run.command(name).args(["--model", "polcy"]));
        assert!(words.contains("polcy") && words.contains("policy"), "{words}");
    }
}

#[test]
fn an_output_that_would_replace_an_input_is_refused() {
    let mut run = Run::new();
    run.publish();
    let (checkpoint, before) = (run.path("checkpoint"), tree(&run.path("checkpoint")));
    for output in ["model.safetensors", "new.delta"] {
        let mut encode = driftless();
        encode.args(["delta", "encode"]).args([&checkpoint, &checkpoint]).arg("--output");
        let words = refused(encode.arg(checkpoint.join(output)));
        assert!(words.contains("elsewhere than in BASE") && tree(&checkpoint) == before, "{words}");
    }
}

#[test]
fn mistyped_store_or_follower_ends_before_anything_is_published() {
    let run = Run::new();
    let checkpoint = run.made.write(&run.path("checkpoint"));
    let before = tree(run.dir.path());
    let mut publish = driftless();
    publish.current_dir(run.dir.path()).args([
        "publish",
        "--store",
        "s3:/u:hidden@bucket/prefix",
        "--run",
        "r",
    ]);
    let (status, words) = code(publish.args(["--new-run", "--checkpoint"]).arg(&checkpoint));
    assert!(
        status != Some(0) && words.contains("s3://bucket/prefix") && !words.contains("hidden"),
        "{words}"
    );
    let mut publish = run.command("publish");
    publish
        .args(["--new-run", "--checkpoint"])
        .arg(&checkpoint)
        .arg("--baseline-dir")
        .arg(run.path("baseline"));
    let words = refused(publish.args(["--notify", "http//follower:1"]));
    assert!(words.contains("http://host:port") && tree(run.dir.path()) == before, "{words}");
}

#[test]
fn a_pipe_in_place_of_a_file_is_refused_at_once() {
    let run = Run::new();
    let fifo = run.path("fifo");
    let made = Command::new("mkfifo").arg(&fifo).status().expect("mkfifo");
    assert!(made.success());
    for args in [&["inspect", "--manifest"][..], &["delta", "stat"]] {
        let words = refused(driftless().args(args).arg(&fifo));
        assert!(words.contains("a pipe"), "{words}");
    }
}

#[test]
fn what_a_command_writes_replaces_no_pipe_and_no_device() {
    let run = Run::new();
    let checkpoint = run.made.write(&run.path("checkpoint"));
    let fifo = run.path("fifo.parquet");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
    let mut encode = driftless();
    encode.args(["delta", "encode"]).args([&checkpoint, &checkpoint]).arg("--output").arg(&fifo);
    assert!(refused(&mut encode).contains("a pipe"), "{encode:?}");
    let kind = std::fs::metadata(&fifo).expect("it is there").file_type();
    assert!(std::os::unix::fs::FileTypeExt::is_fifo(&kind), "{encode:?}");
}

#[test]
fn a_manifest_that_never_ends_is_not_read_to_its_end() {
    let run = Run::new();
    let endless = run.path("endless");
    // Sparse: nothing of it is on disk.
    let file = std::fs::File::create(&endless).expect("a file");
    file.set_len(1 << 40).expect("a sparse file");
    let words = refused(driftless().args(["inspect", "--manifest"]).arg(&endless));
    assert!(words.contains("at most 67108864 bytes"), "{words}");
}

#[test]
fn numbers_that_mean_nothing_are_refused_by_their_flags() {
    let run = Run::new();
    let publish = |flag: &str| refused(run.command("publish").args(["--resume", "--checkpoint", "x", flag]));
    for flag in [
        "--anchor-share=nan",
        "--anchor-share=-1",
        "--anchor-share=inf",
        "--anchor-share=1e308",
        "--anchor-share=0",
        "--anchor-every=0",
        "--keep=0",
        "--step=18446744073709551615",
    ] {
        let words = publish(flag);
        assert!(words.contains(flag.split('=').next().expect("a flag")), "{words}");
    }
    for flag in
        ["--activate-deadline=0", "--until-version=18446744073709551615", "--update-weight-buffer-size=0"]
    {
        refused(run.follow_once().arg(flag));
    }
}

#[test]
fn secrets_in_addresses_are_not_printed() {
    let run = Run::new();
    let mut publish = run.command("publish");
    publish.args(["--new-run", "--checkpoint"]).arg(run.made.write(&run.path("checkpoint")));
    publish.arg("--baseline-dir").arg(run.path("baseline"));
    let words = refused(publish.args(["--notify", "http://u:hidden@127.0.0.1:1"]));
    assert!(!words.contains("hidden"), "{words}");
    let secrets = [
        "http://u:hidden@127.0.0.1:1",
        "http://127.0.0.1:1/?key=hidden",
        "ucx://u:hidden@127.0.0.1:1",
        "http://u:hid?hidden@h:1",
    ];
    for secret in secrets {
        let stores = ["follow", "inspect", "gc", "status", "publish", "relay"].map(|name| {
            let mut command = driftless();
            command.args([name, "--run", "r", "--store", secret]);
            command
        });
        let mut commands: Vec<Command> = stores.into();
        for flag in ["--engine", "--relay", "--listen"] {
            let mut command = run.follow_once();
            command.args([flag, secret]);
            commands.push(command);
            let mut command = run.follow_once();
            command.args([flag, secret, "--update-weight-transport", "ucx"]);
            commands.push(command);
        }
        let mut coordinate = run.command("coordinate");
        coordinate.args(["--once", "--follower", secret]);
        let mut inspect = driftless();
        inspect.args(["inspect", secret]);
        let mut surplus = driftless();
        surplus.args(["inspect", "one", secret]);
        commands.extend([coordinate, inspect, surplus]);
        for mut command in commands {
            let output = command.env("RUST_LOG", "trace").output().expect("it runs");
            let words = [output.stdout, output.stderr].concat();
            let words = String::from_utf8_lossy(&words);
            assert!(!words.contains("hidden"), "{command:?}: {words}");
        }
    }
}

#[test]
fn a_run_that_is_not_there_is_no_reason_to_begin_one_by_reading() {
    let run = Run::new();
    let (status, words) = code(run.command("inspect").args(["--version", "0"]));
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("no run named `test`") && words.contains("inspect --store URL"), "{words}");
    assert_eq!(code(&mut run.command("status")), (Some(1), words), "as `inspect` says it");
    let words = refused(driftless().arg("inspect"));
    assert!(words.contains("URL of a run"), "{words}");
}

#[test]
fn run_without_a_version_is_shown_as_one() {
    let run = Run::new();
    let store = driftless_store::open(run.path("store").to_str().expect("UTF-8")).expect("a store");
    driftless_transport::Run::create(store, "test").expect("a run");
    let shown = json(&mut run.command("inspect"));
    assert_eq!((&shown["model"], &shown["chain"]), (&serde_json::Value::Null, &serde_json::json!([])));
    let (status, words) = code(&mut run.command("inspect"));
    assert_eq!(status, Some(0), "{words}");
    let words = refused(&mut run.command("gc"));
    assert!(words.contains("none yet"), "{words}");
    let shown = json(&mut run.command("status"));
    assert_eq!((&shown["trainer"], &shown["followers"]), (&serde_json::Value::Null, &serde_json::json!([])));
}

#[test]
fn a_plain_build_says_what_needs_libtorch() {
    let version = driftless().arg("--version").output().expect("a version").stdout;
    if String::from_utf8_lossy(&version).contains("torch") {
        assert!(std::env::var_os("DRIFTLESS_TEST_COMMAND").is_none(), "the lanes' command has no libtorch");
        return eprintln!("skipped: this build of the command has libtorch");
    }
    let train = ["train", "--save", "x", "--hf-checkpoint", "y"];
    let sft = ["train", "--loss-type", "sft_loss", "--save", "x"];
    for args in [&sft[..], &["serve", "--help"], &["quantize", "x", "y"], &["replay", "x"], &train] {
        let words = refused(driftless().args(args));
        assert!(words.contains("--features torch"), "{words}");
    }
    let words = refused(driftless().args(train));
    assert!(words.contains("--learner \"python -m driftless_rl.learner\""), "{words}");
}

#[test]
fn a_new_log_gets_a_run_of_its_own() {
    let run = Run::new();
    let (log, file) = (run.path("log"), run.path("prompts.jsonl"));
    std::fs::write(&file, "{\"input\": \"a\"}\n{\"input\": \"b\"}\n").expect("a file");
    let said = crate::common::run(driftless().args(["log", "import"]).args([&log, &file]));
    assert_eq!(said.trim(), "2 prompts, ids 0 to 1");
    let stat = json(driftless().args(["log", "stat"]).arg(&log));
    assert_eq!((stat["run_id"].as_str().map(str::len), stat["prompts"].as_u64()), (Some(32), Some(2)));
}

#[test]
fn what_a_run_reads_is_not_written_over() {
    let dir = tempfile::tempdir().expect("a directory");
    let (model, save) = (dir.path().join("model"), dir.path().join("rl"));
    std::fs::create_dir(&model).expect("a directory");
    std::fs::write(model.join("model.safetensors"), "").expect("a file");
    let same = dir.path().join("model/../model");
    for (save, save_hf, expected) in [
        (&save, &same, ["--save-hf ", "than that of --hf-checkpoint"]),
        (&same, &save, ["--save ", "than that of --hf-checkpoint"]),
        (&save, &save, ["--save-hf ", "than that of --save"]),
    ] {
        let mut command = driftless();
        command.args(["train", "--task", "arithmetic", "--learner", "true", "--store", "store"]);
        command.args(["--rollout-external-engine-addrs", "127.0.0.1:1", "--hf-checkpoint"]).arg(&model);
        let words = refused(command.arg("--save").arg(save).arg("--save-hf").arg(save_hf));
        assert!(expected.iter().all(|expected| words.contains(expected)), "{words}");
    }
}

#[test]
fn flags_that_would_change_nothing_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("model.safetensors"), "").expect("a file");
    std::fs::write(dir.path().join("tokenizer.json"), tiny::tokenizer().to_string()).expect("a file");
    let words_of = |flags: &[&str]| {
        let mut command = driftless();
        command
            .args(["train", "--task", "arithmetic", "--learner", "true", "--save"])
            .arg(dir.path().join("rl"));
        command.args([
            "--store",
            "store",
            "--rollout-external-engine-addrs",
            "127.0.0.1:1",
            "--hf-checkpoint",
        ]);
        refused(
            command
                .arg(dir.path())
                .args(["--num-rollout", "1", "--rollout-batch-size", "6", "--n-samples-per-prompt", "4"])
                .args(flags),
        )
    };
    for (flags, words) in [
        (&["--advantage-estimator", "gae"][..], "unknown variant `gae`, expected one of `grpo`"),
        (&["--engines-min", "2"], "--engines-min: expected at most 1"),
        (
            &["--gamma", "0.9"],
            "--gamma: expected --advantage-estimator ppo or reinforce_plus_plus, found grpo",
        ),
        (
            &["--lambd", "0.9", "--advantage-estimator", "reinforce_plus_plus"],
            "--lambd: expected --advantage-estimator ppo",
        ),
        (&["--critic-lr", "1e-5"], "--critic-lr: expected --advantage-estimator ppo, found grpo"),
        (
            &["--kl-coef", "0.1", "--advantage-estimator", "cispo"],
            "--kl-coef: expected --advantage-estimator ppo",
        ),
        (&["--kl-coef", "0.1", "--use-kl-loss"], "cannot be used with"),
        (
            &["--ref-update-interval", "2"],
            "--ref-update-interval: expected --use-kl-loss, or --kl-coef above 0",
        ),
        (&["--use-rollout-logprobs", "--use-tis"], "cannot be used with"),
        (&["--rm-url", "http://127.0.0.1:1", "--custom-rm-command", "true"], "cannot be used with"),
        (
            &["--rm-url", "http://127.0.0.1:1", "--rm-type", "math"],
            "--rm-url: expected --rm-type remote_rm, or none, found math",
        ),
        (
            &["--eval-prompt-data", "test", "a.jsonl", "--eval-prompt-data", "test", "b.jsonl"],
            "--eval-prompt-data: expected a name of its own for each file, found `test` twice",
        ),
        // Every response would end with it at once.
        (&["--rollout-stop", ""], "a value is required for '--rollout-stop"),
        (&["--tis-level", "sequence"], "--use-tis"),
        (&["--opsm-delta", "0.1"], "--use-opsm"),
        (&["--opd-kl-coef", "0.5"], "--use-opd"),
        (
            &["--global-batch-size", "5"],
            "--global-batch-size: expected a number that divides the 24 samples of a rollout, found 5",
        ),
        (
            &["--num-steps-per-rollout", "7"],
            "--num-steps-per-rollout: expected a number that divides the 24 samples",
        ),
        (
            &["--num-steps-per-rollout", "2", "--global-batch-size", "8"],
            "--global-batch-size: expected 24 samples of a rollout / --num-steps-per-rollout 2, found 8",
        ),
        // Of each prompt one sample is learned from.
        (
            &["--num-steps-per-rollout", "4", "--advantage-estimator", "rejection_sampling"],
            "divides the 6 samples",
        ),
    ] {
        let found = words_of(flags);
        assert!(found.contains(words), "{flags:?}: {found}");
    }
}

#[test]
fn environment_has_prompts_answers_and_rewards_of_its_own() {
    for (flags, words) in [
        (&["verifiers:a", "--custom-rm-command", "true"][..], "--custom-rm-command"),
        (&["verifiers:a", "--prompt-data", "a.jsonl"], "--prompt-data"),
        (&["verifiers:a", "--eval-prompt-data", "test", "a.jsonl"], "--eval-prompt-data"),
        (&["verifiers:a", "--task", "arithmetic"], "--task"),
        (&["gym:a"], "expected KIND:NAME, where KIND is one of openenv, tools, verifiers"),
        (&["verifiers:a", "--environment-args", "[]"], "expected an object of JSON"),
    ] {
        let found = refused(driftless().args(["train", "--environment"]).args(flags));
        assert!(found.contains("--environment") && found.contains(words), "{flags:?}: {found}");
    }
}

#[test]
fn key_in_clear_text_is_warned_of_with_its_flags() {
    let run = Run::new();
    let key = run.path("key");
    std::fs::write(&key, "secret").expect("a file");
    // There is no run, so that no engine is called.
    let follow = |engines: &[&str]| {
        let mut command = driftless();
        command.args(["follow", "--store", "memory:", "--run", "r", "--once", "--checkpoint-dir"]);
        command.arg(run.path("host")).arg("--api-key-file").arg(&key);
        engines.iter().for_each(|engine| _ = command.args(["--engine", engine]));
        code(&mut command).1
    };
    let words = follow(&["http://192.0.2.1:1", "https://192.0.2.2", "vllm+192.0.2.3:1", "127.0.0.1:1"]);
    assert_eq!(words.matches("clear text").count(), 1, "{words}");
    for part in ["to http://192.0.2.1:1, vllm+192.0.2.3:1:", "--api-key-file", "--engine "] {
        assert!(words.contains(part), "{part}: {words}");
    }
    assert!(!words.contains("secret") && !words.contains("192.0.2.2"), "{words}");
    assert!(!follow(&["https://192.0.2.2", "localhost:1"]).contains("clear text"));
}

#[test]
fn engine_ca_without_a_certificate_is_named_with_its_flag() {
    let run = Run::new();
    let ca = run.path("ca");
    std::fs::write(&ca, "no certificate").expect("a file");
    let mut command = driftless();
    command.args(["follow", "--store", "memory:", "--run", "r", "--checkpoint-dir"]).arg(run.path("host"));
    let words = refused(command.args(["--engine", "https://192.0.2.1", "--engine-ca"]).arg(&ca));
    assert!(words.contains("--engine-ca") && words.contains(&ca.display().to_string()), "{words}");
}
