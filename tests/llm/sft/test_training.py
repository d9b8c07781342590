"""Loss and gradient of supervised training are those of transformers' own loss over the trained tokens."""

import copy
from itertools import chain

import pytest
import torch

from covey.core import schedules
from covey.llm.policy import LanguagePolicy
from covey.llm.sft.encoding import EncodedExample, batch_of
from covey.runtime.optimizer import MasterAdamW
from covey.runtime.rng import shuffled_batches
from covey.train.supervised import Likelihood, SupervisedTrainer, mean_loss
from helpers.tiny_models import PLAIN, SHARED, tiny_model

IGNORED = -100  # transformers' label of a token without a loss
ANSWER, REPLY = True, False
PAIR = EncodedExample((5, 6, 7), (8, 9, 1), (ANSWER,) * 3)
SIBLING = EncodedExample((5, 6, 7), (8, 10, 11, 1), (ANSWER,) * 4)
CONVERSATION = EncodedExample(
    (12, 13), (20, 21, 1, 30, 31, 32, 22, 1), (ANSWER, ANSWER, ANSWER, REPLY, REPLY, REPLY, ANSWER, ANSWER)
)
LONG = EncodedExample((40, 41, 42, 43, 44), tuple(range(50, 62)), (ANSWER,) * 12)
EXAMPLES = [PAIR, SIBLING, CONVERSATION, LONG]


def oracle(module, examples):
    """The loss of transformers' own forward pass, row by row, with its gradients by name."""
    module = copy.deepcopy(module)
    count = sum(sum(example.decided) for example in examples)
    total = 0.0
    for example in examples:
        tokens = torch.tensor([[*example.prompt, *example.actions]])
        trained = [False] * len(example.prompt) + list(example.decided)
        labels = torch.where(torch.tensor([trained]), tokens, IGNORED)
        loss = module(input_ids=tokens, labels=labels).loss * int((labels != IGNORED).sum()) / count
        loss.backward()
        total += float(loss.detach())
    return total, {name: parameter.grad for name, parameter in module.named_parameters()}


def criterion_of(module, microbatch_tokens=4096):
    return Likelihood(LanguagePolicy(module, microbatch_tokens=microbatch_tokens), batch_of)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", [*SHARED, *PLAIN])
def test_loss_and_gradient_are_those_of_transformers(kind):
    module = tiny_model(kind)
    expected, gradients = oracle(module, EXAMPLES)
    for microbatch_tokens in (4096, 12):  # one microbatch, and several
        trained = copy.deepcopy(module)
        criterion = criterion_of(trained, microbatch_tokens)
        trainer = SupervisedTrainer(criterion, MasterAdamW(trained, 1e-3), schedules.constant(1e-3))
        assert len(criterion.microbatches(EXAMPLES)) >= (1 if microbatch_tokens > 12 else 3)
        loss, _ = trainer._accumulate(EXAMPLES, criterion.terms(EXAMPLES))
        assert loss == pytest.approx(expected, rel=1e-5)
        for name, parameter in trained.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=2e-6, msg=f"{kind} {name}")


def test_the_held_out_loss_is_the_mean_over_the_tokens_of_all_batches():
    module = tiny_model()
    expected, _ = oracle(module, EXAMPLES)
    assert mean_loss(criterion_of(module, 12), [EXAMPLES[:3], EXAMPLES[3:]]) == pytest.approx(expected, rel=1e-6)


def test_every_epoch_has_each_example_once_in_an_order_of_its_own_and_goes_on_anywhere():
    items = list(range(10))
    groups = [[item] for item in items]
    whole = list(shuffled_batches(groups, 4, seed=3, epochs=3))
    assert [len(batch) for batch in whole] == [4, 4, 2] * 3
    epochs = [[*chain(*whole[begin : begin + 3])] for begin in (0, 3, 6)]
    assert all(sorted(epoch) == items for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    for done in range(10):
        assert list(shuffled_batches(groups, 4, seed=3, epochs=3, done=done)) == whole[done:]
    assert list(shuffled_batches(groups, 4, seed=4, epochs=3)) != whole
