"""`compile`: a program that initializes, updates and evaluates a state, for loops of your own."""

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from operator import attrgetter
from os import PathLike
from typing import Any, cast

import jax
import jax.numpy as jnp

from lockstep.configs import Config, Packages, as_config
from optim.paths import names
from trainer.cli.resolving import make_program
from trainer.config.wording import known_names, listing
from trainer.engine.datasets import split_sizes, whole_splits
from trainer.engine.program import Program as _Program
from trainer.engine.step import State
from trainer.messages import UserError
from trainer.workdir import code


def loaded_program(config: Config, declared: bool = False) -> _Program:
    """Builds the program of a config."""
    # If `declared`, a data set that is not on this machine is replaced by its declared shapes.
    program = make_program(config.resolved, config.vocabulary, declared=declared)
    check_code(config.vocabulary)
    return program


def check_code(vocabulary: Sequence[str]) -> None:
    """Raises UserError if a file of the user's packages was edited after it was imported."""
    if edited := code.edited(vocabulary):
        raise UserError(
            f"{listing(edited, 4)} {'were' if len(edited) > 1 else 'was'} edited after this process"
            " imported the module, and it still has the functions of before: restart the kernel"
            " of the notebook, or the process."
        )


class Program:
    """A compiled config, which does not change any more.

    Args:
        program: the program of `trainer.engine`.

    Attributes:
        experiment: the model, data, loss, optimizer and settings that were built from the config.
    """

    def __init__(self, program: _Program):
        self._program = program
        self._copy: Any = None
        self.experiment = program.experiment

    def init(self, seed: int | None = None) -> State:
        """Returns the state before the first step.

        Args:
            seed: of the parameters; None for that of the config.

        Returns:
            A tuple with `step`, `params`, `model_state`, `opt_state` and more; all of it is what a
            checkpoint saves.
        """
        return self._program.init(seed)

    def batches(self, start: int = 0) -> Iterator[Mapping[str, Any]]:
        """Yields the training batches of the run, without end.

        Args:
            start: the index of the first batch: that of the step which trains on it, from 0.
        """
        return self._program.feed.batches(start)

    def step(
        self, state: State, batch: Mapping[str, Any], *, donate: bool = False
    ) -> tuple[State, dict[str, float]]:
        """Computes one update, with the bits of a run.

        Args:
            state: the state before it.
            batch: numpy arrays by name, as from `batches`, which are sent to the devices.
            donate: whether the memory of `state` is used for the result. No copy of the state is
                made then, and `state` cannot be used any more.

        Returns:
            The state after the update, and the row of metrics of the step: "train/loss",
            "grad_norm" and more.

        Raises:
            UserError: the batch has other names, shapes or dtypes than those of the data; the state
                was donated before, or is that of another program.
        """
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state)):
            raise UserError(
                "This state was given to step(..., donate=True) before, so that its memory has been"
                " used for another one. Go on with the state that step returned."
            )
        sent = self._program.feed.to_devices(dict(batch))
        with self._given(state):
            state, metrics = self._program.step(state if donate else self._copied(state), sent)
        return state, {name: float(metrics[name]) for name in metrics}

    def evaluate(self, state: State, split: str | None = None) -> dict[str, float]:
        """Evaluates a state.

        Args:
            state: the state; it is not changed.
            split: "validation", "test" or another split of the data; None for all of them.

        Returns:
            The metrics of the split, such as "loss" and "accuracy"; of all splits by their names in
            metrics.jsonl, such as "eval/accuracy".

        Raises:
            UserError: the data have no such split, or the state is that of another program.
        """
        with self._given(state):
            if split is None:
                return self._program.evaluation.run_splits(state)
            sizes = split_sizes(self.experiment.data)
            if split not in (splits := list(dict.fromkeys([*whole_splits(sizes), *sizes]))):
                hint = known_names(split, splits, "It has")
                raise UserError(f"The data set has no split {split!r} to evaluate. {hint}")
            return self._program.evaluation.run_split(state, split)

    def params(self, state: State) -> Any:
        """Returns the parameters that are evaluated: averages, where the config has some.

        Args:
            state: the state; it is not changed.
        """
        return self._program.evaluation.params(state)

    @contextlib.contextmanager
    def _given(self, state: State) -> Generator[None, None, None]:
        """Explains an error in the block by the state, if that is the state of another program."""
        try:
            yield
        except (TypeError, ValueError, UserError) as error:
            wanted, found = _kinds(self._program.abstract_state()), _kinds(state)
            wrong = [
                f"  {path}: {found.get(path, 'absent')}, and here {wanted.get(path, 'absent')}"
                for path in {**wanted, **found}
                if found.get(path) != wanted.get(path)
            ]
            if not wrong:
                raise
            more = [f"  and {len(wrong) - 4} more"] if len(wrong) > 4 else []
            raise UserError(
                "This is not a state of this program; use one that its init or step returned. It"
                " has other arrays:\n" + "\n".join([*wrong[:4], *more])
            ) from error

    def _copied(self, state: State) -> State:
        if self._copy is None:
            untyped: Any = jax
            shardings = jax.tree.map(attrgetter("sharding"), state)
            self._copy = untyped.jit(_copied, out_shardings=shardings)
        return cast(State, self._copy(state))


def _copied(state: State) -> State:
    return jax.tree.map(jnp.copy, state)


def _kinds(state: Any) -> dict[str, str]:
    """Returns path -> dtype and shape of each array, such as "float32[64,10]"."""
    kinds = [jax.typeof(x).str_short() for x in jax.tree.leaves(state)]
    return dict(zip(names(state), kinds, strict=True))


def compile(config: Config | str | PathLike[str], *, vocabulary: Packages = ()) -> Program:
    """Builds the program of a config, which is compiled at its first step.

    Args:
        config: the config, or its file; later changes of it do not change the program.
        vocabulary: further packages whose public functions the config may name.

    Raises:
        UserError: the config has a mistake, or its parts do not fit together.

    Example:
        >>> import lockstep as ls
        >>> config = ls.load_config("experiments/muon_mlp/mlp.yaml")
        >>> program = ls.compile(config)
        >>> state = program.init()
        >>> for batch, _ in zip(program.batches(), range(2)):
        ...     state, row = program.step(state, batch)
        >>> int(state.step), row["train/loss"] < 4.0
        (2, True)
    """
    program = loaded_program(as_config(config, vocabulary))
    program.trace(program.abstract_state())
    return Program(program)
