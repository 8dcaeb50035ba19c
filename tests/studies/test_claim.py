"""Claims: what they say of a sweep, and what a check of them finds."""

import hashlib
import importlib
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_origin, get_type_hints

import jsonschema
import pytest
from scipy import stats

from tests import runs
from tests.sweep.test_sweep_plan import BASE
from trainer.__main__ import main
from trainer.messages import UserError
from trainer.studies import claim_segments
from trainer.studies.claim import (
    FORMAT,
    Checked,
    Claim,
    Wanted,
    _other_code,
    drawn,
    read_claim,
    verify_claim,
    write_claim,
)
from trainer.studies.claim_segments import Recomputed, Segment, caught, recompute, row_differences
from trainer.studies.claim_subject import read_subject
from trainer.studies.claim_text import claim_sentences
from trainer.sweep.ledger import file_digest
from trainer.sweep.per_example_file import PER_EXAMPLE_FILE, encode_examples, read_examples
from trainer.sweep.plan_file import read_plan
from trainer.sweep.spaces import canonical
from trainer.sweep.status import SweepReader
from trainer.workdir import code

SWEEP = """base: base.yaml
space: {optimizer.learning_rate: !space.log_uniform {low: 1e-3, high: 1e-1}}
trials: 3
method: !method.sobol {seed: 0}
final: {seeds: 2}
"""


def claimed(home: Path, text: str) -> Path:
    """Computes the sweep of a file, and writes its claim beside it."""
    sweep = runs.swept(home, BASE + "log_every: 5\neval_every: 10\n", text)
    write_claim(sweep, home / "claim.json")
    return home


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return claimed(tmp_path_factory.mktemp("claim"), SWEEP)


def _check(home: Path, count: int = 1, public: str = "4711") -> Checked:
    return verify_claim(home / "claim.json", home / "sweep", public, Wanted(None, count))


def scale_losses(home: Path, name: str, factor: float, after: int = -1, to: int = 99) -> None:
    """Changes the losses of a run in its rows, and in its summary as they then are."""
    folder = home / "sweep" / name
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if after < row["step"] <= to:
            row.update({key: factor * x for key, x in row.items() if key.endswith("loss")})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = json.loads((folder / "summary.json").read_text())
    newest = {key: x for row in rows for key, x in row.items()}
    summary["metrics"] |= {key: newest[key] for key in summary["metrics"]}
    for key, modes in summary["best"].items():
        for mode, best in modes.items():
            values = [row[key] for row in rows if key in row]
            best["value"] = min(values) if mode == "min" else max(values)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def _forge(home: Path, name: str, factor: float = 0.9) -> None:
    """Makes the losses of a run better, in its rows, its summary and the ledger alike."""
    scale_losses(home, name, factor)
    _rewrite_ledger(home / "sweep")


def _rewrite_ledger(sweep: Path, without: str = "") -> None:
    """Writes the ledger as if the files had always been as they are now, but for one of them."""
    for file in sweep.rglob(PER_EXAMPLE_FILE):  # they have the means that the run says now
        metrics = json.loads((file.parent / "summary.json").read_text())["metrics"]
        examples = read_examples(file.parent)
        for name, x in examples.values.items() if examples else ():
            apart = metrics[f"eval/{name}"] - x.mean(dtype=float)
            if examples and abs(apart) > 2e-3 * abs(x).mean(dtype=float):
                values = {**examples.values, name: x.astype(float) + apart}
                file.write_bytes(encode_examples(replace(examples, values=values)))
    lines, before = [], ""
    for line in (sweep / "ledger.jsonl").read_text().splitlines():
        entry = json.loads(line)
        del entry["hash"]
        place = f"{entry['trial']}/" if "trial" in entry else ""
        files = [f for f in entry.get("files", ()) if f"{place}{f}" != without]
        files = [f for f in files if (sweep / f"{place}{f}").exists()]
        entry |= {"files": {f: file_digest(sweep / f"{place}{f}") for f in files}} if files else {}
        entry["before"] = before
        entry["hash"] = before = hashlib.sha256(canonical(entry).encode()).hexdigest()
        lines.append(canonical(entry) + "\n")
    (sweep / "ledger.jsonl").write_text("".join(lines))


