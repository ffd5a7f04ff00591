import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from megatron_bapo.config.checks import check_config
from megatron_bapo.config.model_checks import model_problems
from megatron_bapo.config.schema import Config
from tests.unit.config.examples import ARITHMETIC, config, problems

HF_CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 511,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "mlp_only_layers": [0],
}


def hf_folder(folder: Path, *, absent: tuple[str, ...] = (), **fields: Any) -> Path:
    files = {
        "config.json": json.dumps(HF_CONFIG | fields).encode(),
        "model.safetensors": save({}),
        "tokenizer.json": b"{}",
    }
    folder.mkdir(exist_ok=True)
    for name in files.keys() - set(absent):
        (folder / name).write_bytes(files[name])
    return folder


def of(folder: Path, **values: Any) -> Config:
    return config(model={"path": folder, "dtype": "float32"}, **values)


def layout(world_size: int, **sizes: Any) -> dict[str, Any]:
    return {"parallel": {"world_size": world_size, **sizes}}


@pytest.mark.parametrize("field", ["num_attention_heads", "intermediate_size"])
def test_tensor_parallelism_must_divide_what_it_splits(tmp_path: Path, field: str) -> None:
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 64} | {field: 42}
    found = problems(of(hf_folder(tmp_path, **sizes), **layout(4, tensor_model_parallel_size=4)))
    expected = f"{tmp_path / 'config.json'}: {field}=42 must be a multiple of parallel.tensor_model_parallel_size=4"
    assert expected in found[0]
    assert "choose a size that divides 42" in found[0]


LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


@pytest.mark.parametrize(
    ("fields", "sizes", "message"),
    [
        ({}, {}, "with latent attention .* needs parallel.sequence_parallel=true"),
        ({"q_lora_rank": 15}, {"sequence_parallel": True}, "q_lora_rank=15 must be a multiple of .*size=2"),
        (
            {"kv_lora_rank": 13},
            {"sequence_parallel": True},
            r"kv_lora_rank \+ qk_rope_head_dim=17 must be a multiple of .*size=2",
        ),
    ],
)
def test_tensor_parallelism_that_latent_attention_does_not_allow_is_refused(
    tmp_path: Path, fields: dict, sizes: dict, message: str
) -> None:
    folder = hf_folder(tmp_path, **LATENT | {"first_k_dense_replace": 4} | fields)
    (found,) = problems(of(folder, **layout(2, tensor_model_parallel_size=2, **sizes)))
    assert re.search(message, found)


@pytest.mark.parametrize(("heads", "tp", "fits"), [(2, 4, True), (8, 4, True), (4, 6, False), (8, 6, False)])
def test_key_value_heads_and_tensor_ranks_must_divide_one_another(
    tmp_path: Path, heads: int, tp: int, fits: bool
) -> None:
    sizes = {"num_attention_heads": 24, "num_key_value_heads": heads, "intermediate_size": 48, "hidden_size": 192}
    folder = hf_folder(tmp_path, **sizes, vocab_size=384)
    for checked, key in (
        (of(folder, **layout(tp, tensor_model_parallel_size=tp)), "parallel.tensor_model_parallel_size"),
        (of(folder, rollout__tensor_parallel_size=tp), "rollout.tensor_parallel_size"),
    ):
        if fits:
            assert check_config(checked) == []
        else:
            (found,) = problems(checked)
            assert f"num_key_value_heads={heads} must be a multiple or a divisor of {key}={tp}" in found


def test_tensor_parallelism_need_not_divide_the_vocabulary_which_is_padded(tmp_path: Path) -> None:
    assert check_config(of(hf_folder(tmp_path), **layout(2, tensor_model_parallel_size=2))) == []


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        ({"pipeline_model_parallel_size": 3}, "parallel.pipeline_model_parallel_size=3, which splits them"),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3},
            "parallel.pipeline_model_parallel_size=2 x virtual_pipeline_model_parallel_size=3, which splits them",
        ),
    ],
)
def test_pipeline_stages_and_their_chunks_must_divide_the_layers(
    tmp_path: Path, sizes: dict[str, int], rule: str
) -> None:
    folder, world_size = hf_folder(tmp_path, num_hidden_layers=7), sizes["pipeline_model_parallel_size"]
    (problem,) = problems(of(folder, **layout(world_size, **sizes)))
    assert f"num_hidden_layers=7 must be a multiple of {rule}" in problem
    assert "set parallel.pipeline_model_parallel_layout=auto" in problem
    assert check_config(of(folder, **layout(world_size, **sizes, pipeline_model_parallel_layout="auto"))) == []


