//! `driftless log`, on logs made by the crate.

use crate::common::{code, driftless, json, output, run};
use driftless_buffer::learned::Column;
use driftless_buffer::{Identity, Kind, Log, Options, Position, PromptState, Reader, Sample, Scalars};
use std::path::Path;
use std::process::Output;

const RUN: &str = "000102030405060708090a0b0c0d0e0f";

fn log(args: &[&str]) -> Output {
    output(driftless().arg("log").args(args))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path of ours")
}

fn identity() -> Identity {
    let run_id = std::array::from_fn(|at| at as u8);
    Identity { run_id, model: "policy".into(), tokenizer_digest: [0; 32] }
}

fn filled(dir: &Path) -> Log {
    let log = Log::open(dir, Options::new(identity())).expect("a log");
    for id in 0..5 {
        let scalars = Scalars { sample_id: id, reward: 0.5, status: 1, ..Scalars::default() };
        let sample = Sample {
            scalars,
            tokens: &[7, 8],
            log_probs: &[-1.0; 2],
            loss_mask: &[1; 2],
            ..Sample::default()
        };
        log.append(&sample).expect("room").wait().expect("a disk");
    }
    log
}

#[test]
fn prompts_come_in_from_slimes_files() {
    let dir = tempfile::tempdir().expect("a directory");
    let (root, file) = (dir.path().join("log"), dir.path().join("prompts.jsonl"));
    let lines = [
        r#"{"prompt": "1+1?", "label": "2", "ids": [5, 6]}"#,
        "",
        r#"{"prompt": [{"role": "user", "content": "2+2?"}], "label": "4", "ids": [7]}"#,
        r#"{"prompt": "3+3?", "ids": []}"#,
    ];
    std::fs::write(&file, lines.join("\n")).expect("a file");
    let import = |file: &str, more: &[&str]| {
        let args = [&["import", text(&root), file, "--input-key", "prompt", "--json"][..], more].concat();
        log(&args)
    };
    let unknown = import(text(&file), &["--run-id", "7"]);
    assert_eq!(unknown.status.code(), Some(2), "no run has an id of one digit");
    let done = import(text(&file), &["--run-id", RUN, "--tokens-key", "ids"]);
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    let done: serde_json::Value = serde_json::from_slice(&done.stdout).expect("JSON");
    assert_eq!((done["prompts"].as_u64(), done["next_id"].as_u64()), (Some(3), Some(3)));
    // Again, a slice of it: ids go on, and the log is told by itself.
    let again = import(&format!("{}@[1:2]", file.display()), &[]);
    assert_eq!(again.status.code(), Some(0), "{}", String::from_utf8_lossy(&again.stderr));

    let reader = Reader::open(&root).expect("a log");
    assert_eq!(reader.identity().expect("a segment").run_id, identity().run_id);
    let prompts = reader.prompts(PromptState::Waiting);
    let ids: Vec<u64> = prompts.iter().map(|prompt| prompt.scalars().sample_id).collect();
    assert_eq!(ids, [0, 1, 2, 3]);
    assert_eq!((prompts[0].tokens(), prompts[1].tokens()), (&[5, 6][..], &[7][..]));
    assert_eq!(prompts[3].metadata(), lines[2].as_bytes());

    std::fs::write(&file, "{\"prompt\": \"a\"}\n{\"question\": \"b\"}").expect("a file");
    let bad = import(text(&file), &[]);
    let message = String::from_utf8_lossy(&bad.stderr).into_owned();
    assert_eq!(bad.status.code(), Some(2));
    assert!(message.contains("prompts.jsonl:2") && message.contains("`prompt`"), "{message}");
    let slice = import(&format!("{}@[2:1]", file.display()), &[]);
    assert_eq!(slice.status.code(), Some(2));
    assert_eq!(Reader::open(&root).expect("a log").end(), Position(4), "a bad file changes nothing");
}

#[test]
fn prompts_of_a_run_go_into_its_log() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    let file = dir.path().join("more.jsonl");
    std::fs::write(&file, "{\"input\": \"a\"}\n").expect("a file");
    let done = json(driftless().args(["log", "import"]).args([&run_dir, &file]));
    assert_eq!(done["prompts"].as_u64(), Some(1), "{done}");
    assert_eq!(Reader::open(run_dir.join("log")).expect("a log").prompts(PromptState::Waiting).len(), 2);
    let beside = std::fs::read_dir(&run_dir).expect("a run").count();
    assert_eq!(beside, 2, "no other log begins beside the run's");
}

