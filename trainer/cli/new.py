"""The command new: writes files to begin with, which run as they stand.

The files are those of configs/new/, with the name of the user's package in place of my_lab. Those
of a comparison are a config, and a file of a sweep that is composed from what is known of the
optimizers that it names.
"""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from string import Template
from typing import Any, NamedTuple

from trainer import config as configs
from trainer.cli import values
from trainer.cli.resolving import ignore_optimizer_warnings
from trainer.cli.terminal import show
from trainer.config import Call, Config, Source, Tree, join, yaml_writer
from trainer.config.files import SHIPPED
from trainer.config.vocabulary import SWEEP, Vocabulary
from trainer.config.wording import known_names, listing
from trainer.messages import DONE, UserError, joined, plural, refuse_os_errors
from trainer.sweep.confounders import SCALES

_TEMPLATES = Path(__file__).parent.parent / "shipped" / "new"
_RUNS = _TEMPLATES / "run"  # configs of runs on some data, digits.yaml and text.yaml
_PACKAGE = "my_lab"  # in the templates
_REACH = 10  # a space reaches from a tenth of a rate to ten times it
_EXAMPLE = 0.02  # what `relevant` is in an example, nats


def run(arguments: argparse.Namespace) -> int:
    """Writes the files of the action, and prints what to do with them."""
    ignore_optimizer_warnings()
    folder = Path(arguments.folder)
    if arguments.action == "comparison":
        _comparison(folder, arguments)
    elif arguments.action == "run":
        _write(folder, {"run.yaml": (_RUNS / f"{arguments.on}.yaml").read_text()})
        show(f"{folder}/run.yaml is the config of a run.")
        _next(["explain {0}", "{0}"], f"--config={quote(str(folder / 'run.yaml'))}")
    else:
        _package(folder, getattr(arguments, "kind", None) or arguments.action)
    return DONE


def _package(folder: Path, kind: str) -> None:
    """Writes a package with a model, an optimizer or data, and a config that uses it."""
    name = folder.name
    if str(folder) != name or not name.isidentifier():
        raise UserError(
            f"{folder} cannot be a package of yours: write a name of letters, digits and"
            f" underscores, such as {_PACKAGE}, which becomes a folder of the current one."
        )
    files = {
        path.name: path.read_text().replace(_PACKAGE, name)
        for path in sorted((_TEMPLATES / kind).iterdir())
        if path.is_file()
    }
    _write(folder, {"__init__.py": "", **files})
    if kind == "images":
        from PIL import Image
        from sklearn.datasets import load_digits

        digits: Any = load_digits()
        for label in range(10):  # thirty of each class
            of_class = folder / "images" / str(label)
            of_class.mkdir(parents=True)
            for number, pixels in enumerate(digits.images[digits.target == label][:30]):
                image = Image.fromarray((pixels * 15.9375).astype("uint8"))
                image.save(of_class / f"{number:02d}.png")
    show(f"The package {name} has {joined([*files])}.")
    _next(["explain {0}", "{0}"], f"--config={name}/run.yaml --vocabulary={name}")


class _Compared(NamedTuple):
    """What the arms of a comparison replace in the base."""

    base: Config
    path: str  # of the optimizer that is compared
    group: str  # that it updates; "" if it updates all parameters
    call: Call  # the optimizer of the base

    @property
    def rate(self) -> Tree:
        """The learning rate of the base, or the schedule of it."""
        return self.call.kwargs.get("learning_rate")

    @property
    def other_groups(self) -> list[str]:
        """The groups that no arm changes."""
        groups = self.base.at("optimizer.groups") if self.group else {}
        return [str(name) for name in groups if name != self.group]

    def of_group(self, chosen: bool) -> str:
        """Says which group is compared, and how another one is if the user has not `chosen` it."""
        others = self.other_groups
        more = f" (another one by --group={others[0]})" if others and not chosen else ""
        return f", for the group {self.group!r}{more}" if self.group else ""

    def others(self) -> list[str]:
        """Returns a comment on the groups that no arm changes."""
        names = [repr(name) for name in self.other_groups]
        alike = "optimizer of {} is that of the base in all arms, at a rate that is not searched"
        if len(names) > 1:
            alike = "optimizers of {} are those of the base in all arms, at rates not searched"
        return _comment(f"The {alike.format(joined(names))}.") if names else []


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="# ")


