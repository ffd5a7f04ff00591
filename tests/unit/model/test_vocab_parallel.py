from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench.live_bytes import count_live_bytes
from megatron_bapo.model.vocab_parallel import OutputLayer, log_probs_and_entropy, token_loss
from megatron_bapo.parallel.groups import Axis
from tests.parallel.vocab_parallel_examples import HIDDEN_SIZE, TokenExample, exact_results, make_token_example
from tests.tolerances import GRADIENT, LOG_PROB

NUM_TOKENS, VOCAB_SIZE = 37, 101
# An axis of size 1 calls no collective, so it needs no group.
ALONE = Axis(cast(dist.ProcessGroup, None), rank=0, size=1)


def layer_of(weight_VH: Tensor, chunk_size: int = 10) -> OutputLayer:
    return OutputLayer(weight_VH, len(weight_VH), ALONE, chunk_size)


def leaves(example: TokenExample) -> tuple[Tensor, Tensor]:
    return example.hidden_TH.clone().requires_grad_(), example.weight_VH.clone().requires_grad_()


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def assert_gradient(ours: Tensor, exact: Tensor) -> None:
    assert (ours - exact).abs().max() < GRADIENT * exact.abs().max()


@pytest.mark.parametrize("entropy_requires_grad", [False, True])
@pytest.mark.parametrize(("temperature", "chunk_size"), [(0.5, 1), (1.0, 7), (1.7, NUM_TOKENS), (1.0, 1000)])
def test_both_paths_give_float64_values_and_gradients(temperature, chunk_size, entropy_requires_grad):
    example = make_token_example(NUM_TOKENS, VOCAB_SIZE, scale=3.0)
    exact = exact_results(example, temperature, entropy_requires_grad=entropy_requires_grad)

    for path in ("token_loss", "log_probs_and_entropy"):
        hidden_TH, weight_VH = leaves(example)
        given = (hidden_TH, layer_of(weight_VH, chunk_size), example.labels_T)
        options = {"temperature": temperature, "entropy_requires_grad": entropy_requires_grad}
        if path == "token_loss":
            loss, log_probs_T, entropy_T = token_loss(*given, example.loss_of, **options)
        else:
            log_probs_T, entropy_T = log_probs_and_entropy(*given, **options)
            assert entropy_T.requires_grad == entropy_requires_grad
            loss = example.loss_of(log_probs_T, entropy_T, slice(None))
        loss.backward()

        torch.testing.assert_close(loss.detach().double(), exact["loss"], atol=0.0, rtol=2e-6)
        torch.testing.assert_close(log_probs_T.detach().double(), exact["log_probs"], atol=LOG_PROB, rtol=1e-6)
        torch.testing.assert_close(entropy_T.detach().double(), exact["entropy"], atol=LOG_PROB, rtol=1e-6)
        assert_gradient(grad_of(hidden_TH), exact["grad_hidden"])
        assert_gradient(grad_of(weight_VH), exact["grad_weight"])


def test_a_loss_that_is_not_a_sum_over_tokens_is_differentiated_through_the_log_probs():
    example = make_token_example(NUM_TOKENS, VOCAB_SIZE)
    hidden_TH, weight_VH = leaves(example)
    exact_TH, exact_VH = (x.double().requires_grad_() for x in (example.hidden_TH, example.weight_VH))
    all_log_probs_TV = torch.log_softmax(exact_TH @ exact_VH.T, -1)
    exact_T = all_log_probs_TV.gather(1, example.labels_T[:, None]).squeeze(1)

    log_probs_T, _ = log_probs_and_entropy(hidden_TH, layer_of(weight_VH), example.labels_T, temperature=1.0)
    for values_T in (exact_T, log_probs_T):
        (values_T[:20].mean().exp() * values_T[20:].mean().exp()).backward()

    assert_gradient(grad_of(hidden_TH), grad_of(exact_TH))
    assert_gradient(grad_of(weight_VH), grad_of(exact_VH))


@pytest.mark.parametrize("scale", [1.0, -0.25, 0.0])
def test_the_gradient_scales_with_the_loss(scale):
    example = make_token_example(NUM_TOKENS, VOCAB_SIZE)
    exact = exact_results(example, 1.0, entropy_requires_grad=False)
    hidden_TH, weight_VH = leaves(example)

    loss, *_ = token_loss(hidden_TH, layer_of(weight_VH), example.labels_T, example.loss_of, temperature=1.0)
    (scale * loss).backward()

    for ours, key in ((hidden_TH, "grad_hidden"), (weight_VH, "grad_weight")):
        difference = (grad_of(ours) - scale * exact[key]).abs().max()
        assert difference <= abs(scale) * GRADIENT * exact[key].abs().max()


