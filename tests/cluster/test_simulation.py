"""The simulation of a cluster against closed forms, and the properties that every schedule keeps."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.random import Generator, Philox

from covey.config import ConfigError
from covey_cluster import simulation
from covey_cluster.lengths import LogNormalLengths, RecordedLengths
from covey_cluster.servers import MeasuredSpeed, RooflineSpeed, Server
from covey_cluster.simulation import (
    ONE_AHEAD,
    SYNCHRONOUS,
    Cluster,
    Schedule,
    Workload,
    fifo,
    simulate,
)

TOKENS = 500
SPEED = RooflineSpeed(alone=40.0, full=400.0)  # limited by the weights up to 10 completions
EQUAL = Workload(LogNormalLengths(TOKENS, 0.0, 10_000), prompts=6, group_size=8, steps=5)
ONE_SERVER = Cluster(servers=1, slots=48, speed=SPEED, trained_tokens_per_second=3000.0, weights_seconds=1.5)
STEP_TOKENS = 6 * 8 * TOKENS
SCHEDULES = [SYNCHRONOUS, ONE_AHEAD, fifo(0), fifo(1), fifo(3)]


def near(value: object) -> object:
    return pytest.approx(value, rel=1e-9)


@dataclass(frozen=True)
class ByHand(Workload):
    """Groups with given lengths; all later groups are like the last one."""

    given: tuple[list[int], ...] = ()

    def group(self, number: int) -> list[int]:
        return self.given[min(number, len(self.given) - 1)]


def by_hand(*given: list[int], prompts: int, steps: int) -> ByHand:
    return ByHand(LogNormalLengths(1, 0, 1), prompts, len(given[0]), steps, given=given)


@pytest.mark.parametrize("schedule", [SYNCHRONOUS, fifo(0)], ids=lambda one: one.name)
@pytest.mark.parametrize(("slots", "waves"), [(48, [48]), (20, [20, 20, 8]), (10, [10, 10, 10, 10, 8]), (1, [1] * 48)])
def test_one_server_with_equal_lengths(schedule: Schedule, slots: int, waves: list[int]) -> None:
    """A step is its waves of completions, its update and the handover, one after the other."""
    sampling = sum(TOKENS / min(40.0, 400.0 / rows) for rows in waves)
    outcome = simulate(EQUAL, replace(ONE_SERVER, slots=slots), schedule)
    assert outcome.seconds == near(5 * (sampling + STEP_TOKENS / 3000.0 + 1.5))
    assert outcome.trained_tokens == 5 * STEP_TOKENS
    assert outcome.tokens_per_second == near(5 * STEP_TOKENS / outcome.seconds)
    assert outcome.trainer_busy == near(5 * STEP_TOKENS / 3000.0 / outcome.seconds)
    assert outcome.servers_busy == near(5 * sampling / outcome.seconds)
    assert (set(outcome.ages), outcome.lost_tokens) == ({0}, 0)
    assert outcome.unused_tokens == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("balances", [False, True], ids=["own server", "balanced"])
@pytest.mark.parametrize(
    ("servers", "slots", "waves"),
    [(2, 48, [24]), (3, 48, [16]), (6, 48, [8]), (2, 10, [10, 10, 4]), (3, 8, [8, 8]), (4, 48, [16])],
)
def test_several_servers_with_equal_lengths(servers: int, slots: int, waves: list[int], balances: bool) -> None:
    """The step waits for the server with the most groups; groups are divided evenly."""
    cluster = replace(
        ONE_SERVER,
        servers=servers,
        slots=slots,
        trained_tokens_per_second=math.inf,
        weights_seconds=0,
        balances=balances,
    )
    sampling = sum(TOKENS / min(40.0, 400.0 / rows) for rows in waves)
    assert simulate(EQUAL, cluster, SYNCHRONOUS).seconds == near(5 * sampling)


def test_whole_requests_leave_rows_free() -> None:
    """20 slots hold two whole groups of 8; without whole requests 20 completions."""
    cluster = replace(ONE_SERVER, slots=20, trained_tokens_per_second=math.inf, weights_seconds=0)
    whole = simulate(EQUAL, replace(cluster, whole_requests=True), SYNCHRONOUS)
    assert whole.seconds == near(5 * 3 * TOKENS / (400.0 / 16))
    assert simulate(EQUAL, cluster, SYNCHRONOUS).seconds == near(5 * TOKENS * (2 * 20 / 400.0 + 1 / 40.0))
    narrow = replace(cluster, slots=16)
    assert simulate(EQUAL, narrow, SYNCHRONOUS) == simulate(EQUAL, replace(narrow, whole_requests=True), SYNCHRONOUS)


@pytest.mark.parametrize("trained", [200.0, 400.0, 96_000.0])
def test_one_step_ahead_takes_the_longer_of_sampling_and_update(trained: float) -> None:
    cluster = replace(ONE_SERVER, trained_tokens_per_second=trained)
    sampling, update = TOKENS / (400.0 / 48), STEP_TOKENS / trained
    outcome = simulate(EQUAL, cluster, ONE_AHEAD)
    assert outcome.seconds == near(sampling + 5 * (max(sampling, update) + 1.5))
    assert outcome.ages == (0,) * 6 + (1,) * 24
    without_handover = simulate(replace(EQUAL, steps=400), replace(cluster, weights_seconds=0), ONE_AHEAD)
    assert without_handover.seconds / 400 == pytest.approx(max(sampling, update), rel=5e-3)


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_continuous_sampling_is_limited_by_the_slower_side(staleness: int) -> None:
    """With equal lengths: the trainer if it is the slower, and otherwise a server that is always full."""
    slow_trainer = replace(ONE_SERVER, trained_tokens_per_second=100.0)
    outcome = simulate(EQUAL, slow_trainer, fifo(staleness))
    assert outcome.seconds == near(TOKENS / (400.0 / 48) + 5 * (STEP_TOKENS / 100.0 + 1.5))
    assert max(outcome.ages) == min(staleness, 4)
    fast_trainer = replace(ONE_SERVER, trained_tokens_per_second=1e9, weights_seconds=0)
    outcome = simulate(replace(EQUAL, steps=200), fast_trainer, fifo(staleness))
    assert outcome.tokens_per_second == pytest.approx(400.0, rel=1e-2)
    assert outcome.servers_busy == pytest.approx(1.0, rel=1e-3)


def test_completions_share_a_server() -> None:
    """Tokens/s each: 30 with three completions, 45 with two, 60 alone."""
    workload = by_hand([30, 80, 200], prompts=1, steps=1)
    cluster = Cluster(servers=1, slots=3, speed=RooflineSpeed(60.0, 90.0), trained_tokens_per_second=310.0)
    assert simulate(workload, cluster, SYNCHRONOUS).seconds == near(30 / 30 + 50 / 45 + 120 / 60 + 1)
    two_slots = simulate(workload, replace(cluster, slots=2), SYNCHRONOUS)
    assert two_slots.seconds == near(30 / 45 + 50 / 45 + 150 / 60 + 1)


def test_a_straggler_holds_up_a_barrier_and_not_the_groups_behind_it() -> None:
    """Group 0 takes 10 s, all others 1 s; two servers with a slot each."""
    workload = by_hand([100], [10], prompts=2, steps=3)
    cluster = Cluster(
        servers=2, slots=1, speed=RooflineSpeed(10.0, 10.0), trained_tokens_per_second=math.inf, balances=True
    )
    assert simulate(workload, cluster, SYNCHRONOUS).seconds == near(10 + 1 + 1)
    assert simulate(workload, cluster, ONE_AHEAD).seconds == near(10 + 1 + 1 + 1), "weights wait for the step in work"
    assert simulate(workload, cluster, fifo(1)).seconds == near(10 + 1), "groups 4 and 5 wait for the first update"
    assert simulate(workload, cluster, fifo(2)).seconds == near(10), "groups 1 to 5 are complete after 5 s"


def test_a_group_waits_for_its_own_server() -> None:
    """Groups 0 and 2 of a step take 10 s, 1 and 3 take 1 s: both long ones are sent to server 0 of two."""
    workload = by_hand([100], [10], [100], [10], prompts=4, steps=1)
    cluster = Cluster(servers=2, slots=1, speed=RooflineSpeed(10.0, 10.0), trained_tokens_per_second=math.inf)
    assert simulate(workload, cluster, SYNCHRONOUS).seconds == near(20)
    assert simulate(workload, replace(cluster, balances=True), SYNCHRONOUS).seconds == near(11)


def test_a_crash_by_hand() -> None:
    """Step 1 begins after 6 s. The crash after 8 s loses 20 tokens and an ended sibling's 10; back at 10 s."""
    workload = by_hand([10, 50], prompts=1, steps=2)
    cluster = Cluster(
        servers=1, slots=2, speed=RooflineSpeed(10.0, 20.0), trained_tokens_per_second=60.0, crash_every_seconds=8.0,
        restart_seconds=2.0,
    )  # fmt: skip
    outcome = simulate(workload, cluster, SYNCHRONOUS)
    assert outcome.seconds == near(10 + 5 + 1)
    assert outcome.lost_tokens == near(30)
    assert outcome.generated_tokens == near(150)
    assert simulate(workload, replace(cluster, crash_every_seconds=math.inf), SYNCHRONOUS).seconds == near(12)


