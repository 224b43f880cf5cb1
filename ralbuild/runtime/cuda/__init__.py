"""The decode graph's patch on a GPU, through the driver alone: no torch, compiler or CUDA runtime library."""
