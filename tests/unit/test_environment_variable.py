import os

import pytest

from megatron_bapo.environment_variable import environment_variable

NAME = "MEGATRON_BAPO_TEST_VARIABLE"


@pytest.mark.parametrize("before", [None, "before"])
def test_a_variable_is_as_before_after_an_error(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is not None:
        monkeypatch.setenv(NAME, before)
    found = []

    def fail() -> None:
        with environment_variable(NAME, "now"):
            found.append(os.environ[NAME])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert found == ["now"]
    assert os.environ.get(NAME) == before
