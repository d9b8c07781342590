"""The model card (README.md) of an exported run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from covey.config import RunConfig
from covey.config.files import read_below
from covey.config.model_sources import ModelKind, Origin, find_origin, locate_model
from covey.config.recipe import config_from_dict, config_to_toml
from covey.experiment.advice import PYTHON_NAME, Launch, read_launch, start
from covey.llm.model.gguf import read_gguf_license
from covey.tracking.run_store import HELD_OUT_FOLDER, STOPPED_FILE, SUMMARY_FILE, read_metrics
from covey.tracking.score_kinds import SCORE, SCORE_KINDS

EMBEDDED_LICENCE = "apache-2.0"  # of SmolLM2, as its authors and the package with its weights declare it
MOST_BASES = 100  # runs in a chain, each trained from the one before
_LICENCE = re.compile(r"^license:[ \t]*[\"']?([\w.+-]{1,60})[\"']?[ \t]*$", re.MULTILINE)


def base_of(model: str) -> str:
    """The model from which a chain of runs began; `model` itself if it is from no run."""
    for _ in range(MOST_BASES):
        origin = find_origin(model)
        if origin is None:
            break
        model = origin.config_tables["model"]
    return model


def licence_of(model: str) -> str:
    """The licence that a model declares, in its model card or its GGUF file; empty if it is unknown."""
    source = locate_model(model)
    if source.kind is ModelKind.EMBEDDED:
        return EMBEDDED_LICENCE
    if source.kind is ModelKind.GGUF:
        return read_gguf_license(source.path)
    card = source.path / "README.md" if source.kind is ModelKind.FOLDER else None
    if card is None or not card.is_file():
        return ""
    _, _, front = card.read_text(encoding="utf-8", errors="replace")[:20_000].partition("---")
    found = _LICENCE.search(front.partition("\n---")[0])
    return found[1] if found else ""


def model_card(name: str, origin: Origin, licence: str) -> str:
    """The text of the card.

    Args:
        name: of the exported model.
        origin: the run, and the step of its checkpoint.
        licence: of the base model; empty if it is unknown.
    """
    config = config_from_dict(origin.config_tables)
    assert isinstance(config, RunConfig)
    launch = read_launch(origin.run_dir)
    step = origin.step or max((record["step"] for record in read_metrics(origin.run_dir)), default=0)
    base = _name_of(base_of(config.model))
    header = [f"license: {licence}"] if licence else []
    facts = {
        "base model": f"{base}{f' (licence: {licence})' if licence else ''}",
        "algorithm": config.algorithm,
        "recipe": launch.title if launch is not None else PYTHON_NAME,
        "step": f"{step:,} of {config.steps:,}",
        "seed": config.seed,
        "trained with": f"covey {version('covey')}",
    }
    return "\n".join(
        [
            "---",
            *header,
            "library_name: transformers",
            "pipeline_tag: text-generation",
            f"tags: [covey, {config.algorithm}, reinforcement-learning]",
            "---",
            "",
            f"# {name}",
            "",
            f"{base}, trained with reinforcement learning by covey.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {key} | {_cell(value)} |" for key, value in facts.items()),
            *_evaluations(origin.run_dir, step),
            *_command(launch, config),
            "",
            "## Settings of the run",
            "",
            "```toml",
            config_to_toml(replace(config, run_dir="")).strip(),
            "```",
            "",
        ]
    )


def _name_of(base: str) -> str:
    """A base model without the path to it."""
    return Path(base).name if Path(base).is_absolute() else base


def _cell(value: Any) -> str:
    """A value in a cell of a table."""
    return " ".join(str(value).split()).replace("|", "\\|")


def _evaluations(run_dir: Path, step: int) -> list[str]:
    """The table of the held-out scores before training and after the step, from the recorded answers."""
    kind = SCORE_KINDS.get(_score_kind(run_dir), SCORE)
    before, after = (_scores(run_dir, number) for number in (0, step))
    if not before and not after:
        return []
    count = max(map(len, (before | after).values()))
    rows = [
        f"| {limit} | {' | '.join(_interval(kind, scores.get(limit, [])) for scores in (before, after))} |"
        for limit in sorted(before | after)
    ]
    return [
        "",
        "## Evaluation",
        "",
        f"Held-out {kind.name} of greedy answers to {count:,} problems, with the 95 % interval.",
        "",
        f"| most tokens | before training | after step {step:,} |",
        "|---|---|---|",
        *rows,
    ]


def _interval(kind: Any, scores: list[float]) -> str:
    return kind.write_interval(kind.estimate(scores)) if scores else "not measured"


def _score_kind(run_dir: Path) -> str:
    """The kind of score that the run's summary names; empty if there is no summary."""
    for name in (SUMMARY_FILE, STOPPED_FILE):
        try:
            return str(json.loads(read_below(run_dir, name))["score_kind"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return ""


def _scores(run_dir: Path, step: int) -> dict[int, list[float]]:
    """The scores of the held-out answers after a step by token limit; empty if they were not recorded."""
    path = run_dir / HELD_OUT_FOLDER / f"step_{step:06d}.jsonl"
    scores: dict[int, list[float]] = {}
    try:
        for line in read_below(path.parent, path.name).splitlines():
            answer = json.loads(line)
            if answer["score"] is not None:
                scores.setdefault(int(answer["max_new_tokens"]), []).append(float(answer["score"]))
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return scores


def _command(launch: Launch | None, config: RunConfig) -> list[str]:
    """The command or the call that trains this model again."""
    if launch is None:
        return []
    kind = "sh" if launch.recipe else "python"
    return ["", "## Reproduce", "", f"```{kind}", start(launch, config, {}), "```"]
