//! What is compared of live weights, by what, and what an activation says of it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use driftless_bridge::Error;
use driftless_bridge::activate::{Compare, DiskActivator, DiskOptions, Outlook, PluginOptions, outlook};
use driftless_bridge::engine::PauseMode;
use driftless_testkit::sglang::{Fake, Fault, checkpoint, odd_checkpoint, odd_version, patient, version};
use driftless_transport::activate::{Compared, How};
use serde_json::{Value, json};

use crate::scene::{self, WithPlugin, plugins_in, started};

type Scene = scene::Scene<WithPlugin<Fake>, DiskActivator>;

impl Scene {
    /// An engine with a plugin that has prepared nothing, of a family that is known here or not.
    fn comparing(odd: bool, compare: Compare) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let first = dir.path().join("a");
        let fake = Fake::start(&if odd { odd_checkpoint(&first, 1) } else { checkpoint(&first, 1, 4) });
        let (next, manifest) = if odd { odd_version(dir.path()) } else { version(dir.path()) };
        let plugins = plugins_in(dir.path());
        let activator = activator(&fake, &plugins, compare);
        fake.engine().truths.insert(manifest.label(), next.dir().into());
        let engine = WithPlugin { port: fake.address.port(), engine: fake, plugins };
        let scene = Self::of(engine, activator, (next, manifest), dir);
        scene.speaks(None);
        scene
    }

    /// The plugin says that it compares, and has prepared the delta to a label.
    fn speaks(&self, prepared: Option<&str>) {
        let mut told = self.told(1, prepared.unwrap_or("a:0"), Value::Null);
        told["compares"] = json!(true);
        fs::write(self.rank(0), told.to_string()).unwrap();
        let server = json!({"pid": std::process::id(), "start": started()});
        let path = self.engine.plugins.join(format!("server-{}.json", self.engine.port));
        fs::write(path, server.to_string()).unwrap();
    }

    /// A reply of a plugin that has compared nine tensors, so many of which differ.
    fn compared(&self, differing: u64) -> Fault {
        let first: &[&str] = if differing > 0 { &["w"] } else { &[] };
        let reply = json!({"compared": self.label, "tensors": 9, "bytes": 4096, "took_us": 77,
            "differing": {"count": differing, "first": first}, "unreached": {"count": 1, "first": ["position_ids"]}});
        let message = format!("driftless: {reply}");
        Fault::Answer(400, json!({"success": false, "message": message}).to_string())
    }

    fn is_silent(&self) {
        fs::remove_file(self.rank(0)).unwrap();
    }

    /// What the engine and its plugin answer to calls for updates, one after the other.
    fn answers_each(&self, faults: impl IntoIterator<Item = Fault>) {
        faults.into_iter().for_each(|fault| self.engine.fault("POST /update_weights_from_disk", fault));
    }

    fn is_asked_for_checksums(&self) -> bool {
        self.engine.engine().keys.iter().any(|(path, _)| path == "/weights_checker")
    }
}

fn activator(fake: &Fake, plugins: &Path, compare: Compare) -> DiskActivator {
    let options = DiskOptions::default().with_client(patient()).with_pause(PauseMode::Retract);
    let options = options.with_plugin(PluginOptions::new(plugins)).with_compare(compare);
    DiskActivator::new(&fake.address.to_string(), options).unwrap()
}

fn loads() -> Fault {
    Fault::Slow(Duration::ZERO)
}

#[test]
fn load_is_compared_by_the_plugin_before_its_label() {
    for odd in [true, false] {
        let mut scene = Scene::comparing(odd, Compare::Require);
        scene.answers_each([loads(), scene.compared(0)]);
        let done = scene.done().unwrap();
        assert!(
            matches!(&done.how, Some(How::Loaded { why: Some(why) }) if why.contains("not offered")),
            "{done:?}"
        );
        let without = Some("position_ids".to_owned());
        assert_eq!(done.compared, Some(Compared::Plugin { tensors: 9, without }));
        assert!(!scene.is_asked_for_checksums());
        scene.serves();
    }
}

#[test]
fn load_of_other_weights_is_fenced_until_one_is_equal() {
    let mut scene = Scene::comparing(true, Compare::Auto);
    scene.answers_each([loads(), scene.compared(3)]);
    match scene.done() {
        Err(Error::Differing { count: 3, tensors, .. }) => assert!(tensors.starts_with('w'), "{tensors}"),
        other => panic!("{other:?}"),
    }
    scene.is_fenced();
    scene.answers_each([loads(), scene.compared(0)]);
    scene.done().unwrap();
    scene.serves();
}

#[test]
fn known_family_without_a_plugin_is_compared_by_checksums() {
    let mut scene = Scene::comparing(false, Compare::Require);
    scene.is_silent();
    let done = scene.done().unwrap();
    assert_eq!(done.how, Some(How::Loaded { why: Some("it has no plugin".into()) }));
    assert_eq!(done.compared, Some(Compared::Checksums { tensors: 10 }));
}

