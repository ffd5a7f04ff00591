import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_bapo.config.architecture import FAMILIES, Architecture
from megatron_bapo.planning.timing import forward_flops
from tests.unit.planning.examples import recipe


def test_forward_flops_are_those_that_pytorch_counts() -> None:
    """PyTorch counts the attention scores that the causal mask discards, too: twice the causal half."""
    shape = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    settings = LlamaConfig(**shape, attn_implementation="eager")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.zeros(1, 512, dtype=torch.long))
    architecture = Architecture(family=FAMILIES["llama"], head_dim=32, rms_norm_eps=1e-6, rope_theta=1e4, **shape)
    products, attention = forward_flops(architecture, 512, 512**2)
    assert products + 2 * attention == pytest.approx(counter.get_total_flops(), rel=2e-3)


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
    ],
    ids=str,
)
def test_every_pass_over_a_trajectory_counts(overrides: list[str], passes: float) -> None:
    plan = recipe("qwen2.5-7b_8gpus", *overrides)
    mean = 1024 * 0.25 + 8192 * 0.5
    one_pass = 4096 * sum(forward_flops(plan.architecture, mean, 4 / 3 * mean**2))
    assert plan.time.model_flops == pytest.approx(passes * one_pass)


def test_the_pipelines_bubble_is_stages_less_one_over_micro_batches() -> None:
    """arXiv 2104.04473, section 2.2: (p - 1) / (v m), here with 4 stages and 128 micro-batches."""
    time = recipe("r1-distill-qwen-32b_64gpus").time
    assert time.bubble / time.compute == pytest.approx(3 / 128)
    virtual = recipe("r1-distill-qwen-32b_64gpus", "parallel.virtual_pipeline_model_parallel_size=4").time
    assert virtual.bubble / virtual.compute == pytest.approx(3 / (4 * 128))


def test_mfu_equals_the_assumed_efficiency_if_only_compute_takes_time() -> None:
    time = recipe("qwen2.5-7b_8gpus", "algorithm.objective=ppo").time
    assert time.mfu * time.training == pytest.approx(0.55 * time.compute)


def test_full_recompute_takes_another_forward_pass_and_leaves_the_models_flops_alone() -> None:
    plain = recipe("qwen2.5-7b_8gpus", "algorithm.objective=ppo").time
    full = recipe("qwen2.5-7b_8gpus", "algorithm.objective=ppo", "parallel.recompute_granularity=full").time
    assert full.compute / plain.compute == pytest.approx(4 / 3)
    assert full.model_flops == plain.model_flops


def test_decoding_reads_the_weights_once_a_token_at_least() -> None:
    plan = recipe("qwen2.5-7b_8gpus")
    reading_s = plan.engine.weights / (3.35e12 * 0.65)
    assert plan.time.generation > 8192 * reading_s
