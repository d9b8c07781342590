"""Judges, asked over HTTP: how scores are read, and what faults of a real server cost."""

import base64
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey.config import ConfigError, RewardConfig
from covey.config.recipe import read_recipe
from covey.config.rewards import check_reward
from covey.config.servers import is_this_machine
from covey.data import Group, Start
from covey.llm.data.rows import as_text
from covey.llm.grader import GradingError, RewardGrader, build_grader
from covey.llm.rewards.judge import GIVE_UP_AFTER, Reply, ReplyCache, ScoreReader, UnreadableReply
from helpers.graded import all_rewards as rewards_of
from helpers.graded import asked as group
from helpers.judge_server import Asked, JudgeServer

TOKEN = "tok-5d41402abc4b2a76"


# ---- the score in a reply ----


def reader(low: float = 0.0, high: float = 10.0, **how: Any) -> ScoreReader:
    return ScoreReader(low, high, **how)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("7", 7.0),
        ("Of the 3 claims 2 are right. Score: 8.5", 8.5),
        ("8/10", 8.0),
        ("**8**/10", 8.0),
        ("I give it 9 out of 10.", 9.0),
        ("I give it an 8 (out of 10).", 8.0),
        ("Score: `7.25`.", 7.25),
        ("1e0", 1.0),
        (".5", 0.5),
        ("0", 0.0),
        ("−0 is +3", 3.0),
        ("It is a 4!", 4.0),
    ],
)
def test_the_last_number_of_a_reply(reply: str, score: float) -> None:
    assert reader().read(reply) == score


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("", "no number"),
        ("no score", "no number"),
        ("gpt4", "no number"),
        ("11", "outside judge_range"),
        ("-1", "outside judge_range"),
        ("1e999", "not finite"),
        ("0,8", "no number"),
        ("4/5", "on a scale up to 5"),
        ("4 out of 5", "on a scale up to 5"),
        ("8%", "on a scale up to 100"),
        ("nan", "no number"),
        ("1.2.3", "no number"),
    ],
)
def test_a_reply_without_a_valid_score_is_no_score(reply: str, why: str) -> None:
    with pytest.raises(UnreadableReply, match=why):
        reader().read(reply)


def test_percent_and_thousands_are_read_where_the_range_says_so() -> None:
    assert reader(high=100.0).read("80 %") == 80.0
    assert reader(high=10_000.0).read("1,250") == 1250.0


@given(st.floats(0, 10), st.text(alphabet="abc .\n:*", max_size=20))
@example(0.1, "a ")
def test_any_number_in_range_is_read_exactly(score: float, before: str) -> None:
    assert reader().read(f"{before.rstrip('abc.')} {score!r}") == score


def test_a_reply_that_was_cut_has_no_last_number_but_may_have_a_word() -> None:
    with pytest.raises(UnreadableReply, match="raise max_tokens in judge_request"):
        reader().read("Score: 1", cut=True)
    assert reader(words={"yes": 1.0, "no": 0.0}).read("yes", cut=True) == 1.0


def test_what_a_judge_only_thinks_is_no_score() -> None:
    draft = '<think>\nAt first sight {"score": 3, "scores": [1, 2]} is good'
    for one in (reader(field="score"), reader(words={"good": 1.0})):
        with pytest.raises(UnreadableReply, match="raise max_tokens in judge_request"):
            one.read(draft, cut=True)
        with pytest.raises(UnreadableReply):
            one.read(f"{draft}</think>\nI cannot tell.")
    assert reader(field="score").read(draft + '</think>{"why": "<think></think>", "score": 4}') == 4.0
    one = reader(field="scores")
    assert "raise max_tokens" in one.read_list(draft, 2, order=False)[1]
    assert one.read_list(draft + '</think>{"scores": ["3", 4]}', 2, order=False) == ([3.0, 4.0], "")
    assert one.read_list(draft + '</think>{"scores": ["2", 1]}', 2, order=True) == ([0.0, 10.0], "")


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 3\nScore: 4\n(of 10)", 4.0),
        ("Score: 8/10", 8.0),
        ("Score: 12", None),
        ("score: 4", None),
        ("", None),
        ("Score: 4.5", 4.5),
    ],
)
def test_a_pattern_reads_its_group_at_the_last_match(reply: str, score: float | None) -> None:
    one = reader(pattern=r"Score: ([0-9./]+)")
    if score is None:
        with pytest.raises(UnreadableReply):
            one.read(reply)
    else:
        assert one.read(reply) == score


