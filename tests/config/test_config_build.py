"""Checks names, arguments and types against functions, and builds objects from a tree."""

import functools
import importlib
import pathlib
import re
import textwrap
from typing import Any

import config_zoo
import jax
import jax.numpy as jnp
import optax
import pytest
from config_zoo import Made, Thing

import optim.factories
from tests.runs import python
from trainer.config import Builder, Call, Config, ConfigError, Source, Units, override
from trainer.config import load as load_files
from trainer.config.vocabulary import Vocabulary


@pytest.fixture
def load(tmp_path):
    def load(text: str) -> Config:
        path = tmp_path / "a.yaml"
        path.write_text(textwrap.dedent(text))
        return load_files([path])

    return load


@pytest.fixture
def build(load):
    """Builds the node `data` of a config, which takes anything."""

    def build(text: str, **more: Any) -> Any:
        config = load(f"data: {text}\n")
        return Builder(config, ["config_zoo"]).build("data", **more)

    return build


@pytest.fixture
def kwargs(build):
    """Builds a call of a function of the zoo that returns what it is given; None stays away."""

    def kwargs(text: str, **more: Any) -> dict[str, Any]:
        return build(text, **more).kwargs

    return kwargs


@pytest.fixture
def refused(build):
    def refused(text: str, **more: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            build(text, **more)
        assert len(str(caught.value).splitlines()) <= 7
        return str(caught.value)

    return refused


# Types


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("f: 0.5", 0.5),
        ("f: 2", 2.0),
        ("f: .inf", float("inf")),
        ("i: 3", 3),
        ("s: word", "word"),
        ("s: '3'", "3"),
        ("b: true", True),
        ("n: null", None),
        ("n: 3", 3),
        ("o: null", None),
        ("o: 3", 3.0),
        ("u: 3", 3),
        ("u: 3.5", 3.5),
        ("text_or_int: SAME", "SAME"),
        ("text_or_int: 5%", "5%"),
        ("text_or_int: 3", 3),
        ("choice: b", "b"),
        ("choice: 3", 3),
        ("path: a/b.txt", pathlib.Path("a/b.txt")),
        ("annotated: 2", 2.0),
    ],
)
def test_scalars_that_fit_the_annotation_are_accepted(given, value, kwargs):
    built = kwargs(f"!config_zoo.scalars {{{given}}}")[given.split(":")[0]]
    assert type(built) is type(value)
    assert built == value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("f: word", "takes a float for 'f', and was given the string 'word'."),
        ("f: '0.5'", "takes a float for 'f', and was given the string '0.5'."),
        ("f: [1.0]", "takes a float for 'f', and was given the list [1.0]."),
        ("f: {a: 1}", "takes a float for 'f', and was given the dict {'a': 1}."),
        ("f: true", "takes a float for 'f', and was given the boolean True."),
        ("f: null", "takes a float for 'f', and was given null."),
        ("f: 5%", "takes a float for 'f', and was given the string '5%'."),
        ("f: !config_zoo.a_word", "takes a float for 'f', and was given a call of config_zoo.a_wo"),
        ("f: !config_zoo.a_function", "was given a call of config_zoo.a_function."),
        ("f: !partial:config_zoo.a_number", "was given the function config_zoo.a_number. To pass"),
        ("i: 3.0", "takes an integer for 'i', and was given the float 3.0."),
        ("i: true", "takes an integer for 'i', and was given the boolean True."),
        ("i: three", "takes an integer for 'i', and was given the string 'three'."),
        ("i: 5%", "was given the string '5%'. Only numbers of steps have units: arguments that"),
        ("i: '64'", "was given the string '64'. A number is written without quotes."),
        (
            "f: nan",
            "was given the string 'nan'. A number is written as .nan, .inf or -.inf in YAML.",
        ),
        ("s: 3", "takes a string for 's', and was given the integer 3."),
        ("s: null", "takes a string for 's', and was given null."),
        ("b: 1", "takes true or false for 'b', and was given the integer 1."),
        ("b: 'true'", "takes true or false for 'b', and was given the string 'true'."),
        ("n: 2.5", "takes an integer or null for 'n', and was given the float 2.5."),
        ("o: none", "The value None is written None in Gin and null in YAML."),
        ("text_or_int: 2.5", "takes an integer or a string for 'text_or_int', and was given the"),
        ("choice: c", "takes 'a' or 'b' or 3 for 'choice', and was given the string 'c'."),
        ("choice: 3.0", "was given the float 3.0."),
        ("path: 3", "takes a Path or null for 'path', and was given the integer 3."),
    ],
)
def test_scalars_that_do_not_fit_the_annotation_are_refused(given, message, refused, load):
    text = f"!config_zoo.scalars {{{given}}}"
    assert message in refused(text)
    config = load(f"model: {text}\ndata: 1\nloss: !losses.softmax_cross_entropy\nsteps: 1\n")
    config = override(config, ["optimizer=!optax.sgd {learning_rate: 1.0}"])
    with pytest.raises(ConfigError) as caught:  # the check says the same without a call
        Builder(config, ["config_zoo"]).check()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("floats: [1, 2.5]", (1.0, 2.5)),
        ("floats: []", ()),
        ("ints: [1, 2]", [1, 2]),
        ("pair: [1, a]", (1, "a")),
        ("many: [1, 2]", (1.0, 2.0)),
        ("names: {a: 1}", {"a": 1.0}),
        ("table: {1: 2}", {1: 2.0}),
        ("nested: [{a: [1]}, {}]", ({"a": (1,)}, {})),
        ("some: [a, b]", ("a", "b")),
        ("unique: [1, 1, 2]", frozenset({1, 2})),
        ("one_or_many: 3", 3),
        ("one_or_many: [3, 4]", (3, 4)),
        ("either: [3]", (3,)),
        ("either: [a]", ("a",)),
        ("either: {a: 1}", {"a": 1}),
        ("either: {1: a}", {1: "a"}),
        ("typed: {a: 1}", {"a": 1}),
        ("hashed: {a: 1, 2: 3}", {"a": 1, 2: 3}),
    ],
)
def test_containers_that_fit_the_annotation_are_accepted(given, value, kwargs):
    built = kwargs(f"!config_zoo.containers {{{given}}}")[given.split(":")[0]]
    assert repr(built) == repr(value)  # the types of the elements too


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("floats: 1.0", "takes a list for 'floats', and was given the float 1.0."),
        ("floats: [a]", "takes a float for 'floats[0]', and was given the string 'a'."),
        ("floats: {a: 1}", "takes a list for 'floats', and was given the dict"),
        ("ints: [1, 2.5]", "takes an integer for 'ints[1]', and was given the float 2.5."),
        ("pair: [1]", "takes a list for 'pair', and was given the list [1]."),
        ("pair: [a, 1]", "takes an integer for 'pair[0]', and was given the string 'a'."),
        ("names: [a]", "takes a dict or null for 'names', and was given the list ['a']."),
        ("names: {a: b}", "takes a float for 'names.a', and was given the string 'b'."),
        ("names: {1: 1.0}", "takes a string as a key of 'names', and was given the integer 1."),
        ("table: {a: 1.0}", "takes an integer as a key of 'table', and was given the string 'a'."),
        (
            "nested: [{a: [1.5]}]",
            "takes an integer for 'nested[0].a[0]', and was given the float",
        ),
        (
            "one_or_many: [a]",
            "takes an integer for 'one_or_many[0]', and was given the string",
        ),
    ],
)
def test_containers_that_do_not_fit_the_annotation_are_refused(given, message, refused):
    assert message in refused(f"!config_zoo.containers {{{given}}}")


