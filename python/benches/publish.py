"""How long a version takes to its manifest, from host memory and from a GPU.

    python benches/publish.py [--device cpu|cuda] [--gib 4] [--density 0.01] [--turns 7] [--dir /dev/shm]

Weights have the shapes of Qwen3, as many layers as fit, and one step changes a share of the elements by one place.

From host memory, `Publisher.publish` and the command ``driftless publish`` publish the same two states in turns: both
report how long encoding and storing took, and what the call takes beyond that is Python's. The command is the Rust
call, on a mapped checkpoint. From a GPU, versions are timed from the call to its return, which is later than the
manifest; then a follower's checkpoint is compared with the tensors. The first deltas behind a version in full, behind
one by reference and after a restart are timed before that, with and without ``Publisher.prepare``. Before each delta the
publisher has ``--pause`` seconds, in which a trainer would make a step, and the baseline on disk reaches the version
before. Before the first delta the bench waits for that baseline, and then for ``--first-step`` seconds.
"""

import argparse
import json
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import driftless_rl
import torch

HIDDEN, INNER, VOCABULARY = 2048, 6144, 151936
# What a first delta is behind, and whether `prepare` was called.
FIRSTS = [("full", False), ("reference", False), ("reference", True), ("resume", False), ("resume", True)]


def shapes(gib: float) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a tied Qwen3 of about that size."""
    found = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    parts = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    layer = 0
    while sum(torch.Size(shape).numel() for shape in found.values()) * 2 < gib * 2**30 or layer == 0:
        found |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in parts.items()}
        layer += 1
    return found


def begin(gib: float, device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    normal = {"device": device, "dtype": torch.bfloat16}
    return {name: torch.randn(shape, **normal).mul_(0.02) for name, shape in shapes(gib).items()}


def step(state: dict[str, torch.Tensor], density: float) -> None:
    """Moves a share of the elements by one unit in the last place, in place."""
    for tensor in state.values():
        bits = tensor.view(-1).view(torch.int16)
        for part in bits.split(1 << 26):
            part += (torch.rand(part.shape, device=part.device) < density).to(torch.int16)


def write(state: dict[str, torch.Tensor], directory: Path) -> None:
    """A checkpoint directory with one file of weights."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    header, at = {}, 0
    for name, tensor in state.items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in state.values():
            file.write(tensor.view(-1).view(torch.uint8).numpy())


