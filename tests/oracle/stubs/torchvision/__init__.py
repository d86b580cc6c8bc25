"""Stand-in: SGLang imports torchvision for image models; PyPI's wheel does not load beside a CPU build of torch."""

from standin import answer_submodules, names_of

__version__ = "0.0"
answer_submodules(__name__)
__getattr__ = names_of(__name__)
