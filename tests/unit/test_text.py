import pyarrow as pa
import pytest

from megatron_bapo.model.hf_create import byte_tokenizer
from megatron_bapo.text import visible, without_credentials, without_lone_surrogates


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \u00fc \U0001f600\ttext\n", "plain \u00fc \U0001f600\ttext\n"),
        ("a\x00\x1b[2J\u202eb\ufeff\ud800", "a\\u0000\\u001b[2J\\u202eb\\ufeff\ufffd"),
        ("x" * 100, "x" * 100),
        ("x" * 50 + "y" * 51, "x" * 34 + " [... 101 characters in all ...] " + "y" * 33),
    ],
)
def test_invisible_characters_become_visible_and_long_texts_short(text: str, shown: str) -> None:
    assert visible(text, 100) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no reply from https://me:word@host:1/a@b", "no reply from https://***@host:1/a@b"),
        ("postgresql://me:a@b@host/db?sslmode=on", "postgresql://***@host/db?sslmode=on"),
        ("https://host/a?b=1&access_token=word&c=2 d", "https://host/a?b=1&access_token=***&c=2 d"),
        ("mail me@host", "mail me@host"),
    ],
)
def test_messages_have_no_credentials_of_urls(text: str, shown: str) -> None:
    assert without_credentials(text) == shown
