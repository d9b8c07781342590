"""PufferLib's PPO with one kind of policy: seconds of training. Runs in PufferLib's environment.

Its copies are in this process, as those of the others. A step of PufferLib in which a copy begins an episode counts as
an environment step here, as PufferLib counts it.
"""

import os
import sys
import time
import warnings
from functools import partial
from typing import Any

warnings.filterwarnings("ignore")  # of gym, which PufferLib imports
os.chdir(sys.prefix)  # where PufferLib puts a link when it is imported

import gymnasium as gym  # noqa: E402
import torch  # noqa: E402
from pufferlib import pufferl, vector  # noqa: E402
from pufferlib.emulation import GymnasiumPufferEnv  # noqa: E402
from pufferlib.models import Convolutional, LSTMWrapper  # noqa: E402
from pufferlib.pytorch import layer_init  # noqa: E402
from shape import report  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from trial import read_work  # noqa: E402

UPDATES_TIMED = 3


def layers(inputs: int, hidden: list[int], outputs: int) -> nn.Sequential:
    """A network with tanh."""
    made: list[nn.Module] = []
    for before, after in zip([inputs, *hidden], hidden, strict=False):
        made += [layer_init(nn.Linear(before, after)), nn.Tanh()]
    return nn.Sequential(*made, nn.Linear(hidden[-1], outputs))


class Separate(nn.Module):
    """An actor and a critic with a network each, over observations or over the output of PufferLib's LSTM."""

    is_continuous = False

    def __init__(self, env: Any, hidden: list[int], memory: int) -> None:
        super().__init__()
        inputs = memory or env.single_observation_space.shape[0]
        self.hidden_size = memory
        self.actor = layers(inputs, hidden, env.single_action_space.n)
        self.critic = layers(inputs, hidden, 1)

    def encode_observations(self, observations: Tensor, state: Any = None) -> Tensor:
        return observations

    def decode_actions(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(hidden), self.critic(hidden)

    def forward(self, observations: Tensor, state: Any = None) -> tuple[Tensor, Tensor]:
        return self.decode_actions(observations)

    forward_eval = forward


def policy_of(env: Any, work: dict[str, Any]) -> nn.Module:
    """The policy with the layers of the work; for pictures PufferLib's NatureCNN, which actor and critic share."""
    if ":" in work["id"]:
        policy: nn.Module = Convolutional(env, framestack=4, flat_size=3136, channels_last=True)
        policy.forward_eval = policy.forward  # type: ignore[assignment]  # 3.0.0's has none
        return policy
    policy = Separate(env, work["hidden"], work["memory"])
    if not work["memory"]:
        return policy
    size = env.single_observation_space.shape[0]
    return LSTMWrapper(env, policy, input_size=size, hidden_size=work["memory"])


def make_copy(name: str, buf: Any = None, seed: int = 0) -> GymnasiumPufferEnv:
    """A copy of a Gymnasium environment."""
    return GymnasiumPufferEnv(env_creator=partial(gym.make, name), buf=buf, seed=seed)


def main() -> None:
    work = read_work()
    torch.set_num_threads(1)
    sys.argv[1:] = []  # PufferLib reads them too
    settings = pufferl.load_config("default")["train"]
    of_update = work["environments"] * work["steps"]
    settings |= {
        "env": work["id"], "device": "cpu", "optimizer": "adam", "use_rnn": bool(work["memory"]),
        "batch_size": of_update, "bptt_horizon": work["steps"], "minibatch_size": of_update // work["minibatches"],
        "update_epochs": work["epochs"], "checkpoint_interval": 1000, "total_timesteps": 100 * of_update,
        "learning_rate": 3e-4,
    }  # fmt: skip
    pufferl.PuffeRL.print_dashboard = lambda *_, **__: None  # the others show nothing either
    copies = vector.make(make_copy, env_args=[work["id"]], num_envs=work["environments"], backend=vector.Serial)
    agent = pufferl.PuffeRL(settings, copies, policy_of(copies.driver_env, work))
    began = 0.0
    for update in range(1 + UPDATES_TIMED):  # the first to warm up
        if update == 1:
            began = time.perf_counter()
        agent.evaluate()
        agent.train()
    seconds = time.perf_counter() - began
    report(environment_steps=UPDATES_TIMED * of_update, seconds=seconds)
    sys.stdout.flush()
    os._exit(0)  # PufferLib's thread that watches the machine does not end


if __name__ == "__main__":
    main()
