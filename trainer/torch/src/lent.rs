//! The policy's weights on the learner's device, lent to the publisher: only payloads leave the GPU.
#![expect(unsafe_code, reason = "the codec reads memory that libtorch owns")]

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};

use driftless_delta::Element;
use driftless_delta::cuda::{self, Codec};
use driftless_transport::snapshot::{AuxFile, TensorInfo};
use driftless_transport::{self as transport, Snapshot};
use tch::{Device, Kind, Tensor};

use crate::error::{Result, input};
use crate::libtorch::{bytes_of, synchronize};
use crate::snapshot::published;
use crate::trained::Trained;

/// Lends the weights of one learner, at most once at a time.
#[derive(Debug)]
pub(crate) struct Lender {
    codec: Codec,
    /// Shared with the weights that are lent, as long as they are.
    lent: Arc<()>,
}

impl Lender {
    /// Opens the device that the weights are on, if they are on one in the dtype that is published, the layers'
    /// matrices as such or in `fp8`. Weights in another dtype are copied to the host one by one: a copy of all would
    /// take memory of which training has none to spare. A device that cannot encode is told of in the log.
    pub(crate) fn open(trained: &Trained, fp8: bool) -> Option<Lender> {
        let (Device::Cuda(ordinal), kind) = (trained.model.device(), trained.model.kind()) else {
            return None;
        };
        if kind != trained.optimizer.rounded() {
            return None;
        }
        // Some seconds, which the first delta would take longer.
        let opened = Codec::open(ordinal).and_then(|codec| {
            elements(kind, fp8).iter().try_for_each(|&element| codec.prepare(element))?;
            Ok(Lender::with(codec))
        });
        opened
            .inspect_err(|error| tracing::warn!(%error, "weights are copied to the host and encoded there"))
            .ok()
    }

    pub(crate) fn with(codec: Codec) -> Lender {
        Lender { codec, lent: Arc::default() }
    }

    /// One more codec of the device.
    pub(crate) fn codec(&self) -> Option<Codec> {
        self.codec.fork().inspect_err(|error| tracing::warn!(%error, "weights are encoded on the host")).ok()
    }

    /// Lends the weights, or in `fp8` what is made of them on the device, which takes half as much memory.
    ///
    /// # Errors
    /// [`crate::Error::Kernels`] if what libtorch has queued on the device fails; [`crate::Error::Torch`] if there is
    /// no memory for fp8; [`crate::Error::Input`] if the weights are not there.
    pub(crate) fn lend(&self, trained: &Trained, files: Vec<AuxFile>, fp8: bool) -> Result<LentWeights> {
        let (expected, found) = (trained.model.device(), trained.model.flat.device());
        if found != expected {
            let (expected, found) = (format!("{expected:?}"), format!("{found:?}"));
            return Err(input("where the weights are", expected, found));
        }
        let parts = || published(&trained.model, trained.model.kind(), fp8).collect::<Result<Vec<_>>>();
        #[cfg(test)]
        let parts = || tests::FAULT.get().map_or_else(parts, |fault| Err(fault()));
        let parts = parts()?;
        if let Device::Cuda(ordinal) = found {
            synchronize(ordinal)?;
        }
        let place = |(_, part): &(TensorInfo, Tensor)| {
            let bytes = part.numel() * part.f_kind()?.elt_size_in_bytes();
            // SAFETY: a part is one of the model's buffer without gaps, or a contiguous tensor of `quantize`. It is on
            // the codec's device and lives as long as `parts` below: so many bytes lie there. What libtorch had queued
            // has ended, and nothing writes the weights but a step, which `check` refuses while these are lent.
            Ok(unsafe { cuda::Tensor::borrowed(self.codec.device(), part.data_ptr() as u64, bytes) })
        };
        let on_device = parts.iter().map(place).collect::<Result<_>>()?;
        let (infos, parts) = parts.into_iter().unzip();
        Ok(LentWeights { infos, on_device, parts: Mutex::new(parts), files, _lent: self.lent.clone() })
    }

    /// Refuses to have weights written that are lent.
    ///
    /// # Errors
    /// [`crate::Error::Input`].
    pub(crate) fn check(&self) -> Result<()> {
        match Arc::strong_count(&self.lent) {
            1 => Ok(()),
            _ => Err(input("the last snapshot of the weights", "dropped before the next step", "in use")),
        }
    }
}

/// What a version is made of.
fn elements(kind: Kind, fp8: bool) -> &'static [Element] {
    match (kind, fp8) {
        (Kind::BFloat16, false) => &[Element::Bf16],
        (Kind::BFloat16, true) => &[Element::F8E4M3, Element::F32, Element::Bf16],
        (_, false) => &[Element::F32],
        (_, true) => &[Element::F8E4M3, Element::F32],
    }
}

/// A version on the device where the learner has it.
#[derive(Debug)]
pub(crate) struct LentWeights {
    infos: Vec<TensorInfo>,
    on_device: Vec<cuda::Tensor>,
    /// The same tensors, for libtorch.
    parts: Mutex<Vec<Tensor>>,
    files: Vec<AuxFile>,
    _lent: Arc<()>,
}

