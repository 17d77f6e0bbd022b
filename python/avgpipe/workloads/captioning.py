"""The workload ``captioning``: S2VT learns to describe clips, PipeDream's last workload (Narayanan et al., SOSP 2019).

The clips are synthetic (:mod:`avgpipe.workloads.clips`) and made when they are needed, so there is no data to give,
and no figure of a run here compares with one that is published for real videos.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from avgpipe.workloads.clips import BOS, EOS, PAD, Clips, ClipSet, make_clips
from avgpipe.workloads.language import perplexity
from avgpipe.workloads.options import BuildOptions
from avgpipe.workloads.s2vt import S2VTConfig, s2vt_costs, s2vt_layers
from avgpipe.workloads.samples import SampleBatches, by_length, in_order
from avgpipe.workloads.training import Training, lr_scheduler_of, optimizer_of
from avgpipe.workloads.workload import Predict, Workload, WorkloadFacts


@dataclass(frozen=True)
class CaptioningPreset:
    """A size of model, how many clips there are, and how it is trained.

    Attributes:
        model: makes the configuration; given ``vocabulary``.
        clips: makes the data set, the same for every seed of a run.
        vocabulary: words of the model; None: those of the clips. More cost as much as they would with real captions.
        decoded: for how many validation clips captions are generated.
        training: of one pipeline.
    """

    model: Callable[..., S2VTConfig]
    clips: Callable[[], Clips]
    vocabulary: int | None
    decoded: int
    training: Training

    def config(self, vocabulary: int) -> S2VTConfig:
        """The model for clips with so many words."""
        return self.model(vocabulary=max(self.vocabulary or 0, vocabulary))


PRESETS: dict[str, dict[str, CaptioningPreset]] = {
    "captioning": {
        "tiny": CaptioningPreset(
            model=partial(S2VTConfig, features=64, embedding=64, hidden=128),
            clips=partial(make_clips, 6000, 300, 300, features=64, events=(1, 2), noise=1.0),
            vocabulary=None,
            decoded=100,
            training=Training(
                batch_size=32, epochs=6, optimizer="adamw", lr=0.005, clip_grad_norm=1.0, warmup=0.05
            ),
        ),
        "small": CaptioningPreset(
            model=partial(S2VTConfig, features=128, embedding=128, hidden=256, video_lstms=2, dropout=0.1),
            clips=partial(make_clips, 12000, 500, 500, features=128, events=(1, 3), noise=2.0),
            vocabulary=None,
            decoded=200,
            training=Training(
                batch_size=32, epochs=5, optimizer="adamw", lr=0.002, clip_grad_norm=1.0, warmup=0.05
            ),
        ),
        # Sizes: sections 3.3 and 4.2. Numbers of clips: MSVD's pairs of clip and sentence for training, about 48,000,
        # its 100 clips for validation and 670 for the test; frames and words together are below the paper's 80 steps.
        # Optimizer: the authors' published configuration, where the loss counts 20-fold, so that its learning rate
        # 0.01 and clipping at 10 are 0.2 and 0.5 here; 25,000 steps of 32. There the rate is halved for the last 5,000.
        "paper": CaptioningPreset(
            model=S2VTConfig,
            clips=partial(
                make_clips, 48000, 100, 670, features=4096, events=(1, 3), frames=(4, 8), noise=2.0
            ),
            vocabulary=12_594,
            decoded=100,
            training=Training(
                batch_size=32,
                epochs=17,
                optimizer="sgd",
                lr=0.2,
                lr_scaling="none",
                momentum=0.9,
                clip_grad_norm=0.5,
                decay="none",
            ),
        ),
    }
}


def check(name: str, options: BuildOptions) -> WorkloadFacts:
    """Refuse what cannot be built, without making the clips. Raises ValueError."""
    if options.data is not None:
        raise ValueError(f"{name} makes its clips itself and reads no data: leave out {options.data}")
    if options.pretrained is not None:
        raise ValueError(f"{name} has no weights to begin with: leave out {options.pretrained}")
    chosen = PRESETS[name][options.preset]
    training = chosen.training.asked(options)
    config = chosen.config(1)
    return WorkloadFacts(
        name=name,
        preset=options.preset,
        layers=2 + config.video_lstms + config.language_lstms,
        batch_size=training.batch_size,
        epochs=training.epochs,
    )


def build(name: str, options: BuildOptions) -> Workload:
    """Make the clips and the model with its initial weights, the same on every rank. Raises ValueError."""
    check(name, options)
    chosen = PRESETS[name][options.preset]
    training = chosen.training.asked(options)
    clips = chosen.clips()
    config = chosen.config(len(clips.vocabulary))
    size, workers = training.batch_size, options.loader_workers

    def train_batches(epoch: int, start: int = 0) -> SampleBatches:
        return SampleBatches(
            by_length(clips.train.lengths, size, options.seed, epoch),
            size,
            partial(caption_batch, clips.train),
            seed=options.seed,
            epoch=epoch,
            start=start,
            workers=workers,
        )

    def held_out(clip_set: ClipSet) -> SampleBatches:
        return SampleBatches(in_order(len(clip_set)), size, partial(caption_batch, clip_set), workers=workers)

    frames, words = (x.double().mean().item() for x in (clips.train.lengths, clips.train.caption_lengths))
    return Workload(
        name=name,
        preset=options.preset,
        layers=list(s2vt_layers(config, seed=options.seed)),
        loss_fn=caption_loss,
        optimizer=optimizer_of(training, options.pipelines),
        lr_scheduler=lr_scheduler_of(training, train_batches(0).total, options),
        clip_grad_norm=training.clip_grad_norm,
        train_batches=train_batches,
        valid_batches=partial(held_out, clips.valid),
        test_batches=partial(held_out, clips.test),
        metrics=caption_metrics,
        metric_name="accuracy",
        lower_is_better=False,
        batch_size=size,
        epochs=training.epochs,
        layer_costs=s2vt_costs(config, frames, words),
        loss_weight=caption_words,
        metric_fn=right_words,
        decode=partial(exact_matches, clips.valid, chosen.decoded, size),
        trivial=("the most frequent word of each position", blind_accuracy(clips.train, clips.valid)),
        title=f"captions of {len(clips.train)} synthetic clips",
    )


def caption_batch(clips: ClipSet, indices: Tensor, _: torch.Generator) -> tuple[dict[str, Any], Tensor]:
    """What S2VT reads of these clips, and the words that it should say, int64 [b, T]."""
    read, said = clips.words(indices)
    return {"frames": clips.frames(indices), "lengths": clips.lengths[indices], "words": read}, said


def caption_loss(logits: Tensor, said: Tensor) -> Tensor:
    """Mean cross entropy in nats per word that is no padding; logits [b, T, vocabulary], said int64 [b, T]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), said.flatten(), ignore_index=PAD)


