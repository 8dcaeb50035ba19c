"""The house rules, read off the syntax trees of trainer and optim: none of their code runs here."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

# Files that may pass 300 lines, with the reason. Empty is the aim.
LONG_FILES: dict[str, str] = {}

OPTIM_KNOWS = {"optim", "jax", "optax", "numpy"}

# What stands between optim and the modules that put a run together.
ROOMS = {"config", "models", "data", "losses", "metrics", "mesh", "writers", "checkpoint"}

# Who alone may know a package.
ONLY_IN = {
    "orbax": "trainer.checkpoint",
    "clu.metric_writers": "trainer.writers",
    "clu.periodic_actions": "trainer.writers",
    "tensorboardX": "trainer.writers",
}

# Dependencies that no module of ours imports, and who needs them.
NEEDED_BY_OTHERS = {
    "array-record": "tensorflow-datasets reads and writes our prepared data with it",
    "importlib-resources": "tensorflow-datasets imports it and does not declare it",
}


@dataclass(frozen=True)
class Module:
    """One source file, parsed: `name` is dotted, `package` says whether it is an __init__."""

    name: str
    path: str
    tree: ast.Module
    package: bool = False


def _read(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if package else parts)
    source = path.read_text(encoding="utf-8")
    return Module(name, str(path.relative_to(ROOT)), ast.parse(source, str(path)), package)


def _sources(*rooms: str) -> list[Path]:
    return [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]


MODULES = [_read(path) for path in _sources("optim", "trainer")]
NAMES = {module.name for module in MODULES}


def imports(module: Module) -> Iterator[tuple[str, int]]:
    """Yields each dotted name that a module imports, wherever in the file, with its line.

    `from a import b` yields "a.b": b may be a module. `importlib.import_module("a.b")` counts.
    """
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.name.split(".")
                parts = parts[: len(parts) - node.level + module.package]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and _dotted(node.func) == "importlib.import_module":
            if isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), node.lineno


def _inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


# Each rule takes a module and yields its offences, as "line: what is wrong".


def imports_point_one_way(module: Module) -> Iterator[str]:
    """optim, then the rooms of trainer, then what puts them together."""
    top, _, rest = module.name.partition(".")
    room = rest.partition(".")[0]
    for name, line in imports(module):
        root = name.partition(".")[0]
        if top == "optim" and root not in {*OPTIM_KNOWS, *sys.stdlib_module_names}:
            yield f"{line}: optim knows jax, optax and numpy only, not {name}."
        if top == "trainer" and room == "config" and root in {"optim", "trainer"}:
            if not _inside(name, "trainer.config"):
                yield f"{line}: trainer.config finds functions by name and imports none: {name}."
        if top == "trainer" and room in ROOMS and root == "trainer":
            if name.split(".")[1:2] and name.split(".")[1] not in ROOMS:
                yield f"{line}: {module.name} stands below {name} and may not import it."
        if _inside(name, "trainer.__main__"):
            yield f"{line}: nothing imports the command line."


def packages_have_one_keeper(module: Module) -> Iterator[str]:
    """Only checkpoint knows orbax, only writers knows clu's writers and tensorboardX."""
    for name, line in imports(module):
        for package, keeper in ONLY_IN.items():
            if _inside(name, package) and not _inside(module.name, keeper):
                yield f"{line}: only {keeper} may import {package}."
        if _inside(name, "tensorflow"):
            yield f"{line}: TensorFlow is no dependency of ours."


def files_run_nothing(module: Module) -> Iterator[str]:
    """Nothing that could execute what a file says is used anywhere."""
    modules = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    calls = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
    loaders = {"load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all"}
    for name, line in imports(module):
        if name.partition(".")[0] in modules:
            yield f"{line}: {name} can execute what it reads."
        if name in calls or name in {f"yaml.{loader}" for loader in loaders}:
            yield f"{line}: {name} can execute what it reads."
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and _dotted(node.func) in calls:
            yield f"{node.lineno}: {_dotted(node.func)} is not for a program that reads files."
        if isinstance(node, ast.keyword) and node.arg in {"shell", "allow_pickle"}:
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield f"{node.value.lineno}: {node.arg} lets a file execute something."
        if isinstance(node, ast.Attribute) and _dotted(node.value) == "yaml":
            unsafe = node.attr in {"Loader", "CLoader", "FullLoader", "UnsafeLoader"}
            if unsafe or node.attr in loaders:
                yield f"{node.lineno}: yaml.{node.attr} can build any object: use a SafeLoader."


