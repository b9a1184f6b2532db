//! A row becomes a prompt.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use minijinja::Value;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::rows::{Fault, Fields, Row, Wanted, fields, said};
use super::{DataOptions, Place, Tokenizer};
use crate::chat::{ChatTemplate, Conversation, LossMask};
use crate::error::{Result, input, short};
use crate::sample::Prompt;

/// A prompt to train on.
#[derive(Debug, Clone)]
pub struct Example {
    /// The row that it is from.
    pub place: Place,
    /// What the model reads.
    pub text: String,
    /// The same as token ids; at least one.
    pub tokens: Vec<i32>,
    /// Of a conversation, per token: 1 to learn it, 0 not to; empty for a prompt.
    pub loss_mask: Vec<u8>,
    /// What rewards compare with, as the JSON in the row.
    pub label: Option<Box<RawValue>>,
    /// The row's object for rewards, as JSON.
    pub metadata: Option<Box<RawValue>>,
}

impl From<Example> for Prompt {
    fn from(example: Example) -> Self {
        let Example { place, text, tokens, label, metadata, loss_mask: _ } = example;
        Prompt { tokens, text, label, metadata, place }
    }
}

/// A row that is not trained on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The row.
    pub place: Place,
    /// Why.
    pub why: Why,
}

/// Why a row is not trained on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// It is no prompt.
    Bad {
        /// What a row has to be.
        expected: String,
        /// What this one is.
        found: String,
    },
    /// Its prompt has too many tokens.
    TooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens that it may have.
        limit: usize,
    },
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.why {
            Why::Bad { expected, found } => write!(f, "{}: expected {expected}, found {found}", self.place),
            Why::TooLong { tokens, limit } => {
                write!(f, "{}: a prompt of {tokens} tokens, of which {limit} are allowed", self.place)
            }
        }
    }
}

/// What makes prompts of rows: the options, with a tokenizer and, if asked for, a chat template.
#[derive(Debug, Clone)]
pub struct RowReader {
    pub(crate) options: DataOptions,
    pub(super) tokenizer: Arc<Tokenizer>,
    template: Option<Arc<ChatTemplate>>,
    variables: Option<Value>,
    limit: usize,
}

impl RowReader {
    /// Reads with the tokenizer, and if asked for the chat template, of a checkpoint directory.
    ///
    /// # Errors
    /// What the checkpoint or the template's variables are refused for.
    pub fn open(options: DataOptions, checkpoint: &Path) -> Result<Self> {
        let tokenizer = Arc::new(Tokenizer::open(checkpoint)?);
        let template = (options.apply_chat_template || options.loss_mask.is_some())
            .then(|| ChatTemplate::open(checkpoint))
            .transpose()?;
        Self::new(options, tokenizer, template)
    }

    /// Reads with a tokenizer and a template that are already there.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) for variables that are no JSON object.
    pub fn new(
        options: DataOptions,
        tokenizer: Arc<Tokenizer>,
        template: Option<ChatTemplate>,
    ) -> Result<Self> {
        let what = "apply_chat_template_kwargs";
        let parse = |text: &String| {
            let value: Value =
                serde_json::from_str(text).map_err(|error| input(what, "a JSON object", error))?;
            let is_map = value.kind() == minijinja::value::ValueKind::Map;
            if is_map { Ok(value) } else { Err(input(what, "a JSON object", format!("`{}`", short(text)))) }
        };
        let variables = options.apply_chat_template_kwargs.as_ref().map(parse).transpose()?;
        // A prompt leaves room for an answer, a conversation need not.
        let room = usize::from(options.loss_mask.is_none());
        let context = options.rollout_max_context_len.map(|tokens| tokens.saturating_sub(room));
        let limits = options.rollout_max_prompt_len.into_iter().chain(context);
        let limit = limits.min().unwrap_or(usize::MAX);
        Ok(RowReader { options, tokenizer, template: template.map(Arc::new), variables, limit })
    }

