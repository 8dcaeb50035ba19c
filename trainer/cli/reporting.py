"""The commands that draw and write reports: report, plot, and those of studies."""

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import join as quoted
from typing import TYPE_CHECKING

import trainer
from trainer import config as configs
from trainer.cli import resolving
from trainer.cli.terminal import log, show
from trainer.messages import DONE, FAILED, UserError, joined, plural
from trainer.report.document import Report
from trainer.train import runtime

if TYPE_CHECKING:  # it needs NumPy
    from trainer.report.plots import Line


def report(arguments: argparse.Namespace) -> int:
    """Writes a report, and prints the verdict and where the files are."""
    from trainer.report.comparison import default_folder, make_report, read_workloads
    from trainer.report.write import write

    workloads = read_workloads(
        arguments.folders, arguments.metric, arguments.mode, arguments.target
    )
    folder = Path(arguments.output or default_folder(arguments.folders))
    words = [*arguments.folders, *_given(arguments, "metric", "mode", "target")]
    made_report = make_report(workloads, folder, made_by("report", words))
    files = write(made_report, folder, arguments.formats)
    for line in (*made_report.verdict, *(f"Note: {x}" for x in made_report.warnings)):
        show(line)
    show(f"\n{folder}: {_counted(files)}")
    return DONE


def _given(arguments: argparse.Namespace, *names: str) -> list[str]:
    """Returns options with their values, as they are written, without those that are None."""
    values = {name: getattr(arguments, name) for name in names}
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def made_by(command: str, words: Sequence[str]) -> str:
    """Returns how a report was made: the version, and the command that makes it again."""
    return f"Lockstep {trainer.__version__}: {quoted(['python', '-m', 'trainer', command, *words])}"


def _counted(files: Sequence[Path]) -> str:
    """Returns what was written, such as "index.html, report.md and 12 figures as PDF and PNG"."""
    counts = Counter(file.suffix for file in files)
    parts = [file.name for file in files if file.name in ("index.html", "report.md")]
    drawn = " and ".join(kind[1:].upper() for kind in (".pdf", ".png") if counts[kind])
    if figures := counts[".pdf"] or counts[".png"]:
        parts.append(f"{plural(figures, 'figure')} as {drawn}")
    parts += [f"{plural(counts['.csv'], 'table')} as CSV"] if counts[".csv"] else []
    parts += [f"{plural(counts['.tex'], 'file')} for LaTeX"] if counts[".tex"] else []
    return joined(parts)


def plot(arguments: argparse.Namespace) -> int:
    """Draws a metric of one or more runs, or of the best trials of a sweep."""
    from trainer.report.plots import describe_bands, draw_in_terminal, save_figure
    from trainer.report.run_results import read_lines

    metric, x = arguments.metric, arguments.x
    lines = read_lines(
        arguments.workdirs, metric, x, arguments.smoothing, each_run=arguments.each_run
    )
    left_out = _left_out(lines, arguments)
    counts = [line.runs for line in lines.values()]
    low, high = min(counts), max(counts)
    many = f"{low} to {high}" if low < high else f"{high}"
    title = f"{metric} by {x}" + (f", mean of {many} runs" if high > 1 else "")
    title += f", smoothed by {arguments.smoothing:g}" if arguments.smoothing else ""
    if arguments.figure:
        band = describe_bands(lines.values())
        title += f"\n{band}" * bool(band)
        save_figure(lines, arguments.figure, title, x, metric, arguments.log_x, arguments.log_y)
        show(f"{metric} is drawn in {arguments.figure}.")
    else:
        drawn = {name: line.curve for name, line in lines.items()}
        axes = {"log_x": arguments.log_x, "log_y": arguments.log_y}
        show(draw_in_terminal(drawn, title, **axes), end="")
    if left_out:
        show(left_out)
    return DONE


