"""Line of `covey check` that describes the backend of a recipe's model on this machine."""

from __future__ import annotations

from dataclasses import replace

from covey.config import RunConfig
from covey.config.model_sources import ModelKind, locate_model
from covey.experiment.llm import build_machine, load_policy
from covey.experiment.plan import fits_this_machine
from covey.llm.model.files import cached_folder
from covey.llm.model.loading import resolve_checkpoint


def report_backend(config: RunConfig) -> str:
    """Load the model of a run and describe the backend that is chosen for it. Nothing is downloaded.

    Raises:
        ConfigError: if the model cannot be loaded or trained.
    """
    later = "the code that computes it is chosen when the model is loaded"
    if locate_model(resolve_checkpoint(config.model)).kind is ModelKind.HUB:
        folder = cached_folder(config.model)
        if folder is None:
            return f"{config.model} is not on this machine yet: {later}"
        config = replace(config, model=str(folder))
    if not fits_this_machine(config):
        return f"{config.model} was not loaded, because a run needs more memory than this machine has: {later}"
    return load_policy(config, build_machine(config.device, config.precision, config.threads)).policy.backend.describe()
