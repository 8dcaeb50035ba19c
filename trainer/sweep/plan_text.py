"""Formats the plan of a sweep as plain text, for the terminal."""

import math
from collections.abc import Iterator, Sequence

from trainer.config.full import complete
from trainer.config.wording import brief, listing
from trainer.engine.memory import Memory
from trainer.messages import duration, joined, plural, printable, table
from trainer.sweep.confounders import ComparedArm, Differences, arm_differences, named_by
from trainer.sweep.folder import useful_width, wave_width
from trainer.sweep.halving import program_steps
from trainer.sweep.ladder import rung_of, split_name
from trainer.sweep.plan import Plan, kept_line
from trainer.sweep.plan_file import revision_of
from trainer.sweep.programs import ProgramCost, most_side_by_side
from trainer.sweep.reading import Definition
from trainer.sweep.tuned import tuned_line
from trainer.sweep.warning_text import warning_lines

_SHOWN_TRIALS = 5


def render_sweep_plan(
    definition: Definition,
    plan: Plan,
    needs: Sequence[ProgramCost] = (),
    power: Sequence[str] = (),
    memory: Memory | None = None,
) -> str:
    """Formats a plan: the arms, the programs, what they cost, and the first trials."""
    # `needs` is what each program needs, on this machine or in the `memory` of others; empty if it
    # was not measured. `power` has sentences about the differences that the sweep finds. The last
    # line ends with a newline.
    lines = [
        *_price(plan, needs),
        *_arms(definition, plan),
        tuned_line(plan.tunings),
        *difference_lines(plan),
        "",
        *_programs(plan),
        *plan.reasons,
        *_seeds_and_rules(plan),
        *kept_line(plan),
        *_measured(plan, needs, memory),
        _goal(plan),
        *power,
        *_repeats(plan),
        *warning_lines(plan.warnings, plan.arms),
        "",
        *_first_trials(definition, plan),
        "",
        f"plan {revision_of(plan)['digest']}",
    ]
    return "".join(f"{printable(line)}\n" for line in lines)


def render_check(file: str, plan: Plan, power: Sequence[str] = ()) -> str:
    """Formats what was checked of a sweep before its programs are compiled, and what was not."""
    # For `power` and the result, see `render_sweep_plan`.
    arms, runs = len(plan.arms), len(plan.trials)
    final = len(plan.final_seeds) * arms * len(plan.offsets)
    lines = [
        f"{file}: {plural(arms, 'arm')}, {plural(runs, 'run')} of"
        f" {plural(len(plan.programs), 'program')}, and {plural(final, 'final run')}.",
        "Checked: the config of each arm and the plan of each program; the type of every value of a"
        " space, and that the smallest and the largest build; budgets; the goal, the"
        f" {plan.goal.metric} of the {plan.goal.select_on} split.",
        "Not checked: whether a step compiles and fits into memory, and how long it takes:"
        " --dry_run compiles and times each program.",
        *kept_line(plan),
        tuned_line(plan.tunings),
        *difference_lines(plan),
        *power,
        *warning_lines(plan.warnings, plan.arms),
    ]
    return "".join(f"{printable(line)}\n" for line in lines)


def difference_lines(plan: Plan) -> list[str]:
    """Returns lines on what the arms differ in: what is compared, what is named, and warnings."""
    found = [differences_on(plan, rung) for rung in dict.fromkeys(map(rung_of, plan.arms))]
    named = named_by(plan.differs, plan.ablated)
    lines = [
        f"warning: {text}" if of == "open" else text
        for each in found
        for of, text in each.sentences(named)
    ]
    if kinds := dict.fromkeys(kind for each in found for kind in each.unnamed(named)):
        lines.append(
            "Make them equal, or name what differs on purpose, which the report then repeats:"
            f" differs: [{', '.join(kinds)}]."
        )
    known = {"nothing", *(kind for each in found for kind, _ in each.others)}
    if unused := [kind for kind in plan.differs if kind not in known]:
        lines.append(f"warning: differs names {joined(unused)}, in which no arms differ.")
    for what, seeds in plan.listed_seeds.items():
        lines.append(f"The {what} are listed by hand: {listing([*map(str, seeds)], 6)}.")
    return list(dict.fromkeys(lines))


