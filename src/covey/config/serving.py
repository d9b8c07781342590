"""The options of `covey serve`, and those of them that can be checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from covey.config.common import ConfigError
from covey.config.files import user_path
from covey.config.servers import default_token_file, is_this_machine, own_token, read_token


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


@dataclass(frozen=True)
class VllmOptions:
    """The options of `covey serve --vllm` beside those of `covey serve`."""

    vllm_python: str = ".scale-venv/bin/python"
    slots: int = 64
    max_model_len: int = 2048
    batched_tokens: int = 0
    kv_gib: int = 2
    eager: bool = False
