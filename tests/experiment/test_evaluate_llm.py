"""Evaluation on held-out problems: the same weights are measured once; results by kind of problem."""

import math
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest

from covey.config import EvaluationConfig
from covey.data import EndReason, Group, Rollout, Start
from covey.experiment import evaluation
from covey.experiment.evaluation import HeldOut, by_kind
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.model.chat import Chat
from covey.llm.policy import LanguagePolicy
from covey.llm.sampler import LanguageSampler
from covey.runtime.distributed import ALONE, WHOLE
from covey.tracking.console import by_kind_tables
from covey.tracking.wording import SCORE_KINDS
from helpers.tiny_models import tiny_model, tiny_tokenizer


def held_out_of(config, starts, grade, display, store, *time):
    generator, chat = LocalGenerator(LanguagePolicy(tiny_model())), Chat(tiny_tokenizer(), frozenset({1}))
    sampler = LanguageSampler(generator, chat, seed=1, max_new_tokens=3)
    grader = SimpleNamespace(grade=grade, score_kind="score", score_range=None)
    return HeldOut(config, starts, grader, sampler, display, store, ALONE, WHOLE, *time)


def test_weights_are_measured_once_and_new_ones_again():
    graded, counted, shown, written = [], [], [], {}

    def grade(groups):
        graded.append([len(group.rollouts[0].actions) for group in groups])
        for group in groups:
            group.rollouts[0].score = float(len(graded))
        return groups

    held_out = held_out_of(
        EvaluationConfig(problems=2, token_limits=(3, 5), every=4),
        [Start(i, f"{i}+1", {"topic": i}) for i in range(2)],
        grade,
        SimpleNamespace(progress=lambda label, total: nullcontext(counted.append), show_answer=shown.append),
        SimpleNamespace(record_evaluation=lambda step, answers: written.update({step: answers})),
    )
    sampler = held_out.sampler
    assert held_out.due(3) == {}
    assert held_out.due(4) == {"eval/score": 1.0}
    assert [result["score"] for result in held_out.measure("after")] == [1.0, 2.0], "only the other limit is new"
    assert [(line["max_new_tokens"], line["problem"]) for line in written[0]] == [(3, 0), (3, 1), (5, 0), (5, 1)]
    assert [line["columns"] for line in written[0]] == [{"topic": 0}, {"topic": 1}] * 2
    sampler.refresh(1)
    assert held_out.due(8) == {"eval/score": 3.0}
    graded.clear()
    sampler.refresh(2)
    assert [result["mean_tokens"] for result in held_out.measure("after")] == [3.0, 5.0]
    assert graded == [[3, 3], [5, 5]], "each limit has its own copy to grade"
    assert counted == [1] * len(shown) == [1] * 8, "each answer is counted and shown as it comes"


@pytest.mark.parametrize(
    ("seconds", "measured", "asked"),
    [
        (math.inf, (), 7),
        (100.0, (), 7),
        (2.5, (), 4),  # two pieces of two problems, a second each
        (0.5, (), 2),
        (0.5, [{"count": 4, "unscored": 1}], 5),
        (100.0, [{"count": 2}], 2),
    ],
)
def test_an_evaluation_has_as_many_problems_as_the_time_budget_allows(monkeypatch, seconds, measured, asked):
    monkeypatch.setattr(evaluation, "PIECE", 2)
    clock = count(0.0, 1.0)
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    def grade(groups):
        for group in groups:
            group.rollouts[0].score = 1.0
        return groups

    notes = []
    held_out = held_out_of(
        EvaluationConfig(problems=7, every=1),
        [Start(i, f"{i}+1") for i in range(7)],
        grade,
        SimpleNamespace(
            progress=lambda label, total: nullcontext(lambda n: None), show_answer=lambda group: None, note=notes.append
        ),
        SimpleNamespace(record_evaluation=lambda step, answers: None),
        seconds,
        measured,
    )
    (first,) = held_out.measure("before")
    assert first["count"] == asked
    assert len(notes) == (asked < 7 and not measured)
    held_out.sampler.refresh(1)
    assert held_out.measure("after")[0]["count"] == asked


def test_an_answer_cut_at_a_limit_is_the_answer_with_that_limit():
    policy, chat = LanguagePolicy(tiny_model()), Chat(tiny_tokenizer(), frozenset(range(0, 90, 7)))
    starts = [Start(i, f"{i}+1") for i in range(12)]
    long, short = (LanguageSampler(LocalGenerator(policy), chat, seed=3, max_new_tokens=limit) for limit in (9, 4))
    cut, written = long.truncated(long.sample(starts, 2, step=0), 4), short.sample(starts, 2, step=0)
    ends = set()
    for ours, theirs in zip(cut, written, strict=True):
        for one, other in zip(ours.rollouts, theirs.rollouts, strict=True):
            ends.add(other.end)
            assert (one.actions, one.text, one.end) == (other.actions, other.text, other.end)
            assert one.behavior_logprobs == pytest.approx(other.behavior_logprobs, abs=1e-5)
    assert len(ends) == 2, "some ended and some were cut"


def group(index, kind, *scores):
    rollouts = [Rollout((1,), [1], [0.0], EndReason.STOP, reward=score, score=score) for score in scores]
    return Group(Start(index, "p", kind=kind), rollouts)


def test_each_kind_has_its_mean_and_its_number_of_problems():
    groups = [group(0, "b", 1.0), group(1, "a", 1.0), group(2, "a", 0.0), group(3, "a", None)]
    found = by_kind(groups, SCORE_KINDS["accuracy"])["by_kind"]
    assert list(found) == ["a", "b"]
    assert [(one["score"], one["count"]) for one in found.values()] == [(0.5, 2), (1.0, 1)]


def test_answers_to_one_problem_are_averaged_first():
    groups = [group(0, "a", 1.0, 0.0), group(1, "b", 1.0, 1.0), group(2, "a", 0.0, 0.0)]
    found = by_kind(groups, SCORE_KINDS["accuracy"])["by_kind"]
    assert [(one["score"], one["count"]) for one in found.values()] == [(0.25, 2), (1.0, 1)]


def test_one_kind_is_no_table():
    assert by_kind([group(0, "a", 1.0), group(1, "a", 0.0)], SCORE_KINDS["accuracy"]) == {}


@pytest.mark.parametrize("before", [{}, {"by_kind": {"a": {"score": 0.25, "low": 0.1, "high": 0.5, "count": 4}}}])
def test_the_table_at_the_end_of_a_run(before):
    after = by_kind([group(0, "a", 1.0), group(1, "b", 0.0)], SCORE_KINDS["accuracy"])
    summary = {"domain": "language", "score_kind": "accuracy", "evaluations": [{"before": before, "after": after}]}
    (table,) = by_kind_tables(summary)
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    assert cells[0] == ["a", "b"]
    assert cells[1] == ["1", "1"]
    assert cells[2] == (["25.0%", "-"] if before else ["-", "-"])
    assert by_kind_tables({**summary, "evaluations": [{"before": {}, "after": {}}]}) == []