def test_without_an_annotation_the_type_of_the_default_counts(kwargs, refused):
    given = "{f: 2, i: 3, s: b, b: false, t: [3, x], d: [anything, {a: 1}]}"
    built = kwargs(f"!config_zoo.unannotated {given}")
    assert repr(built) == repr(
        {"f": 2.0, "i": 3, "s": "b", "b": False, "t": (3, "x"), "d": ["anything", {"a": 1}]}
    )
    for given in ("f: a", "i: 2.5", "s: 1", "b: 1", "t: 1"):
        assert "and was given" in refused(f"!config_zoo.unannotated {{{given}}}")
    assert kwargs("!config_zoo.anything {x: {a: [1]}, y: 5%}") == {"x": {"a": [1]}, "y": "5%"}


def test_annotations_written_as_strings_are_resolved(kwargs, refused):
    built = kwargs("!config_zoo.stringly {f: 1, unknown: anything, known: !config_zoo.make}")
    assert repr(built["f"]) == "1.0"
    assert built["unknown"] == "anything"
    assert "takes a Made or null for 'known'" in refused("!config_zoo.stringly {known: 3}")


def test_a_function_or_its_result_is_passed_as_the_annotation_asks(build, kwargs, refused):
    assert kwargs("!config_zoo.scalars {f: !config_zoo.a_number {value: 3}}")["f"] == 3.0
    built = kwargs("!config_zoo.takes_function {f: !partial:config_zoo.a_number }")
    assert built["f"] is config_zoo.a_number
    built = kwargs("!config_zoo.takes_function {f: !partial:config_zoo.a_number {value: 4}}")
    assert built["f"].func is config_zoo.a_number and built["f"]() == 4.0
    assert kwargs("!config_zoo.takes_function {f: !config_zoo.a_function }")["f"](1) == 2
    assert "takes a function for 'f'" in refused("!config_zoo.takes_function {f: 3}")
    kind = kwargs(
        "!config_zoo.takes_made {made: !config_zoo.make , kind: !partial:config_zoo.Made }"
    )
    assert kind == {"made": Made((), {}), "other": None, "kind": Made}
    message = refused("!config_zoo.takes_made {made: !partial:config_zoo.make }")
    assert "takes a Made for 'made', and was given the function config_zoo.make." in message
    message = refused("!config_zoo.takes_made {made: config_zoo.make}")
    assert "A call is written @name.of.function() in Gin and !name.of.function in YAML." in message
    assert build("!partial:config_zoo.needs {a: 1}").keywords == {"a": 1}  # the rest may follow


