from pathlib import Path

import pytest

from megatron_bapo.config.cluster import ClusterConfig
from megatron_bapo.config.evaluation import EvalConfig
from megatron_bapo.config.loading import RENAMED, dump_config, load_config, load_section
from megatron_bapo.errors import UserError

BASE = """
run_dir: runs/test
model: {create: {}}
data: {train: {path: prompts/train.jsonl}}
trainer: {total_steps: 10, train_batch_size: 64, ppo_mini_batch_size: 32}
"""


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def problems(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_a_resolved_config_loads_back_equal(tmp_path: Path) -> None:
    text = BASE + (
        "optimizer: {lr: 1.5e-6}\nwarm_start: {num_steps: 3}\n"
        "reward: {type: function, function: 'my.module:score'}\nseed: 7\n"
    )
    tasks = (
        "data.train={path: null, reasoning_gym: {chain_sum: {min_terms: 2, operators: ['+', 'yes', '1e3']}}, size: 50}"
    )
    config = load_config(write(tmp_path, text), [tasks, "data.system_prompt='Größe: \"1e-6\"'"])
    assert load_config(write(tmp_path, dump_config(config), "resolved.yaml")) == config


def test_relative_paths_are_kept_as_given(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, BASE))
    assert config.run_dir == Path("runs/test")
    assert "path: prompts/train.jsonl" in dump_config(config)


def test_a_comment_in_an_override_is_refused_because_it_would_cut_the_value(tmp_path: Path) -> None:
    file = write(tmp_path, BASE)
    message = problems(file, "run_dir=runs/a #1")
    assert "YAML takes '#1' for a comment; put the value in quotes, such as 'run_dir=\"runs/a #1\"'" in message
    assert load_config(file, ['run_dir="runs/a #1"']).run_dir == Path("runs/a #1")
    assert load_config(file, ["model={create: {hidden_size: 64}}", "run_dir=runs/a#1 "]).run_dir == Path("runs/a#1")


def test_a_tilde_at_the_start_of_a_path_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(write(tmp_path, BASE), ["run_dir=~/runs/~x", "data.train.path=~/x.jsonl"])
    assert (config.run_dir, config.data.train.path) == (tmp_path / "runs" / "~x", tmp_path / "x.jsonl")


def test_overrides_are_dotted_keys_with_yaml_values(tmp_path: Path) -> None:
    overrides = ["optimizer.lr=2e-6", "seed=3", "data.train.path=x.jsonl", "data.shuffle=false", "seed=4"]
    config = load_config(write(tmp_path, BASE), overrides)
    assert (config.optimizer.lr, config.seed, config.data.shuffle) == (2e-6, 4, False)
    assert config.data.train.path == Path("x.jsonl")


