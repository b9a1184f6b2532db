//! Answers that come in pieces: what stays of them when an engine fails, and how they go on.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use driftless_bridge::engine::{Digester, Finish, VersionSpan, context};
use driftless_bridge::fleet::{Cause, Free, Usage};
use driftless_bridge::sglang::{Client, Dialect};
use driftless_bridge::{Generation, Label, Rid};
use driftless_testkit::sglang::{Fake, Fault, patient as calls};
use tokio::task::JoinHandle;

use super::fleet::{NEW, OLD, Scene, label, patient, request, scene_with};

/// Tokens of an answer, and those of it that come before the engine stands still.
const WHOLE: usize = 200;
const STUCK: usize = 40;

type Answer = JoinHandle<driftless_bridge::Result<Generation>>;

/// Engines that stand still in the middle of each answer.
fn stuck(engines: usize, change: impl Fn(&Fake)) -> Scene {
    scene_with(engines, patient(), |fake| {
        let mut engine = fake.engine();
        (engine.is_long, engine.stuck_after) = (true, Some(STUCK));
        drop(engine);
        change(fake);
    })
}

/// Asks for an answer behind a prompt of two tokens; its tokens that stay come with their labels.
fn ask(scene: &Scene) -> (Answer, Receiver<(usize, String)>) {
    let (told, pieces) = channel();
    let fleet = scene.fleet.clone();
    let mut request = request(0);
    request.sampling.max_new_tokens = WHOLE as u32;
    let answer = scene.runtime.spawn(async move {
        let mut tell = |piece: driftless_bridge::engine::Piece<'_>| {
            told.send((piece.output_ids.len(), piece.label.to_owned())).unwrap();
        };
        fleet.stream(request, None, &mut tell).await
    });
    (answer, pieces)
}

/// The answer, of which each token is at its place, and whose it is.
fn whole(scene: &Scene, answer: Answer) -> (Generation, Vec<(String, u32, u32)>) {
    let whole = scene.runtime.block_on(answer).unwrap().unwrap();
    let expected: Vec<i32> = (2..2 + WHOLE as i32).map(|place| place % 10).collect();
    assert_eq!(whole.output_ids, expected);
    assert_eq!((whole.log_probs.len(), &whole.finish), (WHOLE, &Finish::Length));
    let spans = whole.spans.iter().map(|VersionSpan { label, start, end }| (label.clone(), *start, *end));
    let spans = spans.collect();
    check_replies(&whole);
    (whole, spans)
}

/// Each token is of one reply, whose digest is that of the tokens that were kept.
fn check_replies(whole: &Generation) {
    let mut next = 0;
    for reply in &whole.replies {
        assert_eq!(reply.start as usize, next);
        let before = [request(0).input_ids.as_slice(), &whole.output_ids[..next]].concat();
        let mut digester = Digester::new(reply.rid, context(0, &before));
        for at in next..reply.end as usize {
            let span = whole.spans.iter().find(|span| (span.start..span.end).contains(&(at as u32))).unwrap();
            let version = span.label.parse::<Label>().unwrap().version();
            digester.push(whole.output_ids[at], whole.log_probs[at], Some(version));
        }
        assert_eq!((reply.context, reply.digest), (context(0, &before), digester.digest()));
        next = reply.end as usize;
    }
    assert_eq!(next, WHOLE);
}

/// Has what was changed of an engine show.
fn poke(scene: &Scene, fake: &Fake) {
    let client = Client::new(&fake.address.to_string(), calls()).unwrap();
    scene.runtime.block_on(client.loads()).unwrap();
}

/// What all places were doing, which adds up.
fn used(scene: &Scene) -> Usage {
    let (engines, mut used) = scene.fleet.usage();
    engines.iter().for_each(|(_, usage)| used.add(usage));
    let repeated = used.prefill_again.values().chain(used.lost.values());
    let parts =
        repeated.chain(used.free.values()).copied().chain([used.prefill, used.decoded, used.under_way]);
    assert_eq!(parts.sum::<Duration>(), used.places);
    used
}

