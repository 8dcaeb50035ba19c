"""The command new: what it writes runs as it stands, and compares alike what it compares."""

import importlib
import io
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import runs, short
from tests.runs import ROOT
from trainer import config as configs
from trainer.__main__ import main
from trainer.cli.optimizer_families import FAMILIES
from trainer.config import Call, yaml_writer
from trainer.config.tree import leaves
from trainer.config.vocabulary import SWEEP
from trainer.sweep.reading import read_sweep

TEMPLATES = ROOT / "configs" / "new"
PACKAGES = {
    "model": ["model", "my_model"],
    "optimizer": ["optimizer", "my_optimizer"],
    "table": ["data", "my_table"],
    "images": ["data", "my_images", "--kind=images"],
}
# Of those that `optimizers` lists: they have no rate of their own, or need another kind of batch.
WITHOUT_A_RATE = """
optax.polyak_sgd optax.contrib.reduce_on_plateau optax.lbfgs optax.scale_by_backtracking_linesearch
optax.scale_by_zoom_linesearch optax.apply_if_finite optax.MultiSteps optax.flatten
optax.contrib.split_real_and_imaginary optax.chain
""".split()
# What else they cannot share with the base.
UNLIKE_THE_BASE = {
    "optax.rprop": "needs the same examples at every step",
    "optax.contrib.dpsgd": "Remove clip_norm.",
}


# optax itself warns about optimistic_adam, and about the seed of dpsgd.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.StringIO())


@short.parametrize("kind", PACKAGES, lambda kind: kind == "optimizer")
def test_a_package_runs_as_it_is_written(kind, tmp_path, capsys):
    _, name, *_ = PACKAGES[kind]
    printed = runs.printed(capsys, "new", *PACKAGES[kind]).splitlines()
    for template in (TEMPLATES / kind).iterdir():
        text = template.read_text()
        assert (tmp_path / name / template.name).read_text() == text.replace("my_lab", name)
    commands = [line.split()[3:] for line in printed if "python -m trainer" in line]
    assert [words[0] for words in commands] == ["explain", f"--config={name}/run.yaml"]
    assert "warning" not in runs.printed(capsys, *commands[0])
    assert main([*commands[1], "--workdir=run", "--set=steps=3", "--set=writers=[]"]) == 0
    assert "Done: 3 steps" in capsys.readouterr().err


def test_the_table_may_have_texts_missing_cells_and_identifiers(tmp_path):
    assert main(["new", "data", "messy"]) == 0
    (tmp_path / "messy.csv").write_text(
        "id,who,a,b,kind,label\n1,x,1,,t,no\n2,x,3,2,t,yes\n3,y,5,4,t,no\n4,z,9,6,t,maybe\n"
    )
    rows = importlib.import_module("messy.data")
    rows.GROUP, rows.CLASSES = "who", ("yes", "maybe", "no")
    with pytest.raises(ValueError, match=r"messy.csv:2, column 'kind': 't' is no number. Add the"):
        rows.rows("messy.csv", "train")
    rows.IGNORED = ("id", "kind")
    names = "train", "validation", "test"
    splits = [rows.rows("messy.csv", split, share=1 / 3) for split in names]
    assert sum(len(split["x"]) for split in splits) == 4
    for split in splits:
        assert np.isfinite(split["x"]).all() and split["x"].dtype == np.float32
        assert split["x"].shape[1] == 3  # a, b, and whether b is missing
    train = splits[0]["x"]
    assert np.allclose(train[:, 0].mean(), 0, atol=1e-6)
    missing = np.concatenate([split["x"][:, 2] for split in splits])
    assert sorted(missing.tolist()) == [0.0, 0.0, 0.0, 1.0]
    labels = [label for split in splits for label in split["label"].tolist()]
    assert sorted(labels) == [0, 1, 2, 2]  # yes, maybe, no and no
    head = "\ufeffid,who,a,b,kind,label\n"  # with the mark of Excel
    for text, said in {
        f"{head}1,x,1\n": "wrong.csv:2 has not one cell for each of the columns",
        f"{head}1,x,1,2,t,no,more\n": "wrong.csv:2 has not one cell for each",
        head: "wrong.csv has no rows below its line of names",
        "": "wrong.csv has no column 'label'; it has",
        f"{head}\n1,x,x1,2,t,no\n": "wrong.csv:3, column 'a': 'x1' is no number",
        f"{head}1,x,NA,2,t,no\n2,y,,1,t,no\n": "wrong.csv has no value of 'a' to train on",
        f"{head}1,x,1,-inf,t,no\n": "wrong.csv:2, column 'b': '-inf' is not finite",
        f"{head.replace('b', 'a', 1)}1,x,1,2,t,no\n": "wrong.csv has 'a' twice",
    }.items():
        (tmp_path / "wrong.csv").write_text(text, "utf-8")
        with pytest.raises(ValueError, match=said):
            rows.rows("wrong.csv", "train")
    (tmp_path / "wrong.csv").write_text(head, "utf-16")
    with pytest.raises(ValueError, match="wrong.csv is not in UTF-8"):
        rows.rows("wrong.csv", "train")
    (tmp_path / "wrong.csv").write_text(head[1:], "utf-16-le")  # without a mark
    with pytest.raises(ValueError, match="wrong.csv is not in UTF-8, and seems to be in UTF-16"):
        rows.rows("wrong.csv", "train")
    rows.CLASSES = ("no", "yes")
    with pytest.raises(
        ValueError, match=r"no 'maybe'. .* 'label' of messy.csv has 'no' \(2 rows\), 'yes' \(1"
    ):
        rows.rows("messy.csv", "train")
    rows.LABEL = "lable"
    with pytest.raises(ValueError, match="messy.csv has no column 'lable'; it has id, who, a, b"):
        rows.rows("messy.csv", "train")


