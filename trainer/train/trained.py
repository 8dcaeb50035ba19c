"""Restores a state from a checkpoint, and reads what a run has learned: parameters and tokenizer.

The hyperparameters are not saved: they are those of the config, so that a run that continues with a
changed learning rate uses it.
"""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from optim.bound import may_keep_averages
from trainer import checkpoint, writers
from trainer import config as configs
from trainer.checkpoint import CheckpointError, Checkpoints, CorruptCheckpoint
from trainer.config import Call, Config
from trainer.engine.experiment import Experiment, as_model
from trainer.engine.mesh import replicated
from trainer.engine.program import Program, load_located
from trainer.engine.step import State
from trainer.messages import UserError, refuse_os_errors
from trainer.models.model import LanguageModel
from trainer.protocols import Tokenizer
from trainer.workdir import check_files
from trainer.workdir.folder import TOKENIZER_FILE, check_tokenizer
from trainer.writers.lines import PREFIXES


def to_save(state: State) -> State:
    """Returns what a checkpoint saves of a state, also an abstract one: all but hyperparameters."""
    return state._replace(hyperparams=())


def restore(program: Program, checkpoints: Checkpoints, step: int | None = None) -> State:
    """Reads the checkpoint of a step, or the newest intact one, onto the program's devices."""
    # The state has the program's hyperparameters. Raises CheckpointError if there is no such
    # checkpoint, it is damaged, or its leaves are not those of the program.
    return with_hyperparams(program, checkpoints.restore(to_save(program.abstract_state()), step))


def restore_of(program: Program, folder: Path, step: int) -> State:
    """Reads a checkpoint of the run in a folder, which is not changed; see `restore`."""
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        return restore(program, checkpoints, step)


def with_hyperparams(program: Program, saved: State) -> State:
    """Adds the hyperparameters of a program to a state without them, on the program's devices."""
    packed = jax.device_put(program.inputs.pack(), replicated(program.mesh))
    return saved._replace(hyperparams=packed)


class Trained(NamedTuple):
    """What a run has learned."""

    config: Config
    step: int  # of the checkpoint
    # the value of the run's `best_metric` at this step; None if it is not known
    metric: float | None
    params: Any  # nested dicts of numpy arrays, as `model_state`
    model_state: Any


def read_trained(
    folder: Path, step: str | int = "latest", vocabulary: Sequence[str] = (), *, raw: bool = False
) -> Trained:
    """Reads the parameters of the "latest" checkpoint, the "best" by `best_metric`, or a number."""
    # They are those that the run evaluates: their moving average with `ema_decay`, or those of the
    # optimizer. `raw` asks for those that are trained. The data set of the run is needed only if
    # its optimizer keeps averages of the parameters for evaluation, as schedule-free does. Raises
    # UserError if the folder is no run's, or if it has no such checkpoint, or a damaged one.
    config = read_run(folder)
    try:
        number, metric = choose_step(folder, config, step)
        parts = checkpoint.load_parts(folder, number, ["params", "model_state", "ema"])
        leaves = checkpoint.leaf_names(folder, number)
    except CorruptCheckpoint as error:
        raise UserError(
            f"The checkpoint of step {number} in {folder} is damaged: {error}. Choose another "
            f"--step; `python -m trainer checkpoint check {folder}` reads all of them."
        ) from error
    except (CheckpointError, OSError) as error:
        raise UserError(str(error)) from error
    params = parts["params"]
    if not raw and parts["ema"]:
        params = jax.tree.map(lambda e, p: e.astype(p.dtype), parts["ema"], params)
    elif not raw and any(may_keep_averages(x) for x in leaves if x.startswith("opt_state/")):
        try:
            program = load_located(config, vocabulary)
            params = jax.device_get(program.evaluation.params(restore_of(program, folder, number)))
        except (CheckpointError, ValueError) as error:
            raise UserError(
                "The optimizer of the run keeps averages of the parameters for evaluation, and "
                f"they cannot be computed: {error}\n--raw reads the parameters that are trained."
            ) from error
    return Trained(config, number, metric, params, parts["model_state"])


