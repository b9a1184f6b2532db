//! The zstd frame of one changed tensor: made from absolute bytes, and turned back into them.
//!
//! Decoding holds a slice of the tensor, a chunk of the file and zstd's window, whatever a frame claims.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::ops::Range;

use driftless_store::{Key, Store};
use driftless_transport::foreign::SLICE_BYTES;
use driftless_transport::{Error, Result};
use zstd::stream::read::Decoder;
use zstd::stream::write::Encoder;

use crate::release::Frame;
use crate::{Checksum, Encoding};

/// The level that slime writes at.
const LEVEL: i32 = 1;
/// Largest window in bits: 128 MiB, what decoders take without being asked to. Level 1 needs 19.
const WINDOW_LOG_MAX: u32 = 27;
/// Bytes fetched at a time.
const CHUNK_BYTES: u64 = 4 << 20;

/// Gives the new bytes of a tensor, whose bytes now are `base`, to `push`: [`SLICE_BYTES`] at a time, or all
/// that are left.
///
/// # Errors
/// [`Error::Corrupt`] unless the frame holds exactly what the tensor's size asks for and the new bytes have
/// the promised checksum: a wrong base shows in it too.
pub(crate) fn rewrite(
    store: &dyn Store,
    name: &str,
    frame: &Frame,
    encoding: Encoding,
    checksum: Checksum,
    base: &[u8],
    push: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let subject = format!("`{name}` in {}", frame.key);
    let open = || Payload::open(store, &frame.key, frame.range.clone(), &subject);
    let mut changes = match encoding {
        Encoding::Xor => Changes::Xor { frame: open()?, mask: Vec::new() },
        Encoding::Overwrite => Changes::Overwrite(Overwrite::open(open()?, open()?, base.len())?),
    };
    let mut hasher = checksum.hasher();
    let mut slice = Vec::with_capacity(SLICE_BYTES.min(base.len()));
    for (index, old) in base.chunks(SLICE_BYTES).enumerate() {
        slice.clear();
        slice.extend_from_slice(old);
        changes.apply(index * SLICE_BYTES, &mut slice)?;
        hasher.update(&slice);
        push(&slice)?;
    }
    changes.finish()?;
    let found = hasher.finish();
    if found == frame.checksum {
        return Ok(());
    }
    let what = "checksum of the new tensor; its frame is damaged or made for another base";
    Err(Error::corrupt(subject, what, &frame.checksum, found))
}

/// What a frame changes, in the order of the bytes.
enum Changes<'a> {
    Xor { frame: Payload<'a>, mask: Vec<u8> },
    Overwrite(Overwrite<'a>),
}

impl Changes<'_> {
    /// Turns the tensor's bytes from `start` on into the new ones.
    fn apply(&mut self, start: usize, slice: &mut [u8]) -> Result<()> {
        match self {
            Self::Xor { frame, mask } => {
                mask.resize(slice.len(), 0);
                frame.read(mask)?;
                slice.iter_mut().zip(&*mask).for_each(|(byte, mask)| *byte ^= mask);
                Ok(())
            }
            Self::Overwrite(overwrite) => overwrite.apply(start, slice),
        }
    }

    /// Nothing may be left over.
    fn finish(self) -> Result<()> {
        match self {
            Self::Xor { frame, .. } | Self::Overwrite(Overwrite { values: frame, .. }) => frame.finish(),
        }
    }
}

/// A count, positions, and values behind them: two readers of one frame go through it side by side.
struct Overwrite<'a> {
    positions: Payload<'a>,
    values: Payload<'a>,
    tensor_bytes: usize,
    /// Positions not yet read.
    left: u32,
    /// The next byte to change.
    next: Option<usize>,
}

impl<'a> Overwrite<'a> {
    fn open(mut positions: Payload<'a>, mut values: Payload<'a>, tensor_bytes: usize) -> Result<Self> {
        let subject = positions.subject;
        if u32::try_from(tensor_bytes).is_err() {
            return Err(Error::Unsupported {
                what: format!("the encoding overwrite for {subject}, a tensor of {tensor_bytes} bytes"),
                hint: "its positions have 32 bits; publish with the encoding xor".to_owned(),
            });
        }
        let left = positions.u32()?;
        if left as usize > tensor_bytes {
            let expected = format!("at most {tensor_bytes}");
            return Err(Error::corrupt(subject, "number of changed bytes", expected, left));
        }
        values.skip(4 + 4 * u64::from(left))?;
        let mut overwrite = Self { positions, values, tensor_bytes, left, next: None };
        overwrite.advance()?;
        Ok(overwrite)
    }

    fn advance(&mut self) -> Result<()> {
        let last = self.next.take();
        if self.left == 0 {
            return Ok(());
        }
        self.left -= 1;
        let at = self.positions.u32()? as usize;
        if at >= self.tensor_bytes || last.is_some_and(|last| at <= last) {
            let expected = format!("ascending and below {}", self.tensor_bytes);
            return Err(Error::corrupt(self.positions.subject, "position of a changed byte", expected, at));
        }
        self.next = Some(at);
        Ok(())
    }

    fn apply(&mut self, start: usize, slice: &mut [u8]) -> Result<()> {
        while let Some(byte) = self.next.and_then(|at| slice.get_mut(at - start)) {
            self.values.read(std::slice::from_mut(byte))?;
            self.advance()?;
        }
        Ok(())
    }
}

/// The decompressed content of a frame, as it is read.
struct Payload<'a> {
    content: BufReader<Decoder<'static, Source<'a>>>,
    subject: &'a str,
}

