"""`python -m hf_retrieval_assist.tools.cli`."""

import sys

from . import main

sys.exit(main())
