"""Holds our reading of Gin against the real gin engine, and the engine's parser to what we use."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gin
import pytest
from gin import config_parser
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests import short
from tests.gin_engine import FUNCTIONS, engine
from trainer.config import Call, ConfigError, Source, Tree, diff, dump, load
from trainer.config.gin_reader import read_statements, resolve
from trainer.config.nodes import plain
from trainer.config.tree import same
from trainer.config.vocabulary import RUN
from trainer.config.yaml_reader import read as yaml_read

CORPUS = Path(__file__).parent / "gin_corpus"


@pytest.fixture(autouse=True)
def clear_engine():
    yield
    gin.clear_config()


def ours(texts: Sequence[str]) -> Tree:
    statements = [
        replace(statement, section=section)
        for section, text in enumerate(texts)
        for statement in read_statements(text, Source(f"{section}.gin", 1))
    ]
    return plain(resolve(statements, Source("0.gin"), RUN)[0])


SINGLE = sorted(path.name for path in CORPUS.glob("*.gin"))
TOGETHER = [
    (["base.gin", "swapped.gin"], []),
    (["including.gin", "base.gin"], []),
    (["include_last.gin"], ["include 'including.gin'"]),
    (["base.gin"], ["steps = 9", "experiment.seed = 4", "experiment.seed = 5"]),
    (["base.gin"], ["experiment.model = @x/models.vit()\nx/models.vit.depth = 1"]),
    (["macros.gin"], ["depth = @lib.h", "lib.h.x = 0"]),
    (["scopes.gin"], ["one/lib.f.t = @two/lib.f()"]),
    (["scopes.gin"], ["one/lib.f:\n  t = 5\n  u = @lib.g\n", "lib.g.deep = 1"]),
]


@pytest.mark.parametrize("name", SINGLE)
def test_a_file_has_the_meaning_that_gin_gives_it(name, monkeypatch):
    monkeypatch.chdir(CORPUS)
    root = load([name]).root
    expected = engine([name])
    assert root == expected, diff(root, expected)


@pytest.mark.parametrize(("files", "bindings"), TOGETHER)
def test_files_and_bindings_have_the_meaning_that_gin_gives_them(files, bindings, monkeypatch):
    monkeypatch.chdir(CORPUS)
    root = load(files, bindings).root
    expected = engine(files, bindings)
    assert root == expected, diff(root, expected)


# Random configs. References lead from experiment to lib.f to lib.g to lib.h, so that there are no
# circles; every literal is another integer, so that no two values are taken for each other.

RANKS = {"experiment": 0, "lib.f": 1, "lib.g": 2, "lib.h": 3}
SCOPES = ["", "a/", "b/", "a/b/", "b/a/", "m/", "a/m/"]
MACROS = {"m": 1, "a/m": 1, "a": 1, "n": 2, "b/n": 2}  # hold what is above their rank


@st.composite
def values(draw, rank: float, number: Any, depth: int = 0) -> str:
    kinds = ["number", "number", "call", "call", "function", "macro"]
    kind = draw(st.sampled_from(kinds + (["list", "dict", "tuple"] if depth < 2 else [])))
    below = [name for name, other in RANKS.items() if other > rank]
    macros = [name for name, other in MACROS.items() if other >= rank]
    if kind in ("call", "function") and below:
        name = draw(st.sampled_from(SCOPES)) + draw(st.sampled_from(below))
        return f"@{name}" + ("()" if kind == "call" else "")
    if kind == "macro" and macros:
        return "%" + draw(st.sampled_from(macros))
    if kind in ("list", "dict", "tuple"):
        items = draw(st.lists(values(rank, number, depth + 1), max_size=3))
        if kind == "list":
            return f"[{', '.join(items)}]"
        if kind == "tuple":
            return f"({''.join(f'{item}, ' for item in items)})"
        return "{" + ", ".join(f"'k{key}': {item}" for key, item in enumerate(items)) + "}"
    return str(next(number))


@st.composite
def configs(draw) -> list[list[str]]:
    """Draws files of statements, a statement a line; no file binds an argument twice."""
    number = iter(range(1, 10**6))
    layers = []
    for layer in range(draw(st.integers(1, 3))):
        lines = {} if layer else {"experiment.x": "@lib.f()", "experiment.y": "[@a/lib.g(), %m]"}
        for _ in range(draw(st.integers(0, 12))):
            if draw(st.integers(0, 3)) == 0:
                key = draw(st.sampled_from(list(MACROS)))
                text = draw(values(MACROS[key] + 0.5, number))
            else:
                name = draw(st.sampled_from(list(RANKS)))
                scope = draw(st.sampled_from(SCOPES)) if RANKS[name] else ""
                key = f"{scope}{name}.{draw(st.sampled_from('xyz'))}"
                text = draw(values(RANKS[name], number))
            lines[key] = text
        short = draw(st.sets(st.sampled_from(sorted(lines)))) if lines else ()
        layers.append(
            [f"{key.replace('lib.', '') if key in short else key} = {lines[key]}" for key in lines]
        )
    layers[0] += [f"{name} = {next(number)}" for name in MACROS if not _defines(layers, name)]
    return layers


def _defines(layers: list[list[str]], macro: str) -> bool:
    return any(line.startswith(f"{macro} = ") for line in layers[0])


def _key(line: str) -> tuple[list[str], str]:
    """Returns the scopes of a line's binding, and its function and argument; "" for a macro."""
    *scopes, last = line.partition(" = ")[0].split("/")
    name, _, argument = last.rpartition(".")
    if not name:
        return [*scopes, last], ""
    return scopes, f"{name.removeprefix('lib.')}.{argument}"