#[test]
fn unknown_family_without_a_plugin_is_not_compared() {
    let mut scene = Scene::comparing(true, Compare::Auto);
    scene.is_silent();
    match scene.done().unwrap().compared {
        Some(Compared::Not { why }) => {
            assert!(why.contains("OddMoeForCausalLM is not known") && why.contains("rank 0"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    scene.serves();
}

#[test]
fn what_cannot_be_compared_is_refused_untouched_where_required() {
    let mut scene = Scene::comparing(true, Compare::Require);
    scene.is_silent();
    let refused = scene.done().unwrap_err();
    assert!(matches!(&refused, Error::NotComparable { why, .. } if why.contains("OddMoe")), "{refused}");
    assert!(!scene.engine.changes().contains(&"/pause_generation".to_owned()), "nothing was touched");
    // One that cannot say it after its load stays fenced.
    scene.speaks(None);
    scene.answers_each([
        loads(),
        Fault::Answer(
            400,
            r#"{"success": false, "message": "driftless: {\"label\": \"a:1\", \"refused\": \"odd\"}"}"#
                .into(),
        ),
    ]);
    let refused = scene.done().unwrap_err();
    assert!(matches!(&refused, Error::NotComparable { why, .. } if why.contains("odd")), "{refused}");
    scene.is_fenced();
}

#[test]
fn patch_says_whether_the_weights_below_it_were_compared() {
    let mut scene = Scene::comparing(true, Compare::Auto);
    let label = scene.label.clone();
    scene.offers(&label);
    scene.speaks(Some(&label));
    scene.answers_each([Fault::Patched]);
    let done = scene.done().unwrap();
    assert_eq!(done.how, Some(How::Patched));
    assert!(matches!(&done.compared, Some(Compared::Not { why }) if why.contains("began")), "{done:?}");

    scene.speaks(None);
    scene.answers_each([loads(), scene.compared(0)]);
    fs::remove_file(scene.offer()).unwrap();
    scene.done().unwrap();
    scene.offers(&label);
    scene.speaks(Some(&label));
    scene.answers_each([Fault::Patched]);
    assert_eq!(scene.done().unwrap().compared, Some(Compared::Changes));
}

#[test]
fn first_patch_is_compared_as_a_whole_where_required() {
    let mut scene = Scene::comparing(true, Compare::Require);
    let label = scene.label.clone();
    scene.offers(&label);
    scene.speaks(Some(&label));
    for (faults, expected) in [
        (
            vec![Fault::Patched, scene.compared(0)],
            Compared::Plugin { tensors: 9, without: Some("position_ids".into()) },
        ),
        (vec![Fault::Patched], Compared::Changes),
    ] {
        scene.answers_each(faults);
        let done = scene.done().unwrap();
        assert_eq!((done.how, done.compared), (Some(How::Patched), Some(expected)));
        scene.serves();
    }
}

#[test]
fn weights_that_another_program_wrote_are_loaded_over() {
    let mut scene = Scene::comparing(true, Compare::Auto);
    scene.answers_each([loads(), scene.compared(0)]);
    scene.done().unwrap();
    scene.answers_each([scene.compared(0)]);
    assert_eq!(scene.sample(0), None);
    // The second time a follower finds it when it begins.
    for begins in [false, true] {
        if begins {
            scene.activator = activator(&scene.engine, &scene.engine.plugins, Compare::Auto);
        }
        scene.answers_each([scene.compared(2)]);
        assert_eq!(scene.sample(1).unwrap(), "2 tensors are others: w and 1 more");
        // A delta to the version is there too; these weights are no base for it.
        let label = scene.label.clone();
        scene.offers(&label);
        scene.speaks(Some(&label));
        scene.answers_each([loads(), scene.compared(0)]);
        let why = Some("another program wrote its weights".to_owned());
        assert_eq!(scene.done().unwrap().how, Some(How::Loaded { why }));
        scene.serves();
    }
    scene.is_silent();
    assert_eq!(scene.sample(2), None, "nothing can tell");
}

#[test]
fn outlook_asks_and_changes_nothing() {
    let scene = Scene::comparing(true, Compare::Auto);
    let expected = driftless_bridge::Expected::from_checkpoint(scene.next.dir()).unwrap();
    let options = DiskOptions::default().with_client(patient());
    let options = options.with_plugin(PluginOptions::new(&scene.engine.plugins));
    let address = scene.engine.engine.address.to_string();
    let of = |options: &DiskOptions| outlook(&address, &expected, options).unwrap().to_string();
    assert_eq!(of(&options), "patched and compared by its plugin");
    scene.is_silent();
    assert!(of(&options).starts_with("loaded, not compared (rank 0: "), "{}", of(&options));
    let required = options.clone().with_compare(Compare::Require);
    assert!(of(&required).starts_with("refused: the live weights"), "{}", of(&required));
    let other =
        driftless_bridge::Expected::from_checkpoint(&checkpoint(&scene.dir.path().join("c"), 1, 4)).unwrap();
    match outlook(&address, &other, &options).unwrap() {
        Outlook::Refused { why } => assert!(why.contains("architectures"), "{why}"),
        outlook => panic!("{outlook:?}"),
    }
    assert_eq!(scene.engine.changes(), Vec::<String>::new());
}
