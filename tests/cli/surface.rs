//! Every command with nonsense in every option that takes a value: exit codes of the list, no panic, no
//! secret, an end.

use crate::Run;
use crate::common::{code, driftless, run};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The exit codes of `driftless --help` that a command can end with by itself.
const CODES: [i32; 5] = [0, 1, 2, 3, 4];

/// A command line that does its work quickly, or fails quickly where the work needs something that is not
/// there.
struct Sound {
    command: &'static [&'static str],
    args: Vec<OsString>,
    files: Vec<PathBuf>,
}

impl Sound {
    fn new(command: &'static [&'static str], args: &[&dyn AsRef<OsStr>], files: &[&Path]) -> Sound {
        let args = args.iter().map(|arg| OsStr::to_owned((*arg).as_ref())).collect();
        Sound { command, args, files: files.iter().map(PathBuf::from).collect() }
    }

    /// The options that take a value, as the command's help names them.
    fn options(&self) -> BTreeSet<String> {
        let help = run(driftless().args(self.command).arg("--help"));
        let words: Vec<&str> = help.split_whitespace().collect();
        let taking = words.windows(2).filter(|pair| pair[0].starts_with("--") && pair[1].starts_with('<'));
        taking.map(|pair| pair[0].to_owned()).collect()
    }

    /// The command with `option` set to `value`, whatever it was.
    fn with(&self, option: &str, value: &OsString) -> Command {
        let mut command = driftless();
        command.args(self.command).args(&self.files);
        let mut args = self.args.iter();
        while let Some(arg) = args.next() {
            if arg == option {
                args.next();
            } else {
                command.arg(arg);
            }
        }
        let mut given = OsString::from(format!("{option}="));
        given.push(value);
        command.arg(given);
        command
    }
}

fn sound(run: &mut Run) -> Vec<Sound> {
    run.publish();
    let [checkpoint, baseline, host, cache, delta, log, store] =
        ["checkpoint", "fresh", "host", "cache", "step.delta", "log", "store"].map(|name| run.path(name));
    let encode = ["delta", "encode", "-o"];
    crate::common::run(driftless().args(encode).arg(&delta).args([&checkpoint, &checkpoint]));
    let prompts = run.path("prompts.jsonl");
    std::fs::write(&prompts, "{\"input\": \"a\"}\n").expect("a file");
    crate::common::run(driftless().args(["log", "import"]).args([&log, &prompts]));
    let (out, steps) = (run.path("out"), run.path("steps"));
    std::fs::create_dir(&steps).expect("a directory");
    std::fs::write(steps.join("metrics.jsonl"), "").expect("a file");
    vec![
        Sound::new(
            &["publish"],
            &[
                &"--store",
                &"memory:",
                &"--run",
                &"r",
                &"--new-run",
                &"--checkpoint",
                &checkpoint,
                &"--baseline-dir",
                &baseline,
            ],
            &[],
        ),
        Sound::new(
            &["follow"],
            &[&"--store", &store, &"--run", &"test", &"--once", &"--checkpoint-dir", &host],
            &[],
        ),
        Sound::new(
            &["coordinate"],
            &[&"--store", &"memory:", &"--run", &"r", &"--follower", &"127.0.0.1:1", &"--once"],
            &[],
        ),
        // An address for documentation, which no machine has.
        Sound::new(
            &["relay"],
            &[&"--store", &store, &"--cache-dir", &cache, &"--listen", &"192.0.2.1:1"],
            &[],
        ),
        Sound::new(&["dashboard"], &[&"--listen", &"192.0.2.1:1"], &[&host]),
        Sound::new(
            &["gateway"],
            &[
                &"--hf-checkpoint",
                &checkpoint,
                &"--save",
                &out,
                &"--listen",
                &"192.0.2.1:1",
                &"--rollout-external-engine-addrs",
                &"127.0.0.1:1",
            ],
            &[],
        ),
        Sound::new(
            &["try"],
            &[
                &"--hf-checkpoint",
                &checkpoint,
                &"--task",
                &"arithmetic",
                &"--rollout-external-engine-addrs",
                &"127.0.0.1:1",
            ],
            &[],
        ),
        Sound::new(&["fleet", "list"], &[], &[&host]),
        Sound::new(&["fleet", "drain"], &[], &[&host, Path::new("127.0.0.1:1")]),
        Sound::new(
            &["init"],
            &[&"--hf-checkpoint", &checkpoint, &"--prompt-data", &prompts, &"--engine", &"127.0.0.1:1"],
            &[],
        ),
        Sound::new(&["inspect"], &[&"--store", &store], &[]),
        Sound::new(&["doctor"], &[&"--store", &store, &"--checkpoint-dir", &host], &[]),
        Sound::new(&["status"], &[&"--store", &store, &"--run", &"test"], &[]),
        Sound::new(&["top"], &[], &[&steps]),
        Sound::new(&["gc"], &[&"--store", &store, &"--run", &"test", &"--dry-run"], &[]),
        Sound::new(&["delta", "encode"], &[&"--output", &out], &[&checkpoint, &checkpoint]),
        Sound::new(&["delta", "apply"], &[&"--output", &out], &[&checkpoint, &delta]),
        Sound::new(&["trace"], &[&"--output", &run.path("trace.json")], &[&steps]),
        Sound::new(&["log", "tail"], &[], &[&log]),
        Sound::new(&["log", "import"], &[], &[&log, &prompts]),
        #[cfg(feature = "arrow")]
        Sound::new(&["log", "export"], &[], &[&log, &run.path("out.parquet")]),
    ]
}

