from dataclasses import dataclass

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_bapo.errors import UserError
from megatron_bapo.model.hf_mapping import Shape, expected_shapes
from megatron_bapo.model.stacked_experts import (
    ByExpert,
    Dequantized,
    Stacked,
    dequantized,
    file_shapes,
    for_engine,
)
from tests.unit.model.shards import architecture

ARCH = architecture("gpt_oss")
EXPERTS = "model.layers.1.mlp.experts."


@dataclass(frozen=True)
class InMemory:
    tensors: dict[str, torch.Tensor]

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def slice(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def random_files() -> InMemory:
    generator = torch.Generator().manual_seed(0)
    return InMemory({name: torch.randn(shape, generator=generator) for name, shape in file_shapes(ARCH).items()})


def read(tensors: ByExpert) -> InMemory:
    return InMemory({name: tensors.slice(name)[:] for name in expected_shapes(ARCH)})


def test_a_layers_experts_are_four_tensors_of_the_files():
    shapes = {name: shape for name, shape in file_shapes(ARCH).items() if name.startswith(EXPERTS)}
    assert shapes == {
        f"{EXPERTS}gate_up_proj": (4, 16, 16),
        f"{EXPERTS}gate_up_proj_bias": (4, 16),
        f"{EXPERTS}down_proj": (4, 8, 16),
        f"{EXPERTS}down_proj_bias": (4, 16),
    }
    qwen = architecture("qwen3_moe")
    assert file_shapes(qwen) == expected_shapes(qwen)


def test_an_expert_has_its_columns_of_the_files_in_rows():
    files = random_files()
    by_expert = ByExpert(files)

    both, bias = (files.slice(f"{EXPERTS}gate_up_proj{end}")[3] for end in ("", "_bias"))
    for first, module in enumerate(("gate", "up")):
        assert torch.equal(by_expert.slice(f"{EXPERTS}3.{module}_proj.weight"), both[:, first::2].T)
        assert torch.equal(by_expert.slice(f"{EXPERTS}3.{module}_proj.bias"), bias[first::2])
    assert torch.equal(by_expert.slice(f"{EXPERTS}3.down_proj.weight"), files.slice(f"{EXPERTS}down_proj")[3].T)
    assert by_expert.shapes() == expected_shapes(ARCH) == read(by_expert).shapes()


def test_stacking_what_was_split_gives_the_bits_of_the_files():
    files = random_files()
    stacked = Stacked(read(ByExpert(files)), ARCH)

    assert stacked.shapes() == files.shapes()
    assert all(torch.equal(stacked.slice(name), tensor) for name, tensor in files.tensors.items())


def test_an_engine_gets_each_expert_as_it_is_in_the_files():
    """Gates and up projections may arrive in any order."""
    files = random_files()
    by_expert = [*read(ByExpert(files)).tensors.items()]

    for arriving in (by_expert, by_expert[::-1]):
        found = dict(for_engine(arriving))
        for name, tensor in files.tensors.items():
            prefix, is_expert, rest = name.partition(".mlp.experts.")
            for number, values in enumerate(tensor) if is_expert else ():
                assert torch.equal(found.pop(f"{prefix}.mlp.experts.{number}.{rest}"), values)
            if not is_expert:
                assert torch.equal(found.pop(name), tensor)
        assert not found


def test_an_expert_without_its_gate_is_an_error():
    tensors = read(ByExpert(random_files())).tensors
    del tensors[f"{EXPERTS}2.gate_proj.weight"]
    with pytest.raises(AssertionError, match=r"1 experts are incomplete, first .*1\.mlp\.experts\.2\.gate_up_proj"):
        list(for_engine(tensors.items()))


def random_blocks() -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks with every code, and exponents down to where bfloat16 rounds to zero."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(0, 250, blocks.shape[:-1], generator=generator, dtype=torch.uint8)


def test_mxfp4_has_the_bits_of_transformers():
    blocks, scales = random_blocks()
    ours, theirs = dequantized(blocks, scales), convert_moe_packed_tensors(blocks, scales)

    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert ours.shape == (2, 96, 6)
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def test_only_weights_in_blocks_are_dequantized():
    blocks, scales = random_blocks()
    others = {"model.norm.weight": torch.ones(4), "experts.down_proj_bias": torch.ones(2, 6)}
    folder = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales, **others}
    tensors = Dequantized(InMemory(folder))

    assert tensors.shapes() == {
        "experts.down_proj": (2, 96, 6),
        "model.norm.weight": (4,),
        "experts.down_proj_bias": (2, 6),
    }
    assert torch.equal(tensors.slice("experts.down_proj"), dequantized(blocks, scales))
    assert all(tensors.slice(name) is tensor for name, tensor in others.items())
    with pytest.raises(UserError, match=r"experts.down_proj_scales has the shape \[2, 6, 2\], but .* \[2, 6, 3\]"):
        Dequantized(InMemory({**folder, "experts.down_proj_scales": scales[..., :2]})).shapes()
