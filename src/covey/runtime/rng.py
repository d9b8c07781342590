"""Counter-based random numbers: a function of the decision that they are for, independent of earlier draws.

Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011) turns a counter of four 32-bit
words into four random words under a key of two. covey's counter is a decision (step, group, rollout, position), its key
the run (seed) and the purpose (stream). So a resumed run repeats its choices, and they do not depend on the order in
which rows are processed or finish.

Shape legend: N numbers drawn together.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Item = TypeVar("Item")

SAMPLING = 0  # stream of the sampler's choices in training
SHUFFLING = 1  # stream of the order of a step's minibatches
EVALUATING = 2  # stream of the reset seeds of evaluation episodes
STARTING = 3  # stream of the reset seeds of training episodes
BRANCHING = 4  # stream of the episodes that branches continue, and of the steps at which they begin
CONTINUING = 5  # stream of the continuations from which the labels of reasoning steps are estimated
SELECTING = 6  # stream of the completions of a group that become examples for a reward model
REPLAYING = 7  # stream of the examples of earlier iterations on which a reward model is trained again
ADAPTING = 8  # stream of the first matrices of a low-rank adapter
CLIPPING = 9  # stream of the decisions without a policy gradient (Clip-Cov)
RANKING = 10  # stream of the order in which a judge sees the completions of a group

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
_WORD = 0xFFFFFFFF
_LOW = np.uint64(_WORD)
_SHIFT = np.uint64(32)


def philox4x32(counter_N4: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Philox4x32-10 of every row of `counter_N4` (uint32 [N, 4]) under one key; uint32 [N, 4].

    A bijection of the counter for every key, so distinct counters never give the same four words.
    """
    # 32-bit words in 64-bit lanes, so that a product's high and low halves are a shift and a mask.
    c0, c1, c2, c3 = counter_N4.T.astype(np.uint64)
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def uniforms(
    seed: int, step: int, group_N: ArrayLike, rollout_N: ArrayLike, position_N: ArrayLike, *, stream: int = SAMPLING
) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, one for every decision; float64 [N].

    Each number depends only on its (seed, step, group, rollout, position) and the stream. A scalar argument is
    broadcast to every row.

    Raises:
        ValueError: if a value is not an integer from 0 to 2**32 - 1.
    """
    counter_N4 = _counters(step=step, group=group_N, rollout=rollout_N, position=position_N)
    words_N4 = philox4x32(counter_N4, _key(seed, stream))
    high_N = (words_N4[:, 0] >> np.uint32(5)).astype(np.float64)  # 27 bits
    low_N = (words_N4[:, 1] >> np.uint32(6)).astype(np.float64)  # 26 bits
    return (high_N * 2.0**26 + low_N) * 2.0**-53


def permutation(seed: int, step: int, epoch: int, n: int, *, stream: int = SHUFFLING) -> NDArray[np.int64]:
    """A random permutation of 0..n-1, by default for one epoch over a step's rollouts; int64 [n].

    Raises:
        ValueError: if a value is not an integer from 0 to 2**32 - 1.
    """
    drawn_N = uniforms(seed, step, epoch, np.arange(n), 0, stream=stream)
    return np.argsort(drawn_N, kind="stable").astype(np.int64)


def shuffled_batches(
    groups: Sequence[Sequence[Item]], batch_size: int, *, seed: int, epochs: int, done: int = 0, iteration: int = 0
) -> Iterator[list[Item]]:
    """The items of every optimizer step of some epochs after the first `done` steps.

    Groups are shuffled and their items stay together. The order is a function of (seed, iteration, epoch).
    """
    per_epoch = batches_per_epoch(sum(map(len, groups)), batch_size)
    for step in range(done, epochs * per_epoch):
        epoch, place = divmod(step, per_epoch)
        order = [item for group in permutation(seed, iteration, epoch, len(groups)) for item in groups[group]]
        yield order[place * batch_size : (place + 1) * batch_size]


def batches_per_epoch(items: int, batch_size: int) -> int:
    """Number of optimizer steps of an epoch."""
    return -(-items // batch_size)


def _counters(**words: ArrayLike) -> NDArray[np.uint32]:
    """Stack four words, each an integer or an array [N], to uint32 [N, 4]."""
    columns = [_word(name, value) for name, value in words.items()]
    return np.stack(np.broadcast_arrays(*columns), axis=-1).reshape(-1, 4)


def _key(seed: int, stream: int) -> tuple[int, int]:
    return int(_word("seed", seed)), int(_word("stream", stream))


def _word(name: str, value: ArrayLike) -> NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        if array.size:
            raise ValueError(f"{name} must be an integer from 0 to 2**32 - 1, got {value!r}")
    elif array.size and not (int(array.min()) >= 0 and int(array.max()) <= _WORD):
        raise ValueError(f"{name} must be from 0 to 2**32 - 1, got {int(array.min())} to {int(array.max())}")
    return array.astype(np.uint32)
