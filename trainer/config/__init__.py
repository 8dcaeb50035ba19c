"""Reads configs in Gin or YAML into a tree of calls, and builds objects from the tree.

    config = load(["configs/muon_vit.gin"], sets=["steps=100"])
    print(dump(config.root))                        # canonical YAML
    experiment = Builder(config).build(units=Units(100, 128, 1797))

Reading a config executes nothing. The readers and the builder are imported when first used. Begin
with tree.py, then `load` in files.py and `Builder` in build.py.
"""
# ruff: noqa: F401  # what other packages import from here; users import lockstep

import importlib
from typing import TYPE_CHECKING, Any

from trainer.config.edit import override, replace
from trainer.config.files import load
from trainer.config.tree import Call, Config, ConfigError, Source, Tree, hparams, join, leaves

if TYPE_CHECKING:
    from trainer.config.build import Builder, Floats
    from trainer.config.full import full_text
    from trainer.config.units import Units
    from trainer.config.yaml_writer import computed, diff, digest, dump, file_text

# Names that reading a config does not need: __getattr__ imports their modules when first used.
_LATER = {
    "build": ["Builder", "Floats"],
    "full": ["full_text"],
    "units": ["Units"],
    "yaml_writer": ["computed", "diff", "digest", "dump", "file_text"],
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