@pytest.mark.parametrize(
    ("world_size", "sizes", "value", "way_out"),
    [
        (
            16,
            {"expert_model_parallel_size": 16},
            "num_experts=8 must be a multiple of parallel.expert_model_parallel_size=16",
            "choose a size that divides it",
        ),
        (
            16,
            {"expert_tensor_parallel_size": 8, "expert_model_parallel_size": 2},
            "moe_intermediate_size=12 must be a multiple of parallel.expert_tensor_parallel_size=8",
            "choose a size that divides it",
        ),
        (
            2,
            {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1},
            "expert_tensor_parallel_size=1 with parallel.tensor_model_parallel_size=2 and expert_model_parallel_size=1",
            "raise it, or remove expert_tensor_parallel_size",
        ),
        (
            4,
            {"expert_tensor_parallel_size": 4},
            "expert_tensor_parallel_size=4 with parallel.tensor_model_parallel_size=1 and expert_model_parallel_size=1",
            "raise it, or remove expert_tensor_parallel_size",
        ),
        (
            2,
            {"tensor_model_parallel_size": 2},
            "parallel.tensor_model_parallel_size=2 with experts",
            "needs parallel.sequence_parallel=true",
        ),
    ],
)
def test_a_layout_that_cannot_split_the_experts_is_refused(
    tmp_path: Path, world_size: int, sizes: dict[str, Any], value: str, way_out: str
) -> None:
    (problem,) = problems(of(hf_folder(tmp_path, **EXPERTS), **layout(world_size, **sizes)))
    assert value in problem
    assert way_out in problem


def test_expert_tensor_parallelism_is_tensor_parallelism_unless_it_is_given(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, **EXPERTS | {"moe_intermediate_size": 9})
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    (problem,) = problems(of(folder, **layout(2, **sizes)))
    assert "moe_intermediate_size=9 must be a multiple of parallel.expert_tensor_parallel_size=2" in problem
    sizes |= {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    assert check_config(of(folder, **layout(2, **sizes))) == []


def test_a_layout_with_every_kind_of_parallelism_passes(tmp_path: Path) -> None:
    sizes = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
    }
    assert check_config(of(hf_folder(tmp_path, **EXPERTS), **layout(16, **sizes))) == []


def test_only_layers_without_experts_need_a_divisible_mlp(tmp_path: Path) -> None:
    fields = EXPERTS | {"intermediate_size": 63}
    sizes = layout(2, tensor_model_parallel_size=2, sequence_parallel=True)
    (problem,) = problems(of(hf_folder(tmp_path, **fields), **sizes))
    assert "intermediate_size=63 must be a multiple of parallel.tensor_model_parallel_size=2" in problem
    assert check_config(of(hf_folder(tmp_path, **fields | {"mlp_only_layers": []}), **sizes)) == []


def test_what_needs_experts_is_refused_for_a_model_without_experts(tmp_path: Path) -> None:
    (problem,) = problems(of(hf_folder(tmp_path), **layout(2, expert_model_parallel_size=2)))
    assert "parallel.expert_model_parallel_size=2 splits a layer's experts, but the model has none" in problem
    assert "set it to 1" in problem
    (problem,) = problems(config(model={"path": hf_folder(tmp_path), "freeze_router": True}))
    assert "model.freeze_router=true, but the model has no experts" in problem
    (problem,) = problems(of(hf_folder(tmp_path), rollout__enable_expert_parallel=True))
    assert "rollout.enable_expert_parallel=true places whole experts on an engine's ranks, but the model has" in problem
    model = {"path": hf_folder(tmp_path / "experts", **EXPERTS), "freeze_router": True}
    experts = config(model=model, rollout__enable_expert_parallel=True)
    assert check_config(experts) == []


def test_padded_experts_in_fp8_are_refused_with_transports_that_would_fill_the_gpu(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, **EXPERTS | {"moe_intermediate_size": 384})

    def found(transport: str = "nccl", quantization: str | None = "fp8_per_block", size: int = 2, **rollout: Any):
        settings = {"quantization": quantization, "tensor_parallel_size": size, **rollout}
        model = {"path": folder, "dtype": "bfloat16"}
        return list(model_problems(config(model=model, rollout=settings, weight_sync__transport=transport)))

    (problem,) = found()
    assert "an engine rank has 192 of an expert's 384 rows" in problem
    assert problem.endswith("set transport=store, or rollout.enable_expert_parallel=true")
    assert found(quantization=None) == found(enable_expert_parallel=True) == found(size=1) == found("store") == []