def claim_anew(home: Path, without: str = "") -> None:
    """Makes ledger and claim agree with the files but one, as whoever publishes both can."""
    _rewrite_ledger(home / "sweep", without)
    (home / "claim.json").unlink()
    write_claim(home / "sweep", home / "claim.json")


@pytest.mark.long
def test_a_true_claim_is_verified_by_every_run(computed):
    checked = _check(computed, count=99)
    assert checked.verified and len(checked.recomputed) == 5
    assert all(each.same and not each.apart for each in checked.recomputed)
    text = " ".join(claim_sentences(checked))
    assert "was computed again and has the same bits" in text
    assert "Verified, as far as 5 runs of 5 can" in text
    assert "The last evaluations, on which the verdict rests, were computed again of these" in text


def test_a_claim_has_the_verdict_and_the_hashes_of_the_evidence(computed):
    claim = read_claim(computed / "claim.json")
    plan = read_plan(computed / "sweep")
    assert claim.plan == plan.digest and len(claim.runs) == 5
    last = (computed / "sweep" / "ledger.jsonl").read_text().splitlines()[-1]
    assert claim.ledger == json.loads(last)["hash"]
    assert claim.verdict and claim.environment["jax"] and claim.data != [""]


SCHEMA = runs.ROOT / "docs" / "claim.schema.json"


def test_the_schema_has_the_fields_of_a_claim_and_their_types():
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    properties = {**schema["properties"], "format": {"description": "-", "type": "integer"}}
    digest = schema["$defs"]["sha256"]["type"]
    kinds = {x: digest if "$ref" in each else each["type"] for x, each in properties.items()}
    names = {int: "integer", str: "string", list: "array", dict: "object"}
    hints = get_type_hints(Claim)
    assert kinds == {x: names[get_origin(hint) or hint] for x, hint in hints.items()}
    assert schema["required"] == [*hints]
    assert all(len(each["description"]) > 10 for each in schema["properties"].values())
    assert schema["properties"]["format"]["const"] == FORMAT


def test_claims_fit_the_schema_and_others_do_not(computed):
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    files = [computed / "claim.json", *(runs.ROOT / "experiments").rglob("claim.json")]
    assert len(files) > 5
    for file in files:
        validator.validate(json.loads(file.read_text()))
    claim = json.loads(files[0].read_text())
    for wrong in ({"format": 2}, {"plan": "0f"}, {"runs": "all"}, {"verdict": []}, {"more": 1}):
        assert not validator.is_valid({**claim, **wrong})
    assert not validator.is_valid({x: each for x, each in claim.items() if x != "ledger"})


def test_a_claim_is_not_verified_with_other_code(tmp_path, monkeypatch):
    """It was, if no run was drawn that uses what differs."""
    monkeypatch.syspath_prepend(tmp_path)
    lab = tmp_path / "lab_of_a_claim.py"
    lab.write_text("def loss():\n    return 1\n\ndef net():\n    return 2\n")
    importlib.import_module("lab_of_a_claim")
    here = code.hashes(["lab_of_a_claim"])
    none = Claim(1, "", [], "", "", [], {}, [], {}, "", "")
    known = {name: ["0", hash] for name, hash in here.items()}
    of_earlier = known | {"lab_of_a_claim.py::net": [here["lab_of_a_claim.py::net"], "1"]}
    gone = known | {"lab_of_a_claim.py::gone": ["1"], "a step": ["2"]}
    for held in (known, of_earlier, gone):
        assert _other_code(replace(none, code=held), ["lab_of_a_claim"]) == ()
    other = known | {"lab_of_a_claim.py::loss": ["1"], "lab_of_a_claim.py": ["2"]}
    found = _other_code(replace(none, code=other), ["lab_of_a_claim"])
    assert found == ("lab_of_a_claim.py::loss",)
    drawn_ones = (Recomputed("final/a/1"),)
    assert Checked((), 5, recomputed=drawn_ones).verified
    checked = Checked((), 5, recomputed=drawn_ones, other_code=found)
    assert not checked.verified and not checked.alike
    text = " ".join(claim_sentences(checked))
    assert "The code here is not that of the claim: lab_of_a_claim.py::loss." in text
    assert "Not verified: with other code, data or settings" in text


