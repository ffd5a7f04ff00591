import re
from pathlib import Path

import pytest

from megatron_bapo.commands import submit as submission
from megatron_bapo.commands.submit import check_fits, num_nodes
from megatron_bapo.config.cluster import ClusterConfig, load_cluster
from megatron_bapo.config.loading import load_config
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.planning.hardware import GPUS
from tests.unit.config.examples import config

CONFIGS = Path(__file__).parents[3] / "configs"
CLUSTERS = sorted((CONFIGS / "clusters").glob("*.yaml"))
RECIPE = CONFIGS / "recipes" / "qwen2.5-32b_16gpus.yaml"


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_shipped_cluster_makes_a_job(path: Path) -> None:
    cluster = load_cluster(path.stem, path.parent)
    settings = config(parallel__world_size=8, rollout__num_engines=2)
    job = submission.submission(settings, Path("config.yaml"), ["seed=2"], cluster)
    assert job.command[:2] == ("sbatch", "--parsable")
    assert job.command[-3:] == (str(submission.LAUNCH / "slurm.sbatch"), "config.yaml", "seed=2")
    assert (":" in job.command) == (cluster.rollout_nodes is not None)
    assert job.environment["BAPO_LAUNCH"] == str(submission.LAUNCH)


def test_memory_is_requested_as_slurm_writes_it_and_zero_is_all_of_a_node(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text('{memory: "0", rollout_nodes: {memory: 900G}}')
    settings = config(parallel__world_size=8, rollout__num_engines=2)
    job = submission.submission(settings, Path("c.yaml"), [], load_cluster("mine", tmp_path))
    assert [word for word in job.command if "mem" in word] == ["--mem=0", "--mem=900G"]


def test_a_job_has_the_fewest_nodes_with_enough_gpus() -> None:
    settings = config(parallel__world_size=16, rollout__num_engines=6, rollout__tensor_parallel_size=2)
    assert num_nodes(settings, ClusterConfig()) == (4,)
    apart = ClusterConfig.model_validate({"rollout_nodes": {"gpus_per_node": 4}})
    assert num_nodes(settings, apart) == (2, 3)
    assert num_nodes(load_config(RECIPE), ClusterConfig()) == (2,)
    engine = {"rollout__tensor_parallel_size": 16, "rollout__nodes_per_engine": 2, "rollout__num_engines": 2}
    on_two_nodes, beside = config(parallel__world_size=16, **engine), {"rollout_nodes": {}}
    assert num_nodes(on_two_nodes, ClusterConfig()) == (6,)
    assert num_nodes(on_two_nodes, ClusterConfig.model_validate(beside)) == (2, 4)


def test_the_nodes_of_8192_gpus_are_counted() -> None:
    engines = {"rollout__num_engines": 512, "rollout__tensor_parallel_size": 8}
    apart = config(parallel__world_size=4096, **engines)
    assert num_nodes(apart, ClusterConfig()) == (1024,)
    assert num_nodes(apart, ClusterConfig.model_validate({"rollout_nodes": {}})) == (512, 512)
    with pytest.raises(UserError, match=r"^with 2048 nodes, the most of a job: rollout\.num_engines=512 of 16 ranks"):
        num_nodes(config(parallel__world_size=8, **engines | {"rollout__tensor_parallel_size": 16}), ClusterConfig())


def test_too_few_nodes_in_the_cluster_file_are_refused_before_the_job_is_queued() -> None:
    with pytest.raises(UserError, match=r"num_nodes=1 in the cluster's file: parallel\.world_size=16 trainer ranks"):
        num_nodes(load_config(RECIPE), ClusterConfig(num_nodes=1))
    assert num_nodes(load_config(RECIPE), ClusterConfig(num_nodes=3)) == (3,)


def test_a_cluster_without_gpus_is_not_planned() -> None:
    assert isinstance(check_fits(load_config(RECIPE), ClusterConfig(gpus_per_node=0)), list)


def test_a_cluster_with_gpus_that_plan_does_not_know_needs_no_files_either() -> None:
    assert isinstance(check_fits(load_config(RECIPE), ClusterConfig(gpu=None)), list)
    odd = load_config(RECIPE, ["parallel.world_size=48", "parallel.tensor_model_parallel_size=3"])
    with pytest.raises(UserError, match="num_attention_heads=40 must be a multiple of"):
        check_fits(odd, ClusterConfig(gpu=None))


def test_a_run_that_does_not_fit_is_refused_with_a_fitting_change() -> None:
    too_long = load_config(RECIPE, ["trainer.max_tokens_per_gpu=400000"])
    with pytest.raises(UserError, match=r"it does not fit on 16 H100:\n.*needs .* GiB.*\n  this would fit: "):
        check_fits(too_long, ClusterConfig())
    assert isinstance(check_fits(load_config(RECIPE), ClusterConfig()), list)


SEPARATE = ("rollout.colocate=false", "rollout.sleep_level=0", "trainer.offload=false", "weight_sync.transport=store")
OF_32B = ("rollout.num_engines=4", "optimizer.cpu_offload=true", "parallel.recompute_granularity=full")


def test_engines_on_nodes_of_their_own_must_fit_on_the_gpus_of_these() -> None:
    def fits(size: int, gpu: str | None) -> list[str]:
        settings = load_config(
            CONFIGS / "recipes" / "qwen3-32b_32gpus.yaml", [*SEPARATE, *OF_32B, f"rollout.tensor_parallel_size={size}"]
        )
        nodes = {"gpus_per_node": 4, "gpu": gpu}
        return check_fits(settings, ClusterConfig.model_validate({"rollout_nodes": nodes, "python": "/opt/python"}))

    with pytest.raises(UserError, match=r"it does not fit on 32 H100 and 4 L40S:\n  an engine's GPU has room for"):
        fits(1, "L40S")
    fits(1, "H100")
    fits(4, "L40S")
    fits(1, None)


ASYNC = CONFIGS / "recipes" / "r1-distill-qwen-32b_32gpus_async.yaml"


def mixed(**rollout_nodes: object) -> ClusterConfig:
    """Return a cluster whose engines have nodes of their own."""
    values = {"python": "/opt/python", "signal_s": 80000, "time_limit": "2-00", "rollout_nodes": rollout_nodes}
    return ClusterConfig.model_validate({"gpus_per_node": 4, "gpu": "B200", **values})


def test_an_engine_may_have_all_gpus_of_a_rollout_node_with_more_than_a_trainers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission, "advice", lambda plan: None)  # whose search takes long
    engines = ["rollout.tensor_parallel_size=8", "rollout.num_engines=2"]
    assert check_fits(load_config(ASYNC, engines), mixed(gpus_per_node=8, gpu="H20")) == []
    with pytest.raises(UserError, match=r"an engine has 8 GPUs .* and a node has 2; set nodes_per_engine=4"):
        check_fits(load_config(ASYNC, engines), mixed(gpus_per_node=2, gpu="H20"))


