"""Connects the processes of a run to each other, before jax starts.

jax alone crashes if the coordinator's port is in use, and aborts if a process is missing without
naming it.
"""

import os
import socket
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from trainer.messages import UserError
from trainer.train.connection import Connection
from trainer.train.peers import Peers

_HELLO = 5.0  # seconds within which the other end of a new connection must identify itself
_ATTEMPT = 10.0  # seconds that one attempt to reach process 0 may take
_RETRY = 0.2  # seconds between two attempts


def connect(address: str, count: int, index: int, *, wait: float, silence: float) -> Peers:
    """Connects this process to the others, at the address where jax's coordinator will listen.

    Args:
        address: HOST:PORT of process 0, which must be able to listen there.
        count: how many processes the run has.
        index: of this process, from 0.
        wait: seconds within which all of them must have connected.
        silence: seconds without a heartbeat after which a process counts as gone.

    Returns:
        The connections to the other processes, with a thread that watches them.

    Raises:
        UserError: the port is in use, a process is missing, or two have the same index.
    """
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
            "of the run another one in JAX_COORDINATOR_ADDRESS."
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
        left = until - time.monotonic()
        if left <= 0:
            for number in [n for n, connection in connections.items() if _has_ended(connection)]:
                del hosts[number]  # it connected, and has ended since
            missing = [number for number in range(count) if number not in hosts]
            present = ", ".join(f"{number} (on {host})" for number, host in sorted(hosts.items()))
            refuse(
                f"Of the {count} processes of the run, {_numbers(missing)} did not connect to "
                f"{address} within {wait:g} s (--join_timeout); {present} did. Start all of them "
                "within that time, and see the output of those that are missing."
            )
        listener.settimeout(left)
        try:
            connection = Connection(listener.accept()[0], 0)
        except OSError:
            continue
        # One connection at a time: a program that connects and says nothing costs _HELLO seconds.
        reply = connection.first(min(_HELLO, left))
        number, of, host = reply.get("lockstep"), reply.get("of"), reply.get("host")
        if type(number) is not int or type(of) is not int or not isinstance(host, str):
            connection.close()  # a port scanner, or jax's runtime in a process of an earlier run
            continue
        host = "".join(letter for letter in host if letter.isprintable())[:80]
        before = connections.get(number)
        twice = before is not None and not _has_ended(before)
        if before is not None and not twice:
            before.close()  # that process was started again
        # Under -1 if the number is taken, so that `refuse` tells both of them why.
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


def _numbers(missing: list[int]) -> str:
    some = ", ".join(str(number) for number in missing[:8])
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return f"{'number' if len(missing) == 1 else 'numbers'} {some}{more}"


def _has_ended(connection: Connection) -> bool:
    connection.socket.settimeout(0)
    try:
        return not connection.socket.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.socket.settimeout(5.0)


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
        reply = connection.first(_HELLO)
        if "wait" in reply:
            reply = connection.first(
                wait + _HELLO
            )  # process 0 may have started later than this one
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
