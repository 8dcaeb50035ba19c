"""Checkpoints: what was saved comes back bit for bit, or not at all and with a reason."""

import errno
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp  # which flax needs
import pytest
from jax.sharding import SingleDeviceSharding

from optim.paths import flatten
from tests import compiled_programs
from tests.runs import LONG, ROOT
from trainer import checkpoint
from trainer.__main__ import main
from trainer.checkpoint import (
    CheckpointError,
    Checkpoints,
    Retention,
    integrity,
    leaf_file,
    manager,
    reading,
    storage,
)
from trainer.train.warm_start import rename


class State(NamedTuple):
    step: Any
    params: Any
    rng: Any
    ema: Any
    opt_state: Any


def make_state(seed: int = 0) -> State:
    """A state with everything that a state may have."""
    keys = jax.random.split(jax.random.key(seed), 4)
    return State(
        step=jnp.asarray(seed, jnp.int32),
        params={
            "dense": {"kernel": jax.random.normal(keys[0], (30, 10)), "bias": jnp.ones(10)},
            "low": jax.random.normal(keys[1], (7,), jnp.bfloat16),
            "none_of_it": jnp.zeros((0, 3)),
        },
        rng=keys[2:],
        ema=None,
        opt_state=(jnp.float32(0.5), [jnp.asarray([True, False]), jnp.arange(5, dtype=jnp.int8)]),
    )


