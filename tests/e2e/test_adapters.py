"""A real vLLM engine serves low-rank adapters, which it receives apart from the weights that they adapt."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3Config

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.errors import RunError
from megatron_bapo.model.hf_mapping import expected_shapes
from megatron_bapo.model.lora_mapping import PEFT_PREFIX, adapter_table
from megatron_bapo.model.weight_layouts import EngineLayout, many_hosts, one_host, weight_plan
from megatron_bapo.parallel.platform import share_storage
from megatron_bapo.rollout.engine import Engine, engine_environment
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.rollout.messages import GenerationRequest
from megatron_bapo.weight_sync.plan import Slice, WeightPlan
from megatron_bapo.weight_sync.route import WeightRoute
from megatron_bapo.weight_sync.shared_parameters import offer_parameters
from megatron_bapo.weight_sync.transport import WeightStore
from megatron_bapo.weight_sync.version_file import view_of
from tests.e2e.test_engine import save_tokenizer
from tests.parallel.launching import PEFT_SITE
from tests.tolerances import BF16_ENGINE_LOG_PROB, ENGINE_LOG_PROB

SHAPE = {
    "vocab_size": 126,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
DENSE = Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)
BIASED = Qwen2Config(**{**SHAPE, "num_attention_heads": 2, "num_key_value_heads": 1}, tie_word_embeddings=False)
EVERYWHERE = LoraConfig(rank=5, alpha=7.0)
"""A rank that vLLM rounds up, and a scale that is no power of two."""
ATTENTION = LoraConfig(rank=8, alpha=8.0, target_modules=("q_proj", "v_proj", "o_proj"))
SEQUENCE = np.arange(1, 41, dtype=np.int32)
"""It fills a block of the engine's prefix cache."""
TRAINER = ParallelConfig(world_size=4, tensor_model_parallel_size=2)


@dataclass(frozen=True)
class Policy:
    """A checkpoint with random adapters, and PEFT's model of both."""

    folder: Path
    lora: LoraConfig
    peft: Any
    dtype: str = "float32"
    """Data type of the engine, whose rounding the reference does not have."""

    @property
    def tolerance(self) -> float:
        return ENGINE_LOG_PROB if self.dtype == "float32" else BF16_ENGINE_LOG_PROB

    def adapters(self, seed: int) -> dict[str, torch.Tensor]:
        """Return the adapters of a version by name, of which both halves matter."""
        generator = torch.Generator().manual_seed(seed)
        shapes = expected_shapes(read_architecture(self.folder), adapter_table(self.lora))
        dtype = getattr(torch, self.dtype)
        return {name: (0.3 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}

    def log_probs(self, tokens: np.ndarray, adapters: dict[str, torch.Tensor] | None) -> np.ndarray:
        """Return PEFT's log-probs [S - 1] of a sequence [S], or without adapters those of the base model."""
        model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        if adapters is not None:
            lora = self.lora
            wanted = self.peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=[*lora.target_modules])
            model = self.peft.get_peft_model(model, wanted)
            names = {f"{PEFT_PREFIX}{name}": tensor.float() for name, tensor in adapters.items()}
            assert not self.peft.set_peft_model_state_dict(model, names).unexpected_keys
        tokens_S = torch.from_numpy(tokens).long()
        with torch.no_grad():
            logits = model(tokens_S[None]).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, tokens_S[1:, None])[:, 0].numpy()

    def plan(self, tensor_parallel_size: int, *, colocated: bool = False) -> WeightPlan:
        engine = EngineLayout(tensor_parallel_size)
        hosts = many_hosts(TRAINER, engine, 1, 1, colocated=True) if colocated else one_host(TRAINER, engine)
        arch = read_architecture(self.folder)
        return weight_plan(arch, TRAINER, engine, hosts, dtype=self.dtype, bucket_bytes=4096, lora=self.lora)

    def publish(self, store: WeightStore, version: int, plan: WeightPlan, tensors: dict[str, torch.Tensor]) -> None:
        for rank in range(TRAINER.world_size):
            store.write(version, plan, rank, lambda part: view_of(tensors[part.name], part.box))
        store.commit(version, plan)


