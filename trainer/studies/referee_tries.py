"""Judges tries in the folder of a referee, from its start to its finish; see `referee`.

`start` begins a referee, `judge_change` judges one change, and `measure_gain` measures the gain of
all that was kept. Each holds the lock of the folder, goes on where an earlier process was
interrupted, and raises Interrupted if its own runs are.
"""

import hmac
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import Builder, Config, dump, load
from trainer.messages import UserError, joined, plural
from trainer.studies import referee_code, referee_runs
from trainer.studies.challenge import FREE, check_free, is_under
from trainer.studies.referee import (
    BASELINE,
    FIRST,
    FIXED,
    RULES_FILE,
    TRY,
    Gain,
    Judge,
    Noise,
    Try,
    build_rules,
    noise_of,
)
from trainer.studies.referee_runs import NotPlanned, Runner
from trainer.studies.shadow import differing
from trainer.sweep.ledger import LEDGER_FILE, append, sha256
from trainer.sweep.plan_file import read_plan
from trainer.writers import locks
from trainer.writers.files import read_regular, replace_file

SECRET_FILE = "secret"
_AT_ONCE = 4  # pairs that are computed at least together, because a start of the workers takes long


def start(config: Config, folder: Path, runner: Runner) -> tuple[Judge, Noise]:
    """Measures the noise of the baseline, and begins a referee in a folder, with rules."""
    # Raises UserError if the folder has another referee or other files, or if at the measured noise
    # the rules cannot decide; nothing but the runs of the baseline is kept then.
    rules, folder = build_rules(config), folder.absolute()
    judge = Judge(folder, replace(runner, goal=rules.goal), rules)
    names = [rules.baseline] if isinstance(rules.baseline, str) else rules.baseline
    baseline = load([Path(config.sources[""].file).parent / name for name in names])
    check_free(config, rules.free, baseline, runner.vocabulary)
    root = replace(config.root, kwargs={**config.root.kwargs, "baseline": FIRST})
    texts = {FIRST: dump(baseline.root).encode(), RULES_FILE: dump(root).encode()}
    begun = (folder / LEDGER_FILE).exists()
    if begun and any(read_regular(folder / name) != text for name, text in texts.items()):
        raise UserError(f"{folder} has a referee with other rules: use another --workdir.")
    if begun:
        return judge, noise_of(judge)
    ours = {RULES_FILE, "baselines", "code", "noise", "noise.yaml", "lock"}
    if strange := sorted({*(os.listdir(folder) if folder.exists() else ())} - ours):
        raise UserError(f"{folder} has other files, such as {strange[0]}: use another --workdir.")
    (folder / FIRST).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locks.exclusive(folder):
        for name, text in texts.items():
            replace_file(folder / name, text)
        code = referee_code.keep(folder, runner.vocabulary)
        first = baseline.root.kwargs.get("seed", 0)
        seeds = range(first, first + rules.noise)
        copy = referee_code.copy_of(folder, code)
        arms = {BASELINE: folder / FIRST}
        judge.runner.compute(folder / "noise", arms, seeds, copy, tested=False)
        found = noise_of(judge)
        if found.needed is None or found.needed > rules.pairs:
            raise UserError(
                f"{config.argument_source('pairs')}: pairs is {rules.pairs}, which cannot decide."
                f" {found.sentence} Write at least as many pairs, a larger relevant, or fewer"
                " most_tries, and start the same command again: it keeps these runs."
            )
        hashes = {"rules": sha256(texts[RULES_FILE]), "baseline": sha256(texts[FIRST])}
        sweeps = referee_runs.ends_of_ledgers(folder, [folder / "noise"])
        event = {"event": "start", **hashes, "code": code, "secret": sha256(_make_secret(folder))}
        append(folder, [{**event, "sweeps": sweeps}])
    return judge.now, found


