//! Checkpoints' templates against `transformers`, and what is read and put behind answers against `renderers`. The lane
//! `rewards` has both.

use std::process::Command;

use driftless_agent::Family;
use driftless_agent::chat::ChatTemplate;
use driftless_agent::message::{Ask, Json, Message, Role};
use driftless_agent::session::{Bounds, Plan, Thoughts, Tree};
use serde::Deserialize;

use crate::parity::plan;
use crate::toy::{ask, generated, shared, tokenizer, tokenizer_json, user};

/// A checkpoint's template, with what the packages make of it.
#[derive(Deserialize)]
struct Checkpoint {
    name: String,
    template: String,
    bos: String,
    tools: Vec<Json>,
    wholes: Vec<Whole>,
    turns: Vec<Turn>,
    without: Option<Without>,
}

#[derive(Deserialize)]
struct Whole {
    messages: Vec<Message>,
    tools: Vec<Json>,
    ids: Vec<i32>,
}

/// An answer to `a`, and what is put behind it.
#[derive(Deserialize)]
struct Turn {
    sampled: Vec<i32>,
    messages: Vec<Message>,
    ids: Vec<i32>,
    heard: Option<Heard>,
}

/// An answer with thoughts to `a`, and the whole behind the question `b`, which has none.
#[derive(Deserialize)]
struct Without {
    sampled: Vec<i32>,
    ids: Vec<i32>,
}

#[derive(Deserialize, Debug, PartialEq)]
struct Heard {
    content: String,
    reasoning: Option<String>,
    calls: Vec<(String, Json)>,
}

fn checkpoints() -> Vec<Checkpoint> {
    let Ok(python) = std::env::var("DRIFTLESS_FAMILIES_PYTHON") else { return Vec::new() };
    let templates = std::env::var("DRIFTLESS_FAMILIES_TEMPLATES").unwrap();
    let home = tempfile::tempdir().unwrap();
    let tokenizer = home.path().join("tokenizer.json");
    std::fs::write(&tokenizer, tokenizer_json()).unwrap();
    let here = concat!(env!("CARGO_MANIFEST_DIR"), "/tests");
    let mut oracle = Command::new(python);
    oracle.arg(format!("{here}/families.py")).arg(&tokenizer).arg(templates).arg(format!("{here}/templates"));
    let told = oracle.stderr(std::process::Stdio::inherit()).output().unwrap();
    assert!(told.status.success(), "{}", told.status);
    let lines = String::from_utf8(told.stdout).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Text with its tokens apart, for people who read a failure.
fn apart(ids: &[i32]) -> String {
    ids.iter().map(|id| shared().token(*id).unwrap_or_default()).collect::<Vec<_>>().join("·")
}

/// What is wrong with ids, if anything is.
fn differ(of: &str, found: &[i32], expected: &[i32]) -> Option<String> {
    let (found, expected) = (found != expected).then(|| (apart(found), apart(expected)))?;
    Some(format!("{of}\n  found    {found}\n  expected {expected}"))
}

fn whole(family: &Family, case: &Whole) -> Option<String> {
    let tree = Tree::new(Bounds::default(), Thoughts::Kept);
    let asked = Ask { tools: case.tools.clone().into(), ..ask(&case.messages) };
    let found = tree.prompt(&plan(&tree, family, &asked));
    differ(&format!("{:?}", case.messages), &found, &case.ids)
}

/// Spaces around the text of an answer are told to clients, and `renderers` leaves them out.
fn heard(answer: &Message) -> Heard {
    let calls = answer.calls.iter().map(|call| (call.name.clone(), call.arguments.clone())).collect();
    Heard { content: answer.content.trim().to_owned(), reasoning: answer.reasoning.clone(), calls }
}

/// What is told of an answer to `a`, and the prompt behind it and what `next` makes of it.
fn answered(
    family: &Family,
    thoughts: Thoughts,
    tools: &[Json],
    sampled: &[i32],
    next: impl FnOnce(&Message) -> Vec<Message>,
) -> (Message, Plan, Vec<i32>) {
    let mut tree = Tree::new(Bounds::default(), thoughts);
    let asked = |talk: &[Message]| Ask { tools: tools.to_vec().into(), ..ask(talk) };
    let first = plan(&tree, family, &asked(&[user("a")]));
    let made = tree.turn(family, first, generated(sampled.to_vec()), 1).unwrap();
    let at = tree.commit(made).unwrap();
    let answer = tree.answer(at).message;
    let talk = [vec![user("a"), answer.clone()], next(&answer)].concat();
    let next = plan(&tree, family, &asked(&talk));
    let prompt = tree.prompt(&next);
    (answer, next, prompt)
}

fn turn(family: &Family, tools: &[Json], case: &Turn) -> Vec<String> {
    let next = |answer: &Message| {
        let mut ids = answer.calls.iter().map(|call| call.id.clone());
        let messages = case.messages.iter().cloned();
        let told = |message: Message| match message.role {
            Role::Tool => Message { call_id: ids.next(), ..message },
            _ => message,
        };
        messages.map(told).collect()
    };
    let (answer, next, prompt) = answered(family, Thoughts::Kept, tools, &case.sampled, next);
    let (said, found) = (apart(&case.sampled), heard(&answer));
    let expected = case.heard.as_ref().filter(|expected| **expected != found);
    let misheard = expected.map(|expected| format!("{said}\n  found    {found:?}\n  expected {expected:?}"));
    let anew = (next.cached == 0).then(|| format!("{said}: rendered anew"));
    misheard.into_iter().chain(anew).chain(differ(&said, &prompt, &case.ids)).collect()
}

fn without(family: &Family, tools: &[Json], case: &Without) -> Option<String> {
    let next = |_: &Message| vec![user("b")];
    let (_, _, prompt) = answered(family, Thoughts::Stripped, tools, &case.sampled, next);
    differ("without thoughts", &prompt, &case.ids)
}

#[test]
fn families_have_the_ids_of_transformers_and_of_renderers() {
    let mut wrong = Vec::new();
    for checkpoint in checkpoints() {
        let Checkpoint { name, template, bos, tools, wholes, turns, without: stripped } = checkpoint;
        let template = ChatTemplate::from_source(&template, &[("bos_token", &bos)]);
        let family = Family::new(template.unwrap(), tokenizer()).unwrap();
        let found = wholes.iter().filter_map(|case| whole(&family, case));
        let found = found.chain(turns.iter().flat_map(|case| turn(&family, &tools, case)));
        let found = found.chain(stripped.iter().filter_map(|case| without(&family, &tools, case)));
        wrong.extend(found.map(|wrong| format!("{name}: {wrong}")));
        println!("{name}: {} conversations, {} answers", wholes.len(), turns.len());
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n"));
}
