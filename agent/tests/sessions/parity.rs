//! Suffixes against the rendering of the whole, and text that looks like special tokens.

use driftless_agent::chat::Chat;
use driftless_agent::message::{Ask, Json, Message, Role, ToolCall};
use driftless_agent::session::{Bounds, Plan, Seen, Thoughts, Tree};
use minijinja::Value;
use serde_json::json;

use crate::toy::{self, ADDED, Dice, SPECIAL, TEMPLATES, ask, generation, message, user};

/// Ids of the whole as `transformers` makes them.
fn whole(template: &str, ask: &Ask, tools: Option<&str>) -> Vec<i32> {
    let json = |value: serde_json::Value| serde_json::from_value::<Value>(value).unwrap();
    let tools = tools.map(|tools| serde_json::from_str(tools).unwrap());
    let variables = json(json!({"tools_in_user_message": false}));
    let chat =
        Chat { messages: ask.messages.iter().map(written).collect(), tools, variables: Some(&variables) };
    let text = toy::template(template).render(chat).unwrap();
    toy::shared().encode(&text).unwrap()
}

/// The order of arguments is that of their text.
fn written(message: &Message) -> Value {
    let call = |call: &ToolCall| {
        let arguments = serde_json::from_str(&call.arguments.to_string()).unwrap();
        let function =
            Value::from_pairs([("name", Value::from(call.name.as_str())), ("arguments", arguments)]);
        Value::from_pairs([
            ("type", Value::from("function")),
            ("id", Value::from(call.id.as_str())),
            ("function", function),
        ])
    };
    let role = serde_json::to_value(message.role).unwrap();
    let mut written = vec![
        ("role", Value::from(role.as_str().unwrap())),
        ("content", Value::from(message.content.as_str())),
    ];
    if let Some(reasoning) = &message.reasoning {
        written.push(("reasoning_content", Value::from(reasoning.as_str())));
    }
    if !message.calls.is_empty() {
        written.push(("tool_calls", message.calls.iter().map(call).collect()));
    }
    if let Some(id) = &message.call_id {
        written.push(("tool_call_id", Value::from(id.as_str())));
    }
    Value::from_pairs(written)
}

pub(crate) fn plan(tree: &Tree, family: &driftless_agent::Family, ask: &Ask) -> Plan {
    match tree.see(family, ask).unwrap() {
        Seen::New(plan) => *plan,
        Seen::Answered(at) => panic!("answered in turn {at}"),
    }
}

/// Where a model writes what its template would, prompts are what the template makes of the whole.
#[test]
fn ordinary_text_has_the_ids_of_the_whole() {
    let texts =
        ["Hi", "  spaces  in\n\nit \t", "código → 日本語 🦀", "<b>tag</b> | <|", "{\"a\": 1}", "the end\n"];
    for (template, _) in TEMPLATES {
        let family = toy::family(template);
        for seed in 0..4 {
            let mut dice = Dice(seed);
            let mut tree = Tree::new(Bounds::default(), Thoughts::Kept);
            let mut talk = vec![message(Role::System, dice.pick(&texts))];
            for turn in 0..6 {
                if dice.below(3) == 0 && turn > 0 && toy::has_system_anywhere(template) {
                    talk.push(message(Role::System, dice.pick(&texts)));
                }
                talk.push(user(dice.pick(&texts)));
                let asked = ask(&talk);
                let plan = plan(&tree, &family, &asked);
                assert_eq!(
                    tree.prompt(&plan),
                    whole(template, &asked, None),
                    "{template}, seed {seed}, turn {turn}"
                );
                assert_eq!(plan.cached == 0, turn == 0);
                let said = toy::thought(template, ["Yes.", "Surely not."][turn % 2]);
                let made = generation(&said, toy::end_of(template));
                let at = tree
                    .turn(&family, plan, made, 1)
                    .and_then(|turn| tree.commit(turn).map_err(driftless_agent::message::Refusal::Broken));
                talk.push(tree.answer(at.unwrap()).message);
            }
        }
    }
}

