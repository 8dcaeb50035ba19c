"""Measures the house: `python -m tests.house_measures [TREE]` prints files, lines, arrows, names.

An arrow is an import of one file by another one, wherever it stands in the file. A file is free of
jax, NumPy and SciPy if an import of it imports none of them, directly or not: the commands that
answer at once, such as `--help` and `sweep status`, are made of such files.
"""

import ast
import functools
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("optim", "trainer", "lockstep")
HEAVY = {"jax", "numpy", "scipy"}
# What stands beside the code in other languages: what moves there has not gone.
TEXTS = (".css", ".html", ".js", ".sh", ".tex", ".txt", ".txtpb", ".yaml")


@dataclass(frozen=True)
class Module:
    """One source file: `name` is dotted, `package` says whether it is an __init__."""

    name: str
    path: str
    source: str
    package: bool = False
    lines: int = 0

    # Parsed when it is asked for: the trees of all files take 120 MB.
    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)


def modules(root: Path = ROOT) -> list[Module]:
    """Reads the source files of the three packages.

    Args:
        root: of the repository.
    """
    return [read(path, root) for top in PACKAGES for path in sorted((root / top).rglob("*.py"))]


def read(path: Path, root: Path = ROOT) -> Module:
    """Reads one source file of a repository whose root is `root`."""
    own = path.relative_to(root)
    source = path.read_text(encoding="utf-8")
    return Module(name_of(own), str(own), source, own.stem == "__init__", len(source.splitlines()))


def name_of(path: Path) -> str:
    """Returns the dotted name of the module that a path, from the root on, is that of."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def git(*words: str, root: Path = ROOT) -> list[str]:
    """Runs git in a checkout, also in one of another user.

    Returns:
        What it printed, divided at its zero bytes: names of files, with the option -z.

    Raises:
        subprocess.CalledProcessError: git failed, and has printed why.
    """
    command = ["git", "-C", str(root), "-c", "safe.directory=*", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [word for word in done.stdout.split("\0") if word]


def imports(module: Module, at_once: bool = False) -> Iterator[tuple[str, int]]:
    """Yields each dotted name that a module imports, with its line.

    `from a import b` yields "a.b": b may be a module. `importlib.import_module("a.b")` counts.

    Args:
        module: the module.
        at_once: whether to leave out what only a call of a function, or a type checker, imports.
    """
    for node in _at_once(module.tree.body) if at_once else ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.name.split(".")
                parts = parts[: len(parts) - node.level + module.package]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and dotted(node.func) == "importlib.import_module":
            if isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), node.lineno


def _at_once(body: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_once(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            yield from _at_once(x for x in ast.iter_child_nodes(node) if isinstance(x, ast.stmt))
        else:
            yield node


def dotted(node: ast.AST) -> str:
    """Returns an expression such as `a.b` as text; "?" for what is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def ours(name: str, known: Collection[str]) -> str | None:
    """Returns the module that a dotted name is, or is in; None if it is none of ours.

    Args:
        name: such as "trainer.messages.UserError".
        known: the names of our modules.
    """
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def free(found: Iterable[Module]) -> list[str]:
    """Returns the names of the modules whose import imports neither jax nor NumPy nor SciPy.

    Args:
        found: all modules.
    """
    edges = {module.name: {name for name, _ in imports(module, at_once=True)} for module in found}

    def is_heavy(name: str, seen: set[str]) -> bool:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):  # an import of a.b imports a first
            each = ".".join(parts[:end])
            if each in HEAVY:
                return True
            if each not in seen:
                seen.add(each)
                if any(is_heavy(target, seen) for target in edges.get(each, ())):
                    return True
        return False

    return [name for name in edges if not is_heavy(name, set())]


