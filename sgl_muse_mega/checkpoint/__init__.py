"""Tensors in and out: safetensors shards, NVFP4, the Marlin layout, the bundled tiny pair."""
