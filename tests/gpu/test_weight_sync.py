"""Weight transfer from a trainer's GPU to a vLLM engine, engines that sleep, and tokens that sampling has kept."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.model.transfer_member import transfer_member
from megatron_bapo.model.weight_layouts import EngineLayout, many_hosts, weight_plan
from megatron_bapo.parallel.platform import DeviceStreams, release_cached_memory, share_storage, visible_devices
from megatron_bapo.rollout.engine import Engine, engine_environment
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.weight_sync.membership import offer_plan
from megatron_bapo.weight_sync.plan import Slice, WeightPlan
from megatron_bapo.weight_sync.plan_files import withdraw
from megatron_bapo.weight_sync.ray_store import open_store
from megatron_bapo.weight_sync.route import TransferGroup, WeightRoute
from megatron_bapo.weight_sync.shared_parameters import offer_parameters
from megatron_bapo.weight_sync.slice_stream import send_slices
from megatron_bapo.weight_sync.version_file import view_of
from tests.e2e.test_engine import request, save_tokenizer
from tests.fp8_blocks import dequantise, quantise
from tests.kept_sets import only_kept, sets_in
from tests.tolerances import BF16_ENGINE_LOG_PROB, FP8_ENGINE_LOG_PROB

MODEL = Qwen3Config(
    vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=256, initializer_range=0.05, tie_word_embeddings=True,
)  # fmt: skip
SEQUENCE = np.arange(1, 81, dtype=np.int32)
GIB = 2**30
Figures = Callable[..., None]


class Trainer:
    """One trainer rank with a Hugging Face model in bfloat16 on the first GPU."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda:0")

    def plan(self, *, colocated: bool) -> WeightPlan:
        parallel, engine = ParallelConfig(), EngineLayout()
        placement = many_hosts(parallel, engine, 1, 1, colocated=colocated)
        architecture = read_architecture(self.folder)
        return weight_plan(architecture, parallel, engine, placement, dtype="bfloat16", bucket_bytes=1 << 18)

    @torch.no_grad()
    def train(self, seed: int) -> None:
        generator = torch.Generator("cuda:0").manual_seed(seed)
        for parameter in self.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cuda:0")
            parameter.add_((0.02 * noise).to(parameter.dtype))

    def read(self, part: Slice) -> torch.Tensor:
        return view_of(self.model.get_parameter(part.name).detach(), part.box)

    def offer(self, version: int) -> None:
        torch.cuda.synchronize()
        offer_parameters(self.folder.parent, version, self.plan(colocated=True), 0, self.read, share_storage)

    @torch.no_grad()
    def log_probs(self) -> np.ndarray:
        tokens = torch.from_numpy(SEQUENCE).long().to("cuda:0")
        logits = self.model(tokens[None]).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].cpu().numpy()


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODEL).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    return Trainer(tmp_path / "model")


@contextmanager
def running(
    trainer: Trainer, route: WeightRoute, device: int = 0, *, keeps_tokens: bool = False, **settings: Any
) -> Iterator[tuple[Engine, Callable[[Awaitable[Any]], Any]]]:
    """An engine on a GPU in separate processes, with calls that wait for it."""
    with pytest.MonkeyPatch.context() as environment, asyncio.Runner() as runner:
        # The last setting lets a function of this file run in vLLM's workers.
        devices = [visible_devices()[device]]
        variables = engine_environment(devices, second_model_runner=keeps_tokens)
        for name, value in {**variables, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}.items():
            environment.setenv(name, value)

        async def waited(work: Awaitable[Any]) -> Any:
            return await work

        def wait_for(work: Awaitable[Any]) -> Any:
            return runner.run(waited(work))

        engine = Engine()
        rollout = RolloutConfig(max_num_seqs=8, gpu_memory_utilization=0.3, request_timeout_s=120, **settings)
        spec = EngineSpec(trainer.folder, rollout, "bfloat16", max_model_len=128, return_kept_tokens=keeps_tokens)
        wait_for(engine.start(spec, route))
        try:
            yield engine, wait_for
        finally:
            wait_for(engine.shutdown())


def difference(engine: Engine, wait_for: Callable[[Awaitable[Any]], Any], trainer: Trainer, version: int) -> float:
    """Return the largest difference of the log-probs; the engine must serve the version."""
    answer = wait_for(engine.score(SEQUENCE))
    assert answer.policy_version == version
    return float(np.abs(answer.log_probs - trainer.log_probs()).max())


