"""Has GPUs compute the same bits twice.

XLA may add up numbers on a GPU in the order in which its threads arrive, and chooses between
kernels by timing them, in every process anew. Two runs of configs/muon_gpt.gin on an H200 differed
after 3 steps. Its flag `xla_gpu_deterministic_ops` forbids both; docs/resume.md says what it costs.
"""

import os
from importlib.metadata import entry_points
from typing import Any

FLAG = "--xla_gpu_deterministic_ops"
_SETTINGS = "XLA_FLAGS"  # read when jax looks for devices


def use_deterministic_operations() -> None:
    """Adds the flag to XLA_FLAGS, unless that names it or jax has no plugin for a GPU."""
    # A user who needs speed more than bits gives XLA_FLAGS=--xla_gpu_deterministic_ops=false.
    if any("cuda" in name or "rocm" in name for name in entry_points(group="jax_plugins").names):
        add_flag(FLAG, "true")


def add_flag(flag: str, value: str) -> None:
    """Adds a flag to XLA_FLAGS, unless the user has named it there."""
    # Call this before jax looks for devices: later it has no effect.
    given = os.environ.get(_SETTINGS, "")
    if flag not in given:
        os.environ[_SETTINGS] = f"{given} {flag}={value}".lstrip()


def unrepeatable(mesh: Any) -> list[str]:
    """Returns a sentence if the devices of a mesh may compute other bits the next time."""
    given = os.environ.get(_SETTINGS, "").split()
    if mesh.devices.flat[0].platform != "gpu" or {FLAG, f"{FLAG}=true"} & {*given}:
        return []
    return [
        "The bits of this run cannot be repeated, not by a resume either: XLA may add up numbers "
        f"on a GPU in another order each time. {_SETTINGS}={FLAG}=true, set before jax looks for "
        "devices, forbids it."
    ]
