"""Conversations of families of models, as `transformers` renders and `renderers` continues and reads them.

    python families.py TOKENIZER TEMPLATES...

TOKENIZER is a `tokenizer.json` with the tokens of all families. TEMPLATES are folders of templates. A line of JSON is
written for each checkpoint: its template, conversations with their ids, and what its model says with what follows.
"""

import json
import sys
from pathlib import Path

import renderers as r
from transformers import PreTrainedTokenizerFast

TEXTS = ["Hi", "  spaces  in\n\nit \t", "código → 日本語 🦀", "<b>tag</b> | <|", '{"a": 1}', ""]
TOOLS = [
    {
        "type": "function",
        "function": {
            "description": f"Does {name}: é.",
            "name": name,
            "parameters": {
                "properties": {
                    "z": {"title": "Z", "type": "object"},
                    "path": {"type": "string", "enum": ["/", "."]},
                    "limit": {"minimum": 1, "type": "integer", "default": 5},
                },
                "required": ["path"],
                "type": "object",
            },
        },
    }
    for name in ["ls", "grep"]
]
# Members stand in no order but their own.
ARGUMENTS = [{"path": "/tmp\nx", "limit": 5, "z": {"b": 1, "a": [1, None, True, 0.5]}}, {"path": "5"}]


def elements(begin, end):
    def spell(arguments):
        return "".join(
            begin.format(key) + (value if isinstance(value, str) else json.dumps(value)) + end
            for key, value in arguments.items()
        )

    return spell


def hermes(calls):
    block = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    return "\n".join(block.format(name, json.dumps(arguments)) for name, arguments in calls)


def qwen35(calls):
    spell = elements("<parameter={}>\n", "\n</parameter>\n")
    block = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
    return "\n".join(block.format(name, spell(arguments)) for name, arguments in calls)


