"""Records what a run is made of while its processes start: a thread writes `provenance/` into the run's folder."""

from __future__ import annotations

import threading

from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.recording.store_transfer import format_error
from scaleflow.runs import RunSpec
from scaleflow.runs.provenance.collect import LaunchFacts, record_provenance


class ProvenanceCollector(threading.Thread):
    """Collects what a run is made of. Writes nothing in processes whose events are not the run's.

    Attributes:
        error: why the record is missing or incomplete; empty if it is not.
    """

    def __init__(self, spec: RunSpec, facts: LaunchFacts) -> None:
        super().__init__(name="provenance", daemon=True)
        self._spec = spec
        self._facts = facts
        self.error = ""

    def run(self) -> None:
        if not self._spec.records:
            return
        try:
            record_provenance(self._spec, self._facts)
        except Exception as error:  # the run goes on without the record
            self.error = str(mask_secrets(format_error(error)))
