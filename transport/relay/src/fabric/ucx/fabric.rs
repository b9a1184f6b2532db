//! UCX as a [`Fabric`].

use super::{Bucket, Ucx, UcxLink};
use crate::error::{Error, Result};
use crate::fabric::{Fabric, Link, Wait};

impl Fabric for Ucx {
    fn scheme(&self) -> &'static str {
        "ucx"
    }

    fn link(&self, peer: &str) -> Result<Box<dyn Link>> {
        Ok(Box::new(Single { link: Self::link(self, peer)?, memory: None }))
    }
}

/// A link with one transfer at a time.
struct Single {
    link: UcxLink,
    memory: Option<Bucket>,
}

impl Single {
    fn take(&mut self, action: &'static str) -> Result<Bucket> {
        let missing = || Error::Link {
            peer: self.link.peer().to_owned(),
            action,
            status: "the link has no memory".to_owned(),
        };
        self.memory.take().ok_or_else(missing)
    }
}

impl Link for Single {
    fn address(&self) -> Result<Vec<u8>> {
        self.link.address()
    }

    fn connect(&mut self, address: &[u8]) -> Result<()> {
        self.link.connect(address)
    }

    fn memory(&mut self, bytes: usize) -> Result<&mut [u8]> {
        let kept = match self.memory.take() {
            Some(kept) if kept.len() >= bytes => kept,
            _ => self.link.bucket(bytes)?,
        };
        Ok(self.memory.insert(kept))
    }

    fn release(&mut self) {
        self.memory = None;
    }

    fn send(&mut self, bytes: usize, tag: u64, wait: &mut Wait<'_>) -> Result<()> {
        let bucket = self.take("send to")?;
        let ticket = self.link.send(bucket, 0..bytes, tag)?;
        self.memory = Some(self.link.finish(ticket, wait.deadline, wait.watch)?.0);
        Ok(())
    }

    fn receive(&mut self, bytes: usize, tag: u64, wait: &mut Wait<'_>) -> Result<usize> {
        let bucket = self.take("receive from")?;
        let ticket = self.link.receive(bucket, 0..bytes, tag)?;
        let (bucket, length) = self.link.finish(ticket, wait.deadline, wait.watch)?;
        self.memory = Some(bucket);
        Ok(length)
    }
}
