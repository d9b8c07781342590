"""Servers: the [sampler] table, the options of `covey serve`, addresses, and access tokens."""

import html
import ipaddress
import os
import re
import stat
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from covey.config.common import ConfigError, Fault, Table, config_field, table
from covey.config.fields import missing_file
from covey.config.files import make_folder, path_error, read_file, shortened, user_path
from covey.config.machine import DEVICES
from covey.config.named_modules import entry_points_of

ENDPOINT = "/chat/completions"


def parse_address(address: str, where: str) -> tuple[SplitResult, int | None]:
    """The parts of an address, and its port if it names one.

    Args:
        where: beginning of the message, which names the field.

    Raises:
        ConfigError: for text that is not an address, and for port 0.
    """
    try:
        parts = urlsplit(address)
        port = parts.port  # raises ValueError too
        if port == 0:
            raise ValueError("the port is 0")
    except ValueError as error:
        raise ConfigError(f"{where}{shortened(address)} is not an address ({error})") from None
    return parts, port


def public_address(address: str) -> str:
    """The address without a query, which may hold secrets."""
    return urlsplit(address)._replace(query="", fragment="").geturl()


def endpoint(address: str) -> str:
    """The address of the chat completions API below a server's address."""
    bare = address.rstrip("/")
    return bare if bare.endswith(ENDPOINT) else bare + ENDPOINT


def is_this_machine(address: str) -> bool:
    """True for a loopback address of IPv4 or IPv6. Raises ValueError for a name."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def is_local(host: str) -> bool:
    """True for a loopback address and for "localhost"."""
    try:
        return is_this_machine(host)
    except ValueError:
        return host == "localhost"


LARGEST_TOKEN = 1 << 12  # bytes
HIDDEN = "[token]"
_ROUNDS = 5  # of encodings within each other
_ESCAPE = re.compile(r"\\(?:(?:x|u00|U000000|u\{0{0,4})([0-9a-fA-F]{2})\}?|([01][0-7]{2}))")
_URL_SAFE = str.maketrans("-_", "+/")
_SHORTEST_FORM = 8  # characters of an encoded token; fewer occur by chance


def token_in(content: bytes, most: int = LARGEST_TOKEN) -> str:
    """The token that a file or variable holds; "" if it holds none that can be sent in a header.

    A token is one word of at most `most` printable ASCII characters; white space around it is left out.
    """
    word = content.strip()
    return word.decode() if re.fullmatch(rb"[\x21-\x7e]{1,%d}" % most, word) else ""


def hide(text: str, token: str) -> str:
    """A text from a server without the token that was sent to it.

    The token itself is replaced. A text that has it in another form (escaped as in JSON, Python, HTML and URLs, also
    several times; hexadecimal; base64, also within a longer text, as in basic authentication) is replaced as a whole.
    Call it before the text is cut or changed in any other way.
    """
    if not token:
        return text
    shown = text.replace(token, HIDDEN)
    plain, known = _plain(shown), _plain(token)
    if known and known in plain:
        return HIDDEN
    joined = "".join(plain.split()).translate(_URL_SAFE)
    hexadecimal = token.encode().hex()
    found = len(hexadecimal) >= _SHORTEST_FORM and hexadecimal in joined.lower()
    return HIDDEN if found or any(form in joined for form in _base64(token)) else shown


def _plain(text: str) -> str:
    """The text without escapes and backslashes, for comparisons alone."""
    for _ in range(_ROUNDS):
        before, text = text, html.unescape(unquote(_unescaped(text)))
        if text == before:
            break
    return text.replace("\\", "")


def _unescaped(text: str) -> str:
    single = re.sub(r"\\{2,}", r"\\", text)
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16) if match[1] else int(match[2], 8)), single)


@cache
def _base64(token: str) -> list[str]:
    """The characters of base64 that the token decides, for each of its places among the groups of three bytes."""
    forms = []
    for before in range(3):
        known = bytes(before) + token.encode()
        forms.append(b64encode(known).decode()[-(-8 * before // 6) : 8 * len(known) // 6])
    return [form for form in forms if len(form) >= _SHORTEST_FORM]


def judge_token(variable: str, file: str) -> str:
    """The token in an environment variable, or in a file if no variable is named.

    Raises:
        ConfigError: if there is none that can be sent in a header. The token is not in the message.
        MachineError: if the file cannot be read.
    """
    source = f"the environment variable {variable}" if variable else file
    content = os.environb.get(os.fsencode(variable), b"") if variable else read_file(Path(file), 2 * LARGEST_TOKEN)
    if not (token := token_in(content)):
        raise ConfigError(
            f"{source} holds no token: one word of at most {LARGEST_TOKEN:,} printable ASCII characters is needed"
        )
    return token


LARGEST_SAMPLER_TOKEN = 1 << 10  # bytes, as in covey_vllm


def default_token_file() -> Path:
    """The file of servers on this machine, in the user's config folder."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "covey" / "token"


