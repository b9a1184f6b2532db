//! Rewards that need nothing but answer and label. The names are those of slime's `--rm-type`.

use std::collections::BTreeMap;
use std::str::FromStr;

use async_trait::async_trait;
use driftless_problems::math::{boxed, equal};
use regex::Regex;

use super::{Given, Reward};
use crate::error::{Error, Result, input};
use crate::sample::Answer;

/// A rule that compares an answer with its label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuiltIn {
    /// 1 if answer and label are the same text, but for spaces around them.
    Exact,
    /// 1 if the last `\boxed{…}` has the label's value.
    Math,
    /// 1 if what follows the last `Answer:`, or else the last `\boxed{…}`, has the label's value; −1 if not.
    Dapo,
    /// As `Math`, of what follows `</think>` or `###Response`; 0 if neither is there.
    Deepscaler,
    /// Harmonic mean of precision and recall over words, without case, punctuation and articles.
    F1,
    /// 1 if the letter that is chosen is the label's.
    Gpqa,
    /// 1 if the label, a regular expression, matches somewhere in the answer.
    Regex,
}

impl BuiltIn {
    /// All of them by name.
    pub const NAMES: [(&str, BuiltIn); 7] = [
        ("exact", BuiltIn::Exact),
        ("math", BuiltIn::Math),
        ("dapo", BuiltIn::Dapo),
        ("deepscaler", BuiltIn::Deepscaler),
        ("f1", BuiltIn::F1),
        ("gpqa", BuiltIn::Gpqa),
        ("regex", BuiltIn::Regex),
    ];

    /// The reward of one answer.
    ///
    /// # Errors
    /// [`Error::Reward`] without a label, or with one that is no regular expression where one is needed.
    pub fn of(self, answer: &Answer) -> Result<f32> {
        let label = answer.label_text()?;
        let (said, label) = (answer.response.trim(), label.trim());
        let right = match self {
            BuiltIn::Exact => said == label,
            BuiltIn::Math => right(boxed(said), label),
            BuiltIn::Dapo => {
                let end = said.rfind("Answer:").map(|at| &said[at + "Answer:".len()..]);
                let line = end.and_then(|rest| rest.trim_start().lines().next());
                let right = right(line.or_else(|| boxed(said)), label);
                return Ok(if right { 1.0 } else { -1.0 });
            }
            BuiltIn::Deepscaler => {
                let answered = ["</think>", "###Response"].iter().find_map(|mark| said.rsplit_once(mark));
                right(answered.and_then(|(_, answer)| boxed(answer)), label)
            }
            BuiltIn::F1 => return Ok(f1(said, label)),
            BuiltIn::Gpqa => {
                choice(said).is_some_and(|letter| label.to_ascii_uppercase() == letter.to_string())
            }
            BuiltIn::Regex => {
                let todo = "correct the label; look-around and back-references are not supported";
                let pattern = Regex::new(label);
                pattern
                    .map_err(|error| answer.refused("a regular expression", error, todo))?
                    .is_match(&answer.response)
            }
        };
        Ok(f32::from(u8::from(right)))
    }
}

impl FromStr for BuiltIn {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let names = Self::NAMES.map(|(name, _)| name).join(", ");
        let found = Self::NAMES.into_iter().find(|(known, _)| *known == name);
        let (_, rule) = found.ok_or_else(|| input("rm_type", format!("{names} or remote_rm"), name))?;
        Ok(rule)
    }
}

#[async_trait]
impl Reward for BuiltIn {
    async fn score(&self, answers: &[Answer]) -> Result<Vec<Result<Given>>> {
        Ok(answers.iter().map(|answer| self.of(answer).map(Given::from)).collect())
    }
}

/// Whether there is an answer and it has the label's value. A label may itself be boxed.
fn right(answer: Option<&str>, label: &str) -> bool {
    let label = boxed(label).unwrap_or(label);
    answer.is_some_and(|answer| equal(answer, label))
}