def test_a_complete_checkpoint_folder_passes(tmp_path: Path) -> None:
    assert check_config(of(hf_folder(tmp_path))) == []
    assert check_config(of(hf_folder(tmp_path, **EXPERTS))) == []


def test_key_value_heads_default_to_the_attention_heads(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, num_key_value_heads=None)
    assert check_config(of(folder, **layout(4, tensor_model_parallel_size=4))) == []


def test_yarn_extends_the_context_length_and_is_named_if_it_is_exceeded(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 45}
    fields = {"max_position_embeddings": 45, "rope_scaling": yarn}
    length = {"data__max_prompt_length": 80, "rollout__max_response_length": 100}
    assert check_config(of(hf_folder(tmp_path, **fields), **length)) == []
    (problem,) = problems(of(hf_folder(tmp_path, **fields), **length | {"data__max_prompt_length": 81}))
    assert "= 181 tokens must not exceed the model's original_max_position_embeddings x factor = 180" in problem


def test_longer_responses_to_held_out_prompts_must_fit_the_models_context_too(tmp_path: Path) -> None:
    length = {
        "data__max_prompt_length": 50,
        "rollout__max_response_length": 100,
        "data__validation": ARITHMETIC | {"seed": 2},
    }
    folder = hf_folder(tmp_path, max_position_embeddings=200)
    assert check_config(of(folder, **length, evaluation__max_response_length=150)) == []
    (problem,) = problems(of(folder, **length, evaluation__max_response_length=151))
    assert "data.max_prompt_length=50 + evaluation.max_response_length=151 = 201 tokens must not exceed" in problem


def test_a_missing_model_folder_is_named_with_what_it_should_hold() -> None:
    (problem,) = problems(of(Path("models/none")))
    assert "model.path=models/none must be an existing folder of a Hugging Face checkpoint" in problem
    assert "config.json, *.safetensors and the tokenizer's files" in problem
    assert problem.endswith(f"relative paths start at {Path.cwd()}")


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("models/Qwen2.5-7B", "hf download Qwen/Qwen2.5-7B --local-dir models/Qwen2.5-7B"),
        ("/data/GLM-4.5-Air", "hf download zai-org/GLM-4.5-Air --local-dir /data/GLM-4.5-Air"),
        ("Qwen/Qwen3-8B", "hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B"),
    ],
)
def test_a_published_model_that_is_not_here_gets_the_command_that_downloads_it(path: str, command: str) -> None:
    (problem,) = problems(of(Path(path)))
    assert f"`{command}`" in problem


@pytest.mark.parametrize(
    ("absent", "expected", "way_out"),
    [
        ("config.json", "has no config.json", "the folder must contain config.json, *.safetensors and"),
        ("model.safetensors", "has no *.safetensors", "convert them"),
        ("tokenizer.json", "has no tokenizer (tokenizer.json, tokenizer.model, vocab.json)", "copy the tokenizer's"),
    ],
)
def test_an_incomplete_checkpoint_names_what_is_missing(
    tmp_path: Path, absent: str, expected: str, way_out: str
) -> None:
    (problem,) = problems(of(hf_folder(tmp_path, absent=(absent,))))
    assert f"model.path={tmp_path} {expected}" in problem
    assert way_out in problem