def test_a_float_without_a_dot_is_a_number(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, BASE + "optimizer: {lr: 1e-6, adam_eps: 1E-9}\n")).optimizer.lr == 1e-6


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lr: 1", "lr=1: unknown key; did you mean optimizer.lr or warm_start.lr?"),
        ("rollouts: {n: 4}", "rollouts={n: 4}: unknown key; did you mean rollout?"),
        ("rollout: {temprature: 1}", "rollout.temprature=1: unknown key; did you mean rollout.temperature?"),
        ("rollout: {clip_gradient: 1}", "rollout.clip_gradient=1: unknown key; did you mean optimizer.clip_grad?"),
        ("algorithm: {clip_bounds: {rho: 1}}", "algorithm.clip_bounds.rho=1: unknown key; known here: preset, "),
        ("warm_start: {num_step: 3}", "warm_start.num_step=3: unknown key; did you mean warm_start.num_steps?"),
        ("warm_start: {steps: 3}", "warm_start.steps=3: unknown key; did you mean warm_start.num_steps?"),
        ("optimizer.lr: 1", "optimizer.lr=1: unknown key; dotted keys are for the command line; in a file, nest"),
    ],
)
def test_unknown_key_names_the_nearest_known_key(tmp_path: Path, line: str, expected: str) -> None:
    assert expected in problems(write(tmp_path, BASE + line + "\n"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.n=0", "rollout.n=0: must be greater than 0"),
        ("rollout.n=2.5", "rollout.n=2.5: must be a whole number"),
        ("rollout.n=true", "rollout.n=true: must be a number"),
        ("seed=4294967296", "seed=4294967296: must be less than 4294967296"),
        ("run_dir=''", "run_dir='': must be a path: not empty, no NUL character, no name of over 255 bytes"),
        ('run_dir="a\\0b"', "must be a path: not empty, no NUL character, no name of over 255 bytes"),
        (f"data.train.path={'ü' * 128}", "must be a path: not empty, no NUL character, no name of over 255 bytes"),
        *(
            (f"{key}={value}", f"{key}={value}: {name} would be part of a name, because environment variables are not")
            for key in ("run_dir", "data.train.path")
            for value, name in (("$SCRATCH/a.jsonl", "$SCRATCH"), ("a/${USER}.jsonl", "${USER}"))
        ),
        ("optimizer.lr=on", "optimizer.lr=true: must be a number"),
        ("rollout.sleep_level=true", "rollout.sleep_level=true: must be a number"),
        ("optimizer.lr_decay_steps=true", "optimizer.lr_decay_steps=true: must be a number"),
        ("logging.profile_steps=true", "logging.profile_steps=true: must be a list, such as [a, b]"),
        ("seed=-1", "seed=-1: must be greater than or equal to 0"),
        ("optimizer.adam_beta1=1.0", "optimizer.adam_beta1=1.0: must be less than 1"),
        ("rollout.gpu_memory_utilization=0", "rollout.gpu_memory_utilization=0: must be greater than 0"),
        ("model.create.head_dim=31", "model.create.head_dim=31: must be a multiple of 2"),
        ("rollout.n=many", "rollout.n=many: must be a whole number"),
        ("rollout.n=???", "rollout.n=???: is still to be set; `translate` writes ??? for a value that it cannot know"),
        ("rollout.n.x=1", "rollout.n={x: 1}: must be a whole number"),
        ("optimizer.lr=fast", "optimizer.lr=fast: must be a number"),
        ("data.shuffle=maybe", "data.shuffle=maybe: must be true or false"),
        ("data.system_prompt=3", "data.system_prompt=3: must be text; put it in quotes"),
        (
            "parallel.recompute_modules=mlp",
            "parallel.recompute_modules=mlp: must be a list, such as [a, b]",
        ),
        (
            "data.train_batch_size=3",
            "verl's data.train_batch_size is trainer.train_batch_size here (3 prompts x rollout.n=",
        ),
        (
            "+data.train_batch_size=3",
            "verl's data.train_batch_size is trainer.train_batch_size here (3 prompts x rollout.n=",
        ),
        ("model=Qwen/Qwen3-32B", "a mapping of keys to values; did you mean model.path=Qwen/Qwen3-32B?"),
        ("logging.wandb=true", "a mapping of keys to values; its keys are logging.wandb.project, logging.wandb."),
        ("train_batch_size=3", "did you mean trainer.train_batch_size? It counts trajectories, rollout.n for"),
        ("run_dir=3", "run_dir=3: must be a path, written as text"),
        ("rollout=3", "rollout=3: must be a section: a mapping of keys to values"),
        ("rollout.temprature=null", "rollout.temprature=null: unknown key; did you mean rollout.temperature?"),
        ("fp8.recip=null", "fp8.recip=null: unknown key; did you mean fp8.recipe?"),
        (
            "reward.type=exact",
            "reward.type=exact: must be 'reasoning_gym', 'math_verify', 'code', 'function', 'remote' or 'none'",
        ),
        ("reward.type=function", "reward={type: function}: reward.function is required by reward.type=function"),
        ("model.path=m", "model={create: {}, path: m}: give exactly one of model.path"),
        ("trainer.total_steps=null", "trainer.total_steps: is required; set it"),
        ("logging.profile_ranks=[true, 1]", "logging.profile_ranks=[true, 1]: must be a list of numbers"),
        (
            "parallel.pipeline_model_parallel_layout=[true,3]",
            "parallel.pipeline_model_parallel_layout=[true, 3]: must be a list of numbers",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_rule(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in problems(write(tmp_path, BASE), override)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "parallel.pipeline_model_parallel_layout=foo",
            "parallel.pipeline_model_parallel_layout=foo: must be 'auto', or must be a list, such as [a, b]",
        ),
        (
            "parallel.pipeline_model_parallel_layout=[1,x]",
            "parallel.pipeline_model_parallel_layout.1=x: must be a whole number",
        ),
        (
            "data.train.choices_key=3",
            "data.train.choices_key=3: must be text; put it in quotes, or must be a list, such as [a, b]",
        ),
    ],
)
def test_a_wrong_value_of_a_key_of_several_types_is_one_problem(tmp_path: Path, override: str, expected: str) -> None:
    _, *lines = problems(write(tmp_path, BASE), override).splitlines()
    assert lines == [f"  {expected}"]


def test_all_problems_of_a_file_are_reported_at_once_one_per_line_in_plain_words(tmp_path: Path) -> None:
    file = write(tmp_path, BASE + "seeds: 1\nrollout: {n: 0, m: 1}\nmodel: {}\n".replace("model: {}\n", ""))
    message = problems(file, "optimizer.lr=-1", "trainer.total_steps=null")
    header, *lines = message.splitlines()
    assert header == f"{file} with optimizer.lr=-1 with trainer.total_steps=null: 5 problems"
    assert {line.split("=")[0].split(":")[0].strip() for line in lines} == {
        "seeds",
        "rollout.n",
        "rollout.m",
        "optimizer.lr",
        "trainer.total_steps",
    }
    for jargon in ("pydantic", "http", "Input should", "extra", "type="):
        assert jargon not in message


def test_a_child_wins_over_the_files_it_extends(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    write(tmp_path / "base", BASE + "optimizer: {lr: 1.0e-3, clip_grad: 2.0}\n", "root.yaml")
    write(tmp_path, "extends: base/root.yaml\noptimizer: {lr: 1.0e-4}\nseed: 1\n", "middle.yaml")
    config = load_config(write(tmp_path, "extends: middle.yaml\nseed: 2\n"))
    assert (config.optimizer.lr, config.optimizer.clip_grad, config.seed) == (1e-4, 2.0, 2)


def test_a_null_removes_an_inherited_key(tmp_path: Path) -> None:
    write(tmp_path, BASE + "optimizer: {lr: 1.0e-3}\n", "base.yaml")
    child = "extends: base.yaml\noptimizer: {lr: null}\ndata: {train: {path: null, reasoning_gym: {a: {}}, size: 9}}\n"
    config = load_config(write(tmp_path, child))
    assert config.optimizer.lr == 1e-6
    assert (config.data.train.path, config.data.train.reasoning_gym) == (None, {"a": {}})


def test_a_null_on_the_command_line_restores_the_default_of_any_key(tmp_path: Path) -> None:
    given = write(tmp_path, BASE + "rollout: {temperature: 0.5}\ncheckpoint: {every_s: 5}\nfp8: {}\n", "given.yaml")
    absent = write(tmp_path, BASE)
    nulls = ["rollout.temperature=null", "checkpoint={every_s: null}", "warm_start.lr=null", "fp8=null"]
    expected = load_config(absent)
    for file in (given, absent):
        assert load_config(file, nulls) == expected
    assert load_config(absent, ["checkpoint.every_s=0"]).checkpoint.every_s == 0.0
    message = problems(write(tmp_path, BASE + "rollout: {temperature: null}\n", "null.yaml"))
    assert "rollout.temperature=null: must be a number; remove the key to use its default" in message


def test_a_mapping_value_replaces_the_parents_and_dotted_keys_set_single_entries(tmp_path: Path) -> None:
    tasks = "reasoning_gym: {spell: {min_len: 3}, chain_sum: {}}, size: 4"
    write(tmp_path, BASE.replace("path: prompts/train.jsonl", tasks), "base.yaml")
    child = write(tmp_path, "extends: base.yaml\ndata: {train: {reasoning_gym: {gcd: {}}}}\n")

    def loaded(file: Path, *overrides: str) -> tuple[object, object]:
        train = load_config(file, overrides).data.train
        return train.reasoning_gym, train.size

    assert loaded(child) == ({"gcd": {}}, 4)
    base = tmp_path / "base.yaml"
    assert loaded(base, "data.train.reasoning_gym={gcd: {seed: null}}") == ({"gcd": {"seed": None}}, 4)
    assert loaded(base, "data.train={reasoning_gym: {gcd: {}}}") == ({"gcd": {}}, 4)
    reached = {"spell": {"min_len": 5, "max_len": 6}}
    dotted = [f"data.train.reasoning_gym.{key}" for key in ("spell.min_len=5", "spell.max_len=6", "chain_sum=null")]
    assert loaded(base, *dotted) == (reached, 4)


def test_a_model_can_be_switched_by_overrides(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, BASE), ["model.create=null", "model.path=some/model"])
    assert config.model_path == Path("some/model")


def test_circular_extends_are_named(tmp_path: Path) -> None:
    write(tmp_path, "extends: config.yaml\n", "other.yaml")
    file = write(tmp_path, "extends: other.yaml\n")
    names = " -> ".join(str(tmp_path / name) for name in ("config.yaml", "other.yaml", "config.yaml"))
    assert f"extends is circular: {names}; remove extends from one" in problems(file)


def test_a_missing_file_is_named_with_the_folder_of_relative_paths(tmp_path: Path) -> None:
    message = problems(Path("no/such.yaml"))
    assert "cannot read the config file no/such.yaml: No such file" in message
    assert f"relative paths start at {Path.cwd()}" in message
    file = write(tmp_path, "extends: base.yaml\n")
    message = problems(file)
    assert f"{tmp_path / 'base.yaml'}, which {file} extends: No such file" in message
    assert f"relative paths start at {tmp_path}" in message


def test_a_duplicate_key_is_refused_with_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, "seed: 1\noptimizer:\n  lr: 1\n  lr: 2\n")
    assert problems(file) == f"{file} line 4: key 'lr' is here for the second time; keep one of them"


