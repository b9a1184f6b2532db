//! Damaged directories are found and built anew.

use super::*;

/// Damages a byte in the middle of a file, as another program does a while later: within a tick of the clock, the date
/// would stay what it was.
fn flip(path: &std::path::Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    std::fs::write(path, bytes).unwrap();
    let file = File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() + Duration::from_secs(1)).unwrap();
}

#[test]
fn a_damaged_directory_is_built_anew_without_anybodys_help() {
    let mut fixture = Fixture::new();
    fixture.publish();
    fixture.follower(vec![]).prepare(None).unwrap();
    let path = fixture.path();
    let weights = path.join("model.safetensors");
    let state = |name: &str| path.join(".driftless").join(name);
    let damages: [(&str, &dyn Fn()); 7] = [
        ("a flipped weight", &|| flip(&weights)),
        ("weights cut short", &|| std::fs::write(&weights, b"").unwrap()),
        ("no weights", &|| std::fs::remove_file(&weights).unwrap()),
        ("another config", &|| std::fs::write(path.join("config.json"), b"{}").unwrap()),
        ("no tokenizer", &|| std::fs::remove_file(path.join("tokenizer.json")).unwrap()),
        ("a broken marker", &|| std::fs::write(state("state.json"), b"{").unwrap()),
        ("a broken manifest", &|| flip(&state("manifest"))),
    ];
    for (what, damage) in damages {
        damage();
        let follower = fixture.follower(vec![]);
        assert_eq!(follower.status().applied, None, "{what}");
        follower.prepare(None).unwrap();
        fixture.assert_on_disk();
        follower.sync().unwrap();
        assert!(!state("quarantine").exists(), "{what}: what was set aside is given up");
        drop(follower);
        // And goes on from there by deltas.
        fixture.publish();
        let follower = fixture.follower(vec![]);
        assert_eq!(follower.prepare(None).unwrap().advanced.versions, 1, "{what}");
        fixture.assert_on_disk();
    }
}

#[test]
fn damage_found_while_following_is_mended_in_the_same_call() {
    let mut fixture = Fixture::new();
    let follower = fixture.follower(vec![]);
    follower.prepare(None).unwrap();
    flip(&fixture.path().join("model.safetensors"));
    fixture.publish();
    assert_eq!(follower.prepare(None).unwrap().version, Version(1));
    fixture.assert_on_disk();
}

#[test]
fn quarantine_with_foreign_weights_is_refused() {
    let fixture = Fixture::new();
    fixture.follower(vec![]).prepare(None).unwrap();
    let theirs = fixture.path().join("adapter.safetensors");
    std::fs::write(&theirs, b"precious").unwrap();
    flip(&fixture.path().join("model.safetensors"));
    let error = Follower::open(fixture.store.clone(), fixture.options(), vec![]).unwrap_err();
    assert!(matches!(error, Error::DamagedReplica { .. }), "{error:?}");
    assert_eq!(std::fs::read(&theirs).unwrap(), b"precious");
    std::fs::remove_file(theirs).unwrap();
    fixture.follower(vec![]).prepare(None).unwrap();
    fixture.assert_on_disk();
}

#[test]
fn open_on_somebodys_checkpoint_leaves_it_as_it_was() {
    let fixture = Fixture::new();
    std::fs::create_dir_all(fixture.path()).unwrap();
    std::fs::write(fixture.path().join("model.safetensors"), b"precious").unwrap();
    let error = Follower::open(fixture.store.clone(), fixture.options(), vec![]).unwrap_err();
    assert!(matches!(error, Error::BadSetting { .. }), "{error:?}");
    assert_eq!(std::fs::read_dir(fixture.path()).unwrap().count(), 1, "nothing is made there");
}

