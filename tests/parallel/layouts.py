"""The layouts and models of the matrix."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
)

_SHAPE = {
    "vocab_size": 126,  # not a multiple of 4, so the last rank of TP4 has padding
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_EXPERTS = {
    "head_dim": 16,
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_MOE = _EXPERTS | {"norm_topk_prob": True}
_LATENT = {
    **_SHAPE,
    "num_key_value_heads": 4,
    "hidden_size": 48,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_mtp_layers": 0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_DELTA_NET = {
    "head_dim": 16,
    "rms_norm_eps": 1e-2,  # outputs near zero, whose norm would amplify rounding, stay small
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
MODELS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_SHAPE, tie_word_embeddings=False, rope_parameters=_YARN),
    "llama": LlamaConfig(**{**_SHAPE, "num_key_value_heads": 4}, tie_word_embeddings=True, rope_parameters=_LLAMA3),
    "mistral": MistralConfig(**_SHAPE, head_dim=16, sliding_window=None, tie_word_embeddings=False),
    "seed_oss": SeedOssConfig(**_SHAPE, head_dim=16, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**_SHAPE, **_MOE, mlp_only_layers=[1]),
    "qwen2_moe": Qwen2MoeConfig(
        **_SHAPE,
        **_MOE | {"norm_topk_prob": False, "shared_expert_intermediate_size": 24},
        mlp_only_layers=[1],
    ),
    "glm4_moe": Glm4MoeConfig(
        **{**_SHAPE, "hidden_size": 48, "num_hidden_layers": 4},
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=8,
        num_experts_per_tok=4,
        moe_intermediate_size=16,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        num_mtp_layers=0,
    ),
    "deepseek_v3": DeepseekV3Config(
        **_LATENT, q_lora_rank=16, rope_parameters=_YARN | {"mscale": 0.707, "mscale_all_dim": 1.0}
    ),
    "moonlight": DeepseekV3Config(**_LATENT | {"n_group": 1, "topk_group": 1}, q_lora_rank=None),
    "glm4_moe_lite": Glm4MoeLiteConfig(
        **_LATENT | {"n_group": 1, "topk_group": 1, "v_head_dim": 12, "routed_scaling_factor": 1.8},
        q_lora_rank=16,
        rms_norm_eps=1e-6,  # as transformers' norms within latent attention have, whatever this says
    ),
    "gpt_oss": GptOssConfig(
        **_SHAPE,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        rope_parameters=_YARN
        | {"rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "factor": 32.0}
        | {"original_max_position_embeddings": 4},
    ),
    "qwen3_next": Qwen3NextConfig(
        **_SHAPE | _MOE | _DELTA_NET, shared_expert_intermediate_size=24, mlp_only_layers=[1]
    ),
    "qwen3_5_text": Qwen3_5TextConfig(**_SHAPE | _DELTA_NET, tie_word_embeddings=True),
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig(**_SHAPE | _EXPERTS | _DELTA_NET, shared_expert_intermediate_size=24),
    "qwen3-61-layers": Qwen3Config(**{**_SHAPE, "num_hidden_layers": 61}, head_dim=16, tie_word_embeddings=True),
    "qwen3_moe-94-layers": Qwen3MoeConfig(**{**_SHAPE, "num_hidden_layers": 94}, **_MOE),
}
TEACHER = Qwen3MoeConfig(
    **{**_SHAPE, "vocab_size": 130, "num_hidden_layers": 5, "hidden_size": 48, "num_attention_heads": 8}, **_MOE
)
"""A teacher of another family and size than its students, with more rows in its output layer."""
FOUNDATIONS = ("qwen3", "qwen2", "llama", "qwen3_moe")
"""Models of every layout that can split them."""
PLAIN = ("mistral", "seed_oss", "glm4_moe_lite")
"""Models that every layout treats as it treats another one, in a few layouts."""
SHARED = ("qwen2_moe", "glm4_moe")
"""Models with an expert that every token passes, in the layouts that treat it in a way of their own."""
LATENT = ("deepseek_v3",)
"""Models with latent attention, in the layouts that treat it in a way of their own."""
WINDOWS = ("gpt_oss",)
"""Models with attention sinks, windows in every second layer and biases of experts, which ranks do not split."""
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Models whose layers are mostly a Gated DeltaNet; the last two differ in their experts only."""
WHOLE_QUERIES = "moonlight"
"""A model with latent attention whose queries are not compressed, as Moonlight's."""
SMALL = (*FOUNDATIONS, *SHARED)
DEEP_DENSE, DEEP_MOE = "qwen3-61-layers", "qwen3_moe-94-layers"
"""Models with the number of layers of DeepSeek-V3 and Kimi K2, and of Qwen3-235B-A22B."""


