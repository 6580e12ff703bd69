"""Promotes the model of a finished run, as `promotion=champion` asks: `scaleflow promote` in a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaleflow.config.trust import list_own_modules
from scaleflow.interfaces import Plan, name_command
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.answer import FINISHED, JSON, NOT_PROMOTED
from scaleflow.launcher.recording.monitor import POLL_SECONDS, RunMonitor

MODULE = "scaleflow.promote"

#: Why a run's model is not promoted, although it could be later.
NOT_RECORDED = "the run is not recorded completely"


def promote_run(monitor: RunMonitor, is_recorded: bool) -> list[tuple[str, str]]:
    """Promotes the model of a run that has ended, if its plan asks for that; returns rows for the last lines.

    The run stays as it is, whatever comes of it.
    """
    spec, state = monitor.spec, monitor.state
    if spec.plan.promotion.name == "none" or not spec.records or spec.trial is not None or state.status != "FINISHED":
        return []
    folder = os.path.relpath(spec.folder)
    later = f"{name_command('promote')} {shlex.quote(folder)}"
    if not is_recorded:
        return [("promoted", f"no: {NOT_RECORDED}; afterwards: {later}")]
    monitor.display.begin_stage(f"deciding about the champion of {spec.plan.promotion.model}")
    code, answer = run_command_promote(monitor, [str(spec.folder), *trust_own_code(spec.plan)])
    if code not in (FINISHED, NOT_PROMOTED):
        why = "stopped" if monitor.stop.is_set() else answer.get("error") or f"the command ended with exit code {code}"
        return [("promoted", f"no: {mask_secrets(why)}; again: {later}")]
    name, version = spec.plan.promotion.model, answer["version"]
    if code == FINISHED:
        before = "" if answer["champion"] in (None, version) else f", before it was version {answer['champion']}"
        return [("promoted", f"models:/{name}/{version} is the champion{before}")]
    reasons = [text for text, holds in answer["conditions"] if not holds]
    rows = [("promoted", f"no: models:/{name}/{version} has the alias challenger")]
    return rows + [("" if n else "because", reason) for n, reason in enumerate(reasons)]


def trust_own_code(plan: Plan) -> list[str]:
    """Returns the flags with which a command uses the code of the user that this run has just used."""
    modules = list_own_modules(plan.config)
    flags = [("--trust", each) for each in modules]
    if modules:
        flags += [("--config-dir", each) for each in plan.search if Path(each).is_dir()]
    return [word for flag in flags for word in flag]


def run_command_promote(monitor: RunMonitor, words: list[str]) -> tuple[int, Mapping[str, Any]]:
    """Runs `scaleflow promote`, and ends it if the user asks for the end; returns its exit code and its answer."""
    signals = monitor.stop.times
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, *words, JSON],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,  # the answer has the error
        )
        try:
            is_over = False
            while not is_over:
                try:
                    process.wait(POLL_SECONDS)
                    is_over = True
                except subprocess.TimeoutExpired:
                    if monitor.stop.times > signals:
                        signals = monitor.stop.times
                        process.terminate()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        output.seek(0)
        lines = output.read().strip().splitlines()
    try:
        return process.returncode, dict(json.loads(lines[-1]))
    except (IndexError, ValueError):
        return process.returncode or 1, {}