def test_a_yaml_merge_may_be_overridden(tmp_path: Path) -> None:
    tasks = "reasoning_gym: {a: &a {x: 1, y: 2}, b: {<<: *a, y: 3}}, size: 4"
    config = load_config(write(tmp_path, BASE.replace("path: prompts/train.jsonl", tasks)))
    assert config.data.train.reasoning_gym == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nmodel: {create: {}\nrun_dir: x\n", "line 3: expected ',' or '}'"),
        ("seed: !!python/object:os.system {}\n", "line 1: could not determine a constructor"),
        ("seed: 2024-13-45\n", "not YAML: month must be in 1..12"),
        ("? [a]\n: 1\n", "line 1: found unhashable key"),
        ("seed: 1\n---\n", "line 2: expected a single document in the stream, but found another document"),
        ("- seed\n", "contains [seed]; it must be a mapping of sections"),
        ("", "contains nothing; it must be a mapping of sections"),
        ("model: &m {create: *m}\n", "line 1: found unconstructable recursive node"),
        ("seed: " + "[" * 3000, "nests values too deeply to be read"),
        ("extends: [a, b]\n", "extends=[a, b] must be one file name, relative to this file"),
    ],
)
def test_a_file_that_is_not_a_config_is_refused_with_the_reason(tmp_path: Path, text: str, expected: str) -> None:
    file = write(tmp_path, text)
    message = problems(file)
    assert message.startswith(str(file))
    assert expected in message


