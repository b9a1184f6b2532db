//! The rules that a manifest must satisfy by itself.

use std::collections::BTreeSet;
use std::fmt::Display;

use driftless_store::Key;

use super::{Algorithms, File, Kind, Manifest, OBJECT_BYTES_MAX, Piece, Tensor, VERSION_MAX};
use crate::checkpoint::METADATA;
use crate::error::{Error, Result};
use crate::ids::check_model;
use crate::snapshot::{AUX_FILE_BYTES_MAX, AUX_FILES_BYTES_MAX, is_aux_name};

/// Longest tensor name in bytes.
const TENSOR_NAME_BYTES_MAX: usize = 1024;

/// Refuses a manifest that contradicts itself; `subject` names it in errors.
pub(super) fn all(manifest: &Manifest, subject: &str) -> Result<()> {
    let check = Check { manifest, subject, anchor: manifest.is_anchor() };
    check.identity()?;
    check.objects()?;
    check.tensors()?;
    check.files()?;
    check.tiling()
}

struct Check<'a> {
    manifest: &'a Manifest,
    subject: &'a str,
    /// Whether the manifest is an anchor, which needs all tensors.
    anchor: bool,
}

impl Check<'_> {
    fn corrupt(
        &self,
        place: impl Display,
        what: &'static str,
        expected: impl Display,
        found: impl Display,
    ) -> Error {
        Error::corrupt(format!("{}: {place}", self.subject), what, expected, found)
    }

    fn identity(&self) -> Result<()> {
        let manifest = self.manifest;
        check_model(&manifest.model)?;
        let known = Algorithms::default();
        for (found, known) in [
            (&manifest.algorithms.content, known.content),
            (&manifest.algorithms.block, known.block),
            (&manifest.algorithms.coder, known.coder),
        ] {
            if *found != known {
                return Err(Error::Unsupported {
                    what: format!("the algorithm `{found}` of {}", self.subject),
                    hint: format!("this build knows `{known}`"),
                });
            }
        }
        let version = manifest.version.0;
        if version > VERSION_MAX {
            return Err(self.corrupt("version", "the number is too large", VERSION_MAX, version));
        }
        let expected = version.checked_sub(1);
        let found = manifest.base.map(|base| base.version.0);
        if expected != found {
            let text = |number: Option<u64>| number.map_or("none".to_owned(), |number| number.to_string());
            return Err(self.corrupt("base", "it is not the version in front", text(expected), text(found)));
        }
        match manifest.kind {
            Kind::Delta if version == 0 => {
                Err(self.corrupt("kind", "version 0 has no base", "full or reference", "delta"))
            }
            Kind::Reference if version != 0 => {
                Err(self.corrupt("kind", "only version 0 may be a reference", "full or delta", "reference"))
            }
            _ => Ok(()),
        }
    }

    fn objects(&self) -> Result<()> {
        let manifest = self.manifest;
        let prefix = Key::new(format!("{}/{}", manifest.run_id, manifest.model))?;
        let mut keys = BTreeSet::new();
        for object in &manifest.objects {
            let place = format!("object `{}`", object.key);
            if object.key.under(&prefix).is_none() {
                return Err(self.corrupt(
                    place,
                    "its key leaves the run",
                    format!("{prefix}/…"),
                    &object.key,
                ));
            }
            if !keys.insert(&object.key) {
                return Err(self.corrupt(place, "its key stands twice", "1", "2"));
            }
            if object.size == 0 || object.size > OBJECT_BYTES_MAX {
                return Err(self.corrupt(place, "its size", format!("1 to {OBJECT_BYTES_MAX}"), object.size));
            }
        }
        if manifest.kind == Kind::Reference && !manifest.objects.is_empty() {
            return Err(self.corrupt("objects", "a reference has none", 0, manifest.objects.len()));
        }
        Ok(())
    }

    fn tensors(&self) -> Result<()> {
        let manifest = self.manifest;
        self.sorted("tensor", manifest.tensors.iter().map(|tensor| tensor.name.as_str()))?;
        let mut names = BTreeSet::new();
        let mut elements = 0u64;
        for tensor in &manifest.tensors {
            for name in std::iter::once(&tensor.name).chain(&tensor.aliases) {
                check_tensor_name(name)?;
                if !names.insert(name.as_str()) {
                    return Err(self.corrupt(format!("tensor `{name}`"), "its name stands twice", "1", "2"));
                }
            }
            elements = elements.saturating_add(self.tensor(tensor)?);
        }
        if manifest.changed > elements {
            return Err(self.corrupt("changed", "more elements than there are", elements, manifest.changed));
        }
        Ok(())
    }

    /// Checks one tensor and returns its number of elements.
    fn tensor(&self, tensor: &Tensor) -> Result<u64> {
        let manifest = self.manifest;
        let info = tensor.info();
        info.byte_len()?;
        let elements = info.elements()?;
        let full = match manifest.kind {
            Kind::Full => Some(&tensor.pieces),
            Kind::Delta if self.anchor => Some(&tensor.anchor),
            Kind::Delta | Kind::Reference => None,
        };
        if let Some(pieces) = full {
            self.cover(tensor, pieces, elements)?;
        }
        match manifest.kind {
            Kind::Delta if !tensor.pieces.is_empty() => self.cover(tensor, &tensor.pieces, elements)?,
            Kind::Reference if !tensor.pieces.is_empty() => {
                let place = format!("tensor `{}`", tensor.name);
                return Err(self.corrupt(place, "a reference has no pieces", 0, tensor.pieces.len()));
            }
            Kind::Full | Kind::Reference if !tensor.anchor.is_empty() => {
                let place = format!("tensor `{}`", tensor.name);
                return Err(self.corrupt(place, "only a delta has anchor pieces", 0, tensor.anchor.len()));
            }
            _ => {}
        }
        Ok(elements)
    }

    /// The pieces follow one another from element 0 to the last, and lie inside their objects.
    fn cover(&self, tensor: &Tensor, pieces: &[Piece], elements: u64) -> Result<()> {
        let place = || format!("tensor `{}`", tensor.name);
        let mut next = 0u64;
        for piece in pieces {
            if piece.start != next {
                return Err(self.corrupt(place(), "a piece starts at the wrong element", next, piece.start));
            }
            next = match next.checked_add(piece.elements) {
                Some(end) if piece.elements > 0 && end <= elements => end,
                _ => {
                    let found = format!("{} from {next}", piece.elements);
                    return Err(self.corrupt(
                        place(),
                        "elements of a piece",
                        format!("1 to {}", elements - next),
                        found,
                    ));
                }
            };
            self.inside(place(), piece.object, piece.offset, piece.length)?;
        }
        if next != elements {
            return Err(self.corrupt(place(), "elements covered by pieces", elements, next));
        }
        Ok(())
    }

    fn inside(&self, place: String, object: u32, offset: u64, length: u64) -> Result<()> {
        let Some(entry) = self.manifest.objects.get(object as usize) else {
            return Err(self.corrupt(
                place,
                "it lies in an object that is not listed",
                format!("an index below {}", self.manifest.objects.len()),
                object,
            ));
        };
        match offset.checked_add(length) {
            Some(end) if length > 0 && end <= entry.size => Ok(()),
            _ => Err(self.corrupt(
                place,
                "it lies outside its object",
                format!("bytes 0 to {} of `{}`", entry.size, entry.key),
                format!("{length} bytes from {offset}"),
            )),
        }
    }

    fn files(&self) -> Result<()> {
        let manifest = self.manifest;
        self.sorted("file", manifest.files.iter().map(|file| file.name.as_str()))?;
        for file in &manifest.files {
            self.file(file)?;
        }
        if manifest.files.iter().fold(0u64, |total, file| total.saturating_add(file.size))
            > AUX_FILES_BYTES_MAX
        {
            let what = format!("{}: all files together", self.subject);
            return Err(Error::TooLarge { what, max: AUX_FILES_BYTES_MAX });
        }
        Ok(())
    }

    fn file(&self, file: &File) -> Result<()> {
        if !is_aux_name(&file.name) {
            return Err(Error::BadFileName { name: file.name.clone() });
        }
        let place = || format!("file `{}`", file.name);
        if file.size > AUX_FILE_BYTES_MAX {
            return Err(Error::TooLarge {
                what: format!("{}: {}", self.subject, place()),
                max: AUX_FILE_BYTES_MAX,
            });
        }
        let mut length = 0u64;
        for part in &file.parts {
            self.inside(place(), part.object, part.offset, part.length)?;
            length = length.saturating_add(part.length);
        }
        let needs_bytes = self.anchor && file.size > 0;
        if (needs_bytes || !file.parts.is_empty()) && length != file.size {
            return Err(self.corrupt(place(), "bytes of its parts", file.size, length));
        }
        Ok(())
    }

    fn sorted<'n>(&self, what: &'static str, names: impl Iterator<Item = &'n str>) -> Result<()> {
        let mut previous: Option<&str> = None;
        for name in names {
            if previous.is_some_and(|previous| previous >= name) {
                let place = format!("{what} `{name}`");
                let expected = format!("a name after `{}`", previous.unwrap_or_default());
                return Err(self.corrupt(place, "the table is not sorted by unique names", expected, name));
            }
            previous = Some(name);
        }
        Ok(())
    }

    /// Every byte of every object belongs to exactly one piece or part.
    fn tiling(&self) -> Result<()> {
        let manifest = self.manifest;
        let pieces = manifest.tensors.iter().flat_map(|tensor| tensor.pieces.iter().chain(&tensor.anchor));
        let parts = manifest.files.iter().flat_map(|file| &file.parts);
        let mut ranges: Vec<(u32, u64, u64)> = pieces
            .map(|piece| (piece.object, piece.offset, piece.length))
            .chain(parts.map(|part| (part.object, part.offset, part.length)))
            .collect();
        ranges.sort_unstable();
        let mut ranges = ranges.into_iter().peekable();
        for (index, object) in manifest.objects.iter().enumerate() {
            let mut end = 0u64;
            while let Some((_, offset, length)) = ranges.next_if(|(object, ..)| *object as usize == index) {
                if offset != end {
                    let place = format!("object `{}`", object.key);
                    return Err(self.corrupt(
                        place,
                        "its pieces overlap or leave a gap at byte",
                        end,
                        offset,
                    ));
                }
                end = offset.saturating_add(length);
            }
            if end != object.size {
                return Err(self.corrupt(
                    format!("object `{}`", object.key),
                    "bytes used by pieces",
                    object.size,
                    end,
                ));
            }
        }
        Ok(())
    }
}

/// Refuses what cannot name a tensor in a checkpoint.
fn check_tensor_name(name: &str) -> Result<()> {
    let reason = match name {
        METADATA => "files of safetensors keep a text of their own under that name",
        "" => "it is empty",
        _ if name.len() > TENSOR_NAME_BYTES_MAX => "it is longer than 1024 bytes",
        _ if name.chars().any(char::is_control) => "it has a control character",
        _ => return Ok(()),
    };
    Err(Error::BadName { what: "tensor", text: name.escape_default().to_string(), reason })
}