def _overrides(line: str, other: str) -> bool:
    """Says whether a line binds in an inner scope what another one binds."""
    (inner, one), (outer, two) = _key(line), _key(other)
    return one == two and len(inner) > len(outer) and inner[: len(outer)] == outer


def _names(line: str, macro: str) -> bool:
    """Says whether a line names a macro, or one within its scope."""
    return re.search(rf"%{macro}(?![\w])", line.partition(" = ")[2]) is not None


def _accepted(layers: list[list[str]]) -> tuple[Tree, list[list[str]]]:
    """Returns our tree once every line that is refused as unread is gone, and those lines."""
    layers = [list(lines) for lines in layers]
    refused: list[list[str]] = [[] for _ in layers]
    while True:
        try:
            return ours(["\n".join(lines) for lines in layers]), refused
        except ConfigError as error:
            words = str(error)
            assert "Nothing reads" in words or "never calls" in words, words
            assert error.source is not None
            layer = int(error.source.file.partition(".")[0])
            refused[layer].append(layers[layer].pop(error.source.line - 1))


@pytest.mark.long
@settings(
    max_examples=short.examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(configs())
@example([["experiment.x = @a/lib.f()", "lib.f.x = 1", "a/lib.f.x = 2", "m = 3"]])
@example([["experiment.x = @a/lib.f()", "lib.f.x = 1"], ["a/f.x = 2", "m = 3"], ["f.x = 4"]])
def test_random_scopes_have_the_meaning_that_gin_gives_them(layers):
    """The engine calls, on all the lines, what we read in those that we do not refuse."""
    tree, _ = _accepted(layers)
    expected = engine(bindings=["\n".join(lines) for lines in layers])
    assert same(tree, expected), diff(tree, expected)


@settings(
    max_examples=short.examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(configs())
@example([["experiment.x = @a/lib.f()", "lib.f.x = 1", "a/lib.f.x = 2", "m = 3"]])
def test_a_line_is_refused_if_and_only_if_it_changes_nothing(layers):
    """A line is refused if, and only if, it could not matter without those that override it."""
    merged = {str(_key(line)): line for lines in layers for line in lines}
    lines = list(merged.values())
    _, [refused] = _accepted([lines])
    for line in lines:
        key, _, value = line.partition(" = ")
        if not value.isdecimal():
            continue  # two references may be equal, two literals are not
        rest = [each for each in lines if not _overrides(each, line)]
        try:
            without = engine(bindings=[each for each in rest if each != line])
            matters = not same(engine(bindings=rest), without)
        except TypeError:  # a macro without a value
            matters = True
        if "." not in key and not matters:  # what reads the macro may itself be overridden
            matters = line not in refused and any(_names(each, key) for each in lines)
        assert matters == (line not in refused), line


# Random trees, written as Gin with a scope for each call.


def gin_text(root: Call) -> str:
    """Writes a tree as Gin."""
    lines: list[str] = []
    scopes = iter(range(10**6))

    def value(tree: Tree) -> str:
        if isinstance(tree, Call):
            scope = f"s{next(scopes)}"
            lines.extend(f"{scope}/{tree.name}.{k} = {value(v)}" for k, v in tree.kwargs.items())
            return f"@{scope}/{tree.name}" + ("" if tree.partial else "()")
        if isinstance(tree, list):
            return f"[{', '.join(map(value, tree))}]"
        if isinstance(tree, dict):
            return "{" + ", ".join(f"{k!a}: {value(v)}" for k, v in tree.items()) + "}"
        return repr(tree) if not isinstance(tree, str) else ascii(tree)

    lines += [f"experiment.{key} = {value(item)}" for key, item in root.kwargs.items()]
    return "\n".join(lines)


def trees(functions: st.SearchStrategy[str]) -> st.SearchStrategy[Tree]:
    text = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=8)
    number = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    arguments = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
    return st.recursive(
        st.none() | st.booleans() | number | text | st.sampled_from(["yes", "1e-3", "~", "010"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(text | st.integers(-9, 99), inner, max_size=3)
            | st.builds(
                Call, functions, st.dictionaries(arguments, inner, max_size=3), st.booleans()
            )
        ),
        max_leaves=12,
    )


def roots(functions: st.SearchStrategy[str]) -> st.SearchStrategy[Call]:
    arguments = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
    items = st.dictionaries(arguments, trees(functions), min_size=1, max_size=4)
    return st.builds(Call, st.just("experiment"), items)


@settings(
    max_examples=short.examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(roots(st.sampled_from(FUNCTIONS[1:])))
def test_random_configs_survive_a_round_trip_through_yaml_gin_and_the_gin_library(root):
    text = gin_text(root)
    assert same(ours([text]), root)
    assert same(engine(bindings=[text]), root)
    again = yaml_read(dump(root), Source("a.yaml", 1))
    assert again is not None
    assert same(Call("experiment", plain(again)), root)


# What we use of gin.config_parser, which is no documented interface.


def test_the_gin_parser_yields_the_statements_that_the_reader_expects():
    class Delegate(config_parser.ParserDelegate):
        def configurable_reference(self, scoped_configurable_name, evaluate):
            return ("reference", scoped_configurable_name, evaluate)

        def macro(self, macro_name):
            return ("macro", macro_name)

    text = (
        "import os.path\nfrom a.b import c as d\ninclude 'x.gin'\n\n"
        "a/b/lib.f.x = [@s/t/lib.g(), @lib.h, %m/n]\nm = -1\n"
        "s/lib.f:  # a block\n  y = (1, 'two')\n  z = {'k': None}\n"
    )
    statements = list(config_parser.ConfigParser(text, Delegate()))
    kinds = [type(statement).__name__ for statement in statements]
    assert kinds == [
        "ImportStatement",
        "ImportStatement",
        "IncludeStatement",
        "BindingStatement",
        "BindingStatement",
        "BlockDeclaration",
        "BindingStatement",
        "BindingStatement",
    ]
    assert [statement.location.line_num for statement in statements] == [1, 2, 3, 5, 6, 7, 8, 9]
    assert [statement.format() for statement in statements[:2]] == [
        "import os.path",
        "from a.b import c as d",
    ]
    assert statements[2].filename == "x.gin"
    bindings = [statement[:4] for statement in statements[3:5] + statements[6:]]
    references = [("reference", "s/t/lib.g", True), ("reference", "lib.h", False), ("macro", "m/n")]
    assert bindings == [
        ("a/b", "lib.f", "x", references),
        ("", "m", "", -1),
        ("s", "lib.f", "y", (1, "two")),
        ("s", "lib.f", "z", {"k": None}),
    ]
    assert statements[5][:2] == ("s", "lib.f")


def test_reading_a_config_runs_no_code(tmp_path):
    """The engine runs `import` while it parses; our reader refuses the line."""
    module = tmp_path / "runs_at_import.py"
    module.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "a.gin").write_text("import runs_at_import\nexperiment.x = @runs_at_import.f()")
    with pytest.raises(ConfigError, match="--vocabulary"):
        load([tmp_path / "a.gin"])
    (tmp_path / "a.gin").write_text("experiment.x = @os.popen()\nos.popen.cmd = 'exit 1'")
    config = load([tmp_path / "a.gin"])
    assert config.root.kwargs["x"] == Call("os.popen", {"cmd": "exit 1"})
    assert not (tmp_path / "ran").exists()


def test_a_pattern_may_contain_a_backslash(recwarn):
    r"""Python warns of '\d' in a string that is not raw; the reader accepts it silently."""
    for text in (r"'blocks_\d+/.*'", r"r'blocks_\d+/.*'", r"'blocks_\\d+/.*'"):
        root = ours([f"experiment.match = {text}"])
        assert root == Call("experiment", {"match": r"blocks_\d+/.*"})
    assert not recwarn.list


def test_values_nested_too_deeply_are_refused_before_the_parser_overflows():
    for text in ("[" * 99 + "]" * 99, "(" * 99 + "1" + ")" * 99, "{1: " * 99 + "1" + "}" * 99):
        with pytest.raises(ConfigError, match="values are nested deeper than 64 levels"):
            ours([f"experiment.x = {text}"])


def test_every_value_knows_its_line(tmp_path):
    path = tmp_path / "a.gin"
    path.write_text(
        "rate = 0.1\n"  # 1
        "experiment:\n"  # 2
        "  model = @models.vit()\n"
        "  groups = {  # 4\n"
        "      'a': [1,\n"
        "            2],\n"
        "      'b': @s/lib.f(),\n"  # 7
        "  }\n"
        "\n"
        "s/lib.f.rate = %rate\n"  # 10
        "models.vit.width = \\\n"  # 11
        "    64\n"
    )
    config = load([path], ["lib.f.seed = 3"])
    lines = {key: str(source).removeprefix(f"{path}:") for key, source in config.sources.items()}
    assert lines == {
        "": "3",
        "model": "3",
        "model.width": "12",
        "groups": "4",
        "groups.a": "5",
        "groups.a.0": "5",
        "groups.a.1": "6",
        "groups.b": "7",
        "groups.b.rate": "1",
        "groups.b.seed": "--gin_bindings=lib.f.seed = 3",
    }
    assert str(config.argument_source("groups.b.rate")) == f"{path}:10"
    assert str(config.argument_source("model.width")) == f"{path}:11"
