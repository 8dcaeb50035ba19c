"""Connections between the processes of a run, by which each notices that another one is gone.

Every process has a TCP connection to process 0, opened before jax starts: jax alone crashes if the
coordinator's port is in use, and aborts without naming it if a process is missing. jax's runtime
also notices a process that is gone later, but then calls abort(), which does not name the process
and sets the exit code. This module therefore has to notice it first; an abort() that jax calls
nevertheless is caught by `Peers._catch_aborts`.

A message is one JSON object in a line; an empty line is a heartbeat. Start with `connect`.
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
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from trainer.messages import DONE, FAILED, MISTAKE, STOPPED, UserError

_SEND_TIMEOUT = 5.0  # seconds; sending hardly blocks: a message fits into the system's buffer


class Connection:
    """A connection to another process, which sends and receives messages."""

    # `process` is the index of the other process. `heard` is when its last data arrived, in seconds
    # of `time.monotonic`, and `leaving` whether it announced that it is about to end.

    def __init__(self, connected: socket.socket, process: int):
        self.socket, self.process = connected, process
        self.heard = time.monotonic()
        self.leaving, self.closed = False, False
        self._unread = b""
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any] | None = None) -> None:
        """Sends a message, or a heartbeat if it is None; never raises."""
        # An error of a broken connection is noticed when it is read.
        text = json.dumps(message) if message else ""
        # Two threads send: the main one, and the one that watches.
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(f"{text}\n".encode())

    def receive(self) -> list[dict[str, Any]] | None:
        """Waits for data, and returns its messages; None if the connection was closed."""
        try:
            read = self.socket.recv(1 << 16)
            *whole, self._unread = (self._unread + read).split(b"\n")
            messages = [json.loads(line) for line in whole if line]
        except (OSError, ValueError):
            return None
        # A message of ours is far shorter than 1 MiB: this is another program.
        if not read or len(self._unread) > 1 << 20:
            return None
        self.heard = time.monotonic()
        return [message for message in messages if isinstance(message, dict)]

    def receive_one(self, seconds: float) -> dict[str, Any]:
        """Waits at most so many seconds for the next message, and returns {} if none arrives."""
        # It reads no byte beyond that message, so that later ones wake the thread that watches.
        until, line = time.monotonic() + seconds, b""
        try:
            while not line.endswith(b"\n") or line == b"\n":
                line = b"" if line == b"\n" else line
                self.socket.settimeout(max(until - time.monotonic(), 1e-3))
                if not (read := self.socket.recv(1)) or len(line) > 1 << 20:
                    return {}
                line += read
            message = json.loads(line)
        except (OSError, ValueError):
            return {}
        finally:
            self.socket.settimeout(_SEND_TIMEOUT)
        return message if isinstance(message, dict) else {}

    def close(self) -> None:
        """Closes the socket."""
        self.closed = True
        self.socket.close()


def finish(connections: Iterable[Connection], seconds: float) -> None:
    """Waits until the others have received all that was sent and closed the connections."""
    # A process that ends with unread data in a socket resets its connection. The reset may arrive
    # before a message that was sent just before it, and the message is lost then. Nothing can be
    # sent over the connections afterwards. Waits at most `seconds` for all of them.
    until = time.monotonic() + seconds
    sockets = [connection.socket for connection in connections if not connection.closed]
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_WR)
    for one in sockets:
        with contextlib.suppress(OSError):
            while (left := until - time.monotonic()) > 0:
                one.settimeout(left)
                if not one.recv(1 << 16):
                    break


# Watching the other processes.

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
    """Watches the other processes of the run from a separate thread, until this one ends."""

    # Process 0 has a connection to each other process, and the others have one to it. A process
    # counts as gone after `silence` seconds without a heartbeat.

    def __init__(self, index: int, hosts: list[str], connections: list[Connection], silence: float):
        self._index, self._hosts = index, hosts
        self._connections, self._silence = connections, silence
        self._ending: int | None = None  # the exit code, once this process is about to end
        self._news: tuple[int, str] | None = None  # exit code and sentence
        self._has_news = threading.Event()
        self._until = float("inf")  # when the main thread must have ended by itself
        self._end_once = threading.Lock()
        self._catch_aborts()
        if connections:
            threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def wait_for_end(self, within: float) -> str | None:
        """Waits at most `within` seconds; returns a sentence about the first that is gone."""
        # None if no other process is gone yet.
        self._has_news.wait(within)
        return self._news[1] if self._news else None

    def leave(self, code: int, why: str = "its own output names it") -> None:
        """Announces that this process is about to end normally."""
        # After the exit codes 0 and 75 this process waits for the others. After any other code the
        # processes that do not end by themselves are ended, and print `why`, the error.
        self._ending = code
        if code in (DONE, STOPPED):
            self._send_all({"leaves": code})
        else:
            self._until = min(self._until, time.monotonic() + _GRACE_AFTER_ERROR)
            self._send_all({"ends": code, "why": why[:2000], "soon": _GRACE_AFTER_ERROR})

    def fail(self, why: str) -> NoReturn:
        """Ends this process with code 1, and the others too, which print the error `why`."""
        # Process 0 ends last, because jax aborts the others when it ends.
        self._ending = FAILED
        self._until = time.monotonic() + _GRACE
        self._send_all({"ends": FAILED, "why": why[:2000], "soon": _GRACE})
        if self._index == 0 and self._connections:
            threading.Event().wait(_GRACE + 1)  # the watching thread ends this process sooner
        self.end(FAILED)

    def end(self, code: int, sentence: str = "") -> NoReturn:
        """Ends this process at once, with an error on stderr; only the first call has an effect."""
        # Another thread is ending the process: wait for that, because this call must not return.
        if not self._end_once.acquire(blocking=False):
            threading.Event().wait()
        if sentence:
            with contextlib.suppress(OSError):
                # Not print(): a thread may hold the lock of the stream, even the one that aborts.
                os.write(2, f"error: {sentence}\n".encode())
        finish(self._connections, _FINISH)
        # Not sys.exit(): the main thread may be blocked in a collective, and jax's own exit handler
        # waits for the processes that are gone.
        os._exit(code)

    def _name(self, process: int) -> str:
        return f"Process {process} (on {self._hosts[process]})"

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            last_heartbeat = time.monotonic()
            for connection in self._connections:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
                connection.heard = last_heartbeat  # the last process may have connected much later
            while True:
                # Wake more often than heartbeats are due, for the checks below.
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
                self._until = now  # end at once: the main thread waits for that silent process
        if self._ending not in (None, DONE, STOPPED):
            closed = all(connection.closed for connection in self._connections)
            if now >= self._until or (self._index == 0 and closed):
                self.end(self._ending or FAILED)
        elif now >= self._until and self._news is not None:
            self.end(*self._news)

    def _catch_aborts(self) -> None:
        """Installs a SIGABRT handler, which prints a sentence when C++ calls abort()."""
        # It must be a C function: Python's own handlers run only after the signal handler has
        # returned, and abort() does not wait for that. The C handler is called in the thread that
        # aborts, which may take the interpreter's lock there.

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


# Finding the other processes, before jax starts.

_HELLO = 5.0  # seconds within which the other end of a new connection must identify itself
_ATTEMPT = 10.0  # seconds that one attempt to reach process 0 may take
_RETRY = 0.2  # seconds between two attempts


def connect(address: str, count: int, index: int, *, wait: float, silence: float) -> Peers:
    """Connects this process to the others; raises UserError if one is missing."""
    # `address` is HOST:PORT of process 0, where jax's coordinator will listen. All must have
    # connected within `wait` seconds; a process counts as gone after `silence` seconds without a
    # heartbeat. UserError also if two have one `index`, which counts from 0, or the port is in use.
    host, port = _split(address, "JAX_COORDINATOR_ADDRESS")
    if count < 1:
        raise UserError(f"The run has {count} processes, and must have at least 1.")
    if not 0 <= index < count:
        raise UserError(
            f"This process has the number {index}, and the run has {count} processes: their "
            f"numbers are 0 to {count - 1}."
        )
    hello = {"lockstep": index, "of": count, "host": socket.gethostname()}
    if index == 0:
        with _listener(port) as listener:
            connections, hosts = _accept_all(listener, hello, address, wait)
        return Peers(0, hosts, connections, silence)
    connection, hosts = _connect_to_process_0(host, port, hello, address, wait)
    return Peers(index, hosts, [connection], silence)


def _split(address: str, name: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 1 << 16:
        raise UserError(f"{name} is {address!r}, and must be HOST:PORT, such as node1:12345.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _listener(port: int) -> socket.socket:
    """Listens where jax's coordinator will; raises UserError if the port is in use."""
    # The default of jax. Its coordinator listens there as soon as this listener is closed.
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or f"[::]:{port}"
    host, port = _split(bind, "JAX_COORDINATOR_BIND_ADDRESS")
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        if both or ":" in host:
            return socket.create_server(
                (host, port), family=socket.AF_INET6, dualstack_ipv6=both, backlog=1024
            )
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise UserError(
            f"Process 0 cannot listen at {bind}: {os.strerror(error.errno or 0)}. End the program "
            "that uses the port (a process of an earlier run may be left), or give all processes "
            "of the run another one, in JAX_COORDINATOR_ADDRESS or, under a scheduler that jax "
            "knows, in JAX_COORDINATOR_PORT."
        ) from error


