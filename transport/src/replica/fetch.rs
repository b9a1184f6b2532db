//! From a publication to a sealed journal: objects in, records out. Nothing of the checkpoint is touched here.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

use driftless_delta::{DigestTable, Patch, decode, decode_full};

use super::journal::{Record, Writer};
use super::state::{Copy, State, Tables, digests_to_bytes};
use crate::checkpoint::write_weights;
use crate::error::{Error, Result};
use crate::manifest::{File, Manifest, Object, Piece, Tensor};
use crate::run::Committed;
use crate::snapshot::{AuxFile, Snapshot, TensorInfo};

/// Larger tensors do not exist; a manifest that claims one is not believed with an allocation.
const TENSOR_BYTES_MAX: u64 = 1 << 40;
/// Tensor data per weight file of a rebuilt checkpoint, as the reference writes them.
const SHARD_BYTES: u64 = 5_000_000_000;

/// Gives the bytes of one object, already checked against its digest.
pub type FetchObject<'a> = dyn FnMut(&Object) -> Result<Vec<u8>> + 'a;

/// The objects of one publication, fetched in the order of use; the last one is kept, as its neighbours need
/// it next.
pub(super) struct Objects<'a, 'f> {
    manifest: &'a Manifest,
    fetch: &'a mut FetchObject<'f>,
    last: Option<(u32, Vec<u8>)>,
    fetched: u64,
}

impl<'a, 'f> Objects<'a, 'f> {
    pub(super) fn new(manifest: &'a Manifest, fetch: &'a mut FetchObject<'f>) -> Self {
        Self { manifest, fetch, last: None, fetched: 0 }
    }

    /// Bytes fetched so far.
    pub(super) fn fetched(&self) -> u64 {
        self.fetched
    }

    /// A range of an object; the manifest's own check has already placed it inside.
    fn range(&mut self, object: u32, offset: u64, length: u64) -> Result<&[u8]> {
        if self.last.as_ref().is_none_or(|(index, _)| *index != object) {
            self.last = None;
            let entry = self
                .manifest
                .objects
                .get(object as usize)
                .ok_or_else(|| outside("manifest", object, offset, length))?;
            super::crash_point("follow.fetch")?;
            let bytes = (self.fetch)(entry)?;
            self.fetched += bytes.len() as u64;
            self.last = Some((object, bytes));
        }
        let bytes = self.last.as_ref().map_or(&[][..], |(_, bytes)| bytes);
        usize::try_from(offset)
            .ok()
            .zip(usize::try_from(length).ok())
            .and_then(|(start, length)| bytes.get(start..start.checked_add(length)?))
            .ok_or_else(|| outside("object", object, offset, length))
    }

    fn file(&mut self, file: &File) -> Result<AuxFile> {
        let mut bytes = Vec::new();
        for part in &file.parts {
            bytes.extend_from_slice(self.range(part.object, part.offset, part.length)?);
        }
        file.blake3.check(&bytes, format_args!("file `{}`", file.name))?;
        AuxFile::new(file.name.clone(), bytes)
    }
}

fn outside(subject: &str, object: u32, offset: u64, length: u64) -> Error {
    Error::Corrupt {
        subject: format!("{subject} of a publication"),
        what: "a payload lies outside",
        expected: "a range inside an object".into(),
        found: format!("{length} bytes from {offset} of object {object}"),
    }
}

/// Writes and seals the journal that takes `base` to `link` by its deltas.
pub(super) fn journal_delta(
    path: &Path,
    base: &State,
    link: &Committed,
    objects: &mut Objects<'_, '_>,
) -> Result<()> {
    let manifest = &link.manifest;
    let mut journal = Writer::create(path)?;
    let main_names =
        base.manifest.named_tensors().into_iter().map(|(name, entry)| (name, entry.name.as_str())).collect();
    let mut tables = Tables::new();
    for tensor in &manifest.tensors {
        let old = base_table(base, &main_names, tensor)?;
        let new = match tensor.pieces.as_slice() {
            [] => old.clone(),
            pieces => patch_tensor(base, tensor, old, pieces, objects, &mut journal)?,
        };
        check_digest(tensor, &new)?;
        tables.insert(tensor.name.clone(), new);
    }
    for file in &manifest.files {
        let kept = base.manifest.files.iter().any(|old| old.name == file.name && old.blake3 == file.blake3);
        if kept {
            continue;
        }
        let file = objects.file(file)?;
        journal.push(Record::File { name: file.name(), bytes: file.bytes() })?;
    }
    for old in &base.manifest.files {
        if !manifest.files.iter().any(|file| file.name == old.name) {
            journal.push(Record::Remove { name: &old.name })?;
        }
    }
    seal(journal, link, &tables)
}

