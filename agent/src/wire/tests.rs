use super::*;
use crate::message::{Message, ToolCall};

const ALL: [Protocol; 3] = [Protocol::Chat, Protocol::Responses, Protocol::Messages];

fn read(protocol: Protocol, body: &Value) -> Result<Call, Refusal> {
    protocol.read(body.to_string().as_bytes(), &Hints::default(), &ToolCache::default())
}

fn ask(protocol: Protocol, body: &Value) -> Ask {
    read(protocol, body).unwrap().ask
}

fn refused(protocol: Protocol, body: &Value) -> String {
    read(protocol, body).unwrap_err().to_string()
}

fn frame() -> Frame {
    Frame { id: "07".into(), model: "m".into(), created: 5 }
}

fn answer() -> Answer {
    let call = |id: &str, arguments: Value| ToolCall {
        id: id.into(),
        name: "read".into(),
        arguments: arguments.into(),
    };
    let message = Message {
        role: Role::Assistant,
        content: "I look.".into(),
        reasoning: Some("two files".into()),
        calls: vec![call("c0", json!({"path": "a"})), call("c1", json!("{not json"))],
        call_id: None,
    };
    let (prompt_tokens, cached_tokens, completion_tokens) = (100, 60, 7);
    let (ended, reasoning_tokens) = (Ended::ToolCalls, 3);
    Answer { message, ended, prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens }
}

/// What a client sends back of a reply, as it came.
fn sent_back(protocol: Protocol, reply: &Value) -> Value {
    match protocol {
        Protocol::Chat => {
            json!({"messages": [{"role": "user", "content": "u"}, reply["choices"][0]["message"]]})
        }
        Protocol::Messages => json!({"messages": [{"role": "user", "content": "u"},
            {"role": "assistant", "content": reply["content"]}]}),
        Protocol::Responses => {
            let mut input = vec![json!({"role": "user", "content": "u"})];
            input.extend(reply["output"].as_array().unwrap().iter().cloned());
            json!({ "input": input })
        }
    }
}

/// A request of one user's message, with further fields.
fn one(protocol: Protocol, fields: Value) -> Value {
    let mut body = match protocol {
        Protocol::Responses => json!({"input": "hello"}),
        _ => json!({"messages": [{"role": "user", "content": "hello"}]}),
    };
    for (field, value) in fields.as_object().unwrap() {
        body[field] = value.clone();
    }
    body
}

#[test]
fn an_answer_comes_back_as_it_was_told() {
    for protocol in ALL {
        let form = read(protocol, &one(protocol, json!({}))).unwrap().form;
        let mut told = answer();
        for _ in 0..3 {
            let reply = protocol.reply(&form, &told, &frame());
            let back = ask(protocol, &sent_back(protocol, &reply));
            assert_eq!(back.messages.len(), 2, "{protocol:?}: {reply}");
            assert_eq!(back.messages[1], told.message, "{protocol:?}");
            // Next without thinking, then without text.
            match told.message.reasoning.take() {
                Some(_) => {}
                None => told.message.content.clear(),
            }
        }
    }
}

/// What a client puts together of a stream is what it is told at once, where the protocol says the whole at the end.
#[test]
fn streams_tell_what_replies_tell() {
    for protocol in ALL {
        let form = read(protocol, &one(protocol, json!({"stream": true}))).unwrap().form;
        assert!(form.stream);
        let (told, reply) = (answer(), protocol.reply(&form, &answer(), &frame()));
        let events = protocol.events(&form, &told, &frame());
        let data: Vec<Value> =
            events.iter().filter_map(|event| serde_json::from_str(&event.data).ok()).collect();
        let joined = |pointer: &str| -> String {
            data.iter().filter_map(|data| data.pointer(pointer)?.as_str()).collect()
        };
        match protocol {
            Protocol::Chat => {
                assert_eq!(joined("/choices/0/delta/content"), "I look.");
                assert_eq!(joined("/choices/0/delta/reasoning_content"), "two files");
                let arguments = joined("/choices/0/delta/tool_calls/0/function/arguments");
                assert_eq!(arguments, "{\"path\":\"a\"}{not json");
                assert_eq!(joined("/choices/0/finish_reason"), "tool_calls");
                assert_eq!(events.last().unwrap().data, "[DONE]");
                assert!(data.iter().all(|data| data.get("usage").is_none()), "nobody asked for it");
            }
            Protocol::Responses => {
                assert_eq!(data.last().unwrap()["response"], reply);
                assert_eq!(reply["usage"]["output_tokens_details"]["reasoning_tokens"], 3);
                let done: Vec<_> = data
                    .iter()
                    .filter(|data| data["type"] == "response.output_item.done")
                    .map(|data| data["item"].clone())
                    .collect();
                assert_eq!(json!(done), reply["output"]);
                let numbers: Vec<_> = data.iter().map(|data| data["sequence_number"].as_u64()).collect();
                assert_eq!(numbers, (0..data.len() as u64).map(Some).collect::<Vec<_>>());
            }
            Protocol::Messages => {
                assert_eq!(joined("/delta/text"), "I look.");
                assert_eq!(joined("/delta/thinking"), "two files");
                let inputs = joined("/delta/partial_json");
                assert_eq!(inputs, "{\"path\":\"a\"}{\"unparsed_arguments\":\"{not json\"}");
                let names: Vec<_> = events.iter().filter_map(|event| event.name).collect();
                assert_eq!((names[0], names[names.len() - 1]), ("message_start", "message_stop"));
                assert_eq!(data[data.len() - 2]["delta"]["stop_reason"], "tool_use");
                assert_eq!(data[data.len() - 2]["usage"], reply["usage"]);
            }
        }
    }
}

