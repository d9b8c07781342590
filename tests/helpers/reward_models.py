"""Tiny random reward models, made on the spot."""

import torch
from transformers import PreTrainedModel

from covey.config.sft import RewardModelKind
from covey.llm.model.chat import Chat
from covey.llm.reward_models.loading import classifier_on, wrap_classifier
from covey.llm.reward_models.model import RewardModel, head_of
from helpers.tiny_models import tiny_model, tiny_tokenizer


def tiny_reward_model(kind: RewardModelKind, architecture: str = "llama", *, seed: int = 0) -> RewardModel:
    """A reward model on a random language model, with a random head."""
    module = tiny_model(architecture, seed=seed)
    assert isinstance(module, PreTrainedModel)
    classifier = classifier_on(module, kind, architecture)
    head = head_of(classifier)
    assert head is not None
    torch.manual_seed(seed + 1)
    torch.nn.init.normal_(head.weight, std=0.3)
    return wrap_classifier(classifier, Chat(tiny_tokenizer(), frozenset()), kind, architecture)
