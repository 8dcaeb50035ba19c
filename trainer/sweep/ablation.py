"""An ablation: an arm of a sweep without one of its parts at a time.

Each part of a chain is replaced by one that does nothing, and each such arm is searched as the
whole one is. Start with the fields of `Ablation`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config import Call, Config, ConfigError, Source, Tree, join
from trainer.config.wording import known_names, listing

_REASONS = 4  # arms of which a message says why they do not build
_CHAIN = "optim.chain"
_NOTHING = Call("optax.identity", {})


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What is taken out of the one arm of a sweep.

    Attributes:
        parts: config paths of optim.chain: each of its parts is replaced by optax.identity. A part
            around another one, such as parts.cautious_decay, is replaced by that one, which is
            taken out of it as well. The arm without parts.polar is named "no_polar".
        keep: names of such arms that are left out, such as "no_momentum". A part that another one
            needs must be kept, or be taken out together with that one, in `settings`.
        settings: name of a further arm -> path -> the value with which the path does nothing, such
            as {no_clip: {optimizer.clip_norm: null}}.
    """

    parts: str | Sequence[str] = ()
    keep: Sequence[str] = ()
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.parts and not self.settings:
            raise ValueError(
                "ablate takes nothing out: name the path of a chain in parts, or write settings."
            )
        for name, values in self.settings.items():
            check_arm_name("settings", name)
            if not values:
                raise ValueError(f"settings changes nothing for {name!r}: give it a path.")

    def check(self, sweep: Any) -> None:
        """Raises ValueError if the ablation does not fit the rest of a `definition.Sweep`."""
        if len(sweep.arms) != 1 or sweep.ladder is not None:
            what = "a ladder" if sweep.ladder is not None else f"{len(sweep.arms)} arms"
            raise ValueError(
                f"ablate takes parts out of one arm, and the sweep has {what}: write the stack as"
                " the only one of arms, and one sweep for each question."
            )


def check_arm_name(argument: str, name: str) -> None:
    """Raises ValueError if a folder cannot have the name that an argument gives an arm."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(
            f"{argument} has the name {name!r}, which cannot be that of a folder: use letters,"
            " digits, '_', '-' and '.', beginning with a letter or digit."
        )


def removals(
    ablation: Ablation, title: str, config: Config, sweep: Config
) -> dict[str, Mapping[str, Tree]]:
    """Returns name of an arm -> config path -> the value with which what it lacks does nothing."""
    # `title` is the arm as the subject of a sentence; `sweep` is the config of the sweep, for
    # places in its file. Raises ConfigError if a path is not that of a chain, two arms have one
    # name, `keep` has a name that no arm has, or nothing is left.
    source = sweep.argument_source("ablate") or sweep.sources[""]
    place = sweep.argument_source("ablate.parts") or source
    chains = [ablation.parts] if isinstance(ablation.parts, str) else ablation.parts
    found, counts = list[tuple[str, Mapping[str, Tree]]](), Counter[str]()
    for name, values in (x for path in chains for x in _of_chain(path, title, config, place)):
        counts[name] += 1
        more = f"_{counts[name]}" if counts[name] > 1 else ""  # "no_momentum", "no_momentum_2"
        found.append((f"{name}{more}", values))
    found += ablation.settings.items()
    names = [name for name, _ in found]
    for name in ablation.keep:
        if name not in names:
            hint = known_names(name, names, "The arms without a part are")
            text = f"keep has {name!r}, which is not the name of an arm without a part. {hint}"
            raise ConfigError(text, sweep.argument_source("ablate.keep") or source)
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"ablate has two arms named {twice[0]!r}: rename settings.", source)
    if not (left := {name: values for name, values in found if name not in ablation.keep}):
        raise ConfigError(f"ablate keeps all of {listing(names)}: nothing is taken out.", source)
    return left


def parts_needed(found: Mapping[str, str], sweep: Config) -> ConfigError:
    """Returns an error that names the arms without a part that cannot be built without it."""
    # `found` is name of such an arm -> why it does not build, where the whole one does, as a
    # sentence; `sweep` is the config of the sweep, for the place in its file.
    reasons = [f"  {name}: {why}\n" for name, why in found.items()]
    if len(reasons) > _REASONS:
        reasons[_REASONS:] = [f"  and {len(reasons) - _REASONS} more\n"]
    return ConfigError(
        f"ablate takes out {'a part' if len(found) == 1 else 'parts'} that others need:\n"
        f"{''.join(reasons)}Add keep: [{', '.join(found)}] to ablate, or take out such a part"
        " together with what needs it, as an arm below settings.",
        sweep.argument_source("ablate") or sweep.sources[""],
    )


def _of_chain(
    path: str, title: str, config: Config, source: Source
) -> Iterator[tuple[str, dict[str, Tree]]]:
    """Yields the name and the values of a removal for each part of a chain."""
    try:
        chain = config.at(path)
    except KeyError:
        hint = known_names(path, config.sources)
        raise ConfigError(f"{title} has no path {path!r} to ablate. {hint}", source) from None
    if not isinstance(chain, Call) or chain.name != _CHAIN:
        what = chain.name if isinstance(chain, Call) else repr(chain)
        raise ConfigError(
            f"{title} has {what} at {path}, which is not {_CHAIN} and has no parts: write it as a"
            " chain, or what does nothing in its place below settings.",
            source,
        )
    for side in ("before", "after"):
        parts = chain.kwargs.get(side) or []
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, Call) and part.name != _NOTHING.name:
                inner, place = part.kwargs.get("around"), join(join(path, side), index)
                name = f"no_{part.name.rpartition('.')[2]}"
                yield name, {place: inner if isinstance(inner, Call) else _NOTHING}
                if isinstance(inner, Call):
                    name = f"no_{inner.name.rpartition('.')[2]}"
                    yield name, {join(place, "around"): None}
