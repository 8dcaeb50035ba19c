"""The kinds of configs, and the functions that each may name."""

import contextlib
import importlib
import importlib.util
import re
import shlex
import sys
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from trainer.config import signatures, wording
from trainer.config.tree import ConfigError, Source, longest_key
from trainer.config.wording import known_names, listing, nearest
from trainer.messages import joined, started

# Names and not imports, because the packages are above this one.
_OF_A_RUN: Mapping[str, str] = {
    "optim": "optim",
    "optax": "optax",
    "schedules": "optim.schedules",
    "models": "trainer.models",
    "data": "trainer.data",
    "losses": "trainer.losses",
    "metrics": "trainer.metrics",
    "hooks": "trainer.hooks",
    "parts": "optim.parts",
}


@dataclass(frozen=True)
class Language:
    """What the configs of one kind may name."""

    root: str  # the name of the call at the root, "experiment" or "sweep"
    what: str  # what such a config describes, for messages
    nodes: Mapping[str, str]  # name without a dot -> the class that it stands for
    # prefix of the other names -> the module that it stands for; a config may name what `__all__`
    # of a module lists, and in optax all public functions
    modules: Mapping[str, str]
    keys: str  # some arguments of the root, for messages
    # arguments of the root that the other kinds do not have, one of which it has
    marks: tuple[str, ...]
    command: str  # what to do with such a config, for a user who used it as the other kind
    place: str  # where an argument of this root belongs, for a user who wrote it in another kind
    example: str  # a Gin statement that binds an argument of the root

    def has(self, name: str) -> bool:
        """Returns whether a function belongs to Lockstep or optax, and not to the user."""
        return name in self.nodes or name.split(".")[0] in self.modules


RUN = Language(
    root="experiment",
    what="a run",
    nodes={"experiment": "trainer.engine.experiment.Experiment"},
    modules=_OF_A_RUN,
    keys="model, data, steps",
    marks=("model",),
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
        "claims": "trainer.sweep.definition.Claims",
        "ladder": "trainer.sweep.ladder.Ladder",
        "ablate": "trainer.sweep.ablation.Ablation",
        "branch": "trainer.sweep.branch.Branch",
    },
    # The values that a sweep sets may be calls of functions of a run.
    modules={**_OF_A_RUN, "space": "trainer.sweep.spaces", "method": "trainer.sweep.methods"},
    keys="base, space, trials",
    marks=("base", "branch"),
    command="start it with python -m trainer sweep --config=FILE",
    place="write it in the file of a sweep, whose base is this config",
    example="sweep.base = 'base.gin'",
)

# What a plan needs of it: values that are calls of others are not built.
SEARCHES = replace(SWEEP, modules={name: SWEEP.modules[name] for name in ("space", "method")})

CHALLENGE = Language(
    root="challenge",
    what="a challenge",
    nodes={
        "challenge": "trainer.studies.challenge.Challenge",
        "goal": "trainer.sweep.definition.Goal",
        "exchange": "trainer.sweep.target_rule.Exchange",
    },
    modules=_OF_A_RUN,
    keys="baseline, goal",
    marks=("baseline",),
    command="check an entry of it with python -m trainer challenge check FOLDER/entries/NAME",
    place="write it in challenge.yaml",
    example="challenge.baseline = 'baseline.gin'",
)

REFEREE = Language(
    root="referee",
    what="a referee",
    nodes={
        "referee": "trainer.studies.referee.Referee",
        "goal": "trainer.sweep.definition.Goal",
    },
    modules=_OF_A_RUN,
    keys="baseline, goal, pairs",
    marks=("pairs", "most_tries"),
    command="start it with python -m trainer referee start --config=FILE",
    place="write it in the file of a referee",
    example="referee.baseline = 'baseline.gin'",
)

LANGUAGES: Mapping[str, Language] = {each.root: each for each in (RUN, SWEEP, CHALLENGE, REFEREE)}


# A config may name only what `__all__` of these packages lists: their modules have functions that
# act on files or the network. In optax and packages of the user all public functions are allowed.
_LISTED = frozenset(
    module
    for language in LANGUAGES.values()
    for module in language.modules.values()
    if module != "optax"
)
_PACKAGE = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)*", re.ASCII)


