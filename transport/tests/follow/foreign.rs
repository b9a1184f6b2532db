//! Weights that another program wrote, under the label that a follower gave them.

use super::*;

#[test]
fn engine_whose_weights_another_program_wrote_is_brought_back() {
    let fixture = Fixture::new();
    let engine = Engine::default();
    let options = fixture.options().with_sample_poll(Duration::from_nanos(1));
    let follower = Follower::open(fixture.store.clone(), options, vec![engine.fake("http://a")]).unwrap();
    follower.prepare(None).unwrap();
    let samples = || engine.0.lock().unwrap().samples.clone();
    follower.activate().unwrap();
    assert_eq!((engine.activations(), samples()), (1, vec![]), "what it loaded then is compared by the load");
    follower.activate().unwrap();
    follower.activate().unwrap();
    assert_eq!((engine.activations(), samples()), (1, vec![0, 1]));

    engine.0.lock().unwrap().foreign = Some("2 tensors are others".into());
    follower.activate().unwrap();
    assert_eq!((engine.activations(), samples()), (2, vec![0, 1, 2]), "within the same look");
    assert!(follower.metrics().contains("driftless_follower_foreign_writes_total{engine=\"http://a\"} 1"));
    follower.activate().unwrap();
    assert_eq!(engine.activations(), 2);

    // A follower that begins looks at what it finds, and at one that is paused later.
    let [found, paused] = [Engine::default(), Engine::default()];
    for engine in [&found, &paused] {
        let mut state = engine.0.lock().unwrap();
        (state.serving, state.foreign) = (Some(fixture.label(0)), Some("w is another".into()));
    }
    paused.0.lock().unwrap().paused = true;
    drop(follower);
    let follower = fixture.follower(vec![found.fake("http://found"), paused.fake("http://paused")]);
    follower.prepare(None).unwrap();
    follower.activate().unwrap();
    assert_eq!((found.activations(), paused.activations()), (1, 0));
    follower.activate().unwrap();
    assert_eq!(found.activations(), 1, "the next sample is later");
}
