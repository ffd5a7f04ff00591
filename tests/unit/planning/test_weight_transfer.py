import pytest

from megatron_bapo.config.lora_transfer import sent_adapters
from megatron_bapo.model.weight_layouts import (
    EngineLayout,
    many_hosts,
    one_host,
    one_host_per_gpu,
    trainer_shards,
    weight_plan,
)
from megatron_bapo.planning.hardware import GPUS, Assumptions
from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.weight_transfer import LAYER_S, TransferSpeed, sync_bytes, traffic
from megatron_bapo.weight_sync.plan_figures import direct_figures, store_figures
from tests.unit.planning.examples import RECIPES, recipe

SPEED = TransferSpeed.of(GPUS["H100"], Assumptions())
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
SMALL = [name for name in NAMES if "a3b" not in name]
"""Recipes without experts, whose plans have few enough slices for this test."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SMALL, "qwen3-30b-a3b_16gpus"])
def test_the_layouts_give_the_bytes_of_the_transfer_plan(name: str) -> None:
    """The fullest host has up to 10 % more than the mean: embeddings are on the first and the last stage."""
    planned = recipe(name)
    config, architecture = planned.config, planned.architecture
    parallel, engine, colocated = config.parallel, EngineLayout.of(config.rollout), config.rollout.colocate
    if not colocated and parallel.world_size + config.num_engine_ranks <= 8:
        placement = one_host(parallel, engine)
    else:
        placement = many_hosts(parallel, engine, config.rollout.num_engines, 8, colocated=colocated)
    bucket_bytes = config.weight_sync.bucket_mib << 20
    plan = weight_plan(architecture, parallel, engine, placement, dtype=config.model.dtype, bucket_bytes=bucket_bytes)
    exact = store_figures(plan, trainer_shards(architecture, parallel), placement.reader_hosts).traffic
    estimated = traffic(config, architecture, 8)
    for phase in ("written", "crossing", "loaded"):
        assert getattr(estimated, phase) == pytest.approx(getattr(exact, phase), rel=0.1), phase
    assert estimated.seconds(SPEED) == pytest.approx(exact.seconds(SPEED), rel=0.05)


@pytest.mark.parametrize(
    ("name", "transport", "num_on_network"),
    [("qwen2.5-7b_64gpus", "nccl", 1), ("r1-distill-qwen-32b_64gpus", "nccl", 1), ("qwen2.5-7b_8gpus", "cuda_ipc", 0)],
)
def test_the_layouts_give_the_bytes_of_the_plan_from_gpu_to_gpu(name: str, transport: str, num_on_network: int) -> None:
    """A rank may send a fourth more than the mean of a layer, whose few matrices are of unequal sizes."""
    base = recipe(name, f"weight_sync.transport={transport}")
    config, architecture, colocated = base.config, base.architecture, transport == "cuda_ipc"
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"colocate": colocated})})
    bucket_bytes, placement = config.weight_sync.bucket_mib << 20, one_host_per_gpu(config)
    engine = EngineLayout.of(config.rollout)
    plan = weight_plan(
        architecture, config.parallel, engine, placement, dtype=config.model.dtype, bucket_bytes=bucket_bytes
    )
    shards = trainer_shards(architecture, config.parallel)
    exact = direct_figures(plan, shards, 8, passes_on=transport == "nccl").traffic
    estimated = traffic(config, architecture, 8)
    assert exact.num_layers == estimated.num_layers
    assert (exact.sent, exact.linked)[1 - num_on_network] > 0
    for phase in ("sent", "linked"):
        assert getattr(estimated, phase) == pytest.approx(getattr(exact, phase), rel=0.25), phase


def test_an_update_writes_the_stores_crosses_the_network_and_is_loaded() -> None:
    version = 2 * 7_615_616_512
    assumptions = Assumptions()
    store = 1 / (assumptions.store_gb_s * 1e9) + 1 / (assumptions.host_copy_gb_s * 1e9)
    on_one_node = recipe("qwen2.5-7b_8gpus").time.weight_sync  # 8 engines of one GPU, and a trainer of TP 2
    assert on_one_node == pytest.approx((1 / 8 + 1) * version * store)
    separate = recipe("qwen2.5-7b_64gpus", placement="separate").time.weight_sync  # engines of two GPUs
    written = 8 * version / 64  # each of eight trainer hosts has all parameters, and serves an engine host
    assert separate == pytest.approx((written + version / 2) * store + version / (assumptions.connection_gb_s * 1e9))


def test_without_a_store_the_busiest_gpu_reads_at_the_speed_of_nvlink() -> None:
    version = 2 * 7_615_616_512
    direct = recipe("qwen2.5-7b_8gpus", "weight_sync.transport=cuda_ipc").time.weight_sync
    assert direct == pytest.approx(version / (450e9 * Assumptions().link_efficiency) + 28 * LAYER_S)


def test_between_hosts_every_gpu_receives_its_shards_through_its_own_adapter() -> None:
    plan = recipe("qwen2.5-7b_64gpus", "weight_sync.transport=nccl", placement="separate")  # engines of two GPUs
    version = 2 * 7_615_616_512
    assert plan.time.weight_sync == pytest.approx(version / 2 / (50e9 * Assumptions().link_efficiency) + 28 * LAYER_S)


@pytest.mark.parametrize(("trainer_stages", "engine_stages", "num_at_a_time"), [(1, 1, 4), (32, 1, 2), (1, 2, 2)])
def test_the_ranks_of_one_pipeline_stage_send_and_receive_at_a_time(
    trainer_stages: int, engine_stages: int, num_at_a_time: int
) -> None:
    """64 trainer ranks, and engines of four ranks; the number of engines does not matter, which pass weights on."""
    base = recipe("qwen2.5-7b_64gpus", "weight_sync.transport=nccl", placement="separate")
    parallel = base.config.parallel.model_copy(update={"pipeline_model_parallel_size": trainer_stages})
    changes = {"tensor_parallel_size": 4 // engine_stages, "pipeline_parallel_size": engine_stages}
    rollout = base.config.rollout.model_copy(update=changes)
    config = base.config.model_copy(update={"parallel": parallel, "rollout": rollout})
    sent = traffic(config, base.architecture, 8)
    assert sent.sent == pytest.approx(2 * 7_615_616_512 / num_at_a_time)
    fewer = config.model_copy(update={"rollout": rollout.model_copy(update={"num_engines": 1})})
    assert traffic(fewer, base.architecture, 8) == sent


def test_weights_reach_engines_on_nodes_of_their_own_over_the_network() -> None:
    small = recipe("qwen2.5-7b_8gpus", "parallel.world_size=4", "rollout.num_engines=4", placement="separate")
    beside, apart = (traffic(small.config, small.architecture, 8, per_node) for per_node in (None, 8))
    assert (beside.crossing, apart.crossing) == (0, 2 * 7_615_616_512)
    large = recipe("qwen2.5-7b_64gpus", "rollout.tensor_parallel_size=4", placement="separate")
    whole, half = (traffic(large.config, large.architecture, 8, per_node) for per_node in (4, 2))
    assert half.crossing == whole.crossing / 2


def test_a_slow_network_is_the_limit_instead_of_a_connection() -> None:
    slow = TransferSpeed.of(GPUS["H100"], Assumptions(), network_gbit_s=8.0)
    sent = traffic(recipe("qwen2.5-7b_64gpus").config, recipe("qwen2.5-7b_64gpus").architecture, 8)
    fast = sent.seconds(SPEED) - sent.crossing / (Assumptions().connection_gb_s * 1e9)
    assert sent.seconds(slow) == pytest.approx(fast + sent.crossing / (1e9 * Assumptions().link_efficiency))


@pytest.mark.parametrize("lora", ["adapters", "merged"])
def test_with_adapters_the_bytes_of_a_version_are_those_of_what_is_sent(lora: str) -> None:
    plan = recipe("qwen2.5-7b_8gpus", "model.lora.rank=16", f"weight_sync.lora={lora}")
    config, architecture = plan.config, plan.architecture
    engine, sent = EngineLayout.of(config.rollout), sent_adapters(config, architecture)
    placement = one_host(config.parallel, engine)
    sizes = {"dtype": "bfloat16", "bucket_bytes": 1 << 28}
    exact = weight_plan(architecture, config.parallel, engine, placement, **sizes, lora=sent)
    assert sync_bytes(config, architecture) == exact.total_bytes
    assert (exact.total_bytes < 0.01 * 2 * 7_615_616_512) == (lora == "adapters")
    assert plan.store_bytes == 2 * exact.total_bytes
    full = recipe("qwen2.5-7b_8gpus").time.weight_sync
    assert (plan.time.weight_sync < 0.02 * full) == (lora == "adapters")


def test_a_gpu_receives_the_broadcasts_of_all_stages_through_its_own_adapter() -> None:
    """More stages broadcast more at a time, until what they send together is what one adapter receives."""
    one, four = (
        recipe("qwen2.5-32b_64gpus", f"parallel.pipeline_model_parallel_size={stages}", "rollout.colocate=false")
        for stages in (1, 4)
    )
    weights = sync_bytes(one.config, one.architecture)

    def seconds(plan: Plan, **changes: bool) -> float:
        sent = traffic(plan.config, plan.architecture, 8, broadcasts=True, **changes)
        return sent.seconds(SPEED)

    assert seconds(one) == pytest.approx(weights / SPEED.broadcast)
    assert seconds(four) == pytest.approx(weights / SPEED.network)  # 35 GB/s, not 4 x 10
    assert seconds(four, receives_parts=True) == pytest.approx(weights / 4 / SPEED.broadcast)


def test_broadcasts_within_a_host_do_not_pass_its_adapters() -> None:
    plan = recipe("qwen2.5-7b_8gpus")
    sent = traffic(plan.config, plan.architecture, 8, broadcasts=True)
    assert sent.received == 0
    assert sent.seconds(SPEED) == pytest.approx(sync_bytes(plan.config, plan.architecture) / SPEED.broadcast)
