from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megatron_bapo.cli.main import app
from megatron_bapo.commands.translate import From, Translation, translate
from megatron_bapo.commands.translated_text import config_text, report_lines
from megatron_bapo.config.checks import rule_problems
from megatron_bapo.config.colocation_checks import layer_problems
from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError

VERL = """
actor_rollout_ref:
  hybrid_engine: true
  model: {path: models/Qwen3-8B, use_remove_padding: true}
  actor:
    _target_: verl.workers.config.McoreActorConfig
    strategy: megatron
    ppo_mini_batch_size: 64
    ppo_epochs: 1
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 24576
    clip_ratio_low: 0.2
    clip_ratio_high: 0.28
    clip_ratio_c: 10.0
    loss_agg_mode: token-mean
    entropy_coeff: 0
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    optim: {lr: 1e-6, lr_warmup_steps: 10, weight_decay: 0.1, clip_grad: 1.0, betas: [0.9, 0.98]}
    megatron:
      tensor_model_parallel_size: 4
      pipeline_model_parallel_size: 2
      virtual_pipeline_model_parallel_size: null
      context_parallel_size: 1
      sequence_parallel: true
      param_offload: true
      optimizer_offload: true
      override_transformer_config:
        recompute_granularity: selective
        recompute_modules: [core_attn, layernorm]
  ref:
    log_prob_use_dynamic_bsz: ${actor_rollout_ref.actor.use_dynamic_bsz}
  rollout:
    name: vllm
    n: 16
    temperature: 1.0
    tensor_model_parallel_size: 4
    gpu_memory_utilization: 0.6
    max_num_seqs: 512
    prompt_length: ${data.max_prompt_length}
    free_cache_engine: true
    val_kwargs: {n: 4, temperature: 0.6, top_p: 0.95, do_sample: true}
data:
  train_files: data/train.parquet
  val_files: data/test.parquet
  train_batch_size: 256
  max_prompt_length: 2048
  max_response_length: 8192
  filter_overlong_prompts: true
  truncation: error
reward:
  reward_manager: {name: dapo}
  reward_kwargs: {overlong_buffer_cfg: {enable: true, len: 4096, penalty_factor: 1.0, log: false}}
algorithm:
  adv_estimator: grpo
  norm_adv_by_std_in_grpo: false
  use_kl_in_reward: false
  kl_ctrl: {kl_coef: 0.001}
  filter_groups: {enable: true, metric: acc, max_num_gen_batches: 10}
  rollout_correction:
    {rollout_is: token, rollout_is_threshold: 2.0, rollout_rs: seq_mean_k1, rollout_rs_threshold: "0.5_2.5"}
trainer:
  total_training_steps: 200
  project_name: dapo
  experiment_name: qwen3-8b
  default_local_dir: checkpoints/${trainer.project_name}/${trainer.experiment_name}
  logger: [console, wandb]
  nnodes: 2
  n_gpus_per_node: 8
  save_freq: 20
  test_freq: 5
critic: {optim: {lr: 1e-5}}
ray_kwargs: {ray_init: {num_cpus: null}}
"""

NEMO_RL = """
grpo:
  num_prompts_per_step: 64
  num_generations_per_prompt: 32
  max_num_steps: 500
  max_rollout_turns: 1
  normalize_rewards: true
  use_leave_one_out_baseline: false
  val_period: 10
  seed: 42
  use_dynamic_sampling: true
  dynamic_sampling_max_gen_batches: 10
  overlong_filtering: true
  async_grpo: {enabled: false, max_trajectory_age_steps: 1, in_flight_weight_updates: false}
loss_fn:
  reference_policy_kl_penalty: 0.01
  reference_policy_kl_type: k3
  ratio_clip_min: 0.2
  ratio_clip_max: 0.28
  ratio_clip_c: null
  token_level_loss: true
  use_importance_sampling_correction: true
  use_kl_in_reward: false
checkpointing: {enabled: true, checkpoint_dir: results/grpo, keep_top_k: 3, save_period: 10}
policy:
  model_name: Qwen/Qwen2.5-7B
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 512
  train_micro_batch_size: 2
  max_total_sequence_length: 4096
  precision: bfloat16
  dtensor_cfg: {enabled: false, tensor_parallel_size: 8}
  megatron_cfg:
    enabled: true
    activation_checkpointing: true
    recompute_granularity: full
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 1
    context_parallel_size: 2
    sequence_parallel: true
    optimizer: {optimizer: adam, lr: 3.0e-7, min_lr: 3.0e-8, weight_decay: 0.01, clip_grad: "${policy.max_grad_norm}"}
    scheduler: {lr_decay_style: cosine, lr_decay_iters: 400, lr_warmup_iters: 13}
    fp8_cfg: {enabled: true, fp8: e4m3, fp8_recipe: blockwise, fp8_param: false}
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  max_grad_norm: 1.0
  generation:
    backend: vllm
    max_new_tokens: 3072
    temperature: 1.0
    top_p: 1.0
    top_k: null
    vllm_cfg: {tensor_parallel_size: 2, gpu_memory_utilization: 0.6, precision: fp8, kv_cache_dtype: fp8}
    colocated: {enabled: false, resources: {num_nodes: 1, gpus_per_node: 8}}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  train: {data_path: data/train.jsonl, input_key: question}
  validation: {data_path: data/test.jsonl}
  default: {output_key: expected}
env: {math: {num_workers: 16, math_verify_impl: hf_math_verify}}
logger:
  wandb_enabled: true
  tensorboard_enabled: true
  mlflow_enabled: true
  swanlab_enabled: true
  wandb: {project: grpo, name: first}
  mlflow: {experiment_name: maths, run_name: second, tracking_uri: "http://mlflow:5000"}
cluster: {num_nodes: 3, gpus_per_node: 8}
"""