def test_a_rollout_node_must_hold_the_weight_store_and_its_engines_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "advice", lambda plan: None)
    small, large = (mixed(gpus_per_node=4, gpu="L40S", memory=memory) for memory in ("64G", "160G"))
    engines = ["rollout.tensor_parallel_size=4", "rollout.num_engines=4", "rollout.gpu_memory_utilization=0.9"]
    refused = (
        r"\n  a node of the engines needs 146\.1 GiB of host memory; it is assumed to have 64 GiB\n(.*\n)*"
        r"  rollout_nodes\.memory=64G in the cluster's file is what the job gets of a node of the engines; raise it"
    )
    with pytest.raises(UserError, match=refused):
        check_fits(load_config(ASYNC, engines), small)
    assert check_fits(load_config(ASYNC, engines), large) == []


def test_the_shipped_rollout_nodes_have_the_gpu_of_their_name() -> None:
    nodes = load_cluster("h100_with_l40s_rollouts", CONFIGS / "clusters").rollout_nodes
    assert nodes is not None
    assert (nodes.partition, nodes.gpu) == ("l40s", "L40S")


def test_a_run_that_needs_more_host_memory_than_the_job_asks_for_is_refused() -> None:
    large, elsewhere = load_config(CONFIGS / "recipes" / "qwen3-235b-a22b_128gpus.yaml"), "/opt/python"
    with pytest.raises(UserError, match=r"GiB of host memory; it is assumed to have 400 GiB\n(.*\n)*.*memory=400G in"):
        check_fits(large, ClusterConfig(memory="400G", python=elsewhere))
    for memory in ("2T", "0", None):
        check_fits(large, ClusterConfig(memory=memory, python=elsewhere))


