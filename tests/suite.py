"""A pytest plugin: how many processes run the tests, what memory they need, and what was left out.

`make test` leaves out the tests with the marker `long`; tests/short.py says which these are. With
`--within=SECONDS` no test begins later than that: on a slow machine, .ci/run ends with the tests
that it has had time for, and says how many these are not.
"""

import ctypes
import gc
import importlib
import os
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from tests import short
from trainer.engine.memory import host_memory
from trainer.train.rows import memory_peak

# A test process needs up to 1.6 GB, and one that it starts up to 2.0 GB.
_PROCESS = 2.5e9
# Memory is given back where a process holds so many bytes, and so many more than after the last
# time; that takes half a second.
_MUCH, _MORE = 1.2e9, 0.4e9
# Objects after which the garbage collector looks at young ones. Python's 700 would have it look at
# all objects every few traces, for a tenth of the time of the tests.
_YOUNG = 50_000

# How many long tests `make test` leaves out in this process.
_LEFT_OUT = pytest.StashKey[int]()
# When the last test may begin, by the clock of `time.monotonic`; and how many came later.
_END = pytest.StashKey[float]()
_LATE = pytest.StashKey[int]()
# In the main process, a report of each test process: bytes of memory, `_LEFT_OUT` and `_LATE`.
_REPORTS = pytest.StashKey[list[dict[str, int]]]()
# The bytes that were left when memory was last given back.
_KEPT = pytest.StashKey[int]()
_LIBC = ctypes.CDLL(None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--within",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="begin no test after so many seconds; the last lines count those that did not begin",
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
    if _short(config):
        short.DRAWN = 0.25
    config.stash[_END] = time.monotonic() + config.option.within
    config.stash[_LEFT_OUT] = config.stash[_LATE] = 0
    config.stash[_REPORTS] = []


def _short(config: pytest.Config) -> bool:
    return config.option.markexpr == "not long"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns what `-n auto` is: as many processes as there are cores, and memory for them.

    Where psutil is installed, xdist itself counts a core with two threads once, and all cores of
    the machine where this process may use some of them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = host_memory() or _PROCESS
    return max(1, min(cores or 1, int(memory // _PROCESS)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets the garbage collector pass over the tests themselves, which all live to the end."""
    # When hypothesis is imported, plugins of it ask the collector for what refers to an object.
    importlib.import_module("hypothesis")
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before fixtures, which may take minutes
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.stash[_END]:
        item.config.stash[_LATE] += 1
        pytest.skip(f"--within={item.config.option.within:g} seconds had passed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Drops programs between two tests; kept, they would grow to 6 GB in a process."""
    yield
    kept = item.config.stash.get(_KEPT, 0)
    if _memory() > max(_MUCH, kept + _MORE):
        jax.clear_caches()
        gc.collect()
        if hasattr(_LIBC, "malloc_trim"):  # glibc keeps what it has freed
            _LIBC.malloc_trim(0)
        item.config.stash[_KEPT] = _memory()


def _memory() -> int:
    """Returns the bytes that this process holds now; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        if _short(item.config) and item.get_closest_marker("long"):
            item.config.stash[_LEFT_OUT] += 1


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Reports the memory of this process to the main process, which may be this one."""
    config = session.config
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    report = {
        "own": memory_peak(()),
        "started": unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
        "left out": config.stash[_LEFT_OUT],
        "late": config.stash[_LATE],
    }
    if hasattr(config, "workerinput"):
        config.workeroutput["suite"] = report
    elif not config.stash[_REPORTS]:  # no other processes ran the tests
        config.stash[_REPORTS].append(report)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Takes the report of a test process at its end; there is none of one that crashed."""
    if report := getattr(node, "workeroutput", {}).get("suite"):
        node.config.stash[_REPORTS].append(report)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Prints the memory of the processes, and last how to run the tests that were left out."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    every = config.stash.get(_REPORTS, [])
    if hasattr(config, "workerinput") or reporter is None or not every:
        return
    own = ", ".join(f"{report['own'] / 1e9:.1f}" for report in every)
    # On Linux the peak of a process begins with that of the one that started it.
    started = max(report["started"] for report in every) / 1e9
    reporter.write_line(
        f"Largest memory: {own} GB of the test processes, at most {started:.1f} GB of one that "
        "they started."
    )
    if late := sum(report["late"] for report in every):
        reporter.write_line(
            f"{late:,} tests did not begin within {config.option.within:g} seconds: `make test_all`"
            " runs all tests."
        )
    # Each process collects all tests, and leaves out the same ones.
    if left_out := max(report["left out"] for report in every):
        reporter.write_line(
            f"{left_out:,} long tests were left out: `make test_all` runs all tests, "
            "`make test ROOM=sweep` all of one room."
        )