def differences_on(plan: Plan, rung: str) -> Differences:
    """Returns in what the arms of a plan on a rung differ, or in an ablation how they are tuned."""
    tunings, sides = plan.tunings, {}
    for name, arm in plan.arms.items():
        if rung_of(name) == rung:
            trials = plan.examples_of(name)
            tree = None if plan.ablated else complete(trials[0].config, plan.vocabulary)[0]
            points = [trial.values for trial in trials]
            branched = plan.branch is not None
            side = ComparedArm(tree, arm.space, points, tunings.get(name), branched, arm.method)
            sides[split_name(name)[0]] = side
    return arm_differences(sides, past=False)


def _arms(definition: Definition, plan: Plan) -> list[str]:
    rows: list[Sequence[str]] = [("arm", "trials", "method", "path", "space")]
    counts = plan.counts
    for arm in definition.arms:
        if arm.moved:
            rows.append((arm.name, "0", "-", "-", "as on lower rungs"))
            continue
        head = (arm.name, f"{counts[arm.name]:,}", arm.method.text)
        spaces = [(key, space.text) for key, space in arm.space.items()]
        spaces += [(key, "listed") for key in arm.paths if not arm.space]
        for path, text in spaces or [("-", "-")]:
            rows.append((*head, path, text))
            head = ("", "", "")
    return table(rows, right=(1,))


def _programs(plan: Plan) -> list[str]:
    rows: list[Sequence[str]] = [("program", "runs", "steps", "batch", "FLOPs a step", "first run")]
    for number, each in enumerate(plan.programs, 1):
        numbers = (len(each.trials), each.updates, each.batch_size, each.flops)
        rows.append((str(number), *(f"{x:,}" for x in numbers), each.first))
    return table(rows, right=(0, 1, 2, 3, 4))


def _price(plan: Plan, needs: Sequence[ProgramCost]) -> list[str]:
    """Returns what the trials and the final runs take: runs, steps, FLOPs, and time if measured."""
    seconds = [need.step_seconds for need in needs] or [None] * len(plan.programs)
    costs = list(zip(plan.programs, seconds, strict=True))
    timed = all(each is not None for each in seconds)
    parts = [("trials", len(plan.trials), [(program_steps(plan, x), x.flops, t) for x, t in costs])]
    if plan.final_seeds:
        times = len(plan.final_seeds) * len(plan.offsets)
        longest = []
        for arm in plan.arms:  # the trial that will win is not known: as if it were the longest
            of_arm = ((x.updates, x.flops, t) for x, t in costs if arm in x.arms)
            steps, flops, time = max(of_arm, key=lambda each: each[0] * each[1])
            longest.append((times * steps, flops, time))
        parts.append(("final runs", times * len(plan.arms), longest))
        both = [each for _, _, of_part in parts for each in of_part]
        parts.append(("together", sum(count for _, count, _ in parts), both))
    most = "at most " if plan.cuts else ""
    rows = [("", "runs", "steps", "FLOPs", *(["time"] if timed else []))]
    for part, runs, of_part in parts:
        steps, flops = sum(n for n, _, _ in of_part), sum(n * each for n, each, _ in of_part)
        row = (part, f"{runs:,}", f"{most}{steps:,}", f"{flops:.3g}")
        rows.append((*row, duration(sum(n * (t or 0.0) for n, _, t in of_part))) if timed else row)
    lines = table(rows, right=range(1, len(rows[0])))
    if timed:
        lines.append("The time is that of the steps on this machine, with one worker.")
    return [*lines, ""]


def _seeds_and_rules(plan: Plan) -> Iterator[str]:
    """Says which seeds there are, and what else decides how much is computed."""
    first = f"{len(plan.offsets)} searches of each arm; search 0: " if len(plan.offsets) > 1 else ""
    yield f"trials: {first}{_seeds(plan.seeds)}"
    if plan.final_seeds:
        winner = "the winner of each search of each arm" if first else "the winner of each arm"
        first = "search 0: " if first else ""
        yield f"final runs: {winner} again, {first}{_seeds(plan.final_seeds)}"
    if plan.ladder is not None:
        yield plan.ladder.text()
    if plan.branch is not None:
        yield plan.branch.text({name: arm.config.root for name, arm in plan.arms.items()})
    for arm, cuts in plan.cuts.items():
        points, *left = cuts.counts(plan.counts[arm])
        at = ", ".join(f"{n:,} from step {x:,} on" for n, x in zip(left, cuts.steps, strict=True))
        yield f"{arm}: of {plural(points, 'point')} in a search, {at}"
    if (vmap := plan.vmap) is not None:
        yield (
            f"{vmap} trials of a program are computed at once by vmap: their bits depend on this"
            " number, and are not those of the trials alone."
        )
    if plan.budgets == "unequal":
        yield "The file allows the arms to have unequal budgets."


