//! What a crash leaves in a directory, and `driftless repair`.

use crate::Run;
use crate::common::{code, driftless, json};
use std::os::unix::fs::FileExt as _;

#[test]
fn directory_that_is_not_ours_is_a_usage_error_and_stays() {
    let run = Run::new();
    let (wrong, words) = code(driftless().arg("repair").arg(run.path("nowhere")));
    assert!(wrong == Some(2) && words.contains("no such directory"), "{wrong:?} {words}");
    let plain = run.made.write(&run.path("plain"));
    let before = crate::tree(&plain);
    let (wrong, words) = code(driftless().arg("repair").arg(&plain));
    assert!(wrong == Some(2) && words.contains("no .driftless"), "{wrong:?} {words}");
    assert_eq!(crate::tree(&plain), before);
}

#[cfg(feature = "failpoints")]
#[test]
fn directory_between_two_versions_loads_once_it_is_repaired() {
    let mut run = Run::new();
    run.publish();
    json(&mut run.follow_once());
    run.made.step(10);
    run.publish();
    let host = run.path("host");
    for (moment, shown) in [("follow.journal:1", true), ("follow.apply:1", false), ("follow.apply:2", false)]
    {
        json(run.follow_once().args(["--until-version", "0"]));
        let mut follow = run.follow_once();
        assert_eq!(code(follow.env("DRIFTLESS_KILL_AT", moment)).0, None, "{moment}: it is killed");
        assert_eq!(host.join("config.json").exists(), shown, "{moment}");
        let repaired = json(driftless().args(["--json", "repair"]).arg(&host));
        assert_eq!(
            (&repaired["applied"]["version"], &repaired["before"]),
            (&1.into(), &0.into()),
            "{moment}"
        );
        assert_eq!(repaired["interrupted"], true, "{moment}");
        run.assert_host_is_current();
        std::fs::remove_dir_all(&host).expect("the host's directory");
    }
}

#[test]
fn damaged_directory_is_refused_until_it_is_built_anew() {
    let mut run = Run::new();
    run.publish();
    json(&mut run.follow_once());
    let host = run.path("host");
    let whole = code(driftless().arg("repair").arg(&host));
    assert_eq!(whole.0, Some(0), "{}", whole.1);
    let path = host.join("model.safetensors");
    let file = std::fs::File::options().read(true).write(true).open(&path).expect("weights");
    let metadata = file.metadata().expect("weights");
    let mut last = [0];
    file.read_exact_at(&mut last, metadata.len() - 1).expect("a byte");
    file.write_all_at(&[last[0] ^ 1], metadata.len() - 1).expect("a byte");
    file.set_modified(metadata.modified().expect("a time")).expect("the time put back");
    for _ in 0..2 {
        let (damaged, words) = code(driftless().arg("repair").arg(&host));
        assert!(damaged == Some(3) && words.contains("b.weight"), "{damaged:?} {words}");
        assert!(!host.join("config.json").exists(), "no engine starts from it");
    }
    json(&mut run.follow_once());
    run.assert_host_is_current();
    assert_eq!(code(driftless().arg("repair").arg(&host)).0, Some(0));
}
