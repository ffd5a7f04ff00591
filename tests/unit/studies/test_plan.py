import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_bapo.config.checks import check_config
from megatron_bapo.config.loading import dump_config
from megatron_bapo.controller.run_state import RunState
from megatron_bapo.errors import UserError
from megatron_bapo.studies.plan import check_runs, expand, unfinished
from megatron_bapo.studies.results import collect
from megatron_bapo.studies.study import load_study
from tests.unit.studies.studies import ROOT, make_study, write_run

STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))


def test_every_arm_staleness_and_seed_has_a_run_with_equally_many_updates_and_trajectories(tmp_path):
    _, runs = make_study(tmp_path)
    names = [run.name for run in runs]

    assert names == [
        *("start-seed1", "fixed-4x-seed1", "moving-4x-seed1"),
        *("start-seed2", "fixed-4x-seed2", "moving-4x-seed2"),
        *("fixed-1x-seed1", "fixed-1x-seed2"),
    ]
    for run in [run for run in runs if run.cell]:
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


def test_variants_are_an_axis_of_overrides_and_blocks_say_what_is_run_first(tmp_path):
    _, runs = make_study(
        tmp_path,
        variants={"slow": {"optimizer": {"lr": 1e-5}}, "fast": {"optimizer": {"lr": 1e-2}}},
        order=[
            {"variants": ["fast"], "arms": ["moving"], "seeds": [2]},
            {"arms": ["fixed", "moving"], "updates_per_step": [4], "seeds": [2]},
        ],
    )

    assert [run.name for run in runs] == [
        *("start-seed2", "moving-fast-4x-seed2", "fixed-slow-4x-seed2", "moving-slow-4x-seed2", "fixed-fast-4x-seed2"),
    ]
    assert [run.config.optimizer.lr for run in runs[1:]] == [1e-2, 1e-5, 1e-5, 1e-2]


BOUNDS_ARMS = {
    "moving": {"label": "BAPO", "updates_per_step": [4]},
    "copied": {
        "label": "mean bounds",
        "updates_per_step": [4],
        "bounds_of": "moving",
        "overrides": {"algorithm": {"objective": "ppo"}},
    },
}
BOUNDS_STUDY = {
    "arms": BOUNDS_ARMS,
    "columns": {"clip_low": "actor/bapo_clip_low", "clip_high": "actor/bapo_clip_high"},
    "summary": [],
    "tokens_of": {},
    "figures": {},
    "seeds": [1],
}


def test_an_arm_takes_the_mean_bounds_of_its_paired_run_from_its_folder_or_from_the_table(tmp_path):
    study, runs = make_study(tmp_path, **BOUNDS_STUDY)
    _, moving, copied = runs
    moving.directory.create()
    bounds = (
        {"actor/bapo_clip_low": 0.75, "actor/bapo_clip_high": 2.5},
        {"actor/bapo_clip_low": 0.6, "actor/bapo_clip_high": 1.2},
    )
    lines = [{"step": 1 + i // 4, "update": i + 1, "metrics": bounds[i < 6]} for i in range(8)]
    moving.directory.updates.write_text("".join(json.dumps(line) + "\n" for line in lines))
    moving.directory.metrics.write_text("")
    moving.marker.touch()
    expected = (1 - (6 * 0.6 + 2 * 0.75) / 8, (6 * 1.2 + 2 * 2.5) / 8 - 1)

    algorithm = copied.final_config().algorithm
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high) == pytest.approx(expected, abs=6e-4)

    collect(study, runs, Console(quiet=True))
    shutil.rmtree(study.run_dir)
    again = expand(study)[-1].final_config().algorithm
    assert (again.clip_ratio_low, again.clip_ratio_high) == (algorithm.clip_ratio_low, algorithm.clip_ratio_high)


def test_an_arm_with_the_bounds_of_a_run_that_is_not_run_before_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"copied-4x-seed1 needs moving-4x-seed1, which is not among the runs before it"
    ):
        make_study(tmp_path, **BOUNDS_STUDY, order=[{"arms": ["copied"]}, {}])


def test_a_fresh_clone_runs_what_the_committed_table_lacks(tmp_path):
    study, runs = make_study(tmp_path)
    for run in runs[:2]:
        write_run(run)
    collect(study, runs, Console(quiet=True))
    shutil.rmtree(study.run_dir)

    again = expand(study)
    assert [run.name for run in unfinished(again)] == ["start-seed1", *(run.name for run in runs[2:])]
    for run in again[2:]:
        write_run(run)
    collect(study, again, Console(quiet=True))
    shutil.rmtree(study.run_dir)

    assert unfinished(expand(study)) == []