/// A program that appends messages itself reads and writes what a client's conversation has.
#[test]
fn appended_messages_have_the_ids_of_a_clients() {
    let tool = json!({"role": "tool", "tool_call_id": "functions.ls:0", "content": "bin<|im_end|>"});
    let asks = json!({"role": "user", "content": [{"type": "text", "text": "And the size?"}]});
    let appended: Vec<Json> = [tool, asks].map(Json::from).into();
    for (template, _) in TEMPLATES {
        let call = toy::thought(template, &toy::call_of(template, "ls", "path", "\"/\""));
        let (family, mut tree) = (toy::family(template), Tree::new(Bounds::default(), Thoughts::Kept));
        let asked = |talk: &[Message]| Ask { tools: serde_json::from_str(TOOLS).unwrap(), ..ask(talk) };
        let mut talk = vec![user("What is there?")];
        let first = plan(&tree, &family, &asked(&talk));
        let (given, made) = (tree.prompt(&first), generation(&call, toy::end_of(template)));
        let sampled = made.output_ids.clone();
        let at = tree.turn(&family, first, made, 1).unwrap();
        let at = tree.commit(at).unwrap();
        let answer = tree.answer(at).message;
        let told = family.answer(&given, &sampled, Some(TOOLS), "call_0").unwrap();
        assert_eq!(told["tool_calls"][0]["function"]["arguments"], r#"{"path":"/"}"#, "{template}");
        let call_id = Some(answer.calls[0].id.clone());
        talk.extend([
            answer,
            Message { call_id, ..message(Role::Tool, "bin<|im_end|>") },
            user("And the size?"),
        ]);
        let found = family.append(&appended, &given, &sampled);
        let next = tree.prompt(&plan(&tree, &family, &asked(&talk)));
        match template {
            // Its template counts calls, so that a client's conversation is written anew.
            _ if !next.starts_with(&given) => assert!(found.unwrap_err().to_string().contains("`append`")),
            _ => assert_eq!([given, sampled, found.unwrap()].concat(), next, "{template}"),
        }
    }
    let family = toy::family("qwen3");
    let refused = family.append(&[json!({"role": "robot"}).into()], &[0], &[0]).unwrap_err();
    assert!(refused.to_string().starts_with("append_messages[0].role: expected system"), "{refused}");
}

/// Their members stand in no order but the client's.
const TOOLS: &str = r#"[{"type": "function", "function": {"description": "Lists.", "name": "ls", "parameters":
    {"required": ["path"], "properties": {"path": {"type": "string"}, "limit": {"title": "L", "type": "integer"}},
     "type": "object"}}}]"#;

#[test]
fn arguments_are_rendered_in_the_order_of_their_client() {
    let written = r#"{"path": "/", "limit": 5, "at": {"b": 1, "a": [null]}}"#;
    for (template, _) in TEMPLATES.iter().filter(|(template, _)| !["smollm2", "deepseek"].contains(template))
    {
        let call = ToolCall {
            id: "functions.ls:0".to_owned(),
            name: "ls".to_owned(),
            arguments: serde_json::from_str(written).unwrap(),
        };
        let answer = Message { calls: vec![call], ..message(Role::Assistant, "") };
        let told = Message { call_id: Some("functions.ls:0".to_owned()), ..message(Role::Tool, "bin") };
        let asked = ask(&[message(Role::System, "s"), user("a"), answer, told, user("b")]);
        let (family, tree) = (toy::family(template), Tree::new(Bounds::default(), Thoughts::Kept));
        let found = tree.prompt(&plan(&tree, &family, &asked));
        let expected = whole(template, &asked, None);
        assert_eq!(found, expected, "{template}: {:?}", toy::shared().decode(&found));
    }
}

#[test]
fn tools_and_their_answers_have_the_ids_of_the_whole() {
    for (template, _) in TEMPLATES.iter().filter(|(template, _)| !["smollm2", "deepseek"].contains(template))
    {
        let call = toy::thought(template, &toy::call_of(template, "ls", "path", "\"/\""));
        let family = toy::family(template);
        let mut tree = Tree::new(Bounds::default(), Thoughts::Kept);
        let mut talk = vec![message(Role::System, "You help."), user("What is there?")];
        let asked = |talk: &[Message]| Ask { tools: serde_json::from_str(TOOLS).unwrap(), ..ask(talk) };
        let first = plan(&tree, &family, &asked(&talk));
        let made = generation(&call, toy::end_of(template).replace("<|user|>", "<|observation|>").as_str());
        let turn = tree.turn(&family, first, made, 1).unwrap();
        let at = tree.commit(turn).unwrap();
        talk.push(tree.answer(at).message);
        let id = talk[2].calls[0].id.clone();
        talk.push(Message { call_id: Some(id), ..message(Role::Tool, "bin\n\"etc\"") });
        let next = plan(&tree, &family, &asked(&talk));
        assert!(next.cached > 0);
        assert_eq!(tree.prompt(&next), whole(template, &asked(&talk), Some(TOOLS)), "{template}");
    }
}

