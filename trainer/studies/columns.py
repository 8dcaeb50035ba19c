"""Columns of the tables of studies."""

from trainer.report.document import Column, Kind


def columns(**kinds: Kind) -> tuple[Column, ...]:
    """Returns columns of these names, which are also what readers see."""
    return tuple(Column(name, name, kind) for name, kind in kinds.items())
