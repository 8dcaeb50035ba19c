"""The flag with which a GPU computes the same bits twice; what it does was seen on an H200.

docs/resume.md has what `verify` found there with the flag and without it.
"""

import os
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer.__main__ import main
from trainer.engine import repeatable

FLAG = "--xla_gpu_deterministic_ops=true"


def have(monkeypatch: pytest.MonkeyPatch, *plugins: str, flags: str | None = None) -> None:
    """Has jax have plugins of these names, and XLA_FLAGS be `flags`."""
    found = EntryPoints(EntryPoint(name, f"jax_plugins.{name}", "jax_plugins") for name in plugins)
    monkeypatch.setattr(repeatable, "entry_points", lambda group: found.select(group=group))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)


@pytest.mark.parametrize(
    ("plugins", "flags", "wanted"),
    [
        (["xla_cuda13"], None, FLAG),
        (["xla_rocm7"], "--xla_dump_to=x", f"--xla_dump_to=x {FLAG}"),
        (["xla_cuda12"], "--xla_gpu_deterministic_ops=false", "--xla_gpu_deterministic_ops=false"),
        ([], None, None),  # the flag is in the fingerprint of a run, where it would mean nothing
        (["tpu"], "--xla_dump_to=x", "--xla_dump_to=x"),
    ],
)
def test_commands_set_the_flag_where_jax_has_a_gpu_and_the_user_did_not(
    monkeypatch, capsys, plugins, flags, wanted
):
    have(monkeypatch, *plugins, flags=flags)
    assert main(["explain", "--config=none.gin"]) == 2
    assert os.environ.get("XLA_FLAGS") == wanted


@pytest.mark.parametrize(
    ("platform", "flags", "said"),
    [
        ("gpu", None, True),
        ("gpu", "--xla_gpu_deterministic_ops=false", True),
        ("gpu", FLAG, False),
        ("gpu", "--xla_gpu_deterministic_ops", False),  # XLA takes it for true
        ("cpu", None, False),
    ],
)
def test_a_plan_says_where_bits_cannot_be_repeated(monkeypatch, platform, flags, said):
    have(monkeypatch, flags=flags)
    mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)], object))
    found = repeatable.unrepeatable(mesh)
    assert [FLAG in text for text in found] == ([True] if said else [])
