"""Every optimizer against a program that others wrote: how far they part in 50 steps.

`python -m tests.references` prints the tables of docs/references.md, in about two minutes; the rows
against torch need `make torch`. It ends with exit code 1 where a difference passes its bound.
"""

import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib

import optim
from tests import torch_cases
from tests.laws_harness import NEIGHBOUR, TOLERANCE, Reference, compile_run, to_host
from tests.laws_table import ROWS as LAWS_ROWS
from tests.laws_table import Row as LawsRow
from tests.laws_table import public_name, tree_of
from tests.programs import (
    cautious_lion_by_the_paper,
    cautious_mask,
    grams_mask,
    keller_jordan,
    mars_by_the_paper,
    masked_adamw_by_the_paper,
    relative_difference,
    scion_by_the_paper,
    shampoo_by_the_paper,
    soap_by_the_paper,
    spectral_conv,
    to_flax,
    train,
)

STEPS = torch_cases.STEPS
BOUND = 1e-6  # what the tests against torch and the authors' programs assert
OPTAX_BOUND = TOLERANCE["float64"]  # and those of the laws, but for rows with a tolerance


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        optimizer: the call of our optimizer.
        reference: the program that it is compared with.
        measure: runs both; gives the largest difference over all steps, relative to the largest
            parameter of the array.
        bound: what the difference stays below; None where the definitions differ.
        remarks: what differs by definition, or why the arguments are these.
        dtype: the dtype of both.
        torch: whether the reference is torch.
    """

    optimizer: str
    reference: str
    measure: Callable[[], float]
    bound: float | None = BOUND
    remarks: str = ""
    dtype: str = "float64"
    torch: bool = False

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """All that is printed but the difference."""
        return self.optimizer, self.reference, self.dtype, self.remarks


def call(recipe: Any) -> str:
    """Writes a recipe as the call that it is: optax.sgd(0.1, momentum=0.9)."""
    if not isinstance(recipe, partial):
        name = getattr(recipe, "__name__", "")
        return name.lstrip("_") if name else repr(recipe)
    arguments = [call(x) for x in recipe.args]
    arguments += [f"{name}={call(x)}" for name, x in recipe.keywords.items()]
    return f"{public_name(recipe.func)}({', '.join(arguments)})"


# ---- The authors' programs, restated in programs.py

SOAP = "SOAP's authors (arXiv:2409.11321)"
SHAMPOO = "Meta's Distributed Shampoo (arXiv:2309.06497)"
MARS = "MARS-AdamW's authors (arXiv:2411.10438)"
SCION = "Scion's authors (arXiv:2502.07529)"
C_ADAMW = "C-AdamW's authors (arXiv:2411.16085)"
C_LION = "C-Lion's authors (arXiv:2411.16085)"
GRAMS = "Grams' authors (arXiv:2412.17107)"
JORDAN = "Keller Jordan's Muon (github.com/KellerJordan/Muon)"
OPTAX_MUON = "optax.contrib.muon"


def _authors(
    recipe: partial,
    reference: str,
    program: Callable[[Any, Any], Any],
    shape: tuple[int, ...] = (4, 7),
    remarks: str = "",
    layout: Callable[[Any], Any] = np.asarray,
    scale: float = 1.0,
) -> Row:
    """Makes a row of a program that takes the first parameters and the gradients.

    Args:
        recipe: our optimizer.
        reference: whose program it is.
        program: gives the parameters after every step, in its own layout.
        shape: the shape of the parameter, in the layout of the program.
        remarks: as in `Row`.
        layout: turns a parameter from the program's layout into ours.
        scale: the size of the gradients.
    """

    def measure() -> float:
        rng = np.random.default_rng(0)
        start = rng.standard_normal(shape)
        grads = scale * (rng.standard_normal((STEPS, *shape)) + 0.5)
        theirs = np.stack([layout(x) for x in program(start, grads)])
        tx = optim.optimizer({"all": optim.group(".*", recipe)}).tx
        ours = train(tx, {"w": layout(start)}, [{"w": layout(g)} for g in grads])
        assert ours["w"].dtype == np.float64
        assert np.abs(theirs[-1] - theirs[0]).max() > 1e-2  # they went somewhere
        return relative_difference(ours, {"w": theirs})

    return Row(call(recipe), reference, measure, remarks=remarks)


def _sum(program: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Adds the updates of a program up to parameters."""
    return lambda start, grads: start + np.cumsum(program(grads), axis=0)