def write(folder: Path, text: str, name: str = "theirs.yaml") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def loaded(folder: Path, result: Translation, *overrides: str) -> Config:
    return load_config(write(folder, config_text(result), "ours.yaml"), overrides)


def refused(path: Path, *overrides: str, source: From = "auto") -> str:
    with pytest.raises(UserError) as caught:
        translate(path, overrides, source)
    return str(caught.value)


def settings(left_out: list[Any]) -> dict[str, str]:
    return {each.setting: each.reason for each in left_out}


def test_a_configuration_of_verl_loads_in_our_keys(tmp_path: Path) -> None:
    result = translate(write(tmp_path, VERL))
    config = loaded(tmp_path, result)

    assert (result.project, result.unknown, result.unresolved, result.to_set) == ("verl", [], [], {})
    assert list(rule_problems(config)) == result.broken_rules == []
    assert str(config.run_dir) == "checkpoints/dapo/qwen3-8b"
    parallel, trainer, rollout, algorithm = config.parallel, config.trainer, config.rollout, config.algorithm
    assert (parallel.world_size, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (
        16,
        4,
        2,
    )
    assert (parallel.sequence_parallel, parallel.recompute_modules) == (True, ("core_attn",))
    assert (trainer.train_batch_size, trainer.ppo_mini_batch_size, trainer.total_steps) == (4096, 1024, 200)
    assert (trainer.max_tokens_per_gpu, trainer.offload) == (24576, True)
    assert (rollout.n, rollout.num_engines, rollout.tensor_parallel_size, rollout.max_num_seqs) == (16, 4, 4, 512)
    assert (rollout.colocate, rollout.sleep_level, rollout.enforce_eager) == (True, 2, False)
    assert (rollout.filter_groups.enable, rollout.filter_groups.max_num_gen_batches) == (True, 10)
    assert (config.data.max_prompt_length, rollout.max_response_length) == (2048, 8192)
    assert (algorithm.objective, algorithm.adv_estimator, algorithm.norm_adv_by_std) == ("ppo", "grpo", False)
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert (algorithm.kl_loss_coef, algorithm.kl_loss_type, algorithm.kl_reward_coef) == (0.001, "k3", 0.0)
    assert algorithm.overlong.model_dump() == {"mode": "penalty", "buffer_length": 4096, "penalty_factor": 1.0}
    correction = algorithm.rollout_correction
    assert (algorithm.behaviour_policy, correction.rollout_is, correction.rollout_rs) == (
        "recomputed",
        "token",
        "geometric",
    )
    assert (correction.rollout_rs_threshold_lower, correction.rollout_rs_threshold) == (0.4, 2.0)
    assert (config.optimizer.lr, config.optimizer.lr_warmup_steps, config.optimizer.adam_beta2) == (1e-6, 40, 0.98)
    evaluation = config.evaluation
    assert (evaluation.every_steps, evaluation.n, evaluation.temperature, evaluation.top_p) == (5, 4, 0.6, 0.95)
    assert config.checkpoint.every_steps == 20
    assert config.logging.wandb is not None
    assert (config.logging.wandb.project, config.logging.wandb.name) == ("dapo", "qwen3-8b")


def test_what_verl_has_and_we_have_not_is_told_with_the_reason(tmp_path: Path) -> None:
    result = translate(write(tmp_path, VERL))
    assert list(settings(result.without)) == ["data.filter_overlong_prompts=true"]
    assert "prepare_data.py" in settings(result.without)["data.filter_overlong_prompts=true"]
    idle = settings(result.idle)
    assert {"critic.optim.lr", "actor_rollout_ref.ref.log_prob_use_dynamic_bsz", "data.truncation"} <= set(idle)
    modules = "parallel.recompute_modules=[core_attn]: without layernorm"
    assert any(modules in line for line in result.converted)
    lines = list(report_lines(result))
    assert lines[0].endswith(
        "1 without a counterpart, 10 not needed here (--all lists them), 0 not known to this translator"
    )
    assert "Not needed here:" not in lines
    assert "Not needed here:" in list(report_lines(result, with_idle=True))


def test_units_are_in_the_comments_of_the_result(tmp_path: Path) -> None:
    text = config_text(translate(write(tmp_path, VERL)))
    assert "train_batch_size: 4096  # 256 prompts x rollout.n=16" in text
    assert "lr_warmup_steps: 40  # 10 rollout batches x 4 updates" in text
    assert "num_engines: 4  # 16 GPUs / 4 of an engine" in text
    assert "enforce_eager: false  # verl's default" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_a_configuration_of_nemo_rl_loads_in_our_keys(tmp_path: Path) -> None:
    result = translate(write(tmp_path, NEMO_RL))
    config = loaded(tmp_path, result)

    assert (result.project, result.unknown, result.unresolved) == ("nemo-rl", [], [])
    assert list(rule_problems(config)) == result.broken_rules == []
    assert set(result.to_set) == {"model.path"}
    assert str(config.model.path) == "models/Qwen2.5-7B"
    parallel, trainer, rollout, algorithm = config.parallel, config.trainer, config.rollout, config.algorithm
    assert (parallel.world_size, rollout.num_engines, rollout.colocate, trainer.offload) == (16, 4, False, False)
    assert (parallel.tensor_model_parallel_size, parallel.context_parallel_size) == (2, 2)
    assert parallel.recompute_granularity == "full"
    assert (trainer.train_batch_size, trainer.ppo_mini_batch_size, trainer.total_steps) == (2048, 512, 500)
    assert trainer.max_tokens_per_gpu == 4096
    assert (config.data.max_prompt_length, rollout.max_response_length) == (1024, 3072)
    assert (config.data.train.prompt_key, config.data.train.label_key) == ("question", "expected")
    assert (algorithm.objective, algorithm.adv_estimator, algorithm.behaviour_policy) == ("ppo", "grpo", "recomputed")
    assert (algorithm.rollout_correction.rollout_is, algorithm.overlong.mode) == ("token", "filter")
    assert (algorithm.kl_loss_coef, algorithm.kl_loss_type, algorithm.loss_agg_mode) == (0.01, "k2", "token-mean")
    assert (rollout.quantization, rollout.kv_cache_dtype, rollout.top_k) == ("fp8_per_block", "fp8_e4m3", -1)
    assert config.fp8 is not None
    assert (config.model.transformer_impl, config.fp8.recipe) == ("transformer_engine", "blockwise")
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.min_lr, optimizer.clip_grad) == (3e-7, 3e-8, 1.0)
    assert (optimizer.lr_warmup_steps, optimizer.lr_decay_steps) == (52, 1600)
    assert (config.evaluation.every_steps, config.checkpoint.every_steps, config.checkpoint.keep) == (10, 10, 3)
    mlflow = config.logging.mlflow
    assert mlflow is not None
    assert (mlflow.experiment, mlflow.run_name, mlflow.tracking_uri) == ("maths", "second", "http://mlflow:5000")
    assert set(settings(result.without)) == {"logger.swanlab_enabled=true"}


