"""Prompts that the model cannot take: found before training, or left out with a count, as the recipe says."""

import json
from dataclasses import replace

import pytest
from transformers import BloomConfig

from covey.config import ConfigError, DatasetConfig, EvaluationConfig, RunConfig, RunError, SamplingConfig
from covey.data import Start
from covey.experiment.llm import LLMBuilder
from covey.experiment.run import check, run
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.model.chat import Chat
from covey.llm.policy import LanguagePolicy
from covey.llm.sampler import LanguageSampler
from covey.llm.tasks import PromptDataset
from covey.llm.tasks.prompt_limit import FittingTask, PromptLimit, length_fault, refuse_first_starts
from helpers.examples import write_rows
from helpers.tiny_models import tiny_folder, tiny_model, tiny_tokenizer

LONG = "x" * 300  # the tiny model knows 256 positions, and its tokens are characters


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("model")))


def limit(new_tokens=6, *, drop=False, template=True):
    tokenizer = tiny_tokenizer()
    if not template:
        tokenizer.chat_template = None
    return PromptLimit(Chat(tokenizer, frozenset()), tiny_model().config, new_tokens, drop)


@pytest.mark.parametrize(("tokens", "new", "fits"), [(250, 6, True), (251, 6, False), (1, 255, True), (1, 256, False)])
def test_prompt_and_completion_fill_the_positions_and_no_more(tokens, new, fits):
    assert (length_fault(tiny_model().config, tokens, new) == "") == fits
    sampler = LanguageSampler(LocalGenerator(LanguagePolicy(tiny_model())), Chat(tiny_tokenizer(), frozenset()), 0, new)
    if not fits:
        with pytest.raises(ConfigError, match="positions"):
            sampler.sample([Start(0, "x" * tokens)], 2, step=1)


def test_no_limit_is_known_of_positions_from_alibi():
    assert length_fault(BloomConfig(), 10**6, 10**6) == ""


def rows(*places, count=24):
    return [{"prompt": LONG if i in places else f"{i}+1=", "answer": str(i + 1)} for i in range(count)]


def config(path, model, *, held_out="", policy="refuse", limits=()):
    return RunConfig(
        task=DatasetConfig(path=path, held_out_path=held_out),
        model=model,
        steps=2,
        threads=1,
        sampling=SamplingConfig(prompts_per_step=4, group_size=2, max_new_tokens=6, long_prompts=policy),
        evaluation=EvaluationConfig(problems=4, token_limits=limits),
    )


@pytest.mark.parametrize("chat", [False, True])
def test_a_line_that_is_too_long_is_named_by_check_and_before_a_run_loads_its_model(tmp_path, model, chat, monkeypatch):
    def asked(record):
        return {**record, "prompt": [{"role": "user", "content": record["prompt"]}]} if chat else record

    long = config(write_rows(tmp_path / "train.jsonl", map(asked, rows(17))), model)
    held_out = write_rows(tmp_path / "held.jsonl", [asked(record) for record in rows(1, count=2)])
    other = config(write_rows(tmp_path / "fine.jsonl", map(asked, rows()[4:])), model, held_out=held_out)
    loaded = []
    monkeypatch.setattr("covey.experiment.models.load_model", lambda *args, **kwargs: loaded.append(args))
    for recipe, where in ((long, r"train\.jsonl line 18"), (other, r"held\.jsonl line 2")):
        for use in (check, run):
            said = rf"{where}: a prompt of {300 + chat} tokens .* exceed the model's 256 positions.*long_prompts"
            with pytest.raises(ConfigError, match=said):
                use(replace(recipe, run_dir=str(tmp_path / "run")))
    assert loaded == []
    assert not (tmp_path / "run").exists()


def test_lines_that_are_too_long_can_be_dropped_and_are_counted(tmp_path, model):
    path = write_rows(tmp_path / "train.jsonl", rows(3, 17))
    [note] = [note for note in check(config(path, model, policy="drop")) if "train.jsonl" in note]
    assert "; 2 lines dropped as too long for the model" in note
    world = LLMBuilder(config(path, model, policy="drop"))
    world.close()
    starts = [start for step in range(1, 8) for start in world.problem.task.draw(0, step, 4)]
    assert LONG not in {start.prompt for start in [*starts, *world.problem.held_out]}
    everything = write_rows(tmp_path / "long.jsonl", [{"prompt": LONG + str(i), "answer": "1"} for i in range(4)])
    with pytest.raises(ConfigError, match=r"every prompt of .*long\.jsonl is too long; .*long\.jsonl line \d"):
        LLMBuilder(config(everything, model, policy="drop"))


def test_held_out_prompts_need_room_for_the_largest_token_limit(tmp_path, model):
    held_out = write_rows(tmp_path / "held.jsonl", [{"prompt": "y" * 200, "answer": "1"}])
    path = write_rows(tmp_path / "train.jsonl", rows())
    check(config(path, model, held_out=held_out))
    with pytest.raises(ConfigError, match=r"held\.jsonl line 1: a prompt of 200 tokens and max_new_tokens = 96"):
        check(config(path, model, held_out=held_out, limits=(96,)))


