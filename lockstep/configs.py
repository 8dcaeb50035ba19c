"""`Config`: a config that can be edited, and written as YAML; `call`: its calls, not executed."""

import copy
import html
import os
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer import config as configs
from trainer.cli import values
from trainer.config import Call, Source
from trainer.config.edit import config_of_tree, without
from trainer.config.tree import child_trees
from trainer.config.vocabulary import RUN
from trainer.config.wording import known_names, nearest
from trainer.messages import UserError, refuse_os_errors


class Recorder:
    """A function, or its package, that a config names; a call of it is a node, and runs nothing.

    Example:
        >>> import lockstep as ls
        >>> ls.call.models.gpt(width=128, depth=2)
        models.gpt(width=128, depth=2)
        >>> ls.call.losses.huber.partial(delta=2.0)
        losses.huber.partial(delta=2.0)
    """

    def __init__(self, name: str = ""):
        self._name = name

    def __getattr__(self, name: str) -> "Recorder":
        if name.startswith("__"):  # copy, pickle and notebooks look for such; no function has one
            raise AttributeError(name)
        return Recorder(f"{self._name}.{name}" if self._name else name)

    def __call__(self, *values: Any, **arguments: Any) -> Call:
        """Returns the call with its arguments, values or calls; UserError if one has no name."""
        if values:
            raise UserError(
                f"The arguments of a call in a config have names: write"
                f" ls.call.{self._name}(name={values[0]!r}) with the name of the argument."
            )
        return Call(self._name, {key: tree_of(value) for key, value in arguments.items()})

    def partial(self, **arguments: Any) -> Call:
        """Returns the node of the function itself, with some arguments bound."""
        # It is what `!partial:losses.huber {delta: 2.0}` is in YAML, and `@losses.huber` in Gin.
        return Call(self._name, {k: tree_of(v) for k, v in arguments.items()}, partial=True)

    def __dir__(self) -> list[str]:
        return [*RUN.modules] if not self._name else ["partial"]

    def __repr__(self) -> str:
        return f"ls.call.{self._name}" if self._name else "ls.call"


call = Recorder()


def tree_of(value: Any) -> Any:
    """Returns a value as a config can contain it: plain values, calls, lists and dicts of them."""
    # Tuples become lists, and scalars of numpy become numbers. Raises UserError for any other
    # value, such as a function.
    if isinstance(value, Call):
        return Call(value.name, {k: tree_of(v) for k, v in value.kwargs.items()}, value.partial)
    if isinstance(value, Mapping):
        return {key: tree_of(each) for key, each in value.items()}  # type: ignore[misc]
    if isinstance(value, list) or type(value) is tuple:
        return [tree_of(each) for each in value]  # type: ignore[misc]
    if isinstance(value, Recorder):
        raise UserError(f"{value!r} is not called. Write {value!r}(), or {value!r}.partial().")
    if value is None or type(value) in (bool, int, float, str):
        return value
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "shape", None) == ():  # numpy's float64 is a float
        return item()
    raise UserError(_refusal(value))


def _refusal(value: Any) -> str:
    """Returns what to write in place of a value that a config cannot contain."""
    if (name := getattr(value, "__qualname__", None)) is None:
        text = repr(value)
        return (
            f"A config cannot contain a value of the type {type(value).__name__}"
            f"{f', {text}' if len(text) <= 40 else ''}: it has texts, numbers, lists, dicts and"
            " calls. Write the call that makes the object, such as"
            " ls.call.optax.adamw(learning_rate=1e-3), which runs nothing."
        )
    module = getattr(value, "__module__", None) or ""
    outer, _, within = name.partition(".<locals>")
    if module == "__main__" or not outer.replace(".", "").isidentifier():
        return (
            f"A config names functions of modules, and {name} was defined in a notebook or script,"
            " or without a name: put it into a file, such as my_lab.py, and write"
            f" ls.call.my_lab.{outer if outer.isidentifier() else 'my_function'}() with"
            " vocabulary=['my_lab']."
        )
    path, options = _in_config(module, outer)
    if path is None:
        return f"A config cannot name {name}, a function of the module {module}."
    if within:  # defined within a function, which has returned it
        return (
            f"A config cannot contain a function that {path} returned: write the call itself,"
            f" ls.call.{path}(...){options}."
        )
    return (
        f"A config names functions, and {name} is a function itself: write ls.call.{path}(...), or"
        f" ls.call.{path}.partial() for the function in place of its result{options}."
    )


