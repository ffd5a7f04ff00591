import pyarrow as pa
import pytest

from megatron_bapo.model.hf_create import byte_tokenizer
from megatron_bapo.text import without_lone_surrogates


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("\ufeffplain \u00fc \U0001f600 \x00", "\ufeffplain \u00fc \U0001f600 \x00"),
        ("\ud83d", "\ufffd"),
        ("a\ude00", "a\ufffd"),
        ("a\ud83db\udc80c", "a\ufffdb\ufffdc"),
        ("\ud83d\ud83d\ude00\ude00", "\ufffd\U0001f600\ufffd"),
        ("\ufeff\ud83d\ude00", "\ufeff\U0001f600"),
    ],
)
def test_lone_surrogates_are_replaced_and_pairs_become_characters(text, expected):
    found = without_lone_surrogates(text)
    assert found == expected
    assert pa.array([found], pa.string()).to_pylist() == [expected]
    byte_tokenizer(["a"]).encode(found)
