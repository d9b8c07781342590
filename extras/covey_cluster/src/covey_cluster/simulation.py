"""Discrete-event simulation of a cluster: servers generate groups of completions, a trainer trains on them in order.

It predicts the throughput of a run with stragglers, the few long completions that the others of a step wait for. What
is given to it can be measured or computed: the lengths of completions, a server's tokens/s by the number of its
completions, the trainer's tokens/s, and the seconds of handing the weights to the servers.

Events are the end of a completion, the ends of an update and of the handover of its weights, the crash and the return
of a server. A library for discrete-event simulation (simpy) would not make this shorter: completions share a server, so
each end moves all other ends of that server, and a library's timeouts would be cancelled and set again at every event.

Group g belongs to step g // prompts, and step t trains exactly the groups of step t. A group may begin when at most
`staleness` updates will be missing from the weights when it is trained: g // prompts <= version + staleness. So the age
of every group is at most `staleness` by construction, and no group is thrown away.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from numpy.random import Generator, Philox

from covey.config import ConfigError
from covey_cluster.lengths import Lengths
from covey_cluster.servers import Server, Speed

MOST_EVENTS = 3_000_000
CRASHES = 1 << 63  # key of the random numbers that choose servers; those of lengths are keyed by the group


@dataclass(frozen=True)
class Workload:
    """What a run samples."""

    lengths: Lengths
    prompts: int  # groups of a step
    group_size: int
    steps: int = 30
    seed: int = 0

    def group(self, number: int) -> list[int]:
        """The lengths of a group, the same in every simulation with this seed."""
        generator = Generator(Philox(key=[self.seed, number]))
        return self.lengths.draw(generator, self.group_size)


@dataclass(frozen=True)
class Cluster:
    """Servers and a trainer."""

    servers: int
    slots: int  # completions of a server at a time
    speed: Speed
    trained_tokens_per_second: float
    weights_seconds: float = 0.0  # from the end of an update to new weights on all servers
    whole_requests: bool = False  # see `Server`
    balances: bool = False  # a group waits for the server with the fewest completions; else it is sent to its own
    crash_every_seconds: float = math.inf  # a random server crashes at every multiple of this
    restart_seconds: float = 180.0


@dataclass(frozen=True)
class Schedule:
    """When groups may begin.

    With a barrier the servers generate one step at a time: a step begins when the one before is complete, and weights
    are handed over when no group is open. Without, groups begin as soon as there is room, and weights change under
    groups that are open.
    """

    name: str
    staleness: int
    has_barrier: bool


SYNCHRONOUS = Schedule("synchronous", 0, has_barrier=True)
ONE_AHEAD = Schedule("one step ahead", 1, has_barrier=True)


def fifo(staleness: int) -> Schedule:
    """Continuous sampling with at most this age: groups are trained strictly in the order in which they began."""
    return Schedule(f"continuous, S = {staleness}", staleness, has_barrier=False)


@dataclass(frozen=True)
class Outcome:
    """Result of a simulation. Fractions are of all seconds, from the first group to the end of the last update."""

    seconds: float
    steps: int
    ages: tuple[int, ...]  # of every trained group, in updates between its first token and its training
    trained_tokens: int
    lost_tokens: float  # generated and lost in crashes
    unused_tokens: float  # generated for later steps
    generated_tokens: float
    trainer_busy: float
    servers_busy: float  # mean over the servers

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens a second."""
        return self.trained_tokens / self.seconds


def simulate(workload: Workload, cluster: Cluster, schedule: Schedule) -> Outcome:
    """Simulate the steps of a run.

    Raises:
        ConfigError: if a server has too few slots for a request that must begin as a whole, or if groups never end.
    """
    if cluster.slots < (workload.group_size if cluster.whole_requests else 1):
        raise ConfigError(f"a server's {cluster.slots} slots are too few for a group of {workload.group_size}")
    return _Simulation(workload, cluster, schedule).run()


class _Group(NamedTuple):
    lengths: list[int]
    version: int  # of the weights when it was begun


@dataclass
class _Trainer:
    """The phases of the trainer: idle, training a step, then waiting for and handing over its weights."""

    version: int = 0  # finished steps
    training_until: float = math.inf
    weights_until: float = math.inf
    has_weights: bool = False  # an update is finished and its weights are not yet on their way
    busy_seconds: float = 0.0

    @property
    def is_idle(self) -> bool:
        return self.training_until == self.weights_until == math.inf and not self.has_weights


