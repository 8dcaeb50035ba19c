"""Settings by path, the order in which files, bindings and settings override, and differences."""

import os
import re

import numpy as np
import pytest

from trainer.config import (
    Call,
    Config,
    ConfigError,
    Source,
    diff,
    load,
    override,
    replace,
)
from trainer.config.tree import same

YAML = """\
steps: 100
model: !models.vit {width: 64, sizes: [1, 2, {a: 3}]}
optimizer: !optim.optimizer
  groups:
    matrices: !optim.group {match: a, optimizer: !optim.muon {learning_rate: !s.w {peak: 0.1}}}
    a.b: {c: 1}
    a: {z: {d: 2}}
    3: {x: 1}
"""


@pytest.fixture
def config(tmp_path) -> Config:
    (tmp_path / "a.yaml").write_text(YAML)
    return load([tmp_path / "a.yaml"])


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("steps=200", "steps", 200),
        ("steps = 1_000 ", "steps", 1000),
        ("steps=5%", "steps", "5%"),
        ("steps='5'", "steps", "5"),
        ("steps=null", "steps", None),
        ("seed=3", "seed", 3),
        ("model.width=1e2", "model.width", 100.0),
        ("model.depth=4", "model.depth", 4),
        ("model.sizes=[5, 6]", "model.sizes", [5, 6]),
        ("model.sizes.1=7", "model.sizes.1", 7),
        ("model.sizes.2.a=x=y", "model.sizes.2.a", "x=y"),
        ("model=!models.mlp {width: 8}", "model", Call("models.mlp", {"width": 8})),
        ("model=!models.mlp", "model", Call("models.mlp")),
        (
            "optimizer.groups.matrices.optimizer.learning_rate.peak=0.03",
            "optimizer.groups.matrices.optimizer.learning_rate.peak",
            0.03,
        ),
        ("optimizer.groups.a.b.c=5", "optimizer.groups.a.b.c", 5),  # the longest key that fits
        ("optimizer.groups.3.x=5", "optimizer.groups.3.x", 5),
        ("optimizer.groups={}", "optimizer.groups", {}),
        ("optimizer.groups.new=1", "optimizer.groups.new", 1),
    ],
)
def test_a_setting_replaces_the_value_at_its_path(setting, path, value, config):
    changed = override(config, [setting])
    assert same(changed.at(path), value)
    assert str(changed.sources[path]) == f"--set {setting}"
    top = path.split(".")[0]
    assert {re.split("[.:]", line)[0] for line in diff(config.root, changed.root)} == {top}
    others = {key for key in config.sources if key and key.split(".")[0] != top}
    assert all(changed.sources[key] == config.sources[key] for key in others)
    assert changed.sources[""] == config.sources[""]


def test_a_new_key_of_a_dict_comes_last(config):
    changed = override(config, ["optimizer.groups.z=1", "optimizer.groups.b={x: 1}", "t={1: 2}"])
    assert list(changed.at("optimizer.groups")) == ["matrices", "a.b", "a", 3, "z", "b"]
    assert override(changed, ["t.2=3"]).at("t") == {1: 2, 2: 3}


def test_settings_apply_in_order_and_reach_values_set_by_earlier_ones(config):
    changed = override(config, ["model=!models.mlp {width: 8}", "model.width=9", "model.depth=1"])
    assert changed.root.kwargs["model"] == Call("models.mlp", {"width": 9, "depth": 1})


def test_a_setting_of_a_sweeps_base_is_told_where_it_stands(config):
    with pytest.raises(ConfigError, match="stands below set: --set set={steps: ...}"):
        override(config, ["base=base.yaml", "base.steps=100"])


