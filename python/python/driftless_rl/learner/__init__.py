"""A learner for ``driftless train --learner``: any causal language model of transformers, in one process or under FSDP2.

    driftless train --learner "python -m driftless_rl.learner" …
    driftless train --learner "torchrun --nproc-per-node 8 -m driftless_rl.learner --fsdp" …

It speaks the protocol of ``docs/wire/learner.md``. torch and transformers are imported by its modules, not by this one.
"""
