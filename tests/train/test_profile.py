"""The option --profile: which steps it takes, what it prints, and that it changes no bit."""

import os
import re
import types
from pathlib import Path
from typing import Any

import jax
import pytest

from tests import runs, short
from trainer.messages import UserError
from trainer.train import profile as profile_module
from trainer.train.profile import Operation, Profile, _own_seconds, readable

TABLE = re.compile(r" *([0-9.]+)% +([0-9.]+) ms a step  (\S.*)")

# Of jax.profiler with Python 3.12 and 3.13, whose C++ aborts the process if it is an error.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")


@pytest.fixture(autouse=True)
def _lab(monkeypatch):
    monkeypatch.syspath_prepend(str(runs.LAB))


@pytest.fixture
def config(tmp_path):
    return runs.write_config(tmp_path)


@short.parametrize("more", [[], ["--set=steps_per_call=1"]])
def test_a_profile_names_the_costliest_operations_and_changes_no_bit(
    tmp_path, config, capsys, more
):
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    assert runs.train(config, plain, *more, "--trace") == 0
    capsys.readouterr()
    assert runs.train(config, profiled, *more, "--trace", "--profile=8-14") == 0
    printed = capsys.readouterr().err
    assert f"The steps 8 to 14 are profiled in {profiled / 'profile'}." in printed
    table = [TABLE.fullmatch(line) for line in printed.splitlines()]
    found = [(float(row[1]), float(row[2]), row[3]) for row in table if row]
    shares = [share for share, _, _ in found]
    assert len(found) == 10 and shares == sorted(shares, reverse=True) and sum(shares) <= 100.1
    assert any(name.startswith(("forward ", "backward ")) for _, _, name in found)
    assert len(list((profiled / "profile").glob("plugins/profile/*/*.xplane.pb"))) == 1
    assert os.stat(profiled / "profile").st_mode & 0o777 == 0o700
    assert runs.lines(profiled) == runs.lines(plain)
    assert (profiled / "trace.jsonl").read_bytes() == (plain / "trace.jsonl").read_bytes()
    # A resumed run does not compute these steps again.
    assert (
        runs.train(
            config,
            profiled,
            "--set=steps=40",
            "--allow_changed=config",
            "--allow_changed=steps",
            "--profile=8-14",
        )
        == 2
    )
    assert "the run makes the steps 21 to 40. Name some of these" in capsys.readouterr().err


@pytest.mark.long
def test_a_number_of_steps_comes_after_the_warm_up_in_whole_blocks(tmp_path, config, capsys):
    assert runs.train(config, tmp_path / "run", "--profile=2") == 0
    assert "The steps 11 to 12 are profiled" in capsys.readouterr().err
    assert runs.train(config, tmp_path / "long", "--profile=18-18") == 0
    assert "The steps 17 to 18 are profiled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "before", "end", "message"),
    [
        ((100, 21), 0, 100, "for the steps 100 to 120, but the run makes the steps 1 to 100. Name"),
        (
            (None, 20),
            0,
            25,
            "the steps 11 to 30, 20 after the first 10, but the run makes the steps",
        ),
        ((None, 20), 50, 60, "--profile=51-60."),
        ((5, 2), 5, 60, "the steps 5 to 6, but the run makes the steps 6 to 60."),
        ((5, 2), 60, 60, "but the run has made its 60 steps. Leave it out."),
    ],
)
def test_steps_that_the_run_does_not_make_are_refused(steps, before, end, message):
    with pytest.raises(UserError) as caught:
        Profile(steps, print).choose_steps(before, end)
    assert message in str(caught.value)


