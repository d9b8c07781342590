"""Training of reward models: its gradient, its order, what it learns, and its resume."""

import json
import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

from covey.config import ConfigError, RunError
from covey.config.sft import RewardModelConfig, RewardModelKind
from covey.experiment.reward_models import build_reward_trainer
from covey.llm.data.reward_examples import Example, Graded, Pair, Steps, read_examples
from covey.llm.data.rows import hold_out
from covey.llm.reward_models.examples import EncodedExample, choose_objective, encode_examples, kind_of_examples
from covey.llm.reward_models.model import as_batch
from covey.llm.reward_models.training import evaluate, train_epochs
from covey.train.supervised import SupervisedTrainer
from helpers.reward_models import tiny_reward_model

PAIRS: list[Example] = [
    Pair("1", "2+3=", "5", "6 or 7", margin=0.5),
    Pair("2", "2+3=", "5!", "4"),
    Pair("3", "1+1=", "2", "", margin=0.25),
]
GRADES: list[Example] = [
    Graded("1", "2+3=", "5", 1.0),
    Graded("2", "1+1=", "3", 0.0),
    Graded("3", "2+3=", "6 apples", 0.0),
]
NUMBERS: list[Example] = [structs.replace(one, grade=3 * one.grade - 1) for one in GRADES if isinstance(one, Graded)]
STEPS: list[Example] = [
    Steps("1", "2+3=", ("add 3", "5"), (1.0, 1.0)),
    Steps("2", "1+1=", ("3",), (0.0,)),
    Steps("3", "2+3=", ("add 3", "6", "7 or 8"), (1.0, 0.25, 0.0)),
]
DATA = {"pairs": PAIRS, "grades": GRADES, "numbers": NUMBERS, "steps": STEPS}


def plain_loss(examples: Sequence[Example], score: Any, center: float = 0.0) -> Tensor:
    """The loss of section 5 of the documentation as loops over transformers' own forward passes."""
    terms: list[Tensor] = []
    for one in examples:
        if isinstance(one, Pair):
            chosen, rejected = score(one.prompt, one.chosen), score(one.prompt, one.rejected)
            gap = chosen - rejected - one.margin
            terms.append((1 + (-gap).exp()).log() + center * (chosen + rejected) ** 2)
        elif isinstance(one, Steps):
            logits = score(one.prompt, one.steps)
            for z, y in zip(logits, one.labels, strict=True):
                p = 1 / (1 + (-z).exp())
                terms.append(-y * p.log() - (1 - y) * (1 - p).log())
        elif isinstance(one, Graded):
            z = score(one.prompt, one.completion)
            p = 1 / (1 + (-z).exp())
            binary = one.grade in (0, 1) and all(
                other.grade in (0, 1) for other in examples if isinstance(other, Graded)
            )
            terms.append(-(p if one.grade else 1 - p).log() if binary else (z - one.grade) ** 2)
    return torch.stack([term.reshape(()) for term in terms]).mean()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("microbatch_tokens", [1, 20, 10_000])
@pytest.mark.parametrize("name", DATA)
def test_the_step_is_adamw_on_the_mean_loss_for_any_microbatches(name: str, microbatch_tokens: int) -> None:
    examples = DATA[name]
    kind = kind_of_examples(examples)
    center = 0.05 if name == "pairs" else 0.0
    config = RewardModelConfig(
        learning_rate=1e-3, microbatch_tokens=microbatch_tokens, center=center, schedule="constant", max_grad_norm=0.5,
        weight_decay=0.1,
    )  # fmt: skip
    model, other = (tiny_reward_model(kind) for _ in range(2))
    trainer = build_reward_trainer(model, config, choose_objective(examples, center=center), 1)
    encoded = encode_examples(examples, model.encoder, None)
    metrics = trainer.train_step(encoded)

    def score(prompt: str, completion: Any) -> Tensor:
        if kind is RewardModelKind.PROCESS:
            row = other.encoder.process(prompt, completion)
            return other.module(torch.tensor([row.tokens])).logits[0, list(row.reads), 0]
        row = other.encoder.outcome(prompt, completion)
        return other.module(torch.tensor([row.tokens])).logits[0, 0]

    loss = plain_loss(examples, score, center)
    loss.backward()
    assert metrics["reward_model/loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    norm = nn.utils.clip_grad_norm_(other.module.parameters(), 0.5)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    matrices = [p for p in other.module.parameters() if p.dim() > 1]
    vectors = [p for p in other.module.parameters() if p.dim() == 1]
    before = {name: p.clone() for name, p in other.module.named_parameters()}
    torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3
    ).step()
    expected = dict(other.module.named_parameters())
    for name, parameter in model.module.named_parameters():
        gradient = expected[name].grad
        assert gradient is not None
        clear = gradient.abs() > 1e-5  # AdamW's first step is the sign of the gradient, which rounding may turn
        moved, wanted = (parameter - before[name])[clear], (expected[name] - before[name])[clear]
        torch.testing.assert_close(moved, wanted, rtol=0.05, atol=2e-5, msg=name)


