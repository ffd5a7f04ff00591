import numpy as np
import pytest

from megatron_bapo.metrics.token_table import (
    COLUMNS,
    read_token_tables,
    remove_token_tables_after,
    write_token_table,
)


def table(value: float) -> dict[str, np.ndarray]:
    return {name: np.full(3, value, np.float32) for name in COLUMNS}


def test_tables_are_read_back_by_step(tmp_path):
    for step in (2, 1):
        write_token_table(tmp_path / "tokens", step, table(step + 0.5))

    found = read_token_tables(tmp_path / "tokens")

    assert list(found) == [1, 2]
    assert {name: column.tolist() for name, column in found[2].items()} == {name: [2.5] * 3 for name in COLUMNS}


@pytest.mark.parametrize(("step", "kept"), [(0, []), (1, [1]), (5, [1, 2])])
def test_a_resumed_run_drops_the_tables_of_the_steps_that_it_repeats(tmp_path, step, kept):
    for written in (1, 2):
        write_token_table(tmp_path, written, table(0.0))

    remove_token_tables_after(tmp_path, step)

    assert list(read_token_tables(tmp_path)) == kept


def test_a_half_written_table_is_not_read(tmp_path):
    write_token_table(tmp_path, 1, table(0.0))
    (tmp_path / "step-00000002.partial").write_bytes(b"PAR1")

    assert list(read_token_tables(tmp_path)) == [1]


def test_a_run_without_tables_has_none(tmp_path):
    assert read_token_tables(tmp_path / "tokens") == {}
    remove_token_tables_after(tmp_path / "tokens", 0)
