"""Makes the bundled tiny pair: data, tokenizer, training, evaluation and export (see README.md)."""
