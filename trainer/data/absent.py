"""Data sets that are not on this machine, of which enough is known to plan a run, not to train."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np


class DataAbsent(ValueError):
    """A data set that is not on this machine, although its shapes and sizes are known.

    `python -m trainer explain` plans with `declared`; everything else reports the message.

    Args:
        name: the function of the data set in a config, such as "data.tfds". Only a call of this
            function is replaced by `declared`, and not one of a user's function that wraps it.
        message: whole sentences: what is missing, and how to prepare it.
        like: an object with the attributes of a `trainer.protocols.Dataset`, whose batches are not
            read: `element_spec`, `batch_size`, `num_examples` and `splits`, from a split to its
            number of examples. Optional are `eval_batch_size`, `eval_spec` (as `element_spec`, of
            an evaluation batch with its mask), `for_steps`, and what a data set of texts has.

    Attributes:
        name: the argument.
        declared: the data set to plan with.

    Example:
        >>> import jax, numpy as np
        >>> from types import SimpleNamespace
        >>> spec = {"image": jax.ShapeDtypeStruct((8, 28, 28, 1), np.float32)}
        >>> sizes = {"num_examples": 60_000, "splits": {"test": 10_000}}
        >>> like = SimpleNamespace(element_spec=spec, batch_size=8, **sizes)
        >>> DataAbsent("lab.images", "Copy the images to this machine.", like).declared.batch_size
        8
    """

    def __init__(self, name: str, message: str, like: Any):
        super().__init__(message)
        self.name = name
        self.declared = DeclaredData(name, message, like)


class DeclaredData:
    """A data set to plan with: `train` and `evaluate` raise."""

    # `message` says what is missing, and how to prepare it. The specs have the shapes of a batch
    # over all processes; `eval_spec` has "mask" too. `splits` is None if their sizes are not known.

    def __init__(self, name: str, message: str, like: Any):
        import jax

        self.name, self.message, self._like = name, message, like
        said = f"The plan has the declared shapes of {name}, whose data are not on this machine."
        self.plan_warnings = [f"{said} {message}"]
        self.plan_lines: Sequence[str] = ()
        self.element_spec: Mapping[str, jax.ShapeDtypeStruct] = dict(like.element_spec)
        self.batch_size: int = like.batch_size
        self.num_examples: int = like.num_examples
        self.splits: Mapping[str, int | None] = dict(like.splits)
        size = getattr(like, "eval_batch_size", self.batch_size)
        fields = {
            key: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)
            for key, x in self.element_spec.items()
        }
        mask = jax.ShapeDtypeStruct((size,), np.float32)
        self.eval_spec: Mapping[str, jax.ShapeDtypeStruct] = dict(
            getattr(like, "eval_spec", {"mask": mask, **fields})
        )
        for key in ("tokens_per_example", "vocab_size", "tokenizer"):  # of a data set of texts
            if hasattr(like, key):
                setattr(self, key, getattr(like, key))

    def for_steps(self, steps: int) -> "DeclaredData":
        """Returns the data set of a run of so many steps; raises ValueError as that of `like`."""
        made = copy.copy(self)
        if hasattr(self._like, "for_steps"):
            made._like = self._like.for_steps(steps)
        made.plan_lines = getattr(made._like, "plan_lines", ())
        return made

    def train(self, *given: Any, rank: int | None = None, size: int | None = None) -> Iterator[Any]:
        """Raises ValueError: there are no examples."""
        raise ValueError(self.message)

    evaluate = train
