"""Records what a process does to a folder, and computes what a loss of power may leave of it.

A file system keeps what was synced. Any other change may or may not be on the disk: a name that was
made or removed, and the new bytes of a file, which may be missing, cut off or read as NULs.
`crash_state` draws one of the possible outcomes; it is a pure function of the log. The rules are
what POSIX allows, which is more than ext4 does: a sync of a file keeps its bytes and not its name,
and names are kept in any order.
"""

import contextlib
import os
import random
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Operation(NamedTuple):
    """One change of the folder.

    Attributes:
        kind: "content" (a file's bytes are now `content`), "link" and "unlink" (a folder's entry
            `name`), "rename" (of the entry `old` to `name` in one folder, in one piece), "sync" (of
            a file or folder), or "mark".
        inode: of the file or folder whose content or entries change, or that is synced.
        name: of the entry; the text of a mark.
        target: the inode that the entry names.
        old: the entry's name before a rename.
        content: the file's new bytes.
    """

    kind: str
    inode: int = 0
    name: str = ""
    target: int = 0
    old: str = ""
    content: bytes = b""


Tree = dict[str, "Tree | bytes"]
Draw = random.Random

# How far the file system had come with what was not synced.
NOTHING, EVERYTHING, NAMES, NULS, ORDERED, ANY = OUTCOMES = (
    "nothing that was not synced",
    "everything, as after a kill",
    "all names, and no byte that was not synced",
    "all names, and NULs for bytes that were not synced",
    "names in the order of their making, bytes at random",
    "names and bytes at random",
)


def crash_state(
    log: Sequence[Operation], folders: frozenset[int], root: int, outcome: str, draw: Draw
) -> Tree:
    """Draws what is on the disk when power is lost after the last operation of a log.

    Args:
        log: all operations up to the loss.
        folders: the inodes that are folders.
        root: the inode of the outermost folder, which is taken to be on the disk.
        outcome: one of OUTCOMES.
        draw: makes the random choices.

    Returns:
        The tree below the root: name -> bytes of a file, or the tree of a folder.
    """
    synced = {op.inode: at for at, op in enumerate(log) if op.kind == "sync"}
    cut = draw.randint(0, len(log))
    contents: dict[int, list[tuple[bool, bytes]]] = {}
    entries: dict[int, dict[str, int]] = {}
    for at, op in enumerate(log):
        durable = at < synced.get(op.inode, -1)
        if op.kind == "content":
            contents.setdefault(op.inode, []).append((durable, op.content))
        elif op.kind in ("link", "unlink", "rename"):
            kept = {
                NOTHING: False,
                ORDERED: at < cut,
                ANY: draw.random() < 0.5,
            }.get(outcome, True)
            if durable or kept:
                names = entries.setdefault(op.inode, {})
                if op.kind != "link":
                    names.pop(op.old or op.name, None)
                if op.kind != "unlink":
                    names[op.name] = op.target
    files = {inode: _bytes_left(all_, outcome, draw) for inode, all_ in contents.items()}

    def tree(inode: int) -> Tree:
        return {
            name: tree(target) if target in folders else files.get(target, b"")
            for name, target in entries.get(inode, {}).items()
        }

    return tree(root)


def _bytes_left(contents: Sequence[tuple[bool, bytes]], outcome: str, draw: Draw) -> bytes:
    """Returns what a file may hold; contents: its bytes one after the other, with "synced"."""
    before = next((content for durable, content in reversed(contents) if durable), b"")
    later = [content for durable, content in contents if not durable]
    if not later or outcome in (NOTHING, NAMES):
        return before
    if outcome == EVERYTHING:
        return later[-1]
    grew = all(content.startswith(before) for content in later)
    safe = len(before) if grew else 0
    if outcome == NULS:
        return later[-1][:safe] + bytes(len(later[-1]) - safe)
    after = draw.choice(later)
    length = draw.randint(safe, len(after))
    nuls = draw.randint(safe, len(after))
    return draw.choice(
        (
            before,
            after,
            after[:length],
            after[:length] + bytes(len(after) - length),
            after[:safe] + bytes(nuls - safe) + after[nuls:],
        )
    )


def write_tree(tree: Mapping[str, Any], folder: Path) -> None:
    """Makes a folder that holds a tree."""
    folder.mkdir(mode=0o700)
    for name, content in tree.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            write_tree(content, folder / name)


