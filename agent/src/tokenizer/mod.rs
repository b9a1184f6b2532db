//! The checkpoint's tokenizer.

mod words;

use std::ops::Range;
use std::path::{Path, PathBuf};

use driftless_store::os::regular;
use tokenizers::PreTokenizedString;
use tokenizers::tokenizer::{Model as _, NormalizedString, Normalizer as _, OffsetType, PreTokenizer as _};

use crate::error::{Error, Result};

/// `tokenizer.json` of a checkpoint directory.
pub struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
}

impl Tokenizer {
    /// Reads it. A large one takes a second or two.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if there is none, or none that the library knows.
    pub fn open(checkpoint: &Path) -> Result<Self> {
        let path = checkpoint.join("tokenizer.json");
        let refused = |reason: String| Error::Tokenizer { path: path.clone(), reason };
        if !path.is_file() {
            let reason =
                "there is none; save the tokenizer with transformers' `save_pretrained` beside the weights";
            return Err(refused(reason.to_owned()));
        }
        let bytes = regular::read(&path).map_err(|error| refused(error.to_string()))?;
        Self::from_bytes(path, &bytes)
    }

    /// Reads the text of a `tokenizer.json`; `path` is its name in messages.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if it is none that the library knows.
    pub fn from_bytes(path: impl Into<PathBuf>, bytes: &[u8]) -> Result<Self> {
        let path = path.into();
        match tokenizers::Tokenizer::from_bytes(bytes) {
            Ok(inner) => Ok(Tokenizer { path, inner }),
            Err(error) => Err(Error::Tokenizer { path, reason: error.to_string() }),
        }
    }

    /// Ids of `text`, nothing put before or after it: templates write their special tokens themselves.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for a text that the tokenizer has no ids for.
    pub fn encode(&self, text: &str) -> Result<Vec<i32>> {
        words::encode(&self.inner, text)
            .unwrap_or_else(|| self.by_library(text))
            .map_err(|error| self.refused(error.as_ref()))
    }

    fn by_library(&self, text: &str) -> tokenizers::Result<Vec<i32>> {
        let encoding = self.inner.encode_fast(text, false)?;
        Ok(encoding.get_ids().iter().map(|id| *id as i32).collect())
    }

    /// Ids of `text`, and for each 1 if a byte of it is in `marked`, ascending ranges, else 0.
    ///
    /// # Errors
    /// As for [`Tokenizer::encode`].
    pub fn encode_marked(&self, text: &str, marked: &[Range<usize>]) -> Result<(Vec<i32>, Vec<u8>)> {
        let encoding = self.inner.encode(text, false).map_err(|error| self.refused(error.as_ref()))?;
        let inside = |&(start, end): &(usize, usize)| {
            let next = marked.partition_point(|range| range.end <= start);
            u8::from(start < end && marked.get(next).is_some_and(|range| range.start < end))
        };
        let ids = encoding.get_ids().iter().map(|id| *id as i32).collect();
        Ok((ids, encoding.get_offsets().iter().map(inside).collect()))
    }

    /// Ids of `text`, in which no spelling of an added token becomes that token.
    ///
    /// # Errors
    /// As for [`Tokenizer::encode`].
    pub(crate) fn encode_plain(&self, text: &str) -> Result<Vec<i32>> {
        self.plain(text).map_err(|error| self.refused(error.as_ref()))
    }

    fn plain(&self, text: &str) -> tokenizers::Result<Vec<i32>> {
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = self.inner.get_normalizer() {
            normalizer.normalize(&mut normalized)?;
        }
        let mut pieces = PreTokenizedString::from(normalized);
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        let model = self.inner.get_model();
        pieces.tokenize(|piece| model.tokenize(piece.get()))?;
        let encoding = pieces.into_encoding(None, 0, OffsetType::Byte)?;
        Ok(encoding.get_ids().iter().map(|id| *id as i32).collect())
    }

    /// Ids of `text` without the letter `mark`. A spelling of an added token that has one inside stays plain text;
    /// others become that token.
    ///
    /// # Errors
    /// As for [`Tokenizer::encode`].
    pub(crate) fn encode_guarded(&self, text: &str, mark: Option<char>) -> Result<Vec<i32>> {
        let Some(mark) = mark.filter(|mark| text.contains(*mark)) else { return self.encode(text) };
        let encoding = self.inner.encode(text, false).map_err(|error| self.refused(error.as_ref()))?;
        let added = self.inner.get_added_tokens_decoder();
        let (mut ids, mut run) = (Vec::new(), 0);
        for (id, (start, end)) in encoding.get_ids().iter().zip(encoding.get_offsets()) {
            // A model may answer an added token for a letter that it does not have.
            if added.get(id).is_some_and(|token| text[*start..*end].trim() == token.content.trim()) {
                ids.extend(self.encode_plain(&text[run..*start].replace(mark, ""))?);
                ids.push(*id as i32);
                run = *end;
            }
        }
        ids.extend(self.encode_plain(&text[run..].replace(mark, ""))?);
        Ok(ids)
    }

    /// Spellings of the added tokens that no client may write, with their ids: special ones, and others of three
    /// letters or more.
    pub(crate) fn guarded(&self) -> Vec<(String, i32)> {
        let added = self.inner.get_added_tokens_decoder();
        let kept = added.iter().filter(|(_, token)| {
            token.special || (token.content.chars().count() > 2 && !token.content.trim().is_empty())
        });
        let mut kept: Vec<_> = kept.map(|(id, token)| (token.content.clone(), *id as i32)).collect();
        kept.sort();
        kept
    }

