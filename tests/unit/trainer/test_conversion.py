import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.families import FAMILIES
from megatron_bapo.errors import UserError
from megatron_bapo.model.weight_copy import CopyResult
from megatron_bapo.trainer.conversion import (
    checkpoint_bytes,
    checkpoint_from_hugging_face,
    dequantized_bytes,
    dequantized_hugging_face,
    exported_bytes,
    hugging_face_from_checkpoint,
    hugging_face_from_megatron,
    text_bytes,
    text_hugging_face,
)

SHAPE = {
    "vocab_size": 18,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "tie_word_embeddings": True,
}
SMALL_FILES = 1000


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [1]}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS)),
}
NUM_TENSORS = {"qwen3": 24, "qwen3_moe": 24 - 3 + 1 + 4 * 3}


def nothing(_: int) -> None:
    pass


def save_model(family: str, folder: Path) -> Path:
    """Write a bfloat16 model in several files, with one tokenizer file."""
    torch.manual_seed(0)
    MODELS[family]().bfloat16().save_pretrained(folder, max_shard_size="1KB")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_model("qwen3", tmp_path / "source")


def to_checkpoint(source: Path, advance=nothing) -> CopyResult:
    state = {"step": 0, "update": 0}
    target = source.parent / "step-00000000"
    return checkpoint_from_hugging_face(source, target, state, max_file_bytes=SMALL_FILES, advance=advance)


def to_hugging_face(source: Path, dtype: torch.dtype = torch.bfloat16) -> CopyResult:
    checkpoint, target = source.parent / "step-00000000", source.parent / "back"
    return hugging_face_from_checkpoint(checkpoint, source, target, dtype, max_file_bytes=SMALL_FILES, advance=nothing)


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", MODELS)
def test_a_model_comes_back_from_a_checkpoint_bit_for_bit_and_loads_in_transformers(tmp_path, family):
    source = save_model(family, tmp_path / "source")
    copied = to_checkpoint(source)
    to_hugging_face(source)

    checkpoint, original, back = (load(source.parent / name) for name in ("step-00000000/weights", "source", "back"))
    assert copied.num_tensors == len(original) == NUM_TENSORS[family]
    assert checkpoint.keys() == original.keys() == back.keys()
    for name, tensor in original.items():
        assert checkpoint[name].dtype == torch.float32
        assert torch.equal(checkpoint[name], tensor.float())
        assert back[name].dtype == torch.bfloat16
        assert torch.equal(back[name], tensor)
    token_ids = torch.arange(10)[None]
    models = [AutoModelForCausalLM.from_pretrained(source.parent / name) for name in ("source", "back")]
    assert torch.equal(*(model(token_ids).logits for model in models))
    assert (source.parent / "back" / "tokenizer_config.json").is_file()


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def save_glm(folder: Path) -> Path:
    """Write a bfloat16 model with a router's bias in float32."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    torch.manual_seed(0)
    config = Glm4MoeConfig(**SHAPE | {"tie_word_embeddings": False}, **experts)
    Glm4MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    save_file(load(folder) | {BIAS: torch.randn(4)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_routers_biases_come_back_in_fp32_and_layers_that_predict_further_tokens_do_not(tmp_path):
    source = save_glm(tmp_path / "source")
    tensors = load(source)
    further = {"model.layers.2.eh_proj.weight": torch.zeros(8, 16)}
    save_file(tensors | further, source / "model.safetensors", metadata={"format": "pt"})
    assert to_checkpoint(source).num_bytes == checkpoint_bytes(source)
    copied = to_hugging_face(source)

    checkpoint, back = (load(source.parent / name) for name in ("step-00000000/weights", "back"))
    assert checkpoint.keys() == tensors.keys() - {BIAS}
    assert back.keys() == tensors.keys()
    assert all(back[name].dtype == tensor.dtype and torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert copied.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert copied.num_bytes == exported_bytes(source, torch.bfloat16)
    assert json.loads((source.parent / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    models = [AutoModelForCausalLM.from_pretrained(source.parent / name) for name in ("source", "back")]
    assert torch.equal(*(model(torch.arange(10)[None]).logits for model in models))
    assert to_hugging_face(source).num_bytes == copied.num_bytes  # finds what it would write


def test_what_checkpoints_lack_must_be_in_the_folder_of_the_model(tmp_path):
    source = save_glm(tmp_path / "source")
    to_checkpoint(source)
    weights = source / "model.safetensors"
    save_file({name: tensor for name, tensor in load(source).items() if name != BIAS}, weights)
    with pytest.raises(UserError, match=f"source lacks {BIAS}, which checkpoints do not have; give the whole folder"):
        to_hugging_face(source)
    weights.unlink()
    with pytest.raises(UserError, match=r"source has no \*\.safetensors files, .* such as .*; give the whole folder"):
        to_hugging_face(source)


def save_gpt_oss(folder: Path) -> Path:
    """Write a bfloat16 model; its hidden size is that of one block of MXFP4."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "tie_word_embeddings": False}
    model = GptOssForCausalLM(GptOssConfig(**SHAPE | shape, num_local_experts=4, num_experts_per_tok=2)).bfloat16()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


