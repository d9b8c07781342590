"""Actor and critic: acting and learning agree, both are the stated distributions, only decisions count."""

import copy
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import nn

from covey.config import ConfigError
from covey.control.envs.spaces import Continuous, Discrete
from covey.control.mlp import RunningMeanStd, _MLPFunction
from covey.control.policy import ControlCritic, ControlPolicy, load_policy
from covey.data import Batch, EndReason, Group, Rollout, Start, collate

D = 5
SPACES = {
    "two": Discrete(2),
    "one": Discrete(1),
    "four": Discrete(4),
    "gaussian": Continuous(-np.ones(1, "f"), np.ones(1, "f")),
    "gaussians": Continuous(-np.ones(3, "f"), np.ones(3, "f")),
}
LENGTHS = (7, 3, 1, 5)


def source(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def moments() -> RunningMeanStd:
    made = RunningMeanStd(D)
    made.update(source(9).standard_normal((100, D)).astype("f") * 3 + 1)
    return made


def scramble(module: nn.Module, seed: int = 0) -> None:
    """Weights and biases under which the outputs differ from row to row by several units."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            wide = 0.8 if parameter.dim() == 2 else 0.3
            parameter.copy_(wide * torch.randn(parameter.shape, generator=generator))


def make(space: str, *, normaliser: RunningMeanStd | None = None, activation: str = "tanh", **options) -> ControlPolicy:
    policy = ControlPolicy(
        D, SPACES[space], hidden=(16, 12), activation=activation, normaliser=normaliser, seed=1, **options
    )
    scramble(policy.module)
    return policy


def rolled_out(policy: ControlPolicy, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Batch:
    """Rollouts that the policy itself sampled, over random observations."""
    random = source(seed)
    rollouts = []
    for length in lengths:
        context = random.standard_normal((length + 1, D)).astype("f")
        width = policy.actions.size if isinstance(policy.actions, Continuous) else 1
        actions, logprobs = policy.act(context[:-1], random.random((length, width)))
        rollouts.append(Rollout(context, actions, logprobs, EndReason.TERMINATED, reward=0.0))
    return collate([Group(Start(0, 0), rollouts)])


def outputs(policy: ControlPolicy, batch: Batch) -> torch.Tensor:
    """The network's outputs by torch's own layers, at every decided column in turn."""
    observation = torch.cat([torch.from_numpy(row) for row in batch.context])
    place = []
    begin = 0
    for row, context in enumerate(batch.context):
        place += [begin + t for t in range(len(context) - 1) if batch.mask_BT[row, t]]
        begin += len(context)
    x = observation[place]
    if policy.normaliser is not None:
        mean, var = torch.from_numpy(policy.normaliser.mean_D), torch.from_numpy(policy.normaliser.var_D)
        x = ((x.double() - mean) / (var + 1e-8).sqrt()).clamp(-10, 10).float()
    network = policy.module.network
    for layer in network.layers[:-1]:
        x = nn.functional.linear(x, layer.weight, layer.bias)
        x = torch.tanh(x) if network.activation == "tanh" else torch.relu(x)
    return nn.functional.linear(x, network.layers[-1].weight, network.layers[-1].bias)


def distribution(policy: ControlPolicy, output: torch.Tensor) -> torch.distributions.Distribution:
    if isinstance(policy.actions, Discrete):
        return torch.distributions.Categorical(logits=output)
    normal = torch.distributions.Normal(output, policy.module.log_std_A.exp())
    return torch.distributions.Independent(normal, 1)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("normalised", [False, True])
def test_acting_and_learning_give_the_same_logprobs(space, activation, normalised):
    policy = make(space, activation=activation, normaliser=moments() if normalised else None)
    batch = rolled_out(policy)
    found = policy.evaluate(batch).logprobs_BT
    torch.testing.assert_close(found, batch.behavior_logprobs_BT, rtol=1e-6, atol=2e-6)
    assert batch.behavior_logprobs_BT.dtype == torch.float32
    assert space == "one" or found[batch.mask_BT].std() > 0.1, "equal log-probabilities would prove little"


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("normalised", [False, True])
def test_evaluation_is_that_of_the_distribution(space, normalised):
    policy = make(space, normaliser=moments() if normalised else None)
    batch = rolled_out(policy)
    evaluation = policy.evaluate(batch)
    mask = batch.mask_BT
    expected = distribution(policy, outputs(policy, batch))
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(evaluation.logprobs_BT[mask], expected.log_prob(batch.actions_BT[mask]), **close)
    torch.testing.assert_close(evaluation.entropy_BT[mask], expected.entropy(), **close)
    if isinstance(policy.actions, Discrete):
        torch.testing.assert_close(evaluation.all_logprobs_BTV[mask], expected.logits, **close)
        torch.testing.assert_close(evaluation.all_logprobs_BTV[mask].exp().sum(-1), torch.ones(mask.sum()))
    else:
        assert evaluation.all_logprobs_BTV is None


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_gradients_are_those_of_torchs_own_layers(space, activation):
    policy = make(space, activation=activation)
    batch = rolled_out(policy)
    weight = torch.randn(batch.mask_BT.shape, generator=torch.Generator().manual_seed(0))
    evaluation = policy.evaluate(batch)
    loss = (weight * (evaluation.logprobs_BT + 0.5 * evaluation.entropy_BT)).sum()
    if evaluation.all_logprobs_BTV is not None:
        loss = loss + (weight * evaluation.all_logprobs_BTV[..., 0]).sum()
    loss.backward()
    expected = distribution(policy, outputs(policy, batch))
    mask = batch.mask_BT
    again = (weight[mask] * (expected.log_prob(batch.actions_BT[mask]) + 0.5 * expected.entropy())).sum()
    if evaluation.all_logprobs_BTV is not None:
        again = again + (weight[mask] * expected.logits[:, 0]).sum()
    wanted = torch.autograd.grad(again, list(policy.module.parameters()))
    assert sum(float(gradient.abs().sum()) for gradient in wanted) > 0 or space == "one"
    for parameter, gradient in zip(policy.module.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("widths", [(3, 2), (3, 4, 1), (3, 5, 4, 2)])
def test_the_backward_pass_is_the_slope_of_the_forward_pass(activation, widths):
    generator = torch.Generator().manual_seed(0)
    shapes = [shape for before, after in pairwise(widths) for shape in ((after, before), (after,))]
    x, *parameters = (torch.randn(s, dtype=torch.float64, generator=generator) for s in [(6, widths[0]), *shapes])
    for parameter in parameters:
        parameter.requires_grad_()
    assert torch.autograd.gradcheck(lambda *p: _MLPFunction.apply(x, activation, *p), parameters)


@pytest.mark.parametrize("space", ["two", "four"])
def test_actions_come_as_often_as_they_are_likely(space):
    policy = make(space)
    count = 20_000
    for observation in source(3).standard_normal((5, D)).astype("f"):
        batch = rolled_out(policy, (1,))
        batch.context = (np.stack([observation, observation]),)
        probability = policy.evaluate(batch).all_logprobs_BTV[0, 0].exp().detach().numpy()
        uniform = source(4).permutation((np.arange(count) + 0.5) / count)
        actions, _ = policy.act(np.tile(observation, (count, 1)), uniform)
        assert actions.dtype == np.int64
        shares = np.bincount(actions, minlength=len(probability)) / count
        np.testing.assert_allclose(shares, probability, atol=2 / count)
        # Inversion: the actions stand in order of their numbers.
        assert (np.diff(actions[np.argsort(uniform)]) >= 0).all()


def test_gaussian_actions_are_the_quantiles_of_the_uniform_numbers():
    policy = make("gaussians")
    observation = source(3).standard_normal((50, D)).astype("f")
    uniform = source(4).random((50, 3))
    actions, _ = policy.act(observation, uniform)
    assert actions.dtype == np.float32
    normal = np.vectorize(NormalDist().inv_cdf)(uniform)
    std = policy.module.log_std_A.detach().exp().numpy()
    np.testing.assert_allclose(actions, policy.greedy_action(observation) + std * normal, rtol=1e-5, atol=1e-5)


def test_initial_std_is_the_spread_of_the_first_actions():
    policy = ControlPolicy(D, SPACES["gaussian"], initial_std=0.25, normaliser=None, seed=0)
    actions, _ = policy.act(np.zeros((1000, D), "f"), ((np.arange(1000) + 0.5) / 1000)[:, None])
    assert actions.std() == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize("space", SPACES)
def test_the_ends_of_the_uniform_numbers_are_harmless(space):
    policy = make(space)
    with torch.no_grad():  # one action all but impossible, another all but certain
        policy.module.network.layers[-1].bias[0] -= 300
    width = policy.actions.size if isinstance(policy.actions, Continuous) else 1
    for uniform in (0.0, 1 - 2.0**-53):
        with np.errstate(all="raise", under="ignore"):
            actions, logprobs = policy.act(source().standard_normal((20, D)).astype("f"), np.full((20, width), uniform))
        assert np.isfinite(logprobs).all()
        assert np.isfinite(actions).all()
        if isinstance(policy.actions, Discrete):
            assert (actions < policy.actions.count).all()
            assert space == "one" or (actions > 0).all()


@pytest.mark.parametrize("space", SPACES)
def test_best_is_the_mode(space):
    policy = make(space)
    batch = rolled_out(policy, (20,))
    output = outputs(policy, batch).detach()
    greedy_action = policy.greedy_action(batch.context[0][:-1])
    if isinstance(policy.actions, Discrete):
        np.testing.assert_array_equal(greedy_action, output.argmax(dim=1).numpy())
        assert space == "one" or len(set(greedy_action)) > 1
    else:
        np.testing.assert_allclose(greedy_action, output.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("space", SPACES)
def test_columns_nobody_decided_are_zero_and_never_read(space):
    policy = make(space)
    batch = rolled_out(policy)
    full = policy.evaluate(batch)
    holes = batch.mask_BT.clone()
    holes[0, 2] = holes[0, 6] = holes[2, 0] = False
    spoilt = copy.deepcopy(batch)
    spoilt.mask_BT = holes
    spoilt.actions_BT[~holes] = 10**6
    for row, column in ((0, 2), (0, 6), (2, 0)):
        spoilt.context[row][column] = np.nan
    part = policy.evaluate(spoilt)
    pairs = [(full.logprobs_BT, part.logprobs_BT), (full.entropy_BT, part.entropy_BT)]
    if isinstance(policy.actions, Discrete):
        pairs.append((full.all_logprobs_BTV, part.all_logprobs_BTV))
    for whole, found in pairs:
        torch.testing.assert_close(found[holes], whole[holes])
        assert (found[~holes] == 0).all()
    (part.logprobs_BT + part.entropy_BT).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in policy.module.parameters())


def test_a_batch_without_decisions_is_all_zero():
    policy = make("two")
    batch = rolled_out(policy)
    batch.mask_BT = torch.zeros_like(batch.mask_BT)
    assert (policy.evaluate(batch).logprobs_BT == 0).all()


def test_kept_observations_are_only_those_of_the_same_rows_mask_and_scale():
    normaliser = moments()
    policy = make("two", normaliser=normaliser)
    batch = rolled_out(policy)

    def check(batch: Batch) -> torch.Tensor:
        found = policy.evaluate(batch).logprobs_BT
        expected = distribution(policy, outputs(policy, batch)).log_prob(batch.actions_BT[batch.mask_BT])
        torch.testing.assert_close(found[batch.mask_BT], expected, rtol=1e-5, atol=1e-5)
        assert (found[~batch.mask_BT] == 0).all()
        return found

    first = check(batch)
    check(batch.select(torch.tensor([2, 0])))
    check(batch)
    batch.mask_BT[0, 1] = False  # in place: what was kept must not follow it
    check(batch)
    batch.mask_BT[0, 1] = True
    check(batch)
    normaliser.update(np.full((50, D), 7, "f"))
    assert not torch.allclose(check(batch), first)


def test_acting_follows_the_weights_and_a_copy_has_its_own():
    policy = make("four")
    batch = rolled_out(policy)
    x, uniform = batch.context[0][:-1], source().random(7)
    policy.act(x, uniform)  # its work arrays stay behind when it is copied
    frozen = copy.deepcopy(policy)
    scramble(policy.module, seed=5)
    before, after = frozen.act(x, uniform)[1], policy.act(x, uniform)[1]
    assert np.abs(before - after).max() > 0.1
    np.testing.assert_allclose(frozen.evaluate(batch).logprobs_BT.detach(), batch.behavior_logprobs_BT, atol=1e-5)
    policy.module.load_state_dict(frozen.module.state_dict())
    np.testing.assert_array_equal(policy.act(x, uniform)[1], before)
    scramble(frozen.module, seed=6)
    assert np.abs(frozen.act(x, uniform)[1] - before).max() > 0.1


def test_answers_are_not_overwritten_by_the_next_call():
    for space in SPACES:
        policy = make(space)
        critic = ControlCritic(D, normaliser=None, seed=0)
        random = source()
        answers = []
        for _ in range(2):
            x = random.standard_normal((4, D)).astype("f")
            now = [*policy.act(x, random.random((4, 3 if space == "gaussians" else 1))), policy.greedy_action(x)]
            now.append(critic.values_of(x))
            answers.append((now, [array.copy() for array in now]))
        for now, then in answers:
            for left, right in zip(now, then, strict=True):
                np.testing.assert_array_equal(left, right)


def test_first_weights():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    policy = ControlPolicy(D, Discrete(4), hidden=(8, 8), normaliser=None, seed=7)
    again = ControlPolicy(D, Discrete(4), hidden=(8, 8), normaliser=None, seed=7)
    other = ControlPolicy(D, Discrete(4), hidden=(8, 8), normaliser=None, seed=8)
    critic = ControlCritic(D, hidden=(8, 8), normaliser=None, seed=7)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is nobody's"
    weights = [layer.weight for layer in policy.module.network.layers]
    for weight, gain in zip(weights, (2**0.5, 2**0.5, 0.01), strict=True):
        rows = weight if weight.shape[0] <= weight.shape[1] else weight.t()
        torch.testing.assert_close(rows @ rows.t(), gain**2 * torch.eye(len(rows)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(critic.module.layers[-1].weight.norm(), torch.tensor(1.0))
    assert all((layer.bias == 0).all() for layer in policy.module.network.layers)
    assert torch.equal(weights[0], again.module.network.layers[0].weight)
    assert not torch.equal(weights[0], other.module.network.layers[0].weight)
    assert not torch.equal(weights[0], critic.module.layers[0].weight)


def test_unknown_activation_is_refused():
    with pytest.raises(ConfigError, match="tanh, relu"):
        ControlPolicy(D, Discrete(2), activation="gelu", normaliser=None, seed=0)


@pytest.mark.parametrize("normalised", [False, True])
def test_critic_reads_the_states_before_the_decisions_and_the_one_after_the_last(normalised):
    critic = ControlCritic(D, hidden=(16,), normaliser=moments() if normalised else None, seed=2)
    batch = rolled_out(make("two"))
    batch.mask_BT[0, 6] = batch.mask_BT[0, 2] = False
    values, after = critic.values(batch), critic.bootstrap_values(batch)
    for row, length in enumerate(LENGTHS):
        every = critic.values_of(batch.context[row])
        decided = batch.mask_BT[row, :length].numpy()
        np.testing.assert_allclose(values[row, :length].detach()[decided], every[:-1][decided], rtol=1e-5, atol=1e-6)
        last = 6 if row == 0 else length
        assert after[row].item() == pytest.approx(every[last], rel=1e-5, abs=1e-6)
        assert every.std() > 0.05
    assert (values[~batch.mask_BT] == 0).all()
    values.sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in critic.module.parameters())


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("normalised", [False, True])
def test_saved_and_loaded_policies_are_the_same_bitwise(space, normalised, tmp_path):
    policy = make(space, normaliser=moments() if normalised else None, activation="relu")
    policy.save(tmp_path / "policy")
    assert sorted(path.suffix for path in (tmp_path / "policy").iterdir()) == [".json", ".safetensors"]
    loaded = load_policy(tmp_path / "policy")
    x, uniform = source().standard_normal((30, D)).astype("f"), source().random((30, 3 if space == "gaussians" else 1))
    for left, right in zip(policy.act(x, uniform), loaded.act(x, uniform), strict=True):
        np.testing.assert_array_equal(left, right)
    if isinstance(policy.actions, Continuous):
        np.testing.assert_array_equal(loaded.actions.high_A, policy.actions.high_A)
    else:
        assert loaded.actions == policy.actions


def test_a_missing_or_damaged_policy_is_told_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no policy \(policy.json is missing"):
        load_policy(tmp_path)
    make("two").save(tmp_path)
    weights = tmp_path / "policy.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-20])
    with pytest.raises(ConfigError, match="damaged") as caught:
        load_policy(tmp_path)
    assert "\n" not in str(caught.value)
    weights.unlink()
    with pytest.raises(ConfigError, match=r"policy.safetensors"):
        load_policy(tmp_path)
