"""Megatron's Adam over the model chunks of one rank: plain, distributed, chained for experts, or offloaded to the host.

Megatron keeps an fp32 main parameter and two moments in a layout that depends on the optimizer: whole parameters, or
pieces of flat buffers sharded over the ranks that share them. `Optimizer.read` and `Optimizer.write` hide the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from megatron_bapo.config.optimizer import OptimizerConfig as OptimizerSettings
from megatron_bapo.model.architecture import DTYPES
from megatron_bapo.model.build import finish_param_gather
from megatron_bapo.model.precision import set_values
from megatron_bapo.parallel.collectives import max_over, receive, send, sum_over
from megatron_bapo.parallel.groups import Axis, ParallelGroups
from megatron_bapo.parallel.megatron import (
    DistributedDataParallel,
    DistributedOptimizer,
    HybridDeviceOptimizer,
    OptimizerConfig,
    clip_grad_by_total_norm_fp32,
    get_megatron_optimizer,
)
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.trainer.adam import Bfloat16MomentsAdamW

State = Literal["main", "exp_avg", "exp_avg_sq"]
"""Optimizer states of a parameter: the fp32 main parameter and Adam's moments."""
STATES: tuple[State, ...] = ("main", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepResult:
    grad_norm: float
    """Global L2 norm of the gradients before clipping."""
    skipped: bool
    """Whether the update was skipped because a gradient was not finite; parameters and moments are then unchanged."""


@dataclass(frozen=True)
class _Piece:
    """The part of one parameter that this rank's Adam updates."""

    adam: torch.optim.Optimizer
    handle: torch.Tensor
    """Key of the piece in Adam's state: its fp32 values or, under offload, the piece of the model parameter."""
    start: int
    stop: int
    """Range [start, stop) in the flattened parameter."""

    def tensor(self, state: State) -> torch.Tensor:
        """Return a flat view of this piece of one state."""
        adam: Any = self.adam
        if state != "main":
            return adam.state[self.handle][state].view(-1)
        offloaded = isinstance(adam, HybridDeviceOptimizer)
        return (adam.param_to_inner_param[self.handle] if offloaded else self.handle).detach().view(-1)


class Optimizer:
    """Adam with fp32 main parameters, and moments in fp32 or bfloat16.

    The moments are allocated at construction, so checkpoints can be loaded.

    All ranks must call every method in the same order. The DDP configuration of the chunks says whether the state is
    sharded over data-parallel ranks.
    """

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], groups: ParallelGroups, settings: OptimizerSettings
    ) -> None:
        self._chunks = list(chunks)
        self._groups = groups
        self._clip_grad = settings.clip_grad
        self._chain = _create(self._chunks, settings)
        self._members: list[Any] = self._chain.chained_optimizers
        shrink_main_parameters(self._members)
        self._moments_dtype = DTYPES[settings.moments_dtype]
        if self._moments_dtype == torch.bfloat16:
            for member in self._members:  # the groups stay the same objects, which Megatron refers to
                member.optimizer = Bfloat16MomentsAdamW(member.optimizer.param_groups)
        self._decoupled: bool = self._chain.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        self._pieces = dict(chain.from_iterable(_pieces(member, self._chunks) for member in self._members))
        self._spans = self._gather_spans()
        for group in self._chain.param_groups:
            # Megatron sets this in its scheduler, which is not used here. Norms and biases are not decayed.
            group["weight_decay"] = settings.weight_decay * group.get("wd_mult", 1.0)
        # NCCL needs all ranks of a group in its first operation. `read` involves only some of them, and so do exchanges
        # over the data axis (`token_values.py`), whose group is not that of the data and context axes even without
        # context parallelism.
        sum_over(groups.data, groups.data_context, groups.expert_data)(torch.zeros(1, device=local_device()))
        self.reset_moments()

    @property
    def adam_name(self) -> str:
        """Name of the Adam in use: torch's AdamW, or the fused Adam of Transformer Engine or apex if installed."""
        return " and ".join(sorted({f"{type(a).__module__.split('.')[0]} {type(a).__name__}" for a in self._adams()}))

    def zero_grad(self) -> None:
        """Zero all gradients. Call this before the first backward pass of an update."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._chain.zero_grad()

    def step(self, lr: float) -> StepResult:
        """Clip and apply the gradients. If any gradient on any rank is not finite, all ranks skip the update."""
        for group in self._chain.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        self._chain.prepare_grads()
        norm = float(self._chain.get_grad_norm())
        if not self._finite_on_all_ranks(norm):
            return StepResult(norm, skipped=True)
        if self._clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(
                self._parameters(),
                max_norm=self._clip_grad,
                total_norm=norm,
                use_decoupled_grad=self._decoupled,
            )
        self._apply_gradients()
        self._num_steps += 1
        return StepResult(norm, skipped=False)

    @torch.no_grad()
    def _apply_gradients(self) -> None:
        """Let all members step, and then gather the parameters, unless the next forward pass does.

        The step of a DistributedOptimizer gathers the parameters of all members, so with experts all would be gathered
        twice. That of its base class gathers none.
        """
        for member in self._members:
            sharded = isinstance(member, DistributedOptimizer)
            (super(DistributedOptimizer, member) if sharded else member).step_with_ready_grads()
        for chunk in self._chunks:
            if chunk.ddp_config.use_distributed_optimizer and not chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()

    def _finite_on_all_ranks(self, norm: float) -> bool:
        """Whether the gradients of all ranks are finite.

        The global norm counts every element once. Elements that tensor-parallel ranks replicate are checked on each of
        these ranks.
        """
        name = "decoupled_grad" if self._decoupled else "grad"
        own_norm = get_total_norm([getattr(parameter, name) for parameter in self._parameters()])
        finite = math.isfinite(norm) and math.isfinite(own_norm.item())
        broken = torch.tensor(0.0 if finite else 1.0, device=local_device())
        max_over(self._groups.tensor, self._groups.data_context, self._groups.pipeline)(broken)
        return broken.item() == 0.0

    @torch.no_grad()
    def read(self, parameter: torch.nn.Parameter, state: State, *, to: int = 0) -> torch.Tensor | None:
        """Return one state of this rank's whole shard of a parameter, in the parameter's shape and on its device.

        Collective over the ranks that share the parameter (`sharing_axis`). Rank `to` of that axis gets the result, the
        others get None. The result may be a view of the optimizer's memory; do not modify it.
        """
        own = self._own(parameter, state).to(parameter.device)
        return self.gather(parameter, own, self._groups, to=to)

    def gather(
        self, parameter: torch.nn.Parameter, own: torch.Tensor, groups: ParallelGroups, *, to: int
    ) -> torch.Tensor | None:
        """Return this rank's whole shard of a parameter from the flat pieces `own` of the ranks that share it.

        As `read`, but with pieces that the caller has, and through `groups`, which may be others than the optimizer's
        with the same ranks.
        """
        axis, senders = sharing_axis(parameter, groups), self._senders(parameter, to)
        if axis.rank != to:
            if axis.rank in senders:
                send(own, axis, to=to)
            return None
        if own.numel() == parameter.numel():
            return own.view(parameter.shape)
        whole = own.new_empty(parameter.numel())
        if to in senders:
            whole[slice(*senders.pop(to))].copy_(own)
        receive({rank: whole[slice(*span)] for rank, span in senders.items()}, axis)
        return whole.view(parameter.shape)

    @torch.no_grad()
    def write(self, parameter: torch.nn.Parameter, state: State, tensor: torch.Tensor) -> None:
        """Set one state from this rank's whole shard, in the parameter's shape. The main state also sets the model.

        All ranks that share the parameter pass the same values, and each keeps its own piece.
        """
        assert tensor.shape == parameter.shape, f"{state} has shape {tensor.shape}, its parameter {parameter.shape}"
        if state == "main":
            finish_param_gather(self._chunks)  # a pending gather would restore the old values
            set_values(parameter, tensor)
        if (piece := self._pieces.get(parameter)) is not None:
            piece.tensor(state).copy_(tensor.reshape(-1)[piece.start : piece.stop])

    def write_weights(self, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        """Set the main state, and with it the model parameter, as `write` does."""
        self.write(parameter, "main", tensor)

    def sharing_axis(self, parameter: torch.nn.Parameter) -> Axis:
        """Return the axis of the ranks with the same shard of a parameter."""
        return sharing_axis(parameter, self._groups)

    @property
    def num_steps(self) -> int:
        """Number of updates in the moments, which Adam's bias correction uses. Can be set."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._num_steps = value
        for adam in self._adams():
            if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
                for entry in adam.state.values():
                    entry["step"].fill_(value)
            else:  # Transformer Engine and apex keep the step count per parameter group
                for group in adam.param_groups:
                    group["step"] = value

    def reset_moments(self) -> None:
        """Zero Adam's moments and step count."""
        for adam in self._adams():
            torch_adam = isinstance(adam, torch.optim.Adam | torch.optim.AdamW)
            for group in adam.param_groups:
                if torch_adam:
                    group["fused"] = True  # Megatron sets it only under offload
                for parameter in group["params"]:
                    adam.state[parameter] = {
                        name: torch.zeros_like(parameter, dtype=self.dtype(name)) for name in STATES if name != "main"
                    }
                    if torch_adam:
                        adam.state[parameter]["step"] = torch.zeros((), device=parameter.device)
        for member in self._members:
            if isinstance(member.optimizer, HybridDeviceOptimizer):
                member.optimizer._sync_sub_optimizers_state_to_hdo()
        self.num_steps = 0

    def dtype(self, state: State) -> torch.dtype:
        """Return the data type of a state: fp32 for the main parameters, and the one of the moments."""
        return torch.float32 if state == "main" else self._moments_dtype

    def states(self) -> Iterator[torch.Tensor]:
        """Iterate over views of this rank's pieces of all states."""
        return (tensor for state in STATES for _, tensor in self.pieces(state))

    def pieces(self, state: State) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Iterate over the parameters that this rank updates, each with a flat view of its piece of one state."""
        return ((parameter, piece.tensor(state)) for parameter, piece in self._pieces.items())

    def _parameters(self) -> list[torch.Tensor]:
        """Return the tensors that the optimizers of the chain update on this rank; they hold the gradients."""
        return list(chain.from_iterable(member.get_parameters() for member in self._members))

    def _adams(self) -> Iterator[torch.optim.Optimizer]:
        """Iterate over the innermost optimizers: the Adam of torch, Transformer Engine or apex."""
        for member in self._members:
            hybrid = isinstance(member.optimizer, HybridDeviceOptimizer)
            yield from member.optimizer.sub_optimizers if hybrid else [member.optimizer]

    def _own(self, parameter: torch.nn.Parameter, state: State) -> torch.Tensor:
        """Return this rank's piece of a state, which is empty if it has none."""
        piece = self._pieces.get(parameter)
        return (
            torch.empty(0, dtype=self.dtype(state), device=parameter.device) if piece is None else piece.tensor(state)
        )

    def _senders(self, parameter: torch.nn.Parameter, to: int) -> dict[int, tuple[int, int]]:
        """Return rank -> elements for the ranks of the sharing axis that provide a parameter to rank `to`.

        Each piece has one sender: rank `to` itself where it holds the piece, otherwise one of the ranks that do.
        """
        spans = self._spans[parameter]
        sender = {span: rank for rank, span in [*enumerate(spans), (to, spans[to])] if span is not None}
        return {rank: span for span, rank in sender.items()}

    def _gather_spans(self) -> dict[torch.nn.Parameter, list[tuple[int, int] | None]]:
        """Return for every parameter the element range of the piece on each rank of its sharing axis."""
        found: dict[torch.nn.Parameter, list[tuple[int, int] | None]] = {}
        parameters = [p for chunk in self._chunks for p in chunk.parameters() if p.requires_grad]
        for axis in (self._groups.data_context, self._groups.expert_data):
            shared = [p for p in parameters if self.sharing_axis(p) is axis]
            own = [(piece.start, piece.stop) if (piece := self._pieces.get(p)) else None for p in shared]
            by_rank: list[Any] = [None] * axis.size
            dist.all_gather_object(by_rank, own, group=axis.group)
            found |= {parameter: list(spans) for parameter, *spans in zip(shared, *by_rank, strict=True)}
        return found


