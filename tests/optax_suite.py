"""Runs optax's own tests of its optimizers, from the installed wheel, with every factory wrapped.

Each factory gives the `tx` of an `optim.optimizer` with one group, so that optax's tests hold
whatever this package does around an optimizer to what optax promises of it. All of them:

    python -m tests.optax_suite [part of a test's name]

takes some minutes; tests/optim/test_optax_suite.py runs a part of them.
"""

import functools
import inspect
import re
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import optax
from optax import contrib
from optax._src import alias, alias_test
from optax.contrib import _common_test

import optim

# What cannot pass, by a pattern of the test's name, and why.
EXPECTED = {
    "params_dtype='bfloat16', state_dtype=None": "state of bfloat16 parameters is float32",
    "params_dtype='complex64', state_dtype='(bfloat16|float32)'": "a momentum in a real dtype "
    "would drop the imaginary parts, and is refused",
    "opt_name='optimistic_adam'": "it wants a warning from the factory, which is called at init",
}


def wrapped(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an optimizer factory: the same arguments, and the `tx` of one group."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        return optim.optimizer({"all": optim.group(".*", partial(factory, *args, **kwargs))}).tx

    return make


class Wrapped:
    """Stands for a module of optax: its optimizer factories are wrapped, all else is as it is."""

    def __init__(self, module: ModuleType):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        makes = "Transformation" in str(_returns(found))
        return wrapped(found) if makes else found


def _returns(thing: Any) -> Any:
    if not (inspect.isfunction(thing) or isinstance(thing, partial)):
        return ""
    return inspect.signature(thing).return_annotation


def suite(chosen: Callable[[str], bool]) -> unittest.TestSuite:
    """Loads the tests whose names are chosen, with wrapped factories in their modules."""
    alias_test.alias = Wrapped(alias)  # type: ignore[attr-defined]
    _common_test.alias = Wrapped(alias)  # type: ignore[attr-defined]
    _common_test.contrib = Wrapped(contrib)  # type: ignore[attr-defined]
    loader = unittest.TestLoader()
    found = unittest.TestSuite()
    for module in (alias_test, _common_test):
        for test in _flat(loader.loadTestsFromModule(module)):
            if chosen(test.id()):
                found.addTest(test)
    return found


def _flat(tests: Any) -> Iterator[unittest.TestCase]:
    for test in tests:
        if isinstance(test, unittest.TestSuite):
            yield from _flat(test)
        else:
            yield test


def run(chosen: Callable[[str], bool]) -> tuple[int, int, dict[str, str], list[str]]:
    """Runs the chosen tests.

    Returns:
        How many ran; how many of them were skipped by optax; name -> error of those that failed
        without being expected to; the expected failures that passed.
    """
    result = unittest.TestResult()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests = suite(chosen)
        names = [test.id() for test in _flat(tests)]
        tests.run(result)
    failed = {_name(test): text for test, text in [*result.failures, *result.errors]}
    new = {name: text for name, text in failed.items() if reason(name) is None}
    skipped = {_name(test) for test, _ in result.skipped}
    done = [name for name in names if name not in failed and name not in skipped]
    passed = [name for name in done if reason(name) is not None]
    return result.testsRun, len(result.skipped), new, passed


def _name(test: Any) -> str:
    return getattr(test, "test_case", test).id()  # the case of a subtest


def reason(name: str) -> str | None:
    """Tells why a test is expected to fail, or None."""
    return next((why for pattern, why in EXPECTED.items() if re.search(pattern, name)), None)


def main(part: str = "") -> int:
    """Runs the tests whose names have a part, and prints what they gave."""
    ran, skipped, new, passed = run(lambda name: part in name)
    for name, text in new.items():
        print(f"FAILED {name}\n{text}")
    for name in passed:
        print(f"PASSED, and was expected to fail: {name}")
    print(f"{ran} tests, {skipped} skipped by optax, {len(new)} failed unexpectedly.")
    return 1 if new or passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
