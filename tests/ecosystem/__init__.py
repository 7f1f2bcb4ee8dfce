"""Other people's code over a model with an attached assistant: `make test-ecosystem`."""
