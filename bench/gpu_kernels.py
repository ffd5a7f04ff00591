"""Kernels of the output layer against plain copies on the GPU, and BAPO's loss against plain PPO-clip.

Measured with Qwen2.5's vocabulary of 151,936 and the 3B model's hidden size, in bfloat16:

- `sums`, `gradient`: the two kernels over a chunk's logits, as the rate of the bytes that must be moved (logits are
  read once; read and written once), against a copy;
- `token loss`: from hidden states to both gradients, 8k tokens, Triton against torch's operators, time and peak memory;
- `loss alone`, `whole loss`: the views of `bench.policy_loss`, including BAPO's bounds and statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from bench.gpu import copy_bytes_per_s, report_and_save, require_gpu, seconds_of
from bench.policy_loss import loss_alone, whole_loss
from bench.report import option_parser
from megatron_bapo.model.vocab_kernels import FusedShard
from megatron_bapo.model.vocab_parallel import OutputLayer, token_loss
from megatron_bapo.model.vocab_shard import Softmax
from megatron_bapo.parallel.groups import Axis
from megatron_bapo.parallel.platform import local_device, release_cached_memory, take_peak_memory


@dataclass(frozen=True)
class Size:
    num_tokens: int
    chunk_size: int
    vocab_size: int
    hidden_size: int
    num_loss_tokens: int


NUM_CALLS = 20
FULL = Size(8192, 1024, 151_936, 2048, 1_000_000)
# An axis of one process calls no collective, so it needs no group.
ALONE = Axis(cast(dist.ProcessGroup, None), rank=0, size=1)


@torch.no_grad()
def kernel_bytes_per_s(size: Size) -> dict[str, float]:
    """Return the bytes per second of each kernel over one chunk."""
    device, num = local_device(), size.chunk_size
    weight_VH = torch.randn(size.vocab_size, size.hidden_size, device=device).mul_(size.hidden_size**-0.5).bfloat16()
    hidden_CH = torch.randn(num, size.hidden_size, device=device).bfloat16()
    label_C = torch.randint(size.vocab_size, (num,), device=device)
    shard = FusedShard(weight_VH, size.vocab_size, num)
    max_C, log_sum_C, entropy_C, _ = shard.sums(hidden_CH, label_C, 1.0)
    softmax = Softmax(-log_sum_C, label_C, torch.ones_like(label_C, dtype=torch.bool), max_C, entropy_C)
    # The results are only right once, because the kernel overwrites its input; the time stays the same. Many calls in a
    # row hide the time of a launch, as in a training pass.
    seconds = seconds_of(
        {
            "sums": lambda: [shard.sums_of_logits(label_C, 1.0) for _ in range(NUM_CALLS)],
            "gradient": lambda: [shard.grad_logits(softmax, entropy_C, entropy_C) for _ in range(NUM_CALLS)],
        }
    )
    logits = NUM_CALLS * num * size.vocab_size * weight_VH.element_size()
    return {"sums": logits / seconds["sums"], "gradient": 2 * logits / seconds["gradient"]}


def token_losses(size: Size) -> tuple[dict[str, float], dict[str, int]]:
    """Return seconds and peak additional bytes of the loss and its gradients, by path."""
    device = local_device()
    hidden_TH = torch.randn(size.num_tokens, size.hidden_size, device=device).bfloat16().requires_grad_()
    weight_VH = torch.randn(size.vocab_size, size.hidden_size, device=device).mul_(size.hidden_size**-0.5)
    weight_VH = weight_VH.bfloat16().requires_grad_()
    labels_T = torch.randint(size.vocab_size, (size.num_tokens,), device=device)

    def run(fused: bool) -> None:
        hidden_TH.grad = weight_VH.grad = None
        layer = OutputLayer(weight_VH, size.vocab_size, ALONE, size.chunk_size, fused)
        loss, *_ = token_loss(hidden_TH, layer, labels_T, lambda log_probs, *_: -log_probs.sum(), temperature=1.0)
        loss.backward()

    paths: dict[str, Callable[[], object]] = {"Triton": lambda: run(True), "torch": lambda: run(False)}
    seconds, peaks = seconds_of(paths), {}
    for name, task in paths.items():
        hidden_TH.grad = weight_VH.grad = None
        release_cached_memory()
        take_peak_memory()
        task()
        peaks[name] = (take_peak_memory() or (0, 0))[0]
    return seconds, peaks


def losses(size: Size) -> dict[str, dict[str, float]]:
    """Return the seconds of the plain PPO-clip loss and of BAPO's, by view."""
    return {
        "loss alone": seconds_of(loss_alone(size.num_loss_tokens, local_device(), fused=True)),
        "whole loss": seconds_of(
            whole_loss(
                ALONE,
                (size.num_tokens, size.hidden_size, size.vocab_size, size.chunk_size),
                local_device(),
                torch.bfloat16,
                fused=True,
            )
        ),
    }


def main() -> None:
    require_gpu()
    copied = copy_bytes_per_s()
    rows: list[list[object]] = [["copy", "GB/s", copied / 1e9, 1.0]]
    ratios, figures = {}, {"copy_gb_s": copied / 1e9}
    for name, speed in kernel_bytes_per_s(FULL).items():
        rows.append([name, "GB/s", speed / 1e9, speed / copied])
        ratios[f"{name}_of_copy"], figures[f"{name}_gb_s"] = round(speed / copied, 3), round(speed / 1e9)
    seconds, peaks = token_losses(FULL)
    for name, value in seconds.items():
        rows.append([f"token loss, {name}", "s", value, value / seconds["torch"]])
        rows.append([f"token loss, {name}", "peak GiB", peaks[name] / 2**30, peaks[name] / peaks["torch"]])
        figures |= {f"token_loss_{name}_s": value, f"token_loss_{name}_peak_gib": peaks[name] / 2**30}
    ratios["token_loss_time"] = round(seconds["Triton"] / seconds["torch"], 3)
    ratios["token_loss_peak"] = round(peaks["Triton"] / peaks["torch"], 3)
    for view, found in losses(FULL).items():
        key = view.replace(" ", "_")
        rows.append([f"{view}, BAPO over PPO-clip", "s", found["bapo"], found["bapo"] / found["plain"]])
        ratios[key] = round(found["bapo"] / found["plain"], 3)
        figures |= {f"{key}_{name}_s": value for name, value in found.items()}
    report_and_save("gpu_kernels", ["what", "unit", "measured", "ratio"], rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
