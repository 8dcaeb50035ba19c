"""The YAML dialect: scalars, tags, aliases, includes, and the canonical form."""

import hashlib
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import short
from trainer.config import Call, Config, ConfigError, diff, digest, dump, leaves, load
from trainer.config.tree import same


@pytest.fixture
def read(tmp_path):
    def read(text: str, name: str = "a.yaml", **more) -> Config:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return load([path], **more)

    return read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # Where PyYAML reads something else, it is a trap of YAML 1.1.
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-1e+2", -100.0),
        ("1.5e3", 1500.0),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("Off", "Off"),
        ("y", "y"),
        ("010", "010"),
        ("0o17", "0o17"),
        ("0x1F", "0x1F"),
        ("0b11", "0b11"),
        ("12:30:00", "12:30:00"),
        ("1:20.5", "1:20.5"),
        ("2001-12-14", "2001-12-14"),
        ("2001-12-14t21:59:43.10-05:00", "2001-12-14t21:59:43.10-05:00"),
        ("=", "="),
        ("1_000", 1000),
        ("10_000_000", 10_000_000),
        ("1__0", "1__0"),
        ("1_", "1_"),
        ("_1", "_1"),
        ("0", 0),
        ("-0", 0),
        ("+7", 7),
        ("-7", -7),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.5", -0.5),
        ("1_0.2_5", 10.25),
        ("-0.0", -0.0),
        (".inf", float("inf")),
        ("-.INF", float("-inf")),
        ("inf", "inf"),
        ("nan", "nan"),
        ("true", True),
        ("False", False),
        ("tRUE", "tRUE"),
        ("null", None),
        ("~", None),
        ("None", "None"),
        ("5%", "5%"),
        ("3 epochs", "3 epochs"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("blocks/.*/kernel", "blocks/.*/kernel"),
        (".*", ".*"),
        ("!!str 1", "1"),
        ("!!int '1'", 1),
        ("!!float 1", 1.0),
        ("1.2.3", "1.2.3"),
        ("1e", "1e"),
        ("e3", "e3"),
        ("<<", "<<"),
    ],
)
def test_scalars_are_read_with_their_types(text, value, read):
    root = read(f"x: {text}\n").root
    assert same(root.kwargs["x"], value)
    assert same(read(dump(root)).root, root)


def test_tags_are_read_as_calls(read):
    root = read(
        """
        bare: !losses.softmax
        empty: !losses.softmax {}
        inline: !optax.adamw {learning_rate: 1e-3, mask: !partial:my_lab.mask }
        block: !optax.adamw
          learning_rate: !schedules.warmup_cosine
            {peak_value: 1, warmup_steps: 5%}
        list: [!a.b, !c.d {x: [1]}, !partial:e.f]
        dash:
        - !a.b
        - !c.d {x: 1}
        3: {1: !a.b , two: ~}
        """.replace("        3: ", "        numbers: ")
    ).root
    ab, ef = Call("a.b"), Call("e.f", partial=True)
    assert root == Call(
        "experiment",
        {
            "bare": Call("losses.softmax"),
            "empty": Call("losses.softmax"),
            "inline": Call(
                "optax.adamw",
                {"learning_rate": 1e-3, "mask": Call("my_lab.mask", {}, partial=True)},
            ),
            "block": Call(
                "optax.adamw",
                {
                    "learning_rate": Call(
                        "schedules.warmup_cosine", {"peak_value": 1, "warmup_steps": "5%"}
                    )
                },
            ),
            "list": [ab, Call("c.d", {"x": [1]}), ef],
            "dash": [ab, Call("c.d", {"x": 1})],
            "numbers": {1: ab, "two": None},
        },
    )


def test_anchors_aliases_and_merge_keys_are_read(read):
    root = read("""
        steps: &steps 2_000
        save_every: *steps
        a: &a !optax.adamw {learning_rate: 1.0, b1: 0.5}
        same: *a
        other: !optax.adamw {b2: 0.9, <<: *a, learning_rate: 2.0}
        base: &base {x: 1, y: 2}
        more: &more {x: 7, z: 3}
        first_wins: {<<: [*base, *more], y: 9}
        """).root.kwargs
    assert root["save_every"] == 2000
    assert root["same"] == root["a"]
    assert root["other"] == Call("optax.adamw", {"learning_rate": 2.0, "b1": 0.5, "b2": 0.9})
    assert root["first_wins"] == {"x": 1, "y": 9, "z": 3}


