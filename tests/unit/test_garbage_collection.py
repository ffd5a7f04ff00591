import gc
import sys
import weakref
from pathlib import Path

import pytest

from megatron_bapo.garbage_collection import collector_paused


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_nothing_is_collected_during_imports_and_their_objects_are_exempt_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "just_imported.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    cycle = weakref.ref(Cycle())
    num_frozen = gc.get_freeze_count()
    try:
        with collector_paused():
            assert not gc.isenabled()
            __import__("just_imported")
        assert gc.isenabled()
        assert gc.get_freeze_count() > num_frozen
        gc.collect()
        assert cycle() is not None
    finally:
        sys.modules.pop("just_imported", None)
        gc.unfreeze()


def test_nothing_is_exempt_if_nothing_was_imported() -> None:
    num_frozen = gc.get_freeze_count()
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()
    assert gc.get_freeze_count() == num_frozen
