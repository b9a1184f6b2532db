//! A row becomes a prompt.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use minijinja::Value;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::rows::{Fields, Row, Wanted, Why, fields, said};
use super::{DataOptions, Place, Tokenizer};
use crate::error::{Result, input, short};
use crate::sample::Prompt;
use driftless_agent::chat::{Chat, ChatTemplate, Conversation, LossMask};

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
    /// The messages that a prompt is rendered from, as a JSON list, if it is.
    pub messages: Option<Box<RawValue>>,
    /// The row's tools, as a JSON list.
    pub tools: Option<Box<RawValue>>,
}

impl From<Example> for Prompt {
    fn from(example: Example) -> Self {
        let Example { place, text, tokens, label, metadata, messages, tools, loss_mask: _ } = example;
        Prompt { tokens, text, label, metadata, messages, tools, place }
    }
}

/// A row that is not trained on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {why}")]
pub struct Refused {
    /// The row.
    pub place: Place,
    /// Why.
    pub why: Why,
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
            all: false,
        }
    }

    pub(super) fn example(&self, row: &Row, path: &Arc<Path>) -> Result<Example, Refused> {
        let place = Place { path: path.clone(), line: row.line };
        let made = row.fields.as_ref().map_err(Why::clone).and_then(|fields| self.prompt(fields, &place));
        made.map_err(|why| Refused { place, why })
    }

    fn prompt(&self, fields: &Fields, place: &Place) -> Result<Example, Why> {
        let (text, learned) = match self.options.loss_mask {
            None => (self.text(fields)?, Vec::new()),
            Some(mask) => self.conversation(fields, mask)?,
        };
        let (label, metadata) = (self.label(fields)?, self.metadata(fields)?);
        let tokens = match self.options.loss_mask {
            None => self.tokenizer.encode(&text).map(|tokens| (tokens, Vec::new())),
            Some(_) => self.tokenizer.encode_marked(&text, &learned),
        };
        let unknown = |error| Why::bad("text that the tokenizer knows", error);
        let (tokens, loss_mask) = tokens.map_err(unknown)?;
        if tokens.is_empty() {
            return Err(Why::bad("a prompt", "no tokens"));
        }
        // The first token is read only.
        if self.options.loss_mask.is_some() && !loss_mask.iter().skip(1).any(|&learn| learn == 1) {
            return Err(Why::bad("a turn of the assistant to learn", "none"));
        }
        if tokens.len() > self.limit {
            return Err(Why::TooLong { tokens: tokens.len(), limit: self.limit });
        }
        let (messages, tools) = (self.messages(fields), self.tools(fields).ok().flatten());
        Ok(Example { place: place.clone(), text, tokens, loss_mask, label, metadata, messages, tools })
    }

    /// The prompt as the model reads it.
    fn text(&self, fields: &Fields) -> Result<String, Why> {
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
            (None, Some(b'[')) => Err(Why::bad(
                format!("text in `{key}`"),
                "a list of messages, which `apply_chat_template` renders",
            )),
            _ => Err(Why::bad(expected, format!("`{}`", short(input)))),
        }
    }

    /// A whole conversation as the model reads it, and the bytes of it that are learned.
    fn conversation(&self, fields: &Fields, mask: LossMask) -> Result<(String, Vec<Range<usize>>), Why> {
        let key = &self.options.input_key;
        let expected = format!("a list of messages in `{key}`");
        let input = fields.get(key).ok_or_else(|| absent(&expected, fields))?.get();
        let Some(template) = self.template.as_ref().filter(|_| input.starts_with('[')) else {
            return Err(Why::bad(expected, format!("`{}`", short(input))));
        };
        let chat = self.chat(messages(input, &expected)?, fields)?;
        let Conversation { text, learned } = template.conversation(&chat, mask).map_err(untaken)?;
        Ok((text, learned))
    }

    fn render(&self, template: &ChatTemplate, messages: Value, fields: &Fields) -> Result<String, Why> {
        template.render(self.chat(messages, fields)?).map_err(untaken)
    }

    fn chat(&self, messages: Value, fields: &Fields) -> Result<Chat<'_>, Why> {
        let tools = self.tools(fields)?.map(|tools| parse(tools.get())).transpose()?;
        Ok(Chat { messages, tools, variables: self.variables.as_ref() })
    }

    /// The row's list of tools as JSON, if it has one. Some data sets keep it as text.
    fn tools(&self, fields: &Fields) -> Result<Option<Box<RawValue>>, Why> {
        let key = &self.options.tool_key;
        let Some(told) = fields.get(key).filter(|told| told.get() != "null") else { return Ok(None) };
        let is_text = told.get().starts_with('"');
        let text = if is_text { parse(told.get())? } else { told.get().to_owned() };
        match text.trim_start().starts_with('[') {
            true => parse(&text).map(Some),
            false => Err(Why::bad(format!("a list of tools in `{key}`"), format!("`{}`", short(&text)))),
        }
    }

    /// The messages that the prompt is rendered from, if it is.
    fn messages(&self, fields: &Fields) -> Option<Box<RawValue>> {
        let input = fields.get(&self.options.input_key).filter(|_| self.template.is_some())?;
        match input.get().starts_with('[') {
            true => Some(input.clone()),
            false => RawValue::from_string(format!(r#"[{{"role":"user","content":{}}}]"#, input.get())).ok(),
        }
    }

    fn label(&self, fields: &Fields) -> Result<Option<Box<RawValue>>, Why> {
        let Some(key) = &self.options.label_key else { return Ok(None) };
        match fields.get(key) {
            Some(label) if label.get() != "null" => Ok(Some(label.clone())),
            Some(_) => Err(Why::bad(format!("a label in `{key}`"), "null")),
            None => Err(absent(&format!("a label in `{key}`"), fields)),
        }
    }

    /// The row's object for rewards, which it may lack or have empty.
    fn metadata(&self, fields: &Fields) -> Result<Option<Box<RawValue>>, Why> {
        let key = &self.options.metadata_key;
        match fields.get(key) {
            Some(value) if value.get().starts_with('{') => Ok(Some(value.clone())),
            Some(value) if value.get() != "null" => {
                Err(Why::bad(format!("an object in `{key}`"), format!("`{}`", short(value.get()))))
            }
            _ => Ok(None),
        }
    }
}

/// A field that a row has to have, and lacks.
fn absent(expected: &str, fields: &Fields) -> Why {
    let names: Vec<_> = fields.keys().map(|name| format!("`{}`", short(name))).take(20).collect();
    let has = if names.is_empty() { "no fields".to_owned() } else { names.join(", ") };
    Why::bad(expected, format!("no such field; the row has {has}"))
}

/// A list of messages, each an object with a role.
fn messages(text: &str, expected: &str) -> Result<Value, Why> {
    let messages: Value = parse(text)?;
    if messages.len() == Some(0) {
        return Err(Why::bad(expected, "an empty list"));
    }
    let role = |message: &Value| message.get_attr("role").is_ok_and(|role| role.as_str().is_some());
    let mut all = messages.try_iter().map_err(|error| Why::bad(expected, error))?;
    match all.find(|message| !role(message)) {
        None => Ok(messages),
        Some(message) => {
            let found = short(&message.to_string());
            Err(Why::bad("messages that are objects with a `role`", format!("`{found}`")))
        }
    }
}

/// What the chat template said of messages.
fn untaken(said: String) -> Why {
    Why::bad("messages that the chat template takes", format!("its error: {said}"))
}

fn parse<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, Why> {
    serde_json::from_str(text).map_err(|error| Why::bad("JSON", said(&error)))
}
