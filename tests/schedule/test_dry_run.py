from avgpipe.schedule import Action, build_schedule
from avgpipe.schedule.dry_run import dry_run
from avgpipe.schedule.order import merge


def rows(*columns, order=None):
    return merge([[Action.parse(t) for t in column.split()] for column in columns], order)


def test_every_action_takes_one_slot_and_waits_for_its_neighbour():
    both = build_schedule("1f1b", 2, 2).rows()
    run = dry_run(both)
    assert run.slots == [[0, 1, 3, 5, 6], [1, 2, 3, 4, 5]]
    assert run.stuck(both) == []


def test_a_split_backward_sends_its_gradient_before_the_weights_part():
    assert dry_run(rows("F0 B0 U", "F0 I0 W0 U")).slots == [[0, 3, 4], [1, 2, 3, 4]]


def test_stuck_stages_keep_the_slots_they_reached():
    both = rows("F0 B0 F1 B1 U", "F0 F1 B0 B1 U")
    run = dry_run(both)
    assert run.slots == [[0], [1]]
    assert run.stuck(both) == [0, 1]


def test_a_worker_runs_one_action_of_its_stages_at_a_time_in_their_order():
    both = rows("F0 B0 U", "F0 B0 U", "F0 B0 U", order=((0, 2, 2, 0, 0, 2), (1, 1, 1)))
    assert dry_run(both).slots == [[0, 2, 3, 5, 6, 7], [1, 4, 5]]


def test_a_worker_may_wait_for_itself():
    both = rows("F0 B0 U", "F0 B0 U", order=((1, 0, 1, 0, 0, 1),))
    assert dry_run(both).slots == [[]]
    assert dry_run(both).stuck(both) == [0]


def test_all_forward_all_backward_has_the_bubbles_of_the_formula():
    stages, micro_batches = 5, 9
    run = dry_run(build_schedule("gpipe", stages, micro_batches).rows())
    # A batch of unit forwards and backwards takes 2 (M + K - 1) slots; the first stage's update is one more.
    assert run.slots[0][-1] == 2 * (micro_batches + stages - 1)
