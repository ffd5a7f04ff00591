"""The kernels against float64 autograd, on a GPU if there is one and otherwise in Triton's interpreter."""

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bapo.model import vocab_kernels
from megatron_bapo.model.vocab_parallel import OutputLayer, log_probs_and_entropy, token_loss
from megatron_bapo.parallel.groups import Axis
from megatron_bapo.parallel.platform import local_device
from tests.parallel.vocab_parallel_examples import HIDDEN_SIZE, TokenExample, exact_results, make_token_example
from tests.tolerances import BF16_GRADIENT_ROUNDING, GRADIENT, LOG_PROB

NUM_TOKENS, VOCAB_SIZE = 19, 101
# An axis of size 1 calls no collective, so it needs no group.
ALONE = Axis(cast(dist.ProcessGroup, None), rank=0, size=1)


@pytest.fixture(autouse=True, params=[32, 128], ids=["blocks", "one-block"])
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_kernels, "BLOCK", request.param)


def run(
    example: TokenExample,
    *,
    path: str,
    temperature: float,
    entropy_requires_grad: bool,
    dtype: torch.dtype = torch.float32,
    num_rows: int = VOCAB_SIZE,
) -> dict[str, Tensor]:
    """Return the values that `exact_results` names; rows beyond the vocabulary contain values that must not matter."""
    device = local_device()
    padding = torch.full((num_rows - VOCAB_SIZE, HIDDEN_SIZE), 7.0)
    hidden_TH, weight_VH = (
        x.to(device, dtype).requires_grad_() for x in (example.hidden_TH, torch.cat([example.weight_VH, padding]))
    )
    layer = OutputLayer(weight_VH, VOCAB_SIZE, ALONE, chunk_size=7, fused=True)
    given, options = (hidden_TH, layer, example.labels_T.to(device)), {"temperature": temperature}
    if path == "token_loss":
        loss, log_probs_T, entropy_T = token_loss(
            *given, example.loss_of, **options, entropy_requires_grad=entropy_requires_grad
        )
    else:
        log_probs_T, entropy_T = log_probs_and_entropy(*given, **options, entropy_requires_grad=entropy_requires_grad)
        loss = example.loss_of(log_probs_T, entropy_T, slice(None))
    loss.backward()
    assert hidden_TH.grad is not None
    assert weight_VH.grad is not None
    assert not weight_VH.grad[VOCAB_SIZE:].any()
    return {
        "loss": loss.detach().cpu(),
        "log_probs": log_probs_T.detach().cpu(),
        "entropy": entropy_T.detach().cpu(),
        "grad_hidden": hidden_TH.grad.cpu(),
        "grad_weight": weight_VH.grad[:VOCAB_SIZE].cpu(),
    }


@pytest.mark.parametrize("path", ["token_loss", "log_probs_and_entropy"])
@pytest.mark.parametrize(
    ("temperature", "entropy_requires_grad", "num_rows"),
    [(1.0, False, VOCAB_SIZE), (0.5, True, VOCAB_SIZE + 3), (1.7, True, 256)],
)
def test_both_paths_give_float64_values_and_gradients(
    path: str, temperature: float, entropy_requires_grad: bool, num_rows: int
) -> None:
    example = make_token_example(NUM_TOKENS, VOCAB_SIZE, scale=3.0)
    exact = exact_results(example, temperature, entropy_requires_grad=entropy_requires_grad)

    found = run(
        example,
        path=path,
        temperature=temperature,
        entropy_requires_grad=entropy_requires_grad,
        num_rows=num_rows,
    )

    torch.testing.assert_close(found["loss"].double(), exact["loss"], atol=0.0, rtol=2e-6)
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(found[name].double(), exact[name], atol=LOG_PROB, rtol=1e-6)
    for name in ("grad_hidden", "grad_weight"):
        assert (found[name] - exact[name]).abs().max() < GRADIENT * exact[name].abs().max()


def test_a_bfloat16_layer_differs_only_by_its_rounding() -> None:
    example = make_token_example(NUM_TOKENS, VOCAB_SIZE)
    rounded = TokenExample(
        example.hidden_TH.bfloat16().float(),
        example.weight_VH.bfloat16().float(),
        example.labels_T,
        example.coefficients_T,
    )
    exact = exact_results(rounded, 1.0, entropy_requires_grad=True)

    found = run(rounded, path="token_loss", temperature=1.0, entropy_requires_grad=True, dtype=torch.bfloat16)

    largest_logit = (rounded.hidden_TH @ rounded.weight_VH.T).abs().max()
    assert (found["log_probs"] - exact["log_probs"]).abs().max() < 2**-8 * largest_logit
    for name in ("grad_hidden", "grad_weight"):
        assert (found[name] - exact[name]).abs().max() < BF16_GRADIENT_ROUNDING * exact[name].abs().max()


def test_previous_contents_of_the_memory_have_no_effect() -> None:
    weight_VH = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, device=local_device())
    hidden_CH, label_C = torch.randn(5, HIDDEN_SIZE, device=local_device()), torch.arange(5, device=local_device())
    clean, poisoned = (vocab_kernels.FusedShard(weight_VH, VOCAB_SIZE, num_tokens=8) for _ in range(2))
    poisoned._logits_CV.fill_(float("nan"))

    assert torch.equal(*(shard.sums(hidden_CH, label_C, 1.0) for shard in (clean, poisoned)))
    assert poisoned._logits_CV[5:].isnan().all()


def test_a_shard_of_only_padding_has_no_probability_and_no_gradient() -> None:
    weight_VH = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, device=local_device())
    hidden_CH, label_C = torch.randn(5, HIDDEN_SIZE, device=local_device()), torch.zeros(5, device=local_device())
    shard = vocab_kernels.FusedShard(weight_VH, 0, num_tokens=5)

    own_4C = shard.sums(hidden_CH, label_C.long(), 1.0)

    assert own_4C.isfinite().all()
    assert (own_4C[0] < -1e29).all()
