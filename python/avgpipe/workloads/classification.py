"""The workloads ``resnet``, ``vgg`` and ``alexnet``: classes of images, in three sizes each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from avgpipe.workloads.alexnet import AlexNetConfig, alexnet_layers
from avgpipe.workloads.convolution import multiply_adds
from avgpipe.workloads.images import (
    WHAT_WORKS,
    ImageBatch,
    ImageData,
    ImageSet,
    find_images,
    read_images,
)
from avgpipe.workloads.libraries import library
from avgpipe.workloads.options import BuildOptions
from avgpipe.workloads.resnet import ResNetConfig, resnet_layers
from avgpipe.workloads.samples import SampleBatches, in_order, shuffled
from avgpipe.workloads.text import DataNotFound
from avgpipe.workloads.training import Training, lr_scheduler_of, optimizer_of
from avgpipe.workloads.vgg import VGGConfig, vgg_layers
from avgpipe.workloads.workload import Workload, WorkloadFacts

_CIFAR_IMAGE, _CIFAR_CLASSES = (3, 32, 32), 10


@dataclass(frozen=True)
class ImagePreset:
    """A size of model and how it is trained.

    Attributes:
        model: makes the configuration of images ``(channels, height, width)`` and a number of classes.
        training: how it is trained.
        limit: train on so many images; None: all.
        held_out_limit: validate, and test, on so many; None: all.
        padding: shift images by up to so many pixels.
        mirror: mirror one image of two, where a mirrored image is of the same class.
    """

    model: Callable[[tuple[int, int, int], int], Any]
    training: Training
    limit: int | None = None
    held_out_limit: int | None = None
    padding: int = 4
    mirror: bool = True


_LAYERS: dict[str, Callable[..., list[nn.Module]]] = {
    "resnet": resnet_layers,
    "vgg": vgg_layers,
    "alexnet": alexnet_layers,
}

_TINY = Training(batch_size=32, epochs=4, optimizer="sgd", lr=0.1, weight_decay=5e-4, warmup=0.1)
_SMALL = replace(_TINY, batch_size=64, epochs=6)

PRESETS: dict[str, dict[str, ImagePreset]] = {
    "resnet": {
        "tiny": ImagePreset(partial(ResNetConfig.of_depth, 8), _TINY, limit=5000, held_out_limit=1000),
        "small": ImagePreset(partial(ResNetConfig.of_depth, 14), _SMALL),
        # He et al. 2016, section 4.2: ResNet-110 for CIFAR-10, 64,000 steps, of which 400 with a lower rate.
        "paper": ImagePreset(
            partial(ResNetConfig.of_depth, 110),
            Training(
                batch_size=128,
                epochs=182,
                optimizer="sgd",
                lr=0.1,
                weight_decay=1e-4,
                warmup=400 / 64_000,
                decay="steps",
                milestones=(0.5, 0.75),
            ),
        ),
    },
    "vgg": {
        "tiny": ImagePreset(
            partial(
                VGGConfig,
                convolutions=(1, 1, 2, 2, 2),
                widths=(16, 32, 64, 64, 64),
                hidden=(64,),
                dropout=0.0,
            ),
            replace(_TINY, lr=0.05),
            limit=5000,
            held_out_limit=1000,
        ),
        "small": ImagePreset(
            partial(VGGConfig, widths=(16, 32, 64, 128, 128), hidden=(128,), dropout=0.1),
            replace(_SMALL, lr=0.05),
        ),
        # Simonyan and Zisserman 2015, section 3.1: the network for ImageNet. They lower the rate three times, when
        # validation stops improving; when is not published.
        "paper": ImagePreset(
            partial(VGGConfig, side=224),
            Training(
                batch_size=256,
                epochs=74,
                optimizer="sgd",
                lr=0.01,
                weight_decay=5e-4,
                decay="steps",
                milestones=(0.5, 0.75, 0.9),
            ),
        ),
    },
    "alexnet": {
        "tiny": ImagePreset(
            partial(
                AlexNetConfig,
                widths=(32, 64, 96, 96, 64),
                stem=(5, 1, 2),
                hidden=(256,),
                dropout=0.1,
                response_norm=False,  # on a CPU it takes longer than all the rest
            ),
            replace(_TINY, lr=0.02),
            limit=5000,
            held_out_limit=1000,
        ),
        "small": ImagePreset(
            partial(
                AlexNetConfig,
                widths=(48, 96, 144, 144, 96),
                stem=(5, 1, 2),
                hidden=(384, 384),
                dropout=0.2,
                response_norm=False,
            ),
            replace(_SMALL, lr=0.02),
        ),
        # Krizhevsky et al. 2012, section 5: the network for ImageNet, some 90 epochs, the rate lowered three times;
        # when is not published.
        "paper": ImagePreset(
            partial(AlexNetConfig, side=224),
            Training(
                batch_size=128,
                epochs=90,
                optimizer="sgd",
                lr=0.01,
                weight_decay=5e-4,
                decay="steps",
                milestones=(0.5, 0.75, 0.9),
            ),
        ),
    },
}


def check(name: str, options: BuildOptions) -> WorkloadFacts:
    """Refuse what cannot be built, without reading the data."""
    chosen = PRESETS[name][options.preset]
    _files(name, options)
    training = chosen.training.asked(options)
    with torch.device("meta"):
        layers = _LAYERS[name](chosen.model(_CIFAR_IMAGE, _CIFAR_CLASSES))
    return WorkloadFacts(name, options.preset, len(layers), training.batch_size, training.epochs)


def build(name: str, options: BuildOptions) -> Workload:
    """Read the images and make the model for their size and classes, see :class:`Workload`."""
    chosen = PRESETS[name][options.preset]
    data = read_images(_files(name, options), limit=chosen.limit, held_out_limit=chosen.held_out_limit)
    training = chosen.training.asked(options)
    layers = _LAYERS[name](chosen.model(data.shape, len(data.classes)), seed=options.seed)
    train_batches = partial(_train_batches, chosen, data, training.batch_size, options)
    return Workload(
        name=name,
        preset=options.preset,
        layers=layers,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=optimizer_of(training, options.pipelines),
        lr_scheduler=lr_scheduler_of(training, len(train_batches(0)), options),
        clip_grad_norm=training.clip_grad_norm,
        train_batches=train_batches,
        valid_batches=partial(_held_out, data, data.valid, training.batch_size, options),
        test_batches=partial(_held_out, data, data.test, training.batch_size, options),
        metrics=_metrics,
        metric_name="accuracy",
        lower_is_better=False,
        batch_size=training.batch_size,
        epochs=training.epochs,
        layer_costs=multiply_adds(layers, data.shape),
        metric_fn=accuracy,
        title=_title(data),
        trivial=("the most frequent class", _blind_accuracy(data)),
    )


def accuracy(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The share of right answers, 0 to 1, of logits [b, classes] and labels [b]."""
    return {"accuracy": (logits.argmax(1) == labels).double().mean()}


