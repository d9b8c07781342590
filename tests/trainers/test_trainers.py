"""The trainers for readers of articles: what they sample, pay and learn; the page that shows them, and the sweep."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from covey import ConfigError, GRPOLoss, GRPOTrainer, LoRAConfig, PPOLoss, PPOTrainer, compute_gae
from covey.data import Start
from covey.llm.model.gguf import EMBEDDED
from covey.llm.tasks import Arithmetic
from covey.train.prepare import NO_REFERENCE
from covey.trainers.base import PromptDeck, read_prompts
from helpers.tiny_models import END, tiny_folder, tiny_model, tiny_tokenizer


def share_of_digits(completions, **_):
    """The rule: the more of an answer is digits, the better."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def mean_letter(completions, **_):
    """Hardly ever the same for two answers."""
    return [sum(map(ord, text)) / max(len(text), 1) / 100 for text in completions]


def grpo_trainer(*args, **options) -> GRPOTrainer:
    given = {"tokenizer": tiny_tokenizer(), "reward_function": share_of_digits, "max_new_tokens": 8}
    return GRPOTrainer(tiny_model(), *args, **given | options)


def test_importing_covey_loads_no_torch():
    script = "import sys, covey; print('torch' in sys.modules, 'transformers' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "False"]


# ---- prompts ----


def test_prompts_come_in_four_forms():
    chat = [{"role": "user", "content": "2+2="}]
    assert read_prompts(["2+2="]) == [Start(0, "2+2=")]
    assert read_prompts([chat]) == [Start(0, chat)]
    for form in ([{"prompt": "2+2=", "answer": "4"}], {"prompts": ["2+2="], "answer": ["4"]}):
        assert read_prompts(form) == [Start(0, "2+2=", {"answer": "4"})]


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [
        ("2+2=", "give a list"),
        ([], "is empty"),
        (["2+2=", 5], r"prompts\[1\]: 'prompt' must be a string or a list of chat messages"),
        ([{"text": "2+2="}], r"prompts\[0\]: there is no 'prompt'"),
        ({"answer": ["4"]}, "has no 'prompts': its columns are answer"),
        ({"prompts": ["a", "b"], "answer": ["4"]}, "differ in length"),
    ],
)
def test_prompts_that_cannot_be_read(prompts, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read_prompts(prompts)


def test_every_pass_over_the_prompts_sees_each_once():
    deck = PromptDeck([{"prompt": letter, "place": i} for i, letter in enumerate("abcde")])
    drawn = [deck.draw(0, step, 2) for step in range(1, 6)]
    letters = [prompt for batch in drawn for prompt in batch["prompts"]]
    assert sorted(letters[:5]) == sorted(letters[5:]) == list("abcde")
    assert ["abcde"[i] for batch in drawn for i in batch["place"]] == letters


def test_a_task_of_covey_is_drawn_from():
    batch = PromptDeck(Arithmetic(digits=(1,))).draw(0, 1, 3)
    assert len(batch["prompts"]) == len(batch["answer"]) == 3


# ---- GRPOTrainer ----


def test_generate_group_outputs():
    trainer = grpo_trainer(None, 3)
    outputs, logprobs = trainer.generate_group_outputs(["1+1=", "12+34="], max_new_tokens=5)
    assert outputs.shape == logprobs.shape
    assert outputs.shape[:2] == (2, 3)
    assert outputs.shape[2] <= 5
    assert (logprobs <= 0).all()
    # What the model itself says of its own tokens, one answer at a time.
    tokenizer, end = trainer.tokenizer, trainer.tokenizer.convert_tokens_to_ids(END)
    prompt = tokenizer("12+34=")["input_ids"]
    answer = outputs[1, 2].tolist()
    answer = answer[: answer.index(end) + 1] if end in answer else answer
    logits = trainer.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    torch.testing.assert_close(logprobs[1, 2, : len(answer)], expected, atol=1e-4, rtol=1e-4)
    assert not logprobs[1, 2, len(answer) :].any()
    again, _ = trainer.generate_group_outputs(["1+1=", "12+34="], max_new_tokens=5)
    assert again.shape != outputs.shape or not torch.equal(again, outputs)


@pytest.mark.slow
def test_prompts_may_be_token_ids():
    """The same answers from texts, padded tensors, a tokenizer's output and lists; rewards read the text."""
    seen = []

    def look(prompts, completions, answer, **_):
        seen.append((list(prompts), list(answer)))
        return [0.0] * len(completions)

    texts = ["1+1=", "12+34="]
    tokenizer = tiny_tokenizer()
    rows = [tokenizer(text)["input_ids"] for text in texts]
    pad = tokenizer.pad_token_id
    forms = [
        texts,
        rows,
        torch.tensor([[pad, pad, *rows[0]], rows[1]]),
        torch.tensor([[*rows[0], pad, pad], rows[1]]),
        tokenizer(texts, padding=True, return_tensors="pt"),
        {"input_ids": torch.tensor([[5, 5, *rows[0]], rows[1]]), "attention_mask": [[0, 0, 1, 1, 1, 1], [1] * 6]},
        {"prompts": torch.tensor([[pad, pad, *rows[0]], rows[1]])},
    ]
    found = [grpo_trainer(None, 2).generate_group_outputs(form, max_new_tokens=5) for form in forms]
    for outputs, logprobs in found[1:]:
        assert torch.equal(outputs, found[0][0])
        assert torch.equal(logprobs, found[0][1])
    trainer = grpo_trainer(None, 2, reward_function=look)
    trainer.training_step({"prompts": forms[2], "answer": ["2", "46"]})
    assert seen == [(["1+1=", "1+1=", "12+34=", "12+34="], ["2", "2", "46", "46"])]
    drawn = grpo_trainer(None, 2, prompts=forms[2], prompts_per_step=2, steps=1).train()
    assert drawn[0]["decisions/sampled"] > 0


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [
        (torch.tensor([4, 5, 6]), r"prompts has shape \[3\]: token ids have \[batch, length\]"),
        (torch.tensor([[0, 0]]), "a prompt is empty"),
        (torch.tensor([[4, 9999]]), "a prompt has the token id 9999, the model has 0 to"),
        ([[4, -7]], "a prompt has the token id -7"),
        (torch.tensor([[0.5]]), r"prompts\[0\]: message 1 of 'prompt' needs a 'role' that is a string"),
    ],
)
def test_token_ids_that_cannot_be_prompts(prompts, complaint):
    with pytest.raises(ConfigError, match=complaint):
        grpo_trainer(None, 2).generate_group_outputs(prompts)


