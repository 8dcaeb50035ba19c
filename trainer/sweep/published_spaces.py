"""Search spaces of optimizers: of published studies where there are any, and else of ours.

Each axis is a space as the file of a sweep has it. A published space is that of its source, except
that sources search 1 - b1 on a log scale: here b1 has five values with equal ratios of 1 - b1, the
ends included. What a study searched besides, such as label smoothing, warm-up and clipping, is left
out. The rates are peaks of a schedule with a warm-up and a decay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ALGOPERF = "mlcommons/algorithmic-efficiency, algorithms/archived_paper_baselines/{}"
_SUBMISSIONS = "mlcommons/submissions_algorithms, previous_leaderboards/algoperf_v05/{}"
_MARIN = (
    "marin-community/marin, experiments/optimizer_sweep/Analysis/PhaseI/sweep_configurations.json"
    " ({}, arXiv:2509.02046)"
)


@dataclass(frozen=True)
class SearchSpace:
    """The values among which an optimizer was searched."""

    # argument of the optimizer -> its space in YAML. The argument of an optimizer inside is a
    # path, such as "base_optimizer.learning_rate"; "" is the whole optimizer. For a part, these
    # are arguments of the chain in the example of `optimizer_families`.
    axes: Mapping[str, str]
    source: str  # the repository and the file that have it; "" if it is ours
    remark: str = ""  # a sentence without a full stop about what it is; "" for none
    around: float | None = None  # the point around which a space of ours lies; None for another


def _log(low: float, high: float) -> str:
    return f"!space.log_uniform {{low: {low!r}, high: {high!r}}}"


def _values(*values: float) -> str:
    return f"!space.values {{values: [{', '.join(map(repr, values))}]}}"


def _algoperf(folder: str, remark: str = "", **axes: str) -> SearchSpace:
    return SearchSpace(axes, _ALGOPERF.format(f"{folder}/tuning_search_space.json"), remark)


def _adaptive(folder: str, b1: Sequence[float], lowest_decay: float) -> SearchSpace:
    """Returns the space of one of AlgoPerf's adaptive optimizers, which differ in these numbers."""
    decays = _log(lowest_decay, 1.0)
    return _algoperf(folder, learning_rate=_RATES, b1=_values(*b1), weight_decay=decays)


def _marin(key: str, remark: str = "", **axes: str) -> SearchSpace:
    return SearchSpace(axes, _MARIN.format(key), remark)


def _decade(point: float, of: str, axis: str = "learning_rate") -> SearchSpace:
    """Returns our space where none is published: half a decade on either side of a point."""
    low, high = (float(f"{point * factor:.1g}") for factor in (10**-0.5, 10**0.5))
    return SearchSpace({axis: _log(low, high)}, "", f"a decade around {point:g}, {of}", point)


_RATES = _log(1e-4, 1e-2)
_B1 = (0.8, 0.9, 0.95, 0.98)
_WEIGHT_DECAY = _values(0.0, 0.1, 0.2)
# (learning rate, b2)
_POINTS = ((0.004, 0.9955), (0.003, 0.9955), (0.002, 0.9955), (0.005, 0.62918), (0.001, 0.9955))
_SCHEDULE_FREE = ", ".join(
    f"!optax.contrib.schedule_free_adamw {{learning_rate: {rate!r}, b2: {b2!r},"
    " weight_decay: 0.08}"
    for rate, b2 in _POINTS
)

