"""Measures the CPU time of a sweep over that of one command for each of its trials.

    python -m benchmarks.sweep [--rounds=3] [--only=warm,cold,blocks,calls,trial,programs,...]

CPU time is that of all processes that a side starts. Both sides run alternately. All sweeps are
computed by one worker and have no final runs. Of the single commands only some are measured, and
counted for all trials.
"""

import argparse
import contextlib
import io
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.interleave import report
from benchmarks.loop import PERCEPTRON

TRIALS = 16
RATES = {
    "perceptron": "optimizer.learning_rate",
    "muon_vit": "optimizer.groups.matrices.optimizer.learning_rate.peak_value",
    "sgd_convnet": "optimizer.learning_rate.peak_value",
}


class Sweeps:
    """Writes the files of sweeps, and runs commands.

    Args:
        folder: for everything.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.cache = folder / "cache"
        (folder / "perceptron.yaml").write_text(PERCEPTRON)
        self._count = 0

    def file(self, model: str, trials: int, seeds: int = 1, **arguments: object) -> Path:
        """Writes the file of a sweep over the learning rate.

        Args:
            model: a key of RATES.
            trials: number of points.
            seeds: of each point.
            **arguments: of the config of a run.
        """
        base = self.folder / "perceptron.yaml"
        if model != "perceptron":
            base = Path("configs", f"{model}.gin").resolve()
        content = {
            "base": str(base),
            "set": arguments,
            "trials": trials,
            "seeds": seeds,
            "goal": {"metric": "loss", "select_on": "test"},
            "final": None,
        }
        self._count += 1
        file = self.folder / f"sweep{self._count}.yaml"
        lines = [f"{key}: {json.dumps(value)}" for key, value in content.items()]
        space = f"{RATES[model]}: !space.log_uniform {{low: 1.0e-3, high: 1.0e-2}}"
        file.write_text("\n".join([*lines, f"space: {{{space}}}", "method: !method.random", ""]))
        return file

    def sweep(self, file: Path, cold: bool = False) -> tuple[float, float]:
        """Computes a sweep in a fresh folder; returns its CPU and wall seconds."""
        workdir = self.folder / file.stem
        shutil.rmtree(workdir, ignore_errors=True)
        return self.command("sweep", f"--config={file}", f"--workdir={workdir}", cold=cold)

    def alone(self, file: Path, count: int, cold: bool = False) -> float:
        """Computes some trials of a sweep by commands; returns the CPU seconds of all trials."""
        trials = sorted((self.folder / file.stem).glob("trials/*/*/*"))
        spent = 0.0
        for trial in trials[:count]:
            workdir = self.folder / "alone"
            shutil.rmtree(workdir, ignore_errors=True)
            config = shutil.copy(trial / "config.yaml", self.folder / "alone.yaml")
            spent += self.command(f"--config={config}", f"--workdir={workdir}", cold=cold)[0]
        return spent / min(count, len(trials)) * len(trials)

    def command(self, *arguments: str, cold: bool = False) -> tuple[float, float]:
        """Runs a command of the trainer; returns the CPU and wall seconds that it took."""
        cache = self.folder / "cold" if cold else self.cache
        shutil.rmtree(self.folder / "cold", ignore_errors=True)
        before, start = _children(), time.perf_counter()
        process = subprocess.run(
            [sys.executable, "-m", "trainer", *arguments],
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if process.returncode:
            raise SystemExit(f"{' '.join(arguments)} failed: {process.stderr[-2000:]}")
        return _children() - before, time.perf_counter() - start


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def one_command(sweeps: Sweeps, options: argparse.Namespace, cold: bool) -> None:
    """One sweep of 16 trials over 16 commands."""
    aims = {"perceptron": 0.15} if cold else {"perceptron": 0.25, **options.others}
    for model, aim in aims.items():
        steps = 1000 if model == "perceptron" else options.steps[model]
        file = sweeps.file(model, TRIALS, steps=steps)
        sweeps.sweep(file)  # warms the cache, and writes the configs of the trials
        sweeps.alone(file, 1)
        ours, theirs = [], []
        for _ in range(options.rounds):
            ours.append(sweeps.sweep(file, cold)[0])
            theirs.append(sweeps.alone(file, options.runs, cold))
        name = f"{TRIALS} trials of {steps} steps, {model}, {'cold' if cold else 'warm'} cache"
        other = f"{TRIALS} commands ({min(options.runs, TRIALS)} measured)"
        report(name, ours, theirs, aim, "s of CPU", other)


def blocks(sweeps: Sweeps, options: argparse.Namespace) -> None:
    """Blocks of steps in turn over single steps in turn, without the start of the sweep."""
    for model, aim in {"perceptron": 0.3, "muon_vit": 0.9}.items():
        steps = 1000 if model == "perceptron" else options.steps[model]
        pairs = []
        for more in ({}, {"steps_per_call": 1}):
            pairs.append([sweeps.file(model, TRIALS, steps=n, **more) for n in (1, 1 + steps)])
        for file in [file for pair in pairs for file in pair]:
            sweeps.sweep(file)
        seconds: Mapping[int, list[float]] = {0: [], 1: []}
        for _ in range(options.rounds):
            for side, (short, long) in enumerate(pairs):
                before = sweeps.sweep(short)[0]
                seconds[side].append(1e6 * (sweeps.sweep(long)[0] - before) / (TRIALS * steps))
        name = f"a step of {TRIALS} trials by turns, {model}, {steps} steps"
        report(name, seconds[0], seconds[1], aim, "us of CPU", "steps_per_call: 1")


def calls(sweeps: Sweeps, options: argparse.Namespace, steps: int = 64) -> None:
    """A block of each of 16 trials over one block of as many steps, as one program would have it.

    The second is a lower bound of what a loop over the trials inside one program could take.
    """
    import jax
    import numpy as np

    from trainer import config
    from trainer.engine.program import load_located

    read = config.load([sweeps.folder / "perceptron.yaml"], [], ["steps=100000"])
    each, all_ = load_located(read, (), steps), load_located(read, (), steps * TRIALS)
    states, state = [each.init(seed) for seed in range(TRIALS)], all_.init()
    batches = each.feed.batches(0)
    block = [next(batches) for _ in range(steps)]
    # As in a wave, in which trials share their batches: these are stacked once.
    each.feed, all_.feed = each.feed.shared(2), all_.feed.shared(2)
    seconds: Mapping[str, list[list[float]]] = {"wall": [[], []], "CPU": [[], []]}
    for number in range(20 * options.rounds + 1):
        for side in (0, 1):
            start, before = time.perf_counter(), time.process_time()
            if side == 0:
                for index in range(TRIALS):
                    states[index], metrics = each.advance(states[index], block)
            else:
                state, metrics = all_.advance(state, block * TRIALS)
            jax.block_until_ready(metrics)
            if number:  # the first round compiles
                seconds["wall"][side].append(1e3 * (time.perf_counter() - start))
                seconds["CPU"][side].append(1e3 * (time.process_time() - before))
    assert np.isfinite(float(states[0].step))
    for name, (ours, theirs) in seconds.items():
        label = f"{TRIALS} calls of {steps} steps, perceptron, {name}"
        report(label, ours, theirs, 1.1, "ms", f"one call of {TRIALS * steps} steps")


def trial(sweeps: Sweeps, options: argparse.Namespace) -> None:
    """What a trial costs beside its steps: 1000 short trials less 100 of them."""
    few, many = (sweeps.file("perceptron", count, steps=2) for count in (100, 1000))
    sweeps.sweep(few)
    found = []
    for _ in range(options.rounds):
        spent = [sweeps.sweep(file) for file in (few, many)]
        found.append([1e3 * (b - a) / 900 for a, b in zip(*spent, strict=True)])
    for name, values in zip(("CPU", "wall"), zip(*found, strict=True), strict=True):
        print(
            f"a trial of 2 steps and 2 evaluations, {name}: {statistics.median(values):.2f} ms"
            f" ({min(values):.2f} to {max(values):.2f}, {len(values)} rounds; target 10)"
        )


def programs(sweeps: Sweeps) -> None:
    """Counts what is compiled for many trials, and for few."""
    for trials in (10, 50):
        file = sweeps.file("perceptron", trials, seeds=4, steps=2)
        workdir = sweeps.folder / file.stem
        command = ["sweep", f"--config={file}", f"--workdir={workdir}"]
        code = f"from benchmarks.sweep import count; count({command!r})"
        subprocess.run([sys.executable, "-c", code], check=True)


def ladder(sweeps: Sweeps, options: argparse.Namespace) -> None:
    """Compares a ladder of four rungs with four sweeps, one for each rung."""
    steps = [100, 200, 400, 800]
    apart = [sweeps.file("perceptron", TRIALS, steps=each) for each in steps]
    together = sweeps.file("perceptron", TRIALS, steps=steps[0])
    together.write_text(f"{together.read_text()}ladder: {{path: steps, values: {steps}}}\n")
    ours, theirs = [], []
    for number in range(options.rounds):
        for side in ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours"):
            if side == "ours":
                ours.append(sweeps.sweep(together)[0])
            else:
                theirs.append(sum(sweeps.sweep(each)[0] for each in apart))
    name = f"a ladder of 4 rungs with {TRIALS} trials each, CPU"
    report(name, ours, theirs, 1.0, "s", "four sweeps")


def halving(sweeps: Sweeps, options: argparse.Namespace) -> None:
    """Compares 27 trials that are cut by thirds with 27 whole ones of as many steps in all."""
    steps, cuts = 2700, [300, 900]
    total = 27 * 300 + 9 * 600 + 3 * 1800
    whole = sweeps.file("perceptron", 27, steps=total // 27, eval_every=100)
    cut = sweeps.file("perceptron", 27, steps=steps, eval_every=100)
    method = f"!method.halving {{points: !method.random , cuts: {cuts}}}"
    cut.write_text(cut.read_text().replace("!method.random", method))
    ours, theirs = [], []
    for each in (cut, whole):
        sweeps.sweep(each)  # warms the cache
    for number in range(options.rounds):
        for side in ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours"):
            if side == "ours":
                ours.append(sweeps.sweep(cut)[0])
            else:
                theirs.append(sweeps.sweep(whole)[0])
    name = f"27 trials that are cut by thirds, {total:,} steps, CPU"
    report(name, ours, theirs, 1.05, "s", "27 whole ones of as many steps")


def count(command: list[str]) -> None:
    """Computes a sweep in this process, and prints how many programs it compiled."""
    import jax

    from trainer.__main__ import main as trainer
    from trainer.engine.program import Program

    compiled, backend = [], []
    inner = Program.compile

    def compile(self: Program, state: object) -> None:
        compiled.append(self)
        inner(self, state)  # type: ignore[arg-type]

    Program.compile = compile
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: backend.append(event) if "backend_compile" in event else None
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = trainer(command)
    assert code == 0, code
    trials = len([*Path(command[-1].partition("=")[2]).glob("trials/*/*/*")])
    print(
        f"{trials} trials over floats and seeds: {len(compiled)} program compiled (target 1),"
        f" {len(backend)} compilations of XLA with those of the start"
    )


def main() -> None:
    """Measures what --only names, and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="warm,cold,blocks,calls,trial,programs,ladder,halving")
    parser.add_argument("--runs", type=int, default=4, help="single commands that are measured")
    parser.add_argument("--vit_steps", type=int, default=100)
    parser.add_argument("--convnet_steps", type=int, default=100)
    options = parser.parse_args()
    options.steps = {"muon_vit": options.vit_steps, "sgd_convnet": options.convnet_steps}
    options.others = {"muon_vit": 0.97, "sgd_convnet": 0.85}
    only = options.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        sweeps = Sweeps(Path(folder))
        for name, cold in (("warm", False), ("cold", True)):
            if name in only:
                one_command(sweeps, options, cold)
        if "blocks" in only:
            blocks(sweeps, options)
        if "calls" in only:
            calls(sweeps, options)
        if "trial" in only:
            trial(sweeps, options)
        if "programs" in only:
            programs(sweeps)
        if "ladder" in only:
            ladder(sweeps, options)
        if "halving" in only:
            halving(sweeps, options)


if __name__ == "__main__":
    main()