def read_token(path: Path, name: str) -> str:
    """The token in a file.

    Args:
        name: the field or option, for messages.

    Raises:
        ConfigError: if there is no such file, others may read it, it belongs to somebody else, or has no token.
    """
    if not path.is_file():
        raise ConfigError(f"{name}: {missing_file(path, str(path))}")
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(2 * LARGEST_SAMPLER_TOKEN)
    except OSError as error:
        raise path_error(error, f"{name}: {path} cannot be read") from error
    if found.st_uid != os.getuid():
        raise ConfigError(f"{name}: {path} belongs to another user: use a file of your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{name}: {path} may be read or changed by others: run chmod 600 {path}")
    if not (token := token_in(content, LARGEST_SAMPLER_TOKEN)):
        raise ConfigError(f"{name}: {path} has no token: one word of printable ASCII characters is needed")
    return token


def own_token(path: Path) -> str:
    """The token in the default file, which is created with a random one if it does not exist.

    Raises:
        ConfigError: as `read_token`.
        MachineError: if the file cannot be written.
    """
    if path.exists():
        return read_token(path, "the access token")
    import secrets  # here, because it loads the cryptography of hashlib, and few commands write a token

    try:
        make_folder(path.parent)
        temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        with suppress(FileExistsError):  # another process was faster
            os.link(temporary, path)
        temporary.unlink()
    except OSError as error:
        raise path_error(error, f"the access token cannot be written to {path}") from error
    return read_token(path, "the access token")


VLLM_PYTHON = ".scale-venv/bin/python"
PROMPT_ROOM = 2048  # tokens of a prompt for which a vLLM has room that a run starts


def vllm_launcher(what: str) -> str:
    """The entry point that starts vLLM; `what` needs it.

    Raises:
        ConfigError: without the package that has it.
    """
    if not (launcher := entry_points_of("covey.servers").get("vllm", "")):
        raise ConfigError(f'{what} needs the package covey-vllm here, beside covey: pip install "covey[vllm]"')
    return launcher


def no_vllm(python: str) -> str:
    """The end of a message: this is not an interpreter."""
    return (
        f"there is no vLLM environment at {python}: `make scale` in covey's repository creates .scale-venv; name its "
        "bin/python"
    )


