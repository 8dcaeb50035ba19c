"""Optimizers by the names under which they were published: the table optim/published.yaml."""

import re
from collections.abc import Sequence
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
