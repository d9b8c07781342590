"""A reward model: a transformers classifier that scores completions, with the prompt of a group computed once.

Shapes: R rows, N reads (positions at which a score is read; the rows' in their order), L tokens, C labels, W hidden
width.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.config.sft import DEFAULT_SEPARATOR, REWARD_MODEL_FILE, RewardModelKind
from covey.data import Batch
from covey.llm.model.chat import Chat
from covey.llm.model.files import save_weights
from covey.llm.model.logprobs import hidden_states_for_actions
from covey.llm.model.plain_forward import accepted
from covey.llm.model.prefix_attention import common_prefix_length
from covey.llm.reward_models.examples import RewardEncoder, ScoredRow
from covey.runtime.distributed import ALONE, WHOLE, own_shards, passes_over, share

SCALE_COMPLETIONS = 2000
SCORING_TOKENS = 8192  # tokens of a forward pass without gradients


@dataclass(frozen=True)
class ScoreScale:
    """What is known of the scores on the training data, and how the data are encoded; saved beside the model."""

    mean: float | None = None  # of the scores of the training completions after training; None: not measured
    deviation: float | None = None
    count: int = 0  # number of these completions
    step_separator: str = DEFAULT_SEPARATOR
    reads_end: bool = False  # see `RewardEncoder`; covey trains process models so, others do not

    def standardised(self, score: float) -> float:
        """(score - mean) / deviation; the score itself if they are not known."""
        if self.mean is None or not self.deviation:
            return score
        return (score - self.mean) / self.deviation


class RewardModel:
    """A sequence classifier with one label (outcome) or a token classifier with one or two (process).

    If the model is a decoder whose attention takes a layout, rows are computed as one row of tokens in which common
    prefixes of a group occur once (`shares_prompts`), as in the policy's update. Otherwise its own forward pass is
    computed on padded rows, or on one row at a time if padding changes the scores (`pads`).
    """

    def __init__(
        self,
        module: PreTrainedModel,
        chat: Chat,
        kind: RewardModelKind,
        *,
        shares_prompts: bool,
        pads: bool = True,
        longest: int | None = None,
    ) -> None:
        """`longest` is the number of tokens of the longest sequence that the model takes; None: any."""
        self.module: PreTrainedModel = module.eval()  # no dropout: the score of a completion is a function of it
        self.chat = chat
        self.kind = kind
        self.shares_prompts = shares_prompts
        self.pads = pads
        self.longest = longest
        self.scale = ScoreScale()
        self.team, self.weights = ALONE, WHOLE  # of a training on several ranks

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def pad_id(self) -> int | None:
        """Id of the padding token, at which no score is read; None if neither model nor tokenizer has one."""
        pad: int | None = self.module.config.get_text_config().pad_token_id
        return pad

    @property
    def encoder(self) -> RewardEncoder:
        return RewardEncoder(self.chat, self.pad_id, self.scale.step_separator, self.scale.reads_end)

    def logits(self, rows: Sequence[ScoredRow]) -> Tensor:
        """logit_N of one forward pass, in fp32 (fp64 for an fp64 model), with gradient.

        A model with two labels has the difference of their logits, whose sigmoid is the second label's probability.

        Args:
            rows: those of one group follow each other.
        """
        if self.shares_prompts:
            return self.weights.run(lambda: self._packed(rows))
        return self._padded(rows) if self.pads else torch.cat([self._padded([row]) for row in rows])

    @torch.no_grad()
    def scores(self, rows: Sequence[ScoredRow], most_tokens: int = SCORING_TOKENS) -> list[Tensor]:
        """logit_N of each row, on the CPU and in the order of the rows, by forward passes of at most `most_tokens`. The
        ranks of the team divide the rows, and each must call it.
        """
        groups = {row.group: number for number, row in reversed(list(enumerate(rows)))}
        order = sorted(range(len(rows)), key=lambda number: (groups[rows[number].group], number))
        own = [torch.empty(0, dtype=torch.promote_types(self.weights.dtype_of(self.module), torch.float32))]
        pieces = share(len(order), self.team)
        for chosen in ([rows[number] for number in order[pieces[shard]]] for shard in own_shards(self.team)):
            parts = [[chosen[place] for place in part] for part in microbatches([[one] for one in chosen], most_tokens)]
            for part, is_counted in passes_over(parts, lambda: [min(rows, key=lambda row: len(row.tokens))], self.team):
                logit_N = self.logits(part)
                own += [logit_N.cpu()] if is_counted else []
        message = torch.cat(own)
        everyones = bytearray(b"".join(self.team.exchange(message.numpy().tobytes())))
        logit_N = torch.frombuffer(everyones, dtype=message.dtype) if everyones else message
        found = dict(zip(order, logit_N.split([len(rows[number].reads) for number in order]), strict=True))
        return [found[number] for number in range(len(rows))]

    def save(self, folder: Path) -> None:
        """Write model and tokenizer in the format of transformers, and the scale of the scores."""
        self.collect()(folder)

    def collect(self) -> Callable[[Path], None]:
        """Collect the weights of all ranks on rank 0; returns a function that writes what `save` does there."""
        return partial(self._write, self.weights.state_dict(self.module))

    def _write(self, state: dict[str, Tensor], folder: Path) -> None:
        save_weights(self.module, state, folder)
        self.chat.tokenizer.save_pretrained(folder)
        (folder / REWARD_MODEL_FILE).write_text(json.dumps(asdict(self.scale), indent=2) + "\n", encoding="utf-8")

    def measure_scale(self, rows: Sequence[ScoredRow]) -> None:
        """Set the scale of an outcome model from the scores of the first `SCALE_COMPLETIONS` training completions."""
        if self.kind is not RewardModelKind.OUTCOME or not rows:
            return
        moments = RunningMoments()
        for score_N in self.scores(rows[:SCALE_COMPLETIONS]):
            moments.add(score_N.tolist())
        self.scale = replace(self.scale, mean=moments.mean, deviation=moments.deviation, count=moments.count)

    def _packed(self, rows: Sequence[ScoredRow]) -> Tensor:
        batch = as_batch(rows).to(self.device)
        read = hidden_states_for_actions(self.module.base_model, batch, packed=True)
        head = head_of(self.module)
        assert head is not None
        exact = torch.promote_types(read.hidden_NW.dtype, torch.float32)
        bias = None if head.bias is None else head.bias.to(exact)
        logit_NC = F.linear(read.hidden_NW.to(exact), head.weight.to(exact), bias)
        return label_logit(logit_NC)[read.index_D]

    def _padded(self, rows: Sequence[ScoredRow]) -> Tensor:
        """The model's own forward pass over rows padded at the right."""
        longest, pad = max(len(row.tokens) for row in rows), self.pad_id or 0
        tokens_RL = torch.tensor([[*row.tokens, *[pad] * (longest - len(row.tokens))] for row in rows])
        lengths = torch.tensor([len(row.tokens) for row in rows])
        mask_RL = (torch.arange(longest) < lengths[:, None]).long()
        known = accepted(self.module, use_cache=False, attention_mask=mask_RL.to(self.device))
        logits: Tensor = self.module(input_ids=tokens_RL.to(self.device), **known).logits
        if self.kind is RewardModelKind.PROCESS:
            logits = torch.cat([logits[number, list(row.reads)] for number, row in enumerate(rows)])
        return label_logit(logits.to(torch.promote_types(logits.dtype, torch.float32)))