@table(frozen=True)
class SamplerConfig(Table):
    SWITCH = ("kind",)

    kind: str = config_field(
        "local",
        "where completions are generated: in the training process (local), by covey serve (covey), or by vLLM, which "
        "the run starts beside itself unless it names servers (vllm)",
        choices=("local", "covey", "vllm"),
        advanced=True,
    )
    servers: tuple[str, ...] = config_field(
        (), 'addresses of running samplers, such as ["http://127.0.0.1:8801"]', advanced=True
    )
    start: int = config_field(
        0, "number of covey serve processes that the run starts on this machine, and ends", min=0, max=64, advanced=True
    )
    token_file: str = config_field(
        "",
        "file with the samplers' access token, which only its owner may read; empty: the one that covey serve creates "
        "in the user's config folder, for samplers on this machine",
        advanced=True,
    )
    transport: str = config_field(
        "file",
        "how weights travel: a file in memory or in sampler.folder, or a process group of torch.distributed",
        choices=("file", "group"),
        advanced=True,
    )
    folder: str = config_field(
        "",
        "transport file: folder that the run and its samplers see under this path; empty: a private one in memory or, "
        "if there is no room, in the folder of temporary files",
        advanced=True,
    )
    timeout: float = config_field(
        600.0, "seconds in which a sampler must answer a request, its waiting time included", above=0, max=86400,
        advanced=True,
    )  # fmt: skip
    attempts: int = config_field(
        3, "samplers that the completions of a prompt are asked for, one after the other", min=1, max=100, advanced=True
    )
    sleep: bool = config_field(
        False,
        "vLLM frees its memory of the GPU between samplings (covey serve --vllm --sleep); one that the run starts on a "
        "GPU always does",
        advanced=True,
    )
    vllm_memory: float = config_field(
        0.0,
        "fraction of the GPU's memory of a vLLM that the run starts, while it samples; 0: what the run leaves",
        min=0,
        max=0.98,
        advanced=True,
    )
    vllm_python: str = config_field(
        VLLM_PYTHON, "interpreter of vLLM's environment, for a run that starts it", advanced=True
    )
    vllm_tokens: int = config_field(
        0,
        f"longest prompt with its completion in a vLLM that the run starts; 0: {PROMPT_ROOM} more than a rollout",
        min=0,
        max=1 << 17,
        advanced=True,
    )
    max_mismatch: float = config_field(
        3.0,
        "a sampler is refused if its log-probabilities differ from the trainer's by this multiple of the difference at "
        "the first weights",
        above=1,
        max=1000,
        advanced=True,
    )

    def faults(self) -> Iterator[Fault]:
        if self.kind == "local":
            return
        if self.kind == "vllm" and self.start > 1:
            yield Fault("a run starts one vLLM: remove sampler.start, or start others and name them in sampler.servers")
        if self.start and self.servers:
            yield Fault("sampler has both servers and start: name running servers, or let the run start them")
        if not self.started and not self.servers:
            yield Fault(
                "sampler.kind is covey, and sampler.servers names no server: start covey serve, or set sampler.start"
            )
        if self.sleep and self.kind != "vllm":
            yield Fault("sampler.sleep is for vLLM: remove it, or set sampler.kind to vllm")
        if self.transport == "group" and self.folder:
            yield Fault("sampler.folder is for files, and sampler.transport is group: remove one of them")

    @property
    def started(self) -> int:
        """Number of servers that the run starts."""
        return self.start or int(self.kind == "vllm" and not self.servers)

    def check(self) -> None:
        if self.kind == "local":
            return
        if self.kind == "vllm" and self.started:
            vllm_launcher("sampler.kind vllm")
            if not os.access(user_path(self.vllm_python), os.X_OK):
                raise ConfigError(f"sampler.kind vllm needs sampler.vllm_python: {no_vllm(self.vllm_python)}")
        hosts = [_host(address) for address in self.servers]
        if len(set(hosts)) < len(hosts):
            raise ConfigError("sampler.servers has an address twice: name each server once")
        elsewhere = next((host for host, _ in hosts if not is_local(host)), "")
        if elsewhere and not self.token_file:
            raise ConfigError(
                f"sampler.servers: {elsewhere} is another machine, so sampler.token_file must name the file with its "
                "access token; keep the connection on a private network, because it is not encrypted"
            )
        if elsewhere and self.transport == "file" and not self.folder:
            raise ConfigError(
                f"sampler.servers: {elsewhere} is another machine, so sampler.folder must name a folder that both see "
                "under this path, or sampler.transport must be group"
            )
        if self.folder and not user_path(self.folder, "sampler.folder: ").is_dir():
            raise ConfigError(f"sampler.folder: there is no folder {self.folder}: create it")
        if self.token_file:
            read_token(user_path(self.token_file, "sampler.token_file: "), "sampler.token_file")


