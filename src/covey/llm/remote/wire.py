"""The bodies of the routes between a run and its samplers, those of vLLM 0.32 or later. Every body is JSON.

| route                                | body                            | answer                             |
|--------------------------------------|---------------------------------|------------------------------------|
| `GET /health`                        |                                 |                                    |
| `GET /weight_info`                   |                                 | `{"weight_version"}`               |
| `POST /inference/v1/generate`        | `request_body`                  | `answer_body`, read by `read_answer` |
| `POST /init_weight_transfer_engine`  | `{"init_info"}`                 |                                    |
| `POST /start_weight_update`          | `{"weight_version"}` (not vLLM) |                                    |
| `POST /update_weights`               | `{"update_info"}`               |                                    |
| `POST /finish_weight_update`         | `{"weight_version"}`            |                                    |
| `POST /pause?mode=keep`, `/resume`   |                                 |                                    |
| `POST /reset_prefix_cache`           |                                 | `{"success"}`                      |

A version of weights is a text that only its run uses, so the weights of another run are other weights. covey's own
server takes two keys more in a request: `weight_version`, the version that it must have, and `covey`, the key of its
random numbers with the number of tokens that the prompt shares with the others of its step.

covey's own server ends completions at stop strings. vLLM does not get them, because its text of a completion may differ
from covey's; its completions are cut when they are read, which gives the same distribution.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from covey.data import EndReason
from covey.llm.generation.generator import Completion, GenerationRequest, GenerationSettings, RandomKey
from covey.llm.generation.truncation import Truncation
from covey.llm.model.stop_strings import StopStrings
from covey.runtime.rng import philox4x32

HEALTH = "/health"
WEIGHT_INFO = "/weight_info"
GENERATE = "/inference/v1/generate"
INIT = "/init_weight_transfer_engine"
START = "/start_weight_update"
UPDATE = "/update_weights"
FINISH = "/finish_weight_update"
PAUSE = "/pause"
RESUME = "/resume"
RESET_CACHE = "/reset_prefix_cache"

# A log-probability is at most 0; a sampler that subtracts a rounded logarithm may exceed it by this much, in nats.
ROUNDING = 1e-5
LONGEST_VERSION = 200  # characters
WORD = 2**32  # random keys are below it
MOST_COMPLETIONS = 1 << 16  # of a request
MOST_TOKENS = 1 << 27  # of all completions of a request
MOST_STOPS, LONGEST_STOP = 16, 1000  # stop strings of a request, and characters of one


class BadBody(ValueError):
    """A body that is not as the table says; the message is one line without the body itself."""


class WrongVersion(BadBody):
    """Other weights are requested than a server has, or have generated an answer."""


def request_body(request: GenerationRequest, version: str, *, covey: bool) -> dict[str, Any]:
    """The body of a request for completions.

    Args:
        request: the request.
        version: of the weights that must generate it.
        covey: True for covey's own server, which draws every token with its own random number. vLLM draws with one
            generator for each completion, whose seed is `request_seed` plus the number of the completion.
    """
    settings, key = request.settings, request.key
    parameters = {
        "n": request.completions,
        "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": 1.0,
        "logprobs": 0,
        "stop_token_ids": sorted(settings.end_ids),
        "ignore_eos": False,
        "seed": request_seed(key),
        "detokenize": False,
        "skip_special_tokens": False,
    }
    body = {"token_ids": list(request.prompt), "sampling_params": parameters, "cache_salt": version}
    if covey and settings.stop is not None:
        parameters["stop"] = list(settings.stop.strings)
    if covey and settings.truncation.min_new_tokens:
        parameters["min_tokens"] = settings.truncation.min_new_tokens
    own = asdict(key) | {"shared_prefix": settings.shared_prefix or 0, "continues": settings.continues}
    return body | {"covey": own, "weight_version": version} if covey else body


def request_seed(key: RandomKey) -> int:
    """A random number below 2**63 - 2**32, a function of the key.

    A server adds the number of the completion to it, and the sum must stay below 2**63.
    """
    counter = np.array([[key.step, key.group, key.first_rollout, key.first_position]], dtype=np.uint32)
    high, low, *_ = (int(word) for word in philox4x32(counter, (key.seed, key.stream))[0])
    return (high << 31 | low >> 1) % (2**63 - WORD)


def read_request(
    body: Any, vocabulary: int, weights: tuple[str, int], stop: Callable[[tuple[str, ...]], StopStrings | None]
) -> GenerationRequest:
    """Read a request for completions.

    Args:
        body: parsed JSON from outside.
        vocabulary: number of token ids.
        weights: version of the server's weights, and its number in the server.
        stop: makes the stop strings for the server's tokenizer.

    Raises:
        BadBody: naming the field.
        WrongVersion: if other weights are requested.
    """
    fields = _object(body, "the body")
    parameters = _object(fields.get("sampling_params"), "sampling_params")
    token_ids = _tokens(fields.get("token_ids"), vocabulary, "token_ids")
    if not token_ids:
        raise BadBody("token_ids is empty: a prompt has at least one token")
    if parameters.get("top_p", 1.0) != 1.0:
        raise BadBody("sampling_params.top_p must be 1: other values bias the log-probabilities")
    n = _integer(parameters.get("n", 1), 1, MOST_COMPLETIONS, "sampling_params.n")
    max_tokens = _integer(parameters.get("max_tokens"), 1, MOST_TOKENS // n, "sampling_params.max_tokens")
    temperature = _number(parameters.get("temperature", 1.0), "sampling_params.temperature")
    if temperature < 0:
        raise BadBody("sampling_params.temperature must be at least 0")
    end_ids = frozenset(_tokens(parameters.get("stop_token_ids", []), vocabulary, "sampling_params.stop_token_ids"))
    strings = _texts(parameters.get("stop", []), "sampling_params.stop")
    min_tokens = _integer(parameters.get("min_tokens", 0), 0, MOST_TOKENS, "sampling_params.min_tokens")
    own = _object(fields.get("covey"), "covey")
    key = _key(own, n, max_tokens)
    # The last token of a prompt is never shared.
    shared = _integer(own.get("shared_prefix", 0), 0, len(token_ids) - 1, "covey.shared_prefix")
    continues = own.get("continues", False)
    if not isinstance(continues, bool):
        raise BadBody("covey.continues must be true or false")
    label, number = weights
    if read_version(fields.get("weight_version")) != label:
        raise WrongVersion("the weights are not those that are requested")
    return GenerationRequest(
        tuple(token_ids),
        n,
        key,
        GenerationSettings(
            max_tokens,
            temperature,
            end_ids,
            number,
            shared_prefix=shared,
            stop=stop(strings),
            continues=continues,
            truncation=Truncation(min_new_tokens=min_tokens),
        ),
    )


def _key(fields: dict[str, Any], completions: int, tokens: int) -> RandomKey:
    names = ("seed", "step", "group", "first_rollout", "stream", "first_position")
    numbers = {name: _integer(fields.get(name, 0), 0, WORD - 1, f"covey.{name}") for name in names}
    if numbers["first_rollout"] + completions > WORD:
        raise BadBody(f"covey.first_rollout must be at most {WORD - completions}")
    if numbers["first_position"] + tokens > WORD:
        raise BadBody(f"covey.first_position must be at most {WORD - tokens}")
    return RandomKey(**numbers)


def read_version(value: Any) -> str:
    """A version of weights from a body.

    Raises:
        BadBody: if it is no short printable text.
    """
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= LONGEST_VERSION:
        raise BadBody(f"weight_version must be a text of at most {LONGEST_VERSION} characters")
    return value


def answer_body(completions: Sequence[Completion], version: str) -> bytes:
    """The answer to a request, by weights of this version."""
    choices = [
        {
            "index": index,
            "token_ids": completion.tokens,
            "finish_reason": "stop" if completion.end is EndReason.STOP else "length",
            "stop_reason": None,
            "logprobs": {"content": [{"logprob": logprob} for logprob in completion.logprobs]},
            "weight_versions": [{"version": version, "start": 0, "end": len(completion.tokens)}],
            "cached_tokens": completion.cached_tokens,
        }
        for index, completion in enumerate(completions)
    ]
    return json.dumps({"choices": choices}, separators=(",", ":")).encode()


def answer_bytes(request: GenerationRequest) -> int:
    """Largest size of an answer to a request; vLLM's has further fields for every token."""
    return (1 << 20) + request.completions * (4096 + 512 * request.settings.max_new_tokens)


