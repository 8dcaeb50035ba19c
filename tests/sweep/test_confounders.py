"""What arms differ in besides what they compare: in the plan, and in every example."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import runs
from tests.runs import ROOT
from tests.sweep.test_sweep_plan import BASE, defined, planned, with_programs
from trainer.__main__ import main
from trainer.config import ConfigError, load
from trainer.config.vocabulary import SWEEP
from trainer.sweep.plan import plan_sweep
from trainer.sweep.plan_file import plan_differences, read_plan, write_plan
from trainer.sweep.plan_text import difference_lines, differences_on
from trainer.sweep.reading import read_sweep

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:yaml|gin)\n# ([\w./]+)\n(.*?)^```$", re.M | re.S)
INLINE = [
    BLOCK,
    re.compile(r"cat > ([\w./]+) <<'END'\n(.*?)^END$", re.M | re.S),
    re.compile(r'Path\("([\w./]+\.(?:yaml|gin))"\)\.write_text\(r?"""(.*?)"""', re.S),
]


def is_sweep(text: str) -> bool:
    return re.search(r"^arms:|^  arms\s+=|^arms/", text, re.M) is not None


def files() -> Iterator[Path]:
    """Yields the files of the repository that compare arms."""
    for top in ("configs", "experiments"):
        for file in sorted((ROOT / top).rglob("*")):
            if (file.parent / "plan.json").exists():  # a copy in the folder of a sweep
                continue
            if file.suffix in (".yaml", ".gin") and re.search(
                r"^(arms:|include: .*(sweep|digits).yaml)", file.read_text(), re.M
            ):
                yield file


def pages() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yields each page that has the file of a sweep, with the files that it writes."""
    for page in PAGES:
        text = page.read_text()
        found = [(x.start(), x[1], x[2]) for each in INLINE for x in each.finditer(text)]
        written = [(name, content) for _, name, content in sorted(found)]
        if any(is_sweep(content) for _, content in written):
            yield page.name, written


def lines_of(file: Path) -> list[str]:
    return difference_lines(plan_sweep(read_sweep(load([file], language=SWEEP))))


def unnamed(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(("warning", "Make"))]


@pytest.mark.parametrize("file", [*files()], ids=lambda file: str(file.relative_to(ROOT)))
def test_every_example_names_what_its_arms_differ_in(file: Path):
    assert unnamed(lines_of(file)) == []


