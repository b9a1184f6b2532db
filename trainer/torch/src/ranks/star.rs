//! Unix sockets between rank 0 and every other rank: everything goes through rank 0, which adds up in the
//! order of the ranks.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::RecvFlags;
use tch::{Device, Tensor};

use super::{Exchange, part};
use crate::error::{Error, Result, input, io};
use crate::libtorch::{bytes_of, tensor_of};

/// Time between two looks at what does not wake us.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Rank 0, before the others have come.
#[derive(Debug)]
pub(crate) struct Listening(UnixListener);

/// A rank's connections.
#[derive(Debug)]
pub(crate) struct Star {
    pub(super) rank: usize,
    ranks: usize,
    /// Of rank 0: those of the others, in order. Of another: that to rank 0.
    peers: Vec<UnixStream>,
    pub(super) deadline: Duration,
}

impl Listening {
    /// Takes the place of whatever socket is at `path`.
    pub(crate) fn at(path: &Path) -> Result<Listening> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(io("remove", path)(error)),
            _ => {}
        }
        let listener = UnixListener::bind(path).map_err(io("listen on", path))?;
        listener.set_nonblocking(true).map_err(io("listen on", path))?;
        Ok(Listening(listener))
    }

    /// Waits for the other ranks, as long as `hopeful`.
    pub(crate) fn accept(self, ranks: usize, deadline: Duration, hopeful: impl Fn() -> bool) -> Result<Star> {
        let (end, mut peers) = (Instant::now() + deadline, Vec::new());
        peers.resize_with(ranks.saturating_sub(1), || None);
        while let Some(missing) = peers.iter().position(Option::is_none) {
            let failed = |found: String| Error::Rank { rank: missing + 1, what: "join", found };
            match self.0.accept() {
                Ok((mut stream, _)) => {
                    prepare(&stream, deadline).map_err(|error| failed(error.to_string()))?;
                    let mut rank = [0; 8];
                    stream.read_exact(&mut rank).map_err(|error| failed(error.to_string()))?;
                    let place = usize::try_from(u64::from_le_bytes(rank)).ok();
                    let place = place.and_then(|rank| peers.get_mut(rank.checked_sub(1)?));
                    match place {
                        Some(place) if place.is_none() => *place = Some(stream),
                        _ => return Err(failed(format!("another that says it is rank {rank:?}"))),
                    }
                }
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(failed(error.to_string())),
                Err(_) if !hopeful() => return Err(failed("its end".to_owned())),
                Err(_) if Instant::now() >= end => {
                    return Err(failed(format!("nothing after {} s", deadline.as_secs_f64())));
                }
                Err(_) => std::thread::sleep(LOOK_EVERY),
            }
        }
        Ok(Star { rank: 0, ranks, peers: peers.into_iter().flatten().collect(), deadline })
    }
}

fn prepare(stream: &UnixStream, deadline: Duration) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(deadline))?;
    stream.set_write_timeout(Some(deadline))
}

impl Star {
    /// Another rank than 0, which listens at `path`.
    pub(crate) fn join(path: &Path, rank: usize, ranks: usize, deadline: Duration) -> Result<Star> {
        let mut stream = UnixStream::connect(path).map_err(io("connect to", path))?;
        let hello = prepare(&stream, deadline).and_then(|()| stream.write_all(&(rank as u64).to_le_bytes()));
        hello.map_err(io("write to", path))?;
        Ok(Star { rank, ranks, peers: vec![stream], deadline })
    }

    /// Whether every rank that this one is connected to is still there; else it would not do `what`.
    pub(crate) fn check(&self, what: &'static str) -> Result<()> {
        for (peer, stream) in self.peers.iter().enumerate() {
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            match rustix::net::recv(stream, &mut [0; 1], flags) {
                Ok((_, 0)) => return Err(self.lost(peer, what, &ErrorKind::UnexpectedEof.into())),
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(self.lost(peer, what, &error.into())),
            }
        }
        Ok(())
    }

    /// That the deadline was over before some rank did `what`.
    pub(crate) fn late(&self, what: &'static str) -> Error {
        let rank = usize::from(self.rank == 0);
        Error::Rank { rank, what, found: format!("nothing after {} s", self.deadline.as_secs_f64()) }
    }

