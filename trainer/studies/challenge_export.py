"""Writes an entry of a challenge as one script, with the log of its runs."""

from pathlib import Path

import trainer
from trainer.config import dump
from trainer.messages import UserError, joined
from trainer.report.sweep_results import read_sweep_results
from trainer.studies.challenge import Rules, read_entry_text
from trainer.sweep.plan_file import read_plan
from trainer.writers import iterate_metrics

_SCRIPT = '''"""{title}

{by} It is an entry of {challenge}, as python -m trainer challenge export wrote it, and needs
lockstep-jax {version}. It trains each seed and prints a line for each evaluation; the lines of the
published runs are at its end. On the same versions and kind of machine they are equal.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

METRIC = {metric!r}
SEEDS = {seeds}
CONFIG = (
{config}
)

with tempfile.TemporaryDirectory() as folder:
    config = pathlib.Path(folder, "run.yaml")
    config.write_text(CONFIG)
    for seed in SEEDS:
        run = pathlib.Path(folder, str(seed))
        command = [sys.executable, "-m", "trainer", f"--config={{config}}", f"--workdir={{run}}"]
        command += [f"--set=seed={{seed}}", "--set=writers=[]"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            if METRIC in row:
                print(f"seed {{seed}} step {{row['step']}} {{METRIC}} {{row[METRIC]!r}}")

# The published runs:
{log}
'''


def exported(rules: Rules, folder: Path) -> str:
    """Returns the script of an entry, CHALLENGE/entries/NAME; raises UserError if it has none."""
    text, plan = read_entry_text(folder), read_plan(folder / "sweep")
    workload = read_sweep_results(folder / "sweep")
    if plan.vocabulary:
        raise UserError(
            f"{folder.name} names {joined(plan.vocabulary)}, whose code a script of one file would"
            " not have. Publish the folder of the entry with that code."
        )
    arm, *others = plan.arms.values()
    if others or arm.space:
        raise UserError(f"{folder.name} has several configurations, and an entry is one.")
    if missing := [run.name for run in workload.trials if run.end == "missing"]:
        raise UserError(f"{folder.name} has not ended: {joined(missing, 4)} have no result.")
    metric = rules.challenge.goal.row
    log = [
        f"# seed {run.seed} step {row['step']} {metric} {row[metric]!r}"
        for run in workload.trials
        for row in iterate_metrics(run.folder, metric)
        if metric in row
    ]
    return _SCRIPT.format(
        title=_said(text.title),
        challenge=_said(rules.title),
        by=f"By {_said(text.by)}." if text.by else "",
        version=trainer.__version__,
        metric=metric,
        seeds=[run.seed for run in workload.trials],
        config="\n".join(f"    {line!r}" for line in dump(arm.config.root).splitlines(True)),
        log="\n".join(log),
    )


def _said(text: str) -> str:
    """Returns a text as a docstring may have it."""
    return text.replace("\\", "/").replace('"', "'")