def test_a_line_that_the_template_refuses_is_named(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    path = write_rows(tmp_path / "d.jsonl", [{"prompt": "1+1"}, {"prompt": chat}, {"prompt": "2"}])
    with pytest.raises(ConfigError, match=r"d\.jsonl line 2: .*no chat template"):
        PromptDataset(path=path, held_out_fraction=0.4).keep_fitting(*[limit(template=False)] * 2)


def test_a_limit_that_leaves_no_room_says_so(tmp_path, model):
    asked = config(write_rows(tmp_path / "train.jsonl", rows()), model)
    with pytest.raises(
        ConfigError, match=r"^a limit of 256 new tokens leaves no room for prompts in the model's 256 positions"
    ):
        check(replace(asked, sampling=replace(asked.sampling, max_new_tokens=256)))


class Growing:
    """A task from Python some of whose prompts the model cannot take, every third from step 3 on."""

    def __init__(self, bad=LONG):
        self.bad = bad

    def draw(self, seed, step, count, *, first=0, before=None):
        places = range(first, first + count)
        wrong = {place for place in places if step >= 3 and place % 3 == 0 and place < 10_000}
        prompts = [self.bad if place in wrong else f"{step}+{place % 7}=" for place in places]
        return [Start(place, prompt, {"answer": "1"}) for place, prompt in zip(places, prompts, strict=True)]

    def held_out(self, count):
        return [Start(i, f"{i}+0=", {"answer": str(i)}) for i in range(3)]


@pytest.mark.parametrize("bad", [LONG, "", None, [], [{"role": "user", "content": LONG}]])
def test_a_prompt_that_a_task_makes_up_is_replaced_when_it_is_drawn(bad):
    notes = []
    task = FittingTask(Growing(bad), limit(), notes.append)
    assert task.draw(0, 2, 4) == Growing().draw(0, 2, 4)
    assert task.metrics() == {}
    drawn = task.draw(0, 3, 4, before=8)
    assert [start.index for start in drawn] == [0, 1, 2, 3]
    assert all(isinstance(start.prompt, str) and 0 < len(start.prompt) < 10 for start in drawn)
    assert task.metrics() == {"prompts/left_out": 2.0}
    assert task.metrics() == {}
    assert len(notes) == 2
    assert "step 3: left out a prompt that the model cannot take" in notes[0]
    assert drawn == FittingTask(Growing(bad), limit(), notes.append).draw(0, 3, 4, before=8), "a resumed run repeats it"


def test_a_task_without_other_prompts_has_fewer_in_that_step():
    class Finite(Growing):
        def draw(self, seed, step, count, *, first=0, before=None):
            return [Start(i, ["a", LONG, "b"][i], {}) for i in range(first, first + count)]

    task = FittingTask(Finite(), limit(), lambda note: None)
    assert [start.prompt for start in task.draw(0, 1, 3)] == ["a", "b"]
    with pytest.raises(RunError, match=r"step 1: the model can take no prompt of the task.*'xxx"):
        task.draw(0, 1, 1, first=1)


def test_the_first_steps_of_a_task_are_tried_before_training():
    refuse_first_starts(Growing(), limit(), 0, steps=2, count=4)
    with pytest.raises(ConfigError, match=r"300 tokens.*\(prompt 0: 'xxx.*long_prompts"):
        refuse_first_starts(Growing(), limit(), 0, steps=3, count=4)


def test_held_out_prompts_of_a_task_are_refused_or_left_out():
    starts, notes = [Start(0, "a"), Start(1, LONG), Start(2, "b")], []
    with pytest.raises(ConfigError, match="prompt 1: 'xxx"):
        limit().taken(starts, notes.append)
    assert [start.index for start in limit(drop=True).taken(starts, notes.append)] == [0, 2]
    assert notes == ["1 of 3 held-out prompts are too long for the model: left out"]
    with pytest.raises(ConfigError, match="no held-out prompt of the task fits"):
        limit(drop=True).taken(starts[1:2], notes.append)


def test_prompts_of_a_generated_task_are_tried_once_and_left_out_prompts_of_a_step_are_shown(model, tmp_path, capsys):
    class Long(Growing):
        def draw(self, seed, step, count, *, first=0, before=None):
            return [Start(first + i, LONG if i else "a", {}) for i in range(count)]

        def held_out(self, count):
            return [Start(0, "a"), Start(1, LONG)]

    asked = replace(config("", model, policy="drop"), task=None, steps=1, run_dir=str(tmp_path / "run"))
    run(asked, task=Long(), rewards=[lambda completions, **columns: [0.0 for _ in completions]])
    said = capsys.readouterr()
    said = said.out + said.err
    assert said.count("1 of 2 held-out prompts are too long for the model: left out") == 1
    assert said.count("step 1: left out a prompt that the model cannot take") == 3


@pytest.mark.slow
def test_a_run_from_python_goes_on_after_a_prompt_that_is_too_long(tmp_path, model):
    asked = RunConfig(
        model=model, steps=4, threads=1, precision="fp32", run_dir=str(tmp_path / "run"),
        sampling=SamplingConfig(prompts_per_step=4, group_size=2, max_new_tokens=4, long_prompts="drop"),
    )  # fmt: skip

    def length(completions, **columns):
        return [float(len(completion)) for completion in completions]

    summary = run(asked, task=Growing(), rewards=[length])
    assert summary["steps"] == 4
    assert (summary["score_kind"], summary["evaluations"][0]["after"]["count"]) == ("score", 3)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("prompts/left_out") for line in metrics] == [None, None, 2.0, 2.0]
