"""What studies have in common: comparisons of configs, and columns of tables."""

from collections.abc import Mapping, Sequence

from trainer.config import Config
from trainer.config.full import complete
from trainer.report.document import Column, Kind
from trainer.sweep.alike import arguments, differing_arguments


def differing(
    configs: Mapping[str, Config], vocabulary: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Returns the arguments in which configs differ, as `differing_arguments` does."""
    roots = {name: complete(config, vocabulary)[0] for name, config in configs.items()}
    return differing_arguments({name: dict(arguments(x, "")) for name, x in roots.items()})


def columns(**kinds: Kind) -> tuple[Column, ...]:
    """Returns columns of these names, which are also what readers see."""
    return tuple(Column(name, name, kind) for name, kind in kinds.items())
