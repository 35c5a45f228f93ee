"""The compiled CPU arithmetic: C++ over raw pointers, built at first use by the system's compiler."""
