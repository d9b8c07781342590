"""The options of `covey sample` and `covey eval` that change the distribution of the next token."""

import argparse

import pytest

from covey.cli.evaluate import truncation_of
from covey.config import ConfigError
from covey.config.llm import SamplingConfig


def options(**given: float) -> argparse.Namespace:
    return argparse.Namespace(**{"top_k": None, "top_p": None, "min_p": None, "min_new_tokens": None, **given})


def test_a_limit_below_the_minimum_of_the_run_names_the_option_that_takes_it_out() -> None:
    sampling = SamplingConfig(max_new_tokens=5, min_new_tokens=9)
    with pytest.raises(ConfigError, match=r"the run's minimum length, 9 .is 5.: raise it, or add --min-new-tokens 0"):
        truncation_of(options(), 0.0, sampling)
    assert truncation_of(options(min_new_tokens=0), 0.0, sampling) == {"min_new_tokens": 0}
    with pytest.raises(ConfigError, match=r"--min-new-tokens must be below --max-new-tokens, 5 .is 6."):
        truncation_of(options(min_new_tokens=6), 0.0, sampling)
