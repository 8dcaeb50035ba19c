"""`report`, `compare` and `plot`: the results of runs and sweeps, shown here and saved to files."""

import html
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lockstep.configs import Config, Packages, as_vocabulary, write_text
from lockstep.plans import Drawable
from lockstep.runs import Run
from lockstep.sweeps import Sweep
from trainer.messages import UserError

if TYPE_CHECKING:
    from pandas import DataFrame

Place = Run | Sweep | str | PathLike[str]


class Report:
    """A report about sweeps or runs; a notebook shows its page.

    Args:
        content: the report of `trainer.report`.
        default: the folder in which `save` writes it by default.

    Attributes:
        verdict: what the sweeps or runs show, as text.
        sentences: the verdict of each workload.
        warnings: sentences about what limits the verdict.
    """

    def __init__(self, content: Any, default: Path):
        self._content, self._default = content, default
        self.sentences: Sequence[str] = tuple(content.verdict)
        self.verdict: str = "\n".join(self.sentences)
        self.warnings: Sequence[str] = content.warnings

    @property
    def tables(self) -> "Mapping[str, DataFrame]":
        """The tables by their names, such as "pairs"."""
        from pandas import DataFrame

        return {
            table.name: DataFrame([*table.rows], columns=[each.name for each in table.columns])
            for table in self._content.tables
        }

    def save(
        self, folder: str | PathLike[str] | None = None, formats: Sequence[str] | None = None
    ) -> list[Path]:
        """Writes the report as a page, in Markdown and in other formats.

        Args:
            folder: replaced as a whole, if it has a report; by default the folder of the command.
            formats: of "html", "markdown", "csv", "latex", "pdf" and "png"; default the
                first two.

        Returns:
            The paths of the files, the page first.

        Raises:
            UserError: the folder is not that of a report, or cannot be written.
        """
        from trainer.report import FORMATS
        from trainer.report.write import write

        if unknown := sorted({*(formats or ())} - {*FORMATS}):
            raise UserError(f"There is no format {unknown[0]!r}. There are {', '.join(FORMATS)}.")
        return write(self._content, Path(folder or self._default), formats)

    def __repr__(self) -> str:
        return "\n".join([*self.sentences, *[f"Note: {warning}" for warning in self.warnings]])

    def _repr_html_(self) -> str:
        from trainer.report.html.page import page

        text = html.escape(page(self._content.shown()), quote=True)
        return (
            f'<iframe srcdoc="{text}" style="width: 100%; height: 40em; border: 1px solid #8888"'
            ' title="report"></iframe>'
        )


class Comparison:
    """How two configs or runs differ, as the command `compare` prints it.

    Attributes:
        text: what the command prints.
    """

    def __init__(self, text: str):
        self.text = text

    def save(self, file: str | PathLike[str]) -> None:
        """Writes the text into a file."""
        write_text(file, self.text)

    def __repr__(self) -> str:
        return self.text.rstrip("\n")

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"


class Plot(Drawable):
    """A metric of runs, drawn; a notebook shows it as SVG.

    Attributes:
        lines: name -> what is drawn, with `x`, `y` and, for several seeds, the band `low`, `high`.
        title: above the drawing.
    """

    def __init__(self, lines: Mapping[str, Any], title: str, labels: tuple[str, str], log: Any):
        self.lines, self.title = lines, title
        self._labels, self._log = labels, log

    def save(self, file: str | PathLike[str]) -> None:
        """Draws into a file, whose name ends in .png, .pdf or .svg; raises UserError."""
        from trainer.report.plots import save_figure

        save_figure(self.lines, file, self.title, *self._labels, *self._log)

    def __repr__(self) -> str:
        from trainer.report.plots import draw_in_terminal

        drawn = {name: line.curve for name, line in self.lines.items()}
        axes = {"log_x": self._log[0], "log_y": self._log[1]}
        return draw_in_terminal(drawn, self.title, **axes).rstrip("\n")


