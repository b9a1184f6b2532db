//! Chat templates, rendered to the same bytes as `transformers` renders them.

mod bound;
mod clock;
mod json;
mod mask;
mod text;

use std::io::Read as _;
use std::path::{Path, PathBuf};

use driftless_store::os::regular;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, Value};
use regex::Regex;
use serde_json::Value as Json;

use crate::error::{Error, Result, io, short};

pub use mask::{Conversation, LossMask};
use text::{TEXT_BYTES_MAX, Text};

/// Name of the template that is used where messages come with tools.
const TOOL_USE: &str = "tool_use";
/// Name of the template that is used otherwise.
const DEFAULT: &str = "default";

/// Special tokens that a template can name, as `transformers` gives them.
const SPECIAL: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// What a template is given to render.
#[derive(Debug, Clone)]
pub struct Chat<'a> {
    /// A list of messages.
    pub messages: Value,
    /// A list of JSON schemas.
    pub tools: Option<Value>,
    /// A map of what else the template may ask for.
    pub variables: Option<&'a Value>,
}

/// The chat template of a checkpoint, with the special tokens that it can name.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
    environment: Environment<'static>,
    special: Vec<(String, Value)>,
}

impl ChatTemplate {
    /// Reads the template of a checkpoint directory: `chat_template.jinja`, else `chat_template` of
    /// `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`Error::Template`] if there is none or it is no template, [`Error::Io`] and [`Error::Json`] for the
    /// files.
    pub fn open(checkpoint: &Path) -> Result<Self> {
        let file = checkpoint.join("chat_template.jinja");
        let config_path = checkpoint.join("tokenizer_config.json");
        let config: Json = match read(&config_path)? {
            Some(bytes) => serde_json::from_str(&bytes)
                .map_err(|source| Error::Json { path: config_path.clone(), source })?,
            None => Json::Null,
        };
        let special = special_tokens(&config);
        if let Some(source) = read(&file)? {
            return Self::new(&file, &[(DEFAULT.to_owned(), source)], special);
        }
        let named = |entry: &Json| {
            Some((entry.get("name")?.as_str()?.to_owned(), entry.get("template")?.as_str()?.to_owned()))
        };
        let sources: Vec<(String, String)> = match config.get("chat_template") {
            Some(Json::String(source)) => vec![(DEFAULT.to_owned(), source.clone())],
            Some(Json::Array(entries)) => entries.iter().filter_map(named).collect(),
            _ => Vec::new(),
        };
        if sources.iter().any(|(name, _)| name == DEFAULT) {
            return Self::new(&config_path, &sources, special);
        }
        Err(Error::Template {
            path: checkpoint.to_owned(),
            reason: "there is none, neither chat_template.jinja nor one in tokenizer_config.json; use the model's instruction-tuned \
                     release, put a chat_template.jinja there, or leave out `apply_chat_template`"
                .into(),
        })
    }

    /// A template by its text; `special` are tokens such as `("eos_token", "</s>")`.
    ///
    /// # Errors
    /// [`Error::Template`] if it is no template.
    pub fn from_source(source: &str, special: &[(&str, &str)]) -> Result<Self> {
        let special = special.iter().map(|(name, token)| ((*name).to_owned(), Value::from(*token))).collect();
        Self::new(Path::new("(text)"), &[(DEFAULT.to_owned(), source.to_owned())], special)
    }

    fn new(path: &Path, sources: &[(String, String)], special: Vec<(String, Value)>) -> Result<Self> {
        let refused = |reason| Error::Template { path: path.to_owned(), reason };
        if let Some((_, source)) = sources.iter().find(|(_, source)| source.len() > SOURCE_BYTES_MAX) {
            let found = source.len();
            return Err(refused(format!("it has {found} bytes, and at most {SOURCE_BYTES_MAX} are read")));
        }
        let compiled = stacker::grow(STACK_BYTES, || compile(sources));
        let environment = compiled.map_err(|error| refused(said(&error)))?;
        Ok(ChatTemplate { path: path.to_owned(), environment, special })
    }

