"""Run by torchrun: every case of a JSON file; `out/RANK.pt` gets {case: {path: results}}.

A case is {"name", "num_tokens", "vocab_size", "num_rows", "chunk_size", "temperature", "entropy_requires_grad"}, with
`num_rows` rows of the output layer on each rank. The two paths are `token_loss` and `log_probs_and_entropy`.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from vocab_parallel_examples import HIDDEN_SIZE, make_token_example

from megatron_bapo.model.vocab_parallel import OutputLayer, log_probs_and_entropy, token_loss
from megatron_bapo.parallel.groups import Axis
from megatron_bapo.parallel.platform import start_distributed


def run_case(case: dict, axis: Axis, path: str) -> dict[str, torch.Tensor]:
    example = make_token_example(case["num_tokens"], case["vocab_size"])
    padding = torch.full((axis.size * case["num_rows"] - case["vocab_size"], HIDDEN_SIZE), 7.0)
    rows = torch.cat([example.weight_VH, padding]).split(case["num_rows"])
    weight_VH, hidden_TH = rows[axis.rank].clone().requires_grad_(), example.hidden_TH.requires_grad_()
    layer = OutputLayer(weight_VH, case["vocab_size"], axis, case["chunk_size"])
    options = {"temperature": case["temperature"], "entropy_requires_grad": case["entropy_requires_grad"]}
    if path == "token_loss":
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


def main() -> None:
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    start_distributed(timeout_s=60)
    axis = Axis(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    results = {
        case["name"]: {path: run_case(case, axis, path) for path in ("token_loss", "log_probs_and_entropy")}
        for case in cases
    }
    torch.save(results, out / f"{axis.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