#[test]
fn a_rebuild_stays_in_its_run_and_does_not_go_back() {
    let mut fixture = Fixture::new();
    fixture.publish();
    fixture.follower(vec![]).prepare(None).unwrap();
    let other = Fixture::new();
    flip(&fixture.path().join("model.safetensors"));
    let follower = Follower::open(other.store.clone(), fixture.options(), vec![]).unwrap();
    let error = follower.prepare(None).unwrap_err();
    assert!(matches!(error, Error::ForeignRun { .. }), "{error:?}");
    drop(follower);
    let follower = fixture.follower(vec![]);
    let error = follower.prepare(Some(Version(0))).unwrap_err();
    assert!(matches!(error, Error::Rewind { have: Version(1), wanted: Version(0), .. }), "{error:?}");
    follower.prepare(None).unwrap();
    fixture.assert_on_disk();
}

/// Flips the last bit of a file and puts its time back, as rot does.
fn rot(path: &Path) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let metadata = file.metadata().unwrap();
    let mut last = [0];
    file.read_exact_at(&mut last, metadata.len() - 1).unwrap();
    file.write_all_at(&[last[0] ^ 1], metadata.len() - 1).unwrap();
    file.set_modified(metadata.modified().unwrap()).unwrap();
}

/// Takes the end off a file that is mapped: whoever touches it through the map is killed, as by a sector that
/// cannot be read.
fn cut(path: &Path) {
    File::options().write(true).open(path).unwrap().set_len(9000).unwrap();
}

fn metric(follower: &Follower, name: &str) -> u64 {
    let name = format!("driftless_follower_{name} ");
    follower.metrics().lines().find_map(|line| line.strip_prefix(&name)?.parse().ok()).unwrap()
}

#[test]
fn rotten_bytes_are_found_built_anew_and_loaded_again() {
    let fixture = Fixture::new();
    let engine = Engine::default();
    let mut options = fixture.options();
    options.scrub_bytes_per_hour = 1 << 50;
    let follower = Follower::open(fixture.fault.clone(), options, vec![engine.fake("http://a")]).unwrap();
    let (stop, patience) = (Stop::new(), Instant::now() + Duration::from_secs(120));
    let until = |what: &dyn Fn() -> bool| {
        while !what() {
            assert!(Instant::now() < patience, "{:?}", follower.status());
            thread::yield_now();
        }
    };
    thread::scope(|scope| {
        let running = scope.spawn(|| follower.run_until(&stop, false));
        until(&|| engine.activations() == 1 && metric(&follower, "scrubbed_bytes_total") > 100_000);
        let damage = [
            ("model.safetensors", rot as fn(&Path)),
            ("tokenizer.json", rot),
            ("model.safetensors", cut),
            ("model.safetensors", rot),
        ];
        for (number, (name, damage)) in (1..).zip(damage) {
            damage(&fixture.path().join(name));
            until(&|| engine.activations() == number + 1);
            assert_eq!(metric(&follower, "scrub_mismatches_total"), number as u64, "{name}");
            fixture.assert_on_disk();
            let loaded = engine.0.lock().unwrap();
            let position = fixture.weights.infos.iter().position(|info| info.name == "g.up").unwrap();
            assert_eq!(loaded.loaded, fixture.weights.bytes[position]);
            assert_eq!(loaded.serving, Some(fixture.label(0)));
        }
        stop.stop();
        running.join().unwrap().unwrap();
    });
    assert_eq!(follower.status().applied.unwrap().engines[0].label, Some(fixture.label(0)));
}

#[test]
fn with_a_rate_of_zero_nothing_is_scrubbed() {
    let fixture = Fixture::new();
    let mut options = fixture.options();
    options.scrub_bytes_per_hour = 0;
    let follower = Follower::open(fixture.fault.clone(), options, Vec::new()).unwrap();
    let stop = Stop::new();
    thread::scope(|scope| {
        scope.spawn(|| follower.run_until(&stop, false).unwrap());
        let begin = Instant::now();
        while metric(&follower, "store_requests_total{operation=\"get\"}") < 50 {
            assert!(begin.elapsed() < Duration::from_secs(120));
            thread::yield_now();
        }
        stop.stop();
    });
    assert_eq!(metric(&follower, "scrubbed_bytes_total"), 0);
}
