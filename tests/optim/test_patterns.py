"""Patterns are compared as `re` does, and those that take exponential time are given up."""

import re
import signal
import threading

import pytest

from optim.paths import SlowPattern, fullmatch, occurs

PATH = "blocks/attention/out_projection/kernel"
SLOW = [r"(([a-z_/]*)*)*X", r"(a|b|[^X])*Y(.*)*X|([a-z_/]+)+X", r"(?:.*){12}X", r"(\w*/?)*\d"]


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    handler = signal.getsignal(signal.SIGVTALRM)
    yield
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) is handler


@pytest.mark.parametrize("pattern", SLOW)
def test_a_pattern_that_takes_exponential_time_is_refused(pattern, monkeypatch):
    monkeypatch.setattr("optim.paths._SECONDS", 0.1)
    with pytest.raises(SlowPattern, match="takes too long") as caught:
        fullmatch(re.compile(pattern), PATH)
    assert pattern in str(caught.value).replace(r"\\", "\\") and PATH in str(caught.value)
    assert not occurs(re.compile(pattern), PATH)


@pytest.mark.parametrize("pattern", [".*", "blocks/.*", "(?P<x>b).*/kernel", "kernel", "bl", ""])
def test_other_patterns_match_as_in_pythons_re(pattern):
    compiled = re.compile(pattern)
    match, wanted = fullmatch(compiled, PATH), compiled.fullmatch(PATH)
    assert (match and match.groups()) == (wanted and wanted.groups())
    assert occurs(compiled, PATH) == bool(compiled.search(PATH))


def test_other_threads_and_other_timers_are_left_alone():
    found = []
    thread = threading.Thread(target=lambda: found.append(fullmatch(re.compile(".*"), PATH)))
    thread.start()
    thread.join()
    assert found[0]
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000)
    try:
        assert fullmatch(re.compile(".*"), PATH)
        assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