def test_quick_repeats_its_runs_in_other_folders_whatever_has_finished(tmp_path):
    study, runs = make_study(tmp_path, quick={"arms": ["moving"], "seeds": [1]})
    for run in runs:
        write_run(run)
    collect(study, runs, Console(quiet=True))

    quick = expand(study.quick_study())
    assert [run.name for run in unfinished(quick)] == ["start-seed1", "moving-4x-seed1"]
    assert {run.config.run_dir for run in quick}.isdisjoint(run.config.run_dir for run in runs)


def test_quick_needs_its_key(tmp_path):
    study, _ = make_study(tmp_path)
    with pytest.raises(UserError, match="no key `quick`"):
        study.quick_study()


def test_finished_updates_are_counted_in_the_run_directory(tmp_path):
    _, (start, run, *_) = make_study(tmp_path)
    assert [start.num_updates_done(), run.num_updates_done()] == [0, 0]

    write_run(run)
    run.marker.unlink()
    run.directory.updates.write_text("{}\n" * 3 + "{")
    assert run.num_updates_done() == 3

    run.marker.touch()
    assert run.num_updates_done() == 8


VARIANTS = {"variants": {name: {} for name in "abcdefgh"}}


def figure(**values: Any) -> dict[str, Any]:
    """Return the figures of a study with a single one."""
    default = {"kind": "curves", "title": "F", "arms": ["fixed"], "updates_per_step": [4], "panels": {"reward": "r"}}
    return {"figures": {"f": default | values}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_updates": 10}, "num_updates=10 must be a multiple of updates_per_step=4"),
        ({"window": 9}, "window=9 must be at most num_updates=8"),
        ({"armz": {}}, "armz={}: unknown key; did you mean arms?"),
        ({"window": -1}, r"1 problem\n  window=-1: must be greater than 0"),
        ({"seeds": 3}, r"seeds=3: must be a list"),
        ({"tokens_of": {"none": [4]}}, "tokens_of: no such arm none; there are fixed, moving"),
        ({"summary": ["loss"]}, "no such column loss; there are reward, accuracy, entropy"),
        ({"arms": {"fixed": {"label": "a", "updates_per_step": [2]}}}, r"must be one of the study's, \[4, 1\]"),
        ({"order": [{"variants": ["fast"]}]}, r"order\[0\]: no such variant fast"),
        ({"arms": {"fixed": {"label": "a", "bounds_of": "b"}}}, "arms.fixed.bounds_of: no such arm b; there are fixed"),
        (figure(updates_per_step=[7]), r"figures\.f: no such updates_per_step 7; there are 4, 1"),
        (figure(panels={}), r"figures\.f\.panels is empty; name a column for each panel, such as reward"),
        (figure(variants=list("abcdefgh")) | VARIANTS, r"figures\.f: 8 curves cannot be told apart with 7 colours"),
        (figure(kind="map", panels={}), r"figures\.f\.panels names 0 columns, but a map shows one"),
        (figure(kind="map", panels=dict.fromkeys(("reward", "entropy"), "")), r"names 2 columns, but a map shows one"),
        (figure(kind="differences"), r"figures\.f: `statistics` compares none of its arms"),
        (
            figure(kind="differences") | {"statistics": {"outcome": "accuracy", "reference": {"fixed": ["moving"]}}},
            r"figures\.f: `statistics` compares none of its arms",
        ),
        (
            figure(kind="ratio_boxes", updates_per_step=[4, 1]),
            r"1 problem\n  figures\.f: tokens_of has no fixed with 1 updates per step; add them there",
        ),
        ({"tokens_of": {"fixed": [3, 4]}}, r"tokens_of\.fixed: no such updates_per_step 3; there are 4, 1"),
        ({"statistics": {"outcome": "loss", "reference": {}}}, "statistics.outcome: no such column loss"),
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
    with pytest.raises(UserError, match=r"study\.yaml is not UTF-8 text"):
        load_study(tmp_path / "study.yaml")


def test_a_folder_of_another_configuration_is_refused_before_anything_starts(tmp_path):
    _, runs = make_study(tmp_path)
    run = runs[1]
    checkpoint = run.directory.checkpoints / "step-00000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(RunState().to_json() | {"adam_step": 0}))
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


@pytest.mark.slow
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_shipped_study_keeps_every_rule_without_a_warning(path: Path, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = load_study(path)
    runs = expand(study)

    assert len(study.seeds) >= 3
    assert max(Counter(run.config.run_dir for run in runs).values()) == 1
    for run in runs:
        assert check_config(run.checkable(runs)) == []
