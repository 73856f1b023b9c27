"""`executor=graph`: batches repeated as CUDA graphs, by modules that state `masks_padding`."""