def test_distillation_of_nemo_rl_keeps_its_teacher_batches_and_objective(tmp_path: Path) -> None:
    """With the loss of examples/configs/distillation_math.yaml."""
    distillation = """
distillation: {num_prompts_per_step: 512, num_generations_per_prompt: 1, max_num_steps: 1000, topk_logits_k: 64}
loss_fn: {kl_type: mixed, mixed_kl_weight: 0.5, zero_outside_topk: false}
teacher: {model_name: Qwen/Qwen3-4B, megatron_cfg: {enabled: true, tensor_model_parallel_size: 2}}
policy:
"""
    file = write(tmp_path, distillation + NEMO_RL.partition("policy:\n")[2])
    result = translate(file)
    (tmp_path / "ours.yaml").write_text(config_text(result))
    config = load_config(tmp_path / "ours.yaml")

    assert config.algorithm.objective == "distill"
    assert config.algorithm.distillation is not None
    assert config.algorithm.distillation.teacher == Path("models/Qwen3-4B")
    assert (config.trainer.total_steps, config.trainer.train_batch_size, config.rollout.n) == (1000, 512, 1)
    assert {"distillation.topk_logits_k=64", "loss_fn.mixed_kl_weight=0.5"} <= {each.setting for each in result.without}
    assert (result.unknown, result.broken_rules) == ([], [])


@pytest.mark.parametrize(("task_rewards", "objective"), [("false", "distill"), ("true", "ppo")])
def test_distillation_of_verl_has_no_rewards_unless_it_asks_for_them(
    tmp_path: Path, task_rewards: str, objective: str
) -> None:
    """With the keys of examples/on_policy_distillation_trainer."""
    distillation = [
        "distillation.enabled=true",
        "distillation.teacher_models.teacher_model.model_path=models/Qwen3-32B",
        f"distillation.distillation_loss.use_task_rewards={task_rewards}",
    ]
    result = translate(write(tmp_path, VERL), distillation)
    algorithm = loaded(tmp_path, result).algorithm
    assert algorithm.distillation is not None
    assert (algorithm.objective, algorithm.distillation.teacher) == (objective, Path("models/Qwen3-32B"))
    assert result.broken_rules == []
    assert (algorithm.clip_ratio_c, algorithm.overlong.mode) == (
        (None, "keep") if objective == "distill" else (10.0, "penalty")
    )


def test_an_override_with_a_package_chooses_the_file_of_its_group(tmp_path: Path) -> None:
    for name, length in (("plain", 3), ("long", 4)):
        write(tmp_path, f"ppo_epochs: {length}\n", f"actor/{name}.yaml")
    defaults = "defaults: [actor@actor_rollout_ref.actor: plain, _self_]\n"
    file = write(tmp_path, defaults + "actor_rollout_ref: {rollout: {n: 8}}\n")
    assert translate(file).config["trainer.ppo_epochs"] == 3
    result = translate(file, ["actor@actor_rollout_ref.actor=long"])
    assert (result.config["trainer.ppo_epochs"], result.unknown, result.notes) == (4, [], [])


@pytest.mark.parametrize(("estimator", "in_reward"), [("k1+", "k1"), ("k3+", "k3"), ("low_var_kl+", "k3")])
def test_a_straight_through_kl_of_verl_keeps_its_gradient_and_its_value(
    tmp_path: Path, estimator: str, in_reward: str
) -> None:
    """A `+` replaces the gradient by that of k2 (`kl_penalty` in `core_algos.py`); a reward has no gradient."""
    overrides = [f"actor_rollout_ref.actor.kl_loss_type={estimator}", f"algorithm.kl_penalty={estimator}"]
    result = translate(write(tmp_path, VERL), [*overrides, "algorithm.use_kl_in_reward=true"])
    algorithm = loaded(tmp_path, result).algorithm
    assert (algorithm.kl_loss_type, algorithm.kl_reward_type) == ("k2", in_reward)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_two_bounds_of_weights_reject_at_their_level(tmp_path: Path, level: str) -> None:
    """verl sets the weights outside of `lower_upper` to 0 (`rollout_corr_helper.py`)."""
    section = "algorithm.rollout_correction"
    overrides = [f"{section}.rollout_is={level}", f"{section}.rollout_is_threshold='0.5_5.0'"]
    result = translate(write(tmp_path, VERL), [*overrides, f"{section}.rollout_rs=null"])
    correction = loaded(tmp_path, result).algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_rs) == (level, level)
    assert (correction.rollout_rs_threshold_lower, correction.rollout_rs_threshold) == (0.5, 5.0)
    assert correction.rollout_is_threshold == 5.0

    both = translate(write(tmp_path, VERL), overrides)
    assert "takes the place of rollout_rs" in settings(both.without)[f"{section}.rollout_is_threshold=0.5_5.0"]
    assert both.config[f"{section}.rollout_rs"] == "geometric"


