"""Any flax nnx module as a Model."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import flax
import jax
from jax.core import Tracer

from trainer.models.model import KNOWN, Mode, Model, call_mode, mode_attributes, pick_inputs

if TYPE_CHECKING:
    import flax.nnx  # imported by `from_nnx`, before any other function here is called


def from_nnx(
    constructor: functools.partial | Callable[..., Any],
    inputs: str | Sequence[str] = "image",
    train_kwargs: Mapping[str, Any] | None = None,
    eval_kwargs: Mapping[str, Any] | None = None,
) -> Model:
    """Converts a flax nnx module to a Model.

    Variables of type `nnx.Param` become the parameters. Random streams are not kept in the model
    state, because every call starts them from the step's key. Intermediate values
    (`nnx.Intermediate`) are dropped. All other variables, such as BatchNorm's statistics, become
    the model state, which changes only in training. The indices of a list of layers become strings,
    so that a path is `layers/0/kernel`.

    Training and evaluation mode are set by `module.train()` and `module.eval()`, which set
    `deterministic` and `use_running_average` in all submodules; boolean attributes such as
    `training` or `is_training` are set as well. Arguments of `__call__` are passed as
    `models.from_linen` does.

    Args:
        constructor: a function that returns the module, called as `constructor(rngs=...)` with an
            `nnx.Rngs`. In a config it is a class or function whose other arguments are bound.
        inputs: keys of the batch whose arrays are passed to `__call__` by position.
        train_kwargs: keyword arguments of `__call__` in training; see `models.from_linen`.
        eval_kwargs: keyword arguments of `__call__` in evaluation.

    Raises:
        ValueError: `constructor` cannot be called. The functions of the Model raise it if the batch
            has no array for one of the inputs, if the module has a jax array as an attribute that
            is not an nnx.Variable, or if the keyword arguments do not fit `__call__`.

    Example:
        >>> import functools
        >>> import jax
        >>> from flax import nnx
        >>> from trainer import models
        >>> model = models.from_nnx(functools.partial(nnx.Linear, 2, 3), inputs="x")
        >>> params, model_state = model.init(jax.random.key(0), {"x": jax.numpy.ones((8, 2))})
        >>> params["kernel"].shape
        (2, 3)
    """
    if not callable(constructor):
        raise ValueError(
            f"models.from_nnx takes a function that builds the module from rngs, but got "
            f"{constructor!r}. Give the class itself, not an instance of it."
        )
    import flax.nnx  # slow to import, so only here

    # nnx.split returns the graph and a state for each of these kinds; `...` is the rest.
    kinds = (flax.nnx.Param, flax.nnx.RngState, flax.nnx.Intermediate, ...)

    @functools.cache
    def mode_of(kind: type) -> Mode:
        return call_mode(kind, inputs, train_kwargs, eval_kwargs, "models.from_nnx")

    structure = functools.cache(functools.partial(_structure, constructor, kinds))

    def init(key: jax.Array, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        # Raises if the batch has no such field; nnx modules are built without inputs.
        pick_inputs(batch, inputs)
        params_key, other_key = jax.random.split(key)
        module = constructor(rngs=flax.nnx.Rngs(other_key, params=params_key))
        mode_of(type(module))
        _, params, _, _, rest = flax.nnx.split(module, *kinds)
        return _to_dict(params), _to_dict(rest)

    def bind(params: Any, model_state: Any, *, key: Any = None, train: bool = False) -> Any:
        graph, params_like, streams, sown, rest_like = structure()
        module = flax.nnx.merge(
            graph,
            _filled(params_like, params),
            # Merging needs a key for every stream, also in evaluation, where none is used.
            _started(streams, jax.random.key(0) if key is None else key),
            sown,
            _filled(rest_like, model_state),
        )
        _set_mode(module, train)
        return module

    def apply(
        params: Any, model_state: Any, batch: Mapping[str, Any], *, key: Any, train: bool
    ) -> tuple[Any, Any]:
        module = bind(params, model_state, key=key, train=train)
        outputs = module(*pick_inputs(batch, inputs), **mode_of(type(module))(train))
        if not train:
            return outputs, model_state
        return outputs, _to_dict(flax.nnx.split(module, *kinds)[4])

    mode = functools.partial(_mode, constructor, mode_of)
    return Model(init, apply, mode, bind=bind)


def _mode(
    constructor: Callable[..., Any], mode_of: Callable[[type], Mode], train: bool
) -> dict[str, Any]:
    """Returns the mode attributes of a module, and what it is called with, by name."""
    arguments: dict[str, Any] = {}

    def build() -> None:
        module = constructor(rngs=flax.nnx.Rngs(0))
        arguments.update({**_set_mode(module, train), **mode_of(type(module))(train)})

    jax.eval_shape(build)
    return arguments


def _structure(constructor: Callable[..., Any], kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the graph of a module, and the shapes of its states of each kind."""
    # A graph definition is not an array, and cannot be a result of eval_shape.
    graphs = []

    def build() -> Any:
        module = constructor(rngs=flax.nnx.Rngs(0))
        graph, *states = flax.nnx.split(module, *kinds)
        _check_arrays(module, states)
        graphs.append(graph)
        return states

    return tuple(graphs + jax.eval_shape(build))