def read_answer(content: bytes, request: GenerationRequest, version: str, vocabulary: int) -> list[Completion]:
    """The completions in an answer.

    Args:
        content: from outside.
        request: what was asked.
        version: of the weights that must have generated every token.
        vocabulary: number of token ids.

    Raises:
        WrongVersion: if other weights have generated a part.
        BadBody: if anything is missing, of the wrong type, or not what was asked for.
    """
    choices = _list(_object(read_json(content), "the answer").get("choices"), "choices")
    if len(choices) != request.completions:
        raise BadBody(f"{len(choices)} completions came where {request.completions} were asked for")
    found: dict[int, Completion] = {}
    for choice in choices:
        fields = _object(choice, "a choice")
        index = _integer(fields.get("index"), 0, request.completions - 1, "index")
        if index in found:
            raise BadBody(f"completion {index} is there twice")
        found[index] = _completion(fields, request, version, vocabulary)
    return [found[index] for index in range(request.completions)]


def read_json(content: bytes) -> Any:
    """Parse JSON from outside.

    Raises:
        BadBody: if it is none.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise BadBody("no JSON came") from None


def _completion(fields: dict[str, Any], request: GenerationRequest, version: str, vocabulary: int) -> Completion:
    """One completion, which must be whole: it ends with an end token or a stop string, or has as many tokens as
    allowed. It is cut after the first stop string.
    """
    settings = request.settings
    tokens = _tokens(fields.get("token_ids"), vocabulary, "token_ids")
    reason = fields.get("finish_reason")
    if reason not in ("stop", "length"):
        raise BadBody("a completion was not finished: its finish_reason is neither stop nor length")
    if not 0 < len(tokens) <= settings.max_new_tokens:
        raise BadBody(f"a completion has {len(tokens)} tokens where 1 to {settings.max_new_tokens} are allowed")
    if not settings.end_ids.isdisjoint(tokens[:-1]):
        raise BadBody("a completion goes on after its end token")
    stopped = None if settings.stop is None else settings.stop.end_of(tokens)
    ended = tokens[-1] in settings.end_ids or stopped is not None
    if not ended and len(tokens) < settings.max_new_tokens:
        raise BadBody("a completion is cut: it has no end token and fewer tokens than allowed")
    if stopped is None and ended != (reason == "stop"):
        raise BadBody("a completion's finish_reason contradicts its last token")
    _check_versions(fields.get("weight_versions"), len(tokens), version)
    content = _list(_object(fields.get("logprobs"), "logprobs").get("content"), "logprobs.content")
    logprobs = [_logprob(_object(entry, "a log-probability").get("logprob")) for entry in content]
    if len(logprobs) != len(tokens):
        raise BadBody(f"a completion of {len(tokens)} tokens has {len(logprobs)} log-probabilities")
    end = EndReason.STOP if ended else EndReason.LENGTH
    cached = _integer(fields.get("cached_tokens", 0), 0, len(request.prompt), "cached_tokens")  # vLLM's answer has none
    return Completion(tokens[:stopped], logprobs[:stopped], end, settings.version, cached)


def _check_versions(value: Any, tokens: int, version: str) -> None:
    """Check that spans of the wanted version cover all tokens, without gaps."""
    covered = 0
    for span in _list(value, "weight_versions"):
        fields = _object(span, "a span of weight_versions")
        if fields.get("version") != version:
            raise WrongVersion("other weights have generated a completion")
        if _integer(fields.get("start"), 0, tokens, "start") != covered:
            raise BadBody("the spans of weight_versions leave a gap")
        covered = _integer(fields.get("end"), covered + 1, tokens, "end")
    if covered != tokens:
        raise BadBody("weight_versions does not cover all tokens of a completion")


def _logprob(value: Any) -> float:
    number = _number(value, "a log-probability")
    if number > ROUNDING:
        raise BadBody("a log-probability is above 0")
    return number


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadBody(f"{name} must be an object")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadBody(f"{name} must be a list")
    return value


def _integer(value: Any, least: int, most: int, name: str) -> int:
    if type(value) is not int or not least <= value <= most:
        raise BadBody(f"{name} must be an integer from {least} to {most}")
    return value


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not -1e30 < value < 1e30 or not math.isfinite(value):
        raise BadBody(f"{name} must be a finite number")
    return float(value)


def _tokens(value: Any, vocabulary: int, name: str) -> list[int]:
    tokens = _list(value, name)
    if any(type(token) is not int or not 0 <= token < vocabulary for token in tokens):
        raise BadBody(f"{name} must be token ids, integers from 0 to {vocabulary - 1}")
    return tokens


def _texts(value: Any, name: str) -> tuple[str, ...]:
    texts = _list(value, name)
    if len(texts) > MOST_STOPS or any(type(text) is not str or not 0 < len(text) <= LONGEST_STOP for text in texts):
        raise BadBody(f"{name} must be at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters")
    return tuple(texts)
