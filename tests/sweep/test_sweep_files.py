"""Files of a sweep that are damaged: commands say so, and a worker goes on where it can."""

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import short
from tests.sweep_fuzz import VOCABULARY, Answer, Place
from tests.sweep_results import compare


@pytest.fixture(scope="module")
def place(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        yield Place(tmp_path_factory.mktemp("files"), patch.setattr)


@pytest.fixture
def copied(place: Place, tmp_path: Path):
    """Returns a function that copies a sweep: "complete", "stopped" or "alone"."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(place.folder / name, tmp_path / "sweep"))

    return copy


def wave_of(sweep: Path) -> Path:
    """Returns the file of the wave."""
    (file,) = [each for each in (sweep / "waves").glob("*.json") if each.name != "limits.json"]
    return file


def goes_on(place: Place, sweep: Path, name: str, *said: str) -> None:
    """Demands that a worker comes to the results of the undamaged sweep."""
    answer = Answer("sweep", "work", str(sweep), VOCABULARY)
    assert answer.code == 0 and "Traceback" not in answer.said, answer.said
    assert all(each in answer.said for each in said), answer.said
    found = compare(sweep, place.folder / f"{name} reference", 12)
    assert found == {"lost": [], "doubled": [], "differing": []}


CONTENTS = {
    "empty": lambda file: file.write_text(""),
    "cut": lambda file: file.write_text(file.read_text()[:20]),
    "another type": lambda file: file.write_text('{"trials": 5}'),
    "other trials": lambda file: file.write_text(file.read_text().replace("0000/0", "0001/0")),
    "another program": lambda file: file.write_text(file.read_text().replace(": 0,", ": 1,")),
    "a folder": lambda file: (file.unlink(), (file / "inner").mkdir(parents=True)),
    "a link to itself": lambda file: (file.unlink(), file.symlink_to(file.name)),
}


@pytest.mark.long
@pytest.mark.parametrize("damage", CONTENTS)
def test_a_wave_whose_file_is_damaged_is_computed_again(place, copied, damage):
    sweep = copied("stopped")
    CONTENTS[damage](wave_of(sweep))
    said = f"{wave_of(sweep)} is damaged ("
    status = Answer("sweep", "status", str(sweep))
    assert status.code == 0 and said in status.said
    goes_on(place, sweep, "stopped", said, "its trials are computed again")


@short.parametrize(
    ("name", "text"),
    [
        ("run.json", '{"lineage": 5}'),
        ("run.json", ""),
        ("config.yaml", "steps: ["),
        ("config.yaml", "steps: 5\n"),
        ("epoch", "x"),
    ],
    lambda case: case[0],
)
@pytest.mark.parametrize("sweep", ["stopped", "alone"])
def test_a_wave_whose_record_is_damaged_is_computed_again(place, copied, sweep, name, text):
    folder = copied(sweep)
    wave = wave_of(folder).with_suffix("")
    file = next(wave.glob("trials/*/*/*")) / name if sweep == "alone" else wave / name
    file.write_text(text)
    goes_on(place, folder, sweep, str(file), "The wave is removed, and its trials are computed")


@pytest.mark.parametrize("name", ["stopped", "alone"])
def test_a_wave_of_other_data_is_refused_with_the_way_to_compute_it_anew(place, copied, name):
    sweep = copied(name)
    wave = wave_of(sweep).with_suffix("")
    file = wave / "run.json" if name == "stopped" else next(wave.glob("trials/*/*/*/run.json"))
    record = json.loads(file.read_text())
    record["fingerprint"]["data"] = "other points"
    file.write_text(json.dumps(record))
    answer = Answer("sweep", "work", str(sweep), VOCABULARY)
    assert answer.code == 2 and "data: other points -> " in answer.said
    assert f"Restore the old value; or remove {wave}, and its trials are" in answer.said
    assert "--allow_changed" not in answer.said and "Traceback" not in answer.said
    shutil.rmtree(wave)
    goes_on(place, sweep, name)


def test_a_wave_that_lacks_rows_of_a_trial_is_computed_again(place, copied):
    """A trial whose rows are lost would be a result without a curve."""
    sweep = copied("stopped")
    file = wave_of(sweep).with_suffix("") / "trials/base/0000/0/metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], '{"step": "x"}\n', *lines[2:]]))
    goes_on(place, sweep, "stopped", f"{file} is damaged (it lacks 1 row, such as that of step 4)")


def test_a_lock_that_cannot_be_opened_is_named(copied):
    sweep = copied("stopped")
    (sweep / "lock").unlink()
    (sweep / "lock").symlink_to("lock")
    for words, code in (
        (["sweep", "status"], 2),
        (["report"], 2),
        (["sweep", "work", VOCABULARY], 1),
    ):
        answer = Answer(*words, str(sweep))
        assert answer.code == code and "Traceback" not in answer.said, answer.said
        assert f"{sweep / 'lock'}" in answer.said and "Too many levels" in answer.said


@pytest.mark.parametrize("name", ["manifest.json", "state.safetensors"])
def test_a_checkpoint_whose_record_is_a_link_to_itself_is_set_aside(place, copied, name):
    sweep = copied("stopped")
    (file,) = wave_of(sweep).with_suffix("").glob(f"checkpoints/*/{name}")
    file.unlink()
    file.symlink_to(file.name)
    goes_on(place, sweep, "stopped", f"the file {name} is missing")


def test_what_was_learned_about_waves_may_be_lost(place, copied):
    sweep = copied("alone")
    (sweep / "waves/limits.json").unlink()
    (sweep / "waves/limits.json").mkdir()
    shutil.rmtree(wave_of(sweep).with_suffix(""))
    wave_of(sweep).unlink()
    goes_on(place, sweep, "alone", "It is computed alone.")


@pytest.mark.parametrize("value", ["5", "1e400", "[]", '"x"'])
def test_a_report_of_damaged_results_says_which_ones(copied, value):
    sweep = copied("complete")
    trial = sweep / "trials/low/0000/0"
    text = (trial / "summary.json").read_text()
    (trial / "summary.json").write_text(re.sub(r'"step": \d+', f'"step": {value}', text, count=1))
    record = json.loads((sweep / "final/high/10000/run.json").read_text())
    (sweep / "final/high/10000/run.json").write_text(json.dumps(record | {"lineage": 5}))
    answer = Answer("report", str(sweep), "--formats=markdown")
    assert answer.code == 0, answer.said
    page = (sweep / "report/report.md").read_text()
    damaged = value != "5"
    assert ("The summary.json of trials/low/0000/0 is missing or damaged" in page) == damaged
    assert "The run.json of final/high/10000 is damaged" in page


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text.replace('"number": 0', '"number": 7'), "low has no point 0007"),
        (lambda text: text.replace('"low"', '"lo"'), "its arms are lo, high"),
        (lambda text: text.replace("10000", "10007"), "its seeds are [10007, 10001]"),
        (lambda text: text.replace('"number"', '"n"'), "has no 'number'"),
        (lambda text: "5", "its content is 5, and not a list"),
    ],
)
def test_damaged_winners_are_refused_with_the_way_to_choose_them_again(copied, change, why):
    sweep = copied("complete")
    file = sweep / "final.json"
    text = file.read_text()
    assert change(text) != text
    file.write_text(change(text))
    for words in (["sweep", "status"], ["sweep", "work", VOCABULARY], ["report"], ["plot"]):
        answer = Answer(*words, str(sweep))
        assert answer.code == 2 and f"{file} is damaged (" in answer.said, answer.said
        assert why in answer.said and "Remove it, and they are chosen again" in answer.said
    file.unlink()
    assert Answer("sweep", "work", str(sweep), VOCABULARY).code == 0
    assert file.read_text() == text


@pytest.mark.long
def test_commands_answer_damaged_files_with_a_sentence_and_workers_go_on(place):
    """A hundred random damages; `make fuzz_sweep` makes 5,000."""
    wrong = [each for n in range(100) for each in place.try_one(n, random.Random(f"short {n}"))]
    assert not wrong, "\n".join(wrong)
