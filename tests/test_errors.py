from avgpipe.errors import reason, text_of


def test_an_error_without_words_is_named_with_the_place_it_comes_from():
    def first_of_none():
        return next(iter(()))

    try:
        first_of_none()
    except StopIteration as error:
        found = reason(error)
    assert found.startswith("StopIteration in first_of_none, test_errors.py:")
    assert reason(ValueError("\n of no use \n")) == "of no use"
    assert reason(KeyError()) == "KeyError"


class Textless(Exception):
    def __str__(self):
        raise ValueError("no text")


def test_an_error_that_fails_to_make_its_text_is_named_too():
    assert text_of(Textless()) == ""
    assert reason(Textless()) == "Textless"


def test_half_characters_in_an_error_are_written_as_others_can_read_them():
    assert text_of(OSError("a\udcffb\n\ud800")) == "a\\udcffb\n\\ud800"
    assert reason(OSError("a\udcffb\n\ud800")) == "a\\udcffb"