def _scale(rate: Tree) -> str:
    """Returns the argument of a schedule that its rate is multiplied by; "" if it has no such."""
    given = rate.kwargs if isinstance(rate, Call) else {}
    return next((name for name in SCALES if isinstance(given.get(name), int | float)), "")


def _comparison(folder: Path, arguments: argparse.Namespace) -> None:
    names = _ask(arguments.optimizers, "Which optimizers?", "adamw,muon", values.names)
    if len(dict.fromkeys(names)) < 2:
        raise UserError(
            f"--optimizers={','.join(names)} is one optimizer: name at least two, such as"
            " adamw,muon. python -m trainer optimizers lists all."
        )
    searches = _ask(arguments.searches, "How many searches of each?", "8", values.positive)
    trials = _ask(arguments.trials, "How many trials in each search?", "4", values.positive)
    own = arguments.base is not None
    base = arguments.base if own else str(_RUNS / f"{arguments.on}.yaml")
    config = configs.load([base])
    if own and {"base", "arms"} <= config.root.kwargs.keys():
        raise UserError(f"--base={base} is the file of a sweep: give the config of a run.")
    if own:
        configs.Builder(config, arguments.vocabulary).check()
    compared = _compared(config, base if own else "run.yaml", arguments.group)
    found = [_arm(name, compared, arguments.vocabulary) for name in dict.fromkeys(names)]
    short = [arm.name.rpartition(".")[2] for arm in found]
    arms = {
        last if short.count(last) == 1 else arm.name.replace(".", "_"): arm
        for last, arm in zip(short, found, strict=True)
    }
    if len(arms) < 2:
        raise UserError(f"--optimizers={','.join(names)} names one optimizer twice.")
    if (relevant := arguments.relevant) is None and not own:
        relevant = _EXAMPLE
    known = base if base.startswith(SHIPPED) else os.path.relpath(base, folder)
    named = known if own else "run.yaml"
    written = _Sweep(named, compared, arms, searches, trials, relevant, [])
    power = _write_comparison(folder, written, base, own, arguments.vocabulary)
    runs, chosen = len(arms) * searches * trials, arguments.group is not None or not own
    show(
        f"{folder}/sweep.yaml compares {joined([*arms])}{compared.of_group(chosen)}:"
        f" {plural(runs, 'run')}, and {plural(len(arms) * searches, 'final run')}."
    )
    show("\n".join(power))
    given = "".join(f" --vocabulary={each}" for each in arguments.vocabulary)
    sweep = quote(f"sweeps/{folder.name}")
    _next(
        [
            "sweep {0} --check",
            "sweep {0} --dry_run",
            f"sweep {{0}} --workdir={sweep}",
            f"report {sweep}",
        ],
        f"--config={quote(str(folder / 'sweep.yaml'))}{given}",
    )


def _write_comparison(
    folder: Path, written: "_Sweep", base: str, own: bool, packages: Sequence[str]
) -> list[str]:
    """Writes a comparison, and returns what it can find; UserError if it cannot be planned."""
    files = {} if own else {"run.yaml": Path(base).read_text()}
    _write(folder, files | {"sweep.yaml": written.text()})
    file = folder / "sweep.yaml"
    try:
        differs, power = _differences(file, packages)
    except BaseException as error:
        for name in (*files, "sweep.yaml"):
            (folder / name).unlink()
        folder.rmdir()
        if not isinstance(error, UserError):
            raise
        # It names the base as the file would have done, and a line of the file.
        text = str(error).replace(str(folder / written.base), base)
        text = re.sub(rf"^{re.escape(str(file))}:\d+: ", "", text)
        raise UserError(f"{text} Nothing was written.") from error
    file.write_text(written._replace(differs=differs).text())
    return power


