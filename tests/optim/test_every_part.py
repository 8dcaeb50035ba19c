"""What holds for every part of `optim.parts`, also for one that is added."""

import inspect
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from optim import parts
from optim.factories import instantiate, recipes_within
from optim.parts.base import Part
from tests import laws_table
from trainer.cli.optimizer_facts import find_optimizer

COMPILED = Path(__file__).parents[1] / "compiled_targets.json"
WEIGHTS, GRADIENT = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)


def part_of(name: str) -> Part:
    """Returns a part with the arguments that it has in its example."""
    recipe = find_optimizer(f"parts.{name}")[0].recipe
    assert isinstance(recipe, partial)
    inner = next(x for x in recipes_within(recipe) if x.func is getattr(parts, name))
    part: Any = instantiate(inner, 0, jnp.float32)
    assert isinstance(part, Part)
    return part


@pytest.mark.parametrize("name", parts.__all__)
def test_a_part_has_the_name_by_which_a_config_calls_it(name: str):
    assert part_of(name).name == f"parts.{name}"


@pytest.mark.long
def test_parts_that_ignore_or_replace_lengths_return_the_same_for_longer_directions():
    # The factors of this one begin at the identity, and forget that in some hundred updates.
    for name in sorted({*parts.__all__} - {"kl_shampoo"}):
        part = part_of(name)
        if part.length not in ("ignores", "replaces"):
            continue
        params, lengths = {"kernel": jnp.asarray(WEIGHTS)}, []
        for factor in (1.0, 100.0):
            state: Any = part.init(params)
            updates: Any = {}
            for _ in range(3):  # the first update of some is 0
                given = {"kernel": jnp.asarray(factor * GRADIENT)}
                updates, state = part.update(given, state, params, grad=given, learning_rate=0.1)
            lengths.append(float(jnp.linalg.norm(updates["kernel"])))
        assert lengths[0] > 0 and lengths[1] == pytest.approx(lengths[0], rel=1e-2), name


def test_every_part_is_in_a_row_of_the_table_of_the_laws():
    rows = {inner.func for row in laws_table.ROWS for inner in recipes_within(row.recipe)}
    missing = [name for name in parts.__all__ if getattr(parts, name) not in rows]
    assert not missing, "Add a row to ROWS in tests/laws_table.py."


def test_every_part_was_compiled_for_a_gpu_and_a_tpu():
    compiled = {line.split()[0] for line in json.loads(COMPILED.read_text())}
    missing = [name for name in parts.__all__ if f"parts.{name}" not in compiled]
    assert not missing, "Run `python -m tests.compile_targets`, which takes some minutes for each."


def test_every_public_function_of_the_modules_of_parts_is_offered():
    defined = {
        name
        for module in {sys.modules[getattr(parts, each).__module__] for each in parts.__all__}
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
        if "GradientTransformation" in str(inspect.signature(value).return_annotation)
        if not name.startswith("_")
    }
    assert defined == set(parts.__all__), "Name it in optim/parts/__init__.py."
