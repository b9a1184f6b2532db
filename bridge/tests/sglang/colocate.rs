//! Buckets that travel in the call, into real SGLang on the CPU: its own unpickler reads what our writer
//! wrote.

use driftless_bridge::Error;
use driftless_bridge::push::colocate::{Colocation, ColocationOptions};
use driftless_bridge::push::{Member, Push, PushActivator, PushOptions};
use driftless_bridge::sglang::MemoryTag;
use std::time::Duration;

use driftless_transport::Checkpoint;
use driftless_transport::activate::{Activate, Limit, Target};

use crate::inline::InlineShare;
use crate::{ENGINE, manifests, subject};

#[test]
fn what_travels_in_the_call_is_bit_equal() {
    let Some(subject) = subject() else { return };
    let _turn = ENGINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let checkpoints = [&subject.first, &subject.second].map(|path| Checkpoint::open(path).unwrap());
    let manifests = manifests(&checkpoints, directory.path());
    for bucket_bytes in [1 << 30, 8 << 10] {
        let options = ColocationOptions::default().with_bucket_bytes(bucket_bytes);
        let push = Colocation::new(InlineShare, options).unwrap();
        // An engine without --enable-memory-saver is not asked to give anything back: on a CPU that ends it.
        let options = PushOptions::default().with_release(vec![MemoryTag::KvCache]);
        let mut activator = PushActivator::new(&[subject.client.url().to_owned()], push, options).unwrap();
        for (manifest, checkpoint) in manifests.iter().zip(&checkpoints).rev() {
            let label = manifest.label();
            let limit = Limit::within(Duration::from_secs(600));
            let target = Target { checkpoint, weights: checkpoint, label: &label, manifest, limit: &limit };
            // It ends by comparing the engine's checksums with those of the checkpoint.
            let activated = activator.activate(&target).unwrap();
            println!("{bucket_bytes} bytes a bucket: {label} paused {:?}", activated.pause);
            assert_eq!(activator.serving().unwrap().as_deref(), Some(label.as_str()));
        }
    }
}

#[test]
fn without_a_session_the_engine_refuses_and_lives() {
    let Some(subject) = subject() else { return };
    let _turn = ENGINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let checkpoint = Checkpoint::open(&subject.second).unwrap();
    let mut push = Colocation::new(InlineShare, ColocationOptions::default()).unwrap();
    let member = Member { engine: subject.client.clone(), ranks: 1, sessions: false };
    push.set_members(vec![member.clone()], false);
    let refused = push.push(&checkpoint, None).unwrap_err();
    assert!(matches!(&refused, Error::Status { status: 400, .. }), "{refused}");
    push.set_members(vec![Member { sessions: true, ..member }], true);
    println!("{:?}", push.push(&checkpoint, Some("pushed")).unwrap());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(subject.client.health()).unwrap();
    let info = runtime.block_on(subject.client.model_info()).unwrap();
    assert_eq!(info.weight_version.as_deref(), Some("pushed"));
}
