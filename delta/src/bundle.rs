//! One file that turns a list of named tensors into another: a delta of whole checkpoints.
//!
//! The bundle repeats no name. Both sides sort their tensors by name; digests of that table and of the base's
//! contents say whether they mean the same. Only changed tensors have an entry.

use crate::bits::{ByteReader, put_varint};
use crate::choose::Profile;
use crate::decode::Decoder;
use crate::digest::{Digest, DigestTable};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::patch::Patch;
use crate::pool::Serial;
use crate::source::Source;

/// The first bytes of every bundle.
pub const MAGIC: [u8; 4] = *b"DFB1";
const WHAT: &str = "bundle";

/// A named tensor as it lies in memory.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    /// Name, unique in its list.
    pub name: &'a str,
    /// Element type by its safetensors name.
    pub dtype: &'a str,
    /// Dimensions; compared, not otherwise used.
    pub shape: &'a [u64],
    /// Little-endian elements.
    pub bytes: &'a [u8],
}

/// What a bundle says about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// Tensors of the checkpoint.
    pub tensors: u64,
    /// Tensors with an entry.
    pub changed_tensors: u64,
    /// Elements of all tensors.
    pub elements: u64,
    /// Elements whose bits changed.
    pub changed: u64,
}

/// Appends to `out` a bundle that turns the tensors `base` into `new`. The lists may be in any order.
///
/// # Errors
/// [`Error::TableMismatch`] if names, dtypes or shapes differ or a name occurs twice, and what
/// [`encode`](crate::encode) refuses. `out` may hold a part of a bundle then.
pub fn encode(
    base: &[Tensor<'_>],
    new: &[Tensor<'_>],
    profile: Profile,
    out: &mut Vec<u8>,
) -> Result<Summary> {
    let (base, new) = (sorted(base)?, sorted(new)?);
    expect_same_table(&base, &new)?;
    let mut entries = Vec::new();
    let mut payload = Vec::new();
    let (tables, contents) = digests(&base)?;
    let mut summary = Summary { tensors: base.len() as u64, changed_tensors: 0, elements: 0, changed: 0 };
    let mut next = 0;
    for (((index, (_, base)), (_, new)), table) in (0_u64..).zip(&base).zip(&new).zip(&tables) {
        let element = Element::of_dtype(base.dtype);
        payload.clear();
        let changed =
            crate::encode::encode(element, base.bytes, new.bytes, table, profile, &mut payload)?.changed;
        summary.elements += (base.bytes.len() / element.size()) as u64;
        if changed > 0 {
            summary.changed += changed;
            summary.changed_tensors += 1;
            put_varint(&mut entries, index - next);
            put_varint(&mut entries, payload.len() as u64);
            entries.extend_from_slice(&payload);
            next = index + 1;
        }
    }
    let start = out.len();
    out.extend(MAGIC);
    out.extend(table_check(&base).to_le_bytes());
    out.extend(contents.to_le_bytes());
    [summary.tensors, summary.changed_tensors, summary.elements, summary.changed]
        .into_iter()
        .for_each(|number| put_varint(out, number));
    out.append(&mut entries);
    let whole = check(&out[start..]);
    out.extend(whole.to_le_bytes());
    Ok(summary)
}

/// A bundle whose bytes are intact.
#[derive(Debug, Clone)]
pub struct Bundle<'a> {
    table: u64,
    contents: u64,
    summary: Summary,
    /// Index in the sorted table, and payload.
    entries: Vec<(usize, &'a [u8])>,
}

impl<'a> Bundle<'a> {
    /// Reads a bundle that fills `bytes`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if `bytes` are not what [`encode`] wrote.
    pub fn read(bytes: &'a [u8]) -> Result<Self> {
        let corrupt = |offset, why| Error::Corrupt { what: WHAT, offset, why };
        if !bytes.starts_with(&MAGIC) {
            return Err(corrupt(0, "not a bundle"));
        }
        let (body, whole) = bytes.split_last_chunk::<8>().ok_or(corrupt(0, "bytes end too early"))?;
        let mut reader = ByteReader::new(body, WHAT);
        reader.take(MAGIC.len())?;
        if check(body).to_le_bytes() != *whole {
            return Err(corrupt(body.len(), "digest does not match"));
        }
        let [table, contents] = [reader.array()?, reader.array()?].map(u64::from_le_bytes);
        let [tensors, changed_tensors] = [reader.varint()?, reader.varint()?];
        let summary =
            Summary { tensors, changed_tensors, elements: reader.varint()?, changed: reader.varint()? };
        let mut entries = Vec::new();
        let mut next = 0_u64;
        for _ in 0..changed_tensors {
            let index = reader.varint()?.checked_add(next).filter(|index| *index < tensors);
            let index = index.ok_or_else(|| reader.corrupt("more tensors than the table has"))?;
            let length = reader.varint()?;
            entries.push((index as usize, reader.take_long(length)?));
            next = index + 1;
        }
        reader.finish()?;
        Ok(Self { table, contents, summary, entries })
    }

    /// What the bundle says about itself.
    pub fn summary(&self) -> Summary {
        self.summary
    }

    /// Decodes against `base`, tensor by tensor: calls `changed(index in base, patch)` for each tensor that
    /// changes. All of `base` is read first, to be sure that it is the base.
    ///
    /// # Errors
    /// [`Error::OtherBase`] if `base` has another table or other contents, what [`decode`](crate::decode)
    /// refuses, and what `changed` returns.
    pub fn decode<E: From<Error>>(
        &self,
        base: &[Tensor<'_>],
        mut changed: impl FnMut(usize, &Patch) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let base = sorted(base)?;
        let tables = self.expect_base(&base)?;
        let mut patch = Patch::new();
        for (index, payload) in &self.entries {
            if let (Some((original, tensor)), Some(digests)) = (base.get(*index), tables.get(*index)) {
                let element = Element::of_dtype(tensor.dtype);
                crate::decode::decode(element, tensor.bytes, digests, payload, &mut patch)?;
                changed(*original, &patch)?;
            }
        }
        Ok(())
    }

    /// Whether the bundle turns `base` into exactly `new`, by the digests of all bytes of both.
    ///
    /// # Errors
    /// What [`Bundle::decode`] refuses; [`Error::TableMismatch`] if `new` has other tensors;
    /// [`Error::InTensor`] with [`Error::BlockMismatch`] for the first block of `new` that is not the
    /// promised one.
    pub fn verify(&self, base: &[Tensor<'_>], new: &[Tensor<'_>]) -> Result<()> {
        let (base, new) = (sorted(base)?, sorted(new)?);
        expect_same_table(&base, &new)?;
        let tables = self.expect_base(&base)?;
        let (mut decoder, mut patch) = (Decoder::new(), Patch::new());
        let mut entries = self.entries.iter().peekable();
        for (index, (((_, base), (_, new)), digests)) in base.iter().zip(&new).zip(&tables).enumerate() {
            let element = Element::of_dtype(base.dtype);
            let promised = match entries.next_if(|(changed, _)| *changed == index) {
                Some((_, payload)) => {
                    let source = Source { element, bytes: base.bytes, digests };
                    decoder
                        .decode(&Serial, source, payload, &mut patch)
                        .map_err(|error| error.in_tensor(base.name))?;
                    patch.digests()
                }
                None => digests,
            };
            promised.verify(element, new.bytes).map_err(|error| error.in_tensor(new.name))?;
        }
        Ok(())
    }

    /// Refuses a list of tensors that is not the bundle's base; returns the digests of the one that is.
    fn expect_base(&self, base: &[(usize, &Tensor<'_>)]) -> Result<Vec<DigestTable>> {
        expect("tensor table", self.table, table_check(base))?;
        let (tables, contents) = digests(base)?;
        expect("contents", self.contents, contents).map(|()| tables)
    }
}

/// Digests of all tensors, and a check of them.
fn digests(tensors: &[(usize, &Tensor<'_>)]) -> Result<(Vec<DigestTable>, u64)> {
    let table =
        |(_, tensor): &(usize, &Tensor<'_>)| DigestTable::of(Element::of_dtype(tensor.dtype), tensor.bytes);
    let tables: Vec<DigestTable> = tensors.iter().map(table).collect::<Result<_>>()?;
    let contents: Vec<u8> = tables.iter().flat_map(|table| table.total().to_bytes()).collect();
    Ok((tables, check(&contents)))
}

fn expect(what: &'static str, expected: u64, found: u64) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::OtherBase { what, expected, found }) }
}

fn check(bytes: &[u8]) -> u64 {
    Digest::of(Element::Bytes, 0, bytes).check()
}

/// Tensors by name, each with its index in `tensors`.
fn sorted<'a, 'b>(tensors: &'b [Tensor<'a>]) -> Result<Vec<(usize, &'b Tensor<'a>)>> {
    let mut sorted: Vec<_> = tensors.iter().enumerate().collect();
    sorted.sort_by_key(|(_, tensor)| tensor.name);
    match sorted.windows(2).find(|pair| pair[0].1.name == pair[1].1.name) {
        Some(pair) => Err(differs(pair[0].1.name, "the name occurs twice")),
        None => Ok(sorted),
    }
}

fn differs(name: &str, why: &'static str) -> Error {
    Error::TableMismatch { name: name.to_owned(), why }
}

fn expect_same_table(base: &[(usize, &Tensor<'_>)], new: &[(usize, &Tensor<'_>)]) -> Result<()> {
    for ((_, base), (_, new)) in base.iter().zip(new) {
        let why = match () {
            () if base.name < new.name => return Err(differs(base.name, "removed")),
            () if base.name > new.name => return Err(differs(new.name, "added")),
            () if base.dtype != new.dtype => "other dtype",
            () if base.shape != new.shape => "other shape",
            () => continue,
        };
        return Err(differs(base.name, why));
    }
    match (base.get(new.len()), new.get(base.len())) {
        (Some((_, removed)), _) => Err(differs(removed.name, "removed")),
        (_, Some((_, added))) => Err(differs(added.name, "added")),
        _ => Ok(()),
    }
}

/// Check of names, dtypes and shapes in order: each string and each shape preceded by its length.
fn table_check(tensors: &[(usize, &Tensor<'_>)]) -> u64 {
    let mut bytes = Vec::new();
    for (_, tensor) in tensors {
        for text in [tensor.name, tensor.dtype] {
            put_varint(&mut bytes, text.len() as u64);
            bytes.extend(text.as_bytes());
        }
        put_varint(&mut bytes, tensor.shape.len() as u64);
        tensor.shape.iter().for_each(|dimension| put_varint(&mut bytes, *dimension));
    }
    check(&bytes)
}