    /// The tokenizer that it reads with.
    #[must_use]
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Makes a prompt of a row of JSON.
    ///
    /// # Errors
    /// [`Refused`] with what it has to be.
    pub fn read(&self, row: &str, place: Place) -> Result<Example, Refused> {
        let row = Row { line: place.line, fields: fields(row.as_bytes()) };
        self.example(&row, &place.path)
    }

    /// The fields that are read of a row.
    pub(super) fn wanted(&self) -> Wanted<'_> {
        let options = &self.options;
        let required = [Some(options.input_key.as_str()), options.label_key.as_deref()];
        Wanted {
            required: required.into_iter().flatten().collect(),
            optional: vec![&options.metadata_key, &options.tool_key],
        }
    }

    pub(super) fn example(&self, row: &Row, path: &Arc<Path>) -> Result<Example, Refused> {
        let place = Place { path: path.clone(), line: row.line };
        let bad = |fault: Fault| Why::Bad { expected: fault.expected, found: fault.found };
        let made = match &row.fields {
            Ok(fields) => self.prompt(fields, &place),
            Err(fault) => Err(bad(fault.clone())),
        };
        made.map_err(|why| Refused { place, why })
    }

    fn prompt(&self, fields: &Fields, place: &Place) -> Result<Example, Why> {
        let bad = |fault: Fault| Why::Bad { expected: fault.expected, found: fault.found };
        let (text, learned) = match self.options.loss_mask {
            None => (self.text(fields).map_err(bad)?, Vec::new()),
            Some(mask) => self.conversation(fields, mask).map_err(bad)?,
        };
        let label = self.label(fields).map_err(bad)?;
        let metadata = optional(fields, &self.options.metadata_key, '{', "an object").map_err(bad)?;
        let tokens = match self.options.loss_mask {
            None => self.tokenizer.encode(&text).map(|tokens| (tokens, Vec::new())),
            Some(_) => self.tokenizer.encode_marked(&text, &learned),
        };
        let unknown = |error| bad(Fault::new("text that the tokenizer knows", error));
        let (tokens, loss_mask) = tokens.map_err(unknown)?;
        if tokens.is_empty() {
            return Err(bad(Fault::new("a prompt", "no tokens")));
        }
        // The first token is read only.
        if self.options.loss_mask.is_some() && !loss_mask.iter().skip(1).any(|&learn| learn == 1) {
            return Err(bad(Fault::new("a turn of the assistant to learn", "none")));
        }
        if tokens.len() > self.limit {
            return Err(Why::TooLong { tokens: tokens.len(), limit: self.limit });
        }
        let metadata = metadata.map(ToOwned::to_owned);
        Ok(Example { place: place.clone(), text, tokens, loss_mask, label, metadata })
    }

    /// The prompt as the model reads it.
    fn text(&self, fields: &Fields) -> Result<String, Fault> {
        let key = &self.options.input_key;
        let expected = format!("text or a list of messages in `{key}`");
        let input = fields.get(key).ok_or_else(|| absent(&expected, fields))?.get();
        match (&self.template, input.as_bytes().first()) {
            (None, Some(b'"')) => parse(input),
            (Some(template), Some(b'"')) => {
                let content: String = parse(input)?;
                let message = Value::from_pairs([("role", "user"), ("content", content.as_str())]);
                self.render(template, Value::from(vec![message]), fields)
            }
            (Some(template), Some(b'[')) => self.render(template, messages(input, &expected)?, fields),
            (None, Some(b'[')) => Err(Fault::new(
                format!("text in `{key}`"),
                "a list of messages, which `apply_chat_template` renders",
            )),
            _ => Err(Fault::new(expected, format!("`{}`", short(input)))),
        }
    }

    /// A whole conversation as the model reads it, and the bytes of it that are learned.
    fn conversation(&self, fields: &Fields, mask: LossMask) -> Result<(String, Vec<Range<usize>>), Fault> {
        let key = &self.options.input_key;
        let expected = format!("a list of messages in `{key}`");
        let input = fields.get(key).ok_or_else(|| absent(&expected, fields))?.get();
        let Some(template) = self.template.as_ref().filter(|_| input.starts_with('[')) else {
            return Err(Fault::new(expected, format!("`{}`", short(input))));
        };
        let messages = messages(input, &expected)?;
        let rendered = template.conversation(&messages, self.tools(fields)?, self.variables.as_ref(), mask);
        let Conversation { text, learned } = rendered.map_err(untaken)?;
        Ok((text, learned))
    }

    fn render(&self, template: &ChatTemplate, messages: Value, fields: &Fields) -> Result<String, Fault> {
        let rendered = template.render(messages, self.tools(fields)?, self.variables.as_ref());
        rendered.map_err(untaken)
    }

    /// The row's list of tools, if it has one.
    fn tools(&self, fields: &Fields) -> Result<Option<Value>, Fault> {
        let key = &self.options.tool_key;
        let tools = match fields.get(key).map(|tools| tools.get()) {
            // Some data sets keep them as text.
            Some(text) if text.starts_with('"') => Some(parse::<String>(text)?),
            Some("null") | None => None,
            Some(list) => Some(list.to_owned()),
        };
        let list = |text: String| match text.trim_start().starts_with('[') {
            true => parse::<Value>(&text),
            false => Err(Fault::new(format!("a list of tools in `{key}`"), format!("`{}`", short(&text)))),
        };
        tools.map(list).transpose()
    }

    fn label(&self, fields: &Fields) -> Result<Option<Box<RawValue>>, Fault> {
        let Some(key) = &self.options.label_key else { return Ok(None) };
        match fields.get(key) {
            Some(label) if label.get() != "null" => Ok(Some(label.clone())),
            Some(_) => Err(Fault::new(format!("a label in `{key}`"), "null")),
            None => Err(absent(&format!("a label in `{key}`"), fields)),
        }
    }
}

