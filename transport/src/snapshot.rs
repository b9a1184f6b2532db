//! A version before it is published: named tensors and the auxiliary files of a checkpoint.

use std::borrow::Cow;

use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// Largest auxiliary file that a version can have, in bytes: publishers and hosts hold it in memory.
/// Tokenizers reach 35 MB.
pub const AUX_FILE_BYTES_MAX: u64 = 512 << 20;
/// Most bytes of all auxiliary files of a version.
pub const AUX_FILES_BYTES_MAX: u64 = 1 << 30;

/// Name, element type and shape of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorInfo {
    /// Hugging Face name, such as `model.layers.0.mlp.up_proj.weight`.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Extent of each dimension, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// Number of elements.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] when the product of the shape does not fit in 64 bits.
    pub fn elements(&self) -> Result<u64> {
        self.shape
            .iter()
            .try_fold(1u64, |product, &extent| product.checked_mul(extent))
            .ok_or_else(|| self.too_large())
    }

    /// Number of bytes, row-major and without padding.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] when it does not fit in 64 bits.
    pub fn byte_len(&self) -> Result<u64> {
        self.elements()?.checked_mul(self.dtype.size()).ok_or_else(|| self.too_large())
    }

    /// Whether `bytes` are as many as its shape says.
    ///
    /// # Errors
    ///
    /// [`Error::TensorMismatch`] if not; [`Error::Corrupt`] when its size does not fit in 64 bits.
    pub fn check_bytes(&self, bytes: &[u8]) -> Result<()> {
        let expected = self.byte_len()?;
        if bytes.len() as u64 == expected {
            return Ok(());
        }
        Err(Error::mismatch(&self.name, "number of bytes", expected, bytes.len()))
    }

    /// Its name, type and shape.
    #[must_use]
    pub fn form(&self) -> Form<'_> {
        (&self.name, self.dtype, &self.shape)
    }

    fn too_large(&self) -> Error {
        Error::Corrupt {
            subject: format!("tensor `{}`", self.name),
            what: "its size does not fit in 64 bits",
            expected: "a shape that can be stored".into(),
            found: format!("{:?} of {}", self.shape, self.dtype),
        }
    }
}

/// A tensor's name, type and shape.
pub type Form<'a> = (&'a str, Dtype, &'a [u64]);

/// Refuses a table of tensors, sorted by name, that is not `base`'s.
///
/// # Errors
///
/// [`Error::TensorMismatch`] at the first difference.
pub fn check_table<'a>(
    mut base: impl Iterator<Item = Form<'a>>,
    mut new: impl Iterator<Item = Form<'a>>,
) -> Result<()> {
    let describe = |form: Option<Form<'_>>| match form {
        Some((name, dtype, shape)) => format!("`{name}` {dtype} {shape:?}"),
        None => "none".to_owned(),
    };
    loop {
        let (expected, found) = (base.next(), new.next());
        let Some((tensor, ..)) = found.or(expected) else { return Ok(()) };
        if expected != found {
            let what = "entry in the tensor table";
            return Err(Error::mismatch(tensor, what, describe(expected), describe(found)));
        }
    }
}

/// A file that belongs to a checkpoint beside its weights: `config.json`, tokenizer, chat template, …
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuxFile {
    name: String,
    bytes: Vec<u8>,
}

impl AuxFile {
    /// Takes a file's plain name (no directory) and content.
    ///
    /// # Errors
    ///
    /// [`Error::BadFileName`] for a name that is not one plain, visible path component, or that a weight file
    /// would have; [`Error::TooLarge`] above [`AUX_FILE_BYTES_MAX`].
    pub fn new(name: impl Into<String>, bytes: Vec<u8>) -> Result<Self> {
        let name = name.into();
        if !is_aux_name(&name) {
            return Err(Error::BadFileName { name });
        }
        if bytes.len() as u64 > AUX_FILE_BYTES_MAX {
            return Err(Error::TooLarge {
                what: format!("auxiliary file `{name}`"),
                max: AUX_FILE_BYTES_MAX,
            });
        }
        Ok(Self { name, bytes })
    }

    /// Plain file name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Content.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// All tensors and auxiliary files of one version, readable one tensor at a time.
///
/// Tensors are sorted by name and names are unique; the bytes of a tensor are row-major, little-endian and
/// without padding.
pub trait Snapshot {
    /// The tensors, sorted by name.
    fn tensors(&self) -> &[TensorInfo];

    /// The bytes of `tensors()[index]`, exactly [`TensorInfo::byte_len`] of them.
    ///
    /// # Errors
    ///
    /// Whatever reading them meets: a device copy or a file may fail.
    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>>;

    /// Where `tensors()[index]` lies on a CUDA device, if it does: the same bytes, which nobody writes to
    /// until the publication has ended. [`Publisher::encode_on`](crate::publish::Publisher::encode_on) has
    /// them encoded there.
    #[cfg(feature = "cuda")]
    fn on_device(&self, _index: usize) -> Option<&driftless_delta::cuda::Tensor> {
        None
    }

    /// The auxiliary files, sorted by name.
    fn files(&self) -> &[AuxFile];
}

/// A [`Snapshot`] in memory: tensors that are owned or borrowed for `'a`, and files.
///
/// ```
/// use driftless_transport::{Dtype, Snapshot, Tensors};
///
/// let norm = 1.0_f32.to_le_bytes().repeat(4);
/// let snapshot = Tensors::new()
///     .tensor("model.norm.weight", Dtype::F32, [4], norm)?
///     .file("config.json", "{}")?;
/// assert_eq!(snapshot.tensors()[0].byte_len()?, 16);
/// # Ok::<(), driftless_transport::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tensors<'a> {
    infos: Vec<TensorInfo>,
    bytes: Vec<Cow<'a, [u8]>>,
    files: Vec<AuxFile>,
}