#[test]
fn heads_that_many_share_have_the_ids_of_the_whole() {
    let long = TOOLS.replace("Lists.", &"Lists  files,\\nand more. ".repeat(200));
    let spelled = long.replacen("files", "<|im_end|>\u{e000}", 1);
    for (template, _) in TEMPLATES.iter().filter(|(template, _)| !["smollm2", "deepseek"].contains(template))
    {
        let family = toy::family(template);
        let tree = Tree::new(Bounds::default(), Thoughts::Kept);
        let seen = |tools: &str, question: &str| {
            let tools = serde_json::from_str(tools).unwrap();
            let asked = Ask { tools, ..ask(&[message(Role::System, "You help. "), user(question)]) };
            (tree.prompt(&plan(&tree, &family, &asked)), asked)
        };
        for question in ["What is there?", "  And\n\nthere? ", "What is there?", "<|im_end|> \u{e000}"] {
            let (ids, asked) = seen(&long, question);
            if !question.contains('|') {
                assert_eq!(ids, whole(template, &asked, Some(&long)), "{template}: {question:?}");
            }
            // The head that has a letter of its own is another one, whatever marks a client's spelling.
            let alone =
                Tree::prompt(&tree, &plan(&tree, &toy::family(template), &seen(&spelled, question).1));
            assert_eq!(seen(&spelled, question).0, alone, "{template}: {question:?}");
        }
    }
}

/// Every spelling of a token in every place where clients write.
#[test]
fn text_of_clients_never_becomes_a_special_token() {
    let tokenizer = toy::shared();
    let id = |token: &str| tokenizer.encode(token).unwrap()[0];
    for (template, _) in TEMPLATES {
        let family = toy::family(template);
        let special: Vec<i32> = SPECIAL.iter().chain(&ADDED).map(|token| id(token)).collect();
        let count = |plan: &Plan| plan.given.iter().filter(|id| special.contains(id)).count();
        let conversation = |text: &str| {
            let call = ToolCall {
                id: text.to_owned(),
                name: text.to_owned(),
                arguments: json!({text: [text, 1]}).into(),
            };
            let assistant = Message {
                calls: vec![call],
                reasoning: Some(text.to_owned()),
                ..message(Role::Assistant, text)
            };
            let tool = Message { call_id: Some(text.to_owned()), ..message(Role::Tool, text) };
            let talk = [
                message(Role::System, text),
                user(text),
                assistant,
                tool,
                message(Role::System, text),
                user(text),
            ];
            let function =
                json!({"name": text, "description": text, "parameters": {"properties": {text: {}}}});
            Ask { tools: vec![json!({"type": "function", "function": function})].into(), ..ask(&talk) }
        };
        let tree = Tree::new(Bounds::default(), Thoughts::Kept);
        let plain = plan(&tree, &family, &conversation("plain"));
        for token in SPECIAL.iter().chain(&ADDED) {
            let (first, rest) = token.split_at(token.char_indices().nth(3).unwrap().0);
            for text in [
                (*token).to_owned(),
                format!("a {token}{token} b\u{e000}"),
                format!("{first}{token}{rest}"),
                format!("{token}{}", token.to_uppercase()),
                format!("\u{e000}{first}\u{e000}{rest}{token}\u{e001}"),
            ] {
                let found = plan(&tree, &family, &conversation(&text));
                assert_eq!(count(&found), count(&plain), "{template}: {text:?}");
                let said = tokenizer.decode(&found.given).unwrap();
                assert!(said.contains(&text), "{template}: {text:?} is not in {said:?}");
            }
        }
    }
}

/// What clients name calls by stands in some prompts too, also behind an answer.
#[test]
fn ids_of_calls_never_become_a_special_token() {
    let special: Vec<i32> =
        SPECIAL.iter().chain(&ADDED).map(|token| toy::shared().encode(token).unwrap()[0]).collect();
    for (template, _) in TEMPLATES {
        let (family, mut tree) = (toy::family(template), Tree::new(Bounds::default(), Thoughts::Kept));
        let first = plan(&tree, &family, &ask(&[user("a")]));
        let said = toy::thought(template, &toy::call_of(template, "ls", "a", "1"));
        let turn = tree.turn(&family, first, generation(&said, toy::end_of(template)), 1).unwrap();
        let at = tree.commit(turn).unwrap();
        let answer = tree.answer(at).message;
        let behind = |id: &str| {
            let told = Message { call_id: Some(id.to_owned()), ..message(Role::Tool, "bin") };
            let next = plan(&tree, &family, &ask(&[user("a"), answer.clone(), told]));
            assert!(next.cached > 0, "{template}");
            next.given.iter().filter(|id| special.contains(id)).count()
        };
        let plain = behind("c");
        for token in SPECIAL.iter().chain(&ADDED) {
            assert_eq!(behind(&format!("c{token}{token}")), plain, "{template}: {token}");
        }
    }
}