def test_a_function_that_fits_the_annotation_itself_is_not_called(build, kwargs, refused):
    for name in ("halves", "quarters"):
        given = f"!optax.sgd {{learning_rate: !partial:config_zoo.{name} }}"
        rate = kwargs(f"!config_zoo.wrapped {{inner: {given}}}")["inner"].keywords["learning_rate"]
        assert rate is getattr(config_zoo, name)
    built = kwargs("!config_zoo.takes_factory {make: !partial:config_zoo.a_function }")
    assert built["make"] is config_zoo.a_function
    built = kwargs(
        "!config_zoo.takes_factory {make: !partial:config_zoo.a_function ,"
        " loose: !partial:config_zoo.a_function }"
    )
    assert built["loose"] is config_zoo.a_function  # whatever it is wanted for
    message = refused("!config_zoo.takes_function {f: !partial:config_zoo.a_function }")
    assert "call it: @config_zoo.a_function() or !config_zoo.a_function." in message


def test_classes_are_called_with_their_fields(build, refused):
    built = build("!config_zoo.Thing {width: 3, inner: !config_zoo.Thing {width: 4}}")
    assert built == Thing(3, inner=Thing(4))
    assert "needs the argument width: add it." in refused("!config_zoo.Thing")
    message = refused("!config_zoo.Thing {width: 3, hidden: 4}")
    assert "config_zoo.Thing has no argument 'hidden'. It has: inner, name, rate, width." in message


def test_positional_and_variadic_arguments_are_passed_as_the_signature_asks(build, refused):
    assert build("!config_zoo.positional {a: 1, b: 2, c: 3}") == Made((1, 2), {"c": 3})
    assert build("!config_zoo.positional {a: 1, b: 2, rest: [3]}") == Made((1, 2, 3.0), {"c": 0})
    assert "takes a list for 'rest'" in refused("!config_zoo.positional {a: 1, b: 2, rest: 3}")


# Steps


def test_step_counts_take_units(kwargs, refused):
    units = Units(total_steps=200, batch_size=32, num_examples=1000)
    built = kwargs(
        "!config_zoo.steps {count: 2 epochs, boundaries: [50%, 64 examples, 7],"
        " table: {10%: 1}, name: 20%, hold_steps: 1 epoch, marked: 5%}",
        units=units,
    )
    assert built == {
        "count": 63,
        "every": 20,  # a default
        "warmup": 100,
        "boundaries": (100, 2, 7),
        "table": {20: 1.0},
        "name": "20%",  # no number of steps is asked for here
        "hold_steps": 32,
        "ns_steps": 5,
        "marked": 10,
    }
    built = kwargs("!config_zoo.steps {count: 3, every: 4, warmup: 5}")
    assert (built["count"], built["every"], built["warmup"]) == (3, 4, 5)
    message = refused("!config_zoo.steps {count: 50%}", units=Units(None, 32, 1000))
    assert message.endswith(
        "a.yaml:1: '50%' depends on the number of steps of the run, which is not known here:"
        " write a plain number of steps."
    )
    message = refused("!config_zoo.steps {count: 1, table: {10%: 1, 20: 2}}", units=units)
    assert message.endswith("Two keys of 'data.table' are 20. Remove one.")
    partial = Builder(
        _config({"data": Call("config_zoo.steps", {"count": 3}, True)}), ["config_zoo"]
    )
    assert partial.build("data", units=units).keywords == {"count": 3, "every": 20, "warmup": 100}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("count: 1, ns_steps: 50%", "Only numbers of steps have units"),
        ("count: many", "takes a number of steps for 'count', and was given the string 'many'. A"),
        ("count: 1, marked: 3 epoks", "takes a number of steps or null for 'marked', and was"),
        ("count: 1, boundaries: [5%, x]", "A number of steps may also be '5%', '3 epochs', '1_000"),
        ("count: 1, table: {ten: 1}", "takes a number of steps as a key of 'table'"),
    ],
)
def test_a_value_that_is_not_a_number_of_steps_is_refused_with_its_line(given, message, refused):
    assert message in refused(f"!config_zoo.steps {{{given}}}", units=Units(200, 32, 1000))


