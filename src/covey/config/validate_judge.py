"""Validates the fields of a judge. Its server is not contacted."""

from __future__ import annotations

import math
import os
import re
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from covey.config.addresses import is_this_machine, parse_address
from covey.config.common import ConfigError
from covey.config.fields import missing_file
from covey.config.files import parse_json, read_file, shortened, user_path
from covey.config.judge import JudgeFields
from covey.config.token_text import LARGEST_TOKEN, token_in

ENDPOINT = "/chat/completions"
LARGEST_PROMPT = 1 << 20  # bytes of judge_prompt_file


def check_judge(reward: Any, where: str) -> None:
    """Refuse the fields of a judge that contradict each other; `where` names the [[rewards]] table in the message.

    Raises:
        ConfigError: naming the field and the fix. The token is not in the message.
    """
    if not reward.judge:
        for field in fields(JudgeFields):
            if getattr(reward, field.name) != field.default:
                raise ConfigError(f"{where} has {field.name}, which only a judge uses: set judge, or take it out")
        return
    _check_address(reward, where)
    if not reward.judge_model:
        raise ConfigError(f"{where}: the judge has no judge_model, the name of its model at {reward.judge}")
    try:
        question = question_of(reward)
        words_of(reward)
        request_fields(reward)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if "{completion}" not in question:
        raise ConfigError(f"{where}: the judge's question has no {{completion}}, so it does not see what it judges")
    _check_score(reward, where)
    _check_token(reward, where)
    if reward.per_step:
        raise ConfigError(f"{where} has per_step = true, but a judge scores whole completions: take it out")


def endpoint(address: str) -> str:
    """The address of the chat completions API below a server's address."""
    bare = address.rstrip("/")
    return bare if bare.endswith(ENDPOINT) else bare + ENDPOINT


def question_of(reward: Any) -> str:
    """The template of the question. Raises ConfigError if there is none, or its file cannot be read."""
    if bool(reward.judge_prompt) == bool(reward.judge_prompt_file):
        both = "both judge_prompt and judge_prompt_file" if reward.judge_prompt else "no judge_prompt"
        raise ConfigError(f"the judge has {both}: give its question once, with {{prompt}} and {{completion}} in it")
    if reward.judge_prompt:
        return str(reward.judge_prompt)
    path = user_path(reward.judge_prompt_file, "judge_prompt_file: ")
    if not path.is_file():
        raise ConfigError(f"judge_prompt_file: {missing_file(path, reward.judge_prompt_file)}")
    try:
        return read_file(path, LARGEST_PROMPT).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"judge_prompt_file: {reward.judge_prompt_file} is not UTF-8 text") from None


def words_of(reward: Any) -> dict[str, float]:
    """Word in lower case -> score. Raises ConfigError for an entry that is no 'word = number'."""
    found: dict[str, float] = {}
    for entry in reward.judge_words:
        word, _, number = str(entry).rpartition("=")
        word = word.strip().lower()
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not word or not math.isfinite(value):
            raise ConfigError(f"judge_words has {shortened(str(entry))}: an entry is a word and its score, 'good = 1'")
        if word in found:
            raise ConfigError(f"judge_words has {shortened(word)} twice")
        found[word] = value
    return found


def request_fields(reward: Any) -> dict[str, Any]:
    """The fields of each request except its messages. Raises ConfigError if judge_request is no JSON object."""
    request: dict[str, Any] = {
        "model": reward.judge_model,
        "temperature": reward.judge_temperature,
        "max_tokens": reward.judge_max_tokens,
    }
    if reward.judge_request:
        try:
            further = parse_json(reward.judge_request)
        except ValueError as error:
            raise ConfigError(f"judge_request is {error}") from None
        if not isinstance(further, dict):
            raise ConfigError("judge_request must be a JSON object, such as '{\"seed\": 1}'")
        if taken := next((name for name in ("model", "messages", "stream", "n") if name in further), None):
            raise ConfigError(f"judge_request has {taken!r}, which covey sets itself: take it out")
        request |= further
    return {name: value for name, value in request.items() if value is not None}


