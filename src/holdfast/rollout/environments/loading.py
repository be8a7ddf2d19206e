"""An environment by its name in the configuration.

    reverse, copy, increment, guess     those that are shipped
    package.module:attribute            a class, a function that makes one, or a reward function
    verifiers:ENV_ID                    an environment of the library `verifiers`

A plug-in is imported with the current folder on the path. Options are keyword arguments; one that
nobody asks for is a mistake, never silently ignored.
"""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.errors import Mistake, NotFound
from holdfast.rollout.environments.base import Environment, limits_of
from holdfast.rollout.environments.digits import Copy, Increment, Reverse
from holdfast.rollout.environments.guess import Guess
from holdfast.rollout.environments.reward import RewardFunction, is_reward
from holdfast.rollout.environments.verifiers import Verifiers, library
from holdfast.rollout.environments.verifiers_v1 import VerifiersTaskset

__all__ = ["SHIPPED", "is_plugin", "load_environment"]

SHIPPED: Mapping[str, Callable[..., Environment]] = {
    "copy": Copy,
    "guess": Guess,
    "increment": Increment,
    "reverse": Reverse,
}


def load_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """Make the environment. Raises `Mistake` when the name or an option is wrong."""
    make = _maker(name)
    _check_options(name, make, options)
    environment = make(**options)
    if not isinstance(environment, Environment):
        raise Mistake(
            f"{name} made a {type(environment).__name__}:"
            " it must be a holdfast.rollout.environments.Environment"
        )
    limits_of(environment)
    return environment


def is_plugin(name: str) -> bool:
    """Whether the name is of somebody else's code. Wrong names are nobody's."""
    return ":" in name


def _maker(name: str) -> Callable[..., Any]:
    if name in SHIPPED:
        return SHIPPED[name]
    if not is_plugin(name):
        hint = _near(name, SHIPPED) or f"there are {', '.join(SHIPPED)}"
        raise NotFound(f"there is no environment {name}: {hint}, or package.module:attribute")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    module, _, attribute = name.partition(":")
    if module == "verifiers":
        kind = Verifiers if hasattr(library(), "load_environment") else VerifiersTaskset
        return partial(kind, attribute)
    found = _attribute(module, attribute)
    if not callable(found):
        raise Mistake(f"{name} is a {type(found).__name__}: it must be a class or a function")
    return partial(RewardFunction, found) if is_reward(found) else found


def _attribute(module: str, attribute: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Not for something that the module itself asks for: that is its own error.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise NotFound(
            f"there is no module {error.name}, neither in {Path.cwd()} nor installed"
        ) from None
    except ValueError:
        raise Mistake(f"{module!r} is no name of a module") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            hint = _near(part, [each for each in dir(found) if not each.startswith("_")])
            raise NotFound(f"{module} has no {attribute}{hint and ': ' + hint}")
        found = getattr(found, part)
    return found


def _check_options(name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(make).parameters.values()
    named = [
        each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    known = [each.name for each in named]
    if all(each.kind is not each.VAR_KEYWORD for each in parameters):
        for option in options:
            if option not in known:
                hint = _near(option, known) or f"there are {', '.join(known) or 'none'}"
                raise Mistake(f"environment {name} has no option {option}: {hint}")
    for each in named:
        if each.default is each.empty and each.name not in options:
            raise Mistake(f"environment {name} needs the option {each.name}")


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}" if near else ""
