"""Every way to spread, overlap and offload the optimizer gives what plain data parallelism and one process give."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.tolerances import BFLOAT16_PARAMETER, GRADIENT, PARAMETER

HERE = Path(__file__).parent
PLAIN = {"use_distributed_optimizer": False}
SPREAD = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 2000}
OVERLAP_ALL = {**SPREAD, **OVERLAP, "overlap_param_gather": True}
CLIP = {"optimizer": {"clip_grad": 0.05}}
OFFLOAD = {"optimizer": {"cpu_offload": True}}
BF16 = {"dtype": "bfloat16"}
TP2, PP2, EP2 = ({f"{name}_model_parallel_size": 2} for name in ("tensor", "pipeline", "expert"))

DENSE = {
    1: {
        "one": {"parallel": PLAIN},
        "one-spread": {"parallel": SPREAD},
        "one-clip": {"parallel": PLAIN, **CLIP},
        "one-bf16": {"parallel": PLAIN, **BF16},
    },
    2: {
        "dp2": {"parallel": PLAIN, "resume_from": "one-spread"},
        "dp2-overlap": {"parallel": {**PLAIN, **OVERLAP}},
        "dp2-spread": {"parallel": SPREAD, "resume_from": "one"},
        "dp2-spread-overlap": {"parallel": OVERLAP_ALL, "resume_from": "one"},
        "dp2-spread-offload": {"parallel": SPREAD, **OFFLOAD, "resume_from": "one"},
        "dp2-bf16": {"parallel": PLAIN, **BF16, "resume_from": "one-bf16"},
        "dp2-spread-overlap-bf16": {"parallel": OVERLAP_ALL, **BF16, "resume_from": "one-bf16"},
        "dp2-spread-overlap-offload-bf16": {"parallel": OVERLAP_ALL, **BF16, **OFFLOAD, "resume_from": "one-bf16"},
        "tp2-spread": {"parallel": {**SPREAD, **TP2}, "resume_from": "dp2-spread-overlap"},
    },
    4: {
        "dp4-spread-overlap": {"parallel": OVERLAP_ALL, "resume_from": "dp2-spread-overlap"},
        "pp2-dp2-spread-overlap": {"parallel": {**OVERLAP_ALL, **PP2}, "resume_from": "dp2-spread"},
        "tp2-dp2-spread-clip": {"parallel": {**SPREAD, **TP2}, **CLIP},
    },
}
EXPERTS = {
    1: {"experts-one": {"parallel": PLAIN}},
    2: {
        "experts-ep2": {"parallel": {**PLAIN, **EP2}},
        "experts-ep2-spread-overlap": {"parallel": {**OVERLAP_ALL, **EP2}},
        "experts-ep2-spread-offload": {"parallel": {**SPREAD, **EP2}, **OFFLOAD},
    },
    4: {
        "experts-ep2-dp4": {"parallel": {**PLAIN, **EP2}},
        "experts-ep2-dp4-spread-overlap": {"parallel": {**OVERLAP_ALL, **EP2}},
    },
}
CASES = [name for cases in DENSE.values() for name in cases]
SPREAD_OUT = [name for name in CASES if not name.startswith("one")]
RESUMED = {
    name: case["resume_from"] for cases in DENSE.values() for name, case in cases.items() if "resume_from" in case
}
EXPERT_CASES = [name for cases in EXPERTS.values() for name in cases]


def reference(name: str) -> str:
    return f"one-{name.rsplit('-', 1)[1]}" if name.endswith(("clip", "bf16")) else "one"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `NAME/` for every case; one launch for each world size."""
    root = tmp_path_factory.mktemp("optimizer")
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(shape).save_pretrained(root / "model")
    for world_size in (1, 2, 4):
        cases = {name: {**case, "model": str(root / "model")} for name, case in DENSE[world_size].items()}
        cases |= EXPERTS[world_size]
        launch(
            [{**c, "name": n, "parallel": {**c["parallel"], "world_size": world_size}} for n, c in cases.items()], root
        )
    return root


def launch(cases: list[dict], root: Path) -> None:
    """Run the cases on as many ranks as they ask for; a failure shows the ranks' own output."""
    world_size = cases[0]["parallel"]["world_size"]
    case_file = root / f"cases-{world_size}.json"
    case_file.write_text(json.dumps(cases))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size), "--standalone"),
        *(str(HERE / "optimizer_ranks.py"), str(case_file), str(root)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def checkpoint(results: Path, name: str, state: str, kind: str = "checkpoints") -> dict[str, torch.Tensor]:
    return load_folder(results / name / kind / "step-00000003" / state)


def facts(results: Path, name: str) -> dict:
    return json.loads((results / name / "facts.json").read_text())


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name].float() - theirs[name].float()).abs().max().item() for name in ours)


def largest(tensors: dict[str, torch.Tensor]) -> float:
    return max(tensor.abs().max().item() for tensor in tensors.values())


def same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    assert ours
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", [name for name in SPREAD_OUT if "bf16" not in name])
def test_three_updates_and_a_fourth_are_those_of_one_process(results: Path, name: str) -> None:
    for stage in ("final", "continued"):
        ours, theirs = (load_folder(results / n / stage) for n in (name, reference(name)))
        assert largest_difference(ours, theirs) < PARAMETER


