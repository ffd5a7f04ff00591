"""One rank of a large process group without its peers, its weights and its memory.

Tensors are on torch's meta device: they have shapes, dtypes and storages, but no data. Collectives return at once
(torch's fake process group). A dispatch mode sees every operator, so it puts tensors on the meta device, and knows
which storages live and what each group communicates. It also answers the two questions that tensors without data
cannot: the value of a scalar, and the shape of the hidden states that another pipeline stage announces.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megatron_bapo.errors import UserError
from megatron_bapo.parallel.megatron import parallel_state

FLOAT_SCALAR = 0.5
"""Value of every floating-point scalar that is read. It is finite, so that no update is skipped."""

_type = torch.Tensor.type


class Group(NamedTuple):
    """A process group; several may have the same ranks."""

    name: str
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Group:
        return cls(group.group_name, tuple(dist.get_process_group_ranks(group)))


class FakeRank(TorchDispatchMode):
    """Counts the bytes of live storages, and the bytes that this rank sends in each process group."""

    def __init__(self, hidden_shape: Sequence[int], num_routed: int = 0) -> None:
        """`hidden_shape` is the shape of the hidden states between pipeline stages.

        `num_routed` is the number of tokens of a micro-batch that this rank sends to experts.
        """
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.calls: Counter[tuple[Group, str]] = Counter()
        """Number of calls by the group and the kind of operation."""
        self.sent_bytes: Counter[tuple[Group, str]] = Counter()
        """Bytes that a ring sends from this rank, by the same keys."""
        self._hidden_shape, self._num_routed = tuple(hidden_shape), num_routed
        self._sizes: dict[int, int] = {}
        self._shapes: set[int] = set()
        self._on_device = True

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Do not count storages that are allocated in this context: they are in host memory."""
        self._on_device = False
        try:
            yield
        finally:
            self._on_device = True

    def forget_traffic(self) -> None:
        """Count communication from now on only."""
        self.calls.clear()
        self.sent_bytes.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return self._scalar(args[0])
        if func.namespace == "c10d":
            return self._communicate(func, args)
        if func is torch.ops.aten.masked_select.default:  # the tokens that an expert gets, in the order of experts
            func, args = torch.ops.aten.new_empty.default, (args[0], (self._num_routed,))
        on_meta = {tensor.is_meta for tensor in _tensors((args, *kwargs.values()))}
        if on_meta == {False}:  # small values that come from NumPy stay known
            return func(*args, **kwargs)
        if False in on_meta:
            args, kwargs = tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        if "device" in kwargs or (not on_meta and _takes_device(func)):
            kwargs = kwargs | {"device": torch.device("meta")}
        result = func(*args, **kwargs)
        if self._on_device:
            for tensor in _tensors(result):
                self._count(tensor.untyped_storage())
        return result

    def _scalar(self, tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage()._cdata in self._shapes:
            return self._hidden_shape[int(tensor.storage_offset())]
        if tensor.dtype == torch.bool:
            return True
        return FLOAT_SCALAR if tensor.dtype.is_floating_point else 1

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.live_bytes += self._sizes[key]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)

    def _communicate(self, func: Any, args: tuple[Any, ...]) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        groups = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
        group = Group.of(dist.ProcessGroup.unbox(groups[0]))
        kind, sent = _sent(name, args, len(group.ranks))
        if kind == "receive" and args[0][0].dtype == torch.int64:
            storage = args[0][0].untyped_storage()
            self._shapes.add(storage._cdata)
            weakref.finalize(storage, self._shapes.discard, storage._cdata)  # another storage may get its address
        if len(group.ranks) > 1:
            self.calls[group, kind] += 1
            self.sent_bytes[group, kind] += sent
        work = FakeWork().boxed()
        return (args[0], work) if len(func._schema.returns) == 2 else work


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


@functools.cache
def _takes_device(func: torch._ops.OpOverload) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _sent(name: str, args: tuple[Any, ...], size: int) -> tuple[str, int]:
    """Return the kind of a c10d operation and the bytes that a ring algorithm sends from one of `size` ranks.

    Raises ValueError for tensors that do not fit the number of ranks.
    """
    first, second = (sum(tensor.nbytes for tensor in _tensors(part)) for part in (args[:1], args[1:2]))
    match name:
        case "allreduce" | "allreduce_coalesced":
            return "all-reduce", 2 * first * (size - 1) // size
        case "allgather_base" | "allgather" | "allgather_into_tensor_coalesced":
            _check(name, whole=first, part=second, size=size)
            return "all-gather", second * (size - 1)
        case "reduce_scatter_base" | "reduce_scatter" | "reduce_scatter_tensor_coalesced":
            _check(name, whole=second, part=first, size=size)
            return "reduce-scatter", first * (size - 1)
        case "alltoall_base" | "alltoall":
            return "all-to-all", second * (size - 1) // size
        case "send":
            return "send", first
        case "recv":
            return "receive", 0
        case _:
            return name, first


