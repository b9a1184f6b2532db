"""The rollout log: durable records, read where they lie."""

import gc
import struct
import subprocess
import sys
import threading

import driftless_rl
import numpy as np
import pytest
import torch

RUN = "0123456789abcdef" * 2


def sample(sample_id: int, group_id: int = 0, rollout_id: int = 0, tokens: int = 6, **fields):
    return {
        "sample_id": sample_id,
        "group_id": group_id,
        "rollout_id": rollout_id,
        "tokens": np.arange(sample_id, sample_id + tokens),
        "prompt_len": 2,
        "log_probs": np.linspace(-1, 0, tokens - 2),
        "reward": sample_id / 2,
        "spans": [(rollout_id, 0, tokens - 2)],
        **fields,
    }


def test_samples_come_back_as_they_were_appended(tmp_path):
    with driftless_rl.RolloutLog(tmp_path, RUN) as log:
        position = log.append(**sample(7, 3, 1, finish="length", engine="http://e:1", metadata=b"\0\1", loss_mask=[1, 0, 1, 1]))
        found = log.get(position)
        assert (found.sample_id, found.group_id, found.rollout_id, found.reward) == (7, 3, 1, 3.5)
        assert (found.finish, found.prompt_len, found.engine, found.metadata) == ("length", 2, "http://e:1", b"\0\1")
        assert found.tokens.tolist() == [7, 8, 9, 10, 11, 12] and found.tokens.dtype == np.int32
        assert found.response.tolist() == [9, 10, 11, 12] and found.spans == [(1, 0, 4)]
        assert np.array_equal(found.log_probs, np.linspace(-1, 0, 4, dtype=np.float32))
        assert found.loss_mask.tolist() == [1, 0, 1, 1]
        assert (found.scored, found.verdict, found.evaluation, found.times_us) == (True, "kept", False, [])
        assert found.rewards.tolist() == [] and found.rewards.dtype == np.float32
        assert log.get(position + 1) is None and log.end == position + 1
        log.close()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_what_a_step_learned_is_read_as_the_format_says(tmp_path):
    with driftless_rl.RolloutLog(tmp_path, RUN) as log:
        position = log.append(**sample(7, tokens=4))
        assert log.learned(3) == {}
        values = np.array([-0.5, np.nan], "<f4").tobytes()
        row = struct.pack("<QQIfI4x", position, 96, 2, 0.5, crc32c(values))
        head = struct.pack("<8sIIQQQI16x", b"dlrlearn", 1, 0, 3, 1, position, crc32c(row))
        path = tmp_path / "learned" / f"{3:020}.columns"
        path.parent.mkdir()
        path.write_bytes(head + struct.pack("<I", crc32c(head)) + row + values)
        (found,) = log.learned(3).items()
        assert found[0] == position and found[1].dtype == np.float32
        assert found[1] == pytest.approx([-0.5, np.nan], nan_ok=True)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(driftless_rl.RefusedError, match="columns"):
            driftless_rl.RolloutReader(tmp_path).learned(3)


def test_groups_are_given_once_each_as_they_become_complete(tmp_path):
    with driftless_rl.RolloutLog(tmp_path, RUN) as log:
        log.append_all([sample(0, 0, 1), sample(1, 1, 1), sample(2, 1, 1), sample(3, 0, 1), sample(4, 2, 2)])
        first = log.groups(2)
        assert [(group.group_id, [found.sample_id for found in group.samples]) for group in first] == [(1, [1, 2]), (0, [0, 3])]
        assert first[0].versions == (1, 1) and log.groups(2, limit=1)[0].group_id == 1
        assert [group.group_id for group in log.groups(2, rollout_id=1)] == [0, 1]
        assert log.groups(2, version_min=2) == []
        log.append(**sample(5, 2, 2))
        (later,) = log.groups(2, completed_from=first[-1].completed + 1)
        assert later.group_id == 2 and later.rollout_id == 2


