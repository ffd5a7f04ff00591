"""Two tensor-parallel ranks match float64 autograd on the gathered logits."""

from pathlib import Path

import pytest
import torch

from tests.parallel.launching import launch
from tests.parallel.vocab_parallel_examples import exact_results, make_token_example
from tests.tolerances import GRADIENT, LOG_PROB

DEFAULTS = {
    "parallel": {"world_size": 2, "tensor_model_parallel_size": 2},
    "num_tokens": 37, "vocab_size": 96, "num_rows": 48, "chunk_size": 7, "temperature": 1.0,
    "entropy_requires_grad": False, "truncated": False,
}  # fmt: skip
CASES = {
    "no-padding": {},
    "padded-last-rank": {"vocab_size": 91, "temperature": 0.7, "entropy_requires_grad": True},
    "last-rank-all-padding": {"vocab_size": 41, "temperature": 1.3, "entropy_requires_grad": True},
    "one-chunk": {"chunk_size": 64, "entropy_requires_grad": True},
    "no-tokens": {"num_tokens": 0},
    "truncated": {"vocab_size": 91, "temperature": 0.7, "entropy_requires_grad": True, "truncated": True},
    "truncated-log-probs": {"chunk_size": 64, "truncated": True},
}
PATHS = ("token_loss", "fused token_loss", "log_probs_and_entropy")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `NAME/RANK.pt` for every case."""
    root = tmp_path_factory.mktemp("vocab_parallel")
    cases = [{**DEFAULTS, **case, "name": name} for name, case in CASES.items()]
    launch("vocab_parallel_ranks.py", cases, root, world_size=2)
    return root


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_match_float64_on_the_gathered_logits(results: Path, name: str, path: str) -> None:
    case = {**DEFAULTS, **CASES[name]}
    example = make_token_example(case["num_tokens"], case["vocab_size"], truncated=case["truncated"])
    exact = exact_results(example, case["temperature"], entropy_requires_grad=case["entropy_requires_grad"])
    first, second = (torch.load(results / name / f"{rank}.pt")[path] for rank in range(2))

    for key in ("loss", "log_probs", "entropy"):
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key].double(), exact[key], atol=LOG_PROB, rtol=2e-6)
    padded = torch.cat([first["grad_weight"], second["grad_weight"]])
    grad_weight, of_padding = padded[: case["vocab_size"]], padded[case["vocab_size"] :]
    assert_close_to_largest(grad_weight, exact["grad_weight"])
    assert_close_to_largest(first["grad_hidden"] + second["grad_hidden"], exact["grad_hidden"])
    assert not of_padding.any()


def assert_close_to_largest(ours: torch.Tensor, exact: torch.Tensor) -> None:
    assert ours.shape == exact.shape
    largest = exact.abs().max().item() if exact.numel() else 0.0
    torch.testing.assert_close(ours.double(), exact, atol=GRADIENT * largest, rtol=0.0)