PUBLISHED: Mapping[str, Sequence[SearchSpace]] = {
    "optax.adamw": [
        _adaptive("adamw", (0.5, 0.776, 0.9, 0.955, 0.98), 5e-3),
        _marin(
            "adamw",
            learning_rate=_values(0.004, 0.008, 0.016, 0.032),
            b1=_values(0.9, 0.95, 0.98),
            b2=_values(0.9, 0.95, 0.98),
            eps=_values(1e-25, 1e-20, 1e-15, 1e-10),
            weight_decay=_WEIGHT_DECAY,
        ),
    ],
    "optax.nadamw": [
        _adaptive("nadamw", (0.9, 0.955, 0.98, 0.991, 0.996), 5e-3),
        _marin(
            "nadamw, 130m",
            learning_rate=_values(0.008, 0.016, 0.032),
            b1=_values(*_B1),
            b2=_values(0.9, 0.95, 0.98),
            eps=_values(1e-25, 1e-20, 1e-15, 1e-10),
            weight_decay=_WEIGHT_DECAY,
        ),
    ],
    "optax.lamb": [_adaptive("lamb", (0.7, 0.808, 0.878, 0.922, 0.95), 1e-3)],
    "optax.adafactor": [
        _algoperf(
            "adafactor",
            "its weight decay and momentum are those of another program, and left out",
            learning_rate=_RATES,
        )
    ],
    "optax.sgd": [
        _algoperf(
            "nesterov",
            "momentum/tuning_search_space.json has the same without Nesterov's momentum; its L2"
            " regularization is no argument of optax.sgd",
            learning_rate=_log(0.02, 5.0),
            momentum=_values(0.7, 0.892, 0.961, 0.986, 0.995),
        )
    ],
    "optim.shampoo": [_adaptive("shampoo", (0.85, 0.924, 0.961, 0.98, 0.99), 5e-3)],
    "optax.contrib.sam": [
        SearchSpace(
            {
                "optimizer.learning_rate": _RATES,
                "optimizer.b1": _values(0.57, 0.749, 0.853, 0.914, 0.95),
                "optimizer.weight_decay": _log(1e-2, 0.2),
                "adv_optimizer.args.1.learning_rate": _values(0.01, 0.02, 0.05),
            },
            _ALGOPERF.format("sam/tuning_search_space.json"),
        )
    ],
    "optax.contrib.schedule_free_adamw": [
        SearchSpace(
            {"": f"!space.values {{values: [{_SCHEDULE_FREE}]}}"},
            _SUBMISSIONS.format(
                "submissions/external_tuning/schedule_free_adamw/tuning_search_space.json"
            ),
            "a list of five points, one for each trial",
        )
    ],
    "optim.muon": [
        _marin(
            "muon",
            "the embedding, head and norms took AdamW with 0.1 to 0.3 of this rate",
            learning_rate=_values(0.008, 0.016, 0.032, 0.064, 0.128),
            momentum=_values(*_B1),
            weight_decay=_WEIGHT_DECAY,
        )
    ],
    "optim.soap": [
        _marin(
            "soape, 130m, twice Chinchilla's tokens",
            "every 10 updates, in blocks of 128 to 512 rows and columns, which optim.soap lacks",
            learning_rate=_values(0.004, 0.008, 0.016),
            b1=_values(0.8, 0.9, 0.95),
            b2=_values(0.9, 0.95, 0.98, 0.99),
            shampoo_beta=_values(0.9, 0.95, 0.98, 0.99),
            weight_decay=_WEIGHT_DECAY,
        )
    ],
    "parts.psgd": [
        SearchSpace(
            {
                "learning_rate": _values(0.0005, 0.001, 0.002, 0.004, 0.008),
                "before.0.decay": _values(0.9, 0.95, 0.98),
                "before.1.precond_lr": _values(0.1, 0.2),
                "after.0.rate": _values(0.0, 0.5, 0.7, 0.9),
            },
            "marin-community/marin, experiments/optimizer_sweep/PhaseI/exp725_kronsweep_130M_1.py"
            " (arXiv:2509.02046)",
            "in the chain of python -m trainer optimizers parts.psgd; the factors were updated at"
            " every step at first and every 10 or 20 steps in the end, in blocks of 128 to 512 rows"
            " and columns, which parts.psgd lacks",
        )
    ],
    "optim.mars": [
        _marin(
            "mars",
            learning_rate=_values(0.008, 0.016, 0.032),
            b1=_values(*_B1),
            b2=_values(0.9, 0.95, 0.98, 0.99),
            gamma=_values(0.0125, 0.025, 0.05, 0.1),
            weight_decay=_WEIGHT_DECAY,
        )
    ],
    "optim.cautious": [
        SearchSpace(
            {
                "base_optimizer.learning_rate": _values(0.008, 0.016, 0.032),
                "base_optimizer.b1": _values(*_B1),
                "base_optimizer.b2": _values(0.9, 0.95, 0.98),
                "base_optimizer.weight_decay": _WEIGHT_DECAY,
            },
            _MARIN.format("cautious, 520m"),
        )
    ],
    "optax.lion": [
        _marin(
            "lion, 130m, once Chinchilla's tokens",
            learning_rate=_values(0.0005, 0.001, 0.002, 0.004, 0.008),
            b1=_values(*_B1),
            b2=_values(0.9, 0.95, 0.98),
            weight_decay=_values(*(n / 10 for n in range(11))),
        )
    ],
    "optax.contrib.sophia": [
        _marin(
            "sophia, 130m and 300m",
            learning_rate=_values(0.002, 0.004, 0.008, 0.016, 0.032),
            b1=_values(*_B1),
            b2=_values(0.9, 0.95, 0.98, 0.99, 0.995),
            weight_decay=_values(0.0, 0.1, 0.2, 0.3),
        )
    ],
}

