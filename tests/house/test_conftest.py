"""The settings and fixtures in conftest.py on which other tests rely."""

import contextlib
import functools
import os
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import compiled_programs, short, suite
from tests.runs import LONG, ROOT


def test_no_test_module_sets_flags_of_xla_where_it_is_imported() -> None:
    # Scripts of simulated devices set them for a process of their own. Where a test imports such a
    # script, all processes that later tests start would have them, and other bits.
    assert "device_count" not in os.environ.get("XLA_FLAGS", "")


def test_compilations_are_counted_by_name(
    compilations: Callable[[], contextlib.AbstractContextManager[list[str]]],
) -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return x * 2 + 1

    small, large = np.ones(3, np.float32), np.ones(4, np.float32)
    with compilations() as names:
        step(small)
        assert names == ["jit(step)"]
        step(small)
        assert names == ["jit(step)"]
        step(large)
    assert names == ["jit(step)"] * 2
    step(np.ones(5, np.float32))
    assert len(names) == 2, "The count goes on after its block."


def test_strict_promotion_refuses_a_silent_change_of_dtype(strict_promotion: None) -> None:
    with pytest.raises(jax.dtypes.TypePromotionError):
        jnp.add(jnp.int32(1), jnp.float32(1))


def test_warnings_are_errors() -> None:
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)


@pytest.mark.parametrize("value", [[1, "two"], {"a": 1}, functools.partial(np.sum)])
def test_ids_show_containers_and_functions(value: object, request: pytest.FixtureRequest) -> None:
    wanted = "sum" if isinstance(value, functools.partial) else ascii(value)
    assert request.node.name.endswith(f"[{wanted}]")


def test_compiled_programs_are_kept_in_the_checkout_or_where_the_environment_says() -> None:
    folder = os.environ["JAX_COMPILATION_CACHE_DIR"]
    assert jax.config.jax_compilation_cache_dir == folder
    named = os.environ.get("LOCKSTEP_COMPILED") or ROOT / ".compiled"
    assert Path(folder).parent == Path(named).expanduser().resolve() and any(Path(folder).iterdir())


def test_the_environment_names_the_folder_of_compiled_programs(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LOCKSTEP_COMPILED", str(tmp_path / "shared"))
    compiled_programs.clean()
    assert [path.is_dir() for path in (tmp_path / "shared").glob(compiled_programs.folder().name)]
    assert compiled_programs.folder().parent == tmp_path / "shared"
    monkeypatch.delenv("LOCKSTEP_COMPILED")
    assert compiled_programs.folder().parent == ROOT / ".compiled"


@pytest.mark.parametrize(
    ("cores", "gigabytes", "processes"), [(8, 16, 6), (2, 24, 2), (64, 512, 64), (4, 2, 1)]
)
def test_there_are_as_many_processes_as_cores_and_memory_allow(
    cores: int,
    gigabytes: int,
    processes: int,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(suite, "host_memory", lambda: gigabytes * 2**30)
    assert suite.pytest_xdist_auto_num_workers(pytestconfig) == processes


@pytest.mark.long
@pytest.mark.parametrize("processes", ["0", "2"])
def test_the_last_line_counts_the_long_tests_that_were_left_out(processes: str) -> None:
    file = "tests/house/test_seeded_faults.py"
    command = [sys.executable, "-m", "pytest", file, "-m", "not long", f"-n{processes}"]
    done = subprocess.run([*command, "-k", "forty"], cwd=ROOT, capture_output=True, timeout=LONG)
    *_, memory, last = done.stdout.decode().splitlines()
    assert done.returncode == 0 and memory.startswith("Largest memory: 0.")
    assert last.startswith("4 long tests were left out: `make test_all` runs all tests")


@pytest.mark.long
@short.parametrize("processes", ["0", "2"])
def test_no_test_begins_after_the_time_that_is_given(tmp_path: Path, processes: str) -> None:
    (tmp_path / "test_times.py").write_text(
        "import time\nimport pytest\nfrom tests.suite import _END\n\n"
        "@pytest.fixture\ndef slow():\n    raise RuntimeError('a fixture of minutes')\n\n"
        "def test_first(pytestconfig):\n"
        "    left = pytestconfig.stash[_END] - time.monotonic()\n"
        "    assert 7200 < left <= 9000 or 81000 < left <= 90000\n"
        "    pytestconfig.stash[_END] -= 9000  # as if so many seconds had passed\n\n"
        "def test_second(slow):\n    pass\n\n"
        "def test_third():\n    pass\n"
    )
    options = ["-p", "tests.suite", f"-n{processes}", "--dist=loadfile", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path), f"--rootdir={tmp_path}"]
    for more, counts in (
        ("--within=9000", "1 passed, 2 skipped"),
        ("--within=90000", "2 passed, 1 err"),
    ):
        done = subprocess.run([*command, more], cwd=ROOT, capture_output=True, timeout=LONG)
        lines = done.stdout.decode().splitlines()
        assert any(counts in line for line in lines), lines
        late = "2 tests did not begin within 9000 seconds: `make test_all` runs all tests."
        assert (late in lines) == (more == "--within=9000")
        assert (done.returncode == 0) == (more == "--within=9000")


def test_programs_that_were_not_written_whole_are_removed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(compiled_programs, "folder", lambda: tmp_path / "programs")
    compiled_programs.clean()
    whole = zlib.compress(b"program" * 99)
    (tmp_path / "programs" / "whole").write_bytes(whole)
    (tmp_path / "programs" / "cut").write_bytes(whole[:-5])
    compiled_programs.clean()
    assert [file.name for file in (tmp_path / "programs").iterdir()] == ["whole"]
    monkeypatch.setattr(compiled_programs, "_MOST_BYTES", 3)
    compiled_programs.clean()
    assert not any((tmp_path / "programs").iterdir())
