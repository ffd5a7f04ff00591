import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megatron_bapo.cli.app import messages
from megatron_bapo.cli.main import app
from megatron_bapo.config.loading import load_config
from megatron_bapo.errors import RunError, UserError

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"
CONFIG = """
run_dir: {folder}/run[1]
model: {{create: {{}}, dtype: float32}}
data:
  max_prompt_length: 64
  chat_template: false
  train: {{reasoning_gym: {{chain_sum: {{}}}}, size: 100}}
reward: {{type: reasoning_gym}}
rollout: {{n: 4, max_response_length: 8}}
trainer: {{total_steps: 10, train_batch_size: 64, ppo_mini_batch_size: 32}}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(folder=tmp_path))
    return file


def invoke(*arguments: object):
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})


def test_a_dry_run_prints_layout_and_batch_arithmetic_and_starts_nothing(config_file: Path) -> None:
    result = invoke("train", config_file, "--dry-run", "rollout.n=8")
    assert result.exit_code == 0
    assert "1 process = 1 tensor x 1 pipeline x 1 data parallel" in result.stdout
    assert "8 prompts x 8 = 64 trajectories" in result.stdout
    assert "run[1]" in result.stdout
    assert list(config_file.parent.iterdir()) == [config_file]


def test_the_help_of_a_dry_run_names_the_rewards_that_it_prints() -> None:
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", invoke("train", "--help").stdout).split())
    assert "print the plan, one prompt, and the rewards of its ground truth and of an empty response; start" in words
    assert "show its plan, one prompt and the rewards of two responses:" in words


def test_a_dry_run_shows_a_prompt_and_the_reward_and_names_its_activities_on_stderr(config_file: Path) -> None:
    result = invoke("train", config_file, "--dry-run")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    title = next(line for line in lines if line.startswith("first training prompt: "))
    assert title.endswith("; data.max_prompt_length=64):")
    assert lines[lines.index(title) + 1].startswith("    State the final answer to the following arithmetic problem")
    assert "reward of the ground truth 1.0, of an empty response 0.0" in lines
    assert result.stderr.splitlines()[:2] == ["loading the checks ...", "reading prompts ..."]


@pytest.mark.slow
def test_a_dry_run_of_a_model_that_is_still_to_be_created_does_not_import_torch(config_file: Path) -> None:
    code = (
        "import sys\nfrom megatron_bapo.cli.main import app\n"
        f"try:\n    app(['train', {str(config_file)!r}, '--dry-run'], prog_name='megatron-bapo')\n"
        "finally:\n    print('heavy:', sorted({'torch', 'ray', 'vllm'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "reward of the ground truth 1.0" in result.stdout
    assert result.stdout.endswith("heavy: []\n")


def test_a_dry_run_prints_the_warnings(config_file: Path) -> None:
    result = invoke("train", config_file, "--dry-run", "optimizer.lr_warmup_steps=20")
    assert result.exit_code == 0
    assert "warning: optimizer.lr_warmup_steps=20 is not less than the run's 20 updates" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "--dry-run"], "there is no module 'nowhere'"),
        (["train"], "there is no module 'nowhere'"),
        (["train", "--rollout-only"], "there is no module 'nowhere'"),
        (["submit", "--cluster", "mine.yaml"], "there is no module 'nowhere'"),
        (["submit", "--cluster", "contained.yaml"], "sbatch is not installed here"),
    ],
    ids=str,
)
def test_files_and_imports_of_a_run_are_checked_before_anything_starts(
    config_file: Path, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config_file.parent)
    monkeypatch.setenv("PATH", "")
    Path("mine.yaml").write_text("gpu: null\n")
    Path("contained.yaml").write_text("gpu: null\ncontainer: {image: a.sqsh}\n")
    command, *options = arguments
    result = invoke(command, config_file, "reward.type=function", "reward.function=nowhere:f", *options)
    assert result.exit_code == 2
    assert expected in result.stderr


def test_training_from_files_and_generating_without_a_trainer_exclude_each_other(config_file: Path) -> None:
    result = invoke("train", config_file, "--rollout-only", "--rollouts-from", config_file.parent)
    assert result.exit_code == 2
    assert "--rollouts-from needs no engines and --rollout-only no trainer; give one of them" in result.stderr


def test_a_folder_without_rollouts_is_refused_before_anything_starts(config_file: Path) -> None:
    prompts = ("data.chat_template=false", "data.max_prompt_length=64")
    result = invoke("train", config_file, "--rollouts-from", config_file.parent, *prompts)
    assert result.exit_code == 2
    assert "holds no step-*.parquet" in result.stderr


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lrs=1", "optimizer.lrs=1: unknown key; did you mean optimizer.lr?"),
        ("rollout.n=5", "trainer.train_batch_size=64 counts trajectories and must be a multiple of rollout.n=5"),
        ("rollout.n", "override 'rollout.n' must be KEY=VALUE"),
    ],
)
def test_the_users_mistakes_are_one_message_on_stderr_and_exit_code_2(
    config_file: Path, override: str, expected: str
) -> None:
    result = invoke("train", config_file, override)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_model_id_of_the_hub_is_answered_with_the_download_command(config_file: Path, options: list[str]) -> None:
    model = ("model.create=null", "model.path=Qwen/Qwen2.5-7B-Instruct")
    result = invoke("train", config_file, *model, *options)
    assert result.exit_code == 2
    assert "`hf download Qwen/Qwen2.5-7B-Instruct --local-dir models/Qwen2.5-7B-Instruct`" in result.stderr
    assert "set model.path=models/Qwen2.5-7B-Instruct" in result.stderr


def test_eval_answers_a_model_id_of_the_hub_with_the_download_command(tmp_path: Path) -> None:
    overrides = (f"run_dir={tmp_path}", "model.path=Qwen/Qwen3-8B", "data.validation.path=aime.jsonl")
    result = invoke("eval", RECIPES.parent / "eval" / "paper.yaml", *overrides, "--dry-run")
    assert result.exit_code == 2
    assert "`hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B` and set model.path=models/Qwen3-8B" in result.stderr


def test_a_missing_folder_below_models_is_not_taken_for_a_model_id_of_the_hub(config_file: Path) -> None:
    result = invoke("train", config_file, "model.create=null", "model.path=models/mine")
    assert result.exit_code == 2
    assert "must be an existing folder" in result.stderr
    assert "hf download" not in result.stderr


def test_plan_takes_a_model_id_of_the_hub() -> None:
    model = "model.path=Qwen/Qwen2.5-7B-Instruct"
    result = invoke("plan", RECIPES / "qwen2.5-7b_8gpus.yaml", model)
    assert result.exit_code == 0
    assert "(Qwen2.5-7B-Instruct, as published)" in result.stdout


def test_usage_errors_exit_with_2() -> None:
    assert invoke("train").exit_code == 2
    assert invoke("trian").exit_code == 2


@pytest.mark.parametrize(
    ("error", "exit_code", "shown"),
    [
        (UserError("choose [another]"), 2, "error: choose [another]\n"),
        (RunError("engine 0 died"), 1, "error: engine 0 died\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_become_a_message_and_an_exit_code(
    error: BaseException, exit_code: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as exit_, messages():
        raise error
    assert exit_.value.exit_code == exit_code
    assert capsys.readouterr().err == shown


def test_our_own_bugs_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError), messages():
        raise ZeroDivisionError


def test_a_folder_of_another_user_is_a_message_and_exit_code_2(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path, *_: object, **__: object) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    result = invoke("report", config_file.parent)
    assert result.exit_code == 2
    assert re.match(r"error: .*: Permission denied; choose another path, or ask its owner for access\n", result.stderr)


def test_output_that_a_full_disk_refuses_is_a_message_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit_, messages():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert exit_.value.exit_code == 1
    assert capsys.readouterr().err.startswith("error: No space left on device on host ")


def test_ctrl_c_while_the_command_line_is_imported_is_one_message_and_exit_code_130() -> None:
    code = (
        "import sys\nclass Interrupt:\n    def find_spec(self, name, *_):\n"
        "        if name == 'megatron_bapo.cli.plan':\n            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\nimport megatron_bapo.cli.main\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (130, "interrupted\n")


def test_a_report_of_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    result = invoke("report", tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path} holds no metrics.jsonl; give the folder of a run that has trained" in result.stderr


def test_the_version_is_printed() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("megatron-bapo 0.")


def test_help_names_the_commands_and_loads_no_heavy_library() -> None:
    code = (
        "import sys\nfrom megatron_bapo.cli.main import app\n"
        "try:\n    app(['--help'], prog_name='megatron-bapo')\n"
        "finally:\n    print('heavy:', sorted({'torch', 'ray', 'vllm', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "heavy: []" in result.stdout
    for command in ("train", "plan", "report", "doctor"):
        assert command in result.stdout


@pytest.mark.parametrize("command", ["train", "plan"])
def test_the_examples_of_the_help_can_be_pasted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parents[1])
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout
    assert "…" not in shown, "no word is cut off"
    joined = re.sub(r"\\ *\n *", "", shown)
    examples = re.findall(r"^ *megatron-bapo (.+?) *$", joined, re.MULTILINE)
    assert len(examples) >= 4
    for example in examples:
        arguments = shlex.split(example)
        assert arguments[0] == command
        config, *rest = arguments[1:]
        load_config(config, [argument for argument in rest if "=" in argument])
        if command == "plan":
            result = invoke(*arguments)
            assert result.exit_code in (0, 2)
            assert result.stderr == ""


def test_the_package_runs_as_a_module(config_file: Path) -> None:
    command = [sys.executable, "-m", "megatron_bapo", "train", str(config_file), "seed=x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "seed=x: must be a whole number" in result.stderr


def test_plan_says_that_a_recipe_fits_without_its_model_and_prompts_being_here() -> None:
    result = invoke("plan", RECIPES / "r1-distill-qwen-32b_64gpus.yaml")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "fits on 64 H100"
    assert "32.76B parameters" in result.stdout
    assert "* is the worst" in result.stdout


def test_plan_exits_with_2_where_it_does_not_fit_and_prints_overrides_with_which_it_does() -> None:
    recipe, broken = RECIPES / "qwen2.5-7b_8gpus.yaml", "trainer.max_tokens_per_gpu=40000"
    result = invoke("plan", recipe, broken)
    assert result.exit_code == 2
    assert "pipeline stage 0 (ranks 0 to 7) needs" in result.stdout
    *_, title, advised = result.stdout.splitlines()
    assert title == "this would fit:"
    assert invoke("plan", recipe, broken, *advised.split()).exit_code == 0


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["parallel.world_size=6", "parallel.tensor_model_parallel_size=4"],
            "parallel.world_size=6 must be a multiple of tensor_model_parallel_size=4",
        ),
        (["parallel.pipeline_model_parallel_size=8"], "num_hidden_layers=28 must be a multiple of"),
        (["rollout.n=3"], "trainer.train_batch_size=4096 counts trajectories and must be a multiple of rollout.n=3"),
        (["model.path=models/Mystery-9B"], "Mystery-9B is not among the models whose architecture is known"),
    ],
    ids=str,
)
def test_plan_names_the_fields_of_sizes_that_do_not_go_together(overrides: list[str], expected: str) -> None:
    result = invoke("plan", RECIPES / "qwen2.5-7b_8gpus.yaml", *overrides)
    assert result.exit_code == 2
    assert expected in result.stderr


def test_a_search_prints_the_best_layouts_and_the_overrides_of_the_first() -> None:
    recipe, on_four = RECIPES / "qwen2.5-7b_8gpus.yaml", ["--num-gpus", "4", "--gpu", "H200"]
    result = invoke("plan", recipe, "--search", *on_four)
    assert result.exit_code == 0
    assert "layouts fit on 4 H200; the best 8" in result.stdout
    overrides = result.stdout.splitlines()[-1].split()
    assert invoke("plan", recipe, *overrides, "--gpu", "H200").exit_code == 0
    ranked = json.loads(invoke("plan", recipe, "--search", *on_four, "--json").stdout)
    assert ranked[0]["overrides_that_fit"] == overrides
    assert {plan["num_gpus"] for plan in ranked} == {4}
    assert invoke("plan", RECIPES / "qwen2.5-32b_8gpus.yaml", "--search", "--num-gpus", "1").exit_code == 2


@pytest.mark.parametrize("options", [[], ["--search", "--num-gpus", "12"]], ids=str)
def test_a_placement_is_planned_as_the_overrides_that_it_prints(options: list[str]) -> None:
    recipe = RECIPES / "qwen2.5-7b_8gpus.yaml"
    *_, verdict, overrides = invoke("plan", recipe, "--placement", "separate", *options).stdout.splitlines()
    assert verdict == ("overrides for the first layout:" if options else "fits on 16 H100 with")
    assert overrides.split()[-1:] == ["trainer.offload=false"] or options
    applied = json.loads(invoke("plan", recipe, *overrides.split(), "--json").stdout)
    assert (applied["placement"], applied["fits"]) == ("separate", True)
    assert applied["num_gpus"] == (12 if options else 16)
    placed = json.loads(invoke("plan", recipe, "--placement", "separate", *options, "--json").stdout)
    assert (placed[0] if options else placed)["overrides_that_fit"] == overrides.split()


def test_a_placement_that_the_run_does_not_allow_is_refused() -> None:
    recipe = RECIPES / "r1-distill-qwen-7b_16gpus_async.yaml"
    result = invoke("plan", recipe, "rollout.sleep_level=1", "--placement", "colocated")
    assert result.exit_code == 2
    assert "rollout.mode=async" in result.stderr


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.ppo_mini_batch_size=1000", "trainer.train_batch_size=4096 trajectories must split evenly"),
        ("data.train.path=x.csv", "data.train.path=x.csv must end in .jsonl or .parquet"),
    ],
)
def test_a_search_in_which_every_layout_breaks_a_rule_names_it(override: str, expected: str) -> None:
    result = invoke("plan", RECIPES / "qwen2.5-7b_8gpus.yaml", "--search", override)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the configuration breaks these rules:")
    assert expected in result.stderr
    assert len(result.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--num-gpus", "32"], "--num-gpus is for --search; add --search, or leave it out"),
        (["--ranks-per-host", "8"], "--ranks-per-host is for --weights; add --weights, or leave it out"),
        (["--search", "--network-gbit-s", "8"], "--network-gbit-s is for --weights"),
        (["--weights", "--json"], "--weights prints tables of one layout; leave out --search and --json"),
        (["--weights", "--search"], "--weights prints tables of one layout; leave out --search and --json"),
    ],
    ids=str,
)
def test_plan_refuses_options_that_would_be_of_no_effect(options: list[str], expected: str) -> None:
    result = invoke("plan", RECIPES / "qwen2.5-7b_8gpus.yaml", *options)
    assert result.exit_code == 2
    assert expected in result.stderr


def test_a_plan_for_programs_has_bytes_and_seconds() -> None:
    plan = json.loads(invoke("plan", RECIPES / "qwen2.5-7b_8gpus.yaml", "--json", "--efficiency", "0.4").stdout)
    assert plan["fits"]
    assert plan["parameters"] == 7_615_616_512
    (stage,) = plan["stages"]
    assert stage["state"]["parameters"] < stage["peak_while_training"] < 79.2 * 2**30
    assert plan["assumptions"]["compute_efficiency"] == 0.4


def test_a_plan_shows_what_a_weight_sync_moves(config_file: Path) -> None:
    layout = ("parallel.world_size=2", "parallel.tensor_model_parallel_size=2", "rollout.tensor_parallel_size=2")
    result = invoke("plan", config_file, *layout, "--weights", "--ranks-per-host", "2", "--placement", "separate")
    assert result.exit_code == 0, result.output
    # 4 layers, hidden 128, MLP 384, 4 query and 2 key/value heads of 32, vocabulary 320, q/k norms; float32.
    layer = 128 * (128 + 2 * 64 + 128) + 3 * 128 * 384 + 2 * 32 + 2 * 128
    size = 4 * (4 * layer + 320 * 128 + 128)
    assert f"weight sync: {size / 2**20:.3f} MiB in 46 tensors" in result.stdout
    assert f"{size / 2**20:.3f} MiB cross the network" in result.stdout
    for words in ("rank 1 │ host 1 │ network", "host 1 │ engine rank 1 │ memory", "parameters and buckets"):
        assert words in result.stdout


def test_a_plan_shows_what_a_weight_sync_from_gpu_to_gpu_moves(config_file: Path) -> None:
    """Ranks of the first engine, on the trainer's host, pass weights on to the second engine over the network."""
    layout = ("parallel.world_size=2", "parallel.tensor_model_parallel_size=2", "rollout.tensor_parallel_size=2")
    engines = ("rollout.num_engines=2", "weight_sync.transport=nccl")
    result = invoke("plan", config_file, *layout, *engines, "--weights", "--ranks-per-host", "4")
    assert result.exit_code == 0, result.output
    assert "by transport nccl" in result.stdout
    rows = [[cell.strip() for cell in line.split("│")[1:5]] for line in result.stdout.splitlines() if "│" in line]
    parts = {(source, destination): medium for source, destination, medium, *_ in rows}
    assert parts["rank 0", "engine 0 rank 0"] == "NVLink"
    assert parts["engine 0 rank 0", "engine 1 rank 0"] == "network"
