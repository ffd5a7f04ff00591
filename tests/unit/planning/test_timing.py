from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_bapo.config.architecture import FAMILIES, Architecture
from megatron_bapo.config.lora import LoraConfig, TargetModule
from megatron_bapo.planning.collective_time import Links
from megatron_bapo.planning.flops import forward_flops, training_flops
from megatron_bapo.planning.generation_time import decode_cost
from megatron_bapo.planning.hardware import GPUS, Assumptions
from megatron_bapo.planning.layer_time import KERNEL_S, ExpertSplit, Kernels, expert_block, reached
from megatron_bapo.planning.model_state import model_state
from megatron_bapo.planning.parameters import num_active_adapter_parameters
from megatron_bapo.planning.response_lengths import lengths_of, mean_response
from megatron_bapo.planning.settings import with_placement
from megatron_bapo.planning.trainer_memory import num_micro_batches
from megatron_bapo.planning.training_time import scoring_passes
from megatron_bapo.simulation.calibration import planned_workload
from megatron_bapo.simulation.simulator import simulate
from tests.unit.planning.examples import recipe

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
ARCHITECTURE = Architecture(family=FAMILIES["llama"], head_dim=32, rms_norm_eps=1e-6, rope_theta=1e4, **SHAPE)


def test_forward_flops_are_those_that_pytorch_counts() -> None:
    """PyTorch counts the attention scores that the causal mask discards, too: twice the causal half."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, attn_implementation="eager"))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.zeros(1, 512, dtype=torch.long))
    products, attention = forward_flops(ARCHITECTURE, 512, 512**2)
    assert products + 2 * attention == pytest.approx(counter.get_total_flops(), rel=2e-3)


@pytest.mark.parametrize("modules", [None, ("q_proj", "k_proj", "v_proj", "down_proj")])
def test_training_flops_are_those_that_pytorch_counts(modules: tuple[TargetModule, ...] | None) -> None:
    """With `modules` only these layers' adapters are trained, and the embeddings need a gradient, as in the trainer."""
    lora = None if modules is None else LoraConfig(rank=16, target_modules=modules)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, attn_implementation="eager"))
        model.requires_grad_(lora is None)
        for name, layer in list(model.named_modules()):
            if name.rpartition(".")[2] in (modules or ()):
                low, high = torch.nn.Linear(layer.in_features, 16, bias=False), torch.nn.Linear(16, layer.out_features)
                layer.register_forward_hook(lambda _, inputs, out, low=low, high=high: out + high(low(inputs[0])))
        with FlopCounterMode(display=False) as counter:
            model(inputs_embeds=torch.zeros(1, 512, 256, requires_grad=True)).logits.sum().backward()
    attention = forward_flops(ARCHITECTURE, 512, 512**2)[1]
    masked = 3 * attention  # the other half of the scores
    assert training_flops(ARCHITECTURE, 512, 512**2, lora) + masked == pytest.approx(
        counter.get_total_flops(), rel=2e-3
    )


def test_a_token_passes_the_adapters_of_the_experts_that_it_is_routed_to() -> None:
    plan = recipe("qwen3-30b-a3b_16gpus")
    lora = LoraConfig(rank=16, target_modules=("gate_proj", "up_proj", "down_proj"))
    halves = 2 * (2048 + 768) + (768 + 2048)  # gate and up, and down; a rank has as many rows of A and columns of B
    assert num_active_adapter_parameters(plan.architecture, lora) == 48 * 8 * 16 * halves


