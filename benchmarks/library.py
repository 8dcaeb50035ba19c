"""Measures what the library adds: its import, and `ls.train` over the command.

    python -m benchmarks.library [--rounds=7]

The sides run alternately. The import is measured as CPU time over that of Python alone; a run of
`ls.train` as the CPU time of its child, and of this process, over that of the same command.
"""

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import lockstep as ls
from benchmarks.interleave import interleave, report

CONFIG = "experiments/muon_mlp/mlp.yaml"
STEPS = 50


def cpu() -> float:
    """Returns the CPU seconds of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def python(code: str) -> None:
    """Runs code in a process of its own."""
    subprocess.run([sys.executable, "-c", code], check=True)


def command(config: Path, workdir: Path) -> None:
    """Trains by the command."""
    shutil.rmtree(workdir, ignore_errors=True)
    words = [sys.executable, "-m", "trainer", f"--config={config}", f"--workdir={workdir}"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def library(config: Path, workdir: Path) -> None:
    """Trains by `ls.train`."""
    shutil.rmtree(workdir, ignore_errors=True)
    ls.train(ls.load_config(config), workdir, quiet=True)


def main() -> None:
    """Times both, and prints ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    sides = [partial(python, "import lockstep"), partial(python, "pass")]
    ours, alone = interleave(sides, rounds, cpu)
    added = sorted(a - b for a, b in zip(ours, alone, strict=True))[rounds // 2]
    report("import lockstep, CPU time", ours, alone, 5.0, "s", "Python alone")
    print(f"import lockstep adds {added:.3f} s of CPU (target 0.3)")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        ls.load_config(CONFIG, set={"steps": STEPS}).save(config)
        runs = [partial(f, config, Path(folder) / f.__name__) for f in (library, command)]
        for run in runs:  # compiles, and reads the files once
            run()
        ours, theirs = interleave(runs, rounds, cpu)
    report(f"ls.train, {STEPS} steps, CPU time", ours, theirs, 1.05, "s", "the command")


if __name__ == "__main__":
    main()