def test_the_table_has_each_patient_in_one_split():
    assert main(["new", "data", "wards"]) == 0
    table = importlib.import_module("wards.data")
    table.GROUP = "who"
    lines = [f"{who},{who},{who % 2}" for who in range(20) for _ in range(3)]
    Path("wards.csv").write_text("\n".join(["who,a,label", *lines]))
    splits = [table.rows("wards.csv", split) for split in ("train", "validation", "test")]
    assert [len(split["label"]) for split in splits] == [36, 12, 12]
    seen = [set(split["x"][:, 0].tolist()) for split in splits]  # a number for each patient
    assert [len(each) for each in seen] == [12, 4, 4] and len(set.union(*seen)) == 20


@pytest.mark.parametrize("on", ["digits", "text"])
def test_the_config_of_a_run_is_checked_by_explain(on, tmp_path, capsys):
    assert main(["new", "run", "first", f"--on={on}"]) == 0
    assert (tmp_path / "first/run.yaml").read_text() == (TEMPLATES / f"run/{on}.yaml").read_text()
    printed = runs.printed(capsys, "explain", "--config=first/run.yaml")
    assert "warning" not in printed and "matrices" in printed


def arms_of(file, vocabulary=()):
    config = configs.load([str(file)], language=SWEEP)
    return {arm.name: arm for arm in read_sweep(config, vocabulary).arms}


def unlike(arms, path):
    """Returns what is not the same in all arms outside of the optimizer at a path."""
    rest = [
        {at: yaml_writer.value_text(x) for at, x in leaves(arm.config.root) if path not in at}
        for arm in arms.values()
    ]
    return [each for each in rest if each != rest[0]]


def test_a_comparison_has_equal_schedules_decay_clipping_and_spaces(tmp_path, capsys):
    printed = runs.printed(capsys, "new", "comparison", "first")
    said = (
        "compares adamw and muon, for the group 'matrices': 64 runs, and 16 final runs.\npower: 2"
    )
    assert said in printed
    path = "optimizer.groups.matrices.optimizer"
    arms = arms_of(tmp_path / "first/sweep.yaml")
    assert [*arms] == ["adamw", "muon"] and not unlike(arms, path)
    for name, function, low in (("adamw", "optax.adamw", 1e-3), ("muon", "optim.muon", 3.2e-3)):
        call = arms[name].config.at(path)
        assert call.name == function and call.kwargs["weight_decay"] == 0.0
        rate = call.kwargs["learning_rate"]
        assert rate.name == "schedules.warmup_cosine"
        assert {**rate.kwargs, "peak_value": 0} == {"peak_value": 0, "warmup_steps": "10%"}
        [(key, space)] = arms[name].space.items()
        assert key == f"{path}.learning_rate.peak_value"
        assert space.text == f"log_uniform {low:g} to {100 * low:g}"
    printed = runs.printed(capsys, "sweep", "--config=first/sweep.yaml", "--check")
    assert "warning" not in printed and "differ" not in printed.replace("difference", "")


def test_a_comparison_has_the_numbers_that_are_given(tmp_path, capsys):
    words = ["--searches=5", "--trials=3", "--relevant=0.05"]
    assert main(["new", "comparison", "five", *words]) == 0
    assert "with fewer than 4, a narrow space would win" in capsys.readouterr().out
    text = (tmp_path / "five/sweep.yaml").read_text()
    assert "trials: 3" in text and "searches: 5" in text and "relevant: 0.05" in text


