"""Connections between the processes of a run, over which each learns when another is gone.

Every process holds one TCP connection to process 0, made before jax starts. jax's own runtime also
notices a process that is gone, but then calls abort(), which neither names the process nor leaves
the exit code to us. So ours must notice first; what jax aborts all the same is caught at the end.

The connections carry one JSON object a line; an empty line says that the sender is alive.
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

_BEAT = 1.0  # seconds between two signs of life
_STARVED = 5.0  # seconds without a beat of its own after which a process blames nobody else
_GRACE = 5.0  # seconds that the main thread has to end by itself, once a process is gone
_TOGETHER = 30.0  # the same where it may be about to end in the same way as the other process
_SENDING = 5.0  # seconds; a message is smaller than what the system buffers

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
        """Sends a message, or a sign of life; a connection that is broken shows when it is read."""
        text = json.dumps(message) if message else ""
        with self._lock, contextlib.suppress(OSError):
            self.connection.sendall(f"{text}\n".encode())

    def receive(self) -> list[dict[str, Any]] | None:
        """Waits for something to come; returns its messages, or None at the end."""
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
        """Returns the next message, or an empty one if none comes within some seconds.

        It reads no byte further, so that what comes next wakes the thread that will wait for it.
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
        self.closed = True
        self.connection.close()


class Peers:
    """Watches the other processes of the run from a thread of its own, until this one ends.

    Args:
        index: the number of this process.
        hosts: the host name of each process.
        lines: the connections: process 0 has one to each other process, which have one to it.
        silence: seconds after which a process that gave no sign of life is taken for gone.
    """

    def __init__(self, index: int, hosts: list[str], lines: list[Line], silence: float):
        self._index = index
        self._hosts = hosts
        self._lines = lines
        self._silence = silence
        self._ending: int | None = None  # the exit code, once this process is on its way out
        self._news: tuple[int, str] | None = None  # exit code and sentence
        self._told = threading.Event()
        self._until = float("inf")  # when the main thread must have ended by itself
        self._once = threading.Lock()
        self._catch_aborts()
        if lines:
            threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def news(self, within: float) -> str | None:
        """Returns the sentence on a process that is gone, waiting some seconds for one to come."""
        self._told.wait(within)
        return self._news[1] if self._news else None

    def leave(self, code: int, why: str = "its own output says which") -> None:
        """Says that this process is about to end in the ordinary way, as the others may be too.

        Args:
            code: its exit code. After 0 and 75 it waits for the others; after any other code
                those that do not end by themselves are ended.
            why: what went wrong, for them to print.
        """
        self._ending = code
        if code in (0, 75):
            self._send_all({"leaves": code})
        else:
            self._until = min(self._until, time.monotonic() + _TOGETHER)
            self._send_all({"ends": code, "why": why[:2000], "soon": _TOGETHER})

    def fail(self, why: str) -> NoReturn:
        """Ends this process with code 1, and the others with it.

        Process 0 ends after the others: jax would abort those that it leaves behind.
        """
        self._ending = 1
        self._until = time.monotonic() + _GRACE
        self._send_all({"ends": 1, "why": why[:2000], "soon": _GRACE})
        if self._index == 0 and self._lines:
            threading.Event().wait(_GRACE + 1)  # the other thread ends it sooner
        self.end(1)

    def end(self, code: int, sentence: str = "") -> NoReturn:
        """Ends this process at once, with a sentence; the first caller decides."""
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
                line.heard = beaten  # it may have waited long for the last process to come
            while True:
                for key, _ in selector.select(_BEAT / 4):
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                        key.data.close()
                now = time.monotonic()
                if now - beaten > _STARVED:  # this process was stopped itself, or had no CPU
                    for line in self._lines:
                        line.heard = now
                if now - beaten >= _BEAT:
                    beaten = now
                    self._send_all()
                self._judge(now)

    def _send_all(self, message: dict[str, Any] | None = None) -> None:
        for line in self._lines:
            if not line.closed:
                line.send(message)

    def _read(self, line: Line) -> bool:
        """Reads what a process says; returns whether its connection still stands."""
        messages = line.receive()
        for message in messages or ():
            if "leaves" in message:
                line.leaving = True
            elif "ends" in message:
                line.leaving = True
                why = "".join(c if c.isprintable() else " " for c in str(message.get("why")))
                why = why.strip().rstrip(". ")
                sentence = f"{self._name(line.process)} ended with an error: {why}."
                mistake = message["ends"] == 2  # the same command would end in the same way
                sentence = sentence if mistake else f"{sentence} {_AGAIN}"
                self._hear(2 if mistake else 1, sentence, float(message["soon"]))
            elif "gone" in message:
                self._hear(int(message["code"]), str(message["gone"]), float(message["soon"]))
        if messages is None and not (line.leaving and self._ending is not None):
            self._hear(
                1,
                f"{self._name(line.process)} is gone: it ended without a word, so it was killed, "
                f"crashed, or its machine failed. {_AGAIN}",
            )
            if line.process == 0:
                self._until = 0.0  # before jax's runtime aborts this process
        return messages is not None

    def _hear(
        self, code: int, sentence: str, soon: float | None = None, about: int | None = None
    ) -> None:
        """Notes why the run cannot go on; the first reason is the one that counts."""
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

    def _judge(self, now: float) -> None:
        for line in self._lines:
            if not line.closed and now - line.heard > self._silence:
                self._hear(
                    1,
                    f"{self._name(line.process)} has given no sign of life for "
                    f"{self._silence:g} s (--peer_timeout): it is stopped or hangs, or its machine "
                    f"or network failed. End it if it is still there. {_AGAIN}",
                    about=line.process,
                )
                self._until = now  # nothing that the main thread waits for will come
        if self._ending not in (None, 0, 75):
            if now >= self._until or (self._index == 0 and self._all_closed()):
                self.end(self._ending or 1)
        elif now >= self._until and self._news is not None:
            self.end(*self._news)

    def _catch_aborts(self) -> None:
        """Ends this process with a sentence of ours where C++ calls abort().

        Python's own handlers run only after the signal's handler has returned, and abort() does
        not wait for that. A handler in C is called in the thread that aborts, at a point where
        that thread may take the interpreter's lock.
        """

        def aborted(number: int) -> None:
            time.sleep(0.2)  # for the other thread to hear of process 0's end
            if self._ending not in (None, 0, 75):
                self.end(self._ending or 1)
            cause = f"{self._name(0)}, which coordinates the others, is gone"
            if self._index == 0:
                cause = "its own message says why"
            self.end(*(self._news or (1, f"jax's runtime broke off: {cause}. {_AGAIN}")))

        kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
        self._handler = kind(aborted)  # C keeps no reference to it
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, kind], ctypes.c_void_p
        libc.signal(signal.SIGABRT, self._handler)
