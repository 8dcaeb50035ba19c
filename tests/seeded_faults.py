"""Plants forty faults one at a time and sees which tests find them: `make seeded_faults`.

A fault is a mistake in the code of the product, most of them one that a commit of the history
mended. Each is planted in a copy of the checkout, and tests run until one fails: the short ones of
its room, the other short ones, the whole suite in its room, the whole suite. A test counts only if
it passes when the fault is taken out again. At the end a table says what found each fault; the exit
code is 1 if the short suite finds fewer than 38 of them, or the whole one fewer than 40.

It takes half an hour on two cores if the short suite finds all of them, and twenty minutes more for
each that it misses. `--only TEXT` takes faults whose names contain a text, `--from N` goes on with
the N-th, and `--clean` first runs the short suite without a fault.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import compiled_programs
from tests.house_measures import ROOT, git

# This table's own tests find every fault, as the text that one replaces is then missing.
OWN_TESTS = "tests/house/test_seeded_faults.py"
OPTIONS = (
    *("-n", "auto", "--dist=loadfile", "-x", "-q", "--color=no"),
    *("-p", "no:cacheprovider", f"--ignore={OWN_TESTS}"),
    *("-o", "timeout=300"),  # a fault may make tests hang
)
# Seconds for the short suite, or a part of it; the whole suite has twice as many.
LIMIT = 30 * 60
# How many of the forty the short suite has to find.
ENOUGH = 38

# What found a fault.
IN_ROOM = "short suite in its room"
ELSEWHERE = "short suite elsewhere"
WHOLE = "whole suite only"
NOT_FOUND = "not found"
ERROR = "no answer"
HANG = "the tests hang"

# The rooms of the tests of what stands beside the packages of trainer/.
_BESIDE = {"losses.py": "models", "metrics.py": "models"}
# "FAILED tests/a/test_b.py::test_c[d - e] - AssertionError: f", and "ERROR tests/a/test_b.py".
_FAILED = re.compile(
    r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\[]+?(?:\[.*?\])?)?)(?: - .*)?$", re.MULTILINE
)


@dataclass(frozen=True)
class Fault:
    """A mistake, as a replacement of text in one file.

    Args:
        name: what goes wrong.
        file: the path of the file in the repository.
        old: what is replaced; it occurs once.
        new: the mistake.
        origin: the commit that mended this mistake; "" for one that nobody is known to have made.
    """

    name: str
    file: str
    old: str
    new: str
    origin: str = ""

    @property
    def product(self) -> str:
        """The package that has the file, such as "trainer/data", or the file if it is in none."""
        first, *rest = self.file.split("/")
        return f"{first}/{rest[0]}" if first == "trainer" else first

    @property
    def room(self) -> str:
        """The folder of tests/ that has the tests of the file: "data"."""
        name = self.product.rpartition("/")[2]
        return _BESIDE.get(name, name)

    def planted(self, text: str) -> str:
        """Returns the text of the file with the mistake.

        Raises:
            ValueError: what is replaced does not occur, or several times.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.file} has the text that the fault {self.name!r} replaces {count} times."
            )
        return text.replace(self.old, self.new)