class Vocabulary:
    """Finds the functions that a config may name: of a language, and of the user's packages."""

    # A config spells the names of functions of these packages, such as "my_lab.zoo", in full;
    # `named` are all names of one, for messages. Raises ConfigError if a package has an invalid
    # name, a name that is taken, or cannot be imported.

    def __init__(
        self, packages: Sequence[str] = (), language: Language = RUN, named: Iterable[str] = ()
    ):
        self._packages = tuple(packages)
        self.language = language
        self._named = tuple(named)
        self._functions: dict[str, signatures.Function] = {}
        for package in self._packages:
            self._check_package(package)

    def function(self, name: str, source: Source | None = None) -> signatures.Function:
        """Returns a function by its dotted name, such as "optax.adamw"; raises ConfigError."""
        if name not in self._functions:
            self._functions[name] = signatures.read_signature(
                name, self._find(name, source), source
            )
        return self._functions[name]

    def ending_with(self, name: str, source: Source | None = None) -> list[signatures.Function]:
        """Returns all functions whose name ends with a name like "adamw"; raises ConfigError."""
        modules = [each for each in sys.modules if any(_lies_in(each, p) for p in self._packages)]
        found, roots = [], [*self.language.modules, "optax.contrib", *modules]
        for full in [name, *(f"{root}.{name}" for root in roots)]:
            with contextlib.suppress(ConfigError):
                found.append(self.function(full, source))
        return found or [self.function(name, source)]

    def names(self, package: str) -> list[str]:
        """Returns the full names of the functions of a package, such as "models"; ConfigError."""
        module = self._module(f"{package}.x", None)
        return [f"{package}.{name}" for name in _public_names(module)]

    def _check_package(self, package: str) -> None:
        source = Source(f"--vocabulary={package[:60]}")
        if not _PACKAGE.fullmatch(package):
            raise ConfigError("This is not the name of a package, such as my_lab.zoo.", source)
        root = package.split(".")[0]
        nodes = {name: f"the {name} itself" for name in self.language.nodes}
        taken = {**self.language.modules, **nodes, "trainer": "this program"}
        if root in taken:
            raise ConfigError(
                f"The name {root!r} is taken: {root}.* means {taken[root]} in a"
                " config. Rename your package, or put it into another package.",
                source,
            )
        _import(package, source)

    def _find(self, name: str, source: Source | None) -> Any:
        if name in self.language.nodes:
            module, _, last = self.language.nodes[name].rpartition(".")
            return getattr(importlib.import_module(module), last)
        private = next((step for step in name.split(".") if step.startswith("_")), None)
        if private is not None:
            raise ConfigError(
                f"{name} is private ({private!r} begins with an underscore): a config names public"
                " functions only.",
                source,
            )
        module, last = self._module(name, source), name.rpartition(".")[2]
        if (found := _public_callable(module, last, source)) is None:
            raise ConfigError(self._unknown(name, module, last), source)
        return found

    def _module(self, name: str, source: Source | None) -> ModuleType:
        """Returns the module that the function of a dotted name stands in."""
        steps, modules = name.split(".")[:-1], self.language.modules
        if steps and steps[0] in modules:
            module, rest = importlib.import_module(modules[steps[0]]), steps[1:]
        elif steps and (package := longest_key(self._packages, name)):
            module = _import(str(package), source)
            rest = steps[str(package).count(".") + 1 :]
        else:
            roots = [*modules, *self._packages]
            tops = {each.split(".")[0] for each in roots}.difference(steps[:1])
            near = nearest(steps[0], tops) if steps else None
            hint = f"Did you mean {near + name[len(steps[0]) :]!r}? " if near else ""
            hint = f"{hint or self._elsewhere(name)}A name begins with {listing(roots, 12)}."
            if not near and steps and steps[0] not in sys.stdlib_module_names:
                hint += self._lacking(steps[0])
            raise ConfigError(f"There is no function {name!r}. {hint}", source)
        for step in rest:
            module = self._step_into(module, step, name, source)
        return module

    def _lacking(self, first: str) -> str:
        """Says how to name the packages of a config that the vocabulary lacks, such as `first`."""
        names = [x for x in self._named if longest_key(self._packages, x) is None]
        tops = dict.fromkeys([first, *(x.split(".")[0] for x in names if not self.language.has(x))])
        packages = [x for x in tops if not nearest(x, self.language.modules)]
        option, start = f"--vocabulary={','.join(packages)}", started()
        what = "are packages" if packages[1:] else "is a package"
        text = f" If {joined(packages)} {what} of yours, add {option} to the command"
        if not start or {"--watched", "--plan_only"}.intersection(sys.argv):
            return f"{text} (from Python: vocabulary={packages})."
        return f"{text}:\n{shlex.join([*start, *sys.argv[1:], option])}"

    def _step_into(
        self, module: ModuleType, step: str, name: str, source: Source | None
    ) -> ModuleType:
        if module.__name__ in _LISTED:
            hint = self._elsewhere(name) or known_names(step, _public_names(module), "It has")
            text = f"{module.__name__} has no module {step!r} ({name}). {hint}".rstrip()
            raise ConfigError(text, source)
        if (inner := _submodule(module, step, source)) is not None:
            return inner
        here = _attribute(module, step, source)
        if isinstance(here, ModuleType):
            raise ConfigError(
                f"{name} cannot be used: {module.__name__} only imports its module"
                f" {here.__name__}, and a config names only what a package defines itself.",
                source,
            )
        modules = {key: x for key, x in vars(module).items() if isinstance(x, ModuleType)}
        own = [key for key, x in modules.items() if x.__name__ == f"{module.__name__}.{key}"]
        hint = known_names(step, [key for key in own if not key.startswith("_")])
        raise ConfigError(f"{module.__name__} has no module {step!r} ({name}). {hint}", source)

    def _unknown(self, name: str, module: ModuleType, last: str) -> str:
        own = name.rpartition(".")[0]
        if (what := getattr(module, last, None)) is not None:
            if isinstance(what, ModuleType):
                words = "is a module, not a function"
            elif module.__name__ in _LISTED:
                words = f"is not among the functions of {own} that a config may name"
                return f"{name} {words}: {listing(_public_names(module), 20)}."
            elif callable(what):
                home = signatures.defining_module(what) or "elsewhere"
                words = f"is not a function of {own}: it comes from {home}"
            else:
                words = "is neither a function nor a class"
            return f"{name} {words}. A config names only functions that a package defines itself."
        if not (hint := self._elsewhere(name).strip()):
            names = _public_names(module)
            near = nearest(last, names)
            hint = f"Did you mean {f'{own}.{near}'!r}?" if near else ""
            hint = hint or known_names(last, names, f"{own} has")
        return f"There is no function {name!r}. {hint}"

    def _elsewhere(self, name: str) -> str:
        """Suggests a function of the same name in another package; "" if there is none."""
        # A package that the name has before the function, such as "parts", is asked first.
        *steps, last = name.split(".")
        others = ["optax.contrib", *self._packages]
        packages = [*self.language.modules.items(), *zip(others, others, strict=True)]
        for root, package in sorted(packages, key=lambda each: each[0] not in steps[1:]):
            if last in _public_names(importlib.import_module(package)):
                return f"Did you mean {f'{root}.{last}'!r}? "
        return ""