def read_run(folder: Path) -> Config:
    """Returns the config of the run in a folder; raises UserError if it is not that of a run."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}. Name the folder of a run.")
    check_files(folder)
    if not (folder / "config.yaml").exists():
        raise UserError(f"{folder} has no config.yaml: it is not the folder of a run.")
    return configs.load([folder / "config.yaml"])


def read_language(folder: Path, config: Config, vocabulary: Sequence[str] = ()) -> LanguageModel:
    """Returns how the model of a run continues a text; UserError if it is no language model."""
    model = as_model(configs.Builder(config, vocabulary).build("model"))
    if (language := getattr(model, "language", None)) is None:
        node = config.root.kwargs["model"]
        name = node.name if isinstance(node, Call) else repr(node)
        raise UserError(
            f"The model of the run in {folder}, {name}, is not a language model: only one that is, "
            "such as models.gpt, continues a text. A model of yours says how it does in "
            "Model.language; see trainer/models/model.py."
        )
    return language


def read_tokenizer(folder: Path, config: Config, vocabulary: Sequence[str] = ()) -> Tokenizer:
    """Returns the tokenizer of a run, from its tokenizer.json or else from its data set."""
    # Raises UserError if there is none, if it cannot be read, or if it is not the run's.
    file = folder / TOKENIZER_FILE
    if file.exists():
        from trainer.data.tokenizer import load_tokenizer

        check_tokenizer(folder)
        data = config.root.kwargs["data"]
        end = data.kwargs.get("end_of_text") if isinstance(data, Call) else None
        try:
            return load_tokenizer(file, end if isinstance(end, int) else None)
        except ValueError as error:
            raise UserError(str(error)) from error
    tokenizer = getattr(configs.Builder(config, vocabulary).build("data"), "tokenizer", None)
    if tokenizer is None:
        raise UserError(
            f"The run in {folder} has no {TOKENIZER_FILE}, and its data set has no tokenizer, so "
            f"that a prompt cannot be converted to tokens. Copy the {TOKENIZER_FILE} that made the "
            "tokens into the folder of the run."
        )
    return tokenizer


def trained_length(folder: Path) -> int | None:
    """Returns how many tokens the examples of a run had, from its rows; None if no row has it."""
    # Raises UserError if metrics.jsonl cannot be read.
    with refuse_os_errors(f"The metrics of {folder} cannot be read"):
        for row in writers.iterate_metrics(folder, "tokens"):
            tokens, examples = row.get("tokens"), row.get("examples")
            if isinstance(tokens, int) and isinstance(examples, int) and examples > 0:
                return tokens // examples
    return None


def tokenizer_text(data: Any) -> str | None:
    """Returns the tokenizer.json of a data set's tokenizer; None if there is none to save."""
    save = getattr(getattr(data, "tokenizer", None), "save", None)
    if save is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / TOKENIZER_FILE
        save(file)
        return file.read_text(encoding="utf-8")


def choose_step(folder: Path, config: Config, step: str | int) -> tuple[int, float | None]:
    """Returns the step of the "latest" checkpoint, the "best" by `best_metric`, or a given one."""
    # And the value of `best_metric` at this step; None if it is not known. Raises UserError if
    # there is no such checkpoint, CheckpointError if there are none, and OSError if the folder
    # cannot be read.
    known = {info.step: info.metric for info in checkpoint.ls(folder)}
    metric = config.root.kwargs.get("best_metric")
    # A checkpoint may have been saved before it was evaluated: then only its row has the metric.
    # If best_metric names no split, the validation split, which is last here, wins.
    for prefix in reversed(PREFIXES.values()) if metric is not None else ():
        name = prefix + str(metric).removeprefix(prefix)
        for row in writers.iterate_metrics(folder, name):
            if name in row and row["step"] in known:
                known[row["step"]] = float(row[name])
    there = ", ".join(map(str, known))
    if step == "latest":
        step = max(known)
    elif step == "best":
        finite = {n: x for n, x in known.items() if x is not None and math.isfinite(x)}
        if metric is None or not finite:
            why = "its config has no best_metric" if metric is None else f"none has its {metric}"
            raise UserError(
                f"No checkpoint in {folder} is the best: {why}. Write --step=latest, or a step: "
                f"there are {there}."
            )
        sign = -1 if config.root.kwargs.get("best_mode", Experiment.best_mode) == "max" else 1
        # The first of equal ones, which `Retention` of checkpoints keeps and summary.json names.
        step = min(finite, key=lambda number: (sign * finite[number], number))
    elif isinstance(step, str):
        raise UserError(
            f"The step {step!r} is neither 'latest' nor 'best', nor the number of a checkpoint of"
            f" {folder}; there are {there}."
        )
    if step not in known:
        raise UserError(f"{folder} has no checkpoint of step {step}; there are {there}.")
    return int(step), known[step]
