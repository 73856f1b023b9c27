"""Kernels in Triton for CUDA devices, as a plug-in of dpbench (`engine.kernels=triton`)."""
