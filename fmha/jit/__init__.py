"""Kernels just in time: their names, their compilation, where they are kept, and how they are launched."""
