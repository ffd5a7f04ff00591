"""Print docs/guides/recipes.md, with a table of the plans of all recipes.

python tools/plan_recipes.py > docs/guides/recipes.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_bapo.config.loading import load_config
from megatron_bapo.planning.hardware import GIB, Assumptions
from megatron_bapo.planning.known_models import architecture_of
from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.rendering import layout_name

RECIPES = Path(__file__).parents[1] / "configs" / "recipes"
INTRODUCTION = """# Recipes

Start from the recipe for your model and number of GPUs, and change what you need in a file that extends it. The recipes
named `paper_*` are for the paper's experiments.

```bash
megatron-bapo plan configs/recipes/qwen2.5-7b_8gpus.yaml --gpu H100
megatron-bapo train configs/recipes/qwen2.5-7b_8gpus.yaml --dry-run
```

The table shows what `plan` prints for each recipe on H100 (79.2 GiB) and H200 (139.8 GiB). None of them has run on a
GPU yet.

- *Layout* has the parallel sizes above 1. `offload` is `optimizer.cpu_offload`, `trainer offload` is `trainer.offload`,
  `uneven stages` is `parallel.pipeline_model_parallel_layout`. `TE` is `model.transformer_impl: transformer_engine`;
  the others have `local` layers. *Tokens per GPU* is `trainer.max_tokens_per_gpu`.
- *Engines*: their number and their tensor-parallel size; `1 x 8` is one engine of eight GPUs. They share the trainer's
  GPUs and take turns with it. `separate` engines have GPUs of their own and generate when the trainer asks for a batch
  (`sync`) or also while it trains (`async`).
- *GiB*: memory of the fullest H100 during training and during generation.
- *s* are the estimated seconds for one rollout batch, whose size is in *trajectories*, and its updates, under the
  assumptions that `plan` prints. Without context parallelism they are the same for `local` layers as for Transformer
  Engine's, because `plan` does not know how their speeds differ.

[Layouts](layouts.md) explains the numbers, and [Data](data.md#the-data-of-the-recipes) shows how to get the prompts.
"""
HEADER = """| recipe | GPUs | layout | tokens per GPU | engines | GiB train, generate | trajectories | s: H100 | H200 |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def row(recipe: Path) -> str:
    config = load_config(recipe)
    architecture, _ = architecture_of(config.model)
    rollout = config.rollout
    h100, h200 = (Plan(config, architecture, gpu, Assumptions()) for gpu in ("H100", "H200"))
    assert h100.fits, f"{recipe.name} does not fit: {h100.problems}"
    shared = rollout.colocate
    generating = h100.while_generating(h100.fullest_resident_stage) if shared else h100.engine.total
    gib = (h100.while_training(h100.worst_stage), generating)
    cells = [
        f"`{recipe.stem}`",
        str(h100.num_gpus),
        layout_name(config) + " TE" * (config.model.transformer_impl == "transformer_engine"),
        f"{config.trainer.max_tokens_per_gpu:,}",
        f"{rollout.num_engines} x {rollout.tensor_parallel_size}" + ("" if shared else f" separate, {rollout.mode}"),
        ", ".join(f"{num / GIB:.0f}" for num in gib),
        f"{config.trainer.train_batch_size:,}",
        *(f"{plan.time.total:,.0f}" for plan in (h100, h200)),
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    return "\n".join([HEADER, *map(row, sorted(RECIPES.glob("*.yaml")))])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(INTRODUCTION, table(), sep="\n")