@pytest.mark.long
def test_a_forged_run_is_found_when_it_is_drawn(copied):
    names = read_claim(copied / "claim.json").runs
    forged = next(name for name in names if name.startswith("final"))
    _forge(copied, forged)
    with pytest.raises(UserError, match="claim.json exists and is another claim, which may have"):
        write_claim(copied / "sweep", copied / "claim.json")
    (copied / "claim.json").unlink()
    write_claim(copied / "sweep", copied / "claim.json")  # the files agree with each other
    checked = _check(copied, count=99)
    assert not checked.refuted and not checked.verified
    assert [each.name for each in checked.recomputed if not each.same] == [forged]
    (bad,) = [each for each in checked.recomputed if not each.same]
    assert bad.largest == pytest.approx(0.1, rel=1e-6)
    text = " ".join(claim_sentences(checked))
    assert "its files are not those of this config and code" in text and "Refuted." in text


def test_a_folder_that_was_edited_afterwards_is_refuted_without_computing(copied, capsys):
    _forge(copied, "trials/base/0001/0")
    checked = _check(copied)
    assert checked.refuted and not checked.recomputed
    capsys.readouterr()
    file, folder = str(copied / "claim.json"), str(copied / "sweep")
    assert main(["claim", "verify", file, folder, "--public=1"]) == 1
    assert "Not verified: no run was computed again." in capsys.readouterr().out


def test_a_verdict_that_was_edited_is_refuted(copied):
    content = json.loads((copied / "claim.json").read_text())
    content["verdict"][0] = "base is better than everything."
    (copied / "claim.json").write_text(json.dumps(content))
    assert "The verdict by the rows is not that of the claim" in _check(copied).refuted[0]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("environment", {"devices": "8 x gpu NVIDIA H100"}, "environment devices '8 x gpu NVIDIA"),
        ("environment", {"jax": "9.9"}, "environment jax '9.9', and the folder '"),
        ("code", {"mine.py": ["0" * 64]}, "code mine.py ['000"),
        ("data", ["of another data set"], "data ['of another data set'], and the folder ['"),
        (
            "sweep",
            "a_larger_one",
            "'a_larger_one', and the folder 'sweep'. Rename the folder: it was called a_larger_one",
        ),
        ("drawn_by", "whatever the author likes", "another way to draw"),
        ("runs", ["final/base/10000"], "The folder has other runs than the claim."),
    ],
    ids=lambda x: x if isinstance(x, str) and x.isidentifier() else "",
)
def test_every_field_of_a_claim_is_compared(copied, field, value, words):
    """The environment, the code and the data could be edited, and the claim was verified."""
    content = json.loads((copied / "claim.json").read_text())
    content[field] = content[field] | value if isinstance(value, dict) else value
    (copied / "claim.json").write_text(json.dumps(content))
    checked = _check(copied)
    assert not checked.recomputed and not checked.verified
    (sentence,) = checked.refuted
    assert words in sentence


def test_a_field_that_nothing_checks_is_refused(copied):
    """Whoever reads the claim beside "Verified" believes it."""
    content = json.loads((copied / "claim.json").read_text())
    (copied / "claim.json").write_text(json.dumps(content | {"replicated_by": "NIST"}))
    with pytest.raises(UserError, match="has replicated_by, which no claim of format 1 has"):
        _check(copied)