def many(count: int, seed: int = 0) -> list[Example]:
    """Pairs whose chosen completion ends with an exclamation mark."""
    source = random.Random(seed)
    numbers = [(source.randint(1, 9), source.randint(1, 9), source.randint(1, 30)) for _ in range(count)]
    return [Pair(str(i), f"{a}+{b}=", f"{c}!", f"{c}.") for i, (a, b, c) in enumerate(numbers)]


def make(
    examples: list[Example], config: RewardModelConfig, steps: int = 100
) -> tuple[SupervisedTrainer, list[EncodedExample]]:
    model = tiny_reward_model(kind_of_examples(examples))
    encoded = encode_examples(examples, model.encoder, None)
    return build_reward_trainer(model, config, choose_objective(examples), steps), encoded


def test_the_examples_of_a_prompt_stay_together_and_every_epoch_has_another_order() -> None:
    examples = [Graded(f"{i}", f"{i % 5}=", f"{i}", float(i % 2)) for i in range(20)]
    config = RewardModelConfig(batch_size=4)
    trainer, encoded = make(list(examples), config)
    seen: list[list[str]] = []
    step = trainer.train_step

    def watched(batch: Sequence[EncodedExample]) -> dict[str, float]:
        seen.append([one.example.place for one in batch])
        return step(batch)

    trainer.train_step = watched  # type: ignore[method-assign]
    train_epochs(trainer, encoded, config, epochs=2, on_step=lambda done, metrics: True)
    assert len(seen) == 10
    first, second = list(chain(*seen[:5])), list(chain(*seen[5:]))
    assert sorted(first, key=int) == sorted(second, key=int) == [str(i) for i in range(20)]
    assert first != second
    assert all(len({int(place) % 5 for place in batch}) == 1 for batch in seen)
    seen.clear()
    train_epochs(trainer, encoded, config, epochs=1, on_step=lambda done, metrics: True, iteration=1)
    assert list(chain(*seen)) not in (first, second)


@pytest.mark.slow
def test_an_interrupted_training_continues_to_the_same_bits() -> None:
    config = RewardModelConfig(batch_size=4, learning_rate=1e-3, warmup_steps=2)
    whole, encoded = make(many(18), config, steps=10)
    train_epochs(whole, encoded, config, epochs=2, on_step=lambda done, metrics: True)
    for stop in (1, 4, 5, 9):
        first, _ = make(many(18), config, steps=10)
        assert (
            train_epochs(first, encoded, config, epochs=2, on_step=lambda done, metrics, stop=stop: done < stop) == stop
        )
        second, _ = make(many(18), config, steps=10)
        second.load_state_dict(json_free(first.state_dict()))
        assert (
            train_epochs(second, encoded, config, epochs=2, on_step=lambda done, metrics: True, done=second.step) == 10
        )
        for name, tensor in module_of(whole).state_dict().items():
            assert torch.equal(tensor, module_of(second).state_dict()[name]), (stop, name)


def module_of(trainer: SupervisedTrainer) -> Any:
    """The classifier that is trained."""
    criterion: Any = trainer.criterion
    return criterion.model.module


def json_free(state: dict[str, Any]) -> dict[str, Any]:
    """A copy whose tensors are their own."""
    return {
        k: json_free(v) if isinstance(v, dict) else v.clone() if isinstance(v, Tensor) else v for k, v in state.items()
    }


def test_a_loss_that_is_not_finite_ends_the_training() -> None:
    trainer, encoded = make(many(4), RewardModelConfig())
    with torch.no_grad():
        module_of(trainer).score.weight.fill_(float("inf"))
    with pytest.raises(RunError, match="not finite in step 1: lower --learning-rate"):
        trainer.train_step(encoded)