def _check(name: str, *, whole: int, part: int, size: int) -> None:
    if whole != part * size:
        raise ValueError(f"{name} over {size} ranks: {whole} bytes are not {size} parts of {part} bytes")


class _GpuNorm(torch.autograd.Function):
    """RMSNorm as torch's GPU kernel saves it: the input, and one factor per row. It computes nothing."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), None if weight is None else torch.empty_like(weight)


def _gpu_norm(hidden: torch.Tensor, _: Any, weight: torch.Tensor | None = None, eps: float = 0.0) -> torch.Tensor:
    """Replacement of `rms_norm` that allocates what the GPU kernel does."""
    return _GpuNorm.apply(hidden, weight)  # pyright: ignore[reportReturnType]


def _swiglu(gate_and_up: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """Replacement of Megatron's SwiGLU that allocates what its compiled kernel does: the result only."""
    return gate_and_up.new_empty(*gate_and_up.shape[:-1], gate_and_up.size(-1) // 2)


def _swiglu_gradient(_: torch.Tensor, gate_and_up: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate_and_up)


def _weighted_swiglu_gradient(
    _: torch.Tensor, gate_and_up: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(gate_and_up), torch.empty_like(weights)


def _flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Replacement of SDPA by its fused kernel; on the meta device SDPA stores the scores of all pairs of tokens."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, *query.new_empty(2).unbind())
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, is_causal=is_causal, attn_mask=attn_mask, scale=scale)[0]


def _gpu_dropout(hidden: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Replacement of `torch.nn.functional.dropout` that saves a mask of one byte per element, as the GPU kernel."""
    return torch.native_dropout(hidden, p, training)[0] if training and p > 0.0 else hidden


def _gpu_type(tensor: torch.Tensor, dtype: Any = None, **options: Any) -> Any:
    """Replacement of `torch.Tensor.type`, which Megatron's optimizers ask: as if the tensor was on a GPU."""
    return f"torch.cuda.{_type(tensor).rpartition('.')[2]}" if dtype is None else _type(tensor, dtype, **options)


def _numbers(tensor: torch.Tensor) -> Any:
    """Replacement of `torch.Tensor.tolist`, which reads the storage: one scalar after the other is asked for."""
    return [_numbers(part) for part in tensor.unbind()] if tensor.dim() else tensor.item()


def _own_value(values: list[Any], value: Any, group: Any = None) -> None:
    """Replacement of `all_gather_object`: as if all ranks had this rank's value."""
    values[:] = [value] * len(values)


def _norm_of(_: Any, __: Any, tensor_lists: list[list[torch.Tensor]], *___: Any) -> tuple[torch.Tensor, None]:
    """Replacement of Megatron's multi-tensor L2 norm, whose CPU version builds a tensor from Python numbers."""
    return torch.stack([tensor.float().norm() for tensor in tensor_lists[0]]).norm(), None


def _balanced(num_routed: int) -> Callable[..., Any]:
    """Return a replacement of Megatron's copy of token counts to the host: all experts and ranks get equally many."""

    def counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if not torch.is_tensor(tensor):
            return tensor
        values = np.full(tuple(tensor.shape), num_routed // tensor.numel(), dtype=np.int64)
        return values if as_numpy else torch.from_numpy(values)

    return counts


@contextmanager
def process_group(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a fake process group in this context. Raises UserError if this process already has a group."""
    if dist.is_initialized():
        raise UserError("a rehearsal needs a process without a process group")
    with patch.dict(dist.Backend.backend_capability, fake=["cpu", "cuda", "meta"]):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


@contextmanager
def fake_rank(hidden_shape: Sequence[int], num_routed: int = 0) -> Iterator[FakeRank]:
    """Create all tensors of this context on the meta device, and count them; the arguments are those of FakeRank."""
    mode = FakeRank(hidden_shape, num_routed)
    with ExitStack() as stack:
        stack.enter_context(patch("torch.nn.functional.rms_norm", _gpu_norm))
        stack.enter_context(patch("torch.nn.functional.scaled_dot_product_attention", _flash_attention))
        stack.enter_context(patch("torch.nn.functional.dropout", _gpu_dropout))
        stack.enter_context(patch.object(torch.Tensor, "type", _gpu_type))
        stack.enter_context(patch.object(torch.Tensor, "tolist", _numbers))
        stack.enter_context(patch.object(dist, "all_gather_object", _own_value))
        stack.enter_context(patch("megatron.core.optimizer.clip_grads.multi_tensor_applier", _norm_of))
        compiled: dict[str, Any] = {"swiglu": _swiglu, "weighted_swiglu": _swiglu, "swiglu_back": _swiglu_gradient}
        compiled["weighted_swiglu_back"] = _weighted_swiglu_gradient
        stack.enter_context(patch.multiple("megatron.core.fusions.fused_bias_swiglu", **compiled))
        moves_counts = "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu"
        stack.enter_context(patch(moves_counts, _balanced(num_routed)))
        yield stack.enter_context(mode)
