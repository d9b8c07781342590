"""Trains a reward model: minibatches of examples, an optimizer step each, with a state that resumes exactly.

`covey reward-model train` trains in the loop of every training, an iterative run by `train_epochs` in each iteration.

Shapes: N reads, M terms of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from covey.config import RunError
from covey.config.sft import RewardModelConfig
from covey.llm.reward_models.examples import EncodedExample, Objective
from covey.llm.reward_models.model import RewardModel, microbatches
from covey.runtime.optimizer import MasterAdamW, learning_rate_schedule
from covey.runtime.rng import shuffled_batches

Metrics = dict[str, float]


class RewardModelTrainer:
    """A reward model with its optimizer.

    The gradient of a minibatch is that of the mean over its terms (pairs, completions or steps), for any division into
    microbatches.
    """

    def __init__(self, model: RewardModel, config: RewardModelConfig, objective: Objective, total_steps: int) -> None:
        """`total_steps` is the number of optimizer steps over which the learning rate falls."""
        self.model = model
        self.config = config
        self.objective = objective
        self.step = 0  # optimizer steps so far
        self.optimizer = MasterAdamW(
            model.module, config.learning_rate, weight_decay=config.weight_decay, max_grad_norm=config.max_grad_norm
        )
        self.learning_rate = learning_rate_schedule(
            config.schedule, config.learning_rate, steps=total_steps, warmup_steps=config.warmup_steps
        )

    def train_step(self, examples: Sequence[EncodedExample]) -> Metrics:
        """One optimizer step on a minibatch.

        Returns:
            loss, accuracy (where predictions are right or wrong), gradient norm, learning rate and number of tokens.

        Raises:
            RunError: if the loss or its gradient is not finite; the weights are unchanged.
        """
        terms = sum(self.objective.terms(one.example) for one in examples)
        loss, right, tokens, judged = 0.0, 0, 0, False
        for part in microbatches([one.rows for one in examples], self.config.microbatch_tokens):
            chosen = [examples[number] for number in part]
            rows = [row for one in chosen for row in one.rows]
            logit_N = self.model.logits(rows)
            originals = [one.example for one in chosen]
            share = self.objective.losses(logit_N, originals).sum() / terms
            share.backward()
            loss += float(share.detach())
            tokens += sum(len(row.tokens) for row in rows)
            right_M = self.objective.right(logit_N.detach(), originals)
            if right_M is not None:
                right, judged = right + int(right_M.sum()), True
        rate = self.learning_rate(self.step + 1)
        result = self.optimizer.step(rate)
        if not result.applied:
            raise RunError(
                f"the loss of the reward model ({loss:g}) or its gradient is not finite in step {self.step + 1}: lower "
                "--learning-rate (of an iterative run, iteration.reward_model_learning_rate)"
            )
        self.step += 1
        metrics = {
            "reward_model/loss": loss,
            "reward_model/tokens": float(tokens),
            "grad_norm": result.grad_norm,
            "learning_rate": rate,
        }
        return metrics | ({"reward_model/accuracy": right / terms} if judged else {})

    def state_dict(self) -> dict[str, Any]:
        """The weights with the optimizer's moments, and the number of steps; not copied."""
        return {"optimizer": self.optimizer.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, bit for bit.

        Raises:
            ConfigError: if it belongs to another model.
        """
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = int(state["step"])


def train_epochs(
    trainer: RewardModelTrainer,
    examples: Sequence[EncodedExample],
    *,
    epochs: int,
    on_step: Callable[[int, Metrics], bool],
    done: int = 0,
    iteration: int = 0,
) -> int:
    """Train for some epochs, from the minibatch after the first `done` ones on.

    Args:
        on_step: called after each optimizer step with the number of minibatches so far and the metrics; training ends
            if it returns False.
        done: number of minibatches that an interrupted call has finished.
        iteration: of an iterative run; it changes the order of the examples.

    Returns:
        the number of minibatches so far.
    """
    config, groups = trainer.config, by_prompt(examples)
    batches = shuffled_batches(
        groups, config.batch_size, seed=config.seed, epochs=epochs, done=done, iteration=iteration
    )
    for batch in batches:
        metrics = trainer.train_step(batch)
        done += 1
        if not on_step(done, metrics):
            break
    return done


def by_prompt(examples: Sequence[EncodedExample]) -> list[list[EncodedExample]]:
    """The examples of each prompt, which are trained together, so that the prompt is computed once."""
    prompts: dict[str, list[EncodedExample]] = {}
    for one in examples:
        prompts.setdefault(one.example.content, []).append(one)
    return list(prompts.values())
