from megatron_bapo.planning.rollout_memory import engine_parameters
from tests.unit.planning.examples import recipe

GIB = 2**30


def test_a_token_of_qwen25_7b_takes_56_kib_of_kv_cache() -> None:
    assert recipe("qwen2.5-7b_8gpus").engine.kv_per_token == 28 * 2 * 4 * 128 * 2 == 56 * 1024


def test_the_kv_cache_gets_what_weights_and_workspace_leave_of_the_engines_share() -> None:
    engine = recipe("qwen2.5-7b_8gpus").engine
    assert engine.weights == 7_615_616_512 * 2
    assert engine.workspace == 4 * GIB
    assert engine.total == int(0.85 * 79.2 * GIB)
    assert recipe("qwen2.5-7b_8gpus", "rollout.kv_cache_gib=10").engine.kv_cache == 10 * GIB


def test_with_more_gpus_than_key_value_heads_each_has_a_whole_head() -> None:
    """Qwen2.5-7B has 4, of 28 layers, hidden size 3584 and head size 128, with a bias."""
    architecture = recipe("qwen2.5-7b_8gpus").architecture
    one, eight = engine_parameters(architecture, 1), engine_parameters(architecture, 8)
    norms = 28 * 2 * 3584 + 3584
    eighth = (one - norms) / 8 + norms
    copies = 28 * 2 * (128 - 64) * (3584 + 1)
    assert eight == eighth + copies


def test_adapters_that_are_served_beside_the_weights_take_memory_at_the_rank_that_vllm_allows() -> None:
    """A is whole where a layer splits its outputs, and B where it splits its inputs."""
    rank, overrides = 16, ("model.lora.rank=9", "rollout.tensor_parallel_size=4", "rollout.num_engines=2")
    served = recipe("qwen2.5-7b_8gpus", *overrides, "rollout.sleep_level=1").engine
    merged = recipe("qwen2.5-7b_8gpus", *overrides, "weight_sync.lora=merged").engine
    hidden, queries, keys, mlp = 3584, 3584, 512, 18944
    columns = 3 * hidden + (queries + 2 * keys) // 4 + 2 * hidden + 2 * mlp // 4
    rows = queries // 4 + hidden + mlp // 4 + hidden
    assert served.weights - merged.weights == 28 * rank * (columns + rows) * 2
