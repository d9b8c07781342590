"""Renders chat templates safely: a template is a program that came with a model.

transformers renders them in a sandbox without access to files and Python objects. But a program may also run forever,
or exhaust memory. So a template is rendered in a process of its own with limits of processor time and memory, unless it
is provably finite, like most templates, which iterate over the messages and join texts.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

from covey.runtime.worker.child import InvalidResult, Message, limit_resources
from covey.runtime.worker.process import CallError, Worker

CPU_SECONDS = 3.0  # for one prompt, which usually takes a millisecond
WALL_SECONDS = 60.0  # long, for a machine with other load
START_SECONDS = 120.0  # for the process to import transformers
MEMORY_BYTES = 1 << 30
MOST_CHARACTERS = 1 << 24  # of a rendered prompt
TOO_MUCH = f"does not end within {CPU_SECONDS:g} s of processor time, or needs more than {MEMORY_BYTES >> 30} GiB"

FINITE_NODES = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.Getattr, nodes.Getitem,
    nodes.Slice, nodes.If, nodes.CondExpr, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Add,
    nodes.Sub, nodes.Concat, nodes.Test, nodes.For, nodes.Filter, nodes.Call, nodes.Assign, nodes.Neg,
)  # fmt: skip
FINITE_FILTERS = {"trim", "length", "upper", "lower", "first", "last", "string", "default"}
MOST_LOOPS = 2  # nested loops: messages, and the parts of a message


class TemplateFailed(InvalidResult):
    """A chat template cannot be rendered; one line with the reason."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, Any],
    *,
    answer_begins: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Render the text of a chat.

    Args:
        template: the tokenizer's template, in Jinja.
        messages: with role and content.
        special_tokens: name in templates -> the tokenizer's special token.
        answer_begins: the text ends with the beginning of the model's answer, which follows the messages; if False, the
            answer is among the messages.
        tools: JSON schemas of the functions that the model may call.

    Raises:
        TemplateFailed: if the template does not parse, refuses the messages, does not end or needs too much memory.
    """
    request = {
        "template": template,
        "messages": list(messages),
        "special_tokens": dict(special_tokens),
        "answer_begins": answer_begins,
        "tools": list(tools),
    }
    if not isinstance(template, str):
        raise TemplateFailed("is not text")
    return _text(request) if is_finite(template) else str(_in_worker(request)["text"])


def parse_response(template: Any, prompt: str, text: str) -> Mapping[str, Any]:
    """The message that transformers' response parsing reads from the text of a turn.

    Args:
        template: the `response_template` of a tokenizer, whose regular expressions came with a model.
        prompt: the text before the turn.

    Raises:
        TemplateFailed: if the template is not one, or does not read the text.
    """
    message: Mapping[str, Any] = _in_worker({"response_template": template, "prompt": prompt, "text": text})["message"]
    return message


def _in_worker(request: Mapping[str, Any]) -> Message:
    try:
        return _worker(os.getpid()).call(json.loads(json.dumps(request, default=str)), WALL_SECONDS)
    except InvalidResult as error:
        raise TemplateFailed(str(error)) from None
    except CallError:
        raise TemplateFailed(TOO_MUCH) from None
    except OSError as error:
        raise TemplateFailed(f"has no process to be rendered in ({error.strerror})") from error


def _text(request: Mapping[str, Any]) -> str:
    """The text for a request of `render`. Raises TemplateFailed."""

    def rendered(tools: Any) -> str:
        texts: Any = render_jinja_template(
            conversations=[request["messages"]],
            chat_template=request["template"],
            tools=tools,
            add_generation_prompt=request["answer_begins"],
            **request["special_tokens"],
        )
        return str(texts[0][0])

    try:
        try:
            text = rendered(request["tools"] or None)
        except TypeError:  # of a template for tools that always reads their list
            text = rendered(request["tools"])
    except TemplateSyntaxError as error:
        reason = f"does not parse: line {error.lineno}: {error.message}"
    except MemoryError:
        reason = TOO_MUCH
    except RecursionError:
        reason = "calls itself without end"
    except SecurityError as error:
        reason = f"touches what it may not: {error.message}"
    except UndefinedError as error:
        reason = f"asks for what there is not: {error.message}"
    except TemplateError as error:
        reason = f"refuses the messages: {error.message}"
    except Exception as error:  # a template is a program and can raise anything
        reason = f"fails: {type(error).__name__}: {error}"
    else:
        if len(text) <= MOST_CHARACTERS:
            return text
        reason = f"makes {len(text):,} characters of a prompt"
    raise TemplateFailed(" ".join(reason.split())[:400])


def _message(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message for a request of `parse_response`. Raises TemplateFailed."""
    from transformers.utils.chat_parsing import parse_response

    try:
        message = parse_response(request["text"], request["response_template"], prefix=request["prompt"])
        json.dumps(message)
    except Exception as error:  # its regular expressions and transforms are the model's
        raise TemplateFailed(" ".join(str(error).split())[:400]) from None
    return message