@dataclass(frozen=True)
class Layout:
    """A mesh of `world_size` ranks and its run settings."""

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    layers: str | tuple[int | None, ...] | None = None
    """Layers of the pipeline stages."""
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False
    """Overlap of gradient sums and, with the distributed optimizer, of parameter gathers."""
    recompute: str | None = None
    recompute_modules: tuple[str, ...] = ("core_attn",)
    dtype: str = "float32"
    models: tuple[str, ...] = FOUNDATIONS
    resume_from: str | None = None
    """Layout whose checkpoint this one resumes from; it precedes this one in the table."""

    @property
    def parallel(self) -> dict:
        """The configuration's `parallel` section."""
        return {
            "world_size": self.world_size,
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "pipeline_model_parallel_layout": self.layers,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            # Under tensor parallelism, Megatron trains experts only with sequence parallelism.
            "sequence_parallel": self.sp,
            "use_distributed_optimizer": self.distributed_optimizer,
            "overlap_grad_reduce": self.overlap,
            "overlap_param_gather": self.overlap and self.distributed_optimizer,
            "recompute_granularity": self.recompute,
            "recompute_modules": self.recompute_modules,
        }


_DENSE = ("qwen3", "qwen2", "llama")
_MOE = ("qwen3_moe",)
_ALL_MOE = (*_MOE, *SHARED)
_BF16 = ("qwen3", "qwen3_moe")

