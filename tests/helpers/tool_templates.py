"""Chat templates that write tool calls in further formats, as public models have them, reduced to what writes turns."""
# ruff: noqa: E501 -- templates have long lines

from __future__ import annotations

from helpers.chat_models import CHAT_MODELS

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
    "hermes3": "hermes", "qwen3_coder": "qwen_xml", "llama3": "llama3", "mistral": "mistral",
    "mistral_small": "mistral",
}  # fmt: skip
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
