"""When ranks agree on checkpoints, and how often."""

from avgpipe.cli.pace import Pace


def simulate(interval_s, batch_s, batches, pipelines=2):
    """Times of the checkpoints of a run, and the number of agreements."""
    pace, now, saved, saves, agreements = Pace(interval_s, pipelines), 0.0, 0.0, [], 0
    done = 0
    while done < batches:
        count = pace.batches()
        assert count % pipelines == 0
        done += count
        now += count * batch_s
        agreements += 1
        if pace.due(count, now - saved):
            saves.append(now)
            saved = now
    return saves, agreements


def test_checkpoints_come_at_about_the_interval():
    saves, _ = simulate(interval_s=600, batch_s=0.1, batches=40_000)
    gaps = [b - a for a, b in zip([0.0, *saves], saves)]
    assert len(saves) == 6
    assert all(600 <= gap < 602 for gap in gaps)


def test_agreements_are_few():
    _, agreements = simulate(interval_s=600, batch_s=0.1, batches=40_000)
    assert agreements < 40


def test_batches_slower_than_the_interval_are_each_followed_by_a_checkpoint():
    saves, agreements = simulate(interval_s=1, batch_s=5.0, batches=100)
    assert len(saves) == agreements
    assert agreements >= 46
