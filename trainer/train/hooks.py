"""Calls the functions that a config names as `hooks`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.config import blame, build_errors
from trainer.messages import UserError

Hook = Callable[[int, Mapping[str, float], Any], object]


def call_hooks(hooks: Sequence[Hook], step: int, metrics: Mapping[str, float], params: Any) -> None:
    """Calls every hook, until one raises.

    Args:
        hooks: functions of (step, metrics, params).
        step: the number of finished steps.
        metrics: the metrics of that step, name -> float; each hook receives a copy.
        params: the parameters after that step, on the devices. The next step reuses their memory,
            so that a hook must copy what it keeps, for example with `jax.device_get`.

    Raises:
        UserError: a hook raised; the message names it.
    """
    for index, hook in enumerate(hooks):
        try:
            hook(step, dict(metrics), params)
        except Exception as error:  # whatever a user's function raises
            text = f"{build_errors.exception_text(error)}{blame.location(error)}"
            name = f"hooks[{index}], {_name(hook)}"
            raise UserError(f"{name}, failed after step {step}: {text}") from error


def _name(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    return f"{getattr(hook, '__module__', None) or type(hook).__module__}.{name}"
