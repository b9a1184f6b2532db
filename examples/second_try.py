"""Gives the model a second try where its first answer is wrong:
`--custom-generate-command "python -m driftless_rl.hook examples/second_try.py"`. See docs/hooks.md.
"""

from driftless_rl.hook import Turn, generate


@generate
async def second_try(turn: Turn) -> None:
    said = await turn.generate()
    if turn.label not in said.text:
        await turn.generate(append="\nThat is wrong. Try again.\n")