def test_only_adapted_layers_take_time_for_adapters_and_frozen_ones_less_for_gradients() -> None:
    full, some, all_ = (
        recipe("qwen2.5-7b_8gpus", "algorithm.objective=ppo", *overrides).time
        for overrides in (
            (),
            ("model.lora.rank=16", "model.lora.target_modules=[q_proj,v_proj]"),
            ("model.lora.rank=16",),
        )
    )
    assert 2 / 3 < some.trainer.compute / full.trainer.compute < 0.8  # 2 of 3 products, and all of attention
    assert some.trainer.compute < all_.trainer.compute < full.trainer.compute
    assert some.model_flops < all_.model_flops < 0.75 * full.model_flops
    assert all_.mfu < full.mfu


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        (["algorithm.objective=ppo"], 3),
        ([], 3 + 3 / 4),  # every ratio of the first of four updates is 1
        (["trainer.ppo_mini_batch_size=4096"], 3),
        (
            ["rollout.max_reuse=2", "rollout.max_staleness=8"],
            3 + 1,
        ),  # the first update has tokens of older weights, too
        (["rollout.partial_rollout.over_sampling=1.5", "rollout.max_staleness=8"], 3 + 1),
        (
            ["rollout.partial_rollout.token_budget=4096", "rollout.max_staleness=8"],
            3 + 3 / 4,
        ),  # generation waits for all responses
        (
            ["fp8.recipe=delayed", "model.transformer_impl=transformer_engine"],
            3 + 1,
        ),  # a scoring pass would change its scales
        (["algorithm.behaviour_policy=recomputed"], 3 + 3 / 4 + 1),
        (["algorithm.clip_bounds.scope=microbatch"], 3),
        (["algorithm.objective=ppo", "algorithm.behaviour_policy=recomputed"], 3 + 1),
        (["algorithm.objective=ppo", "algorithm.kl_loss_coef=0.001"], 3 + 1),
        (["algorithm.objective=ppo", "logging.entropy_clip_rule=true"], 3 + 1),
        (["trainer.ppo_epochs=2", "algorithm.kl_loss_coef=0.001"], 2 * (3 + 7 / 8) + 1),
        (
            ["algorithm.objective=distill", "algorithm.distillation.teacher=Qwen2.5-7B", "trainer.ppo_epochs=2"],
            2 * 3 + 1,
        ),
    ],
    ids=str,
)
def test_every_pass_over_a_trajectory_counts(overrides: list[str], passes: float) -> None:
    plan = recipe("qwen2.5-7b_8gpus", *overrides)
    mean = 1024 * 0.25 + 8192 * 0.5
    square = lengths_of(plan.config, plan.assumptions).mean_square
    one_pass = 4096 * sum(forward_flops(plan.architecture, mean, square))
    assert plan.time.model_flops == pytest.approx(passes * one_pass)


def test_the_pipelines_bubble_is_stages_less_one_over_micro_batches() -> None:
    """arXiv 2104.04473, section 2.2: (p - 1) / (v m), if all stages take as long."""
    stages = "parallel.pipeline_model_parallel_size=4"
    plan = recipe("r1-distill-qwen-32b_64gpus", stages)
    plan = replace(plan, assumptions=replace(plan.assumptions, balances_stages=True))
    virtual = recipe("r1-distill-qwen-32b_64gpus", stages, "parallel.virtual_pipeline_model_parallel_size=4")
    virtual = replace(virtual, assumptions=plan.assumptions)
    for each, chunks in (plan, 1), (virtual, 4):
        time, count = each.time.trainer, num_micro_batches(each.config, each.assumptions)
        work = time.compute + time.tensor + time.context + time.expert + time.pipeline + time.launch
        assert time.bubble / work == pytest.approx(3 / (chunks * count))


def test_the_last_stage_also_waits_for_its_output_layer() -> None:
    plan = recipe("r1-distill-qwen-32b_64gpus")
    balanced = replace(plan, assumptions=replace(plan.assumptions, balances_stages=True))
    assert plan.time.trainer.compute == balanced.time.trainer.compute
    assert plan.time.trainer.bubble > balanced.time.trainer.bubble


def test_large_products_reach_the_assumed_efficiency_and_tiles_and_waves_cost() -> None:
    kernels = Kernels(GPUS["H100"], Assumptions())
    flops = 2 * (132 * 128) * (256 * 32) * 8192
    assert kernels.product(132 * 128, 256 * 32, 8192) == pytest.approx(flops / (989e12 * 0.6), rel=0.05)
    assert kernels.product(133 * 128, 256, 8192) > 1.5 * kernels.product(132 * 128, 256, 8192)  # a second wave


def test_the_products_of_experts_share_their_last_wave() -> None:
    """One expert's 88 tiles take a wave of 132 multiprocessors; those of three experts take two, not three."""
    kernels = Kernels(GPUS["H100"], Assumptions())
    one = kernels.product(8 * 128, 11 * 256, 2048)
    assert kernels.product(8 * 128, 11 * 256, 2048, count=3) == pytest.approx(2 * one)


def test_recomputed_mlps_are_those_of_dense_layers_and_recomputed_experts_those_of_the_others() -> None:
    """Megatron's layers with experts ignore `mlp`, and dense ones `moe`."""
    selective = "parallel.recompute_granularity=selective"
    none, mlp, moe, both = (
        recipe("qwen3-30b-a3b_16gpus", "model.path=Moonlight-16B-A3B", selective, f"parallel.recompute_modules={m}")
        for m in ("[]", "[mlp]", "[moe]", "[mlp, moe]")
    )
    assert none.architecture.num_hidden_layers - len(none.architecture.moe_layers) == 1  # of 27
    dense, experts = (plan.time.trainer.compute - none.time.trainer.compute for plan in (mlp, moe))
    assert 0 < dense < 0.1 * experts
    assert both.time.trainer.compute - none.time.trainer.compute == pytest.approx(dense + experts)


