"""BAPO's loss, including the bounds, against a plain PPO-clip loss.

The plain loss is the textbook version: exp, clamp, minimum, weighted sum, without mask, dropped tokens or statistics.
BAPO's loss is the search for the bounds over all tokens, `policy_loss` with them, and the statistics of an update.
There are three views:

- `whole loss`: from hidden states through the output layer to the gradients of both, in chunks as in an update;
- `train step`: one on-policy update of a small model (without scoring pass, which `bench.bound_scopes` measures),
  against the same update with fixed bounds;
- `loss alone`: forward and backward on a million precomputed log-probs, where a loss costs almost nothing.

Measured with one thread in float32, as medians of interleaved repeats; times are CPU times.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time

import torch
from torch import Tensor

from bench.report import medians_s, option_parser, report
from bench.train_step import LEARNING_RATE, LENGTHS, SHAPES, make_config, make_examples, make_model
from megatron_bapo.algorithm.clip_bounds import find_clip_bounds
from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.policy_loss import policy_loss, policy_statistics
from megatron_bapo.config.algorithm import AlgorithmConfig
from megatron_bapo.model.vocab_parallel import OutputLayer, token_loss
from megatron_bapo.parallel.groups import Axis, ParallelGroups, create_groups
from megatron_bapo.parallel.platform import start_distributed
from megatron_bapo.trainer.policy_update import update_policy
from megatron_bapo.trainer.worker import Worker, create_worker

NUM_LOSS_TOKENS = 1_000_000
SIZES = 4096, 256, 16_384, 1024
"""Tokens, hidden size, vocabulary, tokens per chunk."""
BAPO = AlgorithmConfig(objective="bapo")
CPU = torch.device("cpu")
LOW, HIGH = 0.8, 1.2


def make_tokens(current_T: Tensor) -> LossTokens:
    """Return tokens with behaviour log-probs near the current ones; a few percent exceed the bounds."""
    generator, num = torch.Generator().manual_seed(0), len(current_T)
    noise_T, advantages_T = (torch.randn(num, generator=generator).to(current_T.device) for _ in range(2))
    return LossTokens(current_T.detach() + 0.1 * noise_T, advantages_T, torch.full_like(advantages_T, 1 / num))


def plain_loss(log_probs_T: Tensor, tokens: LossTokens) -> Tensor:
    ratio_T = (log_probs_T - tokens.behaviour_log_probs_T).exp()
    surrogate_T = torch.minimum(ratio_T * tokens.advantages_T, ratio_T.clamp(LOW, HIGH) * tokens.advantages_T)
    return -(tokens.weights_T * surrogate_T).sum()


def bounds(log_probs_T: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    found = find_clip_bounds(log_probs_T - tokens.behaviour_log_probs_T, tokens.advantages_T, BAPO.clip_bounds)
    return found.low.float(), found.high.float()


def loss_alone(
    num: int = NUM_LOSS_TOKENS, device: torch.device = CPU, *, fused: bool = False
) -> dict[str, Callable[[], object]]:
    """Return the tasks on precomputed log-probs, detached for the search. `fused` uses Triton's kernel in BAPO."""
    current_T = (torch.randn(num, generator=torch.Generator().manual_seed(1)) - 5).to(device).requires_grad_()
    tokens, entropy_T = make_tokens(current_T), torch.zeros(num, device=device)

    def plain() -> None:
        current_T.grad = None
        plain_loss(current_T, tokens).backward()

    def bapo() -> None:
        current_T.grad = None
        low, high = bounds(current_T.detach(), tokens)
        policy_loss(current_T, entropy_T, tokens, low, high, BAPO, fused=fused).backward()
        policy_statistics(current_T.detach(), tokens, low, high, BAPO)

    return {"plain": plain, "bapo": bapo}


def whole_loss(
    axis: Axis,
    sizes: tuple[int, int, int, int] = SIZES,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    *,
    fused: bool = False,
) -> dict[str, Callable[[], object]]:
    """Return the tasks from hidden states. The search uses an earlier pass; `fused` uses Triton's kernels in both."""
    num_tokens, hidden_size, vocab_size, chunk_size = sizes
    torch.manual_seed(0)
    hidden_TH = torch.randn(num_tokens, hidden_size).to(device, dtype).requires_grad_()
    weight_VH = torch.randn(vocab_size, hidden_size).mul_(hidden_size**-0.5).to(device, dtype).requires_grad_()
    labels_T = torch.randint(vocab_size, (num_tokens,)).to(device)
    layer = OutputLayer(weight_VH, vocab_size, axis, chunk_size, fused)
    with torch.no_grad():
        _, current_T, _ = token_loss(hidden_TH, layer, labels_T, lambda x, _, __: x.sum(), temperature=1.0)
    tokens = make_tokens(current_T)

    def run(loss_of: Callable[[Tensor, Tensor, slice], Tensor]) -> Tensor:
        hidden_TH.grad = weight_VH.grad = None
        loss, log_probs_T, _ = token_loss(hidden_TH, layer, labels_T, loss_of, temperature=1.0)
        loss.backward()
        return log_probs_T

    def plain() -> None:
        run(lambda log_probs_C, _, chunk: plain_loss(log_probs_C, tokens[chunk]))

    def bapo() -> None:
        low, high = bounds(current_T, tokens)
        log_probs_T = run(
            lambda log_probs_C, entropy_C, chunk: policy_loss(
                log_probs_C, entropy_C, tokens[chunk], low, high, BAPO, fused=fused
            )
        )
        policy_statistics(log_probs_T, tokens, low, high, BAPO)

    return {"plain": plain, "bapo": bapo}


def train_step(groups: ParallelGroups, folder: Path) -> dict[str, Callable[[], object]]:
    """Return the on-policy update tasks of one worker, with fixed bounds and with BAPO's."""
    shape = SHAPES["4M"]
    make_model(folder, shape)
    config = make_config(folder, folder / "run")
    worker = create_worker(config, folder, groups)
    advantages = torch.randn(len(LENGTHS["ragged lengths"]), generator=torch.Generator().manual_seed(2)).tolist()
    examples = [
        replace(example, advantage=advantage)
        for example, advantage in zip(
            make_examples(LENGTHS["ragged lengths"], shape["vocab_size"]), advantages, strict=True
        )
    ]

    def update(of: Worker) -> None:
        update_policy(of, examples, lr=LEARNING_RATE, on_policy=True)

    ppo = config.model_copy(update={"algorithm": AlgorithmConfig(objective="ppo")})
    return {"plain": partial(update, replace(worker, config=ppo)), "bapo": partial(update, worker)}


def main() -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        start_distributed(timeout_s=60.0, store_file=root / "rendezvous")
        groups = create_groups(make_config(root, root).parallel, seed=0, timeout_s=60.0)
        views = {
            "whole loss": medians_s(whole_loss(groups.tensor), num_repeats=7, clock=process_time),
            "train step": medians_s(train_step(groups, root / "model"), num_repeats=7, clock=process_time),
            "loss alone": medians_s(loss_alone(), num_repeats=15, clock=process_time),
        }
        torch.distributed.destroy_process_group()
    rows, ratios, figures = [], {}, {}
    for name, seconds in views.items():
        key = name.replace(" ", "_")
        ratios[key] = round(seconds["bapo"] / seconds["plain"], 3)
        figures |= {f"{key}_{version}_s": value for version, value in seconds.items()}
        rows.append([name, seconds["plain"], seconds["bapo"], ratios[key]])
    report("policy_loss", ["view", "PPO-clip, s", "BAPO, s", "ratio"], rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