EXPERT_FILES = ("gate_up_proj", "down_proj")


def test_stacked_experts_are_single_ones_in_a_checkpoint_and_come_back_bit_for_bit(tmp_path):
    source = save_gpt_oss(tmp_path / "source")
    assert to_checkpoint(source).num_bytes == checkpoint_bytes(source)
    assert to_hugging_face(source).num_bytes == exported_bytes(source, torch.bfloat16)

    checkpoint, original, back = (load(source.parent / name) for name in ("step-00000000/weights", "source", "back"))
    gate = checkpoint["model.layers.1.mlp.experts.3.gate_proj.weight"]
    assert torch.equal(gate, original["model.layers.1.mlp.experts.gate_up_proj"][3, :, ::2].T.float())
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in original.items())
    assert to_hugging_face(source).num_kept_files > 0  # finds what it would write
    with pytest.raises(UserError, match="attention sinks, which are not read from checkpoints of Megatron-Core"):
        hugging_face_from_megatron(
            tmp_path, source, tmp_path / "x", torch.float32, max_file_bytes=SMALL_FILES, advance=nothing
        )


def test_gated_delta_nets_come_back_bit_for_bit_and_are_not_read_from_megatron_core(tmp_path):
    source = tmp_path / "source"
    config = Qwen3_5TextConfig(
        **SHAPE, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=4, linear_value_head_dim=6,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    Qwen3_5ForCausalLM(config).bfloat16().save_pretrained(source)
    to_checkpoint(source)
    to_hugging_face(source)
    original, back = load(source), load(source.parent / "back")
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in original.items())
    with pytest.raises(UserError, match="which are not read from its checkpoints; convert it with"):
        hugging_face_from_megatron(
            tmp_path, source, tmp_path / "x", torch.float32, max_file_bytes=SMALL_FILES, advance=nothing
        )


def quantize(folder: Path) -> Path:
    """Replace the experts of a bfloat16 model by random ones in MXFP4, as in published models."""
    tensors, generator = load(folder), torch.Generator().manual_seed(1)
    for layer in range(2):
        for name in (f"model.layers.{layer}.mlp.experts.{part}" for part in EXPERT_FILES):
            experts, columns, rows = tensors.pop(name).shape
            shape = (experts, rows, columns // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return folder


def dequantize(source: Path) -> CopyResult:
    return dequantized_hugging_face(source, source.parent / "bf16", max_file_bytes=SMALL_FILES, advance=nothing)


def test_experts_in_mxfp4_become_those_that_transformers_loads(tmp_path):
    source = quantize(save_gpt_oss(tmp_path / "source"))
    with pytest.raises(UserError, match=r"convert the folder to bfloat16 with tools/dequantize_mxfp4\.py"):
        to_checkpoint(source)

    assert dequantize(source).num_bytes == dequantized_bytes(source)

    written, theirs = load(tmp_path / "bf16"), AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    assert written.keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(written[name], parameter.to(torch.bfloat16))
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    assert torch.equal(*(model(torch.arange(10)[None]).logits for model in (ours, theirs)))
    assert dequantize(source).num_kept_files > 0


def test_only_folders_in_mxfp4_are_dequantized(tmp_path):
    for folder in (save_gpt_oss(tmp_path / "source"), tmp_path / "missing"):
        with pytest.raises(UserError, match=r"has no config\.json whose quantization_config\.quant_method is mxfp4"):
            dequantize(folder)


MULTIMODAL = {
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, {}),
    "qwen3_5_moe": (
        Qwen3_5MoeConfig,
        Qwen3_5MoeForConditionalGeneration,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12},
    ),
}


