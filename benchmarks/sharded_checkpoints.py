"""Measures the checkpoints of several processes: a save, a restore, and the memory of a save.

    python -m benchmarks.sharded_checkpoints [--gigabytes=1] [--rounds=5] [--only=8x1]

The state is that of a model whose parameters and moments are divided over a mesh of data 2, fsdp 2
and tensor 2, in one process with eight simulated devices (8x1), and in four processes with two
devices each (2x4), which save to one disk. A tenth of it is not divided.

Both sides begin with the state on the devices, and run alternately.

- A save is compared with one by hand: each process writes the bytes of its shards to one file,
  computes their CRC-32 and syncs them. What holds the steps up is compared with copying these
  bytes into memory that was written before.
- A restore to the devices is compared with reading the bytes that the devices of the process need,
  each once, from a file into memory that was written before.
- Orbax saves and restores the same state with its defaults, but without compression. It has no
  checksums of the data.

All files are in the system's cache of the disk when they are read. Of memory, the most that each
process held during a save in addition is printed.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.interleave import report

KINDS = {"8x1": (8, 1), "2x4": (2, 4)}  # devices of a process, and processes


def make_state(gigabytes: float) -> dict[str, Any]:
    """Makes arrays of float32 and bfloat16 on a mesh of all devices."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    axes = ("data", "fsdp", "tensor")
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
    layers, width = 8, 1024
    rows = max(8, round(gigabytes * 2**30 * 0.9 / (10 * layers * width)) // 8 * 8)
    state = {}

    def put(name: str, shape: tuple[int, ...], spec: PartitionSpec, dtype: str) -> None:
        draw = np.random.default_rng(len(state)).normal(size=shape).astype(dtype)
        sharding = NamedSharding(mesh, spec)
        state[name] = jax.make_array_from_callback(shape, sharding, lambda index: draw[index])

    for layer in range(layers):
        divided = PartitionSpec("fsdp", "tensor")
        put(f"params/{layer}/kernel", (rows, width), divided, "bfloat16")
        put(f"mu/{layer}/kernel", (rows, width), divided, "float32")
        put(f"nu/{layer}/kernel", (rows, width), divided, "float32")
        put(f"params/{layer}/bias", (width,), PartitionSpec(), "float32")
    rest = round(gigabytes * 2**30 * 0.1 / 4 / 512)
    put("embedding", (rest, 512), PartitionSpec(), "float32")
    return state


def shards(state: dict[str, Any], once: bool) -> list[Any]:
    """Returns the different shards of this process, or those of which it has the first copy."""
    import numpy as np

    found = []
    for array in state.values():
        different = {str(shard.index): shard for shard in array.addressable_shards}
        of_all = [shard for shard in array.addressable_shards if shard.replica_id == 0]
        found += [np.asarray(x.data) for x in (of_all if once else different.values())]
    return found


def write_by_hand(file: Path, parts: list[Any]) -> None:
    """Writes arrays one after another, with a checksum, and syncs the file."""
    with open(file, "wb") as written:
        for part in parts:
            content = memoryview(part.view("uint8").reshape(-1))  # pyright: ignore[reportArgumentType]
            zlib.crc32(content)
            written.write(content)
        written.flush()
        os.fsync(written.fileno())


@contextmanager
def most_memory(found: list[float]) -> Iterator[None]:
    """Adds the most megabytes that the process held inside the block in addition."""

    def held() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    ended, most = threading.Event(), [held()]
    before = most[0]

    def watch() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], held())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()
        found.append((most[0] - before) / 1e6)


