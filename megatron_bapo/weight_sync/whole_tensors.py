"""Puts slices together to whole tensors, of which vLLM's loaders cut out their parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from megatron_bapo.weight_sync.plan import Slice, WeightPlan
from megatron_bapo.weight_sync.version_file import view_of


def whole_tensors(
    plan: WeightPlan, numbers: Sequence[int], slices: Iterable[tuple[Slice, torch.Tensor]], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the given buckets on a device, once its slices are there; elsewhere it is uninitialised.

    Values are copied: vLLM may hold what it gets until a layer is complete, and the slices' memory is not its own, nor
    need it be of the same GPU.
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
    assert not unfinished, f"slices of {', '.join(unfinished)} did not come"


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Two sums over a tensor's bytes in row-major order, int64 [2], computed where the tensor is.

    The second sum weighs each word by its place, as Fletcher's checksum does. What BLAKE3 finds in host memory these
    find in a GPU's: lost, changed and swapped words, and slices that were read from another place.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = torch.cat([data, data.new_zeros(-len(data) % 4)]) if len(data) % 4 else data
    values = words.view(torch.int32).to(torch.int64)
    places = torch.arange(1, len(values) + 1, device=values.device)
    return torch.stack([values.sum(), (values * places).sum()])
