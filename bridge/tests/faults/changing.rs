//! A fleet whose engines change while it works.

use std::sync::Arc;
use std::time::Duration;

use driftless_bridge::fleet::Phase;
use driftless_bridge::{Error, Expected, Fleet, Generation, Keys, Result};
use driftless_testkit::sglang::{Fake, checkpoint};
use tokio::task::JoinHandle;

use super::fleet::{NEW, OLD, Scene, label, patient, request, scene, until};

const LONG: Duration = Duration::from_secs(60);

impl Scene {
    fn engine(&self, at: usize) -> String {
        format!("http://{}", self.fakes[at].address)
    }

    /// Another engine with the checkpoint of the others, which is in no fleet.
    fn another(&self) -> Fake {
        let fake = Fake::start(&self.dir.path().join("a"));
        fake.engine().set_label(OLD);
        fake
    }

    fn phase(&self, fake: &Fake) -> Option<Phase> {
        let url = format!("http://{}", fake.address);
        self.fleet.status().into_iter().find(|engine| engine.url == url).map(|engine| engine.phase)
    }

    fn ask(&self, sample: u64, minimum: Option<&'static str>) -> JoinHandle<Result<Generation>> {
        let fleet = self.fleet.clone();
        self.runtime.spawn(async move { fleet.generate(request(sample), minimum.map(label).as_ref()).await })
    }

    fn answer(&self, asked: JoinHandle<Result<Generation>>) -> Generation {
        self.runtime.block_on(asked).unwrap().unwrap()
    }

    fn drain(&self, at: usize, deadline: Duration) -> JoinHandle<Result<()>> {
        let (fleet, engine) = (self.fleet.clone(), self.engine(at));
        self.runtime.spawn(async move { fleet.drain(&engine, deadline).await })
    }
}

#[test]
fn added_engine_gets_requests_once_it_serves_what_they_ask() {
    let scene = scene(1, patient());
    let added = scene.another();
    let url = scene.fleet.add(&added.address.to_string(), &Keys::default()).unwrap();
    until("it serves", || scene.phase(&added) == Some(Phase::Serving));
    let waiting = scene.ask(0, Some(NEW));
    until("a later version is asked for", || scene.phase(&added) == Some(Phase::Syncing));
    assert_eq!(scene.phase(&scene.fakes[0]), Some(Phase::Syncing));
    added.engine().set_label(NEW);
    assert_eq!(scene.answer(waiting).engine, url);
    assert_eq!(scene.phase(&added), Some(Phase::Serving));
}

#[test]
fn added_engine_that_is_not_there_yet_joins_when_it_is() {
    let scene = scene(1, patient());
    let added = scene.another();
    added.kill();
    scene.fleet.add(&added.address.to_string(), &Keys::default()).unwrap();
    until("it was looked at", || scene.fleet.status()[1].failure.is_some());
    assert_eq!(scene.phase(&added), Some(Phase::Joining));
    added.restart();
    until("it serves", || scene.phase(&added) == Some(Phase::Serving));
}

#[test]
fn engine_late_to_join_or_sync_is_lost_and_comes_back() {
    let scene = scene(1, patient().with_joining(Duration::ZERO).with_syncing(Duration::ZERO));
    let added = scene.another();
    added.kill();
    scene.fleet.add(&added.address.to_string(), &Keys::default()).unwrap();
    let is_lost = |fake: &Fake| matches!(scene.phase(fake), Some(Phase::Lost { .. }));
    until("its time is over", || is_lost(&added));
    added.restart();
    until("it came back", || scene.phase(&added) == Some(Phase::Serving));
    let waiting = scene.ask(0, Some(NEW));
    until("it is late", || is_lost(&scene.fakes[0]));
    let Some(Phase::Lost { why }) = scene.phase(&scene.fakes[0]) else { panic!("it is lost") };
    assert!(why.contains(OLD) && why.contains(NEW), "{why}");
    scene.fakes[0].engine().set_label(NEW);
    assert_eq!(scene.answer(waiting).engine, scene.engine(0));
    assert_eq!(scene.phase(&scene.fakes[0]), Some(Phase::Serving));
}

