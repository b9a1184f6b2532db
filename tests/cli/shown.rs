//! What commands show: help that can be copied, one figure for one thing, errors for scripts.

use crate::Run;
use crate::common::{Process, code, driftless, json, output, run};
use driftless_store::os::inotify::Watch;
use serde_json::Value;

/// Standard output of a command without `--json`.
fn text(command: &mut std::process::Command) -> String {
    let output = output(command);
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn help_examples_are_not_wrapped_and_global_options_come_last() {
    for command in ["publish", "follow", "status", "doctor", "gc", "relay", "coordinate"] {
        let help = run(driftless().args([command, "--help"]).env("COLUMNS", "60"));
        let (options, rest) = help.split_once("With every command:").expect("global options");
        assert!(!options.contains("--json") && rest.contains("--json"), "{command}: {help}");
        let examples: Vec<_> = rest.lines().filter(|line| line.contains("  driftless ")).collect();
        assert!(!examples.is_empty(), "{command}: {rest}");
        for example in examples {
            // A command ends where it ends, or says that it goes on.
            let next = rest.lines().skip_while(|line| *line != example).nth(1).unwrap_or_default();
            let goes_on = next.starts_with("     ") && !next.contains("driftless ");
            assert!(!goes_on || example.ends_with('\\'), "{command}: {example}\n{next}");
        }
    }
}

#[test]
fn help_leads_to_a_first_published_version() {
    let run = Run::new();
    run.made.write(&run.path("model"));
    let help = text(driftless().arg("--help"));
    let lines = help.lines().filter_map(|line| line.strip_prefix("  driftless "));
    let said: Vec<_> = lines
        .map(|line| {
            let mut command = driftless();
            command.args(line.split_whitespace()).current_dir(run.dir.path());
            text(command.env("XDG_CACHE_HOME", run.path("cache")))
        })
        .collect();
    assert_eq!(said.len(), 3, "{help}");
    assert!(said[2].contains("run first") && said[2].contains("version 0: full"), "{said:?}");
    assert!(run.path("copy/config.json").is_file());
}

#[test]
fn flags_of_train_stand_below_headings() {
    let help = text(driftless().args(["train", "--help"]).env("COLUMNS", "100"));
    let heading_of = |flag: &str| {
        assert!(help.lines().any(|line| line.trim_start().starts_with(flag)), "{flag}: {help}");
        let above = help.lines().take_while(|line| !line.trim_start().starts_with(flag));
        let is_heading = |line: &&str| !line.starts_with(' ') && line.ends_with(':');
        above.filter(is_heading).last().unwrap_or_default().to_owned()
    };
    for (flag, heading) in [("--save ", "The run:"), ("--seed ", "The run:"), ("--lr ", "Learning:")] {
        assert_eq!(heading_of(flag), heading, "{flag}");
    }
    // A build without libtorch has none.
    if help.contains("--device ") {
        assert_eq!(heading_of("--device "), "Device:");
    }
    let (_, options) = help.split_once("\nOptions:\n").expect("what is left");
    let options = options.lines().take_while(|line| line.is_empty() || line.starts_with(' '));
    let flags: Vec<_> = options.filter(|line| line.trim_start().starts_with('-')).collect();
    assert!(flags.iter().all(|line| line.contains("--help")), "{flags:?}");
}

#[test]
fn version_names_what_it_was_built_from() {
    let version = run(driftless().arg("-V"));
    assert!(version.starts_with(concat!("driftless ", env!("CARGO_PKG_VERSION"), " (")), "{version}");
    assert!(version.contains("features arrow") && version.contains("ucx"), "{version}");
}

#[test]
fn completions_of_a_shell_know_the_subcommands() {
    let script = run(driftless().args(["completions", "bash"]));
    assert!(script.contains("coordinate") && script.contains("--checkpoint-dir"), "{script}");
}

#[test]
fn manual_has_a_page_for_each_command_with_its_examples() {
    let dir = tempfile::tempdir().expect("a directory");
    run(driftless().arg("man").arg(dir.path().join("man1")));
    let page = |name: &str| std::fs::read_to_string(dir.path().join("man1").join(name)).expect(name);
    assert!(page("driftless.1").contains("driftless\\-train"), "the commands are named");
    let train = page("driftless-train.1");
    assert!(
        train.contains("max\\-staleness") && train.contains("A model, prompts and a reward of your own"),
        "{train}"
    );
    page("driftless-log-show.1");
}

#[test]
fn errors_for_scripts_are_one_line_of_json() {
    let run = Run::new();
    let lines = [
        (run.command("inspect").arg("--json"), 1, "no run named `test`"),
        (driftless().args(["inspect", "--json"]), 2, "URL of a run"),
        (driftless().args(["inspect", "--json", "--nonsense"]), 2, "--nonsense"),
    ]
    .map(|(command, expected, words)| {
        let (status, said) = code(command);
        assert_eq!(status, Some(expected), "{said}");
        let error: Value = serde_json::from_str(said.trim_end()).expect(&said);
        assert_eq!(error["error"]["code"], expected, "{said}");
        assert!(error["error"]["message"].as_str().is_some_and(|text| text.contains(words)), "{said}");
        error
    });
    assert!(lines[0]["error"]["hint"].as_str().is_some_and(|hint| hint.contains("--new-run")), "{lines:?}");
}

#[test]
fn messages_name_the_flag() {
    let mut run = Run::new();
    run.publish();
    let again = run.made.write(&run.path("again"));
    let mut publish = run.command("publish");
    publish.arg("--new-run").arg("--checkpoint").arg(again).arg("--baseline-dir").arg(run.path("baseline"));
    let (status, words) = code(&mut publish);
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("`test` is taken") && words.contains("--resume"), "{words}");
    // The baseline outlived its store.
    std::fs::remove_dir_all(run.path("store")).expect("a store");
    let (status, words) = code(&mut publish);
    assert_eq!(status, Some(2), "{words}");
    assert!(words.contains(&run.path("baseline").display().to_string()), "{words}");
    assert!(words.contains("see --baseline-dir"), "{words}");
    let mut relay = driftless();
    relay.args(["relay", "--listen", "0.0.0.0:0", "--store"]).arg(run.path("store"));
    let (_, words) = code(relay.arg("--cache-dir").arg(run.path("cache")).env_remove("DRIFTLESS_TOKEN"));
    assert!(words.contains("--token-file"), "{words}");
}

