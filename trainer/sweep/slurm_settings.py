"""What the user asks of Slurm for the workers of a sweep."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.config import ConfigError, Source
from trainer.config.files import check_text, read_text
from trainer.config.nodes import plain
from trainer.config.wording import describe
from trainer.config.yaml_reader import read

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
    """What the user asks of Slurm for each worker.

    Attributes:
        options: long options of sbatch without the dashes -> value, "" for one that takes none,
            such as {"partition": "gpu", "gres": "gpu:1", "exclusive": ""}.
        setup: lines of bash that run before the worker, such as "module load cuda".
        warning: how many seconds before its time limit a worker is asked to save and stop. Slurm
            may be 60 s early.
    """

    options: Mapping[str, str]
    setup: str = ""
    warning: int = 120


def read_settings(file: str | None, settings: Sequence[str] = ()) -> SlurmSettings:
    """Reads the settings of a file and of the command line.

    A setting is a long option of sbatch with "-" or "_", where the value true stands for an option
    without a value and false for none; or one of `setup` and `warning`, the attributes of
    SlurmSettings.

    Args:
        file: a YAML file with a mapping, such as `{partition: gpu, cpus_per_task: 4}`, or None.
        settings: settings of the form KEY=VALUE, which override the file.

    Raises:
        ConfigError: the file cannot be read, or a setting is not one.

    Example:
        >>> read_settings(None, ["partition=gpu", "cpus_per_task=4", "exclusive=true"]).options
        {'partition': 'gpu', 'cpus-per-task': '4', 'exclusive': ''}
    """
    values = _read_file(file) if file else {}
    for text in settings:
        source = Source(f"--slurm {text}")
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError("A setting is KEY=VALUE, such as partition=gpu.", source)
        values[_name(key, source)] = value, source
    for key, (value, source) in values.items():
        _check(key, value, source)
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


def _read_file(file: str) -> dict[str, tuple[str, Source]]:
    text, _ = read_text(file, None)
    check_text(text, Source(file))
    root = read(text, Source(file, 1))
    if root is None or not isinstance(root.value, dict):
        raise ConfigError("This must be a mapping, such as partition: gpu.", Source(file, 1))
    values: dict[str, tuple[str, Source]] = {}
    for key, node in root.value.items():
        name, value = _name(str(key), node.argument_source), plain(node)
        if name in values:
            raise ConfigError(f"{key} is given twice. Remove one.", node.argument_source)
        if isinstance(value, bool):
            value = str(value).lower()
        elif name == "setup" and isinstance(value, list):
            value = "\n".join(map(str, value))
        elif not isinstance(value, str | int | float):
            raise ConfigError(
                f"The value of {key} must be a string or a number, got {describe(value)}.",
                node.source,
            )
        values[name] = str(value), node.source
    return values


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


def _check(name: str, value: str, source: Source) -> None:
    if name == "warning":
        if not re.fullmatch("[1-9][0-9]{0,4}", value) or int(value) > 65535:
            raise ConfigError(f"It is a number of seconds from 1 to 65535, got {value!r}.", source)
    elif name != "setup" and not (value.strip() and value.isprintable()):
        raise ConfigError(
            f"The value of {name} must be one line of text, got {value!r}; for an option that takes"
            f" no value, write {name}=true.",
            source,
        )


def _seconds(time: str) -> int | None:
    """Returns the seconds of a time of Slurm, such as "1-12:00:00"; None if there is no limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not found:
        return None
    days, *given = found.groups()
    numbers = [int(number) for number in given if number is not None]
    units = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(n * unit for n, unit in zip(numbers, units, strict=False))
