"""The signal that is expected of a prompt, and the weight with which it is drawn.

A group teaches nothing if its rewards are all equal. With rewards of 0 and 1 and the success rate p, the variance of a
reward is p (1 - p), and the signal-to-noise ratio of the gradient of N rollouts is at most 4 N p (1 - p) (SPEED-RL,
arXiv 2506.09016, theorem 3.1).

Shapes: C candidates.
"""

from torch import Tensor


def discounted(count: float, steps: int, half_life: float) -> float:
    """A count of observations after some steps in which it was not added to.

    count * 2^(-steps / half_life)      MoPPS (arXiv 2507.04632), temporal discounting, with lambda = 2^(-1 / half_life)

    Args:
        count: weight of the observations so far.
        steps: number of training steps since then.
        half_life: number of steps after which an observation has half of its weight.
    """
    return float(count * 2.0 ** (-steps / half_life))


def success_signal(rate_C: Tensor) -> Tensor:
    """Variance of a reward of 0 or 1, relative to the largest: 4 p (1 - p). SPEED-RL (arXiv 2506.09016), theorem 3.1.

    Args:
        rate_C: success rates p, from 0 to 1.
    """
    return 4 * rate_C * (1 - rate_C)


def variance_signal(variance_C: Tensor) -> Tensor:
    """Variance of rewards of any kind, relative to the largest of the candidates; 0 if all are 0.

    The gradient of a prompt vanishes with the standard deviation of its rewards (Razin et al., arXiv 2310.20703).
    """
    largest = variance_C.max()
    return variance_C / largest if largest > 0 else variance_C * 0


def draw_weights(signal_C: Tensor, floor: float) -> Tensor:
    """Relative probability with which each candidate is drawn: floor + (1 - floor) * signal.

    Args:
        signal_C: expected signal, from 0 to 1.
        floor: weight of a candidate without signal beside that of one with the largest; with 1 all are equal.
    """
    return floor + (1 - floor) * signal_C


def draw_without_replacement(weight_C: Tensor, uniform_C: Tensor, count: int) -> Tensor:
    """Candidates drawn one after the other with probabilities proportional to their weights, without replacement.

    The `count` largest of log(u) / w      Efraimidis and Spirakis, "Weighted random sampling with a reservoir",
    Information Processing Letters 97 (2006), algorithm A

    Args:
        weight_C: above 0.
        uniform_C: independent uniform numbers in (0, 1).
        count: number of candidates to draw.

    Returns:
        their indices, int64 [count], in ascending order.
    """
    key_C = uniform_C.log() / weight_C
    drawn: Tensor = key_C.argsort(descending=True, stable=True)[:count].sort().values
    return drawn


def back_to_the_data(weight_C: Tensor) -> Tensor:
    """Weights in the loss of the prompts that were drawn, so that their weighted mean estimates that over the data.

    1 / w_i, divided by its mean      self-normalised importance sampling, Owen, "Monte Carlo theory, methods and
    examples" (2013), eq. 9.6

    Args:
        weight_C: relative probability with which each was drawn.
    """
    inverse_C = 1 / weight_C
    return inverse_C / inverse_C.mean()
