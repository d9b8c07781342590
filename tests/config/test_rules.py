"""Recipes that cannot work are refused in one line that names the place and the remedy; what can work is accepted.

A line of a table is a recipe, written as TOML with ; between its lines, and what its refusal must say, or `accepted`.
Settings that a run would not have used or survived are refused too; lists from Python are as good as tuples.
"""

import json
import math
import sys
import tomllib
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import covey.config as config_package
from covey.cli.main import main
from covey.config import (
    ArithmeticConfig,
    ChatConfig,
    ConfigError,
    ControlConfig,
    ControlLossConfig,
    ConversationConfig,
    EnvironmentConfig,
    LoRAConfig,
    LossConfig,
    ReasoningGymConfig,
    ReplayConfig,
    RewardConfig,
    RunConfig,
    SamplerConfig,
    SamplingConfig,
)
from covey.config.common import Table, importance_cap
from covey.config.conversation import ADAPTERS, installed_environments
from covey.config.inputs import named_code
from covey.config.model_sources import resolved
from covey.config.named_modules import entry_points_of
from covey.config.recipe import config_from_dict, read_recipe
from covey.config.rules import validate
from covey.experiment.algorithm import build_algorithm
from covey.experiment.control import ControlBuilder
from covey.experiment.llm import LLMBuilder, build_llm_algorithm
from covey.llm.tasks import Arithmetic
from covey.runtime.variables import check_ranks
from covey.train.replay import RecentGroups, Replay, build_replay
from covey.trainers.base import TrainerOptions
from helpers import guessing
from helpers.tiny_models import tiny_folder

FILE, PYTHON = guessing.__file__, sys.executable
LANGUAGE, CONTROL = '[task]\nname = "arithmetic"\n', 'environment.id = "CartPole-v1"\n'
VERIFIER = 'rewards = [{model = "MODEL"}, {name = "numeric", weight = 0.0, score = true}]; iteration.steps = 10'
GUESS = 'conversation.environment = "FILE:Guess"'

