"""The plan in the folder of a sweep: what is written, read again, and refused."""

import dataclasses
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import ROOT, python
from tests.sweep.test_sweep_plan import GIN, GOOD, METHOD, RATE, defined, planned
from trainer.config import load
from trainer.config.tree import same
from trainer.config.vocabulary import SWEEP
from trainer.messages import UserError
from trainer.sweep.plan import Plan, SharedProgram, plan_sweep
from trainer.sweep.plan_file import check_same, digest_of, read_plan, write_plan
from trainer.sweep.programs import find_programs
from trainer.sweep.reading import Definition
from trainer.workdir import folder as workdir

TREES = """base: base.yaml
space:
  rest: !space.zip
    spaces:
      optimizer: !space.values
        values: [!optax.sgd {learning_rate: 1}, !optax.lion {learning_rate: 0.1, b1: 0.5}]
      ema_decay: !space.values {values: [null, 0.9]}
      precision: !space.values {values: [float32, mixed]}
      data_seed: !space.values {values: [1, 2]}
      metrics: !space.values {values: [{a.b: !metrics.accuracy }, {}]}
      model: !space.values {values: [!models.mlp {width: 4}, !models.mlp {width: 6}]}
seeds: [4, 2]
goal: {metric: loss, target: 0.5}
final: null
"""

TWO_ARMS = f"""base: base.yaml
arms:
  first: {{space: {{{RATE}}}}}
  second: {{set: {{model.width: 4}}, space: {{{RATE}}}}}
trials: 3
seeds: 2
{METHOD}
goal: {{metric: accuracy, mode: max}}
"""


LEAVES = """base: base.yaml
method: !method.explicit
  trials:
    - {data_seed: 1, writers: x}
    - {data_seed: 1.0, writers: "1"}
    - {data_seed: true, writers: "null"}
    - {data_seed: null, writers: "caf\u00e9 \u2028"}
    - {data_seed: -0.0, writers: [1, {2: 3, a: null}]}
    - {data_seed: 18446744073709551615, writers: {yaml: "1"}}
    - {data_seed: 0.1, writers: {}}
"""


def with_one_program(plan: Plan) -> Plan:
    """Returns a plan with a program that stands for those of its trials, which take long."""
    program = SharedProgram(tuple(plan.by_name), (), 20, 32, 7, 90)
    return dataclasses.replace(plan, programs=(program,))


def written(sweep: Path, definition: Definition) -> Plan:
    write_plan(sweep, definition, with_one_program(plan_sweep(definition)))
    return read_plan(sweep)


def content(sweep: Path) -> dict[str, bytes]:
    files = [path for path in sorted(sweep.rglob("*")) if path.is_file()]
    kept = [path for path in files if path.name != "lock"]
    return {str(path.relative_to(sweep)): path.read_bytes() for path in kept}


@pytest.mark.parametrize("text", [GOOD, GIN, TREES, TWO_ARMS, LEAVES])
def test_a_plan_reads_as_it_was_written(folder, text):
    definition, plan = defined(folder, text), planned(folder, text)
    stored = written(folder / "runs" / "sweep", definition)
    assert [t.name for t in stored.trials] == [t.name for t in plan.trials]
    for ours, theirs in zip(stored.trials, plan.trials, strict=True):
        assert list(ours.values) == list(theirs.values)
        assert same(dict(ours.values), dict(theirs.values))  # types and signs too
        assert ours.config.root == theirs.config.root
    assert {name: arm.config.root for name, arm in stored.arms.items()} == {
        arm.name: arm.config.root for arm in definition.arms
    }
    assert list(stored.arms) == [arm.name for arm in definition.arms]
    assert stored.content() == plan.content()
    goal = definition.sweep.goal
    assert (stored.goal.metric, stored.goal.better) == (goal.metric, goal.better)
    assert (stored.goal.select_on, stored.goal.target) == (goal.select_on, goal.target)
    assert (stored.seeds, stored.final_seeds) == (plan.seeds, plan.final_seeds)
    assert (stored.revisions[0]["plan"], stored.revision) == (plan.content_digest, 1)
    assert (stored.budgets, stored.vocabulary, stored.reasons) == ("equal", (), ())


