//! Families over a small byte-level tokenizer, and engines that draw scripted texts in splits of their own.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;

use async_trait::async_trait;
use driftless_agent::chat::ChatTemplate;
use driftless_agent::message::{Ask, Message, Refusal, Role, Tools};
use driftless_agent::sessions::Draw;
use driftless_agent::{Family, Tokenizer};
use driftless_bridge::engine::{Finish, VersionSpan};
use driftless_bridge::{Generation, Rid, SamplingParams};
use serde_json::json;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

pub(crate) const TEMPLATES: [(&str, &str); 8] = [
    ("qwen3", include_str!("../templates/qwen3.jinja")),
    ("smollm2", include_str!("../templates/smollm2.jinja")),
    ("llama3", include_str!("../templates/llama3.jinja")),
    ("qwen35", include_str!("../templates/qwen35.jinja")),
    ("deepseek", include_str!("../templates/deepseek.jinja")),
    ("glm", include_str!("../templates/glm.jinja")),
    ("kimi", include_str!("../templates/kimi.jinja")),
    ("minimax", include_str!("../templates/minimax.jinja")),
];
pub(crate) const SPECIAL: [&str; 29] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "]~!b[",
    "]~b]",
    "[e~[",
];
pub(crate) const ADDED: [&str; 23] = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
];
const MERGES: [&str; 12] =
    ["t h", "th e", "Ġ the", "i n", "e r", "o n", "Ġ a", "l l", "Ċ Ċ", "s t", "a n", "e n"];

/// What is encoded by itself. Newlines are kept together, as families have them.
const WORDS: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// `tokenizer.json`: all bytes, a few merges, and the special tokens of all families.
pub(crate) fn tokenizer_json() -> String {
    let mut letters: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
    letters.sort();
    letters.extend(MERGES.iter().map(|merge| merge.replace(' ', "")));
    let vocabulary: BTreeMap<_, _> = letters.iter().enumerate().map(|(id, letter)| (letter, id)).collect();
    let added = SPECIAL.iter().map(|token| (token, true)).chain(ADDED.iter().map(|token| (token, false)));
    let added: Vec<_> = added
        .enumerate()
        .map(|(at, (token, special))| {
            json!({"id": letters.len() + at, "content": token, "special": special, "single_word": false,
                   "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": MERGES},
    })
    .to_string()
}

pub(crate) fn tokenizer() -> Tokenizer {
    Tokenizer::from_bytes("tokenizer.json", tokenizer_json().as_bytes()).unwrap()
}

/// One of them for texts of tests.
pub(crate) fn shared() -> &'static Tokenizer {
    static SHARED: std::sync::LazyLock<Tokenizer> = std::sync::LazyLock::new(tokenizer);
    &SHARED
}

pub(crate) fn template(name: &str) -> ChatTemplate {
    let source = TEMPLATES.iter().find(|(known, _)| *known == name).unwrap().1;
    ChatTemplate::from_source(source, &[("bos_token", "<|begin_of_text|>")]).unwrap()
}

pub(crate) fn family(name: &str) -> Family {
    Family::new(template(name), tokenizer()).unwrap()
}

/// A token that ends an answer of this template.
pub(crate) fn end_of(template: &str) -> &'static str {
    match template {
        "llama3" => "<|eot_id|>",
        "deepseek" => "<｜end▁of▁sentence｜>",
        "glm" => "<|user|>",
        "minimax" => "[e~[",
        _ => "<|im_end|>",
    }
}

/// What a model says behind the start of an answer, which may have begun its thoughts.
pub(crate) fn thought(template: &str, text: &str) -> String {
    match template {
        "qwen35" | "minimax" => format!("hm\n</think>\n\n{text}"),
        "kimi" => format!("hm</think>{text}"),
        _ => text.to_owned(),
    }
}

/// Whether its template writes a system message in the middle, behind an answer that ends with [`end_of`].
pub(crate) fn has_system_anywhere(template: &str) -> bool {
    !["qwen35", "deepseek", "glm", "minimax"].contains(&template)
}

