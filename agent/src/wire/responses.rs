//! OpenAI's Responses, without state on the server: each request has the whole conversation.

use serde_json::{Value, json};

use super::read::{
    arguments, bound, content, flag, function, invalid, list, may_call, needed, none_of, said, signature,
    text, text_format,
};
use super::tools::{Namespaces, Toolbox};
use super::{Call, Event, Form, Frame, arguments_text};
use crate::message::{Answer, Ask, Ended, Json, Message, Refusal, Role, ToolCall};

/// Fields that cannot be had, and why.
const REFUSED: [(&str, &str); 5] = [
    ("previous_response_id", "the gateway keeps no responses, send the whole conversation in `input`"),
    ("conversation", "the gateway keeps no conversations, send the whole one in `input`"),
    ("background", "an answer is waited for"),
    ("prompt", "the gateway has no prompts of its own, send the text in `input`"),
    ("top_logprobs", "log-probabilities are kept in the session, and not told to clients"),
];
/// Parts of a message that are text.
const TEXTS: [&str; 4] = ["input_text", "output_text", "text", "refusal"];

pub(super) fn read(body: &Json, known: Option<Toolbox>) -> Result<Call, Refusal> {
    none_of(body, &REFUSED)?;
    text_format(body["text"].get("format"), "text.format")?;
    let mut messages = Vec::new();
    if let Some(instructions) = text(body, "instructions", "")? {
        messages.push(said(Role::System, instructions.to_owned()));
    }
    match body.get("input") {
        Some(Json::String(text)) => messages.push(said(Role::User, text.clone())),
        _ => {
            for (index, item) in list(body, "input", "")?.iter().enumerate() {
                take(item, &format!("input[{index}]"), &mut messages)?;
            }
        }
    }
    let Toolbox { tools, namespaces } = match (may_call(body.get("tool_choice"))?, known) {
        (false, _) => Toolbox::default(),
        (true, Some(known)) => known,
        (true, None) => {
            let (mut functions, mut namespaces) = (Vec::new(), Namespaces::new());
            tools(list(body, "tools", "")?, &mut functions, &mut namespaces)?;
            Toolbox { tools: functions.into(), namespaces }
        }
    };
    let ask = Ask {
        messages,
        tools,
        max_tokens: bound(body, &["max_output_tokens"])?,
        stop: Vec::new(),
        branch: None,
        is_auxiliary: false,
    };
    Ok(Call { ask, form: Form { stream: flag(body, "stream")?, namespaces, ..Form::default() } })
}

/// Adds an item to the conversation. What an answer was told in several items is one message again.
fn take(item: &Json, at: &str, messages: &mut Vec<Message>) -> Result<(), Refusal> {
    match text(item, "type", at)?.unwrap_or("message") {
        "message" => message(item, at, messages),
        "reasoning" => {
            let thought = thought(item, at)?;
            if !thought.is_empty() {
                let is_fresh = |last: &Message| {
                    last.content.is_empty() && last.calls.is_empty() && last.reasoning.is_none()
                };
                turn(messages, is_fresh).reasoning = Some(thought);
            }
            Ok(())
        }
        "function_call" => {
            let name = needed(item, "name", at)?;
            let name = match text(item, "namespace", at)? {
                Some(namespace) => flat(namespace, name),
                None => name.to_owned(),
            };
            let arguments = arguments(item.get("arguments"), &format!("{at}.arguments"))?;
            let id = needed(item, "call_id", at)?.to_owned();
            turn(messages, |_| true).calls.push(ToolCall { id, name, arguments });
            Ok(())
        }
        "function_call_output" => {
            let output = content(item.get("output"), &TEXTS, &format!("{at}.output"))?;
            let call_id = Some(needed(item, "call_id", at)?.to_owned());
            messages.push(Message { call_id, ..said(Role::Tool, output) });
            Ok(())
        }
        other => Err(invalid(at, format!("items of type `{other}` cannot be had"))),
    }
}