def of_mine(folder: Path) -> Plan:
    """Writes the plan of two arms whose configs name functions of a package `mine`."""
    definition = defined(folder, TWO_ARMS)
    plan = find_programs(definition, plan_sweep(definition))
    plan = dataclasses.replace(plan, vocabulary=("mine",))
    write_plan(folder / "sweep", definition, plan)
    return plan


def test_the_programs_are_those_of_the_plan_and_their_order_too(folder):
    plan = of_mine(folder)
    stored = read_plan(folder / "sweep")
    assert [len(each.trials) for each in stored.programs] == [6, 6]
    assert stored.programs == plan.programs
    for program in stored.programs:
        assert "optimizer.learning_rate" in program.inputs
        assert (program.steps, program.batch_size) == (20, 32)
    assert stored.reasons == plan.reasons and len(stored.reasons) == 1
    assert stored.vocabulary == ("mine",)


def test_the_file_of_the_sweep_and_its_arms_are_kept_as_configs(folder):
    for text in (TWO_ARMS, TREES, GIN):
        definition = defined(folder, text)
        sweep = folder / f"sweep{len(text)}"
        written(sweep, definition)
        assert load([sweep / "sweep.yaml"], language=SWEEP).root == definition.config.root
        names = [f"{arm.name}.yaml" for arm in definition.arms]
        assert sorted(path.name for path in (sweep / "arms").iterdir()) == sorted(names)
        assert stat.S_IMODE(sweep.stat().st_mode) == 0o700


def test_infinities_are_kept_in_a_file_that_is_strict_json(folder):
    listed = "values: [1.0, .inf, -0.0, 1, 1e-300]"
    text = f"base: base.yaml\nspace: {{optimizer.eps: !space.values {{{listed}}}}}\n"
    definition = defined(folder, text.replace("1, 1e-300", "1e-300"))
    stored = written(folder / "sweep", definition)
    found = [repr(trial.values["optimizer.eps"]) for trial in stored.trials]
    assert found == ["1.0", "inf", "-0.0", "1e-300"]
    refuse: Callable = lambda word: pytest.fail(f"{word} is not JSON")  # noqa: E731
    json.loads((folder / "sweep/plan.json").read_text(), parse_constant=refuse)


@pytest.mark.long
def test_equal_plans_give_equal_bytes_in_processes_with_other_hashes(folder):
    planned(folder, TREES)
    code = """
import sys
from pathlib import Path
from trainer.config import load
from trainer.config.vocabulary import SWEEP
from trainer.sweep.plan import plan_sweep
from trainer.sweep.plan_file import write_plan
from trainer.sweep.programs import find_programs
from trainer.sweep.reading import read_sweep
definition = read_sweep(load(["sweep.yaml"], language=SWEEP))
plan = find_programs(definition, plan_sweep(definition))
write_plan(Path(sys.argv[1]), definition, plan)
"""
    for seed in ("1", "2"):
        python("-c", code, f"sweep{seed}", cwd=folder, PYTHONHASHSEED=seed)
    assert content(folder / "sweep1") == content(folder / "sweep2")
    assert sorted(content(folder / "sweep1")) == [
        "arms/base.yaml",
        "ledger.jsonl",
        "plan.json",
        "sweep.yaml",
    ]


def test_a_plan_is_read_without_jax(folder):
    written(folder / "sweep", defined(folder, TREES))
    code = "import sys; from pathlib import Path; from trainer.sweep.plan_file import read_plan\n"
    code += "plan = read_plan(Path('sweep')); [trial.config for trial in plan.trials]\n"
    code += "print(sorted({'jax', 'optax', 'scipy', 'flax'} & {*sys.modules}))"
    assert python("-c", code, cwd=folder) == "[]\n"


def test_the_same_plan_passes_and_is_not_written_again(folder):
    sweep, definition = folder / "sweep", defined(folder, TWO_ARMS)
    plan = plan_sweep(definition)
    assert check_same(sweep, definition, plan) is False and not sweep.exists()
    written(sweep, definition)
    before, times = content(sweep), (sweep / "plan.json").stat().st_mtime_ns
    again = defined(folder, f"{TWO_ARMS}# a comment\n")
    assert check_same(sweep, again, plan_sweep(again)) is True
    write_plan(sweep, definition, with_one_program(plan))
    assert content(sweep) == before and (sweep / "plan.json").stat().st_mtime_ns == times


