"""Chat templates are programs that came with a model: each gives text, or one line that says why not."""

import pytest

from covey.config import ConfigError
from covey.llm.model.chat import Chat
from covey.llm.model.chat_templates import TemplateFailed, is_finite, render
from helpers.cases import slow_unless
from helpers.tiny_models import CHAT_TEMPLATE, tiny_tokenizer

USER = [{"role": "user", "content": "1+2"}]
TALK = [{"role": "system", "content": "s"}, *USER, {"role": "assistant", "content": "3"}, *USER]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nHello<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set text = m['content'] | trim %}[{{ text }}]{% endfor %}"
)
COUNTED = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n ~ m.content }}{% endfor %}"
)
TOOLS = "{% if tools is not none and tools %}{{ tools | tojson }}{% endif %}{{ messages[-1].content }}"
MACRO = "{% macro show(m) %}<{{ m.content }}>{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}"
MARKED = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
DATE = "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "finite"),
    [(CHAT_TEMPLATE, True), (CHATML, True), (ALTERNATING, True), (COUNTED, False), (TOOLS, False), (MACRO, False),
     (MARKED, False), (DATE, False)],
)  # fmt: skip
@pytest.mark.parametrize("messages", [USER, TALK])
def test_a_template_gives_the_text_that_transformers_gives(template, finite, messages):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert Chat(tokenizer, frozenset()).render(messages) == expected
    assert is_finite(template) == finite, "whether it is rendered in this process"


REFUSED = {
    "does not parse": ("{% for", "does not parse: line 1"),
    "raises": ("{{ raise_exception('no system\nrole') }}", "refuses the messages: no system role$"),
    "alternates": (ALTERNATING, "refuses the messages: roles must alternate"),
    "class": ("{{ ''.__class__.__mro__ }}", "touches what it may not: access to attribute '__class__'"),
    "globals": ("{{ self.__init__.__globals__ }}", "touches what it may not"),
    "open": ("{{ open('/etc/passwd').read() }}", "asks for what there is not: 'open' is undefined"),
    "import": ("{% import 'os' as os %}", "fails: TypeError"),
    "undefined": ("{{ tools[0].name }}", "asks for what there is not"),
    "wrong type": ("{{ messages + 1 }}", "fails: TypeError"),
    "division": ("{{ 1 / 0 }}", "fails: ZeroDivisionError"),
    "range": ("{% for i in range(10**9) %}{% endfor %}", "fails: OverflowError"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
    "memory": ("{{ 'a' * 10**12 }}", "does not end within 3 s of processor time, or needs"),
    "wide format": ("{{ '%99999999999d' % 1 }}", "does not end within"),
    "growth": ("{% set x = namespace(s='aa') %}{% for i in range(60) %}{% set x.s = x.s ~ x.s %}{% endfor %}",
               "does not end within"),
    "escapes": ("{% set x = '\\\\' | tojson" + " | tojson" * 60 + " %}{{ x }}", "does not end|makes .* characters"),
    "no text": (5, "is not text"),
}  # fmt: skip


@pytest.mark.parametrize("case", slow_unless(set(REFUSED) - {"wide format", "growth", "escapes"}, REFUSED))
def test_a_template_that_gives_no_text_is_one_line(case):
    template, message = REFUSED[case]
    messages = [USER[0], USER[0]] if case == "alternates" else USER
    with pytest.raises(TemplateFailed, match=message) as failed:
        render(template, messages, TOKENS)
    assert "\n" not in str(failed.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
        pytest.param("{{ (10 ** (10 ** 10)) % 7 }}", marks=pytest.mark.slow),
    ],
)
def test_a_template_that_never_ends_is_ended_and_the_next_one_is_rendered(template):
    with pytest.raises(TemplateFailed, match="does not end within 3 s of processor time"):
        render(template, USER, TOKENS)
    assert render(COUNTED, USER, TOKENS) == "11+2"


def test_a_chat_names_the_roles_and_the_way_out():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(
        ConfigError,
        match=r"refuses the messages: System role not supported \(the roles are system, user, assistant, user",
    ) as refused:
        Chat(tokenizer, frozenset()).encode(TALK)
    assert "\n" not in str(refused.value)
    tokenizer.chat_template = "{% if false %}x{% endif %}"
    with pytest.raises(ConfigError, match="makes no text of the messages user"):
        Chat(tokenizer, frozenset()).encode(USER)
    tokenizer.chat_template = {"tool_use": CHATML}
    with pytest.raises(ConfigError, match="several chat templates and none is called 'default'"):
        Chat(tokenizer, frozenset()).encode(USER)


def test_an_end_token_that_the_tokenizer_appends_is_left_out():
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    plain = Chat(tokenizer, frozenset({1})).encode("1+2")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A <end>", special_tokens=[("<unk>", 2), ("<end>", 1)]
    )
    assert tokenizer("1+2")["input_ids"] == [2, *plain, 1]
    chat = Chat(tokenizer, frozenset({1}))
    assert chat.encode("1+2") == (2, *plain), "what stands before the text stays"
    assert chat.encode("1<end>") == (2, plain[0], 1), "and so does an end token of the prompt's own"


@pytest.mark.parametrize(
    ("kind", "fields", "limit"),
    [
        ("llama", {"max_position_embeddings": 77}, 77),
        ("gpt2", {"n_positions": 77}, 77),
        ("mpt", {"max_seq_len": 77}, 77),
        ("opt", {"max_position_embeddings": 77}, 77),
        ("bloom", {}, None),
    ],
)
def test_the_limit_of_positions_has_many_names(kind, fields, limit):
    from transformers import AutoConfig

    from covey.llm.model.architecture import position_limit

    assert position_limit(AutoConfig.for_model(kind, **fields)) == limit