#[test]
fn stores_without_credentials_say_which_to_set() {
    let server = driftless_testkit::s3::Server::start();
    let refused = (0..8).map(|_| ("GET", driftless_testkit::s3::Fault::Before(403)));
    server.with(|bucket| bucket.faults.extend(refused));
    let mut inspect = driftless();
    inspect.args(["inspect", "--store"]).arg(format!("s3://bucket?endpoint=http://{}", server.addr));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("AWS_")) {
        inspect.env_remove(name);
    }
    // A token's file is another way, whose absence is no secret.
    let (status, words) = code(inspect.env("AWS_SKIP_SIGNATURE", "true"));
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("no credentials were found: set AWS_ACCESS_KEY_ID"), "{words}");
}

#[test]
fn a_version_has_one_figure_and_no_share_without_a_base() {
    let mut run = Run::new();
    let first = run.publish();
    run.made.step(100);
    let second = run.publish();
    assert!(first["density"].is_null() && second["density"].as_f64() > Some(0.0), "{first} {second}");
    let chain = json(&mut run.command("inspect"));
    for (version, published) in [first, second].iter().enumerate() {
        let shown = &chain["chain"][version];
        assert_eq!(shown["bytes"], published["publication_bytes"], "{shown}");
        assert_eq!(shown["density"].is_null(), published["density"].is_null(), "{shown}");
        let (version, bytes) = (version.to_string(), &published["publication_bytes"]);
        let shown = text(run.command("inspect").args(["--version", &version]));
        assert!(shown.contains(&format!("{bytes} bytes")), "{shown}");
        assert!(!shown.contains("100.000 %"), "{shown}");
    }
    assert!(!text(&mut run.command("inspect")).contains("100.000 %"));
}