OTHERS = {
    "trials": ("trials=5", "  trials of first: 3 -> 5\n  trials of second: 3 -> 5\n"),
    "a config": ("set={steps: 30, data_seed: 1}", "config of first: steps: 20 -> 30, and 1 more"),
    "the goal": ("goal.target=0.9", "target 0.9"),
    "the metric": ("goal={metric: loss}", "  goal: metric accuracy, mode max"),
    "seeds": ("seeds=3", "  seeds: 0, 1 -> 0, 1, 2\n"),
    "final seeds": ("final={seeds: 2}", ", and 4 more -> 10000, 10001\n"),
    "the method": ("method.seed=1", "  method of first: random, seed 0 -> random, seed 1\n"),
    "values": ("method.seed=1", "  values of first/0000/0: optimizer.learning_rate "),
    "a space": (
        "arms.first.space={optimizer.b2: !space.uniform {low: 0, high: 0.5}}",
        "space of first: optimizer.learning_rate log_uniform 0.0001 to 0.1 -> optimizer.b2 uniform",
    ),
    "budgets": ("budgets=unequal", "  budgets: equal -> unequal\n"),
    "an arm": ("arms={first: {trials: 1}}", "  arm second: present -> (absent)\n"),
    "another arm": ("arms.third={trials: 1}", "  arm third: (absent) -> present\n"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_sweep_is_refused_with_the_differences(folder, name):
    change, part = OTHERS[name]
    sweep = folder / "sweep"
    written(sweep, defined(folder, TWO_ARMS))
    before = content(sweep)
    loose = ["budgets=unequal"] * ("arm" in name)
    definition = defined(folder, TWO_ARMS, change, *loose)
    other = with_one_program(plan_sweep(definition))
    for attempt in (check_same, write_plan):
        with pytest.raises(UserError) as refused:
            attempt(sweep, definition, other)
        text = str(refused.value)
        assert f"{sweep} has another sweep. The differences, old -> new:\n" in text
        assert part in f"{text}\n", text
        assert len(text.splitlines()) <= 7
        assert text.endswith(
            "Choose another --workdir, or add to this sweep with python -m trainer sweep extend"
            f" {sweep} --config=FILE."
        )
    assert content(sweep) == before


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(folder):
    sweep, definition = folder / "sweep", defined(folder, GOOD)
    sweep.mkdir()
    (sweep / "notes.txt").write_text("mine")
    for name in ("notes.txt", "sweep.yaml"):
        with pytest.raises(UserError, match=f"it holds {name}, and no plan.json. Nothing was"):
            written(sweep, definition)
        assert [path.name for path in sweep.iterdir()] == [name]
        (sweep / name).rename(sweep / "sweep.yaml")  # the user's own
    file = folder / "file"
    file.write_text("")
    with pytest.raises(UserError, match="is a file. Choose another --workdir."):
        check_same(file, definition, plan_sweep(definition))


def test_a_folder_that_a_killed_process_left_is_completed(folder):
    whole, cut, definition = folder / "whole", folder / "cut", defined(folder, TWO_ARMS)
    written(whole, definition)
    (cut / "arms").mkdir(parents=True)
    for name in ("sweep.yaml", "arms/first.yaml"):
        (cut / name).write_bytes((whole / name).read_bytes())
    (cut / ".plan.json.12.tmp").write_text("{")
    (cut / "slurm-1.out").write_text("a log")
    written(cut, definition)
    assert content(cut) == {**content(whole), "slurm-1.out": b"a log"}


def test_a_plan_that_another_process_writes_meanwhile_is_no_stranger(folder, monkeypatch):
    definition, real = defined(folder, GOOD), workdir.unknown_names
    written(folder / "other", definition)

    def late(sweep, known):
        shutil.copytree(folder / "other", sweep, dirs_exist_ok=True)
        return real(sweep, known)

    (folder / "sweep").mkdir()
    monkeypatch.setattr(workdir, "unknown_names", late)
    assert (folder / "other" / "ledger.jsonl").exists()
    assert check_same(folder / "sweep", definition, plan_sweep(definition))


@pytest.mark.long
def test_processes_that_start_a_sweep_together_write_one_plan(folder):
    digest = planned(folder, GOOD).content_digest
    # They only read the file of the sweep: one that rewrites it leaves it empty for a moment.
    code = """
from pathlib import Path
from trainer.config import load
from trainer.sweep.reading import read_sweep
from trainer.config.vocabulary import SWEEP
from tests.sweep.test_sweep_plan_file import written
definition = read_sweep(load([Path("sweep.yaml")], language=SWEEP))
print(written(Path("sweep"), definition).revisions[0]["plan"])
"""
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    digests = {process.communicate()[0] for process in started}
    assert digests == {f"{digest}\n"}


DAMAGES = {
    "no JSON": (lambda text: text[:100], "plan.json is damaged (it is not JSON: "),
    "another kind": (lambda text: "[1]", "is damaged (its content is [1], and not an object): "),
    "no revisions": (
        lambda text: '{"format":2,"revisions":[]}',
        "plan.json is damaged (IndexError: ",
    ),
    "another format": (
        lambda text: text.replace('"format":2', '"format":3'),
        "plan.json has the format 3, and this version of Lockstep reads 2: use the version",
    ),
    "a value": (
        lambda text: text.replace("0,0,{", "0,1,{"),
        "plan.json is damaged (the digest of its revision 1 differs): restore it from a copy",
    ),
    "a program": (
        lambda text: text.replace('"base/0002/0"', '"base/0003/0"'),
        "plan.json is damaged (the digest of its revision 1 differs): restore it from a copy",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_plan_is_refused_in_a_sentence(folder, name):
    damage, part = DAMAGES[name]
    written(folder / "sweep", defined(folder, GOOD))
    file = folder / "sweep/plan.json"
    file.write_text(damage(file.read_text()))
    with pytest.raises(UserError) as refused:
        read_plan(folder / "sweep")
    assert part in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_every_field_of_a_plan_is_part_of_its_digest(folder):
    """FLOPs of a program were not, nor were reasons and the vocabulary."""
    of_mine(folder)
    file = folder / "sweep/plan.json"
    text = file.read_text()
    places = [(key,) for key in json.loads(text)["revisions"][0]]
    stored = read_plan(folder / "sweep").digest
    places += [("programs", 0, key) for key in json.loads(text)["revisions"][0]["programs"][0]]
    for place in places:
        content = json.loads(text)
        at = content["revisions"][0]
        for key in place[:-1]:
            at = at[key]
        value = at[place[-1]]
        at[place[-1]] = value + 1 if type(value) is int else [value]
        file.write_text(json.dumps(content))
        if place[-1] in ("flops", "steps", "batch_size", "state_bytes"):  # of the same type
            with pytest.raises(UserError, match="the digest of its revision 1 differs"):
                read_plan(folder / "sweep")
        assert digest_of(content["revisions"][0]) != stored or place == ("digest",), place
    file.write_text(json.dumps(json.loads(text)))
    assert read_plan(folder / "sweep").vocabulary == ("mine",)


def test_a_plan_of_the_first_format_is_refused(folder):
    """Its digests did not cover the programs, so that their FLOPs could be edited."""
    of_mine(folder)
    file = folder / "sweep/plan.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 1}))
    with pytest.raises(UserError, match="has the format 1, and this version of Lockstep reads 2"):
        read_plan(folder / "sweep")


def test_a_folder_without_plan_and_a_config_that_was_edited_are_refused(folder):
    with pytest.raises(UserError, match="is not the folder of a sweep, because it has no plan"):
        read_plan(folder)
    written(folder / "sweep", defined(folder, GOOD))
    arm = folder / "sweep/arms/base.yaml"
    arm.write_text(arm.read_text().replace("steps: 20", "steps: 21"))
    with pytest.raises(UserError, match="base.yaml was changed after the sweep was planned"):
        read_plan(folder / "sweep")
    arm.unlink()
    with pytest.raises(UserError, match="base.yaml is missing: restore it from a copy"):
        read_plan(folder / "sweep")