def test_a_shared_prompt_stays_shared(tmp_path: Path) -> None:
    for value in ("true", "false"):
        result = translate(write(tmp_path, VERL), [f"actor_rollout_ref.actor.use_prefix_grouper={value}"])
        assert loaded(tmp_path, result).trainer.share_prompts
        assert ("trainer.share_prompts" in result.config) == (value == "true")


def test_the_note_of_a_converted_value_is_told(tmp_path: Path) -> None:
    result = translate(write(tmp_path, VERL))
    told = "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla (verl's default) -> algorithm.objective=ppo: `bapo`"
    assert any(line.startswith(told) for line in result.converted)


NOTED = {
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4": "Ulysses is parallel.cp_comm_type=a2a",
    "data.train_max_samples=2000": "kept from the start of the file; verl samples them at random while data.shuffle",
    "actor_rollout_ref.rollout.top_p=0.9": "needs algorithm.keep_sampling_mask",
    "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router=true": "the gate of a shared expert is",
    "trainer.save_freq=-1": "checkpoints cannot be switched off",
    "grpo.dynamic_sampling_max_gen_batches=12": "after so many, groups of equal rewards are kept",
    "policy.megatron_cfg.freeze_moe_router=true": "set it for experts on one rank too",
    "checkpointing.keep_top_k=5": "the newest, not the best",
}
"""Given values, which stay what they are, and what the report says of them."""


@pytest.mark.parametrize("given", NOTED)
def test_the_note_of_a_given_value_that_stays_is_told(tmp_path: Path, given: str) -> None:
    is_verls = given.startswith(("actor_rollout_ref", "data", "trainer"))
    write(tmp_path, VERL.replace("strategy: megatron", "strategy: fsdp") if is_verls else NEMO_RL, "base.yaml")
    file = write(tmp_path, "defaults: [base]\n" if is_verls else "defaults: base.yaml\n")
    assert [line for line in translate(file, [given]).converted if NOTED[given] in line] != []
    assert [line for line in translate(file).converted if NOTED[given] in line] == []


def test_the_note_is_not_told_of_a_default_or_of_a_value_that_it_does_not_concern(tmp_path: Path) -> None:
    file = write(tmp_path, VERL)
    neutral = ["actor_rollout_ref.rollout.top_p=1.0", "actor_rollout_ref.rollout.top_k=-1", "data.val_max_samples=-1"]
    assert translate(file, neutral).converted == translate(file).converted


def test_paths_in_the_home_directory_need_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    overrides = ["data.train_files=~/data/train.parquet", "actor_rollout_ref.model.path=~/Qwen3-8B"]
    result = translate(write(tmp_path, VERL), overrides)
    config = loaded(tmp_path, result)
    assert result.to_set == {}
    assert config.data.train.path == tmp_path / "data" / "train.parquet"
    assert config.model.path == tmp_path / "Qwen3-8B"


def test_overrides_are_those_of_the_other_project(tmp_path: Path) -> None:
    overrides = [
        "actor_rollout_ref.rollout.n=8",
        "+trainer.rollout_data_dir=/tmp/rollouts",
        "~algorithm.filter_groups",
        "++actor_rollout_ref.actor.optim.lr=2e-6",
        "data.train_files=['a.parquet', 'b.parquet']",
    ]
    result = translate(write(tmp_path, VERL), overrides)
    config = loaded(tmp_path, result, "data.train.path=all.parquet")
    assert (config.rollout.n, config.trainer.train_batch_size, config.logging.dump_rollouts) == (8, 2048, True)
    assert (config.optimizer.lr, config.rollout.filter_groups.enable) == (2e-6, False)
    assert "tools/prepare_data.py a.parquet b.parquet --output ALL.parquet" in result.to_set["data.train.path"]
    assert "path: ???" in config_text(result)


def test_uneven_pipeline_stages_keep_their_layers(tmp_path: Path) -> None:
    prefix = "+actor_rollout_ref.actor.megatron.override_transformer_config"
    ends = [f"{prefix}.num_layers_in_first_pipeline_stage=15", f"{prefix}.num_layers_in_last_pipeline_stage=14"]
    for overrides, layers in (
        (ends, (15, 14)),
        (ends[1:], (None, 14)),
        ([f"{prefix}.account_for_loss_in_pipeline_split=true"], "auto"),
        ([f"{prefix}.account_for_loss_in_pipeline_split=false"], None),
        ([f"{prefix}.pipeline_model_parallel_layout='Et*15|(t*16|)*2t*14,L'"], (15, 16, 16, 14)),
    ):
        result = translate(write(tmp_path, VERL), overrides)
        assert loaded(tmp_path, result).parallel.pipeline_model_parallel_layout == layers
    (alone,) = translate(write(tmp_path, VERL), [f"{prefix}.pipeline_model_parallel_layout='E|t*36|L'"]).without[-1:]
    assert alone.reason.startswith("every model chunk has layers here")


