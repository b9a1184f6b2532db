//! Output heads that are tied to the word embeddings: engines have one matrix for both, and load it as the embeddings.

use serde_json::Value;

use crate::error::{Error, Result};
use crate::manifest::Tensor;
use crate::snapshot::AuxFile;

/// Whether `config.json`, of these files, ties the model's output head to its word embeddings. One that leaves
/// this to the model's class, whose default is not known here, is taken for one that does not.
pub(crate) fn is_tied(files: &[AuxFile]) -> bool {
    let config = files.iter().find(|file| file.name() == "config.json");
    let Some(config) = config.and_then(|file| serde_json::from_slice::<Value>(file.bytes()).ok()) else {
        return false;
    };
    // Models of several modalities have a config of their language model in it. Where both speak, they agree.
    let said = [&config["tie_word_embeddings"], &config["text_config"]["tie_word_embeddings"]];
    said.contains(&&Value::Bool(true)) && !said.contains(&&Value::Bool(false))
}

/// Whether a tensor is an output head, by its name in a checkpoint.
#[must_use]
pub fn is_head(name: &str) -> bool {
    name.strip_suffix("lm_head.weight").is_some_and(|prefix| prefix.is_empty() || prefix.ends_with('.'))
}

/// Refuses a version, of these files and tensors, whose output head is not its word embeddings though `config.json`
/// ties them: engines would generate with the embeddings, and not with what was trained.
///
/// # Errors
/// [`Error::TensorMismatch`] for the head.
pub fn refuse_parted(files: &[AuxFile], tensors: &[Tensor]) -> Result<()> {
    match parted_head(tensors).filter(|_| is_tied(files)) {
        None => Ok(()),
        Some(head) => {
            let expected = "that of the word embeddings, as `tie_word_embeddings` of config.json says; engines \
                            generate with these. Tie the model, or say `false` there";
            Err(Error::mismatch(head, "content", expected, "that of no other tensor"))
        }
    }
}

/// An output head that no other tensor equals.
fn parted_head(tensors: &[Tensor]) -> Option<&str> {
    let alike = |a: &Tensor, b: &Tensor| (a.dtype, &a.shape, a.digest) == (b.dtype, &b.shape, b.digest);
    let has_twin =
        |head: &Tensor| tensors.iter().any(|tensor| tensor.name != head.name && alike(tensor, head));
    let mut alone = tensors.iter().filter(|tensor| tensor.aliases.is_empty() && is_head(&tensor.name));
    alone.find(|head| !has_twin(head)).map(|head| head.name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_ties_where_it_says_so_and_nowhere_that_it_does_not() {
        let tied = |config: &str| is_tied(&[AuxFile::new("config.json", config.into()).unwrap()]);
        for config in [
            r#"{"tie_word_embeddings": true}"#,
            r#"{"text_config": {"tie_word_embeddings": true}}"#,
            r#"{"tie_word_embeddings": true, "text_config": {"tie_word_embeddings": true}}"#,
            r#"{"tie_word_embeddings": null, "text_config": {"tie_word_embeddings": true}}"#,
        ] {
            assert!(tied(config), "{config}");
        }
        for config in [
            "{}",
            "{",
            "[]",
            r#"{"tie_word_embeddings": false}"#,
            r#"{"tie_word_embeddings": 1}"#,
            r#"{"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}"#,
            r#"{"tie_word_embeddings": true, "text_config": {"tie_word_embeddings": false}}"#,
            r#"{"text_config": 7}"#,
        ] {
            assert!(!tied(config), "{config}");
        }
        assert!(!is_tied(&[]));
    }

    #[test]
    fn heads_are_known_by_their_names() {
        for name in ["lm_head.weight", "language_model.lm_head.weight"] {
            assert!(is_head(name), "{name}");
        }
        for name in ["lm_head.bias", "xlm_head.weight", "model.embed_tokens.weight", "lm_head.weight_scale"] {
            assert!(!is_head(name), "{name}");
        }
    }
}