#[test]
fn idle_engine_that_went_down_comes_back_without_a_request() {
    let scene = scene(2, patient());
    scene.fakes[1].kill();
    scene.runtime.block_on(scene.fleet.look()).unwrap();
    assert!(matches!(scene.phase(&scene.fakes[1]), Some(Phase::Lost { .. })));
    scene.fakes[1].restart();
    until("it came back", || scene.phase(&scene.fakes[1]) == Some(Phase::Serving));
}

#[test]
fn engine_that_joins_again_as_another_model_is_lost() {
    let scene = scene(1, patient());
    let other = Fake::start(&checkpoint(&scene.dir.path().join("b"), 2, 6));
    let added = scene.another();
    for fake in [&other, &added] {
        scene.fleet.add(&fake.address.to_string(), &Keys::default()).unwrap();
    }
    let refused = |fake: &Fake| match scene.phase(fake) {
        Some(Phase::Lost { why }) => why.contains("refused"),
        _ => false,
    };
    until("the other model is refused", || refused(&other));
    until("the added one serves", || scene.phase(&added) == Some(Phase::Serving));
    scene.fleet.remove(&added.address.to_string()).unwrap();
    added.kill();
    let started_with = other.engine().started_with.clone();
    {
        let engine = added.engine();
        engine.facts().launched.model_path = started_with.display().to_string();
    }
    added.restart();
    scene.fleet.add(&added.address.to_string(), &Keys::default()).unwrap();
    until("it is asked anew who it is", || refused(&added));
    assert_eq!(scene.fleet.engines().len(), 1, "no other is attached");
}

#[test]
fn address_that_is_there_or_not_is_told_by_name() {
    let scene = scene(2, patient());
    let again = scene.fleet.add(&format!("{}/", scene.engine(1)), &Keys::default());
    assert!(matches!(again, Err(Error::InFleet { engine }) if engine == scene.engine(1)));
    for unknown in [
        scene.fleet.remove("http://127.0.0.1:1"),
        scene.runtime.block_on(scene.fleet.drain("127.0.0.1:1", LONG)),
    ] {
        let text = unknown.unwrap_err().to_string();
        assert!(text.contains("http://127.0.0.1:1") && text.contains(&scene.engine(0)), "{text}");
    }
    assert!(matches!(scene.fleet.remove("no address"), Err(Error::Address { .. })));
    assert_eq!(scene.fleet.status().len(), 2);
}

#[test]
fn drained_engine_finishes_what_it_has_and_goes() {
    let scene = scene(1, patient());
    scene.fakes[0].engine().set_paused(true);
    let under_way = scene.ask(0, None);
    until("it is under way", || scene.fakes[0].engine().generating == 1);
    let drained = scene.drain(0, LONG);
    until("it drains", || scene.phase(&scene.fakes[0]) == Some(Phase::Draining));
    let added = scene.another();
    let url = scene.fleet.add(&added.address.to_string(), &Keys::default()).unwrap();
    assert_eq!(scene.answer(scene.ask(1, None)).engine, url, "it gets no more");
    assert!(!drained.is_finished());
    scene.fakes[0].engine().set_paused(false);
    assert_eq!(scene.answer(under_way).rid, request(0).rid, "at the first attempt");
    scene.runtime.block_on(drained).unwrap().unwrap();
    assert_eq!(scene.phase(&scene.fakes[0]), None);
}

#[test]
fn request_of_an_engine_that_is_taken_away_is_aborted_and_moves() {
    for drains in [true, false] {
        let scene = scene(1, patient());
        let told = scene.fakes[0].hang("POST /generate");
        let asked = scene.ask(0, None);
        told.recv_timeout(LONG).unwrap();
        let added = scene.another();
        let url = scene.fleet.add(&added.address.to_string(), &Keys::default()).unwrap();
        match drains {
            true => scene.runtime.block_on(scene.drain(0, Duration::ZERO)).unwrap().unwrap(),
            false => scene.fleet.remove(&scene.engine(0)).unwrap(),
        }
        let generation = scene.answer(asked);
        assert_eq!((generation.engine, generation.rid), (url, request(0).rid.next_attempt()));
        until("it is aborted", || scene.fakes[0].changes().contains(&"/abort_request".to_owned()));
    }
}

