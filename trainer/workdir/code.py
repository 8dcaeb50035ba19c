"""Hashes and git commits of the user's own code: the packages given by --vocabulary."""

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import os
import subprocess
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

# Stands for the compiled program where others are names of files: its hash also differs if a file
# that the code opens was changed, or an installed package.
STEP = "the program of a training step"
STEP_ALONE = (
    "No file of your code that is hashed differs. A file that it opens was changed, or an "
    "installed package; or it draws random numbers without a seed while the step is traced.\n"
)
_OURS = {"trainer", "optim", "lockstep"}
_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = Path(sysconfig.get_path("stdlib"))
OUTSIDE = "::top level"  # what a file has outside its functions and classes, and their order


class _Source(NamedTuple):
    """The source of a loaded module: its file, the hash of its bytes, and the names it imports."""

    file: Path
    hash: str
    parts: Mapping[str, str]  # the end of a name in `hashes`, such as "::loss" -> its hash there
    imports: tuple[str, ...]


# The hash of a module stays that of its first reading: a file that is edited afterwards does not
# change what this process computes.
_sources: weakref.WeakKeyDictionary[ModuleType, _Source] = weakref.WeakKeyDictionary()


def hashes(packages: Sequence[str]) -> dict[str, str]:
    """Hashes the source files of the packages of --vocabulary that are imported at this moment."""
    # The files are those of all loaded modules of the packages, and of the modules that they import
    # from anywhere but Python's own folders, such as a helper.py next to a my_lab.py, or a package
    # that was installed with `pip install -e`. Other installed libraries are not read, unless one
    # is among the packages itself; `fingerprint` has the versions of some.
    # Returns name -> the first 16 hex digits of a SHA-256, sorted by file: "my_lab/nets.py" has
    # that of all bytes, "my_lab/nets.py::loss" that of a function or class at the top of the file,
    # and "my_lab/nets.py::top level" that of the other statements, the last two without comments
    # and docstrings, and not for installed libraries.
    found = {}
    for file, source in sorted(_used(packages).items()):
        found |= {file: source.hash, **{file + end: x for end, x in source.parts.items()}}
    return found