def test_a_whole_answer_has_the_sum_of_its_tokens_log_probabilities():
    tokens, whole = (
        grpo_trainer(None, 3).generate_group_outputs(["1+1="], 5, sequence_logprobs=flag)[1] for flag in (False, True)
    )
    assert whole.shape == (1, 3)
    torch.testing.assert_close(whole, tokens.sum(-1))
    found = ppo_trainer().collect_experiences(torch.tensor([tiny_tokenizer()("1+1=")["input_ids"]]), 5)
    torch.testing.assert_close(found["sequence_logprobs"], found["old_logprobs"].sum(-1))


def test_compute_rewards_reads_answers_up_to_their_end():
    trainer = grpo_trainer(None, 2, reward_function=right)
    four, five, end = trainer.tokenizer.convert_tokens_to_ids(["4", "5", END])
    outputs = torch.tensor([[[four, end, five], [four, five, end]], [[five, end, end], [end, five, five]]])
    rewards = trainer.compute_rewards({"prompts": ["2+2=", "2+3="], "answer": ["4", "5"]}, outputs)
    assert rewards.tolist() == [[1, 0], [1, 0]]
    with pytest.raises(ConfigError, match=r"outputs has shape \[2, 3\]"):
        trainer.compute_rewards(["2+2="], outputs[0])


