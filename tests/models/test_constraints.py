"""Without a mesh, nothing is constrained; what holds with one is in tests/tensor_cases.py."""

import jax.numpy as jnp

from tests import short
from tests.runs import ROOT
from trainer.config import load
from trainer.constraints import ROLES, constrain, parts
from trainer.engine.program import load_located


def test_without_a_mesh_a_constraint_returns_its_argument_itself():
    x = jnp.ones((4, 2))
    for role in (None, *ROLES):
        assert constrain(x, "batch", role) is x
    assert {parts(role) for role in ROLES} == {1}


@short.parametrize("config", ["muon_vit", "muon_gpt", "gpt2_124m"])
def test_the_step_of_a_shipped_config_on_one_device_has_no_constraint(config):
    program = load_located(load([ROOT / "configs" / f"{config}.gin"]), declared=True)
    text = program.trace(program.abstract_state()).lower().as_text()
    assert "dot_general" in text
    # The arguments name theirs, a single device.
    assert "sharding_constraint" not in text and "@Sharding" not in text
