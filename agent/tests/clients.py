"""OpenAI's and Anthropic's own clients against a gateway: clients.py URL KEY."""

import json
import sys

import anthropic
import openai

URL, KEY = sys.argv[1:]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}


def chat(client):
    asked = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == "heard hello", whole
    assert (whole.usage.prompt_tokens, whole.usage.prompt_tokens_details.cached_tokens) == (11, 4), whole
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert (text, chunks[-1].usage.completion_tokens) == ("heard hello", 3), chunks

    tool = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    turn = client.chat.completions.create(**asked, tools=[tool]).choices[0]
    assert turn.finish_reason == "tool_calls", turn
    call = turn.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"}), call
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*asked["messages"], turn.message, result]
    after = client.chat.completions.create(model="any", messages=messages, tools=[tool])
    assert after.choices[0].message.content == "heard rain", after
    with client.chat.completions.stream(**asked, tools=[tool]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "weather", final


def responses(client):
    whole = client.responses.create(model="any", input="hello", instructions="be brief")
    assert (whole.output_text, whole.status, whole.usage.total_tokens) == ("heard hello", "completed", 14), whole
    with client.responses.stream(model="any", input="hello") as stream:
        final = stream.get_final_response()
    assert final.output_text == "heard hello", final
    cut = client.responses.create(model="any", input="hello", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens"), cut

    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
    with client.responses.stream(model="any", input="hello", tools=[tool]) as stream:
        turn = stream.get_final_response()
    call = turn.output[-1]
    assert (turn.output[0].type, call.name, json.loads(call.arguments)) == ("reasoning", "weather", {"city": "Bern"}), turn
    history = [{"role": "user", "content": "hello"}, *[item.model_dump(exclude_none=True) for item in turn.output]]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    after = client.responses.create(model="any", input=history, tools=[tool])
    assert after.output_text == "heard rain", after


def messages(client):
    asked = {"model": "any", "max_tokens": 100, "messages": [{"role": "user", "content": "hello"}]}
    whole = client.messages.create(**asked)
    assert (whole.content[0].text, whole.stop_reason) == ("heard hello", "end_turn"), whole
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens, whole.usage.output_tokens) == (7, 4, 3), whole
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == "heard hello"
    counted = client.messages.count_tokens(model="any", messages=asked["messages"])
    assert counted.input_tokens == 1, counted

    tool = {"name": "weather", "input_schema": PARAMETERS}
    with client.messages.stream(**asked, tools=[tool]) as stream:
        turn = stream.get_final_message()
    kinds = [block.type for block in turn.content]
    assert (kinds, turn.stop_reason) == (["thinking", "tool_use"], "tool_use"), turn
    assert turn.content[1].input == {"city": "Bern"}, turn
    result = {"type": "tool_result", "tool_use_id": turn.content[1].id, "content": "rain"}
    history = [*asked["messages"], {"role": "assistant", "content": turn.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(model="any", max_tokens=100, messages=history, tools=[tool])
    assert after.content[0].text == "heard rain", after


def refusals():
    full = [{"role": "user", "content": "full"}]
    try:
        openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY).chat.completions.create(model="any", messages=full)
        raise AssertionError("a full context was answered")
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error
    try:
        anthropic.Anthropic(base_url=URL, api_key=KEY).messages.create(model="any", max_tokens=9, messages=full)
        raise AssertionError("a full context was answered")
    except anthropic.BadRequestError as error:
        assert "prompt is too long" in str(error), error
    try:
        openai.OpenAI(base_url=f"{URL}/v1", api_key="another").models.list()
        raise AssertionError("another key was let in")
    except openai.AuthenticationError:
        pass


for prefix in ["", "/s/one"]:
    of_openai = openai.OpenAI(base_url=f"{URL}{prefix}/v1", api_key=KEY)
    of_anthropic = anthropic.Anthropic(base_url=f"{URL}{prefix}", api_key=KEY)
    chat(of_openai)
    responses(of_openai)
    messages(of_anthropic)
    assert [model.id for model in of_openai.models.list()] == ["scripted"]
    assert [model.id for model in of_anthropic.models.list()] == ["scripted"]
# As Claude Code brings its key.
messages(anthropic.Anthropic(base_url=f"{URL}/s/two", auth_token=KEY))
refusals()