    /// The id of a token by its spelling.
    pub(crate) fn id(&self, token: &str) -> Option<i32> {
        self.inner.token_to_id(token).map(|id| id as i32)
    }

    /// An error that names this tokenizer.
    pub(crate) fn unusable(&self, reason: String) -> Error {
        Error::Tokenizer { path: self.path.clone(), reason }
    }

    /// The text of `ids`, without special tokens; an id that it does not have adds nothing.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if its decoder fails.
    pub fn decode(&self, ids: &[i32]) -> Result<String> {
        self.decoded(ids, true)
    }

    /// The same with special tokens.
    ///
    /// # Errors
    /// As for [`Tokenizer::decode`].
    pub(crate) fn decode_all(&self, ids: &[i32]) -> Result<String> {
        self.decoded(ids, false)
    }

    fn decoded(&self, ids: &[i32], without_special: bool) -> Result<String> {
        let ids: Vec<u32> = ids.iter().map(|id| *id as u32).collect();
        self.inner.decode(&ids, without_special).map_err(|error| self.refused(error.as_ref()))
    }

    /// The text of `ids`, of special tokens with those of `kept` alone.
    ///
    /// # Errors
    /// As for [`Tokenizer::decode`].
    pub(crate) fn decode_keeping(&self, ids: &[i32], kept: &[&str]) -> Result<String> {
        let added = self.inner.get_added_tokens_decoder();
        let stays = |id: &&i32| {
            let token = added.get(&(**id as u32));
            token.is_none_or(|token| !token.special || kept.contains(&token.content.as_str()))
        };
        self.decode_all(&ids.iter().filter(stays).copied().collect::<Vec<_>>())
    }

    /// The text of one id, special or not; none if it has no such id.
    #[must_use]
    pub fn token(&self, id: i32) -> Option<String> {
        u32::try_from(id).ok().and_then(|id| self.inner.id_to_token(id))
    }

    /// One past the largest id.
    #[must_use]
    pub fn ids(&self) -> u64 {
        self.inner.get_vocab(true).values().max().map_or(0, |id| u64::from(*id) + 1)
    }

    fn refused(&self, error: &(dyn std::error::Error + Send + Sync)) -> Error {
        Error::Tokenizer { path: self.path.clone(), reason: error.to_string() }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("path", &self.path).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    use super::*;

    /// A byte-level tokenizer with these steps before its last one, whose words are GPT-2's if `use_regex`.
    fn tokenizer(steps: &[Value], use_regex: bool, normalizer: Value) -> Tokenizer {
        let mut letters: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
        letters.sort();
        letters.extend(["th", "the", "Ġthe", "in", "ĊĊ", "Ã©"].map(str::to_owned));
        let vocab: serde_json::Map<_, _> =
            letters.iter().enumerate().map(|(id, letter)| (letter.clone(), json!(id))).collect();
        let added = |at: usize, content: &str, special: bool| {
            json!({"id": letters.len() + at, "content": content, "special": special, "single_word": false,
                   "lstrip": !special, "rstrip": false, "normalized": !special})
        };
        let last = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
        let steps = [steps, &[last]].concat();
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": normalizer,
            "added_tokens": [added(0, "<|end|>", true), added(1, "tool", false)],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "post_processor": null, "decoder": null,
            "model": {"type": "BPE", "vocab": vocab,
                      "merges": ["t h", "th e", "Ġ the", "i n", "Ċ Ċ", "Ã ©"]},
        });
        Tokenizer::from_bytes("tokenizer.json", json.to_string().as_bytes()).unwrap()
    }

    fn tokenizers() -> Vec<Tokenizer> {
        let digits = json!({"type": "Digits", "individual_digits": true});
        let pattern =
            json!({"Regex": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"});
        let split = json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false});
        vec![
            tokenizer(&[split], false, json!({"type": "NFC"})),
            tokenizer(&[digits], true, Value::Null),
            tokenizer(&[], true, Value::Null),
            tokenizer(&[], false, Value::Null),
        ]
    }

    proptest! {
        #[test]
        fn words_have_the_ids_that_the_library_gives(
            parts in prop::collection::vec(
                prop_oneof!["\\PC{0,6}", "[a-z0-9' \n\t\r]{0,12}",
                            prop::sample::select(vec!["<|end|>", "tool", "the", "e\u{301}", "é", "\n\n", "日本", "😀", "\0"])
                                .prop_map(str::to_owned)],
                0..12,
            ),
        ) {
            let text = parts.concat();
            for tokenizer in tokenizers() {
                let ids = words::encode(&tokenizer.inner, &text).unwrap().unwrap();
                prop_assert_eq!(ids, tokenizer.by_library(&text).unwrap());
            }
        }
    }

    #[test]
    fn what_is_no_cut_is_left_to_the_library() {
        let merged = json!({"type": "Split", "pattern": {"String": "a"}, "behavior": "MergedWithNext", "invert": false});
        let runs = json!({"type": "Digits", "individual_digits": false});
        for step in [merged, runs, json!({"type": "Whitespace"})] {
            let tokenizer = tokenizer(&[step], true, Value::Null);
            assert!(words::encode(&tokenizer.inner, "a b").is_none());
            assert!(!tokenizer.encode("a b").unwrap().is_empty());
        }
    }
}
