"""Messages between two processes of a run over a TCP connection.

A message is one JSON object in a line; an empty line is a heartbeat.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

_SEND_TIMEOUT = 5.0  # seconds; sending hardly blocks: a message fits into the system's buffer


class Connection:
    """A connection to another process, which sends and receives messages.

    Args:
        connected: the socket.
        process: the index of the other process.

    Attributes:
        socket: the socket.
        process: the index of the other process.
        heard: when the last data arrived, in seconds of `time.monotonic`.
        leaving: whether the other process announced that it is about to end.
        closed: whether `close` was called.
    """

    def __init__(self, connected: socket.socket, process: int):
        self.socket = connected
        self.process = process
        self.heard = time.monotonic()
        self.leaving = False
        self.closed = False
        self._unread = b""
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any] | None = None) -> None:
        """Sends a message; an error of a broken connection is noticed when it is read.

        Args:
            message: of JSON values; None for a heartbeat.
        """
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

    def first(self, seconds: float) -> dict[str, Any]:
        """Waits for the next message.

        It reads no byte beyond that message, so that later ones wake the thread that watches.

        Args:
            seconds: how long to wait.

        Returns:
            The message; an empty one if none arrived in time, or the connection was closed.
        """
        until, line = time.monotonic() + seconds, b""
        try:
            while not line.endswith(b"\n") or line == b"\n":
                line = b"" if line == b"\n" else line
                self.socket.settimeout(max(until - time.monotonic(), 1e-3))
                read = self.socket.recv(1)
                if not read or len(line) > 1 << 20:
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
    """Waits until the other processes have received all that was sent and closed the connections.

    A process that ends with unread data in a socket resets its connection. The reset may arrive
    before a message that was sent just before it, and the message is lost then.

    Args:
        connections: nothing can be sent over them afterwards.
        seconds: how long to wait at most, for all of them.
    """
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