#[test]
fn import_into_a_log_that_does_not_say_its_run_wants_to_be_told() {
    let dir = tempfile::tempdir().expect("a directory");
    let (root, file) = (dir.path().join("log"), dir.path().join("prompts.jsonl"));
    std::fs::write(&file, "{\"input\": \"a\"}\n").expect("a file");
    filled(&root).close().expect("a disk");
    let segment = root.join("segment-00000000000000000000.log");
    let mut bytes = std::fs::read(&segment).expect("a segment");
    bytes[..4096].fill(0);
    std::fs::write(&segment, bytes).expect("a segment");
    let segments = || std::fs::read_dir(&root).expect("a log").count();
    let before = segments();
    let refused = log(&["import", text(&root), text(&file)]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!((refused.status.code(), segments()), (Some(2), before), "{message}");
    assert!(message.contains("--run-id"), "{message}");
    let told = log(&["import", text(&root), text(&file), "--run-id", RUN]);
    assert_eq!(told.status.code(), Some(0), "{}", String::from_utf8_lossy(&told.stderr));
}

#[test]
fn prompts_go_through_the_process_that_owns_the_log() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("prompts.jsonl");
    std::fs::write(&file, "{\"input\": \"a\"}\n").expect("a file");
    let owner = filled(&dir.path().join("log"));
    let served = owner.serve().expect("a socket");
    run(driftless().args(["log", "import"]).arg(dir.path().join("log")).arg(&file));
    drop(served);
    assert_eq!(owner.reader().prompts(PromptState::Waiting).len(), 1);
}

#[test]
fn stat_tail_and_verify_speak_json() {
    let dir = tempfile::tempdir().expect("a directory");
    filled(dir.path()).close().expect("a disk");
    let stat = json(driftless().args(["log", "stat"]).arg(dir.path()));
    assert_eq!((stat["samples"].as_u64(), stat["run_id"].as_str()), (Some(5), Some(RUN)));
    let tail = log(&["tail", text(dir.path()), "-n", "2", "--json"]);
    let last: Vec<serde_json::Value> = String::from_utf8_lossy(&tail.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(last.len(), 2);
    assert_eq!(last[1]["tokens"], serde_json::json!([7, 8]));
    let report = json(driftless().args(["log", "verify"]).arg(dir.path()));
    assert_eq!(report["records"].as_u64(), Some(5));
}

#[test]
fn log_of_a_run_is_found_by_the_runs_directory() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    let stat = json(driftless().args(["log", "stat"]).arg(&run_dir));
    assert_eq!((&stat["samples"], &stat["prompts"]), (&serde_json::json!(3), &serde_json::json!(1)));
    let report = json(driftless().args(["log", "verify"]).arg(&run_dir));
    assert_eq!(report["records"].as_u64(), Some(4));
    let tail = log(&["tail", text(&run_dir)]);
    let told = String::from_utf8_lossy(&tail.stdout).into_owned();
    let lines: Vec<&str> = told.lines().collect();
    assert!(lines.len() == 4 && lines[0].ends_with("prompt 2 tokens"), "no reward of a prompt: {told}");
    assert!(lines[3].contains("reward 1.0 stop") && lines[3].ends_with("3 tokens"), "{told}");
}

/// A run with two steps of samples: its log, and the tokenizer of its baseline.
pub(crate) fn run_with_samples(dir: &Path) -> std::path::PathBuf {
    let (run_dir, prompts) = (dir.join("run"), dir.join("prompts.jsonl"));
    let words = serde_json::json!({ "What": 0, "is": 1, "six": 2, "\u{1b}[2J": 3 });
    let model = serde_json::json!({ "type": "WordLevel", "vocab": words, "unk_token": "six" });
    let tokenizer = run_dir.join("baseline/tokenizer.json");
    std::fs::create_dir_all(run_dir.join("baseline")).expect("a directory");
    std::fs::write(&tokenizer, serde_json::json!({ "version": "1.0", "model": model }).to_string())
        .expect("a file");
    std::fs::write(&prompts, "{\"input\": \"What is\", \"label\": \"42\", \"ids\": [0, 1]}\n")
        .expect("a file");
    let root = run_dir.join("log");
    let imported = [
        &["import", text(&root), text(&prompts), "--tokens-key", "ids"],
        &["--tokenizer", text(&tokenizer)][..],
    ];
    assert_eq!(log(&imported.concat()).status.code(), Some(0));
    let identity = Reader::open(&root).expect("a log").identity().expect("a segment").clone();
    let log = Log::open(&root, Options::new(identity)).expect("a log");
    for (id, rollout_id, reward, word) in [(0, 6, 0.5, 2), (1, 7, 0.0, 3), (2, 7, 1.0, 2)] {
        let scalars = Scalars { sample_id: id, rollout_id, reward, status: 1, ..Scalars::default() };
        let tokens = [0, 1, word];
        let sample = Sample {
            scalars,
            prompt_len: 2,
            tokens: &tokens,
            log_probs: &[-1.0],
            loss_mask: &[1],
            ..Sample::default()
        };
        log.append(&sample).expect("room").wait().expect("a disk");
    }
    log.close().expect("a disk");
    run_dir
}

