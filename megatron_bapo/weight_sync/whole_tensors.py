"""Assembles slices into whole tensors, from which vLLM's weight loaders take their parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from megatron_bapo.weight_sync.plan import FINGERPRINT_WORDS, Slice, WeightPlan
from megatron_bapo.weight_sync.version_file import view_of


def whole_tensors(
    plan: WeightPlan, numbers: Sequence[int], slices: Iterable[tuple[Slice, torch.Tensor]], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the given buckets on a device once its slices have arrived; other parts are uninitialized.

    Values are copied, because vLLM may keep a tensor until its layer is complete, and the memory of the slices belongs
    to another owner and possibly to another GPU.
    """
    missing = Counter(part.name for number in numbers for part in plan.buckets[number].slices)
    unfinished: dict[str, torch.Tensor] = {}
    for part, value in slices:
        if part.name not in unfinished:
            unfinished[part.name] = torch.empty(plan.shapes[part.name], dtype=value.dtype, device=device)
        view_of(unfinished[part.name], part.box).copy_(value)
        missing[part.name] -= 1
        if not missing[part.name]:
            yield part.name, unfinished.pop(part.name)
    assert not unfinished, f"slices of {', '.join(unfinished)} did not arrive"


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return two sums over a tensor's bytes in row-major order, int64 [2], computed on the tensor's device.

    The second sum weights each word by its position, as in Fletcher's checksum. These sums do on a GPU what XXH3 does
    in host memory: they detect lost, changed and swapped words, and slices read from a wrong location. Both wrap around
    at 2^64, so that they are the same for any number of words at a time.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = torch.cat([data, data.new_zeros(-len(data) % 4)]) if len(data) % 4 else data
    parts = words.view(torch.int32).split(FINGERPRINT_WORDS)
    positions = torch.arange(1, len(parts[0]) + 1, device=words.device)
    sums = torch.stack([_sums(part, positions[: len(part)]) for part in parts])
    starts = FINGERPRINT_WORDS * torch.arange(len(parts), device=words.device)
    sums[:, 1] += starts * sums[:, 0]
    return sums.sum(dim=0)


def _sums(words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the sum of words and the sum of words times positions, int64 [2]; one copy of the words is in memory."""
    values = words.to(torch.int64)
    return torch.stack([values.sum(), values.mul_(positions).sum()])