def report(
    what: Place | Sequence[Place],
    *,
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
    target: float | None = None,
    vocabulary: Packages = (),
) -> Report:
    """Reports on sweeps, each a workload, or on runs, which are grouped by their configs.

    Args:
        what: a sweep, several sweeps, or runs; or their folders.
        metric: a metric other than the goal of the sweep, or the loss of runs.
        mode: whether the smallest or the largest value of that metric is the best.
        target: a value of the metric, to which steps and times are compared.
        vocabulary: as for all functions; a report executes nothing of these packages.

    Raises:
        UserError: a folder is not that of a sweep or run, or they do not belong into one report.
    """
    as_vocabulary(vocabulary)
    import trainer
    from trainer.report.comparison import default_folder, make_report, read_workloads

    folders = [_folder(each) for each in _listed(what)]
    workloads = read_workloads(folders, metric, mode, target)
    folder = default_folder(folders)
    made = f"Lockstep {trainer.__version__}: lockstep.report"
    return Report(make_report(workloads, folder, made), folder)


def compare(
    a: Run | Config | str | PathLike[str],
    b: Run | Config | str | PathLike[str],
    *,
    program: bool = True,
    vocabulary: Packages = (),
) -> Comparison:
    """Shows how two configs or runs differ: config, program of a step, and metrics.

    Args:
        a: a config, a run, or the path of one.
        b: the other.
        program: whether the programs of a step are compared, which takes a moment.
        vocabulary: further packages whose public functions the configs may name.

    Raises:
        UserError: one of them cannot be read, or they are of two kinds.
    """
    from trainer.cli.comparing import differences
    from trainer.diagnose.compare import Side, read_side

    def side(name: str, what: Run | Config | str | PathLike[str]) -> Side:
        if isinstance(what, Config):
            return Side(f"config {name}", what.resolved, False, {}, ())
        return read_side(_folder(what))

    known = [getattr(getattr(x, "config", x), "vocabulary", ()) for x in (a, b)]
    words = dict.fromkeys(sum(known, as_vocabulary(vocabulary)))
    texts = differences(side("a", a), side("b", b), [*words], program=program)
    return Comparison("\n".join(texts) + "\n")


def plot(
    what: Place | Sequence[Place],
    metric: str,
    *,
    x: Literal["step", "examples", "tokens", "epochs", "seconds"] = "step",
    smoothing: float = 0.0,
    each_run: bool = False,
    log_x: bool = False,
    log_y: bool = False,
    vocabulary: Packages = (),
) -> Plot:
    """Draws a metric of runs, or of the best trials of sweeps.

    Args:
        what: runs, sweeps, or their folders. Runs that differ in their seeds only are one line,
            their mean.
        metric: its name in metrics.jsonl, such as "eval/accuracy".
        x: what the horizontal axis shows; "seconds" is the time of the steps.
        smoothing: the weight of an exponential average, from 0 to below 1.
        each_run: whether each run is a line of its own.
        log_x: whether the horizontal axis is logarithmic.
        log_y: whether the vertical axis is logarithmic.
        vocabulary: as for all functions; a plot executes nothing of these packages.

    Raises:
        UserError: a run does not have the metric.
    """
    as_vocabulary(vocabulary)
    from trainer.report.plots import describe_bands
    from trainer.report.run_results import read_lines

    folders = [_folder(each) for each in _listed(what)]
    column = "perf/seconds" if x == "seconds" else x
    lines = read_lines(folders, metric, column, smoothing, each_run=each_run)
    band = describe_bands(lines.values())
    return Plot(lines, f"{metric}\n{band}" if band else metric, (x, metric), (log_x, log_y))


def _listed(what: Place | Sequence[Place]) -> list[Place]:
    return [what] if isinstance(what, Run | Sweep | str | PathLike) else list(what)


def _folder(place: Place) -> str:
    return str(place.folder) if isinstance(place, Run | Sweep) else fspath(place)