OF_LANGUAGE = f"""
steps = 100 -> accepted
sampling.group_size = 2; sampling.prompts_per_step = 1; sampling.max_new_tokens = 1 -> accepted
update.minibatches = 16; loss.clip_low = 1.0; loss.dual_clip = 1.01; sampling.temperature = 1e-3 -> accepted
algorithm = "ppo"; sampling.group_size = 1 -> accepted
model = "Qwen/Qwen2.5-0.5B-Instruct" -> accepted
model = "gpt2" -> accepted
sampling.group_size = 1 -> nothing to compare with; set group_size to 2 or more
sampling.group_size = 0 -> sampling.group_size must be at least 1
sampling.group_size = 1; teacher.model = "smollm2-135m" -> accepted
sampling.group_size = 1; teacher.model = "smollm2-135m"; algorithm = "dapo" -> set sampling.max_resamples to 0
teacher.model = "policy"; teacher.prompt = "{{answer}}"; teacher.divergence = "jensen_shannon" -> accepted
teacher.model = "policy" -> differs from the policy only by what its prompt says: set teacher.prompt
teacher.model = "http://127.0.0.1:8000" -> servers return log-probabilities of the tokens that they sample
teacher.weight = 0.5 -> teacher.weight is set, but has no effect while teacher.model is unset
teacher.model = "reference"; teacher.mixture_weight = 0.3 -> has no effect while teacher.divergence is
algorithm = "ppo"; steps = 5; update.critic_warmup_steps = 5 -> must be below the run's 5 steps
critic.trunk = "policy" -> critic.trunk is set, but not used with grpo
algorithm = "ppo"; critic.trunk = "both" -> critic.trunk must be own, policy or adapter
sampling.temperature = 0.0 -> must be at least 0.0001 (is 0.0), because greedy rollouts
update.minibatches = 5 -> set minibatches to 4, or prompts_per_step to a multiple
update.learning_rate = 0 -> update.learning_rate must be above 0
loss.dual_clip = 1 -> must be above 1 (is 1.0), because it bounds the ratio
loss.clip_low = 1.5 -> loss.clip_low must be at most 1
lora.dropout = 1.0 -> lora.dropout must be below 1
algorithm = "rloo"; loss.clip_low = 0.2 -> clip_low is set, but not used with rloo
algorithm = "reinforce"; update.epochs = 2 -> update.epochs is 2, but reinforce has no ratio
checkpoint.keep = 1 -> checkpoint.keep must be at least 2
evaluation.token_limits = [12, 0] -> evaluation.token_limits must be at
evaluation.token_limits = [12, 12] -> names a limit twice
seed = -1 -> seed must be at least 0
task.digits = [0] -> task.digits must be at least 1
task.operators = ["/"] -> task.operators must be +, - or *
task.name = "dataset" -> the dataset task needs a file
task.name = "dataset"; task.path = "no/such.jsonl" -> task.path: there is no file no/such.jsonl
task.name = "dataset"; task.path = "/" -> is a folder without state.json
rewards = [{{}}] -> neither name nor function nor judge nor model: give exactly one
rewards = [{{name = "numeric", function = "a:b"}}] -> name and function: give exactly one
rewards = [{{name = "format"}}] -> needs a value for pattern
rewards = [{{name = "format", pattern = "("}}] -> is not a regular expression
rewards = [{{name = "numeric", pattern = "x"}}] -> pattern is set, but not used with numeric
rewards = [{{name = "numerics"}}] -> did you mean 'numeric'?
rewards = [{{name = "numeric", weight = 0}}] -> weight is 0
rewards = [{{name = "numeric", timeout_seconds = 0}}] -> timeout_seconds must be above 0
rewards = [{{function = "rewards.py"}}] -> function must be file.py:function
rewards = [{{function = "no_such_file.py:reward"}}] -> there is no file no_such_file.py
rewards = [{{name = "numeric", score = true}}, {{name = "numeric", score = true}}] -> keep one
rewards = [{{judge = "http://127.0.0.1:0/v1", judge_model = "m", judge_prompt = "{{completion}}"}}] -> the port is 0
model = "./no/such/folder" -> there is no folder ./no/such/folder
model = "~/no_such_folder" -> there is no folder
model = "model.gguf" -> there is no file model.gguf
model = "smollm2-135" -> did you mean 'smollm2-135m'?
model = "two words" -> is not an embedded model
model = "/" -> has no config.json
reference.refresh_fraction = 0.1 -> set reference.refresh_every
reference.refresh_fraction = 0.1; reference.refresh_every = 5 -> accepted
iteration.steps = 0 -> iteration.steps must be at least 1
process.boundary = "line" -> process.boundary is set, but no reward is paid by step

sampling.adaptive = true; sampling.initial_group_size = 17 -> initial_group_size (17) spends more than the
sampling.adaptive = true; sampling.initial_group_size = 8; sampling.final_group_size = 6 -> set it to at most 6
sampling.adaptive = true; sampling.max_group_size = 12 -> max_group_size (12) is below group_size (16)
sampling.adaptive = true; sampling.max_group_size = 20; sampling.final_group_size = 32 -> set it to 32
sampling.initial_group_size = 8 -> has no effect while sampling.adaptive is false
sampling.adaptive = true; sampling.max_resamples = 2 -> set max_resamples = 0, or remove adaptive
algorithm = "dapo"; sampling.adaptive = true -> sampling.adaptive with max_resamples = 3
algorithm = "reinforce_pp"; sampling.adaptive = true -> sampling.adaptive is set, but not used with reinforce_pp
algorithm = "ppo"; sampling.max_resamples = 1 -> ppo does not compare within groups
steps = 1; sampling.final_group_size = 32 -> the run has one step
sampling.overlong_tokens = 65 -> set it to at most 64
sampling.adaptive = true; sampling.initial_group_size = 16; sampling.max_group_size = 16 -> accepted
sampling.adaptive = true; sampling.final_group_size = 128 -> accepted
algorithm = "dapo"; sampling.adaptive = true; sampling.max_resamples = 0 -> accepted
algorithm = "ppo"; sampling.final_group_size = 8; sampling.overlong_tokens = 64 -> accepted
sampling.min_new_tokens = 9; sampling.max_new_tokens = 9 -> no completion could end

loss.adaptive_kl_target = 0.1; update.epochs = 2 -> set loss.kl_coefficient above 0
loss.adaptive_kl_horizon = 500 -> has no effect while loss.adaptive_kl_target is
loss.kl_warmup_steps = 5; loss.kl_coefficient = 0 -> kl_coefficient is 0
loss.kl_to = "behavior"; loss.kl_coefficient = 0.1 -> their KL is 0: raise one of them
loss.kl_to = "behavior"; loss.kl_estimator = "exact"; update.epochs = 2 -> use 'k3', or set kl_to to 'reference'
loss.importance_mask = [0.5] -> such as [0.5, 5.0], got [0.5]
loss.importance_mask = [1.5, 5.0] -> a lowest weight below 1 and a highest above 1
loss.importance_mask = [0.5, 1.0] -> a lowest weight below 1 and a highest above 1
loss.importance_mask = [-1, 2] -> a lowest weight below 1 and a highest above 1
loss.importance_mask = [0.5, 2.0]; loss.importance_cap = 3.0 -> importance_cap = 3 has no effect
loss.importance_level = "sequence" -> set importance_cap or importance_mask
loss.kl_to = "behavior"; loss.kl_coefficient = 0.05; loss.adaptive_kl_target = 0.01; update.epochs = 2 -> accepted
loss.kl_estimator = "exact"; loss.importance_cap = 2.0 -> accepted
loss.importance_mask = [0.0, 2.0]; loss.importance_cap = 1.0; loss.importance_level = "sequence" -> accepted

loss.entropy_target = 0.5 -> set loss.entropy_coefficient above 0
loss.entropy_target = 0; loss.entropy_coefficient = 0.01 -> loss.entropy_target must be above 0
loss.entropy_gain = 0.5 -> loss.entropy_gain is set, but has no effect while loss.entropy_target is
loss.entropy_target = 1; loss.entropy_coefficient = 1; loss.entropy_bounds = [0.5] -> such as [0.5, 5.0] (is [0.5])
loss.entropy_target = 1; loss.entropy_coefficient = 1; loss.entropy_bounds = [2, 0.5] -> must be two numbers
loss.entropy_target = 1; loss.entropy_coefficient = 1; loss.entropy_bounds = [2, 5] -> which must be between them
loss.entropy_target = 1; loss.entropy_controller = "clip" -> every ratio is 1 and nothing is clipped
algorithm = "cispo"; update.epochs = 2; loss.entropy_target = 1; loss.entropy_controller = "clip" -> set it to 'bonus'
loss.clip_cov_fraction = 0.1; loss.clip_cov_bounds = [2.0, 2.0] -> loss.clip_cov_bounds must be two numbers
loss.kl_cov_coefficient = 0.5 -> has no effect while loss.kl_cov_fraction is
loss.kl_cov_fraction = 0.1 -> so its penalty is 0: raise one of them
algorithm = "rloo"; loss.entropy_target = 1; loss.entropy_coefficient = 1; loss.clip_cov_fraction = 0.01 -> accepted

replay.groups = 4; algorithm = "rloo" -> the KL is in the reward
replay.groups = 4; algorithm = "rloo"; loss.kl_coefficient = 0 -> accepted
replay.groups = 4; algorithm = "rloo"; loss.kl_estimator = "k3" -> accepted
replay.groups = 4; loss.kl_estimator = "k1" -> the KL is in the reward
replay.groups = 4; loss.kl_estimator = "k1"; loss.kl_to = "behavior"; update.minibatches = 2 -> accepted
replay.groups = 4; iteration.steps = 5 -> iteration.steps trains the reward model

lora.alpha = 8 -> lora.alpha is set, but has no effect while lora.rank is 0
algorithm = "ppo"; critic.trunk = "adapter" -> critic.trunk = "adapter" is for runs with LoRA
lora.rank = 4; lora.dropout = 0.1 -> lora.dropout is 0.1: it must be 0, because a ratio
lora.rank = 4; algorithm = "ppo" -> set critic.trunk = "adapter"
lora.adapter = "nothing" -> lora.adapter: nothing has no adapter_config.json
lora.load_in_4bit = true -> lora.load_in_4bit is set, but has no effect while lora.rank is 0
lora.rank = 4; lora.load_in_4bit = true; cluster.weights = "fsdp" -> every rank has all frozen weights
lora.rank = 4; lora.load_in_4bit = true -> accepted

{VERIFIER} -> accepted
rewards = [{{name = "numeric"}}, {{model = "MODEL"}}]; iteration.steps = 10 -> accepted
rewards = [{{name = "numeric"}}]; iteration.steps = 10 -> there is none: give one [[rewards]]
rewards = [{{model = "MODEL"}}, {{model = "MODEL"}}]; iteration.steps = 10 -> and there are several
rewards = [{{model = "MODEL"}}]; iteration.steps = 10 -> labels completions with a verifier
rewards = [{{model = "MODEL"}}, {{name = "numeric"}}]; iteration.steps = 10 -> weight = 0.0 and score = true
{VERIFIER}; steps = 44 -> steps (44) is not a multiple of iteration.steps (10)
{VERIFIER}; reference.refresh_every = 5 -> reference.refresh_every is set
{VERIFIER}; iteration.replay_fraction = 1.0 -> replay_fraction must be below 1
{VERIFIER}; sampler.kind = "covey"; sampler.start = 1 -> remove sampler.kind, or iteration.steps
iteration.reward_model_epochs = 2 -> has no effect while iteration.steps is unset

{GUESS}; rewards = [{{name = "environment"}}, {{name = "numeric"}}]; algorithm = "ppo" -> accepted
{GUESS}; task.name = "environment"; loss.credit = "process_by_step" -> accepted
{GUESS}; loss.credit = "process_by_step"; rewards = [{{function = "FILE:by_turn", per_step = true}}] -> accepted
conversation.turns = 3 -> conversation.turns is set, but has no effect while conversation.environment is unset
conversation.environment = "calculatr" -> there is no environment 'calculatr' (did you mean 'calculator'?)
conversation.environment = "FILE:Gues" -> has no class 'Gues' (did you mean 'Guess'?)
conversation.environment = "nothing.py:Guess" -> conversation.environment: there is no file
conversation.environment = "calculator"; conversation.total_tokens = 63 -> is above conversation.total_tokens (63)
conversation.environment = "calculator"; conversation.options = ["x"] -> conversation.options has 'x'
{GUESS}; evaluation.token_limits = [8, 16] -> evaluation.token_limits is set
{GUESS}; loss.credit = "process"; rewards = [{{name = "numeric"}}] -> no reward is paid by turn: use an environment
{GUESS}; process.boundary = "line" -> process.boundary is set, which conversations
{GUESS}; sampling.overlong_tokens = 513 -> set it to at most 512
rewards = [{{name = "environment"}}] -> the reward environment is for conversations
task.name = "environment" -> the task environment is for conversations: set conversation.environment

sampler.servers = ["HERE"] -> sampler.servers is set, but has no effect while sampler.kind is 'local'
sampler.kind = "covey" -> names no server: start covey serve, or set sampler.start
sampler.kind = "vllm"; sampler.vllm_python = "/missing" -> there is no vLLM environment at /missing: `make scale`
sampler.kind = "vllm"; sampler.vllm_python = "{PYTHON}" -> accepted
sampler.kind = "vllm"; sampler.vllm_python = "{PYTHON}"; sampler.start = 1; sampler.sleep = true -> accepted
sampler.kind = "vllm"; sampler.vllm_python = "{PYTHON}"; sampler.start = 2 -> a run starts one vLLM
sampler.kind = "covey"; sampler.start = 1; sampler.sleep = true -> sampler.sleep is for vLLM
sampler.kind = "covey"; sampler.servers = ["HERE"]; sampler.start = 1 -> both servers and start
sampler.kind = "covey"; sampler.servers = ["HERE", "HERE/"] -> an address twice
sampler.kind = "covey"; sampler.servers = ["127.0.0.1:8801"] -> must be addresses such as
sampler.kind = "covey"; sampler.servers = ["ftp://127.0.0.1"] -> must be addresses such as
sampler.kind = "covey"; sampler.servers = ["HERE/v1"] -> without a path
sampler.kind = "covey"; sampler.servers = ["HERE?a=b"] -> without a path
sampler.kind = "covey"; sampler.servers = ["http://127.0.0.1:99999"] -> is not an address
sampler.kind = "covey"; sampler.servers = ["http://127.0.0.1:0"] -> is not an address (the port is 0)
sampler.kind = "covey"; sampler.servers = ["http://me:secret@127.0.0.1:1"] -> with a user name
sampler.kind = "vllm"; sampler.servers = ["http://node7:8801"] -> node7 is another machine, so sampler.token_file
sampler.kind = "covey"; sampler.servers = ["THERE"]; sampler.token_file = "TOKEN" -> so sampler.folder must name
sampler.kind = "covey"; sampler.servers = ["HERE"]; sampler.folder = "/missing" -> no folder /missing
sampler.kind = "covey"; sampler.start = 1; sampler.transport = "group"; sampler.folder = "/tmp" -> remove one of them
sampler.kind = "covey"; sampler.servers = ["HERE"]; sampler.token_file = "/missing" -> there is no file /missing
sampler.kind = "covey"; sampler.servers = ["HERE"] -> covey serve smollm2-135m creates the access token, start it first
sampler.kind = "covey"; sampler.start = 1; sampler.max_mismatch = 1 -> sampler.max_mismatch must be above 1
sampler.kind = "covey"; sampler.start = 2 -> accepted
sampler.kind = "covey"; sampler.servers = ["http://[::1]:2"]; sampler.token_file = "TOKEN" -> accepted
sampler.kind = "covey"; sampler.servers = ["THERE"]; sampler.token_file = "TOKEN"; sampler.folder = "/tmp" -> accepted
sampler.kind = "vllm"; sampler.start = 0; sampler.servers = ["HERE"]; sampler.token_file = "TOKEN" -> accepted
sampler.kind = "vllm"; sampler.servers = ["HERE"]; sampling.min_new_tokens = 3 -> is for covey's own samplers
"""
OF_CONTROL = """
algorithm = "ppo"; rollouts.kind = "fragments"; update.minibatches = 1024 -> accepted
algorithm = "rloo"; update.epochs = 1; update.minibatches = 3 -> accepted
rollouts.group_size = 1; loss.credit = "within_episode" -> accepted
rollouts.kind = "branches"; rollouts.horizon = 3 -> accepted
rollouts.gamma = 0; loss.credit = "reward_to_go"; seed = 4294967295 -> accepted
algorithm = "reinforce_pp"; rollouts.group_size = 1 -> accepted
environment.id = "" -> give the table [environment] an id
loss.credit = "within_episode" -> rollouts.group_size is 8, but loss.credit = 'within_episode'
rollouts.group_size = 1 -> rollouts.group_size is 1, but loss.credit = 'outcome' compares the rollouts
rollouts.kind = "branches"; rollouts.group_size = 1 -> set group_size to 2 or more
algorithm = "rloo" -> update.epochs is 4, but rloo has no ratio
rollouts.kind = "branches"; rollouts.environments = 3 -> rollouts.environments is set, but not used with branches
rollouts.kind = "branches"; environment.vectorization = "async" -> set it to 'auto' or 'sync'
algorithm = "ppo"; rollouts.kind = "fragments"; rollouts.group_size = 1 -> not used with fragments: remove it
algorithm = "ppo"; rollouts.kind = "fragments"; update.minibatches = 3 -> (1024) cannot be split evenly into
environment.action_repeat = 0 -> action_repeat must be at least 1
seed = 4294967296 -> seed must be at most 4294967295 (is 4294967296)
rollouts.gamma = 1.01 -> rollouts.gamma must be at most 1
policy.hidden = [] -> policy.hidden is empty
policy.hidden = [64, 0] -> policy.hidden must be at least 1
loss.adaptive_kl_target = 0.1 -> set loss.kl_coefficient above 0
update.epochs = 1; loss.kl_to = "behavior"; loss.kl_coefficient = 0.1 -> raise one of them
update.epochs = 1; loss.kl_cov_fraction = 0.1 -> its penalty is 0
loss.entropy_coefficient = 0.01; loss.entropy_target = 0.0 -> set one near 0
replay.groups = 4; loss.importance_level = "sequence" -> accepted
replay.groups = 4; algorithm = "ppo" -> replay.groups is set, but ppo does not compare within groups
replay.groups = 4; algorithm = "reinforce_pp" -> but reinforce_pp does not compare within groups
replay.max_age = 3 -> replay.max_age is set, but has no effect while replay.groups is 0
replay.groups = 4; loss.kl_coefficient = 0.1; loss.kl_estimator = "k1" -> the KL is in the reward
replay.groups = 4; loss.clip_cov_fraction = 0.01 -> compare decisions of one policy
replay.groups = 4; loss.kl_cov_fraction = 0.01 -> compare decisions of one policy
"""
LINES = [
    (base, line)
    for base, text in ((LANGUAGE, OF_LANGUAGE), (CONTROL, OF_CONTROL))
    for line in text.splitlines()
    if line
]


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text("abc\n")
    return str(path)