def _compared(config: Config, base: str, group: str | None) -> _Compared:
    """Finds the optimizer of a base that the arms replace."""
    path, root = "optimizer", config.root.kwargs.get("optimizer")
    groups = root.kwargs.get("groups") if isinstance(root, Call) else None
    if isinstance(groups, dict):
        known = [*map(str, groups)]
        if group is not None and group not in known:
            raise UserError(
                f"--group={group}: the optimizer of {base} has no such group."
                f" {known_names(group, known, 'There are')}"
            )
        group = known[0] if group is None else group
        path = f"optimizer.groups.{group}.optimizer"
    elif group is not None:
        raise UserError(f"--group={group}: the optimizer of {base} has no groups. Leave it out.")
    call = config.at(path) if root is not None else None
    if not isinstance(call, Call):
        raise UserError(f"{base} has no optimizer at {path} that an arm can replace.")
    found = _Compared(config, path, group or "", call)
    if isinstance(found.rate, Call) and not _scale(found.rate):
        raise UserError(
            f"The learning rate of {path} in {base} is {found.rate.name}, which has none of the"
            f" numbers {listing(SCALES)} that a search could change. Write it as"
            " schedules.warmup_cosine, say."
        )
    return found


class _Arm(NamedTuple):
    name: str  # of the optimizer, in a config
    set: Call | None  # the optimizer that it has; None for that of the base
    rate: str  # the path, in the optimizer, of what is searched
    space: str
    remark: str


def _check_can_be_arm(facts: Any, name: str, compared: _Compared) -> None:
    """Raises UserError for an optimizer that cannot train what the base's one trains."""
    if facts.optimizer is None or facts.cost is None or facts.is_part:
        raise UserError(
            f"{facts.name} cannot be an arm by itself:"
            f" {facts.failure or 'python -m trainer optimizers ' + name + ' says what it takes'}."
        )
    if "matrices" in facts.cost.needs and not compared.group:
        raise UserError(
            f"{facts.name} takes matrices only, and the base has one optimizer for all parameters."
            " Give the base two groups, each with an optimizer like the one that it has:\n"
            "optimizer: !optim.optimizer\n"
            "  groups:\n"
            "    matrices: !optim.group {match: blocks/.*/kernel, optimizer: ...} # hidden layers\n"
            "    rest: !optim.group {match: .*, optimizer: ...}"
        )


def _arm(name: str, compared: _Compared, packages: Sequence[str]) -> _Arm:
    """Composes an arm: the optimizer with the base's schedule and weight decay, and a space."""
    from trainer.cli.optimizer_facts import calls, find_optimizer

    facts, others = find_optimizer(name, packages)
    if facts.is_part and others:  # of which an arm is made as well
        facts, _ = find_optimizer(others[0], packages)
    _check_can_be_arm(facts, name, compared)
    same = facts.name == compared.call.name
    config, path = compared.base, compared.path
    if not same:
        assert facts.config is not None  # its cost is known
        config, path = facts.config, facts.path
    axes = [axis for space in facts.spaces[:1] for axis in space.axes]
    rates = [axis for axis in (*axes, "learning_rate") if axis.split(".")[-1] == "learning_rate"]
    rate = rates[0]
    holder = config.at(join(path, rate).rpartition(".")[0])  # the call whose argument the rate is
    parameters = Vocabulary(packages).function(holder.name).parameters
    if (value := holder.kwargs.get("learning_rate")) is None and "learning_rate" in parameters:
        value = parameters["learning_rate"].default
    scale, changed = _scale(value), {}
    if isinstance(value, Call):
        value = value.kwargs.get(scale)
    if not isinstance(value, int | float):
        raise UserError(
            f"{facts.name} has no learning rate around which a space could lie. Write its arm by"
            f" hand: python -m trainer optimizers {name} prints what it has."
        )
    if not scale and (rate != "learning_rate" or facts.schedules().get(rate, True)):
        scale, schedule = _scale(compared.rate), compared.rate
        changed[rate] = value
        if isinstance(schedule, Call):  # that of the base with another peak
            changed[rate] = Call(schedule.name, {**schedule.kwargs, scale: value})
    if not same and "weight_decay" in parameters:
        decay = compared.call.kwargs.get("weight_decay", 0.0)
        changed[rate.removesuffix("learning_rate") + "weight_decay"] = decay
    for inner, call in () if same else calls(config.at(path)):
        if call.name == "parts.decay":
            changed[join(inner, "rate")] = compared.call.kwargs.get("weight_decay", 0.0)
        if "peak" in call.kwargs:
            raise UserError(
                f"{facts.name} has the largest learning rate in {inner}.peak as well, and a search"
                " would change one of the two. Write its arm by hand, with pairs of both as its"
                f" values: python -m trainer optimizers {name} prints what it has."
            )
    found = {join(path, inner): tree for inner, tree in changed.items()}
    low, high = (float(f"{value * x:.3g}") for x in (1 / _REACH, _REACH))
    around = "that of the base" if same else f"that of `python -m trainer optimizers {name}`"
    if not same and not facts.spaces and facts.function.parameters[rate].required:
        around = f"{value:g}, which stands for a rate that is not known: see `rate_test --help`"
    if not same and facts.spaces and facts.spaces[0].source:
        around = "the middle of a published space"
    return _Arm(
        re.sub(r"[^\w.]+", "_", facts.name if facts.composition is None else facts.name.lower()),
        None if same else configs.replace(config, found, Source(name)).at(path),
        join(rate, scale) if scale else rate,
        f"!space.log_uniform {{low: {low:g}, high: {high:g}}}",
        f"around {around}",
    )


