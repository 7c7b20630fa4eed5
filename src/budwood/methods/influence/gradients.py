"""Per-example gradients of linear layers as rows: what TracIn, DataInf and TRAK are made of.

Shapes: B examples of a batch, P numbers of one parameter, Q queries, N training rows, K projected numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from budwood.capture.coverage import Coverage
from budwood.capture.gradients import Question, cover, per_example_grads
from budwood.capture.uses import kind_of
from budwood.data.batch import Features, budget_batches, seed_of
from budwood.data.task import Row
from budwood.errors import ModelError
from budwood.methods.influence.precondition import measurement
from budwood.models.mode import in_mode
from budwood.models.objective import Objective
from budwood.models.reading import Reading
from budwood.params.tree import named

TOKENS = 4096
NUMBERS = 1 << 26  # most numbers of per-example gradients held at once


@dataclass(frozen=True)
class Pairing:
    """Both sides of a score matrix as one model reads them. A row with several features is the sum of them."""

    read: Reading
    train_rows: Sequence[Row]
    query_rows: Sequence[Row]
    measurement: str = "margin"
    seed: int = 0
    among: frozenset[str] | None = None  # parameters that count; None: all of linear layers
    left_out: frozenset[str] = frozenset()  # training rows that count for nothing

    @cached_property
    def train(self) -> Features:
        """Encoded training rows, without those left out: their scores are 0."""
        return self.read.encode([r for r in self.train_rows if r.id not in self.left_out])

    @cached_property
    def queries(self) -> Features:
        """Encoded queries."""
        return self.read.encode(self.query_rows)

    @cached_property
    def coverage(self) -> Coverage:
        """Parameters of linear layers, and how their gradients are had."""
        model = self.read.loaded.model
        few = self.read.feed(self.train)(np.arange(min(3, len(self.train))), 0)
        names = tuple(n for n in linear_names(model) if self.among is None or n in self.among)
        if not names:
            asked = "" if self.among is None else " among --modules"
            raise ModelError(
                f"'{self.read.loaded.ref.text}' has no linear layer{asked}, so gradient baselines have nothing to "
                "compare. Use --strategy bm25, tfidf or representation."
            )
        return cover(model, self.read.objective, few, names)

    @property
    def query_question(self) -> Question:
        """What is differentiated of a query: a value that falls when the query is answered better."""
        return measurement(self.read.objective, self.measurement)


def linear_names(model: nn.Module) -> tuple[str, ...]:
    """Canonical names of weights and biases of linear layers; a matrix that is also an embedding is left out."""
    by_id = {id(p): n for n, p in named(model).items()}
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    found = [
        by_id[id(p)]
        for m in model.modules()
        if kind_of(m) in ("linear", "conv1d")
        for p in m.parameters(recurse=False)
        if id(p) not in looked_up
    ]
    return tuple(dict.fromkeys(found))


def gradient_rows(
    pairing: Pairing, features: Features, question: Question
) -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
    """(features, grad_BP of each parameter) batch by batch, of one length each and never more than fits."""
    model, feed = pairing.read.loaded.model, pairing.read.feed(features)
    parameters = named(model)
    size = sum(parameters[n].numel() for n in pairing.coverage.names)
    most = max(1, NUMBERS // max(1, size))
    for index in budget_batches(features.lengths_N, TOKENS, most):
        grads = per_example_grads(model, pairing.read.objective, feed(index, 0), question, pairing.coverage)
        yield index, {n: g.flatten(1) for n, g in grads.items()}


def losses(read: Reading, features: Features) -> np.ndarray:
    """loss_N of every feature."""
    model, objective, feed = read.loaded.model, read.objective, read.feed(features)
    out = np.zeros(len(features), np.float64)
    with torch.no_grad(), in_mode(model, training=False):
        for index in budget_batches(features.lengths_N, TOKENS):
            batch = feed(index, 0)
            out[index] = objective.loss(objective.logits(model, batch), objective.targets(batch)).double().cpu().numpy()
    return out


def query_blocks(pairing: Pairing) -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
    """(features, grad_QP of each parameter): queries in blocks whose gradients fit into memory together."""
    parameters = named(pairing.read.loaded.model)
    size = sum(parameters[n].numel() for n in pairing.coverage.names)
    most = max(1, 4 * NUMBERS // max(1, size))
    for first in range(0, len(pairing.queries), most):
        own = np.arange(first, min(first + most, len(pairing.queries)))
        block = {
            n: torch.zeros(len(own), parameters[n].numel(), dtype=parameters[n].dtype) for n in pairing.coverage.names
        }
        for index, grads in gradient_rows(pairing, pairing.queries.take(own), pairing.query_question):
            for n, g in grads.items():
                block[n][index] = g.to(block[n])
        yield own, block


def by_row(value_QN: np.ndarray, pairing: Pairing) -> np.ndarray:
    """Scores of features summed to scores of rows, in the order of the rows."""
    for axis, features, rows in ((0, pairing.queries, pairing.query_rows), (1, pairing.train, pairing.train_rows)):
        place = {r.id: i for i, r in enumerate(rows)}
        at = np.array([place[i] for i in features.ids])
        if len(at) != len(rows) or (at != np.arange(len(rows))).any():
            shape = (len(rows), value_QN.shape[1]) if axis == 0 else (value_QN.shape[0], len(rows))
            total = np.zeros(shape, value_QN.dtype)
            np.add.at(total if axis == 0 else total.T, at, value_QN if axis == 0 else value_QN.T)
            value_QN = total
    return value_QN


def dot_scores(pairing: Pairing) -> np.ndarray:
    """<gradient of a query's value, gradient of a training loss> for all pairs of features [Q, N]."""
    out = np.zeros((len(pairing.queries), len(pairing.train)), np.float32)
    for own, block in query_blocks(pairing):
        for index, grads in gradient_rows(pairing, pairing.train, Question(pairing.read.objective.loss)):
            out[np.ix_(own, index)] = sum(block[n] @ g.T for n, g in grads.items()).numpy()
    return out


