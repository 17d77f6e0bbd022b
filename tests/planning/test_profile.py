"""The value: what it refuses, what it says between the sizes measured, and its file."""

from dataclasses import replace

import pytest

from avgpipe.planning.chain import Chain
from avgpipe.planning.profile import LayerProfile, LinkProfile, Profile, Skip, Tie

LAYERS = (
    LayerProfile("first", (1.0, 3.0), (2.0, 4.0), (0.0, 0.0), (10, 20), (4, 8), 100, handed_bytes=(4, 8)),
    LayerProfile("second", (2.0, 4.0), (3.0, 6.0), (1.0, 2.0), (30, 60), (6, 12), 50, 200, 0.5, 0.25, 7, 0.1),
    LayerProfile("third", (1.0, 1.0), (1.0, 1.0), (0.5, 0.5), (0, 0), (0, 0), 100),
)
PROFILE = Profile(
    "a model",
    "a device",
    (2, 4),
    LAYERS,
    skips=(Skip(0, 2, (100, 200)),),
    ties=(Tie((0, 2), 80),),
    second_lane=(1.5, 1.25),
    action_s=1e-5,
    process_bytes=1000,
    step_s=1e-4,
    link=LinkProfile(1e-3, 1e6),
)


def changed(**changes):
    """The profile with another second layer."""
    return replace(PROFILE, layers=(LAYERS[0], replace(LAYERS[1], **changes), LAYERS[2]))


def test_a_file_gives_back_the_profile(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == PROFILE
    plain = Profile("m", "d", (1,), (LayerProfile("only", (1.0,), (1.0,), (0.5,), (1,), (0,), 4),))
    assert Profile.from_json(plain.to_json()) == plain


def test_costs_lie_on_lines_between_sizes_and_beyond():
    assert PROFILE.at(3)[0][:5] == (2.0, 3.0, 0.0, 15, 6)
    assert PROFILE.at(8)[0].forward_s == 7.0
    assert PROFILE.at(1)[0].forward_s == 0.0
    assert PROFILE.at(1)[1].forward_s == 1.0
    assert [c.handed_bytes for c in PROFILE.at(3)] == [6, 0, 0]
    with pytest.raises(ValueError, match="more than 0 samples"):
        PROFILE.at(0)


def test_a_skip_crosses_every_boundary_on_its_way():
    assert PROFILE.boundary_bytes(2) == [104, 106]


def test_a_tie_counts_once_on_a_stage():
    assert Chain(PROFILE, 2).parameter_bytes(0, 3) == 170
    assert Chain(PROFILE, 2).parameter_bytes(0, 2) == 150


def test_the_gain_of_a_second_lane_is_from_1_to_2():
    assert PROFILE.lane_gain(3) == 1.375
    assert PROFILE.lane_gain(100) == 1.0
    assert replace(PROFILE, second_lane=()).lane_gain(1) == 1.0


def test_a_message_takes_latency_and_bytes():
    assert PROFILE.link.seconds(1e6) == pytest.approx(1.001)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"forward_s": (1.0,)}, r"layer 1 \(second\): forward_s has 1 entries for 2"),
        ({"backward_s": (1.0, -1.0)}, r"layer 1 \(second\): backward_s=-1.0: must be .* at least 0"),
        ({"held_bytes": (1, float("nan"))}, "held_bytes=nan: must be a finite number"),
        ({"input_backward_s": (3.5, 1.0)}, "input_backward_s 3.5 is above backward_s 3"),
        ({"handed_bytes": (1.0,)}, "handed_bytes has 1 entries"),
        ({"working_bytes": (1.0, -1.0)}, "working_bytes=-1.0: must be"),
        ({"parameter_bytes": -1}, "parameter_bytes"),
        ({"accumulate_s": float("inf")}, "accumulate_s"),
    ],
)
def test_a_layer_that_cannot_be_is_named(changes, words):
    with pytest.raises(ValueError, match=words):
        changed(**changes)


def test_what_is_no_number_is_a_type_error():
    with pytest.raises(TypeError, match="update_s='3': must be a number"):
        changed(update_s="3")
    with pytest.raises(TypeError, match="forward_s=True: must be a number"):
        changed(forward_s=(True, 1.0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"micro_batch_sizes": (4, 2)}, "must rise"),
        ({"micro_batch_sizes": (0, 2)}, "must rise"),
        ({"layers": ()}, "at least one layer"),
        ({"skips": (Skip(2, 1, (1, 1)),)}, r"skip \[2, 1\]"),
        ({"skips": (Skip(0, 3, (1, 1)),)}, "from 0 to 2"),
        ({"skips": (Skip(0, 2, (1,)),)}, "size_bytes has 1"),
        ({"ties": (Tie((1,), 1),)}, r"tie \[1\]"),
        ({"second_lane": (1.0,)}, "second_lane has 1"),
        ({"action_s": -1.0}, "action_s"),
        ({"step_s": -1.0}, "step_s"),
        ({"link": LinkProfile(1.0, 0.0)}, "bytes_per_s=0: must be above 0"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(PROFILE, **changes)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"format": 1', '"format": 2', "format 1"),
        ('"model"', '"modle"', "unknown key 'modle': did you mean 'model'"),
        ('"held_bytes"', '"hold_bytes"', r"layers\[0\]: unknown key 'hold_bytes'"),
        ('"name": "first", ', "", r"layers\[0\]: name is missing"),
        ("{", "", "must be JSON"),
    ],
)
def test_a_damaged_file_is_named_with_its_fault(tmp_path, old, new, words):
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.to_json().replace(old, new, 1))
    with pytest.raises(ValueError, match=words) as refused:
        Profile.load(path)
    assert str(path) in str(refused.value)
