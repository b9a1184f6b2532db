//! Which templates are of a family, and what is done where one takes less than others.

use driftless_agent::Family;
use driftless_agent::chat::ChatTemplate;
use driftless_agent::message::{Message, Role};
use driftless_agent::session::{Bounds, Thoughts, Tree};

use crate::parity::plan;
use crate::toy::{TEMPLATES, ask, family, generation, message, tokenizer, user};

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
