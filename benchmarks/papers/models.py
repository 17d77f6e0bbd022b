"""The models of the papers' evaluations, as numbers: what each layer computes, holds and sends, from published sizes.

Nothing is built: each number is a formula over the hyper-parameters of the model's paper. What a device makes of them
is in ``benchmarks.papers.cluster``, and ``python -m benchmarks.papers.forecast`` prints both.

Conventions: a multiply-add is two floating-point operations; matrix products count, element-wise work does not, and
looking up an embedding takes nothing; a backward takes twice what its forward does. Activations, gradients and weights
are float32. Token numbers, masks of whole rows and lengths, under 1 % of what travels, are left out; and so are weights
with some dropped, of which a micro-batch of an AWD-LSTM keeps one.

AvgPipe's own settings (Chen, Xu, Qian, Zhou, PPoPP 2023) are not published where they could be read, beyond the names
GNMT, BERT and AWD-LSTM; so batches and lengths are those of the models' own papers and codes, each named below.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

FLOAT_BYTES = 4
ADAM, MOMENTUM, AVERAGED_SGD, SGD = 8, 4, 4, 0  # bytes of optimizer state per parameter


class Product(NamedTuple):
    """A product of activations with each other or with weights, or one that is repeated step after step.

    Attributes:
        flops: Floating-point operations of a sample.
        read_bytes: Weights that are read for a micro-batch, however many samples it has; those of a recurrence at each
            of its steps.
    """

    flops: float
    read_bytes: float = 0.0


@dataclass(frozen=True)
class PaperLayer:
    """A layer, its numbers being of one sample.

    Attributes:
        name: In words.
        parameters: Trained weights, those that it shares with another layer included.
        products: Of its forward, one after the other.
        cut_bytes: What crosses a cut after this layer, in one direction; its gradient is as large.
        stored_bytes: What is kept from the forward to the backward, the output included and the input not.
        handed_bytes: Of ``stored_bytes``, the output that only later layers keep.
    """

    name: str
    parameters: int
    products: tuple[Product, ...]
    cut_bytes: float
    stored_bytes: float
    handed_bytes: float = 0.0

    @property
    def forward_flops(self) -> float:
        return sum(product.flops for product in self.products)


@dataclass(frozen=True)
class SharedWeights:
    """Parameters that several layers hold, by their numbers; the model has them once."""

    layers: tuple[int, ...]
    parameters: int


@dataclass(frozen=True)
class PaperModel:
    """A model at its published size.

    Attributes:
        name: Its name.
        source: The paper of its sizes, and where its batch and lengths are from.
        batch_size: Samples that make one update.
        lengths: Tokens of a sample in each of its sequences; () where there are none.
        epoch_samples: Of the data set.
        optimizer_bytes: Of the optimizer's state, per parameter.
        layers: In order.
        shared: Weights that several layers hold.
    """

    name: str
    source: str
    batch_size: int
    lengths: tuple[int, ...]
    epoch_samples: int
    optimizer_bytes: int
    layers: tuple[PaperLayer, ...]
    shared: tuple[SharedWeights, ...] = ()

    @property
    def parameters(self) -> int:
        twice = sum((len(tie.layers) - 1) * tie.parameters for tie in self.shared)
        return sum(layer.parameters for layer in self.layers) - twice

    @property
    def flops(self) -> float:
        """Forward and backward of a sample."""
        return sum(3 * layer.forward_flops for layer in self.layers)

    @property
    def stored_bytes(self) -> float:
        """What a sample holds between forward and backward, in all layers."""
        return sum(layer.stored_bytes for layer in self.layers)


# ---- parts of several models ---------------------------------------------------------------------------------------


def floats(count: float) -> float:
    """Bytes of so many numbers."""
    return FLOAT_BYTES * count


def lstm_parameters(inputs: int, hidden: int, biases: int = 2) -> int:
    """Weights of the four gates from input and state, with as many biases each (cuDNN and torch have two)."""
    return 4 * hidden * (inputs + hidden + biases)


def linear(steps: int, inputs: int, outputs: int) -> Product:
    """A product with weights, at all steps of a sample at once."""
    return Product(2.0 * steps * inputs * outputs, floats(inputs * outputs))


def lstm(steps: int, inputs: int, hidden: int) -> tuple[Product, Product]:
    """The gates from the inputs, at all steps at once, and from the state, at one step after the other."""
    state = linear(1, hidden, 4 * hidden)
    return linear(steps, inputs, 4 * hidden), Product(steps * state.flops, steps * state.read_bytes)


def lstm_bytes(steps: int, inputs: int, hidden: int) -> float:
    """Four gates, the cell and the state of each step; the input after dropout, and its mask of a byte each."""
    return steps * (floats(6 * hidden) + floats(inputs) + inputs)


def lstm_layer(
    name: str,
    steps: int,
    inputs: int,
    hidden: int,
    *,
    directions: int = 1,
    biases: int = 2,
    passed_bytes: float = 0.0,
) -> PaperLayer:
    """An LSTM over a sequence, or one in each direction, whose outputs are joined.

    passed_bytes: what an earlier layer made and this one only hands on.
    """
    output = floats(steps * directions * hidden)
    return PaperLayer(
        name,
        directions * lstm_parameters(inputs, hidden, biases),
        directions * lstm(steps, inputs, hidden),
        output + passed_bytes,
        directions * lstm_bytes(steps, inputs, hidden) + output,
        output,
    )


def logit_bytes(steps: int, vocabulary: int) -> float:
    """Logits and their log-softmax, as a cross entropy keeps them."""
    return floats(2 * steps * vocabulary)


def transformer_layer(name: str, length: int, hidden: int, heads: int) -> PaperLayer:
    """A layer of attention and a feed-forward network four times as wide.

    Parameters: 12 h^2 + 13 h. Operations: 24 s h^2 of the products with weights and 4 s^2 h of the attention
    (Narayanan et al. 2021, Megatron-LM, section 3.1). Stored: s h (16 numbers and 2 bytes of masks) + a s^2 (2
    numbers and 1 byte), which in float16 is the 34 s h + 5 a s^2 of Korthikanti et al. 2022, arXiv 2205.05198,
    equation 1.
    """
    s, h = length, hidden
    return PaperLayer(
        name,
        parameters=12 * h * h + 13 * h,
        products=(linear(s, h, 12 * h), Product(4.0 * s * s * h)),
        cut_bytes=floats(s * h),
        stored_bytes=floats(16 * s * h) + 2 * s * h + heads * s * s * (2 * FLOAT_BYTES + 1),
        handed_bytes=floats(s * h),
    )


# ---- the models ----------------------------------------------------------------------------------------------------


def gnmt(
    layers: int = 8,
    *,
    hidden: int = 1024,
    vocabulary: int = 32_320,
    lengths: tuple[int, int] = (25, 25),
    one_embedding: bool = False,
) -> PaperModel:
    """GNMT with so many LSTM layers, half of them on each side.

    Sizes: Wu et al. 2016, arXiv 1609.08144, section 3, as MLPerf trains it: H = 1024, 32,320 pieces of both languages
    together, the first encoder layer bidirectional, additive attention from the first decoder layer, whose context
    every later one reads. GNMT-8 and GNMT-16 are PipeDream's (Narayanan et al., SOSP 2019, section 5.1), where both
    sides have an embedding of their own, so that no gradient of 132 MB goes between them. With ``one_embedding`` they
    share it, as in MLPerf: 160,671,297 parameters with 8 layers.

    Batch: 128 sentence pairs, "often" Wu et al.'s (section 4.1), MLPerf's, and that of PipeDream's published profile of
    GNMT-16, which has 25 pieces on each side; PipeDream's workers train with 64. Data: WMT English to German, 5 M pairs
    (section 8.1). Adam.
    """
    H, (S, T), side = hidden, lengths, layers // 2
    embedding = vocabulary * H
    made = [
        PaperLayer("source embedding", embedding, (), *[floats(S * H)] * 3),
        lstm_layer("encoder LSTM 1", S, H, H, directions=2),
        lstm_layer("encoder LSTM 2", S, 2 * H, H),
        *(lstm_layer(f"encoder LSTM {n}", S, H, H) for n in range(3, side + 1)),
        _attention(embedding, S, T, H),
    ]
    for n in range(2, side + 1):
        context = floats(T * H) if n < side else 0.0
        made.append(lstm_layer(f"decoder LSTM {n}", T, 2 * H, H, passed_bytes=context))
    logits = logit_bytes(T, vocabulary)
    made.append(PaperLayer("output", vocabulary * (H + 1), (linear(T, H, vocabulary),), 0.0, logits))
    shared = (SharedWeights((0, side + 1), embedding),) if one_embedding else ()
    cited = "Wu et al. 2016, sections 3 and 4.1; vocabulary and lengths of PipeDream's profiles"
    return PaperModel(f"GNMT-{layers}", cited, 128, lengths, 5_000_000, ADAM, tuple(made), shared)


def _attention(embedding: int, S: int, T: int, H: int) -> PaperLayer:
    """Make GNMT's first decoder layer: target embedding, LSTM, and attention tanh(W q + U m + c) . v over the memory.

    Scores need the tanh of every pair of positions, [T, S, H], which is kept.
    """
    attention = 2 * H * H + 2 * H + 1  # W and U; v and c, and the length of v
    products = (linear(T, H, H), linear(S, H, H), Product(2.0 * 2 * T * S * H))
    output = floats(2 * T * H)  # what it says, and the context
    kept = floats(T * S * (H + 1))  # every tanh, and the softmax
    return PaperLayer(
        "decoder LSTM 1 with attention",
        embedding + lstm_parameters(H, H) + attention,
        lstm(T, H, H) + products,
        output,
        lstm_bytes(T, H, H) + kept + output,
        output,
    )


def bert(
    name: str = "BERT-large", layers: int = 24, *, hidden: int = 1024, heads: int = 16, length: int = 128
) -> PaperModel:
    """BERT, fine-tuned to classify sentence pairs.

    Sizes: Devlin, Chang, Lee, Toutanova, NAACL 2019, arXiv 1810.04805, section 3: BERT-large has L = 24, H = 1024,
    A = 16, 340 M parameters; BERT-base L = 12, H = 768, A = 12, 110 M. Vocabulary: the published uncased model's 30,522
    pieces. Batch: 32 (appendix A.3). Length: 128, of the code published with it for sentence pairs. Data: MRPC's 3,668
    pairs (Dolan, Brockett 2005). Adam.
    """
    s, h = length, hidden
    embedding = PaperLayer(
        "embedding",
        (30_522 + 512 + 2 + 2) * h,
        (),
        floats(s * h),
        floats(2 * s * h) + s * h,  # the norm's input, the output, its mask
        floats(s * h),
    )
    head = PaperLayer(
        "pooler and classifier", h * h + h + 2 * h + 2, (linear(1, h, h + 2),), 0.0, floats(3 * h)
    )
    encoder = (transformer_layer(f"layer {n}", s, h, heads) for n in range(1, layers + 1))
    return PaperModel(
        name, "Devlin et al. 2019, sections 3 and A.3", 32, (s,), 3_668, ADAM, (embedding, *encoder, head)
    )


def awd_lstm(data: str = "PTB", *, length: int = 70) -> PaperModel:
    """AWD-LSTM, a language model whose output layer is its embedding.

    Sizes: Merity, Keskar, Socher, ICLR 2018, arXiv 1708.02182, section 5: three layers of 1150, embeddings of 400 (so
    the third layer has 400), 70 tokens; 24 M parameters for PTB's 10,000 words and 33 M for WikiText-2's 33,278
    (tables 1 and 2). Batch: 40 for PTB, 80 for WikiText-2 (section 5). Data: 929,589 and 2,088,628 words. Averaged
    SGD.

    PipeDream's "AWD LM" has six layers and 0.41 GB of weights; its other sizes are not published where they could be
    read, and this is not it.
    """
    words, batch, tokens = {"PTB": (10_000, 40, 929_589), "WikiText-2": (33_278, 80, 2_088_628)}[data]
    E, H, T = 400, 1150, length
    sizes = enumerate(pairwise((E, H, H, E)), 1)
    made = [
        PaperLayer("embedding", words * E, (), *[floats(T * E)] * 3),
        *(lstm_layer(f"LSTM {n}", T, inputs, hidden) for n, (inputs, hidden) in sizes),
        PaperLayer("output", words * (E + 1), (linear(T, E, words),), 0.0, logit_bytes(T, words)),
    ]
    return PaperModel(
        f"AWD-LSTM {data}",
        "Merity et al. 2018, section 5",
        batch,
        (T,),
        tokens // T,
        AVERAGED_SGD,
        tuple(made),
        (SharedWeights((0, 4), words * E),),
    )


def vgg16(side: int = 224) -> PaperModel:
    """VGG-16, each convolution with its rectifier and with the pooling behind it.

    Sizes: Simonyan, Zisserman, ICLR 2015, arXiv 1409.1556, table 1, column D; 138 M parameters (table 2). Batch: 256,
    SGD with momentum (section 3.1); PipeDream's workers train with 64. Data: ImageNet's 1,281,167 images.
    """
    made = []
    channels = 3
    for block, widths in enumerate(((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3), 1):
        for n, width in enumerate(widths, 1):
            pixels = side * side
            kept, output, handed = pixels * width, pixels * width, 0  # which the rectifier keeps
            if n == len(widths):
                side //= 2
                output = handed = side * side * width
                kept += output
            made.append(
                PaperLayer(
                    f"convolution{block}_{n}",
                    (9 * channels + 1) * width,
                    (linear(pixels, 9 * channels, width),),
                    floats(output),
                    floats(kept),
                    floats(handed),
                )
            )
            channels = width
    sizes = (side * side * channels, 4096, 4096, 1000)
    for n, (inputs, outputs) in enumerate(pairwise(sizes), 1):
        cut = floats(outputs) if n < 3 else 0.0
        made.append(
            PaperLayer(
                f"dense{n}", (inputs + 1) * outputs, (linear(1, inputs, outputs),), cut, floats(outputs)
            )
        )
    source = "Simonyan and Zisserman 2015, tables 1 and 2, section 3.1"
    return PaperModel("VGG-16", source, 256, (), 1_281_167, MOMENTUM, tuple(made))


def gpt(
    name: str, layers: int, hidden: int, heads: int, *, length: int = 1024, batch_size: int = 512
) -> PaperModel:
    """A decoder of GPT-2's kind; the output layer is the embedding.

    Sizes: Radford, Wu, Child, Luan, Amodei, Sutskever 2019, section 2.3: 50,257 pieces, 1,024 positions, batches of
    512; its largest has 48 layers of 1600, 1,542 M parameters (table 2). PipeDream-2BW (Narayanan et al., ICML 2021)
    trains one of 2.2 B parameters, whose layers are not published where they could be read: 48 of 1920 make that
    number. Data: WikiText-103's 103,227,021 words, for want of a published WebText. Adam.
    """
    s, h, words = length, hidden, 50_257
    embedding = PaperLayer(
        "embedding", (words + s) * h, (), floats(s * h), floats(s * h) + s * h, floats(s * h)
    )
    kept = floats(s * h) + logit_bytes(s, words)  # of the norm, and of the loss
    output = PaperLayer("output", (words + 2) * h, (linear(s, h, words),), 0.0, kept)
    decoder = (transformer_layer(f"layer {n}", s, h, heads) for n in range(1, layers + 1))
    return PaperModel(
        name,
        "Radford et al. 2019, section 2.3 and table 2",
        batch_size,
        (s,),
        103_227_021 // s,
        ADAM,
        (embedding, *decoder, output),
        (SharedWeights((0, layers + 1), words * h),),
    )


def s2vt(frames: int = 60, caption: int = 20) -> PaperModel:
    """S2VT, which describes clips: two LSTMs over the frames and then over the words.

    Sizes: Venugopalan et al., ICCV 2015, arXiv 1505.00487, sections 3.3 and 4.2: 4,096 features of a frame,
    embeddings of 500, LSTMs of 1000, 80 steps; how many of them are frames is this file's choice. 12,594 words and
    batches of 32: of the authors' configuration. Data: MSVD's 48,000 pairs of clip and sentence. SGD.
    """
    D, E, H, words, steps = 4096, 500, 1000, 12_594, frames + caption
    x, said = floats(steps * E), floats(caption * H)
    made = (
        PaperLayer("frame embedding", (D + 1) * E, (linear(frames, D, E),), x, x, x),
        lstm_layer("video LSTM", steps, E, H, biases=1),
        PaperLayer(
            "word LSTM",
            words * E + lstm_parameters(H + E, H, 1),
            lstm(steps, H + E, H),
            said,
            lstm_bytes(steps, H + E, H) + said,
            said,
        ),
        PaperLayer("output", words * (H + 1), (linear(caption, H, words),), 0.0, logit_bytes(caption, words)),
    )
    source = "Venugopalan et al. 2015, sections 3.3 and 4.2"
    return PaperModel("S2VT", source, 32, (frames, caption), 48_000, SGD, made)


MODELS = {
    "gnmt": gnmt(8),
    "bert": bert(),
    "awd-lstm": awd_lstm("PTB"),
    "awd-lstm-wikitext": awd_lstm("WikiText-2"),
    "gnmt-16": gnmt(16),
    "vgg": vgg16(),
    "captioning": s2vt(),
    "gpt-2": gpt("GPT-2", 48, 1600, 25),
    "gpt-2.2b": gpt("GPT of 2.2 B", 48, 1920, 20),
}
"""By name: AvgPipe's three, then those of PipeDream's and PipeDream-2BW's headlines."""
