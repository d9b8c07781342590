"""TRL's GRPOTrainer on given log-probabilities.

Everything from the rewards to the gradient is TRL's own code, called through `training_step`: advantages, old
log-probabilities, shuffling, cutting into microbatches, the loss and its normalisation. Only the forward pass of the
model is replaced by a look into a table, and `rollout_func` (an argument of the trainer) hands it the completions.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from oracle.cases import GROUP_SIZE, ROWS, WIDTH, Case

MAX_LENGTH = WIDTH + 2  # longer than any completion, so that a division by it is seen
TOKEN, END, FIRST_ROW = 5, 1, 10  # a prompt is one token that names its row


class Step(NamedTuple):
    """What TRL made of a case."""

    losses: list[Tensor]  # of every microbatch, as TRL logs them
    microbatches: list[Tensor]  # the rows of each
    gradient_BT: Tensor  # with respect to the log-probabilities, added up over the microbatches
    advantages_B: Tensor


class TableTrainer(GRPOTrainer):
    """A GRPOTrainer whose models have an opinion on the decisions of `case` and on nothing else."""

    def __init__(self, folder: Path, *, parts: int = 0, **settings: Any) -> None:
        """`parts`: number of reward functions, one for each list of `Case.parts`; 0: one, for `Case.rewards`."""
        defaults: dict[str, Any] = {
            "per_device_train_batch_size": ROWS // 4,
            "gradient_accumulation_steps": 4,
            "num_generations": GROUP_SIZE,
            "num_iterations": 2,  # or TRL takes the current policy for the old one
            "max_completion_length": MAX_LENGTH,
            "use_bias_correction_kl": False,
        }
        config = GRPOConfig(
            output_dir=str(folder / "output"), report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
            save_strategy="no", disable_tqdm=True, max_steps=1, **defaults | settings,
        )  # fmt: skip
        super().__init__(
            model=AutoModelForCausalLM.from_pretrained(folder),
            reward_funcs=[self._part(number) for number in range(parts)] or self._look_up_rewards,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [""] * ROWS}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            rollout_func=self._look_up_completions,
        )

    def take(self, case: Case) -> Step:
        """One generation and a pass over its microbatches; no optimizer touches anything."""
        self.case, self.seen = case, []
        self.leaf_BT = case.logprobs_BT.clone().requires_grad_()
        self._step, self._buffered_inputs = 0, None
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        inputs = [{"prompt": "", "row": row} for row in range(ROWS)]
        losses = [self.training_step(self.model, inputs, None) for _ in range(self.args.steps_per_generation)]
        assert self.leaf_BT.grad is not None
        advantages_B = torch.tensor(list(self._logs["advantages"])[-ROWS:])
        return Step(losses, self.seen, self.leaf_BT.grad, advantages_B)

    def _look_up_completions(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        case, lengths = self.case, self.case.lengths_B.tolist()
        last = [END if finished else TOKEN for finished in case.finished_B.tolist()]
        return {
            "prompt_ids": [[FIRST_ROW + row] for row in range(len(prompts))],
            "completion_ids": [[TOKEN] * (length - 1) + [last[row]] for row, length in enumerate(lengths)],
            "logprobs": [case.sampler_BT[row, :length].tolist() for row, length in enumerate(lengths)],
            "env_mask": [case.mask_BT[row, :length].int().tolist() for row, length in enumerate(lengths)],
        }

    def _look_up_rewards(self, prompts: list[str], row: list[int], **_: Any) -> list[float | None]:
        return [self.case.rewards[i] for i in row]

    def _part(self, number: int) -> Callable[..., list[float | None]]:
        def look_up(prompts: list[str], row: list[int], **_: Any) -> list[float | None]:
            return [self.case.parts[number][i] for i in row]

        look_up.__name__ = f"part_{number}"
        return look_up

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, None]:
        rows = input_ids[:, 0] - FIRST_ROW
        if model is self.ref_model:
            table_BT = self.case.reference_BT
        elif torch.is_grad_enabled():
            table_BT = self.leaf_BT
            self.seen.append(rows)
        else:
            table_BT = self.case.old_BT
        logprobs_BT = table_BT[rows][:, :logits_to_keep]
        return logprobs_BT, torch.zeros_like(logprobs_BT), None
