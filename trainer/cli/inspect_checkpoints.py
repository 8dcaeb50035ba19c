"""Lists, checks, compares and exports the checkpoints of a run."""

import argparse
import datetime
import math
from pathlib import Path

from optim.paths import flatten
from trainer import checkpoint
from trainer.checkpoint.reading import storage
from trainer.cli.terminal import show
from trainer.messages import DONE, FAILED, UserError, table
from trainer.writers.files import replace_file


def run(arguments: argparse.Namespace) -> int:
    """Runs `checkpoint ls|check|diff|export`; FAILED if a checkpoint is damaged, or two differ."""
    actions = {"ls": _ls, "check": _check, "diff": _diff, "export": _export}
    try:
        return actions[arguments.action](arguments)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def _ls(arguments: argparse.Namespace) -> int:
    rows = [("step", "saved", "bytes", "leaves", "metric")]
    problems = []
    for info in checkpoint.ls(arguments.workdir):
        saved = "-"
        if not math.isnan(info.saved):
            saved = datetime.datetime.fromtimestamp(info.saved).isoformat(" ", "seconds")
        metric = "-" if info.metric is None else f"{info.metric:.6g}"
        rows.append((str(info.step), saved, f"{info.nbytes:,}", str(info.leaves), metric))
        if info.problem:
            problems.append(f"step {info.step}: damaged: {info.problem}")
    show("\n".join([*table(rows, right=range(len(rows[0]))), *problems]))
    return FAILED if problems else DONE


def _check(arguments: argparse.Namespace) -> int:
    found = checkpoint.check_leaves(arguments.workdir, arguments.step)
    for step, problems in found.items():
        show(f"step {step}: {'damaged' if problems else 'intact'}")
        for problem in problems:
            show(f"  {problem}")
    return FAILED if any(found.values()) else DONE


def _diff(arguments: argparse.Namespace) -> int:
    other = arguments.other or arguments.workdir
    ours = [info.step for info in checkpoint.ls(arguments.workdir)]
    theirs = [info.step for info in checkpoint.ls(other)]
    a = max(ours) if arguments.step is None else arguments.step
    if (b := arguments.other_step) is None:
        # Default: in the same run the checkpoint before `a`, in another run the newest one.
        if not (before := [step for step in theirs if arguments.other or step < a]):
            raise UserError(
                f"{arguments.workdir} has no checkpoint before step {a} to compare it with; there "
                f"are {ours}. Name another WORKDIR, or a step with --other_step."
            )
        b = max(before)
    lines = checkpoint.diff_checkpoints(arguments.workdir, a, b, other=other)
    show(f"step {a} of {arguments.workdir}, step {b} of {other}:")
    show("".join(f"  {line}\n" for line in lines) or "  equal, bit for bit\n", end="")
    return FAILED if lines else DONE


def _export(arguments: argparse.Namespace) -> int:
    import trainer
    from trainer import config as configs
    from trainer.cli.resolving import ignore_optimizer_warnings
    from trainer.train.trained import read_trained

    file = Path(arguments.file)
    beside = file.with_suffix(".yaml")
    before = _check_files(file, beside, arguments)
    ignore_optimizer_warnings()
    folder = Path(arguments.workdir)
    found = read_trained(folder, arguments.step, arguments.vocabulary, raw=arguments.raw)
    arrays = flatten(found.params, verbatim=True)
    state = flatten(found.model_state, verbatim=True)
    arrays |= {f"model_state/{name}": x for name, x in state.items()}
    metadata = {
        "step": str(found.step),
        "config": configs.digest(found.config.root),
        "lockstep": trainer.__version__,
        "parameters": "trained" if arguments.raw else "evaluated",
    }
    named = ""
    if found.metric is not None:
        metric = str(found.config.root.kwargs.get("best_metric"))
        metadata |= {"best_metric": metric, "metric": repr(found.metric)}
        named = f", {metric} {found.metric:.6g}"
    if arguments.format == "orbax":
        storage().export_for_orbax(file, arrays, metadata)
        files = [file]
    else:
        files = checkpoint.export(file, arrays, metadata, arguments.max_shard or math.inf)
        for old in before:
            if old not in files:
                old.unlink()
    where = file if len(files) == 1 else f"{len(files) - 1} files, listed in {files[-1]}"
    replace_file(beside, configs.file_text(found.config.root).encode())
    count = sum(x.size for x in arrays.values())
    show(f"step {found.step}{named}: {len(arrays)} arrays of {count:,} numbers in {where}")
    show(f"the config in {beside}")
    return DONE


def _check_files(file: Path, beside: Path, arguments: argparse.Namespace) -> list[Path]:
    """Returns the files of an export that are to be replaced, or raises UserError."""
    orbax = arguments.format == "orbax"
    if not orbax and file.suffix != ".safetensors":
        raise UserError(
            f"{file} does not end in .safetensors, the format in which parameters are exported. "
            f"Write {file.with_suffix('.safetensors')}. Or name a folder, with --format=orbax."
        )
    if orbax and (file.suffix or arguments.max_shard):
        raise UserError(
            f"--format=orbax writes a folder, and was given {file}"
            f"{' and --max_shard' if arguments.max_shard else ''}. Name a new folder, such as "
            f"{file.with_suffix('')}, without --max_shard: its files are of some 16 MB anyway."
        )
    if not file.parent.is_dir():
        raise UserError(f"There is no folder {file.parent} for {file.name}. Make it first.")
    if orbax and file.exists():
        raise UserError(f"{file} exists. Name a new folder.")
    before = [] if orbax else checkpoint.exported_before(file)
    for each in [*before, beside]:
        if each.is_dir():
            raise UserError(f"{each} is a folder, where a file would be written. Name another.")
        if each.exists() and not arguments.force:
            raise UserError(f"{each} exists. Name another file, or replace it with --force.")
    return before
