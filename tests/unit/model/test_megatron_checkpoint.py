"""Which folders are checkpoints of Megatron-Core, and which of them fit an architecture.

tests/parallel/test_megatron_checkpoint.py reads those that Megatron-Core writes.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.families import FAMILIES
from megatron_bapo.errors import UserError
from megatron_bapo.model.hf_mapping import expected_shapes
from megatron_bapo.model.megatron_checkpoint import MegatronTensors, find_megatron_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ARCHITECTURE = Architecture(
    family=FAMILIES["qwen3"],
    vocab_size=10,
    hidden_size=8,
    intermediate_size=6,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    tie_word_embeddings=False,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=64,
)
LAYERS = "decoder.layers."
SHAPES = {
    "embedding.word_embeddings.weight": (12, 8),
    "decoder.final_layernorm.weight": (8,),
    "output_layer.weight": (12, 8),
    LAYERS + "self_attention.linear_qkv.layer_norm_weight": (2, 8),
    LAYERS + "self_attention.linear_qkv.weight": (2, 16, 8),
    LAYERS + "self_attention.q_layernorm.weight": (2, 4),
    LAYERS + "self_attention.k_layernorm.weight": (2, 4),
    LAYERS + "self_attention.linear_proj.weight": (2, 8, 8),
    LAYERS + "mlp.linear_fc1.layer_norm_weight": (2, 8),
    LAYERS + "mlp.linear_fc1.weight": (2, 12, 8),
    LAYERS + "mlp.linear_fc2.weight": (2, 8, 6),
}
"""A model of two layers whose vocabulary is padded from 10 to 12."""


def save(folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    torch_checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)
    return folder


def test_the_newest_checkpoint_is_found(tmp_path):
    for number in (5, 100):
        save(tmp_path / f"iter_{number:07d}", {"weight": (1,)})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100\n")
    assert find_megatron_checkpoint(tmp_path) == tmp_path / "iter_0000100"
    assert find_megatron_checkpoint(tmp_path / "iter_0000005") == tmp_path / "iter_0000005"

    save(tmp_path / "release", {"weight": (1,)})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert find_megatron_checkpoint(tmp_path) == tmp_path / "release"

    nemo = save(tmp_path / "nemo" / "weights", {"weight": (1,)}).parent
    assert find_megatron_checkpoint(nemo) == nemo / "weights"


def test_other_folders_are_none(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for name in ("folder", "file", "missing"):
        assert find_megatron_checkpoint(tmp_path / name) is None


@pytest.mark.parametrize(
    ("file", "tracker", "message"),
    [
        ("iter_0000007/mp_rank_00/model_optim_rng.pt", "7", r"iter_0000007 is .* older format .*--ckpt-convert-format"),
        ("iter_0000007/decoder.final_layernorm.weight/.zarray", "7", "older format"),
        ("iter_0000007/__0_0.distcp", "7", r"iter_0000007 has no \.metadata, which is written last"),
        ("weights/__0_0.distcp", None, r"weights has no \.metadata"),
        ("iter_0000007/x", "8", "names .*iter_0000008, which has no checkpoint"),
        (
            "release/.metadata",
            "9" * 5000,
            "latest_checkpointed_iteration.txt has '999.* instead of a number or release",
        ),
        ("release/.metadata", "../../x", r"has '\.\./\.\./x' instead of"),
        ("release/.metadata", "\ufffd", "has '\ufffd' instead of"),
        ("release/.metadata", "", "has '' instead of"),
        ("iter_0000007/x", None, r"has no latest_checkpointed_iteration\.txt.*; give one, such as .*iter_0000007"),
    ],
)
def test_checkpoints_that_cannot_be_read_are_named(tmp_path, file, tracker, message):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    if tracker is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(
            tracker.encode().replace("\ufffd".encode(), b"\xff")
        )
    with pytest.raises(UserError, match=message):
        find_megatron_checkpoint(tmp_path)


@pytest.mark.parametrize("prefix", ["", "module.", "model."])
def test_names_may_have_a_prefix_and_the_vocabulary_more_rows(tmp_path, prefix):
    ignored = {"optimizer.state.exp_avg.decoder.final_layernorm.weight": (8,), "mtp.layers.0.enorm.weight": (8,)}
    folder = save(tmp_path / "checkpoint", {prefix + name: shape for name, shape in SHAPES.items()} | ignored)

    tensors = MegatronTensors(folder, ARCHITECTURE)

    assert tensors.shapes() == expected_shapes(ARCHITECTURE)
    for name, shape in expected_shapes(ARCHITECTURE).items():
        assert tuple(tensors.slice(name).shape) == shape


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 3}, r"layer_norm_weight has the shape \[2, 8\], but config.json requires \[3, 8\]"),
        ({"num_hidden_layers": 1}, r"has the shape \[2, 8\], but config.json requires \[1, 8\]"),
        ({"vocab_size": 13}, r"word_embeddings.weight has the shape \[12, 8\], but config.json requires \[13, 8\]"),
        ({"num_attention_heads": 4}, r"linear_qkv.weight has the shape \[2, 16, 8\], but .* \[2, 24, 8\]"),
        ({"tie_word_embeddings": True}, "has 1 tensors that the architecture .* first output_layer.weight"),
        ({"family": FAMILIES["qwen2"]}, r"lacks decoder.layers.self_attention.linear_qkv.bias, which is .*q_proj.bias"),
        ({"family": FAMILIES["llama"]}, r"has 2 tensors that the architecture .* first .*k_layernorm.weight"),
    ],
)
def test_an_architecture_that_does_not_fit_is_refused(tmp_path, fields, message):
    folder, architecture = save(tmp_path / "checkpoint", SHAPES), replace(ARCHITECTURE, **fields)
    with pytest.raises(UserError, match=message):
        MegatronTensors(folder, architecture)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_weights_that_need_scales_are_refused(tmp_path, dtype):
    tensors = MegatronTensors(save(tmp_path / "checkpoint", SHAPES, dtype), ARCHITECTURE)
    with pytest.raises(UserError, match=rf"final_layernorm.weight is {dtype}, whose scales are not read"):
        tensors.slice("model.norm.weight")


def test_half_a_gated_layer_is_refused(tmp_path):
    shapes = {name: shape for name, shape in SHAPES.items() if "fc1.weight" not in name}
    folder = save(tmp_path / "checkpoint", {**shapes, LAYERS + "mlp.linear_fc1.weight_w": (2, 6, 8)})
    with pytest.raises(UserError, match=r"fc1.weight_v has the shape \[\], but config.json requires \[2, 6, 8\]"):
        MegatronTensors(folder, ARCHITECTURE)


def test_a_model_of_another_kind_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no embedding.word_embeddings.weight among its 1 tensors, first vision"):
        MegatronTensors(save(tmp_path / "checkpoint", {"vision": (3,)}), ARCHITECTURE)
