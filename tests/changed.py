"""Finds the tests of what differs from a commit, for `make test CHANGED=COMMIT`.

`python -m tests.changed COMMIT` prints folders for pytest. They are those of the rooms that import,
directly or not, a file that differs from the commit in the working tree, and always tests/house.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.house_measures import (
    PACKAGES,
    ROOT,
    Module,
    git,
    imports,
    modules,
    name_of,
    ours,
    read,
)
from trainer.config.vocabulary import SWEEP

ROOMS = sorted({file.parent.name for file in (ROOT / "tests").glob("*/test_*.py")})
# What every test depends on.
EVERYWHERE = ("conftest.py", "pyproject.toml", "requirements.lock", "requirements-test.lock")


def main() -> int:
    """Prints the folders; returns 2 for a commit that git does not know."""
    if len(sys.argv) != 2:
        print("Name one commit: python -m tests.changed COMMIT", file=sys.stderr)
        return 2
    try:
        differs = git("diff", "--name-only", "-z", sys.argv[1], "--")
    except subprocess.CalledProcessError:
        return 2
    new = git("ls-files", "--others", "--exclude-standard", "-z")
    for room in rooms([*differs, *new]):
        folders = (f"tests/{room}", _product(room))
        print(*(folder for folder in folders if (ROOT / folder).exists()))
    return 0


def _product(room: str) -> str:
    """Returns the folder of the product whose tests are in a room, which has this name."""
    return room if room in PACKAGES else f"trainer/{room}"


def rooms(files: Iterable[str]) -> list[str]:
    """Returns the rooms whose tests depend on files.

    Args:
        files: the paths of what differs, such as "trainer/sweep/plan.py".
    """
    files = set(files)
    if files & set(EVERYWHERE):
        return ROOMS
    known = {*_arrows(), *_of_tests()}
    changed = {ours(name_of(Path(file)), known) for file in files}
    folders = {file.partition("/")[0] for file in files if "/" in file}
    found = {"house"} | {part for file in files for part in file.split("/")[:2]}
    for room in ROOMS:
        own = _product(room).replace("/", ".")
        roots = {name for name in _arrows() if name == own or name.startswith(f"{own}.")}
        roots |= _imported_by_tests(room)
        if changed & _reached(roots) or folders & _folders_in_tests(room):
            found.add(room)
    return [room for room in ROOMS if room in found]


@cache
def _arrows() -> Mapping[str, set[str]]:
    """Returns the modules that each module of the product imports, also by names in configs."""
    every = modules()
    known = {module.name for module in every}
    arrows = {module.name: _targets(module, known) for module in every}
    by_name = {f"trainer.{name}" for name in SWEEP.modules.values()}
    arrows["trainer.config.vocabulary"] |= {*SWEEP.modules.values(), *by_name} & known
    return arrows


def _targets(module: Module, known: set[str]) -> set[str]:
    return {target for name, _ in imports(module) if (target := ours(name, known))}


def _reached(roots: Iterable[str]) -> set[str]:
    """Returns what modules import, directly or not, with themselves."""
    found, left = set(), list(roots)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += _arrows().get(name, ())
    return found


@cache
def _of_tests() -> Mapping[str, Module]:
    """Reads the modules of tests/, but for the packages of labs and the folders of data."""
    files = [*(ROOT / "tests").glob("*.py"), *(ROOT / "tests").glob("*/test_*.py")]
    return {module.name: module for module in map(read, files)}


@cache
def _imported_by_tests(room: str) -> set[str]:
    """Returns what the tests of a room import: modules of tests/, and of the product.

    The command line imports the whole product, and is left out: a test that calls it is in the room
    that it is about.
    """
    every = _of_tests()
    known = {*_arrows(), *every} - {"trainer.__main__"}
    helpers, found = [name for name in every if name.startswith(f"tests.{room}.")], set()
    while helpers:
        for target in _targets(every[helpers.pop()], known):
            if target in every and target not in found:
                helpers.append(target)
            found.add(target)
    return found


@cache
def _folders_in_tests(room: str) -> set[str]:
    """Returns the folders without tests and product that a test of a room names in a string."""
    others = {"benchmarks", "configs", "docs", "experiments"}
    texts = _strings(x.tree for name, x in _of_tests().items() if name.startswith(f"tests.{room}."))
    return others & {text.partition("/")[0] for text in texts if " " not in text}


def _strings(trees: Iterable[ast.AST]) -> Iterator[str]:
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


if __name__ == "__main__":
    sys.exit(main())
