"""A real two-rank vLLM engine gets weights directly from trainer ranks: from their memory and through a process group.

On a CPU these are shared memory and a gloo group; all other code is the same as on GPUs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.model.transfer_member import transfer_member
from megatron_bapo.model.weight_layouts import EngineLayout, many_hosts, weight_plan
from megatron_bapo.parallel.platform import DeviceStreams, share_storage
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
from tests.e2e.test_engine import save_tokenizer
from tests.fp8_blocks import quantise
from tests.tolerances import ENGINE_LOG_PROB

MODEL = Qwen3Config(
    vocab_size=126, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=True,
)  # fmt: skip
TRAINER = ParallelConfig(world_size=4, tensor_model_parallel_size=2)
ENGINE = {"tensor_parallel_size": 2}
SEQUENCE = np.arange(1, 41, dtype=np.int32)
TIMEOUT_S = 60.0


class Trainer:
    """Four trainer ranks, TP2 x DP2, as threads; each offers its slices of a Hugging Face model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def plan(self, *, colocated: bool) -> WeightPlan:
        engine = EngineLayout.of(RolloutConfig(**ENGINE))
        placement = replace(many_hosts(TRAINER, engine, 1, 1, colocated=colocated), one_sender=not colocated)
        architecture = read_architecture(self.folder)
        return weight_plan(architecture, TRAINER, engine, placement, dtype="float32", bucket_bytes=20_000)

    def train(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))

    def read(self, part: Slice) -> torch.Tensor:
        return view_of(self.model.get_parameter(part.name).detach(), part.box)

    def log_probs(self) -> np.ndarray:
        tokens = torch.from_numpy(SEQUENCE).long()
        with torch.no_grad():
            logits = self.model(tokens[None]).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transports") / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODEL).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


Running = tuple[Engine, Callable[[Awaitable[Any]], Any]]


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    """The engine and a function that runs its coroutines."""
    with pytest.MonkeyPatch.context() as environment, asyncio.Runner() as runner:
        for name, value in engine_environment().items():
            environment.setenv(name, value)

        async def waited(work: Awaitable[Any]) -> Any:
            return await work

        def wait_for(work: Awaitable[Any]) -> Any:
            return runner.run(waited(work))

        engine = Engine()
        settings = RolloutConfig(max_num_seqs=8, kv_cache_gib=0.02, request_timeout_s=60, **ENGINE)
        route = WeightRoute(folder.parent, "cuda_ipc")
        wait_for(engine.start(EngineSpec(folder, settings, "float32", max_model_len=64), route))
        try:
            yield engine, wait_for
        finally:
            wait_for(engine.shutdown())


def assert_in_sync(running: Running, trainer: Trainer, version: int) -> None:
    engine, wait_for = running
    score = wait_for(engine.score(SEQUENCE))
    assert score.policy_version == version
    assert np.abs(score.log_probs - trainer.log_probs()).max() < ENGINE_LOG_PROB


def test_an_engine_reads_the_trainers_parameters_from_their_memory(folder: Path, running: Running) -> None:
    engine, wait_for = running
    trainer, ranks = Trainer(folder), range(TRAINER.world_size)
    plan = trainer.plan(colocated=True)

    def offer(version: int) -> None:
        offered = [offer_parameters(folder.parent, version, plan, r, trainer.read, share_storage) for r in ranks]
        assert offered == [plan.num_bytes(plan.sent_by(rank)) for rank in ranks]

    for version in (1, 2, 3):
        trainer.train(seed=version)
        offer(version)
        assert wait_for(engine.load_weights(version)) == sum(plan.num_bytes(plan.needed_on(gpu)) for gpu in (0, 1))
        for rank in ranks:
            withdraw(folder.parent, version, rank)
        assert_in_sync(running, trainer, version)
    with pytest.raises(RunError, match="trainer rank 0 has not announced policy version 4"):
        wait_for(engine.load_weights(4))
    offer(4)
    trainer.train(seed=4)  # the trainer must not train while engines read
    with pytest.raises(
        RunError,
        match=r"4 was not loaded, the engine keeps version 3: .* differs from that rank's parameter: expected",
    ):
        wait_for(engine.load_weights(4))
    offer(5)
    wait_for(engine.load_weights(5))
    assert_in_sync(running, trainer, 5)