def save_multimodal(folder: Path, kind: str, *, stacked: bool) -> Path:
    """Write a multimodal model with a layer that predicts a further token, and experts as published ones have them."""
    torch.manual_seed(0)
    config_class, model_class, experts = MULTIMODAL[kind]
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4}
    text = SHAPE | experts | linear | {"linear_value_head_dim": 6, "head_dim": 8, "mtp_num_hidden_layers": 1}
    text |= {"layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": False}
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_position_embeddings": 4}
    model = model_class(
        config_class(text_config=text, vision_config=vision | {"out_hidden_size": SHAPE["hidden_size"]})
    )
    model.save_pretrained(folder)
    tensors = load(folder) | {"mtp.norm.weight": torch.ones(SHAPE["hidden_size"])}
    if stacked:
        for name in sorted(name for name in tensors if ".experts.0.gate_proj" in name):
            prefix = name.partition("0.gate_proj")[0]
            parts = {m: [tensors.pop(f"{prefix}{e}.{m}_proj.weight") for e in range(4)] for m in ("gate", "up", "down")}
            both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
            tensors |= {f"{prefix}gate_up_proj": torch.stack(both), f"{prefix}down_proj": torch.stack(parts["down"])}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("kind", "stacked"), [("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True)])
def test_the_language_model_of_a_multimodal_folder_computes_what_the_folder_does(tmp_path, kind, stacked):
    source, target = save_multimodal(tmp_path / "source", kind, stacked=stacked), tmp_path / "text"
    with pytest.raises(
        UserError, match=r"multimodal model, .* to a folder of its own with tools/extract_text_model\.py"
    ):
        read_architecture(source)

    for is_repeated in (False, True):
        copied = text_hugging_face(source, target, torch.float32, max_file_bytes=SMALL_FILES, advance=nothing)
        assert copied.num_bytes == text_bytes(source, torch.float32)
        assert bool(copied.num_kept_files) == is_repeated

    assert read_architecture(target).family == FAMILIES[f"{kind}_text"]
    text, whole = AutoModelForCausalLM.from_pretrained(target), MULTIMODAL[kind][1].from_pretrained(source)
    assert load(target).keys() == dict(text.state_dict()).keys() or kind == "qwen3_5_moe"  # which it keeps stacked
    tokens = torch.arange(10)[None]
    assert torch.equal(text(tokens).logits, whole(input_ids=tokens).logits)


def test_only_folders_of_multimodal_models_are_extracted(tmp_path, source):
    for folder in (source, tmp_path / "missing"):
        with pytest.raises(UserError, match=r"has no config\.json whose text_config\.model_type is qwen3_5_text or"):
            text_hugging_face(folder, tmp_path / "x", torch.float32, max_file_bytes=SMALL_FILES, advance=nothing)


def test_a_checkpoint_before_the_first_update_holds_no_moments(source):
    to_checkpoint(source)

    checkpoint = source.parent / "step-00000000"
    assert sorted(path.name for path in checkpoint.iterdir()) == ["state.json", "weights"]
    assert json.loads((checkpoint / "state.json").read_text()) == {"step": 0, "update": 0, "adam_step": 0}


def test_another_dtype_is_written_to_the_config_too(source):
    to_checkpoint(source)
    to_hugging_face(source, torch.float32)

    assert json.loads((source.parent / "back" / "config.json").read_text())["dtype"] == "float32"
    assert {tensor.dtype for tensor in load(source.parent / "back").values()} == {torch.float32}


def test_an_interrupted_conversion_leaves_no_target_and_continues(source):
    def interrupt(_: int) -> None:
        if list(source.parent.glob("step-00000000.partial/weights/model-00003-of-*.safetensors")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_checkpoint(source, advance=interrupt)
    assert not (source.parent / "step-00000000").exists()

    assert to_checkpoint(source).num_kept_files == 3
    assert not list(source.parent.glob("*.partial"))


def test_an_existing_target_is_compared(source):
    first = to_checkpoint(source)
    again = to_checkpoint(source)
    assert (again.num_tensors, again.num_kept_files) == (first.num_tensors, first.num_files)

    file = next((source.parent / "step-00000000" / "weights").glob("*-00002-of-*"))
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] += 1
    save_file(tensors, file)
    with pytest.raises(UserError, match=rf"already exists with other content: {name} differs"):
        to_checkpoint(source)


def test_an_existing_target_that_is_no_checkpoint_is_not_changed(source):
    (source.parent / "step-00000000").mkdir()

    with pytest.raises(UserError, match="already exists with other content: it has no weights"):
        to_checkpoint(source)


def test_the_error_names_a_target_that_cannot_be_created(source):
    with pytest.raises(UserError, match=r"--output /dev/null/model cannot be written to \(Not a directory: /dev/null"):
        checkpoint_from_hugging_face(source, Path("/dev/null/model"), {}, max_file_bytes=SMALL_FILES, advance=nothing)


def test_weights_of_another_model_are_refused(source):
    to_checkpoint(source)
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 3, "layer_types": None}))

    with pytest.raises(UserError, match=r"step-00000000/weights lacks 11 tensors that config.json requires"):
        to_hugging_face(source)
    assert not (source.parent / "back.partial").exists()


def test_a_full_disk_is_reported_before_anything_is_written(source, monkeypatch):
    usage = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**10))

    with pytest.raises(UserError, match=r"needs 0\.00 GiB and the disk has 0\.00 GiB free"):
        to_checkpoint(source)
    assert not list(source.parent.rglob("*.partial/**/*.safetensors*"))
