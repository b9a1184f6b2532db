//! More connections than a server has descriptors.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A flood that has opened nothing for so long stands still.
const STILL: Duration = Duration::from_secs(120);

/// Keeps as many connections as it can, each with the beginning of a request and a byte more now and then.
/// One that is closed is opened anew. It ends when it is dropped.
pub struct Flood {
    opened: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    /// `connections` at a time, which begin in turn with these bytes.
    pub fn of(address: SocketAddr, connections: usize, beginnings: &'static [&'static str]) -> Self {
        let (opened, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (count, end) = (opened.clone(), stop.clone());
        let thread = thread::spawn(move || {
            let mut held: Vec<Option<TcpStream>> = (0..connections).map(|_| None).collect();
            while !end.load(Relaxed) {
                for stream in &mut held {
                    if stream.as_mut().is_none_or(is_over) {
                        let number = count.fetch_add(1, Relaxed) as usize;
                        *stream = begin(address, beginnings[number % beginnings.len()]);
                    }
                }
                // Beside it, others want to run as well.
                thread::sleep(Duration::from_millis(1));
            }
        });
        Self { opened, stop, thread: Some(thread) }
    }

    /// Waits until so many connections have been opened, or were tried to.
    ///
    /// # Panics
    /// If none is tried for two minutes.
    pub fn reaches(&self, count: u64) {
        let (mut seen, mut since) = (0, Instant::now());
        loop {
            match self.opened.load(Relaxed) {
                now if now >= count => return,
                now if now > seen => (seen, since) = (now, Instant::now()),
                now => assert!(since.elapsed() < STILL, "the flood stands still at {now} connections"),
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

fn begin(address: SocketAddr, bytes: &str) -> Option<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1)).ok()?;
    stream.write_all(bytes.as_bytes()).ok()?;
    stream.set_nonblocking(true).ok()?;
    Some(stream)
}

fn is_over(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0; 512]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() != ErrorKind::WouldBlock || stream.write(b"a").is_err(),
    }
}
