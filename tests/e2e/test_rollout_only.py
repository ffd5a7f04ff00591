"""`train --rollout-only` writes rollouts that `--rollouts-from` can train on."""

from pathlib import Path

from megatron_bapo.config.loading import load_config
from megatron_bapo.controller.recorded_rollouts import RecordedRollouts
from megatron_bapo.data.rollout_files import rollout_files
from tests.e2e.test_training import finish, start

NUM_STEPS = 3


def test_a_rollout_only_run_writes_batches_to_train_on_and_can_be_continued(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    folder = run_dir / "rollouts"
    code, output, errors = finish(start(run_dir, "--rollout-only", f"trainer.total_steps={NUM_STEPS}"))
    assert code == 0, output + errors
    assert f"{NUM_STEPS} of {NUM_STEPS} batches are in {folder}" in output
    assert f"--rollouts-from {folder}" in output
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == ["engine-0.log", "rollout-service.log"]

    written = {step: path.read_bytes() for step, path in rollout_files(folder).items()}
    rollout_files(folder)[NUM_STEPS].unlink()
    code, output, errors = finish(start(run_dir, "--rollout-only", f"trainer.total_steps={NUM_STEPS}"))
    assert code == 0, output + errors
    assert {step: path.read_bytes() for step, path in rollout_files(folder).items()} == written

    recorded = RecordedRollouts(load_config(run_dir / "config.yaml", []), folder, step=0)
    batches = [recorded.take()[0] for _ in range(NUM_STEPS)]
    trajectories = [trajectory for batch in batches for group in batch.groups for trajectory in group.trajectories]
    assert len(trajectories) == NUM_STEPS * 32
    assert {span.policy_version for trajectory in trajectories for span in trajectory.version_spans} == {0}
    assert all(0.0 <= trajectory.reward <= 1.0 for trajectory in trajectories)
