"""Shows where the time of a step goes: workers trace steps, a child process analyzes the trace and writes a summary."""

from scaleflow.profiler.analysis_process import analyze_window
