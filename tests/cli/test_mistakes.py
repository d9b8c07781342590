"""Mistakes in a command are one line that names the place and the remedy, before anything is loaded or written."""

from pathlib import Path

import pytest

from covey.cli.main import main
from covey.config import ControlConfig, ControlEvaluationConfig, EnvironmentConfig
from covey.config.recipe import write_config
from helpers.run_folders import answer, control_run, language_run

GPU = "--ranks 2 --device-memory 80GiB"
SIMULATED = f"{GPU} --cluster --mean-tokens 30 --simulated-steps 2"
MISTAKES = [
    # misspelt words
    ("trian x", "there is no command 'trian' (did you mean 'train'?)"),
    ("Train x", "there is no command 'Train' (did you mean 'train'?)"),
    ("complete", "(did you mean 'completion'?)"),
    ("evaluate runs/x", "there is no command 'evaluate'"),
    (
        "frobnicate",
        "commands: train, iterate, sft, check, plan, eval, compare, diagnose, sample, export, watch, serve, ",
    ),
    ("cartpole_grpo", "cartpole_grpo is a recipe, not a command: write covey train cartpole_grpo"),
    ("my.toml", "my.toml is a recipe, not a command: write covey train my.toml"),
    ("--versio", "unknown option '--versio' (did you mean '--version'?) (see covey --help)"),
    ("-x train", "unknown option '-x'"),
    ("eval m --tsk arithmetic", "unknown option '--tsk' (did you mean '--task'?) (see covey eval --help)"),
    ("eval m --sampels=3", "unknown option '--sampels' (did you mean '--samples'?)"),
    ("compare a b --treshold 3", "unknown option '--treshold' (did you mean '--threshold'?)"),
    ("plan m --prompt_token 3", "unknown option '--prompt-token' (did you mean '--prompt-tokens'?)"),
    ("sample m hi --temperatur 1", "unknown option '--temperatur' (did you mean '--temperature'?)"),
    ("sample m hi --group-size 4", "unknown option '--group-size' (see covey sample --help)"),
    ("recipes --debgu", "unknown option '--debgu' (did you mean '--debug'?)"),
    ("completion tcsh", "choose from"),
    (
        "train family --targets q_proj, v_proj",
        "extra word 'v_proj': an option has one value, so write a list as --targets q_proj,v_proj, and a text",
    ),
    ("train family --digits 1 2 3", "so write a list as --digits 1,2,3, and"),
    ("train --seed 3 family cartpole_grpo", "extra word 'cartpole_grpo' (see covey train --help)"),
    ("eval --render m lookup", "extra word 'lookup' (see covey eval --help)"),
    ("eval m --task arithmetic lookup", "extra word 'lookup': an option has one value"),
    ("train family cartpole_grpo", "extra word 'cartpole_grpo' (see covey train --help)"),
    ("train family --seed=3 cartpole_grpo", "extra word 'cartpole_grpo' (see covey train --help)"),
    # covey eval
    ("eval smollm2-135m", "name a task, such as --task arithmetic"),
    ("eval smollm2-135m --task arithmetic --samples 4 --temperature 0", "4 greedy answers are all the same"),
    ("eval smollm2-135m --task arithmetic --samples 0", "--samples: must be at least 1"),
    ("eval smollm2-135m --task arithmetic --samples x", "argument --samples: must be an integer (is 'x')"),
    ("eval smollm2-135m --task arithmetic --temperature -1", "--temperature: must be at least 0"),
    ("eval smollm2-135m --task arithmetic --learning-rate 3", "an evaluation does not use learning_rate"),
    ("eval smollm2-135m --task arithmetic --numbers 3", "--numbers belongs to the task countdown"),
    ("eval smollm2-135m --task arithmetic --problems 0", "evaluation.problems must be at least 1"),
    ("eval smollm2-135m --task arithmetic --reward exakt", "(is 'exakt') (did you mean 'exact'?)"),
    # covey eval and covey sample of the other world
    ("eval run --task arithmetic", "does not use --task: leave it out"),
    ("eval run --max-new-tokens 3", "does not use --max-new-tokens: leave it out"),
    ("eval run --samples 1", "does not use --samples: leave it out"),
    ("eval run --group-size 3", "does not use --group-size: leave it out"),
    ("eval run --episodes 0", "evaluation.episodes must be at least 1"),
    ("eval run --episodes many", "--evaluation.episodes must be an integer"),
    ("eval run --seed -1", "seed must be at least 0"),
    ("eval smollm2-135m --task arithmetic --render", "--render is for the run folder of a recipe for control"),
    ("eval smollm2-135m --task arithmetic --episodes 3", "--episodes is for the run folder"),
    ("sample run hello", "trained an agent, no language model: see it act with covey eval run"),
    # covey sample
    ("sample smollm2-135m", "there is no prompt: give one, or --recipe"),
    ("sample smollm2-135m x --problem 2", "--problem is for samples without a PROMPT"),
    ("sample smollm2-135m x --columns {}", "--columns are for the environment of a PROMPT"),
    ("sample smollm2-135m x --environment calculator --columns [1]", "--columns must be an object in JSON"),
    ("sample smollm2-135m x --environment calculator --columns {", "--columns is not JSON"),
    ("sample smollm2-135m x --environment calculatr", "did you mean 'calculator'?"),
    ("sample smollm2-135m --recipe maze_grpo --environment none", "--environment none is for a PROMPT"),
    ("sample smollm2-135m --recipe cartpole_grpo", "trains no language model"),
    # options without effect
    ("sample smollm2-135m x --temperature 0 --top-k 5", "--top-k changes no greedy answer"),
    ("eval smollm2-135m --task arithmetic --top-p 0.9", "--top-p changes no greedy answer"),
    ("sample smollm2-135m x --min-new-tokens 64", "--min-new-tokens must be below --max-new-tokens, 64"),
    ("sample smollm2-135m x --top-p 0", "--top-p"),
    ("sample smollm2-135m x --stop=", "sampling.stop has an empty string"),
    # covey runs, covey show and covey report
    ("runs nowhere", "there is no folder nowhere"),
    ("runs runs/a/rollouts", "there is no run below runs/a/rollouts"),
    ("runs --state finish", "or crashed (is 'finish') (did you mean 'finished'?)"),
    ("runs --sort age", "argument --sort: invalid choice: 'age'"),
    ("runs --stat x", "unknown option '--stat' (did you mean '--state'?)"),
    ("runs export runs t.csv", "runs is not a covey run folder: name one of its runs, such as runs/d"),
    ("runs export runs/z t.csv", "there is no run folder runs/z: covey runs lists the runs"),
    ("runs export runs/a t.xlsx", "name a file that ends with .parquet, .jsonl or .csv"),
    ("runs export runs/a runs/a/config.toml", "name a file that ends"),
    ("runs export runs/d t.csv", "the run in runs/d has no rollouts to export"),
    ("runs prune --keep 0", "--keep: must be at least 1"),
    ("show runs/d", "the run in runs/d has no rollouts yet"),
    ("show runs/a --step 9", "no rollouts of step 9: it has those of 1 to 4"),
    ("show runs/a --step 0", "no rollouts of step 0"),
    ("show runs/a --group 5", "there is no group 5: the step has the groups 0 to 2"),
    ("show runs/a --best --worst", "--best and --worst are opposites"),
    ("show runs/a --best --group 1", "--group names one group, and --best searches for others"),
    ("show runs/a --held-out --failed", "held-out answers have no groups"),
    ("show runs/c --held-out", "has no held-out answers"),
    ("show runs/a --held-out --step 3", "no held-out answers after step 3: there are some after 0, 2, 4"),
    ("report runs/a -o runs/a/config.toml", "no report of covey, so it is not replaced"),
    ("report runs/a -o nowhere/x.html", "there is no folder nowhere"),
    ("report runs", "runs is not a covey run folder"),
    ("report", "the following arguments are required: RUN"),
    # covey plan
    ("plan smollm2-135m --ranks 3", "--ranks must be a power of two, got 3: give 2 or 4"),
    ("plan smollm2-135m --ranks 0", "--ranks: must be at least 1"),
    ("plan smollm2-135m --ranks two", "--ranks: must be an integer"),
    ("plan smollm2-135m --ranks 8192", "--ranks: must be at most 4096"),
    ("plan smollm2-135m --ranks 32", "32 shards are more than sampling.prompts_per_step = 16"),
    ("plan smollm2-135m --ranks 4 --shards 2", "4 ranks cannot divide cluster.shards = 2"),
    ("plan smollm2-135m --ranks 2 --shards 3", "cluster.shards must be a power of two"),
    ("plan smollm2-135m --ranks 2 --device-memory 80", "--device-memory must be a number and a unit"),
    ("plan smollm2-135m --ranks 2 --device-memory much", "--device-memory must be a number and a unit"),
    ("plan smollm2-135m --ranks 2 --algorithm grpo,ppo", "--ranks plans one algorithm at a time"),
    ("plan smollm2-135m --ranks 2 --node-link 0", "--node-link must be at least 0.001"),
    ("plan smollm2-135m --ranks 2 --devices-per-node 0", "--devices-per-node must be at least 1"),
    ("plan smollm2-135m --ranks 2 --flops-use 1.5", "--flops-use must be at most 1"),
    ("plan smollm2-135m --device-memory 80GiB", "--device-memory belongs to --ranks N"),
    ("plan smollm2-135m --cluster --mean-tokens 9", "--cluster needs the number of ranks that train: add --ranks N"),
    ("plan smollm2-135m --ranks 2 --sigma 1", "--sigma belongs to --cluster"),
    (f"plan smollm2-135m {GPU} --cluster", "--cluster needs the lengths of completions"),
    (f"plan smollm2-135m {SIMULATED} --sigma -1", "--sigma must be at least 0"),
    (f"plan smollm2-135m {SIMULATED} --mean-tokens many", "--mean-tokens must be a number"),
    (f"plan smollm2-135m {SIMULATED} --limit 20", "--limit 20 is below --mean-tokens 30"),
    (f"plan smollm2-135m {GPU} --cluster --mean-tokens 100", "--mean-tokens 100 is above the token limit of 64"),
    (f"plan smollm2-135m {SIMULATED} --lengths runs/none", "--lengths and --mean-tokens both say"),
    (f"plan smollm2-135m {GPU} --cluster --lengths runs/none", "runs/none holds no rollouts"),
    (f"plan smollm2-135m {SIMULATED} --sampler-devices 1,x", "--sampler-devices must be a list of integers"),
    (f"plan smollm2-135m {SIMULATED} --sampler-devices 0", "--sampler-devices must be at least 1"),
    (f"plan smollm2-135m {SIMULATED} --sampler-devices 3 --devices-per-server 2", "give 4, or set"),
    (f"plan smollm2-135m {SIMULATED} --crash-every 0.001 --restart 1", "does not end"),
    (
        "plan smollm2-135m --ranks 2 --device-memory 2GiB --cluster --mean-tokens 30",
        "no layout of the weights fits on 2 ranks",
    ),
    (f"plan smollm2-135m {SIMULATED} --sgima 1", "did you mean '--sigma'"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of all states below runs/, and the run of an agent."""
    folder = tmp_path_factory.mktemp("mistakes")
    answers = [answer(step, problem, float(problem == step)) for step in (0, 2, 4) for problem in range(6)]
    language_run(folder / "runs" / "a", answers=answers, checkpoints=(2, 4))
    language_run(folder / "runs" / "b", state="stopped")
    control_run(folder / "runs" / "c")
    language_run(folder / "runs" / "d", state="crashed", rollouts=())
    (folder / "run").mkdir()
    config = ControlConfig(
        environment=EnvironmentConfig("CartPole-v1"), run_dir="run", evaluation=ControlEvaluationConfig(episodes=20)
    )
    write_config(config, folder / "run" / "config.toml")
    return folder


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_line(
    words: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("covey_cluster.simulation.MOST_EVENTS", 3000)
    before = sorted(folder.rglob("*"))
    assert main(words.split()) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert sorted(folder.rglob("*")) == before
