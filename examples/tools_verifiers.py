"""The calculator and the search of ``--environment tools:FOLDER`` as a taskset of ``verifiers``, whose agent plays it::

    PYTHONPATH=examples driftless train --environment verifiers:tools-verifiers --environment-args \\
        '{"taskset": {"task": {"tools": {"folder": "docs"}}}, "agent": {"harness": {"id": "null"}}}' …

The tools are a server of MCP, which the package starts for each answer. They read the folder, and run no code of the policy.
"""

import re
from collections.abc import Iterator

import verifiers.v1 as vf
from driftless_rl.environment import tools


def bare(text: str) -> str:
    """A word or a number without the signs around it."""
    return text.strip(" \n.,;:!?“”\"").casefold()


class Tools(vf.ToolsetConfig):
    """Where the texts lie, and which prompts are drawn of them."""

    folder: str = "docs"
    seed: int = 0


class Toolset(vf.Toolset[Tools]):
    """What the policy may call, by these names."""

    TOOL_PREFIX = None

    async def setup(self) -> None:
        self.tools = tools.Environment(self.config.folder, {"seed": self.config.seed})

    @vf.tool
    def calculate(self, expression: str) -> str:
        """Works out an expression of numbers, + - * / and brackets, such as (12.5 - 4) * 3."""
        return tools.calculate(expression)

    @vf.tool
    def search(self, text: str) -> str:
        """Finds the lines of the files that have this text, with their places."""
        return self.tools.search(text)


class Data(vf.TaskData):
    """A prompt, and all answers that are right."""

    answers: list[str]


class TaskConfig(vf.TaskConfig):
    """Settings below ``taskset.task``."""

    tools: Tools = Tools()


class Task(vf.Task[Data, vf.State, TaskConfig]):
    """A sum, or a word that follows others."""

    @classmethod
    def toolsets(cls, config: TaskConfig) -> list[vf.Toolset]:
        return [Toolset(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        said = re.findall(r"<answer>(.*?)</answer>", trace.last_reply, re.DOTALL)
        return float(bool(said) and bare(said[-1]) in map(bare, self.data.answers))

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(sum(len(message.tool_calls or ()) for message in trace.assistant_messages))


class Config(vf.TasksetConfig):
    """Settings below ``taskset``."""

    tasks: int = 1000
    task: TaskConfig = TaskConfig()


class Taskset(vf.Taskset[Task, Config]):
    """The prompts of the environment, in its order."""

    def load(self) -> Iterator[Task]:
        settings = self.config.task.tools
        drawn = tools.Environment(settings.folder, {"seed": settings.seed})
        for number in range(self.config.tasks):
            row = drawn.row(number)
            yield Task(Data(prompt=row["input"], answers=row["metadata"]["answers"]), self.config.task)


__all__ = ["Taskset"]


if __name__ == "__main__":
    Toolset.run()
