"""The compiled step against a step written by hand in jax and optax, and the laws of a program."""

import re
from functools import partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics

import optim
from tests.runs import ROOT
from trainer import metrics
from trainer.engine.contracts import ComponentError
from trainer.engine.datasets import ranking_warnings
from trainer.engine.experiment import Experiment
from trainer.engine.program import Program
from trainer.engine.sharding import ShardingRules, state_shardings


class Net(nn.Module):
    """Two dense layers, so that a group can be named and another frozen."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(8, name="first")(x))
        return nn.Dense(3, name="last")(x)


class NetWithStatistics(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(x)
        return nn.Dense(3, name="last")(x)


class NetWithDropout(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        return nn.Dense(3, name="last")(nn.Dropout(0.5, deterministic=not train)(x))


class Points:
    """Random points in three classes: 40 to train on, 11 to test on, in batches of 8."""

    batch_size, num_examples, num_eval_examples, fingerprint = 8, 40, 11, "points"
    element_spec = {
        "image": jax.ShapeDtypeStruct((8, 5), jnp.float32),
        "label": jax.ShapeDtypeStruct((8,), jnp.int32),
    }

    def __init__(self):
        draw = np.random.default_rng(0)
        self.x = draw.normal(size=(51, 5)).astype(np.float32)
        self.y = draw.integers(0, 3, 51).astype(np.int32)

    def train(self, batch_index, seed):
        while True:
            take = np.random.default_rng((seed, batch_index)).integers(0, 40, 8)
            yield {"image": self.x[take], "label": self.y[take]}
            batch_index += 1

    def evaluate(self):
        yield {"image": self.x[40:48], "label": self.y[40:48], "mask": np.ones(8, np.float32)}
        rest = np.r_[48, 49, 50, 50, 50, 50, 50, 50]
        mask = np.asarray([1, 1, 1, 0, 0, 0, 0, 0], np.float32)
        yield {"image": self.x[rest], "label": self.y[rest], "mask": mask}


def cross_entropy(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"])


def hit(outputs, batch, **_):
    return (outputs.argmax(-1) == batch["label"]).astype(jnp.float32)


def experiment(**changes):
    given = dict(
        model=Net(),
        data=Points(),
        loss=cross_entropy,
        optimizer=partial(optax.adam, learning_rate=0.05),
        metrics={"accuracy": clu_metrics.Average.from_fun(hit)},
        steps=20,
        log_every=5,
        eval_every=10,
        save_every=10,
    )
    return Experiment(**(given | changes))


def run(program, steps, seed=None, start=0):
    state = program.init(seed)
    batches = program.experiment.data.train(start, program.experiment.seed)
    history = []
    for _ in range(steps):
        state, metrics = program.step(state, program.feed.to_devices(next(batches)))
        history.append({k: float(v) for k, v in metrics.items()})
    return state, history


def test_each_step_draws_random_numbers_of_its_own_also_after_a_restart():
    given = dict(model=NetWithDropout(), optimizer=partial(optax.sgd, learning_rate=0.0))
    program = Program(experiment(**given))
    batch = next(Points().train(0, 0))

    def losses_from(state, steps):
        found = []
        for _ in range(steps):
            state, metrics = program.step(state, program.feed.to_devices(batch))
            found.append(float(metrics["train/loss"]))
        return state, found

    state, first = losses_from(program.init(), 4)  # nothing but the dropout differs
    assert len(set(first)) == 4
    kept = jax.tree.map(np.asarray, jax.device_get(state))
    _, rest = losses_from(state, 4)
    assert len({*first, *rest}) == 8
    again = jax.tree.map(jax.device_put, kept)
    assert losses_from(again, 4)[1] == rest
    assert losses_from(program.init(), 8)[1] == first + rest
    assert not {*losses_from(program.init(1), 4)[1]} & {*first}


def test_a_run_equals_a_loop_written_by_hand():
    schedule = optax.linear_schedule(0.1, 0.01, 15)
    program = Program(
        experiment(
            optimizer=partial(
                optim.optimizer,
                {
                    "first": optim.group("first/.*", partial(optax.adamw, schedule)),
                    "last": optim.group(".*", partial(optax.sgd, 0.1, momentum=0.9)),
                },
                clip_norm=0.5,
            )
        )
    )
    state, history = run(program, 20)
    # By hand: flax's module, optax's own partition and clip, its schedule inside the optimizer.
    net, data = Net(), Points()
    params = jax.device_get(program.init().params)
    tx = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.partition(
            {"a": optax.adamw(schedule), "b": optax.sgd(0.1, momentum=0.9)},
            {"first": {"bias": "a", "kernel": "a"}, "last": {"bias": "b", "kernel": "b"}},
        ),
    )
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        def loss(p):
            return cross_entropy(net.apply({"params": p}, batch["image"]), batch).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, optax.tree.norm(grads)

    for i, batch in zip(range(20), data.train(0, 0), strict=False):
        params, opt_state, value, norm = step(params, opt_state, batch)
        assert history[i]["train/loss"] == pytest.approx(float(value), rel=2e-5)
        assert history[i]["grad_norm"] == pytest.approx(float(norm), rel=2e-5)
        assert history[i]["learning_rate/first"] == pytest.approx(float(schedule(i)), rel=1e-6)
        assert history[i]["learning_rate/last"] == pytest.approx(0.1)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), state.params, params)


@pytest.mark.long
def test_the_last_partial_batch_has_its_own_weight():
    program = Program(experiment())
    state, _ = run(program, 3)
    results = program.evaluation.run_split(state, "test")
    data = program.experiment.data
    outputs = Net().apply({"params": state.params}, data.x[40:])
    wanted = float(np.mean(np.argmax(outputs, -1) == data.y[40:]))
    losses = cross_entropy(outputs, {"label": data.y[40:]})
    assert results["accuracy"] == pytest.approx(wanted, abs=1e-6)
    assert results["loss"] == pytest.approx(float(np.mean(losses)), rel=1e-5)


def test_microbatches_give_the_gradient_of_the_whole_batch():
    whole, one = run(Program(experiment()), 5)
    parts, four = run(Program(experiment(microbatches=4)), 5)
    assert four[-1]["train/loss"] == pytest.approx(one[-1]["train/loss"], rel=1e-4)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), whole.params, parts.params
    )


class Reused(Points):
    """Fills the same array again and again, as a data set in C might."""

    def train(self, batch_index, seed):
        image = np.empty((8, 5), np.float32)
        for batch in super().train(batch_index, seed):
            image[:] = batch["image"]
            yield {**batch, "image": image[:]}


def test_a_batch_cannot_change_while_a_step_may_read_it():
    program = Program(experiment(data=Reused()))
    with pytest.raises(ValueError, match="read-only"):
        run(program, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda batch: {k: v for k, v in batch.items() if k != "mask"}, "with a 'mask'"),
        (lambda batch: {**batch, "image": batch["image"][:, :4]}, "kernel"),
    ],
)
def test_an_impossible_evaluation_is_reported_before_the_first_step(change, words):
    class Odd(Points):
        def evaluate(self):
            return map(change, super().evaluate())

    program = Program(experiment(data=Odd()))
    with pytest.raises(Exception, match=words):
        program.evaluation.check(program._first.find_shapes())


class Masked(Points):
    """Gives masks that `change` made from the right ones, of a number of batches."""

    def __init__(self, change, batches=2):
        super().__init__()
        self.change, self.batches = change, batches

    def evaluate(self):
        for number, batch in enumerate(super().evaluate()):
            if number < self.batches:
                yield {**batch, "mask": self.change(batch["mask"], number)}


def later(change):
    """Changes the mask of the second batch, which the plan does not see."""
    return lambda mask, number: change(mask) if number else mask


WRONG_MASKS = [
    (lambda mask: mask[:3], r"float32\[3\].*float32\[8\]"),
    (lambda mask: mask[:1], r"float32\[1\].*float32\[8\]"),
    (lambda mask: mask[0], r"float32.*float32\[8\]"),
    (lambda mask: mask[:, None], r"float32\[8, 1\].*float32\[8\]"),
    (lambda mask: mask[None], r"float32\[1, 8\].*float32\[8\]"),
    (lambda mask: mask.astype(bool), r"bool\[8\].*float32\[8\]"),
    (lambda mask: mask.astype(np.int32), r"int32\[8\].*float32\[8\]"),
    (lambda mask: mask.astype(np.float64), r"float64\[8\].*float32\[8\]"),
    (lambda mask: mask.tolist(), r"a list.*float32\[8\]"),
    (lambda mask: mask / 2, r"0\.5.*1 for an example"),
    (lambda mask: mask * np.float32("nan"), r"nan.*1 for an example"),
]


@pytest.mark.parametrize(
    ("change", "words", "when"),
    [(*wrong, "plan") for wrong in WRONG_MASKS] + [(*wrong, "run") for wrong in WRONG_MASKS[::5]],
)
def test_a_mask_without_one_float_per_example_is_refused(change, words, when):
    wrong = later(change) if when == "run" else lambda mask, number: change(mask)
    program = Program(experiment(data=Masked(wrong)))
    with pytest.raises(ComponentError, match=rf"'mask'.*{words}") as caught:
        if when == "run":
            program.evaluation.check(program.abstract_state())
            program.evaluation.run_split(program.init(), "test")
        else:
            program.evaluation.check(program.abstract_state())
    assert caught.value.component == "data"


@pytest.mark.parametrize("data", [Masked(lambda m, _: 0 * m), Masked(lambda m, _: m, batches=0)])
def test_an_evaluation_without_an_example_is_an_error(data):
    program = Program(experiment(data=data))
    with pytest.raises(ComponentError, match=r"evaluate\(\) yielded no example") as caught:
        program.evaluation.run_split(program.init(), "test")
    assert caught.value.component == "data"


def test_a_batch_of_padding_does_not_change_the_result():
    class Filled(Points):
        def evaluate(self):
            *whole, last = super().evaluate()
            nothing = {**last, "mask": np.zeros(8, np.float32)}
            yield from [nothing, *whole, nothing, last]

    results = [
        program.evaluation.run_split(program.init(), "test")
        for program in (Program(experiment()), Program(experiment(data=Filled())))
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((7,), np.float32, r"float32\[7\]\. It must be float32\[8\]"),
        ((8,), np.int32, r"int32\[8\]\. It must be float32\[8\]"),
        ((8, 2, 2), np.float32, r"float32\[8, 2, 2\].*float32\[8, positions\]"),
        ((8, 3), np.float32, r"float32\[8, 3\], and the loss returned float32\[8\]"),
    ],
)
def test_a_mask_of_training_that_does_not_fit_is_refused(shape, dtype, words):
    class MaskedInTraining(Points):
        element_spec = Points.element_spec | {"mask": jax.ShapeDtypeStruct(shape, dtype)}

    with pytest.raises(ComponentError, match=f"'mask' .*{words}") as caught:
        program = Program(experiment(data=MaskedInTraining()))
        program.trace(program.abstract_state())
    assert caught.value.component == "data"


@pytest.mark.parametrize("value", [0.5, np.nan, -1])
def test_a_mask_of_training_is_one_or_zero(value):
    class MaskedInTraining(Points):
        element_spec = Points.element_spec | {"mask": jax.ShapeDtypeStruct((8,), np.float32)}

    data = MaskedInTraining()
    batch = next(data.train(0, 0)) | {"mask": np.full(8, value, np.float32)}
    with pytest.raises(ComponentError, match=f"train.. yielded a 'mask' with the value {value}"):
        Program(experiment(data=data)).feed.to_devices(batch)


@pytest.mark.parametrize("name", ["x=__import__('os').abort()):\n y='#", "top-1", "class", "a/b"])
def test_a_metric_may_have_any_name_and_names_are_not_executed(name):
    accuracy = clu_metrics.Average.from_fun(hit)
    program = Program(experiment(metrics={name: accuracy, "merge": accuracy}))
    results = program.evaluation.run_split(program.init(), "test")
    assert set(results) == {"loss", name, "merge"} and results[name] == results["merge"]


class WholeBatches(Points):
    def evaluate(self):
        yield next(super().evaluate())


def test_metrics_of_clu_are_accepted():
    metrics = {"theirs": clu_metrics.Accuracy, "ours": clu_metrics.Average.from_fun(hit)}
    program = Program(experiment(metrics=metrics, data=WholeBatches()))
    results = program.evaluation.run_split(program.init(), "test")
    assert results["theirs"] == pytest.approx(results["ours"])


def scalar_loss(outputs, batch):
    return cross_entropy(outputs, batch).mean()


def loss_of_other_data(outputs, batch):
    return outputs[:, 0] - batch["target"]


def bad_model(**changes):
    def init(key, batch):
        return {"w": jnp.ones(3)}, {}

    def apply(params, model_state, batch, *, key, train):
        raise RuntimeError("the flux capacitor is empty")

    return SimpleNamespace(**({"init": init, "apply": apply} | changes))


@pytest.mark.parametrize(
    ("changes", "component", "words"),
    [
        ({"metrics": clu_metrics.Accuracy}, "metrics", "a dict from names to metrics"),
        ({"metrics": {"a": clu_metrics.Average.from_fun}}, "metrics", "'a' is a method"),
        ({"metrics": {"loss": clu_metrics.Accuracy}}, "metrics", "'loss', which is always"),
        ({"metrics": {"t": clu_metrics.Average.from_output("target")}}, "metrics", "target"),
        ({"model": bad_model(apply=None)}, "model", "init.* and apply"),
        ({"model": bad_model()}, "model", r"RuntimeError: .*capacitor.*test_program.py:\d+"),
        ({"model": bad_model(init=lambda key, batch: None)}, "model", "TypeError"),
        ({"loss": scalar_loss}, "loss", r"\(8,\) .* here, .* but this one returned float32\[\]"),
        ({"loss": lambda o, b: o[None]}, "loss", r"returned float32\[1, 8, 3\]"),
        ({"loss": lambda o, b: o[:7]}, "loss", r"returned float32\[7, 3\]"),
        ({"loss": lambda o, b: (o, o, o)}, "loss", "returned a tuple"),
        ({"loss": lambda o, b: (o, o)}, "loss", r"\(losses, aux\), .* is float32\[8, 3\]"),
        ({"loss": lambda o, b: (o, {"a": o})}, "loss", r"'a' as float32\[8, 3\]. It must be a sc"),
        ({"loss": lambda o, b: (o, {"a": "b"})}, "loss", "'a' as a str. It must be a scalar"),
        (
            {"loss": lambda o, b: (o, {1: 0.0})},
            "loss",
            "names to scalars, .* a dict with the keys 1",
        ),
        ({"loss": lambda o, b: (o, {"loss": 0.0})}, "loss", "called 'loss', which is the name"),
        ({"loss": lambda o, b: (o, {"accuracy": 0.0})}, "loss", "'accuracy', and metrics has"),
        ({"train_metrics": clu_metrics.Accuracy}, "train_metrics", "a dict from names to metrics"),
        ({"train_metrics": {"loss": clu_metrics.Accuracy}}, "train_metrics", "always computed"),
        ({"loss": lambda o, b: o.argmax(-1)}, "loss", "returned int32"),
        ({"loss": lambda o, b: None}, "loss", "returned None"),
        ({"loss": loss_of_other_data}, "loss", r"KeyError: 'target' \(.*test_program.py:\d+\)"),
    ],
)
def test_a_component_that_breaks_its_contract_is_named(changes, component, words):
    with pytest.raises(ComponentError, match=words) as caught:
        program = Program(experiment(**changes))
        program.evaluation.check(program.abstract_state())
    assert caught.value.component == component and len(str(caught.value).splitlines()) <= 3


class Targets(Points):
    """The same data, whose labels are called "target"."""

    def __init__(self):
        super().__init__()
        self.element_spec = self._renamed(self.element_spec)

    @staticmethod
    def _renamed(batch):
        return {"target" if key == "label" else key: x for key, x in batch.items()}

    def train(self, batch_index, seed):
        return map(self._renamed, super().train(batch_index, seed))

    def evaluate(self):
        return map(self._renamed, super().evaluate())


def reads_labels(logits, labels, **_):
    return (logits.argmax(-1) == labels.reshape(-1)).astype(jnp.float32)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (clu_metrics.Accuracy, "clu.metrics.Accuracy reads the keywords logits, labels.\n"),
        (clu_metrics.Average.from_fun(reads_labels), "'NoneType' object has no attribute"),
        (clu_metrics.Average.from_output("lables"), "KeyError: 'lables'.\n"),
        (metrics.accuracy(), "metrics.accuracy reads 'label' from the batch, but the data set"),
        (metrics.top_k_accuracy(2), "metrics.top_k_accuracy reads 'label' from the batch"),
        (metrics.mean_squared_error("y"), "metrics.mean_squared_error reads 'y' from the batch"),
        (metrics.mean_absolute_error("y"), "metrics.mean_absolute_error reads 'y' from the batch"),
    ],
)
def test_an_unknown_keyword_of_a_metric_gets_a_list_of_keywords_and_fields(metric, words):
    def loss(outputs, batch):
        return cross_entropy(outputs, {"label": batch["target"]})

    program = Program(experiment(data=Targets(), metrics={"acc": metric}, loss=loss))
    with pytest.raises(ComponentError) as caught:
        program.evaluation.check(program.abstract_state())
    text = str(caught.value)
    assert text.startswith("The metric 'acc' cannot be computed: ") and words in text
    assert "outputs and logits (the model's outputs, float32[8, 3])" in text
    assert "labels (the field 'label' of the batch), batch, loss and mask.\n" in text
    assert "The batch has the fields image float32[8, 5], target int32[8]." in text
    assert "None is called 'label'. The argument `labels` of metrics.accuracy names" in text


def test_the_page_lists_the_keywords_of_metrics():
    seen = {}

    def note(**given):
        seen.update(given)
        return given["loss"]

    program = Program(experiment(metrics={"acc": clu_metrics.Average.from_fun(note)}))
    program.evaluation.check(program.abstract_state())
    page = (ROOT / "docs" / "protocols.md").read_text()
    table = page.partition("`from_model_output` is called with these keywords:")[2].split("\n\n")[1]
    listed = re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines()))
    assert listed == list(seen)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: {"image": b["image"]}, "element_spec .* has image, label, but it yielded"),
        (lambda b: None, "but it yielded None"),
        (lambda b: b | {"image": b["image"][:7]}, r"image as float32\[8, 5\].*float32\[7, 5\]"),
        (lambda b: b | {"image": b["image"].astype("f8")}, "yielded float64"),
        (lambda b: b | {"label": list(b["label"])}, "label as int32.*a list"),
    ],
)
def test_a_batch_that_differs_from_element_spec_is_refused(change, words):
    program = Program(experiment())
    with pytest.raises(ComponentError, match=words):
        program.feed.to_devices(change(next(program.experiment.data.train(0, 0))))


def test_evaluation_uses_the_average_of_the_parameters():
    program = Program(experiment(ema_decay=0.8))
    state = program.init()
    average = jax.device_get(state.params)
    batches = program.experiment.data.train(0, 0)
    for _ in range(6):
        state, _ = program.step(state, program.feed.to_devices(next(batches)))
        average = jax.tree.map(lambda a, p: 0.8 * a + 0.2 * np.asarray(p), average, state.params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), state.ema, average)
    results = program.evaluation.run_split(state, "test")
    outputs = Net().apply({"params": average}, program.experiment.data.x[40:])
    losses = cross_entropy(outputs, {"label": program.experiment.data.y[40:]})
    assert results["loss"] == pytest.approx(float(np.mean(losses)), rel=1e-4)


def test_the_average_is_taken_of_the_optimizers_evaluation_parameters():
    free = partial(optax.contrib.schedule_free_sgd, 0.1)
    ends = []
    for decay in (None, 0.0):  # an average that forgets all but the last
        program = Program(experiment(optimizer=free, ema_decay=decay))
        state, _ = run(program, 5)
        ends.append(program.evaluation.run_split(state, "test"))
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


class Waves(nn.Module):
    """One complex layer; the outputs are real."""

    @nn.compact
    def __call__(self, x):
        def start(key, shape):
            real, imaginary = jax.random.normal(key, (2, *shape))
            return real + 1j * imaginary

        return jnp.abs(x @ self.param("kernel", start, (5, 3)))


@pytest.mark.long
def test_complex_parameters_keep_their_imaginary_part():
    program = Program(experiment(model=Waves(), optimizer=partial(optax.sgd, 0.1), ema_decay=0.0))
    state = program.init()
    batch = next(program.experiment.data.train(0, 0))

    def objective(params):
        return jnp.mean(cross_entropy(Waves().apply({"params": params}, batch["image"]), batch))

    wanted = optax.tree.norm(jax.grad(objective)(state.params))
    state, metrics = program.step(state, program.feed.to_devices(batch))
    assert float(metrics["grad_norm"]) == pytest.approx(float(wanted), rel=1e-5)
    jax.tree.map(np.testing.assert_array_equal, state.ema, state.params)


def test_model_state_is_carried_and_used():
    # Flax's rule for running statistics, by hand: mean <- 0.9 mean + 0.1 batch mean.
    program = Program(experiment(model=NetWithStatistics(), optimizer=partial(optax.sgd, 0.0)))
    state = program.init()
    batches, by_hand = program.experiment.data.train(0, 0), np.zeros(5)
    for _ in range(4):
        batch = next(batches)
        by_hand = 0.9 * by_hand + 0.1 * batch["image"].mean(0)
        state, _ = program.step(state, program.feed.to_devices(batch))
    (mean,) = [
        x for p, x in jax.tree_util.tree_leaves_with_path(state.model_state) if "mean" in str(p)
    ]
    np.testing.assert_allclose(mean, by_hand, rtol=1e-5, atol=1e-7)


def test_one_compilation_and_the_same_avals(compilations):
    program = Program(experiment(ema_decay=0.9, on_nonfinite="skip"))
    state = program.init()
    before = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type, x.sharding), state)
    batches = program.experiment.data.train(0, 0)
    with compilations() as names:
        for _ in range(5):
            state, _ = program.step(state, program.feed.to_devices(next(batches)))
    assert names == ["jit(packed_step)"]
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type, x.sharding), state) == before


def test_the_abstract_state_is_the_state():
    program = Program(experiment(precision="bfloat16", ema_decay=0.9))
    wanted = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), program.abstract_state())
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), program.init()) == wanted
    assert program.abstract_state().params["first"]["kernel"].dtype == jnp.bfloat16


def test_the_first_state_is_traced_once():
    program = Program(experiment())
    init, traces = program.experiment.model.init, []
    counting = SimpleNamespace(
        init=lambda *given: traces.append(1) or init(*given), apply=program.experiment.model.apply
    )
    object.__setattr__(program.experiment, "model", counting)
    program.abstract_state()
    program.init()
    program.init(seed=7)
    assert len(traces) == 1


@pytest.mark.parametrize("precision", ["bfloat16", "mixed"])
def test_low_precision_still_learns(precision):
    program = Program(experiment(precision=precision, steps=60))
    state, history = run(program, 60)
    assert history[-1]["train/loss"] < 0.8 * history[0]["train/loss"]
    kernel = state.params["first"]["kernel"]
    assert kernel.dtype == (jnp.bfloat16 if precision == "bfloat16" else jnp.float32)


def test_a_batch_that_is_not_finite_is_skipped():
    program = Program(experiment(on_nonfinite="skip", model=NetWithStatistics(), ema_decay=0.9))
    state, _ = run(program, 2)
    kept = jax.device_get(state)
    bad = dict(next(program.experiment.data.train(2, 0)))
    bad["image"] = np.full_like(bad["image"], np.inf)
    state, metrics = program.step(state, program.feed.to_devices(bad))
    for name in ("params", "model_state", "ema"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name), getattr(kept, name))
    assert int(state.step) == 3 and int(metrics["skipped"]) == 1


@pytest.mark.parametrize("action", ["skip", "rollback", "halt"])
def test_a_step_that_makes_parameters_infinite_counts_as_not_finite(action):
    rate = lambda t: jnp.where(t == 2, jnp.inf, 0.1)  # noqa: E731
    program = Program(
        experiment(on_nonfinite=action, optimizer=partial(optax.sgd, rate), ema_decay=0.9)
    )
    state, history = run(program, 4 if action == "skip" else 3)
    assert np.isfinite(history[2]["train/loss"]) and np.isfinite(history[2]["grad_norm"])
    if action == "halt":
        assert all(bool(m["finite"]) for m in history)  # of the loss and the gradients
        assert not bool(program.params_finite(state))
        return
    assert [bool(m["finite"]) for m in history[:3]] == [True, True, False]
    if action == "skip":
        assert bool(history[3]["finite"]) and int(history[3]["skipped"]) == 1
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.params, state.ema)))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*seed:DeprecationWarning")  # optax's, of its own argument
def test_an_optimizer_gets_the_gradients_of_single_examples():
    # Abadi et al. 2016, algorithm 1, without its noise: the mean of clipped gradients.
    private = partial(optax.contrib.dpsgd, 0.5, l2_norm_clip=0.3, noise_multiplier=0.0, seed=1)
    groups = {
        "private": optim.group("first/.*", private),
        "rest": optim.group(".*", partial(optax.sgd, 0.5)),
    }
    program = Program(experiment(optimizer=optim.optimizer(groups)))
    state = program.init()
    batch = next(program.experiment.data.train(0, 0))
    start = jax.device_get(state.params)

    def loss_of(params, i):
        one = {name: x[i : i + 1] for name, x in batch.items()}
        return cross_entropy(Net().apply({"params": params}, one["image"]), one)[0]

    singles = [jax.grad(loss_of)(start, i) for i in range(8)]
    norms = [float(optax.tree.norm(g["first"])) for g in singles]
    scales = [min(1.0, 0.3 / norm) for norm in norms]
    clipped = [optax.tree.scale(s, g) for s, g in zip(scales, singles, strict=True)]
    assert max(norms) > 0.3
    after, _ = program.step(state, program.feed.to_devices(batch))
    for name, grads in (("first", clipped), ("last", singles)):
        wanted = jax.tree.map(
            lambda p, *g: p - 0.5 * sum(g) / 8, start[name], *[g[name] for g in grads]
        )
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), after.params[name], wanted
        )


@pytest.mark.filterwarnings("ignore:.*seed:DeprecationWarning")
@pytest.mark.parametrize(
    "changes", [{"microbatches": 2}, {"model": NetWithStatistics()}], ids=["parts", "statistics"]
)
def test_gradients_of_single_examples_need_whole_batches_and_models_without_state(changes):
    private = partial(optax.contrib.dpsgd, 0.5, 0.3, 0.0, seed=1)
    program = Program(experiment(optimizer=private, **changes))
    with pytest.raises(optim.GroupError, match="optax.contrib.dpsgd needs the gradient of every"):
        program.trace(program.abstract_state())


def test_another_seed_changes_the_first_state_and_does_not_compile_again(compilations):
    program = Program(experiment())
    with compilations() as names:
        (one, _), (same, _), (other, _) = (run(program, 2, seed) for seed in (1, 1, 2))
    assert names.count("jit(packed_step)") == 1
    jax.tree.map(np.testing.assert_array_equal, one.params, same.params)
    assert not np.array_equal(one.params["first"]["kernel"], other.params["first"]["kernel"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"log_every": -5}, "log_every must be at least 1, got -5"),
        ({"microbatches": 3}, "does not divide the batch size 8"),
        ({"ema_decay": 1.0}, "at least 0 and less than 1"),
        ({"best_metric": "acuracy"}, "accuracy"),
        ({"seed": -1}, "between 0"),
    ],
)
def test_a_field_out_of_its_range_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        experiment(**changes)


@pytest.mark.parametrize(
    ("best", "mode", "warned"),
    [
        ("loss", "max", True),
        ("eval/loss", "max", True),
        ("loss", "min", False),
        ("perplexity", "max", True),
        ("eval/error", "max", True),
        ("accuracy", "max", False),
        ("accuracy", "min", True),
        ("eval/top", "min", True),
        ("unknown", "min", False),
        (None, "max", False),
    ],
)
def test_the_plan_warns_of_a_best_checkpoint_that_is_the_worst(best, mode, warned):
    chosen = {
        "accuracy": metrics.accuracy(),
        "top": metrics.top_k_accuracy(),
        "unknown": clu_metrics.Average.from_output("loss"),
        "perplexity": metrics.perplexity(),
        "error": metrics.mean_squared_error(),
    }
    said = ranking_warnings(experiment(best_metric=best, best_mode=mode, metrics=chosen))
    found = [text for text in said if "best_mode" in text]
    assert bool(found) == warned
    wanted = "max" if mode == "min" else "min"
    assert all(best in text and f"Set best_mode to '{wanted}'." in text for text in found)


def test_a_mesh_with_more_devices_than_exist_is_refused():
    with pytest.raises(ValueError, match="needs 64 devices"):
        Program(experiment(mesh={"data": 64}))
    with pytest.raises(ValueError, match="'model'"):
        Program(experiment(mesh={"model": 1}))


def test_a_stacked_state_keeps_the_sharding_of_its_parameters():
    mesh = jax.sharding.AbstractMesh((4,), ("fsdp",))
    leaf = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {"head": {"kernel": leaf((8, 3)), "bias": leaf((3,))}}
    state = {
        "params": jax.tree.map(lambda x: leaf((16, *x.shape)), params),  # 16 trials
        "mu": params,
        "other": {"head": {"kernel": leaf((8, 8, 5))}},
        "count": leaf(()),
    }
    found = state_shardings(ShardingRules(mesh), state, params)
    split = jax.tree.map(lambda x: tuple(x.spec), found)
    assert split["params"]["head"]["kernel"] == (None, "fsdp", None)
    assert split["mu"]["head"]["kernel"] == ("fsdp", None)
    assert split["other"]["head"]["kernel"] == split["count"] == ()