@pytest.mark.parametrize(
    ("memory", "gib"),
    [
        ("900G", 900),
        ("2t", 2048),
        ("409600", 400),
        ("1024M", 1),
        ("1048576k", 1),
        ("0", None),
        (None, None),
        ("x", None),
    ],
)
def test_memory_without_a_unit_is_in_mebibytes(memory: str | None, gib: float | None) -> None:
    assert ClusterConfig(memory=memory).memory_gib == gib


def test_a_cluster_may_have_every_gpu_that_plan_knows() -> None:
    assert [ClusterConfig(gpu=name).gpu for name in GPUS] == [*GPUS]


def test_a_step_longer_than_the_notice_before_the_time_limit_is_warned_about() -> None:
    flagship = load_config(CONFIGS / "recipes" / "paper_32b_64k.yaml")
    step_s = 9700  # docs/guides/recipes.md
    elsewhere = "/opt/python"  # else it is also said that this one has no CUDA
    (warning,) = check_fits(flagship, ClusterConfig(signal_s=step_s - 100, python=elsewhere))
    assert f"signal_s={step_s - 100} in the cluster's file is less than a planned step of {step_s} s" in warning
    assert "checkpoint.every_s=1800" in warning
    assert check_fits(flagship, ClusterConfig(signal_s=step_s + 100, python=elsewhere)) == []


def test_colocated_engines_need_no_nodes_of_their_own() -> None:
    cluster = ClusterConfig.model_validate({"rollout_nodes": {}})
    with pytest.raises(UserError, match=r"set rollout\.colocate=false"):
        submission.submission(config(rollout__colocate=True), Path("c.yaml"), [], cluster)


def test_an_unknown_cluster_or_key_is_named_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("partitions: gpu\n")
    with pytest.raises(UserError, match=r"nope.yaml does not exist; known clusters: mine"):
        load_cluster("nope", tmp_path)
    with pytest.raises(UserError, match=r"partitions=gpu: unknown key; did you mean partition\?"):
        load_cluster("mine", tmp_path)


