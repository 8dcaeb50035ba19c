"""A part of a user's own package, tests/lab/my_lab/aurora.py, in a chain."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import runs
from trainer.__main__ import main

FIGURES = np.load(Path(__file__).with_name("aurora_figures.npz"))

CONFIG = """
model: !models.mlp {width: 16, depth: 2}
data: !data.digits {batch_size: 100}
loss: !losses.softmax_cross_entropy
steps: 4
optimizer: !optim.optimizer
  groups:
    matrices: !optim.group
      match: .*/kernel
      optimizer: !optim.chain
        learning_rate: 0.02
        before:
        - !parts.momentum {}
        - !my_lab.aurora.balanced_polar {beta: 0.25}
        - !parts.match_norm {}
        after: [!parts.pin_radius {}]
    rest: !optim.group {match: .*, optimizer: !optax.adamw {learning_rate: 0.001}}
"""


@pytest.fixture(autouse=True)
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(runs.LAB)


@pytest.mark.parametrize("i", range(3))
def test_it_agrees_with_its_authors_program(i: int):
    """Float64, by zeropower_via_newtonschulz5 of train_gpt_simple_aurora_ema_ref.py (2026-05-25).

    It is in modded-nanogpt's records/track_3_optimization, and has _AURORA_K = 3 and
    _AURORA_BETA = 0.25. The kernels are [6, 2], [5, 3] and [4, 4], transposed there.
    """
    from my_lab.aurora import balanced_polar  # pyright: ignore[reportMissingImports]

    with jax.enable_x64(True):
        part = balanced_polar(iterations=3, beta=0.25)
        found: Any = part.update(jnp.asarray(FIGURES[f"gradient_{i}"]), part.init(jnp.eye(2)))[0]
        np.testing.assert_allclose(found, FIGURES[f"factor_{i}"], rtol=0, atol=1e-12)


def test_a_config_names_it_and_its_plan_lists_it(tmp_path: Path, capsys: Any):
    (tmp_path / "lab.yaml").write_text(CONFIG)
    options = [f"--config={tmp_path / 'lab.yaml'}", "--vocabulary=my_lab"]
    assert main(["explain", *options]) == 0
    told = capsys.readouterr().out
    assert "  my_lab.aurora.balanced_polar: iterations 2, beta 0.25\n" in told
    assert "before.1: beta 0.25, eps 1e-07" in told
    assert main([*options, f"--workdir={tmp_path / 'run'}"]) == 0
