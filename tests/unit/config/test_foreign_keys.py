import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import torch
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from megatron_bapo.algorithm.rollout_correction import rollout_correction
from megatron_bapo.cli.main import app
from megatron_bapo.config.algorithm import RolloutCorrectionConfig
from megatron_bapo.config.foreign_hints import option_hint
from megatron_bapo.config.foreign_keys import FILE, ForeignRow, by_name, find, flattened, methods, projects, rows
from megatron_bapo.config.foreign_values import CONVERSIONS, READ_TOGETHER, ByHand, NoCounterpart
from megatron_bapo.config.loading import dotted_keys, load_config, value_in
from megatron_bapo.config.schema import Config
from megatron_bapo.config.section import Section
from megatron_bapo.errors import UserError

BASE = """
run_dir: runs/test
model: {create: {}}
data: {train: {path: prompts/train.jsonl}}
rollout: {n: 16}
trainer: {total_steps: 100, train_batch_size: 4096, ppo_mini_batch_size: 1024}
"""
OBJECTIVES = Path(__file__).parents[3] / "configs" / "objectives"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(BASE)
    return file


def problems(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def known(key: str) -> Any:
    return value_in(Config, yaml.safe_load(BASE), key)


def field_of(key: str) -> Any:
    section: Any = Config
    *sections, name = key.split(".")
    for part in sections:
        kinds = (section.model_fields[part].annotation, *get_args(section.model_fields[part].annotation))
        section = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section))
    return section.model_fields[name]