/// Has a step learn from answers of one token at these positions, of which the learner said this.
pub(crate) fn learned_in(run_dir: &Path, step: u64, said: &[(u64, f32)]) {
    let root = run_dir.join("log");
    let identity = Reader::open(&root).expect("a log").identity().expect("a segment").clone();
    let log = Log::open(&root, Options::new(identity)).expect("a log");
    let values: Vec<_> = said.iter().map(|(position, log_prob)| (Position(*position), [*log_prob])).collect();
    let columns = values.iter().map(|(position, log_probs)| Column {
        position: *position,
        log_probs,
        engine_log_probs: &[-1.0],
    });
    let columns: Vec<_> = columns.collect();
    log.reader().write_learned(step, &columns).expect("a disk");
    log.close().expect("a disk");
}

#[test]
fn show_prints_prompts_answers_rewards_and_labels_of_a_step() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    let best = json(driftless().args(["log", "show", "--best", "-n", "1"]).arg(&run_dir));
    let fields = ["prompt", "response", "label", "reward", "step", "finish"].map(|name| best[name].clone());
    assert_eq!(serde_json::json!(fields), serde_json::json!(["What is", "six", "42", 1.0, 7, "stop"]));
    let step = json(driftless().args(["log", "show", "--step", "6"]).arg(run_dir.join("log")));
    assert_eq!(step["reward"], serde_json::json!(0.5));
    let worst = log(&["show", text(&run_dir), "--worst"]);
    let shown = String::from_utf8_lossy(&worst.stdout).into_owned();
    let lines: Vec<&str> = shown.lines().collect();
    assert!(lines[0].starts_with("reward 0, label 42: step 7") && lines.len() == 6, "{shown}");
    assert_eq!(lines[1..3], ["  > What is", "  < \\u{1b}[2J"], "nothing moves the cursor");
    let absent = log(&["show", text(&run_dir), "--step", "9"]);
    let told = String::from_utf8_lossy(&absent.stderr).into_owned();
    assert!(absent.status.code() == Some(2) && told.contains("from 6 to 7"), "{told}");
}

#[test]
fn show_begins_with_the_largest_mismatch_if_it_is_asked() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    learned_in(&run_dir, 7, &[(2, -1.25), (3, -1.125)]);
    let shown = log(&["show", text(&run_dir), "--mismatch"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let facts: Vec<&str> = shown.lines().filter(|line| line.starts_with("reward")).collect();
    assert!(
        facts[0].starts_with("reward 0,") && facts[0].ends_with(", mismatch up to 0.250 nats"),
        "{shown}"
    );
    assert!(
        facts[1].starts_with("reward 1,") && facts[1].ends_with(", mismatch up to 0.125 nats"),
        "{shown}"
    );
}

/// With bounded staleness a step may learn from groups that were begun for another.
#[test]
fn show_finds_the_samples_of_a_step_by_the_ledger() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    let root = run_dir.join("log");
    let identity = Reader::open(&root).expect("a log").identity().expect("a segment").clone();
    let log = Log::open(&root, Options::new(identity)).expect("a log");
    for (number, rollout_id) in [(1, 8), (2, 9)] {
        let scalars = Scalars { group_id: number, rollout_id, status: 1, ..Scalars::default() };
        let prompt = Scalars { sample_id: number, ..scalars };
        let prompt = Sample {
            kind: Kind::Prompt,
            scalars: prompt,
            prompt_len: 2,
            tokens: &[0, 1],
            ..Sample::default()
        };
        let sample = Sample {
            scalars: Scalars { sample_id: 10 + number, reward: number as f32, ..scalars },
            prompt_len: 2,
            tokens: &[0, 1, 2],
            log_probs: &[-1.0],
            loss_mask: &[1],
            ..Sample::default()
        };
        log.append_all(&[sample, prompt]).expect("a disk");
    }
    log.close().expect("a disk");
    std::fs::write(
        run_dir.join("ledger.jsonl"),
        "{\"step\":8,\"groups\":[2]}\n{\"step\":9,\"groups\":[1]}\n",
    )
    .expect("a file");
    for (step, reward) in [(8, 2.0), (9, 1.0)] {
        let shown = json(driftless().args(["log", "show", "--step", &step.to_string()]).arg(&run_dir));
        assert_eq!((&shown["step"], &shown["reward"]), (&step.into(), &reward.into()));
    }
    let (status, told) = code(driftless().args(["log", "show", "--step", "7"]).arg(&run_dir));
    assert!(status == Some(2) && told.contains("from 8 to 9"), "{told}");
}

