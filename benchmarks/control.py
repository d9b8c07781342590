"""Times covey on CartPole-v1 beside stable-baselines3's PPO and beside the articles' own way of training.

    .venv/bin/python benchmarks/bench.py control                 the whole comparison, about 10 minutes on two cores
    .venv/bin/python benchmarks/bench.py control --seeds 1 --rounds 1     a short one

First: seconds of training until 20 greedy episodes have a mean return of 475, over seeds. Imports, set-up, one warm-up
update and the tests are nobody's time; `trial.py` is the test. The contestants take turns seed by seed, each in a
process of its own, so that a slow minute of the machine hits all of them. Then: what a training step costs by the
number of environments and of their steps, and how fast rollouts are collected. Last: environment steps a second of PPO
training by kind of policy (plain, with action masks, with a memory, on pictures), beside stable-baselines3,
sb3-contrib and PufferLib with the same rollouts, passes, minibatches and layers, and one thread each. Results go to
benchmarks/results/.

    .venv/bin/python benchmarks/bench.py control --contestants --rounds 0      the kinds of policies alone
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from peers import PUFFERLIB, RESULTS, peer_version, peers_python, puffer_python, run_contestant
from rich.console import Console
from rich.table import Table

from covey.runtime.device import environment

ENVIRONMENTS = (8, 16, 32, 64, 128, 256, 512, 1024)
FRAGMENT_STEPS = (32, 64, 128, 256, 512)  # the first, as in the tuned settings, where environments vary
FIXED_ENVIRONMENTS = 64  # where the number of steps varies
PEERS = ("sb3_tuned", "sb3_default", "articles")
OURS = ("covey_grpo", "covey_ppo")
TITLES = {
    "covey_grpo": "covey GRPO",
    "covey_ppo": "covey PPO",
    "sb3_tuned": "SB3 PPO, tuned",
    "sb3_default": "SB3 PPO, defaults",
    "articles": "articles' own way",
}

# PPO's rollouts, passes and network, for all sides. `memory` is a GRU of covey and an LSTM of the others; PufferLib's
# begins anew with every fragment and goes on across the ends of episodes. Pictures go through NatureCNN and a layer of
# 512, which the actor and the critic of the others share; those of covey have a network each. PufferLib has no masks.
SMALL = {
    "environments": 32,
    "steps": 64,
    "epochs": 4,
    "minibatches": 4,
    "hidden": [64, 64],
    "memory": 0,
    "masks": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {**SMALL, "id": "CartPole-v1"},
    "action masks": {**SMALL, "id": "Taxi-v4", "masks": True},
    "memory": {**SMALL, "id": "CartPole-v1", "memory": 64},
    "pictures": {**SMALL, "id": "pixels:Pixels-v0", "environments": 8, "steps": 32, "epochs": 2, "hidden": [512]},
}

PEERS_OF_KINDS = {"sb3": "stable-baselines3, sb3-contrib", "puffer": "PufferLib"}

Outcome = dict[str, Any]


@dataclass(frozen=True)
class ComparedRecipe:
    script: str
    python: str
    work: dict[str, Any]


def main(options: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.py control", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--contestants", nargs="*", choices=TITLES, default=list(TITLES))
    parser.add_argument("--rounds", type=int, default=3, help="of the costs by size; 0 leaves them out")
    parser.add_argument("--kinds", type=int, default=3, help="rounds of the kinds of policies; 0 leaves them out")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of training for the articles' own way")
    parser.add_argument("--episodes", type=int, default=1000, help="the same in episodes")
    parser.add_argument(
        "--output", type=Path, default=None, help="a JSON file; default: a new one in benchmarks/results/"
    )
    arguments = parser.parse_args(options)
    console = Console()
    limits = {"limit_seconds": arguments.limit, "limit_episodes": arguments.episodes}
    threads = choose_threads() if arguments.contestants or arguments.rounds else {}
    outcomes = take_turns(make_contestants(arguments.contestants, threads, limits), arguments.seeds)
    reach = {name: summarise(found) for name, found in outcomes.items()}
    ratios = compare(outcomes)
    if outcomes:
        show_reach(console, reach, ratios, threads, limits)
    sizes = measure_sizes(arguments.rounds, threads["tuned"]["chosen"]) if arguments.rounds else None
    if sizes:
        show_sizes(console, sizes)
    kinds = measure_kinds(arguments.kinds) if arguments.kinds else None
    if kinds:
        show_kinds(console, kinds)
    record = {
        "seconds_to_475": reach,
        "times_faster": ratios,
        "by_seed": outcomes,
        "articles_limits": limits,
        "sb3_threads": threads,
        "by_size": sizes,
        "by_kind": kinds,
        "environment": environment(torch.device("cpu"), torch.float32) | {"gymnasium": version("gymnasium")},
        "peers": {"stable-baselines3": peer_version("stable_baselines3"), "gymnasium": peer_version("gymnasium")}
        | {"pufferlib": PUFFERLIB},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    output = arguments.output or RESULTS / f"control-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    print(f"written to {output}")


def choose_threads() -> dict[str, dict[str, Any]]:
    """For each setting of stable-baselines3: training steps a second with 1 and 2 torch threads, and the better one."""
    print("threads for stable-baselines3 ...", flush=True)
    rates = run_contestant("control_sb3", peers_python(), {"measure": "threads"})
    return {
        setting: {"steps_per_second": rates[setting], "chosen": int(max(rates[setting], key=rates[setting].get))}
        for setting in ("default", "tuned")
    }


def make_contestants(names: list[str], threads: dict[str, Any], limits: dict[str, Any]) -> dict[str, ComparedRecipe]:
    """What each is told; the seed comes later."""
    peer = peers_python()
    if not names:
        return {}
    tuned, default = threads["tuned"]["chosen"], threads["default"]["chosen"]
    everybody = {
        "covey_grpo": ComparedRecipe("control_covey", sys.executable, {"measure": "reach", "recipe": "cartpole_grpo"}),
        "covey_ppo": ComparedRecipe("control_covey", sys.executable, {"measure": "reach", "recipe": "cartpole_ppo"}),
        "sb3_tuned": ComparedRecipe("control_sb3", peer, {"measure": "reach", "tuned": True, "threads": tuned}),
        "sb3_default": ComparedRecipe("control_sb3", peer, {"measure": "reach", "tuned": False, "threads": default}),
        "articles": ComparedRecipe("control_articles", peer, limits),
    }
    return {name: everybody[name] for name in names}


def take_turns(contestants: dict[str, ComparedRecipe], seeds: int) -> dict[str, list[Outcome]]:
    """Every contestant once for each seed, one at a time."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in contestants}
    for seed in range(seeds):
        for name, contestant in contestants.items():
            found = run_contestant(contestant.script, contestant.python, {**contestant.work, "seed": seed})
            outcomes[name].append(found)
            end = "reached" if found["reached"] else "given up"
            print(
                f"seed {seed}: {name} {found['seconds']:.2f} s, {found['environment_steps']:,} steps, {end}", flush=True
            )
    return outcomes