def abstract(state: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert checkpoint.digests(a) == checkpoint.digests(b)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def opened(home: Path, log: list[str]) -> Iterator[Callable[..., Checkpoints]]:
    """Opens checkpoints in one directory; closes them in the end."""
    every: list[Checkpoints] = []

    def open_one(fence: Callable[[], None] | None = None, **options: Any) -> Checkpoints:
        every.append(Checkpoints(home, Retention(**options), log=log.append, fence=fence))
        return every[-1]

    yield open_one
    for one in every:
        one.close()


# Orbax's marks of what happened when: it writes them after our list, and nothing reads them.
MARKS = {"_CHECKPOINT_METADATA", "commit_success.txt"}


def as_several(checkpoints: Checkpoints) -> Checkpoints:
    """Makes one process save as several do."""
    checkpoints._by_shards = lambda: True
    return checkpoints


def write_with_orbax(home: Path, step: int, state: State, metric: float) -> None:
    """Writes a step in the layout of 0.2.0, and of several processes until 0.3.0."""
    leaves = integrity.to_host(state)
    stored = {name: leaf.data for name, leaf in leaves.items() if leaf.data.size}
    folder = home / str(step)
    (folder / "integrity").mkdir(parents=True)
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    ocp.Checkpointer(handler).save(folder / "state", args=ocp.args.PyTreeSave(stored))
    entries = {"format": integrity.ORBAX, "leaves": integrity.manifest_entries(leaves)}
    manifest = {"step": step, "metric": metric, "processes": 1, **entries}
    (folder / "integrity/manifest.json").write_text(integrity.seal(manifest))
    for mark in MARKS:
        (folder / mark).write_text("")
    _reseal(folder)


@pytest.fixture(scope="module", params=["one file", "several", "orbax"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the steps 1 and 2, to be copied and then damaged."""
    run = tmp_path_factory.mktemp("run")
    with Checkpoints(run / "checkpoints") as checkpoints:
        for step, metric in ((1, 0.5), (2, 0.25)):
            if request.param == "orbax":
                write_with_orbax(run / "checkpoints", step, make_state(step), metric)
                continue
            if request.param == "several":
                as_several(checkpoints)
            checkpoints.save(step, make_state(step), metric=metric)
    return run


def layout(step: Path) -> str:
    """The one of the layouts above that a step has."""
    if (step / "integrity").is_dir():
        return "orbax"
    return "several" if (step / "state").is_dir() else "one file"


# ---------------------------------------------------------------------------------------------
# Saving and restoring


def test_a_state_is_restored_exactly(opened: Callable[..., Checkpoints]) -> None:
    state = make_state()
    checkpoints = opened()
    assert checkpoints.latest() is None
    assert checkpoints.save(3, state)
    checkpoints.wait()
    assert (checkpoints.latest(), checkpoints.error) == (3, None)
    restored = opened().restore(abstract(state))
    assert_same(restored, state)
    assert type(restored) is State
    for leaf, like in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert leaf.committed and not getattr(leaf.aval, "weak_type", False)
        assert leaf.aval == like.aval
        assert leaf.sharding == like.sharding


@pytest.mark.parametrize(
    "dtype",
    ["float16", "float8_e4m3fn", "float8_e5m2", "int4", "uint2", "uint32", "complex64", "bool"],
)
def test_every_dtype_is_restored(dtype: str, opened: Callable[..., Checkpoints]) -> None:
    state = {"x": jnp.asarray(np.arange(6).reshape(2, 3) % 2, dtype)}
    checkpoints = opened()
    checkpoints.save(1, state)
    assert_same(checkpoints.restore(abstract(state)), state)


def test_nan_payloads_negative_zero_and_other_key_types_are_restored(
    opened: Callable[..., Checkpoints],
) -> None:
    odd = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001], np.uint32).view(np.float32)
    state = {"odd": jnp.asarray(odd), "key": jax.random.key(3, impl="rbg")}
    checkpoints = opened()
    checkpoints.save(1, state)
    restored = checkpoints.restore(abstract(state))
    assert_same(restored, state)
    assert jax.random.key_impl(restored["key"]) == jax.random.key_impl(state["key"])


def test_a_numpy_leaf_may_change_while_it_is_saved(opened: Callable[..., Checkpoints]) -> None:
    host = np.arange(100_000.0, dtype=np.float32)
    want = host.copy()
    checkpoints = opened()
    checkpoints.save(1, {"x": host})
    host[:] = -1
    target = {"x": jax.ShapeDtypeStruct(host.shape, host.dtype)}
    assert np.array_equal(checkpoints.restore(target)["x"], want)


def test_a_state_may_be_donated_while_it_is_saved(opened: Callable[..., Checkpoints]) -> None:
    checkpoints = opened(keep_latest=100)

    @jax.jit
    def make() -> Any:
        return {str(i): jnp.full((50_000,), float(i)) for i in range(8)}

    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 1.01 + 1, s), donate_argnums=0)
    state, want = step(make()), {}
    for number in range(12):
        want[number] = checkpoint.digests(jax.tree.map(jnp.copy, state))
        assert checkpoints.save(number, state)
        for _ in range(5):
            state = step(state)
    target = abstract(state)
    for number, digests in want.items():
        assert checkpoint.digests(checkpoints.restore(target, step=number)) == digests
    assert checkpoints.error is None


def test_nothing_compiles_at_the_second_step_after_a_restore(
    opened: Callable[..., Checkpoints], compilations: Any
) -> None:
    step = jax.jit(
        lambda s: s._replace(step=s.step + 1, params=jax.tree.map(lambda x: x + x, s.params)),
        donate_argnums=0,
    )
    checkpoints = opened()
    device = jax.devices()[0]
    state = step(jax.device_put(make_state(), device))
    target = abstract(state)
    checkpoints.save(1, state)
    restored = checkpoints.restore(target)
    with compilations() as names:
        for _ in range(3):
            state, restored = step(state), step(restored)
    assert names == []
    assert_same(state, restored)


def test_a_saved_step_is_not_saved_again(opened: Callable[..., Checkpoints]) -> None:
    checkpoints = opened()
    assert checkpoints.save(1, {"x": jnp.zeros(3)})
    assert not checkpoints.save(1, {"x": jnp.ones(3)})
    assert checkpoints.error is None
    restored = checkpoints.restore({"x": jax.ShapeDtypeStruct((3,), jnp.float32)})
    assert np.array_equal(restored["x"], np.zeros(3))


def test_a_state_of_empty_leaves_is_saved_and_restored(opened: Callable[..., Checkpoints]) -> None:
    state = {"empty": jnp.zeros((0,)), "none": None}
    checkpoints = opened()
    checkpoints.save(1, state)
    assert_same(checkpoints.restore(abstract(state)), state)


def test_later_steps_can_be_discarded(opened: Callable[..., Checkpoints]) -> None:
    checkpoints = opened(keep_latest=5)
    for number in (1, 2, 3):
        checkpoints.save(number, {"x": jnp.full(2, float(number))})
    assert checkpoints.discard_after(1) == [2, 3]
    assert checkpoints.steps() == [1]
    assert checkpoints.save(2, {"x": jnp.full(2, 20.0)})
    restored = checkpoints.restore({"x": jax.ShapeDtypeStruct((2,), jnp.float32)})
    assert restored["x"][0] == 20


@pytest.mark.parametrize("bad", [1.5, "text", np.array([object()])], ids=["float", "str", "object"])
def test_a_leaf_that_is_not_an_array_is_refused(
    bad: Any, opened: Callable[..., Checkpoints]
) -> None:
    with pytest.raises(ValueError, match=r"'params/x'"):
        opened().save(1, {"params": {"x": bad}})


def test_two_leaves_with_one_path_are_refused(opened: Callable[..., Checkpoints]) -> None:
    with pytest.raises(ValueError, match="a/b"):
        opened().save(1, {"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)})


def test_a_state_of_more_bytes_than_are_written_at_once_is_restored(
    opened: Callable[..., Checkpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaf_file, "_PART", 500)
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), fsync(file)))
    state = {str(i): jnp.full((i, 7), i % 3, jnp.float32) for i in range(30)}
    checkpoints = opened(keep_latest=3)
    checkpoints.save(1, state)
    assert_same(checkpoints.restore(abstract(state)), state)
    assert len(synced) > 20
    assert checkpoint.check_leaves(checkpoints.directory) == {1: []}


def test_the_safetensors_library_reads_what_was_saved(
    opened: Callable[..., Checkpoints], home: Path
) -> None:
    """The file is one that the authors' own program reads: names, shapes, dtypes and bits."""
    import safetensors
    import safetensors.flax

    state = make_state()._asdict() | {"odd": jnp.asarray([1.5, 2.5], jnp.float8_e5m2)}
    checkpoints = opened()
    checkpoints.save(1, state)
    checkpoints.wait()
    read = safetensors.flax.load_file(home / "1" / leaf_file.LEAVES)
    want = {
        name: jax.random.key_data(leaf) if integrity.is_key(leaf) else leaf
        for name, leaf in flatten(state, verbatim=True).items()
    }
    want["odd"] = state["odd"].view(jnp.uint8)  # numpy has no such dtype: its bytes
    assert checkpoint.digests(read) == checkpoint.digests(want)
    with safetensors.safe_open(home / "1" / leaf_file.LEAVES, framework="np") as file:
        assert file.get_slice("params/low").get_dtype() == "BF16"
        assert file.get_slice("opt_state/1/0").get_dtype() == "BOOL"
        assert np.array_equal(
            file.get_slice("params/dense/kernel")[3:5], state["params"]["dense"]["kernel"][3:5]
        )


def test_a_leaf_begins_at_a_multiple_of_the_size_of_its_items(
    opened: Callable[..., Checkpoints], home: Path
) -> None:
    """So that a program can map the file into memory, as safetensors does."""
    checkpoints = opened()
    checkpoints.save(1, make_state())
    checkpoints.wait()
    for name, entry in reading.read_manifest(home / "1")["leaves"].items():
        assert entry["start"] % np.dtype(integrity.dtype(entry["stored_dtype"])).itemsize == 0, name


@pytest.mark.parametrize("how", ["handler", "manager"])
def test_orbax_alone_restores_what_it_saved_for_several_processes(
    how: str, opened: Callable[..., Checkpoints], home: Path
) -> None:
    import orbax.checkpoint as ocp

    state = make_state()
    checkpoints = as_several(opened())
    checkpoints.save(1, state)
    checkpoints.wait()
    want = {
        name: jax.random.key_data(leaf) if integrity.is_key(leaf) else leaf
        for name, leaf in flatten(state, verbatim=True).items()
        if leaf.size
    }
    alone = """
        import sys
        sys.modules["trainer"] = sys.modules["optim"] = None
        import numpy as np, orbax.checkpoint as ocp
        read = ocp.PyTreeCheckpointer().restore(sys.argv[1])
        np.testing.assert_array_equal(read["params/dense/bias"], np.ones(10))
        print(len(read))
    """
    if how == "handler":
        assert _python(alone, home / "1/state").communicate(timeout=LONG)[0] == f"{len(want)}\n"
        read = ocp.PyTreeCheckpointer().restore(home / "1/state")
    else:
        with ocp.CheckpointManager(home) as manager:
            assert manager.all_steps() == [1]
            read = manager.restore(1, args=ocp.args.Composite(state=ocp.args.PyTreeRestore()))
        read = read["state"]
    assert checkpoint.digests(read) == checkpoint.digests(want)


def test_a_checkpoint_of_the_first_release_is_restored(tmp_path: Path) -> None:
    """It was written by 0.2.0, whose runs of one process saved in the layout of orbax, too."""
    run = tmp_path / "run"
    shutil.copytree(Path(__file__).with_name("saved_by_0.2.0"), run)
    assert checkpoint.check_leaves(run) == {1: []}
    assert checkpoint.ls(run)[0].metric == 0.5
    restored = Checkpoints(run / "checkpoints").restore(abstract(make_state()))
    assert jax.tree.structure(restored) == jax.tree.structure(make_state(1))
    # What was drawn then is drawn now with other last bits if XLA optimizes less.
    drawn = "cfdee921eb2c93fb63e3ac4f87cc53ae4ba45af9f2a365e00f21083af95a372c"
    kernel = {"params/dense/kernel": f"float32[30,10]:{drawn}"}
    assert checkpoint.digests(restored) == checkpoint.digests(make_state(1)) | kernel
    with Checkpoints(run / "checkpoints", Retention(keep_latest=1)) as checkpoints:
        checkpoints.save(2, make_state(2), metric=0.25)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2], "The older one has the best metric."
        checkpoints.save(3, make_state(3), metric=0.75)
    assert checkpoints.steps() == [3]


def test_a_checkpoint_of_two_processes_of_0_3_0_is_restored(tmp_path: Path) -> None:
    """Orbax wrote it, each process a half of "w", with a manifest of process 1 beside the other."""
    run = tmp_path / "run"
    shutil.copytree(Path(__file__).with_name("saved_by_0.3.0_in_two_processes"), run)
    state = {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "b": np.ones(3, np.float32)}
    state = jax.device_put({**state, "key": jax.random.key(5)})
    assert checkpoint.check_leaves(run) == {1: []}
    assert_same(Checkpoints(run / "checkpoints").restore(abstract(state)), state)
    step = run / "checkpoints/1"
    _poke(step, "w", 5, chunk="1.0")  # of process 1
    _reseal(step)
    assert checkpoint.check_leaves(run)[1] == [
        "w: its data do not have the checksum they were saved with"
    ]


@pytest.mark.parametrize(
    ("shape", "shard", "itemsize", "most", "want"),
    [
        ((), (), 4, 16, ()),
        ((0, 3), (0, 3), 4, 16, (1, 3)),  # is not stored
        ((8, 4), (8, 4), 4, 1 << 20, (8, 4)),
        ((50257, 100), (50257, 100), 4, 1 << 24, (25129, 100)),  # rounded up: 50257 is prime
        ((50257 * 2, 100), (50257, 100), 4, 1 << 24, (50257, 50)),
        ((64, 64), (16, 64), 4, 1024, (4, 64)),
        ((60, 64), (30, 64), 4, 1024, (3, 64)),  # 8 parts do not divide 30, 10 do
        ((6, 8, 8), (2, 8, 8), 4, 64, (1, 2, 8)),
    ],
)
def test_chunks_divide_the_shards(
    shape: Any, shard: Any, itemsize: int, most: int, want: Any
) -> None:
    assert storage.chunk_shape(shape, shard, itemsize, most) == want


def test_a_save_returns_before_anything_is_written(
    opened: Callable[..., Checkpoints], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, write_step = threading.Event(), leaf_file.write_step

    def slow(*args: Any) -> Any:
        assert may_write.wait(20)
        return write_step(*args)

    monkeypatch.setattr(leaf_file, "write_step", slow)
    checkpoints = opened()
    assert checkpoints.save(1, make_state())
    assert checkpoints.steps() == []
    may_write.set()
    checkpoints.wait()
    assert (checkpoints.steps(), checkpoints.error) == ([1], None)


def test_only_the_owner_may_read_checkpoints(
    opened: Callable[..., Checkpoints], home: Path
) -> None:
    checkpoints = opened()
    checkpoints.save(1, {"x": jnp.ones(2)})
    checkpoints.wait()
    assert home.stat().st_mode & 0o077 == 0
    assert (home / "1").stat().st_mode & 0o077 == 0


# ---------------------------------------------------------------------------------------------
# What does not fit


def _with(state: State, **params: Any) -> State:
    return abstract(state._replace(params=state.params | params))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: _with(s, low=jnp.zeros(8, jnp.bfloat16)),
            "params/low: .*bfloat16.7.*bfloat16.8",
        ),
        (lambda s: _with(s, low=jnp.zeros(7)), r"params/low: .*bfloat16\[7\].*float32\[7\]"),
        (lambda s: _with(s, more=jnp.zeros(7)), "params/more: .*no such leaf.*float32.7"),
        (lambda s: abstract(s._replace(rng=None)), r"rng: .*key<fry>\[2\].*no such leaf"),
        (lambda s: abstract(s._replace(rng=jax.random.key(0))), r"key<fry>\[2\].*key<fry>\[\]"),
        (lambda s: abstract(s._replace(ema=s.params)), "ema/low: .*no such leaf"),
        (lambda s: _with(s, none_of_it=jnp.zeros((3, 0))), r"float32\[0,3\].*float32\[3,0\]"),
    ],
    ids=["shape", "dtype", "missing", "superfluous", "key", "subtree", "empty"],
)
def test_a_state_that_does_not_fit_is_refused_with_the_leaf_and_both_sides_named(
    change: Callable[[State], Any], said: str, saved: Path
) -> None:
    with Checkpoints(saved / "checkpoints") as checkpoints:
        with pytest.raises(CheckpointError, match=said) as error:
            checkpoints.restore(change(make_state()))
    assert "None" not in str(error.value)
    assert len(str(error.value).splitlines()) <= 6
    assert sorted(checkpoints.steps()) == [1, 2], "What does not fit is not damaged."