def test_quality_of_grades_and_of_steps_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_reward_model(RewardModelKind.OUTCOME)
    grades: list[Example] = [
        Graded("1", "a", "1", 1.0), Graded("2", "a", "2", 0.0), Graded("3", "a", "3", 0.0), Graded("4", "b", "4", 1.0),
    ]  # fmt: skip
    encoded = encode_examples(grades, model.encoder, None)
    monkeypatch.setattr(model, "scores", lambda rows: [torch.tensor([z]) for z in (1.0, 2.0, -1.0, -3.0)])
    metrics = evaluate(model, encoded, choose_objective(grades)).metrics
    assert metrics["accuracy"] == 0.5
    assert metrics["auc"] == 0.25  # 1 above -1, of four pairs
    assert metrics["rank_agreement"] == 0.5  # of prompt a: 1 > -1, not 1 > 2
    steps: list[Example] = [Steps("1", "a", ("x", "y"), (1.0, 0.0)), Steps("2", "b", ("z",), (1.0,))]
    encoded = encode_examples(PAIRS, model.encoder, None)
    monkeypatch.setattr(model, "scores", lambda rows: [torch.tensor([z]) for z in (1.0, 1.0, 2.0, 2.0, 0.0, 9.0)])
    metrics = evaluate(model, encoded, choose_objective(PAIRS)).metrics
    assert metrics["accuracy"] == pytest.approx(1 / 3)  # two ties, which count one half, and one wrong
    assert metrics["calibration_error"] == pytest.approx(1 / 3, abs=1e-3)  # of the wrong one, which was certain
    model = tiny_reward_model(RewardModelKind.PROCESS)
    encoded = encode_examples(steps, model.encoder, None)
    monkeypatch.setattr(model, "scores", lambda rows: [torch.tensor([2.0, -1.0]), torch.tensor([-2.0])])
    metrics = evaluate(model, encoded, choose_objective(steps)).metrics
    assert metrics["accuracy"] == pytest.approx(2 / 3)
    assert metrics["auc"] == 0.5  # 2 above -1, -2 below it
    assert metrics["completion_auc"] == 0.0  # the right completion's lowest score is -2, the wrong one's -1
    assert metrics["steps"] == 3


def write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_data_of_every_kind_are_read(tmp_path: Path) -> None:
    user, five, six = (
        {"role": role, "content": text} for role, text in (("user", "2+3="), ("assistant", "5"), ("assistant", "6"))
    )
    path = tmp_path / "data.jsonl"
    strings = write(path, {"prompt": "2+3=", "chosen": "5", "rejected": "6", "margin": 0.5})
    assert read_examples(strings) == [Pair(f"{path} line 1", "2+3=", "5", "6", 0.5)]
    for record in (
        {"prompt": [user], "chosen": [five], "rejected": [six]},
        {"chosen": [user, five], "rejected": [user, six]},
    ):
        assert read_examples(write(path, record)) == [Pair(f"{path} line 1", (user,), (five,), (six,))]
    assert read_examples(write(path, {"chosen": "a b", "rejected": "a c"})) == [
        Pair(f"{path} line 1", "", "a b", "a c")
    ]
    assert read_examples(write(path, {"prompt": "p", "completion": "c", "grade": True})) == [
        Graded(f"{path} line 1", "p", "c", 1.0)
    ]
    assert read_examples(write(path, {"prompt": [user], "completion": "c", "score": 2}), "score") == [
        Graded(f"{path} line 1", (user,), "c", 2.0)
    ]
    assert read_examples(write(path, {"prompt": "p", "completions": ["s", "t"], "labels": [True, 0.5]})) == [
        Steps(f"{path} line 1", "p", ("s", "t"), (1.0, 0.5))
    ]


def test_pairs_without_a_prompt_are_held_out_and_share_their_beginning(tmp_path: Path) -> None:
    """TRL's implicit prompt: nobody knows where it ends, so that each pair counts as a prompt of its own."""
    records = [{"chosen": f"{n}+1={n + 1}", "rejected": f"{n}+1=0"} for n in range(1, 7)]
    examples = read_examples(write(tmp_path / "pairs.jsonl", *records, {"chosen": "5", "rejected": "6"}))
    split = hold_out(examples, 0.3, one_prompt="one prompt")
    assert (len(split.training), len(split.held_out)) == (5, 2)
    assert len({example.content for example in examples}) == 7
    encoded = encode_examples(examples, tiny_reward_model(RewardModelKind.OUTCOME).encoder, None)
    assert [as_batch(one.rows).context[0] == as_batch(one.rows).context[1] for one in encoded] == [True] * 6 + [False]
    assert len(as_batch(encoded[0].rows).context[0]) == len("1+1=")
    graded = read_examples(write(tmp_path / "g.jsonl", *({"prompt": "", "completion": c, "grade": 1} for c in "ab")))
    assert len({example.content for example in graded}) == 2


