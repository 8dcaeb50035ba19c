"""The options of the commands that draw and compare: plot and compare."""

import argparse

from trainer.cli import values


def add_figure(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Adds the option --figure to a parser.

    Args:
        parser: the parser of a command.
        purpose: what is drawn, for the help.
    """
    parser.add_argument(
        "--figure", "--png", metavar="FILE", help=f"{purpose}: .png, .pdf or .svg, by its suffix"
    )


def add_plot(plot: argparse.ArgumentParser) -> None:
    """Adds the options of the command plot to its parser."""
    plot.add_argument(
        "workdirs",
        nargs="+",
        type=values.folder,
        metavar="WORKDIR",
        help="a run, a folder with runs, or a sweep, of which the best trial of each arm is drawn",
    )
    plot.add_argument("--metric", default="train/loss", help="default train/loss")
    plot.add_argument(
        "--x",
        default="step",
        metavar="NAME",
        help="what the x axis shows: step (the default), epochs, examples, tokens, perf/seconds, or"
        " another name in metrics.jsonl",
    )
    plot.add_argument("--log_x", action="store_true", help="draw a logarithmic x axis")
    plot.add_argument("--log_y", action="store_true", help="draw a logarithmic y axis")
    plot.add_argument(
        "--smoothing",
        type=values.weight,
        default=0.0,
        metavar="W",
        help="smooth each run by a debiased exponential mean with this weight, from 0 to below 1;"
        " a file also shows the values as they are, faint",
    )
    plot.add_argument(
        "--each_run",
        action="store_true",
        help="draw each run; by default runs of one config that differ in their seeds only are"
        " drawn as their mean, with a band in files (the 95%% t interval of the mean, or from the"
        " smallest to the largest of two)",
    )
    add_figure(plot, "draw into a file instead of the terminal")


def add_compare(compare: argparse.ArgumentParser) -> None:
    """Adds the options of the command compare to its parser."""
    for name in ("A", "B"):
        compare.add_argument(
            name.lower(),
            type=values.folder,
            metavar=name,
            help="a config file, or the folder of a run or of a trial",
        )
    compare.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="draw this metric of two runs; may be given several times; by default one or two that"
        " both have",
    )
    compare.add_argument(
        "--no_program", action="store_true", help="do not build and compare the programs"
    )
    compare.add_argument(
        "--lines",
        type=values.positive,
        default=40,
        metavar="N",
        help="show at most N lines of the difference of the programs; default 40",
    )
    compare.add_argument(
        "--diff", metavar="FILE", help="write the whole difference of the programs into a file"
    )