def _left_out(lines: Mapping[str, "Line"], arguments: argparse.Namespace) -> str:
    """Returns a sentence about points that cannot be drawn, or ""; raises UserError if none can."""
    import numpy as np

    curves = [np.asarray(line.curve, float) for line in lines.values()]  # each [2, points]
    x, y = np.concatenate([np.empty((2, 0)), *curves], axis=1)
    drawn = np.isfinite(x) & np.isfinite(y)
    total, finite = len(x), int(drawn.sum())
    drawn &= ((x > 0) | (not arguments.log_x)) & ((y > 0) | (not arguments.log_y))
    positive = int(drawn.sum())
    if not total:
        raise UserError(
            f"The runs of each group have no step in common at which both have {arguments.metric}:"
            " draw them one by one with --each_run."
        )
    if not finite:
        raise UserError(f"No value of {arguments.metric} is finite, so nothing can be drawn.")
    if not positive:
        raise UserError(
            f"No point of {arguments.metric} is positive, so a logarithmic axis shows none of them."
        )
    words = []
    if finite < total:
        words.append(f"{total - finite:,} of {total:,} points are not drawn: they are not finite.")
    if positive < finite:
        words.append(
            f"{finite - positive:,} of {total:,} points are not on a logarithmic axis: they are"
            " not positive."
        )
    return " ".join(words)


def challenge(arguments: argparse.Namespace) -> int:
    """Checks an entry, writes it or the history, finds a sigma, or judges published results."""
    if arguments.action == "export":
        return _export(arguments)
    if arguments.action == "import":
        from trainer.studies.track3 import read_track, track_lines

        show("\n".join(track_lines(read_track(Path(arguments.folder)))))
        return DONE
    if arguments.action == "sigma":
        from trainer.studies.challenge import sigma_of

        show(sigma_of(Path(arguments.sweep)))
        return DONE
    return (_check_entry if arguments.action == "check" else _table)(arguments)


def _check_entry(arguments: argparse.Namespace) -> int:
    """Prints the verdict of an entry, computed from its runs; 1 if it is not one of the target."""
    from trainer.report.panels.targets import sentence_of
    from trainer.studies.challenge import check_entry, read_challenge
    from trainer.studies.challenge_table import confirmation_of, verdict_on

    folder = Path(arguments.entry).absolute()
    rules = read_challenge(folder.parent.parent)
    entry, *doubting = (
        check_entry(rules, each, arguments.vocabulary)
        for each in (folder, *rules.doubting(folder.name))
    )
    show(f"{entry.name}: {entry.text.title}")
    show(f"It changes {joined(entry.changes, 4) or 'nothing'}.")
    for offence in entry.offences:
        show(f"Against the rules: {offence}")
    if entry.packages:
        show(f"It names {joined(entry.packages)}, whose code is not checked.")
    if entry.offences or entry.reached is None:
        return FAILED
    target = f"{rules.challenge.goal.metric} {rules.rule.target:g}"
    show(sentence_of("It", target, rules.rule, entry.reached))
    if entry.text.doubts:
        older = check_entry(rules, folder.parent / entry.text.doubts, arguments.vocabulary)
        show(verdict_on(rules, older, entry).sentence)
    if entry.steps is None:
        return FAILED
    if said := confirmation_of(rules, entry, doubting).sentence:
        show(said)
    show("This compares files with each other; nothing was computed again.")
    return DONE


def _export(arguments: argparse.Namespace) -> int:
    """Writes an entry as a script, unless there is such a file."""
    from trainer.studies.challenge import read_challenge
    from trainer.studies.challenge_export import exported

    folder = Path(arguments.entry).absolute()
    text = exported(read_challenge(folder.parent.parent), folder)
    file = Path(arguments.output or f"{folder.name}.py")
    if file.exists():
        raise UserError(f"{file} exists: remove it, or choose another --output.")
    file.write_text(text, encoding="utf-8")
    show(f"{file}: the config, the seeds and the log of {folder.name}; python {file} repeats it.")
    return DONE


def _table(arguments: argparse.Namespace) -> int:
    """Writes the history of a challenge, and prints its record."""
    from trainer.report.write import write
    from trainer.studies.challenge import check_entry, read_challenge
    from trainer.studies.challenge_table import make_table

    rules = read_challenge(Path(arguments.folder))
    if not rules.entries:
        raise UserError(
            f"{rules.folder} has no entries: an entry is a folder entries/NAME with entry.yaml and"
            " the folder of a sweep named sweep."
        )
    entries = [check_entry(rules, folder, arguments.vocabulary) for folder in rules.entries]
    report = make_table(rules, entries, made_by("challenge", ["table", arguments.folder]))
    folder = Path(arguments.output or rules.folder / "report")
    files = write(report, folder, arguments.formats)
    for sentence in report.verdict:
        show(sentence)
    show(f"{folder}: {plural(len(files), 'file')}")
    return DONE