def right(prompts, completions, answer, **_):
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def test_training_step_is_the_loss_of_what_was_sampled():
    """One step's loss and KL, worked out again from outputs, rewards and the models' own log-probabilities."""
    reference = tiny_model(seed=1)
    twin = grpo_trainer(reference, 4, kl_beta=0.3, reward_function=mean_letter)
    outputs, logprobs = twin.generate_group_outputs(["1+1=", "2+3="])
    rewards = twin.compute_rewards(["1+1=", "2+3="], outputs)
    assert (rewards.std(dim=1) > 0).all(), "a dead group would leave the update"
    mask = logprobs != 0
    of_reference = torch.zeros_like(logprobs)
    for n, prompt in enumerate(twin.tokenizer(["1+1=", "2+3="])["input_ids"]):
        for g in range(4):
            answer = outputs[n, g][mask[n, g]]
            logits = reference(torch.cat([torch.tensor(prompt), answer])[None]).logits[0, len(prompt) - 1 : -1]
            of_reference[n, g][mask[n, g]] = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0].detach()
    expected = GRPOLoss(kl_beta=0.3)(logprobs, logprobs, rewards, of_reference, mask)
    again = grpo_trainer(tiny_model(seed=1), 4, kl_beta=0.3, reward_function=mean_letter)
    metrics = again.training_step(["1+1=", "2+3="])
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-4)
    assert metrics["reward/mean"] == pytest.approx(float(rewards.mean()), abs=1e-6)
    assert metrics["kl"] > 0


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"kl_beta": 0.0, "epochs": 2, "minibatches": 2}])
def test_a_rule_based_reward_rises(options):
    trainer = grpo_trainer(
        None,
        8,
        **{"kl_beta": 0.01} | options,
        prompts=["1+1=", "2+3="],
        prompts_per_step=2,
        steps=22,
        learning_rate=3e-3,
    )
    seen = []
    history = trainer.train(on_step=lambda step, metrics: seen.append(step))
    rewards = [metrics["reward/mean"] for metrics in history]
    assert seen == list(range(1, 23))
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


@pytest.mark.slow
def test_a_reward_may_be_a_method():
    class Ends(GRPOTrainer):
        def compute_rewards(self, prompts, outputs):
            assert list(prompts) == ["prompts"]
            return (outputs == self.tokenizer.eos_token_id).any(-1).float()

    trainer = Ends(
        tiny_model(), None, 8, kl_beta=0, tokenizer=tiny_tokenizer(), prompts=["1+1="], prompts_per_step=1,
        max_new_tokens=8, steps=25, learning_rate=3e-3,
    )  # fmt: skip
    history = trainer.train()
    assert history[-1]["reward/mean"] > history[0]["reward/mean"] + 0.3


def test_answers_that_could_not_be_graded_leave_their_group():
    def sometimes(completions, **_):
        return [None if i == 0 else float(len(text)) for i, text in enumerate(completions)]

    trainer = grpo_trainer(None, 8, reward_function=sometimes)
    outputs, _ = trainer.generate_group_outputs(["1+1="])
    rewards = trainer.compute_rewards(["1+1="], outputs)
    assert rewards.isnan().tolist() == [[True] + [False] * 7]
    assert trainer.training_step(["1+1="])["groups/failed_rollouts"] == 1


