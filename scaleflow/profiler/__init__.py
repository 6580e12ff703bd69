"""Where the time of a step goes: traced in the workers, read in a process of its own, told in words and a picture."""

from scaleflow.profiler.analysis_process import analyze_window

__all__ = ["analyze_window"]
