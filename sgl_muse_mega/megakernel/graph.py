"""A step as one CUDA graph, replayed with whatever the input buffers hold."""

import torch

from sgl_muse_mega.megakernel.step import Step


class StepGraphs:
    """One captured graph per number of rows; capturing launches nothing, so it changes no state."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def replay(self, rows: int) -> None:
        """Enqueues the step for the first `rows` rows of the inputs on torch's current stream."""
        if rows not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step.launch(rows)
            self._graphs[rows] = graph
        self._graphs[rows].replay()