def test_what_a_file_leaves_to_verls_defaults_is_written_where_ours_differ(tmp_path: Path) -> None:
    result = translate(write(tmp_path, "actor_rollout_ref: {}\nalgorithm: {adv_estimator: rloo}\n"))
    assert set(result.to_set) == {"model.path", "data.train.path", "trainer.total_steps", "data.validation.path"}
    assert "trainer.total_epochs=30: runs are counted in rollout batches" in result.to_set["trainer.total_steps"]
    config = loaded(tmp_path, result, "model.path=m", "data.train.path=t.parquet", "trainer.total_steps=5")
    assert (config.rollout.n, config.trainer.train_batch_size, config.algorithm.clip_ratio_c) == (1, 1024, 3.0)
    assert "rollout.n=1 with algorithm.adv_estimator=rloo" in result.broken_rules[0]


def test_a_list_of_one_empty_name_is_no_file(tmp_path: Path) -> None:
    """As verl's scripts write it where they leave the held-out prompts to the reader: TEST_FILE="['']"."""
    result = translate(write(tmp_path, VERL), ["data.val_files=['']"])
    assert "data.validation.path" not in result.config
    assert result.broken_rules == []


def test_keys_that_need_one_another_are_dropped_together(tmp_path: Path) -> None:
    alone = ["trainer.nnodes=1", "rollout.nnodes=1", "rollout.n_gpus_per_node=8", "~data.val_files", "~trainer.logger"]
    result = translate(write(tmp_path, VERL), [*alone, "trainer.logger=console"])
    config = loaded(tmp_path, result)
    assert (config.rollout.colocate, config.rollout.sleep_level, config.trainer.offload) == (False, 0, False)
    assert (config.rollout.num_engines, config.parallel.world_size) == (2, 8)
    large = loaded(
        tmp_path,
        translate(
            write(tmp_path, VERL),
            [
                *alone,
                "trainer.logger=console",
                "rollout.nnodes=4",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=16",
            ],
        ),
    )
    assert (large.rollout.num_engines, large.rollout.nodes_per_engine) == (2, 2)
    assert config.logging.wandb is None
    assert config.data.validation is None
    assert "evaluation.every_steps=5" in result.to_set["data.validation.path"]


def test_the_names_of_verl_go_to_the_trackers_in_its_list(tmp_path: Path) -> None:
    result = translate(write(tmp_path, VERL), ["trainer.logger=[console,mlflow]"])
    logging = loaded(tmp_path, result).logging
    assert logging.mlflow is not None
    assert (logging.wandb, logging.tensorboard) == (None, False)
    assert (logging.mlflow.experiment, logging.mlflow.run_name) == ("dapo", "qwen3-8b")


def test_asynchronous_training_of_verl_becomes_our_mode(tmp_path: Path) -> None:
    text = VERL + "async_training: {staleness_threshold: 0.5, trigger_parameter_sync_step: 4, require_batches: 1}\n"
    result = translate(
        write(tmp_path, text),
        [
            "+rollout={nnodes: 1, n_gpus_per_node: 8, total_rollout_steps: 51200}",
            "async_training.partial_rollout=true",
            "data.train_batch_size=0",
            "trainer.total_training_steps=null",
        ],
    )
    config = loaded(tmp_path, result)
    assert (config.rollout.mode, config.rollout.on_weight_update) == ("async", "abort_and_resume")
    assert (config.trainer.train_batch_size, config.trainer.ppo_mini_batch_size) == (4096, 1024)
    assert (config.trainer.total_steps, config.rollout.max_staleness) == (200, 1)


MEGATRON = "actor_rollout_ref.actor.strategy=megatron"
ULYSSES = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
WITHOUT_FP8 = ("policy.megatron_cfg.fp8_cfg.enabled=false", "policy.generation.vllm_cfg.precision=auto")


@pytest.mark.parametrize(
    ("text", "overrides", "layers", "report"),
    [
        (VERL, [MEGATRON], "transformer_engine", "Converted:"),
        (VERL, ["actor_rollout_ref.actor.strategy=fsdp2"], "local", ""),
        (VERL, ["actor_rollout_ref.actor.strategy=fsdp2", f"{ULYSSES}=2"], "transformer_engine", "Still to be set"),
        (VERL, [MEGATRON, "actor_rollout_ref.actor.megatron.dtype=float32"], "local", ""),
        (NEMO_RL, [*WITHOUT_FP8], "transformer_engine", "Converted:"),
        (NEMO_RL, [*WITHOUT_FP8, "policy.megatron_cfg.transformer_impl=local"], "local", ""),
        (NEMO_RL, [*WITHOUT_FP8, "policy.precision=float32"], "local", ""),
        (NEMO_RL, ["policy.megatron_cfg.enabled=false", *WITHOUT_FP8], "local", ""),
    ],
)
def test_layers_of_transformer_engine_stay_its_own(
    tmp_path: Path, text: str, overrides: list[str], layers: str, report: str
) -> None:
    """verl's `model_initializer.py` and Megatron-Core's default in NeMo-RL's `setup.py` build them."""
    result = translate(write(tmp_path, text), overrides)
    config = loaded(tmp_path, result)
    assert (config.model.transformer_impl, result.broken_rules) == (layers, [])
    assert all(len(line) <= 120 for line in config_text(result).splitlines())
    lines = list(report_lines(result))
    about = [number for number, line in enumerate(lines) if "set model.transformer_impl=local" in line]
    heads = [next(line for line in reversed(lines[:number]) if not line.startswith(" ")) for number in about]
    assert [head for head in heads if not report or not head.startswith(report)] == []
    assert bool(heads) == bool(report)
    told = list(layer_problems(config, None, has_transformer_engine=False))
    assert bool(told) == (layers == "transformer_engine")
    assert list(layer_problems(loaded(tmp_path, result, "model.transformer_impl=local"), None, False)) == []


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("async_training: {partial_rollout: false, staleness_threshold: 0.1, require_batches: 1}\n", 0),
        ("async_training: {staleness_threshold: 0.1, require_batches: 1}\n", 0),
        ("", 1),
    ],
)
def test_verls_asynchronous_trainers_do_not_read_the_mode_of_its_synchronous_one(
    tmp_path: Path, section: str, told: int
) -> None:
    """`main_ppo.py` alone reads it; a section `rollout` without `async_training` is the one-step-off trainer's."""
    write(tmp_path, VERL.replace("trainer:\n", "trainer:\n  v1: {trainer_mode: sync}\n"), "base.yaml")
    engines = "rollout: {nnodes: 1, n_gpus_per_node: 8, total_rollout_steps: 51200}\n"
    result = translate(write(tmp_path, "defaults: [base, _self_]\n" + engines + section))
    config = loaded(tmp_path, result)
    assert (config.rollout.mode, config.rollout.max_staleness, config.rollout.colocate) == ("async", 1, False)
    assert sum("one-step-off" in line for line in result.converted) == told
    assert result.broken_rules == []
    assert loaded(tmp_path, translate(tmp_path / "base.yaml")).rollout.mode == "sync"


