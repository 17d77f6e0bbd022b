"""A BERT of transformers, split into two stages unchanged: which of two words comes first in a sentence?

avgpipe run --stages 2 examples/split_transformers.py, or python examples/split_transformers.py for both in one process.
"""

import torch
from transformers import BertConfig, BertForSequenceClassification

from avgpipe import Pipeline, Plan


def batch(size):  # words 5 and 6 among others, then padding
    words, length = torch.randint(7, 40, (size, 12)), torch.randint(6, 13, (size, 1))
    first, second = torch.rand(size, 5).topk(2).indices.sort(1).values.T + 1
    label = torch.randint(2, (size,))
    rows = torch.arange(size)
    words[rows, first], words[rows, second] = 5 + label, 6 - label
    mask = (torch.arange(12) < length).long()
    return {"input_ids": words * mask, "attention_mask": mask}, label


torch.manual_seed(0)  # every rank builds the same model and data
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=40, max_position_embeddings=12, **sizes))
data, (inputs, labels) = [batch(32) for _ in range(200)], batch(500)
plan = Plan(stages=2, pipelines=2, micro_batches=2)
loss_fn, optimizer = torch.nn.CrossEntropyLoss(), lambda p: torch.optim.AdamW(p, lr=2e-3)

with Pipeline(model, plan, loss_fn=loss_fn, optimizer=optimizer) as pipeline:
    for result in pipeline.train(data):
        if result.batch % 50 == 0 and pipeline.world.rank == 0:
            print(f"batch {result.batch}: loss {result.loss:.3f}")
    model.load_state_dict(pipeline.state_dict())  # on every rank

if pipeline.world.rank == 0:
    with torch.no_grad():
        print(
            f"accuracy of the plain model: {(model.eval()(**inputs).logits.argmax(1) == labels).float().mean():.1%}"
        )