fn message(item: &Json, at: &str, messages: &mut Vec<Message>) -> Result<(), Refusal> {
    let content = content(item.get("content"), &TEXTS, &format!("{at}.content"))?;
    let role = match needed(item, "role", at)? {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => {
            turn(messages, |last| last.content.is_empty() && last.calls.is_empty()).content = content;
            return Ok(());
        }
        other => {
            let expected = "expected system, developer, user or assistant";
            return Err(invalid(format!("{at}.role"), format!("{expected}, found `{other}`")));
        }
    };
    messages.push(said(role, content));
    Ok(())
}

/// The assistant's message that goes on: the last one if it `fits`, or a new one.
fn turn(messages: &mut Vec<Message>, fits: impl Fn(&Message) -> bool) -> &mut Message {
    let goes_on = messages.last().is_some_and(|last| last.role == Role::Assistant && fits(last));
    if !goes_on {
        messages.push(said(Role::Assistant, String::new()));
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

/// What a reasoning item says. Clients may keep `encrypted_content` alone, which is the same text here.
fn thought(item: &Json, at: &str) -> Result<String, Refusal> {
    let parts = content(item.get("content"), &["reasoning_text", "text"], &format!("{at}.content"))?;
    if !parts.is_empty() {
        return Ok(parts);
    }
    Ok(text(item, "encrypted_content", at)?.unwrap_or_default().to_owned())
}

/// Adds those that are functions, with the functions of namespaces among them.
fn tools(from: &[Json], functions: &mut Vec<Json>, namespaces: &mut Namespaces) -> Result<(), Refusal> {
    for (index, tool) in from.iter().enumerate() {
        let at = format!("tools[{index}]");
        match tool["type"].as_str() {
            Some("function") => {
                functions.push(function(signature(needed(tool, "name", &at)?, tool, "parameters")))
            }
            Some("namespace") => {
                let namespace = needed(tool, "name", &at)?;
                for (index, tool) in list(tool, "tools", &at)?.iter().enumerate() {
                    if tool["type"] == "function" {
                        let name = needed(tool, "name", &format!("{at}.tools[{index}]"))?;
                        let flat = flat(namespace, name);
                        functions.push(function(signature(&flat, tool, "parameters")));
                        namespaces.insert(flat, [namespace.to_owned(), name.to_owned()]);
                    }
                }
            }
            // What the vendor's own server would carry out, such as a search.
            _ => {}
        }
    }
    Ok(())
}

/// The model's name of a tool of a namespace.
fn flat(namespace: &str, name: &str) -> String {
    format!("{}__{name}", namespace.trim_end_matches('_'))
}

fn usage(answer: &Answer) -> Value {
    json!({
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    })
}

/// An answer's items.
fn output(form: &Form, answer: &Answer, frame: &Frame) -> Vec<Value> {
    let (said, id) = (&answer.message, &frame.id);
    let status = if answer.ended == Ended::Length { "incomplete" } else { "completed" };
    let mut items = Vec::new();
    if let Some(text) = &said.reasoning {
        let content = json!([{"type": "reasoning_text", "text": text}]);
        items.push(json!({"id": format!("rs_{id}"), "type": "reasoning", "summary": [], "content": content,
            "encrypted_content": text, "status": status}));
    }
    if !said.content.is_empty() || said.calls.is_empty() {
        let content =
            json!([{"type": "output_text", "text": said.content, "annotations": [], "logprobs": []}]);
        items.push(
            json!({"id": format!("msg_{id}"), "type": "message", "role": "assistant", "status": status,
            "content": content}),
        );
    }
    for (index, tool) in said.calls.iter().enumerate() {
        let mut item = json!({"id": format!("fc_{id}_{index}"), "type": "function_call", "status": "completed",
            "call_id": tool.id, "name": tool.name, "arguments": arguments_text(&tool.arguments)});
        if let Some([namespace, name]) = form.namespaces.get(&tool.name) {
            item["namespace"] = json!(namespace);
            item["name"] = json!(name);
        }
        items.push(item);
    }
    items
}

pub(super) fn reply(form: &Form, answer: &Answer, frame: &Frame) -> Value {
    let is_cut = answer.ended == Ended::Length;
    let mut reply = begun(frame);
    reply["status"] = json!(if is_cut { "incomplete" } else { "completed" });
    if is_cut {
        reply["incomplete_details"] = json!({"reason": "max_output_tokens"});
    }
    reply["output"] = json!(output(form, answer, frame));
    reply["usage"] = usage(answer);
    reply
}

/// A reply before there is an answer.
fn begun(frame: &Frame) -> Value {
    json!({
        "id": format!("resp_{}", frame.id),
        "object": "response",
        "created_at": frame.created,
        "model": frame.model,
        "status": "in_progress",
        "error": null,
        "incomplete_details": null,
        "instructions": null,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": true,
        "previous_response_id": null,
        "store": false,
        "temperature": null,
        "tool_choice": "auto",
        "tools": [],
        "top_p": null,
        "usage": null,
    })
}

pub(super) fn events(form: &Form, answer: &Answer, frame: &Frame) -> Vec<Event> {
    let reply = reply(form, answer, frame);
    let begun = begun(frame);
    let mut told = vec![
        ("response.created", json!({"response": begun})),
        ("response.in_progress", json!({"response": begun})),
    ];
    for (index, item) in reply["output"].as_array().into_iter().flatten().enumerate() {
        item_events(index, item, &mut told);
    }
    let is_cut = answer.ended == Ended::Length;
    let last = if is_cut { "response.incomplete" } else { "response.completed" };
    told.push((last, json!({"response": reply})));
    let numbered = told.into_iter().enumerate().map(|(number, (name, mut data))| {
        data["type"] = json!(name);
        data["sequence_number"] = json!(number);
        Event::named(name, &data)
    });
    numbered.collect()
}

/// An item begins empty, comes in one piece, and is told whole at its end.
fn item_events(index: usize, item: &Value, told: &mut Vec<(&'static str, Value)>) {
    let mut empty = item.clone();
    empty["status"] = json!("in_progress");
    let place = |mut data: Value| {
        data["item_id"] = item["id"].clone();
        data["output_index"] = json!(index);
        data
    };
    let mut pieces = Vec::new();
    let part = &item["content"][0];
    let text = &part["text"];
    match item["type"].as_str() {
        Some("function_call") => {
            empty["arguments"] = json!("");
            let whole = &item["arguments"];
            pieces.push(("response.function_call_arguments.delta", json!({"delta": whole})));
            let done = json!({"arguments": whole, "name": item["name"]});
            pieces.push(("response.function_call_arguments.done", done));
        }
        Some("reasoning") => {
            empty["content"] = json!([]);
            pieces.push(("response.reasoning_text.delta", json!({"content_index": 0, "delta": text})));
            pieces.push(("response.reasoning_text.done", json!({"content_index": 0, "text": text})));
        }
        _ => {
            empty["content"] = json!([]);
            let mut blank = part.clone();
            blank["text"] = json!("");
            let at = |mut data: Value| {
                data["content_index"] = json!(0);
                data
            };
            pieces.push(("response.content_part.added", at(json!({"part": blank}))));
            pieces.push(("response.output_text.delta", at(json!({"delta": text, "logprobs": []}))));
            pieces.push(("response.output_text.done", at(json!({"text": text, "logprobs": []}))));
            pieces.push(("response.content_part.done", at(json!({"part": part}))));
        }
    }
    told.push(("response.output_item.added", json!({"output_index": index, "item": empty})));
    told.extend(pieces.into_iter().map(|(name, data)| (name, place(data))));
    told.push(("response.output_item.done", json!({"output_index": index, "item": item})));
}
