"""The code of --vocabulary packages is part of a run's identity."""

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import runs
from trainer.workdir import code, fingerprint_differences

HELPER = "import math\n\ndef peak():\n    return 0.5 * math.pi\n"
INNER = "from .scales import scale\nimport helper\n\ndef factor():\n    return scale()\n"
OPTIMIZERS = "import optax\n\ndef sgd(learning_rate: float):\n    return optax.sgd(learning_rate)\n"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package with submodules, a helper beside it, and what it never imports."""
    here = tmp_path / "lab"
    (here / "the_lab" / "deep").mkdir(parents=True)
    for name, text in {
        "the_lab/__init__.py": '"""Nothing but modules."""\n',
        "the_lab/optimizers.py": OPTIMIZERS + "from the_lab.deep import inner\n",
        "the_lab/deep/__init__.py": "",
        "the_lab/deep/inner.py": INNER,
        "the_lab/deep/scales.py": "def scale():\n    return 1.0\n",
        "the_lab/unused.py": "raise RuntimeError\n",
        "helper.py": HELPER,
        "stranger.py": "",
    }.items():
        (here / name).write_text(text)
    monkeypatch.syspath_prepend(here)
    monkeypatch.syspath_prepend(runs.LAB)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield here
    forget()


def forget() -> None:
    """Lets the next import read the files again, as a new process would."""
    for name in [*sys.modules]:
        if name.startswith(("the_lab", "helper", "stranger", "the_module")):
            del sys.modules[name]


def test_all_loaded_user_modules_are_hashed(lab):
    import stranger  # noqa: F401  # type: ignore[import-not-found]  # beside it, and not of it
    import the_lab.optimizers  # noqa: F401  # type: ignore[import-not-found]

    found = code.hashes(["the_lab"])
    names = ["__init__.py", "deep/__init__.py", "deep/inner.py", "deep/scales.py", "optimizers.py"]
    files = [name for name in found if "::" not in name]
    assert files == ["helper.py", *(f"the_lab/{name}" for name in names)]
    assert [x for x in found if x.startswith("helper.py::")] == [
        "helper.py::top level",
        "helper.py::peak",
    ]
    assert "stranger.py" not in found
    assert found["helper.py"] == hashlib.sha256(HELPER.encode()).hexdigest()[:16]
    assert code.hashes(["the_lab.deep"]) == found
    assert code.hashes([]) == {}


def test_what_is_imported_from_elsewhere_is_hashed_but_for_installed_libraries(
    lab, tmp_path, monkeypatch
):
    for folder in ("elsewhere", "site-packages"):
        (tmp_path / folder).mkdir()
        monkeypatch.syspath_prepend(tmp_path / folder)
    (tmp_path / "elsewhere" / "stranger_of_mine.py").write_text("def f():\n    return 1\n")
    (tmp_path / "site-packages" / "stranger_installed.py").write_text("")
    (lab / "the_module.py").write_text(
        "import json, optax, stranger_installed, stranger_of_mine, trainer, lockstep\n"
    )
    import the_module  # noqa: F401  # type: ignore[import-not-found]

    found = [name for name in code.hashes(["the_module"]) if "::" not in name]
    assert found == ["stranger_of_mine.py", "the_module.py"]


def test_a_single_file_is_a_vocabulary_too(lab):
    (lab / "the_module.py").write_text("import helper, json, optax\n")
    import the_module  # noqa: F401  # type: ignore[import-not-found]

    found = [name for name in code.hashes(["the_module"]) if "::" not in name]
    assert found == ["helper.py", "the_module.py"]


def test_a_file_that_is_edited_after_its_import_keeps_the_hash_of_what_was_imported(lab):
    importlib.import_module("the_lab.optimizers")

    before = code.hashes(["the_lab"])
    (lab / "helper.py").write_text(HELPER + "x = 1\n")
    (lab / "the_lab" / "optimizers.py").unlink()
    assert code.hashes(["the_lab"]) == before
    (lab / "the_lab" / "optimizers.py").write_text(OPTIMIZERS)
    forget()
    importlib.import_module("the_lab.optimizers")

    after = code.hashes(["the_lab"])
    names = {"the_lab/optimizers.py", "the_lab/optimizers.py::top level"}
    assert {name for name in after if after[name] != before[name]} == names


def test_a_library_is_hashed_without_the_modules_that_it_imports():
    import packaging.version  # noqa: F401

    found = code.hashes(["packaging"])
    assert "packaging/version.py" in found
    assert {name.partition("/")[0] for name in found} == {"packaging"}
    assert not any("::" in name for name in found)  # nobody edits the comments of a library


def test_the_commit_of_a_package_is_noted(lab):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    import the_lab.optimizers  # noqa: F401  # type: ignore[import-not-found]

    assert code.commits(["the_lab"]) == {}
    git = ["git", "-C", str(lab), "-c", "user.name=A", "-c", "user.email=a@b.c"]
    git += ["-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "First"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    clean = {"the_lab": {"commit": head.stdout.strip(), "dirty": False}}
    assert code.commits(["the_lab.optimizers"]) == clean
    (lab / "stranger.py").write_text("x = 1\n")
    assert code.commits(["the_lab"]) == clean
    for file, text in (("optimizers.py", OPTIMIZERS), ("new.py", "")):
        (lab / "the_lab" / file).write_text(text)
        assert code.commits(["the_lab"])["the_lab"]["dirty"] is True
        subprocess.run([*git, "stash", "-q", "--include-untracked"], check=True)


def hashed(lab: Path, text: str) -> dict[str, str]:
    """The hashes of a module with this text."""
    forget()
    (lab / "the_module.py").write_text(text)
    importlib.import_module("the_module")
    return code.hashes(["the_module"])


CODE = """
import math

