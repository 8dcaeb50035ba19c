"""Damages files of sweeps at random, and demands that every command answers with a sentence.

    python -m tests.sweep_fuzz [--mutations=5000] [--seed=0]

Three sweeps are computed first: one that is complete, one whose wave was stopped, and one that was
stopped while it computed a trial alone. In each mutation a file is cut, edited, emptied or replaced
by something else, and commands read the folder. Where the damaged file belongs to a wave, a worker
must go on, and come to the results of the undamaged sweep.
"""

import argparse
import collections
import contextlib
import functools
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import runs
from tests.sweep_results import compare

SMALL = runs.replaced("model", "!models.mlp {width: 4, depth: 1, num_classes: 3}")
BASE = runs.replaced("eval_every", "4", SMALL) + "\nsteps_per_call: 1\nwatchdog: null\n"
RATE = "optimizer.learning_rate: !space.values"
COMPLETE = f"""
base: base.yaml
arms:
  low: {{space: {{{RATE} {{values: [1e-3, 1e30]}}}}}}
  high: {{space: {{{RATE} {{values: [1e-2, 3e-3]}}}}}}
goal: {{metric: loss, select_on: test}}
final: {{seeds: 2}}
"""
STOPPED = f"""
base: base.yaml
space: {{{RATE} {{values: [1e-3, 1e30]}}}}
goal: {{metric: loss, select_on: test}}
final: null
"""
ALONE = f"""
base: base.yaml
set: {{data: !unruly.poisoned {{at: [6]}}, on_nonfinite: rollback}}
space: {{{RATE} {{values: [1e-3]}}}}
goal: {{metric: loss, select_on: test}}
final: null
"""
TEXTS = {"complete": COMPLETE, "stopped": STOPPED, "alone": ALONE}
VOCABULARY = "--vocabulary=unruly"
NUMBERS = ("1e400", "-1e400", "1" + "0" * 400, "1" * 5000, "-1", "0.5", str(2**70), "NaN")
VALUES = (*NUMBERS, "5", "null", "true", "[]", "{}", '""', '"x"', '"\\ud800"', '"\\u0000"', "[[1]]")


class Answer:
    """What a command answered.

    Attributes:
        code: its exit code; None if it raised.
        said: what it printed, and the traceback of what it raised.
    """

    def __init__(self, *words: str):
        from trainer.__main__ import main

        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                try:
                    self.code = main(words)
                except SystemExit as error:
                    self.code = error.code
                except BaseException:
                    self.code = None
                    traceback.print_exc()
        self.said = out.getvalue()


