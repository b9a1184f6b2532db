//! Chat templates: what own templates render to, and that `transformers` renders the same bytes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use driftless_trainer::data::{DataOptions, Dataset, RowReader, Tokenizer};
use driftless_trainer::{ChatTemplate, LossMask};
use std::process::Command;
use std::sync::Arc;

/// Templates with what the templates of models use: each has its own corner of jinja2.
const TEMPLATES: [(&str, &str); 6] = [
    ("chatml", include_str!("templates/chatml.jinja")),
    ("tools", include_str!("templates/tools.jinja")),
    ("thinking", include_str!("templates/thinking.jinja")),
    ("brackets", include_str!("templates/brackets.jinja")),
    ("strict", include_str!("templates/strict.jinja")),
    ("values", include_str!("templates/values.jinja")),
];

const SPECIAL: [(&str, &str); 2] = [("bos_token", "<s>"), ("eos_token", "</s>")];

/// Messages, tools and further variables.
const CHATS: [(&str, Option<&str>, Option<&str>); 5] = [
    (r#"[{"role":"user","content":"What is 7 + 5?"}]"#, None, None),
    (
        r#"[{"role":"system","content":" Be  brief.\n"},{"role":"user","content":"\"Größe\" <b> & 'x' 漢字 🙂\n"},
            {"role":"assistant","content":"<think>\nHm.\n</think>\n\nNo."},{"role":"user","content":"Why?  "}]"#,
        None,
        Some(r#"{"enable_thinking": false}"#),
    ),
    (
        r#"[{"role":"user","content":"Weather?"},
            {"role":"assistant","content":null,"tool_calls":[{"type":"function","id":"a1","function":
              {"name":"weather","arguments":{"city":"Zürich \"old\" <town>","days":3,"exact":true,"limit":null,
               "step":1e-7,"scale":1.0,"large":1e22,"nested":{"b":[1,2.5,[]],"a":{}}}}}]},
            {"role":"tool","content":"{\"t\": 21}"},{"role":"tool","content":"late"},
            {"role":"user","content":"And tomorrow?"}]"#,
        Some(
            r#"[{"type":"function","function":{"name":"weather","description":"It's the weather\u2026","parameters":
                {"type":"object","properties":{"z":{"type":"string"},"a":{"type":"integer","default":-0.5}},"required":["z"]}}}]"#,
        ),
        Some(r#"{"enable_thinking": true, "date_string": "26 Jul 2024"}"#),
    ),
    (
        r#"[{"role":"user","content":[{"type":"text","text":"one "},{"type":"image"},{"type":"text","text":"two"}]},
            {"role":"assistant","content":"x\u0001\u007f\u2028"},{"role":"user","content":""}]"#,
        Some("[]"),
        None,
    ),
    (r#"[{"role":"assistant","content":"first"},{"role":"assistant","content":"again"}]"#, None, None),
];

/// What a template of `source` says to a chat of one message.
fn refusal(source: &str) -> String {
    let template = ChatTemplate::from_source(source, &SPECIAL).unwrap();
    template.render_json(CHATS[0].0, None, None).unwrap_err().to_string()
}

#[test]
fn variable_without_an_end_is_refused_with_the_template() {
    let nested = "{% set ns=namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x=[ns.x] %}{% endfor %}";
    let doubled = "{% set ns=namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x=ns.x+ns.x %}{% endfor %}{{ ns.x|length }}";
    let longer = "{% set ns=namespace(x='x') %}{% for i in range(40) %}{% set ns.x=ns.x~ns.x %}{% endfor %}";
    let spelled = format!("{{% set x=[] %}}{}", "{%- set x = [x] -%}".repeat(6_000));
    for (source, expected) in [
        ("{% set a=namespace() %}{% set a.a=a %}{{ a }}", "namespace"),
        ("{% set a=namespace() %}{% set a.a=[{'b': a}] %}{{ a ~ '%}' }}", "namespace"),
        ("{% set a=namespace() %}{% set (a.a, b)=(a, 1) %}{{ a == [] }}", "namespace"),
        (nested, "128 levels"),
        (&spelled, "128 levels"),
        (doubled, "elements"),
        (longer, "a text of more than 67108864 bytes"),
    ] {
        let words = refusal(source);
        assert!(words.contains("chat template of (text)") && words.contains(expected), "{words}");
    }
}