/// The base's digests of a tensor. Tensors may become tied or part from one version to the next; one delta
/// serves several names only where their bases are the same.
fn base_table<'a>(
    base: &'a State,
    main_names: &BTreeMap<&str, &str>,
    tensor: &Tensor,
) -> Result<&'a DigestTable> {
    let table_of = |name: &str| {
        main_names.get(name).and_then(|main| base.tables.get(*main)).ok_or_else(|| Error::TensorMismatch {
            tensor: name.to_owned(),
            what: "entry in the base's tensor table",
            expected: "present".to_owned(),
            found: "absent".to_owned(),
        })
    };
    let table = table_of(&tensor.name)?;
    for alias in &tensor.aliases {
        let other = table_of(alias)?;
        if other != table {
            return Err(Error::TensorMismatch {
                tensor: alias.clone(),
                what: "digest of the base that it shares a delta with",
                expected: table.total().to_string(),
                found: other.total().to_string(),
            });
        }
    }
    Ok(table)
}

/// Writes the full tensors of `link` into `staging`, and seals the journal that installs them. Returns the
/// bytes fetched.
///
/// `stale` are the weight files now in the directory.
pub(super) fn journal_full(
    path: &Path,
    staging: &Path,
    link: &Committed,
    objects: Objects<'_, '_>,
    old_files: &[File],
    stale: &[String],
) -> Result<u64> {
    let snapshot = Fetched::new(&link.manifest, objects)?;
    let names = write_weights(staging, &snapshot, SHARD_BYTES)?;
    crate::checkpoint::sync_dir(staging)?;
    let (mut objects, tables) = snapshot.finish();
    let mut journal = Writer::create(path)?;
    for name in &names {
        journal.push(Record::Install { name })?;
    }
    for name in stale.iter().filter(|name| !names.contains(name)) {
        journal.push(Record::Remove { name })?;
    }
    for file in &link.manifest.files {
        let file = objects.file(file)?;
        journal.push(Record::File { name: file.name(), bytes: file.bytes() })?;
    }
    for old in old_files {
        if !link.manifest.files.iter().any(|file| file.name == old.name) {
            journal.push(Record::Remove { name: &old.name })?;
        }
    }
    seal(journal, link, &tables)?;
    Ok(objects.fetched())
}

/// Adds the manifest and the digest tables, and seals.
pub(super) fn seal(mut journal: Writer, link: &Committed, tables: &Tables) -> Result<()> {
    let copy = Copy { digest: link.digest, manifest: link.manifest.clone() };
    journal.push(Record::Manifest(&copy.to_bytes()?))?;
    journal.push(Record::Digests(&digests_to_bytes(tables)))?;
    journal.commit()
}

/// Refuses a tensor whose digest is not the manifest's.
pub(super) fn check_digest(tensor: &Tensor, table: &DigestTable) -> Result<()> {
    let found = table.total();
    if found == tensor.digest {
        return Ok(());
    }
    Err(Error::TensorMismatch {
        tensor: tensor.name.clone(),
        what: "digest",
        expected: tensor.digest.to_string(),
        found: found.to_string(),
    })
}

fn patch_tensor(
    base: &State,
    tensor: &Tensor,
    old: &DigestTable,
    pieces: &[Piece],
    objects: &mut Objects<'_, '_>,
    journal: &mut Writer,
) -> Result<DigestTable> {
    let element = tensor.dtype.element();
    let codec = |source| Error::Codec { tensor: tensor.name.clone(), source };
    let bytes = base
        .checkpoint
        .position(&tensor.name)
        .and_then(|index| base.checkpoint.tensor(index))
        .unwrap_or_default();
    let mut patch = Patch::default();
    if let [piece] = pieces {
        let payload = objects.range(piece.object, piece.offset, piece.length)?;
        decode(element, bytes, old, payload, &mut patch).map_err(codec)?;
        journal.push(Record::Patch { tensor: &tensor.name, offset: 0, bytes: &patch.to_bytes() })?;
        return Ok(patch.digests().clone());
    }
    // Pieces of several publishers may be cut anywhere, so their digests are not those of the tensor's
    // blocks: hash again.
    let mut result = bytes.to_vec();
    for piece in pieces {
        let range = piece_range(tensor, piece, bytes.len())?;
        let slice = &bytes[range.clone()];
        let digests = DigestTable::of(element, slice).map_err(codec)?;
        let payload = objects.range(piece.object, piece.offset, piece.length)?;
        decode(element, slice, &digests, payload, &mut patch).map_err(codec)?;
        patch.apply_to(&mut result[range.clone()]).map_err(codec)?;
        journal.push(Record::Patch {
            tensor: &tensor.name,
            offset: range.start as u64,
            bytes: &patch.to_bytes(),
        })?;
    }
    DigestTable::of(element, &result).map_err(codec)
}

