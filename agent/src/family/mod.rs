//! What a family of models has of its own: its marks, how its turns are joined, and how it writes calls and thoughts.
//!
//! A family is one file with its [`Rules`].

mod append;
mod calls;
mod chatml;
mod deepseek;
mod glm;
mod guard;
mod kimi;
mod llama3;
mod minimax;
mod qwen35;
mod said;

use minijinja::Value as Rendered;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::chat::{Chat, ChatTemplate};
use crate::error::{Error, Result, short};
use crate::message::{Json, Message, Refusal, Role, ToolCall};
use crate::recent::{Key, Recent};
use crate::tokenizer::Tokenizer;
use guard::{Guard, Guarded};
pub(crate) use said::{Drawn, Said};

/// All families. Of several that fit, the first is taken.
const FAMILIES: [&Rules; 7] = [
    &qwen35::RULES,
    &chatml::RULES,
    &llama3::RULES,
    &deepseek::RULES,
    &glm::RULES,
    &kimi::RULES,
    &minimax::RULES,
];

/// What a family does its own way.
struct Rules {
    /// Its name in messages.
    name: &'static str,
    /// What its templates have, and no other family's. The first is a token.
    signs: &'static [&'static str],
    /// How a user's message begins: with a token.
    asks: &'static str,
    /// Tokens of which the first behind an answer begins what follows it: the one that ends a turn, or those that begin
    /// the next message.
    next: &'static [&'static str],
    /// The token that is put behind an answer which was cut.
    end: &'static str,
    /// All tokens that end an answer. Those that a tokenizer does not have are left out.
    stops: &'static [&'static str],
    /// Tokens of calls. They are read also where the tokenizer takes them for special ones.
    marks: &'static [&'static str],
    /// Variables of its templates.
    variables: &'static [(&'static str, bool)],
    /// Whether its templates write several calls of one message.
    many_calls: bool,
    /// Content and calls of a sampled text, thoughts taken out. The tools tell types of arguments.
    calls: fn(&str, &[Json]) -> Parted,
    /// A call as the model writes it.
    spell: fn(&ToolCall) -> String,
}

/// Content of a text, and its calls. A call without an id gets one.
type Parted = (String, Vec<ToolCall>);

/// A checkpoint's template and tokenizer with the rules of their family.
#[derive(Debug)]
pub struct Family {
    rules: &'static Rules,
    /// Of the template: the family's, and those of whoever opened it.
    variables: Rendered,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    guard: Guard,
    /// Ids of the heads of conversations. Sessions of one agent have the same tools and instructions, which are most
    /// of a first turn.
    heads: Recent<Arc<[i32]>>,
    stops: Vec<i32>,
    /// Ids that the template writes where it leaves thoughts out.
    thoughtless: Vec<i32>,
    /// Whether the template writes tools.
    has_tools: bool,
    /// Whether it writes calls and answers of tools.
    has_calls: bool,
    /// Whether it joins arguments of calls to other text, and takes an answer that only calls for one without content.
    text_arguments: bool,
    /// Whether it takes a message of the system behind others.
    system_anywhere: bool,
    /// Whether it writes messages the same way whatever stands before them.
    has_suffixes: bool,
}

impl std::fmt::Debug for Rules {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Bytes of ids of heads that are kept.
const HEAD_IDS_BYTES_MAX: usize = 64 << 20;
/// Bytes of a head that is kept. Shorter ones are encoded as quickly as they are looked up.
const HEAD_BYTES_MIN: usize = 2048;
/// What a user asks before an answer while what follows it is rendered.
const BEFORE: &str = "(before)";
/// That answer.
const ANSWER: &str = "(answer)";

impl Family {
    /// Reads template and tokenizer of a checkpoint directory and finds their family.
    ///
    /// # Errors
    /// As [`ChatTemplate::open`], [`Tokenizer::open`] and [`Family::new`].
    pub fn open(checkpoint: &Path) -> Result<Self> {
        Self::open_with(checkpoint, None)
    }

    /// The same with further variables for the template: a JSON object, such as `{"enable_thinking": false}`.
    ///
    /// # Errors
    /// As [`Family::open`], and [`Error::Template`] for what is no JSON object.
    pub fn open_with(checkpoint: &Path, variables: Option<&str>) -> Result<Self> {
        let (template, tokenizer) = (ChatTemplate::open(checkpoint)?, Tokenizer::open(checkpoint)?);
        let read = variables.map(|text| {
            let json: Option<Json> = serde_json::from_str(text).ok();
            json.filter(|json| json.as_object().is_some()).ok_or_else(|| {
                let reason = format!("its variables have to be a JSON object, found `{}`", short(text));
                Error::Template { path: checkpoint.to_owned(), reason }
            })
        });
        Self::with(template, tokenizer, &read.transpose()?.unwrap_or_default())
    }

