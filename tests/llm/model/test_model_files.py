"""Model folders that somebody else wrote: what is whole loads, what is not is refused in one line that names it."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from covey.config import ConfigError
from covey.llm.model.files import TEMPLATE_FILE, check_model_config
from covey.llm.model.loading import check_forward, check_model_files, load_model, wrap_model
from covey.llm.policy import LanguagePolicy
from helpers.tiny_models import CHARACTERS, tiny_folder, tiny_gguf, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
VOCABULARY = len(CHARACTERS) + 3
COMMON = {"vocab_size": VOCABULARY, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}

FAMILIES = {
    "llama": SMALL,
    "mistral": SMALL | {"num_key_value_heads": 2},
    "qwen2": SMALL | {"num_key_value_heads": 2},
    "gemma": SMALL | {"num_key_value_heads": 2, "head_dim": 8},
    "phi": SMALL,
    "gpt_neox": SMALL,
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
            "word_embed_proj_dim": 16, "max_position_embeddings": 64},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
}  # fmt: skip


def load(folder: Path | str, dtype: torch.dtype = torch.float32):
    return load_model(str(folder), dtype=dtype, device=CPU)


def edit(folder: Path, name: str = "config.json", **fields) -> None:
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | fields))


def edit_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def shard(folder: Path, **fields) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index | fields))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_whole_model_loads_as_transformers_loads_it(kind, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON, **FAMILIES[kind]))
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    check_model_files(str(tmp_path))
    loaded = load(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert loaded.module.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.module.state_dict().items())
    assert loaded.chat.end_ids == {1}


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_float_type_loads_in_the_precision_of_the_run(stored, tmp_path):
    tiny_folder(tmp_path)
    edit_weights(tmp_path, lambda tensors: tensors.update({n: t.to(stored) for n, t in tensors.items()}))
    for dtype in (torch.float32, torch.bfloat16):
        assert {weight.dtype for weight in load(tmp_path, dtype).module.parameters()} == {dtype}


def test_shards_load_and_pickles_beside_them_are_not_looked_at(tmp_path):
    whole = load(tiny_folder(tmp_path)).module.state_dict()
    shard(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    again = load(tmp_path).module.state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    assert not Path("pwned").exists()


def test_a_header_whose_length_begins_like_a_pickle_is_no_pickle(tmp_path):
    whole = load(tiny_folder(tmp_path)).module.state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    file, filler = tmp_path / "model.safetensors", 0
    for _ in range(2):
        save_file(tensors, file, metadata={"format": "pt", "filler": "x" * filler})
        length = int.from_bytes(file.read_bytes()[:8], "little")
        filler = (0x0480 - length) % 0x10000
    assert file.read_bytes().startswith(b"\x80\x04")
    again = load(tmp_path).module.state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_an_embedding_larger_than_the_tokenizer_is_padding(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **COMMON | {"vocab_size": 128}, **SMALL))
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    chat = load(tmp_path).chat
    assert chat.decode([3, 4, 127, 100]) == "01"


def test_a_padding_token_beyond_the_embedding_is_never_fed(tmp_path):
    tiny_folder(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path)
    chat = load(tmp_path).chat
    assert chat.encode("1+2") == (4, 13, 5)
    with pytest.raises(ConfigError, match=r"holds the token '\[PAD\]' \(number 84\), but .* 84 tokens only"):
        chat.encode("1[PAD]")


def put_code(folder: Path, **auto) -> None:
    for name in auto.values():
        file = folder / f"{name.split('.')[0]}.py"
        file.write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\nraise SystemExit('ran')\n")


def own_architecture(folder: Path) -> None:
    auto = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit(folder, auto_map=auto, model_type="own", architectures=["OwnForCausalLM"])
    put_code(folder, **auto)


def own_head_of_a_known_type(folder: Path) -> None:
    auto = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit(folder, auto_map=auto, model_type="vit", architectures=["OwnForCausalLM"])
    put_code(folder, **auto)


def own_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    auto = ["tokenization_own.OwnTokenizer", None]
    edit(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": auto}, tokenizer_class="OwnTokenizer")
    put_code(folder, own="tokenization_own.OwnTokenizer")


def to_pickle(folder: Path, name: str = "pytorch_model.bin") -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pickle")
    (folder / "model.safetensors").unlink()
    (folder / "pickle").rename(folder / name)


def renamed(name: str):
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def index(places):
    return lambda folder: shard(folder, weight_map=places)


def cut(size: int):
    """The weights end after, or before, so many bytes."""
    path = "model.safetensors"
    return lambda folder: (folder / path).write_bytes((folder / path).read_bytes()[:size])


def weight(name: str, value: torch.Tensor | None):
    """A weight is another one, or gone."""

    def change(tensors):
        tensors.pop(name, None)
        tensors.update({} if value is None else {name: value})

    return lambda folder: edit_weights(folder, change)


def number(name: str, place: slice | int, value: str):
    return lambda folder: edit_weights(folder, lambda tensors: tensors[name][place].fill_(float(value)))


def eight_bit_floats(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({n: t.to(torch.float8_e4m3fn) for n, t in tensors.items()}))


def other_family(kind: str, **fields):
    def change(folder: Path) -> None:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON, **SMALL, **fields))
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder)

    return change


def file(name: str, content: str | bytes):
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def remove(*names: str):
    return lambda folder: [(folder / name).unlink(missing_ok=True) for name in names]


def config(**fields):
    return lambda folder: edit(folder, **fields)


def tokenizer(change):
    def changed(folder: Path) -> None:
        made = tiny_tokenizer()
        change(made)
        made.save_pretrained(folder)

    return changed


def template(make):
    """Something else is in the place of the template."""

    def change(folder: Path) -> None:
        (folder / TEMPLATE_FILE).unlink()
        make(folder / TEMPLATE_FILE)

    return change


UP = "model.layers.0.mlp.up_proj.weight"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n"
REFUSED = {
    "own architecture": (own_architecture, r"OwnForCausalLM \(model_type 'own'\) is code of the model's own"),
    "own head": (own_head_of_a_known_type, r"OwnForCausalLM .* is code of the model's own"),
    "own tokenizer": (own_tokenizer, r"its tokenizer OwnTokenizer is code of the model's own, which covey never runs"),
    "unknown type": (config(model_type="tomorrow"), r"model_type 'tomorrow'\) is unknown to transformers"),
    "no type": (config(model_type=None), "has no model_type"),
    "vision": (config(model_type="vit", architectures=["ViTModel"]), "ViTModel .* is not a causal language model"),
    "t5": (config(model_type="t5", architectures=["T5Model"]), "T5Model .* is not a causal language model"),
    "bart": (config(model_type="bart", architectures=["BartModel"]), "bart is an encoder with a decoder, no causal"),
    "bert": (other_family("bert"), "bert is an encoder, in which a token sees those after it"),
    "quantised": (config(quantization_config={"quant_method": "bitsandbytes"}), r"quantised \(bitsandbytes\)"),
    "integers": (weight(UP, torch.ones(64, 32, dtype=torch.int8)), "up_proj.weight is stored as I8, so it is quanti"),
    "eight bit floats": (eight_bit_floats, "is stored as F8_E4M3, so it is quantised"),
    "pickle": (to_pickle, r"its weights are pickled \(pytorch_model.bin\), .*convert it once with python -c"),
    "pickle as safetensors": (
        partial(to_pickle, name="model.safetensors"),
        "is a pickle under the name of safetensors: rename it",
    ),
    "no weights": (remove("model.safetensors"), "has no weights: it needs model.safetensors"),
    "other name": (renamed("other.safetensors"), "has other.safetensors but no model.safetensors"),
    "outside": (index({"a": "../model.safetensors"}), r"names '../model.safetensors', which lies outside"),
    "index of pickles": (index({"a": "model-1.bin"}), "names the pickle model-1.bin"),
    "missing shard": (missing_shard, r"1 of the 2 files with its weights are missing \(model-00002"),
    "no map": (index([1, 2]), "has no weight_map of names"),
    "truncated": (cut(-100), "model.safetensors is damaged"),
    "cut header": (cut(40), "model.safetensors is damaged"),
    "empty file": (file("model.safetensors", ""), "model.safetensors is damaged"),
    "lfs": (file("model.safetensors", LFS), "is a pointer of Git LFS"),
    "missing weight": (weight(UP, None), rf"1 weight is missing from its files \({UP}\)"),
    "unexpected": (
        weight("score.weight", torch.zeros(2, 32)),
        r"1 weight is in its files, but not in .* \(score.weight\)",
    ),
    "shape": (weight(UP, torch.zeros(65, 32)), r"1 weight is of another shape .*up_proj.weight"),
    "more layers": (config(num_hidden_layers=5), r"27 weights are missing from its files \(model.layers.2"),
    "fewer layers": (config(num_hidden_layers=1), r"9 weights are in its files, but not in its architecture"),
    "wider": (config(hidden_size=64), "numbers are needed, its files hold"),
    "far too wide": (config(intermediate_size=10**9), "numbers are needed, its files hold"),
    "a billion experts": (config(num_experts=10**9), "num_experts is 1000000000, and no model has more"),
    "a million layers": (config(num_hidden_layers=10**6), "num_hidden_layers is 1000000, and no model has more"),
    "no width": (config(hidden_size=0), "its config.json"),
    "width is text": (config(hidden_size="wide"), "its config.json cannot be loaded"),
    "heads do not divide": (config(num_attention_heads=5), "its config.json|do not fit each other"),
    "no activation": (config(hidden_act="no_such_activation"), "its config.json"),
    "nan": (number(UP, 3, "nan"), f"32 of the 2,048 numbers of its weight {UP} are NaN or infinite"),
    "infinite": (
        number("model.norm.weight", slice(3, 4), "-inf"),
        r"1 of the 32 numbers of its weight model.norm.weight are",
    ),
    "config is not JSON": (file("config.json", "{"), "config.json is damaged: not valid JSON"),
    "config is a list": (file("config.json", "[]"), "config.json is damaged: it must hold a JSON object"),
    "config is deep": (file("config.json", "[" * 10**5), "config.json is damaged: "),
    "generation config": (file("generation_config.json", "{{"), "generation_config.json is damaged: not valid JSON"),
    "end token is text": (file("generation_config.json", '{"eos_token_id": "x"}'), "'x' is not a token id"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "has no tokenizer: copy tokenizer.json"),
    "tokenizer is not JSON": (file("tokenizer.json", "{"), "its tokenizer cannot be loaded"),
    "tokenizer is empty": (file("tokenizer.json", "{}"), "its tokenizer"),
    "tokenizer config": (file("tokenizer_config.json", "1"), "tokenizer_config.json is damaged"),
    "template is not text": (file(TEMPLATE_FILE, b"{{ '\xe9' }}"), r"chat_template\.jinja is not text in UTF-8 "),
    "template is a folder": (template(Path.mkdir), r"cannot read .*chat_template\.jinja: Is a directory"),
    "template leads nowhere": (template(lambda path: path.symlink_to("/nowhere")), r"chat_template\.jinja"),
    "more tokens": (
        tokenizer(lambda made: made.add_tokens(["<tool>", "<call>"])),
        r"2 tokens .* no embedding \(.* '<tool>', number 84",
    ),
    "end token beyond": (
        tokenizer(lambda made: made.add_special_tokens({"eos_token": "<b>"})),
        r"1 tokens .* no embedding \(.* '<b>'",
    ),
}  # fmt: skip
ONLY_IN_THE_WEIGHTS = ("unexpected", "shape", "fewer layers", "nan", "infinite")
NOT_BY_CHECK = (*ONLY_IN_THE_WEIGHTS, "end token is text")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **COMMON, **SMALL, tie_word_embeddings=False)
    )
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    load(folder)
    return folder


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_whole_is_refused_by_name_in_one_line(case, whole, tmp_path, monkeypatch):
    change, message = REFUSED[case]
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    change(folder)
    monkeypatch.setattr(sys, "stdin", None)  # whoever asks the user, fails
    with pytest.raises(ConfigError, match=message) as refused:
        load(folder)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 900
    assert not (folder / "ran").exists()
    if case not in NOT_BY_CHECK:
        with pytest.raises(ConfigError, match=message):
            check_model_files(str(folder))


@pytest.mark.parametrize("kind", ["doge", "gemma3n_text", "gemma4_text", "phi4_multimodal"])
def test_sizes_of_real_models_are_no_numbers_that_no_model_has(kind):
    """16,384 experts, or 262,144 embeddings for each layer."""
    check_model_config(AutoConfig.for_model(kind).to_dict(), kind)


def test_a_model_that_looks_ahead_is_found_by_trying():
    module = tiny_model("gpt2")
    module.forward = _both_ways(module.forward)
    with pytest.raises(ConfigError, match="a token sees those after it, so it is an encoder"):
        wrap_model(module, tiny_tokenizer())


def _both_ways(forward):
    def mixed(input_ids, **options):
        output = forward(input_ids=input_ids, **options)
        output.logits = output.logits + output.logits.mean(dim=1, keepdim=True)
        return output

    return mixed


def test_an_encoder_in_memory_is_refused():
    config = AutoConfig.for_model("bert", **COMMON, **SMALL)
    encoder = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="a token sees those after it, so it is an encoder"):
        check_forward(encoder, "bert")
    with pytest.raises(ConfigError, match="bert is an encoder, in which a token sees those after it"):
        wrap_model(encoder, tiny_tokenizer())
    config.is_decoder = True
    wrap_model(AutoModelForCausalLM.from_config(config), tiny_tokenizer())


def test_a_model_in_memory_with_nan_is_refused():
    module = tiny_model()
    with torch.no_grad():
        module.model.norm.weight[2] = float("nan")
    with pytest.raises(ConfigError, match=r"numbers of its weight model.norm.weight are NaN"):
        wrap_model(module, tiny_tokenizer())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file of a language model"),
        (b"not a gguf file at all", "is not a GGUF file of a language model"),
        (b"GGUF" + b"\xff" * 60, "GGUF file"),
        (None, "GGUF file"),
    ],
)
def test_a_damaged_gguf_file_is_refused(content, message, tmp_path, monkeypatch):
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    path = tiny_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:2000] if content is None else content)
    with pytest.raises(ConfigError, match=message) as refused:
        load(path)
    assert "\n" not in str(refused.value)


def test_a_gguf_file_without_a_weight_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    path = tiny_gguf(tmp_path / "model.gguf", without="blk.1.attn_q")
    with pytest.raises(ConfigError, match=r"missing from the GGUF file \(model.layers.1.self_attn.q_proj.weight\)"):
        load(path)
    assert not list((tmp_path / "cache").glob("model-*"))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "no checksums", "half"])
def test_a_damaged_conversion_is_made_anew(damage, tmp_path, monkeypatch):
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    path = tiny_gguf(tmp_path / "model.gguf")
    whole = load(path)
    folder = Path(whole.source)
    written = folder / "model.safetensors"
    if damage == "cut":
        written.write_bytes(written.read_bytes()[:-8])
    elif damage == "flipped":
        written.write_bytes(written.read_bytes()[:-8] + b"\0" * 8)
    elif damage == "gone":
        (folder / "tokenizer.json").unlink()
    elif damage == "no checksums":
        (folder / "checksums.json").unlink()
    else:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "config.json").write_text("{")
    again = load(path)
    expected = whole.module.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.module.state_dict().items())
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [folder.name]
    written_at = written.stat().st_mtime_ns
    load(path)
    assert written.stat().st_mtime_ns == written_at, "a whole one is used as it is"


def test_a_model_without_room_for_its_hidden_width_has_a_critic_as_wide_as_its_output(tmp_path):
    from covey.data import Batch
    from covey.llm.critic import LanguageCritic, SharedTrunkValues
    from covey.llm.generation.trial import probe_batch

    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", **COMMON, **FAMILIES["opt"]))
    batch: Batch = probe_batch(list(range(60)), 16)
    for own_trunk in (True, False):
        policy = LanguagePolicy(module)
        critic = LanguageCritic(policy, own_trunk=own_trunk)
        shared = policy.with_outputs(SharedTrunkValues(critic))
        values = critic.values(batch) if own_trunk else shared.evaluate(batch).values_BT
        assert values.shape == batch.actions_BT.shape
        assert critic.head.linear.in_features == 16
