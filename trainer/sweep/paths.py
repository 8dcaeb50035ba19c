"""Finds what the paths and selectors in the file of a sweep set in the config of an arm."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.config import Config, ConfigError, Source, Tree, load, replace
from trainer.config.wording import known_names

_SELECTOR = re.compile(r"(\w+/)*\w+(\.\w+)*")


@dataclass(frozen=True)
class ArmPaths:
    """Finds what paths and selectors set in the config of an arm.

    Attributes:
        title: the arm as the subject of a sentence.
        files: the files of the arm.
        search_paths: folders for files that are not found otherwise.
    """

    title: str
    files: Sequence[str]
    search_paths: Sequence[str]

    def all_reached(
        self, config: Config, keys: Mapping[str, Source | None]
    ) -> dict[str, tuple[str, ...]]:
        """Returns what the keys of a space set.

        Args:
            config: the config of the arm.
            keys: path or selector -> its place in the file of the sweep.

        Raises:
            ConfigError: the arm has no such path, or two keys set the same.
        """
        found: dict[str, tuple[str, ...]] = {}
        taken: dict[str, str] = {}
        for key, source in keys.items():
            found[key] = self.reached(config, key, 0, source)
            for path in found[key]:
                for other, by in taken.items():
                    if f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}."):
                        longest = max(path, other, key=len)
                        text = f"{by!r} and {key!r} both set {longest}: remove one."
                        raise ConfigError(text, source)
                taken[path] = key
        return found

    def reached(
        self, config: Config, key: str, value: Tree, source: Source | None
    ) -> tuple[str, ...]:
        """Returns the paths that a key sets: itself, or those that a selector of Gin reaches.

        Args:
            config: the config of the arm.
            key: the path or selector.
            value: a value to set, for a path that the config does not have yet.
            source: the place of the key in the file of the sweep.

        Raises:
            ConfigError: the arm has no such path.
        """
        if key == "seed":
            text = "The seeds of the trials are set by seeds at the root of the sweep: remove seed."
            raise ConfigError(text, source)
        if key in config.sources:
            return (key,)
        head = key.partition(".")[0]
        # The names of arguments and of packages overlap: data.validation, data.digits.validation.
        is_path = head in config.root.kwargs
        selected, refusal = self._select(key)
        paths = selected if selected and not is_path else (key,)
        try:
            replace(config, dict.fromkeys(paths, value), source or Source(""))
        except ConfigError as error:
            if selected and is_path:
                return selected
            why = str(error).removeprefix(f"{error.source}: ")
            if not is_path and not selected:
                why = f"{refusal} {known_names(head, config.root.kwargs, 'The root has')}".strip()
            raise ConfigError(f"{self.title} has no path {key!r}. {why}", source) from error
        return paths

    def _select(self, key: str) -> tuple[tuple[str, ...], str]:
        """Returns the paths that a selector reaches, or none and the reason."""
        if not self.files[0].lower().endswith(".gin"):
            return (), (
                "A path begins with an argument of the root; selectors, such as"
                " optim.muon.learning_rate, need a base in Gin."
            )
        if not _SELECTOR.fullmatch(key):
            return (), "It is neither a path nor a selector of Gin."
        binding = f"{key} = 0"  # which paths it reaches does not depend on the value
        try:
            bound = load(self.files, [binding], search_paths=self.search_paths)
        except ConfigError as error:
            return (), str(error).removeprefix(f"{error.source}: ").strip()
        # There is no other option, and its name in a source is cut if it is long.
        reached = [path for path, source in bound.sources.items() if source.file.startswith("--")]
        return tuple(reached), "As a binding of Gin it changes nothing: others override it."