def test_a_long_setting_is_cut_with_a_mark(config):
    name = "x" * 100
    label = str(override(config, [f"model.name={name}"]).sources["model.name"])
    assert label == f"--set model.name={'x' * 46}..."


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps", "A setting has the form path=value, as in --set steps=100."),
        ("=3", "A setting has the form path=value, as in --set steps=100."),
        ("steps=", "A setting has the form path=value, as in --set steps=100."),
        ("steps=# 3", "A setting has the form path=value, as in --set steps=100."),
        ("modle.width=3", "The root has no 'modle'. Did you mean 'model'?"),
        ("zzz.width=3", "The root has no 'zzz'. It has: model, optimizer, steps."),
        ("steps.x=3", "steps is the integer 100, which has no keys, so it has no 'x'."),
        ("model.widht.x=3", "model has no 'widht'. Did you mean 'width'?"),
        ("optimizer.groups.matrixes.match=b", "optimizer.groups has no 'matrixes'. Did you mean"),
        ("optimizer.groups.new.x=1", "optimizer.groups has no 'new'. It has: 3, a, a.b, matrices."),
        ("writers.0=console", "To replace a default, set the whole value: --set writers=[...]."),
        ("metrics.top=3", "To replace a default, set the whole value: --set metrics={top: ...}."),
        ("model.dims.a.b=3", "set the whole value: --set model.dims={a: ...}."),
        ("model.=3", "The path has an empty key below the root: join keys by single dots."),
        ("model..width=3", "The path has an empty key below model: join keys"),
        (".=3", "The path has an empty key below the root"),
        ("model.sizes.3=1", "model.sizes has no '3'. It has the elements: 0, 1, 2."),
        ("model.two words=1", "model has no 'two words'."),
        ("model=[1", "This is not valid YAML"),
        ("model=@models.mlp()", "a call is written !optax.adamw {learning_rate: 1e-3}, not"),
        ("model=!models.mlp [1]", "!models.mlp takes its arguments by name"),
        ("model.width=.nan", "The value is NaN, which a config cannot contain."),
        ("steps=\0", "The text contains '\\x00', which is not allowed."),
        ("steps=" + "[" * 99 + "]" * 99, "nested deeper than 64"),
        ("steps=" + "1" * 300_000, "The text is larger than 256 KiB, the limit."),
    ],
)
def test_a_wrong_setting_is_refused(setting, message, tmp_path, config):
    with pytest.raises(ConfigError) as caught:
        load([tmp_path / "a.yaml"], sets=[setting])
    told = str(caught.value)
    assert told.startswith("--set")
    assert message in told
    assert len(told.splitlines()) <= 7


def test_settings_cannot_build_a_tree_that_is_too_deep(config):
    deep = "[" * 60 + "]" * 60
    with pytest.raises(ConfigError, match="nested deeper"):
        override(config, [f"x={deep}", "x" + ".0" * 59 + f"={deep}"])


def test_values_may_be_replaced_from_python(config):
    changed = replace(config, {"steps": 7, "model.depth": [Call("a.b")]}, Source("sweep.yaml", 3))
    assert changed.root.kwargs["steps"] == 7
    assert changed.at("model.depth.0") == Call("a.b")
    assert str(changed.sources["model.depth.0"]) == "sweep.yaml:3"
    assert config.root.kwargs["steps"] == 100
    for path, value, message in [
        ("modle.x", 3, "The root has no 'modle'"),
        ("steps", np.float64(3), "not float64"),
        ("steps", [object()], "not object"),
        ("steps", {1.5: 1}, "Keys must be strings or integers, got the float 1.5."),
        ("steps", Call("a.b", {"two words": 1}), "'two words' is not the name of an argument"),
        ("steps", float("nan"), "NaN"),
    ]:
        with pytest.raises(ConfigError, match=message) as caught:
            replace(config, {path: value}, Source("sweep.yaml", 3))
        assert str(caught.value).startswith("sweep.yaml:3: ")
    assert replace(config, {"steps": (1, 2)}, Source("x")).root.kwargs["steps"] == [1, 2]


def test_files_are_read_before_bindings_and_bindings_before_settings(tmp_path):
    (tmp_path / "a.gin").write_text("experiment.x = 1\nexperiment.y = 1\nexperiment.z = @a.f()\n")
    (tmp_path / "b.gin").write_text("experiment.y = 2\na.f.p = 2\na.f.q = 2\n")
    config = load(
        [tmp_path / "a.gin", tmp_path / "b.gin"],
        ["experiment.y = 3\na.f.q = 3", "a.f.q = 4\na.f.r = 4"],
        ["z.r=5", "z.s=5"],
    )
    call = Call("a.f", {"p": 2, "q": 4, "r": 5, "s": 5})
    assert config.root == Call("experiment", {"x": 1, "y": 3, "z": call})
    places = {key: str(config.sources[key]) for key in ("x", "y", "z.q", "z.s")}
    assert places == {
        "x": f"{tmp_path}/a.gin:1",
        "y": "--gin_bindings=experiment.y = 3 a.f.q = 3:1",
        "z.q": "--gin_bindings=a.f.q = 4 a.f.r = 4:1",
        "z.s": "--set z.s=5",
    }


def test_an_override_may_leave_bindings_of_another_file_unused(tmp_path):
    (tmp_path / "base.gin").write_text(
        "width = 64\nexperiment.model = @s/models.vit()\ns/models.vit:\n  width = %width\n"
    )
    (tmp_path / "a.gin").write_text("include 'base.gin'\nexperiment.model = @models.mlp()\n")
    model = {"model": Call("models.mlp")}
    assert load([tmp_path / "a.gin"]).root.kwargs == model
    assert load([tmp_path / "base.gin"], ["experiment.model = @models.mlp()"]).root.kwargs == model
    for slip, message in {
        "models.vti.width = 3": "This config never calls models.vti",
        "s/models.vit.depth = 3": "This config never calls models.vit",  # no longer, at this point
        "w = 3": "Nothing reads the macro w",
    }.items():
        with pytest.raises(ConfigError, match=message) as caught:
            load([tmp_path / "a.gin"], [slip])
        assert str(caught.value).startswith(f"--gin_bindings={slip}: ")
    with (tmp_path / "base.gin").open("a") as file:
        file.write("models.vti.width = 1\n")
    [unused] = [each for each in load([tmp_path / "a.gin"]).unused if each.function]
    assert (str(unused.source), unused.function) == (f"{tmp_path}/base.gin:5", "models.vti")


