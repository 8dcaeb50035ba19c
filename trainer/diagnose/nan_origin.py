"""Finds the operation that caused a value that is not finite in the outputs of a function.

The operations of its jaxpr are run one after the other. An operation that returns an infinity or
NaN for finite operands becomes the origin of that value, and results that it makes non-finite
inherit the origin. An infinity that does not reach an output, such as a masked -inf whose exp is 0,
is therefore not reported.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

# Operations that only move, cast or repeat values: their result still is the input by name.
_KEEPS_NAME = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "pvary",
    "reduce_precision",
    "reshape",
    "sharding_constraint",
    "slice",
    "squeeze",
    "transpose",
}


class Origin(NamedTuple):
    """The origin of a value that is not finite.

    Attributes:
        what: the operation, such as "exp" or "div"; "input" for an input that is not finite.
        where: file and line of the code that called it; the name of an input.
        scope: the names of the surrounding modules, such as "jvp(Mlp)/head".
        operands: a line per operand: its name if it is an input, shape, dtype and range.
        result: the values that are not finite, such as "3 NaN of 640 values".
    """

    what: str
    where: str
    scope: str
    operands: list[str]
    result: str


class _Value(NamedTuple):
    data: Any
    name: str = ""  # of the input that it is a view of
    origin: Origin | None = None


def find(
    function: Callable[..., Any], arguments: Sequence[Any], names: Sequence[str]
) -> tuple[Any, dict[str, Origin]]:
    """Runs a function and traces every output that is not finite to its origin.

    Args:
        function: a function of pytrees of arrays that returns a pytree of arrays.
        arguments: its arguments.
        names: the names of its arguments; the path of a leaf begins with them.

    Returns:
        The results of the function; and output path -> origin, for outputs that are not finite.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    leaves = []
    for name, argument in zip(names, arguments, strict=True):
        for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
            inner = jax.tree_util.keystr(path, simple=True, separator="/")
            leaves.append(_input(leaf, "/".join(filter(None, (name, inner)))))
    values = _run(closed.jaxpr, [_Value(x) for x in closed.consts], leaves)
    results = jax.tree.unflatten(jax.tree.structure(shape), [value.data for value in values])
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_flatten_with_path(results)[0]
    ]
    return results, {p: v.origin for p, v in zip(paths, values, strict=True) if v.origin}


def _input(leaf: Any, name: str) -> _Value:
    if _finite(leaf):
        return _Value(leaf, name)
    return _Value(leaf, name, Origin("input", name, "", [], _count_not_finite(leaf)))


