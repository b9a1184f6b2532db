//! Anthropic's Messages.

use serde_json::{Value, json};

use super::read::{
    arguments, bound, content, flag, function, given, invalid, list, may_call, needed, none_of, said,
    signature, stops, text,
};
use super::tools::Toolbox;
use super::{Call, Event, Form, Frame};
use crate::message::{Answer, Ask, Ended, Json, Message, Refusal, Role, ToolCall, Tools};

/// Fields that cannot be had, and why.
const REFUSED: [(&str, &str); 2] = [
    ("mcp_servers", "the gateway calls no tools; clients do"),
    ("container", "the gateway runs no code; clients do"),
];
/// Holds arguments that are no object, which an input has to be. They come back in it.
const UNPARSED: &str = "unparsed_arguments";
/// What stands for the signature of thinking: it is checked nowhere.
const SIGNATURE: &str = "unsigned";

pub(super) fn read(body: &Json, known: Option<Toolbox>) -> Result<Call, Refusal> {
    none_of(body, &REFUSED)?;
    let mut messages = Vec::new();
    if given(body, "system").is_some() {
        messages.push(said(Role::System, content(body.get("system"), &["text"], "system")?));
    }
    for (index, message) in list(body, "messages", "")?.iter().enumerate() {
        let at = format!("messages[{index}]");
        match needed(message, "role", &at)? {
            "system" => {
                let text = content(message.get("content"), &["text"], &format!("{at}.content"))?;
                messages.push(said(Role::System, text));
            }
            "user" => user(message, &at, &mut messages)?,
            "assistant" => messages.push(assistant(message, &at)?),
            other => {
                let why = format!("expected user, assistant or system, found `{other}`");
                return Err(invalid(format!("{at}.role"), why));
            }
        }
    }
    let tools = match (may_call(body.get("tool_choice"))?, known) {
        (false, _) => Tools::default(),
        (true, Some(known)) => known.tools,
        (true, None) => tools(body)?.into(),
    };
    let ask = Ask {
        messages,
        tools,
        max_tokens: bound(body, &["max_tokens"])?,
        stop: stops(body, "stop_sequences")?,
        branch: None,
        is_auxiliary: false,
    };
    let stop = match ask.stop.as_slice() {
        [one] => Some(one.clone()),
        _ => None,
    };
    Ok(Call { ask, form: Form { stream: flag(body, "stream")?, stop, ..Form::default() } })
}

/// The blocks of a message, and where each is; `None` for a message that is a string.
fn blocks<'a>(message: &'a Json, at: &str) -> Result<Option<Vec<(&'a Json, String)>>, Refusal> {
    if message["content"].as_str().is_some() {
        return Ok(None);
    }
    let blocks = list(message, "content", at)?.iter().enumerate();
    Ok(Some(blocks.map(|(index, block)| (block, format!("{at}.content[{index}]"))).collect()))
}

/// A user's message: what tools returned, each a message of its own, and text.
fn user(message: &Json, at: &str, messages: &mut Vec<Message>) -> Result<(), Refusal> {
    let Some(blocks) = blocks(message, at)? else {
        messages.push(said(Role::User, message["content"].as_str().unwrap_or_default().to_owned()));
        return Ok(());
    };
    let (first, mut texts) = (messages.len(), Vec::new());
    let flush = |texts: &mut Vec<&str>, messages: &mut Vec<Message>| {
        if !texts.is_empty() {
            messages.push(said(Role::User, std::mem::take(texts).join("\n")));
        }
    };
    for (block, at) in blocks {
        match needed(block, "type", &at)? {
            "text" => texts.push(needed(block, "text", &at)?),
            "tool_result" => {
                flush(&mut texts, messages);
                messages.push(result(block, &at)?);
            }
            other => {
                return Err(invalid(at, format!("blocks of type `{other}` cannot be had; text can")));
            }
        }
    }
    flush(&mut texts, messages);
    if messages.len() == first {
        messages.push(said(Role::User, String::new()));
    }
    Ok(())
}

fn result(block: &Json, at: &str) -> Result<Message, Refusal> {
    let mut text = content(block.get("content"), &["text"], &format!("{at}.content"))?;
    if block["is_error"].as_bool() == Some(true) {
        text.insert_str(0, "Error: ");
    }
    let call_id = Some(needed(block, "tool_use_id", at)?.to_owned());
    Ok(Message { call_id, ..said(Role::Tool, text) })
}

fn assistant(message: &Json, at: &str) -> Result<Message, Refusal> {
    let mut read = said(Role::Assistant, String::new());
    let Some(blocks) = blocks(message, at)? else {
        read.content = message["content"].as_str().unwrap_or_default().to_owned();
        return Ok(read);
    };
    let (mut texts, mut thoughts) = (Vec::new(), Vec::new());
    for (block, at) in blocks {
        match needed(block, "type", &at)? {
            "text" => texts.push(needed(block, "text", &at)?),
            "thinking" => thoughts.push(needed(block, "thinking", &at)?),
            // Another model's, which nobody here can read.
            "redacted_thinking" => {}
            "tool_use" => {
                let id = text(block, "id", &at)?.unwrap_or_default().to_owned();
                let name = needed(block, "name", &at)?.to_owned();
                let mut arguments = arguments(block.get("input"), &format!("{at}.input"))?;
                if let Some(text) = arguments.get(UNPARSED).filter(|text| text.as_str().is_some()).cloned() {
                    arguments = text;
                }
                read.calls.push(ToolCall { id, name, arguments });
            }
            other => return Err(invalid(at, format!("blocks of type `{other}` cannot be had"))),
        }
    }
    read.content = texts.join("\n");
    read.reasoning = Some(thoughts.join("\n")).filter(|text| !text.is_empty());
    Ok(read)
}

