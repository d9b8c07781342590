"""Evaluation on held-out problems: the same weights are measured once."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

from covey.config import EvaluationConfig
from covey.data import Start
from covey.llm.chat import Chat
from covey.llm.policy import LanguagePolicy
from covey.llm.sampler import LanguageSampler
from covey.recipes.held_out import HeldOut
from helpers.tiny import tiny_model, tiny_tokenizer


def test_weights_are_measured_once_and_new_ones_again():
    graded = []

    def grade(groups):
        graded.append(len(groups))
        for group in groups:
            group.rollouts[0].score = float(len(graded))
        return groups

    sampler = LanguageSampler(
        LanguagePolicy(tiny_model()), Chat(tiny_tokenizer(), frozenset({1})), seed=1, max_new_tokens=3
    )
    held_out = HeldOut(
        EvaluationConfig(problems=2, token_limits=(3, 5), every=4),
        SimpleNamespace(held_out=lambda count: [Start(i, f"{i}+1") for i in range(count)]),
        SimpleNamespace(grade=grade),
        sampler,
        SimpleNamespace(progress=lambda label, total: nullcontext(lambda count: None)),
    )
    assert held_out.due(3) == {}
    assert held_out.due(4) == {"eval/score": 1.0}
    assert [result["score"] for result in held_out.measure("after")] == [1.0, 2.0], "only the other limit is new"
    sampler.refresh(1)
    assert held_out.due(8) == {"eval/score": 3.0}