def _check_address(reward: Any, where: str) -> None:
    address = reward.judge
    if re.match(r"[^/]*/*[^/]*@", address):  # it may have a password, which no message may show
        raise _secret_in_address(where, "a user name")
    parts, _ = parse_address(address, f"{where}: judge ")
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s\\]", address):
        raise ConfigError(
            f"{where}: judge must be an address such as http://127.0.0.1:8000/v1 (is {shortened(_public(parts))})"
        )
    if parts.query or parts.fragment:
        raise _secret_in_address(where, "a query")
    host = parts.hostname
    try:
        remote = not is_this_machine(host)
    except ValueError:
        return  # a name; the client resolves it
    if remote and not reward.allow_remote:
        fix = "write 127.0.0.1" if host in ("0.0.0.0", "::") else "allow it with allow_remote = true"
        raise ConfigError(f"{where}: judge: {host} is another machine, which would receive prompts; {fix}")


def _secret_in_address(where: str, what: str) -> ConfigError:
    return ConfigError(
        f"{where}: judge must be a plain address, and this one has {what}; an access token belongs in a file "
        "(judge_token_file) or an environment variable (judge_token_variable)"
    )


def _public(parts: SplitResult) -> str:
    """The address without a query, which may hold secrets."""
    return parts._replace(query="", fragment="").geturl()


def _check_score(reward: Any, where: str) -> None:
    if reward.judge_pattern and reward.judge_field:
        raise ConfigError(f"{where} has both judge_pattern and judge_field: give the one that finds the score")
    if len(reward.judge_range) != 2 or not reward.judge_range[0] < reward.judge_range[1]:
        raise ConfigError(f"{where}: judge_range must be the lowest and the highest score, such as [0, 10]")
    low, high = reward.judge_range
    for word, value in words_of(reward).items():
        if not low <= value <= high:
            limits = f"{low:g} to {high:g}"
            raise ConfigError(f"{where}: judge_words has {word!r} = {value:g}, outside judge_range ({limits})")
    if reward.judge_pattern:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                groups = re.compile(reward.judge_pattern, re.DOTALL).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{where}: judge_pattern is no regular expression ({error})") from None
        if groups != 1:
            raise ConfigError(f"{where}: judge_pattern needs one group, the score, and has {groups}: 'Score: ([0-9]+)'")


def _check_token(reward: Any, where: str) -> None:
    """Refuse a token that cannot be sent, without showing it."""
    variable, file = reward.judge_token_variable, reward.judge_token_file
    if variable and file:
        raise ConfigError(f"{where} has both judge_token_variable and judge_token_file: give one")
    if variable and not os.environ.get(variable, "").strip():
        named = f" {variable}" if re.fullmatch(r"[A-Z][A-Z0-9_]*", variable) else ""  # others may be a token
        raise ConfigError(
            f"{where}: judge_token_variable is the name of an environment variable, not the token, and there is no "
            f"variable{named} with a value: set it"
        )
    path = user_path(file, f"{where}: judge_token_file: ") if file else Path()
    if file and not path.is_file():
        raise ConfigError(f"{where}: judge_token_file: {missing_file(path, file)}")
    if variable or file:
        try:
            judge_token(variable, str(path))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None


def judge_token(variable: str, file: str) -> str:
    """The token in an environment variable, or in a file if no variable is named.

    Raises:
        ConfigError: if there is none that can be sent in a header. The token is not in the message.
        MachineError: if the file cannot be read.
    """
    source = f"the environment variable {variable}" if variable else file
    content = os.environb.get(os.fsencode(variable), b"") if variable else read_file(Path(file), 2 * LARGEST_TOKEN)
    if not (token := token_in(content)):
        raise ConfigError(
            f"{source} holds no token: one word of at most {LARGEST_TOKEN:,} printable ASCII characters is needed"
        )
    return token