def _make_secret(folder: Path) -> bytes:
    """Writes a new secret, which only its owner can read; without it, no try can be judged."""
    secret = secrets.token_hex(32).encode()
    descriptor = os.open(folder / SECRET_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    return secret


def judge_change(judge: Judge, files: Sequence[Path], sets: Sequence[str], note: str = "") -> Try:
    """Judges a change, files and settings that are laid over the baseline; returns it ended."""
    # An earlier try that was interrupted is ended first. Raises UserError if the change cannot be
    # tried, because it changes nothing, or what it must not, and ConfigError if a file has a
    # mistake; nothing is noted then.
    with locks.exclusive(judge.folder):
        judge = judge.now
        if judge.ledger.of("finish"):
            raise UserError(f"The referee in {judge.folder} is finished: start another one.")
        config = _changed(judge, files, sets)
        code = referee_code.keep(judge.folder, judge.runner.vocabulary)
        if judge.tries and not judge.tries[-1].verdict:
            ended = _go_on(judge, judge.tries[-1])
            if (ended.config, ended.code) == (sha256(dump(config.root).encode()), code):
                return ended
            judge.runner.log(f"Try {ended.number} was interrupted, and has ended: {ended.why}")
            judge = judge.now
            config = _changed(judge, files, sets)  # over another baseline, if that was kept
        number = _enter(judge, config, code, note)
        return _go_on(judge.now, judge.now.tries[number - 1])


def measure_gain(judge: Judge, pairs: int) -> list[Gain]:
    """Compares the last baseline with the first, also on test data, and ends the referee."""
    with locks.exclusive(judge.folder):
        judge = judge.now
        if judge.tries and not judge.tries[-1].verdict:
            last = judge.tries[-1].number
            raise UserError(f"Try {last} has not ended: start its command again, and wait.")
        keeps = len(judge.keeps)
        if not judge.ledger.of("finish"):
            wanted = pairs if keeps else 0
            seeds = [*_draw(judge, f"finish {judge.ledger.head}", wanted, 0)]
            append(judge.folder, [{"event": "finish", "seeds": seeds}])
            judge = judge.now
        seeds, folder = judge.ledger.of("finish")[0].content["seeds"], judge.folder / "finish"
        arms = {BASELINE: judge.baseline(0), TRY: judge.baseline(keeps)}
        sweeps = judge.sweeps(folder, 0, judge.code(keeps)) if keeps else {}
        _compute(judge, sweeps, arms, seeds, tested=True)
        if not judge.ledger.of("finished"):
            ends = referee_runs.ends_of_ledgers(judge.folder, sweeps)
            append(judge.folder, [{"event": "finished", "sweeps": ends}])
            judge = judge.now
    gains = judge.gains()
    if keeps and not gains:
        raise UserError(f"A run in {judge.folder / 'finish'} did not end with a finite metric.")
    return gains


def _changed(judge: Judge, files: Sequence[Path], sets: Sequence[str]) -> Config:
    """Returns the config of a try; raises UserError or ConfigError if it cannot be tried."""
    baseline = judge.baseline(len(judge.keeps))
    config = load([baseline, *files], sets=sets)
    Builder(config, judge.runner.vocabulary).check()
    return config


def _enter(judge: Judge, config: Config, code: str, note: str) -> int:
    """Notes a try in the ledger, and returns its number; UserError if it must not be tried."""
    if judge.decided >= judge.rules.most_tries:
        raise UserError(
            f"The referee in {judge.folder} has decided {plural(judge.decided, 'try')}, as many as"
            " its rules allow: finish it, and start another one with the last of baselines/."
        )
    baseline = len(judge.keeps)
    changes = changes_of(judge, baseline, config, code)
    before = referee_runs.code_of_runs(_runs_of_baseline(judge, baseline))
    referee_code.refuse_edits_beside(before, judge.runner.vocabulary)
    number, text = len(judge.tries) + 1, dump(config.root).encode()
    folder = judge.folder / f"tries/{number:04}"
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "config.yaml", text)
    hashes = {"config": sha256(text), "code": code}
    event = {"event": "try", "number": number, **hashes, "baseline": baseline}
    append(judge.folder, [{**event, "note": note, "changes": changes}])
    return number