def test_what_was_handed_over_has_learned_and_the_reference_has_not():
    model, reference = tiny_model(), tiny_model(seed=1)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    as_it_was = {name: p.clone() for name, p in reference.state_dict().items()}
    trainer = GRPOTrainer(
        model, reference, tokenizer=tiny_tokenizer(), reward_function=share_of_digits, max_new_tokens=4
    )
    trainer.training_step(["1+1="])
    assert trainer.model is model
    assert any(not torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert all(torch.equal(as_it_was[name], p) for name, p in reference.state_dict().items())
    assert all(p.grad is None for p in reference.parameters())


def test_without_a_reference_there_is_a_frozen_copy_or_none():
    held = grpo_trainer().reference
    assert held is not NO_REFERENCE
    assert not any(p.requires_grad for p in held.module.parameters())
    assert grpo_trainer(kl_beta=0.0).reference is NO_REFERENCE


def test_a_model_by_name_saves_what_it_learned(tmp_path):
    tiny_folder(tmp_path / "model")
    trainer = GRPOTrainer(
        str(tmp_path / "model"),
        tmp_path / "model",
        4,
        reward_function=share_of_digits,
        max_new_tokens=4,
        precision="fp32",
    )
    trainer.training_step(["1+1="])
    trainer.save(tmp_path / "trained")
    again = GRPOTrainer(tmp_path / "trained", kl_beta=0.0, precision="fp32")
    for mine, theirs in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: grpo_trainer(None, 1), "group_size must be at least 2"),
        (lambda: grpo_trainer(None, 4, 1.5), "clip_epsilon"),
        (lambda: grpo_trainer(epochs=0), "epochs"),
        (lambda: grpo_trainer(temperature=0.0), "temperature must be above 0"),
        (lambda: grpo_trainer().generate_group_outputs(["1"], 0), "max_new_tokens must be at least 1"),
        (lambda: GRPOTrainer(tiny_model()), "give tokenizer="),
        (lambda: GRPOTrainer(torch.nn.Linear(2, 2)), "a causal language model of transformers.* is a Linear"),
        (lambda: GRPOTrainer("/no/such/folder"), "there is no folder"),
        (lambda: grpo_trainer().train(), "there are no prompts to train on: give prompts"),
        (lambda: grpo_trainer(reward_function=None).training_step(["1"]), "there is no reward"),
        (
            lambda: GRPOTrainer(reward_funcs=len, train_dataset=[], args=object()),
            "reward_funcs is reward_function; train_dataset is prompts; args has no counterpart: give its fields by",
        ),
        (lambda: grpo_trainer(tokeniser=None), r"no argument 'tokeniser' \(did you mean 'tokenizer'\?\)"),
        (lambda: GRPOTrainer(), "there is no model"),
        (lambda: GRPOTrainer("m", share_of_digits), "ref_model must be a model.*is function.*reward_function="),
        (lambda: GRPOTrainer(["m"]), "the model must be a model, or a name or folder of one .is list"),
        (lambda: PPOTrainer(), "there is no actor_model"),
        (lambda: PPOTrainer(model="m", dataset=[]), "PPOTrainer has other names than TRL's: model is actor_model; dat"),
    ],
)
def test_trainers_refuse_what_cannot_work(make, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        make()
    assert "\n" not in str(error.value)


TRL_CONSTRUCTORS = """
    reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks optimizers
    quantization_config peft_config tools rollout_func environment_factory
    config policy ref_policy value_model reward_model dataset data_collator optimizer lr_scheduler num_shared_layers
"""


@pytest.mark.parametrize("trainer", [GRPOTrainer, PPOTrainer])
def test_every_name_of_trls_constructors_is_answered_in_one_line(trainer):
    with pytest.raises(ConfigError) as error:
        trainer(**dict.fromkeys(TRL_CONSTRUCTORS.split()))
    message = str(error.value)
    for name in TRL_CONSTRUCTORS.split():
        assert f" {name} is " in message or f" {name} has no counterpart: " in message
    assert "\n" not in message


def test_a_model_cannot_be_its_own_reference():
    model = tiny_model()
    with pytest.raises(ConfigError, match="ref_model is the model that is trained"):
        GRPOTrainer(model, model, tokenizer=tiny_tokenizer())


# ---- PPOTrainer ----


def ppo_trainer(*args, **options) -> PPOTrainer:
    given = {"tokenizer": tiny_tokenizer(), "reward_function": share_of_digits, "max_new_tokens": 8}
    return PPOTrainer(tiny_model(), *args, **given | options)


def test_collect_experiences():
    """Shapes, and the reward of every token: DeepSeekMath eq. 2, from the models' own log-probabilities."""
    reference = tiny_model(seed=1)
    trainer = ppo_trainer(None, reference, kl_beta=0.3)
    found = trainer.collect_experiences(["1+1=", "12+3="], max_new_tokens=5)
    mask, outputs = found["mask"], found["outputs"]
    assert mask.shape == outputs.shape == found["values"].shape == found["rewards"].shape
    assert len(mask) == len(found["scores"]) == len(found["prompt_ids"]) == 2
    texts = [trainer.tokenizer.decode(row[m], skip_special_tokens=True) for row, m in zip(outputs, mask, strict=True)]
    assert found["scores"].tolist() == pytest.approx(share_of_digits(texts))
    for row in range(2):
        prompt, answer = found["prompt_ids"][row], outputs[row][mask[row]]
        tokens = torch.cat([torch.tensor(prompt), answer])[None]
        old, ref = (
            model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(1, answer[:, None])[:, 0].detach()
            for model in (trainer.model, reference)
        )
        torch.testing.assert_close(found["old_logprobs"][row][mask[row]], old, atol=1e-4, rtol=1e-4)
        expected = -0.3 * (old - ref)
        expected[-1] += found["scores"][row]
        torch.testing.assert_close(found["rewards"][row][mask[row]], expected, atol=1e-4, rtol=1e-4)
    for name in ("old_logprobs", "rewards", "values"):
        assert not found[name][~mask].any()


def test_update_policy_is_the_loss_of_the_experiences():
    """One pass whose loss is worked out again by compute_gae and PPOLoss, for a critic that is not 0."""
    trainer = ppo_trainer(kl_beta=0.0, gamma=0.9, lam=0.7)
    found = trainer.collect_experiences(["1+1=", "12+3=", "5"])
    mask = found["mask"]
    torch.manual_seed(0)
    found["values"] = torch.where(mask, torch.randn(mask.shape), 0.0)
    found["old_logprobs"] = torch.where(mask, found["old_logprobs"] - 0.5 * torch.randn(mask.shape), 0.0)
    advantages, returns = compute_gae(found["rewards"], found["values"], 0.9, 0.7)
    assert all(map(torch.equal, trainer.compute_advantages(found["rewards"], found["values"]), (advantages, returns)))
    whitened = (advantages - advantages[mask].mean()) / advantages[mask].std(correction=0)
    logprobs = torch.zeros(mask.shape)
    for row in range(3):
        prompt, answer = found["prompt_ids"][row], found["outputs"][row][mask[row]]
        logits = trainer.model(torch.cat([torch.tensor(prompt), answer])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs[row][mask[row]] = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0].detach()
    zeros = torch.zeros(mask.shape)  # what a new critic says
    expected = PPOLoss(entropy_coef=0.0)(logprobs, found["old_logprobs"], zeros, returns, whitened, 0.0, mask)
    assert trainer.update_policy(found, num_epochs=1) == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["own", "the actor's"])
