"""The states that runs keep for claims: at which steps, and how many bytes they have together.

They are in `segments/STEP/` of the folder of a run, laid out as a checkpoint. Every row of metrics
is of one step and its state, and blocks of steps end where a state is kept, so that a run which
begins with such a state writes the rows that follow it, at any step.
"""

from math import ceil, log10

from trainer.config import ConfigError
from trainer.config.wording import listing
from trainer.sweep.plan import Plan, SharedProgram
from trainer.sweep.reading import Definition

SEGMENTS = "segments"


def kept_steps(steps: int, segments: int, first: int = 0) -> tuple[int, ...]:
    """Returns the steps after which a run keeps its state: all segments but the first begin there.

    They are fewer if there are fewer `steps` after the `first`, and none for 0 segments.

    Example:
        >>> kept_steps(100, 4), kept_steps(3, 8), kept_steps(100, 0)
        ((25, 50, 75), (1, 2), ())
        >>> kept_steps(100, 4, first=60)
        (70, 80, 90)
    """
    own = steps - first
    every = {first + number * own // segments for number in range(1, segments)}
    return tuple(sorted(every - {first}))


def kept_bytes(plan: Plan) -> int:
    """Returns how many bytes the states that all runs keep have together, at most."""
    # Those of a program that is sharded are counted on one of its devices. Each state has a
    # manifest of a few kilobytes besides.
    total, searches = 0, len(plan.offsets)
    for name, arm in plan.arms.items():
        own = [program for program in plan.programs if name in program.arms]
        of_run = [each.state_bytes * len(_kept(plan, each)) for each in own]
        total += len(plan.final_seeds) * searches * max(of_run)
        if (cuts := arm.cuts) is None:
            total += sum(x * each.counts[name] for x, each in zip(of_run, own, strict=True))
            continue
        runs = cuts.counts(plan.counts[name])
        states = sum(runs[sum(cut < step for cut in cuts.steps)] for step in _kept(plan, own[0]))
        total += states * len(plan.seeds) * searches * max(each.state_bytes for each in own)
    return total


def _kept(plan: Plan, program: SharedProgram) -> tuple[int, ...]:
    return kept_steps(program.steps, plan.segments, program.first_step or 0)


def check_kept(definition: Definition, plan: Plan) -> None:
    """Raises ConfigError if the states would have more bytes than the file of the sweep allows."""
    claims = definition.sweep.claims
    if claims is None or (size := kept_bytes(plan)) <= claims.most_bytes:
        return
    unit = 10 ** max(0, int(log10(size)) - 1)
    enough = f"{ceil(size / unit) * unit:_}"
    sources = definition.config.sources
    raise ConfigError(
        f"With claims, the runs would keep states of {size:,} bytes together, and at most"
        f" {claims.most_bytes:,} are allowed: write claims: {{segments: {claims.segments},"
        f" most_bytes: {enough}}} or fewer segments, or remove claims, and whole runs are computed"
        " again.",
        sources.get("claims.most_bytes") or sources["claims"],
    )


def kept_line(plan: Plan) -> list[str]:
    """Returns a line of the plan about the states that are kept; none if none are."""
    if not plan.segments:
        return []
    every = dict.fromkeys(_kept(plan, program) for program in plan.programs)
    steps = " or ".join(listing([f"{step:,}" for step in each], 12) for each in every)
    return [
        f"claims: each run keeps its states after steps {steps};"
        f" together at most {kept_bytes(plan):,} bytes"
    ]