class RunningMoments:
    """Mean and deviation of numbers that arrive in parts; Chan, Golub and LeVeque (1979), eq. 2.1."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    def add(self, numbers: Sequence[float]) -> None:
        if not numbers:
            return
        count, mean = len(numbers), math.fsum(numbers) / len(numbers)
        gap, total = mean - self.mean, self.count + count
        squares = math.fsum((number - mean) ** 2 for number in numbers)
        self._squares += squares + gap * gap * self.count * count / total
        self.mean += gap * count / total
        self.count = total

    @property
    def deviation(self) -> float:
        """Standard deviation of the population; 0 without numbers."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0


def label_logit(logit_NC: Tensor) -> Tensor:
    """logit_N of the positive label: the only one, or the second minus the first."""
    return logit_NC[:, 0] if logit_NC.shape[1] == 1 else logit_NC[:, 1] - logit_NC[:, 0]


def head_of(module: PreTrainedModel) -> nn.Linear | None:
    """The linear layer from the decoder's last hidden states to the logits; None if the model has another head."""
    children = {name: child for name, child in module.named_children() if child is not module.base_model}
    heads = [child for child in children.values() if isinstance(child, nn.Linear)]
    others = [child for child in children.values() if not isinstance(child, (nn.Linear, nn.Dropout))]
    return heads[0] if len(heads) == 1 and not others and module.base_model is not module else None