def test_arrays_lie_in_the_map_and_outlive_the_log(tmp_path):
    log = driftless_rl.RolloutLog(tmp_path, RUN)
    log.append(**sample(1, tokens=100_000))
    found = log.groups(1)[0].samples[0]
    tokens, again = found.tokens, found.tokens
    assert tokens.__array_interface__["data"][0] == again.__array_interface__["data"][0]
    assert not tokens.flags.owndata and not tokens.flags.writeable and tokens.ctypes.data % 64 == 0
    log.close()
    del log, found, again
    gc.collect()
    assert np.array_equal(tokens, np.arange(1, 100_001))
    assert torch.tensor(tokens).sum() == tokens.sum(dtype=np.int64)


def test_cursor_survives_and_another_process_reads(tmp_path):
    with driftless_rl.RolloutLog(tmp_path, RUN) as log:
        log.append_all([sample(number) for number in range(3)])
        assert log.cursor("trainer") == 0
        log.commit("trainer", 2)
        with pytest.raises(driftless_rl.UsageError):
            log.commit("trainer", 99)
        script = "import driftless_rl, sys; print(driftless_rl.RolloutReader(sys.argv[1]).groups(3)[0].samples[2].reward)"
        done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "1.0", done.stderr
    with driftless_rl.RolloutLog(tmp_path, bytes.fromhex(RUN)) as log:
        assert log.cursor("trainer") == 2 and log.end == 3


PRODUCER = """
import sys
import driftless_rl

with driftless_rl.RolloutProducer(sys.argv[1], sys.argv[2], timeout=30) as producer:
    for number in range(int(sys.argv[3]), int(sys.argv[3]) + 20):
        row = {"group_id": number, "rollout_id": 0, "tokens": [number, 1, 2], "prompt_len": 1, "log_probs": [-0.5, -0.25]}
        print(producer.append(sample_id=number, **row), flush=True)
try:
    producer.append(sample_id=0, **row)
except driftless_rl.ClosedError:
    print("closed")
"""


def test_other_processes_write_to_a_log_that_is_served(tmp_path):
    with driftless_rl.RolloutLog(tmp_path, RUN) as log:
        with pytest.raises(driftless_rl.StoreError, match="the process that owns the log"):
            driftless_rl.RolloutProducer(tmp_path, RUN, timeout=0.2)
        log.serve()
        log.serve()
        start = [sys.executable, "-c", PRODUCER, tmp_path, RUN]
        started = [subprocess.Popen([*start, str(20 * nth)], stdout=subprocess.PIPE, text=True) for nth in range(2)]
        told = [process.communicate(timeout=60)[0].split() for process in started]
        assert [words[-1] for words in told] == ["closed"] * 2
        for nth, words in enumerate(told):
            for number, position in enumerate(words[:-1], 20 * nth):
                found = log.get(int(position))
                assert found.sample_id == number and found.tokens.tolist() == [number, 1, 2]
        assert log.end == 40
        with pytest.raises(driftless_rl.RefusedError):
            driftless_rl.RolloutProducer(tmp_path, "f" * 32, timeout=5)
        producer = driftless_rl.RolloutProducer(tmp_path, RUN, timeout=5)
        assert log.get(producer.append(**sample(40))).reward == 20.0
        with pytest.raises(driftless_rl.UsageError, match="log_probs"):
            producer.append(**sample(41, log_probs=[0.0, np.nan, 0.0, 0.0]))
    with pytest.raises(driftless_rl.StoreError, match="the process that owns the log"):
        producer.append(**sample(41))


def test_reader_waits_for_the_writer(tmp_path):
    with driftless_rl.RolloutLog(tmp_path, RUN) as log:
        assert log.wait(0, timeout=0.01) == 0
        writer = threading.Thread(target=lambda: log.append(**sample(0)))
        writer.start()
        assert log.wait(0, timeout=60) == 1
        writer.join()


