"""Measures a plan for devices that are not here, and the compilation of its step, from shapes.

    python -m benchmarks.other_machines [--config=configs/gpt_1b.gin] [--devices=64]

Runs `python -m trainer explain --devices=N --compile` in a process of its own, and prints its
seconds, the most memory that it used, and the seconds of the compilation alone. The target for the
default config is 60 s and 1.5 GB on two cores.
"""

import argparse
import re
import resource
import subprocess
import sys
import time


def main() -> None:
    """Prints what one process needed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/gpt_1b.gin")
    parser.add_argument("--devices", type=int, default=64)
    arguments = parser.parse_args()
    words = [f"--config={arguments.config}", f"--devices={arguments.devices}", "--compile"]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "explain", *words], stdout=subprocess.PIPE, text=True
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(done.returncode)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    compiled = re.findall(r"was compiled for .* in ([\d.]+) s", done.stdout)
    print(
        f"{arguments.config} on {arguments.devices} devices: {seconds:.1f} s, of which the "
        f"compilation took {compiled[0]} s; {usage.ru_utime + usage.ru_stime:.1f} s of a core; "
        f"{usage.ru_maxrss * 1024 / 1e9:.2f} GB"  # ru_maxrss is in KiB on Linux
    )


if __name__ == "__main__":
    main()
