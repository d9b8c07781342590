"""Prompts with images: rows of data, tokens, and the same log-probabilities while sampling and in the update."""

import json
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from covey.config import ChatConfig, ConfigError, DatasetConfig
from covey.data import Start, collate
from covey.llm.data.images import ImagePrompt, take_pictures, with_pictures
from covey.llm.data.rows import image_checksums, read_rows, row_of
from covey.llm.generation.backend import choose_backend
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.model.files import IMAGES, read_processor
from covey.llm.model.images import never_sample_places, placeholders
from covey.llm.model.loading import LoadedModel, load_model
from covey.llm.policy import KLToReference, LanguagePolicy
from covey.llm.sampler import LanguageSampler
from covey.llm.tasks import PromptDataset, Rows
from helpers.tiny_models import tiny_folder
from helpers.vision_models import SIDE, colour_rows, picture, vision_folder

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "idefics3", "gemma3", "llava")
NEW_TOKENS = 5


def prompt(text: str, *colours: str, size: tuple[int, int] = (SIDE, SIDE)) -> ImagePrompt:
    pictures = take_pictures({"images": [picture(colour, size) for colour in colours]}, Path())
    return with_pictures([{"role": "user", "content": text}], pictures)


def load(folder: Path) -> LoadedModel:
    loaded = load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"), family=IMAGES)
    never_sample_places(loaded.module)
    return loaded


@pytest.fixture(scope="module", params=FAMILIES)
def sampled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model, its policy, and greedy and drawn groups: a picture, another size, two pictures, none."""
    loaded = load(vision_folder(tmp_path_factory.mktemp("model"), request.param))
    prompts = [
        prompt("a<image>b", "red"), prompt("a<image>b", "blue"), prompt("abc", "green", size=(2 * SIDE, SIDE)),
        prompt("<image>x<image>", "red", "blue"), prompt("text"),
    ]  # fmt: skip
    policy = LanguagePolicy(loaded.module, backend=choose_backend(loaded.module, loaded.chat.encode(prompts[0])))
    sampler = LanguageSampler(LocalGenerator(policy), loaded.chat, seed=3, max_new_tokens=NEW_TOKENS)
    starts = [Start(index, one) for index, one in enumerate(prompts)]
    return loaded, policy, sampler, sampler.sample(starts, 3, step=1)


def test_log_probabilities_of_the_update_are_those_of_the_sampler(sampled: Any) -> None:
    _, policy, _, groups = sampled
    for group in groups:
        for rollout in group.rollouts:
            rollout.reward = 1.0
    batch = collate(groups)
    output = policy.with_outputs(KLToReference(policy)).evaluate(batch)
    torch.testing.assert_close(output.logprobs_BT, batch.behavior_logprobs_BT, atol=2e-5, rtol=0)
    assert torch.isfinite(output.entropy_BT).all()
    assert output.kl_BT is not None
    assert output.kl_BT.abs().max() < 1e-6, "the reference sees the images too"
    gap_BT = (output.logprobs_BT[0:3, 0] - output.logprobs_BT[3:6, 0]).abs()
    assert gap_BT.max() > 1e-3, "the colour of the picture changes what is sampled"
    output.logprobs_BT.sum().backward()
    touched = [name for name, weight in policy.module.named_parameters() if weight.grad is not None]
    assert any("vis" in name for name in touched), "the gradient reaches the layers that see"


def test_greedy_answers_are_those_of_transformers_generate(sampled: Any) -> None:
    """Oracle: `generate` with the inputs that the model's own processor makes."""
    loaded, _, sampler, groups = sampled
    module, places = loaded.module, placeholders(loaded.module.config)
    sampler = LanguageSampler(sampler.generator, loaded.chat, 3, NEW_TOKENS, temperature=0.0)
    found = sampler.sample([group.start for group in groups], 1, step=0)
    for group in found[:4]:
        tokens = loaded.chat.encode(group.start.prompt)
        given = {name: value.clone() for name, value in tokens.inputs.items()}
        ids = torch.tensor([tokens])
        answer = module.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **given, max_new_tokens=NEW_TOKENS, do_sample=False,
            suppress_tokens=places, pad_token_id=0, eos_token_id=1,
        )  # fmt: skip
        assert answer[0, len(tokens) :].tolist() == list(group.rollouts[0].actions)


