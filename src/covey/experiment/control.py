"""Builds the components of a run on an environment from its config, and evaluates its agent."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from covey.algorithms import Algorithm
from covey.algorithms.advantages import (
    CreditAssignment,
    outcome,
    reward_to_go,
    reward_to_go_by_step,
    within_episode,
)
from covey.config import ConfigError, ControlConfig, EnvironmentConfig
from covey.config.common import NOT_BY_GROUP, importance_cap
from covey.config.fields import command, plural
from covey.config.files import faults_of, user_path
from covey.config.model_sources import CONFIG_FILE, MODEL_FOLDER
from covey.config.recipe import config_from_dict, read_tables
from covey.control.envs.render import can_draw, render_episode
from covey.control.envs.spaces import Continuous
from covey.control.envs.vector_env import Environments, check_environment, longest_episode, make_environments
from covey.control.mlp import RunningMeanStd
from covey.control.pictures import CONVOLUTIONS, MLP
from covey.control.policy import ControlCritic, ControlPolicy, load_policy
from covey.control.rollout_buffer import collect_episodes, refuse_failures
from covey.control.sampler import (
    BranchSampler,
    ClipReward,
    ControlSampler,
    EnvironmentReward,
    EpisodeSampler,
    FragmentSampler,
    ResetSeeds,
    RewardScale,
    RunningStdScaling,
    refuse_uncopyable,
    reset_seeds,
)
from covey.experiment.algorithm import build_algorithm, build_kl_coefficient, build_learners, build_pace, check_own
from covey.experiment.job import Evaluation, Experiment, ExperimentBuilder, build_checkpoints
from covey.runtime.device import environment, set_threads
from covey.runtime.distributed import WHOLE
from covey.runtime.rng import EVALUATING
from covey.tracking.console import Display
from covey.tracking.run_folder import FolderLock
from covey.tracking.run_store import RunStore
from covey.tracking.wording import RETURN
from covey.train.collect import fixed_size
from covey.train.prepare import NO_REFERENCE
from covey.train.replay import build_replay
from covey.train.state import Components, LoopConfig

EVALUATED_AT_ONCE = 100  # maximal number of copies of the environment in an evaluation
PICTURE = "agent.gif"
UNEVEN = 20.0  # ratio of a range of actions to the standard deviation of the policy, or its inverse

CREDITS: dict[str, Callable[[float], CreditAssignment]] = {  # loss.credit -> discount -> credit
    "outcome": lambda gamma: outcome,  # the sampler discounts the return
    "reward_to_go": lambda gamma: partial(reward_to_go, gamma=gamma),
    "reward_to_go_by_step": lambda gamma: partial(reward_to_go_by_step, gamma=gamma),
    "within_episode": lambda gamma: partial(within_episode, gamma=gamma),
}
REWARD_SCALES: dict[str, Callable[[float], RewardScale]] = {  # rollouts.reward_scaling -> discount -> scale
    "none": lambda gamma: RewardScale(),
    "clip": lambda gamma: ClipReward(),
    "running_std": RunningStdScaling,
}


class ControlBuilder(ExperimentBuilder):
    """Builder of a run on a Gymnasium environment."""

    name = "control"
    score_kind = "return"
    config: ControlConfig

    def __init__(self, config: ControlConfig, algorithm: Algorithm | None = None) -> None:
        """Create the environments and the algorithm before the run starts.

        Raises:
            ConfigError: if the environment cannot be created, or does not support the kind of rollouts or the
                algorithm, or the user's own `algorithm` does not work.
        """
        set_threads(config.threads)
        self.config = config
        kind = ROLLOUT_KINDS[config.rollouts.kind]
        self.found = check_environment(config.environment)  # for the user, before the run
        self.longest_rollout = kind.longest(config)
        if config.algorithm == "dr_grpo" and self.longest_rollout is None:
            raise ConfigError(
                f"dr_grpo divides by the time limit of an episode, and {config.environment.id!r} has none: set "
                "environment.max_episode_steps"
            )
        self.algorithm = check_own(algorithm, config) if algorithm is not None else self._preset()
        self.rollouts = kind(config)
        self.environments = self.rollouts.environments
        notes = _picture_note(config, self.environments), _range_note(config, self.environments)
        self.found += tuple(note for note in notes if note)
        self._evaluation: Environments | None = None
        if config.loss.kl_estimator == "exact" and isinstance(self.environments.actions, Continuous):
            raise ConfigError(
                "loss.kl_estimator = 'exact' sums over all actions, and here they are continuous: use 'k3'"
            )
        target, (low, high) = config.loss.entropy_target, self.environments.actions.entropy_range
        if target is not None and not low < target < high:
            raise ConfigError(
                f"loss.entropy_target is {target:g}, but the entropy of a policy with these actions is between "
                f"{low:.3g} and {high:.3g} nats: set it between them"
            )

    def describe(self) -> str:
        config = self.config
        credit = "" if config.algorithm in NOT_BY_GROUP else f" ({config.loss.credit})"
        steps = f"{plural(config.steps, 'step')} of {self.rollouts.describe()}"
        masks = ", with action masks" if self.environments.masked else ""
        return f"{self.algorithm.name} on {config.environment.id}, {steps}{credit}{masks}"

    def _preset(self) -> Algorithm:
        """The algorithm of the config."""
        config, gamma = self.config, self.config.discount
        return build_algorithm(
            config.algorithm,
            replace(config.loss, importance_cap=importance_cap(config.loss, config.replay)),
            max_length=self.longest_rollout,
            gamma=gamma,
            credit=CREDITS[config.loss.credit](gamma),
        )

    def build(self, store: RunStore, display: Display) -> Experiment:
        config, algorithm, pace = self.config, self.algorithm, build_pace(self.config)
        policy = build_policy(config, self.environments)
        sampler = self.rollouts.sampler(policy, REWARD_SCALES[config.rollouts.reward_scaling](config.discount))
        critics = (build_critic(config, policy),) if algorithm.needs_critic else ()
        needs_reference = algorithm.kl.acts_within(config.steps) and algorithm.kl.placement.needs_reference
        kl_coefficient = build_kl_coefficient(algorithm.kl, config.loss)
        evaluation = EpisodeEvaluation(config, policy, self._evaluation_environments(), display)
        parts = Components(
            task=ResetSeeds(),
            sampler=sampler,
            grader=EnvironmentReward(),
            policy=policy,
            reference=copy.deepcopy(policy) if needs_reference else NO_REFERENCE,
            algorithm=algorithm,
            learners=build_learners(
                config,
                algorithm,
                policy,
                kl_coefficient,
                [(trained.module, WHOLE) for trained in (policy, *critics)],
                critics,
                single_decisions=not config.policy.memory,  # with a memory, minibatches are of whole sequences
                pace=pace,
            ),
            kl_coefficient=kl_coefficient,
            replay=build_replay(config.replay),
            observers=(store, display),
            checkpoints=build_checkpoints(store, config.checkpoint.keep, best=config.checkpoint.best),
            evaluate=lambda step: sampler.metrics() | evaluation.due(step),
            critics=critics,
        )
        settings = LoopConfig(
            steps=config.steps,
            seed=config.seed,
            starts_per_step=self.rollouts.starts_per_step,
            group_size=fixed_size(self.rollouts.group_size),
            checkpoint_every=config.checkpoint.every,
            patience=config.evaluation.patience or math.inf,
            keep_best=config.checkpoint.best,
            pace=pace,
        )
        return Experiment(
            parts,
            settings,
            evaluation.measure,
            lambda: lambda run_dir: policy.save(run_dir / MODEL_FOLDER),
            _machine(),
            lambda: self._facts(sampler),
        )

    def drawable(self) -> bool:
        return can_draw(self.config.environment)

    def close(self) -> None:
        self.rollouts.close()
        if self._evaluation is not None:
            self._evaluation.close()

    def _evaluation_environments(self) -> Environments:
        count = min(self.config.evaluation.episodes, EVALUATED_AT_ONCE)
        self._evaluation = make_environments(evaluation_environment(self.config), count)
        return self._evaluation

    def _facts(self, sampler: ControlSampler) -> dict[str, Any]:
        return {
            "environment": self.config.environment.id,
            "environment_steps": sampler.environment_steps,
            "episodes": sampler.episodes,
            "expected_return": self.config.evaluation.expected_return,
        }


class EpisodeEvaluation:
    """Evaluation of a policy: the mean return of greedy episodes."""

    def __init__(
        self, config: ControlConfig, policy: ControlPolicy, environments: Environments, display: Display
    ) -> None:
        self.config, self.policy, self.environments, self.display = config.evaluation, policy, environments, display
        self.seeds = [start.prompt for start in ResetSeeds().held_out(config.evaluation.episodes)]

    def measure(self, label: str) -> list[Evaluation]:
        """Mean return, its 95 % interval and the duration of the evaluation in seconds, as one result."""
        began = time.perf_counter()
        with self.display.progress(f"evaluation {label}", len(self.seeds)) as advance:
            returns = episode_returns(self.policy, self.environments, self.seeds)
            advance(len(self.seeds))
        return [{**RETURN.estimate(returns), "seconds": time.perf_counter() - began}]

    def due(self, step: int) -> dict[str, float]:
        """The metric `eval/score` if an evaluation is due after this step; otherwise empty."""
        if not self.config.every or step % self.config.every:
            return {}
        returns = episode_returns(self.policy, self.environments, self.seeds)
        return {"eval/score": sum(returns) / len(returns)}


def episode_returns(policy: ControlPolicy, environments: Environments, seeds: list[int]) -> list[float]:
    """Undiscounted returns of greedy episodes, one from each reset seed whose environment did not fail."""
    trajectories, buffer = collect_episodes(policy.remembering(environments), policy, seeds, None)
    refuse_failures(trajectories)
    return [float(buffer.rewards(trajectory).sum()) for trajectory in trajectories if not trajectory.failed]


def choose_network(config: ControlConfig, environments: Environments) -> str:
    """The network of a run's policy and critic: "mlp", or the name of its convolutions.

    Raises:
        ConfigError: if `policy.network` needs a picture, or a larger one, or excludes `policy.normalise_observations`.
    """
    wanted, name = config.policy.network, config.environment.id
    if config.policy.memory:
        if wanted in CONVOLUTIONS:
            raise ConfigError(
                f"policy.memory excludes convolutions: set it to 0, or policy.network = 'mlp' ({wanted!r} now)"
            )
        return MLP
    if environments.picture is None:
        if wanted in CONVOLUTIONS:
            raise ConfigError(
                f"policy.network = {wanted!r} is for pictures (a Box of uint8 or bool with 2 to 4 dimensions), and "
                f"environment {name!r} observes none: set it to 'mlp'"
            )
        return MLP
    chosen = environments.picture.choose(wanted, name)
    if chosen != MLP and config.policy.normalise_observations:
        raise ConfigError(
            f"policy.normalise_observations: {chosen} scales the pictures of environment {name!r} by a constant: "
            "set it to false, or policy.network = 'mlp'"
        )
    return chosen


def _picture_note(config: ControlConfig, environments: Environments) -> str:
    """A warning about pictures that no convolution reads; or empty."""
    if choose_network(config, environments) != MLP or environments.picture is None:
        return ""
    size = " x ".join(map(str, environments.picture.shape))
    return (
        f"environment {config.environment.id!r} observes pictures ({size}): they are flattened to "
        f"{environments.observation_size:,} numbers for a network without convolutions, which learns little from them: "
        "set policy.network = 'auto', or policy.normalise_observations = true"
    )


def _range_note(config: ControlConfig, environments: Environments) -> str:
    """A warning about actions that the untrained policy, a normal distribution around 0, hardly explores; or empty."""
    actions, std = environments.actions, config.policy.initial_std
    if not isinstance(actions, Continuous):
        return ""
    for low, high in zip(actions.low_A.tolist(), actions.high_A.tolist(), strict=True):
        half, center = (high - low) / 2, (high + low) / 2
        if math.isfinite(half) and not (std / UNEVEN <= half <= UNEVEN * std and abs(center) <= half + std):
            return (
                f"environment {config.environment.id!r} takes actions from {low:g} to {high:g}, and the untrained "
                f"policy draws them around 0 with a standard deviation of {std:g} (policy.initial_std): register it "
                "in gymnasium.wrappers.RescaleAction(env, -1.0, 1.0)"
            )
    return ""


def _machine() -> dict[str, Any]:
    here = environment(torch.device("cpu"), torch.float32)
    return here | {"gymnasium": version("gymnasium"), "numpy": version("numpy")}


def build_policy(config: ControlConfig, environments: Environments) -> ControlPolicy:
    """The untrained policy of a run."""
    size = environments.observation_size
    return ControlPolicy(
        size,
        environments.actions,
        masked=environments.masked,
        picture=environments.picture,
        network=choose_network(config, environments),
        memory=config.policy.memory,
        hidden=config.policy.hidden,
        activation=config.policy.activation,
        initial_std=config.policy.initial_std,
        normaliser=RunningMeanStd(size) if config.policy.normalise_observations else None,
        seed=config.seed,
    )


def build_critic(config: ControlConfig, policy: ControlPolicy) -> ControlCritic:
    """The untrained critic of a policy."""
    return ControlCritic(
        policy.observation_size,
        picture=policy.picture,
        network=policy.network,
        memory=policy.memory,
        hidden=config.policy.hidden,
        activation=config.policy.activation,
        normaliser=policy.normaliser,
        seed=config.seed,
    )


def evaluation_environment(config: ControlConfig) -> EnvironmentConfig:
    """Config of the environment for evaluation, whose copies share a process."""
    own = config.environment.vectorization == "async"
    return replace(config.environment, vectorization="auto") if own else config.environment


def evaluate_run(
    run_dir: str | Path, *, episodes: int | None = None, render: bool = False, seed: int | None = None
) -> Evaluation:
    """Evaluate the policy of a finished run in greedy episodes.

    Args:
        run_dir: the run folder.
        episodes: number of episodes; None: that of the run's own evaluations.
        render: also write an animation of one episode into the run folder.
        seed: of the reset seeds; None: the reset seeds on which every run is evaluated.

    Returns:
        {"score", "low", "high", "count", "returns", "drawable"}. "drawable" is True if the environment can be rendered
        here. With `render`, also "picture", the path of the animation.

    Raises:
        ConfigError: if the run is not finished, if its environment cannot be created, or, with `render`, if another
            process writes into its folder.
    """
    run_dir = user_path(run_dir)
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"there is no run in {run_dir}")
    config = config_from_dict(read_tables(run_dir / CONFIG_FILE))
    if not isinstance(config, ControlConfig):
        raise ConfigError(f"{run_dir} is not a run on an environment")
    if not (run_dir / MODEL_FOLDER).is_dir():
        raise ConfigError(
            f"the run in {run_dir} has not saved its policy yet: finish it with {command('train', '--resume', run_dir)}"
        )
    set_threads(config.threads)
    policy = load_policy(run_dir / MODEL_FOLDER)
    episodes = config.evaluation.episodes if episodes is None else episodes
    if seed is None:
        seeds = [start.prompt for start in ResetSeeds().held_out(episodes)]
    else:
        seeds = reset_seeds(seed, 0, list(range(episodes)), 0, stream=EVALUATING)
    environment_config = evaluation_environment(config)
    environments = make_environments(environment_config, min(episodes, EVALUATED_AT_ONCE))
    try:
        returns = episode_returns(policy, environments, seeds)
    finally:
        environments.close()
    drawable = render or can_draw(environment_config)
    result: Evaluation = {**RETURN.estimate(returns), "returns": returns, "drawable": drawable}
    if render:
        path = run_dir / PICTURE
        with FolderLock(run_dir), faults_of(path):
            render_episode(environment_config, policy.greedy_action, seeds[0], path, policy.remembering)
        result["picture"] = str(path)
    return result


class EpisodeRollouts:
    """Whole episodes from each start; base class of the other kinds.

    Args:
        config: of the run.

    Raises:
        ConfigError: if the environments cannot be made.
    """

    def __init__(self, config: ControlConfig) -> None:
        self.config = config
        branches = config.rollouts.kind == "branches"
        self.environments = make_environments(config.environment, config.rollouts.copies, copies_states=branches)

    @staticmethod
    def longest(config: ControlConfig) -> int | None:
        """Largest number of decisions in a rollout; None if there is no limit."""
        return longest_episode(config.environment)

    @property
    def starts_per_step(self) -> int:
        return self.config.rollouts.starts_per_step

    @property
    def group_size(self) -> int:
        return self.config.rollouts.group_size

    def describe(self) -> str:
        """The rollouts of a step, such as "4 starts x 8 episodes"."""
        return f"{plural(self.starts_per_step, 'start')} x {plural(self.group_size, 'episode')}"

    def sampler(self, policy: ControlPolicy, reward_scale: RewardScale) -> ControlSampler:
        """The sampler of the run."""
        config = self.config
        return EpisodeSampler(policy, self.environments, config.seed, reward_scale, config.discount)

    def close(self) -> None:
        """End the processes of the environments."""
        self.environments.close()


class BranchRollouts(EpisodeRollouts):
    """Rollouts that branch from one state of an episode; the episodes have their own environments.

    Raises:
        ConfigError: if the state of the environment cannot be copied.
    """

    def __init__(self, config: ControlConfig) -> None:
        super().__init__(config)
        self.trunks = make_environments(config.environment, config.rollouts.starts_per_step, copies_states=True)
        refuse_uncopyable(self.trunks)

    @staticmethod
    def longest(config: ControlConfig) -> int | None:
        return config.branch_decisions

    def describe(self) -> str:
        return f"{plural(self.starts_per_step, 'start')} x {self.group_size:,} branches"

    def sampler(self, policy: ControlPolicy, reward_scale: RewardScale) -> ControlSampler:
        config = self.config
        return BranchSampler(
            policy,
            self.environments,
            config.seed,
            reward_scale,
            config.discount,
            trunks=self.trunks,
            horizon=config.rollouts.horizon,
            decisions=config.branch_decisions,
        )

    def close(self) -> None:
        super().close()
        self.trunks.close()


class FragmentRollouts(EpisodeRollouts):
    """Fragments of a fixed number of steps; each copy of the environment is one start with one rollout."""

    @property
    def starts_per_step(self) -> int:
        return self.environments.count

    @property
    def group_size(self) -> int:
        return 1

    def describe(self) -> str:
        steps = self.config.rollouts.fragment_steps
        return f"{plural(self.environments.count, 'environment')} x {plural(steps, 'step')}"

    def sampler(self, policy: ControlPolicy, reward_scale: RewardScale) -> ControlSampler:
        config = self.config
        return FragmentSampler(
            policy,
            self.environments,
            config.seed,
            reward_scale,
            config.discount,
            steps=config.rollouts.fragment_steps,
        )


ROLLOUT_KINDS: dict[str, type[EpisodeRollouts]] = {
    "episodes": EpisodeRollouts,
    "branches": BranchRollouts,
    "fragments": FragmentRollouts,
}