#[test]
fn a_baseline_in_the_cache_is_announced() {
    let run = Run::new();
    let checkpoint = run.made.write(&run.path("checkpoint"));
    let mut publish = run.command("publish");
    publish.arg("--new-run").arg("--checkpoint").arg(checkpoint).env("XDG_CACHE_HOME", run.path("cache"));
    let said = text(&mut publish);
    let place = run.path("cache/driftless/baselines").display().to_string();
    assert!(said.contains(&place) && said.contains("bytes in") && said.contains("--baseline-dir"), "{said}");
}

#[test]
fn inspect_of_a_stores_url_lists_its_runs() {
    let mut run = Run::new();
    run.publish();
    let store = format!("file://{}", run.path("store").display());
    let listed = json(driftless().args(["inspect", &store]));
    assert_eq!((&listed[0]["run"], &listed[0]["newest"]), (&"test".into(), &0.into()), "{listed}");
    assert_eq!(json(driftless().args(["inspect", &format!("{store}/test")]))["run"], "test");
    let here = json(driftless().args(["inspect", "store"]).current_dir(run.dir.path()));
    assert_eq!(here[0]["run"], "test", "a path of one segment");
    let (status, words) = code(driftless().args(["inspect", "nothing"]).current_dir(run.dir.path()));
    assert!(status == Some(2) && words.contains("a store with runs"), "{words}");
    let (status, words) = code(driftless().args(["inspect", &format!("{store}/none")]));
    assert!(status == Some(1) && words.contains("no run named `none`"), "{words}");
}

#[test]
fn gc_tells_ages_in_seconds_and_why_nothing_goes() {
    let mut run = Run::new();
    run.publish();
    run.made.step(50);
    run.publish();
    json(&mut run.follow_once());
    let told = json(run.command("gc").arg("--dry-run"));
    assert!(told["leases"][0]["age_seconds"].as_f64() >= Some(0.0), "{told}");
    let said = text(run.command("gc").arg("--dry-run"));
    assert!(said.contains("--anchor-every"), "{said}");
}

#[test]
fn follow_prints_a_line_for_each_version() {
    let mut run = Run::new();
    run.publish();
    let mut follow = run.command("follow");
    follow.args(["--json", "--id", "host", "--poll-ms", "20", "--checkpoint-dir"]).arg(run.path("host"));
    let mut follow = Process::start("follow", run.dir.path(), &mut follow);
    let first = follow.says(0).expect("a line");
    assert_eq!((&first["version"], &first["from"]), (&0.into(), &Value::Null), "{first}");
    run.made.step(10);
    let published = run.publish();
    let second = follow.says(1).expect("a line");
    assert_eq!((&second["version"], &second["from"]), (&1.into(), &0.into()), "{second}");
    assert_eq!(second["label"], published["label"]);
    assert!(second["bytes"].as_u64() > Some(0) && second["prepare_ms"].as_f64() > Some(0.0), "{second}");
}

#[test]
fn follow_hears_of_versions_in_a_directory() {
    let mut run = Run::new();
    if !matches!(Watch::of(run.dir.path(), "head", || ()), Ok(Some(_))) {
        return eprintln!(
            "skipped: the kernel does not tell of what is put into {}",
            run.dir.path().display()
        );
    }
    let mut follow = run.command("follow");
    // It looks once, before there is a run, and then hardly again.
    follow.args(["--json", "--id", "host", "--poll-ms", "3600000", "--checkpoint-dir"]).arg(run.path("host"));
    let mut follow = Process::start("follow", run.dir.path(), &mut follow);
    for version in 0..3 {
        run.publish();
        let line = follow.says(version as usize).expect("a line");
        assert_eq!(line["version"], version, "{line}");
        run.made.step(10);
    }
}
