"""The house rules and the pages, compared with the syntax trees of the three packages."""

import ast
import functools
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house_measures import (
    HEAVY,
    PACKAGES,
    Module,
    dotted,
    free,
    git,
    imports,
    measures,
    modules,
    ours,
)
from tests.runs import ROOT
from trainer.config.vocabulary import SWEEP

OPTIM_KNOWS = {"optim", "jax", "optax", "numpy"}

# The order of imports: a file imports from its own package and from the lines above its own. What
# stands on one line does not import each other. A run needs the core alone.
CORE = [
    {"optim"},
    {"trainer.constraints"},
    {"trainer.logits", "trainer.messages", "trainer.protocols"},
    {"trainer.config", "trainer.parser"},
    {"trainer.models", "trainer.data", "trainer.losses", "trainer.writers"},
    {"trainer.metrics"},
    {"trainer.checkpoint"},
    {"trainer.workdir"},
    {"trainer.engine"},
    {"trainer.hooks"},
    {"trainer.train"},
]
ORDER = [
    *CORE,
    {"trainer.diagnose", "trainer.sweep"},
    {"trainer.report"},
    {"trainer.studies"},
    {"trainer.cli"},
    {"trainer.__main__"},
    {"lockstep"},
]

# The only modules of trainer/ that are not in one of its packages.
LOOSE = {
    "trainer.__main__",
    "trainer.constraints",
    "trainer.hooks",
    "trainer.logits",
    "trainer.losses",
    "trainer.messages",
    "trainer.metrics",
    "trainer.parser",
    "trainer.protocols",
}

# Who alone may know a package.
ONLY_IN = {
    "cmaes": "trainer.sweep.asked",
    "optuna": "trainer.sweep.asked",
    "safetensors": "trainer.checkpoint",
    "tensorstore": "trainer.checkpoint",
    "tokenizers": "trainer.data",
    "clu.metric_writers": "trainer.writers",
    "clu.periodic_actions": "trainer.writers",
    "tensorboardX": "trainer.writers",
    "wandb": "trainer.writers",
    "mlflow": "trainer.writers",
    "ray": "trainer.sweep.ray",
}

# Imported only where a config or an option asks for them; the extras of these names install them.
IN_EXTRAS = {"mlflow", "ray", "wandb"}

# Dependencies that no module of ours imports, and who needs them.
NEEDED_BY_OTHERS = {
    "array-record": "tensorflow-datasets reads and writes our prepared data with it",
    "importlib-resources": "tensorflow-datasets imports it and does not declare it",
}


def _sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


MODULES = modules()


def offered(module: Module) -> set[str]:
    """Returns what the `__all__` of a module lists."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


OFFERED = {module.name: offered(module) for module in MODULES if module.package}
NAMES = {module.name for module in MODULES}


def _inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


# Each rule takes a module and yields its offences, as "line: what is wrong".


def _package(name: str) -> str:
    """Returns the entry of ORDER that a dotted name would be in: "optim", "trainer.engine"."""
    top = name.partition(".")[0]
    return top if top in {"optim", "lockstep"} else ".".join(name.split(".")[:2])


def _rank(package: str) -> int:
    """Returns the line of ORDER that a package stands on; one that is not there is below all."""
    return next((rank for rank, line in enumerate(ORDER) if package in line), -1)


def imports_point_one_way(module: Module) -> Iterator[str]:
    """A file imports only from its own package and from those that ORDER names before it."""
    home = _package(module.name)
    for name, line in imports(module):
        root = name.partition(".")[0]
        if home == "optim" and root not in {*OPTIM_KNOWS, *sys.stdlib_module_names}:
            yield f"{line}: optim knows jax, optax and numpy only, not {name}."
        elif root in {"optim", "trainer", "lockstep"} and (target := _package(name)) != home:
            if home == "trainer.config" and target != "trainer.messages":
                yield f"{line}: trainer.config finds functions by name and imports none: {name}."
            elif _rank(target) >= _rank(home):
                yield f"{line}: {home} does not come after {target}, and may not import {name}."


def every_file_is_in_a_package_with_a_place(module: Module) -> Iterator[str]:
    """No new file lies beside the packages of trainer/, and each package has a place in ORDER."""
    if _inside(module.name, "trainer"):
        if module.name.count(".") <= 1 and not module.package and module.name not in LOOSE:
            yield f"1: {module.path} is in none of the packages of trainer/; move it into one."
        elif module.name != "trainer" and _rank(_package(module.name)) < 0:
            yield f"1: {_package(module.name)} has no place in ORDER, so that any may import it."


def packages_have_one_keeper(module: Module) -> Iterator[str]:
    """Only checkpoint knows tensorstore, only writers knows clu's writers and tensorboardX."""
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
        if isinstance(node, ast.Call) and dotted(node.func) in calls:
            yield f"{node.lineno}: {dotted(node.func)} is not for a program that reads files."
        if isinstance(node, ast.keyword) and node.arg in {"shell", "allow_pickle"}:
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield f"{node.value.lineno}: {node.arg} lets a file execute something."
        if isinstance(node, ast.Attribute) and dotted(node.value) == "yaml":
            unsafe = node.attr in {"Loader", "CLoader", "FullLoader", "UnsafeLoader"}
            if unsafe or node.attr in loaders:
                yield f"{node.lineno}: yaml.{node.attr} can build any object: use a SafeLoader."


