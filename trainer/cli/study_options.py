"""The options of studies: challenge, claim, coordinate_check, rate_test and shadow."""

import argparse
from typing import Any

from trainer.cli import values
from trainer.cli.config_options import vocabulary
from trainer.parser import Parser
from trainer.report import FORMATS


def add(commands: Any, config: Parser) -> None:
    """Adds the commands to the parsers of all commands; `config` has the options of a config."""
    _challenge(commands.add_parser("challenge", help="check entries of a race to a target"))
    _claim(commands.add_parser("claim", help="write or check what a finished sweep shows"))
    _coordinate_check(
        commands.add_parser(
            "coordinate_check",
            parents=[config],
            help="compare changes of activations in the first steps over widths of the model",
        )
    )
    _rate_test(
        commands.add_parser(
            "rate_test",
            parents=[config],
            help="raise a learning rate until training diverges, and suggest a range to search",
        )
    )
    _shadow(
        commands.add_parser(
            "shadow",
            parents=[config],
            help="compare what another optimizer would do at each point of a run",
        )
    )


def _rate_test(test: argparse.ArgumentParser) -> None:
    """Adds the options of `rate_test`."""
    test.add_argument(
        "--group", metavar="NAME", help="the group whose rate rises; needed if there are several"
    )
    test.add_argument(
        "--rate_path",
        metavar="PATH",
        help="the learning rate by its path in the config, of a group with several",
    )
    test.add_argument(
        "--low", type=values.number, default=1e-6, metavar="RATE", help="default 1e-6"
    )
    test.add_argument("--high", type=values.number, default=10.0, metavar="RATE", help="default 10")
    test.add_argument(
        "--steps",
        type=values.positive,
        default=200,
        metavar="N",
        help="the steps in which the rate rises from low to high; default 200",
    )
    test.add_argument(
        "--seeds",
        type=values.positive,
        default=3,
        metavar="N",
        help="how many runs: the config's seed and those after it; default 3",
    )
    _report_files(test)


def _shadow(shadow: argparse.ArgumentParser) -> None:
    """Adds the options of `shadow`."""
    shadow.add_argument(
        "--shadow",
        action="append",
        default=[],
        metavar="FILE",
        help="the config of the other optimizer, which is the same in model and data; may be given"
        " several times, later files override; default the files of --config. --set edits both"
        " configs, but what is below `optimizer` that of --config only",
    )
    shadow.add_argument(
        "--shadow_set",
        dest="shadow_sets",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="edits the optimizer of the other config, such as optimizer.learning_rate=0.1",
    )
    shadow.add_argument(
        "--steps",
        type=values.positive,
        metavar="N",
        help="the first steps of the run that are computed; default all",
    )
    shadow.add_argument(
        "--every",
        type=values.positive,
        metavar="K",
        help="every K-th step is recorded; default a fiftieth of the steps",
    )
    _report_files(shadow)


def _challenge(challenge: argparse.ArgumentParser) -> None:
    """Adds the actions of `challenge`."""
    actions = challenge.add_subparsers(dest="action", metavar="action", required=True)
    check = actions.add_parser("check", help="compute the verdict of an entry from its runs")
    check.add_argument("entry", metavar="ENTRY", help="the folder CHALLENGE/entries/NAME")
    table = actions.add_parser("table", help="write the history of all entries as a report")
    table.add_argument("folder", metavar="CHALLENGE", help="the folder with challenge.yaml")
    table.add_argument("--output", help="the folder of the report; default CHALLENGE/report")
    table.add_argument("--formats", type=values.report_formats, help="as in report")
    sigma = actions.add_parser("sigma", help="print the sigma of a rule, from 20 runs or more")
    sigma.add_argument("sweep", metavar="SWEEP", help="the folder of a sweep of one configuration")
    for each in (check, table):
        vocabulary(each)


def _claim(claim: argparse.ArgumentParser) -> None:
    """Adds the actions of `claim`."""
    actions = claim.add_subparsers(dest="action", metavar="action", required=True)
    write = actions.add_parser("write", help="write the verdict of a sweep with its hashes")
    write.add_argument("folder", metavar="SWEEP", help="the folder of a sweep that has ended")
    write.add_argument("--output", metavar="FILE", help="default SWEEP/claim.json")
    verify = actions.add_parser("verify", help="compare it with the sweep, and compute runs again")
    verify.add_argument("file", metavar="FILE", help="the file of the claim")
    verify.add_argument("folder", metavar="SWEEP", help="the folder of the sweep")
    verify.add_argument(
        "--public",
        required=True,
        metavar="TEXT",
        help="a number that nobody knew when the claim was written, such as the lottery numbers of"
        " a later day; it decides what is drawn",
    )
    drawn = verify.add_mutually_exclusive_group()
    drawn.add_argument(
        "--segments",
        type=values.positive,
        metavar="N",
        help="how many segments are computed again, from the states that the sweep kept for them;"
        " whole runs if it kept none; default 3",
    )
    drawn.add_argument(
        "--runs",
        type=values.positive,
        metavar="N",
        help="how many whole runs are computed again instead",
    )
    verify.add_argument(
        "--measured",
        type=values.positive,
        default=7,
        metavar="N",
        help="on how many more it is measured how far results are apart, where another environment"
        " has other bits; default 7, at least 3",
    )
    vocabulary(verify)


def _coordinate_check(check: argparse.ArgumentParser) -> None:
    """Adds the options of `coordinate_check`."""
    check.add_argument(
        "--widths",
        type=values.integers,
        required=True,
        metavar="N,...",
        help="the widths, such as 64,128,256,512",
    )
    check.add_argument(
        "--width_path",
        metavar="PATH",
        help="where the config has the width; default model.width",
    )
    check.add_argument(
        "--scale",
        action="append",
        type=values.power,
        default=[],
        metavar="PATH=POWER",
        help="multiplies another number of the config by (width / the config's width)^POWER, as in"
        " optimizer.groups.matrices.width_scaling=1 or model.num_heads=1; may be given several"
        " times; by default all but the width stays",
    )
    check.add_argument(
        "--steps",
        type=values.integers,
        default=[1, 3, 10],
        metavar="N,...",
        help="after how many steps activations are measured; default 1,3,10",
    )
    check.add_argument(
        "--seeds",
        type=values.positive,
        default=3,
        metavar="N",
        help="how many runs at each width: the config's seed and those after it; default 3",
    )
    check.add_argument(
        "--keep_schedules",
        action="store_true",
        help="train by the schedules of the config; by default each schedule of a learning rate is"
        " replaced by its largest value, as a warm-up would begin with a rate of 0",
    )
    _report_files(check)


def _report_files(parser: argparse.ArgumentParser) -> None:
    """Adds the options for a folder with a page, tables and pictures."""
    parser.add_argument(
        "--output",
        type=values.folder,
        metavar="DIR",
        help="write a page, tables and pictures into this folder; default none",
    )
    parser.add_argument(
        "--formats",
        type=values.report_formats,
        metavar="NAME,...",
        help=f"with --output: which files are written: {', '.join(FORMATS)}; default all",
    )