fn f1(said: &str, label: &str) -> f32 {
    let words = |text: &str| -> Vec<String> {
        let text: String =
            text.to_lowercase().chars().filter(|letter| !letter.is_ascii_punctuation()).collect();
        let articles = ["a", "an", "the"];
        text.split_whitespace().filter(|word| !articles.contains(word)).map(str::to_owned).collect()
    };
    let (said, label) = (words(said), words(label));
    let mut left: BTreeMap<&String, usize> = BTreeMap::new();
    label.iter().for_each(|word| *left.entry(word).or_default() += 1);
    let mut common = 0.0;
    for word in &said {
        if let Some(count) = left.get_mut(word).filter(|count| **count > 0) {
            *count -= 1;
            common += 1.0;
        }
    }
    // 2·P·R / (P + R) with P = common / said and R = common / label.
    let all = (said.len() + label.len()) as f32;
    if all == 0.0 { 1.0 } else { 2.0 * common / all }
}

/// The letter, A to J, that an answer ends up with: boxed, after `answer`, or its last one that stands alone.
fn choice(said: &str) -> Option<char> {
    let letter = |text: &str| {
        let text =
            text.trim().trim_start_matches(r"\text{").trim_matches(['(', ')', '}', '.', '*', ' ', ':']);
        let mut letters = text.chars();
        let first =
            letters.next().map(|letter| letter.to_ascii_uppercase()).filter(char::is_ascii_uppercase)?;
        (('A'..='J').contains(&first) && letters.next().is_none_or(|next| !next.is_alphanumeric()))
            .then_some(first)
    };
    if let Some(letter) = boxed(said).and_then(letter) {
        return Some(letter);
    }
    let lower = said.to_ascii_lowercase();
    let after = lower.rfind("answer").map(|at| &said[at + "answer".len()..]);
    let named =
        after.and_then(|rest| letter(rest.trim_start_matches([' ', ':', '*', '(']).trim_start_matches("is")));
    let alone = || {
        let words = said.split(|letter: char| !letter.is_alphanumeric());
        words.rev().find(|word| word.len() == 1 && ("A"..="J").contains(word)).and_then(letter)
    };
    named.or_else(alone)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use serde_json::value::RawValue;

    fn score(rule: &str, said: &str, label: &str) -> f32 {
        let answer = Answer {
            sample: 7,
            prompt: String::new(),
            response: said.into(),
            label: Some(RawValue::from_string(label.into()).unwrap()),
            metadata: None,
            truncated: false,
            response_length: 1,
            given: None,
        };
        rule.parse::<BuiltIn>().unwrap().of(&answer).unwrap()
    }

    #[test]
    fn exact_compares_text_and_numbers_without_spaces_around() {
        assert_eq!(score("exact", " 42\n", "42"), 1.0);
        assert_eq!(score("exact", "42", "\"42\""), 1.0);
        assert_eq!(score("exact", "42.", "\"42\""), 0.0);
    }

    #[test]
    fn math_rules_read_the_answer_from_its_place() {
        assert_eq!(score("math", r"so \boxed{1} or \boxed{\frac{1}{2}}", "\"0.5\""), 1.0);
        assert_eq!(score("math", "0.5", "\"0.5\""), 0.0);
        assert_eq!(score("dapo", "Answer: 3\nAnswer: $1,000$", "1000"), 1.0);
        assert_eq!(score("dapo", r"\boxed{7}", "8"), -1.0);
        assert_eq!(score("deepscaler", r"\boxed{7}", "7"), 0.0);
        assert_eq!(score("deepscaler", r"\boxed{1}</think> \boxed{7}", "7"), 1.0);
    }

    #[test]
    fn words_are_compared_without_case_and_articles() {
        assert_eq!(score("f1", "The Eiffel tower!", "\"eiffel Tower\""), 1.0);
        assert_eq!(score("f1", "eiffel", "\"eiffel tower\""), 2.0 / 3.0);
        assert_eq!(score("f1", "", "\"eiffel tower\""), 0.0);
    }

    #[test]
    fn choices_are_found_where_people_put_them() {
        for said in
            ["The answer is (C).", r"\boxed{C}", "**Answer:** C", "A is wrong, B too. C", r"\boxed{\text{C}}"]
        {
            assert_eq!(score("gpqa", said, "\"C\""), 1.0, "{said}");
            assert_eq!(score("gpqa", said, "\"B\""), 0.0, "{said}");
        }
        assert_eq!(score("gpqa", "Can't say", "\"C\""), 0.0);
    }

    #[test]
    fn a_regular_expression_matches_anywhere() {
        assert_eq!(score("regex", "sum: 42!", r#""\\b42\\b""#), 1.0);
        assert_eq!(score("regex", "sum: 421", r#""\\b42\\b""#), 0.0);
    }
}
