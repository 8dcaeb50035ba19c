"""A pytest plugin: how many processes run the tests, what memory they need, and what was left out.

`make test` leaves out the tests with the marker `long`; tests/short.py says which these are.
"""

import ctypes
import gc
import importlib
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from tests import short
from trainer.engine.memory import host_memory

# A test process needs some 2 GB at most, and starts others at times.
_PROCESS = 2.5e9
# Memory is given back where a process holds so many bytes, and so many more than after the last
# time; that takes half a second.
_MUCH, _MORE = 1.2e9, 0.4e9
# Objects after which the garbage collector looks at young ones. Python's 700 would have it look at
# all objects every few traces, for a tenth of the time of the tests.
_YOUNG = 50_000

# The number of long tests that a process leaves out.
_LEFT_OUT = pytest.StashKey[int]()
# What each process has told at its end: the largest memory of its own and of a process that it
# started, in bytes, and how many tests it left out.
_TOLD = pytest.StashKey[list[dict[str, int]]]()
# The bytes that were left when memory was last given back.
_KEPT = pytest.StashKey[int]()
_LIBC = ctypes.CDLL(None)
_SELF, _CHILDREN = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
    if config.option.markexpr == "not long":
        short.DRAWN = 0.25
    config.stash[_LEFT_OUT] = 0
    config.stash[_TOLD] = []


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns what `-n auto` is: as many processes as there are cores, and memory for them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = host_memory() or _PROCESS
    return max(1, min(cores or 1, int(memory // _PROCESS)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spares the garbage collector the tests themselves, which all live to the end."""
    # Plugins of hypothesis ask the collector who refers to an object, when it is imported.
    importlib.import_module("hypothesis")
    gc.collect()
    gc.freeze()


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
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        item.config.stash[_LEFT_OUT] += item.get_closest_marker("long") is not None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tells the process that the user started what this one needed."""
    config = session.config
    unit = 1 if sys.platform == "darwin" else 1024
    own, started = (unit * resource.getrusage(whose).ru_maxrss for whose in (_SELF, _CHILDREN))
    told = {"own": own, "started": started, "left out": config.stash[_LEFT_OUT]}
    if hasattr(config, "workerinput"):
        config.workeroutput["suite"] = told
    elif not config.stash[_TOLD]:  # no other processes ran the tests
        config.stash[_TOLD].append(told)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Takes what a test process told at its end; one that died tells nothing."""
    if told := getattr(node, "workeroutput", {}).get("suite"):
        node.config.stash[_TOLD].append(told)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Prints the memory of the processes, and last how to run the tests that were left out."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    every = config.stash.get(_TOLD, [])
    if hasattr(config, "workerinput") or reporter is None or not every:
        return
    own = ", ".join(f"{told['own'] / 1e9:.1f}" for told in every)
    started = max(told["started"] for told in every) / 1e9
    # A process counts what the one that started it held, until it runs a program of its own.
    reporter.write_line(
        f"Largest memory: {own} GB of the test processes, {started:.1f} GB of one they started."
    )
    # Each process collects all tests, and leaves out the same ones.
    if left_out := max(told["left out"] for told in every):
        reporter.write_line(
            f"{left_out:,} long tests were left out: `make test_all` runs all tests, "
            "`make test ROOM=sweep` all of one room."
        )
