"""The promotion at the end of a run, for `promotion=champion`."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from scaleflow.config.compose import CommandWords
from scaleflow.config.trust import list_own_modules
from scaleflow.errors import ScaleflowError, read_reason
from scaleflow.features.promotion.feature import PromotionOptions
from scaleflow.interfaces import name_command
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.display import hidden_display
from scaleflow.launcher.processes.stop import Stopped
from scaleflow.launcher.recording.monitor import RunMonitor
from scaleflow.launcher.run_end import EndTask
from scaleflow.runs import RunSpec

#: Why a model is not promoted yet.
NOT_RECORDED = "the run is not recorded completely"


@dataclass(frozen=True)
class PromoteModel(EndTask):
    """Promotes the model of a finished run if its plan requests that."""

    def run(self, monitor: RunMonitor, is_recorded: bool) -> list[tuple[str, str]]:
        spec = monitor.spec
        options = spec.plan.of(PromotionOptions)
        is_wanted = options.name != "none" and spec.records and spec.task.trains
        if not is_wanted or monitor.state.status != "FINISHED":
            return []
        later = f"{name_command('promote')} {shlex.quote(os.path.relpath(spec.folder))}"
        if not is_recorded:
            return [("promoted", f"no: {NOT_RECORDED}; afterwards: {later}")]
        monitor.display.begin_phase(f"deciding about the champion of {options.model}")
        try:
            from scaleflow.features.promotion.steps import promote_if_better

            done = promote_if_better(trust_own_code(spec), hidden_display(), monitor.stop)
        except Exception as error:
            why = str(error) if isinstance(error, ScaleflowError | Stopped) else read_reason(error)
            return [("promoted", f"no: {mask_secrets(why)}; again: {later}")]
        model = f"models:/{done.name}/{done.version}"
        if done.decision.is_promoted:
            before = "" if done.champion in (None, done.version) else f", before it was version {done.champion}"
            return [("promoted", f"{model} is the champion{before}")]
        rows = [("promoted", f"no: {model} has the alias challenger")]
        return rows + [("" if n else "because", reason) for n, reason in enumerate(done.decision.reasons)]


def trust_own_code(spec: RunSpec) -> CommandWords:
    """Returns the promotion command for a run. It trusts the user's code that the run itself used."""
    modules = list_own_modules(spec.plan.config)
    folders = [folder for folder in spec.plan.search if Path(folder).is_dir()] if modules else []
    line = [*name_command("promote").split(), str(spec.folder)]
    return CommandWords(config_dirs=folders, run_id=str(spec.folder), trusted=modules, line=line)