def claim(arguments: argparse.Namespace) -> int:
    """Writes what a sweep shows with its hashes, or checks such a file."""
    return {"write": _write_claim, "verify": _verify_claim}[arguments.action](arguments)


def _write_claim(arguments: argparse.Namespace) -> int:
    """Writes a claim about a finished sweep or referee."""
    from trainer.studies.claim import write_claim

    folder = Path(arguments.folder)
    file = Path(arguments.output or folder / "claim.json")
    claim = write_claim(folder, file)
    for sentence in claim.verdict:
        show(sentence)
    show(
        f"{file}: the verdict and the hashes of {plural(len(claim.runs), 'run')}. Publish it, or"
        " its SHA-256, before the number by which others draw runs is known."
    )
    return DONE


def _verify_claim(arguments: argparse.Namespace) -> int:
    """Checks a claim; 1 if it is refuted, or what was drawn is not shown to be as it says."""
    from trainer.studies.claim import Wanted, verify_claim
    from trainer.studies.claim_segments import FEWEST
    from trainer.studies.claim_text import claim_sentences

    if arguments.measured < FEWEST:
        raise UserError(
            f"--measured={arguments.measured} is too few to know how far results are apart: it"
            f" takes at least {FEWEST}."
        )
    wanted = Wanted(measured=arguments.measured)
    if arguments.runs is not None:
        wanted = wanted._replace(segments=None, runs=arguments.runs)
    elif arguments.segments is not None:
        wanted = wanted._replace(segments=arguments.segments)
    checked = verify_claim(
        Path(arguments.file),
        Path(arguments.folder),
        arguments.public,
        wanted,
        arguments.vocabulary,
        log,
    )
    for sentence in claim_sentences(checked):
        show(sentence)
    return DONE if checked.verified or checked.alike else FAILED


def coordinate_check(arguments: argparse.Namespace) -> int:
    """Compares changes of activations over widths; 1 unless each was shown to keep its size."""
    config = resolving.read_config(arguments)
    runtime.keep_freed_memory()
    runtime.keep_compiled_programs()
    from trainer.studies import coordinate_check as study

    resolving.ignore_optimizer_warnings()
    widths, scale = arguments.widths, dict(arguments.scale)
    found = study.check(
        study.make_series(config, widths, arguments.width_path, scale, arguments.vocabulary),
        arguments.seeds,
        arguments.steps,
        arguments.keep_schedules,
        arguments.vocabulary,
        log=log,
    )
    lines = [*study.notes_on_widths(found), "", *study.printed(found), ""]
    lines += study.verdict_on_widths(found)
    warned = f"The plan warns at the {found.series.what} {found.widths[-1]}: "
    show("\n".join([*lines, *(f"{warned}{line}" for line in found.warnings)]))
    title = f"Coordinate check of {', '.join(arguments.files)}"
    _write_report(
        arguments,
        lambda: study.make_coordinate_report(found, title),
        f"--widths={','.join(map(str, widths))}",
        *([f"--width_path={arguments.width_path}"] if arguments.width_path else []),
        *(f"--scale={path}={power:g}" for path, power in arguments.scale),
        f"--steps={','.join(map(str, arguments.steps))}",
        f"--seeds={arguments.seeds}",
        *(["--keep_schedules"] if arguments.keep_schedules else []),
    )
    return DONE if study.changes_passed(found) else FAILED


