"""`covey serve`: loads a model and answers requests for completions."""

from __future__ import annotations

from covey.config.fields import command
from covey.config.files import path_error
from covey.config.servers import ServeOptions
from covey.config.terminal import say
from covey.experiment.llm import build_machine
from covey.llm.generation.local_generator import Engine
from covey.llm.model.loading import load_model
from covey.llm.policy import LanguagePolicy
from covey.llm.remote.fleet import end_with_parent
from covey.llm.remote.server import Server, serve
from covey.llm.remote.weights import dtype_name, private_folders
from covey.runtime.web_server import listen


def serve_model(options: ServeOptions) -> None:
    """Load a model and answer requests until Ctrl-C.

    Raises:
        ConfigError: if the token file, the address or the model cannot be used.
    """
    if options.child:
        end_with_parent()
    token, folder = options.token(), options.weights_folder()
    folders = (folder,) if folder else private_folders()
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