def test_differences_are_listed_by_path(config):
    changed = override(
        config,
        ["steps=100.0", "model.sizes=[1]", "optimizer.groups.matrices.match=b", "seed=1"]
        + ["optimizer.groups.matrices.optimizer=!optax.sgd {learning_rate: 1.0}"],
    )
    assert diff(config.root, config.root) == []
    assert diff(config.root, changed.root) == [
        "steps: 100 -> 100.0",
        "model.sizes: [1, 2, {'a': 3}] -> [1]",
        "optimizer.groups.matrices.match: 'a' -> 'b'",
        "optimizer.groups.matrices.optimizer: optim.muon(learning_rate=s.w(peak=0.1)) ->"
        " optax.sgd(learning_rate=1.0)",
        "seed: (absent) -> 1",
    ]
    assert "seed: 1 -> (absent)" in diff(changed.root, config.root)
    a = Call("experiment", {"groups": {"x": 1, "y": 2}})
    b = Call("experiment", {"groups": {"y": 2, "x": 1}})
    assert diff(a, b) == ["groups: the order x, y -> y, x"]
    assert diff(a, Call("experiment", {"groups": Call("x")})) == ["groups: {'x': 1, 'y': 2} -> x()"]


def test_two_keys_with_one_path_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("x: {a: {b: 1}, a.b: 2}\n")
    with pytest.raises(ConfigError, match="Two values of this config have the path 'x.a.b'"):
        load([tmp_path / "a.yaml"])


@pytest.fixture
def odd_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gin").write_text("experiment.x = 1\n")
    (tmp_path / "a.yaml").write_text("x: 1\n")
    (tmp_path / "a.txt").write_text("x: 1\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "scalar.yaml").write_text("hello\n")
    (tmp_path / "null.yaml").write_text("---\n")
    (tmp_path / "call.yaml").write_text("!experiment {x: 1}\n")
    (tmp_path / "key.yaml").write_text("two words: 1\n")
    (tmp_path / "no_root.gin").write_text("a.b = 1\n")
    (tmp_path / "only_include.gin").write_text("include 'no_root.gin'\n")
    (tmp_path / "dir.gin").mkdir()
    (tmp_path / "dir.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.gin")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "dangling.yaml").symlink_to("nowhere")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.gin").write_text("include 'gone.gin'\n")
    (tmp_path / "sub" / "d.yaml").write_text("include: gone.yaml\n")
    (tmp_path / "sub" / "cc.gin").write_text("include '../a.gin'\n")


@pytest.mark.parametrize(
    ("files", "bindings", "message"),
    [
        ([], [], "No config is given: name one with --config=configs/muon_vit.gin."),
        (
            ["no_roots.gin"],
            [],
            "no_roots.gin: The file does not exist. Did you mean 'no_root.gin'?",
        ),
        (["list.gin"], [], "list.gin: The file does not exist. Did you mean 'list.yaml'?"),
        (["zzzz.gin"], [], "zzzz.gin: The file does not exist. In . there is: a.gin, a.yaml,"),
        (["no/where.gin"], [], "no/where.gin: The file does not exist. Nor does its directory no."),
        (["a.txt"], [], "a.txt: The format of 'a.txt' is unknown: the name of a config ends in"),
        ([""], [], "The format of '' is unknown"),
        (["dir.gin"], [], "dir.gin: The file is a directory: name a .gin or .yaml file."),
        (["dir.yaml"], [], "dir.yaml: The file is a directory"),
        (["pipe.gin"], [], "pipe.gin: The file is not a regular file"),
        (["zero.yaml"], [], "zero.yaml: The file is not a regular file"),
        (["dangling.yaml"], [], "dangling.yaml: The file does not exist."),
        (["a.gin", "a.yaml"], [], "The files a.gin, a.yaml are Gin and YAML: use files of one"),
        (["list.yaml"], [], "list.yaml:1: The root of a config must be a mapping"),
        (["scalar.yaml"], [], "not the string 'hello'."),
        (["call.yaml"], [], "not a call of experiment."),
        (["null.yaml"], [], "null.yaml: The file is empty: a config names a model, data, an"),
        (["key.yaml"], [], "key.yaml:1: 'two words' is not the name of an argument."),
        (["no_root.gin"], [], "no_root.gin: The config binds no argument of experiment, so there"),
        (["only_include.gin"], [], "The config binds no argument of experiment"),
        (["a.yaml"], ["x = 1"], "Gin's bindings change Gin files, and this config is YAML: use"),
        (["a.gin"], ["experiment.x ="], "--gin_bindings=experiment.x =: Gin cannot read"),
        (["a.gin"], ["import os"], "--gin_bindings=import os: A config cannot import"),
        (
            ["a.gin"],
            ["include 'b.gin'"],
            "The included file b.gin does not exist. In . there is: a.gin, a.yaml,",
        ),
        (
            ["a.gin"],
            ["include 'b.gin'"],
            "The current folder has no such file either. Name further folders with --gin_search",
        ),
        (["a.gin"], ["include 'sub/c.gin'"], "The included file sub/c.gin does not exist. Did you"),
        (["a.gin"], ["a\nexperiment.y = ]"], "--gin_bindings=a experiment.y = ]:1: Gin cannot"),
        (["a.gin"], ["experiment.y = 1\nexperiment.y = 2"], "for the second time; the first is at"),
        (["sub/d.gin"], [], "sub/d.gin:1: The included file sub/gone.gin does not exist. In sub"),
        (["sub/d.yaml"], [], "sub/d.yaml:1: The included file sub/gone.yaml does not exist."),
    ],
)
def test_a_path_that_is_not_a_config_file_is_refused(files, bindings, message, odd_files):
    with pytest.raises(ConfigError) as caught:
        load(files, bindings)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 7


