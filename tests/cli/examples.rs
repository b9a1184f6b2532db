//! Examples do what they say.

use crate::common::{driftless, json, run};
use driftless_testkit::sglang::{Fake, checkpoint};
use std::path::Path;
use std::process::Command;

/// The example as cargo built it, which it does with all targets.
fn example(name: &str) -> Option<Command> {
    let path = Path::new(env!("CARGO_BIN_EXE_driftless")).with_file_name("examples").join(name);
    if !path.exists() {
        println!("skipped: {} is not built: run `cargo test` without naming a target", path.display());
    }
    path.exists().then(|| Command::new(path))
}

#[test]
fn fleet_follows_a_run_and_samples_from_it() {
    let Some(mut fleet) = example("fleet") else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let start = checkpoint(&dir.path().join("start"), 1, 4);
    let engines = [(); 2].map(|()| Fake::start(&start));
    let store = dir.path().join("store");
    let mut publish = driftless();
    publish.args(["publish", "--run", "r", "--new-run", "--store"]).arg(&store).arg("--checkpoint");
    publish
        .arg(checkpoint(&dir.path().join("next"), 2, 4))
        .arg("--baseline-dir")
        .arg(dir.path().join("baseline"));
    let label = json(&mut publish)["label"].as_str().expect("a label").to_owned();
    fleet.arg(&store).arg("r").arg(dir.path().join("host"));
    let said = run(fleet.args(engines.iter().map(|engine| engine.address.to_string())));
    assert_eq!(said.matches(&label).count(), 4, "{said}");
    assert!(engines.iter().all(|engine| engine.engine().label() == label && !engine.engine().is_paused()));
}
