"""Starts the workers of a sweep with Slurm: one array of jobs, one worker in each of its tasks.

The batch script relies on this, which was observed with Slurm 22.05:

- Before the time limit, Slurm sends the signal of `--signal=B:...` to the script alone. At the
  limit, at the end of a preemption's GraceTime and for scancel it sends SIGTERM to all processes of
  the job, and SIGKILL after KillWait seconds. The script passes on the first of these only: a
  second signal would end a worker before it has saved.
- Slurm itself requeues a job that is preempted or whose node fails. It does not requeue one that
  has reached its time limit, nor one that ends because of the warning before it.
- `scontrol requeue` restarts even a job that scancel has ended, so the script looks at the state of
  its job first. The last task of an array has the number of the array as its SLURM_JOB_ID, with
  which `scontrol requeue` restarts all tasks.
- The rules of srun for the cores of a step differ between versions of Slurm, and with it a worker
  would get SIGTERM at the beginning of GraceTime, and compute less. The script does without.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from trainer.config import ConfigError, Source, files
from trainer.messages import UserError, refuse_os_errors

# Options of sbatch that are not settings, and why.
_REFUSED = {
    **dict.fromkeys(("array", "wrap"), "--workers says how many workers are started"),
    **dict.fromkeys(("output", "error", "open-mode"), "the logs are in the sweep's folder slurm/"),
    **dict.fromkeys(("requeue", "no-requeue"), "a worker that has saved is always requeued"),
    **dict.fromkeys(("chdir",), "workers run in the folder in which the sweep is started"),
    **dict.fromkeys(("signal",), "write warning=SECONDS, the time before the limit to save in"),
    **dict.fromkeys(
        ("parsable", "test-only", "wait", "help", "usage", "version"), "it prints something else"
    ),
}


@dataclass(frozen=True)
class SlurmSettings:
    """What the user asks of Slurm for each worker."""

    # long options of sbatch without the dashes -> value, "" for one that takes none, such as
    # {"partition": "gpu", "gres": "gpu:1", "exclusive": ""}
    options: Mapping[str, str]
    setup: str = ""  # lines of bash that run before the worker, such as "module load cuda"
    # how many seconds before its limit a worker is asked to save and stop; Slurm may be 60 s early
    warning: int = 120


def read_slurm_settings(file: str | None, settings: Sequence[str] = ()) -> SlurmSettings:
    """Reads the settings of a file and of the command line, which override the file.

    The file is YAML with a mapping, such as `{partition: gpu, cpus_per_task: 4}`, and `settings`
    have the form KEY=VALUE. A setting is a long option of sbatch with "-" or "_", where the value
    true stands for an option without a value and false for none; or one of `setup` and `warning`,
    the attributes of SlurmSettings. Raises ConfigError if the file cannot be read, or a setting is
    not one.

    Example:
        >>> read_slurm_settings(None, ["partition=gpu", "exclusive=true"]).options
        {'partition': 'gpu', 'exclusive': ''}
    """
    given = files.read_settings("--slurm", file, settings, _name, ("partition", "gpu"))
    values = {key: (_text(key, setting), setting.source) for key, setting in given.items()}
    setup = values.pop("setup", ("", None))[0]
    warning = int(values.pop("warning", ("120", None))[0])
    options = {key: value for key, (value, _) in values.items() if value != "false"}
    limit = _seconds(options.get("time", ""))
    if limit and limit <= warning + 60:
        raise ConfigError(
            f"A worker is asked to save {warning} s before its time limit, or up to 60 s earlier,"
            f" and the limit is {limit} s, so that it would get nothing done: raise the time, or"
            " lower the warning with --slurm warning=SECONDS.",
            values["time"][1],
        )
    flags = {key: "" if value == "true" else value for key, value in options.items()}
    return SlurmSettings(flags, setup, warning)


def _text(name: str, setting: files.LauncherSetting) -> str:
    """Returns the value of a setting as text; raises ConfigError for one that it cannot have."""
    if name == "setup" and isinstance(setting.value, list):
        return "\n".join(map(str, setting.value))
    truth = isinstance(setting.value, bool)
    value = str(setting.value).lower() if truth else setting.text(name)
    if name == "warning":
        if not re.fullmatch("[1-9][0-9]{0,4}", value) or int(value) > 65535:
            why = f"It is a number of seconds from 1 to 65535, got {value!r}."
            raise ConfigError(why, setting.source)
    elif name != "setup" and not (value.strip() and value.isprintable()):
        raise ConfigError(
            f"The value of {name} must be one line of text, got {value!r}; for an option that takes"
            f" no value, write {name}=true.",
            setting.source,
        )
    return value


def _name(key: str, source: Source) -> str:
    name = key.replace("_", "-")
    if not re.fullmatch("[a-z][a-z0-9]+(-[a-z0-9]+)*", name):
        raise ConfigError(
            f"{key!r} is not a setting: write a long option of sbatch without its dashes, such as"
            " partition.",
            source,
        )
    if name in _REFUSED:
        raise ConfigError(f"{name} cannot be set: {_REFUSED[name]}.", source)
    return name


def _seconds(time: str) -> int | None:
    """Returns the seconds of a time of Slurm, such as "1-12:00:00"; None if there is no limit."""
    if not (found := re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)):
        return None
    days, *given = found.groups()
    numbers = [int(number) for number in given if number is not None]
    units = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(n * unit for n, unit in zip(numbers, units, strict=False))


class _Script(Template):
    delimiter = "@"  # because "$" is bash's own


def batch_script(folder: Path, words: Sequence[str], workers: int, settings: SlurmSettings) -> str:
    """Returns the batch script of the workers, one in each task of the array."""
    # The folder of the sweep is absolute. `words` are what follows python in the command of a
    # worker, such as ["-m", "trainer", ...]. It must exit with 75 when a signal has stopped it
    # before the sweep is complete.
    path = os.environ.get("PYTHONPATH")
    script = Path(__file__).with_suffix(".sh").read_text(encoding="utf-8")
    return _Script(script).substitute(
        options="\n".join(
            f"#SBATCH --{name}" + (f"={_quoted(value)}" if value else "")
            for name, value in _options(folder, workers, settings).items()
        ),
        path="unset PYTHONPATH" if path is None else f"export PYTHONPATH={shlex.quote(path)}",
        setup=settings.setup,
        here=shlex.quote(os.getcwd()),
        command=shlex.join([sys.executable, *words]),
    )


def _options(folder: Path, workers: int, settings: SlurmSettings) -> dict[str, str]:
    logs = str(folder / "slurm").replace("%", "%%")
    return {
        "job-name": f"sweep-{folder.name}",
        **settings.options,
        "array": f"0-{workers - 1}",
        "output": f"{logs}/%A_%a.log",
        "open-mode": "append",
        "requeue": "",
        "signal": f"B:USR1@{settings.warning}",
    }


def _quoted(value: str) -> str:
    """Quotes a value for sbatch, where a backslash escapes any character, in any quotes."""
    if re.fullmatch(r"[\w.,:/@%+=-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def submit(
    folder: str | Path, words: Sequence[str], workers: int, settings: SlurmSettings
) -> tuple[str, list[str]]:
    """Submits the workers; returns the number of their array as text, and lines to print."""
    # The batch script is written to the sweep's folder, which exists and which all nodes must see.
    # The workers run with this Python, in the current folder, with the current PYTHONPATH. Raises
    # UserError if the script cannot be written, there is no sbatch, or sbatch refuses the array.
    _check_setup(settings.setup)
    with refuse_os_errors(f"{folder}/slurm/workers.sh cannot be written"):
        place = Path(folder).absolute()
        # Slurm replaces no %A in a path with a backslash, and has no quotes for a line break.
        if "\\" in str(place) or not str(place).isprintable():
            raise UserError(f"Slurm cannot write logs to {place}: rename the folder.")
        file = place / "slurm" / "workers.sh"
        file.parent.mkdir(exist_ok=True)
        file.write_text(batch_script(place, words, workers, settings), encoding="utf-8")
        file.chmod(0o755)
    options = _options(place, workers, settings)
    # Given here too, because variables of sbatch, such as SBATCH_PARTITION, override the script.
    given = [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]
    job, said = _sbatch([*given, str(file)])
    number, _, cluster = job.partition(";")
    where = f" --clusters={shlex.quote(cluster)}" if cluster else ""
    lines = [
        *said,
        f"Submitted {workers} {'worker' if workers == 1 else 'workers'} as Slurm job {number}.",
        f"Logs: {file.parent}/{number}_*.log",
        f"Status: python -m trainer sweep status {shlex.quote(str(folder))}",
        f"Cancel: scancel{where} {number}",
    ]
    return number, lines


def _check_setup(setup: str) -> None:
    """Raises UserError if the setup is not valid bash by itself, without the lines after it."""
    # With the user's variables, bash may warn of what they name, such as a locale.
    clean = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["bash", "-n"], input=setup, env=clean, capture_output=True, text=True
        )
    except OSError:  # this machine has no bash; the error about sbatch says more
        return
    # A here-document without an end would include the lines after it; bash only warns of that.
    if done.returncode or done.stderr:
        raise UserError(f"The setup of --slurm_file is not valid bash:\n{done.stderr}")


def _sbatch(words: Sequence[str]) -> tuple[str, list[str]]:
    """Returns what sbatch printed, and its warnings; raises UserError if it refuses."""
    advice = (
        "Start the sweep on a machine with the commands of Slurm, such as a login node; or leave"
        " out --launcher=slurm, which starts the workers on this machine."
    )
    with refuse_os_errors("sbatch cannot be started", advice):
        done = subprocess.run(
            ["sbatch", "--parsable", *words], capture_output=True, text=True, errors="replace"
        )
    said = [line.removeprefix("sbatch: ") for line in done.stderr.splitlines() if line.strip()]
    job = done.stdout.strip()
    if done.returncode or not re.fullmatch(r"[0-9]+(;\S+)?", job):
        reason = " ".join(line.removeprefix("error: ") for line in said) or job or "no message"
        raise UserError(f"sbatch refused the workers: {reason}")
    return job, said