#[test]
fn variable_that_is_sliced_again_and_again_stays_a_list() {
    let sliced = "{% set ns=namespace(x=[1,2]) %}{% for i in range(90000) %}{% set ns.x=ns.x[:] %}{% endfor %}{{ ns.x }}";
    let template = ChatTemplate::from_source(sliced, &SPECIAL).unwrap();
    assert_eq!(template.render_json(CHATS[0].0, None, None).unwrap(), "[1, 2]");
}

#[test]
fn template_as_deep_as_it_is_long_is_compiled_or_refused() {
    let nots = |count: usize| format!("{{% if {}1 %}}yes{{% endif %}}", "not ".repeat(count));
    for (source, expected) in [
        (nots(30_000), "yes"),
        (format!("{{{{ {}1 }}}}", "-".repeat(120_000)), "1"),
        (format!("{{{{ 1{} }}}}", "+1".repeat(60_000)), "60001"),
        (format!("{{{{ 'x'{} }}}}", "|upper".repeat(20_000)), "X"),
    ] {
        let template = ChatTemplate::from_source(&source, &SPECIAL).unwrap();
        assert_eq!(template.render_json(CHATS[0].0, None, None).unwrap(), expected);
    }
    let words = ChatTemplate::from_source(&nots(100_000), &SPECIAL).unwrap_err().to_string();
    assert!(words.contains("it has 400024 bytes"), "{words}");
}

#[test]
fn value_as_deep_as_its_expression_is_long_is_written() {
    let depth = 14_000;
    let nested = format!("{{{{ [1]{} }}}}", "|batch(1)".repeat(depth - 1));
    let template = ChatTemplate::from_source(&nested, &SPECIAL).unwrap();
    let text = template.render_json(CHATS[0].0, None, None).unwrap();
    assert!(text == format!("{}1{}", "[".repeat(depth), "]".repeat(depth)), "{} bytes", text.len());
}

#[test]
fn template_with_quotes_and_raw_text_is_rendered_as_it_stands() {
    let source = "{# {% set a = 1 %} #}{% raw %}{% set b = 2 %}{% endraw %}{{ '{% set c = 3 %}' }}\
                  {%- set d = '%}' ~ \"'\" -%}{% set e, f = 1, 2 %}{% set g = 'x' if e == 2 %}{% set h %}t{% endset %}\
                  {{ d }}{{ e + f }}{{ g }}{{ h }}";
    let template = ChatTemplate::from_source(source, &SPECIAL).unwrap();
    let text = template.render_json(CHATS[0].0, None, None).unwrap();
    assert_eq!(text, "{% set b = 2 %}{% set c = 3 %}%}'3t");
}

#[test]
fn exception_of_a_template_is_shortened_and_has_no_controls() {
    let words = refusal("{{ raise_exception('\u{1b}[2J' ~ 'x' * 100000) }}");
    assert!(words.len() < 300 && words.contains("xxx") && !words.contains('\u{1b}'), "{words}");
}

/// These, and those of the directory that DRIFTLESS_CHAT_TEMPLATES names: models' own are not ours to distribute.
fn templates() -> Vec<(String, String)> {
    let mut templates: Vec<_> =
        TEMPLATES.iter().map(|(name, source)| ((*name).to_owned(), (*source).to_owned())).collect();
    for entry in
        std::env::var_os("DRIFTLESS_CHAT_TEMPLATES").into_iter().flat_map(std::fs::read_dir).flatten()
    {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "jinja") {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            templates.push((name, std::fs::read_to_string(&path).unwrap()));
        }
    }
    templates
}

/// What each template makes of each chat: a text, or a refusal.
fn rendered(templates: &[(String, String)]) -> Vec<(String, Option<String>)> {
    let render = |(name, source): &(String, String)| -> Vec<_> {
        let template =
            ChatTemplate::from_source(source, &SPECIAL).unwrap_or_else(|error| panic!("{name}: {error}"));
        let chats = CHATS.iter().enumerate();
        chats
            .map(|(number, (messages, tools, variables))| {
                (format!("{name} {number}"), template.render_json(messages, *tools, *variables).ok())
            })
            .collect()
    };
    templates.iter().flat_map(render).collect()
}

#[test]
fn chatml_of_a_question_is_the_question_between_its_marks() {
    let template = ChatTemplate::from_source(TEMPLATES[0].1, &SPECIAL).unwrap();
    let text = template.render_json(CHATS[0].0, None, None).unwrap();
    assert_eq!(text, "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n");
}