def test_cuda_ipc_transfers_every_version_and_leaks_no_memory(trainer: Trainer, figures: Figures) -> None:
    worst = 0.0
    with running(trainer, WeightRoute(trainer.folder.parent, "cuda_ipc")) as (engine, wait_for):
        trainer.log_probs()  # matrix products allocate a workspace that stays
        release_cached_memory()
        held = torch.cuda.memory_reserved()
        for version in (1, 2, 3):
            trainer.train(seed=version)
            trainer.offer(version)
            assert wait_for(engine.load_weights(version)) == trainer.plan(colocated=True).total_bytes
            withdraw(trainer.folder.parent, version, 0)
            worst = max(worst, difference(engine, wait_for, trainer, version))
        release_cached_memory()
        assert torch.cuda.memory_reserved() <= held
    figures(log_prob_diff_max=worst)
    assert worst < BF16_ENGINE_LOG_PROB


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_memory_and_the_engine_is_correct_after_waking(
    trainer: Trainer, figures: Figures, level: Any
) -> None:
    route = WeightRoute(trainer.folder.parent, "cuda_ipc")
    with running(trainer, route, colocate=True, sleep_level=level) as (engine, wait_for):
        awake, _ = torch.cuda.mem_get_info()
        wait_for(engine.sleep(level))
        asleep, _ = torch.cuda.mem_get_info()
        freed_gib = (asleep - awake) / GIB
        wait_for(engine.wake(["weights"]))
        version = 0
        if level == 2:
            version = 1
            trainer.train(seed=1)
            trainer.offer(version)
            wait_for(engine.load_weights(version))
        wait_for(engine.wake())
        worst = difference(engine, wait_for, trainer, version)
    figures(freed_gib=freed_gib, log_prob_diff_max=worst)
    assert freed_gib > 1  # the KV cache, most of the engine's memory
    assert worst < BF16_ENGINE_LOG_PROB


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_transfers_every_version_to_another_gpu(trainer: Trainer, figures: Figures) -> None:
    rendezvous = f"file://{trainer.folder.parent}/rendezvous"
    route = WeightRoute(trainer.folder.parent, "nccl", first_place=1, rendezvous=rendezvous, timeout_s=120)
    plan, worst, streams = trainer.plan(colocated=False), 0.0, DeviceStreams(torch.device("cuda:0"))
    offer_plan(open_store(rendezvous, route.timeout_s), plan)
    group = TransferGroup("group", plan.digest, (0, 1))
    member = transfer_member(rendezvous, 0, "127.0.0.1", route.timeout_s)

    def deliver(version: int) -> None:
        torch.cuda.set_device(0)
        member.join(group)
        with member.transfer() as chain:
            send_slices(plan, version, 0, trainer.read, chain, streams)
        member.commit(version, num_senders=1)

    with running(trainer, route, device=1) as (engine, wait_for), ThreadPoolExecutor(1) as executor:
        for version in (1, 2, 3):
            trainer.train(seed=version)
            torch.cuda.synchronize()
            sending = executor.submit(deliver, version)
            wait_for(engine.load_weights(version, group))
            sending.result()
            worst = max(worst, difference(engine, wait_for, trainer, version))
    figures(log_prob_diff_max=worst)
    assert worst < BF16_ENGINE_LOG_PROB


def test_log_probs_are_those_over_the_tokens_that_the_engine_has_kept(trainer: Trainer, figures: Figures) -> None:
    worst, sizes = 0.0, list[int]()
    with running(trainer, WeightRoute(trainer.folder.parent, "cuda_ipc"), keeps_tokens=True) as (engine, wait_for):
        generated = wait_for(engine.generate(request(SEQUENCE, n=4, top_k=20, top_p=0.9)))
        score = wait_for(engine.score(SEQUENCE, 8))
    for completion in generated.completions:
        tokens = torch.from_numpy(np.concatenate([SEQUENCE, completion.token_ids])).long().to("cuda:0")
        with torch.no_grad():
            logits = trainer.model(tokens[None]).logits[0, len(SEQUENCE) - 1 : -1].float().cpu()
        sets = sets_in(completion.kept_tokens, len(completion.token_ids))
        labels = torch.from_numpy(completion.token_ids).long()[:, None]
        expected = only_kept(logits, sets).log_softmax(-1).gather(1, labels)[:, 0].numpy()
        worst = max(worst, float(np.abs(completion.log_probs - expected).max()))
        sizes += map(len, sets)
    figures(log_prob_diff_max=worst, mean_kept=float(np.mean(sizes)))
    assert worst < BF16_ENGINE_LOG_PROB
    assert 1 < np.mean(sizes) < 20
    assert max(sizes) < 30  # vLLM searches for the smallest kept logit in at most 18 steps
    assert np.abs(score.log_probs - trainer.log_probs()).max() < BF16_ENGINE_LOG_PROB
    assert len(score.decoded_log_probs) == 8


def held_in_fp8(worker: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a projection of one of vLLM's workers and its scales."""
    layer = worker.model_runner.get_model().model.layers[0].mlp.down_proj
    return layer.weight.detach().float().cpu(), layer.weight_scale_inv.detach().float().cpu()


def test_an_fp8_engine_quantizes_every_version_in_blocks_of_the_documented_layout(
    trainer: Trainer, figures: Figures
) -> None:
    route = WeightRoute(trainer.folder.parent, "cuda_ipc")
    with running(trainer, route, quantization="fp8_per_block") as (engine, wait_for):
        for version in (1, 2):
            trainer.train(seed=version)
            trainer.offer(version)
            wait_for(engine.load_weights(version))
            worst = difference(engine, wait_for, trainer, version)
        server: Any = engine._server
        ((numbers, scales),) = wait_for(server._llm.collective_rpc(held_in_fp8))
    weight = trainer.model.get_parameter("model.layers.0.mlp.down_proj.weight").detach()
    expected, expected_scales = (part.cpu() for part in quantise(weight))
    if scales.shape == expected_scales.shape:  # kernels may store them transposed or as powers of two
        power_of_two = not torch.equal(scales, expected_scales)
        exact, exact_scales = (part.cpu() for part in quantise(weight, power_of_two=power_of_two))
        assert torch.equal(numbers, exact.float())
        assert torch.equal(scales, exact_scales)
    else:
        assert sorted(scales.flatten().tolist()) == sorted(expected_scales.flatten().tolist())
    figures(
        log_prob_diff_max=worst, weight_error=(dequantise(expected, expected_scales) - weight.cpu()).abs().max().item()
    )
    assert worst < FP8_ENGINE_LOG_PROB