    /// The family of a template and its tokenizer.
    ///
    /// # Errors
    /// [`Error::Template`] if none fits, [`Error::Tokenizer`] if plain text could become a special token.
    pub fn new(template: ChatTemplate, tokenizer: Tokenizer) -> Result<Self> {
        Self::with(template, tokenizer, &Json::Null)
    }

    fn with(template: ChatTemplate, tokenizer: Tokenizer, variables: &Json) -> Result<Self> {
        let fits = |rules: &&&Rules| {
            rules.signs.iter().all(|sign| template.mentions(sign))
                && [rules.signs[0], rules.end].iter().all(|token| tokenizer.id(token).is_some())
        };
        let Some(rules) = FAMILIES.iter().find(fits) else {
            let known: Vec<_> = FAMILIES.iter().map(|rules| rules.name).collect();
            let reason = format!(
                "it is of no known family ({}): expected its marks in the template and among the tokens",
                known.join(", ")
            );
            return Err(Error::Template { path: template.path().to_owned(), reason });
        };
        let stops = rules.stops.iter().filter_map(|stop| tokenizer.id(stop)).collect();
        let guard = Guard::new(&tokenizer)?;
        let own = rules.variables.iter().map(|(name, value)| ((*name).to_owned(), Rendered::from(*value)));
        let given = variables.as_object().into_iter().flatten();
        let given = given.map(|(name, value)| (name.clone(), rendered(value)));
        let mut family = Family {
            rules,
            variables: own.chain(given).collect::<BTreeMap<_, _>>().into(),
            guard,
            heads: Recent::new(HEAD_IDS_BYTES_MAX),
            stops,
            thoughtless: Vec::new(),
            has_tools: template.mentions("tools"),
            has_calls: template.mentions("tool_calls"),
            text_arguments: template.mentions("['arguments'] +"),
            system_anywhere: true,
            has_suffixes: true,
            template,
            tokenizer,
        };
        let tool = || Message { role: Role::Tool, ..text(BEFORE) };
        let system = Message { role: Role::System, ..text("(system)") };
        let tail = family.tail(&[], &[system.clone(), text(BEFORE)]).ok().flatten();
        family.system_anywhere = tail.is_some_and(|tail| tail.contains(&system.content));
        let rows = [vec![text(BEFORE)], vec![tool(), tool()]];
        let rows = &rows[..if family.has_calls { 2 } else { 1 }];
        family.has_suffixes = rows.iter().all(|row| family.is_apart(row));
        let thoughtless = family.thoughtless().ok().flatten().unwrap_or_default();
        family.thoughtless = family.tokenizer.encode(&thoughtless)?;
        Ok(family)
    }

    /// Whether messages look the same behind a short and a longer conversation.
    fn is_apart(&self, row: &[Message]) -> bool {
        let longer = [text(BEFORE), Message { role: Role::Assistant, ..text(BEFORE) }];
        let row = self.guarded(row, &[], false).messages;
        let tail = self.tail(&[], &row).ok().flatten();
        // A template that names calls by a count of its own needs all that was called before.
        tail.as_ref().is_some_and(|tail| !tail.contains(ANSWER))
            && tail == self.tail(&longer, &row).ok().flatten()
    }

    /// What the template writes between the start of an answer and its text where it leaves thoughts out, if it does.
    fn thoughtless(&self) -> Result<Option<String>, String> {
        let answer =
            Message { role: Role::Assistant, reasoning: Some(said::THOUGHTS.to_owned()), ..text(ANSWER) };
        let [asked, start] = [false, true].map(|prompt| self.render(&[text(BEFORE)], &[], prompt));
        let (asked, start) = (asked?, start?);
        let whole = self.render(&[text(BEFORE), answer, text(BEFORE)], &[], false)?;
        let found = || {
            let start = start.strip_prefix(&asked)?;
            let thinks = [said::THINK, said::THOUGHT].iter().filter_map(|mark| start.find(mark)).min();
            let start = &start[..thinks.unwrap_or(start.len())];
            let before = whole.split_once(ANSWER)?.0;
            let between = &before[before.rfind(start)? + start.len()..];
            (!between.contains(said::THOUGHTS)).then(|| between.to_owned())
        };
        Ok(found())
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.rules.name
    }

    /// Whether its template writes messages the same way whatever stands before them.
    pub(crate) fn has_suffixes(&self) -> bool {
        self.has_suffixes
    }

    /// Ids of tokens that end an answer.
    #[must_use]
    pub fn stops(&self) -> &[i32] {
        &self.stops
    }

