"""Compiles the shipped configs, and every optimizer, for GPUs and TPUs that are not here.

`make compile_targets` compares all. An optimizer stands in the config that `optimizers NAME`
prints.

    python -m tests.compile_targets [NAME...]   compares with compiled_targets.json
    python -m tests.compile_targets --write     writes that file

`python -m tests.reference_pages` then writes the table of docs/targets.md.

What is compared is how many collectives a step has of each kind, and how often it converts to
float32: a change that gathers what was split, or that computes in a wider dtype, is seen there.
Seconds and bytes are shown only, because another version of a compiler has others.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainer.cli.optimizer_families import FAMILIES
from trainer.engine import targets

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "compiled_targets.json"
ONE = ("h100", "v5e")
_CONFIGS = (".gin", ".yaml")
# What one device does not hold, or what shows how devices divide the work.
SEVERAL = {
    "gpt_1b.gin": {"h100:16": ["model.depth=4"], "v5e:4x4": ["model.depth=2"]},
    "gpt2_124m.gin": {"h100": [], "h100:8": [], "v5e:2x4": []},
    "fantastic_1200m.gin": {"h100:8": []},
    "muon_gpt.gin": {"h100": [], "v5e": [], "h100:8": [], "v5e:2x4": []},
}


def cases() -> list[str]:
    """Returns what to compile: a config or an optimizer, a target and settings, in one text."""
    from optim import parts  # imports jax

    files = [*(ROOT / "configs").glob("*.*"), *(ROOT / "configs" / "optimizers").glob("*.yaml")]
    found = []
    for file in sorted(each for each in files if each.suffix in _CONFIGS):
        config = file.relative_to(ROOT / "configs").as_posix()
        for target, sets in SEVERAL.get(config, dict.fromkeys(ONE, [])).items():
            found.append(" ".join([config, target, *sets]))
    names = [name for names in FAMILIES.values() for name in names]
    names += [f"parts.{name}" for name in parts.__all__]
    return [*found, *(f"{name} {target}" for name in names for target in ONE)]


def compiled(name: str) -> dict[str, Any]:
    """Compiles a step in this process, which must not have imported jax before."""
    config, target, *sets = name.split()
    elsewhere = targets.elsewhere_of(targets.parse(target))
    from trainer import config as configs
    from trainer.cli.optimizer_facts import find_optimizer
    from trainer.engine.collectives import executed_lines
    from trainer.engine.explanation import explain, with_compiled
    from trainer.engine.program import load_located

    if Path(config).suffix in _CONFIGS:
        read = configs.load([ROOT / "configs" / config], sets=sets)
    else:
        read = find_optimizer(config)[0].config
        assert read is not None
    program = load_located(read, declared=True, devices=elsewhere.devices)
    explanation = with_compiled(explain(program, read, elsewhere), program)
    step = explanation.compiled
    assert step is not None and step.memory is not None
    found = {"seconds": round(step.seconds, 1), "bytes": step.memory.total}
    if step.refused:
        return found | {"refused": True}
    text = program.compiled.as_text()
    lines = [line for line, _ in executed_lines(text) if " = f32[" in line]
    converts = [line for line in lines if " convert(" in line]
    kinds = {f"{each.kind} {each.axes}": each.count for each in step.traffic}
    return found | {"converts": len(converts), "collectives": dict(sorted(kinds.items()))}


def row(name: str, found: dict[str, Any]) -> list[str]:
    """Returns a row of the table of the page, in Markdown."""
    config, target, *sets = name.split()
    said = " ".join(f"`{each}`" for each in (config, *sets))
    if "error" in found:
        return [said, target, found["error"], "", "", ""]
    size = f"{found['bytes'] / 1e9:.3g}"
    if "refused" in found:
        return [said, target, "refused", size, "", ""]
    collectives = "; ".join(f"{count} {kind}" for kind, count in found["collectives"].items())
    return [
        *(said, target, f"{found['seconds']:.0f}", size),
        *(str(found["converts"]), collectives or "-"),
    ]


def read() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what the file has of the shipped configs, and of the optimizers."""
    found = json.loads(FILE.read_text())
    configs = {name: x for name, x in found.items() if Path(name.split()[0]).suffix in _CONFIGS}
    return configs, {name: x for name, x in found.items() if name not in configs}


def markdown() -> str:
    """Returns the table of docs/targets.md of the shipped configs."""
    from tests.reference_pages import table  # imports jax

    titles = ["config", "target", "seconds", "GB of a device", "converts to float32", "collectives"]
    return table(titles, (row(*each) for each in read()[0].items()))


def slowest() -> str:
    """Returns the table of docs/targets.md of the optimizers that compile longest."""
    from tests.reference_pages import table  # imports jax

    seconds: dict[str, dict[str, float]] = {}
    for case, found in read()[1].items():
        name, target = case.split()
        seconds.setdefault(name, {})[target] = found["seconds"]
    last = sorted(seconds, key=lambda name: -max(seconds[name].values()))[:10]
    titles = [f"of {len(seconds)} optimizers and parts", *(f"{x}, seconds" for x in ONE)]
    return table(titles, ([f"`{x}`", *(f"{seconds[x][y]:.0f}" for y in ONE)] for x in last))


def main() -> int:
    """Compiles each case in a process of its own; 1 if a step has other counts than before."""
    parser = argparse.ArgumentParser(prog="python -m tests.compile_targets")
    parser.add_argument("names", nargs="*", help="cases whose names have one of these texts")
    parser.add_argument("--write", action="store_true", help="write what is found")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(compiled(arguments.one)))
        return 0
    every = cases()
    from tests.runs import environment  # imports jax

    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    after, different = dict(before), []
    for name in every:
        if arguments.names and not any(each in name for each in arguments.names):
            continue
        done = subprocess.run(
            [sys.executable, "-m", "tests.compile_targets", "--one", name],
            cwd=ROOT,
            env=environment(JAX_COMPILATION_CACHE_DIR=""),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            after[name] = {"error": done.stderr.strip().splitlines()[-1][:200]}
        else:
            after[name] = json.loads(done.stdout.splitlines()[-1])
        print(*row(name, after[name]), sep=" | ", flush=True)
        counts = ("refused", "converts", "collectives", "error")
        if [before.get(name, {}).get(x) for x in counts] != [after[name].get(x) for x in counts]:
            different.append(name)
        if arguments.write:  # after each: all take half an hour
            kept = {name: after[name] for name in every if name in after}
            FILE.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{len(different)} steps differ from {FILE.name}.", *different, sep="\n  ")
    return 1 if different and not arguments.write else 0


if __name__ == "__main__":
    sys.exit(main())
