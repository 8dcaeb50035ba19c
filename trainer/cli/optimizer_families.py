"""Which optimizers there are, by family, and a call of each that a config can begin with.

`tests/cli/test_optimizers.py` fails if optim or optax has a public optimizer that is in no table
here.
"""

from collections.abc import Mapping, Sequence

# What a config can name as the optimizer of a group, or of all parameters.
FAMILIES: Mapping[str, Sequence[str]] = {
    "Gradient descent and momentum": """
        optax.sgd optax.optimistic_gradient_descent optax.lars optax.fromage optax.noisy_sgd
    """.split(),
    "Signs of gradients": """
        optax.sign_sgd optax.signum optax.lion optim.rprop optax.rprop
    """.split(),
    "Adam and its variants": """
        optax.adam optax.adamw optax.nadam optax.nadamw optax.amsgrad optax.adamax optax.adamaxw
        optax.radam optax.adabelief optax.yogi optax.adan optax.lamb optax.novograd
        optax.optimistic_adam optax.optimistic_adam_v2 optax.contrib.acprop optax.contrib.ademamix
        optax.contrib.simplified_ademamix optax.contrib.adopt optim.mars
    """.split(),
    "Other adaptive rates": """
        optax.adagrad optax.adadelta optax.rmsprop optax.adafactor optax.sm3 optax.contrib.madgrad
    """.split(),
    "Optimizers of matrices": """
        optim.muon optax.contrib.muon optim.scion optim.soap optim.shampoo optax.contrib.galore
    """.split(),
    "Rates that are estimated": """
        optax.contrib.prodigy optax.contrib.dadapt_adamw optax.contrib.dog optax.contrib.dowg
        optax.contrib.cocob optax.contrib.momo optax.contrib.momo_adam optax.polyak_sgd
        optax.contrib.mechanize optax.contrib.reduce_on_plateau
    """.split(),
    "Schedule-free": """
        optax.contrib.schedule_free_adamw optax.contrib.schedule_free_sgd
        optax.contrib.schedule_free
    """.split(),
    "Second order and line searches": """
        optax.lbfgs optax.contrib.sophia optax.scale_by_backtracking_linesearch
        optax.scale_by_zoom_linesearch
    """.split(),
    "Privacy": ["optax.contrib.dpsgd"],
    "Wrappers of another optimizer": """
        optim.cautious optim.grams optax.lookahead optax.contrib.sam optax.apply_if_finite
        optax.MultiSteps optax.flatten optax.contrib.split_real_and_imaginary
    """.split(),
    "Composition": ["optim.chain", "optax.chain"],
}

# What is no optimizer by itself; its figures are on the page of a name only.
PIECES: Mapping[str, Sequence[str]] = {
    "Directions, for `before` of optim.chain": """
        optax.scale_by_adadelta optax.scale_by_adam optax.scale_by_adamax optax.scale_by_adan
        optax.scale_by_amsgrad optax.scale_by_belief optax.scale_by_distance_over_gradients
        optax.scale_by_factored_rms optax.scale_by_lbfgs optax.scale_by_lion optax.scale_by_novograd
        optax.scale_by_optimistic_gradient optax.scale_by_radam optax.scale_by_rms
        optax.scale_by_rss optax.scale_by_sign optax.scale_by_sm3 optax.scale_by_stddev
        optax.scale_by_trust_ratio optax.scale_by_yogi optax.scale_by_param_block_norm
        optax.scale_by_param_block_rms optax.contrib.scale_by_acprop optax.contrib.scale_by_ademamix
        optax.contrib.scale_by_adopt optax.contrib.scale_by_simplified_ademamix optax.centralize
        optax.identity optax.normalize_by_update_norm optax.contrib.normalize optax.zero_nans
    """.split(),
    "Averages, clips, decay and rates, for the args of optax.chain": """
        optax.trace optax.ema optax.add_noise optax.add_decayed_weights optax.adaptive_grad_clip
        optax.clip optax.clip_by_block_rms optax.clip_by_global_norm optax.apply_every
        optax.keep_params_nonnegative optax.scale optax.scale_by_learning_rate optax.scale_by_polyak
        optax.scale_by_rprop optax.scale_by_schedule optax.contrib.differentially_private_aggregate
        optax.contrib.hutchinson_estimator_diag_hessian optax.contrib.scale_by_cocob
        optax.contrib.scale_by_galore optax.contrib.scale_by_madgrad optax.contrib.scale_by_muon
    """.split(),
    "What the groups of optim.optimizer do in Lockstep": """
        optim.optimizer optim.frozen optax.freeze optax.masked optax.multi_transform optax.partition
        optax.selective_transform optax.set_to_zero
    """.split(),
    "For Python: they take functions, named pairs or finished transformations": """
        optax.conditionally_mask optax.conditionally_transform optax.measure_with_ema optax.monitor
        optax.named_chain optax.snapshot optax.stateless optax.stateless_with_tree_map
        optax.with_extra_args_support
    """.split(),
}

