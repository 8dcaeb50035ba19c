"""Measures how long `python -m trainer claim verify` takes with segments and with whole runs.

    python -m benchmarks.claims [--rounds=3] [--seeds=8]

It computes an entry of experiments/race_gpt, runs of 240 steps of a small GPT that keep the states
at which their eight segments begin, writes a claim, and verifies it: the last segments of all runs
and three that are drawn, and beside them three whole runs. Each round has another public number, so
that others are drawn.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.interleave import interleave, report

ENTRY = "experiments/race_gpt/entries/0002_muon/sweep.yaml"
DRAWN = 3
TARGET = 0.5  # eleven eighths of the steps of a run instead of three runs
SECONDS = 60  # target of the check by segments, on two idle cores


def trainer(*words: str) -> None:
    """Runs a command of Lockstep, whose output is shown if it fails."""
    command = [sys.executable, "-m", "trainer", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def main() -> None:
    """Parses the options, computes the entry and prints the times."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        sweep, claim = Path(home) / "sweep", Path(home) / "claim.json"
        words = [f"--config={ENTRY}", f"--set=seeds={options.seeds}", f"--workdir={sweep}"]
        trainer("sweep", *words)
        trainer("claim", "write", str(sweep), f"--output={claim}")
        numbers: Iterator[int] = itertools.count()

        def verify(what: str) -> None:
            public = f"--public={next(numbers)}"
            trainer("claim", "verify", str(claim), str(sweep), public, f"--{what}={DRAWN}")

        segments, whole = interleave(
            [lambda: verify("segments"), lambda: verify("runs")], options.rounds
        )
        counts = f"{options.seeds} last and {DRAWN} drawn segments of {8 * options.seeds}"
        name = f"{counts} (load {os.getloadavg()[0]:.1f})"
        report(name, segments, whole, TARGET, "s", f"{DRAWN} whole runs")
        print(f"  at most {max(segments):.0f} s (target {SECONDS} s on two idle cores)")


if __name__ == "__main__":
    main()
