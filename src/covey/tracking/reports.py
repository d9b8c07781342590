"""Reports of `covey eval`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.config import RunError
from covey.config.fields import plural
from covey.tracking.score_kinds import ScoreKind


def return_report(result: dict[str, Any], expected: float | None) -> str:
    """The mean return with its 95 % interval, the recipe's expected return, and the path of the picture."""
    interval = "no interval from one episode"
    if result["low"] is not None:
        interval = f"95 % interval {result['low']:.1f} to {result['high']:.1f}"
    lines = [f"mean return {result['score']:.1f} ({interval}) over {plural(result['count'], 'episode')}"]
    if expected is not None:
        lines.append(f"expected {expected:g}: {'reached' if result['score'] >= expected else 'not reached'}")
    if result.get("picture"):
        lines.append(f"a picture of one episode is in {result['picture']}")
    return "\n".join(lines)


def score_report(scores: Sequence[Sequence[float]], kind: ScoreKind) -> str:
    """The mean score of one answer per problem, or pass@k or best@k of several, with 95 % intervals over problems.

    Args:
        scores: for every problem, the scores of its graded answers; problems without any are left out.
        kind: the kind of these scores.

    Raises:
        RunError: if nothing was scored.
    """
    scores = [problem for problem in scores if problem]
    count, samples = len(scores), min((len(problem) for problem in scores), default=0)
    if not samples:
        raise RunError("no problem was scored, so there is nothing to report")
    if max(len(problem) for problem in scores) == 1:
        result = kind.estimate([problem[0] for problem in scores])
        return f"{kind.name} {kind.write(result['score'])} ({kind.name_interval(result)}), {kind.describe_mean(result)}"
    lines = [f"{plural(count, 'problem')}, {plural(samples, 'answer')} each (95 % interval over problems)"]
    for k in [k for k in (2**i for i in range(samples.bit_length())) if k < samples] + [samples]:
        result = kind.estimate_best([kind.best_at_k(problem, k) for problem in scores])
        lines.append(f"  {f'{kind.best_of}@{k}':<9} {kind.write_interval(result)}")
    return "\n".join(lines)