def test_a_missing_step_is_an_error_that_lists_the_existing_ones(
    saved: Path, opened: Callable[..., Checkpoints]
) -> None:
    with pytest.raises(CheckpointError, match=r"step 9.*\[1, 2\]"):
        Checkpoints(saved / "checkpoints").restore(abstract(make_state()), step=9)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        opened().restore(abstract(make_state()))


# ---------------------------------------------------------------------------------------------
# Retention


def _save_metrics(checkpoints: Checkpoints, metrics: list[float | None]) -> list[int]:
    for step, metric in enumerate(metrics):
        checkpoints.save(step, {"x": jnp.zeros(2)}, metric=metric)
    checkpoints.wait()
    return checkpoints.steps()


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("options", "metrics", "kept"),
    [
        ({}, [0.1, 0.9, 0.2, 0.3, 0.4], [1, 3, 4]),
        ({"best_mode": "min"}, [0.3, 0.1, 0.2, 0.3, 0.4], [1, 3, 4]),
        ({"keep_best": 0}, [0.9, 0.1, 0.2], [1, 2]),
        ({"keep_best": 2, "keep_latest": 1}, [0.5, 0.9, 0.7, 0.1], [1, 2, 3]),
        ({"keep_latest": 1}, [0.1, NAN, 0.05, NAN], [0, 3]),
        ({"keep_latest": 1}, [NAN, NAN, NAN], [2]),
        ({"keep_latest": 1}, [INF, 0.5, 0.4, 0.3], [1, 3]),
        ({"keep_latest": 1, "best_mode": "min"}, [-INF, 0.5, 0.4, 0.6], [2, 3]),
        ({"keep_latest": 1}, [None, None, 0.5, None], [2, 3]),
        ({"keep_latest": 1}, [0.5, 0.5, 0.5], [0, 2]),
    ],
)
def test_the_latest_and_the_best_are_kept(
    options: Any, metrics: list[float | None], kept: list[int], opened: Callable[..., Checkpoints]
) -> None:
    assert _save_metrics(opened(**options), metrics) == kept


def test_the_best_is_still_known_after_a_restart(opened: Callable[..., Checkpoints]) -> None:
    _save_metrics(opened(keep_latest=1), [0.1, 0.9, 0.2])
    again = opened(keep_latest=1)
    again.save(7, {"x": jnp.zeros(2)}, metric=0.3)
    again.wait()
    assert again.steps() == [1, 7]


def test_saving_a_step_again_replaces_its_metric(
    opened: Callable[..., Checkpoints],
) -> None:
    _save_metrics(opened(), [None, 0.5, 0.9])
    again = opened()
    again.record_metric(1, 0.5)
    again.record_metric(2, 0.9)  # as a run does from its metrics
    assert again.discard_after(1) == [2]
    for step, metric in ((2, 0.1), (3, 0.6), (4, 0.2)):
        again.save(step, {"x": jnp.zeros(2)}, metric=metric)
        again.wait()
        again._is_open = False  # as after a full disk: the metrics are read from disk again
    again.save(5, {"x": jnp.zeros(2)}, metric=0.2)
    again.wait()
    assert again.steps() == [3, 4, 5]


def test_steps_listed_in_keep_always_are_kept(opened: Callable[..., Checkpoints]) -> None:
    assert _save_metrics(opened(keep_always=[0]), [0.1, 0.2, 0.9, 0.3, 0.4]) == [0, 2, 3, 4]


