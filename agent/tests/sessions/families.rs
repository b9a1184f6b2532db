//! Which templates are of a family, and what is done where one takes less than others.

use driftless_agent::Family;
use driftless_agent::chat::ChatTemplate;
use driftless_agent::message::{Ask, Message, Role};
use driftless_agent::session::{Bounds, Thoughts, Tree};

use crate::parity::plan;
use crate::toy::{TEMPLATES, ask, family, generation, message, shared, tokenizer, tokenizer_json, user};

fn of(source: &str) -> driftless_agent::Result<Family> {
    Family::new(ChatTemplate::from_source(source, &[]).unwrap(), tokenizer())
}

#[test]
fn templates_have_a_family_or_are_refused_by_name() {
    let names: Vec<_> = TEMPLATES.iter().map(|(template, _)| family(template).name()).collect();
    let chatml = "ChatML (Qwen3, SmolLM2)";
    let others = ["Llama 3", "Qwen3.5", "DeepSeek V3", "GLM-4.5", "Kimi K2", "MiniMax M2"];
    assert_eq!(names, [&[chatml, chatml], &others[..]].concat());
    let refused = of("{% for m in messages %}[INST] {{ m.content }}{% endfor %}").unwrap_err().to_string();
    assert!(refused.contains("Qwen3.5, ChatML (Qwen3, SmolLM2), Llama 3, DeepSeek V3"), "{refused}");
}

const STRICT: &str = "{% for m in messages %}\
    {% if m.role == 'system' and not loop.first %}{{ raise_exception('a system message is first') }}{% endif %}\
    {{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
/// It counts messages, so that one looks otherwise behind others.
const COUNTS: &str = "{% for m in messages %}\
    {{ '<|im_start|>' ~ m.role ~ ' ' ~ loop.index ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Prompts of a question, and of more behind its answer, with the tokens of the second that were there before.
fn two_turns(family: &Family, first: &[Message], more: &[Message]) -> (String, u64) {
    let mut tree = Tree::new(Bounds::default(), Thoughts::Kept);
    let asked = ask(first);
    let turn = tree.turn(family, plan(&tree, family, &asked), generation("Yes.", "<|im_end|>"), 1);
    let at = tree.commit(turn.unwrap()).unwrap();
    let talk = [first, &[tree.answer(at).message], more].concat();
    let plan = plan(&tree, family, &ask(&talk));
    (tokenizer().decode(&tree.prompt(&plan)).unwrap(), plan.cached)
}

#[test]
fn a_system_message_in_the_middle_is_a_users_where_need_be() {
    let family = of(STRICT).unwrap();
    let system = |text: &str| message(Role::System, text);
    let first = [system("a"), user("b"), system("c")];
    let (read, cached) = two_turns(&family, &first, &[system("d"), user("e")]);
    assert_eq!(read, "system\na\nuser\nb\nuser\nc\nassistant\nYes.\nuser\nd\nuser\ne\nassistant\n");
    assert!(cached > 0);
}

#[test]
fn templates_without_suffixes_begin_anew() {
    let (read, cached) = two_turns(&of(COUNTS).unwrap(), &[user("a")], &[user("b")]);
    assert_eq!((read.as_str(), cached), ("user 1\na\nassistant 2\nYes.\nuser 3\nb\nassistant\n", 0));
}