@pytest.mark.parametrize(
    "path", ["model.width", "seed", "microbatches", "keep_latest", "mesh.data", "model.num_classes"]
)
def test_an_integer_that_does_not_count_steps_takes_no_unit(path, load):
    config = load("""
        model: !models.mlp {width: 16, num_classes: 10}
        data: !data.digits
        loss: !losses.softmax_cross_entropy
        optimizer: !optax.sgd {learning_rate: 0.1}
        steps: 20
        seed: 1
        mesh: {data: 1}
        """)
    Builder(config).check()
    with pytest.raises(ConfigError, match="takes an integer.*Only numbers of steps have units"):
        Builder(override(config, [f"{path}=50%"])).check()


@pytest.mark.parametrize(
    "schedule",
    [
        "optax.linear_schedule {init_value: 1, end_value: 0, transition_steps: 5%}",
        "optax.exponential_decay {init_value: 1, transition_steps: 5%, decay_rate: 0.5,"
        " transition_begin: 10 examples}",
        "optax.piecewise_constant_schedule {init_value: 1, boundaries_and_scales: {50%: 0.1}}",
        "optax.join_schedules {schedules: [], boundaries: [1 epoch]}",
        "schedules.piecewise {boundaries: [50%], values: [1, 2]}",
        "schedules.rsqrt {peak_value: 1, timescale: 5%}",
    ],
)
def test_the_lengths_of_schedules_take_units(schedule, load):
    config = load(f"""
        model: !models.mlp
        data: !data.digits
        loss: !losses.softmax_cross_entropy
        optimizer: !optax.sgd {{learning_rate: !{schedule}}}
        steps: 20
        """)
    Builder(config).check()


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (7, 7),
        ("7 steps", 7),
        ("1 step", 1),
        ("1_000 steps", 1000),
        ("100%", 1001),
        ("0%", 0),
        ("0.01%", 1),  # never none, where some was asked for
        ("5%", 50),  # 50.05
        ("49.95%", 500),  # 499.9995
        ("0.15%", 2),  # 1.5015
        (" 5 % ", 50),
        ("1 epoch", 16),  # 15.625, rounded up
        ("3epochs", 47),
        ("0.5 epochs", 8),
        ("64 examples", 1),
        ("65 examples", 2),
        ("1_000_000 examples", 15625),
        ("1M examples", 15625),
        ("1.5K steps", 1500),
        ("2_000_000 tokens", 307),  # of 6,528: 306.4
        ("6_528 tokens", 1),
        ("6_529 tokens", 2),
        ("1 token", 1),
        ("0 tokens", 0),
        ("10M tokens", 1532),  # 1531.8...
        ("1.5K tokens", 1),
        ("13.056K tokens", 2),  # exact: 13.056 has no float
        ("1B tokens", 153_187),
        ("1T tokens", 153_186_275),
        ("20 tokens/parameter", 4),  # 20,000 tokens of 6,528
        ("0.5 token/parameter", 1),
    ],
)
def test_units_convert_to_steps(text, steps):
    assert Units(1001, 64, 1000, 102, lambda: 1000).steps(text) == steps


def test_tokens_need_a_data_set_that_counts_them():
    with pytest.raises(ConfigError) as caught:
        Units(1001, 64, 1000).steps("1B tokens", Source("a.gin", 3))
    assert str(caught.value) == (
        "a.gin:3: '1B tokens' is a number of tokens, and the data set does not say how many tokens "
        "an example has: it has no attribute tokens_per_example, as data sets of text have. Write "
        "a number of steps, epochs or examples."
    )


@pytest.mark.parametrize(
    "text",
    ["5%" + " " * 70 + "x", "", "5", "five", "-5%", "1e3 steps", "5 %%", "3 epoks", "1_ step"]
    + [
        "10M",
        "1K%",
        "1K epochs",
        "10 M tokens",
        "10M tokens/parameter",
        "20 tokens/param",
        "20 steps/parameter",
        "10m tokens",
        "1KM tokens",
        "1Ktokenss",
        "B tokens",
    ],
)
def test_a_text_that_is_not_a_step_count_is_refused(text):
    with pytest.raises(ConfigError, match="is not a number of steps"):
        Units(100, 10, 10).steps(text, Source("a.gin", 3))
    for other in (1.5, True, None, [1]):
        with pytest.raises(ConfigError, match="is not a number of steps"):
            Units(100, 10, 10).steps(other)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a.gin:3: '0.5 steps' is not a whole number of steps."):
        Units(100, 10, 10).steps("0.5 steps", Source("a.gin", 3))


# Recipes


