"""waves/NAME.json: which trials a wave has, and which program computes them."""

import hashlib
import json
from pathlib import Path
from typing import NotRequired, TypedDict

from trainer.writers.json_files import damaged, read_json

_ADVICE = "its trials are computed again by the next worker."


class WaveContent(TypedDict):
    """The content of the file."""

    alone: bool  # whether the one trial is computed as a run of its own
    program: int  # index in the plan
    trials: list[str]  # folders, in order
    start: NotRequired[int]  # the cut at which they waited before; absent for the first step
    until: NotRequired[int]  # the cut to which they are computed; absent for the last step


def wave_name(content: WaveContent) -> str:
    """Returns the name of a wave, which is a hash, so that a changed file is noticed."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def read_wave(file: Path) -> WaveContent:
    """Reads waves/NAME.json; raises FileNotFoundError, or DamagedFile if it is damaged."""
    content = read_json(file, WaveContent, _ADVICE)
    if wave_name(content) != file.stem:
        raise damaged(file, "its content is not that of a wave of this name", _ADVICE)
    return content