def _set_mode(module: Any, train: bool) -> dict[str, bool]:
    """Sets the mode attributes of a module and its submodules, and returns them by name."""
    module.train() if train else module.eval()
    attributes: dict[str, bool] = {}
    for _, submodule in flax.nnx.iter_modules(module):
        for name in mode_attributes(submodule):
            setattr(submodule, name, KNOWN[name] == train)
            attributes[name] = getattr(submodule, name)
    return attributes


def _check_arrays(module: object, states: Sequence[Any]) -> None:
    """Raises ValueError if an attribute of a module is a traced array and not a variable."""
    known = {path for state in states for path, _ in flax.nnx.to_flat_state(state)}
    for path, node in flax.nnx.iter_graph(module):
        if isinstance(node, Tracer) and path not in known:
            raise ValueError(
                f"The nnx module {type(module).__name__} keeps a bare jax array as "
                f"{'.'.join(map(str, path))!r}, which nnx treats as a constant of the program. "
                "Wrap it in nnx.Variable, or make it with numpy if it never changes."
            )


def _to_dict(state: Any) -> Any:
    """Converts an nnx State to nested dicts of arrays with strings as keys."""

    def named(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {str(key): named(value) for key, value in tree.items()}
        return tree

    return named(flax.nnx.to_pure_dict(state))


def _filled(state: Any, values: Any) -> Any:
    """Returns an nnx State with the arrays of nested dicts of the same structure."""

    def at(path: Sequence[Any], _: Any) -> Any:
        return functools.reduce(lambda tree, key: tree[str(key)], path, values)

    return _mapped(at, state)


def _started(streams: Any, key: jax.Array) -> Any:
    """Returns the random streams at their start, each with its own key derived from `key`."""
    numbers = {path: number for number, (path, _) in enumerate(flax.nnx.to_flat_state(streams))}

    def at(path: Sequence[Any], stream: Any) -> Any:
        if not issubclass(stream.type, flax.nnx.RngKey):
            return jax.numpy.zeros(stream.shape, stream.dtype)
        # Streams of one model must not draw equal numbers.
        own = jax.random.fold_in(key, numbers[tuple(path)])
        return jax.random.split(own, stream.shape) if stream.shape else own

    return _mapped(at, streams)


def _mapped(function: Callable[[Sequence[Any], Any], Any], state: Any) -> Any:
    """Replaces the value of each variable of an nnx State by `function(path, variable)`."""
    flat = []
    for path, variable in flax.nnx.to_flat_state(state):
        value = function(path, variable)
        flat.append((path, variable.replace(value) if hasattr(variable, "replace") else value))
    return flax.nnx.from_flat_state(flat)