def test_logs_of_others_and_bad_records_are_refused(tmp_path):
    with driftless_rl.RolloutLog(tmp_path, RUN) as log:
        with pytest.raises(driftless_rl.BusyError):
            driftless_rl.RolloutLog(tmp_path, RUN)
        with pytest.raises(driftless_rl.UsageError):
            log.append(**sample(1, log_probs=[0.0]))
        with pytest.raises(driftless_rl.UsageError, match="finish"):
            log.append(**sample(1, finish="maybe"))
        log.append(**sample(1))
    with pytest.raises(driftless_rl.RefusedError) as raised:
        driftless_rl.RolloutLog(tmp_path, "f" * 32)
    assert raised.value.kind == "Identity" and raised.value.code == 3
    with pytest.raises(driftless_rl.ClosedError):
        log.append(**sample(2))


CHANGED = {
    "an id beyond int32": ({"tokens": np.full(6, 2**40)}, "tokens: expected values that int32 can hold, found 1099511627776 at 0"),
    "an unsigned id": ({"tokens": np.full(6, 2**64 - 1, np.uint64)}, "tokens"),
    "an id beyond every integer": ({"tokens": [1, 2, 3, 4, 5, 2**70]}, "tokens"),
    "half an id": ({"tokens": [1, 2, 3, 4, 5, 1.5]}, "found 1.5 at 5"),
    "an id that is no number": ({"tokens": [1, 2, 3, 4, 5, np.nan]}, "found nan at 5"),
    "text": ({"tokens": list("tokens")}, "tokens"),
    "a negative id": ({"tokens": [1, 2, 3, 4, 5, -1]}, "tokens: expected ids from 0 on, found -1 at 5"),
    "masked ids": ({"tokens": np.ma.masked_equal(np.arange(6), 3)}, "MaskedArray"),
    "half a mask": ({"loss_mask": [1, 0.5, 1, 1]}, "loss_mask: expected values that uint8 can hold, found 0.5 at 1"),
    "a mask of -1": ({"loss_mask": [1, -1, 1, 1]}, "loss_mask"),
    "a mask of 2": ({"loss_mask": [1, 2, 1, 1]}, "loss_mask: expected 0 or 1, found 2 at 1"),
    "a log-prob of NaN": ({"log_probs": [0.0, np.nan, 0.0, 0.0]}, "log_probs: expected finite numbers, found NaN at 1"),
    "a log-prob of infinity": ({"log_probs": [0.0, 0.0, np.inf, 0.0]}, "log_probs"),
    "a log-prob beyond float32": ({"log_probs": [0.0, 0.0, 0.0, -1e39]}, "log_probs"),
    "a complex log-prob": ({"log_probs": [0.0, 0.0, 0.0, 1j]}, "log_probs"),
    "a reward of NaN": ({"reward": float("nan")}, "reward: expected a finite number, found NaN"),
    "a reward of infinity": ({"reward": float("inf")}, "reward"),
    "a reward beyond float32": ({"reward": 1e39}, "reward"),
}


@pytest.mark.parametrize("given", CHANGED)
def test_values_that_the_log_would_change_are_refused(tmp_path, given):
    fields, words = CHANGED[given]
    with driftless_rl.RolloutLog(tmp_path, RUN) as log:
        with pytest.raises(driftless_rl.UsageError) as raised:
            log.append_all([sample(1), {**sample(2), **fields}])
        assert words in str(raised.value) and raised.value.code == 2
        assert log.end == 0


def test_values_of_other_types_are_the_same_in_the_log(tmp_path):
    with driftless_rl.RolloutLog(tmp_path, RUN) as log:
        given = {"tokens": torch.arange(6.0), "loss_mask": [True, False, True, True], "log_probs": np.zeros(4, np.float16)}
        log.append(**{**sample(1), **given})
        log.append(**sample(2, tokens=2))
        found, empty = log.get(0), log.get(1)
    assert found.tokens.tolist() == [0, 1, 2, 3, 4, 5] and found.loss_mask.tolist() == [1, 0, 1, 1]
    assert empty.tokens.tolist() == [2, 3] and len(empty.response) == 0
