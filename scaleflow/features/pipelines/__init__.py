"""Pipelines: the commands around a run, declared as stages in one config."""