/// A field that a row has to have, and lacks.
fn absent(expected: &str, fields: &Fields) -> Fault {
    let names: Vec<_> = fields.keys().map(|name| format!("`{}`", short(name))).take(20).collect();
    let has = if names.is_empty() { "no fields".to_owned() } else { names.join(", ") };
    Fault::new(expected, format!("no such field; the row has {has}"))
}

/// A field that a row may lack or have empty, but not of another form.
fn optional<'f>(
    fields: &'f Fields,
    key: &str,
    first: char,
    form: &str,
) -> Result<Option<&'f RawValue>, Fault> {
    match fields.get(key) {
        Some(value) if value.get().starts_with(first) => Ok(Some(value)),
        Some(value) if value.get() != "null" => {
            Err(Fault::new(format!("{form} in `{key}`"), format!("`{}`", short(value.get()))))
        }
        _ => Ok(None),
    }
}

/// A list of messages, each an object with a role.
fn messages(text: &str, expected: &str) -> Result<Value, Fault> {
    let messages: Value = parse(text)?;
    if messages.len() == Some(0) {
        return Err(Fault::new(expected, "an empty list"));
    }
    let role = |message: &Value| message.get_attr("role").is_ok_and(|role| role.as_str().is_some());
    let mut all = messages.try_iter().map_err(|error| Fault::new(expected, error))?;
    match all.find(|message| !role(message)) {
        None => Ok(messages),
        Some(message) => {
            let found = short(&message.to_string());
            Err(Fault::new("messages that are objects with a `role`", format!("`{found}`")))
        }
    }
}

/// What the chat template said of messages.
fn untaken(said: String) -> Fault {
    Fault::new("messages that the chat template takes", format!("its error: {said}"))
}

fn parse<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, Fault> {
    serde_json::from_str(text).map_err(|error| Fault::new("JSON", said(&error)))
}
