"""A plugin of vLLM for servers that sample for covey: transports of weights (`engine`) and a guard of all routes.

It runs in vLLM's environment and imports nothing of covey; covey imports neither vLLM nor this package. They meet over
HTTP: `covey serve --vllm` starts vLLM with the plugin, a run publishes its weights by vLLM's own routes. The launcher
alone runs in covey's environment, so the package is installed in both.

| module       | content                                                                  | imports          |
|--------------|--------------------------------------------------------------------------|------------------|
| `guard`      | middleware: the access token for every route but `/health`               | nothing          |
| `checkpoint` | names, shapes and dtypes that a model's weights must have                | torch            |
| `transports` | receive and verify weights: a file, or a process group (gloo)            | torch            |
| `engine`     | vLLM's weight-transfer engine `covey`                                    | vLLM             |
| `launcher`   | `covey serve --vllm`, found by an entry point: starts vLLM and probes it | covey            |
"""

from covey_vllm.guard import Guard

__all__ = ["Guard", "register"]


def register() -> None:
    """Register the engine. vLLM calls this in every one of its processes, and may call it several times in one."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "covey" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("covey", "covey_vllm.engine", "CoveyEngine")
