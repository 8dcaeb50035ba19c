"""Checks that the folder of a wave is as a worker left it.

A worker that finds it damaged removes it, and its trials are computed again.
"""

from pathlib import Path

from trainer import config as configs
from trainer.config import Config, ConfigError
from trainer.engine import every
from trainer.engine.experiment import Experiment
from trainer.messages import plural
from trainer.sweep.folder import Claim
from trainer.workdir import check_files
from trainer.workdir.folder import NAMES
from trainer.writers.json_files import damaged
from trainer.writers.lines import lines_of

_ADVICE = "remove the folder of the wave, and its trials are computed again."


def check_folder(claim: Claim) -> None:
    """Checks the files of a wave, except for its checkpoints and its rows."""
    # The folder may not exist yet. Raises DamagedFile if a file is not as a worker leaves it;
    # UserError if a config cannot be read.
    path = claim.path
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise damaged(path, "it is not a folder", _ADVICE)
    staged = [path / trial.folder for trial in claim.trials]
    for folder in (path, *staged):
        check_files(folder)
        for name in NAMES:
            if (folder / name).is_symlink():
                raise damaged(folder / name, "it is a symbolic link", _ADVICE)
    for folder in (path, *(staged if claim.alone else ())):  # those with the layout of a run
        _check_config(folder, claim.trials[0].config)


def _check_config(folder: Path, config: Config) -> None:
    file = folder / "config.yaml"
    if any((folder / name).exists() for name in ("checkpoints", "metrics.jsonl", "trials")):
        for each in (file, folder / "run.json"):
            if not each.exists():
                raise damaged(each, "it is missing", _ADVICE)
    if not file.exists():
        return
    try:
        found = configs.load([file]).root
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):
            raise
        raise damaged(file, str(error), _ADVICE) from error
    if configs.diff(configs.computed(found), configs.computed(config.root)):
        raise damaged(file, "it is not the config of the first trial", _ADVICE)


def check_rows(folder: Path, last: int, experiment: Experiment) -> None:
    """Raises DamagedFile if metrics.jsonl of a trial lacks a row of a logged or evaluated step."""
    # `folder` is that of the trial in its wave, and `last` the last step of which there must be a
    # row.
    file, wanted = folder / "metrics.jsonl", set[int]()
    for interval in (experiment.log_every, experiment.eval_every):
        wanted.update(every.due_steps(interval, experiment.first_step, last))
    lines = lines_of(file) if file.exists() else ()
    lost = wanted - {row["step"] for _, row in lines if row is not None}
    if lost:
        why = f"it lacks {plural(len(lost), 'row')}, such as that of step {min(lost):,}"
        raise damaged(file, why, _ADVICE)
