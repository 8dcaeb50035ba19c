"""The two kinds of configs, of a run and of a sweep, and what each may name."""

from collections.abc import Mapping
from dataclasses import dataclass

# All of these are names and not imports, because the packages are above this one.
_OF_A_RUN: Mapping[str, str] = {
    "optim": "optim",
    "optax": "optax",
    "schedules": "optim.schedules",
    "models": "trainer.models",
    "data": "trainer.data",
    "losses": "trainer.losses",
    "metrics": "trainer.metrics",
    "hooks": "trainer.hooks",
}


@dataclass(frozen=True)
class Language:
    """What the configs of one kind may name.

    Attributes:
        root: the name of the call at the root, "experiment" or "sweep".
        what: what such a config describes, for messages.
        nodes: the names without a dot, and the classes that they stand for.
        modules: how the other names begin, and the modules that these prefixes stand for. A config
            may name what `__all__` of a module lists, and in optax all public functions.
        keys: some arguments of the root, for messages.
        mark: an argument of the root that the other kinds do not have.
        command: how to use such a config, for a message to a user who did something else.
        place: where an argument of this root is written by who has a config of the other kind.
        example: a Gin statement that binds an argument of the root.
    """

    root: str
    what: str
    nodes: Mapping[str, str]
    modules: Mapping[str, str]
    keys: str
    mark: str
    command: str
    place: str
    example: str


RUN = Language(
    root="experiment",
    what="a run",
    nodes={"experiment": "trainer.engine.experiment.Experiment"},
    modules=_OF_A_RUN,
    keys="model, data, steps",
    mark="model",
    command="name it as the base of a sweep",
    place="write it in the base, or for all arms below set",
    example="experiment.model = @models.vit()",
)

SWEEP = Language(
    root="sweep",
    what="a sweep",
    nodes={
        "sweep": "trainer.sweep.definition.Sweep",
        "arm": "trainer.sweep.definition.Arm",
        "goal": "trainer.sweep.definition.Goal",
        "final": "trainer.sweep.definition.Final",
    },
    # The values that a sweep sets may be calls of functions of a run.
    modules={**_OF_A_RUN, "space": "trainer.sweep.spaces", "method": "trainer.sweep.methods"},
    keys="base, space, trials",
    mark="base",
    command="start it with python -m trainer sweep --config=FILE",
    place="write it in the file of a sweep, whose base is this config",
    example="sweep.base = 'base.gin'",
)

LANGUAGES: Mapping[str, Language] = {each.root: each for each in (RUN, SWEEP)}
