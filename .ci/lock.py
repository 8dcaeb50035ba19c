"""Writes requirements*.lock: what pip resolves pyproject.toml to today.

Every Python that pyproject.toml allows resolves by itself, since one may need an older jax than
another; where the answers differ, a line carries a marker. Run it as `make lock`, on Linux, with
each of those Pythons on the PATH.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13")
ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Written by `make lock`; do not edit. {what}
# Where Python versions need different releases, a marker says which is whose.
"""


def resolve(pip: list[str], requirements: Sequence[str], pinned: dict[str, str]) -> dict[str, str]:
    """Returns the version of every package that pip would install into an empty environment."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(f"{name}=={version}\n" for name, version in pinned.items())
        constraints.flush()
        options = ["--dry-run", "--ignore-installed", "-qq", "--report", "-"]
        command = [*pip, "install", *options, "--constraint", constraints.name, *requirements]
        report = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    packages = [item["metadata"] for item in json.loads(report)["install"]]
    return {package["name"]: package["version"] for package in packages}


def marker(holds: Sequence[str]) -> str:
    """Returns the environment marker of a line that holds for some of PYTHONS."""
    if len(holds) == len(PYTHONS):
        return ""
    if tuple(holds) == PYTHONS[: len(holds)]:
        return f' ; python_version <= "{holds[-1]}"'
    if tuple(holds) == PYTHONS[-len(holds) :]:
        return f' ; python_version >= "{holds[0]}"'
    return " ; " + " or ".join(f'python_version == "{python}"' for python in holds)


def merge(answers: dict[str, dict[str, str]]) -> list[str]:
    """Returns the lines of a lock, given each Python's versions by package name."""
    holds: dict[tuple[str, str], list[str]] = {}
    for python, versions in answers.items():
        for name, version in versions.items():
            holds.setdefault((name, version), []).append(python)
    order = sorted(holds, key=lambda pin: (pin[0].lower(), holds[pin]))
    return [f"{name}=={version}{marker(holds[name, version])}" for name, version in order]


def main() -> None:
    """Resolves for every Python and writes both files."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    # With the build backend in the environment, `pip install --editable` needs no other one.
    default = [*project["dependencies"], *pyproject["build-system"]["requires"]]
    extras = project["optional-dependencies"]
    defaults: dict[str, dict[str, str]] = {}
    tests: dict[str, dict[str, str]] = {}
    docs: dict[str, dict[str, str]] = {}
    for python in PYTHONS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                subprocess.run([f"python{python}", "-m", "venv", folder], check=True)
            except (OSError, subprocess.CalledProcessError):
                sys.exit(
                    f"Put python{python}, with its venv module, on the PATH: the lock answers "
                    f"for Python {', '.join(PYTHONS)}."
                )
            print(f"Resolving for Python {python}.")
            pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"]
            defaults[python] = resolve(pip, default, {})
            run = defaults[python]
            both = resolve(pip, [*default, *extras["test"]], run)
            tests[python] = {n: v for n, v in both.items() if n not in run}
            built = resolve(pip, [*default, *extras["docs"]], both)  # beside those of the tests
            docs[python] = {n: v for n, v in built.items() if n not in run}
    for name, what, answers in (
        ("requirements.lock", "What a run needs.", defaults),
        ("requirements-test.lock", "What the tests need besides.", tests),
        ("requirements-docs.lock", "What building the pages needs besides.", docs),
    ):
        lines = merge(answers)
        (ROOT / name).write_text(HEADER.format(what=what) + "\n".join(lines) + "\n")
        print(f"{name}: {len(lines)} lines.")


if __name__ == "__main__":
    main()
