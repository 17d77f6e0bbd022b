"""VGG-16 as a profile, from its published layers (Simonyan and Zisserman 2015, table 1, column D)."""

from __future__ import annotations

from avgpipe.profiling.profile import LayerProfile, LinkProfile, Profile

WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
DENSE = ((25088, 4096), (4096, 4096), (4096, 1000))
FLOP_PER_S, EFFICIENCY, SAMPLES = 15.7e12, 0.7, 64  # a V100 in float32, and PipeDream's micro-batch
TEN_GBIT = LinkProfile(0.0, 1.25e9)
FLOAT = 4


def vgg16() -> Profile:
    """Each convolution with its rectifier, and with the pooling behind it; backward is two forwards."""
    layers = []
    size, channels = 224, 3
    for block, widths in enumerate(WIDTHS, 1):
        for n, width in enumerate(widths, 1):
            macs = size * size * 9 * channels * width
            pooled = n == len(widths)
            side = size // 2 if pooled else size
            kept = size * size * width + (side * side * width if pooled else 0)
            parameters = (9 * channels + 1) * width
            layers.append(_layer(f"convolution{block}_{n}", macs, parameters, kept, side * side * width))
            channels = width
        size //= 2
    for n, (inputs, outputs) in enumerate(DENSE, 1):
        layers.append(_layer(f"dense{n}", inputs * outputs, (inputs + 1) * outputs, outputs, outputs))
    return Profile("VGG-16", "V100, computed", (SAMPLES,), tuple(layers), link=TEN_GBIT)


def _layer(name: str, macs: int, parameters: int, kept: int, output: int) -> LayerProfile:
    forward_s = 2 * macs * SAMPLES / (FLOP_PER_S * EFFICIENCY)
    return LayerProfile(
        name,
        (forward_s,),
        (2 * forward_s,),
        (forward_s,),
        (float(FLOAT * kept * SAMPLES),),
        (float(FLOAT * output * SAMPLES),),
        float(FLOAT * parameters),
        float(FLOAT * parameters),  # momentum
    )