@pytest.mark.long
def test_a_comparison_says_what_else_differs(tmp_path, capsys):
    words = ["--on=digits", "--optimizers=adamw,sgd,prodigy,sam,mechanize", "--searches=5"]
    assert main(["new", "comparison", "five", *words, "--trials=3"]) == 0
    # SAM's second rate is constant, and mechanize has a decay of its own, of another kind.
    assert "differs: [schedule, weight_decay]" in (tmp_path / "five/sweep.yaml").read_text()
    printed = runs.printed(capsys, "sweep", "--config=five/sweep.yaml", "--check")
    assert printed.count("warning") == 1  # of three trials
    assert "As the file says, the arms differ in schedule in matrices" in printed


def test_a_comparison_in_a_config_of_the_user(tmp_path, capsys):
    """Also in Gin: the arms keep its schedule and its weight decay."""
    words = ["--base=lockstep:muon_vit.gin", "--optimizers=muon,soap", "--group=matrices"]
    assert main(["new", "comparison", "vit", *words]) == 0
    assert [path.name for path in (tmp_path / "vit").iterdir()] == ["sweep.yaml"]
    assert "Add relevant" in (tmp_path / "vit/sweep.yaml").read_text()
    path = "optimizer.groups.matrices.optimizer"
    arms = arms_of(tmp_path / "vit/sweep.yaml")
    muon, soap = (arm.config.at(path) for arm in arms.values())
    assert (muon.name, soap.name) == ("optim.muon", "optim.soap") and not unlike(arms, path)
    assert muon == configs.load(["lockstep:muon_vit.gin"]).at(path)
    assert soap.kwargs["weight_decay"] == muon.kwargs["weight_decay"] == 0.05
    assert soap.kwargs["learning_rate"].kwargs["warmup_steps"] == "5%"


def test_an_optimizer_of_the_user_is_compared(tmp_path, capsys):
    assert main(["new", "optimizer", "my_new"]) == 0
    words = ["--base=my_new/run.yaml", "--optimizers=sign_momentum,adamw"]
    assert main(["new", "comparison", "mine", *words, "--vocabulary=my_new"]) == 0
    assert "mine/sweep.yaml --vocabulary=my_new --check" in capsys.readouterr().out
    arms = arms_of(tmp_path / "mine/sweep.yaml", ["my_new"])
    assert [*arms] == ["sign_momentum", "adamw"]
    text = (tmp_path / "mine/sweep.yaml").read_text()
    assert "base: ../my_new/run.yaml" in text and "for all parameters" in text
    words = ["--on=digits", "--optimizers=adamw,sign_momentum", "--vocabulary=my_new"]
    assert main(["new", "comparison", "other", *words]) == 0
    text = (tmp_path / "other/sweep.yaml").read_text()
    assert "around 0.001, which stands for a rate that is not known" in text


