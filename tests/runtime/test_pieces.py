"""Pieces of models that call their blocks themselves, against the models."""

import copy
from collections import UserDict
from itertools import pairwise

import pytest
import torch
from torch import nn

from avgpipe.model.blocks import Call
from avgpipe.model.context import Position
from avgpipe.model.pieces import BlockChain
from avgpipe.runtime.stage import Stage

D = 4


class Block(nn.Module):
    kind = "plain"

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x, mask=None, *, shift=0.0):
        x = torch.tanh(self.linear(x)) + shift
        return x if mask is None else x * mask


class Looped(nn.Module):
    """Embeds words, calls blocks with a mask and something learnt between them, and has a head tied to the words."""

    def __init__(self, blocks=3):
        super().__init__()
        self.words = nn.Embedding(10, D)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(D))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, 10, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids, mask=None):
        x = self.words(ids) * 3
        weights = None if mask is None else mask.to(x.dtype)[..., None].cumsum(1)
        for block in self.blocks:
            x = block(x, weights, shift=x.mean(-1, keepdim=True)) * self.scale
            assert block.kind == "plain"
        return self.head(self.norm(x))


def is_block(module):
    return isinstance(module, Block)


def call_of(*, trials=None, accepts=("ids", "mask"), block=is_block):
    ids = torch.randint(1, 10, (2, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    if trials is None:
        trials = [{"ids": ids, "mask": mask}, {"ids": ids[:1, :3]}]
    return Call(trials, "ids", frozenset(accepts), block)


def run(chain, bounds, value):
    for begin, end in pairwise(bounds):
        for piece in chain.stage(begin, end):
            value = piece(value)
    return value


def made(model, **options):
    torch.manual_seed(0)
    return BlockChain(model().double(), call_of(**options))


def split(model, bounds, **options):
    chain = made(model, **options)
    chain.prove(bounds)
    return chain


CUTS = [[0, 5], [0, 1, 5], [0, 2, 5], [0, 4, 5], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("bounds", CUTS)
def test_any_cut_computes_what_the_model_does(bounds):
    chain = split(Looped, bounds)
    torch.manual_seed(0)
    model = Looped().double()
    ids = torch.randint(1, 10, (3, 7))
    for given in ({"ids": ids}, {"ids": ids, "mask": (ids > 4).long()}, ids):
        expected = model(**given) if isinstance(given, dict) else model(given)
        assert torch.equal(run(chain, bounds, given), expected)


def test_what_travels_is_what_no_stage_can_make_itself():
    chain = made(Looped)
    ids = torch.ones(2, 5, dtype=torch.int64)
    hidden, shift, inputs = chain[0]({"ids": ids, "mask": ids})
    assert hidden.shape == (2, 5, D)
    assert shift.shape == (2, 5, 1)
    assert inputs["ids"] == ("int64", 2, 5)  # its words are embedded
    assert inputs["mask"] is ids  # every block's weights are made of it
    last = run(chain, [0, 1, 2, 3, 4], {"ids": ids, "mask": ids})
    assert last[1] == {"ids": ("int64", 2, 5), "mask": ("int64", 2, 5)}


def test_each_piece_holds_its_own_parameters():
    chain = made(Looped)
    names = [[name.split("blocks.")[-1] for name, _ in piece.named_parameters()] for piece in chain]
    assert [len(of) for of in names] == [1, 3, 3, 2, 4]  # what follows the last block belongs to the head
    assert [piece.calls for piece in chain] == ["words", "blocks.0", "blocks.1", "blocks.2", "norm"]


def test_a_model_is_left_as_it_was():
    model = Looped()
    model.norm.eval()
    before = copy.deepcopy(model)
    chain = BlockChain(model, call_of())
    chain.prove([0, 2, 5])
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in before.named_parameters()]


def test_dropout_is_that_of_the_layer_however_many_a_piece_runs():
    class Dropping(Looped):
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.linear = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5))
            self.norm = nn.Sequential(nn.LayerNorm(D), nn.Dropout(0.5))

    chain, ids = made(Dropping), torch.ones(2, 5, dtype=torch.int64)
    outputs = []
    for bounds in CUTS:
        value = ids
        for k, (begin, end) in enumerate(pairwise(bounds)):
            stage = Stage(chain.stage(begin, end), begin, k, 7, torch.device("cpu"))
            value = stage(value, Position(0, 3, 1))
        outputs.append(value)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_a_parameter_that_blocks_are_given_is_held_where_it_is_used():
    class Given(Looped):
        def forward(self, ids, mask=None):
            x = self.words(ids)
            for block in self.blocks:
                x = block(x, self.scale)
            return self.head(x)

    chain = split(Given, [0, 2, 5])
    assert [any(p.shape == (D,) for n, p in piece.named_parameters() if "scale" in n) for piece in chain] == [
        False,
        True,
        True,
        True,
        False,
    ]


