"""Segments of runs: what a check finds of states and rows, also in another environment."""

import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats

from tests import runs
from tests.studies.test_claim import SWEEP, _rewrite_ledger, claim_anew, claimed, scale_losses
from trainer.__main__ import main
from trainer.checkpoint import Checkpoints, Retention, distances
from trainer.messages import UserError
from trainer.studies import claim_segments
from trainer.studies.claim import (
    Checked,
    Wanted,
    drawn,
    read_claim,
    verify_claim,
    write_claim,
)
from trainer.studies.claim_segments import (
    EXAMPLES,
    STATE,
    WIDEST,
    Recomputed,
    Segment,
    Tolerance,
    caught,
    caught_by_tolerance,
    kept_by,
    recompute,
    segments_of,
)
from trainer.studies.claim_subject import read_subject
from trainer.studies.claim_text import claim_sentences
from trainer.sweep.evidence import examine
from trainer.sweep.ledger import LedgerWriter, read_ledger
from trainer.sweep.per_example_file import PER_EXAMPLE_FILE, encode_examples, read_examples
from trainer.writers.json_files import as_json

RUN = "final/base/10000"
OTHER = ("final/base/10001", "trials/base/0000/0")


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep whose runs of 20 steps keep their states after steps 6 and 13."""
    return claimed(tmp_path_factory.mktemp("segments"), f"{SWEEP}claims: {{segments: 3}}\n")


def _segments(home: Path, name: str = RUN) -> list[Segment]:
    run = read_subject(home / "sweep").runs[name]
    return list(segments_of(run, kept_by(run)))


def _check(home: Path, segments: int = 1, public: str = "4711", measured: int = 3) -> Checked:
    wanted = Wanted(segments, measured=measured)
    return verify_claim(home / "claim.json", home / "sweep", public, wanted)


def _replace_state(home: Path, name: str, step: int, factor: float) -> None:
    """Writes a whole checkpoint in the place of a kept state: its parameters are scaled."""
    place = home / "sweep" / name / "segments" / str(step)
    manifest = json.loads((place / "manifest.json").read_text())["manifest"]
    raw = (place / "state.safetensors").read_bytes()
    tree = {}
    for path, entry in manifest["leaves"].items():
        kind = np.dtype(entry["stored_dtype"])
        count = int(np.prod(entry["stored_shape"], dtype=int))
        leaf = np.frombuffer(raw, kind, count, entry["start"]).reshape(entry["stored_shape"])
        leaf = leaf * kind.type(factor) if path.startswith("params/") else leaf
        *nodes, last = path.split("/")
        at = tree
        for node in nodes:
            at = at.setdefault(node, {})
        at[last] = jax.numpy.asarray(leaf)
    shutil.rmtree(place)
    with Checkpoints(place.parent, Retention(keep_latest=9, keep_best=0)) as checkpoints:
        checkpoints.save(step, tree)
        checkpoints.wait()
        assert checkpoints.error is None


# The same bits.


@pytest.mark.long
def test_drawn_segments_of_a_true_claim_have_the_same_bits(computed, capsys):
    arguments = [str(computed / "claim.json"), str(computed / "sweep"), "--public=4711"]
    said = runs.printed(capsys, "claim", "verify", *arguments, "--segments=2")
    said = " ".join(said.split())
    assert said.count("was computed again and has the same bits.") == 3 + 2
    assert (
        "Verified, as far as the last segments of all compared runs and of the trials that won (3)"
        " can, and 2 of the 4 other segments of the compared runs, which were drawn. A forged run"
        " has at least one forged segment, and may have no more: had somebody forged one of the 4,"
        " it would have been drawn with a probability of 0.50, and of two at least one with 0.83."
    ) in said
    (won,) = read_subject(computed / "sweep").winners
    for name in (RUN, OTHER[0], won):
        assert f"{name} from step 14 to the last was computed again" in said
    names = [x.name for run in (RUN, OTHER[0]) for x in _of(computed, run)[:2]]
    first = drawn(names, (computed / "claim.json").read_bytes(), "4711")[:2]
    assert all(f"{name} was computed again" in said for name in first)


@pytest.mark.long
def test_the_last_evaluation_of_a_compared_run_cannot_be_edited(copied):
    """Three drawn segments of forty found that in one of ten cases; now it always is."""
    scale_losses(copied, RUN, 0.99, after=13)
    claim_anew(copied)
    checked = _check(copied, segments=0)
    assert checked.forged and checked.last == len(checked.recomputed) == 3
    assert [x.name for x in checked.recomputed if not x.same] == [f"{RUN} from step 14 to the last"]


def test_the_other_segments_of_compared_runs_are_drawn_alike():
    """The best choice against a forger who knows how the draw is made."""
    names = [f"s{n}" for n in range(6)]
    counts = dict.fromkeys(names, 0)
    for public in range(6000):
        counts[drawn(names, b"claim", str(public))[0]] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


def _of(home: Path, name: str) -> list[Segment]:
    return _segments(home, name)


def test_a_run_is_divided_where_it_kept_its_states(computed):
    names = [x.name for x in _segments(computed)]
    assert names == [f"{RUN} from step {x}" for x in ("1 to 6", "7 to 13", "14 to the last")]
    assert kept_by(_segments(computed)[0].run) == [6, 13]
    run = _segments(computed)[0].run
    assert [x.name for x in segments_of(run, [])] == [RUN]
    # A trial that was stopped early may end with the state that it keeps.
    assert [(x.start, x.end) for x in segments_of(run, [13, 20])] == [(0, 13), (13, 20)]


@pytest.mark.long
def test_every_segment_of_a_run_is_reproduced(computed):
    for segment in _segments(computed):
        assert recompute(segment, ())[0].same


# Forgeries.


@pytest.mark.long
def test_an_edited_row_is_found_in_its_segment_and_nowhere_else(copied):
    scale_losses(copied, RUN, 0.999, after=6, to=13)
    claim_anew(copied)
    found = [recompute(segment, ())[0] for segment in _segments(copied)]
    assert [each.same for each in found] == [True, False, True]
    assert found[1].first == "train/loss at step 10"
    assert found[1].largest == pytest.approx(1e-3, rel=1e-3)
    checked = Checked((), 5, 15, tuple(found))
    assert checked.forged and not checked.verified and "Refuted." in list(claim_sentences(checked))


@pytest.mark.long
@pytest.mark.parametrize("edit", ["removed", "damaged", "without loss", "incomplete", "swapped"])
def test_results_on_single_examples_that_were_edited_are_found(copied, edit):
    """Of all compared runs alike: one of them is found by `sweep check` already."""
    for name in (RUN, OTHER[0]):
        folder = copied / "sweep" / name
        file, found = folder / PER_EXAMPLE_FILE, read_examples(folder)
        assert found is not None and found.complete
        if edit == "removed":
            file.unlink()
            continue
        if edit == "damaged":
            file.write_bytes(file.read_bytes()[:100])
            continue
        if edit == "without loss":
            values = {key: x for key, x in found.values.items() if key != "loss"}
            found = replace(found, values=values)
        elif edit == "incomplete":
            found = replace(found, complete=False)
        else:  # the mean stays
            values = {key: np.roll(x, 1) for key, x in found.values.items()}
            found = replace(found, values=values)
        file.write_bytes(encode_examples(found))
    claim_anew(copied)
    checked = _check(copied, segments=0)
    assert not checked.refuted and checked.forged
    wrong = [x for x in checked.recomputed if not x.same]
    assert [x.name for x in wrong] == [f"{x} from step 14 to the last" for x in (RUN, OTHER[0])]
    assert all(key.startswith(EXAMPLES) for key in wrong[0].apart)
    said = " ".join(claim_sentences(checked))
    assert f"has the same rows, and other results on {EXAMPLES}" in said


def test_results_on_single_examples_that_one_run_lacks_are_found_by_a_check(copied, capsys):
    """Without them, a report says nothing about another test set."""
    folder = copied / "sweep" / RUN
    found = read_examples(folder)
    assert found is not None
    edits = {
        "some examples": replace(found, complete=False),
        "loss": replace(found, values={"accuracy": found.values["accuracy"]}),
        "accuracy, loss, some examples": None,
    }
    for lacks, edited in edits.items():
        (folder / PER_EXAMPLE_FILE).unlink()
        if edited is not None:
            (folder / PER_EXAMPLE_FILE).write_bytes(encode_examples(edited))
        _rewrite_ledger(copied / "sweep")
        capsys.readouterr()
        assert main(["sweep", "check", str(copied / "sweep")]) == 2
        said = " ".join(capsys.readouterr().out.split())
        assert said == (
            f"{RUN}/{PER_EXAMPLE_FILE}: it lacks {lacks}, which other runs of base have."
        )
        (folder / PER_EXAMPLE_FILE).touch()


def test_other_test_examples_of_one_run_are_found_by_a_check(copied, capsys):
    """Data of which only a part is hashed may have changed, or a forger silence a verdict."""
    folder = copied / "sweep" / RUN
    found = read_examples(folder)
    assert found is not None
    (folder / PER_EXAMPLE_FILE).write_bytes(encode_examples(replace(found, sha256="0f" * 32)))
    _rewrite_ledger(copied / "sweep")
    capsys.readouterr()
    assert main(["sweep", "check", str(copied / "sweep")]) == 2
    said = capsys.readouterr().out
    assert f"{PER_EXAMPLE_FILE}: its test examples are not those of other runs of base." in said


def test_results_that_the_ledger_lacks_are_refuted(copied):
    """Whoever leaves them out could bring the right ones once it is known which are drawn."""
    claim_anew(copied, without=f"{RUN}/{PER_EXAMPLE_FILE}")
    (why,) = _check(copied).refuted
    assert why == f"{RUN}/{PER_EXAMPLE_FILE}: ledger.jsonl has no hash of it."


@pytest.mark.parametrize("end", ["diverged", "pruned"])
def test_an_end_that_the_rows_do_not_have_is_found_by_a_check(copied, capsys, end):
    """An arm whose runs were called diverged lost to another one."""
    file = copied / "sweep" / RUN / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"end": end}))
    _rewrite_ledger(copied / "sweep")
    capsys.readouterr()
    assert main(["sweep", "check", str(copied / "sweep")]) == 2
    said = capsys.readouterr().out
    assert f"its end is {end!r}, and its rows have finite losses of all steps" in said


@pytest.mark.long
def test_an_edited_state_is_found_by_the_segments_on_both_sides(copied):
    _replace_state(copied, RUN, 13, 1.01)
    claim_anew(copied)
    before, middle, last = (recompute(segment, ())[0] for segment in _segments(copied))
    assert before.same
    assert middle.apart == {f"{STATE}params": pytest.approx(1 - 1 / 1.01, rel=1e-3)}
    assert middle.first == f"{STATE}params at step 13"
    assert "train/loss" in last.apart and last.first.endswith("at step 15")


@pytest.mark.long
def test_the_state_of_another_run_is_found(copied):
    """All hashes are right: only the segments on its sides show it."""
    kept = copied / "sweep" / RUN / "segments/6"
    shutil.rmtree(kept)
    shutil.copytree(copied / "sweep" / OTHER[0] / "segments/6", kept)
    claim_anew(copied)
    first, second = (recompute(segment, ())[0] for segment in _segments(copied)[:2])
    assert f"{STATE}params" in first.apart and f"{STATE}run_state" in first.apart
    assert second.first == "train/loss at step 10"


def test_what_was_changed_after_the_claim_is_refuted_without_computing(copied, capsys):
    file = copied / "sweep" / RUN / "segments/6/state.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    before = {x: x.read_bytes() for x in (copied / "sweep").rglob("*") if x.is_file()}
    capsys.readouterr()
    arguments = ["claim", "verify", str(copied / "claim.json"), str(copied / "sweep")]
    said = " ".join(runs.printed(capsys, *arguments, "--public=1", code=1).split())
    assert f"{RUN}/segments/6/state.safetensors: it was changed after its line" in said
    assert "no run was computed again" in said
    assert {x: x.read_bytes() for x in before} == before
    _rewrite_ledger(copied / "sweep")  # a ledger that is not that of the claim
    assert "The ledger of the folder does not end as that of the claim" in _check(copied).refuted[0]


def test_states_that_the_ledger_or_the_plan_lacks_are_refuted(copied):
    sweep = copied / "sweep"
    claim_anew(copied, without=f"{RUN}/segments/6/state.safetensors")
    (why,) = _check(copied).refuted
    assert why == f"{RUN}/segments/6/state.safetensors: ledger.jsonl has no hash of it."
    shutil.copytree(sweep / RUN / "segments/6", sweep / RUN / "segments/9")
    claim_anew(copied)
    assert "segments/9: by the plan, this run keeps no such state." in _check(copied).refuted[-1]


def test_nothing_but_the_files_of_a_state_is_copied(copied, tmp_path):
    """Links to a device without an end, or to a folder of the user, were followed."""
    segment = _segments(copied)[1]
    kept = segment.kept / str(segment.start)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    before = sorted(x.relative_to(kept) for x in kept.rglob("*") if x.is_file())
    (kept / "more").symlink_to(tmp_path / "private")
    (kept / "endless").symlink_to("/dev/zero")
    again = tmp_path / "again"
    claim_segments._begin(segment, again)
    copy = again / "checkpoints" / str(segment.start)
    assert sorted(x.relative_to(copy) for x in copy.rglob("*") if x.is_file()) == before
    with pytest.raises(UserError, match="it is a link, and not a file of the sweep"):
        claim_anew(copied)


@pytest.mark.long
def test_a_run_without_its_states_is_one_segment(copied, capsys):
    """They take more space than all else, and may be removed at any time, such as to publish it."""
    for name in (RUN, *OTHER):
        shutil.rmtree(copied / "sweep" / name / "segments")
    capsys.readouterr()
    assert main(["sweep", "check", str(copied / "sweep")]) == 0
    assert "12 files of states that it has are not here." in capsys.readouterr().out
    checked = _check(copied, segments=0)
    assert not checked.refuted and checked.segments == 0  # of the runs that are compared
    names = {x.name for x in checked.recomputed}
    assert {RUN, OTHER[0]} < names and checked.verified  # whole, as their last segments
    assert "(3) have the same bits, and the compared runs have no others." in (
        " ".join(claim_sentences(checked))
    )


@pytest.mark.long
def test_a_run_that_ended_otherwise_is_found(copied):
    """A trial of a rival that is called diverged ranks last."""
    file = copied / "sweep/trials/base/0000/0/summary.json"
    summary = json.loads(file.read_text())
    file.write_text(json.dumps(summary | {"end": "diverged", "why": "Step 20 is not finite."}))
    last = recompute(_segments(copied, "trials/base/0000/0")[-1], ())[0]
    assert not last.same
    text = " ".join(claim_sentences(Checked((), 5, 15, (last,))))
    assert "ended as 'done', and not as 'diverged', with the same rows" in text
    assert "Refuted." in text


@pytest.mark.long
def test_a_damaged_state_is_an_error_and_no_forgery(copied):
    """Its hash is that of the ledger: who published it cannot show its segments."""
    (copied / "sweep" / RUN / "segments/6/state.safetensors").write_bytes(b"nothing")
    claim_anew(copied)
    first, second, _ = _segments(copied)
    with pytest.raises(UserError, match="state of step 6 in .* is damaged"):
        recompute(first, ())
    with pytest.raises(UserError, match="could not be computed"):
        recompute(second, ())


# Another environment.


def _measured(*losses: float, state: float = 1e-6) -> tuple[Recomputed, ...]:
    conditions = ("jax: 1 -> 2",)
    return tuple(
        Recomputed(f"m{n}", {"eval/loss": x, f"{STATE}params": state}, "eval/loss", conditions)
        for n, x in enumerate(losses)
    )


def test_a_tolerance_rests_on_the_median_and_is_at_most_a_hundredth():
    found = Tolerance(_measured(1e-6, 3e-6, 2e-6, 9e-6, 4e-6))
    assert found.median == 3e-6 and found.allowed == pytest.approx(3e-4)
    # Two of five are forged: they do not widen it.
    assert Tolerance(_measured(1e-6, 0.3, 2e-6, 0.2, 4e-6)).allowed == pytest.approx(4e-4)
    assert Tolerance(_measured(0.1, 0.3, 2e-6, 0.2, 4e-6)).allowed == WIDEST
    assert Tolerance(_measured(math.inf, math.inf, 2e-6)).allowed == WIDEST
    # Where most have the same bits, one unit of rounding is no forgery.
    assert Tolerance((Recomputed("a"),) * 3).allowed == pytest.approx(100 * 2**-24)


def test_only_what_is_as_near_as_the_environments_is_accepted():
    tolerance = Tolerance(_measured(1e-6, 3e-6, 2e-6), False, 1, 10)
    near, far, unknown = (
        Recomputed("x", apart, "eval/loss at step 1", ("jax: 1 -> 2",))
        for apart in ({"eval/loss": 1.9e-4}, {"eval/loss": 2.1e-4}, {f"{STATE}all": math.inf})
    )
    for segment, alike in ((near, True), (far, False), (unknown, False)):
        checked = Checked((), 5, 15, (segment,), (tolerance,))
        text = " ".join(claim_sentences(checked))
        assert checked.alike == alike and not checked.verified
        assert ("It agrees within the differences" in text) == alike
        assert ("Not verified" in text) == (not alike) and "Refuted" not in text
    # Some runs may name another environment because they were forged.
    checked = Checked((), 5, 15, (near,), (tolerance,), ("cpu",))
    assert "The runs name environments that differ in cpu." in " ".join(claim_sentences(checked))
    # One of the segments that gave the tolerance is beyond it.
    tolerance = Tolerance(_measured(1e-6, 3e-6, 2e-6, 2e-6, 0.01), False, 1, 10)
    checked = Checked((), 5, 15, (near,), (tolerance,))
    assert not checked.alike and "m4, one of these, is beyond it" in " ".join(
        claim_sentences(checked)
    )
    # The same conditions and other bits: no tolerance counts.
    checked = Checked((), 5, 15, (replace(near, differing=()),), (tolerance,))
    assert checked.forged and not checked.alike
    # What begins a run is apart by more, and is not judged by what does not.
    checked = Checked((), 5, 15, (replace(near, begins_run=True),), (tolerance,))
    assert not checked.alike and "segments of the same kind" in " ".join(claim_sentences(checked))


def test_the_probabilities_are_those_of_simulated_draws():
    """20,000 draws by the rule of the product, from segments of which some are forged."""
    names = [f"s{n:03d}" for n in range(40)]
    forged = set(random.Random(0).sample(names, 9))
    missed = undetected = 0
    for public in range(20_000):
        order = drawn(names, b"claim", str(public))
        missed += not forged & set(order[:3])
        judged, measured = order[:3], order[3:10]
        few = len(forged & set(measured)) < len(measured) / 2
        undetected += not (few and forged & {*judged, *measured})
    assert 1 - missed / 20_000 == pytest.approx(caught(40, 9, 3), abs=0.015)
    expected = caught_by_tolerance(40, 9, 7, 3)
    assert 1 - undetected / 20_000 == pytest.approx(expected, abs=0.015)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the processes that a check starts compute with other instructions of the processor."""
    # Also other than those of a quick compilation, which the other tests ask for.
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")


