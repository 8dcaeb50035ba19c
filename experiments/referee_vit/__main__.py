"""Lets a referee and "keep if smaller" judge the same sixty changes, and tells which keeps hold.

    python -m experiments.referee_vit --workdir=DIR [--tries=60] [--seeds=16]

Half of the changes change nothing that matters: the decay of a mean, by some millionths. The others
set one hyperparameter to a value of a list. "Keep if smaller" computes one run a change, on one
seed, and keeps what has a smaller validation loss than the run before, as loops of programs do that
propose changes. Afterwards every config that either kept is computed on fresh seeds beside the one
before.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainer.config import Call, dump, load
from trainer.report.statistics.estimates import mean_interval
from trainer.report.sweep_results import read_sweep_results

HERE, RELEVANT = Path(__file__).parent, 0.1  # as in referee.yaml
MATRICES = "optimizer.groups.matrices.optimizer"
REST = "optimizer.groups.rest.optimizer"
# hyperparameter -> values that a change may set
VALUES: dict[str, tuple[float, ...]] = {
    f"{MATRICES}.learning_rate.peak_value": (0.002, 0.01, 0.02, 0.04, 0.08),
    f"{REST}.learning_rate.peak_value": (3e-4, 2e-3, 4e-3, 8e-3),
    f"{MATRICES}.weight_decay": (0.0, 0.02, 0.1, 0.3),
    f"{REST}.weight_decay": (0.0, 0.02, 0.1, 0.3),
    f"{MATRICES}.momentum": (0.8, 0.9, 0.98),
    f"{REST}.b2": (0.95, 0.98, 0.995),
    "optimizer.clip_norm": (0.3, 3.0),
}
NOTHING = f"{REST}.b1"


def changes(tries: int) -> list[str]:
    """Returns settings, every second of which changes nothing that matters."""
    rng = random.Random(0)
    found = []
    for index in range(tries):
        if index % 2:
            found.append(f"{NOTHING}={0.9 + 1e-6 * (index + 1):.6f}")
        else:
            path = rng.choice([*VALUES])
            found.append(f"{path}={rng.choice(VALUES[path])}")
    return found


def trainer(*words: str) -> subprocess.CompletedProcess:
    """Runs a command of the trainer."""
    command = [sys.executable, "-m", "trainer", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def by_referee(folder: Path, settings: Sequence[str]) -> list[Path]:
    """Returns the baselines of a referee, the first one first."""
    done = trainer("referee", "start", f"--config={HERE / 'referee.yaml'}", f"--workdir={folder}")
    assert done.returncode == 0, done.stderr
    print(done.stdout, flush=True)
    for setting in settings:
        done = trainer("referee", "try", str(folder), "--json", "--set", setting)
        if done.returncode == 2:  # the baseline has this value by now
            print(f"{setting}: {done.stderr.strip()[:90]}", flush=True)
            continue
        found = json.loads(done.stdout)
        print(f"{setting}: {found['verdict']}. {found['why']}", flush=True)
    print(trainer("referee", "status", str(folder)).stdout, flush=True)
    return sorted((folder / "baselines").glob("*.yaml"))


def by_one_seed(folder: Path, settings: Sequence[str]) -> list[Path]:
    """Returns the configs that are kept because one run has a smaller loss, the first one first."""
    folder.mkdir(parents=True)
    kept, best = [folder / "0000.yaml"], float("inf")
    kept[0].write_text(dump(load([HERE / "baseline.yaml"]).root))
    for index, setting in enumerate(["seed=0", *settings]):
        config = folder / "next.yaml"
        config.write_text(dump(load([kept[-1]], sets=[setting]).root))
        run = folder / f"runs/{index:02}"
        done = trainer(f"--config={config}", f"--workdir={run}")
        assert done.returncode == 0, done.stderr
        loss = json.loads((run / "summary.json").read_text())["metrics"]["validation/loss"]
        if loss < best:
            best = loss
            if index:
                kept.append(config.rename(folder / f"{len(kept):04}.yaml"))
    return kept


def judged(folder: Path, configs: Sequence[Path], seeds: int) -> None:
    """Prints which configs are better than the one before on fresh seeds, and the whole gain."""
    names = [f"c{index:02}" for index in range(len(configs))]
    sweep = {
        "base": str(configs[0]),
        "arms": {
            name: Call("arm", {"files": [str(file)]})
            for name, file in zip(names, configs, strict=True)
        },
        "seeds": [10**6 + index for index in range(seeds)],
        "final": None,
        "goal": Call("goal", {"metric": "loss", "mode": "min"}),
        "differs": ["nothing"],
    }
    file = folder.with_suffix(".yaml")
    file.write_text(dump(Call("sweep", sweep)))
    done = trainer("sweep", f"--config={file}", f"--workdir={folder}")
    assert done.returncode == 0, done.stderr
    workload = read_sweep_results(folder)
    losses = [np.array(workload.values_of(name, "validation/loss")) for name in names]
    gains = [mean_interval(a - b) for a, b in zip(losses, losses[1:], strict=False)]
    better = sum(gain.value > RELEVANT for gain in gains)
    worse = sum(gain.value <= 0 for gain in gains)
    print(
        f"{len(gains)} keeps: {better} better than their baseline by more than {RELEVANT:g} in the"
        f" mean of {seeds} fresh seeds, {worse} not better at all."
    )
    for name, gain in zip(names[1:], gains, strict=True):
        print(f"  {name}: {gain.value:.4f} (95% from {gain.low:.4f} to {gain.high:.4f})")
    whole = mean_interval(losses[0] - losses[-1])
    print(f"  all together: {whole.value:.4f} (95% from {whole.low:.4f} to {whole.high:.4f})")


def main() -> None:
    """Computes both loops, and judges what they kept."""
    parser = argparse.ArgumentParser(prog="python -m experiments.referee_vit")
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--tries", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=16)
    given = parser.parse_args()
    folder, settings = given.workdir.absolute(), changes(given.tries)
    loops = {"referee": by_referee, "one_seed": by_one_seed}
    for name, loop in loops.items():
        kept = loop(folder / name, settings)
        print(f"Kept by {name}:")
        judged(folder / f"{name}_again", kept, given.seeds)


if __name__ == "__main__":
    main()
