"""Evaluates a state on the batches of a split, by two compiled programs.

One computes the parameters to evaluate, and the other one adds batches to the metrics: one batch
or, on a CPU and for a small model, many in a loop on the device. It is compiled again for a batch
of another size, such as a last batch that is shorter.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from trainer.data.absent import DeclaredData
from trainer.engine import mesh as meshes
from trainer.engine.block import MOST_BYTES, most_in_a_loop
from trainer.engine.contracts import Batch, calling, check_eval_batch, check_values
from trainer.engine.datasets import eval_batches, split_parts, split_sizes, whole_splits
from trainer.engine.examples import Examples, ExampleSums, collect_examples
from trainer.engine.experiment import Experiment
from trainer.engine.feed import stack
from trainer.engine.flops import reading
from trainer.engine.mesh import pad, padded_shapes, resized, size_of, without_padding
from trainer.engine.metric_sums import Losses, MetricAccumulator, compute_losses, with_ignored
from trainer.engine.step import State, apply_model
from trainer.writers.lines import PREFIXES


class Evaluation:
    """The compiled evaluation of an experiment; no method donates the state."""

    # `insert` returns the experiment with the floats of `State.hyperparams`. The `eval_params` of
    # its optimizer returns the parameters to evaluate, unless the experiment has an `ema_decay`.
    # Once a batch was traced, `unmasked` has the metrics that do not depend on its mask, and
    # `outputs` the shapes of what the model returned.

    def __init__(self, experiment: Experiment, mesh: Mesh, insert: Callable[[Any], Experiment]):
        self._experiment, self._mesh = experiment, mesh
        self._shard = meshes.data_shard(mesh)
        self._insert = insert
        self._metric_accumulator = MetricAccumulator(experiment.metrics)
        self._evaluate = jax.jit(self._accumulate, static_argnames="size")
        self._evaluate_all = jax.jit(self._accumulate_all, static_argnames="size")
        self._sum_examples = jax.jit(self._of_examples, static_argnames="size")
        # The parameters that are evaluated: averages, if the experiment has any.
        self.params: Any = jax.jit(self._eval_params)
        self.unmasked: list[str] = []
        self.outputs: Any = None
        self._aux: tuple[str, ...] | None = None  # None until the evaluation was traced
        # How many batches to compute in one loop; 1 also if sums change their shapes. It must not
        # depend on the blocks of the run, which may have any length: a loop may have other bits.
        self._most = 1
        self._zeros: dict[tuple[str, ...], Any] = {}  # names of aux values -> empty sums

    def batches(self, split: str) -> Iterator[Batch]:
        """Yields this process's shards of the batches of a split, once."""
        return eval_batches(self._experiment.data, split, self._shard)

    def _sums(self, state: State, batches: Iterable[Batch]) -> Any:
        """Returns the sums of the loss, its aux values and the metrics over batches."""
        # All examples, or all positions, have equal weights. `batches` are this process's shards;
        # their "mask", float32 [batch] or [batch, positions], is 1 for what counts and 0 for
        # padding. A batch may consist of padding only, so that all processes have equally many. Its
        # number of examples need not divide over the devices, but is the same in every process.
        # Once for all batches: averages are functions of the state alone.
        given = self.params(state), state.model_state, state.hyperparams
        batches = iter(batches)
        if self._aux is None and (first := next(batches, None)) is not None:
            size = size_of(check_eval_batch(first)) * self._shard.size
            self._trace(given, padded_shapes(self._mesh, resized(first, size)), size)
            batches = itertools.chain([first], batches)
        names = self._aux or ()
        if names not in self._zeros:  # once: making them takes longer than a small evaluation
            zeros = self._metric_accumulator.empty(names)
            self._zeros[names] = jax.device_put(zeros, meshes.replicated(self._mesh))
        total = self._zeros[names]
        groups = itertools.groupby(map(check_eval_batch, batches), _shapes)
        for same in (same for _, same in groups):
            for batch in same:
                size, places = size_of(batch) * self._shard.size, self._places(batch)
                if places == 1:
                    sent = meshes.to_devices(self._mesh, pad(self._mesh, batch))
                    total = self._evaluate(total, given, sent, size=size)
                else:
                    group = [batch, *itertools.islice(same, places - 1)]
                    stacked, count = stack(group, places), np.int32(len(group))
                    total = self._evaluate_all(total, given, stacked, count, size=size)
                # Without this, all batches would queue on the devices and fill their memory.
                jax.block_until_ready(total)
        return total

    def _places(self, batch: Batch) -> int:
        """Returns for how many batches like this the program has places: a power of two."""
        # It is the same for all splits, so that they have one program.
        most = self._most
        sizes = split_sizes(self._experiment.data).values()
        counts = [most if n is None else math.ceil(n / size_of(batch)) for n in sizes]
        needed = 2 ** math.ceil(math.log2(max(1, *counts)))
        fitting = max(1, MOST_BYTES // max(1, sum(x.nbytes for x in batch.values())))
        return min(most, needed, 2 ** int(math.log2(fitting)))

    def run_examples(self, state: State, batches: Iterable[Batch], most: int) -> Examples:
        """Computes loss and metrics of each of the first `most` examples of a split."""
        # Metrics that are not means over examples are left out. The weighted means of the others
        # are those of `run_split`, up to rounding. `batches` are those of the only process.
        given = self.params(state), state.model_state, state.hyperparams

        def sums_of(batch: Batch) -> Any:
            sent = meshes.to_devices(self._mesh, pad(self._mesh, batch))
            return jax.device_get(self._sum_examples(given, sent, size=size_of(batch)))

        return collect_examples(map(check_eval_batch, batches), sums_of, most)

    def run_splits(
        self, state: State, through: Callable[[Iterator[Batch]], Iterator[Batch]] = iter
    ) -> dict[str, float]:
        """Evaluates every split, and returns metrics by name, as "validation/accuracy"."""
        # `through` is called with the batches of each split; what it yields is evaluated.
        return {
            PREFIXES[split] + name: value
            for split in whole_splits(self._experiment.splits)
            for name, value in self.run_split(state, split, through).items()
        }

    def run_split(
        self, state: State, split: str, through: Callable[[Iterator[Batch]], Iterator[Batch]] = iter
    ) -> dict[str, float]:
        """Evaluates a split, and returns metrics by name; those of a part as "code/accuracy"."""
        # The sums of a split are those of its parts, of which each batch is evaluated once.
        parts = split_parts(split_sizes(self._experiment.data), split)
        names = [f"{split}/{part}" for part in parts] or [split]
        sums = [self._sums(state, through(self.batches(name))) for name in names]
        results = self._metric_accumulator.results
        whole = results(reduce(self._metric_accumulator.merge, sums))
        of_parts = zip(parts, map(results, sums), strict=True) if parts else ()
        return whole | {f"{part}/{name}": x for part, own in of_parts for name, x in own.items()}

    def check(self, state: State) -> dict[str, Batch]:
        """Traces the evaluation of every split's first batch, and returns these batches."""
        # They are this process's shards. If the data set is not on this machine, it traces a batch
        # of the declared shapes, and returns none. The state may be one of shapes.
        given = self.params.eval_shape(state), state.model_state, state.hyperparams
        data: Any = self._experiment.data
        first = {}
        for split in split_sizes(data):
            if isinstance(data, DeclaredData):
                shapes = dict(data.eval_spec)
            else:
                with calling("data"):
                    batch = next(self.batches(split), None)
                first[split] = check_eval_batch(batch)
                check_values(first[split], "evaluate()")
                shapes = resized(first[split], size_of(first[split]) * self._shard.size)
            self._trace(given, padded_shapes(self._mesh, shapes), size_of(shapes))
        return first

    def _trace(self, given: Any, batch: Any, size: int) -> None:
        """Traces the evaluation of a batch, and notes which aux values the loss returns."""
        # `_sums` starts with zeros for every aux value: if they appeared with the first batch, the
        # second would be compiled again.
        nothing = jax.eval_shape(self._metric_accumulator.empty)
        traced = self._evaluate.trace(nothing, given, batch, size=size)
        total: Any = traced.out_info
        self._metric_accumulator.check_results(total)
        mask = sorted(batch).index("mask") - len(batch)  # jax sorts a dict

        def is_masked(name: str) -> bool:
            asked = jax.tree.map_with_path(lambda path, _: path[0].key == name, total)
            return reading(traced, asked)[1][mask]

        self.unmasked = [name for name in self._experiment.metrics if not is_masked(name)]
        self._aux = tuple(name for name in total if name not in nothing)
        first = jax.eval_shape(partial(self._metric_accumulator.empty, self._aux))
        before, after = (jax.tree.map(lambda x: (x.shape, x.dtype), it) for it in (first, total))
        self._most = most_in_a_loop(self._mesh, traced.jaxpr) if before == after else 1

    def _eval_params(self, state: State) -> Any:
        if self._experiment.ema_decay is not None:
            return jax.tree.map(lambda e, p: e.astype(p.dtype), state.ema, state.params)
        return self._insert(state.hyperparams).optimizer.eval_params(state.opt_state, state.params)

    # Below, `given` is the parameters to evaluate, the state of the model and the inputs.

    def _accumulate(self, total: Any, given: Any, batch: Batch, size: int) -> Any:
        return self._metric_accumulator.add(total, *self._apply(given, batch, size))

    def _accumulate_all(self, total: Any, given: Any, batches: Batch, count: Any, size: int) -> Any:
        """Adds the first `count` of batches that are stacked, field -> [places, batch, ...]."""

        def add(index: Any, total: Any) -> Any:
            batch = {name: x[index] for name, x in batches.items()}
            return self._accumulate(total, given, batch, size)

        return jax.lax.fori_loop(0, count, add, total)

    def _of_examples(self, given: Any, batch: Batch, size: int) -> dict[str, ExampleSums]:
        return self._metric_accumulator.of_examples(*self._apply(given, batch, size))

    def _apply(self, given: Any, batch: Batch, size: int) -> tuple[Any, Batch, Losses]:
        """Returns the outputs, the batch and its losses, all without padding."""
        params, model_state, hyperparams = given
        # The loss may have inputs, such as label_smoothing.
        experiment = self._insert(hyperparams)

        def outputs_of(batch: Batch) -> Any:
            return apply_model(experiment, params, model_state, batch, key=None, train=False)[0]

        with meshes.ambient(self._mesh):
            outputs = outputs_of(batch)
            if size_of(batch) != size:
                shapes = resized(batch, size)
                wanted = jax.eval_shape(outputs_of, shapes)
                outputs = without_padding(outputs, wanted, self._shard.size)
                batch = without_padding(batch, shapes, self._shard.size)
            self.outputs = jax.eval_shape(lambda: outputs)
            batch = with_ignored(experiment.loss, batch)
            return outputs, batch, compute_losses(experiment.loss, outputs, batch)


def _shapes(batch: Batch) -> dict[str, Any]:
    return {name: (x.shape, x.dtype) for name, x in batch.items()}
