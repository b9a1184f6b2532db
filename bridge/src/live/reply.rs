//! What a plugin answers to a call for a patch or a comparison: one JSON object behind a word, in the middle of what its engine says
//! (`docs/wire/engine.md`). The plugin makes it here, and the follower reads it here.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::http::excerpt;

/// Names that are told of many.
const NAMES_MAX: usize = 5;
/// What the object stands behind.
const WORD: &str = "driftless: ";

/// The answer of an engine's first rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PluginReply {
    /// The weights of every rank are the version's.
    Done(PatchDone),
    /// The weights of every rank were compared with a checkpoint.
    Compared(Compared),
    /// Nothing was written, or compared, at any rank.
    Refused(PatchRefused),
}

/// A patch that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PatchDone {
    /// Label of the version.
    #[serde(rename = "patched")]
    pub label: String,
    /// Elements that changed.
    pub elements: u64,
    /// Microseconds for which the delta was readied, while the engine generated.
    pub prepared_us: u64,
    /// Microseconds for which it was written.
    pub wrote_us: u64,
    /// Microseconds for which the engine's thread stood still.
    pub stood_still_us: u64,
    /// What became of the cache; `None` where the plugin left it alone.
    pub cache: Option<Cache>,
}

/// What became of the cache of the old weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// It is empty.
    Dropped,
    /// Requests hold it.
    Kept,
    /// Each request is keyed by the weights that fill its part of it: later ones find nothing of older weights.
    Versioned,
}

/// A comparison of live weights with a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compared {
    /// Label of the version, as it was asked for.
    #[serde(rename = "compared")]
    pub label: String,
    /// Tensors of the checkpoint of which at least one rank compared something.
    pub tensors: u64,
    /// Bytes that this rank read of them.
    pub bytes: u64,
    /// The tensors that differ at a rank.
    pub differing: Names,
    /// The tensors of the checkpoint that no rank's map has: nothing is known of them.
    pub unreached: Names,
    /// Microseconds that it took, for which the engine's thread stood still.
    pub took_us: u64,
}

/// Names of tensors.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    /// How many there are.
    pub count: u64,
    /// The first of them, in order.
    pub first: Vec<String>,
}

/// A patch that was not written, or a comparison that was not made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PatchRefused {
    /// Label of the version that was asked for.
    pub label: String,
    /// Why not.
    pub refused: String,
}

impl PatchDone {
    /// For how long the engine's thread stood still.
    pub fn stood_still(&self) -> Duration {
        Duration::from_micros(self.stood_still_us)
    }
}

impl Compared {
    /// Whether all that was compared is equal. That is nothing, where nothing was.
    pub fn is_equal(&self) -> bool {
        self.differing.count == 0 && self.tensors > 0
    }

    /// For how long the engine's thread stood still.
    pub fn took(&self) -> Duration {
        Duration::from_micros(self.took_us)
    }
}

impl Names {
    /// Counts names, and keeps the first.
    pub(super) fn of<'a>(names: impl Iterator<Item = &'a str>) -> Self {
        let mut out = Self::default();
        for name in names {
            if out.first.len() < NAMES_MAX {
                out.first.push(excerpt(name.as_bytes()));
            }
            out.count += 1;
        }
        out
    }
}

/// `a, b and 7 more`.
impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.first.join(", "))?;
        match self.count.saturating_sub(self.first.len() as u64) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

impl PatchRefused {
    /// Says that an engine loads instead.
    pub(crate) fn log(&self, engine: &str) {
        let (label, why) = (&self.label, excerpt(self.refused.as_bytes()));
        tracing::warn!(engine, label, why, "loads instead of being patched");
    }
}

impl PluginReply {
    /// The first answer in what an engine says, and what the engine says behind it.
    pub(crate) fn find(text: &str) -> Option<(Self, &str)> {
        let (_, object) = text.split_once(WORD)?;
        let mut objects = serde_json::Deserializer::from_str(object).into_iter::<Self>();
        let reply = objects.next()?.ok()?;
        Some((reply, &object[objects.byte_offset()..]))
    }
}

