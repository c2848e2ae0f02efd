"""What caches cost: against sizes computed by hand and against caches of models that ran; and sizes as people write them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from hypothesis import given
from hypothesis import strategies as st

from foredraft.errors import ConfigurationError
from foredraft.models.cache_measuring import measure
from foredraft.models.cache_sizes import UNITS, CacheSizes, LayerKind, in_words, parse_memory
from foredraft.models.pages import PAGE
from foredraft.target import Target

SIZE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "dtype": "bfloat16"}


def folder(path: Path, kind: str, **options: Any) -> str:
    """A folder that holds a config.json and nothing else."""
    getattr(transformers, kind)(**{**IDS, **options}).save_pretrained(path)
    assert [each.name for each in path.iterdir()] == ["config.json"]
    return str(path)


def kinds(sizes: CacheSizes) -> list[tuple[str, int, int, int, int | None]]:
    return [(each.name, each.layers, each.token_bytes, each.state_bytes, each.window) for each in sizes.kinds]


def test_llama(tmp_path: Path):
    """3 layers, 2 heads of 8 numbers, keys and values, 2 bytes."""
    source = folder(tmp_path, "LlamaConfig", **SIZE, num_hidden_layers=3)
    found = measure(source)
    assert kinds(found) == [("full attention", 3, 3 * 2 * 8 * 2 * 2, 0, None)]
    assert (found.model_type, found.dtype, found.page_bytes, found.windowed) == ("llama", "bfloat16", 64 * 192, False)
    assert measure(source, "float32").token_bytes == 2 * 192 and measure(source, "float32").dtype == "float32"


def test_without_a_dtype_a_model_is_float32_as_transformers_loads_it(tmp_path: Path):
    found = measure(folder(tmp_path, "LlamaConfig", **SIZE, num_hidden_layers=1, dtype=None))
    assert (found.dtype, found.token_bytes) == ("float32", 2 * 8 * 2 * 4)


def test_gemma3_has_two_kinds(tmp_path: Path):
    source = folder(tmp_path, "Gemma3TextConfig", **SIZE, num_hidden_layers=7, head_dim=16, sliding_window=100)
    found = measure(source)
    layer = 2 * 16 * 2 * 2
    assert kinds(found) == [("sliding window", 6, 6 * layer, 0, 100), ("full attention", 1, layer, 0, None)]
    assert found.row_bytes(1000) == 1024 * 7 * layer
    assert found.row_bytes(1000, tree=28) == (1024 + 6 * 256) * layer  # 100, 64 and 28 tokens are three pages, and one more may be begun
    assert found.row_bytes(1000, tree=29) == (1024 + 6 * 320) * layer
    assert found.row_bytes(65, tree=28) == found.row_bytes(65) == 128 * 7 * layer  # no window is full


def test_phi3(tmp_path: Path):
    size = {**SIZE, "num_key_value_heads": 4, "num_hidden_layers": 2}
    assert kinds(measure(folder(tmp_path / "a", "Phi3Config", **size))) == [("full attention", 2, 2 * 4 * 8 * 2 * 2, 0, None)]
    assert kinds(measure(folder(tmp_path / "b", "Phi3Config", **size, sliding_window=9))) == [("sliding window", 2, 256, 0, 9)]


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_qwen3_moe_whatever_its_experts(dtype: str, size: int, tmp_path: Path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    source = folder(tmp_path, "Qwen3MoeConfig", **SIZE, **experts, num_hidden_layers=2, head_dim=24, dtype=dtype)
    assert kinds(measure(source)) == [("full attention", 2, 2 * 2 * 24 * 2 * size, 0, None)]


def test_t5_keeps_keys_of_its_source_too(tmp_path: Path):
    size = {"vocab_size": 64, "d_model": 40, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
    found = measure(folder(tmp_path, "T5Config", **size))
    keys = 2 * 4 * 8 * 2 * 2
    assert kinds(found) == [
        ("full attention", 2, keys, 0, None),
        ("cross-attention, per source token", 2, keys, 0, None),
        ("what the encoder made, per source token", 0, 40 * 2, 0, None),
    ]
    assert (found.token_bytes, found.source_token_bytes) == (keys, keys + 80)
    assert found.row_bytes(100, source=10) == 128 * keys + 10 * (keys + 80)


def test_deepseek_v3_keeps_what_transformers_caches(tmp_path: Path):
    """A latent vector and one rotated key for all heads, in 3 layers."""
    latent = {"kv_lora_rank": 20, "q_lora_rank": 16, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
    size = {**SIZE, "num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1}
    assert measure(folder(tmp_path, "DeepseekV3Config", **size, **latent, **experts)).token_bytes == 3 * (20 + 6) * 2


def test_mamba_holds_a_state(tmp_path: Path):
    """A window of 4 inputs of 64 channels in 2 bytes, and 64 times 8 numbers in 4 bytes, in 2 layers."""
    found = measure(folder(tmp_path, "MambaConfig", vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2))
    assert kinds(found) == [("recurrent state", 2, 0, 2 * (64 * 4 * 2 + 64 * 8 * 4), None)]
    assert found.row_bytes(1) == found.row_bytes(10**6) == 5120


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gemma3n_text", {"sliding window": 1, "full attention": 1, "shared: reads the keys of other layers": 2}),
        ("nemotron_h", {"recurrent state": 1, "no attention": 2, "full attention": 1}),
        ("falcon_h1", {"full attention and recurrent state": 2}),
        ("llama4_text", {"chunks": 2, "full attention": 1}),
        ("minimax", {"full attention": 1, "recurrent state": 1}),
        ("rwkv", {"recurrent state": 2}),
    ],
)
def test_other_kinds_of_layers(family: str, expected: dict[str, int], tmp_path: Path):
    kind, _, _, options = ARCHITECTURES[family].build.args
    found = measure(folder(tmp_path, getattr(transformers, kind).config_class.__name__, **options))
    assert {each.name: each.layers for each in found.kinds} == expected
    assert all((each.token_bytes + each.state_bytes == 0) == (each.name in ("no attention", "shared: reads the keys of other layers"))
               for each in found.kinds)  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "falcon_grouped", "gemma3n_text", "gpt_oss", "deepseek_v2", "qwen2_window", "bloom", "biogpt"])
def test_a_row_of_a_target_takes_as_much(family: str, tmp_path: Path):
    model = ARCHITECTURES[family].build(ARCHITECTURES[family].implementations[0])
    model.config.save_pretrained(tmp_path)
    target = Target(model, test=False, execution="eager")
    target.open([[1, 2, 3]])
    target.prefill([[1, 2, 3]], first=0)
    assert target.cache.row_capacity == 1 and target.cache.capacity % PAGE == 0
    assert target.cache.bytes == measure(str(tmp_path), torch.float32).row_bytes(target.cache.capacity)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 4}, "has no config.json with a model_type; give a model in the format of transformers"),
        ({"model_type": "nope"}, "cannot be read: The checkpoint you are trying to load has model type `nope`"),
        ({"model_type": "vit"}, r"\(vit\) cannot be built as a causal language model; give a model that generates text"),
        ({"model_type": "bert"}, r"\(bert\) hands out no cache that could be measured; give a model that generates text"),
        ({"model_type": "switch_transformers", "is_encoder_decoder": True}, "cannot be measured without its weights: .*nonzero"),
        ({"model_type": "deepseek_v4", "num_hidden_layers": 3}, "caches buffer_gate, buffer_kv, whose growth one token cannot tell"),
    ],
)
def test_what_cannot_be_measured(config: dict[str, Any], message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=message) as caught:
        measure(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_configuration(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        measure(str(tmp_path))


def test_an_inflated_model_has_the_heads_that_it_is_inflated_to():
    assert measure("zoo:python-300m").token_bytes == 24 * 8 * 64 * 2 * 2


# -- sizes ------------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**15), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.booleans())
def test_whole_sizes_come_back(number: int, unit: str, space: str, lower: bool):
    text = f"{number}{space}{unit}"
    assert parse_memory(text.lower() if lower else text) == number * UNITS[unit]


@given(st.integers(1, 10**9), st.integers(1, 4), st.sampled_from(sorted(set(UNITS) - {"B"})))
def test_decimal_sizes_are_exact_to_the_byte(number: int, digits: int, unit: str):
    text = f"{number // 10**digits}.{number % 10**digits:0{digits}d}{unit}"
    bytes_ = math.floor(Fraction(number, 10**digits) * UNITS[unit])
    if bytes_:
        assert parse_memory(text) == bytes_
    else:
        with pytest.raises(ConfigurationError):
            parse_memory(text)


@given(st.floats(0, 1, exclude_min=True))
def test_fractions_come_back(share: float):
    for found in (parse_memory(share), parse_memory(repr(share))):
        assert type(found) is float and found == share


@given(st.integers(1, 2**50 - 1))
def test_words_are_close(size: int):
    back = parse_memory(in_words(size))
    assert back is not None and abs(back - size) <= size / 1000


def test_units_are_not_mixed_up():
    assert parse_memory("6GiB") == 6 * 2**30 and parse_memory("6GB") == 6 * 10**9 and parse_memory(" 512MB ") == 512_000_000
    assert parse_memory("auto") is None and parse_memory("AUTO") is None
    assert parse_memory("1") == parse_memory(1) == 1.0 and type(parse_memory("1B")) is int
    assert (in_words(512), in_words(2**20), in_words(3 * 2**29)) == ("512 B", "1 MiB", "1.5 GiB")


WORDS = ["6 gigs", "6G", "GiB", "", "-1GiB", "1,5GiB", "1e3MB", "nan", "0", "0GiB", "0.4B", "-0.5"]


@pytest.mark.parametrize("value", [*WORDS, 0, -0.5, True, None, math.nan, [1]])
def test_what_is_no_size(value: Any):
    with pytest.raises(ConfigurationError, match=r"is not an amount of memory; write a size such as '6GiB', '500MiB' or '2GB', a fraction"):
        parse_memory(value)


@pytest.mark.parametrize("value", ["6", "1.5", "1073741824", 6, 1.5, 10**400, math.inf, "inf"])
def test_a_number_without_a_unit_is_no_size(value: Any):
    with pytest.raises(ConfigurationError, match=r"has no unit, and is no fraction; write a size such as '6GiB'"):
        parse_memory(value)


def test_sizes_are_for_json():
    sizes = CacheSizes("llama", "float32", [LayerKind("full attention", 2, 64), LayerKind("recurrent state", 1, state_bytes=7)])
    assert json.loads(json.dumps(asdict(sizes)))["kinds"][1]["state_bytes"] == 7
    assert (sizes.row_bytes(1), sizes.page_bytes, sizes.state_bytes) == (64 * 64 + 7, 64 * 64, 7)
