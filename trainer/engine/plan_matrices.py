"""Lists the matrices that optimizers such as Muon work on, for the plan."""

from collections import Counter
from typing import Any, NamedTuple

import optim
from optim.declarations import Declaration, declarations
from optim.layouts import Layout
from optim.paths import flatten

_UNNAMED = " *"


class Matrices(NamedTuple):
    """The matrices that the optimizers of a run work on; empty if they work element by element.

    Attributes:
        cells: path of a parameter -> "12 of 64x64", rows (inputs) by columns (outputs); with a star
            if it has more than two axes and the config does not name them.
        lines: one sentence per optimizer, "In group 'hidden', optim.muon works on ...".
        warnings: sentences about parameters whose matrices are not those of their layers.
    """

    cells: dict[str, str]
    lines: list[str]
    warnings: list[str]


def find_matrices(optimizer: optim.Optimizer, params: Any) -> Matrices:
    """Finds the matrices that each group's optimizer works on.

    Args:
        optimizer: the experiment's optimizer.
        params: the parameters, or their shapes and dtypes; nothing is computed with them.
    """
    labels = flatten(optimizer.label(params))
    found = [one for one in declarations(optimizer.init, params) if one.layouts]
    cells, lines, warnings = {}, [], []
    for one in found:
        # Wrappers such as optax's split_real_and_imaginary add to the paths.
        inner = f"{next(iter(one.layouts))}/"
        group = next((labels[path] for path in labels if inner.startswith(f"{path}/")), "?")
        for path, layout in one.layouts.items():
            unnamed = len(layout.shape) > 2 and path not in one.named
            cells[path] = _sizes([layout]) + (_UNNAMED if unnamed else "")
        lines.append(
            f"In group {group!r}, {one.optimizer} works on {_description(one)} (inputs by outputs)."
        )
        warnings += [f"In group {group!r}, {doubt}" for doubt in one.doubts]
    if any(cell.endswith(_UNNAMED) for cell in cells.values()):
        lines.append(
            "* Not named by `matrices`: the last two axes are the matrix, and all axes before them"
            " are batch axes."
        )
    return Matrices(cells, list(dict.fromkeys(lines)), list(dict.fromkeys(warnings)))


def _description(one: Declaration) -> str:
    text = _sizes(list(one.layouts.values()))
    count, _, rest = text.partition(" ")
    return f"{count} {'matrix' if count == '1' else 'matrices'} {rest}"


def _sizes(layouts: list[Layout]) -> str:
    """Counts matrices by their size: "16 of 64x64, 4 of 64x256"."""
    sizes: Counter[tuple[int, int]] = Counter()
    for layout in layouts:
        count, rows, columns = layout.matrices
        sizes[rows, columns] += count
    return ", ".join(f"{count:,} of {rows}x{columns}" for (rows, columns), count in sizes.items())