def test_trainer_ranks_send_each_engine_rank_its_slices(folder: Path, running: Running) -> None:
    engine, wait_for = running
    trainer, world_size = Trainer(folder), TRAINER.world_size
    plan = trainer.plan(colocated=False)
    pairs = {(bucket.sender, bucket.hosts[0]) for bucket in plan.buckets}
    shards = {(sender % TRAINER.tensor_model_parallel_size, first) for sender, first in pairs}
    assert len(pairs) == len(shards), "an engine rank receives from one replica of each shard"
    rendezvous = f"file://{folder.parent}/rendezvous"
    wait_for(engine.connect(WeightRoute(folder.parent, "nccl", world_size, rendezvous, timeout_s=TIMEOUT_S)))
    offer_plan(open_store(rendezvous, TIMEOUT_S), plan)
    group = TransferGroup("group", plan.digest, tuple(range(world_size + 2)))
    members = [transfer_member(rendezvous, rank, "127.0.0.1", TIMEOUT_S) for rank in range(world_size)]

    def deliver(rank: int, version: int) -> int:
        members[rank].join(group)
        with members[rank].transfer() as chain:
            num_bytes = send_slices(plan, version, rank, trainer.read, chain, DeviceStreams(torch.device("cpu")))
        if rank == 0:
            members[rank].commit(version, num_senders=world_size)
        return num_bytes

    for version in (6, 7, 8):
        trainer.train(seed=version)
        with ThreadPoolExecutor(world_size) as executor:
            sending = [executor.submit(deliver, rank, version) for rank in range(world_size)]
            received = wait_for(engine.load_weights(version, group))
            sent = sum(future.result() for future in sending)
        assert sent == plan.total_bytes, "every slice leaves the trainer once"
        assert received == sum(plan.num_bytes(plan.needed_on(place)) for place in (4, 5))
        assert_in_sync(running, trainer, version)
    with pytest.raises(RunError, match="policy version 9 was not offered: no group transfers it"):
        wait_for(engine.load_weights(9))
    assert_in_sync(running, trainer, 8)


def test_an_engine_serves_nothing_while_it_sleeps_and_after_level_2_until_it_loads_weights(
    folder: Path, running: Running
) -> None:
    """This tests the engine's state only: vLLM's CPU build frees no memory."""
    engine, wait_for = running
    trainer = Trainer(folder)
    plan = trainer.plan(colocated=True)
    wait_for(engine.connect(WeightRoute(folder.parent, "cuda_ipc")))

    def load(version: int) -> None:
        for rank in range(TRAINER.world_size):
            offer_parameters(folder.parent, version, plan, rank, trainer.read, share_storage)
        wait_for(engine.load_weights(version))

    load(10)
    wait_for(engine.sleep(1))
    wait_for(engine.sleep(1))
    for work in (engine.score(SEQUENCE), engine.sleep(2)):
        with pytest.raises(RunError, match="sleeps: it has no memory for weights and kv_cache; wake it first"):
            wait_for(work)
    with pytest.raises(RunError, match="sleeps: it has no memory for weights; wake it first"):
        load(11)
    wait_for(engine.wake(["weights"]))
    with pytest.raises(RunError, match="no memory for kv_cache"):
        wait_for(engine.score(SEQUENCE))
    wait_for(engine.wake())
    assert_in_sync(running, trainer, 10)
    wait_for(engine.wake())

    wait_for(engine.sleep(2))
    wait_for(engine.wake())
    for work in (engine.score(SEQUENCE), engine.sleep(1)):
        with pytest.raises(RunError, match="slept at level 2, which discards its weights; load a policy version first"):
            wait_for(work)
    with pytest.raises(RunError, match="has policy version 10; it does not go back to version 10"):
        load(10)
    trainer.train(seed=12)
    load(12)
    assert_in_sync(running, trainer, 12)


def test_vllms_cpu_build_refuses_to_sleep(folder: Path) -> None:
    """`device_problems` refuses this, too, before anything is started."""
    settings = RolloutConfig(colocate=True, sleep_level=1)
    starting = Engine().start(EngineSpec(folder, settings, "float32", max_model_len=64), WeightRoute(folder.parent))
    with pytest.raises(UserError, match="Sleep mode is not supported on current platform"):
        asyncio.run(starting)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(256, 128), (200, 300), (3, 5)])
def test_fp8_blocks_equal_those_of_vllm(shape: tuple[int, int], power_of_two: bool) -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[:128, :128] *= 1e-3
    weight[128:] = 0
    ours, scales = quantise(weight, power_of_two=power_of_two)
    theirs, their_scales = per_block_cast_to_fp8(weight, use_ue8m0=power_of_two)
    assert torch.equal(scales, their_scales)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
