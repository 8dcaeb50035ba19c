"""config_full.yaml: every default is in it, and it means the same run."""

import re
from pathlib import Path
from typing import Any

import optax
import pytest

import optim
from tests import runs, short
from tests.runs import CONFIGS as FILES
from tests.runs import ELSEWHERE, lines, options, train, write_config
from tests.sweep.test_sweep import folders, swept
from trainer import config as configs
from trainer.__main__ import main
from trainer.config import Builder, Call, ConfigError, full_text, load
from trainer.config.full import complete
from trainer.engine.program import load_located
from trainer.sweep.plan import Trial
from trainer.sweep.wave import ConfigFiles

pytestmark = [
    pytest.mark.usefixtures("lab"),
    # optax's dpsgd warns of its own argument.
    pytest.mark.filterwarnings("ignore:.*seed:DeprecationWarning"),
]


def again(config: configs.Config, tmp_path: Path, vocabulary: Any = ()) -> configs.Config:
    """Writes the full config to a file, and loads it."""
    file = tmp_path / "config_full.yaml"
    file.write_text(full_text(config, vocabulary))
    return load([file])


@pytest.mark.long
@short.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_full_config_of_a_shipped_config_has_the_same_program(file, tmp_path):
    config = load([str(file)], sets=ELSEWHERE.get(file.name, []))
    full = again(config, tmp_path)
    assert full_text(full) == full_text(config)
    # Some data are not on every machine.
    programs = [load_located(each, declared=True) for each in (config, full)]
    assert programs[0].inputs.values == programs[1].inputs.values
    traced = [re.sub(r"0x\w+", "", str(p.trace(p.abstract_state()).jaxpr)) for p in programs]
    assert traced[0] == traced[1]


def _optimizers() -> list[str]:
    """Returns the public functions of optax and optim that take a learning rate."""
    named = [("optax", optax), ("optax.contrib", optax.contrib), ("optim", optim)]
    found = [f"{name}.{each}" for name, module in named for each in dir(module)]
    builder = Builder(configs.Config(Call("experiment"), {}))
    kept = []
    for name in found:
        try:
            parameters = builder.function(name).parameters
        except ConfigError:
            continue
        required = [key for key, each in parameters.items() if each.required]
        if "learning_rate" in parameters and set(required) <= {"learning_rate"}:
            kept.append(name)
    return kept


@pytest.mark.long
def test_the_inputs_of_the_program_do_not_depend_on_written_defaults(tmp_path):
    """Another set of inputs has other bits; lists of floats become inputs if they are written."""
    names = _optimizers()
    assert len(names) > 40
    for name in names:
        file = tmp_path / "run.yaml"
        file.write_text(
            "model: !models.mlp {width: 8}\ndata: !data.digits\n"
            f"loss: !losses.softmax_cross_entropy\noptimizer: !{name} {{learning_rate: 1e-3}}\n"
            "steps: 2\n"
        )
        config = load([file])
        full = again(config, tmp_path)
        assert load_located(full).inputs.values == load_located(config).inputs.values, name


@pytest.mark.long
def test_a_run_of_the_full_config_has_the_same_rows(tmp_path, capsys):
    config = write_config(tmp_path)
    assert train(config, tmp_path / "run") == 0
    full = tmp_path / "run" / "config_full.yaml"
    assert main([f"--config={full}", "--vocabulary=unruly", f"--workdir={tmp_path / 'two'}"]) == 0
    assert lines(tmp_path / "two") == lines(tmp_path / "run")
    given = [each for each in options(config, tmp_path) if "--workdir" not in each]
    assert runs.printed(capsys, "config", "--full", *given) == full.read_text()
    assert "precision: float32\n" in full.read_text()
    assert "eps_root: 0.0\n" in full.read_text()


DEFAULTS = """
from typing import Annotated, Any
import jax.numpy as jnp
import optax

_UNSET = object()


def widest(x): ...


def loss(
    scale: float = 2,
    weights: tuple[float, ...] = (0.5, 1.0),
    shape: tuple[int, ...] = (3, 4),
    names: list[str] = ["a"],
    reduce=widest,
    mean: Any = jnp.zeros(3),
    sentinel=_UNSET,
    factor: Annotated[float, "input"] = 0.5,
    off: float = float("nan"),
    far: float = float("inf"),
    rest: dict = {"a": 1},
    nothing: dict = {},
    *more: int,
    last: int | None = None,
):
    def computed(outputs, batch):
        assert scale == 2 and isinstance(scale, int) and reduce is widest
        return factor * optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"])
    return computed


def hook(step, metrics=None, params=None): ...
"""