@pytest.mark.parametrize(
    ("page", "written"), [*pages()], ids=lambda x: x if isinstance(x, str) else ""
)
def test_every_example_of_a_page_names_what_its_arms_differ_in(page, written, tmp_path):
    for name in ("configs", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    rate = "learning_rate: !schedules.warmup_cosine {peak_value: 1e-3, warmup_steps: 10%}"
    # docs/from_python.md makes it in Python.
    (tmp_path / "small.yaml").write_text(BASE.replace("learning_rate: 1e-3", rate))
    assert main(["new", "run", str(tmp_path / "mlp"), "--on=digits"]) == 0  # for docs/sweeps.md
    config = (ROOT / "docs" / "config_language.md").read_text()
    for name, text in [*BLOCK.findall(config), *written]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        if is_sweep(text):
            assert unnamed(lines_of(tmp_path / name)) == []


# What is found.

RATE = "optimizer.learning_rate"
LOG = "!space.log_uniform {low: 1e-3, high: 1e-1}"
COSINE = "!schedules.warmup_cosine {peak_value: 0.1, warmup_steps: 10%}"


def arms(first: str, second: str, more: str = "budgets: unequal\n") -> str:
    sampled = ", trials: 4, method: !method.sobol {}"
    of = [f"{{{text}{sampled if 'space:' in text else ''}}}" for text in (first, second)]
    return f"base: base.yaml\narms:\n  a: {of[0]}\n  b: {of[1]}\n{more}"


def found(folder: Path, *texts: str) -> dict[str, str]:
    """Returns the kinds of what arms differ in, with their texts; "!" if they are not compared."""
    result = differences_on(planned(folder, arms(*texts)), "")
    unnamed = result.unnamed(())
    return {f"!{kind}" if kind in unnamed else kind: text for kind, text in result.others}


def searched(path: str, space: str = LOG) -> str:
    return f"space: {{{path}: {space}}}"


def calls(*rates: float) -> str:
    listed = ", ".join(f"!optax.sgd {{learning_rate: {rate}}}" for rate in rates)
    return f"!space.values {{values: [{listed}]}}"


SGD = "!optax.sgd {learning_rate: 0.1, momentum: 0.9}"


@pytest.mark.parametrize(
    ("first", "second", "kinds"),
    [
        # Another optimizer, and nothing besides: 1e-4 is the default of both weight decays.
        ("", "set: {optimizer: !optax.nadamw {learning_rate: 0.1, b1: 0.8}}", set()),
        ("", "set: {optimizer.learning_rate: 0.5}", set()),
        # One difference of one optimizer is what is compared.
        ("", "set: {optimizer.weight_decay: 0.1}", {"weight_decay"}),
        ("", "set: {steps: 40}", {"steps"}),
        ("", f"set: {{{RATE}: {COSINE.replace('0.1', '1e-3')}}}", {"schedule"}),
        ("", "set: {model.width: 4}", {"model"}),
        # Two are not, and neither is one beside another optimizer, or another rate.
        ("", "set: {steps: 40, data.batch_size: 64}", {"!steps", "!batch"}),
        ("", f"set: {{optimizer: {SGD}}}", {"!weight_decay"}),
        ("", f"set: {{{RATE}: {COSINE}}}", {"!schedule"}),
        (
            "set: {optimizer.weight_decay: 0}",
            f"set: {{optimizer: {SGD}, ema_decay: 0.9, microbatches: 2, data_seed: 3,"
            " data.crop: 1, precision: mixed}",
            {"!ema", "!accumulation", "!seeds", "!data", "!settings"},
        ),
        # Weight decay and clipping are found wherever they are.
        (
            "",
            "set: {optimizer: !optax.chain {args: [!optax.clip_by_global_norm {max_norm: 1.0},"
            " !optax.adamw {learning_rate: 1e-3}]}}",
            {"clipping"},
        ),
        (
            "set: {optimizer.weight_decay: 0.1}",
            "set: {optimizer: !optim.chain {learning_rate: 0.1, before: [!parts.momentum {}],"
            " after: [!parts.cautious_decay {rate: 0.1}]}}",
            set(),
        ),
        (
            "",
            "set: {optimizer: !optim.optimizer {clip_norm: 1.0, groups: {x: !optim.group {match:"
            f" '.*', optimizer: !optax.lion {{learning_rate: {COSINE}}}}}}}}}}}",
            {"!schedule", "!weight_decay", "!clipping"},
        ),
        # What every arm searches does not differ, and what one searches does.
        (searched(RATE), f"set: {{optimizer: {SGD}}}, {searched(RATE)}", {"!weight_decay"}),
        (
            searched("optimizer.weight_decay"),
            "set: {optimizer: !optax.lion {learning_rate: 0.1}}, "
            + searched("optimizer.weight_decay"),
            set(),
        ),
        (
            searched("optimizer.weight_decay"),
            f"set: {{optimizer.learning_rate: 0.5}}, {searched(RATE)}",
            {"!weight_decay"},
        ),
        (
            searched(RATE),
            f"set: {{{RATE}: {COSINE}}}, {searched(RATE + '.peak_value')}",
            {"schedule"},
        ),
        # Spaces of every kind.
        (searched(RATE), searched(RATE, LOG.replace("1e-3", "1e-2")), {"space"}),
        (searched(RATE), searched(RATE, LOG.replace("log_", "")), {"space"}),
        (
            searched("optimizer.b1", "!space.uniform {low: 0.5, high: 1.0}"),
            searched("optimizer.b1", "!space.uniform {low: 0.9, high: 1.0}"),
            {"space"},
        ),
        (
            searched("model.width", "!space.integers {low: 2, high: 5}"),
            searched("model.width", "!space.integers {low: 2, high: 40}"),
            {"space"},
        ),
        (searched(RATE), "", {"!tuned"}),
        (searched(RATE), searched(RATE, "!space.log_uniform {low: 0.2, high: 20}"), {"space"}),
        (searched(RATE), searched(RATE, "!space.log_uniform {low: 0.1, high: 10}"), set()),
        (
            searched(RATE, f"{LOG}, optimizer.eps: !space.values {{values: [1.0e-8]}}"),
            searched(RATE, f"{LOG}, optimizer.eps: !space.values {{values: [100.0]}}"),
            {"space"},
        ),
        (
            searched(RATE, f"{LOG}, optimizer.nesterov: !space.values {{values: [true]}}"),
            searched(RATE, f"{LOG}, optimizer.nesterov: !space.values {{values: [false]}}"),
            {"space"},
        ),
        (
            searched("optimizer", calls(1, 2, 3, 4)),
            searched("optimizer", calls(5, 6, 7, 8)),
            {"space"},
        ),
        (searched("optimizer", calls(1, 2, 3, 4)), searched("optimizer", calls(4, 5, 6, 7)), set()),
        # Spaces of arguments of other functions may be anywhere.
        (
            searched(RATE),
            f"set: {{optimizer: !optax.nadamw {{learning_rate: 1}}}},"
            f" {searched(RATE, '!space.log_uniform {low: 0.2, high: 20}')}",
            set(),
        ),
    ],
)
def test_the_kinds_of_differences(first, second, kinds, folder):
    assert {*found(folder, first, second)} == kinds


def test_a_schedule_is_compared_by_its_shape_and_by_group(folder):
    groups = (
        "optimizer: !optim.optimizer {{groups: {{x: !optim.group {{match: '.*/kernel', optimizer:"
        " !{} {{learning_rate: {}}}}}, y: !optim.group {{match: '.*', optimizer:"
        " !optax.sgd {{learning_rate: 0.1}}}}}}}}"
    )
    cosine = "!schedules.warmup_cosine {{peak_value: {}, warmup_steps: 2, end_value: {}}}".format
    first = f"set: {{{groups.format('optax.sgd', cosine(0.1, 0.01))}}}"

    def other(schedule: str) -> dict[str, str]:
        return found(folder, first, f"set: {{{groups.format('optax.rmsprop', schedule)}}}")

    assert other(cosine(0.5, 0.05)) == {}  # ends at a tenth of the peak, too
    assert other(cosine(0.5, 0.01)) == {
        "!schedule": "schedule in x warmup_cosine(end_value=0.1 of peak_value) (a) and"
        " warmup_cosine(end_value=0.02 of peak_value) (b)"
    }
    assert other("0.5") == {"!schedule": "schedule in x warmup_cosine (a) and constant (b)"}
    single = found(
        folder, first, f"set: {{optimizer: !optax.sgd {{learning_rate: {cosine(0.1, 0.01)}}}}}"
    )
    assert single == {"!schedule": "schedule constant and warmup_cosine (a) and warmup_cosine (b)"}


GROUPED = (
    "set: {{optimizer: !optim.optimizer {{groups: {{x: !optim.group {{match: '.*/kernel',"
    " optimizer: !optax.{}}}, y: !optim.group {{match: '.*', optimizer: !optax.adamw {}}}}}}}}}"
).format
PLAIN = "{learning_rate: 0.1}"
COSINE_OF_1E_7 = "{learning_rate: !schedules.warmup_cosine {peak_value: 1e-7, warmup_steps: 2}}"


@pytest.mark.parametrize(
    ("first", "second", "texts"),
    [
        # What both arms have beside the optimizers that they compare.
        (
            GROUPED("sgd " + PLAIN, "{learning_rate: 0.1, eps: 1}"),
            GROUPED("lion {learning_rate: 0.5, b1: 0.8, weight_decay: 0}", PLAIN),
            ["optimizer.groups.y.optimizer.eps 1 (a) and 1e-08 (b)"],
        ),
        (
            GROUPED("sgd " + PLAIN, PLAIN),
            GROUPED("rmsprop " + PLAIN, "{learning_rate: 1e-7}"),
            ["optimizer.groups.y.optimizer.learning_rate 0.1 (a) and 1e-07 (b)"],
        ),
        (
            GROUPED("sgd " + PLAIN, PLAIN),
            GROUPED("rmsprop " + PLAIN, PLAIN).replace("'.*/kernel'", "'.*/kernels'"),
            ["optimizer.groups.x.match '.*/kernel' (a) and '.*/kernels' (b)"],
        ),
        # One optimizer in all groups: the arguments of one are what is compared, unless two have
        # other ones.
        (
            GROUPED("sgd " + PLAIN, PLAIN),
            GROUPED("sgd {learning_rate: 0.5, momentum: 0.9}", PLAIN),
            [],
        ),
        (
            GROUPED("sgd " + PLAIN, PLAIN),
            GROUPED("sgd {learning_rate: 0.5}", "{learning_rate: 1e-7}"),
            [
                "optimizer.groups.x.optimizer.learning_rate 0.1 (a) and 0.5 (b)",
                "optimizer.groups.y.optimizer.learning_rate 0.1 (a) and 1e-07 (b)",
            ],
        ),
        # What both search, and groups that only one has.
        (
            GROUPED("sgd " + PLAIN, PLAIN)
            + ", "
            + searched("optimizer.groups.y.optimizer.learning_rate"),
            GROUPED("rmsprop " + PLAIN, "{learning_rate: 1e-7}")
            + ", "
            + searched("optimizer.groups.y.optimizer.learning_rate"),
            [],
        ),
        (
            GROUPED("sgd " + PLAIN, PLAIN),
            GROUPED("sgd " + PLAIN, "{learning_rate: 1e-7}").replace(" y:", " z:"),
            [],
        ),
    ],
)
def test_arguments_beside_the_optimizers_that_are_compared_differ(first, second, texts, folder):
    result = differences_on(planned(folder, arms(first, second)), "")
    assert [text for kind, text in result.others if kind == "arguments"] == texts
    # Two groups of one optimizer are one thing, which the plan names as what is compared.
    several = len(texts) > 1
    assert result.unnamed(()) == (["arguments"] if texts and not several else [])
    assert result.optimizers is not several


def test_a_sabotaged_group_is_in_the_plan(folder):
    first, second = GROUPED("sgd " + PLAIN, PLAIN), GROUPED("rmsprop " + PLAIN, COSINE_OF_1E_7)
    said = "\n".join(difference_lines(planned(folder, arms(first, second))))
    assert "optimizer.groups.y.optimizer.learning_rate 0.1 (a) and 1e-07 (b)" in said
    assert "differs: [schedule, arguments]." in said
    said = "\n".join(
        difference_lines(planned(folder, arms(first, second), "differs=[schedule, arguments]"))
    )
    assert "As the file says, the arms differ in" in said and "warning" not in said


def test_what_the_file_does_not_name_is_a_warning_of_its_plan(folder, capsys):
    text = arms("", f"set: {{optimizer: {SGD}, steps: 40}}")
    words = "steps 20 (a) and 40 (b); weight decay 0.0001 (a) and none (b)."
    (folder / "sweep.yaml").write_text(text)
    command = ["sweep", f"--config={folder / 'sweep.yaml'}", "--check"]
    said = runs.printed(capsys, *command)
    assert f"\nwarning: The arms differ in more than their optimizers: {words}\n" in said
    assert "\nMake them equal" in said and "differs: [steps, weight_decay].\n" in said
    said = runs.printed(capsys, *command, "--set=differs=[weight_decay, steps]")
    assert f"\nAs the file says, the arms differ in {words}\n" in said and "warning" not in said
    lines = difference_lines(planned(folder, text, "differs=[steps, batch, weight_decay]"))
    assert lines[-1] == "warning: differs names batch, in which no arms differ."
    error = runs.refused(capsys, *command, "--set=differs=[weight-decay]")
    assert "'weight_decay'" in error and "Traceback" not in error


def test_equal_arms_are_refused_unless_the_file_says_so(folder):
    text = arms("", "set: {optimizer.weight_decay: 1e-4}")  # which is the default
    with pytest.raises(ConfigError, match="arms 'a' and 'b' have the same config, space and"):
        with_programs(folder, text)
    plan = with_programs(folder, text, "differs=[nothing]")
    assert difference_lines(plan) == []
    # Other points of one space are another search.
    other = arms(searched(RATE), searched(RATE)).replace("{}}\nbudgets", "{seed: 1}}\nbudgets")
    assert difference_lines(with_programs(folder, other)) == []


def test_a_plan_keeps_what_the_file_names_and_has_no_entry_without(folder):
    text = arms("", f"set: {{optimizer: {SGD}}}")
    plan = planned(folder, text)
    assert "differs" not in plan.content()
    named = with_programs(folder, text, "differs=[weight_decay]")
    assert named.content()["differs"] == ["weight_decay"]
    definition = defined(folder, text, "differs=[weight_decay]")
    write_plan(folder / "runs", definition, named)
    assert read_plan(folder / "runs").differs == ("weight_decay",)
    assert plan_differences(read_plan(folder / "runs"), plan) == ["differs: weight_decay -> (none)"]


def test_arms_are_compared_on_their_rung_and_an_ablation_with_nothing(folder):
    ladder = "ladder: {path: steps, values: [1x, 2x]}\n"
    assert difference_lines(planned(folder, arms("", f"set: {{optimizer: {SGD}}}", ladder))) == [
        "warning: The arms differ in more than their optimizers: weight decay 0.0001 (a) and none"
        " (b).",
        "Make them equal, or name what differs on purpose, which the report then repeats: differs:"
        " [weight_decay].",
    ]
    ablation = "ablate: {settings: {no_decay: {optimizer.weight_decay: 0, steps: 40}}}\n"
    whole = "base: base.yaml\narms: {a: {}}\nbudgets: unequal\n"
    assert difference_lines(planned(folder, whole + ablation)) == []


def test_listed_seeds_are_named_in_the_plan(folder):
    lines = difference_lines(planned(folder, arms("", "set: {steps: 40}"), "seeds=[4, 2]"))
    assert lines == [
        "What is compared: steps 20 (a) and 40 (b).",
        "The seeds are listed by hand: 4, 2.",
    ]
