"""Throws anything at both readers: out comes a config or a ConfigError, soon and in few lines."""

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests import short
from trainer.config import Config, ConfigError, digest, dump, load

CORPUS = sorted((Path(__file__).parent / "gin_corpus").glob("*.gin"))
GIN = [path.read_text() for path in CORPUS]
YAML = [
    """\
steps: &steps 2_000
model: !models.vit {width: 64, depth: 4, blocks: [1, 2.5, !lib.f , {a: b}]}
loss: !losses.softmax_cross_entropy
save_every: *steps
optimizer: !optim.optimizer
  clip_norm: 1.0
  groups:
    matrices: !optim.group &group
      match: blocks/.*/kernel
      optimizer: !partial:optim.muon
        weight_decay: 5e-2
    rest: !optim.group
      <<: *group
      match: '.*'
""",
    "text: |\n  two\n  lines\nfolded: >-\n  a\n  b\nquoted: \"\\u263a\"\n'key': ~\nempty:\n",
]
BREAKS = ["\x85", "\u2028", "\u2029"]  # PyYAML and str.splitlines end a line here, an editor none
TEXT = st.text(st.characters() | st.sampled_from(["\n", *BREAKS, "\r", "\x0b", "\x0c", "\x1c"]))
SETTINGS = settings(
    max_examples=short.examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def holds(path: Path, data: bytes, **more) -> None:
    """Loads a file of these bytes, and demands a config that loads again, or a ConfigError."""
    path.write_bytes(data)
    begin = time.process_time()
    try:
        config = load([path], **more)
    except ConfigError as error:
        lines = str(error).splitlines()
        assert 1 <= len(lines) <= 7
        assert all(line.isprintable() and len(line) <= 400 for line in lines)
    else:
        assert isinstance(config, Config)
        again = path.with_name("again.yaml")
        again.write_text(dump(config.root))
        assert digest(load([again]).root) == digest(config.root)
    assert time.process_time() - begin < 30  # a hang, on whatever machine


@st.composite
def mutated(draw, originals: list[str]) -> bytes:
    text = draw(st.sampled_from(originals))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 12)))
        other = draw(st.sampled_from(originals))
        begin = draw(st.integers(0, len(other)))
        piece = st.sampled_from([other[begin : begin + 15], *BREAKS])
        new = draw(st.one_of(st.just(""), piece, st.text(max_size=4)))
        text = text[:start] + new + text[stop:]
    return text.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("suffix", ["gin", "yaml"])
@SETTINGS
@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_with_a_config_error(suffix, data, tmp_path):
    holds(tmp_path / f"a.{suffix}", data)


@pytest.mark.parametrize("suffix", ["gin", "yaml"])
@SETTINGS
@given(text=TEXT)
def test_any_text_is_read_or_refused_with_a_config_error(suffix, text, tmp_path):
    holds(tmp_path / f"a.{suffix}", text.encode("utf-8", "surrogatepass"))


_PIECES = {
    "gin": st.sampled_from(
        "experiment . / @ % ( ) [ ] { } , : = \n 'a' \"b\" ''' 1 -1 1e-3 0x1 None True include"
        " import from as lib.f a m \\ # \t $ ! 1j b'a' f'{a}' ... -".split(" ")
        + ["\n  ", "\n", " ", "experiment.x = ", "@lib.f()", "include 'a.gin'", *BREAKS]
    ),
    "yaml": st.sampled_from(
        "model steps - ? : ! !! !a.b !partial:a.b & * &a *a [ ] { } , | > ' \" # % @ ` ~ null 1"
        " 1e-3 0x1 -1 .inf .nan << <<: --- ... %TAG %YAML \t !<a> !!str !!python/name:os.system"
        " 010 12:30 yes 2001-01-01 include: = 1_000".split(" ")
        + ["\n  ", "\n", " ", ": ", "- ", "include: a.yaml", "\n    ", *BREAKS]
    ),
}


@pytest.mark.parametrize("suffix", ["gin", "yaml"])
@SETTINGS
@given(data=st.data())
def test_any_sequence_of_tokens_is_read_or_refused_with_a_config_error(suffix, data, tmp_path):
    pieces = data.draw(st.lists(_PIECES[suffix], max_size=30))
    holds(tmp_path / f"a.{suffix}", "".join(pieces).encode())


@pytest.mark.parametrize("suffix", ["gin", "yaml"])
@SETTINGS
@given(data=st.data())
def test_mutated_configs_are_read_or_refused_with_a_config_error(suffix, data, tmp_path):
    holds(tmp_path / f"a.{suffix}", data.draw(mutated(YAML if suffix == "yaml" else GIN)))


@SETTINGS
@given(
    text=st.one_of(st.text(max_size=60), mutated(GIN).map(lambda b: b.decode("utf-8", "replace")))
)
def test_any_binding_is_read_or_refused_with_a_config_error(text, tmp_path):
    holds(tmp_path / "a.gin", GIN[0].encode(), bindings=[text])


@SETTINGS
@given(
    path=st.one_of(st.text(max_size=20), st.sampled_from(["steps", "model.width", "a.b", "."])),
    value=st.one_of(st.text(max_size=40), st.lists(_PIECES["yaml"], max_size=9).map("".join)),
)
def test_any_setting_is_read_or_refused_with_a_config_error(path, value, tmp_path):
    holds(tmp_path / "a.yaml", YAML[0].encode(), sets=[f"{path}={value}"])


