"""What the user asks of Slurm: the settings of a file and of the command line."""

import argparse
from pathlib import Path

import pytest

from trainer.cli import options
from trainer.cli.sweeps import launcher_settings
from trainer.messages import UserError
from trainer.sweep.slurm import SlurmSettings, read_slurm_settings


def test_flags_override_the_file_of_settings(tmp_path: Path) -> None:
    file = tmp_path / "slurm.yaml"
    file.write_text(
        "partition: low\ntime: 12:30:00\ncpus-per-task: 4\nexclusive: true\nrequeue_hint: false\n"
        "setup: |\n  module load cuda\n  . venv/bin/activate\n"
    )
    assert read_slurm_settings(str(file), ["partition=a=b", "cpus_per_task=8", "warning=60"]) == (
        SlurmSettings(
            {"partition": "a=b", "time": "12:30:00", "cpus-per-task": "8", "exclusive": ""},
            "module load cuda\n. venv/bin/activate\n",
            60,
        )
    )
    assert read_slurm_settings(str(file), ["exclusive=false"]).options.get("exclusive") is None
    file.write_text("setup: [module load cuda, set -e]")
    assert read_slurm_settings(str(file)).setup == "module load cuda\nset -e"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("partition", "--slurm partition: A setting is KEY=VALUE, such as partition=gpu."),
        ("--mem=8G", "'--mem' is not a setting: write a long option of sbatch without its dashes"),
        ("p=low", "'p' is not a setting"),
        ("array=0-3", "array cannot be set: --workers says how many workers are started."),
        ("open_mode=truncate", "open-mode cannot be set: the logs are in the sweep's folder"),
        ("no-requeue=true", "no-requeue cannot be set"),
        ("signal=TERM@60", "signal cannot be set: write warning=SECONDS"),
        ("account=", "The value of account must be one line of text, got ''; for an option that"),
        ("comment=a\nb", "must be one line of text"),
        ("warning=1m", "It is a number of seconds from 1 to 65535, got '1m'."),
        ("time=3", "A worker is asked to save 120 s before its time limit, or up to 60 s earlier,"),
        ("time=0:02:59", "and the limit is 179 s, so that it would get nothing done"),
    ],
)
def test_a_wrong_setting_is_refused(setting: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read_slurm_settings(None, [setting])
    assert message in str(error.value)


@pytest.mark.parametrize("time", ["4", "3:01", "0-1", "1-0:00:00", "0", "infinite"])
def test_a_time_limit_that_leaves_time_to_work_is_accepted(time: str) -> None:
    assert read_slurm_settings(None, [f"time={time}"]).options == {"time": time}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]", "s.yaml:1: This must be a mapping, such as partition: gpu."),
        ("partition: low\ngres: [a]", "s.yaml:2: The value of gres must be a string or a number"),
        ("mem: 1\narray: 2", "s.yaml:2: array cannot be set"),
        ("cpus-per-task: 1\ncpus_per_task: 2", "s.yaml:2: cpus_per_task is given twice."),
    ],
)
def test_a_mistake_in_the_file_of_settings_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        read_slurm_settings("s.yaml")
    assert str(error.value).startswith(message)


def _parse(*words: str) -> argparse.Namespace:
    return options.parser().parse_args(["sweep", "--config=sweep.yaml", *words])


def test_settings_are_read_for_the_launcher_slurm_only(tmp_path: Path) -> None:
    assert launcher_settings(_parse("--workers=3")) is None
    settings = launcher_settings(
        _parse("--launcher=slurm", "--slurm", "mem=8G", "--slurm", "qos=a")
    )
    assert settings == SlurmSettings({"mem": "8G", "qos": "a"})
    for words in (["--slurm", "mem=8G"], [f"--slurm_file={tmp_path}"], ["--slurm_file="]):
        with pytest.raises(UserError, match="--launcher=slurm only"):
            launcher_settings(_parse(*words))


def test_settings_are_read_for_the_launcher_ray_only(tmp_path: Path) -> None:
    for words in (["--ray", "num_gpus=1"], [f"--ray_file={tmp_path}"], ["--ray_file="]):
        with pytest.raises(UserError, match="--launcher=ray only"):
            launcher_settings(_parse(*words))


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5", ""])
def test_a_number_of_workers_is_at_least_one(
    capsys: pytest.CaptureFixture[str], number: str
) -> None:
    with pytest.raises(SystemExit) as error:
        _parse(f"--workers={number}")
    assert error.value.code == 2
    assert f"'{number}' is not a number of workers" in capsys.readouterr().err
