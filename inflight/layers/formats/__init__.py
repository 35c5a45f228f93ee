"""Weight formats: how matrices of weights are quantized in memory (`schemes`), and how checkpoints store them.

A `WeightFormat` says which tensors a linear layer has in a checkpoint and turns them into a matrix; its `Scheme` is how
that matrix is held, and the key by which the kernels of a device choose how to multiply it. Layers, loader and planner
know nothing else about a format.
"""
