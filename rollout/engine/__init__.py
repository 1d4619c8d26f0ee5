"""The generation engine: ids in, ids and logprobs out."""
