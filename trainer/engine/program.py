"""Compiles an experiment: the programs that initialize, update and evaluate a run."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

import optim
from optim.dtypes import widen
from optim.norms import all_finite
from trainer.engine import sharding
from trainer.engine.contracts import (
    Batch,
    calling,
    check_batch,
    check_model,
    endless,
)
from trainer.engine.evaluation import Evaluation
from trainer.engine.experiment import Experiment
from trainer.engine.step import RUN_KEYS, State, cast_floats, train_step


class Program:
    """A compiled experiment.

    Args:
        experiment: the experiment.
        optimizer_from: builds the optimizer from lifted floats (see
            `experiment.optimizer_builder`); None if no float is lifted.

    Attributes:
        experiment: the experiment.
        mesh: the mesh of devices that it runs on.

    Raises:
        ValueError: the batch does not divide over the microbatches and devices, or the mesh does
            not fit the devices.
        ComponentError: the model or a metric does not keep its contract.
    """

    def __init__(
        self,
        experiment: Experiment,
        optimizer_from: Callable[[Mapping[str, Any]], optim.Optimizer] | None = None,
    ):
        self.experiment = experiment
        self.mesh = sharding.make_mesh(experiment.mesh)
        self._optimizer_from = optimizer_from or (lambda _: experiment.optimizer)
        self._evaluation = Evaluation(experiment, self.mesh, self._optimizer)
        check_model(experiment.model)
        self._start = jax.jit(self._init)
        self._traced: dict[frozenset[str], jax.stages.Traced] = {}
        self._step: Any = None
        self._params_finite: Any = None
        self._check_batch()

    def _check_batch(self) -> None:
        size, devices = self.experiment.data.batch_size, self.mesh.size
        microbatches = self.experiment.microbatches
        if size // microbatches % devices:
            raise ValueError(
                f"A batch of {size} examples in {microbatches} microbatches does not divide over "
                f"{devices} devices. Choose another batch_size, or a smaller mesh."
            )

    # Initialization.

    def abstract_state(self, hyper: Mapping[str, float] | None = None) -> State:
        """Returns shapes, dtypes and shardings of the state, without device work.

        Args:
            hyper: config path -> lifted float.

        Returns:
            A `State` of `jax.ShapeDtypeStruct`, shardings included.

        Raises:
            GroupError: the optimizer's groups do not fit the model's parameters.
        """
        shapes = self._start.eval_shape(self._hyper(0, hyper))
        shardings = sharding.state_shardings(self.mesh, shapes, shapes.params)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        )

    def init(self, seed: int | None = None, hyper: Mapping[str, float] | None = None) -> State:
        """Computes the state before the first step, in one compiled program.

        Args:
            seed: the seed of the parameters; None for the experiment's.
            hyper: config path -> lifted float.

        Returns:
            The state, on its devices.
        """
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state(hyper))
        seed = self.experiment.seed if seed is None else seed
        return jax.jit(self._init, out_shardings=shardings)(self._hyper(seed, hyper))

    def _hyper(self, seed: int, hyper: Mapping[str, float] | None) -> dict[str, Any]:
        lifted: dict[str, Any] = {path: np.float32(x) for path, x in (hyper or {}).items()}
        if self.experiment.on_nonfinite == "rollback":
            lifted["rollback"] = np.zeros(4, np.int32)
        return {"seed": np.uint32(seed), **lifted}

    def _optimizer(self, hyper: Mapping[str, Any]) -> optim.Optimizer:
        return self._optimizer_from({k: v for k, v in hyper.items() if k not in RUN_KEYS})

    def _init(self, hyper: dict[str, Any]) -> State:
        batch = {
            name: jnp.zeros(x.shape, x.dtype)
            for name, x in self.experiment.data.element_spec.items()
        }
        key = jax.random.fold_in(jax.random.key(hyper["seed"]), 0)
        with calling("model"):
            params, model_state = self.experiment.model.init(key, batch)
        if self.experiment.precision == "bfloat16":
            params = cast_floats(params, jnp.bfloat16)
        averages = self.experiment.ema_decay is not None
        return State(
            step=jnp.zeros((), jnp.int32),
            params=params,
            model_state=model_state,
            opt_state=self._optimizer(hyper).init(params),
            ema=jax.tree.map(lambda x: x + 0, widen(params, integers=True)) if averages else {},
            hyper={name: jnp.asarray(value) for name, value in hyper.items()},
        )

    # Updates.

    def compile(self, state: State) -> None:
        """Compiles the step for the shapes of a state; the first call of `step` does so if needed.

        Args:
            state: a `State` of arrays or of `jax.ShapeDtypeStruct` with shardings.
        """
        self._step = self.trace(state).lower().compile()
        if self.experiment.on_nonfinite == "halt":
            check = jax.jit(lambda params: all_finite(self.experiment.optimizer.trainable(params)))
            self._params_finite = check.lower(state.params).compile()

    def trace(self, state: State) -> jax.stages.Traced:
        """Traces the step, whose state is donated.

        Args:
            state: a `State` of arrays or of `jax.ShapeDtypeStruct` with shardings.

        Returns:
            The traced step; repeated calls with the same lifted floats return the same object.
        """
        lifted = frozenset(state.hyper)
        if lifted not in self._traced:
            shardings = jax.tree.map(lambda x: x.sharding, state)
            mesh = self.mesh.abstract_mesh if self.mesh.size > 1 else None
            one = partial(self.traced_step, mesh=mesh)
            step = jax.jit(one, donate_argnums=0, out_shardings=(shardings, None))
            self._traced[lifted] = step.trace(state, self.abstract_batch())
        return self._traced[lifted]

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes, dtypes and shardings of a training batch."""
        spread = sharding.batch_sharding(self.mesh)
        return {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread)
            for name, x in self.experiment.data.element_spec.items()
        }

    def batches(self, batch_index: int) -> Iterator[Batch]:
        """Yields this process's shards of the training batches, without end.

        Args:
            batch_index: the index of the first batch, from 0.

        Raises:
            ComponentError: the data set ends.
        """
        return endless(self.experiment.data.train(batch_index, self.experiment.seed))

    def to_devices(self, batch: Batch) -> dict[str, Any]:
        """Sends this process's shard of a training batch to the devices.

        Args:
            batch: field name -> numpy array; the arrays become read-only.

        Returns:
            The global batch.

        Raises:
            ComponentError: the batch does not fit the data set's element_spec.
        """
        check_batch(batch, self.experiment.data.element_spec, jax.process_count())
        sharding.make_read_only(batch)
        return sharding.to_devices(self.mesh, batch)

    def step(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        """Computes one update, asynchronously.

        Args:
            state: the state before the update; its buffers are donated.
            batch: a batch from `to_devices`.

        Returns:
            The state after the update and the metrics of the step, as `step.train_step` returns
            them, on the devices.
        """
        if self._step is None:
            self.compile(state)
        compiled: Any = self._step
        return compiled(state, batch)

    def params_finite(self, state: State) -> jax.Array:
        """Computes whether all trainable parameters are finite; for on_nonfinite="halt" only.

        The step itself checks only loss and gradients there: reading every parameter at every step
        costs 5% of a small model's step. `compile` compiles this check as well.

        Args:
            state: the state after a step.

        Returns:
            A boolean scalar, on the devices.
        """
        return self._params_finite(state.params)

    def traced_step(
        self, state: State, batch: Batch, mesh: AbstractMesh | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Computes one update as a pure function, without jit.

        Args:
            state: the state before the update.
            batch: a training batch.
            mesh: the devices among which optimizers of matrices divide their work; None does not
                divide it.

        Returns:
            The results of `step`.
        """
        return train_step(self.experiment, self._optimizer(state.hyper), state, batch, mesh)

    # Evaluation.

    def evaluate(self, state: State, batches: Iterable[Batch]) -> dict[str, float]:
        """Computes the metrics over all batches of a split.

        Args:
            state: the state; it is not donated.
            batches: this process's shards of the evaluation batches; their "mask", float32 [batch],
                is 1 for an example and 0 for padding. A batch may consist of padding only, so that
                all processes have equally many batches.

        Returns:
            "loss" and every metric of the experiment, in which all examples have equal weights.

        Raises:
            ComponentError: a mask does not fit, or no batch has an example.
        """
        return self._evaluation.run(state, batches)

    def check_evaluation(self, state: State) -> None:
        """Traces the evaluation of the first batch of the test split.

        Args:
            state: a `State` of arrays or of `jax.ShapeDtypeStruct`.

        Raises:
            ComponentError: there is no batch; its mask does not fit; it does not divide over the
                devices; the model, the loss or a metric raises for it; or the element_spec of the
                training batches has a mask.
        """
        self._evaluation.check(state)
