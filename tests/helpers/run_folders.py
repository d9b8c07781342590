"""Run folders without a training: their files are written in the format of the real ones, with chosen content."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.config import ControlConfig, EnvironmentConfig, RewardConfig, RunConfig
from covey.config.recipe import config_to_dict, write_config
from covey.config.tasks import ArithmeticConfig
from covey.tracking.run_store import encode

BEFORE = {"score": 0.25, "low": 0.1, "high": 0.4, "count": 40}
AFTER = {"score": 0.75, "low": 0.6, "high": 0.9, "count": 40}
LAUNCH = {"recipe": "my.toml", "fields": ["--steps", "4"], "recipe_steps": 9, "name": "run"}


def rollout(step: int, group: int, reward: float | None, **others: Any) -> dict[str, Any]:
    """A line of the file of rollouts."""
    advantage = None if reward is None else reward - 0.5
    line = {"step": step, "group": group, "prompt": f"What is {group} + {step}?", "columns": {"answer": group + step}}
    line |= {"text": f"It is {reward}.", "reward": reward, "reward_parts": {"numeric": reward, "format": 0.0}}
    line |= {
        "score": reward,
        "end": "stop",
        "decisions": 5,
        "version": step - 1,
        "advantage": advantage,
        "baseline": 0.5,
    }
    return line | others


def answer(step: int, problem: int, score: float, **others: Any) -> dict[str, Any]:
    """A line of the file of held-out answers."""
    line = {"step": step, "max_new_tokens": 8, "problem": problem, "prompt": f"Problem {problem}?", "columns": {}}
    line |= {"text": f"answer {problem} at {step}", "reward": score, "reward_parts": {"numeric": score}}
    return line | {"score": score, "tokens": 3, "truncated": False} | others


def usual_rollouts(steps: int) -> list[dict[str, Any]]:
    """Of each step three groups of four; the second group has the largest spread, the third none."""
    rewards = {0: (0.0, 0.0, 0.0, 1.0), 1: (0.0, 0.0, 1.0, 1.0), 2: (1.0, 1.0, 1.0, 1.0)}
    return [
        rollout(step, group, value) for step in range(1, steps + 1) for group, row in rewards.items() for value in row
    ]


def language_run(
    folder: Path,
    *,
    steps: int = 4,
    state: str = "finished",
    rollouts: Sequence[dict[str, Any]] | None = None,
    answers: Sequence[dict[str, Any]] = (),
    metrics: dict[str, float] | None = None,
    config: RunConfig | None = None,
    recipe: str = "my",
    checkpoints: Sequence[int] = (),
) -> Path:
    """The folder of a language model's run: finished, stopped or crashed."""
    task = {"task": ArithmeticConfig(), "rewards": (RewardConfig(name="numeric"),)}
    config = config or RunConfig(model="smollm2-135m", steps=steps, seed=7, **task)  # type: ignore[arg-type]
    lines = [
        {"step": step, "reward/mean": step / steps, "score/mean": step / steps, "entropy": 2.0 - step / steps,
         "time/step": 2.0, **({"eval/score": 0.5} if step == 2 else {}), **(metrics or {})}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    summary = {"domain": "language", "score_kind": "accuracy", "algorithm": "grpo", "seed": 7, "seconds": 65.0}
    summary |= {"recipe": recipe, "steps": steps, "peak_memory_bytes": 2**31, "machine": {"covey": "0.1.0"}}
    _write(folder, config, lines, usual_rollouts(steps) if rollouts is None else rollouts, answers)
    evaluation = {"max_new_tokens": 8, "before": BEFORE}
    _end(folder, state, summary, evaluation, steps, recipe, checkpoints)
    return folder


def control_run(folder: Path, *, steps: int = 4, state: str = "finished") -> Path:
    """The folder of an agent's run."""
    config = ControlConfig(environment=EnvironmentConfig("CartPole-v1"), steps=steps)
    lines = [
        {"step": step, "reward/mean": 20.0 * step, "score/mean": 20.0 * step, "environment/steps": 100 * step,
         "environment/episodes": 4 * step, "time/step": 0.1}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    rollouts = [
        rollout(step, 0, 10.0 * place, prompt=12345, columns={}, reward_parts={},
                text=f"{10 * place} steps, terminated")
        for step in range(1, steps + 1) for place in range(1, 5)
    ]  # fmt: skip
    summary = {"domain": "control", "score_kind": "return", "environment": "CartPole-v1", "expected_return": 475.0}
    summary |= {"recipe": "pole", "steps": steps, "seconds": 1.5, "seed": 0, "algorithm": "grpo"}
    _write(folder, config, lines, rollouts, ())
    evaluation = {"before": BEFORE | {"score": 9.0, "low": 8.0, "high": 10.0}}
    _end(folder, state, summary, evaluation, steps, "pole", ())
    return folder


def add_checkpoint(run_dir: Path, step: int, size: int = 1000) -> Path:
    """A complete checkpoint of a run, whose tensors are empty bytes."""
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    sizes = {"tensors.safetensors": size, "state.json": 2}
    (folder / "tensors.safetensors").write_bytes(bytes(size))
    (folder / "state.json").write_text("{}")
    files = {name: {"bytes": count, "sha256": ""} for name, count in sizes.items()}
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "step": step, "files": files}))
    return folder


def _write(folder: Path, config: Any, metrics: Any, rollouts: Sequence[Any], answers: Sequence[Any]) -> None:
    folder.mkdir(parents=True)
    write_config(config, folder / "config.toml")
    (folder / "covey.lock").write_text("")
    (folder / "metrics.jsonl").write_bytes(b"".join(encode(line) + b"\n" for line in metrics))
    for name, lines in (("rollouts", rollouts), ("held_out", answers)):
        for step in sorted({line["step"] for line in lines}):
            (folder / name).mkdir(exist_ok=True)
            own = [line for line in lines if line["step"] == step]
            (folder / name / f"step_{step:06d}.jsonl").write_bytes(b"".join(encode(line) + b"\n" for line in own))
    launch = {"launch": LAUNCH, "config": config_to_dict(config)}
    (folder / "origin.json").write_text(json.dumps(launch))


def _end(
    folder: Path, state: str, summary: dict[str, Any], evaluation: dict[str, Any], steps: int, recipe: str,
    checkpoints: Sequence[int],
) -> None:  # fmt: skip
    for step in checkpoints:
        add_checkpoint(folder, step)
    origin = json.loads((folder / "origin.json").read_text()) | {"recipe": recipe, "before": [evaluation["before"]]}
    (folder / "origin.json").write_text(json.dumps(origin))
    if state == "finished":
        after = AFTER if summary["domain"] == "language" else {"score": 500.0, "low": 490.0, "high": 500.0, "count": 40}
        (folder / "summary.json").write_bytes(encode(summary | {"evaluations": [evaluation | {"after": after}]}))
    elif state == "stopped":
        stopped = summary | {"state": "stopped", "step": steps, "evaluations": [evaluation]}
        (folder / "stopped.json").write_bytes(encode(stopped))
