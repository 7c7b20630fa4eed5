"""A small reader without a transformer: attention between question and context over recurrent states, from nothing.

Word pieces are embedded with fresh vectors; one bidirectional LSTM reads question and context, attention goes both ways
between them, two more LSTMs read the context again for start and end. "No answer" is the first place of the context.
Shapes: B windows, C places of the context, Q of the question, D = 2 x WIDTH, M tokens where an answer may lie.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from budwood.capture.features import kept_counts
from budwood.config.probe import ProbeConfig
from budwood.data.batch import Features, seed_of, training_batches
from budwood.methods.probe import score, spans
from budwood.methods.probe.side import Side
from budwood.methods.session import Session
from budwood.store.files import writing
from budwood.train.step import Rule, clip, initial_state, update

WIDTH, BATCH, RATE, DROPOUT, LIMIT = 32, 32, 2e-3, 0.2, 5.0


class Reader(nn.Module):
    """scores_B2C of every place of a context, for start and for end."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(pieces, 2 * WIDTH)
        self.read = nn.LSTM(2 * WIDTH, WIDTH, bidirectional=True, batch_first=True)
        self.similar = nn.Parameter(torch.randn(3, 2 * WIDTH) * WIDTH**-0.5)
        self.model = nn.LSTM(8 * WIDTH, WIDTH, bidirectional=True, batch_first=True)
        self.again = nn.LSTM(2 * WIDTH, WIDTH, bidirectional=True, batch_first=True)
        self.start, self.end = nn.Linear(10 * WIDTH, 1), nn.Linear(10 * WIDTH, 1)

    def forward(self, context: list[Tensor], question: list[Tensor], draw: torch.Generator | None = None) -> Tensor:
        """Ids of every window's context (null place first) and question; with `draw`, dropout as in training."""
        size_B, asked_B = (torch.tensor([len(x) for x in part]) for part in (context, question))
        c_BCD, q_BQD = (
            _through(self.read, _dropped(self.embed(pad_sequence(part, batch_first=True)), draw), size)
            for part, size in ((context, size_B), (question, asked_B))
        )
        joint = attended(c_BCD, q_BQD, self.similar, size_B, asked_B)
        m_BCD = _through(self.model, _dropped(joint, draw), size_B)
        e_BCD = _through(self.again, m_BCD, size_B)
        both = [self.start(torch.cat([joint, m_BCD], 2)), self.end(torch.cat([joint, e_BCD], 2))]
        outside_BC = torch.arange(c_BCD.shape[1]) >= size_B[:, None]
        return torch.cat(both, 2).transpose(1, 2).masked_fill(outside_BC[:, None], -torch.inf)


def attended(c_BCD: Tensor, q_BQD: Tensor, similar_3D: Tensor, size_B: Tensor, asked_B: Tensor) -> Tensor:
    """Each place of the context, what it attends to in the question, their product, and its product with the context's
    summary by the question: [B, C, 4 D].
    """
    own_BC, asked_BQ = c_BCD @ similar_3D[0], q_BQD @ similar_3D[1]
    like_BCQ = own_BC[:, :, None] + asked_BQ[:, None] + (c_BCD * similar_3D[2]) @ q_BQD.transpose(1, 2)
    no_question = torch.arange(q_BQD.shape[1]) >= asked_B[:, None]
    no_context = torch.arange(c_BCD.shape[1]) >= size_B[:, None]
    like_BCQ = like_BCQ.masked_fill(no_question[:, None], -torch.inf)
    told_BCD = like_BCQ.softmax(2) @ q_BQD
    peak_BC = like_BCQ.amax(2).masked_fill(no_context, -torch.inf)
    summary_B1D = peak_BC.softmax(1)[:, None] @ c_BCD
    return torch.cat([c_BCD, told_BCD, c_BCD * told_BCD, c_BCD * summary_B1D], 2)


def _through(lstm: nn.LSTM, x_BTD: Tensor, size_B: Tensor) -> Tensor:
    """States of an LSTM that never reads padding."""
    packed = pack_padded_sequence(x_BTD, size_B, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=x_BTD.shape[1])[0]


