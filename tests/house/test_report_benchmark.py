"""The benchmark of the report measures that of a whole sweep, as its command would find it."""

import pytest

from benchmarks.report import make_sweep
from trainer.report.sweep_results import read_sweep_results


@pytest.mark.long
def test_its_sweep_is_whole_and_is_judged(tmp_path):
    workload = read_sweep_results(make_sweep(tmp_path, trials=32, rows=5, examples=20))
    assert (len(workload.trials), len(workload.finals)) == (32, 16)
    assert not workload.faults and not workload.missing
