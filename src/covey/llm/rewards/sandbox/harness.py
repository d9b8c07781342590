"""Runs inside the sandbox: sets the limits, then runs one program. The parent passes this file's text with `python -c`.

The parent and this file exchange frames over stdin and stdout: 4 bytes of length, then `marshal` of the parent, whom
this file may trust, and JSON of this file, whom nobody may. After the frame "ready" the parent sends one request:

    script      run the program with the rest of stdin; from then on stdout is the program's
    functions   load the program, then answer calls of its functions; what it prints goes to stderr
    check       run a test program, whose calls of the functions under test are answered by the parent

Nothing here is a defence: the program can change every object of this process. The sandbox around the process limits
what it can do, and the parent alone compares results and decides. Values cross as tagged JSON (`encode`), never pickle.

This file imports modules in C and almost no others: `json`, `contextlib` and `typing` would take longer to import than
the interpreter to start.
"""

from __future__ import annotations

import _ctypes
import builtins
import marshal
import os
import resource
import sys
import types
from _json import encode_basestring_ascii, make_encoder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    Send = Callable[[dict[str, Any]], None]
    Receive = Callable[[], dict[str, Any]]

DEEPEST = 60  # nesting of values
LONGEST_TEXT = 300  # characters of an error's text
LARGEST_PLAIN_INT = 1 << 53
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2

_ENDS_LOOPS = (StopIteration, StopAsyncIteration)
_VIEWS: tuple[Any, ...] = (range, type({}.keys()), type({}.values()), type({}.items()))
_chunks = make_encoder(None, str, encode_basestring_ascii, None, ": ", ", ", False, False, True)


class NotPlain(Exception):
    """A value is not made of the types that `encode` knows."""


class CallFailed(Exception):
    """A function under test raised an exception that has no built-in type."""


# ---- values as JSON ----


def encode(value: Any, depth: int = 0) -> Any:
    """A value of built-in types in JSON, with tags that keep the type; instances of subclasses lose theirs.

    Raises:
        NotPlain: for any other type, and below 60 levels.
    """
    if depth > DEEPEST:
        raise NotPlain(f"a value nested more than {DEEPEST} levels deep")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -LARGEST_PLAIN_INT < number < LARGEST_PLAIN_INT else ["int", hex(number)]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return ["complex", value.real.hex(), value.imag.hex()]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return ["dict", *([encode(key, depth + 1), encode(item, depth + 1)] for key, item in dict.items(value))]
    kinds: tuple[Any, ...] = (list, tuple, set, frozenset)
    for kind in kinds:
        if isinstance(value, kind):
            return [kind.__name__, *(encode(item, depth + 1) for item in kind.__iter__(value))]
    if isinstance(value, _VIEWS):
        return ["list", *(encode(item, depth + 1) for item in value)]
    raise NotPlain(f"a value of type {type(value).__name__}")