    /// Ids of a whole conversation with the start of an answer.
    pub(crate) fn root(&self, messages: &[Message], tools: &[Json]) -> Result<Vec<i32>, Refusal> {
        let guarded = self.guarded(messages, tools, true);
        let text = self.render(&guarded.messages, &guarded.tools, true).map_err(invalid)?;
        self.encode_headed(&text, guarded.mark)
    }

    /// Ids of a text of which many conversations have the head: what stands before the first
    /// message of the user. No text is joined across its mark.
    fn encode_headed(&self, text: &str, mark: Option<char>) -> Result<Vec<i32>, Refusal> {
        let asks = text.find(self.rules.asks).filter(|at| *at >= HEAD_BYTES_MIN);
        let Some((head, tail)) = asks.map(|at| text.split_at(at)) else {
            return self.encode(text, mark);
        };
        let tail = self.encode(tail, mark)?;
        let key = head_key(head, mark);
        if let Some(head) = self.heads.get(&key) {
            return Ok([&head, tail.as_slice()].concat());
        }
        let whole = self.encode(text, mark)?;
        if let Some(head) = whole.strip_suffix(tail.as_slice()) {
            self.heads.put(key, head.into(), size_of_val(head));
        }
        Ok(whole)
    }

    /// Ids of messages behind an answer, with the start of the next one. An answer that was cut gets its end first, and
    /// that of its thoughts. None if the template writes the messages otherwise beside others.
    pub(crate) fn behind(
        &self,
        messages: &[Message],
        given: &[i32],
        sampled: &[i32],
    ) -> Result<Option<Vec<i32>>, Refusal> {
        if !self.has_suffixes {
            return Ok(None);
        }
        let guarded = self.guarded(messages, &[], false);
        let Some(tail) = self.tail(&[], &guarded.messages).map_err(invalid)? else { return Ok(None) };
        let tail = self.encode(&tail, guarded.mark)?;
        let (end, last) =
            (self.tokenizer.id(self.rules.end), self.is_closed(sampled).then(|| sampled.last()));
        let (first, rest) = tail.split_at(tail.len().min(1));
        let between = match last.flatten() {
            Some(last) if first == [*last] || first.first() == end.as_ref() => Vec::new(),
            Some(_) => first.to_vec(),
            None => {
                let thought = self.is_thinking(given, sampled).then(|| self.tokenizer.id(said::THOUGHT));
                let end = end.filter(|end| first != [*end]);
                thought.flatten().into_iter().chain(end).chain(first.iter().copied()).collect()
            }
        };
        Ok(Some([&between, rest].concat()))
    }

    /// What the template writes of messages behind an answer, with the start of the next one: from what ends the answer,
    /// or begins the next message.
    fn tail(&self, before: &[Message], messages: &[Message]) -> Result<Option<String>, String> {
        let tools = messages.iter().take_while(|message| message.role == Role::Tool);
        let call = |tool: &Message| {
            let id = tool.call_id.clone().unwrap_or_default();
            ToolCall { id, name: ANSWER.to_owned(), arguments: Json::object([]) }
        };
        let most = if self.rules.many_calls { usize::MAX } else { 1 };
        let calls = tools.take(most).map(call).collect();
        let answer = [text(BEFORE), Message { role: Role::Assistant, calls, ..text(ANSWER) }];
        let all = self.render(&[before, &answer, messages].concat(), &[], true)?;
        let behind = all.split_once(ANSWER).map(|(_, behind)| behind);
        Ok(behind.and_then(|behind| {
            let at = self.rules.next.iter().filter_map(|token| behind.find(token)).min()?;
            Some(behind[at..].to_owned())
        }))
    }

    fn encode(&self, text: &str, mark: Option<char>) -> Result<Vec<i32>, Refusal> {
        self.tokenizer.encode_guarded(text, mark).map_err(|error| invalid(error.to_string()))
    }

    /// Messages and tools as the template takes them, with what clients wrote marked.
    /// `begins` tells whether they are the first of their conversation.
    fn guarded(&self, messages: &[Message], tools: &[Json], begins: bool) -> Guarded {
        let Guarded { messages, tools, mark } = self.guard.guard(messages, tools);
        let mut taken: Vec<Message> = Vec::with_capacity(messages.len());
        for (at, mut message) in messages.into_iter().enumerate() {
            let is_many = message.calls.len() > 1 && !self.rules.many_calls;
            if !self.has_calls || is_many {
                message.content.extend(message.calls.iter().map(self.rules.spell));
                message.calls.clear();
            }
            if message.role == Role::System && !(begins && at == 0) && !self.system_anywhere {
                message.role = Role::User;
            }
            if message.role == Role::Tool && !self.has_calls {
                message.role = Role::User;
                message.content = format!("<tool_response>\n{}\n</tool_response>", message.content);
            }
            taken.push(message);
        }
        if !self.has_tools && !tools.is_empty() {
            let told = self.toolbox(&tools);
            match taken.first_mut().filter(|first| first.role == Role::System) {
                Some(first) => first.content = format!("{}\n\n{told}", first.content),
                None => taken.insert(0, Message { role: Role::System, ..text(&told) }),
            }
            return Guarded { messages: taken, tools: Vec::new(), mark };
        }
        Guarded { messages: taken, tools, mark }
    }

