//! Every way to misbehave at every call of an activation, from disk and by a push. Whatever an engine does:
//! it never carries the label of other weights than it has, its pause ends or is reported, and it gets the
//! version once it behaves.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use driftless_bridge::ClientOptions;
use driftless_bridge::activate::{DiskActivator, DiskOptions};
use driftless_bridge::engine::Deadlines;
use driftless_bridge::push::colocate::{Colocation, ColocationOptions};
use driftless_bridge::push::{PushActivator, PushOptions};
use driftless_transport::Checkpoint;
use driftless_transport::activate::{Activate, Limit, Target};
use driftless_transport::manifest::Manifest;

use crate::inline::InlineShare;
use crate::proxy::{ALL, Plan, Proxy};
use driftless_testkit::sglang::{Fake, Fault, checkpoint, version};

const DISK: [&str; 13] = [
    "GET /model_info",
    "GET /server_info",
    "GET /ready",
    "GET /pause_generation",
    "GET /update_weight_version",
    "POST /pause_generation",
    "POST /flush_cache",
    "POST /update_weight_version",
    "POST /update_weights_from_disk",
    "POST /weights_checker",
    "POST /continue_generation",
    "POST /generate",
    "POST /abort_request",
];

const PUSH: [&str; 8] = [
    "POST /pause_generation",
    "POST /flush_cache",
    "POST /update_weight_version",
    "POST /begin_weight_update",
    "POST /update_weights_from_tensor",
    "POST /end_weight_update",
    "POST /continue_generation",
    "POST /generate",
];

/// For calls that hang, and more than others take on a busy machine.
const SHORT: Duration = Duration::from_secs(1);

/// Bound on getting well again.
const RECOVERS: Duration = Duration::from_secs(120);

fn client() -> ClientOptions {
    let deadlines = Deadlines::default()
        .with_connect(SHORT)
        .with_info(SHORT)
        .with_control(SHORT)
        .with_load(SHORT)
        .with_generate(SHORT);
    ClientOptions::default().with_deadlines(deadlines).with_reply_bytes_max(1 << 20)
}

fn disk(address: &str) -> Box<dyn Activate> {
    let options = DiskOptions::default().with_client(client());
    Box::new(DiskActivator::new(address, options).unwrap())
}

fn push(address: &str) -> Box<dyn Activate> {
    let options = ColocationOptions::default().with_bucket_bytes(100).with_release(SHORT);
    let push = Colocation::new(InlineShare, options).unwrap();
    let options = PushOptions::default().with_client(client());
    Box::new(PushActivator::new(&[address.to_owned()], push, options).unwrap())
}

/// A call that misbehaves, and what the engine does meanwhile.
type Scenario = (Plan, Option<Fault>);

/// Runs one scenario after the other on several threads: most of their time is waiting.
fn all(calls: &[&'static str], activator: fn(&str) -> Box<dyn Activate>) {
    let mut plans: Vec<Scenario> = Vec::new();
    for call in calls {
        for bad in ALL {
            plans.push(((call, bad, false), None));
            if call.starts_with("POST") {
                plans.push(((call, bad, true), None));
            }
            if *call == "POST /update_weights_from_disk" {
                plans.push(((call, bad, true), Some(Fault::Half(Some(500)))));
                plans.push(((call, bad, true), Some(Fault::Rollback)));
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let first = checkpoint(&dir.path().join("a"), 1, 4);
    let (next, manifest) = version(dir.path());
    let (next, manifest, first) = (&next, &manifest, &first);
    let (turn, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                while let Some(plan) = plans.get(turn.fetch_add(1, Ordering::SeqCst)) {
                    let fake = Fake::start(first);
                    if let Err(what) = scenario(&fake, plan, next, manifest, activator) {
                        failures.lock().unwrap().push(format!("{plan:?}: {what}"));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), plans.len(), failures.join("\n"));
}

fn scenario(
    fake: &Fake,
    scenario: &Scenario,
    next: &Checkpoint,
    manifest: &Manifest,
    activator: fn(&str) -> Box<dyn Activate>,
) -> Result<(), String> {
    let (plan, fault) = scenario;
    let label = manifest.label();
    fake.engine().truths.insert(label.clone(), next.dir().into());
    let proxy = Proxy::start(fake.address);
    let mut activator = activator(&proxy.address.to_string());
    let activate = |activator: &mut dyn Activate| {
        let limit = Limit::within(Duration::from_secs(30));
        activator.activate(&Target {
            checkpoint: next,
            weights: next,
            label: &label,
            manifest,
            limit: &limit,
        })
    };

    proxy.set(Some(*plan));
    for _ in 0..2 {
        if let Some(fault) = fault {
            // No checksum tells what it holds.
            fake.engine().facts().device = "cuda".into();
            fake.fault(plan.0, fault.clone());
        }
        let outcome = activate(activator.as_mut()).map_err(|error| error.to_string());
        if fake.engine().is_paused() && outcome.is_err() && !activator.is_paused() {
            // A pause that was given up may be carried out behind the call that ends it: the next look does, or tells.
            let _ = activator.serving();
        }
        let engine = fake.engine();
        if !engine.lies.is_empty() {
            return Err(format!("it lied: {:?}", engine.lies));
        }
        if engine.is_paused() && (outcome.is_ok() || !activator.is_paused()) {
            return Err(format!("it is paused, and {outcome:?} does not tell"));
        }
    }
    if proxy.trapped() > 0 {
        return Err("a redirect was followed".to_owned());
    }

    proxy.set(None);
    fake.engine().faults.clear();
    let end = Instant::now() + RECOVERS;
    loop {
        let serving = activator.serving().ok().flatten();
        let well = serving.as_deref() == Some(&*label) && !activator.is_paused();
        let outcome = if well { Ok(()) } else { activate(activator.as_mut()).map(drop) };
        let engine = fake.engine();
        if !engine.lies.is_empty() {
            return Err(format!("it lied: {:?}", engine.lies));
        }
        if well && engine.label() == label && !engine.is_paused() {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(format!(
                "it does not recover: {outcome:?}, {}, {}",
                engine.label(),
                engine.is_paused()
            ));
        }
    }
}

#[test]
fn hostile_engines_at_every_call_of_a_load_from_disk() {
    all(&DISK, disk);
}

#[test]
fn hostile_engines_at_every_call_of_a_push() {
    all(&PUSH, push);
}
