"""`covey serve`: loads a model and answers requests for completions."""

from __future__ import annotations

from dataclasses import dataclass

from covey.config import ConfigError
from covey.config.faults import path_error
from covey.config.fields import command
from covey.config.files import user_path
from covey.config.terminal import say
from covey.config.token_file import default_token_file, own_token, read_token
from covey.config.validate_judge import is_this_machine
from covey.experiment.llm import build_machine
from covey.llm.generation.engine import Engine
from covey.llm.model.loading import load_model
from covey.llm.policy import LanguagePolicy
from covey.llm.remote.children import end_with_parent
from covey.llm.remote.server import Server, serve
from covey.llm.remote.staging import dtype_name
from covey.llm.remote.weights import private_folders
from covey.runtime.web_server import listen


@dataclass(frozen=True)
class ServeOptions:
    """The options of `covey serve`."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8801
    token_file: str = ""
    folder: str = ""
    device: str = "auto"
    precision: str = "auto"
    threads: int = 0
    rows: int = 0
    child: bool = False  # True: end when the process that has started this one ends


def serve_model(options: ServeOptions) -> None:
    """Load a model and answer requests until Ctrl-C.

    Raises:
        ConfigError: if the token file, the address or the model cannot be used.
    """
    if options.child:
        end_with_parent()
    token = token_for(options)
    folders = (user_path(options.folder, "--folder: "),) if options.folder else private_folders()
    if options.folder and not folders[0].is_dir():
        raise ConfigError(f"--folder: there is no folder {options.folder}")
    try:
        listening = listen(options.host, options.port)
    except OSError as error:
        raise path_error(error, f"the address {options.host}:{options.port} cannot be used") from error
    with listening:
        machine = build_machine(options.device, options.precision, options.threads)
        loaded = load_model(options.model, dtype=machine.dtype, device=machine.device)
        policy = LanguagePolicy(loaded.module.requires_grad_(False))
        host, port = listening.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        say(f"serving {options.model} in {dtype_name(machine.dtype)} on {machine.device.type} at {address}")
        say(policy.backend.describe())
        say(f"Use it: {command('train', 'RECIPE', '--sampler.kind', 'covey', '--servers', address)}")
        serve(Server(Engine(policy, options.rows), loaded.chat, folders), token, listening)


def token_for(options: ServeOptions) -> str:
    """The access token of a server.

    Raises:
        ConfigError: if the server would be reachable from other machines with the default token.
    """
    if options.token_file:
        return read_token(user_path(options.token_file, "--token-file: "), "--token-file")
    try:
        local = is_this_machine(options.host)
    except ValueError:
        raise ConfigError(f"--host must be an address such as 127.0.0.1 (is {options.host!r})") from None
    if not local:
        raise ConfigError(
            f"--host {options.host} is reachable from other machines: name a --token-file that only you may read, and "
            "keep the port on a private network"
        )
    return own_token(default_token_file())