FAULTS = (
    # optim
    Fault(
        "gradients are clipped by the norm of each group instead of all groups",
        "optim/bound.py",
        "            given = {path: clipped[path] for path in group_params}\n",
        """\
            given = {path: grads[path] for path in group_params}
            if self.clip_norm is not None:
                given = clip(given, self.clip_norm, step)
""",
    ),
    Fault(
        "schedules are read one step ahead",
        "optim/bound.py",
        "        step = old.step\n",
        "        step = old.step + 1\n",
        "49c652f",
    ),
    Fault(
        "the moments of bfloat16 parameters are kept in bfloat16",
        "optim/bound.py",
        "            for name, group_params in self.split(widen(trainable)).items():\n",
        "            for name, group_params in self.split(trainable).items():\n",
    ),
    Fault(
        "a group of optim.frozen() that was called counts in the norm",
        # In Python, frozen() may be called; in a config, it is not.
        "optim/groups.py",
        "        return recipe or self.optimizer is _FROZEN\n",
        "        return recipe\n",
        "dde8675",
    ),
    # optim/parts
    Fault(
        "the radial brake exchanges outward and inward",
        # Before the learning rate, an update against the weights makes them longer.
        "optim/parts/lengths.py",
        "        factor = jnp.where(share < 0, scalar(outward, u), scalar(inward, u))\n",
        "        factor = jnp.where(share > 0, scalar(outward, u), scalar(inward, u))\n",
        "947e8d3",
    ),
    Fault(
        "SOAP's mean is rotated the wrong way when the bases change",
        "optim/parts/soap.py",
        "            means = [turn(turn_back(mean, old), new) for mean in own[:-1]]\n",
        "            means = [turn(turn_back(mean, new), old) for mean in own[:-1]]\n",
        "0409d0a",
    ),
    # trainer/config
    Fault(
        "epochs, examples and tokens are rounded down to steps",
        "trainer/config/units.py",
        "        return math.ceil(examples / batch)\n",
        "        return math.floor(examples / batch)\n",
        "8d952b4",
    ),
    Fault(
        "a mistake in a block of YAML is named at the line after it",
        # A block ends where the next line begins.
        "trainer/config/yaml_reader.py",
        "bisect.bisect_left(self._ends, node.start_mark.index)",
        "bisect.bisect_left(self._ends, node.end_mark.index)",
        "63243d8",
    ),
    Fault(
        "a binding of an outer Gin scope overrides the inner one",
        # Of two bindings, the one that is read last holds.
        "trainer/config/gin_reader.py",
        "        for length in range(len(scope) + 1):\n",
        "        for length in reversed(range(len(scope) + 1)):\n",
    ),
    # trainer/models
    Fault(
        "the gradients of an embedding are added in bfloat16",
        # jax adds the gradients of equal tokens in the dtype of what it takes: ones end at 256.
        "trainer/models/gpt.py",
        "        x = jnp.take(widen(embedding), tokens, axis=0).astype(dtype or embedding.dtype)\n",
        "        x = widen(jnp.take(embedding, tokens, axis=0)).astype(dtype or embedding.dtype)\n",
        "6f73b2f",
    ),
    Fault(
        "the gradient of attention's queries lacks the scale on a CPU",
        "trainer/models/attention.py",
        "    by_query = jnp.concatenate(by_queries, axis=2).swapaxes(1, 2) * scale\n",
        "    by_query = jnp.concatenate(by_queries, axis=2).swapaxes(1, 2)\n",
        "178cc8d",
    ),
    # trainer/data
    Fault(
        "padding of the last evaluation batch counts",
        "trainer/data/arrays.py",
        "            mask = real.astype(np.float32)\n",
        "            mask = np.ones(len(indices), np.float32)\n",
    ),
    Fault(
        "a resumed run begins at a multiple of the batches that are gathered together",
        "trainer/data/arrays.py",
        "        for index in itertools.count(batch_index, many):\n",
        "        for index in itertools.count(batch_index - batch_index % many, many):\n",
        "e1f20bb",
    ),
    Fault(
        "a shard of tokens that is overwritten while it is open goes unnoticed",
        # Its size and times are compared after each read.
        "trainer/data/shards.py",
        "            self._check(index, os.fstat(file.number))\n",
        "            pass\n",
        "3657dfb",
    ),
    # trainer/losses.py
    Fault(
        "Huber's loss has slope 1 instead of delta",
        "trainer/losses.py",
        "        return over_features(0.5 * quadratic * quadratic + delta * (error - quadratic))\n",
        "        return over_features(0.5 * quadratic * quadratic + (error - quadratic))\n",
    ),
    # trainer/metrics.py
    Fault(
        "equal outputs count as correct in top_k_accuracy",
        # All outputs of a model that collapsed are equal.
        "trainer/metrics.py",
        "        behind = (outputs < at_label) | ((outputs == at_label) & not_before)\n",
        "        behind = outputs <= at_label\n",
    ),
    # trainer/engine
    Fault(
        "the moving average is of the trained parameters, not of those evaluated",
        # They differ in schedule-free optimizers and with a lookahead.
        "trainer/engine/step.py",
        "experiment.ema_decay, optimizer.eval_params(opt_state, params)\n",
        "experiment.ema_decay, params\n",
        "dde8675",
    ),
    Fault(
        "every step draws the same random numbers",
        "trainer/engine/step.py",
        '    key = jax.random.fold_in(jax.random.key(state.run_state["seed"]), state.step + 1)\n',
        '    key = jax.random.key(state.run_state["seed"])\n',
    ),
    Fault(
        "a mapping of precision computes in float32 where it names bfloat16 parameters only",
        "trainer/engine/precision.py",
        '    compute = given["compute"] or parameters\n',
        '    compute = given["compute"] or "float32"\n',
        "3f183e3",
    ),
    Fault(
        "data that change far behind the first batch go unnoticed",
        # The data of a resumed run are hashed in two places.
        "trainer/engine/datasets.py",
        "    parts.append(digest_batch(read_batch(data, _far(data))))\n",
        "",
        "2d130cd",
    ),
    # trainer/checkpoint
    Fault(
        "the hash of a manifest is not compared",
        "trainer/checkpoint/integrity.py",
        """\
    body = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    if hashlib.sha256(body.encode()).hexdigest() != outer.get("sha256"):
        raise ValueError("it does not have the hash that it states")
""",
        "",
        "6f10188",
    ),
    Fault(
        "a checkpoint gets its name before its files are synced",
        # After a loss of power, its files may be empty.
        "trainer/checkpoint/folder.py",
        """\
        before()
        sync_tree(temporary)
        # As late as possible: another process may take the workdir over while the files are synced.
        fence()
        temporary.rename(self.path / str(step))
""",
        """\
        before()
        fence()
        temporary.rename(self.path / str(step))
        sync_tree(self.path / str(step))
""",
        "12d9a45",
    ),
    Fault(
        "a restore takes leaves whose checksums differ",
        "trainer/checkpoint/reading.py",
        """\
    _raise_if_damaged(integrity.verify(manifest, arrays))
    for name""",
        "    for name",
        "f68ab6a",
    ),
    # trainer/workdir
    Fault(
        "changed data of a resumed run are only logged",
        # A change of what the table has is an error, and all else a line of the log.
        "trainer/workdir/fingerprint.py",
        '"batch_size", "data", "processes")',
        '"batch_size", "processes")',
        "2d130cd",
    ),
    Fault(
        "the hash of the user's code is that of the file at the time of the question",
        "trainer/workdir/code.py",
        """\
    if module not in _sources:
        if (file := _file(name)) is None:
            return None
""",
        """\
    if module in sys.modules.values():
        if (file := _file(name)) is None:
            return _sources.get(module)
""",
        "626b639",
    ),
    # trainer/writers
    Fault(
        "the row of the restored step is dropped",
        "trainer/writers/lines.py",
        '        return row is not None and row["step"] <= step\n',
        '        return row is not None and row["step"] < step\n',
    ),
    # trainer/train
    Fault(
        "a resumed run reads the data from the beginning",
        "trainer/train/loop.py",
        """\
        self._prefetcher.start(self.program.feed.batches(step + self._counters.skipped_batches))
""",
        """\
        self._prefetcher.start(self.program.feed.batches(self._counters.skipped_batches))
""",
    ),
    Fault(
        "a run with lost rows of metrics ends with exit code 0",
        "trainer/train/rows.py",
        "        if ended.code != DONE or not lost:\n",
        "        if ended.code == DONE or not lost:\n",
        "7b4cdbf",
    ),
    Fault(
        "a state is saved ahead of metrics that could not be written",
        # A run that resumes there never writes them.
        "trainer/train/loop.py",
        """\
            if self._all_written():
                self._checkpoints.save(step, to_save(state), metric=metric)
""",
        """\
            self._all_written()
            self._checkpoints.save(step, to_save(state), metric=metric)
""",
        "677335f",
    ),
    Fault(
        "fresh parameters of a warm start have the other run's first values",
        "trainer/train/warm_start.py",
        "        state = program.init(warm_starts=self.number)\n",
        "        state = program.init()\n",
        "cb87916",
    ),
    # trainer/diagnose
    Fault(
        "replay takes the batch of a step without counting skipped ones",
        # Only after a rollback are there any.
        "trainer/diagnose/replay.py",
        "program.feed.batch(at + counters_of(state.run_state).skipped_batches)",
        "program.feed.batch(at)",
        "6ed4bd7",
    ),
    # trainer/sweep
    Fault(
        "a diverged point is ranked first where larger values are better",
        # The sign is -1 where larger values are better, and the smallest product comes first.
        "trainer/sweep/final.py",
        "            seeds = [sign * math.inf if value is None else value for value in values]\n",
        "            seeds = [math.inf if value is None else value for value in values]\n",
    ),
    Fault(
        "a wave is claimed although another worker holds its lock",
        "trainer/sweep/folder.py",
        """\
            taken = self.presence.take(file.stem, stream.fileno())
            if not (taken and os.fstat(stream.fileno()).st_nlink > 0):
""",
        """\
            self.presence.take(file.stem, stream.fileno())
            if os.fstat(stream.fileno()).st_nlink == 0:
""",
        "41137f3",
    ),
    Fault(
        "a trial counts as failed after its first error",
        "trainer/sweep/folder.py",
        "        return count >= MOST_ERRORS\n",
        "        return count > 0\n",
        "80bff4a",
    ),
    Fault(
        "a line removed from the ledger is not found",
        "trainer/sweep/ledger.py",
        '        if content["before"] != head and not damage:\n',
        "        if False:\n",
        "b9e665e",
    ),
    # trainer/report
    Fault(
        "the p value is not multiplied by the number of comparisons",
        "trainer/report/statistics/decide.py",
        "        p = np.fmin(p, np.minimum(1.0, p_now * m * LEVEL / level))\n",
        "        p = np.fmin(p, np.minimum(1.0, p_now * LEVEL / level))\n",
    ),
    Fault(
        "runs on which the winners were selected are tested",
        "trainer/report/pairs.py",
        "    if again and workload.goal.report_on == workload.goal.select_on:\n",
        "    if False:\n",
    ),
    # trainer/studies
    Fault(
        "a claim is verified with another ledger",
        "trainer/studies/claim.py",
        "    if made.ledger != claim.ledger:\n",
        "    if False:\n",
        "6921991",
    ),
    # trainer/cli
    Fault(
        "config --unused does not say where a binding is written",
        "trainer/cli/commands.py",
        '            show(f"{each.source}: {each.binding}. {each.why}")\n',
        '            show(f"{each.binding}. {each.why}")\n',
    ),
    # lockstep
    Fault(
        "RunFailed has the last line of stderr instead of the error",
        "lockstep/processes.py",
        """\
    starts = [number for number, line in enumerate(said) if line.startswith("error: ")]
    message = "".join(said[starts[-1] :]).removeprefix("error: ") if starts else ""
    last = message.strip() or (said[-1].strip() if said else "")
""",
        '    last = said[-1].strip().removeprefix("error: ") if said else ""\n',
        "4c9cb80",
    ),
)