/// The bytes of a tensor that a piece covers.
fn piece_range(tensor: &Tensor, piece: &Piece, length: usize) -> Result<std::ops::Range<usize>> {
    let size = tensor.dtype.size();
    let start = piece.start.checked_mul(size).and_then(|start| usize::try_from(start).ok());
    let bytes = piece.elements.checked_mul(size).and_then(|bytes| usize::try_from(bytes).ok());
    match start.zip(bytes).and_then(|(start, bytes)| Some(start..start.checked_add(bytes)?)) {
        Some(range) if range.end <= length => Ok(range),
        _ => Err(Error::TensorMismatch {
            tensor: tensor.name.clone(),
            what: "elements of a piece",
            expected: format!("inside {length} bytes"),
            found: format!("{} from {}", piece.elements, piece.start),
        }),
    }
}

/// A full publication read as a snapshot: each tensor is fetched, decoded and checked when its bytes are
/// asked for.
struct Fetched<'a, 'f> {
    tensors: Vec<TensorInfo>,
    entries: Vec<&'a Tensor>,
    objects: RefCell<Objects<'a, 'f>>,
    tables: RefCell<Tables>,
}

impl<'a, 'f> Fetched<'a, 'f> {
    fn new(manifest: &'a Manifest, objects: Objects<'a, 'f>) -> Result<Self> {
        if !manifest.is_anchor() {
            return Err(Error::Unsupported {
                what: format!("starting at version {} of run {}", manifest.version, manifest.run_id),
                hint: "it is not published in full; give the checkpoint directory that the run starts from"
                    .into(),
            });
        }
        let (tensors, entries) = manifest
            .named_tensors()
            .into_iter()
            .map(|(name, tensor)| (TensorInfo { name: name.to_owned(), ..tensor.info() }, tensor))
            .unzip();
        Ok(Self { tensors, entries, objects: RefCell::new(objects), tables: RefCell::default() })
    }

    fn finish(self) -> (Objects<'a, 'f>, Tables) {
        (self.objects.into_inner(), self.tables.into_inner())
    }

    fn decode(&self, tensor: &Tensor) -> Result<Vec<u8>> {
        let codec = |source| Error::Codec { tensor: tensor.name.clone(), source };
        let mut objects = self.objects.borrow_mut();
        let mut bytes = zeroed(tensor)?;
        let length = bytes.len();
        for piece in objects.manifest.full_pieces(tensor).unwrap_or_default() {
            let range = piece_range(tensor, piece, length)?;
            let payload = objects.range(piece.object, piece.offset, piece.length)?;
            decode_full(tensor.dtype.element(), payload, &mut bytes[range]).map_err(codec)?;
        }
        let table = DigestTable::of(tensor.dtype.element(), &bytes).map_err(codec)?;
        check_digest(tensor, &table)?;
        self.tables.borrow_mut().insert(tensor.name.clone(), table);
        Ok(bytes)
    }
}

impl Snapshot for Fetched<'_, '_> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        match self.entries.get(index) {
            Some(tensor) => self.decode(tensor).map(Cow::Owned),
            None => Ok(Cow::Borrowed(&[])),
        }
    }

    fn files(&self) -> &[AuxFile] {
        &[]
    }
}

/// A tensor's buffer; a size that cannot be had is an error, not an abort.
fn zeroed(tensor: &Tensor) -> Result<Vec<u8>> {
    let too_large = || Error::TooLarge { what: format!("tensor `{}`", tensor.name), max: TENSOR_BYTES_MAX };
    let length = tensor.info().byte_len()?;
    let length = usize::try_from(length).ok().filter(|_| length <= TENSOR_BYTES_MAX).ok_or_else(too_large)?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(length).map_err(|_| too_large())?;
    bytes.resize(length, 0);
    Ok(bytes)
}

/// Refuses a delta whose representation or tensor table is not the base's: adding, removing or reshaping a
/// tensor needs a full publication.
pub(super) fn check_same_form(base: &Manifest, new: &Manifest) -> Result<()> {
    if base.representation != new.representation {
        return Err(Error::Corrupt {
            subject: format!("delta of version {}", new.version),
            what: "its representation is not its base's",
            expected: format!("{:?}", base.representation),
            found: format!("{:?}", new.representation),
        });
    }
    let (old, new) = (base.named_tensors(), new.named_tensors());
    let describe = |entry: Option<&(&str, &Tensor)>| match entry {
        Some((name, tensor)) => {
            format!("`{name}` {} {:?}", tensor.dtype, tensor.shape)
        }
        None => "none".to_owned(),
    };
    for index in 0..old.len().max(new.len()) {
        let (expected, found) = (describe(old.get(index)), describe(new.get(index)));
        if expected != found {
            let tensor =
                new.get(index).or(old.get(index)).map_or_else(String::new, |(name, _)| (*name).to_owned());
            return Err(Error::TensorMismatch { tensor, what: "entry in the tensor table", expected, found });
        }
    }
    Ok(())
}
