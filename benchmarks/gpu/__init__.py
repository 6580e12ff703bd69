"""What needs an NVIDIA GPU: correctness, memory, profile, speed and sweeps, in one report. docs/performance.md."""
