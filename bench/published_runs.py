"""Published runs of others, replayed through the code of `plan`: published and planned figures and their ratios.

python -m bench.published_runs            # the table and the ratios
python -m bench.published_runs --runs 30b # only the runs whose name contains 30b, with the parts of their step

The runs and their sources are in published_runs.yaml. A ratio is planned over published; where a source gives several
values for one layout, their geometric mean counts. The range shows what the assumptions do that the source leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from bench.report import option_parser, report
from megatron_bapo.config.architecture import FAMILIES, Architecture
from megatron_bapo.config.model import ModelConfig
from megatron_bapo.config.schema import Config
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.known_models import architecture_of
from megatron_bapo.planning.parameters import num_active_parameters
from megatron_bapo.planning.plan import Plan

DATA = Path(__file__).with_name("published_runs.yaml")
LAYOUT_KEYS = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "VPP": "virtual_pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
}
INVERSE = ("tokens_per_s_per_gpu", "tflops", "mfu")
"""Figures that grow as a run gets faster."""
SPEED_FIGURES = ("step_s", "tflops", "mfu", "transfer_s", "tokens_per_s_per_gpu", "training_s")
"""A run's speed is compared by the first of these figures that its source has."""
TOLERANCE = 1.25
"""Largest factor between a planned and a published figure, if not the source's own range is wider."""


@dataclass(frozen=True)
class Interval:
    low: float
    high: float

    @classmethod
    def of(cls, value: float | Sequence[float]) -> Interval:
        values = [value] if isinstance(value, float | int) else value
        return cls(min(values), max(values))

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)

    def __str__(self) -> str:
        return f"{self.low:,.4g}" if self.low == self.high else f"{self.low:,.4g}-{self.high:,.4g}"


@dataclass(frozen=True)
class Comparison:
    """One figure of a run."""

    figure: str
    published: Interval
    planned: float
    range: Interval
    """Planned under all values of the open assumptions."""

    @property
    def ratio(self) -> float:
        return self.planned / self.published.middle

    @property
    def time_ratio(self) -> float:
        """The ratio of seconds: above 1 where the plan is slower."""
        return 1 / self.ratio if self.figure in INVERSE else self.ratio

    @property
    def agrees(self) -> bool:
        """Whether the tolerance around the planned range reaches the published one."""
        low, high = self.range.low / TOLERANCE, self.range.high * TOLERANCE
        return low <= self.published.high and high >= self.published.low