def _dropped(x: Tensor, draw: torch.Generator | None) -> Tensor:
    if draw is None:
        return x
    return x * (torch.rand(x.shape, generator=draw) >= DROPOUT) / (1 - DROPOUT)


def parts(encoded: Features, index_B: np.ndarray) -> tuple[list[Tensor], list[Tensor]]:
    """Ids of the context (null place first) and of the question, its closing marks included, of some windows."""
    context, question = [], []
    for n in index_B:
        ids, allowed = encoded.piece("input_ids", n).astype(np.int64), encoded.piece("allowed", n) != 0
        last = int(np.flatnonzero(allowed).max())
        context.append(torch.from_numpy(ids[allowed]))
        question.append(torch.from_numpy(ids[: last + 1][~allowed[: last + 1]]))
    return context, question


def trained(
    encoded: Features, pieces: int, epochs: int, seed: int, path: Path, told: Callable[[str], None] = lambda note: None
) -> Reader:
    """A reader after some epochs over the windows; `path` keeps what it takes to carry on after each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "bidaf") % 2**32)
        reader = Reader(pieces)
    rule, params = Rule(), dict(reader.named_parameters())
    state = initial_state(rule, {k: v.detach() for k, v in params.items()})
    done = step = 0
    if path.exists():
        kept = load_file(path)
        done, step = int(kept.pop("done")), int(kept.pop("step"))
        reader.load_state_dict({k.removeprefix("now/"): v for k, v in kept.items() if k.startswith("now/")})
        state = {k: kept[f"state/{k}"].clone() for k in state}
    size_W = kept_counts(encoded, "allowed")
    answer_2W = torch.from_numpy(spans.gold(encoded) - (np.cumsum(size_W) - size_W))
    for epoch in range(done, epochs):
        draw = torch.Generator().manual_seed(seed_of(seed, "bidaf", epoch))
        total = 0.0
        for index in training_batches(encoded.lengths_N, BATCH, seed, epoch):
            log_B2C = reader(*parts(encoded, index), draw).log_softmax(2)
            loss = -log_B2C.gather(2, answer_2W[:, torch.from_numpy(index)].T[:, :, None]).mean()
            grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()))))
            clip(grads, LIMIT)
            step += 1
            update(rule, params, grads, state, RATE, step)
            total += float(loss.detach()) * len(index)
        tensors = {f"now/{k}": v.detach() for k, v in params.items()} | {f"state/{k}": v for k, v in state.items()}
        with writing(path) as part:
            save_file({**tensors, "done": torch.tensor(epoch + 1), "step": torch.tensor(step)}, part)
        told(f"loss {total / len(encoded):.4g}")
    return reader


@torch.no_grad()
def scores(reader: Reader, encoded: Features) -> np.ndarray:
    """score_2M of all tokens where an answer may lie."""
    out = []
    for i in range(0, len(encoded), BATCH):
        context, question = parts(encoded, np.arange(i, min(i + BATCH, len(encoded))))
        found = reader(context, question)
        out += [found[b, :, : len(c)] for b, c in enumerate(context)]
    return torch.cat(out, 1).numpy()


def baseline(session: Session, train: Side, tune: Side, test: Side) -> float:
    """F1 on the reported rows in percent, with a threshold tuned like those of probes."""
    cfg: ProbeConfig = session.cfg
    sets = [s.stored.encoded for s in (train, tune, test)]
    pieces = 1 + max(int(e.ragged["input_ids"].max()) for e in sets)
    path = session.run.file("training", "bidaf.safetensors")
    with session.progress.stage("BiDAF", cfg.bidaf) as bar:
        told = lambda note: bar.advance(1, note)  # noqa: E731
        reader = trained(sets[0], pieces, cfg.bidaf, cfg.seed, path, told)
    found = [spans.answers(scores(reader, s.stored.encoded), s, cfg) for s in (tune, test)]
    given = spans.thresholded(found[1], spans.tuned_threshold(found[0], tune.rows))
    return score.span_fields(test.rows, given, cfg.seed)["f1"]