def test_a_run_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "MOST_EVENTS", 2000)
    cluster = replace(ONE_SERVER, crash_every_seconds=1.0, restart_seconds=0.5)
    with pytest.raises(ConfigError, match="does not end"):
        simulate(EQUAL, cluster, SYNCHRONOUS)
    with pytest.raises(ConfigError, match="7 slots are too few for a group of 8"):
        simulate(EQUAL, replace(ONE_SERVER, slots=7, whole_requests=True), SYNCHRONOUS)


workloads = st.builds(
    Workload,
    lengths=st.builds(LogNormalLengths, st.integers(20, 400), st.sampled_from([0.0, 0.4, 1.2]), st.integers(100, 2000)),
    prompts=st.integers(1, 5),
    group_size=st.integers(1, 5),
    steps=st.integers(1, 6),
    seed=st.integers(0, 99),
)
clusters = st.builds(
    Cluster,
    servers=st.integers(1, 4),
    slots=st.integers(5, 30),
    speed=st.builds(RooflineSpeed, st.floats(5, 80), st.floats(50, 900)),
    trained_tokens_per_second=st.floats(50, 5000),
    weights_seconds=st.floats(0, 5),
    whole_requests=st.booleans(),
    balances=st.booleans(),
    crash_every_seconds=st.sampled_from([math.inf, 500.0, 1000.0]),
    restart_seconds=st.floats(1, 50),
)
STRAGGLERS = Workload(LogNormalLengths(200, 1.2, 2000), prompts=4, group_size=5, steps=6)
CRASHING = Cluster(
    3, 7, RooflineSpeed(30.0, 150.0), 900.0, 2.0, balances=True, crash_every_seconds=60.0, restart_seconds=20.0
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(workload=workloads, cluster=clusters, schedule=st.sampled_from(SCHEDULES))
@example(workload=STRAGGLERS, cluster=CRASHING, schedule=fifo(1))
@example(workload=STRAGGLERS, cluster=CRASHING, schedule=fifo(3))
@example(workload=STRAGGLERS, cluster=CRASHING, schedule=ONE_AHEAD)
@example(workload=STRAGGLERS, cluster=CRASHING, schedule=SYNCHRONOUS)
@example(workload=STRAGGLERS, cluster=replace(CRASHING, balances=False), schedule=fifo(2))
def test_what_every_schedule_keeps(workload: Workload, cluster: Cluster, schedule: Schedule) -> None:
    outcome = simulate(workload, cluster, schedule)
    assert outcome == simulate(workload, cluster, schedule)
    groups = range(workload.steps * workload.prompts)
    assert len(outcome.ages) == len(groups)
    assert outcome.trained_tokens == sum(sum(workload.group(number)) for number in groups), "each group once"
    known = outcome.trained_tokens + outcome.lost_tokens + outcome.unused_tokens
    assert outcome.generated_tokens == pytest.approx(known, rel=1e-9), "no token appears or disappears"
    assert min(outcome.lost_tokens, outcome.unused_tokens) > -1e-6
    assert min(outcome.ages) >= 0
    assert max(outcome.ages) <= schedule.staleness
    assert 0 < outcome.trainer_busy <= 1
    assert 0 < outcome.servers_busy <= 1 + 1e-9
    training = outcome.trained_tokens / cluster.trained_tokens_per_second
    assert outcome.seconds >= (training + workload.steps * cluster.weights_seconds) * (1 - 1e-9)
    assert outcome.seconds >= outcome.generated_tokens / (cluster.servers * cluster.speed.each(1) * cluster.slots)


@settings(max_examples=30, deadline=None)
@given(workload=workloads, cluster=clusters, schedule=st.sampled_from(SCHEDULES))
@example(workload=STRAGGLERS, cluster=CRASHING, schedule=fifo(2))
def test_a_cluster_of_twice_the_speed_takes_half_the_time(
    workload: Workload, cluster: Cluster, schedule: Schedule
) -> None:
    assert isinstance(cluster.speed, RooflineSpeed)
    twice = replace(
        cluster,
        speed=RooflineSpeed(2 * cluster.speed.alone, 2 * cluster.speed.full),
        trained_tokens_per_second=2 * cluster.trained_tokens_per_second,
        weights_seconds=cluster.weights_seconds / 2,
        crash_every_seconds=cluster.crash_every_seconds / 2,
        restart_seconds=cluster.restart_seconds / 2,
    )
    slow, fast = simulate(workload, cluster, schedule), simulate(workload, twice, schedule)
    assert slow.seconds == near(2 * fast.seconds)
    assert (slow.ages, slow.trained_tokens) == (fast.ages, fast.trained_tokens)


@settings(max_examples=30, deadline=None)
@given(workload=workloads, cluster=clusters, staleness=st.integers(0, 3))
@example(workload=STRAGGLERS, cluster=CRASHING, staleness=0)
def test_without_sharing_more_is_never_slower(workload: Workload, cluster: Cluster, staleness: int) -> None:
    """If completions do not slow each other down, neither a later bound nor another slot makes anything begin later."""
    alone = replace(cluster, speed=RooflineSpeed(40.0, math.inf), crash_every_seconds=math.inf, whole_requests=False)
    roomy = replace(alone, slots=10_000)
    later = simulate(workload, roomy, fifo(staleness + 1)).seconds
    assert later <= simulate(workload, roomy, fifo(staleness)).seconds * (1 + 1e-9)
    assert simulate(workload, roomy, fifo(1)).seconds <= simulate(workload, roomy, ONE_AHEAD).seconds * (1 + 1e-9)
    few = replace(alone, servers=1)
    more = simulate(workload, replace(few, slots=few.slots + 1), SYNCHRONOUS)
    assert more.seconds <= simulate(workload, few, SYNCHRONOUS).seconds * (1 + 1e-9)


def test_groups_do_not_depend_on_the_schedule_or_on_each_other() -> None:
    assert STRAGGLERS.group(3) == STRAGGLERS.group(3)
    assert STRAGGLERS.group(3) != STRAGGLERS.group(4)
    assert STRAGGLERS.group(3) != replace(STRAGGLERS, seed=1).group(3)
    assert STRAGGLERS.group(3)[:2] == replace(STRAGGLERS, group_size=2).group(3)


@pytest.mark.parametrize(("sigma", "limit"), [(0.0, 900), (0.0, 100), (0.5, 900), (1.3, 900), (1.3, 100_000)])
def test_the_mean_of_lognormal_lengths(sigma: float, limit: int) -> None:
    lengths = LogNormalLengths(300.0, sigma, limit)
    drawn = lengths.draw(Generator(Philox(key=7)), 20_000)
    assert min(drawn) >= 1
    assert max(drawn) <= limit
    standard_error = float(np.std(drawn)) / len(drawn) ** 0.5
    assert abs(np.mean(drawn) - lengths.mean) <= 4 * standard_error + 1e-9
    if sigma and limit > 10_000:
        assert np.std(np.log(drawn)) == pytest.approx(sigma, rel=0.03)


def test_recorded_lengths_are_drawn_from_the_record() -> None:
    lengths = RecordedLengths((3, 3, 9), "runs/mine")
    drawn = lengths.draw(Generator(Philox(key=1)), 3000)
    assert set(drawn) == {3, 9}
    assert lengths.mean == 5.0
    assert np.mean(drawn) == pytest.approx(5.0, abs=0.25)


def test_a_measured_speed_is_linear_in_the_seconds_of_a_token() -> None:
    speed = MeasuredSpeed(rows=(1, 4, 10), seconds=(0.01, 0.016, 0.04))
    assert [1 / speed.each(rows) for rows in (1, 2, 4, 7, 10, 20)] == near([0.01, 0.012, 0.016, 0.028, 0.04, 0.08])
    assert MeasuredSpeed(rows=(2, 4), seconds=(0.01, 0.016)).each(1) == near(100.0)


def test_a_server_counts_what_it_has_to_do() -> None:
    server = Server(RooflineSpeed(10.0, 10.0), slots=2)
    assert server.next_end() == math.inf
    server.add(5, [30, 10, 20])
    assert (server.load, server.remaining_tokens, server.next_end()) == (3, 60, 2.0)
    server.advance(1.0)
    assert (server.remaining_tokens, server.has_room(1)) == (50.0, False)
    assert server.crash(4.0) == [5]
    assert (server.load, server.down_until, server.generated_tokens) == (0, 5.0, 10.0)


@pytest.mark.parametrize(("whole", "opened"), [(True, [2, 3, 2]), (False, [3, 3, 2])])
def test_a_request_begins_as_a_whole_or_in_parts(whole: bool, opened: list[int]) -> None:
    server = Server(RooflineSpeed(10.0, 10.0), slots=3, whole_requests=whole)
    server.add(0, [10, 10])
    server.add(1, [40, 40])
    found = [len(server.open)]
    for _ in range(2):
        server.advance(server.next_end())
        server.end_first()
        found.append(len(server.open))
    assert found == opened
