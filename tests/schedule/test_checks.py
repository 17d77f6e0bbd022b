from avgpipe.schedule import Action, build_schedule
from avgpipe.schedule.checks import dry_run, steps_of


def slots(*rows):
    """Of tokens with their stage in front."""
    steps = [[(Action.parse(token), 0) for token in row.split()] for row in rows]
    return dry_run(steps, 1 + max(action.stage for row in steps for action, _ in row))


def slots_of(schedule):
    return dry_run([steps_of(row, 1, schedule.micro_batches) for row in schedule.rows], schedule.stages)


def test_every_action_takes_one_slot_and_waits_for_its_neighbour():
    assert slots_of(build_schedule("1f1b", 2, 2)) == [[0, 1, 3, 5, 6], [1, 2, 3, 4, 5]]


def test_a_split_backward_sends_its_gradient_before_the_weights_part():
    assert slots("0F0 0B0 0U", "1F0 1I0 1W0 1U") == [[0, 3, 4], [1, 2, 3, 4]]


def test_stuck_workers_keep_the_slots_they_reached():
    assert slots("0F0 0B0 0F1 0B1 0U", "1F0 1F1 1B0 1B1 1U") == [[0], [1]]


def test_a_worker_runs_one_action_of_its_stages_at_a_time_in_their_order():
    assert slots("0F0 2F0 2B0 0B0 0U 2U", "1F0 1B0 1U") == [[0, 2, 3, 5, 6, 7], [1, 4, 5]]


def test_a_worker_may_wait_for_itself():
    assert slots("1F0 0F0 1B0 0B0 0U 1U") == [[]]


def test_all_forward_all_backward_has_the_bubbles_of_the_formula():
    stages, micro_batches = 5, 9
    first = slots_of(build_schedule("gpipe", stages, micro_batches))[0]
    # A batch of unit forwards and backwards takes 2 (M + K - 1) slots; the first stage's update is one more.
    assert first[-1] == 2 * (micro_batches + stages - 1)