def _in_config(module: str, name: str) -> tuple[str | None, str]:
    """Returns the name of a function in a config, or None, and which vocabulary it needs."""
    steps = [step for step in module.removeprefix("trainer.").split(".") if step[0] != "_"]
    if steps[0] in RUN.modules:
        # optax and our packages have their public functions at the top.
        top = f"{steps[0]}.contrib" if steps[:2] == ["optax", "contrib"] else steps[0]
        return f"{top}.{name}", ""
    if module.partition(".")[0] in ("builtins", "trainer", "lockstep"):
        return None, ""
    return f"{module}.{name}", f", with vocabulary=[{steps[0]!r}]"


Packages = str | Sequence[str] | None  # a text with commas, a list, or none


class Config:
    """The config of a run, which can be read and edited by paths.

    A path consists of the keys from the root to a value, joined by dots. Two configs are equal if
    they name the same functions with the same arguments.

    Args:
        resolved: the tree of calls with the place of each value, from `trainer.config.load`.
        vocabulary: further packages whose public functions it may name; the attribute has those of
            the variable LOCKSTEP_VOCABULARY, too.

    Example:
        >>> import lockstep as ls
        >>> config = ls.load_config("configs/muon_vit.yaml", set={"steps": 200})
        >>> config["model.width"]
        64
        >>> config["model.width"] = 32
        >>> "model.width" in config, config["steps"]
        (True, 200)
        >>> config.to_yaml().splitlines()[0]
        'best_metric: accuracy'
    """

    def __init__(self, resolved: configs.Config, vocabulary: Packages = ()):
        self.resolved = resolved
        self.vocabulary = as_vocabulary(vocabulary)

    def __getitem__(self, path: str) -> Any:
        """Returns a copy of the value at a path: a value, a list, a dict, or a call.

        Raises:
            UserError: the path does not exist.
        """
        try:
            return copy.deepcopy(self.resolved.at(path))
        except KeyError:
            raise UserError(self._unknown(path)) from None

    def __setitem__(self, path: str, value: Any) -> None:
        """Replaces the value at a path, or adds an argument or key to a call or dict.

        Raises:
            UserError: the path does not exist, or a config cannot contain the value.
        """
        source = Source(f"config[{path!r}]")
        self.resolved = configs.replace(self.resolved, {path: tree_of(value)}, source)

    def __delitem__(self, path: str) -> None:
        """Removes an argument, which then has its default, or an element of a list or dict.

        Raises:
            UserError: the path does not exist.
        """
        try:
            self.resolved = without(self.resolved, path)
        except KeyError:
            raise UserError(self._unknown(path)) from None

    def __contains__(self, path: object) -> bool:
        return str(path) in self.resolved.sources

    def __iter__(self) -> Iterator[str]:
        """Yields the paths of all values, in order."""
        return (path for path, _ in configs.leaves(self.resolved.root))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.resolved.root == other.resolved.root

    __hash__ = None  # type: ignore[assignment]  # a config can be edited

    def copy(self) -> "Config":
        """Returns a config that can be edited without changing this one."""
        return Config(self.resolved, self.vocabulary)

    def to_yaml(self) -> str:
        """Returns the config as canonical YAML, which `load_config` and the command line read."""
        return configs.dump(self.resolved.root)

    def save(self, file: str | PathLike[str]) -> None:
        """Writes the config into a file.

        Args:
            file: its name ends in .yaml.

        Raises:
            UserError: the file has another suffix, or cannot be written.
        """
        name = fspath(file)
        if not name.endswith((".yaml", ".yml")):
            raise UserError(f"The file {name!r} does not end in .yaml, the format of save.")
        write_text(name, self.to_yaml())

    def __repr__(self) -> str:
        return self.to_yaml().rstrip("\n")

    def _repr_html_(self) -> str:
        return "".join(_html(key, tree, 1) for key, tree in self.resolved.root.kwargs.items())

    def _unknown(self, path: str) -> str:
        """Returns a sentence about a path that does not exist."""
        if near := nearest(path, filter(None, self.resolved.sources)):
            return f"The config has no {path!r}. Did you mean {near!r}?"
        first = path.split(".")[0]
        keys = list(map(str, self.resolved.root.kwargs))
        return f"The config has no {path!r}. {known_names(first, keys, 'Its keys are')}"


