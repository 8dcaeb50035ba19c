"""The user's code in a referee: copies of its packages, from which runs import them.

The packages of --vocabulary are copied to code/HASH in the folder of the referee when it starts and
when a change is tried. The runs of a config import them from its own copy, so that an edit is part
of the next try, and not of its baseline. Modules beside the packages, which are not copied, must
stay as they are.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from trainer.config import Config
from trainer.config.tree import Call, walk
from trainer.config.vocabulary import Vocabulary
from trainer.messages import UserError, joined
from trainer.studies.challenge import is_under
from trainer.sweep.ledger import sha256
from trainer.workdir import code
from trainer.writers.files import read_regular, replace_file

_MOST = 64 << 20  # bytes of a copy


def keep(judge: Path, packages: Sequence[str]) -> str:
    """Copies packages into the folder of a referee; returns the hash of the copy, "" of none."""
    found = {name: file.read_bytes() for name, file in _files_of(packages)}
    if not found:
        return ""
    if (size := sum(map(len, found.values()))) > _MOST:
        raise UserError(
            f"The files of {joined([*packages])} have {size / 1e6:,.0f} MB, of which a referee"
            f" keeps a copy for each try, and {_MOST / 1e6:.0f} MB are the most: move those that"
            " are no code out of the package."
        )
    hash = _hash(found)
    folder, new = judge / "code" / hash, judge / "code" / "new"
    if not folder.exists():
        shutil.rmtree(new, ignore_errors=True)
        for name, content in found.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            replace_file(new / name, content)
        new.rename(folder)
    return hash


def copy_of(judge: Path, hash: str) -> Path | None:
    """Returns the folder of a copy; raises UserError if it was changed, None for no code."""
    if not hash:
        return None
    folder = judge / "code" / hash
    if _hash({name: read_regular(file) for name, file in _files(folder, folder)}) != hash:
        raise UserError(f"{folder} was changed: restore it, or start another referee.")
    return folder


def _hash(files: Mapping[str, bytes]) -> str:
    return sha256(json.dumps({x: sha256(files[x]) for x in sorted(files)}).encode())


def _files_of(packages: Sequence[str]) -> Iterator[tuple[str, Path]]:
    Vocabulary(packages)  # imports them
    for top in _tops(packages):
        for place in code.places(top):
            if not code.is_installed(place):
                yield from _files(place, place.parent)


def _files(place: Path, start: Path) -> Iterator[tuple[str, Path]]:
    """Yields name and path of the files of a package or module; Python's and hidden ones not."""
    for file in [place] if place.is_file() else sorted(place.rglob("*")):
        name = file.relative_to(start)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        if not hidden and file.is_file():
            yield name.as_posix(), file


def edits(judge: Path, old: str, new: str) -> list[str]:
    """Returns the functions, and files, in which two copies differ, by their hashes."""
    found = []
    for hash in (old, new):
        folder = copy_of(judge, hash)
        names = [] if folder is None else [*_files(folder, folder)]
        parts = (code.hashes_of(name, read_regular(file)) for name, file in names)
        found.append({name: hash for each in parts for name, hash in each.items()})
    # With other comments, no function differs.
    names = {x for x in found[0].keys() | found[1].keys() if "::" not in x}
    return code.differing_files(*found) or sorted(
        x for x in names if found[0].get(x) != found[1].get(x)
    )


def refuse_edits_beside(before: Mapping[str, str], packages: Sequence[str]) -> None:
    """Raises UserError if a module outside the packages differs from the code before, by hashes."""
    now, tops = code.hashes(packages), _tops(packages)
    beside = [
        name
        for name in code.differing_files(before, now)
        if name in before and name in now and re.split(r"[/.]", name)[0] not in tops
    ]
    if beside:
        raise UserError(
            f"{joined(beside)} is not as when the baseline ran with it, and both runs of a pair"
            " would change: restore it, as only the packages of --vocabulary may be edited."
        )


def refuse_edits(
    edited: Sequence[str], packages: Sequence[str], configs: Iterable[Config], free: Sequence[str]
) -> None:
    """Raises UserError if a try edits a module that it must not."""
    # That is one with a function that the configs name at another path than the `free` ones.
    named = [*_named(configs, packages)]
    fixed = {file: (path, name) for path, name, file, _ in named if not is_under(path, free)}
    may = {f"{file}::{own}" for path, _, file, own in named if is_under(path, free)}
    for each in edited:
        file = each.partition("::")[0]
        if file in fixed and each not in may:
            path, name = fixed[file]
            raise UserError(
                f"A try must not edit {each}: {name} is defined there, which is {path} of the"
                f" config, and a try may change {joined(free)}."
            )


def _tops(packages: Sequence[str]) -> list[str]:
    return [*dict.fromkeys(each.partition(".")[0] for each in packages)]


def _named(
    configs: Iterable[Config], packages: Sequence[str]
) -> Iterator[tuple[str, str, str, str]]:
    """Yields path, name in the config, file and name there of each function of the packages."""
    known, tops = Vocabulary(packages), _tops(packages)
    for config in configs:
        for path, call in walk(config.root):
            if isinstance(call, Call) and call.name.partition(".")[0] in tops:
                file, _, own = code.hashed_name(known.function(call.name).call).partition("::")
                yield path, call.name, file, own