@dataclass(frozen=True, eq=False)
class PublishedRun:
    """One row of the data file."""

    fields: Mapping[str, Any]
    base: Mapping[str, Any]
    is_held_out: bool = False
    """Whether no efficiency was estimated with this run."""

    @property
    def name(self) -> str:
        return self.fields["name"]

    @property
    def group(self) -> str:
        """The runs with which its ratio is summed up."""
        if "transfer_s" in self.fields["published"]:
            return "transfers"
        return "held_out_steps" if self.is_held_out else "steps"

    @property
    def trains_only(self) -> bool:
        return "sequence" in self.fields

    @cached_property
    def architecture(self) -> Architecture:
        return _architecture(self.fields["model"])

    def plan(self, **changes: Any) -> Plan:
        """Return the run's plan; `changes` replace fields of the row, its layout or its assumptions."""
        layout = self.fields["layout"] | {name: value for name, value in changes.items() if name in LAYOUT_KEYS}
        fields = {**self.fields, **{name: value for name, value in changes.items() if name not in LAYOUT_KEYS}}
        fields["layout"] = layout
        values = dict(self.base.get("assumptions", {})) | dict(self.fields.get("assumptions", {}))
        values |= {name: value for name, value in changes.items() if name in Assumptions.__dataclass_fields__}
        lengths = _lengths(fields)
        values |= {name: lengths.pop(name) for name in ("mean_prompt_fraction", "mean_response_fraction")}
        settings = _settings(fields) | lengths | self.base.get("settings", {}) | fields.get("settings", {})
        return Plan(_config(settings), self.architecture, fields.get("gpu", "H100"), Assumptions(**values))

    def comparisons(self) -> list[Comparison]:
        planned, found = self.figures(self.plan()), []
        others = [self.figures(self.plan(**changes)) for changes in self._open()]
        for figure, value in self.fields["published"].items():
            values = [planned[figure], *(other[figure] for other in others)]
            found.append(Comparison(figure, Interval.of(value), planned[figure], Interval(min(values), max(values))))
        return found

    @property
    def exception(self) -> str:
        """Why the run may be off: `superseded` by a release that runs the layout much faster, `differs` from what the
        planner can express, or off and `unexplained`; else empty."""
        return next((name for name in ("superseded", "differs", "unexplained") if name in self.fields), "")

    def time_ratio(self, **changes: Any) -> float:
        """Return planned over published seconds, of the first figure that tells the run's speed."""
        planned = self.figures(self.plan(**changes))
        figure = next(name for name in self.fields["published"] if name in SPEED_FIGURES)
        value = planned[figure]
        return Comparison(figure, Interval.of(self.fields["published"][figure]), value, Interval.of(value)).time_ratio

    def figures(self, plan: Plan) -> dict[str, float]:
        """Return the planned figures by the names of the data file."""
        time = plan.time
        seconds = time.training if self.trains_only else time.total
        figures = {
            "step_s": seconds,
            "training_s": time.training,
            "generation_s": time.generation,
            "sync_s": time.weight_sync + time.offload,
            "tokens_per_s_per_gpu": time.num_tokens / seconds / (time.num_gpus if self.trains_only else plan.num_gpus),
            "tflops": time.model_flops / time.training / time.num_gpus / 1e12,
            "mfu": time.mfu * self._counted,
            "transfer_s": time.weight_sync,
        }
        if "memory_gb" in self.fields["published"]:
            stage = max(plan.stages, key=lambda stage: stage.peak)
            figures["memory_gb"] = (stage.peak - stage.reserved) / 1e9
        return figures

    @property
    def _counted(self) -> float:
        """The source's FLOPs of a token over ours, where it counts the embedding's lookup as a product."""
        lookup = self.architecture.vocab_size * self.architecture.hidden_size
        return 1 + self.fields.get("counts_embedding", False) * lookup / num_active_parameters(self.architecture)

    def memory_problems(self) -> list[str]:
        """Return why the plan would refuse the layout for memory; the source ran it."""
        if "transfer_s" in self.fields["published"]:
            return []
        plan = self.plan()
        if self.trains_only:
            fits = plan.while_training(plan.worst_stage) <= plan.gpu_bytes
            return [] if fits or not self.fields.get("checks_memory", True) else plan.problems
        return [problem for problem in plan.problems if "GiB" in problem]

    def _open(self) -> Iterator[dict[str, Any]]:
        """Yield every combination of the open assumptions' values."""
        open_values = {**self.base.get("open", {}), **self.fields.get("open", {})}
        for values in product(*open_values.values()):
            yield dict(zip(open_values, values, strict=True))


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Return the training and RL runs of the data file, the held-out ones last."""
    bases = data()["bases"]
    return tuple(
        PublishedRun({**bases[fields["base"]].get("fields", {}), **fields}, bases[fields["base"]], is_held_out)
        for is_held_out, runs in ((False, data()["runs"]), (True, data()["held_out"]))
        for fields in runs
    )


@cache
def data() -> dict[str, Any]:
    return yaml.safe_load(DATA.read_text("utf-8"))


@cache
def _architecture(name: str) -> Architecture:
    shape = data()["models"].get(name)
    if shape is None:
        return architecture_of(ModelConfig(path=Path(name)))[0]
    family = FAMILIES[shape["model_type"]]
    known = {key: value for key, value in shape.items() if key != "model_type"}
    known.setdefault("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    moe_layers = frozenset(range(shape["num_hidden_layers"])) if family.experts else frozenset()
    return Architecture(family=family, rms_norm_eps=1e-6, rope_theta=1e6, moe_layers=moe_layers, **known)


def _settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a configuration that follow from a row's layout, engines and batch."""
    layout, engines = fields["layout"], fields.get("engines", {"number": 1})
    world = fields.get("trainer_gpus", fields.get("gpus"))
    settings = {f"parallel.{LAYOUT_KEYS[name]}": size for name, size in layout.items()}
    settings |= {
        "parallel.world_size": world,
        "parallel.sequence_parallel": layout.get("TP", 1) > 1,
        "parallel.expert_tensor_parallel_size": 1 if "EP" in layout else None,
        "rollout.num_engines": engines["number"],
        "rollout.tensor_parallel_size": engines.get("TP", 1),
        "rollout.mode": "async" if "trainer_gpus" in fields else "sync",
        "rollout.colocate": "trainer_gpus" not in fields and "sequence" not in fields,
        "trainer.train_batch_size": fields["batch"],
        "trainer.ppo_mini_batch_size": fields.get("update", fields["batch"]),
        "fp8": {"recipe": fields["fp8"], "param": "sequence" in fields} if fields.get("fp8") else None,
        "model.path": fields["model"],
    }
    if fields.get("embedding_and_loss_are_layers"):
        num_chunks = layout["PP"] * layout.get("VPP", 1)
        each = (_architecture(fields["model"]).num_hidden_layers + 2) // num_chunks
        layers = [each - 1, *[each] * (num_chunks - 2), each - 1]
        settings["parallel.pipeline_model_parallel_layout"] = layers
    settings["rollout.sleep_level"] = 2 if settings["rollout.colocate"] else 0
    settings["trainer.offload"] = settings["rollout.colocate"]
    settings["rollout.on_weight_update"] = "drain" if settings["rollout.mode"] == "sync" else "abort_and_resume"
    return settings


