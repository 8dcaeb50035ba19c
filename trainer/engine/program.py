"""Compiles an experiment: the programs that initialize, update and evaluate a run."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from optim.norms import all_finite
from trainer.engine import sharding
from trainer.engine.contracts import (
    Batch,
    check_batch,
    check_components,
    endless,
)
from trainer.engine.evaluation import Evaluation
from trainer.engine.experiment import Experiment
from trainer.engine.first_state import FirstState
from trainer.engine.inputs import Inputs
from trainer.engine.splits import PREFIXES, eval_batches, split_sizes
from trainer.engine.step import State, train_step


class Program:
    """A compiled experiment.

    Args:
        experiment: the experiment.
        inputs: the floats that the compiled program takes as an array, from `inputs.find_inputs`;
            without them all floats are constants of the program.

    Attributes:
        experiment: the experiment.
        inputs: the inputs. Those that turn out not to be traceable become structure when the
            program is first traced.
        mesh: the mesh of devices that it runs on.

    Raises:
        ValueError: the batch does not divide over the microbatches and devices, or the mesh does
            not fit the devices.
        ComponentError: the model or a metric does not keep its contract.
    """

    def __init__(self, experiment: Experiment, inputs: Inputs | None = None):
        self.experiment = experiment
        self.inputs = inputs or Inputs()
        self.mesh = sharding.make_mesh(experiment.mesh)
        self._element_spec = dict(experiment.data.element_spec)  # read once: some make it anew
        self._evaluation = Evaluation(experiment, self.mesh, self._insert)
        check_components(experiment)
        self._first = FirstState(experiment, self.mesh, self.inputs)
        self._abstract_state: State | None = None
        self._traced: jax.stages.Traced | None = None
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

    def abstract_state(self) -> State:
        """Returns shapes, dtypes and shardings of the state, without device work.

        Returns:
            A `State` of `jax.ShapeDtypeStruct`, shardings included.

        Raises:
            GroupError: the optimizer's groups do not fit the model's parameters.
        """
        if self._abstract_state is None:
            state = self._first.find_shapes()
            # `find_inputs` has traced schedules and factories only; other functions are traced
            # here.
            if self.inputs.values and not self._traces(state):
                self._drop_inputs()
                state = self._first.find_shapes()
            self._abstract_state = state
        return self._abstract_state

    def _traces(self, state: State) -> bool:
        try:
            self.trace(state)
        except Exception:  # the caller traces again, and then it is raised
            return False
        return True

    def _drop_inputs(self) -> None:
        """Makes the inputs that cannot be traced structure, unless something else is wrong."""

        def traces(inputs: Inputs) -> bool:
            program = Program(self.experiment, inputs)
            return program._traces(program._first.find_shapes())

        # Otherwise the inputs are not what cannot be traced, and the caller's trace raises the
        # error.
        if traces(Inputs()):
            self.inputs = self.inputs.keep_traceable(traces)
            self._first = FirstState(self.experiment, self.mesh, self.inputs)

    def init(self, seed: int | None = None, hyperparams: np.ndarray | None = None) -> State:
        """Computes the state before the first step, in one compiled program.

        Args:
            seed: the seed of the parameters; None for the experiment's.
            hyperparams: the values of the inputs, [inputs]; None for the experiment's.

        Returns:
            The state, on its devices.
        """
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state())
        seed = self.experiment.seed if seed is None else seed
        return self._first.compute(seed, hyperparams, shardings)

    def _insert(self, hyperparams: Any) -> Experiment:
        return self.inputs.insert(self.experiment, hyperparams)

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
            The traced step; repeated calls return the same object.
        """
        if self._traced is None:
            shardings = jax.tree.map(lambda x: x.sharding, state)
            mesh = self.mesh.abstract_mesh if self.mesh.size > 1 else None
            one = partial(self.traced_step, mesh=mesh)
            # With the shardings of the old state: the compiler could choose others for some leaves,
            # such as those of a factored Adafactor, and the compiled step would not take the new
            # state.
            step = jax.jit(one, donate_argnums=0, out_shardings=(shardings, None))
            self._traced = step.trace(state, self.abstract_batch())
        return self._traced

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes, dtypes and shardings of a training batch."""
        spread = sharding.batch_sharding(self.mesh)
        return {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread)
            for name, x in self._element_spec.items()
        }

    def batches(self, batch_index: int) -> Iterator[Batch]:
        """Yields this process's shards of the training batches, without end.

        Args:
            batch_index: the index of the first batch, from 0.

        Raises:
            ComponentError: the data set ends.
        """
        return endless(self.experiment.batches(batch_index))

    def to_devices(self, batch: Batch) -> dict[str, Any]:
        """Sends this process's shard of a training batch to the devices.

        Args:
            batch: field name -> numpy array; the arrays become read-only.

        Returns:
            The global batch.

        Raises:
            ComponentError: the batch does not fit the data set's element_spec.
        """
        check_batch(batch, self._element_spec, jax.process_count())
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
        # Raises for other shapes, dtypes and shardings, where a jitted function would compile
        # again.
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
        return train_step(self._insert(state.hyperparams), state, batch, mesh)

    # Evaluation.

    def evaluate(self, state: State, batches: Iterable[Batch]) -> dict[str, float]:
        """Computes the metrics over all batches of a split.

        Args:
            state: the state; it is not donated.
            batches: this process's shards of the evaluation batches; their "mask", float32 [batch]
                or [batch, positions], is 1 for what counts and 0 for padding. A batch may consist
                of padding only, so that all processes have equally many batches.

        Returns:
            "loss", every metric of the experiment and every aux value of the loss, in which all
            examples, or all positions, have equal weights.

        Raises:
            ComponentError: a mask does not fit, or no batch has an example.
        """
        return self._evaluation.run(state, batches)

    def evaluate_splits(
        self, state: State, through: Callable[[Iterator[Batch]], Iterator[Batch]] = iter
    ) -> dict[str, float]:
        """Evaluates every split of the data set.

        Args:
            state: the state; it is not donated.
            through: called with the batches of each split; what it yields is evaluated.

        Returns:
            The metrics by their names in metrics.jsonl, such as "validation/accuracy".
        """
        data = self.experiment.data
        return {
            PREFIXES[split] + name: value
            for split in split_sizes(data)
            for name, value in self.evaluate(state, through(eval_batches(data, split))).items()
        }

    def check_evaluation(self, state: State) -> None:
        """Traces the evaluation of the first batch of every split.

        Args:
            state: a `State` of arrays or of `jax.ShapeDtypeStruct`.

        Raises:
            ComponentError: there is no batch; its mask does not fit; it does not divide over the
                devices; or the model, the loss or a metric raises for it.
        """
        self._evaluation.check(state)