def test_a_token_budget_counts_only_where_it_is_used(tmp_path: Path) -> None:
    file, by_number = write(tmp_path, VERL), "actor_rollout_ref.actor.use_dynamic_bsz=false"
    assert "trainer.max_tokens_per_gpu" not in translate(file, [by_number]).config
    result = translate(file, [by_number, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"])
    assert result.config["trainer.max_tokens_per_gpu"] == 2 * (2048 + 8192)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("${oc.env:HOME}/train.parquet", "data.train_files=${oc.env:HOME}/train.parquet"),
        ("${no.such.key}", "data.train_files=${no.such.key}"),
        ("${data.train_files}", "data.train_files=${data.train_files}"),
        ("'${oc.env:DATA'", "data.train_files=${oc.env:DATA"),
    ],
)
def test_a_reference_that_the_file_does_not_answer_is_listed(tmp_path: Path, value: str, text: str) -> None:
    result = translate(write(tmp_path, VERL.replace("data/train.parquet", value)))
    assert result.unresolved == [f"{text} (here data.train.path)"]
    assert result.to_set["data.train.path"].startswith(text)
    assert loaded(tmp_path, result, "data.train.path=x.parquet").trainer.total_steps == 200


def test_references_between_keys_are_resolved(tmp_path: Path) -> None:
    text = (
        "actor_rollout_ref:\n  rollout: {n: 4, top_k: '${oc.select:no.such.key,-1}', max_num_seqs: '${.n}'}\n"
        "  actor: {ppo_mini_batch_size: '${oc.select:data.train_batch_size,1}'}\n"
        "data: {train_batch_size: '${mul:${actor_rollout_ref.rollout.n}, 8}'}\n"
    )
    config = translate(write(tmp_path, text)).config
    assert (config["trainer.train_batch_size"], config["trainer.ppo_mini_batch_size"]) == (128, 128)
    assert (config["rollout.top_k"], config["rollout.max_num_seqs"]) == (-1, 4)


def test_hydras_defaults_list_is_followed(tmp_path: Path) -> None:
    write(tmp_path, "# @package _global_\nengine: b\n", "engine/b.yaml")
    write(tmp_path, "defaults: [../optim@optim: adam, common, _self_]\nstrategy: megatron\n", "actor/b_actor.yaml")
    write(tmp_path, "ppo_epochs: 3\nstrategy: fsdp\n", "actor/common.yaml")
    write(tmp_path, "lr: 3e-6\n", "optim/adam.yaml")
    write(tmp_path, "max_response_length: 77\n", "prompts.yaml")
    write(
        tmp_path,
        "defaults:\n  - engine: a\n  - actor@actor_rollout_ref.actor: ${engine}_actor\n"
        "  - prompts@data\n  - no_such: file\n  - _self_\n"
        "actor_rollout_ref: {rollout: {n: 2}}\n",
        "base.yaml",
    )
    path = write(tmp_path, "defaults: [base, override engine: b, _self_]\ndata: {max_prompt_length: 99}\n")
    result = translate(path)
    assert (result.config["optimizer.lr"], result.config["trainer.ppo_epochs"], result.config["rollout.n"]) == (
        3e-6,
        3,
        2,
    )
    assert (result.config["data.max_prompt_length"], result.config["rollout.max_response_length"]) == (99, 77)
    assert len(result.notes) == 1
    assert "defaults entry file: there is no" in result.notes[0]
    assert "actor_rollout_ref.actor.strategy=fsdp" not in settings(result.without)
    chosen = translate(write(tmp_path, "defaults: [base]\n", "plain.yaml"), ["engine=b"])
    assert chosen.config["trainer.ppo_epochs"] == 3


VERLS_BASE = """
actor_rollout_ref:
  rollout: {n: 8}
  actor:
    optim: {clip_grad: 1.0, lr_scheduler_type: constant, warmup_style: null}
    fsdp_config: {ulysses_sequence_parallel_size: 1}
    megatron: {router_replay: {mode: disabled}}
    strategy: fsdp
    grad_clip: 1.0
    ulysses_sequence_parallel_size: 1
    router_replay: {mode: disabled}
custom_reward_function: {path: null, name: null}
reward_model: {num_workers: null}
reward: {num_workers: 8, custom_reward_function: {path: null, name: compute_score}}
"""
"""Keys that verl's own files set by a current and by an earlier name."""