def changes_of(judge: Judge, baseline: int, config: Config, code: str) -> list[str]:
    """Returns what a try changes of a baseline; UserError if that is nothing, or must not be."""
    packages = judge.runner.vocabulary
    both = {BASELINE: load([judge.baseline(baseline)]), TRY: config}
    found = differing(both, packages)
    first = judge.code(baseline)
    edited = referee_code.edits(judge.folder, first, code) if first and code else []
    if not found and not edited:
        since = f", as try {judge.keeps[-1].number} has left it" if baseline else ""
        raise UserError(f"The change changes nothing of the baseline{since}.")
    refuse_arguments(judge, found)
    referee_code.refuse_edits(edited, packages, both.values(), _free(judge))
    return [f"{x}: {each[BASELINE]} -> {each[TRY]}" for x, each in found.items()] + edited


def refuse_arguments(judge: Judge, found: Mapping[str, Mapping[str, str]]) -> None:
    """Raises UserError if a try changes an argument, path -> values, that it must not."""
    free = _free(judge)
    for path, values in found.items():
        if not is_under(path, free):
            raise UserError(
                f"A try must not change {path}, here from {values[BASELINE]} to {values[TRY]}:"
                f" it may change {joined(free)}."
            )


def _free(judge: Judge) -> list[str]:
    return [*(path for path in FREE if path not in FIXED), *judge.rules.free]


def _go_on(judge: Judge, each: Try) -> Try:
    """Judges a try that is in the ledger, from where it was interrupted."""
    if each.code and not judge.runner.vocabulary:
        raise UserError(
            f"Try {each.number} has not ended, and runs code of yours: add --vocabulary=PACKAGE to"
            " the command, so that it can go on."
        )
    try:
        ended = _screened(judge, each)
        while ended is None:
            ended = _decided(judge, each)
            judge = judge.now
            each = judge.tries[-1]
    except NotPlanned as error:  # in shapes or values, which reading its file does not show
        return _end(judge, each, "discard", "plan", f"It cannot be computed: {error}")
    return ended


def _screened(judge: Judge, each: Try) -> Try | None:
    """Computes a try on known seeds; returns it ended if that is enough, or else None."""
    if each.seeds:
        return None
    seeds, before = _known(judge, each)
    folder, arms = judge.place(each) / "screen", {TRY: judge.config(each)}
    code = referee_code.copy_of(judge.folder, each.code)
    judge.runner.plan(folder, arms, seeds, code, tested=False)
    most = judge.rules.most_flops
    first = referee_runs.flops_of_runs(judge.folder / "noise")
    own = referee_runs.flops_of_runs(folder)
    if own > most * first:
        why = (
            f"A run of it takes {own / first:.3g} times the FLOPs of one of the first baseline, and"
            f" the rules allow {most:g} times."
        )
        return _end(judge, each, "discard", "plan", why)
    if not judge.rules.screen:
        return None
    judge.runner.compute(folder, arms, seeds, code, tested=False)
    runs = judge.runner.runs(folder)[TRY]
    if failed := [run.name for run in runs.values() if run.end == "failed"]:
        return _end(judge, each, "discard", "screen", f"{failed[0]} in {folder} failed.")
    gains = [judge.runner.gain(before[seed], runs[seed]) for seed in seeds]
    if diverged := gains.count(-math.inf):
        why = f"{diverged} of its {plural(len(seeds), 'run')} on known seeds diverged."
        return _end(judge, each, "discard", "screen", why)
    if judge.won(mean := float(np.mean(gains))):
        return None
    why = f"It is better by {mean:.3g} in the mean of {plural(len(seeds), 'run')} on known seeds."
    return _end(judge, each, "discard", "screen", why)


def _known(judge: Judge, each: Try) -> tuple[list[int], Mapping[int, Any]]:
    """Returns the seeds of the screen, and the runs of the baseline on them."""
    found = judge.runner.runs(_runs_of_baseline(judge, each.baseline))
    runs = found[TRY if each.baseline else BASELINE]
    return [*runs][: max(1, judge.rules.screen)], runs


def _runs_of_baseline(judge: Judge, number: int) -> Path:
    """Returns the sweep with runs of a baseline: one that was a try has run on seeds known now."""
    return judge.place(judge.keeps[number - 1]) / "pairs" if number else judge.folder / "noise"


