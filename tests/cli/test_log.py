"""The links that the log names, in one line, and its warnings."""

import json
import logging

from avgpipe.cli.log import LogNotes, links_line
from avgpipe.links.choose import LINK_MESSAGE


def test_notes_of_the_log_are_the_way_to_the_next_stage_and_warnings():
    log = logging.getLogger("avgpipe")
    level, handlers = log.level, list(log.handlers)
    with LogNotes() as notes:
        log.info(LINK_MESSAGE, "stage 1", "stage 0", "shared memory")
        log.info(LINK_MESSAGE, "stage 1", "stage 2", "shared memory")
        log.info("something else")
        log.warning("%s waits", "somebody")
    assert json.loads(notes.links) == [
        ["stage 1", "stage 0", "shared memory"],
        ["stage 1", "stage 2", "shared memory"],
    ]
    assert notes.warnings == ["somebody waits"]
    assert (log.level, log.handlers) == (level, handlers)


def note(*links):
    return json.dumps(links)


FIRST, SECOND = ("stage 0", "stage 1", "shared memory"), ("stage 1", "stage 0", "shared memory")


def test_one_line_says_how_workers_are_joined():
    assert links_line([note(FIRST), note(SECOND)]) == ["links: stage 0 to stage 1 by shared memory"]
    alike = ("stage 1", "stage 2", "shared memory")
    assert links_line([note(FIRST), note(SECOND, alike), note()]) == ["links: all 2 by shared memory"]
    other = ("stage 1", "stage 2", "torch.distributed (gloo)")
    assert links_line([note(FIRST), note(SECOND, other), note()]) == [
        "links: stage 0 to stage 1 by shared memory; stage 1 to stage 2 by torch.distributed (gloo)"
    ]


def test_a_single_process_has_no_links():
    assert links_line(["[]"]) == []
