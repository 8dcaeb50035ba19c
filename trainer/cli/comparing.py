"""The command compare: shows how two configs or runs differ."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer import config as configs
from trainer.cli.resolving import ignore_optimizer_warnings, search_paths
from trainer.cli.terminal import show
from trainer.diagnose import compare
from trainer.messages import DONE, UserError, printable, refuse_os_errors, table

_LONGEST = 200  # characters of a line of a diff in the terminal


def run(arguments: argparse.Namespace) -> int:
    """Shows how two configs or runs differ: config, program, and metrics."""
    if arguments.no_program and arguments.diff:
        raise UserError("--diff writes the difference of the programs; --no_program leaves it out.")
    a, b = (compare.read_side(path, search_paths(arguments)) for path in (arguments.a, arguments.b))
    for text in differences(
        a,
        b,
        arguments.vocabulary,
        program=not arguments.no_program,
        longest=arguments.lines,
        diff=arguments.diff,
        metrics=arguments.metric,
    ):
        show(text)
    return DONE


def differences(
    a: compare.Side,
    b: compare.Side,
    vocabulary: Sequence[str] = (),
    *,
    program: bool = True,
    longest: int = 40,
    diff: str | None = None,
    metrics: Sequence[str] | None = None,
) -> Iterator[str]:
    """Yields a text for each subject in which two configs or runs differ, as soon as known."""
    # The sides are of the same kind. `vocabulary` has further packages whose public functions the
    # configs may name. `program` compares the programs of a step, which takes a moment; `longest`
    # lines of their difference are shown, and the file `diff` gets all. `metrics` None draws those
    # that differ first.
    compare.check_sides(a, b)
    sides = []
    for letter, side in (("A", a), ("B", b)):
        kind = "config of a sweep" if side.is_sweep else "run" if side.is_run else "config"
        rows = f", rows up to step {side.rows[-1]['step']:,}" if side.rows else ""
        sides.append((letter, side.path, kind + rows))
    yield "\n".join(table(sides))
    yield _section("Config", _config_lines(a, b, vocabulary))
    if a.fingerprint and b.fingerprint:
        changes = compare.compare_fingerprints(a, b)
        yield _section("Versions, machine and data (A -> B)", changes or ["They are equal."])
    if program:
        yield _section("Program of a step", _program_lines(a, b, vocabulary, longest, diff))
    if a.rows or b.rows:
        rows = compare.compare_rows(a.rows, b.rows)
        yield _section("Metrics", _row_lines(rows))
        yield from _drawings(a, b, metrics or compare.metrics_to_plot(rows.metrics), rows.metrics)
    elif a.is_run or b.is_run or metrics:
        yield _section("Metrics", ["Neither A nor B has rows of metrics."])


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"\n{title}", *(f"  {line}".rstrip() for line in lines)])


def _config_lines(a: compare.Side, b: compare.Side, vocabulary: Sequence[str]) -> list[str]:
    found = compare.compare_configs(a, b, vocabulary)
    lines = table([("path", "A", "B"), *found.paths]) if found.paths else ["They are equal."]
    for side, other in (("A", "B"), ("B", "A")):
        paths = [printable(path) for path, by in found.repeated.items() if by == side]
        if paths:
            lines.append(f"{side} names what is the default of {other}: {', '.join(paths)}.")
    return [*lines, *found.notes]


def _program_lines(
    a: compare.Side, b: compare.Side, vocabulary: Sequence[str], longest: int, diff: str | None
) -> list[str]:
    if a.is_sweep:
        return ["A sweep has many programs; compare two of its trials."]
    ignore_optimizer_warnings()
    programs: list[compare.StepProgram] = []
    lines = []
    for name, side in (("A", a), ("B", b)):
        try:
            programs.append(compare.lower_step(side.config, vocabulary))
        except UserError as error:
            lines += f"The program of {name} cannot be built: {error}".splitlines()
    if lines:
        return lines
    first, second = programs
    if first.text == second.text:
        same = configs.digest(a.config.root) == configs.digest(b.config.root)
        why = (
            f" The configs differ in values of its {len(first.inputs)} inputs, or in what is no"
            " part of a step, such as a seed."
        )
        return ["The programs are equal." + ("" if same else why)]
    head = [("", "A", "B", "B - A")]
    counted = [
        (name, f"{x:,}", f"{y:,}", f"{y - x:+,}" if x != y else "0")
        for name, x, y in compare.count_differences(first, second)
    ]
    lines = ["The programs differ.", *table([*head, *counted], right=(1, 2, 3)), ""]
    return lines + _diff_lines(compare.unified_diff(first, second), longest, diff)


def _diff_lines(found: Sequence[str], longest: int, file: str | None) -> list[str]:
    if not found:
        return ["Their operations are equal line by line, but take other values."]
    where = "--diff=FILE writes all"
    if file:
        with refuse_os_errors(f"--diff={file} cannot be written"):
            Path(file).write_text("\n".join(found) + "\n")
        where = f"all are in {file}"
    shown = [line[:_LONGEST] + ("..." if len(line) > _LONGEST else "") for line in found]
    if len(found) <= longest:
        return shown
    return [*shown[:longest], f"... and {len(found) - longest:,} lines; {where}."]


def _row_lines(found: compare.RowDifferences) -> list[str]:
    lines = [_rows_sentence(found)]
    for name, count in (("A", found.only_a), ("B", found.only_b)):
        if count and found.shared:
            lines.append(f"Only {name} has rows of {count:,} more steps.")
    head = ("metric", "A, last", "at step", "B, last", "at step", "B - A", "differs from step")
    rows: list[Sequence[str]] = [head]
    for each in found.metrics:
        pairs = [(f"{x[1]:.6g}", f"{x[0]:,}") if x else ("-", "-") for x in (each.a, each.b)]
        difference = f"{each.b[1] - each.a[1]:+.3g}" if each.a and each.b else "-"
        first = "-" if each.first is None else f"{each.first:,}"
        rows.append((each.name, *pairs[0], *pairs[1], difference, first))
    return [*lines, "", *table(rows, right=range(1, 7))]


def _rows_sentence(found: compare.RowDifferences) -> str:
    if not found.shared and not (found.only_a and found.only_b):
        return f"{'B' if found.only_a else 'A'} has no rows of metrics."
    if not found.shared:
        return "There is no step of which both have a row."
    equal = found.equal_up_to
    if found.first is None:
        return f"All {len(found.shared):,} common rows are equal bit for bit, up to step {equal:,}."
    at = f"step {found.first:,}: {', '.join(map(printable, found.names))}"
    if equal is None:
        return f"The rows differ from the first common one, of {at}."
    return f"The rows are equal bit for bit up to step {equal:,}, and differ at {at}."


def _drawings(
    a: compare.Side, b: compare.Side, names: Sequence[str], metrics: Sequence[compare.LastValues]
) -> Iterator[str]:
    """Yields drawings of metrics of both sides, or of the side that has them."""
    from trainer.report.plots import draw_in_terminal

    for name in names:
        curves = {}
        for letter, side in (("A", a), ("B", b)):
            if rows := [row for row in side.rows if name in row]:
                curves[letter] = [row["step"] for row in rows], [row[name] for row in rows]
        if len(curves) < 2:
            lacks = "Neither A nor B" if not curves else "B" if "A" in curves else "A"
            has = "has" if not curves else "lacks"
            common = [printable(each.name) for each in metrics if each.a and each.b]
            said = ", ".join(common) or "none"
            yield f"\n{lacks} {has} the metric {name!r}. Both have: {said}."
        if curves:
            yield "\n" + draw_in_terminal(curves, f"{name} by step").rstrip("\n")