def _run(
    jaxpr: Jaxpr, consts: Sequence[_Value], inputs: Sequence[_Value], place: str = ""
) -> list[_Value]:
    """Runs the operations; `place` is the location of those that have none of their own."""
    known: dict[Any, _Value] = {}

    def read(atom: Any) -> _Value:
        return _Value(atom.val) if isinstance(atom, Literal) else known[atom]

    known.update(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        known.update(zip(eqn.outvars, _operation(eqn, operands, place), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _operation(eqn: JaxprEqn, operands: list[_Value], place: str) -> list[_Value]:
    """Runs one operation; searches loops and calls only if their results are not finite."""
    parameters = eqn.primitive.get_bind_params(eqn.params)
    # The context in which it was traced, its mesh for example, decides what it does.
    with eqn.ctx.manager:
        data = eqn.primitive.bind(*[x.data for x in operands], **parameters)
    data = list(data) if eqn.primitive.multiple_results else [data]
    if all(map(_finite, data)):
        keeps = eqn.primitive.name in _KEEPS_NAME and bool(operands)
        return [_Value(x, operands[0].name if keeps else "") for x in data]
    place = source_info_util.summarize(eqn.source_info) or place
    inner = _RUNNERS.get(eqn.primitive.name, _run_call)(eqn, operands, place)
    if inner is not None:
        return [
            _Value(x, origin=None if _finite(x) else v.origin)
            for x, v in zip(data, inner, strict=True)
        ]
    # The origin of an operand is that of the result: this operation only passed it on.
    inherited = next((x.origin for x in operands if x.origin), None)
    return [
        _Value(x, origin=None if _finite(x) else inherited or _origin(eqn, operands, x, place))
        for x in data
    ]


def _run_call(eqn: JaxprEqn, operands: list[_Value], place: str) -> list[_Value] | None:
    """Runs the body of a call (jit, custom_vjp, remat); None for an operation without a body."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(name)
        if isinstance(body, ClosedJaxpr | Jaxpr):
            closed = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
            if len(closed.jaxpr.invars) == len(operands):
                return _run(closed.jaxpr, [_Value(x) for x in closed.consts], operands, place)
    return None


def _run_scan(eqn: JaxprEqn, operands: list[_Value], place: str) -> list[_Value]:
    """Runs the body of a scan for each of its steps."""
    body, p = eqn.params["jaxpr"], eqn.params
    fixed, carried = _fixed_and_carried(p)
    # The operands of a scan are its constants, the first carry, and arrays [length, ...].
    consts, carry = operands[:fixed], operands[fixed : fixed + carried]
    stacked, pieces = operands[fixed + carried :], {}
    for step in range(p["length"]):
        index = p["length"] - 1 - step if p["reverse"] else step
        slices = [
            _input(x.data[index], f"{x.name}[{index}]" if x.name else "")
            if x.origin is None
            else _inherit(x.data[index], x)
            for x in stacked
        ]
        inputs = [*consts, *carry, *slices]
        out = _run(body.jaxpr, [_Value(x) for x in body.consts], inputs, place)
        carry = out[:carried]
        for i, value in enumerate(out[carried:]):
            if value.origin is not None:
                # The earliest step of the loop in which an output is not finite is its origin.
                pieces.setdefault(i, value)
    count = len(eqn.outvars) - carried
    # The caller has the data of the whole scan, and takes only the origins from here.
    return [*carry, *(pieces.get(i, _Value(None)) for i in range(count))]


def _fixed_and_carried(scan: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many are carried."""
    if "num_consts" in scan:
        return scan["num_consts"], scan["num_carry"]
    consts, carry, _ = scan["ft_in"].unpack()  # since jax 0.12
    return len(consts), len(carry)


def _inherit(piece: Any, whole: _Value) -> _Value:
    return _Value(piece, whole.name, None if _finite(piece) else whole.origin)


def _run_while(eqn: JaxprEqn, operands: list[_Value], place: str) -> list[_Value]:
    """Runs the test and the body of a while loop until the test is false."""
    p = eqn.params
    cut = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    # Those of a while loop are constants of the test, constants of the body, and the carry.
    of_test, of_body, carry = operands[: cut[0]], operands[cut[0] : cut[1]], operands[cut[1] :]
    test, body = p["cond_jaxpr"], p["body_jaxpr"]
    while bool(_run(test.jaxpr, [_Value(x) for x in test.consts], [*of_test, *carry])[0].data):
        consts = [_Value(x) for x in body.consts]
        carry = _run(body.jaxpr, consts, [*of_body, *carry], place)
    return carry


def _run_cond(eqn: JaxprEqn, operands: list[_Value], place: str) -> list[_Value]:
    """Runs the branch of a cond that its first operand selects."""
    branches = eqn.params["branches"]
    branch = branches[int(np.clip(int(operands[0].data), 0, len(branches) - 1))]
    return _run(branch.jaxpr, [_Value(x) for x in branch.consts], operands[1:], place)


_RUNNERS: Mapping[str, Callable[[JaxprEqn, list[_Value], str], list[_Value] | None]] = {
    "scan": _run_scan,
    "while": _run_while,
    "cond": _run_cond,
}


def _origin(eqn: JaxprEqn, operands: list[_Value], result: Any, place: str) -> Origin:
    return Origin(
        what=eqn.primitive.name,
        where=place,
        scope=str(eqn.source_info.name_stack),
        operands=[_describe(x) for x in operands],
        result=_count_not_finite(result),
    )


def _finite(x: Any) -> bool:
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.inexact):
        return True
    return bool(jnp.isfinite(x).all())


def _describe(value: _Value) -> str:
    x = jnp.asarray(value.data)
    text = f"{x.dtype.name}[{','.join(map(str, x.shape))}]"
    if value.name:
        text = f"{value.name} {text}"
    if not x.size or not jnp.issubdtype(x.dtype, jnp.number):
        return text
    low, high = (float(f(x.astype(jnp.float32))) for f in (jnp.min, jnp.max))
    return f"{text} from {low:.4g} to {high:.4g}" if x.ndim else f"{text} = {low:.4g}"


def _count_not_finite(x: Any) -> str:
    x = jnp.asarray(x)
    nans, infinities = int(jnp.isnan(x).sum()), int(jnp.isinf(x).sum())
    counts = [f"{n} {what}" for n, what in ((nans, "NaN"), (infinities, "infinite")) if n]
    return f"{' and '.join(counts)} of {x.size} values"