def test_each_expert_of_a_rank_has_its_own_kernels_that_quantize_its_tensors() -> None:
    """One scale per tensor takes four kernels for each input and gradient; `delayed` quantizes all at once."""
    architecture = recipe("qwen3-30b-a3b_16gpus").architecture
    for ranks in (8, 16):
        apart, together = (
            expert_block(Kernels(GPUS["H100"], Assumptions(), name), architecture, ExpertSplit(ranks, 1), tokens=0)
            for name in ("tensorwise", "delayed")
        )
        for more in (apart.forward - together.forward, apart.backward - together.backward):
            assert more == pytest.approx(128 / ranks * 2 * 4 * KERNEL_S)


def test_a_token_reaches_the_parts_of_the_experts_that_its_router_allows() -> None:
    free = recipe("qwen3-30b-a3b_16gpus").architecture
    limited = replace(free, n_group=8, topk_group=4)
    always = replace(limited, num_experts_per_tok=1000)  # so many that every allowed part is reached
    assert reached(free, 16) == pytest.approx(1 - (15 / 16) ** 8)
    assert reached(limited, 1) == 1
    assert reached(limited, 8) == pytest.approx(0.5 * (1 - 0.75**8))
    assert reached(always, 16) == pytest.approx(0.5)  # two parts a group
    assert reached(always, 4) == pytest.approx(1 - 15 / 70)  # of C(8, 4) choices C(6, 4) miss both groups of a part


def test_an_h20_reaches_more_of_its_peak_than_an_h100_in_bfloat16_and_in_fp8() -> None:
    for recipe_name, peak in ((None, 148e12), ("tensorwise", 296e12)):
        kernels = Kernels(GPUS["H20"], Assumptions(), recipe_name)
        assert kernels.flops_per_s == pytest.approx(peak * 0.6 * 1.3)
        same = Kernels(replace(GPUS["H20"], sustained=1.0), Assumptions(), recipe_name)
        assert same.flops_per_s == pytest.approx(peak * 0.6)


def test_eager_engines_launch_layers_with_experts_in_twice_the_time() -> None:
    for name, layers_ms in (("qwen3-30b-a3b_16gpus", 48 * 0.7), ("qwen2.5-7b_8gpus", 28 * 0.35)):
        for eager in (True, False):
            plan = recipe(name, f"rollout.enforce_eager={str(eager).lower()}")
            cost = decode_cost(plan.config, plan.architecture, plan.gpu, plan.engine, plan.assumptions)
            assert cost.launches == pytest.approx(eager * layers_ms / 1e3)


def test_an_optimizer_that_moves_unpinned_is_copied_more_slowly() -> None:
    plan = recipe("qwen2.5-7b_8gpus", "trainer.offload=true")
    unpinned = replace(plan, assumptions=replace(plan.assumptions, unpinned_gb_s=2.8))
    optimizer = model_state(plan.config, plan.architecture, 0).optimizer
    assert unpinned.time.offload - plan.time.offload == pytest.approx(optimizer * (1 / 2.8e9 - 1 / 20e9))


def test_a_reference_model_on_the_host_takes_the_policys_place_once_a_step() -> None:
    plan = recipe("qwen2.5-7b_8gpus", "algorithm.objective=ppo", "algorithm.kl_loss_coef=0.001")
    on_host = replace(plan, assumptions=replace(plan.assumptions, reference_on_host=True))
    parameters = model_state(plan.config, plan.architecture, 0).parameters
    assert on_host.time.trainer.swap == pytest.approx(3 * parameters / 20e9)
    assert plan.time.trainer.swap == 0


def test_mfu_is_below_the_efficiency_of_matrix_products() -> None:
    time = recipe("qwen2.5-7b_8gpus", "algorithm.objective=ppo").time
    assert 0.3 < time.mfu < Assumptions().compute_efficiency


def test_full_recompute_takes_another_forward_pass_and_leaves_the_models_flops_alone() -> None:
    plain = recipe("qwen2.5-7b_8gpus", "algorithm.objective=ppo").time
    full = recipe("qwen2.5-7b_8gpus", "algorithm.objective=ppo", "parallel.recompute_granularity=full").time
    assert 1.25 < full.trainer.compute / plain.trainer.compute < 4 / 3
    assert full.model_flops == plain.model_flops


def test_decoding_reads_the_weights_once_a_token_at_least() -> None:
    plan = recipe("qwen2.5-7b_8gpus")
    reading_s = plan.engine.weights / (3.35e12 * 0.65)
    assert plan.time.generation > 8192 * reading_s


