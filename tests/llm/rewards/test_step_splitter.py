"""Reasoning steps: where they end in characters and in tokens, and what the grader makes of step rewards."""

import textwrap
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from covey.config import ConfigError, LossConfig, ProcessConfig, RewardConfig, RunConfig, RunningTotalConfig
from covey.config.rules import validate
from covey.data import EndReason, Group, Rollout, Start, collate
from covey.llm.grader import GradingError, build_grader
from covey.llm.model.chat import Chat
from covey.llm.rewards.numbers import numeric, read_number, step_numbers
from covey.llm.rewards.step_splitter import RULES, StepSplitter, lines, paragraphs, sentences, token_ends
from covey.llm.rewards.weighted_reward import WeightedReward
from covey.llm.tasks import RunningTotal

BYTES = sorted(ByteLevel.alphabet())
MERGED = (
    "Ċ",
    "ĊĊ",
    "5ĊĊ",
    "Ċ6",
    "ĠĠ",
    "Ã",
    "Ã©",
    "ðŁ",
    "ĺĢ",
    "ab",
    ".Ġ",
)  # tokens of several bytes, halves of characters


def byte_level_chat() -> Chat:
    """A chat whose tokens are bytes and a few runs of bytes, as in byte-level BPE."""
    words = list(dict.fromkeys([*BYTES, *MERGED]))
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    return Chat(fast, frozenset({fast.eos_token_id}))


CHAT = byte_level_chat()
END = next(iter(CHAT.end_ids))
TOKENS = st.lists(st.integers(0, END - 1), min_size=1, max_size=30)
TEXTS = st.text(st.sampled_from("ab5.!? \n\té€😀"), min_size=1, max_size=30)


def spelled(text: str) -> list[int]:
    """The tokens of single bytes that make up a text."""
    words = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return CHAT.tokenizer.convert_tokens_to_ids([symbol for word, _ in words for symbol in word])


def made(tokens: list[int], ended: bool = True) -> Rollout:
    actions = [*tokens, END] if ended else tokens
    return Rollout(
        context=(1,),
        actions=actions,
        behavior_logprobs=[0.0] * len(actions),
        end=EndReason.STOP if ended else EndReason.LENGTH,
        text=CHAT.decode(tokens),
    )


def splitter(boundary: str = "line") -> StepSplitter:
    found = StepSplitter(boundary)
    found.chat = CHAT
    return found


def cut(text: str, positions: list[int]) -> list[str]:
    return [text[i:j] for i, j in zip([0, *positions], [*positions, len(text)], strict=True)]


# ---- rules ----


@pytest.mark.parametrize(
    ("rule", "text", "steps"),
    [
        (lines, "5\n4\n8", ["5\n", "4\n", "8"]),
        (lines, "5\n4\n8\n", ["5\n", "4\n", "8\n", ""]),
        (lines, "\n\n 5 \n\n\t4", ["\n\n 5 \n\n\t", "4"]),
        (lines, "5", ["5"]),
        (lines, "", [""]),
        (paragraphs, "a\nb\n\nc\n \n\nd", ["a\nb\n\n", "c\n \n\n", "d"]),
        (paragraphs, "a\nb", ["a\nb"]),
        (sentences, 'He has 3.5. Now "4!" Why? Yes', ["He has 3.5. ", 'Now "4!" ', "Why? ", "Yes"]),
        (sentences, "1. Add 5. So 9.\n2. Take 4", ["1. Add 5. ", "So 9.\n", "2. Take 4"]),
        (sentences, "no stop\nhere", ["no stop\n", "here"]),
    ],
)
def test_rules(rule, text, steps):
    assert cut(text, list(rule(text))) == steps


@given(text=TEXTS, rule=st.sampled_from(sorted(RULES)))
def test_a_rule_leaves_no_step_empty_and_no_character_out(text, rule):
    steps = StepSplitter(rule).split(Rollout((), (0,), (0.0,), EndReason.STOP, text=text))
    assert "".join(steps) == text
    assert len(steps) == 1 or all(step.strip() for step in steps)


# ---- from characters to tokens ----


