"""Why an answer has no reward."""

from __future__ import annotations


class Failed(Exception):
    """An answer that came to nothing, with what kind of failure it was."""

    def __init__(self, outcome: str, why: str) -> None:
        super().__init__(f"{outcome}: {why}")
        self.outcome = outcome
