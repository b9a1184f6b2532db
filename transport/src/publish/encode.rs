//! Turning a snapshot into payloads and the manifest's tables.

use std::collections::BTreeMap;

use driftless_delta::{BLOCK_ELEMENTS, Digest, DigestTable, Profile};

use super::plan::{Plan, tensor_bytes};
use super::upload::Packer;
use super::{Progress, ProgressFn};
use crate::manifest::{File, Kind, Manifest, Part, Piece, Tensor};
use crate::{Checkpoint, ContentDigest, Dtype, Error, Replica, Result, Snapshot, TensorInfo};

/// Where a piece of a tensor too large for one object may be cut, in bytes: whole blocks of every element type.
pub(super) const PIECE_UNIT: usize = BLOCK_ELEMENTS * 8;

/// The base of a delta: the manifest, and the bytes and digests behind it.
pub(super) struct BaseView<'a> {
    manifest: &'a Manifest,
    replica: &'a Replica,
    checkpoint: &'a Checkpoint,
    /// Under which name the replica keeps the digests of each tensor.
    main_names: BTreeMap<&'a str, &'a str>,
}

impl<'a> BaseView<'a> {
    pub(super) fn new(manifest: &'a Manifest, replica: &'a Replica, checkpoint: &'a Checkpoint) -> Self {
        let named = manifest.named_tensors();
        let main_names = named.into_iter().map(|(name, tensor)| (name, tensor.name.as_str())).collect();
        Self { manifest, replica, checkpoint, main_names }
    }

    fn tensor(&self, name: &str) -> Option<(&'a [u8], &'a DigestTable)> {
        let bytes = self.checkpoint.tensor(self.checkpoint.position(name)?)?;
        Some((bytes, self.replica.digests(self.main_names.get(name)?)?))
    }
}

/// The manifest's tables, as far as the snapshot decides them.
pub(super) struct Tables {
    pub(super) tensors: Vec<Tensor>,
    pub(super) files: Vec<File>,
    pub(super) changed: u64,
}

/// Encodes tensors one after the other.
pub(super) struct Encoder<'a> {
    pub(super) snapshot: &'a dyn Snapshot,
    pub(super) base: Option<BaseView<'a>>,
    pub(super) plan: Plan,
    pub(super) profile: Profile,
    pub(super) object_bytes_max: usize,
}

/// One tensor's bytes before and after.
struct Pair<'a> {
    info: &'a TensorInfo,
    new: &'a [u8],
    base: Option<(&'a [u8], &'a DigestTable)>,
}

/// Tensors that may turn out to be the same: type, shape, and the digest of the base (of the tensor itself, without one).
type Likeness = (Dtype, Vec<u64>, [u8; 16]);

