"""Decides which differences between two processes of a run are allowed, and refuses others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import config as configs
from trainer.config.tree import Call
from trainer.messages import UserError
from trainer.workdir.fingerprint import REFUSED, Change

_PROCESSES = (
    "With another number of processes, sums over devices may be rounded otherwise, and a data set "
    "of yours may yield other batches; those of Lockstep yield the same.\n"
)
_NOT_SEEDED = (
    "The config and your code are the same. If no file of the data changed, the data set draws "
    "random numbers without a seed, and every process has other data: draw them from "
    "np.random.default_rng(seed), with an argument `seed`, and begin in another --workdir. "
    "--allow_changed=data would go on with other data.\n"
)
_SHOWN = 4  # lines of differences in an error


class RunChanged(UserError):
    """Raised if a process would change the program or the data of a run."""

    # `changes` are lines that say what would change, `advice` is what the user can do, and `keys`
    # are those of the fingerprint that differ.

    def __init__(self, changes: str, advice: str, keys: Sequence[str]):
        super().__init__(changes + advice)
        self.changes = changes
        self.keys = tuple(keys)


def is_allowed(path: str, allowed: Sequence[str]) -> bool:
    """Returns whether `allowed` names a path of the config, one of its parents or its last key."""
    # `allowed` has the values of --allow_changed, and a path is such as
    # "optimizer.groups.hidden.b2".
    return any(
        path == name or path.startswith((f"{name}.", f"{name}[")) or path.endswith(f".{name}")
        for name in allowed
    )


def path_of(line: str) -> str:
    """Returns the path of a difference such as "steps: 10 -> 20"; a path may have a colon in it."""
    return line.partition(": ")[0]


def refuse_config(path: Path, lines: Sequence[str], allowed: Sequence[str]) -> None:
    """Raises UserError if a difference between two configs of a run is not allowed."""
    # The differences are lines such as "steps: 10 -> 20", and `allowed` has the values of
    # --allow_changed.
    refused = [line for line in lines if not is_allowed(path_of(line), allowed)]
    if refused and "config" not in allowed and "program" not in allowed:
        raise UserError(
            f"The workdir {path} has another config. The differences, old -> new:\n"
            + indented(refused)
            + "Choose another --workdir, or resume with --allow_changed="
            + ",".join(dict.fromkeys(map(path_of, refused[:3])))
            + ",..." * (len(refused) > 3)
            + "."
        )


def as_changes(lines: Sequence[str]) -> list[Change]:
    """Converts differences of two configs, such as "steps: 10 -> 20", to changes of the program."""
    return [
        Change("program", path, *map(str.strip, values.split(" -> ", 1)))
        for path, _, values in (line.partition(": ") for line in lines)
        if " -> " in values
    ]


def refuse_changes(
    path: Path, changes: Sequence[Change], allowed: Sequence[str], same_step: bool | None = None
) -> None:
    """Raises RunChanged if --allow_changed does not allow a change to the program or the data."""
    # `changes` has all differences of the fingerprint; that of the config is not refused here.
    # `same_step` says whether the program of a training step is the same; None if it is not known.
    refused = [
        change
        for change in changes
        # Changes that can affect bits at most are logged, and never refused.
        if change.kind != "bits"
        and change.key != "config"
        and change.kind not in allowed
        and not any(name == change.key or name.endswith(f".{change.key}") for name in allowed)
    ]
    if refused:
        keys = [change.key for change in refused]
        note = _PROCESSES if "processes" in keys else ""
        if "code" in keys and same_step is not None:
            data = "" if "data" in keys else ", and so are the data"
            note += "The program of a training step is " + (
                f"the same{data}; evaluation was not compared.\n"
                if same_step
                else "another one, too.\n"
            )
        if [change.key for change in changes if change.kind != "bits"] == ["data"]:
            note += _NOT_SEEDED
        kinds = " and the ".join(dict.fromkeys(change.kind for change in refused))
        raise RunChanged(
            f"This process would change the {kinds} of the run in {path}:\n"
            + indented([str(change) for change in refused]),
            f"{note}Restore the old value, choose another --workdir, or resume with "
            f"--allow_changed={','.join(keys)}.",
            keys,
        )


def config_changes(file: Path, config: Call) -> list[str]:
    """Returns how `config` differs from a run's config.yaml, such as "steps: 10 -> 20"."""
    # Keys that do not change what is computed are ignored.
    return configs.diff(configs.computed(configs.load([file]).root), configs.computed(config))


def indented(lines: Sequence[str]) -> str:
    """Indents lines for an error; of more than four, shows three and the number of the others."""
    shown = list(lines if len(lines) <= _SHOWN else lines[: _SHOWN - 1])
    if len(lines) > len(shown):
        shown.append(f"... and {len(lines) - len(shown)} more")
    return "".join(f"  {line}\n" for line in shown)


def check_allowed(allowed: Sequence[str], config: Call, fingerprint: Mapping[str, Any]) -> None:
    """Raises UserError if a name in --allow_changed is in neither config nor fingerprint."""
    # The names are paths of the config, keys of the fingerprint, and "program" and "data", which
    # stand for several keys.
    paths = [path for path, _ in configs.leaves(config)]
    known = {*REFUSED, *REFUSED.values(), *fingerprint}
    for name in allowed:
        if name not in known and not any(is_allowed(path, [name]) for path in paths):
            raise UserError(
                f"--allow_changed={name} names nothing that can change. There are "
                f"{', '.join(sorted(REFUSED))}, and the paths of the config, such as steps."
            )
