//! Activation of a version whose files a follower still writes: the engine may be patched, and loads nothing.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use driftless_bridge::activate::{DiskActivator, DiskOptions, PluginOptions};
use driftless_store::{Memory, Store};
use driftless_testkit::sglang::{Fake, Fault, checkpoint, patient};
use driftless_transport::activate::{Activate, Limit, Target};
use driftless_transport::prepared::{OfferWhen, offer_path};
use driftless_transport::publish::{Mode, PublisherOptions, Start, Step};
use driftless_transport::{Checkpoint, Publisher, Replica, Run, Version};
use fail::FailScenario;
use serde_json::{Value, json};

use crate::patch::REFUSED;
use crate::scene::{plugins_in, told};

const UPDATE: &str = "/update_weights_from_disk";
const HELD: &str = "follow.apply";

/// An engine that serves version 0 of a directory, of which version 1 is under way.
struct Scene {
    fake: Fake,
    activator: DiskActivator,
    replica: Replica,
    run: Run,
    plugins: PathBuf,
    _dir: tempfile::TempDir,
    _turn: FailScenario<'static>,
}

impl Scene {
    fn new() -> Self {
        let turn = FailScenario::setup();
        let dir = tempfile::tempdir().unwrap();
        let first = checkpoint(&dir.path().join("a"), 1, 4);
        let next = checkpoint(&dir.path().join("b"), 1, 4);
        let weights = next.join("model.safetensors");
        let mut bytes = fs::read(&weights).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&weights, bytes).unwrap();
        let store: Arc<dyn Store> = Arc::new(Memory::new());
        let options = PublisherOptions::new("test", Start::NewRun, dir.path().join("baseline"));
        let mut publisher = Publisher::open(store.clone(), options).unwrap();
        publisher.publish_reference(&first, Step::default()).unwrap();
        publisher.publish(&Checkpoint::open(&next).unwrap(), Step::default(), Mode::Delta).unwrap();
        // Its baseline follows the commit, and would be held, too.
        drop(publisher);

        let plugins = plugins_in(dir.path());
        let fake = Fake::start(&first);
        let plugin = PluginOptions::new(&plugins);
        let options = DiskOptions::default().with_client(patient()).with_plugin(plugin);
        let activator = DiskActivator::new(&fake.address.to_string(), options).unwrap();
        let run = Run::open(store, "test").unwrap();
        let mut replica = Replica::open(dir.path().join("host")).unwrap();
        replica.advance(&run, "policy", Version(0), Some(&first)).unwrap();
        let mut scene = Self { fake, activator, replica, run, plugins, _dir: dir, _turn: turn };
        scene.says("none", Value::Null);
        scene.activate().unwrap();
        scene.replica.set_plugin_dir(scene.plugins.clone());
        scene.replica.offer_first(OfferWhen::Durable);
        fail::cfg(HELD, "pause").unwrap();
        scene.replica.advance(&scene.run, "policy", Version(1), None).unwrap();
        let label = scene.replica.manifest().unwrap().label();
        scene.fake.engine().truths.insert(label.clone(), scene.replica.dir().into());
        scene.says(&label, Value::Null);
        scene
    }

    fn says(&self, target: &str, why_not: Value) {
        let offer = offer_path(&self.plugins, self.replica.dir()).unwrap();
        let rank = self.plugins.join(format!("rank-{}-0.json", self.fake.address.port()));
        fs::write(rank, told(&offer, 1, target, why_not).to_string()).unwrap();
    }

    fn activate(&mut self) -> Result<(), String> {
        let limit = Limit::within(Duration::from_secs(60));
        let (checkpoint, manifest) = (self.replica.checkpoint().unwrap(), self.replica.manifest().unwrap());
        let label = manifest.label();
        let target = Target { checkpoint, weights: checkpoint, label: &label, manifest, limit: &limit };
        self.activator.activate(&target).map(drop).map_err(|error| error.to_string())
    }

    /// Activates the version, whose files are let go on once the engine was asked for so many updates since
    /// the first version. Returns how many it was asked for at the end. An activation that ends without that is
    /// let go on as well.
    fn activate_held(&mut self, updates: usize) -> usize {
        let fake = &self.fake;
        let before = count(fake);
        let (limit, replica) = (Limit::within(Duration::from_secs(60)), &self.replica);
        let (checkpoint, manifest) = (replica.checkpoint().unwrap(), replica.manifest().unwrap());
        let label = manifest.label();
        let target = Target { checkpoint, weights: checkpoint, label: &label, manifest, limit: &limit };
        let (activator, ended) = (&mut self.activator, AtomicBool::new(false));
        let asked = thread::scope(|scope| {
            let asked = scope.spawn(|| {
                while count(fake) < before + updates && !ended.load(Ordering::Relaxed) {
                    thread::yield_now();
                }
                let asked = count(fake) - before;
                fail::remove(HELD);
                asked
            });
            let outcome = activator.activate(&target);
            ended.store(true, Ordering::Relaxed);
            outcome.unwrap();
            asked.join().unwrap()
        });
        assert_eq!(asked, updates, "nothing is loaded from files that are written");
        count(fake) - before
    }

    fn serves(&mut self) {
        let label = self.replica.manifest().unwrap().label();
        assert_eq!(self.activator.serving().unwrap(), Some(label));
        let engine = self.fake.engine();
        assert_eq!((engine.weights.as_deref(), &engine.lies[..]), (Some(self.replica.dir()), &[][..]));
    }
}

impl Drop for Scene {
    /// A test that fails leaves its replica's writer held, which the replica waits for.
    fn drop(&mut self) {
        fail::remove(HELD);
    }
}

fn count(fake: &Fake) -> usize {
    fake.changes().iter().filter(|path| *path == UPDATE).count()
}

#[test]
fn an_engine_is_patched_while_the_files_are_written() {
    let mut scene = Scene::new();
    assert!(scene.activator.waits());
    scene.fake.fault("POST /update_weights_from_disk", Fault::Patched);
    scene.activate().unwrap();
    assert_eq!(scene.replica.checkpoint().unwrap().is_written(), Some(false));
    scene.serves();
}

#[test]
fn a_patch_that_is_refused_is_a_load_once_the_files_are_there() {
    let mut scene = Scene::new();
    let refusal = json!({"success": false, "message": REFUSED}).to_string();
    scene.fake.fault("POST /update_weights_from_disk", Fault::Answer(400, refusal));
    assert_eq!(scene.activate_held(1), 2);
    scene.serves();
}

#[test]
fn engine_that_loaded_half_written_files_loads_them_again() {
    let mut scene = Scene::new();
    assert_eq!(scene.activate_held(1), 2);
    scene.serves();
}

#[test]
fn engine_that_is_not_ready_is_paused_once_the_files_are_there() {
    let mut scene = Scene::new();
    let label = scene.replica.manifest().unwrap().label();
    scene.says(&label, json!("the live weights are others"));
    assert_eq!(scene.activate_held(0), 1);
    scene.serves();
}