def test_a_synchronous_batch_takes_longer_the_wider_its_lengths_spread() -> None:
    plan = recipe("qwen2.5-7b_8gpus")
    spreads = [replace(plan, assumptions=replace(plan.assumptions, length_sigma=sigma)) for sigma in (0.2, 0.6, 1.2)]
    seconds = [each.time.generation for each in spreads]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("kv_cache_gib", [1, 2, 8])
def test_a_synchronous_batch_takes_as_long_as_simulated_engines_take(kv_cache_gib: int) -> None:
    """The simulated router sends requests to four engines with room for 50 responses, for 100 and for all of them."""
    plan = recipe(
        "qwen2.5-7b_8gpus",
        *("rollout.max_response_length=1024", "data.max_prompt_length=64", "rollout.n=8", "rollout.num_engines=4"),
        *("trainer.train_batch_size=1024", "rollout.health_check_interval_s=1", f"rollout.kv_cache_gib={kv_cache_gib}"),
    )
    mean, sigma = mean_response(plan.config, plan.assumptions), plan.assumptions.length_sigma
    workload = planned_workload(plan, mean_response=mean, sigma=sigma)
    workload = replace(workload, engine=replace(workload.engine, load_s=0.0), train_s=0.0)
    done = simulate(plan.config.rollout, workload, num_steps=6, num_first_steps=3)
    assert plan.time.generation == pytest.approx(done.seconds / done.num_steps, rel=0.15)


def test_an_asynchronous_batch_does_not_wait_for_its_stragglers() -> None:
    name = "r1-distill-qwen-7b_16gpus_async"
    fresh, stale = (recipe(name, f"rollout.max_staleness={n}", placement="separate").time.generation for n in (1, 8))
    in_turn = recipe(name, "rollout.mode=sync", placement="separate").time.generation
    assert stale <= fresh < in_turn


def test_the_longest_part_of_a_step_dominates_it() -> None:
    time = recipe("paper_32b_64k").time
    assert time.dominant == ("generation", time.generation)
    overlapped = recipe("r1-distill-qwen-7b_16gpus_async", placement="separate").time
    assert overlapped.dominant[1] <= max(overlapped.generation, overlapped.training)


def test_what_lies_between_the_phases_may_be_the_longest_part_of_a_step() -> None:
    time = replace(recipe("qwen2.5-7b_8gpus").time, between=1e6)
    assert time.dominant == ("between phases", 1e6)


def test_separate_engines_may_have_another_gpu_than_the_trainer() -> None:
    same = recipe("qwen2.5-7b_8gpus", "rollout.colocate=false", "rollout.sleep_level=0", placement="separate")
    other = replace(same, separate_gpu_name="L40S")
    assert other.time.generation > 2 * same.time.generation
    assert (other.time.training, other.time.mfu) == (same.time.training, same.time.mfu)
    assert replace(other, config=with_placement(other.config, "colocated")).engine == same.engine


def test_the_backward_pass_repeats_the_collectives_of_what_it_computes_again() -> None:
    """Megatron checkpoints a layer's experts with their dispatch, and core attention with its exchange of keys."""

    def parts(name: str, module: str, *more: str) -> tuple[float, float]:
        selective = "parallel.recompute_granularity=selective", f"parallel.recompute_modules=[{module}]"
        training = recipe(name, *selective, *more).training
        return training.expert, training.context

    experts, split = "qwen3-30b-a3b_16gpus", ("parallel.context_parallel_size=2", "parallel.sequence_parallel=false")
    plain, again = parts(experts, ""), parts(experts, "moe")
    passes = 2 + scoring_passes(recipe(experts).config)
    assert again[0] == pytest.approx(plain[0] * (passes + 1) / passes)
    plain, mlp, attention = (parts("qwen2.5-7b_8gpus", module, *split) for module in ("", "mlp", "core_attn"))
    passes = 2 + scoring_passes(recipe("qwen2.5-7b_8gpus").config)
    assert plain[1] == mlp[1] > 0
    assert attention[1] == pytest.approx(plain[1] * (passes + 1) / passes)


def test_a_group_on_the_border_of_two_nodes_takes_the_networks_time() -> None:
    """12 ranks are six on each of two nodes, so that the second of three groups of four is on both."""
    gpu, assumptions = GPUS["H100"], Assumptions()
    twelve, eight = (
        Links.of_trainer(recipe("qwen2.5-7b_8gpus", f"parallel.world_size={num}").config, gpu, assumptions)
        for num in (12, 8)
    )
    assert [span for span in range(1, 9) if twelve.is_inside(span)] == [1, 2, 3, 6]
    assert eight.seconds(1e9, 4) < 0.2 * twelve.seconds(1e9, 4)