#[test]
fn template_error_is_told_with_its_place() {
    let template = ChatTemplate::from_source(TEMPLATES[4].1, &SPECIAL).unwrap();
    let words = template.render_json(CHATS[4].0, None, None).unwrap_err().to_string();
    assert!(words.contains("roles must alternate") && words.contains("line"), "{words}");
}

#[test]
fn line_ends_of_windows_and_of_old_macs_are_those_of_jinja() {
    let template = ChatTemplate::from_source("{% if true %}\r\na\rb\r\n{% endif %}", &SPECIAL).unwrap();
    assert_eq!(template.render_json("[]", None, None).unwrap(), "a\nb\n");
}

#[test]
fn a_template_that_does_not_end_is_stopped() {
    let loops = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
    let template = ChatTemplate::from_source(loops, &SPECIAL).unwrap();
    let words = template.render_json("[]", None, None).unwrap_err().to_string();
    assert!(words.contains("more than 50000000 instructions"), "{words}");
}

#[test]
fn render_text_longer_than_its_bound_is_stopped() {
    for source in [
        "{% for a in range(100) %}{{ 'a' * 1000000 }}{% endfor %}",
        // Small lists, as long as nobody writes them out.
        "{{ [[10**37] * 100000] * 1000 }}",
        "{% set kept %}{{ [[10**37] * 100000] * 1000 }}{% endset %}",
        "{{ ([[10**37] * 100000] * 1000) | string | length }}",
        "{{ ([[10**37] * 100000] * 1000) | tojson | length }}",
        "{{ range(1000) | list | tojson(indent='a' * 100000) | length }}",
        "{{ [[[1]]] | tojson(indent='a' * 30000000) | length }}",
        "{{ range(1000) | list | tojson(separators=('a' * 100000, ':')) | length }}",
    ] {
        let template = ChatTemplate::from_source(source, &SPECIAL).unwrap();
        let words = template.render_json("[]", None, None).unwrap_err().to_string();
        assert!(words.contains("its text is longer than 67108864 bytes"), "{source}: {words}");
    }
}

#[test]
fn a_template_that_is_none_is_refused_with_its_line() {
    let words = ChatTemplate::from_source("a\n{% for x in %}", &SPECIAL).unwrap_err().to_string();
    assert!(words.contains("line 2"), "{words}");
}

/// Renders with `transformers` what the JSON on standard input holds.
const PYTHON: &str = r#"
import json, sys
from transformers.utils.chat_template_utils import render_jinja_template
ask = json.load(sys.stdin)
said = []
for name, source in ask["templates"]:
    for number, (messages, tools, variables) in enumerate(ask["chats"]):
        variables = {**dict(ask["special"]), **(json.loads(variables) if variables else {})}
        text, why = None, ""
        try:
            text = render_jinja_template([json.loads(messages)], tools=json.loads(tools) if tools else None,
                chat_template=source, add_generation_prompt=True, **variables)[0][0]
        except Exception as error:
            why = str(error)
        said.append([f"{name} {number}", text, why])
print(json.dumps(said))
"#;

/// What a Python program says to JSON: its own JSON, and its words.
fn asked(python: &std::ffi::OsStr, program: &str, ask: &serde_json::Value) -> (serde_json::Value, String) {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("ask.json");
    std::fs::write(&input, ask.to_string()).unwrap();
    let output = Command::new(python)
        .args(["-c", program])
        .stdin(std::fs::File::open(input).unwrap())
        .output()
        .unwrap();
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{words}");
    (serde_json::from_slice(&output.stdout).unwrap(), words)
}

/// Needs a Python with `transformers`: lane `sglang` has one.
#[test]
fn transformers_renders_the_same_bytes() {
    let Some(python) = std::env::var_os("DRIFTLESS_TRANSFORMERS_PYTHON") else { return };
    let templates = templates();
    let ask = serde_json::json!({ "templates": templates, "chats": CHATS, "special": SPECIAL });
    let (said, words) = asked(&python, PYTHON, &ask);
    let said: Vec<(String, Option<String>, String)> = serde_json::from_value(said).unwrap();
    let rendered = rendered(&templates);
    assert_eq!(said.len(), rendered.len());
    let differs =
        |((chat, theirs, why), (same, ours)): &(&(String, Option<String>, String), &(String, _))| {
            assert_eq!(chat, same);
            // minijinja loops over null as over nothing.
            theirs != ours && why != "'NoneType' object is not iterable"
        };
    let differ: Vec<_> = said.iter().zip(&rendered).filter(differs).collect();
    assert!(differ.is_empty(), "{} of {} differ: {differ:#?}\n{words}", differ.len(), said.len());
    let equal = said.iter().filter(|(_, text, _)| text.is_some()).count();
    println!(
        "{} templates: {equal} texts are equal, {} chats are refused",
        templates.len(),
        said.len() - equal
    );
    assert!(equal > 3 * templates.len(), "{words}");
}

