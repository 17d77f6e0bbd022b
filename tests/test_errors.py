from avgpipe.errors import reason


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