    fn send(&mut self, peer: usize, bytes: &[u8]) -> Result<()> {
        let sent = self.peers[peer].write_all(bytes);
        sent.map_err(|error| self.lost(peer, "take what it is given", &error))
    }

    fn receive(&mut self, peer: usize, bytes: &mut [u8]) -> Result<()> {
        let received = self.peers[peer].read_exact(bytes);
        received.map_err(|error| self.lost(peer, "give its part", &error))
    }

    fn lost(&self, peer: usize, what: &'static str, error: &std::io::Error) -> Error {
        let rank = if self.rank == 0 { peer + 1 } else { 0 };
        let found = match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                format!("nothing after {} s", self.deadline.as_secs_f64())
            }
            _ => format!("the end of its connection ({error})"),
        };
        Error::Rank { rank, what, found }
    }

    /// This rank's part of a buffer in host memory.
    fn part(&self, buffer: &Tensor, rank: usize) -> Result<Tensor> {
        if buffer.device() != Device::Cpu {
            let found = format!("{:?}", buffer.device());
            return Err(input("what ranks exchange over sockets", "host memory", found));
        }
        let part = part(buffer.numel() as i64, rank, self.ranks);
        Ok(buffer.f_narrow(0, part.start, part.end - part.start)?)
    }

    fn receive_tensor(&mut self, peer: usize, like: &Tensor) -> Result<Tensor> {
        let kind = like.f_kind()?;
        let mut bytes = vec![0; like.numel() * kind.elt_size_in_bytes()];
        self.receive(peer, &mut bytes)?;
        tensor_of(&bytes, &like.size(), kind)
    }

    /// Adds what all others send to a tensor, in the order of the ranks.
    fn add_peers(&mut self, sum: &mut Tensor) -> Result<()> {
        for peer in 0..self.peers.len() {
            let theirs = self.receive_tensor(peer, sum)?;
            let _ = sum.f_add_(&theirs)?;
        }
        Ok(())
    }
}

impl Exchange for Star {
    fn place(&self) -> (usize, usize) {
        (self.rank, self.ranks)
    }

    fn reduce_scatter(&mut self, buffer: &Tensor) -> Result<()> {
        let mut own = self.part(buffer, self.rank)?;
        if self.rank > 0 {
            self.send(0, &bytes_of(buffer)?)?;
            let sum = self.receive_tensor(0, &own)?;
            return Ok(own.f_copy_(&sum)?);
        }
        self.add_peers(&mut buffer.shallow_clone())?;
        for peer in 0..self.peers.len() {
            let theirs = self.part(buffer, peer + 1)?;
            self.send(peer, &bytes_of(&theirs)?)?;
        }
        Ok(())
    }

    fn all_gather(&mut self, buffer: &Tensor) -> Result<()> {
        if self.rank > 0 {
            let own = self.part(buffer, self.rank)?;
            self.send(0, &bytes_of(&own)?)?;
            let all = self.receive_tensor(0, buffer)?;
            return Ok(buffer.shallow_clone().f_copy_(&all)?);
        }
        for peer in 0..self.peers.len() {
            let mut place = self.part(buffer, peer + 1)?;
            let theirs = self.receive_tensor(peer, &place)?;
            place.f_copy_(&theirs)?;
        }
        let all = bytes_of(buffer)?;
        (0..self.peers.len()).try_for_each(|peer| self.send(peer, &all))
    }

    fn sum(&mut self, numbers: &mut [f64]) -> Result<()> {
        let mut sum = Tensor::f_from_slice(numbers)?;
        if self.rank > 0 {
            self.send(0, &bytes_of(&sum)?)?;
            sum = self.receive_tensor(0, &sum)?;
        } else {
            self.add_peers(&mut sum)?;
            let bytes = bytes_of(&sum)?;
            (0..self.peers.len()).try_for_each(|peer| self.send(peer, &bytes))?;
        }
        Ok(sum.f_copy_data(numbers, numbers.len())?)
    }
}
