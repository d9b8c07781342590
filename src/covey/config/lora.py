"""Config of low-rank adapters (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass

from covey.config.common import Table, config_field


@dataclass(frozen=True)
class LoRAConfig(Table):
    rank: int = config_field(
        0,
        "rank of a low-rank adapter (LoRA), which is trained instead of the model's weights; 0: all weights are "
        "trained; needs covey[lora]",
        min=0,
        max=4096,
    )
    alpha: float = config_field(32.0, "the adapter's product is multiplied by alpha / rank", above=0)
    dropout: float = config_field(0.0, "dropout of the adapter's inputs; only 0 is supported", min=0, below=1)
    targets: tuple[str, ...] = config_field(
        (),
        'names of the linear layers that get an adapter, such as ["q_proj", "v_proj"]; empty: all below the output '
        "layer",
    )
    adapter: str = config_field(
        "",
        "folder of an adapter in peft's format, or a finished run with one: training begins with it, and rank, alpha "
        "and targets are those of its file",
    )

    @property
    def is_used(self) -> bool:
        """True if an adapter is trained instead of all weights."""
        return self.rank > 0 or bool(self.adapter)
