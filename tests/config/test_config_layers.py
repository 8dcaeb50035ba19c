"""Configs laid over other people's files: where includes are found, and which bindings may idle."""

import hashlib
import os

import gin
import pytest

from tests.gin_engine import engine
from trainer.cli import commands, options, resolving
from trainer.config import Builder, Call, ConfigError, load, override


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    gin.clear_config()


def write(files):
    for name, text in files.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w") as file:
            file.write(text)


# Where an included file is found.


@pytest.mark.parametrize("suffix", ["gin", "yaml"])
def test_an_include_is_searched_beside_the_file_then_in_the_current_folder_then_in_search_paths(
    suffix,
):
    def text(x, *includes):
        if suffix == "yaml":
            return f"include: [{', '.join(includes)}]\n{x}: 1\n"
        return "".join(f"include '{each}'\n" for each in includes) + f"experiment.{x} = 1\n"

    names = [f"{name}.{suffix}" for name in ("beside", "current", "searched", "deep/further")]
    write(
        {
            f"sub/a.{suffix}": text("x", *names),
            f"sub/beside.{suffix}": text("beside"),
            f"current.{suffix}": text("current"),
            f"one/searched.{suffix}": text("searched", f"deep/next.{suffix}"),
            f"two/deep/further.{suffix}": text("further"),
            f"two/deep/next.{suffix}": text("next"),
        }
    )
    config = load([f"sub/a.{suffix}"], search_paths=["one", "two"])
    wanted = {"x", "beside", "current", "searched", "next", "further"}
    assert set(config.root.kwargs) == wanted
    assert str(config.sources["further"]).startswith(f"two/deep/further.{suffix}:")
    again = load([f"a.{suffix}"], search_paths=["sub", "one", "two"])  # as t5x has it
    assert again.root == config.root


def test_gin_finds_the_same_included_files(monkeypatch):
    """The engine looks in the current folder and then in its search paths."""
    write(
        {
            "a.gin": "include 'b.gin'\ninclude 'c.gin'\nexperiment.x = @lib.f()\nlib.f.x = 1\n",
            "b.gin": "lib.f.x = 2\nlib.f.y = 2\n",
            "one/c.gin": "lib.f.y = 3\nlib.f.z = 3\n",
            "two/c.gin": "lib.f.y = 3\nlib.f.z = 3\n",
        }
    )
    monkeypatch.setattr(gin.config, "_LOCATION_PREFIXES", [""])
    gin.add_config_file_search_path("one")
    gin.add_config_file_search_path("two")
    config = load(["a.gin"], search_paths=["one", "two"])
    assert config.root == engine(["a.gin"])
    assert config.root.kwargs["x"] == Call("lib.f", {"x": 1, "y": 3, "z": 3})


@pytest.mark.parametrize("suffix", ["gin", "yaml"])
def test_two_different_files_of_one_name_are_refused(suffix):
    is_yaml = suffix == "yaml"
    include = "include: b.yaml\nx: 1\n" if is_yaml else "include 'b.gin'\nexperiment.x = 1\n"
    line = "y: {}\n" if is_yaml else "experiment.y = {}\n"
    a, b = f"sub/a.{suffix}", f"b.{suffix}"
    write({a: include, f"sub/{b}": line.format(1), b: line.format(2)})
    words = rf"{a}:1: There are two different files of this name: sub/{b} and {b}\. Rename one"
    with pytest.raises(ConfigError, match=words):
        load([a])
    write({b: line.format(1)})
    assert load([a]).root.kwargs == {"x": 1, "y": 1}
    os.remove(b)
    write({f"far/{b}": line.format(3)})
    with pytest.raises(ConfigError, match=f"sub/{b} and far/{b}"):
        load([a], search_paths=["far"])
    os.remove(f"far/{b}")
    os.link(f"sub/{b}", f"far/{b}")
    assert load([a], search_paths=["far"]).root.kwargs == {"x": 1, "y": 1}
    os.remove(f"sub/{b}")
    with pytest.raises(ConfigError, match=r"does not exist.*the search paths \(sub, sub\) have no"):
        load([a], search_paths=["sub", "sub"])
    with pytest.raises(ConfigError, match="--gin_search_paths=gone: This is not an existing fol"):
        load([a], search_paths=["gone"])