class Recorder:
    """Logs what this process does to a folder, in `log`, while it is entered.

    Python's calls that change names or sync are caught, and the folder is compared with what it was
    before and after each of them. What others write, tensorstore's C++ for one, shows in that
    comparison too; its own syncs do not, so that nothing relies on them.

    Args:
        root: the folder; only what is made in it from now on is recorded.
    """

    def __init__(self, root: Path):
        self.log: list[Operation] = []
        self.folders: set[int] = set()
        self.root = os.stat(root).st_ino
        self._path = root
        self._lock = threading.RLock()
        self._names: dict[int, dict[str, int]] = {self.root: {}}
        self._seen: dict[int, _File] = {}
        self._held: dict[int, int] = {}  # open, so that no number of a file is used again
        self._undo = contextlib.ExitStack()

    def mark(self, text: str) -> None:
        """Notes that something was reached."""
        with self._lock:
            self._look()
            self.log.append(Operation("mark", name=text))

    def __enter__(self) -> "Recorder":
        for name in ("rename", "replace", "mkdir", "unlink", "remove", "rmdir", "truncate"):
            self._catch(name, lambda inner, *args, **options: inner(*args, **options))
        for name in ("fsync", "fdatasync"):
            self._catch(name, self._sync)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        with self._lock:
            self._look()
        for descriptor in self._held.values():
            os.close(descriptor)

    def _catch(self, name: str, act: Callable[..., Any]) -> None:
        inner = getattr(os, name)

        def caught(*args: Any, **options: Any) -> Any:
            with self._lock:
                self._look()
                try:
                    return act(inner, *args, **options)
                finally:
                    self._look()

        setattr(os, name, caught)
        self._undo.callback(setattr, os, name, inner)

    def _sync(self, inner: Callable[[int], None], file: Any) -> None:
        inode = os.fstat(file).st_ino
        inner(file)
        if inode in self._names or inode in self._seen:
            self.log.append(Operation("sync", inode))

    def _look(self) -> None:
        """Logs what has changed since the last look."""
        while True:
            try:
                names, files = self._scan()
                break
            except FileNotFoundError:  # something was renamed meanwhile
                continue
        self.folders |= set(names)
        for inode, (_, _, content) in files.items():
            if inode not in self._seen or self._seen[inode].content != content:
                self.log.append(Operation("content", inode, content=content))
        self._seen |= files
        for inode, now in names.items():
            self.log += _differences(inode, self._names.get(inode, {}), now)
        self._names |= names

    def _scan(self) -> tuple[dict[int, dict[str, int]], dict[int, "_File"]]:
        names: dict[int, dict[str, int]] = {}
        files: dict[int, _File] = {}
        todo = [(self.root, self._path)]
        while todo:
            folder, path = todo.pop()
            names[folder] = {}
            for name in os.listdir(path):
                inode, found = self._hold(path / name)
                names[folder][name] = inode
                if stat.S_ISDIR(found.st_mode):
                    todo.append((inode, path / name))
                else:
                    files[inode] = self._file(inode, found, path / name)
        return names, files

    def _hold(self, path: Path) -> tuple[int, os.stat_result]:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
        found = os.fstat(descriptor)
        if self._held.setdefault(found.st_ino, descriptor) != descriptor:
            os.close(descriptor)
        return found.st_ino, found

    def _file(self, inode: int, found: os.stat_result, path: Path) -> "_File":
        known, now = self._seen.get(inode), time.time_ns()
        stamp = found.st_mtime_ns, found.st_size
        # A clock that ticks every few milliseconds stamps two writes alike.
        if known and known.stamp == stamp and known.read_at > found.st_mtime_ns + 10**8:
            return known
        return _File(stamp, now, path.read_bytes())


class _File(NamedTuple):
    """What a file was when it was read: its time of change and size, and when that was."""

    stamp: tuple[int, int]
    read_at: int
    content: bytes


def _differences(
    inode: int, before: Mapping[str, int], now: Mapping[str, int]
) -> Iterator[Operation]:
    """Yields the operations that lead from some entries of a folder to others."""
    gone = {target: name for name, target in before.items() if now.get(name) != target}
    for name, target in now.items():
        if before.get(name) == target:
            continue
        if target in gone:
            yield Operation("rename", inode, name, target, old=gone.pop(target))
        else:
            yield Operation("link", inode, name, target)
    for name in gone.values():
        if name not in now:
            yield Operation("unlink", inode, name)
