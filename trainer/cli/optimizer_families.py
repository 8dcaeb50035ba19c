"""Which optimizers there are: the tables optim/families.yaml, by family, and optim/published.yaml.

Their heads say what each field is. The first has examples and search spaces, the second the names
under which optimizers were published.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import Call, Config, Source
from trainer.config.nodes import plain
from trainer.config.yaml_reader import read


class Published(NamedTuple):
    """An entry of the table, whose head says what each field is."""

    name: str
    paper: str
    summary: str = ""
    optimizer: Call = Call("")
    compared: str = ""
    remark: str = ""
    rate_path: str = "learning_rate"
    missing: str = ""  # why Lockstep does not have it; "" if it has

    @property
    def rate(self) -> float:
        """The learning rate that it has in the table."""
        return Config(self.optimizer, {}).at(self.rate_path)


@cache
def published_entries() -> Sequence[Published]:
    """Returns the entries."""
    return [Published(name, **entry) for name, entry in read_table("published.yaml").items()]


def read_table(name: str) -> Any:
    """Returns the value of a file of optim in YAML, without importing optim, and with it jax."""
    spec = find_spec("optim")
    assert spec is not None and spec.origin is not None
    return parsed(Path(spec.origin).with_name(name).read_text(encoding="utf-8"))


def parsed(text: str) -> Any:
    """Returns the value of a text of ours in YAML."""
    node = read(text, Source("optimizers"))
    assert node is not None
    return plain(node)


def published(name: str) -> Published | None:
    """Returns the entry of a name, in any case and punctuation; None if there is none.

    Example:
        >>> published("soap_h").name
        'SOAP-H'
    """
    return next(
        (entry for entry in published_entries() if _letters(entry.name) == _letters(name)), None
    )


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


@dataclass(frozen=True)
class SearchSpace:
    """The values among which an optimizer was searched."""

    # argument of the optimizer -> its space in YAML. The argument of an optimizer inside is a
    # path, such as "base_optimizer.learning_rate"; "" is the whole optimizer. For a part, these
    # are arguments of the chain in its example.
    axes: Mapping[str, str]
    source: str  # the repository and the file that have it; "" if it is ours
    remark: str = ""  # a sentence without a full stop about what it is; "" for none
    around: float | None = None  # the point around which a space of ours lies; None for another


def decade(point: float, of: str, axis: str = "learning_rate") -> SearchSpace:
    """Returns our space where none is published: half a decade on either side of a point.

    Example:
        >>> decade(0.02, "as for Muon").axes
        {'learning_rate': '!space.log_uniform {low: 0.006, high: 0.06}'}
    """
    low, high = (float(f"{point * factor:.1g}") for factor in (10**-0.5, 10**0.5))
    axes = {axis: _axis(f"{low!r} to {high!r}")}
    return SearchSpace(axes, "", f"a decade around {point:g}, {of}", point)


def _axis(values: str | Sequence[Any]) -> str:
    """Returns the space in YAML of "LOW to HIGH", or of a list of numbers and calls."""
    if isinstance(values, str):
        low, high = map(float, values.split(" to "))
        return f"!space.log_uniform {{low: {low!r}, high: {high!r}}}"
    return f"!space.values {{values: [{', '.join(map(str, values))}]}}"


def _published(source: str, axes: Mapping[str, Any], remark: str = "") -> SearchSpace:
    kind, _, rest = source.partition(" ")
    source = _TABLE["sources"].get(kind, source).format(rest)
    return SearchSpace({path: _axis(values) for path, values in axes.items()}, source, remark)


_TABLE = read_table("families.yaml")
_ENTRIES: Mapping[str, Mapping[str, Any]] = {
    name: entry
    for members in (*_TABLE["families"].values(), _TABLE["parts"])
    for name, entry in members.items()
}

# What a config can name as the optimizer of a group, or of all parameters.
FAMILIES: Mapping[str, Sequence[str]] = {
    family: [*members] for family, members in _TABLE["families"].items()
}
# What is no optimizer by itself; its figures are on the page of a name only.
PIECES: Mapping[str, Sequence[str]] = _TABLE["pieces"]
EXAMPLES: Mapping[str, Call] = {
    name: entry["example"] for name, entry in _ENTRIES.items() if "example" in entry
}
# The parts that stand after the learning rate; the others stand before it.
AFTER = [name for name, entry in _ENTRIES.items() if "after" in entry]
PUBLISHED_SPACES: Mapping[str, Sequence[SearchSpace]] = {
    name: [_published(**space) for space in entry["spaces"]]
    for name, entry in _ENTRIES.items()
    if "spaces" in entry
}
OUR_SPACES: Mapping[str, SearchSpace] = {
    name: decade(*entry["around"]) for name, entry in _ENTRIES.items() if "around" in entry
}
