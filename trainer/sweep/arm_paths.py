"""Finds what the paths and selectors in the file of a sweep set in the config of an arm."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer.config import Call, Config, ConfigError, Source, Tree, join, load, replace
from trainer.config.tree import walk
from trainer.config.wording import known_names

_SELECTOR = re.compile(r"(\w+/)*\w+(\.\w+)*")


@dataclass(frozen=True)
class ArmPaths:
    """Finds what the keys of a sweep's file, paths and selectors, set in the config of an arm."""

    # In all methods, a source is the place of a key in the file of the sweep, and ConfigError is
    # raised if the arm has no such path.

    title: str  # the arm as the subject of a sentence
    files: Sequence[str]
    search_paths: Sequence[str]  # folders for files that are not found otherwise
    # those among which the paths of a selector are, where the files are not here
    planned: Sequence[str] = ()
    # the paths of `config` whose trees the file of the sweep has set so far
    edited: list[str] = field(default_factory=list)

    def set(self, config: Config, key: str, value: Tree, source: Source) -> Config:
        """Returns the config with a value where a key sets it."""
        paths = self.reached(config, key, value, source)
        self.edited.extend(paths)
        return replace(config, dict.fromkeys(paths, value), source)

    def all_reached(
        self, config: Config, keys: Mapping[str, Source | None]
    ) -> dict[str, tuple[str, ...]]:
        """Returns the paths that each key of a space sets; ConfigError if two keys overlap."""
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
        """Returns the paths that a key sets: itself, or those that a selector of Gin reaches."""
        # A path that the config does not have yet is set to `value`, to see whether it can be.
        if key == "seed":
            text = "The seeds of the trials are set by seeds at the root of the sweep: remove seed."
            raise ConfigError(text, source)
        if key in config.sources:
            return (key,)
        head = key.partition(".")[0]
        # The names of arguments and of packages overlap: data.validation, data.digits.validation.
        is_path = head in config.root.kwargs
        selected, refusal = self._select(config, key)
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

    def _select(self, config: Config, key: str) -> tuple[tuple[str, ...], str]:
        """Returns the paths that a selector reaches, or none and the reason."""
        if not self.files:
            every = _of_calls(config, key.rpartition("/")[2])
            found = [path for path in self.planned if path in every] or every
            return tuple(found), "The files of the arm are not here."
        if not self.files[0].lower().endswith(".gin"):
            return (), (
                "A path begins with an argument of the root; selectors, such as"
                " optim.muon.learning_rate, need a base in Gin."
            )
        if not _SELECTOR.fullmatch(key):
            return (), "It is neither a path nor a selector of Gin."
        every = _of_calls(config, key)
        in_edits = [path for path in every if self._is_edited(path.rpartition(".")[0])]
        in_files, refusal = self._bound(key)
        # Some of the calls in the files may have been replaced.
        kept = [path for path in in_files if not self._is_edited(path.rpartition(".")[0])]
        if in_files and not kept:
            refusal = "The calls that it would change are replaced by set."
        return (*kept, *in_edits), refusal

    def _is_edited(self, path: str) -> bool:
        return any(f"{path}.".startswith(f"{edited}.") for edited in self.edited)

    def _bound(self, key: str) -> tuple[tuple[str, ...], str]:
        """Returns the paths that a binding of Gin reaches in the files, or none and the reason."""
        binding = f"{key} = 0"  # which paths it reaches does not depend on the value
        try:
            bound = load(self.files, [binding], search_paths=self.search_paths)
        except ConfigError as error:
            return (), str(error).removeprefix(f"{error.source}: ").strip()
        # The binding is the only option. Only the dashes are compared: a long name is cut.
        reached = [path for path, source in bound.sources.items() if source.file.startswith("--")]
        return tuple(reached), "As a binding of Gin it changes nothing: others override it."


def _of_calls(config: Config, key: str) -> list[str]:
    """Returns the paths of an argument of all calls of a function, by a selector of Gin."""
    function, _, argument = key.rpartition(".")
    calls = ((path, x) for path, x in walk(config.root) if isinstance(x, Call))
    return [join(path, argument) for path, x in calls if f".{x.name}".endswith(f".{function}")]
