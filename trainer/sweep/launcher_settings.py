"""Reads the settings of a launcher: a YAML file of them, and KEY=VALUE of the command line."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trainer.config import ConfigError, Source
from trainer.config.files import check_text, read_text
from trainer.config.nodes import plain
from trainer.config.wording import describe
from trainer.config.yaml_reader import read


class LauncherSetting(NamedTuple):
    """A value and where it was given: a value of YAML, or the text of the command line."""

    value: Any
    source: Source

    def text(self, key: str) -> str:
        """Returns a string or a number as text; raises ConfigError for another value."""
        if isinstance(self.value, bool) or not isinstance(self.value, str | int | float):
            why = f"must be a string or a number, got {describe(self.value)}."
            raise ConfigError(f"The value of {key} {why}", self.source)
        return str(self.value)


def read_settings(
    option: str,
    file: str | None,
    texts: Sequence[str],
    named: Callable[[str, Source], str],
    example: tuple[str, str],
) -> dict[str, LauncherSetting]:
    """Reads a file of settings and those of the command line, which override the file."""
    # `option` is that of the command line, such as "--slurm". `named` takes a key and its source,
    # and returns the name of the setting. `example` is a key with a value. Raises ConfigError if
    # the file cannot be read or is no mapping, a text is not KEY=VALUE, or `named` does.
    values: dict[str, LauncherSetting] = {}
    if file is not None:
        content, _ = read_text(file, None)
        check_text(content, Source(file))
        root = read(content, Source(file, 1))
        if root is None or not isinstance(root.value, dict):
            why = f"This must be a mapping, such as {': '.join(example)}."
            raise ConfigError(why, Source(file, 1))
        for key, node in root.value.items():
            if (name := named(str(key), node.argument_source)) in values:
                raise ConfigError(f"{key} is given twice. Remove one.", node.argument_source)
            values[name] = LauncherSetting(plain(node), node.source)
    for text in texts:
        source = Source(f"{option} {text}")
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"A setting is KEY=VALUE, such as {'='.join(example)}.", source)
        values[named(key, source)] = LauncherSetting(value, source)
    return values