def deepseek_v3(calls):
    block = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    blocks = [block.format(name, json.dumps(arguments)) for name, arguments in calls]
    return "<｜tool▁calls▁begin｜>" + "\n".join(blocks) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls):
    block = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    blocks = [block.format(name, json.dumps(arguments)) for name, arguments in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(blocks) + "<｜tool▁calls▁end｜>"


def glm(line):
    spell = elements(f"<arg_key>{{}}</arg_key>{line}<arg_value>", f"</arg_value>{line}")

    def write(calls):
        return line.join(f"<tool_call>{name}{line}{spell(arguments)}</tool_call>" for name, arguments in calls)

    return write


def kimi(calls):
    block = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    blocks = [block.format(name, nth, json.dumps(arguments)) for nth, (name, arguments) in enumerate(calls)]
    return "<|tool_calls_section_begin|>" + "".join(blocks) + "<|tool_calls_section_end|>"


def llama3(calls):
    blocks = [{"name": name, "parameters": arguments} for name, arguments in calls[:1]]
    return "".join(map(json.dumps, blocks))


def minimax(calls):
    spell = elements('<parameter name="{}">', "</parameter>\n")
    blocks = [f'<invoke name="{name}">\n{spell(arguments)}</invoke>\n' for name, arguments in calls]
    return "\n<minimax:tool_call>\n" + "".join(blocks) + "</minimax:tool_call>"


def kept(renderer, config, **more):
    """Thoughts stay, as they do in a session."""
    return lambda tokenizer: renderer(tokenizer, config(thinking_retention="all", **more))


END, EOS = "<|im_end|>", "<｜end▁of▁sentence｜>"
USER, OBSERVATION = "<|user|>", "<|observation|>"
NAME = "You are a helpful assistant."
EOT, LLAMA = "<|eot_id|>", "meta-llama-Llama-3.1-8B-Instruct"
R1 = "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"
# A template, how its models write calls, the tokens that end an answer and a call, and its renderer. Where there is none,
# what stands behind an answer is the end of the template's whole.
FAMILIES = [
    ("Qwen-Qwen3-0.6B", hermes, END, END, kept(r.Qwen3Renderer, r.Qwen3RendererConfig)),
    ("Qwen3.5-4B", qwen35, END, END, kept(r.Qwen35Renderer, r.Qwen35RendererConfig)),
    (R1, deepseek_v3, EOS, EOS, kept(r.DeepSeekR1Renderer, r.DeepSeekR1RendererConfig)),
    ("deepseek-ai-DeepSeek-V3.1", deepseek_v31, EOS, EOS, None),
    ("GLM-4.6", glm("\n"), USER, OBSERVATION, kept(r.GLM45Renderer, r.GLM45RendererConfig)),
    ("GLM-4.7-Flash", glm(""), USER, OBSERVATION, kept(r.GLM5Renderer, r.GLM5RendererConfig)),
    ("kimi", kimi, END, END, kept(r.KimiK25Renderer, r.KimiK25RendererConfig)),
    ("moonshotai-Kimi-K2", kimi, END, END, kept(r.KimiK2Renderer, r.KimiK2RendererConfig)),
    (LLAMA, llama3, EOT, EOT, kept(r.Llama3Renderer, r.Llama3RendererConfig)),
    ("MiniMax-M2", minimax, "[e~[", "[e~[", kept(r.MiniMaxM2Renderer, r.MiniMaxM2RendererConfig, model_identity=NAME)),
]
# Tokens that renderers want, and that no text has.
PICTURES = "vision_start vision_end image_pad video_pad media_begin media_content media_end media_pad".split()
# Templates whose models differ from the others of their family in nothing else.
MORE = ["deepseek-ai-DeepSeek-V3.2", "smollm2"]
BOS = {"deepseek": "<｜begin▁of▁sentence｜>", "meta": "<|begin_of_text|>"}


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def user(text):
    return message("user", text)


def called(*names, content="", reasoning=None):
    ids = [f"functions.{name}:{nth}" for nth, name in enumerate(names)]
    calls = [{"id": i, "name": name, "arguments": given} for i, name, given in zip(ids, names, ARGUMENTS)]
    return message("assistant", content, calls=calls, reasoning=reasoning)


def told(*texts):
    return [message("tool", text, call_id=i) for i, text in zip(["functions.ls:0", "functions.grep:1"], texts)]


def conversations():
    """Messages before an answer."""
    for text in TEXTS:
        yield [user(text)]
        yield [message("system", text), user("Hi")]
        yield [user("a"), message("assistant", text), user(text)]
        thought = message("assistant", text, reasoning="é: hm")
        yield [user("a"), thought, user("b"), message("assistant", "c"), user("d")]
        yield [user("a"), called("ls", content=text, reasoning="hm"), *told(text)]
        yield [user("a"), called("ls", "grep", content=text), *told(text, "5"), message("assistant", text), user("b")]
    first = [message("system", "s"), user("a"), called("ls", "grep"), *told("x", "")]
    yield [*first, called("ls", reasoning="so"), *told("y")]


class Template:
    """A checkpoint's template, as transformers renders it."""

    def __init__(self, tokenizer, path):
        self.tokenizer, self.source = tokenizer, path.read_text()
        self.bos = next((token for name, token in BOS.items() if path.name.startswith(name)), "")
        self.has_tools = "tools" in self.source
        # How many a message may have: Llama's refuses several, SmolLM2's has no words for any.
        self.calls = (1 if path.name.startswith("meta") else 9) if "tool_calls" in self.source else 0
        self.takes_text = "['arguments'] +" in self.source
        # It parts answers of tools by a line, or has a backslash and an n for one, which renderers do not.
        self.parts = self.takes_text or "Return of" in self.source

    def written(self, said):
        """A message as transformers' users write it."""
        written = {"role": said["role"], "content": said["content"]}
        if said.get("reasoning"):
            written["reasoning_content"] = said["reasoning"]
        if calls := said.get("calls"):
            dumped = json.dumps if self.takes_text else dict
            function = lambda call: {"name": call["name"], "arguments": dumped(call["arguments"])}
            call = lambda call: {"type": "function", "id": call["id"], "function": function(call)}
            written["tool_calls"] = list(map(call, calls))
            if self.takes_text:
                written["content"] = said["content"] or None
        if call_id := said.get("call_id"):
            written["tool_call_id"] = call_id
        return written

    def text(self, messages, tools, prompt=True):
        return self.tokenizer.apply_chat_template(
            [self.written(said) for said in messages],
            tools=tools or None,
            chat_template=self.source,
            add_generation_prompt=prompt,
            tokenize=False,
            bos_token=self.bos,
            tools_in_user_message=False,
        )

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)


