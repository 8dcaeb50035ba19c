"""Packs the metrics of a step into one array for each dtype."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, eq=False)
class StepMetrics(Mapping[str, Any]):
    """The metrics of a step, or of each step of a block; a pytree of few arrays.

    A program that returned each metric as an array of its own would take longer to call than some
    small models take to compute.

    Attributes:
        arrays: one array for each dtype, [..., metrics]; the leading axes count steps and trials.
        names: the names of the metrics in each array, in their order.

    Example:
        >>> metrics = StepMetrics.pack({"loss": jnp.float32(2), "finite": jnp.bool_(True)})
        >>> {name: value.item() for name, value in metrics.items()}
        {'loss': 2.0, 'finite': 1}
    """

    arrays: tuple[Any, ...]
    names: tuple[tuple[str, ...], ...]

    @classmethod
    def pack(cls, metrics: Mapping[str, Any]) -> "StepMetrics":
        """Packs scalars; booleans become integers.

        Args:
            metrics: name -> scalar, perhaps traced.
        """
        by_dtype: dict[Any, dict[str, Any]] = {}
        for name, value in metrics.items():
            array = jnp.asarray(value)
            array = array.astype(jnp.int32) if array.dtype == bool else array
            by_dtype.setdefault(array.dtype, {})[name] = array
        return cls(
            tuple(jnp.stack(list(group.values())) for group in by_dtype.values()),
            tuple(tuple(group) for group in by_dtype.values()),
        )

    @classmethod
    def stack_on_host(cls, metrics: Sequence["StepMetrics"]) -> "StepMetrics":
        """Waits for the metrics of consecutive steps, and stacks them as numpy arrays.

        Args:
            metrics: of one step each; or one alone, whose arrays are [steps, metrics] already.

        Returns:
            Metrics of numpy arrays [steps, metrics].
        """
        # In one call, which starts all transfers before it waits for the first.
        host = jax.device_get([each.arrays for each in metrics])
        if len(host) == 1:
            arrays = tuple(np.atleast_2d(array) for array in host[0])
        else:
            arrays = tuple(map(np.stack, zip(*host, strict=True)))
        return cls(arrays, metrics[0].names)

    def column(self, name: str) -> Any:
        """Returns a metric without waiting for it, [...]; it may be traced."""
        array, index = self._find(name)
        return array[..., index]

    def _find(self, name: str) -> tuple[Any, int]:
        """Returns the array that has a metric, and its index in the last axis."""
        for array, names in zip(self.arrays, self.names, strict=True):
            if name in names:
                return array, names.index(name)
        raise KeyError(name)

    def __getitem__(self, name: str) -> np.ndarray:
        """Waits for the steps, and returns a metric, a numpy array [...]."""
        array, index = self._find(name)
        return np.asarray(array)[..., index]

    def __iter__(self) -> Iterator[str]:
        return (name for names in self.names for name in names)

    def __len__(self) -> int:
        return sum(map(len, self.names))


jax.tree_util.register_dataclass(StepMetrics, data_fields=["arrays"], meta_fields=["names"])
