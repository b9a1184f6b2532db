"""Environments of ``verifiers`` 0.4: a taskset that is installed, and who plays it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from driftless_rl.hook import Failed, Turn

try:
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import harness_class, load_environment, resolve_env_config
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "verifiers":
        raise
    try:
        found = version("verifiers")
    except PackageNotFoundError:
        found = "none"
    raise ImportError(f"expected verifiers 0.4, found {found}: pip install 'verifiers>=0.4,<0.5'") from error


class Environment:
    """A taskset, and one agent that the policy is."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.config, self.agent = _played(name, _config(name, settings), settings)
        self.taskset = load_environment(self.config).taskset
        self.tasks = list(self.taskset) if self.taskset.bounded else None
        if self.tasks == []:
            raise LookupError(f"verifiers:{name}: expected tasks, found none")
        self.endless: Iterator[vf.Task] = iter(())
        self.passed = 0

    def row(self, number: int) -> dict[str, Any]:
        data = self._task(number).data
        text = data.prompt_text or data.name or data.id or f"{self.name} {number}"
        return {"input": text, "metadata": {"task": data.model_dump(mode="json", exclude_defaults=True)}}

    def _task(self, number: int) -> vf.Task:
        if self.tasks is not None:
            return self.tasks[number % len(self.tasks)]
        # The next one is at hand. Any earlier one is counted up to again.
        if number < self.passed or not self.passed:
            self.endless, self.passed = iter(self.taskset), 0
        for task in self.endless:
            self.passed += 1
            if self.passed > number:
                return task
        raise LookupError(f"verifiers:{self.name}: expected task {number} of a taskset without end, found {self.passed}")

    async def answer(self, turn: Turn) -> dict[str, Any]:
        # One of its own for each answer: its servers keep a client for each address until they end.
        env = load_environment(self.config)
        kind = type(env.taskset).task_type()
        task = kind(kind.data_type().model_validate(turn.metadata["task"]), self.config.taskset.task)
        # Its clients read their key in the environment of the process. It keeps names with API_KEY from its programs.
        key = f"DRIFTLESS_API_KEY_{id(turn)}"
        client = vf.EvalClientConfig(base_url=turn.base_url, api_key_var=key)
        os.environ[key] = turn.api_key or ""
        try:
            async with env.serving():
                episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
        finally:
            del os.environ[key]
        return self._outcome(episode)

    def _outcome(self, episode: vf.Episode) -> dict[str, Any]:
        ended = [episode, *episode.traces]
        errors = [error for one in ended for error in one.errors]
        if not episode.ok:
            outcome = "deadline" if any(one.is_timeout for one in ended) else "environment"
            why = " ".join(f"{error.type}: {error.message}" for error in errors) or "no word of why"
            if "context_length_exceeded" in why:
                outcome = "context"
            raise Failed(outcome, why)
        played = [trace for trace in episode.traces if trace.agent.name == self.agent]
        if len(played) != 1 or not played[0].num_turns:
            turns = [trace.num_turns for trace in played]
            raise Failed("environment", f"expected one run of the agent `{self.agent}`, with a turn; found runs of {turns}")
        rewards = {name: reward.value for name, reward in played[0].rewards.items() if reward is not None}
        return {"reward": played[0].reward, "rewards": rewards, "stop_condition": played[0].stop_condition}


def _config(name: str, settings: dict[str, Any]) -> vf.EnvConfig:
    """The environment's own settings, which are what ``[env]`` is in a file of the package's."""
    taskset = {**settings.get("taskset", {}), "id": name}
    try:
        return resolve_env_config({**settings, "taskset": taskset})
    except ModuleNotFoundError as error:
        missing = getattr(error.__cause__, "name", None) or error.name or name
        package = missing.partition(".")[0].replace("_", "-")
        raise ImportError(f"verifiers:{name}: expected the module `{missing}`, found none: pip install {package}") from error


def _played(name: str, config: vf.EnvConfig, settings: dict[str, Any]) -> tuple[vf.EnvConfig, str]:
    """The settings as a run needs them, and which agent the policy is."""
    agents = agent_config_fields(config)
    mine = [agent for agent, spec in agents.items() if spec.client is None]
    if len(mine) != 1:
        raise ValueError(f"verifiers:{name}: expected one agent without a `client` of its own, found {mine}")
    harnesses = config.agent_harnesses()
    changed = {}
    for agent, spec in agents.items():
        # A second attempt would leave the tokens of the first in the answer.
        update: dict[str, Any] = {"retries": vf.RetryConfig()} if agent == mine[0] else {}
        if spec.runtime == vf.PrimeConfig() and "runtime" not in settings.get(agent, {}):
            harness = harnesses[agent].id
            if harness_class(harness).EXECUTES_CODE:
                raise ValueError(
                    f"agent `{agent}`: expected a `runtime` for its harness `{harness}`, which runs code that the policy writes"
                )
            update["runtime"] = vf.SubprocessConfig()
        changed[agent] = spec.model_copy(update=update)
    return config.model_copy(update=changed), mine[0]
