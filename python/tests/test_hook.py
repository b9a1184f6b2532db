"""Hooks as Python functions: the process that the loop starts, asked by pipes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

QUESTION = {"hook": "generate", "index": 3, "prompt": "6*7=", "input_ids": [1, 2], "label": "42", "metadata": {"level": 1}}
QUESTION |= {"sampling_params": {"max_new_tokens": 9}, "evaluation": False, "generations": []}
SAMPLE = {"index": 0, "prompt": "p", "response": "42", "label": "42", "metadata": None, "truncated": False}
SAMPLE |= {"response_length": 1, "of_a_later_release": 1}


class Process:
    """A process of hooks; ``line`` gives what it says next."""

    def __init__(self, file: Path, text: str) -> None:
        file.write_text("import asyncio, os, sys\nfrom driftless_rl.hook import *\n" + text)
        command = [sys.executable, "-m", "driftless_rl.hook", file, "argument"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def say(self, number: int, /, **said) -> None:
        self.process.stdin.write(json.dumps({"id": number, **said}) + "\n")
        self.process.stdin.flush()

    def tell(self, number: int, turn: int, /, **said) -> None:
        told = {"output_ids": [turn], "log_probs": [-1.0], "text": "41", "finish_reason": "stop", **said}
        self.say(number, turn=turn, generation=told)

    def line(self) -> dict:
        return json.loads(self.process.stdout.readline())

    def end(self) -> str:
        """Closes its input, and gives what it wrote on standard error."""
        rest, errors = self.process.communicate(timeout=60)
        assert rest == ""
        return errors


@pytest.fixture
def hook(tmp_path):
    begun = []

    def begin(text: str) -> Process:
        begun.append(Process(tmp_path / "mine.py", text))
        assert begun[-1].line() == {"announced": {"protocol": 2, "open": 512}}
        return begun[-1]

    yield begin
    for one in begun:
        one.process.kill()
        one.process.communicate()


ASYNC, PLAIN = ("async ", "await "), ("", "")


@pytest.mark.parametrize("kind", [ASYNC, PLAIN])
def test_function_has_turns_and_the_answer_is_the_last(hook, kind):
    process = hook("""
@generate
{}def answer(turn):
    assert (turn.index, turn.prompt, turn.label, turn.metadata) == (3, "6*7=", "42", {{"level": 1}})
    assert turn.tokens == [1, 2] and not turn.evaluation and sys.argv[1] == "argument"
    said = {}turn.generate(max_new_tokens=4, stop="x")
    assert (said.text, said.output_ids, said.log_probs, said.finish_reason) == ("41", [1], [-1.0], "stop")
    {}turn.generate("no", stop_token_ids=[7])
    assert turn.tokens == [1, 2, 1, 8, 9, 2]
    {}turn.generate(input_ids=[1, 5])
    assert turn.tokens == [1, 5, 3]
""".format(kind[0], *[kind[1]] * 3))
    process.say(7, **QUESTION)
    params = {"max_new_tokens": 4, "stop": ["x"]}
    assert process.line() == {"id": 7, "turn": 0, "generate": {"sampling_params": params}}
    process.tell(7, 1)
    wanted = {"sampling_params": {"stop_token_ids": [7]}, "append": "no"}
    assert process.line() == {"id": 7, "turn": 1, "generate": wanted}
    process.tell(7, 2, appended_ids=[8, 9])
    assert process.line()["generate"]["input_ids"] == [1, 5]
    process.tell(7, 3)
    assert process.line() == {"id": 7, "turn": 3, "samples": [{}]}
    assert process.end() == "" and process.process.returncode == 0


def test_samples_have_masks_and_metadata(hook):
    process = hook("""
@generate
async def answer(turn):
    await turn.generate()
    turn.sample(loss_mask=[True])
    await turn.generate("+")
    turn.sample([1, 2, 4], prompt_len=1, metadata={"won": 1})
""")
    process.say(1, **QUESTION)
    process.line(), process.tell(1, 1), process.line(), process.tell(1, 2, appended_ids=[4])
    first = {"tokens": [1, 2, 1], "loss_mask": [1]}
    second = {"tokens": [1, 2, 4], "prompt_len": 1, "metadata": {"won": 1}}
    assert process.line()["samples"] == [first, second]


@pytest.mark.parametrize("kind", [ASYNC, PLAIN])
def test_messages_go_on_with_what_was_appended_and_said(hook, kind):
    process = hook("""
@generate
{}def answer(turn):
    assert turn.messages == [{{"role": "user", "content": "6*7="}}] and turn.tools == [7]
    {}turn.generate()
    assert turn.messages[-1] == {{"role": "assistant", "content": "41"}}
    turn.messages += [{{"role": "user", "content": "No."}}]
    try:
        {}turn.generate("text")
    except ValueError as error:
        assert "found two of them" in str(error)
    try:
        {}turn.generate()
    except ValueError as error:
        turn.messages[-1]["content"] = str(error)
    {}turn.generate()
    assert [one["content"] for one in turn.messages] == ["6*7=", "41", "refused", "so 42"]
    del turn.messages[0]
    {}turn.generate()