@pytest.fixture(scope="module")
def peft() -> Any:
    """Return the module `peft`, which is installed apart from the locked environment."""
    assert (PEFT_SITE / ".complete").is_file(), f"{PEFT_SITE} does not exist; `make test` creates it"
    sys.path.append(str(PEFT_SITE))
    import peft

    return peft


def make_policy(folder: Path, model: PreTrainedConfig, lora: LoraConfig, peft: Any) -> Policy:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(model).save_pretrained(folder)
    save_tokenizer(folder)
    return Policy(folder, lora, peft)


@dataclass(frozen=True)
class Running:
    """An engine, and a function that runs its coroutines."""

    engine: Engine
    wait_for: Callable[[Awaitable[Any]], Any]

    def load(self, version: int) -> int:
        return self.wait_for(self.engine.load_weights(version))

    def assert_serves(self, policy: Policy, version: int, adapters: dict[str, torch.Tensor] | None) -> np.ndarray:
        """Check scored, decoded and sampled log-probs, and return those of the sequence."""
        score = self.wait_for(self.engine.score(SEQUENCE, 4))
        assert score.policy_version == version
        assert np.abs(score.log_probs - policy.log_probs(SEQUENCE, adapters)).max() < policy.tolerance
        assert np.abs(score.decoded_log_probs - score.rescored_log_probs).max() < policy.tolerance
        request = GenerationRequest(f"of {version}", (SEQUENCE,), 2, 1.0, 1.0, -1, min_p=0.0, max_tokens=8, seed=3)
        for completion in self.wait_for(self.engine.generate(request)).completions:
            sequence = np.concatenate([SEQUENCE, completion.token_ids])
            expected = policy.log_probs(sequence, adapters)[len(SEQUENCE) - 1 :]
            assert np.abs(completion.log_probs - expected).max() < policy.tolerance
        return score.log_probs


@contextmanager
def running(policy: Policy, route: WeightRoute, tensor_parallel_size: int) -> Iterator[Running]:
    size = {"tensor_parallel_size": tensor_parallel_size}
    settings = RolloutConfig(max_num_seqs=8, kv_cache_gib=0.02, request_timeout_s=60, **size)
    with pytest.MonkeyPatch.context() as environment, asyncio.Runner() as runner:
        # The last variable lets vLLM's workers run a function of this file.
        for name, value in {**engine_environment(), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}.items():
            environment.setenv(name, value)

        async def waited(work: Awaitable[Any]) -> Any:
            return await work

        def wait_for(work: Awaitable[Any]) -> Any:
            return runner.run(waited(work))

        engine = Engine()
        spec = EngineSpec(policy.folder, settings, policy.dtype, max_model_len=64, adapters=policy.lora)
        wait_for(engine.start(spec, route))
        try:
            yield Running(engine, wait_for)
        finally:
            wait_for(engine.shutdown())


def test_an_engine_serves_the_base_model_and_then_the_adapters_of_every_version(tmp_path: Path, peft: Any) -> None:
    policy = make_policy(tmp_path / "model", DENSE, EVERYWHERE, peft)
    with closing(WeightStore.create()) as store, running(policy, WeightRoute(store.folder), 1) as engine:
        served, plan = [engine.assert_serves(policy, 0, None)], policy.plan(1)
        for version in (1, 2, 3):
            policy.publish(store, version, plan, policy.adapters(version))
            assert engine.load(version) == plan.total_bytes
            served.append(engine.assert_serves(policy, version, policy.adapters(version)))
        for earlier, later in pairwise(served):
            assert np.abs(earlier - later).max() > 1000 * ENGINE_LOG_PROB
        _check_that_incomplete_versions_are_refused(policy, store, engine)


