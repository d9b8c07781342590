"""Throughput of conversations whose environment takes a time for each reply, relative to immediate replies.

    .venv/bin/python benchmarks/conversations.py        about two minutes on two cores

The embedded model writes several turns in each of 64 conversations, in groups of 8. Turns have no end token, so both
kinds of run write the same number of tokens, and their tokens and log-probabilities are compared bit by bit. The runs
alternate. "Decoded" are the tokens that the model wrote.
"""

import argparse
import heapq
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from statistics import median

import torch

from covey.llm.generation.generator import Completion, Continuation, GenerationRequest, GenerationSettings, RandomKey
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.model.gguf import EMBEDDED
from covey.llm.model.loading import load_model
from covey.llm.policy import LanguagePolicy
from covey.runtime.device import set_threads
from covey.runtime.rng import uniforms

Turns = dict[tuple[int, int], list[Completion]]


@dataclass
class Environment:
    """Replies to every turn but the last, `seconds` after it ended. The lengths of turns differ, as in real ones."""

    seconds: float
    turns: int
    turn_tokens: int
    reply_tokens: int
    done: Turns = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._due: list[tuple[float, int, Future[Continuation | None], Continuation | None]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._reply, daemon=True).start()

    def __call__(self, number: int, rollout: int, turn: Completion) -> Future[Continuation | None]:
        turns = self.done.setdefault((number, rollout), [])
        turns.append(turn)
        reply = None
        if len(turns) < self.turns:
            drawn = uniforms(0, len(turns), number, rollout, [0, 1])
            tokens = int(self.reply_tokens * (0.5 + drawn[0]))
            limit = int(self.turn_tokens * (0.5 + drawn[1]))
            reply = Continuation(tuple(1000 + 7 * place for place in range(tokens)), limit)
        future: Future[Continuation | None] = Future()
        if self.seconds:
            with self._changed:
                heapq.heappush(self._due, (time.monotonic() + self.seconds, id(future), future, reply))
                self._changed.notify()
        else:
            future.set_result(reply)
        return future

    def _reply(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                _, _, future, reply = heapq.heappop(self._due)
            future.set_result(reply)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.05, help="time of a reply")
    parser.add_argument("--turns", type=int, default=4, help="turns of a conversation")
    parser.add_argument("--turn-tokens", type=int, default=24, help="mean length of a turn")
    parser.add_argument("--reply-tokens", type=int, default=16, help="mean length of a reply")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    set_threads(args.threads)
    model = load_model(EMBEDDED, dtype=getattr(torch, args.dtype), device=torch.device("cpu")).module
    generator = LocalGenerator(LanguagePolicy(model))
    settings = GenerationSettings(args.turn_tokens, 1.0, frozenset(), 0)
    requests = [
        GenerationRequest(tuple(range(100, 140 + 5 * group)), 8, RandomKey(1, 1, group), settings) for group in range(8)
    ]

    def run(seconds: float, turns: int) -> tuple[float, Turns]:
        environment = Environment(seconds, turns, args.turn_tokens, args.reply_tokens)
        begin = time.perf_counter()
        failures = generator.converse(requests, environment, args.turns * 2 * (args.turn_tokens + args.reply_tokens))
        taken = time.perf_counter() - begin
        assert failures == [None] * len(requests)
        return sum(len(turn.tokens) for turns in environment.done.values() for turn in turns) / taken, environment.done

    run(0.0, 1)  # warm-up
    at_once, late = [], []
    for _ in range(args.repeats):
        rate, expected = run(0.0, args.turns)
        at_once.append(rate)
        rate, found = run(args.seconds, args.turns)
        late.append(rate)
        assert found == expected, "the time of the replies changed tokens or log-probabilities"
        print(f"{at_once[-1]:.1f} tokens/s decoded with replies at once, {rate:.1f} after {args.seconds} s", flush=True)
    print(f"ratio of the medians {median(late) / median(at_once):.3f}; the bits are the same")


if __name__ == "__main__":
    main()