@pytest.mark.long
def test_the_version_that_wrote_a_claim_is_said_to_be_its_own_word(copied):
    content = json.loads((copied / "claim.json").read_text())
    (copied / "claim.json").write_text(json.dumps(content | {"lockstep": "99.0"}))
    text = " ".join(claim_sentences(_check(copied, count=0)))
    assert "Nothing shows that Lockstep 99.0 wrote the claim, as it says." in text
    (copied / "claim.json").write_text(json.dumps(content))
    assert "Nothing shows" not in " ".join(claim_sentences(_check(copied, count=0)))


def test_a_ledger_that_began_late_is_named_by_a_check(copied):
    (copied / "sweep" / "ledger.jsonl").unlink()
    assert main(["sweep", "work", str(copied / "sweep")]) == 0
    (copied / "claim.json").unlink()
    write_claim(copied / "sweep", copied / "claim.json")
    checked = _check(copied, count=0)
    why = (
        "ledger.jsonl began at revision 1 of the plan, when there were 5 results, and says nothing"
    )
    assert not checked.refuted and why in " ".join(claim_sentences(checked))
    assert why in " ".join(read_claim(copied / "claim.json").verdict)
    # As the ledger of a sweep that an earlier version computed.
    assert "has no metrics before the first steps" in checked.caveats[1]


def test_a_check_records_by_what_it_drew(copied):
    """Of three verifiers, each has a number of their own, and nobody can choose another later."""
    text = " ".join(claim_sentences(_check(copied, count=0, public="07-19-22")))
    own = hashlib.sha256((copied / "claim.json").read_bytes()).hexdigest()
    assert f"Drawn by the claim with the SHA-256 {own} and by the public number 07-19-22," in text


@pytest.mark.long
def test_no_logger_of_the_config_runs_while_a_run_is_computed_again(tmp_path, monkeypatch):
    """It would log with the account of who checks, or fail where its package is missing."""
    (tmp_path / "base.yaml").write_text(
        BASE + "log_every: 5\neval_every: 10\nwriters: [console, tensorboard]\n"
    )
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    home = tmp_path / "home"
    folder = home / "sweep"
    assert runs.sweep(f"--config={tmp_path / 'sweep.yaml'}", f"--workdir={folder}") == 0
    made, kept = read_subject(folder).runs["final/base/10000"], tmp_path / "kept"
    assert list(made.folder.glob("events.out.*"))  # its own logger wrote

    def keep(segment: Segment, again: Path) -> tuple[dict[str, float], str]:
        shutil.copytree(again, kept)
        return compare(segment, again)

    compare = claim_segments._compare
    monkeypatch.setattr(claim_segments, "_compare", keep)
    assert recompute(Segment(made), ())[0].same
    assert (kept / "metrics.jsonl").exists() and not list(kept.glob("events.out.*"))


def test_a_run_of_another_config_than_that_of_the_plan_is_refuted(copied):
    """Its rows are those of its config, so that to compute it again shows nothing."""
    file = copied / "sweep/trials/base/0001/0/config.yaml"
    file.write_text(file.read_text().replace("width: 8", "width: 9"))
    claim_anew(copied)
    (found,) = _check(copied).refuted
    assert found.startswith("trials/base/0001/0/config.yaml: it is not the config of the plan:")
    assert "width: 9 -> 8" in found


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "run.json", "summary.json"])
def test_a_ledger_without_a_file_that_a_check_reads_is_refuted(copied, name):
    """Whoever leaves it out can decide what it says after the draw."""
    claim_anew(copied, without=f"trials/base/0001/0/{name}")
    assert _check(copied).refuted == (
        f"trials/base/0001/0/{name}: ledger.jsonl has no hash of it.",
    )


