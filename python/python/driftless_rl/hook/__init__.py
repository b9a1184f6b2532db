"""Hooks of ``driftless train`` as Python functions, hundreds of them at once in one process::

    from driftless_rl.hook import generate

    @generate
    async def answer(turn):
        said = await turn.generate()
        if turn.label not in said.text:
            await turn.generate(append="\\nThat is wrong. Try again.\\n")

``--custom-generate-command "python -m driftless_rl.hook mine.py"`` runs it. A plain ``def`` runs in a thread of its own,
where ``turn.generate`` waits. The other decorators are ``reward``, ``prompt`` and the three filters; see docs/hooks.md.
"""

from ._functions import dynamic_sampling_filter, generate, prompt, reward, reward_post_process, rollout_sample_filter
from ._tools import Tool, run_tools
from ._turn import BlockingTurn, Failed, Generation, Sample, Turn

__all__ = [
    "BlockingTurn",
    "Failed",
    "Generation",
    "Sample",
    "Tool",
    "Turn",
    "dynamic_sampling_filter",
    "generate",
    "prompt",
    "reward",
    "reward_post_process",
    "rollout_sample_filter",
    "run_tools",
]
