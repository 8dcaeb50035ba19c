"""Every shipped config: it builds, its plan holds, its header tells the number to expect."""

import json
import re

import pytest

from tests import short
from tests.runs import CONFIGS as FILES
from tests.runs import ELSEWHERE, ROOT
from trainer import config as configs
from trainer.__main__ import main
from trainer.engine.memory import planned_memory
from trainer.engine.plan import make_plan
from trainer.engine.program import load_located

CONFIGS = ROOT / "configs"
OPTIMIZERS = sorted((CONFIGS / "optimizers").iterdir())


MEMORY = planned_memory(80 * 10**9)

# optax's dpsgd warns of its own argument.
pytestmark = pytest.mark.filterwarnings("ignore:.*seed:DeprecationWarning")


# Sizes of one config, such as fantastic_130m.gin and fantastic_300m.gin, are one family.
@short.parametrize(
    "file", FILES, lambda file: re.sub(r"\d+", "", file.name), ids=lambda file: file.name
)
def test_a_shipped_config_builds_and_has_a_plan(file):
    read = configs.load([str(file)], sets=ELSEWHERE.get(file.name, []))
    # Some data are not on every machine.
    plan = make_plan(load_located(read, declared=True), read, MEMORY)
    assert plan.flops > 0 and all(count > 0 for count, _ in plan.groups.values())


STACKED = [file for file in sorted(CONFIGS.glob("*.[gy]*")) if file.name != "sgd_convnet.gin"]


@pytest.mark.long
@short.parametrize("file", STACKED, ids=lambda file: file.name)
def test_the_groups_of_a_shipped_config_take_stacked_and_separate_layers_alike(file):
    groups = []
    for scan_layers in (True, False):
        sets = [f"model.scan_layers={scan_layers}", "model.depth=2"]
        sets += ELSEWHERE.get(file.name, [])
        read = configs.load([str(file)], sets=sets)
        plan = make_plan(load_located(read, declared=True), read)
        groups.append({name: count for name, (count, _) in plan.groups.items()})
    assert groups[0] == groups[1]


@pytest.mark.parametrize("name", ["muon_vit.yaml", "sgd_convnet.gin"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_of_one_or_two_steps_is_planned(name, steps):
    read = configs.load([str(CONFIGS / name)], sets=[f"steps={steps}"])
    assert make_plan(load_located(read), read).flops > 0


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_header_of_a_config_names_its_result_and_its_command(file):
    header = re.match(r"(#.*\n)+", file.read_text())[0]
    if file.name in ELSEWHERE:
        assert "No loss is known to expect" in header  # nothing here can train it
    else:
        assert re.search(r"\d\d\.\d%|loss of \d\.\d", header)
    name = re.escape(str(file.relative_to(CONFIGS)))
    assert re.search(rf"python -m trainer --\w+=configs/{name}", header)


@pytest.mark.long
def test_the_gin_and_the_yaml_version_of_a_config_train_bit_for_bit_alike(tmp_path):
    curves = []
    for suffix in ("gin", "yaml"):
        file = ROOT / "configs" / f"muon_vit.{suffix}"
        small = ["--set", "steps=3", "--set", "model.depth=1", "--set", "writers=[]"]
        assert main([f"--config={file}", f"--workdir={tmp_path / suffix}", *small]) == 0
        text = (tmp_path / suffix / "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        curves.append([{k: v for k, v in r.items() if not k.startswith("perf/")} for r in rows])
    assert curves[0] == curves[1] and curves[0][-1]["step"] == 3


def _example(name: str, page: str = "config_language.md") -> str:
    """Returns the code block of a page that begins with the comment "# <name>"."""
    page = (ROOT / "docs" / page).read_text()
    return page.partition(f"\n# {name}\n")[2].partition("```")[0]


def test_the_yaml_and_the_gin_example_of_the_page_are_the_same_config_and_its_plan_holds(
    tmp_path,
):
    read = {}
    for name in ("mine.yaml", "mine.gin"):
        (tmp_path / name).write_text(_example(name))
        read[name] = configs.load([str(tmp_path / name)])
    assert configs.dump(read["mine.yaml"].root) == configs.dump(read["mine.gin"].root)
    plan = make_plan(load_located(read["mine.yaml"]), read["mine.yaml"])
    assert all(count > 0 for count, _ in plan.groups.values())


@short.parametrize("file", OPTIMIZERS, ids=lambda file: file.stem)
def test_an_optimizer_that_needs_more_than_gradients_trains_from_five_lines(file):
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 5
    program = load_located(configs.load([str(file)]))
    state, batches = program.init(), program.experiment.data.train(0, 0)
    losses = []
    for _, batch in zip(range(30), batches, strict=False):
        state, metrics = program.step(state, program.feed.to_devices(batch))
        losses.append(float(metrics["train/loss"]))
    assert losses[-1] < 0.95 * losses[0]
    # What is evaluated has learned too, be it an average or the slow weights.
    assert program.evaluation.run_split(state, "test")["loss"] < 0.95 * losses[0]
