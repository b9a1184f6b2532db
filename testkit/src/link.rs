//! A network link in user space: a TCP proxy with the rate, the delay and the failures that it is given.
//!
//! One wire a direction is shared by all connections, as a line between two places is. There is no loss and
//! no congestion control beside the host's own: a connection may use the whole rate from its first byte.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::random::Random;

/// Bytes that travel as one.
const CHUNK: usize = 16 << 10;
/// Chunks of one connection and direction that are on their way at most.
const CHUNKS_MAX: usize = 4096;
/// How much sending time a wire makes up for that its threads overslept.
const BURST: Duration = Duration::from_millis(4);
/// How long a disturbance may wait to be met.
const MEET_DEADLINE: Duration = Duration::from_secs(120);

/// What a link is like.
#[derive(Debug, Clone, Copy, Default)]
pub struct Shape {
    /// Bytes a second in each direction; `None` for no limit.
    pub rate: Option<u64>,
    /// Time from one end to the other, each way.
    pub delay: Duration,
    /// Up to so much more for each chunk of up to 16 KiB; chunks of a connection stay in order.
    pub jitter: Duration,
    /// What the jitter is drawn from.
    pub seed: u64,
}

/// What a link has carried.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Carried {
    /// Bytes from those who connected.
    pub up: u64,
    /// Bytes to them.
    pub down: u64,
    /// Connections taken.
    pub connections: u64,
}

/// A link to one address. Dropping it ends every connection.
#[derive(Debug)]
pub struct Link {
    addr: SocketAddr,
    wire: Arc<Wire>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Wire {
    shape: Shape,
    target: SocketAddr,
    state: Mutex<State>,
    changed: Condvar,
    carried: [AtomicU64; 2],
    connections: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    closed: bool,
    stalled: bool,
    partitioned: bool,
    /// Bytes that still go down before the connection that carries the next one ends.
    cut: Option<u64>,
    /// When each direction is free to send again.
    free: [Option<Instant>; 2],
    open: BTreeMap<u64, [TcpStream; 2]>,
    /// A stall, a partition or a cut was begun, and not healed.
    disturbed: bool,
    /// How often the last of them was met.
    met: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Up,
    Down,
}

impl Link {
    /// A link to `target`, on a loopback port of the system's choice.
    ///
    /// # Errors
    /// When there is no port to be had.
    pub fn to(target: SocketAddr, shape: Shape) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let addr = listener.local_addr()?;
        let (state, changed, carried, connections) = Default::default();
        let wire = Arc::new(Wire { shape, target, state, changed, carried, connections });
        let accepting = wire.clone();
        let acceptor = thread::spawn(move || accepting.accept(&listener));
        Ok(Self { addr, wire, acceptor: Some(acceptor) })
    }

    /// Where to connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// What has arrived at either end so far.
    pub fn carried(&self) -> Carried {
        let [up, down] = [Way::Up, Way::Down].map(|way| self.wire.carried[way as usize].load(SeqCst));
        Carried { up, down, connections: self.wire.connections.load(SeqCst) }
    }

    /// Lets nothing arrive any more; connections stay, and go on when the link is [healed](Link::heal).
    pub fn stall(&self) {
        let mut state = self.wire.lock();
        state.stalled = true;
        state.disturb();
    }

    /// Ends every connection, what is on its way included, and every new one at once, until the link is
    /// [healed](Link::heal).
    pub fn partition(&self) {
        let mut state = self.wire.lock();
        state.partitioned = true;
        state.disturb();
        state.end_all();
        self.wire.changed.notify_all();
    }

    /// Ends a stall or a partition, and every [wait](Link::await_met) for somebody to meet it, or a cut.
    pub fn heal(&self) {
        let mut state = self.wire.lock();
        (state.stalled, state.partitioned, state.disturbed) = (false, false, false);
        self.wire.changed.notify_all();
    }

    /// Waits until what was begun last was met so many times (bytes held by a stall, a connection ended at
    /// once by a partition, a cut made), or the link is [healed](Link::heal).
    ///
    /// # Panics
    /// If neither happens within two minutes.
    pub fn await_met(&self, times: u64) {
        let waiting = |state: &mut State| state.disturbed && state.met < times;
        let waited = self.wire.changed.wait_timeout_while(self.wire.lock(), MEET_DEADLINE, waiting);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        let met = state.met;
        drop(state);
        assert!(!timeout.timed_out(), "the link to {} was met {met} times, not {times}", self.wire.target);
    }

