"""Reads files, bindings and settings into one config."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from trainer.config import hints
from trainer.config.edit import merge, override
from trainer.config.nodes import Node, check_argument, plain, to_config
from trainer.config.tree import Call, Config, ConfigError, Source
from trainer.config.wording import describe, listing, nearest

MAX_BYTES = 256 * 1024
MAX_FILES = 100
_GIN = (".gin",)
_YAML = (".yaml", ".yml")
_EMPTY = "is empty: a config names a model, data, an optimizer and more"


def load(
    files: Sequence[str | os.PathLike[str]],
    bindings: Sequence[str] = (),
    sets: Sequence[str] = (),
) -> Config:
    """Reads a config; executes nothing, and knows no function by name.

    Args:
        files: Gin or YAML by their suffix, of one kind; a later one overrides an earlier one.
        bindings: Gin statements, for Gin files only; they override the files.
        sets: settings of the form path=value, the value in YAML; they override all else.

    Raises:
        ConfigError: anything is wrong with it.
    """
    paths = [os.fspath(file) for file in files]
    if not paths:
        raise ConfigError("No config is given: name one with --gin_file=configs/muon_vit.gin.")
    kinds = [_suffix_kind(path, Source(path)) for path in paths]
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"The files {', '.join(paths[:4])} are Gin and YAML: give files of one kind, and change"
            " single values with --set path=value, which both take."
        )
    root = _load_gin(paths, bindings) if kinds[0] == "gin" else _load_yaml(paths, bindings)
    for text in sets:
        _check_text(text, Source("--set"))
    return override(to_config(root), sets)


def _load_yaml(paths: Sequence[str], bindings: Sequence[str]) -> Node:
    if bindings:
        raise ConfigError(
            "Gin's bindings change Gin files, and this config is YAML: use --set path=value, as in"
            " --set optimizer.clip_norm=1.0.",
            _binding_source(bindings[0], 0),
        )
    files = _Files("yaml")
    root = files.yaml(paths[0], None)
    for path in paths[1:]:
        root = merge(root, files.yaml(path, None))
    return root


def _load_gin(paths: Sequence[str], bindings: Sequence[str]) -> Node:
    from trainer.config import gin_scopes

    files = _Files("gin")
    for path in paths:
        files.gin(path, None)
    for text in bindings:
        source = _binding_source(text, 1 if "\n" in text.strip() else 0)
        _check_text(text, source)
        files.gin_text(text, source, "")
    return gin_scopes.resolve(files.statements, Source(paths[0]))


def _binding_source(text: str, line: int) -> Source:
    shown = " ".join(text.split())
    return Source(f"--gin_bindings={shown[:40]}{'...' if len(shown) > 40 else ''}", line)


class _Files:
    """Reads files with what they include, each at its place."""

    def __init__(self, kind: str):
        self._kind = kind
        self._open: list[str] = []
        self._count = 0
        self._stretch = 0
        self.statements: list = []

    def gin(self, path: str, named: Source | None) -> None:
        text = self._enter(path, named)
        self.gin_text(text, Source(path, 1), os.path.dirname(path))
        self._open.pop()

    def gin_text(self, text: str, source: Source, directory: str) -> None:
        from trainer.config import gin_reader, gin_scopes

        self._stretch += 1
        first: dict = {}
        for statement in gin_reader.read(text, source):
            if isinstance(statement, gin_reader.Include):
                self.gin(os.path.join(directory, statement.file), statement.source)
                self._stretch += 1
                continue
            if isinstance(statement, gin_reader.Binding):
                if statement.key in first:
                    raise ConfigError(
                        f"This binds {statement} for the second time; the first is at"
                        f" {first[statement.key]}. Remove one.",
                        statement.source,
                    )
                first[statement.key] = statement.source
            self.statements.append(gin_scopes.Statement(statement, self._stretch))

    def yaml(self, path: str, named: Source | None) -> Node:
        from trainer.config import yaml_reader

        source = Source(path, 1)
        document = yaml_reader.read(self._enter(path, named), source)
        if document is None or document.value is None:
            raise ConfigError(f"The file {_EMPTY}.", Source(path))
        if not isinstance(document.value, dict):
            given = describe(plain(document))
            hint = hints.in_yaml(str(document.value))
            raise ConfigError(
                f"The root of a config is a mapping (model, data, steps, ...), and not {given}."
                f" {hint}".rstrip(),
                document.source,
            )
        items = dict(document.value)
        if "experiment" in items:
            raise ConfigError(
                "The root of a YAML config is the experiment itself: write model, data, steps and"
                " the rest without this key. If this is Gin, name the file .gin.",
                items["experiment"].argument_source,
            )
        include = items.pop("include", None)
        for key, item in items.items():
            check_argument(key, item.argument_source)
        root = Node(Call("experiment", items), document.source)
        base: Node | None = None
        for name, at in _included(include):
            other = self.yaml(os.path.join(os.path.dirname(path), name), at)
            base = other if base is None else merge(base, other)
        self._open.pop()
        return root if base is None else merge(base, root)

    def _enter(self, path: str, named: Source | None) -> str:
        """Returns the text of a file, which is then open until it is popped."""
        if named is not None and _suffix_kind(path, named) != self._kind:
            raise ConfigError(f"A {self._kind} file includes no {path!r}: use one kind.", named)
        self._count += 1
        if self._count > MAX_FILES:
            raise ConfigError(f"The config includes more than {MAX_FILES} files.", named)
        real = os.path.realpath(path) if "\0" not in path else path
        if real in self._open:
            names = [os.path.basename(each) for each in [*self._open, real]]
            raise ConfigError(f"The files include each other: {' -> '.join(names[-6:])}.", named)
        text = _read_text(path, named)
        self._open.append(real)
        return text


def _included(include: Node | None) -> list[tuple[str, Source]]:
    if include is None:
        return []
    nodes = include.value if isinstance(include.value, list) else [include]
    for node in nodes:
        if not isinstance(node.value, str):
            given = describe(plain(node))
            raise ConfigError(f"include names a file or a list of files, not {given}.", node.source)
    return [(node.value, node.source) for node in nodes]


def _suffix_kind(path: str, source: Source) -> str:
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _GIN:
        return "gin"
    if suffix in _YAML:
        return "yaml"
    raise ConfigError(
        f"The name {os.path.basename(path)!r} does not say what it is: a config ends in .gin,"
        " .yaml or .yml.",
        source,
    )


def _read_text(path: str, named: Source | None) -> str:
    source = named or Source(path)
    which = f"The included file {path}" if named else "The file"
    try:
        file = Path(path)
        if not file.exists():
            raise ConfigError(f"{which} does not exist. {_hint(file, named)}", source)
        if not file.is_file():
            kind = "a directory" if file.is_dir() else "no regular file"
            raise ConfigError(f"{which} is {kind}: name a .gin or .yaml file.", source)
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{which} cannot be read: {reason}.", source) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{which} is larger than {MAX_BYTES // 1024} KiB: no config is.", source)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        at = named or Source(path, line)
        raise ConfigError(f"{which} is no UTF-8 text: is it a binary file?", at) from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    _check_text(text, source)
    if not text.strip():
        raise ConfigError(f"{which} {_EMPTY}.", source)
    return text


def _check_text(text: str, source: Source) -> None:
    match = re.search("[\0\ud800-\udfff]", text)
    if match is not None:
        raise ConfigError(f"There is a {match[0]!r} in it, which no text holds.", source)
    if len(text) > MAX_BYTES:
        raise ConfigError(f"It is larger than {MAX_BYTES // 1024} KiB: no config is.", source)


def _hint(file: Path, named: Source | None) -> str:
    """Says what may have been meant by a file that is not there."""
    if named is not None and os.path.dirname(named.file):
        above = os.path.dirname(named.file)
        from_here = os.path.relpath(file, above)
        if os.path.exists(from_here):
            right = os.path.relpath(from_here, above)
            return f"A path is relative to the including file; did you mean {right!r}?"
    try:
        names = sorted(each.name for each in file.parent.iterdir() if not each.is_dir())
    except OSError:
        return f"Nor does its directory {file.parent}."
    itself = os.path.basename(named.file) if named else ""
    configs = [name for name in names if name.endswith(_GIN + _YAML) and name != itself]
    near = nearest(file.stem, [Path(name).stem for name in configs])
    for name in configs:
        if Path(name).stem == near:
            return f"Did you mean {name!r}?"
    return f"In {file.parent} there is: {listing(configs)}." if configs else ""
