"""The shell blocks of the documentation for Slurm, run as they are written.

Three commands are replaced: `git clone` copies the working tree, `make setup` gives the environment of the tests, and
`hf` copies small files: a tokenizer, an architecture and prompts.
"""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.cluster.launched import ENVIRONMENT, LAUNCH
from tests.cluster.test_two_hosts import ARCHITECTURES, write_tokenizer
from tests.cluster.two_hosts import SlurmCluster, TwoHosts, slurm_cluster

ROOT = LAUNCH.parent
MODEL = "DeepSeek-R1-Distill-Qwen-32B"
JOB = 1234
"""Number of the submitted job in the documentation."""
COMMANDS = {
    "git": 'mkdir "$3" && cp -r {root}/configs {root}/launch {root}/megatron_bapo {root}/tools "$3"',
    "make": """
mkdir -p .venv/bin
echo "PATH=$PWD/.venv/bin:\\$PATH" >.venv/bin/activate
printf '#!/bin/sh\\nexec {python} "$@"\\n' >.venv/bin/python
printf '#!/bin/sh\\nexec {python} -m megatron_bapo "$@"\\n' >.venv/bin/megatron-bapo
chmod +x .venv/bin/*
""",
    "hf": "cp -r {hub}/. .",
}


def shell_block(page: str, line: str) -> str:
    """Return the page's only bash block that contains the line."""
    blocks = [part.partition("```")[0] for part in (ROOT / "docs" / page).read_text().split("```bash\n")[1:]]
    (found,) = [block for block in blocks if line in block.splitlines()]
    return found


def write_hub(hub: Path) -> None:
    """Write what the documentation downloads: the model, training prompts and held-out prompts."""
    shutil.copytree(ARCHITECTURES / MODEL, model := hub / "models" / MODEL)
    write_tokenizer(model)
    prompts = {
        "aime/data/train-00000-of-00001.parquet": "problem",
        "skywork/data/math-00000-of-00001.parquet": "prompt",
    }
    for index, (name, column) in enumerate(prompts.items()):
        texts = [f"What is {number}?" for number in range(index, 2000, 2)]
        (file := hub / "downloads" / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({column: texts, "answer": ["1"] * len(texts)}), file)


def run(cluster: SlurmCluster, block: str, folder: Path) -> str:
    """Run a shell block on the first host, where the first failure ends it; return its output."""
    environment = ENVIRONMENT | cluster.environment | {"SBATCH_PARTITION": "gpu", "COLUMNS": "200"}
    environment["PATH"] = f"{cluster.folder}:{environment['PATH']}"
    done = subprocess.run(
        [*cluster.hosts.on(0), "bash", "-exc", block],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_shell_blocks_for_slurm_run_as_they_are_written(hosts: TwoHosts, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write_hub(tmp_path / "hub")
    # `srun make setup` is the job before the one that is submitted.
    with slurm_cluster(hosts, tmp_path / "slurm", first_job=JOB - 1) as cluster:
        for name, script in COMMANDS.items():
            places = {"root": ROOT, "python": sys.executable, "hub": tmp_path / "hub"}
            quoted = {key: shlex.quote(str(place)) for key, place in places.items()}
            (command := cluster.folder / name).write_text(f"#!/bin/sh -e\n{script.format(**quoted)}\n")
            command.chmod(0o755)
        submit = "megatron-bapo submit configs/recipes/r1-distill-qwen-32b_64gpus.yaml --cluster h100"
        block = shell_block("get_started/cluster.md", submit)
        printed = run(cluster, block, tmp_path)
        for expected in ("fits on 64 H100", "sbatch --parsable", f"job {JOB}", "PENDING", "removed from the queue"):
            assert expected in printed, printed
        # The next job has the next number.
        block = shell_block("guides/clusters.md", submit).replace(str(JOB), str(JOB + 1))
        checkout = tmp_path / "megatron-bapo"
        printed = run(cluster, f"source .venv/bin/activate\n{block}", checkout)
        assert f"job {JOB + 1} did not run at this time and is removed from the queue" in printed, printed
        assert cluster.call("squeue", "--noheader") == ""