def is_offered(module: str, name: str) -> bool:
    """Returns whether the `__all__` of a package lists a function of one of its modules."""
    return any(module.startswith(f"{each}.") and name in names for each, names in OFFERED.items())


def public_things_are_described(module: Module) -> Iterator[str]:
    """Modules, functions and classes have a docstring, unless they are private, and types.

    A function of several arguments that a package offers describes each under "Args:".
    """
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
            rest = [each for each in (node.args.vararg, node.args.kwarg) if each is not None]
            said = (ast.get_docstring(node) or "").partition("Args:")[2]
            names = [each.arg for each in [*arguments, *rest]]
            silent = [name for name in names if not re.search(rf"\b{name}\b", said)]
            if len(names) > 1 and silent and is_offered(module.name, node.name):
                yield f"{node.lineno}: the docstring of {node.name} does not describe {silent}."


# Docstrings that are read beside the code: configs/schema.json and the pages have the keys of these
# classes from there, `optim.optimizer` refers to the function, and lockstep offers the error of
# another package. Users implement the protocols.
READ = {
    *("Ablation", "Arm", "Branch", "Challenge", "Claims", "Continuation", "Experiment", "Final"),
    *("Goal", "Ladder", "Referee", "Sweep", "UserError", "WarmStart", "layer_scales"),
}
IMPLEMENTED = {"trainer.hooks", "trainer.protocols"}


def what_no_package_offers_has_one_line(module: Module) -> Iterator[str]:
    """The docstring of what stands in no `__all__` is one line; comments have the rest."""
    for node in module.tree.body if module.name not in IMPLEMENTED else []:
        name = getattr(node, "name", "")
        if name in offered(module) | READ or is_offered(module.name, name):
            continue
        for each in ast.walk(node):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                said = ast.get_docstring(each) or ""
                if "\n" in said and ">>>" not in said:
                    yield f"{each.lineno}: the docstring of {each.name} has more than one line."


def no_file_is_for_leftovers(module: Module) -> Iterator[str]:
    """No utils.py: a function belongs to the package that it serves."""
    if module.name.rpartition(".")[2] in {"util", "utils", "helpers", "common", "misc"}:
        yield f"1: {module.path} says nothing about what is in it."


def what_is_printed_is_escaped(module: Module) -> Iterator[str]:
    """Names hold any character: only these modules print, and they escape."""
    printers = {"trainer.cli.terminal", "trainer.writers.base", "trainer.writers.console"}
    if module.name in printers | {"trainer.data.prepare"}:
        return
    for node in ast.walk(module.tree):
        # Also where it is passed on, as in partial(print, file=sys.stderr).
        if isinstance(node, ast.Name) and node.id == "print":
            yield f"{node.lineno}: print with trainer.cli.terminal.show, which escapes."