""".format(kind[0], *[kind[1]] * 5))
    process.say(1, **QUESTION, messages=[{"role": "user", "content": "6*7="}], tools=[7])
    assert process.line()["generate"] == {"sampling_params": {}}
    process.tell(1, 1)
    new = [{"role": "user", "content": "No."}]
    assert process.line() == {"id": 1, "turn": 1, "generate": {"sampling_params": {}, "append_messages": new}}
    process.tell(1, 2, error="refused", output_ids=[], finish_reason="refused")
    new[0]["content"] = "refused"
    assert process.line() == {"id": 1, "turn": 2, "generate": {"sampling_params": {}, "append_messages": new}}
    process.tell(1, 3, message={"role": "assistant", "content": "so 42"})
    assert "turn.messages: expected new messages behind those so far" in process.line()["error"]


def test_reward_of_a_sample_is_a_finite_number(hook):
    process = hook("""
@generate
async def answer(turn):
    turn.sample([1, 2, 3], reward=1, rewards={"right": 1, "form": 0.5})
    turn.sample([1, 2, 3], reward=float(turn.label))
""")
    process.say(1, **QUESTION | {"label": "0.5"})
    first, second = process.line()["samples"]
    assert (first["reward"], first["rewards"]) == (1.0, {"right": 1.0, "form": 0.5})
    assert second == {"tokens": [1, 2, 3], "reward": 0.5}
    process.say(2, **QUESTION | {"label": "nan"})
    error = "ValueError: turn.sample: expected a finite number as `reward`, found nan (mine.py:7)"
    assert process.line() == {"id": 2, "turn": 0, "error": error}


def test_plain_functions_are_open_together(hook):
    process = hook("""
import threading
together = threading.Barrier(200)

@generate
def answer(turn):
    together.wait(timeout=60)
    turn.generate()
""")
    for number in range(200):
        process.say(number, **QUESTION)
    assert sorted(process.line()["id"] for _ in range(200)) == list(range(200))


@pytest.mark.parametrize("kind", [ASYNC, PLAIN])
def test_exception_is_the_error_of_its_answer_alone(hook, kind):
    process = hook("""
import json

@generate
{}def answer(turn):
    {}turn.generate()
    json.loads("[")
""".format(*kind))
    process.say(1, **QUESTION), process.line()
    process.say(2, **QUESTION), process.line()
    process.tell(1, 1)
    error = "json.decoder.JSONDecodeError: Expecting value: line 1 column 2 (char 1) (mine.py:9)"
    assert process.line() == {"id": 1, "turn": 1, "error": error}
    process.tell(2, 1)
    assert process.line()["id"] == 2
    errors = process.end()
    assert errors.count("Traceback") == 2 and "json.loads" in errors and "_serve.py" not in errors


def test_failure_has_its_outcome_and_no_traceback(hook):
    process = hook("""
@generate
async def answer(turn):
    match turn.label:
        case "died": raise Failed("environment", "the container died")
        case "late": await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        case "odd": raise Failed("oom", "no such outcome")
        case "why": raise Failed("parser", "no call") from KeyError("call")
""")
    process.say(1, **QUESTION | {"label": "died"})
    place = "(mine.py:7)"
    assert process.line() == {"id": 1, "turn": 0, "error": f"the container died {place}", "outcome": "environment"}
    process.say(2, **QUESTION | {"label": "late"})
    assert process.line()["outcome"] == "deadline"
    process.say(3, **QUESTION | {"label": "odd"})
    odd = process.line()
    assert "found 'oom'" in odd["error"] and "outcome" not in odd
    process.say(4, **QUESTION | {"label": "why"})
    assert process.line()["outcome"] == "parser"
    errors = process.end()
    assert "the container died" not in errors and "KeyError: 'call'" in errors


def test_what_is_no_json_is_an_error_of_its_line(hook):
    process = hook("""
@generate
async def answer(turn):
    await turn.generate(input_ids=[float("nan")])
""")
    process.say(1, **QUESTION)
    assert process.line()["error"].endswith("(mine.py:6)")


def test_reward_says_what_it_is_made_of_and_which_sample_has_none(hook):
    process = hook("""
@reward
async def score(samples):
    async def judge(sample):
        match sample.index:
            case 0: return 1
            case 1: return {"reward": 0.5, "rewards": {"right": 0, "form": 0.5}}
            case 2: raise TimeoutError("the judge is asleep")
            case 3: return float("inf")
            case 4: return None
            case 5: return {"right": 1}
    return await asyncio.gather(*map(judge, samples), return_exceptions=True)