def test_the_files_are_known_with_their_hashes():
    write(
        {
            "sub/a.gin": "include 'b.gin'\nexperiment.x = 1\n",
            "real.gin": "# ü\r\nexperiment.y = 1\r\n",
        }
    )
    os.symlink("../real.gin", "sub/b.gin")
    config = load(["sub/a.gin"], ["experiment.x = 2"], ["y=3"])
    here = os.path.realpath(".")
    shown = [(each.name, each.resolved, each.included) for each in config.files]
    assert shown == [
        ("sub/a.gin", f"{here}/sub/a.gin", False),
        ("sub/b.gin", f"{here}/real.gin", True),
    ]
    for each in config.files:
        with open(each.resolved, "rb") as file:
            assert each.sha256 == hashlib.sha256(file.read()).hexdigest()
    assert override(config, ["x=5"]).files == config.files


# A file that leads out of the folders that the command names.

SECRET = "root:$6$hidden$:19000:0:99999:7:::\n"


@pytest.mark.parametrize("suffix", ["gin", "yaml"])
@pytest.mark.parametrize(
    "text", [SECRET, f"x: 1\n{SECRET} x", "'$6$hidden", "experiment: $6$hidden", "!a:$6$hidden [x]"]
)
def test_an_error_does_not_quote_a_file_from_outside_the_project(
    suffix, text, tmp_path, monkeypatch
):
    write({"foreign/shadow": text, f"foreign/s.{suffix}": text, "project/x": ""})
    monkeypatch.chdir("project")
    for link, target in {"plain": "shadow", "config": f"s.{suffix}"}.items():
        os.symlink(f"../foreign/{target}", f"{link}.{suffix}")
    absolute = f"{tmp_path}/foreign/s.{suffix}"
    for name in (f"plain.{suffix}", f"config.{suffix}", absolute, f"../foreign/s.{suffix}"):
        write({f"a.{suffix}": f"include: {name}" if suffix == "yaml" else f"include '{name}'"})
        with pytest.raises(ConfigError) as caught:
            load([f"a.{suffix}"])
        assert "hidden" not in str(caught.value)
        assert f"{tmp_path}/foreign/" in str(caught.value)
        if name.startswith("plain"):
            assert "is a symbolic link to" in str(caught.value)
            assert "It is not read." in str(caught.value)
        else:
            assert str(caught.value).startswith(f"{name}:")
    with pytest.raises(ConfigError, match="The format of 'shadow' is unknown"):
        other = "include: /etc/shadow" if suffix == "yaml" else "include '/etc/shadow'"
        write({f"a.{suffix}": other})
        load([f"a.{suffix}"])
    with pytest.raises(ConfigError) as caught:
        load([f"../foreign/s.{suffix}"])  # the command names it
    assert "is not shown" not in str(caught.value)
    if text == SECRET:
        assert "hidden" in str(caught.value)


# Short names.


def test_a_short_name_means_the_function_that_is_called():
    write(
        {
            "a.gin": "experiment.x = @s/lib.f()\nexperiment.y = @lib.g\nf.x = 1\nlib.f.y = 2\n"
            "s/f.z = @lib.h()\ng:\n  x = 5\nh.x = 6\n",
            "b.gin": "lib.f.x = 3\nf.y = 4\n",
        }
    )
    root = load(["a.gin", "b.gin"]).root
    assert root == engine(["a.gin", "b.gin"])
    inner = {"x": 3, "y": 4, "z": Call("lib.h", {"x": 6})}
    assert root.kwargs == {"x": Call("lib.f", inner), "y": Call("lib.g", {"x": 5}, True)}


def test_a_short_name_is_looked_up_among_the_functions_that_are_called():
    """Both packages have an adamw; the one that is not called does not matter."""
    write({"a.gin": "experiment.x = @optax.adamw()\nadamw.b2 = 0.9\n"})
    assert load(["a.gin"]).root.kwargs["x"] == Call("optax.adamw", {"b2": 0.9})
    swapped = load(["a.gin"], ["experiment.x = @lab.adamw()"])
    assert swapped.root.kwargs["x"] == Call("lab.adamw", {"b2": 0.9})
    words = r"a\.gin:2: adamw may be any of lab\.adamw, optax\.adamw, which this config calls"
    with pytest.raises(ConfigError, match=words):
        load(["a.gin"], ["experiment.y = @lab.adamw()"])
    with pytest.raises(ConfigError, match="for the second time; the first is adamw.b2 at b.gin:2"):
        write({"b.gin": "experiment.x = @optax.adamw()\nadamw.b2 = 0.9\noptax.adamw.b2 = 0.8\n"})
        load(["b.gin"])


