//! The GPUs that a publisher encodes on.

use crate::work;
use driftless::delta::Element;
use driftless::delta::cuda::{self, Codec};
use driftless::transport::Publisher;
use driftless::transport::publish::BaseMemory;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

pub(crate) struct Gpus {
    /// Where they keep the base of the next delta; `None`: tensors on GPUs are copied to the host.
    base: Option<BaseMemory>,
    /// Those that were opened, and why nothing is encoded there.
    opened: Mutex<BTreeMap<usize, Option<String>>>,
}

impl Gpus {
    pub(crate) fn new(base: Option<BaseMemory>) -> Self {
        Self { base, opened: Mutex::default() }
    }

    /// Whether tensors on them are encoded there.
    pub(crate) fn encode(&self) -> bool {
        self.base.is_some()
    }

    /// Opens those that tensors lie on, and says why one of them cannot be used.
    pub(crate) fn open(
        &self,
        publisher: &mut Publisher,
        tensors: impl Iterator<Item = (usize, Element)>,
    ) -> Option<String> {
        let base = self.base?;
        let mut found: BTreeMap<usize, BTreeSet<Element>> = BTreeMap::new();
        for (device, element) in tensors {
            found.entry(device).or_default().insert(element);
        }
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        let mut because = None;
        for (device, elements) in found {
            let opened = opened.entry(device).or_insert_with(|| {
                let open = |codec: Codec| {
                    // Some seconds, which the first delta would take longer.
                    elements.iter().try_for_each(|&element| codec.prepare(element))?;
                    publisher.encode_on(codec, base)
                };
                Codec::open(device).and_then(open).err().map(|error: cuda::Error| error.to_string())
            });
            because = because.or_else(|| opened.clone());
        }
        because
    }

    /// Opens one before there are tensors on it, and has it compile what the newest version of `model` needs, while
    /// a trainer makes its first step. What is wrong with it, the first publication from there says.
    pub(crate) fn warm_up(&self, publisher: &mut Publisher, model: &str, device: usize) {
        let (Some(base), Some(version)) = (self.base, publisher.version()) else { return };
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(newest) = publisher.run().get(model, version) else { return };
        let codecs = Codec::open(device).and_then(|codec| Ok((codec.fork()?, codec)));
        let (false, Ok((compiling, codec))) = (opened.contains_key(&device), codecs) else { return };
        if publisher.encode_on(codec, base).is_ok() {
            opened.insert(device, None);
            let elements: BTreeSet<Element> =
                newest.manifest.tensors.iter().map(|tensor| tensor.dtype.element()).collect();
            work::beside(move || elements.into_iter().for_each(|element| drop(compiling.prepare(element))));
        }
    }
}
