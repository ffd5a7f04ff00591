"""Weight updates of real vLLM engines that serve a model with Gated DeltaNets.

On CPUs, vLLM's kernels need bfloat16, heads of width 64 or 128 and a convolution over 4 tokens.
"""

import copy
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.errors import UserError
from megatron_bapo.model.hf_create import byte_tokenizer
from megatron_bapo.model.weight_layouts import EngineLayout
from megatron_bapo.rollout.engine import Engine
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.weight_sync.transport import WeightStore
from megatron_bapo.weight_sync.version_file import view_of
from tests.e2e.test_engine import arguments_on_a_gpu, save_tokenizer
from tests.e2e.test_training import finish, start, train_rows
from tests.e2e.test_weight_sync import (
    SHAPE,
    check_that_ranks_read_only_their_parts,
    running,
    worker_parameters,
)
from tests.parallel.launching import launch
from tests.tolerances import BF16_ENGINE_LOG_PROB

# Each token passes all experts, because bfloat16 would route a few to other ones than the trainer.
MODEL = Qwen3NextConfig(
    **SHAPE, tie_word_embeddings=False, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=64,
    shared_expert_intermediate_size=64, mlp_only_layers=[1], layer_types=["linear_attention", "full_attention"] * 2,
    linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
    linear_conv_kernel_dim=4,
)  # fmt: skip
TRAINERS: dict[str, dict[str, Any]] = {
    "tp2": {"world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"world_size": 2, "pipeline_model_parallel_size": 2},
}
ENGINES: dict[str, dict[str, Any]] = {"tp2": {"tensor_parallel_size": 2}, "pp2": {"pipeline_parallel_size": 2}}
NUM_SYNCS = 3


def versions_of(trainer: str) -> dict[int, str]:
    """Return the versions that a trainer publishes, and the engine layout of each."""
    num = NUM_SYNCS * len(ENGINES)
    first = 1 + list(TRAINERS).index(trainer) * num
    return {first + i: list(ENGINES)[i % len(ENGINES)] for i in range(num)}


@dataclass(frozen=True)
class Published:
    """A checkpoint and the weights that all trainers have published."""

    root: Path
    store: WeightStore

    @property
    def checkpoint(self) -> Path:
        return self.root / "model"

    def folder_of(self, version: int) -> Path:
        """Write a checkpoint of a version."""
        folder = self.root / f"version-{version}"
        shutil.copytree(self.checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file({name: tensor.clone() for name, tensor in self.store.read(version)}, folder / "model.safetensors")
        return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    root = tmp_path_factory.mktemp("linear-attention")
    with closing(WeightStore.create()) as store:
        found = Published(root, store)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(MODEL, dtype=torch.bfloat16)
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias", "norm.weight", "layernorm.weight")):
                parameter.data += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(found.checkpoint)
        save_tokenizer(found.checkpoint)
        cases = [
            {
                "name": name,
                "model": str(found.checkpoint),
                "parallel": parallel,
                "store": str(store.folder),
                "engines": list(ENGINES.values()),
                "first_version": min(versions_of(name)),
                "dtype": "bfloat16",
            }
            for name, parallel in TRAINERS.items()
        ]
        launch("weight_sync_ranks.py", cases, root, 2)
        yield found


def products(worker: Any) -> dict[str, bytes]:
    """Return what the linear layers of one of vLLM's workers compute: on CPUs they have packed weights only."""
    found: dict[str, bytes] = {}
    for name, layer in worker.model_runner.get_model().named_modules():
        if hasattr(layer, "cpu_linear") and hasattr(layer, "input_size_per_partition"):
            x = torch.randn(3, layer.input_size_per_partition, generator=torch.Generator().manual_seed(0))
            found[name] = layer.cpu_linear(x.bfloat16(), layer.weight, None).view(torch.uint8).numpy().tobytes()
    return found


def state(engine: Engine, wait_for: Any) -> list[dict[str, bytes]]:
    """Return the parameters of every worker that have elements, and the products of its linear layers."""
    server: Any = engine._server
    parameters, computed = worker_parameters(engine, wait_for), wait_for(server._llm.collective_rpc(products))
    return [
        {name: value for name, value in {**own, **others}.items() if value}
        for own, others in zip(parameters, computed, strict=True)
    ]


def differences(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in found if found[name] != expected[name]]


def publish_noise(published: Published, engine_layout: str) -> int:
    """Publish a version for an engine of this layout that differs from all others in every tensor."""
    store, generator = published.store, torch.Generator().manual_seed(len(engine_layout))
    name = EngineLayout.of(RolloutConfig(**ENGINES[engine_layout])).name
    plan = next(p for p in map(store.plan, store.versions()) if p.reader_layout == name)
    newest = store.versions()[-1]
    tensors = {
        key: tensor + 0.1 * torch.randn(tensor.shape, generator=generator).bfloat16()
        for key, tensor in store.read(newest)
    }
    for rank in range(plan.num_senders):
        store.write(newest + 1, plan, rank, lambda part: view_of(tensors[part.name], part.box))
    store.commit(newest + 1, plan)
    return newest + 1


def test_an_updated_engine_is_one_that_has_started_with_the_weights(published: Published, record_property: Any) -> None:
    """Every other version is published for another engine layout, so that this engine loads all of it."""
    store, layout = published.store, EngineLayout.of(RolloutConfig(**ENGINES["tp2"])).name
    log_probs: dict[int, np.ndarray] = {}
    with running(published.checkpoint, store, ENGINES["tp2"], "bfloat16") as (engine, wait_for):
        _check_cache_size(engine)
        for trainer in TRAINERS:
            scores, worst = load_file(published.root / trainer / "scores.safetensors"), 0.0
            sequence = scores["sequence"].numpy()
            for version in versions_of(trainer):
                wait_for(engine.load_weights(version))
                log_probs[version] = wait_for(engine.score(sequence)).log_probs
                difference = np.abs(log_probs[version] - scores[str(version)].numpy()).max()
                worst = max(worst, float(difference))
            record_property("weight_sync", (trainer, worst))
            assert worst < BF16_ENGINE_LOG_PROB
            first, *_, last = versions_of(trainer)
            for version in range(first, last, 2):  # the same weights by two plans
                np.testing.assert_array_equal(log_probs[version], log_probs[version + 1])
            changed = np.abs(log_probs[first] - log_probs[last]).max()
            record_property("weight_sync_change", (trainer, float(changed)))
            assert changed > 2 * BF16_ENGINE_LOG_PROB, "training changed nothing"
        before = state(engine, wait_for)
        version = publish_noise(published, "tp2")
        wait_for(engine.load_weights(version))
        after, log_prob = state(engine, wait_for), wait_for(engine.score(sequence)).log_probs
        for updated, others in zip(after, before, strict=True):
            assert differences(updated, others) == list(updated), "the update left something as it was"
        folder = published.folder_of(version)
        check_that_ranks_read_only_their_parts(store, engine, wait_for, layout)
    with running(folder, store, ENGINES["tp2"], "bfloat16") as (engine, wait_for):
        assert [differences(*pair) for pair in zip(after, state(engine, wait_for), strict=True)] == [[], []]
        np.testing.assert_array_equal(log_prob, wait_for(engine.score(sequence)).log_probs)


def _check_cache_size(engine: Engine) -> None:
    """The two kinds of layers share the blocks of the cache; one takes a block for each request."""
    server: Any = engine._server
    cache = server._llm.vllm_config.cache_config
    assert cache.block_size >= 64, "a request of 64 tokens takes two blocks"
    assert server.kv_cache_tokens == cache.num_gpu_blocks // 2 * 64


def test_the_stages_of_an_updated_engine_have_the_weights(published: Published) -> None:
    """Nothing is served: on CPUs, vLLM 0.32.0 fails at the first request to an engine with two stages."""
    version = publish_noise(published, "pp2")
    with running(published.checkpoint, published.store, ENGINES["pp2"], "bfloat16") as (engine, wait_for):
        wait_for(engine.load_weights(version))
        after = state(engine, wait_for)
    with running(published.folder_of(version), published.store, ENGINES["pp2"], "bfloat16") as (engine, wait_for):
        first_stage, last_stage = map(differences, after, state(engine, wait_for))
    # vLLM has both layers on both stages (qwen3_next.py), and computes with neither of these.
    assert {*first_stage} <= {"lm_head", "lm_head.weight"}
    assert {*last_stage} <= {"model.embed_tokens", "model.embed_tokens.weight"}


def test_an_engine_on_a_cpu_refuses_a_dtype_in_which_vllm_has_no_kernels(published: Published) -> None:
    with (
        pytest.raises(UserError, match=r"model.dtype=float32 with Gated DeltaNets .* set model.dtype=bfloat16"),
        running(published.checkpoint, published.store, {}, "float32"),
    ):
        pass


def test_engines_keep_states_in_float32_and_cache_no_prefixes(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU vLLM would take the model's dtype for the states."""
    spec = EngineSpec(published.checkpoint, RolloutConfig(), "bfloat16", 64)
    arguments = arguments_on_a_gpu(spec, monkeypatch)
    assert arguments.mamba_ssm_cache_dtype == "float32"
    assert arguments.enable_prefix_caching is False


def test_a_whole_run_serves_what_it_has_trained(tmp_path: Path) -> None:
    """Aborted requests continue under the next policy: an engine computes the states of their tokens again."""
    tokenizer, config = byte_tokenizer(["1", "2"]), copy.deepcopy(MODEL)
    config.vocab_size, config.eos_token_id = len(tokenizer), tokenizer.eos_token_id
    config.max_position_embeddings, config.initializer_range = 128, 0.05
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    process = start(
        tmp_path / "run",
        *("model.create=null", f"model.path={tmp_path / 'model'}", "model.dtype=bfloat16"),
        *("trainer.total_steps=3", "warm_start.num_steps=2", "data.validation=null", "trainer.max_tokens_per_gpu=256"),
        *("data.max_prompt_length=80", "rollout.max_response_length=16", "rollout.tensor_parallel_size=2"),
        *("rollout.mode=async", "rollout.on_weight_update=abort_and_resume", "rollout.max_num_seqs=6"),
    )
    code, output, errors = finish(process)
    assert code == 0, output + errors
    rows = train_rows(tmp_path / "run")
    assert len(rows) == 3
    assert all(0 < row["weight_sync/probe_diff_max"] < BF16_ENGINE_LOG_PROB for row in rows)
    assert rows[0]["training/rollout_probs_diff_max"] < BF16_ENGINE_LOG_PROB
