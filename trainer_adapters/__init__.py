"""What a trainer needs to stand beside the engine. `parity` makes a stock transformers model compute the engine's bits."""
