//! What a family of models has of its own: its marks, how its turns are joined, and how it writes calls and thoughts.
//!
//! A family is one file with its [`Rules`].

mod chatml;
mod guard;
mod heads;
mod llama3;
mod said;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::Value as Rendered;
use serde_json::{Value, json};

use crate::chat::{Chat, ChatTemplate};
use crate::error::{Error, Result};
use crate::message::{Message, Refusal, Role, ToolCall};
use crate::tokenizer::Tokenizer;
use guard::{Guard, Guarded};
use heads::Heads;
pub(crate) use said::Said;

/// All families.
const FAMILIES: [&Rules; 2] = [&chatml::RULES, &llama3::RULES];

/// What a family does its own way.
struct Rules {
    /// Its name in messages.
    name: &'static str,
    /// A token that its templates write, and that no other family has.
    sign: &'static str,
    /// The token that ends a turn.
    end: &'static str,
    /// All tokens that end an answer. Those that a tokenizer does not have are left out.
    stops: &'static [&'static str],
    /// What the template writes between the end of a turn and the next one.
    seam: &'static str,
    /// Variables of its templates.
    variables: &'static [(&'static str, bool)],
    /// Whether its templates write several calls of one message.
    many_calls: bool,
    /// Content and calls of a sampled text, thoughts taken out.
    calls: fn(&str) -> Parted,
    /// A call as the model writes it.
    spell: fn(&ToolCall) -> String,
}

/// Content of a text, and the names and arguments of its calls.
type Parted = (String, Vec<(String, Value)>);

/// A checkpoint's template and tokenizer with the rules of their family.
#[derive(Debug)]
pub struct Family {
    rules: &'static Rules,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    guard: Guard,
    heads: Heads,
    /// What the template made of [`BEFORE`] when it was last rendered. A template may write the date.
    before: Mutex<Arc<str>>,
    stops: Vec<i32>,
    /// Whether the template writes tools, calls and answers of tools.
    has_tools: bool,
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

/// Bytes of a head that is kept. Shorter ones are encoded as quickly as they are looked up.
const HEAD_BYTES_MIN: usize = 2048;
/// What stands before a suffix while it is rendered.
const BEFORE: &str = "(before)";

impl Family {
    /// Reads template and tokenizer of a checkpoint directory and finds their family.
    ///
    /// # Errors
    /// As [`ChatTemplate::open`], [`Tokenizer::open`] and [`Family::new`].
    pub fn open(checkpoint: &Path) -> Result<Self> {
        Self::new(ChatTemplate::open(checkpoint)?, Tokenizer::open(checkpoint)?)
    }