impl fmt::Display for PluginReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let object = serde_json::to_string(self).map_err(|_| fmt::Error)?;
        write!(f, "{WORD}{object}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done() -> PluginReply {
        let (label, elements, cache) = ("a:1".to_owned(), 7, Some(Cache::Dropped));
        let (prepared_us, wrote_us, stood_still_us) = (900, 250, 16_250);
        PluginReply::Done(PatchDone { label, elements, prepared_us, wrote_us, stood_still_us, cache })
    }

    #[test]
    fn reply_is_one_object_behind_a_word() {
        let text = done().to_string();
        let expected = r#"driftless: {"patched":"a:1","elements":7,"prepared_us":900,"wrote_us":250,"stood_still_us":16250,"cache":"dropped"}"#;
        assert_eq!(text, expected);
        let (label, refused) = ("a:1".into(), "a \"word\"\nof 'theirs' | driftless: {}".into());
        let text = PluginReply::Refused(PatchRefused { label, refused }).to_string();
        assert!(text.starts_with(r#"driftless: {"label":"a:1","refused":"a \"word\"\n"#), "{text}");
    }

    #[test]
    fn find_reads_what_display_wrote_amid_other_text() {
        let refused = PatchRefused { label: "a:1".into(), refused: "} \" \\ driftless: {".into() };
        for reply in [done(), PluginReply::Refused(refused)] {
            let text = format!("Call failed: {reply}. Weight version updated to a:1.");
            assert_eq!(PluginReply::find(&text), Some((reply, ". Weight version updated to a:1.")));
        }
        let later = r#"{"patched":"a:2","elements":1,"prepared_us":0,"wrote_us":0,"stood_still_us":0,"cache":"versioned","new":[1]}"#;
        let text = format!("{} | driftless: {later}", done());
        assert_eq!(PluginReply::find(&text).map(|(reply, _)| reply), Some(done()), "the first one's");
        assert!(
            PluginReply::find(&format!("driftless: {later}")).is_some(),
            "a field that is new is left out"
        );
    }

    #[test]
    fn comparison_is_told_as_an_object_too() {
        let names = |names: &[&str]| Names::of(names.iter().copied());
        let (label, tensors, bytes, took_us) = ("a:1".to_owned(), 9, 4096, 77);
        let (differing, unreached) = (names(&["a", "b", "c", "d", "e", "f", "g"]), names(&[]));
        let compared = Compared { label, tensors, bytes, differing, unreached, took_us };
        let text = PluginReply::Compared(compared.clone()).to_string();
        assert_eq!(
            text,
            r#"driftless: {"compared":"a:1","tensors":9,"bytes":4096,"differing":{"count":7,"first":["a","b","c","d","e"]},"unreached":{"count":0,"first":[]},"took_us":77}"#
        );
        assert_eq!(PluginReply::find(&text), Some((PluginReply::Compared(compared.clone()), "")));
        assert_eq!(compared.differing.to_string(), "a, b, c, d, e and 2 more");
        assert!(!compared.is_equal());
        let equal = Compared { differing: Names::default(), ..compared };
        assert!(equal.is_equal());
        assert!(!Compared { tensors: 0, ..equal }.is_equal(), "nothing was compared");
    }

    #[test]
    fn find_takes_nothing_else_for_a_reply() {
        for text in [
            "",
            "Succeeded to update model weights.",
            "driftless: patched to a:1, 7 elements in 0.250 ms, prepared in 0.900 ms, cache dropped, 16.250 ms in all.",
            "driftless: not patched to a:1: LookupError: nothing is prepared for it",
            r#"driftless: {"patched":"a:1"}"#,
            r#"driftless: {"refused":"#,
            "driftless: {}",
            "driftless: null",
        ] {
            assert_eq!(PluginReply::find(text), None, "{text}");
        }
    }
}
