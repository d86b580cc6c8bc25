"""The executable specification: target, draft, selector and caches in plain PyTorch, on any device.

One function per equation, named after it; values are rounded exactly where the specification rounds. Sums (matrix
products, means, softmax) are taken in float64 and rounded once to float32: that is what "f32 accumulate" approximates,
and it makes a row's result independent of the rows beside it for all practical purposes.
"""

from sgl_muse_mega import vector_math

vector_math.settle()
