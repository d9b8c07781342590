"""Tiny random vision-language models of several architectures with their processors, and pictures of one colour."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from helpers.tiny_models import tiny_tokenizer

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220)}
MARKS = ("<image>", "<video>", "<begin>", "<close>")  # tokens beside those of characters; the first is an image's
SIDE = 16  # pixels; most models have 4 tokens for such a picture

_TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 512, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
_VIT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": 4,
}  # fmt: skip
_SIZE = {"height": SIDE, "width": SIDE}
_QWEN = ({"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
          "size": {"shortest_edge": 64, "longest_edge": 1024}}, {})  # fmt: skip

# Kind -> config of the text, config of the images, further config, of the image processor and of the processor.
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen2_vl": (
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
        {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
        {"vision_start_token_id": 2, "vision_end_token_id": 3}, *_QWEN,
    ),
    "qwen2_5_vl": (
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
        {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "patch_size": 4, "intermediate_size": 64,
         "fullatt_block_indexes": [1], "window_size": 16},
        {"vision_start_token_id": 2, "vision_end_token_id": 3}, *_QWEN,
    ),
    "idefics3": (
        {"model_type": "llama"}, _VIT, {"scale_factor": 2},
        {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}, {"image_seq_len": 4},
    ),
    "gemma3": (
        {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        {**_VIT, "vision_use_head": False}, {"mm_tokens_per_image": 4, "boi_token_index": 2, "eoi_token_index": 3},
        {"size": _SIZE, "do_resize": True}, {"image_seq_length": 4},
    ),
    "llava": (
        {"model_type": "llama"}, {**_VIT, "model_type": "clip_vision_model"},
        {"vision_feature_layer": -1}, {"size": {"shortest_edge": SIDE}, "crop_size": _SIZE},
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
}  # fmt: skip
CLASSES = {
    "qwen2_vl": ("Qwen2VLImageProcessor", "Qwen2VLProcessor"),
    "qwen2_5_vl": ("Qwen2VLImageProcessor", "Qwen2_5_VLProcessor"),
    "idefics3": ("Idefics3ImageProcessor", "Idefics3Processor"),
    "gemma3": ("Gemma3ImageProcessor", "Gemma3Processor"),
    "llava": ("CLIPImageProcessor", "LlavaProcessor"),
}
TEMPLATE = (
    "{%% for m in messages %%}{%% for part in m['content'] %%}{%% if part['type'] == 'image' %%}%s{%% else %%}"
    "{{ part['text'] }}{%% endif %%}{%% endfor %%}{%% endfor %%}{%% if add_generation_prompt %%}={%% endif %%}"
)


def vision_folder(folder: Path, kind: str, *, seed: int = 0, words: Sequence[str] = ()) -> Path:
    """A model folder in Hugging Face's layout. `words` are tokens that the model can write beside single characters."""
    text, vision, more, of_images, of_processor = KINDS[kind]
    names = {"qwen2_vl": "<|image_pad|>", "qwen2_5_vl": "<|image_pad|>"}
    image = names.get(kind, "<image>")
    marks = [image, *MARKS[1:], "<fake_token_around_image>", "<global-img>"]
    tokenizer = tiny_tokenizer([*marks, *words])
    ids = tokenizer.get_vocab()
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = TEMPLATE % ("<begin>" if kind == "gemma3" else image)
    if kind == "gemma3":
        for name, token in (("boi", "<begin>"), ("eoi", "<close>"), ("image", "<image>")):
            tokenizer.init_kwargs[f"{name}_token"] = token
    tokenizer.save_pretrained(folder)
    if kind == "gemma3":
        file = folder / "tokenizer_config.json"
        fields = json.loads(file.read_text())
        special = {"boi_token": "<begin>", "eoi_token": "<close>", "image_token": "<image>"}
        file.write_text(json.dumps(fields | special | {"model_specific_special_tokens": special}))
    of_kind = CLASSES[kind]
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": of_kind[0], "processor_class": of_kind[1]} | of_images)
    )
    if kind == "idefics3" and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("transformers before 5.18 reads images of Idefics3 by torchvision alone")
    AutoImageProcessor.from_pretrained(folder, backend="pil").save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": of_kind[1]} | of_processor))
    placeholder = "image_token_index" if kind in ("gemma3", "llava") else "image_token_id"
    config = AutoConfig.for_model(
        kind, text_config=_TEXT | {"vocab_size": len(tokenizer)} | text, vision_config=vision,
        **more | {placeholder: ids[image], "eos_token_id": 1, "pad_token_id": 0},
        **({"video_token_id": ids["<video>"]} if kind.startswith("qwen") else {}),
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)
    return folder


def picture(colour: str, size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    """A picture of one colour, with a darker corner."""
    image = Image.new("RGB", size, COLOURS[colour])
    image.paste((10, 10, 10), (0, 0, 4, 4))
    return image


def colour_rows(folder: Path, count: int = 12) -> Path:
    """A JSONL file whose rows ask for the colour of a picture, of one of several sizes, beside it."""
    lines = []
    for number in range(count):
        colour = list(COLOURS)[number % 3]
        name = f"{colour}-{number}.png"
        picture(colour, (SIDE + 8 * (number % 2), SIDE)).save(folder / name)
        prompt = [{"role": "user", "content": f"colour {number}?"}]
        lines.append(json.dumps({"prompt": prompt, "images": [name], "answer": colour}))
    file = folder / "colours.jsonl"
    file.write_text("\n".join(lines))
    return file