@dataclass(frozen=True)
class Found:
    """What found a fault.

    Args:
        fault: the fault.
        where: the tests that did, such as `IN_ROOM`; `NOT_FOUND`, or `ERROR` if that is not known.
        test: the first test that failed; of `ERROR`, a sentence.
        seconds: that it took.
    """

    fault: Fault
    where: str
    test: str
    seconds: float

    @property
    def short(self) -> bool:
        """Whether the short suite finds it."""
        return self.where in (IN_ROOM, ELSEWHERE)

    @property
    def whole(self) -> bool:
        """Whether the whole suite finds it."""
        return self.short or self.where == WHOLE


class NoAnswerError(Exception):
    """Tests ended in a way that does not say whether one of them failed."""


def find(tree: Path, fault: Fault, options: Sequence[str] = OPTIONS, limit: float = LIMIT) -> Found:
    """Plants a fault, runs tests until one fails, and puts the file back.

    Args:
        tree: a copy of the checkout.
        fault: the fault.
        options: of pytest.
        limit: seconds for the short suite or a part of it.
    """
    start = time.monotonic()
    where, test = NOT_FOUND, ""
    try:
        with _planted(tree, fault):
            for place, words, seconds in _stages(tree, fault, limit):
                if test := failing(tree, [*options, *words], seconds):
                    where = place
                    break
        # A test that fails at any time, or in every copy, has found nothing.
        if test not in ("", HANG) and failing(tree, [*options, test], limit):
            raise NoAnswerError(f"{test} fails without the fault, too.")
    except NoAnswerError as e:
        where, test = ERROR, str(e)
    return Found(fault, where, test, time.monotonic() - start)