def test_a_parameter_that_begins_as_zero_is_no_value_that_is_known():
    class Gated(Looped):
        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(D))

        def forward(self, ids, mask=None):
            x = self.words(ids).to(self.gate.dtype)
            for block in self.blocks:
                x = block(x, shift=self.gate * 2)
            return self.head(x)

    for bounds in CUTS:
        split(Gated, bounds)


def test_a_forward_may_ask_for_the_dtype_of_its_parameters():
    class Asks(Looped):
        def forward(self, ids, mask=None):
            x = self.words(ids).to(next(self.parameters()).dtype)
            for block in self.blocks:
                x = block(x) * self.scale
            return self.head(x)

    for bounds in CUTS:
        split(Asks, bounds)


def test_something_of_the_first_block_may_go_on_to_all_others():
    class Biased(Block):
        def __init__(self):
            super().__init__()
            self.own = nn.Linear(D, 1)

        def forward(self, x, bias=None):
            bias = self.own(x) if bias is None else bias
            return super().forward(x, shift=bias), bias

    class Model(Looped):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Biased() for _ in range(3))

        def forward(self, ids, mask=None):
            x, bias = self.words(ids), None
            for block in self.blocks:
                x, bias = block(x, bias)
            return self.head(x)

    for bounds in CUTS:
        chain = split(Model, bounds)
    takes = [piece.values.takes for piece in chain]
    assert [len(of) - 1 for of in takes] == [0, 1, 2, 2, 1]
    assert "2.1.0" in takes[2]
    assert "2.1.0" in takes[3]  # the third block is given it once more


def test_what_is_made_at_the_beginning_for_later_blocks_goes_to_them():
    class Prepared(Looped):
        def __init__(self):
            super().__init__()
            self.of_each = nn.Embedding(10, 3)

        def forward(self, ids, mask=None):
            x, shifts = self.words(ids), self.of_each(ids)
            for n, block in enumerate(self.blocks):
                x = block(x, shift=shifts[..., n : n + 1] if n != 1 else 0.0)
            return self.head(x)

    for bounds in CUTS:
        chain = split(Prepared, bounds)
    # The third block's shift passes the second; the first block's own is given to no other one.
    assert [piece.values.takes[:-1] for piece in chain] == [
        (),
        ("1.0.0", "1.shift.0", "3.shift.0"),
        ("2.0.0", "3.shift.0"),
        ("3.0.0", "3.shift.0"),
        ("4.returned.0",),
    ]
    assert [len(list(piece.parameters())) for piece in chain] == [2, 2, 2, 2, 1]


def test_a_model_may_write_to_what_its_modules_return():
    class Writes(Looped):
        def forward(self, ids, mask=None):
            x, hidden = self.words(ids), self.words(ids.flip(0))
            x *= 2
            for block in self.blocks:
                x = block(x, shift=hidden)
            x[..., 0] += 1
            return self.head(x)

    for bounds in CUTS:
        split(Writes, bounds)


@pytest.mark.parametrize("container", [dict, UserDict])
def test_what_blocks_leave_in_a_mapping_goes_to_the_blocks_that_are_given_it(container):
    class Shares(Block):
        def forward(self, x, kept):
            if "pair" not in kept:
                kept["pair"] = self.linear(x), x + 1
            return super().forward(x) * kept["pair"][0] + kept["pair"][1]

    class Model(Looped):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Shares() for _ in range(3))

        def forward(self, ids, mask=None):
            x, kept = self.words(ids), container()
            for block in self.blocks:
                x = block(x, kept)
            return self.head(x)

    for bounds in CUTS:
        chain = split(Model, bounds)
    values = ("2.1.pair.0", "2.1.pair.1")
    assert [{*piece.values.takes[:-1]} for piece in chain] == [
        set(),
        {"1.0.0"},
        {"2.0.0", *values},
        {"3.0.0", *values},
        {"4.returned.0"},
    ]


