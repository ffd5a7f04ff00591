"""Run by torchrun: loads a Hugging Face checkpoint into a layout, and writes it back to the case's folder."""

from pathlib import Path

from examples import make_config
from launching import run_cases

from megatron_bapo.model.build import build_policy
from megatron_bapo.model.hf_export import save_hugging_face
from megatron_bapo.model.hf_import import load_hugging_face
from megatron_bapo.parallel.groups import create_groups


def run_case(case: dict, out: Path) -> None:
    source = Path(case["model"])
    config = make_config(source, out, case["parallel"], "float32", packing=True)
    groups = create_groups(config.parallel, seed=0, timeout_s=120)
    model = build_policy(config, source, groups)
    load_hugging_face(model, source, groups)
    save_hugging_face(model, groups, source, out / "written")


if __name__ == "__main__":
    run_cases(run_case)