@pytest.mark.long
def test_an_honest_claim_is_accepted_elsewhere_and_a_changed_loss_is_not(copied, elsewhere):
    honest = _check(copied)
    assert not honest.verified and honest.alike, list(claim_sentences(honest))
    assert all(x.median < 1e-4 for x in honest.tolerances)
    text = " ".join(claim_sentences(honest))
    assert "xla_flags" in text and "It agrees within the differences" in text

    for name in (RUN, OTHER[0]):
        scale_losses(copied, name, 0.99, after=13)
    claim_anew(copied)
    forged = _check(copied)
    assert not forged.alike and not forged.verified
    assert "more than the tolerance allows: " in " ".join(claim_sentences(forged))


def _name_another_environment(home: Path, *names: str) -> None:
    for name in names:
        file = home / "sweep" / name / "run.json"
        record = json.loads(file.read_text())
        record["fingerprint"]["jax"] = "0.0.1"
        file.write_text(json.dumps(record, indent=1) + "\n")


def test_runs_of_an_environment_that_the_ledger_lacks_are_refuted(copied):
    """The hashes of the ledger are those of the forged files, and its line is as it was."""
    claim = read_claim(copied / "claim.json")
    scale_losses(copied, RUN, 0.995, after=0)
    _name_another_environment(copied, RUN)
    _rewrite_ledger(copied / "sweep")
    with pytest.raises(
        UserError, match=r"run\.json: ledger\.jsonl lacks its environment, jax 0\.0\.1"
    ):
        write_claim(copied / "sweep", copied / "other.json")
    made = replace(claim, ledger=examine(copied / "sweep").ledger.head)
    (copied / "claim.json").write_text(json.dumps(as_json(made)))
    assert _check(copied).refuted[:1] == (
        f"{RUN}/run.json: ledger.jsonl lacks its environment, jax 0.0.1.",
    )


