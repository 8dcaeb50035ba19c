"""A run says when none of a group's low-precision parameters move, and only then."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import runs
from trainer import checkpoint
from trainer.train.stuck_parameters import _checksum


@pytest.fixture(autouse=True)
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(runs.LAB)


GROUPS = """
experiment.precision = 'bfloat16'
experiment.ema_decay = None
experiment.optimizer = @optim.optimizer()
optim.optimizer.groups = {'weights': @weights/optim.group(), 'rest': @rest/optim.group()}
optim.optimizer.low_precision = 'nearest'
weights/optim.group.match = '.*/kernel'
weights/optim.group.optimizer = @optax.contrib.prodigy()
rest/optim.group.match = '.*'
rest/optim.group.optimizer = @optax.sgd()
optax.sgd.learning_rate = 0.5
"""


def said(tmp_path: Path, capfd: pytest.CaptureFixture[str], *bindings: str) -> list[str]:
    config, workdir = runs.write_config(tmp_path, GROUPS), tmp_path / "run"
    assert runs.train(config, workdir, *(f"--gin_bindings={line}" for line in bindings)) == 0
    return [line for line in capfd.readouterr().err.splitlines() if "moved" in line]


@pytest.mark.long
def test_a_group_that_rounding_keeps_from_moving_is_reported_once(tmp_path, capfd):
    (line,) = said(tmp_path, capfd)
    assert "from step 0 to 3 no bfloat16 parameter of group 'weights' moved" in line
    assert "low_precision='master'" in line
    first, last = (
        runs.leaves(checkpoint.load_params(tmp_path / "run", step, "params")) for step in (12, 20)
    )
    for path in first:  # what was said is so
        moved = not np.array_equal(np.asarray(first[path]), np.asarray(last[path]))
        assert moved == (not path.endswith("kernel")), path


SGD = "weights/optim.group.optimizer = @own/optax.sgd()"


@pytest.mark.long
@pytest.mark.parametrize(
    "bindings",
    [
        ["optim.optimizer.low_precision = 'master'"],
        ["experiment.precision = 'float32'"],
        ["weights/optim.group.optimizer = @optim.frozen()"],
        [SGD, "own/optax.sgd.learning_rate = 0.0"],
        [
            SGD,
            "own/optax.sgd.learning_rate = @optax.linear_schedule()",  # 0 at the first 18 steps
            "optax.linear_schedule.init_value = 0.0",
            "optax.linear_schedule.end_value = 0.5",
            "optax.linear_schedule.transition_steps = 3",
            "optax.linear_schedule.transition_begin = 17",
        ],
        ["experiment.log_every = 21"],
        [
            "experiment.data = @unruly.poisoned()",
            "experiment.on_nonfinite = 'skip'",
            "unruly.poisoned.at = (1, 3, 6, 9, 12, 15)",
        ],
        [SGD, "own/optax.sgd.learning_rate = 0.5"],
    ],
    ids=["master", "float32", "frozen", "rate 0", "warm-up", "no interval", "skipped", "moves"],
)
def test_a_group_that_moves_or_need_not_move_is_not_reported(tmp_path, capfd, bindings):
    assert said(tmp_path, capfd, *bindings) == []


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_checksums_detect_small_changes(dtype):
    x = jnp.linspace(-1, 1, 24).astype(dtype).reshape(2, 3, 4)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16)
    start = int(_checksum(x))

    def changed(*moves):
        new = bits
        for place, by in moves:
            new = new.at[place].add(jnp.uint16(by))
        return int(_checksum(jax.lax.bitcast_convert_type(new, dtype)))

    every = [changed(((i, j, k), 1)) for i in range(2) for j in range(3) for k in range(4)]
    assert len({start, *every}) == 25
    assert changed(((0, 0, 1), 1), ((1, 2, 3), 2**16 - 1)) != start  # one up and one down
    assert int(jax.jit(_checksum)(x)) == start