def _scion(norm: str, constrained: bool) -> Row:
    recipe = partial(optim.scion, 0.02, 3.0, 0.1, norm, constrained, eps=1e-14)
    program = partial(
        scion_by_the_paper, rate=0.02, radius=3.0, alpha=0.1, norm=norm, constrained=constrained
    )
    return _authors(recipe, SCION, program, (5,) if norm == "bias_rms" else (4, 7))


def _optax_muon(remarks: str, theirs: dict[str, Any], **ours: Any) -> Row:
    def program(start: Any, grads: Any) -> Any:
        return train(optax.contrib.muon(0.02, beta=0.9, weight_decay=0.1, **theirs), start, grads)

    recipe = partial(optim.muon, 0.02, 0.9, weight_decay=0.1, **ours)
    return _authors(recipe, OPTAX_MUON, program, remarks=remarks)


BF16 = "the authors orthogonalize in bfloat16 and add 1e-7 to the norm; here in float64"
ADAMW = partial(optax.adamw, learning_rate=0.03, b1=0.9, b2=0.95, weight_decay=0.1)
MASKED = {"rate": 0.03, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "decay": 0.1}

AUTHORS = [
    _authors(partial(optim.muon, 0.02), JORDAN, _sum(keller_jordan), (9, 4), BF16, to_flax),
    _authors(
        partial(optim.muon, 0.02, matrices="conv"),
        JORDAN,
        _sum(keller_jordan),
        (4, 8, 3, 3),
        BF16 + "; no more outputs than inputs, where both factors are 1",
        to_flax,
    ),
    _optax_muon(
        "without Nesterov: with it optax corrects the bias of momentum and gradient",
        {"nesterov": False, "eps": 1e-15},
        nesterov=False,
    ),
    _optax_muon(
        "the same",
        {"nesterov": False, "eps": 1e-15, "consistent_rms": 0.2},
        nesterov=False,
        scale="match_rms_adamw",
    ),
    *[
        _authors(
            partial(optim.soap, 0.03, 0.9, 0.95, beta, weight_decay=0.1, precondition_frequency=k),
            SOAP,
            partial(
                soap_by_the_paper,
                rate=0.03,
                b1=0.9,
                b2=0.95,
                beta=beta or 0.95,
                eps=1e-8,
                decay=0.1,
                every=k,
            ),
            (6, 6),
            "square matrices; on others the program leaves the first bases to rounding",
        )
        for k, beta in [(1, None), (3, 0.7)]
    ],
    *[
        _authors(
            partial(
                optim.shampoo,
                0.03,
                0.9,
                b2,
                1e-6,
                0.1,
                precondition_frequency=k,
                start_preconditioning=begin,
            ),
            SHAMPOO,
            partial(
                shampoo_by_the_paper,
                rate=0.03,
                b1=0.9,
                b2=b2,
                eps=1e-6,
                decay=0.1,
                every=k,
                begin=begin,
            ),
            remarks=remarks,
        )
        for k, begin, b2, remarks in [
            (1, 1, 0.97, "with Adam's grafting, matrices whole"),
            (4, 2, 0.97, "the same"),
            (2, 2, 1.0, "the same; b2=1 sums, as Meta's default does"),
        ]
    ],
    *[
        _authors(
            partial(optim.mars, 0.03, 0.9, 0.95, 0.05, 1e-6, 0.1),
            MARS,
            partial(mars_by_the_paper, rate=0.03, b1=0.9, b2=0.95, gamma=0.05, eps=1e-6, decay=0.1),
            remarks=f"the approximate variant; gradients {remarks}",
            scale=scale,
        )
        for scale, remarks in [(1.0, "longer than 1, scaled down"), (0.02, "mostly shorter than 1")]
    ],
    *[
        _scion(norm, constrained)
        for norm in ("spectral", "sign", "col_norm", "row_norm", "bias_rms")
        for constrained in (True, False)
    ],
    _authors(
        partial(optim.scion, 0.02, 3.0, norm="spectral_conv", constrained=False),
        SCION,
        _sum(spectral_conv),
        (8, 4, 3, 3),
        BF16,
        to_flax,
    ),
    _authors(
        partial(optim.cautious, ADAMW),
        C_ADAMW,
        partial(masked_adamw_by_the_paper, **MASKED, mask=cautious_mask),
    ),
    _authors(
        partial(optim.cautious, partial(optax.lion, 0.01, 0.9, 0.95, weight_decay=0.0)),
        C_LION,
        partial(cautious_lion_by_the_paper, rate=0.01, b1=0.9, b2=0.95),
    ),
    _authors(
        partial(optim.grams, ADAMW),
        GRAMS,
        partial(masked_adamw_by_the_paper, **MASKED, mask=grams_mask),
    ),
]


