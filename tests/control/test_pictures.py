"""Pictures: convolutions by torch's own layers, stacked frames as Gymnasium's, and what is refused."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.nn import functional

from covey.config import ConfigError, EnvironmentConfig
from covey.control.envs.spaces import Discrete
from covey.control.envs.vector_env import make_environments
from covey.control.pictures import CONVOLUTIONS, Picture
from covey.control.policy import ControlCritic, ControlPolicy, load_policy
from covey.data import EndReason, Group, Rollout, Start, collate
from covey.experiment.control import ControlBuilder
from helpers import toy_envs


@pytest.mark.parametrize(
    ("shape", "planes"),
    [
        ((5, 7), (1, 5, 7)),
        ((5, 7, 3), (3, 5, 7)),
        ((3, 5, 7), (3, 5, 7)),
        ((4, 5, 7, 3), (12, 5, 7)),
        ((4, 3, 5, 7), (12, 5, 7)),
        ((5, 5, 8), (8, 5, 5)),
        ((8, 5, 5), (8, 5, 5)),
    ],
)
def test_channels_are_found_and_bytes_become_fractions(shape: Any, planes: Any) -> None:
    picture = Picture.of(spaces.Box(0, 255, shape, np.uint8))
    assert picture is not None
    array = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
    found = picture.planes(torch.from_numpy(array.reshape(1, -1)))
    assert found.shape == (1, *planes)
    whole = array.reshape(shape if len(shape) > 2 else (*shape, 1))
    if whole.shape[-3:-1] == planes[1:]:
        whole = np.moveaxis(whole, -1, -3)
    np.testing.assert_allclose(found[0], whole.reshape(planes) / 255, rtol=1e-6)


SHAPES = {"nature_cnn": (36, 40, 2), "small_cnn": (6, 5, 2)}


def make_policy(name: str, masked: bool = False) -> ControlPolicy:
    picture = Picture(SHAPES[name], 1 / 255)
    size = int(np.prod(picture.shape))
    policy = ControlPolicy(
        size, Discrete(3), masked=masked, picture=picture, network=name, hidden=(8,), activation="relu",
        normaliser=None, seed=1,
    )  # fmt: skip
    with torch.no_grad():  # so that actions differ from row to row
        policy.module.network.linears[-1].weight.mul_(100)
    return policy


def by_hand(policy: ControlPolicy, rows: Any) -> torch.Tensor:
    """The network's outputs by torch's own functions, in float64."""
    height, width, channels = policy.picture.shape
    x = torch.from_numpy(rows[:, : policy.observation_size]).double().reshape(len(rows), height, width, channels) / 255
    x = x.permute(0, 3, 1, 2)
    layers = [layer for layer in policy.module.network.convolutions if isinstance(layer, torch.nn.Conv2d)]
    for layer, (_, _, stride) in zip(layers, CONVOLUTIONS[policy.network], strict=True):
        x = torch.relu(functional.conv2d(x, layer.weight.double(), layer.bias.double(), stride))
    first, head = policy.module.network.linears
    x = torch.relu(functional.linear(x.flatten(1), first.weight.double(), first.bias.double()))
    return functional.linear(x, head.weight.double(), head.bias.double())


def rolled_out(policy: ControlPolicy, lengths: tuple[int, ...] = (3, 1, 4)) -> Any:
    random = np.random.default_rng(0)
    rollouts = []
    for length in lengths:
        context = random.integers(256, size=(length + 1, policy.observation_size), dtype=np.uint8)
        if policy.masked:
            context = np.concatenate([context, np.tile(np.uint8([1, 0, 1]), (length + 1, 1))], axis=1)
        actions, logprobs = policy.act(context[:-1], random.random(length))
        rollouts.append(Rollout(context, actions, logprobs, EndReason.TRUNCATED, reward=0.0))
    return collate([Group(Start(0, 0), rollouts)])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_acting_learning_and_gradients_are_those_of_torchs_own_layers(name: str, masked: bool) -> None:
    policy = make_policy(name, masked)
    batch = rolled_out(policy)
    mask = batch.mask_BT
    found = policy.evaluate(batch).logprobs_BT
    torch.testing.assert_close(found, batch.behavior_logprobs_BT, rtol=1e-4, atol=1e-5)
    output = by_hand(policy, np.concatenate([row[:-1] for row in batch.context]))
    if masked:
        output[:, 1] = -1e8
    wanted = output.log_softmax(1).gather(1, batch.actions_BT[mask][:, None])[:, 0]
    torch.testing.assert_close(found[mask].double(), wanted, rtol=1e-4, atol=1e-5)
    assert found[mask].std() > 1e-3
    parameters = list(policy.module.parameters())
    ours, theirs = (torch.autograd.grad(total.sum(), parameters) for total in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        assert one.abs().sum() > 0


def test_rows_in_several_microbatches_and_a_saved_policy_are_the_same(tmp_path: Any, monkeypatch: Any) -> None:
    policy = make_policy("small_cnn")
    batch = rolled_out(policy)
    monkeypatch.setattr("covey.control.policy.MOST_PICTURES", 8)
    parts = list(policy.microbatches(batch))
    assert [part.tolist() for part in parts] == [[0, 1], [2]]
    whole = policy.evaluate(batch).logprobs_BT
    for part in parts:
        again = policy.evaluate(batch.select(part)).logprobs_BT
        torch.testing.assert_close(again, whole[part][:, : again.shape[1]])
    policy.save(tmp_path)
    loaded, rows = load_policy(tmp_path), batch.context[0]
    np.testing.assert_array_equal(loaded.act(rows, np.full(4, 0.5))[1], policy.act(rows, np.full(4, 0.5))[1])
    critic = ControlCritic(
        policy.observation_size, picture=policy.picture, network="small_cnn", normaliser=None, seed=1
    )
    values, after = critic.values(batch), critic.bootstrap_values(batch)
    every = critic.values_of(batch.context[2])
    np.testing.assert_allclose(values[2].detach(), every[:-1], rtol=1e-4, atol=1e-6)
    assert after[2].item() == pytest.approx(every[-1], rel=1e-4)


@pytest.mark.parametrize("name", ["CartPole-v1", toy_envs.CATCH])
def test_stacked_frames_are_those_of_gymnasiums_wrapper(name: str) -> None:
    environments = make_environments(EnvironmentConfig(name, frame_stack=3, action_masks=False), 2)
    rows = environments.reset([3, 4])
    for slot, seed in enumerate((3, 4)):
        theirs = gym.wrappers.FrameStackObservation(gym.make(name), 3)
        np.testing.assert_array_equal(rows[slot], theirs.reset(seed=seed)[0].reshape(-1))
        if slot == 0:
            first = theirs
    actions = environments.random_actions(0)
    step = environments.step(actions)
    np.testing.assert_array_equal(step.observation_ND[0], first.step(actions[0])[0].reshape(-1))
    assert step.observation_ND.dtype == (np.uint8 if name == toy_envs.CATCH else np.float32)
    environments.close()


REFUSED = {
    "no picture": ({"environment": {"id": "CartPole-v1"}, "policy": {"network": "nature_cnn"}}, "observes none"),
    "too small": (
        {"environment": {"id": toy_envs.CATCH}, "policy": {"network": "nature_cnn"}},
        "observes pictures of 6 x 5, and policy.network = 'nature_cnn' needs 36 x 36: set it to 'small_cnn'",
    ),
    "normalised": (
        {"environment": {"id": toy_envs.CATCH}, "policy": {"normalise_observations": True}},
        "policy.normalise_observations: small_cnn scales the pictures",
    ),
    "mask in a stack": (
        {"environment": {"id": toy_envs.DOORS.format("observation"), "frame_stack": 2}},
        "has its action mask in the observation, which would be stacked too",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_picture_cannot_have_is_one_line(what: str) -> None:
    tables, said = REFUSED[what]
    with pytest.raises(ConfigError) as caught:
        ControlBuilder(toy_envs.read(tables)).close()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_picture_for_an_mlp_is_noted() -> None:
    builder = ControlBuilder(toy_envs.read({"environment": {"id": toy_envs.CATCH}, "policy": {"network": "mlp"}}))
    builder.close()
    assert any("set policy.network = 'auto'" in note for note in builder.found)


LEARNS: dict[str, dict[str, Any]] = {
    "grpo": {
        "algorithm": "grpo",
        "steps": 12,
        "rollouts": {"starts_per_step": 8, "group_size": 8},
        "loss": {"credit": "outcome"},
    },
    "ppo": {
        "algorithm": "ppo",
        "steps": 12,
        "rollouts": {"kind": "fragments", "environments": 16, "fragment_steps": 20},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEARNS)
def test_the_ball_is_caught_from_pixels(kind: str, tmp_path: Any) -> None:
    """A paddle that stays where it is catches a third of the balls."""
    tables = LEARNS[kind] | {"environment": {"id": toy_envs.CATCH}, "update": {"learning_rate": 0.005}, "seed": 1}
    parts = toy_envs.train_quietly(toy_envs.read(tables), tmp_path / "run")
    assert parts.policy.network == "small_cnn"
    assert toy_envs.mean_return(parts.policy, toy_envs.CATCH, 60) > 0.9
