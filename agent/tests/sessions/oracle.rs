//! Checkpoints' templates against `transformers`, and what is read and put behind answers against `renderers`. The lane
//! `rewards` has both.

use std::process::Command;

use driftless_agent::chat::ChatTemplate;
use driftless_agent::message::{Ask, Message, Role};
use driftless_agent::session::{Bounds, Thoughts, Tree};
use driftless_agent::{Family, Tokenizer};
use serde::Deserialize;
use serde_json::Value;

use crate::parity::plan;
use crate::toy::{ask, generated, tokenizer, tokenizer_json, user};

/// A checkpoint's template, with what the packages make of it.
#[derive(Deserialize)]
struct Checkpoint {
    name: String,
    template: String,
    bos: String,
    wholes: Vec<Whole>,
    turns: Vec<Turn>,
}

#[derive(Deserialize)]
struct Whole {
    messages: Vec<Message>,
    tools: Vec<Value>,
    ids: Vec<i32>,
}

/// An answer to `a`, and what is put behind it.
#[derive(Deserialize)]
struct Turn {
    tools: Vec<Value>,
    sampled: Vec<i32>,
    messages: Vec<Message>,
    ids: Vec<i32>,
    heard: Option<Heard>,
}

#[derive(Deserialize, Debug, PartialEq)]
struct Heard {
    content: String,
    reasoning: Option<String>,
    calls: Vec<(String, Value)>,
}

fn checkpoints() -> Vec<Checkpoint> {
    let Ok(python) = std::env::var("DRIFTLESS_FAMILIES_PYTHON") else { return Vec::new() };
    let templates = std::env::var("DRIFTLESS_FAMILIES_TEMPLATES").expect("a folder of templates");
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

/// Whether the template has no place for a message, so that it is written as another one.
fn is_moved(checkpoint: &Checkpoint, whole: &Whole) -> bool {
    let many = whole.messages.iter().any(|message| message.calls.len() > 1);
    many && checkpoint.name.contains("Llama-3")
}

fn whole(checkpoint: &Checkpoint, family: &Family, whole: &Whole) {
    let tree = Tree::new(Bounds::default(), Thoughts::Kept);
    let asked = Ask { tools: whole.tools.clone(), ..ask(&whole.messages) };
    let found = tree.prompt(&plan(&tree, family, &asked));
    let read = |ids: &[i32]| all(&tokenizer(), ids);
    assert_eq!(read(&found), read(&whole.ids), "{}: {:?}", checkpoint.name, whole.messages);
    assert_eq!(found, whole.ids, "{}: {:?}", checkpoint.name, whole.messages);
}

fn turn(checkpoint: &Checkpoint, family: &Family, turn: &Turn) {
    let read = |ids: &[i32]| all(&tokenizer(), ids);
    let name = format!("{}: {:?}", checkpoint.name, read(&turn.sampled));
    let mut tree = Tree::new(Bounds::default(), Thoughts::Kept);
    let mut talk = vec![user("a")];
    let asked = |talk: &[Message]| Ask { tools: turn.tools.clone(), ..ask(talk) };
    let first = plan(&tree, family, &asked(&talk));
    let made = tree.turn(family, first, generated(turn.sampled.clone()), 1).unwrap();
    let at = tree.commit(made).unwrap();
    let answer = tree.answer(at).message;
    let calls = answer.calls.iter().map(|call| (call.name.clone(), call.arguments.clone())).collect();
    let found = Heard { content: answer.content.clone(), reasoning: answer.reasoning.clone(), calls };
    if let Some(heard) = &turn.heard {
        assert_eq!(&found, heard, "{name}");
    }
    let mut ids = answer.calls.iter().map(|call| call.id.clone());
    talk.push(answer);
    for message in &turn.messages {
        let call_id = if message.role == Role::Tool { ids.next() } else { None };
        talk.push(Message { call_id, ..message.clone() });
    }
    let next = plan(&tree, family, &asked(&talk));
    assert!(next.cached > 0, "{name}");
    assert_eq!(read(&tree.prompt(&next)), read(&turn.ids), "{name}");
    assert_eq!(tree.prompt(&next), turn.ids, "{name}");
}

/// Text with all tokens, for people who read a failure.
fn all(tokenizer: &Tokenizer, ids: &[i32]) -> String {
    let special = |id: &i32| tokenizer.token(*id).filter(|token| token.starts_with(['<', '[', ']']));
    let text = |id: &i32| special(id).map_or_else(|| tokenizer.decode(&[*id]), Ok).unwrap();
    ids.iter().map(text).collect::<Vec<_>>().join("·")
}

#[test]
fn families_have_the_ids_of_transformers_and_of_renderers() {
    for checkpoint in checkpoints() {
        let template = ChatTemplate::from_source(&checkpoint.template, &[("bos_token", &checkpoint.bos)]);
        let family = Family::new(template.unwrap(), tokenizer()).unwrap();
        for case in checkpoint.wholes.iter().filter(|case| !is_moved(&checkpoint, case)) {
            whole(&checkpoint, &family, case);
        }
        checkpoint.turns.iter().for_each(|case| turn(&checkpoint, &family, case));
    }
}