def test_the_prompt_of_a_pair_is_found_where_data_sets_have_it(tmp_path: Path) -> None:
    """In the column question, and in UltraFeedback's rows, which have the prompt and two whole chats."""
    asked = {"role": "user", "content": "1+1?"}
    chosen, rejected = ({"role": "assistant", "content": text} for text in ("2", "3"))
    (expected,) = read_examples(
        write(tmp_path / "a.jsonl", {"prompt": [asked], "chosen": [chosen], "rejected": [rejected]})
    )
    whole = {"chosen": [asked, chosen], "rejected": [asked, rejected]}
    for row in (whole, whole | {"prompt": "1+1?"}):
        (found,) = read_examples(write(tmp_path / "a.jsonl", row))
        assert found == expected
    (question,) = read_examples(write(tmp_path / "a.jsonl", {"question": "1+1?", "chosen": "2", "rejected": "3"}))
    assert (question.prompt, question.chosen, question.rejected) == ((asked,), "2", "3")
    with pytest.raises(ConfigError, match="'chosen' must be a string, because 'prompt' is one"):
        read_examples(write(tmp_path / "a.jsonl", whole | {"prompt": "another"}))


GOOD = {"prompt": "p", "chosen": "c", "rejected": "r"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "p", "answer": "5"},
            r"its columns \(prompt, answer\) are not a known kind of data: give prompt, chosen",
        ),
        (GOOD | {"completion": "c", "grade": 1}, "are several kinds of data"),
        ({"prompt": "p", "completion": "c", "grade": 1}, "it has other columns than .* line 1"),
        (GOOD | {"rejected": "c"}, "are the same"),
        (GOOD | {"rejected": None}, "'rejected' must be a string, because 'prompt' is one; this is null"),
        (GOOD | {"margin": "high"}, "'margin' must be a number, this is a string"),
        (GOOD | {"margin": 10**400}, "'margin' is beyond 1e6: scale"),
        ({"chosen": [], "rejected": []}, "'chosen' is empty"),
        (GOOD | {"prompt": 5}, "'prompt' must be a string or a list of chat messages"),
        (GOOD | {"prompt": [{"role": "user"}]}, "message 1 of 'prompt' needs a 'content'"),
    ],
)
def test_bad_lines_are_refused_by_their_number(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_examples(write(tmp_path / "data.jsonl", GOOD, record))
    assert "data.jsonl line 2: " in str(caught.value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"completions": [], "labels": []},
            "'completions' must be a list with one value for each step, this is a list of 0",
        ),
        ({"completions": ["a"], "labels": [1, 0]}, r"1 'completions' \(steps\) and 2 'labels'"),
        ({"completions": ["a", 5], "labels": [1, 0]}, "step 2 of 'completions' must be a text, this is a number"),
        ({"completions": ["a"], "labels": [2]}, "probabilities from 0 to 1"),
        ({"completions": ["a"], "labels": [None]}, "'labels' must be a number, this is null"),
    ],
)
def test_bad_step_labels_are_refused(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_examples(write(tmp_path / "data.jsonl", {"prompt": "p", **record}))


def test_options_that_do_not_fit_the_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="center is for preference pairs"):
        choose_objective(GRADES, center=0.1)
    with pytest.raises(ConfigError, match="grade_loss is for grades"):
        choose_objective(PAIRS, "squared_error")
    with pytest.raises(ConfigError, match="1: the grade is 2, and cross_entropy needs 0 to 1"):
        choose_objective(NUMBERS, "cross_entropy")
    encoder = tiny_reward_model(RewardModelKind.OUTCOME).encoder
    with pytest.raises(ConfigError, match=r"1: prompt and completion have 11 tokens, and at most 9 are trained"):
        encode_examples(PAIRS, encoder, 9)
    assert [one.example.place for one in encode_examples(PAIRS, encoder, 9, drop=True)] == ["2", "3"]