_ADAMW = "!optax.adamw {learning_rate: 1e-3}"
_SGD = "!optax.sgd {learning_rate: 1.0}"

# Name -> the optimizer that a config can begin with, in YAML, where a call with the middle of the
# space of its learning rate does not suffice.
EXAMPLES: Mapping[str, str] = {
    "optax.sgd": "!optax.sgd {learning_rate: 0.3, momentum: 0.9, nesterov: true}",
    "optax.noisy_sgd": "!optax.noisy_sgd {learning_rate: 0.1, key: 0}",
    "optax.contrib.dpsgd": "!optax.contrib.dpsgd {learning_rate: 0.5, l2_norm_clip: 1.0,"
    " noise_multiplier: 0.5, seed: 1, momentum: 0.9}",
    "optax.contrib.mechanize": "!optax.contrib.mechanize"
    " {base_optimizer: !optax.adamw {learning_rate: 1.0}}",
    "optax.contrib.reduce_on_plateau": "!optax.chain {args: [!optax.adam {learning_rate: 1e-2},"
    " !optax.contrib.reduce_on_plateau {patience: 10, accumulation_size: 10}]}",
    "optax.contrib.schedule_free": "!optax.contrib.schedule_free"
    " {base_optimizer: !optax.sgd {learning_rate: 0.5}, learning_rate: 0.5}",
    "optax.contrib.schedule_free_adamw": "!optax.contrib.schedule_free_adamw {learning_rate: 3e-3}",
    "optax.scale_by_backtracking_linesearch": f"!optax.chain {{args: [{_SGD},"
    " !optax.scale_by_backtracking_linesearch {max_backtracking_steps: 15}]}",
    "optax.scale_by_zoom_linesearch": f"!optax.chain {{args: [{_SGD},"
    " !optax.scale_by_zoom_linesearch {max_linesearch_steps: 15}]}",
    "optim.cautious": f"!optim.cautious {{base_optimizer: {_ADAMW}}}",
    "optim.grams": f"!optim.grams {{base_optimizer: {_ADAMW}}}",
    "optax.lookahead": "!optax.lookahead {fast_optimizer: !optax.adam {learning_rate: 3e-3},"
    " sync_period: 5, slow_step_size: 0.5}",
    "optax.contrib.sam": "!optax.contrib.sam {optimizer: !optax.adamw {learning_rate: 1e-3},"
    " adv_optimizer: !optax.chain {args: [!optax.contrib.normalize {},"
    " !optax.sgd {learning_rate: 0.05}]}, opaque_mode: true}",
    "optax.apply_if_finite": f"!optax.apply_if_finite {{inner: {_ADAMW},"
    " max_consecutive_errors: 5}",
    "optax.MultiSteps": f"!optax.MultiSteps {{opt: {_ADAMW}, every_k_schedule: 4}}",
    "optax.flatten": f"!optax.flatten {{inner: {_ADAMW}}}",
    "optax.contrib.split_real_and_imaginary": "!optax.contrib.split_real_and_imaginary"
    f" {{inner: {_ADAMW}}}",
    "optim.chain": "!optim.chain {learning_rate: 0.02, before: [!parts.momentum {},"
    " !parts.polar {}, !parts.match_norm {}], after: [!parts.pin_radius {}]}",
    "parts.graft": "!parts.graft {onto: !parts.adam {}}",
    "parts.momentum_mixture": "!parts.momentum_mixture {decays: [0.9, 0.98], weights: [0.5, 0.5]}",
    "parts.psgd": "!optim.chain {learning_rate: 2e-3, before: [!optax.ema {decay: 0.95},"
    " !parts.psgd {precond_lr: 0.2}, !optax.clip_by_block_rms {threshold: 1.1}],"
    " after: [!parts.decay {rate: 0.5}]}",
    "parts.trust_gate": "!parts.trust_gate {around: !parts.soap {}}",
    "optax.chain": "!optax.chain"
    f" {{args: [!optax.clip_by_block_rms {{threshold: 1.0}}, {_ADAMW}]}}",
}

# The parts that stand after the learning rate; the others stand before it.
AFTER = ("parts.cautious_decay", "parts.decay", "parts.pin_radius")