class Place:
    """The three sweeps, of which each mutation gets a copy.

    Args:
        folder: for the sweeps and their copies.
        replace: sets an attribute of an object, as `setattr` does.
    """

    def __init__(self, folder: Path, replace: Callable[[Any, str, Any], None] = setattr):
        self.folder, self._prepared = folder, {}
        self.answers: collections.Counter[tuple[str, int | None]] = collections.Counter()
        self._share_programs(replace)
        (folder / "base.yaml").write_text(BASE)
        for name, text in TEXTS.items():
            (folder / f"{name}.yaml").write_text(text)
            answer = Answer(*self.sweep(name, folder / name), "--plan_only")
            assert answer.code == 0, answer.said
        (folder / "more.yaml").write_text(COMPLETE + "seeds: 2\n")
        self.work("complete", 0)
        self.work("stopped", 75, after=8)
        self.work("alone", 75, after=16)
        for name in TEXTS:
            for words in self.looks(name, folder / name):
                answer = Answer(*words)
                assert answer.code == 0, (words, answer.said)
        shutil.copytree(folder / "complete", folder / "complete reference")
        for name in ("stopped", "alone"):
            shutil.copytree(folder / name, folder / f"{name} reference")
            self.work(f"{name} reference", 0)

    def sweep(self, name: str, workdir: Path) -> list[str]:
        return ["sweep", f"--config={self.folder / name}.yaml", VOCABULARY, f"--workdir={workdir}"]

    def work(self, name: str, code: int, after: int = 10**9) -> None:
        from trainer.sweep.worker import Worker

        lines: list[str] = []
        found = Worker(self.folder / name, 1, runs.Signals(after), lines.append).run()
        assert found == code, (name, found, lines)

    def _share_programs(self, replace: Callable[[Any, str, Any], None]) -> None:
        """Compiles each program once for all copies, and looks once for what is installed."""
        from trainer.sweep.worker import Worker
        from trainer.workdir import fingerprint

        replace(fingerprint, "_versions", functools.cache(fingerprint._versions))

        inner = Worker._prepare

        def prepare(worker: Worker, claim: Any) -> Any:
            key = worker.folder.plan.digest, claim.program
            if key not in self._prepared:
                self._prepared[key] = inner(worker, claim)
            return self._prepared[key]

        replace(Worker, "_prepare", prepare)

    # Mutations.

    def files(self, name: str) -> dict[str, list[str]]:
        """Returns the files of a sweep by their kinds, such as "trials/*/*/*/run.json"."""
        kinds: dict[str, list[str]] = collections.defaultdict(list)
        folder = self.folder / name
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                path = file.relative_to(folder).as_posix()
                kind = re.sub(r"/(low|high|base)(?=[./])|[0-9a-f]{12,}|[0-9]+", "*", path)
                kinds[kind].append(path)
        return kinds

    def mutated(self, draw: random.Random, copy: Path) -> tuple[str, str, str]:
        """Copies a sweep and damages a file; returns its name, the file and what was done."""
        name = draw.choice(("complete", "stopped", "stopped", "alone"))
        kinds = self.files(name)
        file = draw.choice(kinds[draw.choice(sorted(kinds))])
        shutil.copytree(self.folder / name, copy)
        return name, file, mutate(copy / file, draw)

    def looks(self, name: str, copy: Path) -> list[list[str]]:
        """Returns the commands that only read a sweep, and succeed if it is not damaged."""
        config = f"--config={self.folder / name}.yaml"
        more = f"--config={self.folder / 'more.yaml'}"
        sweep, trials = str(copy), str(copy / "trials")
        one, two = f"{copy}/trials/low/0000/0", f"{copy}/trials/high/0001/0"
        report = f"--output={copy}.report"
        every = [
            ["sweep", "status", sweep],
            ["sweep", "show", sweep, "low/0000/0" if name == "complete" else "base/0000/0"],
            ["sweep", config, VOCABULARY, f"--workdir={copy}", "--plan_only"],
            ["sweep", "extend", sweep, more, VOCABULARY, "--dry_run"],
            ["report", sweep, report, "--formats=markdown,html,csv"],
            ["sweep", "show", sweep, "final/high"],
            ["plot", sweep, "--metric=eval/loss"],
            ["plot", trials, "--metric=eval/loss", "--each_run"],
            ["report", one, two, report, "--formats=markdown"],
            ["compare", one, two, "--no_program"],
            ["compare", one, str(self.folder / "base.yaml"), VOCABULARY, "--no_program"],
            ["compare", one, two, VOCABULARY],
        ]
        kept = range(12) if name == "complete" else (0, 1, 2, 4)
        return [every[index] for index in kept]

    def commands(self, name: str, copy: Path, draw: random.Random) -> Iterator[list[str]]:
        """Yields commands that read a copy; the last one changes it."""
        looks = self.looks(name, copy)
        slow = [words for words in looks if words[1] == "extend" or words[3:] == [VOCABULARY]]
        yield from draw.sample([words for words in looks if words not in slow], 2)
        yield from (words for words in slow if draw.random() < 0.1)
        yield ["sweep", "work", str(copy), VOCABULARY]

    def try_one(self, number: int, draw: random.Random) -> list[str]:
        """Damages a file and gives commands; returns what is wrong with the answers."""
        copy = self.folder / f"copy{number}"
        name, file, done = self.mutated(draw, copy)
        wrong = []
        of_wave = file.startswith("waves/")
        # What a trial has in a wave is taken as it is, if it may be what a worker wrote.
        staged = re.match("waves/.*/trials/.*json", file)
        for words in self.commands(name, copy, draw):
            answer = Answer(*words)
            self.answers[" ".join(words[:2]) if words[0] == "sweep" else words[0], answer.code] += 1
            faults = list(check(answer, copy, file))
            # Another version, or other code, may have begun it: that is for the user to decide.
            refused = answer.code == 2 and "computed from the beginning" in answer.said
            if words[1] == "work" and of_wave and not refused:
                if answer.code != 0:
                    faults.append("The worker did not go on.")
                else:
                    found = compare(copy, self.folder / f"{name} reference", 12)
                    kinds = ("lost", "doubled") if staged else found
                    faults += [f"{kind}: {x}"[:300] for kind in kinds for x in found[kind]]
            short = " ".join(words).replace(str(self.folder), "")
            wrong += [
                f"{name}/{file}, {done}: {short}: {fault}\n{answer.said[-1500:]}"
                for fault in faults
            ]
        shutil.rmtree(copy, ignore_errors=True)
        shutil.rmtree(f"{copy}.report", ignore_errors=True)
        return wrong