impl<'a> Tensors<'a> {
    /// No tensor and no file.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor: `bytes` are row-major, little-endian and without padding. The order of the calls does
    /// not matter.
    ///
    /// # Errors
    /// [`Error::DuplicateTensor`] for a name that is there already; [`Error::TensorMismatch`] for another
    /// number of bytes than `dtype` and `shape` need; [`Error::Corrupt`] for a shape whose size does not fit
    /// in 64 bits.
    pub fn tensor(
        mut self,
        name: impl Into<String>,
        dtype: Dtype,
        shape: impl Into<Vec<u64>>,
        bytes: impl Into<Cow<'a, [u8]>>,
    ) -> Result<Self> {
        let (info, bytes) = (TensorInfo { name: name.into(), dtype, shape: shape.into() }, bytes.into());
        info.check_bytes(&bytes)?;
        match self.infos.binary_search_by(|other| other.name.cmp(&info.name)) {
            Ok(_) => Err(Error::DuplicateTensor { tensor: info.name }),
            Err(index) => {
                self.infos.insert(index, info);
                self.bytes.insert(index, bytes);
                Ok(self)
            }
        }
    }

    /// Adds a file, in place of one of the same name.
    ///
    /// # Errors
    /// As [`AuxFile::new`].
    pub fn file(mut self, name: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Result<Self> {
        let file = AuxFile::new(name, bytes.into())?;
        match self.files.binary_search_by(|other| other.name.cmp(&file.name)) {
            Ok(index) => self.files[index] = file,
            Err(index) => self.files.insert(index, file),
        }
        Ok(self)
    }
}

impl Snapshot for Tensors<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        Ok(Cow::Borrowed(&self.bytes[index]))
    }

    fn files(&self) -> &[AuxFile] {
        &self.files
    }
}

/// Whether `name` is one plain path component that is safe to create in a directory: no separator, not
/// hidden, printable, ≤ 255 bytes.
#[must_use]
pub fn is_plain_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && !name.starts_with('.')
        && !name.chars().any(|c| c == '/' || c == '\\' || c.is_control())
}

/// Whether a file of this name in a checkpoint directory is auxiliary. Other weight formats are left out on
/// purpose: they would go stale with the first delta, and engines glob for them.
pub(crate) fn is_aux_name(name: &str) -> bool {
    const WEIGHTS: [&str; 10] = [
        ".safetensors",
        ".safetensors.index.json",
        ".bin",
        ".bin.index.json",
        ".pt",
        ".pth",
        ".ckpt",
        ".gguf",
        ".h5",
        ".msgpack",
    ];
    is_plain_name(name) && !WEIGHTS.iter().any(|suffix| name.ends_with(suffix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_len_is_checked() {
        let mut info = TensorInfo { name: "w".into(), dtype: Dtype::Bf16, shape: vec![3, 5] };
        assert_eq!(info.byte_len().unwrap(), 30);
        info.shape = vec![];
        assert_eq!(info.byte_len().unwrap(), 2, "a scalar has one element");
        info.shape = vec![0, 7];
        assert_eq!(info.byte_len().unwrap(), 0);
        info.shape = vec![u64::MAX, 2];
        assert!(matches!(info.elements(), Err(Error::Corrupt { .. })));
        info.shape = vec![u64::MAX];
        assert!(matches!(info.byte_len(), Err(Error::Corrupt { .. })));
    }

    #[test]
    fn tensors_in_any_order_are_sorted_and_contradictions_refused() {
        let snapshot = Tensors::new().tensor("b", Dtype::U8, [2], vec![1, 2]).unwrap();
        let snapshot = snapshot.tensor("a", Dtype::Bf16, [], &[3, 4][..]).unwrap();
        let snapshot = snapshot.file("z.json", "z").unwrap().file("a.json", "a").unwrap();
        let snapshot = snapshot.file("z.json", "new").unwrap();
        assert_eq!(snapshot.tensors().iter().map(|info| info.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((&*snapshot.bytes(0).unwrap(), &*snapshot.bytes(1).unwrap()), (&[3, 4][..], &[1, 2][..]));
        let files: Vec<_> = snapshot.files().iter().map(|file| (file.name(), file.bytes())).collect();
        assert_eq!(files, [("a.json", &b"a"[..]), ("z.json", b"new")]);
        let again = snapshot.clone().tensor("a", Dtype::U8, [0], vec![]);
        assert!(matches!(again, Err(Error::DuplicateTensor { tensor }) if tensor == "a"));
        let short = snapshot.tensor("c", Dtype::F32, [2, 2], vec![0; 15]);
        assert!(matches!(short, Err(Error::TensorMismatch { tensor, .. }) if tensor == "c"));
    }

    #[test]
    fn auxiliary_names_cannot_escape_or_shadow_weights() {
        for good in ["config.json", "tokenizer.model", "merges.txt", "chat_template.jinja"] {
            assert!(AuxFile::new(good, vec![]).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", ".driftless", "a/b", "../x", "a\\b", "a\nb", "model.safetensors", "x.bin"]
        {
            assert!(matches!(AuxFile::new(bad, vec![]), Err(Error::BadFileName { .. })), "{bad:?}");
        }
    }
}