@pytest.mark.parametrize(("base", "line"), LINES, ids=[line for _, line in LINES])
def test_a_recipe_is_accepted_or_refused(
    base: str, line: str, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    for name, meant in {
        "FILE": FILE, "TOKEN": token, "MODEL": str(tmp_path), "THERE": "http://10.0.0.7:8801",
        "HERE": "http://127.0.0.1:8801",
    }.items():  # fmt: skip
        line = line.replace(name, meant)
    recipe, said = line.split(" -> ")
    tables = tomllib.loads(base)
    for name, value in _assignments(tomllib.loads(recipe.replace("; ", "\n"))):
        *path, leaf = name.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[leaf] = value
    if said == "accepted":
        validate(config_from_dict(tables))
        return
    with pytest.raises(ConfigError) as refused:
        validate(config_from_dict(tables))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


def _assignments(tables: dict[str, Any], where: str = "") -> list[tuple[str, Any]]:
    return [
        pair
        for name, value in tables.items()
        for pair in (_assignments(value, f"{where}{name}.") if isinstance(value, dict) else [(where + name, value)])
    ]


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "gspo", "reinforce_pp", "ppo"])
@pytest.mark.parametrize("controller", ["bonus", "clip"])
def test_all_that_keeps_the_entropy_up_may_be_combined(algorithm: str, controller: str) -> None:
    loss = {"clip_cov_fraction": 0.01, "kl_cov_fraction": 0.01, "entropy_bounds": (0.5, 2.0), "entropy_target": 0.5}
    loss |= {"entropy_controller": controller, "entropy_coefficient": 0.01}
    validate(
        config_from_dict({"algorithm": algorithm, "loss": loss, "update": {"epochs": 2}, **tomllib.loads(LANGUAGE)})
    )
    validate(config_from_dict({"loss": loss, **tomllib.loads(CONTROL)}))


