"""Evaluates a state on the batches of a split, by two compiled programs."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from trainer.engine import sharding
from trainer.engine.contracts import (
    Batch,
    ComponentError,
    MetricAccumulator,
    calling,
    check_eval_batch,
    example_losses,
)
from trainer.engine.experiment import Experiment
from trainer.engine.step import State, apply_model


class Evaluation:
    """The compiled evaluation of an experiment.

    Args:
        experiment: the experiment.
        mesh: the mesh of devices that it runs on.
        insert: returns the experiment with the floats of `State.hyperparams`. The `eval_params` of
            its optimizer returns the parameters to evaluate, unless it has an `ema_decay`.

    Raises:
        ComponentError: a metric does not keep its contract.
    """

    def __init__(
        self,
        experiment: Experiment,
        mesh: Mesh,
        insert: Callable[[Any], Experiment],
    ):
        self._experiment = experiment
        self._mesh = mesh
        self._insert = insert
        self._metric_accumulator = MetricAccumulator(experiment.metrics)
        self._evaluate = jax.jit(self._accumulate)
        self._averages = jax.jit(self._eval_params)

    def run(self, state: State, batches: Iterable[Batch]) -> dict[str, float]:
        """Computes the metrics over all batches of a split; see `Program.evaluate`."""
        params = self._averages(state)
        total = jax.device_put(self._metric_accumulator.empty(), sharding.replicated(self._mesh))
        for batch in batches:
            sent = sharding.to_devices(self._mesh, check_eval_batch(batch))
            total = self._evaluate(total, params, state.model_state, state.hyperparams, sent)
            # Without this, all batches would queue on the devices and fill their memory.
            jax.block_until_ready(total)
        return self._metric_accumulator.results(total)

    def check(self, state: State) -> None:
        """Traces the evaluation of the first batch; see `Program.check_evaluation`."""
        if "mask" in self._experiment.data.element_spec:
            raise ComponentError(
                "data",
                "The data set has a 'mask' in its element_spec, but a training batch must not have "
                "one, because all of its examples count. Leave it out, or give it another name if "
                "the model or the loss reads it.",
            )
        with calling("data"):
            batch = next(iter(self._experiment.data.evaluate()), None)
        batch = check_eval_batch(batch)
        processes = jax.process_count()
        shapes = {
            name: jax.ShapeDtypeStruct((x.shape[0] * processes, *x.shape[1:]), x.dtype)
            for name, x in batch.items()
        }
        size = shapes["mask"].shape[0]
        if size % self._mesh.size:
            raise ComponentError(
                "data",
                f"A batch of evaluation has {size} examples, which do not divide over "
                f"{self._mesh.size} devices. Choose another eval_batch_size, or a smaller mesh.",
            )
        params = self._averages.eval_shape(state)
        nothing = jax.eval_shape(self._metric_accumulator.empty)
        self._evaluate.eval_shape(nothing, params, state.model_state, state.hyperparams, shapes)

    def _eval_params(self, state: State) -> Any:
        if self._experiment.ema_decay is not None:
            return jax.tree.map(lambda e, p: e.astype(p.dtype), state.ema, state.params)
        optimizer = self._insert(state.hyperparams).optimizer
        return optimizer.eval_params(state.opt_state, state.params)

    def _accumulate(
        self, total: Any, params: Any, model_state: Any, hyperparams: Any, batch: Batch
    ) -> Any:
        experiment = self._insert(hyperparams)
        outputs, _ = apply_model(experiment, params, model_state, batch, key=None, train=False)
        loss = example_losses(experiment.loss, outputs, batch).astype(jnp.float32)
        return self._metric_accumulator.add(total, outputs, batch, loss)
