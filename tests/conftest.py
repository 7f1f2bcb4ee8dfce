"""Settings of the whole suite."""

import torch
import transformers

transformers.logging.set_verbosity_error()
# The models are tiny; threads would only wait for each other.
torch.set_num_threads(1)
