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
| `POST /sleep?level=1`, `/wake_up`    |                                 |                                    |

A version of weights is a text that only its run uses, so the weights of another run are other weights. covey's own
server takes two keys more in a request: `weight_version`, the version that it must have, and `covey`, the key of its
random numbers with the number of tokens that the prompt shares with the others of its step.

covey's own server ends completions at stop strings. vLLM does not get them, because its text of a completion may differ
from covey's; its completions are cut when they are read, which gives the same distribution.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from covey.data import EndReason
from covey.llm.generation.generator import Completion, GenerationRequest, GenerationSettings, RandomKey
from covey.llm.generation.token_sampling import Truncation
from covey.llm.model.stop_strings import StopStrings
from covey.runtime.foreign_json import BadJson, read_json
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
SLEEP = "/sleep?level=1"  # of vLLM alone; its weights wait in host memory, so that they serve on if an update fails
WAKE = "/wake_up"

# A log-probability is at most 0; a sampler that subtracts a rounded logarithm may exceed it by this much, in nats.
ROUNDING = 1e-5
LONGEST_VERSION = 200  # characters
WORD = 2**32  # random keys are below it
MOST_COMPLETIONS = 1 << 16  # of a request
MOST_TOKENS = 1 << 27  # of all completions of a request
MOST_STOPS, LONGEST_STOP = 16, 1000  # stop strings of a request, and characters of one


class WrongVersion(BadJson):
    """Other weights are requested than a server has, or have generated an answer."""


Count = Annotated[int, Meta(ge=0)]
Word = Annotated[int, Meta(ge=0, lt=WORD)]
Version = Annotated[str, Meta(min_length=1, max_length=LONGEST_VERSION)]


class Versioned(Struct):
    """A body that names a version of weights."""

    weight_version: Version

    def __post_init__(self) -> None:
        if not self.weight_version.isprintable():
            raise ValueError("weight_version must be a printable text")


class _Sampling(Struct):
    max_tokens: Annotated[int, Meta(ge=1)]
    n: Annotated[int, Meta(ge=1, le=MOST_COMPLETIONS)] = 1
    temperature: Annotated[float, Meta(ge=0, lt=1e30)] = 1.0
    top_p: float = 1.0
    stop_token_ids: list[Count] = []
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]], Meta(max_length=MOST_STOPS)] = []
    min_tokens: Annotated[int, Meta(ge=0, le=MOST_TOKENS)] = 0


class _Own(Struct):
    """The fields of covey's own server: those of `RandomKey`, and two of `GenerationSettings`."""

    seed: Word = 0
    step: Word = 0
    group: Word = 0
    first_rollout: Word = 0
    stream: Word = 0
    first_position: Word = 0
    shared_prefix: Count = 0
    continues: bool = False


class _Request(Versioned):
    token_ids: Annotated[list[Count], Meta(min_length=1)]
    sampling_params: _Sampling
    covey: _Own


class _Logprob(Struct):
    logprob: Annotated[float, Meta(gt=-1e30, le=ROUNDING)]


class _Logprobs(Struct):
    content: list[_Logprob]


class _Span(Struct):
    """Tokens of a completion that weights of one version have generated."""

    start: int
    end: int
    version: Any = None


class _Choice(Struct):
    index: Count
    token_ids: list[Count]
    logprobs: _Logprobs
    weight_versions: list[_Span]
    finish_reason: str | None = None
    cached_tokens: Count = 0  # vLLM's answer has none


class _Answer(Struct):
    choices: list[_Choice]