/// Those that clients carry out: they come with a schema.
fn tools(body: &Json) -> Result<Vec<Json>, Refusal> {
    let mut tools = Vec::new();
    for (index, tool) in list(body, "tools", "")?.iter().enumerate() {
        let is_custom = tool["type"].as_str().is_none_or(|kind| kind == "custom");
        if is_custom {
            let name = needed(tool, "name", &format!("tools[{index}]"))?;
            tools.push(function(signature(name, tool, "input_schema")));
        }
    }
    Ok(tools)
}

fn stop_reason(ended: Ended) -> &'static str {
    match ended {
        Ended::Stop => "end_turn",
        Ended::ToolCalls => "tool_use",
        Ended::StopText => "stop_sequence",
        Ended::Length => "max_tokens",
    }
}

/// The text that ended an answer, where only one can have.
fn stop_sequence<'a>(form: &'a Form, answer: &Answer) -> Option<&'a str> {
    form.stop.as_deref().filter(|_| answer.ended == Ended::StopText)
}

fn usage(answer: &Answer) -> Value {
    json!({
        "input_tokens": answer.prompt_tokens.saturating_sub(answer.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
    })
}

/// A call's input, which is an object in any case.
fn input(call: &ToolCall) -> Json {
    match &call.arguments {
        object @ Json::Object(_) => object.clone(),
        other => Json::object([(UNPARSED, other.clone())]),
    }
}

fn content_of(message: &Message) -> Vec<Value> {
    let mut blocks = Vec::new();
    if let Some(text) = &message.reasoning {
        blocks.push(json!({"type": "thinking", "thinking": text, "signature": SIGNATURE}));
    }
    if !message.content.is_empty() {
        blocks.push(json!({"type": "text", "text": message.content}));
    }
    for call in &message.calls {
        blocks.push(json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input(call)}));
    }
    blocks
}

pub(super) fn reply(form: &Form, answer: &Answer, frame: &Frame) -> Value {
    json!({
        "id": format!("msg_{}", frame.id),
        "type": "message",
        "role": "assistant",
        "model": frame.model,
        "content": content_of(&answer.message),
        "stop_reason": stop_reason(answer.ended),
        "stop_sequence": stop_sequence(form, answer),
        "usage": usage(answer),
    })
}

pub(super) fn events(form: &Form, answer: &Answer, frame: &Frame) -> Vec<Event> {
    let mut begun = reply(form, answer, frame);
    for (field, value) in
        [("content", json!([])), ("stop_reason", Value::Null), ("stop_sequence", Value::Null)]
    {
        begun[field] = value;
    }
    begun["usage"]["output_tokens"] = json!(0);
    let mut events = vec![Event::named("message_start", &json!({"type": "message_start", "message": begun}))];
    let mut calls = answer.message.calls.iter();
    for (index, block) in content_of(&answer.message).into_iter().enumerate() {
        let call = if block["type"] == "tool_use" { calls.next() } else { None };
        events.extend(block_events(index, &block, call));
    }
    let delta =
        json!({"stop_reason": stop_reason(answer.ended), "stop_sequence": stop_sequence(form, answer)});
    let delta = json!({"type": "message_delta", "delta": delta, "usage": usage(answer)});
    events.push(Event::named("message_delta", &delta));
    events.push(Event::named("message_stop", &json!({"type": "message_stop"})));
    events
}

/// A block begins empty, and comes in one piece.
fn block_events(index: usize, block: &Value, call: Option<&ToolCall>) -> Vec<Event> {
    let (mut empty, mut deltas) = (block.clone(), Vec::new());
    match block["type"].as_str() {
        Some("thinking") => {
            empty["thinking"] = json!("");
            empty["signature"] = json!("");
            deltas.push(json!({"type": "thinking_delta", "thinking": block["thinking"]}));
            deltas.push(json!({"type": "signature_delta", "signature": block["signature"]}));
        }
        Some("tool_use") => {
            empty["input"] = json!({});
            let input = call.map(|call| input(call).to_string());
            deltas.push(json!({"type": "input_json_delta", "partial_json": input}));
        }
        _ => {
            empty["text"] = json!("");
            deltas.push(json!({"type": "text_delta", "text": block["text"]}));
        }
    }
    let start = json!({"type": "content_block_start", "index": index, "content_block": empty});
    let mut events = vec![Event::named("content_block_start", &start)];
    events.extend(deltas.into_iter().map(|delta| {
        let data = json!({"type": "content_block_delta", "index": index, "delta": delta});
        Event::named("content_block_delta", &data)
    }));
    events.push(Event::named("content_block_stop", &json!({"type": "content_block_stop", "index": index})));
    events
}
