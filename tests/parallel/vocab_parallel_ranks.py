"""Run by `launch`: for each case `out/NAME/RANK.pt` gets {path: results}.

A case is {"name", "parallel", "num_tokens", "vocab_size", "num_rows", "chunk_size", "temperature",
"entropy_requires_grad", "truncated"}, with `num_rows` rows of the output layer on each rank. The paths are
`token_loss`, plain and with Triton's kernels, and `log_probs_and_entropy`.
"""

from pathlib import Path

import torch
from running import run_cases
from vocab_parallel_examples import HIDDEN_SIZE, make_token_example

from megatron_bapo.model.vocab_parallel import OutputLayer, log_probs_and_entropy, token_loss
from megatron_bapo.parallel.groups import Axis, ParallelGroups

PATHS = ("token_loss", "fused token_loss", "log_probs_and_entropy")


def run_path(path: str, case: dict, axis: Axis) -> dict[str, torch.Tensor | None]:
    example = make_token_example(case["num_tokens"], case["vocab_size"], truncated=case["truncated"])
    padding = torch.full((axis.size * case["num_rows"] - case["vocab_size"], HIDDEN_SIZE), 7.0)
    rows = torch.cat([example.weight_VH, padding]).split(case["num_rows"])
    weight_VH, hidden_TH = rows[axis.rank].clone().requires_grad_(), example.hidden_TH.requires_grad_()
    fused = path == "fused token_loss"
    layer = OutputLayer(weight_VH, case["vocab_size"], axis, case["chunk_size"], fused, example.kept)
    options = {"temperature": case["temperature"], "entropy_requires_grad": case["entropy_requires_grad"]}
    if path.endswith("token_loss"):
        loss, log_probs_T, entropy_T = token_loss(hidden_TH, layer, example.labels_T, example.loss_of, **options)
    else:
        log_probs_T, entropy_T = log_probs_and_entropy(hidden_TH, layer, example.labels_T, **options)
        loss = example.loss_of(log_probs_T, entropy_T, slice(None))
    loss.backward()
    return {
        "loss": loss.detach(),
        "log_probs": log_probs_T.detach(),
        "entropy": entropy_T.detach(),
        "grad_hidden": hidden_TH.grad,
        "grad_weight": weight_VH.grad,
    }


def run_case(case: dict, out: Path, groups: ParallelGroups) -> None:
    results = {path: run_path(path, case, groups.tensor) for path in PATHS}
    torch.save(results, out / f"{groups.tensor.rank}.pt")


if __name__ == "__main__":
    run_cases(run_case)