RULES = [
    imports_point_one_way,
    every_file_is_in_a_package_with_a_place,
    packages_have_one_keeper,
    files_run_nothing,
    public_things_are_described,
    what_no_package_offers_has_one_line,
    no_file_is_for_leftovers,
    what_is_printed_is_escaped,
]


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Drops the trees of all files after the last test: the process goes on to other files."""
    yield
    for module in MODULES:
        vars(module).pop("tree", None)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rules_of_style_and_imports(
    rule: Callable[[Module], Iterator[str]],
) -> None:
    assert MODULES
    assert [f"{module.path}:{fault}" for module in MODULES for fault in rule(module)] == []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (imports_point_one_way, "optim.muon", "import flax"),
        (imports_point_one_way, "optim.muon", "def f():\n    from trainer import losses"),
        (imports_point_one_way, "trainer.config.build", "import optim.schedules"),
        (imports_point_one_way, "trainer.config.build", "from .. import models"),
        (imports_point_one_way, "trainer.models.vit", "from trainer.train.loop import run"),
        (imports_point_one_way, "trainer.messages", "from trainer.config import Source"),
        (imports_point_one_way, "trainer.models.vit", "from trainer import data"),
        (imports_point_one_way, "trainer.losses", "from trainer.metrics import accuracy"),
        (imports_point_one_way, "trainer.writers.jsonl", "import trainer.checkpoint"),
        (imports_point_one_way, "trainer.checkpoint.manager", "from trainer import workdir"),
        (imports_point_one_way, "trainer.workdir.folder", "from ..engine import step"),
        (imports_point_one_way, "trainer.engine.sharding", "from trainer.train import run"),
        (imports_point_one_way, "trainer.train.loop", "from trainer.diagnose import trace"),
        (imports_point_one_way, "trainer.train.loop", "from trainer.report.plots import Curve"),
        (imports_point_one_way, "trainer.diagnose.replay", "from trainer.report import plots"),
        (imports_point_one_way, "trainer.sweep.plan", "import trainer.report.plots"),
        (imports_point_one_way, "trainer.diagnose.verify", "from trainer.cli import terminal"),
        (imports_point_one_way, "trainer.cli.commands", "from trainer.__main__ import main"),
        (imports_point_one_way, "trainer", "from trainer.train.run import Run"),
        (imports_point_one_way, "trainer.cli.commands", "from lockstep.runs import Run"),
        (every_file_is_in_a_package_with_a_place, "trainer.plots", "x = 1"),
        (every_file_is_in_a_package_with_a_place, "trainer.tools.plots", "x = 1"),
        (packages_have_one_keeper, "trainer.train.loop", "import tensorstore as ts"),
        (packages_have_one_keeper, "trainer.train.loop", "from clu import metric_writers"),
        (packages_have_one_keeper, "trainer.train.loop", "importlib.import_module('tensorboardX')"),
        (packages_have_one_keeper, "trainer.data.digits", "import tensorflow as tf"),
        (packages_have_one_keeper, "trainer.sweep.worker", "import ray"),
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
        (
            public_things_are_described,
            "optim.a",
            "'''A.'''\ndef muon(x: int, y: int) -> None: '''F.'''",
        ),
        (public_things_are_described, "optim.a", "'''A.'''\ndef f(): '''F.'''"),
        (public_things_are_described, "optim.a", "'''A.'''\nclass C: pass"),
        (public_things_are_described, "optim.a", "x = 1"),
        (what_no_package_offers_has_one_line, "optim.a", "def _f():\n '''F.\n\n A.'''"),
        (no_file_is_for_leftovers, "trainer.utils", "x = 1"),
        (what_is_printed_is_escaped, "trainer.cli.commands", "print('a')"),
        (what_is_printed_is_escaped, "trainer.cli.reporting", "partial(print, file=sys.stderr)"),
    ],
)
def test_a_rule_detects_an_offence(
    rule: Callable[[Module], Iterator[str]], name: str, source: str
) -> None:
    assert len(list(rule(Module(name, name, source)))) == 1


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (imports_point_one_way, "optim.muon", "import math\nimport jax.numpy as jnp\nimport optax"),
        (imports_point_one_way, "trainer.config.build", "from . import tree\nimport optax"),
        (imports_point_one_way, "trainer.config.tree", "from trainer.messages import UserError"),
        (imports_point_one_way, "trainer.writers", "import optim\nfrom trainer import config"),
        (imports_point_one_way, "trainer.cli.commands", "from trainer import report, diagnose"),
        (imports_point_one_way, "lockstep.runs", "import optim\nfrom trainer.cli import options"),
        (imports_point_one_way, "trainer.diagnose.replay", "from trainer.train import nonfinite"),
        (every_file_is_in_a_package_with_a_place, "trainer.losses", "x = 1"),
        (every_file_is_in_a_package_with_a_place, "trainer.report.plots", "x = 1"),
        (every_file_is_in_a_package_with_a_place, "optim.muon", "x = 1"),
        (imports_point_one_way, "trainer.engine.plan", "from trainer.engine.program import State"),
        (packages_have_one_keeper, "trainer.checkpoint", "import tensorstore"),
        (packages_have_one_keeper, "trainer.metrics", "from clu import metrics"),
        (files_run_nothing, "trainer.a", "class Mine(yaml.SafeLoader): pass\nre.compile('a')"),
        (public_things_are_described, "optim.a", "'''A.'''\ndef _f(x): pass"),
        (what_no_package_offers_has_one_line, "optim.a", "def muon():\n '''F.\n\n A.'''"),
        (what_is_printed_is_escaped, "trainer.cli.terminal", "print('a')"),
    ],
)
def test_a_rule_accepts_code_without_an_offence(
    rule: Callable[[Module], Iterator[str]], name: str, source: str
) -> None:
    assert list(rule(Module(name, name, source))) == []


def test_docstrings_that_may_be_long_exist() -> None:
    named = {getattr(node, "name", None) for module in MODULES for node in module.tree.body}
    assert named >= READ and NAMES >= IMPLEMENTED


def test_imports_have_no_circles() -> None:
    # A package gathers its own modules, so the edge from a module back to its package is not one.
    edges = {
        module.name: {
            target
            for name, _ in imports(module)
            if (target := ours(name, NAMES)) and not _inside(module.name, target)
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


# What answers at once, such as `--help`, options, `config` and the start of workers: an import of
# these modules imports neither jax nor NumPy nor SciPy, whose settings may also come first.
FREE = """
lockstep lockstep.configs lockstep.plans lockstep.processes trainer trainer.__main__
trainer.cli trainer.cli.commands trainer.cli.docstrings trainer.cli.new
trainer.cli.optimizer_families trainer.cli.optimizers trainer.cli.options
trainer.cli.refereeing trainer.cli.reporting trainer.cli.resolving trainer.cli.terminal
trainer.cli.values trainer.config
trainer.config.build trainer.config.edit trainer.config.files
trainer.config.full trainer.config.gin_reader trainer.config.gin_writer
trainer.config.nodes trainer.config.schema trainer.config.signatures trainer.config.tree
trainer.config.units trainer.config.vocabulary trainer.config.wording trainer.config.yaml_reader
trainer.config.yaml_writer trainer.diagnose trainer.engine trainer.engine.every
trainer.engine.repeatable trainer.engine.targets trainer.messages trainer.parser trainer.report
trainer.report.document trainer.report.figures trainer.report.formats
trainer.report.formats.latex trainer.report.formats.markdown trainer.report.html
trainer.report.panels trainer.report.statistics trainer.studies trainer.sweep
trainer.sweep.ablation trainer.sweep.arm_paths trainer.sweep.branch trainer.sweep.confounders
trainer.sweep.ladder trainer.sweep.local
trainer.sweep.ray trainer.sweep.slurm trainer.sweep.spaces
trainer.sweep.tuned trainer.sweep.warning_text trainer.train trainer.train.peers
trainer.train.runtime trainer.train.signals trainer.train.watchdog
"""


def test_every_name_that_tests_and_benchmarks_use_exists() -> None:
    """Pyright does not look at what tests import, so that a renamed function stays unseen there."""
    files = [path for top in ("tests", "benchmarks") for path in (ROOT / top).rglob("*.py")]
    missing = [
        f"{file.relative_to(ROOT)}: {module}.{name}"
        for file in files
        for module, name in used(ast.parse(file.read_text()))
        if not exists(module, name)
    ]
    assert not missing
    assert exists("trainer.data", "order") and not exists("trainer.data.order", "absent")
    text = "from trainer.cli import options, parser as p\noptions.parser().y\np.z\nq.w"
    assert list(used(ast.parse(text))) == [
        ("trainer.cli", "options"),
        ("trainer.cli", "parser"),
        ("trainer.cli.options", "parser"),
    ]


def used(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields what a file uses of our packages: a module, and a name that it must have."""
    nodes = list(ast.walk(tree))
    modules: dict[str, str] = {}  # the modules that the file imports, by the names it gives them
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            for alias in node.names:
                yield node.module or "", alias.name
                if is_module(node.module or "", alias.name):
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in nodes:  # a variable or an argument of the same name hides the module
        if isinstance(node, ast.arg):
            modules.pop(node.arg, None)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            modules.pop(node.id, None)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules:
                yield modules[node.value.id], node.attr