@pytest.mark.parametrize(
    ("environment", "target", "fault"),
    [
        ("CartPole-v1", 0.7, "between 0 and 0.693 nats"),
        ("CartPole-v1", -0.1, "between 0"),
        ("CartPole-v1", 0.6, ""),
        ("Pendulum-v1", -0.5, ""),
    ],
)
def test_an_entropy_that_the_actions_cannot_have_is_refused(environment: str, target: float, fault: str) -> None:
    loss = ControlLossConfig(entropy_coefficient=0.01, entropy_target=target)
    config = ControlConfig(environment=EnvironmentConfig(id=environment), loss=loss)
    validate(config)
    if not fault:
        ControlBuilder(config).close()
        return
    with pytest.raises(ConfigError, match=fault):
        ControlBuilder(config)


def test_the_limit_of_a_rollout() -> None:
    config = RunConfig(conversation=ConversationConfig(environment=f"{FILE}:Guess"))
    assert config.rollout_limit == 512
    assert RunConfig().rollout_limit == 64
    assert replace(config, algorithm="dapo").overlong_tokens == round(512 / 5)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_token_that_others_may_read_is_refused(token: str, mode: int) -> None:
    Path(token).chmod(mode)
    sampler = SamplerConfig(kind="covey", servers=("http://127.0.0.1:8801",), token_file=token)
    with pytest.raises(ConfigError, match="run chmod 600"):
        validate(RunConfig(task=ArithmeticConfig(), sampler=sampler))


