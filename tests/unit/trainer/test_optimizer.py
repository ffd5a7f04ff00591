from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bapo.config.optimizer import OptimizerConfig
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.model.build import ddp_config
from megatron_bapo.parallel.groups import ParallelGroups, create_groups
from megatron_bapo.parallel.megatron import DistributedDataParallel, TransformerConfig, parallel_state
from megatron_bapo.parallel.platform import local_device, start_distributed
from megatron_bapo.trainer.optimizer import STATES, Optimizer, shrink_main_parameters

# Megatron-Core calls collectives by names that are deprecated in torch 2.13.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.distributed.* is deprecated:FutureWarning")

SETTINGS: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.2, "adam_beta2": 0.95, "adam_eps": 1e-6, "clip_grad": 0.5}
WAYS = {
    "plain": ({"use_distributed_optimizer": False}, {}),
    "distributed": ({}, {}),
    "offloaded": ({}, {"cpu_offload": True}),
}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParallelGroups]:
    """Return a mesh of one rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        start_distributed(60, store_file=tmp_path_factory.mktemp("store") / "store")
        yield create_groups(ParallelConfig(), seed=0, timeout_s=60)
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


class Case:
    """A linear layer and a norm under the optimizer, and a copy of them under torch's AdamW."""

    def __init__(self, groups: ParallelGroups, way: str, dtype: torch.dtype = torch.float32) -> None:
        parallel, optimizer = WAYS[way]
        generator = torch.Generator().manual_seed(0)
        self.module = torch.nn.Sequential(torch.nn.Linear(5, 7, bias=False), torch.nn.RMSNorm(7))
        for parameter in self.module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype).to(local_device())
        self.parameters = list(self.module.parameters())
        self.twins = [torch.nn.Parameter(parameter.detach().float().clone()) for parameter in self.parameters]
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            calculate_per_token_loss=True,
            cuda_graph_scope=[],  # the default gives a warning
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
        )
        ddp = DistributedDataParallel(config, ddp_config(ParallelConfig(**parallel)), self.module)
        self.optimizer = Optimizer([ddp], groups, OptimizerConfig(**SETTINGS, **optimizer))
        matrix, norm = self.twins
        self.reference = torch.optim.AdamW(
            [{"params": [matrix]}, {"params": [norm], "weight_decay": 0.0}],
            weight_decay=SETTINGS["weight_decay"],
            betas=(0.9, SETTINGS["adam_beta2"]),
            eps=SETTINGS["adam_eps"],
        )

    def set_gradients(self, seed: int) -> None:
        self.optimizer.zero_grad()
        for parameter, twin in zip(self.parameters, self.twins, strict=True):
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)).to(local_device())
            parameter.main_grad.copy_(gradient)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
            twin.grad = gradient.clone()

    def states(self) -> list[torch.Tensor]:
        found = [self.optimizer.read(parameter, state) for parameter in self.parameters for state in STATES]
        return [tensor.clone() for tensor in found if tensor is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_updates_match_torch_adamw_with_weight_decay_on_matrices_only(
    groups: ParallelGroups, way: str, dtype: torch.dtype
) -> None:
    case = Case(groups, way, dtype)
    for update, lr in enumerate((0.1, 0.03, 0.01)):
        case.set_gradients(update)
        norm = torch.nn.utils.clip_grad_norm_(case.twins, SETTINGS["clip_grad"])
        for group in case.reference.param_groups:
            group["lr"] = lr
        case.reference.step()

        result = case.optimizer.step(lr)

        assert (result.grad_norm, result.skipped) == (pytest.approx(norm.item(), rel=1e-6), False)
    for parameter, twin in zip(case.parameters, case.twins, strict=True):
        torch.testing.assert_close(case.optimizer.read(parameter, "main"), twin.detach(), rtol=0.0, atol=1e-6)
        torch.testing.assert_close(parameter.detach(), twin.detach().to(dtype), rtol=2**-7, atol=1e-6)
        for state in STATES[1:]:
            expected = case.reference.state[twin][state]
            torch.testing.assert_close(case.optimizer.read(parameter, state), expected, rtol=1e-5, atol=1e-9)
    assert case.optimizer.num_steps == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("way", WAYS)
def test_an_update_with_a_gradient_that_is_not_finite_is_skipped_and_not_counted(
    groups: ParallelGroups, way: str, bad: float
) -> None:
    case = Case(groups, way)
    case.set_gradients(0)
    case.optimizer.step(0.1)
    before = case.states()
    case.set_gradients(1)
    case.parameters[0].main_grad[3, 2] = bad  # pyright: ignore[reportAttributeAccessIssue, reportIndexIssue]

    assert case.optimizer.step(0.1).skipped

    assert all(torch.equal(a, b) for a, b in zip(before, case.states(), strict=True))
    assert case.optimizer.num_steps == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_a_restored_state_continues_the_run_it_was_read_from(
    groups: ParallelGroups, way: str, dtype: torch.dtype
) -> None:
    """Restore states across optimizer variants: the saved run uses the plain one."""
    saved, loaded = Case(groups, "plain", dtype), Case(groups, way, dtype)
    for update in range(2):
        saved.set_gradients(update)
        saved.optimizer.step(0.1)
    for old, new in zip(saved.parameters, loaded.parameters, strict=True):
        for state in STATES:
            tensor = saved.optimizer.read(old, state)
            assert tensor is not None
            loaded.optimizer.write(new, state, tensor)
    loaded.optimizer.num_steps = saved.optimizer.num_steps
    assert all(torch.equal(old, new) for old, new in zip(saved.parameters, loaded.parameters, strict=True))
    for case in (saved, loaded):
        case.set_gradients(9)
        case.optimizer.step(0.1)

    assert all(torch.equal(a, b) for a, b in zip(saved.states(), loaded.states(), strict=True))
    assert all(torch.equal(old, new) for old, new in zip(saved.parameters, loaded.parameters, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_reset_moments_equal_those_of_a_new_optimizer(groups: ParallelGroups, way: str) -> None:
    case = Case(groups, way)
    case.set_gradients(0)
    case.optimizer.step(0.1)
    main = case.optimizer.read(case.parameters[0], "main")

    case.optimizer.reset_moments()

    assert case.optimizer.num_steps == 0
    for state in STATES[1:]:
        moment = case.optimizer.read(case.parameters[0], state)
        assert moment is not None
        assert not moment.any()
    assert main is not None
    assert torch.equal(case.parameters[0], main)


def test_all_ranks_take_part_in_the_first_operation_of_the_data_parallel_group(
    groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL needs that, and a rank may have nothing to exchange in `for_own_trajectories`."""
    reduced = list[torch.distributed.ProcessGroup]()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _, group: reduced.append(group))
    Case(replace(groups, data=replace(groups.data, size=2)), "plain")
    assert reduced == [groups.data.group]


def test_a_tensor_of_another_shape_is_refused(groups: ParallelGroups) -> None:
    case = Case(groups, "distributed")

    with pytest.raises(AssertionError, match=r"exp_avg has shape .*35.*parameter .*7, 5"):
        case.optimizer.write(case.parameters[0], "exp_avg", torch.zeros(35))


def test_main_parameters_keep_no_whole_fp8_weight_alive_and_stay_the_same_objects():
    whole, own = torch.arange(100.0), torch.arange(3.0)
    piece = whole[10:15]
    shrink_main_parameters([SimpleNamespace(shard_fp32_from_float16_groups=[[piece, None], [own]]), SimpleNamespace()])
    assert (piece.tolist(), piece.untyped_storage().nbytes()) == ([10, 11, 12, 13, 14], piece.nbytes)
    assert own.untyped_storage().data_ptr() == own.data_ptr()
