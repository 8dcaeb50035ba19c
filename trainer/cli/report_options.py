"""The options of the command report."""

import argparse

from trainer.cli import values
from trainer.report import FORMATS


def add(report: argparse.ArgumentParser) -> None:
    """Adds the options of the command.

    Args:
        report: the parser of the command.
    """
    report.add_argument(
        "folders",
        nargs="+",
        type=values.folder,
        metavar="FOLDER",
        help="sweeps, each of which is a workload; or runs or folders with runs, of which those"
        " whose configs differ in their seeds only are one arm",
    )
    report.add_argument(
        "--output",
        type=values.folder,
        metavar="DIR",
        help="the folder of the report; default SWEEP/report for one sweep, or else report",
    )
    report.add_argument(
        "--formats",
        type=values.report_formats,
        metavar="NAME,...",
        help=f"which files are written: {', '.join(FORMATS)}; default all",
    )
    report.add_argument(
        "--target",
        type=values.number,
        metavar="VALUE",
        help="a value of the metric: how many steps and how much time runs need to reach it;"
        " default that of the sweep's file",
    )
    report.add_argument(
        "--metric",
        metavar="NAME",
        help="what is compared: of single runs, default loss; of sweeps, a second outcome beside"
        " that of the goal, by which winners were selected",
    )
    report.add_argument(
        "--mode",
        choices=("min", "max"),
        help="whether small or large values of --metric are better; not needed for loss",
    )
