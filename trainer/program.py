"""Compiles an experiment: one program that starts a run, one that steps it, one that evaluates
it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optim
from trainer import mesh as meshes
from trainer.experiment import Experiment
from trainer.given import (
    PartError,
    Tally,
    calling,
    check_batch,
    check_eval_batch,
    check_model,
    endless,
    example_losses,
)
from trainer.step import RUN_KEYS, Batch, State, apply_model, cast_floats, train_step, wide


class Program:
    """An experiment, compiled.

    Args:
        experiment: what to run.
        optimizer_from: builds the optimizer from lifted floats (see
            `experiment.optimizer_builder`); None where nothing is lifted.

    Attributes:
        experiment: what was given.
        mesh: the devices it runs on.
    """

    def __init__(
        self,
        experiment: Experiment,
        optimizer_from: Callable[[Mapping[str, Any]], optim.Optimizer] | None = None,
    ):
        self.experiment = experiment
        self.mesh = meshes.make_mesh(experiment.mesh)
        self._optimizer_from = optimizer_from or (lambda _: experiment.optimizer)
        self._tally = Tally(experiment.metrics)
        check_model(experiment.model)
        self._start = jax.jit(self._init)
        self._traced: dict[frozenset[str], jax.stages.Traced] = {}
        self._step: Any = None
        self._evaluate = jax.jit(self._accumulate)
        self._averages = jax.jit(self._eval_params)
        self._check_batch()

    def _check_batch(self) -> None:
        size, devices = self.experiment.data.batch_size, self.mesh.size
        parts = self.experiment.microbatches
        if size // parts % devices:
            raise ValueError(
                f"A batch of {size} examples in {parts} microbatches does not divide over "
                f"{devices} devices. Choose another batch_size, or a smaller mesh."
            )

    # What a run starts with.

    def abstract_state(self, hyper: Mapping[str, float] | None = None) -> State:
        """Describes the state without making it.

        Args:
            hyper: lifted floats by config path.

        Returns:
            A `State` of `jax.ShapeDtypeStruct`, shardings included.

        Raises:
            GroupError: the optimizer's groups do not fit the model's parameters.
        """
        shapes = self._start.eval_shape(self._hyper(0, hyper))
        shardings = meshes.state_shardings(self.mesh, shapes, shapes.params)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        )

    def init(self, seed: int | None = None, hyper: Mapping[str, float] | None = None) -> State:
        """Makes the state before the first step, in one compiled program.

        Args:
            seed: where the parameters come from; None for the experiment's own.
            hyper: lifted floats by config path.

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
            ema=jax.tree.map(lambda x: x + 0, wide(params)) if averages else {},
            hyper={name: jnp.asarray(value) for name, value in hyper.items()},
        )

    # A step.

    def compile(self, state: State) -> None:
        """Compiles the step for a state's shapes; `step` does so itself the first time.

        Args:
            state: a `State` of arrays or of `jax.ShapeDtypeStruct` with shardings.
        """
        self._step = self.trace(state).lower().compile()

    def trace(self, state: State) -> jax.stages.Traced:
        """Traces the step, which donates its state; the plan reads it and `compile` uses it.

        Args:
            state: a `State` of arrays or of `jax.ShapeDtypeStruct` with shardings.

        Returns:
            What jax makes of the step before it is compiled; the same for the same lifted floats.
        """
        lifted = frozenset(state.hyper)
        if lifted not in self._traced:
            shardings = jax.tree.map(lambda x: x.sharding, state)
            step = jax.jit(self.traced_step, donate_argnums=0, out_shardings=(shardings, None))
            self._traced[lifted] = step.trace(state, self.abstract_batch())
        return self._traced[lifted]

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Describes a training batch on its devices."""
        sharding = meshes.batch_sharding(self.mesh)
        return {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for name, x in self.experiment.data.element_spec.items()
        }

    def batches(self, number: int) -> Iterator[Batch]:
        """Yields this process's training batches, from one of a number (from 0) on."""
        return endless(self.experiment.data.train(number, self.experiment.seed))

    def put(self, batch: Batch) -> dict[str, Any]:
        """Sends a training batch of this process to the devices, and makes it read-only here."""
        check_batch(batch, self.experiment.data.element_spec, jax.process_count())
        meshes.hold(batch)
        return meshes.put_batch(self.mesh, batch)

    def step(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        """Makes one update.

        Args:
            state: the state before; its buffers are donated.
            batch: what `put` returned.

        Returns:
            The state after, with the same avals; and the metrics of the step, scalars that are
            still on the device: "train/loss", "grad_norm", "learning_rate/<group>", and any other
            scheduled argument as "<argument>/<group>".
        """
        if self._step is None:
            self.compile(state)
        compiled: Any = self._step
        return compiled(state, batch)

    def traced_step(self, state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        """Is `step` before it is compiled, for whoever composes it further."""
        return train_step(self.experiment, self._optimizer(state.hyper), state, batch)

    # Evaluation.

    def evaluate(self, state: State, batches: Iterable[Batch]) -> dict[str, float]:
        """Computes the metrics over all batches of a split.

        Args:
            state: it is not donated.
            batches: batches of this process as the data set gives them; "mask" (float32 [batch])
                is 1 for an example and 0 for filling. A batch may be filling altogether, so that
                all processes have equally many.

        Returns:
            "loss" and every metric of the experiment, each over all examples with equal weight.

        Raises:
            PartError: a mask does not fit, or all batches together have no example.
        """
        params = self._averages(state)
        total = jax.device_put(self._tally.empty(), meshes.replicated(self.mesh))
        for batch in batches:
            sent = meshes.put_batch(self.mesh, check_eval_batch(batch))
            total = self._evaluate(total, params, state.model_state, sent)
            jax.block_until_ready(total)  # no queue of batches on the devices
        return self._tally.results(total)

    def check_evaluation(self, state: State) -> None:
        """Traces the evaluation of the first batch of the test split.

        Args:
            state: a `State` of arrays or of `jax.ShapeDtypeStruct`.

        Raises:
            PartError: there is no batch, its mask does not fit, it does not divide over the
                devices, the model, the loss or a metric cannot take it, or a training batch has a
                mask.
        """
        if "mask" in self.experiment.data.element_spec:
            raise PartError(
                "data",
                "The data set announces a 'mask' in its element_spec, but a training batch has "
                "none: every example of it counts. Leave it out, or give it another name if the "
                "model or the loss reads it.",
            )
        with calling("data"):
            batch = next(iter(self.experiment.data.evaluate()), None)
        batch = check_eval_batch(batch)
        processes = jax.process_count()
        shapes = {
            name: jax.ShapeDtypeStruct((x.shape[0] * processes, *x.shape[1:]), x.dtype)
            for name, x in batch.items()
        }
        size = shapes["mask"].shape[0]
        if size % self.mesh.size:
            raise PartError(
                "data",
                f"A batch of evaluation has {size} examples, which do not divide over "
                f"{self.mesh.size} devices. Choose another eval_batch_size, or a smaller mesh.",
            )
        params = self._averages.eval_shape(state)
        nothing = jax.eval_shape(self._tally.empty)
        self._evaluate.eval_shape(nothing, params, state.model_state, shapes)

    def _eval_params(self, state: State) -> Any:
        if self.experiment.ema_decay is not None:
            return jax.tree.map(lambda e, p: e.astype(p.dtype), state.ema, state.params)
        return self._optimizer(state.hyper).eval_params(state.opt_state, state.params)

    def _accumulate(self, total: Any, params: Any, model_state: Any, batch: Batch) -> Any:
        outputs, _ = apply_model(self.experiment, params, model_state, batch, key=None, train=False)
        loss = example_losses(self.experiment.loss, outputs, batch).astype(jnp.float32)
        return self._tally.add(total, outputs, batch, loss)