def _import(package: str, source: Source | None) -> ModuleType:
    try:
        return importlib.import_module(package)
    except (Exception, SystemExit) as error:  # importing a package of the user can raise anything
        if isinstance(error, ModuleNotFoundError) and package.startswith(f"{error.name}"):
            # The package itself is missing, and not a module that it imports.
            reason = f"there is no module named {error.name!r}; it must be in the current folder"
            reason += " or be installed"
        else:
            reason = wording.summary(error, package)
        raise ConfigError(f"The package {package} cannot be imported: {reason}.", source) from error


def _submodule(module: ModuleType, step: str, source: Source | None) -> ModuleType | None:
    name = f"{module.__name__}.{step}"
    here = _attribute(module, step, source)
    if isinstance(here, ModuleType):
        return here if here.__name__ == name else None
    is_optax = _lies_in(name, "optax")  # importing optax imports its public modules
    if here is None and hasattr(module, "__path__") and not is_optax:
        found = name in sys.modules
        with contextlib.suppress(ImportError, ValueError):
            found = found or importlib.util.find_spec(name) is not None
        if found:
            return _import(name, source)
    return None


def _attribute(module: ModuleType, name: str, source: Source | None) -> Any:
    """Returns an attribute of a module, or None; accessing it may import another module."""
    try:
        return getattr(module, name, None)
    except Exception as error:
        reason = wording.summary(error, module.__name__)
        text = f"{module.__name__}.{name} cannot be imported: {reason}."
        raise ConfigError(text, source) from error


def _public_callable(
    module: ModuleType, name: str, source: Source | None
) -> Callable[..., Any] | None:
    """Returns a public function or class that a module's package defines itself, or None."""
    value = _attribute(module, name, source)
    package = module.__name__.split(".")[0]
    # Aliases such as dict[str, float] are callable, but are not functions.
    if name.startswith("_") or not callable(value) or typing.get_origin(value) is not None:
        return None
    is_own = name in getattr(module, "__all__", ())
    if module.__name__ not in _LISTED:
        # What it imports is not public: a config must not reach the functions of os through it.
        is_own |= _lies_in(signatures.defining_module(value), package)
    return value if is_own and not isinstance(value, typing.TypeVar) else None


def _public_names(module: ModuleType) -> list[str]:
    """Returns the names for which `_public_callable` returns something."""
    names = []
    with warnings.catch_warnings(action="ignore"):  # accessing a deprecated name warns
        for name in dir(module):
            with contextlib.suppress(ConfigError):
                names += [name] if _public_callable(module, name, None) is not None else []
    return names


def _lies_in(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")
