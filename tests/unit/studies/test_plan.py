from collections import Counter
from pathlib import Path

import pytest

from megatron_bapo.config.checks import check_config
from megatron_bapo.config.loading import dump_config
from megatron_bapo.errors import UserError
from megatron_bapo.studies.plan import check_runs, expand, load_study
from tests.unit.studies.studies import ROOT, make_study, write_run

STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))


def test_every_arm_staleness_and_seed_has_a_run_with_equally_many_updates_and_trajectories(tmp_path):
    _, runs = make_study(tmp_path)
    names = [run.name for run in runs]

    assert names[:2] == ["start-seed1", "start-seed2"]
    assert names[2:] == [
        *(f"{arm}-4x-seed{seed}" for seed in (1, 2) for arm in ("fixed", "moving")),
        *(f"fixed-1x-seed{seed}" for seed in (1, 2)),
    ]
    for run in runs[2:]:
        trainer = run.config.trainer
        assert trainer.total_steps * trainer.updates_per_step == 8
        assert trainer.total_steps * trainer.train_batch_size == 8 * 16
        assert trainer.updates_per_step == (4 if "4x" in run.name else 1)


def test_a_run_starts_from_its_seeds_exported_model_with_its_arms_settings(tmp_path):
    study, runs = make_study(tmp_path)
    by_name = {run.name: run for run in runs}
    start, run = by_name["start-seed2"], by_name["fixed-4x-seed2"]

    assert start.config.trainer.total_steps == 0
    assert start.config.warm_start is not None
    assert start.config.warm_start.num_steps == 5
    assert run.needs == "start-seed2"
    assert (run.config.seed, run.config.model.path) == (2, study.run_dir / "start-seed2" / "hf")
    assert run.config.warm_start is None
    assert run.config.algorithm.clip_ratio_high == 0.28
    assert (start.config.optimizer.lr, run.config.optimizer.lr) == (2e-4, 1e-3)


def test_finished_updates_are_counted_in_the_run_directory(tmp_path):
    _, (start, _, run, *_) = make_study(tmp_path)
    assert [start.num_updates_done(), run.num_updates_done()] == [0, 0]

    write_run(run)
    run.finished.unlink()
    run.directory.updates.write_text("{}\n" * 3 + "{")
    assert run.num_updates_done() == 3

    run.finished.touch()
    assert run.num_updates_done() == 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_updates": 10}, "num_updates=10 must be a multiple of updates_per_step=4"),
        ({"armz": {}}, "armz: Extra inputs are not permitted"),
        ({"tokens_of": {"none": [4]}}, "tokens_of.none: no such arm; there are fixed, moving"),
        ({"summary": ["loss"]}, "no such column loss; there are reward, accuracy, entropy"),
        ({"arms": {"fixed": {"label": "a", "updates_per_step": [2]}}}, r"must be one of the study's, \[4, 1\]"),
        ({"continued": {"optimizer": {"lrr": 1}}}, "did you mean optimizer.lr"),
    ],
)
def test_inconsistent_keys_of_a_study_are_named(tmp_path, values, message):
    with pytest.raises(UserError, match=message):
        make_study(tmp_path, **values)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        load_study(tmp_path / "nowhere.yaml")


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "study.yaml").write_bytes(b"base: \xe9")
    with pytest.raises(UserError, match=r"cannot read the study .*study\.yaml: 'utf-8' codec can't decode"):
        load_study(tmp_path / "study.yaml")


def test_a_folder_of_another_configuration_is_refused_before_anything_starts(tmp_path):
    _, runs = make_study(tmp_path)
    run = runs[2]
    (run.directory.checkpoints / "step-00000004").mkdir(parents=True)
    run.directory.config.write_text(dump_config(run.config))
    check_runs(runs)

    _, changed = make_study(
        tmp_path, continued={"optimizer": {"lr": 5e-4}, "parallel": {"tensor_model_parallel_size": 1}}
    )
    with pytest.raises(UserError, match=r"fixed-4x-seed1: .*another configuration:\n  optimizer.lr: 0.001"):
        check_runs(changed)


def test_a_run_that_breaks_a_rule_is_named_before_anything_starts(tmp_path):
    _, runs = make_study(tmp_path, continued={"rollout": {"n": 1}, "parallel": {"tensor_model_parallel_size": 1}})

    with pytest.raises(UserError, match=r"fixed-4x-seed1: the configuration breaks these rules:\n  rollout\.n=1"):
        check_runs(runs)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_shipped_study_keeps_every_rule_without_a_warning(path: Path, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = load_study(path)
    runs = expand(study)

    assert len(study.seeds) >= 3
    assert max(Counter(run.config.run_dir for run in runs).values()) == 1
    for run in runs:
        assert check_config(run.checkable(runs)) == []
