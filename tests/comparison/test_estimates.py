"""Statistics of a comparison against `rliable`, and what is read from run folders against hand-made ones.

The constants marked "rliable" came from rliable 1.2.0 (arch 7.2.0, scipy 1.17.1, pandas 2.3.3; `pip install rliable
'pandas<3'` in an environment of its own) with the scores below:

    from rliable import library, metrics
    iqm = lambda s: np.array([metrics.aggregate_iqm(s)])
    improvement = lambda x, y: np.array([metrics.probability_of_improvement(x, y)])
    rng = np.random.RandomState(0)       # a fresh one for each call
    library.get_interval_estimates({"A": A[:, None]}, iqm, reps=50_000, random_state=rng)
    library.get_interval_estimates({"AB": (A[:, None], B[:, None])}, improvement, reps=50_000, random_state=rng)

Its own intervals move by as much as the tolerances here from one random state to the next.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from covey.comparison.estimates import (
    SeedRun,
    find_threshold,
    interquartile_mean,
    interquartile_mean_estimate,
    learning_curve,
    metric_curve,
    probability_of_improvement,
    read_seed_run,
    smoothed,
    trailing_mean,
)
from covey.comparison.report import (
    Comparison,
    draw_final_scores,
    draw_learning_curves,
    draw_metrics,
    findings,
    markdown_report,
    summarise,
)
from covey.config import ConfigError
from covey.tracking.wording import ACCURACY, CONTROL, SECONDS

A = np.array([500.0, 500.0, 487.3, 211.9, 500.0, 463.0, 498.8, 500.0, 9.4, 350.5])
B = np.array([500.0, 402.1, 377.7, 199.0, 500.0, 280.4, 310.2])


@pytest.mark.parametrize(
    ("scores", "value", "low", "high", "tolerance"),
    [  # rliable
        (A, 466.6, 318.26666667, 499.8, 2.5),
        (B, 374.08, 276.04, 460.84, 2.0),
    ],
)
def test_interquartile_mean_agrees_with_rliable(
    scores: np.ndarray, value: float, low: float, high: float, tolerance: float
) -> None:
    estimate = interquartile_mean_estimate(scores, draws=50_000)
    assert estimate.value == pytest.approx(value, rel=1e-8)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=tolerance)


def test_probability_of_improvement_agrees_with_rliable() -> None:
    estimate = probability_of_improvement(A, B, draws=50_000)
    assert estimate.value == pytest.approx(0.61428571, abs=1e-8)
    # 1 / 60: one more win or tie of the small sample
    assert (estimate.low, estimate.high) == pytest.approx((0.33571429, 0.88571429), abs=0.017)


def test_interquartile_mean_leaves_out_a_quarter_at_each_end() -> None:
    assert interquartile_mean([100, 1, 2, 3, 4, 5, 6, -100]) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert interquartile_mean([1, 2, 9]) == pytest.approx(4)
    with pytest.raises(ValueError, match="at least one"):
        interquartile_mean([])


def test_improvement_counts_ties_half_and_orders_the_infinite() -> None:
    assert probability_of_improvement([1, 1], [1, 1]).__dict__ == {"value": 0.5, "low": 0.5, "high": 0.5}
    never = -math.inf
    assert probability_of_improvement([-3.0, never], [never, never]).value == 0.75
    better, worse = probability_of_improvement(A, B, seed=2), probability_of_improvement(B, A, seed=2)
    assert better.value == pytest.approx(1 - worse.value)


def test_the_bootstrap_is_repeatable() -> None:
    assert interquartile_mean_estimate(A, seed=3) == interquartile_mean_estimate(A, seed=3)
    assert interquartile_mean_estimate(A, seed=3) != interquartile_mean_estimate(A, seed=4)


def make_run(returns: list[float], *, seed: int = 0, final: float = 500.0, slow: float = 1.0, **changes) -> SeedRun:  # type: ignore[no-untyped-def]
    """A run with 10 episodes and `slow` seconds a step."""
    steps = np.arange(1.0, len(returns) + 1)
    run = SeedRun(
        seed=seed,
        wording=CONTROL,
        spent={"episodes": 10 * steps, "environment steps": 1000 * steps, SECONDS: slow * steps},
        returns_S=np.array(returns, dtype=float),
        evaluations_S=np.full(len(returns), math.nan),
        final=final,
        final_count=100,
        peak_bytes=2**28,
        ending={},
    )
    return replace(run, **changes)


def test_trailing_mean_is_over_the_last_hundred_episodes() -> None:
    returns = [float(i) for i in range(1, 21)]
    assert trailing_mean(make_run(returns)) == pytest.approx(
        [np.mean(returns[max(0, end - 10) : end]) for end in range(1, 21)]
    )
    # a step counts by its episodes, and one without an episode changes nothing
    run = make_run([1.0, math.nan, 7.0])
    run.spent["episodes"][:] = [30, 30, 90]
    assert trailing_mean(run) == pytest.approx([1.0, 1.0, (30 * 1 + 60 * 7) / 90])
    run = make_run([math.nan, 5.0])
    run.spent["episodes"][:] = [0, 4]
    assert trailing_mean(run).tolist()[1] == 5.0
    assert math.isnan(trailing_mean(run)[0])


def test_threshold_is_the_first_evaluation_that_reaches_it() -> None:
    measured = np.array([math.nan, 300.0, math.nan, 480.0, math.nan, 490.0])
    run = make_run([500.0] * 6, slow=0.5, evaluations_S=measured, final=499.0)
    found = find_threshold(run, 475.0, evaluated=True)
    assert found.spent == {"episodes": 40.0, "environment steps": 4000.0, SECONDS: 2.0}
    assert found.kept
    assert not find_threshold(replace(run, final=474.0), 475.0, evaluated=True).kept
    fell = np.array([math.nan, 480.0, math.nan, 470.0, math.nan, 490.0])
    found = find_threshold(replace(run, evaluations_S=fell), 475.0, evaluated=True)
    assert (found.reached, found.kept) == (True, False)
    assert found.spent["episodes"] == 20


def test_threshold_without_evaluations_goes_by_training_and_by_the_end() -> None:
    run = make_run([0.0] * 5 + [500.0] * 15, final=500.0)
    assert find_threshold(run, 475.0, evaluated=False).spent["episodes"] == 150  # ten steps of 500
    never = find_threshold(make_run([10.0] * 5, final=10.0), 475.0, evaluated=False)
    assert (never.reached, never.kept, never.spent["episodes"]) == (False, False, math.inf)
    late = find_threshold(make_run([10.0] * 5, final=480.0), 475.0, evaluated=False)
    assert (late.reached, late.kept, late.spent["episodes"]) == (True, True, 50)


def test_smoothing_keeps_the_level_and_skips_steps_without_episodes() -> None:
    run = make_run([3.0, math.nan, 3.0, 3.0])
    spent, scores = smoothed(run.spent["episodes"], run.returns_S)
    assert spent.tolist() == [10, 30, 40]
    assert scores == pytest.approx([3, 3, 3])
    run = make_run([0.0, 9.0, 0.0, 0.0, 0.0])
    _, scores = smoothed(run.spent["episodes"], run.returns_S)
    assert scores == pytest.approx([0.0, 3.0, 3.0, 0.0, 0.0])


def test_a_seed_that_ended_keeps_its_last_value_in_the_curve() -> None:
    quick, slow = make_run([100.0] * 10, slow=1.0), make_run([0.0] * 10, slow=3.0)
    band = learning_curve([quick, slow], SECONDS)
    assert band is not None
    assert band.middle_P == pytest.approx(50.0)
    assert band.spent_P[-1] == pytest.approx(20.0)  # half of the seeds have ended there
    assert (band.low_P.min(), band.high_P.max()) == (0.0, 100.0)
    assert learning_curve([make_run([math.nan] * 3)], SECONDS) is None


def write_run(folder: Path, records: list[dict], score: float = 480.0, kind: str = "return") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    after = {"score": score, "low": score - 1, "high": score + 1, "count": 100}
    told = {"domain": "control" if kind == "return" else "language", "score_kind": kind}
    summary = told | {"peak_memory_bytes": 123, "evaluations": [{"before": after, "after": after}]}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_run_folder_is_read(tmp_path: Path) -> None:
    first = {"step": 1, "environment/episodes": 8, "environment/steps": 200, "time/step": 0.5, "score/mean": 25.0}
    second = {"step": 2, "environment/episodes": 8, "environment/steps": 500, "time/step": 0.25, "eval/score": 70.0}
    run = read_seed_run(write_run(tmp_path / "a", [first, second]), seed=3)
    assert (run.seed, run.wording, run.final, run.peak_bytes) == (3, CONTROL, 480.0, 123)
    assert run.spent["episodes"].tolist() == [8, 8]
    assert run.spent["environment steps"].tolist() == [200, 500]
    assert run.spent[SECONDS].tolist() == [0.5, 0.75]
    assert run.seconds_per_thousand == pytest.approx(1000 * 0.75 / 8)
    np.testing.assert_array_equal(run.returns_S, [25.0, math.nan])
    np.testing.assert_array_equal(run.evaluations_S, [math.nan, 70.0])

    records = [{"step": n, "decisions/sampled": 100, "time/step": 1.0, "score/mean": 0.5} for n in (1, 2)]
    language = read_seed_run(write_run(tmp_path / "b", records, score=0.5, kind="accuracy"), seed=0)
    assert (language.wording.domain, language.wording.kind) == ("language", ACCURACY)
    assert language.spent["tokens"].tolist() == [100, 200]

    (tmp_path / "a" / "summary.json").unlink()
    with pytest.raises(ConfigError, match="holds no finished run"):
        read_seed_run(tmp_path / "a", seed=3)


def compare_runs(count: int, **changes) -> Comparison:  # type: ignore[no-untyped-def]
    good = [make_run([500.0] * 20, seed=seed, final=490.0 + seed) for seed in range(count)]
    bad = [make_run([100.0] * 20, seed=seed, final=90.0 + seed, slow=2.0) for seed in range(count)]
    return Comparison("CartPole-v1", {"good": good, "bad": bad}, threshold=475.0, **changes)


def test_the_report_says_who_is_better_by_which_measure() -> None:
    comparison = compare_runs(10)
    summary = summarise(comparison)
    verdicts = {pair["measure"]: pair["verdict"] for pair in summary["pairs"]}
    assert verdicts == {
        "final return": "good is better",
        "episodes to 475": "good is better",
        "environment steps to 475": "good is better",
        "seconds of training to 475": "good is better",
        "seconds per 1,000 episodes": "good is better",
    }
    assert summary["recipes"]["good"]["worst"] == {"seed": 0, "score": 490.0}
    text = markdown_report(comparison, summary)
    assert "good reached 475 with 10 of 10 seeds and stayed there with 10" in text
    assert "bad reached 475 with 0 of 10 seeds" in text
    assert "| bad | 0 of 10 | 0 of 10 | never | never | never |" in text
    assert "too narrow" not in text


def test_less_is_better_for_what_is_spent() -> None:
    runs = {name: [make_run([500.0] * 9, seed=s, slow=slow) for s in range(5)] for name, slow in (("q", 1.0), ("s", 2))}
    pairs = {pair["measure"]: pair for pair in summarise(Comparison("X", runs, threshold=475.0))["pairs"]}
    assert pairs["final return"]["verdict"] == "no difference"
    assert pairs["episodes to 475"]["verdict"] == "no difference"
    assert pairs["seconds of training to 475"]["verdict"] == "q is better"
    assert pairs["seconds per 1,000 episodes"]["value"] == 1.0


def test_two_seeds_claim_nothing_and_three_are_told_what_they_are_worth() -> None:
    two = summarise(compare_runs(2))
    assert {pair["verdict"] for pair in two["pairs"]} == {"too few seeds to say"}
    text = markdown_report(compare_runs(2), two)
    assert "no difference is claimed from fewer than 3 seeds" in text
    assert "is better" not in text.replace("called better", "")
    assert not [line for line in findings(two) if " against " in line], "the caution is said once, not for each pair"
    three = markdown_report(compare_runs(3), summarise(compare_runs(3)))
    assert "completely apart in one of 10 comparisons" in three


def test_metrics_of_the_last_five_steps_are_listed(tmp_path: Path) -> None:
    def seed_run(name: str, seed: int, entropy: float, **others: float) -> SeedRun:
        records = [
            {"step": n, "decisions/sampled": 10, "time/step": 1.0, "reward/std": 1.0, "reward/proxy": n, **others}
            for n in range(1, 8)
        ]
        for record in records[-2:]:
            record["entropy"] = entropy  # a step without a value does not count
        return read_seed_run(write_run(tmp_path / name / str(seed), records, 0.5, "accuracy"), seed)

    runs = {
        "hot": [seed_run("hot", 0, 0.5, kl=0.25), seed_run("hot", 1, 1.5, kl=0.75)],
        "cold": [seed_run("cold", 0, 0.125)],
    }
    comparison = Comparison("arithmetic", runs)
    summary = summarise(comparison)
    assert summary["recipes"]["hot"]["ending"] == {"entropy": [0.5, 1.5], "kl": [0.25, 0.75], "reward/proxy": [5, 5]}
    text = markdown_report(comparison, summary)
    assert "| recipe | `entropy` | `kl` | `reward/proxy` |" in text
    assert "| hot | 1.00 (0.50 to 1.50) | 0.50 (0.25 to 0.75) | 5.00 (5.00 to 5.00) |" in text
    assert "| cold | 0.12 (0.12 to 0.12) |  | 5.00 (5.00 to 5.00) |" in text
    assert "last steps" not in markdown_report(compare_runs(3), summarise(compare_runs(3)))


def test_failures_stand_first_in_the_report() -> None:
    comparison = compare_runs(4, failures={"bad, seed 7": "the gradient was not finite"})
    text = markdown_report(comparison, summarise(comparison))
    assert "**bad, seed 7 did not finish**" in text
    assert text.index("did not finish") < text.index("reached 475")


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("threshold", [475.0, None])
def test_pictures_are_drawn_for_anything_that_may_happen(tmp_path: Path, threshold: float | None) -> None:
    runs = {
        "plain": [make_run([100.0, 300.0, 500.0], seed=s) for s in range(3)],
        "never scored": [make_run([math.nan] * 3, final=0.0)],
        "one step --group-size 16": [make_run([7.0])],
        "slow": [make_run(list(np.linspace(0, 500, 400)), slow=9.0)],
    }
    comparison = Comparison("CartPole-v1", runs, threshold=threshold)
    for draw in (draw_learning_curves, draw_metrics, draw_final_scores):
        path = draw(comparison, tmp_path / f"{draw.__name__}.png")
        assert path.read_bytes().startswith(b"\x89PNG")
    assert "NaN" not in json.dumps(summarise(comparison)).replace("Infinity", "")


@pytest.mark.slow
def test_language_models_are_told_in_their_own_words(tmp_path: Path) -> None:
    records = [{"step": n, "decisions/sampled": 5000, "time/step": 2.0, "score/mean": n / 10} for n in (1, 2, 3, 4)]
    runs = {
        name: [read_seed_run(write_run(tmp_path / name / str(s), records, score, "accuracy"), s) for s in range(3)]
        for name, score in (("long", 0.61), ("short", 0.25))
    }
    comparison = Comparison("arithmetic", runs, threshold=0.4)
    text = markdown_report(comparison, summarise(comparison))
    assert "| long | 3 | 61.0% | 61.0% (61.0% to 61.0%) |" in text
    assert "| recipe | reached | and stayed | training steps | tokens | seconds of training |" in text
    assert "| long | 3 of 3 | 3 of 3 | 4.0 (4.0 to 4.0) | 20,000 (20,000 to 20,000) | 8.0 (8.0 to 8.0) |" in text
    assert "the mean of 100 problems" in text
    assert draw_learning_curves(comparison, tmp_path / "curves.png").is_file()
    assert draw_final_scores(comparison, tmp_path / "final.png").is_file()


def test_the_picture_of_metrics_has_the_mean_and_the_interval_over_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def records(seed: int) -> list[dict[str, float]]:
        common = {"decisions/sampled": 5000, "time/step": 2.0, "score/mean": 0.5, "grad_norm": 1.0}
        return [{"step": step, "entropy": step + 10.0 * seed, **common} for step in range(1, 6)]

    runs = {
        name: [read_seed_run(write_run(tmp_path / name / str(s), records(s), 0.5, "accuracy"), s) for s in range(3)]
        for name in ("one", "two")
    }
    band = metric_curve(runs["one"], "entropy", "training steps")
    assert band is not None
    assert (band.spent_P[0], band.spent_P[-1]) == (1.0, 5.0)
    assert (band.middle_P[0], band.middle_P[-1]) == (11.0, 15.0)  # of the seeds 1, 11, 21 and 5, 15, 25
    assert (band.low_P[0], band.high_P[0]) == (1.0, 21.0)
    assert metric_curve(runs["one"], "kl", "training steps") is None
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    draw_metrics(Comparison("arithmetic", runs), tmp_path / "metrics.png")
    panels = {panel.get_title(loc="left"): panel for panel in figures[0].axes}
    assert list(panels) == [
        "Completions at the limit", "Entropy", "Completion length", "Gradient norm", "Groups with equal rewards",
        "Time of a step",
    ]  # fmt: skip
    assert len(panels["Entropy"].lines) == 2 * (3 + 1)
    assert len(panels["Entropy"].collections) == 2, "a band for each recipe"
    assert [text.get_text() for text in panels["Completions at the limit"].texts] == ["not measured"]