def public_things_are_described(module: Module) -> Iterator[str]:
    """Modules, and their public functions and classes, have a docstring; functions have types."""
    if not ast.get_docstring(module.tree):
        yield "1: the module has no docstring."
    for node in module.tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            yield f"{node.lineno}: {node.name} has no docstring."
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [argument.arg for argument in arguments if argument.annotation is None]
            if bare or node.returns is None:
                yield f"{node.lineno}: {node.name} lacks the types of {bare or 'its result'}."


def no_room_for_leftovers(module: Module) -> Iterator[str]:
    """No utils.py: a function belongs to the room that it serves."""
    if module.name.rpartition(".")[2] in {"util", "utils", "helpers", "common", "misc"}:
        yield f"1: {module.path} says nothing about what is in it."


def what_is_printed_is_escaped(module: Module) -> Iterator[str]:
    """Names hold any character: only these modules print, and they escape."""
    printers = {"trainer.streams", "trainer.writers.base", "trainer.writers.console"}
    if module.name in printers | {"trainer.data.prepare"}:
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and _dotted(node.func) == "print":
            yield f"{node.lineno}: print with trainer.streams.show, which escapes."


RULES = [
    imports_point_one_way,
    packages_have_one_keeper,
    files_run_nothing,
    public_things_are_described,
    no_room_for_leftovers,
    what_is_printed_is_escaped,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule: Callable[[Module], Iterator[str]]) -> None:
    assert MODULES
    assert [f"{module.path}:{fault}" for module in MODULES for fault in rule(module)] == []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (imports_point_one_way, "optim.muon", "import flax"),
        (imports_point_one_way, "optim.muon", "def f():\n    from trainer import mesh"),
        (imports_point_one_way, "trainer.config.build", "import optim.schedules"),
        (imports_point_one_way, "trainer.config.build", "from .. import models"),
        (imports_point_one_way, "trainer.models.vit", "from trainer.loop import run"),
        (imports_point_one_way, "trainer.mesh", "from trainer import plan"),
        (imports_point_one_way, "trainer.loop", "from trainer.__main__ import main"),
        (packages_have_one_keeper, "trainer.loop", "import orbax.checkpoint as ocp"),
        (packages_have_one_keeper, "trainer.loop", "from clu import metric_writers"),
        (packages_have_one_keeper, "trainer.loop", "importlib.import_module('tensorboardX')"),
        (packages_have_one_keeper, "trainer.data.digits", "import tensorflow as tf"),
        (files_run_nothing, "trainer.a", "import pickle"),
        (files_run_nothing, "trainer.a", "from os import system"),
        (files_run_nothing, "trainer.a", "os.system('true')"),
        (files_run_nothing, "trainer.a", "eval('1')"),
        (files_run_nothing, "trainer.a", "yaml.load(text, Loader=Mine)"),
        (files_run_nothing, "trainer.a", "class Mine(yaml.FullLoader): pass"),
        (files_run_nothing, "trainer.a", "numpy.load(path, allow_pickle=True)"),
        (files_run_nothing, "trainer.a", "subprocess.run(line, shell=True)"),
        (public_things_are_described, "optim.a", "'''A.'''\ndef f() -> None: pass"),
        (public_things_are_described, "optim.a", "'''A.'''\ndef f(x) -> None: '''F.'''"),
        (public_things_are_described, "optim.a", "'''A.'''\ndef f(): '''F.'''"),
        (public_things_are_described, "optim.a", "'''A.'''\nclass C: pass"),
        (public_things_are_described, "optim.a", "x = 1"),
        (no_room_for_leftovers, "trainer.utils", "x = 1"),
        (what_is_printed_is_escaped, "trainer.commands", "print('a')"),
    ],
)
def test_a_rule_sees_an_offence(
    rule: Callable[[Module], Iterator[str]], name: str, source: str
) -> None:
    assert len(list(rule(Module(name, name, ast.parse(source))))) == 1


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (imports_point_one_way, "optim.muon", "import math\nimport jax.numpy as jnp\nimport optax"),
        (imports_point_one_way, "trainer.config.build", "from . import tree\nimport optax"),
        (imports_point_one_way, "trainer.writers", "import optim\nfrom trainer import mesh"),
        (imports_point_one_way, "trainer.plan", "from trainer.program import State"),
        (packages_have_one_keeper, "trainer.checkpoint", "import orbax.checkpoint"),
        (packages_have_one_keeper, "trainer.metrics", "from clu import metrics"),
        (files_run_nothing, "trainer.a", "class Mine(yaml.SafeLoader): pass\nre.compile('a')"),
        (public_things_are_described, "optim.a", "'''A.'''\ndef _f(x): pass"),
        (what_is_printed_is_escaped, "trainer.streams", "print('a')"),
    ],
)
def test_a_rule_lets_the_rest_pass(
    rule: Callable[[Module], Iterator[str]], name: str, source: str
) -> None:
    assert list(rule(Module(name, name, ast.parse(source)))) == []