@pytest.mark.parametrize("options", [{"keep_latest": 0}, {"keep_best": -1}, {"best_mode": "up"}])
def test_bad_options_are_refused(options: Any, opened: Callable[..., Checkpoints]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        opened(**options)


# ---------------------------------------------------------------------------------------------
# Damage


def _copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def _files(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


def _flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(bytes(content))


def test_a_flipped_byte_in_any_file_is_detected(saved: Path, tmp_path: Path) -> None:
    run = _copy(saved, tmp_path)
    step = run / "checkpoints" / "2"
    flips = 0
    for path in _files(step):
        if path.parent == step and path.name in MARKS:
            continue
        content = path.read_bytes()
        for position in {0, len(content) - 1, *range(3, len(content), max(1, len(content) // 60))}:
            _flip(path, position)
            assert checkpoint.check_leaves(run, 2)[2], (path, position)
            path.write_bytes(content)
            flips += 1
    assert flips > 100
    assert checkpoint.check_leaves(run) == {1: [], 2: []}


def test_a_flipped_byte_in_any_leaf_is_detected_by_the_checksum_of_the_leaf(
    saved: Path, tmp_path: Path
) -> None:
    """Where the files are as their list says, the leaf is named."""
    state = make_state(2)
    for name, leaf in flatten(state, verbatim=True).items():
        data = jax.random.key_data(leaf) if integrity.is_key(leaf) else leaf
        content = np.ascontiguousarray(np.asarray(data)).tobytes()
        if not content:
            continue
        for position in {0, len(content) // 2, len(content) - 1}:
            run = tmp_path / "run"
            shutil.rmtree(run, ignore_errors=True)
            _copy(saved, tmp_path)
            step = run / "checkpoints" / "2"
            _poke(step, name, position)
            _reseal(step)
            problems = checkpoint.check_leaves(run, 2)[2]
            assert len(problems) == 1 and name in problems[0], (name, position)


def _poke(step: Path, name: str, position: int, chunk: str = "") -> None:
    """Changes a byte of a leaf; in a database of tensorstore, so that its own checksums hold."""
    import tensorstore as ts

    if layout(step) == "one file":
        return _flip(
            step / leaf_file.LEAVES, reading.read_manifest(step)["leaves"][name]["start"] + position
        )
    base = f"file://{step}/state/"
    kvstore = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    (key,) = [
        key
        for key in kvstore.list().result()
        if key.decode().startswith(f"{name}/{chunk}") and not key.endswith((b".zarray", b".json"))
    ]
    content = bytearray(kvstore.read(key).result().value)
    content[position] ^= 0x10
    kvstore.write(key, bytes(content)).result()


def _without(key: str) -> Callable[[Path], None]:
    """Removes keys of the database; the list of files then fits."""

    def damage(step: Path) -> None:
        import tensorstore as ts

        base = f"file://{step}/state/"
        kvstore = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
        kvstore.delete_range(ts.KvStore.KeyRange(f"{key}/", f"{key}0")).result()
        _reseal(step)

    return damage


def _of_another_step(step: Path) -> None:
    """Takes the data of a leaf, with their checksum, from the step before."""
    import tensorstore as ts

    key = b"params/dense/kernel/c/0/0"
    before, database = (
        ts.KvStore.open({"driver": "ocdbt", "base": f"file://{each}/state/"}).result()
        for each in (step.with_name("1"), step)
    )
    database.write(key, before.read(key).result().value).result()
    _reseal(step)


def _reseal(step: Path) -> None:
    """Writes the list of files anew, of a step that has one."""
    if layout(step) == "several":
        files = integrity.file_list(step, storage.SMALL)
        manifest = reading.read_manifest(step) | {"files": files}
        (step / "manifest.json").write_text(integrity.seal(manifest))
    if layout(step) == "orbax":
        listing = {"format": integrity.ORBAX, "files": integrity.file_list(step)}
        (step / integrity.FILES).write_text(integrity.seal(listing))


@pytest.mark.parametrize("reseal", [False, True], ids=["as found", "list of files made to fit"])
def test_a_damaged_checkpoint_is_set_aside_and_the_previous_one_used(
    reseal: bool, saved: Path, tmp_path: Path, capfd: Any
) -> None:
    run = _copy(saved, tmp_path)
    step = run / "checkpoints" / "2"
    if reseal:
        _poke(step, "params/dense/kernel", 100)
        _reseal(step)
    else:
        _flip(max(_files(step), key=lambda path: path.stat().st_size), 500)
    log: list[str] = []
    with Checkpoints(run / "checkpoints", log=log.append) as checkpoints:
        assert_same(checkpoints.restore(abstract(make_state())), make_state(1))
        assert len(log) == 1 and "step 2 is damaged" in log[0] and "damaged/2" in log[0]
        if reseal:
            assert "params/dense/kernel" in log[0]
        assert (checkpoints.steps(), checkpoints.latest()) == ([1], 1)
        assert checkpoints.save(2, make_state(3), metric=0.1), "The step can be saved again."
        assert_same(checkpoints.restore(abstract(make_state())), make_state(3))
    assert _files(run / "checkpoints" / "damaged" / "2")
    assert capfd.readouterr() == ("", "")


def _remove(pattern: str) -> Callable[[Path], None]:
    def damage(step: Path) -> None:
        for path in [*step.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def _overwrite(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(step: Path) -> None:
        (step / name).write_bytes(content)

    return damage


def _largest(step: Path) -> Path:
    """The file with arrays, or the largest of them."""
    found = [path for path in _files(step) if path.suffix != ".json"]
    return max(found, key=lambda path: path.stat().st_size)


def _truncate(step: Path) -> None:
    os.truncate(_largest(step), _largest(step).stat().st_size // 2)


def _lengthen(step: Path) -> None:
    path = _largest(step)
    path.write_bytes(path.read_bytes() + b"x")


def _forge(step: Path) -> None:
    (path,) = step.rglob("manifest.json")
    outer = json.loads(path.read_text())
    outer["manifest"]["metric"] = 1.0
    path.write_text(json.dumps(outer))
    if layout(step) == "orbax":
        _reseal(step)


def _loop(name: str) -> Callable[[Path], None]:
    def damage(step: Path) -> None:
        (step / name).unlink()
        (step / name).symlink_to(Path(name).name)

    return damage


def _rewritten(**changes: Any) -> Callable[[Path], None]:
    """Changes entries of the manifest, or of the first leaf that has them, and seals it again."""

    def damage(step: Path) -> None:
        manifest = json.loads((step / "manifest.json").read_text())["manifest"]
        leaf = manifest["leaves"]["params/dense/kernel"]
        for name, value in changes.items():
            (leaf if name in leaf else manifest)[name] = value
        (step / "manifest.json").write_text(integrity.seal(manifest))

    return damage


Damage = dict[str, tuple[Callable[[Path], None], str]]
ANY_DAMAGE: Damage = {
    "truncated": (_truncate, "bytes instead of"),
    "longer": (_lengthen, "bytes instead of"),
    "nothing": (_remove("*"), "manifest.json is missing"),
    "forged manifest": (_forge, "does not have the hash that it states"),
}
ONE_FILE_DAMAGE: Damage = {
    "no manifest": (_remove("manifest.json"), "the file manifest.json is missing"),
    "no leaves": (_remove("state.safetensors"), "the file state.safetensors is missing"),
    "a loop of links": (_loop("state.safetensors"), "the file state.safetensors is missing"),
    "a loop for a manifest": (_loop("manifest.json"), "the file manifest.json is missing"),
    "manifest of zeros": (_overwrite("manifest.json", bytes(900)), "manifest.json cannot be used"),
    "deep manifest": (
        _overwrite("manifest.json", b"[" * 100_000),
        "manifest.json cannot be used",
    ),
    "another header": (
        lambda step: _flip(step / "state.safetensors", 30),
        "was changed: the checksum of its header differs",
    ),
    "a later format": (_rewritten(format=4), "it has format 4, and 1 to 3 can be read"),
    "no header": (_rewritten(header=None), "does not fit"),
    "a huge leaf": (_rewritten(stored_shape=[1 << 40, 1 << 40]), "bytes instead of"),
    "a leaf of no dtype": (_rewritten(stored_dtype="float31"), "does not fit"),
    "a leaf with a negative side": (_rewritten(stored_shape=[-30, -10]), "does not fit"),
    "a leaf past the end": (_rewritten(start=10**6), "ends within a leaf"),
    "a leaf before the file": (_rewritten(start=-8), "does not fit"),
    "a leaf elsewhere": (_rewritten(start=660), "the checksum they were saved with"),
}
SEVERAL_DAMAGE: Damage = {
    "no manifest": (_remove("manifest.json"), "the file manifest.json is missing"),
    "no state": (_remove("state"), "is missing"),
    "no index": (_remove("state/manifest.ocdbt"), "state/manifest.ocdbt is missing"),
    "no data": (_remove("state/ocdbt.process_0/d/*"), "is missing"),
    "a loop for a manifest": (_loop("manifest.json"), "the file manifest.json is missing"),
    "manifest of zeros": (_overwrite("manifest.json", bytes(900)), "manifest.json cannot be used"),
    "deep manifest": (
        _overwrite("manifest.json", b"[" * 100_000),
        "manifest.json cannot be used",
    ),
    "a later format": (_rewritten(format=4), "it has format 4, and 1 to 3 can be read"),
    "a huge leaf": (_rewritten(stored_shape=[1 << 40, 1 << 40]), "float32[30,10] was read, not"),
    "a leaf of another dtype": (_rewritten(stored_dtype="int32"), "was read, not int32[30,10]"),
    "a chunk of another step": (_of_another_step, "params/dense/kernel: its data do not have"),
    "a chunk that is gone": (
        _without("params/dense/kernel/c"),
        "params/dense/kernel: its data do not have the checksum",
    ),
    "an array that is gone": (
        _without("params/dense/kernel"),
        "params/dense/kernel: its data do not have the checksum",
    ),
}
ORBAX_DAMAGE: Damage = {
    "no manifest": (_remove("integrity/manifest.json"), "manifest.json is missing"),
    "no list of files": (_remove("integrity/files.json"), "files.json is missing"),
    "no integrity": (_remove("integrity"), "is missing"),
    "no state": (_remove("state"), "is missing"),
    "no index": (_remove("state/manifest.ocdbt"), "state/manifest.ocdbt is missing"),
    "no data": (_remove("state/d/*"), "is missing"),
    "no mark": (_remove("commit_success.txt"), "commit_success.txt is missing"),
    "manifest of zeros": (
        _overwrite("integrity/manifest.json", bytes(900)),
        "manifest.json cannot be used",
    ),
    "deep manifest": (
        _overwrite("integrity/manifest.json", b"[" * 100_000),
        "manifest.json cannot be used",
    ),
}


DAMAGE = {"one file": ONE_FILE_DAMAGE, "several": SEVERAL_DAMAGE, "orbax": ORBAX_DAMAGE}


@pytest.mark.parametrize("kind", ANY_DAMAGE | ONE_FILE_DAMAGE | SEVERAL_DAMAGE | ORBAX_DAMAGE)
def test_each_kind_of_damage_is_named(kind: str, saved: Path, tmp_path: Path, capfd: Any) -> None:
    kinds = ANY_DAMAGE | DAMAGE[layout(saved / "checkpoints/1")]
    if kind not in kinds:
        return  # of the other layout
    damage, said = kinds[kind]
    run = _copy(saved, tmp_path)
    damage(run / "checkpoints" / "2")
    assert any(said in line for line in checkpoint.check_leaves(run)[2])
    assert checkpoint.check_leaves(run)[1] == []
    log: list[str] = []
    with Checkpoints(run / "checkpoints", log=log.append) as checkpoints:
        assert_same(checkpoints.restore(abstract(make_state())), make_state(1))
    assert len(log) == 1 and "step 2" in log[0]
    assert capfd.readouterr() == ("", "")


def test_checkpoints_with_garbage_in_orbaxs_marker_files_are_restored(
    saved: Path, tmp_path: Path
) -> None:
    run = _copy(saved, tmp_path)
    if layout(run / "checkpoints/1") != "orbax":
        return
    for name in MARKS:
        (run / "checkpoints" / "2" / name).write_bytes(b"\xff\x00{")
    with Checkpoints(run / "checkpoints", Retention(keep_latest=5)) as checkpoints:
        assert_same(checkpoints.restore(abstract(make_state())), make_state(2))
        assert checkpoints.save(3, make_state(3))
    assert checkpoints.steps() == [1, 2, 3]


def test_an_error_is_raised_if_all_checkpoints_are_damaged(saved: Path, tmp_path: Path) -> None:
    run = _copy(saved, tmp_path)
    for number in ("1", "2"):
        _truncate(run / "checkpoints" / number)
    log: list[str] = []
    checkpoints = Checkpoints(run / "checkpoints", log=log.append)
    with pytest.raises(CheckpointError, match="all 2 damaged"):
        checkpoints.restore(abstract(make_state()))
    assert len(log) == 2
    assert sorted(p.name for p in (run / "checkpoints" / "damaged").iterdir()) == ["1", "2"]


@pytest.mark.parametrize("spelled", ["{}", "./{}", "{}/checkpoints", "../{above}/{}"])
def test_a_relative_folder_is_read_like_an_absolute_one(
    spelled: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _copy(saved, tmp_path)
    monkeypatch.chdir(tmp_path)
    relative = spelled.format(run.name, above=tmp_path.name)
    assert checkpoint.check_leaves(relative) == {1: [], 2: []}
    assert checkpoint.diff_checkpoints(relative, 2, 2, other=run) == []
    assert (
        checkpoint.diff_checkpoints(relative, 1, 2) == checkpoint.diff_checkpoints(run, 1, 2) != []
    )
    ours, theirs = checkpoint.load_params(relative), checkpoint.load_params(run)
    assert_same(ours, theirs)
    assert main(["checkpoint", "check", relative]) == 0
    assert main(["checkpoint", "diff", relative, "--other_step=1"]) == 1


def test_opening_read_only_moves_and_saves_nothing(saved: Path, tmp_path: Path) -> None:
    run = _copy(saved, tmp_path)
    _truncate(run / "checkpoints" / "2")
    log: list[str] = []
    with Checkpoints(run / "checkpoints", log=log.append, read_only=True) as checkpoints:
        assert_same(checkpoints.restore(abstract(make_state())), make_state(1))
        with pytest.raises(ValueError, match="read only"):
            checkpoints.save(3, make_state())
    assert log and checkpoints.steps() == [1, 2]


def test_other_folders_are_left_alone(opened: Callable[..., Checkpoints], home: Path) -> None:
    for name in ("damaged", "notes", "007", "-1", "1e3", "+3"):
        (home / name).mkdir(parents=True)
    checkpoints = opened()
    assert checkpoints.steps() == []
    checkpoints.save(1, {"x": jnp.ones(1)})
    checkpoints.wait()
    assert checkpoints.steps() == [1]
    assert (home / "notes").is_dir() and (home / "007").is_dir()


# ---------------------------------------------------------------------------------------------
# Errors of the disk, and the fence


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("A file system can be mounted by root only.")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_reported_once_and_saving_resumes_later(
    small_disk: Path, log: list[str], capfd: Any
) -> None:
    state = {str(i): jnp.arange(5_000.0) + i for i in range(40)}
    with Checkpoints(
        small_disk / "checkpoints", Retention(keep_latest=1), log=log.append
    ) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        (small_disk / "fill").write_bytes(bytes(2_600_000))
        for step in (2, 3):
            checkpoints.save(step, state)
            checkpoints.wait()
            assert checkpoints.error is not None and f"step {step}" in checkpoints.error
            assert "No space left on device" in checkpoints.error
        assert len(log) == 1 and "step 1" in log[0]
        assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["1"]
        assert_same(checkpoints.restore(abstract(state)), state)
        (small_disk / "fill").unlink()
        checkpoints.save(4, state)
        checkpoints.wait()
        assert checkpoints.error is None and checkpoints.steps() == [4]
        assert len(log) == 2 and "again" in log[1]
    assert capfd.readouterr() == ("", "")


def test_a_directory_that_cannot_be_made_is_an_error_of_the_save(
    tmp_path: Path, log: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints", log=log.append)
    assert not checkpoints.save(1, {"x": jnp.ones(1)})
    assert checkpoints.error and "Not a directory" in checkpoints.error
    assert len(log) == 1


def test_a_checkpoint_without_its_arrays_is_not_committed(
    opened: Callable[..., Checkpoints],
    home: Path,
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensorstore spells paths in UTF-8 and may have written them to another folder."""
    checkpoints = as_several(opened(keep_latest=1))
    write_index = storage._write_index

    def elsewhere(directory: Path, wrote: Any, leaves: Any) -> None:
        write_index(directory, [] if directory.parent.name[0] == "2" else wrote, leaves)

    monkeypatch.setattr(storage, "_write_index", elsewhere)
    for step in (1, 2):
        checkpoints.save(step, make_state())
        checkpoints.wait()
    said = "the index of its arrays, state/manifest.ocdbt, was not written to"
    assert checkpoints.error and said in checkpoints.error
    assert len(log) == 1 and "The newest is of step 1" in log[0]
    assert [path.name for path in home.iterdir()] == ["1"]


@pytest.mark.parametrize("what", ["file", "link"])
def test_a_file_in_place_of_the_folder_for_removed_checkpoints_is_replaced(
    what: str, opened: Callable[..., Checkpoints], home: Path, log: list[str], tmp_path: Path
) -> None:
    home.mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("")
    checkpoints = opened(keep_latest=1)
    for step in (1, 2, 3):
        if what == "link":
            (home / "removed").symlink_to(tmp_path / "mine")
        else:
            (home / "removed").write_text("")
        checkpoints.save(step, {"x": jnp.ones(1)})
        checkpoints.wait()
    checkpoints.prune()
    assert [path.name for path in home.iterdir()] == ["3"] and log == []
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis"]


def test_a_file_in_place_of_the_folder_for_damaged_checkpoints_is_named(
    saved: Path, tmp_path: Path
) -> None:
    run = _copy(saved, tmp_path)
    _flip(max(_files(run / "checkpoints" / "2"), key=lambda path: path.stat().st_size), 500)
    (run / "checkpoints" / "damaged").write_text("")
    with Checkpoints(run / "checkpoints") as checkpoints:
        with pytest.raises(CheckpointError, match="/damaged: it is a file. Move it away"):
            checkpoints.restore(abstract(make_state()))
    (run / "checkpoints" / "damaged").unlink()
    with Checkpoints(run / "checkpoints", log=lambda line: None) as checkpoints:
        assert_same(checkpoints.restore(abstract(make_state())), make_state(1))


def test_a_disk_that_cannot_be_read_for_a_while_damages_nothing(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def stale(*args: Any, **options: Any) -> Any:
        raise lost

    def exhausted(*args: Any, **options: Any) -> Any:
        raise ValueError("RESOURCE_EXHAUSTED: Failed to open [os_error_code='24']")

    def unavailable(*args: Any, **options: Any) -> Any:
        raise RuntimeError("the read of x failed") from ValueError("UNAVAILABLE: try later")

    run = _copy(saved, tmp_path)
    of_tensorstore = [
        (os, "walk", lambda _, onerror: onerror(lost), "Stale file handle"),
        (storage.ts, "open", exhausted, "Too many open files"),
        (storage.ts, "open", unavailable, "UNAVAILABLE: try later"),
    ]
    of_layout = {
        "one file": [
            (leaf_file, "open_regular", stale, "Stale file handle"),
            (leaf_file, "_read_leaf", stale, "Stale file handle"),
        ],
        "several": [(integrity, "size_and_crc", stale, "Stale file handle"), *of_tensorstore],
        "orbax": [(integrity, "size_and_crc", stale, "Stale file handle"), *of_tensorstore],
    }
    for owner, name, failing, said in (
        (reading, "read_regular", stale, "Stale file handle"),
        *of_layout[layout(run / "checkpoints/1")],
    ):
        with monkeypatch.context() as patch, Checkpoints(run / "checkpoints") as checkpoints:
            patch.setattr(owner, name, failing)
            with pytest.raises(CheckpointError, match=f"read now: {said}. Nothing was changed"):
                checkpoints.restore(abstract(make_state()))
        assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["1", "2"], name
    assert checkpoint.check_leaves(run) == {1: [], 2: []}


def test_removed_checkpoints_that_cannot_be_deleted_yet_are_deleted_later(
    opened: Callable[..., Checkpoints], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = opened()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **options: None)
        for _ in range(3):  # a reader on NFS holds the files
            assert checkpoints.save(2, {"x": jnp.ones(1)})
            assert checkpoints.discard_after(1) == [2]
        assert sorted(path.name for path in (home / "removed").iterdir()) == ["2", "2.1", "2.2"]
    checkpoints.save(2, {"x": jnp.ones(1)})
    checkpoints.wait()
    assert [path.name for path in home.iterdir()] == ["2"]


class TakenOver(Exception):
    pass


def test_a_process_that_lost_the_workdir_removes_nothing_of_the_new_owner(
    opened: Callable[..., Checkpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is suspended between its commit and the removal of older ones, and wakes up later."""
    owner = "old"

    def fence() -> None:
        if owner != "old":
            raise TakenOver

    old = opened(keep_latest=2, fence=fence)
    superfluous, asked = manager.Retention.superfluous, []

    def suspended(self: Any, steps: Any) -> Any:
        nonlocal owner
        if 3 in steps and not asked:
            asked.append(steps)
            owner = "new"
            with Checkpoints(old.directory, Retention(keep_latest=2)) as new:
                for step, metric in ((4, 0.9), (5, 0.2), (6, 0.3)):
                    new.save(step, {"x": jnp.ones(1)}, metric=metric)
        return superfluous(self, steps)

    monkeypatch.setattr(manager.Retention, "superfluous", suspended)
    for step in (1, 2, 3):
        old.save(step, {"x": jnp.ones(1)}, metric=0.1)
    with pytest.raises(TakenOver):
        old.wait()
    assert old.steps() == [4, 5, 6]


def test_a_process_that_lost_the_workdir_saves_nothing(
    opened: Callable[..., Checkpoints], home: Path
) -> None:
    fenced = False

    def fence() -> None:
        if fenced:
            raise TakenOver

    checkpoints = opened(fence=fence)
    checkpoints.save(1, {"x": jnp.ones(1)})
    checkpoints.wait()
    checkpoints.save(2, {"x": jnp.ones(1)})
    checkpoints.wait()
    asked: list[bool] = []

    def fence_at_the_commit() -> None:
        asked.append(True)
        if len(asked) > 1:
            raise TakenOver

    late = opened(fence=fence_at_the_commit)
    late.save(3, {"x": jnp.ones(1)})
    with pytest.raises(TakenOver):
        late.wait()
    assert len(asked) == 2
    fenced = True
    before = sorted(path.name for path in home.rglob("*"))
    for forbidden in (
        lambda: checkpoints.save(4, {"x": jnp.ones(1)}),
        lambda: checkpoints.discard_after(0),
    ):
        with pytest.raises(TakenOver):
            forbidden()
    assert sorted(path.name for path in home.rglob("*")) == before
    assert checkpoints.steps() == [1, 2]


# ---------------------------------------------------------------------------------------------
# Other processes


def _python(code: str, *args: Any, devices: int = 1, **options: Any) -> subprocess.Popen[str]:
    flags = compiled_programs.xla_flags(devices)
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


SHARDED = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from trainer import checkpoint

    mesh = Mesh(np.array(jax.devices()), ("d",))
    rows, copy = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    values = {"w": np.arange(64.0, dtype=np.float32).reshape(16, 4), "b": np.ones(3, np.float32)}
    shardings = {"w": rows, "b": copy, "key": copy}
    checkpoints = checkpoint.Checkpoints(sys.argv[1])
    if sys.argv[2] == "save":
        state = {name: jax.device_put(x, shardings[name]) for name, x in values.items()}
        state["key"] = jax.device_put(jax.random.key(5), copy)
        checkpoints.save(1, state)
        step = jax.jit(lambda s: {**s, "w": s["w"] * 2, "b": s["b"] + 1}, donate_argnums=0)
        step(state)
    else:
        target = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[n])
                  for n, x in values.items()}
        key = jax.random.key(5)
        target["key"] = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=copy)
        state = checkpoints.restore(target)
        assert all(state[n].sharding == shardings[n] and state[n].committed for n in target)
        assert len(state["w"].addressable_shards) == len(jax.devices())
        assert all(np.array_equal(state[n], x) for n, x in values.items())
        assert (jax.random.key_data(state["key"]) == jax.random.key_data(key)).all()
        step = jax.jit(
            lambda s: {**s, "w": s["w"] * 2}, donate_argnums=0, out_shardings=shardings
        )
        state = step(step(state))
        assert step._cache_size() == 1, step._cache_size()
    checkpoints.close()
    print("done", len(jax.devices()))
"""


@pytest.mark.long
def test_a_checkpoint_of_four_devices_restores_on_one_two_and_eight(home: Path) -> None:
    saver = _python(SHARDED, home, "save", devices=4)
    assert saver.communicate(timeout=LONG) == ("done 4\n", "")
    readers = {n: _python(SHARDED, home, "restore", devices=n) for n in (1, 2, 8)}
    said = {n: reader.communicate(timeout=LONG) for n, reader in readers.items()}
    assert said == {n: (f"done {n}\n", "") for n in readers}
    assert checkpoint.check_leaves(home) == {1: []}


TWO_PROCESSES = """
    import sys
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    directory, task, rank, port = sys.argv[1:]
    jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
    from trainer.checkpoint import Checkpoints

    mesh = Mesh(np.array(jax.devices()), ("d",))
    rows, copy = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    values = {"w": np.arange(32.0, dtype=np.float32).reshape(8, 4), "b": np.ones(3, np.float32)}
    shardings = {"w": rows, "b": copy, "key": copy}
    log = []
    checkpoints = Checkpoints(directory, log=log.append)
    if task == "save":
        state = {n: jax.make_array_from_callback(x.shape, shardings[n], lambda i, x=x: x[i])
                 for n, x in values.items()}
        state["key"] = jax.jit(lambda: jax.random.key(5), out_shardings=copy)()
        assert checkpoints.save(1, state) and checkpoints.save(2, state)
    else:
        target = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[n])
                  for n, x in values.items()}
        key = jax.random.key(5)
        target["key"] = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=copy)
        state = checkpoints.restore(target)
        for n, x in values.items():
            (shard,) = state[n].addressable_shards
            assert np.array_equal(shard.data, x[shard.index]) and state[n].committed
        assert (jax.random.key_data(state["key"]) == jax.random.key_data(key)).all()
    checkpoints.close()
    print(checkpoints.steps(), len(log))
"""


def _two_processes(home: Path, task: str) -> list[str]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    both = [_python(TWO_PROCESSES, home, task, rank, port) for rank in (0, 1)]
    told = [process.communicate(timeout=LONG) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    return [out.splitlines()[-1] for out, _ in told]


@pytest.mark.long
def test_two_processes_save_their_shards_and_agree_on_damage(home: Path) -> None:
    assert _two_processes(home, "save") == ["[1, 2] 0", "[1, 2] 0"]
    assert checkpoint.check_leaves(home) == {1: [], 2: []}, (
        "One process checks what two have written."
    )
    for process in (0, 1):
        base = f"file://{home}/1/state/ocdbt.process_{process}/"
        database = storage.ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
        chunks = [key for key in database.list().result() if key.startswith(b"w/c")]
        assert chunks == [f"w/c/{process}/0".encode()]
    _truncate(home / "2")
    assert _two_processes(home, "restore") == ["[1] 1", "[1] 0"]


CUBE = """
    import errno, sys
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    directory, task, rank, port = sys.argv[1:]
    if rank != "alone":
        jax.distributed.initialize(f"localhost:{port}", 4, int(rank))
    from trainer.checkpoint import Checkpoints, storage

    devices = np.array(jax.devices())
    shape = {1: (1, 1, 1), 2: (1, 2, 1), 8: (2, 2, 2)}[len(devices)]
    mesh = Mesh(devices.reshape(shape), ("data", "fsdp", "tensor"))
    draw = np.random.default_rng(0)
    specs = {"matrix": P("fsdp", "tensor"), "rows": P(("data", "fsdp")), "copy": P(), "one": P()}
    sizes = {"matrix": (64, 48), "rows": (16, 3), "copy": (1031, 16), "one": ()}
    values = {n: draw.normal(size=size).astype(np.float32) for n, size in sizes.items()}
    storage.chunk_shape.__defaults__ = (1 << 12,)  # bytes of a chunk
    shardings = {n: NamedSharding(mesh, spec) for n, spec in specs.items()}
    log = []
    checkpoints = Checkpoints(directory, log=log.append)
    if task == "save":
        state = {n: jax.make_array_from_callback(x.shape, shardings[n], lambda i, x=x: x[i])
                 for n, x in values.items()}
        write = storage._write_chunks
        def full(*args):
            raise OSError(errno.ENOSPC, "full")
        storage._write_chunks = full if rank == "2" else write
        assert checkpoints.save(1, state)
        checkpoints.wait()
        assert checkpoints.error and "process 2: No space left on device" in checkpoints.error
        storage._write_chunks = write
        assert checkpoints.save(2, state)
        checkpoints.wait()
        assert checkpoints.error is None
    else:
        target = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[n])
                  for n, x in values.items()}
        state = checkpoints.restore(target)
        for n, x in values.items():
            assert state[n].sharding == shardings[n]
            for shard in state[n].addressable_shards:
                assert np.array_equal(shard.data, x[shard.index])
    checkpoints.close()
    print(checkpoints.steps())
"""


@pytest.mark.long
@pytest.mark.parametrize("where", ["a folder", "a bucket"])
def test_four_processes_save_on_a_cube_and_one_two_and_eight_devices_restore(
    where: str, home: Path, request: Any
) -> None:
    """A process that cannot write fails the save in all of them, with its number and its error."""
    if where == "a bucket":
        request.getfixturevalue("s3")
        home.write_text("s3://lab/runs/a-00000001\n")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    every = [_python(CUBE, home, "save", rank, port, devices=2) for rank in range(4)]
    told = [process.communicate(timeout=LONG) for process in every]
    assert [out.splitlines()[-1:] for out, _ in told] == [["[2]"]] * 4, told
    databases = sorted(path.name[-1] for path in (home / "2/state").glob("ocdbt.process_*"))
    assert where == "a bucket" or databases == ["0", "1", "2", "3"], "Each writes a part."
    assert checkpoint.check_leaves(home) == {2: []}
    for devices in (1, 2, 8):
        reader = _python(CUBE, home, "restore", "alone", 0, devices=devices)
        assert reader.communicate(timeout=LONG) == ("[2]\n", "")


KILLED = """
    import sys
    import jax, jax.numpy as jnp
    from trainer.checkpoint import Checkpoints, Retention

    checkpoints = Checkpoints(sys.argv[1], Retention(keep_latest=2))
    step = jax.jit(lambda s: {"n": s["n"] + 1, "x": s["x"] + 1.0}, donate_argnums=0)
    state = {"n": jnp.int32(0), "x": jnp.zeros((20, 20_000))}
    state = jax.device_put(state, jax.devices()[0])
    if checkpoints.latest() is not None:
        state = checkpoints.restore(jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        ))
    assert (state["x"] == state["n"]).all()
    print(int(state["n"]), flush=True)
    while True:
        state = step(state)
        checkpoints.save(int(state["n"]), state)
        print("saving", flush=True)
"""


def test_a_process_killed_during_saves_leaves_only_whole_checkpoints(home: Path) -> None:
    restored, rng = [], np.random.default_rng(0)
    for _ in range(4):
        committed = Checkpoints(home).latest() or 0
        process = _python(KILLED, home)
        assert process.stdout is not None and process.stderr is not None
        restored.append(int(process.stdout.readline()))
        for _ in range(int(rng.integers(1, 12))):
            process.stdout.readline()
        time.sleep(rng.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stderr.read() == ""
        process.stdout.close()
        process.stderr.close()
        assert restored[-1] == committed
        assert all(not problems for problems in checkpoint.check_leaves(home).values())
    assert restored == sorted(restored) and restored[-1] > 0
    with Checkpoints(home) as checkpoints:
        checkpoints.save(10_000, {"x": jnp.ones(1)})
    assert not [path.name for path in home.iterdir() if not path.name.isdigit()]


@pytest.mark.long
def test_a_process_killed_while_it_deletes_leaves_only_whole_checkpoints(home: Path) -> None:
    """The machine goes away at the second file: what is listed is whole; the rest goes later."""
    code = """
        import os, sys
        import jax.numpy as jnp
        from trainer.checkpoint import Checkpoints, Retention

        checkpoints = Checkpoints(sys.argv[1], Retention(keep_latest=1))
        checkpoints.save(1, {"x": jnp.ones(3)})
        checkpoints.wait()
        unlink, left = os.unlink, [1]
        os.unlink = lambda *a, **k: unlink(*a, **k) if left and left.pop() else os._exit(9)
        checkpoints.save(2, {"x": jnp.ones(3)})
        checkpoints.wait()
    """
    assert (process := _python(code, home)).communicate(timeout=LONG) == ("", "")
    assert process.returncode == 9
    assert checkpoint.check_leaves(home) == {2: []}
    assert [path.name for path in (home / "removed").iterdir()] == ["1"]
    with Checkpoints(home, Retention(keep_latest=1)) as checkpoints:
        checkpoints.save(3, {"x": jnp.ones(3)})
    assert [path.name for path in home.iterdir()] == ["3"]


@pytest.mark.long
def test_orbax_is_not_imported_before_the_first_save() -> None:
    code = """
        import sys
        from trainer import checkpoint
        checkpoints = checkpoint.Checkpoints("nowhere")
        checkpoints.latest(), checkpoints.wait(), checkpoints.close()
        print([name for name in sys.modules if name.startswith(("orbax", "tensorstore"))])
    """
    assert _python(code).communicate(timeout=LONG) == ("[]\n", "")


# ---------------------------------------------------------------------------------------------
# Looking into checkpoints, and warm starts


def test_ls_lists_steps_metrics_and_sizes(saved: Path, tmp_path: Path) -> None:
    run = _copy(saved, tmp_path)
    first, second = checkpoint.ls(run)
    assert (first.step, first.metric, first.problem) == (1, 0.5, None)
    assert (second.step, second.metric) == (2, 0.25)
    state = make_state()
    leaves = [jax.random.key_data(x) if integrity.is_key(x) else x for x in jax.tree.leaves(state)]
    assert first.nbytes == sum(x.nbytes for x in leaves)
    assert first.leaves == len(leaves)
    _remove("**/manifest.json")(run / "checkpoints" / "2")
    assert "missing" in str(checkpoint.ls(run)[1].problem)
    with pytest.raises(CheckpointError, match="the run has not saved yet, or"):
        checkpoint.ls(tmp_path / "elsewhere")


def test_diff_names_the_leaves_that_differ(tmp_path: Path) -> None:
    a = {"x": jnp.zeros(4), "same": jnp.ones(2), "gone": jnp.ones(1), "flag": jnp.array([True])}
    b = {
        "x": jnp.array([0.0, 0.5, 0, -0.0]),
        "same": jnp.ones(2),
        "new": jnp.ones(3),
        "flag": jnp.array([False]),
    }
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, a)
        checkpoints.save(2, b)
    assert sorted(checkpoint.diff_checkpoints(tmp_path, 1, 2)) == [
        "flag: 1 of 1 values differ",
        "gone: float32[1] | absent",
        "new: absent | float32[3]",
        "x: 2 of 4 values differ, by at most 0.5",
    ]
    assert checkpoint.diff_checkpoints(tmp_path, 1, 1, other=tmp_path / "checkpoints") == []


def test_parameters_load_without_a_program(saved: Path, tmp_path: Path) -> None:
    run = _copy(saved, tmp_path)
    params = checkpoint.load_params(run)
    want = make_state(2).params
    assert jax.tree.structure(params) == jax.tree.structure(want)
    assert checkpoint.digests(params) == checkpoint.digests(want)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(params))
    assert checkpoint.digests(checkpoint.load_params(run, step=1)) == checkpoint.digests(
        make_state(1).params
    )
    _truncate(run / "checkpoints" / "2")
    for step in (None, 2):
        with pytest.raises(checkpoint.CorruptCheckpoint, match="bytes instead of"):
            checkpoint.load_params(run, step=step)
    with pytest.raises(CheckpointError, match="no leaf under 'weights'"):
        checkpoint.load_params(run, step=1, prefix="weights")


PATHS = {"encoder/a": 1, "encoder/b": 2, "head/kernel": 3}


@pytest.mark.parametrize(
    ("rules", "want"),
    [
        ({}, PATHS),
        ({r"encoder/(.*)": r"backbone/\1"}, {"backbone/a": 1, "backbone/b": 2, "head/kernel": 3}),
        ({"head/.*": None}, {"encoder/a": 1, "encoder/b": 2}),
        ({"encoder/a": "x/y/z", "encoder/.*": None}, {"x/y/z": 1, "head/kernel": 3}),
    ],
)
def test_rename_applies_its_rules_to_paths(rules: dict[str, str | None], want: Any) -> None:
    assert rename(PATHS, rules) == want


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"decoder/.*": "x"}, "'decoder/.*' applies to no parameter.*encoder/a"),
        ({"encoder/.*": None, "encoder/a": "x"}, "'encoder/a' applies to no parameter"),
        ({"encoder": "x"}, "whole path"),
        ({"encoder/.": "x"}, "'encoder/b' at 'x', where 'encoder/a' is already"),
        ({"encoder/a": "head"}, "at 'head'|where"),
        ({"(": "x"}, r"'\(' is not a regular expression"),
        ({"encoder/(.)": r"\2"}, "cannot be used"),
        ({"encoder/(.)": r"/\1"}, "not a path"),
    ],
)
def test_a_rename_rule_that_cannot_be_applied_is_refused(
    rules: dict[str, str | None], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        rename(PATHS, rules)


@pytest.mark.parametrize("size", [0, 1, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 3 << 18])
def test_a_checksum_is_the_crc_32_of_the_bytes(size: int) -> None:
    array = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert integrity.checksum(array) == f"{zlib.crc32(array.tobytes()):08x}"


def test_digests_tell_bits_apart() -> None:
    def digest(value: Any) -> str:
        return checkpoint.digests({"x": value})["x"]

    assert digest(jnp.zeros(3)) == digest(np.zeros(3, np.float32))
    assert digest(jnp.zeros(3)) != digest(-jnp.zeros(3))
    assert digest(jnp.zeros(3)) != digest(jnp.zeros((1, 3)))
    assert digest(jnp.zeros(2, jnp.int32)) != digest(jnp.zeros(2))
    assert digest(jax.random.key(1)) != digest(jax.random.key(2))
    single = SingleDeviceSharding(jax.devices()[0])
    assert digest(jax.device_put(jnp.ones(3), single)) == digest(jnp.ones(3))
