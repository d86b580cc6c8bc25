"""Speculative decoding above the models: randomness, sampling, the accept rules and the step loop."""
