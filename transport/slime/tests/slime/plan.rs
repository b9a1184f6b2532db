//! What would be applied, told without applying it: compared with what then is applied.

use std::fs;

use driftless_transport::replica::Plan;
use driftless_transport::{Error, Version};

use crate::reference::FORMS;
use crate::runs::trainer;
use crate::{World, options, tensors};
use driftless_testkit::publications::Weights;
use driftless_testkit::tree::tree;

/// The plan, which must leave every byte and time as it was.
fn plan(world: &World, until: Option<u64>) -> Plan {
    let before = tree(&world.path(""));
    let plan = world.plan(until).unwrap();
    assert!(tree(&world.path("")) == before, "a plan touches nothing");
    plan
}

fn versions(plan: &Plan) -> Vec<(u64, bool)> {
    plan.versions.iter().map(|link| (link.version.0, link.full)).collect()
}

#[test]
fn a_plan_is_what_is_then_done() {
    for form in FORMS {
        let base = Weights::small(3);
        let world = World::new(&base);
        let newest = crate::runs::trainer_of(&world, &base, form, 1, 1..=4);
        for (until, from) in [(2, None), (3, Some(2)), (3, Some(3)), (9, Some(3))] {
            let planned = plan(&world, Some(until));
            let to = until.min(4);
            assert_eq!((planned.from, planned.to), (from.map(Version), Version(to)), "{form:?}");
            let begun = from.is_some();
            let expected: Vec<_> =
                (from.map_or(0, |from| from + 1)..=to).map(|version| (version, version == 0)).collect();
            assert_eq!(versions(&planned), expected);

            let host = world.follower();
            let advanced = host.prepare(Some(Version(to))).unwrap().advanced;
            host.sync().unwrap();
            // Version 0 is a copy: all of it changes, and nothing of it is fetched.
            let copied = if begun { 0 } else { planned.versions[0].changed.unwrap() };
            assert_eq!(planned.changed.unwrap() - copied, advanced.changed, "{form:?}");
            assert_eq!((planned.bytes, planned.versions.len() as u64), (advanced.bytes, advanced.versions));
            assert_eq!(Some(planned.run_id), host.status().run_id);
        }
        assert!(world.host() == tensors(&newest));
        assert!(matches!(world.plan(Some(3)), Err(Error::Rewind { .. })), "not back");
    }
}

#[test]
fn a_plan_for_a_host_that_has_nothing_names_version_0() {
    let world = World::new(&Weights::small(1));
    let planned = plan(&world, None);
    assert_eq!((planned.from, planned.to, versions(&planned)), (None, Version(0), vec![(0, true)]));
    let host = world.follower();
    host.prepare(None).unwrap();
    host.sync().unwrap();
    assert_eq!(Some(planned.run_id), host.status().run_id);
    assert!(!planned.unfinished && plan(&world, None).versions.is_empty());
}

/// The weights of version 0 are others than those that the trainer starts from: nothing says so but the
/// checksums.
#[test]
fn another_version_0_is_told_before_anything_is_copied() {
    let base = Weights::small(1);
    let world = World::new(&base);
    let mut other = base.clone();
    other.step(99, 11);
    trainer(&world, &other, 1, 1..=2);
    let error = world.plan(None).unwrap_err();
    assert!(matches!(&error, Error::Corrupt { what, .. } if what.contains("another base")), "{error}");
    assert!(!world.path("host").exists());
}

#[test]
fn an_apply_that_was_interrupted_leaves_nothing_to_compare_with() {
    let base = Weights::small(1);
    let world = World::new(&base);
    trainer(&world, &base, 1, 1..=1);
    let host = world.follower();
    host.prepare(None).unwrap();
    host.sync().unwrap();
    drop(host);
    trainer(&world, &base, 1, 2..=3);
    fs::write(world.path("host/.driftless/journal"), b"torn").unwrap();
    let planned = plan(&world, None);
    assert!(planned.unfinished && planned.bytes > 0);
    assert_eq!((versions(&planned), planned.changed), (vec![(2, false), (3, false)], None));
    // Opening drops it: it was never committed.
    drop(world.follower());
    let planned = plan(&world, None);
    assert!(!planned.unfinished && planned.changed.is_some_and(|changed| changed > 0));
}

#[test]
fn a_plan_refuses_what_following_refuses() {
    let base = Weights::small(1);
    let world = World::new(&base);
    trainer(&world, &base, 1, 1..=2);
    let host = world.follower();
    host.prepare(None).unwrap();
    host.sync().unwrap();
    fs::remove_dir_all(world.source()).unwrap();
    let same = |what: &str| {
        let (planned, error) = (world.plan(None).unwrap_err(), host.prepare(None).unwrap_err());
        assert_eq!(planned.to_string(), error.to_string(), "{what}");
        error
    };
    assert!(matches!(same("an emptied directory"), Error::Corrupt { .. }));
    trainer(&world, &base, 2, 1..=5);
    assert!(matches!(same("a trainer that began anew"), Error::ForeignRun { .. }));

    let foreign = world.path("foreign");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("model.safetensors"), b"somebody's").unwrap();
    let into = || options(&world.path("hf"), &foreign);
    let planned = driftless_slime::plan(world.store(), &into()).unwrap_err();
    let error = driftless_slime::open(world.store(), into(), Vec::new()).unwrap_err();
    assert!(matches!(&error, Error::BadSetting { found, .. } if found.contains("foreign")), "{error}");
    assert_eq!(planned.to_string(), error.to_string(), "weights of somebody else");

    let mut signed = options(&world.path("hf"), &world.path("host"));
    signed.trust_keys = vec![driftless_transport::sign::SignKey::from_bytes([1; 32]).public()];
    let error = driftless_slime::plan(world.store(), &signed).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let mut without = options(&world.path("hf"), &world.path("new"));
    without.hf_checkpoint = None;
    let error = driftless_slime::plan(world.store(), &without).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}
