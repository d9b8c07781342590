"""The server of an OpenEnv environment with MCP tools, for `make environments`."""

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Adder(MCPEnvironment):
    """Has tools that add and that fail."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("adder")

        @server.tool
        def add(a: int, b: int = 2) -> int:
            """Add two numbers."""
            return a + b

        @server.tool
        def fail(reason: str) -> str:
            """Fail."""
            raise ValueError(reason)

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **columns):
        return Observation(metadata={"seed": seed})

    def _step_impl(self, action, timeout_s=None, **columns):
        raise NotImplementedError

    @property
    def state(self):
        return State()


app = create_app(Adder, CallToolAction, CallToolObservation, max_concurrent_envs=4)