    /// Renders JSON: `messages` is a list, `tools` a list of schemas, `variables` an object of what else the
    /// template may ask for. The start of an answer is put behind them.
    ///
    /// # Errors
    /// [`Error::Template`] with what the template says, or does that it must not; [`Error::Json`].
    pub fn render_json(
        &self,
        messages: &str,
        tools: Option<&str>,
        variables: Option<&str>,
    ) -> Result<String> {
        let parse = |text: &str| {
            serde_json::from_str(text).map_err(|source| Error::Json { path: self.path.clone(), source })
        };
        let (tools, variables) = (tools.map(parse).transpose()?, variables.map(parse).transpose()?);
        let chat = Chat { messages: parse(messages)?, tools, variables: variables.as_ref() };
        self.render(chat).map_err(|reason| Error::Template { path: self.path.clone(), reason })
    }

    /// Renders a chat with the start of an answer behind it.
    ///
    /// # Errors
    /// What the template says, or what it does that it must not.
    pub fn render(&self, chat: Chat<'_>) -> Result<String, String> {
        self.render_as("", chat, true)
    }

    /// Where it was read.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether its text has `part`, which says what it is for.
    pub(crate) fn mentions(&self, part: &str) -> bool {
        self.environment.templates().any(|(_, template)| template.source().contains(part))
    }

    /// Renders through the template whose name ends with `suffix`, with the start of an answer if `prompt`.
    pub(crate) fn render_as(&self, suffix: &str, chat: Chat<'_>, prompt: bool) -> Result<String, String> {
        stacker::grow(STACK_BYTES, || self.render_here(suffix, chat, prompt))
    }

    fn render_here(&self, suffix: &str, chat: Chat<'_>, prompt: bool) -> Result<String, String> {
        let Chat { messages, tools, variables } = chat;
        let name = match tools {
            Some(_) if self.environment.get_template(TOOL_USE).is_ok() => TOOL_USE,
            _ => DEFAULT,
        };
        let name = format!("{name}{suffix}");
        let none = || Value::from(());
        let mut context: Vec<(String, Value)> = vec![
            ("messages".into(), messages),
            ("tools".into(), tools.unwrap_or_else(none)),
            ("documents".into(), none()),
            ("add_generation_prompt".into(), Value::from(prompt)),
        ];
        context.extend(self.special.iter().cloned());
        let keys = variables
            .into_iter()
            .flat_map(|map| map.try_iter().into_iter().flatten().map(move |key| (map, key)));
        for (map, key) in keys {
            let value = map.get_item(&key).map_err(|error| said(&error))?;
            context.push((key.to_string(), value));
        }
        let context = Value::from_pairs(context);
        let mut text = Text::default();
        let template = self.environment.get_template(&name);
        let rendered =
            template.and_then(|template| template.render_captured_to(context, &mut text).map(drop));
        rendered.map_err(|error| said(&error))?;
        Ok(text.into_string())
    }
}

/// Instructions that a rendering may take, which is seconds. Templates take some hundred for a message.
const INSTRUCTIONS_MAX: u64 = 50_000_000;

/// Longest template that is read. Those of models have 20 thousand bytes at most.
const SOURCE_BYTES_MAX: usize = 128 << 10;
/// Stack to compile and to render one with. An expression may be as deep as it is long, and so may its value:
/// recursion goes down all of it, also where the value is written and dropped. Only what is used takes memory.
const STACK_BYTES: usize = 256 << 20;