def test_a_pattern_that_finds_more_than_a_number_is_refused() -> None:
    with pytest.raises(UnreadableReply, match="no number where the score should be"):
        reader(pattern="Score: (.*)").read("Score: 3 or 4")


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"score": 7}', 7.0),
        ('```json\n{"reason": "as {x} shows", "score": 7.5}\n```', 7.5),
        ('{"score": 1} and later {"score": "9/10"}', 9.0),
        ('{"score": true}', 1.0),
        ('{"reason": "two\nlines of \\(x\\), \\sqrt and \\underline", "score": 7}', 7.0),
        (r'{"reason": "\"7\" and C:\\", "sc\u006fre": 7}', 7.0),
        ('{"score": null}', None),
        ('{"score": NaN}', None),
        ('{"score": 1e999}', None),
        ('{"score": [7]}', None),
        ('{"score": 70}', None),
        ('{"score": ' + "9" * 400 + "}", None),
        ('{"score": 7', None),
        ('{"other": 7}', None),
        ('{"inner": {"score": 7}}', None),
        ("{" * 5000, None),
        ('{"a":' * 5000, None),
        ("7", None),
    ],
)
def test_a_field_of_a_json_object(reply: str, score: float | None) -> None:
    if score is None:
        with pytest.raises(UnreadableReply):
            reader(field="score").read(reply)
    else:
        assert reader(field="score").read(reply) == score


def test_a_field_of_an_inner_object_and_words_in_a_field() -> None:
    assert reader(field="grades.style").read('{"grades": {"style": 3, "truth": 4}}') == 3.0
    one = reader(high=1.0, field="verdict", words={"good": 1.0, "bad": 0.0})
    assert one.read('{"verdict": "Good."}') == 1.0


@pytest.mark.parametrize(
    ("reply", "score"),
    [("Correct", 1.0), ("incorrect", 0.0), ("First correct, then INCORRECT.", 0.0), ("partly correct", 0.5)],
)
def test_words_stand_for_numbers_and_the_last_whole_word_counts(reply: str, score: float) -> None:
    words = {"correct": 1.0, "incorrect": 0.0, "partly correct": 0.5}
    assert reader(high=1.0, words=words).read(reply) == score
    with pytest.raises(UnreadableReply, match="none of judge_words"):
        reader(high=1.0, words=words).read("correctly 1")


# ---- asking ----


@pytest.fixture
def build(tmp_path: Path):
    """Build a grader with one judge at a server; all are closed at the end."""
    graders: list[RewardGrader] = []

    def make(server: JudgeServer | str, beside: Sequence[RewardConfig] = (), **fields: Any) -> RewardGrader:
        address = server if isinstance(server, str) else server.address
        own = {
            "judge": address, "judge_model": "tiny", "judge_prompt": "{prompt}|{completion}|{answer}",
            "judge_cache": str(tmp_path / "cache"), "judge_retries": 0, "timeout_seconds": 60.0,
        }  # fmt: skip
        one = build_grader([RewardConfig(**(own | fields)), *beside], ())
        graders.append(one)
        return one

    yield make
    for one in graders:
        one.close()


def errors_of(grader: RewardGrader, groups: list[Group]) -> list[str]:
    return [result.error for result in grader.rewards[0].evaluate(groups)]


def say_the_number(asked: Asked) -> None:
    """The score is the number in the completion."""
    asked.say(f"The score is {asked.question.split('|')[1]}")


def test_a_judge_scores_every_completion_and_equal_questions_are_asked_once(build) -> None:
    with JudgeServer(say_the_number) as server:
        one = build(server)
        groups = [group("0.1", "0.7", "0.1", answer="x"), group("0.1", answer="y")]
        assert rewards_of(one.grade(groups)) == [0.1, 0.7, 0.1, 0.1]
        assert sorted(server.questions) == ["p|0.1|x", "p|0.1|y", "p|0.7|x"]
        assert server.asked[0] == "/v1/chat/completions"
        assert groups[0].rollouts[1].extras == {"judge": {"reply": "The score is 0.7"}}
        rewards_of(one.grade([group("0.7", answer="x")]))
        assert len(server.questions) == 3


def test_a_request_has_the_fields_of_the_recipe(build) -> None:
    seen = []

    def answer(asked: Asked) -> None:
        seen.append(asked.request)
        asked.say("1")

    with JudgeServer(answer) as server:
        fields = {"judge_request": '{"seed": 3, "max_tokens": null, "top_p": 0.5}', "judge_temperature": 0.25}
        build(server, **fields).grade([group("a", answer="b")])
    assert seen == [
        {
            "model": "tiny", "temperature": 0.25, "seed": 3, "top_p": 0.5,
            "messages": [{"role": "user", "content": "p|a|b"}],
        }
    ]  # fmt: skip


def test_a_question_shows_chats_and_columns_as_text_and_is_filled_once(build) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    question = 'A: {prompt}\nB: {completion}\nC: {facts} {"score": 1} {{answer}}'
    with JudgeServer(lambda asked: asked.say("1")) as server:
        one = build(server, judge_prompt=question)
        one.grade([group("{answer}", prompt=chat, facts=["é", 2], answer="42")])
    assert server.questions == ['A: system: Be brief.\n\nuser: Why?\nB: {answer}\nC: ["é", 2] {"score": 1} {42}']


