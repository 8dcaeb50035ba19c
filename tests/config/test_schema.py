"""The JSON schema for editors: it accepts every shipped config, and refuses mistakes.

An editor reads YAML 1.2, in which 1e-3 is a number and 1_000 a string, and drops the tags.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests import runs, short
from tests.runs import ROOT
from trainer.__main__ import main
from trainer.config.schema import schema

FILE = ROOT / "configs" / "schema.json"
CONFIGS = sorted(
    path
    for folder in ("configs", "experiments", "tests")
    for path in (ROOT / folder).rglob("*.yaml")
    if path.name != "entry.yaml"  # the text of an entry of a challenge
    and ROOT / "configs" / "new" not in path.parents  # which name a package of a user
    and not any((above / "plan.json").exists() for above in path.parents)  # written by a sweep
)
# The plain scalars of YAML 1.2's core schema.
CORE = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


class Editor(yaml.SafeLoader):
    """Reads a config as an editor does."""

    yaml_implicit_resolvers = {}


for kind, pattern in CORE.items():
    Editor.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"(?:{pattern})\\Z"), None)


def _int(loader: Editor, node: yaml.ScalarNode) -> int:
    return int(node.value, 0) if node.value[:2] in ("0o", "0x") else int(node.value)


def _untagged(loader: Editor, _: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return node.value  # "" of a call without arguments


Editor.add_constructor("tag:yaml.org,2002:int", _int)
Editor.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(node.value))
Editor.add_multi_constructor("!", _untagged)


@pytest.fixture(scope="module")
def validator() -> Any:
    return jsonschema.Draft202012Validator(json.loads(FILE.read_text()))


def mistakes(validator: Any, text: str) -> list[str]:
    return [error.message for error in validator.iter_errors(yaml.load(text, Editor))]


@pytest.mark.long
def test_the_file_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    printed = runs.printed(capsys, "schema")
    jsonschema.Draft202012Validator.check_schema(json.loads(printed))
    same = printed == FILE.read_text()
    assert same, "Run `python -m tests.reference_pages`, which writes it."


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_shipped_config_is_valid_and_names_the_schema(file: Path, validator: Any) -> None:
    text = file.read_text()
    if file.parent.name == "parts":  # each has a part of its own, in the module beside it
        validator = jsonschema.Draft202012Validator(schema([f"experiments.parts.{file.stem}"]))
    assert mistakes(validator, text) == []
    found = re.search(r"^# yaml-language-server: \$schema=(\S+)$", text, re.MULTILINE)
    assert found and (file.parent / found[1]).resolve() == FILE


@short.parametrize(
    "file",
    runs.CONFIGS,
    runs.kind,
    ids=lambda file: file.name,
)
@pytest.mark.parametrize("option", [[], ["--full"]], ids=["resolved", "full"])
def test_a_config_that_lockstep_writes_is_valid(
    file: Path, option: list[str], validator: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that were written in Gin, and every default."""
    assert mistakes(validator, runs.printed(capsys, "config", f"--config={file}", *option)) == []


