"""A lab's own model, data, optimizer, schedule and loss, with no line of ours changed."""

import json

import pytest

from tests import runs, short
from trainer.__main__ import main

pytestmark = pytest.mark.usefixtures("lab")

GIN = """
experiment:
  model     = @models.from_{library}()
  data      = @my_lab.spirals.Spirals()
  loss      = @my_lab.losses.focal()
  metrics   = {{'hits': @metrics.accuracy()}}
  optimizer = @my_lab.optimizers.sign_momentum()
  steps     = 150
  writers   = []
metrics.accuracy.labels = 'arm'
"""

LINEN = f"""{GIN.format(library="linen")}
models.from_linen:
  module = @my_lab.nets.Spiralnet()
  inputs = 'point'
my_lab.optimizers.sign_momentum.learning_rate = @my_lab.optimizers.sawtooth()
my_lab.optimizers.sawtooth:
  peak   = 0.01
  period = '50%'
"""

NNX = """
model: !models.from_nnx {constructor: !partial:my_lab.nets.Ringnet {width: 16}, inputs: point}
data: !my_lab.spirals.Spirals {batch_size: 50}
loss: !my_lab.losses.focal {gamma: 1.0}
metrics: {hits: !metrics.accuracy {labels: arm}}
optimizer: !my_lab.optimizers.sign_momentum {learning_rate: 0.01}
steps: 150
writers: []
"""


NNX_GIN = f"""{GIN.format(library="nnx")}
models.from_nnx:
  constructor = @my_lab.nets.Ringnet
  inputs      = 'point'
my_lab.nets.Ringnet.width = 16
my_lab.optimizers.sign_momentum.learning_rate = 0.01
"""


@short.parametrize(
    ("name", "text"),
    [("linen.gin", LINEN), ("nnx.yaml", NNX), ("nnx.gin", NNX_GIN)],
)
def test_a_package_from_outside_trains(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    workdir = tmp_path / "run"
    assert main([f"--config={tmp_path / name}", "--vocabulary=my_lab", f"--workdir={workdir}"]) == 0
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    hits = [line["eval/hits"] for line in lines if "eval/hits" in line]
    assert hits[-1] > 0.8  # a guess is right once in three
    if name == "linen.gin":
        # The lab's sawtooth, worked out by hand: 1 - 0.9 (step mod 75) / 75 of the peak.
        for line in lines:
            wanted = 0.01 * (1 - 0.9 * ((line["step"] - 1) % 75) / 75)
            assert line["learning_rate/all"] == pytest.approx(wanted, rel=1e-5)


TERSE = """
learning_rate: !my_lab.optimizers.sawtooth {peak: 0.1, period: 50%}
weight_decay: !optax.linear_schedule {init_value: 0.3, end_value: 0.0, transition_steps: 100}
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["terse", "oddly_annotated"])
def test_learning_rate_and_weight_decay_are_floats_for_any_annotation(name, tmp_path, capsys):
    """They are planned, drawn, scheduled and logged; `weight_decay=0` is not an integer."""
    arguments = "".join(f"  {line}\n" for line in TERSE.strip().splitlines())
    text = NNX.replace("sign_momentum {learning_rate: 0.01}", f"{name}\n{arguments}".rstrip())
    (tmp_path / "a.yaml").write_text(text.replace("steps: 150", "steps: 2\nlog_every: 1"))
    options = [f"--config={tmp_path}/a.yaml", "--vocabulary=my_lab"]
    shown = runs.printed(capsys, "explain", *options)
    assert f"my_lab.optimizers.{name}  0.1      0.3 " in shown
    assert "learning rate by step" in shown
    assert main([*options, f"--workdir={tmp_path}/run"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    first, second = [row for row in rows if "train/loss" in row]
    assert [row["learning_rate/all"] for row in (first, second)] == pytest.approx([0.1, 0.1])
    assert second["weight_decay/all"] == pytest.approx(0.297)
    wrong = "--set=optimizer.learning_rate=fast"
    assert "takes a float" in runs.refused(capsys, "config", *options, wrong)


def test_without_the_vocabulary_option_a_package_is_not_available(tmp_path, capsys):
    (tmp_path / "nnx.yaml").write_text(NNX)
    assert main([f"--config={tmp_path / 'nnx.yaml'}", f"--workdir={tmp_path / 'run'}"]) == 2
    assert "--vocabulary" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            NNX_GIN.replace("@my_lab.nets.Ringnet", "@my_lab.nets.Ringnet()"),
            "without calling it, constructor = @my_lab.nets.Ringnet in Gin or",
        ),
        (
            NNX_GIN.replace("@my_lab.nets.Ringnet\n", "'my_lab.nets.Ringnet'\n").replace(
                "my_lab.nets.Ringnet.width = 16\n", ""
            ),
            "models.from_nnx takes a function for 'constructor', and was given the string 'my_lab."
            "nets.Ringnet'. Write a function itself as @name.of.it in Gin and !partial:name.of",
        ),
        (
            LINEN.replace("Spiralnet", "Ringnet"),
            "models.from_nnx builds nnx modules",
        ),
    ],
)
def test_an_nnx_module_written_as_a_call_gets_an_error_that_explains(text, words, tmp_path, capsys):
    (tmp_path / "nnx.gin").write_text(text)
    assert main(["explain", f"--config={tmp_path / 'nnx.gin'}", "--vocabulary=my_lab"]) == 2
    assert words in capsys.readouterr().err