def test_calls_are_equal_only_if_types_and_values_are():
    call = Call("f", {"a": 1, "b": [True, {"x": 1.0, "y": 2}]})
    assert call == Call("f", {"b": [True, {"x": 1.0, "y": 2}], "a": 1})
    for other in [
        Call("g", call.kwargs),
        Call("f", call.kwargs, partial=True),
        Call("f", {**call.kwargs, "c": None}),
        Call("f", {**call.kwargs, "a": 1.0}),
        Call("f", {**call.kwargs, "a": True}),
        Call("f", {"a": 1, "b": [1, {"x": 1.0, "y": 2}]}),
        Call("f", {"a": 1, "b": [True, {"y": 2, "x": 1.0}]}),  # the first group that matches wins
        Call("f", {"a": 1, "b": [True]}),
    ]:
        assert call != other
        assert digest(call) != digest(other)
        assert diff(call, other)
    assert digest(call) == digest(Call("f", dict(reversed(call.kwargs.items()))))


def test_writing_the_canonical_form_again_changes_nothing():
    root = Call(
        "experiment",
        {
            "steps": 100,
            "model": Call("models.vit", {"width": 64, "sizes": [1, 2.5, "x"]}),
            "groups": {"b": Call("a.b"), "a": {}, 3: [[1], {"k": Call("c.d", {}, True)}]},
            "text": "yes",
            "pattern": "blocks/.*: x",
            "lines": "a\nb",
            "rate": 1e-05,
            "off": None,
        },
    )
    text = textwrap.dedent("""\
        groups:
          b: !a.b {}
          a: {}
          3:
            - [1]
            - k: !partial:c.d {}
        lines: "a\\nb"
        model: !models.vit
          sizes: [1, 2.5, x]
          width: 64
        'off': null
        pattern: 'blocks/.*: x'
        rate: 1.0e-05
        steps: 100
        text: 'yes'
        """)
    assert dump(root) == text
    assert digest(root) == hashlib.sha256(text.encode()).hexdigest()


plain_trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"), max_size=12)
    | st.from_regex(r"[-+0-9._eExo:y~nulltrfase]{1,8}", fullmatch=True),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.integers(-99, 99), inner, max_size=4)
    ),
    max_leaves=15,
)


