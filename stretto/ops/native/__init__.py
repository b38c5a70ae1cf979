"""Kernels for CPUs in C++, compiled on this machine when they are first used; beside each stands its torch reference.

    build.py      a source file -> a shared library in the cache folder
    library.py    what is loaded, why something is not, functions to call
    threads.h     loops over the threads that torch has
    *.cpp         a library each, with a C interface; their names and sizes come from `torch.Tensor.data_ptr`

docs/kernels.md says how to add one.
"""