@given(tokens=TOKENS, data=st.data())
def test_a_step_ends_at_the_first_token_that_covers_its_text(tokens, data):
    text = CHAT.decode(tokens)
    positions = sorted(data.draw(st.sets(st.integers(1, max(len(text), 1)), max_size=5)))
    positions = [position for position in positions if position <= len(text)]
    kept, ends = token_ends(CHAT.decode, tokens, positions)
    assert ends == sorted(set(ends))
    assert len(kept) == len(ends)
    assert all(end < len(tokens) - 1 for end in ends)
    for position, end in zip(kept, ends, strict=True):
        assert CHAT.decode(tokens[: end + 1]).startswith(text[:position])
        earlier = [k for k in range(end) if CHAT.decode(tokens[: k + 1]).startswith(text[:position])]
        assert not earlier
    for position in set(positions) - set(kept):  # another step ends in the same token, or the completion does
        first = next(k for k in range(len(tokens)) if CHAT.decode(tokens[: k + 1]).startswith(text[:position]))
        assert first in ends or first == len(tokens) - 1


@given(tokens=TOKENS, ended=st.booleans(), rule=st.sampled_from(sorted(RULES)))
def test_the_steps_of_a_rollout(tokens, ended, rule):
    rollout = made(tokens, ended)
    steps = splitter(rule).split(rollout)
    assert "".join(steps) == rollout.text
    assert len(steps) == len(rollout.step_ends)
    assert rollout.step_ends == sorted(set(rollout.step_ends))
    assert rollout.step_ends[-1] == len(rollout.actions) - 1
    covered = ""
    for step, end in zip(steps, rollout.step_ends, strict=True):
        covered += step
        assert CHAT.decode(rollout.actions[: end + 1]).startswith(covered)


# a b \n, a tool's "9\n9\n", c d and the end token
@pytest.mark.parametrize(
    ("marks", "steps", "ends"),
    [
        ("dddddddddd", ["ab\n", "9\n", "9\n", "cd"], [2, 4, 6, 9]),
        ("ddd....ddd", ["ab\n9\n9\n", "cd"], [2, 9]),
        ("dd.....ddd", ["ab\n9\n9\n", "cd"], [1, 9]),
        (".......ddd", ["ab\n9\n9\ncd"], [9]),
        ("ddd.......", ["ab\n9\n9\ncd"], [2]),
        ("ddd..d....", ["ab\n9\n", "9\ncd"], [2, 5]),
        ("..dd...d..", ["ab\n", "9\n9\n", "cd"], [2, 3, 7]),
    ],
)
def test_a_step_ends_at_its_last_decision(marks, steps, ends):
    rollout = made(spelled("ab\n9\n9\ncd"))
    rollout.decided = [mark == "d" for mark in marks]
    assert splitter().split(rollout) == steps
    assert rollout.step_ends == ends


@example(tokens=[0, 1, 2], marks=[False, True, False])
@given(tokens=TOKENS, marks=st.lists(st.booleans(), min_size=31, max_size=31))
def test_steps_end_at_decisions_alone(tokens, marks):
    rollout = made(tokens)
    rollout.decided = [*marks[: len(tokens)], not any(marks[: len(tokens)])]
    steps = splitter().split(rollout)
    assert "".join(steps) == rollout.text
    assert len(steps) == len(rollout.step_ends)
    assert rollout.step_ends == sorted(set(rollout.step_ends))
    assert all(rollout.decided[end] for end in rollout.step_ends)
    assert not any(rollout.decided[rollout.step_ends[-1] + 1 :])


@example(text="5\n\u20034")  # the first step ends with a space of three bytes
@given(text=TEXTS)
def test_single_bytes_end_a_step_exactly(text):
    """With tokens of one byte, a step ends at the byte that ends its last character."""
    rollout = made(spelled(text))
    assert rollout.text == text
    steps = splitter().split(rollout)
    lengths = [len("".join(steps[: k + 1]).encode()) for k in range(len(steps))]
    assert rollout.step_ends[:-1] == [length - 1 for length in lengths[:-1]]


def test_a_token_with_the_ends_of_two_steps_ends_both():
    ids = CHAT.tokenizer.convert_tokens_to_ids
    # "4\n" "5\n\n" "7": the tokens are 4, "\n", "5\n\n", 7
    rollout = made(ids(["4", "Ċ", "5ĊĊ", "7"]))
    assert splitter().split(rollout) == ["4\n", "5\n\n", "7"]
    assert rollout.step_ends == [1, 2, 4]
    # "\n6" ends the first step and is all of the second one: they are one
    rollout = made(ids(["5", "Ċ6"]))
    assert splitter().split(rollout) == ["5\n6"]
    assert rollout.step_ends == [2]
    rollout = made(ids(["5", "Ċ6", "Ċ", "7"]), ended=False)
    assert splitter().split(rollout) == ["5\n", "6\n", "7"]
    assert rollout.step_ends == [1, 2, 3]


