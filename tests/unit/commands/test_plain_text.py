from megatron_bapo.commands.plain_text import escaped, shortened


def test_control_and_invisible_characters_become_escape_sequences() -> None:
    assert escaped("a\x1b[31mb\r\x07\x9b\u202ec\u2028") == "a\\x1b[31mb\\r\\x07\\x9b\\u202ec\\u2028"


def test_line_breaks_tabs_and_letters_of_all_languages_stay() -> None:
    text = "x =\t1\nжизнь 生 é √2 [bold]"
    assert escaped(text) == text


def test_a_short_text_is_not_shortened() -> None:
    assert shortened("x" * 10, 10) == "x" * 10


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = "a" * 5000 + "b" * 5000
    short = shortened(text, 100)
    assert short == "a" * 65 + " [... 9,900 characters not shown ...] " + "b" * 35