def test_a_second_backward_pass_is_refused():
    example = make_token_example(NUM_TOKENS, VOCAB_SIZE)
    hidden_TH, weight_VH = leaves(example)
    loss, *_ = token_loss(hidden_TH, layer_of(weight_VH), example.labels_T, example.loss_of, temperature=1.0)
    loss.backward(retain_graph=True)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_only_what_requires_a_gradient_gets_one():
    example = make_token_example(NUM_TOKENS, VOCAB_SIZE)
    exact = exact_results(example, 1.0, entropy_requires_grad=False)
    hidden_TH, weight_VH = leaves(example)

    loss, *_ = token_loss(hidden_TH, layer_of(weight_VH.detach()), example.labels_T, example.loss_of, temperature=1.0)
    loss.backward()
    assert_gradient(grad_of(hidden_TH), exact["grad_hidden"])
    assert weight_VH.grad is None

    hidden_TH, weight_VH = leaves(example)
    loss, *_ = token_loss(hidden_TH.detach(), layer_of(weight_VH), example.labels_T, example.loss_of, temperature=1.0)
    loss.backward()
    assert_gradient(grad_of(weight_VH), exact["grad_weight"])
    assert hidden_TH.grad is None


def test_without_gradients_the_loss_is_the_same_and_no_gradient_is_made():
    example = make_token_example(NUM_TOKENS, VOCAB_SIZE)
    exact = exact_results(example, 1.0, entropy_requires_grad=False)
    hidden_TH, weight_VH = leaves(example)
    results = []

    def forward_only() -> None:
        results[:] = token_loss(hidden_TH, layer_of(weight_VH, 1), example.labels_T, example.loss_of, temperature=1.0)

    with torch.no_grad():
        counter = count_live_bytes(forward_only)

    torch.testing.assert_close(results[0].double(), exact["loss"], atol=0.0, rtol=2e-6)
    assert not any(result.requires_grad for result in results)
    assert counter.peak < 4 * weight_VH.numel()


def test_no_tokens_give_a_zero_loss_with_zero_gradients():
    example = make_token_example(0, VOCAB_SIZE)
    hidden_TH, weight_VH = leaves(example)

    loss, log_probs_T, entropy_T = token_loss(
        hidden_TH, layer_of(weight_VH), example.labels_T, example.loss_of, temperature=1.0
    )
    loss.backward()

    assert loss.item() == 0.0
    assert log_probs_T.shape == entropy_T.shape == (0,)
    assert grad_of(hidden_TH).shape == hidden_TH.shape
    assert torch.equal(grad_of(weight_VH), torch.zeros_like(weight_VH))


def test_rows_beyond_the_vocabulary_have_no_effect():
    example = make_token_example(NUM_TOKENS, VOCAB_SIZE)
    exact = exact_results(example, 1.0, entropy_requires_grad=True)
    hidden_TH, weight_VH = leaves(example)
    padded_VH = torch.cat([weight_VH.detach(), torch.full((27, HIDDEN_SIZE), 9.0)]).requires_grad_()
    layer = OutputLayer(padded_VH, VOCAB_SIZE, ALONE, chunk_size=10)

    loss, log_probs_T, entropy_T = token_loss(
        hidden_TH, layer, example.labels_T, example.loss_of, temperature=1.0, entropy_requires_grad=True
    )
    loss.backward()

    torch.testing.assert_close(log_probs_T.double(), exact["log_probs"], atol=LOG_PROB, rtol=1e-6)
    torch.testing.assert_close(entropy_T.double(), exact["entropy"], atol=LOG_PROB, rtol=1e-6)
    assert_gradient(grad_of(hidden_TH), exact["grad_hidden"])
    assert_gradient(grad_of(padded_VH)[:VOCAB_SIZE], exact["grad_weight"])
    assert not grad_of(padded_VH)[VOCAB_SIZE:].any()


