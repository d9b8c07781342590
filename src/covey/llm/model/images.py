"""Prompts with images: messages -> token ids with the pixels that the forward pass of a vision-language model takes.

The placeholders of images are tokens of the prompt. They are never sampled (`never_sample_places`), because a sampled
one would ask for a further image.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from covey.config import ConfigError
from covey.config.fields import plural
from covey.llm.data.images import PLACE, ImagePrompt
from covey.llm.model.files import IMAGES, read_part, read_processor, reading
from covey.llm.model.logprobs import EXCLUDED_LOGIT
from covey.llm.model.plain_forward import PromptTokens

# Files beside a model's weights and tokenizer that say how images become pixels.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)")  # fields of a config


class ImageReader:
    """Encodes prompts with images by the processor of a model, with PIL alone."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        """
        Args:
            folder: of the model's files, which are read when the first image is.
            tokenizer: of the model; it gets the processor's chat template if it has none.
        """
        self.folder, self.tokenizer = folder, tokenizer

    @cached_property
    def processor(self) -> Any:
        """That of transformers. Raises ConfigError if the model reads no images, or its files cannot be used."""
        kind = read_part(AutoConfig, self.folder, str(self.folder)).model_type
        if kind not in IMAGES.architectures:
            raise ConfigError(f"the prompt has images, and a model of the type {kind} reads text only: {IMAGES.fix}")
        processor = read_processor(self.folder, kind, self.tokenizer)
        if not self.tokenizer.chat_template:
            self.tokenizer.chat_template = processor.chat_template
        return processor

    def encode(
        self,
        prompt: ImagePrompt,
        added_to: Callable[[Sequence[Any]], list[Any]],
        render: Callable[[Sequence[Any]], str],
    ) -> Sequence[int]:
        """Token ids of a prompt; with images they are `PromptTokens`.

        Args:
            prompt: the prompt.
            added_to: adds a system message and examples.
            render: the text of messages whose contents are lists of parts.

        Raises:
            ConfigError: if an image cannot be decoded, or the chat template has no places for images.
        """
        processor, pictures = self.processor, prompt.pictures
        text = render([_parts(message) for message in added_to([_parts(message, PLACE) for message in prompt])])
        places = text.count(processor.image_token)
        if places != len(pictures):
            raise ConfigError(
                f"the text of a prompt has {plural(places, 'place')} ({processor.image_token}) for "
                f"{plural(len(pictures), 'image')}: remove the placeholder from the data, or use a model whose chat "
                "template writes one for each"
            )
        if not pictures:
            ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids
        images = [picture.open() for picture in pictures]
        with reading("an image cannot be prepared for the model", "make it larger, or remove it"):
            found = processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
        ids = found.pop("input_ids")[0].tolist()
        return PromptTokens(ids, {name: value for name, value in found.items() if name != "attention_mask"})

    def save(self, folder: Path) -> None:
        """Copy the files of the processor."""
        for name in PROCESSOR_FILES:
            if (self.folder / name).is_file() and self.folder != folder:
                copyfile(self.folder / name, folder / name)


def _parts(message: Mapping[str, Any], place: str = "") -> Mapping[str, Any]:
    """The message with its text as a list of parts, in which `place` ("": nothing) stands for an image."""
    if not isinstance(message["content"], str):
        return message
    texts = message["content"].split(place) if place else [message["content"]]
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


def placeholders(config: PreTrainedConfig) -> list[int]:
    """Token ids that stand for images, videos and sound in the prompts of a model."""
    return [value for name, value in config.to_dict().items() if _PLACEHOLDER.fullmatch(name) and type(value) is int]


def never_sample_places(module: PreTrainedModel) -> None:
    """Give the placeholders the probability 0, in every forward pass of the model."""
    weight: Tensor = module.get_output_embeddings().weight  # type: ignore[operator, union-attr]
    ids = [id for id in placeholders(module.config) if 0 <= id < len(weight)]
    module.register_forward_hook(partial(_exclude, torch.tensor(ids, device=weight.device)))


def _exclude(ids: Tensor, module: nn.Module, given: Any, output: Any) -> None:
    """`ids` are on the device of the logits, because a GPU would wait for a copy in every forward pass."""
    logits: Tensor = output.logits
    output.logits = logits.index_fill(-1, ids, max(EXCLUDED_LOGIT, torch.finfo(logits.dtype).min))
