"""Logs runs to Weights & Biases; the only file that imports wandb."""

import contextlib
import importlib
import netrc
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from trainer.writers.loggers import Reporter, Row, RunIdentity
from trainer.writers.summary import Summary

PROJECT = "lockstep"  # unless WANDB_PROJECT names one
_SECONDS = 30.0  # how long the server may take for a new run, and for its last rows
_SECONDS_FOR_FILE = 5.0  # how long the file of an offline run may take for its end


class WandbLogger:
    """Logs a run to Weights & Biases, or into files that `wandb sync` uploads."""

    # It is offline if the user asked for that, or if no key of an account is known. `reporter` is
    # told where the run is found.

    def __init__(self, identity: RunIdentity, reporter: Reporter):
        self._wandb: Any = importlib.import_module("wandb")
        self._identity, self._reporter = identity, reporter
        self._run: Any = None
        self._has_ended = False
        # From the environment, or from a file of settings that `wandb offline` wrote.
        settings = self._wandb.setup().settings
        self._mode = settings.mode
        if self._mode == "online" and "WANDB_MODE" not in os.environ and not _has_key(settings):
            self._mode = "offline"

    def open(self) -> int:
        """Returns the last step of the run in the service, or in the files of an offline run."""
        if self._mode == "offline":
            step, self._has_ended = read_offline(self._identity)
            return step
        run = self._started()
        return run.starting_step - 1 if run.resumed else -1

    def write(self, rows: Sequence[Row]) -> None:
        """Adds rows to the history of the run; its steps are those of the run."""
        run, self._has_ended = self._started(), False
        for step, values in rows:
            # Without `commit` the row would wait for the next one.
            run.log(values, step=step, commit=True)

    def close(self, summary: Summary | None) -> None:
        """Adds the summary, and ends the run: with exit code 0 if it is done."""
        done = summary is not None and summary.end in ("done", "diverged")
        if self._run is None and (self._has_ended or not done):
            return
        run = self._started()
        if summary is not None:
            run.summary.update(summary.flat())
            if summary.end == "stopped":
                run.mark_preempting()
        code = 0 if summary is not None and summary.end == "done" else 1
        file = Path(run.settings.sync_file)
        run.finish(exit_code=code)
        self._run = None
        if self._mode == "offline":
            _wait_for_end(file)

    def _started(self) -> Any:
        if self._run is None:
            identity = self._identity
            self._run = self._wandb.init(
                id=identity.id,
                resume="allow",  # a run that was begun is continued
                reinit="create_new",  # the trials of a wave are runs at the same time
                mode=self._mode,
                dir=str(identity.folder),
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=identity.name,
                group=identity.group or None,
                tags=["lockstep"],
                config=dict(identity.config),
                settings=self._wandb.Settings(
                    console="off",  # it would take over the terminal
                    silent=True,
                    init_timeout=_SECONDS,
                    finish_timeout=_SECONDS,
                    finish_timeout_raises=True,
                ),
            )
            if self._mode == "offline":
                folder = identity.folder / "wandb"
                self._reporter.log_once(
                    f"wandb is offline: it writes into {folder}, and"
                    f" `wandb sync {folder}/offline-run-*` uploads that."
                )
            elif self._mode == "online" and not identity.group:
                self._reporter.log_once(f"wandb: {self._run.url}")
        return self._run


def _wait_for_end(file: Path) -> None:
    """Waits until W&B's own process has written the end of an offline run, for some seconds."""
    # `finish` may return before, and a process that continues the run at once would read no rows.
    if not file.exists():
        return
    deadline = time.monotonic() + _SECONDS_FOR_FILE
    with open(file, "rb") as opened:
        read = _START  # how much of the file was read: a record is parsed once
        while time.monotonic() < deadline:
            opened.seek(read)
            for data in _records(opened):
                read = opened.tell()
                if _parsed(data).WhichOneof("record_type") == "exit":
                    return
            time.sleep(0.02)


def _has_key(settings: Any) -> bool:
    """Returns whether a key of an account is known; otherwise wandb would ask for one."""
    if settings.api_key or settings.identity_token_file:
        return True
    host = urlsplit(settings.base_url).hostname or ""
    for file in (os.environ.get("NETRC", "~/.netrc"), "~/_netrc"):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(os.path.expanduser(file)).authenticators(host):
                return True
    return False


def read_offline(identity: RunIdentity) -> tuple[int, bool]:
    """Returns the last step in the files of an offline run, and whether it has ended."""
    # Each process that computed the run left a file, in a folder named after the second in which it
    # began; one that began in the same second has -1 added. Rows that a killed process had not
    # written are missing.
    last, ended = -1, False
    for file in sorted(identity.folder.glob(f"wandb/offline-run-*/run-{identity.id}.wandb")):
        for record in read_records(file):
            if (kind := record.WhichOneof("record_type")) == "history":
                last, ended = max(last, record.history.step.num), False
            elif kind == "exit":
                ended = record.exit.exit_code == 0
    return last, ended


_MAGIC, _START = b":W&B", 7  # what a file begins with, and where its records do
_BLOCK, _HEADER = 2**15, struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_records(file: Path) -> Iterator[Any]:
    """Yields the records of a .wandb file, up to its end or to a torn one."""
    # The file has the layout of LevelDB's logs: blocks of 32 KiB with pieces of records, each after
    # a header with its checksum, length and kind.
    with open(file, "rb") as opened:
        if opened.read(_START).startswith(_MAGIC):
            yield from map(_parsed, _records(opened))


def _parsed(data: bytes) -> Any:
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record()
    record.ParseFromString(data)
    return record


def _records(file: BinaryIO) -> Iterator[bytes]:
    record = b""
    while True:
        rest = _BLOCK - file.tell() % _BLOCK
        if rest < _HEADER.size:  # too short for a header: it is filled with zeros
            file.seek(rest, os.SEEK_CUR)
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return
        _, length, kind = _HEADER.unpack(header)
        piece = file.read(length)
        if len(piece) < length or kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            return
        record = piece if kind in (_FULL, _FIRST) else record + piece
        if kind in (_FULL, _LAST):
            yield record
