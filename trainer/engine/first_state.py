"""Computes the state before the first step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from optim.dtypes import widen
from trainer.engine import sharding
from trainer.engine.contracts import calling
from trainer.engine.experiment import Experiment
from trainer.engine.inputs import Inputs
from trainer.engine.precision import to_bfloat16
from trainer.engine.step import State


class FirstState:
    """The state before the first step, as a function of the seed and the inputs.

    Args:
        experiment: the experiment.
        mesh: the mesh of devices that it runs on.
        inputs: the floats that the compiled program takes as an array.
    """

    def __init__(self, experiment: Experiment, mesh: Mesh, inputs: Inputs):
        self._experiment = experiment
        self._mesh = mesh
        self._inputs = inputs
        # One object: jax traces it once, for `find_shapes` and `compute`. Each `self._compute` is
        # another.
        self._initial = self._compute
        self._compiled: Any = None

    def find_shapes(self) -> State:
        """Returns a `State` of `jax.ShapeDtypeStruct`, shardings included, without device work.

        Raises:
            GroupError: the optimizer's groups do not fit the model's parameters, or an argument is
                out of range.
        """
        arguments = self._run_state(0), self._inputs.pack(), _draw(0)
        shapes = jax.eval_shape(self._initial, *arguments)
        shardings = sharding.state_shardings(self._mesh, shapes, shapes.params)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        )

    def compute(
        self, seed: int, hyperparams: np.ndarray, shardings: State, warm_starts: int = 0
    ) -> State:
        """Computes the state in one compiled program.

        Args:
            seed: the seed of the parameters.
            hyperparams: the values of the inputs, [inputs].
            shardings: the sharding of every leaf, the same in every call.
            warm_starts: how many warm starts led to the run.

        Returns:
            The state, on its devices.
        """
        if self._compiled is None:  # one object: the trials of a sweep call it again and again
            self._compiled = jax.jit(self._initial, out_shardings=shardings)
        return self._compiled(self._run_state(seed), hyperparams, _draw(warm_starts))

    def _run_state(self, seed: int) -> dict[str, Any]:
        run_state: dict[str, Any] = {"seed": np.uint32(seed)}
        if self._experiment.on_nonfinite == "rollback":
            # The fields of `Counters` in trainer/train/rollback.py, a package above this one.
            run_state["rollback"] = np.zeros(4, np.int32)
        return run_state

    def _compute(self, run_state: dict[str, Any], hyperparams: Any, draw: Any) -> State:
        experiment = self._experiment
        batch = {
            # numpy's float64 becomes float32 here as it does in batches, without jax's warning.
            name: jnp.zeros(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
            for name, x in experiment.data.element_spec.items()
        }
        key = jax.random.fold_in(jax.random.key(run_state["seed"]), draw)
        with calling("model"):
            params, model_state = experiment.model.init(key, batch)
        if experiment.precision == "bfloat16":
            params = to_bfloat16(params)
        averages = experiment.ema_decay is not None
        experiment.optimizer.bind(params).check()  # as numbers: traced arguments are not compared
        optimizer = self._inputs.insert(experiment, hyperparams).optimizer
        return State(
            step=jnp.zeros((), jnp.int32),
            params=params,
            model_state=model_state,
            opt_state=optimizer.init(params),
            # New arrays, because the step donates both parameters and averages.
            ema=jax.tree.map(lambda x: x + 0, widen(params, integers=True)) if averages else {},
            hyperparams=jnp.asarray(hyperparams),
            run_state={name: jnp.asarray(value) for name, value in run_state.items()},
        )


def _draw(warm_starts: int) -> np.uint32:
    """Returns what is folded into the key of the first parameters: 0, or from 2**32 - 1 down.

    The steps fold in 1 to 2**31.
    """
    return np.uint32(-warm_starts % 2**32)
