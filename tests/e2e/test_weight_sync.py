"""Weight updates from trainers of several layouts to real vLLM engines of one and two ranks."""

import asyncio
import json
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    MistralConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
)

from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.errors import RunError
from megatron_bapo.model.weight_layouts import EngineLayout
from megatron_bapo.rollout.engine import Engine, engine_environment
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.route import WeightRoute
from megatron_bapo.weight_sync.transport import WeightStore
from megatron_bapo.weight_sync.version_file import view_of
from tests.e2e.test_engine import save_tokenizer
from tests.parallel.launching import launch
from tests.processes import command_line, is_alive, named_shared_memory
from tests.tolerances import ENGINE_LOG_PROB

SHAPE = {
    "vocab_size": 126,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
MODELS = {
    "dense": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=None, tie_word_embeddings=False),
    "seed_oss": SeedOssConfig(**SHAPE, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(
        **SHAPE, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True, mlp_only_layers=[1],
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **{**SHAPE, "num_attention_heads": 2}, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=64, mlp_only_layers=[1],
    ),
    "glm4_moe": Glm4MoeConfig(
        **SHAPE, attention_bias=True, use_qk_norm=True, n_routed_experts=8, num_experts_per_tok=4,
        moe_intermediate_size=32, n_group=4, topk_group=2, routed_scaling_factor=2.5, num_mtp_layers=0,
    ),
    # vLLM's experts for CPUs need multiples of 32 on each rank.
    "gpt_oss": GptOssConfig(
        **SHAPE | {"intermediate_size": 64}, num_local_experts=4, num_experts_per_tok=2, sliding_window=6,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4,
        },
    ),
    # The only widths that vLLM's attention for CPUs can decode are kv_lora_rank=512 and qk_rope_head_dim=64.
    "deepseek_v3": DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4}, q_lora_rank=24, kv_lora_rank=512, qk_nope_head_dim=32,
        qk_rope_head_dim=64, v_head_dim=32, n_routed_experts=8, num_experts_per_tok=4, moe_intermediate_size=32,
        n_group=4, topk_group=2, first_k_dense_replace=1, num_mtp_layers=0, scoring_func="sigmoid",
        topk_method="noaux_tc", rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "mscale": 0.707, "mscale_all_dim": 1.0,
        },
    ),
    "glm4_moe_lite": Glm4MoeLiteConfig(
        **SHAPE | {"num_key_value_heads": 4, "head_dim": 64}, q_lora_rank=24, kv_lora_rank=512, qk_nope_head_dim=32,
        qk_rope_head_dim=64, v_head_dim=96, n_routed_experts=8, num_experts_per_tok=4, moe_intermediate_size=32,
        first_k_dense_replace=1, num_mtp_layers=0, topk_method="noaux_tc",
    ),
}  # fmt: skip
TRAINERS = {
    "tp2-pp2-uneven": (
        "dense",
        {
            "world_size": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": (3, 1),
        },
    ),
    "pp2-vpp2": (
        "dense",
        {"world_size": 2, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "cp2-overlap": (
        "dense",
        {"world_size": 2, "context_parallel_size": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    "mistral-tp2": ("mistral", {"world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "seed_oss-tp2": ("seed_oss", {"world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "ep2": ("experts", {"world_size": 2, "expert_model_parallel_size": 2}),
    "tp2-ep2-etp1": (
        "experts",
        {
            "world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True,
            "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
        },
    ),
    "qwen2_moe-tp2-ep2": (
        "qwen2_moe",
        {
            "world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True,
            "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
        },
    ),
    "glm4_moe-tp2-ep2": (
        "glm4_moe",
        {
            "world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True,
            "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
        },
    ),
    "gpt_oss-tp2-ep2": (
        "gpt_oss",
        {
            "world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True,
            "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
        },
    ),
    "gpt_oss-pp2": ("gpt_oss", {"world_size": 2, "pipeline_model_parallel_size": 2}),
    "deepseek_v3-tp2-pp2": (
        "deepseek_v3",
        {
            "world_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
        },
    ),
    "glm4_moe_lite-tp2-ep2": (
        "glm4_moe_lite",
        {
            "world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True,
            "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
        },
    ),
}  # fmt: skip
ENGINES = {
    "tp1": {"tensor_parallel_size": 1},
    "tp2": {"tensor_parallel_size": 2},
    "tp2-ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
PUBLISHED_FOR = {
    "dense": ("tp1", "tp2"),
    "mistral": ("tp1", "tp2"),
    "seed_oss": ("tp2", "tp1"),
    "experts": ("tp2", "tp2-ep"),
    "qwen2_moe": ("tp1", "tp2"),
    "glm4_moe": ("tp2", "tp1"),
    "gpt_oss": ("tp2", "tp2-ep"),
    "deepseek_v3": ("tp2", "tp1"),
    "glm4_moe_lite": ("tp1", "tp2"),
}
NUM_SYNCS = 3


def versions_of(trainer: str) -> dict[int, str]:
    """Return the versions that a trainer publishes, and the engine layout of each."""
    model = TRAINERS[trainer][0]
    before = [name for name in TRAINERS if TRAINERS[name][0] == model]
    engines = PUBLISHED_FOR[model]
    first = 1 + before.index(trainer) * NUM_SYNCS * len(engines)
    return {first + i: engines[i % len(engines)] for i in range(NUM_SYNCS * len(engines))}


@dataclass(frozen=True)
class Published:
    """Checkpoints and published weights of all trainers."""

    root: Path
    stores: dict[str, WeightStore]


def add_another_model_in_mistrals_format(folder: Path) -> None:
    """Add the files of Mistral's own format, which Mistral publishes beside Hugging Face's and vLLM prefers."""
    save_file({"norm.weight": torch.ones(3)}, folder / "consolidated.safetensors")
    params = {"dim": 32, "n_layers": 1, "head_dim": 16, "hidden_dim": 48, "n_heads": 2, "n_kv_heads": 2}
    (folder / "params.json").write_text(json.dumps(params | {"vocab_size": 126, "norm_eps": 1e-5}))
    (folder / "tekken.json").write_text("{}")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    root = tmp_path_factory.mktemp("weight-sync")
    with ExitStack() as stack:
        stores = {name: stack.enter_context(closing(WeightStore.create())) for name in MODELS}
        for name, config in MODELS.items():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("e_score_correction_bias"):
                    torch.nn.init.normal_(buffer, std=0.3)
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(("bias", ".sinks")):
                    torch.nn.init.normal_(parameter, std=0.3)
            model.save_pretrained(root / name, max_shard_size="400KB")
            save_tokenizer(root / name)
        add_another_model_in_mistrals_format(root / "mistral")
        cases = [
            {
                "name": name,
                "model": str(root / model),
                "parallel": parallel,
                "store": str(stores[model].folder),
                "engines": [ENGINES[engine] for engine in PUBLISHED_FOR[model]],
                "first_version": min(versions_of(name)),
            }
            for name, (model, parallel) in TRAINERS.items()
        ]
        launch("weight_sync_ranks.py", sorted(cases, key=lambda case: case["first_version"]), root, 4)
        yield Published(root, stores)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_rank_writes_the_plans_bytes(published: Published, trainer: str) -> None:
    model, parallel = TRAINERS[trainer]
    store = published.stores[model]
    for rank in range(parallel["world_size"]):
        written = json.loads((published.root / trainer / f"bytes-{rank}.json").read_text())
        assert {int(version) for version in written} == set(versions_of(trainer))
        for version, num_bytes in written.items():
            plan = store.plan(int(version))
            assert num_bytes == plan.num_bytes(plan.sent_by(rank)) > 0
            assert sum(plan.num_bytes(plan.sent_by(r)) for r in range(parallel["world_size"])) == plan.total_bytes


@contextmanager
def running(
    folder: Path, store: WeightStore, layout: dict[str, Any], dtype: str = "float32"
) -> Iterator[tuple[Engine, Any]]:
    """Start an engine from a checkpoint; yields it and a function that runs its coroutines."""
    settings = RolloutConfig(max_num_seqs=8, kv_cache_gib=0.02, request_timeout_s=60, **layout)
    with pytest.MonkeyPatch.context() as environment, asyncio.Runner() as runner:
        # The last variable lets vLLM's workers run a function of this file.
        for name, value in {**engine_environment(), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}.items():
            environment.setenv(name, value)

        async def waited(work: Awaitable[Any]) -> Any:
            return await work

        def wait_for(work: Awaitable[Any]) -> Any:
            return runner.run(waited(work))

        engine = Engine()
        wait_for(engine.start(EngineSpec(folder, settings, dtype, max_model_len=64), WeightRoute(store.folder)))
        try:
            yield engine, wait_for
        finally:
            wait_for(engine.shutdown())


def worker_parameters(engine: Engine, wait_for: Any) -> list[dict[str, bytes]]:
    """Return the bytes of each parameter of every worker."""
    server: Any = engine._server
    return wait_for(server._llm.collective_rpc(parameter_bytes))


def parameter_bytes(worker: Any) -> dict[str, bytes]:
    """Return the bytes of each parameter of one of vLLM's workers."""
    named = worker.model_runner.get_model().named_parameters()
    return {name: value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, value in named}


def without_the_others_parts(
    tensors: dict[str, torch.Tensor], plan: WeightPlan, reader: int
) -> dict[str, torch.Tensor]:
    """Return the tensors with NaN in all parts that an engine rank does not need."""
    poisoned = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    for number in plan.read_by(reader, host=0):
        for part in plan.buckets[number].slices:
            view_of(poisoned[part.name], part.box).copy_(view_of(tensors[part.name], part.box))
    return poisoned


@pytest.mark.parametrize(
    ("model", "engine_name"),
    [
        ("dense", "tp2"),
        ("dense", "tp1"),
        ("mistral", "tp1"),
        ("seed_oss", "tp2"),
        ("experts", "tp2"),
        ("qwen2_moe", "tp1"),
        ("glm4_moe", "tp2"),
        ("gpt_oss", "tp2"),
        ("deepseek_v3", "tp2"),
        ("glm4_moe_lite", "tp1"),
    ],
)
def test_after_each_sync_the_engine_has_the_trainers_log_probs(
    published: Published, model: str, engine_name: str, record_property: Any
) -> None:
    """Every other version is published for another engine layout, so that this engine loads all of it; the same weights
    must give the same bits. Otherwise a rank reads only the plan's bytes."""
    store = published.stores[model]
    num_ranks = ENGINES[engine_name]["tensor_parallel_size"]
    layout = EngineLayout(num_ranks).name
    with running(published.root / model, store, ENGINES[engine_name]) as (engine, wait_for):
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        assert [path for process in processes if is_alive(process) for path in named_shared_memory(process)] == []
        for trainer in [name for name, (of, _) in TRAINERS.items() if of == model]:
            scores = load_file(published.root / trainer / "scores.safetensors")
            log_probs, worst = {}, 0.0
            for version in versions_of(trainer):
                plan = store.plan(version)
                direct = plan.reader_layout == layout
                num_bytes = wait_for(engine.load_weights(version))
                assert num_bytes == (
                    sum(plan.num_bytes(plan.read_by(rank, 0)) for rank in range(num_ranks))
                    if direct
                    else num_ranks * plan.total_bytes
                )
                score = wait_for(engine.score(scores["sequence"].numpy()))
                assert score.policy_version == version
                difference = np.abs(score.log_probs - scores[str(version)].numpy()).max()
                worst = max(worst, float(difference))
                assert difference < ENGINE_LOG_PROB
                log_probs[version] = score.log_probs
            record_property("weight_sync", (trainer, engine_name, worst))
            first, *_, last = log_probs
            for version in range(first, last, 2):  # the same weights by two plans
                np.testing.assert_array_equal(log_probs[version], log_probs[version + 1])
            assert np.abs(log_probs[first] - log_probs[last]).max() > 100 * ENGINE_LOG_PROB, "training changed nothing"
        if num_ranks == 2:
            check_that_ranks_read_only_their_parts(store, engine, wait_for, layout)
            _check_a_worker_killed_while_it_loads(store, engine, wait_for)


def check_that_ranks_read_only_their_parts(store: WeightStore, engine: Engine, wait_for: Any, layout: str) -> None:
    newest = store.versions()[-1]
    plan = next(p for p in map(store.plan, store.versions()) if p.reader_layout == layout)
    tensors = {key: value.clone() for key, value in store.read(newest)}

    def load(version: int, content: dict[str, torch.Tensor]) -> None:
        for rank in range(len(plan.sender_hosts)):
            store.write(version, plan, rank, lambda part: view_of(content[part.name], part.box))
        store.commit(version, plan)
        wait_for(engine.load_weights(version))

    first = newest + 1
    load(first, tensors)
    expected = worker_parameters(engine, wait_for)
    for reader in (0, 1):
        load(first + 1 + reader, without_the_others_parts(tensors, plan, reader))
        loaded = worker_parameters(engine, wait_for)
        assert loaded[reader] == expected[reader]
        assert loaded[1 - reader] != expected[1 - reader]


def _check_a_worker_killed_while_it_loads(store: WeightStore, engine: Engine, wait_for: Any) -> None:
    """The rest of the engine must not serve weights that may be a mixture."""
    newest = store.versions()[-1]
    plan, tensors = store.plan(newest), dict(store.read(newest))
    for rank in range(len(plan.sender_hosts)):
        store.write(newest + 1, plan, rank, lambda part: view_of(tensors[part.name], part.box))
    store.commit(newest + 1, plan)
    server: Any = engine._server
    load = server.load

    async def killed(version: int) -> None:
        loading = asyncio.ensure_future(load(version))
        await asyncio.sleep(0)
        workers = [p for p in psutil.Process().children(recursive=True) if "Worker" in " ".join(command_line(p))]
        workers[-1].kill()
        await loading

    server.load = killed
    with pytest.raises(RunError, match=r"was not loaded, the engine stops serving|did not load"):
        wait_for(engine.load_weights(newest + 1))
    with pytest.raises(RunError, match="no known weights"):
        wait_for(engine.score(np.arange(1, 9, dtype=np.int32)))