@pytest.mark.long
def test_every_optimizer_is_compared_or_refused(tmp_path, capsys):
    rate = "!schedules.warmup_cosine {peak_value: 0.01, warmup_steps: 10%}"
    adamw = f"optimizer: !optax.adamw {{learning_rate: {rate}}}"
    (tmp_path / "base.yaml").write_text(
        "model: !models.mlp {width: 8, depth: 1}\n"
        "data: !data.digits {batch_size: 64, validation: 0.2}\n"
        "loss: !losses.softmax_cross_entropy\nsteps: 20\n"
        "optimizer: !optim.optimizer\n  clip_norm: 1.0\n  groups:\n"
        f"    matrices: !optim.group {{match: embed/kernel, {adamw}}}\n"
        f"    rest: !optim.group {{match: .*, {adamw}}}\n"
    )
    base = ["--base=base.yaml", "--group=matrices"]
    listed = [name for names in FAMILIES.values() for name in names]
    for name in WITHOUT_A_RATE:
        assert main(["new", "comparison", "x", *base, f"--optimizers=adamw,{name}"]) == 2
        assert "has no learning rate around which a space" in capsys.readouterr().err
    for name, why in UNLIKE_THE_BASE.items():
        assert main(["new", "comparison", "x", *base, f"--optimizers=adamw,{name}"]) == 2
        assert why in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    rest = [name for name in listed if name not in (*WITHOUT_A_RATE, *UNLIKE_THE_BASE)]
    assert main(["new", "comparison", "all", *base, f"--optimizers={','.join(rest)}"]) == 0
    arms = arms_of(tmp_path / "all/sweep.yaml")
    assert len(arms) == len(rest)
    for arm in arms.values():
        call = arm.config.at("optimizer.groups.matrices.optimizer")
        assert isinstance(call, Call) and len(arm.space) == 1
    capsys.readouterr()
    assert main(["sweep", "--config=all/sweep.yaml", "--check"]) == 0
    assert "The arms differ" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["comparison", "x", "--optimizers=muon"], "is one optimizer: name at least two"),
        (["comparison", "x", "--optimizers=sgd,optax.sgd"], "names one optimizer twice"),
        (["comparison", "x", "--optimizers=muno,sgd"], "Did you mean 'optim.muon'?"),
        (["comparison", "x", "--optimizers=sgd,parts.floor"], "cannot be an arm by itself"),
        (["comparison", "x", "--relevant=0"], "relevant is 0, but it is the smallest difference"),
        (["comparison", "x", "--group=head"], "no such group. There are: matrices, rest"),
        (["comparison", "x", "--base=none.yaml"], "none.yaml: The file does not exist."),
        (["comparison", "x", "--base=one.yaml"], "optim.muon takes matrices only"),
        (
            ["comparison", "x", "--base=two.yaml"],
            "two.yaml is the file of a sweep: give the config",
        ),
        (["comparison", "x", "--base=one.yaml", "--group=a"], "has no groups. Leave it out."),
        (
            ["comparison", "x", "--base=law.yaml"],
            "optax.join_schedules, which has none of the numbers peak_value",
        ),
        (["comparison", "full"], "full exists, and nothing in it is changed: name a new folder."),
        (["run", "full/file"], "full/file exists, and nothing in it is changed"),
        (["run", "full/file/run"], "full/file/run cannot be written: Not a directory."),
        (["model", "a-b"], "a-b cannot be a package of yours: write a name of letters"),
        (["data", "some/where"], "some/where cannot be a package of yours"),
    ],
)
def test_a_mistake_is_a_sentence_and_leaves_nothing(words, said, tmp_path, capsys):
    run = (
        "model: !models.mlp {width: 8, depth: 1}\n"
        "data: !data.digits {batch_size: 64, validation: 0.2}\n"
        "loss: !losses.softmax_cross_entropy\nsteps: 5\noptimizer: !optax.adamw\n"
    )
    (tmp_path / "one.yaml").write_text(f"{run}  learning_rate: 0.01\n")
    parts = "[!optax.constant_schedule {value: 0.1}, !optax.constant_schedule {value: 0.2}]"
    rate = f"{{learning_rate: !optax.join_schedules {{schedules: {parts}, boundaries: [5]}}}}"
    (tmp_path / "law.yaml").write_text(run.replace("!optax.adamw", f"!optax.adamw {rate}"))
    (tmp_path / "two.yaml").write_text("base: one.yaml\narms: {a: {}, b: {}}\ntrials: 2\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    error = runs.refused(capsys, "new", *words)
    assert error.startswith("error: ") and said in error
    assert not (tmp_path / "x").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]


def test_a_terminal_is_asked(monkeypatch, tmp_path, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("sgd, adamw\n\n2\n"))
    printed = runs.printed(capsys, "new", "comparison", "asked", "--on=digits")
    assert "Which optimizers? [adamw,muon]" in printed and "How many searches" in printed
    text = (tmp_path / "asked/sweep.yaml").read_text()
    assert "Which of sgd and adamw" in text and "searches: 8" in text and "trials: 2" in text
    monkeypatch.setattr(sys, "stdin", Terminal("sgd,adamw\nfour\n"))
    assert main(["new", "comparison", "again"]) == 2
    assert "How many searches of each? four: 'four' is not a number" in capsys.readouterr().err


@pytest.mark.long
def test_a_published_name_is_an_arm_with_the_weight_decay_of_the_base(tmp_path, capsys):
    words = ["--base=lockstep:muon_vit.gin", "--group=matrices", "--optimizers"]
    assert main(["new", "comparison", "vit", *words, "muon,normuon,SOAP-H,c_muon"]) == 0
    path = "optimizer.groups.matrices.optimizer"
    arms = arms_of(tmp_path / "vit/sweep.yaml")
    assert [*arms] == ["muon", "normuon", "soap_h", "c_muon"] and not unlike(arms, path)
    for arm, decay in (("normuon", "after.0.rate"), ("c_muon", "base_optimizer.weight_decay")):
        assert arms[arm].config.at(f"{path}.{decay}") == 0.05
    rate = arms["normuon"].config.at(f"{path}.learning_rate")
    assert rate.name == "schedules.warmup_cosine" and rate.kwargs["warmup_steps"] == "5%"
    capsys.readouterr()
    assert main(["new", "comparison", "wrong", *words, "muon,adamc"]) == 2
    assert "AdamC has the largest learning rate in after.0.peak as well" in capsys.readouterr().err
    error = runs.refused(capsys, "new", "comparison", "wrong", *words, "muon,ema_nesterov")
    assert "cannot be an arm by itself: it wraps the optimizers of all groups" in error