def test_a_half_downloaded_checkpoint_names_the_first_missing_shard(tmp_path: Path) -> None:
    shards = {"a.weight": "model.safetensors", "b.weight": "two.safetensors", "c.weight": "two.safetensors"}
    folder = hf_folder(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (problem,) = problems(of(folder))
    assert "lacks 1 of the 2 files" in problem
    assert "such as two.safetensors; complete the download" in problem


@pytest.mark.parametrize(
    "content",
    [b"version https://git-lfs.github.com/spec/v1\n", b"", save({"a.weight": np.zeros(8, np.float32)})[:-1]],
    ids=["pointer", "empty", "truncated"],
)
def test_weights_that_are_not_complete_are_named(tmp_path: Path, content: bytes) -> None:
    folder = hf_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    (problem,) = problems(of(folder))
    assert problem.strip().startswith(f"model.path={tmp_path}: 1 of the 1 files of weights cannot be read")
    assert f"such as model.safetensors with {len(content)} bytes; download them again" in problem


def test_unsupported_values_are_refused_with_the_files_name(tmp_path: Path) -> None:
    (problem,) = problems(of(hf_folder(tmp_path, model_type="mixtral")))
    assert (
        f"{tmp_path / 'config.json'}: model_type is 'mixtral', which the trainer does not support; use a "
        "model of the types llama, mistral," in problem
    )
    found = problems(of(hf_folder(tmp_path, hidden_act="gelu", rms_norm_eps=None)))
    assert f"{tmp_path / 'config.json'}: rms_norm_eps is missing" in found[0]
    assert f"{tmp_path / 'config.json'}: hidden_act is 'gelu'" in found[1]


@pytest.mark.parametrize("text", ["{", "", "\xe9", "[" * 200_000, "9" * 5000])
def test_an_invalid_config_json_is_refused(tmp_path: Path, text: str) -> None:
    folder = hf_folder(tmp_path)
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    (problem,) = problems(of(folder))
    assert f"{folder / 'config.json'} must be JSON" in problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"a": "mod', "must be JSON"),
        ("[]", "must be a JSON object, not a list; download or write it again"),
        ("{}", "must map tensors to file names under weight_map; download it again"),
        ('{"weight_map": {"a": 1}}', "must map tensors to file names under weight_map"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, text: str, message: str) -> None:
    folder = hf_folder(tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(text)
    (problem,) = problems(of(folder))
    assert f"{index} {message}" in problem


def test_routing_replay_needs_experts(tmp_path: Path) -> None:
    replay = {"behaviour_policy": "recomputed", "routing_replay": "trainer"}
    dense, experts = hf_folder(tmp_path / "dense"), hf_folder(tmp_path / "experts", **EXPERTS)
    (problem,) = problems(of(dense, algorithm=replay))
    assert "algorithm.routing_replay=trainer replays the choice of experts, but the model has none" in problem
    assert "set it to none" in problem
    check_config(of(experts, algorithm=replay))
    (problem,) = problems(of(experts, algorithm={"routing_replay": "trainer"}))
    assert "algorithm.routing_replay=trainer with algorithm.behaviour_policy=rollout: it replays the routes" in problem
    assert "set behaviour_policy=recomputed, or routing_replay=none" in problem
    rollout = {"n": 8, "max_response_length": 100, "pipeline_parallel_size": 2}
    (problem,) = problems(of(experts, algorithm={"routing_replay": "rollout"}, rollout=rollout))
    assert "algorithm.routing_replay=rollout with rollout.pipeline_parallel_size=2: vLLM returns routes only" in problem
    assert "set pipeline_parallel_size=1, or routing_replay=trainer" in problem
    check_config(of(experts, algorithm={"routing_replay": "rollout"}))


GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            layout(2, tensor_model_parallel_size=2, sequence_parallel=True),
            r"parallel.expert_tensor_parallel_size=2 \(by default .*\) .* set it to 1, and expert_model_parallel_size",
        ),
        (
            {"algorithm": {"routing_replay": "rollout"}},
            "algorithm.routing_replay=rollout with gpt-oss .* set it to none",
        ),
        ({"rollout": {"tensor_parallel_size": 4}}, "num_key_value_heads=2 must be a multiple of rollout.tensor_parall"),
        (
            {"rollout": {"quantization": "fp8_per_block"}},
            "rollout.quantization=fp8_per_block with gpt-oss .* remove it",
        ),
        (
            {"rollout": {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}},
            "intermediate_size=64 must be a multiple of rollout.tensor_parallel_size=2 x pipeline_parallel_size=3",
        ),
    ],
)
def test_what_gpt_oss_cannot_do_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    found = problems(of(hf_folder(tmp_path, **GPT_OSS), **values))
    assert any(re.search(message, problem) for problem in found), found
    etp1 = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    check_config(of(tmp_path, **layout(2, sequence_parallel=True, **etp1)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"lora": {}}}, "model.lora with gpt-oss .* remove the section"),
        ({"fp8": {}}, "fp8 with gpt-oss .* is not supported; remove the section fp8"),
        (
            layout(2, context_parallel_size=2),
            "parallel.cp_comm_type=p2p with gpt-oss .* only a2a has attention sinks; set cp_comm_type=a2a",
        ),
    ],
)
def test_what_gpt_oss_cannot_do_on_gpus_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    fused = {"path": hf_folder(tmp_path, **GPT_OSS), "dtype": "bfloat16", "transformer_impl": "transformer_engine"}
    model = fused | values.get("model", {})
    found = problems(config(**{**values, "model": model}))
    assert any(re.search(message, problem) for problem in found), found
    a2a = layout(2, context_parallel_size=2, cp_comm_type="a2a")
    check_config(config(model=fused, **a2a))