def _accept_all(
    listener: socket.socket, hello: dict[str, Any], address: str, wait: float
) -> tuple[list[Connection], list[str]]:
    """Waits, in process 0, until all others have connected."""
    count, until = hello["of"], time.monotonic() + wait
    hosts, connections = {0: str(hello["host"])}, dict[int, Connection]()

    def refuse(sentence: str) -> NoReturn:
        for connection in connections.values():
            connection.send({"refused": sentence})
            connection.close()
        raise UserError(sentence)

    while len(hosts) < count:
        if (left := until - time.monotonic()) <= 0:
            for number in [n for n, connection in connections.items() if _has_ended(connection)]:
                del hosts[number]  # it connected, and has ended since
            missing = [number for number in range(count) if number not in hosts]
            present = ", ".join(f"{number} (on {host})" for number, host in sorted(hosts.items()))
            some = f"number{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))}"
            some += f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            refuse(
                f"Of the {count} processes of the run, {some} did not connect to {address} within "
                f"{wait:g} s (--join_timeout); {present} did. Start all of them within that time, "
                "and see the output of those that are missing."
            )
        listener.settimeout(left)
        try:
            connection = Connection(listener.accept()[0], 0)
        except OSError:
            continue
        # One connection at a time: a program that connects and says nothing costs _HELLO seconds.
        reply = connection.receive_one(min(_HELLO, left))
        number, of, host = reply.get("lockstep"), reply.get("of"), reply.get("host")
        if type(number) is not int or type(of) is not int or not isinstance(host, str):
            connection.close()  # a port scanner, or jax's runtime in a process of an earlier run
            continue
        host = "".join(letter for letter in host if letter.isprintable())[:80]
        before = connections.get(number)
        twice = before is not None and not _has_ended(before)
        if before is not None and not twice:
            before.close()  # that process was started again
        # Stored under -1 if the number is taken, so that `refuse` tells both processes why.
        connection.process, connections[-1 if twice else number] = number, connection
        if of != count or not 0 < number < count:
            refuse(
                f"Process 0 was told that the run has {count} processes, and a process on {host} "
                f"that it is number {number} of {of}. Start all of them with the same number."
            )
        if twice:
            refuse(
                f"Two processes have the number {number}, on {hosts[number]} and on {host}. Give "
                f"each a number of its own, from 0 to {count - 1}."
            )
        hosts[number] = host
        connection.send({"wait": True})
    for connection in connections.values():
        connection.send({"hosts": [hosts[number] for number in range(count)]})
    return list(connections.values()), [hosts[number] for number in range(count)]