def test_an_optimizer_is_a_recipe_and_its_schedules_are_built(build):
    recipe = build(
        """!config_zoo.wrapped
  scale: 2
  decay: !optax.linear_schedule {init_value: 1, end_value: 0, transition_steps: 50%}
  inner: !optax.lookahead
    sync_period: 5
    slow_step_size: 1
    fast_optimizer: !config_zoo.gradient_step
      learning_rate: !schedules.warmup_cosine {peak_value: 1, warmup_steps: 10%}
      momentum: !optax.constant_schedule {value: 0.5}
  rest: [!optax.sgd {learning_rate: 1}, !optax.identity ]
  by_name: {a: !optax.adamw {learning_rate: 1}}
""",
        units=Units(100, 1, 1),
    ).kwargs
    assert recipe["scale"] == 2.0
    assert recipe["decay"](25) == 0.5
    lookahead = recipe["inner"]
    assert isinstance(lookahead, functools.partial) and lookahead.func is optax.lookahead
    assert lookahead.keywords["sync_period"] == 5
    assert lookahead.keywords["slow_step_size"] == 1
    step = lookahead.keywords["fast_optimizer"]
    assert isinstance(step, functools.partial) and step.func is config_zoo.gradient_step
    assert step.keywords["learning_rate"](5) == pytest.approx(0.5)
    assert step.keywords["momentum"](0) == 0.5
    assert [type(each) for each in recipe["rest"]] == [functools.partial] * 2
    assert recipe["by_name"]["a"].keywords == {"learning_rate": 1.0}


def test_a_chain_is_a_recipe_of_recipes(build):
    recipe = build("""!config_zoo.wrapped
  inner: !optax.chain
    args: [!optax.scale_by_adam {b1: 0}, !optax.scale {step_size: -1}]
""").kwargs["inner"]
    assert recipe.func is optax.chain
    assert [each.func for each in recipe.args] == [optax.scale_by_adam, optax.scale]
    assert repr(recipe.args[0].keywords) == "{'b1': 0.0}"


def test_a_schedule_is_accepted_only_for_a_float_of_an_optimizer(refused):
    schedule = "!optax.constant_schedule {value: 1.0}"
    message = refused(f"!config_zoo.wrapped {{inner: !optax.identity , scale: {schedule}}}")
    assert "config_zoo.wrapped takes a float for 'scale', and was given a call of optax" in message
    message = refused(
        "!config_zoo.wrapped {inner: !config_zoo.gradient_step {learning_rate:"
        f" !config_zoo.a_number {{value: {schedule}}}}}}}"
    )
    assert "config_zoo.a_number takes a float for 'value'" in message


def test_a_function_that_does_not_return_an_optimizer_is_refused_as_one(refused, kwargs):
    for name, call in {
        "optax.constant_schedule": "!optax.constant_schedule {value: 1.0}",
        "config_zoo.a_number": "!partial:config_zoo.a_number ",
        "config_zoo.needs": "!config_zoo.needs {a: 1, b: 2, c: 3}",
    }.items():
        message = refused(f"!config_zoo.wrapped {{inner: {call}}}")
        assert "config_zoo.wrapped takes an optimizer for 'inner', and was given" in message
        assert f"{name}." in message
    recipe = kwargs("!config_zoo.wrapped {inner: !config_zoo.unsaid {x: 1}}")["inner"]
    assert recipe() == 1  # what says not what it returns may be one


def test_a_missing_argument_of_an_optimizer_is_named(refused):
    message = refused("!config_zoo.wrapped {inner: !optax.adamw }")
    assert "optax.adamw needs the argument learning_rate: add it." in message
    message = refused("!config_zoo.wrapped {inner: !partial:optax.adamw }")
    assert "optax.adamw needs the argument learning_rate: add it." in message


def test_an_optimizer_that_is_a_partial_already_is_used_as_it_is(build):
    """optax.nadamw is one."""
    recipe = build("!config_zoo.wrapped {inner: !optax.nadamw {learning_rate: 1}}").kwargs["inner"]
    assert isinstance(recipe(), optax.GradientTransformation)


@pytest.mark.parametrize(
    ("mask", "value"),
    [("true", True), ("null", None), ("{a: true, b: false}", {"a": True, "b": False})],
)
def test_a_mask_of_booleans_can_be_written(mask, value, kwargs):
    given = f"!optax.adamw {{learning_rate: 1, mask: {mask}}}"
    assert kwargs(f"!config_zoo.wrapped {{inner: {given}}}")["inner"].keywords["mask"] == value
    given = "!optax.adamw {learning_rate: 1, mask: !partial:config_zoo.halves }"
    recipe = kwargs(f"!config_zoo.wrapped {{inner: {given}}}")["inner"]
    assert recipe.keywords["mask"] is config_zoo.halves


def test_optimizers_by_label_can_be_written(build):
    recipe = build(
        "!config_zoo.wrapped {inner: !optax.partition {transforms: {a: !optax.sgd {learning_rate:"
        " 0.5}}, param_labels: a}}"
    ).kwargs["inner"]
    optimizer = optim.factories.instantiate(recipe, 0, jnp.float32)
    params: Any = {"x": jnp.ones(2)}
    updates: Any
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert updates["x"].tolist() == [-0.5, -0.5]


# Objects that stand for nodes