def load_config(
    files: str | PathLike[str] | Sequence[str | PathLike[str]],
    set: Mapping[str, Any] | None = None,
    *,
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    vocabulary: Packages = (),
) -> Config:
    """Reads a config, without executing or importing anything that it names.

    Args:
        files: a Gin or YAML file, or several of one format, of which later ones override.
        set: path -> value, which override the files.
        bindings: Gin statements that override the files; for Gin files only.
        search_paths: folders for files that are not found otherwise.
        vocabulary: further packages whose public functions it may name, such as "my_lab"; they are
            imported when something is built. Whatever takes the config then knows them.

    Raises:
        UserError: a file cannot be read, or the config contains a mistake.

    Example:
        >>> import lockstep as ls
        >>> ls.load_config("configs/muon_vit.gin", set={"steps": 200})["steps"]
        200
    """
    names = [files] if isinstance(files, str | PathLike) else files
    config = Config(configs.load(names, bindings, search_paths=search_paths), vocabulary)
    for path, value in (set or {}).items():
        config[path] = value
    return config


def make_config(*, vocabulary: Packages = (), **arguments: Any) -> Config:
    """Returns a config that is written in Python.

    Args:
        vocabulary: see `load_config`.
        arguments: those of the root of a config, such as model, data, loss, optimizer and steps;
            functions are written with `ls.call`.

    Raises:
        UserError: a config cannot contain a value.

    Example:
        >>> import lockstep as ls
        >>> config = ls.make_config(
        ...     model=ls.call.models.mlp(width=32),
        ...     data=ls.call.data.digits(batch_size=64),
        ...     loss=ls.call.losses.softmax_cross_entropy(),
        ...     optimizer=ls.call.optax.adamw(learning_rate=1e-3),
        ...     steps=100,
        ... )
        >>> config["optimizer.learning_rate"]
        0.001
    """
    root = Call("experiment", {key: tree_of(value) for key, value in arguments.items()})
    return Config(config_of_tree(root, Source("make_config(...)")), vocabulary)


def as_config(config: Config | str | PathLike[str], vocabulary: Packages = ()) -> Config:
    """Returns a config or its file as a config, with further packages."""
    if not isinstance(config, Config):
        return load_config(config, vocabulary=vocabulary)
    known = as_vocabulary(config.vocabulary)
    return Config(config.resolved, (*known, *as_vocabulary(vocabulary)))


def as_vocabulary(vocabulary: Packages) -> tuple[str, ...]:
    """Returns packages, and those of LOCKSTEP_VOCABULARY; UserError for what is no name."""
    # The current folder is searched for them. "__main__" is refused too.
    given: Any = () if vocabulary is None else vocabulary
    given = values.names(given) if isinstance(given, str) else given
    names: list[Any] = list(given) if hasattr(given, "__iter__") else [given]
    for each in names:
        if not isinstance(each, str):
            what = f"the module {each.__name__}" if isinstance(each, ModuleType) else repr(each)
            raise UserError(
                "vocabulary takes the name of a package, such as 'my_lab', or a list of them, and"
                f" was given {what}."
            )
    if "__main__" in names:
        raise UserError(
            "A config cannot name functions of '__main__', the notebook or script itself: another"
            " process does not have them. Put them into a file, such as my_lab.py, and write"
            " vocabulary=['my_lab']."
        )
    known = values.names(os.environ.get("LOCKSTEP_VOCABULARY", ""))
    if found := tuple(dict.fromkeys([*known, *names])):
        values.search_current_folder()
    return found


def write_text(file: str | PathLike[str], text: str) -> None:
    """Writes a text into a file; raises UserError if it cannot be written."""
    with refuse_os_errors(f"{fspath(file)} cannot be written"):
        Path(file).write_text(text, encoding="utf-8")


def _html(key: Any, tree: Any, depth: int) -> str:
    """Returns a node of a config as HTML; deep nodes are collapsed at first."""
    children = child_trees(tree)
    name = f"<b>{html.escape(str(key))}</b>"
    if isinstance(tree, Call):
        kind = "partial: " if tree.partial else ""
        name += f" <code>{html.escape(kind + tree.name)}</code>"
    if not children:
        value = "" if isinstance(tree, Call) else f" {html.escape(str(tree))}"
        return f"<div style='margin-left:1.2em'>{name}{value}</div>"
    inner = "".join(_html(each, child, depth + 1) for each, child in children.items())
    opened = " open" if depth < 3 else ""
    return f"<details style='margin-left:1.2em'{opened}><summary>{name}</summary>{inner}</details>"