@pytest.mark.parametrize(
    ("given", "ours", "value"),
    [
        ("actor_rollout_ref.actor.megatron.router_replay.mode=R3", "algorithm.routing_replay", "rollout"),
        ("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4", "parallel.context_parallel_size", 4),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=4", "parallel.context_parallel_size", 4),
        ("actor_rollout_ref.actor.optim.clip_grad=0.5", "optimizer.clip_grad", 0.5),
        ("actor_rollout_ref.actor.optim.grad_clip=0.5", "optimizer.clip_grad", 0.5),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "optimizer.lr_decay_style", "cosine"),
        ("actor_rollout_ref.actor.optim.warmup_style=cosine", "optimizer.lr_decay_style", "cosine"),
        ("reward.num_workers=16", "reward.num_workers", 16),
        ("reward_model.num_workers=16", "reward.num_workers", 16),
        ("reward.custom_reward_function={path: rew.py, name: f}", "reward.function", "rew:f"),
        ("custom_reward_function={path: rew.py, name: f}", "reward.function", "rew:f"),
    ],
)
def test_a_key_with_an_earlier_name_has_the_value_that_verl_reads(
    tmp_path: Path, given: str, ours: str, value: object
) -> None:
    """The names are those of `engine_workers.py`, `config/actor.py`, `config/optimizer.py` and `reward_loop.py`."""
    write(tmp_path, VERLS_BASE, "base.yaml")
    result = translate(write(tmp_path, "defaults: [base]\n"), [given])
    assert result.config[ours] == value


def test_a_given_value_that_verl_does_not_read_is_reported(tmp_path: Path) -> None:
    """FSDP clips with optimizer_config.clip_grad (`engine/fsdp/transformer_impl.py`)."""
    write(tmp_path, VERLS_BASE, "base.yaml")
    file, earlier = write(tmp_path, "defaults: [base]\n"), "actor_rollout_ref.actor.grad_clip"
    result = translate(file, [f"{earlier}=0.5"])
    expected = "verl reads actor_rollout_ref.actor.optim.clip_grad=1.0 instead"
    assert (result.config["optimizer.clip_grad"], settings(result.without)[f"{earlier}=0.5"]) == (1.0, expected)
    assert earlier not in " ".join(settings(translate(file, ["actor_rollout_ref.actor.optim.clip_grad=0.5"]).without))
    assert translate(file, ["~actor_rollout_ref.actor.optim", f"{earlier}=0.5"]).config["optimizer.clip_grad"] == 0.5


@pytest.mark.parametrize("folder", ["pkg://verl.trainer.config", "file://verl/trainer/config", "verl/trainer/config"])
def test_the_search_path_of_hydra_may_name_a_package(tmp_path: Path, folder: str) -> None:
    """As in `fully_async_ppo_trainer.yaml` and `fully_async_ppo_megatron_trainer.yaml`."""
    write(tmp_path, VERL, "verl/trainer/config/ppo_trainer.yaml")
    text = f"hydra: {{searchpath: ['{folder}']}}\ndefaults: [ppo_trainer, _self_]\nrollout: {{n: 4}}\n"
    result = translate(write(tmp_path, text, "verl/experimental/config/theirs.yaml"), ["data.max_prompt_length=99"])
    assert (result.config.get("rollout.n"), result.notes) == (16, [])


def test_nemo_rls_files_extend_one_another(tmp_path: Path) -> None:
    write(tmp_path, NEMO_RL, "base.yaml")
    child = "defaults: ../base.yaml\npolicy: {megatron_cfg: {optimizer: {_override_: true, lr: 1.0e-6}}}\n"
    config = translate(write(tmp_path, child, "recipes/child.yaml")).config
    assert config["optimizer.lr"] == 1e-6
    assert "optimizer.min_lr" not in config
    assert config["rollout.n"] == 32


def test_unknown_keys_are_listed(tmp_path: Path) -> None:
    result = translate(
        write(tmp_path, VERL + "my_section: {key: 1, unset: null, empty: {}}\n"), ["+trainer.my_key='a b'"]
    )
    assert result.unknown == ["trainer.my_key=a b", "my_section.key=1"]
    assert "Not known to this translator:" in list(report_lines(result))