impl<'a> Payload<'a> {
    fn open(store: &'a dyn Store, key: &'a Key, range: Range<u64>, subject: &'a str) -> Result<Self> {
        let source = Source { store, key, range, chunk: Vec::new(), used: 0 };
        let open = || {
            let mut decoder = Decoder::with_buffer(source)?.single_frame();
            decoder.window_log_max(WINDOW_LOG_MAX)?;
            Ok(decoder)
        };
        let decoder = open().map_err(|source| bad_frame(subject, source))?;
        Ok(Self { content: BufReader::new(decoder), subject })
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.content.read_exact(bytes).map_err(|source| bad_frame(self.subject, source))
    }

    fn u32(&mut self) -> Result<u32> {
        let mut bytes = [0; 4];
        self.read(&mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn skip(&mut self, bytes: u64) -> Result<()> {
        let copied = io::copy(&mut (&mut self.content).take(bytes), &mut io::sink());
        match copied.map_err(|source| bad_frame(self.subject, source))? {
            skipped if skipped == bytes => Ok(()),
            _ => Err(bad_frame(self.subject, io::ErrorKind::UnexpectedEof.into())),
        }
    }

    /// Refuses content or bytes behind the end.
    fn finish(mut self) -> Result<()> {
        let bad = |source| bad_frame(self.subject, source);
        if !self.content.fill_buf().map_err(bad)?.is_empty() {
            return Err(bad_content(self.subject, "more"));
        }
        let mut source = self.content.into_inner().finish();
        let behind = source.fill_buf().map_err(bad)?.len();
        if behind > 0 {
            return Err(Error::corrupt(self.subject, "bytes behind its frame", "none", behind));
        }
        Ok(())
    }
}

fn bad_content(subject: &str, found: &str) -> Error {
    Error::corrupt(subject, "content of its frame", "as much as the tensor needs", found)
}

/// zstd's refusal, or the store's error that it passed on.
fn bad_frame(subject: &str, error: io::Error) -> Error {
    match error.downcast::<Error>() {
        Ok(error) => error,
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => bad_content(subject, "less"),
        Err(error) => Error::corrupt(subject, "its zstd frame", "one that decompresses", error),
    }
}

/// A range of an object, fetched in chunks.
struct Source<'a> {
    store: &'a dyn Store,
    key: &'a Key,
    /// What was not fetched yet.
    range: Range<u64>,
    chunk: Vec<u8>,
    used: usize,
}

impl BufRead for Source<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.used == self.chunk.len() && !self.range.is_empty() {
            let end = self.range.end.min(self.range.start + CHUNK_BYTES);
            self.chunk = self.store.get(self.key, Some(self.range.start..end)).map_err(io::Error::other)?;
            // A shorter object than its header said ends here.
            self.range.start = if self.chunk.is_empty() { self.range.end } else { end };
            self.used = 0;
        }
        Ok(self.chunk.get(self.used..).unwrap_or_default())
    }

    fn consume(&mut self, used: usize) {
        self.used += used;
    }
}

impl Read for Source<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.fill_buf()?.read(bytes)?;
        self.consume(read);
        Ok(read)
    }
}

/// The frame that turns `old` into `new`, which are equally long.
///
/// # Errors
/// [`Error::Unsupported`] for a tensor that the encoding cannot describe.
pub(crate) fn encode(name: &str, encoding: Encoding, old: &[u8], new: &[u8]) -> Result<Vec<u8>> {
    let written = match encoding {
        Encoding::Xor => xor(old, new),
        Encoding::Overwrite if u32::try_from(new.len()).is_ok() => overwrite(old, new),
        Encoding::Overwrite => {
            return Err(Error::Unsupported {
                what: format!("the encoding overwrite for `{name}`, a tensor of {} bytes", new.len()),
                hint: "its positions have 32 bits; use the encoding xor".to_owned(),
            });
        }
    };
    written.map_err(|source| Error::io("compress the tensor", name, source))
}

/// Readers ask the frame for the size of its content, so it is declared.
fn encoder(content_bytes: u64) -> io::Result<Encoder<'static, Vec<u8>>> {
    let mut encoder = Encoder::new(Vec::new(), LEVEL)?;
    encoder.include_contentsize(true)?;
    encoder.set_pledged_src_size(Some(content_bytes))?;
    Ok(encoder)
}

fn xor(old: &[u8], new: &[u8]) -> io::Result<Vec<u8>> {
    let mut frame = encoder(new.len() as u64)?;
    let mut mask = Vec::new();
    for (old, new) in old.chunks(SLICE_BYTES).zip(new.chunks(SLICE_BYTES)) {
        mask.clear();
        mask.extend(old.iter().zip(new).map(|(old, new)| old ^ new));
        frame.write_all(&mask)?;
    }
    frame.finish()
}

fn overwrite(old: &[u8], new: &[u8]) -> io::Result<Vec<u8>> {
    let changed = || old.iter().zip(new).enumerate().filter(|(_, (old, new))| old != new);
    let count = changed().count() as u32;
    let mut frame = io::BufWriter::new(encoder(4 + 5 * u64::from(count))?);
    frame.write_all(&count.to_le_bytes())?;
    for (position, _) in changed() {
        frame.write_all(&(position as u32).to_le_bytes())?;
    }
    for (_, (_, new)) in changed() {
        frame.write_all(std::slice::from_ref(new))?;
    }
    frame.into_inner().map_err(io::IntoInnerError::into_error)?.finish()
}