def _lengths(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and assumptions of a row's lengths: whole sequences, or prompts and responses with a limit."""
    if "sequence" in fields:
        half, cp = fields["sequence"] // 2, fields["layout"].get("CP", 1)
        return {
            "data.max_prompt_length": half,
            "rollout.max_response_length": half,
            "trainer.max_tokens_per_gpu": fields.get("micro_batch", 1) * fields["sequence"] // cp,
            "mean_prompt_fraction": 1.0,
            "mean_response_fraction": 1.0,
        }
    limit = fields["maximum"] - fields["prompt"]
    return {
        "data.max_prompt_length": fields["prompt"],
        "rollout.max_response_length": limit,
        "trainer.max_tokens_per_gpu": fields["maximum"] // fields["layout"].get("CP", 1),
        "mean_prompt_fraction": 1.0,
        "mean_response_fraction": fields["response"] / limit,
    }


def _config(settings: Mapping[str, Any]) -> Config:
    """Return the configuration with these dotted keys."""
    document: dict[str, Any] = {
        "run_dir": "runs/published",
        "data": {"train": {"path": "train.parquet"}, "validation": {"path": "validation.parquet"}},
        "trainer": {"total_steps": 1},
    }
    for key, value in settings.items():
        *sections, name = key.split(".")
        section = document
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
    return Config.model_validate(document)


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--runs", default="", help="only runs whose name contains this, with the parts of a step")
    chosen = parser.parse_args().runs
    rows: list[tuple[object, ...]] = []
    ratios: dict[str, float] = {}
    for run in published_runs():
        if chosen not in run.name:
            continue
        for each in run.comparisons():
            note = "" if each.agrees else run.exception or "off"
            rows.append((run.name, each.figure, each.published, each.planned, each.ratio, each.range, note))
        ratios[run.name] = run.time_ratio()
        if chosen:
            _print_parts(run)
    columns = ("run", "figure", "published", "planned", "ratio", "planned range", "")
    report("published_runs", columns, rows, ratios=ratios, figures=summary(ratios))


def summary(ratios: Mapping[str, float]) -> dict[str, float]:
    """Return the geometric means of planned over published seconds, and the share of runs within the tolerance."""
    groups: dict[str, list[float]] = {"steps": [], "held_out_steps": [], "transfers": []}
    for run in published_runs():
        if run.name in ratios:
            groups[run.group].append(ratios[run.name])
    near = {name: [1 / TOLERANCE <= ratio <= TOLERANCE for ratio in values] for name, values in groups.items()}
    means = {f"{name}_geometric_mean": geometric_mean(values) for name, values in groups.items() if values}
    return means | {f"{name}_within_25_percent": sum(values) / len(values) for name, values in near.items() if values}


def _print_parts(run: PublishedRun) -> None:
    time = run.plan().time
    parts = {"generation": time.generation} | time.training_parts | {"weight sync": time.weight_sync}
    parts |= {"offload": time.offload, "between phases": time.between}
    print(run.name, ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05))


if __name__ == "__main__":
    main()