/// The templates of these names and sources, in the environment of `transformers`.
fn compile(sources: &[(String, String)]) -> Result<Environment<'static>, minijinja::Error> {
    let mut environment = environment()?;
    let tag = Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").ok();
    for (name, source) in sources {
        // As jinja2 does before anything else.
        let source = &bound::bounded(&source.replace("\r\n", "\n").replace('\r', "\n"));
        let plain = tag.as_ref().map_or(source.clone(), |tag| mask::without_tags(source, tag, false));
        environment.add_template_owned(name.clone(), plain)?;
        if let Some(tag) = tag.as_ref().filter(|tag| tag.is_match(source)) {
            let marked = mask::without_tags(source, tag, true);
            environment.add_template_owned(format!("{name}{}", mask::MARKED), marked)?;
        }
    }
    Ok(environment)
}

/// The environment of `transformers`: jinja2 with these settings, filters and functions.
fn environment() -> Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(INSTRUCTIONS_MAX));
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(|state, value, method, args| {
        match (method, value.as_str(), args) {
            ("title", Some(text), []) => Ok(Value::from(title(text))),
            _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
        }
    });
    environment.set_formatter(|out, state, value| match json::float(value) {
        Some(text) => out.write_str(&text).map_err(minijinja::Error::from),
        None if value.as_object().is_some() => Ok(out.write_str(&Text::of(value)?)?),
        None => minijinja::escape_formatter(out, state, value),
    });
    bound::add_filter(&mut environment);
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: &Value| match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => json::float(value).map_or_else(|| Text::of(value), Ok),
    });
    environment
        .add_test("iterable", |value: &Value| is_sequence(value) || value.kind() == ValueKind::Iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: String| {
        clock::now(&format).map_err(|found| minijinja::Error::new(ErrorKind::InvalidOperation, found))
    });
    Ok(environment)
}

/// `str.title` of Python: a letter is a capital if none stands before it.
fn title(text: &str) -> String {
    let mut inside = false;
    let mut titled = String::new();
    for letter in text.chars() {
        match inside {
            true => titled.extend(letter.to_lowercase()),
            false => titled.extend(letter.to_uppercase()),
        }
        inside = letter.is_alphabetic();
    }
    titled
}

/// As jinja2 sees it: whatever has a length and elements, and nothing that was not given.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
}

fn tojson(
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, minijinja::Error> {
    let style = json::Style {
        ensure_ascii: ensure_ascii
            .map_or_else(|| kwargs.get("ensure_ascii"), |given| Ok(Some(given)))?
            .unwrap_or(false),
        indent: indent.map_or_else(|| kwargs.get("indent"), |given| Ok(Some(given)))?,
        separators: kwargs.get("separators")?,
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    Ok(Value::from(style.dumps(value)?))
}

/// A value as `json.dumps` of Python writes it.
pub(crate) fn dumped(value: &Value) -> Result<String, String> {
    json::Style::default().dumps(value).map_err(|error| said(&error))
}

/// A special token is a string, or an object with its text in `content`.
fn special_tokens(config: &Json) -> Vec<(String, Value)> {
    let token = |name: &&str| {
        let value = config.get(*name)?;
        let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
        Some(((*name).to_owned(), Value::from(text)))
    };
    SPECIAL.iter().filter_map(token).collect()
}

fn read(path: &Path) -> Result<Option<String>> {
    let file = match regular::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(io("open", path))?,
    };
    let mut text = String::new();
    let most = TEXT_BYTES_MAX as u64;
    let read = file.take(most + 1).read_to_string(&mut text).map_err(io("read", path))? as u64;
    if read > most {
        let reason = format!("it is longer than {most} bytes");
        return Err(Error::Template { path: path.to_owned(), reason });
    }
    Ok(Some(text))
}

/// What a template error says, in one line with its place.
fn said(error: &minijinja::Error) -> String {
    let what = match error.kind() {
        ErrorKind::OutOfFuel => format!("it takes more than {INSTRUCTIONS_MAX} instructions"),
        ErrorKind::WriteFailure => format!("its text is longer than {TEXT_BYTES_MAX} bytes"),
        kind => error.detail().map_or_else(|| kind.to_string(), short),
    };
    error.line().map_or(what.clone(), |line| format!("{what} (line {line} of the template)"))
}