impl Encoder<'_> {
    /// Encodes the tensors at `unique` and the files into `packer`.
    pub(super) fn run(
        &self,
        unique: &[usize],
        packer: &mut Packer<'_>,
        mut progress: Option<&mut ProgressFn>,
    ) -> Result<Tables> {
        let mut tables = Tables { tensors: Vec::with_capacity(unique.len()), files: Vec::new(), changed: 0 };
        let mut alike: BTreeMap<Likeness, Vec<(usize, usize)>> = BTreeMap::new();
        let mut state = Progress { tensors_total: unique.len() as u64, ..Progress::default() };
        for &index in unique {
            fail::fail_point!("publish.encode");
            let info = &self.snapshot.tensors()[index];
            let new = tensor_bytes(self.snapshot, index)?;
            let pair = Pair { info, new: &new, base: self.base_of(info)? };
            let likeness = likeness(&pair)?;
            let candidates = alike.entry(likeness).or_default();
            if let Some(position) = self.find_twin(&pair, candidates)? {
                tables.tensors[position].aliases.push(info.name.clone());
            } else {
                candidates.push((tables.tensors.len(), index));
                let (tensor, changed) = self.tensor(&pair, packer)?;
                tables.tensors.push(tensor);
                tables.changed += changed;
            }
            state.tensors += 1;
            state.bytes_encoded += new.len() as u64;
            state.bytes_uploaded = packer.bytes_uploaded();
            if let Some(progress) = &mut progress {
                progress(state);
            }
        }
        tables.files = self.files(packer)?;
        Ok(tables)
    }

    /// The base's bytes and digests of a tensor, if this is a delta.
    fn base_of(&self, info: &TensorInfo) -> Result<Option<(&[u8], &DigestTable)>> {
        let Some(base) = &self.base else { return Ok(None) };
        base.tensor(&info.name).map(Some).ok_or_else(|| Error::TensorMismatch {
            tensor: info.name.clone(),
            what: "place in the baseline",
            expected: "present, as the base's manifest lists it".to_owned(),
            found: "absent".to_owned(),
        })
    }

    /// The entry among `candidates` whose bytes are the same now, and in the base if there is one.
    fn find_twin(&self, pair: &Pair<'_>, candidates: &[(usize, usize)]) -> Result<Option<usize>> {
        for &(position, index) in candidates {
            let twin = &self.snapshot.tensors()[index];
            let same_base = match (pair.base, self.base_of(twin)?) {
                (Some((bytes, _)), Some((twin_bytes, _))) => bytes == twin_bytes,
                _ => true,
            };
            if same_base && *tensor_bytes(self.snapshot, index)? == *pair.new {
                return Ok(Some(position));
            }
        }
        Ok(None)
    }

    fn tensor(&self, pair: &Pair<'_>, packer: &mut Packer<'_>) -> Result<(Tensor, u64)> {
        let (pieces, anchor, digest, changed) = match pair.base {
            Some((base, table)) => {
                let (pieces, digest, changed) = self.delta_pieces(pair, base, table, packer)?;
                let anchor = if self.plan.anchor { self.full_pieces(pair, packer)?.0 } else { Vec::new() };
                (pieces, anchor, digest, changed)
            }
            None => {
                let (pieces, digest) = self.full_pieces(pair, packer)?;
                (pieces, Vec::new(), digest, pair.info.elements()?)
            }
        };
        let TensorInfo { name, dtype, shape } = pair.info.clone();
        Ok((Tensor { name, dtype, shape, digest, aliases: Vec::new(), pieces, anchor }, changed))
    }

    /// The tensor in full: one piece, or as many as objects of bounded size need.
    fn full_pieces(&self, pair: &Pair<'_>, packer: &mut Packer<'_>) -> Result<(Vec<Piece>, Digest)> {
        let element = pair.info.dtype.element();
        let digest = DigestTable::of(element, pair.new).map_err(|source| codec(pair.info, source))?.total();
        let mut pieces = Vec::new();
        for (start, bytes) in self.cut(pair.new) {
            let encoded = packer.append(|out| {
                driftless_delta::encode_full(element, bytes, out).map_err(|source| codec(pair.info, source))
            })?;
            pieces.push(self.piece(pair.info, start, bytes.len(), encoded.map(|(_, part)| part))?);
        }
        Ok((pieces, digest))
    }

    /// The tensor against its base; no piece at all if nothing changed.
    fn delta_pieces(
        &self,
        pair: &Pair<'_>,
        base: &[u8],
        table: &DigestTable,
        packer: &mut Packer<'_>,
    ) -> Result<(Vec<Piece>, Digest, u64)> {
        let element = pair.info.dtype.element();
        let encode = |base: &[u8], new: &[u8], table: &DigestTable, out: &mut Vec<u8>| {
            driftless_delta::encode(element, base, new, table, self.profile, out)
                .map_err(|source| codec(pair.info, source))
        };
        // A delta of the whole tensor, whose digest the codec carries along, fits into an object but for the rare case
        // of a huge tensor that changed nearly everywhere.
        if let Some((encoded, part)) = packer.append(|out| encode(base, pair.new, table, out))? {
            let digest = encoded.digests.total();
            if encoded.changed == 0 {
                packer.undo(part);
                return Ok((Vec::new(), digest, 0));
            }
            let piece = self.piece(pair.info, 0, pair.new.len(), Some(part))?;
            return Ok((vec![piece], digest, self.tensor_elements(pair.info, encoded.changed)));
        }
        let (mut pieces, mut changed) = (Vec::new(), 0u64);
        for ((start, base), (_, new)) in self.cut(base).zip(self.cut(pair.new)) {
            let table = DigestTable::of(element, base).map_err(|source| codec(pair.info, source))?;
            let encoded = packer.append(|out| encode(base, new, &table, out))?;
            changed += encoded.as_ref().map_or(0, |(encoded, _)| encoded.changed);
            pieces.push(self.piece(pair.info, start, new.len(), encoded.map(|(_, part)| part))?);
        }
        let digest = DigestTable::of(element, pair.new).map_err(|source| codec(pair.info, source))?.total();
        Ok((pieces, digest, self.tensor_elements(pair.info, changed)))
    }

    /// The codec counts opaque types in bytes; a changed element has at least one changed byte.
    fn tensor_elements(&self, info: &TensorInfo, codec_elements: u64) -> u64 {
        codec_elements.min(info.elements().unwrap_or(0))
    }

    /// Ranges of bytes that are sure to fit into an object when coded, with their first byte.
    fn cut<'b>(&self, bytes: &'b [u8]) -> impl Iterator<Item = (usize, &'b [u8])> {
        // What does not shrink grows by less than a sixteenth.
        let room = self.object_bytes_max / 16 * 15;
        let length = (room / PIECE_UNIT).max(1) * PIECE_UNIT;
        bytes.chunks(length).enumerate().map(move |(index, chunk)| (index * length, chunk))
    }

    fn piece(&self, info: &TensorInfo, start: usize, bytes: usize, part: Option<Part>) -> Result<Piece> {
        let Some(Part { object, offset, length }) = part else {
            let what = format!("a piece of {bytes} bytes of tensor `{}`", info.name);
            return Err(Error::TooLarge { what, max: self.object_bytes_max as u64 });
        };
        let size = info.dtype.size();
        Ok(Piece { start: start as u64 / size, elements: bytes as u64 / size, object, offset, length })
    }

    /// The table of files, with the bytes of those that readers of this publication may not have.
    fn files(&self, packer: &mut Packer<'_>) -> Result<Vec<File>> {
        let known = self.base.as_ref().map_or(&[][..], |base| &base.manifest.files);
        let mut files = Vec::new();
        for file in self.snapshot.files() {
            let (size, blake3) = (file.bytes().len() as u64, ContentDigest::of(file.bytes()));
            let unchanged = known.iter().any(|known| known.name == file.name() && known.blake3 == blake3);
            let parts = if unchanged && self.plan.kind == Kind::Delta && !self.plan.anchor {
                Vec::new()
            } else {
                packer.append_bytes(file.bytes())?
            };
            files.push(File { name: file.name().to_owned(), size, blake3, parts });
        }
        Ok(files)
    }
}

fn likeness(pair: &Pair<'_>) -> Result<Likeness> {
    let digest = match pair.base {
        Some((_, table)) => table.total(),
        None => Digest::of(pair.info.dtype.element(), 0, pair.new),
    };
    Ok((pair.info.dtype, pair.info.shape.clone(), digest.to_bytes()))
}

fn codec(info: &TensorInfo, source: driftless_delta::Error) -> Error {
    Error::Codec { tensor: info.name.clone(), source }
}