def test_the_command_refuses_a_recipe_without_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["arithmetic_grpo"], "arithmetic_grpo is not an iterative run: set iteration.steps"),
        (["cartpole_grpo"], "cartpole_grpo is not an iterative run"),
        ([], "name a recipe, such as: covey iterate my.toml"),
    ):
        assert main(["iterate", *words]) == 2
        assert said in capsys.readouterr().err


# ---- environments of other packages ----


def test_an_adapter_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = RunConfig(task=ArithmeticConfig(), conversation=ConversationConfig(environment="gymnasium"))
    validate(adapter)
    for package, installed in (("no_such_package", installed_environments()), ("gymnasium", {})):
        monkeypatch.setitem(ADAPTERS, "gymnasium", package)
        monkeypatch.setattr("covey.config.conversation.installed_environments", lambda found=installed: found)
        with pytest.raises(
            ConfigError, match=r'environment gymnasium needs a package: pip install "covey\[gymnasium\]"'
        ):
            validate(adapter)


def test_other_packages_have_environments_by_entry_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder that is not one of installed packages, such as the working folder, cannot claim a name."""
    for folder, name in (("site-packages", "cards"), ("work", "calculator_2")):
        made = tmp_path / folder / f"{name}-1.0.dist-info"
        made.mkdir(parents=True)
        (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: covey\n")
        (made / "entry_points.txt").write_text(f"[covey.environments]\n{name} = {name}_module:Game\n")
        (tmp_path / folder / f"{name}_module.py").touch()
        (made / "RECORD").write_text(f"{name}_module.py,,\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    entry_points_of.cache_clear()
    try:
        cards = RunConfig(task=ArithmeticConfig(), conversation=ConversationConfig(environment="cards"))
        validate(cards)
        assert cards.conversation.source == "cards_module:Game"
        assert named_code(cards) == [f"conversation.environment runs Game of {tmp_path}/site-packages/cards_module.py"]
        with pytest.raises(ConfigError, match=r"there is no environment 'calculator_2' .*, verifiers, cards, and"):
            validate(replace(cards, conversation=ConversationConfig(environment="calculator_2")))
    finally:
        entry_points_of.cache_clear()


# ---- adapters ----


def adapter(folder: Path, **fields: Any) -> LoRAConfig:
    whole = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], "bias": "none"}
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(whole | fields))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return LoRAConfig(adapter=str(folder))


def test_rank_alpha_and_targets_are_those_of_the_adapter(tmp_path: Path) -> None:
    lora = resolved(adapter(tmp_path / "one"))
    assert (lora.rank, lora.alpha, lora.targets) == (4, 8.0, ("q_proj", "v_proj"))
    assert resolved(adapter(tmp_path / "two", use_rslora=True)).alpha == 16.0, "alpha / sqrt(rank)"
    assert resolved(adapter(tmp_path / "three", target_modules="all-linear")).targets == ()


@pytest.mark.parametrize(
    ("fields", "rank", "said"),
    [
        ({"peft_type": "IA3"}, 0, "has peft_type = 'IA3', which covey does not compute"),
        ({"use_dora": True}, 0, "has use_dora = 'True', which covey does not compute"),
        ({"bias": "all"}, 0, "has bias = 'all'"),
        ({"rank_pattern": {"q_proj": 8}}, 0, "has rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, 0, "has modules_to_save"),
        ({"r": "4"}, 0, "must have a rank r, a number lora_alpha and a list target_modules"),
        ({"lora_alpha": True}, 0, "must have a rank r, a number lora_alpha and a list target_modules"),
        ({"target_modules": ".*proj"}, 0, "must have a rank r, a number lora_alpha and a list target_modules"),
        ({}, 8, "lora.rank is read from the file of lora.adapter: remove lora.rank"),
    ],
)
def test_other_adapters_are_refused(tmp_path: Path, fields: dict[str, Any], rank: int, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(RunConfig(task=ArithmeticConfig(), lora=replace(adapter(tmp_path, **fields), rank=rank)))
    assert said in str(refused.value)


# ---- what is built ----


@pytest.mark.parametrize(
    ("loss", "groups", "cap"),
    [
        (LossConfig(), 4, 2.0),
        (LossConfig(), 0, None),
        (LossConfig(importance_cap=5.0), 4, 5.0),
        (LossConfig(importance_mask=(0.5, 1.5)), 4, None),
    ],
)
def test_the_cap_of_the_importance_weights(loss: LossConfig, groups: int, cap: float | None) -> None:
    config = RunConfig(
        task=ArithmeticConfig(), rewards=(RewardConfig(name="numeric"),), loss=loss, replay=ReplayConfig(groups=groups)
    )
    assert importance_cap(loss, config.replay) == cap
    validate(config)
    importance = build_llm_algorithm(config, {}).importance
    assert (importance is None) == (cap is None and not loss.importance_mask)
    assert importance is None or importance.cap == (cap or math.inf)


def test_control_has_importance_weights_and_replay_as_language_models_have_them() -> None:
    importance = build_algorithm("grpo", ControlLossConfig(importance_cap=3.0)).importance
    assert importance is not None
    assert importance.cap == 3.0
    assert type(build_replay(ReplayConfig())) is Replay
    built = build_replay(ReplayConfig(groups=3, max_age=7, max_uses=2))
    assert isinstance(built, RecentGroups)
    assert (built.groups, built.max_age, built.max_uses) == (3, 7, 2)


def test_a_vllm_beside_a_run_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = RunConfig(sampler=SamplerConfig(kind="vllm"))
    asleep = RunConfig(sampler=SamplerConfig(kind="vllm", servers=("http://127.0.0.1:1",), sleep=True))
    for config in (beside, asleep):
        check_ranks(config)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for config in (beside, asleep):
        with pytest.raises(
            ConfigError, match="shares a GPU with the run is for one process, and torchrun has started 2"
        ):
            check_ranks(config)
    check_ranks(replace(asleep, sampler=replace(asleep.sampler, sleep=False)))


def test_the_name_of_the_sampler_is_short_for_its_table(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(f"{LANGUAGE}[sampler]\nvllm_python = {json.dumps(PYTHON)}\n")
    assert read_recipe(recipe, ["--sampler", "vllm"]).sampler == SamplerConfig(kind="vllm", vllm_python=PYTHON)


ARITHMETIC = '[task]\nname = "arithmetic"\n'


def config_classes() -> list[Any]:
    modules = [sys.modules[name] for name in sorted(sys.modules) if name.startswith(f"{config_package.__name__}.")]
    found = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    return sorted((kind for kind in found | {TrainerOptions} if is_dataclass(kind)), key=str)


def test_a_list_is_as_good_as_a_tuple_in_every_field_of_every_table() -> None:
    tried = 0
    for kind in config_classes():
        listed = [item.name for item in fields(kind) if isinstance(item.default, tuple) and "help" in item.metadata]
        assert not listed or issubclass(kind, Table), f"{kind.__name__} must be a Table, because it has {listed}"
        for name in listed:
            assert kind(**{name: ["a", "b"]}) == kind(**{name: ("a", "b")})
            assert hash(getattr(kind(**{name: ["a"]}), name))
            tried += 1
    assert tried > 30


def test_a_run_and_a_task_take_lists() -> None:
    validate(
        RunConfig(
            task=ArithmeticConfig(digits=[1, 2], operators=["+"]),  # type: ignore[arg-type]
            sampling=SamplingConfig(stop=["."]),  # type: ignore[arg-type]
            rewards=[RewardConfig(name="numeric"), RewardConfig(name="tags", tags=["a", "b"])],  # type: ignore[arg-type]
        )
    )
    assert Arithmetic(digits=[1]).draw(0, 1, 3) == Arithmetic(digits=(1,)).draw(0, 1, 3)
    with pytest.raises(ConfigError, match=r"sampling.stop must be a list of texts \(is \[1\]\)"):
        validate(RunConfig(task=ArithmeticConfig(), sampling=SamplingConfig(stop=[1])))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"sampling.group_size must be an integer"):
        validate(RunConfig(task=ArithmeticConfig(), sampling=SamplingConfig(group_size=[2])))  # type: ignore[arg-type]


DEEP = [
    "a = " + "[" * 4000,
    "a = " + "[" * 100 + "]" * 100,
    "a = " + "{b = " * 900 + "1" + "}" * 900,
    "a" + ".b" * 3000 + " = 1",
]


@pytest.mark.parametrize("option", DEEP, ids=range(len(DEEP)))
def test_options_that_are_nested_too_deeply_are_one_line(option: str) -> None:
    for changes in (
        {"conversation": ConversationConfig(environment="calculator", options=(option,))},
        {"chat": ChatConfig(template_options=(option,))},
        {"task": ReasoningGymConfig(options=(option,))},
    ):
        with pytest.raises(ConfigError, match=r"options has .*nested too deeply") as caught:
            validate(RunConfig(**{"task": ArithmeticConfig(), **changes}))
        assert len(str(caught.value)) < 400


@pytest.mark.slow
def test_more_tokens_than_the_model_has_positions_are_refused_before_it_is_loaded(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model")
    (model / "model.safetensors").unlink()
    few = {"steps": 1, "model": str(model), "task": ArithmeticConfig(digits=(1,))}
    with pytest.raises(ConfigError, match=r"a limit of 256 new tokens leaves no room .* 256 positions: lower max_new"):
        LLMBuilder(RunConfig(**few, sampling=SamplingConfig(max_new_tokens=256)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"a prompt of \d+ tokens and max_new_tokens = 250 exceed"):
        LLMBuilder(RunConfig(**few, sampling=SamplingConfig(max_new_tokens=250)))  # type: ignore[arg-type]
    LLMBuilder(RunConfig(**few)).close()  # type: ignore[arg-type]
    conversation = ConversationConfig(environment=f"{guessing.__file__}:Guess", total_tokens=300)
    with pytest.raises(ConfigError, match=r"a limit of 300 new tokens .*: lower conversation.total_tokens"):
        LLMBuilder(RunConfig(**few, conversation=conversation))  # type: ignore[arg-type]
