"""The reward `exact`."""

from covey.llm.rewards.exact import exact


def test_exact_forgives_outer_white_space_only():
    assert exact([" Paris\n", "paris", "Pa ris", "Paris."], answer=["Paris"] * 4) == [1, 0, 0, 0]
    assert exact(["5"], answer=[5]) == [1]