def test_a_file_of_another_command_is_named_as_such(tmp_path: Path) -> None:
    text = "run_dir: runs/eval\nmodel: {path: m}\ndata: {validation: {path: p.jsonl}}\n"
    file = write(tmp_path, text, "eval.yaml")
    assert problems(file) == f"{file} configures an evaluation; run it with `megatron-bapo eval {file}`"
    with pytest.raises(UserError, match=r"configures a training run; evaluate its model with configs/eval/paper\.yaml"):
        load_section(EvalConfig, write(tmp_path, BASE))
    assert "unknown key" in problems(write(tmp_path, BASE + "nonsense: 1\n"))
    write(tmp_path, BASE, "base.yaml")
    child = write(tmp_path, "extends: base.yaml\ndata: {train: {on_bad_line: skip}}\n")
    with pytest.raises(UserError, match="configures a training run"):
        load_section(EvalConfig, child)


def test_a_cluster_and_a_run_are_told_apart(tmp_path: Path) -> None:
    cluster = write(tmp_path, "gpus_per_node: 4\n", "mine.yaml")
    assert problems(cluster, "seed=2") == (
        f"{cluster} configures a Slurm cluster; use it with `megatron-bapo submit CONFIG --cluster {cluster}`"
    )
    run = write(tmp_path, BASE)
    with pytest.raises(UserError, match=r"configures a training run; queue it with `megatron-bapo submit .* --cluster"):
        load_section(ClusterConfig, run)


def test_a_file_of_another_encoding_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(b"run_dir: \xff\xfe\n")
    assert f"{file} is not UTF-8 text (invalid start byte at byte 9); save it as UTF-8" in problems(file)


@pytest.mark.parametrize("override", ["seed", "=1", "a..b=1", "seed="])
def test_an_override_without_key_or_value_is_refused(tmp_path: Path, override: str) -> None:
    assert f"override {override!r} must be KEY=VALUE" in problems(write(tmp_path, BASE), override)


def test_an_override_that_is_not_yaml_is_refused(tmp_path: Path) -> None:
    assert "override 'seed=[1' line 1: expected ',' or ']'" in problems(write(tmp_path, BASE), "seed=[1")


@pytest.mark.parametrize("old", RENAMED)
def test_a_renamed_key_works_under_its_old_name_with_a_warning_that_names_the_new_one(tmp_path: Path, old: str) -> None:
    section, name = old.split(".")
    new_section, new_name = RENAMED[old].split(".")
    base, value = write(tmp_path, BASE), {"rollout.on_refresh": "keep", "logging.num_sample_answers": 3}[old]
    old_file = write(tmp_path, f"extends: config.yaml\n{section}: {{{name}: {value}}}\n", "old.yaml")
    with pytest.warns(FutureWarning, match=rf"old\.yaml: {old} is now {RENAMED[old]}; the old name will be removed"):
        in_file = load_config(old_file)
    with pytest.warns(FutureWarning, match=f"override '{old}={value}': {old} is now {RENAMED[old]}"):
        on_command_line = load_config(base, [f"{old}={value}"])
    for config in (in_file, on_command_line):
        assert getattr(getattr(config, new_section), new_name) == value


def test_a_renamed_key_under_both_names_is_refused(tmp_path: Path) -> None:
    both = write(tmp_path, "rollout: {on_refresh: keep, on_weight_update: drain}\n")
    assert "has both rollout.on_refresh and rollout.on_weight_update, which is its new name" in problems(both)