LAYOUTS = {
    "one-process": Layout(1, models=tuple(MODELS)),
    "one-process-distopt": Layout(1, distributed_optimizer=True),
    "tp2": Layout(2, tp=2, models=(*_DENSE, "qwen3_5_text")),
    "tp2-sp": Layout(2, tp=2, sp=True, models=(*SMALL, *PLAIN, *LATENT, WHOLE_QUERIES, *DELTA_NETS)),
    "tp2-sp-ep2-etp1": Layout(2, tp=2, sp=True, ep=2, etp=1, models=WINDOWS),
    "pp2": Layout(2, pp=2, resume_from="tp2-sp", models=(*SMALL, *PLAIN, *LATENT, *DELTA_NETS[:2])),
    "pp2-after-ep2": Layout(2, pp=2, resume_from="tp2-sp-ep2-etp1", models=WINDOWS),
    "pp2-uneven": Layout(2, pp=2, layers=(3, 1), distributed_optimizer=True, resume_from="pp2"),
    "pp2-vpp2": Layout(2, pp=2, vpp=2, resume_from="pp2"),
    "pp2-vpp2-uneven": Layout(2, pp=2, vpp=2, layers=(16, 15, 16, 14), models=(DEEP_DENSE,), recompute="full"),
    "cp2": Layout(2, cp=2, resume_from="pp2-vpp2"),
    "dp2": Layout(2, recompute="full", models=(*SMALL, *WINDOWS)),
    "dp2-distopt": Layout(2, distributed_optimizer=True),
    "dp2-distopt-overlap": Layout(2, distributed_optimizer=True, overlap=True, resume_from="cp2"),
    "cp2-selective": Layout(2, cp=2, recompute="selective", overlap=True, resume_from="dp2-distopt"),
    "cp2-recurrence": Layout(2, cp=2, recompute="selective", models=("qwen3_5_text",), resume_from="pp2"),
    "ep2": Layout(2, ep=2, models=_ALL_MOE, resume_from="pp2"),
    "cp2-ep2": Layout(2, cp=2, ep=2, models=(*_ALL_MOE, *LATENT, *WINDOWS, DELTA_NETS[0])),
    # More ranks than key/value heads, except for llama.
    "tp4-sp": Layout(4, tp=4, sp=True, models=(*SMALL, *LATENT, *DELTA_NETS[:2])),
    "pp4": Layout(4, pp=4),
    "pp4-auto": Layout(4, pp=4, layers="auto", models=(DEEP_DENSE,), resume_from="one-process"),
    "pp4-vpp2-auto": Layout(4, pp=4, vpp=2, layers="auto", models=(DEEP_DENSE,), resume_from="pp4-auto"),
    "ep2-pp2-vpp2-uneven": Layout(4, ep=2, pp=2, vpp=2, layers=(48, 46), models=(DEEP_MOE,), overlap=True),
    "cp4": Layout(4, cp=4),
    "dp4-distopt": Layout(4, distributed_optimizer=True),
    "tp2-pp2": Layout(4, tp=2, pp=2, models=_DENSE),
    "tp2-sp-pp2": Layout(4, tp=2, sp=True, pp=2, distributed_optimizer=True),
    "tp2-sp-cp2": Layout(4, tp=2, sp=True, cp=2, distributed_optimizer=True, overlap=True),
    "tp2-cp2": Layout(4, tp=2, cp=2, models=(*_DENSE, "qwen3_5_text"), recompute="full"),
    "tp2-sp-dp2": Layout(4, tp=2, sp=True, distributed_optimizer=True, overlap=True),
    "pp2-cp2": Layout(4, pp=2, cp=2, distributed_optimizer=True),
    "pp2-dp2": Layout(
        4, pp=2, recompute="selective", recompute_modules=("mlp", "moe"), resume_from="tp2-sp-pp2"
    ),
    "pp2-vpp2-cp2": Layout(4, pp=2, vpp=2, cp=2),
    "pp2-vpp2-dp2": Layout(4, pp=2, vpp=2, distributed_optimizer=True, overlap=True, resume_from="pp4"),
    "cp2-dp2": Layout(4, cp=2, distributed_optimizer=True, overlap=True),
    "tp2-sp-ep2": Layout(4, tp=2, sp=True, ep=2, models=_ALL_MOE, distributed_optimizer=True),
    "tp2-sp-ep4-etp1": Layout(4, tp=2, sp=True, ep=4, etp=1, models=(*_ALL_MOE, *WINDOWS)),
    "ep2-pp2": Layout(4, ep=2, pp=2, models=_MOE, distributed_optimizer=True, overlap=True),
    "ep2-pp2-vpp2": Layout(4, ep=2, pp=2, vpp=2, models=_ALL_MOE, resume_from="tp2-sp-ep2"),
    "ep2-dp4": Layout(4, ep=2, models=_MOE, distributed_optimizer=True),
    "tp2-sp-pp2-cp2": Layout(8, tp=2, sp=True, pp=2, cp=2, distributed_optimizer=True, resume_from="tp2-sp-dp2"),
    "tp2-pp2-dp2": Layout(8, tp=2, pp=2, models=_DENSE, distributed_optimizer=True, overlap=True),
    "tp2-sp-pp2-vpp2-cp2": Layout(8, tp=2, sp=True, pp=2, vpp=2, cp=2, recompute="selective"),
    "tp2-sp-ep2-pp2": Layout(8, tp=2, sp=True, ep=2, pp=2, models=_MOE, distributed_optimizer=True),
    "tp2-sp-ep2-etp1-cp2-pp2-vpp2": Layout(
        8, tp=2, sp=True, ep=2, etp=1, cp=2, pp=2, vpp=2, models=(*_ALL_MOE, *LATENT, *WINDOWS, DELTA_NETS[0])
    ),
    "pp8-auto": Layout(8, pp=8, layers="auto", models=(DEEP_MOE,), resume_from="ep2-pp2-vpp2-uneven"),
    "one-process-bf16": Layout(1, dtype="bfloat16", models=(*_BF16, "glm4_moe", "qwen3_next")),
    "tp2-sp-bf16": Layout(2, tp=2, sp=True, dtype="bfloat16", models=(*_BF16, "glm4_moe", "qwen3_next")),
    "dp2-distopt-bf16": Layout(2, distributed_optimizer=True, overlap=True, dtype="bfloat16", models=_BF16),
    "pp2-vpp2-cp2-bf16": Layout(4, pp=2, vpp=2, cp=2, dtype="bfloat16", models=_BF16),
}  # fmt: skip
CASES = [(model, name) for name, layout in LAYOUTS.items() for model in layout.models]