def caption_words(said: Tensor) -> float:
    """How many words the loss is the mean of."""
    return float((said != PAD).sum())


def right_words(logits: Tensor, said: Tensor) -> dict[str, Tensor]:
    """Words per clip, and how many of them have the greatest logit given the right words before them."""
    real = said != PAD
    right = (logits.argmax(-1) == said) & real
    return {"right": right.sum() / said.shape[0], "words": real.sum() / said.shape[0]}


def caption_metrics(loss: float, means: dict[str, float]) -> dict[str, float]:
    """Word accuracy in percent, and perplexity per word."""
    return {
        "accuracy": 100 * means["right"] / means["words"],
        "perplexity": perplexity(loss),
    }


def blind_accuracy(train: ClipSet, valid: ClipSet) -> float:
    """Word accuracy in percent of always saying the most frequent word of each position in training's captions."""
    seen = torch.zeros(int(train.captions.max()) + 1, train.captions.shape[1], dtype=torch.int64)
    seen.scatter_add_(0, train.captions, torch.ones_like(train.captions))  # [words, positions]
    seen[PAD] = 0
    best = seen.argmax(0)[: valid.captions.shape[1]]
    right = valid.captions[:, : best.numel()] == best
    return 100 * float((right & (best != PAD)).sum()) / caption_words(valid.captions)


def greedy_captions(predict: Predict, frames: Tensor, lengths: Tensor, max_words: int) -> Tensor:
    """Say the most probable word after those said so far until EOS: int64 [b, at most max_words], then PAD.

    predict: S2VT's outputs, of its inputs. frames [b, F, D], lengths int64 [b]: as its inputs have them.
    """
    if max_words < 1:
        raise ValueError(f"max_words must be at least 1, got {max_words}")
    read = torch.full((frames.shape[0], 1), BOS)
    ended = torch.zeros(frames.shape[0], dtype=torch.bool)
    for at in range(max_words):
        logits = predict({"frames": frames, "lengths": lengths, "words": read, "at": at})
        word = logits.argmax(-1).cpu().masked_fill(ended, PAD)
        read = torch.cat((read, word.unsqueeze(1)), 1)
        ended |= word == EOS
        if ended.all():
            break
    return read[:, 1:]


def exact_matches(clips: ClipSet, count: int, batch_size: int, predict: Predict) -> dict[str, float]:
    """The share in percent of the first ``count`` clips whose generated caption is the true one, word by word."""
    count = min(count, len(clips))
    matches = 0
    for indices in torch.split(in_order(count), batch_size):
        true = clips.captions[indices]
        said = greedy_captions(predict, clips.frames(indices), clips.lengths[indices], true.shape[1])
        said = F.pad(said, (0, true.shape[1] - said.shape[1]), value=PAD)
        matches += int((said == true).all(1).sum())
    return {"exact_match": 100 * matches / count}