def _metrics(loss: float, means: dict[str, float]) -> dict[str, float]:
    return {"accuracy": 100 * means["accuracy"]}


def _files(name: str, options: BuildOptions) -> Path:
    """The data folder, which has images that can be read here."""
    if options.data is None:
        raise DataNotFound(f"{name} needs images, and there are none in the package; give {WHAT_WORKS}")
    if options.pretrained is not None:
        raise ValueError(f"{name} begins with random weights: it cannot read {options.pretrained}")
    if find_images(options.data).kind == "jpeg":
        library("PIL.Image", "reading JPEG images")
    return options.data


def _train_batches(
    chosen: ImagePreset, data: ImageData, batch_size: int, options: BuildOptions, epoch: int, start: int = 0
) -> SampleBatches:
    order = shuffled(len(data.train.labels), options.seed, epoch)
    # A last batch of a few images would be normalised by their statistics; the next epoch has other ones in it.
    order = order[: max(1, len(order) // batch_size) * batch_size]
    make = ImageBatch(
        data.train, data.mean, data.std, padding=chosen.padding, mirrored=chosen.mirror and data.mirrored
    )
    return SampleBatches(
        order,
        batch_size,
        make,
        seed=options.seed,
        epoch=epoch,
        start=start,
        workers=options.loader_workers,
    )


def _held_out(data: ImageData, split: ImageSet, batch_size: int, options: BuildOptions) -> SampleBatches:
    make = ImageBatch(split, data.mean, data.std)
    return SampleBatches(in_order(len(split.labels)), batch_size, make, workers=options.loader_workers)


def _blind_accuracy(data: ImageData) -> float:
    """Percent of the validation images that are of the class most frequent in training."""
    return 100 * float((data.valid.labels == data.train.labels.bincount().argmax()).double().mean())


def _title(data: ImageData) -> str:
    size = " x ".join(map(str, data.shape))
    return f"{len(data.classes)} classes of {size} images, {len(data.train.labels):,} to train on"
