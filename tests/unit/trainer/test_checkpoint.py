from megatron_bapo.trainer.checkpoint import checkpoints


def test_complete_checkpoints_are_listed_oldest_first_and_partial_ones_are_not(tmp_path):
    for name in ("step-00000100", "step-00000020", "step-00000003.partial", "step-7", "other"):
        (tmp_path / name).mkdir()

    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000020", "step-00000100"]


def test_a_run_that_has_saved_nothing_has_no_checkpoints(tmp_path):
    assert checkpoints(tmp_path / "missing") == []