#[test]
fn show_prints_what_no_step_learns_from() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    let root = run_dir.join("log");
    let identity = Reader::open(&root).expect("a log").identity().expect("a segment").clone();
    let log = Log::open(&root, Options::new(identity)).expect("a log");
    let answer = Sample {
        prompt_len: 2,
        tokens: &[0, 1, 2],
        log_probs: &[-1.0],
        loss_mask: &[1],
        ..Sample::default()
    };
    let ids = Scalars { rollout_id: 8, status: 1, ..Scalars::default() };
    let of_set =
        Scalars { sample_id: u64::MAX - 5, group_id: u64::MAX - 2, evaluation: true, reward: 0.25, ..ids };
    let evaluated = Sample {
        scalars: of_set,
        metadata: br#"{"set": "test", "label": "6", "source": "t.jsonl:3"}"#,
        ..answer
    };
    let of_prompt = Scalars { sample_id: 30, group_id: 15, ..ids };
    let unscored = Sample { scalars: Scalars { parts: 1, score_follows: true, ..of_prompt }, ..answer };
    let prompt = Sample {
        kind: Kind::Prompt,
        scalars: Scalars { sample_id: 15, status: 2, ..of_prompt },
        prompt_len: 2,
        tokens: &[0, 1],
        metadata: br#"{"dropped": "no reward came"}"#,
        ..Sample::default()
    };
    log.append_all(&[evaluated, unscored, prompt]).expect("a disk");
    log.close().expect("a disk");
    let shown = json(driftless().args(["log", "show", "--evaluation"]).arg(&run_dir));
    let fields =
        ["set", "label", "reward", "step", "prompt_id", "answer", "response"].map(|name| shown[name].clone());
    assert_eq!(serde_json::json!(fields), serde_json::json!(["test", "6", 0.25, 8, 2, 5, "six"]));
    let shown = json(driftless().args(["log", "show", "--left-out", "--step", "8"]).arg(&run_dir));
    let fields = ["dropped", "reward", "answer"].map(|name| shown[name].clone());
    assert_eq!(serde_json::json!(fields), serde_json::json!(["no reward came", null, 30]));
    let (status, told) = code(driftless().args(["log", "show", "--evaluation", "--step", "7"]).arg(&run_dir));
    assert!(status == Some(2) && told.contains("answers of step 8 to 8"), "{told}");
}

#[test]
fn show_without_the_tokenizer_of_the_log_is_refused_by_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    let own = run_dir.join("baseline/tokenizer.json");
    let other = dir.path().join("tokenizer.json");
    std::fs::write(&other, std::fs::read_to_string(&own).expect("a file").replace("six", "ten"))
        .expect("a file");
    std::fs::remove_file(&own).expect("a file");
    for (flags, expected) in
        [(&[][..], "--hf-checkpoint"), (&["--hf-checkpoint", text(dir.path())], "another one")]
    {
        let refused = log(&[&["show", text(&run_dir)], flags].concat());
        let told = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(2) && told.contains(expected), "{told}");
        assert!(told.contains("tokenizer.json"), "{told}");
    }
}