#[test]
fn a_chat_stream_ends_with_the_usage_that_was_asked_for() {
    let fields = json!({"stream": true, "stream_options": {"include_usage": true}});
    let call = read(Protocol::Chat, &one(Protocol::Chat, fields)).unwrap();
    let events = Protocol::Chat.events(&call.form, &answer(), &frame());
    let usage: Value = serde_json::from_str(&events[events.len() - 2].data).unwrap();
    assert_eq!(usage["usage"]["total_tokens"], 107);
    assert_eq!(usage["usage"]["prompt_tokens_details"]["cached_tokens"], 60);
    assert_eq!(usage["usage"]["completion_tokens_details"]["reasoning_tokens"], 3);
    assert_eq!(usage["choices"], json!([]));
}

#[test]
fn chat_reads_what_clients_send() {
    let body = json!({"model": "x", "temperature": 0.1, "user": "u", "seed": 3, "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "do"},
        {"role": "assistant", "index": 0, "provider_specific_fields": {},
         "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "done"}]},
    ], "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {}}],
       "stop": "END", "max_tokens": 9, "max_completion_tokens": 8});
    let ask = ask(Protocol::Chat, &body);
    let roles: Vec<_> = ask.messages.iter().map(|message| message.role).collect();
    assert_eq!(roles, [Role::System, Role::User, Role::Assistant, Role::Tool]);
    assert_eq!(ask.messages[0].content, "be\nbrief");
    assert_eq!(ask.messages[2].calls[0].arguments, json!({}));
    assert_eq!((ask.messages[3].content.as_str(), ask.messages[3].call_id.as_deref()), ("done", Some("a")));
    assert_eq!(ask.tools.len(), 1);
    assert_eq!((ask.max_tokens, ask.stop), (Some(8), vec!["END".to_owned()]));
}