def sharing_axis(parameter: torch.nn.Parameter, groups: ParallelGroups) -> Axis:
    """Return the axis of the ranks with the same shard of a parameter. Megatron marks expert parameters."""
    return groups.data_context if getattr(parameter, "allreduce", True) else groups.expert_data


def _create(chunks: list[DistributedDataParallel], settings: OptimizerSettings) -> Any:
    """Return Megatron's chain of optimizers, with one for dense and one for expert parameters where they differ."""
    model, ddp = chunks[0].config, chunks[0].ddp_config
    assert ddp.use_distributed_optimizer or not settings.cpu_offload, (
        "cpu_offload needs use_distributed_optimizer; the configuration checks enforce it"
    )
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=model.bf16,
        params_dtype=model.params_dtype,
        fp8_recipe=model.fp8_recipe if model.fp8 else None,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_param_gather=ddp.overlap_param_gather,
        optimizer_cpu_offload=settings.cpu_offload,
        optimizer_offload_fraction=float(settings.cpu_offload),
        overlap_cpu_optimizer_d2h_h2d=settings.cpu_offload,
        use_precision_aware_optimizer=settings.cpu_offload,  # the offloaded Adam then holds the fp32 parameters
    )
    with torch.no_grad():  # otherwise fp32 pieces are non-leaf views, which torch's optimizers reject
        made: Any = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    # Where no rank trains dense parameters, as with adapters of experts only, their optimizer is a stub without Adam.
    made.chained_optimizers = [member for member in made.chained_optimizers if not member.is_stub_optimizer]
    return made