#[test]
fn answers_that_were_cut_get_their_end_and_that_of_thoughts() {
    let glm = "b<|assistant|></think>";
    for (template, said, expected) in [
        (
            "qwen35",
            "hm",
            "hm</think><|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
        (
            "qwen35",
            "hm</think>Yes",
            "</think>Yes<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
        (
            "kimi",
            "hm",
            "hm</think><|im_end|><|im_user|>user<|im_middle|>b<|im_end|><|im_assistant|>assistant<|im_middle|><think>",
        ),
        ("deepseek", "Yes", "Yes<｜end▁of▁sentence｜><｜User｜>b<｜Assistant｜>"),
        ("glm", "Yes", &format!("Yes<|endoftext|><|user|>{glm}")),
        ("glm", "Yes<|endoftext|>", &format!("Yes<|endoftext|><|user|>{glm}")),
        ("glm", "Yes<|user|>", &format!("Yes<|user|>{glm}")),
        ("glm", "Yes<|observation|>", &format!("Yes<|observation|><|user|>{glm}")),
    ] {
        let (family, mut tree) = (family(template), Tree::new(Bounds::default(), Thoughts::Kept));
        let first = plan(&tree, &family, &ask(&[user("a")]));
        let turn = tree.turn(&family, first, generation(said, ""), 1).unwrap();
        let at = tree.commit(turn).unwrap();
        let next = plan(&tree, &family, &ask(&[user("a"), tree.answer(at).message, user("b")]));
        let prompt = tree.prompt(&next);
        assert!(prompt.ends_with(&shared().encode(expected).unwrap()), "{template}: {said}");
    }
}

#[test]
fn answers_within_thoughts_that_the_template_began_are_thoughts() {
    for template in ["qwen35", "kimi", "minimax"] {
        let (family, tree) = (family(template), Tree::new(Bounds::default(), Thoughts::Kept));
        let first = plan(&tree, &family, &ask(&[user("a")]));
        let answer = tree.turn(&family, first, generation("hm", ""), 1).unwrap().answer;
        assert_eq!((answer.reasoning.as_deref(), answer.content.as_str()), (Some("hm"), ""), "{template}");
    }
}

#[test]
fn tokens_of_thoughts_are_counted() {
    for (template, said, thoughts) in [
        ("qwen3", "<think>\nhm\n</think>\n\nYes<|im_end|>", "<think>\nhm\n</think>"),
        ("qwen3", "Yes<|im_end|>", ""),
        ("qwen35", "hm</think>Yes<|im_end|>", "hm</think>"),
        ("qwen35", "hm<|im_end|>", "hm"),
        ("kimi", "hm", "hm"),
    ] {
        let (family, mut tree) = (family(template), Tree::new(Bounds::default(), Thoughts::Kept));
        let first = plan(&tree, &family, &ask(&[user("a")]));
        let turn = tree.turn(&family, first, generation(said, ""), 1).unwrap();
        let at = tree.commit(turn).unwrap();
        let expected = shared().encode(thoughts).unwrap().len() as u64;
        assert_eq!(tree.answer(at).reasoning_tokens, expected, "{template}: {said}");
    }
}

#[test]
fn tools_are_told_by_the_system_where_the_template_has_no_words() {
    let (family, tree) = (family("deepseek"), Tree::new(Bounds::default(), Thoughts::Kept));
    let tool = serde_json::json!({"type": "function", "function": {"name": "ls"}});
    let asked = Ask { tools: vec![tool].into(), ..ask(&[message(Role::System, "s"), user("a")]) };
    let read = shared().decode(&tree.prompt(&plan(&tree, &family, &asked))).unwrap();
    let example = "<｜tool▁call▁begin｜>…<｜tool▁sep｜>{\"…\":\"…\"}<｜tool▁call▁end｜>";
    assert!(read.starts_with("s\n\nYou may call functions.") && read.contains(example), "{read}");
}

#[test]
fn variables_of_the_template_are_those_that_were_asked_for() {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("tokenizer.json"), tokenizer_json()).unwrap();
    let source = format!("{STRICT}{{% if short %}}{{{{ '(' ~ short ~ ')' }}}}{{% endif %}}");
    std::fs::write(home.path().join("chat_template.jinja"), source).unwrap();
    let prompt = |variables| {
        let (family, tree) =
            (Family::open_with(home.path(), variables), Tree::new(Bounds::default(), Thoughts::Kept));
        let family = family.map_err(|error| error.to_string())?;
        Ok::<_, String>(tree.prompt(&plan(&tree, &family, &ask(&[user("a")]))))
    };
    let [with, without] = [None, Some(r#"{"short": 5}"#)].map(|given| prompt(given).unwrap());
    let behind = shared().encode("(5)").unwrap();
    assert_eq!(without, [with, behind].concat());
    assert!(prompt(Some("[1]")).unwrap_err().contains("a JSON object, found `[1]`"));
}

/// It counts calls, as some copies of Kimi K2's template do: what a tool told is named by its place among all.
const COUNTS_CALLS: &str = "{% set ns = namespace(names=[], at=0) %}{% for m in messages %}\
    {{ '<|im_' ~ m.role ~ '|>' ~ m.role ~ '<|im_middle|>' }}{% for call in m.tool_calls or [] %}\
    {% set ns.names = ns.names + [call.function.name ~ ':' ~ ns.names | length] %}{% endfor %}\
    {% if m.role == 'tool' %}{{ ns.names[ns.at] }}{% set ns.at = ns.at + 1 %}{% endif %}\
    {{ m.content ~ '<|im_end|>' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}";

#[test]
fn templates_that_count_calls_begin_anew() {
    let template = ChatTemplate::from_source(COUNTS_CALLS, &[]).unwrap();
    let family = Family::new(template, tokenizer()).unwrap();
    let (_, cached) = two_turns(&family, &[user("a")], &[user("b")]);
    assert_eq!((family.name(), cached), ("Kimi K2", 0));
}