def test_a_time_that_yaml_reads_as_a_number_must_be_quoted(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("time_limit: 12:00:00\n")
    with pytest.raises(
        UserError, match=r"time_limit=43200: must be text; put it in quotes, because YAML reads 12:00:00"
    ):
        load_cluster("mine", tmp_path)


@pytest.mark.parametrize(
    ("time_limit", "seconds"),
    [
        ("10", 600),
        ("10:30", 630),
        ("00:10:00", 600),
        ("1:00:01", 3601),
        ("1-00", 86400),
        ("1-02:03", 93780),
        ("2-00:00:05", 172805),
    ],
)
def test_a_time_limit_that_leaves_no_time_before_the_signal_is_refused(
    time_limit: str, seconds: int, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f'{{time_limit: "{time_limit}", signal_s: {seconds}}}')
    with pytest.raises(UserError, match=rf"signal_s={seconds}: must be less than the {seconds} s of time_limit"):
        load_cluster("mine", tmp_path)
    mine.write_text(f'{{time_limit: "{time_limit}", signal_s: {seconds - 1}}}')
    assert load_cluster("mine", tmp_path).signal_s == seconds - 1


def test_the_default_time_of_the_signal_needs_a_longer_time_limit_and_no_limit_is_long_enough(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text('{time_limit: "10"}')
    with pytest.raises(UserError, match=r"signal_s=600: must be less than the 600 s of time_limit=10"):
        load_cluster("mine", tmp_path)
    for unlimited in ("0", "UNLIMITED"):
        (tmp_path / "mine.yaml").write_text(f'{{time_limit: "{unlimited}"}}')
        assert load_cluster("mine", tmp_path).time_limit == unlimited


CONTAINER = {"image": "a.sqsh", "mounts": ["/m:/m:ro"]}


def container_words(runtime: str, run_dir: str = "runs/mine", **cluster: object) -> list[str]:
    described = {"container": {**CONTAINER, "runtime": runtime}, "env": {"NCCL_DEBUG": "WARN", "A": "b,c"}, **cluster}
    job = submission.submission(config(run_dir=run_dir), Path("c.yaml"), [], ClusterConfig.model_validate(described))
    assert (job.environment.get("APPTAINERENV_A") == "b,c") == (runtime == "apptainer")
    return job.environment["BAPO_CONTAINER"].splitlines()


def test_pyxis_gets_the_jobs_folders_and_the_cluster_environment() -> None:
    here = Path.cwd()
    assert container_words("pyxis") == [
        "--container-image=a.sqsh",
        f"--container-mounts=/tmp:/tmp,{here}:{here},{submission.LAUNCH}:{submission.LAUNCH},/m:/m:ro",
        f"--container-workdir={here}",
        "--container-env=NCCL_DEBUG,A",
    ]
    assert len(container_words("pyxis", env={})) == 3


def test_apptainer_precedes_the_steps_command() -> None:
    here = Path.cwd()
    binds = f"--bind={here}:{here},{submission.LAUNCH}:{submission.LAUNCH},/m:/m:ro"
    assert container_words("apptainer") == ["apptainer", "exec", "--nv", binds, f"--pwd={here}", "a.sqsh"]
    assert "--nv" not in container_words("apptainer", gpus_per_node=0)


def test_a_run_directory_outside_of_the_jobs_folder_is_mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    elsewhere.mkdir()
    here.mkdir()
    (here / "runs").symlink_to(elsewhere)
    monkeypatch.chdir(here)
    linked = container_words("pyxis", "runs/mine")[1]
    assert f",{elsewhere}/mine:{elsewhere}/mine," in linked
    assert f",{elsewhere}/mine:{elsewhere}/mine," in container_words("apptainer", f"{elsewhere}/mine")[3]


def test_without_slurm_its_commands_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="scontrol is not installed here"):
        submission.status("1")


@pytest.fixture
def fake_scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function that installs a scontrol with this output and exit code; it runs in the submitter's folder."""

    def install(output: str, code: int = 0) -> None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "scancel").write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/cancelled\n')
        (tmp_path / "bin" / "scancel").chmod(0o755)
        (tmp_path / "bin" / "scontrol").write_text(f"#!/bin/sh\necho '{output}'\nexit {code}\n")
        (tmp_path / "bin" / "scontrol").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return install


def test_a_job_submitted_from_within_a_job_gets_none_of_its_variables(fake_scontrol, tmp_path, monkeypatch):
    fake_scontrol("")
    script = f"#!/bin/sh\nenv >{tmp_path}/environment\necho 8\n"
    (tmp_path / "bin" / "sbatch").write_text(script)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_HET_SIZE", "SLURM_CONF"):
        monkeypatch.setenv(name, "4")
    job = submission.Submission(("sbatch",), {"BAPO_PYTHON": "python"}, tmp_path / "logs")
    assert submission.submit(job) == "8"
    found = (tmp_path / "environment").read_text().splitlines()
    assert [line for line in found if line.startswith(("SLURM_", "BAPO_"))] == ["BAPO_PYTHON=python", "SLURM_CONF=4"]


UNKNOWN_JOB = ("slurm_load_jobs error: Invalid job id specified", 1)


