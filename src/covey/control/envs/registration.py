"""Looks up registered environments by id; errors are one line with the fix."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from covey.config import ConfigError
from covey.config.fields import did_you_mean
from covey.config.named_modules import search_path
from covey.control.envs.checked import EnvironmentFault
from covey.runtime.worker.child import user_line


@dataclass(frozen=True)
class Package:
    """A package that registers its environments when a module is imported, or by the module's `register_envs`."""

    module: str
    install: str


# Prefix of an id -> package.
PACKAGES = {
    "ALE/": Package("ale_py", "'covey[atari]'"),
    "MiniGrid-": Package("minigrid", "minigrid"),
    "BabyAI-": Package("minigrid", "minigrid"),
    "MinAtar/": Package("minatar.gym", "minatar"),
    "highway-": Package("highway_env", "highway-env"),
    "mo-": Package("mo_gymnasium", "mo-gymnasium"),
    "Fetch": Package("gymnasium_robotics", "gymnasium-robotics"),
    "HandManipulate": Package("gymnasium_robotics", "gymnasium-robotics"),
    "AntMaze": Package("gymnasium_robotics", "gymnasium-robotics"),
    "PointMaze": Package("gymnasium_robotics", "gymnasium-robotics"),
    "MiniWorld-": Package("miniworld", "miniworld"),
    "procgen": Package("procgen", "procgen"),
}
# Word in Gymnasium's message about a missing package -> covey's extra.
EXTRAS = {"box2d": "box2d", "mujoco": "mujoco", "ale_py": "atari", "ale-py": "atari"}


def find_spec(name: str) -> EnvSpec:
    """Find the registered environment of an id, "CartPole-v1" or "module:Env-v0" (registered at its import).

    Modules in the working directory are found too.

    Raises:
        ConfigError: for an id that is not registered, or a module that cannot be imported.
    """
    module, _, short = name.rpartition(":")
    if module.endswith(".py"):
        raise ConfigError(f"environment.id: {name!r} names a file: write its module, {module[:-3]}:{short}")
    if module:
        _import(module, name)
    package = next((package for start, package in PACKAGES.items() if short.startswith(start)), None)
    if short not in gym.registry and package is not None and not module:
        if importlib.util.find_spec(package.module.partition(".")[0]) is None:
            raise ConfigError(
                f"environment.id: {short!r} is in a package that is not installed: pip install {package.install}"
            )
        _import(package.module, name)
        if short not in gym.registry:
            getattr(sys.modules[package.module], "register_envs", lambda: None)()
    spec = gym.registry.get(short)
    if spec is None:
        more = "" if module else "; your own is named module:Env-v0, with the module that registers it"
        raise ConfigError(
            f"environment.id: no environment {short!r} is registered{did_you_mean(short, list(gym.registry))}{more}"
        )
    return spec


@contextmanager
def refuse_broken(name: str) -> Iterator[None]:
    """Context manager that turns any exception while an environment is created into one line with the fix.

    Raises:
        ConfigError: in place of any exception.
    """
    try:
        yield
    except ConfigError:
        raise
    except EnvironmentFault as error:
        raise ConfigError(str(error)) from error
    except gym.error.DependencyNotInstalled as error:
        first = (str(error).splitlines() or [""])[0]
        extra = next((extra for word, extra in EXTRAS.items() if word in first.lower()), None)
        hint = f"pip install 'covey[{extra}]'" if extra else first
        raise ConfigError(f"environment.id: {name!r} needs a package that is not installed: {hint}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"environment.id: {name!r} needs the module {error.name!r}, which is not installed: install its package"
        ) from error
    except Exception as error:
        cause = error.__cause__ if type(error.__cause__) is type(error) else error  # Gymnasium adds to a TypeError
        first = (str(cause).splitlines() or [""])[0]
        lacks = isinstance(error, TypeError) and "__init__() missing" in first
        remedy = ": give it where the environment is registered, in gym.register(..., kwargs={...})"
        raise ConfigError(
            f"environment.id: {name!r} could not be made: {type(error).__name__}: {first}"
            f"{remedy if lacks else user_line(cause)}"
        ) from error


def _import(module: str, name: str) -> None:
    sys.path[:] = search_path(f"{module}:", "environment.id", "gymnasium")
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"environment.id: cannot import the module of {name!r} ({error}): install it, or start covey in the "
            "folder that holds it"
        ) from error
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"environment.id: importing {module!r} failed: {type(error).__name__}: {first}{user_line(error)}"
        ) from error