def decode(item: Any, depth: int = 0) -> Any:
    """The value that `encode` wrote.

    Raises:
        NotPlain: if it did not write this.
    """
    if depth > DEEPEST:
        raise NotPlain("nested too deeply")
    if item is None or isinstance(item, (bool, int, str)):
        return item
    if not isinstance(item, list) or not item or not isinstance(item[0], str):
        raise NotPlain("not an encoded value")
    tag, rest = item[0], item[1:]
    try:
        if tag in ("int", "float", "complex", "bytes"):
            return _decode_text(tag, rest)
        if tag == "dict":
            return {decode(key, depth + 1): decode(value, depth + 1) for key, value in rest}
        kinds: dict[str, Callable[..., Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
        return kinds[tag](decode(part, depth + 1) for part in rest)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise NotPlain("not an encoded value") from None


def _decode_text(tag: str, rest: Sequence[str]) -> Any:
    """A number or bytes, from hexadecimal text: linear in its length, also for long integers."""
    if tag == "int":
        (text,) = rest
        return int(text, 16)
    if tag == "bytes":
        (text,) = rest
        return bytes.fromhex(text)
    if tag == "float":
        (text,) = rest
        return float.fromhex(text)
    real, imaginary = rest
    return complex(float.fromhex(real), float.fromhex(imaginary))


# ---- the process ----


def main() -> NoReturn:
    """Set the filter of system calls in `sys.argv[1]` and the limits in `sys.argv[2]`, report "ready" and serve the
    one request.
    """
    system_calls, settings = sys.argv[1:]
    _limit(marshal.loads(bytes.fromhex(settings)))
    if system_calls:
        _filter_system_calls(bytes.fromhex(system_calls))
    del sys.argv[1:]
    os.environ.clear()
    requests, replies = 0, 1
    _send(replies, {"ready": True})
    request = _receive(requests)
    if request["mode"] == "script":
        _run_script(_joined(request["prefix"], request["source"]))
    # The program gets an empty stdin, and what it prints goes to stderr.
    requests, replies = os.dup(0), os.dup(1)
    nothing, writer = os.pipe()
    os.close(writer)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    serve = _check if request["mode"] == "check" else _serve_functions
    serve(request, lambda: _receive(requests), lambda reply: _send(replies, reply))
    os._exit(0)


def _limit(settings: dict[str, Any]) -> None:
    """Give up the user id if there is one to change to, then set the resource limits, hard ones included."""
    os.closerange(3, 256)
    if settings["uid"] is not None:
        os.setgroups([])
        os.setresgid(settings["uid"], settings["uid"], settings["uid"])
        os.setresuid(settings["uid"], settings["uid"], settings["uid"])
    for name, number in settings["limits"].items():
        kind = getattr(resource, name, None)
        if kind is None:  # another system's
            continue
        hard = resource.getrlimit(kind)[1]
        number = number if hard == resource.RLIM_INFINITY else min(number, hard)
        # One second between the limits of processor time: SIGXCPU at the first, SIGKILL at the second.
        soft = max(number - 1, 1) if name == "RLIMIT_CPU" else number
        resource.setrlimit(kind, (soft, number))


def _filter_system_calls(lines: bytes) -> None:
    """Let the kernel refuse all system calls that this filter does not allow, from now on and in every child."""
    # The package ctypes would do the same, but to import it takes a tenth of the time of a program.
    address = id(lines) + bytes.__basicsize__ - 1
    header = b"".join(number.to_bytes(8, "little") for number in (len(lines) // 8, address))  # struct sock_fprog
    prctl = _ctypes.dlsym(_ctypes.dlopen(None, os.RTLD_NOW), "prctl")  # type: ignore[arg-type]
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)):
        if _ctypes.call_function(prctl, arguments) != 0:
            sys.exit("the kernel takes no filter of system calls")


def _send(descriptor: int, message: dict[str, Any]) -> None:
    payload = "".join(_chunks(message, 0)).encode()
    view = memoryview(len(payload).to_bytes(4, "big") + payload)
    while view:
        view = view[os.write(descriptor, view) :]


def _receive(descriptor: int) -> dict[str, Any]:
    """The next frame; ends the process if the parent is gone."""
    length = int.from_bytes(_read(descriptor, 4), "big")
    message: dict[str, Any] = marshal.loads(_read(descriptor, length))
    return message


def _read(descriptor: int, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = os.read(descriptor, min(count - len(parts), 1 << 16))
        if not part:
            os._exit(0)
        parts += part
    return bytes(parts)


def _run(sources: Sequence[str], module: types.ModuleType, name: str) -> None:
    sys.modules[module.__name__] = module
    for source in sources:
        exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)


def _run_script(sources: Sequence[str]) -> NoReturn:
    sys.argv[:] = ["program.py"]
    _run(sources, types.ModuleType("__main__"), "program.py")
    sys.exit()


def _serve_functions(request: dict[str, Any], receive: Receive, send: Send) -> None:
    module = types.ModuleType("solution")
    try:
        _run(_joined(request["prefix"], request["source"]), module, "program.py")
    except BaseException as error:
        send({"error": _described(error)})
        return
    send({"loaded": True})
    while True:
        send(_answer(module, receive()))


def _answer(module: types.ModuleType, call: dict[str, Any]) -> dict[str, Any]:
    try:
        function = _find(module, call["function"])
        return {"value": encode(function(*decode(call["args"]), **decode(call["kwargs"])))}
    except NotPlain as error:
        return {"error": ["TypeError", f"the result is {error}, which is not a plain value"]}
    except BaseException as error:
        return {"error": _described(error)}


def _find(module: types.ModuleType, name: str) -> Callable[..., Any]:
    """The function of this name, or the method of a class `Solution`."""
    solution = getattr(module, "Solution", None)
    if not hasattr(module, name) and hasattr(solution, name):
        method: Callable[..., Any] = getattr(solution(), name)  # type: ignore[misc]
        return method
    function: Callable[..., Any] = getattr(module, name, None) or _missing(name)
    return function


def _missing(name: str) -> NoReturn:
    raise NameError(f"the program defines no function {name!r}")


def _described(error: BaseException) -> list[str]:
    """Type and text of an exception, also of one whose methods raise."""
    try:
        return [type(error).__name__, str(error)[:LONGEST_TEXT]]
    except BaseException:
        return [type(error).__name__, ""]


# ---- test programs ----


class _Unsupported(BaseException):
    """The test program passes something that cannot be sent to the program under test."""


def _check(request: dict[str, Any], receive: Receive, send: Send) -> None:
    """Run a test program; its verdict is the last frame: "passed", "failed" or, if it cannot be judged, "broken".

    It is broken if it ends with an exception before it has called the program, for then no program can pass it.
    """
    module = types.ModuleType("check")
    stage = "broken"

    def ask(call: dict[str, Any]) -> None:
        nonlocal stage
        stage = "failed"
        send(call)

    try:
        _run([_completed(request["prefix"])], module, "prefix.py")
        absent = [name for name in request["others"] if not hasattr(module, name)]
        for name in (*request["functions"], *absent):
            setattr(module, name, _proxy(name, receive, ask))
        _run([request["source"]], module, "test.py")
        if request["entry_point"]:
            module.check(_proxy(request["entry_point"], receive, ask))
    except _Unsupported as error:
        send({"broken": ["TypeError", f"the tests pass {error} to the function, which is not a plain value"]})
    except BaseException as error:
        send({stage: _described(error)})
    else:
        send({"passed": True})


def _joined(prefix: str, source: str) -> list[str]:
    """A program after its prefix, whose last function it may continue or define again.

    They are two texts unless they need each other, so that the program may begin with an import from __future__.
    """
    if not prefix:
        return [source]
    joined = f"{prefix}\n{source}"
    try:
        compile(joined, "program.py", "exec", dont_inherit=True)
        return [joined]
    except (SyntaxError, ValueError):
        return [_completed(prefix), source]


def _completed(prefix: str) -> str:
    """A prefix that ends with the head of a function, with an empty body."""
    try:
        compile(prefix, "prefix.py", "exec", dont_inherit=True)
        return prefix
    except SyntaxError:
        return f"{prefix}\n    pass\n"


def _proxy(name: str, receive: Receive, send: Send) -> Callable[..., Any]:
    """A function that asks the parent for the result of the function under test."""

    def candidate(*args: Any, **kwargs: Any) -> Any:
        try:
            call = {"call": name, "args": encode(list(args)), "kwargs": encode(kwargs)}
        except NotPlain as error:
            raise _Unsupported(str(error)) from None
        send(call)
        reply = receive()
        if "error" in reply:
            kind, text = reply["error"]
            raised = getattr(builtins, kind, None)
            # StopIteration would end a loop of the tests, such as `all(map(...))`, as if the rest had passed.
            if isinstance(raised, type) and issubclass(raised, Exception) and not issubclass(raised, _ENDS_LOOPS):
                raise raised(text)
            raise CallFailed(f"{kind}: {text}")
        return decode(reply["value"])

    return candidate


if __name__ == "__main__":
    main()
