"""Shows how a step spends its time. Workers trace steps, and a child process analyzes the trace."""

from scaleflow.profiler.analysis_process import analyze_window
