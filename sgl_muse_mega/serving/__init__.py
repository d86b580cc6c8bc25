"""The plugin for SGLang 0.5.23: everything of this package that touches SGLang."""