""")
    process.say(1, hook="rm", samples=[{**SAMPLE, "index": index} for index in range(6)])
    first, second, *others = process.line()["rewards"]
    assert (first, second) == (1.0, {"reward": 0.5, "rewards": {"right": 0.0, "form": 0.5}})
    expected = ["TimeoutError: the judge is asleep (mine.py:", "found inf", "NoneType", "found ['right']"]
    for said, expected in zip(others, expected, strict=True):
        assert list(said) == ["error"] and expected in said["error"], said


@pytest.mark.parametrize("kind", [ASYNC, PLAIN])
def test_cancelled_function_cleans_up(hook, kind):
    process = hook("""
@generate
{}def answer(turn):
    try:
        {}turn.generate()
    except Exception:
        print("taken for a failure")
    except asyncio.CancelledError:
        print("cleaned up")
        raise
""".format(*kind))
    process.say(1, **QUESTION), process.line()
    process.say(1, cancel=True)
    assert process.line() == {"id": 1, "turn": 0, "cancelled": True}
    # One that has ended, as its last line crossed this one.
    process.say(1, cancel=True)
    process.say(2, **QUESTION)
    assert process.line()["id"] == 2
    errors = process.end()
    assert errors.startswith("cleaned up\n") and "failure" not in errors


def test_generation_past_a_timeout_of_the_function_counts(hook):
    process = hook("""
@generate
async def answer(turn):
    try:
        async with asyncio.timeout(0):
            await turn.generate()
    except TimeoutError:
        await turn.generate("!")
""")
    process.say(1, **QUESTION)
    assert process.line()["turn"] == 0
    process.tell(1, 1)
    assert process.line() == {"id": 1, "turn": 1, "generate": {"sampling_params": {}, "append": "!"}}
    process.tell(1, 2, appended_ids=[])
    assert process.line()["samples"] == [{}]


def test_second_generation_at_once_is_refused(hook):
    process = hook("""
@generate
async def answer(turn):
    await asyncio.gather(turn.generate(), turn.generate())
""")
    process.say(1, **QUESTION), process.line()
    # The loop takes no word before the generation that it was asked for.
    process.tell(1, 1)
    said = process.line()
    assert said["turn"] == 1 and "expected one at a time" in said["error"]


def test_prints_of_all_kinds_go_to_standard_error(hook):
    process = hook("""
print("at the start")

@reward
def score(samples):
    print("printed")
    os.system("echo of a child; cat")
    return [1 for sample in samples if sample.response == sample.label]
""")
    process.say(1, hook="rm", samples=[SAMPLE])
    assert process.line() == {"id": 1, "rewards": [1.0]}
    assert process.end() == "at the start\nprinted\nof a child\n"


def test_samples_of_clients_are_named_without_tokens(hook):
    process = hook("""
@generate
async def answer(turn):
    if turn.base_url is not None:
        turn.sample(metadata={"at": turn.base_url, "with": turn.api_key})
    else:
        turn.sample()
""")
    process.say(1, **QUESTION, base_url="http://127.0.0.1:1/s/3-0/v1", api_key="key")
    metadata = {"at": "http://127.0.0.1:1/s/3-0/v1", "with": "key"}
    assert process.line() == {"id": 1, "turn": 0, "samples": [{"metadata": metadata}]}
    process.say(2, **QUESTION)
    assert "expected `tokens`, or a generation before it" in process.line()["error"]


def test_decorators_answer_the_other_questions(hook):
    process = hook("""
@prompt
def row(number):
    return {"input": str(number)}

@reward
async def score(samples):
    return [float(samples[0].label == samples[0].response)]

@dynamic_sampling_filter
def keep(samples):
    return False, "too easy"

@rollout_sample_filter
def remove(samples):
    return [sample.reward > 0 for sample in samples]

@reward_post_process
def shaped(samples):
    return [10 * sample.reward for sample in samples]
""")
    scored = [{**SAMPLE, "reward": 0.5}]
    for hook_name, given, expected in [
        ("prompt", {"number": 17}, {"row": {"input": "17"}}),
        ("rm", {"samples": []}, {"rewards": []}),
        ("rm", {"samples": [SAMPLE]}, {"rewards": [1.0]}),
        ("dynamic_sampling_filter", {"samples": scored}, {"keep": False, "reason": "too easy"}),
        ("rollout_sample_filter", {"samples": scored}, {"remove": [True]}),
        ("reward_post_process", {"samples": scored}, {"rewards": [5.0]}),
    ]:
        process.say(4, hook=hook_name, **given)
        assert process.line() == {"id": 4, **expected}
    process.say(5, **QUESTION)
    assert "no function for the question `generate`" in process.line()["error"]


def test_file_without_functions_ends_with_the_reason(tmp_path):
    for text, code, reason in [("", 2, "found none"), ("1 / 0", 1, "ZeroDivisionError")]:
        process = Process(tmp_path / "mine.py", text)
        assert reason in process.end() and process.process.returncode == code
    done = subprocess.run([sys.executable, "-m", "driftless_rl.hook"], capture_output=True, text=True)
    assert done.returncode == 2 and "FILE.py" in done.stderr
