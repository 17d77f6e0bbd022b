"""The links that the log names, in one line."""

import json
import logging

from avgpipe.cli.links import LinkNotes, links_line


def test_notes_of_the_log_name_the_way_to_the_next_stage():
    log = logging.getLogger("avgpipe")
    level, handlers = log.level, list(log.handlers)
    with LinkNotes() as notes:
        log.info("stage %d to stage %d: %s", 1, 0, "shared memory")
        log.info("stage %d to stage %d: %s", 1, 2, "shared memory")
        log.info("something else")
    assert json.loads(notes.text) == [[1, 2, "shared memory"]]
    assert (log.level, log.handlers) == (level, handlers)


def test_one_line_says_how_stages_are_joined():
    notes = ['[[0, 1, "shared memory"]]', "[]"]
    assert links_line(notes) == ["links: stage 0 to stage 1 by shared memory"]
    alike = ['[[0, 1, "shared memory"]]', '[[1, 2, "shared memory"]]', "[]"]
    assert links_line(alike) == ["links: all 3 stages by shared memory"]
    mixed = ['[[0, 1, "shared memory"]]', '[[1, 2, "torch.distributed (gloo)"]]', "[]"]
    assert links_line(mixed) == [
        "links: stage 0 to stage 1 by shared memory; stage 1 to stage 2 by torch.distributed (gloo)"
    ]


def test_a_single_process_has_no_links():
    assert links_line(["[]"]) == []