# Bindings that change nothing.

BASE = """\
width = 64
experiment.model = @models.vit()
experiment.optimizer = @optax.adamw()
models.vit.width = %width
models.mlp.hidden = [%width]
optax.adamw.learning_rate = 0.1
optax.sgd.momentum = 0.9
sgd.nesterov = True
"""


def test_an_included_file_may_have_unused_bindings(capsys):
    write(
        {
            "base.gin": BASE,
            "a.gin": "include 'base.gin'\nexperiment.optimizer = @fast/optax.adamw()\n"
            "models.vit.width = 32\nfast/optax.adamw.learning_rate = 0.2\n",
        }
    )
    config = load(["a.gin"])
    adamw = Call("optax.adamw", {"learning_rate": 0.2})
    assert config.root.kwargs == {"model": Call("models.vit", {"width": 32}), "optimizer": adamw}
    shown = [f"{each.source}: {each.binding}. {each.why}" for each in config.unused]
    assert shown == [
        "base.gin:1: the macro width. Only bindings without effect read it.",
        "base.gin:5: models.mlp.hidden. This config never calls models.mlp.",
        "base.gin:6: optax.adamw.learning_rate. a.gin:4 overrides it wherever optax.adamw is"
        " called.",
        "base.gin:7: optax.sgd.momentum. This config never calls optax.sgd.",
        "base.gin:8: sgd.nesterov. This config never calls sgd.",
    ]
    with pytest.raises(ConfigError, match=r"base\.gin:5: This config never calls models\.mlp"):
        load(["base.gin"])  # in a file of the command line it stays an error
    with pytest.raises(ConfigError, match="never calls models.mlp"):
        load(["a.gin"], ["models.mlp.depth = 3"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("optax.sgdd.momentum = 1", "There is no function 'optax.sgdd'. Did you mean"),
        ("sgdd.momentum = 1", "There is no function 'sgdd'."),
        ("optax.sgd.momentun = 1", "optax.sgd has no argument 'momentun'. Did you"),
        ("sgd.momentun = 1", "optax.sgd has no argument 'momentun'"),
        ("s/optax.sgd.momentun = 1", "optax.sgd has no argument 'momentun'"),
        ("slow/optax.adamw.b1 = 1", "Nothing reads slow/optax.adamw.b1: optax.adamw is never"),
        ("slow/adamw.b1 = 1", "Nothing reads slow/adamw.b1: optax.adamw is never called in the"),
        ("lr = 1", "Nothing reads the macro lr."),
    ],
)
def test_a_mistake_in_an_included_file_is_an_error(line, message):
    write({"base.gin": line + "\n", "a.gin": "include 'base.gin'\n" + GOOD})
    with pytest.raises(ConfigError) as caught:
        Builder(load(["a.gin"])).check()
    assert str(caught.value).startswith(f"base.gin:1: {message}")


GOOD = """\
experiment:
  model = @models.mlp()
  data = @data.digits()
  loss = @losses.softmax_cross_entropy()
  optimizer = @optax.adamw()
  steps = 100
adamw.learning_rate = 1e-3
"""


def test_the_command_lists_unused_bindings_and_takes_search_paths(capsys):
    write({"lib/base.gin": "sgd.momentum = 0.9\n", "a.gin": "include 'base.gin'\n" + GOOD})
    given = ["config", "--gin_file=a.gin", "--gin_search_paths=lib"]
    assert commands.config(options.parser().parse_args([*given, "--unused"])) == 0
    assert capsys.readouterr().out == (
        "lib/base.gin:1: sgd.momentum. This config never calls sgd.\n"
    )
    assert commands.config(options.parser().parse_args(given)) == 0
    printed = capsys.readouterr().out
    assert "momentum" not in printed
    write({"b.yaml": printed})
    given_yaml = ["config", "--config=b.yaml", "--unused"]
    assert commands.config(options.parser().parse_args(given_yaml)) == 0
    assert capsys.readouterr().out == "Every binding is used.\n"
    arguments = options.parser().parse_args([*given, "--gin_search_paths=one,two"])
    assert "--gin_search_paths=one,two" in resolving.config_options(arguments)
