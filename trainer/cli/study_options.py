"""The options of studies: challenge, claim, coordinate_check, rate_test and shadow."""

import argparse

from trainer.cli.config_options import add, command, vocabulary
from trainer.parser import Parser
from trainer.report import FORMATS


def add_studies(commands: argparse._SubParsersAction, config: Parser) -> None:
    """Adds the commands to the parsers of all commands; `config` has the options of a config."""
    _challenge(command(commands, "challenge  check entries of a race to a target"))
    _claim(command(commands, "claim  write or check what a finished sweep shows"))
    command(commands, _COORDINATE_CHECK, [config])
    command(commands, _RATE_TEST, [config])
    command(commands, _SHADOW, [config])


def _challenge(challenge: Parser) -> None:
    actions = challenge.add_subparsers(dest="action", metavar="action", required=True)
    vocabulary(command(actions, _CHECK))
    vocabulary(command(actions, _TABLE))
    command(actions, _SIGMA)


_CHECK = """
check  compute the verdict of an entry from its runs
entry ENTRY  the folder CHALLENGE/entries/NAME
"""

_TABLE = """
table  write the history of all entries as a report
folder CHALLENGE  the folder with challenge.yaml
--output OUTPUT  the folder of the report; default CHALLENGE/report
--formats FORMATS:report_formats  as in report
"""

_SIGMA = """
sigma  print the sigma of a rule, from 20 runs or more
sweep SWEEP  the folder of a sweep of one configuration
"""


def _claim(claim: Parser) -> None:
    actions = claim.add_subparsers(dest="action", metavar="action", required=True)
    command(actions, _WRITE)
    verify = command(actions, _VERIFY)
    add(verify.add_mutually_exclusive_group(), _DRAWN)
    add(verify, _MEASURED)
    vocabulary(verify)


_WRITE = """
write  write the verdict of a sweep with its hashes
folder SWEEP  the folder of a sweep that has ended
--output FILE  default SWEEP/claim.json
"""

_VERIFY = """
verify  compare it with the sweep, and compute runs again
file FILE  the file of the claim
folder SWEEP  the folder of the sweep
--public TEXT required  a number that nobody knew when the claim was written, such as the lottery
    numbers of a later day; it decides what is drawn
"""

_DRAWN = """
--segments N:positive  how many segments are computed again, from the states that the sweep kept for
    them; whole runs if it kept none; default 3
--runs N:positive  how many whole runs are computed again instead
"""

_MEASURED = """
--measured N:positive = 7  on how many more it is measured how far results are apart, where another
    environment has other bits; default 7, at least 3
"""

_REPORT_FILES = f"""
--output DIR:folder  write a page, tables and pictures into this folder; default none
--formats NAME,...:report_formats  with --output: which files are written: {", ".join(FORMATS)};
    default all
"""

_COORDINATE_CHECK = f"""
coordinate_check  compare changes of activations in the first steps over widths of the model
--widths N,...:integers required  the widths, such as 64,128,256,512
--width_path PATH  where the config has the width; default model.width
--scale PATH=POWER:power ... = []  multiplies another number of the config by (width / the config's
    width)^POWER, as in optimizer.groups.matrices.width_scaling=1 or model.num_heads=1; may be given
    several times; by default all but the width stays
--steps N,...:integers = [1,3,10]  after how many steps activations are measured; default 1,3,10
--seeds N:positive = 3  how many runs at each width: the config's seed and those after it; default 3
--keep_schedules  train by the schedules of the config; by default each schedule of a learning rate
    is replaced by its largest value, as a warm-up would begin with a rate of 0
{_REPORT_FILES}
"""

_RATE_TEST = f"""
rate_test  raise a learning rate until training diverges, and suggest a range to search
--group NAME  the group whose rate rises; needed if there are several
--rate_path PATH  the learning rate by its path in the config, of a group with several
--low RATE:number = 1e-6  default 1e-6
--high RATE:number = 10.0  default 10
--steps N:positive = 200  the steps in which the rate rises from low to high; default 200
--seeds N:positive = 3  how many runs: the config's seed and those after it; default 3
{_REPORT_FILES}
"""

_SHADOW = f"""
shadow  compare what another optimizer would do at each point of a run
--shadow FILE ... = []  the config of the other optimizer, which is the same in model and data; may
    be given several times, later files override; default the files of --config. --set edits both
    configs, but what is below `optimizer` that of --config only
--shadow_set PATH=VALUE ... = [] as shadow_sets  edits the optimizer of the other config, such as
    optimizer.learning_rate=0.1
--steps N:positive  the first steps of the run that are computed; default all
--every K:positive  every K-th step is recorded; default a fiftieth of the steps
{_REPORT_FILES}
"""