def test_objects_may_replace_config_nodes_and_may_be_traced(load):
    config = load("""
        model: !config_zoo.wrapped
          inner: !optax.sgd {learning_rate: 0.1, momentum: 0.9}
          scale: 1.0
        data: !config_zoo.raises
        """)
    builder = Builder(config, ["config_zoo"])

    @jax.jit
    def update(rate: jax.Array) -> jax.Array:
        overrides = {"model.inner.learning_rate": rate, "model.scale": rate}
        made = builder.build("model", overrides=overrides)
        assert made.kwargs["scale"] is rate
        optimizer = made.kwargs["inner"]()
        return optimizer.update(jnp.ones(2), optimizer.init(jnp.zeros(2)))[0]

    assert update(jnp.float32(0.5)).tolist() == [-0.5, -0.5]
    assert builder.build("data", overrides={"data": 7}) == 7
    with pytest.raises(KeyError, match="no node at 'model.inner.b1'"):
        builder.build("model", overrides={"model.inner.b1": 1})
    with pytest.raises(KeyError, match="no node at 'modle'"):
        builder.build("modle")


def test_a_node_built_alone_has_the_type_that_its_argument_asks_for(load):
    config = load("""
        model: !config_zoo.wrapped
          inner: !optax.sgd {learning_rate: 1}
          rest: [!optax.adam {learning_rate: 5}]
          by_name: {a.b: !optax.adam {learning_rate: 6}}
        data: [1, {x: 5%}]
        """)
    builder = Builder(config, ["config_zoo"])
    assert repr(builder.build("model.inner.learning_rate")) == "1.0"
    for path, rate in {"inner": 1.0, "rest.0": 5.0, "by_name.a.b": 6.0}.items():
        recipe = builder.build(f"model.{path}")
        assert isinstance(recipe, functools.partial)
        assert recipe.keywords == {"learning_rate": rate}
    assert builder.build("data.1.x") == "5%"


# Errors of the functions themselves


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("value", "config_zoo.raises refuses its arguments: x is 2.0, which is no good ("),
        (
            "type",
            "config_zoo.raises refuses its arguments: TypeError: x is 2.0, which is no good (",
        ),
        ("key", "config_zoo.raises refuses its arguments: KeyError: "),
        ("empty", "config_zoo.raises refuses its arguments: ValueError"),
        ("parse", "config_zoo.raises refuses its arguments: could not convert string to float: "),
    ],
)
def test_an_error_raised_by_a_function_is_reported_with_file_and_line(
    kind, message, refused, tmp_path
):
    told = refused(f"\n  !config_zoo.raises {{kind: {kind}, x: 2}}")
    assert told.startswith(f"{tmp_path}/a.yaml:2: {message}")
    # Also a ValueError, which a function raises on purpose, and float() for a cell of a table.
    assert re.search(r" \(\S*config_zoo/__init__\.py:\d+\)$", told)


def test_a_syntax_error_has_the_line_of_its_own_file(refused):
    told = refused("\n  !config_zoo.raises {kind: syntax}")
    assert told.endswith("SyntaxError: '(' was never closed (broken.py:1)")


def test_an_error_that_begins_with_the_name_of_the_function_says_it_once(load):
    builder = Builder(load("model: !models.gpt {num_heads: 5}\n"))
    with pytest.raises(
        ConfigError, match=r"a.yaml:1: models.gpt divides its width among its heads"
    ):
        builder.build("model")


def test_an_error_without_a_known_value_names_the_settings_of_the_call(load):
    config = override(load("data: !config_zoo.raises {kind: value}\n"), ["data.x=1.5"])
    config = override(config, ["data.kind=empty"])
    with pytest.raises(ConfigError) as caught:
        Builder(config, ["config_zoo"]).build("data")
    changed = "--set data.kind=empty, --set data.x=1.5"
    said = str(caught.value)
    assert re.search(r": ValueError \(\S*config_zoo/__init__\.py:\d+\)\. Its arguments", said)
    assert said.endswith(f" Its arguments were changed by {changed}.")


# All mistakes at once


def test_all_mistakes_of_a_config_are_reported_in_the_order_of_the_file(load, tmp_path):
    config = load("""
        steps: 30O
        model: !models.mlp {widht: 32, num_classes: many}
        data: !data.digits
          batch_sise: 32
        metrics:
          accuracy: !partial:metrics.acuracy {}
          spare: [!metrics.accuracy {}, !data.digitz {}]
        """)
    with pytest.raises(ConfigError) as caught:
        Builder(config).check()
    count, *lines = str(caught.value).splitlines()
    assert count == "7 mistakes:"
    lines = [line.removeprefix(f"{tmp_path}/a.yaml:") for line in lines]
    assert [line[:2] for line in lines] == ["2:", "2:", "3:", "3:", "5:", "7:", "8:"]
    parts = ["loss, optimizer", "'30O'", "'width'?", "'many'", "'batch_size'?"]
    for part, line in zip([*parts, "'metrics.accuracy'?", "a class"], lines, strict=True):
        assert part in line
    assert "data.digits needs" not in str(caught.value)  # batch_size is misspelt, not missing


