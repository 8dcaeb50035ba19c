"""The command referee: keeps or discards changes of a config, at a known rate of false keeps."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import resolving
from trainer.cli.reporting import made_by
from trainer.cli.terminal import log, show
from trainer.config.vocabulary import REFEREE
from trainer.messages import DONE, UserError, plural

if TYPE_CHECKING:
    from trainer.studies.referee_runs import Runner

# The exit codes of a try; a mistake is 2, as everywhere.
_CODES = {"keep": DONE, "discard": 3, "undecided": 4}


def run(arguments: argparse.Namespace) -> int:
    """Calls the action of the command."""
    from trainer.studies.referee_runs import Interrupted

    actions = {"start": _start, "try": _try, "status": _status, "finish": _finish}
    try:
        return actions[arguments.action](arguments)
    except Interrupted as error:
        log("Interrupted; what was computed is kept. Start the same command again to go on.")
        return error.code


def _runner(arguments: argparse.Namespace) -> "Runner":
    from trainer.studies.referee_runs import Runner
    from trainer.sweep.definition import Goal

    return Runner(Goal(), arguments.vocabulary, arguments.workers, arguments.signals, log)


def _start(arguments: argparse.Namespace) -> int:
    """Begins a referee, and says how many pairs a decision takes."""
    from trainer.studies.referee_tries import start

    if arguments.workdir is None:
        raise UserError("The folder of the referee is missing: name it with --workdir=FOLDER.")
    config = resolving.read_config(arguments, REFEREE)
    judge, noise = start(config, Path(arguments.workdir), _runner(arguments))
    show(noise.sentence)
    show(f"To try a change: python -m trainer referee try {judge.folder} CHANGE.yaml")
    return DONE


def _try(arguments: argparse.Namespace) -> int:
    """Judges a change, and prints the verdict; the exit code says it, too."""
    from trainer.studies.referee import read_judge
    from trainer.studies.referee_page import result
    from trainer.studies.referee_tries import judge_change

    if not (arguments.changes or arguments.sets or arguments.vocabulary):
        raise UserError(
            "The change is missing: name a YAML file, or write --set PATH=VALUE, or"
            " --vocabulary=PACKAGE for one of your code."
        )
    judge = read_judge(Path(arguments.folder), _runner(arguments))
    files = [Path(x) for x in arguments.changes]
    ended = judge_change(judge, files, arguments.sets, arguments.note)
    found = result(judge.now, ended)
    if arguments.json:
        show(json.dumps(found))
    else:
        show(f"Try {ended.number}: {ended.verdict}. {ended.why}")
        if found["typical_improvement"] is not None:
            ends = ["infinity" if x is None else f"{x:.3g}" for x in found["typical_improvement"]]
            show(f"The typical improvement: 95% from {ends[0]} to {ends[1]}.")
        show(
            f"It took {plural(found['runs'], 'run')} and {found['seconds']:.3g} s. {found['next']}"
        )
    return _CODES[ended.verdict]


def _status(arguments: argparse.Namespace) -> int:
    """Prints what was found, and writes the record."""
    from trainer.report.write import write
    from trainer.studies.referee import read_judge
    from trainer.studies.referee_page import (
        check_verdicts,
        found_sentences,
        last_hash,
        make_page,
        result,
    )

    judge = read_judge(Path(arguments.folder), _runner(arguments))
    check_verdicts(judge)
    if arguments.json:
        for each in judge.tries:
            show(json.dumps(result(judge, each)))
        return DONE
    for sentence in (*found_sentences(judge), last_hash(judge)):
        show(sentence)
    folder = Path(arguments.output or judge.folder / "report")
    made = made_by("referee", ["status", arguments.folder])
    files = write(make_page(judge, made), folder, arguments.formats)
    show(f"{folder}: {plural(len(files), 'file')}")
    return DONE


def _finish(arguments: argparse.Namespace) -> int:
    """Compares the last baseline with the first on fresh seeds, also on test data."""
    from trainer.studies.referee import read_judge
    from trainer.studies.referee_page import check_verdicts, found_sentences, last_hash
    from trainer.studies.referee_tries import measure_gain

    judge = read_judge(Path(arguments.folder), _runner(arguments))
    check_verdicts(judge)
    measure_gain(judge, arguments.pairs or judge.rules.pairs)
    judge = judge.now
    for sentence in (*found_sentences(judge), last_hash(judge)):
        show(sentence)
    show(f"To let others check this: python -m trainer claim write {judge.folder}")
    return DONE
