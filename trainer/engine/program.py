"""Compiles an experiment: its first state, and the programs that update and evaluate a run.

A program is compiled for the structure of a config: its functions, integers, strings and shapes.
The floats of the optimizer, its schedules included, are inputs of the program instead, in a single
run as in a sweep, so that another learning rate needs no compilation. The train step builds the
optimizer from them while it is traced.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from optim.bound import all_finite
from optim.dtypes import widen
from optim.factories import evaluate, instantiate
from optim.layouts import Layout
from optim.optax_schedules import traceable
from trainer.config import Builder, Config, Floats, leaves
from trainer.engine import mesh as meshes
from trainer.engine.block import BlockRule, Loop, choose_block, loop_on_device, step_function
from trainer.engine.contracts import Batch, calling, check_components
from trainer.engine.diagnostics import check_matrices, find_layouts, names_computed
from trainer.engine.evaluation import Evaluation
from trainer.engine.experiment import Experiment, as_optimizer, build_experiment, with_place
from trainer.engine.feed import Feed
from trainer.engine.flops import count_flops
from trainer.engine.memory import compiled_memory
from trainer.engine.precision import in_roles, to_bfloat16
from trainer.engine.sharding import ShardingRules, state_shardings
from trainer.engine.step import State, StepMetrics, diagnose_step, train_step

INPUT = "input"  # in an annotation: Annotated[float, "input"], for floats outside the optimizer


@dataclass(frozen=True)
class Inputs:
    """The floats of an experiment that its compiled program takes as an array."""

    # config path -> value, sorted by path
    values: Mapping[str, float] = field(default_factory=dict)
    # config path -> (value, why it is not an input), for floats that are constants of the program
    constants: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    # builds the field "optimizer" of the experiment, and those of "loss" and "ema_decay" that
    # have inputs, with floats replaced by path
    rebuild: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}

    def pack(self) -> np.ndarray:
        """Returns the values as one array, [inputs], in JAX's default float type."""
        # One array, because every leaf of the state adds to the time of a dispatch.
        return np.asarray(list(self.values.values()), jnp.result_type(float))

    def with_values(self, values: Mapping[str, float]) -> "Inputs":
        """Returns the same inputs with other values, config path -> value for every input."""
        return replace(self, values={path: values[path] for path in self.values})

    def insert(self, experiment: Experiment, hyperparams: Any) -> Experiment:
        """Returns an experiment with its inputs replaced by values [inputs]."""
        # The values are in the order of `pack`, and may be traced.
        if not self.values:
            return experiment
        fields = self.rebuild({path: hyperparams[i] for i, path in enumerate(self.values)})
        optimizer = in_roles(fields["optimizer"], experiment.roles)
        return experiment.unchecked(**{**fields, "optimizer": optimizer})

    def keep_traceable(self, traces: Callable[["Inputs"], bool]) -> "Inputs":
        """Returns these inputs without untraceable ones, which become constants."""

        # `traces` returns whether the program can be traced with some of these inputs.
        def find(paths: list[str]) -> list[str]:
            """Finds the paths that cannot be traced even alone, among some that cannot together."""
            # Each call of `traces` costs a trace; if one of n paths is wrong, about 2 log2(n).
            half = len(paths) // 2
            parts = (paths[:half], paths[half:]) if half else ()
            wrong = [path for p in parts if not traces(self._only(p)) for path in find(p)]
            return wrong if half else paths

        if not self.values or traces(self):
            return self
        # If nothing can be traced, no input is to blame, and a later trace says what is.
        wrong = find([*self.values]) if traces(self._only([])) else [*self.values]
        why = "its function decides by it in Python"
        constants = {path: (self.values[path], why) for path in self.values if path in wrong}
        inputs = self._only([path for path in self.values if path not in wrong])
        return replace(inputs, constants={**self.constants, **constants})

    def _only(self, paths: Sequence[str]) -> "Inputs":
        return replace(self, values={path: self.values[path] for path in paths})


