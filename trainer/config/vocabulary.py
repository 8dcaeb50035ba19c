"""Finds the functions that a config may name."""

import functools
import importlib
import importlib.util
import inspect
import re
import sys
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from trainer.config.tree import ConfigError, Source, known_names, listing, nearest

ROOTS: Mapping[str, str] = {
    "optim": "optim",
    "optax": "optax",
    "schedules": "optim.schedules",
    "models": "trainer.models",
    "data": "trainer.data",
    "losses": "trainer.losses",
    "metrics": "trainer.metrics",
}
EXPERIMENT = "experiment"
_PACKAGE = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)*", re.ASCII)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Parameter:
    """A parameter that a config may name.

    Attributes:
        hint: its annotation, evaluated; `typing.Any` where there is none that can be.
        default: its default, or `inspect.Parameter.empty`.
        kind: as of `inspect.Parameter`; `VAR_POSITIONAL` takes a list.
    """

    hint: Any
    default: Any
    kind: Any

    @property
    def required(self) -> bool:
        variadic = self.kind is inspect.Parameter.VAR_POSITIONAL
        return self.default is inspect.Parameter.empty and not variadic


@dataclass(frozen=True)
class Function:
    """A function that a config may call, with the parameters that it may name."""

    name: str
    call: Callable[..., Any]
    parameters: Mapping[str, Parameter]
    open_ended: bool
    """It takes **kwargs. That widens nothing that a config may say."""

    returns: Any

    def bind(self, values: Mapping[str, Any]) -> functools.partial:
        """Returns the function with its arguments, each passed the way it wants to be passed."""
        spread = any(
            name in values and parameter.kind is inspect.Parameter.VAR_POSITIONAL
            for name, parameter in self.parameters.items()
        )
        args: list[Any] = []
        kwargs = dict(values)
        for name, parameter in self.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                args += kwargs.pop(name, [])
            elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY or (
                spread and parameter.kind in _POSITIONAL
            ):
                if name in kwargs:
                    args.append(kwargs.pop(name))
                elif parameter.default is not inspect.Parameter.empty:
                    args.append(parameter.default)
        return functools.partial(self.call, *args, **kwargs)


class Vocabulary:
    """The functions that a config may name, found when they are asked for.

    Args:
        packages: further packages, such as "my_lab.zoo"; a config names their functions in full.

    Raises:
        ConfigError: a package has no proper name, clashes with ours, or cannot be imported.
    """

    def __init__(self, packages: Sequence[str] = ()):
        self._packages = tuple(packages)
        self._functions: dict[str, Function] = {}
        for package in self._packages:
            self._check_package(package)

    def function(self, name: str, source: Source | None = None) -> Function:
        """Returns the function of a dotted name; raises ConfigError if a config may not name it."""
        if name not in self._functions:
            self._functions[name] = _function(name, self._find(name, source), source)
        return self._functions[name]

    def _check_package(self, package: str) -> None:
        source = Source(f"--vocabulary={package[:60]}")
        if not _PACKAGE.fullmatch(package):
            raise ConfigError("This is no name of a package, such as my_lab.zoo.", source)
        root = package.split(".")[0]
        if root in ROOTS or root == EXPERIMENT:
            raise ConfigError(
                f"The name {root!r} is taken: {root}.* means {ROOTS.get(root, 'the root')} in a"
                " config. Give your package another name, or put it into another package.",
                source,
            )
        _import(package, source)

    def _find(self, name: str, source: Source | None) -> Any:
        if name == EXPERIMENT:
            return _import("trainer.experiment", source).Experiment
        *steps, last = name.split(".")
        private = next((step for step in (*steps, last) if step.startswith("_")), None)
        if private is not None:
            raise ConfigError(
                f"{name} is private ({private!r} begins with an underscore): a config names public"
                " functions only.",
                source,
            )
        module, rest = self._root(name, steps, source)
        for step in rest:
            module = self._step_into(module, step, name, source)
        found = _own(module, last)
        if found is None:
            raise ConfigError(self._unknown(name, module, last), source)
        return found

    def _root(
        self, name: str, steps: list[str], source: Source | None
    ) -> tuple[ModuleType, list[str]]:
        if steps and steps[0] in ROOTS:
            return _import(ROOTS[steps[0]], source), steps[1:]
        fitting = [each for each in self._packages if f"{name}.".startswith(f"{each}.")]
        if fitting and steps:
            package = max(fitting, key=len)
            return _import(package, source), steps[package.count(".") + 1 :]
        roots = [*ROOTS, *self._packages]
        near = nearest(steps[0], roots) if steps else None
        if near:
            hint = f"Did you mean {near + name[len(steps[0]) :]!r}? "
        else:
            hint = self._elsewhere(name)
        hint += f"A name begins with {listing(roots, 12)}"
        if steps and not near and steps[0] not in sys.stdlib_module_names:
            hint += f"; for a package of yours, add --vocabulary={'.'.join(steps)} to the command"
        hint += "."
        raise ConfigError(f"There is no function {name!r}. {hint}", source)

    def _step_into(
        self, module: ModuleType, step: str, name: str, source: Source | None
    ) -> ModuleType:
        inner = _submodule(module, step, source)
        if inner is not None:
            return inner
        here = getattr(module, step, None)
        if isinstance(here, ModuleType):
            raise ConfigError(
                f"{name} reaches through {module.__name__} into another package"
                f" ({here.__name__}): a config names only what a package defines itself.",
                source,
            )
        modules = [key for key, value in vars(module).items() if _is_inner(module, key, value)]
        hint = known_names(step, [key for key in modules if not key.startswith("_")])
        raise ConfigError(f"{module.__name__} has no module {step!r} ({name}). {hint}", source)

    def _unknown(self, name: str, module: ModuleType, last: str) -> str:
        own = name.rpartition(".")[0]
        if hasattr(module, last):
            what = getattr(module, last)
            if isinstance(what, ModuleType):
                words = "is a module, and no function"
            elif callable(what):
                words = f"is no function of {own}: it comes from {_home(what) or 'elsewhere'}"
            else:
                words = "is neither a function nor a class"
            return f"{name} {words}. A config names only functions that a package defines itself."
        names = _public(module)
        near = nearest(last, names)
        hint = f"Did you mean {f'{own}.{near}'!r}?" if near else self._elsewhere(name).strip()
        return f"There is no function {name!r}. {hint or known_names(last, names, own + ' has')}"

    def _elsewhere(self, name: str) -> str:
        """Suggests a function of the same name in another package."""
        last = name.rsplit(".", 1)[-1]
        for root, package in [*ROOTS.items(), ("optax.contrib", "optax.contrib")] + [
            (each, each) for each in self._packages
        ]:
            try:
                if _own(_import(package, None), last) is not None:
                    return f"Did you mean {f'{root}.{last}'!r}? "
            except ConfigError:
                continue
        return ""