/// A call as models of its family write it.
pub(crate) fn call_of(template: &str, name: &str, key: &str, value: &str) -> String {
    let json = format!("{{\"{key}\": {value}}}");
    match template {
        "llama3" => format!("{{\"name\": \"{name}\", \"parameters\": {json}}}"),
        "qwen35" => format!(
            "<tool_call>\n<function={name}>\n<parameter={key}>\n{}\n</parameter>\n</function>\n</tool_call>",
            value.trim_matches('"')
        ),
        "deepseek" => format!(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json}\n```\
             <｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        "glm" => format!(
            "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{}</arg_value></tool_call>",
            value.trim_matches('"')
        ),
        "kimi" => format!(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{json}\
             <|tool_call_end|><|tool_calls_section_end|>"
        ),
        "minimax" => format!(
            "\n<minimax:tool_call>\n<invoke name=\"{name}\">\n<parameter name=\"{key}\">{}</parameter>\n</invoke>\n\
             </minimax:tool_call>",
            value.trim_matches('"')
        ),
        _ => format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {json}}}\n</tool_call>"),
    }
}

/// An answer in the split that its text has.
pub(crate) fn generation(text: &str, end: &str) -> Generation {
    generated(shared().encode(&format!("{text}{end}")).unwrap())
}

/// An answer of these ids.
pub(crate) fn generated(output_ids: Vec<i32>) -> Generation {
    Generation {
        rid: Rid::new(1, 1),
        engine: String::new(),
        log_probs: vec![-1.0; output_ids.len()],
        output_ids,
        spans: Vec::new(),
        spans_reported: true,
        finish: Finish::Stop,
        retractions: 0,
        cached_tokens: None,
        replies: Vec::new(),
    }
}

pub(crate) fn message(role: Role, content: &str) -> Message {
    Message { role, content: content.to_owned(), reasoning: None, calls: Vec::new(), call_id: None }
}

pub(crate) fn user(content: &str) -> Message {
    message(Role::User, content)
}

pub(crate) fn ask(messages: &[Message]) -> Ask {
    Ask {
        messages: messages.to_vec(),
        tools: Tools::default(),
        max_tokens: None,
        stop: Vec::new(),
        branch: None,
        is_auxiliary: false,
    }
}

/// Numbers that repeat with their seed.
pub(crate) struct Dice(pub u64);

impl Dice {
    pub(crate) fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % most
    }

    pub(crate) fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize].clone()
    }
}

/// A generation that an engine was asked for, and made.
#[derive(Debug, Clone)]
pub(crate) struct Drawn {
    pub(crate) nth: u64,
    pub(crate) input_ids: Vec<i32>,
    pub(crate) sampling: SamplingParams,
    pub(crate) made: Generation,
}

/// Draws scripted texts. Splits, log-probabilities and versions come of the session and the number.
pub(crate) struct Script {
    tokenizer: Tokenizer,
    end: &'static str,
    /// Texts that are drawn next; `Yes.` where there is none.
    pub(crate) texts: Mutex<VecDeque<String>>,
    /// Of this many draws, one is broken off; none if 0.
    pub(crate) aborts: u64,
    pub(crate) drawn: Mutex<Vec<Drawn>>,
}

impl Script {
    pub(crate) fn new(template: &str, texts: &[&str]) -> Self {
        let script = Self::over(template, tokenizer());
        script.texts.lock().unwrap().extend(texts.iter().map(|text| (*text).to_owned()));
        script
    }

    /// One that draws tokens of a checkpoint's.
    pub(crate) fn over(template: &str, tokenizer: Tokenizer) -> Self {
        let (texts, drawn) = Default::default();
        Script { tokenizer, end: end_of(template), texts, aborts: 0, drawn }
    }

    /// Ids of a text, cut into pieces that its own encoding does not have.
    pub(crate) fn split(&self, text: &str, dice: &mut Dice) -> Vec<i32> {
        let (mut ids, mut piece) = (Vec::new(), String::new());
        for letter in text.chars() {
            piece.push(letter);
            let is_open = ADDED
                .iter()
                .chain(&SPECIAL)
                .any(|token| piece.char_indices().any(|(at, _)| token.starts_with(&piece[at..])));
            if !is_open && dice.below(4) == 0 {
                ids.extend(self.tokenizer.encode(&std::mem::take(&mut piece)).unwrap());
            }
        }
        ids.extend(self.tokenizer.encode(&piece).unwrap());
        ids
    }
}

#[async_trait]
impl Draw for Script {
    async fn draw(
        &self,
        session: &str,
        nth: u64,
        input_ids: Vec<i32>,
        sampling: SamplingParams,
    ) -> Result<Generation, Refusal> {
        // Other tasks come in between, as they do where an engine is waited for.
        tokio::task::yield_now().await;
        let mut dice = Dice(nth ^ (session.bytes().map(u64::from).sum::<u64>() * 1000));
        let text = self.texts.lock().unwrap().pop_front().unwrap_or_else(|| "Yes.".to_owned());
        let mut ids = self.split(&text, &mut dice);
        ids.extend(self.tokenizer.encode(self.end).unwrap());
        let mut finish = Finish::Stop;
        if self.aborts > 0 && dice.below(self.aborts) == 0 {
            let kept = dice.below(ids.len() as u64) as usize;
            let left = self.tokenizer.decode(&ids[kept..]).unwrap();
            // Half a letter is no text to go on with.
            if !left.contains('\u{fffd}') {
                self.texts.lock().unwrap().push_front(left);
                ids.truncate(kept);
                finish = Finish::Abort { message: "an update".to_owned() };
            }
        }
        if ids.len() > sampling.max_new_tokens as usize {
            ids.truncate(sampling.max_new_tokens as usize);
            finish = Finish::Length;
        }
        let log_probs = ids.iter().map(|_| -(dice.below(1 << 20) as f32) / 1e5).collect();
        let middle = dice.below(ids.len() as u64 + 1) as u32;
        let span = |version: u64, start, end| VersionSpan { label: format!("v{version}"), start, end };
        let spans = [span(nth, 0, middle), span(!nth, middle, ids.len() as u32)];
        let made = Generation {
            rid: Rid::new(1, nth),
            engine: format!("engine-{nth}"),
            output_ids: ids,
            log_probs,
            spans: spans.into_iter().filter(|span| span.start < span.end).collect(),
            spans_reported: true,
            finish,
            retractions: 0,
            cached_tokens: None,
            replies: Vec::new(),
        };
        let drawn = Drawn { nth, input_ids, sampling, made: made.clone() };
        self.drawn.lock().unwrap().push(drawn);
        Ok(made)
    }
}