#[test]
fn messages_reads_what_clients_send() {
    let body = json!({"max_tokens": 64000, "metadata": {"user_id": "{}"}, "thinking": {"type": "adaptive"},
        "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
            {"role": "system", "content": "where"},
            {"role": "assistant", "content": [
                {"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "2", "name": "f", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "two"}]},
                {"type": "tool_result", "tool_use_id": "1", "is_error": true, "content": "no"},
                {"type": "text", "text": "go on"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}},
                  {"type": "web_search_20250305", "name": "web_search"}]});
    let ask = ask(Protocol::Messages, &body);
    let told: Vec<_> = ask.messages.iter().map(|message| (message.role, message.content.as_str())).collect();
    let expected = [
        (Role::System, "a\nb"),
        (Role::User, "c\nd"),
        (Role::System, "where"),
        (Role::Assistant, ""),
        (Role::Tool, "two"),
        (Role::Tool, "Error: no"),
        (Role::User, "go on"),
    ];
    assert_eq!(told, expected);
    assert_eq!(ask.messages[3].reasoning.as_deref(), Some("t"));
    assert_eq!(ask.messages[4].call_id.as_deref(), Some("2"));
    let function = json!({"name": "f", "description": "d", "parameters": {"type": "object"}});
    assert_eq!(ask.tools[..], [json!({"type": "function", "function": function})]);
}

#[test]
fn members_of_tools_and_arguments_keep_the_clients_order() {
    let tool = r#"{"type":"function","function":{"description":"d","name":"f","parameters":{"type":"object","a":1}}}"#;
    let input = r#"{"path":"/","limit":5,"at":{"b":1,"a":2}}"#;
    let talk = format!(
        r#"[{{"role":"user","content":"u"}},{{"role":"assistant","tool_calls":[{{"id":"1","function":
        {{"name":"f","arguments":{}}}}}]}}]"#,
        json!(input)
    );
    let read = |protocol: Protocol, body: String| {
        protocol.read(body.as_bytes(), &Hints::default(), &ToolCache::default()).unwrap().ask
    };
    let chat = read(Protocol::Chat, format!(r#"{{"tools":[{tool}],"messages":{talk}}}"#));
    assert_eq!(chat.tools[0].to_string(), tool);
    assert_eq!(chat.messages[1].calls[0].arguments.to_string(), input);
    let talk = format!(
        r#"[{{"role":"assistant","content":[{{"type":"tool_use","id":"1","name":"f","input":{input}}}]}}]"#
    );
    let tools = r#"[{"input_schema":{"type":"object","a":1},"name":"f","description":"d"}]"#;
    let messages = read(Protocol::Messages, format!(r#"{{"messages":{talk},"tools":{tools}}}"#));
    assert_eq!(messages.messages[0].calls[0].arguments.to_string(), input);
    assert_eq!(messages.tools[0]["function"]["parameters"].to_string(), r#"{"type":"object","a":1}"#);
    let answer = Answer { message: messages.messages[0].clone(), ..answer() };
    for protocol in ALL {
        let form = read_form(protocol);
        let events = protocol.events(&form, &answer, &frame());
        let told = events.iter().any(|event| event.data.contains(&json!(input).to_string()));
        assert!(told, "{protocol:?}");
    }
}

fn read_form(protocol: Protocol) -> Form {
    read(protocol, &one(protocol, json!({"stream": true}))).unwrap().form
}

#[test]
fn responses_reads_what_clients_send() {
    let tool = |name: &str| json!({"type": "function", "name": name, "parameters": {"type": "object"}});
    let body = json!({"instructions": "i", "store": false, "include": ["reasoning.encrypted_content"],
    "tools": [tool("f"), {"type": "namespace", "name": "mcp__db", "tools": [tool("get")]}, {"type": "web_search"}],
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "hm"},
        {"type": "function_call", "call_id": "1", "namespace": "mcp__db", "name": "get", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{\"a\": 1}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
    ]});
    let call = read(Protocol::Responses, &body).unwrap();
    let ask = &call.ask;
    let names: Vec<_> = ask.tools.iter().map(|tool| tool["function"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["f", "mcp__db__get"]);
    let roles: Vec<_> = ask.messages.iter().map(|message| message.role).collect();
    let expected = [Role::System, Role::System, Role::User, Role::Assistant, Role::Tool, Role::Tool];
    assert_eq!(roles, expected);
    let turn = &ask.messages[3];
    assert_eq!(turn.reasoning.as_deref(), Some("hm"));
    assert_eq!(turn.calls.iter().map(|call| call.name.as_str()).collect::<Vec<_>>(), ["mcp__db__get", "f"]);
    let mut answer = answer();
    answer.message.calls[0].name = "mcp__db__get".into();
    let reply = Protocol::Responses.reply(&call.form, &answer, &frame());
    assert_eq!(reply["output"][2]["namespace"], "mcp__db");
    assert_eq!(reply["output"][2]["name"], "get");
}

#[test]
fn what_cannot_be_had_is_refused_by_its_field() {
    let choice = |choice: Value| json!({ "tool_choice": choice });
    let cases = [
        (Protocol::Chat, json!({"n": 2}), "n: "),
        (Protocol::Chat, json!({"logprobs": true}), "logprobs"),
        (Protocol::Chat, json!({"response_format": {"type": "json_object"}}), "response_format"),
        (Protocol::Chat, choice(json!("required")), "tool_choice"),
        (Protocol::Chat, choice(json!({"type": "function", "function": {"name": "f"}})), "tool_choice"),
        (Protocol::Chat, json!({"max_tokens": 0}), "max_tokens"),
        (Protocol::Chat, json!({"stop": [1]}), "stop"),
        (Protocol::Chat, json!({"stream": "yes"}), "stream"),
        (Protocol::Chat, json!({"tools": [{"type": "function", "function": {}}]}), "tools[0].function.name"),
        (Protocol::Chat, json!({"messages": "hello"}), "messages"),
        (Protocol::Chat, json!({"messages": []}), "no messages"),
        (Protocol::Chat, json!({"messages": [{"role": "wizard", "content": ""}]}), "messages[0].role"),
        (
            Protocol::Chat,
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages[0].content[0]: parts of type `image_url`",
        ),
        (Protocol::Responses, json!({"previous_response_id": "r"}), "previous_response_id"),
        (Protocol::Responses, json!({"background": true}), "background"),
        (Protocol::Responses, json!({"text": {"format": {"type": "json_schema"}}}), "text.format"),
        (Protocol::Responses, json!({"input": [{"type": "item_reference", "id": "i"}]}), "input[0]"),
        (Protocol::Messages, choice(json!({"type": "any"})), "tool_choice"),
        (Protocol::Messages, choice(json!({"type": "tool", "name": "f"})), "tool_choice"),
        (
            Protocol::Messages,
            json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
            "messages[0].content[0]: blocks of type `image`",
        ),
    ];
    for (protocol, fields, expected) in cases {
        let refused = refused(protocol, &one(protocol, fields.clone()));
        assert!(refused.contains(expected), "{protocol:?} {fields}: {refused}");
    }
    for protocol in ALL {
        let none = one(protocol, json!({"tool_choice": {"type": "none"}, "tools": [{"name": "f"}]}));
        assert!(ask(protocol, &none).tools.is_empty());
        for body in [&b"{"[..], b"[]", b"{\"messages\": [\xff]}", b""] {
            assert!(protocol.read(body, &Hints::default(), &ToolCache::default()).is_err());
        }
    }
}

#[test]
fn refusals_have_each_vendors_shape_and_status() {
    let full = Refusal::ContextFull { tokens: 9, limit: 8 };
    let busy = Refusal::Busy("later".into());
    let told = |protocol: Protocol, refusal| {
        let fault = protocol.refused(refusal);
        let error = fault.body["error"].clone();
        (fault.status, error["type"].clone(), error["code"].clone())
    };
    assert_eq!(
        told(Protocol::Chat, &full),
        (400, json!("invalid_request_error"), json!("context_length_exceeded"))
    );
    assert_eq!(told(Protocol::Messages, &full), (400, json!("invalid_request_error"), Value::Null));
    let words = Protocol::Messages.refused(&full).body["error"]["message"].clone();
    assert_eq!(words, "prompt is too long: 9 tokens > 8 maximum");
    assert_eq!(told(Protocol::Messages, &busy), (529, json!("overloaded_error"), Value::Null));
    assert_eq!(told(Protocol::Responses, &busy).0, 503);
    let unknown = Refusal::Unknown("who".into());
    assert_eq!(told(Protocol::Messages, &unknown).1, "authentication_error");
    assert_eq!(Protocol::Messages.refused_late(&busy).name, Some("error"));
}

#[test]
fn housekeeping_and_branches_are_recognised() {
    let title = |tools: Value| {
        json!({"messages": [{"role": "system", "content": "Write a Title for this Conversation."},
            {"role": "user", "content": "u"}], "tools": tools})
    };
    assert!(ask(Protocol::Chat, &title(json!([]))).is_auxiliary);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    assert!(!ask(Protocol::Chat, &title(tools)).is_auxiliary);
    assert!(ask(Protocol::Messages, &one(Protocol::Messages, json!({"max_tokens": 1}))).is_auxiliary);
    assert!(!ask(Protocol::Chat, &one(Protocol::Chat, json!({}))).is_auxiliary);
    let system = |text: &str| {
        let talk = json!([{"role": "system", "content": text}, {"role": "user", "content": "u"}]);
        ask(Protocol::Chat, &json!({ "messages": talk })).is_auxiliary
    };
    for asked in [
        "You are a title generator. You output ONLY a thread title. Nothing else.",
        "Be brief.\nGenerate a concise, sentence-case title (3-7 words) for this coding session.",
    ] {
        assert!(system(asked), "{asked}");
    }
    for other in [
        "Write subtitles for a chat of two. The entitled one makes a session of it.",
        "You are a chatbot. Give each poem a title.",
        "This is a chat. Write a title for the text.",
    ] {
        assert!(!system(other), "{other}");
    }
    let choice = format!("Answer with A, B, C or D alone. {}", "Which of these is right? ".repeat(4));
    let choice = json!({"max_tokens": 1, "messages": [{"role": "user", "content": choice}]});
    assert!(!ask(Protocol::Chat, &choice).is_auxiliary, "a question with one letter for an answer");

    let agent = Hints { agent_id: Some("a7".into()), turn_metadata: None };
    assert_eq!(branch(&agent).as_deref(), Some("a7"));
    let metadata = r#"{"request_kind": "turn", "window_number": 1, "agent_name": "main"}"#;
    let window = Hints { agent_id: None, turn_metadata: Some(metadata.into()) };
    assert_eq!(branch(&window).as_deref(), Some("main/1"));
    assert_eq!(branch(&Hints { agent_id: None, turn_metadata: Some("{".into()) }), None);
}
