"""Training batches: chunks of freshly drawn problems, tokenised by worker processes in a reproducible order."""

import multiprocessing
import os
from collections.abc import Generator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.layout import pad_width, to_grid
from training.problems import Problem, distinct_problems, problems
from training.tokenizer import PAD, encode_problems

UNSEEN_COUNT = 500
VALIDATION_COUNT = 500
CHUNK = 16384
_MAX_LENGTH = 160


@dataclass(frozen=True, slots=True)
class Examples:
    """Tokenised problems in a grid."""

    ids: Tensor  # int16 [B, T], filled up with the pad token
    lengths: Tensor  # int64 [B], prompt, answer and end of text
    prompts: Tensor  # int64 [B], prompt only

    def rows(self, begin: int, end: int) -> "Examples":
        return Examples(self.ids[begin:end], self.lengths[begin:end], self.prompts[begin:end])

    def to(self, device: torch.device) -> "Examples":
        return Examples(self.ids.to(device), self.lengths.to(device), self.prompts.to(device))


def encode(tokenizer: Tokenizer, items: list[Problem]) -> Examples:
    """Raises ValueError when a problem is longer than the grid."""
    ids, prompts = encode_problems(tokenizer, items)
    if max(map(len, ids)) > _MAX_LENGTH:
        raise ValueError(f"a problem has {max(map(len, ids))} tokens, more than the grid's {_MAX_LENGTH}")
    return Examples(to_grid(ids, PAD, _MAX_LENGTH), torch.tensor([len(row) for row in ids]), torch.tensor(prompts))


def held_out(seed: int) -> tuple[list[Problem], list[Problem]]:
    """The bundled unseen problems and the validation problems."""
    return (
        distinct_problems("unseen", seed, UNSEEN_COUNT),
        distinct_problems("validation", seed, VALIDATION_COUNT),
    )


def batches(
    tokenizer: Tokenizer, seed: int, first: int, batch: int, device: torch.device
) -> Generator[Examples, None, None]:
    """An endless stream of training batches, none of them with a held-out question; chunk numbers start at `first`."""
    workers = max(1, (os.cpu_count() or 2) - 2)
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_worker, (tokenizer.to_str(), seed)) as pool:
        pending = [pool.apply_async(_chunk, (seed, first + i)) for i in range(workers)]
        index = first + workers
        while True:
            ids, lengths, prompts = (torch.from_numpy(part) for part in pending.pop(0).get())
            pending.append(pool.apply_async(_chunk, (seed, index)))
            index += 1
            chunk = Examples(ids, lengths, prompts).to(device)
            for begin in range(0, len(lengths) - batch + 1, batch):
                rows = chunk.rows(begin, begin + batch)
                width = pad_width(int(rows.lengths.max()))
                yield Examples(rows.ids[:, :width], rows.lengths, rows.prompts)


_worker: tuple[Tokenizer, frozenset[str]]


def _start_worker(tokenizer: str, seed: int) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    unseen, validation = held_out(seed)
    _worker = Tokenizer.from_str(tokenizer), frozenset(p.question for p in unseen + validation)


def _chunk(seed: int, index: int) -> tuple[object, object, object]:
    """Chunk number `index` as numpy arrays; a held-out question is left out."""
    tokenizer, excluded = _worker
    items = [p for p in problems("train", (seed << 20) + index + 1, CHUNK) if p.question not in excluded]
    examples = encode(tokenizer, items)
    return examples.ids.numpy(), examples.lengths.numpy(), examples.prompts.numpy()