def measure(folder: Path, gigabytes: float, rounds: int) -> None:
    """Times both sides in this process; process 0 prints."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils

    from trainer.checkpoint import integrity, reading, storage
    from trainer.train import runtime

    state = make_state(gigabytes)
    runtime.keep_freed_memory()  # as in every run
    parts, first = shards(state, once=True), jax.process_index() == 0
    target = {
        n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for n, x in state.items()
    }
    copied = [np.ones_like(part) for part in parts]
    needed = [np.array(part) for part in shards(state, once=False)]
    theirs = folder / f"needed.{jax.process_index()}"
    write_by_hand(theirs, needed)
    mine = folder / f"by_hand.{jax.process_index()}"
    numbers: dict[str, list[float]] = {}
    memory: list[float] = []
    orbax = ocp.PyTreeCheckpointer(use_compression=False)

    def timed(name: str, action: Callable[[], Any]) -> Any:
        multihost_utils.sync_global_devices(name)
        start = time.perf_counter()
        result = action()
        multihost_utils.sync_global_devices(name)
        numbers.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
        return result

    def new_folder() -> Path:
        (folder / "ours").mkdir()
        return folder / "ours"

    def commit(step: Path, manifest: str) -> None:
        (step / integrity.MANIFEST).write_text(manifest)
        storage.sync_tree(step)

    def save(leaves: Any) -> None:
        with most_memory(memory):
            storage.save_shards(new_folder, {"processes": 1}, leaves, commit)

    def copy() -> None:
        for to, part in zip(copied, parts, strict=True):
            np.copyto(to, part)

    def read_by_hand() -> None:
        with open(theirs, "rb") as file:
            for to in needed:
                file.readinto(to.view("uint8").reshape(-1))  # pyright: ignore[reportArgumentType]

    for number in range(rounds + 1):
        if first:
            shutil.rmtree(folder / "ours", ignore_errors=True)
            shutil.rmtree(folder / "orbax", ignore_errors=True)
        leaves = timed("held up", lambda: storage.shards_to_host(state))
        timed("copy", copy)
        timed("save", lambda kept=leaves: save(kept))
        timed("write", lambda: write_by_hand(mine, parts))
        timed("orbax save", lambda: orbax.save(folder / "orbax", state))
        back = timed(
            "restore", lambda: jax.block_until_ready(reading.read_state(folder / "ours", target))
        )
        timed("read", read_by_hand)
        timed(
            "orbax restore",
            lambda: jax.block_until_ready(
                orbax.restore(
                    folder / "orbax",
                    restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                    item=target,
                )
            ),
        )
        for name, leaf in back.items():
            pairs = zip(leaf.addressable_shards, state[name].addressable_shards, strict=True)
            assert all((a.data == b.data).all() for a, b in pairs), name
        del back, leaf, pairs  # their memory
        if number == 0:  # imports, compilations and first touches
            numbers.clear()
    size = sum(part.nbytes for part in parts) / 1e6
    most = multihost_utils.process_allgather(np.asarray([size, max(memory)])).reshape(-1, 2)
    if not first:
        return
    print(f"{jax.process_count()} processes with {jax.local_device_count()} devices")
    report("a save holds the steps up", numbers["held up"], numbers["copy"], 1.2, "ms", "a copy")
    report("a save", numbers["save"], numbers["write"], 1.3, "ms")
    report("a save", numbers["save"], numbers["orbax save"], 1.0, "ms", "orbax")
    report("a restore", numbers["restore"], numbers["read"], 1.5, "ms")
    report("a restore", numbers["restore"], numbers["orbax restore"], 1.0, "ms", "orbax")
    for process, (own, more) in enumerate(most):
        print(f"process {process} writes {own:.0f} MB by hand; a save held {more:.0f} MB more")
    files = [x for x in (folder / "ours").rglob("*") if x.is_file()]
    print(f"{len(files)} files for {len(state)} arrays")


def start(kind: str, gigabytes: float, rounds: int) -> None:
    """Starts the processes of one kind, and waits for them."""
    devices, count = KINDS[kind]
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
        free.close()
        flags = f"--xla_force_host_platform_device_count={devices}"
        env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "benchmarks.sharded_checkpoints", f"--rounds={rounds}"]
        command += [f"--gigabytes={gigabytes}", f"--folder={folder}", f"--address={address}"]
        command += [f"--count={count}"]
        every = [subprocess.Popen([*command, f"--index={i}"], env=env) for i in range(count)]
        for process in every:
            if process.wait():
                raise SystemExit(1)


def main() -> None:
    """Measures one process with eight devices, then four processes with two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=KINDS)
    for name in ("--folder", "--address", "--count", "--index"):  # of a process that is started
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder is None:
        for kind in [given.only] if given.only else KINDS:
            start(kind, given.gigabytes, given.rounds)
        return
    if int(given.count) > 1:
        import jax

        jax.distributed.initialize(given.address, int(given.count), int(given.index))
    measure(Path(given.folder), given.gigabytes, given.rounds)


if __name__ == "__main__":
    main()