def test_a_completion_of_the_end_token_alone_is_one_step():
    rollout = made([])
    assert splitter().split(rollout) == [""]
    assert rollout.step_ends == [0]


# ---- what the grader makes of them ----

FUNCTIONS = """
    def shares(completions, steps, **columns): return [[float(len(text)) for text in texts] for texts in steps]
    def first_only(steps): return [[1.0] for texts in steps]
    def flat(completions): return [1.0] * len(completions)
    def holes(steps): return [[None] * len(texts) for texts in steps]
    def sometimes(steps): return [None if "x" in texts[0] else [1.0] * len(texts) for texts in steps]
    def poison(steps): return [[float("nan") if "x" in text else 1.0 for text in texts] for texts in steps]

    def semicolons(text):
        if "hang" in text: import time; time.sleep(1000)
        if "raise" in text: raise KeyError("no")
        if "beyond" in text: return [99]
        if "back" in text: return [3, 1]
        if "half" in text: return [1.5]
        if "nothing" in text: return None
        return [i + 1 for i, character in enumerate(text) if character == ";"]
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    return path


@pytest.fixture
def grader(path):
    graders = []

    def build(*rewards, boundary="line"):
        named = [RewardConfig(function=f"{path}:{r}", per_step=True) if isinstance(r, str) else r for r in rewards]
        graders.append(build_grader(named, (), (), f"{path}:{boundary}" if boundary not in RULES else boundary))
        graders[-1].use_chat(CHAT)
        return graders[-1]

    yield build
    for one in graders:
        one.close()


def groups_of(*texts: str, **columns) -> list[Group]:
    return [Group(Start(0, "p", columns), [made(spelled(text)) for text in texts])]


def test_outcomes_are_paid_at_the_end_and_steps_where_they_end(grader):
    outcome = RewardConfig(name="numeric", weight=10.0)
    one = grader(RewardConfig(name="step_numbers", answer_column="totals", weight=0.5), outcome, "shares")
    (group,) = one.grade(groups_of("5\n4\n8", "5\n9", totals=[5, 4, 8], answer="8"))
    right, wrong = group.rollouts
    assert right.step_texts == ["5\n", "4\n", "8"]
    assert right.step_ends == [1, 3, 5]
    assert right.step_rewards == [0, 2.5, 0, 2.5, 0, 11.5]
    assert right.reward == 16.5
    assert right.reward_parts == {"step_numbers": 3.0, "numeric": 1.0, "shares": 5.0}
    assert right.score == 1.0, "evaluation counts the outcome, although it is not the first"
    assert (wrong.step_ends, wrong.step_rewards, wrong.score) == ([1, 3], [0, 2.5, 0, 1.0], 0.0)


def test_tokens_after_the_last_decision_earn_nothing(grader):
    groups = groups_of("5\n4\n8", totals=[5, 4], answer="8")
    groups[0].rollouts[0].decided = [True, True, False, True, False, False]
    one = grader(RewardConfig(name="step_numbers", answer_column="totals", weight=0.5), RewardConfig(name="numeric"))
    ((rollout,),) = (group.rollouts for group in one.grade(groups))
    assert rollout.step_texts == ["5\n", "4\n8"]
    assert rollout.step_ends == [1, 3]
    assert rollout.step_rewards == [0, 0.5, 0, rollout.reward - 0.5, 0, 0]
    assert rollout.reward_parts["numeric"] == 1.0
    batch = collate(groups)
    assert batch.rewards_BT.sum() == rollout.reward
    assert batch.step_end_BT.nonzero().tolist() == [[0, 1], [0, 3]]


def test_without_an_outcome_the_score_is_the_mean_of_the_steps(grader):
    (group,) = grader(RewardConfig(name="step_numbers")).grade(groups_of("5\n4\n8\n1", answer=[5, 0, 8]))
    assert group.rollouts[0].score == 0.5
    assert group.rollouts[0].reward == 2.0


def test_a_run_without_step_rewards_knows_no_steps(grader):
    (group,) = grader(RewardConfig(name="numeric")).grade(groups_of("5\n4", answer="4"))
    assert group.rollouts[0].step_ends is None
    assert group.rollouts[0].step_rewards is None


def test_a_function_in_this_process_sees_what_one_in_its_own_does():
    seen = []

    def mine(prompts, completions, completion_ids, steps, answer):
        seen.append((prompts, completions, steps, answer))
        return [[0.25] * len(texts) for texts in steps]

    (group,) = build_grader([WeightedReward.from_function(mine, per_step=True)], ()).grade(
        groups_of("a\nb", answer="b")
    )
    assert seen == [(["p"], ["a\nb"], [["a\n", "b"]], ["b"])]
    assert group.rollouts[0].reward == 0.5
    assert group.rollouts[0].step_rewards is None, "no chat told which tokens the steps end at"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("first_only", "returned 1 numbers for a completion of 2 steps: give one for each item of `steps`"),
        ("flat", r"returned float 1\.0 for a completion of 2 steps: with per_step = true a list is needed"),
        ("holes", "returned None for a step: give every step a number, or None in place of the whole list"),
    ],
)
def test_a_wrong_count_names_the_fix(grader, function, why):
    with pytest.raises(GradingError, match=f"reward '{function}' {why}"):
        grader(function).grade(groups_of("a\nb"))


def test_lists_without_per_step_name_the_fix(path):
    one = build_grader([RewardConfig(function=f"{path}:shares")], ())
    with pytest.raises(ConfigError, match="asks for 'steps', but the data has only"):
        one.check([Start(0, "p", {"answer": "1"})])
    one.close()

    def listed(completions):
        return [[1.0]] * len(completions)

    with pytest.raises(GradingError, match="for one number for each reasoning step set per_step = true"):
        build_grader([listed], ()).grade(groups_of("a"))


def test_none_and_nan_cost_their_own_rollout_only(grader):
    texts = ["a", "b\nc", "x\nd", "e", "f", "g"]
    for function in ("sometimes", "poison"):
        (group,) = grader(function).grade(groups_of(*texts))
        assert [rollout.reward for rollout in group.rollouts] == [1, 2, None, 1, 1, 1]
    (group,) = grader("sometimes", RewardConfig(name="numeric")).grade(groups_of(*texts, answer="4"))
    assert [rollout.reward for rollout in group.rollouts] == [1, 2, 0, 1, 1, 1]


# ---- boundaries of one's own ----


def test_a_function_says_where_steps_end(grader):
    (group,) = grader("shares", boundary="semicolons").grade(groups_of("a;bc;d", "é;", ""))
    first, second, third = group.rollouts
    assert (first.step_texts, first.step_ends) == (["a;", "bc;", "d"], [1, 4, 6])
    assert first.step_rewards == [0, 2, 0, 0, 3, 0, 1]
    assert (second.step_texts, second.step_ends) == (["é;"], [3])
    assert (third.step_texts, third.step_ends) == ([""], [0])


def test_a_text_that_a_boundary_function_fails_on_is_a_failed_rollout(grader):
    (group,) = grader("shares", boundary="semicolons").grade(groups_of("a;b", "raise", *"cdefgh"))
    assert [rollout.reward for rollout in group.rollouts] == [3, None, 1, 1, 1, 1, 1, 1]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise", r"failed on at least 1 of 1 completion: KeyError: 'no' \(mine.py line \d+\)"),
        ("beyond", r"returned \[99\] for a text of 6 characters: give ascending positions in it"),
        ("back", r"returned \[3, 1\] for a text of 4 characters"),
        ("half", r"returned float 1\.5 where a position in the text, a whole number, is needed"),
        ("nothing", "returned None instead of a list of positions in the text"),
    ],
)
def test_a_boundary_function_that_breaks_its_contract_stops_the_run(grader, text, why):
    with pytest.raises(GradingError, match=f"process.boundary .*:semicolons {why}"):
        grader("shares", boundary="semicolons").grade(groups_of(text))
    with pytest.raises(ConfigError, match="in a dry run on the right answer"):
        grader("shares", boundary="semicolons").check([Start(0, "p", {"answer": text})])


# ---- the built-in step reward and its task ----


def test_step_numbers():
    steps = [["7 - 4 = 3\n", "3 + 9 = 12\n", "so 17"], ["3\n", "12\n", "17\n", "17"], ["12\n", "3"], [""]]
    assert step_numbers([""] * 4, steps, answer_column="totals", totals=[[3, 12, 17]] * 4) == [
        [1, 1, 1],
        [1, 1, 1, 0],
        [0, 0],
        [0],
    ]
    with pytest.raises(ValueError, match="is not a list: set answer_column to a column with a number for each step"):
        step_numbers([""], [["1"]], answer=["12"])
    with pytest.raises(ValueError, match="is not a number"):
        step_numbers([""], [["1"]], answer=[["twelve"]])
    with pytest.raises(ValueError, match="has no column 'totals', it has answer"):
        step_numbers([""], [["1"]], answer_column="totals", answer=[[1]])


def test_running_totals_are_right_and_never_below_zero():
    task = RunningTotal(steps=(2, 4), largest=7)
    lengths = set()
    for start in task.draw(seed=1, step=1, count=200):
        words = start.prompt[-1]["content"].removesuffix(" step by step").split()
        total, totals = int(words[0]), []
        for sign, number in zip(words[1::2], words[2::2], strict=True):
            total += int(number) if sign == "+" else -int(number)
            totals.append(total)
            assert 1 <= int(number) <= 7
        assert start.columns == {"answer": str(total), "totals": totals}
        assert min(totals) >= 0
        lengths.add(len(totals))
    assert lengths == {2, 4}


def test_the_examples_of_running_total_are_right_and_never_asked():
    task = RunningTotal(examples=3, steps=(3,), largest=5)
    prompt = task.draw(seed=0, step=1, count=1)[0].prompt
    assert [message["role"] for message in prompt] == ["user", "assistant"] * 3 + ["user"]
    shown = [(prompt[i]["content"], prompt[i + 1]["content"]) for i in (0, 2, 4)]
    for question, answer in shown:
        before, rest = question.split(" ", 1)
        for line, (sign, number) in zip(
            answer.splitlines(), zip(*[iter(rest.split()[:6])] * 2, strict=True), strict=True
        ):
            total = int(before) + (int(number) if sign == "+" else -int(number))
            assert line == f"{before} {sign} {number} = {total}"
            before = str(total)
        assert numeric([answer], answer=[before]) == [1]
    asked = {start.prompt[-1]["content"] for step in range(20) for start in task.draw(0, step, 50)}
    asked |= {start.prompt[-1]["content"] for start in task.held_out(200)}
    assert not asked & {question for question, _ in shown}
    assert len(RunningTotal(examples=0).draw(0, 1, 1)[0].prompt) == 1


def test_right_lines_earn_every_step():
    start = RunningTotal().draw(0, 1, 1)[0]
    text = "\n".join(f"= {total}" for total in start.columns["totals"])
    (paid,) = step_numbers([text], [text.split("\n")], answer_column="totals", totals=[start.columns["totals"]])
    assert paid == [1, 1, 1]
    assert read_number(text).value == int(start.columns["answer"])


# ---- what a recipe may say ----

GOOD = RunConfig(
    task=RunningTotalConfig(),
    rewards=(RewardConfig(name="numeric", score=True), RewardConfig(name="step_numbers", answer_column="totals")),
    loss=LossConfig(credit="process"),
)


def test_what_goes_together_is_accepted(path):
    validate(GOOD)
    validate(replace(GOOD, loss=LossConfig(credit="process_by_step"), algorithm="rloo"))
    validate(replace(GOOD, loss=LossConfig()))
    validate(replace(GOOD, loss=LossConfig(), algorithm="ppo"))
    validate(replace(GOOD, process=ProcessConfig(boundary=f"{path}:semicolons")))
    validate(replace(GOOD, rewards=(RewardConfig(function=f"{path}:shares", per_step=True),)))
    validate(replace(GOOD, rewards=(RewardConfig(name="numeric", weight=0.0, score=True), GOOD.rewards[1])))
    validate(replace(GOOD, rewards=()), own_rewards=True)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"rewards": ()}, "loss.credit is 'process', but no reward is paid by step: add"),
        ({"rewards": (RewardConfig(name="numeric"),)}, "no reward is paid by step"),
        ({"algorithm": "ppo"}, "loss.credit is set, but not used with ppo"),
        ({"algorithm": "reinforce_pp"}, "loss.credit is set, but not used with reinforce_pp"),
        (
            {"rewards": (RewardConfig(name="numeric", per_step=True),)},
            "per_step is set, but not used with numeric",
        ),
        (
            {"process": ProcessConfig(boundary="lines")},
            r"line, paragraph, sentence or file.py:function \(did you mean 'line'",
        ),
        ({"process": ProcessConfig(boundary="no_such.py:f")}, "process.boundary: there is no file no_such.py"),
        (
            {"process": ProcessConfig(boundary="sentence"), "loss": LossConfig(), "rewards": ()},
            "process.boundary is set, but no reward is paid by step",
        ),
    ],
)
def test_contradictions_are_refused_in_one_line(fields, why):
    with pytest.raises(ConfigError, match=why) as caught:
        validate(replace(GOOD, **fields))
    assert "\n" not in str(caught.value)