/// What no option means, unless it is the name of something.
fn nonsense(run: &Run) -> Vec<OsString> {
    let (fifo, file) = (run.path("fifo"), run.path("nonsense"));
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
    std::fs::write(&file, b"\x00nonsense").expect("a file");
    let words = [
        "",
        "nan",
        "-1",
        "1e999",
        "99999999999999999999999",
        "absent/at all",
        "http://u:hidden@h:1/?k=hidden",
    ];
    let mut values: Vec<OsString> = words.map(OsString::from).into();
    values.extend([
        fifo.into(),
        file.into(),
        run.path("").into(),
        OsString::from_vec(vec![b'a', 0xff, b'/']),
    ]);
    values
}

/// Whether a command would write to what the value names, which should be no device of this machine.
fn is_output(option: &str) -> bool {
    ["--output", "--export"].contains(&option)
}

fn check(run: &Run, command: &mut Command) -> Option<i32> {
    // Words that are taken for paths lead nowhere else.
    let (status, words) = code(command.current_dir(run.dir.path()));
    assert!(status.is_some_and(|status| CODES.contains(&status)), "{command:?}: {status:?}: {words}");
    assert!(!words.contains("panicked"), "{command:?}: {words}");
    assert!(!words.contains("hidden"), "{command:?}: {words}");
    status
}

#[test]
fn nonsense_in_any_option_ends_with_a_documented_code() {
    let mut run = Run::new();
    let (commands, values) = (sound(&mut run), nonsense(&run));
    let mut tried = 0;
    for sound in &commands {
        for (place, option) in sound.options().into_iter().enumerate() {
            // A secret may come through a pipe, which is waited for.
            let piped = option.ends_with("-file") || option.ends_with("-key");
            let mut values = values.clone();
            values.retain(|value| !(piped && value == run.path("fifo").as_os_str()));
            values.extend((!is_output(&option)).then(|| OsString::from("/dev/zero")));
            // Each value is given to a third of the options, and with `DRIFTLESS_LONG` to all.
            let every = if std::env::var_os("DRIFTLESS_LONG").is_some() { 1 } else { 3 };
            for value in values.iter().skip(place % every).step_by(every) {
                check(&run, &mut sound.with(&option, value));
                tried += 1;
            }
            let mut bare = driftless();
            assert_eq!(
                check(&run, bare.args(sound.command).arg(&option)),
                Some(2),
                "{option} without a value"
            );
        }
    }
    assert!(tried > 500, "the help names the options: {tried}");
}

#[test]
fn nonsense_in_place_of_any_file_ends_with_a_documented_code() {
    let mut run = Run::new();
    let (commands, values) = (sound(&mut run), nonsense(&run));
    for sound in commands.iter().filter(|sound| !sound.files.is_empty()) {
        for position in 0..sound.files.len() {
            for value in &values {
                let mut files: Vec<OsString> = sound.files.iter().map(OsString::from).collect();
                files[position].clone_from(value);
                check(&run, driftless().args(sound.command).args(&sound.args).arg("--").args(files));
            }
        }
    }
}

/// What lies between two texts of a page of the repository.
fn excerpt(page: &str, begin: &str, end: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
    let text = std::fs::read_to_string(&path).expect("the page is there");
    let rest = text.split_once(begin).expect("the page has the beginning").1;
    rest.split_once(end).expect("the page has the end").0.to_owned()
}

#[test]
fn learning_option_has_one_name_and_default_everywhere() {
    let options = driftless_trainer::options::LearnOptions::default().completed().by_name();
    let help = run(driftless().args(["train", "--help"]));
    let flags: BTreeSet<&str> = help.split_whitespace().map(|word| word.trim_end_matches(',')).collect();
    let algorithms = excerpt("docs/algorithms.md", "# Algorithms", "## What a rollout reports");
    for name in options.keys() {
        let flag = format!("--{}", name.replace('_', "-"));
        assert!(flags.contains(flag.as_str()), "{flag} is no flag of `driftless train`");
        assert!(algorithms.contains(&flag), "{flag} is not in docs/algorithms.md");
    }
    let shown = excerpt("docs/wire/learner.md", "at their defaults:\n\n", "\n\n");
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    assert_eq!(shown, serde_json::Value::Object(options.clone()), "the page of the learner's protocol");
    let python = excerpt("python/python/driftless_rl/learner/_options.py", "class Options:", "@classmethod");
    let fields: Vec<&str> = python
        .lines()
        .filter_map(|line| line.strip_prefix("    ")?.split_once(": "))
        .map(|(name, _)| name)
        .collect();
    assert!(fields.len() > 30, "{fields:?}");
    let unknown = fields.iter().find(|name| **name != "temperature" && !options.contains_key(**name));
    assert_eq!(unknown, None, "Python's learner has an option that no other place has");
    assert!(!python.contains(" = "), "Python's learner has a default of its own");
}