class _Sweep(NamedTuple):
    """The file of a comparison."""

    base: str
    compared: _Compared
    arms: Mapping[str, _Arm]
    searches: int
    trials: int
    relevant: float | None
    differs: Sequence[str]

    def text(self) -> str:
        """Returns it with its comments."""
        what = f"the group {self.compared.group!r}" if self.compared.group else "all parameters"
        question = (
            f"Which of {joined([*self.arms])}, for {what}, reaches the smallest loss on data"
            " that were not trained on, if the learning rate of each is searched equally long?"
        )
        kinds = f"[{', '.join(self.differs)}]  # besides the optimizers; --check says how"
        text = Path(__file__).with_name("comparison.yaml").read_text(encoding="utf-8")
        filled = Template(text).substitute(
            comments="\n".join([*_comment(question), *self.compared.others()]),
            base=yaml_writer.scalar_text(self.base),
            arms="\n".join(line for arm in self.arms.items() for line in self._arm(*arm)),
            trials=self.trials,
            searches=self.searches,
            goal=self._goal(),
            differs=f"differs: {kinds}" if self.differs else "",
        )
        return filled.rstrip("\n") + "\n"

    def _arm(self, name: str, arm: _Arm) -> list[str]:
        path = self.compared.path
        lines = [f"  {name}:"]
        if arm.set is None:
            lines[0] += "  # as the base has it"
        else:
            value = yaml_writer.value_text(arm.set).rstrip("\n").split("\n")
            lines += ["    set:", f"      {path}:{value[0]}", *(f"      {x}" for x in value[1:])]
        return [*lines, f"    space:  # {arm.remark}", f"      {join(path, arm.rate)}: {arm.space}"]

    def _goal(self) -> str:
        if self.relevant is None:
            return (
                "# Of the validation split, after the last step. Add relevant: the smallest"
                " difference that would\n# change what you use.\ngoal: {metric: loss}"
            )
        return (
            "# Of the validation split, after the last step; a difference below `relevant` would"
            " not change\n# what you use.\n"
            f"goal: {{metric: loss, relevant: {self.relevant:g}}}"
        )


def _differences(file: Path, packages: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns in what the arms of a file differ that it does not name, and what it can find."""
    from trainer.report.planned_power import power_of_plan
    from trainer.sweep.plan import plan_sweep
    from trainer.sweep.plan_text import differences_on
    from trainer.sweep.programs import find_programs
    from trainer.sweep.reading import read_sweep

    definition = read_sweep(configs.load([str(file)], language=SWEEP), packages)
    plan = find_programs(definition, plan_sweep(definition), packages)
    return differences_on(plan, "").unnamed(()), power_of_plan(plan, None)


def _ask(given: Any, question: str, default: str, convert: Callable[[str], Any]) -> Any:
    """Returns what an option gave, or else what the user of a terminal answers."""
    if given is not None:
        return given
    answer = ""
    if sys.stdin.isatty():
        try:
            answer = input(f"{question} [{default}] ").strip()
        except EOFError:
            show("")
    try:
        return convert(answer or default)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{question} {answer}: {error}") from None


def _write(folder: Path, files: dict[str, str]) -> None:
    """Writes files into a new folder; UserError if it exists or cannot be made."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists, and nothing in it is changed: name a new folder.")
    with refuse_os_errors(f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)


def _next(commands: Sequence[str], options: str) -> None:
    """Prints the commands that follow."""
    show("Next:")
    for command in commands:
        show(f"  python -m trainer {command.format(options)}")
