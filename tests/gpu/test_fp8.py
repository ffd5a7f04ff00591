"""Training and scoring in FP8 on a GPU, against bfloat16 of the same layers."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_bapo.config.checks import refuse
from megatron_bapo.config.colocation_checks import layer_problems
from megatron_bapo.config.fp8 import Fp8Recipe, capability_problem
from megatron_bapo.config.padding import PaddingRule
from megatron_bapo.errors import UserError
from megatron_bapo.metrics.values import scalars
from megatron_bapo.model.hf_export import save_hugging_face
from megatron_bapo.model.hf_mapping import lookup
from megatron_bapo.model.precision import values_of
from megatron_bapo.parallel.megatron import is_float8tensor
from megatron_bapo.parallel.platform import compute_capability, local_device
from megatron_bapo.trainer.checkpoint import load_checkpoint, save_checkpoint
from megatron_bapo.trainer.micro_batches import Example, to_micro_batch
from megatron_bapo.trainer.policy_update import update_policy
from megatron_bapo.trainer.worker import Worker, score
from tests.gpu.policies import (
    MODELS,
    exported,
    fused,
    k3,
    log_probs,
    make_config,
    mean_difference,
    models,
    one_rank,
    train,
    trajectories,
)
from tests.parallel.tensors import load_folder, same_bits
from tests.tolerances import FP8_K3, FP8_LOSS, FP8_MEAN_LOG_PROB

RECIPES: tuple[Fp8Recipe, ...] = ("delayed", "tensorwise", "blockwise", "mxfp8")
CAPABILITY = compute_capability() or (0, 0)
RUNNABLE = [recipe for recipe in RECIPES if capability_problem(recipe, CAPABILITY) is None]
NUM_STEPS = 20
Figures = Callable[..., None]
__all__ = ["models"]


def in_fp8(model: Path, recipe: Fp8Recipe, *, more: dict[str, object] | None = None, **changes: object) -> Worker:
    return fused(model, fp8={"recipe": recipe, **(more or {})}, **changes)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_table_of_recipes_agrees_with_transformer_engine(recipe: Fp8Recipe) -> None:
    engine = import_module("transformer_engine.pytorch")
    available = {
        "delayed": engine.is_fp8_available,
        "tensorwise": engine.is_fp8_available,
        "blockwise": engine.is_fp8_block_scaling_available,
        "mxfp8": engine.is_mxfp8_available,
    }[recipe]()
    assert available == (recipe in RUNNABLE)


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe not in RUNNABLE])
def test_a_recipe_that_this_gpu_cannot_run_is_refused_with_the_reason(models: dict[str, Path], recipe: str) -> None:
    config = make_config(models["dense"], model__transformer_impl="transformer_engine", fp8={"recipe": recipe})
    with pytest.raises(UserError, match=f"fp8.recipe={recipe} needs GPUs of compute capability"):
        refuse(layer_problems(config, CAPABILITY, True))


@pytest.mark.parametrize("recipe", RUNNABLE)
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_losses_stay_close_to_bfloat16(
    models: dict[str, Path], figures: Figures, name: str, recipe: Fp8Recipe
) -> None:
    bf16, worker = fused(models[name]), in_fp8(models[name], recipe)
    if recipe == "delayed":  # scales depend on earlier forward passes with gradients
        start = exported(worker)
        train(worker, 1)
        train(bf16, 1)
        assert not same_bits(exported(worker), start)
    ours, theirs = log_probs(worker), log_probs(bf16)
    losses, exact = (np.array(train(of, NUM_STEPS)) for of in (worker, bf16))
    figures(
        mean=mean_difference(ours, theirs),
        k3=k3(ours, theirs),
        mult_prob_error=float(np.exp(np.abs(ours - theirs)).mean()),
        last_loss=losses[-1],
        last_loss_bf16=exact[-1],
    )
    assert 0 < mean_difference(ours, theirs) < FP8_MEAN_LOG_PROB
    assert abs(k3(ours, theirs)) < FP8_K3
    assert exact[-1] < 0.8 * exact[0]
    np.testing.assert_allclose(losses, exact, rtol=FP8_LOSS)


@pytest.mark.parametrize("granularity", [None, "full"], ids=["kept", "recomputed"])
@pytest.mark.parametrize("recipe", [recipe for recipe in RUNNABLE if recipe != "delayed"])
def test_scoring_and_training_round_identically(
    models: dict[str, Path], recipe: Fp8Recipe, granularity: str | None, figures: Figures
) -> None:
    """Check that all ratios are 1 on unchanged weights; different rounding would bias every ratio."""
    worker = in_fp8(models["dense"], recipe, parallel__recompute_granularity=granularity)
    scored = np.split(
        log_probs(worker).astype(np.float32), np.cumsum([len(t.response_token_ids) for t in trajectories()])[:-1]
    )
    examples = [
        Example(trajectory, advantage=1.0, weight=1e-3, proximal_log_probs=of)
        for trajectory, of in zip(trajectories(), scored, strict=True)
    ]
    metrics = scalars(update_policy(worker, examples, lr=1e-4, on_policy=False))
    figures(ratio_max=metrics["actor/ratio_max"], kl=metrics["actor/ppo_kl_k3"])
    assert metrics["actor/ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["actor/ppo_kl_k3"] < 1e-6


def test_tokens_that_are_not_aligned_raise_and_padded_ones_pass(models: dict[str, Path]) -> None:
    worker = in_fp8(models["dense"], "tensorwise")
    example = Example(trajectories()[0], advantage=0.0, weight=0.0)
    odd = example.num_input_tokens + 1 - example.num_input_tokens % 2

    def scored(rule: PaddingRule) -> int:
        batch = to_micro_batch([example], rule, worker.groups.context, local_device())
        score(worker, [batch], 1.0)
        return batch.tokens_T.numel()

    assert scored(worker.config.padding_rule) % 128 == 0
    with pytest.raises((ValueError, RuntimeError, AssertionError), match=r"divisible by"):
        scored(PaddingRule(odd, odd))


@pytest.mark.parametrize("recipe", [recipe for recipe in RUNNABLE if recipe not in ("delayed", "mxfp8")])
@pytest.mark.parametrize("name", MODELS)
def test_weights_kept_in_fp8_train_and_are_exported_in_bfloat16(
    models: dict[str, Path], tmp_path: Path, figures: Figures, name: str, recipe: Fp8Recipe
) -> None:
    worker, original = in_fp8(models[name], recipe, more={"param": True}), load_folder(models[name])
    quantised = {of for of, parameter in worker.model.named_parameters() if is_float8tensor(parameter)}
    assert quantised == {of for of, _ in worker.model.named_parameters() if ".linear_" in of and "norm" not in of}
    for of, parameter in worker.model.named_parameters():
        # The optimizer has all bits of the loaded weights, however the model rounds them.
        entry = lookup(of, worker.model.architecture)
        main = worker.optimizer.read(parameter, "main")
        assert main is not None
        if len(entry.names) == 1:
            assert torch.equal(main.cpu(), original[entry.names[0]])
        if of in quantised:
            error = (values_of(parameter).float() - main).abs().max() / main.abs().max()
            assert 0 < error < 0.07
    losses, exact = train(worker, NUM_STEPS), train(fused(models[name]), NUM_STEPS)
    figures(last_loss=losses[-1], last_loss_bf16=exact[-1])
    assert losses[-1] == pytest.approx(exact[-1], rel=FP8_LOSS)
    save_hugging_face(worker.model, one_rank(), models[name], tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == torch.bfloat16
    assert same_bits(load_folder(tmp_path / "hf"), {of: t.float() for of, t in exported(worker).items()})
    saved = save_checkpoint(worker, tmp_path / "checkpoints", NUM_STEPS, {}, keep=1)
    other = in_fp8(models[name], recipe, more={"param": True})
    load_checkpoint(other, saved)
    for (_, ours), (_, theirs) in zip(other.model.named_parameters(), worker.model.named_parameters(), strict=True):
        assert torch.equal(other.optimizer.read(ours, "main"), worker.optimizer.read(theirs, "main"))


def test_the_first_and_the_last_layers_stay_in_bfloat16(models: dict[str, Path]) -> None:
    layers = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2}
    worker = in_fp8(models["dense"], "tensorwise", more={"param": True, **layers})
    for of, parameter in worker.model.named_parameters():
        if ".linear_" in of and "norm" not in of:
            assert is_float8tensor(parameter) == (lookup(of, worker.model.architecture).layer == 1), of
    whole = in_fp8(models["dense"], "tensorwise")
    few = in_fp8(models["dense"], "tensorwise", more=layers)
    exact = log_probs(fused(models["dense"]))
    assert 0 < mean_difference(log_probs(few), exact) < mean_difference(log_probs(whole), exact)
