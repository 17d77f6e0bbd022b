"""A small model and data for a comparison; what workers import."""

import json

import torch
from torch import nn

from avgpipe import Pipeline

SAMPLES, FEATURES = 8, 6


def make_model():
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, SAMPLES, FEATURES, generator=generator)
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def make_loader(epoch):
    return data(12, epoch)


def sgd(params):
    return torch.optim.SGD(params, lr=0.05)


def held_out_loss(pipeline: Pipeline):
    return pipeline.evaluate(data(4, 99)).loss


def broken(params):
    raise ValueError("no such optimizer")


def add_line(path, system, row):
    with open(path, "a") as file:
        file.write(json.dumps([system, row]) + "\n")
