"""`python -m hf_retrieval_assist.cli`."""

import sys

from . import main

sys.exit(main())
