"""The map of the code is what the code says."""

from tools import maps


def test_the_map_names_every_file_as_its_docstring_does() -> None:
    assert maps.PAGE.read_text() == maps.page(), "run python -m tools.maps"


def test_a_sentence_ends_at_its_full_stop(tmp_path):
    module = tmp_path / "m.py"
    module.write_text('"""Cut a model, e.g. by torch.fx, in two. Then more.\n\nAnd more."""\n')
    assert maps.sentence(module) == "Cut a model, e.g. by torch.fx, in two"
    module.write_text('"""The planner of Fan et al. PPoPP 2021. Then more."""\n')
    assert maps.sentence(module) == "The planner of Fan et al. PPoPP 2021"
