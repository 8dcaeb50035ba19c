"""waves/NAME.json: which trials a wave has, and which program computes them."""

import hashlib
import json
from pathlib import Path
from typing import NotRequired, TypedDict

from trainer.writers.json_files import damaged, read_json

_ADVICE = "its trials are computed again by the next worker."


class WaveContent(TypedDict):
    """The content of the file.

    Attributes:
        alone: whether the one trial is computed as a run of its own.
        program: the index of the program in the plan.
        trials: the folders of the trials, in order.
        start: the cut at which they waited before; absent for the first step.
        until: the cut to which they are computed; absent for the last step.
    """

    alone: bool
    program: int
    trials: list[str]
    start: NotRequired[int]
    until: NotRequired[int]


def wave_name(content: WaveContent) -> str:
    """Returns the name of a wave, which is a hash, so that a changed file is noticed."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def read_wave(file: Path) -> WaveContent:
    """Reads waves/NAME.json.

    Raises FileNotFoundError if there is no such file, and DamagedFile if it is damaged.
    """
    content = read_json(file, WaveContent, _ADVICE)
    if wave_name(content) != file.stem:
        raise damaged(file, "its content is not that of a wave of this name", _ADVICE)
    return content