def _has_ended(connection: Connection) -> bool:
    connection.socket.settimeout(0)
    try:
        return not connection.socket.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.socket.settimeout(_SEND_TIMEOUT)


def _connect_to_process_0(
    host: str, port: int, hello: dict[str, Any], address: str, wait: float
) -> tuple[Connection, list[str]]:
    """Connects another process to process 0, and waits until all have connected."""
    why = "nothing answers"
    for left in _seconds_left(wait):
        try:
            connection = Connection(socket.create_connection((host, port), timeout=left), 0)
        except OSError as error:
            why = error.strerror or str(error)
            continue
        connection.send(hello)
        reply = connection.receive_one(_HELLO)
        if "wait" in reply:
            # Process 0 may have started later than this one.
            reply = connection.receive_one(wait + _HELLO)
        if "hosts" in reply:
            return connection, [str(name) for name in reply["hosts"]]
        connection.close()
        if "refused" in reply:
            raise UserError(str(reply["refused"]))
        why = "the program that answers is not process 0 of this run, or it has ended"
    raise UserError(
        f"Process {hello['lockstep']} (on {hello['host']}) did not find process 0 at {address} "
        f"within {wait:g} s (--join_timeout): {why}. Process 0's own output may say why; start all "
        f"{hello['of']} processes within that time."
    )


def _seconds_left(wait: float) -> Iterator[float]:
    """Yields how many seconds the next attempt may take, until `wait` seconds are over."""
    until = time.monotonic() + wait
    while (left := until - time.monotonic()) > 0:
        yield min(left, _ATTEMPT)
        time.sleep(_RETRY)
