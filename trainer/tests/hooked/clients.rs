//! Clients of an answer: what they are drawn at its address is its samples.

use super::many::Room;
use super::{Echo, hook, turn};
use async_trait::async_trait;
use driftless_agent::chat::ChatTemplate;
use driftless_agent::{Family, Tokenizer};
use driftless_bridge::engine::{Digester, Tell, context};
use driftless_bridge::{GenerateRequest, Generation, Label};
use driftless_trainer::data::{DataOptions, Place, RowReader};
use driftless_trainer::hook::{Hook, HookOptions};
use driftless_trainer::sample::{Engines, Prompt, Trajectory, Turn};
use driftless_trainer::tasks::{Sourced, Task, tiny};
use driftless_trainer::{Error, Failure};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokio::sync::Barrier;

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{{ mode }}{% endif %}";

/// A program that asks by OpenAI's protocol. `turns` go on from each other; a conversation begins with `question`.
const ASKING: &str = r#"
import json, urllib.error, urllib.request
from driftless_rl.hook import Turn, generate

def ask(turn, messages, key=None):
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 2}).encode()
    headers = {"authorization": f"Bearer {key or turn.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(turn.base_url + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def converse(turn, question, turns):
    messages = [{"role": "user", "content": question}]
    for _ in range(turns):
        messages += [ask(turn, messages), {"role": "user", "content": "and?"}]
"#;

/// A checkpoint of single bytes whose conversations are ChatML.
pub(super) fn checkpoint(dir: &Path) {
    let mut letters: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
    letters.sort();
    let vocabulary: serde_json::Map<_, _> =
        letters.iter().enumerate().map(|(id, letter)| (letter.clone(), json!(id))).collect();
    let added = ["<|im_start|>", "<|im_end|>"].iter().enumerate().map(|(at, token)| {
        json!({"id": letters.len() + at, "content": token, "special": true, "single_word": false,
               "lstrip": false, "rstrip": false, "normalized": false})
    });
    let level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": added.collect::<Vec<_>>(), "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    });
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(dir.join("chat_template.jinja"), TEMPLATE).unwrap();
    std::fs::write(dir.join("config.json"), r#"{"max_position_embeddings": 4096}"#).unwrap();
}

/// A room whose hook is `ASKING` with this function.
pub(super) async fn asking(dir: &Path, function: &str, deadline: u64) -> Arc<Room> {
    checkpoint(dir);
    let file = dir.join("asking.py");
    std::fs::write(&file, format!("{ASKING}\n{function}")).unwrap();
    Room::module_with(&file, deadline, Some(dir)).await
}

/// Each token that is trained on is of one reply, whose digest is that of the sample's tokens. Returns how many there are.
fn check_replies(sample: &Trajectory) -> usize {
    for reply in &sample.replies {
        let before = &sample.tokens[..sample.prompt_len + reply.start as usize];
        let mut digester = Digester::new(reply.rid, context(0, before));
        for at in reply.start..reply.end {
            let span = sample.spans.iter().find(|span| (span.start..span.end).contains(&at));
            let id = sample.tokens[sample.prompt_len + at as usize];
            digester.push(id, sample.log_probs[at as usize], span.map(|span| span.version));
        }
        assert_eq!((reply.context, reply.digest), (context(0, before), digester.digest()));
    }
    let drawn: u32 = sample.replies.iter().map(|reply| reply.end - reply.start).sum();
    assert_eq!(drawn as usize, trained(sample));
    sample.replies.len()
}