def example(annotation: Any) -> Any:
    """A value that a field of this kind accepts."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return example(inner[0])
    if origin is Literal:
        return inner[0]
    if origin is tuple:
        return [example(inner[0])]
    if inner and NoneType in inner:
        return example(next(each for each in inner if each is not NoneType))
    return {int: 2, float: 0.5, bool: True, str: "text", Path: "a/file.parquet"}[annotation]


NARROW = {
    "algorithm.clip_ratio_c": 3.0,
    "reward.remote.url": "http://host/score",
    "logging.mlflow.tracking_uri": "http://host",
}
"""Values of keys that take few of their kind."""


def refused(key: str, value: Any) -> list[str]:
    """What the schema says against a value of one key."""
    document: dict[str, Any] = {}
    node = document
    *sections, name = key.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[name] = value
    try:
        Config.model_validate(document)
    except ValidationError as error:
        found = [(".".join(map(str, each["loc"])), each) for each in error.errors(include_url=False)]
        return [f"{at}: {each['msg']}" for at, each in found if f"{at}.".startswith(f"{key}.") and at]
    return []


SAMPLES: dict[str, tuple[Any, Any]] = {
    "positive": (4, None),
    "prompts": (256, None),
    "rollout_batches": (10, None),
    "updates": (40, None),
    "fraction_of_run": (0.1, None),
    "sequences": (2, None),
    "per_context_rank": (4096, None),
    "product": (0.1, 1e-6),
    "each": ([0.25, 0.5], None),
    "inverse_bounds": ("0.5_2.0", None),
    "more_than_one": (8, None),
    "at_most_one": (10, None),
    "minus_one": (8, None),
    "round_up": (0.5, None),
    "two_or_more": (10, None),
    "tensor_parallel_only": (True, None),
    "modules": (["mlp"], None),
    "targets": (["linear_qkv", "down_proj"], None),
    "first_stage": (11, 10),
    "last_stage": (10, None),
    "stage_contents": ("Et*11|(t*12|)*6t*11,L", None),
    "any": (True, None),
    "given": ("a/folder", None),
    "loggers": (["console", "wandb"], None),
    "by_tracker": ("text", ["wandb", "mlflow"]),
    "file": (["a/train.parquet"], None),
    "model": ("Qwen/Qwen3-8B", None),
    "function": ("a/reward.py", "score"),
    "function_name": ("a.reward.score", None),
    "leave_one_out": (True, False),
    "mib": (2**29, None),
    "weight_bounds": ("0.5_5.0", "token"),
}
"""Values of theirs, by conversion, each with what the conversion needs beside it."""


@pytest.mark.parametrize("project", projects())
def test_a_row_says_one_thing_in_names_that_exist(project: str) -> None:
    ours = set(dotted_keys(Config))
    for row in rows(project):
        kinds = [bool(row.ours), row.none is not None, row.idle is not None]
        others = [condition.lstrip("!").partition("=")[0] for condition in row.only] + [row.with_key or row.key]

        assert kinds.count(True) == 1, row
        assert row.convert in CONVERSIONS, row
        assert (row.convert == "choice") == (row.values is not None), row
        assert {*row.ours, row.see or "run_dir"} <= ours, row
        assert all(find(project, key) for key in others), row
    names = [name for row in rows(project) for name in (row.key, *row.older)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("project", projects())
def test_our_keys_take_the_converted_values(project: str) -> None:
    refusals = {
        row.key: [text for value, other in values_of(row) for text in refusal(row, value, other)]
        for row in rows(project)
        if row.ours and row.convert not in (*READ_TOGETHER, "by_hand")
    }
    assert len(refusals) > 40
    assert {key: texts for key, texts in refusals.items() if texts} == {}


@pytest.mark.parametrize("value", [-1, 0, 1.5, True, "abc", [1], {"a": 1}], ids=str)
def test_a_value_of_the_wrong_kind_converts_or_is_refused_with_a_reason(value: Any) -> None:
    for row in (row for project in projects() for row in rows(project) if row.ours):
        with suppress(NoCounterpart, ByHand):
            row.converted(value, known)


def values_of(row: ForeignRow) -> list[tuple[Any, Any]]:
    """Of theirs, each with what its conversion needs beside it."""
    if row.values is not None:
        return [(value, None) for value, ours in row.values.items() if ours is not None]
    defaults = [(row.default, None)] if row.default is not None and "$" not in str(row.default) else []
    if row.convert == "same":
        key = row.ours[0]
        return [(NARROW.get(key, example(field_of(key).annotation)), None), *defaults]
    return [SAMPLES[row.convert], *defaults]


def refusal(row: ForeignRow, value: Any, other: Any) -> list[str]:
    converted = row.converted(value, known, other).values
    return [text for key, ours in converted.items() for text in refused(key, ours)]


def test_no_key_stands_twice_in_the_file() -> None:
    lines = [line for line in FILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    sections: dict[str, list[str]] = {}
    for line in lines[lines.index("keys:") + 1 :]:
        if found := re.match(r"^  ([\w-]+):$", line):
            current = sections.setdefault(found[1], [])
        elif found := re.match(r"^    (\"?[\w*.-]+\"?):", line):
            current.append(found[1])
    assert {project: len(rows(project)) for project in projects()} == {
        project: len(keys) for project, keys in sections.items()
    }
    assert all(len(keys) == len(set(keys)) for keys in sections.values())


def test_every_reason_is_used() -> None:
    data = yaml.safe_load(FILE.read_text())
    named = {
        row[kind]
        for keys in data["keys"].values()
        for row in keys.values()
        if isinstance(row, dict)
        for kind in ("none", "idle")
        if kind in row
    }
    assert set(data["reasons"]) - named == set()


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "rloo", "reinforce_plus_plus"])
def test_a_method_is_what_its_file_in_configs_sets(name: str) -> None:
    content = yaml.safe_load((OBJECTIVES / f"{name}.yaml").read_text())
    flat = dict(flattened({key: content.get(key, {}) for key in ("algorithm", "rollout")}, ""))
    short = flat.get("algorithm.overlong.buffer_length")
    # The paper's penalty begins 4096 tokens below 20480, and the file's at the same share of its short responses.
    assert short is None or short * 20480 == 4096 * load_config(OBJECTIVES / f"{name}.yaml").rollout.max_response_length
    flat |= {"algorithm.overlong.buffer_length": 4096} if short else {}
    assert methods()[name].items() <= flat.items()


@pytest.mark.parametrize("lowest", [None, 0.5])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_mask_of_trl_has_no_lower_bound_unless_it_is_given(level: str, lowest: float | None) -> None:
    """TRL sets the ratios outside of [clip_min, clip_max] to 0, those of tokens or the products of a sequence."""
    given: dict[str, Any] = {"mode": f"{level}_mask", "clip_max": 3.0} | ({"clip_min": lowest} if lowest else {})
    settings = {"rollout_rs_threshold": 3.0}
    for key, value in given.items():
        converted = by_name("trl")[f"vllm_importance_sampling_{key}"].converted(value, known).values
        settings |= {ours.rpartition(".")[2]: each for ours, each in converted.items()}
    ratios = torch.tensor([0.01, 0.7, 1.5, 3.5])
    found = rollout_correction(
        ratios.log(), torch.zeros(4), torch.tensor([2, 2]), RolloutCorrectionConfig.model_validate(settings)
    )
    products = torch.tensor([0.007, 0.007, 5.25, 5.25])
    tested = ratios if level == "token" else products
    expected = torch.where((tested < (lowest or 0.0)) | (tested > 3.0), 0.0, tested)
    torch.testing.assert_close(found.weights_T.float(), expected)


HINTS = {
    "objective=grpo": "did you mean algorithm.objective? grpo is algorithm.objective=ppo algorithm.adv_estimator=grpo "
    "algorithm.loss_agg_mode=seq-mean-token-mean",
    "algorithm.objective=dapo": "dapo is algorithm.objective=ppo algorithm.clip_ratio_low=0.2",
    "clip_ratio=0.2": "set algorithm.clip_ratio_low=0.2 algorithm.clip_ratio_high=0.2",
    "algorithm.clip_ratio=0.2": "set algorithm.clip_ratio_low=0.2 algorithm.clip_ratio_high=0.2",
    "clip_ratio_high=0.28": "did you mean algorithm.clip_ratio_high=0.28?",
    "actor_rollout_ref.actor.optim.lr=1e-6": "verl's actor_rollout_ref.actor.optim.lr is optimizer.lr here: set "
    "optimizer.lr=1e-6",
    "actor_rollout_ref.rollout.n=8": "set rollout.n=8",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0.6": "set evaluation.temperature=0.6",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10": "(10 rollout batches x 4 updates): set "
    "optimizer.lr_warmup_steps=40",
    "actor_rollout_ref.actor.policy_loss.loss_mode=gspo": "set algorithm.objective=gspo "
    "algorithm.loss_agg_mode=seq-mean-token-mean",
    "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl": "this value has no counterpart: dppo_kl is not here",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true": "is not needed here: the reference model has",
    "actor_rollout_ref.actor.no_such_key=1": "actor_rollout_ref is a section of verl; docs/guides/coming_from.md lists",
    "data.train_batch_size=256": "(256 prompts x rollout.n=16): set trainer.train_batch_size=4096",
    "data.filter_overlong_prompts=true": "has no counterpart here: a longer prompt stops the run",
    "filter_overlong_prompts=true": "verl's data.filter_overlong_prompts has no counterpart here",
    "algorithm.use_kl_in_reward=true": "is algorithm.kl_reward_coef here (0 switches it off)",
    "algorithm.kl_loss_type=low_var_kl": "verl's low_var_kl is algorithm.kl_loss_type=k3 here",
    "algorithm.adv_estimator=gae": "verl's gae is not here: `gae` needs a critic",
    "trainer.total_epochs=2": "set trainer.total_steps to epochs x prompts",
    "trainer.test_freq=5": "set evaluation.every_steps=5",
    "trainer.nnodes=2": "is parallel.world_size here (nodes x GPUs of a node)",
    "rollout.tensor_model_parallel_size=2": "set rollout.tensor_parallel_size=2",
    "critic.optim.lr=1e-5": "has no counterpart here: there is no critic",
    "beta=0.04": "TRL's beta is algorithm.kl_loss_coef here (0 loads no reference model): set "
    "algorithm.kl_loss_coef=0.04",
    "num_generations=8": "TRL's num_generations is rollout.n here: set rollout.n=8",
    "learning_rate=1e-6": "set optimizer.lr=1e-6",
    "max_completion_length=512": "set rollout.max_response_length=512",
    "per_device_train_batch_size=4": "is trainer.ppo_mini_batch_size here (counts the trajectories of an update",
    "loss_type=dr_grpo": "algorithm.loss_agg_mode=seq-mean-token-sum-norm",
    "grpo.num_prompts_per_step=64": "(64 prompts x rollout.n=16): set trainer.train_batch_size=1024",
    "policy.model_name=Qwen/Qwen3-8B": "(hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B): set "
    "model.path=models/Qwen3-8B",
    "loss_fn.ratio_clip_max=0.28": "set algorithm.clip_ratio_high=0.28",
    "rollout_batch_size=32": "slime's and OpenRLHF's rollout_batch_size is trainer.train_batch_size here (32 prompts x "
    "rollout.n=16): set trainer.train_batch_size=512",
    "rollout-batch-size=32": "set trainer.train_batch_size=512",
    "n_samples_per_prompt=8": "slime's and OpenRLHF's n_samples_per_prompt is rollout.n here: set rollout.n=8",
    "steps_per_generation=4": "here (per_device_train_batch_size x processes x steps_per_generation)",
    "importance_sampling_level=sequence": "algorithm.objective=gspo algorithm.loss_agg_mode=seq-mean-token-mean",
    "policy_loss_type=gspo": "set algorithm.objective=gspo algorithm.loss_agg_mode=seq-mean-token-mean",
    "no_advantage_std_norm=true": "has no counterpart here: reinforce_plus_plus and reinforce_plus_plus_baseline",
    "is_correction_threshold=[0.5, 5]": "and algorithm.rollout_correction.rollout_rs_threshold_lower here (two numbers",
    "stop_properly_penalty_coef=-0.5": "is reward.truncated_reward here (0 and below is",
    "prompt_max_len=512": "set data.max_prompt_length=512",
    "generate_max_len=512": "set rollout.max_response_length=512",
    "opsm_delta=0.0001": "here the engines' count, whose arithmetic alone can exceed 1e-4): set",
    "sglang-max-running-requests=64": "rollout.max_num_seqs=64",
    "eps_clip_low_high=[0.2, 0.27]": "set algorithm.clip_ratio_low=0.2 algorithm.clip_ratio_high=0.27",
}


@pytest.mark.parametrize("override", HINTS)
def test_a_key_of_another_project_is_answered_with_ours(config_file: Path, override: str) -> None:
    assert HINTS[override] in problems(config_file, override)


@pytest.mark.parametrize("override", [each for each, hint in HINTS.items() if "set " in hint and "=" in hint])
def test_the_overrides_of_a_hint_load(config_file: Path, override: str) -> None:
    pasted = [re.sub(r".*: set ", "", problems(config_file, override).splitlines()[-1])]
    overrides = pasted[0].split(" ") if "=" in pasted[0] and ": " not in pasted[0] else []
    # A model has one source.
    more = ["model.create=null"] if any(each.startswith("model.path=") for each in overrides) else []
    load_config(config_file, [*overrides, *more])


def test_a_key_of_another_project_in_a_file_is_answered_too(config_file: Path) -> None:
    theirs = "{actor: {optim: {lr: 2.0e-6}}, rollout: {temperature: 0.9}, newer: 1}"
    config_file.write_text(BASE + f"actor_rollout_ref: {theirs}\n")
    message = problems(config_file)
    assert "3 problems" in message
    assert "actor_rollout_ref.newer=1: unknown key; actor_rollout_ref is a section of verl" in message
    assert "actor_rollout_ref.actor.optim.lr=2.0e-06: unknown key; verl's" in message
    assert "set rollout.temperature=0.9" in message


@pytest.mark.parametrize(("section", "title"), [("actor_rollout_ref", "verl"), ("loss_fn", "NeMo-RL")])
def test_a_configuration_of_another_project_is_not_taken_for_ours(tmp_path: Path, section: str, title: str) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(f"{section}: {{a: 1}}\ntrainer: {{nnodes: 1}}\n")
    expected = f"{file} is a configuration of {title}; `megatron-bapo translate {file}` prints it in our keys"
    assert problems(file) == expected


def test_a_whole_section_of_another_project_is_sent_to_translate(config_file: Path) -> None:
    keys = ", ".join(
        f"{key}: 1" for key in ("temperature", "top_p", "n", "max_num_seqs", "name", "mode", "seed", "dtype")
    )
    config_file.write_text(BASE + f"actor_rollout_ref: {{rollout: {{{keys}}}, hybrid_engine: true, nccl_timeout: 1}}\n")
    message = problems(config_file)
    assert "2 more keys below it; `megatron-bapo translate FILE` translates the file" in message
    assert "9 problems" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lrs=1", "did you mean optimizer.lr?"),
        ("lr=1", "did you mean optimizer.lr or warm_start.lr?"),
        ("train_batch_size=256", "did you mean trainer.train_batch_size? It counts trajectories, rollout.n for"),
        ("temperature=0.7", "did you mean rollout.temperature or evaluation.temperature?"),
        ("data.trian.path=x", "did you mean data.train?"),
        ("rollouts.n=4", "did you mean rollout?"),
        ("enabled=true", "did you mean rollout.filter_groups.enable?"),
        ("algorithm.kl_loss_type=k4", "must be 'k1', 'k2' or 'k3'\n"),
    ],
)
def test_a_key_that_is_nobodys_keeps_the_hint_at_the_nearest_name(
    config_file: Path, override: str, expected: str
) -> None:
    assert expected in problems(config_file, override) + "\n"


def test_an_option_of_another_project_is_answered_with_ours(config_file: Path) -> None:
    def invoke(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["train", str(config_file), *arguments])
        assert result.exit_code == 2
        return result.stderr

    expected = "set trainer.train_batch_size=512"
    assert expected in invoke("--rollout-batch-size", "32")
    assert expected in invoke("--rollout-batch-size=32")
    assert "set trainer.train_batch_size=256" in invoke("--rollout-batch-size", "32", "rollout.n=8")
    several = invoke("--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--trainer.total_steps=3")
    assert "set trainer.train_batch_size=256" in several
    assert "set rollout.n=8" in several
    assert "write trainer.total_steps=3" in several
    assert "set rollout.n=8" in invoke("--n_samples_per_prompt", "8")
    assert "set rollout.n=8" in invoke("--rollout.n_samples_per_prompt", "8")
    assert "set rollout.colocate=true" in invoke("--colocate", "--dry-run")
    assert "No such option" in invoke("--nonsense", "8")
    assert option_hint("--nonsense", 8, known) is None


@pytest.mark.slow
def test_the_map_is_read_only_where_a_key_is_wrong(config_file: Path) -> None:
    code = (
        "import sys\nfrom megatron_bapo.cli.main import app\nfrom megatron_bapo.config.loading import load_config\n"
        f"load_config({str(config_file)!r})\n"
        "print('read:', [name for name in sys.modules if 'foreign_keys' in name or 'foreign_hints' in name])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "read: []" in result.stdout, result.stderr


def test_a_batch_of_prompts_is_converted_by_the_responses_that_are_given_beside_it(config_file: Path) -> None:
    arguments = (
        "data.train_batch_size=512",
        "actor_rollout_ref.rollout.n=8",
        "++actor_rollout_ref.actor.ppo_mini_batch_size=128",
    )
    with pytest.raises(UserError) as caught:
        load_config(config_file, arguments)
    for expected in ("set trainer.train_batch_size=4096", "set rollout.n=8", "set trainer.ppo_mini_batch_size=1024"):
        assert expected in str(caught.value)