@pytest.mark.long
def test_steps_beyond_the_run_leave_no_folder(tmp_path, config, capsys):
    assert runs.train(config, tmp_path / "run", "--profile=15-21") == 2
    assert runs.train(config, tmp_path / "run", "--profile=15-20", "--until=16") == 2
    for wrong in ("0", "ten", "20-10", "1-2-3", "-5", ""):
        with pytest.raises(SystemExit) as caught:
            runs.train(config, tmp_path / "run", f"--profile={wrong}")
        assert caught.value.code == 2
        assert (
            f"{wrong!r} names no steps; write their number, such as 20" in capsys.readouterr().err
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_run_that_stops_in_its_profile_says_so(tmp_path, config, capsys):
    more = "experiment.data = @unruly.raising()\nunruly.raising.seed = 0\nunruly.raising.at = 12\n"
    failing = Path(runs.write_config(tmp_path, more))
    one = ["--profile=8-20", "--set=steps_per_call=1"]
    assert runs.train(failing, tmp_path / "run", *one) == 1
    said = capsys.readouterr().err
    assert "The run ended before the profile in" in said and "cannot be read" in said
    assert runs.train(failing, tmp_path / "other", "--profile=2-4") == 1  # another can begin
    assert "are profiled in" in capsys.readouterr().err


def test_a_step_that_a_rollback_repeats_counts_as_often_as_it_is_computed(tmp_path, monkeypatch):
    began, ended, lines = [], [], []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: began.append(1))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: ended.append(1))
    operation = Operation("mul", 1.0, 24.0)
    monkeypatch.setattr(profile_module, "costliest", lambda *_: [operation])
    program: Any = types.SimpleNamespace(
        advance=lambda state, batches: state, compiled=types.SimpleNamespace(as_text=lambda: "")
    )
    profile = Profile((8, 7), lines.append)
    profile.choose_steps(0, 20)
    advance = profile.profiled(program, 0, tmp_path / "profile", print)
    for _ in range(6):  # the steps 1 to 12
        advance(0, [{}] * 2)
    advance = profile.profiled(program, 4, tmp_path / "profile", print)  # after a rollback
    for _ in range(5):  # the steps 5 to 14
        advance(0, [{}] * 2)
    profile.close()
    assert began == ended == [1]
    # 7 to 12 and 5 to 14: 16 steps in 24 s
    assert lines[0].startswith("The steps 5 to 14 are profiled in") and len(lines) == 2
    assert lines[1].split() == ["100.0%", "1500.000", "ms", "a", "step", "mul"]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "jit(step)/jvp(Vit)/while/body/closed_call/blocks.<lambda>/blocks/mlp/up/dot_general",
            "forward blocks/mlp/up/dot_general",
        ),
        (
            "jit(step)/transpose(jvp(Gpt))/while/body/checkpoint/rematted_computation/blocks/mul",
            "recomputed blocks/mul",
        ),
        ("jit(step)/jvp(Vit)/while/body/blocks.step/blocks/attn/exp", "forward blocks/attn/exp"),
        ("jit(step)/jvp(Vit)/while/body/eval_jaxpr/blocks/attn/exp", "forward blocks/attn/exp"),
        ("jit(step)/optimizer/matrices/while/body/dot_general", "optimizer/matrices/dot_general"),
        ("jit(step)/jit(_where)/select_n", "_where/select_n"),
        ("reduce_sum", "reduce_sum"),
        ("", ""),
    ],
)
def test_names_of_operations_are_readable(name, short):
    assert readable(name) == short


def test_the_time_of_an_operation_is_without_those_inside_of_it():
    class Event:
        def __init__(self, start, duration, name, module="jit_step"):
            self.start_ns, self.duration_ns, self.name = start, duration, name
            self.stats = {"hlo_op": name, "hlo_module": module}.items() if name else ()

    class Line:
        name = "a thread"
        events = (
            Event(0, 100, "call.1"),
            Event(10, 30, "dot.2"),
            Event(15, 5, "copy.3"),
            Event(50, 50, "dot.4"),
            Event(60, 10, "dot.9", "jit_evaluate"),
            Event(100, 7, "add.5"),
            Event(0, 1000, None),
        )

    found = {name: round(seconds * 1e9) for name, seconds in _own_seconds(Line(), "jit_step")}
    assert found == {"call.1": 20, "dot.2": 25, "copy.3": 5, "dot.4": 50, "add.5": 7}