def exists(module: str, name: str) -> bool:
    """Returns whether `from module import name` works."""
    return hasattr(importlib.import_module(module), name) or is_module(module, name)


@functools.cache
def is_module(module: str, name: str) -> bool:
    """Returns whether a package has a module or a package of that name."""
    is_package = hasattr(importlib.import_module(module), "__path__")
    return is_package and importlib.util.find_spec(f"{module}.{name}") is not None


def test_what_answers_at_once_imports_neither_jax_nor_numpy_nor_scipy() -> None:
    light, known = set(free(MODULES)), {module.name: module for module in MODULES}

    def is_heavy(name: str) -> bool:
        own = ours(name, known)
        return own not in light if own else name.partition(".")[0] in HEAVY

    heavy = {
        name: sorted(x for x, _ in imports(known[name], at_once=True) if is_heavy(x))
        for name in FREE.split()
        if name in known and name not in light
    }
    assert not heavy, "Import each of these inside of the function that needs it."
    code = "import importlib, sys\n"
    code += f"for name in {FREE.split()!r}: importlib.import_module(name)\n"
    code += "print(*{'jax', 'numpy', 'scipy'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
    # And the list has all of them, so that a module that is no longer one is removed on purpose.
    assert sorted(FREE.split()) == sorted(light)


