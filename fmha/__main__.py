"""`python -m fmha`."""

import os
import sys

# The simulator multiplies many small matrices: BLAS threads would only wait for each other. Read when NumPy loads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from fmha.cli import main

sys.exit(main())
