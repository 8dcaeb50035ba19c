"""Measures the house: `python -m tests.house_measures [TREE]` prints files, lines, arrows.

An arrow is an import of one file by another one, wherever it stands in the file. A file is free of
jax, NumPy and SciPy if an import of it imports none of them, directly or not: the commands that
answer at once, such as `--help` and `sweep status`, are made of such files.
"""

import ast
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"jax", "numpy", "scipy"}


@dataclass(frozen=True)
class File:
    """A file of Python.

    Attributes:
        name: the dotted name of the module.
        lines: the number of its lines.
        docstrings: how many of them are docstrings.
        imports: the modules that it imports.
        at_once: those that an import of it imports, and not a call.
    """

    name: str
    lines: int
    docstrings: int
    imports: frozenset[str]
    at_once: frozenset[str]

    @property
    def package(self) -> str:
        """Such as "trainer.sweep", or "optim"."""
        parts = self.name.split(".")
        return ".".join(parts[:2]) if parts[0] == "trainer" and len(parts) > 2 else parts[0]


def files(tree: Path = ROOT) -> dict[str, File]:
    """Reads the files of the three packages.

    Args:
        tree: the root of the repository.

    Returns:
        Name of the module -> the file.
    """
    parsed = {}
    for top in ("optim", "trainer", "lockstep"):
        for path in sorted((tree / top).rglob("*.py")):
            parts = path.relative_to(tree).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text(encoding="utf-8")
            parsed[name] = text, ast.parse(text)
    return {
        name: File(
            name,
            len(text.splitlines()),
            sum(map(_docstring_lines, ast.walk(module))),
            frozenset(_targets(ast.walk(module), parsed.keys()) - {name}),
            frozenset(_targets(_at_once(module.body), parsed.keys()) - {name}),
        )
        for name, (text, module) in parsed.items()
    }


def _docstring_lines(node: ast.AST) -> int:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        return 0
    return len((ast.get_docstring(node, clean=False) or "").splitlines())


def _at_once(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_once(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            yield from _at_once([x for x in ast.iter_child_nodes(node) if isinstance(x, ast.stmt)])
        else:
            yield node


def _targets(nodes: Iterable[ast.AST], ours: Collection[str]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = {f"{base}.{alias.name}" for alias in node.names}
            modules = {name for name in names if name in ours}
            found |= modules or {base}
    return found


def imported_at_once(name: str, known: dict[str, File]) -> set[str]:
    """Returns all modules that an import of a module imports, its packages included.

    Args:
        name: the module.
        known: from `files`.
    """
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        parts = waiting.pop().split(".")
        for end in range(1, len(parts) + 1):
            each = ".".join(parts[:end])
            if each not in seen:
                seen.add(each)
                waiting += known[each].at_once if each in known else ()
    return seen


def free(known: dict[str, File]) -> list[str]:
    """Returns the modules that import neither jax nor NumPy nor SciPy.

    Args:
        known: from `files`.
    """
    return [name for name in known if not HEAVY & imported_at_once(name, known)]


def main() -> None:
    """Prints the table."""
    known = files(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    packages = dict.fromkeys(file.package for file in known.values())
    rows = [("package", "files", "lines", "docstrings", "arrows within", "arrows out")]
    total: Counter[str] = Counter()
    for package in packages:
        own = [file for file in known.values() if file.package == package]
        arrows = [
            (file.package, known[x].package) for file in own for x in file.imports if x in known
        ]
        within = sum(a == b for a, b in arrows)
        counts = {
            "files": len(own),
            "lines": sum(file.lines for file in own),
            "docstrings": sum(file.docstrings for file in own),
            "within": within,
            "out": len(arrows) - within,
        }
        total.update(counts)
        rows.append((package, *(f"{x:,}" for x in counts.values())))
    rows.append(("all", *(f"{x:,}" for x in total.values())))
    for row in rows:
        print(f"{row[0]:22}" + "".join(f"{cell:>15}" for cell in row[1:]))
    names = Counter(name.rpartition(".")[2] for name in known)
    twice = {name: n for name, n in names.items() if n > 1}
    print(f"\nnames of files used twice or more: {len(twice)}: {', '.join(sorted(twice))}")
    print(f"free of jax, NumPy and SciPy: {len(free(known))}")


if __name__ == "__main__":
    main()