    fn render(&self, messages: &[Message], tools: &[Json], prompt: bool) -> Result<String, String> {
        let chat = Chat {
            messages: messages.iter().map(|message| self.written(message)).collect(),
            tools: (!tools.is_empty()).then(|| tools.iter().map(rendered).collect()),
            variables: Some(&self.variables),
        };
        self.template.render_as("", chat, prompt)
    }

    /// A message as the template knows it.
    fn written(&self, message: &Message) -> Rendered {
        let is_none = self.text_arguments && message.content.is_empty() && !message.calls.is_empty();
        let content = (!is_none).then_some(message.content.as_str());
        let role = match message.role {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        };
        let mut written = vec![("role", Rendered::from(role)), ("content", Rendered::from(content))];
        if let Some(reasoning) = message.reasoning.as_ref().filter(|reasoning| !reasoning.is_empty()) {
            written.push(("reasoning_content", Rendered::from(reasoning.as_str())));
        }
        if !message.calls.is_empty() {
            let call = |call: &ToolCall| {
                let arguments = match &call.arguments {
                    Json::Object(_) if self.text_arguments => Rendered::from(dumped(&call.arguments)),
                    arguments => rendered(arguments),
                };
                let name = Rendered::from(call.name.as_str());
                let function = Rendered::from_pairs([("name", name), ("arguments", arguments)]);
                let (kind, id) = (Rendered::from("function"), Rendered::from(call.id.as_str()));
                Rendered::from_pairs([("type", kind), ("id", id), ("function", function)])
            };
            written.push(("tool_calls", message.calls.iter().map(call).collect()));
        }
        if let Some(id) = &message.call_id {
            written.push(("tool_call_id", Rendered::from(id.as_str())));
        }
        Rendered::from_pairs(written)
    }

    /// What a model is told of its tools where the template has no words for them.
    fn toolbox(&self, tools: &[Json]) -> String {
        let tools: Vec<String> = tools.iter().map(|tool| format!("{tool}\n")).collect();
        let call = ToolCall {
            id: String::new(),
            name: "…".to_owned(),
            arguments: Json::object([("…", "…".into())]),
        };
        let call = (self.rules.spell)(&call);
        format!(
            "You may call functions. Their signatures:\n<tools>\n{}</tools>\n\nA call is its name with its arguments:\n{}",
            tools.concat(),
            call.trim()
        )
    }
}

/// A value as templates take it, its members in their order.
fn rendered(value: &Json) -> Rendered {
    match value {
        Json::Array(elements) => elements.iter().map(rendered).collect(),
        Json::Object(members) => {
            Rendered::from_pairs(members.iter().map(|(key, value)| (key.as_str(), rendered(value))))
        }
        Json::Null => Rendered::from(()),
        Json::Bool(is) => Rendered::from(*is),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Rendered::from(number),
            (_, Some(number)) => Rendered::from(number),
            _ => Rendered::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Rendered::from(text.as_str()),
    }
}

/// JSON as Python writes it.
fn dumped(value: &Json) -> String {
    crate::chat::dumped(&rendered(value)).unwrap_or_else(|_| value.to_string())
}

/// A message of a user.
fn text(content: &str) -> Message {
    Message {
        role: Role::User,
        content: content.to_owned(),
        reasoning: None,
        calls: Vec::new(),
        call_id: None,
    }
}

/// The key of a head. A letter in it may be a guard's mark, or a client's own.
fn head_key(text: &str, mark: Option<char>) -> Key {
    let mark = mark.filter(|mark| text.contains(*mark)).map_or(0, u32::from);
    *blake3::Hasher::new().update(&mark.to_le_bytes()).update(text.as_bytes()).finalize().as_bytes()
}

fn invalid(reason: String) -> Refusal {
    Refusal::Invalid(reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mark_of_a_guard_is_not_a_clients_letter() {
        let text = "a<\u{e000}|im_end|>";
        assert_ne!(head_key(text, Some('\u{e000}')), head_key(text, None));
        assert_eq!(head_key(text, Some('\u{e001}')), head_key(text, None));
    }
}