def _decided(judge: Judge, each: Try) -> Try | None:
    """Returns a try that its pairs end, or None once it has more of them."""
    verdict, wins, losses = judge.verdict_of(each)
    left = judge.rules.pairs - wins - losses
    count = f"{plural(wins, 'pair')} won, {losses} lost"
    if verdict != "undecided":
        failed = judge.pairs(each).failed
        return _end(judge, each, verdict, "pairs", f"{failed} failed." if failed else f"{count}.")
    if not (more := each.levels.pairs_to_decision(wins, losses, left)):
        why = f"{count}: the {left} that are left cannot decide that it is kept."
        return _end(judge, each, "undecided", "pairs", why)
    wanted = wins + losses + min(left, max(more, _AT_ONCE)) - len(each.seeds)
    if new := [*_draw(judge, each.line, wanted, len(each.seeds))]:
        append(judge.folder, [{"event": "seeds", "number": each.number, "seeds": new}])
    folder, seeds = judge.place(each) / "pairs", (*each.seeds, *new)
    arms = {BASELINE: judge.baseline(each.baseline), TRY: judge.config(each)}
    sweeps = judge.sweeps(folder, each.baseline, each.code)
    _compute(judge, sweeps, arms, seeds)
    *_, last = sweeps
    runs = judge.both(folder)[0].values()
    if failed := [run.name for run in runs if run.end == "failed"]:
        raise UserError(
            f"{failed[0]} in {last} failed, which is a run of the baseline: see run.json there."
            f" python -m trainer sweep work {last} --failed computes it again."
        )
    return None


def _compute(
    judge: Judge,
    sweeps: Mapping[Path, tuple[Sequence[str], str]],
    arms: Mapping[str, Path],
    seeds: Sequence[int],
    tested: bool = False,
) -> None:
    """Computes the arms of some sweeps, each with its code; see `Judge.sweeps`."""
    for folder, (names, hash) in sweeps.items():
        code = referee_code.copy_of(judge.folder, hash)
        judge.runner.compute(folder, {name: arms[name] for name in names}, seeds, code, tested)


def _draw(judge: Judge, line: str, count: int, first: int) -> Iterator[int]:
    """Yields seeds that were never used, from the secret and the hash of a line."""
    used = {*read_plan(judge.folder / "noise").seeds, *(x for y in judge.tries for x in y.seeds)}
    return seeds_from(read_secret(judge), line, count, first, used)


def read_secret(judge: Judge) -> bytes:
    """Returns the secret of a referee; raises UserError if it is not that of its start."""
    file = judge.folder / SECRET_FILE
    secret = read_regular(file) if file.exists() else b""
    if sha256(secret) != judge.ledger.of("start")[0].content["secret"]:
        what = "was changed" if secret else "is missing"
        raise UserError(f"{file} {what}: restore it, as seeds are drawn with it.")
    return secret


def seeds_from(secret: bytes, line: str, count: int, first: int, used: set[int]) -> Iterator[int]:
    """Yields a number of seeds from a secret and a line, and adds them to those that are used."""
    # `first` is how many were drawn for the line before.
    while count > 0:
        drawn = hmac.digest(secret, f"{line} {first}".encode(), "sha256")
        first += 1
        if (seed := int.from_bytes(drawn[:4], "big")) not in used:
            used.add(seed)
            count -= 1
            yield seed


def _end(judge: Judge, each: Try, verdict: str, stage: str, why: str) -> Try:
    """Notes the end of a try, and makes the next baseline of one that is kept."""
    if verdict == "keep":
        file = judge.folder / f"baselines/{each.baseline + 1:04}.yaml"
        replace_file(file, read_regular(judge.config(each)))
    place = judge.place(each)
    folders = [place / "screen", *judge.sweeps(place / "pairs", each.baseline, each.code)]
    event = {"event": "end", "number": each.number, "verdict": verdict, "stage": stage}
    ends = referee_runs.ends_of_ledgers(judge.folder, folders)
    append(judge.folder, [{**event, "why": why, "sweeps": ends}])
    return judge.now.tries[-1]
