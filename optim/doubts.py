"""Finds parameters whose last two axes are probably not the matrix of their layer.

What a kernel's axes mean is not written in the parameters, so these are guesses, from four kinds of
evidence, the most certain first:

- the bias of the same layer, which has the axes of the kernel that the layer does not sum over;
- an axis that all parameters of a module have in common: layers that are stacked by a scan;
- kernels beside each other with the same heads: those of attention;
- names, such as "conv", and the sizes of windows.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

Shape = tuple[int, ...]


class Doubt(NamedTuple):
    """A guess about one parameter."""

    text: str  # with "<path>" in place of its path, so that equal layers have equal texts
    spec: str | None = None  # the value of `matrices` that would be right; None if there is none
    # whether it is no guess: a convolution, whose bias has the axes of its outputs
    certain: bool = False


# Names for the axes that a layer sums over, and for its output axes, by how many there are.
_INPUTS = {1: "in", 2: "length in", 3: "height width in", 4: "depth height width in"}
_OUTPUTS = {1: "out", 2: "heads head_dim", 3: "parts heads head_dim"}
_CHANGE = "Set matrices={<path>: %r}, whose keys are patterns,"
_DENSE = "or 'dense' if the last two axes are the matrix."
_CONVOLUTIONS = ("conv1d", "conv", "conv3d")
_LARGEST_WINDOW = 64
_WINDOWS_1D = (3, 5, 7, 9, 11)  # an even size is more likely a number of stacked layers

NO_MATRIX = Doubt(
    "A bias or a scale is not a matrix: put it in another group, for example by a pattern that ends"
    " in /kernel."
)
DEPTHWISE = Doubt(
    "This looks like the kernel of a depthwise convolution, which has a filter for each channel and"
    " no matrix: put it in another group, for example one with optax.adamw."
)
_BATCH = Doubt(
    "A batch axis is larger than the matrices. Set which axes are rows and columns, as in"
    " matrices={<path>: 'in heads head_dim -> in (heads head_dim)'}, or set it to 'dense' if the"
    " last two are the matrix."
)


def _as(axes: str, spec: str, kind: str = "a kernel") -> Doubt:
    """Suggests a layout for a kernel whose axes are known."""
    return Doubt(
        f"This looks like {kind}, [{', '.join(axes.split())}]. {_CHANGE % spec} for one matrix a"
        f" layer, {_DENSE}",
        spec,
    )


_TORCH = _as(
    "out in height width",
    "out in height width -> (in height width) out",
    "the kernel of a convolution in PyTorch's order",
)
_QUERY = _as("in heads head_dim", "attention_query", "an attention kernel")
_OUT = _as("heads head_dim out", "attention_out", "an attention kernel")
_ATTENTION = Doubt(
    "These look like flax's attention kernels, [in, heads, head_dim] and [heads, head_dim, out]."
    " Set matrices to 'attention' for one matrix a kernel, to 'attention_per_head' for one a head, "
    + _DENSE
)
# By the numbers of axes that the layer sums over and of its output axes.
_PRESETS = {
    (1, 2): _QUERY,
    **{
        (count, 1): _as(f"{_INPUTS[count]} out", spec, "the kernel of a convolution")
        for count, spec in ((2, "conv1d"), (3, "conv"), (4, "conv3d"))
    },
}


class ModelShapes:
    """The parameters of a model, or of one optimizer, from which axes of each are guessed."""

    # `shapes` are by path name; `whole` is whether these are all parameters of a model.

    def __init__(self, shapes: Mapping[str, Shape], whole: bool):
        # A raw nnx.State ends its paths in /value.
        self._shapes = {_plain(path): shape for path, shape in shapes.items()}
        self._whole = whole

    @cached_property
    def _stacks(self) -> dict[str, int]:
        """Returns module -> the axis along which its parameters have stacked layers, if any."""
        # A scan over layers adds an axis of one size to all parameters of a module: to kernels and
        # to scales and biases, which have fewer axes.
        below = defaultdict(list)
        for path, shape in self._shapes.items():
            for module in _modules(path):
                below[module].append((shape, path.split("/")[-1] in ("bias", "scale", "b")))
        found = {}
        for module, members in below.items():
            shapes = [shape for shape, _ in members]
            if len(set(map(len, shapes))) > 1:
                for axis in range(min(2, *map(len, shapes))):
                    # The second axes of kernels alone are often equal: the width of the model.
                    known = axis == 0 or any(is_vector for _, is_vector in members)
                    if known and len({shape[axis] for shape in shapes}) == 1:
                        found.setdefault(module, axis)
        return found

    def doubt(self, path: str) -> Doubt | None:
        """Guesses why the last two axes of a parameter are not its matrix; None if they may be."""
        path = _plain(path)
        shape = self._shapes[path]
        if path.lower().split("/")[-1] in ("bias", "scale"):
            return NO_MATRIX
        if len(shape) < 3:
            return None
        heads = self._by_heads(path)
        if (summed := self._summed(path)) is not None:
            if (doubt := self._by_bias(path, *summed)) and heads:
                return heads
            return doubt and doubt._replace(certain=doubt.spec in _CONVOLUTIONS)
        # The outermost module: it has the most parameters.
        module = next((x for x in reversed(_modules(path)) if x in self._stacks), None)
        axis = None if module is None else self._stacks[module]
        if axis == 1:
            return _by_second_axis(shape, module or "")
        shape = shape if axis is None else shape[1:]
        if heads and not (len(shape) > 3 and _is_window(shape[:-2])):
            return heads
        return self._by_shape(path, shape)

    def is_depthwise(self, path: str, summed: Shape) -> bool:
        """Returns whether a kernel is probably that of a depthwise convolution."""
        # Its axis of inputs has the size 1, but so has that of a first layer that reads gray
        # images: it is depthwise if its name says so, or if the model has several such kernels.
        # `summed` has the sizes of the axes that the layer sums over, the inputs last.
        path = _plain(path)
        if summed[-1] != 1 or set(summed) == {1}:
            return False
        axes = len(self._shapes[path])
        alike = [
            x for x in self._shapes.values() if len(x) == axes and x[-2] == 1 and max(x[:-2]) > 1
        ]
        return len(alike) > 1 or bool(re.search(r"depthwise|(^|[/_])dw", path.lower()))

    def _summed(self, path: str) -> tuple[int, int] | None:
        """Finds a kernel's first axis that its layer sums over, and the number of such axes."""
        # They are the axes that the layer's bias lacks. None if there is no bias, or if its axes
        # are not among those of the kernel.
        shape, module = self._shapes[path], _modules(path)[0]
        found = (self._shapes.get(f"{module}/{name}".lstrip("/")) for name in ("bias", "b"))
        bias = next((x for x in found if x), None)
        if bias is None or len(bias) >= len(shape):
            return None
        count = len(shape) - len(bias)
        starts = [i for i in range(len(bias) + 1) if bias == shape[:i] + shape[i + count :]]
        # If sizes coincide, several fit: usually, only the last axis follows the summed ones.
        return (min(starts, key=lambda i: abs(i - len(bias) + 1)), count) if starts else None

    def _by_bias(self, path: str, start: int, count: int) -> Doubt | None:
        shape = self._shapes[path]
        made = len(shape) - start - count
        summed = shape[start : start + count]
        if made == 1 and (count == 1 or set(summed[:-1]) == {1}):
            return None  # the last two axes
        if made == 1 and self.is_depthwise(path, summed):
            return DEPTHWISE
        rows = _INPUTS.get(count, " ".join(f"in{i}" for i in range(count)))
        columns = _OUTPUTS.get(made, " ".join(f"out{i}" for i in range(made)))
        if made:
            preset = _PRESETS.get((count, made))
            return preset or _as(f"{rows} {columns}", _spec(f"{rows} {columns}", rows, columns))
        # The outputs come first, as in PyTorch.
        *window, inputs = rows.split()
        axes = " ".join(["out", inputs, *window])
        return _as(axes, _spec(axes, " ".join([inputs, *window]), "out"))

    def _by_heads(self, path: str) -> Doubt | None:
        """Finds kernels of attention, [in, heads, head_dim] and [heads, head_dim, out]."""
        # Each is known by the other in its module. Both may have axes of stacked layers first.
        shape = self._shapes[path]
        into, out = self._heads[(*_modules(path), "")[1]]
        for of, key in ((_QUERY, shape[:-3] + shape[-2:]), (_OUT, shape[:-1])):
            if key in into and key in out and into[key] & out[key]:
                named = re.search(r"(^|/)(query|key|value|out)/kernel$", path)
                return _ATTENTION._replace(spec=of.spec) if named else of
        return None

    @cached_property
    def _heads(self) -> Mapping[str, tuple[Mapping[Shape, set[int]], Mapping[Shape, set[int]]]]:
        """Reads kernels as [in, heads, head_dim] and as [heads, head_dim, out], by module."""
        # Both dicts of a module are from the axes of layers and heads, (*layers, heads, head_dim),
        # to the sizes of the remaining axis: the inputs of queries, and the outputs.
        found: Any = defaultdict(lambda: (defaultdict(set), defaultdict(set)))
        for path, shape in self._shapes.items():
            # A kernel [n, n, n] could be either.
            if len(shape) > 2 and len(set(shape[-3:])) > 1:
                into, out = found[(*_modules(path), "")[1]]
                into[shape[:-3] + shape[-2:]].add(shape[-3])
                out[shape[:-1]].add(shape[-1])
        return found

    def _by_shape(self, path: str, shape: Shape) -> Doubt | None:
        """Guesses from name and shape alone; `shape` is without axes of stacked layers."""
        keys = path.lower().split("/")
        window = shape[:-2]
        if not window or set(window) == {1}:
            return None
        named = any("conv" in key or "patch" in key for key in keys)
        # A fused kernel, [3, in, out], is known by its name; stacked layers by the whole model.
        fused = any("qkv" in key for key in keys) or (len(window) == 1 and not self._whole)
        is_window = named or (_is_window(window) and not fused)
        if is_window and self.is_depthwise(path, shape[:-1]):
            return DEPTHWISE
        # flax's kernels and haiku's have the window first.
        if len(shape) == 4 and keys[-1] not in ("kernel", "w") and _is_window(shape[2:]):
            if min(shape[:2]) >= shape[2] or keys[-1] == "weight":
                return _TORCH
        if is_window:
            return _PRESETS[min(len(window) + 1, 4), 1]
        return _BATCH if max(window) > min(shape[-2:]) else None


