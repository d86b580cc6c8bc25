"""Host side of the kernels: instantiation, protocol, build, launch, graph. CUDA is touched here and nowhere else."""
