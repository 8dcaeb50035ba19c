"""Asks git about a checkout, without running programs that the checkout's settings name."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path


def head(root: Path) -> str | None:
    """Returns the commit of a checkout; None if git fails.

    Args:
        root: the top folder of the checkout.
    """
    commit = _git(root, "rev-parse", "HEAD")
    return None if commit is None else commit.decode().strip()


def changes(root: Path, within: Path | None = None) -> bytes | None:
    """Returns the uncommitted changes of a checkout as a diff; None if git fails.

    Args:
        root: the top folder of the checkout.
        within: limits the changes to a file or folder; None for the whole checkout.
    """
    # Diff drivers and text conversions are programs that the checkout's settings name, and a
    # submodule has settings of its own.
    quiet = ("--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
    paths = () if within is None else ("--", str(within))
    return _git(root, "diff", *quiet, "HEAD", *paths, environment=_no_filters(root))


def untracked(root: Path, within: Path) -> bytes | None:
    """Lists the files under a path that are neither tracked nor ignored.

    Args:
        root: the top folder of the checkout.
        within: a file or folder in it.

    Returns:
        Paths, each followed by a null byte; None if git fails.
    """
    return _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", str(within))


def _no_filters(root: Path) -> dict[str, str]:
    """Returns environment variables that disable every filter in the checkout's settings."""
    names = _git(root, "config", "-z", "--name-only", "--get-regexp", r"^filter\.") or b""
    variables = sorted({os.fsdecode(name) for name in names.split(b"\0") if name})
    # git reads these variables after the checkout's settings, so that they override them.
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