@dataclass
class _Simulation:
    workload: Workload
    cluster: Cluster
    schedule: Schedule
    now: float = 0.0
    created: int = 0  # groups that may begin
    waiting: deque[int] = field(default_factory=deque)  # of them, without a server
    groups: dict[int, _Group] = field(default_factory=dict)  # begun and not trained
    missing: dict[int, int] = field(default_factory=dict)  # open group -> completions that have not ended
    ages: list[int] = field(default_factory=list)
    trained_tokens: int = 0
    lost_tokens: float = 0.0
    crashes: int = 0
    trainer: _Trainer = field(default_factory=_Trainer)

    def __post_init__(self) -> None:
        cluster = self.cluster
        self.servers = [Server(cluster.speed, cluster.slots, cluster.whole_requests) for _ in range(cluster.servers)]
        self.ends = [math.inf] * cluster.servers  # `next_end` of each server
        self.random = Generator(Philox(key=[self.workload.seed, CRASHES]))

    def run(self) -> Outcome:
        for _ in range(MOST_EVENTS):
            if self.trainer.version == self.workload.steps:
                return self._outcome()
            self._create_groups()
            self._place_groups()
            self._start_training()
            self._hand_over_weights()
            self._next_event()
        raise ConfigError(
            "the simulated run does not end: its servers crash before groups are complete, or it has too many groups; "
            "raise --crash-every, or lower --simulated-steps"
        )

    def _create_groups(self) -> None:
        """Release the groups that may begin now."""
        prompts = self.workload.prompts
        while True:
            step = self.created // prompts
            is_early = step > self.trainer.version + self.schedule.staleness
            begins_step = self.created % prompts == 0
            if is_early or (self.schedule.has_barrier and begins_step and (self.waiting or self.missing)):
                return
            self.waiting.append(self.created)
            self.created += 1

    def _place_groups(self) -> None:
        """Send groups to servers.

        Without balancing, group g of a step is sent at once to server g modulo their number, as `RemoteGenerator` does,
        and waits there.
        """
        while self.waiting:
            up = [number for number, server in enumerate(self.servers) if server.down_until <= self.now]
            if not up:
                return
            number = up[self.waiting[0] % self.workload.prompts % len(up)]
            if self.cluster.balances:
                number = min(up, key=lambda number: self.servers[number].load)
                if not self.servers[number].has_room(self.workload.group_size):
                    return
            self._begin(self.waiting.popleft(), number)

    def _begin(self, group: int, number: int) -> None:
        self.groups[group] = _Group(self.workload.group(group), self.trainer.version)
        lengths = self.groups[group].lengths
        self.missing[group] = len(lengths)
        self.servers[number].advance(self.now)
        self.servers[number].add(group, lengths)
        self.ends[number] = self.servers[number].next_end()

    def _step_groups(self) -> range:
        """The groups of the step that is trained next."""
        first = self.trainer.version * self.workload.prompts
        return range(first, first + self.workload.prompts)

    def _start_training(self) -> None:
        if not self.trainer.is_idle:
            return
        step = self._step_groups()
        if any(group in self.missing or group not in self.groups for group in step):
            return
        tokens = sum(sum(self.groups[group].lengths) for group in step)
        self.ages += [self.trainer.version - self.groups[group].version for group in step]
        self.trained_tokens += tokens
        seconds = tokens / self.cluster.trained_tokens_per_second
        self.trainer.busy_seconds += seconds
        self.trainer.training_until = self.now + seconds

    def _hand_over_weights(self) -> None:
        if self.trainer.has_weights and not (self.schedule.has_barrier and (self.waiting or self.missing)):
            self.trainer.has_weights = False
            self.trainer.weights_until = self.now + self.cluster.weights_seconds

    def _next_event(self) -> None:
        """Go on to the next event and apply it."""
        trainer = self.trainer
        returns = min((one.down_until for one in self.servers if one.down_until > self.now), default=math.inf)
        first_end = min(self.ends)
        crash = self.cluster.crash_every_seconds * (self.crashes + 1)
        self.now = min(first_end, trainer.training_until, trainer.weights_until, crash, returns)
        if self.now == trainer.weights_until:
            trainer.weights_until = math.inf
            for group in self._step_groups():
                del self.groups[group]
            trainer.version += 1
        elif self.now == trainer.training_until:
            trainer.training_until = math.inf
            trainer.has_weights = True
        elif self.now == first_end:
            self._end_completion(self.ends.index(first_end))
        elif self.now == crash:
            self._crash()

    def _end_completion(self, number: int) -> None:
        server = self.servers[number]
        server.advance(self.now)
        group = server.end_first()
        self.ends[number] = server.next_end()
        self.missing[group] -= 1
        if not self.missing[group]:
            del self.missing[group]

    def _crash(self) -> None:
        """A random server loses its groups, which begin again elsewhere, before all others."""
        self.crashes += 1
        server = self.servers[number := int(self.random.integers(len(self.servers)))]
        if server.down_until > self.now:
            return
        server.advance(self.now)
        remaining = server.remaining_tokens
        groups = server.crash(self.cluster.restart_seconds)
        self.ends[number] = math.inf
        self.lost_tokens += sum(sum(self.groups[group].lengths) for group in groups) - remaining
        for group in groups:
            del self.groups[group], self.missing[group]
        self.waiting.extendleft(reversed(groups))

    def _outcome(self) -> Outcome:
        for server in self.servers:
            server.advance(self.now)
        begun = sum(sum(group.lengths) for group in self.groups.values())
        return Outcome(
            seconds=self.now,
            steps=self.workload.steps,
            ages=tuple(self.ages),
            trained_tokens=self.trained_tokens,
            lost_tokens=self.lost_tokens,
            unused_tokens=begun - sum(server.remaining_tokens for server in self.servers),
            generated_tokens=sum(server.generated_tokens for server in self.servers),
            trainer_busy=self.trainer.busy_seconds / self.now,
            servers_busy=sum(server.busy_seconds for server in self.servers) / self.now / len(self.servers),
        )