def test_pyproject_declares_exactly_the_imported_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    owners = importlib.metadata.packages_distributions()
    imported: set[str] = set()
    for module in MODULES:
        for name, line in imports(module):
            root = name.partition(".")[0]
            if root in {*sys.stdlib_module_names, "trainer", "optim", "lockstep", "__future__"}:
                continue
            if root in IN_EXTRAS:
                assert root in project["optional-dependencies"]
                continue
            names = {canonicalize_name(owner) for owner in owners.get(root, [root])}
            assert names & declared, f"{module.path}:{line} imports {root}, not in pyproject.toml."
            imported |= names
    assert set(NEEDED_BY_OTHERS) <= declared
    # And CONTRIBUTING.md says of each what it is for, and which test watches an upper bound.
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (\w.*?) \| (.*) ?\|$", text, re.MULTILINE)
    said = {canonicalize_name(name): watched for name, _, watched in rows}
    assert sorted(said.keys() ^ declared) == []
    for line in project["dependencies"]:
        bounds = [x.version for x in Requirement(line).specifier if x.operator == "<"]
        watched = said[canonicalize_name(Requirement(line).name)]
        assert watched.startswith(bounds[0] + ":") if bounds else not watched.strip(), line
        assert all((ROOT / file).exists() for file in re.findall(r"`(tests/\S+)`", watched))
    assert sorted(declared - imported - set(NEEDED_BY_OTHERS)) == []


# What `python -m tests.house_measures` prints. Bounds go down with it, never up.
BOUNDS = {
    "lines": 70_801,
    "lines of other texts": 3_378,
    "functions over 60 lines": 1,
    "functions over 40 lines": 70,
    "classes over 300 lines": 0,
    "most parameters of a constructor": 8,
    "public names of two modules": 28,
    "functions of at most 6 lines used once": 200,
}


def test_the_product_grows_no_more() -> None:
    now = measures(MODULES)
    over = [
        f"{name}: {now[name]:,}, of at most {most:,}"
        for name, most in BOUNDS.items()
        if now[name] > most
    ]
    assert not over, (
        f"{'; '.join(over)}. Delete what the change makes unnecessary, or divide what it makes"
        " long: python -m tests.house_measures lists the packages, and functions that are used"
        " once. A feature is paid for in the same way, here or in a commit before."
    )


def test_files_have_at_most_600_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in _sources("lockstep", "optim", "trainer", "benchmarks", "experiments")
    }
    long = sorted(path for path, length in lengths.items() if length > 600)
    assert long == [], "A file that passes 600 lines wants to be two."


# The pages: what they say of the code is true.

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")),
]


