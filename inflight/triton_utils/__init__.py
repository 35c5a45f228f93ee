"""What Triton kernels of several rooms share: programmatic dependent launch, and padding of small tensors."""
