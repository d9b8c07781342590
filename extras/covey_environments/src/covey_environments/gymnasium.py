"""The environment `gymnasium`: a Gymnasium environment whose observations and actions can be text.

observation space          text that the model reads
Text                       the observation
any, render mode "ansi"    the rendered text; colours are written as brackets
Discrete and the like      the numbers as JSON

action space               what the model writes
Text                       the action
Discrete                   the name of an action (option `actions`), or its number
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium import spaces

from covey.llm.conversation.adapter import Adapter, Response, WrongEnvironment
from covey.runtime.worker.child import one_line

ANSI = "ansi"
_COLORS = dict(enumerate(("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")))
_COLORED = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SEED_BITS = 31


class Gymnasium(Adapter):
    """An environment by its id, made by `gymnasium.make`.

    The column `seed` of a row is that of the reset; without it, the seed is equal in a group. An action that the space
    does not contain is answered with a message, without a step. An episode that ends or is truncated ends the
    conversation.

    Args:
        id: of a registered environment, or "module:id" to import the module that registers it.
        actions: names of the actions of a Discrete space, in their order; the model writes one of them.
        settings: other arguments of `gymnasium.make`.

    Raises:
        WrongEnvironment: if it cannot be made, or has other spaces.
    """

    def __init__(self, id: str, actions: Sequence[str] = (), **settings: Any) -> None:
        self._environment = _made(id, settings)
        self._names = _checked_names(id, self._environment.action_space, actions)
        self._text = _observation_text(id, self._environment)

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None, **columns: Any) -> str:
        """Reset with the columns `seed` and `options`."""
        number = random.getrandbits(_SEED_BITS) if seed is None else int(seed)
        observation, _ = self._environment.reset(seed=number, options=None if options is None else dict(options))
        return self._text(observation)

    def respond(self, message: str, calls: Sequence[Mapping[str, Any]]) -> Response:
        """Take the action that the message names."""
        action, fault = self._action(message)
        if fault:
            return Response(text=fault)
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        return Response(text=self._text(observation), reward=float(reward), done=bool(terminated or truncated))

    def close(self) -> None:
        self._environment.close()

    def _action(self, message: str) -> tuple[Any, str]:
        """The action, or a message for the model."""
        space: Any = self._environment.action_space
        text = message.strip()
        if isinstance(space, spaces.Text):
            return text, "" if space.contains(text) else _text_fault(space, text)
        place = _named(text, self._names)
        if place is None:
            return None, f"Reply with one of: {', '.join(self._names)}."
        return int(space.start) + place, ""


def _made(id: str, settings: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """The environment, with the render mode "ansi" if it has one and its observations are not text."""
    try:
        made = gymnasium.make(id, **settings)
        if "render_mode" not in settings and not _has_text(made) and ANSI in made.metadata.get("render_modes", ()):
            made.close()
            made = gymnasium.make(id, render_mode=ANSI, **settings)
    except Exception as error:
        raise WrongEnvironment(f"gymnasium cannot make {id!r}: {one_line(error)}") from None
    return made


def _has_text(environment: gymnasium.Env[Any, Any]) -> bool:
    space = environment.observation_space
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
    return _is_plain(space) and any(isinstance(part, spaces.Text) for part in parts)


def _observation_text(id: str, environment: gymnasium.Env[Any, Any]) -> Any:
    """The function from an observation to its text.

    Raises:
        WrongEnvironment: if there is none.
    """
    space = environment.observation_space
    if environment.render_mode == ANSI:
        return lambda observation: colors_as_brackets(str(environment.render())).strip("\n")
    if isinstance(space, spaces.Text):
        return str
    if _is_plain(space):
        return lambda observation: json.dumps(_plain(observation), ensure_ascii=False)
    raise WrongEnvironment(
        f"the observations of {id} are a {type(space).__name__}, which is not text, and it has no render mode 'ansi': "
        "write an environment of your own around it, whose step returns a text"
    )


def _is_plain(space: Any) -> bool:
    """True for texts and whole numbers, and for tuples and dicts of them."""
    if isinstance(space, spaces.Dict):
        return all(map(_is_plain, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(_is_plain, space.spaces))
    return isinstance(space, (spaces.Text, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))


def _plain(observation: Any) -> Any:
    """An observation as JSON's types."""
    if isinstance(observation, Mapping):
        return {str(key): _plain(value) for key, value in observation.items()}
    if isinstance(observation, (list, tuple)):
        return [_plain(value) for value in observation]
    return observation.tolist() if hasattr(observation, "tolist") else observation


def _checked_names(id: str, space: Any, actions: Sequence[str]) -> list[str]:
    """What the model may write for each action of a Discrete space; empty for a space of texts.

    Raises:
        WrongEnvironment: for another space, and for names that do not fit it.
    """
    if isinstance(space, spaces.Text):
        if actions:
            raise WrongEnvironment(f"the actions of {id} are texts, so they have no names: take the option actions out")
        return []
    if not isinstance(space, spaces.Discrete):
        raise WrongEnvironment(
            f"the actions of {id} are a {type(space).__name__}: the environment gymnasium takes texts and discrete "
            "actions; write an environment of your own around it, whose step takes a text"
        )
    names = [str(name) for name in actions] or [str(int(space.start) + number) for number in range(int(space.n))]
    if len(names) != space.n or len({name.lower() for name in names}) != len(names):
        raise WrongEnvironment(f"{id} has {space.n} actions, so the option actions needs {space.n} different names")
    return names


def _named(text: str, names: Sequence[str]) -> int | None:
    """The place of the name that occurs last in a text, as a whole word; of two that end there, the longer one."""
    last: tuple[int, int, int] | None = None
    for place, name in enumerate(names):
        for found in re.finditer(rf"(?<![\w-]){re.escape(name.lower())}(?!\w)", text.lower()):
            last = max(last or (-1, 0, 0), (found.end(), len(name), place))
    return None if last is None else last[2]


def _text_fault(space: spaces.Text, text: str) -> str:
    """Why a text is not an action."""
    if len(text) > space.max_length:
        return f"The reply has {len(text)} characters. Reply with at most {space.max_length}."
    if len(text) < space.min_length:
        return f"The reply is too short. Reply with at least {space.min_length} characters."
    wrong = sorted(set(text) - set(space.characters))
    return f"The reply may not have the characters {' '.join(wrong)}"


def colors_as_brackets(text: str) -> str:
    """A text for terminals without its escape sequences.

    Text on a coloured ground, which marks a place, is in brackets. Coloured letters have the name of the colour too.

    >>> colors_as_brackets("S\\x1b[41mF\\x1b[0mG \\x1b[34;1mR\\x1b[0m")
    'S[F]G [R blue]'
    """

    def bracket(match: re.Match[str]) -> str:
        codes = [int(code) for code in match[1].split(";") if code]
        if any(code // 10 in (4, 10) for code in codes):
            return f"[{match[2]}]"
        color = next((_COLORS.get(code % 10) for code in codes if code // 10 in (3, 9)), None)
        return f"[{match[2]} {color}]" if color else match[2]

    return _ESCAPE.sub("", _COLORED.sub(bracket, text))