def peak(x: float = 0.5):
    return x * math.pi

class Net:
    width = 3

    def deep(self):
        return [peak() for _ in range(self.width)]
"""
COMMENTED = """
'''A module.'''
import math  # for pi
# hi
def peak(
    x: float = 0.5,
):
    "Returns the peak."
    return x * math.pi


class Net:
    '''A net.'''
    width = 3
    "Its width."
    def deep(self):
        '''Returns peaks.'''

        return [peak()  # three
                for _ in range(self.width)]
"""


def test_comments_docstrings_and_layout_do_not_count(lab):
    old, new = hashed(lab, CODE), hashed(lab, COMMENTED)
    assert old["the_module.py"] != new["the_module.py"]
    assert fingerprint_differences({"code": old}, {"code": new}) == []


@pytest.mark.parametrize(
    ("edit", "lines"),
    [
        (("* math.pi", "* math.e"), ["::peak differs"]),
        (("float = 0.5", "float = 0.6"), ["::peak differs"]),
        (("width = 3", "width = 4"), ["::Net differs"]),
        (("range(self", "range(2 * self"), ["::Net differs"]),
        (("import math", "import cmath as math"), ["::top level differs"]),
        (("class Net", "@staticmethod\nclass Net"), ["::Net differs"]),
        (
            ("class Net", "def more():\n    'Says.'\n\nclass Net"),
            ["::more is new", "::top level differs"],
        ),
        (("def peak", "def top"), ["::peak is gone", "::top is new", "::top level differs"]),
    ],
)
def test_what_is_computed_counts_and_is_named(lab, edit, lines):
    old, new = hashed(lab, CODE), hashed(lab, COMMENTED.replace(*edit))
    (change,) = fingerprint_differences({"code": old}, {"code": new})
    assert str(change) == "code: " + ", ".join(f"the_module.py{line}" for line in lines)


def test_the_order_of_statements_counts(lab):
    old = hashed(lab, "x = 1\ndef f():\n    return x\ny = f()\n")
    assert code.differing_files(old, hashed(lab, "x = 1\ny = 1\ndef f():\n    return x\n"))
    twice = ["def f():\n    return 1\n", "def f():\n    return 2\n"]
    old = hashed(lab, "".join(twice))
    assert code.differing_files(old, hashed(lab, "".join(twice[::-1]))) == ["the_module.py::f"]


def test_records_of_earlier_versions_have_the_bytes_of_files(lab):
    now = hashed(lab, CODE)
    then = {"the_module.py": hashlib.sha256(CODE.encode()).hexdigest()[:16]}
    assert fingerprint_differences({"code": then}, {"code": now}) == []
    (change,) = fingerprint_differences({"code": then}, {"code": hashed(lab, COMMENTED)})
    assert str(change) == "code: the_module.py differs"


def test_a_fingerprint_without_code_counts_as_unchanged():
    assert fingerprint_differences({"seed": 1}, {"seed": 1, "code": {"a.py": "1"}}) == []
    (change,) = fingerprint_differences({"code": {"a.py": "1"}}, {"code": {}})
    assert (change.kind, str(change)) == ("program", "code: a.py is gone")


def test_a_run_whose_code_changed_is_refused(lab, tmp_path, capfd):
    more = "experiment.optimizer = @the_lab.optimizers.sgd()\n"
    more += "the_lab.optimizers.sgd.learning_rate = 0.1\n"
    config, workdir = runs.write_config(tmp_path, more), tmp_path / "run"
    (tmp_path / "base.gin").write_text(
        "\n".join(x for x in runs.CONFIG.splitlines() if not x.startswith(("optax", "schedules")))
    )
    vocabulary = "--vocabulary=the_lab"
    assert runs.train(config, workdir, vocabulary, "--until=4") == 75
    forget()
    (lab / "stranger.py").write_text("x = 2\n")
    (lab / "the_lab" / "unused.py").write_text("x = 2\n")
    assert runs.train(config, workdir, vocabulary, "--until=5") == 75
    forget()
    (lab / "the_lab" / "optimizers.py").write_text(
        OPTIMIZERS + "from the_lab.deep import inner  # hi\n"
    )
    capfd.readouterr()
    assert "Changed" not in runs.said(capfd, config, workdir, vocabulary, "--until=6", code=75)
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    for (file, name), text in {
        ("the_lab/optimizers.py", "sgd"): OPTIMIZERS.replace(
            "sgd(learning_rate)\n", "sgd(learning_rate, 0.1)\n"
        )
        + "from the_lab.deep import inner\n",
        ("helper.py", "peak"): HELPER.replace("0.5", "0.6"),
    }.items():
        forget()
        old = (lab / file).read_text()
        (lab / file).write_text(text)
        capfd.readouterr()
        said = runs.said(capfd, config, workdir, vocabulary, code=2)
        assert f"code: {file}::{name} differs" in said and "--allow_changed=code" in said, said
        same = "step is the same, and so are the data; evaluation was not compared."
        step = same if name == "peak" else "step is another one, too."
        assert f"The program of a training {step}\n" in said
        assert len(said.splitlines()) <= 6 and "Traceback" not in said
        assert {path: path.read_bytes() for path in before} == before
        (lab / file).write_text(old)
    forget()
    (lab / "helper.py").write_text(HELPER.replace("0.5", "0.6"))
    assert runs.train(config, workdir, vocabulary, "--allow_changed=code", "--until=7") == 75
    assert "code: helper.py::peak differs (as allowed)" in capfd.readouterr().err
    record = json.loads((workdir / "run.json").read_text())
    assert record["lineage"][-1]["changed"] == ["code: helper.py::peak differs"]
    assert set(record["fingerprint"]["code"]) >= {"helper.py", "unruly/__init__.py"}
    # A report says of fingerprints that runs were made under different conditions.
    assert record["step_program"] and "step_program" not in record["fingerprint"]
    if (runs.ROOT / ".git").exists():
        assert len(record["lineage"][-1]["vocabulary"]["unruly"]["commit"]) == 40
    forget()
    del record["fingerprint"]["code"]  # as the version before wrote it
    (workdir / "run.json").write_text(json.dumps(record))
    assert runs.train(config, workdir, vocabulary) == 0


def test_a_run_does_not_go_on_with_another_file_that_its_code_opens(lab, tmp_path, capfd):
    """It did so without a word: neither the file nor what is installed is hashed."""
    factor = tmp_path / "factor"
    factor.write_text("1.0")
    (lab / "the_lab" / "optimizers.py").write_text(
        "from pathlib import Path\n"
        + OPTIMIZERS.replace(
            "optax.sgd(learning_rate)",
            f"optax.sgd(learning_rate * float(Path({str(factor)!r}).read_text()))",
        )
    )
    more = "experiment.optimizer = @the_lab.optimizers.sgd()\n"
    more += "the_lab.optimizers.sgd.learning_rate = 0.1\n"
    config, run = runs.write_config(tmp_path, more), [tmp_path / "run", "--vocabulary=the_lab"]
    (tmp_path / "base.gin").write_text(
        "\n".join(x for x in runs.CONFIG.splitlines() if not x.startswith(("optax", "schedules")))
    )
    assert runs.train(config, *run, "--until=4") == 75
    factor.write_text("2.0")
    capfd.readouterr()
    said = runs.said(capfd, config, *run, "--until=5", code=2)
    assert f"\n  code: {code.STEP} differs\nNo file of your code that is hashed differs. A" in said
    assert "resume with --allow_changed=code.\n" in said and len(said.splitlines()) == 4
    # A change of the config changes the program of the step, which is not told twice.
    factor.write_text("1.0")
    assert runs.train(config, *run, "--until=5") == 75
    more = ["--set", "steps=30", "--allow_changed=steps", "--until=6"]
    capfd.readouterr()
    assert "code" not in runs.said(capfd, config, *run, *more, code=75)
    factor.write_text("2.0")
    assert runs.train(config, *run, *more[:2], "--until=7", "--allow_changed=code") == 75
    assert f"code: {code.STEP} differs (as allowed)" in capfd.readouterr().err


@pytest.mark.long
def test_the_program_of_a_step_is_the_same_in_another_process():
    """Or a run of a user's package would be refused for nothing."""
    files = ["muon_vit.gin", "record46_gpt.yaml", "adamw_gpt.gin", "mlp_lbfgs.yaml"]
    text = """
        import sys
        from trainer.config import load
        from trainer.engine.program import load_located
        for file in sys.argv[1:]:
            print(load_located(load([f"configs/{file}"])).step_digest)
    """
    command = [sys.executable, "-c", textwrap.dedent(text), *files]
    found = [
        subprocess.run(
            command,
            cwd=runs.ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert found[0] == found[1] and len({*found[0]}) == len(files)


@pytest.mark.long
def test_a_run_that_failed_before_its_first_step_is_restarted_after_the_mend(lab, tmp_path, capfd):
    more = "experiment.data = @the_lab.broken.points()\nthe_lab.broken.points.scale = 2.0\n"
    config, workdir = runs.write_config(tmp_path, more), tmp_path / "run"
    broken = """
        import unruly
        class Scaled(unruly.Points):
            def train(self, batch_index, seed):
                yield next(super().train(0, 0))  # all that the plan reads
                raise OSError("the disk of the lab is not mounted")
        def points(scale: float):
            return Scaled()
    """
    file, vocabulary = lab / "the_lab" / "broken.py", "--vocabulary=the_lab"
    file.write_text(textwrap.dedent(broken))
    said = runs.said(capfd, config, workdir, vocabulary, code=1)
    assert "error: OSError: the disk of the lab is not mounted (" in said and "broken.py:6)" in said
    forget()
    file.write_text(textwrap.dedent(broken).replace("raise", "yield from super().train(1, 0)  #"))
    capfd.readouterr()
    change = ["--set", "data.scale=3.0"]
    assert runs.train(config, workdir, vocabulary, *change) == 0, capfd.readouterr().err
    said = capfd.readouterr().err
    begin = "Changed since this run ended before its first step: "
    assert f"{begin}data.scale: 2.0 -> 3.0." in said
    assert f"{begin}code: the_lab/broken.py::Scaled differs." in said
    assert "as allowed" not in said
    assert "scale: 3.0" in (workdir / "config.yaml").read_text()
    # Now it has made steps, and its code may not change any more.
    forget()
    file.write_text(file.read_text() + "x = 1\n")
    assert runs.train(config, workdir, vocabulary, *change) == 2
    assert "code: the_lab/broken.py::top level differs" in capfd.readouterr().err