def find_inputs(config: Config, vocabulary: Sequence[str], experiment: Experiment) -> Inputs:
    """Finds the inputs of an experiment."""
    # These are the floats of the config's optimizer, `ema_decay`, and the arguments of the loss
    # that are annotated as `Annotated[float, "input"]`: values, and defaults of the functions that
    # it names. A float by which a function decides in Python is one of the constants.
    builder = Builder(config, vocabulary)
    units = experiment.units_of(config)
    roots = [name for name in ("optimizer", "loss", "ema_decay") if name in config.sources]

    def build(names: Iterable[str], floats: Floats) -> dict[str, Any]:
        return {name: builder.build(name, units=units, floats=floats) for name in names}

    found: dict[str, float] = {}

    def collect(path: str, value: float, hint: Any) -> float:
        if path.split(".")[0] != "loss" or INPUT in get_args(hint):
            found[path] = value
        return value

    build(roots, Floats(collect))

    def rebuild(by_path: Mapping[str, Any]) -> Mapping[str, Any]:
        # A loss without inputs is not made again: its function may be slow, or read a file.
        names = {"optimizer", *(path.split(".")[0] for path in by_path)}
        # `traceable` replaces the schedules of optax that branch in Python on their floats.
        floats = Floats(lambda path, value, _: by_path.get(path, value), function=traceable)
        fields = build(names, floats)
        return {**fields, "optimizer": as_optimizer(fields["optimizer"])}

    others = {
        path: (value, f"it belongs to {path.split('.')[0]}")
        for path, value in leaves(config.root)
        if path.split(".")[0] in ("model", "loss")  # not watchdog and the like, outside the program
        and isinstance(value, float)
        and path not in found
    }
    # Sorted, so that a program does not depend on the order of the entries in a config.
    return Inputs(dict(sorted(found.items())), others, rebuild).keep_traceable(_factories_trace)


def _factories_trace(inputs: Inputs) -> bool:
    """Returns whether the optimizer's schedules and factories can be called with the inputs."""
    # This is faster than to trace the whole program, which `Program.abstract_state` does later.

    def call(hyperparams: jax.Array, step: jax.Array) -> Any:
        optimizer = inputs.rebuild(dict(zip(inputs.values, hyperparams, strict=True)))["optimizer"]
        for group in optimizer.groups.values():
            instantiate(group.optimizer, step, hyperparams.dtype)
        return optimizer.hyperparameters(step)

    try:
        jax.eval_shape(call, inputs.pack(), jax.ShapeDtypeStruct((), jnp.int32))
    except Exception:  # whatever a function raises for an argument that is traced
        return False
    return True