def _page(name: str, part: str = "") -> str:
    """Returns a page, or what is between its markers `<!-- part: begin -->` and `end`."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if part:
        text = text.partition(f"<!-- {part}: begin -->")[2].partition(f"<!-- {part}: end -->")[0]
        assert text, f"{name} has no part {part!r}."
    return text


def test_the_drawing_of_the_packages_has_them_in_the_order_of_their_imports() -> None:
    package = r"\btrainer\.\w+|\boptim\b|^ *lockstep\b"

    def rows(part: str) -> list[set[str]]:
        found = [{x.strip() for x in re.findall(package, line)} for line in part.splitlines()]
        return [row for row in found if row]

    above, core = _page("docs/architecture.md", "packages").split("The core:")
    assert rows(core) == CORE[::-1] and [*rows(above), *rows(core)] == ORDER[::-1]


def _imported_packages() -> dict[str, set[str]]:
    """Returns the packages that each package imports, without those that these import."""
    imported: dict[str, set[str]] = {}
    for module in MODULES:
        home = _package(module.name)
        targets = {_package(name) for name, _ in imports(module)}
        known = {target for target in targets if _rank(target) >= 0 and target != home}
        imported[home] = imported.get(home, set()) | known

    def reached(package: str) -> set[str]:
        below = imported.get(package, set())
        return below.union(*map(reached, below))

    return {home: direct - set().union(*map(reached, direct)) for home, direct in imported.items()}


def test_the_diagram_of_the_packages_has_an_arrow_for_each_import() -> None:
    diagram = _page("docs/architecture.md", "imports")
    drawn = re.findall(r"^ *(\w+) --> (\w+)$", diagram, re.MULTILINE)
    short = {
        (home.removeprefix("trainer."), target.removeprefix("trainer."))
        for home, targets in _imported_packages().items()
        for target in targets
    }
    assert sorted(drawn) == sorted(short)
    found_by_name = re.findall(r"^ *config -\. .* \.-> (\w+)$", diagram, re.MULTILINE)
    modules = {module.removeprefix("trainer.").split(".")[0] for module in SWEEP.modules.values()}
    assert sorted(found_by_name) == sorted(modules - {"optax"})


def _defined(path: str) -> set[str]:
    """Returns the functions, classes and methods ("Loop.run") that a file defines."""
    names = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
    return names


def functions_that_do_not_exist(page: str) -> Iterator[str]:
    """Yields each `name()` of a page that no file defines that its paragraph or item names."""
    for item in re.split(r"\n(?=\d+\. |\n)", page):
        paths = [path for path in re.findall(r"`([\w/]+\.py)`", item) if (ROOT / path).exists()]
        defined = set().union(*map(_defined, paths))
        for name in re.findall(r"`([\w.]+)\(\)`", item):
            if name not in defined:
                yield f"{name}() is not in {paths}"


def test_each_function_on_the_page_about_the_architecture_is_in_the_file_named_with_it() -> None:
    page = _page("docs/architecture.md")
    assert page.count("()`") > 30
    assert list(functions_that_do_not_exist(page)) == []


@pytest.mark.parametrize(
    "page", ["1. `optim/muon.py`: `moon()`", "1. `optim/muon.py`: `muon()`\n2. `muon()`"]
)
def test_a_function_that_does_not_exist_would_be_seen(page: str) -> None:
    assert len(list(functions_that_do_not_exist(page))) == 1


@pytest.mark.parametrize("page", PAGES)
def test_each_file_and_test_that_a_page_names_exists(page: str) -> None:
    text = _page(page)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
    paths = re.findall(r"(?<![\w/])(?:optim|trainer|tests|benchmarks|configs)/[\w/]+\.\w+", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    if page != "CONTRIBUTING.md":  # which has an invented title as an example
        sources = "".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
        for title, more in re.findall(r"`(test_\w+?)(\.\.\.)?`", text):
            assert f"def {title}{'' if more else '('}" in sources, title


def _committed() -> list[Path]:
    return [ROOT / name for name in git("ls-files", "-z") if (ROOT / name).is_file()]


# Written so that these lines do not offend themselves.
ELSEWHERE = re.compile(
    rb"(?<![\w.}>*-])/(?:work|root|home|tmp|opt|mnt)"
    rb"/\w"
    rb"|\b(?:pypi|pythonhosted|npmjs|conda|anaconda)\.(?:org|com|io)\b"
    rb"|--(?:extra-)?index"
    rb"-url|--find"
    rb"-links"
)


def test_committed_files_contain_neither_a_package_index_nor_a_path_of_a_machine() -> None:
    faults = []
    for path in _committed():
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if path.suffix not in {".png", ".npz", ".bz2"} and (found := ELSEWHERE.search(line)):
                faults.append(f"{path.relative_to(ROOT)}:{number}: {found[0].decode()}")
    assert faults == []


@pytest.mark.parametrize(
    "line", [b"cd /" + b"root/x", b'"/' + b'tmp/x"', b"https://pypi" + b".org/simple"]
)
def test_a_path_of_a_machine_would_be_found(line: bytes) -> None:
    assert ELSEWHERE.search(line)