def shrink_main_parameters(members: Sequence[Any]) -> None:
    """Give each piece of the main parameters a storage of its own size, in place.

    Megatron takes that of an FP8 weight as a view of the whole weight in fp32, which would stay allocated on every rank
    (megatron/core/optimizer/distrib_optimizer.py, _build_model_and_main_param_groups).
    """
    for member in members:
        for piece in chain.from_iterable(getattr(member, "shard_fp32_from_float16_groups", ())):
            if piece is not None and piece.untyped_storage().nbytes() > piece.nbytes:
                piece.data = piece.detach().clone()


def _pieces(member: Any, chunks: list[DistributedDataParallel]) -> Iterator[tuple[torch.nn.Parameter, _Piece]]:
    """Iterate over the parameters that one optimizer of the chain updates on this rank, each with its piece."""
    if isinstance(member, DistributedOptimizer):
        offloaded = isinstance(member.optimizer, HybridDeviceOptimizer)
        halves = member.shard_float16_groups if offloaded else member.shard_fp32_from_float16_groups
        models = chain(*member.model_float16_groups, *member.model_fp32_groups)
        for parameter, handle in zip(models, chain(*halves, *member.shard_fp32_groups), strict=True):
            span = member._get_model_param_range_map(parameter)["param"]
            yield parameter, _Piece(member.optimizer, handle, span.start, span.end)
        return
    updated = {id(tensor) for tensor in member.get_parameters()}
    for parameter in chain.from_iterable(chunk.parameters() for chunk in chunks):
        main = getattr(parameter, "main_param", parameter)
        if id(main) in updated:
            yield parameter, _Piece(member.optimizer, main, 0, main.numel())