impl Snapshot for LentWeights {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn bytes(&self, index: usize) -> transport::Result<Cow<'_, [u8]>> {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        bytes_of(&parts[index]).map(Cow::Owned).map_err(|error| transport::Error::HostCopy {
            tensor: self.infos[index].name.clone(),
            source: error.into(),
        })
    }

    fn on_device(&self, index: usize) -> Option<&cuda::Tensor> {
        self.on_device.get(index)
    }

    fn files(&self) -> &[AuxFile] {
        &self.files
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;
    use std::path::Path;
    use std::sync::Arc;

    use driftless_store::{Memory, Store};
    use driftless_testkit::compiler;
    use driftless_transport::publish::{BaseMemory, Mode, PublisherOptions, Start, Step};
    use driftless_transport::{Publisher, Run};

    use super::*;
    use crate::error::Error;
    use crate::models::Model;
    use crate::models::tests::{Family, config};
    use crate::optimizer::AdamWOptions;
    use crate::policy::Policy;
    use crate::snapshot::collect;

    thread_local! {
        /// What is wrong with a device on which nothing can be made to be lent.
        pub(crate) static FAULT: Cell<Option<fn() -> Error>> = const { Cell::new(None) };
    }

    fn policy(kind: Kind) -> Policy {
        let model = Model::fresh(config(Family::Qwen3, true), 1, kind, Device::Cpu).unwrap();
        Policy::new(model, kind, AdamWOptions::default()).unwrap()
    }

    /// A lender whose device is this processor, and so reaches the memory of libtorch's CPU tensors; `None` without a
    /// compiler for its kernels.
    fn lender(kind: Kind) -> Option<Lender> {
        let codec = Codec::twin(0, 1 << 30);
        let mut prepared = elements(kind, true).iter().map(|&element| codec.prepare(element));
        let refused = prepared.find_map(Result::err).inspect(|error| compiler::missing(error));
        drop(prepared);
        refused.is_none().then(|| Lender::with(codec))
    }

    /// Moves an element in some by a place.
    fn step(policy: &Policy) {
        for (nth, weight) in policy.model().parameters().iter().enumerate() {
            let every = 5 + nth as i64;
            let mut some = weight.tensor.flatten(0, -1).slice(0, 0, None, every);
            tch::no_grad(|| some.copy_(&(&some * 1.02)));
        }
    }

    fn publisher(store: &Arc<dyn Store>, dir: &Path) -> Publisher {
        let options = PublisherOptions::new("test", Start::NewRun, dir);
        Publisher::open(store.clone(), options).unwrap()
    }

    /// Every object of a version but the time of its manifest.
    fn stored(store: &Arc<dyn Store>, version: u64) -> (Vec<Vec<u8>>, String) {
        let run = Run::open(store.clone(), "test").unwrap();
        let manifest = run.get("policy", transport::Version(version)).unwrap().manifest;
        let objects = manifest.objects.iter().map(|object| store.get(&object.key, None).unwrap());
        (objects.collect(), format!("{:?}", manifest.tensors))
    }

    /// Three versions, from where the weights are and from a copy.
    fn assert_same_publications(kind: Kind, fp8: bool) {
        let Some(lender) = lender(kind) else { return };
        let policy = policy(kind);
        let dir = tempfile::tempdir().unwrap();
        let stores: [Arc<dyn Store>; 2] = std::array::from_fn(|_| Arc::new(Memory::new()) as _);
        let [mut from_device, mut from_host] =
            [0, 1].map(|n| publisher(&stores[n], &dir.path().join(n.to_string())));
        from_device.encode_on(lender.codec().unwrap(), BaseMemory::Device).unwrap();
        for version in 0..3 {
            let copy = collect(published(policy.model(), kind, fp8), &[]).unwrap();
            from_host.publish(&copy, Step::default(), Mode::Delta).unwrap();
            let lent = lender.lend(&policy.trained, Vec::new(), fp8).unwrap();
            from_device.publish(&lent, Step::default(), Mode::Delta).unwrap();
            let bytes: u64 = copy.tensors().iter().map(|info| info.byte_len().unwrap()).sum();
            let expected = if version == 0 { 0 } else { bytes };
            let used = from_device.device_use();
            assert_eq!(used.device_bytes, expected, "{kind:?} {version}: {used:?}");
            let [a, b] = stores.each_ref().map(|store| stored(store, version));
            assert!(!a.0.is_empty() && a == b, "{kind:?} version {version}");
            drop(lent);
            step(&policy);
        }
    }

    #[test]
    fn publications_of_lent_weights_equal_a_copys() {
        for kind in [Kind::BFloat16, Kind::Float] {
            assert_same_publications(kind, false);
        }
    }

    #[test]
    fn publications_of_lent_fp8_weights_equal_a_copys() {
        for kind in [Kind::BFloat16, Kind::Float] {
            assert_same_publications(kind, true);
        }
    }

    #[test]
    fn lent_weights_are_not_written_before_their_return() {
        let Some(lender) = lender(Kind::Float) else { return };
        let policy = policy(Kind::Float);
        let lent = lender.lend(&policy.trained, Vec::new(), false).unwrap();
        assert!(matches!(lender.check(), Err(Error::Input { .. })));
        drop(lent);
        lender.check().unwrap();
    }
}