def datainf_scores(pairing: Pairing) -> np.ndarray:
    """DataInf: the mean over rows of each row's own damped rank-one inverse, parameter by parameter [Q, N].

    score = sum_p (v_p - r_p) . g_p / d_p with r_p = mean_n (v_p . g_np) / (d_p + |g_np|^2) g_np and damping d_p a tenth
    of the mean squared gradient: the swap of mean and inverse that gives the method its closed form.
    """
    question = Question(pairing.read.objective.loss)
    names = pairing.coverage.names
    square = dict.fromkeys(names, 0.0)
    for _, grads in gradient_rows(pairing, pairing.train, question):
        for n, g in grads.items():
            square[n] += float(g.double().square().sum())
    count = len(pairing.train)
    parameters = named(pairing.read.loaded.model)
    damping = {n: 0.1 * s / count / parameters[n].numel() for n, s in square.items()}
    # a gradient that is zero but for rounding (the bias of attention keys) would be divided by its own noise
    noise = (100 * torch.finfo(next(iter(parameters.values())).dtype).eps) ** 2 * max(damping.values())
    live = [n for n in names if damping[n] > noise]
    out = np.zeros((len(pairing.queries), count), np.float32)
    for own, block in query_blocks(pairing):
        rest = {n: torch.zeros_like(block[n]) for n in live}
        for _, grads in gradient_rows(pairing, pairing.train, question):
            for n in live:
                weight_B = 1 / (count * (damping[n] + grads[n].square().sum(1)))
                rest[n].addmm_((block[n] @ grads[n].T) * weight_B, grads[n])
        solved = {n: (block[n] - rest[n]) / damping[n] for n in live}
        for index, grads in gradient_rows(pairing, pairing.train, question):
            out[np.ix_(own, index)] = sum(solved[n] @ grads[n].T for n in live).numpy()
    return out


def projected(pairing: Pairing, features: Features, question: Question, size: int) -> Tensor:
    """Gradients of features projected to `size` numbers [., K]: signs and buckets of every weight drawn once.

    A sparse Johnson-Lindenstrauss map: inner products keep their expectation, and it costs one addition per weight.
    """
    parameters = named(pairing.read.loaded.model)
    draw = {}
    for n in pairing.coverage.names:
        generator = torch.Generator().manual_seed(seed_of(pairing.seed, "projection", n))
        count = parameters[n].numel()
        bucket_P = torch.randint(size, (count,), generator=generator)
        draw[n] = bucket_P, torch.randint(2, (count,), generator=generator).float() * 2 - 1
    out = torch.zeros(len(features), size)
    for index, grads in gradient_rows(pairing, features, question):
        part = torch.zeros(len(index), size)
        for n, g in grads.items():
            bucket_P, sign_P = draw[n]
            part.index_add_(1, bucket_P, g.float() * sign_P)
        out[index] = part
    return out


def trak_scores(pairing: Pairing, size: int) -> np.ndarray:
    """TRAK of one checkpoint [Q, N]: phi_q (Phi^T Phi + eps)^-1 phi_n (1 - p_n).

    phi_n: projected gradients of the margin of training rows, phi_q: of what is measured of the queries.
    """
    objective: Objective = pairing.read.objective
    phi_NK = projected(pairing, pairing.train, Question(objective.margin), size).double()
    phi_QK = -projected(pairing, pairing.queries, pairing.query_question, size).double()
    weight_N = 1 - torch.exp(-torch.from_numpy(losses(pairing.read, pairing.train)))
    # a projection wider than the data has no inverse: a thousandth of the mean eigenvalue stands in for what is missing
    ridge = float(1e-3 * phi_NK.square().sum() / size) or 1e-30
    if size <= len(phi_NK):
        solved_KN = torch.linalg.solve(phi_NK.T @ phi_NK + ridge * torch.eye(size).double(), phi_NK.T)
    else:  # (X'X + e)^-1 X' = X' (XX' + e)^-1: the smaller of the two systems
        solved_KN = torch.linalg.solve(phi_NK @ phi_NK.T + ridge * torch.eye(len(phi_NK)).double(), phi_NK).T
    return (phi_QK @ solved_KN * weight_N).float().numpy()