def test_ppo_learns_a_rule_based_reward(trunk):
    model = tiny_model()
    trainer = PPOTrainer(
        model, None if trunk == "own" else model, tokenizer=tiny_tokenizer(), reward_function=share_of_digits,
        prompts=["1+1=", "2+3="], prompts_per_step=16, max_new_tokens=8, steps=14, learning_rate=3e-3, gamma=1.0,
    )  # fmt: skip
    history = trainer.train()
    rewards = [metrics["reward/mean"] for metrics in history]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
    seen = trainer.collect_experiences(["1+1=", "2+3="] * 8)
    assert seen["values"][seen["mask"]].mean().item() == pytest.approx(seen["scores"].mean().item(), abs=0.2)


def test_more_epochs_move_further():
    moved = []
    for epochs in (1, 4):
        trainer = ppo_trainer(kl_beta=0.0, learning_rate=1e-3)
        experiences = trainer.collect_experiences(["1+1=", "2+3="])
        trainer.update_policy(experiences, num_epochs=epochs)
        moved.append(trainer.metrics["update/optimizer_steps"])
    assert moved == [1, 4]
    with pytest.raises(ConfigError, match="num_epochs"):
        trainer.update_policy(experiences, num_epochs=0)


def test_a_critic_from_a_model_of_its_own(tmp_path):
    other = tiny_model(seed=3)
    trainer = ppo_trainer(other)
    for mine, theirs in zip(trainer.critic.trunk.parameters(), other.base_model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    trainer.save(tmp_path)
    assert (tmp_path / "critic" / "config.json").is_file()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"gamma": 1.5}, "gamma"),
        ({"lam": -1}, "lam"),
        ({"clip_epsilon": 0}, "clip_epsilon"),
        ({"kl_beta": -0.1}, "kl_beta"),
        ({"critic_learning_rate": 0.0}, "critic_learning_rate"),
        ({"critic_model": "/no/such/folder"}, "there is no folder"),
    ],
)
def test_ppo_refuses_what_cannot_work(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        ppo_trainer(**options)


# ---- an adapter, recomputation ----


def test_lora_trains_an_adapter_alone_and_starts_at_the_reference(tmp_path):
    trainer = grpo_trainer(prompts=["12", "34"], prompts_per_step=2, lora=LoRAConfig(rank=4), learning_rate=1e-2)
    first = {name: weight.clone() for name, weight in trainer.model.named_parameters() if "lora" not in name}
    metrics = trainer.training_step({"prompts": ["12", "34"]})
    assert abs(metrics["kl"]) < 1e-6, "before the first update the policy is the reference"
    for _ in range(3):
        metrics = trainer.training_step({"prompts": ["12", "34"]})
    assert metrics["kl"] > 1e-6
    assert all(
        bool((weight == first[name]).all()) for name, weight in trainer.model.named_parameters() if name in first
    )
    trainer.save(tmp_path)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    with torch.no_grad():
        tokens = torch.tensor([[5, 6, 7]])
        merged = AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits
        torch.testing.assert_close(merged, trainer.model(tokens).logits, atol=1e-4, rtol=1e-4)


def test_recomputation_changes_no_bit():
    plain, recomputed = (grpo_trainer(recompute=recompute, learning_rate=1e-2) for recompute in (False, True))
    batch = {"prompts": ["12", "34"]}
    for _ in range(2):
        assert plain.training_step(batch)["loss"] == recomputed.training_step(batch)["loss"]
    for one, other in zip(plain.model.parameters(), recomputed.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: grpo_trainer(lora=LoRAConfig(rank=4, dropout=0.1)), "lora.dropout is 0.1: it must be 0"),
        (lambda: grpo_trainer(lora=LoRAConfig(adapter="runs/x")), "a trainer begins with a new adapter"),
        (lambda: grpo_trainer(lora=4), "lora must be covey.LoRAConfig"),
        (lambda: grpo_trainer(lora=LoRAConfig(rank=-1)), "lora.rank must be at least 0"),
        (lambda: ppo_trainer(lora=LoRAConfig(rank=4)), "PPOTrainer trains all weights"),
    ],
)
def test_adapters_that_cannot_be_are_one_line(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


# ---- the page and the sweep ----

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "articles.md").read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("import ")[-1].split("\n")[0])
def test_the_blocks_of_the_page_run(block, tmp_path):
    """As they stand, but on a tiny model: the embedded one takes minutes."""
    if EMBEDDED in block:
        block = block.replace(f'"{EMBEDDED}"', repr(str(tiny_folder(tmp_path / "model"))))
    exec(compile(block, "docs/articles.md", "exec"), {})


def test_the_numbers_on_the_page(capsys):
    exec(compile(BLOCKS[0] + BLOCKS[1], "docs/articles.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert f"# {first}" in BLOCKS[0]
    assert second.startswith("-0.1846")
    assert round(float(second.split()[0]), 4) == float(re.search(r"# (-0\.\d{4})", BLOCKS[1])[1])


@pytest.mark.slow
def test_the_sweep_prints_a_row_for_every_setting(capsys):
    sweep = runpy.run_path(str(ROOT / "examples" / "sweep.py"))["sweep"]
    rows = sweep("tiny", group_sizes=(2, 8), clip_epsilons=(0.05, 0.5), steps=5, seeds=1)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(row["group_size"], row["clip_epsilon"]) for row in rows] == [(2, 0.05), (2, 0.5), (8, 0.05), (8, 0.5)]
    assert [line[:2] for line in printed] == [["2", "0.05"], ["2", "0.5"], ["8", "0.05"], ["8", "0.5"]]
    clipped = [float(line[-3].rstrip("%")) for line in printed]
    assert clipped[0] > clipped[1], "a narrow range clips more"
    assert rows[3]["reward"] > rows[2]["reward"], "and learns more slowly"