#[test]
fn engine_drains_to_its_end_where_nobody_waits_for_it() {
    let scene = scene(2, patient());
    scene.fakes[0].engine().set_paused(true);
    let under_way = [scene.ask(0, None), scene.ask(1, None)];
    until("one is under way", || scene.fakes[0].engine().generating == 1);
    let drained = scene.drain(0, LONG);
    until("it drains", || scene.phase(&scene.fakes[0]) == Some(Phase::Draining));
    drained.abort();
    scene.fakes[0].engine().set_paused(false);
    under_way.into_iter().for_each(|asked| drop(scene.answer(asked)));
    until("it has gone", || scene.phase(&scene.fakes[0]).is_none());
}

#[test]
fn engine_that_never_answers_is_drained_at_once() {
    let calls = patient().calls.with_info(60 * LONG);
    let scene = scene(1, patient().with_calls(calls));
    let silent = scene.another();
    let told = silent.hang("GET /server_info");
    scene.fleet.add(&silent.address.to_string(), &Keys::default()).unwrap();
    told.recv_timeout(LONG).unwrap();
    let address = silent.address.to_string();
    let drained = scene.fleet.drain(&address, Duration::MAX);
    scene.runtime.block_on(async { tokio::time::timeout(LONG, drained).await }).unwrap().unwrap();
    assert_eq!(scene.phase(&silent), None);
}

#[test]
fn fleet_without_engines_has_requests_wait_for_one() {
    let scene = scene(1, patient());
    scene.fleet.remove(&scene.engine(0)).unwrap();
    let error = scene.runtime.block_on(scene.fleet.wait_for_those_up(&label(OLD), Duration::ZERO));
    assert!(error.unwrap_err().to_string().contains("no engine"));
    let waiting = scene.ask(0, None);
    let url = scene.fleet.add(&scene.engine(0), &Keys::default()).unwrap();
    assert_eq!(scene.answer(waiting).engine, url);

    let hasty = self::scene(1, patient().with_deadline(Duration::from_millis(100)));
    hasty.fleet.remove(&hasty.engine(0)).unwrap();
    let error = hasty.runtime.block_on(hasty.ask(0, None)).unwrap().unwrap_err();
    assert!(matches!(&error, Error::Exhausted { .. }) && error.to_string().contains("no engine"), "{error}");
}

#[test]
fn added_engine_gets_the_keys_that_it_is_given_and_no_others() {
    let (keys, others) = (Keys::new(Some("of all"), None).unwrap(), Keys::new(Some("own"), None).unwrap());
    let base = scene(2, patient());
    let expected = Expected::from_checkpoint(&base.dir.path().join("a")).unwrap();
    let addresses = [base.engine(0), base.engine(1)];
    let options = patient().with_keyless(vec![base.engine(1)]);
    let fleet = base.runtime.block_on(Fleet::attach(&addresses, &keys, &expected, options)).unwrap();
    let added = [base.another(), base.another()];
    for (fake, keys) in added.iter().zip([&Keys::default(), &others]) {
        fleet.add(&fake.address.to_string(), keys).unwrap();
    }
    let fleet = Arc::new(fleet);
    until("all serve", || fleet.status().iter().all(|engine| engine.phase == Phase::Serving));
    let seen = |fake: &Fake| {
        let keys = &fake.engine().keys;
        keys.last().unwrap().1.clone()
    };
    assert_eq!(seen(&base.fakes[0]).as_deref(), Some("Bearer of all"));
    assert_eq!(seen(&base.fakes[1]), None);
    assert_eq!(seen(&added[0]), None);
    assert_eq!(seen(&added[1]).as_deref(), Some("Bearer own"));
}

#[test]
fn requests_are_each_answered_while_engines_come_and_go() {
    let scene = scene(2, patient().with_concurrency(4));
    let all: Vec<_> = (0..200).map(|sample| scene.ask(sample, None)).collect();
    for round in 0..10 {
        let at = round % 2;
        if round % 3 == 0 {
            scene.runtime.block_on(scene.drain(at, LONG)).unwrap().unwrap();
        } else {
            scene.fleet.remove(&scene.engine(at)).unwrap();
        }
        scene.fleet.add(&scene.engine(at), &Keys::default()).unwrap();
    }
    for asked in all {
        scene.answer(asked);
    }
    assert!(scene.fleet.status().iter().all(|engine| engine.in_flight == 0));
    let most = |fake: &Fake| fake.engine().most_generating;
    // An engine that went and came has the requests of before until they are aborted.
    assert!(scene.fakes.iter().all(|fake| most(fake) > 0));
}
