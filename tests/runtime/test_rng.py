"""Counter-based random numbers: the published test vectors, independence of order, and statistics."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.runtime.rng import EVALUATING, SAMPLING, permutation, philox4x32, uniforms
from helpers.calls import count_calls

WORDS = st.integers(0, 2**32 - 1)

# Random123 1.14, tests/kat_vectors: counter, key, answer of philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, answer):
    drawn = philox4x32(np.array([counter], dtype=np.uint32), key)
    assert drawn.dtype == np.uint32
    assert drawn.tolist() == [list(answer)]


def philox_in_plain_integers(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@settings(max_examples=50)
@given(st.lists(st.tuples(WORDS, WORDS, WORDS, WORDS), min_size=1, max_size=5), st.tuples(WORDS, WORDS))
def test_vectorised_philox_equals_plain_integers(counters, key):
    drawn = philox4x32(np.array(counters, dtype=np.uint32), key)
    assert drawn.tolist() == [philox_in_plain_integers(counter, key) for counter in counters]


def test_uniform_is_53_bits_of_the_first_two_words():
    word0, word1, _, _ = philox_in_plain_integers((5, 6, 7, 8), (3, SAMPLING))
    expected = ((word0 >> 5) * 2**26 + (word1 >> 6)) / 2**53
    assert uniforms(3, 5, [6], [7], [8]).tolist() == [expected]


@settings(max_examples=50)
@given(WORDS, WORDS, st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=20), st.randoms())
def test_each_number_depends_on_its_own_row_only(seed, step, rows, shuffler):
    group, rollout, position = np.array(rows, dtype=np.int64).T
    together = uniforms(seed, step, group, rollout, position)
    alone = np.array([uniforms(seed, step, *row)[0] for row in rows])
    order = list(range(len(rows)))
    shuffler.shuffle(order)
    assert together.tolist() == alone.tolist()
    assert uniforms(seed, step, group[order], rollout[order], position[order]).tolist() == together[order].tolist()


def test_every_coordinate_and_the_stream_change_the_number():
    base = {"seed": 1, "step": 2, "group_N": 3, "rollout_N": 4, "position_N": 5}
    drawn = [uniforms(**base)[0]]
    drawn += [uniforms(**{**base, name: value + 10})[0] for name, value in base.items()]
    drawn += [uniforms(**{**base, "group_N": 4, "rollout_N": 3})[0]]  # the order of coordinates matters
    drawn += [uniforms(**base, stream=EVALUATING)[0]]
    assert len(set(drawn)) == len(drawn)


def test_no_collisions_and_uniform():
    group, rollout, position = (axis.ravel() for axis in np.meshgrid(range(16), range(16), range(256), indexing="ij"))
    drawn = np.concatenate([uniforms(0, step, group, rollout, position) for step in (0, 1)])
    count = len(drawn)
    assert len(np.unique(drawn)) == count
    assert drawn.min() >= 0
    assert drawn.max() < 1
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded by chance once in a thousand; the data are fixed.
    ranks = np.arange(1, count + 1)
    ordered = np.sort(drawn)
    distance = max((ranks / count - ordered).max(), (ordered - (ranks - 1) / count).max())
    assert distance < 1.95 / np.sqrt(count)
    # Chi-square over 256 cells has mean 255 and standard deviation 22.6, of the leading bits and of the low ones.
    for bits in (drawn * 256, drawn * 2**40 % 256):
        counts = np.bincount(bits.astype(np.int64), minlength=256)
        chi_square = ((counts - count / 256) ** 2 / (count / 256)).sum()
        assert 255 - 4 * 22.6 < chi_square < 255 + 4 * 22.6
    # Neighbouring positions, rollouts and groups are uncorrelated: 4 standard errors.
    cube = drawn[: 16 * 16 * 256].reshape(16, 16, 256) - 0.5
    for left, right in [
        (cube[:, :, 1:], cube[:, :, :-1]),
        (cube[:, 1:], cube[:, :-1]),
        (cube[1:], cube[:-1]),
    ]:
        assert abs((left * right).mean()) < 4 / 12 / np.sqrt(left.size)


GOOD = {"seed": 0, "step": 0, "group_N": 0, "rollout_N": 0, "position_N": 0}


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5])
@pytest.mark.parametrize("name", GOOD)
def test_values_out_of_range_are_refused(name, bad):
    with pytest.raises(ValueError, match=name.removesuffix("_N")):
        uniforms(**{**GOOD, name: bad})


@pytest.mark.parametrize("bad", [[0, -1], [0, 2**40], [0.0]])
@pytest.mark.parametrize("name", ["group_N", "rollout_N", "position_N"])
def test_rows_out_of_range_are_refused(name, bad):
    with pytest.raises(ValueError, match=name.removesuffix("_N")):
        uniforms(**{**GOOD, name: bad})


def test_no_rows_give_no_numbers():
    assert uniforms(0, 0, [], [], []).shape == (0,)


def test_permutation_is_one_and_changes_with_its_names():
    first = permutation(0, 1, 0, 100)
    assert first.dtype == np.int64
    assert sorted(first.tolist()) == list(range(100))
    assert first.tolist() == permutation(0, 1, 0, 100).tolist()
    others = [permutation(1, 1, 0, 100), permutation(0, 2, 0, 100), permutation(0, 1, 1, 100)]
    assert all(first.tolist() != other.tolist() for other in others)
    assert permutation(0, 1, 0, 0).tolist() == []
    assert permutation(0, 1, 0, 1).tolist() == [0]


@pytest.mark.slow
def test_permutations_are_fair():
    counts = np.zeros((5, 5))
    for step in range(4000):
        counts[np.arange(5), permutation(7, step, 0, 5)] += 1
    # each cell is binomial(4000, 1/5): mean 800, standard deviation 25.3
    assert np.abs(counts - 800).max() < 4.5 * 25.3


def test_many_numbers_take_no_more_calls_than_one():
    """They are made by numpy at once: a training step draws millions."""

    def calls(count):
        rows = np.arange(count)
        return count_calls(lambda: uniforms(0, 0, rows, rows, 0))

    calls(1)
    assert calls(512) == calls(1)