@pytest.mark.long
def test_defaults_that_a_config_cannot_say_are_comments(tmp_path, monkeypatch):
    (tmp_path / "lab_of_defaults.py").write_text(DEFAULTS)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "model: !models.mlp {width: 8}\ndata: !data.digits\nloss: !lab_of_defaults.loss\n"
        "optimizer: !optax.sgd {learning_rate: 0.1}\nsteps: 2\n"
        "hooks: [!partial:lab_of_defaults.hook]\n"
    )
    lab = ["lab_of_defaults"]
    config = load([tmp_path / "run.yaml"])
    root, left = complete(config, lab)
    assert root.kwargs["loss"] == Call(
        "lab_of_defaults.loss",
        {"shape": [3, 4], "names": ["a"], "factor": 0.5, "far": float("inf"), "nothing": {}}
        | {"last": None},
    )
    assert root.kwargs["hooks"] == [Call("lab_of_defaults.hook", {}, partial=True)]
    assert left == {
        "loss.scale": "2",  # it would be converted to a float
        "loss.weights": "(0.5, 1.0)",
        "loss.reduce": "lab_of_defaults.widest",
        "loss.mean": "Array([0., 0., 0.], dtype=float32)",
        "loss.sentinel": "an object of builtins.object",
        "loss.off": "nan",
        "loss.rest": "{'a': 1}",
        "hooks.0.metrics": "None",  # the run passes it by position
        "hooks.0.params": "None",
    }
    full = again(config, tmp_path, lab)
    assert (
        "#   loss.reduce: lab_of_defaults.widest\n" in (tmp_path / "config_full.yaml").read_text()
    )
    for index, each in enumerate(("run.yaml", "config_full.yaml")):
        workdir = f"--workdir={tmp_path / str(index)}"
        assert main([f"--config={tmp_path / each}", "--vocabulary=lab_of_defaults", workdir]) == 0
    assert lines(tmp_path / "0") == lines(tmp_path / "1")
    assert load_located(full, lab).inputs.values == load_located(config, lab).inputs.values


def test_full_and_unused_exclude_each_other(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["config", "--config=configs/muon_vit.gin", "--full", "--unused"])
    assert caught.value.code == 2
    assert "--unused: not allowed with argument --full" in capsys.readouterr().err


RATE = "optimizer.groups.rest.optimizer.learning_rate"
POINTS: list[dict[str, Any]] = [
    {RATE: 1e-5, "model.pool": "gap"},
    {RATE: 0.1, "model.pool": "no"},
    {RATE: 3, "model.pool": None},
    {RATE: float("inf"), "model.pool": True},
    {RATE: 0.1, "model.pool": "a: b, c"},
    {RATE: Call("schedules.rsqrt", {"peak_value": 0.1}), "model.pool": "gap"},
    {RATE: -0.0, "model.pool": "1e-3"},
    {"writers": ["jsonl"], RATE: 0.2},
    {"model.dropout": 0.5, RATE: 0.2},
]


def test_the_files_of_trials_are_those_of_their_configs():
    """They are filled into one text for each arm, because writing one takes milliseconds."""
    base = load(["configs/muon_vit.yaml"])
    other = load(["configs/muon_vit.yaml"], sets=["steps=7"])
    files = ConfigFiles()
    for arm in (base, other):
        for number, values in enumerate(POINTS):
            trial = Trial("muon", number, number % 2, values, arm)
            assert files.texts(trial) == {
                "config.yaml": configs.dump(trial.config.root),
                "config_full.yaml": full_text(trial.config),
            }


@pytest.mark.long
def test_the_folder_of_a_trial_has_its_full_config(tmp_path):
    found = folders(swept(tmp_path))
    assert len(found) == 5
    for trial in found:
        config = load([trial / "config.yaml"])
        assert (trial / "config_full.yaml").read_text() == full_text(config, ["unruly"])
