import pytest

from megatron_bapo.environments.tool_call import last_call


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("<tool>1<tool>2</tool>3</tool>", "1<tool>2"),
        ("<tool>1</tool></tool><tool>2", "1"),
        ("</tool><tool>\n1 + 1\n</tool>", "\n1 + 1\n"),
        ("<tool></tool>", ""),
        ("<tool>1</tool", None),
        ("<other>1</other>", None),
        ("", None),
    ],
)
def test_the_last_call_runs_from_the_first_opening_tag_to_the_next_closing_tag(text: str, call: str | None) -> None:
    assert last_call(text, "tool") == call
