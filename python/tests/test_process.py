"""Forks, signals, and interpreters that end: nothing is published half."""

import os
import subprocess
import sys
import textwrap

import driftless_rl
import numpy as np
import pytest

# Publishes as rank 0 of 2: the other one never comes, so that the call waits for as long as it is let.
WAITING = """
    import os, pathlib, signal, sys, threading, time
    import driftless_rl, numpy as np

    # A shell that runs the tests in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    root = pathlib.Path(sys.argv[1])
    publisher = driftless_rl.Publisher(
        (root / "store").as_uri(), "run", rank=0, ranks=2, baseline_dir=root / "baseline", join_deadline=600.0
    )
    weight = np.zeros(1000, np.float32)

    def stored_part():
        while not any(path.is_file() and "job-0" in path.name for path in (root / "store").rglob("*")):
            time.sleep(0.01)
"""


def run_script(body: str, root, code: int = 0) -> str:
    script = textwrap.dedent(WAITING) + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout


def test_fork_is_refused_in_the_child_and_the_parent_goes_on(store):
    with store.publisher() as publisher:
        publisher.publish({"a": np.zeros(3)})
        child = os.fork()
        if child == 0:
            code = 1
            for call in (publisher.publish, publisher.publish_async):
                try:
                    call({"a": np.ones(3)})
                except driftless_rl.ForkedError as error:
                    code = 0 if "open one here" in str(error) else 2
                else:
                    os._exit(3)
            # Freed here, it must neither wait for threads that are not here nor unlock what the parent has locked.
            del publisher
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(driftless_rl.BusyError):
            store.publisher(resume=True)
        assert publisher.publish({"a": np.ones(3)}).version == 1


def test_ctrl_c_ends_a_publication_and_the_next_one_is_whole(store):
    out = run_script(
        """
        def interrupt():
            stored_part()
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            publisher.publish({"w": weight}, attempt="job-0")
        except KeyboardInterrupt:
            print("interrupted", publisher.version)
        publisher.close()
        again = driftless_rl.Publisher((root / "store").as_uri(), "run", resume=True, baseline_dir=root / "baseline")
        print(again.publish({"w": weight}).version)
        """,
        store.root,
    )
    assert out.split() == ["interrupted", "None", "0"]
    assert len(store.manifests()) == 1


def test_cancel_ends_a_publication_from_another_thread(store):
    out = run_script(
        """
        future = publisher.publish_async({"w": weight}, attempt="job-0")
        stored_part()
        assert not future.done()
        for name in ("version", "run_id"):
            try:
                getattr(publisher, name)
            except driftless_rl.BusyError:
                print(name)
        try:
            publisher.publish_async({"w": weight}, attempt="job-1")
        except driftless_rl.BusyError as error:
            print(error.retryable)
        publisher.cancel()
        try:
            future.result(timeout=60)
        except driftless_rl.CancelledError as error:
            print(error.kind)
        """,
        store.root,
    )
    assert out.split() == ["version", "run_id", "True", "Cancelled"]
    assert store.manifests() == []


def test_interpreter_that_ends_beside_a_daemon_thread_leaves_nothing_half(store):
    run_script(
        """
        def publish():
            publisher.publish({"w": weight}, attempt="job-0")

        threading.excepthook = lambda raised: None
        threading.Thread(target=publish, daemon=True).start()
        stored_part()
        """,
        store.root,
    )
    assert store.manifests() == []
    with store.publisher(resume=True) as publisher:
        assert publisher.publish({"w": np.zeros(3)}).version == 0


def test_interpreter_that_ends_while_a_tensor_comes_from_a_gpu_leaves_nothing_half(store):
    run_script(
        """
        class Device:
            type, index = "cuda", 0

        class OnGpu:
            device, dtype, layout, shape = Device, "torch.float32", "torch.strided", (1000,)
            is_contiguous = lambda self: True
            is_conj = is_neg = lambda self: False
            detach = untyped_storage = lambda self: self
            data_ptr = lambda self: weight.ctypes.data
            nbytes = lambda self: weight.nbytes

            def cpu(self):
                copying.set()
                over.wait(60)
                return weight

        copying, over = threading.Event(), threading.Event()
        publisher.close()
        settings = {"resume": True, "baseline_dir": root / "baseline", "device_base": "off"}
        publisher = driftless_rl.Publisher((root / "store").as_uri(), "run", rank=0, ranks=2, **settings)

        def publish():
            publisher.publish([(f"{i}", OnGpu()) for i in range(9)], attempt="job-0")

        threading.excepthook = lambda raised: None
        threading.Thread(target=publish, daemon=True).start()
        copying.wait(60)
        threading._register_atexit(over.set)
        """,
        store.root,
    )
    assert store.manifests() == []


def test_interpreter_that_ends_waits_for_an_asynchronous_publication(store):
    run_script(
        """
        publisher.close()
        publisher = driftless_rl.Publisher(
            (root / "store").as_uri(), "run", resume=True, baseline_dir=root / "baseline",
            files={"config.json": b'{"architectures": ["Qwen3ForCausalLM"]}'},
        )
        publisher.publish_async({"w": np.arange(1 << 22, dtype=np.int32)})
        """,
        store.root,
    )
    assert store.follow()["w"][2] == np.arange(1 << 22, dtype=np.int32).tobytes()


def test_model_is_not_copied_and_the_interpreter_runs_meanwhile(store):
    out = run_script(
        """
        publisher.close()
        publisher = driftless_rl.Publisher(
            (root / "store").as_uri(), "run", resume=True, baseline_dir=root / "baseline", threads=2, buffer_bytes=8 << 20
        )
        rng = np.random.default_rng(4)
        # Bits that do not compress: also a copy of what is stored would be as large as the model, and they are stored fast.
        model = {f"{i:02}": rng.integers(0, 1 << 16, 1 << 20, dtype=np.uint16) for i in range(24)}

        def anonymous():
            lines = pathlib.Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

        before, most, looks, over = anonymous(), 0, 0, threading.Event()

        def watch():
            global most, looks
            while not over.wait(0.001):
                most, looks = max(most, anonymous()), looks + 1

        watcher = threading.Thread(target=watch)
        watcher.start()
        publisher.publish(model)
        # The baseline moves behind it, within a bound of its own.
        over.set()
        watcher.join()
        print(sum(array.nbytes for array in model.values()), most - before, looks)
        """,
        store.root,
    )
    model, grown, looks = map(int, out.split())
    assert model == 48 << 20 and grown < model / 2, (model, grown)
    assert looks > 10, "the interpreter stood still"