@pytest.mark.parametrize("said", [UNKNOWN_JOB, ("", 0), ("JobId=7 JobState=FAILED StdOut=(null)", 0)])
@pytest.mark.parametrize("run_dir", [".", "runs/mine", "runs/studies/mine"])
def test_the_log_of_a_job_unknown_to_slurm_is_found_in_its_run_directory(fake_scontrol, tmp_path, said, run_dir):
    fake_scontrol(*said)
    folder = submission.submission(
        config(run_dir=tmp_path / run_dir), Path("c.yaml"), [], load_cluster("h100", CONFIGS / "clusters")
    ).folder
    folder.mkdir(parents=True)
    for name in ("7.log", "7-trainer-0-ray.log", "7-environment.txt", "8.log"):
        (folder / name).touch()
    assert submission.logs("7") == [folder / "7.log", folder / "7-trainer-0-ray.log"]
    known = submission.status("7")
    assert known["state"] == "FAILED" or known["log"] == str(folder / "7.log")


@pytest.mark.parametrize("said", [UNKNOWN_JOB, ("", 0), ("JobId=7 JobState=FAILED", 0)])
def test_the_message_about_a_missing_log_names_its_usual_place(fake_scontrol, tmp_path, said):
    fake_scontrol(*said)
    with pytest.raises(UserError, match=r"log of job 7 .* see RUN_DIR/slurm/7\.log"):
        submission.logs("7")


@pytest.mark.parametrize("job", ["", "mine", "--all"])
def test_a_job_without_a_number_is_refused_before_slurm_describes_all_jobs(fake_scontrol, job):
    fake_scontrol("JobId=8 JobState=RUNNING StdOut=/other/8.log")
    for command in (submission.status, submission.logs, lambda job: submission.cancel(job, now=True)):
        with pytest.raises(UserError, match=f"job '{job}' must be a number, as printed by submit"):
            command(job)


def test_a_run_directory_with_spaces_has_its_log_found(fake_scontrol, tmp_path):
    log = f"{tmp_path}/a b/slurm/7.log"
    fake_scontrol(f"JobId=7 JobState=RUNNING NodeList= StdErr=/a b/7.log StdOut={log} TresPerNode=g")
    assert submission.status("7") == {"state": "RUNNING", "log": log}


def test_other_slurm_errors_are_passed_on(fake_scontrol):
    fake_scontrol("slurm_load_jobs error: Access/permission denied", 1)
    with pytest.raises(UserError, match="scontrol: slurm_load_jobs error: Access/permission denied"):
        submission.status("7")


@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "scontrol: fatal: Could not establish a configuration source",
    ],
)
def test_a_slurm_that_is_out_of_reach_is_no_error_of_the_input(fake_scontrol, said):
    fake_scontrol(said, 1)
    with pytest.raises(RunError, match=f"this machine does not reach Slurm; .* login node. .*{re.escape(said)}"):
        submission.status("7")


@pytest.mark.parametrize(
    ("state", "now", "called", "message"),
    [
        ("RUNNING", False, "--batch --signal=USR2 7", "saves its state after the current step and ends"),
        ("RUNNING", True, "7", "ends without saving"),
        ("PENDING", False, "7", "is removed from the queue"),
    ],
)
def test_cancel_says_what_happens_and_a_queued_job_leaves_the_queue(
    fake_scontrol, tmp_path, state, now, called, message
):
    fake_scontrol(f"JobId=7 JobState={state} StdOut=/logs/7.log")
    assert message in submission.cancel("7", now=now)
    assert (tmp_path / "cancelled").read_text() == f"{called}\n"


def test_a_job_that_has_ended_cannot_be_cancelled(fake_scontrol, tmp_path):
    fake_scontrol("JobId=7 JobState=COMPLETED StdOut=/logs/7.log")
    with pytest.raises(UserError, match="job 7 is not running: COMPLETED"):
        submission.cancel("7", now=False)
    assert not (tmp_path / "cancelled").exists()
