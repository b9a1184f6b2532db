"""The bench of a version's way, with a real SGLang and few turns: its phases are there and add up."""

import sys
from pathlib import Path

import pytest
from sglang_engine import STAND_INS, Sglang
from sglang_models import make

sys.path.append(str(Path(__file__).parents[1] / "benches"))
import way

pytestmark = pytest.mark.skipif(not STAND_INS, reason="DRIFTLESS_SGLANG_PYTHONPATH is not set")
HOST = ("see", "sync", "fetch", "decode", "journal", "offer")


def test_phases_of_a_way_add_up_and_tokens_come_behind_them(tmp_path, forks, capsys):
    make(tmp_path / "base", "untied", 1)
    server = Sglang(tmp_path / "server", tmp_path / "base", forks=forks)
    more = ["--plugin-dir", str(server.plugins), "--turns", "3", "--loads", "1", "--requests", "2", "--apart", "0.2"]
    try:
        with capsys.disabled():
            turns = way.measure(way.arguments(["run", server.url, str(tmp_path / "base"), *more]), tmp_path)
    finally:
        server.end()
    assert [len(turns[name]) for name in ("patched", "loaded")] == [3, 1]
    for times in turns["patched"] + turns["loaded"]:
        assert all(times[phase] >= 0 for phase in HOST), times
        # The follower tells when it began in whole milliseconds.
        assert times["offered"] < times["live"] + 1.0, times
        assert times["copy"] > 0 and times["patch"] > 0, times
        assert times["live"] < times["request"], times
        assert times["decode"] + times["fetch"] + times["journal"] > 0, times