def _stages(tree: Path, fault: Fault, limit: float) -> Iterator[tuple[str, list[str], float]]:
    """Yields what may find a fault, with words for pytest and the seconds that it has."""
    room = [name for name in (f"tests/{fault.room}", fault.product) if (tree / name).exists()]
    others = [f"--ignore={name}" for name in room]
    yield IN_ROOM, [*room, "-m", "not long"], limit
    yield ELSEWHERE, [*others, "-m", "not long"], limit
    # Not only what is marked as long: property tests now draw all of their examples.
    yield WHOLE, room, 2 * limit
    yield WHOLE, others, 2 * limit


@contextlib.contextmanager
def _planted(tree: Path, fault: Fault) -> Iterator[None]:
    file = tree / fault.file
    text = file.read_text(encoding="utf-8")
    _write(file, fault.planted(text))
    try:
        yield
    finally:
        _write(file, text)
        # With the next fault, property tests would begin with the examples that failed with this.
        shutil.rmtree(tree / ".hypothesis", ignore_errors=True)


def _write(file: Path, text: str) -> None:
    """Writes a source file, and removes its bytecode.

    Python takes bytecode for that of a file of the same length and the same second.
    """
    file.write_text(text, encoding="utf-8")
    for compiled in Path(importlib.util.cache_from_source(file)).parent.glob(f"{file.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def failing(tree: Path, words: Sequence[str], limit: float) -> str:
    """Runs pytest, and returns the first test that fails; "" if all pass or none is chosen.

    Args:
        tree: the root of the code, in which it runs.
        words: what follows `python -m pytest`.
        limit: the seconds after which it is killed, and `HANG` is returned.

    Raises:
        NoAnswerError: pytest ended otherwise, such as with an error of its own.
    """
    code, output = _pytest(tree, words, limit)
    if code in (0, 5):
        return ""
    if code is None:
        return HANG
    # With several processes, -x interrupts: the code is that of Ctrl-C and of files that cannot be
    # imported.
    if code in (1, 2) and (test := first_failure(output)):
        return test
    last = output.strip()[-500:]
    raise NoAnswerError(f"pytest ended with exit code {code} and names no test that failed: {last}")


def first_failure(output: str) -> str:
    """Returns the first test, or file of tests, that pytest's summary names; "" without one."""
    found = _FAILED.search(output.rpartition(" short test summary info ")[2])
    return found[1] if found else ""


def _pytest(tree: Path, words: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Runs pytest; returns its exit code, None if it was killed, and what it printed."""
    # A file: processes that tests leave behind would hold a pipe open.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *words],
            cwd=tree,
            env=environment(tree),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        code = None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()


def environment(tree: Path) -> dict[str, str]:
    """Returns the environment of tests of a tree.

    PYTHONPATH comes before the folder that an editable install of the checkout adds, also in the
    processes that tests start. Compiled programs are shared with the checkout.
    """
    compiled = str(compiled_programs.folder().parent)
    # Bytecode of the copy halves the time in which tests are collected; `_write` keeps it true.
    own = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
    return os.environ | {"LOCKSTEP_COMPILED": compiled} | own


@contextlib.contextmanager
def copied(root: Path = ROOT) -> Iterator[Path]:
    """Yields a copy of a checkout, as a repository with one commit; removes it at the end.

    Args:
        root: of the checkout, of which all files are copied that git does not ignore.
    """
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder).resolve() / "checkout"
        for name in git("ls-files", "-z", "--cached", "--others", "--exclude-standard", root=root):
            if (root / name).is_file() or (root / name).is_symlink():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, tree / name, follow_symlinks=False)
        if (shared := root.parent / "shared").exists():  # what some tests read, if it is there
            (tree.parent / "shared").symlink_to(shared)
        identity = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgSign=false")
        git("init", "-q", root=tree)
        git("add", "--force", "--all", root=tree)
        git(*identity, "commit", "-q", "--no-verify", "-m", "A copy", root=tree)
        yield tree


def table(results: Iterable[Found]) -> str:
    """Returns the Markdown table of what found each fault."""
    rows = ["| fault | file | found by | the test | seconds |", "| --- | --- | --- | --- | ---: |"]
    for found in results:
        test = found.test.replace("|", "\\|").replace("\n", " ")
        shown = f"`{test}`" if ".py" in test and found.where != ERROR else test
        rows.append(
            f"| {found.fault.name} | `{found.fault.file}` | {found.where} | {shown} "
            f"| {found.seconds:.0f} |"
        )
    return "\n".join(rows)


def main() -> int:
    """Prints a line when a fault is done, and the table; returns 1 if too few are found."""
    parser = argparse.ArgumentParser(prog="python -m tests.seeded_faults", allow_abbrev=False)
    parser.add_argument("--only", metavar="TEXT", default="", help="in the names of the faults")
    parser.add_argument("--from", metavar="N", type=int, default=1, dest="first", help="from 1")
    parser.add_argument("--clean", action="store_true", help="first run them without a fault")
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS[max(given.first, 1) - 1 :] if given.only in fault.name]
    if not chosen:
        parser.error("no fault is chosen: " + "; ".join(fault.name for fault in FAULTS))
    results = []
    with copied() as tree:
        for fault in chosen:  # so that none is found to be out of date after an hour
            fault.planted((tree / fault.file).read_text(encoding="utf-8"))
        if given.clean and (test := failing(tree, [*OPTIONS, "-m", "not long"], LIMIT)):
            print(f"The short suite fails without a fault: {test}")
            return 1
        for fault in chosen:
            found = find(tree, fault)
            results.append(found)
            print(
                f"{FAULTS.index(fault) + 1:2} {fault.name}: {found.where}, "
                f"{found.seconds:.0f} s. {found.test}",
                flush=True,
            )
    print(f"\n{table(results)}\n")
    short, whole = sum(x.short for x in results), sum(x.whole for x in results)
    count = len(results)
    print(f"The short suite found {short} of {count}, the whole suite {whole} of {count}.")
    return int(count == len(FAULTS) and (short < ENOUGH or whole < count))


if __name__ == "__main__":
    sys.exit(main())