@SETTINGS
@given(name=st.text(max_size=30))
@example(name="\0/0")
def test_any_file_name_is_read_or_refused_with_a_config_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for each in (name, f"{name}.gin", f"{name}.yaml"):
        with pytest.raises(ConfigError):
            load([each])
    holds(tmp_path / "a.yaml", f"include: {name!r}".encode("utf-8", "surrogatepass"))


_SMALL = "[" * 70
HARD = {
    "an empty file": (b"", b""),
    "blank": (b" \n\n", b"\n \n"),
    "only a comment": (b"# nothing\n", b"# nothing\n"),
    "NUL": (b"experiment.x = 1\0", b"x: 1\0"),
    "a binary file": (bytes(range(256)) * 40, bytes(range(256)) * 40),
    "an ELF header": (b"\x7fELF\x02\x01\x01" + bytes(900), b"\x7fELF\x02\x01\x01" + bytes(900)),
    "invalid UTF-8": (b"experiment.x = '\xff\xfe'\n", b"x: \xff\xfe\n"),
    "UTF-16": ("experiment.x = 1".encode("utf-16"), "x: 1".encode("utf-16")),
    "10 MB in a line": (b"experiment.x = '" + b"a" * 10**7 + b"'", b"x: " + b"a" * 10**7),
    "10 MB of lines": (b"experiment.x = 1\n" * 600_000, b"x: 1\n" * 2_000_000),
    "a long line": (b"experiment.x = 1 " + b"y" * 200_000, b"x: : " + b"y" * 200_000),
    "deep lists": (b"experiment.x = " + b"[" * 100_000, b"x: " + b"[" * 100_000),
    "deep closed lists": (
        b"experiment.x = " + b"[" * 90 + b"]" * 90,
        b"x: " + b"[" * 90 + b"]" * 90,
    ),
    "deep dicts": (b"experiment.x = " + b"{1:" * 50_000, b"x: " + b"{a: " * 50_000),
    "deep blocks": (b"", "\n".join(" " * i + "a:" for i in range(700)).encode()),
    "deep parentheses": (b"experiment.x = " + b"(" * 100_000, b"? " * 50_000),
    "many strings": (b"experiment.x = " + b"'a'\"b\"" * 40_000, b"x: " + b"'' " * 80_000),
    "many strings in lines": (
        b"experiment.x = (" + b"'a'\n\"b\"\n" * 30_000 + b")\nfaulty",
        b"x: [" + b"'a',\n" * 50_000 + b"]",
    ),
    "many minus signs": (b"experiment.x = " + b"-" * 100_000, b"- " * 100_000),
    "a huge number": (b"experiment.x = " + b"9" * 100_000, b"x: " + b"9" * 100_000),
    "a huge hexadecimal": (b"experiment.x = 0x" + b"f" * 100_000, b"x: 1e" + b"9" * 100_000),
    "an alias bomb": (
        b"experiment.x = %m9\nm0 = [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + b"".join(b"m%d = [%s]\n" % (i, b"%%m%d, " % (i - 1) * 9) for i in range(1, 10)),
        b"m0: &m0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + b"".join(b"m%d: &m%d [%s]\n" % (i, i, b"*m%d, " % (i - 1) * 9) for i in range(1, 10)),
    ),
    "a bomb of calls": (
        b"experiment.x = @f0.f()\n"
        + b"".join(
            b"f%d.f.%s = @f%d.f()\n" % (i, arg, i + 1) for i in range(40) for arg in (b"a", b"b")
        ),
        b"a0: &a0 {x: 1}\n"
        + b"".join(b"a%d: &a%d {l: *a%d, r: *a%d}\n" % (i, i, i - 1, i - 1) for i in range(1, 40)),
    ),
    "a merge bomb": (
        b"",
        b"a0: &a0 {x: 1}\n"
        + b"".join(b"a%d: &a%d {<<: [*a%d, *a%d]}\n" % (i, i, i - 1, i - 1) for i in range(1, 40)),
    ),
    "an alias within itself": (b"", b"x: &x [*x]\n"),
    "a merge of itself": (b"", b"x: &x {<<: *x}\n"),
    "an odd escape": (b"experiment.x = '\\ud800'", b'x: "\\ud800"'),
    "two documents": (b"", b"a: 1\n---\nb: 2\n"),
    "line breaks of Unicode": (
        "experiment.x = 1\x85\u2028\u2029y\x85 = ]".encode(),
        "x: 1\x85\u2028\u2029y\x85: ]".encode(),
    ),
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("suffix", ["gin", "yaml"])
def test_files_that_are_expensive_to_parse_are_refused_quickly(name, suffix, tmp_path):
    data = HARD[name][suffix == "yaml"]
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(data)
    begin = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load([path])
    assert time.process_time() - begin < 30
    assert str(path) in str(caught.value)
    assert ("larger than 256 KiB" in str(caught.value)) == name.startswith("10 MB")
    assert len(str(caught.value).splitlines()) <= 7
    assert len(str(caught.value)) <= 7 * 401