def test_a_question_shows_calls_of_tools() -> None:
    """Without them conversations that differ in their calls only would be equal."""
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": "I add.", "tool_calls": [call], "unread_calls": ["<call>{"]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    shown = '{"name": "add", "arguments": {"a": 1}}'
    assert as_text(turns) == f"assistant: I add.\n{shown}\n<call>{{\n\ntool: 2\n\nassistant: {shown}"
    assert as_text(turns[2:]) == shown


def test_questions_are_asked_at_the_same_time_up_to_the_limit(build) -> None:
    """The server answers only when three questions wait at once, so it would hang if they were asked in turn."""
    waiting = threading.Barrier(3)

    def answer(asked: Asked) -> None:
        waiting.wait(60)
        asked.say("1")

    with JudgeServer(answer) as server:
        one = build(server, judge_concurrency=3)
        assert rewards_of(one.grade([group(*"abcdefghi", answer="x")])) == [1.0] * 9
        assert server.most_at_once == 3


def test_500_is_asked_again_and_then_counts(build) -> None:
    def answer(asked: Asked) -> None:
        asked.send(b"overloaded", 500) if asked.number < 2 else asked.say("1")

    with JudgeServer(answer) as server:
        assert rewards_of(build(server, judge_retries=2).grade([group("a", answer="x")])) == [1.0]
        assert len(server.questions) == 3


def test_a_server_may_ask_for_a_pause(build) -> None:
    times = []

    def answer(asked: Asked) -> None:
        times.append(time.monotonic())
        asked.send(b"slow down", 429, Retry_After="1") if asked.number == 0 else asked.say("1")

    with JudgeServer(answer) as server:
        assert rewards_of(build(server, judge_retries=1).grade([group("a", answer="x")])) == [1.0]
    assert times[1] - times[0] >= 1.0


def die(asked: Asked) -> None:
    """Promise more than is sent, and close the connection."""
    asked.send(b'{"choices": [', Content_Length="1000")
    asked.handler.close_connection = True
    asked.handler.connection.shutdown(socket.SHUT_RDWR)


def flood(asked: Asked) -> None:
    asked.handler.send_response(200)
    asked.handler.end_headers()
    for _ in range(100):
        asked.handler.wfile.write(b" " * (1 << 16))
    asked.handler.close_connection = True


def drip(asked: Asked) -> None:
    """A byte at a time for ever, each within any limit between two bytes."""
    asked.handler.send_response(200)
    asked.handler.send_header("Content-Length", "100000")
    asked.handler.end_headers()
    for _ in range(2000):
        asked.handler.wfile.write(b" ")
        time.sleep(0.05)


FAULTS = {
    "status": (lambda asked: asked.send(b"no such model\nhere", 404), r"got HTTP status 404: no such model here$"),
    "server error": (lambda asked: asked.send(b"", 503), r"got HTTP status 503"),
    "dies": (die, "had no reply from http://127"),
    "closes": (lambda asked: asked.handler.connection.shutdown(socket.SHUT_RDWR), "had no reply from"),
    "garbage": (lambda asked: asked.send(b"\xff\x00<html>"), "not a chat completion: "),
    "wrong json": (lambda asked: asked.send(b'{"choices": []}'), "not a chat completion: "),
    "nested": (lambda asked: asked.send(b"[" * 100_000), "not a chat completion: "),
    "no text": (lambda asked: asked.say(None), "without text"),
    "number": (lambda asked: asked.say(1), "without text"),
    "huge": (flood, "more than 1 MiB"),
    "compressed": (lambda asked: asked.send(b"x", Content_Encoding="gzip"), "compressed"),
    "nan": (lambda asked: asked.say('{"score": NaN}'), "could not be read: there is no number"),
    "infinite": (lambda asked: asked.say("1e999"), "could not be read: the score inf is not finite"),
    "out of range": (lambda asked: asked.say("7"), "could not be read: the score 7 is outside"),
    "cut": (lambda asked: asked.say("0.", "length"), "could not be read: the reply was cut"),
    "cut in the reasoning": (lambda asked: asked.say(None, "length"), "got no text: .* raise max_tokens in"),
    "long": (lambda asked: asked.say("Sorry. " * 99 + "No\nscore."), r"should be; the reply: '\.\.\..* No score\.'$"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_its_own_completion_only(build, fault: str) -> None:
    act, why = FAULTS[fault]

    def answer(asked: Asked) -> None:
        act(asked) if "bad" in asked.question else asked.say("0.5")

    with JudgeServer(answer) as server:
        one = build(server)
        groups = [group("a", "bad", "b", "c", "d", "e", answer="x")]
        assert rewards_of(one.grade(groups)) == [0.5, None, 0.5, 0.5, 0.5, 0.5]
        assert groups[0].rollouts[1].reward_parts == {"judge": None}
        [error] = errors_of(one, [group("bad", answer="x")])
    assert re.search(why, error), error
    assert "\n" not in error


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("act", [drip, lambda asked: time.sleep(5)], ids=["drip", "silent"])
def test_a_slow_server_is_given_up_at_the_deadline(build, act) -> None:
    def answer(asked: Asked) -> None:
        act(asked) if "bad" in asked.question else asked.say("0.5")

    with JudgeServer(answer) as server:
        one = build(server, timeout_seconds=1.0)
        assert rewards_of(one.grade([group("a", "bad", "b", "c", "d", answer="x")])) == [0.5, None, 0.5, 0.5, 0.5]
        assert errors_of(one, [group("bad", answer="y")]) == ["took longer than 1 s"]


def test_a_dead_server_stops_the_run_with_one_line_and_is_not_asked_for_ever(build) -> None:
    def answer(asked: Asked) -> None:
        asked.send(b"", 500)

    with JudgeServer(answer) as server:
        one = build(server, judge_concurrency=2)
        with pytest.raises(GradingError, match=r"64 of 64 rollouts .* reward 'judge': got HTTP status 500") as caught:
            one.grade([group(*map(str, range(64)), answer="x")])
        assert "\n" not in str(caught.value)
        assert len(server.questions) <= GIVE_UP_AFTER + 1


def test_nobody_listens(build) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        one = build(f"http://localhost:{free.getsockname()[1]}/v1")
        [error] = errors_of(one, [group("a", answer="x")])
    assert error.startswith("had no reply from http://localhost:")


@pytest.mark.parametrize("reply", [b"", b"garbage\r\n\r\n"])
def test_a_broken_reply_of_the_first_address_is_one_failed_attempt(
    build, reply: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host name has two addresses, as localhost on many machines; at the first there is another program."""

    async def resolve(self: Any, host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", port)) for last in (2, 1)]

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = listener.accept()[0]
                connection.recv(1 << 16)
                connection.sendall(reply)
                connection.close()

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", resolve)
    with JudgeServer(lambda asked: asked.say("1")) as server, socket.socket() as other:
        other.bind(("127.0.0.2", server.http.server_port))
        other.listen()
        threading.Thread(target=serve, args=(other,), daemon=True).start()
        address = server.address.replace("127.0.0.1", "judge.test") + "/chat/completions"
        one = build(server, judge_retries=1)
        one.rewards[0].caller.address = address
        errors = errors_of(one, [group("a", "b", answer="x")])
    assert all(re.match(r"had no reply from .*2 attempts", error) for error in errors), errors


def test_a_pattern_that_needs_exponential_time_costs_its_own_reply(build) -> None:
    def answer(asked: Asked) -> None:
        asked.say("a" * 40 + "!" if asked.question.split("|")[1] == "odd" else "aa")

    with JudgeServer(answer) as server:
        one = build(server, judge_pattern="^((?:a|aa)+)$", judge_words=("aa = 1",), timeout_seconds=1.0)
        errors = errors_of(one, [group("odd", "even", answer="x")])
    assert errors == [f"could not be read: judge_pattern took longer than 1 s; the reply: '{'a' * 40}!'", ""]


def test_localhost_is_found_at_any_of_its_addresses(build) -> None:
    with JudgeServer(say_the_number) as server:
        one = build(server.address.replace("127.0.0.1", "localhost"))
        assert rewards_of(one.grade([group("0.5", answer="x")])) == [0.5]


# ---- other machines ----


def test_a_redirect_is_not_followed(build) -> None:
    with JudgeServer(lambda asked: asked.say("1")) as other:

        def answer(asked: Asked) -> None:
            asked.send(b"", 307, Location=f"{other.address}/chat/completions")

        with JudgeServer(answer) as server:
            [error] = errors_of(build(server), [group("a", answer="x")])
        assert error.startswith(f"was redirected to {other.address}/chat/completions, which is not followed")
        assert not other.questions


@pytest.mark.parametrize("host", ["10.0.0.1", "192.0.2.1", "[2001:db8::1]", "0.0.0.0", "[::ffff:8.8.8.8]", "8.8.8.8"])
def test_an_address_of_another_machine_is_refused_before_the_run(build, host: str) -> None:
    with pytest.raises(ConfigError, match=r"is another machine, which would receive prompts"):
        build(f"http://{host}:8000/v1")


def test_a_name_of_another_machine_is_refused_where_it_is_resolved(build, monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(self: Any, host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("203.0.113.7", port))]  # fmt: skip

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", resolve)
    with JudgeServer(lambda asked: asked.say("1")) as server:
        one = build(server)
        one.rewards[0].caller.address = server.address.replace("127.0.0.1", "judge.test") + "/chat/completions"
        errors = errors_of(one, [group("a", answer="x")])
        assert not server.questions
    assert errors == ["was not asked: judge.test (203.0.113.7) is another machine; allow it with allow_remote = true"]


def test_an_unknown_host_name_is_one_line(build) -> None:
    [error] = errors_of(build("http://no-such-host.invalid:9/v1"), [group("a", answer="x")])
    assert error.startswith("was not asked: the host name no-such-host.invalid cannot be resolved (")


@pytest.mark.slow
def test_a_proxy_of_the_environment_is_not_used_on_this_machine(build, monkeypatch: pytest.MonkeyPatch) -> None:
    with JudgeServer(lambda asked: asked.say("1")) as proxy, JudgeServer(say_the_number) as server:
        monkeypatch.setenv("HTTP_PROXY", proxy.address)
        monkeypatch.setenv("ALL_PROXY", proxy.address)
        assert rewards_of(build(server).grade([group("0.5", answer="x")])) == [0.5]
        assert not proxy.questions


@pytest.mark.parametrize(
    ("address", "here"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("fe80::1%eth0", False),
     ("0.0.0.0", False), ("::", False), ("128.0.0.1", False), ("::ffff:8.8.8.8", False)],
)  # fmt: skip
def test_which_addresses_are_this_machine(address: str, here: bool) -> None:
    assert is_this_machine(address) is here


# ---- the token ----


@pytest.mark.slow
def test_the_token_is_sent_and_never_shown(build, monkeypatch, tmp_path: Path, capfd) -> None:
    """The server repeats the header in a reply and in an error."""
    monkeypatch.setenv("JUDGE_TOKEN", f" {TOKEN}\n")

    def answer(asked: Asked) -> None:
        if "bad" in asked.question:
            asked.send(f"who is {asked.authorization}?".encode(), 403)
        else:
            asked.say(f"{asked.authorization} gets 1")

    with JudgeServer(answer) as server:
        one = build(server, judge_token_variable="JUDGE_TOKEN")
        groups = [group("a", "b", "c", "d", "bad", answer="x")]
        one.grade(groups)
        assert server.authorizations == [f"Bearer {TOKEN}"] * 5
        [error] = errors_of(one, [group("bad", answer="x")])
    assert error == "got HTTP status 403: who is Bearer [token]?"
    assert groups[0].rollouts[0].extras["judge"]["reply"] == "Bearer [token] gets 1"
    written = "".join(file.read_text() for file in tmp_path.rglob("*") if file.is_file())
    assert "[token] gets 1" in written
    assert TOKEN not in written + "".join(capfd.readouterr())


FORMS = {
    "quoted": lambda token: quote(token, safe=""),
    "json": lambda token: json.dumps({"error": {"message": f"bad key {token}"}}),
    "basic": lambda token: "Basic " + base64.b64encode(f"user:{token}".encode()).decode(),
    "repr": lambda token: repr({"Authorization": f"Bearer {token}"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_no_form_of_the_token_reaches_an_error_or_a_reply(build, form: str, tmp_path: Path) -> None:
    token = "tok/en+5d'41%40\"2abc\\4b2a76"
    (tmp_path / "secret").write_text(token)
    text = FORMS[form](token)

    def answer(asked: Asked) -> None:
        kind = asked.question.split("|")[1]
        if kind == "moved":
            asked.send(b"", 302, Location=f"http://127.0.0.1/login?from={text}")
        elif kind == "said":
            asked.say(f"{text} gets 1")
        else:
            asked.send(text.encode(), int(kind))

    with JudgeServer(answer) as server:
        one = build(server, judge_token_file=str(tmp_path / "secret"))
        columns = {"prompts": ["p"] * 4, "completions": ["403", "200", "moved", "said"], "answer": ["y"] * 4}
        results = one.rewards[0].caller.call(columns, 0, 60.0)
    shown = json.dumps([results.errors, results.extras], ensure_ascii=False)
    for part in (text, token, *(json.dumps(known)[1:-1] for known in (text, token))):
        assert part not in shown
    assert shown.count("[token]") >= 4


@pytest.mark.parametrize("content", ["tok\nen", "tok\r\nX-Other: en", "two words", "tok\x00en", "töken", "x" * 5000])
def test_a_token_that_cannot_be_sent_is_refused_where_it_is_read(build, content: str, tmp_path: Path) -> None:
    """The file was changed after the recipe was checked."""
    path = tmp_path / "secret"
    path.write_text(TOKEN)
    with JudgeServer(lambda asked: asked.say("1")) as server:
        one = build(server, judge_token_file=str(path))
        path.write_bytes(content.encode())
        [error] = errors_of(one, [group("a", answer="x")])
        assert not server.questions
    assert error.startswith(f"was not asked: {path} holds no token: one word")
    assert content[:4] not in error.replace(str(path), "").replace("token", "")


def test_the_token_of_a_file(build, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(TOKEN + "\n")
    with JudgeServer(lambda asked: asked.say("1")) as server:
        build(server, judge_token_file=str(tmp_path / "secret")).grade([group("a", answer="x")])
        assert server.authorizations == [f"Bearer {TOKEN}"]


# ---- the cache ----


@pytest.mark.slow
def test_another_process_asks_nothing_twice_and_every_part_of_a_request_counts(build) -> None:
    with JudgeServer(say_the_number) as server:
        build(server).grade([group("0.1", "0.2", answer="x")])
        build(server, judge_pattern="is (.*)").grade([group("0.1", "0.2", answer="x")])
        assert len(server.questions) == 2
        build(server, judge_model="other").grade([group("0.1", answer="x")])
        build(server, judge_temperature=0.5).grade([group("0.1", answer="x")])
        assert len(server.questions) == 4


def test_faults_are_not_stored_and_unreadable_replies_are(build) -> None:
    def answer(asked: Asked) -> None:
        asked.say("no idea") if "odd" in asked.question else asked.send(b"", 500)

    with JudgeServer(answer) as server:
        one = build(server)
        errors_of(one, [group("odd", "down", answer="x")])
        errors_of(one, [group("odd", "down", answer="x")])
        assert sorted(server.questions) == ["p|down|x", "p|down|x", "p|odd|x"]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"key": "x", "text": "1", "cut": false}', b"\xff", None])
def test_a_damaged_file_of_the_cache_counts_as_missing(tmp_path: Path, damage: bytes | None) -> None:
    cache, request = ReplyCache(tmp_path), {"model": "m", "messages": []}
    key = ReplyCache.key("http://a", request)
    assert cache.get(key) is None
    cache.put(key, request, Reply("1", cut=True))
    assert cache.get(key) == Reply("1", cut=True)
    [file] = (file for file in tmp_path.rglob("*") if file.is_file())
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    if damage is None:
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(damage)
    assert cache.get(key) is None


@pytest.mark.parametrize("has_links", [True, False])
def test_a_question_keeps_its_first_reply(tmp_path: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise PermissionError

    if not has_links:
        monkeypatch.setattr("os.link", link)
    cache, first = ReplyCache(tmp_path), Reply("1", cut=False)
    assert cache.put("ab12", {}, first) == first
    assert cache.put("ab12", {}, Reply("2", cut=False)) == first == cache.get("ab12")
    [file] = (file for file in tmp_path.rglob("*") if file.is_file())
    file.write_bytes(b"{")
    assert cache.put("ab12", {}, Reply("3", cut=False)) == Reply("3", cut=False) == cache.get("ab12")
    assert [found for found in tmp_path.rglob("*") if found.is_file()] == [file]


def test_two_runs_that_share_a_cache_count_the_same_reply(build) -> None:
    """Both ask the question before either has a reply; the judge gives them different ones."""
    barrier = threading.Barrier(2)

    def answer(asked: Asked) -> None:
        barrier.wait(60)
        asked.say(f"0.{asked.number + 1}")

    with JudgeServer(answer) as server:
        judges = [build(server).rewards[0].caller for _ in range(3)]
        asked = {"prompts": ["p"], "completions": ["a"], "answer": ["x"]}
        calls = [judge.start(asked, 0, 60.0) for judge in judges[:2]]
        scores = [call.result().values for call in calls]
        assert len(server.questions) == 2
        assert scores[0] == scores[1] == judges[2].call(asked, 0, 60.0).values


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_costs_no_score(build, tmp_path: Path, capfd) -> None:
    (tmp_path / "cache").write_text("a file in the folder's place")
    with JudgeServer(say_the_number) as server:
        one = build(server)
        assert rewards_of(one.grade([group("0.1", "0.2", answer="x")])) == [0.1, 0.2]
        one.close()
    assert capfd.readouterr().err.count("the judge's replies cannot be stored in") == 1


# ---- a judge that ranks a group ----


RANKING: dict[str, Any] = {
    "judge_prompt": "{prompt}\n{answer}\n{completions}", "judge_field": "scores", "judge_range": (0.0, 10.0),
}  # fmt: skip
BESIDE = RewardConfig(name="exact", score=True, weight=0.0)


def numbered(question: str) -> list[str]:
    """The completions of a question in the order in which they are shown."""
    found = re.findall(r'<completion number="(\d+)">\n(.*?)\n</completion>', question, re.DOTALL)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [text for _, text in found]


def by_length(asked: Asked) -> None:
    asked.say(json.dumps({"why": "longer is better", "scores": [len(text) for text in numbered(asked.question)]}))


def from_the_longest(asked: Asked) -> None:
    texts = numbered(asked.question)
    asked.say(json.dumps({"scores": [texts.index(text) + 1 for text in sorted(texts, key=len, reverse=True)]}))


@pytest.mark.parametrize(
    ("act", "order", "expected"),
    [(by_length, False, [1.0, 4.0, 1.0, 2.0]), (from_the_longest, True, [0.0, 10.0, 0.0, 5.0])],
)
def test_one_question_scores_all_completions_of_a_group(build, act, order: bool, expected: list[float]) -> None:
    """Equal completions are shown once; a group is never compared with another one, also of the same prompt."""
    with JudgeServer(act) as server:
        one = build(server, beside=[BESIDE], **RANKING, judge_order=order)
        groups = [
            group("c", "cccc", "c", "cc", answer="x"),
            group("bbb", "bb", answer="x"),
            group("c", "c", answer="x"),
        ]
        graded = one.grade(groups)
        assert rewards_of(graded)[:4] == expected
        assert rewards_of(graded)[4:6] == ([10.0, 0.0] if order else [3.0, 2.0])
        assert rewards_of(graded)[6:] == ([5.0, 5.0] if order else [1.0, 1.0]), "equal ones have a score, not 0"
        assert sorted(sorted(numbered(question)) for question in server.questions) == [
            ["bb", "bbb"],
            *([] if order else [["c"]]),
            ["c", "cc", "cccc"],
        ]
        [question] = [question for question in server.questions if "cccc" in question]
        assert [numbered(question)[rollout.extras["judge"]["number"] - 1] for rollout in groups[0].rollouts] == [
            "c", "cccc", "c", "cc",
        ]  # fmt: skip
        asked = len(server.questions)
        one.grade([group("cc", "cccc", "c", answer="x")])
        assert len(server.questions) == asked, "the order of a question does not depend on the order of the siblings"


def test_the_places_of_completions_are_random_and_repeatable(build) -> None:
    first = []
    for _ in range(2):
        with JudgeServer(by_length) as server:
            one = build(server, beside=[BESIDE], **RANKING)
            one.grade([group("low", f"high {number}", answer="x") for number in range(40)])
        first.append([numbered(question)[0] == "low" for question in sorted(server.questions)])
    assert first[0] == first[1]
    assert 10 <= sum(first[0]) <= 30  # 20 expected, standard deviation 3.2


@pytest.mark.parametrize(
    ("reply", "order", "why"),
    [
        ('{"scores": [1, 2]}', False, "no JSON object with a list of 3 in 'scores'"),
        ('{"scores": [1, 2, 3, 4]}', False, "no JSON object with a list of 3 in 'scores'"),
        ('{"scores": 3}', False, "no JSON object with a list of 3 in 'scores'"),
        ("7", False, "no JSON object with a list of 3 in 'scores'"),
        ('{"scores": [1, 2, 11]}', False, "the score 11 is outside judge_range"),
        ('{"scores": [1, 2, null]}', False, "no number where the score should be"),
        ('{"scores": [1, 2, NaN]}', False, "is not finite"),
        ('{"scores": [1, 2, "good"]}', False, "no number where the score should be"),
        ('{"scores": [1, 2, 1%s]}' % ("0" * 400), False, "the score is too large"),
        ('{"scores": [1, 2, 2]}', True, "is not an order of the numbers 1 to 3"),
        ('{"scores": [0, 1, 2]}', True, "is not an order of the numbers 1 to 3"),
        ('{"scores": [1, 2, "three"]}', True, "is not an order of the numbers 1 to 3"),
        ('{"scores": [1, 2, 3', True, "no JSON object with a list of 3 in 'scores'"),
    ],
)
def test_a_malformed_or_partial_list_fails_its_group_only(build, reply: str, order: bool, why: str) -> None:
    def answer(asked: Asked) -> None:
        count = len(numbered(asked.question))
        asked.say(reply if count == 3 else json.dumps({"scores": list(range(1, count + 1)) if order else [5] * count}))

    with JudgeServer(answer) as server:
        one = build(server, beside=[BESIDE], **RANKING, judge_order=order)
        groups = [group("a", "b", "c", answer="x"), group(*map(str, range(20)), answer="x")]
        if not order:  # equal ones with a score out of range
            alone = group("a", "a", answer="x")
            assert rewards_of(build(server, beside=[BESIDE], **RANKING | {"judge_range": (0, 4)}).grade([alone])) == [
                0.0, 0.0,
            ]  # fmt: skip
        found = rewards_of(one.grade(groups))
        assert found[:3] == [None] * 3
        assert None not in found[3:]
        assert all(why in error for error in errors_of(one, groups[:1]))


def test_a_judge_that_ranks_is_no_score_of_an_evaluation_and_is_tried_beside_an_empty_completion(build) -> None:
    with pytest.raises(ConfigError, match="let another reward have score = true"):
        build("http://127.0.0.1:9", **RANKING)
    with JudgeServer(by_length) as server:
        one = build(server, beside=[BESIDE], **RANKING)
        assert one.score_name == "exact"
        one.check([Start(index=0, prompt="p", columns={"answer": "0.5"})])
        assert sorted(numbered(server.questions[0])) == ["", "0.5"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--algorithm ppo", "ppo compares groups with each other"),
        ("--adaptive true --initial-group-size 2", "a group is sampled and judged in two parts"),
        ("--group-size 33", "at most 32, and the group size is 33"),
        ("--final-group-size 40", "at most 32, and the group size is 40"),
    ],
)
def test_what_compares_more_than_one_question_is_refused(words: str, why: str, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[task]\nname = "arithmetic"\n[[rewards]]\njudge = "http://localhost:8000/v1"\njudge_model = "m"\n'
        'judge_prompt = "{completions}"\njudge_field = "scores"\n[[rewards]]\nname = "numeric"\n'
    )
    read_recipe(recipe)
    with pytest.raises(ConfigError, match=why):
        read_recipe(recipe, words.split())


# ---- the dry run and the fields ----


def test_the_dry_run_asks_and_reports_a_fault_in_one_line(build) -> None:
    starts = [Start(index=0, prompt="p", columns={"answer": "0.5"})]
    with JudgeServer(say_the_number) as server:
        build(server).check(starts)
        assert server.questions == ["p|0.5|0.5"]
    with JudgeServer(lambda asked: asked.say("hello")) as server, pytest.raises(ConfigError) as caught:
        build(server).check(starts)
    assert str(caught.value) == (
        "reward 'judge' could not be read: there is no number where the score should be; the reply: 'hello', in a dry "
        "run on the right answer"
    )
    starts = [Start(index=place, prompt="p", columns={"answer": answer}) for place, answer in enumerate(("no", "0.5"))]
    with JudgeServer(say_the_number) as server:  # as in a run, one that fails is no reason to stop
        build(server).check(starts)
        build(server).check(starts[::-1])
        with pytest.raises(ConfigError, match="no number where the score should be; the reply: 'The score is no'"):
            build(server).check([starts[0], starts[0]])
    with pytest.raises(ConfigError, match=r"has \{answer\} in its question, but there is only \{prompt\}, \{compl"):
        build("http://127.0.0.1:9").check([Start(index=0, prompt="p", columns={})])


GOOD: dict[str, Any] = {"judge": "http://127.0.0.1:1/v1", "judge_model": "m", "judge_prompt": "{completion}"}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"judge": "127.0.0.1:8000"}, "must be an address such as http://"),
        ({"judge": "ftp://127.0.0.1"}, "must be an address such as http://"),
        ({"judge": "http://"}, "must be an address such as http://"),
        ({"judge": "http://127.0.0.1:port"}, "is not an address"),
        ({"judge": "http://[::1"}, "is not an address"),
        ({"judge": f"http://me:{TOKEN}@127.0.0.1/v1"}, "has a user name; an access token belongs in a file"),
        ({"judge": f"ftp://me:{TOKEN}@127.0.0.1/v1?key={TOKEN}"}, "has a user name"),
        ({"judge": f"ftp://127.0.0.1/v1?key={TOKEN}"}, "must be an address"),
        ({"judge": f"http://me:{TOKEN}@127.0.0.1:99999/v1"}, "has a user name"),
        ({"judge": f"http://me:{TOKEN}@[::1"}, "has a user name"),
        ({"judge": f"me:{TOKEN}@127.0.0.1"}, "has a user name"),
        ({"judge": f"http://127.0.0.1/v1?key={TOKEN}"}, "has a query"),
        ({"judge_model": ""}, "judge_model is empty"),
        ({"judge_prompt": ""}, "has no judge_prompt"),
        ({"judge_prompt": "is it good?"}, r"has no \{completion\}"),
        ({"judge_prompt": "{completion} {completions}", "judge_field": "s"}, r"has \{completion\} and \{completions\}"),
        ({"judge_prompt": "{completions}"}, "a JSON object with a list: name its field in judge_field"),
        (
            {"judge_prompt": "{completions}", "judge_field": "s", "score": True},
            "score is set, but the judge's question",
        ),
        ({"judge_prompt": "{completions}", "judge_field": "s", "binary": True}, "binary is set, but the judge's"),
        ({"judge_order": True}, r"judge_order is for a question with all completions .* write \{completions\}"),
        ({"judge_prompt_file": "x.txt"}, "has both judge_prompt and judge_prompt_file"),
        ({"judge_prompt": "", "judge_prompt_file": "none.txt"}, "judge_prompt_file: there is no file none.txt"),
        ({"judge_pattern": "("}, "is not a regular expression"),
        ({"judge_pattern": "[0-9]+"}, "needs one group"),
        ({"judge_pattern": "(.)", "judge_field": "score"}, "both judge_pattern and judge_field"),
        ({"judge_words": ("good",)}, "an entry is a word and its score"),
        ({"judge_words": ("good = x",)}, "an entry is a word and its score"),
        ({"judge_words": ("good = 1", "Good = 0")}, "'good' twice"),
        ({"judge_words": ("good = 2",)}, "outside judge_range"),
        ({"judge_range": (1.0,)}, "must be the lowest and the highest"),
        ({"judge_range": (1.0, 0.0)}, "must be the lowest and the highest"),
        ({"judge_request": "{"}, "judge_request is not valid JSON"),
        ({"judge_request": "[]"}, "must be a JSON object"),
        ({"judge_request": '{"messages": []}'}, "which covey sets itself"),
        ({"judge_token_variable": "NO_SUCH_TOKEN"}, "there is no variable NO_SUCH_TOKEN with a value"),
        ({"judge_token_variable": TOKEN}, "the name of an environment variable, not the token"),
        ({"judge_token_file": "none"}, "judge_token_file: there is no file none"),
        ({"judge_token_variable": "A", "judge_token_file": "b"}, "both judge_token_variable and judge_token_file"),
        ({"per_step": True}, "per_step is set, but not used with judge"),
        ({"name": "numeric"}, "has name and judge: give exactly one of them"),
        ({"judge": "", "name": "numeric"}, "judge_model is set, but not used with numeric"),
        ({"judge": "", "name": "numeric", "judge_model": "", "judge_prompt": "", "allow_remote": True}, "allow_remote"),
    ],
)
def test_a_wrong_field_is_one_line_without_the_token(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        check_reward(RewardConfig(**(GOOD | fields)), "[[rewards]] number 1")
    assert "\n" not in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("text", ["", "two words", "café"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match="holds no token") as caught:
        check_reward(RewardConfig(**GOOD, judge_token_file=str(tmp_path / "t")), "r")
    assert not text or text not in str(caught.value)


def test_a_recipe_with_a_judge_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("question.txt").write_text("Is {completion} a good reply to {prompt}?", encoding="utf-8")
    Path("r.toml").write_text(
        '[task]\nname = "arithmetic"\n[[rewards]]\njudge = "http://localhost:8000/v1"\njudge_model = "m"\n'
        'judge_prompt_file = "question.txt"\njudge_range = [0, 10]\njudge_words = ["good = 10", "bad = 0"]\n'
    )
    [reward] = read_recipe("r.toml").rewards  # type: ignore[union-attr]
    assert (reward.label, reward.judge_range, reward.judge_words) == ("judge", (0, 10), ("good = 10", "bad = 0"))