def differing(directory: Path, state: dict[str, torch.Tensor]) -> list[str]:
    """The tensors of a checkpoint that are not those of ``state``, bit for bit."""
    found = []
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        whole = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                mine = state[name].view(-1).view(torch.uint8)
                if not torch.equal(whole[start:end].to(mine.device), mine):
                    found.append(name)
    return found


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def spread(seconds: list[float]) -> str:
    low, middle, high = (1e3 * value for value in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{middle:.1f} ms ({low:.1f} to {high:.1f})"


def judge(what: str, found: float, most: float, unit: str = "") -> None:
    print(f"  {'pass' if found <= most else 'MISS'} {what}: {found:.2f}{unit} (<= {most}{unit})", flush=True)


def timed(publisher: driftless_rl.Publisher, state: dict[str, torch.Tensor], arguments: argparse.Namespace) -> float:
    """Seconds from the call to the return of the next delta."""
    step(state, arguments.density)
    time.sleep(arguments.pause)
    torch.cuda.synchronize()
    start = time.perf_counter()
    published = publisher.publish(state)
    seconds = time.perf_counter() - start
    size = sum(tensor.nbytes for tensor in state.values())
    assert published.device_bytes == size, (published.device_bytes, size)
    return seconds


def first_delta(state: dict[str, torch.Tensor], arguments: argparse.Namespace, root: Path, behind: str, prepared: bool) -> None:
    """Deltas behind a version that came about in one of three ways."""
    root.mkdir()
    store, baseline = root / "store", root / "baseline"
    if behind == "reference":
        write({name: tensor.cpu() for name, tensor in state.items()}, root / "checkpoint")
    publisher = driftless_rl.Publisher(store, "gpu", baseline_dir=baseline)
    start = time.perf_counter()
    if behind == "reference":
        publisher.publish_reference(root / "checkpoint")
    else:
        publisher.publish(state)
    if behind == "resume":
        publisher.close()
        start = time.perf_counter()
        publisher = driftless_rl.Publisher(store, "gpu", resume=True, baseline_dir=baseline)
    # Of no tensor it only waits for the baseline on disk.
    publisher.prepare({})
    begun = time.perf_counter() - start
    start = time.perf_counter()
    if prepared:
        publisher.prepare(state)
    made = time.perf_counter() - start
    time.sleep(arguments.first_step)
    times = [timed(publisher, state, arguments) for _ in range(4)]
    publisher.close()
    way = f"behind {behind}, {'prepared' if prepared else 'as it is'}"
    deltas = ", ".join(f"{1e3 * seconds:.1f}" for seconds in times)
    print(f"  {way}: begun in {begun:.2f} s, prepared in {made:.2f} s; deltas {deltas} ms", flush=True)
    judge(f"first delta over the median of the next, {way}", times[0] / statistics.median(times[1:]), 10)


def from_gpu(arguments: argparse.Namespace, root: Path) -> None:
    state = begin(arguments.gib, "cuda")
    size = sum(tensor.nbytes for tensor in state.values())
    name = torch.cuda.get_device_name()
    print(f"from a GPU ({name}): {size / 2**30:.2f} GiB in {len(state)} tensors, {arguments.density:.1%} a step", flush=True)
    for behind, prepared in FIRSTS:
        first_delta(state, arguments, root / "first", behind, prepared)
        shutil.rmtree(root / "first")
    times, memory = [], anonymous()
    with driftless_rl.Publisher(root / "store", "gpu", baseline_dir=root / "baseline") as publisher:
        start = time.perf_counter()
        publisher.publish(state)
        print(f"  version 0, in full, through the host: {time.perf_counter() - start:.1f} s", flush=True)
        for turn in range(arguments.turns + 1):
            step(state, arguments.density)
            # The baseline on disk moves while a trainer computes its next step.
            time.sleep(arguments.pause)
            start = time.perf_counter()
            published = publisher.publish(state, step=turn)
            times.append(time.perf_counter() - start)
            assert published.device_bytes == size, (published.device_bytes, size)
            parts = f"encode {1e3 * published.encode_seconds:.1f} ms, store {1e3 * published.upload_seconds:.1f} ms"
            print(f"  {1e3 * times[-1]:.1f} ms: {parts}, {published.publication_bytes} bytes, {published.density:.3%}", flush=True)
    print(f"  host memory grew by {(anonymous() - memory) / 2**20:.0f} MiB", flush=True)
    # The first one allocates.
    print(f"  publish: {spread(times[1:])}")
    judge("publish from a GPU", 1e3 * statistics.median(times[1:]), 150, " ms")
    with driftless_rl.Follower(root / "store", "gpu", root / "host") as follower:
        version = follower.advance()
    wrong = differing(root / "host", state)
    print(f"  {'MISS' if wrong else 'pass'} follower at version {version}: {len(wrong)} of {len(state)} tensors differ")


def from_host(arguments: argparse.Namespace, root: Path) -> None:
    # A GPU makes them faster.
    state = begin(arguments.gib, "cuda" if torch.cuda.is_available() else "cpu")
    states = [{name: tensor.cpu().clone() for name, tensor in state.items()}]
    step(state, arguments.density)
    states.append({name: tensor.cpu() for name, tensor in state.items()})
    for number, state in enumerate(states):
        write(state, root / f"checkpoint-{number}")
    size = sum(tensor.nbytes for tensor in states[0].values())
    print(f"from host memory: {size / 2**30:.2f} GiB in {len(states[0])} tensors, {arguments.density:.1%} a step", flush=True)
    command = [sys.executable, "-m", "driftless_rl", "publish", "--json", "--store", f"file://{root}/store", "--run", "command"]
    command += ["--baseline-dir", str(root / "baseline-command")]

    def rust(turn: int) -> float:
        run = [*command, "--resume" if turn else "--new-run", "--checkpoint", str(root / f"checkpoint-{turn % 2}")]
        told = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        return (told["encode_ms"] + told["upload_ms"]) / 1e3

    python, alone, beyond, grown, before = [], [], [], 0, anonymous()
    with driftless_rl.Publisher(root / "store", "python", baseline_dir=root / "baseline", files={"config.json": b"{}"}) as publisher:
        for turn in range(arguments.turns + 1):
            # The baseline of the turn before is at rest then.
            time.sleep(3)
            over, most = threading.Event(), [before]

            def watch() -> None:
                while not over.wait(0.005):
                    most[0] = max(most[0], anonymous())

            watcher = threading.Thread(target=watch)
            watcher.start()
            start = time.perf_counter()
            published = publisher.publish(states[turn % 2], step=turn)
            whole = time.perf_counter() - start
            over.set()
            watcher.join()
            own = rust(turn)
            if turn > 0:
                python.append(published.encode_seconds + published.upload_seconds)
                beyond.append(whole - python[-1])
                alone.append(own)
                grown = max(grown, most[0] - before)
                print(f"  python {python[-1]:.3f} s, rust {own:.3f} s, call beyond that {1e3 * beyond[-1]:.1f} ms", flush=True)
    print(f"  python {spread(python)}, rust {spread(alone)}, call beyond that {spread(beyond)}")
    whole = statistics.median(python) + statistics.median(beyond)
    judge("Publisher.publish over the Rust call", whole / statistics.median(alone), 1.1)
    print(f"  memory grew by {grown / 2**20:.0f} MiB at most, of {size / 2**20:.0f} MiB that the model has")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--pause", type=float, default=3, help="seconds before each delta")
    parser.add_argument("--first-step", type=float, default=7, help="more of them before the first one")
    parser.add_argument("--dir", help="where the store and the checkpoints go, removed afterwards")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as root:
        (from_gpu if arguments.device == "cuda" else from_host)(arguments, Path(root))


if __name__ == "__main__":
    main()