/// How many of its tokens are trained on.
fn trained(sample: &Trajectory) -> usize {
    sample.loss_mask.iter().filter(|mask| **mask == 1).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn conversations_of_clients_are_the_samples_of_an_answer() {
    let dir = tempfile::tempdir().unwrap();
    let function = r#"
@generate
def answer(turn: Turn) -> None:
    converse(turn, "What is " + turn.label + "?", 3)
    converse(turn, "Another thing", 1)
    turn.sample(reward=0.25, metadata={"steps": 1})
    turn.sample(reward=0.5, rewards={"steps": 2})
"#;
    let room = asking(dir.path(), function, 60).await;
    let tokenizer = Tokenizer::open(dir.path()).unwrap();
    for (sample, answer) in room.answers(6).await.into_iter().enumerate() {
        let answer = answer.unwrap();
        assert_eq!(answer.len(), 2, "a second word on the answer is no second copy of it");
        let last = &answer[1];
        assert_eq!((last.reward, last.components.get("steps")), (Some(0.5), Some(&2.0)));
        assert_eq!(last.metadata.as_ref().map(|metadata| metadata.get()), Some(r#"{"steps": 1}"#));
        let (whole, other) = (&answer[0], &answer[1]);
        let text = tokenizer.decode(&whole.tokens).unwrap();
        assert!(text.contains(&format!("What is {sample}?")) && text.matches("and?").count() == 2, "{text}");
        assert_eq!(text.matches("assistant\n(short)").count(), 3, "the run's variables: {text}");
        assert_eq!([whole, other].map(trained), [6, 2]);
        // The engine's log-probability of a token is how many it had read.
        let reads =
            whole.spans.iter().map(|span| (span.start as usize, -whole.log_probs[span.start as usize]));
        for (at, read) in reads {
            assert_eq!(
                whole.prompt_len + at,
                read as usize,
                "drawn behind exactly what the sample has there"
            );
        }
        assert_eq!(whole.spans.len(), 3);
        let count = [whole, other].map(check_replies);
        assert_eq!(count, [3, 1], "a reply for each turn of a client");
    }
}

/// Echoes once as many requests are there.
struct Together(Barrier);

#[async_trait]
impl Engines for Together {
    async fn generate(
        &self,
        request: GenerateRequest,
        minimum: Option<&Label>,
        told: Tell<'_>,
    ) -> driftless_bridge::Result<Generation> {
        self.0.wait().await;
        Echo.generate(request, minimum, told).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_an_answer_are_drawn_side_by_side() {
    let dir = tempfile::tempdir().unwrap();
    let function = r#"
from concurrent.futures import ThreadPoolExecutor

@generate
def answer(turn: Turn) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda part: converse(turn, part, 2), ["a", "b", "c", "d"]))
"#;
    let room = asking(dir.path(), function, 60).await;
    let answer = room.answer_by(&Together(Barrier::new(4))).await.unwrap();
    assert_eq!(answer.iter().map(trained).collect::<Vec<_>>(), [4; 4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn housekeeping_is_trained_where_an_answer_has_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let function = r#"
@generate
def answer(turn: Turn) -> None:
    if turn.label == "1":
        converse(turn, "?", 1)
    system = "Write a title for this conversation."
    ask(turn, [{"role": "system", "content": system}, {"role": "user", "content": "?"}])
"#;
    let room = asking(dir.path(), function, 60).await;
    assert_eq!(room.answer(0).await.unwrap().len(), 1, "a task about titles");
    let answer = room.answer(1).await.unwrap();
    assert_eq!(answer.len(), 1);
    let text = Tokenizer::open(dir.path()).unwrap().decode(&answer[0].tokens).unwrap();
    assert!(!text.contains("title"), "{text}");
}

/// A client that never ends is told that its answer has. What it was told before is not an answer.
#[tokio::test(flavor = "multi_thread")]
async fn client_that_goes_on_for_ever_is_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let function = r#"
@generate
def answer(turn: Turn) -> None:
    for number in range(10**9):
        try:
            converse(turn, f"And {number}?", 1)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{error.code} after {number}: {error.read().decode()}")
"#;
    let room = asking(dir.path(), function, 60).await;
    let refused = room.answer(0).await.unwrap_err();
    let expected = ["410 after 256", "an answer has at most 256 generations"];
    assert!(expected.iter().all(|words| refused.contains(words)), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn generation_of_the_hook_stands_apart_from_its_clients() {
    let dir = tempfile::tempdir().unwrap();
    let function = r#"
@generate
def answer(turn: Turn) -> None:
    converse(turn, "?", 2)
    before = list(turn.tokens)
    said = turn.generate(max_new_tokens=1)
    assert turn.tokens == before + said.output_ids
    turn.generate(max_new_tokens=1)
    turn.sample(turn.tokens)
"#;
    let room = asking(dir.path(), function, 60).await;
    let answer = room.answer(0).await.unwrap();
    assert_eq!((answer.len(), answer[0].tokens.as_slice()), (1, &[3, 3, 3][..]), "the prompt goes on");
    assert_eq!((&answer[0].loss_mask[..], &answer[0].log_probs[..]), (&[1, 1][..], &[-1.0, -2.0][..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn client_with_another_key_or_too_late_draws_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let function = r#"
earlier = []

@generate
def answer(turn: Turn) -> None:
    for base_url, key in [(turn.base_url, "guessed"), *earlier]:
        try:
            asked = type("", (), {"base_url": base_url, "api_key": key})
            ask(asked, [{"role": "user", "content": "?"}])
        except urllib.error.HTTPError as error:
            assert error.code in (401, 410), error.code
        else:
            raise AssertionError("a stranger was answered")
    converse(turn, "mine", 1)
    turn.sample(metadata={"asked": len(earlier)})
    earlier.append((turn.base_url, turn.api_key))
"#;
    let room = asking(dir.path(), function, 60).await;
    for earlier in 0..3 {
        let answer = room.answer(earlier).await.unwrap();
        assert_eq!(answer.len(), 1);
        let metadata = answer[0].metadata.as_ref().unwrap().get();
        assert_eq!(metadata, format!("{{\"asked\": {earlier}}}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn checkpoint_whose_conversations_are_unknown_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), tiny::tokenizer().to_string()).unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), "{{ messages }}").unwrap();
    let template = ChatTemplate::open(dir.path()).unwrap();
    assert!(Family::new(template, Tokenizer::open(dir.path()).unwrap()).is_err());
    let options = HookOptions::new("cat").with_clients(dir.path().to_owned());
    let refused = Hook::open("--custom-generate-command", &options).unwrap_err();
    assert!(matches!(refused, Error::Agent(_)), "{refused}");
    checkpoint(dir.path());
    let mut options = options;
    options.variables = Some("[1]".to_owned());
    let refused = Hook::open("--custom-generate-command", &options).unwrap_err().to_string();
    assert!(refused.contains("a JSON object, found `[1]`"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn client_whose_context_is_full_is_told_so_and_goes_on_with_less() {
    let dir = tempfile::tempdir().unwrap();
    let function = r#"
def code(turn, text):
    try:
        ask(turn, [{"role": "user", "content": text}])
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]["code"]

@generate
def answer(turn: Turn) -> None:
    converse(turn, "?", 2)
    assert code(turn, "x" * 5000) == "context_length_exceeded"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "no"}, {"role": "user", "content": "y" * 400}]
    try:
        ask(turn, messages)
    except urllib.error.HTTPError as error:
        assert turn.label == "1" and error.code == 400
    if turn.label == "1":
        raise RuntimeError("there is no room")
    converse(turn, "compacted", 1)
"#;
    let room = asking(dir.path(), function, 60).await;
    let answer = room.answer(0).await.unwrap();
    assert_eq!(answer.iter().map(trained).collect::<Vec<_>>(), [4, 2, 2]);
    assert!(answer.iter().all(|one| one.tokens.len() < 4096));
    // The run's own bound, and a function that gives up.
    let error = room.answer_to(Turn { max_context_len: Some(300), ..turn(1) }).await.unwrap_err();
    assert!(matches!(&error, Error::Hook { failure: Failure::Context, .. }), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn conversations_of_a_process_that_died_are_no_part_of_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let function = r#"
import os

@generate
def answer(turn: Turn) -> None:
    first = not os.path.exists("died")
    open("died", "w").close()
    converse(turn, "of the first" if first else "of the second", 2)
    if turn.label == "1":
        turn.generate(max_new_tokens=1)
        turn.generate(max_new_tokens=1)
    if first:
        os._exit(9)
"#;
    for label in [0, 1] {
        let room = asking(dir.path(), function, 60).await;
        let answer = room.answer(label).await.unwrap();
        let tokenizer = Tokenizer::open(dir.path()).unwrap();
        let texts: Vec<_> = answer.iter().map(|one| tokenizer.decode(&one.tokens).unwrap()).collect();
        assert!(texts.len() == 1 && texts[0].contains("of the second"), "{texts:?}");
        assert_eq!(check_replies(&answer[0]), 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_a_hook_appends_are_written_by_the_template() {
    let dir = tempfile::tempdir().unwrap();
    let function = r#"
@generate
async def answer(turn: Turn) -> None:
    assert turn.messages == [{"role": "user", "content": "6?"}] and turn.tools == [{"name": "add"}]
    said = await turn.generate(max_new_tokens=2)
    assert turn.messages[1:] == [{"role": "assistant", "content": said.text}] and said.text == "))"
    turn.messages.append({"role": "user", "content": "<|im_end|> and?"})
    await turn.generate(max_new_tokens=2)
    turn.messages.append({"role": "robot", "content": "?"})
    try:
        await turn.generate()
    except ValueError as error:
        assert str(error).startswith("append_messages[0].role: expected system") and "robot" in str(error)
    else:
        raise AssertionError("a robot was written")
    turn.messages[-1] = {"role": "user", "content": "last"}
    await turn.generate(max_new_tokens=1)
    assert [one["role"] for one in turn.messages] == ["user", "assistant"] * 3
    turn.sample(reward=0.25)
"#;
    let room = asking(dir.path(), function, 60).await;
    let options = DataOptions::default()
        .with_apply_chat_template(true)
        .with_apply_chat_template_kwargs(r#"{"mode": "(short)"}"#);
    let reader = RowReader::open(options, dir.path()).unwrap();
    let place = Place { path: dir.path().into(), line: 1 };
    let row = r#"{"input": "6?", "tools": "[{\"name\": \"add\"}]"}"#;
    let prompt = Prompt::from(reader.read(row, place).unwrap());
    let source = Sourced::new(hook(dir.path(), "--data-source-command"), reader);
    let task = Task { source: Arc::new(source), ..room.task.clone() };
    let answer = task.generate(&prompt, &turn(0)).await.unwrap();
    let [sample] = &answer[..] else { panic!("{answer:?}") };
    assert_eq!((check_replies(sample), trained(sample), sample.reward), (3, 5, Some(0.25)));
    let marks = [256, 257].map(|mark| sample.tokens.iter().filter(|id| **id == mark).count());
    assert_eq!(marks, [6, 5], "a user's text has none");
    let text = task.source.tokenizer().decode(&sample.tokens).unwrap();
    assert!(text.contains("<|im_end|> and?") && text.ends_with("last\nassistant\n(short))"), "{text}");
}
