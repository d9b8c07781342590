"""Chat templates that write tool calls in further formats, as public models have them, reduced to what writes turns."""
# ruff: noqa: E501 -- templates have long lines

import copy
from functools import lru_cache

from covey.llm.conversation.styles import call_format
from covey.llm.conversation.tool_calls import FORMATS as ROWS
from covey.llm.conversation.tool_calls import Format
from covey.llm.model.chat import Chat
from helpers.chat_models import CHAT_MODELS, ChatModel, chat_of

HERMES3 = r"""{{- bos_token }}
{{- '<|im_start|>system\n' }}
{{- "You are a function calling AI model. Here are the available tools: <tools> " }}
{%- for tool in tools or [] %}
    {{- tool.function | tojson }}
{%- endfor %}
{{- " </tools>\nFor each function call return a JSON object with the function name and arguments within <tool_call></tool_call> tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-dict>}\n</tool_call><|im_end|>\n" }}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\n<tool_call>\n' }}
            {%- set tool_call = tool_call.function %}
            {{- '{"name": "' + tool_call.name + '", "arguments": ' + tool_call.arguments|tojson + '}' }}
            {{- '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>tool\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

QWEN3_CODER = r"""{%- if tools %}
    {{- "<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n<function>\n<name>" + tool.function.name + "</name>" }}
        {%- for name, schema in tool.function.parameters.properties|items %}
            {{- "\n<parameter>\n<name>" + name + "</name>\n<type>" + (schema.type | string) + "</type>\n</parameter>" }}
        {%- endfor %}
        {{- "\n</function>" }}
    {%- endfor %}
    {{- "\n</tools>\n\nReply in the following format with NO suffix:\n\n<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>\n</tool_call><|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content | trim + '\n' }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}
            {%- for name, value in tool_call.arguments|items %}
                {{- '<parameter=' + name + '>\n' }}
                {%- set value = value | tojson if value is mapping or (value is sequence and value is not string) else value | string %}
                {{- value }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

MISTRAL_SMALL = r"""{{- bos_token }}
{%- if tools %}
    {{- '[AVAILABLE_TOOLS]' + tools|tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- message.content or '' }}
        {%- for tool in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + tool.function.name + '[ARGS]' + tool.function.arguments|tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
"""

TEMPLATES = {
    **{name: model.template for name, model in CHAT_MODELS.items()},
    "hermes3": HERMES3,
    "qwen3_coder": QWEN3_CODER,
    "mistral_small": MISTRAL_SMALL,
}
FORMATS = {
    "smollm": "fenced", "gemma": "fenced", "phi3": "fenced", "qwen2.5": "hermes", "qwen3": "hermes",
    "hermes3": "hermes", "qwen3_coder": "of the template", "llama3": "llama3", "mistral": "mistral",
    "mistral_small": "mistral",
}  # fmt: skip
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ON_TOKENIZER_OF = {"hermes3": "qwen2.5", "qwen3_coder": "qwen2.5", "mistral_small": "mistral"}


def _framed(calls: str, turn: str = "{{ m.content or '' }}CALLS") -> str:
    """A template in ChatML's frame that writes calls in this way."""
    return (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + turn.replace("CALLS", "{% if m.tool_calls %}" + calls + "{% endif %}")
        + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _each(call: str, between: str = "") -> str:
    """A call for each: `f` is its function, ARGUMENTS its arguments one by one."""
    comma = "{% if not loop.last %}" + between + "{% endif %}" if between else ""
    return "{% for t in m.tool_calls %}{% set f = t.function %}" + call + comma + "{% endfor %}"


_PAIRS = "{% for k, v in f.arguments.items() %}PAIR{% endfor %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_NAMED = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_PYTHON = _each(
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})", "SEPARATOR",
)  # fmt: skip
# Values of Gemma's: strings have marks of their own, keys have none.
_QUOTED = (
    "{% macro value(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{ {%- for k, x in v.items() %}{{ k }}:{{ value(x) }}{% if not loop.last %},{% endif %}"
    "{% endfor -%} }{% elif v is sequence %}[{% for x in v %}{{ value(x) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)
_GLM = _PAIRS.replace("PAIR", "<arg_key>{{ k }}</arg_key>\n<arg_value>" + _VALUE + "</arg_value>\n")
_DEEPSEEK = "<｜tool▁calls▁begin｜>" + _each("<｜tool▁call▁begin｜>CALL<｜tool▁call▁end｜>") + "<｜tool▁calls▁end｜>"

# Name of a format -> a template that writes calls in it, as models of that family do.
FAMILIES = {
    "qwen_xml": QWEN3_CODER,
    "glm": _framed(_each("\n<tool_call>{{ f.name }}\n" + _GLM + "</tool_call>")),
    "hy3": _framed("<tool_calls>\n" + _each("<tool_call>{{ f.name }}<tool_sep>\n" + _GLM + "</tool_call>\n") + "</tool_calls>"),
    "hunyuan": _framed(
        "<tool_calls>" + _each("<tool_call>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```</tool_call>") + "</tool_calls>"
    ),
    "hermes": _framed(_each("<tool_call>\n" + _NAMED + "\n</tool_call>\n")),
    "seed": _framed(_each(
        "\n<seed:tool_call>\n<function={{ f.name }}>\n"
        + _PAIRS.replace("PAIR", "<parameter={{ k }}>{{ v | string }}</parameter>\n") + "</function>\n</seed:tool_call>"
    )),
    "minimax": _framed(
        "\n<minimax:tool_call>\n"
        + _each('<invoke name="{{ f.name }}">\n' + _PAIRS.replace("PAIR", '<parameter name="{{ k }}">' + _VALUE + "</parameter>\n")
                + "</invoke>\n") + "</minimax:tool_call>"
    ),
    "deepseek_xml": _framed(
        "\n\n<｜DSML｜function_calls>\n"
        + _each('<｜DSML｜invoke name="{{ f.name }}">\n' + _PAIRS.replace(
            "PAIR", '<｜DSML｜parameter name="{{ k }}" string="{{ (v is string) | tojson }}">' + _VALUE + "</｜DSML｜parameter>\n")
                + "</｜DSML｜invoke>\n") + "</｜DSML｜function_calls>"
    ),
    "deepseek3": _framed(_DEEPSEEK.replace(
        "CALL", "function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ '' + f.arguments }}\n```")),  # which must be text
    "deepseek31": _framed(_DEEPSEEK.replace("CALL", "{{ f.name }}<｜tool▁sep｜>{{ '' + f.arguments }}")),
    "kimi": _framed(
        "<|tool_calls_section_begin|>"
        + _each("<|tool_call_begin|>{{ t.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>")
        + "<|tool_calls_section_end|>"
    ),
    "cohere": _framed(
        "<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|><|START_ACTION|>[\n"
        + _each('    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', ",\n")
        + "\n]<|END_ACTION|>", "{% if m.role == 'assistant' and m.content %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"
        "{% else %}{{ m.content or '' }}{% endif %}CALLS",
    ),
    "gemma4": _QUOTED.replace("QUOTE", '<|"|>') + _framed(_each("<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>")),
    "functiongemma": _QUOTED.replace("QUOTE", "<escape>")
    + _framed(_each("<start_function_call>call:{{ f.name }}{{ value(f.arguments) }}<end_function_call>")),
    "cohere1": _framed(
        "Action: ```json\n[" + _each('{"tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', ",\n") + "]\n```"
    ),
    "nemotron": _framed("<TOOLCALL>[" + _each(_NAMED, ", ") + "]</TOOLCALL>"),
    "granite3": _framed("<|tool_call|>[" + _each(_NAMED, ", ") + "]"),
    "phi4": _framed("<|tool_call|>[" + _each(_NAMED, ", ") + "]<|/tool_call|>"),
    "apertus": _framed("<|tools_prefix|>[" + _each('{"{{ f.name }}": {{ f.arguments | tojson }}}', ", ") + "]<|tools_suffix|>"),
    "tool_calls": _framed("<tool_calls>[\n" + _each(_NAMED, ",\n") + "\n]</tool_calls>"),
    "olmo3": _framed("<function_calls>" + _PYTHON.replace("SEPARATOR", "{{ '\\n' }}") + "</function_calls>"),
    "lfm2": _framed("<|tool_call_start|>[" + _PYTHON.replace("SEPARATOR", ", ") + "]<|tool_call_end|>"),
    "internlm2": _framed(_each("<|action_start|><|plugin|>\n" + _NAMED.replace("arguments\"", "parameters\"") + "<|action_end|>")),
    "functionary": _framed(_each("<function={{ f.name }}>{{ f.arguments | tojson }}</function>")),
    "lines": _framed("<calls>\n" + _each(_NAMED + "\n") + "</calls>"),
    "numbered": _framed(
        "<|calls|>" + _each("<|call:begin|>{{ t.id }}<|call:name|>{{ f.name }}<|call:args|>{{ f.arguments | tojson }}<|call:end|>")
        + "<|calls:end|>"
    ),
    "cdata": _framed(_each(
        '<function name="{{ f.name }}">'
        + _PAIRS.replace("PAIR", '<param name="{{ k }}">' + _VALUE.replace("{{ v if", "{{ ('<![CDATA[' + v + ']]>') if v is string and '<' in v else v if") + "</param>")
        + "</function>"
    )),
    "json_list": _framed("[" + _each(_NAMED, ", ") + "]"),
    "pythonic": _framed("[" + _PYTHON.replace("SEPARATOR", ", ") + "]"),
}  # fmt: skip

# Nothing marks a call, as in Functionary's turns of several recipients.
UNMARKED = _framed(_each("{{ f.name }}\n{{ f.arguments | tojson }}\n"))

# The frames of models whose turns end or whose results stand in other ways than those of ChatML.
HARMONY = (
    "{% set last = namespace(name=none) %}"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>"
    "{% set last.name = f.name %}"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('a result without a call') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|assistant|>\n<think></think>{% if m.content %}\n{{ m.content }}{% endif %}"
    "{% if m.tool_calls %}" + _each("\n<tool_call>{{ f.name }}\n" + _GLM + "</tool_call>") + "{% endif %}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think></think>{% endif %}"
)
# A result stands in the turn of its call, which the token before it ends.
GEMMA4 = _QUOTED.replace("QUOTE", '<|"|>') + (
    "<bos>{% if tools %}<|turn>system\n{{ tools | tojson }}<turn|>\n{% endif %}{% set ns = namespace(open=false) %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|tool_response>response:{{ m.name }}{value:<|\"|>{{ m.content }}<|\"|>}"
    "<tool_response|>{% else %}{% if not ns.open %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}"
    "{% set ns.open = false %}{% if m.tool_calls %}"
    + _each("<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>")
    + "{% endif %}{{ m.content }}{% if m.tool_calls and not loop.last %}{% set ns.open = true %}{% else %}<turn|>\n{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt and not ns.open %}<|turn>model\n{% endif %}"
)
FRAMES = {
    "harmony": ChatModel(
        HARMONY, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"), ("<|return|>", "<|call|>"),
    ),
    "glm": ChatModel(
        GLM, ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"), ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "gemma4": ChatModel(
        GEMMA4, ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>",
                 '<|"|>'),
        ("<turn|>", "<eos>", "<|tool_response>"),
    ),
}  # fmt: skip


NAMES = tuple(dict.fromkeys([*ROWS, *FAMILIES]))


@lru_cache(maxsize=1)
def formats() -> dict[str, Format]:
    """Rows of the table, and what is observed of the templates of other families, whose names are `NAMES`."""
    return {**{name: call_format(chat_with(name)) for name in FAMILIES}, **ROWS}


def chat_with(name: str) -> Chat:
    """The chat of a model with one of the templates of TEMPLATES or FAMILIES."""
    chat = chat_of(ON_TOKENIZER_OF.get(name, name if name in CHAT_MODELS else "smollm"))
    tokenizer = copy.deepcopy(chat.tokenizer)
    tokenizer.chat_template = {**TEMPLATES, **FAMILIES}[name]
    return Chat(tokenizer, chat.end_ids)
