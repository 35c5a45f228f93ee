"""The compiled CPU kernels: C++ over raw pointers, built at first use by the system's compiler."""