@pytest.mark.parametrize("override", ["data=3", "data=[a]", "data.train_batch_size.y=1", "trainer.logger.x=2"])
def test_a_value_in_the_place_of_a_section_and_a_section_in_that_of_a_value_are_listed(
    tmp_path: Path, override: str
) -> None:
    assert override in translate(write(tmp_path, VERL), [override]).unknown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\n", "holds seed: neither verl's section actor_rollout_ref nor NeMo-RL's sections policy and loss_fn"),
        ("run_dir: x\nalgorithm: {}\n", "has our section names already"),
        ("- 1\n", "holds list, not a mapping of sections"),
        ("", "holds nothing, not a mapping of sections"),
        ("a: [1\n", "theirs.yaml line 2: expected ',' or ']'"),
        ("a: 1\na: 2\n", "theirs.yaml line 2: key 'a' is here for the second time; keep one of them"),
        ("a: !!python/object:os.system {}\n", "could not determine a constructor"),
        ("defaults: [theirs]\nactor_rollout_ref: {}\n", "defaults go in a circle"),
        (
            "policy: {}\nsft: {max_num_steps: 60}\n",
            "has the section sft, for supervised fine-tuning: only reinforcement",
        ),
        ("policy: {}\nppo: {max_num_steps: 60}\n", "has the section ppo, for PPO with a critic"),
    ],
)
def test_a_file_that_cannot_be_translated_is_refused_with_the_reason(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refused(write(tmp_path, text))


def test_a_missing_file_and_a_bad_override_are_refused(tmp_path: Path) -> None:
    assert "cannot read no/such.yaml: No such file" in refused(Path("no/such.yaml"))
    assert (
        "is a script, which is not run. Options of slime, OpenRLHF and TRL are in docs/guides/coming_from.md."
        in refused(Path("run_grpo.sh"))
    )
    file = write(tmp_path, VERL)
    assert "override 'rollout.n' must be KEY=VALUE" in refused(file, "rollout.n")
    assert "override 'a=[1' line 1: expected ',' or ']'" in refused(file, "a=[1")


def test_the_command_writes_the_result_and_reports_to_stderr(tmp_path: Path) -> None:
    file, output = write(tmp_path, VERL), tmp_path / "ours.yaml"
    result = CliRunner().invoke(app, ["translate", str(file), "actor_rollout_ref.rollout.n=8"])
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["trainer"]["train_batch_size"] == 2048
    assert "Converted:\n" in result.stderr
    assert "data.train_batch_size=256 -> trainer.train_batch_size=2048: 256 prompts x rollout.n=8" in result.stderr

    written = CliRunner().invoke(app, ["translate", str(file), "--output", str(output), "--from", "verl", "--all"])
    assert (written.exit_code, written.stdout) == (0, "")
    assert load_config(output).trainer.train_batch_size == 4096
    assert "Not needed here:" in written.stderr

    wrong = CliRunner().invoke(app, ["translate", str(write(tmp_path, "seed: 1\n", "other.yaml"))])
    assert wrong.exit_code == 2

    same = CliRunner().invoke(app, ["translate", str(file), "--output", str(file)])
    assert same.exit_code == 2
    assert f"--output {file} is the file that is translated; name another file" in same.stderr
    assert file.read_text() == VERL

    for place in (tmp_path, tmp_path / "none" / "ours.yaml"):
        unwritable = CliRunner().invoke(app, ["translate", str(file), "--output", str(place)])
        assert unwritable.exit_code == 2
        assert f"error: --output {place} cannot be written to" in unwritable.stderr
    assert wrong.stderr.startswith("error: ")
    assert "--from verl or --from nemo-rl" in wrong.stderr
    forced = CliRunner().invoke(app, ["translate", str(write(tmp_path, "seed: 1\n", "other.yaml")), "--from", "verl"])
    assert forced.exit_code == 0


def test_a_setting_whose_counterpart_is_not_asked_for_is_reported(tmp_path: Path) -> None:
    lora = NEMO_RL.replace("{enabled: false, tensor_parallel_size: 8}", "{enabled: true, lora_cfg: {enabled: true}}")
    lora = lora.replace("  megatron_cfg:\n    enabled: true", "  megatron_cfg:\n    enabled: false")
    without = translate(write(tmp_path, lora)).without
    assert ("policy.dtensor_cfg.lora_cfg.enabled=true", "set model.lora") in [each[:2] for each in without]


@pytest.mark.parametrize("value", ["abc", "0", "[1]"])
@pytest.mark.parametrize(
    ("key", "ours"),
    {
        "actor_rollout_ref.rollout.n": "rollout.n",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tensor_parallel_size",
        "actor_rollout_ref.actor.megatron.context_parallel_size": "parallel.context_parallel_size",
        "actor_rollout_ref.actor.ppo_epochs": "trainer.ppo_epochs",
        "data.max_response_length": "rollout.max_response_length",
        "trainer.logger": "logging.tensorboard",
    }.items(),
)
def test_a_value_of_the_wrong_kind_is_reported_with_our_key(tmp_path: Path, key: str, ours: str, value: str) -> None:
    """Other keys are computed from these, such as the number of engines and of warm-up updates."""
    actor = "actor_rollout_ref.actor"
    sizes = (f"{actor}.optim.lr_warmup_steps=5", f"{actor}.ppo_micro_batch_size_per_gpu=2")
    batches = ("async_training.require_batches=2", "rollout.total_rollout_steps=1000")
    for more in ((), sizes, (*sizes, *batches)):
        result = translate(write(tmp_path, VERL), [f"{key}={value}", *more])
        config_text(result)
        assert [line for line in report_lines(result) if ours in line and value.strip("[]") in line]


def test_nemo_rls_truncation_of_an_unknown_kind_is_reported(tmp_path: Path) -> None:
    kinds = ("loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_type=[1]")
    result = translate(write(tmp_path, NEMO_RL), kinds)
    assert "loss_fn.truncated_importance_sampling_type=[1]" in {each.setting for each in result.without}


def test_what_is_evaluated_otherwise_has_no_counterpart(tmp_path: Path) -> None:
    """Training always evaluates first and last, and writes held-out responses to files, but to no tracker."""
    keys, folder = ("trainer.val_before_train", "trainer.log_val_generations"), "trainer.validation_data_dir"
    result = translate(write(tmp_path, VERL), [f"{keys[0]}=false", f"{keys[1]}=10", f"{folder}=val"])
    assert {f"{keys[0]}=false", f"{keys[1]}=10"} <= {each.setting for each in result.without}
    assert loaded(tmp_path, result).logging.dump_validation
    usual = translate(write(tmp_path, VERL), [f"{keys[0]}=true", f"{keys[1]}=0", f"{folder}=null"])
    assert not loaded(tmp_path, usual).logging.dump_validation
    assert not {each.setting.partition("=")[0] for each in usual.without} & {*keys}
