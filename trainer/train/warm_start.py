"""Initializes a run with another run's parameters, by rules each of which must have an effect."""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from optim.paths import SlowPattern, flatten, fullmatch
from trainer import checkpoint
from trainer.config import Config, ConfigError, Source
from trainer.engine.program import Program
from trainer.engine.step import State
from trainer.workdir import read_record

Shapes = Mapping[str, jax.ShapeDtypeStruct]  # by path

PARTS = ("optimizer", "model_state", "schedule")  # each "keep" or "reset"
_KEYS = ("from", "step", "rename", "fresh", *PARTS)


class WarmStart:
    """Parameters of another run, renamed and checked to fit this run's.

    The field `warm_start` of an experiment is a mapping with these keys:

    - "from": the other run's folder.
    - "step": one of its checkpoints; by default the newest, which must not be damaged.
    - "rename": patterns and replacements, as in `rename`.
    - "fresh": a list of patterns of this run's parameters that are initialized, with other random
      numbers than a run of the same seed that is not warm-started. If the other run has such a
      parameter, a rule of "rename" must drop it.
    - "optimizer" (the optimizer's state), "model_state" (such as batch statistics) and "schedule"
      (the position of the schedules): each "keep" or, by default, "reset".

    Steps count from 0 in any case; with "continue", another class reads the mapping, and the run
    continues the other one: see `continuation.Continuation`.

    `config` has the file and line for errors. Raises ConfigError if a rule has no effect, a
    parameter is missing or does not fit, or the other run has no checkpoint or a damaged one.

    Attributes:
        source: the other run's folder and the step of its checkpoint, as run.json has them.
        number: how many warm starts led to this run, 1 if the other run was not warm-started.
    """

    def __init__(self, program: Program, config: Config | None = None):
        self._options: Mapping[str, Any] = program.experiment.warm_start or {}
        self._sources = config.sources if config else {}
        self._check_keys()
        self._folder = self._options["from"]
        # Chosen once: the other run may save while its parts are read, one after the other.
        step = self._options.get("step")
        self._step = self._steps()[-1] if step is None else step
        self.source = {"run": self._folder, "step": self._step}
        wanted = program.abstract_state()
        self._init = program.first_opt_states()  # compiled once, for all trials of a sweep
        self._params, names = self._read_params(flatten(wanted.params))
        self._parts = {
            part: self._read_part(part, leaves, names)
            for part, leaves in (
                ("optimizer", flatten(wanted.opt_state)),
                ("model_state", flatten(wanted.model_state)),
            )
            if self._keeps(part)
        }
        self._position = 0
        if self._keeps("schedule"):
            self._position = int(np.asarray(self._read("opt_state/scalars")["int32"])[-1])
        self.number = 1 + count_warm_starts(Path(self._folder))

    def first_state(self, program: Program) -> State:
        """Computes a state at step 0 with the values that were read."""
        # The moving average of the parameters (EMA) starts at the new parameters. An optimizer
        # state that is not kept is initialized from them. `program` may differ from the one of the
        # constructor in its seed and its floats.

        # Other random numbers than without a warm start: with the same seed, a fresh parameter
        # would get the very value from which the other run trained its own.
        state = program.init(warm_starts=self.number)
        params = put(state.params, self._params)
        ema = state.ema
        if flatten(ema):  # copied, because the step takes both as donated buffers
            ema = jax.tree.map(jax.numpy.copy, put(ema, self._params))
        opt_state = put(state.opt_state, self._parts.get("optimizer", {}))
        if "optimizer" not in self._parts:  # some states start as copies of the parameters
            opt_state = self._init(params, state.hyperparams)
        return state._replace(
            params=params,
            model_state=put(state.model_state, self._parts.get("model_state", {})),
            opt_state=with_counts(opt_state, [self._position]),  # see Optimizer.position
            ema=ema,
        )

    def _keeps(self, part: str) -> bool:
        return self._options.get(part, "reset") == "keep"

    def _check_keys(self) -> None:
        unknown = sorted(set(self._options) - set(_KEYS))
        if unknown or not isinstance(self._options.get("from"), str):
            what = f"an entry {unknown[0]!r}" if unknown else "no folder in 'from'"
            raise self._error(
                unknown[0] if unknown else "",
                f"warm_start has {what}; it takes {', '.join(_KEYS)}, or else continue.",
            )
        rename, fresh = self._options.get("rename") or {}, self._options.get("fresh") or []
        to = rename.values() if isinstance(rename, Mapping) else [0]
        if not all(isinstance(x, str | None) for x in to):
            text = "rename must be a dict from patterns to replacements or None, such as "
            raise self._error("rename", text + f"{{'head/.*': None}}, got {rename!r}.")
        if not isinstance(fresh, list | tuple) or not all(isinstance(x, str) for x in fresh):
            text = f"fresh must be a list of patterns, such as ['head/.*'], got {fresh!r}."
            raise self._error("fresh", text)
        for part in PARTS:
            if self._options.get(part, "reset") not in ("keep", "reset"):
                raise self._error(
                    part, f"{part} must be 'keep' or 'reset', got {self._options[part]!r}."
                )

    def describe(self) -> str:
        """Returns a line for the log of the run."""
        return f"Begins with the parameters of {self._folder} at step {self._step:,}."

    def _steps(self) -> list[int]:
        try:
            return [info.step for info in checkpoint.ls(self._folder)]
        except (checkpoint.CheckpointError, OSError) as error:
            raise self._error("from", str(error)) from error

    def _read(self, prefix: str) -> dict[str, np.ndarray]:
        try:
            tree = checkpoint.load_params(self._folder, self._step, prefix)
        except checkpoint.CorruptCheckpoint as error:
            others = ", ".join(str(step) for step in self._steps() if step != self._step)
            advice = f"Choose another one with 'step': there are {others}."
            what = f"The checkpoint of step {self._step} in {self._folder} is damaged: {error}."
            text = f"{what} {advice if others else 'There is no other one.'}"
            raise self._error("step", text) from error
        except (checkpoint.CheckpointError, OSError) as error:
            raise self._error("from", str(error)) from error
        return flatten(tree)

    def _read_params(self, wanted: Shapes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Returns this run's parameters by path, and (other run's path -> this run's path)."""
        theirs = self._read("params")
        rules = self._options.get("rename") or {}
        try:
            # Rename paths in place of the values: they tell afterwards where each came from.
            origins = rename(dict(zip(theirs, theirs, strict=True)), rules)
        except ValueError as error:
            raise self._error("rename", str(error)) from error
        names = {theirs_path: path for path, theirs_path in origins.items()}
        found = {path: theirs[theirs_path] for path, theirs_path in origins.items()}
        fresh = self._fresh(wanted, origins)
        for theirs_path, path in names.items():
            if path not in wanted:
                raise self._error(
                    "rename",
                    f"The other run's parameter {theirs_path} would be {path}, which this run does "
                    f"not have. It has {_some(wanted)}. Rename the parameter, or leave it out with "
                    f"a rule {theirs_path!r}: None.",
                )
        if missing := [path for path in wanted if path not in found and path not in fresh]:
            raise self._error(
                "fresh",
                f"The other run has no parameter for {_some(missing)}. Rename one of "
                f"{_some(theirs)}, or keep the initial values with a pattern in 'fresh'.",
            )
        self._check_shapes("rename", found, wanted)
        return found, names

    def _fresh(self, wanted: Collection[str], found: Mapping[str, str]) -> set[str]:
        """Returns the parameters in `wanted` to which 'fresh' leaves their initial values."""
        # `found` has those that the other run has a value for -> their paths there.
        fresh: set[str] = set()
        for pattern in self._options.get("fresh") or []:
            try:
                compiled = re.compile(pattern)
                matching = {path for path in wanted if fullmatch(compiled, path)}
            except re.error as error:
                raise self._error(
                    "fresh", f"The pattern {pattern!r} is not a regular expression: {error}."
                ) from error
            except SlowPattern as error:
                raise self._error("fresh", str(error)) from error
            if not matching - set(found) - fresh:
                raise self._error("fresh", _without_effect(pattern, matching, found, wanted))
            fresh |= matching - set(found)
        return fresh

    def _read_part(
        self, part: str, wanted: Shapes, names: Mapping[str, str]
    ) -> dict[str, np.ndarray]:
        """Reads the state of the optimizer or the model; paths may end with those of parameters."""
        theirs = self._read({"optimizer": "opt_state"}.get(part, part)) if wanted else {}
        found = {}
        for path, value in theirs.items():
            # The state of a parameter ends with its path: mu/blocks/qkv/kernel. The longest match
            # counts, because a parameter may be called just kernel.
            tail = max((p for p in names if path.endswith("/" + p)), key=len, default=None)
            found[path if tail is None else path[: -len(tail)] + names[tail]] = value
        if missing := [path for path in wanted if path not in found]:
            raise self._error(
                part,
                f"{part}='keep' needs values that the other run does not have: {_some(missing)}. "
                "Use 'reset', or the same optimizer, model and names of groups.",
            )
        found = {path: found[path] for path in wanted}
        self._check_shapes(part, found, wanted)
        return found

    def _check_shapes(self, key: str, found: Mapping[str, np.ndarray], wanted: Shapes) -> None:
        for path, value in found.items():
            theirs, ours = tuple(value.shape), tuple(wanted[path].shape)
            if theirs != ours:
                raise self._error(
                    key,
                    f"{path} has shape {theirs} in the other run and {ours} here. Make them equal, "
                    "or leave it out: rename it to None, and add it to 'fresh'.",
                )

    def _error(self, key: str, text: str) -> ConfigError:
        return located(self._sources, key, text)


class CannotBegin(ConfigError):
    """Raised if the state of another run, with which a run begins, cannot be used."""


def located(sources: Mapping[str, Source], key: str, text: str) -> CannotBegin:
    """Returns an error with the place of an entry of `warm_start`, or else of the whole."""
    paths = [f"warm_start.{key}", "warm_start.from", "warm_start"]
    return CannotBegin(text, next((sources[path] for path in paths if path in sources), None))


def recorded_start(folder: Path) -> dict[str, Any]:
    """Returns what run.json has of the warm start of a run, or trial; {} if it had none."""
    # "warm_starts" is how many warm starts led to it, and "began_from" a list with its `source`, or
    # with those of all trials of its wave. Raises UserError if run.json is damaged.
    record = read_record(folder / "run.json") or {"lineage": []}
    names = ("warm_starts", "began_from")
    return {name: entry[name] for entry in record["lineage"] for name in names if name in entry}


def count_warm_starts(folder: Path) -> int:
    """Returns how many warm starts led to the run, or the trial of a sweep, in a folder."""
    number = recorded_start(folder).get("warm_starts")
    return number if isinstance(number, int) else 0


def _without_effect(
    pattern: str, matching: set[str], found: Mapping[str, str], wanted: Collection[str]
) -> str:
    """Returns why a pattern in 'fresh' has no effect; see `WarmStart._fresh`."""
    if not matching:
        return (
            f"The pattern {pattern!r} in 'fresh' matches no parameter of this run. It has "
            f"{_some(wanted)}."
        )
    if not (kept := matching & set(found)):
        return f"The pattern {pattern!r} in 'fresh' matches only what the patterns before it do."
    theirs = sorted(found[path] for path in kept)
    rule = pattern if set(theirs) == kept else theirs[0]
    return (
        f"The pattern {pattern!r} in 'fresh' has no effect: {_some(kept)} would begin with the "
        f"other run's {_some(theirs)}. Leave these out with the rule {rule!r}: None (null in "
        "YAML), the first one in 'rename'."
    )


def put(tree: Any, values: Mapping[str, np.ndarray]) -> Any:
    """Replaces leaves of a tree by path; dtypes and shardings stay as they are."""
    named = flatten(tree)
    new = {
        # Copied, because the first step takes the state as donated buffers.
        path: jax.device_put(np.array(values[path], x.dtype), x.sharding, may_alias=False)
        for path, x in named.items()
        if path in values
    }
    leaves = [new.get(path, x) for path, x in named.items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def with_counts(opt_state: Any, counts: Any) -> Any:
    """Replaces the last integers among the scalars of an optimizer's state."""
    # The last two are the updates that were skipped, and all of them.
    numbers = np.array(opt_state.scalars["int32"])
    numbers[-len(counts) :] = counts
    return opt_state._replace(scalars=put(opt_state.scalars, {"int32": numbers}))


def _some(paths: Iterable[str]) -> str:
    names = sorted(paths)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def rename(params: Mapping[str, Any], rules: Mapping[str, str | None]) -> dict[str, Any]:
    r"""Renames the paths of parameters by regular expressions; raises ValueError.

    Example:
        >>> rename({"encoder/bias": 1, "head": 2}, {"encoder/(.*)": r"net/\1", "head": None})
        {'net/bias': 1}
    """
    # A pattern must match a whole path. The first rule that matches applies, and None drops the
    # parameter; one that no rule matches keeps its path.
    try:
        compiled = [(re.compile(pattern), to) for pattern, to in rules.items()]
    except re.error as e:
        rule = f"The renaming rule {e.pattern!r}"
        raise ValueError(f"{rule} is not a regular expression: {e}.") from e
    unused = set(rules)
    result: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for path, value in params.items():
        target: str | None = path
        for pattern, replacement in compiled:
            if match := fullmatch(pattern, path):
                unused.discard(pattern.pattern)
                target = None if replacement is None else _expand(match, replacement)
                break
        if target is None:
            continue
        # A path cannot be both a leaf and a dict: with a leaf a/b, there cannot be a leaf a.
        inside = f"{target}/"
        clash = next(
            (t for t in result if f"{t}/".startswith(inside) or inside.startswith(f"{t}/")), None
        )
        if clash is not None:
            raise ValueError(
                f"Renaming would put {path!r} at {target!r}, where {origin[clash]!r} is already."
            )
        result[target], origin[target] = value, path
    if unused:
        raise ValueError(
            f"The renaming rule {sorted(unused)[0]!r} applies to no parameter; "
            f"there are {', '.join(list(params)[:6])}{', ...' if len(params) > 6 else ''}. "
            "A pattern must match a whole path, and only the first rule that matches applies."
        )
    return result


def _expand(match: re.Match[str], replacement: str) -> str:
    try:
        target = match.expand(replacement)
    except (re.error, IndexError) as e:
        raise ValueError(
            f"The replacement {replacement!r} of the renaming rule {match.re.pattern!r} "
            f"cannot be used: {e}."
        ) from e
    if not target or "" in target.split("/"):
        raise ValueError(
            f"The renaming rule {match.re.pattern!r} turns {match.string!r} into {target!r}, "
            "which is not a path."
        )
    return target
