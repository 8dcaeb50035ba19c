"""Calls the functions that a config names as `hooks`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trainer.config import wording
from trainer.config.build import exception_text
from trainer.engine.program import Program
from trainer.engine.step import State
from trainer.hooks import HookContext
from trainer.messages import UserError
from trainer.writers.base import Log

At = Literal["log", "evaluation"]


def called_at(hooks: Sequence[Any], at: At) -> bool:
    """Returns whether any hook is called at log steps ("log") or after evaluations."""
    # A hook without an attribute `at` is called at log steps.
    return any(getattr(hook, "at", "log") == at for hook in hooks)


class Hooks:
    """The hooks of a run; `fence` is called before a file in its folder is written."""

    def __init__(self, program: Program, folder: Path, log: Log, fence: Callable[[], None]):
        self._program = program
        self._folder, self._log, self._fence = folder, log, fence
        self._hooks: Sequence[Any] = program.experiment.hooks
        self._functions: list[Callable[..., object]] = []

    def bind(self, kept: int) -> None:
        """Binds the hooks that ask for it to the run, whose results up to the step `kept` stay."""
        context = HookContext(
            self._program.experiment, self._program.mesh, self._folder, kept, self._log, self._fence
        )
        self._functions = [
            self._try(index, hook.bind, "cannot begin", context) if hasattr(hook, "bind") else hook
            for index, hook in enumerate(self._hooks)
        ]

    def call(self, at: At, step: int, metrics: Mapping[str, float], state: State) -> None:
        """Calls every hook of that time, until one raises; UserError then names it."""
        # Each hook receives a copy of `metrics`. The next step reuses the memory of `state`, so
        # that a hook must copy what it keeps, for example with `jax.device_get`.
        if at == "log":
            given: tuple[Any, ...] = (state.params,)
        else:
            given = (self._program.evaluation.params(state), state.model_state)
        for index, hook in enumerate(self._hooks):
            if called_at([hook], at):
                function, doing = self._functions[index], f"failed after step {step}"
                self._try(index, function, doing, step, dict(metrics), *given)

    def _try(self, index: int, function: Callable[..., Any], doing: str, *given: Any) -> Any:
        try:
            return function(*given)
        except Exception as error:  # whatever a user's function raises
            text = f"{exception_text(error)}{wording.location(error)}"
            name = f"hooks[{index}], {_name(self._hooks[index])}"
            raise UserError(f"{name}, {doing}: {text}") from error


def _name(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    return f"{getattr(hook, '__module__', None) or type(hook).__module__}.{name}"