def _measured(plan: Plan, needs: Sequence[ProgramCost], memory: Memory | None) -> list[str]:
    """Predicts waves and memory for one worker, and its time if steps were timed."""
    if not needs:
        return []
    head = "on this machine, with one worker, without evaluations:"
    last = ["a step", "all steps"]
    if memory is not None:
        head = f"on {memory.owner}, for which they were compiled and not run:"
        last = ["trials that fit"]
    rows: list[Sequence[str]] = [["program", "waves", "trials of a wave", "memory", *last]]
    for number, (program, need) in enumerate(zip(plan.programs, needs, strict=True), 1):
        # A rung of a ladder that is not searched has the runs of winners only.
        winners = dict.fromkeys(program.arms, len(plan.final_seeds) * len(plan.offsets))
        counts = [*(program.counts or winners).values()]
        if plan.branch is not None:  # arms of a branch share waves
            counts = [sum(counts)]
        room = memory and memory.limit
        fit = most_side_by_side(program.state_bytes, 1, need.temporary_bytes, room)
        bounds = (useful_width(program.flops * program.updates), fit)
        if (vmap := plan.vmap) is not None:
            bounds = (vmap,)
        widths = [wave_width(count, *bounds) for count in counts]
        waves = sum(math.ceil(count / width) for count, width in zip(counts, widths, strict=True))
        widest = max(widths)
        size = widest * program.state_bytes + (need.temporary_bytes or 0)
        row = [str(number), f"{waves:,}", f"{widest}", f"{size / 1e6:,.1f} MB"]
        if need.step_seconds is not None:
            seconds = need.step_seconds * program_steps(plan, program)
            row += [f"{1000 * need.step_seconds:.3g} ms", duration(seconds)]
        elif need.too_much is not None:
            row[1:] = ["-", "-", "-", "none"]
        else:
            row.append(f"{fit:,}")
        rows.append(row)
    return ["", head, *table(rows, right=range(len(rows[0]))), ""]


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds[:8]))}{', ...' if len(seeds) > 8 else ''}"


def _goal(plan: Plan) -> str:
    goal = plan.goal
    best = "smallest" if goal.better == "min" else "largest"
    target = "" if goal.target is None else f"; target {goal.target:g}"
    warning = "" if goal.select_on == "validation" else ": not an independent test of the winners"
    if goal.rule is not None:
        target += f" by the rule {goal.rule}, sigma {goal.sigma:g}"
    return f"goal: the {best} {goal.metric} of the {goal.select_on} split{warning}{target}"


def _repeats(plan: Plan) -> Iterator[str]:
    """Counts the points that a method drew more than once, as it may from a space of few values."""
    for arm in plan.searched:
        points = [repr(t.values) for t in plan.examples_of(arm) if t.seed == plan.seeds[0]]
        if repeated := len(points) - len(set(points)):
            verb = "repeats" if repeated == 1 else "repeat"
            yield f"{repeated:,} of the {len(points):,} trials of {arm} {verb} an earlier one."


def _first_trials(definition: Definition, plan: Plan) -> Iterator[str]:
    yield "first runs of each arm:"
    for arm in definition.arms:
        if arm.moved:
            continue
        for trial in plan.examples_of(arm.name)[:_SHOWN_TRIALS]:
            values = {key: trial.values[paths[0]] for key, paths in arm.paths.items()}
            texts = {k: f"{x:.6g}" if isinstance(x, float) else brief(x) for k, x in values.items()}
            shown = ", ".join(f"{key} {text}" for key, text in texts.items())
            yield f"  {trial.name}  {shown}".rstrip()
        if (more := len(plan.of_arm(arm.name)) - _SHOWN_TRIALS) > 0:
            yield f"  and {more:,} more of {arm.name}"
