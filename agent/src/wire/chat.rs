//! OpenAI's Chat Completions.

use serde_json::{Value, json};

use super::read::{
    arguments, bound, content, flag, function, given, invalid, list, may_call, needed, none_of, said,
    signature, stops, text, text_format,
};
use super::tools::Toolbox;
use super::{Call, Event, Form, Frame, arguments_text, finish_reason};
use crate::message::{Answer, Ask, Json, Message, Refusal, Role, ToolCall, Tools};

/// Fields that cannot be had, and why.
const REFUSED: [(&str, &str); 5] = [
    ("logprobs", "log-probabilities are kept in the session, and not told to clients"),
    ("functions", "expected `tools`"),
    ("function_call", "expected `tool_choice`"),
    ("audio", "text alone can be had"),
    ("web_search_options", "the model has no search of its own"),
];

pub(super) fn read(body: &Json, known: Option<Toolbox>) -> Result<Call, Refusal> {
    none_of(body, &REFUSED)?;
    if let Some(n) = given(body, "n").filter(|n| n.as_u64() != Some(1)) {
        return Err(invalid("n", format!("a session goes on with one answer, expected 1, found {n}")));
    }
    text_format(body.get("response_format"), "response_format")?;
    let mut messages = Vec::new();
    for (index, message) in list(body, "messages", "")?.iter().enumerate() {
        messages.push(one(message, &format!("messages[{index}]"))?);
    }
    let tools = match (may_call(body.get("tool_choice"))?, known) {
        (false, _) => Tools::default(),
        (true, Some(known)) => known.tools,
        (true, None) => tools(body)?.into(),
    };
    let ask = Ask {
        messages,
        tools,
        max_tokens: bound(body, &["max_completion_tokens", "max_tokens"])?,
        stop: stops(body, "stop")?,
        branch: None,
        is_auxiliary: false,
    };
    let include_usage = body["stream_options"]["include_usage"].as_bool().unwrap_or(false);
    let stream = flag(body, "stream")?;
    Ok(Call { ask, form: Form { stream, include_usage, ..Form::default() } })
}

/// A message of a conversation; `at` names it.
pub(crate) fn one(message: &Json, at: &str) -> Result<Message, Refusal> {
    let role = match needed(message, "role", at)? {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" => Role::Tool,
        other => {
            let expected = "expected system, developer, user, assistant or tool";
            return Err(invalid(format!("{at}.role"), format!("{expected}, found `{other}`")));
        }
    };
    let content = content(message.get("content"), &["text", "refusal"], &format!("{at}.content"))?;
    let mut read = said(role, content);
    if role == Role::Assistant {
        none_of(message, &[("function_call", "expected `tool_calls`")])?;
        let reasoning = text(message, "reasoning_content", at)?;
        let reasoning = reasoning.or(text(message, "reasoning", at)?).filter(|text| !text.is_empty());
        read.reasoning = reasoning.map(str::to_owned);
        for (index, call) in list(message, "tool_calls", at)?.iter().enumerate() {
            let at = format!("{at}.tool_calls[{index}]");
            let of = &call["function"];
            let name = needed(of, "name", &format!("{at}.function"))?.to_owned();
            let arguments = arguments(of.get("arguments"), &format!("{at}.function.arguments"))?;
            let id = text(call, "id", &at)?.unwrap_or_default().to_owned();
            read.calls.push(ToolCall { id, name, arguments });
        }
    }
    if role == Role::Tool {
        read.call_id = text(message, "tool_call_id", at)?.map(str::to_owned);
    }
    Ok(read)
}

/// Those that are functions, their members in the client's order.
fn tools(body: &Json) -> Result<Vec<Json>, Refusal> {
    let mut tools = Vec::new();
    for (index, tool) in list(body, "tools", "")?.iter().enumerate() {
        if tool["type"] == "function" {
            let name = needed(&tool["function"], "name", &format!("tools[{index}].function"))?;
            let signature = signature(name, &tool["function"], "parameters");
            tools.push(function(signature.ordered_as(&tool["function"])).ordered_as(tool));
        }
    }
    Ok(tools)
}

fn usage(answer: &Answer) -> Value {
    json!({
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    })
}

fn calls(message: &Message) -> Vec<Value> {
    let one = |call: &ToolCall| {
        let of = json!({"name": call.name, "arguments": arguments_text(&call.arguments)});
        json!({"id": call.id, "type": "function", "function": of})
    };
    message.calls.iter().map(one).collect()
}

/// What the model said, as a message.
pub(crate) fn spoken(said: &Message) -> Value {
    let calls = calls(said);
    let mut message = json!({"role": "assistant", "content": said.content});
    if let Some(reasoning) = &said.reasoning {
        message["reasoning_content"] = json!(reasoning);
    }
    if !calls.is_empty() {
        if said.content.is_empty() {
            message["content"] = Value::Null;
        }
        message["tool_calls"] = json!(calls);
    }
    message
}

pub(super) fn reply(answer: &Answer, frame: &Frame) -> Value {
    let mut message = spoken(&answer.message);
    message["refusal"] = Value::Null;
    let finish = finish_reason(answer.ended);
    json!({
        "id": format!("chatcmpl-{}", frame.id),
        "object": "chat.completion",
        "created": frame.created,
        "model": frame.model,
        "choices": [{"index": 0, "message": message, "logprobs": null, "finish_reason": finish}],
        "usage": usage(answer),
    })
}

pub(super) fn events(form: &Form, answer: &Answer, frame: &Frame) -> Vec<Event> {
    let said = &answer.message;
    let mut deltas = vec![json!({"role": "assistant", "content": ""})];
    deltas.extend(said.reasoning.iter().map(|text| json!({"reasoning_content": text})));
    if !said.content.is_empty() {
        deltas.push(json!({"content": said.content}));
    }
    for (index, mut call) in calls(said).into_iter().enumerate() {
        call["index"] = json!(index);
        deltas.push(json!({"tool_calls": [call]}));
    }
    let chunk = |choices: Value, usage: Value| {
        let mut chunk = json!({
            "id": format!("chatcmpl-{}", frame.id),
            "object": "chat.completion.chunk",
            "created": frame.created,
            "model": frame.model,
            "choices": choices,
        });
        if form.include_usage {
            chunk["usage"] = usage;
        }
        Event { name: None, data: chunk.to_string() }
    };
    let piece = |delta: Value, finish: Value| {
        chunk(json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}]), Value::Null)
    };
    let mut events: Vec<_> = deltas.into_iter().map(|delta| piece(delta, Value::Null)).collect();
    events.push(piece(json!({}), json!(finish_reason(answer.ended))));
    if form.include_usage {
        events.push(chunk(json!([]), usage(answer)));
    }
    events.push(Event { name: None, data: "[DONE]".into() });
    events
}