#[cfg(feature = "arrow")]
#[test]
fn export_with_text_has_prompts_responses_and_labels() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    let out = dir.path().join("out.arrow");
    let done = json(driftless().args(["log", "export", "--text"]).args([&run_dir, &out]));
    assert_eq!(done["records"].as_u64(), Some(4));
    let bytes = std::fs::read(&out).expect("the file");
    for text in ["prompt", "response", "label", "What is", "six", "42"] {
        assert!(bytes.windows(text.len()).any(|window| window == text.as_bytes()), "{text}");
    }
}

#[test]
fn tail_damaged_record_is_named_and_those_behind_it_are_printed() {
    let dir = tempfile::tempdir().expect("a directory");
    filled(dir.path()).close().expect("a disk");
    let segment = dir.path().join("segment-00000000000000000000.log");
    let mut bytes = std::fs::read(&segment).expect("a segment");
    // A byte of the first record's body.
    bytes[4096 + 64 + 210] ^= 1;
    std::fs::write(&segment, bytes).expect("a segment");
    for (flags, last) in [(&["--json"][..], "{\"error\""), (&[], "error: ")] {
        let tail = log(&[&["tail", text(dir.path())], flags].concat());
        let (out, told) = (String::from_utf8_lossy(&tail.stdout), String::from_utf8_lossy(&tail.stderr));
        assert_eq!((tail.status.code(), out.lines().count()), (Some(3), 4), "{out}\n{told}");
        let told: Vec<&str> = told.lines().collect();
        assert!(told[0].contains("record body") && told[0].contains(".log:4096"), "{told:?}");
        assert!(told[1].starts_with(last) && told[1].contains("1 damaged"), "{told:?}");
    }
}

#[test]
fn tail_segment_without_a_header_is_named_others_are_printed() {
    let dir = tempfile::tempdir().expect("a directory");
    filled(dir.path()).close().expect("a disk");
    filled(dir.path()).close().expect("a disk");
    for (lost, named) in [(5, true), (0, false)] {
        let segment = dir.path().join(format!("segment-{lost:020}.log"));
        let whole = std::fs::read(&segment).expect("a segment");
        std::fs::write(&segment, [&[0; 4096], &whole[4096..]].concat()).expect("a segment");
        let tail = log(&["tail", text(dir.path()), "-n", "5"]);
        #[cfg(feature = "arrow")]
        {
            let out = tempfile::tempdir().expect("a directory");
            let file = out.path().join("out.arrow");
            let export = log(&["export", text(dir.path()), text(&file), "--from", "5"]);
            assert_eq!((export.status.code(), file.exists()), (Some(if named { 3 } else { 0 }), true));
            let inside = log(&["export", text(dir.path()), text(&dir.path().join("out.arrow"))]);
            assert_eq!(inside.status.code(), Some(2), "nothing is written beside the segments");
        }
        let (out, told) = (String::from_utf8_lossy(&tail.stdout), String::from_utf8_lossy(&tail.stderr));
        // The older segment is not among the last five records.
        assert_eq!((tail.status.code(), out.lines().count()), (Some(if named { 3 } else { 0 }), 5), "{told}");
        assert_eq!(told.contains("segment header") && told.contains(text(&segment)), named, "{told}");
        std::fs::write(&segment, whole).expect("a segment");
    }
}

#[cfg(feature = "arrow")]
#[test]
fn records_go_out_as_arrow_and_parquet() {
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("log");
    filled(&root).close().expect("a disk");
    for (name, magic) in [("out.arrow", &b"ARROW1"[..]), ("out.parquet", b"PAR1")] {
        let out = dir.path().join(name);
        let done = json(driftless().args(["log", "export", "--from", "1"]).args([&root, &out]));
        assert_eq!((done["records"].as_u64(), done["damaged"].as_u64()), (Some(4), Some(0)));
        assert!(std::fs::read(&out).expect("the file").starts_with(magic), "{name}");
    }
    let unknown = log(&["export", text(&root), "out.csv"]);
    assert_eq!(unknown.status.code(), Some(2));
    let segment = root.join("segment-00000000000000000000.log");
    let mut bytes = std::fs::read(&segment).expect("a segment");
    bytes[4096 + 64 + 210] ^= 1;
    std::fs::write(&segment, bytes).expect("a segment");
    let out = dir.path().join("rest.parquet");
    let damaged = log(&["export", text(&root), text(&out)]);
    assert_eq!(damaged.status.code(), Some(3), "{}", String::from_utf8_lossy(&damaged.stderr));
    assert!(out.exists(), "what is whole was written");
}