def _host(address: str) -> tuple[str, int]:
    """Host and port of a server's address."""
    parts, port = parse_address(address, "sampler.servers: ")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("sampler.servers has an address with a user name: the access token is in sampler.token_file")
    plain = not (parts.query or parts.fragment or parts.path.strip("/") or re.search(r"[\s\\]", address))
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
        raise ConfigError(
            f"sampler.servers must be addresses such as http://127.0.0.1:8801, without a path (is {shortened(address)})"
        )
    return parts.hostname, port if port is not None else (443 if parts.scheme == "https" else 80)


@dataclass(frozen=True)
class ServeOptions:
    """The options of `covey serve`."""

    model: str
    host: str = config_field("127.0.0.1", "address to accept connections at")
    port: int = config_field(8801, "its port; 0: a free one", min=0, max=65535)
    token_file: str = config_field("", "file with the access token, which only its owner may read")
    folder: str = config_field("", "folder below which files with weights are read (a private one)")
    device: str = config_field("auto", "device", choices=DEVICES)
    precision: str = config_field("auto", "precision, that of the run", choices=("auto", "bf16", "fp32"))
    threads: int = config_field(0, "CPU threads; 0: one per core", min=0, max=100_000)
    rows: int = config_field(0, "completions decoded together; 0: by memory", min=0, max=1_000_000)
    child: bool = False  # True: end when the process that has started this one ends

    def token(self) -> str:
        """The access token of the server.

        Raises:
            ConfigError: if the server would be reachable from other machines with the default token.
        """
        if self.token_file:
            return read_token(user_path(self.token_file, "--token-file: "), "--token-file")
        try:
            local = is_this_machine(self.host)
        except ValueError:
            raise ConfigError(f"--host must be an address such as 127.0.0.1 (is {self.host!r})") from None
        if not local:
            raise ConfigError(
                f"--host {self.host} is reachable from other machines: name a --token-file that only you may read, and "
                "keep the port on a private network"
            )
        return own_token(default_token_file())

    def weights_folder(self) -> Path | None:
        """The folder below which files with weights are read; None: private ones.

        Raises:
            ConfigError: if there is no such folder.
        """
        if not self.folder:
            return None
        folder = user_path(self.folder, "--folder: ")
        if not folder.is_dir():
            raise ConfigError(f"--folder: there is no folder {self.folder}")
        return folder


LONGEST_PROBE = 64  # tokens; the probe at the start needs less


@dataclass(frozen=True)
class VllmOptions:
    """The options of `covey serve --vllm` beside those of `covey serve`."""

    vllm_python: str = config_field(VLLM_PYTHON, "the interpreter of its environment")
    slots: int = config_field(64, "completions generated at once", min=1, max=4096)
    max_model_len: int = config_field(
        2048, "longest prompt with its completion, in tokens", min=LONGEST_PROBE, max=1 << 20
    )
    batched_tokens: int = config_field(
        0, "tokens in a forward pass, at least --max-model-len; 0: chosen", min=0, max=1 << 20
    )
    kv_gib: int = config_field(2, "on CPUs: GiB of keys and values", min=1, max=1024)
    gpu_memory: float = config_field(
        0.0, "on GPUs: fraction of the memory that it takes; 0: vLLM's own, about 0.9", min=0, max=0.98
    )
    sleep: bool = config_field(False, "on GPUs: lets a run with sampler.sleep free that memory between samplings")
    eager: bool = config_field(False, "start sooner, without compilation, and generate more slowly")