def summarise(outcomes: list[Outcome]) -> dict[str, Any]:
    """Over seeds. A seed that did not get there counts as the longest; null where the median is one of them."""
    seconds = sorted(found["seconds"] if found["reached"] else math.inf for found in outcomes)
    middle = median(seconds)
    reached = [found for found in outcomes if found["reached"]]

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "seeds": len(outcomes),
        "reached": len(reached),
        "median_seconds": finite(middle),
        "low_seconds": finite(seconds[0]),
        "high_seconds": finite(seconds[-1]),
        "median_environment_steps": median(found["environment_steps"] for found in reached) if reached else None,
        "median_updates": median(found["updates"] for found in reached) if reached else None,
        "steps_per_second": median(found["environment_steps"] / found["seconds"] for found in outcomes),
        "peak_memory_bytes": median(found["peak_memory_bytes"] for found in outcomes),
    }


def compare(outcomes: dict[str, list[Outcome]]) -> dict[str, dict[str, dict[str, float]]]:
    """How many times faster: the peer's seconds by ours, seed by seed, for they ran one after the other.

    A peer that gave up counts with the seconds until then, so the ratio is a lower bound; one of ours that did counts
    as 0 times.
    """
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for ours in (name for name in OURS if name in outcomes):
        ratios[ours] = {}
        for peer in (name for name in PEERS if name in outcomes):
            pairs = list(zip(outcomes[ours], outcomes[peer], strict=True))
            values = [b["seconds"] / a["seconds"] if a["reached"] else 0.0 for a, b in pairs]
            ratios[ours][peer] = {
                "median": median(values),
                "low": min(values),
                "high": max(values),
                "lower_bounds": sum(not b["reached"] for _, b in pairs),
            }
    return ratios