def _check_that_incomplete_versions_are_refused(policy: Policy, store: WeightStore, engine: Running) -> None:
    name = "model.layers.1.mlp.down_proj.lora_B.weight"
    incomplete = policy.plan(1)
    shapes = {key: shape for key, shape in incomplete.shapes.items() if key != name}
    buckets = tuple(
        replace(bucket, slices=tuple(part for part in bucket.slices if part.name != name))
        for bucket in incomplete.buckets
    )
    policy.publish(store, 4, replace(incomplete, shapes=shapes, buckets=buckets), policy.adapters(4))
    with pytest.raises(RunError, match=f"policy version 4 lacks tensor {name}"):
        engine.load(4)
    lower = replace(policy, lora=replace_rank(policy.lora, 4))
    lower.publish(store, 5, lower.plan(1), lower.adapters(5))
    with pytest.raises(RunError, match=r"policy version 5 has .*lora_A.weight as \(4, 64\), the model as \(5, 64\)"):
        engine.load(5)
    engine.assert_serves(policy, 3, policy.adapters(3))


def replace_rank(lora: LoraConfig, rank: int) -> LoraConfig:
    return lora.model_copy(update={"rank": rank})


def adapter_bytes(worker: Any) -> dict[str, bytes]:
    """Return the bytes of every half of an adapter in one of vLLM's workers."""
    modules = worker.model_runner.lora_manager._adapter_manager.modules
    halves = {name: (*module.lora_a_stacked, *module.lora_b_stacked) for name, module in modules.items()}
    return {
        f"{name} {index}": half.contiguous().numpy().tobytes()
        for name, tensors in halves.items()
        for index, half in enumerate(tensors)
    }


def test_each_rank_of_an_engine_loads_its_part_of_the_newest_adapters(tmp_path: Path, peft: Any) -> None:
    """This engine starts when the store has a version, like one that replaces a lost engine."""
    policy = make_policy(tmp_path / "model", BIASED, EVERYWHERE, peft)
    with closing(WeightStore.create()) as store:
        plan = policy.plan(2)
        policy.publish(store, 7, plan, policy.adapters(7))
        with running(policy, WeightRoute(store.folder), 2) as engine:
            engine.assert_serves(policy, 0, None)
            assert engine.load(7) == sum(plan.num_bytes(plan.read_by(rank, 0)) for rank in (0, 1))
            engine.assert_serves(policy, 7, policy.adapters(7))
            server: Any = engine.engine._server

            def of_workers() -> list[dict[str, bytes]]:
                return engine.wait_for(server._llm.collective_rpc(adapter_bytes))

            expected = of_workers()
            for reader in (0, 1):
                poisoned = {name: torch.full_like(tensor, torch.nan) for name, tensor in policy.adapters(7).items()}
                for number in plan.read_by(reader, host=0):
                    for part in plan.buckets[number].slices:
                        view_of(poisoned[part.name], part.box).copy_(view_of(policy.adapters(7)[part.name], part.box))
                policy.publish(store, 8 + reader, plan, poisoned)
                engine.load(8 + reader)
                assert of_workers()[reader] == expected[reader]
                assert of_workers()[1 - reader] != expected[1 - reader]
            _check_that_adapters_are_read_in_place(policy, engine, tmp_path)


def _check_that_adapters_are_read_in_place(policy: Policy, engine: Running, folder: Path) -> None:
    """Trainer ranks share the memory of adapters, which are not merged."""
    engine.wait_for(engine.engine.connect(WeightRoute(folder, "cuda_ipc")))
    plan, adapters = policy.plan(2, colocated=True), policy.adapters(10)

    def read(part: Slice) -> torch.Tensor:
        return view_of(adapters[part.name], part.box)

    for rank in range(TRAINER.world_size):
        offer_parameters(folder, 10, plan, rank, read, share_storage)
    engine.load(10)
    engine.assert_serves(policy, 10, adapters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_fused_layers_can_have_adapters_alone(tmp_path: Path, peft: Any, dtype: str) -> None:
    policy = replace(make_policy(tmp_path / "model", BIASED, ATTENTION, peft), dtype=dtype)
    with closing(WeightStore.create()) as store, running(policy, WeightRoute(store.folder), 1) as engine:
        plan = policy.plan(1)
        policy.publish(store, 1, plan, policy.adapters(1))
        engine.load(1)
        engine.assert_serves(policy, 1, policy.adapters(1))