@pytest.mark.long
def test_metrics_before_the_first_step_are_evaluated_again(copied):
    """Worse ones hide that a unit collapsed, and better ones make it seem so."""
    file = copied / "sweep" / "ledger.jsonl"
    (value,) = re.findall(r'"eval/loss":([0-9.]+)', file.read_text())
    assert 2 < float(value) < 3 and _check(copied, count=0).verified
    file.write_text(file.read_text().replace(value, "9.5"))
    claim_anew(copied)
    assert _check(copied, count=0).refuted == (
        "ledger.jsonl has eval/loss 9.5 before the first step of base, and the config and code give"
        f" {float(value):.4g} here.",
    )


@pytest.mark.parametrize("left", ["no line", "no values", "another metric"])
def test_metrics_before_the_first_step_that_are_not_there_are_missed(copied, left):
    """Without them no unit counts as collapsed, and a t test decides."""
    file = copied / "sweep" / "ledger.jsonl"
    (line,) = [x for x in file.read_text().splitlines() if '"event":"initial"' in x]
    entry = json.loads(line)
    entry["values"] = {"eval/accuracy": entry["values"]["eval/accuracy"]} if left[0] == "a" else {}
    new = "" if left == "no line" else json.dumps(entry, separators=(",", ":")) + "\n"
    file.write_text(file.read_text().replace(f"{line}\n", new))
    claim_anew(copied)
    (found,) = _check(copied, count=0).refuted
    assert re.fullmatch(
        r"ledger.jsonl lacks \w+/\w+ before the first step of base, and the config and code give"
        r" [0-9.]+ here.",
        found,
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"trial":"trials/base/0000/0","arms"', '"trial":"trials/base/0009/0","arms"'),
        ('"arms":["base"]', '"arms":["other"]'),
    ],
)
def test_metrics_before_the_first_step_are_of_a_run_of_the_arm(copied, before, after):
    """Or else those of a run that begins elsewhere, or of none, would stand for an arm."""
    file = copied / "sweep" / "ledger.jsonl"
    assert file.read_text().count(before) == 1
    file.write_text(file.read_text().replace(before, after))
    claim_anew(copied)
    found, *others = _check(copied, count=0).refuted
    assert "which does not begin as they do." in found
    assert ["before the first step of base" in x for x in others] == [True] * ("other" in after)


@pytest.mark.long
def test_a_row_that_is_there_twice_is_found(copied):
    """The report takes the best of all rows, and a comparison the last one of a step."""
    file = copied / "sweep/trials/base/0001/0/metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    better = {"step": 10, "validation/accuracy": 0.99}
    file.write_text("".join([lines[0], json.dumps(better) + "\n", *lines[1:]]))
    run = next(
        x for name, x in read_subject(copied / "sweep").runs.items() if name == "trials/base/0001/0"
    )
    found, _ = recompute(Segment(run), ())
    assert found.first == "validation/accuracy at step 10 is there twice" and not found.same


def test_under_other_conditions_other_bits_are_not_called_a_forgery():
    apart = {"eval/loss": 3e-6}
    other = Recomputed("final/a/1", apart, "eval/loss at step 5", ("jax: 0.10 -> 0.12",))
    text = " ".join(claim_sentences(Checked((), 5, 0, (other,))))
    assert "Refuted" not in text and "Verified" not in text
    assert "Here other conditions hold (jax: 0.10 -> 0.12)" in text
    assert "can only be measured on at least 3 more segments" in text
    text = " ".join(claim_sentences(Checked((), 5, 0, (replace(other, other_program=True),))))
    assert "something else is computed" in text and "Refuted" not in text