def thoughts(prompt):
    """What a model thinks behind the start of an answer, and what ends that."""
    if prompt.endswith("<think>\n"):
        return "hm", "\n</think>\n\n"
    if prompt.endswith("<|assistant|>"):
        return "\n<think>hm", "</think>\n"
    return ("hm", "</think>") if prompt.endswith("<think>") else ("", "")


def turns(spell, end, end_of_calls, thought):
    """What a model says, some of it cut, and the messages behind it."""
    thinks = "".join(thought)
    for text in TEXTS[:3]:
        yield thinks + "Yes." + end, [user(text)]
        yield thinks + text, [user("a"), user(text)]
    yield thought[0] + "é", [user("a")]
    calls = spell([("ls", ARGUMENTS[0]), ("grep", ARGUMENTS[1])])
    yield thinks + calls + end_of_calls, told("x", "")
    yield thinks + "Well." + calls + end_of_calls, [*told(*TEXTS[1:3]), user("b")]
    yield thinks + spell([("ls", {})]) + end_of_calls, told(TEXTS[3])


def behind(template, renderer, end, prompt, sampled, messages):
    """Ids before the next answer."""
    is_told = template.parts and any(said["role"] == "tool" for said in messages)
    if renderer and not is_told:
        return renderer.bridge_to_next_turn(prompt, sampled, [template.written(said) for said in messages]).token_ids
    names = [said["call_id"].split(".")[1].split(":")[0] for said in messages if said["role"] == "tool"]
    whole = template.text([user("a"), {**called(*names), "content": "(said)"}, *messages], None)
    bridge = template.ids(whole[whole.index(end, whole.index("(said)")) :])
    think, thought = template.ids("<think></think>")
    is_thinking = think in prompt[-2:] and thought not in prompt[-2:] + sampled
    return prompt + sampled + [thought] * is_thinking + bridge[sampled[-1:] == bridge[:1] :]


def read(renderer, prompt, sampled, tools):
    """What a client is told of an answer."""
    said = renderer.parse_response(sampled, prompt_ids=prompt, tools=tools)
    calls = [[call.name, call.arguments] for call in said.tool_calls if call.status == "ok"]
    reasoning = (said.reasoning_content or "").strip()
    return {"content": said.content.strip(), "reasoning": reasoning or None, "calls": calls}


def wholes(template, name, tools):
    for messages in conversations():
        if any(len(said.get("calls") or []) > template.calls for said in messages):
            continue
        for given in [[], tools] if tools else [[]]:
            ids = template.ids(template.text(messages, given))
            yield {"messages": messages, "tools": given, "ids": ids}


def without(template, thinks, end, tools):
    """An answer with thoughts, and the conversation once they are left out."""
    said = message("assistant", "Yes.", reasoning="hm")
    ids = template.ids(template.text([user("a"), said, user("b")], tools))
    return {"sampled": template.ids(thinks + "Yes." + end), "ids": ids}


def checkpoint(template, name, spell, end, end_of_calls, renderer):
    tools = TOOLS if template.has_tools else []
    line = {"name": name, "template": template.source, "bos": template.bos, "tools": tools, "turns": []}
    line["wholes"] = list(wholes(template, name, tools))
    if not spell:
        return line
    prompt = template.text([user("a")], tools)
    thought = thoughts(prompt)
    # The one of ours keeps thoughts.
    if thought[0] and name != "kimi":
        line["without"] = without(template, "".join(thought), end, tools)
    for said, messages in turns(spell, end, end_of_calls, thought):
        before, sampled = template.ids(prompt), template.ids(said)
        ids = behind(template, renderer, end, before, sampled, messages)
        heard = renderer and read(renderer, before, sampled, tools)
        line["turns"].append({"sampled": sampled, "messages": messages, "ids": ids, "heard": heard})
    return line


def main(tokenizer, *folders):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in PICTURES]})
    for name, *rules, renderer in [*FAMILIES, *((name, *[None] * 4) for name in MORE)]:
        path = next(path for folder in folders if (path := Path(folder, name + ".jinja")).exists())
        renderer = renderer and renderer(tokenizer)
        print(json.dumps(checkpoint(Template(tokenizer, path), name, *rules, renderer)))


if __name__ == "__main__":
    main(*sys.argv[1:])
