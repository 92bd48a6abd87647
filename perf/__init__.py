"""Measurements: of machine code (`resources`), of running kernels (`bench`), and which sources they belong to."""
