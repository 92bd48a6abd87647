"""`python -m fmha`."""

import sys

from fmha.cli import main

sys.exit(main())