/// Tokens and masks of each row as `transformers` has them, or null where the template refuses the row.
const MASKS: &str = r#"
import json, sys
from transformers import AutoTokenizer
ask = json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(ask["checkpoint"])
def masked(source, row):
    try:
        made = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), chat_template=source,
            tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    except Exception as error:
        print(error, file=sys.stderr)
        return None
    return [made["input_ids"], made["assistant_masks"]]
print(json.dumps([[name, [masked(source, row) for row in ask["rows"]]] for name, source in ask["templates"]]))
"#;

/// Tags in the middle of a turn, after white space, around a turn of tools, and a turn without text.
const TAGS: &str = "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}\n  {%- if m.role == 'assistant' %}\n    \
                    {%- generation %}{{ m.content }}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}\n    \
                    {%- endgeneration %}\n  {%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}";

type Masked = Option<(Vec<i32>, Vec<u8>)>;

/// Tokens and mask of a row as training has them.
fn masked(template: &str, row: &serde_json::Value, checkpoint: &std::path::Path) -> Masked {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chats.jsonl");
    std::fs::write(&file, row.to_string()).unwrap();
    let options = DataOptions::default()
        .with_prompt_data(vec![file.to_str().unwrap().parse().unwrap()])
        .with_input_key("messages")
        .with_loss_mask(LossMask::Generation);
    // The special tokens that the checkpoint names.
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    std::fs::copy(checkpoint.join("tokenizer_config.json"), dir.path().join("tokenizer_config.json"))
        .unwrap();
    let template = ChatTemplate::open(dir.path()).unwrap();
    let tokenizer = Arc::new(Tokenizer::open(checkpoint).unwrap());
    let data = Dataset::read(&RowReader::new(options, tokenizer, Some(template)).unwrap()).ok()?;
    data.examples.into_iter().map(|example| (example.tokens, example.loss_mask)).next()
}

/// Needs a tokenizer too: that of SmolLM2, in the same lane.
#[test]
fn transformers_masks_the_same_tokens() {
    let python = std::env::var_os("DRIFTLESS_TRANSFORMERS_PYTHON");
    let checkpoint = std::env::var_os("DRIFTLESS_REAL_CHECKPOINT").map(std::path::PathBuf::from);
    let (Some(python), Some(checkpoint)) = (python, checkpoint) else { return };
    // No turn ends with a character of several tokens: of these, transformers takes the first only.
    let rows = serde_json::json!([
        { "messages": [{ "role": "user", "content": "What is 7 + 5?" }, { "role": "assistant", "content": "It is 12." }] },
        { "messages": [
            { "role": "system", "content": "Größe" }, { "role": "user", "content": " a\n" },
            { "role": "assistant", "content": "  two  spaces 🙂漢." }, { "role": "user", "content": "b" },
            { "role": "assistant", "content": "", "tool_calls": [{ "function": { "name": "f", "arguments": { "x": 1 } } }] },
            { "role": "tool", "content": "assistant" }, { "role": "assistant", "content": "done\n\n" },
        ] },
    ]);
    let marked = |(_, source): &(String, String)| source.contains("endgeneration");
    let mut templates: Vec<_> = templates().into_iter().filter(marked).collect();
    templates.push(("tags".to_owned(), TAGS.to_owned()));
    let ask = serde_json::json!({ "checkpoint": checkpoint, "templates": templates, "rows": rows });
    let (said, words) = asked(&python, MASKS, &ask);
    let said: Vec<(String, Vec<Masked>)> = serde_json::from_value(said).unwrap();
    let ours = templates.iter().map(|(name, source)| {
        let rows = rows.as_array().unwrap().iter();
        (name.clone(), rows.map(|row| masked(source, row, &checkpoint)).collect::<Vec<_>>())
    });
    let differ: Vec<_> = ours.zip(&said).filter(|(ours, theirs)| ours != *theirs).collect();
    assert!(differ.is_empty(), "{} of {} differ: {differ:?}\n{words}", differ.len(), said.len());
    let equal = said.iter().flat_map(|(_, rows)| rows).flatten().count();
    println!("{} templates with {{% generation %}}: {equal} masks are equal", templates.len());
    assert!(equal > templates.len(), "{words}");
}
