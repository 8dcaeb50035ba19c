"""The pages: what they quote of the code is what it says, and every block of code runs.

A block runs in a folder that has configs/ and experiments/ of the repository, after the blocks
before it on its page; CONTRIBUTING.md says how. A block that cannot run has a line before it that
says why: `<!-- not run: needs a GPU -->`.
"""

import functools
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import reference_pages, runs, short
from tests.runs import ROOT
from trainer import config as configs
from trainer.__main__ import main
from trainer.cli import options, resolving
from trainer.config.vocabulary import RUN, SWEEP
from trainer.engine.plan import make_plan

PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
SHOWN = ("json", "latex", "mermaid", "text")  # and directives, such as {note}
MARK = re.compile(r"<!-- not run: (?P<why>\w.*) -->")


# The costs of all optimizers take 17 seconds; tests/cli/test_optimizers.py looks at them, too.
_PARTS = [
    pytest.param(*part, marks=[pytest.mark.long] if part[1] == "optimizers" else [])
    for part in reference_pages.parts()
]


# optax itself warns about optimistic_adam, and about the seed of dpsgd.
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("page", "name"), _PARTS, ids=lambda x: x)
def test_a_page_has_what_the_code_says(page: str, name: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    begin, end = reference_pages.bounds(text, name)
    wanted = reference_pages.parts()[page, name]()
    assert text[begin:end] == wanted, "Run `python -m tests.reference_pages`, which writes it."


def test_the_readme_is_short_and_leads_to_the_page_that_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 200
    links = re.findall(r"\]\(((?:docs|experiments)/[^)]*|\w+\.md[^)]*)\)", text)
    assert len(links) <= 12 and "docs/contents.md" in links
    assert text.index("```yaml\n") < text.index("](")  # a config comes first
    contents = (ROOT / "docs" / "contents.md").read_text(encoding="utf-8")
    # Some pages are nothing but a link to a file, whose text the site shows in their place.
    pages = [page for page in PAGES if not (ROOT / page).read_text().startswith("[")]
    names = [page.removeprefix("docs/") for page in pages if page != "docs/contents.md"]
    assert [name for name in names if f"]({name}" not in contents] == []


def console(text: str, command: str) -> list[str]:
    """Returns the lines that a page prints below a command, without those that it leaves out."""
    found = re.search(rf"^\$ {re.escape(command)}\n(.*?)(?:^\$ |^```)", text, re.M | re.S)
    assert found, command
    return [line for line in found[1].splitlines() if line != "..."]


def test_the_blocks_of_the_readme_run_and_it_shows_what_its_first_commands_print(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    monkeypatch.setenv("XLA_FLAGS", "")  # the process of its run is that of users, and faster
    printed = {}  # by the commands of a block
    for block in blocks("README.md", text):
        run([block])
        ran = re.findall(r"^\$ (.*)", block.text, re.M)
        printed |= dict.fromkeys(ran, capsys.readouterr().out.splitlines())
    prefix = "python -m trainer "
    commands = ["new run first", "explain --config=first/run.yaml"]
    commands.append("new comparison muon --optimizers=adamw,muon")
    for command in (prefix + each for each in commands):
        assert [x for x in console(text, command) if x not in printed[command]] == [], command
    assert f"```yaml\n{Path('first/run.yaml').read_text()}```" in text
    assert console(text, "cat muon/sweep.yaml") == Path("muon/sweep.yaml").read_text().splitlines()
    wrong = next(x for x in text.splitlines() if "learning_rat=" in x and x.startswith("$ "))
    assert runs.refused(capsys, *wrong.removeprefix(f"$ {prefix}").split()).strip() in text


@pytest.mark.long
def test_the_readme_shows_what_its_comparison_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentences are those of the page; other machines round the numbers otherwise."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "")  # the processes of the sweep are those of users, and faster
    assert main(["new", "comparison", "muon"]) == 0
    assert main(["sweep", "--config=muon/sweep.yaml", "--workdir=sweeps/muon"]) == 0
    capsys.readouterr()
    assert main(["report", "sweeps/muon"]) == 0
    shown = " ".join(console(text, "python -m trainer report sweeps/muon"))
    assert_alike(shown, capsys.readouterr().out)


def assert_alike(shown: str, found: str) -> None:
    """Asserts that what is printed begins with what a page shows, but for the last digits."""
    number = r"\d+\.\d+"
    # Columns are as wide as their numbers: another machine may print one digit more, or less.
    told, wanted = (re.sub(r" {2,}", "  ", re.sub(number, "N", text)) for text in (found, shown))
    # The conditions of a working tree with changes are a sentence of their own.
    assert told.startswith(wanted)
    pairs = zip(re.findall(number, shown), re.findall(number, found), strict=False)
    assert all(float(b) == pytest.approx(float(a), rel=0.3) for a, b in pairs)


FIRST_PARTS = ("sweeps", "reports", "statistics")


@pytest.mark.parametrize("name", FIRST_PARTS)
def test_a_page_about_comparisons_begins_with_what_is_read_in_two_minutes(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    title, first, *_ = re.split(r"^## ", text, flags=re.MULTILINE)
    assert title == f"# {name.capitalize()}\n\n" and first.startswith("In two minutes\n")
    assert len(first.strip().splitlines()) <= 40


@pytest.mark.long
def test_the_first_parts_of_these_pages_show_what_their_commands_print(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")  # as above
    pages = {x: (ROOT / "docs" / f"{x}.md").read_text() for x in FIRST_PARTS}
    (sweep,) = [x for x in blocks("sweeps", pages["sweeps"]) if x.file == "sweep.yaml"]
    Path("sweep.yaml").write_text(sweep.text)
    assert main(["new", "run", "mlp", "--on=digits"]) == 0
    command = "sweep --config=sweep.yaml --workdir=sweeps/lion"
    printed = runs.printed(capsys, *command.split())
    for line in console(pages["sweeps"], f"python -m trainer {command}"):
        assert_alike(line, next(x for x in printed.splitlines() if x.startswith(line[:13])))
    verdict = runs.printed(capsys, "report", "sweeps/lion")
    for name in ("reports", "statistics"):
        shown = console(pages[name], "python -m trainer report sweeps/lion")
        assert_alike(" ".join(x for x in shown if "index.html" not in x).strip(), verdict)


# The blocks of code.


@dataclass(frozen=True)
class Block:
    """A fenced block: its page and line, its language, its text, and why it is not run."""

    page: str
    line: int
    language: str
    text: str
    why: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The name of a file in the first line, as in `# mine.yaml`; "" if there is none."""
        named = re.match(r"# ([\w/]+\.(?:py|yaml|gin))$", self.text.partition("\n")[0])
        return named[1] if named else ""


def blocks(page: str, text: str) -> Iterator[Block]:
    """Yields the fenced blocks of a page."""
    fence = re.compile(r"^(?P<mark>[^\n]*)\n```(?P<language>\S*)\n(?P<text>.*?)^```$", re.M | re.S)
    for found in fence.finditer(text):
        mark = MARK.fullmatch(found["mark"])
        line = text.count("\n", 0, found.start("text"))
        why = mark["why"] if mark else ""
        yield Block(page, line, found["language"], found["text"], why)


def run(page: list[Block]) -> None:
    """Runs the blocks of a page, in the current folder."""
    names: dict[str, Any] = {}
    for block in page:
        if block.language in SHOWN or block.language.startswith("{") or block.why:
            continue
        assert block.language in RUNNERS, f"{block.place}: write the language of the block."
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text)
        try:
            RUNNERS[block.language](block, names)
        except (Exception, SystemExit) as error:
            error.add_note(f"{block.place}: this block does not run")
            raise


def run_python(block: Block, names: dict[str, Any]) -> None:
    lines = "\n" * block.line + block.text  # the lines of a traceback are those of the page
    exec(compile(lines, block.page, "exec"), names)


def run_config(block: Block, names: dict[str, Any]) -> None:
    """Checks a config, or a part of one, which is laid over a whole one."""
    suffix = block.language
    file = Path(block.file or f"fragment.{suffix}")
    file.write_text(block.text)
    if re.search(r"^(sweep|base|arms|searches|trials)\b", block.text, re.MULTILINE):
        assert main(["sweep", f"--config={file}", "--check"]) == 0
        return
    if not is_whole(file):
        read = configs.load([ROOT / "configs" / f"muon_vit.{suffix}", file])
        configs.Builder(read, ["my_lab"]).check()
        return
    read = configs.load([file])
    make_plan(resolving.make_program(read, ["my_lab"], declared=True), read)


def is_whole(file: Path) -> bool:
    """Returns whether a config has all keys that a config must have."""
    try:
        read = configs.load([file])
    except configs.ConfigError:  # such as Gin bindings for functions that it does not call
        return False
    return {"model", "data", "loss", "optimizer", "steps"} <= set(read.root.kwargs)


HERE = re.compile(r"^cat > (?P<file>\S+) <<'(?P<end>\w+)'\n(?P<text>.*?)^(?P=end)\n", re.M | re.S)


def run_bash(block: Block, names: dict[str, Any]) -> None:
    rest = block.text
    while rest:
        written = HERE.match(rest)
        if written:
            rest = rest[written.end() :]
            run_written(block, Path(written["file"]), written["text"])
            continue
        line, _, rest = rest.partition("\n")
        while line.endswith("\\"):
            more, _, rest = rest.partition("\n")
            line = f"{line[:-1]} {more}"
        run_command(shlex.split(line, comments=True))


def run_written(block: Block, file: Path, text: str) -> None:
    """Writes a file that a command writes, and checks it if it is a config."""
    file.write_text(text)
    if file.suffix in (".gin", ".yaml"):
        run_config(Block(block.page, block.line, file.suffix[1:], f"# {file}\n{text}"), {})


def run_console(block: Block, names: dict[str, Any]) -> None:
    lines = block.text.replace("\\\n", " ").splitlines()
    commands = [line[2:] for line in lines if line.startswith("$ ")]
    assert commands, "No line begins with `$ `: its language is `text`."
    for line in commands:
        run_command(shlex.split(line, comments=True))


RUNNERS: dict[str, Callable[[Block, dict[str, Any]], None]] = {
    "bash": run_bash,
    "console": run_console,
    "gin": run_config,
    "python": run_python,
    "yaml": run_config,
}


def run_command(words: list[str]) -> None:
    """Runs a command of a page, or the part of it that takes no training.

    Options and configs of all commands are read; explain, config, compare and the check of a sweep
    run. What reads a run or the results of a sweep is not computed here.
    """
    if ">" in words:
        words = words[: words.index(">")]
    match words:
        case [] | ["#", *_]:
            pass
        case ["python", "-m", "trainer", *rest] | ["lockstep", *rest]:
            run_trainer(rest)
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module), f"There is no module {module}."
        case ["make", target, *_]:
            makefile = (ROOT / "Makefile").read_text()
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target
        case ["mkdir", *folders]:
            for folder in folders:
                Path(folder).mkdir()
        case ["touch", *files]:
            for file in files:
                Path(file).touch()
        case [".", *_] | ["cd" | "ls" | "cat", *_]:
            pass
        case _:
            raise AssertionError(f"{shlex.join(words)}: mark the block with why it is not run.")


def run_trainer(words: list[str]) -> None:
    if not words or words[0].startswith("-"):
        words = ["train", *words]
    arguments = options.parser().parse_args(words)
    match arguments.command:
        case "explain" | "config" | "compare" | "new":
            assert main(words) == 0
        case "sweep" if arguments.action is None:
            resolving.read_config(arguments, SWEEP)
            assert checked_sweep(*resolving.config_options(arguments)) == 0
        case name if name != "sweep" and hasattr(arguments, "files"):
            read = resolving.read_config(arguments, RUN)
            resolving.make_program(read, arguments.vocabulary, declared=True)


@functools.cache  # the same sweep stands on a page with several options
def checked_sweep(*given: str) -> int:
    return main(["sweep", *given, "--check"])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which the blocks of a page run, with the lab of the tests on Python's path.

    It has the examples of the page about the config language, mine.yaml and mine.gin.
    """
    for name in ("configs", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    example = "docs/config_language.md"
    for block in blocks(example, (ROOT / example).read_text(encoding="utf-8")):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "tests" / "lab")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [each for each in sys.modules if each.partition(".")[0] == "my_lab"]:
        monkeypatch.delitem(sys.modules, name)  # pages have a package of this name, too
    before = set(sys.modules)
    yield tmp_path
    checked_sweep.cache_clear()
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@short.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page: str, place: Path) -> None:
    run(list(blocks(page, (ROOT / page).read_text(encoding="utf-8"))))


WRONG = {
    "```python\nimport lockstep as ls\nls.load_confg('a.yaml')\n```": "load_confg",
    "```yaml\nmodel: !models.mlq {width: 8}\n```": "models.mlq",
    "```gin\ndata.digits.batch_sise = 8\n```": "batch_sise",
    "```yaml\nbase: configs/muon_vit.yaml\ntrails: 8\n```": "trails",
    "```bash\npython -m trainer verify --config=configs/muon_vit.gin --stpes=9\n```": "--stpes",
    "```console\n$ python -m trainer --config=a.gin\n```": "a.gin",
    "```bash\npython -m trainer explain --config=configs/muon_vit.gin --set steps=x\n```": "steps",
    "```bash\npython -m trainer --config=configs/muon_vit.gin --set model.widt=8\n```": "widt",
    "```bash\npython -m benchmarks.nothing\n```": "benchmarks.nothing",
    "```bash\ncat > a.yaml <<'END'\nmodel: !models.mlq {width: 8}\nEND\n```": "models.mlq",
    "```bash\nmake coffee\n```": "coffee",
    "```bash\nsquashfs a\n```": "squashfs a",
    "```console\npython -m trainer\n```": "No line begins",
    "```\npython -m trainer\n```": "write the language",
    "<!-- not run -->\n```bash\nmake coffee\n```": "coffee",
}


@pytest.mark.parametrize(("text", "words"), WRONG.items())
def test_a_block_that_does_not_run_is_named(
    text: str, words: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = list(blocks("page.md", f"# Title\n\n{text}\n"))
    with pytest.raises((Exception, SystemExit)) as caught:
        run(page)
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "page.md:" in told and words in told + capsys.readouterr().err


def test_a_block_with_a_reason_is_not_run(place: Path) -> None:
    text = "\n<!-- not run: there is no coffee -->\n```bash\nmake coffee\n```\n"
    (block,) = blocks("page.md", text)
    assert block.why == "there is no coffee"
    run([block])