@settings(
    max_examples=short.examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(plain_trees)
def test_any_yaml_reader_reads_the_canonical_form_alike(tree):
    """PyYAML's own loader knows no tag of ours, and has YAML 1.1's rules for scalars."""
    text = dump(Call("experiment", {"x": tree}))
    assert same(yaml.safe_load(text)["x"], tree)


def test_files_are_merged_deeply(read, tmp_path):
    (tmp_path / "base.yaml").write_text(
        textwrap.dedent("""
            model: !models.vit {width: 64, depth: 4}
            data: !data.digits {batch_size: 32}
            list: [1, 2]
            optimizer: !optim.optimizer
              clip_norm: 1.0
              groups:
                matrices: !optim.group {match: a, optimizer: !optim.muon {learning_rate: 1.0}}
                rest: !optim.group {match: b}
            """)
    )
    config = read("""
        include: base.yaml
        model: !models.mlp {width: 8}      # another function: replaced
        data: {shuffle: true}              # a plain mapping over a call: its arguments
        list: [3]
        optimizer: !optim.optimizer        # the same function: merged
          groups:
            matrices: {optimizer: {weight_decay: 0.5}}
            new: !optim.group
        """)
    muon = Call("optim.muon", {"learning_rate": 1.0, "weight_decay": 0.5})
    groups = {
        "matrices": Call("optim.group", {"match": "a", "optimizer": muon}),
        "rest": Call("optim.group", {"match": "b"}),
        "new": Call("optim.group"),
    }
    expected = Call(
        "experiment",
        {
            "model": Call("models.mlp", {"width": 8}),
            "data": Call("data.digits", {"batch_size": 32, "shuffle": True}),
            "list": [3],
            "optimizer": Call("optim.optimizer", {"clip_norm": 1.0, "groups": groups}),
        },
    )
    assert config.root == expected, diff(config.root, expected)
    base, over = f"{tmp_path / 'base.yaml'}", f"{tmp_path / 'a.yaml'}"
    muon_at = "optimizer.groups.matrices.optimizer"
    assert str(config.sources[f"{muon_at}.learning_rate"]) == f"{base}:8"
    assert str(config.sources[f"{muon_at}.weight_decay"]) == f"{over}:8"
    assert str(config.sources[muon_at]) == f"{base}:8"
    assert str(config.sources["model"]) == f"{over}:3"


def test_several_files_and_includes_override_in_order(tmp_path):
    for name, text in {
        "a.yaml": "x: a\ny: a\nz: a\n",
        "b.yml": "y: b\nz: b\n",
        "sub/c.yaml": "include: [../a.yaml, ../b.yml]\nz: c\n",
        "d.yaml": "include: sub/c.yaml\nw: d\n",
        "e.yaml": "x: e\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert load([tmp_path / "d.yaml"]).root.kwargs == {"x": "a", "y": "b", "z": "c", "w": "d"}
    both = load([tmp_path / "d.yaml", tmp_path / "e.yaml"])
    assert both.root.kwargs == {"x": "e", "y": "b", "z": "c", "w": "d"}
    again = load([tmp_path / "e.yaml", tmp_path / "d.yaml"])
    assert again.root.kwargs["x"] == "a"


def test_every_value_knows_its_line(read, tmp_path):
    config = read("""\
        steps: &steps 2_000
        # a comment
        save_every: *steps
        model: !models.vit
          blocks:
            - width: 1

            - {width: 2,
               depth: 3}
        """)
    file = tmp_path / "a.yaml"
    lines = {key: str(source).removeprefix(f"{file}:") for key, source in config.sources.items()}
    assert lines == {
        "": "1",
        "steps": "1",
        "save_every": "1",
        "model": "4",
        "model.blocks": "6",
        "model.blocks.0": "6",
        "model.blocks.0.width": "6",
        "model.blocks.1": "8",
        "model.blocks.1.width": "8",
        "model.blocks.1.depth": "9",
    }
    assert str(config.argument_source("save_every")) == f"{file}:3"
    assert str(config.argument_source("model.blocks")) == f"{file}:5"
    assert dict(leaves(config.root))["model.blocks.1.depth"] == 3
    assert config.at("model.blocks.1") == {"width": 2, "depth": 3}


def test_windows_line_ends_and_a_byte_order_mark_are_accepted(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfx: 1\r\ny: !a.b\r\n  z: 2\r\n")
    (tmp_path / "a.gin").write_bytes(
        b"\xef\xbb\xbfexperiment.x = 1\r\nexperiment:\r\n  y = @a.b()\r\na.b.z = 2\r\n"
    )
    one, other = load([tmp_path / "a.yaml"]), load([tmp_path / "a.gin"])
    assert one.root == other.root == Call("experiment", {"x": 1, "y": Call("a.b", {"z": 2})})


def test_reading_a_config_runs_no_code(read, tmp_path):
    ran = tmp_path / "ran"
    for text in [
        f"x: !!python/object/apply:os.system ['touch {ran}']",
        f"x: !!python/object/new:os.system ['touch {ran}']",
        "x: !!python/name:os.system",
        "%TAG ! tag:yaml.org,2002:python/\n---\nx: !name:os.system",
        "%TAG !e! tag:yaml.org,2002:python/\n---\nx: !e!name:os.system",
    ]:
        with pytest.raises(ConfigError):
            read(text)
    assert read(f"x: !os.system {{command: 'touch {ran}'}}").root.kwargs["x"].name == "os.system"
    assert not Path(ran).exists()


@pytest.mark.parametrize("character", ["\x85", "\u2028", "\u2029"])
def test_lines_are_counted_as_an_editor_does(character, tmp_path):
    """PyYAML ends a line at three further characters, which no editor does."""
    path = tmp_path / "a.yaml"
    path.write_text(f"# one{character * 3}\nx: 'a{character}b'\ny: 2{character}\nz: 3\n")
    config = load([path])
    lines = {key: config.sources[key].line for key in "xyz"}
    assert lines == {"x": 2, "y": 3, "z": 4}
    path.write_text(f"# one{character * 3}\nx: 1\ny: [\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:[34]: This is not valid YAML"):
        load([path])