def test_placeholders_are_tokens_of_the_prompt_and_never_sampled(sampled: Any) -> None:
    loaded, policy, _, groups = sampled
    places = placeholders(loaded.module.config)
    counts = [sum(token in places for token in group.rollouts[0].context) for group in groups]
    assert counts[0] >= 4
    assert counts[3] == 2 * counts[0]
    assert counts[4] == 0
    assert not {token for group in groups for one in group.rollouts for token in one.actions} & set(places)
    tokens_L = torch.tensor([*groups[4].rollouts[0].context, 5, 6])
    assert policy.log_distribution(tokens_L, 2)[:, places].exp().max() == 0


def test_images_beside_a_file_as_bytes_and_of_pil_are_one_prompt(tmp_path: Path) -> None:
    """The columns of TRL and verl, with and without places in the text."""
    picture("red").save(tmp_path / "a.png")
    content, file = (tmp_path / "a.png").read_bytes(), "a.png"
    user = [{"role": "user", "content": "what?"}]
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    placed = [{"role": "user", "content": "<image>what?"}]
    for number, record in enumerate(
        (
            {"prompt": user, "images": [file]},
            {"prompt": user, "image": {"bytes": content, "path": None}},
            {"prompt": user, "images": [content]},
            {"prompt": parts, "images": ({"bytes": content, "path": "x.png"},)},
            {"prompt": placed, "images": [{"path": file}]},
            {"question": "what?", "image": picture("red")},
        )
    ):
        row = row_of(f"row {number}", record | {"answer": "red"}, tmp_path)
        assert (list(row.prompt), row.columns["answer"], len(row.columns["images"])) == (placed, "red", 1)
        assert row.prompt.pictures[0].open().tobytes() == picture("red").tobytes()
        assert json.loads(json.dumps(row.prompt)) == placed, "records have the messages"
    other = row_of("", {"prompt": user, "image": picture("blue")})
    assert other.content != row.content


def test_rows_of_a_parquet_file_have_images_as_datasets_stores_them(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    picture("green").save(tmp_path / "a.png")
    rows = [
        {"prompt": [{"role": "user", "content": f"<image>{n}"}], "seen": [{"bytes": (tmp_path / "a.png").read_bytes()}]}
        for n in range(3)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (row, *_) = read_rows(str(tmp_path / "rows.parquet"), ("images = seen",))
    assert row.prompt.pictures[0].open().getpixel((9, 9)) == (30, 200, 40)


def test_rows_without_images_beside_others_have_an_empty_prompt_of_images(tmp_path: Path) -> None:
    user = [{"role": "user", "content": "what?"}]
    task = Rows([{"prompt": user, "image": picture("red")}, {"prompt": [{"role": "user", "content": "text"}]}])
    assert sorted(len(row.prompt.pictures) for row in task.rows) == [0, 1]
    with pytest.raises(ConfigError, match=r"^task\[1\]: 'prompt' is a plain string, and other rows have images"):
        Rows([{"prompt": user, "image": picture("red")}, {"prompt": "text"}])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"images": ["none.png"]}, r"there is no file '.*none\.png'"),
        ({"image": "http://a.b/c.png"}, "no image is downloaded"),
        ({"images": [7]}, "has a value that is not an image"),
        ({"images": [{"bytes": None, "path": None}]}, "has a value that is not an image"),
        ({"images": ["a.png"], "image": "a.png"}, "both 'images' and 'image'"),
        ({"images": ["a.png"], "prompt": "text"}, "'prompt' is a plain string"),
        ({"images": ["a.png"], "prompt": 5}, "must be a string or a list of chat messages"),
        ({"images": ["a.png"], "prompt": [{"role": "user", "content": "<image><image>"}]}, "2 places .* 1 image"),
        ({"images": ["a.png"], "prompt": [{"role": "system", "content": "x"}]}, "0 places .* 1 image"),
        ({"images": ["a.png"], "prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "has the part .*video"),
    ],
)  # fmt: skip
def test_a_row_whose_images_cannot_be_used_is_one_line(record: Any, message: str, tmp_path: Path) -> None:
    picture("red").save(tmp_path / "a.png")
    with pytest.raises(ConfigError, match=f"^rows.jsonl line 3: .*{message}"):
        row_of("rows.jsonl line 3", {"prompt": [{"role": "user", "content": "a"}]} | record, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no image", "is none of PNG, .*PPM"),
        (b"", "is none of PNG, .*PPM"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "is none of PNG, .*PPM"),
        (b"P6 16 16 255\nshort", r"cannot be decoded \(.+\)"),
        (b"P6 9000 9000 255\n", r"cannot be decoded \(9000 x 9000 pixels, .*\)"),
    ],
)
def test_a_broken_image_is_one_line_with_file_and_row(content: bytes, message: str, tmp_path: Path) -> None:
    file = colour_rows(tmp_path)
    (tmp_path / "red-0.png").write_bytes(content)
    task = PromptDataset(path=str(file))
    chat = load(vision_folder(tmp_path / "model", "qwen2_vl")).chat
    (row,) = (row for row in task.rows if row.place.endswith("line 1"))
    with pytest.raises(ConfigError, match=rf"^the image 'red-0.png' in {tmp_path} {message}: replace it$"):
        chat.encode(row.prompt)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    content = BytesIO()
    image.save(content, format, **options)
    return content.getvalue()