class Program:
    """A compiled experiment; raises ValueError or ComponentError if it cannot be built."""

    # `inputs` are the floats that the compiled program takes as an array. Those that turn out not
    # to be traceable become constants, as all others are, when the program is first traced.

    # `devices` are those of a target; None for those that jax finds.

    def __init__(
        self,
        experiment: Experiment,
        inputs: Inputs | None = None,
        devices: Sequence[Any] | None = None,
    ):
        self.experiment = experiment
        self.inputs = inputs or Inputs()
        self.mesh = meshes.make_mesh(experiment.mesh, devices)
        self.sharding = ShardingRules(self.mesh, experiment.sharding, experiment.model)
        self.evaluation = Evaluation(experiment, self.mesh, self._insert)
        check_components(experiment)
        self._first = FirstState(experiment, self.sharding, self.inputs)
        self.simulated = meshes.is_simulated(self.mesh)
        self.feed = Feed(experiment, self.mesh)
        self._abstract_state: State | None = None
        self._traced: jax.stages.Traced | None = None
        self._compiled: dict[str, Any] = {}  # "step", "block", "check" and "diagnosis"
        self._lowered: dict[str, jax.stages.Lowered] = {}  # "step", for `compile`

    # Initialization.

    def abstract_state(self) -> State:
        """Returns shapes, dtypes and shardings of the state, without device work."""
        if self._abstract_state is None:
            state = self._first.find_shapes()
            # `find_inputs` has traced schedules and factories only.
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
        """Turns the inputs that cannot be traced into constants."""

        def traces(inputs: Inputs) -> bool:
            program = Program(self.experiment, inputs, list(self.mesh.devices.flat))
            return program._traces(program._first.find_shapes())

        self.inputs = self.inputs.keep_traceable(traces)
        self._first = FirstState(self.experiment, self.sharding, self.inputs)

    def init(self, seed: int | None = None, warm_starts: int = 0) -> State:
        """Computes the state before the first step, in one compiled program."""
        # A seed of None is the experiment's. `warm_starts` is how many warm starts led to the run;
        # each number draws other parameters.
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state())
        seed = self.experiment.seed if seed is None else seed
        return self._first.compute(seed, self.inputs.pack(), shardings, warm_starts)

    def first_opt_states(self) -> Callable[[Any, Any], Any]:
        """Returns a function that computes the optimizer's state before its first step."""
        # Of parameters, perhaps others than those of `init`, and of inputs. It is compiled once;
        # without out_shardings it would lose the shardings of most optimizers' states.
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state().opt_state)

        def first_opt_state(params: Any, hyperparams: Any) -> Any:
            return self._insert(hyperparams).optimizer.init(params)

        return jax.jit(first_opt_state, out_shardings=shardings)

    def check_norms(self) -> None:
        """Raises GroupError for a first matrix of zeros whose norm the optimizer keeps."""
        # The optimizer could not move such a matrix. The plan refuses it too.
        if self.experiment.warm_start is None:
            self._first.check_norms(self.abstract_state().params)

    def with_values(
        self, values: Mapping[str, float], seed: int, data_seed: int | None = None
    ) -> "Program":
        """Returns this program with other values of its inputs and other seeds."""
        # The two programs share all that was compiled before, so that they compute the same bits
        # for the same state and batch. Compile this one first. `values` has every input by its
        # config path; a `data_seed` of None is `seed`.
        program = copy.copy(self)
        program.experiment = self.experiment.unchecked(seed=seed, data_seed=data_seed)
        program.inputs = self.inputs.with_values(values)
        program.feed = self.feed.of(program.experiment)
        return program

    def starting_with(self, warm_start: Mapping[str, Any]) -> "Program":
        """Returns this program for a run with another `warm_start`, from the same step."""
        # Where a run starts is no part of what is compiled, which the two programs share.
        program = copy.copy(self)
        program.experiment = self.experiment.unchecked(warm_start=warm_start)
        return program

    def _insert(self, hyperparams: Any) -> Experiment:
        return self.inputs.insert(self.experiment, hyperparams)

    # Updates.

    @cached_property
    def block_rule(self) -> BlockRule:
        """How many steps the program computes at once, and in which form."""
        jaxpr = self.trace(self.abstract_state()).jaxpr
        return choose_block(self.experiment, self.mesh, jaxpr, self.feed.abstract_batch())

    @cached_property
    def flops(self) -> int:
        """The floating-point operations of a step, over all devices; see `flops.count_flops`."""
        return count_flops(self.trace(self.abstract_state()).jaxpr)

    def compile(self, state: State) -> None:
        """Compiles what `advance` calls; its first call does so if needed."""
        # The state has arrays or `jax.ShapeDtypeStruct` with shardings.
        if self.block_rule.form == "device_loop":
            self._compile("block", self._trace_block, state)
        else:
            self._compile("step", self.trace, state)
        self._compile("check", self._trace_check, state)
        if names_computed(self.experiment.diagnostics):
            self._compile("diagnosis", self._trace_diagnose, state)
        self._lowered.clear()  # takes memory, and a block has no use for it

    def _compile(self, name: str, trace: Callable[[State], jax.stages.Traced], state: State) -> Any:
        """Returns a compiled program, which is compiled when it is first asked for."""
        if name not in self._compiled:
            lowered = self._lowered.pop(name, None) or trace(state).lower()
            self._compiled[name] = lowered.compile()
        return self._compiled[name]

    @property
    def compiled(self) -> Any:
        """The compiled block or step, a `jax.stages.Compiled`; None before `compile`."""
        return self._compiled.get("block") or self._compiled.get("step")

    @property
    def temporary_bytes(self) -> int | None:
        """The memory besides state and batch of what `compile` compiled, on each device."""
        # Step and diagnosis run one after the other: it is that of the larger one. None before
        # `compile`, or if the compiler does not tell.
        compiled = self.compiled, self._compiled.get("diagnosis")
        found = [compiled_memory(each) for each in compiled if each is not None]
        return max((each.temporary for each in found if each is not None), default=None)

    def trace(self, state: State) -> jax.stages.Traced:
        """Traces the step, whose state is donated; repeated calls return the same object."""
        if self._traced is None:
            # The compiler could choose other shardings for some leaves, such as those of a factored
            # Adafactor, and the compiled step would not take the new state.
            shardings = jax.tree.map(lambda x: x.sharding, state)
            one = partial(self.packed_step, mesh=self.mesh)
            step = jax.jit(one, donate_argnums=0, out_shardings=(shardings, None))
            self._traced = step.trace(state, self.feed.abstract_batch())
        return self._traced

    @cached_property
    def step_digest(self) -> str:
        """Returns 16 hex digits that differ if the program of a training step does."""
        # The text has all constants of the program, such as a table that an optimizer read.
        self._lowered["step"] = lowered = self.trace(self.abstract_state()).lower()
        return hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]

    def _trace_block(self, state: State) -> jax.stages.Traced:
        """Traces the loop over the steps of a block; the program has one device."""
        block = jax.jit(self.loop(state), donate_argnums=0)
        batches = self.feed.abstract_batch(self.block_rule.steps)
        return block.trace(state, batches, jax.ShapeDtypeStruct((), np.int32))

    def _trace_check(self, state: State) -> jax.stages.Traced:
        check = jax.jit(lambda params: all_finite(self.experiment.optimizer.trainable(params)))
        return check.trace(state.params)

    def loop(self, state: State) -> Loop:
        """Returns the loop over a block's steps as a pure function; see `loop_on_device`."""
        return partial(loop_on_device, step_function(self.trace(state)))

    def step(self, state: State, batch: Batch) -> tuple[State, StepMetrics]:
        """Computes one update, asynchronously; the buffers of `state` are donated."""
        # The batch is from `feed.to_devices`, and the metrics are on the devices. Raises for other
        # shapes and shardings, where a jitted function would compile again.
        return self._compile("step", self.trace, state)(state, batch)

    def advance(
        self, state: State, batches: Sequence[Batch]
    ) -> tuple[State, Sequence[StepMetrics]]:
        """Computes the updates of a block, asynchronously, in the form of `block_rule`."""
        # The state's buffers are donated; the batches are at most `block_rule.steps`. The metrics
        # are one for each step, or one of arrays [steps]. After a step whose `StepMetrics.proceeds`
        # is false, the metrics and the state have no meaning.
        if self.block_rule.form == "device_loop":
            compiled = self._compile("block", self._trace_block, state)
            stacked = self.feed.stack(batches, self.block_rule.steps)
            state, metrics = compiled(state, stacked, np.int32(len(batches)))
            return state, [metrics]
        found = []
        for batch in batches:
            if self.simulated and found:
                jax.block_until_ready(found[-1].arrays)
            state, metrics = self.step(state, self.feed.to_devices(batch))
            found.append(metrics)
        return state, found

    def params_finite(self, state: State) -> jax.Array:
        """Computes whether all trainable parameters are finite: a boolean on the devices."""
        # With on_nonfinite="halt" the step itself checks only loss and gradients: reading every
        # parameter at every step costs 5% of a small model's step.
        return self._compile("check", self._trace_check, state)(state.params)

    # Diagnostics.

    @cached_property
    def diagnosed_layouts(self) -> Mapping[str, Layout]:
        """The matrices to diagnose, by path name; raises ComponentError if there are none."""
        found = find_layouts(self.experiment.optimizer, self.abstract_state().params)
        check_matrices(self.experiment.diagnostics, found)
        return found

    def diagnose(self, state: State, batch: Batch) -> StepMetrics:
        """Computes the diagnostics of the next update, asynchronously; `state` stays valid."""
        # It is a program of its own, so that the step has the same bits with and without it.
        compiled = self._compile("diagnosis", self._trace_diagnose, state)
        found = compiled(state, self.feed.to_devices(batch))
        if self.simulated:  # as for the steps of `advance`
            jax.block_until_ready(found.arrays)
        return found

    def clip_norm_of_steps(self) -> Callable[[int], np.float32]:
        """Returns clip_norm as a function of the step, from 1, for this program's inputs."""
        # That of a schedule is computed apart from the step, and may differ in its last bit.
        values = self.inputs.pack()
        value: Any = self._insert(values).optimizer.clip_norm
        if not callable(value):
            return lambda _: np.float32(value)

        def bound(hyperparams: Any, position: Any) -> jax.Array:
            schedule: Any = self._insert(hyperparams).optimizer.clip_norm
            return jnp.asarray(evaluate(schedule, position, "clip_norm"), jnp.float32)

        compiled = jax.jit(bound)
        return lambda step: np.float32(compiled(values, np.int32(step - 1)))

    def _trace_diagnose(self, state: State) -> jax.stages.Traced:
        layouts = self.diagnosed_layouts

        def diagnose(state: State, batch: Batch) -> StepMetrics:
            experiment = self._insert(state.hyperparams)
            with meshes.ambient(self.mesh, self.sharding.axes_of(state.params)):
                return StepMetrics.pack(diagnose_step(experiment, state, batch, layouts))

        whole = meshes.replicated(self.mesh)  # each process reads it
        return jax.jit(diagnose, out_shardings=whole).trace(state, self.feed.abstract_batch())

    # The step as a pure function.

    def traced_step(
        self, state: State, batch: Batch, mesh: Mesh | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Computes one update as a pure function, without jit; the metrics are scalars."""
        # Model and optimizer divide their work among the devices of `mesh`, if it is given.
        split = self.sharding.axes_of(state.params)
        with meshes.ambient(mesh or self.mesh, split, divided=mesh is not None):
            return train_step(self._insert(state.hyperparams), state, batch)

    def packed_step(
        self, state: State, batch: Batch, mesh: Mesh | None = None
    ) -> tuple[State, StepMetrics]:
        """Computes one update as a pure function, as `step` returns it; see `traced_step`."""
        state, metrics = self.traced_step(state, batch, mesh)
        return state, StepMetrics.pack(metrics)


def load_located(
    config: Config,
    vocabulary: Sequence[str] = (),
    steps_per_call: int | None = None,
    declared: bool = False,
    devices: Sequence[Any] | None = None,
) -> Program:
    """Builds a program, not compiled; every mistake is a ConfigError with its place."""
    # For `declared`, see `build_experiment`. A program for `devices` that are not here can be
    # planned and compiled, but not run. A `steps_per_call` of None is that of the config.
    try:
        experiment = build_experiment(config, vocabulary, declared)
        inputs = find_inputs(config, vocabulary, experiment)
        if steps_per_call is not None:
            experiment = replace(experiment, steps_per_call=steps_per_call)
        return Program(experiment, inputs, devices)
    except ValueError as error:
        if (located := with_place(error, config, ["mesh", "data"])) is error:
            raise  # its message begins with its place
        raise located from error


class FirstState:
    """The state before the first step, as a function of the seed and the inputs."""

    def __init__(self, experiment: Experiment, sharding: ShardingRules, inputs: Inputs):
        self._experiment, self._sharding = experiment, sharding
        self._inputs = inputs
        # Stored, so that jax traces it once for `find_shapes` and `compute`: each access of
        # `self._compute` makes another object.
        self._initial = self._compute
        self._compiled: Any = None

    def find_shapes(self) -> State:
        """Returns a `State` of `jax.ShapeDtypeStruct`, shardings included, without device work."""
        shapes = jax.eval_shape(self._initial, self._run_state(0), self._inputs.pack(), _draw(0))
        shardings = state_shardings(self._sharding, shapes, shapes.params)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        )

    def compute(
        self, seed: int, hyperparams: np.ndarray, shardings: State, warm_starts: int = 0
    ) -> State:
        """Computes the state on its devices, in one compiled program."""
        # `hyperparams` are the inputs; `shardings` must be the same in every call.
        if self._compiled is None:  # stored, because every trial of a sweep calls it
            self._compiled = jax.jit(self._initial, out_shardings=shardings)
        return self._compiled(self._run_state(seed), hyperparams, _draw(warm_starts))

    def check_norms(self, params: Any) -> None:
        """Raises GroupError for matrices of zeros whose norms the optimizer keeps."""
        # `params` are shapes. Of the values, only those norms are computed, if there are any.
        optimizer = self._experiment.optimizer

        def of_params(params: Any) -> dict[str, dict[str, jax.Array]]:
            return optimizer.bind(params).kept_norms()

        def norms(seed: Any) -> dict[str, dict[str, jax.Array]]:
            return of_params(self._draw_model(seed, _draw(0))[0])

        if jax.tree.leaves(jax.eval_shape(of_params, params)):
            found = jax.device_get(jax.jit(norms)(np.uint32(self._experiment.seed)))
            optimizer.bind(params).refuse_zeros(found)

    def _run_state(self, seed: int) -> dict[str, Any]:
        run_state: dict[str, Any] = {"seed": np.uint32(seed)}
        if self._experiment.on_nonfinite == "skip":
            run_state["skips"] = np.int32(0)
        if self._experiment.on_nonfinite == "rollback":
            # The fields of `Counters` in trainer/train/rollback.py, a package above this one.
            run_state["rollback"] = np.zeros(4, np.int32)
        return run_state

    def _draw_model(self, seed: Any, draw: Any) -> tuple[Any, Any]:
        """Draws the first parameters, and returns them with the first state of the model."""
        experiment = self._experiment
        batch = {
            # numpy's float64 becomes float32 here as it does in batches, without jax's warning.
            name: jnp.zeros(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
            for name, x in experiment.data.element_spec.items()
        }
        key = jax.random.fold_in(jax.random.key(seed), draw)
        with calling("model"):
            params, model_state = experiment.model.init(key, batch)
        if experiment.roles.parameters == "bfloat16":
            params = to_bfloat16(params)
        return params, model_state

    def _compute(self, run_state: dict[str, Any], hyperparams: Any, draw: Any) -> State:
        experiment = self._experiment
        # Where devices have parts of parameters, each draws its own.
        with meshes.ambient(self._sharding.mesh, divided=self._sharding.may_split):
            params, model_state = self._draw_model(run_state["seed"], draw)
        averages = experiment.ema_decay is not None
        experiment.optimizer.bind(params).check()  # traced arguments could not be compared
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
    """Returns what is folded into the key of the first parameters: 0, or from 2**32 - 1 down."""
    # The steps fold in 1 to 2**31.
    return np.uint32(-warm_starts % 2**32)