@pytest.mark.long
def test_naming_another_environment_for_forged_runs_widens_no_tolerance(copied):
    """Before, it was measured on the segments that name the same one, which were forged as well."""
    other = sorted(
        {f"trials/base/000{n}/0" for n in range(3)} - read_subject(copied / "sweep").winners
    )
    for name in (RUN, OTHER[0]):
        scale_losses(copied, name, 0.995, after=6)
    scale_losses(copied, other[0], 0.995, after=6, to=13)
    _name_another_environment(copied, RUN, OTHER[0], other[0])
    (known,) = read_ledger(copied / "sweep").of("environment")
    LedgerWriter(copied / "sweep").add_environment(known.content["environment"] | {"jax": "0.0.1"})
    claim_anew(copied)
    checked = _check(copied, segments=0, measured=7)
    text = " ".join(claim_sentences(checked))
    assert not checked.refuted and not checked.alike and not checked.verified
    (tolerance,) = checked.tolerances
    assert tolerance.median == 0 and len(tolerance.measured) == 7
    assert "The runs name environments that differ in jax." in text
    assert "more than the tolerance allows" in text and "It agrees" not in text


def test_the_distance_of_states_is_that_of_their_fields(tmp_path):
    def saved(name: str, params: Sequence[float], step: int = 3) -> Path:
        tree = {"params": {"a": np.float32(params)}, "step": np.int32(step)}
        with Checkpoints(tmp_path / name) as checkpoints:
            checkpoints.save(1, jax.tree.map(jax.numpy.asarray, tree))
        return tmp_path / name

    one = saved("one", [3.0, 4.0])
    assert distances(one, 1, saved("same", [3.0, 4.0])) == {}
    assert distances(one, 1, saved("near", [3.0, 4.5])) == {
        "params": pytest.approx(0.5 / np.hypot(3, 4.5))
    }
    assert distances(one, 1, saved("later", [3.0, 4.0], 4)) == {"step": np.inf}
    assert distances(saved("zero", [0.0, 1.0]), 1, saved("minus", [-0.0, 1.0]))["params"] > 0
    assert distances(one, 1, saved("nan", [3.0, np.nan])) == {"params": np.inf}
