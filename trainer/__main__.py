"""The entry point of the command line, `python -m trainer [COMMAND] ...`; see cli/options.py."""

import argparse
import contextlib
import errno
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence

# Imports that take long are inside functions, so that `--help` and a misspelt option are fast. So
# are those of this project's modules: `main` first checks that nothing shadows the two packages.

_OF_THE_DISK = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE)  # no mistakes of the user
_OF_NO_COMMAND = frozenset(["-h", "--help", "--version"])


def script() -> int:
    """Runs the command `lockstep`, which is `python -P -m trainer`, and returns its exit code."""
    os.environ["PYTHONSAFEPATH"] = "1"  # of the processes that this one starts
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; `argv` None stands for those of the process."""
    # 0 done, 1 a failed run or disk, 2 a user's mistake, 75 stopped by a signal after a checkpoint.
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # by Python's default of 700, it would look for garbage at every trace of jax
        gc.set_threshold(50_000)
    if sys.flags.safe_path:
        os.environ["PYTHONSAFEPATH"] = "1"  # -P of the processes that this one starts
    if (shadow := _shadow()) and _OF_NO_COMMAND.intersection(words) and not sys.flags.safe_path:
        # Answer in a process that does not look for packages in the current folder.
        return subprocess.run([sys.executable, "-P", "-m", "trainer", *words]).returncode
    if shadow:
        sys.stderr.write(f"error: {shadow}\n")
        return 2  # messages.MISTAKE, which cannot be imported if it is shadowed
    from trainer.cli import options, values
    from trainer.cli.terminal import BestEffortStream, show
    from trainer.messages import DONE, FAILED

    if not words or (words[0].startswith("-") and words[0] not in _OF_NO_COMMAND):
        words.insert(0, "train")
    with BestEffortStream("stdout") as stdout, BestEffortStream("stderr"):
        arguments = options.parser().parse_args(words)
        arguments.vocabulary = [*dict.fromkeys(getattr(arguments, "vocabulary", ()))]
        if arguments.vocabulary:
            values.search_current_folder()
        # Not before, for `--help`: it looks through the packages that are installed.
        from trainer.engine.repeatable import use_deterministic_operations

        use_deterministic_operations()  # before jax looks for devices
        code = _run(arguments, until_exit=argv is None)
    if stdout.error and code == DONE and arguments.command != "train":
        show(f"error: the output is incomplete: {stdout.error.strerror}.", sys.stderr)
        return FAILED
    return code


def _shadow() -> str:
    """Returns a sentence about a folder or file that shadows one of our packages, or nothing."""
    home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    specs = importlib.util.find_spec("trainer"), importlib.util.find_spec("optim")
    for name, spec in zip(("trainer", "optim"), specs, strict=True):
        found = [*(spec.submodule_search_locations or [spec.origin or ""])] if spec else []
        found = [os.path.realpath(each) for each in found]
        if found and os.path.join(home, name) not in found:
            what = "folder" if os.path.isdir(found[0]) else "file"
            return (
                f"The {what} {found[0]!r} shadows Lockstep's own package {name!r}: Python finds "
                f"it first. Rename it, or run the command in another folder."
            )
    return ""


def _run(arguments: argparse.Namespace, until_exit: bool) -> int:
    """Runs a command; `until_exit` says whether the process ends after it."""
    from trainer.train.signals import StopSignals, stop_with_the_caller

    watched = getattr(arguments, "watched", False)  # by another program
    with contextlib.ExitStack() as stack:
        planned = ("dry_run", "check", "plan_only")
        begins = not any(getattr(arguments, name, False) for name in planned)
        computes = getattr(arguments, "action", None) in (None, "work") and begins
        computes = computes or arguments.command == "referee"
        if arguments.command in ("train", "sweep", "referee") and computes:  # no signal is lost
            arguments.signals = stack.enter_context(StopSignals(until_exit))
        elif watched or (until_exit and not begins):  # there is nothing to save
            # Python's own handler would wait for the end of a compilation.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if watched:
            stop_with_the_caller()
        return _call(arguments, watched)


def _call(arguments: argparse.Namespace, watched: bool) -> int:
    """Calls a command; another program, if `watched`, gets a last line about every exception."""
    from trainer.cli import commands
    from trainer.cli.terminal import show
    from trainer.config import wording
    from trainer.messages import FAILED, MISTAKE, UserError

    try:
        return commands.find(arguments.command)(arguments)
    except UserError as error:
        show(f"error: {error}", sys.stderr)
        return FAILED if getattr(error.__cause__, "errno", None) in _OF_THE_DISK else MISTAKE
    except (Exception, SystemExit) as error:  # such as of a data set, in the middle of a run
        if not wording.location(error):
            if not watched or isinstance(error, SystemExit):
                raise
            # A traceback may end in notes, such as jax's about omitted frames, not the error.
            show(traceback.format_exc(), sys.stderr, end="")
        show(f"error: {wording.cause(error)}", sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
