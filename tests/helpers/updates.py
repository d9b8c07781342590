"""One update of a policy, and of a critic if there is one, without the run around it."""

from covey.algorithms import Algorithm
from covey.core import schedules
from covey.data import Batch, Critic, Policy
from covey.runtime.optimizer import MasterAdamW
from covey.train.learners import Coefficient, CriticLearner, Learner, PolicyLearner, UpdatePlan, actor_critic
from covey.train.update import update


def learners_of(
    policy: Policy,
    optimizer: MasterAdamW,
    algorithm: Algorithm,
    plan: UpdatePlan = UpdatePlan(),  # noqa: B008
    *,
    learning_rate: float = 0.1,
    kl_coefficient: float = 0.0,
    critic: Critic | None = None,
    critic_optimizer: MasterAdamW | None = None,
    critic_learning_rate: float = 0.0,
) -> tuple[Learner, ...]:
    """The learners of a run with constant coefficients. A critic whose `own_trunk` is False shares the policy's."""
    rate, kl = schedules.constant(learning_rate), Coefficient(schedules.constant(kl_coefficient))
    actor = PolicyLearner(policy, optimizer, algorithm, plan, rate, kl)
    if critic is None:
        return (actor,)
    critic_rate = schedules.constant(critic_learning_rate)
    other = CriticLearner(critic, critic_optimizer, algorithm, plan, critic_rate, policy.microbatches)
    return (actor, other) if getattr(critic, "own_trunk", True) else actor_critic(actor, other)


def one_update(
    policy: Policy,
    optimizer: MasterAdamW,
    algorithm: Algorithm,
    batch: Batch,
    plan: UpdatePlan = UpdatePlan(),  # noqa: B008
    *,
    seed: int = 0,
    step: int = 1,
    **options,
) -> dict[str, float]:
    """Metrics of the update; options as for `learners_of`."""
    return update(learners_of(policy, optimizer, algorithm, plan, **options), batch, seed=seed, step=step)
