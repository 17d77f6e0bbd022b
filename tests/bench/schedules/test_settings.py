"""Options of the emulated cluster."""

import pytest

from avgpipe.bench.schedules.settings import (
    DEFAULT,
    ROWS,
    ScheduleSettings,
    parse_pipelines,
    parse_rate,
)


@pytest.mark.parametrize(
    ("text", "rate"), [("1Gbit", 1e9), ("250Mbit", 2.5e8), ("500kbit", 5e5), ("none", None), (None, None)]
)
def test_rates_have_units(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["fast", "1GB", "10bit", "1e30Gbit"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ValueError, match="--rate"):
        parse_rate(text)


def test_pipelines_are_a_list():
    assert parse_pipelines("1,3") == (1, 3)
    with pytest.raises(ValueError, match="--pipelines two"):
        parse_pipelines("two")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stages": 0}, "--stages 0"),
        ({"micro_batches": 0}, "--micro-batches 0"),
        ({"rounds": 0}, "--rounds 0"),
        ({"batches": 0}, "--batches 0"),
        ({"forward_s": -1e-3}, "--forward-ms -1"),
        ({"backward_s": float("nan")}, "--backward-ms nan"),
        ({"activation_bytes": 60}, "--activation 60"),
        ({"activation_bytes": 66}, "--activation 66"),
        ({"pipelines": (1, 0)}, "--pipelines 1,0"),
        ({"link": "rope"}, "--link rope"),
        ({"only": ("torch-2f2b",)}, "--rows torch-2f2b"),
        ({"timeout_s": 0}, "--timeout 0"),
        ({"link": "shm", "rate_bits_per_s": 1e9}, "--link shm with --rate"),
    ],
)
def test_values_out_of_range_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        ScheduleSettings(**options)


def test_between_hosts_the_link_is_not_shared_memory():
    assert ScheduleSettings().effective_link == "auto"
    assert ScheduleSettings(rate_bits_per_s=1e9).effective_link == "gloo"


def test_the_command_measures_the_same_again():
    settings = ScheduleSettings(stages=2, rate_bits_per_s=2e8, pipelines=(2,), only=ROWS[:2])
    words = " ".join(settings.command())
    assert words.startswith("avgpipe bench schedules --stages 2 --micro-batches 12 --forward-ms 10 ")
    assert "--rate 200000000bit" in words
    assert parse_rate("200000000bit") == 2e8
    assert words.endswith("--rows 1f1b,all-forward-all-backward")


def test_settings_go_through_json():
    settings = ScheduleSettings(pipelines=(1, 4), only=("1f1b",), rate_bits_per_s=1e9)
    assert ScheduleSettings.from_json(settings.to_json()) == settings


def test_rows_are_some_by_default_or_all_or_those_asked_for_in_the_order_of_the_table():
    assert ScheduleSettings().rows == DEFAULT
    assert set(DEFAULT) < set(ROWS)
    assert ScheduleSettings(only=("all",)).rows == ROWS
    assert ScheduleSettings(only=("torch-1f1b", "pipedream")).rows == ("pipedream", "torch-1f1b")
    assert ScheduleSettings(only=("all",)).command()[-2:] == ["--rows", "all"]


def test_a_tensor_takes_time_on_a_line_only():
    assert ScheduleSettings().transfer_s == 0
    assert ScheduleSettings(rate_bits_per_s=1e9).transfer_s == pytest.approx(8.388608e-3)


def test_the_budget_is_far_above_what_one_micro_batch_after_another_takes():
    settings = ScheduleSettings(stages=20, micro_batches=100, only=("model-parallel",))
    batches = (settings.rounds + 1) * (settings.batches + 1)
    assert settings.budget_s > 3 * batches * 100 * 20 * 0.03