def test_at_most_ten_mistakes_are_shown(load):
    config = load("".join(f"argument_{number}: 1\n" for number in range(13)))
    with pytest.raises(ConfigError) as caught:
        Builder(config).check()
    lines = str(caught.value).splitlines()
    assert (lines[0], len(lines), lines[-1]) == ("13 mistakes:", 12, "... and 3 more.")


def test_all_functions_that_refuse_their_arguments_are_reported(load):
    raises = "!config_zoo.raises {kind: value, x: 2}"
    config = load(f"data: !config_zoo.anything\n  x: {raises}\n  y: [1, {raises}]\n")
    builder = Builder(config, ["config_zoo"])
    with pytest.raises(ConfigError) as caught:
        builder.build("data")
    assert [line.split(": ")[0][-2:] for line in str(caught.value).splitlines()[1:]] == [":2", ":3"]


# The vocabulary


def _config(kwargs: dict[str, Any]) -> Config:
    paths = {"": Source("a.yaml", 1)}

    def visit(tree: Any, path: str) -> None:
        items = tree.kwargs if isinstance(tree, Call) else tree if isinstance(tree, dict) else {}
        for key, item in items.items():
            paths[f"{path}.{key}" if path else key] = Source("a.yaml", 1)
            visit(item, f"{path}.{key}" if path else key)

    visit(kwargs, "")
    return Config(Call("experiment", kwargs), paths)


def _find(name: str, vocabulary: list[str]) -> Any:
    return Vocabulary(vocabulary).function(name, Source("a.yaml", 1)).call


def test_names_resolve_to_public_functions():
    import optim.schedules
    import trainer.models

    assert _find("optax.adamw", []) is optax.adamw
    assert _find("optax.contrib.muon", []) is optax.contrib.muon
    assert _find("optax.losses.l2_loss", []) is optax.losses.l2_loss
    assert _find("schedules.rsqrt", []) is optim.schedules.rsqrt
    assert _find("models.vit", []) is trainer.models.vit
    assert _find("config_zoo.make", ["config_zoo"]) is config_zoo.make
    assert _find("config_zoo.Thing", ["config_zoo"]) is Thing
    assert _find("config_zoo.Alias", ["config_zoo"]) is Thing
    assert _find("config_zoo.listed_print", ["config_zoo"]) is print
    assert _find("config_zoo.lazy", ["config_zoo"]) is config_zoo.a_number
    assert _find("config_zoo.optimizer", ["config_zoo"]) is config_zoo.optimizer
    for package in ("config_zoo", "config_zoo.inner", "config_zoo.inner.layers"):
        layers = importlib.import_module("config_zoo.inner.layers")
        assert _find("config_zoo.inner.layers.dense", [package]) is layers.dense


@pytest.mark.parametrize(
    ("name", "vocabulary", "message"),
    [
        ("config_zoo.make", [], "add --vocabulary=config_zoo to the command"),
        ("config_zoo.make", ["config_zoo.inner"], "There is no function 'config_zoo.make'."),
        ("config_zoo", ["config_zoo"], "There is no function 'config_zoo'."),
        ("config_zoo.mkae", ["config_zoo"], "Did you mean 'config_zoo.make'?"),
        (
            "config_zoo.inner.layers.danse",
            ["config_zoo"],
            "Did you mean 'config_zoo.inner.layers.de",
        ),
        ("config_zoo.lazy_and_broken", ["config_zoo"], "cannot be imported: ImportError: no modul"),
        (
            "config_zoo.iner.layers.dense",
            ["config_zoo"],
            "config_zoo has no module 'iner' (config_zoo",
        ),
        ("config_zoo._hidden.secret", ["config_zoo"], "is private ('_hidden' begins with"),
        (
            "config_zoo.private.secret",
            ["config_zoo"],
            "config_zoo only imports its module config_zoo._hidden, and",
        ),
        ("config_zoo.math.sqrt", ["config_zoo"], "config_zoo only imports its module math, and"),
        ("config_zoo.gcd", ["config_zoo"], "config_zoo.gcd is not a function of config_zoo: it"),
        ("config_zoo.partial", ["config_zoo"], "There is no function 'config_zoo.partial'."),
        ("config_zoo.Alias.grow", ["config_zoo"], "config_zoo has no module 'Alias'"),
        ("optax.Params", [], "optax.Params is not a function of optax"),
        ("optax.contrib.adamw", [], "Did you mean 'optax.adamw'?"),
        ("optax.muon", [], "Did you mean 'optim.muon'?"),
        ("optim.jax.devices", [], "optim has no module 'jax'"),
        ("schedules.jnp.exp", [], "optim.schedules has no module 'jnp' (schedules.jnp.exp)."),
        ("models.vit.vit", [], "has no module 'vit' (models.vit.vit). Did you mean 'models.vit'?"),
        ("data.prepare.main", [], "trainer.data has no module 'prepare' (data.prepare.main). It"),
        ("losses.jnp", [], "losses.jnp is a module, not a function"),
        ("losses.Loss", [], "losses.Loss is not among the functions of losses that a config may"),
        ("optim.checks.wrong_float", [], "optim has no module 'checks'"),
        ("builtins.eval", [], "There is no function 'builtins.eval'."),
        ("trainer.config.load", [], "There is no function 'trainer.config.load'."),
    ],
)
def test_other_names_are_refused(name, vocabulary, message):
    with pytest.raises(ConfigError) as caught:
        _find(name, vocabulary)
    assert str(caught.value).startswith("a.yaml:1: ")
    assert any(each in str(caught.value) for each in message.split("|")), str(caught.value)


