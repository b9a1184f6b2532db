//! Ranks as threads of this process, over sockets.

use std::time::Duration;

use tch::{Device, Kind, Tensor};

use super::{Exchange, Listening, Star};
use crate::error::Error;

const DEADLINE: Duration = Duration::from_secs(60);

/// Runs `work` on so many ranks, and gives what each made of it, in order.
pub(crate) fn on_ranks<T: Send>(ranks: usize, work: impl Fn(Star) -> T + Sync) -> Vec<T> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ranks");
    let listening = Listening::at(&path).unwrap();
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..ranks)
            .map(|rank| {
                let (path, work) = (&path, &work);
                scope.spawn(move || work(Star::join(path, rank, ranks, DEADLINE).unwrap()))
            })
            .collect();
        let first = work(listening.accept(ranks, DEADLINE, || true).unwrap());
        let others = others.into_iter().map(|other| other.join().unwrap());
        [first].into_iter().chain(others).collect()
    })
}

#[test]
fn parts_are_added_up_and_given_to_everyone() {
    for ranks in [1, 2, 4] {
        let found = on_ranks(ranks, |mut star| {
            let rank = star.rank as i64;
            // Element i of rank r is 10 i + r.
            let buffer = Tensor::arange(8, (Kind::Float, Device::Cpu)) * 10 + rank;
            star.reduce_scatter(&buffer).unwrap();
            star.all_gather(&buffer).unwrap();
            let mut numbers = [1.0, rank as f64];
            star.sum(&mut numbers).unwrap();
            let largest = star.largest(-1.0 - rank as f64).unwrap();
            (Vec::<f32>::try_from(&buffer).unwrap(), numbers, largest)
        });
        let all: f32 = (0..ranks).map(|rank| rank as f32).sum();
        let expected: Vec<f32> = (0..8).map(|i| 10.0 * i as f32 * ranks as f32 + all).collect();
        for (buffer, numbers, largest) in found {
            assert_eq!(buffer, expected, "{ranks} ranks");
            assert_eq!((numbers, largest), ([ranks as f64, f64::from(all)], -1.0));
        }
    }
}

#[test]
fn a_rank_that_ends_is_named_by_the_others() {
    let found = on_ranks(3, |mut star| {
        if star.rank == 2 {
            return None;
        }
        let buffer = Tensor::ones([6], (Kind::Float, Device::Cpu));
        Some(star.reduce_scatter(&buffer).unwrap_err())
    });
    let [Some(first), Some(second), None] = found.as_slice() else { panic!("{found:?}") };
    assert!(matches!(first, Error::Rank { rank: 2, .. }), "{first}");
    // Rank 0 has given up, and with it the connection.
    assert!(matches!(second, Error::Rank { rank: 0, .. }), "{second}");
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ranks");
    let listening = Listening::at(&path).unwrap();
    let _second = Star::join(&path, 2, 3, DEADLINE).unwrap();
    let error = listening.accept(3, Duration::from_millis(50), || true).unwrap_err();
    assert!(matches!(error, Error::Rank { rank: 1, what: "join", .. }), "{error}");
    let gone = Listening::at(&path).unwrap().accept(3, DEADLINE, || false).unwrap_err();
    assert!(gone.to_string().contains("its end"), "{gone}");
}

#[test]
fn two_that_say_they_are_one_rank_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ranks");
    let listening = Listening::at(&path).unwrap();
    let _both = [1, 1].map(|rank| Star::join(&path, rank, 3, DEADLINE).unwrap());
    assert!(matches!(listening.accept(3, DEADLINE, || true), Err(Error::Rank { .. })));
}

#[test]
fn a_rank_that_is_gone_is_noticed_without_waiting_for_it() {
    let found = on_ranks(2, |star| match star.rank {
        0 => loop {
            if let Err(error) = star.check("give its part") {
                break Some(error);
            }
            std::thread::yield_now();
        },
        _ => None,
    });
    assert!(matches!(&found[0], Some(Error::Rank { rank: 1, .. })), "{found:?}");
}