def _by_second_axis(shape: Shape, module: str) -> Doubt:
    below = f" below {module!r}" if module else ""
    text = (
        f"The second axis of all parameters{below} has the size {shape[1]}, so these are probably"
        f" {shape[1]} layers that are stacked on it."
    )
    if len(shape) == 3:
        spec = "in layers out -> layers in out"
        return Doubt(f"{text} {_CHANGE % spec} {_DENSE}", spec)
    spec = "in layers heads head_dim -> layers in (heads head_dim)"
    return Doubt(f"{text} {_CHANGE % spec} with the names of its axes, {_DENSE}")


def _plain(path: str) -> str:
    return re.sub(r"/value$", "", path)


def _modules(path: str) -> list[str]:
    """Returns the modules of a parameter, the innermost first; the last is "", the model."""
    keys = path.split("/")[:-1]
    return ["/".join(keys[:end]) for end in range(len(keys), -1, -1)]


def _is_window(axes: Shape) -> bool:
    """Returns whether axes have the sizes of a usual window: 3, 1x7, 4x4, 16x16, 3x3x3."""
    if len(axes) == 1:
        return axes[0] in _WINDOWS_1D
    low, high = sorted(axes[-2:])
    return low in (1, high) and 1 < high <= _LARGEST_WINDOW


def _spec(axes: str, rows: str, columns: str) -> str:
    items = [f"({names})" if " " in names else names for names in (rows, columns)]
    return f"{axes} -> {' '.join(items)}"