RUN = """
model: !models.vit {width: 64, depth: 4}
data: !data.digits {batch_size: 128, crop: 1}
loss: !losses.softmax_cross_entropy
metrics: {accuracy: !metrics.accuracy }
optimizer: !optim.optimizer
  clip_norm: 1.0
  groups:
    matrices: !optim.group
      match: block.*/kernel
      optimizer: !optim.muon
        learning_rate: !schedules.warmup_cosine {peak_value: 0.02, warmup_steps: 5%}
    rest: !optim.group
      match: .*
      optimizer: !optax.adamw {learning_rate: 3e-3, mu_dtype: bfloat16}
steps: 1_000
best_mode: max
writers: [console]
seed: 0
"""
SWEEP = """
base: run.yaml
set: {steps: 20}
arms:
  muon:
    space: {seed: !space.values {values: [1, 2]}}
    trials: 2
  adamw:
    set: {optimizer: !optax.adamw {learning_rate: 1e-3}}
    space: {optimizer.learning_rate: !space.log_uniform {low: 1e-3, high: 0.1}}
method: !method.sobol {seed: 0}
trials: 4
goal: {metric: loss, select_on: test, mode: min}
final: {seeds: 3}
looks: planned
"""
# (what is there, what is written instead) for each of many mistakes.
WRONG_RUNS = [
    ("steps:", "step:"),
    ("best_mode:", "bestmode:"),
    ("optimizer: !optim.optimizer", "optimiser: !optim.optimizer"),
    ("metrics:", "metric:"),
    ("steps: 1_000", "steps: 5 %%"),
    ("steps: 1_000", "steps: 2.5"),
    ("steps: 1_000", "steps: 5 minutes"),
    ("steps: 1_000", "steps: [1000]"),
    ("seed: 0", "seed: zero"),
    ("seed: 0", "seed: 0.5"),
    ("seed: 0", "seed: {value: 0}"),
    ("best_mode: max", "best_mode: maximum"),
    ("best_mode: max", "precision: fp16"),
    ("best_mode: max", "on_nonfinite: ignore"),
    ("best_mode: max", "keep_latest: all"),
    ("best_mode: max", "ema_decay: high"),
    ("best_mode: max", "mesh: 8"),
    ("best_mode: max", "mesh: {data: two}"),
    ("writers: [console]", "writers: console"),
    ("writers: [console]", "writers: [1]"),
    ("width: 64", "widht: 64"),
    ("width: 64", "width: wide"),
    ("width: 64", "width: 6.4"),
    ("batch_size:", "batchsize:"),
    ("crop: 1", "crop: yes please"),
    ("clip_norm: 1.0", "clip_norm: [1.0]"),
    ("clip_norm: 1.0", "clipnorm: 1.0"),
    ("peak_value: 0.02", "peak: 0.02"),
    ("warmup_steps: 5%", "warmup_steps: a few"),
    ("match: block", "matches: block"),
    ("learning_rate: 3e-3", "lr: 3e-3"),
    ("learning_rate: 3e-3", "learning_rate: fast"),
    ("learning_rate: 3e-3", "learning_rate: true"),
    ("mu_dtype: bfloat16", "mu_dtype: 16"),
    ("{accuracy: !metrics.accuracy }", "[accuracy]"),
    ("!losses.softmax_cross_entropy", "softmax_cross_entropy"),
]
WRONG_SWEEPS = [
    ("base: run.yaml", "base: 3"),
    ("arms:", "arm:"),
    ("trials: 4", "trials: four"),
    ("trials: 4", "searches: 2.5"),
    ("trials: 2", "trails: 2"),
    ("select_on: test", "select_on: train"),
    ("mode: min", "mode: smallest"),
    ("metric: loss", "metrics: loss"),
    ("seeds: 3", "seed: 3"),
    ("looks: planned", "looks: often"),
    ("looks: planned", "vmap: true"),
    ("low: 1e-3", "lowest: 1e-3"),
    ("values: [1, 2]", "values: 1"),
    ("!method.sobol {seed: 0}", "!method.sobol {seeds: 0}"),
    ("set: {steps: 20}", "steps: 20"),
]


@pytest.mark.parametrize("text", [RUN, SWEEP], ids=["run", "sweep"])
def test_the_config_that_is_varied_is_valid(text: str, validator: Any) -> None:
    assert mistakes(validator, text) == []


def _varied(text: str, changes: list[tuple[str, str]]) -> Iterator[Any]:
    for old, new in changes:
        assert text.count(old) >= 1, old
        yield pytest.param(text.replace(old, new, 1), id=f"{old} -> {new}")


@pytest.mark.parametrize("text", [*_varied(RUN, WRONG_RUNS), *_varied(SWEEP, WRONG_SWEEPS)])
def test_a_mistake_that_lockstep_refuses_is_refused(
    text: str, validator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mistakes(validator, text)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "wrong.yaml").write_text(text)
    options = [f"--config={tmp_path / 'wrong.yaml'}"]
    command = ["sweep", "--check"] if "base" in text else ["explain"]
    assert "error: " in runs.refused(capsys, *command, *options)


def test_the_functions_of_a_users_package_are_known(
    lab: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schema", "--vocabulary=my_lab.nets", "--vocabulary=my_lab.optimizers"]) == 0
    made = json.loads(capsys.readouterr().out)
    validator = jsonschema.Draft202012Validator(made)
    names = [name for name in made["$defs"] if name.startswith("my_lab.")]
    assert names
    tags = json.loads(runs.printed(capsys, "schema", "--custom_tags", "--vocabulary=my_lab.nets"))
    for name in names:
        if name.startswith("my_lab.nets"):
            assert f"!{name} mapping" in tags
        first = next(iter(made["$defs"][name]["properties"]))
        place = "optimizer" if name.startswith("my_lab.optimizers") else "model"
        assert mistakes(validator, f"{place}: !{name} {{{first}: 1}}") == []
        assert mistakes(validator, f"{place}: !{name} {{{first}_x: 1}}")


def test_a_package_that_does_not_exist_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--vocabulary=no_such_lab"]) == 2
    assert "there is no module named 'no_such_lab'" in capsys.readouterr().err


def test_the_list_of_tags_has_those_of_every_shipped_config(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tags = json.loads(runs.printed(capsys, "schema", "--custom_tags"))
    lines = [line for file in CONFIGS for line in file.read_text().splitlines()]
    used = {tag for line in lines for tag in re.findall(r"(?<=\s)![\w.:]+", line.split(" #")[0])}
    assert len(used) > 20
    used -= {tag for tag in used if tag.startswith("!experiments.parts.")}
    assert used <= {tag.split()[0] for tag in tags}