    /// Lets `bytes` more go down, over all connections, then ends the connection that carries the next one:
    /// once.
    pub fn cut_after(&self, bytes: u64) {
        let mut state = self.wire.lock();
        state.cut = Some(bytes);
        state.disturb();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        {
            let mut state = self.wire.lock();
            state.closed = true;
            state.end_all();
            self.wire.changed.notify_all();
        }
        // Wakes the acceptor; if it is gone already, nobody has to be woken.
        let _ = TcpStream::connect(self.addr);
        if let Some(acceptor) = self.acceptor.take() {
            // Should it have panicked, the hook has said so, and the test may be on its way down already.
            let _ = acceptor.join();
        }
    }
}

impl State {
    fn disturb(&mut self) {
        (self.disturbed, self.met) = (true, 0);
    }

    fn end_all(&mut self) {
        for ends in std::mem::take(&mut self.open).into_values() {
            end(&ends);
        }
    }
}

fn end(ends: &[TcpStream; 2]) {
    for stream in ends {
        // One that has ended already needs no end.
        let _ = stream.shutdown(Shutdown::Both);
    }
}

impl Wire {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn meet(&self, state: &mut State) {
        state.met += 1;
        self.changed.notify_all();
    }

    fn accept(self: Arc<Self>, listener: &TcpListener) {
        for (id, stream) in (1..).zip(listener.incoming()) {
            let Ok(client) = stream else { continue };
            let mut state = self.lock();
            if state.closed {
                return;
            }
            let partitioned = state.partitioned;
            if partitioned {
                self.meet(&mut state);
            }
            drop(state);
            self.connections.fetch_add(1, SeqCst);
            // A server that is away is a connection that ends at once, as through a partition.
            if !partitioned && let Ok(server) = TcpStream::connect(self.target) {
                // What cannot be carried is a connection that ends at once, too.
                let _ = self.join(id, client, server);
            }
        }
    }

    /// Carries both directions of a connection, on threads that end with it.
    fn join(self: &Arc<Self>, id: u64, client: TcpStream, server: TcpStream) -> std::io::Result<()> {
        for stream in [&client, &server] {
            stream.set_nodelay(true)?;
        }
        let up = (client.try_clone()?, server.try_clone()?);
        self.lock().open.insert(id, [client.try_clone()?, server.try_clone()?]);
        for (way, from, to) in [(Way::Up, up.0, up.1), (Way::Down, server, client)] {
            let (sender, receiver) = sync_channel(CHUNKS_MAX);
            let (sending, arriving) = (self.clone(), self.clone());
            thread::spawn(move || sending.send(way, id, from, &sender));
            thread::spawn(move || arriving.arrive(way, id, to, &receiver));
        }
        Ok(())
    }

    /// Takes bytes from one end and puts them on the wire, as fast as that is.
    fn send(&self, way: Way, id: u64, mut from: TcpStream, wire: &SyncSender<(Instant, Vec<u8>)>) {
        let mut random = Random(self.shape.seed ^ id << 1 ^ way as u64);
        let mut last = Instant::now();
        loop {
            let mut chunk = vec![0; CHUNK];
            let length = match from.read(&mut chunk) {
                Ok(0) | Err(_) => return,
                Ok(length) => length,
            };
            chunk.truncate(length);
            let sent = self.sent(way, length);
            // It stays where it is until it was sent, so that senders meet the rate and not a queue.
            thread::sleep(sent.saturating_duration_since(Instant::now()));
            last = last.max(sent + self.shape.delay + self.shape.jitter.mul_f64(random.unit()));
            if wire.send((last, chunk)).is_err() {
                return;
            }
        }
    }

    /// Reserves the wire and tells when the last of `length` bytes will be on it.
    fn sent(&self, way: Way, length: usize) -> Instant {
        let now = Instant::now();
        let Some(rate) = self.shape.rate else { return now };
        let takes = Duration::from_secs_f64(length as f64 / rate as f64);
        let mut state = self.lock();
        let free = &mut state.free[way as usize];
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let done = free.map_or(now, |free| free.max(earliest)) + takes;
        *free = Some(done);
        done
    }

    /// Takes bytes off the wire when they have arrived and gives them to the other end.
    fn arrive(&self, way: Way, id: u64, mut to: TcpStream, wire: &Receiver<(Instant, Vec<u8>)>) {
        for (at, mut chunk) in wire {
            thread::sleep(at.saturating_duration_since(Instant::now()));
            let Some(whole) = self.admit(way, id, &mut chunk) else { return };
            let written = to.write_all(&chunk).is_ok();
            self.carried[way as usize].fetch_add(chunk.len() as u64, SeqCst);
            if !written || !whole {
                if let Some(ends) = self.lock().open.remove(&id) {
                    end(&ends);
                }
                return;
            }
        }
        // The sender's end is passed on; the other direction may still be open.
        let _ = to.shutdown(Shutdown::Write);
    }

