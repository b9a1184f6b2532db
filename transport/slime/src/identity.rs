//! Identities for versions that have none of their own.
//!
//! They follow from the bytes in the directories. Every host derives the same ones, and a directory that was
//! replaced gets another.

use driftless_store::ContentDigest;
use driftless_transport::foreign::Tables;
use driftless_transport::manifest::{Algorithms, FORMAT, Features, Kind, Manifest, Representation, Tensor};
use driftless_transport::run::Committed;
use driftless_transport::{Checkpoint, Result, RunId, Version};

use crate::release::Release;

/// BLAKE3 over fields that cannot run into each other.
struct Fields(blake3::Hasher);

impl Fields {
    fn new(domain: &str) -> Self {
        let mut fields = Self(blake3::Hasher::new());
        fields.push(domain.as_bytes());
        fields
    }

    fn push(&mut self, field: &[u8]) {
        self.0.update(&(field.len() as u64).to_le_bytes());
        self.0.update(field);
    }

    fn digest(self) -> ContentDigest {
        ContentDigest::from_bytes(*self.0.finalize().as_bytes())
    }
}

/// What a version's directory says: its number and what each of its tensors becomes. How the bytes are packed
/// does not matter.
pub(crate) fn content(release: &Release) -> ContentDigest {
    let mut fields = Fields::new("driftless slime version 1");
    fields.push(&release.version.0.to_le_bytes());
    fields.push(release.checksum.name().as_bytes());
    for (name, frame) in &release.tensors {
        fields.push(name.as_bytes());
        fields.push(frame.checksum.as_bytes());
    }
    fields.digest()
}

/// The identity of a version: its content, and the version it follows.
pub(crate) fn link(base: ContentDigest, content: ContentDigest) -> ContentDigest {
    let mut fields = Fields::new("driftless slime link 1");
    fields.push(base.as_bytes());
    fields.push(content.as_bytes());
    fields.digest()
}

/// A run is known by the content of its version 1.
pub(crate) fn run_id(content: ContentDigest) -> RunId {
    first_half(content)
}

fn first_half(digest: ContentDigest) -> RunId {
    let mut id = [0; 16];
    id.copy_from_slice(&digest.as_bytes()[..16]);
    RunId::from_bytes(id)
}

/// The identity of version 0: names, types, shapes and digests of its tensors. Every run that starts from
/// these weights has this version 0.
fn base(tensors: &[Tensor]) -> ContentDigest {
    let mut fields = Fields::new("driftless slime base 1");
    for tensor in tensors {
        fields.push(tensor.name.as_bytes());
        fields.push(tensor.dtype.name().as_bytes());
        let shape: Vec<u8> = tensor.shape.iter().flat_map(|extent| extent.to_le_bytes()).collect();
        fields.push(&shape);
        fields.push(&tensor.digest.to_bytes());
    }
    fields.digest()
}

/// True if `manifest` stands for a version 0 of this module's making.
pub(crate) fn is_base(manifest: &Manifest, digest: ContentDigest) -> bool {
    base(&manifest.tensors) == digest
}

/// Version 0, by reference to a checkpoint directory. Hashes every tensor.
pub(crate) fn base_link(checkpoint: &Checkpoint, model: &str) -> Result<Committed> {
    let Tables { tensors, files, changed } = Tables::of(checkpoint)?;
    let digest = base(&tensors);
    let manifest = Manifest {
        format: FORMAT,
        run_id: first_half(digest),
        model: model.to_owned(),
        version: Version(0),
        kind: Kind::Reference,
        representation: Representation { scheme: "checkpoint".to_owned(), config_digest: None },
        base: None,
        trainer_step: 0,
        checkpoint: None,
        created: 0,
        changed,
        algorithms: Algorithms::default(),
        features: Features::default(),
        objects: Vec::new(),
        tensors,
        files,
    };
    Ok(Committed::new(manifest, digest))
}