@pytest.mark.parametrize(
    ("package", "message"),
    [
        (
            "nowhere",
            "The package nowhere cannot be imported: there is no module named 'nowhere'; it",
        ),
        ("config_zoo.none", "cannot be imported: there is no module named 'config_zoo.none'"),
        (
            "broken_lab",
            "The package broken_lab cannot be imported: RuntimeError: half done (*.py:2).",
        ),
        ("needy_lab", "ModuleNotFoundError: No module named 'not_installed' (*.py:1)."),
        ("leaving_lab", "The package leaving_lab cannot be imported: SystemExit: 3 (*.py:1)."),
        (
            "wrong_lab",
            "The package wrong_lab cannot be imported: SyntaxError: invalid syntax (*.py:3",
        ),
        (
            "deep_lab.inner",
            "cannot be imported: ZeroDivisionError: division by zero (*inner.py:1).",
        ),
        ("models", "The name 'models' is taken: models.* means trainer.models in a config."),
        ("optax.contrib", "The name 'optax' is taken: optax.* means optax in a config."),
        ("experiment", "The name 'experiment' is taken"),
        ("my lab", "This is not the name of a package, such as my_lab.zoo."),
        ("my_lab.", "This is not the name of a package"),
        ("_private", "This is not the name of a package"),
        ("", "This is not the name of a package"),
        ("../lab", "This is not the name of a package"),
    ],
)
def test_packages_that_cannot_be_a_vocabulary_are_refused(package, message, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_lab.py").write_text("\nraise RuntimeError('half done.')\n")
    (tmp_path / "wrong_lab.py").write_text("\n\na b\n")
    (tmp_path / "deep_lab").mkdir()
    (tmp_path / "deep_lab" / "__init__.py").write_text("")
    (tmp_path / "deep_lab" / "inner.py").write_text("1 / 0\n")
    (tmp_path / "needy_lab.py").write_text("import not_installed\n")
    (tmp_path / "leaving_lab.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError) as caught:
        Builder(_config({}), [package])
    assert str(caught.value).startswith(f"--vocabulary={package}: ")
    assert message in re.sub(r"\(\S*?(inner)?\.py:", r"(*\1.py:", str(caught.value))


def test_a_module_beside_a_named_one_is_not_searched_below_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wide_lab").mkdir()
    for name in ("__init__", "nets", "data"):
        (tmp_path / "wide_lab" / f"{name}.py").touch()
    vocabulary = Vocabulary(["wide_lab.nets"])
    with pytest.raises(ConfigError, match="add --vocabulary=wide_lab to the command") as caught:
        vocabulary.function("wide_lab.data.table")
    assert "Did you mean" not in str(caught.value)
    with pytest.raises(ConfigError, match="Did you mean 'wide_lab.nets.Net'"):
        vocabulary.function("wide_lb.nets.Net")


def test_every_optimizer_and_schedule_of_optax_can_be_named():
    """Each public factory of a transformation or schedule is found, and tells its arguments."""
    vocabulary = Vocabulary()
    found = 0
    for root, module in {"optax": optax, "optax.contrib": optax.contrib}.items():
        for name in dir(module):
            returns = getattr(getattr(module, name), "__annotations__", {}).get("return")
            if name.startswith("_") or returns is None or "Gradient" not in str(returns):
                continue
            assert vocabulary.function(f"{root}.{name}").call is getattr(module, name)
            found += 1
    assert found > 80


def test_importing_the_config_package_imports_neither_jax_nor_the_parsers():
    code = textwrap.dedent("""
        import sys
        import trainer.config
        heavy = ["jax", "optax", "optim", "trainer.engine.experiment"]
        print([name for name in [*heavy, "yaml", "gin"] if name in sys.modules])
        from trainer.config import dump, load
        dump(load(["tests/config/gin_corpus/scopes.gin"], [], ["a=1"]).root)
        print([name for name in [*heavy, "yaml", "gin"] if name in sys.modules])
        """)
    assert python("-c", code) == "[]\n['yaml', 'gin']\n"
