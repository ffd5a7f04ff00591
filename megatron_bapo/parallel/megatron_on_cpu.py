"""Import hook that lets Megatron-Core 0.16 run without CUDA.

Megatron-Core uses CUDA devices, streams and RNG states directly. On a machine without a GPU, the hook gives every
`megatron.*` module a copy of torch's namespace in which these names have CPU replacements. Torch itself is not patched,
except for methods that change behaviour only when a Megatron module calls them: patching `torch.empty` globally
corrupts the rotary buffers of `transformers`. Verified with megatron-core 0.16.1. Remove this module when Megatron-Core
takes the device from its config.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_PREFIX = "megatron."
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like")


class _NullStream:
    """Replacement for streams and events; every method does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _NullStream]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self


def _namespace(source: types.ModuleType, **replaced: Any) -> types.ModuleType:
    """Return a copy of a module's namespace with some names replaced."""
    copy = types.ModuleType(source.__name__)
    copy.__dict__.update(source.__dict__, **replaced)
    copy.__dict__["__getattr__"] = lambda name: getattr(source, name)
    return copy


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a tensor factory so that a CUDA device means the CPU."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _torch_for_megatron() -> types.ModuleType:
    cuda = _namespace(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        synchronize=lambda *_, **__: None,
        empty_cache=lambda *_, **__: None,
        Stream=_NullStream,
        Event=_NullStream,
        current_stream=lambda *_, **__: _NullStream(),
        default_stream=lambda *_, **__: _NullStream(),
        stream=lambda _: contextlib.nullcontext(),
        get_rng_state=lambda *_, **__: torch.get_rng_state(),
        set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
        manual_seed=lambda seed: torch.manual_seed(seed) and None,
    )
    return _namespace(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})


def _fix_rng(module: types.ModuleType) -> None:
    """Make the RNG tracker and activation recomputation save and restore the CPU's RNG state."""
    module.__dict__["_get_cuda_rng_state"] = lambda *_, **__: torch.get_rng_state()
    module.__dict__["_set_cuda_rng_state"] = lambda state, *_, **__: torch.set_rng_state(state)


def _fix_jit(module: types.ModuleType) -> None:
    """Disable `jit_fuser`: it is torch.compile, whose C++ builds cost more time than they save here."""
    module.disable_jit_fuser()


def _fix_moe(module: types.ModuleType) -> None:
    """Define the missing name of Transformer Engine's GEMM, and convert split sizes that are already on the CPU."""
    module.__dict__.setdefault("te_general_gemm", None)
    move = module.maybe_move_tensor_to_cpu

    def move_or_convert(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else move(tensor, False, record_stream)

    module.__dict__["maybe_move_tensor_to_cpu"] = move_or_convert


def _fix_uneven_splits(module: types.ModuleType) -> None:
    """Gather and scatter rank by rank: tensor-parallel experts have unequal token counts, which gloo rejects."""

    def all_gather(outputs: list[torch.Tensor], own: torch.Tensor, group: dist.ProcessGroup) -> None:
        outputs[group.rank()].copy_(own)
        for output, source in zip(outputs, dist.get_process_group_ranks(group), strict=True):
            dist.broadcast(output, source, group=group)

    def reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        for part, target in zip(inputs, dist.get_process_group_ranks(group), strict=True):
            summed = part.clone()
            dist.reduce(summed, target, group=group)
            if target == dist.get_rank():
                output.copy_(summed)

    distributed = _namespace(dist, all_gather=all_gather, reduce_scatter=reduce_scatter)
    module.__dict__["torch"] = _namespace(module.__dict__["torch"], distributed=distributed)


def _fix_offload(module: types.ModuleType) -> None:
    """Make the offloading optimizer copy every CPU parameter to a second fp32 tensor, in place of a copy from a GPU."""

    def split(self: Any, offload_fraction: float) -> tuple[Any, ...]:
        assert offload_fraction == 1.0, f"offload_fraction is {offload_fraction}; the CPU replacement supports only 1.0"
        copies = {p: p.detach().clone().float() for group in self.param_groups for p in group["params"]}
        host_groups = [{**g, "params": [copies[p] for p in g["params"]]} for g in self.param_groups if g["params"]]
        to_fp32 = {p: copy for p, copy in copies.items() if p.dtype != torch.float32}
        return host_groups, [], copies, {copy: p for p, copy in copies.items()}, to_fp32

    module.HybridDeviceOptimizer._get_sub_optimizer_param_groups = split


def _fix_optimizer_config(module: types.ModuleType) -> None:
    """Skip the version check of Transformer Engine for offload, which fails if Transformer Engine is not installed."""
    module.__dict__["is_te_min_version"] = lambda *_, **__: False


def _fix_latent_attention(module: types.ModuleType) -> None:
    """Correct the flag for Transformer Engine, which is true although mocks replace its classes."""
    module.__dict__["HAVE_TE"] = isinstance(module.__dict__["TELinear"], type)


_FIXES = {
    "megatron.core.tensor_parallel.random": _fix_rng,
    "megatron.core.jit": _fix_jit,
    "megatron.core.tensor_parallel.mappings": _fix_uneven_splits,
    "megatron.core.transformer.moe.moe_utils": _fix_moe,
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": _fix_offload,
    "megatron.core.optimizer.optimizer_config": _fix_optimizer_config,
    "megatron.core.transformer.multi_latent_attention": _fix_latent_attention,
}


def _called_by_megatron() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").startswith(_PREFIX)


def _patch_methods() -> None:
    """Patch `.type()`, which optimizers compare with 'torch.cuda.FloatTensor', and `.cuda()` for Megatron callers."""
    tensor_type, tensor_cuda, module_cuda = torch.Tensor.type, torch.Tensor.cuda, torch.nn.Module.cuda

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return tensor_type(self, dtype, *args, **kwargs)
        name = tensor_type(self)
        return name.replace("torch.", "torch.cuda.", 1) if _called_by_megatron() else name

    def tensor_cuda_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_by_megatron() else tensor_cuda(self, *args, **kwargs)

    def module_cuda_(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return self if _called_by_megatron() else module_cuda(self, *args, **kwargs)

    torch.Tensor.type = type_  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.cuda = tensor_cuda_  # pyright: ignore[reportAttributeAccessIssue]
    torch.nn.Module.cuda = module_cuda_  # pyright: ignore[reportAttributeAccessIssue]


class _Finder:
    """Meta-path finder that replaces `torch` in each Megatron module right after its execution."""

    namespace = _torch_for_megatron()

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(_PREFIX):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_swap(module: types.ModuleType) -> None:
            execute(module)
            if module.__dict__.get("torch") is torch:
                module.__dict__["torch"] = cls.namespace
            if name in _FIXES:
                _FIXES[name](module)

        spec.loader.exec_module = execute_and_swap
        return spec


@functools.cache
def install() -> None:
    """Install the hook. This must run before the first import of `megatron.core`."""
    assert not any(name.startswith("megatron.core") for name in sys.modules), (
        "megatron.core was imported before its CPU replacements; import it through megatron_bapo.parallel.megatron"
    )
    sys.meta_path.insert(0, _Finder)  # pyright: ignore[reportArgumentType]
    _patch_methods()
