"""Runs a command of Lockstep in a process of its own, and relays what it prints."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, TextIO

from trainer.cli.terminal import show
from trainer.messages import DONE, MISTAKE, STOPPED, UserError


class Stopped(RuntimeError):  # noqa: N818
    """A run or sweep was stopped after a checkpoint; the same call resumes it."""


class RunFailed(RuntimeError):  # noqa: N818
    """A run could not be computed to its end, or some trials of a sweep could not."""


Translate = Callable[[str], str]
"""Returns a line of a message with places that the user knows."""


# The process prints without a buffer, and does not look for packages in the current folder first:
# it has the search path of this process.
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}


def run_command(
    words: Sequence[str], translate: Translate, quiet: bool = False, on_cpu: bool = False
) -> None:
    """Runs `python -m trainer WORDS` in a process of its own, until it ends."""
    # Signals to stop, the allocation of memory and the flags of jax belong to a whole process:
    # those of a notebook would change the run, and a run would change those of the notebook. The
    # first interrupt of this process, or its end, lets the command save a checkpoint and end; a
    # second interrupt ends it at once. `on_cpu` says that it needs no memory of an accelerator.
    # Raises UserError if the command ended with the message of a mistake, KeyboardInterrupt if an
    # interrupt ended it and it had nothing to save, Stopped if it was asked to stop and ended after
    # a checkpoint, and RunFailed if it ended otherwise.
    if not on_cpu:
        _check_memory()
    # Start a new session: otherwise Ctrl-C in a terminal would reach it twice, and end it at once.
    child = subprocess.Popen(
        [sys.executable, "-m", "trainer", *words, "--watched"],
        stdin=subprocess.PIPE,  # closed when this process ends, upon which the run saves and ends
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="backslashreplace",
        env=os.environ | _ENVIRONMENT | {"PYTHONPATH": _search_path()},
        start_new_session=True,
    )
    lines: queue.Queue[tuple[str, str] | None] = queue.Queue()
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    readers = [
        threading.Thread(target=_read, args=(name, stream, lines), daemon=True)
        for name, stream in (("stdout", child.stdout), ("stderr", child.stderr))
    ]
    for reader in readers:
        reader.start()
    said: list[str] = []
    open_streams = 2
    while open_streams:
        try:
            if (read := lines.get()) is None:
                open_streams -= 1
                continue
            name, line = read
            said += [line] if name == "stderr" else []
            if not quiet:
                show(translate(line), _stream(name), end="")
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
    code = child.wait()
    child.stdin.close()
    for reader in readers:
        reader.join()
    _raise(code, [translate(line) for line in said])


def _stream(name: str) -> TextIO:
    """Returns the stream of this process that shows lines of a stream of the other process."""
    in_notebook = type(sys.stderr).__module__.startswith("ipykernel")
    return sys.stdout if in_notebook else getattr(sys, name)  # a notebook shows stderr in red


def _read(name: str, stream: IO[str], lines: "queue.Queue[tuple[str, str] | None]") -> None:
    with stream:
        for line in stream:
            lines.put((name, line))
    lines.put(None)


def _search_path() -> str:
    """Returns the PYTHONPATH with which the process finds the packages of this one."""
    # The current folder is not part of it, which the process searches last, for its vocabulary.
    here, home = os.path.abspath("."), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folders = [os.path.abspath(each or ".") for each in sys.path]
    return os.pathsep.join(each for each in dict.fromkeys(folders) if each != here or each == home)


def _raise(code: int, said: Sequence[str]) -> None:
    """Raises the exception of an exit code, with the last message of the command."""
    if code == DONE:
        return
    starts = [number for number, line in enumerate(said) if line.startswith("error: ")]
    message = "".join(said[starts[-1] :]).removeprefix("error: ") if starts else ""
    last = message.strip() or (said[-1].strip() if said else "")
    if code == MISTAKE:
        raise UserError(_with_arguments(last))
    if code == STOPPED:
        raise Stopped(last or "It was stopped after a checkpoint: the same call goes on with it.")
    if code == -signal.SIGINT:
        raise KeyboardInterrupt
    if code < 0:
        name = signal.Signals(-code).name
        raise RunFailed(f"Its process was ended by {name}. {last}".strip())
    raise RunFailed(last or f"It ended with the exit code {code}.")


_ARGUMENTS = "workdir|until|workers|allow_changed|vocabulary|target|devices|device_memory"
_LISTS = ("allow_changed", "vocabulary")


def _with_arguments(message: str) -> str:
    """Replaces options of the command in a message by the arguments of the function."""
    # A message is such as "Choose another --workdir, or resume with --allow_changed=code."

    def argument(option: re.Match[str]) -> str:
        name, value = option["name"], option["value"]
        if value is None:
            return name
        if name in _LISTS:
            return f"{name}=[{', '.join(x if x == '...' else repr(x) for x in value.split(','))}]"
        return f"{name}={value if value.isdecimal() else repr(value)}"

    if "(from Python" in message:
        return message
    message = message.replace("explain --devices=N", "ls.explain(config, devices=N)")
    value = r"[\w.,/-]*(?:\w|,\.\.\.)"
    text = re.sub(rf"--(?P<name>{_ARGUMENTS})(?:=(?P<value>{value}))?(?!\w)", argument, message)
    return text if text == message else text.replace(" to the command", " to the call")


def _check_memory() -> None:
    """Raises UserError if this process has reserved the memory of a GPU that the child needs."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is None or not bridge.backends_are_initialized():
        return
    import jax

    setting = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower()
    if jax.default_backend() == "gpu" and setting not in ("false", "0"):
        raise UserError(
            "This process has reserved most of the memory of the GPU, so that a run in a process of"
            " its own would not find enough. Set os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] ="
            " 'false' before jax is first used here, in a notebook after a restart of the kernel;"
            " or train with inline=True, in this process."
        )


def run_here(words: Sequence[str], translate: Translate) -> None:
    """Runs `python -m trainer WORDS` in this process; raises what `run_command` does."""
    # Raises UserError too if this is not the main thread. `translate` changes messages of errors.
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "inline=True trains in the main thread, which alone receives signals, and this is"
            f" {threading.current_thread().name}. Leave inline out."
        )
    from trainer.cli import commands, options
    from trainer.train.signals import StopSignals

    arguments = options.parser().parse_args([*words])
    try:
        with StopSignals() as arguments.signals:
            code = commands.find(arguments.command)(arguments)
    except UserError as error:
        raise UserError(_with_arguments(translate(str(error)))) from error
    _raise(code, [])
