"""Counts how often a step of a run applies its model."""

from collections.abc import Sequence
from typing import Any

import jax

from trainer.config import Config
from trainer.engine.loading import load_located


def passes_of(config: Config, vocabulary: Sequence[str] = ()) -> int:
    """Returns how often the model is applied while a step is traced, as a lower bound."""
    # An optimizer that asks for the loss or the gradient at other parameters, such as a line search
    # or SAM, applies it again. A loop that applies it counts once for each time that its body is
    # traced.
    program = load_located(config, vocabulary, declared=True)
    state = program.abstract_state()
    counting = _Counting(program.experiment.model)
    object.__setattr__(program.experiment, "model", counting)  # a frozen dataclass
    jax.eval_shape(program.traced_step, state, program.feed.abstract_batch())
    return counting.count


class _Counting:
    """A model that counts how often it is applied in training."""

    def __init__(self, model: Any):
        self._model = model
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the model."""
        self.count += bool(kwargs.get("train"))
        return self._model.apply(*args, **kwargs)
