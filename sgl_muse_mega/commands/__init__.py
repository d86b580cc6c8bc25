"""What the command line does, one module per command; `cli` declares the options."""