def test_no_import_goes_round_in_a_circle() -> None:
    def ours(name: str) -> str | None:
        while name and name not in NAMES:
            name = name.rpartition(".")[0]
        return name or None

    # A package gathers its own modules, so the edge from a module back to its package is not one.
    edges = {
        module.name: {
            target
            for name, _ in imports(module)
            if (target := ours(name)) and not _inside(module.name, target)
        }
        for module in MODULES
    }
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in sorted(edges[name]):
                walk(target, [*trail, name])
            done.add(name)

    for name in sorted(edges):
        walk(name, [])


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    owners = importlib.metadata.packages_distributions()
    imported: set[str] = set()
    for module in MODULES:
        for name, line in imports(module):
            root = name.partition(".")[0]
            if root in sys.stdlib_module_names or root in {"trainer", "optim", "__future__"}:
                continue
            names = {canonicalize_name(owner) for owner in owners.get(root, [root])}
            assert names & declared, f"{module.path}:{line} imports {root}, not in pyproject.toml."
            imported |= names
    assert set(NEEDED_BY_OTHERS) <= declared
    assert sorted(declared - imported - set(NEEDED_BY_OTHERS)) == []


def test_files_stay_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in _sources("optim", "trainer", "benchmarks", "experiments")
    }
    long = {path for path, length in lengths.items() if length > 300}
    assert sorted(long - set(LONG_FILES)) == [], "A file that passes 300 lines wants to be two."
    assert sorted(set(LONG_FILES) - long) == [], "These need their allowance no longer."


def _committed() -> list[Path]:
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


# Written so that these lines do not offend themselves.
ELSEWHERE = re.compile(
    rb"(?<![\w.}>*-])/(?:work|root|home|tmp|opt|mnt)"
    rb"/\w"
    rb"|\b(?:pypi|pythonhosted|npmjs|conda|anaconda)\.(?:org|com|io)\b"
    rb"|--(?:extra-)?index"
    rb"-url|--find"
    rb"-links"
)


def test_committed_files_name_no_package_index_and_no_path_of_a_machine() -> None:
    faults = []
    for path in _committed():
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if path.suffix not in {".png", ".npz"} and (found := ELSEWHERE.search(line)):
                faults.append(f"{path.relative_to(ROOT)}:{number}: {found[0].decode()}")
    assert faults == []


@pytest.mark.parametrize(
    "line", [b"cd /" + b"root/x", b'"/' + b'tmp/x"', b"https://pypi" + b".org/simple"]
)
def test_such_a_path_would_be_seen(line: bytes) -> None:
    assert ELSEWHERE.search(line)