SIDEWAYS = Image.Exif()
SIDEWAYS[0x112] = 6
GREY16 = Image.fromarray(np.array([[0, 256 * 77], [65535, 300]], np.uint16))
HIDDEN = Image.fromarray(np.array([[[255, 0, 0, 255], [0, 0, 0, 0]]], np.uint8))


@pytest.mark.parametrize(
    ("image", "format", "options", "pixels"),
    [
        (GREY16, "PNG", {}, [[(0,) * 3, (77,) * 3], [(255,) * 3, (1,) * 3]]),
        (GREY16, "TIFF", {}, [[(0,) * 3, (77,) * 3], [(255,) * 3, (1,) * 3]]),
        (HIDDEN, "PNG", {}, [[(255, 0, 0), (255, 255, 255)]]),
        (HIDDEN.convert("RGB"), "PNG", {"exif": SIDEWAYS}, [[(255, 0, 0)], [(0, 0, 0)]]),
    ],
)
def test_an_image_is_what_a_person_sees(image: Any, format: str, options: Any, pixels: Any, tmp_path: Path) -> None:
    """In files and as pictures of PIL: 16 bits are not cut, nothing hidden is shown, a photo stands upright."""
    content = encoded(image, format, **options)
    for given in ({"bytes": content}, Image.open(BytesIO(content))):
        [taken] = take_pictures({"image": given}, tmp_path)
        assert np.asarray(taken.open()).tolist() == [[list(pixel) for pixel in row] for row in pixels]


def test_values_without_a_range_and_a_damaged_picture_are_one_line(tmp_path: Path) -> None:
    for kind in (np.int32, np.float32):
        [taken] = take_pictures({"image": Image.fromarray(np.ones((2, 2), kind))}, tmp_path)
        with pytest.raises(ConfigError, match="its pixels have 32 bits"):
            taken.open()
    damaged = Image.open(BytesIO(encoded(Image.new("RGB", (20, 20), "red"), "BMP")[:300]))
    with pytest.raises(ValueError, match="'image' has a picture that cannot be decoded"):
        take_pictures({"image": damaged}, tmp_path)


def test_a_text_model_refuses_images_in_one_line(tmp_path: Path) -> None:
    chat = load_model(str(tiny_folder(tmp_path)), dtype=torch.float32, device=torch.device("cpu")).chat
    with pytest.raises(ConfigError, match=r"a model of the type llama reads text only: choose one, such as Qwen2\.5"):
        chat.encode(prompt("a", "red"))