def rate_test(arguments: argparse.Namespace) -> int:
    """Raises a learning rate until training diverges, and prints and draws what happened."""
    config = resolving.read_config(arguments)
    if arguments.group and arguments.rate_path:
        raise UserError("--group and --rate_path both name the learning rate: write one of them.")
    runtime.keep_freed_memory()
    runtime.keep_compiled_programs()
    from trainer.studies import rate_test

    resolving.ignore_optimizer_warnings()
    if arguments.rate_path:
        path = rate_test.rate_at(config, arguments.rate_path, arguments.vocabulary)
    else:
        path = rate_test.rate_of_group(config, arguments.group, arguments.vocabulary)
    rates = rate_test.Rates(path, arguments.low, arguments.high, arguments.steps)
    tested = rate_test.rate_test(config, rates, arguments.seeds, arguments.vocabulary, log=log)
    show("\n".join([*rate_test.notes(tested), "", *rate_test.rate_sentences(tested)]))
    if pasted := rate_test.yaml(tested):
        text = "A space to paste into an arm of a sweep, from the rate from which on a tenth of the"
        show(f"\n{text}\nlargest gain is reached to {rate_test.upper_end(tested)}:\n")
        show("\n".join(pasted))
    _write_report(
        arguments,
        lambda: rate_test.make_rate_report(tested, f"Range test of {', '.join(arguments.files)}"),
        f"--rate_path={path}",
        f"--low={arguments.low:g}",
        f"--high={arguments.high:g}",
        *_given(arguments, "steps", "seeds"),
    )
    return DONE


def shadow(arguments: argparse.Namespace) -> int:
    """Compares what another optimizer would do at each point; 1 if a step was not finite."""
    config, other = resolving.read_config(arguments), read_other(arguments)
    runtime.keep_freed_memory()
    runtime.use_openblas_threads()  # as many as a new run has
    runtime.keep_compiled_programs()
    from trainer.studies import shadow as study

    resolving.ignore_optimizer_warnings()
    found = study.shadow(
        config, other, arguments.steps, arguments.every, arguments.vocabulary, log=log
    )
    lines = [*study.notes_on_groups(found), "", *study.table_of_groups(found), ""]
    show("\n".join([*lines, *study.sentences(found)]))
    named = ", ".join([*arguments.shadow, *arguments.shadow_sets])
    title = f"{named} along the path of {', '.join(arguments.files)}"
    _write_report(
        arguments,
        lambda: study.make_shadow_report(found, title),
        *(f"--shadow={file}" for file in arguments.shadow),
        *(f"--shadow_set={text}" for text in arguments.shadow_sets),
        *_given(arguments, "steps", "every"),
    )
    return FAILED if found.ended else DONE


def read_other(arguments: argparse.Namespace) -> configs.Config:
    """Reads the config of the other optimizer of `shadow`."""
    # The settings of --set are edits of both configs, but for those of the optimizer. Without
    # --shadow it is the config itself, with all of its edits and those of --shadow_set.
    if not arguments.shadow and not arguments.shadow_sets:
        raise UserError(
            "Name the other optimizer: --shadow=FILE with its config, or --shadow_set PATH=VALUE"
            " with what it changes in that of --config."
        )
    for text in arguments.shadow_sets:
        if not _of_optimizer(text):
            raise UserError(
                f"--shadow_set {text}: it edits the optimizer of the other config only, at a path"
                f" such as optimizer.learning_rate. --set {text} edits both configs."
            )
    files, bindings, sets = arguments.files, arguments.bindings, arguments.sets
    if arguments.shadow:
        files, bindings = arguments.shadow, []
        sets = [text for text in sets if not _of_optimizer(text)]
    read = configs.load(files, bindings, sets, resolving.search_paths(arguments))
    return configs.override(read, arguments.shadow_sets, "--shadow_set")


def _of_optimizer(text: str) -> bool:
    """Returns whether "path=value" edits the optimizer."""
    return text.partition("=")[0].strip().partition(".")[0] == "optimizer"


def _write_report(
    arguments: argparse.Namespace, make_report: Callable[[], Report], *words: str
) -> None:
    """Writes the report of a study into the folder of --output, if there is one."""
    # `words` are the options that decide what is computed, besides those of the config.
    if arguments.output:
        from trainer.report.write import write

        made = made_by(arguments.command, [*resolving.config_options(arguments), *words])
        files = write(replace(make_report(), made=made), Path(arguments.output), arguments.formats)
        show(f"{arguments.output}: {plural(len(files), 'file')}")