    /// Waits out a stall and shortens the chunk where the connection is to be cut; whether it stayed whole,
    /// or `None` if the connection has ended.
    fn admit(&self, way: Way, id: u64, chunk: &mut Vec<u8>) -> Option<bool> {
        let mut state = self.lock();
        if state.stalled {
            self.meet(&mut state);
        }
        let waiting = |state: &mut State| state.stalled && !state.closed && state.open.contains_key(&id);
        let mut state = self.changed.wait_while(state, waiting).unwrap_or_else(PoisonError::into_inner);
        if !state.open.contains_key(&id) {
            return None;
        }
        match state.cut.filter(|_| way == Way::Down) {
            Some(left) if left < chunk.len() as u64 => {
                chunk.truncate(left as usize);
                state.cut = None;
                self.meet(&mut state);
                Some(false)
            }
            Some(left) => {
                state.cut = Some(left - chunk.len() as u64);
                Some(true)
            }
            None => Some(true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that sends back what it gets.
    fn echo() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                thread::spawn(move || {
                    let mut from = stream.try_clone().unwrap();
                    let _ = std::io::copy(&mut from, &mut stream);
                    let _ = stream.shutdown(Shutdown::Write);
                });
            }
        });
        addr
    }

    fn body(length: usize) -> Vec<u8> {
        (0..length).map(|index| (index * 31 % 251) as u8).collect()
    }

    /// Sends everything and returns what comes back until the end, or until the connection breaks.
    fn round(link: &Link, bytes: &[u8]) -> Vec<u8> {
        let mut stream = TcpStream::connect(link.addr()).unwrap();
        let mut back = stream.try_clone().unwrap();
        thread::scope(|scope| {
            scope.spawn(move || {
                let _ = stream.write_all(bytes);
                let _ = stream.shutdown(Shutdown::Write);
            });
            let mut got = Vec::new();
            let mut chunk = [0; 4096];
            while let Ok(length @ 1..) = back.read(&mut chunk) {
                got.extend_from_slice(&chunk[..length]);
            }
            got
        })
    }

    #[test]
    fn bytes_arrive_as_sent_and_not_before_they_can() {
        let shape = Shape {
            rate: Some(4 << 20),
            delay: Duration::from_millis(30),
            jitter: Duration::from_millis(5),
            seed: 7,
        };
        let link = Link::to(echo(), shape).unwrap();
        let bytes = body(1 << 20);
        let begin = Instant::now();
        assert!(round(&link, &bytes) == bytes);
        // Both directions overlap; the burst is given away once each.
        assert!(begin.elapsed() >= Duration::from_millis(250 + 60) - 2 * BURST, "{:?}", begin.elapsed());
        assert_eq!(link.carried(), Carried { up: 1 << 20, down: 1 << 20, connections: 1 });
    }

    #[test]
    fn the_rate_is_shared_by_all_connections() {
        let link = Link::to(echo(), Shape { rate: Some(4 << 20), ..Shape::default() }).unwrap();
        let begin = Instant::now();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert_eq!(round(&link, &body(256 << 10)).len(), 256 << 10));
            }
        });
        assert!(begin.elapsed() >= Duration::from_millis(250) - BURST, "{:?}", begin.elapsed());
    }

    #[test]
    fn a_cut_comes_at_its_byte_and_only_once() {
        let link = Link::to(echo(), Shape::default()).unwrap();
        for at in [0, 1, 70_001] {
            link.cut_after(at);
            assert_eq!(round(&link, &body(200_000)), body(at as usize), "cut at {at}");
            link.await_met(1);
            assert_eq!(round(&link, &body(100)), body(100));
        }
    }

    #[test]
    fn a_stall_holds_everything_and_loses_nothing() {
        let link = Link::to(echo(), Shape::default()).unwrap();
        let mut stream = TcpStream::connect(link.addr()).unwrap();
        link.stall();
        stream.write_all(&body(50_000)).unwrap();
        link.await_met(1);
        stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let mut got = vec![0; 50_000];
        assert!(stream.read(&mut got).is_err());
        assert_eq!(link.carried().down, 0);
        link.heal();
        stream.set_read_timeout(None).unwrap();
        stream.read_exact(&mut got).unwrap();
        assert_eq!(got, body(50_000));
    }

    #[test]
    fn a_partition_ends_what_is_there_and_what_comes_until_it_heals() {
        let link = Link::to(echo(), Shape::default()).unwrap();
        let mut stream = TcpStream::connect(link.addr()).unwrap();
        stream.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
        link.partition();
        assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)));
        assert_eq!(round(&link, b"lost"), b"");
        link.await_met(1);
        thread::scope(|scope| {
            // Nobody comes a second time: only healing ends the wait.
            let waiting = scope.spawn(|| link.await_met(2));
            link.heal();
            waiting.join().unwrap();
        });
        assert_eq!(round(&link, b"found"), b"found");
    }
}