def measure_sizes(rounds: int, threads: int) -> dict[str, Any]:
    """Costs by size, covey and stable-baselines3 in turn; medians over rounds, and log-log slopes."""
    work = {"counts": ENVIRONMENTS, "fragment_steps": FRAGMENT_STEPS, "fixed_count": FIXED_ENVIRONMENTS}
    ours, theirs = [], []
    for number in range(1, rounds + 1):
        print(f"costs by size, round {number} of {rounds} ...", flush=True)
        ours.append(run_contestant("control_covey", sys.executable, {"measure": "costs", **work}))
        collection = {"measure": "collection", "counts": ENVIRONMENTS, "threads": threads}
        theirs.append(run_contestant("control_sb3", peers_python(), collection))
    tables = {
        name: [
            {key: median(found[name][i][key] for found in ours) for key in ours[0][name][i]}
            for i in range(len(ours[0][name]))
        ]
        for name in ("grpo_by_environments", "ppo_by_environments", "ppo_by_steps")
    }
    rates = []
    for i, count in enumerate(ENVIRONMENTS):
        rows = [found["ppo_by_environments"][i] for found in ours]
        covey = [row["environment_steps"] / row["collection_seconds"] for row in rows]
        sb3 = [count * found["steps"] / found["seconds"][i] for found in theirs]
        ratio = [a / b for a, b in zip(covey, sb3, strict=True)]
        rates.append(
            {"covey": median(covey), "sb3": median(sb3), "ratio": median(ratio), "low": min(ratio), "high": max(ratio)}
        )
    return {
        "environments": ENVIRONMENTS,
        "fragment_steps": FRAGMENT_STEPS,
        "fixed_environments": FIXED_ENVIRONMENTS,
        "rounds": rounds,
        "threads_sb3": threads,
        **tables,
        "slopes": {
            "grpo_by_environments": slopes(ENVIRONMENTS, tables["grpo_by_environments"]),
            "ppo_by_environments": slopes(ENVIRONMENTS, tables["ppo_by_environments"]),
            "ppo_by_steps": slopes(FRAGMENT_STEPS, tables["ppo_by_steps"]),
        },
        "collection_steps_per_second": rates,
    }


def measure_kinds(rounds: int) -> dict[str, Any]:
    """Environment steps a second of training by kind of policy, covey and its peers in turn, and its ratios to them."""
    sides = {
        "covey": ("control_covey", sys.executable),
        "sb3": ("control_sb3", peers_python()),
        "puffer": ("control_puffer", puffer_python()),
    }
    rates: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    for number in range(1, rounds + 1):
        print(f"kinds of policies, round {number} of {rounds} ...", flush=True)
        for kind, work in KINDS.items():
            for side, (script, python) in sides.items():
                if side == "puffer" and work["masks"]:
                    continue
                found = run_contestant(script, python, {"measure": "kind", **work})
                rates[kind].setdefault(side, []).append(found["environment_steps"] / found["seconds"])
    kinds = {}
    for kind, found in rates.items():
        kinds[kind] = {side: {"steps_per_second": median(values)} for side, values in found.items()}
        for side in PEERS_OF_KINDS:
            if side in found:
                ratio = [a / b for a, b in zip(found["covey"], found[side], strict=True)]
                kinds[kind][side] |= {"ratio": median(ratio), "low": min(ratio), "high": max(ratio)}
    return kinds


def slopes(sizes: Sequence[int], rows: list[dict[str, float]]) -> dict[str, float]:
    """Of log seconds over log size, by least squares: 1 is linear, below 1 grows more slowly than the size."""

    def slope(key: str, first: int) -> float:
        return float(np.polyfit(np.log(sizes[first:]), np.log([row[key] for row in rows[first:]]), 1)[0])

    half = len(sizes) // 2
    return {
        "sampling": slope("sampling_seconds", 0),
        "step": slope("step_seconds", 0),
        "sampling_upper_half": slope("sampling_seconds", half),
        "step_upper_half": slope("step_seconds", half),
    }


