"""Writes the config.yaml and config_full.yaml of trials, which differ in few values.

Writing such a file anew takes 1 to 4 ms. If the values of a trial are plain numbers and words, they
are put into a template instead, which the trials of an arm share.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.config import Config, Source, Tree, file_text, full_text, replace
from trainer.config.yaml_writer import scalar_text
from trainer.sweep.plan import Trial

# Printable ASCII that YAML does not quote, and that no config has.
_MARK = "lockstep-value-{}-of-a-trial"
_WORD = re.compile(r"[\w./%+-]+", re.ASCII)
_MARKED = re.compile(r"lockstep-value-(\d+)-of-a-trial")

_FILES: dict[str, Callable[[Config, Sequence[str]], str]] = {
    "config.yaml": lambda config, _: file_text(config.root),
    "config_full.yaml": full_text,
}


class ConfigFiles:
    """Writes the files of trials."""

    def __init__(self, vocabulary: Sequence[str] = ()):
        self._vocabulary = vocabulary
        # By arm and paths: the arm's config, and name -> texts and, between them, places of values.
        self._templates: dict[tuple[str, ...], tuple[Config, dict[str, list[str]]]] = {}

    def write(self, trial: Trial, folder: Path) -> None:
        """Writes the files of a trial into `folder`."""
        for name, text in self.texts(trial).items():
            (folder / name).write_text(text, encoding="utf-8")

    def texts(self, trial: Trial) -> dict[str, str]:
        """Returns the content of a trial's files by their names."""
        values = {**trial.values, "seed": trial.seed}
        if not all(map(_is_plain, values.values())):
            return {name: text(trial.config, self._vocabulary) for name, text in _FILES.items()}
        key = (trial.arm, *values)
        base, template = self._templates.get(key, (None, {}))
        if base is not trial.base:  # it has none yet, or was read again after an extension
            marks = {path: _MARK.format(index) for index, path in enumerate(values)}
            marked = replace(trial.base, marks, Source("a trial"))
            texts = {name: text(marked, self._vocabulary) for name, text in _FILES.items()}
            template = {name: _MARKED.split(text) for name, text in texts.items()}
            self._templates[key] = trial.base, template
        plain = [scalar_text(value) for value in values.values()]
        return {
            # Parts with an odd index are indices of `plain`.
            name: "".join(
                plain[int(part)] if index % 2 else part for index, part in enumerate(parts)
            )
            for name, parts in template.items()
        }


def _is_plain(value: Tree) -> bool:
    """Returns whether a value is written in the same way wherever it stands in a config."""
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    return value is None or isinstance(value, bool | int | float)