def test_a_binding_may_include_a_file(odd_files):
    config = load(["no_root.gin"], ["include 'sub/cc.gin'\nexperiment.y = @a()"])
    assert config.root == Call("experiment", {"x": 1, "y": Call("a", {"b": 1})})


def test_more_than_a_hundred_included_files_are_refused(tmp_path):
    """Each file includes the next one twice: 2**40 files."""
    for i in range(40):
        (tmp_path / f"{i}.gin").write_text(f"include '{i + 1}.gin'\n" * 2)
        (tmp_path / f"{i}.yaml").write_text(f"include: [{i + 1}.yaml, {i + 1}.yaml]\n")
    (tmp_path / "40.gin").write_text("experiment.x = 1\n")
    (tmp_path / "40.yaml").write_text("x: 1\n")
    for suffix in ("gin", "yaml"):
        with pytest.raises(ConfigError, match="includes more than 100 files"):
            load([tmp_path / f"0.{suffix}"])


def test_an_error_points_to_the_argument_that_it_names(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "model: !models.vit\n  width: 64\n  num_heads: 4\n"
        "optimizer: !optim.optimizer\n  clip_norm: 1.0\nseed: 3\n"
    )
    config = load([tmp_path / "a.yaml"])

    def line(path, text, config=config):
        return config.source_of_error(path, text).line

    assert line("model", "num_heads=4 does not divide width=64") == 3
    assert line("model", "the width is shared, but num_heads is 4") == 2
    assert line("model", "the width of models.width; num_heads=4") == 3
    assert line("model", "nothing that is named, num_heads2") == 1
    assert line("", "clip_norm is 1") == 5
    assert line("", "seed is 3; clip_norm=1") == 6
    assert line("", "width is 64") == 1
    edited = override(config, ["model.width=63"])
    told = edited.source_of_error("model", "num_heads=4 does not divide width=63")
    assert str(told) == "--set model.width=63"
    told = edited.source_of_error("model", "num_heads=4 needs more than the width of 63")
    assert str(told) == "--set model.width=63"
    assert edited.overridden("model") == ["--set model.width=63"] and not config.overridden("model")
    assert not override(config, ["model=!models.mlp {width: 3}"]).overridden("model")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("/nowhere", "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere'"),
        ("/nowhere", "FileNotFoundError: [Errno 2] No such file: '/nowhere/train.npz'"),
        ("/nowhere", "The name may be wrong: nothing is prepared in /nowhere."),
        ("~/nowhere", "Nothing is prepared in /users/ann/nowhere."),
        ("./nowhere/", "Nothing is prepared in /users/ann/nowhere."),
        ("nowhere", "Nothing is prepared in /users/ann/nowhere."),
    ],
)
def test_an_error_points_to_the_argument_whose_value_it_quotes(value, text, tmp_path):
    (tmp_path / "a.yaml").write_text("data: !data.tfds\n  name: mnist\n  data_dir: /data\n")
    config = load([tmp_path / "a.yaml"], sets=[f"data.data_dir={value}"])
    assert str(config.source_of_error("data", text)) == f"--set data.data_dir={value}"
    assert config.source_of_error("data", "The data set 'mnist' is not prepared.").line == 2
    longer = f"Nothing is prepared in {value.rstrip('/')}else."
    assert config.source_of_error("data", longer).line == 1
