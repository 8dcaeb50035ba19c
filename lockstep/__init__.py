"""Lockstep as a Python library: configs that can be edited, and programs that are compiled.

    import lockstep as ls

    config = ls.load_config("configs/muon_vit.gin", set={"steps": 200})
    run = ls.train(config, workdir="runs/a")
    run.metrics()                                   # a pandas DataFrame

These names are the public Python interface; everything else may change between versions. What
takes long to import, such as jax, is imported when a function first needs it.
"""

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optim
    from lockstep.configs import Config, call, load_config, make_config
    from lockstep.plans import Placement, Plan, explain
    from lockstep.processes import RunFailed, Stopped
    from lockstep.programs import Program, compile
    from lockstep.results import Comparison, Plot, Report, compare, plot, report
    from lockstep.runs import Run, load_run, train
    from lockstep.sweeps import Sweep, load_sweep, sweep
    from trainer.messages import UserError

__all__ = [
    "Comparison",
    "Config",
    "Placement",
    "Plan",
    "Plot",
    "Program",
    "Report",
    "Run",
    "RunFailed",
    "Stopped",
    "Sweep",
    "UserError",
    "call",
    "compare",
    "compile",
    "explain",
    "load_config",
    "load_run",
    "load_sweep",
    "make_config",
    "optim",
    "plot",
    "report",
    "sweep",
    "train",
]

# The names of each module. No module may have the name of a function here: importing it would
# replace the function.
_NAMES = {
    "lockstep.configs": {"Config", "call", "load_config", "make_config"},
    "lockstep.plans": {"Placement", "Plan", "explain"},
    "lockstep.processes": {"RunFailed", "Stopped"},
    "lockstep.programs": {"Program", "compile"},
    "lockstep.results": {"Comparison", "Plot", "Report", "compare", "plot", "report"},
    "lockstep.runs": {"Run", "load_run", "train"},
    "lockstep.sweeps": {"Sweep", "load_sweep", "sweep"},
    "trainer.messages": {"UserError"},
}


def _check_packages() -> None:
    """Raises ImportError if Python has imported, or would find, another `trainer` or `optim`."""
    home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for name in ("trainer", "optim"):
        loaded = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if loaded is None else None
        if os.path.join(home, name) in (places := _places(loaded or spec)):
            continue
        where = f"is {places[0]!r}{_owner(name)}" if places else "does not exist"
        raise ImportError(
            f"Lockstep needs its own package {name!r}, which stands beside it in {home!r}, but the"
            f" one that Python {'has imported' if loaded else 'finds first'} {where}. Rename that"
            " file or folder, or remove it from the path on which Python finds it; in a notebook,"
            " restart the kernel then."
        )


def _places(found: ModuleType | ModuleSpec | None) -> list[str]:
    """Returns the folders of a package, or the file of a module."""
    folders = getattr(found, "__path__", None) or getattr(found, "submodule_search_locations", None)
    files = [getattr(found, name, None) for name in ("__file__", "origin")]
    return [os.path.realpath(each) for each in folders or files if each]


def _owner(name: str) -> str:
    """Returns which installed distributions, other than Lockstep, own a package."""
    from importlib.metadata import packages_distributions

    owners = {each for each in packages_distributions().get(name, ()) if "lockstep" not in each}
    return f", of the installed package {' and '.join(sorted(owners))}" if owners else ""


_check_packages()


def __getattr__(name: str) -> Any:
    if name == "optim":
        return importlib.import_module("optim")
    if name == "__version__":
        import trainer

        return trainer.__version__
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