def test_two_stacks_one_after_the_other():
    class Both(Looped):
        def __init__(self):
            super().__init__()
            self.others = nn.ModuleList(Block() for _ in range(2))

        def forward(self, ids, mask=None):
            memory = self.words(ids)
            for block in self.blocks:
                memory = block(memory)
            memory = self.norm(memory)
            x = self.words(ids.flip(0))
            for block in self.others:
                x = block(x, memory)
            return self.head(x)

    for bounds in ([0, 2, 7], [0, 4, 7], [0, 5, 7], [0, 1, 2, 3, 4, 5, 6, 7]):
        chain = split(Both, bounds)
    # The fourth block is called with both; what follows the third needs the words, which nobody needs before.
    assert [len(piece.values.takes) - 1 for piece in chain] == [0, 1, 1, 1, 2, 2, 1]
    assert [len(list(piece.parameters())) for piece in chain] == [1, 2, 2, 5, 2, 2, 1]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0], r"calls the block blocks\.1 never"),
        ([0, 1, 2, 0], r"calls the block blocks\.0 more than once"),
    ],
)
def test_blocks_that_are_no_chain_are_refused(order, message):
    class Model(Looped):
        def forward(self, ids):
            x = self.words(ids)
            for n in order:
                x = self.blocks[n](x)
            return self.head(x)

    with pytest.raises(ValueError, match=message):
        made(Model, trials=[{"ids": torch.ones(2, 3, dtype=torch.int64)}])


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="has no list of blocks"):
        made(Looped, block=lambda module: False)


def test_what_skips_blocks_without_their_knowledge_is_refused():
    class Skips(Looped):
        def forward(self, ids, mask=None):
            first = x = self.words(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x + first)

    chain = made(Skips)
    chain.prove([0, 5])
    with pytest.raises(ValueError, match=r"Skips is not the same when it is cut at blocks\.1: .* differs by"):
        chain.prove([0, 2, 5])


def test_a_model_whose_stages_fail_is_refused():
    class Leaves(Block):
        """Leaves something for others where nobody sees it."""

        def forward(self, x, others):
            first = others[0]
            first.kept = x if first is self else first.kept
            return super().forward(x) + first.kept.detach() * 0

    class Model(Looped):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Leaves() for _ in range(3))

        def forward(self, ids, mask=None):
            x = self.words(ids)
            for block in self.blocks:
                x = block(x, list(self.blocks))
            return self.head(x)

    with pytest.raises(ValueError, match=r"Model does not run when it is cut at blocks\.1: .*size of tensor"):
        made(Model).prove([0, 2, 5])


def test_wrong_gradients_alone_are_refused_too():
    class Detached(Looped):
        def forward(self, ids, mask=None):
            x = self.words(ids)
            learnt = x.mean() - x.mean().detach()
            for block in self.blocks:
                x = block(x)
            return self.head(x + learnt)

    with pytest.raises(ValueError, match=r"gradient of words\.weight differs"):
        made(Detached).prove([0, 2, 5])


def test_a_block_that_is_left_out_in_training_says_so():
    class Dropped(Looped):
        def forward(self, ids, mask=None):
            x = self.words(ids)
            for n, block in enumerate(self.blocks):
                if n != 1 or not self.training:
                    x = block(x)
            return self.head(x)

    chain = made(Dropped)
    with pytest.raises(RuntimeError, match=r"has not called the block blocks\.1, at which a stage ends"):
        run(chain, [0, 2, 5], torch.ones(2, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"ids": torch.ones(2, 2), "masc": 1}, ValueError, "takes ids, mask; the inputs have unknown 'masc'"),
        ({"ids": None}, ValueError, "the inputs have nothing"),
        ([torch.ones(2, 2)], TypeError, "a tensor of ids or a plain dict, not list"),
    ],
)
def test_wrong_inputs(given, error, message):
    with pytest.raises(error, match=message):
        made(Looped)[0](given)