def check(answer: Answer, copy: Path, file: str) -> Iterator[str]:
    """Yields what is wrong with the answer of a command."""
    if answer.code is None or "Traceback (most recent call last)" in answer.said:
        yield "a traceback"
    elif answer.code not in (0, 1, 2):
        yield f"code {answer.code}"
    elif answer.code and "error: " not in answer.said:
        yield "no error"
    elif answer.code and not any(part in answer.said for part in places(copy, file)):
        yield "the file is not named"


def places(copy: Path, file: str) -> list[str]:
    """Returns the file and the folders above it, as messages may name them."""
    path = Path(file)
    return [str(copy / each) for each in (path, *path.parents[:-1])] + [path.name]


# What happens to a file.


def mutate(file: Path, draw: random.Random) -> str:
    """Damages a file; returns what was done."""
    content = file.read_bytes()
    text = content.decode(errors="replace")
    lines = text.splitlines(keepends=True)
    action = draw.choice(ACTIONS)
    if action in ("value", "value", "key"):
        return action + _edit(file, text, lines, action, draw)
    match action:
        case "empty":
            file.write_bytes(b"")
        case "cut":
            file.write_bytes(content[: draw.randrange(len(content) + 1)])
        case "flip" if content:
            at = draw.randrange(len(content))
            file.write_bytes(content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :])
        case "noise":
            file.write_bytes(draw.randbytes(draw.randrange(1, 300)))
        case "whole":
            file.write_text(draw.choice(VALUES))
        case "nested":
            file.write_text(draw.choice("[{") * 100_000)
        case "line" if lines:
            at = draw.randrange(len(lines))
            lines[at : at + 1] = draw.choice([[], [lines[at]] * 2, ["\n"], ["?: [\n"]])
            file.write_text("".join(lines))
        case "utf16":
            file.write_bytes(text.encode("utf-16"))
        case _:
            file.unlink()
            if action == "folder":
                (file / "inner").mkdir(parents=True)
            elif action == "pipe":
                os.mkfifo(file)
            elif action == "link":
                file.symlink_to(draw.choice(["nowhere", file.name, "/dev/zero", "/dev/null"]))
            elif action == "unreadable":
                file.write_bytes(content)
                file.chmod(0)
    return action


ACTIONS = (
    *("value", "value", "value", "value", "key", "key", "empty", "cut", "flip", "noise", "whole"),
    *("nested", "line", "utf16", "missing", "folder", "pipe", "link", "unreadable"),
)


def _edit(file: Path, text: str, lines: list[str], action: str, draw: random.Random) -> str:
    """Replaces a value of JSON, or removes a key, in the file or in one of its lines."""
    at = draw.randrange(len(lines)) if lines else 0
    by_line = file.suffix == ".jsonl"
    try:
        content = json.loads(lines[at] if by_line and lines else text)
    except ValueError:
        file.write_text(draw.choice(VALUES))
        return " whole"
    nodes = list(_nodes(content))
    if not nodes:
        file.write_text(draw.choice(VALUES))
        return " whole"
    parent, key = draw.choice(nodes)
    value = draw.choice(VALUES)
    if action == "key":
        del parent[key]
        value = "removed"
    else:
        parent[key] = "<value>"
    new = json.dumps(content).replace('"<value>"', value)
    if by_line:
        lines[at] = new + "\n"
        new = "".join(lines)
    file.write_text(new)
    return f" {key}: {value[:20]}"


def _nodes(content: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(content, dict | list):
        for key in content if isinstance(content, dict) else range(len(content)):
            yield content, key
            yield from _nodes(content[key])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    sys.path.insert(0, str(runs.LAB))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    began, wrong = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="lockstep-fuzz-") as folder:
        place = Place(Path(folder))
        for number in range(arguments.first, arguments.first + arguments.mutations):
            found = place.try_one(number, random.Random(f"{arguments.seed} {number}"))
            for each in found:
                print(f"{number}: {each}\n", flush=True)
            wrong += found
    for (command, code), count in sorted(place.answers.items(), key=str):
        print(f"{count:6d}  {command}: {code}")
    seconds = time.monotonic() - began
    print(f"{arguments.mutations} mutations in {seconds:.0f} s: {len(wrong)} wrong answers")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