_TORCH = "the default of torch.optim"
_DEFAULT = "its default"
_THIRD_PARTY = "the default of pytorch_optimizer 4.1"
_OUR_CONFIG = "the rate of its config in configs/optimizers"

OURS: Mapping[str, SearchSpace] = {
    "optax.adam": _decade(1e-3, _TORCH),
    "optax.amsgrad": _decade(1e-3, _TORCH),
    "optax.adamax": _decade(2e-3, _TORCH),
    "optax.adamaxw": _decade(2e-3, "as for optax.adamax"),
    "optax.nadam": _decade(2e-3, _TORCH),
    "optax.radam": _decade(1e-3, _TORCH),
    "optax.rmsprop": _decade(1e-2, _TORCH),
    "optax.adagrad": _decade(1e-2, _TORCH),
    "optax.adadelta": _decade(1.0, _TORCH),
    "optax.rprop": _decade(1e-2, _TORCH),
    "optim.rprop": _decade(1e-2, _DEFAULT),
    "optax.adabelief": _decade(1e-3, _THIRD_PARTY),
    "optax.adan": _decade(1e-3, _THIRD_PARTY),
    "optax.yogi": _decade(1e-2, _THIRD_PARTY),
    "optax.contrib.adopt": _decade(1e-3, _THIRD_PARTY),
    "optax.contrib.madgrad": _decade(1e-2, "our choice"),
    "optax.fromage": _decade(1e-2, _THIRD_PARTY),
    "optim.scion": _decade(
        2**-6, "the rate of its authors' program for a perceptron, with the radius 1"
    ),
    "optax.contrib.muon": _decade(0.02, "the default of Keller Jordan's program"),
    "optax.contrib.galore": _decade(1e-2, "our choice"),
    "optax.contrib.cocob": _decade(1.0, _DEFAULT),
    "optax.contrib.dadapt_adamw": _decade(1.0, _DEFAULT),
    "optax.contrib.prodigy": _decade(1.0, _DEFAULT),
    "optax.contrib.momo": _decade(1.0, _DEFAULT),
    "optax.contrib.momo_adam": _decade(1e-2, _DEFAULT),
    "optax.contrib.schedule_free_sgd": _decade(1.0, _DEFAULT),
    "optax.contrib.dog": _decade(1.0, "at which it has nothing to tune"),
    "optax.contrib.dowg": _decade(1.0, "at which it has nothing to tune"),
    "optax.polyak_sgd": _decade(1.0, _DEFAULT, "max_learning_rate"),
    "optax.contrib.dpsgd": _decade(0.5, _OUR_CONFIG),
    "optax.contrib.ademamix": _decade(1e-3, "as for Adam"),
    "optax.contrib.simplified_ademamix": _decade(1e-4, "a tenth of Adam's: its momentum is a sum"),
    "optax.contrib.acprop": _decade(1e-3, "as for Adam"),
    "optax.optimistic_adam": _decade(1e-3, "as for Adam"),
    "optax.optimistic_adam_v2": _decade(1e-3, "as for Adam"),
    "optax.novograd": _decade(1e-2, "ten times Adam's"),
    "optax.sign_sgd": _decade(1e-3, "as for Lion"),
    "optax.signum": _decade(1e-3, "as for Lion"),
    "optax.sm3": _decade(0.1, "as for Adagrad with a momentum"),
    "optax.lars": _decade(1.0, "which its trust ratio multiplies"),
    "optax.noisy_sgd": _decade(0.1, "as for SGD"),
    "optax.optimistic_gradient_descent": _decade(0.1, "as for SGD"),
    "optax.contrib.schedule_free": _decade(0.5, "more than SGD takes alone"),
    "optim.chain": _decade(0.02, "as for Muon"),
    "optim.grams": _decade(1e-3, "as for Adam", "base_optimizer.learning_rate"),
    "optax.lookahead": _decade(3e-3, _OUR_CONFIG, "fast_optimizer.learning_rate"),
    "optax.contrib.mechanize": _decade(1.0, _OUR_CONFIG, "base_optimizer.learning_rate"),
}


def spaces_of(name: str) -> Sequence[SearchSpace]:
    """Returns the published search spaces of an optimizer, or else ours; none if it has none.

    Example:
        >>> spaces_of("optax.adamw")[0].axes["learning_rate"]
        '!space.log_uniform {low: 0.0001, high: 0.01}'
    """
    return PUBLISHED.get(name, [OURS[name]] if name in OURS else [])
