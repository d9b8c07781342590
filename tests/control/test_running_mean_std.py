"""The running moments are those of everything seen, however it was cut."""

import numpy as np
import pytest
import torch

from covey.config import ConfigError, RunError
from covey.control.mlp import RunningMeanStd


def observations(rows: int = 1000) -> np.ndarray:
    scale = np.array([1.0, 1e-3, 300.0])
    return (np.random.default_rng(0).standard_normal((rows, 3)) * scale + np.array([0.0, 5.0, -1e4])).astype("f")


@pytest.mark.parametrize("cuts", [[], [1], [1, 2, 900], [500, 500]])
def test_moments_are_those_of_all_observations(cuts):
    x = observations()
    moments = RunningMeanStd(3)
    for piece in np.split(x, cuts):
        moments.update(piece)
    exact = x.astype(np.float64)
    assert moments.count == len(x)
    np.testing.assert_allclose(moments.mean_D, exact.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.var_D, exact.var(axis=0), rtol=1e-9)


def test_normalised_observations_have_one_scale_and_a_limit():
    x = observations()
    moments = RunningMeanStd(3)
    moments.update(x)
    scaled = moments.normalise(x)
    assert scaled.dtype == np.float32
    # The means of float32 numbers of 1e4 are known to about 1e-3 of a deviation of 300.
    np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=2e-3)
    np.testing.assert_allclose(scaled[:, [0, 2]].std(axis=0), 1, atol=1e-4)
    expected = (x.astype(np.float64) - moments.mean_D) / np.sqrt(moments.var_D + 1e-8)
    np.testing.assert_allclose(scaled, expected, atol=2e-3)
    far = moments.normalise(np.array([[1e6, -1e6, 0]], dtype="f"))
    assert far[0, 0] == 10
    assert far[0, 1] == -10


def test_before_the_first_update_numbers_stay_but_for_the_limit():
    scaled = RunningMeanStd(2).normalise(np.array([[0.5, -40]], dtype="f"))
    np.testing.assert_allclose(scaled, [[0.5, -10]], rtol=1e-6)


def test_a_saved_state_goes_on_bitwise():
    x = observations()
    straight, saved = RunningMeanStd(3), RunningMeanStd(3)
    straight.update(x[:300])
    saved.load_state_dict({name: value.clone() for name, value in straight.state_dict().items()})
    kept = {name: value.clone() for name, value in straight.state_dict().items()}
    straight.update(x[300:])
    saved.update(x[300:])
    assert saved.count == straight.count
    np.testing.assert_array_equal(saved.mean_D, straight.mean_D)
    np.testing.assert_array_equal(saved.var_D, straight.var_D)
    np.testing.assert_array_equal(saved.normalise(x), straight.normalise(x))
    assert not torch.equal(kept["mean_D"], straight.state_dict()["mean_D"])


def test_no_observations_change_nothing_and_bad_ones_are_refused():
    moments = RunningMeanStd(3)
    moments.update(np.empty((0, 3), dtype="f"))
    assert moments.count == 0
    with pytest.raises(RunError, match="not finite"):
        moments.update(np.array([[0, np.nan, 0]], dtype="f"))
    with pytest.raises(ConfigError, match="4 numbers"):
        moments.load_state_dict(RunningMeanStd(4).state_dict())
