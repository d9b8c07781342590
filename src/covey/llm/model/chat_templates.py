"""Renders chat templates safely: a template is a program that came with a model.

transformers renders them in a sandbox without access to files and Python objects. But a program may also run forever,
or exhaust memory. So a template is rendered in a process of its own with limits of processor time and memory, unless it
is provably finite, like most templates, which iterate over the messages and join texts.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

CPU_SECONDS = 3.0  # for one prompt, which usually takes a millisecond
WALL_SECONDS = 60.0  # long, for a machine with other load
START_SECONDS = 120.0  # for the process to import transformers
MEMORY_BYTES = 1 << 30
MOST_CHARACTERS = 1 << 24  # of a rendered prompt

FINITE_NODES = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.Getattr, nodes.Getitem,
    nodes.Slice, nodes.If, nodes.CondExpr, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Add,
    nodes.Sub, nodes.Concat, nodes.Test, nodes.For, nodes.Filter, nodes.Call, nodes.Assign, nodes.Neg,
)  # fmt: skip
FINITE_FILTERS = {"trim", "length", "upper", "lower", "first", "last", "string", "default"}
MOST_LOOPS = 2  # nested loops: messages, and the parts of a message


class TemplateFailed(Exception):
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
        raise TemplateFailed("is no text")
    if not is_finite(template):
        return _worker().render(request)
    return _text_of(reply_to(request))


def reply_to(request: Mapping[str, Any]) -> dict[str, str]:
    """The text for a request of `render`, or the reason why there is none."""
    try:
        rendered: Any = render_jinja_template(
            conversations=[request["messages"]],
            chat_template=request["template"],
            tools=request["tools"] or None,
            add_generation_prompt=request["answer_begins"],
            **request["special_tokens"],
        )
        text = str(rendered[0][0])
    except TemplateSyntaxError as error:
        return {"failed": f"does not parse: line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"failed": _too_much()}
    except RecursionError:
        return {"failed": "calls itself without end"}
    except SecurityError as error:
        return {"failed": f"touches what it may not: {error.message}"}
    except UndefinedError as error:
        return {"failed": f"asks for what there is not: {error.message}"}
    except TemplateError as error:
        return {"failed": f"refuses the messages: {error.message}"}
    except Exception as error:  # a template is a program and can raise anything
        return {"failed": f"fails: {type(error).__name__}: {error}"}
    if len(text) > MOST_CHARACTERS:
        return {"failed": f"makes {len(text):,} characters of a prompt"}
    return {"text": text}


def _text_of(reply: Mapping[str, str]) -> str:
    if "failed" in reply:
        raise TemplateFailed(" ".join(reply["failed"].split())[:400])
    return reply["text"]


def _too_much() -> str:
    return f"does not end within {CPU_SECONDS:g} s of processor time, or needs more than {MEMORY_BYTES >> 30} GiB"


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


class TemplateProcess:
    """Renders in a child process, one request at a time. A child that fails is killed; the next request starts another.

    The child ends with this process, because its input then ends.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def render(self, request: Mapping[str, Any]) -> str:
        """Render one prompt.

        Raises:
            TemplateFailed: if the template cannot be rendered.
        """
        line = json.dumps(request, default=str).encode() + b"\n"
        with self._lock:
            if self._owner != os.getpid():  # in a forked process: the child and its replies belong to the parent
                self._process, self._owner = None, os.getpid()
            try:
                if self._process is None:
                    self._process = _start()
                    self._exchange(b"{}\n", START_SECONDS)
                return _text_of(self._exchange(line, WALL_SECONDS))
            except (TimeoutError, EOFError, BrokenPipeError):
                self.close()
                raise TemplateFailed(_too_much()) from None
            except OSError as error:
                raise TemplateFailed(f"has no process to be rendered in ({error.strerror})") from error
            except TemplateFailed:
                raise
            except BaseException:  # such as Ctrl-C: a late reply must not be read as the next one
                self.close()
                raise

    def close(self) -> None:
        """Kill the child."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _exchange(self, line: bytes, seconds: float) -> dict[str, str]:
        """Send a request and wait for its reply; both directions under one deadline."""
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        deadline, to_write, reply = time.monotonic() + seconds, memoryview(line), bytearray()
        os.set_blocking(stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            selector.register(stdout, selectors.EVENT_READ)
            while not reply.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                for key, _ in selector.select(left):
                    if key.fileobj is stdin:
                        to_write = to_write[os.write(stdin.fileno(), to_write) :]
                        if not to_write:
                            selector.unregister(stdin)
                    else:
                        read = os.read(stdout.fileno(), 1 << 16)
                        if not read:
                            raise EOFError
                        reply += read
        answer: dict[str, str] = json.loads(reply)
        return answer


def _start() -> subprocess.Popen[bytes]:
    # -P, so that no file of the working directory is imported by accident; its own session, so that it does not
    # receive the terminal's Ctrl-C.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "covey.llm.model.chat_templates"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )


@lru_cache(maxsize=1)
def _worker() -> TemplateProcess:
    """The single child of this process."""
    worker = TemplateProcess()
    atexit.register(worker.close)
    return worker


def main() -> None:
    """Main function of the child: reply to every request, one line of JSON each."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    used = _virtual_bytes()
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    for line in requests:
        request = json.loads(line)
        # The default action ends the process even during a call of C. The limit is processor time, which does not
        # depend on other load of the machine.
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
        reply = json.dumps(reply_to(request) if request else {}).encode() + b"\n"
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        replies.write(reply)
        replies.flush()


def _virtual_bytes() -> int:
    """Size of this process's address space in bytes; 0 if it is unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    main()
