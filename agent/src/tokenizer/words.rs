//! Ids of a byte-level model's words. The library follows each letter through each step, which takes more than half of its
//! time, and ids need none of that.

use std::sync::LazyLock;

use tokenizers::pattern::Pattern as _;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::tokenizer::{Model as _, Result, SplitDelimiterBehavior};
use tokenizers::utils::SysRegex;
use tokenizers::{ModelWrapper, OffsetReferential, OffsetType, PreTokenizerWrapper, Tokenizer};

/// Words of GPT-2, which a byte-level step finds where it is told to.
static GPT2: LazyLock<Option<SysRegex>> = LazyLock::new(|| {
    SysRegex::new(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+").ok()
});

/// The letter of each byte, as byte-level vocabularies have them.
static LETTERS: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut others = (256_u32..).filter_map(char::from_u32);
    std::array::from_fn(|byte| match byte as u8 {
        plain @ (b'!'..=b'~' | 0xa1..=0xac | 0xae..) => char::from(plain),
        _ => others.next().unwrap_or_default(),
    })
});

/// A step that cuts text into words.
enum Cut<'a> {
    Regex(&'a SysRegex),
    Digits,
}

/// Ids of `text`, as the library encodes it. None of a tokenizer that does more than to cut text and to read its bytes.
pub(super) fn encode(tokenizer: &Tokenizer, text: &str) -> Option<Result<Vec<i32>>> {
    let is_whole = tokenizer.get_truncation().is_none() && tokenizer.get_padding().is_none();
    let (true, ModelWrapper::BPE(_)) = (is_whole, tokenizer.get_model()) else { return None };
    let cuts = cuts(tokenizer.get_pre_tokenizer()?)?;
    Some(encoded(tokenizer, &cuts, text))
}

fn cuts(steps: &PreTokenizerWrapper) -> Option<Vec<Cut<'_>>> {
    let steps = match steps {
        PreTokenizerWrapper::Sequence(steps) => steps.as_ref(),
        one => std::slice::from_ref(one),
    };
    let (last, steps) = steps.split_last()?;
    let PreTokenizerWrapper::ByteLevel(ByteLevel { add_prefix_space: false, use_regex, .. }) = last else {
        return None;
    };
    let mut cuts = steps.iter().map(cut).collect::<Option<Vec<_>>>()?;
    if *use_regex {
        cuts.push(Cut::Regex(GPT2.as_ref()?));
    }
    Some(cuts)
}

fn cut(step: &PreTokenizerWrapper) -> Option<Cut<'_>> {
    match step {
        PreTokenizerWrapper::Split(split) => {
            let is_plain = split.behavior == SplitDelimiterBehavior::Isolated && !split.invert;
            is_plain.then_some(Cut::Regex(&split.regex))
        }
        PreTokenizerWrapper::Digits(digits) => digits.individual_digits.then_some(Cut::Digits),
        _ => None,
    }
}

fn encoded(tokenizer: &Tokenizer, cuts: &[Cut<'_>], text: &str) -> Result<Vec<i32>> {
    let pieces = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
    let (mut ids, mut letters) = (Vec::new(), String::new());
    for (piece, _, added) in pieces.get_splits(OffsetReferential::Normalized, OffsetType::None) {
        if let Some(added) = added {
            ids.extend(added.iter().map(|token| token.id as i32));
            continue;
        }
        let mut words = vec![piece];
        for cut in cuts {
            let mut shorter = Vec::with_capacity(words.len());
            for word in words {
                let found = match cut {
                    Cut::Regex(regex) => regex.find_matches(word)?,
                    Cut::Digits => char::is_numeric.find_matches(word)?,
                };
                shorter.extend(found.into_iter().map(|((start, end), _)| &word[start..end]));
            }
            words = shorter;
        }
        for word in words.into_iter().filter(|word| !word.is_empty()) {
            letters.clear();
            letters.extend(word.bytes().map(|byte| LETTERS[usize::from(byte)]));
            ids.extend(tokenizer.get_model().tokenize(&letters)?.iter().map(|token| token.id as i32));
        }
    }
    Ok(ids)
}