fn asked(fake: &Fake) -> Vec<usize> {
    fake.engine().asked.clone()
}

#[test]
fn answer_goes_on_with_its_tokens_after_the_engines_death() {
    for incremental in [true, false] {
        let scene = stuck(2, |fake| fake.engine().facts().incremental_streaming_output = incremental);
        scene.fleet.published(&label(OLD));
        let (answer, pieces) = ask(&scene);
        assert_eq!(pieces.recv().unwrap(), (STUCK, OLD.to_owned()));
        let (dead, living): (Vec<_>, Vec<_>) = scene.fakes.iter().partition(|fake| !asked(fake).is_empty());
        living[0].engine().stuck_after = None;
        dead[0].kill();
        let (whole, spans) = whole(&scene, answer);
        assert_eq!(spans, [(OLD.to_owned(), 0, WHOLE as u32)]);
        assert_eq!(whole.rid, Rid::new(1, 0).next_attempt());
        assert_eq!((asked(dead[0]), asked(living[0])), (vec![2], vec![2 + STUCK]), "{incremental}");
        let used = used(&scene);
        let again: Vec<_> = used.prefill_again.keys().copied().collect();
        assert_eq!((again, used.under_way), (vec![Cause::Failed], Duration::ZERO));
        assert!(used.lost[&Cause::Failed] > Duration::ZERO, "its engine stood still before it died");
        assert!(used.prefill > Duration::ZERO && used.decoded > Duration::ZERO);
        let tokens = &used.tokens;
        assert_eq!((tokens.prefill, tokens.decoded, tokens.lost.len()), (2, WHOLE as u64, 0));
        assert_eq!(tokens.prefill_again[&Cause::Failed], 2 + STUCK as u64);
        assert!(used.free[&Free::Down] > Duration::ZERO && used.free[&Free::Unasked] > Duration::ZERO);
    }
}

#[test]
fn answer_is_cut_where_another_version_may_have_come() {
    let scene = stuck(2, |_| {});
    scene.fleet.published(&label(OLD));
    let (answer, pieces) = ask(&scene);
    assert_eq!(pieces.recv().unwrap().0, STUCK);
    scene.fleet.publishing();
    let (dead, living): (Vec<_>, Vec<_>) = scene.fakes.iter().partition(|fake| !asked(fake).is_empty());
    dead[0].engine().stuck_after = Some(3 * STUCK);
    poke(&scene, dead[0]);
    assert!(pieces.recv_timeout(Duration::from_millis(200)).is_err(), "they wait for the end of the reply");
    living[0].engine().set_label(NEW);
    living[0].engine().stuck_after = None;
    dead[0].kill();
    let (_, spans) = whole(&scene, answer);
    assert_eq!(asked(living[0]), [2 + STUCK]);
    let (cut, end) = (STUCK as u32, WHOLE as u32);
    assert_eq!(spans, [(OLD.to_owned(), 0, cut), (NEW.to_owned(), cut, end)]);
}

#[test]
fn answer_goes_on_behind_an_update_that_an_engine_cannot_locate() {
    let scene = stuck(1, |fake| fake.engine().facts().dialect = Dialect::V0_5_12);
    scene.fleet.published(&label(OLD));
    let (answer, pieces) = ask(&scene);
    assert_eq!(pieces.recv().unwrap().0, STUCK);
    scene.fleet.publishing();
    scene.fakes[0].engine().set_label(NEW);
    scene.fakes[0].engine().stuck_after = Some(3 * STUCK);
    poke(&scene, &scene.fakes[0]);
    // It is asked again, by a fleet that has not waited for the end.
    super::fleet::until("a second attempt", || asked(&scene.fakes[0]).len() == 2);
    scene.fakes[0].engine().stuck_after = None;
    poke(&scene, &scene.fakes[0]);
    let (_, spans) = whole(&scene, answer);
    let (cut, end) = (STUCK as u32, WHOLE as u32);
    assert_eq!(spans, [(OLD.to_owned(), 0, cut), (NEW.to_owned(), cut, end)]);
    assert_eq!(asked(&scene.fakes[0]), [2, 2 + STUCK]);
}

