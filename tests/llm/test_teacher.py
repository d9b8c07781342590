"""A teacher beside the reward: its divergence against plain forward passes, its prompts, and whom it may teach."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithms import Distillation, KLPenalty, grpo
from covey.config import ConfigError
from covey.core import kl
from covey.data import Batch, EndReason, Group, PolicyOutput, Rollout, Start, collate
from covey.data.serialization import for_learning, from_state, to_state
from covey.llm.model.chat import Chat, TokenPrompt
from covey.llm.model.logprobs import row_tokens
from covey.llm.policy import DivergenceToTeacher, LanguagePolicy
from covey.llm.teacher import TeacherPrompts, asked, check_tokens
from covey.train.prepare import prepare_rows
from helpers.tiny_models import tiny_model, tiny_tokenizer

PROMPTS = (tuple(range(10, 17)), tuple(range(20, 25)))  # of two groups
COMPLETIONS = (((30, 31, 40), (30, 31, 41, 42), (30, 50)), ((60, 61), (62,)))
TEACHERS = (((5, 6, *PROMPTS[0]), (), (7, 8, 9, *PROMPTS[0])), ((5, 6), (5, 6)))  # prompts: (): no teacher


def a_batch(teachers: Any = TEACHERS, rewards: tuple[float, ...] = (1.0, 0.0, 0.5)) -> Batch:
    groups = []
    for index, (prompt, completions) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        rollouts = [
            Rollout(
                prompt, list(actions), [-1.0] * len(actions), EndReason.STOP, reward=reward,
                teacher_context=None if teachers is None else teachers[index][number],
            )
            for number, (actions, reward) in enumerate(zip(completions, rewards, strict=False))
        ]  # fmt: skip
        groups.append(Group(Start(index, ""), rollouts))
    return collate(groups)


def expected(policy: LanguagePolicy, teacher: LanguagePolicy, batch: Batch, beta: float) -> Tensor:
    """divergence_BT by one plain forward pass of each model over every row."""
    found_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float64)
    for row, count in enumerate(batch.mask_BT.sum(dim=1).tolist()):
        context = batch.context[row] if batch.teacher_context is None else batch.teacher_context[row]
        if context:
            read = replace(batch, context=(*batch.context[:row], context, *batch.context[row + 1 :]))
            own, theirs = (
                one.log_distribution(row_tokens(part, row, count), count)
                for one, part in ((policy, batch), (teacher, read))
            )
            found_BT[row, :count] = kl.jensen_shannon(own, theirs.detach(), beta)
    return found_BT


CASES = {
    "llama by llama": ("llama", "llama", 1.0, TEACHERS),
    "forward": ("llama", "llama", 0.0, TEACHERS),
    "same prompt": ("llama", "qwen3", 0.5, None),
    "by row": ("bloom", "bloom", 0.5, TEACHERS),
    "by row by a packed one": ("bloom", "llama", 1.0, None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_divergence_and_its_gradient_are_those_of_plain_forward_passes(name: str) -> None:
    kind, other, beta, teachers = CASES[name]
    torch.set_num_threads(1)
    policy, teacher = (
        LanguagePolicy(tiny_model(one, seed=seed, dtype=torch.float64), temperature=0.8)
        for seed, one in enumerate((kind, other))
    )
    batch = a_batch(teachers)
    truth_BT = expected(policy, teacher, batch, beta)
    found_BT = policy.with_outputs(DivergenceToTeacher(teacher, beta)).evaluate(batch).teacher_BT
    assert found_BT is not None
    torch.testing.assert_close(found_BT.double(), truth_BT, rtol=1e-5, atol=1e-6)
    assert float(truth_BT.detach().max()) > 0.1
    weights_BT = torch.linspace(-1, 2, truth_BT.numel(), dtype=torch.float64).view_as(truth_BT)
    of_policy, of_teacher = (one.module.get_input_embeddings().weight for one in (policy, teacher))
    gradients = []
    for one_BT in (truth_BT, found_BT):
        of_policy.grad = None
        (weights_BT * one_BT).sum().backward()
        gradients.append(of_policy.grad.clone())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)
    assert of_teacher.grad is None


def test_the_policy_teaches_itself_what_its_prompt_says() -> None:
    policy = LanguagePolicy(tiny_model(dtype=torch.float64))
    own = policy.with_outputs(DivergenceToTeacher(policy, 1.0))
    batch = a_batch()
    found_BT = own.evaluate(batch).teacher_BT
    torch.testing.assert_close(found_BT, expected(policy, policy, batch, 1.0).to(found_BT), rtol=1e-5, atol=1e-6)
    assert float(own.evaluate(a_batch(None)).teacher_BT.detach().abs().max()) < 1e-9
    with torch.no_grad():
        assert own.evaluate(batch).teacher_BT is None


def test_a_padded_policy_and_its_teacher_share_their_tokens() -> None:
    """The policy has embeddings for more tokens than the teacher, and has sampled one of them."""
    policy = LanguagePolicy(tiny_model(vocab_size=96))
    teacher = LanguagePolicy(tiny_model(seed=1))
    batch = a_batch(None)
    batch.actions_BT[0, 1] = 95
    found_BT = policy.with_outputs(DivergenceToTeacher(teacher, 1.0)).evaluate(batch).teacher_BT
    assert found_BT.isfinite().all()
    assert float(found_BT.detach()[0, 0]) > 0.01


# ---- loss and rows ----


def test_the_weighted_divergence_is_added_to_the_loss() -> None:
    algorithm = grpo(kl=KLPenalty())
    batch = a_batch()
    ready = prepare_rows(batch, SimpleNamespace(), algorithm).batch()
    logprobs_BT = torch.where(ready.mask_BT, -1.0, 0.0).requires_grad_()
    teacher_BT = torch.arange(ready.mask_BT.numel(), dtype=torch.float32).view_as(ready.mask_BT)
    output = PolicyOutput(logprobs_BT, -logprobs_BT, teacher_BT=teacher_BT)
    bare = algorithm.loss(replace(output, teacher_BT=None), ready, 0.0)
    taught = replace(algorithm, distillation=Distillation(0.5)).loss(output, ready, 0.0)
    counted = float((ready.loss_weights_BT * teacher_BT * ready.mask_BT).sum())
    assert float((taught.loss - bare.loss).detach()) == pytest.approx(0.5 * counted)
    assert torch.equal(taught.logged_first["teacher/divergence"], teacher_BT)
    assert "teacher/divergence" not in bare.logged_first


@pytest.mark.parametrize(
    ("distillation", "teachers", "kept"),
    [
        (Distillation(), TEACHERS, [False] * 5),
        (Distillation(1.0), TEACHERS, [True, False, True, True, True]),
        (Distillation(1.0), None, [True] * 5),
    ],
    ids=["no teacher", "some rows", "all rows"],
)
def test_rows_with_a_teacher_are_learnt_from_without_an_advantage(distillation, teachers, kept) -> None:
    algorithm = replace(grpo(kl=KLPenalty()), distillation=distillation)
    prepared = prepare_rows(a_batch(teachers, (1.0, 1.0, 1.0)), SimpleNamespace(), algorithm)
    assert prepared.kept_B.tolist() == kept
    assert prepared.metrics["groups/zero_advantage_fraction"] == 1.0


def test_rows_are_selected_with_their_teachers_prompts_and_kept_for_replay() -> None:
    batch = a_batch()
    assert batch.select(torch.tensor([2, 0])).teacher_context == (TEACHERS[0][2], TEACHERS[0][0])
    assert a_batch(None).teacher_context is None
    rollouts = [
        for_learning(Rollout((1, 2), [3], [-1.0], EndReason.STOP, reward=0.0, teacher_context=context))
        for context in ((4, 5, 6), (), None)
    ]
    state = to_state(rollouts)
    assert [one.teacher_context for one in from_state(state)] == [(4, 5, 6), (), None]
    for table in (state["lengths"], state["tensors"]):
        del table["teacher_context"]  # as in an older checkpoint
    assert [one.teacher_context for one in from_state(state)] == [None] * 3


# ---- prompts ----

CHAT = [{"role": "user", "content": "1+1"}]


def a_group(*rewards: float | None, feedback: tuple[str, ...] = (), prompt: Any = CHAT) -> Group:
    rollouts = []
    for number, reward in enumerate(rewards):
        extras = {"mine": {"feedback": feedback[number]}} if feedback else {}
        rollouts.append(
            Rollout((1,), [2] * (number + 1), [0.0] * (number + 1), EndReason.STOP, f"text{number}", reward=reward)
        )
        rollouts[-1].extras = extras
    return Group(Start(0, prompt, {"answer": "2", "steps": [1, 2]}), rollouts)


def read_by(template: str, group: Group) -> list[str]:
    chat = Chat(tiny_tokenizer(), frozenset({1}))
    model = tiny_model(max_position_embeddings=64).config
    prompts = TeacherPrompts(template, lambda prompt, observation: chat.encode(prompt), [model])
    return [chat.decode(context) for context in prompts.contexts(group)]


@pytest.mark.parametrize(
    ("template", "group", "read"),
    [
        ("The answer is {answer}.", a_group(0.0), ["The answer is 2.\n\n1+1="]),
        ("{prompt}? ({answer}) {steps}", a_group(0.0), ["1+1? (2) [1, 2]="]),
        ("Think. {x y}", a_group(1.0), ["Think. x y\n\n1+1="]),
        ("{answer} ", a_group(0.0, prompt="ab"), ["2 \n\nab"]),
        ("{answer}", a_group(0.0, prompt=[{"role": "system", "content": "S"}, *CHAT]), ["S2\n\n1+1="]),
        ("{best_sibling}", a_group(0.0, 1.0, 0.5, None), ["text1\n\n1+1=", "", "text1\n\n1+1=", ""]),
        ("{best_sibling}", a_group(1.0, 1.0), ["", ""]),
        ("{feedback}", a_group(0.0, 0.0, feedback=("no", "")), ["no\n\n1+1=", ""]),
        ("{answer} " + "a" * 56, a_group(0.0, 0.0), ["2 " + "a" * 56 + "\n\n1+1=", ""]),
    ],
    ids=["before", "in place", "no place", "text", "system", "best sibling", "no better one", "feedback", "too long"],
)
def test_the_prompts_of_a_teacher(template: str, group: Group, read: list[str]) -> None:
    """The tokenizer has no line ends."""
    assert read_by(template, group) == [text.replace("\n", "") for text in read]


def test_a_template_stands_in_a_paragraph_before_the_prompt() -> None:
    template = "The answer is {answer}."
    assert asked(template, "ab", {"answer": "2"}) == "The answer is 2.\n\nab"
    assert asked(template, CHAT, {"answer": "2"}) == [{"role": "user", "content": "The answer is 2.\n\n1+1"}]


@pytest.mark.parametrize(
    ("template", "prompt", "tokens", "fault"),
    [
        ("{anwser}", CHAT, 8, "file line 3: teacher.prompt has {anwser}, but there is only {prompt}, {best_sibling}"),
        ("{answer}", CHAT, 60, "file line 3: for the teacher, a prompt of 6 tokens with teacher.prompt and max_new"),
        ("{answer}", TokenPrompt("ab", (3, 4)), 8, "a prompt of the data is token ids"),
    ],
)
def test_templates_that_the_data_cannot_fill(template: str, prompt: Any, tokens: int, fault: str) -> None:
    chat = Chat(tiny_tokenizer(), frozenset({1}))
    model = tiny_model(max_position_embeddings=64).config
    prompts = TeacherPrompts(template, lambda prompt, observation: chat.encode(prompt), [model])
    with pytest.raises(ConfigError) as refused:
        prompts.check([Start(0, prompt, {"answer": "2"}, place="file line 3")], tokens, drop=False)
    assert fault in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_teacher_that_does_not_know_the_tokens_is_refused() -> None:
    few, more = (Chat(tiny_tokenizer(words), frozenset({1})) for words in ((), ("more",)))
    check_tokens(few, more, "large")
    with pytest.raises(ConfigError, match=r"teacher.model: small has another tokenizer .*'more', number 84 .* unknown"):
        check_tokens(more, few, "small")