def show_reach(
    console: Console, reach: dict[str, Any], ratios: dict[str, Any], threads: dict[str, Any], limits: dict[str, Any]
) -> None:
    """Seconds to the goal, and how many times faster covey is."""
    seeds = next(iter(reach.values()))["seeds"]
    table = Table(title=f"CartPole-v1: seconds of training to a mean return of 475, median of {seeds} seeds")
    for column in ("", "reached", "seconds", "range", "steps", "updates", "steps/s"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in reach.items():
        middle, low, high = (
            "never" if row[key] is None else f"{row[key]:.2f}"
            for key in ("median_seconds", "low_seconds", "high_seconds")
        )
        steps, updates = (
            "" if row[key] is None else f"{row[key]:,.0f}" for key in ("median_environment_steps", "median_updates")
        )
        table.add_row(
            TITLES[name],
            f"{row['reached']} of {seeds}",
            middle,
            f"{low} to {high}",
            steps,
            updates,
            f"{row['steps_per_second']:,.0f}",
        )
    console.print(table)
    console.print(
        "covey: the recipes cartpole_grpo and cartpole_ppo; SB3: stable-baselines3; steps are of the environment. "
        "Tested after an update, at least 256 environment steps apart, for everybody; tests, imports, set-up and one "
        f"warm-up update are not counted. SB3 has the better of 1 and 2 torch threads: "
        f"{threads['tuned']['chosen']} (tuned), {threads['default']['chosen']} (defaults). The articles' own way is "
        f"given up after {limits['limit_seconds']:g} s of training or {limits['limit_episodes']:,} episodes."
    )
    faster = Table(title="how many times faster covey is, seed by seed (lowest to highest)")
    for column in ("", *(TITLES[name] for name in ratios)):
        faster.add_column(column, justify="right" if column else "left")
    for peer in (name for name in PEERS if name in reach and ratios):
        cells = []
        for ours in ratios:
            row = ratios[ours][peer]
            bound = "at least " if row["lower_bounds"] else ""
            cells.append(f"{bound}{row['median']:.1f} ({row['low']:.1f} to {row['high']:.1f})")
        faster.add_row(f"than {TITLES[peer]}", *cells)
    console.print(faster)


def show_sizes(console: Console, sizes: dict[str, Any]) -> None:
    """Costs by size, and what collection makes of them."""
    costs = {
        "grpo_by_environments": ("GRPO by environments (one episode each)", "environments"),
        "ppo_by_environments": (f"PPO by environments ({sizes['fragment_steps'][0]} steps each)", "environments"),
        "ppo_by_steps": (f"PPO by steps of {sizes['fixed_environments']} environments", "fragment_steps"),
    }
    for name, (title, axis) in costs.items():
        slope = sizes["slopes"][name]
        table = Table(title=f"cost of a training step, {title}")
        for column in (
            axis.replace("fragment_steps", "steps each"),
            "steps",
            "sampling",
            "whole step",
            "sampling, each",
            "whole, each",
        ):
            table.add_column(column, justify="right")
        for size, row in zip(sizes[axis], sizes[name], strict=True):
            steps, sampling, whole = row["environment_steps"], row["sampling_seconds"], row["step_seconds"]
            shares = [f"{seconds / steps * 1e6:.1f} µs" for seconds in (sampling, whole)]
            table.add_row(f"{size:,}", f"{steps:,.0f}", f"{sampling * 1e3:.1f} ms", f"{whole * 1e3:.1f} ms", *shares)
        console.print(table)
        console.print(
            f"log-log slope: sampling {slope['sampling']:.2f} (upper half {slope['sampling_upper_half']:.2f}), whole "
            f"step {slope['step']:.2f} (upper half {slope['step_upper_half']:.2f}); 1 is linear\n"
        )
    table = Table(title="environment steps a second while collecting for PPO, values and advantages included")
    for column in ("environments", "covey", "stable-baselines3", "ratio", "range"):
        table.add_column(column, justify="right")
    for count, row in zip(sizes["environments"], sizes["collection_steps_per_second"], strict=True):
        spread = f"{row['low']:.1f} to {row['high']:.1f}"
        table.add_row(f"{count:,}", f"{row['covey']:,.0f}", f"{row['sb3']:,.0f}", f"{row['ratio']:.1f}", spread)
    console.print(table)


def show_kinds(console: Console, kinds: dict[str, Any]) -> None:
    """Environment steps a second of training, by kind of policy."""
    table = Table(title="environment steps a second of PPO training by kind of policy")
    for column in ("", "covey", *(column for title in PEERS_OF_KINDS.values() for column in (title, "ratio"))):
        table.add_column(column, justify="right" if column else "left")
    for kind, row in kinds.items():
        cells = [f"{row['covey']['steps_per_second']:,.0f}"]
        for side in PEERS_OF_KINDS:
            if found := row.get(side):
                ratio = f"{found['ratio']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
                cells += [f"{found['steps_per_second']:,.0f}", ratio]
            else:
                cells += ["", ""]
        table.add_row(kind, *cells)
    console.print(table)
