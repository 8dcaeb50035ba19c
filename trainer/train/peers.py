"""Connections between the processes of a run, by which each notices that another one is gone.

Every process has a TCP connection to process 0, opened before jax starts. jax's runtime also
notices a process that is gone, but then calls abort(), which does not name the process and sets the
exit code. This module therefore has to notice it first; an abort() that jax calls nevertheless is
caught by `Peers._catch_aborts`.

A message is one JSON object in a line; an empty line is a sign of life.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import threading
import time
from typing import Any, NoReturn

from trainer.messages import DONE, FAILED, MISTAKE, STOPPED

_BEAT = 1.0  # seconds between two signs of life
_STARVED = 5.0  # seconds that this thread did not run, after which no silence of others counts
_GRACE = 5.0  # seconds that the main thread has to end by itself, once a process is gone
_TOGETHER = 30.0  # as _GRACE, if this process may be about to end with the same error
_SENDING = 5.0  # seconds; sending hardly blocks, because a message fits into the system's buffer

_AGAIN = "Start the same command again on each: the run resumes from its latest checkpoint."
_LATE = (
    "The other processes have ended without this one, which gave no sign of life for too long: it "
    f"was stopped, or had no CPU. {_AGAIN}"
)


class Line:
    """A connection to another process."""

    def __init__(self, connection: socket.socket, process: int):
        self.connection = connection
        self.process = process
        self.heard = time.monotonic()
        self.leaving = False
        self.closed = False
        self._unread = b""
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any] | None = None) -> None:
        """Sends a message, or a sign of life; a broken connection shows when it is read."""
        text = json.dumps(message) if message else ""
        with self._lock, contextlib.suppress(OSError):
            self.connection.sendall(f"{text}\n".encode())

    def receive(self) -> list[dict[str, Any]] | None:
        """Waits for data, and returns its messages; None if the connection was closed."""
        try:
            read = self.connection.recv(1 << 16)
            *whole, self._unread = (self._unread + read).split(b"\n")
            messages = [json.loads(line) for line in whole if line]
        except (OSError, ValueError):
            return None
        if not read or len(self._unread) > 1 << 20:
            return None
        self.heard = time.monotonic()
        return [message for message in messages if isinstance(message, dict)]

    def first(self, seconds: float) -> dict[str, Any]:
        """Returns the next message, or an empty one if none arrives within some seconds.

        It reads no byte beyond that message, so that later ones wake the thread that watches.
        """
        until, line = time.monotonic() + seconds, b""
        try:
            while not line.endswith(b"\n") or line == b"\n":
                line = b"" if line == b"\n" else line
                self.connection.settimeout(max(until - time.monotonic(), 1e-3))
                read = self.connection.recv(1)
                if not read or len(line) > 1 << 20:
                    return {}
                line += read
            message = json.loads(line)
        except (OSError, ValueError):
            return {}
        finally:
            self.connection.settimeout(_SENDING)
        return message if isinstance(message, dict) else {}

    def close(self) -> None:
        """Closes the connection."""
        self.closed = True
        self.connection.close()


class Peers:
    """Watches the other processes of the run from a separate thread, until this one ends.

    Args:
        index: of this process, from 0.
        hosts: the host name of each process.
        lines: the connections: process 0 has one to each other process, the others one to it.
        silence: seconds without a sign of life after which a process counts as gone.
    """

    def __init__(self, index: int, hosts: list[str], lines: list[Line], silence: float):
        self._index = index
        self._hosts = hosts
        self._lines = lines
        self._silence = silence
        self._ending: int | None = None  # the exit code, once this process is about to end
        self._news: tuple[int, str] | None = None  # exit code and sentence
        self._told = threading.Event()
        self._until = float("inf")  # when the main thread must have ended by itself
        self._once = threading.Lock()
        self._catch_aborts()
        if lines:
            threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def news(self, within: float) -> str | None:
        """Waits some seconds for a process to be gone; returns a sentence about it, or None."""
        self._told.wait(within)
        return self._news[1] if self._news else None

    def leave(self, code: int, why: str = "its own output names it") -> None:
        """Announces that this process is about to end normally.

        Args:
            code: its exit code. After 0 and 75 this process waits for the others; after any other
                code the processes that do not end by themselves are ended.
            why: the error, which the other processes print.
        """
        self._ending = code
        if code in (DONE, STOPPED):
            self._send_all({"leaves": code})
        else:
            self._until = min(self._until, time.monotonic() + _TOGETHER)
            self._send_all({"ends": code, "why": why[:2000], "soon": _TOGETHER})

    def fail(self, why: str) -> NoReturn:
        """Ends this process with code 1, and the other processes too.

        Process 0 ends last, because jax aborts the others when it ends.
        """
        self._ending = FAILED
        self._until = time.monotonic() + _GRACE
        self._send_all({"ends": FAILED, "why": why[:2000], "soon": _GRACE})
        if self._index == 0 and self._lines:
            threading.Event().wait(_GRACE + 1)  # the watching thread ends this process sooner
        self.end(FAILED)

    def end(self, code: int, sentence: str = "") -> NoReturn:
        """Prints a sentence and ends this process at once; only the first call has an effect."""
        if not self._once.acquire(blocking=False):
            threading.Event().wait()
        if sentence:
            with contextlib.suppress(OSError):
                os.write(2, f"error: {sentence}\n".encode())
        os._exit(code)

    def _all_closed(self) -> bool:
        return all(line.closed for line in self._lines)

    def _name(self, process: int) -> str:
        return f"Process {process} (on {self._hosts[process]})"

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            beaten = time.monotonic()
            for line in self._lines:
                selector.register(line.connection, selectors.EVENT_READ, line)
                line.heard = beaten  # the last process may have connected much later
            while True:
                for key, _ in selector.select(_BEAT / 4):
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                        key.data.close()
                now = time.monotonic()
                if now - beaten > _STARVED:  # this process was suspended itself, or had no CPU
                    for line in self._lines:
                        line.heard = now
                if now - beaten >= _BEAT:
                    beaten = now
                    self._send_all()
                self._check_silence(now)

    def _send_all(self, message: dict[str, Any] | None = None) -> None:
        for line in self._lines:
            if not line.closed:
                line.send(message)

    def _read(self, line: Line) -> bool:
        """Handles the messages of a process; returns whether its connection is still open."""
        messages = line.receive()
        for message in messages or ():
            if "leaves" in message:
                line.leaving = True
            elif "ends" in message:
                line.leaving = True
                why = "".join(c if c.isprintable() else " " for c in str(message.get("why")))
                why = why.strip().rstrip(". ")
                sentence = f"{self._name(line.process)} ended with an error: {why}."
                mistake = (
                    message["ends"] == MISTAKE
                )  # starting the same command again would not help
                sentence = sentence if mistake else f"{sentence} {_AGAIN}"
                self._hear(MISTAKE if mistake else FAILED, sentence, float(message["soon"]))
            elif "gone" in message:
                self._hear(int(message["code"]), str(message["gone"]), float(message["soon"]))
        if messages is None and not (line.leaving and self._ending is not None):
            self._hear(
                FAILED,
                f"{self._name(line.process)} is gone: it ended without a word, so it was killed, "
                f"crashed, or its machine failed. {_AGAIN}",
            )
            if line.process == 0:
                self._until = 0.0  # before jax's runtime aborts this process
        return messages is not None

    def _hear(
        self, code: int, sentence: str, soon: float | None = None, about: int | None = None
    ) -> None:
        """Records why the run cannot continue; only the first reason counts."""
        if self._news is not None:
            return
        soon = _GRACE if soon is None else soon
        self._news = (code, sentence)
        self._told.set()
        self._until = min(self._until, time.monotonic() + soon)
        if self._index == 0:
            for line in self._lines:
                own = _LATE if line.process == about else sentence
                line.send({"gone": own, "code": code, "soon": soon})

    def _check_silence(self, now: float) -> None:
        for line in self._lines:
            if not line.closed and now - line.heard > self._silence:
                self._hear(
                    FAILED,
                    f"{self._name(line.process)} has given no sign of life for "
                    f"{self._silence:g} s (--peer_timeout): it is stopped or hangs, or its machine "
                    f"or network failed. End it if it is still there. {_AGAIN}",
                    about=line.process,
                )
                self._until = now  # the main thread waits in vain
        if self._ending not in (None, DONE, STOPPED):
            if now >= self._until or (self._index == 0 and self._all_closed()):
                self.end(self._ending or FAILED)
        elif now >= self._until and self._news is not None:
            self.end(*self._news)

    def _catch_aborts(self) -> None:
        """Installs a SIGABRT handler, which prints a sentence when C++ calls abort().

        It must be a C function: Python's own handlers run only after the signal handler has
        returned, and abort() does not wait for that. The C handler is called in the thread that
        aborts, which may take the interpreter's lock there.
        """

        def aborted(number: int) -> None:
            time.sleep(0.2)  # so that the watching thread notices the end of process 0
            if self._ending not in (None, DONE, STOPPED):
                self.end(self._ending or FAILED)
            cause = f"{self._name(0)}, which coordinates the others, is gone"
            if self._index == 0:
                cause = "see its own message"
            self.end(*(self._news or (FAILED, f"jax's runtime broke off: {cause}. {_AGAIN}")))

        kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
        self._handler = kind(aborted)  # C keeps no reference to it
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, kind], ctypes.c_void_p
        libc.signal(signal.SIGABRT, self._handler)
