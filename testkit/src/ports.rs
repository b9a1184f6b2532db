//! Ports for servers that tests start as processes of their own.

use std::io;
use std::net::TcpListener;
use std::ops::{Range, RangeInclusive};
use std::sync::{LazyLock, Mutex, PoisonError};

/// Below what systems give away by default.
const PORTS: Range<u16> = 10_000..30_000;

/// The ports in turn that this process has not given away.
static LEFT: LazyLock<Mutex<Box<dyn Iterator<Item = u16> + Send>>> =
    LazyLock::new(|| Mutex::new(Box::new(turn(std::process::id().wrapping_mul(131), given_away()))));

/// A port that was free a moment ago, and that this process gives once: a server may take half a minute until it listens,
/// and until then another one would find it free. It is none of those that the system gives to whatever asks for any,
/// unless the system gives away all.
///
/// # Errors
/// `AddrInUse` if all are in use.
pub fn free() -> io::Result<u16> {
    let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
    let bound = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    left.find(bound).ok_or_else(|| io::ErrorKind::AddrInUse.into())
}

/// The ports in turn, from one that follows from `start`: those first that the system does not give away.
fn turn(start: u32, given_away: Option<RangeInclusive<u16>>) -> impl Iterator<Item = u16> {
    let count = PORTS.len() as u32;
    let all = (0..count).map(move |nth| PORTS.start + ((start % count + nth) % count) as u16);
    let is_kept = move |port: &u16| given_away.as_ref().is_none_or(|given_away| !given_away.contains(port));
    all.clone().filter(is_kept).chain(all)
}

/// The ports that the system gives away, where it says so.
fn given_away() -> Option<RangeInclusive<u16>> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    let mut ends = text.split_whitespace().map(|end| end.parse().ok());
    Some(ends.next()??..=ends.next()??)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_port_is_none_that_the_system_gives_away() {
        let all = |given_away: &RangeInclusive<u16>| PORTS.into_iter().all(|port| given_away.contains(&port));
        let Some(given_away) = given_away().filter(|given_away| !all(given_away)) else {
            return println!("skipped: the system does not say what it gives away, or gives away all");
        };
        for _ in 0..100 {
            let port = free().unwrap();
            assert!(PORTS.contains(&port) && !given_away.contains(&port), "{port} of {given_away:?}");
        }
    }

    #[test]
    fn free_port_behind_one_that_is_taken_is_given_once() {
        let _taken = TcpListener::bind(("127.0.0.1", free().unwrap() + 1));
        let mut ports: Vec<u16> = (0..5).map(|_| free().unwrap()).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 5);
    }

    #[test]
    fn turn_has_ports_that_are_not_given_away_first() {
        let mut ports: Vec<u16> = turn(7_777_777, Some(12_345..=60_999)).take(2_345).collect();
        ports.sort_unstable();
        assert_eq!(ports, (10_000..12_345).collect::<Vec<_>>());
    }

    #[test]
    fn turn_where_all_or_none_are_given_away_has_every_port() {
        for given_away in [None, Some(32_768..=60_999), Some(1_024..=65_535)] {
            let mut ports: Vec<u16> = turn(u32::MAX - 3, given_away).take(PORTS.len()).collect();
            ports.sort_unstable();
            assert_eq!(ports, PORTS.collect::<Vec<_>>());
        }
    }
}