def test_a_template_without_places_for_images_is_refused(tmp_path: Path) -> None:
    chat = load(vision_folder(tmp_path, "idefics3")).chat
    chat.tokenizer.chat_template = (
        "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(ConfigError, match=r"the text of a prompt has 0 places \(<image>\) for 1 image"):
        chat.encode(prompt("a", "red"))


def test_a_prompt_has_the_system_text_and_examples_of_the_recipe(tmp_path: Path) -> None:
    chat = load(vision_folder(tmp_path, "qwen2_vl")).chat
    told = chat.with_config(ChatConfig(system_prompt="be brief ", examples=("hm<image>", "a")))
    image, *_ = placeholders(AutoConfig.from_pretrained(tmp_path))
    ids = told.encode(prompt("b", "red"))
    assert ids == (*chat.encode_text("be brief hm<image>a"), *[image] * 4, *chat.encode_text("b="))


def test_a_group_of_another_prompt_does_not_move_the_positions_of_a_row(tmp_path: Path) -> None:
    """Models keep the offset of their positions on themselves; two prompts with other offsets are decoded together."""
    loaded = load(vision_folder(tmp_path, "qwen2_vl"))
    prompts = [prompt("ab", "red", size=(4 * SIDE, SIDE)), prompt("ab", "red")]
    policy = LanguagePolicy(loaded.module, backend=choose_backend(loaded.module, loaded.chat.encode(prompts[0])))
    sampler = LanguageSampler(LocalGenerator(policy), loaded.chat, seed=3, max_new_tokens=NEW_TOKENS)
    starts = [Start(index, one) for index, one in enumerate(prompts)]
    together = sampler.sample(starts, 2, step=1)
    for start, group in zip(starts, together, strict=True):
        (alone,) = sampler.sample([start], 2, step=1)
        assert [one.actions for one in alone.rollouts] == [one.actions for one in group.rollouts]


def test_a_content_of_parts_is_a_text_in_every_row(tmp_path: Path) -> None:
    """Chat templates of text models and of vision-language models take lists of parts."""
    text = {"type": "text", "text": "a"}
    content = [text, {"type": "text", "text": "b", "image": None}]
    row = row_of("r", {"prompt": [{"role": "user", "content": content}]})
    assert type(row.prompt) is list
    assert row.prompt == [{"role": "user", "content": "ab"}]
    for part, message in (
        ({"type": "image"}, "has 1 place for images .*, and the row has 0 images"),
        ({"type": "image", "image": "a.png"}, r"has the part .*a.png.*: parts are .* whose image is in the column"),
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "has the part .*image_url"),
        ("a", "has the part 'a'"),
    ):
        with pytest.raises(ConfigError, match=f"^r: .*{message}"):
            row_of("r", {"prompt": [{"role": "user", "content": [part, text]}]}, tmp_path)


def test_an_image_is_known_by_its_content(tmp_path: Path) -> None:
    file, config = colour_rows(tmp_path), DatasetConfig(path=str(tmp_path / "colours.jsonl"))
    before, found = [row.content for row in read_rows(str(file))], image_checksums(config)
    assert list(found) == [f"an image of {file}"]
    one = tmp_path / "red-0.png"
    content = one.read_bytes()
    one.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # of the same size
    assert [row.content for row in read_rows(str(file))] != before
    assert image_checksums(config) != found
    (tmp_path / "copy.png").write_bytes((tmp_path / "blue-2.png").read_bytes())
    user = [{"role": "user", "content": "a"}]
    rows = [row_of("r", {"prompt": user, "images": [name]}, tmp_path) for name in ("blue-2.png", "copy.png")]
    assert rows[0].content == rows[1].content
    assert rows[0].columns == {"images": ["blue-2.png"]}
    palettes = [picture(colour).quantize(2) for colour in ("red", "blue")]
    assert len({row_of("r", {"prompt": user, "image": one}).content for one in palettes}) == 2


def test_no_forward_pass_makes_the_list_of_placeholders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it would be copied there, for which the program waits."""
    loaded = load(vision_folder(tmp_path, "llava"))
    tokens = torch.tensor([[5, 6, 7]])
    monkeypatch.setattr("covey.llm.model.images.torch", SimpleNamespace(finfo=torch.finfo))
    assert loaded.module(input_ids=tokens).logits[..., placeholders(loaded.module.config)].max() < -1e4


def test_a_missing_package_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = vision_folder(tmp_path, "llava")

    def init(self: Any, *_: Any, **__: Any) -> None:
        raise ImportError(f"{type(self).__name__} requires the package x")

    monkeypatch.setattr("transformers.LlavaProcessor.__init__", init)
    with pytest.raises(ConfigError, match=r"\(ImportError: LlavaProcessor requires the package x\): install the"):
        read_processor(folder, "llava", None)