#[test]
fn plugin_locates_an_update_where_its_engine_cannot() {
    let scene = scene_with(1, patient(), |fake| {
        fake.engine().facts().dialect = Dialect::V0_5_12;
        fake.engine().is_long = true;
        fake.fault("POST /generate", Fault::Labels(&[OLD, "", NEW, ""]));
    });
    let mut request = request(0);
    request.sampling.max_new_tokens = 4;
    let whole = scene.runtime.block_on(scene.fleet.generate(request, None)).unwrap();
    let span = |label: &str, start, end| VersionSpan { label: label.to_owned(), start, end };
    assert_eq!(whole.spans, [span(OLD, 0, 2), span(NEW, 2, 4)]);
    assert_eq!((whole.spans_reported, whole.rid), (true, Rid::new(1, 0)), "once is enough");
}

#[test]
fn answer_that_somebody_aborts_goes_on_behind_its_reply() {
    let scene = stuck(1, |_| {});
    let (answer, pieces) = ask(&scene);
    super::fleet::until("the first attempt", || !asked(&scene.fakes[0]).is_empty());
    let client = Client::new(&scene.fakes[0].address.to_string(), calls()).unwrap();
    scene.runtime.block_on(client.abort(&Rid::new(1, 0))).unwrap();
    assert_eq!(pieces.recv().unwrap(), (STUCK, OLD.to_owned()), "its reply says whose they are");
    scene.fakes[0].engine().stuck_after = None;
    poke(&scene, &scene.fakes[0]);
    whole(&scene, answer);
    assert_eq!(asked(&scene.fakes[0]), [2, 2 + STUCK]);
    assert!(used(&scene).prefill_again.contains_key(&Cause::Aborted));
    scene.fleet.remove(&scene.fakes[0].address.to_string()).unwrap();
    let gone = used(&scene);
    assert_eq!(
        (gone.places, scene.fleet.usage().0.len()),
        (used(&scene).places, 0),
        "it has no places any more"
    );
}

#[test]
fn answer_keeps_nothing_behind_a_token_that_no_model_has() {
    let scene = stuck(2, |fake| fake.engine().bad_at = Some(2 + STUCK));
    scene.fleet.published(&label(OLD));
    let (answer, pieces) = ask(&scene);
    assert_eq!(pieces.recv().unwrap().0, STUCK);
    let (bad, good): (Vec<_>, Vec<_>) = scene.fakes.iter().partition(|fake| !asked(fake).is_empty());
    // A piece with the token, and a sound one behind it.
    for length in [STUCK + 70, STUCK + 140] {
        bad[0].engine().stuck_after = Some(length);
        poke(&scene, bad[0]);
        assert!(pieces.recv_timeout(Duration::from_millis(200)).is_err(), "{length} tokens");
    }
    good[0].engine().stuck_after = None;
    good[0].engine().bad_at = None;
    bad[0].kill();
    whole(&scene, answer);
    assert_eq!(asked(good[0]), [2 + STUCK]);
}

#[test]
fn answer_that_is_drawn_already_asks_no_engine() {
    let scene = stuck(1, |_| {});
    let mut request = request(0);
    let piece = driftless_bridge::engine::Piece {
        output_ids: &[3, 4],
        log_probs: &[-0.5, -0.5],
        label: OLD,
        located: false,
        digest: None,
    };
    request.drawn.push(piece);
    request.sampling.max_new_tokens = 2;
    let whole = scene.runtime.block_on(scene.fleet.generate(request, None)).unwrap();
    assert_eq!((whole.output_ids, whole.finish), (vec![3, 4], Finish::Length));
    assert!(asked(&scene.fakes[0]).is_empty());
}