def _package(name: str) -> str:
    """Returns such as "trainer.sweep", "optim", or "trainer" for a file beside its packages."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "trainer" and len(parts) > 2 else parts[0]


def _docstring_lines(node: ast.AST) -> int:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        return 0
    return len((ast.get_docstring(node, clean=False) or "").splitlines())


@dataclass(frozen=True)
class Definition:
    """A function, method or class: its dotted name from the module on, and where it stands."""

    name: str
    module: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    within: str  # "module", "class" or "function"

    @property
    def lines(self) -> int:
        """Counts the lines without the docstring."""
        start, end = self.node.lineno, self.node.end_lineno or self.node.lineno
        return end - start + 1 - _docstring_lines(self.node)


def definitions(found: Iterable[Module]) -> Iterator[Definition]:
    """Yields all definitions of the modules.

    Args:
        found: the modules.
    """

    def inside(
        node: ast.AST, module: str, parents: tuple[str, ...], within: str
    ) -> Iterator[Definition]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = (*parents, child.name)
                yield Definition(".".join(names), module, child, within)
                kind = "class" if isinstance(child, ast.ClassDef) else "function"
                yield from inside(child, module, names, kind)
            else:
                yield from inside(child, module, parents, within)

    for module in found:
        yield from inside(module.tree, module.name, (), "module")


def shared_names(found: Iterable[Module]) -> dict[str, list[str]]:
    """Returns the public names that two modules define, with these modules.

    Args:
        found: all modules.
    """
    places: dict[str, list[str]] = {}
    for each in definitions(found):
        if each.within == "module" and not each.name.startswith("_"):
            places.setdefault(each.name, []).append(each.module)
    return {name: modules for name, modules in sorted(places.items()) if len(modules) > 1}


def used_once(found: Collection[Module]) -> list[Definition]:
    """Returns functions of at most 6 lines that one place of the three packages names.

    Those that a module offers in `__all__` are left out, because configs and users name them.

    Args:
        found: all modules.
    """
    names: Counter[str] = Counter()
    offered = {name for module in found for name in _offered(module.tree)}
    for module in found:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Name):
                names[node.id] += 1
            elif isinstance(node, ast.Attribute):
                names[node.attr] += 1
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.update(node.value.split() if node.value.isidentifier() else ())
            elif isinstance(node, ast.ImportFrom):  # an import and its one use are one
                names.update(alias.name for alias in node.names if alias.asname)
    return [
        each
        for each in definitions(found)
        if not isinstance(each.node, ast.ClassDef)
        and not each.node.decorator_list
        and not each.node.name.startswith("__")
        and each.lines <= 7  # one of them is "def"
        and each.node.name not in offered
        and names[each.node.name] == 1
    ]


def _offered(tree: ast.Module) -> list[str]:
    """Returns the names in `__all__`."""
    return [
        name.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.walk(node.value)
        if isinstance(name, ast.Constant) and isinstance(name.value, str)
    ]


def _comments(text: str) -> int:
    return sum(
        token.type == tokenize.COMMENT
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def measures(found: Collection[Module], root: Path = ROOT) -> dict[str, int]:
    """Returns what the house is measured by, apart from the table of packages.

    Args:
        found: all modules.
        root: of the repository.
    """
    every = list(definitions(found))
    functions = [each for each in every if not isinstance(each.node, ast.ClassDef)]
    inner = {"__init__", "__call__"}
    parameters = {
        f"{each.module}:{each.name}": len(each.node.args.args + each.node.args.kwonlyargs) - 1
        for each in functions
        if isinstance(each.node, ast.FunctionDef) and each.node.name in inner
    }
    texts = [path for top in PACKAGES for path in (root / top).rglob("*") if path.suffix in TEXTS]
    return {
        "lines": sum(module.lines for module in found),
        "lines of other texts": sum(
            len(path.read_text("utf-8").splitlines())
            for path in texts
            if "shipped" not in path.parts
        ),
        "functions over 60 lines": sum(each.lines > 60 for each in functions),
        "functions over 40 lines": sum(each.lines > 40 for each in functions),
        "classes over 300 lines": sum(
            each.lines > 300 for each in every if isinstance(each.node, ast.ClassDef)
        ),
        "most parameters of a constructor": max(parameters.values()),
        "public names of two modules": len(shared_names(found)),
        "functions of at most 6 lines used once": len(used_once(found)),
    }


def main() -> None:
    """Prints the table."""
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    found = modules(root)
    known = {module.name for module in found}
    rows = [("package", "files", "lines", "docstrings", "arrows within", "arrows out")]
    total: Counter[str] = Counter()
    for package in dict.fromkeys(_package(name) for name in sorted(known)):
        own = [module for module in found if _package(module.name) == package]
        targets = [
            target
            for module in own
            for target in {ours(name, known) for name, _ in imports(module)}
            if target is not None and target != module.name
        ]
        within = sum(_package(target) == package for target in targets)
        counts = {
            "files": len(own),
            "lines": sum(module.lines for module in own),
            "docstrings": sum(_docstring_lines(node) for x in own for node in ast.walk(x.tree)),
            "within": within,
            "out": len(targets) - within,
        }
        total.update(counts)
        rows.append((package, *(f"{x:,}" for x in counts.values())))
    rows.append(("all", *(f"{x:,}" for x in total.values())))
    for row in rows:
        print(f"{row[0]:22}" + "".join(f"{cell:>15}" for cell in row[1:]))
    names = Counter(name.rpartition(".")[2] for name in known)
    twice = {name: n for name, n in names.items() if n > 1}
    print(f"\nnames of files used twice or more: {len(twice)}: {', '.join(sorted(twice))}")
    print(f"free of jax, NumPy and SciPy: {len(free(found))}\n")
    for name, value in measures(found, root).items():
        print(f"{name:45}{value:>10,}")
    code = total["lines"] - total["docstrings"]
    comments = sum(_comments((root / module.path).read_text("utf-8")) for module in found)
    print(f"{'comments in 100 lines of code':45}{100 * comments / code:>10.1f}")
    print("\npublic names of two modules: " + ", ".join(shared_names(found)))
    once = (f"{each.module}:{each.name}" for each in used_once(found))
    print("\nfunctions used once: " + ", ".join(once))


if __name__ == "__main__":
    main()