def differing_files(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Returns the sorted names of `hashes` in which two codes differ, apart from comments."""
    # A file is named as a whole if only one of them has it, or the hashes of its functions, as
    # those of earlier versions.
    found = set[str]()
    for file in {x for x in {**old, **new} if "::" not in x and old.get(x) != new.get(x)}:
        both = file + OUTSIDE in old and file + OUTSIDE in new
        found |= {x for x in {**old, **new} if x.startswith(f"{file}::")} if both else {file}
    return sorted(x for x in found if old.get(x) != new.get(x))


def are_steps(names: Iterable[str]) -> bool:
    """Returns whether all names stand for programs of a training step."""
    return all(name.startswith(STEP) for name in names)


def edited(packages: Sequence[str]) -> list[str]:
    """Returns the sorted names of files edited or removed since `hashes` first saw them."""
    # This process still has the functions from before the edit.
    found = []
    for name, source in sorted(_used(packages).items()):
        with contextlib.suppress(OSError):
            if _digest(source.file.read_bytes()) == source.hash:
                continue
        found.append(name)
    return found


def is_installed(file: Path) -> bool:
    """Returns whether a file is of an installed library."""
    return bool(_INSTALLED & set(file.parts))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _used(packages: Sequence[str]) -> dict[str, _Source]:
    """Returns the sources of packages and of what they import; see `hashes`."""
    tops = {package.partition(".")[0] for package in packages}
    waiting = [name for name in sys.modules if name.partition(".")[0] in tops]
    found: dict[str, _Source] = {}
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        source = None if name in seen else _source(name)
        if source is None:
            continue
        seen.add(name)
        found[source.file.relative_to(_folder(name, source.file)).as_posix()] = source
        waiting += [
            other
            for other in source.imports
            if other.partition(".")[0] not in {*_OURS, *tops}
            and (file := _file(other)) is not None
            and not is_installed(file)
            and not file.is_relative_to(_STANDARD)
        ]
    return found


def commits(packages: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns package -> "commit" and "dirty", from git, for imported packages in a checkout."""
    # "dirty" says whether files of the package were changed or added since the commit. Packages
    # that are not in a checkout are omitted.
    found = {}
    for top in dict.fromkeys(package.partition(".")[0] for package in packages):
        for place in places(top):
            root = next((folder for folder in place.parents if (folder / ".git").exists()), None)
            commit = None if root is None else head(root)
            if root is not None and commit is not None:
                new = ("ls-files", "-z", "--others", "--exclude-standard", "--", str(place))
                dirty = bool(changes(root, place) or _git(root, *new))
                found[top] = {"commit": commit, "dirty": dirty}
    return found


def _source(name: str) -> _Source | None:
    """Returns the source of a loaded module, if it has one."""
    module = sys.modules.get(name)
    if not isinstance(module, ModuleType):
        return None
    if module not in _sources:
        if (file := _file(name)) is None:
            return None
        content = file.read_bytes()
        imports = tuple[str, ...]()
        if tree := _parsed(content):  # it may have been edited since it was imported
            imports = tuple(_imports(name, tree))
        parts = _parts(tree) if tree and not is_installed(file) else {}
        _sources[module] = _Source(file, _digest(content), parts, imports)
    return _sources[module]


def hashes_of(name: str, content: bytes) -> dict[str, str]:
    """Returns what `hashes` has of a file with this name and content, whatever kind it is of."""
    tree = _parsed(content) if name.endswith(".py") else None
    parts = _parts(tree) if tree else {}
    return {name: _digest(content), **{name + end: hash for end, hash in parts.items()}}


def hashed_name(function: Callable[..., Any]) -> str:
    """Returns the name in `hashes` of a function or class, "" if it has no file."""
    function = inspect.unwrap(function)
    module = getattr(function, "__module__", None) or ""
    if (file := _file(module)) is None:
        return ""
    name = getattr(function, "__qualname__", "").partition(".")[0]
    return f"{file.relative_to(_folder(module, file)).as_posix()}::{name}"


def _parsed(content: bytes) -> ast.Module | None:
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        return ast.parse(content)
    return None


class _Computed(ast.NodeTransformer):
    """Removes docstrings, and other statements that are a constant."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def _parts(tree: ast.Module) -> dict[str, str]:
    """Returns the hashes of the functions, classes and other statements of a file; see `hashes`."""
    texts: dict[str, list[str]] = {OUTSIDE: []}
    for node in _Computed().visit(tree).body:
        text = ast.unparse(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            texts.setdefault(f"::{node.name}", []).append(text)
            text = node.name
        texts[OUTSIDE].append(text)
    return {name: _digest("\n".join(each).encode()) for name, each in texts.items()}


def _file(name: str) -> Path | None:
    """Returns the source file of a loaded module, if it has one."""
    given = getattr(sys.modules.get(name), "__file__", None)
    file = Path(given).absolute() if isinstance(given, str) else None
    return file if file is not None and file.suffix == ".py" and file.is_file() else None


def _folder(name: str, file: Path) -> Path:
    """Returns the folder in which the import of a module starts."""
    # For a.b that is two levels above a/b.py, and one more above a/b/__init__.py.
    depth = name.count(".") + (file.name == "__init__.py")
    return file.parents[depth] if depth < len(file.parents) else file.parent


def places(top: str) -> Iterator[Path]:
    """Yields the folder of an imported package, or the file of a module."""
    # A namespace package may have several folders.
    folders = [Path(path).absolute() for path in getattr(sys.modules.get(top), "__path__", ())]
    file = _file(top)
    yield from folders or ([file] if file else [])


def _imports(name: str, tree: ast.Module) -> Iterator[str]:
    """Yields the names that a module imports, and their parents; not all of them are modules."""
    package = getattr(sys.modules.get(name), "__package__", None) or ""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{base}.{alias.name}" for alias in node.names]
        for each in names:
            parts = each.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def head(root: Path) -> str | None:
    """Returns the commit of a checkout, given by its top folder; None if git fails."""
    return None if (commit := _git(root, "rev-parse", "HEAD")) is None else commit.decode().strip()


def changes(root: Path, within: Path | None = None) -> bytes | None:
    """Returns the uncommitted changes of a checkout as a diff; None if git fails."""
    # `within` limits them to a file or folder; None stands for the whole checkout.

    # Diff drivers and text conversions are programs that the checkout's settings name, and a
    # submodule has settings of its own.
    quiet = ("--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
    paths = () if within is None else ("--", str(within))
    return _git(root, "diff", *quiet, "HEAD", *paths, environment=_no_filters(root))


def _no_filters(root: Path) -> dict[str, str]:
    """Returns environment variables that disable every filter in the checkout's settings."""
    names = _git(root, "config", "-z", "--name-only", "--get-regexp", r"^filter\.") or b""
    variables = sorted({os.fsdecode(name) for name in names.split(b"\0") if name})
    # git reads these variables after the checkout's settings, so that the variables win.
    before = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    found = {"GIT_CONFIG_COUNT": str(before + len(variables))}
    for number, name in enumerate(variables, before):
        # An empty command is no filter; git would fail for a required filter that is empty.
        empty = "false" if name.endswith(".required") else ""
        found |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": empty}
    return found


def _git(root: Path, *command: str, environment: Mapping[str, str] | None = None) -> bytes | None:
    # The checkout's settings could name programs that git would run.
    safe = ["-c", "core.fsmonitor=false", "-c", f"safe.directory={root}"]
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *safe, *command],
            capture_output=True,
            timeout=20,
            # Otherwise git may lock and rewrite the index, which the user's own git needs.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", **(environment or {})},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
