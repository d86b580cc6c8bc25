"""Runs the kernels' own sources on the CPU, under seeded schedules and a weak memory (docs/race-testing.md)."""