def _import(package: str, source: Source | None) -> ModuleType:
    try:
        return importlib.import_module(package)
    except Exception as error:  # a package may raise anything while it is imported
        if isinstance(error, ModuleNotFoundError) and package.startswith(f"{error.name}"):
            reason = f"there is no module named {error.name!r}; it must lie in the directory where"
            reason += " the command runs, or be installed"
        else:
            reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"The package {package} cannot be imported: {reason}.", source) from error


def _submodule(module: ModuleType, step: str, source: Source | None) -> ModuleType | None:
    name = f"{module.__name__}.{step}"
    here = getattr(module, step, None)
    if isinstance(here, ModuleType):
        return here if here.__name__ == name else None
    if here is None and hasattr(module, "__path__") and _exists(name):
        return _import(name, source)
    return None


def _exists(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _is_inner(module: ModuleType, key: str, value: Any) -> bool:
    return isinstance(value, ModuleType) and value.__name__ == f"{module.__name__}.{key}"


def _own(module: ModuleType, name: str) -> Callable[..., Any] | None:
    """Returns a public function or class that a module's package defines itself, or None."""
    value = getattr(module, name, None)
    package = module.__name__
    package = package if package.startswith("trainer.") else package.split(".")[0]
    if name.startswith("_") or not callable(value) or typing.get_origin(value) is not None:
        return None
    is_ours = _lies_in(_home(value), package) or name in getattr(module, "__all__", ())
    return value if is_ours and not isinstance(value, typing.TypeVar) else None


def _public(module: ModuleType) -> list[str]:
    """Returns the names of all that `_own` would return."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a deprecated name says so when it is looked at
        return [name for name in dir(module) if _own(module, name) is not None]


def _lies_in(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def _home(value: Any) -> str:
    """Returns the name of the module that defines a function or class."""
    while isinstance(value, functools.partial):
        value = value.func
    return getattr(value, "__module__", None) or ""


def _function(name: str, call: Callable[..., Any], source: Source | None) -> Function:
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name} does not say which arguments it takes, so a config cannot call it.", source
        ) from None
    hints = _hints(call)
    parameters = {}
    open_ended = False
    for key, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            open_ended = True
            continue
        hint = _evaluated(hints.get(key, parameter.annotation), call)
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            hint = Sequence[Any if hint is inspect.Parameter.empty else hint]
        parameters[key] = Parameter(hint, parameter.default, parameter.kind)
    returns = hints.get("return", signature.return_annotation)
    returns = Any if inspect.isclass(call) else _evaluated(returns, call)
    return Function(name, call, parameters, open_ended, returns)


def _hints(call: Any) -> dict[str, Any]:
    while isinstance(call, functools.partial):
        call = call.func
    hints: dict[str, Any] = {}
    for part in [call, call.__init__] if inspect.isclass(call) else [call]:
        try:
            hints.update(typing.get_type_hints(part))
        except Exception:  # an annotation may be any expression; each is tried by itself later
            continue
    return hints


def _evaluated(hint: Any, call: Any) -> Any:
    if hint is inspect.Parameter.empty:
        return inspect.Parameter.empty
    if not isinstance(hint, str):
        return hint
    module = sys.modules.get(_home(call))
    try:
        return eval(hint, dict(vars(module)) if module else {})  # written in the function's module
    except Exception:  # a name that exists for type checkers only
        return Any
