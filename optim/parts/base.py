"""What a part of `optim.chain` is, and where it may stand."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optim.descent import Updated, scalar
from optim.dtypes import widen
from optim.factories import ArgumentError
from optim.layouts import MatrixSpec
from optim.matrices import Matrices

__all__ = ["Need", "Part"]

Place = Literal["before", "after"]
Length = Literal["keeps", "sets", "ignores", "replaces"]

# What a part may say of itself, and another one may need, in words.
_TRAITS = {
    "keeps_norm": "a part that keeps the norms of the weights, such as parts.pin_radius",
    "decays": "a part that makes weights smaller, such as parts.decay",
}

_DTYPES = ("bfloat16", "float16", "float32", "float64")


class Need(NamedTuple):
    """Another part without which a part of `optim.chain` does not do what it is for.

    Attributes:
        of: what the other part is: the name of a part, such as "parts.polar", or "keeps_norm" or
            "decays", which any `Part` may be that says so.
        where: whether it stands "before" or "after" the part that needs it. The parts after the
            learning rate stand after all those before it.
        why: what goes wrong otherwise and what to do, as one or two sentences.
    """

    of: str
    where: Place
    why: str

    @property
    def words(self) -> str:
        """What is needed, in words."""
        return _TRAITS.get(self.of, self.of)

    def is_met_by(self, part: "Part") -> bool:
        """Returns whether a part, wherever it stands, is what is needed."""
        return getattr(part, self.of) if self.of in _TRAITS else part.name == self.of


class Part(optax.GradientTransformationExtraArgs):
    """An optax transformation that says where it stands in `optim.chain`.

    Attributes:
        name: as in a config, such as "parts.polar".
        place: "before" the learning rate, for a part that changes a direction, or "after" it, for
            one that changes the step.
        length: what it does with the lengths of directions: "ignores" those that it is given, as
            `parts.polar` does; "sets" new ones, as `parts.floor` does; "replaces" them by others,
            as `parts.match_norm` does; or "keeps" them.
        once: whether a second one in a chain is a mistake, as after `parts.polar`.
        keeps_norm: whether it keeps the norms of the weights, or lets them change only with what is
            parallel to the weights.
        lets_decay: whether it lets them change so, as `parts.pin_radius` with `radial` does; a
            weight decay before it then has its effect.
        keeps_zeros: whether it keeps a matrix of zeros: it makes a step, or the matrix, as long as
            the matrix was before.
        decays: whether it makes weights smaller.
        around: the transformation that it runs first, such as that of `parts.cautious_decay`.
        needs: the other parts that it needs in a chain.
        reads: the observations of the model that it reads, such as "attention_logits"; see
            `trainer.protocols.Model`.
    """

    name: str
    place: Place
    length: Length
    once: bool
    keeps_norm: bool
    lets_decay: bool
    keeps_zeros: bool
    decays: bool
    around: optax.GradientTransformation | None
    needs: tuple[Need, ...]
    reads: tuple[str, ...]

    def __new__(
        cls,
        init: Callable[..., Any],
        update: Callable[..., Any],
        *,
        name: str,
        place: Place = "before",
        length: Length = "keeps",
        once: bool = False,
        keeps_norm: bool = False,
        lets_decay: bool = False,
        keeps_zeros: bool = False,
        decays: bool = False,
        around: optax.GradientTransformation | None = None,
        needs: Sequence[Need] = (),
        reads: Sequence[str] = (),
    ) -> "Part":
        """Makes a part; `init` and `update` are those of optax."""
        part = super().__new__(cls, init, update)
        part.name, part.place, part.length, part.once = name, place, length, once
        part.keeps_zeros, part.decays, part.around = keeps_zeros, decays, around
        inner = around if isinstance(around, Part) else None
        part.keeps_norm = keeps_norm or inner is not None and inner.keeps_norm
        part.lets_decay = lets_decay or inner is not None and inner.lets_decay
        part.needs = tuple(needs)
        part.reads = (*reads, *(inner.reads if inner is not None else ()))
        return part

    def _replace(self, **functions: Any) -> "Part":
        """Returns the part with another `init` or `update`, as any named tuple does."""
        part = super()._replace(**functions)
        vars(part).update(vars(self))
        return part


def of_matrices(
    name: str,
    matrices: MatrixSpec,
    change: Callable[[jax.Array, jax.Array], jax.Array],
    length: Length = "keeps",
    keeps_zeros: bool = False,
    needs: Sequence[Need] = (),
) -> Part:
    """Makes a part without state of a function of updates and weights [n, rows, columns]."""
    # It stands before the learning rate; for `length` and what follows it, see `Part`.
    over = Matrices(matrices, f"optim.{name}")

    def init(params: optax.Params) -> optax.EmptyState:
        over.declare(params, again=False)
        return optax.EmptyState()

    def update(updates: optax.Updates, state: Any, params: Any = None, **_: Any) -> Updated:
        return over.each(change, updates, widen(params)), state

    return Part(init, update, name=name, length=length, keeps_zeros=keeps_zeros, needs=needs)


def norm(x: jax.Array, axes: int | tuple[int, int] = (-2, -1)) -> jax.Array:
    """Returns norms of matrices [n, rows, columns]; the axes that it sums over keep size 1."""
    return jnp.linalg.norm(x, axis=axes, keepdims=True)


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the inner products of matrices [n, rows, columns], as [n, 1, 1]."""
    return jnp.sum(x * y, axis=(-2, -1), keepdims=True)


def at_least(x: jax.Array, eps: ArrayLike) -> jax.Array:
    """Returns the maximum of an array and a hyperparameter, in the dtype of the array."""
    return jnp.maximum(x, scalar(eps, x))


_PASSED = {"learning_rate": "the learning rate", "grad": "the gradient"}
OBSERVATIONS = "observations"
"""The extra argument of an update that has what the model observed: name -> path -> array."""


def passed(extra: Mapping[str, Any], what: str, name: str, where: Place = "before") -> Any:
    """Returns "learning_rate" or "grad" as a chain passes it; raises ValueError if none did."""
    # `name` is that of the part, such as "parts.laprop", and `where` its place.
    if what not in extra:
        raise ValueError(
            f"{name} is a part of optim.chain, which passes it {_PASSED[what]}: name it in"
            f" `{where}`."
        )
    return extra[what]


def check_option(name: str, value: str, known: Sequence[str]) -> None:
    """Raises ValueError if the value of an argument is not one of those that are known."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}.")


def check_dtype(name: str, dtype: str | None) -> None:
    """Raises ValueError if an argument names a dtype in which no update can be computed."""
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"{name} must be None or one of {', '.join(_DTYPES)}, got {dtype!r}.")


def check_count(name: str, value: int) -> None:
    """Raises ValueError if a number of updates is below 1."""
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")


def check_direction(name: str, argument: str, onto: optax.GradientTransformation | None) -> None:
    """Raises ArgumentError if what a part takes the norms of does not make a direction."""
    if isinstance(onto, Part) and onto.place != "before":
        raise ArgumentError(
            f"{name} takes the norms of a direction, and {onto.name} changes the step.", argument
        )
