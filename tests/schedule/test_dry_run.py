from avgpipe.schedule import Action, build_schedule
from avgpipe.schedule.dry_run import dry_run


def test_every_action_takes_one_slot_and_waits_for_its_neighbour():
    run = dry_run(build_schedule("1f1b", 2, 2).columns)
    assert run.slots == [[0, 1, 3, 5, 6], [1, 2, 3, 4, 5]]
    assert run.stuck(build_schedule("1f1b", 2, 2).columns) == []


def test_a_split_backward_sends_its_gradient_before_the_weights_part():
    columns = [[Action.parse(t) for t in row.split()] for row in ("F0 B0 U", "F0 I0 W0 U")]
    assert dry_run(columns).slots == [[0, 3, 4], [1, 2, 3, 4]]


def test_stuck_stages_keep_the_slots_they_reached():
    columns = [[Action.parse(t) for t in row.split()] for row in ("F0 B0 F1 B1 U", "F0 F1 B0 B1 U")]
    run = dry_run(columns)
    assert run.slots == [[0], [1]]
    assert run.stuck(columns) == [0, 1]


def test_all_forward_all_backward_has_the_bubbles_of_the_formula():
    stages, micro_batches = 5, 9
    run = dry_run(build_schedule("gpipe", stages, micro_batches).columns)
    # A batch of unit forwards and backwards takes 2 (M + K - 1) slots; the first stage's update is one more.
    assert run.slots[0][-1] == 2 * (micro_batches + stages - 1)
