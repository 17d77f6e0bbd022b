"""Torch's CSV form, as text; tests/interop/test_torch_schedules.py has what torch itself makes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe.errors import ScheduleError
from avgpipe.schedule import Schedule, build_schedule, schedule_names
from avgpipe.schedule.builders import published

FLUSHING = [name for name in schedule_names() if published(name).weights == "flush"]


# ---- written ----


def test_a_line_per_rank_names_stages_and_leaves_out_updates():
    assert build_schedule("1f1b", 2, 2).to_torch_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert build_schedule("zero-bubble-v", 2, 1).to_torch_csv() == "0F0,1F0,1I0,1W0,0I0,0W0\n"


@given(name=st.sampled_from(FLUSHING), stages=st.integers(1, 4), micro_batches=st.integers(1, 9))
def test_what_is_written_is_read_as_the_same_schedule(name, stages, micro_batches):
    built = build_schedule(name, 2 * stages, micro_batches)
    again = Schedule.from_torch_csv(built.to_torch_csv(), name)
    assert again == built
    assert again.name == name
    again.validate()


def test_what_the_form_cannot_say_is_refused():
    with pytest.raises(ValueError, match=r"'pipedream-2bw' has no flush between batches.* with to_csv"):
        build_schedule("pipedream-2bw", 2, 2).to_torch_csv()
    with pytest.raises(
        ValueError, match=r"'1f1b' has stage 1 on workers 1, 2, .* build it without replication"
    ):
        build_schedule("1f1b", 2, 2, replication=[1, 2]).to_torch_csv()


# ---- read ----


def test_blank_cells_are_bubbles_and_updates_come_last():
    read = Schedule.from_torch_csv("0F0,0F1,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1\r\n")
    assert read == build_schedule("1f1b", 2, 2)
    assert read.name == "torch-csv"


def test_what_spreadsheets_write_is_read():
    text = '\ufeff"0F0",0F1,,"0B0", 0B1 ,\r\n1F0,1B0,1F1,1B1,,\r\n,,\r\n'
    assert Schedule.from_torch_csv(text) == build_schedule("1f1b", 2, 2)


def test_overlapping_actions_follow_one_another_as_they_are_written():
    text = "0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,1B1,0I1,0W1\n"
    assert Schedule.from_torch_csv(text) == build_schedule("dualpipe-v", 2, 2)
    swapped = Schedule.from_torch_csv(text.replace("1F1;0B0", "0B0; 1F1"))
    assert swapped.to_torch_csv() == "0F0,1F0,0F1,1B0,0B0,1F1,1B1,0I1,0W1\n"


def test_what_only_torchs_runtime_does_is_left_out():
    text = (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD\n"
    )
    assert Schedule.from_torch_csv(text) == build_schedule("1f1b", 2, 1)


def test_a_wrong_schedule_is_read_so_that_it_can_be_printed():
    wrong = Schedule.from_torch_csv("0F0,0F1,0B0\n", "mine")
    assert "[B1?]" in str(wrong)
    with pytest.raises(ScheduleError, match="schedule 'mine': stage 0, position 4, B1: missing"):
        wrong.validate()


ACTION = "write F, B, I or W between a stage and a micro-batch, as 2F3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,0B0\n1F0,,1X0\n",
            rf"row 2 \(rank 1\), cell 3: '1X0' is not an action of torch's form: {ACTION}",
        ),
        ("0F0,0B\n", r"row 1 \(rank 0\), cell 2: '0B' is not an action"),
        ("0F0 0B0\n", r"row 1 \(rank 0\), cell 1: '0F0 0B0' is not an action"),
        ("0F0,0B0x\n", "cell 2: '0B0x' is not an action"),
        ("0F0,0SEND_F\n", "cell 2: '0SEND_F' is not an action"),
        ("-1F0\n", "cell 1: '-1F0' is not an action"),
        ("0F9999999999\n", "cell 1: '0F9999999999' is not an action"),
        ("F0,B0\n", "cell 1: 'F0' is not of torch's form but of avgpipe's: read it with Schedule.from_csv"),
        ("0F0,0B0,0U\n", "cell 3: '0U' is not of torch's form"),
        ("0F0+1,0B0\n", r"cell 1: '0F0\+1' is not of torch's form"),
        (
            "0F0,(0F1;0X0)OVERLAP_F_B\n",
            rf"row 1 \(rank 0\), cell 2: '0X0' is not an action of torch's form: {ACTION}",
        ),
        ("0F0,()OVERLAP_F_B\n", "cell 2: '' is not an action"),
        ("0F0,(0F1;(0F2;0B0)OVERLAP_F_B)OVERLAP_F_B\n", "cell 2: .* is not an action"),
        ("0F0,(0F1;0B0)OVERLAP\n", "cell 2: .* is not an action"),
        ("0F0,0B0\n\n1F0,1B0\n", r"row 2 \(rank 1\) has no actions: write one row per rank, as 0F0,0B0"),
        ("0F0,0B0\n1SEND_F0\n", r"row 2 \(rank 1\) has no actions"),
        ("0F0,0B0\n2F0,2B0\n", "no cell is of stage 1, but some are of stage 2: number from 0"),
        ("", "the CSV text is empty: write one row of actions per rank, as 0F0,0B0"),
    ],
)
def test_what_is_malformed_is_refused_with_row_and_cell(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_torch_csv(text)


def test_what_is_no_text_is_refused():
    with pytest.raises(TypeError, match=r"of type NoneType: pass a str, as Schedule\.to_torch_csv returns"):
        Schedule.from_torch_csv(None)


cells = st.sampled_from(
    ["0F0", "1B0", "", "0SEND_F0", "(0F1;1B0)OVERLAP_F_B", "0U", "F0", "(", ")", ";", "0F", '"']
)


@given(st.lists(st.lists(cells | st.text(max_size=6), max_size=6), max_size=4))
def test_whatever_the_text_it_is_read_or_refused(rows):
    text = "\n".join(",".join(row) for row in rows)
    try:
        read = Schedule.from_torch_csv(text)
    except ScheduleError:
        return
    assert str(read).startswith("torch-csv: stages ")