    /// The family of a template and its tokenizer.
    ///
    /// # Errors
    /// [`Error::Template`] if none fits, [`Error::Tokenizer`] if plain text could become a special token.
    pub fn new(template: ChatTemplate, tokenizer: Tokenizer) -> Result<Self> {
        let fits = |rules: &&&Rules| {
            template.mentions(rules.sign)
                && [rules.sign, rules.end].iter().all(|token| tokenizer.id(token).is_some())
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
        let has_tools = template.mentions("tools");
        let guard = Guard::new(&tokenizer)?;
        let (system_anywhere, has_suffixes) = (true, true);
        let (heads, before) = (Heads::default(), Mutex::new("".into()));
        let mut family = Family {
            rules,
            template,
            tokenizer,
            guard,
            heads,
            before,
            stops,
            has_tools,
            system_anywhere,
            has_suffixes,
        };
        let system = Message { role: Role::System, ..text(BEFORE) };
        family.system_anywhere = family.suffix(&[text(BEFORE)], &[system, text(BEFORE)]).is_ok();
        family.has_suffixes = family.probed();
        Ok(family)
    }

    /// Whether messages that are tried look the same behind a short and a longer conversation.
    fn probed(&self) -> bool {
        let of = |role: Role| Message { role, ..text(BEFORE) };
        let (short, long) = ([of(Role::User)], [of(Role::User), of(Role::Assistant), of(Role::User)]);
        let behind = |row: &[Role]| {
            let row: Vec<Message> = row.iter().map(|role| of(*role)).collect();
            let row = self.guarded(&row, &[], false).messages;
            let suffix = self.suffix(&short, &row).ok().flatten();
            suffix.is_some() && suffix == self.suffix(&long, &row).ok().flatten()
        };
        let rows: [&[Role]; 2] = [&[Role::User], &[Role::Tool, Role::Tool]];
        rows.into_iter().take(if self.has_tools { 2 } else { 1 }).all(behind)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.rules.name
    }

    /// Ids of tokens that end an answer.
    #[must_use]
    pub fn stops(&self) -> &[i32] {
        &self.stops
    }

    /// Ids of a whole conversation with the start of an answer.
    pub(crate) fn root(&self, messages: &[Message], tools: &[Value]) -> Result<Vec<i32>, Refusal> {
        let guarded = self.guarded(messages, tools, true);
        let text = self.render(&guarded.messages, &guarded.tools, true).map_err(invalid)?;
        self.encode_headed(&text, guarded.mark)
    }

    /// Ids of a text of which many conversations have the head: the template's first message, with tools. No text is
    /// joined across the mark of a message.
    fn encode_headed(&self, text: &str, mark: Option<char>) -> Result<Vec<i32>, Refusal> {
        let second = text.match_indices(self.rules.sign).nth(1).map(|(at, _)| at);
        let Some((head, tail)) = second.filter(|at| *at >= HEAD_BYTES_MIN).map(|at| text.split_at(at)) else {
            return self.encode(text, mark);
        };
        let tail = self.encode(tail, mark)?;
        let key = heads::key(head, mark);
        if let Some(head) = self.heads.get(&key) {
            return Ok([&head, tail.as_slice()].concat());
        }
        let whole = self.encode(text, mark)?;
        if let Some(head) = whole.strip_suffix(tail.as_slice()) {
            self.heads.put(key, head);
        }
        Ok(whole)
    }

    /// Ids of messages behind an answer, with the start of the next one. `closed` tells whether the answer ended with
    /// its token, which is put in otherwise. None if the template writes them otherwise beside other messages.
    pub(crate) fn behind(&self, messages: &[Message], closed: bool) -> Result<Option<Vec<i32>>, Refusal> {
        if !self.has_suffixes {
            return Ok(None);
        }
        let guarded = self.guarded(messages, &[], false);
        let Some(suffix) = self.behind_one(&guarded.messages).map_err(invalid)? else { return Ok(None) };
        let end = if closed { "" } else { self.rules.end };
        self.encode(&[end, self.rules.seam, &suffix].concat(), guarded.mark).map(Some)
    }

    /// [`Family::suffix`] behind [`BEFORE`], which is seldom rendered for it.
    fn behind_one(&self, messages: &[Message]) -> Result<Option<String>, String> {
        let one = [text(BEFORE)];
        let all = self.render(&[&one, messages].concat(), &[], true)?;
        let lock = || self.before.lock().unwrap_or_else(PoisonError::into_inner);
        let before = lock().clone();
        if let Some(suffix) = all.strip_prefix(&*before).filter(|_| !before.is_empty()) {
            return Ok(Some(suffix.to_owned()));
        }
        *lock() = self.render(&one, &[], false)?.into();
        self.suffix(&one, messages)
    }

    /// What the template writes of messages behind others, with the start of an answer.
    fn suffix(&self, before: &[Message], messages: &[Message]) -> Result<Option<String>, String> {
        let all = self.render(&[before, messages].concat(), &[], true)?;
        let before = self.render(before, &[], false)?;
        Ok(all.strip_prefix(&before).map(str::to_owned))
    }

    fn encode(&self, text: &str, mark: Option<char>) -> Result<Vec<i32>, Refusal> {
        self.tokenizer.encode_guarded(text, mark).map_err(|error| invalid(error.to_string()))
    }

    /// Messages and tools as the template takes them, with what clients wrote marked.
    /// `begins` tells whether they are the first of their conversation.
    fn guarded(&self, messages: &[Message], tools: &[Value], begins: bool) -> Guarded {
        let Guarded { messages, tools, mark } = self.guard.guard(messages, tools);
        let mut taken: Vec<Message> = Vec::with_capacity(messages.len());
        for (at, mut message) in messages.into_iter().enumerate() {
            let is_many = message.calls.len() > 1 && !self.rules.many_calls;
            if !self.has_tools || is_many {
                message.content.extend(message.calls.iter().map(self.rules.spell));
                message.calls.clear();
            }
            if message.role == Role::System && !(begins && at == 0) && !self.system_anywhere {
                message.role = Role::User;
            }
            if message.role == Role::Tool && !self.has_tools {
                message.role = Role::User;
                message.content = format!("<tool_response>\n{}\n</tool_response>", message.content);
            }
            taken.push(message);
        }
        if !self.has_tools && !tools.is_empty() {
            let told = toolbox(&tools);
            match taken.first_mut().filter(|first| first.role == Role::System) {
                Some(first) => first.content = format!("{}\n\n{told}", first.content),
                None => taken.insert(0, Message { role: Role::System, ..text(&told) }),
            }
            return Guarded { messages: taken, tools: Vec::new(), mark };
        }
        Guarded { messages: taken, tools, mark }
    }

    fn render(&self, messages: &[Message], tools: &[Value], prompt: bool) -> Result<String, String> {
        let messages = messages.iter().map(|message| ordered(&written(message)));
        let variables = Rendered::from_pairs(self.rules.variables.iter().copied());
        let chat = Chat {
            messages: messages.collect(),
            tools: (!tools.is_empty()).then(|| tools.iter().map(ordered).collect()),
            variables: Some(&variables),
        };
        self.template.render_as("", chat, prompt)
    }
}

/// A message as templates know it.
fn written(message: &Message) -> Value {
    let mut written = json!({"role": message.role, "content": message.content});
    if let Some(reasoning) = message.reasoning.as_ref().filter(|reasoning| !reasoning.is_empty()) {
        written["reasoning_content"] = json!(reasoning);
    }
    if !message.calls.is_empty() {
        let call = |call: &ToolCall| {
            let function = json!({"name": call.name, "arguments": call.arguments});
            json!({"type": "function", "id": call.id, "function": function})
        };
        written["tool_calls"] = message.calls.iter().map(call).collect();
    }
    if let Some(id) = &message.call_id {
        written["tool_call_id"] = json!(id);
    }
    written
}

/// Members of tools and of their schemas in the order in which models have read them; others follow in theirs.
fn ordered(value: &Value) -> Rendered {
    const FIRST: [&str; 7] =
        ["type", "function", "name", "description", "parameters", "properties", "required"];
    match value {
        Value::Array(elements) => elements.iter().map(ordered).collect(),
        Value::Object(members) => {
            let mut members: Vec<_> = members.iter().collect();
            members
                .sort_by_key(|(key, _)| FIRST.iter().position(|first| first == key).unwrap_or(FIRST.len()));
            Rendered::from_pairs(members.into_iter().map(|(key, value)| (key.as_str(), ordered(value))))
        }
        Value::Null => Rendered::from(()),
        Value::Bool(is) => Rendered::from(*is),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Rendered::from(number),
            (_, Some(number)) => Rendered::from(number),
            _ => Rendered::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(text) => Rendered::from(text.as_str()),
    }
}

/// What a model is told of its tools where the template has no words for them.
fn toolbox(tools: &[Value]) -> String {
    let tools: Vec<String> = tools.iter().map(|tool| format!("{tool}\n")).collect();
    format!(
        "You may call functions. Their signatures:\n<tools>\n{}</tools>\n\nA call is a JSON object with its name and \
         arguments:\n<tool_call>\n{{\"name\": …, \"arguments\": {{…}}}}\n</tool_call>",
        tools.concat()
    )
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

fn invalid(reason: String) -> Refusal {
    Refusal::Invalid(reason)
}

/// Name and arguments of a call that a model wrote as a JSON object.
fn called(mut call: Value) -> Option<(String, Value)> {
    let name = call.get("name")?.as_str()?.to_owned();
    let arguments = ["arguments", "parameters"].iter().find_map(|key| call.get_mut(*key).map(Value::take));
    let arguments = match arguments.unwrap_or_else(|| json!({})) {
        Value::String(text) => match serde_json::from_str(&text) {
            Ok(Value::Object(members)) => Value::Object(members),
            _ => Value::String(text),
        },
        Value::Object(members) => Value::Object(members),
        other => Value::String(other.to_string()),
    };
    Some((name, arguments))
}
