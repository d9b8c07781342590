"""Fields of a [[rewards]] table that asks a judge: a language model behind an OpenAI-compatible address."""

from __future__ import annotations

from dataclasses import dataclass

from covey.config.common import Table, config_field


@dataclass(frozen=True)
class JudgeFields(Table):
    """All fields but `judge` and `allow_remote` begin with `judge_`."""

    judge: str = config_field(
        "", "or a judge: the address of an OpenAI-compatible server with a model, such as http://127.0.0.1:8000/v1"
    )
    judge_model: str = config_field("", "judge: name of the model at that address", advanced=True)
    judge_prompt: str = config_field(
        "", "judge: the question, with {prompt}, {completion} and {answer} or any other column in it", advanced=True
    )
    judge_prompt_file: str = config_field("", "judge: or a text file with the question", advanced=True)
    judge_pattern: str = config_field(
        "",
        "judge: regular expression whose only group is the score in the reply, at its last match; the score is "
        "otherwise the last number of the reply",
        advanced=True,
    )
    judge_field: str = config_field(
        "", "judge: or the field of a JSON object in the reply, with dots for inner objects", advanced=True
    )
    judge_words: tuple[str, ...] = config_field(
        (), 'judge: words that stand for numbers, such as ["good = 1", "bad = 0"]; the last one counts', advanced=True
    )
    judge_range: tuple[float, ...] = config_field(
        (0.0, 1.0), "judge: lowest and highest score; grading fails for a score outside of it", advanced=True
    )
    judge_max_tokens: int = config_field(256, "judge: longest reply in tokens", min=1, advanced=True)
    judge_temperature: float = config_field(0.0, "judge: temperature of its replies", min=0, max=10, advanced=True)
    judge_request: str = config_field(
        "", "judge: further fields of each request, as a JSON object; null takes a field out", advanced=True
    )
    judge_concurrency: int = config_field(8, "judge: questions asked at a time", min=1, max=1024, advanced=True)
    judge_retries: int = config_field(
        3, "judge: further attempts after a fault of the server or the network", min=0, max=100, advanced=True
    )
    judge_token_variable: str = config_field(
        "", "judge: environment variable with the access token; the token itself is never written", advanced=True
    )
    judge_token_file: str = config_field("", "judge: or a file with the access token", advanced=True)
    judge_cache: str = config_field(
        "", "judge: folder with the replies, each asked for once; empty: in covey's cache folder", advanced=True
    )
    allow_remote: bool = config_field(
        False, "judge: allow an address on another machine, which receives prompts and completions", advanced=True
    )