def as_batch(rows: Sequence[ScoredRow]) -> Batch:
    """A batch whose decisions follow the read tokens, so that the hidden states before its decisions are those read.

    The context of a row is the common prefix of its group, at most up to the first read. A token after the last one is
    not fed, so that its value is of no importance.

    Args:
        rows: those of one group follow each other.
    """
    contexts: list[tuple[int, ...]] = []
    groups: list[int] = []
    number = 0
    for members in _by_group(rows):
        common = common_prefix_length(*(row.tokens for row in members))
        common = min(common, *(row.reads[0] + 1 for row in members))
        for row in members:
            if not common or row is members[0]:
                number += 1
            begin = common or row.reads[0] + 1
            contexts.append(row.tokens[:begin])
            groups.append(number)
    width = max(row.reads[-1] + 2 - len(context) for row, context in zip(rows, contexts, strict=True))
    actions_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    mask_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, (row, context) in enumerate(zip(rows, contexts, strict=True)):
        rest = row.tokens[len(context) : row.reads[-1] + 1]
        actions_BT[place, : len(rest)] = torch.tensor(rest, dtype=torch.int64)
        mask_BT[place, torch.tensor(row.reads) + 1 - len(context)] = True
    return Batch.blank(mask_BT, context=tuple(contexts), actions_BT=actions_BT, group_B=torch.tensor(groups))


def microbatches(examples: Sequence[Sequence[ScoredRow]], most_tokens: int) -> Iterator[list[int]]:
    """Indices of the examples of each microbatch, of at most `most_tokens` tokens, or of one larger example.

    A prefix that a row shares with the row before it counts once. The rows of an example stay together.
    """
    part: list[int] = []
    tokens, before = 0, ScoredRow((), ())
    for number, rows in enumerate(examples):
        new, previous = 0, before
        for row in rows:
            shared = common_prefix_length(previous.tokens, row.tokens) if previous.group == row.group else 0
            new, previous = new + len(row.tokens) - shared, row
        if part and tokens + new > most_tokens:
            yield part
            part, tokens = [], 0
            new = sum(len(row.tokens) for row in rows)
        part.append(number)
        tokens, before = tokens + new, previous
    if part:
        yield part


def _by_group(rows: Sequence[ScoredRow]) -> Iterator[list[ScoredRow]]:
    members: list[ScoredRow] = []
    for row in rows:
        if members and row.group != members[0].group:
            yield members
            members = []
        members.append(row)
    if members:
        yield members


def read_scale(folder: Path) -> ScoreScale:
    """The scale that `save` wrote; an unknown one for a model that covey did not train.

    Raises:
        ValueError: if the file is damaged.
    """
    path = folder / REWARD_MODEL_FILE
    if not path.is_file():
        return ScoreScale()
    saved: Any = json.loads(path.read_text(encoding="utf-8"))
    scale = ScoreScale(**saved) if isinstance(saved, dict) else None
    numbers = () if scale is None else (scale.mean, scale.deviation)
    if scale is None or not isinstance(scale.step_separator, str) or not isinstance(scale.reads_end, bool):
        raise ValueError(f"{REWARD_MODEL_FILE} holds no scale")
    if any(number is not None and not math.isfinite(number) for number in numbers):
        raise ValueError(f"{REWARD_MODEL_FILE} holds numbers that are not finite")
    return scale