@pytest.mark.parametrize("name", [name for name in SPREAD_OUT if "bf16" not in name])
def test_moments_and_gradient_norms_are_those_of_one_process(results: Path, name: str) -> None:
    """Adam hides the gradient's size from the parameters, not from the moments: they show the clipping."""
    for state in ("exp_avg", "exp_avg_sq"):
        ours, theirs = (checkpoint(results, n, state) for n in (name, reference(name)))
        assert largest_difference(ours, theirs) < 2 * GRADIENT * largest(theirs)
    ours, theirs = (facts(results, n)["grad_norms"] for n in (name, reference(name)))
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert min(theirs) > 0.1


def test_clipping_shrinks_what_the_moments_see(results: Path) -> None:
    clipped, whole = (largest(checkpoint(results, name, "exp_avg")) for name in ("one-clip", "one"))
    assert clipped < 0.5 * whole


@pytest.mark.parametrize("name", ["dp2-spread-overlap-bf16", "dp2-spread-overlap-offload-bf16"])
def test_in_bfloat16_every_way_gives_the_parameters_of_plain_data_parallelism(results: Path, name: str) -> None:
    ours, theirs = (checkpoint(results, n, "weights") for n in (name, "dp2-bf16"))
    assert largest_difference(ours, theirs) < PARAMETER
    assert largest_difference(load_folder(results / name / "final"), load_folder(results / "dp2-bf16" / "final")) == 0.0


def test_in_bfloat16_one_process_is_matched_and_stays_near_float32(results: Path) -> None:
    """Layouts with the same micro-batches sum the same rounded gradients in fp32."""
    ours, alone, exact = (checkpoint(results, name, "weights") for name in ("dp2-bf16", "one-bf16", "one"))
    assert largest_difference(ours, alone) < PARAMETER
    differences = torch.cat([(ours[name] - exact[name]).abs().flatten() for name in exact])
    assert PARAMETER < differences.mean().item() < BFLOAT16_PARAMETER
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in ours.values())
    assert {tensor.dtype for tensor in load_folder(results / "dp2-bf16" / "final").values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["dp2-spread-offload", "dp2-spread-overlap-offload-bf16"])
@pytest.mark.parametrize("state", ["weights", "exp_avg", "exp_avg_sq"])
def test_offloading_changes_no_bit(results: Path, state: str, name: str) -> None:
    assert same_bits(checkpoint(results, name, state), checkpoint(results, name.replace("-offload", ""), state))


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("state", ["weights", "exp_avg", "exp_avg_sq"])
def test_a_checkpoint_of_another_layout_is_read_and_written_bit_for_bit(results: Path, state: str, name: str) -> None:
    source = checkpoint(results, RESUMED[name], state)
    assert same_bits(checkpoint(results, name, state, "reloaded"), source)
    assert all(tensor.dtype == torch.float32 for tensor in source.values())


@pytest.mark.parametrize("name", [name for name in RESUMED if "bf16" not in name])
def test_a_resumed_run_continues_as_the_one_that_was_saved(results: Path, name: str) -> None:
    source = load_folder(results / RESUMED[name] / "continued")
    assert largest_difference(load_folder(results / name / "resumed"), source) < PARAMETER
    assert facts(results, name)["num_steps"] == 4


@pytest.mark.parametrize("name", [*CASES, *EXPERT_CASES])
def test_ranks_that_share_a_parameter_have_the_rounded_main_parameter(results: Path, name: str) -> None:
    found = facts(results, name)
    assert found["replicas_agree"]
    assert found.get("replicas_agree_after_load", True)


@pytest.mark.parametrize("name", [*CASES, *EXPERT_CASES])
def test_a_nan_on_one_rank_makes_all_ranks_skip_and_changes_nothing(results: Path, name: str) -> None:
    found = facts(results, name)
    assert found["skipped"]
    assert found["unchanged"]


def expert_states(results: Path, name: str, state: str) -> dict[str, torch.Tensor]:
    return {key: t for key, t in load_folder(results / name).items() if key.endswith(f"|{state}")}


@pytest.mark.parametrize("name", [name for name in EXPERT_CASES if name != "experts-one"])
def test_chained_optimizers_of_experts_match_one_process(results: Path, name: str) -> None:
    ours, theirs = (expert_states(results, n, "main") for n in (name, "experts-one"))
    assert largest_difference(ours, theirs) < PARAMETER
    for state in ("exp_avg", "exp_avg_sq"):
        ours, theirs = (expert_states(results, n, state) for n in (name, "experts-one"))
        assert largest_difference(ours, theirs) < 2 * GRADIENT * largest(theirs)
    found, wanted = facts(results, name), facts(results, "experts-one")
    assert (found["num_optimizers"], wanted["num_optimizers"]) == (2, 1)
    assert found["grad_norms"] == pytest.approx(wanted["grad_norms"], rel=1e-5)
    assert min(wanted["grad_norms"]) > 1.0  # the default limit: clipping takes part


@pytest.mark.parametrize("name", EXPERT_CASES)
def test_what_is_written_to_experts_is_read_back(results: Path, name: str) -> None:
    assert facts(results, name)["written_is_read"]
