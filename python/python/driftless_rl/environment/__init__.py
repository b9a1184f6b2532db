"""Environments, for ``driftless train --environment KIND:NAME``: those of installed packages, and ``tools:FOLDER``.

The command runs ``python3 -m driftless_rl.environment KIND:NAME``, which makes prompts, answers and rewards as a hook does
(docs/hooks.md). Each kind has a module here. Its package is imported with the first question that needs it.
"""