def test_logits_in_the_ten_thousands_stay_finite_and_right():
    """Use unit vectors as hidden states, so the logits are elements of the weight."""
    logits_TV = 1e4 * torch.randn(VOCAB_SIZE, NUM_TOKENS, generator=torch.Generator().manual_seed(0)).T
    labels_T = torch.arange(NUM_TOKENS)
    exact_TV = torch.log_softmax(logits_TV.double(), -1)
    hidden_TH, weight_VH = torch.eye(NUM_TOKENS, requires_grad=True), logits_TV.T.clone().requires_grad_()

    log_probs_T, entropy_T = log_probs_and_entropy(
        hidden_TH, layer_of(weight_VH), labels_T, temperature=1.0, entropy_requires_grad=True
    )
    (log_probs_T.sum() + entropy_T.sum()).backward()

    torch.testing.assert_close(
        log_probs_T.detach().double(), exact_TV.gather(1, labels_T[:, None]).squeeze(1), rtol=1e-6, atol=LOG_PROB
    )
    assert all(tensor.isfinite().all() for tensor in (entropy_T, grad_of(hidden_TH), grad_of(weight_VH)))


def test_entropy_reaches_from_zero_to_the_logarithm_of_the_vocabulary():
    certain_and_uniform_TH = torch.tensor([[1e4], [0.0]])
    weight_VH = torch.zeros(VOCAB_SIZE, 1)
    weight_VH[5] = 1.0

    _, entropy_T = log_probs_and_entropy(
        certain_and_uniform_TH, layer_of(weight_VH), torch.tensor([5, 5]), temperature=1.0
    )

    expected_T = torch.tensor([1.0, float(VOCAB_SIZE)]).log()
    torch.testing.assert_close(entropy_T, expected_T, atol=LOG_PROB, rtol=1e-6)


def test_entropy_keeps_its_precision_over_a_large_vocabulary():
    example = make_token_example(4, 151_936)
    exact = exact_results(example, 1.0, entropy_requires_grad=False)

    _, entropy_T = log_probs_and_entropy(
        example.hidden_TH, layer_of(example.weight_VH), example.labels_T, temperature=1.0
    )

    torch.testing.assert_close(entropy_T.double(), exact["entropy"], atol=LOG_PROB, rtol=0.0)


def test_bfloat16_gets_float32_results_and_sums_the_weights_gradient_in_float32():
    example = make_token_example(NUM_TOKENS, VOCAB_SIZE)
    hidden_TH, weight_VH = (x.bfloat16().requires_grad_() for x in (example.hidden_TH, example.weight_VH))
    rounded = TokenExample(hidden_TH.detach(), weight_VH.detach(), example.labels_T, example.coefficients_T)
    exact = exact_results(rounded, 1.0, entropy_requires_grad=False)

    loss, log_probs_T, entropy_T = token_loss(
        hidden_TH, layer_of(weight_VH, 1), example.labels_T, example.loss_of, temperature=1.0
    )
    loss.backward()

    assert loss.dtype == log_probs_T.dtype == entropy_T.dtype == torch.float32
    for ours, key in ((hidden_TH, "grad_hidden"), (weight_VH, "grad_weight")):
        assert grad_of(ours).dtype == torch.bfloat16
        # bfloat16 has 8 bits of precision, and 37 bfloat16 sums would lose three of them.
        assert (grad_of(ours) - exact[key]).abs().max() < 2**-7 * exact[key].abs().max()


def test_no_tensor_of_all_tokens_times_the_vocabulary_is_ever_allocated():
    num_tokens, vocab_size, chunk_size = 256, 2048, 16
    example = make_token_example(num_tokens, vocab_size)
    num_logits_bytes = 4 * num_tokens * vocab_size

    def whole() -> None:
        exact_results(example, 1.0, entropy_requires_grad=False)

    def by_token_loss() -> None:
        hidden_TH, weight_VH = leaves(example)
        layer = layer_of(weight_VH, chunk_size)
        loss, *_ = token_loss(
            hidden_TH, layer, example.labels_T, example.loss_of, temperature=1.0, entropy_requires_grad=True
        )
        loss.backward()

    def by_log_probs() -> None:
        hidden_TH, weight_VH = leaves(example)
        log_probs_T, entropy_T = log_probs_and_entropy(
            hidden_TH,
            layer_of(weight_VH, chunk_size),
            example.labels_T,
            temperature=1.0,
            entropy_requires_grad=True,
        )
        example.loss_of(log_probs_T, entropy_T, slice(None)).backward()

    assert count_live_bytes(whole).largest == 2 * num_logits_bytes
    for path in (by_token_loss, by_log_probs):
        counter = count_live_bytes(path)
        assert counter.largest == 2 * chunk_size / num_tokens * num_logits_bytes
        assert counter.peak < 0.5 * num_logits_bytes
        assert counter.live == 0
