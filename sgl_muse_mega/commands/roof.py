"""The line that every fraction of the roof is measured against."""

ROOF_GB_S = 4615.0  # measured stream of one H200, docs/measured-facts.md