@lru_cache(maxsize=64)
def is_finite(template: str) -> bool:
    """True if a template's time and memory are provably bounded by the length of the messages.

    It then has no function except `raise_exception`, no macro, no arithmetic that grows, at most two nested loops, each
    over a part of the messages, and no variable that is built from texts.
    """
    environment = ImmutableSandboxedEnvironment(extensions=[loopcontrols])
    try:
        tree = environment.parse(template)
    except (TemplateError, RecursionError):
        return False
    return (
        len(template) < 1 << 16 and all(_is_finite_node(node) for node in _below(tree)) and _loops(tree) <= MOST_LOOPS
    )


def _below(node: nodes.Node) -> list[nodes.Node]:
    found = [node]
    for child in node.iter_child_nodes():
        found += _below(child)
    return found


def _is_finite_node(node: nodes.Node) -> bool:
    if not isinstance(node, (*FINITE_NODES, nodes.Mod)):
        return False
    if isinstance(node, nodes.Filter):
        return node.name in FINITE_FILTERS
    if isinstance(node, nodes.Call):
        return isinstance(node.node, nodes.Name) and node.node.name == "raise_exception"
    if isinstance(node, nodes.Mod):  # of numbers; for a text '%' is formatting, whose result has no bounded length
        left = node.left
        return isinstance(left, nodes.Getattr) and isinstance(left.node, nodes.Name) and left.node.name == "loop"
    if isinstance(node, nodes.For):
        return not node.recursive and _is_part(node.iter)
    if isinstance(node, nodes.Assign):
        return _is_part(node.node)
    return True


def _is_part(node: nodes.Node | None) -> bool:
    """True for a constant, a variable, or a part of one, which is not longer."""
    if isinstance(node, (nodes.Getattr, nodes.Getitem, nodes.Filter)):
        return _is_part(node.node)
    return isinstance(node, (nodes.Name, nodes.Const))


def _loops(node: nodes.Node) -> int:
    inside = max((_loops(child) for child in node.iter_child_nodes()), default=0)
    return inside + isinstance(node, nodes.For)


# ---- the process ----


def begin(setup: Message) -> tuple[Message, Callable[[Message], Message]]:
    """The service of a worker, which limits its memory."""
    used = _virtual_bytes()
    if used:
        limit_resources(RLIMIT_AS=used + MEMORY_BYTES, RLIMIT_CORE=0)
    return {}, _answer


def _answer(request: Message) -> Message:
    # The default action ends the process even during a call of C. The limit is processor time, which does not depend on
    # other load of the machine.
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        return {"message": _message(request)} if "response_template" in request else {"text": _text(request)}
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _virtual_bytes() -> int:
    """Size of this process's address space in bytes; 0 if it is unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _worker(process: int) -> Worker:
    """The single child of this process, by its number: that of a parent answers the parent."""
    return Worker(sys.modules[__name__], dict, START_SECONDS, repeat=False)
