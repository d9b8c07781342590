"""Environments by name: what is registered, and one clear line where something about it does not work."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from covey.config import ConfigError
from covey.config.values import did_you_mean


def find_spec(name: str) -> EnvSpec:
    """The registered environment of an id, "CartPole-v1" or "module:Env-v0" (the module registers it when imported).

    Modules in the working directory are found too.

    Raises:
        ConfigError: an id that nobody registered, or a module that cannot be imported.
    """
    module, _, short = name.rpartition(":")
    if module:
        _import(module, name)
    spec = gym.registry.get(short)
    if spec is None:
        more = "" if module else "; your own is named module:Env-v0, with the module that registers it"
        raise ConfigError(
            f"environment.id: no environment {short!r} is registered{did_you_mean(short, list(gym.registry))}{more}"
        )
    return spec


@contextmanager
def refuse_broken(name: str) -> Iterator[None]:
    """Turns whatever goes wrong while an environment is made into one line that says what to do.

    Raises:
        ConfigError: in place of any exception.
    """
    try:
        yield
    except ConfigError:
        raise
    except gym.error.DependencyNotInstalled as error:
        first = str(error).splitlines()[0]
        hint = "pip install 'covey[box2d]'" if "box2d" in first.lower() else first
        raise ConfigError(f"environment.id: {name!r} needs a package that is not installed: {hint}") from error
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"environment.id: {name!r} could not be made: {type(error).__name__}: {first}") from error


def _import(module: str, name: str) -> None:
    if os.getcwd() not in sys.path:  # the installed command does not look in the working directory by itself
        sys.path.append(os.getcwd())
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"environment.id: cannot import the module of {name!r} ({error}): install it, or start covey in the "
            "folder that holds it"
        ) from error
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"environment.id: importing {module!r} failed: {type(error).__name__}: {first}") from error