def test_the_draw_depends_on_the_claim_and_the_public_number():
    names = [f"trials/a/{n:04d}/0" for n in range(50)]
    first = drawn(names, b"claim", "1")[:3]
    assert first == drawn(list(reversed(names)), b"claim", "1")[:3]
    counts = dict.fromkeys(names, 0)
    for public in range(2000):
        for name in drawn(names, b"claim", str(public))[:3]:
            counts[name] += 1
    # Each run is drawn 120 times on average; chi-squared with 49 degrees of freedom.
    statistic = sum((x - 120) ** 2 / 120 for x in counts.values())
    assert statistic < stats.chi2.ppf(0.9999, 49)
    assert drawn(names, b"another claim", "1")[:3] != first


def test_the_probability_is_hypergeometric():
    for total, forged, count in ((75, 8, 3), (75, 25, 3), (10, 1, 10), (5, 5, 1)):
        expected = 1 - stats.hypergeom.pmf(0, total, forged, count)
        assert caught(total, forged, count) == pytest.approx(expected)
        assert math.isfinite(expected)


def test_an_unfinished_sweep_has_no_claim(copied):
    shutil.rmtree(next((copied / "sweep/final/base").iterdir()))
    with pytest.raises(UserError, match="has not ended, and a claim is about all of its runs"):
        write_claim(copied / "sweep", copied / "other.json")
    assert not (copied / "other.json").exists()


def test_trials_of_vmap_have_no_claim(computed, monkeypatch):
    plan = replace(read_plan(computed / "sweep"), vmap=2)
    monkeypatch.setattr(SweepReader, "plan", property(lambda reader: plan))
    with pytest.raises(UserError, match="computed 2 trials at once by vmap"):
        write_claim(computed / "sweep", computed / "other.json")


def test_rows_are_compared_bit_for_bit():
    rows = [{"step": 1, "loss": math.nan}, {"step": 2, "loss": math.inf}]
    assert row_differences(rows, [dict(row) for row in rows]) == ({}, "")
    assert row_differences(rows, rows[:1]) == ({"rows": math.inf}, "only the run has step 2")
    near = [{"step": 1, "loss": 1.0 + 2**-52}]
    apart, first = row_differences([{"step": 1, "loss": 1.0}], near)
    assert first == "loss at step 1" and apart["loss"] == pytest.approx(2**-52)
    assert row_differences([{"step": 1, "x": 0.0}], [{"step": 1, "x": -0.0}])[0] == {"x": 0}
    assert not Recomputed("a", {"x": 0.0}).same


@pytest.mark.long
def test_an_error_of_the_computation_is_not_called_a_forgery(copied):
    """The data of the run cannot be read here: nothing is said of its files."""
    checked = _check(copied, count=0)
    assert checked.refuted == ()
    run = next(iter(read_subject(copied / "sweep").runs.values()))
    config = run.folder / "config.yaml"
    config.write_text(config.read_text().replace("data.digits", "data.no_such_data"))
    with pytest.raises(UserError, match="ended with 2:(.|\n)*no_such_data"):
        recompute(Segment(run), ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["claim", "verify", "nothing.json", "sweep", "--public=1"], "There is no file"),
        (["claim", "verify", "claim.json", "sweep"], "--public"),
        (["claim", "verify", "claim.json", "sweep", "--public=1", "--segments=0"], "at least 1"),
        (
            ["claim", "verify", "claim.json", "sweep", "--public=1", "--runs=1", "--segments=1"],
            "not allowed with",
        ),
        (["claim", "verify", "claim.json", "sweep", "--public=1", "--measured=2"], "at least 3"),
        (["claim", "verify", "claim.json", "swept", "--public=1"], "There is no folder swept"),
        (["claim", "write", "."], "plan.json|There is no folder|is not the folder"),
        (["claim", "write", "sweep", "--output=sweep"], "sweep cannot be written: it is a folder"),
        (["claim", "write", "sweep", "--output=no/c.json"], "no/c.json cannot be written: No such"),
        (["claim", "verify", "base.yaml", "sweep", "--public=1"], "write it again|damaged"),
    ],
)
def test_mistakes_exit_with_2(copied, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(copied)
    capsys.readouterr()
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2 and re.search(message, capsys.readouterr().err)
