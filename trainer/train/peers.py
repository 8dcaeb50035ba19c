"""Connections between the processes of a run, by which each notices that another one is gone.

Every process has a TCP connection to process 0, opened before jax starts. jax's runtime also
notices a process that is gone, but then calls abort(), which does not name the process and sets the
exit code. This module therefore has to notice it first; an abort() that jax calls nevertheless is
caught by `Peers._catch_aborts`.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import threading
import time
from typing import Any, NoReturn

from trainer.messages import DONE, FAILED, MISTAKE, STOPPED
from trainer.train.connection import Connection, finish

_HEARTBEAT = 1.0  # seconds between two heartbeats
_SUSPENDED = 5.0  # seconds that this thread did not run, after which it waits for heartbeats anew
_GRACE = 5.0  # seconds that the main thread has to end by itself, once a process is gone
_GRACE_AFTER_ERROR = 30.0  # as _GRACE, if this process may be about to end with the same error
_FINISH = 1.0  # seconds that this process, about to end, waits for the others to read its messages

_AGAIN = "Start the same command again on each: the run resumes from its latest checkpoint."
_LATE = (
    "The other processes have ended because this one sent no heartbeat for too long: it was "
    f"stopped, or had no CPU. {_AGAIN}"
)


class Peers:
    """Watches the other processes of the run from a separate thread, until this one ends.

    Args:
        index: of this process, from 0.
        hosts: the host name of each process.
        connections: process 0 has one to each other process, the others one to it.
        silence: seconds without a heartbeat after which a process counts as gone.
    """

    def __init__(self, index: int, hosts: list[str], connections: list[Connection], silence: float):
        self._index = index
        self._hosts = hosts
        self._connections = connections
        self._silence = silence
        self._ending: int | None = None  # the exit code, once this process is about to end
        self._news: tuple[int, str] | None = None  # exit code and sentence
        self._has_news = threading.Event()
        self._until = float("inf")  # when the main thread must have ended by itself
        self._end_once = threading.Lock()
        self._catch_aborts()
        if connections:
            threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def news(self, within: float) -> str | None:
        """Waits for the end of another process.

        Args:
            within: seconds to wait.

        Returns:
            A sentence about the first process that is gone; None if there is none yet.
        """
        self._has_news.wait(within)
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
            self._until = min(self._until, time.monotonic() + _GRACE_AFTER_ERROR)
            self._send_all({"ends": code, "why": why[:2000], "soon": _GRACE_AFTER_ERROR})

    def fail(self, why: str) -> NoReturn:
        """Ends this process with code 1, and the other processes too.

        Process 0 ends last, because jax aborts the others when it ends.

        Args:
            why: the error, which the other processes print.
        """
        self._ending = FAILED
        self._until = time.monotonic() + _GRACE
        self._send_all({"ends": FAILED, "why": why[:2000], "soon": _GRACE})
        if self._index == 0 and self._connections:
            threading.Event().wait(_GRACE + 1)  # the watching thread ends this process sooner
        self.end(FAILED)

    def end(self, code: int, sentence: str = "") -> NoReturn:
        """Ends this process at once; only the first call has an effect.

        Args:
            code: the exit code.
            sentence: printed to stderr as an error, if it is not empty.
        """
        # Another thread is ending the process: wait for that, because this call must not return.
        if not self._end_once.acquire(blocking=False):
            threading.Event().wait()
        if sentence:
            with contextlib.suppress(OSError):
                # Not print(): another thread may hold the lock of the stream, also where it aborts.
                os.write(2, f"error: {sentence}\n".encode())
        finish(self._connections, _FINISH)
        # Not sys.exit(): the main thread may be blocked in a collective, and jax's own exit handler
        # waits for the processes that are gone.
        os._exit(code)

    def _all_closed(self) -> bool:
        return all(connection.closed for connection in self._connections)

    def _name(self, process: int) -> str:
        return f"Process {process} (on {self._hosts[process]})"

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            last_heartbeat = time.monotonic()
            for connection in self._connections:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
                connection.heard = last_heartbeat  # the last process may have connected much later
            while True:
                # More often than a heartbeat is due, because the checks below depend on it.
                for key, _ in selector.select(_HEARTBEAT / 4):
                    if not self._handle_messages(key.data):
                        selector.unregister(key.fileobj)
                        key.data.close()
                now = time.monotonic()
                if now - last_heartbeat > _SUSPENDED:  # this process was stopped, or had no CPU
                    for connection in self._connections:
                        connection.heard = now
                if now - last_heartbeat >= _HEARTBEAT:
                    last_heartbeat = now
                    self._send_all()
                self._check_silence(now)

    def _send_all(self, message: dict[str, Any] | None = None) -> None:
        for connection in self._connections:
            if not connection.closed:
                connection.send(message)

    def _handle_messages(self, connection: Connection) -> bool:
        """Handles the messages of a process; returns whether its connection is still open."""
        messages = connection.receive()
        for message in messages or ():
            if "leaves" in message:
                connection.leaving = True
            elif "ends" in message:
                connection.leaving = True
                why = "".join(c if c.isprintable() else " " for c in str(message.get("why")))
                why = why.strip().rstrip(". ")
                sentence = f"{self._name(connection.process)} ended with an error: {why}."
                # After a mistake of the user, starting the same command again would not help.
                mistake = message["ends"] == MISTAKE
                sentence = sentence if mistake else f"{sentence} {_AGAIN}"
                code = MISTAKE if mistake else FAILED
                self._record_reason(code, sentence, float(message["soon"]))
            elif "gone" in message:
                code, sentence = int(message["code"]), str(message["gone"])
                self._record_reason(code, sentence, float(message["soon"]))
        if messages is None and not (connection.leaving and self._ending is not None):
            self._record_reason(
                FAILED,
                f"{self._name(connection.process)} is gone: it closed its connection without a "
                f"message, so it was killed, crashed, or its machine failed. {_AGAIN}",
            )
            if connection.process == 0:
                self._until = 0.0  # before jax's runtime aborts this process
        return messages is not None

    def _record_reason(
        self, code: int, sentence: str, soon: float | None = None, about: int | None = None
    ) -> None:
        """Records why the run cannot continue; only the first reason counts."""
        if self._news is not None:
            return
        soon = _GRACE if soon is None else soon
        self._news = (code, sentence)
        self._has_news.set()
        self._until = min(self._until, time.monotonic() + soon)
        # Only process 0 is connected to all others, so that it passes the news on.
        if self._index == 0:
            for connection in self._connections:
                own = _LATE if connection.process == about else sentence
                connection.send({"gone": own, "code": code, "soon": soon})

    def _check_silence(self, now: float) -> None:
        for connection in self._connections:
            if not connection.closed and now - connection.heard > self._silence:
                self._record_reason(
                    FAILED,
                    f"{self._name(connection.process)} has sent no heartbeat for "
                    f"{self._silence:g} s (--peer_timeout): it is stopped or hangs, or its machine "
                    f"or network failed. End it if it is still there. {_AGAIN}",
                    about=connection.process,
                )
                self._until = now  # the main thread waits for a process that does not answer
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
            sentence = f"jax's runtime aborted this process: {cause}. {_AGAIN}"
            self.end(*(self._news or (FAILED, sentence)))

        kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
        self._handler = kind(aborted)  # C keeps no reference to it
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, kind], ctypes.c_void_p
        libc.signal(signal.SIGABRT, self._handler)