# ---- torch.optim, with the cases of torch_cases.py


def _torch(name: str, case: torch_cases.Case, bound: float | None) -> Row:
    dtype = "bfloat16 inside" if case.bfloat16 else "float64"
    reference = f"torch.optim.{name}"
    measure = partial(torch_cases.difference, case)
    return Row(call(case.ours), reference, measure, bound, case.why, dtype, torch=True)


TORCH = [_torch(name, case, BOUND) for name, case in torch_cases.SAME.items()]
DIFFERENT = [_torch(name, case, None) for name, case in torch_cases.DIFFERENT.items()]


# ---- optax alone: the rows of the laws' table that are optax's


def against_optax(row: LawsRow) -> float:
    """Trains a row as one group of three for 50 steps, with its bare factory beside it.

    As in the tests of the laws, the bare optimizer keeps its own state for all steps and computes
    each step from our last parameters: the loss would otherwise amplify what rounding differs.

    Returns:
        The largest difference of the group's parameters, relative to the largest parameter.
    """
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="optax")
        start = tree_of(row, "float64")
        optimizer = optim.optimizer(
            {
                "own": optim.group("own/.*", row.recipe),
                "frozen": optim.group("frozen/.*", partial(optim.frozen)),
                "other": optim.group(".*", NEIGHBOUR),
            }
        )
        run = compile_run(optimizer, row)
        params = to_host(start)
        reference = Reference(row, params)
        carry = jax.device_put((start, optimizer.init(start)), jax.devices()[0])
        ours, theirs = [], []
        for _ in range(STEPS):
            bare = reference.step(params, 0)  # at step 0 its schedules have not moved
            carry = run(carry, np.int32(1))
            params = to_host(carry[0])
            ours.append(params["own"])
            theirs.append(to_host(bare["own"]))
        over_steps = partial(jax.tree.map, lambda *steps: np.stack(steps))
        return relative_difference(over_steps(*ours), over_steps(*theirs))


# Rounding that float64 does not take away: a bound for 50 steps, and the reason.
FLOAT32 = "optax computes a function of the step number in float32"
ROUNDED = {
    "optax.adafactor (factored)": (1e-7, FLOAT32),
    "optax.adafactor": (1e-7, FLOAT32),
    "optax.contrib.madgrad": (1e-7, FLOAT32),
    "optax.adam (bfloat16 momentum)": (2e-3, "the momentum is rounded to bfloat16"),
}


def _optax(row: LawsRow) -> Row:
    bound, why = ROUNDED.get(row.name, (OPTAX_BOUND, ""))
    return Row(row.name, "optax alone", partial(against_optax, row), bound, why)


OPTAX = [_optax(row) for row in LAWS_ROWS if row.name.startswith("optax.")]


# ---- The page

HEADINGS = {
    "The authors' programs, and Muon of optax": AUTHORS,
    "torch.optim": TORCH,
    "Other definitions in torch.optim": DIFFERENT,
    "optax alone": OPTAX,
}
ALL = [row for rows in HEADINGS.values() for row in rows]
BEGIN, END = "<!-- references: begin -->", "<!-- references: end -->"


def markdown(faults: list[str]) -> Iterator[str]:
    """Measures all rows; gives the lines of the page's tables.

    Args:
        faults: a sentence is added for each difference that passes its bound.
    """
    versions = {"jax": jax.__version__, "optax": optax.__version__, "NumPy": np.__version__}
    if torch_cases.torch is not None:
        versions["torch"] = torch_cases.torch.__version__
    yield BEGIN
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"Measured on a CPU ({platform.machine()}) with {listed}."
    for heading, rows in HEADINGS.items():
        rows = [row for row in rows if torch_cases.torch is not None or not row.torch]
        if not rows:
            continue
        yield f"\n## {heading}\n"
        yield "| optimizer | reference | dtype | largest difference | remarks |"
        yield "| --- | --- | --- | --- | --- |"
        for row in rows:
            difference = row.measure()
            number = f"{difference:.0e}" if difference else "0"
            optimizer, reference, dtype, remarks = row.cells
            yield f"| `{optimizer}` | {reference} | {dtype} | {number} | {remarks} |"
            if row.bound is not None and not difference < row.bound:
                faults.append(f"{optimizer} against {reference}: {difference} >= {row.bound}")
    yield END


def main() -> int:
    """Prints the tables; returns 1 where a difference passes its bound."""
    faults: list[str] = []
    for line in markdown(faults):
        print(line, flush=True)
    if torch_cases.torch is None:
        print("Without torch its rows are left out: `make torch` adds it.", file=sys.stderr)
    for fault in faults:
        print(fault, file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