VERSIONED = msgspec.json.Decoder(Versioned)
REQUEST = msgspec.json.Decoder(_Request)
ANSWER = msgspec.json.Decoder(_Answer)


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
    content: bytes, vocabulary: int, weights: tuple[str, int], stop: Callable[[tuple[str, ...]], StopStrings | None]
) -> GenerationRequest:
    """Read a request for completions.

    Args:
        content: from outside.
        vocabulary: number of token ids.
        weights: version of the server's weights, and its number in the server.
        stop: makes the stop strings for the server's tokenizer.

    Raises:
        BadJson: naming the field.
        WrongVersion: if other weights are requested.
    """
    body = read_json(content, REQUEST)
    sampling, own = body.sampling_params, body.covey
    _check_tokens(body.token_ids, vocabulary, "token_ids")
    _check_tokens(sampling.stop_token_ids, vocabulary, "sampling_params.stop_token_ids")
    if sampling.top_p != 1.0:
        raise BadJson("sampling_params.top_p must be 1: other values bias the log-probabilities")
    for name, value, most in (
        ("sampling_params.max_tokens", sampling.max_tokens, MOST_TOKENS // sampling.n),
        ("covey.first_rollout", own.first_rollout, WORD - sampling.n),
        ("covey.first_position", own.first_position, WORD - sampling.max_tokens),
        # The last token of a prompt is never shared.
        ("covey.shared_prefix", own.shared_prefix, len(body.token_ids) - 1),
    ):
        if value > most:
            raise BadJson(f"{name} must be at most {most}")
    label, number = weights
    if body.weight_version != label:
        raise WrongVersion("the weights are not those that are requested")
    return GenerationRequest(
        tuple(body.token_ids),
        sampling.n,
        RandomKey(own.seed, own.step, own.group, own.first_rollout, own.stream, own.first_position),
        GenerationSettings(
            sampling.max_tokens,
            sampling.temperature,
            frozenset(sampling.stop_token_ids),
            number,
            shared_prefix=own.shared_prefix,
            stop=stop(tuple(sampling.stop)),
            continues=own.continues,
            truncation=Truncation(min_new_tokens=sampling.min_tokens),
        ),
    )


def answer_body(completions: Sequence[Completion], version: str) -> bytes:
    """The answer to a request, by weights of this version."""
    choices = [
        _Choice(
            index,
            completion.tokens,
            _Logprobs([_Logprob(logprob) for logprob in completion.logprobs]),
            [_Span(0, len(completion.tokens), version)],
            "stop" if completion.end is EndReason.STOP else "length",
            completion.cached_tokens,
        )
        for index, completion in enumerate(completions)
    ]
    return msgspec.json.encode(_Answer(choices))


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
        BadJson: if anything is missing, of the wrong type, or not what was asked for.
    """
    choices = sorted(read_json(content, ANSWER).choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(request.completions)):
        raise BadJson(f"completions 0 to {request.completions - 1} were asked for, and other ones came")
    return [_completion(choice, request, version, vocabulary) for choice in choices]


def _completion(choice: _Choice, request: GenerationRequest, version: str, vocabulary: int) -> Completion:
    """One completion, which must be whole: it ends with an end token or a stop string, or has as many tokens as
    allowed. It is cut after the first stop string.
    """
    settings, tokens = request.settings, choice.token_ids
    _check_tokens(tokens, vocabulary, "token_ids")
    if choice.finish_reason not in ("stop", "length"):
        raise BadJson("a completion was not finished: its finish_reason is neither stop nor length")
    if not 0 < len(tokens) <= settings.max_new_tokens:
        raise BadJson(f"a completion has {len(tokens)} tokens where 1 to {settings.max_new_tokens} are allowed")
    if not settings.end_ids.isdisjoint(tokens[:-1]):
        raise BadJson("a completion goes on after its end token")
    stopped = None if settings.stop is None else settings.stop.end_of(tokens)
    ended = tokens[-1] in settings.end_ids or stopped is not None
    if not ended and len(tokens) < settings.max_new_tokens:
        raise BadJson("a completion is cut: it has no end token and fewer tokens than allowed")
    if stopped is None and ended != (choice.finish_reason == "stop"):
        raise BadJson("a completion's finish_reason contradicts its last token")
    _check_versions(choice.weight_versions, len(tokens), version)
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    if len(logprobs) != len(tokens):
        raise BadJson(f"a completion of {len(tokens)} tokens has {len(logprobs)} log-probabilities")
    if choice.cached_tokens > len(request.prompt):
        raise BadJson("a completion has more cached_tokens than its prompt has tokens")
    end = EndReason.STOP if ended else EndReason.LENGTH
    return Completion(tokens[:stopped], logprobs[:stopped], end, settings.version, choice.cached_tokens)


def _check_versions(spans: Sequence[_Span], tokens: int, version: str) -> None:
    """Check that spans of the wanted version cover all tokens, without gaps."""
    covered = 0
    for span in spans:
        if span.version != version:
            raise WrongVersion("other weights have generated a completion")
        if span.start != covered or not covered < span.end <= tokens:
            raise BadJson("the spans of weight_versions leave a gap")
        covered = span.end
    if covered != tokens:
        raise BadJson("weight_versions does not cover all tokens of a completion")


def _check_tokens(tokens: Sequence[int], vocabulary: int, name: str) -> None:
    if max(tokens, default=0) >= vocabulary:
        raise BadJson(f"{name} must be token ids, integers from 0 to {vocabulary - 1}")
