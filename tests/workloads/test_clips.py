import pytest
import torch

from avgpipe.workloads.clips import BOS, EOS, PAD, make_clips


def small(**options):
    return make_clips(30, 10, 10, **{"features": 16, "seed": 4, **options})


def test_the_same_arguments_make_the_same_clips_whatever_the_caller_draws():
    torch.manual_seed(1)
    a = small()
    torch.manual_seed(2)
    b = small()
    assert torch.initial_seed() == 2
    for name in ("train", "valid", "test"):
        one, other = getattr(a, name), getattr(b, name)
        every = torch.arange(len(one))
        assert torch.equal(one.captions, other.captions)
        assert torch.equal(one.frames(every), other.frames(every))


def test_another_seed_makes_other_clips():
    assert not torch.equal(small().train.projection, small(seed=5).train.projection)
    assert told(small().train, small()) != told(small(seed=5).train, small())


def test_a_clip_is_the_same_in_every_company():
    clips = small().train
    together = clips.frames(torch.tensor([3, 7, 1]))
    for row, index in enumerate((3, 7, 1)):
        alone = clips.frames(torch.tensor([index]))[0]
        assert torch.equal(together[row, : len(alone)], alone)
        assert len(alone) == clips.lengths[index]
        assert not together[row, len(alone) :].any()


def test_no_script_is_in_two_clips():
    clips = make_clips(2000, 300, 300, features=2, events=(1, 2))
    scripts = [
        sentence for name in ("train", "valid", "test") for sentence in told(getattr(clips, name), clips)
    ]
    scripts = [sentence.replace(" slowly", "") for sentence in scripts]
    assert len(set(scripts)) == len(scripts) == 2600


def test_captions_tell_what_the_frames_show():
    clips = small(noise=0.0)
    for index in range(len(clips.train)):
        frames = clips.train.frames(torch.tensor([index]))[0]
        # without noise a frame is a sum of few rows of the projection: those of its event's words
        seen, counts = torch.unique_consecutive(frames, dim=0, return_counts=True)
        parts = clips.sentence(clips.train.captions[index]).split(" then ")
        assert len(seen) == len(parts)
        who = ""
        for features, count, part in zip(seen, counts, parts):
            who = who if part.startswith("it ") else " ".join(part.split()[1:3])
            words = [w for w in f"{who} {part}".split() if w not in ("a", "the", "it", "slowly")]
            rows = sorted({clips.vocabulary.index(w) for w in words})
            assert torch.allclose(clips.train.projection[rows].sum(0), features, atol=1e-5)
            assert (count in (6, 8, 10)) if part.endswith("slowly") else (count in (3, 4, 5))


def test_a_subject_that_goes_on_is_called_it():
    clips = make_clips(300, 1, 1, features=2, events=(2, 2))
    again = 0
    for sentence in told(clips.train, clips):
        first, second = sentence.split(" then ")
        again += second.startswith("it ")
        assert second.startswith("it ") or second.split()[1:3] != first.split()[1:3]
    assert 60 < again < 180


def test_lengths_of_clips_and_captions_vary_within_what_is_asked_for():
    clips = make_clips(500, 1, 1, features=2, events=(1, 3), frames=(2, 4)).train
    assert clips.lengths.min() == 2
    assert 3 * 4 < clips.lengths.max() <= 3 * 8
    assert len(clips.caption_lengths.unique()) > 8
    assert 40 <= len(make_clips(1, 1, 1, features=1).vocabulary) <= 80


def test_what_a_decoder_reads_is_what_was_said_before():
    clips = small()
    read, said = clips.train.words(torch.tensor([0, 5, 9]))
    assert read.shape == said.shape
    for row in range(3):
        words = said[row][said[row] != PAD]
        assert words[-1] == EOS
        assert read[row][: len(words)].tolist() == [BOS, *words[:-1].tolist()]
        assert not read[row][len(words) :].any()
    assert said[:, -1].any()  # no longer than the longest caption


def test_noise_is_what_was_asked_for_and_differs_between_sets():
    clean, noisy = small(noise=0.0, features=400), small(noise=2.0, features=400)
    one = torch.tensor([0])
    noise = [getattr(noisy, s).frames(one)[0] - getattr(clean, s).frames(one)[0] for s in ("train", "valid")]
    assert noise[0].std() == pytest.approx(2.0, rel=0.1)
    assert not torch.allclose(noise[0][0], noise[1][0])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"features": 0}, "features must be at least 1, got 0"),
        ({"events": (0, 2)}, r"events must be a range of numbers from 1 on, got \(0, 2\)"),
        ({"frames": (5, 4)}, r"frames must be a range of numbers from 1 on, got \(5, 4\)"),
        ({"noise": -1.0}, r"noise must be finite and not negative, got -1.0"),
    ],
)
def test_wrong_numbers_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        small(**wrong)


def test_more_clips_than_there_are_scripts_are_refused():
    with pytest.raises(ValueError, match="90002 clips are too many of up to 1 events: at most 3180"):
        make_clips(90_000, 1, 1, features=1, events=(1, 1))
    with pytest.raises(ValueError, match="valid must be at least 1, got 0"):
        make_clips(5, 0, 1, features=1)


def test_a_sentence_ends_where_its_caption_does():
    clips = small()
    first = clips.train.captions[0]
    assert clips.sentence([*first.tolist(), 8, 9]) == told(clips.train, clips)[0]
    assert clips.sentence(torch.tensor([3])) == "a"


def told(clip_set, clips):
    return [clips.sentence(caption) for caption in clip_set.captions]
