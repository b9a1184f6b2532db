//! Text of clients, of which nothing may become a special token.

use regex::Regex;

use crate::message::{Json, Message};
use crate::tokenizer::Tokenizer;

/// Finds spellings of special tokens.
#[derive(Debug)]
pub(super) struct Guard {
    spelling: Option<Regex>,
}

/// What of a conversation is rendered. Spellings of special tokens have the mark behind their first letter.
pub(super) struct Guarded {
    pub(super) messages: Vec<Message>,
    pub(super) tools: Vec<Json>,
    pub(super) mark: Option<char>,
}

impl Guard {
    /// # Errors
    /// The spelling of a token that is that token even as plain text.
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, crate::Error> {
        let guarded = tokenizer.guarded();
        for (spelling, id) in &guarded {
            if spelling.chars().nth(1).is_none() {
                let reason =
                    format!("its token {id} is the letter `{spelling}`, which no text can be kept from");
                return Err(tokenizer.unusable(reason));
            }
            if tokenizer.encode_plain(spelling)?.contains(id) {
                let reason = format!("the text `{spelling}` of a user is its token {id} even as plain text");
                return Err(tokenizer.unusable(reason));
            }
        }
        let spellings: Vec<String> = guarded.iter().map(|(spelling, _)| regex::escape(spelling)).collect();
        let spelling = match spellings.is_empty() {
            true => None,
            false => {
                let found = Regex::new(&spellings.join("|"));
                Some(found.map_err(|error| tokenizer.unusable(error.to_string()))?)
            }
        };
        Ok(Guard { spelling })
    }

    pub(super) fn guard(&self, messages: &[Message], tools: &[Json]) -> Guarded {
        let (mut messages, mut tools) = (messages.to_vec(), tools.to_vec());
        let Some(spelling) = &self.spelling else { return Guarded { messages, tools, mark: None } };
        let mut is_found = false;
        let mut taken = std::collections::BTreeSet::new();
        let private = '\u{e000}'..='\u{f8ff}';
        every(&mut messages, &mut tools, &mut |text| {
            is_found |= spelling.is_match(text);
            taken.extend(text.chars().filter(|letter| private.contains(letter)));
        });
        if !is_found {
            return Guarded { messages, tools, mark: None };
        }
        // A text with all 6,400 letters of private use is no text; it loses the last one.
        let mark = private.clone().find(|letter| !taken.contains(letter)).unwrap_or('\u{f8ff}');
        every(&mut messages, &mut tools, &mut |text| {
            while spelling.is_match(text) {
                let broken = spelling.replace_all(text, |found: &regex::Captures<'_>| {
                    let first = found[0].chars().next().map_or(0, char::len_utf8);
                    format!("{}{mark}{}", &found[0][..first], &found[0][first..])
                });
                *text = broken.into_owned();
            }
        });
        Guarded { messages, tools, mark: Some(mark) }
    }
}

/// Does it to every text that a client wrote.
fn every(messages: &mut [Message], tools: &mut [Json], work: &mut dyn FnMut(&mut String)) {
    for message in messages {
        work(&mut message.content);
        if let Some(reasoning) = &mut message.reasoning {
            work(reasoning);
        }
        if let Some(id) = &mut message.call_id {
            work(id);
        }
        for call in &mut message.calls {
            work(&mut call.id);
            work(&mut call.name);
            inside(&mut call.arguments, work);
        }
    }
    tools.iter_mut().for_each(|tool| inside(tool, work));
}

fn inside(value: &mut Json, work: &mut dyn FnMut(&mut String)) {
    match value {
        Json::String(text) => work(text),
        Json::Array(elements) => elements.iter_mut().for_each(|element| inside(element, work)),
        Json::Object(members) => {
            let taken = std::mem::take(members);
            members.extend(taken.into_iter().map(|(mut key, mut value)| {
                work(&mut key);
                inside(&mut value, work);
                (key, value)
            }));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn token_of_a_single_letter_is_refused() {
        let token = |content: &str| {
            let added = json!({"id": 1, "content": content, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false});
            let model = json!({"type": "WordLevel", "vocab": {"a": 0, content: 1}, "unk_token": "a"});
            let split = json!({"type": "Split", "pattern": {"Regex": "(?s)."}, "behavior": "Isolated", "invert": false});
            let tokenizer =
                json!({"version": "1.0", "added_tokens": [added], "pre_tokenizer": split, "model": model});
            Tokenizer::from_bytes("tokenizer.json", tokenizer.to_string().as_bytes()).unwrap()
        };
        assert!(Guard::new(&token("<|end|>")).is_ok());
        let refused = Guard::new(&token("▁")).unwrap_err().to_string();
        assert!(refused.contains("its token 1 is the letter `▁`"), "{refused}");
    }
}
