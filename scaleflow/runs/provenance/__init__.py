"""The provenance of a run: the record of its code, packages, machine and words, and its tags in the store."""

from scaleflow.runs.provenance.tags import RunContext
